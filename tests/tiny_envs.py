"""Environments that take no time and whose course is known, as `tiny_envs:Name-v0`; the tests' folder must be a path.

`received` holds the actions that all environments of this process were given, in order. The environment variable
TINY_EVENT makes something happen at an environment's own n-th step: SIGKILL@n to this process, another signal to the
training, raise@n, nan_reward@n, nan_obs@n. Of several worker processes it happens in all but the first.
"""

import contextlib
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete

EVENT = os.environ.get("TINY_EVENT", "")
received = []
last_observation = 0.5

PUSH = Box(np.array([-0.1, -2.0], np.float32), np.array([0.3, 0.5], np.float32))  # each dimension has its own bounds
CHOICE = Discrete(3, start=5)
LINE = Box(-np.inf, np.inf, (3,))


class Tiny(gym.Env):
    """What all share: records its actions, and lets EVENT happen. A subclass says what `start` and `move` return."""

    def __init__(self, action_space: gym.Space, observation_space: gym.Space = LINE):
        self.action_space, self.observation_space, self.steps = action_space, observation_space, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        return self.start(), {}

    def step(self, action):
        received.append(np.array(action))
        self.steps += 1
        obs, reward, terminated, truncated = self.move(action)
        event, _, at = EVENT.partition("@")
        if at == str(self.steps) and not multiprocessing.current_process().name.endswith("-0"):
            if event == "raise":
                raise RuntimeError("this environment broke")
            elif event == "disconnect":
                raise ConnectionResetError("the simulator is gone")
            elif event == "nan_reward":
                reward = float("nan")
            elif event == "nan_obs":
                obs = obs * np.nan
            else:
                training = multiprocessing.parent_process() or multiprocessing.current_process()
                os.kill(os.getpid() if event == "SIGKILL" else training.pid, getattr(signal, event))
        return obs, reward, terminated, truncated, {}


class Reach(Tiny):
    """A point to be pushed to the origin. Every tenth step or so ends the episode; gymnasium cuts it at 15 steps."""

    def start(self):
        self.position = self.np_random.normal(size=2)
        return self.observe()

    def observe(self):
        return np.array([*self.position, self.np_random.normal()], dtype=np.float32)

    def move(self, action):
        push = action if isinstance(self.action_space, Box) else np.array([action - 6, 0.1])
        self.position = 0.9 * self.position + 0.3 * push
        return self.observe(), -float(np.abs(self.position).sum()), self.np_random.random() < 0.1, False


class Stream(Tiny):
    """Observes three numbers that go their way whatever is done, so rounding errors do not grow from step to step.

    The reward is smooth in observation and action. Every twelfth step or so ends the episode; gymnasium cuts it at 15.
    """

    def start(self):
        self.numbers = self.np_random.normal(size=3)
        return self.numbers.astype(np.float32)

    def move(self, action):
        if isinstance(self.action_space, Box):
            low, high = self.action_space.low, self.action_space.high
            error = (2 * action - low - high) / (high - low) - np.tanh(self.numbers[:2])
            reward = 1 - float((error**2).sum())
        else:
            reward = float(np.tanh(self.numbers[action - self.action_space.start]))
        self.numbers = 0.9 * self.numbers + 0.4 * self.np_random.normal(size=3)
        return self.numbers.astype(np.float32), reward, self.np_random.random() < 1 / 12, False


class Count(Tiny):
    """Observes (episode, its steps so far, the first number of the last action); rewards 100 * episode + steps.

    Even episodes terminate at step 3, odd ones are truncated at step 5.
    """

    def __init__(self):
        super().__init__(PUSH)
        self.episode = -1

    def start(self):
        self.episode, self.t = self.episode + 1, 0
        return np.array([self.episode, 0, 0], dtype=np.float32)

    def move(self, action):
        self.t += 1
        obs, even = np.array([self.episode, self.t, action[0]], dtype=np.float32), self.episode % 2 == 0
        return obs, 100.0 * self.episode + self.t, even and self.t == 3, not even and self.t == 5


class DiscreteCount(Count):
    def __init__(self):
        super().__init__()
        self.action_space = CHOICE

    def move(self, action):
        return super().move([float(action)])


class Matrix(Tiny):
    """Actions are a matrix, each number of which has bounds of its own."""

    def __init__(self):
        super().__init__(Box(np.array([[-1, 0], [-0.5, -2]], np.float32), np.array([[1, 3], [0.2, 0]], np.float32)))

    def start(self):
        return self.np_random.normal(size=3).astype(np.float32)

    def move(self, action):
        return self.start(), -float(np.abs(action).sum()), self.np_random.random() < 0.1, self.steps % 15 == 0


