"""What PPO's own settings do. Of compiled scripts test_pairs.py shows that they compute the same."""

import math
from itertools import pairwise

import gymnasium as gym
import numpy as np
import pytest
import tiny_envs
import torch
from helpers import (
    EAGER,
    adam_steps,
    assert_line_is_of,
    assert_orders_differ,
    discrete,
    has_pool,
    load,
    on_policy,
    small_settings,
)
from tiny_envs import PUSH
from torch import nn

from benchmarks.common.pairs import TABLE

SETTINGS = TABLE["ppo"].small
ROLLOUTS = SETTINGS["total_timesteps"] // SETTINGS["num_steps"]

each_script = pytest.mark.parametrize("name", [name for name in EAGER if on_policy(name)])


def updates(run) -> int:
    return adam_steps(run.checkpoint["optimizer"])


@each_script
def test_each_epoch_passes_over_all_minibatches(train, name):
    assert updates(train(name)) == ROLLOUTS * SETTINGS["update_epochs"] * SETTINGS["num_minibatches"]


@each_script
def test_target_kl_ends_the_epochs_on_a_rollout(train, name):
    """After the one in which the policy moved too far, not within it."""
    run = train(name, target_kl=1e-12, anneal_lr=False)
    assert updates(run) == ROLLOUTS * SETTINGS["num_minibatches"]
    assert updates(train(name, target_kl=1e6)) == ROLLOUTS * SETTINGS["update_epochs"] * SETTINGS["num_minibatches"]


@each_script
def test_epochs_end_after_the_first_whose_mean_kl_is_above_the_target(train, minibatches, name):
    """The mean over an epoch's minibatches, just above the target and just below it."""
    found, epochs = minibatches(name), SETTINGS["update_epochs"]
    train(name, total_timesteps=64)
    ratios = [rows["ratio"][rows["valid"]] for rows in found]
    kl = np.reshape([(x - 1 - x.log()).mean().item() for x in ratios], (epochs, -1)).mean(1)
    for target in 0.99 * kl[1], 1.01 * kl[1]:
        expected = next((i for i, x in enumerate(kl, start=1) if x > target), epochs)
        run = train(name, total_timesteps=64, target_kl=float(target))
        assert updates(run) == expected * SETTINGS["num_minibatches"]


@each_script
def test_learning_rate_falls_to_zero_if_asked(train, name):
    falling = [SETTINGS["learning_rate"] * (1 - i / ROLLOUTS) for i in range(ROLLOUTS)]
    for anneal, expected in (True, falling), (False, [SETTINGS["learning_rate"]] * ROLLOUTS):
        rates = [line["charts/learning_rate"] for line in train(name, anneal_lr=anneal).lines]
        assert rates == pytest.approx(expected)


@pytest.mark.parametrize(
    "settings",
    [{"norm_adv": False}, {"clip_vloss": False}, {"ent_coef": 0.1}, {"vf_coef": 0.1}, {"max_grad_norm": 0.01}],
)
@each_script
def test_settings_make_a_difference(train, name, settings):
    """From the first rollout's updates on, to all losses, and in no other way: what was collected is the same."""
    first, other = train(name, total_timesteps=64).lines[0], train(name, total_timesteps=64, **settings).lines[0]
    assert first["charts/episodic_return"] == other["charts/episodic_return"]
    assert first["losses/explained_variance"] == other["losses/explained_variance"]
    assert first["losses/value_loss"] != other["losses/value_loss"]


@each_script
def test_first_update_sees_the_policy_that_collected(train, name):
    """Log-probabilities are computed after the rollout; if that is right, the ratio is 1 in the first minibatch."""
    settings = {"total_timesteps": 64, "num_minibatches": 1, "update_epochs": 1}
    (line,) = train(name, **settings).lines
    assert abs(line["losses/approx_kl"]) < 1e-6 and abs(line["losses/old_approx_kl"]) < 1e-5
    assert line["losses/clipfrac"] == 0
    assert load(name).METRICS[0] in line and abs(line["losses/policy_loss"]) < 1e-5  # the mean of normalized advantages


# What is learnt from


