"""What review found wrong, each mended: numbers that are not finite, signals, full disks, odd environments, ..."""

import ast
import contextlib
import errno
import gc
import importlib.util
import io
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import weakref
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import gymnasium as gym
import helpers
import numpy as np
import pytest
import tiny_envs
import torch
from gymnasium.spaces import Box, Dict, Discrete, Sequence, Tuple
from helpers import COMPILED, EAGER, ONE_OF_EACH_KIND, ROOT, SCRIPTS, defining, discrete, has_pool, load, on_policy

each_script = pytest.mark.parametrize("name", EAGER)
each_kind = pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
OFF_POLICY = [name for name in EAGER if not on_policy(name)]
CONTINUOUS = [name for name in EAGER if not discrete(name)]
IN_PROCESS = {"num_envs": 2, "sync_envs": True}
ATARI = {
    "env_id": "Breakout-v5", "num_envs": 2, "num_steps": 16, "num_minibatches": 2, "update_epochs": 1,
    "total_timesteps": 32,
}  # fmt: skip


def quick(name: str) -> dict:
    """Settings of a run that has its first updates, where many of them take long."""
    return {} if on_policy(name) else {"total_timesteps": 200}


class Odd(tiny_envs.Reach):
    """A `Reach` in which something is odd; also for discrete actions. The numbers are those of its own steps."""

    def __init__(self, action_space=tiny_envs.PUSH, observation_space=tiny_envs.LINE, **odd):
        super().__init__(action_space, observation_space)
        self.odd, self.resets = SimpleNamespace(**{"first": 1.0, "huge_at": 0, "writes": False, "wait": 0.0} | odd), 0

    def start(self):
        self.resets += 1
        return super().start() * (self.odd.first if self.resets == 1 else 1)

    def move(self, action):
        time.sleep(self.odd.wait)
        push = action.copy() if self.odd.writes else action
        if self.odd.writes:
            action[:] = 99
        obs, reward, terminated, truncated = super().move(push)
        obs = obs.astype(np.float64)
        return obs * (1e39 if self.steps == self.odd.huge_at else 1), reward, terminated, truncated


def register(name: str, **odd) -> None:
    for prefix, space in ("", tiny_envs.PUSH), ("Discrete", tiny_envs.CHOICE):
        gym.register(f"{prefix}{name}-v0", Odd, kwargs={"action_space": space, **odd}, max_episode_steps=15)


register("FirstIsNan", first=math.nan)
register("Huge", huge_at=110)
register("Writes", writes=True)
register("Slow", wait=0.02)


def env_id(name: str, script: str) -> str:
    return f"{'Discrete' if discrete(script) else ''}{name}-v0"


def all_finite(tree) -> bool:
    if isinstance(tree, dict):
        return all(all_finite(x) for x in tree.values())
    return not isinstance(tree, torch.Tensor) or bool(tree.isfinite().all())


def error_of(capfd, name: str, run_dir=None, **settings) -> tuple[int, str]:
    """The exit code of a training that ends at once, and its one line; there is no traceback."""
    capfd.readouterr()
    settings = settings if helpers.pair_of(name) not in EAGER else helpers.settings_of(name, settings)
    script = load(name)
    with pytest.raises(SystemExit) as end, mock.patch("torch.set_num_threads"):
        settings = {"device": "cpu", "tensorboard": False, "run_dir": str(run_dir) if run_dir else None} | settings
        script.train(script.Args(**settings))
    errors = capfd.readouterr().err + (f"{end.value.code}\n" if isinstance(end.value.code, str) else "")
    assert "Traceback" not in errors
    *_, line = errors.splitlines()
    assert line.startswith("error: ")
    return 1 if isinstance(end.value.code, str) else end.value.code, line


# Numbers that are not finite


@pytest.mark.parametrize(("name", "value"), [*((name, math.nan) for name in EAGER), ("ppo", math.inf), ("ppo", 3.2e38)])
def test_what_follows_a_termination_may_be_anything(train, monkeypatch, name, value):
    """Nobody learns from it, nor do statistics, which count the last observation again; and 0 * NaN is not 0."""
    runs = []
    for last in (0.5, value):
        monkeypatch.setattr(tiny_envs, "last_observation", last)
        prefix = "Discrete" if discrete(name) else ""
        runs.append(train(name, env_id=f"tiny_envs:{prefix}Terminated-v0", **IN_PROCESS, **quick(name)))
    assert runs[0].metrics() == runs[1].metrics()
    assert all_finite(runs[1].checkpoint)


@each_script
def test_what_follows_a_truncation_must_be_finite(train, monkeypatch, name):
    monkeypatch.setattr(tiny_envs, "last_observation", math.nan)
    prefix = "Discrete" if discrete(name) else ""
    with pytest.raises(SystemExit) as end:
        train(name, env_id=f"tiny_envs:{prefix}Truncated-v0", **IN_PROCESS)
    assert "NaN or infinite, at step" in end.value.code


@each_script
def test_first_observation_must_be_finite(train, tmp_path, name):
    with pytest.raises(SystemExit) as end:
        train(name, env_id=env_id("FirstIsNan", name), **IN_PROCESS)
    assert "NaN or infinite, at step 0" in end.value.code
    assert not (tmp_path / "run0" / "checkpoint.pt").exists()


@each_script
def test_observation_beyond_float32_is_infinite(train, tmp_path, name):
    """It is finite as the environment returns it, in float64, and infinite where it is kept."""
    with pytest.raises(SystemExit) as end:
        train(name, env_id=env_id("Huge", name), checkpoint_every=50, **quick(name))
    assert "NaN or infinite, at step" in end.value.code
    assert all_finite(helpers.outcome(tmp_path / "run0").checkpoint)


# Environments


@pytest.mark.parametrize("name", [name for name in OFF_POLICY if name in CONTINUOUS])
def test_replay_holds_the_actions_that_were_chosen(train, name):
    """Not those that the environment left behind in the array."""
    run = train(name, env_id="Writes-v0", **quick(name))
    assert np.array_equal(run.checkpoint["buffer"]["rows"][:, 3:5].numpy(), np.stack(tiny_envs.received))


@pytest.mark.parametrize("name", [name for name in CONTINUOUS if on_policy(name)])
def test_rollout_holds_the_actions_that_were_chosen(train, name):
    """Of two environments that differ in nothing but this, a training learns the same."""
    runs = [train(name, env_id=env_id, **IN_PROCESS) for env_id in ("Writes-v0", "tiny_envs:Reach-v0")]
    assert runs[0].metrics() == runs[1].metrics()


def test_environment_gets_a_copy_of_its_action():
    script = load("sac_continuous_action")
    envs = script.Envs(script.Args(env_id="Writes-v0", num_envs=1), [1])
    envs.reset()
    action = np.full((1, 2), 0.25, dtype=np.float32)
    envs.step(action)
    assert (action == 0.25).all()


