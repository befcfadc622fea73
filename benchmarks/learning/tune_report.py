"""The final report of ./run.sh tune: the best settings, checked on fresh seeds; tables, figures, importance.

OUT/trials.csv, OUT/report.json            the trials, the best settings as a command, importance, the check
OUT/objective.png, OUT/parallel.png        returns over the steps; each trial as a line through its settings
OUT/lineage.png, OUT/schedules.png         of a population: who was copied by whom, and how settings changed
OUT/check/                                 the runs on fresh seeds
"""

import csv
import importlib.util
import json
import math
import os
import shlex
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np

from benchmarks.common import plots, runs, stats
from benchmarks.common.programs import SCRIPTS, fields_of
from benchmarks.common.results import estimate, make_folder, provenance, write_json
from benchmarks.learning import sweep
from benchmarks.learning.report import MIN_SEEDS, interval
from benchmarks.learning.tune import ORIGIN, Options, Search
from benchmarks.learning.tune_history import INTERVALS, OBJECTIVE, History
from benchmarks.learning.tune_space import as_flag, show

FRESH = 1_000_000_001  # the first seed of the check, used by no trial
FEW = 4  # fewest results from which importance is estimated
BEST, DEFAULT = "best", "default"


def best_of(histories: list[History]) -> History | None:
    """The finished trial with the highest return; None if none has one."""
    known = [x for x in histories if x.state == "finished" and not math.isnan(x.last[OBJECTIVE])]
    return max(known, key=lambda x: x.last[OBJECTIVE], default=None)


def ancestry(history: History, histories: list[History]) -> list[dict]:
    """The reports that led to a trial, from the first interval on: before each copy, those of the donor."""
    by_id, line, upto = {x.id: x for x in histories}, [], math.inf
    while history is not None:
        donor = None
        for report in reversed([x for x in history.reports if x[INTERVALS] < upto]):
            line.append(report | {"number": history.number})
            upto, donor = report[INTERVALS], by_id.get(report["donor"])
            if donor is not None:
                break
        history = donor
    return line[::-1]


# Importance


def gains(histories: list[History]) -> list[dict]:
    """For each interval of each member of a population: its settings, and the gain of its return."""
    rows = []
    for history in histories:
        for before, after in zip(history.reports, history.reports[1:], strict=False):
            if after["donor"] is None:  # otherwise the change is due to copying
                rows.append(after["settings"] | {OBJECTIVE: after[OBJECTIVE] - before[OBJECTIVE]})
    return rows


def importance(options: Options, search: Search, histories: list[History]) -> dict:
    """How much each setting mattered, and by which method that was estimated."""
    if options.is_population:
        rows, what = gains(histories), "the gain of return in an interval"
    else:
        known = [x.last for x in histories if x.reports and x.state != "failed"]
        rows, what = [last["settings"] | {OBJECTIVE: last[OBJECTIVE]} for last in known], "the return"
        what += ", of trials that were stopped at different steps" * (options.scheduler == "asha")
    rows = [row for row in rows if not math.isnan(row[OBJECTIVE])]
    names = [name for name in search.spaces() if len({row[name] for row in rows}) > 1]
    if len(rows) < FEW or not names or len({row[OBJECTIVE] for row in rows}) < 2:
        return {"method": f"nothing can be said of fewer than {FEW} different results", "values": {}}
    if not options.is_population and importlib.util.find_spec("optuna") and importlib.util.find_spec("sklearn"):
        return {"method": f"fANOVA by Optuna: share of the variance of {what}", "values": fanova(search, rows, names)}
    import pandas

    columns = pandas.DataFrame(rows)[[*names, OBJECTIVE]].select_dtypes(["number", "bool"]).astype(float)
    correlation = columns.corr(method="spearman")[OBJECTIVE].drop(OBJECTIVE)
    values = correlation.dropna().to_dict()
    return {"method": f"Spearman's rank correlation with {what}, by pandas", "values": values}


