"""All that takes a GPU, in nine minutes and without network: ./run.sh gpu OUT_DIR.

In order of importance, each with its own share of the time:

1. the four variants of each pair: steady steps/s, and whether they compute what eager computes on the same device;
2. how fast each network acts (`./run.sh inference`);
3. how fast environments are sampled (`./run.sh rollout`);
4. for how much of the time the device is busy, and with how many kernels and graphs for each step.

Measures: the four things above.
Takes: nine minutes at most.
Leaves: at most eight files, flat in OUT_DIR; each is whole at any moment at which the program is cut off.
"""

import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import tyro
from tqdm import tqdm

from benchmarks.common import plots, turns
from benchmarks.common.programs import VARIANTS, check_known, fail, pairs
from benchmarks.common.results import describe, estimate, make_folder, provenance, stop_by_exception, table, write_whole

FIRST = ("ppo_continuous_action", "sac_continuous_action", "td3_continuous_action", "ppo_atari_envpool", "dqn", "ppo")
NEEDED = ("torch", "tensordict", "gymnasium", "envpool", "mujoco", "tensorboard")  # and what this module imports
SHARES = {"speed": 0.5, "inference": 0.24, "rollout": 0.12, "device_use": 0.14}  # of the time, by importance
# Of the ways to run a network those that can be compiled in time
PATHS = ("eager", "inductor", "inductor/reduce-overhead", "CudaGraphModule", "inductor+CudaGraphModule", "aoti")


@dataclass
class Options:
    out: tyro.conf.Positional[Path]  # folder of the results
    scripts: tuple[str, ...] = ()  # pairs to measure, by the names of their eager twins; by default all
    time_limit: float = 525.0  # seconds for everything
    memory_gib: float | None = None  # of the host, for all processes; by default what is free when each stage starts
    dry_run: bool = False  # the same on a CPU, at toy size, to see that all works


@dataclass
class Plan:
    """What is measured: on a GPU as much as the time is enough for."""

    device: str = "cuda"
    variants: tuple[str, ...] = tuple(VARIANTS)
    window: float = 1.5  # seconds that a script is awake
    rounds: int = 6  # times that it is, at most
    inference: dict = field(default_factory=lambda: {"batch_sizes": (1, 64, 4096), "seconds": 0.08, "paths": PATHS})
    rollout: dict = field(default_factory=lambda: {"num_envs": (8,), "backends": ("envpool",), "seconds": 1.0})
    profiled: tuple[str, ...] = ("eager", "compile", "compile+cudagraphs")
    profile_seconds: float = 1.0


TOY = Plan(
    device="cpu",
    variants=("eager", "lean"),
    window=0.5,
    rounds=2,
    inference={"networks": ("dqn",), "batch_sizes": (1,), "seconds": 0.05, "paths": ("eager",)},
    rollout={"families": ("classic",), "num_envs": (1,), "compile_actor": ("off",), "seconds": 0.1}
    | {"backends": ("gymnasium",)},
    profiled=("eager",),
    profile_seconds=0.2,
)


class Report:
    """The output folder: what is known so far, and how each stage stands."""

    def __init__(self, out: Path, is_dry_run: bool):
        self.out, self.provenance, self.status, self.lines = out, provenance(), {}, {}
        self.title = "A dry run on a CPU: no figure below means anything" if is_dry_run else "Measured on one GPU"

    def write(self, stage: str, status: str, lines: list[str] | None = None, results=None) -> None:
        """Say how a stage stands; where they are new, write its results, as JSON, and what Markdown says on them."""
        self.status[stage] = status
        if lines is not None:
            self.lines[stage] = lines
            write_whole(self.out / f"{stage}.json", json.dumps(results, indent=1) + "\n")
        text = [f"# {self.title}", "", describe(self.provenance), ""]
        text += [*table(["stage", "status"], [list(x) for x in self.status.items()]), ""]
        text += [line for own in self.lines.values() for line in own]
        write_whole(self.out / "report.md", "\n".join(text) + "\n")

    def draw(self, stage: str, function: Callable, results) -> None:
        """A figure of a stage; until it is whole the one before stays."""
        with tempfile.TemporaryDirectory() as folder:
            function(results, Path(folder, "new.png"))
            write_whole(self.out / f"{stage}.png", Path(folder, "new.png").read_bytes())


def same(parity: dict | None) -> str:
    """Whether a variant computes what eager computes, as a cell of the table."""
    if parity is None:
        return "not checked"
    if "failed" in parity:
        return f"failed: {parity['failed']}".replace("|", "/")
    return f"{'yes' if parity['equal'] else 'NO'} ({max(parity['metrics'], parity['weights']):.0e})"


def speed_lines(results: list[dict]) -> list[str]:
    """What Markdown says on the speeds."""
    header = ["script", "variant", "steps/s [quartiles]", "to eager [95 %]", "computes what eager does (deviation)"]
    rows = []
    for result in results:
        ratios = {x["of"]: x for x in result["ratios"]}
        for name, own in result["contestants"].items():
            start = [f"`{result['script']}`, {result['env_id']}", plots.label(name)]
            equal = "-" if name == "eager" else same(result["parity"].get(name))
            if "steps_per_second" not in own:
                rows.append([*start, f"failed: {own['failed']}".replace("|", "/"), "-", equal])
                continue
            gain = estimate(ratios[name]["ratio"], ratios[name]["interval"], ".2f") if name in ratios else "-"
            rows.append([*start, estimate(own["steps_per_second"], own["quartiles"], ",.0f"), gain, equal])
    return ["## Speed", "", "![steps per second](speed.png)", "", *table(header, rows), ""]


