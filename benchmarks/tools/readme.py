"""Remake all tables and figures from the committed results: ./run.sh readme.

A test checks that the Markdown in `benchmarks/results/`, and the text between the two marks in RESULTS.md, is what this
program makes from the JSON files.

Measures: nothing.
Takes: seconds.
Leaves: the Markdown and the figures in benchmarks/results/, and RESULTS.md.
"""

import json
import re
import textwrap
from pathlib import Path

import numpy as np

from benchmarks.acting import inference, rollout
from benchmarks.common import plots, runs, stats
from benchmarks.common.pairs import TABLE
from benchmarks.common.programs import CLONES, ROOT, SCRIPTS, SUFFIX, fail
from benchmarks.common.results import commit_of, estimate, machine_of, plural, table
from benchmarks.learning import report, speedrun, time_to_score, tune
from benchmarks.pools import env_pools, scaling
from benchmarks.pools.env_pools import milliseconds, named
from benchmarks.throughput import backends, ladder, limits, throughput

TABLES, RESULTS = ROOT / "RESULTS.md", ROOT / "benchmarks" / "results"
NOTED = RESULTS / "stale.json"  # results that today's code might not reproduce, from ./run.sh stale --note
BEGIN, END = "<!-- results: made by benchmarks/tools/readme.py -->", "<!-- end of results -->"


def in_order(path: Path) -> tuple:
    """Sort key of result files: those in a folder come before those in its subfolders."""
    return len(path.parts), path


def load(pattern: str) -> list[dict]:
    """The JSON files in the results that match a pattern, ordered by name; those of other machines come last.

    Each gets the name of its `file`, under which it may be listed as stale.
    """
    found = []
    for path in sorted(RESULTS.glob(pattern), key=in_order):
        content = json.loads(path.read_text())
        for result in content if isinstance(content, list) else [content]:
            result["file"] = str(path.relative_to(RESULTS))
        found.append(content)
    return found


def mark(*words: str) -> str:
    """A mark for what is listed as stale: a file, or a row of one given by script, environment and variant."""
    noted = json.loads(NOTED.read_text()) if NOTED.exists() else {}
    return " †" * (": ".join((words[0], ", ".join(words[1:]))).removesuffix(": ") in noted)


def legend(lines: list[str]) -> list[str]:
    """The meaning of the mark, if it is used."""
    text = "† By older code than today's, which might not give it again; [why](benchmarks/results/stale.json)."
    return [text, ""] * any(" † " in line for line in lines)


def sources(results: list[dict], are_marked: bool = False) -> list[str]:
    """Where results come from, in a line per machine and set of versions; the pages behind the tables have more.

    Also which of them are from older code, unless the rows of the table are marked with that.
    """
    groups = {}
    for origin in (result["provenance"] for result in results):
        versions = ", ".join(f"{name} {number}" for name, number in origin["versions"].items())
        groups.setdefault((machine_of(origin), versions), []).append(origin)
    lines = [""]
    for (machine, versions), origins in sorted(groups.items()):
        days, commits = sorted({origin["date"][:10] for origin in origins}), sorted(map(commit_of, origins))
        days, commits = " to ".join(dict.fromkeys((days[0], days[-1]))), ", ".join(dict.fromkeys(commits))
        lines.append(f"- Measured on {machine}, {days}, at {commits}; {versions}.")
    old = [f"`{result['file']}`" for result in results if mark(result.get("file", "")) and not are_marked]
    text = f"- By older code than today's: {', '.join(dict.fromkeys(old))}; [why](benchmarks/results/stale.json)."
    return lines + [text] * bool(old)


def paragraph(text: str) -> list[str]:
    """Lines of a paragraph, at most 120 characters each."""
    return textwrap.wrap(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)


def row_name(result: dict) -> str:
    return f"`{result['script']}`, {result['env_id']}"


def flags_cell(flags: str, env_id: str) -> str:
    """More flags, as a table shows them: the environment stands in the first column."""
    flags = flags.replace(f"--env-id {env_id}", "").strip()
    return f"`{flags}`" if flags else ""


def table_with_flags(header: list[str], rows: list[list[str]]) -> list[str]:
    """A table whose last column is extra flags; the column is left out if there are none."""
    if any(row[-1] for row in rows):
        return table([*header, "flags"], rows)
    return table(header, [row[:-1] for row in rows])


def compiled_of(names) -> str:
    """The compiled variant that a table shows: the one with CUDA graphs, if it is among the names."""
    return "compile+cudagraphs" if "compile+cudagraphs" in names else "compile"


