"""What all scripts over Ray share: runners with numbers of their own, learners with shares of their own."""

from types import SimpleNamespace
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import test_ppo_ray
import tiny_envs
import torch
from helpers import load, small_settings

ACTOR_CRITICS = ["impala_ray", "a3c_ray", "ppo_ray"]
RAY = [*ACTOR_CRITICS, "apex_dqn_ray"]


# Random numbers


@pytest.mark.parametrize("name", RAY)
def test_each_runner_draws_numbers_of_its_own(name):
    script = load(name)
    args = script.Args(**small_settings(name) | {"num_runners": 2})
    size = args.envs_per_runner
    drawn = [script.Runner(args, [first + i for i in range(size)]).rng.random(4) for first in (1, 9, 1)]
    assert np.array_equal(drawn[0], drawn[2]) and not np.isin(drawn[0], drawn[1]).any()


@pytest.mark.parametrize("name", RAY)
def test_environments_of_all_runners_have_seeds_of_their_own(name):
    """Those of a runner that replaces a dead one, too."""
    script, given = load(name), []
    runners = object.__new__(script.RayRunners)
    runners.args, runners.seeds = script.Args(num_runners=3, envs_per_runner=2), list(range(6))
    runners.actors, runners.in_flight = {}, {}
    runners.remote = SimpleNamespace(remote=lambda _args, seeds, _spec: given.extend(seeds) or mock.Mock())
    for runners.restarts in range(3):
        for index in range(3):
            runners.start(index)
    assert given[:6] == runners.seeds and len(set(given)) == 18


@pytest.mark.parametrize("name", RAY)
def test_noise_is_new_in_each_fragment(name):
    """Of an environment that always looks the same, so that only noise tells two fragments apart."""
    script, found = load(name), []
    settings = {"env_id": "tiny_envs:DiscreteSame-v0", "num_runners": 1, "epsilon_base": 0.9}
    args = script.Args(**small_settings(name) | {key: x for key, x in settings.items() if hasattr(script.Args, key)})
    runner = script.Runner(args, list(range(args.envs_per_runner)))
    net = runner.network if name == "apex_dqn_ray" else runner.agent
    for version in range(2):
        tiny_envs.received.clear()
        runner.sample(version, script.get_weights(net), *(test_ppo_ray.NOTHING if name == "ppo_ray" else ()))
        found.append(np.array(tiny_envs.received))
    assert len(found[0]) == len(found[1]) >= 16 and not np.array_equal(*found)


# Actions


@pytest.mark.parametrize("name", ACTOR_CRITICS)
def test_runners_give_environments_actions_as_they_take_them(train, name):
    for env_id in ("tiny_envs:Choose-v0", "tiny_envs:Reach-v0"):
        tiny_envs.received.clear()
        train(name, **small_settings(name) | {"env_id": env_id})
        actions, space = np.array(tiny_envs.received), gym.make(env_id).action_space
        if isinstance(space, gym.spaces.Box):
            assert (actions.min(0) == space.low).all() and (actions.max(0) == space.high).all()
        else:
            assert set(actions.tolist()) == {5, 6, 7}


@pytest.mark.parametrize("name", ACTOR_CRITICS)
def test_entropy_is_that_of_torch(name):
    script, output = load(name), torch.randn(7, 3)
    agent = script.ActorCritic(tiny_envs.LINE, tiny_envs.CHOICE)
    torch.testing.assert_close(agent.entropy(output), torch.distributions.Categorical(logits=output).entropy())
    agent, log_std = script.ActorCritic(tiny_envs.LINE, tiny_envs.PUSH), torch.tensor([-1.0, 0.5])
    agent.log_std.data = log_std.clone()
    expected = torch.distributions.Normal(output[:, :2], log_std.exp()).entropy().sum(1)
    torch.testing.assert_close(agent.entropy(output[:, :2]), expected)


# Learners


@pytest.mark.parametrize("name", ["impala_ray", "ppo_ray"])
def test_other_learners_get_the_learning_rate_and_fragments_of_their_own(name):
    script, seen = load(name), []
    learners = object.__new__(script.OtherLearners)
    learners.results, learners.actors = [], [mock.Mock() for _ in range(3)]
    learners.update(torch.tensor(0.5), list("abcdef"))
    assert [x.learn.remote.call_args.args for x in learners.actors] == [(0.5, *pair) for pair in ("ab", "cd", "ef")]
    learner = object.__new__(script.RemoteLearner)
    learner.optimizer = SimpleNamespace(learning_rate=torch.tensor(1.0))
    learner.learn_from = lambda fragments: seen.append((float(learner.optimizer.learning_rate), fragments))
    learner.learn(0.5, "a", "b")
    assert seen == [(0.5, ("a", "b"))]
