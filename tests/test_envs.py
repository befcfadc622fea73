"""Whatever steps the environments, the loop sees the same: late autoreset, flat observations, all bounds, own seeds."""

import contextlib
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from unittest import mock

import gymnasium as gym
import helpers
import numpy as np
import pytest
import tiny_envs
import torch
from gymnasium.spaces import Box
from helpers import EAGER, ONE_OF_EACH_KIND, ROOT, discrete, has_pool, is_alive, load, on_policy

from benchmarks.common.pairs import TABLE

ENVS = load("ppo_continuous_action")  # of which script does not matter: Envs has the same text in all
IN_PROCESS, WORKERS, ENVPOOL = {"sync_envs": True}, {"env_backend": "gymnasium"}, {"env_backend": "envpool"}

each_script = pytest.mark.parametrize("name", EAGER)
# Only in this process are the actions recorded that an environment is given; test_env_pool.py has the like for pools
each_in_process = pytest.mark.parametrize("name", [name for name in EAGER if not has_pool(name)])


@pytest.fixture
def make():
    """Environments from an id, their number and the settings of a backend; closed at the end."""
    opened = []

    def make_envs(env_id: str, num_envs: int, first_seed: int = 0, **settings):
        seeds = list(range(first_seed, first_seed + num_envs))
        opened.append(ENVS.Envs(ENVS.Args(env_id=env_id, num_envs=num_envs, **settings), seeds))
        return opened[-1]

    yield make_envs
    for envs in opened:
        if hasattr(envs, "vector"):
            envs.close()


@pytest.mark.parametrize("setting", ["episodic_life", "reward_clip"])
def test_settings_that_hide_the_score_of_a_game_are_refused(make, setting, capfd):
    """Returns in the log would be those of lives, or clipped."""
    with pytest.raises(SystemExit) as end:
        make("Breakout-v5", 1, env_kwargs=f'{{"{setting}": true}}')
    assert end.value.code == 2 and f"--env-kwargs {setting}: returns in the log" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("num_envs", "backend"), [(1, {}), (3, IN_PROCESS), (2, WORKERS)], ids=["alone", "in process", "workers"]
)
def test_autoreset_is_one_step_late(make, num_envs, backend):
    """Odd episodes of this environment take 5 steps and are truncated, even ones terminate after 3."""
    envs = make("tiny_envs:Count-v0", num_envs, **backend)
    obs = envs.reset()
    assert obs.shape == (num_envs, 3)
    np.testing.assert_array_equal(obs, [[0, 0, 0]] * num_envs)
    rows = [(episode, t) for episode in range(3) for t in range(4 + 2 * (episode % 2))][1:]
    for i, (episode, t) in enumerate(rows):
        action = np.full((num_envs, 2), 0.01 * i, dtype=np.float32)
        obs, reward, terminated, truncated = envs.step(action)
        is_reset, is_even = t == 0, episode % 2 == 0
        expected = [episode, t, 0 if is_reset else 0.01 * i]  # the action at a reset is not taken
        np.testing.assert_allclose(obs, [expected] * num_envs, rtol=1e-6)
        np.testing.assert_array_equal(reward, [0 if is_reset else 100 * episode + t] * num_envs)
        np.testing.assert_array_equal(terminated, [is_even and t == 3] * num_envs)
        np.testing.assert_array_equal(truncated, [not is_even and t == 5] * num_envs)


@pytest.mark.slow
def test_workers_draw_numbers_of_their_own_that_repeat(make):
    """From NumPy's and Python's global generators, too, whose state all workers would inherit from one process."""
    rows = []
    for _ in range(2):
        envs = make("tiny_envs:Drawing-v0", 2, **WORKERS)
        rows.append(np.stack([envs.reset(), envs.step(np.zeros(2, dtype=int))[0]]))
    assert (rows[0] == rows[1]).all() and len(np.unique(rows[0])) == 2 * 5  # `made` stays the same


@pytest.mark.parametrize("backend", [IN_PROCESS, WORKERS], ids=["in process", "workers"])
def test_attributes_can_be_set_from_the_loop(make, backend):
    """By the same line, wherever environments step; the one that has the attribute gets it, not its wrappers."""
    envs = make("tiny_envs:Drawing-v0", 2, **backend)
    envs.reset()
    envs.vector.set_attr("made", 7.0)
    assert envs.step(np.zeros(2, dtype=int))[0][:, 0].tolist() == [7, 7]
    envs.vector.set_attr("made", [8.0, 9.0])
    assert envs.step(np.zeros(2, dtype=int))[0][:, 0].tolist() == [8, 9]


