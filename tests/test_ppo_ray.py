"""PPO over Ray: its statistics, its two ways to collect, its learners, and what is dead, late or slow.

What plumbing does for all scripts over Ray is shown in test_impala.py: it is one text.
"""

import itertools
import signal
from unittest import mock

import gymnasium as gym
import helpers
import numpy as np
import pytest
import torch
from graph_emulator import use_graphs
from helpers import agent_with, in_float64, load, on_ray, runners_of, without_times
from parity import CLOSE, assert_agree, weights_of
from torch._dynamo.utils import counters

EAGER, COMPILED = "ppo_ray", "ppo_ray_torchcompile"
SCRIPT = load(EAGER)
SMALL = {
    "env_id": "tiny_envs:Choose-v0", "num_runners": 0, "envs_per_runner": 2, "num_steps": 16, "total_timesteps": 384,
    "learning_rate": 3e-3, "num_minibatches": 2, "device": "cpu", "tensorboard": False,
}  # fmt: skip
NORMALIZED = {"norm_obs": True, "norm_rewards": True}


@pytest.fixture
def train(tmp_path):
    return helpers.trainer(tmp_path, EAGER, SMALL)


def arguments(script=SCRIPT, **settings):
    return script.Args(**SMALL | {"num_runners": 1} | settings)


def same(a, b) -> bool:
    """Whether two runs are one to the last bit."""
    return without_times(a).metrics() == without_times(b).metrics() and torch.equal(weights_of(a), weights_of(b))


# Statistics


def empty(size: int) -> tuple[tuple, tuple]:
    """The statistics of no observations (size,), or of none that are normalized, and of no rewards."""
    shape = (size,) if size else ()
    return (0, np.zeros(shape), np.zeros(shape)), (0, np.zeros(()), np.zeros(()))


NOTHING = empty(3)


def runner_of(seeds: list[int], **settings):
    """A runner, and weights for it."""
    runner = SCRIPT.Runner(arguments(**settings), seeds)
    torch.manual_seed(1)
    return runner, SCRIPT.get_weights(SCRIPT.ActorCritic(runner.envs.observation_space, runner.envs.action_space))


def test_merged_statistics_are_those_of_one_pass():
    """Of parts of very different size and mean, one of which is empty, in any order."""
    rng = np.random.default_rng(1)
    parts = [rng.normal(mean, 3, (size, 2)) for mean, size in ((1e3, 1), (-5, 700), (0, 0), (1e3, 40), (2, 9000))]
    rows = np.concatenate(parts)
    for order in (parts, parts[::-1]):
        norm = SCRIPT.RunningNorm((2,))
        for part in order:
            own = SCRIPT.RunningNorm((2,))
            if len(part):
                own.update(part)
            SCRIPT.merge(norm, *SCRIPT.moments(own))
        assert norm.count == len(rows)
        np.testing.assert_allclose(norm.mean, rows.mean(0), rtol=1e-12)
        np.testing.assert_allclose(norm.squares, ((rows - rows.mean(0)) ** 2).sum(0), rtol=1e-12)


