"""Measuring in turns: processes that prepare side by side and run one at a time, and calls in interleaved blocks.

Compiling takes most of the time of a benchmark of compiled functions, and can be done on all cores at once; what is
timed must be alone. So a worker prepares, freezes itself (`wait_for_turn`), and is woken when all others are frozen or
done.
"""

import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.common import processes

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")  # what PyTorch and NumPy heed
BLOCKS = 10  # of calls, of each contestant
CASE_MEMORY = {"cpu": 3 * 2**28, "cuda": 2 * 2**30}  # bytes of the host's memory that a case may take, by its device


def wait_for_turn() -> None:
    """In a worker: freeze until the parent says go on."""
    os.kill(os.getpid(), signal.SIGSTOP)


@dataclass(eq=False)
class Worker:
    """A program that prepares, freezes itself, and measures when it is woken."""

    command: list[str]
    output: Path  # file that takes what it prints
    cache: Path  # folder that it compiles to
    environment: dict[str, str] = field(default_factory=dict)  # more variables
    child: processes.Child | None = None
    error: str | None = None  # why it did not come to its end


def end_of(child: processes.Child) -> str:
    """What went wrong in a process that has ended with an error: the line that names it, its last line, or the signal.

    PyTorch's errors go on for some lines, with advice, after the one that names them.
    """
    code = child.poll()
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    named = re.findall(r"^(?:error: |[\w.]*(?:Error|Exception)\b).*", child.last_lines(100), re.MULTILINE)
    return (named[-1] if named else child.last_lines(1)) or f"exit code {code}"


def prepare(workers: list[Worker], jobs: int, timeout: float, deadline: float) -> None:
    """Start all workers, `jobs` of them at a time, and wait until each has frozen itself or is over."""
    waiting, running = workers[::-1], []
    while waiting or running:
        while waiting and len(running) < jobs:
            worker = waiting.pop()
            own = {"TORCHINDUCTOR_CACHE_DIR": str(worker.cache), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
            worker.child = processes.start(worker.command, worker.output, **own, **worker.environment)
            running.append(worker)
        now = time.perf_counter()
        for worker in running:
            if now > min(worker.child.started + timeout, deadline) and not worker.child.is_frozen():
                worker.child.kill()
                worker.error = f"not ready after {now - worker.child.started:.0f} s"
        running = [x for x in running if x.child.poll() is None and not x.child.is_frozen()]
        time.sleep(0.02)


def take_turns(
    workers: list[Worker], jobs: int, timeout: float, time_limit: float, on_turn: Callable[[Worker], None]
) -> None:
    """Run all workers, none longer than `timeout` seconds for either part, and all within `time_limit` seconds.

    Of the limit, two thirds are for preparing. A worker that has not come to its end has an `error` when, after its
    turn, it is given to `on_turn`.
    """
    started = time.perf_counter()
    try:
        prepare(workers, jobs, timeout, started + 2 / 3 * time_limit)
        for worker in workers:
            worker.child.go_on()
            left = min(timeout, started + time_limit - time.perf_counter())
            if worker.child.wait(left) is None:
                worker.child.kill()
                worker.error = f"still measuring after {max(left, 0):.0f} s"
            elif worker.child.poll() != 0:
                worker.error = worker.error or end_of(worker.child)
            on_turn(worker)
    finally:
        for worker in workers:
            if worker.child:
                worker.child.kill()


def run_cases(
    module: str,
    cases: list[dict],
    jobs: int,
    timeout: float,
    time_limit: float,
    on_case: Callable[[dict, list[dict], str], None],
) -> None:
    """Run `python -m MODULE CASE`, the case as JSON, for each; with its `threads`, and nothing compiled beforehand.

    As many are ready at once as there is memory for. As soon as one has had its turn, `on_case` gets the case, the rows
    that it wrote, as JSON lines, into the file that its case names as `rows`, and why there are no more of them.
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
                command = [sys.executable, "-m", module, json.dumps(case | {"rows": str(rows)})]
                threads = dict.fromkeys(THREADS, str(case["threads"]))
                own[Worker(command, output, cache, threads)] = case, rows

            def on_turn(worker: Worker, own: dict = own) -> None:
                case, file = own[worker]
                lines = file.read_text().splitlines() if file.exists() else []
                rows = [json.loads(line) for line in lines if line.endswith("}")]
                on_case(case, rows, without_paths(worker.error or "no result"))

            take_turns(list(own), jobs, timeout, share * left, on_turn)


def without_paths(message: str) -> str:
    """The first line of an error message, without the folders of this machine, and not endless."""
    first = next((line.strip() for line in message.splitlines() if line.strip()), "")
    return re.sub(r"(?<![\w:/])(/[\w.+@-]+)+/", "", first)[:160]


def describe_error(error: Exception) -> str:
    """One line on an exception; of those that torch.compile wraps into its own, the one within."""
    within = getattr(error, "inner_exception", None) or error
    return without_paths(f"{type(within).__name__}: {within}")


@dataclass
class Times:
    """What the calls of one contestant took, in seconds."""

    blocks: list[np.ndarray]  # wall time of each call, by block
    cpu: float  # processor time of a call, mean

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
    """Wall time of each of so many calls, and the processor time of all, in seconds."""
    times = np.empty(count + 1)
    cpu = time.process_time()
    times[0] = time.perf_counter()
    for i in range(count):
        call()
        times[i + 1] = time.perf_counter()
    return np.diff(times), time.process_time() - cpu


def interleave(calls: dict[str, Callable[[], None]], seconds: float) -> dict[str, Times]:
    """Time calls in short blocks, in turns and in alternating order (A B B A), for so many seconds each.

    Whatever else the machine does hits all of them alike. A call that waits for a device is to do so itself.
    """
    estimates = {name: timed_block(call, 3)[0].min() for name, call in calls.items()}
    slow = max(estimates.values()) > seconds / BLOCKS
    num_blocks = 4 if slow else BLOCKS
    counts = {name: max(1, int(seconds / num_blocks / max(x, 1e-7))) for name, x in estimates.items()}
    blocks, cpu = ({name: [] for name in calls} for _ in range(2))
    for i in range(num_blocks):
        for name in list(calls)[:: 1 if i % 2 == 0 else -1]:
            times, cpu_seconds = timed_block(calls[name], counts[name])
            blocks[name].append(times)
            cpu[name].append(cpu_seconds)
    return {name: Times(blocks[name], sum(cpu[name]) / (num_blocks * counts[name])) for name in calls}