def test_environments_end_each_at_its_own_time(make):
    envs = make("tiny_envs:Reach-v0", 3, **IN_PROCESS)
    envs.reset()
    done, counts = np.zeros(3, dtype=bool), set()
    for _ in range(100):
        before = len(tiny_envs.received)
        _, reward, terminated, truncated = envs.step(np.zeros((3, 2), dtype=np.float32))
        assert len(tiny_envs.received) - before == (~done).sum()
        np.testing.assert_array_equal(reward == 0, done)
        done = terminated | truncated
        counts.add(int(done.sum()))
    assert {0, 1} <= counts


def test_envpool_shows_the_last_observation_and_resets_late(make):
    """CartPole's next state follows from state and action: this must hold for every row but those of resets."""
    envs, rng = make("CartPole-v1", 4, **ENVPOOL), np.random.default_rng(1)
    physics = gym.make("CartPole-v1").unwrapped
    physics.reset()
    obs, done, ends = envs.reset(), np.zeros(4, dtype=bool), 0
    for _ in range(100):
        action = rng.integers(2, size=4)
        next_obs, reward, terminated, truncated = envs.step(action)
        for i in range(4):
            if done[i]:
                assert np.abs(next_obs[i]).max() <= 0.05 and not (reward[i] or terminated[i] or truncated[i])
                continue
            physics.state, physics.steps_beyond_terminated = obs[i].astype(np.float64), None
            expected, _, is_end, _, _ = physics.step(action[i])
            np.testing.assert_allclose(next_obs[i], expected, atol=1e-4)
            assert (reward[i], terminated[i]) == (1, is_end)
        obs, done = next_obs, terminated | truncated
        ends += done.sum()
    assert ends > 10


def test_an_environment_that_cannot_be_made_leaves_other_processes_alone(make):
    """Those of the program, which has children of its own."""
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    try:
        with pytest.raises(SystemExit):
            make("tiny_envs:Reach-v0", 2, env_kwargs='{"typo": 1}', **WORKERS)
        child.join(0.5)  # a kill takes a moment
        assert child.is_alive()
    finally:
        child.kill()


def test_workers_beside_one_that_died_are_ended(make):
    """And neither they nor their files are kept."""
    counts = []
    for _ in range(3):
        envs = make("tiny_envs:Reach-v0", 3, **WORKERS)
        envs.reset()
        envs.stop, workers = mock.Mock(side_effect=RuntimeError), list(envs.vector.processes)
        workers[1].kill()
        workers[1].join()
        with pytest.raises(RuntimeError):
            envs.step(np.zeros((3, 2), dtype=np.float32))
        assert "environment worker 1 (exit code -9) died" in envs.stop.call_args.args[0]
        envs.close()
        for worker in workers:
            worker.join(10)
        assert not any(worker.is_alive() for worker in workers)
        # Each timer holds them until its thread has noticed that it was cancelled
        helpers.wait_until(lambda: not any(isinstance(x, threading.Timer) for x in threading.enumerate()))
        del envs.vector, workers, worker
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[1] == counts[2]


def test_workers_of_a_run_that_fails_before_it_can_close_them_end_in_silence(capfd):
    """Each would print that its pipe has ended, after the line that helps; so in a notebook, whose process goes on."""
    script = load("ppo")
    others = {*multiprocessing.active_children()}
    with contextlib.suppress(SystemExit):  # and not `pytest.raises`, which keeps the error and all that it holds
        script.train(script.Args(env_id="tiny_envs:Reach-v0"))
    workers = {*multiprocessing.active_children()} - others
    gc.collect()
    for worker in workers:
        worker.join(10)
    assert not any(worker.is_alive() for worker in workers)
    assert capfd.readouterr().err.splitlines()[-1].startswith("error: tiny_envs:Reach-v0 has actions Box")


