# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0", "tensordict==0.15.3", "gymnasium[mujoco]==1.4.0", "envpool==1.2.5",
#     "tyro==1.0.17", "numpy==2.4.6", "tqdm==4.70.1", "tensorboard==2.21.0",
# ]
# ///
"""Twin Delayed Deep Deterministic policy gradient (TD3) for continuous actions, compiled.

Fujimoto et al. (2018), "Addressing Function Approximation Error in Actor-Critic Methods",
https://arxiv.org/abs/1802.09477; this is its algorithm 1.

    python td3_continuous_action_torchcompile.py --env-id HalfCheetah-v4 --seed 1

Its eager twin is `td3_continuous_action.py`; `./run.sh diff` shows what compiling changes.
Shapes: N = num_envs, B = batch_size, O = size of an observation, A = of an action, P = number of parameters.

Settings, except --env-id, are those of CleanRL's script of the same name. Departures from it: the step after an
episode's end only resets the environment, and is neither stored nor counted; there is one update per stored transition,
for any number of environments; products on CUDA use TF32; the target action is clipped to the bounds of each dimension,
not to those of the first.

Reading order: settings, networks, then `train`, the algorithm. Below the `# ----` line is only plumbing.
"""

import ast
import atexit
import contextlib
import difflib
import gc
import importlib.util
import json
import math
import multiprocessing
import os
import random
import shlex
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections import OrderedDict, defaultdict, deque
from copy import deepcopy
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from importlib.metadata import distributions, version
from multiprocessing import resource_tracker
from pathlib import Path
from types import ModuleType
from typing import Literal, NoReturn

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's products here are small, and cores are scarce

import gymnasium as gym
import numpy as np
import torch
import tyro
from tensordict import from_modules  # compile: this stacks the critics; the next line: also CUDA graphs
from tensordict.nn import CudaGraphModule, TensorDictParams
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state  # compile: to run and to check that stack
from tqdm import tqdm


@dataclass
class Args:
    # experiment
    exp_name: str = Path(__file__).stem  # second part of the run folder's name
    seed: int = 1  # seeds Python, NumPy, PyTorch and the environments
    device: str = "auto"  # where the networks learn: auto (CUDA if there is one), cpu, cuda, cuda:1, ...
    run_dir: str | None = None  # folder of the run; by default runs/{env_id}__{exp_name}__{seed}__{time}
    resume: str | None = None  # folder of a run to continue from its checkpoint, with the settings saved there
    override: tuple[str, ...] = ()  # with --resume: change settings, NAME=VALUE; an unknown NAME lists those allowed
    checkpoint_every: int | None = None  # environment steps between checkpoints; by default a tenth of the run
    log_every: int = 1_000  # environment steps between two lines of the log
    tensorboard: bool = True  # write TensorBoard events beside metrics.jsonl
    track: bool = False  # send the TensorBoard events to Weights & Biases too
    wandb_project_name: str = "flatout"  # the Weights & Biases project
    wandb_entity: str | None = None  # the Weights & Biases team

    # environment
    env_id: str = "HalfCheetah-v4"  # any id of Gymnasium (module:Env-v0 too) or EnvPool with Box actions
    env_backend: Literal["auto", "envpool", "gymnasium"] = "auto"  # auto: mostly EnvPool if several envs (docs/ppo.md)
    sync_envs: bool = False  # step all environments in this process, one by one: best if a step takes microseconds
    env_kwargs: str = "{}"  # arguments for the environment's constructor, as JSON: '{"key": value}'
    total_timesteps: int = 1_000_000  # environment steps in the whole run
    num_envs: int = 1  # environments side by side

    # TD3
    learning_rate: float = 3e-4  # of Adam
    buffer_size: int = 1_000_000  # transitions kept for replay
    save_replay: bool = True  # save the replay buffer in checkpoints, so that a resumed run learns from the same data
    gamma: float = 0.99  # discount factor
    tau: float = 0.005  # target networks: target <- (1 - tau) * target + tau * online
    batch_size: int = 256  # transitions in one update
    learning_starts: int = 25_000  # environment steps, with random actions, before the first update
    policy_frequency: int = 2  # updates of the critics for each one of the actor and the target networks
    gradient_steps: int | None = None  # updates after each step of all environments; by default one per new transition
    exploration_noise: float = 0.1  # std of the noise on actions taken, as a fraction of half the action's range
    policy_noise: float = 0.2  # std of the noise on target actions (target policy smoothing), in the same unit
    noise_clip: float = 0.5  # the noise on target actions is clipped to +- this, in the same unit
    matmul_precision: Literal["auto", "highest", "high", "medium"] = "auto"  # auto: TF32 on CUDA, else float32
    bf16: bool = False  # compute inner layers in bfloat16; weights, first and last layers and loss stay in float32

    # compile: two switches, so that the gain of each can be measured alone
    compile: bool = True  # fuse the operations of an update, and those of acting, into a few kernels
    cudagraphs: bool = True  # on CUDA, replay the kernels of an update, or of acting, as one graph, in one launch


METRICS = (  # in the order in which `update_both` stacks them: the critics', then the actor's
    "losses/qf1_values", "losses/qf2_values", "losses/qf1_loss", "losses/qf2_loss", "losses/qf_loss",
    "losses/actor_loss",
)  # fmt: skip
# Smallest and largest value of a setting; for settings not listed, integers are at least 1, floats at least 0
LIMITS = {"seed": (0, 2**63 - 1), "learning_starts": (0, math.inf), "gamma": (0, 1), "tau": (0, 1)}
# What --override may change when a run is resumed
CHANGEABLE = (
    "learning_rate", "gamma", "tau", "batch_size", "policy_frequency", "gradient_steps", "exploration_noise",
    "policy_noise", "noise_clip",
)  # fmt: skip


class RoundedLinear(nn.Linear):
    """A linear layer that multiplies in bfloat16: (B, inputs) -> (B, outputs), both float32, as its weights are."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.bfloat16(), None if self.bias is None else self.bias.bfloat16()
        return nn.functional.linear(x.bfloat16(), weight, bias).to(x.dtype)


class Actor(nn.Module):
    """Deterministic policy: observation (B, O) -> action (B, A) within bounds, which may differ by dimension."""

    def __init__(self, obs_dim: int, action_space: gym.spaces.Box, bf16: bool = False):
        super().__init__()
        low, high = (torch.tensor(x.reshape(-1), dtype=torch.float32) for x in (action_space.low, action_space.high))
        self.register_buffer("center", (high + low) / 2)
        self.register_buffer("scale", (high - low) / 2)
        hidden = RoundedLinear if bf16 else nn.Linear
        # In place: no new tensor for each layer. Not for an input that is used again, as in a residual block
        self.net = nn.Sequential(
            nn.Linear(obs_dim, 256), nn.ReLU(inplace=True),
            hidden(256, 256), nn.ReLU(inplace=True),
            nn.Linear(256, len(low)),
        )  # fmt: skip

    def forward(self, obs: Tensor) -> Tensor:
        return self.center + self.scale * self.net(obs).tanh()

    def noisy(self, obs: Tensor, std: float, clip: float = math.inf, noise: Tensor | None = None) -> Tensor:
        """Action (B, A) plus normal noise, within its bounds; `std` and the noise's `clip` are in half ranges."""
        noise = torch.randn(len(obs), len(self.scale), device=obs.device) if noise is None else noise
        action = self(obs) + self.scale * (std * noise).clamp(-clip, clip)
        return torch.clamp(action, self.center - self.scale, self.center + self.scale)


class Critic(nn.Module):
    """Action value: observation (B, O), action (B, A) -> Q (B,)."""

    def __init__(self, obs_dim: int, action_dim: int, bf16: bool = False):
        super().__init__()
        hidden = RoundedLinear if bf16 else nn.Linear
        # In place: no new tensor for each layer. Not for an input that is used again, as in a residual block
        self.net = nn.Sequential(
            nn.Linear(obs_dim + action_dim, 256), nn.ReLU(inplace=True),
            hidden(256, 256), nn.ReLU(inplace=True),
            nn.Linear(256, 1),
        )  # fmt: skip

    def forward(self, obs: Tensor, action: Tensor) -> Tensor:
        return self.net(torch.cat([obs, action], dim=1)).squeeze(1)


def train(args: Args) -> Path:
    """Train from scratch or from a checkpoint to the end; return the run's folder. Invalid input: SystemExit(2)."""
    run = Run(args)
    args, device = run.args, run.device
    if args.buffer_size < args.num_envs:
        fail(f"--buffer-size {args.buffer_size} must be at least --num-envs, {args.num_envs}")
    use_threads(most=4)  # more do not speed this up
    torch.set_flush_denormal(True)  # denormal moments of Adam slow a CPU down; threads started later inherit this
    set_matmul_precision(args.matmul_precision, device, args.bf16)

    envs = Envs(args, run.env_seeds(args.num_envs))
    low, high = bounded_actions(envs.action_space)
    action_dim = len(low)
    actor = Actor(envs.obs_dim, envs.action_space, args.bf16).to(device)
    refuse_batch_norm(actor)
    critics = nn.ModuleList(Critic(envs.obs_dim, action_dim, args.bf16) for _ in range(2)).to(device)

    # compile: the critics' parameters, as one stack. Matrices lie transposed in memory, as the gradients of a batched
    # product do: to turn each gradient would take 10 % of an update
    check_stack(critics, actor, torch.zeros(2, envs.obs_dim, device=device), torch.zeros(2, action_dim, device=device))
    nets = {True: critics[0], False: deepcopy(critics[0]).eval()}  # what vmap runs, in training mode or in the other
    critics = Stack(from_modules(*critics).apply(transposed))

    def q_values(ensemble, obs: Tensor, action: Tensor) -> Tensor:
        """The value according to each critic: observation (B, O), action (B, A) -> (2, B)."""
        # compile: vmap runs the critics as one network with batched weights, in half as many kernels
        weights = {name: stack.mT if stack.ndim == 3 else stack for name, stack in ensemble.flatten_keys(".").items()}
        net = nets[getattr(ensemble, "training", critics.training)]  # a slice, such as `critics[:1]`, has no mode
        call = torch.vmap(partial(functional_call, net), in_dims=(0, None), randomness="different")  # for dropout
        return call(weights, (obs, action))

    target_actor, target_critics = deepcopy(actor), deepcopy(critics)
    weights = [*actor.parameters(), *critics.parameters()]
    target_weights = [*target_actor.parameters(), *target_critics.parameters()]
    target_buffers = *target_actor.buffers(), *target_critics.buffers()
    layer_buffers = [*zip(target_buffers, (*actor.buffers(), *critics.buffers()), strict=True)]  # bounds, statistics
    actor_optimizer, critic_optimizer = Adam(actor, args.learning_rate), Adam(critics, args.learning_rate)
    buffer = ReplayBuffer(args.buffer_size, envs.obs_dim, action_dim, device)

    @torch.no_grad()
    def act(inputs: Tensor) -> Tensor:
        """Observation and, beside it, normal noise (N, O + A) -> the policy's action with noise to explore (N, A)."""
        return actor.noisy(inputs[:, :-action_dim], args.exploration_noise, noise=inputs[:, -action_dim:])

    def step_critics() -> tuple[Tensor, ...]:
        """One step down both critics' losses, squared TD errors -> observations of the batch, 5 metrics."""
        obs, action, reward, next_obs, terminated = buffer.sample(args.batch_size)
        with torch.no_grad():
            next_action = target_actor.noisy(next_obs, args.policy_noise, args.noise_clip)
            next_q = q_values(target_critics, next_obs, next_action).amin(0)
            target_q = reward + args.gamma * (1 - terminated) * next_q
        q = q_values(critics, obs, action)
        critic_losses = (q - target_q).square().mean(1)
        critic_optimizer.step(torch.autograd.grad(critic_losses.sum(), critic_optimizer.weights))
        return obs, *q.detach().mean(1), *critic_losses.detach(), critic_losses.detach().mean()

    def step_actor(obs: Tensor) -> Tensor:
        """One step up the first critic's value of the actor's actions; then all targets move towards their networks."""
        actor_loss = -q_values(critics[:1], obs, actor(obs)).mean()
        actor_optimizer.step(torch.autograd.grad(actor_loss, actor_optimizer.weights))
        move_towards(target_weights, weights, args.tau, layer_buffers)
        return actor_loss.detach()

    def update_critics() -> None:
        """What the loop calls if only the critics learn; the twin makes it one CUDA graph."""
        step_critics()

    def update_both() -> Tensor:
        """The critics' step, then the delayed one of actor and targets, same observations -> values of `METRICS`."""
        obs, *critic_metrics = step_critics()
        return torch.stack([*critic_metrics, step_actor(obs)])

    # compile: the names stay, so callers are unchanged. Each is compiled as a whole, with gradients and Adam
    if args.compile:
        step_critics, step_actor = compiled(device, step_critics, step_actor)
        (act,) = compiled(device, act, post_grad_fusion_options={"decompose_mm_pass": {}})  # one row: loops beat BLAS
    # compile: an update, of one or several steps, becomes one CUDA graph: its third call records, all later ones replay
    if args.cudagraphs and device.type == "cuda":
        act, update_critics, update_both = (CudaGraphModule(f, warmup=3) for f in (act, update_critics, update_both))
    # compile: compiled code and graphs keep the numbers they read. If one changes, the run ends, even with --no-compile
    act, update_critics, update_both = map(refuse_changes, (act, update_critics, update_both))

    first_update = args.learning_starts + (0 if args.save_replay else run.step)  # refill an unsaved replay first
    run.open(
        envs, actor=actor, critics=critics, target_actor=target_actor, target_critics=target_critics,
        actor_optimizer=actor_optimizer, critic_optimizer=critic_optimizer,
        **({"buffer": buffer} if args.save_replay else {}),
    )  # fmt: skip
    losses, statistics, courier = None, EpisodeStatistics(args.num_envs), Courier(act, action_dim, device)
    obs, done = envs.reset(), np.zeros(args.num_envs, dtype=bool)
    while run.goes_on():
        # Act, at random until learning starts
        if run.num_updates == 0 and run.step < first_update:  # a resumed run that refills its replay uses its policy
            action = np.random.uniform(low, high, (args.num_envs, action_dim)).astype(np.float32).clip(low, high)
        else:
            action = courier.answer(obs).clip(low, high)  # rounding may exceed the bounds, as it may above

        # Step the environment. A truncated episode still bootstraps, so only `terminated` is stored
        next_obs, reward, terminated, truncated = envs.step(action)
        valid = ~done  # after the end of an episode, this step was its reset
        columns = (obs, action, reward[:, None], next_obs, terminated[:, None])
        buffer.add(torch.from_numpy(np.concatenate(columns, axis=1, dtype=np.float32)[valid]))
        obs, done, num_rows = next_obs, terminated | truncated, int(valid.sum())
        run.episodes += statistics.update(reward[None], done[None], valid[None])
        run.step += num_rows
        num_due = (args.gradient_steps or num_rows) if num_rows and run.step > first_update else 0
        # If none of these updates changes the actor, request the next action now: a GPU learns while environments step.
        # Not before a log line: a checkpoint saved there would hold the random state after this action's noise
        if 0 < num_due < args.policy_frequency - run.num_updates % args.policy_frequency and not run.is_due():
            courier.ask(obs)

        # Learn
        for _ in range(num_due):
            run.num_updates += 1
            if run.num_updates % args.policy_frequency == 0:  # `courier.ask`, above, relies on this
                losses = update_both()
            else:
                update_critics()

        # Log
        if run.is_due():
            run.log({} if losses is None else named(METRICS, losses))
    return run.close()