def speed_row(result: dict) -> list[str]:
    """Cells of one script: steps/s of peers, eager, compiled; ratios, time to the first update, share of ceiling."""
    contestants, peers = result["contestants"], throughput.peer_columns(result)
    ratios = {(x["of"], x["to"]): estimate(x["ratio"], x["interval"], ".2f") for x in result["ratios"]}
    known = {name: x["steps_per_second"] for name, x in contestants.items() if "steps_per_second" in x}
    compiled = compiled_of(contestants)
    speeds = [f"{known[name]:,.0f}" if name in known else "-" for name in (*peers, "eager", compiled)]
    starts = [contestants.get(compiled, {}).get(f"{cache}_seconds") for cache in ("cold", "warm")]
    alone = result.get("ceilings", {}).get("env_only_steps_per_second")
    failed = sum(len(x["failed"]) for x in contestants.values())
    return [
        row_name(result) + mark(result.get("file", "")),
        result["provenance"]["date"][:10],
        f"{result['rounds']}" + f", {failed} failed runs" * bool(failed),
        *speeds,
        *(ratios.get((own, peer), "-") for own in ("eager", compiled) for peer in peers),
        ratios.get((compiled, "eager"), "-"),
        " / ".join("-" if x is None else f"{x:.0f}" for x in starts),
        f"{known[compiled] / alone:.0%} of {alone:,.0f}" if alone and compiled in known else "-",
        flags_cell(result["flags"], result["env_id"]),
    ]


def side_by_side(results: list[dict]) -> list[str]:
    """A table of how many times SB3's speed compiled scripts have on each machine, where several were measured."""
    found = {}
    for result in sorted(results, key=lambda result: result["provenance"]["date"]):  # the newest one remains
        ratios = {(x["of"], x["to"]): estimate(x["ratio"], x["interval"], ".1f") for x in result["ratios"]}
        ratio = ratios.get((compiled_of(result["contestants"]), "sb3"))
        if ratio and not mark(result.get("file", "")):
            key = row_name(result), flags_cell(result["flags"], result["env_id"])
            found.setdefault(key, {})[machine_of(result["provenance"])] = ratio
    several = {key: own for key, own in found.items() if len(own) > 1}
    machines = sorted({machine for own in several.values() for machine in own})
    rows = [[name, *(own.get(x, "-") for x in machines), flags] for (name, flags), own in sorted(several.items())]
    return [*table_with_flags(["compiled / SB3 [95 %]", *machines], rows), ""] if rows else []


def whole_cell(whole: dict) -> str:
    """Seconds of a program's whole runs: their median and, if there are several, the shortest and the longest."""
    if "steps" not in whole:
        return "-"
    several = whole.get("rounds", [whole["seconds"]])
    return f"{whole['seconds']:,.0f}" + f" ({min(several):,.0f} to {max(several):,.0f})" * (len(several) > 1)


def whole_runs(results: list[dict]) -> list[str]:
    """The tables of whole runs, one for each machine: seconds from the start of the process to its end."""
    rows = {}
    for result in results:
        whole = {name: x.get("whole", {}) for name, x in result["contestants"].items()}
        names = (*throughput.peer_columns(result), "eager", compiled_of(whole))
        steps = [f"{x['steps']:,}" for x in whole.values() if "steps" in x]
        cells = [whole_cell(whole.get(name, {})) for name in names]
        if steps:
            flags = flags_cell(result["flags"], result["env_id"])
            cells = [row_name(result) + mark(result.get("file", "")), steps[0], *cells, flags]
            rows.setdefault((machine_of(result["provenance"]), names[:-2]), []).append(cells)
    lines = []
    for (machine, peers), cells in rows.items():
        header = [f"seconds of a whole run, {machine}", "steps", *map(plots.label, peers)]
        lines += [*table_with_flags([*header, "eager", "compiled"], cells), ""]
    text = """Whole runs are timed from the start of the process to its end, compiled ones with a filled cache, ours
        as a user starts them: with TensorBoard's files and checkpoints, which the peers do not write. Median of several
        runs (shortest to longest), or a single run."""
    return lines + [*paragraph(text), ""] * bool(lines)


def speed_section() -> list[str]:
    """The tables of speeds, one for each machine and, on it, for each kind of peers."""
    kinds = {}
    for result in load("throughput/**/*.json"):
        kinds.setdefault((machine_of(result["provenance"]), throughput.peer_columns(result)), []).append(result)
    # The machine with the latest results comes first; for each, scripts without Ray come first
    dates = {}
    for (machine, _), results in kinds.items():
        dates[machine] = max(dates.get(machine, ""), *(result["provenance"]["date"] for result in results))
    kinds = dict(sorted(kinds.items(), key=lambda item: (dates[item[0][0]], item[0][1] != ("rllib",)), reverse=True))
    lines = side_by_side([result for results in kinds.values() for result in results])
    for (machine, peers), results in kinds.items():
        names = list(map(plots.label, peers))
        header = [f"steady environment steps/s, {machine}", "measured", "rounds", *names, "eager", "compiled"]
        header += [f"{own} / {name} [95 %]" for own in ("eager", "compiled") for name in names]
        header += ["compiled / eager [95 %]", "first update, cold / warm (s)", "compiled, % of stepping at random"]
        lines += [*table_with_flags(header, [speed_row(result) for result in results]), ""]
    lines += whole_runs([result for results in kinds.values() for result in results])
    lines += legend(lines)
    lines += paragraph("""All contestants in interleaved rounds of fresh processes, with the same hyperparameters,
        networks, threads and `--matmul-precision`, as far as the peers allow; beside `--bf16` the peers stay in
        float32, as they have no such flag. None writes TensorBoard's files; SAC and TD3 log every
        200 steps, those of CleanRL and LeanRL as their scripts say; DQN and
        Ape-X use their final epsilon from the start. Speeds are medians; a ratio is the geometric mean over the
        rounds, with Student's interval, which is wide if rounds are few. From one day to the next the same program can
        differ by more. First updates are timed once with an empty compile cache (cold); with a filled one (warm) they
        are the median of the other rounds. Those of SAC and TD3 come after the first steps, in which they act at
        random. What differs from our script in a peer:""")
    lines += ["", *peer_differences([result for results in kinds.values() for result in results]), ""]
    pages = sorted(RESULTS.glob("throughput/**/throughput.md"))
    lines += ["Everything that was measured, with peak memory, the time of each part and LeanRL's published figures:"]
    for page in pages:
        found = [json.loads(path.read_text())["provenance"] for path in sorted(page.parent.glob("*.json"))]
        machine = " and ".join(dict.fromkeys(map(machine_of, found)))
        lines += [f"[{machine}]({page.relative_to(RESULTS.parent.parent)})" + ("." if page == pages[-1] else ",")]
    lines += ["", *graph_lines(), ""]
    lines += paragraph("""Stepping at random: the environment alone, nonstop. `ppo_env_pool` can be faster than
        that: while it learns, its workers finish their steps.""")
    return [*lines, *sources([x for results in kinds.values() for x in results], are_marked=True), ""]