def test_envpool_truncates_at_the_time_limit(make):
    """And shows what follows the last step, from which its value is estimated, and not the next episode's start."""
    envs, physics, flags = make("Pendulum-v1", 2, **ENVPOOL), gym.make("Pendulum-v1").unwrapped, []
    physics.reset()
    obs, done = envs.reset(), np.zeros(2, dtype=bool)
    for _ in range(410):
        next_obs, _, *ends = envs.step(np.zeros((2, 1), dtype=np.float32))
        for i in np.flatnonzero(~done):
            physics.state = np.array([np.arctan2(obs[i, 1], obs[i, 0]), obs[i, 2]])
            np.testing.assert_allclose(next_obs[i], physics.step(np.zeros(1))[0], atol=1e-3)
        obs, done = next_obs, ends[0] | ends[1]
        flags.append(ends)
    flags = np.array(flags)
    assert not flags[:, 0].any()
    assert np.flatnonzero(flags[:, 1, 0]).tolist() == np.flatnonzero(flags[:, 1, 1]).tolist() == [199, 400]


@pytest.mark.parametrize(
    ("env_id", "backend"), [("tiny_envs:Reach-v0", IN_PROCESS), ("Pendulum-v1", ENVPOOL)], ids=["in process", "EnvPool"]
)
def test_each_environment_starts_by_its_own_seed(make, env_id, backend):
    first, second, other = (make(env_id, 3, first_seed, **backend).reset() for first_seed in (0, 0, 3))
    np.testing.assert_array_equal(first, second)
    assert len(np.unique(np.concatenate([first, other]), axis=0)) == 6


@pytest.mark.parametrize("backend", [IN_PROCESS, ENVPOOL], ids=["in process", "EnvPool"])
def test_seeds_need_not_be_in_a_row(backend):
    found = []
    for seeds in ([7, 3, 90], [90, 7, 3]):
        envs = ENVS.Envs(ENVS.Args(env_id="Pendulum-v1", num_envs=3, **backend), seeds)
        found.append(envs.reset().copy())
        envs.close()
    np.testing.assert_array_equal(found[0][[2, 0, 1]], found[1])


def test_backend_by_itself():
    backends = [ENVS.choose_backend("CartPole-v1", "auto", in_process) for in_process in (True, False)]
    assert backends == ["gymnasium", "envpool"]
    with mock.patch.dict(sys.modules, envpool=None):  # not installed: an id with a module is none of its
        assert ENVS.choose_backend("tiny_envs:Count-v0", "auto", in_process=False) == "gymnasium"
    assert ENVS.choose_backend("CheetahRun-v1", "auto", in_process=True) == "envpool"  # gymnasium does not have it


def test_backend_of_several_environments(make, capsys):
    """EnvPool has them all, unless they are to be kept in the process, or are a few whose step is short."""
    assert make("Hopper-v4", 2).backend == make("Pendulum-v1", 9).backend == "envpool"
    assert make("Hopper-v4", 2, sync_envs=True).backend == make("Hopper-v4", 1).backend == "gymnasium"
    with pytest.raises(SystemExit):
        make("CheetahRun-v1", 2, sync_envs=True)  # the flag would do nothing
    assert "--sync-envs is for Gymnasium's environments; CheetahRun-v1 is EnvPool's" in capsys.readouterr().err
    few = make("Pendulum-v1", 8)
    assert few.backend == "gymnasium" and isinstance(few.vector, ENVS.SyncEnvs)
    assert few.summary == "environments: 8 by gymnasium, in this process"
    assert make("Pendulum-v1", 8, env_backend="envpool").backend == "envpool"


@pytest.mark.parametrize(("num_envs", "backend"), [(2, IN_PROCESS), (2, WORKERS)], ids=["in process", "workers"])
def test_observations_are_flattened(make, num_envs, backend):
    """A dictionary in the order of its keys; an image row by row."""
    parts, action = make("tiny_envs:Parts-v0", num_envs, **backend), np.zeros((num_envs, 2), dtype=np.float32)
    assert parts.obs_dim == 5
    np.testing.assert_array_equal(parts.reset(), [[0, 1, 2, 3, 4]] * num_envs)
    np.testing.assert_array_equal(parts.step(action)[0], [[1, 2, 3, 4, 5]] * num_envs)
    image = make("tiny_envs:Image-v0", num_envs, **IN_PROCESS)
    assert image.obs_dim == 6
    np.testing.assert_array_equal(image.reset(), [np.arange(6)] * num_envs)
    np.testing.assert_array_equal(image.step(action)[0], [np.arange(1, 7)] * num_envs)