def load_policy(checkpoint: dict, envs: "Envs"):
    """The deterministic policy of a checkpoint: observation (N, O) -> action (N, A)."""
    actor = Actor(envs.obs_dim, envs.action_space, checkpoint["args"].get("bf16", False))
    actor.eval().load_state_dict(checkpoint["actor"])
    bounds = bounded_actions(envs.action_space)
    return torch.no_grad()(lambda obs: actor(torch.from_numpy(obs.astype(np.float32))).numpy().clip(*bounds))


# ---- Plumbing: what the algorithm is built on, nearly the same text in every script -------------------------------


def free_memory(device: torch.device) -> float:
    """Bytes that can be allocated on the device, within the container's limit too; infinite if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free, group = math.inf, Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError, KeyError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = 1024 * int(dict(line.split()[:2] for line in lines)["MemAvailable:"])
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cache = int(stat["file"]) - int(stat.get("shmem", 0))  # shared memory stays
        free = min(free, limit - used + cache)  # the kernel drops cached files when memory is short
    return free


class ReplayBuffer(nn.Module):
    """The last `capacity` transitions, each a row of observation (O), action (A), reward, next observation, terminated.

    In one tensor, they take one copy to write and one gather to sample. The device keeps the number of rows ever
    written, so that a CUDA graph reads its current value; the host keeps the index of the next row.
    """

    def __init__(self, capacity: int, obs_dim: int, action_dim: int, device: torch.device):
        super().__init__()
        self.widths = (obs_dim, action_dim, 1, obs_dim, 1)
        need, free = 4 * capacity * sum(self.widths), free_memory(device)
        if need > free:
            fail(f"--buffer-size {capacity} needs {need / 2**30:.2f} GiB; {free / 2**30:.2f} are free on {device}")
        print(f"replay buffer: {need / 2**20:,.1f} MiB on {device}", file=sys.stderr)
        self.rows = torch.zeros(capacity, sum(self.widths), device=device)
        self.num_written = torch.zeros((), dtype=torch.int64, device=device)
        self.next_row = torch.zeros(1, dtype=torch.int64)

    def add(self, rows: Tensor) -> None:
        """Write rows (K, width), K <= capacity, over the oldest ones; from the host, straight to their place."""
        start = int(self.next_row)
        to_end, rest = rows[: len(self.rows) - start], rows[len(self.rows) - start :]
        self.rows[start : start + len(to_end)].copy_(to_end, non_blocking=True)
        self.rows[: len(rest)].copy_(rest, non_blocking=True)
        self.next_row.fill_((start + len(rows)) % len(self.rows))
        self.num_written.add_(len(rows))

    def sample(self, batch_size: int) -> tuple[Tensor, ...]:
        """Rows drawn with replacement: observation (B, O), action (B, A), reward (B,), next observation, terminated."""
        size = self.num_written.clamp(max=len(self.rows))
        index = torch.randint(2**40, (batch_size,), device=self.rows.device) % size  # randint takes no tensor as bound
        obs, action, reward, next_obs, terminated = self.rows[index].split(self.widths, dim=1)
        return obs, action, reward.squeeze(1), next_obs, terminated.squeeze(1)

    def state_dict(self) -> dict:
        """The rows in use (on a CPU no copy); through NumPy, since torch.save writes a slice's whole tensor."""
        rows, others = self.rows[: int(self.num_written)], self.additions()
        for name, x in others.items():
            if isinstance(x, Tensor | np.ndarray | np.generic):
                others[name] = x.cpu() if isinstance(x, Tensor) else torch.from_numpy(np.array(x))
        return super().state_dict() | others | {"rows": torch.from_numpy(rows.cpu().numpy())}

    def load_state_dict(self, state: dict) -> None:
        if unknown := state.keys() - super().state_dict().keys() - self.additions().keys() - {"rows"}:
            fail(f"the saved replay buffer has {', '.join(sorted(unknown))}: set it to a number or array in `__init__`")
        super().load_state_dict({name: state[name] for name in super().state_dict()})
        self.rows[: len(state["rows"])] = state["rows"]
        for name, x in self.additions().items():
            if isinstance(x, Tensor | np.ndarray):  # in place, as others may share their memory
                x[...] = state[name] if isinstance(x, Tensor) else state[name].numpy()
            else:  # NumPy's numbers are saved as tensors
                value = state[name].item() if isinstance(state[name], Tensor) else state[name]
                vars(self)[name] = type(x)(value) if isinstance(x, np.generic) else value
        self.next_row.copy_(self.num_written % len(self.rows))

    def additions(self) -> dict:
        """`num_written`, and what you have added, such as priorities: all attributes that may change."""
        fixed = Args | str | tuple | torch.device | torch.dtype | None
        known = {*vars(nn.Module()), "rows", "widths", "next_row"}
        own = {name: x for name, x in vars(self).items() if name not in known}
        return {name: x for name, x in own.items() if not isinstance(x, fixed) and not callable(x)}


@torch.no_grad()
def move_towards(targets: list[Tensor], weights: list[Tensor], tau: float | Tensor = 1.0, buffers=()) -> None:
    """target <- (1 - tau) * target + tau * weight, for each pair, in place; tau = 1 copies.

    `buffers` has pairs (of the target, of its network), such as BatchNorm's statistics: the first becomes a copy.
    """
    for target, buffer in buffers:
        target.copy_(buffer)
    if torch.compiler.is_compiling() and targets[0].device.type == "cpu":  # fused into loops, unlike the call below
        for target, weight in zip(targets, weights, strict=True):
            target.lerp_(weight, tau)
        return
    torch._foreach_lerp_(targets, weights, [tau] * len(targets) if isinstance(tau, Tensor) else tau)


class Courier:
    """Moves arrays to the device and actions back; the host waits only for actions, not for updates queued after them.

    Inputs are one array, as each transfer takes the host some 20 us. CUDA takes small ones at once, to copy them when
    the device is ready; actions come into pinned memory, which the device writes while the host continues.
    """

    def __init__(self, act, action_dim: int, device: torch.device):
        self.act, self.action_dim, self.device, self.action, self.asked = act, action_dim, device, None, None
        self.has_come = torch.cuda.Event() if device.type == "cuda" else None

    def ask(self, obs: np.ndarray) -> None:
        """Queue an action for observations (N, O) with the current weights, ahead of any later work on the device.

        NumPy draws the acting noise and PyTorch the learning noise, so it does not matter which is drawn first. It does
        with `Dropout` in the actor, which draws PyTorch's, and with layers that actor and critics share. Do not ask
        before a log line, where a checkpoint may be saved: a resumed run would go on with the noise after this one.
        """
        noise, self.asked = np.random.standard_normal((len(obs), self.action_dim)), obs.copy()
        inputs = torch.from_numpy(np.concatenate([obs, noise], axis=1, dtype=np.float32))
        action = self.act(inputs.to(self.device, non_blocking=True))
        self.action = action.to("cpu", non_blocking=True)  # into pinned memory
        if self.has_come is not None:
            self.has_come.record()

    def answer(self, obs: np.ndarray) -> np.ndarray:
        """The action (N, A) for these observations, requested before with `ask` or now. The host waits here."""
        if self.action is None:
            self.ask(obs)
        elif not np.array_equal(obs, self.asked):
            fail("`courier.answer` got other observations than `courier.ask`: change both, or leave out `ask`")
        if self.has_come is not None:
            self.has_come.synchronize()
        action, self.action = self.action.numpy(), None
        return action


class EpisodeStatistics:
    """Return and length of each episode that ends, from rows (T, N); a reset row has reward 0 and does not count."""

    def __init__(self, num_envs: int):
        self.episode_return, self.episode_length = np.zeros(num_envs), np.zeros(num_envs, dtype=int)

    def update(self, reward: np.ndarray, done: np.ndarray, valid: np.ndarray) -> list[tuple[float, int]]:
        returns = self.episode_return + reward.cumsum(0, dtype=np.float64)
        lengths = self.episode_length + valid.cumsum(0, dtype=int)
        ended = []
        for t, env in np.argwhere(done):
            ended.append((float(returns[t, env]), int(lengths[t, env])))
            returns[t:, env] -= returns[t, env]
            lengths[t:, env] -= lengths[t, env]
        self.episode_return, self.episode_length = returns[-1], lengths[-1]
        return ended


class Adam(nn.Module):
    """Adam (Kingma & Ba 2015, algorithm 1): PyTorch's fused kernel, without the bookkeeping of torch.optim around it.

    For small networks that bookkeeping takes longer than the kernel. Compiled code can use neither: it evaluates the
    formula for all weights as one vector (P,), which becomes a single loop. All changing state, the
    learning rate included, is kept in tensors, so that compiled code and CUDA graphs read its current value. Gradients
    are handed to `step` and not kept in `.grad`: use `clip` of ppo.py; `clip_grad_norm_` would do nothing, nor would an
    optimizer of torch.optim. To train weights of your own, too, make this Adam of `nn.ModuleList([network, yours])`. To
    reset it, fill in place: `exp_avg`, `exp_avg_sq` and `steps` with 0, `beta_powers` (of the formula) with 1. Weights
    that were frozen by `requires_grad_(False)` before this Adam was made are left out, and must stay frozen.
    """

    def __init__(self, module: nn.Module, learning_rate: float, eps: float = 1e-8, betas: tuple = (0.9, 0.999)):
        super().__init__()
        weights, self.eps, self.betas = list(module.parameters()), eps, betas
        self.weights = [weight for weight in weights if weight.requires_grad]
        self.frozen = [weight for weight in weights if not weight.requires_grad]
        if not self.weights:
            fail("this Adam got a module without weights to learn: are all of them frozen?")
        self.sizes = [w.numel() for w in self.weights]
        zeros = torch.zeros(sum(self.sizes), device=self.weights[0].device)
        self.register_buffer("learning_rate", torch.full_like(zeros[0], learning_rate, dtype=torch.float))
        self.register_buffer("first_learning_rate", self.learning_rate.clone())
        self.register_buffer("steps", torch.zeros_like(zeros[0], dtype=torch.float))  # CUDA's kernel reads floats
        self.register_buffer("beta_powers", torch.ones(2, device=zeros.device))  # each beta to the power of `steps`
        self.register_buffer("beta_factors", zeros.new_tensor(betas), persistent=False)
        self.register_buffer("exp_avg", zeros.clone())
        self.register_buffer("exp_avg_sq", zeros.clone())
        # The kernel takes lists of tensors: views of the two vectors, which a checkpoint fills in place. On CUDA, each
        # view must have the same memory layout as its weight
        parts = zip(self.weights, self.exp_avg.split(self.sizes), self.exp_avg_sq.split(self.sizes), strict=True)
        views = [(m.as_strided(w.shape, w.stride()), v.as_strided(w.shape, w.stride())) for w, m, v in parts]
        self.exp_avgs, self.exp_avg_sqs = zip(*views, strict=True)

    def __setattr__(self, name: str, value) -> None:
        """Also lets `optimizer.learning_rate = 1e-3` fill the tensor, which compiled code reads."""
        if name == "learning_rate" and not isinstance(value, Tensor):
            self.learning_rate.fill_(value)
        else:
            super().__setattr__(name, value)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002
        """Clear `.grad`, for loops of your own that call `backward` and pass `.grad` to `step`."""
        for weight in self.weights:
            weight.grad = None

    def state_dict(self, **settings) -> dict:
        """The state for a checkpoint; SystemExit(2) if weights frozen at first require gradients now."""
        if any(weight.requires_grad for weight in self.frozen):
            fail("weights that were frozen when their Adam was made can't learn later")
        if not self.steps and self.beta_factors.tolist() != self.beta_factors.new_tensor(self.betas).tolist():
            fail("`betas` of an Adam changed after it was made, which its formula ignores: pass `betas=...` to Adam")
        return super().state_dict(**settings)

    def load_state_dict(self, state: dict) -> None:
        """Load a checkpoint's state, but keep a learning rate that --override has changed."""
        new = self.first_learning_rate.clone()
        super().load_state_dict(state)
        if new != self.first_learning_rate:
            self.first_learning_rate.copy_(new)
            self.learning_rate.copy_(new)

    @torch.no_grad()
    def step(self, gradients: tuple[Tensor, ...]) -> None:
        """One step of Adam: change the weights in place."""
        self.steps.add_(1)
        self.beta_powers.mul_(self.beta_factors)  # multiplied: a fused loop would recompute `pow` every few weights
        (self.by_formula if torch.compiler.is_compiling() else self.by_kernel)(gradients, *self.betas)

    def by_kernel(self, gradients: tuple[Tensor, ...], beta1: float, beta2: float) -> None:
        """A step in eager code. If you change this, change `by_formula`, too."""
        # The kernel reads memory in order, so each gradient must have the same memory layout as its weight
        pairs = zip(gradients, self.weights, strict=True)
        gradients = [g if g.stride() == w.stride() else torch.empty_like(w).copy_(g) for g, w in pairs]
        torch._fused_adam_(
            self.weights, gradients, self.exp_avgs, self.exp_avg_sqs, [], [self.steps] * len(gradients),
            lr=self.learning_rate, beta1=beta1, beta2=beta2, eps=self.eps,
            weight_decay=0, amsgrad=False, maximize=False,  # here a decay is L2, unlike AdamW's
        )  # fmt: skip

    def by_formula(self, gradients: tuple[Tensor, ...], beta1: float, beta2: float) -> None:
        """A step in compiled code, and in no other. If you change this, change `by_kernel`, too."""
        gradient = torch.cat([g.reshape(-1) for g in gradients])
        self.exp_avg.lerp_(gradient, 1 - beta1)
        self.exp_avg_sq.lerp_(gradient.square(), 1 - beta2)
        scale = (self.exp_avg_sq / (1 - self.beta_powers[1])).sqrt() + self.eps
        change = (self.exp_avg / scale) * (self.learning_rate / (1 - self.beta_powers[0]))
        parts = zip(change.split(self.sizes), self.weights, strict=True)
        torch._foreach_sub_(self.weights, [part.view_as(weight) for part, weight in parts])


