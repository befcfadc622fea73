"""How long it takes from pressing Enter to a policy that is good enough: ./run.sh time-to-score.

A task is a pair on an environment for which CleanRL publishes a score. For each task the contestants run in turn, seed
by seed, the order reversed from seed to seed (A B B A): eager, compiled with an empty and with a filled compile cache,
and other libraries with the same settings. A run is stopped when it reaches the score; otherwise it runs to its end.

Measures: the wall time from the start of the process, imports and compiling included, until the mean return of the last
100 training episodes first reaches the score; and the share of runs that reach it.
Takes: at the defaults about eleven hours on two cores, of which CartPole and Acrobot take two and a half;
`--tasks ppo:CartPole-v1` takes 25 minutes. SAC and TD3 are measured only if named: reaching CleanRL's score takes them
two days.
Leaves: in --out one JSON file per task, rewritten after each seed, and time_to_score.md and time_to_score.png from all
JSON files there. The same command goes on where it was stopped, if code and machine are the same and all
code is committed.
"""

import os
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from tqdm import tqdm

from benchmarks.common import plots, processes, runs, stats, steady, turns
from benchmarks.common.pairs import TABLE
from benchmarks.common.programs import (
    VARIANTS,
    Variant,
    check_installed,
    check_known,
    check_once,
    check_positive,
    check_seeds,
    check_settings,
    command,
    default_variants,
    fail,
    pairs,
    peers_of,
    split_flags,
)
from benchmarks.common.results import (
    Target,
    describe,
    estimate,
    load_all,
    machine_of,
    make_folder,
    provenance,
    say_written,
    short,
    stoppable,
    table,
)
from benchmarks.learning import report
from benchmarks.throughput import peers

LOOK = 0.5  # seconds between two reads of a log: the time that counts is the line's, not the read's
DEFAULT = ("ppo", "dqn")  # algorithms whose tasks are measured if no task is named
HEADER = ("got there", "seconds until then [95 %]", "seconds for each that got there", "steps of those, median")
INTRODUCTION = f"""
Wall time from the start of the process, imports and compiling included, until the mean return of the last
{runs.LAST_EPISODES} training episodes first reaches a score. A run that never does counts with its whole length. "For
each that got there": the time of all runs divided by the number of those that got there, which is what somebody waits
who starts anew whenever a run was in vain. "Times as fast" are ratios of these; beside one that never got there, of the
mean time until it was ended. "≥": a bound, since runs did not get there. A run that failed is counted beside them and
left out. Cold: the compile cache is empty; warm: an earlier run has filled it. Means have Student's intervals. Those of
ratios, by the bootstrap, are too narrow: in a simulation (`tests/test_benchmark_stats.py`) with five seeds, what is
called 95 % held the truth in 87 % of cases, and in 70 % if one of two contestants gets there in four of five runs only.
""".strip()


@dataclass
class Options:
    tasks: tuple[str, ...] = ()  # as in ppo:CartPole-v1; by default those of PPO and DQN with a published score
    variants: tuple[Variant, ...] = ()  # by default all worth running here; compiled ones with cold and warm caches
    peers: tuple[Literal["sb3", "sbx"], ...] = ("sb3", "sbx")  # libraries to measure beside them
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    score: float | None = None  # mean return to reach; by default the one that CleanRL publishes
    flags: str = ""  # extra flags for all contestants, as in --flags="--total-timesteps 200000"
    timeout: float = 14_400.0  # seconds after which a run is ended and counts as never having reached the score
    out: Path = Path("runs/time-to-score")  # results folder; that of RESULTS.md is benchmarks/results/time_to_score


@dataclass(frozen=True)
class Contestant:
    """A way to train for a task."""

    name: str
    program: str  # a variant of the pair, or a peer
    flags: tuple[str, ...] = ()
    cache: str | None = None  # cold or warm; None for a program that compiles nothing


def contestants_of(variants: list[str] | tuple[str, ...], own_peers: tuple[str, ...]) -> list[Contestant]:
    """The variants and peers; compiled variants once with each cache."""
    found = []
    for variant in variants:
        caches = ("cold", "warm") if variant.startswith("compile") else (None,)
        found += [Contestant(f"{variant} ({x})" if x else variant, variant, cache=x) for x in caches]
    return found + [Contestant(peer, peer) for peer in own_peers]


def written(log: Path) -> tuple[list[dict], float]:
    """(lines of a log, seconds on the clock of time.time() at which the last was written); ([], 0.0) without a log."""
    if not log.exists():
        return [], 0.0
    with log.open("rb") as file:  # what is written from now on is read the next time
        known = os.fstat(file.fileno())
        text = file.read(known.st_size).decode(errors="replace")
    return runs.parse_lines(text)[0], known.st_mtime


