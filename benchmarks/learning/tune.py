"""Search a script's settings, or train a population that changes them during training, with Ray Tune: ./run.sh tune.

    ./run.sh tune --script ppo --search "learning_rate=loguniform(1e-4,1e-2)" "gamma=[0.98,0.99]" --scheduler asha
    ./run.sh tune --script ppo --scheduler pbt --perturb "learning_rate=*1.5" "ent_coef=uniform(0,0.02)"
    ./run.sh tune --resume runs/tune

Each trial trains the script itself, in one process per seed. The objective is the mean return of the last 100 training
episodes or, with several seeds, the interquartile mean over the seeds. At the end the best settings and the defaults
are trained again on fresh seeds; only the interval of their difference tells whether anything was found.

Measures: that return for each trial, the importance of each setting, and the difference to the default settings.
Takes: as long as the trials that it announces, and the check at the end: twice --check-seeds runs.
Leaves: in --out report.json, trials.csv, figures, the runs of all trials and the journal from which --resume continues.
"""

import importlib
import importlib.util
import json
import os
import random
import shlex
import sys
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from benchmarks.common.programs import (
    INSTALL,
    SCRIPTS,
    SUFFIX,
    check_known,
    check_positive,
    check_settings,
    command,
    default_variants,
    fail,
    fields_of,
    load_script,
    missing_for_compile,
    num_cores,
    pairs,
    split_flags,
)
from benchmarks.common.results import make_folder, provenance, stoppable, write_json
from benchmarks.learning import sweep
from benchmarks.learning.tune_space import OWN, Space, parse_all

POPULATIONS = ("pbt", "pb2")
ORIGIN = "provenance.json"  # of the search: commit, versions and machine at its start
REDUCTION = 3  # at each rung, ASHA lets one in this many trials continue
INTERVALS_BY_DEFAULT = 10
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # a trial that requests no GPU still sees all of them
    "RAY_worker_niceness": "0",  # the trials are this machine's main work
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # the journal has it all
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_GLOBAL_CHECKPOINT_S": "1",  # seconds between two snapshots of the search, from which --resume goes on
}


@dataclass
class Options:
    script: str = ""  # as in --script ppo or --script ppo_torchcompile
    search: tuple[str, ...] = ()  # settings and what they are drawn from, as in "learning_rate=loguniform(1e-4,1e-2)"
    perturb: tuple[str, ...] = ()  # pbt, pb2: settings that change in a run, as in "gamma=[0.98,0.99]" "ent_coef=*1.2"
    scheduler: Literal["none", "asha", "pbt", "pb2"] = "none"  # asha stops bad trials; in pbt, pb2 they copy good ones
    search_algorithm: Literal["random", "optuna"] = "random"  # optuna draws settings in view of the trials that ended
    trials: int | None = None  # number of trials; by default 20
    population: int | None = None  # number of members with pbt and pb2, instead of --trials; by default 8
    env_id: str | None = None  # the task; by default the script's own
    total_timesteps: int | None = None  # environment steps of a whole trial; by default the script's own
    interval: int | None = None  # environment steps between two decisions; by default a tenth of a trial
    seeds_per_trial: int = 1  # runs of each trial, each with its own seed
    check_seeds: int = 5  # fresh seeds on which the best and the default settings are trained at the end; 0 for none
    # CPU cores, also fractions; default 1, or what lets a whole population run. If --jobs is given, that decides
    cpus_per_trial: float | None = None
    gpus_per_trial: float = 0.0  # GPUs, or a fraction of one; at 0 all trials share the GPUs there are
    jobs: int | None = None  # trials in parallel; by default as many as there are cores and GPUs for
    flags: str = ""  # extra flags for all runs, as in --flags="--num-envs 8"
    search_seed: int = 1  # seed for drawing settings
    resume: Path | None = None  # the folder of a search to continue with its own settings
    out: Path = Path("runs/tune")  # folder of the search

    @property
    def is_population(self) -> bool:
        return self.scheduler in POPULATIONS

    @property
    def size(self) -> int:
        """How many trials there are."""
        return (self.population or 8) if self.is_population else (self.trials or 20)

    @property
    def pair(self) -> str:
        return self.script.removesuffix(SUFFIX)

    @property
    def program(self) -> list[str]:
        """The command that starts the script; a compiled script uses CUDA graphs if there is CUDA."""
        return command(self.pair, default_variants()[-1] if self.script.endswith(SUFFIX) else "eager")

    @property
    def fixed(self) -> list[str]:
        """The flags that all runs share: all but seeds, folders and searched settings."""
        return [f"--env-id={self.env_id}", f"--total-timesteps={self.total_timesteps}", *shlex.split(self.flags)]