def compiled(device: torch.device, *functions, **more_options):
    """Compile each function into one graph, gradients included; SystemExit(2) if this machine can't compile.

    With a graph break at the gradient, PPO has two thirds of the speed. On a CPU, kernels are launched from C++, not
    Python, random numbers come from PyTorch's own kernels, and the test for AVX support of the C++ compiler is skipped:
    it takes a second at each start, five with an empty cache. A call checks only tensors (type, device, and shape:
    up to 8 get their own graphs); `refuse_changes` checks everything else that was compiled in. `more_options` are
    further ones of Inductor.
    """
    if device.type == "cpu":
        try:
            torch._inductor.cpp_builder.get_cpp_compiler()
        except RuntimeError:
            fail("torch.compile needs a C++ compiler (Debian, Ubuntu: apt install g++); --no-compile does without")
        places = os.path.dirname(torch.__file__), torch._inductor.runtime.cache_dir_utils.cache_dir()
        if spaced := [place for place in places if " " in place]:  # Inductor does not quote it
            fail(f"torch.compile can't use a folder with a space in its name, {spaced[0]}; --no-compile does without")
    functions = [with_own_code(function) for function in functions]
    torch._dynamo.config.trace_autograd_ops = True
    torch.compiler.reset()  # an earlier run in this process may have compiled with other settings
    check_adam()
    names = ("cpp_wrapper", "fallback_random", "cpp.vec_isa_ok") if device.type == "cpu" else ()
    options = dict.fromkeys(names, True)
    # Unrolled, a sum over few actions is computed one by one. On CUDA, views of bytes go wrong where strides change
    for_cuda = {"layout_optimization": False, "comprehensive_padding": False}
    options |= {"unroll_reductions_threshold": 1} if device.type == "cpu" else for_cuda
    options |= {"guard_filter_fn": torch.compiler.keep_tensor_guards_unsafe} | more_options
    made = [torch.compile(f, fullgraph=True, dynamic=False, options=options.copy()) for f in functions]
    return [refuse_changes(function) for function in made]


def with_own_code(function):
    """The function, or a wrapper of it, with its own code object: compiled code is cached by code object.

    Functions of one `def` share theirs, and so do all functions that a decorator of PyTorch has made.
    """
    if not hasattr(function, "__code__") or hasattr(function, "__self__"):
        fail(f"{function} can't be compiled: write a function around it")
    if function.__code__.co_filename.startswith(os.path.dirname(torch.__file__)):
        decorated = function

        def function(*inputs: Tensor):
            return decorated(*inputs)

        function.__name__, function.unwrapped = decorated.__name__, (function, decorated)
    function.__code__ = function.__code__.replace(co_varnames=function.__code__.co_varnames)
    return function


def check_adam() -> None:
    """Refuse an `Adam`, or a subclass, if `by_formula` and `by_kernel` differ, as when you changed only one.

    Numbers that are 0 are raised in both, so that one of your own, such as `weight_decay`, has an effect.
    """
    kinds = [Adam]
    for kind in kinds:  # grows by the subclasses of subclasses
        kinds += kind.__subclasses__()
        differ = steps_differ(kind, (float,))
        with contextlib.suppress(TypeError, IndexError):  # an integer may be an index
            differ |= steps_differ(kind, (float, int))
        if differ:
            name = kind.__name__
            fail(f"`by_formula` of `{name}`, which compiled code calls, and `by_kernel` differ: change both")


def steps_differ(kind: type, raised: tuple[type, ...]) -> bool:
    """Whether some steps of this optimizer differ by formula and by kernel; numbers of types `raised` are not 0."""
    values = torch.linspace(-1, 1, 8)
    nets = [nn.ParameterList([values.clone(), values.view(2, 4).clone()]) for _ in range(2)]
    try:
        by_formula, by_kernel = (kind(net, learning_rate=0.1) for net in nets)
    except TypeError as error:
        fail(f"`{kind.__name__}` must work with a module and `learning_rate` alone, to be checked: {error}")
    by_formula.by_kernel = by_formula.by_formula  # which eager code, such as this, calls
    for numbers in map(vars, (by_formula, by_kernel)):
        numbers.update({name: x + 0.1 for name, x in numbers.items() if type(x) in raised and x == 0})
    for factor in (1.0, -0.3, 0.1):
        for net, optimizer in zip(nets, (by_formula, by_kernel), strict=True):
            optimizer.step(tuple(factor * weight.detach().cos() for weight in net))
    return not all(torch.allclose(*weights, rtol=1e-4) for weights in zip(*nets, strict=True))


# Folders of Python and of installed packages, which are libraries, but for one that this file lies in
PACKAGES = [x for x in sys.path if any(Path(x).glob("*.dist-info")) and not os.path.abspath(__file__).startswith(x)]
LIBRARIES = os.path.dirname(os.__file__), *PACKAGES


def is_own(value) -> bool:
    """Whether a function, module, class or object is defined in a user's file, not in Python or a package."""
    if hasattr(value, "__code__"):
        return not value.__code__.co_filename.startswith(LIBRARIES)
    owner = value if isinstance(value, type) else type(value)
    module = value if isinstance(value, ModuleType) else sys.modules.get(owner.__module__)
    file = getattr(module, "__file__", None) or LIBRARIES[0]
    return owner.__module__ == __name__ or not file.startswith(LIBRARIES)


def attributes_of(name: str, value) -> dict[str, tuple]:
    """Attributes of an object or class, inherited ones too: name -> (how to read it, from what, by which key)."""
    classes, parts = value.__mro__ if isinstance(value, type) else type(value).__mro__, {}
    unread = {"__init__", "__new__", "__post_init__", "__repr__", "__str__", "__setattr__", "__eq__", "__hash__"}
    for shared in [vars(x) for x in reversed(classes) if is_own(x)]:  # `getattr` makes a new method at each call
        keys = [key for key, x in shared.items() if key[:2] != "__" or (hasattr(x, "__code__") and key not in unread)]
        parts |= {f"{name}.{key}": (type(shared).get, shared, key) for key in keys}
        # Class defaults, which an object may override with a value of its own, and slots
        keys = [x for x in keys if not hasattr(shared[x], "__get__") or type(shared[x]).__name__ == "member_descriptor"]
        parts |= {f"{name}.{key}": (getattr, value, key) for key in keys if hasattr(value, key)}
    if hasattr(value, "__dict__") and not isinstance(value, type):
        is_open = is_own(value) or isinstance(value, nn.Module) or type(value).__name__.endswith("Namespace")
        keys = [key for key, x in vars(value).items() if is_open or isinstance(x, bool | int | float | str)]
        parts |= {f"{name}.{key}": (dict.get, vars(value), key) for key in keys}
    return parts


def length(container, _key) -> int | str:
    """Of a set its printed form, since its entries, which have no keys, are not read one by one."""
    return sys.intern(repr(container)) if isinstance(container, set) else len(container)


def is_set(cell, _key) -> str:
    """Whether a variable of an enclosing function has a value; one that is defined under an `if` may have none."""
    return "unset" if cell == type(cell)() else "set"


# Attributes that are read, of modules and of an `autograd.Function`, though no code of yours names them
OF_MODULES = {"_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks"}  # stay the same dicts
READ_UNNAMED = {"training", "requires_grad", "forward", "backward", "setup_context", *OF_MODULES}


def wrapped_by(value):
    """What a wrapper of this file or of a library wraps, or None; one of your own may read numbers itself."""
    attributes = getattr(value, "__dict__", {})
    marked, inner = attributes.get("unwrapped", (None, None))  # by this file, unless `functools.wraps` has copied it
    return inner if marked is value else None if is_own(value) else attributes.get("__wrapped__")


def occurs(name: str, names: set) -> bool:
    """Whether some code names this attribute, or it is a variable."""
    _, dot, end = name.rpartition(".")
    return not dot or end[:2] == "__" or end in names or any(x[1:] in end for x in names if x[:1] == "*")


def attributes_read(variable: str, value, codes: list) -> set:
    """What code reads of a variable, such as `device` of `run`; nothing if it uses more than such attributes."""
    import dis  # which nothing else here needs

    steps, reads = [step for code in codes for step in dis.get_instructions(code)], set()
    for i, step in enumerate(steps[1:]):
        if steps[i].opname == "LOAD_DEREF" and steps[i].argval == variable:
            reads.add(step.argval if step.opname in ("LOAD_ATTR", "LOAD_METHOD") else None)
    own = {} if isinstance(value, nn.Module | type) else getattr(value, "__dict__", {})
    return reads if all(x in own and not callable(own[x]) for x in reads) else set()


def readings(name: str, value, seen: set, names: set):
    """Yield (name, how to read it, from what, by which key) for all that a function or object reaches by name.

    `seen` collects the ids of visited objects. `names` collects the names that occur in code: `x` may be an attribute
    of anything, `=x` was read by a function that is no method, `*x` stands for all names that contain x, and `*` for
    all. Of library objects only numbers and strings are read: the rest may be caches, which change.
    """
    if not isinstance(value, nn.Module):  # unwrap CUDA graphs, compiled functions, methods and properties
        value = value if name else getattr(value, "module", value)
        while inner := wrapped_by(value):
            value = inner
        value = value.fget if isinstance(value, property) else value
    is_function, is_module, only = hasattr(value, "__code__"), isinstance(value, ModuleType), {}
    is_closed = isinstance(value, Tensor) or type(value).__module__.startswith("tensordict")
    if isinstance(value, Tensor) and value._backward_hooks:
        fail(f"`{name}` has a hook, which compiled code does not call: change the gradient before `Adam.step`")
    if isinstance(value, nn.Parameter):
        yield f"{name}.requires_grad", getattr, value, "requires_grad"
    if is_closed and isinstance(value, nn.Module):  # of stacked networks only the mode is no tensor
        yield f"{name}.training", getattr, value, "training"
    if id(value) in seen or is_closed or ((is_function or is_module) and not is_own(value)):
        return
    if is_function:
        codes, is_method = [value.__code__], value.__code__.co_varnames[:1] == ("self",)
        for code in codes:  # grows by the code of nested functions
            constants = [*code.co_consts]
            for x in constants:  # grows, too
                constants += x if isinstance(x, tuple | frozenset) else ()
            codes += [x for x in constants if hasattr(x, "co_names")]
            texts = [x for x in constants if isinstance(x, str)]
            names.update(code.co_names, texts)  # getattr(x, "name")
            names.update(f"*{x}" for x in texts if "getattr" in code.co_names and len(x) > 2)  # getattr(x, f"{kind}_x")
            reads_all = {"vars", "asdict", "astuple", "__dict__"} & {*code.co_names}
            names.update(["*"] if reads_all and not is_method else [])
            names.update(() if is_method else (f"={x}" for x in code.co_names))
        cells = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
        parts = {key: (getattr, cell, "cell_contents") for key, cell in cells.items() if cell != type(cell)()}
        only = {key: attributes_read(key, cells[key].cell_contents, codes) for key in parts}
        parts |= {key: (is_set, cell, None) for key, cell in cells.items() if cell == type(cell)()}
        keys = [key for key in ("__defaults__", "__kwdefaults__") if getattr(value, key)]
        parts |= {f"{value.__name__}[{key}]": (getattr, value, key) for key in keys}
        parts |= {f"{value.__name__}.{key}": (dict.get, vars(value), key) for key in vars(value)}
        others = value.__globals__.keys() & names - parts.keys()
        parts |= {key: (dict.get, value.__globals__, key) for key in others}
        is_read = "." not in name or f"={name.rpartition('.')[2]}" in names
        parts |= {"self": (getattr, value, "__self__")} if hasattr(value, "__self__") and is_read else {}
    elif is_module:  # modules may refer to each other
        keys = vars(value).keys() & names if name.count(".") < 3 else ()
        parts = {f"{name}.{key}": (dict.get, vars(value), key) for key in keys}
    elif type(value).__name__ == "partial":
        parts = {f"{name}[{key}]": (getattr, value, key) for key in ("func", "args", "keywords")}
    elif isinstance(value, dict | list | tuple | deque | set):
        keys = value if isinstance(value, dict) else () if isinstance(value, set) else range(len(value))
        owner, _, end = name.rpartition(".")
        is_fixed = end in ("_modules", "_parameters", "_buffers")  # a layer is called by its place, as one writes it
        what = "entries" if isinstance(value, set) else "length"
        parts = {} if is_fixed else {f"the {what} of {name}": (length, value, None)}
        names_of = {key: f"{owner}.{key}" if is_fixed else f"{name}[{key!r}]" for key in keys}
        parts |= {names_of[key]: (type(value).__getitem__, value, key) for key in keys}
    else:
        parts = attributes_of(name, value)
        kinds = value.__mro__ if isinstance(value, type) else type(value).__mro__
        plain = {"builtins", "abc", "typing", "types", "argparse"}  # namespaces, too
        # What is derived from a library's class, that library may read without a name in code of yours
        if any(x is not nn.Module and x.__module__ not in plain and not is_own(x) for x in kinds):
            names.update(key for x in kinds if is_own(x) for key in vars(x))
            own = getattr(value, "__dict__", {}).items()
            names.update(key for key, x in own if isinstance(x, bool | int | float | str))
    seen.update([] if is_module else [id(value)])  # other code may name other parts of a module
    is_container = isinstance(value, dict | list | tuple | deque | set) or type(value).__name__ == "partial"
    for key, (read, *source) in [x for x in parts.items() if is_container or occurs(x[0], names)]:
        part = read(*source)
        stays = isinstance(part, ModuleType) or (isinstance(part, dict) and key.rpartition(".")[2] in OF_MODULES)
        yield from () if stays else [(key, read, *source)]
        if not only.get(key):
            yield from readings(key, part, seen, names)
        for attribute in only.get(key) or ():
            yield f"{key}.{attribute}", dict.get, vars(part), attribute
            yield from readings(f"{key}.{attribute}", vars(part)[attribute], seen, names)