def graph_lines() -> list[str]:
    """A table of the CUDA graphs of each pair, with the kernels that a call would else launch one by one."""
    rows = []
    for name, launches in [(name, pair.launches) for name, pair in TABLE.items() if pair.launches]:
        twin = (SCRIPTS / f"{name}{SUFFIX}.py").read_text()
        graphs = re.search(r"^ +([\w, ]+) = \(?CudaGraphModule\(", twin, re.MULTILINE)[1].split(", ")
        cells = [f"`{graph}` {count}" for graph, count in zip(graphs, launches, strict=True)]
        rows.append([f"`{name}`", ", ".join(cells)])
    lines = table(["pair", "CUDA graphs, and the kernels that each replays at one launch"], rows)
    return [
        *lines,
        "",
        *paragraph("""Counts are of uncompiled code, found by emulating graphs on a CPU with four minibatches an epoch;
        compiled code launches fewer."""),
    ]


def peer_differences(results: list[dict]) -> list[str]:
    """A list of what is not alike in peers, each with the scripts beside which it was so, and when if that changed."""
    found, texts = {}, {}
    for result in results:
        for peer, text in throughput.all_differences(result).items():
            name, script, day = plots.label(peer), f"`{result['script']}`", result["provenance"]["date"][:10]
            found.setdefault((name, text), {}).setdefault(script, set()).add(day)
            texts.setdefault((name, script), set()).add(text)
    lines = []
    for (peer, text), scripts in sorted(found.items()):
        days = {x: f" ({', '.join(sorted(own))})" * (len(texts[peer, x]) > 1) for x, own in scripts.items()}
        lines.append(f"- {peer} beside {', '.join(f'{x}{days[x]}' for x in sorted(scripts))}: {text}.")
    return lines


def score_section() -> list[str]:
    """The tables of the time to a score, one for each machine, and the board of the fastest settings."""
    machines, lines = {}, []
    for result in load("time_to_score/*.json"):
        machines.setdefault(machine_of(result["provenance"]), []).append(result)
    for machine, results in machines.items():
        names = list(dict.fromkeys(name for result in results for name in result["contestants"]))
        header = [f"seconds from pressing Enter to a score, {machine}", "score", *map(plots.label, names)]
        rows = []
        for result in results:
            rows.append([row_name(result), f"{result['score']:,g}"])
            rows[-1] += [score_cell(result["contestants"].get(name, [])) for name in names]
            rows[-1] += [flags_cell(result["flags"], result["env_id"])]
        lines += [*table_with_flags(header, rows), ""]
        lines += paragraph("""The mean over the seeds, with Student's 95 % interval. Where some never got there: the
            seconds of all runs by the number of those that did, which is what somebody waits who starts anew. Runs that
            crashed are left out.""")
        lines += ["[All that was measured](benchmarks/results/time_to_score/time_to_score.md).", *sources(results), ""]
    records = load("speedrun/*.json")
    if records:
        lines += [
            *paragraph("""The speedrun board: the fastest settings of our own scripts that reach a score with 9 of 10
                seeds. "Times as fast" divides the seconds of all runs, in vain or not, by the number of successes.
                These intervals are too narrow: of ten seeds, they held the truth in 88 % of simulated cases."""),
            "",
        ]
        how = "[How each was measured](benchmarks/results/speedrun/speedrun.md)."
        lines += [*speedrun.board(records), how, *sources(records), ""]
    return lines


def score_cell(results: list[dict]) -> str:
    """Seconds until a score, or for each run that got there; and how many did."""
    own = time_to_score.summarize(results)
    if not own["runs"]:
        return "failed" if results else "-"
    count = own["runs"] + own["failed"]
    each = f"{own['each']:,.0f} for each success" if own["reached"] else f"never within {own['mean']:,.0f}"
    mean = each if own["reached"] < count else time_to_score.mean_cell(own, ",.0f")
    return f"{mean}, {own['reached']} of {count}"


