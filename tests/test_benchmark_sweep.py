"""./run.sh sweep: journal, resume after SIGKILL, failures, time limit, pinning."""

import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from benchmark_helpers import benchmark, benchmark_here, make_line, make_run, refusal

from benchmarks.common import programs
from benchmarks.common.programs import ROOT, check_environment, check_settings, cores
from benchmarks.learning import sweep

SMALL = "--flags=--num-steps=32 --num-minibatches=2 --update-epochs=1 --no-tensorboard"
PPO = ("--scripts", "ppo", "--variants", "eager")


def states(out: Path) -> list[tuple[str, str]]:
    """(seed, state) of each entry of the journal, in order."""
    return [(line["run"][-1], line["state"]) for line in sweep.read_journal(out / "journal.jsonl")[1:]]


@pytest.mark.slow
def test_sweep_from_end_to_end(tmp_path, capsys):
    flags = [*PPO, "--seeds", 1, 2, "--total-timesteps", 2000, "--jobs", 2, SMALL, "--out", tmp_path]
    done = benchmark("sweep", *flags)
    assert done.returncode == 0, done.stderr
    assert "2 of 2 runs finished" in done.stdout and "| ppo | CartPole-v1 | eager | 2 |" in done.stdout
    assert done.stderr.startswith("1 script x 1 variant x 2 seeds = 2 runs of 2,000 steps, 2 at a time\n")
    assert {path.name for path in (tmp_path / "report").iterdir()} == {
        "report.md", "report.json", "learning_curves.png", "curves.json.gz",
    }  # fmt: skip
    assert sorted(states(tmp_path)) == sorted((s, x) for s in "12" for x in ("started", "finished"))

    again = benchmark_here(capsys, "sweep", *flags)
    assert again.returncode == 2 and "--resume goes on with it" in again.stderr
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("metrics.jsonl")}
    resumed = benchmark_here(capsys, "sweep", "--resume", "--out", tmp_path)  # what it was to do lies in its journal
    assert resumed.returncode == 0 and len(states(tmp_path)) == 4
    assert "1 script x 1 variant x 2 seeds = 2 runs of 2,000 steps, 1 at a time; 2 of them finished" in resumed.stderr
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("metrics.jsonl")}
    other = benchmark_here(capsys, "sweep", *PPO, "--total-timesteps", 99, "--resume", "--out", tmp_path)
    assert other.returncode == 2 and other.stderr.count("\n") == 1
    assert "--total-timesteps: a resumed sweep keeps its settings, 2000; leave" in other.stderr


@pytest.mark.slow
def test_after_sigkill_finished_runs_are_not_run_again(tmp_path, capsys):
    flags = [*PPO, "--seeds", "1", "2", "--total-timesteps", "8000", SMALL, "--out", str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks", "sweep", *flags], cwd=ROOT, stderr=subprocess.DEVNULL
    )
    log = tmp_path / "runs" / "CartPole-v1__ppo__eager__2" / "metrics.jsonl"
    while sweep.last_step(log) == 0:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert states(tmp_path) == [("1", "started"), ("1", "finished"), ("2", "started")]
    time.sleep(0.5)
    size = log.stat().st_size
    time.sleep(0.5)
    assert log.stat().st_size == size, "the run has outlived the sweep"
    with (tmp_path / "journal.jsonl").open("a") as file:
        file.write('{"run": "CartPole-v1__ppo__eager__2", "sta')  # as if cut off in the middle of a line

    done = benchmark_here(capsys, "sweep", "--resume", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert states(tmp_path)[3:] == [("2", "started"), ("2", "finished")]
    assert sweep.last_step(log) > 7000 and "2 of 2 runs finished" in done.stdout


@pytest.mark.slow
def test_failed_runs_are_shown_and_run_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))  # of the runs, which shall find tiny_envs
    flags = ["--scripts", "ppo", "--seeds", 1, "--total-timesteps", 2000, "--out", tmp_path, "--jobs", 2, SMALL]
    ids = ["--env-ids", "CartPole-v1", "tiny_envs:Reach-v0"]
    done = benchmark_here(capsys, "sweep", *flags, "--variants", "eager", *ids)
    assert done.returncode == 1
    error = r"error: tiny_envs:Reach-v0 has actions Box.*"
    assert re.search(rf"Reach-v0__ppo__eager__1, exit code 2; its last lines:\n(    .*\n)*    {error}", done.stdout)
    assert "1 of 2 runs finished" in done.stdout
    page = (tmp_path / "report" / "report.md").read_text()
    assert re.search(rf"- ppo, tiny_envs:Reach-v0, eager, seed 1: exit code 2; {error}\n", page)
    again = benchmark_here(capsys, "sweep", "--resume", "--out", tmp_path)
    assert (tmp_path / "report" / "report.md").read_text().count("seed 1: exit code 2") == 1
    assert again.returncode == 1 and "1 of 2 runs finished" in again.stdout
    assert [state for _, state in states(tmp_path)][-2:] == ["started", "failed"]