def refuse_changes(function):
    """Wrap a function to check, before a call, that the numbers and objects it reads are those of the first call.

    Compiled code and CUDA graphs keep the values that they first read and would silently ignore a change. So a change
    ends the program, with its name and exit code 2, compiled or not. Tensors may change in place. The first 100 calls
    check everything, each later one an eighth, in a few microseconds: a change that lasts is found within 15 calls. The
    order is random, as else one for every 800th call alone might always meet the same eighth. Within another function
    that is checked, and looks at the same numbers, only every eighth of the later calls does so.
    """
    if getattr(function, "refuses_changes", None) is function:
        return function
    call, parts, number, order, draws = tensors_only(function), [], 0, [], random.Random(0)

    def checked(*inputs, **named):
        nonlocal number
        if not parts:
            names, before, found = {*READ_UNNAMED}, set(), []
            while names != before:  # only attributes that some code names, of which more is found with each name
                before = {*names}
                found = list(readings("", function, set(), names))
            found_names, values = [x[0] for x in found], [read(*source) for _, read, *source in found]
            check_equal(found_names, values, values)
            check_places(found_names, values, is_graph=hasattr(function, "module"))
            for part in [found[i::8] for i in range(8)]:
                by_how = [[x for x in part if x[1] is how] for how in dict.fromkeys(x[1] for x in part)]
                groups = [(same[0][1], [x[2] for x in same], [x[3] for x in same]) for same in by_how]
                first = [x for group in groups for x in map(*group)]
                parts.append(([x[0] for same in by_how for x in same], groups, first, [*map(id, first)]))
        if number >= 100 and not order:
            order[:] = draws.sample(range(8), 8)
        is_rare = CHECKED and number % 8
        for found_names, groups, first, ids in parts if number < 100 else [] if is_rare else [parts[order.pop()]]:
            try:
                now = [x for group in groups for x in map(*group)]
            except (AttributeError, LookupError, ValueError) as error:  # the last of a variable that was deleted
                fail(f"something that compiled code read first no longer exists: {error!r}")
            if [*map(id, now)] != ids:
                check_equal(found_names, first, now)
        number += 1
        CHECKED.append(function)
        try:
            return call(*inputs, **named)
        finally:
            CHECKED.pop()

    checked.unwrapped, checked.refuses_changes = (checked, function), checked
    return checked


CHECKED = []  # functions of `refuse_changes` that are running


def check_stack(critics: nn.ModuleList, actor: nn.Module, *inputs: Tensor) -> None:
    """SystemExit(2) for critics that can't run as one with stacked weights, tried with two rows of inputs."""
    own = [{*net.parameters(), *net.buffers()} for net in critics]
    if {*actor.parameters(), *actor.buffers()} & set().union(*own):
        fail("critics that share layers with the actor can't be stacked, which copies weights: use the eager file")
    kinds = bool | int | float | str | Tensor  # of attributes, which must be the same, as layers must
    plans = {
        repr([net, *({k: x for k, x in vars(part).items() if isinstance(x, kinds)} for part in net.modules())])
        + repr([weight.requires_grad for weight in net.parameters()])
        for net in critics
    }
    if len(plans) > 1 or len(set().union(*own)) < sum(map(len, own)):
        fail("critics that share layers, or differ, can't be stacked: use the eager file, or give each its own")
    alone = deepcopy(critics[0])
    with torch.no_grad():
        alone(*inputs)  # an error here is not the stack's
        parameters, buffers = stack_module_state([*critics])
        call = torch.vmap(partial(functional_call, alone), in_dims=(0, None), randomness="different")
        try:
            call(parameters | buffers, inputs)
            alone.eval()  # without dropout, each must be what it is alone
            parameters, buffers = stack_module_state([*critics])  # BatchNorm has changed the first ones
            inputs = tuple(torch.arange(x.numel(), device=x.device).view_as(x).cos() for x in inputs)
            values = torch.stack([deepcopy(net).eval()(*inputs) for net in critics])
            if (call(parameters | buffers, inputs) - values).abs().max() > 0.02 * values.abs().max():
                raise RuntimeError("they differ in more than weights")
        except RuntimeError as error:  # such as spectral_norm's, which changes tensors in place
            fail(f"these critics can't be stacked: {str(error).rstrip('.')}; the eager file has them one by one")


def transposed(stack: Tensor) -> Tensor:
    """A stack of matrices with each one transposed in memory, others as they are; what does not learn stays so."""
    if stack.ndim != 3:
        return stack
    data, is_weight = stack.detach().mT.contiguous(), isinstance(stack, nn.Parameter)
    return nn.Parameter(data, stack.requires_grad) if is_weight else nn.Buffer(data)


def is_called_by_library() -> bool:
    """Whether the function that asks this was called from Python or a package, not from a user's file."""
    return sys._getframe(2).f_code.co_filename.startswith(LIBRARIES)


class Stack(TensorDictParams):
    """The weights of critics, stacked (2, ...). It has no layers and no single critics, so SystemExit(2) for who asks.

    A loop over layers or critics would change copies only.
    """

    def refuse(self, *_, **__) -> NoReturn:
        """SystemExit(2), with what to do instead."""
        fail("stacked critics have no layers, and none can be taken alone: change their `parameters()`, (2, ...) each")

    modules = apply = __iter__ = refuse

    def named_modules(self, *args, **settings):
        """PyTorch calls these three itself, and gets what it asks for."""
        return super().named_modules(*args, **settings) if is_called_by_library() else self.refuse()

    def named_children(self):
        return super().named_children() if is_called_by_library() else self.refuse()

    def children(self):
        return super().children() if is_called_by_library() else self.refuse()

    def __getitem__(self, index):
        """A slice, such as that of the first critic, `[:1]`."""
        return self.refuse() if isinstance(index, int) else super().__getitem__(index)

    def __deepcopy__(self, memo: dict) -> "Stack":
        """A copy of this kind, not of the kind that is inherited from."""
        copy = Stack(super().__deepcopy__(memo))
        copy.training = self.training
        return copy


def tensors_only(function):
    """Wrap a compiled function or graph; SystemExit(2) for code that can't be compiled, for too many shapes, and for an
    argument that is no tensor: compiled code would keep its first value, unseen by `refuse_changes`.
    """

    def checked(*inputs, **named):
        if named or not all(isinstance(x, Tensor) for x in inputs):
            others = [f"{name}=..." for name in named] + [type(x).__name__ for x in inputs if not isinstance(x, Tensor)]
            what = f"`{checked.__name__}` takes tensors alone, by position, not `{others[0]}`"
            fail(f"{what}: compiled code would keep a first number; hand tensors over one by one, as by `*batch`")
        try:
            return function(*inputs)
        except torch._dynamo.exc.FailOnRecompileLimitHit:
            limit = f"{torch._dynamo.config.recompile_limit} shapes of its inputs, the limit"
            fail(f"`{checked.__name__}` was compiled for {limit}: keep shapes fixed, mask rows")
        except torch._dynamo.exc.TorchDynamoException as error:
            reason, *lines = str(error).replace("raised:\n", "raised: ").splitlines()
            handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
            has_begun = any(getattr(handler, "__name__", "") == "on_signal" for handler in handlers.values())
            usual = (signal.SIG_DFL, signal.default_int_handler)  # set by `on_signal`, in a notebook the latter
            asked = [signum for signum, handler in handlers.items() if has_begun and handler in usual]
            if "CppCompileError" in reason and asked:
                print("stopped while compiling; what came since the last checkpoint is lost", file=sys.stderr)
                sys.exit(128 + asked[0])  # the signal has ended the C++ compiler, too
            places = [i for i, line in enumerate(lines) if line.strip().startswith("File ")]
            own = [i for i in places if not lines[i].partition('"')[2].startswith(LIBRARIES)] or places
            place = [": ".join(map(str.strip, lines[i : i + 2])) for i in own[-1:]]
            cause = [line.partition("): got ")[2] for line in lines if "): got " in line][:1]
            hints = ["use `Adam` instead of an optimizer of torch.optim"] * ("`Optimizer." in str(error))
            draws = any("random" in line for line in place)
            hints += ["draw random numbers by PyTorch"] * draws
            hints += ["`torch.where` decides by a tensor"] * ("guard on data-dependent" in reason and not draws)
            hints += ["--no-compile does without"]
            fail(f"this can't be compiled: {'; '.join([reason, *cause, *place, *hints])}")

    checked.unwrapped, checked.__name__ = (checked, function), getattr(function, "__name__", "a compiled function")
    return checked


def check_places(names: list[str], values: list, is_graph: bool) -> None:
    """SystemExit(2) for a scalar on the CPU that a CUDA graph reads: the graph would keep its first value."""
    tensors = [(name, x) for name, x in zip(names, values, strict=True) if isinstance(x, Tensor)]
    on_host = [name for name, x in tensors if x.ndim == 0 and x.device.type == "cpu"]
    if is_graph and on_host and len({x.device.type for _, x in tensors}) > 1:
        fail(f"`{on_host[0]}` lies on the CPU, where a CUDA graph reads it only once: make it with device=device")


def check_equal(names: list[str], first: list, now: list) -> None:
    """SystemExit(2) naming the first number that changed, object that was replaced, or generator of numbers."""
    generators = random.Random | np.random.Generator | np.random.RandomState | np.ndarray
    for name, old, new in zip(names, first, now, strict=True):
        if hasattr(old, "__next__") or isinstance(old, generators):
            root, is_part, _ = name.partition(".")
            hint = f"; if it needs a constant of `{root}`, read that before, into a variable" * bool(is_part)
            hint += ", and for a number that changes make a tensor, filled in the loop" * bool(is_part)
            fail(f"`{name}` is a {type(old).__name__}, which compiled code reads only once: use tensors instead{hint}")
        is_number = isinstance(old, bool | int | float | str | np.generic | None)
        if is_number and (type(new) is not type(old) or new != old):
            advice = "make it a tensor on the learner's device and change it in place, like `optimizer.learning_rate`"
            advice += "; to Ray's runners, send it by `publish`" * ("ray" in sys.modules)
            if name.endswith("training"):
                advice = "keep a deepcopy of the module in the other mode instead"
            if name.endswith("requires_grad"):
                advice = "freeze it before its Adam is made, for the whole run"
            if old == "unset":
                advice = "it must have a value from the first call on"
            if name.startswith(("the length of", "the entries of")):
                advice = "all entries must be there from the first call on"
            fail(f"`{name}` was {old} at the first call and is {new} now: {advice}")
        if not is_number and new is not old:
            fail(f"`{name}` is no longer the {type(old).__name__} of the first call: change it in place")


def fail(message: str) -> NoReturn:
    """Report invalid input in one line and end with exit code 2."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


def named(names: tuple[str, ...], values: Tensor) -> dict[str, float]:
    """Metrics by name, one for each value."""
    if not len(names) == len(set(names)) == len(values):
        fail(f"{len(values)} metrics for {len(names)} names, {len(set(names))} of them distinct: compare METRICS")
    return dict(zip(names, values.tolist(), strict=True))


def num_cores() -> int:
    """Number of CPU cores this process may use, by its affinity and its container's share; if unknown, all cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
        microseconds, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        cores = min(cores, math.ceil(microseconds / period))
    return cores


def use_threads(most: int) -> None:
    """Give PyTorch a thread for each core, at most so many, or OMP_NUM_THREADS; a note if other programs run there."""
    cores, load = num_cores(), os.getloadavg()[0]  # the latter of the whole machine
    threads = min(cores, torch.get_num_threads() if os.environ.get("OMP_NUM_THREADS") else most)
    torch.set_num_threads(threads)
    if threads > 1 and load > cores - threads + 1 and cores == os.cpu_count():
        hint = "if it stays busy, OMP_NUM_THREADS=1 is faster: threads wait for each other"
        print(f"note: {load:.1f} programs ran on {cores} cores in the last minute; {hint}", file=sys.stderr)


def choose_backend(env_id: str, backend: str, in_process: bool) -> str:
    """The library that makes the environments; SystemExit(2) with similar ids if none knows the id."""
    sys.path += [os.getcwd()] * (os.getcwd() not in sys.path)  # for `module:Env-v0`; Python looks beside this file only
    spec = gym.registry.get(env_id)
    if str(getattr(spec, "entry_point", "")).startswith("__main__:"):  # which worker processes do not import
        spec.entry_point = gym.envs.registration.load_env_creator(spec.entry_point)
    libraries, known = [backend] if backend != "auto" else ["gymnasium", "envpool"][: 2 - (":" in env_id)], []
    for library in libraries if in_process else reversed(libraries):
        # EnvPool takes half a second to import
        ids = gym.registry if library == "gymnasium" else importlib.import_module("envpool").list_all_envs()
        if env_id in ids or (library == "gymnasium" and ":" in env_id):
            if library == "gymnasium" or not changes_envs(env_id):
                return library
            if backend == "envpool" or env_id not in gym.registry:
                fail(f"{env_id} is EnvPool's, which ignores `wrap`, `make_env` and `gym.register`: undo those changes")
            return choose_backend(env_id, "gymnasium", in_process)
        known += ids
    name = env_id.removeprefix("ALE/").replace("NoFrameskip-v4", "-v5")  # what others call EnvPool's Atari games
    near = dict.fromkeys(difflib.get_close_matches(name, known))
    hints = [f"close to it: {', '.join(near)}"] * bool(near) + [f"your own: MODULE:{env_id}"] * (":" not in env_id)
    fail("; ".join([f"no environment {env_id} in {' or '.join(libraries)}", *hints]))


