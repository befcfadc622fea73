"""What DQN, SAC and TD3 store, what and how often they learn, what their flags do, and SAC's density."""

import math
from copy import deepcopy
from itertools import pairwise
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import gymnasium as gym
import helpers
import numpy as np
import pytest
import tiny_envs
import torch
from helpers import EAGER, adam_steps, defining, in_float64, load, on_policy, resume
from parity import assert_agree
from torch import nn
from torch._dynamo.utils import counters
from torch.distributions import AffineTransform, Normal, TanhTransform, TransformedDistribution

from benchmarks.common.pairs import FAST, TABLE

OFF_POLICY = [name for name in EAGER if not on_policy(name)]
CONTINUOUS = [name for name in OFF_POLICY if name != "dqn"]


def count_env(name):
    return "tiny_envs:DiscreteCount-v0" if name == "dqn" else "tiny_envs:Count-v0"


def new_buffer(capacity):
    return defining("ReplayBuffer").ReplayBuffer(capacity, obs_dim=2, action_dim=1, device=torch.device("cpu"))


def numbered_rows(first, last):
    return torch.arange(float(first), float(last))[:, None] + torch.tensor([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6])


def test_buffer_overwrites_the_oldest_rows():
    buffer = new_buffer(5)
    for first, last in (0, 2), (2, 4), (4, 7), (7, 12), (12, 13):
        buffer.add(numbered_rows(first, last))
        held = sorted(buffer.rows[: int(buffer.num_written), 0].int().tolist())
        assert held == list(range(max(0, last - 5), last))


def test_buffer_samples_every_row_it_holds_and_no_other():
    buffer = new_buffer(50)
    buffer.add(numbered_rows(1, 4))
    obs, action, reward, next_obs, terminated = buffer.sample(1000)
    assert set(obs[:, 0].int().tolist()) == {1, 2, 3}
    for column, shape, offset in (
        (obs, (1000, 2), [0.0, 0.1]),
        (action, (1000, 1), [0.2]),
        (reward, (1000,), 0.3),
        (next_obs, (1000, 2), [0.4, 0.5]),
        (terminated, (1000,), 0.6),
    ):
        assert column.shape == shape
        torch.testing.assert_close(column, (obs[:, 0] if len(shape) == 1 else obs[:, :1]) + torch.tensor(offset))


def test_buffer_that_was_written_over_samples_every_row():
    buffer = new_buffer(8)
    for first in (0, 8, 13):
        buffer.add(torch.arange(float(first), first + 5)[:, None].repeat(1, 7))
    assert sorted(set(buffer.sample(1000)[0][:, 0].int().tolist())) == [10, 11, 12, 13, 14, 15, 16, 17]


def test_buffer_goes_on_where_its_checkpoint_ended():
    buffer, copy = new_buffer(5), new_buffer(5)
    buffer.add(numbered_rows(0, 4))
    buffer.add(numbered_rows(4, 7))
    copy.load_state_dict(buffer.state_dict())
    for b in (buffer, copy):
        b.add(numbered_rows(7, 9))
    assert torch.equal(buffer.rows, copy.rows) and buffer.num_written == copy.num_written


def test_what_a_copy_added_to_a_buffer_comes_back_or_is_refused(capsys):
    """A number of NumPy's, which a checkpoint holds as a tensor, in place of a float; and what a new buffer lacks."""
    buffer, copy = new_buffer(5), new_buffer(5)
    buffer.most, copy.most = np.float64(2.5), 1.0
    copy.load_state_dict(buffer.state_dict())
    assert type(copy.most) is float and copy.most == 2.5
    buffer.late = 3.0
    with pytest.raises(SystemExit) as end:
        copy.load_state_dict(buffer.state_dict())
    assert end.value.code == 2 and "the saved replay buffer has late: " in capsys.readouterr().err


def test_a_buffer_too_large_for_the_memory_is_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        new_buffer(10**14)
    assert stop.value.code == 2 and capsys.readouterr().err.startswith("error: --buffer-size")


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("name", OFF_POLICY)
def test_replay_holds_real_steps_only(train, name, num_envs):
    """In Count, obs = (episode, step, action); even episodes terminate at step 3, odd ones are cut at step 5."""
    run = train(name, env_id=count_env(name), num_envs=num_envs, sync_envs=True, buffer_size=10_000)
    rows = run.checkpoint["buffer"]["rows"].numpy()
    episode, step = rows[:, 0], rows[:, 1]
    reward, next_episode, next_step, terminated = rows[:, -5], rows[:, -4], rows[:, -3], rows[:, -1]
    assert len(rows) == run.checkpoint["global_step"] == run.steps()[-1] >= 400
    assert np.array_equal(next_episode, episode) and np.array_equal(next_step, step + 1)
    assert np.array_equal(reward, 100 * episode + next_step)
    assert np.array_equal(terminated == 1, (episode % 2 == 0) & (next_step == 3))
    executed = rows[:, -2] - (tiny_envs.CHOICE.start if name == "dqn" else 0)  # which the next observation shows
    assert np.array_equal(rows[:, 3], executed) and len(np.unique(executed)) > 2
    assert next_step[episode % 2 == 1].max() == 5  # the truncated rows are there, and not marked


@pytest.mark.parametrize("num_envs", [1, 3])
def test_dqn_learns_once_for_every_train_frequency_steps(train, num_envs):
    run = train("dqn", env_id="tiny_envs:DiscreteCount-v0", num_envs=num_envs, sync_envs=True)
    updates = adam_steps(run.checkpoint["optimizer"])
    assert updates == pytest.approx((run.checkpoint["global_step"] - 100) / 5, abs=num_envs)