def ladder_section() -> list[str]:
    """The tables of what each trick gives."""
    if not (results := load("ladder/*.json")):
        return []
    lines = ["From a plain loop, as tutorials write it, to the compiled script, one trick after the other.", ""]
    lines += ["![steps per second of each rung](benchmarks/results/ladder/ladder.png)", ""]
    return [*lines, *(line for result in results for line in ladder.section(result)), *sources(results), ""]


def limit_section() -> list[str]:
    """The tables of how near the compiled scripts are to the machine's limits."""
    if not (results := load("limits/*.json")):
        return []
    lines = [*paragraph(limits.INTRODUCTION), "", *limits.tables(results)]
    return [*lines, "[How it was measured](benchmarks/results/limits/limits.md).", *sources(results), ""]


def backend_section() -> list[str]:
    """A table of the ways to step environments for each machine."""
    if not (results := load("backends/**/*.json")):
        return []
    machines, lines = {}, []
    for result in results:
        machines.setdefault(machine_of(result["provenance"]), []).append(result)
    for machine, own in sorted(machines.items()):
        counts = " or ".join(map(str, sorted({result["rounds"] for result in own})))
        lines += [*backends.rows(own), "", f"On {machine}, {counts} rounds: {backends.verdict(own)}", ""]
    pages = sorted({f"benchmarks/results/{Path(result['file']).parent}/backends.md" for result in results})
    links = " and ".join(f"[{'here' if i else 'How it was measured'}]({page})" for i, page in enumerate(pages))
    lines += paragraph(f"""The eager PPO scripts. SlowCartPole is CartPole whose step takes 3 ms, and
        100 ms more in 1 % of the steps. {links}.""")
    return [*lines, *sources(results), ""]


def still_warming(results: list[dict]) -> str:
    """A sentence on the runs of LeanRL that were much faster in their last turn than in their first."""
    gains = {}
    for result in results:
        turns = [x["speeds"] for x in result["contestants"].get("leanrl", {}).get("rounds", ()) if x["speeds"]]
        if turns and (gain := np.median(turns[-1]) / np.median(turns[0])) > 1.2:
            gains[f"`{result['script']}`"] = f"{gain:.1f}"
    names, times = " and ".join(gains), " and ".join(gains.values())
    return f"LeanRL's {names} had {times} times the speed in the last turn, so ratios to it are too high." * bool(gains)


def gpu_section() -> list[str]:
    """The table of what was measured on a GPU: speeds, of variants that compute what eager does, and how many do."""
    lines, found = [], [result for results in load("gpu/speed.json") for result in results]
    same = next(iter(load("gpu/parity.json")), {}).get("results", {})
    fastest = "compile+cudagraphs"
    names = list(dict.fromkeys(name for result in found for name in result["contestants"]))
    rows, windows = [], []
    for result in found:
        others = {name for name, x in same.get(result["script"], {}).items() if not x["equal"]}
        own = {name: x for name, x in result["contestants"].items() if "steps_per_second" in x and name not in others}
        known = {name: x["steps_per_second"] for name, x in own.items()}
        ratios = {x["of"]: x for x in result["ratios"] if x["of"] in own}
        if {"leanrl", fastest} <= known.keys():
            ratios["beside LeanRL"] = throughput.ratio(result["contestants"], fastest, "leanrl")
        gains = {name: estimate(x["ratio"], x["interval"], ".1f") for name, x in ratios.items()}
        windows += [sum(len(turn["speeds"]) for turn in x["rounds"]) for x in own.values() if "rounds" in x]
        published = getattr(TABLE.get(result["script"]), "leanrl", None) or {}
        equal = [x["equal"] for x in same.get(result["script"], {}).values()]
        rows.append([row_name(result) + (mark("gpu/speed.json") or mark("gpu/parity.json"))])
        rows[-1] += [f"{known[name]:,.0f}" if name in known else "-" for name in names]
        rows[-1] += [f"{published[fastest]:,}" if fastest in published else "-"]
        rows[-1] += [gains.get(name, "-") for name in (fastest, "beside LeanRL")]
        rows[-1] += [f"{sum(equal)} of {len(equal)}" if equal else "-"]
    if found:
        header = [f"steady environment steps/s, {machine_of(found[0]['provenance'])}", *map(plots.label, names)]
        header += ["LeanRL on an H100, as it published"]
        header += [f"{fastest} / {other} [95 %]" for other in ("eager", "LeanRL")]
        lines = [*table([*header, "variants that compute what eager does"], rows), ""]
        lines += legend(lines)
        lines += paragraph(f"""Each pair by its default flags; in SAC, TD3 and DQN learning starts after 1,000 steps,
            and DQN explores as at its end. Each speed is of {min(windows, default=0)} to {max(windows, default=0)}
            windows of 0.3 seconds or more, in one or two turns, between which speeds changed, so intervals are wide.
            {still_warming(found)} The last column counts the combinations of
            `--compile` and `--cudagraphs` that, after some fifty updates, differ from eager by less than ten times
            what rounding does, or 0.001. If a combination differs by more, its speed is not shown.""")
        lines += [*sources(found), ""]
    return lines