def test_a_failed_run_does_not_count_though_it_came_near_its_end(tmp_path, monkeypatch):
    """As one that crashes, or is overdue, at 99.2 % of its steps."""

    def run_all(jobs, _place, options, journal) -> None:
        for seed, (job, state) in enumerate(zip(jobs, ("finished", "failed"), strict=True), 1):
            make_run(options.out / "runs" / job.name, [make_line(1984, 1.0)], seed=seed, total=2000)
            journal.note(job.name, state, why="killed by signal 9")
            (options.out / "output" / f"{job.name}.txt").write_text("Traceback:\nMemoryError\nnothing is saved\n")

    monkeypatch.setattr(sweep, "run_all", run_all)
    settings = {"scripts": ("ppo",), "seeds": (1, 2), "total_timesteps": 2000, "variants": ("eager",), "out": tmp_path}
    assert sweep.main(sweep.Options(**settings)) == 1
    assert (
        "\n- ppo, CartPole-v1, eager, seed 2: killed by signal 9; MemoryError\n"
        in (tmp_path / "report" / "report.md").read_text()
    )
    (row,) = json.loads((tmp_path / "report" / "report.json").read_text())["rows"]
    assert row["seeds"] == [1] and [x["why"] for x in row["left_out"]] == ["it failed"]


def test_a_sweep_of_which_all_runs_failed_has_a_report_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "run_all", lambda jobs, *rest: [rest[-1].note(job.name, "failed") for job in jobs])
    settings = {"scripts": ("ppo",), "seeds": (1, 2), "variants": ("eager",), "out": tmp_path}
    assert sweep.main(sweep.Options(**settings)) == 1
    lines = (tmp_path / "report" / "report.md").read_text().splitlines()
    own = [f"- ppo, CartPole-v1, eager, seed {seed}: failed; no output" for seed in (1, 2)]
    assert lines == ["# Report", "", "No run has finished.", "", "## Failed runs", "", *own]


