"""How a script uses a device: python -m benchmarks.throughput.device_use SCRIPT.py RESULT.json SECONDS [FLAGS].

Runs the script until it is steady, freezes until it is woken, and then profiles it for some seconds: what fraction of
the time the device is busy, how that changes over time, and the number of kernels, copies, launches and graph replays
per environment step. Profiling slows down the launching of kernels, so the measured busy fraction is a lower bound; the
undisturbed script's is the device time per step times the undisturbed speed. Without CUDA, PyTorch's operators on the
CPU stand in for kernels, to show that the program works.
"""

import contextlib
import json
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import torch
import tyro
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import plots, processes, steady, turns
from benchmarks.common.programs import AS_MODULE, command, endless_flags, load_script, num_cores
from benchmarks.common.results import table, write_whole

BIN = 0.02  # seconds per point of the plot
COPIES = ("Memcpy", "Memset")
GRAPH_LAUNCHES, KERNEL_LAUNCHES = ("cudaGraphLaunch",), ("cudaLaunchKernel", "cuLaunchKernel")
# Seconds of a profile that do not count: some versions of CUPTI lose the first events after a device was idle for long
SETTLING = 0.3


class Finished(Exception):
    """The profile is written: there is no reason to train on."""


def busy_fractions(starts: np.ndarray, ends: np.ndarray, begin: float, end: float, bins: int) -> np.ndarray:
    """Fraction covered by the intervals in each of `bins` equal parts of [begin, end]: (K,), (K,) -> (bins,)."""
    order = np.argsort(starts)
    starts, ends = starts[order].clip(begin, end), np.maximum.accumulate(ends[order].clip(begin, end))
    starts = np.maximum(starts, np.concatenate([[begin], ends[:-1]]))  # what an earlier one covers counts once
    ends = np.maximum(starts, ends)
    after = (ends - starts).cumsum()  # the time covered up to the end of each: it rises within, and is level between
    times, covered = np.stack([starts, ends], 1).reshape(-1), np.stack([after - (ends - starts), after], 1).reshape(-1)
    edges = np.linspace(begin, end, bins + 1)
    return np.diff(np.interp(edges, times, covered)) / np.diff(edges)


def summarize(events: list[tuple[str, bool, float, float]], steps: int) -> dict:
    """Summary of the events (name, on the device, start and duration in seconds) of `steps` environment steps."""
    on_device = [event for event in events if event[1]]
    if not on_device:
        return {"failed": "the profiler saw nothing on the device"}
    starts, durations = (np.array([event[i] for event in on_device]) for i in (2, 3))
    begin, end = min(event[2] for event in events), max(event[2] + event[3] for event in events)
    timeline = busy_fractions(starts, starts + durations, begin, end, max(1, round((end - begin) / BIN)))

    def count(prefixes: tuple[str, ...], device: bool) -> int:
        return sum(name.startswith(prefixes) for name, is_device, _, _ in events if is_device == device)

    copies = count(COPIES, True)
    busy = float(timeline.mean())
    return {
        "seconds": end - begin,
        "steps": steps,
        "busy_fraction": busy,
        "busy_us_per_step": 1e6 * busy * (end - begin) / steps,
        "kernels_per_step": (len(on_device) - copies) / steps,
        "copies_per_step": copies / steps,
        "launches_per_step": count(KERNEL_LAUNCHES, False) / steps,
        "graph_replays_per_step": count(GRAPH_LAUNCHES, False) / steps,
        "timeline": [round(x, 4) for x in timeline.tolist()],
    }


def read_events(profiler: profile, on_cuda: bool, since: int) -> list[tuple[str, bool, float, float]]:
    """The profiler's events from a time on, on the clock of time.time_ns(), as `summarize` wants them."""
    events = profiler.profiler.kineto_results.events()
    cuda = torch.autograd.DeviceType.CUDA
    return [
        (x.name(), x.device_type() == cuda if on_cuda else x.name().startswith("aten::"), x.start_ns() / 1e9,
         x.duration_ns() / 1e9)
        for x in events if x.start_ns() >= since
    ]  # fmt: skip


class Watch:
    """Replaces `Run.log`: starts the profiler at the first steady line, and later stops it and ends the run."""

    def __init__(self, log, on_cuda: bool, seconds: float, result: Path):
        self.log, self.on_cuda, self.seconds, self.result = log, on_cuda, seconds, result
        self.profiler = profile(activities=[ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU])
        self.lines, self.settled, self.begin, self.since = [], None, None, 0

    def __call__(self, run, metrics: dict) -> None:
        step = run.step
        self.log(run, metrics)
        self.lines.append(metrics)
        first = steady.first_update(self.lines)
        if first is None or len(self.lines) <= first + steady.FIRST_LINES:
            return
        if self.settled is None:
            turns.wait_for_turn()
            self.profiler.start()
            self.settled = time.perf_counter() + SETTLING
        elif self.begin is None and time.perf_counter() >= self.settled:
            if self.on_cuda:
                torch.cuda.synchronize()
            self.begin, self.since = (step, time.perf_counter()), time.time_ns()
        elif self.begin and time.perf_counter() - self.begin[1] >= self.seconds:
            if self.on_cuda:
                torch.cuda.synchronize()
            self.profiler.stop()
            use = summarize(read_events(self.profiler, self.on_cuda, self.since), step - self.begin[0])
            write_whole(self.result, json.dumps(use))
            raise Finished


