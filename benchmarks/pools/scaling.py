"""What slow simulators gain by not waiting, on one node and over the machines of a cluster: ./run.sh scaling.

Environments sleep, so that the processors have little to do: a step takes 30 ms and, with probability 1 %, a second
more. Ray simulates the machines on this one (`ray.cluster_utils.Cluster`).

Measures: environment steps/s, beside the formula without any overhead. On one node: lock-step as in Gymnasium and
Stable-Baselines3, then `ppo_ray` with batched rollouts, with runners x environments stepped in turn, and first-ready.
Then --script over --nodes and, of `ppo_ray`, which is first-ready, how many steps/s one learner could process.
Takes: at the defaults about a quarter of an hour, mostly for starting runners and for long rollouts.
Leaves: in --out scaling.json, scaling.md and scaling.png.
"""

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal

from benchmarks.common import plots, runs
from benchmarks.common.programs import INSTALL, ROOT, SCRIPTS, check_positive, fail
from benchmarks.common.results import Target, describe, make_folder, provenance, say_written, stoppable, table
from benchmarks.pools import env_pools, models
from benchmarks.pools import peers as pool_peers
from benchmarks.pools.sleeping import TALK, Sleeping

TIMES = STEP, TAIL, CHANCE = 0.03, 1.0, 0.01  # seconds, seconds, probability
SHORT = 128  # steps of a rollout, at whose end all environments of the node wait
ROW_BYTES = 4 * 4 + 8 + 5 * 4  # bytes per row of a fragment: observation, action, five numbers
FRAGMENTS = {"ppo_ray": 512, "impala_ray": 16}  # steps per environment in a fragment, by script
UP = 600  # seconds within which all runners must have delivered
LINEAR = 0.9  # share of one node's speed times the number of nodes; below it, this machine is the limit
TOLD = "24x: 4x by batched rollouts on one node, then 6x by 16 times the processors"


@dataclass
class Options:
    script: Literal["ppo_ray", "impala_ray"] = "ppo_ray"  # what runs over the nodes
    nodes: tuple[int, ...] = (1, 2, 4, 8, 16)  # sizes of the cluster in nodes, starting with 1
    runners: int = 2  # runners on each node
    envs: int = 12  # environments of each runner
    # of ppo_ray: steps per environment in a fragment, at whose end a runner waits for its slowest; by default 512
    steps: int | None = None
    seconds: float = 60.0  # minimum seconds to measure, from when all runners are up
    pools: bool = True  # also measure the other ways to step the environments of one node
    out: Path = Path("runs/scaling")  # folder of the results


def all_up(lines: list[dict], runners: int) -> list[dict]:
    """The lines of the log with all runners up."""
    return [line for line in lines if line.get("runners/alive") == runners]


def speed(lines: list[dict], runners: int, seconds: float) -> float:
    """Environment steps/s from the first line of the log with all runners up; 0 until it covers so many seconds."""
    up = all_up(lines, runners)
    if len(up) < 2 or (length := up[-1]["seconds"] - up[0]["seconds"]) < seconds:
        return 0.0
    return (up[-1]["global_step"] - up[0]["global_step"]) / length


def train(script: str, seconds: float, **settings) -> tuple[float, list[dict]]:
    """(environment steps/s, the log) of a run over sleeping environments."""
    settings |= {
        "env-id": "benchmarks.pools.sleeping:Sleeping-v0", "total-timesteps": 10**9, "device": "cpu",
        "env-kwargs": json.dumps({"step": STEP, "tail": TAIL, "chance": CHANCE}), "env-backend": "gymnasium",
    }  # fmt: skip
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value)) if word != ""]
    program, result, lines = [sys.executable, str(SCRIPTS / f"{script}.py"), *flags, "--no-tensorboard"], 0.0, []
    runners, started = max(1, settings["num-runners"]), time.perf_counter()
    with env_pools.training(program, RAY_USAGE_STATS_ENABLED="0") as (child, folder):
        while child.wait(1) is None and not result:
            lines, _ = runs.read_lines(folder / "metrics.jsonl")
            result = speed(lines, runners, seconds)
            if not all_up(lines, runners) and time.perf_counter() - started > UP:
                fail(f"not all {runners} runners of {script} have delivered in {UP} s:\n{child.last_lines()}")
        if not result:
            fail(f"{script} ended by itself:\n{child.last_lines()}")
    return result, lines


