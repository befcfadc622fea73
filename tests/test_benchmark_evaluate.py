"""./run.sh evaluate on tiny runs of every script, and on bad input."""

import dataclasses
import itertools
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import helpers
import numpy as np
import pytest
import torch
import tyro
from benchmark_helpers import ROOT, benchmark, benchmark_here, make_line, make_run, refusal, toy_flags

from benchmarks.common.programs import SCRIPTS, load_script
from benchmarks.tools import evaluate, follow


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run of PPO on CartPole, in four environments."""
    folder = tmp_path_factory.mktemp("evaluate") / "run"
    module = load_script(SCRIPTS / "ppo.py")
    module.train(tyro.cli(module.Args, args=[*toy_flags("ppo"), f"--run-dir={folder}"]))
    return folder


def test_an_episode_whose_worker_died_does_not_count(monkeypatch):
    """Its return is unknown, and must not be added to that of the episode after it."""
    rows = [(1.0, False, False), (2.0, False, False), (0.0, False, True), (4.0, False, False), (8.0, True, False)]

    class Fake:
        def __init__(self):
            self.rows, self.lost = iter(rows), [False]

        def reset(self):
            return np.zeros((1, 3))

        def step(self, _action):
            reward, terminated, self.lost[0] = next(self.rows)
            return np.zeros((1, 3)), np.array([reward]), np.array([terminated]), np.array([False])

        def close(self):
            pass

    monkeypatch.setattr(evaluate.play, "make_envs", lambda *_: Fake())
    module = SimpleNamespace(load_policy=lambda _checkpoint, _envs: lambda obs: obs)
    assert evaluate.play.play(module, SimpleNamespace(seed=1), {}, episodes=1, seed=1) == [12.0]


@pytest.fixture
def refused(capsys):
    """A function that evaluates a folder in vain, and returns why."""
    return lambda run_dir, **options: refusal(evaluate.main, evaluate.Options(run_dir, **options), capsys)


def test_plays_whole_episodes_and_prints_mean_and_deviation(run_dir):
    done = benchmark("evaluate", run_dir, "--episodes", 3)
    assert done.returncode == 0, done.stderr
    assert re.match(
        r"CartPole-v1: return [\d.]+ ± [\d.]+ \(.* 3 episodes, deterministic policy, .* step \d+\)", done.stdout
    )


def test_one_episode_has_no_deviation(run_dir, tmp_path, capsys, monkeypatch):
    """Neither in what is printed nor in the legend of the curve."""
    evaluate.evaluate(evaluate.Options(run_dir, episodes=1))
    assert re.match(r"CartPole-v1: return [\d.]+ \(1 episode, deterministic policy, ", capsys.readouterr().out)
    names, draw = [], follow.plots.draw_curve
    monkeypatch.setattr(follow.plots, "draw_curve", lambda *words: names.append(words[4]) or draw(*words))
    for episodes in (1, 2):
        line = {"global_step": 1, "mean_return": 1.0, "std_return": 0.0, "episodes": episodes}
        follow.draw([line], "", tmp_path / "evaluation.png")
    assert names == [f"deterministic policy, {x}" for x in ("1 episode", "mean ± standard deviation of 2 episodes")]


def test_is_repeatable_and_follows_its_seed(run_dir):
    first, second, other = (evaluate.evaluate(evaluate.Options(run_dir, episodes=8, seed=seed)) for seed in (0, 0, 1))
    assert first == second != other
    assert all(1 <= x <= 500 for x in first)


@pytest.mark.parametrize("name", ["impala_ray", "ppo_ray", "a3c_ray", "apex_dqn_ray"])
def test_a_run_is_played_in_the_environment_of_the_library_that_it_was_trained_on(name, tmp_path):
    """EnvPool's Blackjack has three numbers as its observation, Gymnasium's, one-hot, has 45."""
    settings = {"num_runners": 0, "envs_per_runner": 4, "env_id": "Blackjack-v1", "total_timesteps": 500}
    run = helpers.train(name, tmp_path / "run", **helpers.small_settings(name) | settings)
    assert json.loads((run.run_dir / "config.json").read_text())["env_backend"] == "envpool"
    assert len(evaluate.evaluate(evaluate.Options(run.run_dir, episodes=2))) == 2


@pytest.mark.parametrize("script", helpers.EAGER)
def test_every_script(script, small_run, capsys):
    assert len(evaluate.evaluate(evaluate.Options(small_run(script).run_dir, episodes=2))) == 2
    assert "± " in capsys.readouterr().out


@pytest.mark.parametrize("twin", [twin.stem for _, twin in helpers.PAIRS])
def test_every_twin_plays_what_its_eager_script_would(twin, tmp_path):
    """By the same weights; SAC's and TD3's are kept in another form, but not the policy's."""
    name = helpers.pair_of(twin)
    small = {} if name in helpers.EAGER else helpers.small_settings(name)
    run = helpers.train(twin, tmp_path / "run", **small, compile=False)
    scripts = None, SCRIPTS / f"{name}.py"
    returns = [evaluate.evaluate(evaluate.Options(run.run_dir, episodes=2, script=script)) for script in scripts]
    assert returns[0] == returns[1] and len(returns[0]) == 2