def test_statistics_do_not_depend_on_the_number_of_runners():
    """Four environments of one runner, or one each of four: three fragments, each normalized by those before it."""
    seeds, found = [11, 12, 13, 14], []
    for groups in ([seeds], [[seed] for seed in seeds]):
        runners = [runner_of(group, env_id="tiny_envs:Stream-v0", norm_obs=True) for group in groups]
        norm, columns, raw = SCRIPT.RunningNorm((3,)), [], []
        for version in range(3):
            known = SCRIPT.moments(norm), NOTHING[1]
            results = [runner.sample(version, weights, *known) for runner, weights in runners]
            for report, _ in results:
                SCRIPT.merge(norm, *report["moments"][0])
            columns.append(np.concatenate([obs for _, (obs, _, _) in results], axis=1))
            mean, std = (known[0][1], np.sqrt(known[0][2] / known[0][0] + 1e-8)) if version else (0, 1)
            raw.append(columns[-1][1:] * std + mean)
        rows = np.concatenate(raw).reshape(-1, 3)
        np.testing.assert_allclose(norm.mean, rows.mean(0), atol=1e-6)
        np.testing.assert_allclose(norm.squares, ((rows - rows.mean(0)) ** 2).sum(0), rtol=1e-5)
        found.append((SCRIPT.moments(norm), columns))
    for ours, theirs in zip(*(x[0] for x in found), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)
    for ours, theirs in zip(*(x[1] for x in found), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_rewards_are_divided_by_the_spread_of_discounted_returns():
    """Of those that the runner knows of, its own fragment among them."""
    (plain, weights), (scaled, _) = runner_of([1, 2]), runner_of([1, 2], norm_rewards=True, gamma=0.9)
    norm = SCRIPT.RunningNorm(())
    discounted, returns = np.zeros(2), []
    for version in range(3):
        _, (_, _, raw) = plain.sample(version, weights, *NOTHING)
        report, (_, _, rows) = scaled.sample(version, weights, NOTHING[0], SCRIPT.moments(norm))
        SCRIPT.merge(norm, *report["moments"][1])
        for reward, valid in zip(raw[..., 0].astype(float), raw[..., 3], strict=True):
            discounted = reward + 0.9 * valid * discounted
            returns += discounted[valid == 1].tolist()
        std = np.sqrt(np.var(returns) + 1e-8)
        assert norm.count == len(returns) and norm.std == pytest.approx(std, rel=1e-5)
        np.testing.assert_allclose(rows[..., 0], raw[..., 0] / std, rtol=1e-4, atol=1e-6)


def test_rewards_are_cut_down_to_learn():
    (plain, weights), (clipped, _) = runner_of([1, 2]), runner_of([1, 2], clip_rewards=True)
    (report, (_, _, raw)), (ours, (_, _, rows)) = (x.sample(0, weights, *NOTHING) for x in (plain, clipped))
    np.testing.assert_array_equal(rows[..., 0], raw[..., 0].clip(-1, 1))
    np.testing.assert_array_equal(rows[..., 1:], raw[..., 1:])
    assert report["episodes"] == ours["episodes"] and raw[..., 0].min() < -1


def test_rewards_are_cut_down_before_they_are_scaled():
    (plain, weights), (both, _) = runner_of([1, 2]), runner_of([1, 2], norm_rewards=True, clip_rewards=True)
    _, (_, _, raw) = plain.sample(0, weights, *NOTHING)
    report, (_, _, rows) = both.sample(0, weights, *NOTHING)
    count, _, squares = report["moments"][1]
    expected = raw[..., 0].clip(-1, 1) / np.sqrt(squares / count + 1e-8)
    np.testing.assert_allclose(rows[..., 0], expected, rtol=1e-4, atol=1e-6)


def test_all_rows_of_a_fragment_are_normalized():
    """The first is the last one of the fragment before, by statistics that are newer."""
    runner, weights = runner_of([1, 2], env_id="tiny_envs:Stream-v0", norm_obs=True)
    norm, known, last = SCRIPT.RunningNorm((3,)), None, None
    for version in range(3):
        known = SCRIPT.moments(norm)
        mean, std = (norm.mean.copy(), norm.std.copy()) if version else (0, 1)
        report, (obs, _, _) = runner.sample(version, weights, known, NOTHING[1])
        SCRIPT.merge(norm, *report["moments"][0])
        if version:
            np.testing.assert_allclose(obs[0] * std + mean, last, rtol=1e-4, atol=1e-5)
        last = obs[-1] * std + mean


def test_scaled_rewards_are_cut_down_to_ten():
    runner, weights = runner_of([1, 2], norm_rewards=True)
    tiny = 10**6, np.zeros(()), np.zeros(())
    _, (_, _, rows) = runner.sample(0, weights, NOTHING[0], tiny)
    assert rows[..., 0].min() == -10


def test_a_reset_may_be_the_first_row_of_a_fragment():
    """After one whose last row ended an episode."""
    runner, weights = runner_of([1, 2, 3, 4], num_steps=3)
    before, found = np.zeros(4), 0
    for version in range(40):
        _, (_, _, rows) = runner.sample(version, weights, *NOTHING)
        ends = np.concatenate([before[None], rows[..., 1:3].max(2)])
        np.testing.assert_array_equal(rows[..., 3], 1 - ends[:-1])
        before, found = ends[-1], found + ends[0].sum()
    assert found > 5


class Far(gym.Env):
    """Observations far from 0 that hardly change, but for the first one, which is of integers."""

    observation_space, action_space = gym.spaces.Box(-np.inf, np.inf, (2,)), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        return np.array([100_000, 0]), {}

    def step(self, _action):
        return self.np_random.normal([1e5, 0], 0.01), 0.0, False, False, {}


gym.register("Far-v0", Far)


def test_statistics_of_numbers_far_from_zero_are_exact_once_their_mean_is_known():
    runner, weights = runner_of([1], env_id="Far-v0", num_steps=64, norm_obs=True)
    (report, _), norm = runner.sample(0, weights, *empty(2)), SCRIPT.RunningNorm((2,))
    SCRIPT.merge(norm, *report["moments"][0])
    report, _ = runner.sample(1, weights, SCRIPT.moments(norm), NOTHING[1])
    count, mean, squares = report["moments"][0]
    np.testing.assert_allclose(mean, [1e5, 0], atol=0.01)
    assert count == 64 and (0.008 < np.sqrt(squares / count)).all() and (np.sqrt(squares / count) < 0.012).all()


def test_a_first_observation_of_integers_does_not_make_all_others_integers():
    runner, weights = runner_of([1], env_id="Far-v0", num_steps=8)
    _, (obs, _, _) = runner.sample(0, weights, *empty(0))
    assert (obs[0] == [100_000, 0]).all() and (obs[1:, 0, 1] % 1 != 0).all()


def test_each_rollout_has_an_order_of_rows_of_its_own_also_after_a_resume(train, monkeypatch):
    """By a count of rollouts: Adam's, of floats, stops at 2**24."""
    counts, draw = [], SCRIPT.draw_permutations
    monkeypatch.setattr(SCRIPT, "draw_permutations", lambda args, n, rows: counts.append(n) or draw(args, n, rows))
    run = train()
    SCRIPT.train(SCRIPT.Args(resume=str(run.run_dir), total_timesteps=2 * SMALL["total_timesteps"]))
    assert len(counts) > 20 and counts == [*range(len(counts))]


def test_orders_of_rows_are_new_in_each_epoch_and_rollout():
    """And the same of all learners; each row comes once in an epoch."""
    args = arguments(update_epochs=3, num_minibatches=4)
    orders = [SCRIPT.draw_permutations(args, num_rollouts, 32) for num_rollouts in (0, 12)]
    assert torch.equal(orders[0], SCRIPT.draw_permutations(args, 0, 32)) and orders[0].shape == (3, 4, 8)
    epochs = [epoch.flatten() for order in orders for epoch in order]
    assert all(torch.equal(epoch.sort().values, torch.arange(32)) for epoch in epochs)
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 6


def test_orders_of_rows_are_new_for_each_seed():
    """PyTorch's generator takes 32 bits of a seed, and a seed may have 63."""
    seeds = (1, 2, 3, 5, 1 + 2**32)
    orders = [SCRIPT.draw_permutations(arguments(seed=seed, update_epochs=1), 12, 32) for seed in seeds]
    assert len({tuple(order.flatten().tolist()) for order in orders}) == 5


@pytest.mark.parametrize("learners", [1, 3])
def test_advantage_stats_are_those_of_the_valid_rows_of_a_minibatch(learners):
    """Of several learners: of all their rows together."""
    generator = torch.Generator().manual_seed(1)
    advantage = 100 + torch.randn(learners, 2, 4, 8, generator=generator, dtype=torch.float64)
    valid = (torch.rand(learners, 2, 4, 8, generator=generator) < 0.8).double()
    sums, add_up = [], None
    if learners > 1:
        for x in zip(advantage, valid, strict=True):
            SCRIPT.advantage_stats(*x, True, lambda part: sums.append(part) or part)
        add_up = mock.Mock(return_value=sum(sums))
    found = SCRIPT.advantage_stats(advantage[0], valid[0], True, add_up)
    for epoch in range(2):
        for k in range(4):
            rows = advantage[:, epoch, k][valid[:, epoch, k] == 1]
            torch.testing.assert_close(found[epoch, k], torch.stack([rows.mean(), rows.std()]), rtol=1e-9, atol=0)
    assert SCRIPT.advantage_stats(advantage[0], valid[0], False)[1, 3].tolist() == [0, 1]


# Environments that do not wait for each other


@pytest.mark.slow
@pytest.mark.parametrize("normalized", [{}, NORMALIZED], ids=["as they are", "normalized"])
def test_environments_that_do_not_wait_bring_the_same(normalized):
    """In worker processes, whichever is ready first: rows and report of a fragment are those of lock-step."""
    settings = {"env_id": "tiny_envs:Stream-v0", "env_backend": "gymnasium", "envs_per_runner": 3} | normalized
    (together, weights), (ready, _) = (runner_of([1, 2, 3], async_envs=x, **settings) for x in (False, True))
    assert isinstance(together.turns, SCRIPT.LockStep) and isinstance(ready.turns, SCRIPT.FirstReady)
    norms, num_episodes = (SCRIPT.RunningNorm((3,)), SCRIPT.RunningNorm(())), 0
    for version in range(3):
        known = [SCRIPT.moments(norm) if norm.count else x for norm, x in zip(norms, NOTHING, strict=True)]
        (ours, a), (theirs, b) = (runner.sample(version, weights, *known) for runner in (together, ready))
        assert ours["steps"] == theirs["steps"]
        np.testing.assert_allclose(sorted(ours["episodes"]), sorted(theirs["episodes"]), rtol=1e-5)
        for x, y in zip(a, b, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
        for norm, x, y in zip(norms, ours["moments"], theirs["moments"], strict=True):
            for part, its_twin in zip(x, y, strict=True):
                np.testing.assert_allclose(part, its_twin, rtol=1e-5, atol=1e-6)
            SCRIPT.merge(norm, *x)
        num_episodes += len(ours["episodes"])
    assert num_episodes > 3 and (norms[0].count > 0) == (norms[1].count > 0) == bool(normalized)
    ready.envs.close()


@pytest.mark.slow
def test_flags_of_environments_that_do_not_wait_may_be_numbers():
    settings = {"env_id": "tiny_envs:Odd-v0", "env_kwargs": '{"what": "flags"}', "env_backend": "gymnasium"}
    found = []
    for async_envs in (False, True):
        runner, weights = runner_of([1, 2], async_envs=async_envs, **settings)
        found.append(runner.sample(0, weights, *NOTHING)[1][2])
        runner.envs.close()
    np.testing.assert_allclose(*found, rtol=1e-5)
    assert found[0][..., 2].any()


@pytest.mark.slow
def test_a_signal_is_heard_within_a_fragment_of_environments_that_do_not_wait(train, monkeypatch):
    """In one process: the run ends at the next step."""
    step, calls = SCRIPT.FirstReady.step, []

    def counted(turns, *arguments):
        calls.append(len(calls))
        if len(calls) == 5:
            signal.raise_signal(signal.SIGTERM)
        return step(turns, *arguments)

    monkeypatch.setattr(SCRIPT.FirstReady, "step", counted)
    with pytest.raises(SystemExit) as end:
        train(async_envs=True)
    assert end.value.code == 128 + signal.SIGTERM and len(calls) == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "text"),
    [("raise", "ValueError: the simulator\nis out of order"), ("nan", "an observation or a reward is NaN or infinite")],
)
def test_an_environment_that_breaks_in_a_worker_is_named(tmp_path, fault, text):
    path = tmp_path / "fault"
    settings = {"env_id": "tiny_envs:Fragile-v0", "env_kwargs": f'{{"path": "{path}"}}', "async_envs": True}
    runner, weights = runner_of([1, 2], env_backend="gymnasium", **settings)
    runner.envs.stop = mock.Mock(side_effect=RuntimeError)
    path.write_text(fault)
    with pytest.raises(RuntimeError):
        runner.sample(0, weights, *NOTHING)
    assert text in runner.envs.stop.call_args.args[0]
    runner.envs.close()


