"""Steady speed of the scripts and of their peers, side by side: ./run.sh throughput.

Each round starts every contestant once, in a fresh process; the order is reversed from round to round (A B B A). A run
is ended once its log covers enough seconds after the burn-in. The first round starts with an empty compile cache, the
others with a filled one. TensorBoard is off for all.

Measures: environment steps/s after the burn-in, with ratios and their intervals; the time to the first update; memory
and cores; the environment alone, and where the time of each variant goes.
Takes: at the defaults about five minutes for each variant or peer of each script; --rounds and --seconds shorten it.
Leaves: in --out one JSON file per script, and throughput.md and throughput.png from all JSON files there; if --out
already holds another machine's results, in a subfolder named after this machine's GPU or, without one, its CPU.
"""

import re
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np
from tqdm import tqdm

from benchmarks.common import plots, processes, runs, stats, steady, turns
from benchmarks.common.pairs import TABLE
from benchmarks.common.programs import (
    AS_MODULE,
    CLONES,
    PEERS,
    SCRIPTS,
    VARIANTS,
    Variant,
    check_installed,
    check_known,
    check_once,
    check_positive,
    check_settings,
    command,
    default_variants,
    fail,
    often_logged,
    pairs,
    pairs_here,
    peers_of,
    same_phase,
    say_left_out,
    split_flags,
)
from benchmarks.common.results import (
    Target,
    describe,
    estimate,
    gpu_model,
    load_all,
    machine_folder,
    machine_of,
    make_folder,
    provenance,
    say_written,
    short,
    stoppable,
    table,
)
from benchmarks.throughput import device_use, peers
from benchmarks.throughput.ceilings import SECTIONS

INTRODUCTION = """
Environment steps per second in steady state: fresh processes in interleaved rounds, measured in windows after all is
compiled; medians and quartiles over all windows. Ratios are geometric means over the rounds, each of the medians of two
processes, with Student's intervals, which are wide if rounds are few. "Of a whole run": the steps/s of runs at the
default flags, from the start of the process to its end, with a filled compile cache; their median. "First update" is
the wall time from the start of the process to the first line of the log with a loss, with an empty and with a filled
compile cache; "pays after" is the number of steps, counted from that line on, after which the compiled script has
overtaken the eager one. Peak memory is that of the largest process. "Environment alone" steps it with random actions,
which no script that waits for each step can pass. Where the time goes is seen by a second thread that looks at the
loop, in another run of the same minutes: environment; acting, which is what else the loop does to act and to keep what
it saw; learning; the rest is log and checkpoints. (In results whose JSON has a `summed_ceiling`, acting is the policy's
function alone, by a clock, and the rest is larger.)
""".strip()


@dataclass
class Options:
    scripts: tuple[str, ...] = ()  # pairs to measure, by the name of the eager script; by default all that can run here
    variants: tuple[Variant, ...] = ()  # by default eager and compile, on CUDA also those with CUDA graphs
    # libraries to measure beside them; or cleanrl and leanrl, scripts which get a result of their own
    peers: tuple[Literal["sb3", "sbx", "rllib", "cleanrl", "leanrl"], ...] = ()
    rounds: int = 5  # how often each contestant is started
    seconds: float = 40.0  # of steady running to measure in each run; one that ends before has fewer
    window: float = steady.WINDOW  # length of a measuring window in seconds
    whole_steps: int = 0  # environment steps of additional runs timed from process start to end; 0 for none
    whole_rounds: int = 3  # how often each contestant is timed so, in turns
    ceilings: bool = True  # also measure the environment alone, and where the time of each variant goes
    flags: str = ""  # extra flags for all contestants, as in --flags="--env-id Ant-v4"
    timeout: float = 900.0  # seconds after which a run is ended, steady or not
    out: Path = Path("runs/throughput")  # results folder; those of RESULTS.md are in benchmarks/results/throughput


def limits_of(seconds: float, timeout: float) -> Options:
    """Options of `measure` for commands that measure shorter runs: windows are a quarter of a run, or shorter."""
    return Options(seconds=seconds, window=min(steady.WINDOW, seconds / 4), timeout=timeout)


def follow(child: processes.Child, log: Path, options: Options, learns: bool) -> float | None:
    """Wait until the log holds enough steady seconds; returns the wall time to the line of the first update.

    For a program that learns, no seconds count as steady before that line.
    """
    learnt = None
    while child.poll() is None and time.perf_counter() - child.started < options.timeout:
        lines, _ = runs.read_lines(log)
        if learnt is None and steady.first_update(lines) is not None:
            learnt = time.perf_counter() - child.started
        left = options.seconds - (steady.steady_seconds(lines) if learnt or not learns else 0)
        if left <= 0:
            break
        # Poll rarely, so as not to take time from what is measured
        child.wait(0.1 if learnt is None else min(max(left, 0.2), 5.0))
    return learnt


