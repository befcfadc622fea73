"""Runs of a sweep as processes on the nodes of a Ray cluster. Ray is imported only when a sweep joins one.

A run is a child process of a Ray actor on its node, in a folder among the node's temporary files. This process asks
the actor for what is new in that folder and copies it into the sweep's. So a node needs neither this repository nor a
shared file system, and a node that Ray has given up but that still works can't corrupt a run that goes on elsewhere.
"""

import fcntl
import importlib.util
import itertools
import json
import math
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, NamedTuple

from tqdm import tqdm

from benchmarks.common import processes
from benchmarks.common.processes import Child, Started
from benchmarks.common.processes import start as start_process
from benchmarks.common.programs import INSTALL, fail
from benchmarks.common.results import git, write_whole

LOSSES = 3  # node failures that a run survives
CHUNK = 2**26  # bytes of a file sent at a time
ANSWER = 60  # seconds within which a node must report what is installed there
PACKAGES = ("torch", "tensordict", "numpy", "gymnasium", "envpool", "tyro")  # Ray itself compares Python's and its own
LOGS = ("output.txt", "metrics.jsonl", "events.out.tfevents")  # name prefixes of files that are only appended to
TO_GO_ON = ("config.json", "metrics.jsonl", "checkpoint.pt")  # what a script's --resume reads


class Part(NamedTuple):
    """A part of a file of a run."""

    name: str
    stamp: tuple  # identifies this version of the file; another version must be read from its beginning
    offset: int
    content: bytes
    is_last: bool  # whether the file is complete with this part, for now


def is_log(name: str) -> bool:
    return name.startswith(LOGS)


# What runs on a node. Ray ships this code there, so it uses nothing from this repository but `processes`