def test_observations_of_dm_control_are_flattened(make):
    import envpool

    envs = make("CheetahRun-v1", 2)
    raw = envpool.make_gymnasium("CheetahRun-v1", num_envs=2, seed=[0, 1])
    parts, action = raw.reset()[0], np.full((2, 6), 0.3)
    assert sorted(parts) == ["position", "velocity"] and envs.obs_dim == 17
    np.testing.assert_array_equal(envs.reset(), np.hstack([parts["position"], parts["velocity"]]))
    parts = raw.step(action)[0]
    np.testing.assert_array_equal(envs.step(action)[0], np.hstack([parts["position"], parts["velocity"]]))


def space_of(name: str) -> gym.Space:
    """The action space of the environment in a script's small settings."""
    return gym.make(TABLE[name].small["env_id"]).action_space


CONTINUOUS = [name for name in EAGER if not discrete(name)]


@pytest.mark.parametrize("env_id", ["tiny_envs:Parts-v0", "tiny_envs:Image-v0", "CheetahRun-v1"])
@pytest.mark.parametrize("name", CONTINUOUS)
def test_trains_on_observations_of_any_shape(train, name, env_id):
    if has_pool(name) and env_id == "CheetahRun-v1":
        pytest.skip("EnvPool has this one alone")
    assert train(name, env_id=env_id, total_timesteps=128).lines[-1]["global_step"] >= 120


@each_in_process
def test_actions_keep_to_the_bounds_of_each_dimension(train, name):
    """The bounds differ by dimension and are not symmetric: those of one would not do for the other."""
    train(name, num_envs=2, sync_envs=True)
    actions, space = np.array(tiny_envs.received), space_of(name)
    if isinstance(space, Box):
        assert actions.shape[1:] == space.shape
        assert (actions >= space.low).all() and (actions <= space.high).all()
        margin = 0.1 * (space.high - space.low)
        assert (actions.min(0) < space.low + margin).all() and (actions.max(0) > space.high - margin).all()
    else:
        assert set(actions.tolist()) == set(range(space.start, space.start + space.n))


@each_in_process
def test_only_steps_of_the_environment_count(train, name):
    """A row in which an environment resets itself is no step of it."""
    run = train(name, num_envs=3, sync_envs=True)
    assert run.checkpoint["global_step"] == run.lines[-1]["global_step"] == len(tiny_envs.received)
    assert sum(line.get("charts/episodes", 0) for line in run.lines) > 20  # of which each brought such a row


class Stop(Exception):
    pass


@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_no_two_seeds_share_a_stream(monkeypatch, name):
    """Environments of runs with different seeds, and of a resumed run, get seeds of their own, of 31 bits."""
    script, streams = load(name), []

    def record(_self, _args, seeds):
        streams.extend(seeds)
        raise Stop

    monkeypatch.setattr(script.Pool if has_pool(name) else script.Envs, "__init__", record)
    number = "num_workers" if has_pool(name) else "num_envs"
    for seed in range(30):
        for global_step in (0, 2048):
            checkpoint = {"global_step": global_step, "iteration": 1, "num_updates": 1} if global_step else {}
            monkeypatch.setattr(script, "load_checkpoint", lambda args, checkpoint=checkpoint: (args, checkpoint))
            with pytest.raises(Stop):
                script.train(script.Args(seed=seed, device="cpu", **{number: 8}))
    assert len(streams) == len(set(streams)) == 30 * 2 * 8
    assert all(isinstance(seed, int) and 0 <= seed < 2**31 for seed in streams)


def value_of(name: str, checkpoint: dict) -> float:
    """What the networks of a run say that the state is worth."""
    script, obs = load(name), torch.full((1, 3), 0.5)
    space = space_of(name)
    if hasattr(script, "QNetwork"):
        network = script.QNetwork(3, space.n)
        network.load_state_dict(checkpoint["network"])
        return network(obs).max().item()
    if hasattr(script, "Critic"):
        critic = script.Critic(3, 2)
        critic.load_state_dict({k[2:]: v for k, v in checkpoint["critics"].items() if k.startswith("0.")})
        return critic(obs, torch.tensor([[0.1, -0.7]])).item()
    size = space.shape[0] if isinstance(space, Box) else space.n
    agent, scale = script.ActorCritic(3, space if has_pool(name) else size), 1.0
    agent.load_state_dict(checkpoint["agent"])
    if "reward_scale" in checkpoint:
        obs, norm = torch.zeros(1, 3), checkpoint["reward_scale"]
        scale = (norm["squares"] / norm["count"]).sqrt().item()
    return agent.critic(obs).item() * scale


