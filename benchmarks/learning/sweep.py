"""Run scripts x variants x environments x seeds, as a user would, and report on them: ./run.sh sweep.

Every run is a fresh process with its own folder under OUT/runs and its output under OUT/output. The journal,
OUT/journal.jsonl, gets a line when a run starts and when it ends, written to disk at once. Whatever ends the sweep,
--resume (with --out, if it was given) continues it without repeating a finished run; failed and interrupted runs start
from scratch. With --ray-address the processes are spread over the nodes of a Ray cluster, and their files are collected
in the same folders.

Measures: what each run learns, and how long it takes; `./run.sh report --help` says how that is summarized.
Takes: as long as the runs that it announces, divided by --jobs; at the defaults one to four hours on two cores.
Leaves: OUT/runs with a folder for each run, OUT/output, OUT/journal.jsonl, and OUT/report, which names failed runs too.
"""

import fcntl
import json
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

from tqdm import tqdm

from benchmarks.common import processes, runs
from benchmarks.common.programs import (
    Variant,
    check_known,
    check_once,
    check_positive,
    check_seeds,
    check_settings,
    command,
    cores,
    default_variants,
    fail,
    fields_of,
    pairs,
    pairs_here,
    say_left_out,
    split_flags,
)
from benchmarks.common.results import make_folder, stoppable, write_whole
from benchmarks.learning import cluster_runs, report

TAIL = 8192  # bytes at the end of a log in which its last whole line is found
# Options that say what the runs are
PLAN = ("scripts", "variants", "seeds", "env_ids", "total_timesteps", "flags", "cpus_per_run", "gpus_per_run")


@dataclass
class Options:
    scripts: tuple[str, ...] = ()  # pairs, by the name of the eager script; by default all that can run here
    variants: tuple[Variant, ...] = ()  # by default eager and compile, on CUDA also those with CUDA graphs
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)  # the fewest that get a verdict
    env_ids: tuple[str, ...] = ()  # environments for every script; by default each script's own
    total_timesteps: int = 50_000  # environment steps of each run
    jobs: int = 1  # runs in parallel, each on its own share of the CPU cores
    timeout: float = 14_400.0  # seconds after which a run is ended and counts as failed
    flags: str = ""  # extra flags for all runs, as in --flags="--num-envs 8"
    ray_address: str | None = None  # run on a Ray cluster: auto (the one of this machine) or HOST:PORT
    cpus_per_run: float | None = None  # on a cluster: CPU cores reserved for each run, fractions allowed; by default 1
    gpus_per_run: float | None = None  # on a cluster: GPUs reserved for each run, fractions allowed; by default none
    resume: bool = False  # continue the sweep in OUT with its original settings
    out: Path = Path("runs/sweep")  # folder of the sweep


@dataclass(eq=False)
class Job:
    """One run of the plan, and its process while it runs."""

    name: str
    arguments: list[str]  # all but the folder of the run
    title: str = ""  # for the report
    child: processes.Started | None = None


class Journal:
    """A line for each run's start and end, flushed to disk before anything else happens.

    The first line holds the settings of the sweep, which a resumed sweep keeps.
    """

    def __init__(self, path: Path, settings: dict, resume: bool):
        self.path, self.states, self.settings, self.file = path, {}, settings, path.open("a")
        with suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fail(f"another sweep is running in {path.parent}")
        lines = read_journal(path)
        if lines and not resume:
            fail(f"{path.parent} holds a sweep; --resume goes on with it, --out names another folder")
        for line in lines[1:]:
            self.states[line.get("run")] = line.get("state")
        if lines:
            self.settings = saved_settings(path)
            self.file.write("\n")  # the last line may have been cut off
        else:
            self.write({"settings": settings})

    def write(self, line: dict) -> None:
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        os.fsync(self.file.fileno())

    def note(self, name: str, state: str, **more) -> None:
        self.states[name] = state
        self.write({"run": name, "state": state, "time": time.strftime("%Y-%m-%d %H:%M:%S"), **more})

    def count(self, state: str) -> int:
        return sum(x == state for x in self.states.values())


