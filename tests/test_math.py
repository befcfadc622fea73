"""The functions that stand beside the algorithms, each against a plain way to compute the same."""

import contextlib
import math
from copy import deepcopy

import numpy as np
import pytest
import torch
from helpers import defining, load, needs_cuda
from torch import nn

GAMMA, LAMBDA = 0.9, 0.8


def rollouts(rng: np.random.Generator, lengths: list[int], num_envs: int = 3):
    """Rollouts of each length as an environment with a late autoreset gives them: reward, terminated, truncated, valid.

    A row after an episode's end is a reset: reward 0, neither flag, not valid. Ends carry over to the next rollout.
    """
    done = np.zeros(num_envs, dtype=bool)
    for length in lengths:
        reward = rng.normal(2.0, 1.0, (length, num_envs))
        terminated, truncated, valid = np.zeros((3, length, num_envs), dtype=bool)
        for t in range(length):
            valid[t] = ~done
            terminated[t] = (rng.random(num_envs) < 0.15) & valid[t]
            truncated[t] = (rng.random(num_envs) < 0.15) & valid[t]
            done = terminated[t] | truncated[t]
        yield reward * valid, terminated, truncated, valid


def episodes(reward, terminated, truncated, valid):
    """The rows of each episode, or part of one, that lies within a rollout: (environment, first row, last row)."""
    for env in range(reward.shape[1]):
        first = None
        for t in range(len(reward)):
            if valid[t, env] and first is None:
                first = t
            if first is not None and (terminated[t, env] or truncated[t, env] or t == len(reward) - 1):
                yield env, first, t
                first = None