def runs_in_process(args: Args, num_envs: int) -> bool:
    """Whether environments step in this process: a single one and, by default, a few whose step is short."""
    is_short = args.env_id.startswith(("CartPole-", "MountainCar", "Pendulum-"))
    by_default = args.env_backend == "auto" and is_short and num_envs <= 8  # to wake a thread takes longer
    return args.sync_envs or num_envs == 1 or by_default


def end_with_parent() -> None:
    """In a thread of a worker: end the worker soon after its parent, even if an environment's step never returns."""
    multiprocessing.parent_process().join()
    time.sleep(2)  # time for the worker, unless it hangs, to see its pipe close and close its environments
    os._exit(1)


def become_worker(seed: int) -> None:
    """In a worker process: end soon after the parent, leave signals to it, and draw random numbers of its own."""
    random.seed(seed)
    np.random.seed(seed)  # otherwise all workers would inherit one state
    threading.Thread(target=end_with_parent, daemon=True).start()
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)  # programs that it starts do not inherit this, and hear `terminate`
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())  # for programs that it starts


def show_warning(text: str) -> None:
    """Print a warning of MuJoCo, unless it is about old attributes of models, which nobody can act on."""
    if "deprecated" not in text:
        print(f"MuJoCo: {text}", file=sys.stderr)


def wrap(env: gym.Env) -> gym.Env:
    """Put your own wrappers here: `return MyWrapper(env)`. EnvPool's can't have any, so Gymnasium's are then used."""
    return env


def refuse_floats(obs):
    """ValueError for floats in a space of integers, such as pixels / 255: storing them would round them off."""
    if np.asarray(obs).dtype.kind == "f":
        raise ValueError("observations are floats, but the space has integers: a wrapper must set its own space")
    return obs


def make_env(env: str | gym.envs.registration.EnvSpec, settings: dict) -> gym.Env:
    """An environment of Gymnasium (not of EnvPool), flat observations (O,)."""
    warnings.filterwarnings("ignore", ".*out of date")  # about old ids, which published results use
    if "mujoco" in str(env):
        importlib.import_module("mujoco").set_mju_user_warning(show_warning)
    try:
        env = wrap(gym.make(env, disable_env_checker=True, **settings))
    except SystemExit as end:  # as of a simulator without a licence
        if isinstance(end.code, int) and end.code > 128:  # Ctrl-C, and the like
            raise
        raise RuntimeError(f"its constructor has called sys.exit({end.code!r})") from end
    layer = env
    while isinstance(layer, gym.Wrapper):
        is_normal = isinstance(layer, gym.wrappers.NormalizeObservation | gym.wrappers.NormalizeReward)
        if is_normal and layer.update_running_mean:
            what = f"no checkpoint has the statistics of `{type(layer).__name__}`"
            raise ValueError(f"{what}: normalize as ppo_continuous_action.py does")
        layer = layer.env
    if not env.observation_space.is_np_flattenable:
        raise ValueError(f"observations are {env.observation_space}, which can't be flattened")
    if isinstance(env.observation_space, gym.spaces.Box) and env.observation_space.dtype.kind in "iu":
        env = gym.wrappers.TransformObservation(env, refuse_floats, env.observation_space)
    is_flat = isinstance(env.observation_space, gym.spaces.Box) and len(env.observation_space.shape) == 1
    return env if is_flat else gym.wrappers.FlattenObservation(env)


def changes_envs(env_id: str) -> bool:
    """Whether a copy changed `wrap`, `make_env` or what is registered: EnvPool uses none of them.

    Tries the first two on an empty environment.
    """
    if getattr(getattr(wrap, "__code__", None), "co_code", None) != (lambda env: env).__code__.co_code:
        return True  # even if it does not wrap the one below
    if spec := gym.registry.get(env_id):  # which may have been registered anew, or changed
        source, steps = spec.entry_point, importlib.import_module("envpool").make_spec(env_id).config.max_episode_steps
        is_own = not getattr(source, "__module__", source).startswith("gymnasium.")
        of_gymnasium = {"continuous", "hardcore", "sab", "natural", "map_name", "is_slippery"}  # in its registrations
        is_own |= bool(spec.additional_wrappers or spec.kwargs.keys() - of_gymnasium)
        if is_own or spec.max_episode_steps not in (None, steps):
            return True
    probe, space = gym.Env(), gym.spaces.Box(-1, 1, (1,))
    probe.observation_space = space
    spec = gym.envs.registration.EnvSpec(env_id, lambda: probe, order_enforce=False)
    try:
        env = make_env(spec, {})
        env.close()
        return env is not probe or vars(probe) != {"observation_space": space, "spec": probe.spec}
    except Exception:  # by a wrapper that asks for more than this environment has
        return True


class SyncEnvs:
    """Environments stepped one by one in this process; with just one, 14 us a step faster than SyncVectorEnv."""

    def __init__(self, env_fns: list):
        self.envs, self.done = [env_fn() for env_fn in env_fns], np.zeros(len(env_fns), dtype=bool)
        spaces = [(env.observation_space, env.action_space) for env in self.envs]
        if spaces.count(spaces[0]) < len(spaces):
            raise ValueError("environments side by side must have the same spaces")
        self.single_observation_space, self.single_action_space = spaces[0]

    def reset(self, seed: list[int | None]):
        self.done[:] = False
        return np.array([env.reset(seed=env_seed)[0] for env, env_seed in zip(self.envs, seed, strict=True)]), {}

    def step(self, action: np.ndarray):
        action = action.copy()  # an environment may change or keep its action
        rows, reward, infos = [], np.zeros(len(action)), [{}] * len(action)
        terminated, truncated = np.zeros(len(action), dtype=bool), np.zeros(len(action), dtype=bool)
        for i, env in enumerate(self.envs):
            if self.done[i]:
                obs, _ = env.reset()
            else:
                obs, reward[i], terminated[i], truncated[i], infos[i] = env.step(action[i])
            rows.append(obs)
        self.done = terminated | truncated
        return np.array(rows), reward, terminated, truncated, infos

    def set_attr(self, name: str, values) -> None:
        """The same value for all environments, or a list or tuple with one for each."""
        each = values if isinstance(values, list | tuple) else [values] * len(self.envs)
        for env, value in zip(self.envs, each, strict=True):
            env.set_wrapper_attr(name, value)

    def close(self) -> None:
        for env in self.envs:
            env.close()


def check_portable(error: BaseException) -> None:
    """Raise a RuntimeError in place of an error that can't be sent to the parent, or the parent waits forever."""
    try:
        if isinstance(error, SystemExit):  # Gymnasium's worker does not send it
            raise TypeError
        pickler = multiprocessing.reduction.ForkingPickler
        type(error)(pickler.loads(pickler.dumps(error)))
    except Exception:
        raise RuntimeError(f"{type(error).__name__}: {error}".removesuffix(": ")) from error


class WorkerEnv(gym.Wrapper):
    """An environment in a worker process. Refuses observations of a wrong shape, keeps numbers of `info`.

    Else, in the arrays of all environments, one number would be spread over a whole observation, and an integer that
    comes first in `info` would truncate other environments' decimals. The parent makes one too, to learn the spaces.
    """

    def __init__(self, env_fn, seed: int, parent: int):
        if os.getpid() != parent:
            become_worker(seed)
        super().__init__(env_fn())
        self.shape = self.observation_space.shape  # else each step looks it up through all wrappers

    def reset(self, **settings):
        try:
            obs, info = self.env.reset(**settings)
        except (Exception, SystemExit) as error:
            check_portable(error)
            raise
        return self.checked(obs), numbers_in(info)  # nothing else is read, and other things may not fit into one array

    def step(self, action):
        try:
            obs, *others, info = self.env.step(action)
        except (Exception, SystemExit) as error:
            check_portable(error)
            raise
        return self.checked(obs), *others, numbers_in(info)

    def checked(self, obs):
        if np.shape(obs) != self.shape:
            raise ValueError(f"observation has shape {np.shape(obs)}, its space has {self.shape}")
        return obs


@contextlib.contextmanager
def light_start():
    """Worker processes started in this context ignore signals, have one thread, and do not import this file.

    Otherwise multiprocessing imports the main module in each, and with it PyTorch: 1.6 s and 230 MB instead of 0.2 s
    and 40 MB. So an empty module takes its place. This process's signals wait until unblocked, or the context ends.
    """
    threads, os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS"), "1"
    resource_tracker.ensure_running()  # which unblocks signals when it starts
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, handlers)  # workers inherit this, and `become_worker` ignores them
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        del os.environ["OMP_NUM_THREADS"]
        os.environ |= {} if threads is None else {"OMP_NUM_THREADS": threads}


def kill_all(workers: list) -> None:
    for worker in workers:
        worker.kill()
        atexit.unregister(worker.kill)  # which keeps the process object and its open files


def worker_envs(env_fns: list, seeds: list[int]) -> gym.vector.AsyncVectorEnv:
    """Environments, each in a worker process of its own."""
    print(f"starting {len(env_fns)} worker processes", file=sys.stderr)
    multiprocessing.set_forkserver_preload(["gymnasium"])  # is imported once, not by each worker
    others = {*multiprocessing.active_children()}  # the program's own
    with light_start():
        multiprocessing.forkserver.ensure_running()  # started with signals blocked, which its workers inherit
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, lambda signum, _frame: sys.exit(128 + signum))  # a constructor may hang
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
        try:
            workers = [partial(WorkerEnv, *x, os.getpid()) for x in zip(env_fns, seeds, strict=True)]
            vector = gym.vector.AsyncVectorEnv(workers, context="forkserver")
        except BaseException as error:  # a signal; or a worker has died, and others may hang
            for process in {*multiprocessing.active_children()} - others:
                process.kill()  # workers ignore signals
            if isinstance(error, EOFError | ConnectionError):  # the latter may be an environment's own
                raise RuntimeError(f"{error!r}: a worker may have died as it made its environment") from error
            raise
    for process in vector.processes:
        atexit.register(process.kill)  # else a failed run may wait for them
    return vector


def check_finite(obs: np.ndarray, reward: np.ndarray, terminated: np.ndarray, instead: np.ndarray | float = 0) -> None:
    """Raise ValueError for NaN or infinity; in the last observation of a terminated episode, put `instead`."""
    flat = obs.ravel()
    if not flat.dot(flat) + reward.dot(reward) < 1e38:  # takes 0.6 us; float32 ends at 3e38
        obs[terminated] = np.where(np.abs(obs) < 3e38, obs, instead)[terminated]
        if not (np.abs(obs).max() < 3e38 and np.abs(reward).max() < 3e38):
            raise ValueError("an observation or a reward is NaN or infinite")


def check_chosen(action: np.ndarray, space: gym.Space) -> None:
    """ValueError for an action that a Discrete space does not have; EnvPool would read memory that is not its own."""
    is_discrete = isinstance(space, gym.spaces.Discrete)
    if is_discrete and (action.min() < space.start or action.max() >= space.start + space.n):
        wrong = action.min() if action.min() < space.start else action.max()
        raise ValueError(f"action {wrong} for a space {space}: does the network have one output per action?")


def warn_of_pixels(space: gym.Space, obs_dim: int) -> None:
    if space.dtype == np.uint8 and obs_dim > 1000:
        print("note: these pixels go into an MLP; ppo_atari_envpool has convolutions", file=sys.stderr)


def numbers_in(info: dict) -> dict[str, float]:
    """The numbers of an `info` whose mean is finite, such as is_success; not those that EnvPool keeps for itself."""
    own = {"env_id", "elapsed_step"}
    found = {key: x for key, x in info.items() if isinstance(key, str) and key[:1] != "_" and key not in own}
    for key, x in found.items():  # arrays and tensors without dimensions, of any library
        if getattr(x, "shape", None) == () and hasattr(x, "item") and not isinstance(x, np.generic):
            found[key] = x.item()
    numbers = {key: x for key, x in found.items() if isinstance(x, bool | int | float | np.bool_ | np.number)}
    # `float` raises for times, and for some large integers
    fits = {key: abs(x) < 2**63 if type(x) is int else not isinstance(x, np.timedelta64) for key, x in numbers.items()}
    return {key: float(x) for key, x in numbers.items() if fits[key] and abs(float(x)) < 1e300}


def without(settings: dict, names: set[str]) -> dict:
    """Settings of --env-kwargs; a ValueError if they hold one of these names."""
    if own := names & settings.keys():
        raise ValueError(f"--env-kwargs can't set {', '.join(sorted(own))}")
    return settings


