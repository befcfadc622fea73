"""The rungs of a ladder: a pair without some of its tricks.

    python -m benchmarks.throughput.rungs PAIR NUMBER [FLAGS]
    python -m benchmarks.throughput.rungs --check PAIR RESULT.json

The second command trains all rungs for about fifty updates and compares what they learn with the eager script.

A trick is removed from a script at run time, by replacing some of its lines and rebinding some of its names. The lowest
rung lacks all tricks and is a plain loop, as tutorials write it; each rung above adds one trick; the top is the
compiled script as it stands. All of them learn the same numbers, up to rounding.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch import Tensor, nn

from benchmarks.common.programs import SCRIPTS, SUFFIX, fail
from benchmarks.common.results import write_whole
from benchmarks.throughput import parity

# The environment for the comparison: in MuJoCo's, rounding errors grow a thousandfold within a rollout
SMOOTH = ("--env-id", "Pendulum-v1")


@dataclass(frozen=True)
class Trick:
    """What a rung adds to the one below it, and how to remove it."""

    name: str
    texts: tuple[tuple[str, str], ...] = ()  # (text in the script, its replacement without the trick)
    names: dict[str, Callable] = field(default_factory=dict)  # by name in the script: its value without the trick
    is_compiled: bool = False  # whether its rung, and all above it, use the compiled script


class OptimAdam(nn.Module):
    """`torch.optim.Adam` behind the interface of the scripts' Adam."""

    def __init__(self, module: nn.Module, learning_rate: float, eps: float = 1e-8, betas: tuple = (0.9, 0.999)):
        super().__init__()
        self.weights = list(module.parameters())
        self.register_buffer("learning_rate", torch.tensor(learning_rate))
        self.adam = torch.optim.Adam(self.weights, learning_rate, betas, eps)

    def step(self, gradients: tuple[Tensor, ...]) -> None:
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.grad = gradient
        self.adam.param_groups[0]["lr"] = float(self.learning_rate)
        self.adam.step()


def looped_sum(x: Tensor, decay: Tensor) -> Tensor:
    """The scripts' `discounted_sum` as a loop over time: y[t] = x[t] + decay[t] * y[t + 1]."""
    y = x.clone()
    for t in reversed(range(len(x) - 1)):
        y[t] += decay[t] * y[t + 1]
    return y


def torch_policy(net: nn.Module) -> Callable:
    """In place of `numpy_mlp`: the network itself."""
    return torch.no_grad()(lambda x: net(torch.from_numpy(x)).numpy())


def compile_broken(_device: torch.device, *functions, **_options) -> list[Callable]:
    """In place of `compiled`: the obvious first attempt; the graph breaks where the gradient is computed."""
    return [torch.compile(function) for function in functions]


def compile_whole(_device: torch.device, *functions, **_options) -> list[Callable]:
    """In place of `compiled`: one graph with gradient and Adam, launched from Python, all guards checked."""
    torch._dynamo.config.trace_autograd_ops = True
    return [torch.compile(function, fullgraph=True) for function in functions]


def backward_step(optimizer, loss: Tensor, max_norm: float | None = None) -> None:
    """In place of gradients as returned values: `backward()`, which stores them in every weight that it reaches."""
    for weight in optimizer.weights:
        weight.grad = None
    loss.backward()
    if max_norm is not None:
        nn.utils.clip_grad_norm_(optimizer.weights, max_norm)
    optimizer.step([weight.grad for weight in optimizer.weights])