@pytest.mark.slow
def test_time_limit_and_ctrl_c(tmp_path, capsys):
    flags = [*PPO, "--seeds", "1", "--total-timesteps", "10000000", SMALL]
    done = benchmark_here(capsys, "sweep", *flags, "--timeout", 1, "--out", tmp_path / "limit")
    assert done.returncode == 1 and "its time limit" in done.stdout + done.stderr
    out = tmp_path / "stopped"
    command = [sys.executable, "-m", "benchmarks", "sweep", *flags, "--out", str(out)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    while not any(map(sweep.last_step, (out / "runs").glob("*/metrics.jsonl"))):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, output = process.communicate(timeout=240)
    assert process.returncode == 130 and f"to go on: ./run.sh sweep --resume --out {out}" in output
    assert list((out / "runs").glob("*/checkpoint.pt"))


def test_a_sweep_that_runs_is_left_alone(tmp_path, capsys):
    running = sweep.Journal(tmp_path / "journal.jsonl", {}, resume=False)
    resume = partial(sweep.Journal, tmp_path / "journal.jsonl", {})
    assert "another sweep is running" in refusal(lambda again: resume(resume=again), True, capsys)
    running.file.close()
    assert resume(resume=True).states == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scripts": ("sarsa",)}, "no script sarsa"),
        ({"jobs": 0}, "--jobs"),
        ({"resume": True}, "there is no sweep in"),
        ({"out": Path("/dev/null/x")}, "can't write"),
        ({"seeds": ()}, "--seeds: name at least one"),
        ({"seeds": (-1,)}, "do not lie in 0 to"),
    ],
)
def test_bad_input(options, message, tmp_path, capsys):
    assert message in refusal(sweep.check, sweep.Options(**{"out": tmp_path, **options}), capsys)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"flags": "--bogus 1"}, "ppo: Unrecognized options: --bogus, 1\n"),
        ({"flags": "--gama 0.9"}, "ppo: Unrecognized options: --gama, 0.9; did you mean --gamma?\n"),
        ({"flags": "--gamma x"}, "ppo: Error parsing --gamma: could not convert string to float: 'x'"),
        ({"flags": "--capture-video"}, "ppo: flags of CleanRL's: --capture-video, here ./run.sh evaluate"),
        ({"flags": "--gamma 2"}, "ppo: --gamma must be at least 0 and at most 1, not 2.0"),
        ({"env_ids": ("CartPole-v1", "HalfCheetah-v4")}, "ppo takes Discrete actions, HalfCheetah-v4 has Box("),
        ({"env_ids": ("FrozenLake-v1", "Pendulum-v1")}, "ppo takes Discrete actions, Pendulum-v1 has Box("),
        ({"env_ids": ("NoEnv-v0",)}, "no environment NoEnv-v0: "),
        ({"env_ids": ("no_module:Env-v0",)}, "no environment no_module:Env-v0: "),
    ],
)
def test_runs_that_would_fail_are_refused_before_any_is_started(options, message, tmp_path, capsys):
    ppo = {"scripts": ("ppo",), "variants": ("eager",), "seeds": (1, 2), "out": tmp_path}
    assert message in refusal(sweep.main, sweep.Options(**ppo | options), capsys)
    assert not (tmp_path / "journal.jsonl").exists()


def test_flags_of_cleanrl_are_understood():
    argv = sys.argv
    check_settings([*programs.command("dqn", "eager"), "--no-cuda"])
    assert sys.argv is argv


@pytest.mark.parametrize(
    ("script", "flags", "message"),
    [
        (
            "sac_continuous_action",
            ["--env-id=Pong-v5"],
            "continuous_action takes Box actions, Pong-v5 has Discrete(6)",
        ),
        ("ppo_atari_envpool", ["--env-id=HalfCheetah-v4"], "ppo_atari_envpool takes Discrete actions, HalfCheetah-v4"),
        ("dqn", ["--env-id=Pendulum-v1", "--env-backend=gymnasium"], "dqn takes Discrete actions, Pendulum-v1 has Box"),
        ("sac_continuous_action", ["--env-id=LunarLander-v3", "--env-kwargs={}"], "LunarLander-v3 has Discrete(4)"),
        ("sac_continuous_action", ["--env-id=MountainCarContinuous-v0"], None),
        ("ppo_env_pool", ["--env-id=Pendulum-v1"], None),
        ("dqn", ["--env-id=tiny_envs:Reach-v0"], None),  # is left to the run
    ],
)
def test_an_environment_whose_actions_a_pair_can_not_learn(script, flags, message, capsys):
    line = [*programs.command(script, "eager"), *flags]
    if message:
        assert message in refusal(check_settings, line, capsys)
    else:
        check_settings(line)


def test_environments_of_either_library_and_of_a_module_are_known(capsys):
    for env_id in ("CartPole-v1", "HalfCheetah-v4", "Pong-v5", "tiny_envs:Reach-v0"):
        check_environment(env_id)
    assert "no environment tiny_envs:NoEnv-v0: " in refusal(check_environment, "tiny_envs:NoEnv-v0", capsys)