class Envs:
    """N environments side by side: flat observations (N, O); actions (N, A), or (N,) where they are discrete.

    Next-step autoreset, whatever the backend: the observation at an episode's end is its true last one; the next step
    ignores its action, resets that environment and returns reward 0. This row does not count as a step.
    """

    def __init__(self, args: Args, seeds: list[int]):
        self.num_envs, self.seeds, self.infos, self.stop = len(seeds), seeds, defaultdict(list), fail
        in_process = runs_in_process(args, len(seeds))
        try:
            settings = dict(json.loads(args.env_kwargs))
            warnings.filterwarnings("ignore", ".*precision lowered")  # by EnvPool's spaces
            self.backend = choose_backend(args.env_id, args.env_backend, in_process)
            if self.backend == "envpool":
                settings = without(settings, {"num_envs", "seed", "batch_size"}) | {"num_envs": len(seeds)}
                settings = {"num_threads": min(len(seeds), getattr(args, "env_threads", num_cores()))} | settings
                self.vector = importlib.import_module("envpool").make_gymnasium(args.env_id, seed=seeds, **settings)
                self.observation_space, self.action_space = self.vector.observation_space, self.vector.action_space
            else:
                # The spec instead of the id, since a worker process does not know what this file registers
                env_fns = [partial(make_env, gym.registry.get(args.env_id, args.env_id), settings)] * len(seeds)
                self.vector = SyncEnvs(env_fns) if in_process else worker_envs(env_fns, seeds)
                self.observation_space = self.vector.single_observation_space
                self.action_space = self.vector.single_action_space
            # If nothing closes them, as in a run that fails before it starts; each would print that its pipe has ended
            self.end_workers = weakref.finalize(self, kill_all, getattr(self.vector, "processes", ()))
            self.obs_dim = gym.spaces.flatdim(self.observation_space)
        except Exception as error:  # anything a constructor may raise
            hint = "; EnvPool's differ from Gymnasium's" * (getattr(self, "backend", None) == "envpool")
            fail(f"can't make {args.env_id} with --env-kwargs {args.env_kwargs}: {type(error).__name__}: {error}{hint}")
        for how in ("sync", "async") if self.backend == "envpool" else ():
            if vars(args).get(f"{how}_envs"):
                fail(f"--{how}-envs is for Gymnasium's environments; {args.env_id} is EnvPool's, which has threads")
        for name in ("episodic_life", "reward_clip") if self.backend == "envpool" else ():
            if settings.get(name):
                hint = "ppo_atari_envpool.py does this for learning only, and so does --clip-rewards over Ray"
                fail(f"--env-kwargs {name}: returns in the log would not be the scores of games; {hint}")
        self.action_shape = (len(seeds), *(self.action_space.shape or ()))  # the shape of some spaces is None
        where = "threads" if self.backend == "envpool" else "this process" if in_process else "worker processes"
        self.summary = f"environments: {len(seeds)} by {self.backend}, in {where}"
        warn_of_pixels(self.observation_space, self.obs_dim)

    def flatten(self, obs) -> np.ndarray:
        if isinstance(self.observation_space, gym.spaces.Box):
            if obs.size != self.num_envs * self.obs_dim:
                raise ValueError(f"observations have shape {obs.shape[1:]}, their space {self.obs_dim} numbers")
            return obs.reshape(self.num_envs, -1)
        rows = [{key: obs[key][i] for key in obs} for i in range(self.num_envs)] if isinstance(obs, dict) else obs
        return np.stack([gym.spaces.flatten(self.observation_space, row) for row in rows])

    def reset(self) -> np.ndarray:
        """Start an episode in each environment -> observation (N, O)."""
        try:
            obs, _ = self.vector.reset() if self.backend == "envpool" else self.vector.reset(seed=self.seeds)
            self.seeds = [None] * self.num_envs  # a second reset begins other episodes
            obs = self.flatten(obs)
            check_finite(obs, np.zeros(1), np.zeros(len(obs), dtype=bool))
        except (Exception, SystemExit) as error:  # anything an environment raises, or the pipe to a dead worker
            self.stop(self.explain(error))
        self.last_obs = obs
        return obs

    def step(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Step each environment: action -> observation (N, O), reward (N,), terminated (N,), truncated (N,)."""
        try:
            obs, reward, terminated, truncated, infos = self.vector.step(action.reshape(self.action_shape))
            obs = self.flatten(obs)
            check_finite(obs, reward, terminated, self.last_obs)  # not 0: a normalization may count it
            if np.count_nonzero(terminated) or np.count_nonzero(truncated):  # takes a fifth of the time of `any`
                check_chosen(action, self.action_space)  # only now and then, as it takes microseconds
                self.note_ends(infos, terminated | truncated)
        except (Exception, SystemExit) as error:  # anything an environment raises, or the pipe to a dead worker
            self.stop(self.explain(error))
        self.last_obs = obs
        return obs, reward, terminated, truncated

    def explain(self, error: Exception | SystemExit) -> str:
        """What broke, in one line; an environment's traceback is printed."""
        is_pipe = isinstance(error, EOFError | ConnectionError)  # or it is an environment's own connection that broke
        workers = getattr(self.vector, "processes", ()) if is_pipe else ()
        if workers:
            time.sleep(0.1)  # until exit codes are there
            self.vector.closed = True  # else it would wait at exit for the answer of a dead worker
        dead = [f"{i} (exit code {p.exitcode})" for i, p in enumerate(workers) if p.exitcode]
        if dead:
            return f"environment worker {', '.join(dead)} died"
        with contextlib.suppress(OSError):  # the terminal may be gone
            traceback.print_exception(error)
        return f"{type(error).__name__}: {error}".removesuffix(": ")

    def note_ends(self, infos, done: np.ndarray) -> None:
        """Keep the numbers that `info` holds of each episode that ended, for the log."""
        for i in np.flatnonzero(done):
            if isinstance(infos, list):
                info = infos[i]
            else:  # arrays (N, ...); of worker processes, `_key` says which environments have that key
                arrays = {key: x for key, x in infos.items() if np.ndim(x) and infos.get(f"_{key}", done)[i]}
                info = {key: x[i] for key, x in arrays.items()}
            for key, value in numbers_in(info).items():
                self.infos[key].append(value)

    def close(self) -> None:
        workers = getattr(self.vector, "processes", ())
        timer = threading.Timer(6, kill_all, [workers])  # else waits without end
        timer.start()
        with contextlib.suppress(Exception, SystemExit):  # a worker may be dead or, after an error, never answer
            self.vector.close(**{"timeout": 5} if isinstance(self.vector, gym.vector.AsyncVectorEnv) else {})
        timer.cancel()
        self.end_workers()  # those beside one that has died may live


def refuse_batch_norm(actor: nn.Module) -> None:
    """SystemExit(2) for BatchNorm in the actor: actions would depend on other environments' rows; one row fails."""
    if any(isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.training for layer in actor.modules()):
        how = "LayerNorm works, or `eval()` when it is made, and `train()` only while it learns"
        fail(f"BatchNorm in the actor would mix the observations of all environments: {how}")


def bounded_actions(space: gym.Space) -> tuple[np.ndarray, np.ndarray]:
    """Lowest and highest action, (A,) each; SystemExit(2) unless the space is a Box of floats with finite bounds."""
    if not isinstance(space, gym.spaces.Box) or space.dtype.kind != "f" or not space.is_bounded():
        fail(f"actions are {space}; this script is for a Box of floats with finite bounds")
    if not (np.abs([space.low, space.high]).astype(float) < 1e38).all():
        fail(f"actions are {space}, whose bounds are too far apart for float32: scale them in `wrap`")
    if (space.low == space.high).any():
        fail(f"actions are {space}: where both bounds are equal there is nothing to learn; leave that dimension out")
    return space.low.reshape(-1), space.high.reshape(-1)


def set_matmul_precision(precision: str, device: torch.device, bf16: bool) -> None:
    """Set the precision of float32 matrix products; `auto`: TF32 on CUDA, on a CPU the fastest mode that is as exact.

    On AMD's CPUs from Zen 5 on, oneDNN (`medium`) is twice as fast as MKL, and as exact if it does not round to
    bfloat16. On a Zen 4 MKL is the faster one (benchmarks/NOTES.md). The choice depends on the kind of CPU and on
    measured errors, not times, so that a machine always makes the same one.
    """
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else "bf16"
    if bf16 and device.type == "cpu" and "bf16" not in info:
        print("note: --bf16 is of no use on this CPU, which has no instructions for bfloat16", file=sys.stderr)
    if precision == "auto" and device.type == "cuda":
        precision = "high"
    elif precision == "auto":
        torch.set_float32_matmul_precision("medium")
        x = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))
        error = (x @ x - (x.double() @ x.double())).abs().max() / 256
        family = int(info.partition("cpu family\t: ")[2].partition("\n")[0] or 0)  # 26 is Zen 5, 25 are Zen 3 and 4
        precision = "medium" if error < 1e-6 and "AuthenticAMD" in info and family >= 26 else "highest"
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = precision != "highest"


def validate(args: Args) -> torch.device:
    """Refuse settings that can't work, before any work is done; returns the device to learn on."""
    kinds = {field.name: str(field.type) for field in fields(args)}  # floats may be given as ints
    for name, value in asdict(args).items():
        if hasattr(getattr(args, name), "__dataclass_fields__"):
            fail(f"`{name}` of `Args` is a dataclass, which no checkpoint restores: make its fields settings of `Args`")
        least, most = LIMITS.get(name, (int(type(value) is int and "float" not in kinds[name]), math.inf))
        if type(value) in (int, float) and not (least <= value <= most and abs(value) < 3e38):  # float32 ends there
            bound = f" and at most {most}" if most < math.inf else " and less than 3e38" * (type(value) is float)
            is_own = value == getattr(type(args), name, None) or (name not in LIMITS and value < 0)
            hint = "; bounds of a setting of your own go into LIMITS" * is_own
            fail(f"--{name.replace('_', '-')} must be at least {least}{bound}, not {value}{hint}")
    for how in ("sync", "async"):
        if vars(args).get(f"{how}_envs") and vars(args).get("env_backend") == "envpool":
            fail(f"--{how}-envs is for Gymnasium's environments; EnvPool's step in threads")
    if args.track and not (args.tensorboard and importlib.util.find_spec("wandb")):
        fail("--track sends TensorBoard's events to Weights & Biases: pip install wandb, and drop --no-tensorboard")
    try:
        device = torch.device(args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError("it must be auto, cpu, cuda or cuda:N")
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        fail(f"--device {args.device}: {error}")
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)  # CUDA graphs are recorded on the current device
    return device


def refuse_idle_calls() -> None:
    """Refuse functions that would do nothing in this file: they work on `.grad`, and gradients are kept elsewhere."""
    source = Path(__file__).read_text(encoding="utf-8")
    kinds = [f"optim.{name}" for name, x in vars(torch.optim).items() if isinstance(x, type)]
    imported = [name for name, x in globals().items() if isinstance(x, type) and issubclass(x, torch.optim.Optimizer)]
    names = ("clip_grad_norm_", "clip_grad_value_", *kinds, *imported)
    if not any(f"{name}(" in source for name in names):
        return
    nodes = [*ast.walk(ast.parse(source))]
    calls = [ast.unparse(x.func) for x in nodes if isinstance(x, ast.Call)]
    own = {x.name for x in nodes if isinstance(x, ast.FunctionDef)}
    idle = [call for call in calls if call.endswith(names) and call not in own]
    idle = [] if fills_grad(nodes) else idle
    for function in (x for x in nodes if isinstance(x, ast.FunctionDef)):  # others may have a `.backward`
        parts = [*ast.walk(function)]
        calls = [ast.unparse(x.func) for x in parts if isinstance(x, ast.Call)]
        has_others = any(isinstance(x, ast.FunctionDef) for x in parts[1:])  # such as `train`: they take the gradients
        if any(call.endswith("autograd.grad") for call in calls) and not (has_others or fills_grad(parts)):
            idle += [call for call in calls if call.endswith(names[:2]) and call not in own]
    if idle:
        fail(f"`{idle[0]}` would do nothing, as no `.grad` is set: use `clip` of ppo.py, and the `Adam` of this file")


def fills_grad(nodes: list[ast.AST]) -> bool:
    """Whether code calls `backward`, or sets a `.grad` to something."""
    sets = [x for x in nodes if isinstance(x, ast.Assign) and not isinstance(x.value, ast.Constant)]
    filled = [getattr(part, "attr", "") for x in sets for target in x.targets for part in ast.walk(target)]
    calls = [ast.unparse(x.func) for x in nodes if isinstance(x, ast.Call)]
    return "grad" in filled or any(call.endswith(".backward") for call in calls)


def refuse_idle_settings() -> None:
    """Refuse a loop of `train` that sets an attribute of `args` that nothing reads after `run.open`: no effect."""
    parts = ast.parse(Path(__file__).read_text(encoding="utf-8")).body
    train = [node for x in parts if getattr(x, "name", "") == "train" for node in [*ast.walk(x)][1:]]
    loops = [node for x in train if isinstance(x, ast.For | ast.While) for node in ast.walk(x)]
    sets = [x for x in loops if isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Store)]
    names = {x.attr for x in sets if ast.unparse(x.value) in ("args", "run.args")}
    opened = [x.lineno for x in train if isinstance(x, ast.Call) and ast.unparse(x.func) == "run.open"]
    later = [x for x in train if getattr(x, "lineno", 0) > max(opened, default=0)]
    later += [node for x in train if isinstance(x, ast.FunctionDef | ast.Lambda) for node in ast.walk(x)]
    owners = {id(x.value) for x in later if isinstance(x, ast.Attribute)}
    alone = [x for x in later if names and isinstance(x, ast.Name | ast.Attribute) and id(x) not in owners]
    if not names or any(ast.unparse(x) in ("args", "run.args", "run") for x in alone):
        return  # nothing is set, or all are handed to something that may read them
    later += [node for x in parts if getattr(x, "name", "") != "train" for node in ast.walk(x)]
    reads = {x.attr for x in later if isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Load)}
    if idle := sorted(x for x in names - reads if not x.endswith(("learning_rate", "_lr"))):
        fail(f"`args.{idle[0]}` is read only before the loop, so setting it there has no effect: use a tensor")


def typed_flags() -> list[str]:
    """The command line, with CleanRL's --cuda translated; SystemExit(2) for its other flags, with a replacement."""
    words = [{"--cuda": "--device=auto", "--no-cuda": "--device=cpu"}.get(word, word) for word in sys.argv[1:]]
    instead = {"--torch-deterministic": "most runs on a CPU repeat exactly without it"}
    instead["--capture-video"] = "./run.sh evaluate RUN_DIR --video FILE.mp4"
    instead |= dict.fromkeys(("--save-model", "--upload-model", "--hf-entity"), "each run leaves checkpoint.pt")
    flags = [word.partition("=")[0].replace("_", "-").replace("--no-", "--") for word in words]
    if found := [flag for flag in flags if flag in instead]:
        fail("flags of CleanRL's: " + "; ".join(f"{flag}, here {instead[flag]}" for flag in found))
    if flags.count("--override") > 1:  # the parser would keep the last one only
        fail("--override is given twice: name all settings after one, as in --override NAME=VALUE NAME=VALUE")
    return words