def measure_node(options: Options) -> list[dict]:
    """A row for each way to step the environments of one node."""
    num_envs, make, rows = options.runners * options.envs, partial(Sleeping, *TIMES), []
    waiting = num_envs / models.lock_step(*TIMES, num_envs)
    pools = {"gymnasium": ("lock-step, Gymnasium", pool_peers.gymnasium_async)}
    pools |= {"stable_baselines3": ("lock-step, SB3", pool_peers.sb3)}
    for package, (name, start) in pools.items():
        if pool_peers.installed(package):
            pool = start(make, num_envs)
            env_pools.seconds_per_step(pool, 2.0)  # warm-up, until all workers are up
            rate = num_envs / env_pools.seconds_per_step(pool, options.seconds)  # a short measurement is too noisy
            pool.close()
            rows.append({"name": name, "steps_per_second": rate, "model": waiting})
    workers = num_envs // 3
    flags = {"num-steps": SHORT, "update-epochs": 1}
    in_driver = {"num-runners": 0, "envs-per-runner": num_envs, "async-envs": ""}
    rate, _ = train("ppo_ray", options.seconds, **flags, **in_driver)
    own = num_envs / models.rollouts(*TIMES, num_envs, SHORT)
    rows.append({"name": "batched rollouts", "steps_per_second": rate, "model": own})
    rate, _ = train("ppo_ray", options.seconds, **flags, **{"num-runners": workers, "envs-per-runner": 3})
    rows.append({"name": f"batched, {workers} runners x 3 in turn", "steps_per_second": rate,
                 "model": workers / models.rollouts(*TIMES, workers, 3 * SHORT)})  # fmt: skip
    return rows


def fragment_steps(options: Options) -> int:
    """Steps per environment in a fragment."""
    return options.steps or FRAGMENTS[options.script]


def model(options: Options, nodes: int) -> float:
    """Environment steps/s of runners that each wait for their slowest environment, but not for other runners."""
    num_envs = options.envs
    own = models.rollouts(*TIMES, num_envs, fragment_steps(options) if options.script == "ppo_ray" else 1)
    return nodes * options.runners * num_envs / own


def measure_cluster(options: Options, nodes: int) -> dict:
    """A row for one cluster size, including the learner's seconds per environment step."""
    from ray.cluster_utils import Cluster

    os.environ |= {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}  # for what the cluster's machines start
    node = {"num_cpus": options.runners, "object_store_memory": 100_000_000}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    for _ in range(nodes - 1):
        cluster.add_node(**node)
    cluster.wait_for_nodes()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray has replaced the handler of `stoppable`
    runners = nodes * options.runners
    own = {"num-steps": fragment_steps(options), "rollout": "first-ready", "update-epochs": 1}
    own = own if options.script == "ppo_ray" else {"fragment-steps": fragment_steps(options), "log-every": 200}
    settings = {"num-runners": runners, "envs-per-runner": options.envs, "async-envs": ""}
    settings["ray-address"] = cluster.address
    try:
        rate, lines = train(options.script, options.seconds, **own, **settings)
    finally:
        cluster.shutdown()
    last, spent, up = lines[-1], 0.0, all_up(lines, runners)
    # The shares are percentages of the time of all processes, the runners and the learner. Of a single line they are
    # far off, as the fragments that arrive in its interval were begun in an earlier one
    for before, line in pairwise(up):
        total = (runners + 1) * (line["seconds"] - before["seconds"]) / 100
        spent += total * (line["time/learning"] + line["time/weights"])
    rows = max(1, up[-1]["global_step"] - up[0]["global_step"])
    return {
        "name": f"{way_of(options.script)}, {nodes} node{'s' * (nodes > 1)}", "nodes": nodes, "steps_per_second": rate,
        "environments": runners * options.envs, "model": model(options, nodes),
        "learner_seconds_per_step": spent / rows,
        "staleness_max": max(line["runners/staleness_max"] for line in lines), "late": last.get("runners/late", 0),
    }  # fmt: skip


def way_of(script: str) -> str:
    """What the runners of a script do: those of IMPALA wait for the slowest environment at each step."""
    return "first-ready" if script == "ppo_ray" else "batched per runner"


def extrapolate(settings: dict, sizes: list[dict], runners: int = 1000) -> str:
    """How many steps/s one learner could process, and how many a thousand runners would deliver.

    Extrapolated from the largest cluster with at least LINEAR of linear speed: in larger ones, runners and learner
    compete for this machine's processors, which those of a real cluster do not share.
    """
    if settings["script"] != "ppo_ray":
        return (
            "How many steps/s one learner could take is not estimated: with updates as small as these, the time that "
            "lines of the log take, which counts as learning, matters."
        )
    first = sizes[0]["steps_per_second"] / sizes[0]["nodes"]
    largest = [x for x in sizes if x["steps_per_second"] >= LINEAR * first * x["nodes"]][-1]
    most = 1 / largest["learner_seconds_per_step"]
    each = largest["steps_per_second"] / largest["nodes"] / settings["runners"]
    fragment = settings["envs"] * settings["steps"]

    def rates(steps: float) -> str:
        steps = float(f"{steps:.2g}")
        return f"{steps:,.0f} steps/s, {steps * ROW_BYTES / 1e6:,.1f} MB/s, {steps / fragment:,.0f} sets of weights/s"

    nodes, cost = largest["nodes"], largest["learner_seconds_per_step"] * 1e6
    costs = [x["learner_seconds_per_step"] * 1e6 for x in sizes]
    return (
        f"With {nodes} nodes, the most that had {LINEAR:.0%} of linear, one learner took {cost:.2f} us a step, so it "
        f"could take {rates(most)}: those of some {float(f'{most / each:.2g}'):,.0f} such runners. "
        f"{runners:,} runners would bring {rates(runners * each)}, "
        f"{runners * each / most:.0%} of what one learner can take. Assumed: runners as fast as with {nodes} nodes, "
        f"rows of {ROW_BYTES} bytes, one pass over each batch (more passes cost so many times more), and that to "
        "receive fragments costs the learner nothing, neither Ray's calls nor the network. In what a step "
        f"cost the learner, the sizes differ: {min(costs):.1f} to {max(costs):.1f} us. So take this for an order of "
        "magnitude. Beyond that, several learners (`--num-learners`) share the rows."
    )


