"""Speeds of many scripts within minutes: all start at once, are frozen when they run steadily, and are awake in turns.

Starting and compiling take most of the time of a short measurement. Here they are done side by side, on all cores,
along with the check that the variants of a pair compute the same. Then each process is awake for a few seconds at a
time, alone, in one order and in the next round in the other; between, it takes no time of the processor or the device.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.common import processes, runs, steady, turns
from benchmarks.common.programs import SCRIPTS, command, endless_flags, load_script
from benchmarks.common.results import provenance, write_whole
from benchmarks.throughput import throughput

STARTING = 0.5  # share of the time until all must be steady


@dataclass(eq=False)
class Contestant:
    """A variant of a pair: its process, frozen or awake, and the speeds that were measured."""

    script: str
    variant: str
    folder: Path  # does not exist yet
    child: processes.Child | None = None
    rounds: list[dict] = field(default_factory=list)  # for each its `speeds`, steps/s of each window
    failed: str | None = None

    def start(self, device: str, environment: dict[str, str]) -> None:
        self.folder.mkdir()
        flags = [*endless_flags(self.script, device), "--run-dir", str(self.folder / "run")]
        arguments = [*command(self.script, self.variant), *flags]
        self.child = processes.start(arguments, self.folder / "output", **environment)

    def lines(self) -> list[dict]:
        return runs.read_lines(self.folder / "run" / "metrics.jsonl")[0]

    def is_steady(self) -> bool:
        lines = self.lines()
        first = steady.first_update(lines)
        return first is not None and len(lines) > first + steady.FIRST_LINES

    def has_ended(self) -> bool:
        """Whether it is over, which it should never be."""
        if self.failed is None and self.child.poll() is not None:
            self.give_up(turns.without_paths(turns.end_of(self.child)) if self.child.poll() else "ended by itself")
        return self.failed is not None

    def give_up(self, reason: str) -> None:
        self.failed = reason
        self.child.kill()

    def measure(self, seconds: float, piece: float) -> None:
        """Be awake for so long, or up to four times as long until there is a window; then freeze again."""
        known, speeds = len(self.lines()), np.zeros(0)
        self.child.go_on()
        self.child.wait(seconds)
        for _ in range(30):
            speeds = steady.cut(self.lines()[known:], piece)  # its first line, which spans the freeze, only begins it
            if len(speeds) or self.has_ended():
                break
            self.child.wait(seconds / 10)
        self.child.freeze()
        if len(speeds):
            self.rounds.append({"speeds": speeds.tolist()})

    def result(self) -> dict:
        failed = {"failed": self.failed or "no window of steady speed"} if self.failed or not self.rounds else {}
        if not self.rounds:
            return failed
        low, median, high = np.quantile(np.concatenate([x["speeds"] for x in self.rounds]), [0.25, 0.5, 0.75]).tolist()
        return {"steps_per_second": median, "quartiles": [low, high], "rounds": self.rounds, **failed}


def results_of(contestants: list[Contestant], parity: dict[str, Path], device: str) -> list[dict]:
    """For each pair what its variants came to, and whether they compute the same."""
    results = []
    for script in dict.fromkeys(x.script for x in contestants):
        own = {x.variant: x.result() for x in contestants if x.script == script}
        measured = [name for name, x in own.items() if "steps_per_second" in x and name != "eager"]
        has_eager = "steps_per_second" in own.get("eager", {})
        ratios = [throughput.ratio(own, name, "eager") for name in measured if has_eager]
        same = json.loads(parity[script].read_text()) if script in parity and parity[script].exists() else {}
        env_id = load_script(SCRIPTS / f"{script}.py").Args.__dataclass_fields__["env_id"].default
        result = {"script": script, "env_id": env_id, "flags": "", "device": device}
        result |= {"contestants": own, "ratios": ratios}
        results.append(result | {"parity": same, "provenance": provenance()})
    return results


def wait_until_ready(contestants: list[Contestant], checks: list[processes.Child], deadline: float) -> None:
    """Freeze each contestant once it is steady. When time is up, end those that are not, and checks that still run."""
    frozen = set()
    while time.perf_counter() < deadline:
        for x in contestants:
            if x not in frozen and not x.has_ended() and x.is_steady():
                x.child.freeze()
                frozen.add(x)
        ready = sum(x in frozen or x.failed is not None for x in contestants)
        if ready == len(contestants) and all(check.poll() is not None for check in checks):
            break
        time.sleep(0.1)
    for x in contestants:
        if x not in frozen and x.failed is None:
            x.give_up(f"not steady after {time.perf_counter() - x.child.started:.0f} s")
    for check in checks:
        check.kill()


def measure_speeds(
    scripts: list[str],
    variants: tuple[str, ...],
    device: str,
    window: float,
    rounds: int,
    seconds: float,
    folder: Path,
    cache: Path,
    on_change: Callable[[list[dict]], None],
) -> list[dict]:
    """Speeds of all variants of all pairs within so many seconds, and whether they compute the same.

    `on_change` gets all results so far after each round. What memory is not enough for runs in a second group.
    """
    deadline = time.perf_counter() + seconds
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    size = max(1, processes.free_slots(processes.SCRIPT_MEMORY) // (len(variants) + 1))
    groups = [scripts[i : i + size] for i in range(0, len(scripts), size)]
    everyone, checks, parity = [], [], {script: folder / f"{script}.parity.json" for script in scripts}
    try:
        for i, group in enumerate(groups):
            started = time.perf_counter()
            end = started + (deadline - started) * len(group) / sum(map(len, groups[i:]))
            own = [Contestant(x, variant, folder / f"{x}.{variant}") for x in group for variant in variants]
            everyone += own
            for contestant in own:
                contestant.start(device, environment)
            own_checks = []
            for script in group:
                program = [sys.executable, "-m", "benchmarks.throughput.parity", script]
                program += [str(parity[script]), *variants[1:]]
                output = folder / f"{script}.parity.out"
                own_checks.append(processes.start([*program, "--", "--device", device], output, **environment))
            checks += own_checks
            wait_until_ready(own, own_checks, started + STARTING * (end - started))
            for script, check in zip(group, own_checks, strict=True):
                if not parity[script].exists():
                    reason = {"equal": False, "failed": turns.without_paths(turns.end_of(check))}
                    write_whole(parity[script], json.dumps(dict.fromkeys(variants[1:], reason)))
            for turn in range(rounds):
                for contestant in own[:: 1 if turn % 2 == 0 else -1]:
                    if contestant.failed is None and time.perf_counter() + window < end:
                        contestant.measure(window, window / 5)
                on_change(results_of(everyone, parity, device))
                if time.perf_counter() + window * len(own) > end:
                    break
            for contestant in own:
                contestant.child.kill()
    finally:
        for child in [x.child for x in everyone if x.child] + checks:
            child.kill()
    return results_of(everyone, parity, device)