# Learning


def naive_estimate(args, agent, fragment):
    obs, _, rows = (torch.tensor(x) for x in fragment)
    reward, terminated, truncated, valid, _ = rows.unbind(2)
    with torch.no_grad():
        value = agent(obs.flatten(0, 1))[1].view(obs.shape[:2])
    advantage, last = torch.zeros_like(reward), torch.zeros(reward.shape[1])
    for t in reversed(range(len(reward))):
        delta = reward[t] + args.gamma * value[t + 1] * (1 - terminated[t]) - value[t]
        goes_on = 1 - torch.maximum(terminated[t], truncated[t])
        last = (delta + args.gamma * args.gae_lambda * goes_on * last) * valid[t]
        advantage[t] = last
    return value[:-1].flatten(), advantage.flatten()


def naive_minibatch(args, agent, fragment, old_value, all_advantages, index):
    """Equation (9) on the valid ones of these rows: the loss, and its parts as `METRICS` names them."""
    obs, action, rows = (torch.tensor(x).flatten(0, 1) for x in (fragment[0][:-1], *fragment[1:]))
    index = index[rows[index, 3] == 1]
    output, value = agent(obs[index])
    ratio = (agent.log_prob(output, action[index]) - rows[index, 4]).exp()
    advantage = all_advantages[index]
    returns = advantage + old_value[index]
    if args.norm_adv:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    surrogate = torch.min(ratio * advantage, ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef) * advantage)
    error = (value - returns).square()
    if args.clip_vloss:
        change = (value - old_value[index]).clamp(-args.clip_coef, args.clip_coef)
        error = torch.max(error, (old_value[index] + change - returns).square())
    parts = torch.stack([-surrogate.mean(), 0.5 * error.mean(), agent.entropy(output).mean()])
    return parts[0] + args.vf_coef * parts[1] - args.ent_coef * parts[2], parts.detach()