def test_a_copied_script(run_dir, tmp_path, refused, capsys):
    copy = tmp_path / "copy" / "ppo.py"
    copy.parent.mkdir()
    shutil.copy(SCRIPTS / "ppo.py", copy)
    moved = tmp_path / "moved"
    shutil.copytree(run_dir, moved)
    config = json.loads((moved / "config.json").read_text()) | {"script": "renamed.py"}
    (moved / "config.json").write_text(json.dumps(config))
    assert "renamed.py" in refused(moved)
    capsys.readouterr()
    assert len(evaluate.evaluate(evaluate.Options(moved, episodes=1, script=copy))) == 1
    assert "is not the file" not in capsys.readouterr().err
    copy.write_text(copy.read_text() + "\n# changed since\n")
    evaluate.evaluate(evaluate.Options(moved, episodes=1, script=copy))
    assert "ppo.py is not the file that trained this run, or has changed" in capsys.readouterr().err


def test_bad_folders(run_dir, tmp_path, refused):
    assert "no folder" in refused(tmp_path / "missing")
    assert "no config.json" in refused(tmp_path)
    without = make_run(tmp_path / "crashed", [make_line(100, 1.0, 1)])
    assert "no checkpoint.pt" in refused(without)
    (without / "checkpoint.pt").write_bytes((run_dir / "checkpoint.pt").read_bytes()[:1000])
    assert "can't be read" in refused(without)
    torch.save({"model": {}}, without / "checkpoint.pt")
    assert "is not the checkpoint of a run" in refused(without)
    torch.save({"model": 3, "global_step": 1, "seconds": 1.0, "args": {}}, without / "checkpoint.pt")
    assert "the checkpoint does not fit ppo.py" in refused(without)
    (without / "config.json").write_text("{")
    assert "config.json can't be read" in refused(without)


def test_a_checkpoint_that_does_not_fit(run_dir, tmp_path, refused):
    other = make_run(tmp_path / "other", [make_line(100, 1.0, 1)], args={"env_id": "Acrobot-v1", "num_envs": 1})
    config = json.loads((run_dir / "config.json").read_text())
    config["args"]["env_id"] = "Acrobot-v1"
    (other / "config.json").write_text(json.dumps(config))
    shutil.copy(run_dir / "checkpoint.pt", other)
    assert "does not fit" in refused(other)


@pytest.mark.parametrize(("other", "why"), [("dqn", "it has no 'network'"), ("ppo_continuous_action", "")])
def test_a_script_of_another_run(other, why, run_dir, capsys):
    done = benchmark_here(capsys, "evaluate", run_dir, "--script", SCRIPTS / f"{other}.py")
    note, line = done.stderr.splitlines()
    assert done.returncode == 2 and "is not the file that trained this run" in note
    assert f"error: this is a run of ppo.py: its checkpoint does not fit {other}.py: {why}" in line