def results_table(result: dict) -> list[str]:
    """Lines of Markdown: a row for each way to step the environments of one node, and for each number of nodes."""
    one, sizes = result["node"], result["sizes"]
    base = max((x["steps_per_second"] for x in one if x["name"].startswith("lock-step")), default=None)
    rows, first = [], sizes[0]["steps_per_second"] / sizes[0]["nodes"] if sizes else None
    for x in (*one, *sizes):
        rate = x["steps_per_second"]
        name = x["name"].replace("first-ready", way_of(result["settings"]["script"]))  # older results call it so
        cells = [name, f"{rate:,.0f}", f"{x['model']:,.0f}", f"{rate / x['model']:.0%}"]
        cells += [f"{rate / base:.1f}x" if base else "-", f"{rate / first / x['nodes']:.0%}" if "nodes" in x else "-"]
        rows.append([*cells, x.get("staleness_max", "-"), x.get("late", "-")])
    header = [
        "how",
        "steps/s",
        "model, steps/s",
        "of the model",
        "of the faster lock-step",
        "of linear",
        "age of the oldest rows, updates",
        "rows left out as too old",
    ]
    return table(header, rows)


def write_summary(out: Path) -> str:
    """Make `scaling.md` and `scaling.png` of the result in a folder; returns the Markdown."""
    result = json.loads((out / "scaling.json").read_text())
    one, sizes = result["node"], result["sizes"]
    with plots.figure(out / "scaling.png", columns=2, size=(6.4, 3.4)) as axes:
        for axis, part, title in zip(axes[0], (one + sizes[:1], sizes), ("one node", "nodes"), strict=True):
            places = range(len(part))
            axis.barh(places, [x["steps_per_second"] for x in part], height=0.6, label="measured")
            axis.plot([x["model"] for x in part], places, "k|", markersize=14, label="model")
            axis.set_yticks(places, [x["name"] for x in part])
            axis.invert_yaxis()
            plots.describe_axis(axis, f"sleeping simulators, {title}", "environment steps/s", "")
            axis.legend()
    lines = ["# Slow simulators, on one node and on many", "", "![steps per second](scaling.png)", ""]
    told = [f"{TALK}, tells of {TOLD}.", "", extrapolate(result["settings"], sizes) if sizes else "Unfinished."]
    text = "\n".join([*lines, *results_table(result), "", *told, "", f"Measured {describe(result['provenance'])}", ""])
    (out / "scaling.md").write_text(text)
    return text


def main(options: Options) -> int:
    check_positive(options, "runners", "envs", "steps", "seconds")
    if options.nodes[:1] != (1,) or min(options.nodes) < 1:
        fail("--nodes: numbers of nodes, each 1 or more; begin with 1, to which the others are compared")
    if not pool_peers.installed("ray"):
        fail(f"ray is not installed: {INSTALL.format('-ray')}")
    if options.pools and options.runners * options.envs % 3:
        fail("--runners times --envs must be a multiple of 3, for runners of 3 environments; or choose --no-pools")
    if options.steps and options.script != "ppo_ray":
        fail(f"--steps is for ppo_ray: the fragments of {options.script} have {FRAGMENTS[options.script]} here")
    make_folder(options.out)
    settings = {name: getattr(options, name) for name in ("script", "runners", "envs")}
    settings["steps"] = fragment_steps(options)
    target = Target(options.out / "scaling.json", {"seconds": options.seconds}, settings=settings)
    more = [f"{x['nodes']} nodes" for x in target.old.get("sizes", []) if x["nodes"] not in options.nodes]
    more += ["pools"] * (bool(target.old.get("node")) and not options.pools)
    if more:
        fail(f"{target.path} has {', '.join(more)}, which yours would lack: give another --out, or move it away")
    with stoppable(f"the one node and the sizes that were finished before lie in {options.out}"):
        measure(options, settings, target)
    print(write_summary(options.out))
    return say_written(options.out, [target], "scaling.md", "scaling.png")


def measure(options: Options, settings: dict, target: Target) -> None:
    """Measure one node and all sizes; the result so far is written after each of them."""
    result = {"settings": settings, "seconds": options.seconds, "sizes": []}
    result["node"] = measure_node(options) if options.pools else []
    target.write(result | {"provenance": provenance()}, is_whole=False)
    for nodes in options.nodes:
        result["sizes"].append(measure_cluster(options, nodes))
        target.write(result | {"provenance": provenance()}, is_whole=len(result["sizes"]) == len(options.nodes))
