"""Pools of environments in lock-step and pools that do not wait, compared with the formulas: ./run.sh env-pools.

Environments sleep, so that the processors have little to do: a step takes 3 ms and, with probability 1 %, 100 ms more.
All contestants of a part are started first and then measured in turn, the order reversed from round to round (A B B A);
libraries that are not installed are left out.

Measures: the time of a step of all environments, the overhead where steps take no time, where a training run's time
goes, and how a run fares whose workers are killed.
Takes: at the defaults about twenty minutes; --parts and --sizes shorten it.
Leaves: in --out a JSON file per part, and env_pools.md and env_pools.png from all JSON files there.
"""

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from tqdm import tqdm

from benchmarks.common import plots, processes, runs, steady, turns
from benchmarks.common.programs import AS_MODULE, SCRIPTS, check_once, check_positive, fail
from benchmarks.common.results import Target, describe, load_all, make_folder, provenance, say_written, stoppable, table
from benchmarks.pools import models as pool_models
from benchmarks.pools import peers as pool_peers
from benchmarks.pools.sleeping import CHANCE, STEP, TAIL, TALK, Sleeping
from benchmarks.throughput.ceilings import SECTIONS

SIZES = (6, 12, 24)  # sleeping environments
LENGTH = 128  # steps of a rollout: PPO's
TRIVIAL = 8  # environments that take no time
RLLIB = {"num_envs": 6, "step": 0.005, "lock-step in one process": 60.9, "asynchronous": 19.1}  # as published, in s
KILL_EVERY = 5  # seconds
SLOW_CARTPOLE, WATCHED = "benchmarks.pools.sleeping:SlowCartPole-v0", "benchmarks.throughput.ceilings"
MANY = 10**9  # environment steps that no run here reaches

INTRODUCTION = f"""
Times are of one step of all N environments on average, N / (environment steps/s); medians and quartiles of the rounds.
M environments are waited for (`--ready-batch`); W x V are workers x environments in each, else there are N workers; a
rollout is {LENGTH} steps of each environment between two waits for all, as in PPO. "Model" is the formula for a pool
that takes no time of its own (`benchmarks/pools/models.py`); for first-ready pools it is the limit of a small M.
""".strip()


@dataclass
class Options:
    # what to measure
    parts: tuple[Literal["sleeping", "rllib", "overhead", "split", "killed"], ...] = (
        "sleeping", "rllib", "overhead", "split", "killed",
    )  # fmt: skip
    sizes: tuple[int, ...] = SIZES  # numbers of sleeping environments, multiples of 6
    rounds: int = 4  # how often each contestant is measured
    seconds: float = 2.0  # duration of each measurement
    minute: float = 60.0  # seconds during which workers are killed
    seeds: tuple[int, ...] = (1, 2, 3)  # seeds of the runs whose workers are killed
    out: Path = Path("runs/env_pools")  # results folder; the results in RESULTS.md are in benchmarks/results/env_pools


@dataclass
class Contestant:
    """How to start a pool, the library it needs, and the model's predicted seconds for a step of all environments."""

    name: str
    start: Callable[[], object]
    model: float | None = None
    needs: str = "gymnasium"


