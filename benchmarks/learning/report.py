"""A table, learning curves and verdicts from run folders: ./run.sh report RUNS... --out DIR.

Reads only `config.json` and `metrics.jsonl`, so runs from different machines can be combined. A run that did not finish
is listed, but left out of all means. Runs that differ in settings get rows and curves of their own, such as
"eager --gamma 0.9". With --until, longer runs count as they were after so many steps: where nothing follows a schedule
over a run, as in SAC and TD3, they were then what a shorter run is.

Measures: nothing; it summarizes final returns, curves and speeds over seeds, with intervals.
Takes: seconds.
Leaves: in --out report.md, report.json, learning_curves.png, and curves.json.gz, from which the figure can be redrawn.
"""

import csv
import glob
import gzip
import json
import math
from collections import Counter
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from benchmarks.common import plots, runs, stats
from benchmarks.common.pairs import TABLE
from benchmarks.common.programs import ROOT, fail
from benchmarks.common.results import describe, estimate, plural, provenance, table, write_json, write_whole
from benchmarks.learning.settings import Group, a_repeat, changed_settings, command_for, groups, in_words, settings

REFERENCE = ROOT / "benchmarks" / "reference" / "scores.csv"
MIN_SEEDS = 5  # fewest seeds for a verdict: with three, 20 % of intervals would tell equals apart, with five 7 %
SAME_BUDGET = 0.9  # smallest ratio of steps at which two budgets count as the same
BINS, LINES = 50, 500  # of a learning curve: bins drawn, and lines kept
AXES = {"global_step": "environment steps", "seconds": "seconds after start-up"}
RECENT = 0.1  # the score at a point is over the episodes in this last share of the steps or seconds up to it
NEWEST = 2 / 3  # runs are not compared at a point if the last episodes ended before this share of the steps up to it
SHARES = (0.1, 0.25, 0.5, 1.0)  # shares of the longest run at which scripts on one environment are compared
EAGER, COMPILED = ("eager", "lean"), ("compile", "compile+cudagraphs", "cudagraphs")
INTRODUCTION = f"""
The return of a run is the mean training return of its last {runs.LAST_EPISODES} episodes. IQM: interquartile mean over
the seeds, with its 95 % bootstrap interval if there are {MIN_SEEDS} seeds or more. Verdict: whether the plain mean
lies above or below that of CleanRL's few runs, by Welch's test at 5 %, if the budget is the same. Steps/s: median over
the second half of a run; rows of other hours, or beside other work, are not to be compared by it: `./run.sh throughput`
does that. Minutes and seconds: from the first step on, compiling included, imports and the start of Ray not.
""".strip()
SAME, TOO_FEW, MIXED = "no difference seen", "too few seeds", "settings differ within a row"
AGREEMENT = {True: SAME, False: "they differ", None: TOO_FEW}


@dataclass
class Options:
    runs: Annotated[
        tyro.conf.Positional[tuple[Path, ...]],
        tyro.conf.arg(metavar="RUNS...", help="folders, searched recursively", help_behavior_hint=""),
    ]
    out: Path = Path("runs/report")  # folder to write the report into
    until: int | None = None  # leave out what longer runs did after so many environment steps


@cache
def read_reference() -> dict[tuple[str, str], dict]:
    """CleanRL's scores by (script, environment), including for scripts of ours with the algorithm of one of theirs."""
    with REFERENCE.open() as file:
        scores = {(row["script"], row["env_id"]): row for row in csv.DictReader(file)}
    same = [(name, other) for name, pair in TABLE.items() for other in pair.scores_of]
    return scores | {
        (name, env): row for name, other in same for (script, env), row in scores.items() if script == other
    }


def published_score(row: dict | None) -> dict | None:
    """CleanRL's score in a row of the reference, as a report holds it."""
    if row is None:
        return None
    published = {"mean": float(row["mean_return"]), "std": float(row["std"] or 0), "seeds": int(row["seeds"])}
    return published | {
        "total_timesteps": int(row["total_timesteps"]), "source": f"CleanRL, {row['source_in_cleanrl_repo']}"
    }  # fmt: skip