@dataclass(frozen=True)
class Search:
    """What is searched: settings that are drawn once for each trial, and those that change in it."""

    drawn: dict[str, Space]
    perturbed: dict[str, Space]

    def spaces(self) -> dict[str, Space]:
        """The space of each setting; if it has two, the one from which its initial value is drawn."""
        return self.perturbed | self.drawn

    def parameters(self, script: str) -> dict:
        """What Ray Tune draws for each trial: a setting that is only multiplied begins at its default."""
        defaults = {name: field.default for name, field in fields_of(script).items()}
        return {
            name: defaults[name] if space.kind == "factor" else space.domain() for name, space in self.spaces().items()
        }


def check_flags(options: Options, names: list[str]) -> None:
    """Refuse --flags that the script does not take, or that are searched."""
    words = split_flags(options.flags, refused=())
    flags = [word.partition("=")[0].lstrip("-") for word in words if word.startswith("--")]
    typed = {flag.replace("-", "_").removeprefix("no_") for flag in flags}
    for name in typed:
        if name in names:
            fail(f"--flags: {name} is searched")
        if name in OWN:
            fail(f"--flags: {name} is set by tune, which has flags of its own for the task, the budget and the folder")
    check_settings([*options.program, *options.fixed])


def check_installed(options: Options) -> None:
    """Refuse what needs packages that are not there, by their names."""
    needed = {"ray": "Ray", "pandas": "pandas", "pyarrow": "pyarrow"}
    needed |= {"sklearn": "scikit-learn"} if options.scheduler == "pb2" else {}
    needed |= {"optuna": "Optuna"} if options.search_algorithm == "optuna" else {}
    absent = [title for name, title in needed.items() if importlib.util.find_spec(name) is None]
    if absent:
        fail(f"this search needs {', '.join(absent)}: {INSTALL.format('-tune')}")


def check_population(options: Options, search: Search) -> None:
    """Refuse what a population can't do."""
    if not options.is_population:
        if search.perturbed:
            fail("--perturb is for --scheduler pbt or pb2")
        return
    if not search.perturbed:
        fail(f"--scheduler {options.scheduler}: --perturb says which settings are to change in a run")
    if options.search_algorithm != "random":
        fail(f"--search-algorithm {options.search_algorithm}: a population searches by itself; leave this flag out")
    if options.size < 2:
        fail("--population must be at least 2")
    changeable = load_script(SCRIPTS / f"{options.script}.py").CHANGEABLE
    defaults = {name: field.default for name, field in fields_of(options.script).items()}
    for name, space in search.perturbed.items():
        if name not in changeable:
            fail(f"--perturb {name}: it can't change in a run of {options.script}; {', '.join(changeable)} can")
        if options.scheduler == "pb2" and space.kind not in ("uniform", "randint"):
            fail(f"--perturb {name}: pb2 chooses from a range on a linear scale, uniform(a,b) or randint(a,b)")
        if space.kind == "factor" and name not in search.drawn:
            moved = defaults[name] * space.numbers[0]
            if defaults[name] == (round(moved) if isinstance(defaults[name], int) else moved):
                fail(f"--perturb {name}: this leaves its default, {defaults[name]}, as it is; add --search {name}=...")