def inference_section() -> list[str]:
    """The table of the best ways to act."""
    if not (results := load("inference/*.json")):
        return []
    sizes = sorted({size for result in results for size in result["batch_sizes"]})
    best = [inference.best_paths(result) for result in results]
    header = ["fastest way to act, % faster than eager", *(f"batch {size:,}" for size in sizes)]
    rows = [
        [f"`{result['network']}`, {result['device']}", *(own.get(size, "-") for size in sizes)]
        for result, own in zip(results, best, strict=True)
    ]
    lines = [*table(header, rows), ""]
    lines += paragraph("""Action, log-probability and value in one call. A way counts only if its outputs equal eager's
        and follow an optimizer step. The scripts act by `numpy` on a CPU, which needs nothing else, except for Atari's
        CNN. `ort` is ONNX Runtime, whose copy of the weights must be refreshed after each update; `aoti` is code that
        PyTorch has compiled ahead of time. [All of them](benchmarks/results/inference/inference.md), with intervals,
        latencies, what they take to compile and after how many calls that pays.""")
    return [*lines, *sources(results), ""]


def absent(row: dict) -> str:
    """The text of a cell without a number: it failed, or was not measured."""
    return "failed" if "error" in row else "-"


def rollout_section() -> list[str]:
    """The table of sampling with a compiled policy."""
    if not (results := load("rollout/rollout.json")):
        return []
    (result,) = results
    actors = list(dict.fromkeys(row["actor"] for row in result["rows"] if row["actor"] != "off"))
    known = {(x["family"], x["num_envs"], x["backend"], x["actor"]): x for x in result["rows"]}
    rows = []
    for *place, actor in known:
        if actor == "off":
            others = [known.get((*place, name), {}) for name in actors]
            gains = [estimate(x["ratio"], x["interval"], ".2f") if "ratio" in x else absent(x) for x in others]
            speeds = [x["off_steps_per_second"] for x in others if "off_steps_per_second" in x]
            rows.append([*place, f"{np.median(speeds):,.0f}", *gains])
    header = ["sampling alone", "environments", "backend", "policy in eager PyTorch, steps/s"]
    lines = [*table([*header, *(f"{name}, to it [95 %]" for name in actors)], rows), ""]
    lines += paragraph("""CartPole, HalfCheetah and Breakout, no learning. `gymnasium` is a worker process for each of
        several environments, `gymnasium-sync` this process. The scripts act by `numpy`; the other ways are
        `torch.compile` (inductor), and those of the table above. [With latencies and compile
        times](benchmarks/results/rollout/rollout.md).""")
    return [*lines, *sources([result]), ""]


def score_of(row: dict) -> str:
    """A return and its interval or, over few seeds, all that lies between them; with a decimal if it is small."""
    form = ",.0f" if abs(row["iqm"]) >= 100 else ",.1f"
    return estimate(row["iqm"], row["interval"], form) if row["interval"] else spread(np.array(row["scores"]), form)


def learning_rows(summary: dict) -> list[list[str]]:
    """Cells of each environment and precision of a report: eager and compiled beside CleanRL."""
    groups = {}
    for row in summary["rows"]:
        variant, _, flags = row["variant"].partition(" ")
        groups.setdefault((row["script"], row["env_id"], flags), {})[variant] = row
    cells = []
    for (_, env_id, flags), variants in sorted(groups.items()):
        known = next((x for x in variants.values() if x["seeds"]), None)
        if known is None:
            continue
        published = report.published_for(known)
        measured = [variants.get("eager"), variants.get(compiled_of(variants))]
        scores = [
            f"{score_of(x)}, {plural(len(x['seeds']), 'seed')}, {report.verdict(x)}"
            + mark(summary.get("file", ""), x["script"], x["env_id"], x["variant"])
            if x and x["seeds"]
            else "-"
            for x in measured
        ]
        form = ",.0f" if published and abs(published["mean"]) >= 100 else ",.1f"
        theirs = f"{published['mean']:{form}} ± {published['std']:{form}}" if published else "-"
        names = [Path(file).parent.name for file in summary.get("parts", [summary["file"]])]
        links = ", ".join(f"[{name}](benchmarks/results/learning/{name}/report.md)" for name in names)
        steps = f"{known['steps']:,}"
        cells.append([row_name(known), steps, *scores, theirs, links, flags_cell(with_settings(flags, known), env_id)])
    return cells


def with_settings(flags: str, row: dict) -> str:
    """Flags, and those of settings of a row that are not among them."""
    given = {word.removeprefix("--").removeprefix("no-").replace("-", "_") for word in flags.split()}
    more = runs.in_flags({name: x for name, x in (row.get("settings") or {}).items() if name not in given})
    return f"{' '.join(flags.split())} {more}".strip()


def pooled(summaries: list[dict]) -> list[dict]:
    """Runs whose seeds are spread over a report and others named after it, as `million` and `million_zen_4` are.

    Each row is a report of its own. Rows of older code are left out; so are all of a kind if a seed is in two reports,
    as it is no second sample.
    """
    groups = {}
    for summary in summaries:
        for row in summary["rows"]:
            key, settings = (row["script"], row["env_id"], row["variant"]), json.dumps(row.get("settings"))
            if row["seeds"] and not row.get("mixed") and not mark(summary["file"], *key):
                groups.setdefault((*key, row["steps"], settings), []).append((summary["file"], row))
    result = []
    for parts in groups.values():
        files, rows = zip(*parts, strict=True)
        seeds, scores = ([x for row in rows for x in row[name]] for name in ("seeds", "scores"))
        is_named_so = all(file.startswith(files[0].removesuffix("/report.json")) for file in files)
        if len(parts) > 1 and is_named_so and len(set(seeds)) == len(seeds):
            row = rows[0] | {"seeds": seeds, "scores": scores, "iqm": float(stats.iqm(np.array(scores)))}
            row["interval"] = report.interval([np.array(scores)], stats.pooled_iqm)
            result.append({"file": files[0], "parts": files, "rows": [row]})
    return result


