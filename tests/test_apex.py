"""Ape-X DQN over Ray: its sum tree, its fragments and its replay, each against a naive one, and what may die.

Runners, the cluster and their faults are the text that test_impala.py is about; here is what is new.
"""

import os
import signal
import time
from collections import defaultdict
from copy import deepcopy
from types import SimpleNamespace
from unittest import mock

import gymnasium as gym
import helpers
import numpy as np
import pytest
import tiny_envs
import torch
from graph_emulator import use_graphs
from helpers import in_float64, load, on_ray, without_times
from parity import CLOSE, assert_agree, weights_of
from test_math import episodes, rollouts
from torch._dynamo.utils import counters

EAGER, COMPILED = "apex_dqn_ray", "apex_dqn_ray_torchcompile"
SCRIPT = load(EAGER)
GAMMA = 0.9
SMALL = {
    "env_id": "tiny_envs:DiscreteStream-v0", "num_runners": 0, "envs_per_runner": 4, "fragment_steps": 8,
    "total_timesteps": 800, "learning_starts": 100, "buffer_size": 320, "batch_size": 16, "samples_per_insert": 2.0,
    "target_network_frequency": 10, "log_every": 50, "gamma": GAMMA, "device": "cpu", "tensorboard": False,
}  # fmt: skip


OTHER = {"dueling": True, "double_dqn": False, "clip_rewards": True}


@pytest.fixture
def train(tmp_path):
    return helpers.trainer(tmp_path, EAGER, SMALL)


def arguments(**settings):
    return SCRIPT.Args(**SMALL | settings)


# The sum tree


@pytest.mark.parametrize("num_leaves", [1, 2, 3, 64, 65, 1000])
def test_each_sum_is_that_of_a_table(num_leaves):
    """Also after a batch that names a leaf twice: its last priority counts."""
    rng, tree, table = np.random.default_rng(num_leaves), SCRIPT.SumTree(num_leaves), np.zeros(num_leaves)
    for count in (1, 5, 40, 300):
        leaf, priority = rng.integers(num_leaves, size=count), rng.random(count) * (rng.random(count) < 0.8)
        tree[leaf] = priority
        for i, x in zip(leaf, priority, strict=True):
            table[i] = x
        np.testing.assert_array_equal(tree[np.arange(num_leaves)], table)
        assert tree.sums[1] == pytest.approx(table.sum(), rel=1e-12)
        size = len(tree.sums) // 2
        np.testing.assert_allclose(tree.sums[1:size], tree.sums[2::2] + tree.sums[3::2], rtol=1e-12)


@pytest.mark.parametrize("num_leaves", [2, 7, 60, 1000])
def test_leaves_are_drawn_in_proportion_to_their_priorities(num_leaves):
    """By a chi-square test, after the tree was written over more than once; a leaf of priority 0 never is."""
    np.random.seed(1)
    rng, tree = np.random.default_rng(num_leaves), SCRIPT.SumTree(num_leaves)
    for first in range(0, 5 * num_leaves, 3):  # round and round
        tree[np.arange(first, first + 3) % num_leaves] = rng.gamma(1.0, size=3) * (rng.random(3) < 0.8)
    tree[np.array([0, num_leaves - 1])] = 2.0, 1.0
    priority, draws = tree[np.arange(num_leaves)], 0
    counts = np.zeros(num_leaves)
    for count in [1] * 2000 + [64] * 300 + [512] * 100:
        counts += np.bincount(tree.sample(count).ravel(), minlength=num_leaves)
        draws += count
    expected = draws * priority / priority.sum()
    assert not counts[priority == 0].any()
    counts, expected = counts[expected > 5], expected[expected > 5]
    chi_square, freedom = ((counts - expected) ** 2 / expected).sum(), len(expected) - 1
    assert freedom >= 1 and chi_square < freedom + 5 * np.sqrt(2 * freedom)  # five standard deviations


def test_rounding_never_draws_a_leaf_of_priority_zero():
    rng = np.random.default_rng(1)
    for _ in range(200):
        tree, num_leaves = SCRIPT.SumTree(100), 100
        tree[np.arange(num_leaves)] = 10.0 ** rng.uniform(-12, 12, num_leaves) * (rng.random(num_leaves) < 0.3)
        tree[np.array([rng.integers(num_leaves)])] = 1e-12
        with mock.patch("numpy.random.random", lambda count: rng.choice([0.0, 1 - 2**-53], count)):
            assert (tree[tree.sample(512)] > 0).all()


@pytest.mark.alone
def test_a_million_priorities_are_sampled_at_half_a_million_a_second(capsys):
    """In batches of 512, on one core of a slow machine. The median of many, as others may be busy."""
    tree, seconds = SCRIPT.SumTree(2**20), []
    tree[np.arange(2**20)] = np.random.default_rng(1).random(2**20)
    for _ in range(400):
        start = time.perf_counter()
        tree.sample(512)
        seconds.append(time.perf_counter() - start)
    rate = 512 / np.median(seconds)
    with capsys.disabled():
        print(f" {rate / 1e6:.1f} M samples/s", end="")
    assert rate > 0.5e6


# Returns and fragments


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_n_step_returns_are_sums_within_each_episode(n):
    """Across terminations, truncations and resets. Of rows that are resets, nothing is asked."""
    for rollout in rollouts(np.random.default_rng(n), [40] * 5):
        reward, terminated, truncated, _ = rollout
        total, discount, steps = load(in_float64(EAGER)).n_step_returns(reward, terminated, truncated, n, GAMMA)
        assert total.shape == (40 - n, 3)
        for env, first, last in episodes(*rollout):
            for t in range(first, min(last + 1, len(total))):
                end = min(t + n - 1, last)
                expected = sum(GAMMA ** (k - t) * reward[k, env] for k in range(t, end + 1))
                assert total[t, env] == pytest.approx(expected, rel=1e-12)
                assert steps[t, env] == end - t + 1
                follows = 0 if terminated[end, env] else GAMMA ** (end - t + 1)
                assert discount[t, env] == pytest.approx(follows, rel=1e-12)


