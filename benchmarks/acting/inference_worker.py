"""One network by one path, in a process of its own: python -m benchmarks.acting.inference_worker SETTINGS, as JSON.

Builds the path for each batch size and checks its outputs, freezes until it is woken, then times it beside eager.
Writes one JSON line per batch size: failures to build at once, the others when they have been timed.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.acting.networks import draw_inputs, make_act
from benchmarks.acting.paths import FIRST_CALLS, Built, build, build_and_call
from benchmarks.common import stats, steady, turns

TOLERANCE = 1e-4  # of outputs, absolute below 1 and relative above: float32 sums in another order
FLIPS = 1e-3  # share of discrete actions that may differ, as rounding decides between equally good ones
REFRESHES = 5  # timed refreshes


@dataclass
class Case:
    """A path that was built for a batch size, ready to be timed."""

    row: dict
    act: nn.Module
    inputs: tuple[Tensor, Tensor]
    built: Built


def copies(outputs) -> list[Tensor]:
    """Outputs that the next call can't overwrite."""
    return [x.detach().clone().cpu() for x in outputs]


def difference(outputs: list[Tensor], expected: list[Tensor]) -> float:
    """Largest difference between two lists of outputs (B, ...), relative to the expected value or to 1 if larger;
    infinite if too many discrete actions differ. Rows whose action differs are left out of the comparison."""
    if [x.shape for x in outputs] != [x.shape for x in expected]:
        return float("inf")
    same = torch.ones(len(expected[0]), dtype=torch.bool)
    for x, y in zip(outputs, expected, strict=True):
        if not y.is_floating_point():
            same &= x == y
    if (~same).sum() > FLIPS * len(same):
        return float("inf")
    pairs = [(x[same], y[same]) for x, y in zip(outputs, expected, strict=True) if y.is_floating_point()]
    errors = [((x - y).abs() / y.abs().clamp(min=1)).amax().item() for x, y in pairs if x.numel()]
    return max((float("inf") if error != error else error for error in errors), default=0.0)


def take_step(act: nn.Module, inputs: tuple[Tensor, Tensor]) -> None:
    """One step of Adam that changes all outputs, in place as any optimizer does."""
    with torch.enable_grad():
        loss = sum(x.square().sum() for x in act(*inputs) if x.is_floating_point())
        optimizer = torch.optim.Adam(act.parameters(), lr=0.02)
        loss.backward()
        optimizer.step()
    act.zero_grad()


def follow_weights(act: nn.Module, built: Built, inputs: tuple[Tensor, Tensor]) -> tuple[str, float]:
    """(verdict, refresh seconds): outputs follow an optimizer step, do so only after a refresh, or are stale."""
    before = copies(act(*inputs))
    take_step(act, inputs)
    expected = copies(act(*inputs))
    if difference(before, expected) <= 10 * TOLERANCE:
        raise RuntimeError("the optimizer step changed too little to be seen")
    if difference(copies(built.call(*inputs)), expected) <= TOLERANCE:
        return "follow", 0.0
    if built.refresh is None:
        return "stale", 0.0
    times = []
    for _ in range(REFRESHES):
        start = time.perf_counter()
        built.refresh()
        times.append(time.perf_counter() - start)
    is_fresh = difference(copies(built.call(*inputs)), expected) <= TOLERANCE
    return "refreshed" if is_fresh else "stale", statistics.median(times)


def prepare(settings: dict, batch_size: int) -> Case:
    """Build a path for a batch size and determine everything but its speed."""
    device = torch.device(settings["device"])
    act = make_act(settings["network"]).to(device)
    inputs = draw_inputs(settings["network"], act, batch_size, device)
    expected = copies(act(*inputs))
    outputs = []
    run = lambda built: outputs.append(copies(built.call(*inputs)))  # noqa: E731
    built, seconds, graphs = build_and_call(settings["path"], act, inputs, run)
    error = max(difference(x, expected) for x in outputs)
    weights, refresh_seconds = follow_weights(act, built, inputs)
    row = {"path": settings["path"], "batch_size": batch_size, "compile_seconds": seconds, "compiled_graphs": graphs}
    row |= {"equal": error <= TOLERANCE, "difference": error, "weights": weights, "refresh_seconds": refresh_seconds}
    return Case(row, act, inputs, built)


def measure(case: Case, seconds: float) -> dict:
    """The row of a case with the times of its path and of eager."""
    on_cuda = case.inputs[0].is_cuda

    def timed(call: Callable) -> Callable[[], None]:
        """A call that ends when the device has."""

        def run() -> None:
            call(*case.inputs)
            if on_cuda:
                torch.cuda.synchronize()

        return run

    calls = {"eager": timed(build("eager", case.act, case.inputs).call), "path": timed(case.built.call)}
    times = turns.interleave(calls, seconds)
    speedup, interval = stats.ratio_of_rounds(times["eager"].medians(), times["path"].medians())
    row = dict(case.row, speedup=speedup, interval=interval)
    for prefix, name in (("", "path"), ("eager_", "eager")):
        p50, p99 = times[name].quantiles(0.5, 0.99)
        row |= {f"{prefix}p50_us": 1e6 * p50, f"{prefix}p99_us": 1e6 * p99, f"{prefix}cpu_us": 1e6 * times[name].cpu}
        row |= {f"{prefix}calls": len(times[name].all)}
    row["compile_seconds"] = max(0.0, row["compile_seconds"] - 1e-6 * FIRST_CALLS * row["p50_us"])
    fast, slow = 1e6 / row["p50_us"], 1e6 / row["eager_p50_us"]
    start = row["compile_seconds"] + row["refresh_seconds"]
    is_faster = interval[0] > 1  # beyond doubt
    row["break_even_calls"] = steady.break_even(start, fast, 0.0, slow) if is_faster else None
    row["refresh_calls"] = steady.break_even(row["refresh_seconds"], fast, 0.0, slow) if is_faster else None
    return row


def main(settings: dict) -> None:
    torch.set_num_threads(settings["threads"])
    torch.backends.cudnn.allow_tf32 = False  # else convolutions of two paths differ in the third digit
    cases = []
    with torch.no_grad(), Path(settings["rows"]).open("w", buffering=1) as file:
        for batch_size in settings["batch_sizes"]:
            try:
                cases.append(prepare(settings, batch_size))
            except Exception as error:  # any failure of a backend is a result, and other sizes may still work
                row = {"path": settings["path"], "batch_size": batch_size, "error": turns.describe_error(error)}
                file.write(json.dumps(row) + "\n")
        turns.wait_for_turn()
        for case in cases:
            try:
                row = measure(case, settings["seconds"])
            except Exception as error:
                row = case.row | {"error": turns.describe_error(error)}
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
