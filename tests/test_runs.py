"""A run as its user sees it: its folder, the same numbers again, stopping and going on, and what is refused."""

import contextlib
import importlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from unittest import mock

import gymnasium as gym
import helpers
import numpy as np
import pytest
import tiny_envs
import torch
import tyro
from helpers import COMPILED, EAGER, ONE_OF_EACH_KIND, discrete, has_pool, load, on_policy

from benchmarks.common.pairs import TABLE

each_script = pytest.mark.parametrize("name", EAGER)
each_kind = pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
over_ray = [eager.stem for eager, _ in helpers.PAIRS if hasattr(load(eager.stem).Args, "num_runners")]


def command(name: str, *arguments: str) -> Path:
    """What `python scripts/{name}.py {arguments}` does, in this process."""
    script = load(name)
    with mock.patch("torch.set_num_threads"):
        return script.train(tyro.cli(script.Args, args=arguments))


def tensors(tree, path: str = ""):
    """All that a checkpoint holds, as (path, value)."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from tensors(value, f"{path}/{key}")
    elif isinstance(tree, list | tuple):
        for i, value in enumerate(tree):
            yield from tensors(value, f"{path}/{i}")
    else:
        yield path, tree


def same(a, b) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# The folder


@each_script
def test_run_folder_holds_what_the_readme_says(small_run, name):
    run = small_run(name)
    assert sorted(contents(run.run_dir)) == ["checkpoint.pt", "config.json", "metrics.jsonl"]
    config = json.loads((run.run_dir / "config.json").read_text())
    assert config["script"] == f"{name}.py"
    assert TABLE[name].small.items() <= config["args"].items()
    assert {"python", "torch", "tensordict", "gymnasium", "envpool", "numpy"} <= config["versions"].keys()
    assert torch.__version__.startswith(config["versions"]["torch"].partition("+")[0])
    assert config["cores"] >= 1 and config["device"]
    if (helpers.ROOT / ".git").exists():
        head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=helpers.ROOT, text=True)
        assert config["commit"].removesuffix("-dirty") == head.strip()
    assert f"by {config['env_backend']}, in " in config["environments"]


@each_script
def test_log_has_flat_lines_of_finite_numbers(small_run, name):
    run, script = small_run(name), load(name)
    assert len(run.lines) > 3
    for line in run.lines:
        assert {"global_step", "seconds", "charts/SPS"} <= line.keys()
        assert all(isinstance(value, int | float) and math.isfinite(value) for value in line.values())
    losses = [line for line in run.lines if set(script.METRICS) <= line.keys()]
    assert len(losses) > 3
    assert len({line[script.METRICS[0]] for line in losses}) == len(losses)
    ended = [line for line in run.lines if "charts/episodic_return" in line]
    assert ended and all(line["charts/episodic_return"] < 0 < line["charts/episodic_length"] <= 15 for line in ended)
    step, seconds = 0, 0.0
    for line in run.lines:
        assert line["global_step"] > step
        expected = (line["global_step"] - step) / line["charts/SPS"]
        assert line["seconds"] - seconds == pytest.approx(expected, abs=1.1e-3)  # of which each is rounded
        step, seconds = line["global_step"], line["seconds"]


@each_kind
def test_returns_in_the_log_are_those_since_the_line_before(train, monkeypatch, name):
    """Each episode counts in one line, by its mean with the others of that line; so do numbers of `info`."""
    script, ended = load(name), []
    log = script.Run.log

    def note(run, metrics):
        run.envs.infos["number"] += [len(ended), len(ended), len(ended) + 3]
        ended.append(list(run.episodes))
        log(run, metrics)

    monkeypatch.setattr(script.Run, "log", note)
    lines = train(name).lines
    for number, (line, episodes) in enumerate(zip(lines, ended, strict=True)):
        assert line.get("charts/episodes", 0) == len(episodes) and line["info/number"] == number + 1
        for i, key in enumerate(("charts/episodic_return", "charts/episodic_length") if episodes else ()):
            assert line[key] == pytest.approx(sum(episode[i] for episode in episodes) / len(episodes))
    returns = [episode_return for episodes in ended for episode_return, _ in episodes]
    assert len(set(returns)) == len(returns) > 20 and max(map(len, ended)) > 1


@each_script
def test_checkpoint_holds_all_that_a_resumed_run_needs(small_run, name):
    """It was loaded with `weights_only=True`."""
    checkpoint = small_run(name).checkpoint
    assert checkpoint["script"] == f"{name}.py"
    assert TABLE[name].small.items() <= checkpoint["args"].items()
    assert checkpoint["rng"].keys() == {"python", "numpy", "torch", "cuda"}
    assert checkpoint["global_step"] == small_run(name).lines[-1]["global_step"]


def events(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """The (step, value) of each tag in the TensorBoard events of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run_dir))
    accumulator.Reload()
    return {tag: [(x.step, x.value) for x in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


@each_kind
def test_tensorboard_has_what_the_log_has(train, name):
    run = train(name, tensorboard=True)
    found = events(run.run_dir)
    assert found.keys() == {tag for line in run.lines for tag in line} - {"global_step", "seconds"}
    for tag in found:
        logged = [(line["global_step"], pytest.approx(line[tag], rel=1e-6)) for line in run.lines if tag in line]
        assert found[tag] == logged


@each_script
def test_checkpoints_come_as_often_as_asked(train, monkeypatch, name):
    script, saved = load(name), []
    save = script.Run.save
    monkeypatch.setattr(script.Run, "save", lambda run: (saved.append(run.step), save(run))[1])
    steps = train(name, checkpoint_every=120).steps()
    expected = [b for a, b in zip([0, *steps], steps, strict=False) if b // 120 > a // 120]  # a multiple is passed
    assert saved == sorted({*expected, steps[-1]}) and len(saved) >= 3
    assert on_policy(name) or [120, 240, 360] == saved[:3]  # though a line of the log was due at other steps


def test_checkpoints_come_ten_times_in_a_run(train, monkeypatch):
    script, saved = load("dqn"), []
    save = script.Run.save
    monkeypatch.setattr(script.Run, "save", lambda run: (saved.append(run.step), save(run))[1])
    train("dqn")
    assert saved == list(range(40, 401, 40))


# The same numbers again


@each_script
def test_same_seed_same_run(train, small_run, name):
    """For compiled scripts, see test_pairs.py."""
    first, second = small_run(name), train(name)
    assert second.metrics() == first.metrics()
    for (path, a), (_, b) in zip(tensors(first.checkpoint), tensors(second.checkpoint), strict=True):
        assert same(a, b) or path in ("/seconds", "/args/run_dir"), path


@each_kind
def test_other_seed_other_run(train, small_run, name):
    first, second = small_run(name).metrics(), train(name, seed=2).metrics()
    assert all(a != b for a, b in zip(first, second, strict=False))


def test_same_seed_same_run_in_envpool(train):
    settings = {"env_id": "Pendulum-v1", "num_envs": 2, "env_backend": "envpool"}
    first, second = (train("ppo_continuous_action", **settings) for _ in range(2))
    assert first.metrics() == second.metrics()


# Stopping and going on


@each_kind
def test_a_signal_while_the_log_is_opened_ends_the_run_in_order(train, monkeypatch, capfd, name):
    """TensorBoard's import and git take a second, in which Ctrl-C would else be a traceback."""
    script = load(name)
    open_files = script.Run.open_files
    monkeypatch.setattr(script.Run, "open_files", lambda run: (signal.raise_signal(signal.SIGINT), open_files(run))[1])
    with pytest.raises(SystemExit) as end:
        train(name)
    assert end.value.code == 130 and "stopped by a signal; nothing saved yet" in capfd.readouterr().err


@pytest.mark.parametrize(("name", "signum"), [*((name, signal.SIGTERM) for name in EAGER), ("dqn", signal.SIGINT)])
def test_signal_ends_the_run_with_a_checkpoint_of_that_moment(train, monkeypatch, tmp_path, capsys, name, signum):
    monkeypatch.setattr(tiny_envs, "EVENT", f"{signum.name}@203")
    with pytest.raises(SystemExit) as end:
        train(name)
    assert end.value.code == 128 + signum
    run = helpers.outcome(tmp_path / "run0")
    assert f"--resume {run.run_dir}" in capsys.readouterr().err
    assert run.checkpoint["global_step"] == run.lines[-1]["global_step"]
    if on_policy(name):  # as of its last update: it does not go on to the end of a rollout, which may take minutes
        assert 203 - 64 <= run.lines[-1]["global_step"] <= 203
        assert has_pool(name) or len(tiny_envs.received) == 203
    else:
        between_updates = 5 if name == "dqn" else 1
        assert run.lines[-1]["global_step"] == len(tiny_envs.received)
        assert 203 <= run.lines[-1]["global_step"] < 203 + between_updates


@pytest.mark.parametrize("run_dir", ["run", None])
def test_an_environment_that_goes_to_another_folder_does_not_take_the_run_along(run_dir, tmp_path, monkeypatch, capsys):
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(home)
    settings = {"env_id": "tiny_envs:Leaving-v0", "env_kwargs": json.dumps({"folder": str(elsewhere)})}
    small = helpers.settings_of("ppo", settings | {"num_envs": 1, "run_dir": run_dir, "tensorboard": False})
    run = helpers.call("ppo", device="cpu", **small)
    monkeypatch.chdir(home)
    place = run.run_dir.relative_to(home)
    assert not [*elsewhere.iterdir()] and f"configuration: {place}\n" in capsys.readouterr().out
    helpers.call("ppo", resume=str(place), total_timesteps=2 * run.checkpoint["args"]["total_timesteps"])
    assert not [*elsewhere.iterdir()]
    assert {path.name for path in run.run_dir.iterdir()} == {"config.json", "metrics.jsonl", "checkpoint.pt"}


@each_kind
def test_a_second_signal_kills(train, monkeypatch, name):
    """The first one has the run end by itself; after it the default action is back, for a run that hangs."""
    script, handlers = load(name), []
    log = script.Run.log

    def log_and_stop(run, metrics):
        log(run, metrics)
        if not handlers:
            signal.raise_signal(signal.SIGTERM)
            handlers.append(signal.getsignal(signal.SIGTERM))

    monkeypatch.setattr(script.Run, "log", log_and_stop)
    with pytest.raises(SystemExit) as end:
        train(name)
    assert end.value.code == 128 + signal.SIGTERM and handlers == [signal.SIG_DFL]


@pytest.mark.slow
@each_script
def test_resumed_run_is_the_uninterrupted_run(train, monkeypatch, tmp_path, name):
    """Environments start afresh in a resumed run. Where that makes no difference, all that is saved is the same.

    There the observation is always the same. Statistics of observations have seen one more, and are not applied: they
    make it 0, from which nothing can be learnt. Those of discounted returns see no difference if these are the rewards.
    """
    prefix = "Discrete" if discrete(name) else ""
    settings, normalizes = {"env_id": f"tiny_envs:{prefix}Same-v0"}, hasattr(load(name), "RunningNorm")
    if normalizes:
        settings["gamma"] = 0.0
        monkeypatch.setattr(load(name).RunningNorm, "__call__", lambda _self, x: x)
    whole = train(name, **settings)
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(tiny_envs, "EVENT", "SIGTERM@203")
        train(name, **settings)
    stopped = helpers.outcome(tmp_path / "run1")
    assert 203 - 64 <= stopped.steps()[-1] < whole.steps()[-1]
    resumed = helpers.resume(name, stopped.run_dir)
    if normalizes:
        seen_twice = resumed.checkpoint["obs_norm"]["count"] - whole.checkpoint["obs_norm"]["count"]
        assert 0 < seen_twice <= 64  # what the rollout had seen that the signal broke off
    differing = {"/seconds", "/args/run_dir", "/args/resume", "/obs_norm/count"}
    for (path, a), (other_path, b) in zip(tensors(whole.checkpoint), tensors(resumed.checkpoint), strict=True):
        assert path == other_path and (path in differing or same(a, b)), path
    timeless = {line["global_step"]: line for line in whole.metrics()}
    assert [timeless.get(line["global_step"], line) for line in resumed.metrics()] == resumed.metrics()
    assert set(timeless) <= set(resumed.steps())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_killed_run_goes_on_from_its_last_checkpoint(train, tmp_path, name):
    """Killed at a moment of its own choice by SIGKILL, with a line cut in half as a full disk does it."""
    arguments = helpers.flags(name, checkpoint_every=120, run_dir="run")
    process = helpers.start(name, *arguments, cwd=tmp_path, TINY_EVENT="SIGKILL@300")
    process.communicate(timeout=240)
    assert process.returncode == -signal.SIGKILL
    killed = helpers.outcome(tmp_path / "run")
    assert 120 <= killed.checkpoint["global_step"] < killed.steps()[-1] + 64 <= 300 + 64
    with (tmp_path / "run/metrics.jsonl").open("a") as log:
        log.write('{"global_step": 301, "seconds": 1')
    resumed, whole = helpers.resume(name, tmp_path / "run"), train(name, checkpoint_every=120)
    steps = resumed.steps()
    assert steps == sorted(set(steps))
    assert len(steps) == len(whole.steps())  # one line for each interval: none is missing
    kept = [line for line in killed.lines if line["global_step"] <= killed.checkpoint["global_step"]]
    assert resumed.lines[: len(kept)] == kept
    assert resumed.lines[len(kept)]["seconds"] > kept[-1]["seconds"]
    interval = max(b - a for a, b in zip([0, *whole.steps()], whole.steps(), strict=False))
    assert abs(steps[-1] - whole.steps()[-1]) <= interval
    if not on_policy(name):
        assert steps[-1] == TABLE[name].small["total_timesteps"]


def test_resumed_run_goes_on_with_its_tensorboard_events(train, monkeypatch, tmp_path):
    """Events that are younger than the checkpoint give way to those of the resumed run."""
    script, first = load("ppo_continuous_action"), tmp_path / "first.pt"
    save = script.Run.save

    def keep_first(run, **state):
        save(run, **state)
        if not first.exists():
            first.write_bytes((run.dir / "checkpoint.pt").read_bytes())

    monkeypatch.setattr(script.Run, "save", keep_first)
    run = train("ppo_continuous_action", tensorboard=True, checkpoint_every=120)
    first.rename(run.run_dir / "checkpoint.pt")
    time.sleep(1.01)  # TensorBoard reads files in the order of names, which hold the second, and then a count: 10 < 9
    resumed = helpers.resume("ppo_continuous_action", run.run_dir)
    assert resumed.steps() != run.steps()
    assert [step for step, _ in events(run.run_dir)["charts/SPS"]] == resumed.steps()


@each_kind
def test_resuming_a_finished_run_changes_nothing(train, name):
    run = train(name)
    before = contents(run.run_dir)
    helpers.resume(name, run.run_dir)
    after = contents(run.run_dir)
    config, config_before = (json.loads(x.pop("config.json")) for x in (after, before))
    assert after == before
    assert config.pop("resumed") == [{"global_step": run.steps()[-1], "commit": config["commit"], "changed": {}}]
    assert config == config_before


@pytest.mark.slow
def test_ctrl_c_reaches_a_run_with_worker_processes(tmp_path):
    """A terminal sends it to the workers too."""
    arguments = helpers.flags("ppo_continuous_action", num_envs=2, total_timesteps=1_000_000, run_dir="run")
    process, log = helpers.start("ppo_continuous_action", *arguments, cwd=tmp_path), tmp_path / "run/metrics.jsonl"
    helpers.wait_until(lambda: log.exists() and log.stat().st_size > 0, 240)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    run = helpers.outcome(tmp_path / "run")
    assert run.checkpoint["global_step"] == run.steps()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("before", ["", "nohup"])
def test_a_terminal_that_closes_ends_a_run_as_ctrl_c_does(tmp_path, before):
    """All its processes get SIGHUP, and to write to it is an error. With nohup the run goes on."""
    (terminal, line), log = os.openpty(), tmp_path / "run/metrics.jsonl"
    name = os.ttyname(line)
    words = helpers.flags("ppo_continuous_action", num_envs=2, total_timesteps=20_000, run_dir="run")
    script = helpers.ROOT / "scripts/ppo_continuous_action.py"
    opens = f'exec {before} "$0" "$@" <{name} >{name} 2>&1'  # the first of a session that opens a terminal owns it
    with mock.patch.dict(os.environ, PYTHONPATH=str(helpers.TESTS)):
        command = ["sh", "-c", opens, sys.executable, script, *words]
        heard = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)  # these tests may be under nohup themselves
        process = subprocess.Popen(command, cwd=tmp_path, start_new_session=True, preexec_fn=heard)
    helpers.STARTED.append(process)
    os.set_blocking(terminal, False)

    def has_begun() -> bool:
        with contextlib.suppress(BlockingIOError):
            os.read(terminal, 2**16)  # else it would fill, and the run would wait
        return log.exists() and log.stat().st_size > 0

    helpers.wait_until(has_begun, 240)
    os.close(line)
    os.close(terminal)
    assert process.wait(60) == (0 if before else 128 + signal.SIGHUP)
    run = helpers.outcome(tmp_path / "run")
    assert run.checkpoint["global_step"] == run.steps()[-1]
    assert (run.steps()[-1] > 15_000) == bool(before)  # steps that reset do not count


@pytest.mark.parametrize("num_envs", [1, 3])
@each_script
def test_log_has_whole_episodes_and_no_resets(train, monkeypatch, name, num_envs):
    """Returns and lengths are those of the environment's episodes, which end in both ways."""
    script, ended = load(name), []
    log = script.Run.log
    monkeypatch.setattr(script.Run, "log", lambda run, metrics: (ended.extend(run.episodes), log(run, metrics))[1])
    env_id = f"tiny_envs:{'Discrete' * discrete(name)}Count-v0"
    own = {"num_minibatches": 1} if on_policy(name) else {}
    train(name, env_id=env_id, num_envs=num_envs, **own, **({} if has_pool(name) else {"sync_envs": True}))
    numbers = [(total - length * (length + 1) / 2) / (100 * length) for total, length in ended]
    assert {length for _, length in ended} == {3, 5}
    assert [x % 2 for x in numbers] == [length == 5 for _, length in ended]
    if num_envs == 1:
        assert numbers == [*range(len(numbers))]


def test_a_run_ends_with_the_mean_of_the_last_hundred_returns(train, capsys):
    """Of some 250 episodes, whose returns rise from one to the next."""
    run = train("ppo", env_id="tiny_envs:DiscreteCount-v0", num_envs=1, num_minibatches=1, total_timesteps=1280)
    ended = sum(line.get("charts/episodes", 0) for line in run.lines)
    lengths = [5 if number % 2 else 3 for number in range(ended)]
    returns = [100 * number * length + length * (length + 1) / 2 for number, length in enumerate(lengths)]
    (said,) = re.findall(r"mean return of the last 100 episodes ([\d.]+)", capsys.readouterr().out)
    assert ended > 150 and float(said) == pytest.approx(np.mean(returns[-100:]), abs=0.1)


# The policy of a checkpoint


@pytest.mark.parametrize("name", EAGER + over_ray)
def test_policy_of_a_checkpoint_acts_within_the_action_space(train, name):
    """Whose first action is number 5, or whose bounds differ by dimension."""
    script, settings = load(name), helpers.small_settings(name)
    both = has_pool(name) or name in ("impala_ray", "ppo_ray", "a3c_ray")
    own = [{"env_id": env_id} for env_id in ("tiny_envs:Choose-v0", "tiny_envs:Reach-v0")]
    for more in own if both else [{}]:
        run = train(name, **settings | more)
        args = script.Args(**run.checkpoint["args"])
        seeds = [1] * (getattr(args, "num_envs", None) or getattr(args, "envs_per_runner", 1))
        envs = script.Pool(args, [1]) if has_pool(name) else script.Envs(args, seeds)
        obs = 100 * np.random.default_rng(1).normal(size=(500, 3)).astype(np.float32)
        actions = script.load_policy(run.checkpoint, envs)(obs)
        assert all(envs.action_space.contains(np.asarray(x, envs.action_space.dtype)) for x in actions)
        envs.close()


# What breaks on the way


@pytest.mark.parametrize("event", ["nan_reward", "nan_obs"])
@each_script
def test_numbers_that_are_not_finite_end_the_run(train, monkeypatch, tmp_path, name, event):
    """At once, before anything has learnt from them: the checkpoint is as of the last update."""
    monkeypatch.setattr(tiny_envs, "EVENT", f"{event}@203")
    with pytest.raises(SystemExit) as end:
        train(name, checkpoint_every=50)
    found = re.fullmatch(r"error: .*NaN or infinite, at step (\d+); .*", end.value.code)
    assert 202 - (64 if on_policy(name) else 5) <= int(found.group(1)) <= 202
    run = helpers.outcome(tmp_path / "run0")
    assert run.checkpoint["global_step"] == int(found.group(1)) == run.steps()[-1]
    for path, value in tensors(run.checkpoint):
        assert not isinstance(value, torch.Tensor) or value.isfinite().all(), path
    assert all(math.isfinite(value) for line in run.lines for value in line.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("event", "reason"),
    [("SIGKILL", r"error: .*worker 1 \(exit code -9\)"), ("raise", r"Worker-1 (.*\n)*.*environment broke")],
)
def test_broken_worker_ends_the_run(tmp_path, event, reason):
    """The second of two workers; the first lives on. The end comes soon, and the message says which it was."""
    arguments = helpers.flags("ppo_continuous_action", num_envs=2, checkpoint_every=100, run_dir="run")
    process = helpers.start("ppo_continuous_action", *arguments, cwd=tmp_path, TINY_EVENT=f"{event}@170")
    _, errors = process.communicate(timeout=240)
    ended, log = time.time(), tmp_path / "run/metrics.jsonl"
    assert process.returncode == 1
    assert ended - log.stat().st_mtime < 10
    assert re.search(reason, errors), errors
    assert event == "raise" or "Traceback" not in errors, errors
    assert helpers.outcome(tmp_path / "run").checkpoint["global_step"] >= 100


@pytest.mark.parametrize("num_envs", [1, 2])
def test_infos_that_do_not_fit_together_do_not_end_the_run(train, num_envs):
    """Each step's has an array of another length, which Gymnasium can't put together; no metric needs it."""
    run = train("ppo", env_id="tiny_envs:Ragged-v0", num_envs=num_envs, num_minibatches=1)
    assert run.steps()[-1] >= 200


# What is refused


@each_kind
def test_training_in_a_thread_is_refused(capsys, name):
    """As by a library that calls functions in threads; signals could not be heard."""
    ends = []

    def target() -> None:
        try:
            load(name).train(load(name).Args(**helpers.small_settings(name)))
        except SystemExit as end:
            ends.append(end.code)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    assert ends == [2] and "needs the main thread" in capsys.readouterr().err


def error_of(output: str) -> str:
    """The one line that says what is wrong, the last on stderr; notes may come before it."""
    *notes, error = output.splitlines()
    assert error.startswith("error: ") and not any(re.search("error|Traceback", note) for note in notes), output
    return error


@pytest.fixture
def refused(capsys, tmp_path):
    """The one line of an error, of a run that was refused and has written nothing."""

    def refused(name: str, **settings) -> str:
        run_dir = tmp_path / "refused"
        flags = helpers.flags(name, **{"run_dir": run_dir} | settings)
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            command(name, *flags)
        assert end.value.code == 2
        error = error_of(capsys.readouterr().err)
        assert not run_dir.exists()
        return error

    return refused


@each_script
def test_unknown_environment_is_refused_with_those_near(refused, name):
    assert "HalfCheetah-v4" in refused(name, env_id="HalfCheeta-v4")
    assert "CartPole-v1" in refused(name, env_id="cartpole-v1", num_envs=2)
    assert has_pool(name) or "CheetahRun-v1" in refused(name, env_id="CheetaRun-v1", env_backend="envpool")
    assert "no_such_module" in refused(name, env_id="no_such_module:Env-v0")
    assert "NoSuchEnv" in refused(name, env_id="tiny_envs:NoSuchEnv-v0")


@pytest.mark.parametrize("name", [name for name in EAGER if not has_pool(name)])
def test_wrong_kind_of_actions_is_refused(refused, name):
    other = "tiny_envs:Reach-v0" if discrete(name) else "tiny_envs:Choose-v0"
    assert str(gym.make(other).action_space) in refused(name, env_id=other)


WRONG = [
    ("num_envs", 0), ("num_envs", -1), ("num_steps", 0), ("total_timesteps", 0), ("batch_size", 0),
    ("num_workers", 0), ("envs_per_worker", -1), ("ready_batch", -1), ("ready_batch", 2), ("step_timeout", 0.0),
    ("checkpoint_every", 0), ("gamma", 1.5), ("gamma", math.nan), ("learning_rate", math.inf), ("learning_rate", 1e39),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [(name, *setting) for name in EAGER for setting in WRONG if hasattr(load(name).Args, setting[0])],
)
def test_settings_that_cannot_work_are_refused(refused, name, field, value):
    assert f"--{field.replace('_', '-')}" in refused(name, **{field: value})


@pytest.mark.parametrize("name", [name for name in EAGER if on_policy(name)])
def test_rollouts_that_do_not_come_out_even_are_refused(refused, name):
    assert "minibatches" in refused(name, num_minibatches=7)
    assert "rollout" in refused(name, total_timesteps=63)
    size = {} if has_pool(name) else {"num_envs": 1}
    one_row = {"num_steps": 8, "num_minibatches": 8 * helpers.settings_of(name, size).get("num_workers", 1)}
    assert "one row" in refused(name, **size, **one_row)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@each_script
def test_absent_device_is_refused(refused, name):
    assert "--device cuda: " in refused(name, device="cuda")
    assert "cpu, cuda" in refused(name, device="gpu")
    assert "cpu, cuda" in refused(name, device="mps")


def test_fixed_temperature_of_zero_is_refused(capsys, tmp_path):
    flags = helpers.flags("sac_continuous_action", alpha=0.0, run_dir=tmp_path / "refused")
    with pytest.raises(SystemExit) as end:
        command("sac_continuous_action", *flags, "--no-autotune")
    assert end.value.code == 2 and "--alpha" in capsys.readouterr().err


@each_script
def test_folder_that_cannot_be_written_is_refused(refused, tmp_path, name):
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file/run") in refused(name, run_dir=tmp_path / "file/run")
    assert (tmp_path / "file").read_text() == ""


@each_script
def test_folder_in_use_is_refused_and_left_alone(refused, small_run, name):
    folder = small_run(name).run_dir
    before = contents(folder)
    assert "--resume" in refused(name, run_dir=folder)
    assert contents(folder) == before


def remove_all(folder):
    for path in folder.iterdir():
        path.unlink()


def cut_checkpoint(folder):
    with (folder / "checkpoint.pt").open("r+b") as file:
        file.truncate(1000)


def garble_checkpoint(folder):
    (folder / "checkpoint.pt").write_bytes(b"no checkpoint" * 100)


def forget_settings(folder):
    torch.save({"script": "ppo.py"}, folder / "checkpoint.pt")


def invent_setting(folder):
    checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
    torch.save(checkpoint | {"args": checkpoint["args"] | {"of_another_version": 1}}, folder / "checkpoint.pt")


@pytest.fixture
def resume_refused(capsys):
    def resume_refused(name: str, folder: Path, *flags: str) -> str:
        before = contents(folder) if folder.exists() else None
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            command(name, "--resume", str(folder), *flags)
        assert end.value.code == 2
        error = error_of(capsys.readouterr().err)
        assert (contents(folder) if folder.exists() else None) == before
        return error

    return resume_refused


@pytest.mark.parametrize("damage", [remove_all, cut_checkpoint, garble_checkpoint, forget_settings, invent_setting])
@each_script
def test_broken_run_is_not_resumed(resume_refused, small_run, tmp_path, name, damage):
    folder = tmp_path / "run"
    folder.mkdir()
    for file, content in contents(small_run(name).run_dir).items():
        (folder / file).write_bytes(content)
    damage(folder)
    assert str(folder) in resume_refused(name, folder)


@each_script
def test_missing_run_is_not_resumed(resume_refused, tmp_path, name):
    assert str(tmp_path / "none") in resume_refused(name, tmp_path / "none")


@pytest.mark.parametrize("name", EAGER + COMPILED)
def test_run_of_another_script_is_not_resumed(resume_refused, small_run, name):
    """Of its twin, too, and with the other script's name, whatever settings that has."""
    for other in EAGER:
        if other != name:
            assert f"{other}.py" in resume_refused(name, small_run(other).run_dir)


@each_kind
def test_resumed_run_keeps_its_settings(resume_refused, train, monkeypatch, name):
    """A setting that is given counts, also if it is the default."""
    folder = train(name, seed=7).run_dir
    assert "--seed" in resume_refused(name, folder, "--seed", "8")
    monkeypatch.setattr("sys.argv", [f"{name}.py", "--resume", str(folder), "--seed", "1"])
    assert "--seed" in resume_refused(name, folder, "--seed", "1")
    assert "--total-timesteps" in resume_refused(name, folder, "--total-timesteps", "64")


CHANGES = {"target_kl": 1e-6, "gradient_steps": 2, "ent_coef": 0.3, "epsilon_end": 0.7, "max_grad_norm": 1e-3}


@pytest.mark.slow
@pytest.mark.parametrize("name", EAGER + over_ray)
def test_override_changes_what_it_names(train, tmp_path, name):
    """Each setting that may change in a run does, by itself; nothing is taken from the checkpoint instead."""
    settings = {}
    if name in over_ray:
        settings = importlib.import_module(Path(TABLE[name].own_tests).stem).SMALL | {"num_runners": 0}
    run = train(name, **settings)
    longer = ("--total-timesteps", str(2 * run.steps()[-1]), "--device", "cpu")

    def gone_on(*flags: str) -> helpers.Outcome:
        folder = tmp_path / "_".join(["on", *flags[1:]])
        shutil.copytree(run.run_dir, folder)
        return helpers.outcome(command(name, "--resume", str(folder), *longer, *flags))

    def learnt(outcome: helpers.Outcome) -> list:
        return [x for path, x in tensors(outcome.checkpoint) if "exp_avg" in path]

    plain = gone_on()
    for setting in set(load(name).CHANGEABLE) - {"num_runners", "num_learners"}:
        old = run.checkpoint["args"][setting]
        value = CHANGES[setting] if setting in CHANGES else old * 2 if isinstance(old, int) else old / 2
        changed = gone_on("--override", f"{setting}={value}")
        assert changed.checkpoint["args"][setting] == value and changed.checkpoint["args"]["override"] == ()
        assert not all(map(same, learnt(changed), learnt(plain))), setting
        if setting == "train_frequency":
            assert changed.lines[-1]["global_step"] == changed.checkpoint["num_updates"] * value
        config = json.loads((changed.run_dir / "config.json").read_text())
        assert config["args"][setting] == old and config["resumed"][-1]["changed"][setting] == value


@pytest.mark.slow
def test_override_of_a_learning_rate_that_is_not_annealed(train):
    """It counts instead of what Adam's state holds, and is kept; a schedule of one's own goes on where it was."""
    run = train("td3_continuous_action")
    for steps, flags in ((500, ("--override", "learning-rate=0.5")), (600, ())):
        command("td3_continuous_action", "--resume", str(run.run_dir), "--total-timesteps", str(steps), *flags)
        assert helpers.outcome(run.run_dir).checkpoint["actor_optimizer"]["learning_rate"] == 0.5
    weights = torch.nn.Linear(1, 1)
    adam, again = (helpers.defining("Adam").Adam(weights, 0.1) for _ in range(2))
    adam.learning_rate.mul_(0.5)
    again.load_state_dict(adam.state_dict())
    assert again.learning_rate == adam.learning_rate
    other = helpers.defining("Adam").Adam(weights, 0.2)
    other.load_state_dict(adam.state_dict())
    assert other.learning_rate == other.first_learning_rate == torch.tensor(0.2)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("num_envs=2", "num_envs can't change in a run"),
        ("buffer_size=2", "buffer_size can't change in a run"),
        ("gama=0.9", "gama is unknown"),
        ("gamma", "gamma"),
        ("gamma=high", "high"),
        ("gamma=1.5", "--gamma must be at least 0 and at most 1"),
    ],
)
def test_override_of_what_cannot_change_is_refused(small_run, capsys, change, reason):
    folder = small_run("dqn").run_dir
    before = contents(folder)
    with pytest.raises(SystemExit) as end:
        command("dqn", "--resume", str(folder), "--override", change)
    assert end.value.code == 2 and contents(folder) == before
    assert reason in capsys.readouterr().err


