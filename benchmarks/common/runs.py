"""Reads run folders in whatever state a run has left them; only `config.json` and `metrics.jsonl` are read."""

import json
import math
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from benchmarks.common.programs import PEERS, SUFFIX, VARIANTS

LAST_EPISODES = 100  # a run's score is the mean training return of this many episodes at its end, as in CleanRL
DONE = 0.99  # share of the budget from which a run counts as complete


SIZES = "num_steps", "num_workers", "envs_per_worker", "num_envs", "num_runners", "envs_per_runner"
USUAL = {"matmul_precision": "highest", "bf16": False, "rollout": "batched", "sync_gradients": True}
PACE = "num_envs", "gradient_steps"


def in_flags(values: dict) -> str:
    """Settings as they are typed."""
    words = {name: name.replace("_", "-") for name in values}
    flags = [f"--{'no-' * (x is False)}{words[name]}" for name, x in values.items()]
    given = ["" if isinstance(x, bool) else " " + shlex.quote(str(x)) for x in values.values()]
    return " ".join(flag + value for flag, value in zip(flags, given, strict=True))


@dataclass(eq=False)
class Run:
    """A run: its configuration, the lines of its log in order of steps, and any problems found with these."""

    dir: Path
    config: dict
    lines: list[dict]
    problems: list[str] = field(default_factory=list)
    failed: bool = False  # by the word of the sweep that ran it
    was_longer: bool = False  # it is shown as it was before its end

    @property
    def args(self) -> dict:
        """The settings at the run's end: those that it began with, updated by the changes made when it was resumed."""
        args = dict(self.config.get("args", {}))
        for resumed in self.config.get("resumed", []):
            args |= resumed.get("changed", {})
        return args

    @property
    def script(self) -> str:
        """Name of the pair."""
        return Path(self.config.get("script", "unknown")).stem.removesuffix(SUFFIX)

    @property
    def env_id(self) -> str:
        return self.args.get("env_id", "unknown")

    @property
    def seed(self) -> int | None:
        return self.args.get("seed")

    @property
    def variant(self) -> str:
        """A key of `programs.VARIANTS`, or a peer; CUDA graphs count only where there was CUDA."""
        if "peer" in self.config:
            return self.config["peer"]
        if not Path(self.config.get("script", "")).stem.endswith(SUFFIX):
            return "eager"
        on_cuda = self.config.get("device", "cpu") != "cpu"
        flags = (self.args.get("compile", False), self.args.get("cudagraphs", False) and on_cuda)
        return {(False, False): "lean", (True, False): "compile", (False, True): "cudagraphs"}.get(
            flags, "compile+cudagraphs"
        )

    @property
    def is_known(self) -> bool:
        """Whether its configuration names a script and an environment."""
        return "unknown" not in (self.script, self.env_id)

    @property
    def commits(self) -> list[str]:
        """The commit that the run began with and, if it was resumed, those that it continued with."""
        resumed = [x.get("commit") for x in self.config.get("resumed", [])]
        return list(dict.fromkeys(str(commit) for commit in [self.config.get("commit"), *resumed]))

    @property
    def variation(self) -> str:
        """The flags by which a run computes in less than float32 precision or collects differently; empty if none."""
        others = {name: self.args[name] for name in USUAL if self.args.get(name, USUAL[name]) != USUAL[name]}
        if others.get("matmul_precision") == "auto" and self.config.get("device", "cpu") == "cpu":
            del others["matmul_precision"]  # there it is as exact as "highest"
        return in_flags(others)

    @property
    def pace(self) -> str:
        """The flags that set the ratio of data collected to updates."""
        return in_flags({name: x for name in PACE if (x := self.args.get(name)) is not None})

    @property
    def steps(self) -> int:
        """Environment steps of the last line."""
        return int(self.lines[-1]["global_step"]) if self.lines else 0

    @property
    def seconds(self) -> float:
        """Wall time of the last line."""
        return float(self.lines[-1]["seconds"]) if self.lines else 0.0

    @property
    def rollout(self) -> int:
        """Rows of a rollout; 1 where there are none."""
        return math.prod(self.args.get(name, 1) or 1 for name in SIZES) if "num_steps" in self.args else 1

    @property
    def budget(self) -> int | None:
        """Environment steps that the run was meant to take: whole rollouts, if it has rollouts."""
        total = self.args.get("total_timesteps")
        return total and total // self.rollout * self.rollout

    @property
    def is_complete(self) -> bool:
        # A PPO rollout has fewer steps than rows, as a row in which an environment resets is no step. So rollouts are
        # counted, one per log line; over Ray, where lines come by steps, ended episodes count the resets instead
        if self.budget is None or self.failed:  # its settings can't be read, or the sweep says so
            return False
        if "num_steps" in self.args and "log_every" not in self.args:
            return bool(self.lines) and len(self.lines) >= DONE * self.budget / self.rollout
        resets = np.nansum(self.column("charts/episodes")) if "num_steps" in self.args else 0
        return bool(self.lines) and self.steps + resets >= DONE * self.budget

    def until(self, end: float, position: str = "global_step") -> "Run":
        """The run as it was after so many steps or, by `position`, seconds."""
        return replace(self, lines=[line for line in self.lines if line[position] <= end])

    def shortened(self, steps: int) -> "Run":
        """The run as if it had been meant to end after so many steps, with a note; itself if it was not longer."""
        total = self.args.get("total_timesteps") or 0
        if total <= steps:
            return self
        resumed = [x for x in self.config.get("resumed", []) if x.get("global_step", 0) < steps]
        config = self.config | {"resumed": resumed}
        args = replace(self, config=config).args | {"total_timesteps": steps}
        config |= {"args": args, "resumed": [x | {"changed": {}} for x in resumed]}
        note = f"as it was after {steps:,} of {total:,} steps"
        return replace(self.until(steps), config=config, problems=[*self.problems, note], was_longer=True)

    def column(self, name: str) -> np.ndarray:
        """A metric (lines,), NaN where a line does not have it."""
        return np.array([number(line.get(name)) for line in self.lines])

    def episodes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of the lines in which episodes ended: their index (E,), mean return (E,) and number of episodes (E,)."""
        returns, counts = self.column("charts/episodic_return"), self.column("charts/episodes")
        index = np.flatnonzero(~np.isnan(returns))
        return index, returns[index], np.nan_to_num(counts[index], nan=1.0)  # one episode where no number is given


def number(value) -> float:
    """A finite number as a float, anything else as NaN."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else math.nan


