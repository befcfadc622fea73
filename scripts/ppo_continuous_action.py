# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0", "tensordict==0.15.3", "gymnasium[mujoco]==1.4.0", "envpool==1.2.5",
#     "tyro==1.0.17", "numpy==2.4.6", "tqdm==4.70.1", "tensorboard==2.21.0",
# ]
# ///
"""Proximal Policy Optimization (PPO) for continuous actions.

Schulman et al. (2017), "Proximal Policy Optimization Algorithms", https://arxiv.org/abs/1707.06347; equation numbers
below refer to it. Advantages: Schulman et al. (2016), "High-Dimensional Continuous Control Using Generalized Advantage
Estimation", https://arxiv.org/abs/1506.02438.

    python ppo_continuous_action.py --env-id HalfCheetah-v4 --seed 1

Its compiled twin is `ppo_continuous_action_torchcompile.py`; `./run.sh diff` shows what compiling changes.
Shapes: T = num_steps, N = num_envs, B = T * N, M = rows of a minibatch, O = size of an observation, A = of an action,
P = number of parameters.

Settings are those of CleanRL's script of the same name. Departures from it: a truncated episode bootstraps from the
value of its last observation; the step in which an environment resets is masked; rewards of a rollout are scaled by
one standard deviation, that of all discounted returns up to the end of the rollout; --target-kl looks at means over an
epoch; the log has the means of a rollout's last epoch.

Reading order: settings, networks, formulas, then `train`, the algorithm. Below the `# ----` line are normalization of
observations and rewards, and plumbing.
"""

import ast
import atexit
import contextlib
import difflib
import gc
import importlib.util
import itertools
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
from collections import ChainMap, OrderedDict, defaultdict, deque
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
from torch import Tensor, nn
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
    tensorboard: bool = True  # write TensorBoard events beside metrics.jsonl
    track: bool = False  # send the TensorBoard events to Weights & Biases too
    wandb_project_name: str = "flatout"  # the Weights & Biases project
    wandb_entity: str | None = None  # the Weights & Biases team

    # environment
    env_id: str = "HalfCheetah-v4"  # any id of Gymnasium (module:Env-v0 too) or EnvPool with Box actions
    env_backend: Literal["auto", "envpool", "gymnasium"] = "auto"  # auto: mostly EnvPool if several envs (docs/ppo.md)
    sync_envs: bool = False  # step all environments in this process, one by one: best if a step takes microseconds
    env_kwargs: str = "{}"  # arguments for the environment's constructor, as JSON: '{"key": value}'
    total_timesteps: int = 1_000_000  # environment steps, rows of resets included, rounded down to whole rollouts
    num_envs: int = 1  # environments side by side

    # PPO
    num_steps: int = 2048  # steps of each environment in a rollout
    learning_rate: float = 3e-4  # of Adam
    anneal_lr: bool = True  # lower the learning rate linearly to zero
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    num_minibatches: int = 32  # gradient steps in an epoch
    update_epochs: int = 10  # passes over each rollout
    norm_adv: bool = True  # normalize the advantages within each minibatch
    clip_coef: float = 0.2  # epsilon of the clipped objective
    clip_vloss: bool = True  # clip the value function's change in the same way
    ent_coef: float = 0.0  # weight of the entropy bonus, c2 in the paper
    vf_coef: float = 0.5  # weight of the value loss, which is half the squared error
    max_grad_norm: float = 0.5  # gradients with a larger norm are scaled down to this one
    target_kl: float | None = None  # stop the epochs on a rollout once an epoch's mean approx_kl exceeds this


METRICS = (  # in the order in which `update_minibatch` stacks them
    "losses/policy_loss", "losses/value_loss", "losses/entropy", "losses/old_approx_kl", "losses/approx_kl",
    "losses/clipfrac",
)  # fmt: skip
# Smallest and largest value of a setting; for settings not listed, integers are at least 1, floats at least 0
LIMITS = {"seed": (0, 2**63 - 1), "gamma": (0, 1), "gae_lambda": (0, 1)}
LIMITS |= {"max_grad_norm": (1e-9, math.inf)}  # with 0, nothing would be learnt
# What --override may change when a run is resumed
CHANGEABLE = "learning_rate gamma gae_lambda update_epochs clip_coef ent_coef vf_coef max_grad_norm target_kl".split()