@pytest.mark.slow
@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("name", CONTINUOUS)
def test_one_gradient_step_for_every_transition(train, name, num_envs):
    run = train(name, env_id=count_env(name), num_envs=num_envs, sync_envs=True)
    assert run.checkpoint["num_updates"] == pytest.approx(run.checkpoint["global_step"] - 100, abs=num_envs)
    assert run.checkpoint["num_updates"] == adam_steps(run.checkpoint["critic_optimizer"])


@pytest.mark.parametrize("name", CONTINUOUS)
def test_gradient_steps_are_those_of_a_vector_step(train, name):
    run = train(name, env_id="tiny_envs:Same-v0", num_envs=4, sync_envs=True, gradient_steps=3)
    assert run.checkpoint["num_updates"] == 3 * (400 - 100) // 4


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTINUOUS)
def test_the_policy_acts_the_same_before_critics_learn_and_after(train, name):
    """Where a line of the log is due, it acts after: in one of these runs always, in the other never."""
    often, never = (train(name, log_every=every, num_envs=2, sync_envs=True).checkpoint for every in (1, 10**6))
    for part in ("actor", "critics", "critic_optimizer"):
        assert all(torch.equal(x, never[part][key]) for key, x in often[part].items())
    assert torch.equal(often["buffer"]["rows"], never["buffer"]["rows"])
    assert often["rng"]["numpy"] == never["rng"]["numpy"] and torch.equal(often["rng"]["torch"], never["rng"]["torch"])


def test_epsilon_is_annealed_in_both_twins(train):
    for name in "dqn", "dqn_torchcompile":
        settings = {"exploration_fraction": 0.5, "epsilon_end": 0.05}
        run = train(name, **settings) if name == "dqn" else train(name, **settings, compile=False)
        epsilon = {line["global_step"]: line["charts/epsilon"] for line in run.lines}
        assert epsilon[100] == pytest.approx(1 - 0.95 * 99 / 200)
        assert epsilon[250] == epsilon[400] == pytest.approx(0.05)


def test_epsilon_begins_where_it_is_told_to(train):
    lines = train("dqn", epsilon_start=0.3, epsilon_end=0.1, exploration_fraction=1.0).lines
    assert [line["charts/epsilon"] for line in lines] == pytest.approx(
        [0.3 - 0.2 * (line["global_step"] - 1) / 400 for line in lines]
    )


@pytest.mark.parametrize("layers", [(), (nn.BatchNorm1d(4),)], ids=["plain", "with buffers"])
def test_dqn_copies_its_network_in_one_piece(layers):
    """To where it acts, of whatever layers, and in place: the function on NumPy arrays reads the same memory."""
    script = load("dqn")
    network = nn.Sequential(nn.Linear(3, 4), *layers, nn.ReLU(), nn.Linear(4, 2))
    acting = deepcopy(network)
    for weight in network.parameters():
        nn.init.normal_(weight)
    network(torch.randn(8, 3))  # buffers change, too
    network.eval(), acting.eval()
    act, obs = script.numpy_mlp(acting), torch.randn(5, 3)
    network[0].scale = 2.0
    script.update_copy(network, acting)
    assert acting[0].scale == 2 and script.copy_on_cpu(network) is network
    torch.testing.assert_close(dict(acting.state_dict()), dict(network.state_dict()), rtol=0, atol=0)
    torch.testing.assert_close(torch.from_numpy(act(obs.numpy())), network(obs).detach())


def test_dqn_target_is_copied_when_due(train):
    before = train("dqn", total_timesteps=345, target_network_frequency=50).checkpoint
    after = train("dqn", total_timesteps=350, target_network_frequency=50).checkpoint
    assert not torch.equal(before["network"]["net.0.weight"], before["target_network"]["net.0.weight"])
    assert torch.equal(after["network"]["net.0.weight"], after["target_network"]["net.0.weight"])


@pytest.mark.parametrize("total_timesteps", [150, 155])
def test_sac_targets_move_when_due(train, total_timesteps):
    """Each tenth update, by tau = 1 to where the critics are."""
    settings = {"learning_starts": 100, "tau": 1.0, "target_network_frequency": 10}
    run = train("sac_continuous_action", total_timesteps=total_timesteps, **settings).checkpoint
    assert run["num_updates"] == total_timesteps - 100
    same = [torch.equal(run["critics"][name], target) for name, target in run["target_critics"].items()]
    assert same and all(same) == any(same) == (total_timesteps == 150)


def test_sac_targets_take_turns_after_2_to_the_24_updates(train):
    """From there on a count in float32 stays as it is; the optimizer's is one, as CUDA's kernel wants it."""
    script, updates = load("sac_continuous_action"), 2**24
    half = train("sac_continuous_action", total_timesteps=150, target_network_frequency=2)
    steps = {"critic_optimizer": half.checkpoint["critic_optimizer"] | {"steps": torch.tensor(float(updates))}}
    changed = half.checkpoint | steps | {"num_updates": updates}
    changed["args"] = half.checkpoint["args"] | {"total_timesteps": 170}
    torch.save(changed, half.run_dir / "checkpoint.pt")
    shares, move = [], script.move_towards
    with mock.patch.object(script, "move_towards", lambda *x: (shares.append(float(x[2])), move(*x))):
        resume("sac_continuous_action", half.run_dir)
    assert shares == pytest.approx([0, FAST["tau"]] * 10)