@pytest.mark.parametrize("settings", [{"num_envs": 1}, {"num_envs": 2, "sync_envs": True}, {"num_envs": 2}])
def test_a_second_reset_begins_other_episodes(settings):
    """At once: the next step is one of the new episodes, though an old one has just ended."""
    script = load("ppo")
    backend = {"env_backend": "gymnasium"}
    envs = script.Envs(script.Args(env_id="CartPole-v1", **backend, **settings), [7, 8][: settings["num_envs"]])
    first, done = envs.reset(), False
    while not done:
        _, _, terminated, _ = envs.step(np.zeros(envs.num_envs, dtype=int))
        done = terminated[0]
    second = envs.reset()
    obs, reward, *_ = envs.step(np.zeros(envs.num_envs, dtype=int))
    assert (reward == 1).all() and not np.isclose(first, second).all(1).any()
    assert np.abs(obs - second).max() < 0.5  # it goes on from there
    envs.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", EAGER)
def test_truncation_has_a_future_and_termination_none(train, name):
    """Reward 1 at each step, one observation, an end after 4 steps, gamma 0.9.

    Cut by a time limit, the state is worth 1 / (1 - gamma) = 10. A value that can't tell the steps apart sees the last
    step's termination as one of probability 1 / 4 at each, 1 / (1 - 0.9 * 0.75) = 3.1, or less by PPO's long sums.
    """
    prefix = "Discrete" if discrete(name) else ""
    value = {}
    for end in ("Truncated", "Terminated"):
        run = train(name, env_id=f"tiny_envs:{prefix}{end}-v0", gamma=0.9, **TABLE[name].learn_value)
        assert run.lines[-1]["charts/episodic_length"] == 4
        value[end] = value_of(name, run.checkpoint)
    assert value["Truncated"] == pytest.approx(10, rel=0.05)
    assert 1.8 < value["Terminated"] < 4


@each_script
def test_nothing_is_learnt_from_a_reset(train, monkeypatch, name):
    """The row of a reset has the observation that the ended episode left behind, an action not taken and no reward.

    So, of a terminated episode, that observation makes no difference to anything; without statistics of observations.
    Episodes end on rows 3, 8, ..., 63: a reset is the first row of a rollout, too.
    """
    script, prefix = load(name), "Discrete" if discrete(name) else ""
    if hasattr(script, "RunningNorm"):
        monkeypatch.setattr(script.RunningNorm, "__call__", lambda _self, x: x)
    runs = []
    for value in (0.5, -3.0):
        monkeypatch.setattr(tiny_envs, "last_observation", value)
        runs.append(train(name, env_id=f"tiny_envs:{prefix}Terminated-v0", num_envs=2, sync_envs=True))
    assert runs[0].metrics() == runs[1].metrics()


@pytest.mark.parametrize("name", [name for name in EAGER if on_policy(name)])
def test_the_advantage_of_a_reset_has_no_weight(train, small_run, monkeypatch, name):
    """It is 0, which would still count in the mean and the spread of the advantages; so it is made to stand out."""
    script, plain = load(name), small_run(name)
    gae = script.gae
    monkeypatch.setattr(script, "gae", lambda *args: gae(*args) + 1e3 * (1 - args[4]))
    assert train(name).metrics() == plain.metrics()


@pytest.mark.parametrize(("size", "sync_envs"), [(1, True), (2, True), (5, True), (1, False)])
@pytest.mark.parametrize("num_envs", [1, 3])
def test_an_observation_of_another_shape_ends_the_run_with_a_checkpoint(train, tmp_path, num_envs, size, sync_envs):
    """One number would fill all places of a row, and more of them would end in a traceback."""
    settings = {"env_id": "tiny_envs:Odd-v0", "env_kwargs": f'{{"what": "shape", "size": {size}}}'}
    with pytest.raises(SystemExit) as end:
        train("dqn", num_envs=num_envs, sync_envs=sync_envs, **settings)
    assert "error: ValueError: " in end.value.code and "--resume" in end.value.code
    (checkpoint,) = tmp_path.rglob("checkpoint.pt")
    assert 0 < torch.load(checkpoint, weights_only=True)["global_step"] < 100


