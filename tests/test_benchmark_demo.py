"""./run.sh demo with toy budgets."""

import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from benchmark_helpers import ROOT, benchmark, benchmark_here

from benchmarks.common import programs, runs
from benchmarks.tools import demo

SMALL = ("--num-steps", "64", "--num-minibatches", "4", "--no-compile", "--no-tensorboard", "--env-id", "Pendulum-v1")


@pytest.mark.slow
def test_demo_ends_with_curve_and_summary(tmp_path):
    done = benchmark("demo", "--total-timesteps", 1024, "--run-dir", tmp_path / "run", *SMALL)
    assert done.returncode == 0, done.stderr
    for name in ("metrics.jsonl", "checkpoint.pt", "learning_curve.png"):
        assert str(tmp_path / "run" / name) in done.stdout
        assert (tmp_path / "run" / name).stat().st_size > 0
    assert "mean of the last 5 episodes" in done.stdout and "steps/s" in done.stdout


@pytest.mark.slow
def test_demo_stopped_says_how_to_go_on_and_goes_on(tmp_path, capfd):
    folder = tmp_path / "run"
    program = [sys.executable, "-m", "benchmarks", "demo", "--total-timesteps", "100_000"]
    command = [*program, f"--run_dir={folder}", *SMALL]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    while runs.read_run(folder).steps < 1000 and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    assert f"./run.sh demo --resume {folder}" in output
    assert (folder / "checkpoint.pt").exists() and (folder / "learning_curve.png").exists()
    bad = benchmark_here(capfd, "demo", "--resume", folder, "--gamma", "0.5")
    assert bad.returncode == 2 and "error: --gamma" in bad.stderr


@pytest.mark.slow
def test_demo_hands_on_help(capfd):
    shown = benchmark_here(capfd, "demo", "--help")
    assert shown.returncode == 0 and "--num-minibatches" in shown.stdout
    assert shown.stdout.startswith("Train PPO on HalfCheetah for one to eight minutes")
    assert "Proximal Policy Optimization (PPO) for continuous actions" in shown.stdout
    assert "    python ppo_continuous_action_torchcompile.py --env-id" in shown.stdout


@pytest.mark.parametrize("flags", [["--run-dir", "a"], ["--run_dir=a"], ["--run-dir", "b", "--run-dir=a"]])
def test_flag_value(flags):
    assert demo.flag_value(flags, "run-dir") == "a"
    assert demo.flag_value(["--seed", "1"], "run-dir") is None


def test_a_path_with_a_space_is_something_that_compiled_code_lacks(monkeypatch):
    place = SimpleNamespace(submodule_search_locations=["/my projects/torch"])
    assert programs.missing_for_compile() is None
    monkeypatch.setattr(programs.importlib.util, "find_spec", lambda _: place)
    assert "/my projects/torch" in programs.missing_for_compile()


def test_without_a_compiler(monkeypatch, capsys):
    monkeypatch.setattr(demo, "missing_for_compile", lambda: "a C++ compiler")
    assert demo.compile_flags([]) == (["--total-timesteps", demo.UNCOMPILED_STEPS], ["--no-compile"])
    printed = capsys.readouterr().out
    assert "lacks a C++ compiler" in printed and printed.count("\n") == 1
    assert demo.compile_flags(["--no-compile"]) == ([], [])