class ArraysBuffer:
    """A replay buffer of five NumPy arrays, which draws the rows that the scripts' buffer would draw."""

    def __init__(self, capacity: int, obs_dim: int, action_dim: int, _device: torch.device):
        self.widths, self.capacity, self.count = (obs_dim, action_dim, 1, obs_dim, 1), capacity, 0
        self.columns = [np.zeros((capacity, width), dtype=np.float32) for width in self.widths]

    def add(self, rows: Tensor) -> None:
        for row in rows.numpy():
            for column, part in zip(self.columns, np.split(row, np.cumsum(self.widths[:-1])), strict=True):
                column[self.count % self.capacity] = part
            self.count += 1

    def sample(self, batch_size: int) -> tuple[Tensor, ...]:
        index = (torch.randint(2**40, (batch_size,)) % min(self.count, self.capacity)).numpy()
        obs, action, reward, next_obs, terminated = (torch.from_numpy(column[index]) for column in self.columns)
        return obs, action, reward.squeeze(1), next_obs, terminated.squeeze(1)

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, _state: dict) -> None:
        raise NotImplementedError("a rung of the ladder is not resumed")


@torch.no_grad()
def move_one_by_one(targets: list[torch.Tensor], weights: list[torch.Tensor], tau: float = 1.0, _buffers=()) -> None:
    """In place of `move_towards`: a call for each parameter."""
    for old, new in zip(targets, weights, strict=True):
        old.copy_((1 - tau) * old + tau * new)


BASE = Trick("a plain loop")
IN_PROCESS = Trick("no vector wrapper around one environment", names={"SyncEnvs": gym.vector.SyncVectorEnv})
FUSED_ADAM = Trick("Adam's fused kernel without `torch.optim`", names={"Adam": OptimAdam})
COMPILED = Trick("`torch.compile`, the graph broken at the gradient", is_compiled=True)
ONE_GRAPH = Trick("the whole update in one graph", names={"compiled": compile_broken}, is_compiled=True)
LAUNCHED = Trick("kernels launched from C++, fewer guards", names={"compiled": compile_whole}, is_compiled=True)
PPO = (
    BASE,
    Trick("one thread", texts=(("torch.set_num_threads(1)", "torch.set_num_threads(num_cores())"),)),
    IN_PROCESS,
    Trick(
        "values and log-probabilities in one batch after the rollout",
        texts=(
            (
                "        mean, log_std, value = agent(obs.flatten(0, 1))\n"
                "        value = value.view(-1, args.num_envs)\n"
                "        log_prob = normal_log_prob(action.flatten(0, 1), mean[: -args.num_envs], log_std)\n",
                "        value, log_prob = step_values.clone(), step_log_probs.flatten()\n",
            ),
            (
                "    raw_obs = envs.reset()\n",
                "    step_values = torch.zeros(args.num_steps + 1, args.num_envs)\n"
                "    step_log_probs = torch.zeros(args.num_steps, args.num_envs)\n"
                "    raw_obs = envs.reset()\n",
            ),
            (
                "            action[t] = policy(obs[t]) + noise[t]\n",
                "            with torch.no_grad():\n"
                "                mean, step_log_std, step_values[t] = agent(torch.from_numpy(obs[t]))\n"
                "                sample = mean + torch.from_numpy(noise[t])\n"
                "                step_log_probs[t] = normal_log_prob(sample, mean, step_log_std)\n"
                "            action[t] = sample.numpy()\n",
            ),
            (
                "        obs[-1] = obs_norm(raw_obs)\n",
                "        obs[-1] = obs_norm(raw_obs)\n"
                "        with torch.no_grad():\n"
                "            step_values[-1] = agent(torch.from_numpy(obs[-1]))[2]\n",
            ),
        ),
    ),
    Trick("the policy in NumPy", names={"numpy_mlp": torch_policy}),
    Trick("advantages by a scan instead of a loop", names={"discounted_sum": looped_sum}),
    Trick(
        "the gradient as a value, clipped in three calls",
        texts=(
            (
                "optimizer.step(clip(torch.autograd.grad(loss, optimizer.weights), args.max_grad_norm))",
                "rungs.backward_step(optimizer, loss, args.max_grad_norm)",
            ),
        ),
    ),
    FUSED_ADAM,
    COMPILED,
    ONE_GRAPH,
    LAUNCHED,
)
TD3 = (
    BASE,
    IN_PROCESS,
    Trick("the replay as one tensor", names={"ReplayBuffer": ArraysBuffer}),
    Trick("targets moved in one call", names={"move_towards": move_one_by_one}),
    Trick(
        "gradients as values, of no more weights than are learnt",
        texts=(
            (
                "critic_optimizer.step(torch.autograd.grad(critic_losses.sum(), critic_optimizer.weights))",
                "rungs.backward_step(critic_optimizer, critic_losses.sum())",
            ),
            (
                "actor_optimizer.step(torch.autograd.grad(actor_loss, actor_optimizer.weights))",
                "rungs.backward_step(actor_optimizer, actor_loss)",
            ),
        ),
    ),
    FUSED_ADAM,
    COMPILED,
    ONE_GRAPH,
    Trick(
        "critics stacked",
        texts=(
            (
                "    nets = {True: critics[0], False: deepcopy(critics[0]).eval()}  "
                "# what vmap runs, in training mode or in the other\n"
                "    critics = Stack(from_modules(*critics).apply(transposed))\n",
                "",
            ),
            (
                "        weights = {name: stack.mT if stack.ndim == 3 else stack for name, stack in "
                'ensemble.flatten_keys(".").items()}\n'
                '        net = nets[getattr(ensemble, "training", critics.training)]  '
                "# a slice, such as `critics[:1]`, has no mode\n"
                "        call = torch.vmap(partial(functional_call, net), in_dims=(0, None), "
                'randomness="different")  # for dropout\n'
                "        return call(weights, (obs, action))\n",
                "        return torch.stack([critic(obs, action) for critic in ensemble])\n",
            ),
        ),
        is_compiled=True,
    ),
    LAUNCHED,
)
LADDERS = {"ppo_continuous_action": PPO, "td3_continuous_action": TD3}


