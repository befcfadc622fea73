"""Which way to step environments is fastest for the whole loop, and whether the scripts choose it: ./run.sh backends.

The same eager script trains on the same environments, stepped in its own process, by EnvPool's threads or in worker
processes; Atari in two halves that alternate, or all at once. Each way is measured as `throughput` measures variants:
in rounds of fresh processes, the order reversed from round to round. A rollout has the same number of steps however
many environments there are, so that the cost of learning per step is the same.

Measures: steady environment steps/s of each way, and how close the script's default way comes to the fastest.
Takes: at the defaults about 40 minutes.
Leaves: in --out one JSON file per environment, and backends.md from all JSON files there; in a folder named after the
GPU or CPU, if --out holds results of another machine.
"""

import importlib
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from benchmarks.common import turns
from benchmarks.common.programs import SCRIPTS, check_known, check_once, check_positive, command, load_script
from benchmarks.common.results import (
    Target,
    describe,
    estimate,
    load_all,
    machine_folder,
    machine_of,
    make_folder,
    provenance,
    say_written,
    stoppable,
    table,
)
from benchmarks.throughput import throughput

INTRODUCTION = """
Steady steps/s of the whole loop, eager, by the way in which environments are stepped. By default a script takes the way
that is named here; "of the best other" is its speed in terms of the fastest other way's.
""".strip()
PROCESS, THREADS, WORKERS = "in the process", "EnvPool", "worker processes"
TURNS, ALL = "EnvPool, halves in turn", "EnvPool, all at once"
WAYS = {
    PROCESS: ("--env-backend", "gymnasium", "--sync-envs"),
    THREADS: ("--env-backend", "envpool"),
    WORKERS: ("--env-backend", "gymnasium"),
    TURNS: ("--async-envs",),
    ALL: ("--no-async-envs",),
}
TARGET = 0.95  # share of the best way's speed that the default should reach


@dataclass(frozen=True)
class Task:
    """How an environment is measured: its script, the steps of a rollout over all its copies, the ways, the counts."""

    script: str
    rollout: int = 512
    ways: tuple[str, ...] = (PROCESS, THREADS, WORKERS)
    num_envs: tuple[int, ...] = (1, 4, 16)


TASKS = {
    "CartPole-v1": Task("ppo"),
    "Acrobot-v1": Task("ppo"),
    "LunarLander-v3": Task("ppo"),
    "benchmarks.pools.sleeping:SlowCartPole-v0": Task("ppo", ways=(PROCESS, WORKERS)),
    "HalfCheetah-v4": Task("ppo_continuous_action", rollout=2048),
    "Breakout-v5": Task("ppo_atari_envpool", ways=(TURNS, ALL), num_envs=(4, 16)),
}


@dataclass
class Options:
    env_ids: tuple[str, ...] = ()  # environments to measure; by default all
    rounds: int = 3  # how often each way is started
    seconds: float = 10.0  # seconds of steady running to measure in each run
    timeout: float = 300.0  # seconds after which a run is ended, steady or not
    out: Path = Path("runs/backends")  # results folder; the results in RESULTS.md are in benchmarks/results/backends


def default_way(env_id: str, num_envs: int) -> str:
    """The way that the script chooses by default."""
    task = TASKS[env_id]
    module = load_script(SCRIPTS / f"{task.script}.py")
    args = module.Args(env_id=env_id, num_envs=num_envs)
    if TURNS in task.ways:
        return TURNS if args.async_envs else ALL
    in_process = module.runs_in_process(args, num_envs)
    if module.choose_backend(env_id, args.env_backend, in_process) == "envpool":
        return THREADS
    return PROCESS if in_process else WORKERS


def ways_of(env_id: str, num_envs: int) -> list[str]:
    """The ways to step this many environments; a single one needs no worker."""
    return [way for way in TASKS[env_id].ways if num_envs > 1 or way != WORKERS]