def measure(
    arguments: list[str], options: Options, last: tuple[str, ...] = (), learns: bool = True, **environment: str
) -> tuple[dict, runs.Run]:
    """(result, the run) of a program; a result with `failed` if it ended badly or was never steady.

    The user's flags override those in `arguments`, and are overridden by those in `last`.
    """
    with tempfile.TemporaryDirectory() as folder:
        run, more = Path(folder, "run"), split_flags(options.flags)
        child = processes.start(
            [*arguments, "--run-dir", str(run), *more, *last], Path(folder, "output"), **environment
        )
        try:
            learnt = follow(child, run / "metrics.jsonl", options, learns)
        finally:
            failure = child.failure()
            child.stop()
        run = runs.read_run(Path(folder, "run"))
        speeds = steady.windows(run.lines, options.window) if learnt or not learns else np.zeros(0)
        result = {"speeds": speeds.tolist(), "first_update_seconds": learnt, **child.resources()}
        if failure or not len(speeds):
            tqdm.write(child.last_lines())
            result["failed"] = failure or "no window of steady speed"
        return result, run


def measure_whole(script: str, name: str, seed: int, options: Options, cache: Path) -> dict:
    """Wall time of a contestant's whole run as a user would start it: with random phase, TensorBoard, checkpoints."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--total-timesteps", str(options.whole_steps), "--run-dir", str(Path(folder, "run"))]
        arguments = [*command(script, name), "--seed", str(seed), *split_flags(options.flags), *flags]
        child = processes.start(arguments, Path(folder, "output"), TORCHINDUCTOR_CACHE_DIR=str(cache))
        if failure := child.finish(options.timeout):
            return {"failed": failure}
        steps = runs.read_run(Path(folder, "run")).steps
        return {"steps": steps, "seconds": child.seconds}


def summarize_whole(found: list[dict]) -> dict:
    """Median of a contestant's whole runs; `failed` if one of them did not get to its end."""
    failed = [x["failed"] for x in found if "failed" in x]
    if failed:
        return {"failed": failed[0]}
    seconds = [x["seconds"] for x in found]
    median, steps = float(np.median(seconds)), found[0]["steps"]
    return {"steps": steps, "seconds": median, "steps_per_second": steps / median, "rounds": seconds}


def summarize(results: list[dict]) -> dict:
    """Summary of one contestant's rounds; the first round had an empty compile cache.

    If that one failed, the next one's cache may be empty or not, so its start is neither cold nor warm.
    """
    good = [result for result in results if "failed" not in result]
    summary = {"rounds": results, "failed": [result["failed"] for result in results if "failed" in result]}
    if not good:
        return summary
    speeds = np.concatenate([result["speeds"] for result in good])
    low, median, high = np.quantile(speeds, [0.25, 0.5, 0.75]).tolist()
    summary |= {"steps_per_second": median, "quartiles": [low, high], "windows": len(speeds)}
    summary["peak_resident_mb"] = max(result["peak_resident_mb"] for result in good)
    summary["cores_used"] = float(np.median([result["cores_used"] for result in good]))
    starts = [result["first_update_seconds"] if "failed" not in result else None for result in results]
    warm = [start for start in starts if start is not None][1:]
    return summary | {"cold_seconds": starts[0], "warm_seconds": float(np.median(warm)) if warm else None}


def ratio(contestants: dict[str, dict], of: str, to: str) -> dict:
    """Ratio of two contestants' speeds over the rounds in which neither failed, with an interval from two rounds on.

    If there is no such round, it is that of their medians over different rounds, without an interval.
    """
    rounds = zip(contestants[of]["rounds"], contestants[to]["rounds"], strict=False)  # on a GPU, one may have more
    both = [(own["speeds"], other["speeds"]) for own, other in rounds if "failed" not in own | other]
    medians = [tuple(map(np.median, speeds)) for speeds in both]
    if not medians:
        medians = [(contestants[of]["steps_per_second"], contestants[to]["steps_per_second"])]
    value, interval = stats.ratio_of_rounds(*zip(*medians, strict=True))
    return {"of": of, "to": to, "ratio": value, "interval": interval}


