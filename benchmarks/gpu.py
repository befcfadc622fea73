"""Everything that needs a GPU, in three commands that need no network: ./run.sh gpu correctness|speed|more OUT_DIR.

Each starts with what matters most and keeps its results so far when time runs out or it is stopped. With PYTHON=... it
uses the packages of that Python and installs nothing; --dry-run does the same on a CPU, at toy size.

In a copy without its git history, FLATOUT_COMMIT="$(git describe --always --dirty --abbrev=40)", as printed where that
is, names the commit in the results. --cache keeps compiled code from one command to the next.

Measures: `correctness`: for each pair, whether the compiled script computes what the eager one does, with each of the
four combinations of --compile and --cudagraphs, and the tests that need CUDA; `speed`: the steady steps/s of eager,
compile, cudagraphs, both, and of LeanRL if --leanrl names its folder; `more`: how fast each network acts, what fraction
of the time the device is busy and with how many kernels per step, and how fast environments are sampled.
Takes: nine minutes at most each, or --time-limit.
Leaves: in OUT_DIR the stage's Markdown and, for each of its parts, JSON and mostly a figure. No file is half-written.
"""

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import tyro
from tqdm import tqdm

from benchmarks.acting import inference, rollout
from benchmarks.acting.networks import NETWORKS
from benchmarks.common import plots, processes, turns
from benchmarks.common.pairs import TABLE
from benchmarks.common.programs import (
    CLEANRL_PYTHON,
    ROOT,
    SUFFIX,
    VARIANTS,
    check_known,
    check_once,
    check_positive,
    clone_command,
    command,
    endless_flags,
    fail,
    fields_of,
    num_cores,
    pairs,
    pairs_here,
    say_left_out,
)
from benchmarks.common.results import (
    describe,
    estimate,
    make_folder,
    provenance,
    stoppable,
    table,
    write_json,
    write_whole,
)
from benchmarks.throughput import device_use, gpu_speed, parity, throughput

FIRST = tuple(TABLE)  # pairs, in this order
# Compared with eager: first what can't break the process for the rest, as a failed recording can; then the main ones
COMPARED = ("compile", "lean", "compile+cudagraphs", "cudagraphs")
# The ways to run a network that can be compiled in time
PATHS = ("eager", "inductor", "inductor/reduce-overhead", "CudaGraphModule", "inductor+CudaGraphModule")
# The tests on a device, in parallel; without those of what a graph refuses, which leave a process unusable
CUDA_TESTS = ("tests/test_pairs.py", "tests/test_graphs.py", "tests/test_math.py", "tests/test_atari.py")
CUDA_TESTS += ("-k", "cuda and not refused_with_its_line")
NEEDED = ("envpool", "mujoco", "tensorboard")  # by the scripts; what this program imports has been checked before


@dataclass
class Options:
    stage: tyro.conf.Positional[Literal["correctness", "speed", "more"]]  # what to measure
    out: tyro.conf.Positional[Path]  # folder of the results
    scripts: tuple[str, ...] = ()  # pairs to measure, by the name of the eager script; by default all that can run here
    parts: tuple[str, ...] = ()  # parts of the stage to run; by default all
    variants: tuple[str, ...] = ()  # variants that `speed` times and `device_use` profiles, if not all
    # folder of LeanRL, to measure its scripts beside ours; needs requirements-cleanrl.txt, see CLEANRL_PYTHON
    leanrl: Path | None = None
    time_limit: float = 525.0  # seconds for the whole stage
    cache: Path | None = None  # folder for compiled code, kept for a later stage; by default a temporary one
    memory_gib: float | None = None  # host memory for all processes; by default what is free when a part starts
    dry_run: bool = False  # the same on a CPU, at toy size, to check that everything works


