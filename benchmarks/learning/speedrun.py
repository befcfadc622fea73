"""The speedrun board: settings of our scripts that reach a score fast: ./run.sh speedrun PAIR ENV_ID --flags="...".

A record is a variant of a pair with flags that reach the score with at least 9 of 10 seeds. The flags may set anything
except another task; the seeds are not those used to search for settings. In turn with it run the pair at its default
flags and Stable-Baselines3 at its own defaults. `./run.sh time-to-score --help` says what is timed and how.

Measures: the wall time from the start of the process until the mean return of the last 100 episodes reaches the score.
Takes: as long as the runs: with those beside it, CartPole about 25 minutes, HalfCheetah about two and a half hours.
Leaves: in --out one JSON file per record, rewritten after each seed, and the board of all records there, speedrun.md.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro
from tqdm import tqdm

from benchmarks.common import plots
from benchmarks.common.programs import (
    AT_DEFAULTS,
    Variant,
    check_installed,
    check_known,
    check_once,
    check_positive,
    check_seeds,
    check_settings,
    command,
    fail,
    pairs,
    peers_of,
    split_flags,
)
from benchmarks.common.results import (
    Target,
    describe,
    load_all,
    machine_of,
    make_folder,
    provenance,
    say_written,
    stoppable,
    table,
)
from benchmarks.learning.time_to_score import (
    HEADER,
    Contestant,
    cells,
    contestants_of,
    each_success,
    file_name,
    has_failed,
    measure,
    published,
    rows_of,
)

SHARE, SEEDS = 0.9, 10  # for a record: the share of runs that must reach the score, and how many runs there must be
RECORD, DEFAULTS, SB3 = "record", "defaults", f"sb3{AT_DEFAULTS}"  # contestants
LABELS = {DEFAULTS: "our default flags, eager", SB3: "SB3 at its defaults"}
INTRODUCTION = f"""
Settings of our own scripts that reach a score with at least {SHARE:.0%} of {SEEDS} seeds, the fastest first. Wall time
from the start of the process, imports and compiling included, until the mean return of the last 100 training episodes
reaches the score; a run that never does counts with its whole length, and makes the mean a bound ("≥"). "Times as fast"
are ratios of the seconds for each that got there: the time of all runs by the number of those. Beside a contestant that
never got there, its mean time until it was ended counts, and the ratio is a bound, too. Means have Student's
intervals. Those of ratios, by the bootstrap, are too narrow: in a simulation with ten seeds
(`tests/test_benchmark_stats.py`), what is called 95 % held the truth in some 88 % of cases. The task is
unchanged, and the seeds are not those by which the settings were found. Beside each, in turns on the same machine, its
pair at the default flags and Stable-Baselines3 as its users start it, where that was measured.
""".strip()


@dataclass
class Options:
    script: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="PAIR")]  # the name of its eager script
    env_id: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="ENV_ID")]  # the task
    flags: str = ""  # the settings, as in --flags="--num-envs 8 --learning-rate 1e-3"
    variant: Variant = "eager"
    cache: Literal["cold", "warm"] = "cold"  # the compile cache of a compiled variant, empty or filled
    score: float | None = None  # mean return to reach; by default the one that CleanRL publishes
    name: str = "1"  # name of the record: another name for the same task goes into a file of its own
    beside: tuple[Literal["defaults", "sb3-defaults"], ...] = (DEFAULTS, SB3)  # what to measure in turn with it
    seeds: tuple[int, ...] = tuple(range(101, 101 + SEEDS))  # of all contestants; not those that found the settings
    timeout: float = 3600.0  # seconds after which a run is ended and counts as never having reached the score
    out: Path = Path("runs/speedrun")  # folder of the board; that of RESULTS.md is benchmarks/results/speedrun


def is_record(result: dict) -> bool:
    runs = result["contestants"][RECORD]
    return len(runs) >= SEEDS and rows_of(runs)[:, 1].sum() / len(runs) >= SHARE


def place(result: dict) -> tuple:
    """Sort key of a result on the board: by task; then records first, and the fastest first."""
    return (
        result["env_id"],
        -result["score"],
        not is_record(result),
        each_success(rows_of(result["contestants"][RECORD])),
    )


def rows_on_board(result: dict) -> list[list[str]]:
    """The row of a record, and those of what was measured beside it."""
    contestants, how = result["contestants"], result["settings"]
    beside = [contestants.get(name) for name in LABELS]
    cache = f", {how['cache']} cache" if how["variant"].startswith("compile") else ""
    label = f"`{result['script']}`, {plots.label(how['variant'])}{cache}: `{how['flags'] or 'default flags'}`"
    label += " (no record)" * (not is_record(result))
    names = {RECORD: label} | {name: f"beside it: {text}" for name, text in LABELS.items()}
    return [cells(names[name], own, beside) for name, own in contestants.items()]


def board(results: list[dict]) -> list[str]:
    """Lines of Markdown: a table for each task."""
    tasks = {}
    for result in sorted(results, key=place):
        where = machine_of(result["provenance"])
        tasks.setdefault(f"{result['env_id']} to {result['score']:,g}, {where}", []).append(result)
    lines = []
    for task, own in tasks.items():
        header = [task, *HEADER]
        header += [f"times as fast as {LABELS[name]} [95 %]" for name in (DEFAULTS, SB3)]
        lines += [*table(header, [row for result in own for row in rows_on_board(result)]), ""]
    return lines


def load(folder: Path) -> list[dict]:
    return load_all(folder, "contestants", "settings")


def write_summary(out: Path) -> str:
    """Make `speedrun.md` of all results in a folder; returns the Markdown."""
    results = load(out)
    lines = ["# Speedrun board", "", INTRODUCTION, "", *board(results)]
    for result in sorted(results, key=place):
        what = f"`{result['script']}` on {result['env_id']} to {result['score']:,g}, record {result['name']}"
        lines += [f"{what}, {machine_of(result['provenance'])}:", f"measured {describe(result['provenance'])}", ""]
    text = "\n".join(lines)
    if results:
        (out / "speedrun.md").write_text(text)
    return text


def check(options: Options) -> None:
    """Refuse what can't work."""
    check_known("script", [options.script], pairs())
    check_positive(options, "timeout")
    if not np.isfinite(options.score or 0):
        fail("--score must be a number")
    check_seeds(options)
    task = "--env-id", "--seed", "--env-kwargs", "--frame-skip", "--repeat-action-probability", "--full-action-space"
    if any(word.replace("_", "-").startswith(task) for word in split_flags(options.flags)):
        fail("--flags: a record is for the task as it is, and for any seed")
    if options.cache == "warm" and not options.variant.startswith("compile"):
        fail(f"--cache warm: the variant {options.variant} compiles nothing")
    check_once(options, "beside")
    check_installed(tuple(name.removesuffix(AT_DEFAULTS) for name in options.beside if name == SB3))
    make_folder(options.out)
    load(options.out)