def load(script: str, number: int) -> ModuleType:
    """The script of a rung (0 is the lowest), without the tricks of the rungs above it."""
    tricks = LADDERS[script]
    path = SCRIPTS / f"{script}{SUFFIX * tricks[number].is_compiled}.py"
    text, without = path.read_text(), [x for x in tricks[number + 1 :] if x.is_compiled == tricks[number].is_compiled]
    for old, new in [pair for trick in without for pair in trick.texts]:
        if text.count(old) != 1:
            fail(f"{path.name} has {text.count(old)} times what rungs.py takes out: {old.strip()}")
        text = text.replace(old, new)
    module = ModuleType(f"{path.stem}_{number}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # where dataclasses look for it
    module.rungs = sys.modules[__name__]  # the replacement texts may call it
    exec(compile(text, str(path), "exec"), vars(module))
    # If several tricks replace the same name, the lowest has the value without all of them
    for name, value in [pair for trick in without[::-1] for pair in trick.names.items()]:
        if not hasattr(module, name):
            fail(f"{path.name} has no {name}, which rungs.py takes out")
        setattr(module, name, value)
    return module


def check(script: str, numbers: list[int] | None = None, flags: tuple[str, ...] = ()) -> dict[int, dict]:
    """How far each rung deviates from the eager script after about fifty updates, as in `parity`."""
    found = {}
    with tempfile.TemporaryDirectory() as folder, torch._inductor.config.patch(fallback_random=True):
        reference = parity.train(script, "eager", Path(folder, "eager"), list(flags))
        for i in range(len(LADDERS[script])) if numbers is None else numbers:
            rung = parity.train_module(load(script, i), Path(folder, str(i)), list(flags))
            found[i] = parity.deviations(rung, reference)
    return found


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--check"]:
        write_whole(Path(arguments[2]), json.dumps(check(arguments[1], flags=SMOOTH)))
        return
    script, number, *flags = arguments
    module = load(script, int(number))
    module.train(tyro.cli(module.Args, args=flags))


if __name__ == "__main__":
    main(sys.argv[1:])
