"""Child processes that can't outlive their parent, and what they took, as the kernel reports it."""

import contextlib
import ctypes
import os
import re
import resource
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common.programs import ROOT, fail

PR_SET_PDEATHSIG = 1  # of prctl(2)
SCRIPT_MEMORY = 3 * 2**30  # bytes of host memory that a script training on a GPU may need
PATIENCE = 30  # seconds between asking a child to end and killing it


def free_slots(memory: int) -> int:
    """How many processes of `memory` bytes fit into memory, at least 1.

    The variable `MEMORY_GIB`, if set, replaces the system's figure for available memory, which can miss a limit.
    """
    if "MEMORY_GIB" in os.environ:
        try:
            return max(1, int(float(os.environ["MEMORY_GIB"]) * 2**30) // memory)
        except (ValueError, OverflowError):
            fail(f"MEMORY_GIB={os.environ['MEMORY_GIB']}: it must be a number")
    if not Path("/proc/meminfo").exists():  # not Linux
        return 1
    lines = Path("/proc/meminfo").read_text().splitlines()
    kilobytes = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return max(1, 1024 * kilobytes // memory)


def error_line(text: str) -> str:
    """The last line that names an error: PyTorch's messages continue with lines of advice. Empty if there is none."""
    named = re.findall(r"^[ \t]*((?:error: |[\w.]*(?:Error|Exception)\b).*)", text, re.MULTILINE)
    return named[-1].strip() if named else ""


@dataclass(eq=False)
class Started(ABC):
    """A started program, here or on another machine: the file with its output, and how to wait for it and to end it."""

    output: Path
    started: float  # on the clock of time.perf_counter()
    seconds: float = field(default=0.0, kw_only=True)  # that it ran
    asked: bool = field(default=False, kw_only=True)  # to end

    @abstractmethod
    def poll(self) -> int | None:
        """The exit code, negative for a signal, or None while it runs."""

    @abstractmethod
    def ask(self, signum: int) -> None:
        """Ask it to end in good order; once only, as a second signal would kill a script."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once."""

    @abstractmethod
    def resources(self) -> dict:
        """What it took, once it has ended."""

    def wait(self, seconds: float) -> int | None:
        """The exit code once it has ended, or None if it still runs after so long."""
        deadline = time.perf_counter() + seconds
        while (code := self.poll()) is None and time.perf_counter() < deadline:
            time.sleep(0.05)
        return code

    def stop(self, signum: int = signal.SIGINT) -> int:
        """Ask it to end, and kill it with all that it started if it does not; returns its exit code."""
        self.ask(signum)
        if self.wait(PATIENCE) is None:
            self.kill()
        return self.poll()

    def finish(self, seconds: float) -> str | None:
        """Wait for its end, and end it after so long; returns why it did not end well by itself, if so."""
        try:
            self.wait(seconds)
        finally:
            why = self.failure() if self.poll() is not None else f"no end after {seconds:g} s"
            self.stop()
        return why

    def failure(self) -> str | None:
        """How it failed, in words; None if it runs or ended well."""
        code = self.poll() or 0
        return f"exit code {code}" if code > 0 else f"killed by signal {-code}" if code else None

    def last_lines(self, count: int = 8) -> str:
        """The end of its output; a progress bar is reduced to its last state."""
        lines = self.output.read_text(errors="replace").splitlines()
        return "\n".join([line.rsplit("\r", 1)[-1] for line in lines if line.strip()][-count:])


@dataclass(eq=False)
class Child(Started):
    """A process on this machine; its resource usage is known once it has ended."""

    process: subprocess.Popen
    usage: resource.struct_rusage | None = None
    peak_memory: int = 0  # in KiB, of the process itself; 0 if unknown

    def note_memory(self) -> None:
        """Read the peak of its resident memory so far. The kernel's `ru_maxrss` counts that of its parent, too."""
        with contextlib.suppress(OSError):  # it has ended, or this is not Linux
            found = re.search(r"VmHWM:\s*(\d+)", Path(f"/proc/{self.process.pid}/status").read_text())
            self.peak_memory = int(found[1]) if found else self.peak_memory

    def poll(self) -> int | None:
        """The exit code, negative for a signal, or None while it runs."""
        if self.process.returncode is None:
            self.note_memory()
            # Popen's own poll would discard the resource usage
            pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
            if pid:
                self.process.returncode = os.waitstatus_to_exitcode(status)
                self.usage, self.seconds = usage, time.perf_counter() - self.started
        return self.process.returncode

    def ask(self, signum: int) -> None:
        """Ask it to end in good order; once only, as a second signal would kill a script."""
        if self.poll() is None and not self.asked:
            self.asked = True
            self.process.send_signal(signum)

    def kill(self) -> None:
        """Kill it and all that it started, even if frozen."""
        if self.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        while self.poll() is None:
            time.sleep(0.01)

    def freeze(self) -> None:
        """Suspend it and all that it started until `go_on`: meanwhile it takes no processor time."""
        if self.poll() is None:
            os.killpg(self.process.pid, signal.SIGSTOP)
        deadline = time.perf_counter() + PATIENCE
        while self.poll() is None and not self.is_frozen() and time.perf_counter() < deadline:
            time.sleep(0.001)

    def go_on(self) -> None:
        """Resume it, whether it was frozen by `freeze` or froze itself."""
        if self.poll() is None:
            os.killpg(self.process.pid, signal.SIGCONT)

    def is_frozen(self) -> bool:
        """Whether it is stopped, as by SIGSTOP."""
        if self.poll() is not None:
            return False
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def resources(self) -> dict:
        """Its peak memory in MiB, without that of processes which it started, and cores in use on average."""
        cpu_seconds = self.usage.ru_utime + self.usage.ru_stime
        return {"peak_resident_mb": self.peak_memory / 1024, "cores_used": cpu_seconds / max(self.seconds, 1e-9)}


def start(
    command: list[str], output: Path, cpus: set[int] | None = None, cwd: Path | None = None, **environment: str
) -> Child:
    """Start a program with its output in a file: in the folder `cwd`, or else in this one, so that paths in its flags
    are those of the user; only on `cpus`, if they are given. It finds the modules of this repository.
    """
    paths = environment.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    if str(ROOT) not in paths.split(os.pathsep):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), paths]))
    prctl = getattr(ctypes.CDLL(None), "prctl", None)

    def prepare() -> None:
        if prctl:  # on Linux
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if cpus and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cpus)

    with output.open("w") as file:
        streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
        # In its own session Ctrl-C does not reach it, so that only its parent ends it
        process = subprocess.Popen(
            command, **streams, cwd=cwd, env=os.environ | environment, start_new_session=True, preexec_fn=prepare
        )
    return Child(output, time.perf_counter(), process)