def versions() -> dict[str, str]:
    """Versions of the packages that must agree on all nodes, without the suffix of builds for different devices."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name).partition("+")[0]
        except PackageNotFoundError:
            found[name] = "none"
    return found


def introduce() -> dict:
    """The node that this is called on."""
    import ray

    node = ray.get_runtime_context().get_node_id()
    return {"id": node, "name": f"{ray.util.get_node_ip_address()} ({node[:8]})", "versions": versions()}


def lock(path: Path, wait: bool = False) -> IO | None:
    """A lock on a file, held as long as it is open; None if another process has it."""
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        file.close()
        return None
    return file


def take_folder(base: Path) -> tuple[Path, IO]:
    """An empty folder in `base`, owned while the lock is held; the folders of dead processes are removed."""
    with lock(base / "lock", wait=True):
        for path in base.glob("run-*.lock"):
            if held := lock(path):
                shutil.rmtree(path.with_suffix(""), ignore_errors=True)
                path.unlink()
                held.close()
        folder = Path(tempfile.mkdtemp(prefix="run-", dir=base))
        return folder, lock(folder.with_suffix(".lock"))


def take_cores(base: Path, count: int) -> tuple[set[int], list[IO]]:
    """`count` CPU cores, or all if there are fewer, preferring the least used; they are taken while the locks are held.

    Ray counts cores but does not assign specific ones, and scripts use as many threads as they have cores.
    """
    cores, taken = sorted(os.sched_getaffinity(0)), {}
    for layer in itertools.count():
        for core in (core for core in cores if core not in taken):
            if held := lock(base / f"core{core}.{layer}"):
                taken[core] = held
            if len(taken) == min(count, len(cores)):
                return set(taken), list(taken.values())


class Host:
    """A Ray actor with a run as its child process. Any call may be repeated, since its answer can be lost."""

    def __init__(self, cores: int):
        base = Path(tempfile.gettempdir(), f"flatout-{os.getuid()}")
        base.mkdir(mode=0o700, exist_ok=True)
        self.folder, self.lock = take_folder(base)
        self.cores, self.core_locks = take_cores(base, cores)
        self.run, self.kept = self.folder / "run", self.folder / "kept"
        self.child: Child | None = None
        self.kept.mkdir()

    def introduce(self) -> dict:
        return introduce()

    def put(self, name: str, offset: int, content: bytes) -> None:
        """Write a part of a file that the run will resume from."""
        self.run.mkdir(exist_ok=True)
        with (self.run / name).open("r+b" if offset else "wb") as file:
            file.seek(offset)
            file.write(content)

    def begin(self, script: str, text: bytes, flags: list[str], environment: dict[str, str]) -> dict:
        """Start the script, as a file of its own -> the first report."""
        if self.child is None:
            (self.folder / script).write_bytes(text)
            environment |= {"OMP_NUM_THREADS": str(len(self.cores))}
            paths = [os.environ.get("PYTHONPATH"), environment.pop("PYTHONPATH", None)]
            environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
            # Started by the main thread, which lives as long as this process: when it ends, the child is killed, too
            self.child = start_process(
                [sys.executable, script, *flags], self.folder / "output.txt", self.cores, self.folder, **environment
            )
        return self.report({})

    def report(self, have: dict[str, tuple[tuple, int]]) -> dict:
        """What is new since `have`, the stamp and size of each file at the driver; the exit code once all is sent."""
        code = self.child.poll()  # before the files are read, so that they hold all that an ended run wrote
        files = [self.folder / "output.txt", *(self.run.iterdir() if self.run.exists() else ())]
        files = [path for path in files if path.is_file() and path.suffix != ".tmp"]
        # Logs are read after checkpoints, so that they reach at least as far, and are sent first
        others = [self.part_of_version(path, have.get(path.name)) for path in files if not is_log(path.name)]
        logs = [self.part_of_log(path, have.get(path.name)) for path in files if is_log(path.name)]
        parts = [part for part in (*logs, *others) if part]
        is_all = all(part.is_last and part.stamp == stamp_of(self.run / part.name) for part in others if part)
        news = {"parts": parts, "code": code if is_all else None}
        if news["code"] is not None:
            news |= {"seconds": self.child.seconds, "resources": self.child.resources()}
        return news

    def part_of_log(self, path: Path, has: tuple[tuple, int] | None) -> Part | None:
        """What a file that only grows has gained."""
        with path.open("rb") as file:
            stamp = (os.fstat(file.fileno()).st_ino,)
            offset = has[1] if has and has[0] == stamp else 0
            file.seek(offset)
            content = file.read()
        return Part(path.name, stamp, offset, content, True) if content else None

    def part_of_version(self, path: Path, has: tuple[tuple, int] | None) -> Part | None:
        """The next part of a file that gets replaced: a version once begun is sent completely, then the newest one.

        A hard link keeps that version, at no cost, when the run replaces the file.
        """
        kept = self.kept / path.name
        if not (kept.exists() and has and has[0] == stamp_of(kept) and has[1] < kept.stat().st_size):
            kept.unlink(missing_ok=True)
            os.link(path, kept)
        stamp, size = stamp_of(kept), kept.stat().st_size
        offset = has[1] if has and has[0] == stamp else 0
        if offset >= size:
            return None
        with kept.open("rb") as file:
            file.seek(offset)
            content = file.read(CHUNK)
        return Part(path.name, stamp, offset, content, offset + len(content) >= size)

    def ask(self, signum: int) -> None:
        self.child.ask(signum)

    def close(self) -> None:
        """End the run, if it still runs, and leave nothing on the node."""
        if self.child:
            self.child.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.with_suffix(".lock").unlink(missing_ok=True)


def stamp_of(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_ino, stat.st_mtime_ns


# What runs here


class Program(NamedTuple):
    """What a run executes: the script's text as it was when the sweep first used it, and its flags."""

    script: str
    text: bytes
    flags: list[str]