@pytest.mark.parametrize("env_id", ["tiny_envs:Choose-v0", "tiny_envs:Reach-v0"])
def test_learning_is_a_step_down_the_loss(env_id):
    """Of a fragment that an older policy acted in, whichever rollout brought it."""
    name = in_float64(EAGER)
    script, weights = load(name), []
    with helpers.default_type_of(name):
        for rollout in ("batched", "first-ready"):
            args = arguments(script, env_id=env_id, rollout=rollout, num_minibatches=1, update_epochs=1)
            runner = script.Runner(args, [1, 2])
            spaces = runner.envs.observation_space, runner.envs.action_space
            with runners_of(script, arguments(script, env_id=env_id, num_runners=0)) as runners:
                older = agent_with(script, runners, 1.3)
            _, fragment = runner.sample(0, script.get_weights(older), *NOTHING)
            torch.manual_seed(1)
            agent, optimizer, learn = script.make_learner(args, *spaces, torch.device("cpu"))
            rows = torch.arange(args.num_steps * args.envs_per_runner)
            loss, parts = naive_minibatch(args, agent, fragment, *naive_estimate(args, agent, fragment), rows)
            expected = torch.autograd.grad(loss, list(agent.parameters()))
            with mock.patch.object(optimizer, "step", wraps=optimizer.step) as step:
                losses = learn([fragment])
            for found, x in zip(step.call_args.args[0], script.clip(expected, args.max_grad_norm), strict=True):
                torch.testing.assert_close(found, x, rtol=1e-7, atol=1e-10)
            assert losses[script.METRICS.index("losses/approx_kl")] > 1e-5
            torch.testing.assert_close(losses[:3], parts, rtol=1e-7, atol=1e-10)
            weights.append(script.get_weights(agent))
    assert np.array_equal(*weights)