# Reports whose seconds measure no speed, as other work ran beside their runs: "Notes on these" in RESULTS.md
BUSY = (
    "actor_critics_breakout", "dqn", "off_policy_200k", "off_policy_200k_cascade_lake", "off_policy_hopper_pendulum",
    "off_policy_million_zen_4", "ppo", "ppo_eight_envs", "ppo_ray_half_cheetah", "sac_50k",
)  # fmt: skip


def learning_section() -> list[str]:
    """The table of returns."""
    summaries = load("learning/*/report.json")
    header = ["return of the last 100 training episodes", "steps", "eager: IQM [95 %]", "compiled: IQM [95 %]"]
    header += ["CleanRL, mean ± std", "curves, scores, commits"]
    reports = sorted([*summaries, *pooled(summaries)], key=lambda x: x.get("parts", [x["file"]])[-1])
    lines = [*table_with_flags(header, [row for summary in reports for row in learning_rows(summary)]), ""]
    lines += legend(lines)
    for summary in summaries:
        name = Path(summary["file"]).parent.name
        lines += report.milestone_tables(summary["rows"], f"{{}} (`{name}`):", by_seconds=name not in BUSY)
    commits = {commit for summary in summaries for row in summary["rows"] for commit in row.get("commits", [])}
    commits = {commit[:12] + " with uncommitted changes" * commit.endswith("-dirty") for commit in commits}
    lines += paragraph("""Above, below: our plain mean beside that of CleanRL's few runs, by Welch's test at 5 %. No
        difference seen does not show that they are equal. Of five seeds, an interquartile mean leaves out the lowest
        and the highest; CleanRL's plain means do not, and its ± is the standard deviation. A run with fewer than a
        hundred episodes counts with all of them, the first ones too: so does SAC at 50,000 steps of HalfCheetah, and on
        Pendulum, where the last hundred of TD3's contain random ones. The tables below the first have the last tenth.
        Intervals are a little too narrow: in a simulation (`tests/test_benchmark_stats.py`) those of five seeds held
        the truth in 90 % of cases. Fewer seeds have no interval, but the lowest and the highest return. A row of two
        reports has the seeds of both, measured on two machines.""")
    return [*lines, f"Commits of the runs: {', '.join(sorted(commits))}.", ""]


def search_section() -> list[str]:
    """The table of searches; those that differ only in the seed of what was drawn share a row."""
    groups = {}
    for result in (results := load("tune/*.json")):
        groups.setdefault(json.dumps(result["search"] | {"search_seed": None}), []).append(result)
    rows, all_checks = [], []
    for found in groups.values():
        search = found[0]["search"]
        is_population = search["scheduler"] in tune.POPULATIONS
        size = search["population" if is_population else "trials"]
        whole = size * search["total_timesteps"] * search["seeds_per_trial"]
        rows.append([row_name(search), f"`{'`, `'.join(search['search'])}`"])
        rows[-1][1] += f"; on the way `{'`, `'.join(search['perturb'])}`" * is_population
        rows[-1] += [search["scheduler"], f"{size} of {search['total_timesteps']:,} steps", f"{len(found)}"]
        rows[-1] += [spread(np.array([result["best"]["objective"] for result in found]))]
        rows[-1] += [f"{np.mean([result['steps'] for result in found]) / whole:.0%}"]
        checks = [result["check"] for result in found if result.get("check", {}).get("interval")]
        rows[-1] += ["; ".join(estimate(x["difference"], x["interval"], ".0f") for x in checks) or "-"]
        all_checks += rows[-1][-1].split("; ") if checks else []
    header = ["`./run.sh tune` of", "drawn from", "scheduler", "trials", "searches", "best trial's return: IQM [95 %]"]
    header += [
        "steps taken, % of running every trial to its end",
        "best settings less default ones, on fresh seeds [95 %]",
    ]
    same = [
        "Where two rows have the same difference, both searches found the same settings, checked once.",
        "",
    ]
    same *= len(set(all_checks)) < len(all_checks)
    return [*table(header, rows), "", *same, *sources(results), ""] if rows else []


def spread(values: np.ndarray, form: str = ".0f") -> str:
    """The interquartile mean and its interval or, for fewer than five values, their range."""
    if len(values) < report.MIN_SEEDS:
        return " to ".join(dict.fromkeys(f"{x:{form}}" for x in (values.min(), values.max())))
    return estimate(float(stats.iqm(values)), stats.bootstrap([values], stats.pooled_iqm), form)