def test_override_twice_is_refused(monkeypatch, capsys):
    """The parser keeps the last one, so the others would be ignored in silence."""
    words = ["--resume", "runs/x", "--override", "gamma=0.9", "--override=tau=0.5"]
    monkeypatch.setattr("sys.argv", ["dqn.py", *words])
    with pytest.raises(SystemExit) as end:
        load("dqn").typed_flags()
    assert end.value.code == 2 and "--override is given twice" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["dqn.py", *words[:-1]])
    assert load("dqn").typed_flags() == words[:-1]


def test_override_counts_beside_a_flag_of_the_same_name(train, monkeypatch):
    """Typed again as it was, the flag does not undo it; by CleanRL's name another value is refused as by ours."""
    run = train("dqn", epsilon_end=0.1)
    words = ["--resume", str(run.run_dir), "--total-timesteps", str(2 * run.steps()[-1])]
    typed = [*words, "--epsilon-end", "0.1", "--override", "epsilon_end=0.2"]
    monkeypatch.setattr("sys.argv", ["dqn.py", *typed])
    command("dqn", *typed)
    assert helpers.outcome(run.run_dir).checkpoint["args"]["epsilon_end"] == 0.2
    monkeypatch.setattr("sys.argv", ["dqn.py", *words, "--end-e", "0.05"])
    with pytest.raises(SystemExit) as end:
        command("dqn", *words, "--end-e", "0.05")
    assert end.value.code == 2