def run_once(
    arguments: list[str], find: Callable[[list[dict]], int | None], timeout: float, **environment: str
) -> dict:
    """Run a program until `find` returns the index of a line of its log, or for at most `timeout` seconds.

    Returns whether it `reached` such a line; the `seconds` until that was written, or else until the end; the `steps`
    up to then; the `best` mean return over the last episodes; and why it `failed`, if it did.
    """
    with tempfile.TemporaryDirectory() as folder:
        log, lines, found, last = Path(folder, "run", "metrics.jsonl"), [], None, 0.0
        begin = time.time()
        child = processes.start([*arguments, "--run-dir", str(log.parent)], Path(folder, "output"), **environment)
        try:
            while found is None and child.poll() is None and time.time() - begin < timeout:
                child.wait(LOOK)
                lines, last = written(log)
                found = find(lines)
        finally:
            has_ended, failure = child.poll() is not None, child.failure()
            child.stop()
        if has_ended and found is None:  # what it wrote after the last look
            lines, last = written(log)
            found = find(lines)
        means = runs.running_returns(runs.Run(log, {}, lines))
        best = {"best": float(np.nanmax(means)) if not np.isnan(means).all() else None}
        if found is not None:
            # The log's clock starts later than the process; the last line shows by how much
            seconds = last - begin - (lines[-1]["seconds"] - lines[found]["seconds"])
            return {"reached": True, "seconds": seconds, "steps": lines[found]["global_step"], **best}
        result = {"reached": False, "seconds": child.seconds if has_ended else timeout}
        result |= {"steps": lines[-1]["global_step"] if lines else 0, **best}
        if has_ended and failure:
            tqdm.write(child.last_lines())
            result["failed"] = failure
        return result


def is_warm(lines: list[dict]) -> int | None:
    """Index of a line by which everything has been compiled."""
    first = steady.first_update(lines)
    return first if first is not None and len(lines) > first + steady.FIRST_LINES else None


def measure(
    task: tuple[str, str],
    score: float,
    contestants: list[Contestant],
    seeds: tuple[int, ...],
    timeout: float,
    on_seed: Callable[[dict[str, list[dict]]], None],
    bar: tqdm,
    begun: dict[str, list[dict]],
) -> None:
    """Run all contestants on a task (script, environment) with each seed; `on_seed` gets all results by name.

    `begun` holds the results of a run that was stopped before its last seed: the seeds in it are not run again.
    """
    script, env_id = task
    results, find = {x.name: begun.get(x.name, []) for x in contestants}, partial(runs.reaches, score=score)
    done = min(map(len, results.values()))
    if done == len(seeds):  # that was a whole one
        results, done = {x.name: [] for x in contestants}, 0
    if done:
        tqdm.write(f"{script} on {env_id}: going on after {done} of {len(seeds)} seeds, measured before")
        bar.update(done * len(contestants))
    with tempfile.TemporaryDirectory() as folder:

        def run(contestant: Contestant, seed: int, cache: str, find: Callable) -> dict:
            flags = [*contestant.flags, "--env-id", env_id, "--seed", str(seed)]
            arguments = [*command(script, contestant.program), *flags]
            bar.set_postfix_str(f"{script} on {env_id}: {contestant.name}, seed {seed}")
            place = Path(folder, re.sub(r"\W+", "_", cache))  # Inductor does not quote a path with a space
            return run_once(arguments, find, timeout, TORCHINDUCTOR_CACHE_DIR=str(place))

        for contestant in [x for x in contestants if x.cache == "warm"]:
            filled = run(contestant, 0, contestant.name, is_warm)
            is_cut_off = not filled["reached"] and filled["seconds"] >= timeout
            if why := f"no end after {timeout:g} s" if is_cut_off else filled.get("failed"):
                fail(f"{script} on {env_id}, {contestant.name}: the run that fills its cache failed, {why}")
        for i, contestant in list(turns.in_turns(contestants, len(seeds)))[done * len(contestants) :]:
            cache = f"{contestant.name} {seeds[i]}" if contestant.cache == "cold" else contestant.name
            results[contestant.name].append({"seed": seeds[i], **run(contestant, seeds[i], cache, find)})
            bar.update()
            if min(map(len, results.values())) == i + 1:
                on_seed(results)


def has_failed(known: dict[str, list[dict]]) -> bool:
    return any("failed" in x for own in known.values() for x in own)


def rows_of(results: list[dict]) -> np.ndarray:
    """(seconds, whether it got there) of each run that did not fail: (runs, 2)."""
    return np.array([(x["seconds"], x["reached"]) for x in results if "failed" not in x], dtype=float).reshape(-1, 2)


def each_success(rows: np.ndarray) -> float:
    """Total seconds of all runs per run that reached the score; infinity if none did."""
    seconds, reached = rows.sum(0)
    return seconds / reached if reached else np.inf


