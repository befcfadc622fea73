"""Measuring in turns: processes that get ready in parallel and run one at a time, and calls in interleaved blocks.

Most of the time of a benchmark of compiled functions is compiling, which can use all cores at once; what is timed must
run alone. So a contestant gets ready, is frozen (by itself, with `wait_for_turn`, or from outside), and is woken when
all others are frozen or over.
"""

import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import processes
from benchmarks.common.programs import AS_MODULE, num_cores

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")  # variables that PyTorch and NumPy obey
BLOCKS = 10  # blocks of calls per contestant
CASE_MEMORY = {"cpu": 3 * 2**28, "cuda": 2 * 2**30}  # bytes of host memory that a case may need, by its device


def in_turns(things: Sequence, rounds: int) -> Iterator[tuple[int, Any]]:
    """(round, thing) for each thing in each round, their order reversed from round to round: A B B A."""
    for turn in range(rounds):
        for thing in things[:: 1 if turn % 2 == 0 else -1]:
            yield turn, thing


def wait_for_turn() -> None:
    """Called in a contestant: freeze until the parent wakes it."""
    os.kill(os.getpid(), signal.SIGSTOP)


@dataclass(eq=False)
class Contestant:
    """A program that gets ready alongside others, is frozen, and then runs alone for one or several turns.

    This one is ready when it has frozen itself, and its turn lasts until it ends; a subclass may differ.
    """

    command: list[str]
    output: Path  # file that takes what it prints
    environment: dict[str, str] = field(default_factory=dict)  # more variables
    child: processes.Child | None = None
    error: str | None = None  # why no more results will come

    def start(self) -> None:
        self.child = processes.start(self.command, self.output, **self.environment)

    def is_ready(self) -> bool:
        return self.child.is_frozen()

    def take_turn(self, seconds: float) -> None:
        """Run for as long as it takes, at most `seconds`."""
        self.child.go_on()
        if self.child.wait(seconds) is None:
            self.give_up(f"still measuring after {seconds:.0f} s")

    def is_over(self) -> bool:
        """Whether it has ended, by itself or not; if so, `error` says what went wrong, if anything."""
        code = self.child.poll()
        if code is not None and code != 0 and self.error is None:
            self.error = end_of(self.child)
        return code is not None

    def give_up(self, error: str) -> None:
        """Kill it and record why; the first of several reasons counts."""
        self.error = self.error or error
        if self.child:
            self.child.kill()


def end_of(child: processes.Child) -> str:
    """What went wrong in a process that failed: the line that names the error, or the last line, or the signal."""
    code = child.poll()
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return processes.error_line(child.last_lines(100)) or child.last_lines(1) or f"exit code {code}"