@pytest.mark.slow
def test_a_resumed_run_may_write_other_logs(small_run, tmp_path, monkeypatch):
    """As where it began on a machine with Weights & Biases; nothing that is learnt depends on them."""
    folder = shutil.copytree(small_run("ppo").run_dir, tmp_path / "run")
    for word, has_events, steps in (("--tensorboard", True, "4096"), ("--no-tensorboard", False, "8192")):
        words = ["--resume", str(folder), "--total-timesteps", steps, "--device", "cpu", word]
        monkeypatch.setattr("sys.argv", ["ppo.py", *words])
        command("ppo", *words)
        assert helpers.outcome(folder).checkpoint["args"]["tensorboard"] == has_events


def test_run_of_another_process_is_not_resumed(resume_refused, small_run, tmp_path):
    """While it is there; the log that it writes stays its own."""
    folder = shutil.copytree(small_run("ppo").run_dir, tmp_path / "run")
    code = f"import fcntl, sys\nfile = open({str(folder / 'metrics.jsonl')!r}, 'a')\n"
    code += "fcntl.lockf(file, fcntl.LOCK_EX)\nprint(1, flush=True)\nsys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        longer = ("--total-timesteps", "4096")
        assert "another process is training" in resume_refused("ppo", folder, *longer)
        other.stdin.close()
    command("ppo", "--resume", str(folder), *longer, "--device", "cpu")