@each_script
def test_loss_is_the_sum_of_its_parts(train, minibatches, name):
    """Equation (9). At first the entropy is that of a policy that is nearly uniform, or of standard normal ones."""
    found = minibatches(name)
    settings = {"num_minibatches": 1, "update_epochs": 1, "ent_coef": 0.3, "vf_coef": 0.7}
    (line,) = train(name, total_timesteps=64, **settings).lines
    policy_loss, value_loss, entropy = (line[f"losses/{part}"] for part in ("policy_loss", "value_loss", "entropy"))
    assert found[0]["loss"] == pytest.approx(policy_loss + 0.7 * value_loss - 0.3 * entropy, rel=1e-5)
    of_two_normals = math.log(2 * math.pi * math.e)
    assert entropy == pytest.approx(math.log(3) if discrete(name) else of_two_normals, abs=1e-3)


@each_script
def test_advantages_are_normalized_in_each_minibatch(train, minibatches, name):
    found = minibatches(name)
    train(name)
    for rows in found:
        advantage = rows["advantage"][rows["valid"]]
        assert abs(advantage.mean()) < 1e-5 and advantage.std() == pytest.approx(1, abs=1e-4)
    assert not all(rows["valid"].all() for rows in found)


@each_script
def test_each_epoch_has_an_order_of_its_own(train, minibatches, name):
    found = minibatches(name)
    train(name, total_timesteps=64)
    assert_orders_differ(found, SETTINGS["update_epochs"])


@each_script
def test_losses_in_the_log_are_means_over_the_last_epoch(train, minibatches, name):
    found = minibatches(name)
    (line,) = train(name, total_timesteps=64, clip_coef=0.02).lines
    assert_line_is_of(found[-SETTINGS["num_minibatches"] :], line, clip_coef=0.02)


@pytest.mark.parametrize("clip_vloss", [False, True])
@pytest.mark.parametrize("name", [*(name for name in EAGER if on_policy(name)), "ppo_atari_envpool"])
def test_learns_from_the_estimates_of_its_settings(train, monkeypatch, name, clip_vloss):
    """Advantages by gamma and lambda, the returns that these make of values; all bounds are those of the settings."""
    script, rows, given = load(name), [], {key: set() for key in ("gae", "policy", "value", "norm")}
    gae, policy_loss, value_loss, clip = script.gae, script.clipped_policy_loss, script.clipped_value_loss, script.clip
    as_set = lambda *columns: set(map(tuple, torch.stack(columns, -1).flatten(0, -2).tolist()))  # noqa: E731

    def note_gae(reward, value, *others):
        advantage = gae(reward, value, *others)
        given["gae"].add(others[3:])
        rows[:] = [as_set(value[:-1], advantage + value[:-1], advantage)]
        return advantage

    def note_policy(ratio, advantage, valid, clip_coef):
        given["policy"].add(clip_coef)
        rows[1:] = [advantage]
        return policy_loss(ratio, advantage, valid, clip_coef)

    def note_value(value, old_value, returns, valid, clip_coef):
        given["value"].add(clip_coef)
        assert as_set(old_value, returns, rows[1]) <= rows[0]
        return value_loss(value, old_value, returns, valid, clip_coef)

    def note_clip(gradients, max_norm):
        given["norm"].add(max_norm)
        return clip(gradients, max_norm)

    monkeypatch.setattr(script, "gae", note_gae)
    monkeypatch.setattr(script, "clipped_policy_loss", note_policy)
    monkeypatch.setattr(script, "clipped_value_loss", note_value)
    monkeypatch.setattr(script, "clip", note_clip)
    settings = {"gamma": 0.9, "gae_lambda": 0.8, "clip_coef": 0.15, "max_grad_norm": 0.3, "norm_adv": False}
    train(name, **small_settings(name) | settings | {"clip_vloss": clip_vloss, "total_timesteps": 128})
    own = {"policy": {0.15}, "value": {0.15 if clip_vloss else None}, "norm": {0.3}}
    assert given == {"gae": {(0.9, 0.8)}} | own