def read_journal(path: Path) -> list[dict]:
    """The whole lines of a journal."""
    lines = []
    for text in path.read_text(errors="replace").splitlines() if path.exists() else ():
        with suppress(ValueError):
            lines += [line] if isinstance(line := json.loads(text), dict) else []
    return lines


def saved_settings(journal: Path) -> dict | None:
    """The settings in the first line of a journal; None if it has no lines."""
    lines = read_journal(journal)
    if lines and "settings" not in lines[0]:
        fail(f"the first line of {journal}, with the settings, is damaged: begin anew, with another --out")
    return lines[0]["settings"] if lines else None


def settings_of(options: Options) -> dict:
    """The options that define the runs, as stored in the journal, with the defaults filled in."""
    settings = {name: getattr(options, name) for name in PLAN}
    settings["scripts"] = settings["scripts"] or pairs_here()
    settings["variants"] = settings["variants"] or default_variants()
    return json.loads(json.dumps(settings))


def resumed(options: Options, saved: dict) -> Options:
    """The options of the resumed sweep; one given now with another value is refused, unless it is the default."""
    defaults = Options()
    # Begun on one machine, a sweep has none of these; nor do older journals have them
    ours = {name: getattr(options, name) for name in ("cpus_per_run", "gpus_per_run") if saved.get(name) is None}
    saved = saved | ours
    if set(saved) != set(PLAN):
        fail(f"{options.out}: its settings are of another version: {', '.join(sorted(set(saved) ^ set(PLAN)))}")
    for name in PLAN:
        given = json.loads(json.dumps(getattr(options, name)))
        if getattr(options, name) != getattr(defaults, name) and given != saved[name]:
            flag = f"--{name.replace('_', '-')}"
            fail(f"{flag}: a resumed sweep keeps its settings, {json.dumps(saved[name])}; leave this flag out")
    return replace(options, **{name: tuple(x) if isinstance(x, list) else x for name, x in saved.items()})


def settled(options: Options) -> Options:
    """The options with nothing left open; of a resumed sweep its own, if its journal can be read."""
    saved = saved_settings(options.out / "journal.jsonl") if options.resume else None
    return resumed(options, saved or settings_of(options))


def to_go_on(options: Options) -> str:
    """The command that goes on with the sweep in the same way."""
    words = ["./run.sh", "sweep", "--resume"]
    for name in ("out", "jobs", "timeout", "ray_address", "cpus_per_run", "gpus_per_run"):
        if (value := getattr(options, name)) != getattr(Options, name):
            words += [f"--{name.replace('_', '-')}", f"{value:.15g}" if isinstance(value, float) else str(value)]
    return shlex.join(words)


def announcement(options: Options, jobs: list[Job], pace: str, journal: Journal) -> str:
    """A line that says what will be run."""
    counts = {"script": options.scripts, "environment": options.env_ids, "variant": options.variants}
    counts["seed"] = options.seeds
    factors = [f"{len(x)} {noun}{'s' * (len(x) != 1)}" for noun, x in counts.items() if x]
    done = sum(journal.states.get(job.name) == "finished" for job in jobs)
    text = f"{' x '.join(factors)} = {len(jobs)} runs of {options.total_timesteps:,} steps, {pace}"
    return text + f"; {done} of them finished before" * (done > 0)


def plan(options: Options) -> list[Job]:
    """All runs in order: seed by seed, so that an interrupted sweep has some runs of everything."""
    jobs = []
    for seed, script in product(options.seeds, options.scripts):
        own = fields_of(script)["env_id"].default
        for env_id, variant in product(options.env_ids or (own,), options.variants):
            name = f"{env_id}__{script}__{variant}__{seed}".replace("/", "_").replace(":", "_")
            flags = ["--seed", seed, "--env-id", env_id, "--total-timesteps", options.total_timesteps]
            arguments = [*command(script, variant), *flags, *split_flags(options.flags)]
            jobs.append(Job(name, [str(x) for x in arguments], f"{script}, {env_id}, {variant}, seed {seed}"))
    return jobs