SPACES = {
    "Vast": Box(-3e38, 3e38, (2,)),
    "Flat": Box(np.float32([-1, 0.5]), np.float32([1, 0.5])),
    "Whole": Box(-3, 3, (2,), dtype=np.int64),
    "Open": Box(-np.inf, np.inf, (2,)),
}
gym.register("SeveralParts-v0", Odd, kwargs={"action_space": gym.spaces.Dict({"a": Box(-1, 1, (2,))})})
for space_name, space in SPACES.items():
    gym.register(f"{space_name}-v0", Odd, kwargs={"action_space": space})


@pytest.mark.parametrize(
    ("name", "space"),
    [(name, space) for name in CONTINUOUS for space in SPACES if space == "Whole" or not on_policy(name)],
)
def test_actions_that_cannot_work_are_refused(capfd, tmp_path, name, space):
    code, error = error_of(capfd, name, tmp_path / "refused", env_id=f"{space}-v0")
    assert code == 2 and "Box(" in error and not (tmp_path / "refused").exists()


@pytest.mark.parametrize("name", ["ppo", "ppo_env_pool", "dqn", "sac_continuous_action"])
def test_actions_of_several_parts_are_refused(capfd, tmp_path, name):
    code, error = error_of(capfd, name, tmp_path / "refused", env_id="SeveralParts-v0")
    assert code == 2 and "Dict(" in error and not (tmp_path / "refused").exists()


@pytest.mark.parametrize("num_envs", [1, 2])
@pytest.mark.parametrize("name", [name for name in OFF_POLICY if name in CONTINUOUS])
def test_no_gradient_step_for_resets_alone(train, name, num_envs):
    """Both environments end at the same steps, so one step in five brings nothing but resets."""
    settings = {"env_id": "tiny_envs:Terminated-v0", "num_envs": num_envs, "sync_envs": True}
    run = train(name, gradient_steps=3, total_timesteps=160, **settings)
    assert run.checkpoint["num_updates"] == 3 * (160 - 100) // num_envs


class Nested(gym.Env):
    """What a grid world observes: numbers and choices, nested."""

    seen = Tuple((Discrete(2), Box(-1, 1, (2,))))
    agent = Dict({"at": Discrete(4, start=1), "seen": seen})
    observation_space = Dict({"grid": Box(0, 5, (2, 2), np.uint8), "agent": agent})

    def __init__(self, action_space: gym.Space):
        self.action_space, self.observed = action_space, []

    def observe(self):
        seen = int(self.np_random.integers(2)), self.np_random.uniform(-1, 1, 2).astype(np.float32)
        at = int(self.np_random.integers(1, 5))
        grid = self.np_random.integers(6, size=(2, 2)).astype(np.uint8)
        return {"agent": {"at": at, "seen": seen}, "grid": grid}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        return self.observe(), {}

    def step(self, _action):
        return self.observe(), 1.0, self.np_random.random() < 0.1, False, {}


class Growing(Nested):
    """No vector has room for what this one observes."""

    observation_space = Sequence(Discrete(3))

    def observe(self):
        return tuple(self.np_random.integers(3, size=2).tolist())


for prefix, space in ("", tiny_envs.PUSH), ("Discrete", tiny_envs.CHOICE):
    gym.register(f"{prefix}Nested-v0", Nested, kwargs={"action_space": space})
    gym.register(f"{prefix}Growing-v0", Growing, kwargs={"action_space": space})


def observed(plain: gym.Env, seed: int, steps: int, action) -> np.ndarray:
    rows = [plain.reset(seed=seed)[0]]
    while len(rows) <= steps:
        obs, _, terminated, truncated, _ = plain.step(action)
        rows.append(obs)
        if terminated or truncated:
            rows.append(plain.reset()[0])
    flat = [gym.spaces.flatten(plain.observation_space, row) for row in rows[: steps + 1]]
    return np.array(flat, dtype=np.float32)


@pytest.mark.parametrize("id_and_action", [("FrozenLake-v1", 2), ("Taxi-v4", 1), ("DiscreteNested-v0", 5)])
@pytest.mark.parametrize("num_envs", [1, 2])
def test_observations_are_flattened_as_gymnasium_does(id_and_action, num_envs):
    env, action = id_and_action
    if env not in gym.registry:
        pytest.skip(f"this Gymnasium has no {env}")
    script, seeds = load("ppo"), [3, 4][:num_envs]
    envs = script.Envs(script.Args(env_id=env, env_backend="gymnasium", num_envs=num_envs, sync_envs=True), seeds)
    rows = [envs.reset()] + [envs.step(np.full(num_envs, action))[0] for _ in range(40)]
    for i, seed in enumerate(seeds):
        np.testing.assert_array_equal(np.stack(rows)[:, i], observed(gym.make(env), seed, 40, action))


def test_discrete_observations_of_envpool_are_flattened():
    import envpool

    script, settings = load("ppo"), {"env_id": "FrozenLake-v1", "num_envs": 2}
    envs = script.Envs(script.Args(env_backend="envpool", **settings), [1, 2])
    raw = envpool.make_gymnasium("FrozenLake-v1", num_envs=2, seed=[1, 2])
    assert envs.obs_dim == 16
    np.testing.assert_array_equal(envs.reset(), np.eye(16)[raw.reset()[0].reshape(-1)])
    for _ in range(20):
        action = np.array([2, 1])
        np.testing.assert_array_equal(envs.step(action)[0], np.eye(16)[raw.step(action)[0].reshape(-1)])


@each_script
def test_trains_on_nested_and_discrete_observations(train, name):
    train(name, env_id=env_id("Nested", name), total_timesteps=128)
    if discrete(name):
        train(name, env_id="FrozenLake-v1", total_timesteps=128)


@each_script
def test_observations_that_no_vector_holds_are_refused_by_name(capfd, tmp_path, name):
    code, error = error_of(capfd, name, tmp_path / "refused", env_id=env_id("Growing", name))
    assert code == 2 and "Sequence(" in error


def needs_an_argument(**_settings):
    raise KeyError("no_such_key")


gym.register("Broken-v0", needs_an_argument)


@each_script
def test_constructor_that_breaks_is_one_line(capfd, tmp_path, name):
    code, error = error_of(capfd, name, tmp_path / "refused", env_id="Broken-v0")
    assert code == 2 and "KeyError: 'no_such_key'" in error and not (tmp_path / "refused").exists()


class Mortal(tiny_envs.Reach):
    """The process in which it is reset dies."""

    def start(self):
        os.kill(os.getpid(), signal.SIGKILL)


gym.register("Mortal-v0", Mortal, kwargs={"action_space": tiny_envs.PUSH})