def test_sac_draws_normal_noise_by_itself():
    script, space = load("sac_continuous_action"), gym.spaces.Box(-2, 4, (2,))
    torch.manual_seed(1)
    actor = script.Actor(3, space)
    with torch.no_grad():
        mean, log_std = actor(torch.ones(1, 3))
        action = actor.sample(torch.ones(200_000, 3))[0]
        x = (((action - 1) / 3).atanh() - mean) / log_std.exp()
    torch.testing.assert_close(x.mean(0), torch.zeros(2), atol=0.02, rtol=0)
    torch.testing.assert_close(x.std(0), torch.ones(2), atol=0.02, rtol=0)
    assert (x.abs() > 3).float().mean() == pytest.approx(0.0027, abs=0.001)


@pytest.mark.slow
def test_td3_acts_by_its_actor(train, monkeypatch):
    """Which is not the target, though that is near it."""
    script, acting, aiming = load("td3_continuous_action"), [], []
    noisy = script.Actor.noisy

    def note(actor, obs, std, clip=math.inf, noise=None):
        (aiming if noise is None else acting).append(actor)
        return noisy(actor, obs, std, clip, noise)

    monkeypatch.setattr(script.Actor, "noisy", note)
    run = train("td3_continuous_action").checkpoint
    for actors, part in ((acting, "actor"), (aiming, "target_actor")):
        assert len(set(map(id, actors))) == 1
        assert all(torch.equal(x, run[part][name]) for name, x in actors[0].state_dict().items())
    assert not torch.equal(run["actor"]["net.0.weight"], run["target_actor"]["net.0.weight"])


@pytest.mark.parametrize("name", ["sac_continuous_action", "td3_continuous_action"])
def test_a_rounded_policy_is_played_rounded(train, name):
    """By the layers that it has learnt with."""
    script, run = load(name), train(name, bf16=True, total_timesteps=120)
    envs, obs = script.Envs(script.Args(**run.checkpoint["args"]), [1]), np.ones((1, 3), np.float32)
    exact = run.checkpoint | {"args": run.checkpoint["args"] | {"bf16": False}}
    with mock.patch.object(script.RoundedLinear, "forward", lambda _, x: torch.zeros_like(x)):
        rounded = script.load_policy(run.checkpoint, envs)(obs[:, : envs.obs_dim])
        assert (rounded != script.load_policy(exact, envs)(obs[:, : envs.obs_dim])).all()


@pytest.mark.slow
@pytest.mark.parametrize("num_envs", [1, 2])
@pytest.mark.parametrize("name", CONTINUOUS)
def test_a_compiled_policy_multiplies_a_single_row_by_loops(train, name, num_envs):
    """Only the policy, and only for one environment: a batch's products stay calls to the library."""
    counters.clear()
    train(f"{name}_torchcompile", num_envs=num_envs)
    found = {key: count for key, count in counters["inductor"].items() if key in ("decompose_addmm", "decompose_bmm")}
    assert found == ({"decompose_addmm": 3} if num_envs == 1 else {})  # a layer each


@pytest.mark.slow
def test_sac_has_a_learning_rate_for_the_policy_and_one_for_values(train):
    """The temperature learns by that of the values; it starts at 1 if it is tuned, else it is --alpha."""
    run = train("sac_continuous_action", policy_lr=1e-4, q_lr=2e-4)
    found = {name: float(run.checkpoint[f"{name}_optimizer"]["learning_rate"]) for name in ("actor", "critic", "alpha")}
    assert found == pytest.approx({"actor": 1e-4, "critic": 2e-4, "alpha": 2e-4})
    for autotune, alpha in ((True, 1.0), (False, 0.1)):
        fresh = train("sac_continuous_action", autotune=autotune, alpha=0.1, total_timesteps=64, learning_starts=1000)
        assert fresh.checkpoint["temperature"]["log_alpha"].exp() == pytest.approx(alpha)


def test_a_temperature_that_does_not_count_is_said(train, capfd):
    train("sac_continuous_action", total_timesteps=64, alpha=0.1)
    assert "--alpha is for --no-autotune" in capfd.readouterr().err


@pytest.mark.parametrize(("name", "settings"), [(name, x) for name in OFF_POLICY for x in TABLE[name].learns_with])
def test_flags_work_past_learning_starts(train, name, settings):
    """Of compiled scripts test_pairs.py shows that they compute the same by the flags that their graphs depend on."""
    run = train(name, **settings, total_timesteps=200)
    torch.set_float32_matmul_precision("highest")
    losses = [tag for tag in run.lines[-1] if tag.startswith("losses/")]
    assert losses == list(load(name).METRICS)
    if settings.get("autotune") is False:
        assert run.lines[-1]["losses/alpha"] == pytest.approx(0.1)
    if "policy_frequency" in settings and name == "sac_continuous_action":
        missed = run.checkpoint["num_updates"] % settings["policy_frequency"]
        assert adam_steps(run.checkpoint["actor_optimizer"]) == run.checkpoint["num_updates"] - missed


