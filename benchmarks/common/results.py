"""Common parts of all results: provenance (command, commit, versions, machine, date; no host names), and tables."""

import fcntl
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tqdm import tqdm

from benchmarks.common.programs import ROOT, fail, num_cores

PACKAGES = (
    "torch", "triton", "tensordict", "gymnasium", "mujoco", "envpool", "numpy", "onnxruntime", "stable_baselines3",
    "sbx-rl", "jax", "tianshou", "torchrl", "ray",
)  # fmt: skip


def git(*arguments: str) -> str:
    """Output of a git command in this repository; empty if it fails."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def package_versions() -> dict[str, str]:
    """Versions of Python and of those of PACKAGES that are installed."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def cpu_model() -> str:
    """The processor's name as Linux gives it, with family and model, as vendors sell several under one name.

    On other systems the architecture.
    """
    info = Path("/proc/cpuinfo")
    pairs = (line.partition(":") for line in info.read_text().splitlines()) if info.exists() else ()
    known = {key.strip(): value.strip() for key, _, value in pairs}
    numbers = [f"{word} {known[key]}" for word, key in (("family", "cpu family"), ("model", "model")) if key in known]
    return known.get("model name", platform.machine()) + (f" ({', '.join(numbers)})" if numbers else "")


def gpu_model() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def portable(word: str) -> str:
    """A command-line word without this machine's folders: paths become relative to the repository, or a bare name."""
    flag, equals, value = word.rpartition("=")
    path = Path(value)
    if not path.is_absolute():
        return word
    return flag + equals + str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name)


def command_line() -> str | None:
    """The run.sh command that is running, as one would retype it; None in any other program."""
    if Path(sys.argv[0]).resolve() != ROOT / "benchmarks" / "__main__.py":
        return None
    return shlex.join(["./run.sh", *map(portable, sys.argv[1:])])


GENERATIONS = {
    "AMD EPYC (family 25, model 1)": "AMD EPYC (Zen 3)",  # AVX2 only
    "AMD EPYC (family 25, model 17)": "AMD EPYC (Zen 4)",
    "AMD EPYC (family 26, model 2)": "AMD EPYC (Zen 5)",
    "Intel(R) Xeon(R) Processor": "Intel Xeon (with AMX)",  # results from before the family was named
    "Intel(R) Xeon(R) Processor @ 2.50GHz (family 6, model 85)": "Intel Xeon (Cascade Lake)",  # AVX-512, no AMX
}
CLAIMED: dict[Path, int] = {}  # folders that this process has locked, with their file descriptors
SECOND_EPYC = "2026-11-23 17:00"  # when results without the CPU's family changed from one "AMD EPYC" to another
# What results depend on; writing results does not count as a change of the code
CODE = ("scripts", "benchmarks", "requirements", ":(exclude)benchmarks/results")


def code_state() -> dict:
    """The commit that is checked out, and whether the code differs from it.

    In a copy of the files, whose history is not there or another's, they are those of the variable FLATOUT_COMMIT, as
    `git describe --always --dirty --abbrev=40` has printed them on another machine.
    """
    if told := os.environ.get("FLATOUT_COMMIT"):
        return {"commit": told.removesuffix("-dirty"), "uncommitted_changes": told.endswith("-dirty")}
    commit = git("rev-parse", "HEAD") or None
    return {"commit": commit, "uncommitted_changes": bool(git("status", "--porcelain", "--", *CODE))}


@cache
def code_at_start() -> dict:
    """The state of the code at the first call, which a command makes before anything else."""
    if told := os.environ.get("FLATOUT_COMMIT"):
        print(f"note: results will name the commit of FLATOUT_COMMIT, {told}", file=sys.stderr)
    return code_state()


def provenance(since: dict | None = None) -> dict:
    """What every result's JSON file records: the code's state at the start, whether it changed, and the machine.

    `since` is what this said when the work began, if another process began it.
    """
    start, now = since or code_at_start(), code_state()
    has_changed = bool(git("diff", "--name-only", f"{start['commit']}", f"{now['commit']}", "--", *CODE))
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command_line(),
        "commit": start["commit"],
        "uncommitted_changes": start["uncommitted_changes"] or now["uncommitted_changes"],
        **({"changed_until": now["commit"]} if has_changed else {}),
        "versions": package_versions(),
        "machine": {"cpu": cpu_model(), "cores": num_cores(), "gpu": gpu_model()},
    }


def is_clean(source: dict) -> bool:
    """Whether all of a result was measured with the code of one commit."""
    return not source["uncommitted_changes"] and "changed_until" not in source