def compile_settings(cache: Path, jobs: int) -> dict[str, str]:
    """Variables for one of `jobs` processes that compile in parallel: their shared cache, and its share of cores."""
    threads = max(1, num_cores() // jobs)
    return {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHINDUCTOR_COMPILE_THREADS": str(threads)}


def prepare(contestants: list[Contestant], jobs: int, timeout: float, deadline: float) -> None:
    """Start all, `jobs` of them at a time, and freeze each when it is ready. Those not ready in time are given up."""
    waiting, running = contestants[::-1], []
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(waiting.pop())
            running[-1].start()
        now = time.perf_counter()
        for contestant in running:
            if contestant.is_ready():
                contestant.child.freeze()
            elif now > min(contestant.child.started + timeout, deadline) and contestant.child.poll() is None:
                contestant.give_up(f"not ready after {now - contestant.child.started:.0f} s")
        running = [x for x in running if x.child.poll() is None and not x.child.is_frozen()]
        time.sleep(0.02)


def take_turns(
    contestants: list[Contestant],
    jobs: int,
    timeout: float,
    time_limit: float,
    on_turn: Callable[[Contestant], None],
    rounds: int = 1,
) -> None:
    """Give each contestant `rounds` turns of at most `timeout` seconds each, all within `time_limit` seconds.

    Two thirds of the limit are for getting ready, for which each contestant also has at most `timeout`. The order of
    turns is reversed from round to round. After each turn `on_turn` gets the contestant, for the last time once it is
    over.
    """
    started, over = time.perf_counter(), set()
    try:
        prepare(contestants, jobs, timeout, started + 2 / 3 * time_limit)
        for turn, contestant in in_turns(contestants, rounds):
            if contestant in over:
                continue
            left = started + time_limit - time.perf_counter()
            if not contestant.is_over() and left > 0:
                contestant.take_turn(min(timeout, left))
            elif not contestant.is_over() and turn == 0:
                contestant.give_up("no time left for its turn")
            if contestant.is_over():
                over.add(contestant)
            on_turn(contestant)
    finally:
        for contestant in contestants:
            if contestant.child:
                contestant.child.kill()


def run_cases(
    module: str,
    cases: list[dict],
    jobs: int,
    timeout: float,
    time_limit: float,
    on_case: Callable[[dict, list[dict], str], None],
) -> None:
    """Run `python -m MODULE CASE` for each case, given as JSON, with its `threads` and an empty compile cache.

    As many are ready at once as fit into memory. As soon as a case has had its turn, `on_case` gets the case, the rows
    that it wrote as JSON lines to the file named by its `rows`, and the reason why there are no more of them.
    """
    started = time.perf_counter()
    slots = processes.free_slots(max(CASE_MEMORY[case["device"]] for case in cases))
    for i in range(0, len(cases), slots):
        left = time_limit - (time.perf_counter() - started)
        share = min(1.0, slots / (len(cases) - i))
        with tempfile.TemporaryDirectory() as folder:
            own = {}
            for j, case in enumerate(cases[i : i + slots]):
                rows, output, cache = (Path(folder, f"{j}.{kind}") for kind in ("jsonl", "out", "cache"))
                command = [*AS_MODULE, module, json.dumps(case | {"rows": str(rows)})]
                settings = compile_settings(cache, min(jobs, slots, len(cases)))
                settings |= dict.fromkeys(THREADS, str(case["threads"]))
                own[Contestant(command, output, settings)] = case, rows

            def on_turn(contestant: Contestant, own: dict = own) -> None:
                case, file = own[contestant]
                lines = file.read_text().splitlines() if file.exists() else []
                rows = [json.loads(line) for line in lines if line.endswith("}")]
                on_case(case, rows, without_paths(contestant.error or "no result"))

            take_turns(list(own), jobs, timeout, share * left, on_turn)


def without_paths(message: str) -> str:
    """The first line of an error message, without this machine's folders, cut to a reasonable length."""
    first = next((line.strip() for line in message.splitlines() if line.strip()), "")
    return re.sub(r"(?<![\w:/])(/[\w.+@-]+)+/", "", first)[:160]


def describe_error(error: BaseException) -> str:
    """One line that describes an exception, or the inner one if torch.compile has wrapped it."""
    within = getattr(error, "inner_exception", None) or error
    return without_paths(f"{type(within).__name__}: {within}")


def is_absent(error: str) -> bool:
    """Whether an error, as described, says that there is no such way on this machine, not that it failed."""
    return error.startswith(("NotImplementedError: ", "ImportError: ", "ModuleNotFoundError: "))


@dataclass
class Times:
    """What the calls of one contestant took, in seconds."""

    blocks: list[np.ndarray]  # wall time of each call, by block
    cpu: float  # mean processor time of a call

    @property
    def all(self) -> np.ndarray:
        return np.concatenate(self.blocks)

    def quantiles(self, *shares: float) -> list[float]:
        """Quantiles over all calls."""
        return np.quantile(self.all, shares).tolist()

    def medians(self) -> np.ndarray:
        """The median call of each block."""
        return np.array([np.median(block) for block in self.blocks])


def timed_block(call: Callable[[], None], count: int) -> tuple[np.ndarray, float]:
    """Wall time of each of `count` calls, and their total processor time, in seconds."""
    times = np.empty(count + 1)
    cpu = time.process_time()
    times[0] = time.perf_counter()
    for i in range(count):
        call()
        times[i + 1] = time.perf_counter()
    return np.diff(times), time.process_time() - cpu


def interleave(calls: dict[str, Callable[[], None]], seconds: float) -> dict[str, Times]:
    """Time calls in short interleaved blocks, in alternating order (A B B A), for `seconds` each.

    So whatever else the machine does affects all of them alike. A call that uses a device must wait for it itself.
    """
    estimates = {name: timed_block(call, 3)[0].min() for name, call in calls.items()}
    slow = max(estimates.values()) > seconds / BLOCKS
    num_blocks = 4 if slow else BLOCKS
    counts = {name: max(1, int(seconds / num_blocks / max(x, 1e-7))) for name, x in estimates.items()}
    blocks, cpu = ({name: [] for name in calls} for _ in range(2))
    for _, name in in_turns(list(calls), num_blocks):
        times, cpu_seconds = timed_block(calls[name], counts[name])
        blocks[name].append(times)
        cpu[name].append(cpu_seconds)
    return {name: Times(blocks[name], sum(cpu[name]) / (num_blocks * counts[name])) for name in calls}