def test_runs_that_start_at_the_same_time_have_folders_of_their_own(monkeypatch, tmp_path):
    """By default the second one waits for the next second."""
    seconds = iter([1.5, 1.7, 1.9, 2.1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.time", lambda: next(seconds))
    monkeypatch.setattr("time.sleep", lambda _: None)
    found = [load("ppo").new_folder(Path("runs"), "A/B-v0__ppo__1") for _ in range(2)]
    assert [str(folder) for folder in found] == ["runs/A_B-v0__ppo__1__1", "runs/A_B-v0__ppo__1__2"]


def test_of_two_runs_that_begin_in_one_folder_at_once_one_fails(monkeypatch, tmp_path, capsys):
    """The folder is empty for both; the log of the first one stays as it is."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text("the other's\n")
    with monkeypatch.context() as at_once, pytest.raises(SystemExit) as end:
        at_once.setattr(Path, "iterdir", lambda _: iter(()))
        command("ppo", *helpers.flags("ppo"), "--run-dir", str(tmp_path / "run"))
    assert end.value.code == 2 and "metrics.jsonl" in capsys.readouterr().err
    assert contents(tmp_path / "run") == {"metrics.jsonl": b"the other's\n"}


def test_a_run_that_another_process_saves_meanwhile_is_not_resumed(small_run, tmp_path, monkeypatch, capsys):
    """It would go on from what it has read, and replace the newer checkpoint."""
    folder, script = shutil.copytree(small_run("ppo").run_dir, tmp_path / "run"), load("ppo")
    checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
    newer, make = checkpoint | {"global_step": checkpoint["global_step"] + 1}, script.Envs

    def save_and_make(*arguments):
        torch.save(newer, tmp_path / "new")
        (tmp_path / "new").replace(folder / "checkpoint.pt")
        return make(*arguments)

    monkeypatch.setattr(script, "Envs", save_and_make)
    before = contents(folder)["metrics.jsonl"]
    with pytest.raises(SystemExit) as end:
        command("ppo", "--resume", str(folder), "--total-timesteps", "4096", "--device", "cpu")
    assert end.value.code == 2 and "another process has saved" in capsys.readouterr().err
    assert contents(folder)["metrics.jsonl"] == before


def test_of_two_processes_that_resume_a_run_at_once_one_fails(small_run, monkeypatch, tmp_path, capsys):
    """The one that finds the new log locked, though it was the first to lock the old one."""
    folder, answers = shutil.copytree(small_run("ppo").run_dir, tmp_path / "run"), iter([True, False])
    monkeypatch.setattr(load("ppo"), "lock", lambda _: next(answers))
    with pytest.raises(SystemExit) as end:
        command("ppo", "--resume", str(folder), "--total-timesteps", "4096", "--device", "cpu")
    assert end.value.code == 2 and "another process is training" in capsys.readouterr().err


def test_flags_of_another_program_are_not_taken_for_those_of_a_resumed_run(train, monkeypatch):
    """Such as one that trains scripts, and has a --seed of its own."""
    folder, script = train("ppo", seed=5).run_dir, load("ppo")
    monkeypatch.setattr("sys.argv", ["my_sweep.py", "--seed", "3"])
    assert script.load_checkpoint(script.Args(resume=str(folder)))[0].seed == 5
    monkeypatch.setattr("sys.argv", ["ppo.py", "--seed", "1"])
    with pytest.raises(SystemExit) as end:
        script.load_checkpoint(script.Args(resume=str(folder)))
    assert end.value.code == 2


def test_a_run_keeps_its_log_from_other_processes(train, monkeypatch):
    """From the start, and when it was resumed; not when it is over."""
    log, found = load("ppo").Run.log, []
    code = "import fcntl, sys\nfcntl.lockf(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"

    def is_free(folder: Path) -> bool:
        words = [sys.executable, "-c", code, folder / "metrics.jsonl"]
        return subprocess.run(words, capture_output=True).returncode == 0

    def log_and_try(run, metrics):
        log(run, metrics)
        found.append(is_free(run.dir))

    monkeypatch.setattr(load("ppo").Run, "log", log_and_try)
    folder = train("ppo", total_timesteps=64).run_dir
    command("ppo", "--resume", str(folder), "--total-timesteps", "128", "--device", "cpu")
    assert found == [False, False] and is_free(folder)


def test_override_needs_a_run_to_resume(refused):
    assert "needs --resume" in refused("ppo", override=("gamma=0.9",))


def test_flags_of_cleanrl(monkeypatch, capsys):
    """One that has the like is understood; the others are refused with what there is instead. Values are left alone."""
    script = load("dqn")
    for typed, understood in (("--no-cuda --seed 2", ["--device=cpu", "--seed", "2"]), ("--exp-name save-model", None)):
        monkeypatch.setattr("sys.argv", ["dqn.py", *typed.split()])
        assert script.typed_flags() == (understood or typed.split())
    refused = {"--capture_video": "evaluate RUN_DIR --video", "--no-save-model": "checkpoint.pt"}
    refused |= {"--upload-model": "checkpoint.pt", "--hf-entity=me": "checkpoint.pt"}
    for typed, ours in (refused | {"--torch-deterministic=True": "on a CPU"}).items():
        monkeypatch.setattr("sys.argv", ["dqn.py", "--seed", "1", typed])
        with pytest.raises(SystemExit) as end:
            script.typed_flags()
        line = capsys.readouterr().err
        assert (
            end.value.code == 2
            and line.startswith("error: flags of CleanRL's: --")
            and line.count("\n") == 1
            and ours in line
        )


@each_kind
def test_finished_run_is_made_longer(train, capsys, name):
    run = train(name)
    command(name, "--resume", str(run.run_dir))
    out = capsys.readouterr().out
    assert "finished" in out and "nan" not in out  # no episode has ended since
    total = TABLE[name].small["total_timesteps"]
    command(name, "--resume", str(run.run_dir), "--total-timesteps", str(2 * total))
    assert "--total-timesteps" in capsys.readouterr().err
    longer = helpers.outcome(run.run_dir)
    assert longer.lines[: len(run.lines)] == run.lines
    assert longer.steps()[-1] == longer.checkpoint["global_step"] > 1.5 * total
    if on_policy(name):  # what was annealed over the run is annealed over the new one, from here on
        rates, first = [line["charts/learning_rate"] for line in longer.lines], TABLE[name].small["learning_rate"]
        done, both = len(run.lines), len(rates)
        assert rates == pytest.approx([first * (1 - i / (done if i < done else both)) for i in range(both)])


@each_script
def test_resumed_run_keeps_its_device_unless_told(small_run, name):
    script, folder = load(name), str(small_run(name).run_dir)
    for given, used in (("auto", "cpu"), ("cuda:1", "cuda:1")):
        args, _ = script.load_checkpoint(script.Args(resume=folder, device=given))
        assert args.device == used


# The command line


@pytest.mark.parametrize("name", EAGER + COMPILED)
def test_help_explains_each_flag(capsys, name):
    script = load(name)
    with pytest.raises(SystemExit) as end:
        tyro.cli(script.Args, args=["--help"])
    assert end.value.code == 0
    text = " ".join(re.sub("[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    for field, comment in re.findall(r"^    (\w+): .+?  # (.+)$", source_of_settings(name), re.MULTILINE):
        assert f"--{field.replace('_', '-')}" in text
        assert comment in text


def source_of_settings(name: str) -> str:
    source = Path(load(name).__file__).read_text()
    return source[source.index("class Args:") : source.index("\nMETRICS")]


@pytest.mark.slow
def test_command_of_leanrl_works(tmp_path):
    """As its users know it, in a folder of theirs; only the environment and the budget are smaller."""
    words = "--seed 1 --total-timesteps 4096 --compile --cudagraphs --env-id tiny_envs:Reach-v0 --device cpu"
    process = helpers.start("ppo_continuous_action_torchcompile", *words.split(), cwd=tmp_path)
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    (folder,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"tiny_envs_Reach-v0__ppo_continuous_action_torchcompile__1__\d+", folder.name)
    assert str(folder.relative_to(tmp_path)) in output
    run = helpers.outcome(folder)
    assert len(run.lines) == 2 and any(folder.glob("events.*"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA graphs are on")
def test_cuda_graphs_without_cuda_are_a_note(train, capsys):
    name = "dqn_torchcompile"
    train(name, compile=False, cudagraphs=True)
    assert capsys.readouterr().err.count("CUDA graphs are off") == 1
    train(name, compile=False, cudagraphs=False)
    assert "CUDA graphs" not in capsys.readouterr().err