def test_names_in_info_may_be_anything(train):
    run = train("ppo", env_id="tiny_envs:Odd-v0", env_kwargs='{"what": "info"}')
    assert {name for name in run.lines[-1] if name.startswith("info/")} == {"info/own"}


def test_decimals_in_info_are_kept_beside_integers(train):
    """In worker processes, whose numbers Gymnasium puts into one array, of the type of the first."""
    run = train("ppo", env_id="tiny_envs:Odd-v0", env_kwargs='{"what": "types"}', num_envs=3, num_minibatches=1)
    assert run.lines[-1]["info/part"] == pytest.approx((1 + 0.75 + 0.75) / 3)


@pytest.mark.parametrize(("name", "num_envs"), [("ppo", 1), ("ppo", 3), ("ppo_env_pool", None)])
def test_what_else_is_in_info_does_not_matter(train, name, num_envs):
    """Gymnasium would make one array of all environments' values, of the shape and type of the first."""
    more = {} if num_envs is None else {"num_envs": num_envs, "num_minibatches": 1}
    run = train(name, env_id="tiny_envs:Odd-v0", env_kwargs='{"what": "arrays"}', **more)
    names = {name for name in run.lines[-1] if name.startswith("info/")}
    assert names - {"info/any"} == {"info/own"}


@pytest.mark.parametrize("num_envs", [1, 3])
def test_an_error_that_cannot_be_pickled_ends_the_run_with_a_checkpoint(train, tmp_path, num_envs):
    """A worker process can't send it, and the parent would wait for it."""
    with pytest.raises(SystemExit) as end:
        train("dqn", env_id="tiny_envs:Odd-v0", env_kwargs='{"what": "error"}', num_envs=num_envs)
    assert "OfNoModule: out of order" in end.value.code and "--resume" in end.value.code
    assert list(tmp_path.rglob("checkpoint.pt"))


@pytest.mark.parametrize("num_envs", [1, 3])
def test_an_environment_that_exits_ends_the_run_with_a_checkpoint(train, tmp_path, num_envs):
    with pytest.raises(SystemExit) as end:
        train("dqn", env_id="tiny_envs:Odd-v0", env_kwargs='{"what": "exit"}', num_envs=num_envs)
    assert "error: " in end.value.code and "SystemExit" in end.value.code and "--resume" in end.value.code
    assert list(tmp_path.rglob("checkpoint.pt"))


@pytest.mark.slow
def test_programs_that_an_environment_starts_hear_a_signal(make):
    """In a worker process, which itself ignores those that are meant for the run."""
    envs = make("tiny_envs:Starting-v0", 2, env_backend="gymnasium")
    assert "worker processes" in envs.summary
    np.testing.assert_array_equal(envs.reset(), -15)


def test_the_number_of_threads_of_workers_is_not_that_of_the_run(monkeypatch):
    for value in (None, "3"):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if value:
            monkeypatch.setenv("OMP_NUM_THREADS", value)
        with ENVS.light_start():
            assert os.environ["OMP_NUM_THREADS"] == "1"
        assert os.environ.get("OMP_NUM_THREADS") == value


@pytest.mark.parametrize("env_id", ["tiny_envs:Scaled-v0", "tiny_envs:ScaledLine-v0"])
@pytest.mark.parametrize("num_envs", [1, 2])
def test_floats_by_a_space_of_integers_are_refused(make, capsys, env_id, num_envs):
    """Which would be rounded to 0 where they are stored by their space; which is so depends on how they are stepped."""
    with pytest.raises(SystemExit):
        make(env_id, num_envs, env_backend="gymnasium").reset()
    assert "observations are floats, but the space has integers" in capsys.readouterr().err


def test_an_error_is_explained_where_no_terminal_is_left(make):
    with mock.patch("traceback.print_exception", side_effect=BrokenPipeError):
        assert make("CartPole-v1", 1).explain(ValueError("this")) == "ValueError: this"