def parse_line(text: str) -> dict | None:
    """A line of the log; None if it is broken, or lacks its step or time."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    if not isinstance(line, dict) or any(math.isnan(number(line.get(key))) for key in ("global_step", "seconds")):
        return None
    return line


def read_lines(path: Path) -> tuple[list[dict], int]:
    """The valid lines of a log, in ascending steps, and how many are broken."""
    return parse_lines(path.read_text(errors="replace") if path.exists() else "")


def parse_lines(content: str) -> tuple[list[dict], int]:
    """The same of a log's text. If steps go back, later lines win."""
    lines, broken = [], 0
    for text in content.splitlines():
        line = parse_line(text)
        if line is None:
            broken += bool(text.strip())
            continue
        while lines and lines[-1]["global_step"] >= line["global_step"]:
            lines.pop()
        lines.append(line)
    return lines, broken


def check_config(config: dict) -> None:
    """Raises ValueError, TypeError or AttributeError for what no script writes."""
    args = dict(config.get("args", {}))
    for resumed in config.get("resumed", []):
        args |= resumed.get("changed", {})
    if not isinstance(config.get("script", ""), str):
        raise ValueError
    for name in ("total_timesteps", "seed", *SIZES):
        if not isinstance(args.get(name, 1), int | None):
            raise ValueError


def read_run(folder: Path) -> Run:
    """The run in a folder; its `problems` list what is missing or broken."""
    problems = []
    try:
        config = json.loads((folder / "config.json").read_text())
        check_config(config)
    except OSError:
        config, problems = {}, ["no config.json"]
    except (ValueError, TypeError, AttributeError):
        config, problems = {}, ["config.json is broken"]
    lines, broken = read_lines(folder / "metrics.jsonl")
    run = Run(folder, config, lines, problems)
    if not problems and not run.is_known:
        problems.append("config.json names no script or no environment")
    if not lines:
        problems.append("no line in metrics.jsonl")
    if broken:
        problems.append(f"{broken} broken line{'s' * (broken != 1)} in metrics.jsonl")
    if lines and not len(run.episodes()[0]):
        problems.append("no episode ended")
    if lines and run.budget is not None and not run.is_complete:
        problems.append(f"ended after {run.steps:,} of {run.budget:,} steps")
    return run


def find_runs(folders: list[Path]) -> list[Run]:
    """The runs in these folders or below them, without duplicates."""
    found = {}
    for folder in folders:
        logs = [*folder.rglob("config.json"), *folder.rglob("metrics.jsonl")]
        found |= dict.fromkeys(sorted(path.parent.resolve() for path in logs))
    return [read_run(folder) for folder in found]


