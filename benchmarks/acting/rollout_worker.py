"""Sampling by one actor, in a process of its own: python -m benchmarks.acting.rollout_worker SETTINGS, as JSON.

Builds the actor, freezes until it is woken, then samples alternately with it and the uncompiled policy; writes one row.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from benchmarks.acting.networks import make_act
from benchmarks.acting.paths import FIRST_CALLS, Tensors, build, build_and_call
from benchmarks.common import stats, turns
from benchmarks.common.programs import SCRIPTS, load_script

# For each family: the script whose environments and networks are used, at its defaults
FAMILIES = {"classic": "ppo", "mujoco": "ppo_continuous_action", "atari": "ppo_atari_envpool"}
# What --compile-actor means: a path of acting/paths.py
ACTORS = {
    "off": "eager", "inductor": "inductor", "aoti": "aoti", "ort": "ort", "cudagraphs": "inductor+CudaGraphModule",
    "numpy": "numpy",
}  # fmt: skip
ROLLOUT = 256  # steps whose rows are kept, in a ring buffer


def make_view(script: ModuleType, num_envs: int, device: torch.device) -> Callable[[np.ndarray], Tensor]:
    """A function from the environments' observations to the policy's input on the device; it may keep past frames.

    The input is floats (N, O) or, from Atari's newest frames (N, 85, 84), stacks of four (N, 21, 21, 64).
    """
    if not hasattr(script, "push_frame"):
        return lambda obs: torch.from_numpy(obs.astype(np.float32)).to(device)
    stack = torch.zeros(num_envs, 21, 21, 64, dtype=torch.uint8, device=device)

    def view(newest: np.ndarray) -> Tensor:
        frames = torch.from_numpy(newest).to(device)
        stack.copy_(script.push_frame(stack, script.space_to_depth(frames[:, :84]), frames[:, 84, 0] == 1))
        return stack

    return view


class Sampler:
    """Steps environments by a policy and keeps the rows of a rollout: what PPO collects."""

    def __init__(self, family: str, backend: str, num_envs: int, device: torch.device):
        self.name = FAMILIES[family]
        script = self.script = load_script(SCRIPTS / f"{self.name}.py")
        if family == "atari":  # all games at once, as elsewhere; a lost life is no end, so each row is a step
            args = script.Args(num_envs=num_envs, async_envs=False, episodic_life=False)
        else:
            args = script.Args(num_envs=num_envs, sync_envs=backend.endswith("-sync"))
            args.env_backend = backend.removesuffix("-sync")
        self.envs, self.device, self.num_envs = script.Envs(args, list(range(1, num_envs + 1))), device, num_envs
        space = self.envs.action_space
        self.is_discrete = isinstance(space, gym.spaces.Discrete)
        self.num_actions = int(space.n) if self.is_discrete else len(space.low.reshape(-1))
        self.bounds = None if self.is_discrete else (space.low.reshape(-1), space.high.reshape(-1))
        obs_shape = () if family == "atari" else (self.envs.obs_dim,)
        self.act = make_act(self.name, obs_shape=obs_shape, num_actions=self.num_actions).to(device)
        self.view = make_view(script, num_envs, device)
        self.noise = [self.act.draw_noise(num_envs).to(device) for _ in range(ROLLOUT)]
        self.rows = [None] * ROLLOUT
        self.obs, self.done, self.t = self.envs.reset(), np.zeros(num_envs, dtype=bool), 0
        self.steps = self.all_rows = 0  # environment steps, and rows including resets

    def inputs(self) -> Tensors:
        """What the policy is shown (N, ...) and noise (N, A) of the next step, on the device."""
        return self.view(self.obs), self.noise[self.t % ROLLOUT]

    def step(self, call: Callable[..., Tensors]) -> None:
        """One step of all environments, with the given way to run the act function."""
        inputs = self.inputs()
        action, log_prob, value = (x.cpu().numpy() for x in call(*inputs))
        given = self.envs.action_space.start + action if self.is_discrete else action.clip(*self.bounds)
        obs, reward, terminated, truncated = self.envs.step(given)
        row = (self.obs, action, log_prob, value, reward, terminated, truncated, ~self.done)
        self.rows[self.t % ROLLOUT] = row
        self.all_rows += self.num_envs
        self.steps += self.num_envs - int(np.count_nonzero(self.done))  # after an episode's end this call was a reset
        self.obs, self.done, self.t = obs, terminated | truncated, self.t + 1


def measure(settings: dict) -> dict:
    """The row of one actor: environment steps/s, beside those of the uncompiled policy."""
    sampler = Sampler(settings["family"], settings["backend"], settings["num_envs"], torch.device(settings["device"]))
    run = lambda built: sampler.step(built.call)  # noqa: E731
    built, seconds, graphs = build_and_call(ACTORS[settings["actor"]], sampler.act, sampler.inputs(), run)
    off = build("eager", sampler.act, sampler.inputs()).call
    turns.wait_for_turn()
    sampler.steps = sampler.all_rows = 0
    times = turns.interleave(
        {"off": lambda: sampler.step(off), "actor": lambda: sampler.step(built.call)}, settings["seconds"]
    )
    per_call = settings["num_envs"] * sampler.steps / sampler.all_rows
    speeds = {name: np.array([per_call / block.mean() for block in x.blocks]) for name, x in times.items()}
    ratio, interval = stats.ratio_of_rounds(speeds["actor"], speeds["off"])
    first, median, third = np.quantile(speeds["actor"], [0.25, 0.5, 0.75]).tolist()
    p50, p99 = times["actor"].quantiles(0.5, 0.99)
    sampler.envs.close()
    return {
        "steps_per_second": median,
        "quartiles": [first, third],
        "off_steps_per_second": float(np.median(speeds["off"])),
        "ratio": ratio,
        "interval": interval,
        "p50_us": 1e6 * p50,
        "p99_us": 1e6 * p99,
        "cpu_us": 1e6 * times["actor"].cpu,
        "compile_seconds": max(0.0, seconds - FIRST_CALLS * p50),
        "compiled_graphs": graphs,
    }


def main(settings: dict) -> None:
    torch.set_num_threads(settings["threads"])
    with torch.no_grad():
        try:
            row = measure(settings)
        except Exception as error:  # whatever a backend brings up is a result
            row = {"error": turns.describe_error(error)}
    Path(settings["rows"]).write_text(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
