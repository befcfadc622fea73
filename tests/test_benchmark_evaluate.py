"""./run.sh evaluate on tiny runs of every script, and on bad input."""

import importlib.util
import json
import re
import shutil
from pathlib import Path

import helpers
import pytest
import tyro
from benchmark_helpers import benchmark, make_line, make_run, refusal, toy_flags

from benchmarks.common.programs import SCRIPTS, load_script
from benchmarks.tools import evaluate


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run of PPO on CartPole, in four environments."""
    folder = tmp_path_factory.mktemp("evaluate") / "run"
    module = load_script(SCRIPTS / "ppo.py")
    module.train(tyro.cli(module.Args, args=[*toy_flags("ppo"), f"--run-dir={folder}"]))
    return folder


@pytest.fixture
def refused(capsys):
    """A function that evaluates a folder in vain, and returns why."""
    return lambda run_dir, **options: refusal(evaluate.evaluate, evaluate.Options(run_dir, **options), capsys)


def test_plays_whole_episodes_and_prints_mean_and_deviation(run_dir):
    done = benchmark("evaluate", run_dir, "--episodes", 3)
    assert done.returncode == 0, done.stderr
    assert re.match(
        r"CartPole-v1: return [\d.]+ ± [\d.]+ \(.* 3 episodes, deterministic policy, .* step \d+\)", done.stdout
    )


def test_is_repeatable_and_follows_its_seed(run_dir):
    first, second, other = (evaluate.evaluate(evaluate.Options(run_dir, episodes=8, seed=seed)) for seed in (0, 0, 1))
    assert first == second != other
    assert all(1 <= x <= 500 for x in first)


@pytest.mark.parametrize("script", helpers.EAGER)
def test_every_script(script, small_run, capsys):
    assert len(evaluate.evaluate(evaluate.Options(small_run(script).run_dir, episodes=2))) == 2
    assert "± " in capsys.readouterr().out


def test_a_copied_script(run_dir, tmp_path, refused):
    copy = tmp_path / "copy" / "ppo.py"
    copy.parent.mkdir()
    shutil.copy(SCRIPTS / "ppo.py", copy)
    moved = tmp_path / "moved"
    shutil.copytree(run_dir, moved)
    config = json.loads((moved / "config.json").read_text()) | {"script": "renamed.py"}
    (moved / "config.json").write_text(json.dumps(config))
    assert "renamed.py" in refused(moved)
    assert len(evaluate.evaluate(evaluate.Options(moved, episodes=1, script=copy))) == 1


def test_bad_folders(run_dir, tmp_path, refused):
    assert "no folder" in refused(tmp_path / "missing")
    assert "no config.json" in refused(tmp_path)
    without = make_run(tmp_path / "crashed", [make_line(100, 1.0, 1)])
    assert "no checkpoint.pt" in refused(without)
    (without / "checkpoint.pt").write_bytes((run_dir / "checkpoint.pt").read_bytes()[:1000])
    assert "can't be read" in refused(without)
    (without / "config.json").write_text("{")
    assert "config.json can't be read" in refused(without)


def test_a_checkpoint_that_does_not_fit(run_dir, tmp_path, refused):
    other = make_run(tmp_path / "other", [make_line(100, 1.0, 1)], args={"env_id": "Acrobot-v1", "num_envs": 1})
    config = json.loads((run_dir / "config.json").read_text())
    config["args"]["env_id"] = "Acrobot-v1"
    (other / "config.json").write_text(json.dumps(config))
    shutil.copy(run_dir / "checkpoint.pt", other)
    assert "does not fit" in refused(other)


def test_bad_flags(run_dir, refused, tmp_path):
    assert "--episodes" in refused(run_dir, episodes=0)
    assert "no script" in refused(run_dir, script=Path("nowhere.py"))
    done = benchmark("evaluate", tmp_path / "missing")
    assert done.returncode == 2 and done.stderr == f"error: there is no folder {tmp_path / 'missing'}\n"


@pytest.mark.skipif(importlib.util.find_spec("moviepy") is not None, reason="moviepy is installed")
def test_video_without_moviepy(run_dir, tmp_path, refused):
    assert "moviepy" in refused(run_dir, video=tmp_path / "a.mp4")


def test_video_of_an_environment_of_envpool(tmp_path, monkeypatch, capsys):
    module = load_script(SCRIPTS / "ppo.py")
    monkeypatch.setattr(evaluate.importlib.util, "find_spec", lambda _: True)
    with pytest.raises(SystemExit):
        evaluate.check_video(module, "Pong-v5", tmp_path / "a.mp4")
    assert "EnvPool only" in capsys.readouterr().err