def share_of_cores(slot: int, slots: int) -> set[int] | None:
    """The CPU cores of one of several parallel jobs; None, meaning all, if there is only one."""
    own = sorted(cores())
    if slots == 1:
        return None
    return set(own[slot::slots]) or {own[slot % len(own)]}


def last_step(log: Path) -> int:
    """Environment steps that a run has taken so far, by the last whole line of its log."""
    if not log.exists():
        return 0
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL))
        lines = [runs.parse_line(text) for text in file.read().decode(errors="replace").splitlines()]
    return next((int(line["global_step"]) for line in reversed(lines) if line), 0)


class Here:
    """Runs as processes on this machine, `slots` in parallel, each on its own share of the CPU cores."""

    def __init__(self, slots: int):
        self.slots, self.pace = slots, f"{slots} at a time"

    def start(self, arguments: list[str], folder: Path, output: Path, slot: int, note) -> processes.Child:
        """Start a run in an empty folder, after noting that it has started."""
        shutil.rmtree(folder, ignore_errors=True)
        note("started")
        command = [*arguments, "--run-dir", str(folder.resolve())]
        return processes.start(command, output, share_of_cores(slot, self.slots), cwd=Path.cwd())

    def close(self) -> None:
        """All its runs have ended, and nothing else is open."""


def where(options: Options, num_jobs: int) -> "Here | cluster_runs.Cluster":
    """The machine, or the machines, that the runs are started on."""
    if options.ray_address is None:
        return Here(min(options.jobs, num_jobs))
    return cluster_runs.Cluster(options.ray_address, options.cpus_per_run or 1.0, options.gpus_per_run or 0.0)


def ended(job: Job, options: Options, journal: Journal) -> bool:
    """Whether a run has ended by itself or by its time limit; notes how, and shows the last lines of a failed one."""
    if job.child.poll() is None:
        if time.perf_counter() - job.child.started < options.timeout:
            return False
        job.child.stop(signal.SIGTERM)
        why = f"ended after {options.timeout:g} s, its time limit"
    else:
        why = job.child.failure()
    resources = {"seconds": round(job.child.seconds, 1), **job.child.resources()}
    journal.note(job.name, "finished" if why is None else "failed", **resources, **({"why": why} if why else {}))
    if why is not None:
        tqdm.write(f"failed: {job.name}, {why}; its last lines:\n{indented(job.child.last_lines())}")
    return True


def last_error(output: Path) -> str:
    """The last line of a run's output that names an error or, if none does, the last one."""
    text = output.read_text(errors="replace") if output.exists() else ""
    return processes.error_line(text) or (text.strip().splitlines() or ["no output"])[-1].strip()


def add_failures(page: Path, failed: list[Job], options: Options) -> None:
    """Add a line for each failed run to a report, which else names those only that have a log."""
    whys = {line.get("run"): line.get("why", "failed") for line in read_journal(options.out / "journal.jsonl")}
    lines = [f"{x.title}: {whys[x.name]}; {last_error(options.out / 'output' / f'{x.name}.txt')}" for x in failed]
    write_whole(page, "\n".join([page.read_text(), *report.listing("Failed runs", lines)]))


def indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


@contextmanager
def ending(slots: list[Job | None]) -> Iterator[None]:
    """At the end, stop the runs that are in these slots then: none, except after Ctrl-C."""
    try:
        yield
    finally:
        running = [job.child for job in slots if job and job.child]
        for child in running:
            child.ask(signal.SIGTERM)
        for child in running:
            child.stop()