@pytest.mark.parametrize("name", [name for name in OFF_POLICY if name != "dqn"])
def test_bfloat16_rounds_the_products_of_hidden_layers_only(train, name):
    """Of the same weights, outputs are near; the last layer's have the resolution of float32, as have all weights."""
    torch.manual_seed(1)
    script, obs = load(name), torch.randn(64, 3)
    exact, rounded = (script.Critic(2, 1, bf16) for bf16 in (False, True))
    torch.nn.init.constant_(exact.net[-1].bias, 20)  # where bfloat16 would go by steps of 0.125
    rounded.load_state_dict(exact.state_dict())
    with torch.no_grad():
        a, b = (critic(obs[:, :2], obs[:, 2:]) for critic in (exact, rounded))
    assert b.dtype == torch.float32 and not torch.equal(a, b)
    torch.testing.assert_close(a, b, atol=5e-3, rtol=0)
    assert len(b.unique()) > 32  # by steps of 0.125 they would be a few values
    run = train(name, bf16=True, total_timesteps=120)
    weights = [x for part in ("actor", "critics", "critic_optimizer") for x in run.checkpoint[part].values()]
    assert weights and {x.dtype for x in weights} == {torch.float32}


@pytest.mark.slow
def test_compiled_twin_in_bfloat16_stays_near_its_eager_script(train):
    """What both have rounded to 8 bits differs in the last one, as sums run in another order. SAC has such layers."""
    settings = TABLE["td3_continuous_action"].stream | {"bf16": True}
    runs = [train(name, **settings) for name in ("td3_continuous_action_torchcompile", "td3_continuous_action")]
    assert_agree(*runs, rel=0.05)


def test_exploration_can_be_annealed_from_the_start(train):
    lines = train("dqn", exploration_fraction=0.0).lines
    assert [line["charts/epsilon"] for line in lines] == pytest.approx([0.05] * len(lines))


@pytest.mark.slow
@pytest.mark.parametrize("name", OFF_POLICY)
def test_without_its_replay_a_resumed_run_first_collects_anew(train, name):
    script = load(name)
    full = train(name, save_replay=False, checkpoint_every=100, total_timesteps=400)
    assert "buffer" not in full.checkpoint
    half = train(name, save_replay=False, total_timesteps=200)
    resumed = resume(name, half.run_dir, total_timesteps=400)
    assert resumed.steps()[-1] == 400 and resumed.checkpoint["script"] == f"{script.__name__}.py"
    optimizer = "optimizer" if name == "dqn" else "critic_optimizer"
    new_updates = adam_steps(resumed.checkpoint[optimizer]) - adam_steps(half.checkpoint[optimizer])
    assert new_updates == (400 - 200 - 100) // (5 if name == "dqn" else 1)


@pytest.mark.parametrize("name", CONTINUOUS)
def test_without_its_replay_a_run_that_had_not_learnt_begins_anew_at_random(train, monkeypatch, name):
    """Else an actor that has learnt nothing would fill the replay buffer."""
    half = train(name, save_replay=False, learning_starts=150, total_timesteps=100, num_envs=1)
    steps, answer = [], load(name).Courier.answer
    monkeypatch.setattr(load(name).Courier, "answer", lambda *x: (steps.append(1), answer(*x))[1])
    assert resume(name, half.run_dir, total_timesteps=300).steps()[-1] == 300
    assert 50 <= len(steps) < 60  # of steps 251 to 300, and rows of resets


@pytest.mark.parametrize("name", CONTINUOUS)
def test_without_its_replay_a_run_that_has_learnt_goes_on_with_its_policy(train, monkeypatch, name):
    """While it refills it, and after."""
    half = train(name, save_replay=False, total_timesteps=200, num_envs=1)
    answers, answer = [], load(name).Courier.answer
    monkeypatch.setattr(load(name).Courier, "answer", lambda *x: (answers.append(1), answer(*x))[1])
    assert resume(name, half.run_dir, total_timesteps=260).steps()[-1] == 260 and len(answers) >= 60


@pytest.mark.parametrize("name", CONTINUOUS)
def test_actions_keep_each_dimensions_bounds_and_use_them(train, name):
    train(name, num_envs=1)
    actions, space = np.stack(tiny_envs.received), tiny_envs.PUSH
    assert (actions >= space.low).all() and (actions <= space.high).all()
    assert (np.ptp(actions, axis=0) > 0.8 * (space.high - space.low)).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTINUOUS)
def test_no_action_beyond_the_bounds_reaches_an_environment(train, name):
    for script in (name, f"{name}_torchcompile"):
        beyond = lambda _, obs: np.full((len(obs), 2), 9, np.float32)  # noqa: E731
        with mock.patch.object(load(script).Courier, "answer", beyond):
            train(script, **({} if script == name else {"compile": False}), num_envs=1)
        assert np.array_equal(tiny_envs.received[-1], tiny_envs.PUSH.high)


@pytest.mark.parametrize("name", CONTINUOUS)
@pytest.mark.parametrize(("low", "high"), [(-2.0, -1.6), (-0.1, 0.5)])
def test_a_saturated_policy_stays_within_bounds_that_rounding_misses(name, low, high):
    """center + scale is not always the bound, but a float next to it, on the wrong side."""
    script, space = load(name), gym.spaces.Box(low, high, (1,))
    actor = script.Actor(3, space)
    for weights in list(actor.parameters())[-2:]:
        torch.nn.init.constant_(weights, 100.0)
    envs = SimpleNamespace(obs_dim=3, action_space=space)
    for sign in (1, -1):
        torch.nn.init.constant_(list(actor.parameters())[-1], 1e6 * sign)
        action = script.load_policy({"actor": actor.state_dict(), "args": {}}, envs)(np.ones((1, 3), np.float32))
        assert space.contains(action[0].astype(np.float32)), action