@pytest.mark.parametrize("settings", [{}, {"norm_adv": False}, {"clip_vloss": False}], ids=str)
def test_each_minibatch_is_a_step_down_its_loss(settings):
    """Of two fragments, each in three epochs of two minibatches: values and policy move away from the old ones."""
    name = in_float64(EAGER)
    script, orders = load(name), []
    settings = {"update_epochs": 3, "clip_coef": 0.02, "learning_rate": 2e-2, "ent_coef": 0.1} | settings
    with helpers.default_type_of(name):
        args = arguments(script, num_runners=0, **settings)
        runner = script.Runner(args, [1, 2])
        agent, optimizer, learn = script.make_learner(
            args, runner.envs.observation_space, runner.envs.action_space, torch.device("cpu")
        )
        step, draw, now = optimizer.step, script.draw_permutations, {}

        def note_orders(*x):
            found = draw(*x)
            now["indices"] = list(found.flatten(0, 1))
            orders.extend(tuple(epoch.flatten().tolist()) for epoch in found)
            return found

        def check(gradients):
            loss, parts = naive_minibatch(args, agent, now["fragment"], *now["old"], now["indices"].pop(0))
            now["parts"].append(parts)
            expected = script.clip(torch.autograd.grad(loss, list(agent.parameters())), args.max_grad_norm)
            for found, x in zip(gradients, expected, strict=True):
                torch.testing.assert_close(found, x, rtol=1e-6, atol=1e-9)
            step(gradients)

        with mock.patch.object(optimizer, "step", check), mock.patch.object(script, "draw_permutations", note_orders):
            for version in range(2):
                now["fragment"] = runner.sample(version, script.get_weights(agent), *NOTHING)[1]
                now["old"] = naive_estimate(args, agent, now["fragment"])
                optimizer.num_rollouts.fill_(version)
                now["parts"] = []
                losses = learn([now["fragment"]])
                last_epoch = torch.stack(now["parts"][-args.num_minibatches :])
                torch.testing.assert_close(losses[:3], last_epoch.mean(0), rtol=1e-6, atol=1e-9)
                assert not now["indices"] and losses[script.METRICS.index("losses/clipfrac")] > 0.1
    assert len(set(orders)) == 6