def test_workers_that_do_not_end_are_killed(train):
    start = time.monotonic()
    run = train("ppo", env_id="tiny_envs:Odd-v0", env_kwargs='{"what": "close"}', num_envs=3, num_minibatches=1)
    assert run.lines and time.monotonic() - start < 60


def has_own_signals(queue) -> None:
    script = load("ppo")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    script.make_env("CartPole-v1", {}).close()
    queue.put(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and threading.active_count() == 1)


def test_a_child_process_that_trains_is_no_worker():
    """It is ended by signals, and not with its parent."""
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=has_own_signals, args=(queue,))
    process.start()
    process.join(60)
    assert process.exitcode == 0 and queue.get()


HANGS = """
import gymnasium as gym, numpy as np, time

class Hang(gym.Env):
    observation_space, action_space = gym.spaces.Box(-1, 1, (3,)), gym.spaces.Box(-1, 1, (1,))

    def reset(self, *, seed=None, options=None):
        return np.zeros(3, np.float32), {}

    def step(self, action):
        while True:
            time.sleep(0.1)

gym.register("Hang-v0", Hang)
"""


@pytest.mark.slow
def test_workers_that_hang_end_with_their_parent(tmp_path):
    """Whatever ends it, without time to clean up: as Ray ends a runner that is overdue, or the kernel a process."""
    (tmp_path / "hangs.py").write_text(HANGS)
    code = (
        "import helpers, os, threading\n"
        "script = helpers.load('ppo_continuous_action')\n"
        "if __name__ == '__main__':\n"
        "    envs = script.Envs(script.Args(env_id='hangs:Hang-v0', num_envs=2), [1, 2])\n"
        "    envs.reset()\n"
        "    script.Path('pids').write_text(' '.join(str(process.pid) for process in envs.vector.processes))\n"
        "    threading.Timer(0.5, lambda: os._exit(0)).start()\n"
        "    envs.step(script.np.zeros((2, 1), script.np.float32))\n"
    )
    (tmp_path / "main.py").write_text(code)
    paths = os.pathsep.join([str(tmp_path), str(ROOT / "tests"), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": paths}
    with (tmp_path / "output").open("w") as output:  # a pipe would stay open in what hangs
        program = [sys.executable, str(tmp_path / "main.py")]
        subprocess.run(program, cwd=tmp_path, env=environment, stdout=output, stderr=output, check=True, timeout=120)
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and any(is_alive(pid) for pid in pids):
        time.sleep(0.2)
    left = [pid for pid in pids if is_alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert len(pids) == 2 and not left


@pytest.mark.slow
def test_workers_get_a_class_that_is_registered_by_the_name_of_the_main_module(tmp_path):
    """Which they do not import."""
    code = (
        "import helpers, numpy, gymnasium as gym\n"
        "class Own(gym.Env):\n"
        "    observation_space, action_space = gym.spaces.Box(-1, 1, (3,)), gym.spaces.Discrete(2)\n"
        "    reset = lambda self, **_: (numpy.full(3, 0.5, numpy.float32), {})\n"
        "if __name__ == '__main__':\n"
        "    gym.register('Own-v0', '__main__:Own')\n"
        "    script = helpers.load('ppo')\n"
        "    envs = script.Envs(script.Args(env_id='Own-v0', num_envs=2), [1, 2])\n"
        "    assert (envs.reset() == 0.5).all() and envs.vector.processes\n"
        "    envs.close()\n"
    )
    (tmp_path / "main.py").write_text(code)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT)])}
    program = [sys.executable, str(tmp_path / "main.py")]
    subprocess.run(program, cwd=tmp_path, env=environment, check=True, timeout=120)


def test_mujoco_may_say_that_a_simulation_is_unstable(capfd):
    """Then it resets the physics within an episode. Nothing else would show that; what is deprecated is not said."""
    env = ENVS.make_env(gym.registry["HalfCheetah-v4"], {})
    env.reset(seed=1)
    assert "MuJoCo" not in capfd.readouterr().err
    env.unwrapped.data.qvel[:] = 1e12
    env.step(env.action_space.sample())
    assert "MuJoCo: " in (said := capfd.readouterr().err) and "unstable" in said