def mlp(inputs: int, outputs: int, output_gain: float) -> nn.Sequential:
    """Two hidden layers of 64 tanh units, orthogonal weights: (B, inputs) -> (B, outputs)."""
    net = nn.Sequential(
        nn.Linear(inputs, 64), nn.Tanh(),
        nn.Linear(64, 64), nn.Tanh(),
        nn.Linear(64, outputs),
    )  # fmt: skip
    layers = [layer for layer in net if isinstance(layer, nn.Linear)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight, output_gain if layer is layers[-1] else math.sqrt(2))
        nn.init.zeros_(layer.bias)
    return net


class ActorCritic(nn.Module):
    """Gaussian policy and value: observation (B, O) -> mean of the action (B, A), its log std (A,), value (B,)."""

    def __init__(self, obs_dim: int, action_dim: int):
        super().__init__()
        self.actor = mlp(obs_dim, action_dim, output_gain=0.01)
        self.log_std = nn.Parameter(torch.zeros(action_dim))
        self.critic = mlp(obs_dim, 1, output_gain=1.0)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.actor(obs), self.log_std, self.critic(obs).squeeze(1)


def normal_log_prob(action: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Log-density of actions (..., A) under a normal distribution with diagonal covariance -> (...)."""
    z = (action - mean) * torch.exp(-log_std)
    return (-0.5 * z.square() - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)


def discounted_sum(x: Tensor, decay: Tensor) -> Tensor:
    """y[t] = x[t] + decay[t] * y[t + 1] along the first dimension, by a parallel scan: log2(T) passes over (T, N).

    A loop over 2048 steps takes 60 ms, this takes 0.3 ms: each pass doubles the number of terms summed in y[t].
    """
    span = 1
    while span < len(x):
        x = torch.cat([x[:-span] + decay[:-span] * x[span:], x[-span:]])
        decay = torch.cat([decay[:-span] * decay[span:], decay[-span:]])
        span *= 2
    return x


def gae(
    reward: Tensor, value: Tensor, terminated: Tensor, truncated: Tensor, valid: Tensor, gamma: float, gae_lambda: float
) -> Tensor:
    """Generalized advantage estimation, equations (11) and (12) of PPO: all (T, N), except value (T + 1, N) -> (T, N).

    After a truncation, value[t + 1] is that of the episode's true last observation, and serves to bootstrap as usual;
    after a termination there is no bootstrap. Invalid rows (resets) get zero, and no sum continues across them.
    """
    delta = (reward + gamma * (1 - terminated) * value[1:] - value[:-1]) * valid
    return discounted_sum(delta, gamma * gae_lambda * (1 - torch.maximum(terminated, truncated)) * valid)


def masked_mean(x: Tensor, valid: Tensor) -> Tensor:
    """Mean of x where valid = 1. Unlike `x[valid].mean()`, it has fixed shapes and does not wait for the device."""
    return (x * valid).sum() / valid.sum().clamp(min=1)


def masked_std(x: Tensor, valid: Tensor) -> Tensor:
    """Standard deviation (unbiased) of the entries of x where valid = 1."""
    squares = ((x - masked_mean(x, valid)) * valid).square().sum()
    return (squares / (valid.sum() - 1).clamp(min=1)).sqrt()


def clipped_policy_loss(ratio: Tensor, advantage: Tensor, valid: Tensor, clip_coef: float) -> Tensor:
    """The clipped surrogate objective, equation (7), negated to be minimized: (M,) -> ()."""
    clipped_ratio = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    return -masked_mean(torch.min(ratio * advantage, clipped_ratio * advantage), valid)


def clipped_value_loss(
    value: Tensor, old_value: Tensor, returns: Tensor, valid: Tensor, clip_coef: float | None
) -> Tensor:
    """Half the mean squared error of the value; with clip_coef, the larger of clipped and unclipped, per row."""
    squared_error = (value - returns).square()
    if clip_coef is not None:
        clipped_value = old_value + (value - old_value).clamp(-clip_coef, clip_coef)
        squared_error = torch.max(squared_error, (clipped_value - returns).square())
    return 0.5 * masked_mean(squared_error, valid)


def clip(gradients: tuple[Tensor, ...], max_norm: float) -> tuple[Tensor, ...]:
    """The gradients, scaled by one common factor so that their global norm is at most `max_norm`."""
    norm = torch.cat([gradient.reshape(-1) for gradient in gradients]).norm()
    return torch._foreach_mul(gradients, (max_norm / (norm + 1e-6)).clamp(max=1))


def train(args: Args) -> Path:
    """Train from scratch or from a checkpoint to the end; return the run's folder. Invalid input: SystemExit(2)."""
    run = Run(args)
    args, device = run.args, run.device
    batch_size, num_iterations = rollout_sizes(args, args.num_envs)
    torch.set_num_threads(1)  # a second thread slows networks of this size down

    envs = Envs(args, run.env_seeds(args.num_envs))
    if not isinstance(envs.action_space, gym.spaces.Box) or envs.action_space.dtype.kind != "f":
        fail(f"{args.env_id} has actions {envs.action_space}; ppo takes Discrete actions, this script a Box of floats")
    low, high = envs.action_space.low.reshape(-1), envs.action_space.high.reshape(-1)
    agent = ActorCritic(envs.obs_dim, len(low)).to(device)
    optimizer = Adam(agent, args.learning_rate, eps=1e-5)
    obs_norm, reward_scale = RunningNorm((envs.obs_dim,)), RewardScale(args.num_envs, args.gamma)

    # One observation is too little work for a GPU or PyTorch: NumPy acts on the CPU. It reads the weights in place or,
    # if they are on a GPU, a copy of them. `check_policy` fails if its outputs differ from those of `forward`
    collector = copy_on_cpu(agent)
    policy = numpy_mlp(collector.actor)

    def acting_log_std() -> Tensor:
        """Log std of the action (A,), as `forward` returns it; it must be the same for all observations."""
        log_std = outputs_of(collector, torch.zeros(2, envs.obs_dim))[1].detach()
        return log_std[0] if log_std.ndim > 1 else log_std

    check_policy(policy, lambda obs: collector(obs)[0], collector, envs.obs_dim)
    check_policy(
        lambda obs: acting_log_std().expand(len(obs), -1), lambda obs: collector(obs)[1], collector, envs.obs_dim
    )

    @torch.no_grad()
    def estimate(obs: Tensor, action: Tensor, reward: Tensor, terminated: Tensor, truncated: Tensor, valid: Tensor):
        """Rollout, all (T, N, ...) except obs (T + 1, N, O) -> rows to learn from (B, ...), and explained variance."""
        mean, log_std, value = agent(obs.flatten(0, 1))
        value = value.view(-1, args.num_envs)
        log_prob = normal_log_prob(action.flatten(0, 1), mean[: -args.num_envs], log_std)
        advantage = gae(reward, value, terminated, truncated, valid, args.gamma, args.gae_lambda)
        returns = advantage + value[:-1]
        explained_variance = 1 - (masked_std(advantage, valid) / (masked_std(returns, valid) + 1e-8)).square()
        rows = (obs[:-1], action, value[:-1], advantage, returns, valid)
        return log_prob, *(x.flatten(0, 1) for x in rows), explained_variance

    def update_minibatch(index: Tensor, *batch: Tensor) -> Tensor:
        """One step of Adam on the rows `index` (M,) of the batch -> the values of `METRICS`."""
        old_log_prob, obs, action, old_value, advantage, returns, valid = (x[index] for x in batch)
        mean, log_std, value = agent(obs)
        log_ratio = normal_log_prob(action, mean, log_std) - old_log_prob
        ratio = log_ratio.exp()
        if args.norm_adv:
            advantage = (advantage - masked_mean(advantage, valid)) / (masked_std(advantage, valid) + 1e-8)
        policy_loss = clipped_policy_loss(ratio, advantage, valid, args.clip_coef)
        clip_value = args.clip_coef if args.clip_vloss else None
        value_loss = clipped_value_loss(value, old_value, returns, valid, clip_value)
        entropy = (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()
        loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy  # equation (9), to be minimized
        optimizer.step(clip(torch.autograd.grad(loss, optimizer.weights), args.max_grad_norm))
        old_approx_kl, approx_kl = masked_mean(-log_ratio, valid), masked_mean(ratio - 1 - log_ratio, valid)
        clipfrac = masked_mean(((ratio - 1).abs() > args.clip_coef).float(), valid)
        return torch.stack([policy_loss, value_loss, entropy, old_approx_kl, approx_kl, clipfrac]).detach()

    def update_epoch(permutation: Tensor, *batch: Tensor) -> Tensor:
        """One pass over the batch; each row of `permutation` (B / M, M) indexes a minibatch -> mean of `METRICS`."""
        return torch.stack([update_minibatch(index, *batch) for index in permutation]).mean(0)

    run.open(envs, agent=agent, optimizer=optimizer, obs_norm=obs_norm, reward_scale=reward_scale)
    statistics = EpisodeStatistics(args.num_envs)
    obs = np.zeros((args.num_steps + 1, args.num_envs, envs.obs_dim), dtype=np.float32)
    action = np.zeros((args.num_steps, args.num_envs, len(low)), dtype=np.float32)
    reward = np.zeros((args.num_steps, args.num_envs), dtype=np.float32)
    terminated, truncated, done = np.zeros((3, args.num_steps, args.num_envs), dtype=bool)
    raw_obs = envs.reset()
    obs_norm.update(raw_obs)
    for iteration in range(run.iteration, num_iterations):
        if args.anneal_lr:
            optimizer.learning_rate.fill_(args.learning_rate * (1 - iteration / num_iterations))

        # Collect. Values and log-probabilities are computed later, in one batch, with the same weights
        update_copy(agent, collector)
        noise = (torch.randn(action.shape) * acting_log_std().exp()).numpy()
        for t in range(args.num_steps):
            run.stop_if_asked()
            obs[t] = obs_norm(raw_obs)
            action[t] = policy(obs[t]) + noise[t]
            raw_obs, reward[t], terminated[t], truncated[t] = envs.step(action[t].clip(low, high))
            obs_norm.update(raw_obs)
        obs[-1] = obs_norm(raw_obs)
        # Fail if acting and learning policies differ, as when a change of yours was made to only one of them
        rows, drawn, last_noise = (x.reshape(-1, x.shape[-1]) for x in (obs[-3:-1], action[-2:], noise[-2:]))
        mean, *_ = outputs_of(agent, torch.from_numpy(rows).to(device))
        check_same(drawn, mean.cpu() + torch.from_numpy(last_noise), rows)
        done_before, done = done[-1:], terminated | truncated
        valid = ~np.concatenate([done_before, done[:-1]])  # the row after an episode's end is its reset
        run.episodes += statistics.update(reward, done, valid)
        run.step += int(valid.sum())

        # Estimate advantages
        rollout = (obs, action, reward_scale(reward, valid), terminated, truncated, valid)
        *batch, explained_variance = estimate(*(torch.from_numpy(x).to(device, torch.float32) for x in rollout))

        # Learn
        for _ in range(args.update_epochs):
            permutation = torch.randperm(batch_size, device=device).view(args.num_minibatches, -1)
            losses = update_epoch(permutation, *batch)
            if args.target_kl is not None and losses[METRICS.index("losses/approx_kl")] > args.target_kl:
                break

        # Log
        values = torch.stack([*losses, explained_variance, optimizer.learning_rate])
        run.iteration = iteration + 1
        run.log(named((*METRICS, "losses/explained_variance", "charts/learning_rate"), values))
    return run.close()


def load_policy(checkpoint: dict, envs: "Envs"):
    """The deterministic policy of a checkpoint, its statistics frozen: raw observation (N, O) -> action (N, A)."""
    agent, obs_norm = ActorCritic(envs.obs_dim, math.prod(envs.action_space.shape)), RunningNorm((envs.obs_dim,))
    agent.eval().load_state_dict(checkpoint["agent"])
    obs_norm.load_state_dict(checkpoint["obs_norm"])
    low, high = envs.action_space.low.reshape(-1), envs.action_space.high.reshape(-1)
    return torch.no_grad()(lambda obs: agent(torch.tensor(obs_norm(obs), dtype=torch.float))[0].numpy().clip(low, high))


# ---- Plumbing: what the algorithm is built on, nearly the same text in every script -------------------------------


class RunningNorm:
    """Mean and variance of all rows so far (Welford 1962, in float64): x (B, ...) -> (x - mean) / std, within +-10."""

    def __init__(self, shape: tuple[int, ...]):
        self.count, self.mean, self.squares = 0, np.zeros(shape), np.zeros(shape)

    def update(self, x: np.ndarray) -> None:
        self.count += len(x)
        delta = x - self.mean
        self.mean += delta.sum(0) / max(self.count, 1)  # 0 if all rows so far were resets
        # Of a number that never changes, rounding may leave less than 0
        self.squares = np.maximum(self.squares + (delta * (x - self.mean)).sum(0), 0)

    @property
    def std(self) -> np.ndarray:
        return np.sqrt(self.squares / max(self.count, 1) + 1e-8)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return ((x - self.mean) / self.std).clip(-10, 10)

    def state_dict(self) -> dict:
        return {"count": self.count, "mean": torch.tensor(self.mean), "squares": torch.tensor(self.squares)}

    def load_state_dict(self, state: dict) -> None:
        self.count, self.mean, self.squares = state["count"], state["mean"].numpy(), state["squares"].numpy()


class RewardScale(RunningNorm):
    """Divides rewards (T, N) by the standard deviation of all discounted returns so far; clips to +-10.

    The return continues from rollout to rollout and restarts with each episode, whether it terminated or was truncated.
    """

    def __init__(self, num_envs: int, gamma: float):
        super().__init__(())
        self.gamma, self.discounted_return = gamma, np.zeros(num_envs)

    def __call__(self, reward: np.ndarray, valid: np.ndarray) -> np.ndarray:
        # R[t] = reward[t] + gamma * R[t - 1] within an episode: a discounted sum in reversed time
        x = torch.from_numpy(np.vstack([self.discounted_return, reward])).flip(0)
        decay = torch.from_numpy(np.vstack([self.discounted_return, self.gamma * valid])).flip(0)
        discounted_returns = discounted_sum(x, decay).flip(0)[1:].numpy()
        self.discounted_return = discounted_returns[-1]
        self.update(discounted_returns[valid])
        return (reward / self.std).clip(-10, 10)


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


def is_plain(x) -> bool:
    """Whether x is None, a number, string or array, or a container of only these."""
    if isinstance(x, list | tuple | deque | set | dict):
        return all(map(is_plain, [*x, *x.values()] if isinstance(x, dict) else x))
    return isinstance(x, bool | int | float | str | np.generic | np.ndarray | None)


@torch.no_grad()
def copy_attributes(module: nn.Module, copy: nn.Module) -> nn.Module:
    """Give the acting copy what a `state_dict` leaves out: non-persistent buffers, and attributes of modules that are
    tensors or plain (see `is_plain`): numbers, strings, arrays, containers of these. Returns the copy.
    """
    device, internal = next(copy.parameters()).device, vars(nn.Module())
    for part, its_copy in zip(module.modules(), copy.modules(), strict=True):
        for name, x in vars(part).items():
            old = vars(its_copy).get(name)
            if isinstance(x, Tensor) and isinstance(old, Tensor) and (old.shape, old.device) == (x.shape, device):
                old.copy_(x)
            elif isinstance(x, Tensor):
                vars(its_copy)[name] = x.detach().to(device, copy=True)
            elif x is not old and name not in internal and is_plain(x):
                vars(its_copy)[name] = deepcopy(x)
    for x, its_copy in zip(module.buffers(), copy.buffers(), strict=True):
        its_copy.copy_(x)
    return copy


def copy_on_cpu(module: nn.Module) -> nn.Module:
    """What acts on the CPU: the module itself, if it learns there, else a copy, kept up to date by `update_copy`."""
    is_there = all(weight.device.type == "cpu" for weight in module.parameters())
    return module if is_there else copy_attributes(module, deepcopy(module).cpu())


def update_copy(module: nn.Module, copy: nn.Module) -> None:
    """Give the copy that acts all weights, in one transfer, and attributes, unless the copy is the module itself."""
    if copy is module:
        return
    state = module.state_dict()
    flat = torch.cat([x.reshape(-1) for x in state.values()]).to(next(copy.parameters()).device)
    parts = dict(zip(state, flat.split([x.numel() for x in state.values()]), strict=True))
    for name, x in copy.state_dict().items():
        x.copy_(parts[name].view_as(x))  # in place, where NumPy or a CUDA graph reads it
    copy_attributes(module, copy)


def numpy_mlp(net: nn.Sequential):
    """A network as a function of NumPy arrays (B, inputs) -> (B, outputs): 5 us for one row, where PyTorch takes 35.

    It shares the memory of the parameters, which must be on the CPU, so it follows in-place changes. Networks with
    layers that it does not know are left to PyTorch.
    """
    known = {nn.Tanh: np.tanh, nn.ReLU: partial(np.maximum, np.float32(0))}
    layers = list(net) if isinstance(net, nn.Sequential) else [net]
    linear, activations = layers[::2], [known.get(type(layer)) for layer in layers[1::2]]
    is_known = all(type(layer) is nn.Linear and layer.bias is not None for layer in linear) and None not in activations
    if not is_known or len(linear) != len(activations) + 1:
        return torch.no_grad()(lambda x: net(torch.from_numpy(x)).numpy())
    *hidden, (last_weight, last_bias) = [(x.weight.detach().numpy().T, x.bias.detach().numpy()) for x in linear]
    places, calls = [x.data_ptr() for x in net.parameters()], itertools.count()

    def forward(x: np.ndarray) -> np.ndarray:
        if next(calls) % 256 == 0 and [x.data_ptr() for x in net.parameters()] != places:
            fail("weights of the acting policy were replaced by other tensors: change them in place, with `copy_`")
        for (weight, bias), activation in zip(hidden, activations, strict=True):
            x = activation(x.dot(weight) + bias)  # of arrays this small, `@` takes half a microsecond more
        return x.dot(last_weight) + last_bias

    return forward


@torch.no_grad()
def outputs_of(module: nn.Module, *inputs: Tensor):
    """What a module computes, without the changes that it would make to its buffers, such as statistics."""
    buffers = {name: x.clone() for name, x in module.named_buffers()}
    return torch.func.functional_call(module, buffers, inputs)


def check_same(acted: np.ndarray | Tensor, learnt: Tensor, obs: np.ndarray, check: str = "check_same") -> None:
    """Fail unless acting and learning give the same outputs (B, ...), but for rounding, at observations (B, O)."""
    acted = torch.as_tensor(acted).detach().numpy()
    learnt = np.broadcast_to(learnt.detach().cpu().numpy(), acted.shape)
    masked = (acted < -1e7) & (learnt < -1e7)  # logits of actions that may not be taken
    acted, learnt = np.where(masked, 0, acted), np.where(masked, 0, learnt)
    largest = np.abs(np.nan_to_num(learnt)).reshape(len(obs), -1).max(axis=1)
    scale = 1 + largest + 0.01 * np.abs(obs).max(axis=1)  # of each row; large observations are rounded, too
    if not np.allclose(acted.T / scale, learnt.T / scale, rtol=0, atol=1e-3, equal_nan=True):
        hint = "`numpy_mlp` lacks a part of `forward`, such as a number that has changed; or `forward` is random "
        hint += "(Dropout), looks at a whole batch, or changes its buffers (`spectral_norm`); or actions have another "
        hint += "`log_prob`, or are changed after they are drawn. If both are right, as may be with another "
        hint += f"distribution or with observations unlike those tried, change `{check}` or leave it out"
        fail(f"the policy that acts differs from the one that learns: {hint}")


@torch.no_grad()
def check_policy(acting, learning, module: nn.Module, obs_dim: int) -> None:
    """Fail unless the acting policy, on arrays, and the learning one, on tensors, agree: both (B, O) -> (B, A).

    The test changes the module's weights and buffers: with the initial ones, outputs are so small that much passes for
    equal, and statistics have no effect. It changes tensors, arrays and floats that are attributes of your own modules
    or of their classes, too, as a schedule may do. It uses small observations and large ones, which `forward` may clip.
    """
    rng, generator = np.random.default_rng(1), torch.Generator().manual_seed(1)
    obs = (rng.normal(size=(64, obs_dim)) * np.logspace(-1, 2, 64)[:, None]).astype(np.float32)
    parts = [part for part in module.modules() if not type(part).__module__.startswith("torch.")]
    own = [ChainMap(vars(part), *map(vars, type(part).__mro__)) for part in parts]  # what is written goes to the object
    kept = [dict(vars(part)) for part in parts]
    kinds = float | np.generic | np.ndarray
    numbers = [(values, name, x) for values in own for name, x in values.items() if isinstance(x, kinds)]
    state = [x for values in own for x in values.values() if isinstance(x, Tensor) and x.is_contiguous()]
    state += [*module.parameters(), *module.buffers()]
    first = [x.clone() for x in state]
    for values, name, x in [part for part in numbers if np.asarray(part[2]).dtype.kind == "f"]:
        moved = np.where(np.abs(x) < 1, (x + 1) / 2, 1.5 * x)  # what is below 1, as a probability, stays below
        values[name] = moved.astype(x.dtype) if isinstance(x, np.ndarray) else type(x)(moved)
    for x in [x for x in state if x.is_floating_point()]:  # weights of either sign; buffers may be variances
        draw, inputs = (torch.randn if isinstance(x, nn.Parameter) else torch.rand), math.prod(x.shape[1:])
        x.add_((draw(x.shape, generator=generator) / max(1, inputs) ** 0.5).to(x.device, x.dtype))
    try:  # one row on its own, since layers may look at the whole batch
        acted, learnt = np.concatenate([acting(obs[:1]), acting(obs[1:])]), learning(torch.from_numpy(obs))
        sizes = acted.shape[1:], tuple(learnt.shape[1 - acted.ndim :])
        if sizes[0] and sizes[0] != sizes[1]:
            shapes = f"the policy that acts has outputs of shape {sizes[0]}, the one that learns"
            fail(f"{shapes} {tuple(learnt.shape[1:])}: does `forward` compute more? Then let the whole network act")
        if len(sizes[0]) > 1:
            fail(f"the policy that acts gives outputs of shape {sizes[0]} per observation: flatten them to (A,)")
        check_same(acted, learnt, obs, check="check_policy")  # which tries random observations
    except (ValueError, IndexError) as error:  # such as BatchNorm's for a single row
        hint = "; does `forward` do more than the layers that `numpy_mlp` has? Then let the whole network act"
        if isinstance(error, IndexError):
            hint = " (at random observations; if real ones are safe, leave out `check_policy`)"
        fail(f"the policy can't act: {error}{hint}")
    finally:
        torch._foreach_copy_(state, first)
        for part, attributes in zip(parts, kept, strict=True):
            vars(part).clear()
            vars(part).update(attributes)


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


def rollout_sizes(args: Args, num_envs: int) -> tuple[int, int]:
    """Rows per rollout, rollouts per run; SystemExit(2) for unequal minibatches or a run shorter than a rollout."""
    batch_size = num_envs * args.num_steps
    if batch_size % args.num_minibatches:
        fail(f"the {batch_size} rows of a rollout can't be divided into {args.num_minibatches} equal minibatches")
    if args.norm_adv and batch_size == args.num_minibatches:
        fail("minibatches have one row, whose normalized advantage is 0: lower --num-minibatches or --no-norm-adv")
    if args.total_timesteps < batch_size:
        fail(f"--total-timesteps {args.total_timesteps} is less than one rollout, {batch_size} steps")
    return batch_size, args.total_timesteps // batch_size


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
