"""A2C and A3C over Ray: their gradient, and who waits for whom.

Runners, the cluster and their faults are the text that test_impala.py is about; here is what is new.
"""

import importlib
import importlib.util
import sys
import time
from pathlib import Path
from unittest import mock

import gymnasium as gym
import helpers
import numpy as np
import pytest
import tiny_envs
import torch
from graph_emulator import use_graphs
from helpers import ROOT, in_float64, load, on_ray, without_times
from parity import CLOSE, assert_agree, weights_of
from test_math import episodes, rollouts
from torch._dynamo.utils import counters

EAGER, COMPILED = "a3c_ray", "a3c_ray_torchcompile"
SCRIPT = load(EAGER)
GAMMA = 0.9
SMALL = {
    "env_id": "tiny_envs:DiscreteStream-v0", "num_runners": 0, "envs_per_runner": 2, "fragment_steps": 8,
    "total_timesteps": 384, "learning_rate": 3e-3, "log_every": 64, "gamma": GAMMA, "device": "cpu",
    "tensorboard": False,
}  # fmt: skip
BOTH_KINDS = pytest.mark.parametrize("env_id", ["tiny_envs:Stream-v0", "tiny_envs:DiscreteStream-v0"])


@pytest.fixture
def train(tmp_path):
    return helpers.trainer(tmp_path, EAGER, SMALL)


# The gradient


@pytest.mark.parametrize("length", [1, 2, 7, 32])
def test_advantages_are_n_step_returns_less_values(length):
    """Within each episode, or part of one, with ends of both kinds; zero in rows of resets."""
    rng = np.random.default_rng(length)
    for rollout in rollouts(rng, [length] * 5):
        reward, terminated, _, valid = rollout
        value = rng.normal(size=(length + 1, 3))
        tensors = [torch.from_numpy(x).double() for x in (reward, value, *rollout[1:])]
        advantage = SCRIPT.n_step_advantage(*tensors, GAMMA).numpy()
        assert not advantage[~valid].any()
        for env, first, last in episodes(*rollout):
            for t in range(first, last + 1):
                after = 0 if terminated[last, env] else GAMMA ** (last + 1 - t) * value[last + 1, env]
                total = sum(GAMMA ** (k - t) * reward[k, env] for k in range(t, last + 1))
                assert advantage[t, env] == pytest.approx(total + after - value[t, env], rel=1e-12, abs=1e-12)


@pytest.fixture
def in_double():
    """The script in float64, while tensors are made in it."""
    with helpers.default_type_of(in_float64(EAGER)):
        yield load(in_float64(EAGER))


def made_up(rng: np.random.Generator, is_discrete: bool) -> list[torch.Tensor]:
    """A fragment, with ends of both kinds and resets."""
    (rollout,) = rollouts(rng, [8], 2)
    action = rng.integers(3, size=(8, 2)) if is_discrete else rng.normal(size=(8, 2, 2))
    return [torch.from_numpy(x) for x in (rng.normal(size=(9, 2, 3)), action, np.stack(rollout, axis=2).astype(float))]