@dataclass
class Plan:
    """What is measured: by default, as much as there is time for on a GPU."""

    device: str = "cuda"
    compared: tuple[str, ...] = COMPARED
    tests: tuple[str, ...] = CUDA_TESTS  # of pytest
    variants: tuple[str, ...] = ("eager", "compile+cudagraphs", "compile", "cudagraphs")
    window: float = 1.5  # seconds that a script is awake in each of its turns
    rounds: int = 6  # number of turns, at most
    inference: dict = field(default_factory=lambda: {"batch_sizes": (1, 64, 4096), "seconds": 0.08, "paths": PATHS})
    rollout: dict = field(default_factory=lambda: {"num_envs": (8,), "backends": ("envpool",), "seconds": 1.0})
    profiled: tuple[str, ...] = ("compile+cudagraphs", "compile", "eager")
    profile_seconds: float = 1.0


TOY = Plan(
    device="cpu",
    compared=("lean",),
    tests=("tests/test_math.py", "-k", "cuda"),
    variants=("eager", "lean"),
    window=0.5,
    rounds=2,
    inference={"batch_sizes": (1,), "seconds": 0.05, "paths": ("eager",)},
    rollout={"families": ("classic",), "num_envs": (1,), "compile_actor": ("off",), "seconds": 0.1}
    | {"backends": ("gymnasium",)},
    profiled=("eager",),
    profile_seconds=0.2,
)


class Report:
    """The output folder of a stage: the results so far, and the status of each part."""

    def __init__(self, out: Path, stage: str, is_dry_run: bool):
        self.out, self.path = out, out / f"{stage}.md"
        self.status, self.lines = {}, {}
        self.title = "A dry run on a CPU: no figure below means anything" if is_dry_run else "Measured on one GPU"

    def write(self, part: str, status: str, lines: list[str] | None = None, results=None) -> None:
        """Record the status of a part; if there are new results, write them as JSON and their Markdown."""
        self.status[part] = status
        if lines is not None:
            self.lines[part] = lines
            if isinstance(results, dict) and "provenance" not in results:
                results = {"results": results, "provenance": provenance()}
            write_json(self.out / f"{part}.json", results)
        text = [f"# {self.title}", "", describe(provenance()), ""]
        text += [*table(["part", "status"], [list(x) for x in self.status.items()]), ""]
        text += [line for own in self.lines.values() for line in own]
        write_whole(self.path, "\n".join(text) + "\n")

    def draw(self, part: str, function: Callable, results) -> None:
        """Draw the figure of a part; the previous one stays until the new one is complete."""
        with tempfile.TemporaryDirectory() as folder:
            function(results, Path(folder, "new.png"))
            write_whole(self.out / f"{part}.png", Path(folder, "new.png").read_bytes())


@dataclass
class Task:
    """What a part of a stage is given."""

    plan: Plan
    scripts: list[str]  # the most important first
    leanrl: Path | None
    work: Path  # an empty folder, which is deleted afterwards
    cache: Path  # of compiled code
    report: Report
    deadline: float  # on the clock of time.perf_counter()

    def seconds_left(self) -> float:
        return max(0.0, self.deadline - time.perf_counter())


def parity_lines(found: dict[str, dict[str, dict]], compared: tuple[str, ...]) -> list[str]:
    """What Markdown says on the pairs."""

    def cell(own: dict | None) -> str:
        if own is None:
            return "not yet"
        if "failed" in own:
            return f"failed: {own['failed']}"
        return f"{'yes' if own['equal'] else 'NO'} ({max(own['metrics'], own['weights']):.0e})"

    rows = [[f"`{script}`", *(cell(own.get(name)) for name in compared)] for script, own in found.items()]
    text = "Largest relative deviation of a metric or of the weights. They are equal up to "
    text += f"{parity.TOLERANCE:g}, or to {parity.NOISE} times that of an eager run whose gradients are a rounding off."
    header = ["computes what eager does", *map(plots.label, compared)]
    return ["## After fifty updates", "", text, "", *table(header, rows), ""]


def compare_pairs(task: Task) -> None:
    """Whether the variants of each pair compute the same."""

    latest = {}

    def on_change(found: dict) -> None:
        latest.update(found)
        done = sum(len(own) for own in found.values())
        status = f"running: {done} of {len(found) * len(task.plan.compared)}"
        task.report.write("parity", status, parity_lines(found, task.plan.compared), found)

    flags, seconds = ["--device", task.plan.device], task.seconds_left()
    parity.compare_all(task.scripts, task.plan.compared, flags, seconds, task.work, task.cache, on_change)
    if not all(own.get("equal") for variants in latest.values() for own in variants.values()):
        raise RuntimeError("not all variants were seen to compute what eager does")


