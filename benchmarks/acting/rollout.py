"""How fast environments are sampled, with the policy compiled or not: ./run.sh rollout.

End to end: observation -> action, log-probability, value -> step of all environments -> rows of a rollout, for each
family of environments, number of environments and backend. `--compile-actor` runs the act function
(`acting/networks.py`) by a path of `acting/paths.py`; each is measured in its own process, in blocks interleaved with
blocks of the uncompiled policy (`off`) on the same environments.

Measures: environment steps/s of sampling alone, beside those of the uncompiled policy; compile time is separate.
Takes: at the defaults about fifteen minutes on two cores; --families, --num-envs and --compile-actor shorten it.
Leaves: in --out rollout.json, rollout.md and rollout.png.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tqdm import tqdm

from benchmarks.acting.rollout_worker import ACTORS, FAMILIES
from benchmarks.common import plots, turns
from benchmarks.common.programs import check_known, check_once, check_positive, fail, num_cores
from benchmarks.common.results import Target, describe, estimate, make_folder, provenance, say_written, stoppable, table

BACKENDS = ("gymnasium", "gymnasium-sync", "envpool")

INTRODUCTION = """
Environment steps per second of sampling alone: the policy's whole act function, the step of all environments, and the
rows of a rollout; no learning. `off` is the policy in eager PyTorch, `numpy` the way the scripts act on a CPU. Each is
measured in blocks that are interleaved with blocks of `off`, in the same process on the same environments: steps/s are
the median over blocks, "to off" is the geometric mean of the ratios of two neighbouring blocks with its 95 % interval
(Student's, of the logarithms). "gymnasium" is one worker process for each of several environments, "gymnasium-sync"
steps them in the process; Atari's games are EnvPool's, and their CNN has no NumPy version. Compile time is that of
building and of the first calls, with nothing cached.
""".strip()


@dataclass
class Options:
    families: tuple[str, ...] = tuple(FAMILIES)  # classic (CartPole), mujoco (HalfCheetah), atari (Breakout)
    num_envs: tuple[int, ...] = (1, 8)  # environments side by side
    backends: tuple[Literal["gymnasium", "gymnasium-sync", "envpool"], ...] = BACKENDS  # what steps them
    compile_actor: tuple[Literal["off", "inductor", "aoti", "ort", "cudagraphs", "numpy"], ...] = ()  # default: all
    device: Literal["cpu", "cuda"] = "cpu"  # where the policy acts
    threads: int = 1  # threads of PyTorch and of onnxruntime
    seconds: float = 2.0  # seconds for which each contestant is timed
    jobs: int | None = None  # processes that compile in parallel; by default one per core
    timeout: float = 600.0  # seconds that a process may take to compile, and again to measure
    time_limit: float = float("inf")  # seconds for everything; what is not done by then is reported as missing
    out: Path = Path("runs/rollout")  # results folder; the results in RESULTS.md are in benchmarks/results/rollout


def check(options: Options) -> Options:
    """Refuse what can't work; returns the options with the defaults filled in."""
    import torch

    check_known("family", options.families, list(FAMILIES))
    if options.device == "cuda" and not torch.cuda.is_available():
        fail("--device cuda: PyTorch finds no CUDA device here")
    check_positive(options, "threads", "seconds", "timeout", "time_limit", "jobs")
    check_once(options, "families", "num_envs", "backends", "compile_actor")
    if not options.num_envs or min(options.num_envs) < 1:
        fail("--num-envs must be 1 or more")
    elsewhere = ("ort", "numpy") if options.device == "cuda" else ("cudagraphs",)
    wrong = [actor for actor in options.compile_actor if actor in elsewhere]
    if wrong:
        fail(f"--compile-actor {wrong[0]} can't be used on {options.device}")
    make_folder(options.out)
    actors = options.compile_actor or tuple(actor for actor in ACTORS if actor not in elsewhere)
    options = replace(options, compile_actor=actors, jobs=options.jobs or num_cores())
    if not settings_of(options):
        fail("nothing to measure: Atari is EnvPool's, its CNN has no NumPy version, one environment is no vector")
    return options


def settings_of(options: Options) -> list[dict]:
    """All cases to measure. A single Gymnasium environment runs in this process anyway; Atari is EnvPool's only."""
    shared = {"device": options.device, "threads": options.threads, "seconds": options.seconds}
    return [
        {"family": family, "backend": backend, "num_envs": num_envs, "actor": actor, **shared}
        for family in options.families
        for backend in options.backends
        for num_envs in options.num_envs
        for actor in options.compile_actor
        if not (backend == "gymnasium-sync" and num_envs == 1)
        and not (family == "atari" and (backend != "envpool" or actor == "numpy"))
    ]


def row_of(row: dict) -> list[str]:
    """Cells of the table for one actor."""
    start = [row["family"], row["backend"], row["num_envs"], row["actor"]]
    if "error" in row:
        return [*start, f"failed: {row['error']}", *["-"] * 4]
    ratio = "-" if row["actor"] == "off" else estimate(row["ratio"], row["interval"], ".2f")
    times = [f"{row[key]:,.1f}" for key in ("p50_us", "p99_us", "compile_seconds")]
    return [*start, f"{row['steps_per_second']:,.0f}", ratio, *times]


def table_of(result: dict) -> list[str]:
    """Lines of the table of a result."""
    header = ["family", "backend", "environments", "actor", "steps/s", "to off [95 %]", "p50 of a step (µs)"]
    header += ["p99 (µs)", "compile (s)"]
    return table(header, [row_of(row) for row in result["rows"]])


def render(result: dict) -> str:
    """The Markdown of a result."""
    where = f"Policy on {result['device']}, threads: {result['threads']}."
    lines = ["# Rollout", "", INTRODUCTION, "", "![speed beside that of the policy in eager PyTorch](rollout.png)", ""]
    lines += [*table_of(result), ""]
    return "\n".join([*lines, f"{where} Measured {describe(result['provenance'])}", ""])


def draw(result: dict, path: Path) -> None:
    """For each family, backend and number of environments the gains of all actors as bars.

    Gains, since they are measured in interleaved blocks; speeds of different processes also vary with the machine.
    """
    groups = {}
    for row in result["rows"]:
        if "error" not in row and row["actor"] != "off":
            groups.setdefault((row["family"], row["backend"], row["num_envs"]), []).append(row)
    if not groups:
        return
    with plots.grid(path, len(groups), (5.0, 2.2)) as axes:
        for axis, ((family, backend, num_envs), rows) in zip(axes, groups.items(), strict=True):
            names, gains = [row["actor"] for row in rows], [row["ratio"] for row in rows]
            plots.draw_bars(axis, names, gains, [row["interval"] for row in rows], ".2f")
            axis.axvline(1, color=plots.colour("eager"))
            title = f"{family}, {num_envs} x {backend}"
            plots.describe_axis(axis, title, "sampling speed, policy in eager PyTorch = 1", "")


def write_summary(out: Path) -> str:
    """Make `rollout.md` and `rollout.png` of the result in a folder; returns the Markdown."""
    result = json.loads((out / "rollout.json").read_text())
    text = render(result)
    (out / "rollout.md").write_text(text)
    draw(result, out / "rollout.png")
    return text


def measure(options: Options, time_limit: float, bar: tqdm, on_result: Callable[[dict], None]) -> None:
    """Measure what the checked options name; `on_result` gets the result so far after each row."""
    cases, rows = settings_of(options), []
    shared = {"device": options.device, "threads": options.threads, "seconds": options.seconds}

    def on_case(case: dict, found: list[dict], unfinished: str) -> None:
        bar.update()
        rows.append(case | (found[-1] if found else {"error": unfinished}))
        on_result(shared | {"rows": rows, "provenance": provenance()})

    bar.total = len(cases)
    turns.run_cases("benchmarks.acting.rollout_worker", cases, options.jobs, options.timeout, time_limit, on_case)


def place(row: dict) -> tuple:
    """What tells a row from the others."""
    return row["family"], row["num_envs"], row["backend"], row["actor"]


def places_measured(result: dict) -> set[tuple]:
    """The places of the rows that were measured without an error."""
    return {place(row) for row in result.get("rows", []) if "error" not in row}


def main(options: Options) -> int:
    started, options = time.perf_counter(), check(options)
    effort, path = {"seconds": options.seconds}, options.out / "rollout.json"
    target = Target(path, effort, device=options.device, threads=options.threads)
    kept = f"what was measured before lies in {options.out}"
    asked = set(map(place, settings_of(options)))
    if missing := set(map(place, target.old.get("rows", []))) - asked:
        fail(f"{target.path} has {' '.join(map(str, min(missing)))}, which yours would lack: give another --out")
    before = places_measured(target.old)

    def on_result(result: dict) -> None:
        good, rows = places_measured(result), result["rows"]
        is_done = len(rows) == len(asked) and all(turns.is_absent(row["error"]) for row in rows if "error" in row)
        target.write(result, is_whole=is_done and bool(good) and before <= good)

    with stoppable(kept), tqdm(unit="actor", disable=None) as bar:
        left = options.time_limit - (time.perf_counter() - started)
        measure(options, left, bar, on_result)
    print(write_summary(options.out))
    figure = ["rollout.png"] * (options.out / "rollout.png").exists()
    return say_written(options.out, [target], "rollout.md", *figure)