def compare(contestants: dict[str, dict]) -> dict:
    """Ratios of our variants to the peers and to eager, and the steps after which compiling has paid off."""
    measured = [name for name, x in contestants.items() if "steps_per_second" in x]
    ours, eager = [name for name in measured if name in VARIANTS], contestants.get("eager", {})
    ratios = [ratio(contestants, of, to) for of in ours for to in measured if to in PEERS]
    breaks = {}
    for name in [name for name in ours if name != "eager" and "eager" in ours]:
        ratios.append(ratio(contestants, name, "eager"))
        own, starts = contestants[name], [x["first_update_seconds"] for x in eager["rounds"] if "failed" not in x]
        # Eager has nothing to compile, so its starts are alike, but for the first, which reads packages from the disk.
        # Its speed is the one in the tables, by which compiling gains what it gained round by round
        base = (float(np.median(starts)), own["steps_per_second"] / ratios[-1]["ratio"])
        breaks[name] = {
            cache: steady.break_even(own[f"{cache}_seconds"], own["steps_per_second"], *base)
            for cache in ("cold", "warm")
            if own[f"{cache}_seconds"] is not None
        }
    return {"ratios": ratios, "break_even_steps": breaks}


def measure_ceilings(script: str, contestants: dict[str, dict], options: Options, bar: tqdm, caches: Path) -> dict:
    """Speed of the environment alone, and for each variant the time of each part of its loop."""
    program = [*AS_MODULE, "benchmarks.throughput.ceilings"]
    base = ["--no-tensorboard", *same_phase(script), *often_logged(script)]
    bar.set_postfix_str(f"{script}: environment alone")
    endless = ("--total-timesteps", str(10**12))
    result, _ = measure([*program, "env", str(SCRIPTS / f"{script}.py"), *base], options, endless, learns=False)
    bar.update()
    if "failed" in result:
        return {"failed": result["failed"]}
    ceilings = {"env_only_steps_per_second": float(np.median(result["speeds"])), "variants": {}}
    for name in [name for name in contestants if name in VARIANTS]:
        bar.set_postfix_str(f"{script}: parts of {name}")
        _, path, *flags = command(script, name)
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(caches / name)}
        result, run = measure([*program, "sections", path, *flags, *base], options, **cache)
        bar.update()
        times = {} if "failed" in result else steady.section_times(run.lines, SECTIONS)
        parts = {"microseconds_per_step": {key: 1e6 * value for key, value in times.items()}}
        ceilings["variants"][name] = {"failed": result["failed"]} if "failed" in result else parts
    return ceilings


def measure_device_use(script: str, contestants: dict[str, dict], options: Options, bar: tqdm) -> dict:
    """On a GPU: how busy each variant keeps it, over time, and with how many kernels and graphs per step."""
    bar.set_postfix_str(f"{script}: what the device does")
    variants, more = tuple(name for name in contestants if name in VARIANTS), split_flags(options.flags)
    with tempfile.TemporaryDirectory() as folder:
        limits = options.window, options.timeout
        uses, folders = {}, (Path(folder), Path(folder, "cache"))

        def note(_script: str, variant: str, use: dict) -> None:
            uses[variant] = use

        device_use.measure([script], variants, "cuda", *limits, *folders, note, more)
        return uses


def names_of(script: str, options: Options) -> list[str]:
    """The contestants: the variants of a script, and those of the chosen peers that can train it."""
    return [*(options.variants or default_variants()), *(peer for peer in options.peers if peer in peers_of(script))]


def described(script: str, options: Options, env_id: str, contestants: dict[str, dict], versions: dict) -> dict:
    """The result of a script: its contestants, what is derived from them, and how they were measured."""
    rounds = max(len(x["rounds"]) for x in contestants.values())
    result = {"script": script, "env_id": env_id, "flags": options.flags, "rounds": rounds}
    result |= {"seconds": options.seconds, "window_seconds": options.window}
    result |= {"contestants": contestants, **compare(contestants)}
    result |= {"differences": peers.differences(script, list(contestants)), "peer_versions": versions}
    return result | {"published": getattr(TABLE.get(script), "leanrl", None) or None, "provenance": provenance()}