class Same(Tiny):
    """Always the same observation, so that nothing tells two steps apart. Ends, if ever, after four steps.

    The reward is 1 in an environment that ends; in an endless one, the smaller the action the greater it is. What is
    observed at the end is `last_observation`.
    """

    def __init__(self, action_space: gym.Space, end: str | None):
        super().__init__(action_space)
        self.end = end

    def start(self):
        self.t = 0
        return np.full(3, 0.5, dtype=np.float32)

    def move(self, action):
        self.t += 1
        end = self.end if self.t == 4 else None
        obs = np.full(3, last_observation if end else 0.5, dtype=np.float32)
        return obs, 1.0 if self.end else -float(np.abs(action).sum()), end == "terminated", end == "truncated"


class Shaped(Tiny):
    """Observations of a given space, filled with 0, 1, 2, ... in the order of the keys, plus the number of steps."""

    def __init__(self, observation_space: gym.Space):
        super().__init__(PUSH, observation_space)

    def start(self):
        self.t = 0
        return self.observe()

    def observe(self):
        if isinstance(self.observation_space, Dict):
            a = np.arange(2.0).reshape(1, 2) + self.t
            return {"b": np.arange(2.0, 5.0) + self.t, "a": a}
        shape = self.observation_space.shape
        return (np.arange(np.prod(shape)).reshape(shape) + self.t).astype(np.uint8)

    def move(self, _action):
        self.t += 1
        return self.observe(), 1.0, False, self.t == 20


class Odd(Tiny):
    """From its third episode on, observations are of another shape than their space; or `info` has odd keys or types.

    Of several worker processes, the first has an integer where others have decimals. Or flags are no bools; an error
    comes that can't be pickled, or that ends the process; or a worker process never ends.
    """

    def __init__(self, what: str, size: int = 0):
        super().__init__(CHOICE)
        self.what, self.size, self.episode = what, size, 0

    def start(self):
        self.episode += 1
        return np.zeros(self.size if self.what == "first shape" else 3, dtype=np.float32)

    def move(self, _action):
        is_odd = self.what == "shape" and self.episode > 2
        return np.zeros(self.size if is_odd else 3, dtype=np.float32), 1.0, False, self.steps % 10 == 0

    def step(self, action):
        *row, info = super().step(action)
        if self.what == "error" and self.episode > 2:
            raise type("OfNoModule", (Exception,), {})("out\nof order")
        if self.what == "flags":  # no bools, and none where nothing ends
            row[2:] = [int(row[2]), 1.0 if row[3] else None]
        if self.what == "exit" and self.episode > 2:  # as by a window of PyGame that was closed
            sys.exit()
        is_first = multiprocessing.current_process().name.endswith("-0")
        more = {"info": {0: 1.0, "big": 10**400, "own": 2}, "types": {"part": 1 if is_first else 0.75}}
        more["arrays"] = {"legal": np.arange(self.steps), "for": np.timedelta64(5, "s"), "own": 2}
        more["arrays"] |= {"any": 1 if is_first else "text"}
        return *row, info | more.get(self.what, {})

    def close(self):
        if self.what == "close" and multiprocessing.parent_process():
            time.sleep(300)


class Fragile(Tiny):
    """Raises, ends its process, hangs, rewards with NaN, or is slow from then on, when a file says so.

    Of several, one does.
    """

    def __init__(self, path: str):
        super().__init__(CHOICE)
        self.path, self.seconds = Path(path), 0.002

    def start(self):
        return np.zeros(3, dtype=np.float32)

    def move(self, _action):
        with contextlib.suppress(FileNotFoundError):  # there is none, or another runner took it
            word = self.path.read_text()
            self.path.rename(self.path.with_suffix(".taken"))
            if word == "raise":
                raise ValueError("the simulator\nis out of order")
            if word in ("SIGKILL", "SIGTERM"):
                os.kill(os.getpid(), getattr(signal, word))
                time.sleep(0.1)
            if word == "hang":
                time.sleep(600)
            if word == "nan":
                return np.zeros(3, dtype=np.float32), float("nan"), False, False
            self.seconds *= 10
        time.sleep(self.seconds)
        return np.zeros(3, dtype=np.float32), 1.0, False, self.steps % 10 == 0