@pytest.mark.slow
def test_worker_that_dies_in_its_reset_is_one_line(capfd, tmp_path):
    settings = {"env_id": "Mortal-v0", "num_envs": 2, "env_backend": "gymnasium"}
    code, error = error_of(capfd, "ppo_continuous_action", tmp_path / "run", **settings)
    assert code in (1, 2) and "environment worker" in error and "(exit code -9)" in error


@pytest.mark.slow
def test_worker_that_dies_in_its_constructor_is_one_line(tmp_path):
    """And the program ends, though another one hangs there."""
    words = ["--env-id", "tiny_envs:Stillborn-v0", "--num-envs", "2", "--env-backend", "gymnasium"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT)])}
    program = [sys.executable, str(ROOT / "scripts/ppo_continuous_action.py"), *words, "--run-dir", "run"]
    run = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 2 and "Traceback" not in run.stderr and not (tmp_path / "run").exists()
    assert "a worker may have died as it made its environment" in run.stderr.splitlines()[-1]


def test_worker_of_the_pool_that_dies_in_its_reset_is_one_line(capfd, tmp_path):
    code, error = error_of(capfd, "ppo_env_pool", tmp_path / "run", env_id="Mortal-v0", num_workers=2)
    assert code == 2 and "killed by SIGKILL" in error and not (tmp_path / "run").exists()


@each_script
def test_environment_that_breaks_leaves_a_checkpoint(train, monkeypatch, tmp_path, name):
    """As of the last update: what was learnt is consistent."""
    monkeypatch.setattr(tiny_envs, "EVENT", "raise@153")
    with pytest.raises(SystemExit) as end:
        train(name, checkpoint_every=10**6, **({"max_restarts": 0} if has_pool(name) else {}))
    assert "this environment broke" in end.value.code
    run = helpers.outcome(tmp_path / "run0")
    assert 152 - (64 if on_policy(name) else 5) <= run.checkpoint["global_step"] == run.steps()[-1] <= 152


# Replay


def new_buffer(capacity: int, width: int = 100):
    device = torch.device("cpu")
    return defining("ReplayBuffer").ReplayBuffer(capacity, obs_dim=width, action_dim=2, device=device)


def test_replay_is_saved_without_a_copy_and_without_empty_rows():
    buffer = new_buffer(20_000)
    buffer.add(torch.randn(1000, 204))
    state = buffer.state_dict()
    assert state["rows"].data_ptr() == buffer.rows.data_ptr()
    file = io.BytesIO()
    torch.save(state, file)
    assert file.tell() < 1.1 * 4 * 1000 * 204
    file.seek(0)
    other = new_buffer(20_000)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other.rows, buffer.rows) and other.num_written == 1000


@pytest.mark.parametrize("name", OFF_POLICY)
def test_loaded_replay_is_not_kept_beside_the_buffer(train, monkeypatch, name):
    """It is mapped from the file, and gone when training begins."""
    run, script, seen = train(name, total_timesteps=110), load(name), []
    load_file, reset = torch.load, script.Envs.reset

    def load_and_watch(*args, **settings):
        assert settings["mmap"]
        checkpoint = load_file(*args, **settings)
        seen.append(weakref.ref(checkpoint["buffer"]["rows"]))
        return checkpoint

    monkeypatch.setattr(torch, "load", load_and_watch)
    gone = lambda: all(reference() is None for reference in seen)  # noqa: E731
    monkeypatch.setattr(script.Envs, "reset", lambda envs: (seen.append(gone()), reset(envs))[1])
    script.train(script.Args(resume=str(run.run_dir), device="cpu", total_timesteps=120))
    assert seen[-1] is True


def free_memory_by(monkeypatch, files: dict[str, str]) -> float:
    def read_text(path, *_):
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    script = defining("free_memory")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", read_text)
        return script.free_memory(torch.device("cpu"))


MEMINFO, GROUP = {"/proc/meminfo": "MemTotal:  9000 kB\nMemAvailable:  8000 kB\n"}, "/sys/fs/cgroup/memory"


def test_free_memory_is_within_the_containers_limit(monkeypatch):
    free = 8000 * 1024
    assert free_memory_by(monkeypatch, MEMINFO) == free
    assert free_memory_by(monkeypatch, MEMINFO | {f"{GROUP}.max": "max\n", f"{GROUP}.current": "5000\n"}) == free
    limit = {f"{GROUP}.max": "900000\n", f"{GROUP}.current": "500000\n", f"{GROUP}.stat": "file 0\n"}
    assert free_memory_by(monkeypatch, MEMINFO | limit) == 400_000
    assert free_memory_by(monkeypatch, MEMINFO | limit | {f"{GROUP}.max": f"{10**9}\n"}) == free
    assert free_memory_by(monkeypatch, {}) == math.inf


def test_free_memory_of_a_container_counts_what_the_kernel_can_drop(monkeypatch):
    limit = {f"{GROUP}.max": "900000\n", f"{GROUP}.current": "800000\n"}
    stat = {f"{GROUP}.stat": "anon 100000\nfile 700000\ninactive_file 600000\nactive_file 100000\n"}
    assert free_memory_by(monkeypatch, MEMINFO | limit | stat) >= 700_000

    assert free_memory_by(monkeypatch, {"/proc/meminfo": "MemTotal:  9000 kB\n"}) == math.inf


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 8), ("150000 100000", 2), ("50000 100000", 1), (None, 8)])
def test_cores_are_those_that_a_container_may_use(monkeypatch, quota, cores):
    def read_text(path):
        assert str(path) == "/sys/fs/cgroup/cpu.max"
        if quota is None:
            raise FileNotFoundError
        return quota + "\n"

    script = defining("num_cores")
    with monkeypatch.context() as patch:
        patch.setattr(script.os, "sched_getaffinity", lambda _: set(range(8)))
        patch.setattr(Path, "read_text", read_text)
        assert script.num_cores() == cores


# Files


