"""./run.sh sweep --ray-address: two nodes, one that dies, what comes back from them, what ends with the sweep.

The simulated cluster is the one of the tests of scripts over Ray (`cluster` in conftest.py).
"""

import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from benchmark_helpers import benchmark, benchmark_here, refusal
from helpers import is_alive, on_ray, wait_until

from benchmarks.common.programs import ROOT
from benchmarks.learning import cluster_runs, sweep
from benchmarks.learning.cluster_runs import Copy, Host, RemoteChild

SMALL = "--flags=--no-tensorboard --checkpoint-every 2000"
PPO = ("--scripts", "ppo", "--variants", "eager")


def entries(out: Path) -> list[dict]:
    """The journal, but for its settings."""
    return sweep.read_journal(out / "journal.jsonl")[1:]


def states(out: Path, seed: int) -> list[str]:
    return [line["state"] for line in entries(out) if line["run"].endswith(f"__{seed}")]


@pytest.fixture
def on_cluster(cluster, capfd):
    """Call ./run.sh sweep with flags on the simulated cluster, in this process."""
    return functools.partial(benchmark_here, capfd, "sweep", "--ray-address", cluster.address)


@on_ray
def test_runs_over_two_nodes_end_in_the_same_folder(on_cluster, tmp_path):
    ids = ("--env-ids", "CartPole-v1", "NoSuchEnv-v0")
    done = on_cluster(
        "--cpus-per-run", 2, *PPO, "--seeds", 1, "--total-timesteps", 4000, *ids, SMALL, "--out", tmp_path
    )
    assert done.returncode == 1
    assert "2 runs of 4,000 steps, each on 2 CPU, as many at a time as 2 nodes of the cluster have room" in done.stderr
    assert "NoSuchEnv-v0__ppo__eager__1, exit code 2; its last lines:\n    error: " in done.stdout
    assert "1 of 2 runs finished" in done.stdout and "| ppo | CartPole-v1 | eager | 1 |" in done.stdout
    started, ended = [[x for x in entries(tmp_path) if (x["state"] == "started") is y] for y in (True, False)]
    assert len({line["node"] for line in started}) == 2 and {line["state"] for line in ended} == {"finished", "failed"}
    assert all(line["peak_resident_mb"] > 50 and line["node"] for line in ended)
    run = tmp_path / "runs" / "CartPole-v1__ppo__eager__1"
    config = json.loads((run / "config.json").read_text())
    assert config["cores"] == min(2, len(os.sched_getaffinity(0))) and config["commit"]
    assert {path.name for path in run.iterdir()} == {"config.json", "metrics.jsonl", "checkpoint.pt"}

    before = {path: path.stat().st_mtime_ns for path in run.iterdir()}
    again = on_cluster("--resume", "--out", tmp_path)
    assert again.returncode == 1 and "; 1 of them finished before" in again.stderr
    assert before == {path: path.stat().st_mtime_ns for path in run.iterdir()}
    assert not list(Path(tempfile.gettempdir(), f"flatout-{os.getuid()}").glob("run-*/run"))