def fanova(search: Search, rows: list[dict], names: list[str]) -> dict[str, float]:
    """Share of the variance of the return that each setting accounts for, by a random forest."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize")
    spaces = {name: search.spaces()[name] for name in names}
    distributions = {name: space.distribution() for name, space in spaces.items()}
    for row in rows:
        # The end of a grid may be drawn as 0.30000000000000004, which is outside of it
        settings = {name: space.within(row[name]) if space.is_range else row[name] for name, space in spaces.items()}
        study.add_trial(optuna.create_trial(params=settings, distributions=distributions, value=row[OBJECTIVE]))
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
    return {x: float(y) for x, y in optuna.importance.get_param_importances(study, evaluator=evaluator).items()}


# The check on fresh seeds


def check_on_fresh_seeds(options: Options, settings: dict) -> dict:
    """Train the default and the best settings again -> their returns, and the difference with its interval."""
    out, chosen = options.out / "check", {DEFAULT: {}, BEST: settings}
    for folder in ("runs", "output"):
        make_folder(out / folder)
    seeds = range(FRESH, FRESH + options.check_seeds)
    jobs = []
    for seed in seeds:
        for contestant, values in chosen.items():
            name = f"{contestant}__{seed}"
            flags = [*options.fixed, *(as_flag(*x) for x in values.items()), f"--seed={seed}", "--no-tensorboard"]
            jobs.append(sweep.Job(name, [*options.program, *flags]))
    journal = sweep.Journal(out / "journal.jsonl", {"settings": settings}, resume=True)
    place = sweep.Here(min(options.jobs, len(jobs)))
    limits = sweep.Options(total_timesteps=options.total_timesteps, out=out, timeout=math.inf)
    sweep.run_all(jobs, place, limits, journal)

    def final_return(name: str) -> float:
        is_whole = journal.states[name] == "finished"
        return runs.final_return(runs.read_run(out / "runs" / name)) if is_whole else math.nan

    found = {contestant: [final_return(f"{contestant}__{seed}") for seed in seeds] for contestant in chosen}
    known = {contestant: [None if math.isnan(x) else x for x in values] for contestant, values in found.items()}
    return {"seeds": list(seeds), "returns": known} | compare(found)


def compare(found: dict[str, list[float]]) -> dict:
    """The difference of the interquartile means of the best and the default settings, and what it says."""
    strata = [np.array([x for x in found[contestant] if not math.isnan(x)]) for contestant in (DEFAULT, BEST)]
    difference = float(stats.difference_of_iqms(strata)) if min(map(len, strata)) else None
    if not (ends := interval(strata, stats.difference_of_iqms)):
        verdict = f"fewer than {MIN_SEEDS} runs each: too few to say whether anything was found"
    elif ends[0] > 0:
        verdict = "found: better than the default settings"
    elif ends[1] < 0:
        verdict = "nothing was found: worse than the default settings"
    else:
        verdict = "nothing was found: its interval holds zero"
    return {"difference": difference, "interval": ends, "verdict": verdict}


# Tables and figures


def rows_of(histories: list[History]) -> list[dict]:
    """The table of trials, best first, with those that were stopped early after the complete ones."""

    def order(history: History) -> tuple:
        value = history.last[OBJECTIVE]
        return history.state != "finished", -history.last[INTERVALS], math.inf if math.isnan(value) else -value

    rows = []
    for history in sorted(histories, key=order):
        last = history.last
        value = None if math.isnan(last[OBJECTIVE]) else last[OBJECTIVE]
        row = {"trial": history.number, "state": history.state, "steps": last["steps"], OBJECTIVE: value}
        rows.append(row | last["settings"] | {"folder": f"trials/{history.id}", "why": history.why})
    return rows


def command_of(options: Options, settings: dict) -> str:
    """A command to paste that trains with these settings, in the folder from which the search is started."""
    script = os.path.relpath(SCRIPTS / f"{options.script}.py")
    return shlex.join(["python", script, *options.fixed, *(as_flag(*x) for x in settings.items())])


def curve(reports: list[dict]) -> tuple[list[int], list[float]]:
    return [x["steps"] for x in reports], [x[OBJECTIVE] for x in reports]


def draw_objective(path: Path, options: Options, histories: list[History], best: History) -> None:
    with plots.figure(path) as axes:
        for history in histories:
            axes[0, 0].plot(*curve(history.reports), color="#999999", linewidth=0.9, alpha=0.8)
        axes[0, 0].plot(*curve(best.reports), color=plots.COLOURS["eager"], label=f"trial {best.number}, the best")
        plots.describe_axis(axes[0, 0], f"{options.script}, {options.env_id}", "environment steps", "mean return")
        axes[0, 0].legend()


def positions(values: list, is_logarithmic: bool) -> tuple[np.ndarray, list[tuple[float, str]]]:
    """Positions of values on an axis from 0 to 1, and its marks: at the ends, or at each value if not numeric."""
    if all(isinstance(x, int | float) and not isinstance(x, bool) for x in values):
        numbers = np.array(values, dtype=float)
        scaled = np.log(numbers) if is_logarithmic else numbers
        low, high = np.nanmin(scaled), np.nanmax(scaled)
        place = (scaled - low) / (high - low) if high > low else np.full(len(values), 0.5)
        return place, [(0.0, f"{np.nanmin(numbers):.3g}"), (1.0, f"{np.nanmax(numbers):.3g}")]
    kinds = sorted(set(map(str, values)))
    share = {kind: i / max(1, len(kinds) - 1) for i, kind in enumerate(kinds)}
    return np.array([share[str(x)] for x in values]), [(y, kind) for kind, y in share.items()]


def draw_parallel(path: Path, search: Search, histories: list[History]) -> None:
    """Each trial a line through its settings to its return, the brighter the better."""
    shown = [x for x in histories if not math.isnan(x.last[OBJECTIVE])]
    spaces = search.spaces()
    columns = [([x.last["settings"][name] for x in shown], spaces[name].kind == "loguniform") for name in spaces]
    columns.append(([x.last[OBJECTIVE] for x in shown], False))
    found = [positions(*column) for column in columns]
    heights = np.stack([place for place, _ in found])  # (axes, trials)
    with plots.figure(path, size=(1.6 * len(columns) + 1.5, 3.4)) as axes:
        axis = axes[0, 0]
        for i in np.argsort(heights[-1]):
            axis.plot(heights[:, i], color=plots.plt.get_cmap("viridis")(heights[-1, i]), linewidth=1.2)
        for x, (_, marks) in enumerate(found):
            axis.axvline(x, color="#333333", linewidth=0.8)
            for y, text in marks:
                axis.annotate(text, (x, y), xytext=(4, 3), textcoords="offset points", fontsize=8)
        axis.set_xticks(range(len(columns)), [*spaces, "mean return"])
        axis.set_yticks([])
        axis.grid(visible=False)


def draw_lineage(path: Path, histories: list[History], best: History) -> None:
    """A line for each member, an arrow where one copied another; what led to the best is blue."""
    number = {x.id: x.number for x in histories}
    with plots.figure(path) as axes:
        axis = axes[0, 0]
        for history in histories:
            axis.plot([0, history.last[INTERVALS]], [history.number] * 2, color="#BBBBBB")
            for report in [report for report in history.reports if report["donor"] is not None]:
                x = report[INTERVALS] - 1
                ends = {"xy": (x, history.number), "xytext": (x, number[report["donor"]])}
                axis.annotate("", **ends, arrowprops={"arrowstyle": "->", "color": "#D55E00"})
        for report in ancestry(best, histories):
            x = report[INTERVALS]
            axis.plot([x - 1, x], [report["number"]] * 2, color=plots.COLOURS["eager"], linewidth=3)
        plots.describe_axis(axis, "who went on from whom", "interval", "member")
        axis.set_yticks([x.number for x in histories])


def draw_schedules(path: Path, search: Search, histories: list[History], best: History) -> None:
    """How each perturbed setting changed; the best member, with its ancestors, is blue."""
    names = [x for x in search.perturbed if all(isinstance(y, int | float) for y in values_of(histories, x))]
    if not names:
        return
    with plots.figure(path, columns=len(names), size=(4.2, 3.2)) as axes:
        for axis, name in zip(axes[0], names, strict=True):
            for history in [x for x in histories if x.reports]:  # one that failed at once has none
                draw_steps(axis, history.reports, name, color="#999999", linewidth=0.9)
            draw_steps(axis, ancestry(best, histories), name, color=plots.COLOURS["eager"])
            if search.perturbed[name].kind in ("factor", "loguniform"):
                axis.set_yscale("log")
            plots.describe_axis(axis, name, "environment steps", "")


def values_of(histories: list[History], name: str) -> Iterator:
    return (report["settings"][name] for history in histories for report in history.reports)


def draw_steps(axis, reports: list[dict], name: str, **style) -> None:
    steps, values = [x["steps"] for x in reports], [x["settings"][name] for x in reports]
    axis.step([0, *steps], [values[0], *values], where="pre", **style)


# All of it


def finish(options: Options, search: Search, histories: list[History]) -> int:
    """Check what was found, write and print the report; the exit code: 1 if no trial came to its end."""
    best = best_of(histories)
    rows = rows_of(histories)
    write_table(options.out / "trials.csv", rows)
    if best is None:
        print(f"no trial came to its end; what they printed lies in {options.out / 'trials'}")
        return 1
    settings = best.last["settings"]
    defaults = {name: field.default for name, field in fields_of(options.script).items() if name in settings}
    origin = json.loads((options.out / ORIGIN).read_text())
    result = {
        "provenance": provenance(origin) | {name: origin[name] for name in ("date", "command")},
        "search": {k: v for k, v in asdict(options).items() if k not in PATHS},
    }
    result["search"]["population" if options.is_population else "trials"] = options.size
    result |= {"trials": rows, "steps": sum(x.last["steps"] for x in histories) * options.seeds_per_trial}
    result["best"] = {"trial": best.number, OBJECTIVE: best.last[OBJECTIVE], "settings": settings}
    result["best"] |= {"command": command_of(options, settings), "defaults": defaults}
    if options.is_population:
        kept = (INTERVALS, "steps", OBJECTIVE, "settings", "number")
        result["best"]["schedule"] = [{x: report[x] for x in kept} for report in ancestry(best, histories)]
    result["importance"] = importance(options, search, histories)
    write_json(options.out / "report.json", result)
    draw_objective(options.out / "objective.png", options, histories, best)
    draw_parallel(options.out / "parallel.png", search, histories)
    if options.is_population:
        draw_lineage(options.out / "lineage.png", histories, best)
        draw_schedules(options.out / "schedules.png", search, histories, best)
    if options.check_seeds:
        result["check"] = check_on_fresh_seeds(options, settings)
        write_json(options.out / "report.json", result)
    print(summary(options, result, histories))
    return 0


PATHS = ("out", "resume")


def write_table(path: Path, rows: list[dict]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


def summary(options: Options, result: dict, histories: list[History]) -> str:
    """The report in a few lines."""
    best, found = result["best"], result["importance"]
    failed = sum(x.state == "failed" for x in histories)
    whole = options.size * options.total_timesteps * options.seeds_per_trial
    text = [
        f"{len(histories)} trials, {result['steps']:,} steps, {result['steps'] / whole:.0%} of the rows of whole runs"
    ]
    text[0] += f"; {failed} failed" * (failed > 0)
    last = " (its last settings; the schedule is in report.json)" * options.is_population
    text.append(f"best: trial {best['trial']}, {best[OBJECTIVE]:.1f}, {show(best['settings'])}{last}")
    text.append(f"default: {show(best['defaults'])}")
    values = ", ".join(f"{name} {value:.2f}" for name, value in found["values"].items())
    text.append(f"importance, {found['method']}" + f": {values}" * bool(values))
    if "check" in result:
        check = result["check"]
        known = {name: [x for x in values if x is not None] for name, values in check["returns"].items()}
        means = {name: stats.iqm(np.array(values)) if values else math.nan for name, values in known.items()}
        seeds = f"on {len(check['seeds'])} fresh seeds: best {means[BEST]:.1f}, default {means[DEFAULT]:.1f}"
        if check["difference"] is not None:
            seeds += f", difference {estimate(check['difference'], check['interval'])}"
        broken = sum(x is None for values in check["returns"].values() for x in values)
        seeds += f"; {broken} of these runs failed" * (broken > 0)
        text.append(f"{seeds}; {check['verdict']}")
    text += [f"written to {options.out}; the best settings:", best["command"]]
    return "\n".join(text)