def test_a_full_disk_ends_the_run_in_one_line_with_tensorboard_too(train, monkeypatch):
    def add_scalar(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.add_scalar", add_scalar)
    with pytest.raises(SystemExit) as end:
        train("ppo", tensorboard=True)
    assert end.value.code.startswith("error: can't write the log: ") and "\n" not in end.value.code


@pytest.mark.slow
def test_runs_that_leads_nowhere_is_refused(tmp_path):
    """A link to a disk that is not there: the run would wait for ever for a free name."""
    (tmp_path / "runs").symlink_to(tmp_path / "scratch")
    process = helpers.start("ppo", *helpers.flags("ppo"), cwd=tmp_path)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and "error: can't use the run folder runs" in errors and "Traceback" not in errors


def test_the_lock_of_a_log_is_not_lost_while_it_is_read(tmp_path, monkeypatch):
    """POSIX drops it when any handle of the file is closed."""
    run, replace, codes = helpers.train("ppo", tmp_path / "run", total_timesteps=64), Path.replace, []
    code = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"

    def check_and_replace(path, target):
        if path.name == "metrics.tmp":
            command = [sys.executable, "-c", code, run.run_dir / "metrics.jsonl"]
            codes.append(subprocess.run(command, capture_output=True).returncode)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", check_and_replace)
    helpers.call("ppo", resume=str(run.run_dir), total_timesteps=128, device="cpu")
    assert codes == [1]


@pytest.mark.slow
def test_how_to_go_on_can_be_pasted(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_envs, "EVENT", "SIGTERM@300")
    monkeypatch.setattr("sys.stderr", output := io.StringIO())
    with pytest.raises(SystemExit):
        helpers.train("ppo", tmp_path / "a b", env_id=env_id("Slow", "ppo"), checkpoint_every=64)
    assert f"--resume '{tmp_path / 'a b'}'" in output.getvalue()


@each_kind
def test_full_disk_leaves_the_checkpoint_before(train, monkeypatch, tmp_path, name):
    save, calls = torch.save, []

    def save_once(state, file):
        calls.append(state["global_step"])
        if len(calls) == 1:
            save(state, file)
        else:
            file.write(b"half of it")
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", save_once)
    with pytest.raises(SystemExit) as end:
        train(name, checkpoint_every=100)
    assert end.value.code.startswith("error: can't write a checkpoint: ") and "\n" not in end.value.code
    assert "No space left" in end.value.code and f"step {calls[0]}" in end.value.code
    run = helpers.outcome(tmp_path / "run0")
    assert run.checkpoint["global_step"] == calls[0] < calls[1] == run.steps()[-1]
    assert sorted(path.name for path in run.run_dir.iterdir()) == ["checkpoint.pt", "config.json", "metrics.jsonl"]


@each_kind
def test_weights_that_are_nan_do_not_replace_a_checkpoint(train, monkeypatch, tmp_path, name):
    """The log does not see all that is lost: between its last line and the end, weights may be spoilt."""
    close, kept = load(name).Run.close, []

    def spoil(run, error=None):
        kept.append((run.dir / "checkpoint.pt").read_bytes())
        run.saved_step -= 1
        for part in run.state.values():
            for weight in part.parameters() if isinstance(part, torch.nn.Module) else ():
                weight.data.fill_(math.nan)
        return close(run, error)

    monkeypatch.setattr(load(name).Run, "close", spoil)
    with pytest.raises(SystemExit) as end:
        train(name, checkpoint_every=100)
    assert end.value.code.startswith("error: weights are NaN or infinite at step ") and "\n" not in end.value.code
    assert end.value.code.endswith(f": --resume {tmp_path / 'run0'}")
    assert (tmp_path / "run0" / "checkpoint.pt").read_bytes() == kept[0]


@pytest.mark.parametrize("settings", [{}, IN_PROCESS], ids=["one", "in-process"])
def test_connection_of_an_environment_that_breaks_is_named(train, monkeypatch, tmp_path, settings):
    """It is no dead worker, though the error is of the same kind."""
    monkeypatch.setattr(tiny_envs, "EVENT", "disconnect@153")
    with pytest.raises(SystemExit) as end:
        train("ppo_continuous_action", **settings, env_backend="gymnasium")
    assert "ConnectionResetError: the simulator is gone" in end.value.code
    assert helpers.outcome(tmp_path / "run0").checkpoint["global_step"] > 0


def test_worker_that_died_is_told_from_one_whose_environment_lost_its_connection():
    """Gymnasium raises the same kind of error for both; a worker that brought its error up has ended in order."""
    envs, error = object.__new__(load("ppo").Envs), ConnectionResetError("gone")
    for exitcode, expected in ((0, "ConnectionResetError: gone"), (-9, "environment worker 1 (exit code -9) died")):
        envs.vector = SimpleNamespace(processes=[SimpleNamespace(exitcode=x) for x in (None, exitcode)], closed=False)
        assert envs.explain(error) == expected and envs.vector.closed


def test_checkpoint_is_on_the_disk_before_it_takes_its_name(train, monkeypatch):
    calls, replace, fsync = [], Path.replace, os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (calls.append("sync"), fsync(file)))
    monkeypatch.setattr(Path, "replace", lambda old, new: (calls.append(Path(new).name), replace(old, new))[1])
    train("dqn", checkpoint_every=400)
    assert calls[-2:] == ["sync", "checkpoint.pt"]


def remove_log(log: Path) -> None:
    log.unlink()


def garble_log(log: Path) -> None:
    """As a file system leaves it after a power loss: zeros, then no JSON, then JSON of another kind."""
    lines = log.read_bytes().splitlines(keepends=True)
    lines[1:2] = [b"\0" * 300 + b"\n", b"\xff\xfe{\n", b"[1]\n", b"7\n", b'{"seconds": 1}\n', b'{"global_step": "x"}\n']
    log.write_bytes(b"".join(lines) + b"\0" * 100)


@pytest.mark.parametrize("damage", [remove_log, garble_log])
@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_damaged_log_does_not_keep_a_checkpoint_from_resuming(train, name, damage):
    run = train(name, **quick(name))
    damage(run.run_dir / "metrics.jsonl")
    script, total = load(name), 150 + run.checkpoint["args"]["total_timesteps"]
    with mock.patch("torch.set_num_threads"):
        script.train(script.Args(resume=str(run.run_dir), device="cpu", total_timesteps=total))
    lines = helpers.outcome(run.run_dir).lines
    kept = [line for line in lines if line["global_step"] <= run.steps()[-1]]
    assert kept == ([] if damage is remove_log else [run.lines[0], *run.lines[2:]])
    assert len(lines) > len(kept) + 1


class FakeWandb(ModuleType):
    def __init__(self, folder: Path):
        super().__init__("wandb")
        self.__spec__, self.folder, self.calls, self.codes = ModuleSpec("wandb", None), folder, [], []

    def init(self, **settings):
        assert len(self.codes) == len(self.calls)  # else a run would go on with the one before
        self.calls.append(settings | {"events": len([*self.folder.glob("**/events.*")])})
        return self

    def finish(self, exit_code: int):
        self.codes.append(exit_code)