def run_all(jobs: list[Job], place: "Here | cluster_runs.Cluster", options: Options, journal: Journal) -> None:
    """Run what has not finished yet, a job in each slot of the place, until all have ended."""
    waiting = [job for job in jobs if journal.states.get(job.name) != "finished"]
    slots: list[Job | None] = [None] * min(place.slots, len(jobs))
    apart = 0.1 if sys.stderr.isatty() else 60  # seconds between updates: one a minute if written to a file
    bar = tqdm(total=len(jobs) * options.total_timesteps, unit=" steps", unit_scale=True, mininterval=apart)
    with bar, ending(slots):
        while waiting or any(slots):
            slots[:] = [None if job and ended(job, options, journal) else job for job in slots]
            for i in [i for i, job in enumerate(slots) if job is None][: len(waiting)]:
                slots[i] = job = waiting.pop(0)
                folder, output = options.out / "runs" / job.name, options.out / "output" / f"{job.name}.txt"
                job.child = place.start(job.arguments, folder, output, i, partial(journal.note, job.name))
            done = len(jobs) - len(waiting) - sum(job is not None for job in slots)
            steps = sum(last_step(options.out / "runs" / job.name / "metrics.jsonl") for job in slots if job)
            counts = f"{journal.count('finished')}/{len(jobs)} runs, {journal.count('failed')} failed"
            bar.set_postfix_str(counts, refresh=False)
            bar.update(done * options.total_timesteps + steps - bar.n)
            time.sleep(0.5)


def check(options: Options) -> None:
    """Refuse what can't work."""
    check_known("script", options.scripts, pairs())
    check_positive(options, "jobs", "timeout", "total_timesteps", "cpus_per_run")
    if options.ray_address is None and (options.cpus_per_run, options.gpus_per_run) != (None, None):
        fail("--cpus-per-run and --gpus-per-run are for a cluster: name one by --ray-address, or leave them out")
    gpus = options.gpus_per_run or 0
    if gpus < 0 or (gpus > 1 and gpus % 1):
        fail("--gpus-per-run must be a share of one GPU, or a whole number of them")
    if options.ray_address is not None and options.jobs != Options.jobs:
        fail("--jobs is for one machine: on a cluster, as many runs go side by side as it has room for")
    check_seeds(options)
    check_once(options, "scripts", "env_ids", "variants")  # runs of the same name would share a folder
    split_flags(options.flags, "--env-id", "--seed", "--total-timesteps")
    if options.resume and not read_journal(options.out / "journal.jsonl"):
        fail(f"there is no sweep in {options.out} to go on with")
    for folder in ("runs", "output"):
        make_folder(options.out / folder)


def refuse(jobs: list[Job], options: Options) -> None:
    """Exit code 2 if a run of a new sweep can't work here, or would replace a folder that no sweep has made."""
    out = options.out
    for folder in [out / "runs" / job.name for job in jobs]:
        if folder.exists() and any(folder.iterdir()):
            fail(f"{folder} is there already, and no journal tells of it: give another --out, or move it away")
    for job in jobs[: len(jobs) // len(options.seeds)]:
        check_settings(job.arguments, is_here=options.ray_address is None)


def main(options: Options) -> int:
    check(options)
    if not options.scripts and not options.resume:
        say_left_out()
    options = settled(options)
    jobs = plan(options)
    place = where(options, len(jobs))
    if not (options.out / "journal.jsonl").exists():
        refuse(jobs, options)
    journal = Journal(options.out / "journal.jsonl", settings_of(options), options.resume)
    print(announcement(options, jobs, place.pace, journal), file=sys.stderr)
    with closing(place), stoppable(f"to go on: {to_go_on(options)}"):
        run_all(jobs, place, options, journal)
    failed = [job for job in jobs if journal.states[job.name] == "failed"]
    page = options.out / "report" / "report.md"
    if len(failed) < len(jobs):
        names = tuple(job.name for job in failed)
        result = report.write_report([options.out / "runs"], page.parent, failed=names)
        print(report.markdown(result))
    else:
        make_folder(page.parent)
        write_whole(page, "# Report\n\nNo run has finished.\n")
    if failed:
        add_failures(page, failed, options)
    print(f"written to {page.parent}")
    for job in failed:
        print(f"failed: {job.name}; its output: {options.out / 'output' / job.name}.txt", file=sys.stderr)
    print(f"{len(jobs) - len(failed)} of {len(jobs)} runs finished")
    return 1 if failed else 0