def load_checkpoint(args: Args) -> tuple[Args, dict]:
    """Settings and checkpoint of the run to resume; without --resume, the settings as given and an empty dict."""
    if args.resume is None:
        if args.override:
            fail("--override changes settings of a resumed run; it needs --resume RUN")
        return args, {}
    if not Path(args.resume, "checkpoint.pt").exists():
        fail(f"can't resume {args.resume}: there is no checkpoint.pt; name the folder of a run")
    try:
        # Memory-mapped: a replay buffer is copied from the file directly to its place
        checkpoint = torch.load(Path(args.resume, "checkpoint.pt"), map_location="cpu", weights_only=True, mmap=True)
        if checkpoint["script"] != Path(__file__).name:
            raise ValueError(f"this is a run of {checkpoint['script']}")
        saved = Args(**checkpoint["args"])
    except Exception as error:  # anything unpickling a broken file may raise
        fail(f"can't resume {args.resume}: {type(error).__name__}: {error}")
    words = sys.argv[1:] if Path(sys.argv[0]).name == Path(__file__).name else []  # else another program's
    flags = [word.partition("=")[0].lstrip("-").replace("-", "_") for word in words if word.startswith("--")]
    other_names = {"cuda": "device", "start_e": "epsilon_start", "end_e": "epsilon_end"}  # CleanRL's
    typed = {other_names.get(flag, flag) for flag in (flag.removeprefix("no_") for flag in flags)}
    defaults = vars(Args())
    given = {name: value for name, value in vars(args).items() if name in typed or value != defaults[name]}
    of_the_machine = "resume override device checkpoint_every track tensorboard wandb_project_name wandb_entity".split()
    of_the_machine += "ray_address fragment_timeout runner_restarts step_timeout max_restarts".split()
    of_the_machine += [f"{what}_per_{who}" for what in ("cpus", "gpus") for who in ("runner", "learner")]
    for name, value in given.items():
        may_change = name in of_the_machine or (name == "total_timesteps" and value > saved.total_timesteps)
        if value != getattr(saved, name) and not may_change:
            flag, hint = f"--{name.replace('_', '-')}", f"; --override {name}={value}" * (name in CHANGEABLE)
            fail(f"{flag} can't change in a run; --device, --checkpoint-every and a longer --total-timesteps can{hint}")
    if given.get("total_timesteps", saved.total_timesteps) != saved.total_timesteps:
        print("what is annealed over the run now follows the new --total-timesteps", file=sys.stderr)
    checkpoint["override"] = [change.partition("=")[0].replace("-", "_") for change in args.override]
    return overridden(replace(saved, **given | {"override": ()}), args.override), checkpoint


def overridden(saved: Args, changes: tuple[str, ...]) -> Args:
    """The settings of a run with NAME=VALUE changed; SystemExit(2) where that can't be done within a run."""
    for change in changes:
        name, equals, value = change.partition("=")
        name = name.replace("-", "_")
        if not equals:
            fail(f"--override {change}: write NAME=VALUE")
        if name not in CHANGEABLE:
            why = "can't change in a run" if hasattr(saved, name) else "is unknown"
            fail(f"--override {change}: {name} {why}; it may change {', '.join(CHANGEABLE)}")
        flag = f"--{name.replace('_', '-')}={value}"
        new = tyro.cli(tyro.conf.FlagConversionOff[Args], args=[flag], default=saved)
        print(f"{name} was {getattr(saved, name)}, from here on {getattr(new, name)}", file=sys.stderr)
        saved = new
    return saved


def new_folder(runs: Path, name: str) -> Path:
    """Make NAME__SECONDS in `runs`; of several runs that start in the same second, all but one wait for the next."""
    runs.mkdir(exist_ok=True)
    while True:
        folder = Path(runs, f"{name}__{int(time.time())}".replace("/", "_").replace(":", "_"))
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
        time.sleep(0.1)


def rewrite(path: Path, text: str) -> None:
    """Write a text file beside the old one, then replace that: a whole one is on disk at all times."""
    with path.with_suffix(".tmp").open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    path.with_suffix(".tmp").replace(path)


def in_notebook() -> bool:
    return "ipykernel.kernelapp" in sys.modules  # and not by the type of sys.stderr, which a cell may replace


def lock(file) -> bool:
    """Lock this file against other processes until it is closed; False if another process holds the lock."""
    try:
        import fcntl

        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # a system or a file system without locks
        pass
    return True


def check_storable(name: str, value) -> None:
    """Refuse values that can be written to a checkpoint but not read: safe loading rejects NumPy and custom classes."""
    if type(value) in (dict, OrderedDict):
        for key, part in value.items():
            check_storable(f"key {key!r} of {name}", key)
            check_storable(f"{name}[{key!r}]", part)
    elif type(value) in (list, tuple, torch.Size):
        for i, part in enumerate(value):
            check_storable(f"{name}[{i}]", part)
    elif not isinstance(value, Tensor | None) and type(value) not in (bool, int, float, str, bytes):
        fail(f"{name} is {type(value).__name__}, which no checkpoint can hold: make it a tensor, a number, a string")


def check_owners(state: dict, variables: dict) -> None:
    """Refuse weights that no optimizer in `run.open` changes, or that are in no module there and so not in checkpoints.

    A module with the parameter names of another, such as a target network, needs no optimizer. Networks and optimizers
    among the `variables` of `train` that no checkpoint would have are named in a note.
    """
    modules = {name: part for name, part in state.items() if isinstance(part, nn.Module)}
    keys = {name: [key for key, _ in part.named_parameters()] for name, part in modules.items()}
    saved, learning = {id(x) for part in modules.values() for x in part.parameters()}, set()
    others = [name for name, part in state.items() if name not in modules and not hasattr(part, "step")]
    for name, part in state.items():
        own = part.weights if hasattr(part, "step") and hasattr(part, "weights") else ()
        weights = {id(x) for x in own} | {id(x) for group in getattr(part, "param_groups", ()) for x in group["params"]}
        learning |= weights
        if not (weights <= saved or others):  # `others` may save them, too
            fail(f"`run.open` must get the modules whose weights `{name}` changes, so that checkpoints hold them")
    for name, part in modules.items():
        idle = [key for key, x in part.named_parameters() if x.requires_grad and id(x) not in learning]
        if idle and list(keys.values()).count(keys[name]) == 1:
            hint = "freeze it by `requires_grad_(False)` or, if your own code changes it, leave `check_owners` out"
            fail(f"no optimizer in `run.open` changes `{name}.{idle[0]}`: {hint}")
    for name, x in variables.items():
        own = [key for key, _ in x.named_parameters()] if isinstance(x, nn.Module) else []
        is_new = own and own not in keys.values() and not {id(weight) for weight in x.parameters()} <= saved
        steps = isinstance(x, Adam | torch.optim.Optimizer) and not any(x is part for part in state.values())
        if is_new or steps:
            print(f"note: `{name}` is not given to `run.open`: a resumed run has a new one", file=sys.stderr)


def end_broken_runs() -> None:
    """Close runs whose `train` is not running any more: after an error, a notebook keeps them alive.

    That ends their processes, if `run.open` (`RayRunners`: `begin`) was reached.
    """
    at_work, frame = set(), sys._getframe()
    while frame is not None:
        at_work |= {(id(x), frame.f_code.co_filename) for x in frame.f_locals.values()}
        frame = frame.f_back
    for run in [x for x in gc.get_objects() if type(x).__name__ == "Run" and hasattr(x, "at_end")]:
        if (id(run), run.on_signal.__code__.co_filename) not in at_work:  # else that run has started this one
            with contextlib.suppress(Exception):  # what broke may not close
                run.at_end.close()