def test_runs_of_one_name_are_two_in_weights_and_biases(monkeypatch, tmp_path):
    """Their ids differ, and a resumed run keeps its own. It gets the events: only those that begin after it."""
    wandb = FakeWandb(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for folder in ("a", "b"):
        helpers.train("ppo", tmp_path / folder / "seed1", track=True, tensorboard=True, total_timesteps=64)
    resumed = {"resume": str(tmp_path / "a/seed1"), "total_timesteps": 128, "device": "cpu"}
    helpers.call("ppo", **resumed)
    first, second, again = wandb.calls
    assert first["id"] != second["id"] and first["name"] == second["name"] == "seed1"
    assert again["id"] == first["id"] and again["resume"] == "allow"
    assert all(call["sync_tensorboard"] for call in wandb.calls) and [x["events"] for x in wandb.calls] == [0, 1, 2]
    broken = {"env_id": "tiny_envs:Odd-v0", "env_kwargs": '{"what": "exit"}', "num_envs": 1}
    with pytest.raises(SystemExit):
        helpers.train("ppo", tmp_path / "c", track=True, tensorboard=True, **broken)
    assert wandb.codes == [0, 0, 0, 1]
    monkeypatch.setattr(helpers.load("ppo").Run, "log", mock.Mock(side_effect=RuntimeError))
    with pytest.raises(RuntimeError):
        helpers.train("ppo", tmp_path / "d", track=True, tensorboard=True)
    helpers.load("ppo").end_broken_runs()
    assert wandb.codes == [0, 0, 0, 1, 1]


def test_a_run_that_has_succeeded_is_not_failed_by_its_closing(monkeypatch, tmp_path, capfd):
    """As if there is no network any more when Weights & Biases is to finish."""
    wandb = FakeWandb(tmp_path)
    wandb.finish = mock.Mock(side_effect=ConnectionError("no network"))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    run = helpers.train("ppo", tmp_path / "run", track=True, tensorboard=True, total_timesteps=64)
    out, err = capfd.readouterr()
    assert run.checkpoint["global_step"] > 50 and "log, checkpoint, configuration" in out
    assert "note: ConnectionError while the run was closed: no network" in err


def test_a_constructor_that_ends_the_program_is_refused(capfd, tmp_path, monkeypatch):
    """As of a simulator without a licence: the exit code would be 0, and nothing said why."""
    monkeypatch.setattr(gym, "make", mock.Mock(side_effect=SystemExit(0)))
    code, error = error_of(capfd, "ppo", tmp_path / "run", num_envs=1, num_minibatches=1)
    assert code == 2 and "its constructor has called sys.exit(0)" in error


def test_numbers_whose_mean_would_not_be_finite_are_not_logged():
    script = load("ppo")
    info = {"most": sys.float_info.max, "nan": math.nan, "inf": np.inf, "fine": -1e30, "flag": np.True_}
    assert script.numbers_in(info) == {"fine": -1e30, "flag": 1.0}


def test_an_error_of_weights_and_biases_is_one_line(monkeypatch, tmp_path, capfd):
    """Its errors have no common type but Exception."""
    wandb = FakeWandb(tmp_path)
    wandb.init = mock.Mock(side_effect=type("UsageError", (Exception,), {})("not logged in"))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    code, error = error_of(capfd, "ppo", tmp_path / "run", track=True, tensorboard=True)
    assert code == 2 and "not logged in" in error
    assert not list((tmp_path / "run").iterdir())  # the next attempt may have this folder
    assert helpers.train("ppo", tmp_path / "run").lines


def test_a_full_disk_at_the_start_leaves_the_folder_to_the_next_attempt(monkeypatch, tmp_path, capfd):
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        code, error = error_of(capfd, "ppo", tmp_path / "run")
    assert code == 2 and "No space left on device" in error and not list((tmp_path / "run").iterdir())
    assert helpers.train("ppo", tmp_path / "run").lines


def test_weights_and_biases_that_is_not_installed_is_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(SystemExit) as end:
        helpers.train("ppo", tmp_path / "run", track=True)
    assert end.value.code == 2 and "pip install wandb" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_weights_and_biases_without_the_events_that_it_sends_is_refused(monkeypatch, tmp_path, capsys):
    wandb = FakeWandb(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with pytest.raises(SystemExit) as end:
        helpers.train("ppo", tmp_path / "run", track=True, tensorboard=False)
    assert end.value.code == 2 and "--no-tensorboard" in capsys.readouterr().err
    assert not wandb.calls and not (tmp_path / "run").exists()


def test_an_eager_copy_runs_without_the_packages_that_only_others_need(monkeypatch, tmp_path):
    """`config.json` names the versions of those that are installed."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensordict" else find_spec(name))
    run = helpers.train("ppo", tmp_path / "run", total_timesteps=64)
    versions = set(json.loads((run.run_dir / "config.json").read_text())["versions"])
    assert {"torch", "numpy"} < versions and "tensordict" not in versions


def test_a_file_that_has_changed_since_its_run_began_is_told_of(tmp_path, capsys):
    """Defaults that were edited do not count in a run that goes on."""
    run = helpers.train("ppo", tmp_path / "run", total_timesteps=64)
    config = run.run_dir / "config.json"
    for blob, is_told in ((json.loads(config.read_text())["blob"], False), ("0" * 40, True), (None, False)):
        config.write_text(json.dumps(json.loads(config.read_text()) | {"blob": blob}))
        helpers.resume("ppo", run.run_dir)
        assert ("this file has changed since the run began" in capsys.readouterr().err) == is_told
    config.write_text(json.dumps(json.loads(config.read_text()) | {"blob": "0" * 40}))
    with mock.patch.object(subprocess, "getoutput", return_value=""):  # without git
        helpers.resume("ppo", run.run_dir)
    assert "this file has changed" not in capsys.readouterr().err


# Signals


def processes_of(group: int) -> list[int]:
    """The processes of a process group that run; no zombies."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, number = stat.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        found += [int(stat.parent.name)] if int(number) == group and state != "Z" else []
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "ppo_env_pool"])
def test_sigterm_to_the_process_group_ends_the_run_whole(tmp_path, name):
    """As systemd, Slurm and Kubernetes send it: to the worker processes, too, which leave it to the training."""
    workers = {"start_method": "spawn", "ready_batch": 1} if has_pool(name) else {"env_backend": "gymnasium"}
    settings = {"num_envs": 2, "total_timesteps": 10**7, "env_id": "tiny_envs:Choose-v0", "run_dir": "run"}
    process = helpers.start(name, *helpers.flags(name, **settings, **workers), cwd=tmp_path)
    log = tmp_path / "run/metrics.jsonl"
    helpers.wait_until(lambda: log.exists() and log.stat().st_size > 0)
    assert len(processes_of(process.pid)) >= 3
    os.killpg(process.pid, signal.SIGTERM)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 143, errors
    assert "Traceback" not in errors and "--resume run" in errors and "steps in" in output
    run = helpers.outcome(tmp_path / "run")
    assert run.checkpoint["global_step"] == run.steps()[-1] > 0
    helpers.wait_until(lambda: not processes_of(process.pid), 5)