def measure_script(script: str, options: Options, bar: tqdm, on_round: Callable[[dict], None] = lambda _: None) -> dict:
    """Run all rounds of one script, its variants and peers; returns the results and what is derived from them.

    `on_round` gets the result so far after each round.
    """
    names, env_id = names_of(script, options), "unknown"
    results, versions = {name: [] for name in names}, {}  # versions: of peers with a virtual environment of their own
    flags = ["--no-tensorboard", *same_phase(script), *often_logged(script)]
    caches = Path(tempfile.mkdtemp())
    try:
        for i, name in turns.in_turns(names, options.rounds):
            bar.set_postfix_str(f"{script}: {name}, round {i + 1}")
            cache = {"TORCHINDUCTOR_CACHE_DIR": str(caches / name)}
            arguments = [*command(script, name), "--seed", str(i + 1), *flags]
            measured, run = measure(arguments, options, **cache)
            results[name].append(measured)
            env_id = run.args.get("env_id", env_id)  # a run that failed at once, or one of CleanRL, may not name it
            if name == "rllib" or name in CLONES:
                versions[name] = run.config.get("versions", {})
            bar.update()
            if all(len(x) == i + 1 for x in results.values()):
                so_far = {name: summarize(results[name]) for name in names}
                on_round(described(script, options, env_id, so_far, versions))
        contestants = {name: summarize(results[name]) for name in names}
        whole = {name: [] for name in names if options.whole_steps}
        for i, name in turns.in_turns(list(whole), options.whole_rounds):
            bar.set_postfix_str(f"{script}: {name}, a whole run")
            whole[name].append(measure_whole(script, name, i + 1, options, caches / name))
            contestants[name]["whole"] = summarize_whole(whole[name])
            bar.update()
            on_round(described(script, options, env_id, contestants, versions))
        result = described(script, options, env_id, contestants, versions)
        if options.ceilings:
            result["ceilings"] = measure_ceilings(script, contestants, options, bar, caches)
            if gpu_model() and not {"cpu", "--device=cpu"} & set(split_flags(options.flags)):
                result["device_use"] = measure_device_use(script, contestants, options, bar)
    finally:
        shutil.rmtree(caches, ignore_errors=True)
    return result


def peer_columns(result: dict) -> tuple[str, ...]:
    """The peers with which the table compares a script, measured or not."""
    if set(CLONES) & set(result["contestants"]):
        return tuple(CLONES)
    return ("rllib",) if result["script"].endswith("_ray") else ("sb3", "sbx")


def contestant_cells(result: dict, name: str) -> list[str]:
    """A row of the table of speeds."""
    own = result["contestants"][name]
    if "steps_per_second" not in own:
        return [plots.label(name), "failed", *["-"] * (6 + len(peer_columns(result)))]
    ratios = {x["to"]: x for x in result["ratios"] if x["of"] == name}
    to = [ratios.get(x) for x in peer_columns(result)]
    to = [estimate(x["ratio"], x["interval"], ".2f") if x else "-" for x in to]
    to.append(estimate(ratios["eager"]["ratio"], ratios["eager"]["interval"], ".2f") if "eager" in ratios else "-")
    starts = " / ".join("-" if x is None else f"{x:.1f}" for x in (own["cold_seconds"], own["warm_seconds"]))
    steps = result["break_even_steps"].get(name, {})
    known = {cache: "never" if x is None else f"{x:,.0f}" for cache, x in steps.items()}
    even = " / ".join(known.get(cache, "-") for cache in ("cold", "warm")) if known else "-"
    ends = ratios["eager"]["interval"] if steps else None
    if steps and not (ends and not ends[0] <= 1 <= ends[1]):
        even = "open"  # whether it is faster at all
    whole = own.get("whole", {})
    speed = f"{whole['steps_per_second']:,.0f} ({whole['steps']:,} steps)" if "steps" in whole else "-"
    cells = [plots.label(name), estimate(own["steps_per_second"], own["quartiles"], ",.0f"), speed, *to, starts, even]
    if result["script"].endswith("_ray"):  # the usage of Ray's workers is not seen
        return [*cells, "-", "-"]
    peak = own.get("peak_resident_mb")  # older results lack it: theirs begins with the memory of the harness
    return [*cells, f"{peak:,.0f}" if peak else "-", f"{own['cores_used']:.1f}"]


def ceiling_cells(result: dict, name: str) -> list[str]:
    """A row of the table of ceilings."""
    if "failed" in result["ceilings"]["variants"][name]:
        return [name, "failed", *["-"] * (len(SECTIONS) + 1)]
    times = result["ceilings"]["variants"][name]["microseconds_per_step"]
    alone, own = result["ceilings"]["env_only_steps_per_second"], result["contestants"][name].get("steps_per_second")
    shown = [f"{1e6 / alone:.1f}", *(f"{times[section]:.1f}" for section in SECTIONS)]
    return [name, *shown, f"{own / alone:.0%}" if own else "-"]


