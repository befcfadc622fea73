"""Pools of other libraries and ours, each as an object with `exchange() -> env steps done`, `finish` and `close`.

`make` makes one environment with two actions and can be pickled. Ours, tianshou's, torchrl's and `EnvPoolAsync` give
actions to those that are ready first; the others step all environments in lock-step.
"""

import importlib.util
from collections.abc import Callable
from functools import partial
from unittest import mock

import cloudpickle
import numpy as np

from benchmarks.common.programs import SCRIPTS, load_script

SCRIPT = SCRIPTS / "ppo_env_pool.py"


class LockStep:
    """A vector environment; each exchange is one step of all its environments."""

    def __init__(self, vector, step: Callable[[np.ndarray], object], num_envs: int):
        self.num_envs, self.action, self.step, self.close = num_envs, np.zeros(num_envs, dtype=int), step, vector.close
        vector.reset()

    def exchange(self) -> int:
        self.step(self.action)
        return self.num_envs

    def finish(self) -> None:
        """Nothing is under way between two exchanges."""


def gymnasium_sync(make: Callable, num_envs: int) -> LockStep:
    import gymnasium as gym

    vector = gym.vector.SyncVectorEnv([make] * num_envs)
    return LockStep(vector, vector.step, num_envs)


def gymnasium_async(make: Callable, num_envs: int) -> LockStep:
    import gymnasium as gym

    vector = gym.vector.AsyncVectorEnv([make] * num_envs, context="forkserver")
    return LockStep(vector, vector.step, num_envs)


def sb3(make: Callable, num_envs: int) -> LockStep:
    from stable_baselines3.common.vec_env import SubprocVecEnv

    vector = SubprocVecEnv([make] * num_envs, start_method="forkserver")
    return LockStep(vector, vector.step, num_envs)


def envpool_sync(_make: Callable, num_envs: int) -> LockStep:
    """EnvPool can step only its own environments; here CartPole, in one thread."""
    import envpool

    vector = envpool.make_gymnasium("CartPole-v1", num_envs=num_envs, num_threads=1)
    return LockStep(vector, vector.step, num_envs)


class FirstReady:
    """Ready environments get their next actions, in batches of `ready_batch` or more; that is all these pools share."""

    def __init__(self, num_envs: int, ready_batch: int):
        self.num_envs, self.ready_batch = num_envs, ready_batch
        self.ready, self.action = np.arange(num_envs), np.zeros(num_envs, dtype=int)

    def send(self, action: np.ndarray, ids: np.ndarray) -> None:
        raise NotImplementedError

    def receive(self, count: int) -> np.ndarray:
        """Indices of those that are ready, at least `count` of them if that many are under way."""
        raise NotImplementedError

    def exchange(self) -> int:
        self.send(self.action[: len(self.ready)], self.ready)
        self.ready = self.receive(self.ready_batch)
        return len(self.ready)

    def finish(self) -> None:
        while len(self.ready) < self.num_envs:
            self.ready = np.union1d(self.ready, self.receive(self.num_envs - len(self.ready)))


class EnvPoolAsync(FirstReady):
    """EnvPool's own CartPole, in one thread."""

    def __init__(self, _make: Callable, num_envs: int, ready_batch: int):
        import envpool

        super().__init__(num_envs, ready_batch)
        self.pool = envpool.make_gymnasium("CartPole-v1", num_envs=num_envs, batch_size=ready_batch, num_threads=1)
        self.pool.async_reset()
        self.ready, self.close = self.receive(ready_batch), self.pool.close

    def send(self, action: np.ndarray, ids: np.ndarray) -> None:
        self.pool.send(action, ids)

    def receive(self, _count: int) -> np.ndarray:
        return self.pool.recv()[-1]["env_id"]

    def finish(self) -> None:
        """It returns whole batches only, so steps under way stay under way."""


class Tianshou(FirstReady):
    """tianshou's ShmemVectorEnv with `wait_num`."""

    def __init__(self, make: Callable, num_envs: int, ready_batch: int):
        from tianshou.env import ShmemVectorEnv

        super().__init__(num_envs, ready_batch)
        self.pool = ShmemVectorEnv([make] * num_envs, wait_num=ready_batch)
        self.pool.reset()
        self.close = self.pool.close

    def exchange(self) -> int:
        """One call sends and receives."""
        *_, info = self.pool.step(self.action[: len(self.ready)], self.ready)
        self.ready = np.array([x["env_id"] for x in info])
        return len(self.ready)

    def finish(self) -> None:
        """Its next `step` deals with those still under way."""


def torchrl_env(make: Callable):
    from torchrl.envs import GymWrapper

    return GymWrapper(make())


class TorchRL(FirstReady):
    """torchrl's AsyncEnvPool, through shared memory."""

    def __init__(self, make: Callable, num_envs: int, ready_batch: int):
        from torchrl.envs import AsyncEnvPool

        super().__init__(num_envs, ready_batch)
        env_fns = [partial(torchrl_env, make)] * num_envs
        self.pool = AsyncEnvPool(env_fns, backend="multiprocessing", stack="dense", exchange="shm")
        self.first = self.rows = self.pool.reset()
        self.first["action"] = self.pool.action_spec.rand()
        self.close = self.pool.shutdown

    def exchange(self) -> int:
        """The rows that come back still hold their last actions, so they can be sent again."""
        self.pool.async_step_send(self.rows)
        self.rows = self.pool.async_step_recv(min_get=self.ready_batch)
        return len(self.rows)

    def finish(self) -> None:
        if len(self.rows) < self.num_envs:
            self.pool.async_step_recv(min_get=self.num_envs - len(self.rows))
        self.rows = self.first


class Ours(FirstReady):
    """The pool of the script; `envs_per_worker` of them in each worker."""

    def __init__(self, make: Callable, num_envs: int, ready_batch: int, envs_per_worker: int = 1):
        super().__init__(num_envs, ready_batch)
        script = load_script(SCRIPT)
        args = script.Args(num_workers=num_envs // envs_per_worker, envs_per_worker=envs_per_worker)
        cloudpickle.register_pickle_by_value(script)  # otherwise workers would import the script, and so PyTorch
        with mock.patch.object(script, "make_env", lambda _env, _settings: make()):
            self.pool = script.Pool(args, list(range(num_envs)))
        cloudpickle.unregister_pickle_by_value(script)
        self.send, self.close = self.pool.send, self.pool.close

    def receive(self, count: int) -> np.ndarray:
        return self.pool.recv(count)[-1]


class OursInRollouts(Ours):
    """An exchange is a rollout as in training: each takes `length` steps, and those that are done wait for the rest."""

    def __init__(self, make: Callable, num_envs: int, ready_batch: int, length: int):
        super().__init__(make, num_envs, ready_batch)
        self.length = length

    def exchange(self) -> int:
        count, ready = np.zeros(self.num_envs, dtype=int), np.arange(self.num_envs)
        while count.min() < self.length:
            self.send(self.action[ready], ready)
            ready = self.receive(self.ready_batch)
            count[ready] += 1
            ready = ready[count[ready] < self.length]
        return self.num_envs * self.length


def installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