def test_squashed_density_is_that_of_the_transformed_distribution():
    script, generator = load("sac_continuous_action"), torch.Generator().manual_seed(1)
    mean, log_std, noise = torch.randn(3, 500, 4, generator=generator, dtype=torch.float64)
    scale, center = torch.tensor([0.1, 1.0, 2.5, 40.0]).double(), torch.tensor([-1.0, 0.0, 3.0, 7.0]).double()
    x = mean + log_std.exp() * noise
    transforms = [TanhTransform(cache_size=1), AffineTransform(center, scale, cache_size=1)]
    reference = TransformedDistribution(Normal(mean, log_std.exp()), transforms)
    action = x
    for transform in transforms:
        action = transform(action)
    ours = script.squashed_log_prob(x, noise, log_std, scale)
    torch.testing.assert_close(ours, reference.log_prob(action).sum(1))
    far = script.squashed_log_prob(torch.full((1, 1), 60.0), torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1))
    assert far.isfinite().all()  # where 1 - tanh^2 is zero in floating point


def test_squashed_density_integrates_to_one_over_its_bounds():
    script = load("sac_continuous_action")
    for mean, log_std, low, high in (0.3, -0.5, -0.1, 0.3), (-1.0, 0.4, -2.0, 0.5):
        action = torch.linspace(low, high, 200_003, dtype=torch.float64)[1:-1, None]
        center, scale = (high + low) / 2, (high - low) / 2
        x = ((action - center) / scale).atanh()
        std = torch.full_like(x, log_std)
        density = script.squashed_log_prob(x, (x - mean) / std.exp(), std, torch.tensor([scale]).double()).exp()
        assert torch.trapezoid(density, action[:, 0]).item() == pytest.approx(1, abs=2e-3)


def test_td3_noise_is_scaled_and_clipped_by_dimension():
    script = load("td3_continuous_action")
    torch.manual_seed(1)
    space = gym.spaces.Box(np.float32([-1, -10]), np.float32([1, 30]))
    actor, obs = script.Actor(3, space), torch.randn(5000, 3)
    action = actor(obs)
    change = (actor.noisy(obs, std=0.2, clip=0.5) - action).detach() / torch.tensor([1.0, 20.0])
    assert change.abs().max() == pytest.approx(0.5, abs=1e-5)
    assert change.std(0).numpy() == pytest.approx([0.2, 0.2], rel=0.1)
    wild = actor.noisy(obs, std=50.0)
    assert wild.amin(0).tolist() == [-1, -10] and wild.amax(0).tolist() == [1, 30]


# Each step, against its formula as the paper has it


class Step(NamedTuple):
    """A step of an optimizer: its name, its gradients, all networks before it, the batch, and the noise drawn last."""

    optimizer: str
    gradients: tuple[torch.Tensor, ...]
    networks: dict[str, torch.nn.Module]
    batch: tuple[torch.Tensor, ...]
    noise: torch.Tensor | None


@pytest.fixture
def steps_of(train, monkeypatch):
    """Train in float64 -> the steps of all optimizers: name, settings -> list."""

    def steps_of(name: str, **settings) -> list[Step]:
        script, steps, now = load(in_float64(name)), [], {"noise": None}
        open_run, sample, step = script.Run.open, script.ReplayBuffer.sample, script.Adam.step

        def note_parts(run, envs, **parts):
            now["parts"] = parts
            open_run(run, envs, **parts)

        def note_batch(buffer, size):
            now["batch"] = sample(buffer, size)
            return now["batch"]

        def note_step(optimizer, gradients):
            name = next(key for key, x in now["parts"].items() if x is optimizer)
            networks = {key: x for key, x in now["parts"].items() if "optimizer" not in key and key != "buffer"}
            steps.append(Step(name, gradients, deepcopy(networks), now["batch"], now["noise"]))
            step(optimizer, gradients)

        monkeypatch.setattr(script.Run, "open", note_parts)
        monkeypatch.setattr(script.ReplayBuffer, "sample", note_batch)
        monkeypatch.setattr(script.Adam, "step", note_step)
        method = {"sac_continuous_action": "sample", "td3_continuous_action": "noisy"}.get(name)
        if method:
            act = getattr(script.Actor, method)

            def note_noise(actor, obs, *settings, **noise):
                if len(settings) != 1:  # else it acts in the environment
                    noise["noise"] = now["noise"] = torch.randn(len(obs), len(actor.scale))
                return act(actor, obs, *settings, **noise)

            monkeypatch.setattr(script.Actor, method, note_noise)
        train(in_float64(name), **settings)
        return steps

    return steps_of


def assert_gradient(step: Step, network: str, loss: torch.Tensor) -> None:
    expected = torch.autograd.grad(loss, list(step.networks[network].parameters()))
    for ours, x in zip(step.gradients, expected, strict=True):
        torch.testing.assert_close(ours, x, rtol=1e-7, atol=1e-10)


