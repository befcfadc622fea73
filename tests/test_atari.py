"""PPO for Atari games: what EnvPool does is understood, scores are true, and both ways to step the games are one."""

import json
import math
import os
import signal
from functools import partial
from pathlib import Path
from typing import NamedTuple

import envpool
import helpers
import numpy as np
import pytest
import torch
import tyro
from helpers import load, needs_cuda
from torch import nn
from torch._dynamo.utils import counters

from benchmarks.tools.evaluate import Options, evaluate
from benchmarks.tools.play import EVALUATION

EAGER, COMPILED = "ppo_atari_envpool", "ppo_atari_envpool_torchcompile"
SCRIPT = load(EAGER)
SMALL = {
    "env_id": "Breakout-v5", "num_envs": 2, "num_steps": 16, "num_minibatches": 2, "update_epochs": 2,
    "total_timesteps": 128, "device": "cpu", "tensorboard": False,
}  # fmt: skip
# What is learnt is shown by the eager script: in test_graphs.py its uncompiled twin computes the same to the last bit,
# resumed too
each_script = pytest.mark.parametrize("name", [EAGER, COMPILED])


@pytest.fixture
def train(tmp_path):
    return helpers.trainer(tmp_path, EAGER, SMALL)


class Played:
    """What the games of a run were sent: their seeds, actions (steps of the run, N), and the order of all calls."""

    def __init__(self):
        self.seeds, self.sent, self.calls = [], {}, []

    @property
    def actions(self) -> np.ndarray:
        return np.concatenate([np.stack(actions) for _, actions in sorted(self.sent.items())], axis=1)


@pytest.fixture
def play(train, monkeypatch):
    """Train and record -> Outcome, Played."""

    def play(**settings):
        envs, played = SCRIPT.Envs, Played()
        init, send, recv = envs.__init__, envs.send, envs.recv

        def record_init(self, args, seeds):
            played.seeds = seeds
            init(self, args, seeds)

        def record_send(self, pool, action):
            played.calls.append(("send", pool))
            played.sent.setdefault(pool, []).append(action.copy())
            send(self, pool, action)

        def record_recv(self, pool):
            played.calls.append(("recv", pool))
            return recv(self, pool)

        with monkeypatch.context() as patch:
            for name, function in ("__init__", record_init), ("send", record_send), ("recv", record_recv):
                patch.setattr(envs, name, function)
            return train(**settings), played

    return play


@pytest.fixture
def short_games(monkeypatch):
    """Truncate games after so many steps, for which the scripts have no setting."""

    def shorten(steps: int) -> None:
        monkeypatch.setattr(envpool, "make_gymnasium", partial(envpool.make_gymnasium, max_episode_steps=steps))

    return shorten


class Replay(NamedTuple):
    """What EnvPool itself gives for the actions of a run: (T + 1, N, 4, 84, 84) and (T, N) of all its steps."""

    obs: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    points: np.ndarray
    game_over: np.ndarray

    @property
    def valid(self) -> np.ndarray:
        """Whether a row is a step and no reset."""
        done = self.terminated | self.truncated
        return np.concatenate([np.ones_like(done[:1]), ~done[:-1]])


def replay(played: Played, env_id: str = "Breakout-v5", frame_skip: int = 4) -> Replay:
    """All games in one pool that waits for all of them, by EnvPool's own names."""
    settings = {"episodic_life": True, "reward_clip": True, "frame_skip": frame_skip}
    games = envpool.make_gymnasium(env_id, num_envs=len(played.seeds), seed=played.seeds, **settings)
    obs, rows = [games.reset()[0]], []
    for action in played.actions:
        next_obs, reward, terminated, truncated, info = games.step(action.astype(np.int32))
        obs.append(next_obs)
        rows.append((reward, terminated, truncated, info["reward"], info["terminated"] == 1))
    return Replay(np.stack(obs), *(np.stack(column) for column in zip(*rows, strict=True)))