@pytest.mark.parametrize("settings", [{}, {"env_id": "tiny_envs:Reach-v0", **NORMALIZED}])
def test_run_is_reproduced_to_the_last_bit_without_ray(train, settings):
    """And all of its updates see the policy that acted; its shares of time are whole."""
    run = train(**settings)
    assert same(run, train(**settings)) and len(run.lines) == 12
    for line in run.lines:
        assert line["runners/staleness"] == line["runners/staleness_max"] == line["runners/late"] == 0
        assert sum(x for name, x in line.items() if name.startswith("time/")) == pytest.approx(100)


def test_learning_rate_falls_to_zero_if_asked(train):
    for anneal in (True, False):
        rates = [line["charts/learning_rate"] for line in train(anneal_lr=anneal).lines]
        assert rates == pytest.approx([3e-3 * (1 - anneal * i / 12) for i in range(12)])


@pytest.mark.slow
@pytest.mark.parametrize("env_id", ["tiny_envs:Stream-v0", "tiny_envs:DiscreteStream-v0"])
@pytest.mark.parametrize("compile", [False, True])
def test_compiled_twin_computes_the_same(train, env_id, compile):
    """In float64, over a whole run; compiled, as one graph and once."""
    settings = {"env_id": env_id, "total_timesteps": 24 * 32, **(NORMALIZED if env_id.count(":S") else {})}
    run = train(in_float64(EAGER), **settings)
    counters.clear()
    with torch._inductor.config.patch(fallback_random=True), torch._dynamo.config.patch(error_on_recompile=True):
        twin = train(in_float64(COMPILED), compile=compile, **settings)
    assert counters["stats"]["unique_graphs"] == compile and not counters["graph_break"]
    assert len({line["charts/learning_rate"] for line in run.lines}) > 5
    assert_agree(without_times(twin), without_times(run), rel=CLOSE)


def test_twin_with_graphs_computes_the_same(train, monkeypatch):
    """By CUDA graphs, which are emulated here."""
    settings = {"env_id": "tiny_envs:Stream-v0", "total_timesteps": 16 * 32}
    run = train(in_float64(EAGER), **settings)
    with monkeypatch.context() as patch:
        graphs = use_graphs(patch, load(in_float64(COMPILED)), None)
        twin = train(in_float64(COMPILED), compile=False, **settings)
    assert len(graphs) == 2 and all(graph.counter > graph.warmup + 5 for graph in graphs)
    assert_agree(without_times(twin), without_times(run), rel=CLOSE)


def test_checkpoint_has_what_a_policy_and_a_longer_run_need(train):
    """Statistics among it: a policy is that of the end of the run, and a resumed one goes on with them."""
    run = train(env_id="tiny_envs:Reach-v0", total_timesteps=192, **NORMALIZED)
    on = helpers.call(EAGER, resume=str(run.run_dir), device="cpu", total_timesteps=384)
    assert on.checkpoint["num_updates"] == 12 and on.lines[:6] == run.lines
    assert on.checkpoint["obs_norm"]["count"] == 2 * run.checkpoint["obs_norm"]["count"] == 12 * 32
    envs = SCRIPT.open_envs(arguments(env_id="tiny_envs:Reach-v0"), [5, 6])
    obs, norm = envs.reset(), SCRIPT.RunningNorm((3,))
    norm.load_state_dict(on.checkpoint["obs_norm"])
    agent = SCRIPT.ActorCritic(envs.observation_space, envs.action_space)
    agent.load_state_dict(on.checkpoint["agent"])
    expected = agent.actor(torch.tensor(norm(obs), dtype=torch.float32)).detach().numpy()
    space = envs.action_space
    np.testing.assert_allclose(
        SCRIPT.load_policy(on.checkpoint, envs)(obs), expected.clip(space.low, space.high), rtol=1e-5
    )