def assert_moved(target: torch.nn.Module, before: torch.nn.Module, online: torch.nn.Module, tau: float) -> None:
    for x, old, new in zip(target.parameters(), before.parameters(), online.parameters(), strict=True):
        torch.testing.assert_close(x, (1 - tau) * old + tau * new, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("double_dqn", [False, True])
def test_dqn_descends_the_squared_error(steps_of, double_dqn):
    """Its target network is some updates behind, and the two ways to choose the next action differ."""
    settings, differ = {"double_dqn": double_dqn, "target_network_frequency": 100, "learning_rate": 1e-2}, []
    for step in steps_of("dqn", **settings)[-40:]:
        network, target_network = step.networks.values()
        loss = 0.0
        for obs, action, reward, next_obs, terminated in zip(*step.batch, strict=True):
            following = target_network(next_obs).detach()
            best = network(next_obs).argmax() if double_dqn else following.argmax()
            differ.append(bool(network(next_obs).argmax() != following.argmax()))
            target = reward + (0 if terminated else 0.99 * following[best])
            loss = loss + (network(obs)[int(action)] - target) ** 2 / 16
        assert_gradient(step, "network", loss)
    assert any(differ)


def test_sac_descends_its_losses(steps_of):
    """Equations (5), (7) and (18). The temperature learns from the action that the actor has just learnt from."""
    steps, critic_of_minimum = steps_of("sac_continuous_action", policy_lr=3e-3, total_timesteps=120), set()
    assert {step.optimizer for step in steps} == {f"{part}_optimizer" for part in ("critic", "actor", "alpha")}
    for before, step in zip([None, *steps], steps, strict=False):
        networks, (obs, action, reward, next_obs, terminated) = step.networks, step.batch
        (alpha,) = networks["temperature"].parameters()
        actor = (before if step.optimizer == "alpha_optimizer" else step).networks["actor"]
        mean, raw = actor.net(next_obs if step.optimizer == "critic_optimizer" else obs).chunk(2, dim=1)
        log_std = -5 + (2 - -5) * (raw.tanh() + 1) / 2
        x = mean + log_std.exp() * step.noise
        log_prob = (Normal(mean, log_std.exp()).log_prob(x) - (actor.scale * (1 - x.tanh().square())).log()).sum(1)
        chosen = actor.center + actor.scale * x.tanh()
        if step.optimizer == "critic_optimizer":
            following = torch.stack([critic(next_obs, chosen) for critic in networks["target_critics"]])
            critic_of_minimum |= set(following.argmin(0).tolist())
            soft = following.min(0).values - alpha.exp() * log_prob
            target = (reward + FAST["gamma"] * (1 - terminated) * soft).detach()
            losses = [(critic(obs, action) - target).square().mean() for critic in networks["critics"]]
            assert_gradient(step, "critics", sum(losses))
        elif step.optimizer == "actor_optimizer":
            value = torch.stack([critic(obs, chosen) for critic in networks["critics"]])
            assert_gradient(step, "actor", (alpha.exp().detach() * log_prob - value.min(0).values).mean())
        else:
            assert_gradient(step, "temperature", (alpha.exp() * (-log_prob - -2).detach()).mean())
    assert critic_of_minimum == {0, 1}
    for step, following in pairwise(steps):
        now, before = (x.networks["target_critics"] for x in (following, step))
        assert_moved(now, before, following.networks["critics"], FAST["tau"] * (step.optimizer == "critic_optimizer"))


def test_td3_descends_its_losses(steps_of):
    """Targets by smoothed actions of the target actor; actor and targets move with every second step of the critics."""
    settings = {"policy_noise": 0.5, "noise_clip": 0.3, "learning_rate": 3e-3, "total_timesteps": 140}
    steps, critic_of_minimum = steps_of("td3_continuous_action", **settings), set()
    order = ["critic_optimizer", "critic_optimizer", "actor_optimizer"] * 20
    assert [step.optimizer for step in steps] == order
    for step in steps:
        networks, (obs, action, reward, next_obs, terminated) = step.networks, step.batch
        if step.optimizer == "actor_optimizer":
            assert_gradient(step, "actor", -networks["critics"][0](obs, networks["actor"](obs)).mean())
            continue
        actor = networks["target_actor"]
        low, high = actor.center - actor.scale, actor.center + actor.scale
        noise = actor.scale * (0.5 * step.noise).clamp(-0.3, 0.3)
        chosen = (actor.center + actor.scale * actor.net(next_obs).tanh() + noise).clamp(low, high)
        following = torch.stack([critic(next_obs, chosen) for critic in networks["target_critics"]])
        critic_of_minimum |= set(following.argmin(0).tolist())
        target = (reward + FAST["gamma"] * (1 - terminated) * following.min(0).values).detach()
        losses = [(critic(obs, action) - target).square().mean() for critic in networks["critics"]]
        assert_gradient(step, "critics", sum(losses))
    assert critic_of_minimum == {0, 1}
    for step, following in pairwise(steps):
        for name in ("actor", "critics"):
            now, before = (x.networks[f"target_{name}"] for x in (following, step))
            assert_moved(now, before, following.networks[name], FAST["tau"] * (step.optimizer == "actor_optimizer"))


@pytest.mark.parametrize("name", OFF_POLICY)
def test_losses_in_the_log_are_those_of_the_last_update(steps_of, monkeypatch, name):
    """By the weights before that update."""
    script, lines = load(in_float64(name)), []
    log = script.Run.log
    monkeypatch.setattr(script.Run, "log", lambda run, metrics: (lines.append(dict(metrics)), log(run, metrics))[1])
    last = {step.optimizer: step for step in steps_of(name, log_every=1, total_timesteps=140)}
    step = last["optimizer" if name == "dqn" else "critic_optimizer"]
    networks, (obs, action, reward, next_obs, terminated) = step.networks, step.batch
    gamma = script.Args.gamma if name == "dqn" else FAST["gamma"]
    with torch.no_grad():
        if name == "dqn":
            q = networks["network"](obs).gather(1, action.long()).squeeze(1)
            next_q, named = networks["target_network"](next_obs).amax(1), {"q_values": q.mean()}
        else:
            if name.startswith("sac"):
                following, log_prob = networks["actor"].sample(next_obs, step.noise)
                bonus = -networks["temperature"]() * log_prob
                part = last["actor_optimizer"]  # whose action the temperature learns from, too
                chosen, density = part.networks["actor"].sample(part.batch[0], part.noise)
                value = torch.stack([critic(part.batch[0], chosen) for critic in part.networks["critics"]]).amin(0)
                alpha = last["alpha_optimizer"].networks["temperature"]()
                named = {"alpha": alpha, "actor_loss": (alpha * density - value).mean()}
                named["alpha_loss"] = (alpha * (2 - density)).mean()  # the entropy aimed at is -2, for two dimensions
            else:
                policy, before = networks["target_actor"], last["actor_optimizer"].networks
                low, high = policy.center - policy.scale, policy.center + policy.scale
                noise = policy.scale * (0.2 * step.noise).clamp(-0.5, 0.5)
                following, bonus = (policy(next_obs) + noise).clamp(low, high), 0
                named = {"actor_loss": -before["critics"][0](obs, before["actor"](obs)).mean()}
            q = torch.stack([critic(obs, action) for critic in networks["critics"]])
            next_q = torch.stack([critic(next_obs, following) for critic in networks["target_critics"]]).amin(0) + bonus
            named |= {"qf1_values": q[0].mean(), "qf2_values": q[1].mean()}
        loss = (q - reward - gamma * (1 - terminated) * next_q).square().mean(-1)
    named |= {"td_loss": loss} if name == "dqn" else {"qf1_loss": loss[0], "qf2_loss": loss[1], "qf_loss": loss.mean()}
    for key, value in named.items():
        assert lines[-1][f"losses/{key}"] == pytest.approx(value.item(), rel=1e-7), key


def test_the_target_of_dqn_moves_by_tau(steps_of):
    steps = steps_of("dqn", tau=0.3, target_network_frequency=10, learning_rate=1e-2)
    for number, (step, following) in enumerate(pairwise(steps), start=21):  # counted from step 0 on, 5 steps each
        before, after, is_due = step.networks, following.networks, number % 2 == 0
        assert_moved(after["target_network"], before["target_network"], after["network"], 0.3 * is_due)


def test_the_policy_of_a_checkpoint_of_sac_is_the_squashed_mean():
    script = load("sac_continuous_action")
    actor, obs = script.Actor(3, tiny_envs.PUSH), np.random.default_rng(1).normal(size=(5, 3))
    envs = SimpleNamespace(obs_dim=3, action_space=tiny_envs.PUSH)
    policy = script.load_policy({"actor": actor.state_dict(), "args": {}}, envs)
    mean = actor.net(torch.tensor(obs, dtype=torch.float32)).detach().numpy()[:, :2]
    low, high = tiny_envs.PUSH.low, tiny_envs.PUSH.high
    np.testing.assert_allclose(policy(obs), low + (high - low) * (np.tanh(mean) + 1) / 2, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["dqn", "td3_continuous_action"])
def test_policy_acts_at_the_observation_of_each_environment(train, monkeypatch, name):
    """Where nothing is explored: by the best action, or the actor's, at what that environment showed last."""
    script, seen = load(name), []
    step = script.Envs.step
    note = lambda envs, x: (seen.append((envs.last_obs.copy(), x.copy())), step(envs, x))[1]  # noqa: E731
    monkeypatch.setattr(script.Envs, "step", note)
    quiet = {"epsilon_start": 0.0, "epsilon_end": 0.0} if name == "dqn" else {"exploration_noise": 0.0}
    run = train(name, num_envs=3, sync_envs=True, learning_rate=0.0, learning_starts=0, total_timesteps=60, **quiet)
    envs = script.Envs(script.Args(**run.checkpoint["args"]), [1, 2, 3])
    policy = script.load_policy(run.checkpoint, envs)  # by `forward`
    for obs, action in seen:
        np.testing.assert_allclose(action, policy(obs), rtol=1e-4, atol=1e-5)
    assert len(np.unique(np.stack([action for _, action in seen]))) > 1


def test_courier_brings_each_row_its_own_action():
    obs = np.arange(6.0).reshape(2, 3)
    courier = defining("Courier").Courier(lambda inputs: inputs[:, :3], 1, torch.device("cpu"))
    assert courier.answer(obs).tolist() == obs.tolist()


# How they explore


def test_dqn_explores_all_actions_alike(train):
    """Within four standard deviations; not by the greedy action, of which there is only one."""
    train("dqn", env_id="tiny_envs:DiscreteSame-v0", epsilon_end=1.0, learning_starts=1500, total_timesteps=1500)
    share = np.bincount(np.array(tiny_envs.received) - 5, minlength=3) / 1500
    assert len(share) == 3 and (np.abs(share - 1 / 3) < 4 * math.sqrt(2 / 9 / 1500)).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTINUOUS)
