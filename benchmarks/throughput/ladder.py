"""What each trick gains, from a plain loop to the compiled script, a rung per trick: ./run.sh ladder.

A rung is a script of a pair without the tricks of the rungs above it, which are removed at run time. First all rungs
are compared, to see whether they learn the same numbers up to rounding; then they are measured as `throughput` measures
variants: in rounds of fresh processes, the order reversed from round to round.

Measures: steady environment steps/s of each rung, and its ratio to the rung below, with the interval.
Takes: at the defaults about 35 minutes per pair.
Leaves: in --out one JSON file per pair, and ladder.md and ladder.png from all JSON files there.
"""

import itertools
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tqdm import tqdm

from benchmarks.common import plots, processes, turns
from benchmarks.common.programs import AS_MODULE, check_known, check_once, check_positive, fail, often_logged
from benchmarks.common.results import (
    Target,
    describe,
    estimate,
    load_all,
    machine_of,
    make_folder,
    provenance,
    say_written,
    stoppable,
    table,
)
from benchmarks.throughput import throughput
from benchmarks.throughput.rungs import LADDERS

CHECK_SECONDS = 600.0  # for the comparison of all rungs
INTRODUCTION = """
Each row has one trick more than the row above it. The first is a plain loop as tutorials write it; the last is the
compiled script. All learn the same numbers: the table shows how far their weights are from those of the eager script
after about fifty updates on Pendulum, where rounding errors do not grow from step to step.
""".strip()


@dataclass
class Options:
    scripts: tuple[str, ...] = ()  # pairs, by the name of the eager script; by default all that have a ladder
    rounds: int = 3  # how often each rung is started
    seconds: float = 30.0  # seconds of steady running to measure in each run
    timeout: float = 900.0  # seconds after which a run is ended, steady or not
    out: Path = Path("runs/ladder")  # results folder; the results in RESULTS.md are in benchmarks/results/ladder