def published_for(row: dict) -> dict | None:
    """CleanRL's score for a row of a report, even if the report was written before we had that score."""
    return row["published"] or published_score(read_reference().get((row["script"], row["env_id"])))


def is_same_budget(steps: int, published: dict) -> bool:
    return SAME_BUDGET <= steps / published["total_timesteps"] <= 1 / SAME_BUDGET


def verdict(row: dict) -> str:
    """Whether the mean of our scores differs from the published one, by Welch's test at 5 %."""
    published = published_for(row)
    if published is None:
        return "no published score"
    if not is_same_budget(row["steps"], published):
        return f"not comparable: {published['total_timesteps']:,} steps"
    if row.get("mixed"):
        return MIXED
    if len(row["seeds"]) < MIN_SEEDS:
        return TOO_FEW
    low, high = stats.welch_interval(row["scores"], published["mean"], published["std"], published["seeds"])
    return "above" if low > 0 else "below" if high < 0 else SAME


def steady_speed(run: runs.Run) -> float:
    """Median environment steps per second over the second half of a run, which leaves out start, compiling and pauses.

    The median is over twenty parts of that half, as adjacent lines may be only milliseconds apart.
    """
    ends = np.unique(np.linspace(len(run.lines) // 2, len(run.lines) - 1, 21, dtype=int))
    if len(ends) < 2:
        return run.steps / run.seconds if run.seconds else 0.0
    steps, seconds = (np.diff(run.column(name)[ends]) for name in ("global_step", "seconds"))
    return float(np.median(steps / np.maximum(seconds, 1e-9)))


def interval(strata: list, statistic) -> list[float] | None:
    """Ends of the 95 % bootstrap interval; None if a stratum has fewer runs than MIN_SEEDS: it would be too narrow."""
    if min(map(len, strata)) < MIN_SEEDS:
        return None
    return [float(end) for end in stats.bootstrap(strata, statistic)]


def why_left_out(run: runs.Run) -> dict:
    """What a report says of a run that is not whole."""
    return {"run": run.dir.name, "why": "; ".join(run.problems) or "no whole run"}


def summarize_group(group: Group, reference: dict) -> tuple[dict, list[runs.Run]]:
    """(row of the table, runs that it is based on) for the runs of one script, environment, variant and settings."""
    key, whole = group.key, [run for run in group.runs if run.is_complete and not np.isnan(runs.final_return(run))]
    kept, doubles = runs.one_per_seed(whole)
    first = {run.seed: run for run in kept}
    row = dict(zip(("script", "env_id", "variant"), key, strict=True))
    row |= {"base": group.variant, "differing": group.differing} if group.variant != key[2] else {}
    row["left_out"] = [why_left_out(run) for run in group.runs if run not in whole]
    row["left_out"] += [a_repeat(run, first[run.seed]) for run in doubles]
    row["notes"] = [group.note] * bool(group.note)
    row["notes"] += [f"{run.dir.name}: {'; '.join(run.problems)}" for run in kept if run.problems]
    files = {run.config["blob"] for run in kept if run.config.get("blob")}
    row["notes"] += [f"these runs are of {len(files)} different files of this name"] * (len(files) > 1)
    if len({settings(run) for run in kept}) > 1:
        row["notes"].append("the runs of this row differ in their settings")
        row["mixed"] = True
    if not kept:
        return row | {"seeds": []}, []
    row["notes"] += notes_on_episodes(key[0], kept)
    scores = np.array([runs.final_return(run) for run in kept])
    steps, mean = int(np.median([run.steps for run in kept])), float(scores.mean())
    row |= {"seeds": [run.seed for run in kept], "scores": scores.tolist(), "iqm": float(stats.iqm(scores))}
    row |= {"interval": interval([scores], stats.pooled_iqm), "mean": mean, "std": float(scores.std()), "steps": steps}
    row["minutes"] = float(np.median([run.seconds for run in kept]) / 60)
    row["steps_per_second"] = float(np.median([steady_speed(run) for run in kept]))
    row["published"] = published_score(reference.get(key[:2]))
    row["commits"] = sorted({commit for run in kept for commit in run.commits})
    for run in kept:
        commits = [f"commits {', then '.join(run.commits)}"] if len(run.commits) > 1 else []
        resumed = run.config.get("resumed", [])
        changed = [x["changed"] for x in resumed if x.get("changed")]
        if resumed:
            steps = " and ".join(f"{x.get('global_step', 0):,}" for x in resumed)
            parts = [f"resumed at step {steps}", *commits, *map(in_words, changed)]
            row["notes"].append(f"{run.dir.name}: {'; '.join(parts)}")
    row["settings"], row["command"] = changed_settings(kept[0]), command_for(kept)
    if row["settings"] and not row.get("mixed"):
        row["notes"].append(f"all {in_words(row['settings'])}")
    row["versions"] = kept[0].config.get("versions", {})
    row["cores"], row["device"] = kept[0].config.get("cores"), kept[0].config.get("device")
    return row, kept


def notes_on_episodes(script: str, kept: list[runs.Run]) -> list[str]:
    """What a reader must know of the episodes whose mean return is shown."""
    fewest = min(int(run.episodes()[2].sum()) for run in kept)
    few = f"a run has only {fewest} episodes; its return is their mean, from the first step on"
    few = "a run has only 1 episode; its return is that of this one" if fewest == 1 else few
    greedy = "returns are those of the environments whose epsilon is below 1 % or the smallest"
    return [few] * (fewest < runs.LAST_EPISODES) + [greedy] * script.startswith("apex")


def partners(rows: list[dict]) -> list[tuple[dict, dict]]:
    """(eager, compiled) for each script, environment, precision and settings that have both.

    If neither of two has a partner with its settings, they are partners nonetheless.
    """
    found = []
    for eager, compiled in product(rows, rows):
        (ours, flags), (theirs, their_flags) = (base_of(row).partition(" ")[::2] for row in (eager, compiled))
        is_pair = ours in EAGER and theirs in COMPILED and flags == their_flags and eager["seeds"] and compiled["seeds"]
        if is_pair and all(eager[name] == compiled[name] for name in ("script", "env_id")):
            found.append((eager, compiled))
    alike = [x for x in found if x[0].get("differing") == x[1].get("differing")]
    taken = {id(row) for pair in alike for row in pair}
    return [x for x in found if x in alike or not taken & set(map(id, x))]


def base_of(row: dict) -> str:
    """The variant of a row, without the settings in which it differs from others."""
    return row.get("base", row["variant"])


def compare(rows: list[dict]) -> list[dict]:
    """Eager against compiled, scores and speed, for each script, environment, precision and settings with both."""
    found = []
    for eager, compiled in partners(rows):
        # If budgets differ, more steps could be mistaken for a difference between the variants
        lengths = sorted((eager["steps"], compiled["steps"]))
        differ = lengths[0] < SAME_BUDGET * lengths[1]
        if differ and "common_scores" not in eager:
            continue
        scores = [row["common_scores" if differ else "scores"] for row in (eager, compiled)]
        eager_iqm, compiled_iqm = (float(stats.iqm(np.array(own))) for own in scores)
        ends = interval(scores, stats.difference_of_iqms)
        pair = {"script": eager["script"], "env_id": eager["env_id"], "eager": eager["variant"]}
        pair |= {"compiled": compiled["variant"], "difference": compiled_iqm - eager_iqm}
        pair |= {"interval": ends, "agree": ends[0] <= 0 <= ends[1] if ends else None}
        if eager.get("mixed") or compiled.get("mixed") or eager.get("settings") != compiled.get("settings"):
            pair["mixed"] = True
        pair["speed_ratio"] = compiled["steps_per_second"] / eager["steps_per_second"]
        found.append(pair)
    return found


def last_episode(run: runs.Run) -> int:
    """The step at which the last episodes ended; 0 if there are none."""
    index, _, _ = run.episodes()
    return run.lines[index[-1]]["global_step"] if len(index) else 0


def add_common_scores(rows: list[dict], panels: dict[tuple[str, str], dict[str, list[runs.Run]]]) -> None:
    """Where runs on an environment differ in length, add to its rows the scores at the length of the shortest run."""
    for key, members in panels.items():
        lengths = [run.steps for kept in members.values() for run in kept]
        end = min(lengths)
        scores = {variant: [runs.final_return(run.until(end)) for run in kept] for variant, kept in members.items()}
        # With many environments, the last episodes may have ended long before, or there may be none yet
        last = [last_episode(run.until(end)) for kept in members.values() for run in kept]
        if end >= SAME_BUDGET * max(lengths) or min(last) < NEWEST * end:
            continue
        for row in rows:
            if (row["script"], row["env_id"]) == key and row["variant"] in scores:
                row |= {"common_steps": end, "common_scores": scores[row["variant"]]}


def scores_at(kept: list[runs.Run], end: float, position: str) -> list[float] | None:
    """Mean return of each run over its last tenth up to `end`; None if a run ended earlier or had no episode by then.

    The last 100 episodes would reach far back with one environment, and hardly at all with 64.
    """
    if min(run.column(position)[-1] for run in kept) < SAME_BUDGET * end:
        return None
    scores = [recent_return(run.until(end, position), (1 - RECENT) * end, position) for run in kept]
    return None if np.isnan(scores).any() else scores


def recent_return(run: runs.Run, start: float, position: str) -> float:
    """Mean return of the episodes in all lines after `start`, or else of the last line that has any; NaN if none."""
    own = [line for line in run.lines if line.get("charts/episodes")]
    own = [line for line in own if line[position] > start] or own[-1:]
    returns, counts = ([line[f"charts/{name}"] for line in own] for name in ("episodic_return", "episodes"))
    return float(np.average(returns, weights=counts)) if own else float("nan")


def rounded_up(x: float) -> float:
    """To two digits; down if that leaves out less than 1 %, as runs end in whole rollouts: 1,000,351 is a million."""
    unit = 10 ** (math.floor(math.log10(x)) - 1)
    return float(f"{math.ceil(x / unit - 0.1) * unit:.2g}")


def add_milestones(rows: list[dict], panels: dict[tuple[str, str], dict[str, list[runs.Run]]]) -> None:
    """Where several scripts, or one with several settings, learnt on one environment, add [steps, scores] to its rows.

    The same is added by seconds.
    """
    for env_id in dict.fromkeys(env_id for _, env_id in panels):
        members = {}
        for (script, _), own in [item for item in panels.items() if item[0][1] == env_id]:
            members |= {(script, variant): kept for variant, kept in own.items()}
        if len({(script, variant.partition(" ")[2]) for script, variant in members}) < 2:
            continue
        for position in AXES:
            longest = max(run.column(position)[-1] for kept in members.values() for run in kept)
            marks = [rounded_up(share * longest) for share in SHARES]
            for row in [row for row in rows if row["env_id"] == env_id and row["seeds"]]:
                kept = members[row["script"], row["variant"]]
                scores = [[mark, scores_at(kept, mark, position)] for mark in marks]
                row.setdefault("milestones", {"recent": RECENT})[position] = scores


def draw_panel(axis, members: dict[str, list[runs.Run]], position: str, published: dict | None) -> None:
    """Curves of the variants of one script and environment against steps or seconds, with bands over the seeds.

    A line shows CleanRL's score, if that is of as many steps.
    """
    colours = plots.shades(list(members))
    for variant, kept in members.items():
        ends = [run.steps if position == "global_step" else run.seconds for run in kept]
        # Runs differ in length: a curve ends where the shortest of its runs ends
        edges = np.linspace(0, min(ends), BINS + 1)
        curves = np.stack([runs.learning_curve(run, edges, position) for run in kept])
        known = ~np.isnan(curves).any(0)
        band = None  # of few seeds, as in the tables: what would be called 95 % holds the truth in 51 to 86 %
        if len(kept) >= MIN_SEEDS and known.any():
            band = stats.bootstrap([curves[:, known]])
        name = f"{plots.label(variant)} ({plural(len(kept), 'seed')})"
        plots.draw_curve(axis, edges[1:][known], stats.iqm(curves)[known], variant, name, band, colours.get(variant))
    longest = max(run.steps for kept in members.values() for run in kept)
    if published and is_same_budget(longest, published):
        axis.axhline(published["mean"], color="#777777", linestyle="--", linewidth=1, label="CleanRL's score")


def draw_curves(panels: dict[tuple[str, str], dict[str, list[runs.Run]]], reference: dict, path: Path) -> None:
    """One row of panels for each script and environment: return against steps, and against wall time."""
    with plots.figure(path, rows=len(panels), columns=len(AXES)) as axes:
        for panel_row, (key, members) in zip(axes, panels.items(), strict=True):
            for axis, (position, x) in zip(panel_row, AXES.items(), strict=True):
                draw_panel(axis, members, position, published_score(reference.get(key)))
                plots.legend(axis, len(members))
                plots.describe_axis(axis, f"{key[0]} on {key[1]}", x, "episode return")


def pack_curves(panels: dict[tuple[str, str], dict[str, list[runs.Run]]]) -> bytes:
    """The curves behind all panels, compressed; the same curves give the same bytes."""
    columns = ("global_step", "seconds", "charts/episodic_return", "charts/episodes")
    curves = [
        {"script": script, "env_id": env_id, "variant": variant, "seed": run.seed}
        | {name: [line.get(name) for line in run.lines] for name in columns}
        for (script, env_id), members in panels.items()
        for variant, kept in members.items()
        for run in kept
    ]
    return gzip.compress(json.dumps(curves).encode(), mtime=0)


def unpack_curves(content: bytes) -> dict[tuple[str, str], dict[str, list[runs.Run]]]:
    """The panels again, with runs that hold nothing but their curves."""
    panels = {}
    for curve in json.loads(gzip.decompress(content)):
        key, variant, config = (curve.pop("script"), curve.pop("env_id")), curve.pop("variant"), {}
        config["args"] = {"seed": curve.pop("seed")}
        rows = (dict(zip(curve, values, strict=True)) for values in zip(*curve.values(), strict=True))
        lines = [{name: value for name, value in row.items() if value is not None} for row in rows]
        panels.setdefault(key, {}).setdefault(variant, []).append(runs.Run(Path(), config, lines))
    return panels


def with_std(scores: dict, count: int) -> str:
    """A mean and its standard deviation, which one score does not have."""
    return f"{scores['mean']:,.1f}" + f" ± {scores['std']:,.1f}" * (count > 1)


def score_cells(row: dict) -> list[str]:
    """A row of the table of scores."""
    start = [row["script"], row["env_id"], row["variant"], len(row["seeds"])]
    if not row["seeds"]:
        return [*start, *["-"] * 7]
    published, theirs = published_for(row), "-"
    if published:
        theirs = f"{with_std(published, published['seeds'])} ({plural(published['seeds'], 'seed')})"
    ours = [f"{row['steps']:,}", estimate(row["iqm"], row["interval"]), with_std(row, len(row["seeds"]))]
    return [*start, *ours, theirs, verdict(row), f"{row['steps_per_second']:,.0f}", f"{row['minutes']:.1f}"]


def pair_cells(pair: dict) -> list[str]:
    """A row of the table of eager against compiled."""
    compared, difference = f"{pair['compiled']} less {pair['eager']}", (pair["difference"], pair["interval"])
    agreement = MIXED if pair.get("mixed") else AGREEMENT[pair["agree"]]
    cells = [pair["script"], pair["env_id"], compared, estimate(*difference, "+,.1f"), agreement]
    return [*cells, f"{pair['speed_ratio']:.2f}x"]


def common_cells(row: dict) -> list[str]:
    """A row of the table of scores at the same number of steps."""
    scores = np.array(row["common_scores"])
    start = [row["script"], row["env_id"], row["variant"], len(scores), f"{row['common_steps']:,}"]
    return [*start, estimate(float(stats.iqm(scores)), interval([scores], stats.pooled_iqm))]


def milestone_tables(rows: list[dict], title: str = "## {}", by_seconds: bool = True) -> list[str]:
    """For each environment that several scripts learnt on, their scores at the same steps and at the same seconds."""
    axes = {name: words for name, words in AXES.items() if by_seconds or name != "seconds"}
    lines = []
    for env_id in dict.fromkeys(row["env_id"] for row in rows if "milestones" in row):
        own = [row for row in rows if row["env_id"] == env_id and "milestones" in row]
        lines += [title.format(f"{env_id}, on the way"), ""]
        for position, axis in axes.items():
            marks = [f"{mark:,.{0 if mark >= 10 else 1}f}" for mark, _ in own[0]["milestones"][position]]
            cells = []
            for row in own:
                scores = [x and np.array(x) for _, x in row["milestones"][position]]
                cells.append([f"`{row['script']}`, {row['variant']}", len(row["seeds"])])
                cells[-1] += [
                    "-" if x is None else estimate(float(stats.iqm(x)), interval([x], stats.pooled_iqm), ",.0f")
                    for x in scores
                ]
            recent = own[0]["milestones"].get("recent")  # older reports have the last 100 episodes
            what = f"return over the last {recent:.0%}, or of the last episodes before" if recent else "return"
            what += f": IQM [95 %; of fewer than {MIN_SEEDS} seeds, none], by {axis}"
            lines += [*table([what, "seeds", *marks], cells), ""]
    return lines


def listing(title: str, items: list[str]) -> list[str]:
    """A headed list, if it has items."""
    return [f"## {title}", "", *[f"- {item}" for item in items], ""] if items else []


def markdown(report: dict, by_seconds: bool = True) -> str:
    """The report as Markdown; its scores on the way also by seconds, if these measure speed."""
    rows, header = report["rows"], ["script", "environment", "variant", "seeds", "steps", "return: IQM [95 %]"]
    header += ["mean ± std", "CleanRL", "verdict", "steps/s", "minutes"]
    lines = ["# Report", "", INTRODUCTION, "", *table(header, [score_cells(row) for row in rows]), ""]
    lines += ["![learning curves](learning_curves.png)", ""] if any(row["seeds"] for row in rows) else []
    if report["pairs"]:
        names = ["script", "environment", "compared", "difference of IQMs [95 %]", "verdict", "speed"]
        lines += ["## Eager against compiled", "", *table(names, [pair_cells(x) for x in report["pairs"]]), ""]
    if any("common_scores" in row for row in rows):
        header, cells = header[:6], [common_cells(row) for row in rows if "common_scores" in row]
        lines += ["## At the same number of steps", "", "Each run as it was when the shortest one ended.", ""]
        lines += [*table(header, cells), ""]
    lines += milestone_tables(rows, by_seconds=by_seconds)
    left_out = [f"{x['run']}: {x['why']}" for x in report.get("left_out", ())]
    left_out += [f"{row['script']}, {x['run']}: {x['why']}" for row in rows for x in row["left_out"]]
    lines += listing("Left out", left_out)
    names = [(f"{row['script']}, {row['env_id']}, {row['variant']}", row["notes"]) for row in rows]
    lines += listing("Notes", [f"{name}: {note}" for name, notes in names for note in notes])
    again = {row["command"]: f"`{row['command']}`" for row in rows if row.get("command")}  # older reports lack it
    lines += listing("To train such runs", list(again.values()))
    return "\n".join([*lines, f"Reported {describe(report['provenance'])}", ""])


def write_report(folders: list[Path], out: Path, until: int | None = None, failed: tuple[str, ...] = ()) -> dict:
    """Write the report of all runs in these folders, up to so many steps, into `out`; returns what went into its JSON.

    `failed` are names of runs that don't count, even if they came near their end.

    Exit code 2 if there are no runs, nothing can be written, or a report there has more runs of a script.
    """
    found = [run.shortened(until) if until else run for run in runs.find_runs(folders)]
    for run in [run for run in found if run.dir.name in failed]:
        run.failed, run.problems = True, [*run.problems, "it failed"]
    if not found:
        fail(f"no runs in {', '.join(map(str, folders))}")
    unread = [why_left_out(run) for run in found if not run.is_known]
    if len(unread) == len(found):
        fail(f"no run that can be read: {'; '.join(': '.join(x.values()) for x in unread)}")
    reference, rows, panels = read_reference(), [], {}
    for group in groups([run for run in found if run.is_known]):
        row, kept = summarize_group(group, reference)
        rows.append(row)
        if kept:
            panels.setdefault(group.key[:2], {})[group.key[2]] = kept
    thinned = {
        key: {variant: [runs.thin(run, LINES) for run in kept] for variant, kept in members.items()}
        for key, members in panels.items()
    }
    add_common_scores(rows, panels)
    add_milestones(rows, thinned)  # as from the curves that are kept
    report = {"provenance": provenance(), "rows": rows, "pairs": compare(rows)}
    report |= {"left_out": unread} if unread else {}
    refuse_fewer_runs(out / "report.json", rows)
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / "curves.json.gz", pack_curves(thinned))
        write_json(out / "report.json", report)
        write_summary(out)
    except OSError as error:
        fail(f"can't write to {out}: {error.strerror}")
    return report


def refuse_fewer_runs(path: Path, rows: list[dict]) -> None:
    """End with exit code 2 if a report at `path` has more runs, or longer ones, of any variant than these rows."""
    if not path.exists():
        return
    try:
        old = [row | {"seeds": list(row["seeds"])} for row in json.loads(path.read_text())["rows"]]
    except (OSError, ValueError, KeyError, TypeError):
        fail(f"{path} is no report: give another --out, or move it away")
    known, counts, longest = Counter(), Counter(), Counter()
    for found, own in ((known, old), (counts, rows)):
        for row in own:
            for variant in {base_of(row), row["variant"]}:  # a row is renamed when another setting joins it
                found[row["script"], row["env_id"], variant] += len(row["seeds"])
    for row in rows:
        key = row["script"], row["env_id"], base_of(row)
        longest[key] = max(longest[key], row.get("steps", 0))
    bases = {(row["script"], row["env_id"], base_of(row)) for row in old}
    more = [
        f"{plural(n, 'run')} of {key[0]} on {key[1]} ({key[2]}), yours {counts[key]}"
        for key, n in known.items()
        if n > counts[key] and (key in bases or key in counts)
    ]
    for row in old:
        key = row["script"], row["env_id"], base_of(row)
        if row.get("steps", 0) > 1.1 * longest[key] > 0:
            more.append(f"runs of {row['steps']:,} steps of {key[0]} on {key[1]} ({key[2]}), yours {longest[key]:,}")
    if more:
        fail(f"{path} has {'; '.join(more)}: give another --out, or move it away")


def write_summary(out: Path, by_seconds: bool = True) -> str:
    """Make `report.md`, and `learning_curves.png` if the curves are there, of a report's data; returns the Markdown."""
    report, curves = json.loads((out / "report.json").read_text()), out / "curves.json.gz"
    text = markdown(report, by_seconds)
    (out / "report.md").write_text(text)
    if curves.exists() and (panels := unpack_curves(curves.read_bytes())):
        draw_curves(panels, read_reference(), out / "learning_curves.png")
    return text


def expand(paths: tuple[Path, ...]) -> list[Path]:
    """The folders; a pattern that was quoted, so that the shell did not expand it, is replaced by its matches."""
    found = {path: [] if path.exists() else sorted(map(Path, glob.glob(str(path)))) for path in paths}
    return [folder for path in paths for folder in found[path] or [path]]


def main(options: Options) -> None:
    folders = [folder for folder in expand(options.runs) if folder.is_dir() or not folder.exists()]
    missing = [str(folder) for folder in folders if not folder.is_dir()]
    if missing or not folders:
        fail(f"there is no folder {', '.join(missing)}" if missing else "name at least one folder of runs")
    if options.until is not None and options.until < 1:
        fail(f"--until is a number of steps from 1 on, not {options.until}")
    report = write_report(folders, options.out, options.until)
    print(markdown(report))
    figure = ", learning_curves.png" * any(row["seeds"] for row in report["rows"])
    print(f"written to {options.out}: report.md, report.json, curves.json.gz{figure}")