def test_actions_are_drawn_from_the_policy(train, name):
    """Of a policy that does not change, and sees one observation: mean and spread, within four standard deviations."""
    rates = {"policy_lr": 0.0, "q_lr": 0.0} if name.startswith("sac") else {"learning_rate": 0.0}
    settings = {"num_envs": 8, "sync_envs": True, "gradient_steps": 1, "learning_starts": 8, "total_timesteps": 2408}
    run = train(name, env_id="tiny_envs:Same-v0", **settings, **rates)
    actor = load(name).Actor(3, tiny_envs.PUSH)
    actor.load_state_dict(run.checkpoint["actor"])
    action = (torch.tensor(np.stack(tiny_envs.received[8:])) - actor.center) / actor.scale
    with torch.no_grad():
        output = actor(torch.full((1, 3), 0.5))
    if name.startswith("sac"):
        (mean, log_std), action = (x[0] for x in output), action.atanh()
        std = log_std.exp()
    else:
        mean, std = (output[0] - actor.center) / actor.scale, torch.full((2,), 0.1)
    count = len(action)
    assert count == 2400 and ((action.mean(0) - mean).abs() < 4 * std / math.sqrt(count)).all()
    assert ((action - mean) / std).abs().max() > 3  # of 4,800 normal ones, all are smaller in 2 of a million cases
    torch.testing.assert_close(action.std(0), std, rtol=4 / math.sqrt(2 * count), atol=0)