@BOTH_KINDS
def test_one_runner_is_a_plain_actor_critic(in_double, monkeypatch, tmp_path, env_id):
    """Written out row by row, with the optimizer of PyTorch, on what the run's environments went through."""
    seen, chosen, step, to_env = [], [], in_double.Envs.step, in_double.ActorCritic.to_env

    def note_action(self, action):
        chosen.append(action.copy())
        return to_env(self, action)

    def note_step(self, action):
        seen.append((chosen[-1], *step(self, action)))
        return seen[-1][1:]

    monkeypatch.setattr(in_double.ActorCritic, "to_env", note_action)
    monkeypatch.setattr(in_double.Envs, "step", note_step)
    settings = SMALL | {"env_id": env_id, "anneal_lr": False, "run_dir": str(tmp_path / "run"), "ent_coef": 0.01}
    args = in_double.Args(**settings)
    in_double.Run(args)  # draws the weights that the run begins with
    envs = in_double.Envs(args, in_double.Run(args).env_seeds(2))
    obs = envs.reset()
    in_double.Run(args)
    in_double.Runner(args, [1, 2])  # it draws weights of its own first
    agent = in_double.ActorCritic(envs.observation_space, envs.action_space)
    seen.clear()
    run = helpers.call(in_float64(EAGER), **settings)

    optimizer, done = torch.optim.Adam(agent.parameters(), lr=3e-3, eps=1e-3), np.zeros(2, dtype=bool)
    for first in range(0, len(seen), 8):
        rows, loss, count = [], 0.0, 0
        for action, next_obs, reward, terminated, truncated in seen[first : first + 8]:
            rows.append((obs, action, reward, terminated, truncated, done, next_obs))
            obs, done = next_obs, terminated | truncated
        for env in range(2):
            _, (target,) = agent(torch.tensor(rows[-1][6][env : env + 1], dtype=torch.float64))
            for before, action, reward, terminated, truncated, was_done, after in reversed(rows):
                output, (value,) = agent(torch.tensor(before[env : env + 1], dtype=torch.float64))
                if was_done[env]:  # this row was a reset; before it comes the last one of an episode
                    target = value
                    continue
                if truncated[env]:
                    _, (target,) = agent(torch.tensor(after[env : env + 1], dtype=torch.float64))
                target = reward[env] + GAMMA * (0.0 if terminated[env] else target)
                log_prob = agent.log_prob(output, torch.tensor(action[env : env + 1]))
                advantage = torch.as_tensor(target).detach() - value
                loss = loss - (log_prob * advantage.detach()).sum() + args.vf_coef * 0.5 * advantage.square()
                loss = loss - args.ent_coef * agent.entropy(output).sum()
                count += 1
        optimizer.zero_grad()
        (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
        optimizer.step()
    assert run.checkpoint["num_updates"] == len(seen) // 8 > 20
    for name, weight in agent.state_dict().items():
        torch.testing.assert_close(run.checkpoint["agent"][name], weight, rtol=1e-6, atol=1e-8)


@BOTH_KINDS
def test_the_mean_of_gradients_is_that_of_the_joined_batch(in_double, env_id):
    """Of fragments with different numbers of valid rows, too."""
    args = in_double.Args(**SMALL | {"env_id": env_id})
    runner = in_double.Runner(args, [1, 2])
    rng = np.random.default_rng(1)
    fragments = [made_up(rng, runner.agent.is_discrete) for _ in range(3)]
    alone = sum(runner.gradient(*fragment) for fragment in fragments)
    joined = runner.gradient(*(torch.cat(parts, dim=1) for parts in zip(*fragments, strict=True)))
    torch.testing.assert_close(alone, joined, rtol=1e-10, atol=1e-12)
    assert 20 < joined[0] < 48


@BOTH_KINDS
def test_losses_in_the_log_are_those_of_their_names(in_double, env_id):
    runner = in_double.Runner(in_double.Args(**SMALL | {"env_id": env_id}), [1, 2])
    obs, action, rows = made_up(np.random.default_rng(1), runner.agent.is_discrete)
    sums = runner.gradient(obs, action, rows)
    with torch.no_grad():
        output, value = runner.agent(obs.flatten(0, 1))
    output, value, (reward, *ends) = output.view(9, 2, -1)[:-1], value.view(9, 2), rows.unbind(2)
    advantage, valid = in_double.n_step_advantage(reward, value, *ends, GAMMA), ends[2]
    parts = -runner.agent.log_prob(output, action) * advantage, 0.5 * advantage.square(), runner.agent.entropy(output)
    torch.testing.assert_close(sums[-3:], torch.stack([(x * valid).sum() for x in parts]).detach())
    spaces = runner.envs.observation_space, runner.envs.action_space
    *_, descend = in_double.make_learner(runner.args, *spaces, torch.device("cpu"))
    torch.testing.assert_close(descend(sums), sums[-3:] / valid.sum())


def test_rewards_are_cut_down_to_learn(in_double):
    """The gradient is that of a fragment whose rewards were cut down before; without the setting it is another."""
    rng, gradients = np.random.default_rng(1), []
    obs, action, rows = made_up(rng, is_discrete=True)
    cut = torch.cat([rows[..., :1].clamp(-1, 1), rows[..., 1:]], dim=2)
    runner = in_double.Runner(in_double.Args(**SMALL), [1, 2])
    clipping = in_double.Runner(in_double.Args(**SMALL, clip_rewards=True), [1, 2])
    for x in (runner, clipping):
        in_double.set_weights(x.agent, in_double.get_weights(runner.agent))
        gradients.append([x.gradient(obs, action, part) for part in (rows, cut)])
    torch.testing.assert_close(gradients[1], [gradients[0][1]] * 2, rtol=1e-12, atol=0)
    assert not torch.allclose(*gradients[0], rtol=1e-2)


# Runs in one process


@pytest.mark.parametrize("sync_gradients", [True, False])
@pytest.mark.parametrize("name", [EAGER, COMPILED])
def test_run_is_reproduced_to_the_last_bit(train, name, sync_gradients):
    settings = {"sync_gradients": sync_gradients} | ({"compile": False} if name == COMPILED else {})
    a, b = (train(name, **settings) for _ in range(2))
    assert without_times(a).metrics() == without_times(b).metrics() and len(a.lines) > 4
    assert torch.equal(weights_of(a), weights_of(b))
    assert all(line["runners/staleness_max"] == 0 for line in a.lines)


@pytest.mark.slow
@BOTH_KINDS
@pytest.mark.parametrize("compile", [False, True])
def test_compiled_twin_computes_the_same(train, env_id, compile):
    """In float64, over a whole run; compiled, as two graphs, and each once."""
    settings = {"env_id": env_id, "total_timesteps": 768, "clip_rewards": True}
    run = train(in_float64(EAGER), **settings)
    counters.clear()
    with torch._inductor.config.patch(fallback_random=True), torch._dynamo.config.patch(error_on_recompile=True):
        twin = train(in_float64(COMPILED), compile=compile, **settings)
    assert counters["stats"]["unique_graphs"] == 2 * compile and not counters["graph_break"]
    assert_agree(without_times(twin), without_times(run), rel=CLOSE)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_twin_whose_functions_are_replayed_computes_the_same(train, monkeypatch, backend):
    """By CUDA graphs, which are emulated here: what they freeze does not matter. A runner's is for frames on a GPU."""
    run, script, rng = train(in_float64(EAGER)), load(in_float64(COMPILED)), np.random.default_rng(1)
    with monkeypatch.context() as patch:
        graphs = use_graphs(patch, script, backend)
        twin = train(in_float64(COMPILED), compile=backend is not None)
        (descends,) = [graph for graph in graphs if graph.counter]
        with helpers.default_type_of(in_float64(EAGER)):
            runner = load(in_float64(EAGER)).Runner(SCRIPT.Args(**SMALL), [1, 2])
            args = script.Args(**SMALL | {"compile": backend is not None})
            spaces = runner.envs.observation_space, runner.envs.action_space
            agent, gradient = script.make_gradient(args, *spaces, script.validate(args))
            for version in range(10):
                for net in (agent, runner.agent):
                    script.set_weights(net, script.get_weights(runner.agent) * (1 + 0.1 * version))
                fragment = made_up(rng, is_discrete=True)
                torch.testing.assert_close(gradient(*fragment), runner.gradient(*fragment), rtol=1e-8, atol=1e-10)
    assert descends.counter > descends.warmup + 5 and len([graph for graph in graphs if graph.counter == 10]) == 1
    assert_agree(without_times(twin), without_times(run), rel=CLOSE)


def test_a2c_learns_from_the_gradients_of_all_runners(train, monkeypatch):
    """All valid rows count, here of two gradients in a step."""
    rows = []
    collect, make = SCRIPT.OneRunner.collect, SCRIPT.make_learner

    def make_noting(*x):
        agent, optimizer, descend = make(*x)
        return agent, optimizer, lambda sums: (rows.append(float(sums[0])), descend(sums))[1]

    monkeypatch.setattr(SCRIPT.OneRunner, "collect", lambda runners, _count, others: collect(runners, 2, others))
    monkeypatch.setattr(SCRIPT, "make_learner", make_noting)
    run = train()
    assert sum(rows) == run.checkpoint["global_step"] and len(rows) > 10


def test_learning_rate_falls_to_zero_if_asked(train):
    """By the steps that were made before an update."""
    for anneal in (True, False):
        run = train(anneal_lr=anneal, log_every=1)
        expected = [3e-3 * (1 - anneal * step / 384) for step in [0, *run.steps()[:-1]]]
        assert [line["charts/learning_rate"] for line in run.lines] == pytest.approx(expected) and len(expected) > 8


def test_resumed_run_goes_on(train):
    run = train(total_timesteps=192)
    on = helpers.call(EAGER, resume=str(run.run_dir), device="cpu", total_timesteps=384)
    assert on.checkpoint["num_updates"] >= run.checkpoint["num_updates"] + 12
    assert on.lines[: len(run.lines)] == run.lines and on.steps()[-1] >= 384


def test_frames_are_learnt_from(train):
    run = train(env_id="Pong-v5", fragment_steps=4, total_timesteps=16, log_every=8)
    assert {"features.conv1.weight", "critic.weight"} <= run.checkpoint["agent"].keys()
    assert run.checkpoint["num_updates"] > 1 and run.checkpoint["optimizer"]["exp_avg"].any()


# Over Ray


@on_ray
def test_a2c_over_ray_is_the_same_each_time(train):
    """Whichever of two runners comes first. All compute by the newest weights; by A3C they do not."""
    a, b = (without_times(train(num_runners=2, total_timesteps=1500)) for _ in range(2))
    assert torch.equal(weights_of(a), weights_of(b)) and len(a.lines) > 10
    assert all(line["runners/staleness_max"] == 0 for line in (*a.lines, *b.lines))
    late = train(num_runners=2, total_timesteps=1500, sync_gradients=False)
    assert late.checkpoint["num_updates"] > 1.5 * a.checkpoint["num_updates"]
    assert max(line["runners/staleness_max"] for line in late.lines) > 0


@on_ray
def test_the_twin_compiles_in_its_runners(train, monkeypatch):
    """One graph, and learns the same, but for rounding."""
    run, graphs, script = train(num_runners=1, total_timesteps=512), [], load(COMPILED)
    log, counts = script.Run.log, "torch._dynamo.utils"  # of the runner's process; `counters` would be this one's

    def log_and_ask(run, metrics):
        theirs = run.envs.actors[0].__ray_call__.remote(lambda _: importlib.import_module(counts).counters["stats"])
        graphs.append(run.envs.ray.get(theirs)["unique_graphs"])
        log(run, metrics)

    monkeypatch.setattr(script.Run, "log", log_and_ask)
    twin = train(COMPILED, num_runners=1, total_timesteps=512)
    assert graphs[-1] == 1
    torch.testing.assert_close(weights_of(twin), weights_of(run), rtol=1e-3, atol=1e-4)


class Sleepy(tiny_envs.Tiny):
    """Takes 10 ms a step; one of them 100 ms, from when there is a file that says so, or it hangs at its start."""

    def __init__(self, path: str):
        super().__init__(tiny_envs.CHOICE)
        self.path = Path(path)
        try:
            self.path.with_suffix(".owner").touch(exist_ok=False)
            self.may_be_slow = True
        except FileExistsError:
            self.may_be_slow = False
        if self.may_be_slow and self.path.name == "hang":
            time.sleep(600)

    def start(self):
        return np.zeros(3, dtype=np.float32)

    def move(self, _action):
        time.sleep(0.1 if self.may_be_slow and self.path.exists() else 0.01)
        return np.zeros(3, dtype=np.float32), 1.0, False, self.steps % 10 == 0


gym.register("Sleepy-v0", Sleepy)


@on_ray
def test_a_runner_that_hangs_while_it_starts_is_not_awaited_for_ever(train, tmp_path, capfd):
    """A2C's first step would need its gradient; the others give one more instead."""
    run = train(env_id="Sleepy-v0", env_kwargs=f'{{"path": "{tmp_path}/hang"}}', num_runners=2, fragment_timeout=20.0)
    assert run.lines[-1]["runners/alive"] == 1 and run.lines[-1]["global_step"] >= 384
    assert "note: 1 of 2 runners have started within 20 s; they go on without the others" in capfd.readouterr().err


@on_ray
def test_one_slow_runner_does_not_slow_the_others_by_a3c(tmp_path, capsys):
    """Of eight, when one becomes ten times slower: A3C keeps 80 % of its speed, A2C falls to the slowest.

    The median of three times, since other programs may take the cores for a while.
    """
    path, count = tmp_path / "slow", 8
    settings = SMALL | {"env_id": "Sleepy-v0", "env_kwargs": f'{{"path": "{path}"}}', "num_runners": count}
    # As A3C asks; if a gradient of each is waited for, that is A2C
    args = SCRIPT.Args(**settings | {"envs_per_runner": 1, "cpus_per_runner": 0.5, "sync_gradients": False})
    run = SCRIPT.Run(args)
    runners = SCRIPT.GradientRunners(args, run)
    weights = SCRIPT.get_weights(SCRIPT.ActorCritic(*runners.spaces))

    def speed(gradients: int, seconds: float) -> float:
        """Steps per second, when so many gradients make a step."""
        start, first = time.monotonic(), run.step
        while time.monotonic() < start + seconds:
            runners.collect(gradients, 1)
            runners.publish(0, weights)
        return (run.step - first) / (time.monotonic() - start)

    try:
        runners.publish(0, weights)
        while len(runners.alive) < count:
            speed(1, 0.1)
        ratios = []
        for _ in range(3):
            path.unlink(missing_ok=True)
            before = [(speed(gradients, 1), speed(gradients, 2))[1] for gradients in (1, count)]
            path.touch()
            after = [(speed(gradients, 1), speed(gradients, 2))[1] for gradients in (1, count)]
            ratios.append(np.divide(after, before))
    finally:
        runners.close()
    kept = np.median(ratios, axis=0)
    with capsys.disabled():
        print(f" A3C keeps {kept[0]:.0%}, A2C {kept[1]:.0%}", end="")
    assert kept[0] >= 0.8 and kept[1] < 0.3


def test_a_schedule_reaches_runners_as_the_page_says(tmp_path):
    """docs/a3c.md: the entropy's weight falls to zero. Compiled, it is a tensor, so nothing is refused."""
    source = (ROOT / "scripts" / f"{COMPILED}.py").read_text()
    publish = "runners.publish(run.num_updates, get_weights(agent)"
    schedule = "np.float32([args.ent_coef * (1 - run.step / args.total_timesteps)])"
    for old, new, count in (
        ("gradient(obs: Tensor, action: Tensor, rows: Tensor)", "gradient(obs, action, rows, ent_coef)", 1),
        ("args.ent_coef * entropy", "ent_coef * entropy", 1),
        ("def sample(self, version: int, weights: np.ndarray)", "def sample(self, version, weights, ent_coef)", 1),
        ("for x in (obs, action, rows)))", "for x in (obs, action, rows, ent_coef)))", 1),
        (publish, f"{publish}, {schedule}", 2),
    ):
        assert source.count(old) == count, old
        source = source.replace(old, new)
    path = tmp_path / "schedule_of_a3c.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {path.stem: module}):
        spec.loader.exec_module(module)
        seen, sample = [], module.Runner.sample
        note = lambda self, *x: (seen.append(float(x[2][0])), sample(self, *x))[1]  # noqa: E731
        with mock.patch.object(module.Runner, "sample", note):
            module.train(module.Args(**SMALL | {"run_dir": str(tmp_path / "run"), "compile": False}))
    assert seen == sorted(seen, reverse=True) and seen[0] == np.float32(module.Args().ent_coef)
    assert seen[-1] < 0.2 * seen[0]