def test_a_script_in_the_folder_of_the_caller(run_dir, tmp_path, monkeypatch, refused):
    moved = tmp_path / "moved"
    shutil.copytree(run_dir, moved)
    config = json.loads((moved / "config.json").read_text()) | {"script": "my_own_ppo.py"}
    (moved / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    assert "there is no my_own_ppo.py, whose run this is, in " in refused(moved)
    shutil.copy(SCRIPTS / "ppo.py", "my_own_ppo.py")
    assert len(evaluate.evaluate(evaluate.Options(moved, episodes=1))) == 1


def test_an_environment_whose_module_is_elsewhere(run_dir, tmp_path, refused):
    moved = tmp_path / "moved"
    shutil.copytree(run_dir, moved)
    config = json.loads((moved / "config.json").read_text())
    config["args"]["env_id"] = "my_sim:MySim-v0"
    (moved / "config.json").write_text(json.dumps(config))
    assert "no module my_sim, which has the environment my_sim:MySim-v0: run this from the folder of my_sim.py" in (
        refused(moved)
    )


def test_bad_flags(run_dir, refused, tmp_path, capsys):
    assert "--episodes" in refused(run_dir, episodes=0)
    assert "--seed must be at least 0" in refused(run_dir, seed=-1)
    assert refused(run_dir, script=Path("nowhere.py")) == "error: --script nowhere.py: there is no such file\n"
    (run_dir / "broken.py").write_text("import a_module_that_is_nowhere\n")
    with pytest.raises(SystemExit) as end:  # after a note that it is not the file of the run
        evaluate.evaluate(evaluate.Options(run_dir, script=run_dir / "broken.py"))
    assert end.value.code == 2 and "broken.py can't be imported: No module named" in capsys.readouterr().err
    done = benchmark_here(capsys, "evaluate", tmp_path / "missing")
    assert done.returncode == 2 and done.stderr == f"error: there is no folder {tmp_path / 'missing'}\n"


@pytest.mark.parametrize(
    ("env_id", "there", "missing"),
    [
        ("CartPole-v1", (), "moviepy and pygame"),
        ("CartPole-v1", ("moviepy",), "pygame"),
        ("HalfCheetah-v4", ("pygame",), "moviepy"),
    ],
)
def test_video_names_what_to_install(env_id, there, missing, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(evaluate.importlib.util, "find_spec", lambda name: name if name in there else None)
    module = load_script(SCRIPTS / "ppo.py")
    line = refusal(lambda path: evaluate.check_video(module, env_id, path), tmp_path / "a.mp4", capsys)
    assert f"needs {missing}: " in line and line.endswith(f"-m pip install {missing.replace(' and ', ' ')}\n")


def test_video_needs_a_file_that_can_be_written(monkeypatch, tmp_path, capsys):
    module = load_script(SCRIPTS / "ppo.py")
    monkeypatch.setattr(evaluate.importlib.util, "find_spec", lambda _: None)  # its ending is looked at first
    line = refusal(lambda path: evaluate.check_video(module, "CartPole-v1", path), tmp_path / "a.txt", capsys)
    assert line == f"error: --video {tmp_path / 'a.txt'}: name a file that ends in .mp4\n"
    monkeypatch.setattr(evaluate.importlib.util, "find_spec", lambda _: True)
    (tmp_path / "folder.mp4").mkdir()
    for path in (tmp_path / "folder.mp4", tmp_path / "missing" / "a.mp4"):
        line = refusal(lambda path: evaluate.check_video(module, "CartPole-v1", path), path, capsys)
        assert line == f"error: --video: can't write a file {path}\n"
    (tmp_path / "old.mp4").touch()
    line = refusal(lambda path: evaluate.check_video(module, "CartPole-v1", path), tmp_path / "old.mp4", capsys)
    assert line == f"error: --video: {tmp_path / 'old.mp4'} exists; name another file\n"


def test_video_of_an_environment_of_envpool(tmp_path, monkeypatch, capsys):
    module = load_script(SCRIPTS / "ppo.py")
    monkeypatch.setattr(evaluate.importlib.util, "find_spec", lambda _: True)
    line = refusal(lambda path: evaluate.check_video(module, "MyHopper-v0", path), tmp_path / "a.mp4", capsys)
    assert "EnvPool only" in line
    evaluate.check_video(module, "Pong-v5", tmp_path / "a.mp4")  # whose observations are frames


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo_atari_envpool", "apex_dqn_ray"])
def test_a_game_of_atari_is_filmed(name, tmp_path, monkeypatch):
    """Its frames, from the first to that before the end of the first game; without moviepy, which is not there."""
    small = {"env_id": "Pong-v5", "total_timesteps": 64, "tensorboard": False, "device": "cpu"}
    small |= {
        "num_runners": 0,
        "envs_per_runner": 2,
        "learning_starts": 10**6,
        "buffer_size": 128,
        "fragment_steps": 16,
    }
    small |= {"num_envs": 2, "num_steps": 16, "num_minibatches": 2, "run_dir": str(tmp_path / "run")}
    module = load_script(SCRIPTS / f"{name}.py")
    names = {field.name for field in dataclasses.fields(module.Args)}
    module.train(module.Args(**{key: x for key, x in small.items() if key in names}))
    films = []
    monkeypatch.setattr(evaluate.importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(evaluate, "write_video", lambda frames, path: films.append(frames) or path.write_bytes(b"film"))
    options = evaluate.Options(tmp_path / "run", episodes=1, video=tmp_path / "a.mp4")
    evaluate.evaluate(options)
    frames = np.stack(films[0])
    assert frames.shape[1:] == (84, 84) and frames.dtype == np.uint8 and len(frames) > 50
    assert (tmp_path / "a.mp4").read_bytes() == b"film"
    moved = (frames[1:] != frames[:-1]).any((1, 2))
    assert 0.3 < moved.mean() and np.quantile(frames, 0.99) > 50  # something moves, in a picture that is not black


def evaluations(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "evaluation.jsonl").read_text().splitlines()]


@pytest.fixture
def start():
    """A function that starts a program, which is ended with the test at the latest."""
    processes = []

    def call(*command, **options) -> subprocess.Popen:
        program = [sys.executable, *map(str, command)]
        processes.append(subprocess.Popen(program, cwd=ROOT, stderr=subprocess.DEVNULL, text=True, **options))
        return processes[-1]

    yield call
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_run_is_followed_until_it_has_ended(tmp_path, start, monkeypatch):
    """From its first checkpoint to its last, in a process beside that of the training."""
    folder = tmp_path / "run"
    flags = [*toy_flags("ppo", total=10**8), "--checkpoint-every=2000", f"--run-dir={folder}"]
    training = start(SCRIPTS / "ppo.py", *flags)
    while not (folder / "metrics.jsonl").exists():
        assert training.poll() is None
        time.sleep(0.05)
    assert follow.is_running(folder)
    following = start("-m", "benchmarks", "evaluate", folder, "--follow", "--episodes", 2, stdout=subprocess.PIPE)
    while not (folder / "evaluation.jsonl").exists() or len(evaluations(folder)) < 2:
        assert training.poll() is None and following.poll() is None
        time.sleep(0.05)
    training.send_signal(signal.SIGINT)
    output, _ = following.communicate(timeout=120)
    assert training.wait() == 130 and following.returncode == 0 and not follow.is_running(folder)
    lines = evaluations(folder)
    steps = [line["global_step"] for line in lines]
    last = torch.load(folder / "checkpoint.pt", weights_only=True)["global_step"]
    assert steps == sorted(set(steps)) and len(steps) >= 3 and steps[-1] == last
    assert all(line["episodes"] == 2 and line["mean_return"] > 5 and line["std_return"] >= 0 for line in lines)
    assert all(before["seconds"] < after["seconds"] for before, after in itertools.pairwise(lines))
    assert f"step {last:,}: " in output and (folder / "evaluation.png").stat().st_size > 1000
    # Once more: there is nothing left to play, and what was played is kept
    monkeypatch.setattr(follow.os, "nice", lambda _: 0)  # which could not be taken back
    evaluate.main(evaluate.Options(folder, follow=True, episodes=2))
    assert evaluations(folder) == lines
    # With other episodes there is something to play, which has a curve of its own
    evaluate.main(evaluate.Options(folder, follow=True, episodes=1))
    assert [line["episodes"] for line in evaluations(folder)] == [*(x["episodes"] for x in lines), 1]
    assert follow.lines_of(folder / "evaluation.jsonl", 2, 0) == lines
    assert follow.lines_of(folder / "evaluation.jsonl", 2, 1) == []


def test_who_only_reads_a_log_is_no_run(run_dir):
    with (run_dir / "metrics.jsonl").open() as _:
        assert not follow.is_running(run_dir)
    with (run_dir / "metrics.jsonl").open("a") as _:
        assert follow.is_running(run_dir)


def test_a_run_that_can_not_be_followed(run_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(follow.os, "nice", lambda _: 0)  # which could not be taken back
    without = make_run(tmp_path / "crashed", [make_line(100, 1.0, 1)])
    for folder, changes, message in (
        (without, {}, "has no checkpoint.pt"),
        (tmp_path / "missing", {}, "there is no folder"),
        (run_dir, {"video": Path("a.mp4")}, "films nothing"),
    ):
        assert message in refusal(evaluate.main, evaluate.Options(folder, follow=True, **changes), capsys)


@pytest.mark.parametrize("name", ["ppo", "ppo_continuous_action", "dqn"])
def test_a_policy_can_be_used_as_the_docs_say(tmp_path, name):
    """The program in docs/use.md, for runs of other scripts too."""
    module, folder = load_script(SCRIPTS / f"{name}.py"), tmp_path / "run"
    module.train(tyro.cli(module.Args, args=[*toy_flags(name), f"--run-dir={folder}"]))
    program = re.search("```python\n(.*?)```", (ROOT / "docs/use.md").read_text(), re.DOTALL)[1]
    program = program.replace("RUN_DIR", str(folder)).replace("import ppo ", f"import {name} as ppo ")
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert math.isfinite(float(done.stdout.splitlines()[-1]))