def thin(run: Run, count: int) -> Run:
    """The run reduced to about `count` lines, each the mean return of a group of lines: enough to draw its curve."""
    index, returns, counts = run.episodes()
    lines = []
    for group in [x for x in np.array_split(np.arange(len(index)), count) if len(x)]:
        last, mean = run.lines[index[group[-1]]], float(np.average(returns[group], weights=counts[group]))
        line = {"global_step": last["global_step"], "seconds": last["seconds"]}
        lines.append(line | {"charts/episodic_return": round(mean, 3), "charts/episodes": int(counts[group].sum())})
    if run.steps > (lines[-1]["global_step"] if lines else 0):
        lines.append({"global_step": run.steps, "seconds": run.seconds})  # where the curve ends
    return replace(run, lines=lines)


def final_return(run: Run, episodes: int = LAST_EPISODES) -> float:
    """Mean training return of the last episodes of a run; NaN if none ended.

    A line holds the mean over the episodes since the previous line, so lines are weighted by their number of episodes;
    the line that contains the hundredth-last episode counts only as far as needed.
    """
    _, returns, counts = run.episodes()
    before = np.cumsum(counts[::-1]) - counts[::-1]  # episodes after each line, from the last line on
    weights = np.clip(episodes - before, 0, counts[::-1])
    return float(np.average(returns[::-1], weights=weights)) if weights.sum() > 0 else math.nan


def running_returns(run: Run, episodes: int = LAST_EPISODES) -> np.ndarray:
    """For each line (lines,) the mean return of the last `episodes` episodes up to it; NaN while there are fewer.

    As in `final_return`, each episode of a line counts with the line's mean.
    """
    index, returns, counts = run.episodes()
    ended = np.concatenate([[0.0], counts.cumsum()])  # episodes up to each line that has some
    totals = np.concatenate([[0.0], (counts * returns).cumsum()])
    means = (totals[1:] - np.interp(ended[1:] - episodes, ended, totals)) / episodes
    result = np.full(len(run.lines), np.nan)
    result[index] = np.where(ended[1:] >= episodes, means, np.nan)
    return result


def reaches(lines: list[dict], score: float, episodes: int = LAST_EPISODES) -> int | None:
    """Index of the first line at which the mean return of the last episodes reaches the score; None if none does."""
    found = np.flatnonzero(running_returns(Run(Path(), {}, lines), episodes) >= score)
    return int(found[0]) if len(found) else None


def learning_curve(run: Run, edges: np.ndarray, axis: str = "global_step") -> np.ndarray:
    """Mean return in the bins between `edges` (B + 1,), in steps or, by `axis`, in seconds -> (B,).

    A bin in which no episode ended repeats the one before it; bins before the first episode, or after the end of the
    run, are NaN.
    """
    index, returns, counts = run.episodes()
    position = run.column(axis)
    bins = np.searchsorted(edges, position[index], side="left") - 1
    inside = (bins >= 0) & (bins < len(edges) - 1)
    weight = np.bincount(bins[inside], counts[inside], minlength=len(edges) - 1)
    total = np.bincount(bins[inside], (counts * returns)[inside], minlength=len(edges) - 1)
    curve = np.divide(total, weight, out=np.full(len(edges) - 1, np.nan), where=weight > 0)
    filled = np.maximum.accumulate(np.where(weight > 0, np.arange(len(curve)), -1))
    curve = np.where(filled >= 0, curve[filled], np.nan)
    curve[edges[:-1] >= (position[-1] if len(position) else 0)] = np.nan
    return curve


def groups(runs: list[Run]) -> dict[tuple[str, str, str], list[Run]]:
    """Runs by (script, environment, variant), in the order of names and of `programs.VARIANTS`.

    Runs with a `variation` are a variant of their own, with its flags after the name; so are runs of another `pace`,
    if the runs of one script and environment differ in it.
    """
    order, paces = [*VARIANTS, *PEERS], {}
    for run in runs:
        paces.setdefault((run.script, run.env_id), set()).add(run.pace)

    def key(run: Run) -> tuple:
        place = order.index(run.variant) if run.variant in order else len(order)
        own = run.args.get("num_envs") or 0, run.pace
        return run.script, run.env_id, place, run.variant, run.variation, *own, str(run.seed)

    result = {}
    for run in sorted(runs, key=key):
        pace = run.pace if len(paces[run.script, run.env_id]) > 1 else ""
        variant = " ".join(x for x in (run.variant, run.variation, pace) if x)
        result.setdefault((run.script, run.env_id, variant), []).append(run)
    return result


def one_per_seed(runs: list[Run]) -> tuple[list[Run], list[Run]]:
    """(kept, dropped): of runs with the same seed the longest is kept, as a repeated run is not another sample."""
    best = {}
    for run in runs:
        if run.seed not in best or run.steps > best[run.seed].steps:
            best[run.seed] = run
    kept = list(best.values())
    return kept, [run for run in runs if run not in kept]
