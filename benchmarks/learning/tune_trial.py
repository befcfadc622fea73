"""A trial of ./run.sh tune: a script trains in its own processes, one per seed, and the trial reports to Ray Tune.

At each interval a process is frozen right after its checkpoint, until Tune decides how the trial continues. So the
report is on exactly what was trained, a copy of the folder is a copy of the trial, and continuing needs no restart.

    OUT/trials/ID/seed0/      the script's run folder; from its checkpoint a trial can resume, whatever has ended it
    OUT/trials/ID/seed0.txt   what the script printed
"""

import fcntl
import json
import math
import shutil
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from ray.tune import Trainable

from benchmarks.common import processes, runs, stats
from benchmarks.common.results import write_json
from benchmarks.learning.sweep import last_step, share_of_cores
from benchmarks.learning.tune_history import INTERVALS, OBJECTIVE, History, read_histories
from benchmarks.learning.tune_space import as_flag, plain

POLL = 0.02  # seconds between two checks for a checkpoint
POLL_OTHERS = 0.1  # seconds between two checks of the other members' progress
ARRIVAL = "arrival.json"  # file of a population member: the interval at which it waits for its turn, and its return
RUN_FILES = ("checkpoint.pt", "config.json", "metrics.jsonl")  # what a script needs to resume