def test_a_resumed_sweep_keeps_what_its_runs_reserve(tmp_path, capsys):
    """On a cluster; one that was begun on a single machine takes what it is given then."""
    own = {"scripts": ("ppo",), "out": tmp_path}
    begun = sweep.Options(**own, ray_address="auto", cpus_per_run=4.0, gpus_per_run=0.25)
    settings, journal = sweep.settings_of(begun), tmp_path / "journal.jsonl"
    journal.write_text(json.dumps({"settings": settings}) + "\n")
    again = sweep.Options(out=tmp_path, ray_address="auto", resume=True, timeout=60.0)
    assert (sweep.settled(again).cpus_per_run, sweep.settled(again).gpus_per_run) == (4, 0.25)
    assert "keeps its settings, 4.0" in refusal(sweep.settled, replace(again, cpus_per_run=2.0), capsys)
    assert sweep.to_go_on(again) == f"./run.sh sweep --resume --out {tmp_path} --timeout 60 --ray-address auto"
    assert sweep.to_go_on(begun).endswith("--ray-address auto --cpus-per-run 4 --gpus-per-run 0.25")
    for lacks in ({"cpus_per_run": None, "gpus_per_run": None}, None):
        old = settings | lacks if lacks else {name: x for name, x in settings.items() if "_per_run" not in name}
        journal.write_text(json.dumps({"settings": old}) + "\n")
        assert sweep.settled(again).cpus_per_run is None
        assert sweep.settled(replace(again, cpus_per_run=2.0)).cpus_per_run == 2


def test_runs_are_in_the_folder_of_the_caller(tmp_path, monkeypatch):
    """Where an environment may find its files."""
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-c", "import os; print(os.getcwd())"]
    child = sweep.Here(1).start(command, tmp_path / "run", tmp_path / "output", 0, lambda _: None)
    assert child.wait(30) == 0 and (tmp_path / "output").read_text() == f"{tmp_path}\n"


def test_pairs_that_need_ray_are_named_where_there_is_none(monkeypatch, capsys):
    assert "a3c_ray" in programs.pairs()
    monkeypatch.setattr(programs.importlib.util, "find_spec", lambda _: None)
    programs.say_left_out()
    line = capsys.readouterr().err
    assert line.startswith("left out, as Ray is not installed: a3c_ray, apex_dqn_ray, impala_ray, ppo_ray: ")
    assert "-m pip install -c" in line
    assert "ppo_ray" not in programs.pairs_here()


def test_plan_has_every_combination_once():
    options = sweep.Options(scripts=("ppo", "dqn"), variants=("eager", "lean"), seeds=(1, 2), env_ids=("A-v0", "m:B/C"))
    names = [job.name for job in sweep.plan(options)]
    assert len(names) == len(set(names)) == 16
    assert "m_B_C__dqn__lean__2" in names and all(name.endswith("__1") for name in names[:8])


@pytest.mark.skipif(len(cores()) < 2, reason="needs two cores")
def test_jobs_share_the_cores():
    own = cores()
    assert sweep.share_of_cores(0, 1) is None
    first, second = sweep.share_of_cores(0, 2), sweep.share_of_cores(1, 2)
    assert first | second == own and not first & second
    assert all(len(sweep.share_of_cores(i, 2 * len(own))) == 1 for i in range(2 * len(own)))


def test_last_step(tmp_path):
    folder = make_run(tmp_path / "a", [make_line(100, 1.0, 1), make_line(200, 1.0, 1), '{"global_step": 30'])
    assert sweep.last_step(folder / "metrics.jsonl") == 200
    assert sweep.last_step(tmp_path / "none") == 0
    (tmp_path / "long").write_text("".join(json.dumps(make_line(i, 1.0, 1)) + "\n" for i in range(1, 500)))
    assert sweep.last_step(tmp_path / "long") == 499


def test_a_sweep_does_not_replace_runs_that_it_has_not_made(tmp_path, capsys):
    """As after its journal was removed: there may be a user's own files beside them."""
    options = sweep.Options(seeds=(1,), out=tmp_path)  # of all scripts and variants
    job = next(job for job in sweep.plan(replace(options, scripts=("ppo",), variants=("eager",))))
    kept = tmp_path / "runs" / job.name / "my_notes.txt"
    kept.parent.mkdir(parents=True)
    kept.write_text("mine")
    assert "is there already" in refusal(sweep.main, options, capsys)
    assert kept.read_text() == "mine" and not (tmp_path / "journal.jsonl").exists()