@each_script
def test_values_go_on_from_rollout_to_rollout(train, monkeypatch, name):
    """The value after the last step is that before the next one; and how much of the returns values explain."""
    script, seen = load(name), []
    gae = script.gae

    def note(reward, value, terminated, truncated, valid, *settings):
        seen.append((value, gae(reward, value, terminated, truncated, valid, *settings), valid == 1))
        return seen[-1][1]

    monkeypatch.setattr(script, "gae", note)
    lines = train(name, learning_rate=0.0).lines
    for (value, _, _), (following, _, _) in pairwise(seen):
        torch.testing.assert_close(following[0], value[-1], rtol=1e-4, atol=1e-5)
    assert len({value[-1].item() for value, _, _ in seen}) == len(lines) == ROLLOUTS
    for line, (value, advantage, valid) in zip(lines, seen, strict=True):
        unexplained = (advantage[valid].var() / (advantage + value[:-1])[valid].var()).item()
        assert line["losses/explained_variance"] == pytest.approx(1 - unexplained, rel=1e-4, abs=1e-4)


# What the policy does and sees


@each_script
def test_actions_are_drawn_with_the_probabilities_of_the_policy(train, monkeypatch, name):
    """By a policy that does not look at observations: within four standard deviations."""
    script, chosen = load(name), []
    envs, method = (script.Pool, "send") if has_pool(name) else (script.Envs, "step")
    init, act = script.ActorCritic.__init__, getattr(envs, method)
    probabilities, mean, std = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.1, -0.7]), 0.04

    def set_policy(self, *args):
        init(self, *args)
        nn.init.zeros_(self.actor[-1].weight)
        self.actor[-1].bias.data = probabilities.log() if discrete(name) else mean.clone()
        if not discrete(name):
            nn.init.constant_(self.log_std, math.log(std))

    def note(self, action, *others):
        chosen.append(np.array(action))
        return act(self, action, *others)

    monkeypatch.setattr(script.ActorCritic, "__init__", set_policy)
    monkeypatch.setattr(envs, method, note)
    train(name, total_timesteps=1280, update_epochs=1, learning_rate=0.0)
    actions, count = np.concatenate(chosen), len(chosen)
    if discrete(name):
        deviation = (probabilities * (1 - probabilities) / count).sqrt().numpy()
        assert (np.abs(np.bincount(actions - 5) / count - probabilities.numpy()) < 4 * deviation).all()
    else:
        assert (np.abs(actions.mean(0) - mean.numpy()) < 4 * std / math.sqrt(count)).all()
        assert actions.std(0) == pytest.approx([std] * 2, rel=4 / math.sqrt(2 * count))


@pytest.mark.parametrize("name", [name for name in EAGER if on_policy(name) and hasattr(load(name), "normal_log_prob")])
def test_actions_are_learnt_as_they_were_drawn(train, monkeypatch, name):
    """Not as the environment took them, cut down to its bounds: of such the density is another one."""
    script, seen = load(name), []
    log_prob = script.normal_log_prob
    monkeypatch.setattr(script, "normal_log_prob", lambda *args: (seen.append(args[0]), log_prob(*args))[1])
    train(name)
    actions = torch.cat(seen).numpy()
    assert (actions < PUSH.low).any(0).all() and (actions > PUSH.high).any(0).all()