def main(options: Options) -> int:
    check(options)
    score = published(options.script, options.env_id) if options.score is None else options.score
    ours = {x.cache: x for x in contestants_of([options.variant], ())}
    cache = ours.get(options.cache, ours.get(None)).cache
    contestants = [Contestant(RECORD, options.variant, tuple(split_flags(options.flags)), cache)]
    check_settings([*command(options.script, options.variant), *contestants[0].flags, "--env-id", options.env_id])
    programs = {DEFAULTS: "eager", SB3: SB3}
    beside = [name for name in options.beside if name != SB3 or "sb3" in peers_of(options.script)]
    contestants += [Contestant(name, programs[name]) for name in beside]
    settings = {"variant": options.variant, "cache": options.cache, "flags": options.flags}
    shared = {"script": options.script, "env_id": options.env_id, "score": score, "name": options.name}
    shared |= {"seeds": list(options.seeds), "timeout": options.timeout}
    path = options.out / file_name(options.script, options.env_id, f"{score:g}", options.name)
    question = {"name": options.name, "score": score, "settings": settings}  # two names may give one path
    question |= {"contestants": [x.name for x in contestants], "seeds": list(options.seeds)}
    target = Target(path, {"timeout": options.timeout}, **question)

    def on_seed(known: dict) -> None:
        result = {**shared, "settings": settings, "contestants": known, "provenance": provenance()}
        target.write(result, is_whole=len(known[RECORD]) == len(options.seeds) and not has_failed(known))
        write_summary(options.out)

    total = len(contestants) * len(options.seeds)
    kept = f"the seeds that were finished before lie in {options.out}"
    with stoppable(kept), tqdm(total=total, unit="run") as bar:
        task, begun = (options.script, options.env_id), target.begun().get("contestants", {})
        measure(task, score, contestants, options.seeds, options.timeout, on_seed, bar, begun)
    print(write_summary(options.out))
    return say_written(options.out, [target], "speedrun.md")