@pytest.mark.parametrize("length", [1, 2, 7, 64, 100])
def test_gae_is_the_sum_over_each_episode(length):
    """Each advantage is the discounted sum of the TD errors up to its episode's end, and only termination is final."""
    rng = np.random.default_rng(length)
    for rollout in rollouts(rng, [length] * 5):
        reward, terminated, truncated, valid = rollout
        value = rng.normal(size=(length + 1, reward.shape[1]))
        expected = np.zeros_like(reward)
        for env, first, last in episodes(*rollout):
            for start in range(first, last + 1):
                for t in range(start, last + 1):
                    future = 0 if terminated[t, env] else GAMMA * value[t + 1, env]
                    td_error = reward[t, env] + future - value[t, env]
                    expected[start, env] += (GAMMA * LAMBDA) ** (t - start) * td_error
        tensors = (torch.from_numpy(x).double() for x in (reward, value, terminated, truncated, valid))
        result = defining("gae").gae(*tensors, GAMMA, LAMBDA)
        np.testing.assert_allclose(result.numpy(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("length", [1, 2, 3, 8, 13])
def test_discounted_sum_is_its_recursion(length):
    x, decay = torch.randn(2, length, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected, y = torch.empty_like(x), torch.zeros(4, dtype=torch.float64)
    for t in reversed(range(length)):
        y = x[t] + decay[t] * y
        expected[t] = y
    torch.testing.assert_close(defining("discounted_sum").discounted_sum(x, decay), expected)


def test_running_norm_is_the_statistics_of_all_rows():
    data = np.random.default_rng(1).normal(1e3, [0.1, 1, 50], (200, 3))
    norm = defining("RunningNorm").RunningNorm((3,))
    for batch in np.split(data, [0, 1, 2, 9, 9, 100, 137]):  # two are empty, as where all rows are resets
        norm.update(batch)
    np.testing.assert_allclose(norm.mean, data.mean(0))
    np.testing.assert_allclose(norm.std, np.sqrt(data.var(0) + 1e-8), rtol=1e-9)
    x = data.mean(0) + data.std(0) * [[-1, 2, 11], [0, -30, 3]]
    np.testing.assert_allclose(norm(x), [[-1, 2, 10], [0, -10, 3]], rtol=1e-6, atol=1e-9)


def test_a_number_that_never_changes_is_normalized_to_zero():
    """Its sum of squares is rounding, which may come out below zero."""
    constant = np.random.default_rng(0).uniform(1e3, 1e5, 200)
    for count in (16, 1024):
        norm = defining("RunningNorm").RunningNorm((200,))
        norm.update(np.tile(constant, (count, 1)))
        assert (norm.squares >= 0).all() and (norm.squares == 0).any()
        np.testing.assert_allclose(norm(constant), np.zeros(200), atol=1e-4)


def test_running_norm_goes_on_from_its_state():
    data = np.random.default_rng(1).normal(size=(20, 3))
    whole, half, resumed = (defining("RunningNorm").RunningNorm((3,)) for _ in range(3))
    half.update(data[:10])
    resumed.load_state_dict(half.state_dict())
    for norm in (half, resumed):
        norm.update(data[10:])
    whole.update(data)
    np.testing.assert_array_equal(resumed.mean, half.mean)
    np.testing.assert_allclose(resumed(data), whole(data))


def test_reward_scale_divides_by_the_spread_of_the_discounted_returns():
    """The return goes on over rollouts, starts anew after an end of either kind, and skips the rows of resets."""
    scale = defining("RewardScale").RewardScale(3, GAMMA)
    discounted_return, returns = np.zeros(3), []
    for reward, terminated, truncated, valid in rollouts(np.random.default_rng(1), [1, 16, 5, 30]):
        for t in range(len(reward)):
            for env in np.flatnonzero(valid[t]):
                discounted_return[env] = reward[t, env] + GAMMA * discounted_return[env]
                returns.append(discounted_return[env])
            discounted_return[terminated[t] | truncated[t]] = 0
        expected = (reward / np.sqrt(np.var(returns) + 1e-8)).clip(-10, 10)
        np.testing.assert_allclose(scale(reward, valid), expected, rtol=1e-9)
    assert len(returns) == scale.count
    outlier = scale(np.full((1, 3), 1e9), np.zeros((1, 3), dtype=bool))
    np.testing.assert_array_equal(outlier, np.full((1, 3), 10))


def test_masked_statistics_are_those_of_the_valid_rows():
    script = defining("masked_std")
    x = torch.randn(100, dtype=torch.float64) + 5
    valid = torch.rand(100) < 0.7
    x[~valid] = 1e6
    torch.testing.assert_close(script.masked_mean(x, valid.double()), x[valid].mean())
    torch.testing.assert_close(script.masked_std(x, valid.double()), x[valid].std())
    for few in (torch.zeros(100), torch.eye(100)[0]):  # no valid row, or one, is no division by zero
        assert script.masked_mean(x, few).isfinite() and script.masked_std(x, few) == 0


def test_normal_log_prob_is_that_of_torch():
    action, mean = torch.randn(2, 7, 3, dtype=torch.float64)
    log_std = torch.tensor([-2.0, 0.0, 1.5], dtype=torch.float64)
    expected = torch.distributions.Normal(mean, log_std.exp()).log_prob(action).sum(-1)
    torch.testing.assert_close(defining("normal_log_prob").normal_log_prob(action, mean, log_std), expected)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def step_of(adam, compiled: bool):
    """Its step, or this as torch.compile traces it, without kernels of the compiler's own."""
    return traced(adam.step) if compiled else adam.step


def traced(function):
    torch.compiler.reset()  # functions of one decorator share what was compiled for another one, in an earlier test
    return torch.compile(lambda *x: function(*x), backend="eager", fullgraph=True)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("max_norm", [math.inf, 0.5])
def test_adam_is_that_of_torch(max_norm, compiled):
    """With clipping that bites at some steps, and a learning rate that changes; by the kernel and written out."""
    torch.manual_seed(1)
    ours = network()
    theirs = deepcopy(ours)
    adam = defining("Adam").Adam(ours, 1e-2, eps=1e-5)
    step = step_of(adam, compiled)
    reference = torch.optim.Adam(theirs.parameters(), lr=1e-2, eps=1e-5)
    clipped = []
    rtol = 1e-9 if max_norm == math.inf else 1e-6  # clipping divides by a float32
    for i in range(20):
        x, size = torch.randn(16, 4), 10.0 ** (i % 3 - 1)
        learning_rate = 1e-2 * (1 - i / 20)
        adam.learning_rate.fill_(learning_rate)
        gradients = torch.autograd.grad(size * ours(x).square().mean(), list(ours.parameters()))
        step(defining("clip").clip(gradients, max_norm) if max_norm < math.inf else gradients)
        reference.param_groups[0]["lr"] = adam.learning_rate.item()  # rounded to float32
        reference.zero_grad()
        (size * theirs(x).square().mean()).backward()
        clipped.append(bool(nn.utils.clip_grad_norm_(theirs.parameters(), max_norm) > max_norm))
        reference.step()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=rtol, atol=rtol / 1000)
    assert set(clipped) == ({False} if max_norm == math.inf else {False, True})
    assert adam.learning_rate.dtype == adam.steps.dtype == torch.float  # as CUDA's kernel reads them


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("max_norm", [math.inf, 0.5])
def test_adam_minds_how_weights_and_gradients_lie_in_memory(max_norm, device):
    """Convolutions whose channels lie side by side, with gradients that lie so, or in order, or are expanded."""
    torch.manual_seed(1)
    ours = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Conv2d(4, 2, 3)).to(device, memory_format=torch.channels_last)
    theirs = deepcopy(ours)
    adam = defining("Adam").Adam(ours, 1e-2)
    for moments in (adam.exp_avgs, adam.exp_avg_sqs):  # a CPU would learn the same if they did not lie as the weights
        assert [moment.stride() for moment in moments] == [weight.stride() for weight in ours.parameters()]
    reference = torch.optim.Adam(theirs.parameters(), lr=1e-2)
    for layout in (torch.contiguous_format, torch.channels_last):
        first, second = torch.randn(4, 3, 2, 2), torch.randn(2, 4, 3, 3).contiguous(memory_format=layout)
        gradients = (first.contiguous(memory_format=layout), torch.randn(4), second, torch.randn(1).expand(2))
        gradients = tuple(gradient.to(device) for gradient in gradients)
        for weight, gradient in zip(theirs.parameters(), gradients, strict=True):
            weight.grad = gradient.clone(memory_format=torch.contiguous_format)
        adam.step(defining("clip").clip(gradients, max_norm) if max_norm < math.inf else gradients)
        nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
        reference.step()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("compiled", [False, True])
def test_adam_goes_on_from_its_state(compiled):
    torch.manual_seed(1)
    one = network()
    optimizers = [defining("Adam").Adam(one, 0.5)]
    optimizers[0].learning_rate.fill_(1e-2)  # by a schedule
    gradients = [torch.autograd.grad(one(torch.randn(16, 4)).square().mean(), list(one.parameters())) for _ in range(6)]
    for gradient in gradients[:3]:
        step_of(optimizers[0], compiled)(gradient)
    other = deepcopy(one)
    optimizers.append(defining("Adam").Adam(other, 0.5))
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    for optimizer in optimizers:
        for gradient in gradients[3:]:
            step_of(optimizer, compiled)(gradient)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
def test_numpy_mlp_is_the_module_and_follows_it(activation):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(5, 16), activation(), nn.Linear(16, 16), activation(), nn.Linear(16, 3))
    forward = defining("numpy_mlp").numpy_mlp(net)
    x = torch.randn(4, 5)
    for _ in range(2):
        result = forward(x.numpy())
        assert result.dtype == np.float32
        np.testing.assert_allclose(result, net(x).detach().numpy(), rtol=1e-5, atol=1e-6)
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(1.5).add_(0.1)