def runner_of(args, monkeypatch):
    """A runner, and all that its environments go through: (observation, action, reward, flags, what follows)."""
    runner, seen = SCRIPT.Runner(args, list(range(1, args.envs_per_runner + 1))), []
    step, first = runner.envs.step, runner.actions.start

    def recording(action):
        before, (obs, reward, *flags) = runner.obs.copy(), step(action)
        seen.append((before, action - first, reward, *flags, obs.copy()))
        return obs, reward, *flags

    monkeypatch.setattr(runner.envs, "step", recording)
    return runner, seen


def naive_transitions(seen, n: int) -> dict:
    """(environment, step) -> observation, action, n-step return, discount, the observation that follows."""
    obs, action, reward, terminated, truncated, after = (np.array(x) for x in zip(*seen, strict=True))
    found = {}
    for env in range(obs.shape[1]):
        is_reset = False
        for t in range(len(obs) - n):
            done = terminated[t, env] or truncated[t, env]
            if not is_reset:
                total, discount, k = 0.0, 1.0, t
                while True:
                    total += discount * reward[k, env]
                    discount *= GAMMA * (not terminated[k, env])
                    if terminated[k, env] or truncated[k, env] or k == t + n - 1:
                        break
                    k += 1
                found[env, t] = obs[t, env], action[t, env], total, discount, after[k, env]
            is_reset = done
    return found


def replay_of(args, runner, num_fragments: int):
    """A replay with fragments of the runner; and, of each transition in it, (environment, step)."""
    replay = SCRIPT.PrioritizedReplay(args, runner.envs.observation_space, args.buffer_size)
    weights = SCRIPT.get_weights(runner.network)
    for version in range(num_fragments):
        replay.add(runner.sample(version, weights)[1])
    fragment, rest = np.divmod(np.arange(num_fragments * replay.fragments.size), replay.fragments.size)
    t, env = np.divmod(rest, args.envs_per_runner)
    return replay, list(zip(env, fragment * args.fragment_steps + t - args.n_step, strict=True))


CUT = '{"max_episode_steps": 13}'
GAMES = {"envs_per_runner": 2, "fragment_steps": 8, "buffer_size": 64}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    "settings",
    [
        {"env_id": "tiny_envs:Choose-v0"},
        {"env_id": "CartPole-v1", "dueling": True},
        {"env_id": "Breakout-v5", "env_kwargs": CUT} | GAMES,
    ],
    ids=["both-ends", "dueling", "frames"],
)
def test_the_replay_holds_what_the_environments_went_through(monkeypatch, settings, n):
    """Each transition of whole episodes once, over the borders of fragments; stacks of frames are those that were seen.

    Its priority is the error of the values by which the runner acted.
    """
    args = arguments(n_step=n, **settings)
    runner, seen = runner_of(args, monkeypatch)
    replay, steps = replay_of(args, runner, 4)
    leaf = np.flatnonzero(replay.tree[np.arange(len(steps))])
    expected = naive_transitions(seen, n)
    assert {steps[i] for i in leaf} == expected.keys()
    _, obs, next_obs, rows = replay.fragments.read(leaf)
    priority = replay.tree[leaf] ** (1 / args.priority_exponent)
    ends = set()
    with torch.no_grad():
        q, next_q = (runner.network(torch.from_numpy(x)).numpy() for x in (obs, next_obs))
    for i, index in enumerate(leaf):
        first, action, total, discount, after = expected[steps[index]]
        np.testing.assert_array_equal(obs[i], first.astype(obs.dtype))
        np.testing.assert_array_equal(next_obs[i], after.astype(obs.dtype))
        np.testing.assert_allclose(rows[i], [action, total, discount], rtol=1e-5, atol=1e-6)
        assert priority[i] == pytest.approx(abs(total + discount * next_q[i].max() - q[i, action]), rel=1e-3, abs=1e-4)
        ends.add(round(float(discount), 4))
    assert len(ends) > 1 or n == 1


def test_each_environment_explores_by_its_own_epsilon():
    """Those of a second runner go on where those of the first end; with weights of 0 the greedy action is the first."""
    args = arguments(num_runners=2, env_id="tiny_envs:Choose-v0", fragment_steps=1000)
    runner, shares = SCRIPT.Runner(args, [1, 2, 3, 4]), []
    numbers = np.logspace(-6, 0, args.fragment_steps)[:, None].repeat(4, axis=1)  # where below epsilon, it explores
    second = lambda _, size: np.ones(size, dtype=int)  # noqa: E731
    runner.rng = SimpleNamespace(random=lambda _: numbers, integers=second)
    for first in (0, 4):
        runner.first_env = first
        for version in range(2):  # a fragment begins with the last rows of the one before
            _, (_, _, columns) = runner.sample(version, np.zeros_like(SCRIPT.get_weights(runner.network)))
        shares.append((columns[..., 0] == 1).mean(0))
    epsilon = 0.4 ** (1 + 7 * np.arange(8) / 7)
    np.testing.assert_allclose(np.concatenate(shares), (numbers[:, :1] < epsilon).mean(0), atol=1e-9)
    assert len(np.unique(shares)) == 8


def test_rewards_are_cut_down_to_learn():
    """Not so the returns in the log."""
    found = []
    for clip_rewards in (False, True):
        args = arguments(env_id="tiny_envs:Choose-v0", n_step=1, clip_rewards=clip_rewards)
        runner = SCRIPT.Runner(args, [1, 2, 3, 4])
        torch.manual_seed(1)
        weights = SCRIPT.get_weights(SCRIPT.QNetwork(runner.envs.observation_space, 3, dueling=False))
        found.append([runner.sample(version, weights) for version in range(3)])
    for (report, (_, _, raw)), (ours, (_, _, columns)) in zip(*found, strict=True):
        np.testing.assert_array_equal(columns[..., 1], raw[..., 1].clip(-1, 1))
        assert report["episodes"] == ours["episodes"] and raw[..., 1].min() < -1