def test_each_environment_explores_by_itself(train):
    """Half of the time, one of three actions alike: all eight do what is greedy in (2/3)**8 = 4 % of the steps."""
    settings = {"num_envs": 8, "sync_envs": True, "learning_starts": 4000, "total_timesteps": 4000}
    train("dqn", env_id="tiny_envs:DiscreteSame-v0", epsilon_start=0.5, epsilon_end=0.5, buffer_size=4000, **settings)
    actions = np.array(tiny_envs.received).reshape(-1, 8)
    greedy = np.bincount(actions.ravel()).argmax()
    share = (actions == greedy).all(1).mean()
    assert share == pytest.approx((2 / 3) ** 8, abs=4 * math.sqrt(0.04 / 500))


@pytest.mark.parametrize("name", CONTINUOUS)
def test_first_actions_are_uniform_within_the_bounds(train, name):
    """Within four standard deviations."""
    count, space = 1600, tiny_envs.PUSH
    train(name, env_id="tiny_envs:Same-v0", num_envs=4, sync_envs=True, learning_starts=count, total_timesteps=count)
    share = (np.stack(tiny_envs.received) - space.low) / (space.high - space.low)
    assert len(share) == count and (np.abs(share.mean(0) - 0.5) < 4 / np.sqrt(12 * count)).all()
    for part in np.arange(1, 5) / 5:
        assert (np.abs((share < part).mean(0) - part) < 4 * np.sqrt(0.25 / count)).all()


@pytest.mark.parametrize("name", ["dqn", "sac_continuous_action_torchcompile", "td3_continuous_action"])
def test_a_process_gets_back_what_a_run_has_set_for_all_of_it(tmp_path, monkeypatch, name):
    """In a notebook, the next run computes as if it were the first; SAC takes as many threads as it was given."""

    def found() -> tuple:
        return torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32

    before = found()
    monkeypatch.setattr(load(name), "num_cores", lambda: 2)  # SAC and TD3 take as many threads, DQN one
    try:
        torch.set_num_threads(3)
        torch.set_float32_matmul_precision("medium")
        torch.backends.cudnn.allow_tf32 = False
        overrides = {} if name == "dqn" else {"matmul_precision": "high"}
        overrides |= {"compile": False} if "torchcompile" in name else {}
        settings = helpers.settings_of(name.removesuffix("_torchcompile"), overrides)
        was_flushing = not (torch.tensor(1e-310, dtype=torch.float64) * 1).item()
        with mock.patch("torch.set_flush_denormal") as flush:
            module = load(name)
            module.train(module.Args(**settings, device="cpu", tensorboard=False, run_dir=str(tmp_path / "run")))
        assert found() == (3, "medium", False)
        assert [call.args[0] for call in flush.call_args_list] == [True, was_flushing]
    finally:
        torch.set_num_threads(before[0])
        torch.set_float32_matmul_precision(before[1])
        torch.backends.cudnn.allow_tf32 = before[2]


@pytest.mark.parametrize(
    ("load_of", "cores", "noted"), [(3.5, 2, True), (0.9, 2, False), (3.5, 1, False), (9, 16, False)]
)
def test_threads_that_would_wait_for_each_other_are_noted(monkeypatch, capsys, load_of, cores, noted):
    script = load("td3_continuous_action")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(script, "num_cores", lambda: cores)
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    monkeypatch.setattr("os.getloadavg", lambda: (load_of, 0, 0))
    with mock.patch("torch.set_num_threads"):
        script.use_threads(most=4)
        monkeypatch.setattr("os.cpu_count", lambda: 64)  # a container on a busy machine
        script.use_threads(most=4)
    assert capsys.readouterr().err.count("OMP_NUM_THREADS=1 is faster") == noted


def test_a_rounded_layer_needs_no_bias():
    """As before a LayerNorm."""
    script, x = load("sac_continuous_action"), torch.randn(4, 8)
    layer = script.RoundedLinear(8, 3, bias=False)
    assert torch.allclose(layer(x), x @ layer.weight.T, atol=0.05) and layer(x).dtype == torch.float32


@pytest.mark.parametrize(("asked", "threads"), [("", 3), ("1", 1), ("9", 3), ("2,1", 2)])
@pytest.mark.parametrize("name", ["sac_continuous_action", "td3_continuous_action_torchcompile"])
def test_threads_are_those_that_the_user_asks_for(monkeypatch, name, asked, threads):
    """PyTorch reads OMP_NUM_THREADS, a list for nested regions perhaps, when it is imported."""
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    monkeypatch.setattr(load(name), "num_cores", lambda: 3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: int(asked[:1] or 48))
    with mock.patch("torch.set_num_threads", side_effect=StopIteration) as called, pytest.raises(StopIteration):
        load(name).train(load(name).Args(device="cpu"))
    assert called.call_args_list[0] == mock.call(threads)