class Ragged(Tiny):
    """Its `info` holds an array of another length each time, which a vector of environments can't put together."""

    def __init__(self):
        super().__init__(CHOICE)

    def start(self):
        return np.zeros(3, dtype=np.float32)

    def move(self, _action):
        return np.zeros(3, dtype=np.float32), 1.0, False, self.steps % 10 == 0

    def step(self, action):
        *outcome, _ = super().step(action)
        return *outcome, {"seen": np.zeros(int(self.np_random.integers(1, 9)))}


gym.register("Ragged-v0", Ragged)
for prefix, space in ("", PUSH), ("Discrete", CHOICE):
    gym.register(f"{prefix}Same-v0", Same, kwargs={"action_space": space, "end": None})
    for end in "terminated", "truncated":
        gym.register(f"{prefix}{end.title()}-v0", Same, kwargs={"action_space": space, "end": end})
gym.register("Reach-v0", Reach, kwargs={"action_space": PUSH}, max_episode_steps=15)
gym.register("Choose-v0", Reach, kwargs={"action_space": CHOICE}, max_episode_steps=15)
gym.register("Stream-v0", Stream, kwargs={"action_space": PUSH}, max_episode_steps=15)
gym.register("DiscreteStream-v0", Stream, kwargs={"action_space": CHOICE}, max_episode_steps=15)
gym.register("ReachNumber-v0", Tiny, kwargs={"action_space": PUSH, "observation_space": Discrete(4)})
gym.register("ChooseNumber-v0", Tiny, kwargs={"action_space": CHOICE, "observation_space": Discrete(4)})
gym.register("Count-v0", Count)
gym.register("DiscreteCount-v0", DiscreteCount)
gym.register("Matrix-v0", Matrix)


class Stillborn(Reach):
    """Of the worker processes, the first dies as it makes this, and the others take for ever; the parent makes one."""

    def __init__(self, action_space: gym.Space):
        super().__init__(action_space)
        if multiprocessing.parent_process():
            is_first = multiprocessing.current_process().name.endswith("-0")
            os.kill(os.getpid(), signal.SIGKILL) if is_first else time.sleep(600)


gym.register("Stillborn-v0", Stillborn, kwargs={"action_space": PUSH})


class Closing(Fragile):
    """Writes a line into a file when it is closed, which takes a while."""

    def move(self, _action):
        return np.zeros(3, dtype=np.float32), 1.0, False, self.steps % 10 == 0

    def close(self):
        time.sleep(0.5)
        with self.path.open("a") as file:
            file.write("closed\n")


class Starting(Reach):
    """Starts a program at each reset, asks it to end, and shows by which signal it did."""

    def start(self):
        program = subprocess.Popen(["sleep", "60"])
        program.terminate()
        super().start()
        return np.full(3, program.wait(timeout=10), dtype=np.float32)


class Drawing(Tiny):
    """Draws from the generators that a whole process has in common."""

    def __init__(self, action_space: gym.Space):
        super().__init__(action_space)
        self.made = np.random.random()

    def start(self):
        return np.array([self.made, np.random.random(), random.random()], dtype=np.float32)

    def move(self, action):
        return self.start(), float(action), False, False


class Leaving(Reach):
    """Goes to another folder whenever it can."""

    def __init__(self, action_space: gym.Space, folder: str):
        super().__init__(action_space)
        self.folder = folder
        os.chdir(folder)

    def start(self):
        os.chdir(self.folder)
        return super().start()


class Scaled(Shaped):
    """Pixels between 0 and 1, by a space of bytes."""

    def observe(self):
        return super().observe() / 255


gym.register("Starting-v0", Starting, kwargs={"action_space": PUSH})
gym.register("Drawing-v0", Drawing, kwargs={"action_space": CHOICE})
gym.register("Leaving-v0", Leaving, kwargs={"action_space": CHOICE})
gym.register("Scaled-v0", Scaled, kwargs={"observation_space": Box(0, 255, (4, 4), np.uint8)})
gym.register("ScaledLine-v0", Scaled, kwargs={"observation_space": Box(0, 255, (4,), np.uint8)})
gym.register("Closing-v0", Closing)
gym.register("Fragile-v0", Fragile)
gym.register("Odd-v0", Odd)
gym.register("Image-v0", Shaped, kwargs={"observation_space": Box(0, 255, (2, 3, 1), np.uint8)})
gym.register("Pixels-v0", Shaped, kwargs={"observation_space": Box(0, 255, (20, 20, 3), np.uint8)})
PARTS = {"b": Box(-np.inf, np.inf, (3,), np.float64), "a": Box(-np.inf, np.inf, (1, 2), np.float64)}
gym.register("Parts-v0", Shaped, kwargs={"observation_space": Dict(PARTS)})