def pool_section() -> list[str]:
    """The table of pools of slow environments."""
    (sleeping,), (overhead,) = load("env_pools/sleeping_24.json"), load("env_pools/overhead.json")
    base, cells = milliseconds(named(sleeping["rows"], "gymnasium AsyncVectorEnv"))[0], []
    alone = {row["name"]: 1000 * milliseconds(row)[0] / overhead["num_envs"] for row in overhead["rows"]}
    for row in sleeping["rows"]:
        if "W x V" not in row["name"] and row["name"] != "ours, M = N/2":
            median, low, high = milliseconds(row)
            own = f"{alone[row['name']]:.0f}" if row["name"] in alone else "-"
            cells.append(
                [row["name"], estimate(median, [low, high]), f"{1000 * row['model']:.1f}", f"{base / median:.1f}", own]
            )
    header = ["24 environments: 3 ms a step, 100 ms more in 1% of them", "ms a step of all [quartiles]", "model"]
    lines = [*table([*header, "to AsyncVectorEnv", "overhead, µs an environment step"], cells), ""]
    lines += paragraph("""N environments; a step waits for M (`--ready-batch`). The last column is of 8 whose steps take
        no time. [Sizes, layouts, a worker killed every 5 s, where the time
        goes](benchmarks/results/env_pools/env_pools.md).""")
    return [*lines, *sources([sleeping, overhead]), ""]


def scaling_section() -> list[str]:
    """The tables of slow simulators over machines, one for each script."""
    results, lines = load("scaling/**/scaling.json"), []
    for result, page in zip(results, sorted(RESULTS.glob("scaling/**/scaling.md"), key=in_order), strict=True):
        script, link = result["settings"]["script"], page.relative_to(RESULTS.parent.parent)
        more = ", [and what one learner could take]" if script == "ppo_ray" else ", [more]"
        lines += [f"`{script}`{more}({link}):", "", *scaling.results_table(result), ""]
    lines += paragraph("""24 environments a node, which sleep 30 ms a step and 1 s more in 1 % of them; nodes that Ray
        simulates; one run each. The model is the speed if only environments took time; linear is one node's speed
        times the number of nodes. The lock-step rows only step the environments of one node, and learn nothing. In
        `ppo_ray`, those named batched run in one process, with rollouts of 128 steps; first-ready has two runners a
        node and 512 steps, and longer rollouts alone would bring most of its gain, by the model. A runner of
        `impala_ray` waits for the slowest of its environments at each step; runners do not wait for each other.""")
    return [*lines, *sources(results), ""]


def render(text: str) -> str:
    """The text of RESULTS.md with its chapters remade."""
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    links, lines = [], []
    for title, section in SECTIONS.items():
        if own := section():
            links += [f"[{title}](#{title.lower().replace(' ', '-')})"]
            lines += ["", f"## {title}", "", *own]
    text = "\n".join([*links[:1], *(f"· {link}" for link in links[1:]), *lines])
    return before + BEGIN + "\n\n" + re.sub(r"\n{3,}", "\n\n", text).strip() + "\n\n" + END + after


# Chapters of RESULTS.md; one without results is left out
SECTIONS = {
    "Steps per second": speed_section, "On a GPU": gpu_section, "Time to a score": score_section,
    "What each trick gives": ladder_section, "What the machine could do": limit_section,
    "Ways to step environments": backend_section,
    "Returns": learning_section, "Searches for settings": search_section, "Ways to act": inference_section,
    "Sampling with a compiled policy": rollout_section, "Pools of slow environments": pool_section,
    "Many machines": scaling_section,
}  # fmt: skip


def most(found: dict[str, list[dict]], more: list[str] | tuple = ()) -> tuple[str, list[dict]]:
    """The machine with the most results, counting `more` of some machines; on a tie, the one measured last."""
    return max(
        found.items(),
        key=lambda item: (len(item[1]) + more.count(item[0]), max(x["provenance"]["date"] for x in item[1])),
    )


def draw_overview(results: Path) -> None:
    """README's picture, `overview.png`: speeds, and times to a score, as multiples of SB3's.

    Each is of the machine on which most was measured by today's code, beside CleanRL and LeanRL too. Speeds of
    older code on that machine are shown, too, and marked: without them only some pairs would be seen. Of times to a
    score, all tasks are shown that were measured there beside SB3.
    """
    speeds, marked, scores, beside = {}, {}, {}, {}
    for path in results.glob("throughput/**/*.json"):
        result = json.loads(path.read_text())
        is_stale = bool(mark(str(path.relative_to(results))))
        if not result["flags"] and not is_stale and set(CLONES) & set(result["contestants"]):
            beside[machine_of(result["provenance"]), result["script"]] = result
        elif not result["flags"] and "steps_per_second" in result["contestants"].get("sb3", {}):
            group = marked if is_stale else speeds
            group.setdefault(machine_of(result["provenance"]), []).append(result)
    for path in sorted(results.glob("time_to_score/*.json")):
        result = json.loads(path.read_text())
        if not mark(str(path.relative_to(results))):
            scores.setdefault(machine_of(result["provenance"]), []).append(result)
    if not speeds or not scores:
        return
    machine, fresh = most(speeds, [place for place, _ in beside])
    older = marked.get(machine, [])
    beside = {script: result for (place, script), result in beside.items() if place == machine}
    with plots.figure(results / "overview.png", columns=2, size=(5.6, 5.6)) as ((left, right),):
        draw_speeds(left, fresh, older, beside)
        draw_times(right, most(scores)[1])