class Copy:
    """The local copy of a run's files, as far as its node has sent them: the run's folder and its output."""

    def __init__(self, folder: Path, output: Path, commit: str | None):
        self.folder, self.output, self.commit = folder, output, commit
        self.leave()

    def leave(self) -> None:
        """Prepare for another node: none of its files are here yet, and its output is appended to what there is."""
        self.have: dict[str, tuple[tuple, int]] = {}  # a stamp and a size of each file
        self.base = self.output.stat().st_size
        for path in self.folder.glob("*.part"):
            path.unlink()

    def clear(self) -> None:
        """Make room for a run that starts anew."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def take(self, part: Part) -> None:
        """Write a part. A file that replaces another does so only when all of it has arrived."""
        path = self.folder / part.name
        if part.name == "output.txt":
            write_at(self.output, self.base + part.offset, part.content)
        elif is_log(part.name) and part.offset:
            write_at(path, part.offset, part.content)
        elif part.is_last and not part.offset:
            write_whole(path, named_commit(part.content, self.commit) if path.name == "config.json" else part.content)
        else:
            beside = path.with_name(path.name + ".part")
            if not part.offset:
                beside.write_bytes(b"")
            write_at(beside, part.offset, part.content)
            if part.is_last:
                beside.replace(path)
        self.have[part.name] = part.stamp, part.offset + len(part.content)


class RemoteChild(Started):
    """A run on whichever node has room. If the node dies, it waits for another and resumes from its checkpoint."""

    def __init__(self, cluster: "Cluster", program: Program, copy: Copy, note: Callable[..., None]):
        super().__init__(copy.output, math.inf)
        self.cluster, self.program, self.copy, self.note, self.ray = cluster, program, copy, note, cluster.ray
        self.code, self.trouble, self.usage, self.losses, self.has_begun = None, None, {}, 0, False
        self.submit()

    def submit(self) -> None:
        """Ask Ray for a node with room for it."""
        self.node, self.started = None, math.inf
        self.actor = self.cluster.hosts.remote(max(1, int(self.cluster.cpus)))
        self.send(self.actor.introduce)

    def send(self, method, *arguments) -> None:
        """Call a method of the actor; `poll` receives the answer."""
        self.ask_again = partial(method.remote, *arguments)
        self.answer = self.ask_again()

    def poll(self) -> int | None:
        """The exit code, or None while it runs or waits; processes the node's answer if there is one."""
        if self.code is None and self.ray.wait([self.answer], timeout=0)[0]:
            self.hear()
        return self.code

    def hear(self) -> None:
        errors = self.ray.exceptions
        try:
            news = self.ray.get(self.answer)
        except (errors.ActorUnavailableError, errors.ObjectLostError):  # out of reach for now, or gone with its node
            self.answer = self.ask_again()
        except (errors.RayActorError, errors.NodeDiedError, errors.OutOfMemoryError) as error:
            self.lose(error)
        except errors.RayError as error:
            cause = getattr(error, "cause", None) or error
            self.end(1, f"{self.where()}: {type(cause).__name__}: {one_line(cause)}")
        else:
            if self.node is None:
                self.begin(news)
            else:
                self.receive(news)

    def begin(self, node: dict) -> None:
        """Start it on the node that Ray has found: from scratch, or from the checkpoint sent by the previous node."""
        self.node = node
        if differ := differences(node):
            self.end(1, differ)
            return
        goes_on, self.has_begun = self.has_begun and (self.copy.folder / "checkpoint.pt").exists(), True
        if not goes_on:
            self.copy.clear()
        for name in TO_GO_ON if goes_on else ():
            for offset, content in chunks(self.copy.folder / name):
                self.actor.put.remote(name, offset, content)
        self.started = time.perf_counter()
        self.note("started", node=node["name"], **({"from": "checkpoint"} if goes_on else {}))
        flags = ["--resume", "run"] if goes_on else [*self.program.flags, "--run-dir", "run"]
        self.send(self.actor.begin, self.program.script, self.program.text, flags, self.cluster.environment)

    def receive(self, news: dict) -> None:
        """Copy what is new in the run's folder."""
        for part in news["parts"]:
            self.copy.take(part)
        if news["code"] is not None:
            self.usage, self.seconds = news["resources"], news["seconds"]
            self.end(news["code"])
        else:
            self.send(self.actor.report, self.copy.have)

    def lose(self, error: Exception) -> None:
        """Handle the death of its node: wait for another one, or give up after too many."""
        where, why = self.where(), self.cluster.death(self.node, error)
        self.losses += 1
        if self.asked:
            self.end(-signal.SIGKILL)
        elif self.losses > LOSSES:
            self.end(1, f"it lost its node {self.losses} times, the last time {where}: {why}")
        else:
            self.note("requeued", node=where, why=why)
            tqdm.write(f"requeued: {self.copy.folder.name}, {where}: {why}", file=sys.stderr)
            self.cluster.warn_of_no_room()
            self.copy.leave()
            self.submit()

    def where(self) -> str:
        return self.node["name"] if self.node else "not yet on a node"

    def end(self, code: int, trouble: str | None = None) -> None:
        """Record that it has ended, and end its actor and all that the actor started."""
        self.code, self.trouble = code, trouble
        self.ray.wait([self.actor.close.remote()], timeout=10 if self.node else 0)
        self.ray.kill(self.actor)

    def ask(self, signum: int) -> None:
        """Ask it to end cleanly; if it is still waiting for a node, it never runs."""
        if self.poll() is None and not self.asked:
            self.asked = True
            if math.isinf(self.started):
                self.end(-signum)
            else:
                self.actor.ask.remote(signum)

    def kill(self) -> None:
        """End it, and all that it started, at once."""
        if self.code is None:
            self.end(-signal.SIGKILL)

    def failure(self) -> str | None:
        """How it failed, in words: what happened to it, or else its own exit code."""
        return self.trouble or super().failure()

    def resources(self) -> dict:
        """Peak memory, cores in use on average, and the node."""
        return self.usage | ({"node": self.node["name"]} if self.node else {})