def check_rungs(script: str) -> dict[str, dict]:
    """For each rung, by its number, its deviation from the eager script; computed in a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        program = [*AS_MODULE, "benchmarks.throughput.rungs", "--check", script, str(result)]
        child = processes.start(program, Path(folder, "output"), TORCHINDUCTOR_CACHE_DIR=str(Path(folder, "cache")))
        if failure := child.finish(CHECK_SECONDS):
            fail(f"the rungs of {script} could not be compared: {failure}; {child.last_lines(1)}")
        return json.loads(result.read_text())


def described(script: str, options: Options, env_id: str, deviations: dict, results: dict[str, list[dict]]) -> dict:
    """The result of a pair: its rungs, what each gains, and how far its weights deviate."""
    contestants = {name: throughput.summarize(own) for name, own in results.items()}
    rungs = [trick.name for trick in LADDERS[script]]
    of_to = [(b, a) for a, b in itertools.pairwise(range(len(rungs)))] + [(len(rungs) - 1, 0)]
    both = [pair for pair in of_to if all("steps_per_second" in contestants[str(i)] for i in pair)]
    ratios = [throughput.ratio(contestants, *map(str, pair)) for pair in both]
    result = {"script": script, "env_id": env_id, "rungs": rungs, "deviations": deviations, "ratios": ratios}
    result |= {"rounds": max(map(len, results.values())), "seconds": options.seconds}
    return result | {"contestants": contestants, "provenance": provenance()}


def measure(script: str, options: Options, bar: tqdm, on_round: Callable[[dict], None] = lambda _: None) -> dict:
    """All rounds of the ladder of a pair; `on_round` gets the result so far after each."""
    bar.set_postfix_str(f"{script}: comparing all rungs")
    deviations, tricks = check_rungs(script), LADDERS[script]
    settings = throughput.limits_of(options.seconds, options.timeout)
    results, numbers, env_id = {str(i): [] for i in range(len(tricks))}, range(len(tricks)), "unknown"
    with tempfile.TemporaryDirectory() as caches:
        for turn, i in turns.in_turns(numbers, options.rounds):
            bar.set_postfix_str(f"{script}: {tricks[i].name}, round {turn + 1}")
            program = [*AS_MODULE, "benchmarks.throughput.rungs", script, str(i), "--seed", str(turn + 1)]
            cache = {"TORCHINDUCTOR_CACHE_DIR": str(Path(caches, str(i)))}
            program += ["--no-tensorboard", *often_logged(script)]
            measured, run = throughput.measure(program, settings, **cache)
            results[str(i)].append(measured)
            env_id = run.env_id if run.lines else env_id
            bar.update()
            if all(len(x) == turn + 1 for x in results.values()):
                on_round(described(script, options, env_id, deviations, results))
    return described(script, options, env_id, deviations, results)


def rows(result: dict) -> list[list[str]]:
    """Cells of each rung: what it adds, its speed, the ratio to the rung below, how far its weights deviate."""
    ratios = {(x["of"], x["to"]): estimate(x["ratio"], x["interval"], ".2f") for x in result["ratios"]}
    found = []
    for i, name in enumerate(result["rungs"]):
        own, apart = result["contestants"][str(i)], result["deviations"][str(i)]
        speed = estimate(own["steps_per_second"], own["quartiles"], ",.0f") if "steps_per_second" in own else "failed"
        equal = f"{apart['weights']:.0e}" if "weights" in apart else "-"
        found.append([name, speed, ratios.get((str(i), str(i - 1)), "-"), equal + " (differs)" * (not apart["equal"])])
    return found


def section(result: dict) -> list[str]:
    """What Markdown says on the ladder of a pair."""
    machine = machine_of(result["provenance"])
    header = [f"`{result['script']}` on {result['env_id']}, {machine}", "steps/s [quartiles]", "times row above [95 %]"]
    lines = [*table([*header, "weights are apart by"], rows(result)), ""]
    steps = [x for x in result["ratios"] if int(x["of"]) == int(x["to"]) + 1 and x["interval"]]
    ends = str(len(result["rungs"]) - 1), "0"
    for whole in [x for x in result["ratios"] if (x["of"], x["to"]) == ends][-1:]:
        rounds = max(len(x["rounds"]) for x in result["contestants"].values())
        lines += [
            f"From first to last row: {estimate(whole['ratio'], whole['interval'], ',.1f')} times; {rounds} rounds. "
            f"Tricks whose interval lies above 1: {sum(x['interval'][0] > 1 for x in steps)} of {len(steps)}; what the "
            "others give, these rounds do not show.",
            "",
        ]
    return lines


def draw(results: list[dict], path: Path) -> None:
    """For each pair the speeds of its rungs as bars, the lowest on top."""
    with plots.figure(path, rows=len(results), size=(8.0, 3.8)) as axes:
        for axis, result in zip(axes.flat, results, strict=True):
            own = {int(i): x for i, x in result["contestants"].items() if "steps_per_second" in x}
            names = [result["rungs"][i].replace("`", "") for i in own]
            plots.draw_bars(
                axis, names, [x["steps_per_second"] for x in own.values()], [x["quartiles"] for x in own.values()]
            )
            title = f"{result['script']} on {result['env_id']}\n{machine_of(result['provenance'])}"
            plots.describe_axis(axis, title, "environment steps/s", "")


def write_summary(out: Path) -> str:
    """Make `ladder.md` and `ladder.png` of all results in a folder; returns the Markdown."""
    results = load_all(out, "rungs")
    lines = ["# What each trick gives", "", INTRODUCTION, "", "![steps per second of each rung](ladder.png)", ""]
    for result in results:
        lines += [*section(result), f"Measured {describe(result['provenance'])}", ""]
    text = "\n".join(lines)
    if results:
        (out / "ladder.md").write_text(text)
        draw(results, out / "ladder.png")
    return text


def check(options: Options) -> tuple[str, ...]:
    """Refuse what can't work; returns the pairs to climb."""
    check_known("ladder", options.scripts, list(LADDERS))
    check_positive(options, "rounds", "seconds", "timeout")
    check_once(options, "scripts")
    make_folder(options.out)
    return options.scripts or tuple(LADDERS)


def main(options: Options) -> int:
    scripts = check(options)
    total = options.rounds * sum(len(LADDERS[script]) for script in scripts)
    rungs = {script: [trick.name for trick in LADDERS[script]] for script in scripts}
    effort = {"rounds": options.rounds, "seconds": options.seconds}
    targets = {script: Target(options.out / f"{script}.json", effort, rungs=rungs[script]) for script in scripts}
    load_all(options.out, "rungs")
    kept = f"the rounds that were finished before lie in {options.out}"
    with stoppable(kept), tqdm(total=total, unit="run") as bar:
        for script, target in targets.items():
            result = measure(script, options, bar, partial(target.write, is_whole=False))
            target.write(result, throughput.is_whole(result["contestants"]))
            text = write_summary(options.out)
    print(text)
    return say_written(options.out, targets.values(), "ladder.md", "ladder.png")