def by_way_of_compiled(result: dict, beside: dict) -> dict[str, tuple[float, list[float]]]:
    """How many times as fast as SB3 CleanRL and LeanRL are, with an interval; they ran beside ours in other rounds.

    The ratio is the product of theirs to our compiled file and of that one's to SB3, and so are the interval's ends. It
    leaves out how much the two days differ. Nothing, if the compiled file failed in one of the two.
    """
    ours = compiled_of(result["contestants"])
    if any("steps_per_second" not in x["contestants"].get(ours, {}) for x in (result, beside)):
        return {}
    steps = throughput.ratio(result["contestants"], ours, "sb3")
    names = [name for name in CLONES if "steps_per_second" in beside["contestants"].get(name, {})]
    found = {name: throughput.ratio(beside["contestants"], name, ours) for name in names}
    pairs = {name: zip(ends_of(x), ends_of(steps), strict=True) for name, x in found.items()}
    return {name: (x["ratio"] * steps["ratio"], [a * b for a, b in pairs[name]]) for name, x in found.items()}


def ends_of(ratio: dict) -> list[float]:
    """The ends of a ratio's bar: of its interval, if it has one."""
    return ratio["interval"] or [ratio["ratio"]] * 2


def draw_speeds(axis, fresh: list[dict], older: list[dict], beside: dict[str, dict]) -> None:
    """How many times as fast as SB3 the contestants of each pair are on a machine, with 95 % intervals.

    Results of older code, for pairs without others, are marked. `beside`: results beside CleanRL and LeanRL, by script.
    """
    groups, scripts = {}, {result["script"] for result in fresh}
    older = [result for result in older if result["script"] not in scripts]
    for result in sorted([*fresh, *older], key=lambda x: x["script"]):
        measured = [name for name, x in result["contestants"].items() if "steps_per_second" in x and name != "sb3"]
        ratios = [throughput.ratio(result["contestants"], name, "sb3") for name in measured]
        name = f"{result['script']}{' †' * (result in older)}\n{result['env_id']}"
        groups[name] = {x["of"]: (x["ratio"], ends_of(x)) for x in ratios}
        if result["script"] in beside and result not in older:
            groups[name] |= by_way_of_compiled(result, beside[result["script"]])
    plots.draw_groups(axis, groups, ".1f")
    axis.axvline(1, color=plots.colour("sb3"), label=plots.label("sb3"))
    axis.legend()
    title = f"Environment steps/s, times those of SB3\n{machine_of(fresh[0]['provenance'])}"
    names = [plots.label(name) for name in CLONES if any(name in group for group in groups.values())]
    note = "lines: 95 % intervals" + f"; {' and '.join(names)} are scaled from rounds of another day" * bool(names)
    plots.describe_axis(axis, title, note + "\n†: by older code than today's" * bool(older), "")


def draw_times(axis, results: list[dict]) -> None:
    """How many times as fast as SB3 the contestants got to a score, for each that got there, with 95 % intervals."""
    groups, scored = {}, [x for x in results if time_to_score.reached(x["contestants"].get("sb3", []))]
    for result in sorted(scored, key=lambda x: (x["script"], x["env_id"])):
        others = {name: rows for name, rows in result["contestants"].items() if name != "sb3"}
        name = f"{result['script']}\n{result['env_id']} to {result['score']:,.0f}"
        found = {x: time_to_score.beside(rows, result["contestants"]["sb3"]) for x, rows in others.items()}
        groups[name] = {x: own for x, own in found.items() if own}
    plots.draw_groups(axis, groups, ".1f")
    axis.axvline(1, color=plots.colour("sb3"), label=plots.label("sb3"))
    axis.legend()
    title = f"Times as fast as SB3 to a score\n{machine_of(results[0]['provenance'])}"
    plots.describe_axis(
        axis, title, "seconds of all runs by the number that got there\nlines: intervals, too narrow (70 to 87 %)", ""
    )


def write_summaries(results: Path) -> None:
    """Write the Markdown and the figures below a folder of results."""
    draw_overview(results)
    rooms = {"throughput": throughput, "inference": inference, "rollout": rollout, "env_pools": env_pools}
    rooms |= {
        "time_to_score": time_to_score,
        "speedrun": speedrun,
        "ladder": ladder,
        "scaling": scaling,
        "limits": limits,
    }
    rooms |= {"backends": backends}
    for name, room in rooms.items():
        room.write_summary(results / name)
    for name in ("throughput", "backends"):
        for folder in sorted({path.parent for path in results.glob(f"{name}/*/*.json")}):  # of other machines
            rooms[name].write_summary(folder)
    for path in results.glob("scaling/*/scaling.json"):  # of other scripts
        scaling.write_summary(path.parent)
    for path in sorted(results.glob("**/report.json")):
        report.write_summary(path.parent, by_seconds=path.parent.name not in BUSY)


def main(flags: list[str]) -> None:
    if {"-h", "--help"} & set(flags):
        print(__doc__)
        return
    if flags:
        fail("readme takes no flags")
    write_summaries(RESULTS)
    TABLES.write_text(render(TABLES.read_text()))