def machine_folder(out: Path) -> Path:
    """Where this machine's results go: `out` or, if that holds another's, a subfolder named after its GPU or CPU."""
    here = provenance()
    others = [result["provenance"] for result in load_all(out)]
    if all(machine_of(other) == machine_of(here) for other in others):
        return out
    return out / re.sub(r"\W+", "_", here["machine"]["gpu"] or here["machine"]["cpu"]).strip("_").lower()


def machine_of(source: dict) -> str:
    """The machine of a provenance in words."""
    machine = source["machine"]
    cpu = machine["cpu"]
    if cpu == "AMD EPYC":  # two CPUs, until results named the family: the hour tells which
        cpu += " (Zen 4)" if source["date"] < SECOND_EPYC else " (Zen 5)"
    cpu = GENERATIONS.get(cpu, cpu)
    return f"{machine['cores']} cores of {cpu}" + (f", {machine['gpu']}" if machine["gpu"] else "")


def commit_of(source: dict) -> str:
    """The commit of a provenance in words."""
    until = f" to {source['changed_until'][:12]}, which came while it ran" if "changed_until" in source else ""
    more = " with uncommitted changes" * source["uncommitted_changes"] + ", unfinished" * ("is_unfinished" in source)
    return (source["commit"] or "none")[:12] + until + more


def describe(source: dict) -> str:
    """One line of Markdown on a provenance."""
    where, what = machine_of(source), ", ".join(f"{name} {number}" for name, number in source["versions"].items())
    how = f"; `{source['command']}`" if source.get("command") else ""  # old results have no command
    return f"{source['date']}{how}; commit {commit_of(source)}; {where}; {what}."


def load(path: Path, *keys: str) -> dict:
    """A result's file; SystemExit(2) with its name if it is damaged, or lacks one of these keys."""
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        fail(f"{path} can't be read ({type(error).__name__}: {error}): move it away, or give another --out")
    missing = [key for key in ("provenance", *keys) if not isinstance(result, dict) or key not in result]
    if missing:
        fail(f"{path} is no result of this command, as it has no {missing[0]}: move it away, or give another --out")
    return result


def load_all(out: Path, *keys: str) -> list[dict]:
    """The results in a folder, ordered by file name."""
    return [load(path, *keys) for path in sorted(out.glob("*.json"))]


def make_folder(folder: Path) -> None:
    """Make the folder for results, or exit with an error if nothing can be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        fail(f"can't write to {folder}: {error.strerror}")


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically: a reader finds either all of it or the previous one."""
    beside = path.with_name(path.name + ".tmp")
    beside.write_bytes(content.encode() if isinstance(content, str) else content)
    beside.replace(path)


def write_json(path: Path, content) -> None:
    """Write a JSON file atomically."""
    write_whole(path, json.dumps(content, indent=1) + "\n")