# Scores


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({"env_id": "Pong-v5", "frame_skip": 8, "num_steps": 128, "update_epochs": 1, "total_timesteps": 1280}, None),
        ({"env_id": "Asterix-v5", "num_steps": 64, "update_epochs": 1, "total_timesteps": 640}, None),
        ({"total_timesteps": 512, "num_envs": 3, "num_minibatches": 1}, 30),
    ],
    ids=["Pong", "lives", "truncated"],
)
def test_log_has_the_scores_of_whole_games(play, short_games, settings, limit):
    """Counted straight from EnvPool, step by step: points before clipping, over lives, up to a game's true end."""
    if limit:
        short_games(limit)
    run, played = play(**settings)
    settings = SMALL | settings
    games, num_steps = replay(played, settings["env_id"], settings.get("frame_skip", 4)), settings["num_steps"]
    score, length, steps, ended = np.zeros(len(played.seeds)), np.zeros(len(played.seeds)), 0, []
    total = 0
    for t in range(len(games.reward)):
        score += games.points[t]
        length += games.valid[t]
        steps += games.valid[t].sum()
        for i in np.flatnonzero(games.game_over[t] | games.truncated[t]):
            ended.append((score[i], length[i]))
            score[i] = length[i] = 0
        if (t + 1) % num_steps == 0:
            line = run.lines[t // num_steps]
            assert line["global_step"] == steps
            assert line.get("charts/episodes", 0) == len(ended)
            if ended:
                logged = line["charts/episodic_return"], line["charts/episodic_length"]
                assert logged == pytest.approx(tuple(np.mean(ended, axis=0)))
            total, ended = total + len(ended), []
    assert total >= 1
    lost_lives = (games.terminated & ~games.game_over).sum()
    assert games.truncated.any() == bool(limit) and (lost_lives > 0) == (settings["env_id"] != "Pong-v5")
    assert (games.points != games.reward).any() == (settings["env_id"] == "Asterix-v5")


# What is learnt from


@pytest.mark.parametrize("limit", [None, 30], ids=["lives", "truncated"])
def test_learns_from_what_the_games_gave(play, short_games, monkeypatch, limit):
    """Rewards, both kinds of ends, and valid rows; a lost life is an end to learn from, its reset is no row."""
    if limit:
        short_games(limit)
    rollouts, gae = [], SCRIPT.gae
    monkeypatch.setattr(SCRIPT, "gae", lambda *args: (rollouts.append([x.clone() for x in args[:5]]), gae(*args))[1])
    _, played = play(env_id="Asterix-v5", total_timesteps=640, num_steps=64, update_epochs=1)
    games = replay(played, "Asterix-v5")
    reward, _, terminated, truncated, valid = (torch.cat(parts).numpy() for parts in zip(*rollouts, strict=True))
    np.testing.assert_array_equal(reward, games.reward)
    np.testing.assert_array_equal(terminated, games.terminated)
    np.testing.assert_array_equal(truncated, games.truncated)
    np.testing.assert_array_equal(valid, games.valid)
    assert games.reward.max() == 1 and games.truncated.any() == bool(limit)
    assert limit or (games.terminated & ~games.game_over).any()


def test_the_loss_of_the_policy_goes_up_with_what_was_better_than_expected(train, monkeypatch):
    """By the advantages of the rollout, which are no returns; a ratio grows with the probability of its action."""
    script, seen, checked = SCRIPT, {}, []
    forward, gae, policy_loss = script.ActorCritic.forward, script.gae, script.clipped_policy_loss

    def note_forward(agent, *inputs):
        seen["log_probs"], value = forward(agent, *inputs)
        return seen["log_probs"], value

    def note_gae(*inputs):
        seen["advantage"] = gae(*inputs)
        return seen["advantage"]

    def check(ratio, advantage, valid, clip_coef):
        (slope,) = torch.autograd.grad(ratio.sum(), seen["log_probs"], retain_graph=True)
        assert ((slope != 0).sum(1) == 1).all()
        torch.testing.assert_close(slope.sum(1), ratio.detach())
        assert valid.all()
        x = seen["advantage"].flatten()
        expected = (x - x.mean()) / (x.std() + 1e-8)
        torch.testing.assert_close(advantage.sort()[0], expected.sort()[0], rtol=1e-3, atol=1e-4)
        checked.append(advantage.std())
        return policy_loss(ratio, advantage, valid, clip_coef)

    monkeypatch.setattr(script.ActorCritic, "forward", note_forward)
    monkeypatch.setattr(script, "gae", note_gae)
    monkeypatch.setattr(script, "clipped_policy_loss", check)
    train(num_minibatches=1, update_epochs=2, total_timesteps=64)
    assert len(checked) == 4 and all(checked)


@pytest.mark.slow
@pytest.mark.parametrize("async_envs", [False, True])
def test_policy_sees_the_stacks_of_envpool(play, monkeypatch, async_envs):
    """Frames travel one by one; from rollout to rollout, after lost lives and in new games they make EnvPool's stacks.

    After the last step of a rollout the policy sees the stack whose value it takes, and at once again to go on.
    """
    seen, forward = [], SCRIPT.ActorCritic.forward
    record = lambda self, obs: (torch.is_grad_enabled() or seen.append(obs.clone()), forward(self, obs))[1]  # noqa: E731
    monkeypatch.setattr(SCRIPT.ActorCritic, "forward", record)
    monkeypatch.setattr(SCRIPT, "check_frames", lambda *_: None)  # which has two passes of its own
    steps, size = 64, 4
    _, played = play(num_envs=size, total_timesteps=size * steps * 4, num_steps=steps, async_envs=async_envs)
    games = replay(played)
    parts = 2 if async_envs else 1
    stacks = torch.stack(seen).view(4, steps + 1, parts, size // parts, 21, 21, 64).flatten(2, 3)
    for i, rollout in enumerate(stacks):
        for t, stack in enumerate(rollout):
            assert torch.equal(stack, SCRIPT.space_to_depth(torch.from_numpy(games.obs[i * steps + t])))
    assert games.game_over.any() and (games.terminated & ~games.game_over).any()


@pytest.mark.slow
def test_nothing_is_learnt_from_a_reset(train, monkeypatch):
    """Its row shows the last frame of the game that is over, which so makes no difference to anything."""
    runs, recv, spoilt = [], SCRIPT.Envs.recv, []
    for value in (0, 200):

        def spoil(self, pool, value=value):
            frame, row = recv(self, pool)
            game_over = row[4] > 0
            frame[game_over, :84] = value
            spoilt.extend(np.flatnonzero(game_over))
            return frame, row

        monkeypatch.setattr(SCRIPT.Envs, "recv", spoil)
        runs.append(train(num_steps=64, num_envs=4, total_timesteps=1024, update_epochs=1))
    assert len(spoilt) >= 4 and runs[0].metrics() == runs[1].metrics()


def test_first_update_sees_the_policy_that_collected(train):
    """The log-probabilities and stacks of a rollout are those of its batch: the ratio is 1 in the first minibatch.

    Not by a policy that stays the same: after an update it is the new one that collects.
    """
    settings = {"num_minibatches": 1, "update_epochs": 1, "learning_rate": 1e-2}
    lines = train(**settings).lines
    assert len({line["losses/entropy"] for line in lines}) == len(lines) > 2
    for line in lines:
        assert abs(line["losses/approx_kl"]) < 1e-5 and abs(line["losses/old_approx_kl"]) < 1e-4
        assert line["losses/clipfrac"] == 0


def test_loss_is_the_sum_of_its_parts(train, minibatches):
    """Equation (9). At first the entropy is that of a policy that is nearly uniform."""
    found = minibatches(EAGER)
    settings = {"num_minibatches": 1, "update_epochs": 1, "ent_coef": 0.3, "vf_coef": 0.7, "total_timesteps": 32}
    (line,) = train(**settings).lines
    policy_loss, value_loss, entropy = (line[f"losses/{part}"] for part in ("policy_loss", "value_loss", "entropy"))
    assert found[0]["loss"] == pytest.approx(policy_loss + 0.7 * value_loss - 0.3 * entropy, rel=1e-5)
    assert entropy == pytest.approx(math.log(4), abs=1e-3)


def test_minibatches_are_normalized_and_each_epoch_has_an_order_of_its_own(train, minibatches):
    """And the log has the means over the last epoch."""
    found = minibatches(EAGER)
    (line,) = train(total_timesteps=32, clip_coef=1e-3).lines
    for rows in found:
        advantage = rows["advantage"][rows["valid"]]
        assert abs(advantage.mean()) < 1e-5 and advantage.std() == pytest.approx(1, abs=1e-4)
    helpers.assert_orders_differ(found, SMALL["update_epochs"])
    helpers.assert_line_is_of(found[-SMALL["num_minibatches"] :], line, clip_coef=1e-3)


def test_actions_are_drawn_with_the_probabilities_of_the_policy(play, monkeypatch):
    """By a policy that does not look at the frames; each frequency is within four standard deviations."""
    probabilities, init = torch.tensor([0.6, 0.25, 0.05, 0.1]), SCRIPT.ActorCritic.__init__

    def set_policy(self, *args):
        init(self, *args)
        nn.init.zeros_(self.actor.weight)
        self.actor.bias.data = probabilities.log()

    monkeypatch.setattr(SCRIPT.ActorCritic, "__init__", set_policy)
    run, played = play(num_envs=8, total_timesteps=1024, num_steps=64, update_epochs=1, learning_rate=0.0)
    frequencies = np.bincount(played.actions.reshape(-1), minlength=4) / played.actions.size
    expected = probabilities.numpy()
    deviation = np.sqrt(expected * (1 - expected) / played.actions.size)
    assert (np.abs(frequencies - expected) < 4 * deviation).all()
    entropy = -(expected * np.log(expected)).sum()
    assert [line["losses/entropy"] for line in run.lines] == pytest.approx([entropy] * 2, rel=1e-4)


def test_value_is_that_of_the_policy_that_collected(train, monkeypatch):
    """Also that after the last step; in the next rollout, values are new ones."""
    values, gae, agents = [], SCRIPT.gae, []
    monkeypatch.setattr(SCRIPT, "gae", lambda *args: (values.append(args[1].clone()), gae(*args))[1])
    forward = SCRIPT.ActorCritic.forward

    def record(self, obs):
        log_probs, value = forward(self, obs)
        if not torch.is_grad_enabled():
            agents.append(value.clone())
        return log_probs, value

    monkeypatch.setattr(SCRIPT.ActorCritic, "forward", record)
    monkeypatch.setattr(SCRIPT, "check_frames", lambda *_: None)  # which has two passes of its own
    train(async_envs=False)
    assert torch.equal(torch.stack(agents), torch.cat(values))


@pytest.mark.parametrize(
    "settings",
    [{"norm_adv": False}, {"ent_coef": 0.1}, {"vf_coef": 0.1}, {"max_grad_norm": 0.01}, {"target_kl": 1e-12}],
    ids=str,
)
def test_settings_make_a_difference(train, settings):
    """From the first rollout's updates on; but for what was collected."""
    changed = {"total_timesteps": 32, "clip_coef": 1e-3, "learning_rate": 3e-3}
    first, other = (train(**changed | more).lines[0] for more in ({}, settings))
    assert first["losses/explained_variance"] == other["losses/explained_variance"]
    assert first["losses/value_loss"] != other["losses/value_loss"]


def test_a_played_game_that_is_cut_is_not_over(short_games):
    short_games(20)
    envs = SCRIPT.Envs(SCRIPT.Args(num_envs=2, async_envs=False), [1, 2])
    envs.reset()
    over, cut = np.array([envs.step(np.ones(2, dtype=np.int32))[2:] for _ in range(45)]).transpose(1, 0, 2)
    envs.close()
    assert cut.any() and not (over & cut).any()


def test_noise_is_new_in_each_rollout(train, monkeypatch):
    sent, send = [], SCRIPT.Envs.send
    monkeypatch.setattr(SCRIPT.Envs, "send", lambda envs, pool, x: (sent.append(x.copy()), send(envs, pool, x))[1])
    train(total_timesteps=256, num_envs=4, num_steps=32, num_minibatches=1, learning_rate=0.0)
    first, second = np.split(np.concatenate(sent), 2)
    assert (first == second).mean() < 0.5  # of four actions that are nearly alike


@pytest.mark.slow
def test_reset_may_be_the_first_row_of_a_rollout(play, monkeypatch):
    """`test_learns_from_what_the_games_gave` with rollouts of three steps."""
    rollouts, gae = [], SCRIPT.gae
    monkeypatch.setattr(SCRIPT, "gae", lambda *x: (rollouts.append(x[4].clone()), gae(*x))[1])
    _, played = play(env_id="Asterix-v5", num_steps=3, num_minibatches=1, update_epochs=1, total_timesteps=900)
    valid = torch.cat(rollouts).numpy()
    np.testing.assert_array_equal(valid, replay(played, "Asterix-v5").valid)
    assert (valid[::3] == 0).any()


# Both ways to step the games


@pytest.mark.slow
def test_halves_play_what_all_at_once_play(play):
    """Each game takes exactly `num_steps` steps in a rollout, in order, by the same actions, however it is waited for.

    Half a batch may round another way, which would not matter here for many more steps than these.
    """
    settings = {"num_envs": 4, "num_steps": 32, "total_timesteps": 4 * 32 * 4}
    (halves, played), (whole, other) = (play(async_envs=async_envs, **settings) for async_envs in (True, False))
    assert set(played.sent) == {0, 1} and set(other.sent) == {0}
    assert played.seeds == other.seeds
    np.testing.assert_array_equal(played.actions, other.actions)
    for a, b in zip(halves.metrics(), whole.metrics(), strict=True):
        assert a == pytest.approx(b, rel=1e-3, abs=1e-5)
    for pool in (0, 1):
        calls = [name for name, i in played.calls if i == pool]
        assert calls == ["recv", *["send", "recv"] * 32 * 4]
    # Within a rollout one half has been sent its actions before the other one is waited for
    first = played.calls[2:][: 4 * 32]
    assert first[:5] == [("send", 0), ("send", 1), ("recv", 0), ("send", 0), ("recv", 1)]


def test_an_odd_number_of_games_plays_at_once(play):
    assert set(play(num_envs=3)[1].sent) == {0}


# The network


def test_games_let_the_policy_go_first():
    """The threads that play come after the one that acts, whose priority stays as it was."""
    threads, priority = set(os.listdir("/proc/self/task")), partial(os.getpriority, os.PRIO_PROCESS)
    before = priority(0)
    envs = SCRIPT.Envs(SCRIPT.Args(num_envs=4), seeds=[1, 2, 3, 4])
    players = set(os.listdir("/proc/self/task")) - threads
    assert players and all(priority(int(thread)) == min(before + 10, 19) for thread in players)
    assert priority(0) == before
    envs.close()


def test_network_is_the_nature_cnn():
    """On pixels from 0 to 1, with the first layer's weights moved back to where blocks came from."""
    agent = SCRIPT.ActorCritic(5)
    frames = torch.randint(256, (3, 4, 84, 84), dtype=torch.uint8)
    first = nn.Conv2d(4, 32, 8, stride=4)
    layers = [first, nn.Conv2d(32, 64, 4, stride=2), nn.Conv2d(64, 64, 3)]
    weight = agent.conv1.weight.detach().view(32, 4, 4, 4, 2, 2)  # frame, row and column in a block, block
    first.weight.data = weight.permute(0, 1, 4, 2, 5, 3).reshape(32, 4, 8, 8)
    first.bias.data = agent.conv1.bias.data
    layers[1].load_state_dict(agent.conv2.state_dict())
    layers[2].load_state_dict(agent.conv3.state_dict())
    x = frames / 255
    for layer in layers:
        x = layer(x).relu()
    hidden = agent.hidden.weight.detach().view(512, 7, 7, 64).permute(0, 3, 1, 2).flatten(1)
    x = (x.flatten(1) @ hidden.T + agent.hidden.bias).relu()
    log_probs, value = agent(SCRIPT.space_to_depth(frames))
    torch.testing.assert_close(log_probs, agent.actor(x).log_softmax(1))
    torch.testing.assert_close(value, agent.critic(x).squeeze(1))
    for layer, gain in (agent.conv1, 2**0.5), (agent.hidden, 2**0.5), (agent.actor, 0.01), (agent.critic, 1.0):
        rows = layer.weight.detach().flatten(1)
        torch.testing.assert_close(rows @ rows.T, gain**2 * torch.eye(len(rows)), atol=1e-4, rtol=1e-4)


def test_bfloat16_rounds_the_network_only(train):
    """Its outputs are near those of float32; weights, optimizer and the losses stay float32."""
    torch.manual_seed(1)
    exact, rounded = SCRIPT.ActorCritic(5), SCRIPT.ActorCritic(5, torch.bfloat16)
    rounded.load_state_dict(exact.state_dict())
    frames = torch.randint(256, (16, 21, 21, 64), dtype=torch.uint8)
    for a, b in zip(exact(frames), rounded(frames), strict=True):
        assert b.dtype == torch.float32 and not torch.equal(a, b)
        torch.testing.assert_close(a, b, atol=0.02, rtol=0.02)
    run = train(bf16=True, total_timesteps=32)
    assert {x.dtype for part in ("agent", "optimizer") for x in run.checkpoint[part].values()} == {torch.float32}


# The pair


def assert_agree(run, other, rel: float) -> None:
    """All metrics do, and the weights."""
    for a, b in zip(run.metrics(), other.metrics(), strict=True):
        assert a == pytest.approx(b, rel=rel, abs=rel / 100)
    for name, weight in run.checkpoint["agent"].items():
        difference = weight - other.checkpoint["agent"][name]
        assert difference.norm() <= rel * max(weight.norm(), 1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(("bf16", "rel"), [(False, 1e-3), (True, 0.1)])
def test_compiled_twin_computes_the_same(train, bf16, rel):
    """Policy and update compile once each. Of one rollout, so that rounding does not come back from the games."""
    settings = {"total_timesteps": 32, "bf16": bf16}
    counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        twin = train(COMPILED, **settings)
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]
    assert_agree(twin, train(EAGER, **settings), rel)


@needs_cuda
@pytest.mark.parametrize(("compile", "cudagraphs"), [(True, True), (True, False), (False, True), (False, False)])
def test_twin_computes_the_same_on_cuda(train, monkeypatch, compile, cudagraphs):
    """In float32: by default, products and convolutions on CUDA are in TF32, and gradients are summed in any order."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    settings = {"device": "cuda", "num_steps": 16, "total_timesteps": 128, "update_epochs": 8}
    settings |= {"matmul_precision": "highest", "num_envs": 8}  # several games in a pool
    assert_agree(
        train(COMPILED, compile=compile, cudagraphs=cudagraphs, **settings), train(EAGER, **settings), rel=1e-2
    )


@needs_cuda
@pytest.mark.parametrize(("compile", "cudagraphs"), [(False, True), (True, True), (True, False)])
def test_twin_computes_the_same_over_several_rollouts_on_cuda(train, monkeypatch, compile, cudagraphs):
    """So that `estimate`, called once a rollout, is recorded at the third and replayed at the last two.

    Compiled, nothing is learnt, as rounding would come back from the games: what acts is the same code in both.
    """
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    settings = {"device": "cuda", "num_envs": 8, "num_steps": 16, "total_timesteps": 5 * 128}
    settings |= {"matmul_precision": "highest", "learning_rate": 0.0 if compile else 2.5e-4}
    twin, eager = train(COMPILED, compile=compile, cudagraphs=cudagraphs, **settings), train(EAGER, **settings)
    assert len(twin.lines) == 5
    assert_agree(twin, eager, rel=1e-2 if compile else 1e-4)


# A run as its user sees it


def resident_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


def test_freed_memory_stays_with_the_process(train):
    """64 MB are more than the C library would keep by itself; to fetch them anew at each minibatch takes long."""
    train(total_timesteps=32)
    array = torch.ones(2**24)
    pages = resident_pages()
    del array
    assert resident_pages() > pages - 1000


@pytest.mark.slow
def test_same_seed_same_run(train):
    first, second, other = (train(seed=seed) for seed in (1, 1, 2))
    assert first.metrics() == second.metrics() != other.metrics()
    assert all(math.isfinite(x) for line in first.lines for x in line.values())
    assert set(SCRIPT.METRICS) <= first.lines[-1].keys()
    config = json.loads((first.run_dir / "config.json").read_text())
    assert config["script"] == f"{EAGER}.py" and config["args"]["env_id"] == "Breakout-v5"


def signal_at(patch, number: int) -> list[int]:
    """Raise SIGTERM when actions are sent for this time; returns the list in which the pools that got some will be."""
    send, sent = SCRIPT.Envs.send, []

    def send_and_signal(self, pool, action):
        sent.append(pool)
        if len(sent) == number:
            signal.raise_signal(signal.SIGTERM)
        send(self, pool, action)

    patch.setattr(SCRIPT.Envs, "send", send_and_signal)
    return sent


def test_stopped_run_goes_on(train, monkeypatch, tmp_path):
    """By a signal in its second rollout, which does not count; all goes on from the end of the first."""
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
        signal_at(patch, 50)
        train()
    assert end.value.code == 128 + signal.SIGTERM
    stopped = helpers.outcome(tmp_path / "run0")
    assert len(stopped.lines) == stopped.checkpoint["iteration"] == 1
    resumed = helpers.resume(EAGER, stopped.run_dir)
    assert resumed.lines[:1] == stopped.lines and len(resumed.lines) == 4
    assert helpers.adam_steps(resumed.checkpoint["optimizer"]) == 4 * 2 * 2
    rates = [line["charts/learning_rate"] for line in resumed.lines]
    assert rates == pytest.approx([2.5e-4 * (1 - i / 4) for i in range(4)])


def test_signal_does_not_wait_for_the_end_of_a_rollout(train, monkeypatch, tmp_path):
    """Of 1,000 steps here, in the third of which it comes."""
    sent = signal_at(monkeypatch, 5)
    with pytest.raises(SystemExit) as end:
        train(num_steps=1000, total_timesteps=10**5)
    assert end.value.code == 128 + signal.SIGTERM and len(sent) < 10
    assert (tmp_path / "run0/metrics.jsonl").read_text() == ""


def test_signal_ends_a_run_whose_rollouts_have_one_step(train, monkeypatch):
    sent = signal_at(monkeypatch, 5)
    with pytest.raises(SystemExit) as end:
        train(num_steps=1, num_minibatches=1, total_timesteps=10**5)
    assert end.value.code == 128 + signal.SIGTERM and len(sent) < 10


def test_evaluation_plays_whole_games_by_the_most_probable_actions(train, capsys):
    """Scores are those of EnvPool for the actions that its own stacks make the most probable."""
    run = train()
    returns = evaluate(Options(run.run_dir, episodes=2))
    assert "checkpoint of step" in capsys.readouterr().out
    agent = SCRIPT.ActorCritic(4)
    agent.load_state_dict(run.checkpoint["agent"])
    seed = np.random.SeedSequence([1, EVALUATION, 0]).generate_state(1) >> 1
    game = envpool.make_gymnasium("Breakout-v5", num_envs=1, seed=seed.tolist(), episodic_life=True)
    (obs, _), scores, score = game.reset(), [], 0.0
    while len(scores) < 2:
        with torch.no_grad():
            action = agent(SCRIPT.space_to_depth(torch.from_numpy(obs)))[0].argmax(1).numpy()
        obs, _, _, truncated, info = game.step(action.astype(np.int32))
        score += info["reward"][0]
        if info["terminated"][0] or truncated[0]:
            scores.append(score)
            score = 0.0
    assert returns == scores


@pytest.mark.slow
def test_policy_of_a_checkpoint_sees_the_stacks_of_envpool(train, monkeypatch):
    """Of which a game's first frame makes all four, in the second game, too."""
    seen = []
    run, forward = train(total_timesteps=32), SCRIPT.ActorCritic.forward
    envs = SCRIPT.Envs(SCRIPT.Args(num_envs=2, async_envs=False), [1, 2])
    games = envpool.make_gymnasium("Breakout-v5", num_envs=2, seed=[1, 2], episodic_life=True)
    monkeypatch.setattr(SCRIPT.ActorCritic, "forward", lambda agent, x: (seen.append(x.clone()), forward(agent, x))[1])
    policy, frames, (obs, _) = SCRIPT.load_policy(run.checkpoint, envs), envs.reset(), games.reset()
    for _ in range(400):
        action = np.random.randint(4, size=2)
        policy(frames)
        assert torch.equal(seen.pop(), SCRIPT.space_to_depth(torch.from_numpy(obs)))
        frames, obs = envs.step(action.astype(np.int32))[0], games.step(action.astype(np.int32))[0]


def test_settings_of_the_games_reach_them():
    names = {"frame_skip": 3, "repeat_action_probability": 0.25, "full_action_space": True}
    names |= {"episodic_life": False, "reward_clip": False}
    envs = SCRIPT.Envs(SCRIPT.Args(env_id="Pong-v5", **names), list(range(8)))
    assert envs.num_pools == 2 and envs.action_space.n == 18
    for pool in envs.pools:
        assert names.items() <= pool.config.items()
        assert pool.config["num_envs"] == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"env_id": "Breakot-v5"}, "no Atari game Breakot-v5 in EnvPool; close to it: Breakout-v5"),
        ({"env_id": "CartPole-v1"}, "no Atari game CartPole-v1 in EnvPool"),
        ({"repeat_action_probability": 1.5}, "--repeat-action-probability must be at least 0 and at most 1"),
        ({"num_minibatches": 3}, "the 32 rows of a rollout can't be divided into 3 equal minibatches"),
        ({"total_timesteps": 31}, "less than one rollout"),
        ({"num_envs": 0}, "--num-envs must be at least 1"),
        ({"env_kwargs": '{"batch_size": 2}'}, "batch_size"),
        ({"frame_skip": 0}, "--frame-skip must be at least 1"),
    ],
)
@each_script
def test_settings_that_cannot_work_are_refused(capsys, tmp_path, name, settings, message):
    named = {
        f"--{key.replace('_', '-')}": str(value) for key, value in (SMALL | settings).items() if key != "tensorboard"
    }
    words = [word for pair in named.items() for word in pair]
    script = load(name)
    with pytest.raises(SystemExit) as end:
        script.train(tyro.cli(script.Args, args=[*words, "--run-dir", str(tmp_path / "run")]))
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()