def times_as_fast(strata: list[np.ndarray]) -> np.ndarray:
    """How many times as fast the first of two contestants is: 0 or infinity if one never gets there, 1 if neither."""
    first, second = map(each_success, strata)
    return np.array(1.0 if first == second else second / first)


def summarize(results: list[dict]) -> dict:
    """A contestant's runs: how many, `reached` and `failed`; `mean` seconds, `interval`, `each`, and median `steps`."""
    rows = rows_of(results)
    if not len(rows):
        return {"runs": 0, "failed": len(results)}
    steps = [x["steps"] for x in results if x["reached"]]
    summary = {"runs": len(rows), "reached": int(rows[:, 1].sum()), "failed": len(results) - len(rows)}
    enough = len(rows) >= report.MIN_SEEDS
    summary |= {"mean": float(rows[:, 0].mean()), "interval": stats.student_interval(rows[:, 0]) if enough else None}
    return summary | {"each": float(each_success(rows)), "steps": float(np.median(steps)) if steps else None}


def reached(results: list[dict]) -> bool:
    """Whether any run got to the score."""
    rows = rows_of(results)
    return bool(len(rows) and rows[:, 1].any())


def beside(results: list[dict], others: list[dict]) -> tuple[float, list[float]] | None:
    """How many times as fast the first is, and the ends of the interval, the ratio itself where it has none.

    The upper end is infinite if so few of the others got there that it may have been chance.

    None unless some runs of both got to the score.
    """
    if not reached(results) or not reached(others):
        return None
    strata = [rows_of(results), rows_of(others)]
    ratio = float(times_as_fast(strata))
    ends = report.interval(strata, times_as_fast) or [ratio, ratio]
    return ratio, ends


def compared(results: list[dict], others: list[dict]) -> str:
    """A cell: how many times as fast the first is, with the interval; a bound if the second never gets there."""
    strata = [rows_of(results), rows_of(others)]
    if not all(map(len, strata)) or not strata[0][:, 1].any():
        return "-"
    if not strata[1][:, 1].any():
        return f"≥ {strata[1][:, 0].mean() / each_success(strata[0]):.2f}"
    return estimate(float(times_as_fast(strata)), report.interval(strata, times_as_fast), ".2f")


def mean_cell(own: dict, form: str) -> str:
    """The mean seconds of a summary; only a bound, so without an interval, if a run did not get there."""
    is_bound = own["reached"] < own["runs"] + own["failed"]
    return "≥ " * is_bound + estimate(own["mean"], None if is_bound else own["interval"], form)


def cells(name: str, results: list[dict], others: list[list[dict] | None]) -> list[str]:
    """A row of a table: a contestant's times, and how many times as fast as each of the others it was."""
    own = summarize(results)
    if not own["runs"]:
        return [name, f"{own['failed']} failed", *["-"] * (3 + len(others))]
    there = f"{own['reached']} of {own['runs']}" + f", {own['failed']} failed" * bool(own["failed"])
    each = f"{own['each']:,.1f}" if own["reached"] else "never"
    steps = f"{own['steps']:,.0f}" if own["steps"] else "-"
    ratios = [compared(results, x) if x and x is not results else "-" for x in others]
    return [name, there, mean_cell(own, ",.1f"), each, steps, *ratios]


def section(result: dict) -> list[str]:
    """What Markdown says on one task."""
    contestants = result["contestants"]
    header = ["program", *HEADER, "times as fast as SB3 [95 %]", "as eager [95 %]"]
    others = [contestants.get("sb3"), contestants.get("eager")]
    rows = [cells(plots.label(name), own, others) for name, own in contestants.items()]
    title = f"## {result['script']} on {result['env_id']}, to {result['score']:,g}"
    lines = [title + f" ({result['flags']})" * bool(result["flags"]), "", *table(header, rows), ""]
    known = peers.differences(result["script"], list(contestants), result["differences"])
    lines += [f"{plots.label(peer)} differs: {text}.\n" for peer, text in known.items()]
    return [*lines, f"Seeds {', '.join(map(str, result['seeds']))}; measured {describe(result['provenance'])}", ""]


def draw(results: list[dict], path: Path) -> None:
    """For each task the share of runs that have reached the score, over time."""
    with plots.grid(path, len(results)) as axes:
        for axis, result in zip(axes, results, strict=True):
            for name, own in result["contestants"].items():
                rows = rows_of(own)
                times, ends = np.sort(rows[rows[:, 1] > 0, 0]), rows[:, 0].max(initial=0)
                shares = np.arange(len(times) + 1) / max(len(rows), 1)
                style = {"where": "post", "color": plots.colour(name), "label": plots.label(name)}
                style["linestyle"] = ":" if "cold" in name else "-"
                axis.step([0, *times, ends], [*shares, shares[-1]], **style)
            title = f"{result['script']} on {result['env_id']}, to {result['score']:,g}"
            title += f"\n{machine_of(result['provenance'])}"
            plots.describe_axis(axis, title, "wall time (s)", "share that got there")
        # One legend for all, above them: inside an axis it would hide a curve
        named = {name: line for axis in axes for line, name in zip(*axis.get_legend_handles_labels(), strict=True)}
        axes[0].figure.legend(
            named.values(), named.keys(), loc="outside upper center", ncols=len(named) if len(axes) > 1 else 3
        )