def all_differences(result: dict) -> dict[str, str]:
    """What differs from the script, by peer; older results, which lack this for RLlib, get today's text."""
    return peers.differences(result["script"], list(result["contestants"]), result["differences"])


def section(result: dict) -> list[str]:
    """What Markdown says on one script."""
    title = f"## {result['script']} on {result['env_id']}" + f" ({result['flags']})" * bool(result["flags"])
    header = ["program", "steady steps/s [quartiles]", "of a whole run"]
    header += [f"to {plots.label(peer)} [95 %]" for peer in peer_columns(result)] + ["to eager [95 %]"]
    header += ["first update, cold / warm (s)", "pays after steps from there, cold / warm"]
    header += ["peak memory (MiB)", "cores used"]
    cells = [contestant_cells(result, name) for name in result["contestants"]]
    if result["published"]:
        cells += [
            [f"LeanRL's {name} on one H100 (published, not measured)" if name != "CleanRL" else
             "CleanRL on one H100 (published by LeanRL, not measured)", f"{value:,}", *["-"] * 8]
            for name, value in result["published"].items()
        ]  # fmt: skip
    lines = [title, "", *table(header, cells), ""]
    if "failed" in result.get("ceilings", {}):
        lines += [f"The environment alone: {result['ceilings']['failed']}.", ""]
    if result.get("ceilings", {}).get("variants"):
        header = ["variant", "environment alone (µs/step)", "environment in the loop", "acting", "learning"]
        header += ["rest of the loop", "speed, of the environment's alone"]
        lines += [*table(header, [ceiling_cells(result, name) for name in result["ceilings"]["variants"]]), ""]
    if "device_use" in result:
        speeds = {(result["script"], name): x.get("steps_per_second") for name, x in result["contestants"].items()}
        lines += [*device_use.table_of({result["script"]: result["device_use"]}, speeds), ""]
    lines += [f"{plots.label(peer)} differs: {text}.\n" for peer, text in all_differences(result).items()]
    for peer, own in result.get("peer_versions", {}).items():
        lines += [f"{plots.label(peer)} has {', '.join(f'{name} {number}' for name, number in own.items())}.\n"]
    how = f"{result['rounds']} rounds, windows of {result['window_seconds']:g} s"
    bad = {plots.label(name): len(x["failed"]) for name, x in result["contestants"].items() if x.get("failed")}
    how += "".join(f"; {count} of {name} failed" for name, count in bad.items())
    return [*lines, f"{how}; measured {describe(result['provenance'])}", ""]


def draw(results: list[dict], path: Path) -> None:
    """For each script the speeds of all contestants as bars with quartiles."""
    with plots.grid(path, len(results), (5.6, 3.2)) as axes:
        for axis, result in zip(axes, results, strict=True):
            known = {name: x for name, x in result["contestants"].items() if "steps_per_second" in x}
            medians = [x["steps_per_second"] for x in known.values()]
            if known:
                plots.draw_bars(axis, list(known), medians, [x["quartiles"] for x in known.values()])
            title = f"{result['script']} on {result['env_id']}" + f" {result['flags']}" * bool(result["flags"])
            title += f"\n{machine_of(result['provenance'])}"
            plots.describe_axis(axis, title, "environment steps/s", "")


def file_name(script: str, options: Options) -> str:
    """The file name of a script's result; one with flags, or beside CleanRL and LeanRL, gets a file of its own."""
    beside = "_beside_cleanrl" * bool(set(CLONES) & set(names_of(script, options)))
    return short(script + beside + re.sub(r"\W+", "_", options.flags).rstrip("_"))


def write_summary(out: Path) -> str:
    """Make `throughput.md` and `throughput.png` of all results in a folder; returns the Markdown."""
    results = load_all(out, "contestants", "break_even_steps")
    lines = ["# Throughput", "", INTRODUCTION, "", "![steps per second](throughput.png)", ""]
    uses = {}
    for x in [x for x in results if "device_use" in x]:
        beside = " beside CleanRL and LeanRL" * bool(set(CLONES) & set(x["contestants"]))
        uses[f"{x['script']} {x['flags']}".strip() + beside] = x["device_use"]
    if uses:
        device_use.draw(uses, out / "device_use.png")
        lines += ["![device busy over time](device_use.png)", ""]
    text = "\n".join(lines + [line for result in results for line in section(result)])
    (out / "throughput.md").write_text(text)
    draw(results, out / "throughput.png")
    return text


