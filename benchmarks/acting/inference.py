"""How fast each network acts, with each way to run it: ./run.sh inference.

Runs the whole act function (action, log-probability, value; see `acting/networks.py`) of each script's network and of
RLlib's default CNN, by each path of `acting/paths.py`, on batches of 1 to 16384 observations. Each network and path has
its own process, so that none can disturb or crash another: it compiles and checks its outputs, waits for its turn, then
times the path and eager PyTorch in interleaved blocks, on one thread.

A path counts only if its outputs equal those of eager PyTorch with the same weights, and if they follow an optimizer
step, automatically or after a refresh whose cost is counted.

Measures: wall and processor time per call beside eager's, the time to compile and to refresh, and when these pay off.
Takes: at the defaults most of an hour on two cores; --networks, --paths and --batch-sizes shorten it, --smoke takes one
minute.
Leaves: in --out a JSON file per network and device, and inference.md and inference.png from all JSON files there.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
from torch import device as torch_device
from tqdm import tqdm

from benchmarks.acting.inference_worker import TOLERANCE
from benchmarks.acting.networks import NETWORKS
from benchmarks.acting.paths import path_names
from benchmarks.common import plots, turns
from benchmarks.common.programs import check_known, check_once, check_positive, fail, num_cores
from benchmarks.common.results import Target, describe, load_all, make_folder, provenance, say_written, stoppable, table

NOISE = "eager"  # the path that is measured against itself: its apparent gain is the error of all the others
SMOKE_PATHS = ("eager", "aot_eager", "inductor", "numpy")

INTRODUCTION = f"""
The act function of each network, measured call by call, beside eager PyTorch in the same process, in interleaved
blocks. "Faster" is (time of an eager call / time of a call - 1), of the median calls of two neighbouring blocks: the
geometric mean over ten such pairs (four, if calls are slow), with its 95 % interval (Student's, of the logarithms). The
path `eager` is eager measured against itself: what lies within its interval is no gain. Compile time is that of
building and of the first calls, with an empty cache for the first batch size; the others come after it in the same
process, which has what sizes share, such as headers, so alone they would take longer. "Pays after" counts calls until
compiling, and one refresh of the weights, have paid; "per refresh" the calls between two refreshes for these alone to
pay. Equal: all outputs within {TOLERANCE:g} of eager's on the same weights and noise. "Weights" says what an optimizer
step does: outputs follow it, or do once refreshed, or are stale.
""".strip()


@dataclass
class Options:
    networks: tuple[str, ...] = ()  # by default all: the scripts, and rllib_cnn
    paths: tuple[str, ...] = ()  # by default all that exist for the device
    batch_sizes: tuple[int, ...] = (1, 4, 16, 64, 256, 1024, 4096, 16384)  # observations per call
    devices: tuple[str, ...] = ()  # by default cpu, and cuda if available
    threads: int = 1  # threads of PyTorch and of onnxruntime
    seconds: float = 0.5  # seconds for which each contestant is timed, at each batch size
    jobs: int | None = None  # processes that compile in parallel; by default one per core
    timeout: float = 600.0  # seconds that a process may take to compile, and again to measure
    time_limit: float = float("inf")  # seconds for everything; what is not done by then is reported as missing
    smoke: bool = False  # a short run, to check that everything works: one network, two batch sizes, few paths
    out: Path = Path("runs/inference")  # results folder; the results in RESULTS.md are in benchmarks/results/inference


def check(options: Options) -> Options:
    """Refuse what can't work; returns the options with the defaults filled in."""
    import torch

    if options.smoke:
        small = {
            "networks": ("ppo",),
            "paths": SMOKE_PATHS,
            "batch_sizes": (1, 64),
            "devices": ("cpu",),
            "seconds": 0.2,
        }
        for name in small:
            if getattr(options, name) != getattr(Options, name):
                fail(f"--{name.replace('_', '-')}: --smoke chooses it; leave one of them out")
        options = replace(options, **small, time_limit=min(options.time_limit, 50.0))
    devices = options.devices or (("cpu", "cuda") if torch.cuda.is_available() else ("cpu",))
    networks = options.networks or tuple(NETWORKS)
    check_known("network", networks, list(NETWORKS))
    check_known("device", devices, ["cpu", "cuda"])
    known = dict.fromkeys(path for device in devices for path in path_names(torch.device(device)))
    check_known("path", options.paths, list(known))
    devices = [x for x in devices if paths_of(x, options)]  # NumPy and ONNX Runtime have none on a GPU
    if "cuda" in devices and not torch.cuda.is_available():
        fail("--devices cuda: PyTorch finds no CUDA device here")
    check_positive(options, "threads", "seconds", "timeout", "time_limit", "jobs")
    check_once(options, "networks", "paths", "batch_sizes", "devices")
    if not options.batch_sizes or min(options.batch_sizes) < 1:
        fail("--batch-sizes must be 1 or more")
    make_folder(options.out)
    return replace(options, networks=networks, devices=devices, jobs=options.jobs or num_cores())


def paths_of(device: str, options: Options) -> list[str]:
    """The paths to measure on a device."""
    return [path for path in path_names(torch_device(device)) if path in (options.paths or (path,))]


def result_of(network: str, device: str, options: Options, cells: list[dict]) -> dict:
    """The result of one network on one device."""
    settings = {"network": network, "device": device, "threads": options.threads, "seconds": options.seconds}
    return {**settings, "batch_sizes": options.batch_sizes, "cells": cells, "provenance": provenance()}


def measure(options: Options, time_limit: float, bar: tqdm, on_result: Callable[[dict, bool], None]) -> None:
    """Measure what the checked options name; after each path `on_result` gets its network's, and whether it has all."""
    shared = {"threads": options.threads, "seconds": options.seconds, "batch_sizes": options.batch_sizes}
    cases, cells = [], {}
    for network in options.networks:
        for device in options.devices:
            paths = paths_of(device, options)
            cases += [{"network": network, "device": device, "path": path, **shared} for path in paths]
            cells[network, device] = []

    def on_case(case: dict, rows: list[dict], unfinished: str) -> None:
        bar.update()
        key = case["network"], case["device"]
        known, empty = {row["batch_size"]: row for row in rows}, {"path": case["path"], "error": unfinished}
        cells[key] += [known.get(size, {**empty, "batch_size": size}) for size in options.batch_sizes]
        is_all = len(cells[key]) == len(options.batch_sizes) * len(paths_of(case["device"], options))
        on_result(result_of(*key, options, cells[key]), is_all)

    bar.total = len(cases)
    turns.run_cases("benchmarks.acting.inference_worker", cases, options.jobs, options.timeout, time_limit, on_case)


def trusted(cell: dict) -> bool:
    """Whether a path was measured, computes what eager does, and does so after the weights have changed."""
    return "error" not in cell and cell["equal"] and cell["weights"] != "stale"


def best_of(cells: list[dict]) -> dict | None:
    """The fastest trusted path for one batch size, by the lower end of its interval; None if eager may be as fast.

    Eager measured against itself may appear to gain, too; a gain within that range does not count.
    """
    noise = max([1.0, *(x["interval"][1] for x in cells if x["path"] == NOISE and "interval" in x)])
    faster = [x for x in cells if trusted(x) and x["path"] != NOISE and x["interval"][0] > noise]
    return max(faster, key=lambda cell: cell["interval"][0], default=None)


def percent(speedup: float) -> str:
    return f"{100 * (speedup - 1):+.0f}"


def best_paths(result: dict) -> dict[int, str]:
    """The best path for each batch size, with its gain and, if it needs a refresh after updates, the refresh time."""
    best = {size: best_of([x for x in result["cells"] if x["batch_size"] == size]) for size in result["batch_sizes"]}
    return {size: f"{x['path']} ({percent(x['speedup'])} %{refresh_of(x)})" if x else NOISE for size, x in best.items()}


def refresh_of(cell: dict) -> str:
    """For a path that copies the weights: the cost of refreshing them, and after how many calls that has paid off."""
    if not cell["refresh_seconds"]:
        return ""
    ms, number = f"{1e3 * cell['refresh_seconds']:.1f}", calls(cell["refresh_calls"])
    return f"; {ms} ms an update, made up for by {number} call" + "s" * (number != "1")


def best_line(result: dict) -> str:
    """One line that names the best path for each batch size."""
    words = [f"{size:,}: {best}" for size, best in best_paths(result).items()]
    return f"Best for {result['network']} on {result['device']}, by batch size: {', '.join(words)}."


def calls(number: float | None) -> str:
    return "never" if number is None else f"{math.ceil(number):,}"


def row_of(cell: dict) -> list[str]:
    """Cells of the table for one path and batch size."""
    start = [cell["path"], f"{cell['batch_size']:,}"]
    if "error" in cell:
        text = f"failed: {cell['error']}".replace("failed: NotImplementedError: ", "none: ")  # as it says
        return [*start, text, *["-"] * 9]
    gain = f"{percent(cell['speedup'])} [{percent(cell['interval'][0])}, {percent(cell['interval'][1])}]"
    times = [f"{cell[key]:,.1f}" for key in ("p50_us", "p99_us", "cpu_us", "eager_p50_us")]
    refresh = (
        f"{cell['weights']}, {1e3 * cell['refresh_seconds']:.2f} ms" if cell["refresh_seconds"] else cell["weights"]
    )
    pays = [calls(cell["break_even_calls"]), calls(cell["refresh_calls"]) if cell["refresh_seconds"] else "-"]
    equal = f"{'yes' if cell['equal'] else 'NO'} ({cell['difference']:.0e})"
    return [*start, gain, *times, f"{cell['compile_seconds']:.1f}", *pays, equal, refresh]


def section(result: dict) -> list[str]:
    """What Markdown says on one network and device."""
    header = ["path", "batch", "faster, % [95 %]", "p50 (µs)", "p99 (µs)", "CPU (µs)", "eager p50 (µs)"]
    header += ["compile (s)", "pays after calls", "per refresh", "equal (largest difference)", "weights"]
    lines = [f"## {result['network']} on {result['device']}", "", best_line(result), ""]
    lines += [*table(header, [row_of(cell) for cell in result["cells"]]), ""]
    return [*lines, f"Threads: {result['threads']}. Measured {describe(result['provenance'])}", ""]


def shown(cell: dict) -> tuple[float, str]:
    """Colour (the gain over eager as a power of two, NaN if it can't be trusted) and text of a cell of the heat map."""
    if trusted(cell):
        return np.log2(cell["speedup"]), percent(cell["speedup"])
    return np.nan, "failed" if "error" in cell else "stale" if cell["equal"] else "unequal"


def draw(results: list[dict], path: Path) -> None:
    """A heat map for each network and device, paths by batch sizes; colour and number show the gain over eager."""
    all_paths = [list(dict.fromkeys(cell["path"] for cell in result["cells"])) for result in results]
    size = (2.8 + 0.75 * max(len(result["batch_sizes"]) for result in results), 1.1 + 0.3 * max(map(len, all_paths)))
    with plots.grid(path, len(results), size) as axes:
        for axis, result, paths in zip(axes, results, all_paths, strict=True):
            values = np.full((len(paths), len(result["batch_sizes"])), np.nan)
            notes = np.full(values.shape, "", dtype=object)  # was not measured
            for cell in result["cells"]:
                place = paths.index(cell["path"]), result["batch_sizes"].index(cell["batch_size"])
                values[place], notes[place] = shown(cell)
            sizes = [f"{size:,}" for size in result["batch_sizes"]]
            plots.draw_heat_map(axis, values, notes, paths, sizes)
            title, x = f"{result['network']} on {result['device']}", "batch size; % faster than eager"
            plots.describe_axis(axis, title, x, "")


def write_summary(out: Path) -> str:
    """Make `inference.md` and `inference.png` of all results in a folder; returns the Markdown."""
    results = load_all(out, "cells")
    lines = ["# Inference", "", INTRODUCTION, "", "![% faster than eager](inference.png)", ""]
    lines += [f"- {best_line(result)}" for result in results]
    text = "\n".join([*lines, "", *(line for result in results for line in section(result))])
    (out / "inference.md").write_text(text)
    draw(results, out / "inference.png")
    return text


def main(options: Options) -> int:
    started, options = time.perf_counter(), check(options)
    load_all(options.out, "cells")
    targets, sizes = {}, list(options.batch_sizes)
    for network, device in product(options.networks, options.devices):
        path = options.out / f"{network}.{device}.json"
        own = {"network": network, "device": device, "threads": options.threads, "batch_sizes": sizes}
        targets[network, device] = target = Target(path, {"seconds": options.seconds}, **own)
        known = {cell["path"] for cell in target.old.get("cells", [])}
        if missing := sorted(known - set(paths_of(device, options))):
            fail(f"{path} has the paths {', '.join(missing)}, which yours would lack: give another --out")

    def good(cells: list[dict]) -> set[tuple[str, int]]:
        return {(cell["path"], cell["batch_size"]) for cell in cells if "error" not in cell}

    def on_result(result: dict, is_all: bool) -> None:
        target = targets[result["network"], result["device"]]
        ours, before = good(result["cells"]), good(target.old.get("cells", []))
        is_done = is_all and all(turns.is_absent(cell["error"]) for cell in result["cells"] if "error" in cell)
        target.write(result, is_done and bool(ours) and before <= ours)

    kept = f"the paths that were finished before lie in {options.out}"
    with stoppable(kept), tqdm(unit="path", disable=None) as bar:
        measure(options, options.time_limit - (time.perf_counter() - started), bar, on_result)
    print(write_summary(options.out))
    return say_written(options.out, targets.values(), "inference.md", "inference.png")