def write_summary(out: Path) -> str:
    """Make `time_to_score.md` and `time_to_score.png` of all results in a folder; returns the Markdown."""
    results = load_all(out, "contestants", "score")
    lines = ["# Time to score", "", INTRODUCTION, "", "![share that got there](time_to_score.png)", ""]
    text = "\n".join(lines + [line for result in results for line in section(result)])
    if results:
        (out / "time_to_score.md").write_text(text)
        draw(results, out / "time_to_score.png")
    return text


def file_name(*words: str) -> str:
    """The file name of a result, from the words that identify it."""
    return short(re.sub(r"[^\w.-]+", "_", "_".join(words)).strip("_")) + ".json"


def published(script: str, env_id: str) -> float:
    """The score that CleanRL publishes; refused if there is none."""
    row = report.read_reference().get((script, env_id))
    if row is None:
        fail(f"CleanRL publishes no score of {script} on {env_id}: name one with --score")
    return float(row["mean_return"])


def check(options: Options) -> list[tuple[str, str]]:
    """Refuse what can't work; returns the tasks (script, environment)."""
    own = [f"{name}:{env_id}" for name, pair in TABLE.items() if pair.peers in DEFAULT for env_id in pair.scored]
    tasks = [tuple(task.split(":", 1)) for task in options.tasks or own]
    if wrong := [task for task in tasks if len(task) != 2]:
        fail(f"--tasks {wrong[0][0]}: name script and environment, as in ppo:CartPole-v1")
    check_known("script", [script for script, _ in tasks], pairs())
    check_positive(options, "timeout")
    if not np.isfinite(options.score or 0):
        fail("--score must be a number")
    check_seeds(options)
    check_once(options, "tasks", "variants", "peers")
    split_flags(options.flags, "--env-id", "--seed")
    check_installed(options.peers)
    make_folder(options.out)
    load_all(options.out, "contestants", "score")
    return tasks


def main(options: Options) -> int:
    tasks = check(options)
    plans = []
    for script, env_id in tasks:
        own = contestants_of(options.variants or default_variants(), options.peers if "sb3" in peers_of(script) else ())
        score = published(script, env_id) if options.score is None else options.score
        flags = tuple(split_flags(options.flags))
        for x in [x for x in own if x.program in VARIANTS]:
            check_settings([*command(script, x.program), *flags, "--env-id", env_id])
        plans.append(((script, env_id), score, [replace(x, flags=flags) for x in own]))
    total = sum(len(contestants) * len(options.seeds) for _, _, contestants in plans)
    targets = []
    for task, score, contestants in plans:
        path, names = options.out / file_name(*task, options.flags), [x.name for x in contestants]
        effort = {"timeout": options.timeout}
        question = {"score": score, "contestants": names, "flags": options.flags}
        targets.append(Target(path, effort, **question, seeds=list(options.seeds)))
    begun = [target.begun().get("contestants", {}) for target in targets]
    lacks = [not x or has_failed(x) or min(map(len, x.values())) < len(options.seeds) for x in begun]
    is_whole, measured = [not x for x in lacks], []
    with stoppable(f"the seeds that were finished before lie in {options.out}"), tqdm(total=total, unit="run") as bar:
        for i, (task, score, contestants) in enumerate(plans):
            target = targets[i]
            if is_whole[i] and not all(is_whole):  # this command was stopped in a later task
                tqdm.write(f"{task[0]} on {task[1]}: measured before")
                bar.update(len(contestants) * len(options.seeds))
                continue
            shared = {"script": task[0], "env_id": task[1], "score": score, "flags": options.flags}
            shared["timeout"] = options.timeout
            shared["differences"] = peers.differences(task[0], [x.name for x in contestants])

            def on_seed(known: dict, shared: dict = shared, target: Target = target) -> None:
                seeds = [x["seed"] for x in next(iter(known.values()))]
                result = {**shared, "seeds": seeds, "contestants": known, "provenance": provenance()}
                target.write(result, is_whole=len(seeds) == len(options.seeds) and not has_failed(known))
                write_summary(options.out)

            measure(task, score, contestants, options.seeds, options.timeout, on_seed, bar, begun[i])
            measured.append(target)
    print(write_summary(options.out))
    return say_written(options.out, measured, "time_to_score.md", "time_to_score.png")