def check(options: Options) -> list[str]:
    """Refuse what can't work; returns the scripts to measure."""
    check_known("script", options.scripts, pairs())
    check_positive(options, "rounds", "seconds", "window", "whole_rounds", "timeout")
    check_once(options, "scripts", "variants", "peers")
    split_flags(options.flags)
    if options.seconds < options.window:
        fail(f"--seconds {options.seconds:g} is less than --window, which is {options.window:g} here")
    if options.whole_steps < 0:
        fail("--whole-steps must be 0 or more")
    if options.whole_rounds != Options.whole_rounds and not options.whole_steps:
        fail("--whole-rounds is for whole runs: say how long they are by --whole-steps")
    scripts = list(options.scripts) or pairs_here()
    if not options.scripts:
        say_left_out()
    for peer in options.peers:
        if not any(peer in peers_of(script) for script in scripts):
            fail(f"--peers {peer}: it trains none of {', '.join(scripts)}")
    if set(CLONES) & set(options.peers):
        without = [script for script in scripts if not set(CLONES) & set(names_of(script, options))]
        if options.scripts and without:
            fail(f"--peers: cleanrl and leanrl have no script like {', '.join(without)}")
        scripts = [script for script in scripts if script not in without]
    if 0 < len(set(CLONES) & set(options.peers)) < len(options.peers):
        fail("--peers: cleanrl and leanrl have a table of their own: measure the others without them")
    if options.whole_steps and set(CLONES) & set(options.peers):
        fail("--whole-steps: leave it out beside cleanrl and leanrl, whose logs and checkpoints are not written here")
    check_installed(options.peers)
    for script, variant in product(scripts, options.variants or default_variants()):
        check_settings([*command(script, variant), "--no-tensorboard", *split_flags(options.flags)])
    make_folder(options.out)
    return scripts


def is_whole(contestants: dict[str, dict]) -> bool:
    """Whether all contestants of a result were measured in all rounds, and to their end if they ran as a whole."""
    good = [x for x in contestants.values() if "steps_per_second" in x and not x.get("failed")]
    return len(good) == len(contestants) and not any("failed" in x.get("whole", {}) for x in good)


def has_ceilings(result: dict) -> bool:
    """Whether the parts of each loop were measured, if that was asked for."""
    ceilings = result.get("ceilings", {})
    return not any("failed" in x for x in (ceilings, *ceilings.get("variants", {}).values()))


def main(options: Options) -> int:
    scripts = check(options)
    options = replace(options, out=machine_folder(options.out))
    make_folder(options.out)
    load_all(options.out, "contestants", "break_even_steps")
    variants = len(options.variants or default_variants())
    runs_of_each = options.rounds + options.whole_rounds * (options.whole_steps > 0)
    total = sum(len(names_of(script, options)) for script in scripts) * runs_of_each
    total += len(scripts) * options.ceilings * (variants + 1)
    kept = f"the rounds that were finished before lie in {options.out}"
    paths = {script: options.out / f"{file_name(script, options)}.json" for script in scripts}
    own = {script: {"contestants": names_of(script, options), "flags": options.flags} for script in scripts}
    effort = {"rounds": options.rounds, "seconds": options.seconds}
    targets = {script: Target(path, effort, **own[script]) for script, path in paths.items()}
    for target in targets.values():
        more = ["ceilings, which --no-ceilings would lack"] * ("ceilings" in target.old and not options.ceilings)
        whole = [x["whole"] for x in target.old.get("contestants", {}).values() if "steps" in x.get("whole", {})]
        steps = max((x["steps"] for x in whole), default=0)
        more += ["whole runs, which yours would lack without --whole-steps"] * (steps > 0 and not options.whole_steps)
        more += [f"whole runs of {steps:,} steps, more than yours"] * (0 < options.whole_steps < 0.9 * steps)
        rounds = max((len(x.get("rounds", ())) for x in whole), default=0)
        more += [f"{rounds} whole runs of each program, more than yours"] * (options.whole_rounds < rounds)
        if more:
            fail(f"{target.path} has {', and '.join(more)}: give another --out, or move it away")
    with stoppable(kept), tqdm(total=total, unit="run") as bar:
        for script, target in targets.items():
            result = measure_script(script, options, bar, partial(target.write, is_whole=False))
            target.write(result, is_whole(result["contestants"]) and has_ceilings(result))
            text = write_summary(options.out)
    print(text)
    return say_written(options.out, targets.values(), "throughput.md", "throughput.png")
