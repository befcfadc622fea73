"""The speed of all pairs' variants within some minutes, side by side: what `./run.sh gpu speed` does.

Starting and compiling take up most of a short measurement. Here all variants of all pairs start and compile in
parallel, on all cores, and each is frozen once it runs steadily. Then each is woken alone for a second or two, the
order reversed from round to round; while frozen, it uses neither the processor nor the device.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.common import processes, runs, steady, turns
from benchmarks.common.programs import fields_of, num_cores
from benchmarks.common.results import provenance
from benchmarks.throughput import throughput

PIECES = 5  # parts of a turn; the speed of each is a window
PUBLISHED_EVERY = 60.0  # seconds between two publications of what was measured so far
NO_WINDOW = "no window of steady speed"
PATIENCE = 4.0  # how long a contestant may stay awake until it has written enough, as a multiple of a turn


@dataclass(eq=False)
class Contestant(turns.Contestant):
    """A program that trains endlessly, its log, and the speeds measured."""

    log: Path = Path("metrics.jsonl")
    window: float = 1.5  # seconds of a turn
    warm: float = 3.0  # seconds of learning before the first turn
    rounds: list[dict] = field(default_factory=list)  # one for each turn; `speeds` are the steps/s of its windows

    @property
    def is_measured(self) -> bool:
        return any(x["speeds"] for x in self.rounds)

    def lines(self) -> list[dict]:
        return runs.read_lines(self.log)[0]

    def is_ready(self) -> bool:
        """Whether it runs steadily, and so may be frozen."""
        lines = self.lines()
        first = steady.first_update(lines)
        is_learning = first is not None and len(lines) > first + steady.FIRST_LINES
        return is_learning and lines[-1]["seconds"] - lines[first]["seconds"] >= self.warm

    def is_over(self) -> bool:
        if self.child.poll() == 0:
            self.error = self.error or "ended by itself"
        return super().is_over()

    def take_turn(self, seconds: float) -> None:
        """Stay awake for a turn, or longer until there is a window; then freeze again. Skipped if time is too short."""
        if seconds < self.window:
            return
        known, speeds = len(self.lines()), np.zeros(0)
        self.child.go_on()
        self.child.wait(self.window)
        end = time.perf_counter() + min(seconds, PATIENCE * self.window) - self.window
        while not len(speeds) and not self.is_over():
            # The first line spans the frozen time, and the second may: a line is timed just before it is written. So
            # the second only marks the start of the first window
            speeds = steady.cut(self.lines()[known + 1 :], self.window / PIECES)
            if time.perf_counter() > end:
                break
            self.child.wait(self.window / 10)
        self.child.freeze()
        # A turn without a window is kept, for ratios pair the contestants' turns by their number
        self.rounds.append({"speeds": speeds.tolist()} | ({} if len(speeds) else {"failed": NO_WINDOW}))

    def result(self) -> dict:
        """Median speed with quartiles, and why there is none or why measuring ended early, if so."""
        failed = {"failed": turns.without_paths(self.error)} if self.error else {}
        if not self.is_measured:
            return failed
        low, median, high = np.quantile(np.concatenate([x["speeds"] for x in self.rounds]), [0.25, 0.5, 0.75]).tolist()
        return {"steps_per_second": median, "quartiles": [low, high], "rounds": self.rounds, **failed}


def result_of(script: str, contestants: dict[str, Contestant], device: str) -> dict:
    """The results so far of a pair's contestants, with their ratios to eager."""
    own = {name: x.result() for name, x in contestants.items() if x.is_measured or x.error}
    measured = [name for name, x in own.items() if "steps_per_second" in x]
    ratios = [throughput.ratio(own, name, "eager") for name in measured if name != "eager" and "eager" in measured]
    result = {"script": script, "env_id": fields_of(script)["env_id"].default, "flags": "", "device": device}
    return result | {"contestants": own, "ratios": ratios, "provenance": provenance()}


def measure(
    pairs: dict[str, dict[str, Contestant]],
    device: str,
    rounds: int,
    seconds: float,
    on_change: Callable[[list[dict]], None],
) -> None:
    """Measure the contestants of all pairs within so many seconds; `on_change` gets the results now and then.

    Contestants that do not fit into memory together are measured in further groups. Everything is frozen while results
    are published, so that is done at most once a minute, and at the end.
    """
    everyone, slots = [x for own in pairs.values() for x in own.values()], processes.free_slots(processes.SCRIPT_MEMORY)
    share, published = seconds / -(-len(everyone) // slots), time.perf_counter()

    def publish() -> None:
        nonlocal published
        seen = {script: own for script, own in pairs.items() if any(x.is_measured or x.error for x in own.values())}
        if seen:  # else there is nothing to draw yet
            on_change([result_of(script, own, device) for script, own in seen.items()])
        published = time.perf_counter()

    def on_turn(_contestant: turns.Contestant) -> None:
        if time.perf_counter() > published + PUBLISHED_EVERY:
            publish()

    try:
        for i in range(0, len(everyone), slots):
            group = everyone[i : i + slots]
            turns.take_turns(group, min(len(group), num_cores()), share, share, on_turn, rounds)
            for contestant in [x for x in group if not x.is_measured]:
                contestant.error = contestant.error or NO_WINDOW
    finally:
        publish()