@pytest.mark.alone
def test_a_run_goes_on_from_its_checkpoint_when_its_node_dies(cluster, on_cluster, tmp_path):
    """Each node has room for one run; the second is removed, so its run waits for the first's end."""
    receive, gone, steps = RemoteChild.receive, [], 40_000

    def remove(self, news):
        receive(self, news)
        is_there = self.node["id"] == cluster.second.node_id
        if is_there and not gone and (self.copy.folder / "checkpoint.pt").exists():
            gone.append((self.copy.folder, sweep.last_step(self.copy.folder / "metrics.jsonl")))
            cluster.remove_node(cluster.second, allow_graceful=False)

    flags = ("--cpus-per-run", 2, *PPO, "--seeds", 1, 2, "--total-timesteps", steps, SMALL, "--out", tmp_path)
    try:
        with mock.patch.object(RemoteChild, "receive", remove):
            done = on_cluster(*flags)
    finally:
        if gone:
            cluster.second = cluster.add_node(num_cpus=2, object_store_memory=100_000_000)
            cluster.wait_for_nodes()  # until Ray has noticed: else the next test's actors may go to the dead one
    assert done.returncode == 0 and "2 of 2 runs finished" in done.stdout
    ((folder, step),) = gone
    lost, other = int(folder.name[-1]), 3 - int(folder.name[-1])
    assert states(tmp_path, lost) == ["started", "requeued", "started", "finished"] and 0 < step < steps
    assert states(tmp_path, other) == ["started", "finished"]
    first, requeued, second, _ = [line for line in entries(tmp_path) if line["run"] == folder.name]
    assert first["node"] == requeued["node"] != second["node"] and second["from"] == "checkpoint"
    assert requeued["why"] == "the node is gone" and f"requeued: {folder.name}, {first['node']}" in done.stderr
    (resumed,) = json.loads((folder / "config.json").read_text())["resumed"]
    assert 2000 <= resumed["global_step"] <= step and resumed["commit"]
    lines = [json.loads(line)["global_step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines == sorted(set(lines)) and lines[0] < 2000 and lines[-1] > 0.98 * steps
    assert (tmp_path / "output" / f"{folder.name}.txt").read_text().count("environments:") == 2


@on_ray
def test_a_run_that_loses_its_node_again_and_again_fails(on_cluster, tmp_path):
    begin = RemoteChild.begin

    def begin_and_die(self, node):
        begin(self, node)
        self.ray.kill(self.actor)

    with mock.patch.object(RemoteChild, "begin", begin_and_die):
        done = on_cluster(*PPO, "--seeds", 1, "--total-timesteps", 4000, SMALL, "--out", tmp_path)
    assert done.returncode == 1 and "lost its node 4 times, the last time " in done.stdout
    assert states(tmp_path, 1) == [*["started", "requeued"] * 3, "started", "failed"]


def processes_with(word: str) -> set[int]:
    """Those that have a word on their command line, and their parents: a run, and its actor."""
    listing = subprocess.run(
        ["ps", "-ww", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    ).stdout
    lines = [line.split(None, 2) for line in listing.splitlines()]
    return {int(x) for *ids, command in lines if word in command and "--run-dir run" in command for x in ids}


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@on_ray
def test_runs_end_with_the_sweep(cluster, on_cluster, tmp_path, signum):
    """Asked to end, with a checkpoint of that moment; killed with it, too, and run by --resume."""
    seed, steps = 10_000 + os.getpid() * 10 + int(signum), 60_000
    flags = ["--ray-address", cluster.address, *PPO, "--seeds", seed, "--total-timesteps", steps, SMALL]
    command = [sys.executable, "-m", "benchmarks", "sweep", *map(str, flags), "--out", str(tmp_path)]
    driver = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    folder = tmp_path / "runs" / f"CartPole-v1__ppo__eager__{seed}"
    while not sweep.last_step(folder / "metrics.jsonl"):
        assert driver.poll() is None
        time.sleep(0.05)
    started = processes_with(f"--seed {seed} ")
    assert len(started) == 2
    driver.send_signal(signum)
    _, error = driver.communicate(timeout=60)
    wait_until(lambda: not any(map(is_alive, started)), 20)
    if signum == signal.SIGKILL:
        done = on_cluster("--resume", "--out", tmp_path)
        assert done.returncode == 0 and states(tmp_path, seed) == ["started", "started", "finished"]
    else:
        assert driver.returncode == 130 and f"to go on: ./run.sh sweep --resume --out {tmp_path} " in error
        last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["global_step"]
        assert importlib.import_module("torch").load(folder / "checkpoint.pt")["global_step"] == last < steps


# What is refused


@on_ray
def test_what_no_node_has_is_refused(on_cluster, tmp_path):
    done = on_cluster(*PPO, "--cpus-per-run", 3, "--out", tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("error: a run is to have 3 CPU, and no node has so much")
    done = on_cluster(*PPO, "--gpus-per-run", 0.25, "--out", tmp_path)
    assert done.returncode == 2 and "1 CPU and 0.25 GPU" in done.stderr and "nodes with 2 CPU\n" in done.stderr
    assert not (tmp_path / "journal.jsonl").exists()


@on_ray
def test_a_node_with_other_versions_is_refused_by_name(on_cluster, tmp_path):
    here, own = os.getpid(), cluster_runs.versions()
    other = mock.patch.object(cluster_runs, "versions", lambda: own if os.getpid() == here else own | {"torch": "1.0"})
    with other:
        done = on_cluster(*PPO, "--out", tmp_path)
    (line,) = done.stderr.splitlines()
    assert (
        done.returncode == 2 and line.startswith("error: node ") and f"has torch 1.0, here it is {own['torch']}" in line
    )
    with other, mock.patch.object(cluster_runs.Cluster, "introductions", return_value=[]):  # one that comes later
        done = on_cluster(*PPO, "--seeds", 1, "--total-timesteps", 4000, SMALL, "--out", tmp_path)
    assert done.returncode == 1 and "has torch 1.0" in done.stdout and states(tmp_path, 1) == ["failed"]


@pytest.mark.alone
@pytest.mark.parametrize("address", ["127.0.0.1:1", "auto", "nowhere"])
def test_an_address_without_a_cluster_is_refused_soon(address, tmp_path):
    pytest.importorskip("ray")
    start, environment = time.monotonic(), os.environ | {"RAY_ADDRESS": "127.0.0.1:1"}
    done = benchmark("sweep", *PPO, "--ray-address", address, "--out", tmp_path, env=environment)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and time.monotonic() - start < 20
    assert f"error: can't use the Ray cluster --ray-address {address}: " in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cpus_per_run": 1.0}, "name one by --ray-address"),
        ({"gpus_per_run": 0.5}, "name one by --ray-address"),
        ({"cpus_per_run": 0.0, "ray_address": "auto"}, "--cpus-per-run must be more than 0"),
        ({"gpus_per_run": 1.5, "ray_address": "auto"}, "a whole number"),
        ({"jobs": 2, "ray_address": "auto"}, "--jobs is for one machine"),
    ],
)
def test_flags_that_do_not_go_together(options, message, tmp_path, capsys):
    assert message in refusal(sweep.check, sweep.Options(**{"out": tmp_path, **options}), capsys)


def test_ray_is_neither_imported_nor_needed_without_the_flag(capsys):
    code = "import sys; from benchmarks.learning import sweep; sweep.where(sweep.Options(), 1); "
    code += "print('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout == "False\n"
    with mock.patch.object(importlib.util, "find_spec", return_value=None):
        start = partial(sweep.where, num_jobs=1)
        assert "requirements-ray.txt" in refusal(start, sweep.Options(ray_address="auto"), capsys)


# What a node sends, without a node


@pytest.fixture
def host(tmp_path, monkeypatch):
    """An actor in this process whose run has not ended, and does not begin."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "node"))
    (tmp_path / "node").mkdir()
    host = Host(1)
    host.child = mock.Mock(poll=lambda: host.code, seconds=1.0, resources=dict)
    host.code = None
    host.run.mkdir()
    (host.folder / "output.txt").touch()
    return host


@pytest.fixture
def copy(tmp_path):
    (tmp_path / "output").touch()
    copy = Copy(tmp_path / "here", tmp_path / "output", "c0ffee")
    copy.clear()
    return copy


def replace(path: Path, content: bytes) -> None:
    path.with_suffix(".tmp").write_bytes(content)
    path.with_suffix(".tmp").replace(path)


def test_files_come_whole_or_not_at_all_and_logs_before_checkpoints(host, copy, monkeypatch):
    monkeypatch.setattr(cluster_runs, "CHUNK", 20)

    def step() -> dict:
        news = host.report(copy.have)
        for part in news["parts"]:
            copy.take(part)
        return news

    log, checkpoint = copy.folder / "metrics.jsonl", copy.folder / "checkpoint.pt"
    (host.run / "metrics.jsonl").write_text("1\n")
    (host.run / "config.json").write_text('{"commit": null}')
    replace(host.run / "checkpoint.pt", b"a" * 45)
    assert step()["parts"][0].name == "metrics.jsonl"
    assert log.read_text() == "1\n" and not checkpoint.exists()
    replace(host.run / "checkpoint.pt", b"b" * 30)  # while the first one is on its way
    with (host.run / "metrics.jsonl").open("a") as file:
        file.write("2\n")
    host.code = 0
    seen = []
    while (news := step())["code"] is None:
        seen.append(checkpoint.read_bytes() if checkpoint.exists() else b"")
        assert host.report(copy.have) == host.report(copy.have), "an answer that was lost can be had again"
    assert news["seconds"] == 1.0
    assert set(seen) == {b"", b"a" * 45} and checkpoint.read_bytes() == b"b" * 30
    assert log.read_text() == "1\n2\n" and json.loads((copy.folder / "config.json").read_text()) == {"commit": "c0ffee"}
    replace(host.run / "metrics.jsonl", b"1\n")  # cut back, as by --resume
    step()
    assert log.read_text() == "1\n"
    assert {path.name for path in copy.folder.iterdir()} == {"metrics.jsonl", "checkpoint.pt", "config.json"}


def test_the_output_of_a_second_node_comes_behind_that_of_the_first(host, copy):
    for text in ("first\n", "second\n"):
        copy.leave()
        (host.folder / "output.txt").write_text(text)
        for part in host.report(copy.have)["parts"]:
            copy.take(part)
    assert copy.output.read_text() == "first\nsecond\n"


def test_what_dead_processes_have_left_on_a_node_is_removed(host):
    base = host.folder.parent
    host.lock.close()  # as when its process is killed
    other, _held = cluster_runs.take_folder(base)
    assert not host.folder.exists() and {path.stem for path in base.glob("run-*")} == {other.name}
    cluster_runs.take_folder(base)
    assert other.exists()


def test_runs_on_a_node_have_the_cores_that_the_fewest_others_have(tmp_path):
    cores = len(os.sched_getaffinity(0))
    all_taken = [cluster_runs.take_cores(tmp_path, 1) for _ in range(2 * cores)]
    assert [len({next(iter(x)) for x, _ in half}) for half in (all_taken[:cores], all_taken[cores:])] == [cores] * 2
    freed, locks = all_taken[1]
    for held in locks:
        held.close()
    assert cluster_runs.take_cores(tmp_path, 1)[0] == freed
    assert len(cluster_runs.take_cores(tmp_path, 99)[0]) == cores