class Run:
    """A run's settings, counters and random numbers, its folder, log and checkpoints, its progress bar.

    The first SIGINT, SIGTERM or SIGHUP sets `stopped_by`, and the loop should end. A second one of its kind kills.
    """

    def __init__(self, args: Args):
        """Load the run to resume, refuse settings that can't work (SystemExit(2)), seed all random numbers."""
        if threading.current_thread() is not threading.main_thread():
            fail("`train` needs the main thread, which gets signals: start a process for each run")
        end_broken_runs()
        self.at_end, self.exit_code = contextlib.ExitStack(), 1  # calls of `close`, the last one first
        self.args, self.checkpoint = load_checkpoint(args)
        self.device = validate(self.args)
        self.settings, self.home = asdict(self.args), Path.cwd()  # an environment may change the current folder
        counters = (self.checkpoint.get(name, 0) for name in ("global_step", "iteration", "num_updates", "seconds"))
        self.step, self.iteration, self.num_updates, self.seconds = counters
        self.logged_step = self.saved_step = self.first_step = self.step
        self.episodes, self.returns, self.stopped_by = [], deque(maxlen=100), None
        self.checkpoint_every = self.args.checkpoint_every or max(1, self.args.total_timesteps // 10)
        refuse_idle_calls()
        refuse_idle_settings()
        random.seed(self.args.seed)
        np.random.seed(self.args.seed % 2**32)
        torch.manual_seed(self.args.seed)
        # What a script sets for the whole process: in a notebook, the next run finds it as this one did, also if this
        # one fails before `run.open`, when nothing else would close it
        weakref.finalize(self, self.at_end.close).atexit = False
        self.at_end.callback(torch.set_num_threads, torch.get_num_threads())
        self.at_end.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        cudnn = sys.modules["torch.backends.cudnn"]  # naming torch.backends.cudnn here would break Ray's pickling
        for name in ("allow_tf32", "benchmark"):
            self.at_end.callback(setattr, cudnn, name, getattr(cudnn, name))
        tiny = torch.tensor(1e-310, dtype=torch.float64)  # no function says whether such numbers count as zero
        self.at_end.callback(torch.set_flush_denormal, not (tiny * 1).item())

    def env_seeds(self, num_envs: int) -> list[int]:
        """A seed for each environment: 31 bits, as EnvPool requires; different for each --seed and after a resume."""
        return (np.random.SeedSequence([self.args.seed, self.step]).generate_state(num_envs) >> 1).tolist()

    def param_groups(self) -> list[dict]:
        """The `param_groups` of a copy's `torch.optim` optimizers."""
        return [group for part in self.state.values() for group in getattr(part, "param_groups", ())]

    def restore(self) -> None:
        """Load state and random numbers from the checkpoint."""
        saved = self.checkpoint["args"] | self.checkpoint.get("later_args", {})
        changes = {(saved.get(name), getattr(self.args, name)) for name in self.checkpoint["override"]}
        rates = [group["lr"] for group in self.param_groups()]
        try:
            for name, part in self.state.items():
                part.load_state_dict(self.checkpoint[name])
        except (KeyError, RuntimeError, ValueError) as error:
            fail(f"can't resume {self.args.resume}: its checkpoint is of another version of this file: {error}")
        for group, rate in zip(self.param_groups(), rates, strict=True):
            if (group["lr"], rate) in changes:
                group["lr"] = rate  # which --override has changed; `load_state_dict` has brought the old one back
        rng = self.checkpoint["rng"]
        random.setstate(rng["python"])
        np.random.set_state(tuple(rng["numpy"]))
        torch.set_rng_state(rng["torch"])
        if self.device.type == "cuda" and rng["cuda"] is not None:
            torch.cuda.set_rng_state(rng["cuda"])
        self.checkpoint = None  # frees a replay buffer

    def open(self, envs, **state) -> None:
        """Register the parts of `state` for checkpoints, load them when resuming, and open the run's folder."""
        self.envs, self.state, envs.stop = envs, state, self.close  # so that the run is saved if an environment fails
        given, self.settings = self.settings, asdict(self.args)
        if self.checkpoint and (twice := [name for name in given if given[name] != self.settings[name]]):
            fail(f"`args.{twice[0]}` is set before `run.open`, so a resumed run sets it twice: use another variable")
        own = {"rng", "script", "args", "later_args", "seconds", "global_step", "iteration", "num_updates"}
        for name, part in state.items():
            if name in own:
                fail(f"`run.open` can't keep `{name}` in checkpoints: they use this name; give it another one")
            if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                fail(f"`run.open`: `{name}` needs `state_dict` and `load_state_dict`, as an nn.Module with buffers has")
        variables = sys._getframe(1).f_locals  # of `train`
        self.named = [name for name, part in state.items() if variables.get(name) is part]
        check_owners(state, variables)
        check_storable("state", {name: part.state_dict() for name, part in state.items()} | {"args": asdict(self.args)})
        # Settings as the loop had left them, except those that were changed now. Ray's runners keep the first ones
        later = {} if hasattr(envs, "sent") else self.checkpoint.get("later_args", {})
        new = {x for x in later if x in self.checkpoint["override"] or self.checkpoint["args"][x] != self.settings[x]}
        later = {name: x for name, x in later.items() if name not in new}
        if self.checkpoint:
            self.restore()
        self.first_rates, self.changed = self.rates(), set()
        self.keep_rng()
        self.terminals = [stream for stream in (1, 2) if os.isatty(stream)]
        signals = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
        signals -= {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()  # by `nohup`
        self.handlers = {signum: signal.signal(signum, self.on_signal) for signum in signals}
        ours = (self.on_signal, signal.SIG_DFL, signal.default_int_handler)  # else the program has set another one
        first = self.handlers.items()
        self.at_end.callback(lambda: [signal.signal(*x) for x in first if signal.getsignal(x[0]) in ours])
        self.at_end.callback(envs.close)
        with contextlib.ExitStack() as at_failure:
            at_failure.callback(self.at_end.close)  # if the folder is in use: in a notebook, nothing else would
            self.open_folder()
            at_failure.pop_all()
        if getattr(self.args, "cudagraphs", False) and self.device.type == "cpu":
            print("CUDA graphs are off: the networks learn on the CPU", file=sys.stderr)
        if starts := getattr(self.args, "learning_starts", 0):
            starts += self.step * state.keys().isdisjoint({"buffer", "replay"})  # an unsaved one is refilled first
            if starts > self.args.learning_starts or starts >= self.args.total_timesteps:
                print(f"note: nothing is learnt before step {starts:,}", file=sys.stderr)
        print(getattr(envs, "summary", f"environments: {self.args.env_id}"), file=sys.stderr)
        total, initial = self.args.total_timesteps, self.step
        hidden = False if in_notebook() else None  # None: unless on a terminal
        self.bar = tqdm(total=total, initial=initial, unit=" steps", unit_scale=True, disable=hidden)
        self.at_end.callback(self.bar.close)
        for name, x in later.items():
            print(f"note: `args.{name}`, {self.settings[name]} before `run.open`, is {x} from here on", file=sys.stderr)
        vars(self.args).update(later)
        self.first_settings, self.settings = self.settings, asdict(self.args)
        self.start_time = time.perf_counter() - self.seconds

    def open_folder(self) -> None:
        """Find or make the run's folder and open its files; exit code 2 if that fails, or another run is there."""
        chosen = self.args.resume or self.args.run_dir
        self.dir, self.new_files = Path(self.home, chosen or "runs"), ()
        try:
            if not chosen:
                self.dir = new_folder(self.dir, f"{self.args.env_id}__{self.args.exp_name}__{self.args.seed}")
            self.dir.mkdir(parents=True, exist_ok=True)
            if not self.args.resume and any(self.dir.iterdir()):
                has_run = Path(self.dir, "checkpoint.pt").exists()
                how = "--resume continues a run" if has_run else "it has no checkpoint to go on from"
                fail(f"the run folder {self.place()} is not empty; {how}")
            self.open_files()
        except Exception as error:  # those of Weights & Biases have no other type in common
            for file in self.new_files:  # else the folder would be refused to the next attempt
                file.unlink(missing_ok=True)
            fail(f"can't use the run folder {self.place()}: {type(error).__name__}: {error}")

    def open_files(self) -> None:
        """Write the configuration or, to resume, cut the log back to the checkpoint; then open the log to append."""
        log, config, lines = self.dir / "metrics.jsonl", self.dir / "config.json", []
        mode = "a+" if self.args.resume else "x+"  # "x": of two runs that begin here at once, one fails
        old = log.open(mode, errors="replace")  # closing any other handle of this file would end its lock
        if not lock(old):
            fail(f"another process is training {self.place()}: end it first")
        files = (log, config, log.with_suffix(".tmp"), config.with_suffix(".tmp"))
        self.new_files = () if self.args.resume else files
        saved = self.dir / "checkpoint.pt"
        if self.args.resume and torch.load(saved, "cpu", weights_only=True, mmap=True)["global_step"] != self.step:
            fail(f"another process has saved {self.place()} since this one read it: try again")
        git = f"git -C {shlex.quote(str(Path(__file__).parent))} describe --always --dirty --abbrev=40 2>/dev/null"
        commit = subprocess.getoutput(git) or None
        blob = subprocess.getoutput(f"git hash-object {shlex.quote(__file__)} 2>/dev/null") or None
        if not self.args.resume:
            libraries = "torch tensordict gymnasium envpool numpy ray".split()
            installed = [x for x in libraries if importlib.util.find_spec(x) and [*distributions(name=x)]]
            values = {
                "script": Path(__file__).name,
                "blob": blob,
                "args": asdict(self.args),
                "versions": {"python": sys.version.split()[0], **{name: version(name) for name in installed}},
                "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
                "cores": num_cores(),
                "env_backend": getattr(self.envs, "backend", None),
                "environments": getattr(self.envs, "summary", None),
                "matmul_precision": torch.get_float32_matmul_precision(),
                "commit": commit,
            }
        else:
            values, now = json.loads(config.read_text()), json.loads(json.dumps(asdict(self.args)))
            if blob and values.get("blob") not in (None, blob):  # there is none where git is missing
                print("note: this file has changed since the run began; the run keeps its settings", file=sys.stderr)
            parts, before = values.get("resumed", []), values.get("args", {}) | {"resume": now["resume"]}
            for part in parts:
                before |= part.get("changed", {})
            changed = {name: value for name, value in now.items() if value != before.get(name)}
            values["resumed"] = [*parts, {"global_step": self.step, "commit": commit, "changed": changed}]
        values.setdefault("id", os.urandom(8).hex())  # in Weights & Biases
        rewrite(config, json.dumps(values, indent=2) + "\n")
        old.seek(0)
        for line in old.read().splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a damaged line is left out
                lines += [line + "\n"] if json.loads(line)["global_step"] <= self.step else []
        rewrite(log, "".join(lines))
        self.file, self.writer = log.open("a", buffering=1), None
        self.at_end.callback(self.file.close)
        if not lock(self.file):
            fail(f"another process is training {self.place()}: end it first")
        old.close()
        if self.args.track:
            import wandb

            names = {"project": self.args.wandb_project_name, "entity": self.args.wandb_entity, "name": self.dir.name}
            settings = {"resume": "allow", "config": asdict(self.args), "sync_tensorboard": True}
            tracked = wandb.init(**names, id=values["id"], **settings)
            self.at_end.callback(lambda: tracked.finish(self.exit_code))  # else a later run goes on with this one
        if self.args.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # takes a second

            self.writer = SummaryWriter(self.dir, purge_step=self.step + 1 if self.args.resume else None)
            self.at_end.callback(self.writer.close)

    def on_signal(self, signum: int, frame) -> None:
        while frame is not None and not any(map(self.is_in, frame.f_locals.values())):
            frame = frame.f_back
        if frame is None:  # an error has ended `train`, as in a notebook: the signal is for what runs now
            signal.signal(signum, self.handlers[signum])
            signal.raise_signal(signum)
            return
        self.stopped_by = signum
        # The next one kills; in a notebook, whose kernel holds more than this run, it is a KeyboardInterrupt
        signal.signal(signum, signal.default_int_handler if in_notebook() else signal.SIG_DFL)
        for stream in self.terminals if signum == signal.SIGHUP else ():  # has gone: to write to it is an error
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)

    def is_in(self, x) -> bool:
        """Whether a variable is this run, or an object that has it."""
        with contextlib.suppress(AttributeError):  # by no method of its own, as that of a proxy may fail or wait
            return x is self or any(part is self for part in [*object.__getattribute__(x, "__dict__").values()])
        return False

    def keep_rng(self) -> None:
        """Record the random state for the next checkpoint: numbers of an interrupted rollout will be drawn again."""
        name, keys, *rest = np.random.get_state()
        self.rng = {"python": random.getstate(), "numpy": [name, keys.tolist(), *rest], "torch": torch.get_rng_state()}
        self.rng["cuda"] = torch.cuda.get_rng_state() if self.device.type == "cuda" else None

    def log(self, metrics: dict[str, float]) -> None:
        """Write a line, with means over the episodes that ended since the last line, and save if that is due.

        Metrics of your own belong in the script's own call: if it asks `is_due`, one before it takes its place.
        """
        seconds = time.perf_counter() - self.start_time
        self.check_settings()
        variables = sys._getframe(1).f_locals
        for name in self.named:
            if variables.get(name, self.state[name]) is not self.state[name]:
                fail(f"`{name}` is not what `run.open` was given, and checkpoints keep that: change it in place")
        own = {f"charts/{name}" for name in ("SPS", "episodic_return", "episodic_length", "episodes")}
        if taken := metrics.keys() & {"global_step", "seconds", *own}:
            fail(f"a metric can't be called {taken.pop()}: the log itself uses this name; {self.hint()}")
        metrics = dict(metrics)
        if self.step > self.logged_step:  # not so in a second line for a step, as with metrics of your own
            metrics["charts/SPS"] = (self.step - self.logged_step) / (seconds - self.seconds)
        if self.episodes:
            self.returns.extend(episode_return for episode_return, _ in self.episodes)
            means = np.mean(self.episodes, axis=0).tolist()
            metrics["charts/episodic_return"], metrics["charts/episodic_length"] = means
            metrics["charts/episodes"] = len(self.episodes)
        metrics |= {f"info/{key}": sum(values) / len(values) for key, values in self.envs.infos.items()}
        for name, value in metrics.items():
            if np.ndim(value) or (not isinstance(value, Tensor) and np.asarray(value).dtype.kind not in "biuf"):
                fail(f"the metric {name} is {value!r}, which is no number; {self.hint()}")
            if not math.isfinite(value):
                sys.exit(f"error: {name} is {value} at step {self.step}; {self.hint()}")
        line = {"global_step": self.step, "seconds": round(seconds, 3), **metrics}
        try:
            for name, value in metrics.items() if self.writer else ():
                self.writer.add_scalar(name, value, self.step)
            self.file.write(json.dumps(line, default=float) + "\n")
        except OSError as error:
            sys.exit(f"error: can't write the log: {error}; {self.hint()}")
        self.bar.set_postfix({"return": f"{np.mean(self.returns):.1f}"} if self.returns else {}, refresh=False)
        self.bar.update(self.step - self.logged_step)
        self.logged_step, self.seconds = self.step, seconds
        self.episodes.clear()
        self.envs.infos.clear()
        self.keep_rng()
        if self.step // self.checkpoint_every > self.saved_step // self.checkpoint_every:
            self.save()

    def check_settings(self) -> None:
        """Refuse a learning rate that was changed in `args` before the last line, if that of its optimizer stayed."""
        if self.step == self.logged_step:  # a second line of one iteration
            return
        names = [name for name in self.settings if name.endswith(("learning_rate", "_lr")) and name != "anneal_lr"]
        before, self.changed = self.changed, {x for x in names if getattr(self.args, x) != self.settings[x]}
        if not (changed := sorted(before & self.changed)):  # a later line of the loop may read a change
            return
        pairs = [*zip(self.first_rates, self.rates(), strict=False)]  # a group may have been added
        idle = [old for old, new in pairs if old == new]
        both = {name: {self.settings[name], float(np.float32(self.settings[name]))} for name in changed}
        unread = [name for name in changed if both[name] & {*idle}] or changed[: len(idle) == len(pairs)]
        if unread and len(changed) > len(pairs) - len(idle):
            how = "fill the `learning_rate` of its Adam, or give its optimizer to `run.open`"
            fail(f"setting `args.{unread[0]}` has no effect: {how}; {self.hint()}")

    def rates(self) -> list[float]:
        """The learning rates of all optimizers."""
        own = [float(part.learning_rate) for part in self.state.values() if hasattr(part, "learning_rate")]
        return own + [group["lr"] for group in self.param_groups()]

    def save(self) -> None:
        """Write the checkpoint beside the old one, then replace that: a complete one is on disk at all times."""
        modules = [part for part in self.state.values() if isinstance(part, nn.Module)]
        if not all(weight.isfinite().all() for module in modules for weight in module.parameters()):
            sys.exit(f"error: weights are NaN or infinite at step {self.step}; {self.hint()}")
        later = {name: x for name, x in asdict(self.args).items() if x != self.first_settings[name]}
        state = {name: part.state_dict() for name, part in self.state.items()} | {"rng": self.rng, "later_args": later}
        state |= {"script": Path(__file__).name, "args": self.first_settings, "seconds": self.seconds}
        state |= {"global_step": self.step, "iteration": self.iteration, "num_updates": self.num_updates}
        check_storable("state", state)  # parts of it may have another type than at the start
        new = self.dir / "checkpoint.tmp"
        try:
            with new.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self.dir / "checkpoint.pt")
        except (OSError, RuntimeError) as error:
            with contextlib.suppress(OSError):  # of a disk that can only be read, which is said below
                new.unlink()
            sys.exit(f"error: can't write a checkpoint: {error}; {self.hint()}")
        self.saved_step = self.step

    def place(self) -> Path:
        """The run's folder, as seen from where the run was started."""
        return self.dir.relative_to(self.home) if self.dir.is_relative_to(self.home) else self.dir

    def hint(self) -> str:
        """How to go on once the run has ended."""
        run = shlex.quote(str(self.place()))
        return f"to go on from step {self.saved_step}: --resume {run}" if self.saved_step else "nothing saved yet"

    def goes_on(self) -> bool:
        return self.step < self.args.total_timesteps and self.stopped_by is None

    def is_due(self) -> bool:
        """Whether to log now: a line is due, or a checkpoint, which comes with a line, or the run ends."""
        intervals = (self.args.log_every, self.checkpoint_every)
        is_due = not self.goes_on() or any(self.step // every > self.logged_step // every for every in intervals)
        return is_due and self.step > self.logged_step  # not twice for a step, as rows of resets do not count

    def stop_if_asked(self) -> None:
        """After a signal, end the run now, without another update; save the last one."""
        if self.stopped_by is not None:
            self.close()

    def close(self, error: str | None = None) -> Path:
        """End the run: save, and say how it went; returns its folder. After an error or a signal, end the program."""
        try:
            if self.step > self.logged_step:
                self.log({})
            if self.step > self.saved_step:
                self.save()
        except SystemExit:
            if error:  # which came first
                print(f"error: {error}", file=sys.stderr)
            raise
        stopped_by = self.stopped_by  # a signal from here on has stopped nothing
        self.exit_code = int(bool(error or stopped_by))
        try:
            self.at_end.close()
        except Exception as problem:  # as of Weights & Biases, without network: the run is on the disk
            print(f"note: {type(problem).__name__} while the run was closed: {problem}", file=sys.stderr)
        if error:
            sys.exit(f"error: {' '.join(error.split())}, at step {self.step}; {self.hint()}")
        if self.step == self.first_step > 0 and stopped_by is None:
            print("this run is already finished; to go on, raise --total-timesteps (in PPO, by a rollout or more)")
        count = len(self.returns)
        score = f", mean return of the last {count} episodes {np.mean(self.returns):.1f}" if count else ""
        print(f"{self.step:,} steps in {self.seconds:.1f} s{score}\nlog, checkpoint, configuration: {self.place()}")
        if stopped_by is not None:
            print(f"stopped by a signal; {self.hint()}", file=sys.stderr)
        if self.stopped_by is not None:  # also by one that came while it closed: it is meant for the program, too
            sys.exit(128 + self.stopped_by)
        return self.dir


if __name__ == "__main__":
    train(tyro.cli(Args, args=typed_flags(), description=__doc__))