def test_statistics_are_those_of_all_observations(train, monkeypatch):
    script, seen = load("ppo_continuous_action"), []
    reset, step = script.Envs.reset, script.Envs.step

    def note(obs):
        seen.append(obs.copy())
        return obs

    def note_step(envs, action):
        obs, *others = step(envs, action)
        return note(obs), *others

    monkeypatch.setattr(script.Envs, "reset", lambda envs: note(reset(envs)))
    monkeypatch.setattr(script.Envs, "step", note_step)
    norm, rows = train("ppo_continuous_action").checkpoint["obs_norm"], np.concatenate(seen)
    assert norm["count"] == len(rows) == SETTINGS["total_timesteps"] + 1
    np.testing.assert_allclose(norm["mean"], rows.mean(0, dtype=np.float64), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(norm["squares"] / len(rows), rows.var(0, dtype=np.float64), rtol=1e-6)


def test_rewards_are_scaled_by_the_returns_of_real_steps(train, monkeypatch):
    """Those of resets are none: each return begins anew. In the log are rewards as they came."""
    script, seen = load("ppo_continuous_action"), []
    scale = script.RewardScale.__call__

    def note(self, reward, valid):
        seen.append((reward.copy(), valid.copy()))
        return scale(self, reward, valid)

    monkeypatch.setattr(script.RewardScale, "__call__", note)
    run = train("ppo_continuous_action")
    reward, valid = (np.concatenate(x)[:, 0] for x in zip(*seen, strict=True))
    returns, now, episodes = [], 0.0, np.split(reward, np.flatnonzero(~valid))
    for r, is_valid in zip(reward, valid, strict=True):
        now = r + run.checkpoint["args"]["gamma"] * is_valid * now
        returns += [now] * int(is_valid)
    state = run.checkpoint["reward_scale"]
    assert state["count"] == len(returns) == run.steps()[-1] < len(reward)
    assert (state["squares"] / state["count"]).item() == pytest.approx(np.var(returns), rel=1e-5)
    logged = sum(line.get("charts/episodes", 0) * line.get("charts/episodic_return", 0) for line in run.lines)
    done = sum(line.get("charts/episodes", 0) for line in run.lines)
    assert done > 20 and logged == pytest.approx(sum(x.sum() for x in episodes[:done]), rel=1e-5)


@pytest.mark.parametrize("name", ["ppo_continuous_action", "ppo_env_pool"])
def test_entropy_is_that_of_the_policys_normal_distribution(train, monkeypatch, name):
    script, log_std = load(name), torch.tensor([-1.0, 0.5])
    init = script.ActorCritic.__init__

    def set_std(self, *args):
        init(self, *args)
        self.log_std.data = log_std.clone()

    monkeypatch.setattr(script.ActorCritic, "__init__", set_std)
    (line,) = train(name, total_timesteps=64, num_minibatches=1, update_epochs=1).lines
    expected = torch.distributions.Normal(torch.zeros(2), log_std.exp()).entropy().sum().item()
    assert line["losses/entropy"] == pytest.approx(expected, rel=1e-5)


# Initial weights


def gains(net) -> list[float]:
    """The singular values of each layer's weights, which are all the same where these are orthogonal."""
    found = []
    for layer in [x for x in net.modules() if hasattr(x, "weight")]:
        values = torch.linalg.svdvals(layer.weight.detach().flatten(1))
        assert values.max() == pytest.approx(values.min().item(), rel=1e-4) and not layer.bias.any()
        found.append(values[0].item())
    return found


@pytest.mark.parametrize("name", ["ppo", "ppo_continuous_action", "ppo_env_pool", "impala_ray", "a3c_ray", "ppo_ray"])
def test_weights_are_orthogonal_with_the_gains_of_cleanrl(name):
    script, root = load(name), 2**0.5
    spaces = {"ppo": (3, 2), "ppo_continuous_action": (3, 2), "ppo_env_pool": (3, tiny_envs.CHOICE)}
    agent = script.ActorCritic(*spaces.get(name, (tiny_envs.LINE, tiny_envs.CHOICE)))
    assert gains(agent.actor) == pytest.approx([root, root, 0.01], rel=1e-4)
    assert gains(agent.critic) == pytest.approx([root, root, 1.0], rel=1e-4)
    if name.endswith("_ray"):
        agent = script.ActorCritic(gym.spaces.Box(0, 255, (4, 84, 84), np.uint8), tiny_envs.CHOICE)
        assert gains(agent.features) == pytest.approx([root] * 4, rel=1e-4)
        assert gains(agent.actor) + gains(agent.critic) == pytest.approx([0.01, 1.0], rel=1e-4)


# The log of those that have tests of their own


@pytest.mark.parametrize("name", ["ppo_ray", "ppo_atari_envpool"])
def test_line_is_of_the_last_epoch_and_says_how_much_values_explain(train, minibatches, monkeypatch, name):
    script, seen, found = load(name), [], minibatches(name)
    gae = script.gae
    monkeypatch.setattr(script, "gae", lambda *x: (seen.append((x[1], gae(*x), x[4] == 1)), seen[-1][1])[1])
    (line,) = train(name, **small_settings(name) | {"total_timesteps": 32, "clip_coef": 1e-3}).lines
    assert_line_is_of(found[-2:], line, clip_coef=1e-3)
    ((value, advantage, valid),) = seen
    unexplained = (advantage[valid].var() / (advantage + value[:-1])[valid].var()).item()
    assert line["losses/explained_variance"] == pytest.approx(1 - unexplained, rel=1e-3, abs=1e-3)
