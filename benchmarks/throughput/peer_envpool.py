"""EnvPool's environments for Stable-Baselines3, which expects a reset within the step that ends an episode."""

import numpy as np
from stable_baselines3.common.vec_env import VecEnv


class EnvPoolVecEnv(VecEnv):
    """Adapts a vector environment of EnvPool, made as in the scripts, to SB3's interface, and records episodes."""

    def __init__(self, vector):
        self.vector = vector
        super().__init__(vector.num_envs, vector.observation_space, vector.action_space)
        self.returns, self.lengths = np.zeros(vector.num_envs), np.zeros(vector.num_envs, dtype=int)

    def reset(self) -> np.ndarray:
        return self.vector.reset()[0]

    def step_async(self, actions: np.ndarray) -> None:
        self.actions = actions

    def step_wait(self):
        obs, reward, terminated, truncated, more = self.vector.step(self.actions)
        done, infos = terminated | truncated, [{} for _ in range(self.num_envs)]
        self.returns += more.get("reward", reward)  # the score, where the reward is clipped
        self.lengths += 1
        # An Atari game may continue after a lost life, which ends the episode for the learner only
        over = (more["terminated"].astype(bool) | truncated) if "terminated" in more else done
        for i in np.flatnonzero(over):
            infos[i]["episode"] = {"r": float(self.returns[i]), "l": int(self.lengths[i])}
            self.returns[i] = self.lengths[i] = 0
        ended = np.flatnonzero(done)
        for i in ended:
            infos[i] |= {"terminal_observation": obs[i].copy(), "TimeLimit.truncated": bool(truncated[i])}
        if len(ended):
            # The step after an end resets, whatever the action; `reset` would begin a new game after a lost life
            actions = np.zeros((len(ended), *self.action_space.shape), dtype=self.action_space.dtype)
            first_obs, *_, more = self.vector.step(actions, ended.astype(np.int32))
            obs[more["env_id"]] = first_obs
        return obs, reward, done, infos

    def close(self) -> None:
        self.vector.close()

    def env_is_wrapped(self, wrapper_class, indices=None) -> list[bool]:  # noqa: ARG002
        return [False] * self.num_envs

    def get_attr(self, attr_name: str, indices=None) -> list:  # noqa: ARG002
        return [getattr(self.vector, attr_name, None)] * self.num_envs

    def set_attr(self, attr_name: str, value, indices=None) -> None:
        raise NotImplementedError

    def env_method(self, method_name: str, *args, indices=None, **kwargs) -> list:
        raise NotImplementedError