def test_checkpoint_has_the_statistics_of_all_rewards(train):
    run = train(env_id="tiny_envs:Reach-v0", total_timesteps=192, **NORMALIZED)
    assert run.checkpoint["reward_norm"]["count"] == run.steps()[-1]
    on = helpers.call("ppo_ray", resume=str(run.run_dir), device="cpu", total_timesteps=384)
    assert on.checkpoint["reward_norm"]["count"] == on.steps()[-1] > run.steps()[-1]


def test_frames_are_learnt_from(train, capfd):
    """EnvPool's stacks of bytes go through the network as they are."""
    settings = {"env_id": "Pong-v5", "num_steps": 4}
    run = train(**settings, total_timesteps=16)
    assert {"features.conv1.weight", "critic.weight"} <= run.checkpoint["agent"].keys() and len(run.lines) == 2
    assert run.checkpoint["optimizer"]["exp_avg"].any()
    assert "--norm-obs is for vectors" in helpers.refused(SCRIPT, capfd, **SMALL | settings, norm_obs=True)


def test_settings_that_cannot_work_are_refused(capfd):
    def refused(**settings):
        return helpers.refused(SCRIPT, capfd, **SMALL | settings)

    assert "--rollout first-ready needs --num-runners 1 or more" in refused(num_runners=0, rollout="first-ready")
    for settings in {"num_runners": 3}, {"num_runners": 2, "num_minibatches": 64, "norm_adv": False}:
        assert "--num-learners 2 must divide --num-runners, and --num-minibatches" in refused(
            num_learners=2, **settings
        )
    assert "--num-learners 2 needs --num-runners 1 or more" in refused(num_learners=2)


# Over Ray


@on_ray
def test_pixels_that_go_into_an_mlp_of_a_runner_get_a_hint(train, capfd):
    """Which the learner says, once: what runners print is not shown."""
    train(num_runners=2, env_id="tiny_envs:Pixels-v0", total_timesteps=256)
    assert capfd.readouterr().err.count("these pixels go into an MLP") == 1


@on_ray
def test_two_runners_learn_the_same_twice(train):
    """Batched: each brings its rows by the newest weights, and in the same order."""
    settings = {"num_runners": 2, "env_id": "tiny_envs:Reach-v0", "total_timesteps": 1024, **NORMALIZED}
    first, second = (without_times(train(**settings)) for _ in range(2))
    for run in (first, second):
        for line in run.lines:
            assert line["runners/staleness_max"] == line["runners/late"] == 0
            del line["runners/queue"]
    assert same(first, second)


@on_ray
def test_statistics_are_those_of_all_runners(train):
    run = train(num_runners=2, env_id="tiny_envs:Reach-v0", total_timesteps=256, **NORMALIZED)
    assert run.checkpoint["obs_norm"]["count"] == 256 > run.checkpoint["reward_norm"]["count"] == run.steps()[-1]


@on_ray
def test_first_ready_learns_from_what_is_at_most_one_update_old(train):
    settings = {"num_runners": 2, "envs_per_runner": 8, "num_steps": 64, "rollout": "first-ready"}
    run = train(env_id="CartPole-v1", **settings, total_timesteps=60_000, num_minibatches=8, anneal_lr=False)
    assert max(line["runners/staleness_max"] for line in run.lines) == 1
    returns = [line["charts/episodic_return"] for line in run.lines if "charts/episodic_return" in line]
    assert np.mean(returns[-5:]) > 80
    assert run.lines[-1]["runners/alive"] == 2


@on_ray
@pytest.mark.parametrize("target_kl", [None, 1e-9])
def test_a_whole_run_with_two_learners(train, target_kl):
    """Each has a part of the rows, and of the statistics; all stop the epochs on a rollout at once."""
    settings = {"env_id": "tiny_envs:Reach-v0", "num_runners": 2, "total_timesteps": 256, **NORMALIZED}
    run, alone = train(**settings, num_learners=2, target_kl=target_kl), train(**settings)
    assert run.checkpoint["num_updates"] == 4 and run.checkpoint["obs_norm"]["count"] == 256
    assert helpers.adam_steps(run.checkpoint["optimizer"]) == 4 * 2 * (1 if target_kl else 4)
    assert run.lines[0]["global_step"] == alone.lines[0]["global_step"]