def measure_speeds(plan: Plan, scripts: list[str], seconds: float, work: Path, report: Report) -> None:
    from benchmarks.throughput import gpu_speed, throughput

    def on_change(results: list[dict]) -> None:
        report.write("speed", "running", speed_lines(results), results)

    results = gpu_speed.measure_speeds(
        scripts, plan.variants, plan.device, plan.window, plan.rounds, seconds, work, work.parent / "cache", on_change
    )
    on_change(results)
    report.draw("speed", throughput.draw, results)


def measure_inference(plan: Plan, scripts: list[str], seconds: float, work: Path, report: Report) -> None:
    from benchmarks.acting import inference
    from benchmarks.acting.networks import NETWORKS

    networks = plan.inference.get("networks") or (*(name for name in scripts if name in NETWORKS), "rllib_cnn")
    options = inference.Options(out=work, devices=(plan.device,), **plan.inference | {"networks": networks})
    results = []

    def on_result(result: dict) -> None:
        results.append(result)
        best = [f"- {inference.best_line(x)}" for x in results]
        lines = ["## Inference", "", "![% faster than eager](inference.png)", "", *best, ""]
        report.write("inference", "running", lines, results)
        report.draw("inference", inference.draw, results)

    inference.measure(inference.check(options), seconds, tqdm(disable=True), on_result)


def measure_rollout(plan: Plan, _scripts: list[str], seconds: float, work: Path, report: Report) -> None:
    from benchmarks.acting import rollout

    def on_result(result: dict) -> None:
        report.write("rollout", "running", ["## Rollout", "", *rollout.table_of(result), ""], result)

    options = rollout.check(rollout.Options(out=work, device=plan.device, **plan.rollout))
    rollout.measure(options, seconds, tqdm(disable=True), on_result)


def measure_device_use(plan: Plan, scripts: list[str], seconds: float, work: Path, report: Report) -> None:
    from benchmarks.throughput import device_use

    uses = device_use.measure(
        scripts, plan.profiled, plan.device, plan.profile_seconds, seconds, work, work.parent / "cache"
    )
    speeds = json.loads((report.out / "speed.json").read_text()) if (report.out / "speed.json").exists() else []
    known = {(x["script"], name): y for x in speeds for name, y in x["contestants"].items()}
    lines = ["## What the device does", "", "![device busy](device_use.png)", ""]
    lines += [*device_use.table_of(uses, {key: x.get("steps_per_second") for key, x in known.items()}), ""]
    report.write("device_use", "running", lines, uses)
    report.draw("device_use", device_use.draw, uses)


STAGES = {
    "speed": measure_speeds,
    "inference": measure_inference,
    "rollout": measure_rollout,
    "device_use": measure_device_use,
}


def check(options: Options) -> list[str]:
    """Refuse what can't work; returns the pairs to measure, the most important first."""
    check_known("script", options.scripts, pairs())
    if options.time_limit <= 0:
        fail("--time-limit must be more than 0")
    if options.memory_gib is not None and options.memory_gib <= 0:
        fail("--memory-gib must be more than 0")
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        fail(f"not installed: {', '.join(missing)}")
    import torch

    if not options.dry_run and not torch.cuda.is_available():
        fail("PyTorch finds no CUDA device here; --dry-run goes the same way on the CPU, at toy size")
    make_folder(options.out)
    if any(options.out.iterdir()):
        fail(f"{options.out} is not empty")
    scripts = options.scripts or (("dqn",) if options.dry_run else tuple(pairs()))
    return sorted(scripts, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name))


def main(options: Options) -> None:
    started, scripts = time.perf_counter(), check(options)
    plan, report = TOY if options.dry_run else Plan(), Report(options.out, options.dry_run)
    stop_by_exception()
    if options.memory_gib is not None:
        os.environ["MEMORY_GIB"] = str(options.memory_gib)
    with tempfile.TemporaryDirectory() as folder:
        for i, (stage, function) in enumerate(STAGES.items()):
            left = options.time_limit - (time.perf_counter() - started)
            seconds = left * SHARES[stage] / sum(list(SHARES.values())[i:])
            work, begin = Path(folder, stage), time.perf_counter()
            work.mkdir()
            print(f"{stage}: {seconds:.0f} s at most", file=sys.stderr)
            report.write(stage, "running")
            try:
                function(plan, scripts, seconds, work, report)
                status = "done"
            except KeyboardInterrupt:
                report.write(stage, "stopped")
                sys.exit(130)
            except Exception as error:  # the stages after it may still work
                status = f"failed: {turns.describe_error(error)}"
            report.write(stage, f"{status}, {time.perf_counter() - begin:.0f} s")
    print((options.out / "report.md").read_text())