def claim(folder: Path) -> None:
    """Lock a folder for this process until it ends; SystemExit(2) if another process has locked it."""
    if (folder := folder.resolve()) in CLAIMED:
        return
    CLAIMED[folder] = os.open(folder, os.O_RDONLY)
    with suppress(OSError):  # a file system without locks
        try:
            fcntl.flock(CLAIMED[folder], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fail(f"another command is writing to {folder}: wait for its end, or give another --out")


def short(name: str) -> str:
    """A name for a file, of which file systems take 255 bytes: the end of a longer one becomes its checksum."""
    return (
        name
        if len(name.encode()) <= 200
        else f"{name.encode()[:100].decode(errors='ignore')}_{zlib.crc32(name.encode()):08x}"
    )


class Target:
    """A file for a result; its old content is kept until the new result is complete.

    If the old result is from another machine or answers another question, the new one must not replace it, and this is
    refused before anything is measured, as is a folder to which another command is writing. Of a list, such as the
    contestants, the new one must have all that the old has. `effort` are numbers, such as of rounds, that must not be
    less than the old ones.
    """

    def __init__(self, path: Path, effort: dict[str, float] | None = None, **question):
        claim(path.parent)
        self.path, self.part = path, path.with_name(path.name + ".part")
        self.is_new, self.is_whole = not path.exists(), False
        self.old = old = {} if self.is_new else load(path, *question)
        here = provenance()
        there = machine_of(old.get("provenance", here))
        why = [f"is of {there}"] if machine_of(here) != there else []
        for name, value in question.items():
            known = old.get(name, value)
            if isinstance(value, list):
                missing = [str(x) for x in known if x not in value]
                why += [f"has the {name} {', '.join(missing)}, which yours would lack"] if missing else []
            elif known != value:
                why += [f"has {name} {known}"]
        why += [f"has {old[x]:g} {x}, more than yours" for x, n in (effort or {}).items() if old.get(x, 0) > n]
        if why:
            fail(f"{path} {', and '.join(why)}: give another --out, or move it away")

    def write(self, result: dict, is_whole: bool = True) -> None:
        """Write the result; if it is incomplete and would replace an older one, beside that one instead."""
        if not is_whole:
            result = result | {"provenance": result["provenance"] | {"is_unfinished": True}}
        write_json(self.path if is_whole or self.is_new else self.part, result)
        self.is_whole = is_whole
        if is_whole:
            self.part.unlink(missing_ok=True)

    def begun(self) -> dict:
        """The newest result of this command, by this code on this machine; {} if there is none.

        If an unfinished one can't be continued, it stays, and the command ends with the reason.
        """
        here = provenance()
        for path in [x for x in (self.part, self.path) if x.exists()]:
            source = (found := load(path))["provenance"]
            why = obstacles(source, here)
            if not why:
                return found
            if path == self.part:
                fail(f"{path} is unfinished, and can't be continued: {', '.join(why)}; move it away to begin anew")
            if source["command"] == here["command"]:
                print(f"note: {path} is measured anew: {', '.join(why)}", file=sys.stderr)
        return {}


def obstacles(source: dict, here: dict) -> list[str]:
    """Why a command can't go on with an earlier result: both must be of the same command, code and machine."""
    why = [f"it was made by `{source.get('command')}`"] if source.get("command") != here["command"] else []
    why += ["it was made with other versions"] if source["versions"] != here["versions"] else []
    why += [f"it is of {machine_of(source)}"] if source["machine"] != here["machine"] else []
    if here["uncommitted_changes"] or not is_clean(source):
        return [*why, "then or now, scripts, benchmarks or requirements had changes or new files that no commit has"]
    if None in (source["commit"], here["commit"]):
        why.append("neither git nor FLATOUT_COMMIT tells whether the code is the same")
    elif source["commit"] != here["commit"] and is_changed(source["commit"], here["commit"]):
        why.append(f"it is of commit {str(source['commit'])[:12]}")
    return why


def is_changed(before: str, after: str) -> bool:
    """Whether the code of two commits differs, or may do so, as one of them is not in this repository."""
    command = ["git", "-C", str(ROOT), "diff", "--quiet", str(before), str(after), "--", *CODE]
    try:
        return subprocess.run(command, capture_output=True).returncode != 0
    except OSError:  # there is no git
        return True


def say_written(out: Path, targets: Iterable[Target], *others: str) -> int:
    """Say what was written into a folder, and which results are incomplete; returns the exit code, 1 if any is."""
    targets = list(targets)
    own = [x.path.name for x in targets if x.is_whole or (x.is_new and x.path.exists())]
    print(f"written to {out}: {', '.join([*others, *own])}")
    for target in [x for x in targets if not x.is_whole]:
        kept = "" if target.is_new else f"; the older result stays, and the new one is in {target.part.name}"
        print(f"failed: not all of {target.path.stem}{kept}", file=sys.stderr)
    return 0 if all(target.is_whole for target in targets) else 1


@contextmanager
def stoppable(kept: str) -> Iterator[None]:
    """On Ctrl-C, SIGTERM or SIGHUP, end the block by KeyboardInterrupt, and then the program, which says what is kept.

    tqdm's monitor thread is disabled, since it must not exist when the program forks.
    """
    tqdm.monitor_interval = 0
    is_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    for signum in (signal.SIGINT, signal.SIGTERM, *([] if is_nohup else [signal.SIGHUP])):
        signal.signal(signum, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        with suppress(OSError):  # of a terminal that has closed
            print(f"\nstopped; {kept}", file=sys.stderr)
        raise SystemExit(130) from None


def table(header: list[str], rows: list[list]) -> list[str]:
    """Lines of a Markdown table. What bears a "|", such as an error message, gets a "/" instead."""
    rows = [[str(cell).replace("|", "/") for cell in cells] for cells in (header, ["---"] * len(header), *rows)]
    return [f"| {' | '.join(cells)} |" for cells in rows]


def plural(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)


def estimate(value: float, ends: list[float] | None, form: str = ",.1f") -> str:
    """A value with its interval, where there is one, as a cell of a table."""
    return f"{value:{form}}" + (f" [{ends[0]:{form}}, {ends[1]:{form}}]" if ends else "")