def profile_script(path: Path, result: Path, seconds: float, flags: list[str]) -> None:
    """Train as the flags say, and write the profile of some seconds of steady running."""
    module = load_script(path)
    args = tyro.cli(module.Args, args=flags)
    on_cuda = args.device != "cpu" and torch.cuda.is_available()
    watch = Watch(module.Run.log, on_cuda, seconds, result)
    module.Run.log = lambda *arguments: watch(*arguments)  # a function, so that it gets the run
    with contextlib.suppress(Finished):
        module.train(args)


def measure(
    scripts: list[str],
    variants: tuple[str, ...],
    device: str,
    seconds: float,
    time_limit: float,
    folder: Path,
    cache: Path,
    on_use: Callable[[str, str, dict], None],
    more: list[str] | None = None,
) -> None:
    """Profile each variant of the scripts alone; `on_use` gets script, variant, and its `summarize` or why it failed.

    As many as fit into memory get ready side by side, as many at once as there are cores. `folder` takes files that are
    not needed afterwards, `cache` compiled code; `more` are flags for all, such as another environment.
    """
    everyone, slots = list(product(scripts, variants)), processes.free_slots(processes.SCRIPT_MEMORY)
    jobs = min(len(everyone), slots, num_cores())
    settings, share = turns.compile_settings(cache, jobs), time_limit / -(-len(everyone) // slots)
    for i in range(0, len(everyone), slots):
        known = {}
        for script, variant in everyone[i : i + slots]:
            (_, path, *own), name = command(script, variant), folder / f"{script}.{variant}"
            program = [*AS_MODULE, __name__, path, f"{name}.json", str(seconds), *own]
            program += [*endless_flags(script, device), "--run-dir", str(name), *(more or [])]
            known[turns.Contestant(program, Path(f"{name}.out"), settings)] = script, variant, Path(f"{name}.json")

        def on_turn(contestant: turns.Contestant, known: dict = known) -> None:
            script, variant, file = known[contestant]
            error = {"failed": turns.without_paths(contestant.error or "no result")}
            on_use(script, variant, json.loads(file.read_text()) if file.exists() else error)

        turns.take_turns(list(known), jobs, share, share, on_turn)


def table_of(uses: dict[str, dict[str, dict]], speeds: dict[tuple[str, str], float | None]) -> list[str]:
    """Lines of the table. `speeds` (steps/s) are those of undisturbed runs by script and variant, where known."""
    header = ["script", "variant", "device busy, profiled", "device busy, undisturbed", "device time (µs/step)"]
    header += ["kernels a step", "launches a step", "graph replays a step", "copies a step"]
    columns = ("kernels_per_step", "launches_per_step", "graph_replays_per_step", "copies_per_step")
    rows = []
    for script, variants in uses.items():
        for variant, use in variants.items():
            start = [f"`{script}`", plots.label(variant)]
            if "failed" in use:
                rows.append([*start, f"failed: {use['failed']}", *["-"] * 6])
                continue
            known = speeds.get((script, variant))
            undisturbed = f"{1e-6 * use['busy_us_per_step'] * known:.0%}" if known else "-"
            busy = [f"{use['busy_fraction']:.0%}", undisturbed, f"{use['busy_us_per_step']:.1f}"]
            rows.append([*start, *busy, *(f"{use[name]:.2f}" for name in columns)])
    return table(header, rows)


def draw(uses: dict[str, dict[str, dict]], path: Path) -> None:
    """Of each script, the busy fraction of its variants over time."""
    with plots.grid(path, len(uses), (5.6, 2.4)) as axes:
        for axis, (script, variants) in zip(axes, uses.items(), strict=True):
            for variant, use in [(name, x) for name, x in variants.items() if "failed" not in x]:
                name = f"{plots.label(variant)}, {100 * use['busy_fraction']:.0f} %"
                seconds = np.linspace(0, use["seconds"], len(use["timeline"]))
                plots.draw_curve(axis, seconds, 100 * np.array(use["timeline"]), variant, name)
            plots.describe_axis(axis, script, "seconds", "device busy (%)")
            axis.set_ylim(0, 100)
            if axis.lines:
                axis.legend()


if __name__ == "__main__":
    profile_script(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