def measure(env_id: str, num_envs: int, options: Options, bar: tqdm) -> dict:
    """Run all rounds with this many environments, stepped in each way."""
    task, ways = TASKS[env_id], ways_of(env_id, num_envs)
    settings, results = throughput.limits_of(options.seconds, options.timeout), {way: [] for way in ways}
    sizes = ["--env-id", env_id, "--num-envs", str(num_envs), "--num-steps", str(task.rollout // num_envs)]
    for turn, way in turns.in_turns(ways, options.rounds):
        bar.set_postfix_str(f"{num_envs} x {env_id}: {way}, round {turn + 1}")
        program = [*command(task.script, "eager"), *sizes, *WAYS[way], "--seed", str(turn + 1)]
        endless = ("--total-timesteps", str(10**9), "--no-tensorboard")
        measured, _ = throughput.measure(program, settings, endless)
        results[way].append(measured)
        bar.update()
    contestants = {way: throughput.summarize(own) for way, own in results.items()}
    return {"num_envs": num_envs, "default": default_way(env_id, num_envs), "contestants": contestants}


def to_best_other(found: dict) -> dict | None:
    """The ratio of the default's speed to that of the fastest other way; None if one of them was not measured."""
    known = {way: own["steps_per_second"] for way, own in found["contestants"].items() if "steps_per_second" in own}
    if known.pop(found["default"], None) is None or not known:
        return None
    return throughput.ratio(found["contestants"], found["default"], max(known, key=known.get))


def cells(env_id: str, found: dict) -> list[str]:
    """A row: the environment, how many, the speed by each way, the default and its share of the best."""
    row = [env_id.rpartition(":")[2], str(found["num_envs"])]
    for way in WAYS:
        own = found["contestants"].get(way)
        speed = "-" if own is None else "failed"
        if own and "steps_per_second" in own:
            speed = estimate(own["steps_per_second"], own["quartiles"], ",.0f")
        row.append(speed)
    best = to_best_other(found)
    return [*row, found["default"], estimate(best["ratio"], best["interval"], ".2f") if best else "-"]


def rows(results: list[dict]) -> list[str]:
    """The table of all results."""
    machines = " and ".join(dict.fromkeys(machine_of(result["provenance"]) for result in results))
    header = [f"steps/s [quartiles], {machines}", "environments", *WAYS]
    header += ["by default", "of the best other [95 %]"]
    return table(header, [cells(result["env_id"], found) for result in results for found in result["rows"]])


def verdict(results: list[dict]) -> str:
    """How many rows reach TARGET, by the ratio and by its whole interval, and how many do not."""
    found = list(filter(None, (to_best_other(row) for result in results for row in result["rows"])))
    good, known = sum(x["ratio"] >= TARGET for x in found), [x["interval"] for x in found if x["interval"]]
    sure, slower = sum(low >= TARGET for low, _ in known), sum(high < TARGET for _, high in known)
    return (
        f"In {good} of {len(found)} rows the default has at least {TARGET:.0%} of the speed of the best other way. "
        f"In {sure} the interval lies above {TARGET:.0%}, in {slower} below; in the others the data do not decide."
    )


def write_summary(out: Path) -> str:
    """Make `backends.md` of all results in a folder; returns the Markdown."""
    results = load_all(out, "env_id", "rows")
    if not results:
        return ""
    lines = ["# Ways to step environments", "", INTRODUCTION, "", *rows(results), "", verdict(results), ""]
    lines += [f"{result['env_id']}: measured {describe(result['provenance'])}\n" for result in results]
    text = "\n".join(lines)
    (out / "backends.md").write_text(text)
    return text


def check(options: Options) -> tuple[str, ...]:
    """Refuse what can't work; returns the environments to measure."""
    check_known("environment", options.env_ids, list(TASKS))
    check_positive(options, "rounds", "seconds", "timeout")
    check_once(options, "env_ids")
    importlib.import_module("benchmarks.pools.sleeping")  # registers its environments
    return options.env_ids or tuple(TASKS)


def main(options: Options) -> int:
    env_ids = check(options)
    options = replace(options, out=machine_folder(options.out))
    make_folder(options.out)
    counts = {env_id: TASKS[env_id].num_envs for env_id in env_ids}
    total = options.rounds * sum(len(ways_of(env_id, n)) for env_id, own in counts.items() for n in own)
    paths = {env_id: options.out / f"{env_id.rpartition(':')[2]}.json" for env_id in env_ids}
    effort = {"rounds": options.rounds, "seconds": options.seconds}
    targets = {env_id: Target(path, effort, env_id=env_id) for env_id, path in paths.items()}
    load_all(options.out, "env_id", "rows")
    kept = f"the rows that were finished before lie in {options.out}"
    with stoppable(kept), tqdm(total=total, unit="run") as bar:
        for env_id, target in targets.items():
            own = {"script": TASKS[env_id].script, "env_id": env_id, **effort, "rows": (found := [])}
            for num_envs in counts[env_id]:
                found.append(measure(env_id, num_envs, options, bar))
                is_whole = all(throughput.is_whole(row["contestants"]) for row in found)
                target.write(own | {"provenance": provenance()}, is_whole and len(found) == len(counts[env_id]))
            text = write_summary(options.out)
    print(text)
    return say_written(options.out, targets.values(), "backends.md")