def read_tests(output: str) -> dict[str, str]:
    """The outcome of each test in the output of `pytest -v`, which may be incomplete."""
    outcomes = "PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS"
    alone = re.findall(rf"^(tests/\S+::.+?) ({outcomes})\b", output, re.MULTILINE)
    beside = re.findall(rf"^\[gw\d+\] \[ *\d+%\] ({outcomes}) (tests/\S+::.+?) *$", output, re.MULTILINE)
    return dict(alone) | {name: outcome for outcome, name in beside}


def tests_left(output: str, num_ended: int) -> int:
    """How many of the tests that `pytest -v` collected have no outcome yet, by its output."""
    numbers = re.findall(r"^collected (\d+) items|\[(\d+) items\]", output, re.MULTILINE)
    return max((int(x or y) - num_ended for x, y in numbers), default=0)


def run_tests(task: Task) -> None:
    """The tests that need CUDA, those of graphs among them, and beside them, as nothing is timed, `compare_pairs`."""
    program = [sys.executable, "-m", "pytest", "-v", "--color=no", "-p", "no:cacheprovider", "--tb=line"]
    jobs = min(num_cores() // 2, processes.free_slots(2 * processes.SCRIPT_MEMORY))
    if find_spec("xdist") is not None and jobs > 1:
        program += ["-n", str(jobs), "--dist", "worksteal"]
    tests = [*program, "--continue-on-collection-errors", *task.plan.tests]
    child = processes.start(tests, task.work / "output", cwd=ROOT)
    try:
        run_part("parity", compare_pairs, task)
        while (code := child.wait(2)) is None and time.perf_counter() < task.deadline:
            report_tests(child, task.report)
    finally:
        child.kill()
        counts = report_tests(child, task.report)
    if code != 0:
        why = {None: "no time was left for all tests", 1: "not all tests passed"}
        raise RuntimeError(f"{why.get(code, f'pytest ended with exit code {code}')}; {counts}")


def report_tests(child: processes.Child, report: Report) -> str:
    """Report the outcomes of the tests so far; returns how many there are of each."""
    found = read_tests(output := child.output.read_text(errors="replace"))
    outcomes = list(found.values())
    counts = ", ".join(f"{outcomes.count(x)} {x.lower()}" for x in dict.fromkeys(outcomes)) or "none has ended"
    if left := tests_left(output, len(found)):
        counts, found = f"{counts}, {left} not run", found | {f"{left} more": "NOT RUN"}
    bad = [f"- {name}: {outcome}" for name, outcome in found.items() if outcome in ("FAILED", "ERROR")]
    report.write("tests", counts, ["## Tests", "", counts, "", *bad, ""], found)
    return counts


def speed_lines(results: list[dict]) -> list[str]:
    """What Markdown says on the speeds."""
    rows = []
    for result in results:
        ratios = {x["of"]: x for x in result["ratios"]}
        for name, own in result["contestants"].items():
            start = [f"`{result['script']}`, {result['env_id']}", plots.label(name)]
            failed = f"failed: {own['failed']}" if "failed" in own else ""
            if "steps_per_second" not in own:
                rows.append([*start, failed, "-"])
                continue
            gain = estimate(ratios[name]["ratio"], ratios[name]["interval"], ".2f") if name in ratios else "-"
            speed = estimate(own["steps_per_second"], own["quartiles"], ",.0f") + f"; {failed}" * bool(failed)
            rows.append([*start, speed, gain])
    header = ["script", "variant", "steps/s [quartiles]", "to eager [95 %]"]
    return ["## Speed", "", "![steps per second](speed.png)", "", *table(header, rows), ""]


def contestants_of(task: Task, script: str) -> dict[str, gpu_speed.Contestant]:
    """The variants of a pair and LeanRL's counterpart, if any, ready to be started."""
    programs = {}
    for variant in task.plan.variants:
        folder = str(task.work / f"{script}.{variant}")
        programs[variant] = [*command(script, variant), *endless_flags(script, task.plan.device), "--run-dir", folder]
    paths = [path / f"{script}{SUFFIX}.py" for path in (task.leanrl / "leanrl", task.leanrl)] if task.leanrl else []
    for path in [path for path in paths if path.exists()][:1]:
        flags = ["--compile", "--cudagraphs", "--total-timesteps=1000000000"]  # its fastest variant
        known = fields_of(script)
        flags += ["--learning-starts=1000"] * ("learning_starts" in known) + ["--log-every=1"] * ("log_every" in known)
        flags += ["--run-dir", str(task.work / f"{script}.leanrl")]
        python = CLEANRL_PYTHON if CLEANRL_PYTHON.exists() else sys.executable  # a machine without network has one
        programs["leanrl"] = clone_command(python, path, script, *flags)
    settings, contestants = turns.compile_settings(task.cache, max(1, num_cores() // 2)), {}
    for name, program in programs.items():
        folder = task.work / f"{script}.{name}"
        output, log = task.work / f"{script}.{name}.out", folder / "metrics.jsonl"
        warm = 8.0 if name == "leanrl" else 3.0  # its runs got faster by half in their first eight seconds
        contestants[name] = gpu_speed.Contestant(program, output, settings, log=log, window=task.plan.window, warm=warm)
    return contestants


def measure_speeds(task: Task) -> None:
    """All pairs, which get ready side by side."""

    def on_change(results: list[dict]) -> None:
        status = f"running: {len(results)} of {len(task.scripts)}"
        task.report.write("speed", status, speed_lines(results), results)
        task.report.draw("speed", throughput.draw, results)

    contestants = {script: contestants_of(task, script) for script in task.scripts}
    gpu_speed.measure(contestants, task.plan.device, task.plan.rounds, task.seconds_left(), on_change)


def measure_inference(task: Task) -> None:
    """All networks, which get ready side by side."""
    networks, results = (*(name for name in task.scripts if name in NETWORKS), "rllib_cnn"), []

    def on_result(result: dict, is_all: bool) -> None:
        if not is_all:  # a figure after each path would take the stage's time
            return
        results.append(result)
        best = [f"- {inference.best_line(x)}" for x in results]
        lines = ["## Inference", "", "![% faster than eager](inference.png)", "", *best, ""]
        task.report.write("inference", f"running: {len(results)} of {len(networks)}", lines, results)
        task.report.draw("inference", inference.draw, results)

    where = {"networks": networks, "devices": (task.plan.device,), "out": task.work}
    options = inference.check(inference.Options(**where, **task.plan.inference))
    inference.measure(options, task.seconds_left(), tqdm(disable=True), on_result)


def measure_device_use(task: Task) -> None:
    """All pairs, which get ready side by side; beside the speeds of undisturbed scripts, if they lie in the folder."""
    file, uses = task.report.out / "speed.json", {}
    speeds = json.loads(file.read_text()) if file.exists() else []
    known = {(x["script"], name): y.get("steps_per_second") for x in speeds for name, y in x["contestants"].items()}

    def on_use(script: str, variant: str, use: dict) -> None:
        uses.setdefault(script, {})[variant] = use
        lines = ["## What the device does", "", "![device busy](device_use.png)", "", *device_use.table_of(uses, known)]
        done, count = sum(map(len, uses.values())), len(task.scripts) * len(task.plan.profiled)
        task.report.write("device_use", f"running: {done} of {count}", [*lines, ""], uses)
        task.report.draw("device_use", device_use.draw, uses)

    limits = task.plan.profile_seconds, task.seconds_left(), task.work, task.cache
    device_use.measure(task.scripts, task.plan.profiled, task.plan.device, *limits, on_use)


def measure_rollout(task: Task) -> None:
    def on_result(result: dict) -> None:
        task.report.write("rollout", "running", ["## Rollout", "", *rollout.table_of(result), ""], result)

    options = rollout.check(rollout.Options(out=task.work, device=task.plan.device, **task.plan.rollout))
    rollout.measure(options, task.seconds_left(), tqdm(disable=True), on_result)


# The parts of each stage, the most important first, each with the share of the remaining time that it may take
STAGES: dict[str, dict[str, tuple[Callable[[Task], None], float]]] = {
    "correctness": {"tests": (run_tests, 1.0)},
    "speed": {"speed": (measure_speeds, 1.0)},
    "more": {
        "inference": (measure_inference, 0.5), "device_use": (measure_device_use, 0.75),
        "rollout": (measure_rollout, 1.0),
    },
}  # fmt: skip


def check(options: Options) -> list[str]:
    """Refuse what can't work; returns the pairs to measure, the most important first."""
    check_known("script", options.scripts, pairs())
    check_known("part", options.parts, STAGES[options.stage])
    check_known("variant", options.variants, VARIANTS)
    check_once(options, "scripts", "parts", "variants")
    check_positive(options, "time_limit", "memory_gib")
    if options.leanrl is not None and not options.leanrl.is_dir():
        fail(f"--leanrl: there is no folder {options.leanrl}")
    if options.leanrl is not None and options.stage != "speed":
        fail(f"--leanrl is for the stage speed, not for {options.stage}")
    if options.variants and options.stage == "correctness":
        fail("--variants is for the stages that measure, not for correctness")
    needed = (*NEEDED, "pytest") if options.stage == "correctness" else NEEDED
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        fail(f"not installed: {', '.join(missing)}; they are in requirements/requirements-test.txt")
    import torch

    if not options.dry_run and not torch.cuda.is_available():
        fail("PyTorch finds no CUDA device here; --dry-run goes the same way on the CPU, at toy size")
    make_folder(options.out)
    names = (f"{options.stage}.md", *(f"{name}.json" for name in STAGES[options.stage]))
    if any((options.out / name).exists() for name in names):
        fail(f"{options.out} holds results of this stage; name another folder")
    if options.cache and " " in str(options.cache.resolve()):
        fail(f"--cache: Inductor does not quote a folder with a space in its name, {options.cache.resolve()}")
    scripts = options.scripts or (("dqn",) if options.dry_run else tuple(pairs_here()))
    if not options.scripts and not options.dry_run:
        say_left_out()
    return sorted(scripts, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name))


def run_part(name: str, part: Callable[[Task], None], task: Task) -> None:
    """Run a part of a stage; whatever ends it is reported, and the later parts still run."""
    begin = time.perf_counter()
    task.report.write(name, "running")
    try:
        part(task)
        status = "done"
    except KeyboardInterrupt:
        task.report.write(name, f"stopped, {task.report.status[name]}")
        raise
    except (Exception, SystemExit) as error:
        status = f"failed: {turns.describe_error(error)}"
    task.report.write(name, f"{status}, {time.perf_counter() - begin:.0f} s")


def main(options: Options) -> int:
    """Run a stage; returns the exit code, 1 if a part of it failed."""
    started, scripts = time.perf_counter(), check(options)
    options.leanrl = options.leanrl and options.leanrl.resolve()
    plan, report = TOY if options.dry_run else Plan(), Report(options.out, options.stage, options.dry_run)
    if options.variants:
        plan = replace(plan, variants=options.variants, profiled=options.variants)
    if options.memory_gib is not None:
        os.environ["MEMORY_GIB"] = str(options.memory_gib)
    with stoppable(f"what was measured before lies in {options.out}"), tempfile.TemporaryDirectory() as folder:
        for name in options.parts or STAGES[options.stage]:
            part, share = STAGES[options.stage][name]
            now, work = time.perf_counter(), Path(folder, name)
            work.mkdir()
            deadline = now + share * (started + options.time_limit - now)
            print(f"{name}: {deadline - now:.0f} s at most", file=sys.stderr)
            cache = options.cache.resolve() if options.cache else Path(folder, "cache")  # of all parts
            run_part(name, part, Task(plan, scripts, options.leanrl, work, cache, report, deadline))
    print(report.path.read_text())
    return int(any(status.startswith("failed") for status in report.status.values()))