def sleeping_contestants(num_envs: int, step: float, tail: float, chance: float) -> list[Contestant]:
    """All ways to step sleeping environments, each with its model."""
    make, times = partial(Sleeping, step, tail, chance), (step, tail, chance)
    waiting, ready = pool_models.lock_step(*times, num_envs), pool_models.first_ready(*times)
    quarter = max(num_envs // 4, 1)
    found = [
        Contestant("gymnasium SyncVectorEnv", partial(pool_peers.gymnasium_sync, make, num_envs),
                   pool_models.one_after_the_other(*times, num_envs)),
        Contestant("gymnasium AsyncVectorEnv", partial(pool_peers.gymnasium_async, make, num_envs), waiting),
        Contestant("SB3 SubprocVecEnv", partial(pool_peers.sb3, make, num_envs), waiting, "stable_baselines3"),
        Contestant("tianshou ShmemVectorEnv, M = N/4", partial(pool_peers.Tianshou, make, num_envs, quarter),
                   ready, "tianshou"),
        Contestant("torchrl AsyncEnvPool, M = N/4", partial(pool_peers.TorchRL, make, num_envs, quarter),
                   ready, "torchrl"),
        Contestant("ours, M = N", partial(pool_peers.Ours, make, num_envs, num_envs), waiting),
        Contestant("ours, M = N/2", partial(pool_peers.Ours, make, num_envs, num_envs // 2), ready),
        Contestant("ours, M = N/4", partial(pool_peers.Ours, make, num_envs, quarter), ready),
        Contestant("ours, M = N/4, rollouts",
                   partial(pool_peers.OursInRollouts, make, num_envs, quarter, LENGTH),
                   pool_models.rollouts(*times, num_envs, LENGTH)),
    ]  # fmt: skip
    for per_worker in (2, 3):
        workers, layout = num_envs // per_worker, f"W x V = N/{per_worker} x {per_worker}"
        start = partial(pool_peers.Ours, make, num_envs, envs_per_worker=per_worker)
        own = pool_models.hybrid_lock_step(*times, workers, per_worker)
        found.append(Contestant(f"ours, M = N, {layout}", partial(start, ready_batch=num_envs), own))
        own = pool_models.hybrid_first_ready(*times, per_worker)
        found.append(Contestant(f"ours, M = N/4, {layout}", partial(start, ready_batch=quarter), own))
    return [x for x in found if pool_peers.installed(x.needs)]


def trivial_contestants() -> list[Contestant]:
    """All pools, with environments that take no time, and EnvPool with its own environment."""
    make, size = partial(Sleeping, step=0.0), TRIVIAL
    found = [
        Contestant("gymnasium SyncVectorEnv", partial(pool_peers.gymnasium_sync, make, size)),
        Contestant("gymnasium AsyncVectorEnv", partial(pool_peers.gymnasium_async, make, size)),
        Contestant("SB3 SubprocVecEnv", partial(pool_peers.sb3, make, size), needs="stable_baselines3"),
        Contestant(
            "tianshou ShmemVectorEnv, M = N/4", partial(pool_peers.Tianshou, make, size, size // 4), needs="tianshou"
        ),
        Contestant(
            "torchrl AsyncEnvPool, M = N/4", partial(pool_peers.TorchRL, make, size, size // 4), needs="torchrl"
        ),
        *(
            Contestant(f"ours, M = {text}", partial(pool_peers.Ours, make, size, ready_batch))
            for text, ready_batch in (("N", size), ("N/2", size // 2), ("N/4", size // 4))
        ),
        *(
            Contestant(f"ours, M = N, W x V = N/{v} x {v}", partial(pool_peers.Ours, make, size, size, v))
            for v in (2, 4)
        ),
        Contestant("EnvPool, its own CartPole, M = N", partial(pool_peers.envpool_sync, make, size), needs="envpool"),
        Contestant(
            "EnvPool, its own CartPole, M = N/4",
            partial(pool_peers.EnvPoolAsync, make, size, size // 4),
            needs="envpool",
        ),
    ]
    return [x for x in found if pool_peers.installed(x.needs)]


def seconds_per_step(pool, seconds: float) -> float:
    """Seconds for one step of all environments of a pool, measured for `seconds`."""
    steps, start = 0, time.perf_counter()
    while (now := time.perf_counter()) - start < seconds:
        steps += pool.exchange()
    pool.finish()
    return (now - start) * pool.num_envs / steps


def close(pool) -> None:
    """End a pool; on Ctrl-C its workers may have ended before."""
    with contextlib.suppress(OSError, EOFError):
        pool.close()


def measure(contestants: list[Contestant], options: Options, part: str) -> list[dict]:
    """A row for each contestant: its name, its model and the seconds for a step of all environments in each round."""
    rows = [{"name": x.name, "model": x.model, "seconds": []} for x in contestants]
    with contextlib.ExitStack() as stack:
        pools = []
        for contestant in tqdm(contestants, desc=f"{part}: start"):
            pools.append(contestant.start())
            stack.callback(close, pools[-1])
        order = list(zip(rows, pools, strict=True))
        for _, (row, pool) in tqdm(
            turns.in_turns(order, options.rounds), f"{part}: turns", options.rounds * len(order)
        ):
            row["seconds"].append(seconds_per_step(pool, options.seconds))
    return rows


def measure_sleeping(num_envs: int, options: Options) -> dict:
    rows = measure(sleeping_contestants(num_envs, STEP, TAIL, CHANCE), options, f"{num_envs} sleeping")
    return {"num_envs": num_envs, "step": STEP, "tail": TAIL, "chance": CHANCE, "rows": rows}


def measure_rllib(options: Options) -> dict:
    contestants = sleeping_contestants(RLLIB["num_envs"], RLLIB["step"], 0.0, 0.0)
    kept = [x for x in contestants if "gymnasium" in x.name or x.name in ("ours, M = N", "ours, M = N/4")]
    return {**RLLIB, "rows": measure(kept, options, "rllib")}


def measure_overhead(options: Options) -> dict:
    return {"num_envs": TRIVIAL, "rows": measure(trivial_contestants(), options, "overhead")}


# Training runs of the script


@contextlib.contextmanager
def training(arguments: list[str], **environment: str):
    """Context of a running program: (child, its run folder). On exit it is stopped, and must not have failed before."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        child = processes.start([*arguments, "--run-dir", str(run)], Path(folder, "output"), **environment)
        try:
            yield child, run
        finally:
            code = child.stop()
        if code not in (0, 128 + signal.SIGINT):
            fail(f"exit code {code} of {' '.join(arguments[1:3])}:\n{child.last_lines()}")


VARIANTS = {
    "lock-step, eager": ("", "0"),
    "first ready, eager": ("", "6"),
    "first ready, compiled": ("_torchcompile", "6"),
}


def measure_split(options: Options) -> dict:
    """Where the time of a step of 24 environments goes in training, by sampling the loop."""
    rows = []
    for name, (suffix, ready_batch) in tqdm(VARIANTS.items(), desc="split"):
        script = SCRIPTS / f"{pool_peers.SCRIPT.stem}{suffix}.py"
        flags = {"--env-id": SLOW_CARTPOLE, "--num-workers": "24", "--ready-batch": ready_batch}
        flags |= {"--num-steps": "128", "--num-minibatches": "24", "--total-timesteps": str(MANY)}
        words = [word for pair in flags.items() for word in pair]
        program = [*AS_MODULE, WATCHED, "sections", str(script), "--no-tensorboard", *words]
        with training(program) as (child, folder):
            # The first rollout includes starting and compiling
            while (
                child.poll() is None and len(lines := runs.read_lines(folder / "metrics.jsonl")[0]) < 4 + options.rounds
            ):
                child.wait(0.5)
            if len(lines) < 4 + options.rounds:
                fail(f"{name} ended by itself:\n{child.last_lines()}")
        times = steady.section_times(lines, SECTIONS)
        rows.append({"name": name, "ready_batch": int(ready_batch), "seconds": {k: 24 * v for k, v in times.items()}})
    return {"num_envs": 24, "rows": rows}


def workers(pid: int) -> list[int]:
    """The worker processes of a run: its children except multiprocessing's resource tracker."""
    children = [int(x) for task in Path(f"/proc/{pid}/task").iterdir() for x in (task / "children").read_text().split()]
    return [x for x in children if "resource_tracker" not in Path(f"/proc/{x}/cmdline").read_text()]


def run_and_kill(seed: int, minute: float) -> dict:
    """A CartPole run in which a worker is killed every few seconds, for `minute` seconds; then it runs to its end."""
    program = [sys.executable, str(pool_peers.SCRIPT), "--no-tensorboard", "--max-restarts=1000", f"--seed={seed}"]
    kills = 0
    with training(program) as (child, folder), tqdm(total=minute, desc=f"killed, seed {seed}") as bar:
        while child.poll() is None and not runs.read_lines(folder / "metrics.jsonl")[0]:
            child.wait(0.1)
        if not runs.read_lines(folder / "metrics.jsonl")[0]:
            fail(f"the run ended before its first line:\n{child.last_lines()}")
        start = time.perf_counter()
        while child.wait(KILL_EVERY) is None and time.perf_counter() - start < minute:
            with contextlib.suppress(OSError, ZeroDivisionError):  # the run has ended, or no worker lives just now
                alive = workers(child.process.pid)
                os.kill(alive[kills % len(alive)], signal.SIGKILL)
                kills += 1
            bar.update(KILL_EVERY)
        while child.poll() is None:
            child.wait(1)
        lines, _ = runs.read_lines(folder / "metrics.jsonl")
        args = json.loads((folder / "config.json").read_text())["args"]
    rows = len(lines) * args["num_steps"] * args["num_workers"] * args["envs_per_worker"]
    result = {"seed": seed, "kills": kills, "restarts": lines[-1]["pool/worker_restarts"], "rows": rows}
    result |= {"steps": lines[-1]["global_step"], "seconds": lines[-1]["seconds"], "env_id": args["env_id"]}
    result |= {"episodes": sum(x.get("charts/episodes", 0) for x in lines)}
    result |= {"curve": [(x["global_step"], x["charts/episodic_return"]) for x in lines if "charts/episodes" in x]}
    return result | {"last_return": runs.final_return(runs.Run(folder, {}, lines))}


def measure_killed(options: Options) -> dict:
    return {"rows": [run_and_kill(seed, options.minute) for seed in options.seeds]}


# What the results say


def milliseconds(row: dict) -> list[float]:
    """Median and quartiles of a row, in ms."""
    return (1000 * np.quantile(row["seconds"], [0.5, 0.25, 0.75])).tolist()


def named(rows: list[dict], name: str) -> dict:
    return next(row for row in rows if row["name"] == name)


def sleeping_section(result: dict) -> list[str]:
    size, rows = result["num_envs"], result["rows"]
    base, cells = milliseconds(named(rows, "gymnasium AsyncVectorEnv"))[0], []
    for row in rows:
        median, low, high = milliseconds(row)
        own = 1000 * row["model"]
        cells.append([row["name"], f"{median:.2f} [{low:.2f}, {high:.2f}]", f"{own:.2f}", f"{median / own - 1:+.0%}"])
        cells[-1] += [f"{1000 * size / median:,.0f}", f"{base / median:.2f}"]
    header = ["pool", "ms a step of all [quartiles]", "model (ms)", "measured to model", "environment steps/s"]
    title = f"## {size} environments: {1000 * STEP:g} ms a step, {1000 * TAIL:g} ms more in {CHANCE:.0%} of them"
    return [title, "", *table([*header, "to AsyncVectorEnv"], cells), ""]


def rllib_section(result: dict) -> list[str]:
    rows = result["rows"]
    base = milliseconds(named(rows, "gymnasium SyncVectorEnv"))[0]
    cells = [[row["name"], f"{milliseconds(row)[0]:.2f}", f"{base / milliseconds(row)[0]:.2f}"] for row in rows]
    ratio = result["lock-step in one process"] / result["asynchronous"]
    published = f"RLlib, published: {result['lock-step in one process']} s and {result['asynchronous']} s in all"
    cells.append([published, "-", f"{ratio:.2f}"])
    title = f"## RLlib's example: {result['num_envs']} environments, {1000 * result['step']:g} ms a step"
    return [title, "", *table(["pool", "ms a step of all", "to SyncVectorEnv"], cells), ""]


def overhead_section(result: dict) -> list[str]:
    size, cells = result["num_envs"], []
    for row in result["rows"]:
        median, low, high = (1000 * x / size for x in milliseconds(row))
        cells.append([row["name"], f"{median:.1f} [{low:.1f}, {high:.1f}]"])
    lines = [f"## Overhead: {size} environments that take no time", ""]
    return [*lines, *table(["pool", "µs an environment step [quartiles]"], cells), ""]


def split_section(result: dict) -> list[str]:
    parts = {
        "env": "sampling: waiting for environments",
        "policy": "inference",
        "learn": "optimizing",
        "rest": "rest of the loop",
    }
    cells = []
    for row in result["rows"]:
        times = [1000 * row["seconds"][key] for key in parts]
        cells.append([row["name"], *(f"{x:.2f}" for x in times), f"{sum(times):.2f}"])
    lines = [f"## Where the time goes: PPO on CartPole in slow motion, {result['num_envs']} environments", ""]
    return [*lines, *table(["script", *(f"{x} (ms)" for x in parts.values()), "a step of all (ms)"], cells), ""]


def killed_section(result: dict) -> list[str]:
    cells = []
    for row in result["rows"]:
        masked = row["rows"] - row["steps"]
        cells.append(
            [row["seed"], row["kills"], row["restarts"], f"{row['rows']:,}", f"{masked:,}", f"{row['episodes']:,}"]
        )
        cells[-1] += [f"{max(y for _, y in row['curve']):.0f}", f"{row['last_return']:.0f}"]
    header = ["seed", "killed", "restarted", "rows", "masked rows", "episodes", "best rollout", "last 100 episodes"]
    text = f"""
## A worker killed every {KILL_EVERY} s

PPO on {result["rows"][0]["env_id"]} by the defaults of the script; workers get SIGKILL for {result.get("minute", 60):g}
s. A row is masked for each reset, of which there is one after each episode but those that end with the run, and for
each death.
"""
    return [*text.strip().splitlines(), "", *table(header, cells), ""]


def talk_section() -> list[str]:
    """The examples of the talk, from the model alone."""
    times = STEP, TAIL, CHANCE
    slow = [f"{1000 * pool_models.one_slow_step(STEP, TAIL, length):.1f}" for length in (2, 3, 5)]
    waiting = 1000 * pool_models.lock_step(*times, 24)
    batched = 1000 * pool_models.rollouts(*times, 24, LENGTH)
    ready = 1000 * pool_models.first_ready(*times)
    text = f"""
## The examples of a talk, from the model

{TALK}. A rollout of 2, 3, 5 steps of which one takes {1000 * TAIL:g} ms costs {", ".join(slow)} ms a step (the talk:
52, 35, 23 ms). 24 environments in lock-step cost {waiting:.1f} ms, in rollouts of {LENGTH} steps {batched:.1f} ms:
{waiting / batched:.1f} times as fast (the talk: 4 to 5 times). Where no one waits they cost {ready:.1f} ms:
{waiting / ready:.1f} times.
"""
    return [*text.strip().splitlines(), ""]


SECTIONS_OF = {
    "sleeping": sleeping_section, "rllib": rllib_section, "overhead": overhead_section, "split": split_section,
    "killed": killed_section,
}  # fmt: skip
CURVES = {  # the model over the number of environments, and the contestants whose points it predicts
    "lock-step": (pool_models.lock_step, ("gymnasium AsyncVectorEnv", "SB3 SubprocVecEnv", "ours, M = N")),
    f"rollouts of {LENGTH}": (partial(pool_models.rollouts, length=LENGTH), ("ours, M = N/4, rollouts",)),
    "first ready": (lambda *x: pool_models.first_ready(*x[:3]), ("ours, M = N/4", "tianshou ShmemVectorEnv, M = N/4")),
}
MARKS = {"gymnasium AsyncVectorEnv": "s", "SB3 SubprocVecEnv": "^", "tianshou ShmemVectorEnv, M = N/4": "v"}


def draw_points(axis, results: list[dict], contestant: str, colour: str) -> None:
    """What was measured of a contestant, if anything."""
    rows = [(result["num_envs"], row) for result in results for row in result["rows"] if row["name"] == contestant]
    points = sorted((num_envs, milliseconds(row)[0]) for num_envs, row in rows)
    style = {"color": colour, "marker": MARKS.get(contestant, "o"), "linestyle": "none"}
    style |= {"markerfacecolor": "none"} if contestant in MARKS else {}
    if points:
        axis.plot(*zip(*points, strict=True), **style, label=contestant)


def draw(results: list[dict], path: Path) -> None:
    """Milliseconds per step of all against the number of environments: the models as curves, measurements as points."""
    sizes = np.arange(1, 33)
    with plots.figure(path, size=(6.4, 4.2)) as axes:
        axis = axes[0, 0]
        for (name, (model, contestants)), hue in zip(CURVES.items(), ("eager", "sbx", "sb3"), strict=True):
            ms = [1000 * model(STEP, TAIL, CHANCE, int(n)) for n in sizes]
            plots.draw_curve(axis, sizes, np.array(ms), hue, f"model: {name}")
            for contestant in contestants:
                draw_points(axis, results, contestant, plots.colour(hue))
        title = f"{1000 * STEP:g} ms a step, {1000 * TAIL:g} ms more in {CHANCE:.0%} of them"
        plots.describe_axis(axis, title, "environments", "ms for a step of all")
        axis.set_ylim(0)
        axis.legend(fontsize=8)


def write_summary(out: Path) -> str:
    """Make `env_pools.md` and `env_pools.png` of all results in a folder; returns the Markdown."""
    results = {part: [json.loads(x.read_text()) for x in sorted(out.glob(f"{part}*.json"))] for part in SECTIONS_OF}
    results["sleeping"].sort(key=lambda x: -x["num_envs"])
    lines = ["# Pools of environments", "", INTRODUCTION, ""]
    if results["sleeping"]:
        draw(results["sleeping"], out / "env_pools.png")
        lines += ["![time of a step over the number of environments](env_pools.png)", ""]
    for part, write in SECTIONS_OF.items():
        for result in results[part]:
            lines += [*write(result), f"Measured {describe(result['provenance'])}", ""]
    text = "\n".join([*lines, *talk_section()])
    (out / "env_pools.md").write_text(text)
    return text


def check(options: Options) -> None:
    """Refuse what can't work."""
    check_positive(options, "rounds", "seconds", "minute")
    check_once(options, "parts", "sizes", "seeds")
    needed = {"parts": True, "sizes": "sleeping" in options.parts, "seeds": "killed" in options.parts}
    for name in [name for name, is_needed in needed.items() if is_needed and not getattr(options, name)]:
        fail(f"--{name}: name at least one")
    if any(size <= 0 or size % 6 for size in options.sizes):
        fail("--sizes must be multiples of 6, so that workers of 2 and of 3 environments come out even")
    make_folder(options.out)
    load_all(options.out)


def main(options: Options) -> int:
    check(options)
    tasks = {f"sleeping_{size}": partial(measure_sleeping, size) for size in options.sizes}
    tasks = {} if "sleeping" not in options.parts else tasks
    others = {"rllib": measure_rllib, "overhead": measure_overhead, "split": measure_split, "killed": measure_killed}
    tasks |= {part: others[part] for part in options.parts if part in others}
    efforts = {name: {"rounds": options.rounds, "seconds": options.seconds} for name in tasks}
    efforts |= {"killed": {"minute": options.minute}} if "killed" in tasks else {}
    own = {"killed": {"seeds": list(options.seeds)}}
    targets = {name: Target(options.out / f"{name}.json", efforts[name], **own.get(name, {})) for name in tasks}
    before = {name: {"rows": []} | target.old for name, target in targets.items()}
    with stoppable(f"the parts that were finished before lie in {options.out}"):
        for name, task in tasks.items():
            result = task(options) | efforts[name] | own.get(name, {}) | {"provenance": provenance()}
            old, new = (Counter(str(row.get("name", "a run")) for row in x["rows"]) for x in (before[name], result))
            targets[name].write(result, old <= new)
            text = write_summary(options.out)
    print(text)
    figure = ["env_pools.png"] * (options.out / "env_pools.png").exists()
    return say_written(options.out, targets.values(), "env_pools.md", *figure)