def test_returns_in_the_log_are_those_of_environments_that_hardly_explore():
    """Of four, the last two do so by less than 1 %; the returns of the others have a name of their own."""
    args = arguments(env_id="tiny_envs:Choose-v0", fragment_steps=200, epsilon_base=0.28)  # 0.28, 0.014, 7e-4, 4e-5
    runner, expected = SCRIPT.Runner(args, [1, 2, 3, 4]), ([], [])
    total, step = np.zeros(4), runner.envs.step

    def note(action):
        result = _, reward, terminated, truncated = step(action)
        np.add(total, reward, out=total)
        for env in np.flatnonzero(terminated | truncated):
            expected[env // 2].append(total[env])
            total[env] = 0
        return result

    with mock.patch.object(runner.envs, "step", note):
        report, _ = runner.sample(0, SCRIPT.get_weights(runner.network))
    assert [x for x, _ in report["episodes"]] == pytest.approx(expected[1]) and len(expected[1]) > 20
    assert report["infos"]["return_while_exploring"] == pytest.approx(expected[0])


# The replay


def filled(num_fragments: int, **settings):
    """A replay with made-up fragments, of which each row says where it is from."""
    args = arguments(**settings)
    space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    replay = SCRIPT.PrioritizedReplay(args, space, args.buffer_size)
    for number in range(num_fragments):
        rows = args.fragment_steps + args.n_step, args.envs_per_runner
        t, env = np.indices(rows)
        obs = np.stack([np.full(rows, number), t * 10 + env], axis=2).astype(np.float32)
        columns = np.ones((args.fragment_steps, args.envs_per_runner, 5), dtype=np.float32)
        columns[..., 3] = args.n_step
        replay.add((obs, np.zeros(rows, dtype=np.uint8), columns))
    return replay


def test_the_oldest_fragment_is_written_over():
    replay = filled(23)  # of ten that there is room for
    _, obs, next_obs, _ = replay.fragments.read(np.arange(320))
    assert sorted(set(obs[:, 0])) == list(range(13, 23)) and (next_obs[:, 0] == obs[:, 0]).all()
    assert (next_obs[:, 1] - obs[:, 1] == 30).all() and len(np.unique(obs, axis=0)) == 320


def test_a_priority_that_comes_too_late_changes_nothing():
    """Its transition has been written over; that of one that is still there is changed."""
    replay = filled(10)
    place, *_ = replay.fragments.read(np.array([0, 33]))  # of the first two fragments
    fragments = replay.fragments
    replay.add((fragments.obs[0], fragments.age[0], fragments.columns[0]))
    replay.prioritize(place, np.array([7.0, 7.0]))
    assert replay.tree[np.array([0])] == 1 and replay.tree[np.array([33])] == pytest.approx(7**0.6, rel=1e-5)


def test_priorities_change_what_is_sampled():
    """A transition whose error is 30 times that of the others comes 30 ** alpha times as often, and weighs less.

    A uniform replay (alpha = 0) does not pass what comes first.
    """
    shares = {}
    for alpha in (0.6, 0.0):
        np.random.seed(1)
        replay = filled(10, priority_exponent=alpha, batch_size=64)
        place, *_ = replay.fragments.read(np.arange(320))
        replay.prioritize(place, np.where(np.arange(320) == 77, 30.0, 1.0))
        batches = [replay.sample(10) for _ in range(50)]
        shares[alpha] = np.mean([(batch[0] % 320 == 77).mean() for batch in batches])
    ratio = 30**0.6
    assert shares[0.6] == pytest.approx(ratio / (ratio + 319), rel=0.1)
    assert shares[0.0] == pytest.approx(1 / 320, rel=0.3)
    replay = filled(10, batch_size=64)
    replay.prioritize(place, np.where(np.arange(320) < 160, 30.0, 1.0))
    place, *_, rows = replay.sample(1)
    np.testing.assert_allclose(rows[place % 320 < 160, 3], ratio**-0.4, rtol=1e-5)
    np.testing.assert_allclose(rows[place % 320 >= 160, 3], 1, rtol=1e-5)


@pytest.mark.parametrize("exponent", [0.0, 0.6])
def test_rows_that_are_no_transitions_are_never_drawn(monkeypatch, exponent):
    """By --priority-exponent 0, too: 0**0 is 1."""
    args = arguments(env_id="tiny_envs:Choose-v0", priority_exponent=exponent, batch_size=64)
    runner, seen = runner_of(args, monkeypatch)
    replay, steps = replay_of(args, runner, 4)
    expected = naive_transitions(seen, args.n_step).keys()
    drawn = {steps[place % 320] for _ in range(20) for place in replay.sample(10)[0].ravel()}
    assert drawn == expected and len(expected) < len(steps)


def test_batches_drawn_together_are_each_a_batch():
    """Each spreads over all priorities, and its importance weights are relative to its own rarest transition."""
    np.random.seed(1)
    replay = filled(10, batch_size=64, importance_exponent=1.0)
    place, *_ = replay.fragments.read(np.arange(320))
    error = np.linspace(1, 30, 320)
    replay.prioritize(place, error)
    place, obs, next_obs, rows = replay.sample(5)
    assert len(place) == len(obs) == len(next_obs) == len(rows) == 5 * 64
    priority = (error + 1e-6) ** 0.6
    part = (priority.cumsum() - priority / 2) / priority.sum() * 64  # in which of the 64 parts a transition is, roughly
    for leaf, weight in zip(place.reshape(5, 64) % 320, rows[:, 3].reshape(5, 64), strict=True):
        assert np.abs(part[leaf] - np.arange(64) - 0.5).max() < 1.1
        np.testing.assert_allclose(weight, priority[leaf].min() / priority[leaf], rtol=1e-5)


def test_errors_find_their_transitions_again():
    """Batches drawn two by two: each error becomes the priority of its transition, when the next two are through."""
    args = arguments(batch_size=8, priority_exponent=1.0)
    space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    replay = SCRIPT.LocalReplay(args, mock.Mock(spaces=(space, None)), torch.device("cpu"))
    shard = filled(10, batch_size=8, priority_exponent=1.0)
    replay.shard, replay.prioritize, replay.at_once = shard, shard.prioritize, 2
    leaves = np.arange(320)
    numbers = {tuple(obs): leaf for leaf, obs in enumerate(shard.fragments.read(leaves)[1])}
    expected = np.ones(320)
    for batch in range(4):
        obs, *_ = replay.next_batch(100)
        assert len(obs) == 8 and (shard.tree[leaves] == 1).all()
        error = np.arange(8.0) + 10 * (batch + 1)
        if batch < 2:
            expected[[numbers[tuple(row)] for row in obs.numpy()]] = error
        replay.write_back(torch.from_numpy(error))
    np.testing.assert_allclose(shard.tree[leaves], expected, rtol=1e-6)
    assert (expected != 1).sum() > 12


def test_a_million_transitions_of_atari_fit_in_8_gb(capfd):
    """By the script's own sum, which it also refuses by; arrays that are not written to take no memory here."""
    space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    args = SCRIPT.Args(env_id="Pong-v5", buffer_size=1_000_000)
    with mock.patch.object(SCRIPT, "free_memory", lambda _: 8e9), mock.patch.object(np, "zeros", lambda *_, **__: []):
        fragments = SCRIPT.Fragments(args, space, args.buffer_size)
    need = int(capfd.readouterr().err.split()[1].replace(",", ""))
    assert fragments.capacity > 999_000 and 7.1e9 < need < 8e9
    with mock.patch.object(SCRIPT, "free_memory", lambda _: 7e9), pytest.raises(SystemExit):
        SCRIPT.Fragments(args, space, args.buffer_size)
    assert "--buffer-size 1000000 needs 7.2" in capfd.readouterr().err


def test_replay_is_restored_whole(train):
    saved = train(total_timesteps=400).checkpoint["replay"]
    runners = mock.Mock(spaces=(tiny_envs.LINE, tiny_envs.CHOICE))
    saved["age"] += torch.arange(4, dtype=torch.uint8)  # of frames, which these are not
    replay = SCRIPT.LocalReplay(arguments(), runners, torch.device("cpu"))
    replay.load_state_dict(saved)
    for name, x in replay.state_dict().items():
        assert np.array_equal(x, saved[name]), name
    assert saved["columns"].any() and len(saved["priorities"].unique()) > 100


def test_priorities_are_errors_whatever_their_weight(train, monkeypatch):
    """Absolute temporal differences; also one of zero is a priority, if the least."""
    seen = {"errors": []}
    open_run, write_back, sample = SCRIPT.Run.open, SCRIPT.LocalReplay.write_back, SCRIPT.LocalReplay.next_batch

    def note_networks(run, runners, **parts):
        seen["networks"] = parts["network"], parts["target_network"]
        open_run(run, runners, **parts)

    def note_batch(replay, count):
        if (batch := sample(replay, count)) is not None:
            (obs, next_obs, rows), (network, target) = batch, seen["networks"]
            action, total, discount, _ = rows.unbind(1)
            with torch.no_grad():
                best = target(next_obs).gather(1, network(next_obs).argmax(1, keepdim=True)).squeeze(1)
                values = network(obs)
            seen["q_values"] = values[range(len(obs)), action.long()]
            seen["expected"] = (total + discount * best - seen["q_values"]).abs()
            seen["weight"] = rows[:, 3]
        return batch

    def note_errors(replay, error):
        torch.testing.assert_close(error, seen["expected"], rtol=1e-4, atol=1e-5)
        seen["errors"].append(error)
        write_back(replay, error)

    monkeypatch.setattr(SCRIPT.Run, "open", note_networks)
    monkeypatch.setattr(SCRIPT.LocalReplay, "next_batch", note_batch)
    monkeypatch.setattr(SCRIPT.LocalReplay, "write_back", note_errors)
    line = train(importance_exponent=1.0).lines[-1]
    assert len(seen["errors"]) > 50
    loss = 0.5 * (seen["weight"] * seen["expected"].square()).mean()
    for name, value in ("td_loss", loss), ("q_values", seen["q_values"].mean()), ("td_error", seen["expected"].mean()):
        assert line[f"losses/{name}"] == pytest.approx(value.item(), rel=1e-4), name
    replay = filled(10)
    place, *_ = replay.fragments.read(np.arange(320))
    replay.prioritize(place, np.zeros(320))
    assert 0 < replay.tree.sums[1] < 1


def test_errors_of_updates_become_priorities(train):
    """Those in the checkpoint are not those that runners gave."""
    replay = train().checkpoint["replay"]
    first = replay["columns"][..., 4].double().flatten() ** 0.6
    given = replay["priorities"] > 0
    changed = ~torch.isclose(replay["priorities"], first, rtol=1e-5)
    assert (given == (first > 0)).all() and 0.2 < changed[given].double().mean() < 1


# Runs in one process


@pytest.mark.parametrize("name", [EAGER, COMPILED])
def test_run_is_reproduced_to_the_last_bit(train, name):
    a, b = (train(name, **({"compile": False} if name == COMPILED else {})) for _ in range(2))
    assert without_times(a).metrics() == without_times(b).metrics() and len(a.lines) > 10
    assert torch.equal(weights_of(a), weights_of(b))
    assert torch.equal(a.checkpoint["replay"]["priorities"], b.checkpoint["replay"]["priorities"])


@pytest.mark.parametrize("double_dqn", [False, True])
def test_updates_descend_the_weighted_error(train, monkeypatch, double_dqn):
    """In float64, each of the last ones; the target network is some updates behind."""
    script, steps, now, differ = load(in_float64(EAGER)), [], {}, []
    open_run, sample, step = script.Run.open, script.LocalReplay.next_batch, script.Adam.step

    def note_networks(run, runners, **parts):
        now["networks"] = parts["network"], parts["target_network"]
        open_run(run, runners, **parts)

    def note_batch(replay, count):
        now["batch"] = sample(replay, count)
        return now["batch"]

    def note_step(optimizer, gradients):
        steps.append((gradients, now["batch"], *map(deepcopy, now["networks"])))
        step(optimizer, gradients)

    monkeypatch.setattr(script.Run, "open", note_networks)
    monkeypatch.setattr(script.LocalReplay, "next_batch", note_batch)
    monkeypatch.setattr(script.Adam, "step", note_step)
    train(in_float64(EAGER), double_dqn=double_dqn, learning_rate=1e-2, target_network_frequency=30)
    for gradients, (obs, next_obs, rows), network, target_network in steps[-40:]:
        loss = 0.0
        for before, after, (action, total, discount, weight) in zip(obs, next_obs, rows, strict=True):
            following = target_network(after[None])[0].detach()
            by_network = network(after[None])[0].argmax()
            best = by_network if double_dqn else following.argmax()
            differ.append(bool(by_network != following.argmax()))
            error = total + discount * following[best] - network(before[None])[0, int(action)]
            loss = loss + 0.5 * weight * error**2 / len(obs)
        expected = script.clip(torch.autograd.grad(loss, list(network.parameters())), 40.0)
        for found, x in zip(gradients, expected, strict=True):
            torch.testing.assert_close(found, x, rtol=1e-6, atol=1e-9)
        assert rows[:, 3].unique().numel() > 1
    assert any(differ)


def test_gradients_are_clipped_by_the_setting(train, monkeypatch):
    clip, given = SCRIPT.clip, set()
    monkeypatch.setattr(SCRIPT, "clip", lambda x, max_norm: (given.add(max_norm), clip(x, max_norm))[1])
    train(max_grad_norm=0.3)
    assert given == {0.3}


@pytest.mark.parametrize("settings", [{}, OTHER], ids=["defaults", "other"])
@pytest.mark.parametrize("compile", [False, True])
def test_compiled_twin_computes_the_same(train, settings, compile):
    """In float64, over a whole run; compiled, as one graph and once."""
    run = train(in_float64(EAGER), **settings)
    counters.clear()
    with torch._inductor.config.patch(fallback_random=True), torch._dynamo.config.patch(error_on_recompile=True):
        twin = train(in_float64(COMPILED), compile=compile, **settings)
    assert counters["stats"]["unique_graphs"] == compile and not counters["graph_break"]
    assert run.checkpoint["num_updates"] > 80 and len({line["losses/td_loss"] for line in run.lines[3:]}) > 10
    assert_agree(without_times(twin), without_times(run), rel=CLOSE)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_twin_whose_updates_are_replayed_computes_the_same(train, monkeypatch, backend):
    """By CUDA graphs, which are emulated here: what they freeze does not matter."""
    run = train(in_float64(EAGER))
    with monkeypatch.context() as patch:
        graphs = use_graphs(patch, load(in_float64(COMPILED)), backend)
        twin = train(in_float64(COMPILED), compile=backend is not None)
    assert len(graphs) == 1 and graphs[0].counter > graphs[0].warmup + 5
    assert_agree(without_times(twin), without_times(run), rel=CLOSE)


def test_target_network_is_copied_when_due(train, monkeypatch):
    """From the network, which stays as it is."""
    updates, moves = [], []
    step, move = SCRIPT.Adam.step, SCRIPT.move_towards

    def move_and_look(targets, weights):
        before = [x.detach().clone() for x in weights]
        assert list(map(id, weights)) == list(map(id, updates[-1]))  # those of the optimizer
        assert not all(map(torch.equal, targets, before))
        move(targets, weights)
        assert all(map(torch.equal, targets, before)) and all(map(torch.equal, weights, before))
        moves.append(len(updates))

    def step_and_count(adam, gradients):
        updates.append(adam.weights)
        step(adam, gradients)

    def publish(runners, version, weights):
        """What acts is the network that learns, not its target."""
        if updates:
            np.testing.assert_array_equal(weights, torch.cat([x.detach().reshape(-1) for x in updates[0]]).numpy())
        runners.weights = version, weights

    monkeypatch.setattr(SCRIPT.Adam, "step", step_and_count)
    monkeypatch.setattr(SCRIPT, "move_towards", move_and_look)
    monkeypatch.setattr(SCRIPT.OneRunner, "publish", publish)
    run = train(target_network_frequency=7)
    assert moves == list(range(7, run.checkpoint["num_updates"] + 1, 7)) and len(moves) > 5


@pytest.mark.parametrize("save_replay", [True, False])
def test_resumed_run_goes_on(train, save_replay):
    """With its replay at once, in the next place of it; without it, when the replay is filled again."""
    run = train(total_timesteps=400, save_replay=save_replay)
    assert ("replay" in run.checkpoint) == save_replay
    on = helpers.call(EAGER, resume=str(run.run_dir), device="cpu", total_timesteps=460 if save_replay else 700)
    assert on.lines[: len(run.lines)] == run.lines
    steps = on.steps()[-1] - run.steps()[-1]
    learnt = steps if save_replay else steps - SMALL["learning_starts"]
    updates = on.checkpoint["num_updates"] - run.checkpoint["num_updates"]
    late = 0 if save_replay else 32  # the replay is full within a fragment, which has so many steps
    assert (learnt - late) * 2 / 16 - 1 <= updates <= learnt * 2 / 16 + 1 and updates > 3
    if save_replay:
        before, after = run.checkpoint["replay"], on.checkpoint["replay"]
        assert after["num_added"] > before["num_added"] >= 10
        kept = slice(before["num_added"] % 10 + 2, None)
        assert torch.equal(before["obs"][kept], after["obs"][kept]) and not torch.equal(before["obs"], after["obs"])


def test_frames_are_learnt_from_by_convolutions(train):
    """A stack of EnvPool's goes through the network as it is; the policy of the checkpoint acts."""
    settings = {"env_id": "Pong-v5", "envs_per_runner": 2, "total_timesteps": 96, "learning_starts": 30}
    run = train(**settings, buffer_size=64, log_every=16, dueling=True)
    assert run.checkpoint["num_updates"] > 4
    names = run.checkpoint["network"].keys()
    assert {"features.conv1.weight", "advantage.2.weight", "value.2.weight"} <= names
    space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    envs = SimpleNamespace(observation_space=space, action_space=gym.spaces.Discrete(6))
    obs = np.random.default_rng(1).integers(256, size=(3, 4 * 84 * 84), dtype=np.uint8)
    network = SCRIPT.QNetwork(space, 6, dueling=True)
    network.load_state_dict(run.checkpoint["network"])
    features = network.features
    blocks = SCRIPT.space_to_depth(torch.from_numpy(obs).view(3, 4, 84, 84)).permute(0, 3, 1, 2)
    x = features.conv1(blocks.float() / 255).relu()
    x = features.conv3(features.conv2(x).relu()).relu().permute(0, 2, 3, 1).flatten(1)
    advantage = network.advantage(x)
    expected = network.value(x) + advantage - advantage.mean(1, keepdim=True)
    torch.testing.assert_close(network(torch.from_numpy(obs)), expected, rtol=1e-4, atol=1e-5)
    assert (SCRIPT.load_policy(run.checkpoint, envs)(obs) == expected.argmax(1).numpy()).all()


@pytest.mark.parametrize("num_runners", [0, 1])
@on_ray
def test_a_network_that_diverges_ends_the_run_in_one_line(train, num_runners):
    with pytest.raises(SystemExit) as end:
        train(num_runners=num_runners, learning_rate=1e30, total_timesteps=2000, log_every=1500, checkpoint_every=10**6)
    assert "NaN or infinite" in end.value.code and "\n" not in end.value.code
    assert end.value.code.endswith("; nothing saved yet")


def test_settings_that_cannot_work_are_refused(capfd):
    def refused(**settings):
        return helpers.refused(SCRIPT, capfd, **SMALL | settings)

    assert "--n-step 8 must be less than --fragment-steps 8" in refused(n_step=8)
    assert "--replay-shards needs --num-runners 1 or more" in refused(replay_shards=1)
    assert "--buffer-size 63 is less than two fragments, of 32 transitions each" in refused(buffer_size=63)
    assert "this script is for Discrete actions" in refused(env_id="tiny_envs:Reach-v0")
    assert "--epsilon-base must be at least 0 and at most 1, not 2" in refused(epsilon_base=2.0)
    with mock.patch.object(SCRIPT, "free_memory", lambda _: 1e4):
        assert "--buffer-size 320 needs 0.00 GiB" in refused()


# Over Ray


@on_ray
def test_a_runner_and_a_shard_that_die_cost_what_they_held(train, capfd):
    """The run goes on, what was lost is counted, and samples keep their ratio to steps."""
    log, found = SCRIPT.Run.log, defaultdict(list)

    def first_env(remote):
        return remote.runner.first_env

    def kill(self, metrics):
        log(self, metrics)
        runners, ray = self.envs, self.envs.ray
        if not found["killed"]:
            found["killed"] = [runners.actors[0], runners.actors[-1]]
            for actor in found["killed"]:
                ray.kill(actor)
        elif runners.restarts and len(runners.alive) == 2 and not found["first_envs"]:
            found["first_envs"] = [ray.get(runners.actors[i].__ray_call__.remote(first_env)) for i in (0, 1)]

    # Steps enough for a fast machine to see the runner's return, which takes two or three seconds
    settings = {"num_runners": 2, "replay_shards": 2, "log_every": 1000, "total_timesteps": 90_000, "batch_size": 64}
    with mock.patch.object(SCRIPT.Run, "log", kill):
        run = train(**settings, learning_starts=1000, buffer_size=20_000, fragment_steps=16, env_id="CartPole-v1")
    last, error = run.lines[-1], capfd.readouterr().err
    assert last["global_step"] >= 90_000 and found["first_envs"] == [0, 4]
    assert last["runners/restarts"] == last["replay/restarts"] == 1 and "runner 0 (process" in error
    (line,) = [line for line in error.splitlines() if line.startswith("replay shard 0 died: ")]
    assert 500 < last["replay/lost"] <= 10_000 and f"; {last['replay/lost']:,} transitions are lost; restart 1" in line
    updates = run.checkpoint["num_updates"]
    assert updates * 64 == pytest.approx(2 * (last["global_step"] - 1000), rel=0.02)
    assert "replay" not in run.checkpoint


@on_ray
def test_shards_learn_what_one_process_learns(train):
    """The same loss at the end, about; with a shard, all transitions go by way of Ray."""
    losses = []
    for settings in ({}, {"num_runners": 1, "replay_shards": 1}):
        run = train(total_timesteps=4000, buffer_size=1600, **settings)
        losses.append(np.mean([line["losses/td_error"] for line in run.lines[-20:]]))
        assert run.checkpoint["num_updates"] == pytest.approx((run.steps()[-1] - 100) / 8, rel=0.02)
    assert losses[1] == pytest.approx(losses[0], rel=0.25)


def test_the_environment_that_explores_least_has_its_returns_logged(train):
    """Whatever it explores: of none is the share of random actions below 1 %."""
    run = train(epsilon_exponent=2.0)
    assert any("charts/episodic_return" in line for line in run.lines)


@pytest.mark.parametrize(
    ("env_id", "env_kwargs"),
    [("Pong-v5", '{"gray_scale": false}'), ("Basic-v1", '{"use_combined_action": true}')],  # Atari, Doom
)
def test_stacks_that_the_replay_could_not_make_again_are_refused(capfd, monkeypatch, tmp_path, env_id, env_kwargs):
    """Colours would be taken for frames. That EnvPool ends episodes with lives is refused for all Ray scripts."""
    monkeypatch.chdir(tmp_path)  # where Doom writes its settings
    settings = {"env_id": env_id, "env_kwargs": env_kwargs, "num_runners": 0, "run_dir": str(tmp_path / "run")}
    with pytest.raises(SystemExit) as end:
        SCRIPT.train(SCRIPT.Args(**settings, buffer_size=1000, learning_starts=100))
    assert end.value.code == 2 and "--env-kwargs gray_scale" in capfd.readouterr().err


def local_replay(shape: tuple[int, ...], **settings) -> SCRIPT.LocalReplay:
    runners = mock.Mock(spaces=(gym.spaces.Box(0, 255, shape, np.uint8), None))
    return SCRIPT.LocalReplay(arguments(buffer_size=128, **settings), runners, torch.device("cpu"))


def test_a_single_frame_and_a_stack_of_its_own_length_are_taken(capfd):
    for shape, env_kwargs in (((1, 84, 84), "{}"), ((4, 84, 84), "{}"), ((2, 84, 84), '[["stack_num", 2]]')):
        assert local_replay(shape, env_kwargs=env_kwargs).shard.fragments.num_frames == shape[0]
    with pytest.raises(SystemExit):
        local_replay((3, 84, 84))
    assert "(3, 84, 84) are no stack of 4 gray frames" in capfd.readouterr().err


def test_what_a_copy_gives_the_replay_is_in_the_checkpoint(capsys):
    """Such as the greatest priority so far; what only one of both has is refused by name."""

    def replay() -> SCRIPT.LocalReplay:
        replay = local_replay((3,))
        replay.shard.most, replay.shard.fragments.extra, replay.shard.tree.seen = 1.0, np.zeros(3), np.float32(2)
        return replay

    first, second = replay(), replay()
    first.shard.most, first.shard.fragments.extra[1], first.shard.tree.seen = 5.0, 7.0, np.float32(3)
    extra = second.shard.fragments.extra
    second.load_state_dict(first.state_dict())
    assert second.shard.most == 5.0 and extra.tolist() == [0, 7, 0] and second.shard.tree.seen == 3
    assert type(second.shard.most) is float and type(second.shard.tree.seen) is np.float32
    with pytest.raises(SystemExit):
        local_replay((3,)).load_state_dict(first.state_dict())
    assert "extra, most, seen of the replay" in capsys.readouterr().err


# Shards, without Ray


class Reference:
    def __init__(self, value):
        self.value = value


class ActorHere:
    """An actor of Ray's in this process, whose calls are done at once."""

    def __init__(self, kind):
        self.actor = kind()

    def __getattr__(self, name):
        return SimpleNamespace(remote=lambda *x: Reference(getattr(self.actor, name)(*x)))


RAY_HERE = SimpleNamespace(
    remote=lambda **_: lambda kind: SimpleNamespace(remote=lambda: ActorHere(kind)),
    get=lambda x, timeout=None: [each.value for each in x] if isinstance(x, list) else x.value,  # noqa: ARG005
    wait=lambda references, **_: (references, []),
    exceptions=SimpleNamespace(RayError=RuntimeError, ObjectLostError=KeyError),
)


def test_shards_draw_numbers_of_their_own():
    seeds = []
    shards = object.__new__(SCRIPT.ReplayShards)
    shards.args, shards.shards, shards.num_given, shards.starting = arguments(), {}, {}, {}
    shards.runners = SimpleNamespace(actors={}, run=SimpleNamespace(step=0), spaces=(None, None))
    shards.remote = mock.Mock()
    shards.remote.remote.return_value.open.remote = lambda _args, _space, seed: seeds.append(seed)
    for shards.restarts in range(2):
        for index in range(3):
            shards.start(index)
    assert len(set(seeds)) == 6


@pytest.fixture
def two_shards():
    """Two shards in this process, of five fragments each: fields of Ray to replace -> the replay."""

    def make(**ray) -> SCRIPT.ReplayShards:
        args = arguments(num_runners=1, replay_shards=2, batch_size=64, priority_exponent=1.0)
        runners = mock.Mock(spaces=(gym.spaces.Box(-np.inf, np.inf, (2,), np.float32), None), actors={})
        runners.run.step, runners.ray = 0, SimpleNamespace(**vars(RAY_HERE) | ray)
        return SCRIPT.ReplayShards(args, runners, torch.device("cpu"))

    with mock.patch("signal.signal"):
        yield make


def test_shards_with_other_packages_are_refused(two_shards, monkeypatch, capsys):
    """At the start, and where one takes the place of a dead one."""
    replay, versions = two_shards(kill=lambda _: None), SCRIPT.versions
    replay.runners.stop.side_effect = SCRIPT.fail
    answer = replay.start(0)
    monkeypatch.setattr(SCRIPT, "versions", lambda: versions() | {"torch": "1.0"})
    with pytest.raises(SystemExit):
        replay.hear(0, answer)
    assert "replay shard 0 has torch 2" in capsys.readouterr().err


def fragment(i: int) -> tuple[np.ndarray, ...]:
    fragments = filled(10).fragments
    return fragments.obs[i], fragments.age[i], fragments.columns[i]


def test_a_shard_that_has_not_started_keeps_nobody_waiting(two_shards):
    """Fragments and requests for batches go to the other one meanwhile; only if none has started, the learner waits."""
    late, waited = [], []

    def wait(references, timeout, **_):
        if timeout and references[0] in late:  # the learner waits for it: here it is ready the second time
            waited.append(late.pop(late.index(references[0])))
            return [], references
        return [x for x in references if x not in late], []

    replay = two_shards(wait=wait, kill=lambda _: None)
    for i in range(4):
        replay.add(fragment(i))
    replay.bury(0, RuntimeError("out of memory"))
    late.append(replay.starting[0])
    for i in range(4, 7):
        replay.add(fragment(i))
    assert replay.num_given == {0: 0, 1: 5}
    assert replay.next_batch(1) is not None and {index for index, _ in replay.asked} == {1} and not waited
    late.clear()
    for i in range(7, 10):
        replay.add(fragment(i))
    assert replay.num_given[0] >= 1 and sum(replay.num_given.values()) == 8 and not replay.starting
    for index in range(2):
        replay.bury(index, RuntimeError("out of memory"))
    late.extend(replay.starting.values())
    replay.add(fragment(0))
    assert len(waited) == 1 and sum(replay.num_given.values()) == 1


def getting_but(lost: list):
    """Ray's `get`, for which some references are lost."""

    def get(x, timeout=None):
        if x in lost:
            raise KeyError  # ObjectLostError, here
        return RAY_HERE.get(x, timeout)

    return get


def test_a_lost_answer_is_not_a_lost_fragment(two_shards):
    """When the machine of a shard dies, its answers go first. What it held is counted when it is found dead."""
    lost = []
    replay = two_shards(get=getting_but(lost), kill=lambda _: None)
    for i in range(4):
        replay.add(fragment(i))
    assert replay.next_batch(1) is not None
    lost.extend(reference for index, reference in replay.asked if index == 0)
    assert lost and all(replay.next_batch(1) is not None for _ in range(4))
    assert replay.num_lost == 0 and replay.num_given == {0: 2, 1: 2}
    replay.bury(0, RuntimeError("its machine died"))
    assert replay.num_lost == 2 * replay.fragment_size


def test_a_fragment_lost_on_its_way_is_counted_once(two_shards):
    """When its runner's machine dies before the shard has fetched it: it is not what the shard loses later."""
    lost = []
    waiting = [True]
    wait = lambda references, **_: ([] if waiting else references, [])  # noqa: E731
    replay = two_shards(get=getting_but(lost), wait=wait, kill=lambda _: None)
    for i in range(4):
        replay.add(fragment(i))
    lost.append(next(reference for reference, (index, _) in replay.adding.items() if index == 0))
    waiting.clear()
    replay.add(fragment(4))
    assert replay.num_lost == replay.fragment_size and replay.num_given == {0: 2, 1: 2}
    replay.bury(0, RuntimeError("its machine died"))
    assert replay.num_lost == 3 * replay.fragment_size


def test_a_signal_between_two_updates_ends_the_run_there(train, monkeypatch):
    """Not after all that are due: a batch of frames takes long. The checkpoint is as of that update."""
    learnt, write_back = [], SCRIPT.Replay.write_back

    def signal_at_the_third(replay, error):
        learnt.append(error)
        write_back(replay, error)
        if len(learnt) == 3:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(SCRIPT.Replay, "write_back", signal_at_the_third)
    with pytest.raises(SystemExit) as end:
        train(samples_per_insert=16.0)
    assert end.value.code == 128 + signal.SIGTERM and len(learnt) == 3


def test_a_signal_while_shards_start_ends_in_one_line(capsys):
    """As it does while runners start."""

    def get(_started, timeout):  # noqa: ARG001
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

    args = arguments(num_runners=1, replay_shards=2)
    runners = mock.Mock(spaces=(gym.spaces.Box(-np.inf, np.inf, (2,), np.float32), None), actors={})
    runners.run.step, runners.ray = 0, SimpleNamespace(**vars(RAY_HERE) | {"get": get})
    # An actor's own process ignores the signal
    with mock.patch.object(SCRIPT.RemoteReplay, "open", lambda *_: ""), pytest.raises(SystemExit) as end:
        SCRIPT.ReplayShards(args, runners, torch.device("cpu"))
    assert end.value.code == 128 + signal.SIGINT and capsys.readouterr().err == "stopped before the run began\n"


def test_what_a_new_shard_refuses_is_said(two_shards):
    """And not what failed because of it."""
    refusal = RuntimeError("")
    refusal.cause = RuntimeError("--buffer-size needs 9 GiB; 1 are free")

    def get(x, timeout=None):
        if getattr(x, "value", None) == "refused":
            raise refusal
        return RAY_HERE.get(x, timeout)

    replay = two_shards(get=get, kill=lambda _: None)
    replay.runners.stop.side_effect = SystemExit
    replay.add(fragment(0))
    with mock.patch.object(SCRIPT.RemoteReplay, "open", lambda *_: "refused"):
        replay.bury(1, RuntimeError("killed"))
    with pytest.raises(SystemExit):
        replay.add(fragment(1))
    assert "9 GiB" in replay.runners.stop.call_args.args[0]


def test_shards_take_turns_and_each_gets_the_errors_of_its_own(two_shards):
    """Ten fragments, of which each of two shards keeps five; batches come from both alike, and errors go back there."""
    replay = two_shards()
    for i in range(10):
        replay.add(fragment(i))
    shards = [replay.shards[i].actor.shard for i in range(2)]
    assert [sorted({*x.fragments.obs[..., 0].ravel()}) for x in shards] == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
    drawn, pending, expected = [], None, [np.ones(160) for _ in range(2)]
    for number in range(1, 21):
        obs = replay.next_batch(1)[0].numpy()
        (shard,) = {*(obs[:, 0] % 2).astype(int)}
        leaf = (obs[:, 0] // 2 * 32 + obs[:, 1] // 10 * 4 + obs[:, 1] % 10).astype(int)
        replay.write_back(torch.full((64,), 10.0 * number))
        if pending:
            expected[pending[0]][pending[1]] = pending[2]
        drawn, pending = [*drawn, shard], (shard, leaf, 10.0 * number)
        for ours, x in zip(expected, shards, strict=True):
            np.testing.assert_allclose(x.tree[np.arange(160)], ours, rtol=1e-5)
    assert drawn.count(0) == drawn.count(1) == 10