def check(options: Options) -> tuple[Options, Search]:
    """Refuse what can't work -> (options with nothing left open, what is searched)."""
    if not options.script:
        fail("--script: name one, or go on with a search by --resume DIR")
    check_known("script", [options.script], [x for name in pairs() for x in (name, name + SUFFIX)])
    if options.script.endswith(SUFFIX) and (missing := missing_for_compile()):
        fail(f"--script {options.script}: compiling needs {missing}")
    known = fields_of(options.script)
    own = {name: known[name].default for name in ("env_id", "total_timesteps") if getattr(options, name) is None}
    options = replace(options, **own)
    names = ("trials", "population", "total_timesteps", "interval", "seeds_per_trial", "cpus_per_trial", "jobs")
    check_positive(options, *names)
    for name in ("check_seeds", "gpus_per_trial", "search_seed"):
        if getattr(options, name) < 0:
            fail(f"--{name.replace('_', '-')} must be at least 0")
    unused, used = ("trials", "population") if options.is_population else ("population", "trials")
    if getattr(options, unused) is not None and options.resume is None:
        fail(f"--{unused} is not for --scheduler {options.scheduler}: --{used} says how many there are")
    interval = options.interval or max(1, options.total_timesteps // INTERVALS_BY_DEFAULT)
    if interval > options.total_timesteps:
        fail(f"--interval {interval} is more than a whole run, {options.total_timesteps} steps")
    search = Search(
        parse_all("--search", options.search, options.script), parse_all("--perturb", options.perturb, options.script)
    )
    if not search.spaces():
        fail("--search: name a setting and its values, as in learning_rate=loguniform(1e-4,1e-2)")
    check_population(options, search)
    check_flags(options, list(search.spaces()))
    check_installed(options)
    return replace(options, interval=interval, jobs=jobs_of(options)), search


def jobs_of(options: Options) -> int:
    """How many trials run at a time; SystemExit(2) if there are no GPUs for them."""
    own = num_cores()
    by_default = own / options.size if options.is_population else 1.0
    jobs = options.jobs or min(options.size, max(1, int(own / (options.cpus_per_trial or by_default) + 1e-9)))
    share = options.gpus_per_trial
    if not share:
        return jobs
    import torch

    count = torch.cuda.device_count()
    places = count * int(1 / share + 1e-9) if share <= 1 else int(count / share)
    if places < (options.jobs or 1):
        fail(f"--gpus-per-trial {share:g}: {count} GPUs are not enough for {options.jobs or 1} trials at a time")
    return min(jobs, places)


def begin(options: Options) -> tuple[Options, Search, sweep.Journal]:
    """Check the options, or take up those of the search that is resumed, and open its journal."""
    if options.resume is not None:
        defaults = Options(resume=options.resume)
        given = [name for name, value in asdict(defaults).items() if getattr(options, name) != value]
        if given:
            fail(f"--{given[0].replace('_', '-')}: a resumed search keeps its settings; leave this flag out")
        if (first := sweep.saved_settings(options.resume / "journal.jsonl")) is None:
            fail(f"there is no search in {options.resume} to go on with")
        saved = {name: tuple(x) if isinstance(x, list) else x for name, x in first.items()}
        if unknown := set(saved) - set(asdict(defaults)):
            fail(f"{options.resume}: its settings are of another version: {', '.join(sorted(unknown))}")
        options = Options(**saved, resume=options.resume, out=options.resume)
    options, search = check(options)
    make_folder(options.out / "trials")
    if not (options.out / ORIGIN).exists():
        write_json(options.out / ORIGIN, provenance())
    journal = options.out / "journal.jsonl"
    if options.resume is None and sweep.read_journal(journal):
        fail(f"{options.out} holds a search; --resume {options.out} goes on with it, --out names another folder")
    if options.resume is None and any((options.out / name).exists() for name in ("report.json", "tune")):  # Ray Tune's
        fail(f"{options.out} holds a report, or trials without their journal: name another folder by --out")
    settings = {name: value for name, value in asdict(options).items() if name not in ("resume", "out")}
    return options, search, sweep.Journal(journal, json.loads(json.dumps(settings)), options.resume is not None)


def announcement(options: Options) -> str:
    """What is going to be run, in a line."""
    seeds = f", {options.seeds_per_trial} seeds each" * (options.seeds_per_trial > 1)
    text = f"{options.size} trials of {options.total_timesteps:,} steps{seeds}, {options.jobs} at a time"
    text += f", looked at each {options.interval:,} steps"
    return text + f"; then 2 x {options.check_seeds} runs to check what was found" * (options.check_seeds > 0)


def start_ray(options: Options) -> None:
    """Start Ray on this machine with one CPU per parallel trial; the trials themselves divide up the cores."""
    import ray

    settings = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    ray.init(address="local", num_cpus=options.jobs, object_store_memory=100_000_000, **settings)


def main(options: Options) -> int:
    options, search, journal = begin(options)
    print(announcement(options), file=sys.stderr)
    os.environ |= QUIET | os.environ
    warnings.filterwarnings("ignore")  # of Ray and of what it imports: nobody can act upon them
    random.seed(options.search_seed)  # by which pbt perturbs
    np.random.seed(options.search_seed)
    engine = importlib.import_module("benchmarks.learning.tune_engine")
    with stoppable(f"to go on: ./run.sh tune --resume {shlex.quote(str(options.out))}"):
        return engine.run(options, search, journal)