WAITS = """
import os, signal, sys, threading
sys.path.insert(0, {scripts!r})
import ppo
seen = []
for signum in (signal.SIGINT, signal.SIGTERM):
    signal.signal(signum, lambda signum, _: seen.append(signum))
with ppo.light_start():
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
assert sorted(seen) == [signal.SIGINT, signal.SIGTERM], seen
"""


def test_a_signal_is_not_lost_while_workers_start(tmp_path):
    """When they are ignored, for the workers to inherit that."""
    code = WAITS.format(scripts=str(ROOT / "scripts"))
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=tmp_path)


def test_a_signal_that_ends_the_compiler_is_no_code_that_cannot_be_compiled(monkeypatch, capsys):
    """Ctrl-C reaches g++, too. Without a signal it is."""

    def compiled():
        raise torch._dynamo.exc.TorchDynamoException("CppCompileError: C++ compile error")

    def on_signal(_signum, _frame):
        """Stands for the handler of a run."""

    call = load("ppo_torchcompile").tensors_only(compiled)
    before_the_run = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: print}
    for handlers, code in (
        ({signal.SIGINT: signal.SIG_DFL}, 130),
        ({signal.SIGTERM: signal.SIG_DFL}, 143),
        ({signal.SIGINT: signal.default_int_handler}, 130),  # in a notebook
        (before_the_run, 2),
        (
            {signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: print},
            2,
        ),  # in a runner of Ray
        ({}, 2),
    ):
        monkeypatch.setattr(signal, "getsignal", lambda signum, known=handlers: known.get(signum, on_signal))
        with pytest.raises(SystemExit) as end:
            call()
        assert end.value.code == code and ("can't be compiled" in capsys.readouterr().err) == (code == 2)


def test_what_a_compiler_raised_is_said(capsys):
    """It may stand in the second line."""

    def compiled():
        raise torch._dynamo.exc.TorchDynamoException("backend='inductor' raised:\nOSError: disk full\n\nmore")

    with pytest.raises(SystemExit):
        load("ppo_torchcompile").tensors_only(compiled)()
    line = "error: this can't be compiled: backend='inductor' raised: OSError: disk full; --no-compile does without\n"
    assert capsys.readouterr().err == line


HANGS = """
import multiprocessing, pathlib, time
import gymnasium as gym

class Hang(gym.Env):
    action_space, observation_space = gym.spaces.Discrete(2), gym.spaces.Box(-1, 1, (3,))

    def __init__(self):
        if bool(multiprocessing.parent_process()) == {in_worker}:
            pathlib.Path("hangs").touch()
            time.sleep(600)

gym.register("Hang-v0", Hang)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "signum", "in_worker"),
    [
        ("ppo", signal.SIGINT, True),
        ("ppo", signal.SIGTERM, True),
        ("ppo", signal.SIGINT, False),
        ("ppo_env_pool", signal.SIGINT, True),
    ],
)
def test_a_signal_ends_a_run_whose_environments_are_never_made(tmp_path, name, signum, in_worker):
    """Workers ignore signals, which a terminal sends to all; the run does not, and takes them along."""
    (tmp_path / "hanging.py").write_text(HANGS.format(in_worker=in_worker))
    count = "--num-workers" if has_pool(name) else "--num-envs"
    process = helpers.start(name, "--env-id", "hanging:Hang-v0", count, "2", "--run-dir", "run", cwd=tmp_path)
    helpers.wait_until((tmp_path / "hangs").exists)
    time.sleep(0.5)
    os.killpg(process.pid, signum)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 128 + signum and "Traceback" not in errors and not (tmp_path / "run").exists()
    helpers.wait_until(lambda: not processes_of(process.pid), 5)


@pytest.mark.parametrize("name", [name for name in EAGER if on_policy(name)])
def test_signal_does_not_wait_for_the_end_of_a_rollout(train, monkeypatch, tmp_path, name):
    """A rollout of 40 seconds here, in which the signal comes after half a second."""
    monkeypatch.setattr(tiny_envs, "EVENT", "SIGTERM@20")
    start = time.monotonic()
    with pytest.raises(SystemExit) as end:
        train(name, env_id=env_id("Slow", name), num_steps=2048, total_timesteps=2048)
    assert end.value.code == 143 and time.monotonic() - start < 10
    assert (tmp_path / "run0/metrics.jsonl").read_text() == ""


def test_dqn_ends_at_its_number_of_steps(train):
    """Also within the steps between two updates."""
    settings = {"total_timesteps": 205, "num_envs": 1, "train_frequency": 10, "target_network_frequency": 10}
    assert train("dqn", **settings).checkpoint["global_step"] == 205


def test_no_step_has_two_lines():
    """A step that only resets an environment does not count."""
    state = {"goes_on": lambda: False, "checkpoint_every": 1, "args": SimpleNamespace(log_every=1), "logged_step": 5}
    is_due = load("dqn").Run.is_due
    assert not is_due(SimpleNamespace(step=5, **state)) and is_due(SimpleNamespace(step=6, **state))


def test_only_names_that_envpool_keeps_for_itself_are_left_out_of_the_log():
    info = {"env_id": 3, "elapsed_step": 4, "_x": 5, "env_idle_time": 1, "elapsed_steps_total": 2}
    assert defining("numbers_in").numbers_in(info) == {"env_idle_time": 1, "elapsed_steps_total": 2}


def test_numbers_of_every_library_are_logged():
    """Those that a simulator computes are arrays and tensors without dimensions, too."""
    info = {"a": np.array(0.5), "b": torch.tensor(2), "c": np.float32(0.25), "d": torch.tensor(True)}
    others = {"e": np.array([1]), "f": torch.zeros(1), "g": np.array("x"), "h": torch.tensor(1j), "j": Discrete(2)}
    others["i"] = np.array(np.timedelta64(1, "s"))
    assert defining("numbers_in").numbers_in(info | others) == {"a": 0.5, "b": 2, "c": 0.25, "d": 1}


# The machine


@each_kind
def test_a_run_on_the_cpu_leaves_cuda_alone(train, monkeypatch, name):
    """Though there is a device: not even its random numbers are saved."""

    def refuse(*_args, **_settings):
        raise AssertionError("this run touches CUDA")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    names = ["_lazy_init", "init", "get_rng_state", "set_rng_state", "get_device_name", "current_device", "set_device"]
    for function in [*names, "mem_get_info", "synchronize", "current_stream", "get_device_properties"]:
        monkeypatch.setattr(torch.cuda, function, refuse)
    assert train(name, **quick(name)).checkpoint["rng"]["cuda"] is None


@pytest.mark.parametrize("name", [*EAGER, "ppo_atari_envpool"])
def test_seed_must_fit_the_generators(capfd, tmp_path, name):
    for seed in (2**64, 2**63, -1):
        settings = ATARI if name not in EAGER else {}
        code, error = error_of(capfd, name, tmp_path / "refused", **settings, seed=seed)
        assert code == 2 and "--seed" in error and not (tmp_path / "refused").exists()


def test_greatest_seed_works(train):
    assert len(train("ppo", seed=2**63 - 1).lines) > 3


@pytest.mark.parametrize("name", COMPILED)
def test_absent_compiler_is_one_line_that_names_the_package(capfd, monkeypatch, tmp_path, name):
    def absent(*_args):
        raise torch._inductor.exc.InvalidCxxCompiler

    monkeypatch.setattr(torch._inductor.cpp_builder, "get_cpp_compiler", absent)
    code, error = error_of(capfd, name, tmp_path / "run", compile=True)
    assert code == 2 and "g++" in error and "--no-compile" in error


def test_a_folder_with_a_space_is_named_where_compiled_code_would_need_it(capfd, monkeypatch, tmp_path):
    """Of the cache, or of PyTorch: Inductor quotes neither."""
    cache = tmp_path / "my cache"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    code, error = error_of(capfd, "ppo_torchcompile", tmp_path / "run", compile=True)
    assert code == 2 and error.endswith(f"a folder with a space in its name, {cache}; --no-compile does without")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setattr(torch, "__file__", "/my projects/torch/__init__.py")
    assert "in its name, /my projects/torch; " in error_of(capfd, "ppo_torchcompile", tmp_path / "run", compile=True)[1]


@pytest.mark.parametrize("name", [*EAGER, "ppo_atari_envpool"])
def test_trains_where_the_system_does_not_tell_its_affinity(train, monkeypatch, tmp_path, name):
    """On macOS, for one."""
    for function in ("sched_getaffinity", "sched_setaffinity"):
        monkeypatch.delattr(os, function)
    if name in EAGER:
        assert train(name, total_timesteps=128).lines
    else:
        settings = {"device": "cpu", "tensorboard": False, "run_dir": str(tmp_path / "atari")}
        assert helpers.call(name, **ATARI, **settings).lines


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_numpy_computes_with_one_thread_unless_told_otherwise(path):
    """What the script sets before it imports NumPy; whether a script's process has it is seen in test_copies.py."""
    for before, after in ({}, "1"), ({"OPENBLAS_NUM_THREADS": "3"}, "3"):
        fake = SimpleNamespace(environ=dict(before))
        for statement in ast.parse(path.read_text()).body:
            source = ast.unparse(statement)
            if source == "import numpy as np":
                break
            if "os.environ" in source and not isinstance(statement, ast.ClassDef | ast.FunctionDef):
                exec(source, {"os": fake})
        assert fake.environ["OPENBLAS_NUM_THREADS"] == after