def test_returns_are_added_up_in_float64():
    """In float32, 2**24 + 1 is 2**24."""
    statistics, valid = defining("EpisodeStatistics").EpisodeStatistics(1), np.ones((3, 1), dtype=bool)
    reward = np.array([[2**24], [1], [1]], dtype=np.float32)
    assert statistics.update(reward, np.array([[False], [False], [True]]), valid) == [(2**24 + 2, 3)]


def test_episode_statistics_are_those_of_each_episode():
    statistics, rng = defining("EpisodeStatistics").EpisodeStatistics(3), np.random.default_rng(1)
    episode_return, episode_length, count = np.zeros(3), np.zeros(3, dtype=int), 0
    for reward, terminated, truncated, valid in rollouts(rng, [1, 16, 5, 30, 1]):
        expected = []
        for t in range(len(reward)):
            episode_return += reward[t]
            episode_length += valid[t]
            for env in np.flatnonzero(terminated[t] | truncated[t]):
                expected.append((episode_return[env], episode_length[env]))
                episode_return[env] = episode_length[env] = 0
        result = statistics.update(reward, terminated | truncated, valid)
        np.testing.assert_allclose(np.array(result).reshape(-1, 2), np.array(expected).reshape(-1, 2))
        count += len(expected)
    assert count > 10


def test_linear_schedule():
    schedule = defining("linear_schedule").linear_schedule
    assert [schedule(1.0, 0.2, 100, step) for step in (0, 50, 100, 150)] == pytest.approx([1.0, 0.6, 0.2, 0.2])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("tau", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_move_towards_is_a_weighted_mean(tau, compiled):
    move_towards, target, online = defining("move_towards").move_towards, network(), network()
    if compiled:
        move_towards = traced(move_towards)
    expected = [0.9 * a + 0.1 * b for a, b in zip(target.parameters(), online.parameters(), strict=True)]
    before = deepcopy(online.state_dict())
    move_towards(list(target.parameters()), list(online.parameters()), tau)
    for a, b in zip(target.parameters(), expected, strict=True):
        torch.testing.assert_close(a, b)
    for name, weight in online.state_dict().items():
        assert torch.equal(weight, before[name])


def test_time_of_resets_is_what_steps_with_a_reset_took_longer():
    """Than the mean of the others; nothing where there is nothing to compare with."""
    time_of_resets = defining("time_of_resets").time_of_resets
    spent, is_reset = np.array([1.0, 3.0, 7.0, 1.5, 9.0]), np.zeros((5, 2), dtype=bool)
    is_reset[[2, 3, 4], [0, 1, 1]] = True
    assert time_of_resets(spent, is_reset) == pytest.approx((7 - 2) + 0 + (9 - 2))
    assert time_of_resets(spent, is_reset & False) == time_of_resets(spent, is_reset | True) == 0


@pytest.mark.parametrize("name", ["ppo_atari_envpool", "a3c_ray", "apex_dqn_ray", "impala_ray", "ppo_ray"])
def test_settings_of_the_first_convolution_count(name):
    """Forward takes its weights alone, so a copy's padding or stride could be ignored in silence."""
    script, obs = load(name), torch.zeros(2, 4 * 84 * 84, dtype=torch.uint8)
    if name == "ppo_atari_envpool":
        layers, obs = script.ActorCritic(5), obs.view(2, 21, 21, 64)
    else:
        layers = (script.Convolutions if name == "apex_dqn_ray" else script.Frames)(4)
    sizes = []
    layers.conv3.register_forward_hook(lambda _layer, _inputs, x: sizes.append(x.shape[-1]))
    for padding in (0, 2):
        layers.conv1.padding = (padding, padding)
        with contextlib.suppress(RuntimeError):  # the next layer may not fit any more
            layers(obs)
    assert sizes == [7, 9]
