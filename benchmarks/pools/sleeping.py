"""Environments whose steps take a known time but no processor time, as `benchmarks.pools.sleeping:Name-v0`."""

import time

import gymnasium as gym
import numpy as np

STEP, TAIL, CHANCE = 0.003, 0.1, 0.01  # seconds, seconds, probability: the example of a talk
TALK = """Raoul Khouri, [A 24x Speedup for Reinforcement Learning with RLlib +
Ray](https://speakerdeck.com/anyscale/a-24x-speedup-for-reinforcement-learning-with-rllib-plus-ray-raoul-khouri-two-sigma),
2021"""


class Sleeping(gym.Env):
    """Sleeps `step` seconds at each step and, with probability `chance`, `tail` more; observes zeros, never ends.

    With `step=0` it does not sleep at all: the time that a vector of them takes is then the vector's own overhead.
    """

    observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)
    render_mode = None

    def __init__(self, step: float = STEP, tail: float = TAIL, chance: float = CHANCE):
        self.step_seconds, self.tail, self.chance = step, tail, chance
        self.obs = np.zeros(4, dtype=np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        return self.obs, {}

    def step(self, _action):
        if self.step_seconds:
            time.sleep(self.step_seconds + self.tail * (self.np_random.random() < self.chance))
        return self.obs, 1.0, False, False, {}


class SleepingCartPole(gym.Wrapper):
    """CartPole in slow motion: a step takes what a step of `Sleeping` takes."""

    def __init__(self):
        super().__init__(gym.make("CartPole-v1", disable_env_checker=True))
        self.clock = Sleeping()

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.clock.reset(seed=seed)
        return self.env.reset(seed=seed, options=options)

    def step(self, action):
        self.clock.step(action)
        return self.env.step(action)


gym.register("SlowCartPole-v0", SleepingCartPole)
gym.register("Sleeping-v0", Sleeping)