# Precision


def frames(count: int) -> torch.Tensor:
    return torch.randint(256, (count, 21, 21, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["ppo_atari_envpool", "ppo_atari_envpool_torchcompile"])
def test_heads_of_a_bfloat16_network_have_float32_resolution(name):
    """Values near 20 would else move in steps of 0.125, coarser than the clip range."""
    torch.manual_seed(1)
    agent = load(name).ActorCritic(4, torch.bfloat16)
    torch.nn.init.constant_(agent.critic.bias, 20)
    torch.nn.init.constant_(agent.actor.bias, 20)
    with torch.no_grad():
        log_probs, value = agent(frames(64))
    assert log_probs.dtype == value.dtype == torch.float32
    assert 10 < value.mean() < 30 and len(value.unique()) > 60
    steps = value.sort().values.diff()
    assert 0 < steps[steps > 0].min() < 0.125 / 8
    torch.testing.assert_close(log_probs.exp().sum(1), torch.ones(64), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["ppo_atari_envpool", "ppo_atari_envpool_torchcompile"])
def test_acting_copy_computes_what_the_learner_computes(name, dtype):
    """To the last bit, also after it took over new weights: else the ratio of PPO does not begin at 1."""
    torch.manual_seed(1)
    agent = load(name).ActorCritic(4, dtype)
    actor = agent.acting_copy()
    with torch.no_grad():
        for _ in range(2):
            for ours, theirs in zip(agent(frames(8)), actor(frames(8)), strict=True):
                assert torch.equal(ours, theirs)
            for parameter in agent.parameters():
                parameter.mul_(1.01).add_(1e-3)
            actor.load_state_dict(agent.state_dict())


def test_automatic_precision_is_that_of_float32_and_is_decided_the_same_each_time():
    set_precision, generator = defining("set_matmul_precision").set_matmul_precision, torch.Generator().manual_seed(2)
    before, decided = torch.get_float32_matmul_precision(), set()
    x, y = torch.randn(2, 256, 256, generator=generator)
    exact = x.double() @ y.double()
    try:
        for _ in range(3):
            set_precision("auto", torch.device("cpu"), False)
            decided.add(torch.get_float32_matmul_precision())
            assert ((x @ y - exact).abs().max() / exact.abs().max()).item() < 1e-5
        for given in ("highest", "medium"):
            set_precision(given, torch.device("cpu"), False)
            assert torch.get_float32_matmul_precision() == given
    finally:
        set_precision(before, torch.device("cpu"), False)
    assert len(decided) == 1


@pytest.mark.parametrize(
    ("vendor", "family", "fastest"),
    [("AuthenticAMD", 26, "medium"), ("AuthenticAMD", 25, "highest"), ("GenuineIntel", 6, "highest")],
)
def test_automatic_precision_goes_by_the_kind_of_cpu(monkeypatch, vendor, family, fastest):
    """And by its errors: here `medium` may round."""
    set_precision = defining("set_matmul_precision").set_matmul_precision
    x = torch.linspace(-1, 1, 2**16).view(256, 256)
    info = f"vendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: 17\nflags\t\t: avx2\n"
    monkeypatch.setattr(Path, "read_text", lambda _: info)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        rounds = (x @ x - x.double() @ x.double()).abs().max() > 1e-3
        set_precision("auto", torch.device("cpu"), False)
        assert torch.get_float32_matmul_precision() == ("highest" if rounds else fastest)
    finally:
        torch.set_float32_matmul_precision(before)


@each_script
def test_metrics_without_names_are_refused(train, monkeypatch, capsys, name):
    """By numbers, when the first ones come; or `zip` would say so, and of what it would not."""
    script = load(name)
    monkeypatch.setattr(script, "METRICS", tuple(script.METRICS)[:-1])
    with pytest.raises(SystemExit) as end:
        train(name)
    assert end.value.code == 2 and "names, " in capsys.readouterr().err


def test_two_metrics_of_one_name_are_refused(capsys):
    """Of the two, only the last would be logged."""
    assert load("ppo").named(("a", "b"), torch.tensor([1.0, 2.0])) == {"a": 1, "b": 2}
    with pytest.raises(SystemExit):
        load("ppo").named(("a", "a"), torch.tensor([1.0, 2.0]))
    assert "2 metrics for 2 names, 1 of them distinct: compare METRICS" in capsys.readouterr().err


@each_script
def test_a_failed_save_does_not_hide_why_the_run_ended(train, monkeypatch, capsys, name):
    """An environment breaks, and then the disk is full: both are said."""

    def save(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tiny_envs, "EVENT", "nan_obs@203")
    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(SystemExit) as end:
        train(name, checkpoint_every=10**6)
    assert "No space left" in end.value.code and "NaN or infinite" in capsys.readouterr().err


@each_script
def test_after_an_error_in_a_notebook_signals_are_not_the_runs(train, monkeypatch, name):
    """A first Ctrl-C would do nothing, and a second one end the notebook."""
    script = load(name)
    monkeypatch.setattr(script.Run, "goes_on" if not on_policy(name) else "stop_if_asked", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(name)
    interrupting = type("Values", (list,), {"tolist": lambda _: signal.raise_signal(signal.SIGINT)})
    with pytest.raises(KeyboardInterrupt):  # nor if it is a function of this file that runs
        script.named(("a",), interrupting([0]))
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


@pytest.mark.parametrize("is_notebook", [False, True])
def test_a_second_signal_kills_a_program_but_not_a_notebook(train, monkeypatch, is_notebook):
    """Whose kernel holds what other cells have computed."""
    script, found = load("ppo"), []

    def interrupt(_run):
        if not found:
            signal.raise_signal(signal.SIGINT)
            found.append(signal.getsignal(signal.SIGINT))

    monkeypatch.setattr(script, "in_notebook", lambda: is_notebook)
    monkeypatch.setattr(script.Run, "stop_if_asked", interrupt)
    with pytest.raises(SystemExit) as end:
        train("ppo")
    assert end.value.code == 130 and found == [signal.default_int_handler if is_notebook else signal.SIG_DFL]
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_a_run_that_has_ended_is_not_stopped_by_a_signal(train, monkeypatch, capfd):
    """Which comes while environments are closed; it ends the program, as a loop over seeds."""
    script = load("ppo")
    monkeypatch.setattr(script.Envs, "close", lambda _: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit) as end:
        train("ppo")
    out, err = capfd.readouterr()
    assert end.value.code == 143 and "log, checkpoint, configuration" in out and "stopped" not in err


def test_a_run_whose_folder_is_in_use_leaves_nothing_behind(tmp_path, capfd):
    """In a notebook, whose process goes on and keeps the error."""
    (tmp_path / "notes.txt").touch()
    script, before = load("ppo"), (signal.getsignal(signal.SIGTERM), {*multiprocessing.active_children()})
    with pytest.raises(SystemExit):
        script.train(script.Args(env_id="tiny_envs:Choose-v0", num_envs=2, run_dir=str(tmp_path)))
    assert "is not empty" in capfd.readouterr().err
    assert (signal.getsignal(signal.SIGTERM), {*multiprocessing.active_children()}) == before


def test_a_variable_that_answers_no_questions_does_not_hinder_a_signal(train, monkeypatch):
    """As a weak proxy of what has gone."""

    def beside_a_proxy():
        proxy = weakref.proxy(type("Gone", (), {})())
        signal.raise_signal(signal.SIGINT)
        with contextlib.suppress(ReferenceError):
            print(proxy)

    def interrupt(run):
        if run.stopped_by is None:
            beside_a_proxy()

    monkeypatch.setattr(load("ppo").Run, "stop_if_asked", interrupt)
    with pytest.raises(SystemExit) as end:
        train("ppo")
    assert end.value.code == 130


def test_a_run_that_fails_early_gives_back_what_it_has_set(tmp_path):
    """For the whole process; also if nobody closes it."""
    script, before = load("td3_continuous_action"), torch.get_float32_matmul_precision()
    counts_denormals = lambda: (torch.tensor(1e-310, dtype=torch.float64) * 1).item() > 0  # noqa: E731
    counted = counts_denormals()
    torch.set_float32_matmul_precision("highest")
    try:
        with contextlib.suppress(SystemExit):
            script.train(script.Args(env_id="Typo-v0", matmul_precision="medium", run_dir=str(tmp_path / "run")))
        gc.collect()
        assert torch.get_float32_matmul_precision() == "highest"
        assert counts_denormals() == counted
    finally:
        torch.set_float32_matmul_precision(before)


def broken_run(name: str, train, monkeypatch, **settings):
    """A run that an error has ended, and the error, whose traceback keeps it alive as in a notebook."""
    script = load(name)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError) as error:
        patch.setattr(script.Run, "stop_if_asked" if on_policy(name) else "goes_on", lambda _: 1 / 0)
        train(name, **settings)
    return next(run for entry in error.traceback if isinstance(run := entry.locals.get("run"), script.Run)), error


@each_script
def test_a_run_ends_what_a_broken_one_has_left(train, monkeypatch, name):
    """Else its Ctrl-C would be the old run's, and nothing would happen; a bar would stand below the old one."""
    broken, _ = broken_run(name, train, monkeypatch)
    assert signal.getsignal(signal.SIGINT) == broken.on_signal and not broken.file.closed
    found, script, validate = [], load(name), load(name).validate
    monkeypatch.setattr(
        script, "validate", lambda args: found.append(signal.getsignal(signal.SIGINT)) or validate(args)
    )
    train(name)
    assert broken.file.closed and found == [signal.default_int_handler]


def test_workers_of_a_broken_run_end_when_the_next_one_begins(train, monkeypatch):
    settings = {"env_backend": "gymnasium", "sync_envs": False, "num_envs": 2}
    broken, _ = broken_run("ppo", train, monkeypatch, **settings)
    workers = broken.envs.vector.processes
    assert all(worker.is_alive() for worker in workers)
    train("ppo")
    assert not any(worker.is_alive() for worker in workers)


@pytest.mark.parametrize("name", ["dqn", "ppo"])
def test_a_run_inside_of_a_run_does_not_end_it(train, monkeypatch, name):
    script, inner = load("dqn"), []
    log = script.Run.log

    def log_and_train(run, metrics):
        if not inner:
            inner.append(None)
            train(name)
        log(run, metrics)

    monkeypatch.setattr(script.Run, "log", log_and_train)
    assert train("dqn").steps()[-1] == helpers.settings_of("dqn", {})["total_timesteps"]


@each_script
def test_a_notebook_shows_the_progress_bar(train, monkeypatch, capsys, name):
    train(name)
    assert " steps/s" not in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "ipykernel.kernelapp", ModuleType("kernelapp"))
    train(name)
    assert " steps/s" in capsys.readouterr().err