@dataclass(frozen=True)
class Plan:
    """What all trials of a search share."""

    program: tuple[str, ...]  # the command that starts the script
    flags: tuple[str, ...]  # its fixed settings
    folder: Path  # OUT/trials
    total_timesteps: int
    interval: int  # environment steps between two reports
    seeds: int  # runs of each trial
    slots: int  # trials side by side
    perturbed: tuple[str, ...] = ()  # settings that may change while a trial runs
    members: int = 0  # size of a population whose members all run in parallel and in step; otherwise 0
    first_seed: int = 1  # seed of the first run of the first trial
    cwd: Path = field(default_factory=Path.cwd)  # the folder of the user, not that of a process of Ray's

    @property
    def last(self) -> int:
        """How many reports a whole trial makes."""
        return -(-self.total_timesteps // self.interval)

    @property
    def journal(self) -> Path:
        return self.folder.parent / "journal.jsonl"


def seed_of(trial_id: str, run: int, plan: Plan) -> int:
    """The seed of a run of a trial, unique within a search. Ids end in a number, or are hexadecimal numbers."""
    return plan.first_seed + plan.seeds * int(trial_id.rpartition("_")[2], 16) + run


def identity(path: Path) -> tuple[int, int, int] | None:
    """A key that changes whenever the file is replaced or appended to; None if there is no file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


@dataclass(eq=False)
class Program:
    """The process of one seed: it runs from checkpoint to checkpoint."""

    folder: Path
    plan: Plan
    child: processes.Child
    seen: tuple = field(init=False)  # the checkpoint and the interval at which it last went on

    def __post_init__(self):
        self.seen = identity(self.checkpoint), self.interval

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.pt"

    @property
    def interval(self) -> int:
        """How many intervals it has completed, by its log."""
        return last_step(self.folder / "metrics.jsonl") // self.plan.interval

    @property
    def has_ended(self) -> bool:
        return self.child.poll() is not None

    def go_on(self) -> None:
        self.seen = identity(self.checkpoint), self.interval
        self.child.go_on()

    def has_arrived(self) -> bool:
        """Whether it has ended, or has written the checkpoint of an interval other than the last; then it is frozen.

        A script's final checkpoint need not begin a new interval, as rollouts have fewer steps than rows.
        """
        if self.has_ended or self.child.is_frozen():
            return True
        checkpoint, interval = self.seen
        if identity(self.checkpoint) == checkpoint or not interval < self.interval < self.plan.last:
            return False
        self.child.freeze()
        return True

    def end(self) -> None:
        self.child.go_on()
        self.child.stop(signal.SIGTERM)


def take_cores(folder: Path, slots: int) -> tuple[object, set[int] | None]:
    """(lock, cores) of a share of the CPU that no other trial has; the lock is held while its file is open."""
    for slot in range(slots):
        file = (folder / f"slot{slot}").open("a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            continue
        except OSError:  # a file system without locks: each trial takes all cores
            file.close()
            break
        return file, share_of_cores(slot, slots)
    return None, None  # or a trial that is ending has not released its share yet


def as_it_ended(history: History) -> dict:
    """The last report of a trial that ended too shortly before the search was killed for Ray Tune's snapshot."""
    if history.state == "failed":
        raise RuntimeError(history.why)
    names = (INTERVALS, "steps", OBJECTIVE, "returns")
    return {name: history.last[name] for name in names} | {"donor": None, "done": True}


def goes_before(first: str, arrival: dict, second: str, other_arrival: dict) -> bool:
    """Whether the first of two members reports before the second: by return, with the ids as tie-breaker."""
    returns = [-math.inf if math.isnan(x[OBJECTIVE]) else x[OBJECTIVE] for x in (arrival, other_arrival)]
    return (returns[0], first) > (returns[1], second)


def copy_run(source: Path, target: Path) -> None:
    """Replace the run in `target` by a copy of the one in `source`; the old one stays until the copy is complete."""
    copy, old = (target.with_name(f"{target.name}.{kind}") for kind in ("copy", "old"))
    for folder in (copy, old):
        shutil.rmtree(folder, ignore_errors=True)
    copy.mkdir(parents=True)
    for name in RUN_FILES:
        shutil.copyfile(source / name, copy / name)
    if target.exists():
        target.rename(old)
    copy.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def is_whole(folder: Path) -> bool:
    """Whether a script can go on with the run in a folder."""
    return all((folder / name).exists() for name in RUN_FILES)


class Trial(Trainable):
    """One setting of the search, as Ray Tune drives it: `step` is an interval of all its seeds."""

    def setup(self, config: dict, plan: Plan) -> None:  # noqa: ARG002  # Trainable keeps the settings in self.config
        self.plan, self.programs, self.donor = plan, [], None
        self.lock, self.cores = take_cores(plan.folder, plan.slots)

    @property
    def folders(self) -> list[Path]:
        return [self.plan.folder / self.trial_id / f"seed{i}" for i in range(self.plan.seeds)]

    def reset_config(self, new_config: dict) -> bool:  # noqa: ARG002
        """Become another trial: the processes of the one that Tune has paused or ended are stopped."""
        self.cleanup()
        self.donor = None
        return True

    def cleanup(self) -> None:
        for program in self.programs:
            program.end()
        self.programs = []

    def start(self) -> None:
        """Start the script for each seed, from its checkpoint if there is one, with the current settings."""
        settings = {name: plain(value) for name, value in self.config.items()}
        for i, folder in enumerate(self.folders):
            if is_whole(folder):
                changes = [f"{name}={settings[name]}" for name in self.plan.perturbed]
                arguments = ["--resume", str(folder), *(["--override", *changes] if changes else [])]
            else:
                shutil.rmtree(folder, ignore_errors=True)
                folder.parent.mkdir(parents=True, exist_ok=True)
                seed = seed_of(self.trial_id, i, self.plan)
                chosen = [as_flag(name, value) for name, value in settings.items()]
                arguments = [*self.plan.flags, *chosen, f"--seed={seed}", f"--run-dir={folder}"]
            command, output = [*self.plan.program, *arguments], folder.with_suffix(".txt")
            child = processes.start(command, output, self.cores, cwd=self.plan.cwd)
            self.programs.append(Program(folder, self.plan, child))

    def step(self) -> dict:
        """Train to the next checkpoint of each seed -> the report; RuntimeError if a script fails."""
        if self.programs:
            for program in self.programs:
                program.go_on()
        else:
            history = read_histories(self.plan.journal).get(self.trial_id)
            if history is not None and history.has_ended:
                return as_it_ended(history)
            self.start()
        while not all([program.has_arrived() for program in self.programs]):  # each one, so that each is frozen
            time.sleep(POLL)
        failed = [program.child for program in self.programs if program.has_ended and program.child.failure()]
        if failed:
            self.cleanup()
            raise RuntimeError(f"{failed[0].failure()}\n{failed[0].last_lines()}")
        result = self.report()
        if self.plan.members and not result["done"]:
            self.wait_for_others(result)
        return result

    def wait_for_others(self, result: dict) -> None:
        """Report once all members have reached this interval, and after those with better returns have reported.

        Ray Tune decides at each report. In this order it knows all scores, and the best have been saved, when the worst
        report; otherwise it would compare reports of different intervals, or find no checkpoint to copy.
        """
        arrival = {INTERVALS: result[INTERVALS], OBJECTIVE: result[OBJECTIVE]}
        write_json(self.plan.folder / self.trial_id / ARRIVAL, arrival)
        seen, histories = None, {}
        while not self.is_my_turn(arrival, histories):
            time.sleep(POLL_OTHERS)
            if identity(self.plan.journal) != seen:
                seen, histories = identity(self.plan.journal), read_histories(self.plan.journal)

    def is_my_turn(self, mine: dict, histories: dict[str, History]) -> bool:
        """Whether no other member has yet to reach this interval, or to report a better return at it."""
        for other in [x for x in histories.values() if not x.has_ended and x.id != self.trial_id]:
            if other.last[INTERVALS] >= mine[INTERVALS]:
                continue
            file = self.plan.folder / other.id / ARRIVAL
            arrival = json.loads(file.read_text()) if file.exists() else None
            if arrival is None or arrival[INTERVALS] < mine[INTERVALS]:
                return False
            if arrival[INTERVALS] == mine[INTERVALS] and goes_before(other.id, arrival, self.trial_id, mine):
                return False
        return len(histories) >= self.plan.members

    def report(self) -> dict:
        """The trial's progress; the objective is NaN while a seed has not finished any episode."""
        found = [runs.read_run(folder) for folder in self.folders]
        steps, returns = min(run.steps for run in found), [runs.final_return(run) for run in found]
        done = all(program.has_ended for program in self.programs)
        result = {INTERVALS: self.plan.last if done else steps // self.plan.interval, "steps": steps, "done": done}
        result |= {OBJECTIVE: float(stats.iqm(returns)), "returns": returns, "donor": self.donor}
        self.donor = None
        return result

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        for folder in self.folders:
            copy_run(folder, Path(checkpoint_dir, folder.name))
        Path(checkpoint_dir, "trial.json").write_text(json.dumps(self.trial_id))

    def load_checkpoint(self, checkpoint: str) -> None:
        """Resume from a checkpoint of this trial, or of another, which then is the donor."""
        self.cleanup()
        for folder in self.folders:
            copy_run(Path(checkpoint, folder.name), folder)
        origin = json.loads(Path(checkpoint, "trial.json").read_text())
        self.donor = origin if origin != self.trial_id else None