class Cluster:
    """The nodes of a Ray cluster: Ray starts runs where there is room and queues the others."""

    slots = sys.maxsize  # all runs are submitted to Ray at once, so that an autoscaler sees how many nodes are needed

    def __init__(self, address: str, cpus: float, gpus: float):
        """Join the cluster; SystemExit(2) if it can't be reached, has no room for a run, or other versions."""
        self.cpus, self.gpus = cpus, gpus
        self.ray, self.is_own = join(address)
        if not any(self.has_room()):
            sizes = ", ".join(sorted({size_of(node) for node in self.nodes()}))
            fail(f"a run is to have {amount(cpus, gpus)}, and no node has so much; there are nodes with {sizes}")
        for module in (sys.modules[__name__], processes):
            self.ray.cloudpickle.register_pickle_by_value(module)  # nodes need not have this repository
        for node in self.introductions():
            if differ := differences(node):
                fail(differ)
        self.hosts = self.ray.remote(num_cpus=cpus, num_gpus=gpus, scheduling_strategy="SPREAD")(Host)
        self.commit, self.texts = git("describe", "--always", "--dirty", "--abbrev=40") or None, {}
        paths = [os.environ.get("PYTHONPATH"), os.getcwd()]  # where nodes that share files find environments, too
        self.environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        if not gpus:
            self.environment["CUDA_VISIBLE_DEVICES"] = ""  # a run without GPUs must not use its node's
        count = len(self.nodes())
        nodes = f"{count} node{'s' * (count != 1)}"
        self.pace = f"each on {amount(cpus, gpus)}, as many at a time as {nodes} of the cluster have room for"

    def nodes(self) -> list[dict]:
        return [node for node in self.ray.nodes() if node["Alive"]]

    def has_room(self) -> Iterator[bool]:
        """For each node, whether a run would fit if it were alone there."""
        for node in self.nodes():
            has = node["Resources"]
            yield has.get("CPU", 0) >= self.cpus and has.get("GPU", 0) >= self.gpus

    def warn_of_no_room(self) -> None:
        if not any(self.has_room()):
            tqdm.write(f"no node with {amount(self.cpus, self.gpus)} is left; waiting for one", file=sys.stderr)

    def introductions(self) -> list[dict]:
        """The introductions of the nodes that answer in time."""
        strategy = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        task = self.ray.remote(num_cpus=0, max_retries=0)(introduce)
        there = [strategy(node["NodeID"], soft=False) for node in self.nodes()]
        answers = [task.options(scheduling_strategy=node).remote() for node in there]
        ready, _ = self.ray.wait(answers, num_returns=len(answers), timeout=ANSWER)
        found = []
        for answer in ready:
            try:
                found.append(self.ray.get(answer))
            except self.ray.exceptions.RayError:
                continue  # the node has died meanwhile
        return found

    def death(self, node: dict | None, error: Exception) -> str:
        """Why an actor on a node is gone."""
        if node and node["id"] not in [other["NodeID"] for other in self.nodes()]:
            return "the node is gone"
        return f"its actor died: {one_line(error)}"

    def start(self, arguments: list[str], folder: Path, output: Path, _slot: int, note) -> RemoteChild:
        """Submit a run, which starts in an empty folder when there is room; its progress is noted."""
        _, script, *flags = arguments
        if script not in self.texts:
            self.texts[script] = Path(script).read_bytes()
        output.write_bytes(b"")
        program = Program(Path(script).name, self.texts[script], flags)
        return RemoteChild(self, program, Copy(folder, output, self.commit), note)

    def close(self) -> None:
        """Leave the cluster."""
        if self.is_own:
            self.ray.shutdown()


