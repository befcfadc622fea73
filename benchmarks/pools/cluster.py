"""How impala_ray scales over the machines of a cluster: python -m benchmarks.pools.cluster.

Ray simulates the machines on this one (`ray.cluster_utils.Cluster`). Environments sleep, so that the processors have
little to do: a step takes 30 ms and, once in a hundred, a second more. Runners step theirs in worker processes and wait
for the slowest of them at each step; nobody waits for another runner.

Measures: environment steps/s after all runners are up, beside the formula for runners that take no time of their own.
Takes: at the defaults about five minutes.
Leaves: in --out cluster.json, cluster.md and cluster.png.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

from benchmarks.common import plots, runs
from benchmarks.common.programs import ROOT, SCRIPTS, check_positive
from benchmarks.common.results import describe, make_folder, provenance, table, write_json
from benchmarks.pools import models

STEP, TAIL, CHANCE = 0.03, 1.0, 0.01  # seconds, seconds, probability
FRAGMENT = 16  # steps


@dataclass
class Options:
    nodes: tuple[int, ...] = (1, 2, 4)  # sizes of the cluster
    runners: int = 2  # on each node
    envs: int = 12  # of each runner
    seconds: float = 60.0  # that are measured, after all runners are up
    out: Path = Path("runs/cluster")  # folder of the results


def model(options: Options, nodes: int) -> float:
    """Environment steps/s of runners that take no time of their own."""
    return nodes * options.runners * options.envs / models.lock_step(STEP, TAIL, CHANCE, options.envs)


def speed(lines: list[dict], runners: int, seconds: float) -> tuple[float, float]:
    """(environment steps/s, seconds) from the first line of the log with all runners up."""
    up = [line for line in lines if line.get("runners/alive") == runners]
    if len(up) < 2 or up[-1]["seconds"] - up[0]["seconds"] < seconds:
        return 0.0, 0.0
    length = up[-1]["seconds"] - up[0]["seconds"]
    return (up[-1]["global_step"] - up[0]["global_step"]) / length, length


def measure(options: Options, nodes: int) -> dict:
    from ray.cluster_utils import Cluster

    os.environ |= {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    node = {"num_cpus": options.runners, "object_store_memory": 100_000_000}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    for _ in range(nodes - 1):
        cluster.add_node(**node)
    cluster.wait_for_nodes()
    runners = nodes * options.runners
    settings = {
        "ray-address": cluster.address, "num-runners": runners, "envs-per-runner": options.envs, "log-every": 200,
        "env-id": "benchmarks.pools.sleeping:Sleeping-v0", "fragment-steps": FRAGMENT, "total-timesteps": 10**9,
        "env-kwargs": json.dumps({"step": STEP, "tail": TAIL, "chance": CHANCE}), "device": "cpu",
    }  # fmt: skip
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(SCRIPTS / "impala_ray.py"), *flags, "--async-envs", "--no-tensorboard"]
        run = subprocess.Popen([*command, "--run-dir", f"{folder}/run"])
        log, result = Path(folder, "run", "metrics.jsonl"), (0.0, 0.0)
        while run.poll() is None and not result[0]:
            time.sleep(2)
            lines, _ = runs.read_lines(log) if log.exists() else ([], 0)
            result = speed(lines, runners, options.seconds)
        run.terminate()
        run.wait()
    cluster.shutdown()
    result = {"nodes": nodes, "environments": runners * options.envs, "steps_per_second": result[0]}
    return result | {"model": model(options, nodes), "staleness": lines[-1]["runners/staleness"] if lines else None}


def write_summary(result: dict, out: Path) -> str:
    rows, first = [], result["sizes"][0]
    for x in result["sizes"]:
        linear = x["steps_per_second"] / first["steps_per_second"] * first["nodes"] / x["nodes"]
        cells = [x["nodes"], x["environments"], f"{x['steps_per_second']:,.0f}", f"{linear:.0%}", f"{x['model']:,.0f}"]
        rows.append([*cells, f"{x['steps_per_second'] / x['model']:.0%}", f"{x['staleness']:.1f}"])
    header = ["nodes", "environments", "steps/s", "of linear", "model, steps/s", "of the model", "staleness"]
    with plots.figure(out / "cluster.png") as axes:
        axis = axes[0, 0]
        nodes = [x["nodes"] for x in result["sizes"]]
        axis.plot(nodes, [x["steps_per_second"] for x in result["sizes"]], marker="o", label="measured")
        axis.plot(nodes, [x["model"] for x in result["sizes"]], linestyle="--", label="model")
        plots.describe_axis(axis, "impala_ray over sleeping environments", "nodes", "environment steps/s")
        axis.set_ylim(0)
        axis.legend()
    lines = ["# A simulated cluster", "", "![steps per second over nodes](cluster.png)", "", *table(header, rows), ""]
    text = "\n".join([*lines, f"Measured {describe(result['provenance'])}", ""])
    (out / "cluster.md").write_text(text)
    return text


def main(options: Options) -> None:
    check_positive(options, "runners", "envs", "seconds")
    make_folder(options.out)
    result = {"sizes": [measure(options, nodes) for nodes in options.nodes], "provenance": provenance()}
    write_json(options.out / "cluster.json", result)
    print(write_summary(result, options.out))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