@on_ray
def test_two_learners_are_one_with_the_same_minibatches():
    """Compiled. Both have the same weights, to the last bit; and those of one, but for rounding."""
    script, agents, get_weights = load(COMPILED), [], load(COMPILED).get_weights
    torch.set_num_threads(1)
    args = arguments(script)
    runners = [script.Runner(args, seeds) for seeds in ([1, 2], [3, 4])]
    spaces = runners[0].envs.observation_space, runners[0].envs.action_space
    weights = script.get_weights(script.ActorCritic(*spaces))
    batches = [[runner.sample(i, weights, *NOTHING)[1] for runner in runners] for i in range(20)]
    draw = script.draw_permutations

    def draw_for_both(args, num_steps, num_rows):
        """A minibatch of one learner is that of the first and that of the second: environments 0, 1 and 2, 3."""
        rows = draw(args, num_steps, num_rows // 2)
        t, env = rows // 2, rows % 2
        return torch.cat([t * 4 + env, t * 4 + 2 + env], dim=2)

    for count in (1, 2):
        args = arguments(script, num_learners=count, update_epochs=2)
        with runners_of(script, args) as ray_runners:
            learners = script.OtherLearners(args, ray_runners)
            add_up = learners.add_up if learners.actors else None
            torch.manual_seed(1)
            agent, optimizer, learn = script.make_learner(args, *spaces, torch.device("cpu"), add_up)
            learners.join(torch.device("cpu"), agent, optimizer)
            start = script.get_weights(agent)
            with mock.patch.object(script, "draw_permutations", draw_for_both if count == 1 else draw):
                for batch in batches:
                    shared = [ray_runners.ray.put(x) for x in batch[2 // count :]]
                    learners.update(optimizer, shared)
                    learn(batch[: 2 // count])
            agents.append(script.get_weights(agent))
            assert np.abs(agents[-1] - start).max() > 0.02
            others = [x.__ray_call__.remote(lambda self: get_weights(self.agent)) for x in learners.actors]
            assert all(np.array_equal(x, agents[-1]) for x in ray_runners.ray.get(others)) and len(others) == count - 1
    np.testing.assert_allclose(agents[0], agents[1], rtol=1e-3, atol=1e-4)


def plant(path, word: str, line: int = 1):
    """Put a fault's file in its place when this line is logged: whole, at once."""
    log, count = SCRIPT.Run.log, itertools.count(1)

    def log_and_plant(self, metrics):
        log(self, metrics)
        if next(count) == line:
            path.with_suffix(".new").write_text(word)
            path.with_suffix(".new").rename(path)

    return mock.patch.object(SCRIPT.Run, "log", log_and_plant)


@on_ray
def test_the_others_fill_the_batch_of_a_runner_that_died(train, tmp_path):
    """Batched, so all are waited for, but not for the dead."""
    settings = {"env_id": "Fragile-v0", "env_kwargs": f'{{"path": "{tmp_path / "fault"}"}}', "num_runners": 2}
    with plant(tmp_path / "fault", "SIGKILL"):
        run = train(**settings, total_timesteps=12_800)
    last = run.lines[-1]
    assert last["runners/restarts"] == 1 and last["runners/alive"] == 2 and len(run.lines) == 200
    assert max(line["runners/staleness_max"] for line in run.lines) == 0
    gaps = np.diff([line["seconds"] for line in run.lines])
    assert gaps.max() < 10  # to notice a death takes a second or two, on a busy machine more


@on_ray
def test_a_slow_runner_costs_no_more_than_its_share(train, tmp_path, capsys):
    """One of three becomes ten times slower: two thirds of the speed stay. The log says that what it brings is late."""
    settings = {"env_id": "Fragile-v0", "env_kwargs": f'{{"path": "{tmp_path / "fault"}"}}', "num_runners": 3}
    with plant(tmp_path / "fault", "slow", line=30):
        run = train(**settings, envs_per_runner=1, num_steps=32, rollout="first-ready", total_timesteps=96 * 80)

    def speed(lines: list[dict]) -> float:
        return np.diff([line["global_step"] for line in lines]).sum() / np.diff([x["seconds"] for x in lines]).sum()

    kept = speed(run.lines[40:]) / speed(run.lines[8:30])
    with capsys.disabled():
        print(f" first-ready keeps {kept:.0%}, 67% is the share of the others", end="")
    assert run.lines[-1]["runners/late"] > 0 and kept > 0.75 * 2 / 3  # beside other tests 61 % were kept