def join(address: str):
    """Ray's module, connected to a cluster, and whether the connection was made here; SystemExit(2) if that fails."""
    if importlib.util.find_spec("ray") is None:
        fail(f"--ray-address needs Ray: {INSTALL.format('-ray')}")
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0"} | os.environ
    import ray

    if ray.is_initialized():
        return ray, False
    try:
        found = ray._private.services.canonicalize_bootstrap_address_or_die(address)
        host, _, port = found.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()  # Ray itself would wait for minutes
        ray.init(address=found, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    except Exception as error:
        fail(f"can't use the Ray cluster --ray-address {address}: {type(error).__name__}: {one_line(error)}")
    return ray, True


def differences(node: dict) -> str | None:
    """A line on the packages whose versions on a node differ from this process's; None if all agree."""
    own = versions()
    differ = [f"{name} {x}, here it is {own[name]}" for name, x in node["versions"].items() if x != own[name]]
    return f"node {node['name']} has {'; '.join(differ)}" if differ else None


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]


def amount(cpus: float, gpus: float) -> str:
    """CPUs and GPUs in words."""
    return " and ".join([f"{cpus:g} CPU"] + [f"{gpus:g} GPU"] * (gpus > 0))


def size_of(node: dict) -> str:
    return amount(node["Resources"].get("CPU", 0), node["Resources"].get("GPU", 0))


def chunks(path: Path) -> Iterator[tuple[int, bytes]]:
    """The parts of a file, each with its offset."""
    with path.open("rb") as file:
        for offset in itertools.count(step=CHUNK):
            content = file.read(CHUNK)
            if not content:
                return
            yield offset, content


def write_at(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def named_commit(text: bytes, commit: str | None) -> bytes:
    """A run's configuration with its script's commit filled in, which a node can't know."""
    config = json.loads(text)
    for entry in (config, *config.get("resumed", [])):
        entry["commit"] = entry["commit"] or commit
    return json.dumps(config, indent=2).encode() + b"\n"
