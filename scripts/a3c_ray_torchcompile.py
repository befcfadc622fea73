# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0", "tensordict==0.15.3", "gymnasium[mujoco]==1.4.0", "envpool==1.2.5",
#     "tyro==1.0.17", "numpy==2.4.6", "tqdm==4.70.1", "tensorboard==2.21.0", "ray[default]==2.60.0",
# ]
# ///
"""A2C and A3C, advantage actor-critic whose runners compute gradients, on Ray: from one process to a cluster, compiled.

Mnih et al. (2016), "Asynchronous Methods for Deep Reinforcement Learning", https://arxiv.org/abs/1602.01783; this
is its algorithm S3. Network for frames: Mnih et al. (2015), "Human-level control through deep
reinforcement learning", https://doi.org/10.1038/nature14236.

    python a3c_ray_torchcompile.py --env-id CartPole-v1 --num-runners 2                        # A2C
    python a3c_ray_torchcompile.py --env-id CartPole-v1 --num-runners 2 --no-sync-gradients    # A3C
    python a3c_ray_torchcompile.py --ray-address auto --num-runners 64    # on a cluster (`ray start` on each node)

Its eager twin is `a3c_ray.py`; `./run.sh diff` shows what compiling changes.
Shapes: T = fragment_steps, V = envs_per_runner, O = size of an observation, A = number of actions, or size of an action
of a Box, P = number of parameters, B = any number of rows.

Each runner takes T steps in V environments and sends only the gradient. In A2C the learner (this process) waits for one
gradient from each runner, takes one step with their mean, and all continue with the same weights: reproducible. In A3C,
each gradient is applied when it arrives, although others have changed the weights since; no runner waits for another.
With --num-runners 0, everything runs in this process, without Ray; with one runner, A2C and A3C are the same.

Departures from the paper: Adam with a large epsilon, not RMSProp; means, not sums; clipped gradients; a smaller weight
of the value's loss; no LSTM; several environments for a runner; a truncated episode bootstraps from the value of its
last observation; an environment resets in the step after an episode's end, and this row is masked.

Reading order: settings, networks, formulas; `make_gradient`, `make_learner` and `Runner`, the parts; `train`, which
brings them together. Below the `# ----` line is only plumbing.
"""

import ast
import atexit
import contextlib
import copyreg
import difflib
import gc
import importlib.util
import io
import itertools
import json
import math
import multiprocessing
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
import weakref
import zlib
from collections import ChainMap, OrderedDict, defaultdict, deque
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from importlib.metadata import distributions, version
from multiprocessing import resource_tracker
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Literal, NoReturn

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's products here are small, and cores are scarce

import gymnasium as gym
import numpy as np
import torch
import tyro
from tensordict.nn import CudaGraphModule  # compile: makes a function one CUDA graph
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
    log_every: int = 10_000  # environment steps between two lines of the log
    tensorboard: bool = True  # write TensorBoard events beside metrics.jsonl
    track: bool = False  # send the TensorBoard events to Weights & Biases too
    wandb_project_name: str = "flatout"  # the Weights & Biases project
    wandb_entity: str | None = None  # the Weights & Biases team

    # environment
    env_id: str = "CartPole-v1"  # any id of Gymnasium (module:Env-v0 too) or EnvPool with Discrete or Box actions
    env_backend: Literal["auto", "envpool", "gymnasium"] = "auto"  # auto: mostly EnvPool if several envs (docs/ppo.md)
    async_envs: bool = False  # runners step Gymnasium environments in worker processes: pays if steps take milliseconds
    env_kwargs: str = "{}"  # arguments for the environment's constructor, as JSON: '{"key": value}'
    total_timesteps: int = 1_000_000  # environment steps in the whole run, rounded up to whole gradients
    clip_rewards: bool = False  # for learning, rewards are clipped to [-1, 1]; logged returns are not

    # Ray
    num_runners: int = 2  # processes that step environments; 0: this process steps them, without Ray
    envs_per_runner: int = 8  # environments of each runner
    cpus_per_runner: float = 1.0  # CPU cores that Ray reserves per runner; may be fractional
    gpus_per_runner: float = 0.0  # GPUs per runner; may be fractional; policies on frames then run there
    ray_address: str | None = None  # cluster to join: auto (the one on this machine) or HOST:PORT; default: start one
    runner_restarts: int = 50  # dead runners are replaced, at most this many times --num-runners; one more ends the run
    fragment_timeout: float = 300.0  # seconds until a silent runner is replaced; if all are silent, the run ends

    # A2C, A3C
    sync_gradients: bool = True  # A2C: one step with the mean gradient of all runners; else A3C: one step per gradient
    fragment_steps: int = 8  # steps of each environment in a fragment
    learning_rate: float = 1.5e-3  # of Adam
    adam_eps: float = 1e-3  # of Adam: a large one damps steps on gradients that are only noise
    anneal_lr: bool = True  # lower the learning rate linearly to zero
    gamma: float = 0.99  # discount factor
    ent_coef: float = 0.001  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # gradients with a larger norm are scaled down to this one

    # compile: two switches, so that the gain of each can be measured alone
    compile: bool = True  # fuse the operations of a runner's gradient, and of the learner's step, into a few kernels
    cudagraphs: bool = True  # on CUDA, replay the kernels of each of the two as one graph, in one launch

    # Not settings, but `RayRunners` and `start_ray` read these names
    num_learners, cpus_per_learner, gpus_per_learner = 1, 1.0, 0.0

    @property
    def rollout(self) -> str:
        """A2C asks each runner for one gradient, and waits for all; A3C takes the first that comes."""
        return "batched" if self.sync_gradients else "first"

    # Not settings, but `Envs` reads them. EnvPool's threads: cores here per runner, at least --cpus-per-runner
    sync_envs = property(lambda args: not args.async_envs)
    env_threads = property(lambda args: max(1, int(args.cpus_per_runner), num_cores() // max(1, args.num_runners)))


METRICS = "losses/policy_loss", "losses/value_loss", "losses/entropy"
# Smallest and largest value of a setting; for settings not listed, integers are at least 1, floats at least 0
LIMITS = {"seed": (0, 2**63 - 1), "gamma": (0, 1), "num_runners": (0, math.inf), "runner_restarts": (0, math.inf)}
LIMITS |= {"max_grad_norm": (1e-9, math.inf)}  # with 0, nothing would be learnt
# What --override may change when a run is resumed
CHANGEABLE = "learning_rate", "gamma", "ent_coef", "vf_coef", "max_grad_norm", "num_runners"


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


def space_to_depth(frames: Tensor) -> Tensor:
    """Make one pixel of 16 channels from each block of 4 x 4 pixels: (B, F, 84, 84) -> (B, 21, 21, 16 * F)."""
    unit = torch.uint8 if torch.compiler.is_compiling() else torch.int32  # PyTorch 2.11 can't compile int32 here
    lines = frames.view(unit).view(len(frames), -1, 21, 4, 21, 4 // unit.itemsize)  # of int32, 4 bytes at a time
    return lines.permute(0, 2, 4, 1, 3, 5).contiguous().view(torch.uint8).flatten(3)


class Frames(nn.Module):
    """The Nature CNN without its output: F frames of 84 x 84 bytes, (B, F * 7056) -> (B, 512)."""

    def __init__(self, num_frames: int):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(16 * num_frames, 32, 2), nn.Conv2d(32, 64, 4, stride=2)
        self.conv3, self.hidden = nn.Conv2d(64, 64, 3), nn.Linear(7 * 7 * 64, 512)
        for layer in self.children():
            nn.init.orthogonal_(layer.weight, math.sqrt(2))
            nn.init.zeros_(layer.bias)
        self.to(memory_format=torch.channels_last)

    def forward(self, obs: Tensor) -> Tensor:
        # With 4 x 4 pixel blocks as channels, an 8 x 8 kernel of stride 4 becomes 2 x 2: an update takes half the time
        x = space_to_depth(obs.view(len(obs), -1, 84, 84)).permute(0, 3, 1, 2).float()
        x = self.conv1._conv_forward(x, self.conv1.weight / 255, self.conv1.bias).relu()  # pixels from 0 to 1
        x = self.conv3(self.conv2(x).relu()).relu()
        return self.hidden(x.permute(0, 2, 3, 1).flatten(1)).relu()


def normal_log_prob(action: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Log-density of actions (..., A) under a normal distribution with diagonal covariance -> (...)."""
    z = (action - mean) * torch.exp(-log_std)
    return (-0.5 * z.square() - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)


class ActorCritic(nn.Module):
    """Policy and value: observation (B, O) -> parameters of the policy (B, A), value (B,).

    These are logits for a categorical policy, means for a Gaussian one. Stacks of frames go through a shared CNN.
    """

    def __init__(self, observation_space: gym.Space, action_space: gym.Space):
        super().__init__()
        self.is_discrete = isinstance(action_space, gym.spaces.Discrete)
        self.outputs = int(action_space.n) if self.is_discrete else math.prod(action_space.shape)
        self.action_space, self.sees_frames = action_space, sees_frames(observation_space)
        if self.sees_frames:
            self.features = Frames(observation_space.shape[0])
            self.actor, self.critic = nn.Linear(512, self.outputs), nn.Linear(512, 1)
            for layer, gain in ((self.actor, 0.01), (self.critic, 1.0)):
                nn.init.orthogonal_(layer.weight, gain)
                nn.init.zeros_(layer.bias)
        else:
            inputs = gym.spaces.flatdim(observation_space)
            self.features = nn.Identity()
            self.actor, self.critic = mlp(inputs, self.outputs, output_gain=0.01), mlp(inputs, 1, output_gain=1.0)
        if not self.is_discrete:
            self.log_std = nn.Parameter(torch.zeros(self.outputs))

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        features = self.features(obs)
        return self.actor(features), self.critic(features).squeeze(1)

    def log_prob(self, output: Tensor, action: Tensor) -> Tensor:
        """Log-probability of actions, given the actor's output (..., A) -> (...)."""
        if self.is_discrete:
            return output.log_softmax(-1).gather(-1, action.long().unsqueeze(-1)).squeeze(-1)
        return normal_log_prob(action, output, self.log_std)

    def entropy(self, output: Tensor) -> Tensor:
        """Entropy of the policy, given the actor's output (..., A) -> (...)."""
        if self.is_discrete:
            log_probs = output.log_softmax(-1)
            return -(log_probs.exp() * log_probs).sum(-1)
        return (self.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum().expand(output.shape[:-1])

    def to_env(self, action: np.ndarray) -> np.ndarray:
        """Actions (B,) or (B, A) as environments take them."""
        space = self.action_space
        return space.start + action if self.is_discrete else action.clip(space.low.ravel(), space.high.ravel())

    def noise(self, rng: np.random.Generator, *shape: int) -> np.ndarray:
        """Noise (*shape, A) to add to the actor's output: the sum, or for logits its argmax, is a sampled action."""
        if self.is_discrete:
            return rng.gumbel(size=(*shape, self.outputs)).astype(np.float32)
        return rng.standard_normal((*shape, self.outputs), dtype=np.float32) * self.log_std.detach().exp().cpu().numpy()


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


def n_step_advantage(
    reward: Tensor, value: Tensor, terminated: Tensor, truncated: Tensor, valid: Tensor, gamma: float
) -> Tensor:
    """All (T, V), but value (T + 1, V) -> (T, V): r[t] + gamma r[t + 1] + ... + gamma ** n value[t + n] - value[t].

    The sum runs to the last row or the episode's end; there, value[t + n] is that of its true last observation, from
    which a truncated episode bootstraps. Invalid rows (resets) get zero.
    """
    delta = (reward + gamma * (1 - terminated) * value[1:] - value[:-1]) * valid
    return discounted_sum(delta, gamma * (1 - torch.maximum(terminated, truncated)) * valid)


def clip(gradients: tuple[Tensor, ...], max_norm: float) -> tuple[Tensor, ...]:
    """The gradients, scaled by one common factor so that their global norm is at most `max_norm`."""
    norm = torch.cat([gradient.reshape(-1) for gradient in gradients]).norm()
    return torch._foreach_mul(gradients, (max_norm / (norm + 1e-6)).clamp(max=1))


def make_gradient(args: Args, observation_space: gym.Space, action_space: gym.Space, device: torch.device):
    """What a runner needs: network, `gradient`. Only the learner has an optimizer."""
    agent = ActorCritic(observation_space, action_space).to(device)
    weights = [weight for weight in agent.parameters() if weight.requires_grad]

    def gradient(obs: Tensor, action: Tensor, rows: Tensor) -> Tensor:
        """One vector of sums over rows: number of valid rows, gradient of the loss (P,), METRICS. They can be added.

        From obs (T + 1, V, O), action (T, V[, A]), rows (T, V, 4): reward, terminated, truncated, valid.
        """
        reward, terminated, truncated, valid = rows.unbind(2)
        if args.clip_rewards:
            reward = reward.clamp(-1, 1)
        output, value = agent(obs.flatten(0, 1))
        output, value = output.view(*obs.shape[:2], -1)[:-1], value.view(obs.shape[:2])
        advantage = n_step_advantage(reward, value.detach(), terminated, truncated, valid, args.gamma)
        policy_loss = -(agent.log_prob(output, action) * advantage).sum()
        # The target is the n-step return: advantage + value, held fixed
        value_loss = 0.5 * ((value[:-1] - value[:-1].detach() - advantage).square() * valid).sum()
        entropy = (agent.entropy(output) * valid).sum()
        loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy
        gradients = torch.autograd.grad(loss, weights)
        metrics = torch.stack([policy_loss, value_loss, entropy]).detach()
        return torch.cat([x.reshape(-1) for x in (valid.sum(), *gradients, metrics)])

    # compile: the name stays, so its caller is unchanged. It becomes a CUDA graph, too: its first two calls run
    # normally, the third records, later calls replay
    if args.compile:
        (gradient,) = compiled(device, gradient)
    if args.cudagraphs and device.type == "cuda":
        gradient = CudaGraphModule(gradient, warmup=3)
    # compile: compiled code and graphs keep the numbers they read. If one changes, the run ends, even with --no-compile
    return agent, refuse_changes(gradient)


def make_learner(args: Args, observation_space: gym.Space, action_space: gym.Space, device: torch.device):
    """What the learner needs: network, optimizer, `descend`."""
    agent = ActorCritic(observation_space, action_space).to(device)
    optimizer = Adam(agent, args.learning_rate, eps=args.adam_eps)
    num_weights = sum(optimizer.sizes)

    def descend(sums: Tensor) -> Tensor:
        """One step of Adam with such sums from one or more runners -> the means of the METRICS."""
        means = sums[1:] / sums[0].clamp(min=1)
        parts = zip(means[:num_weights].split(optimizer.sizes), optimizer.weights, strict=True)
        optimizer.step(clip([x.view_as(weight) for x, weight in parts], args.max_grad_norm))
        return means[num_weights:]

    # compile: the learner's half, in the same three ways
    if args.compile:
        (descend,) = compiled(device, descend)
    if args.cudagraphs and device.type == "cuda":
        descend = CudaGraphModule(descend, warmup=3)
    return agent, optimizer, refuse_changes(descend)


class Runner:
    """The paper's actor-learner: V environments and a copy of the network; it computes gradients of its own data."""

    def __init__(self, args: Args, seeds: list[int]):
        self.args, self.envs = args, open_envs(args, seeds)
        on_frames = sees_frames(self.envs.observation_space)
        self.device = torch.device("cuda" if args.gpus_per_runner and on_frames else "cpu")
        spaces = self.envs.observation_space, self.envs.action_space
        self.agent, self.gradient = make_gradient(args, *spaces, self.device)
        check_layers(self.agent)
        if on_frames:
            self.obs_type = np.uint8
            self.policy = lambda obs: self.agent(torch.from_numpy(obs).to(self.device))[0].cpu().numpy()
            check_rows(self.policy, self.envs.observation_space)
        else:  # a few vectors are too little work for PyTorch
            self.obs_type, self.policy = np.float32, numpy_mlp(self.agent.actor)
            check_policy(self.policy, lambda obs: self.agent(obs)[0], self.agent, self.envs.obs_dim)
        check_density(self.agent)
        self.rng = np.random.default_rng([*seeds, 1])  # with a 1: a lone environment may draw from its seed alone
        self.statistics, self.clock = EpisodeStatistics(len(seeds)), Clock()
        self.obs, self.done = self.envs.reset(), np.zeros((1, len(seeds)), dtype=bool)

    def sample(self, version: int, weights: np.ndarray) -> tuple[dict, np.ndarray]:
        """T steps with one version of weights (P,) -> a report for the log, and what `gradient` returns."""
        self.clock.lap("runners_waiting")
        set_weights(self.agent, weights)
        self.clock.lap("weights")
        shape, is_discrete = (self.args.fragment_steps, len(self.obs)), self.agent.is_discrete
        obs = np.empty((shape[0] + 1, *self.obs.shape), dtype=self.obs_type)
        noise = self.agent.noise(self.rng, *shape)
        action = np.empty(shape, dtype=np.int64) if is_discrete else np.empty_like(noise)
        reward, spent, (terminated, truncated) = np.empty(shape), np.empty(shape[0]), np.empty((2, *shape), dtype=bool)
        obs[0] = self.obs
        for t in range(shape[0]):
            with torch.no_grad():
                sample = self.policy(obs[t]) + noise[t]
            action[t] = sample.argmax(1) if is_discrete else sample
            self.clock.lap("inference")
            obs[t + 1], reward[t], terminated[t], truncated[t] = self.envs.step(self.agent.to_env(action[t]))
            spent[t] = self.clock.lap("env_step")
        done_before, self.obs, self.done = self.done[-1:], obs[-1], terminated | truncated
        valid = ~np.concatenate([done_before, self.done[:-1]])  # the row after an episode's end is its reset
        episodes = self.statistics.update(reward, self.done, valid)
        rows = np.stack([reward, terminated, truncated, valid], axis=2).astype(np.float32)
        self.clock.move("env_step", "env_reset", time_of_resets(spent, ~valid))
        self.clock.lap("inference")
        vector = self.gradient(*(torch.from_numpy(x).to(self.device) for x in (obs, action, rows))).cpu().numpy()
        self.clock.lap("learning")
        report = {"version": version, "steps": int(valid.sum()), "episodes": episodes}
        return report | {"infos": take(self.envs.infos), "seconds": take(self.clock.seconds)}, vector


def train(args: Args) -> Path:
    """Train from scratch or from a checkpoint to the end; return the run's folder. Invalid input: SystemExit(2)."""
    run = Run(args)
    args, device = run.args, run.device
    runners = GradientRunners(args, run) if args.num_runners else OneRunner(args, run)
    agent, optimizer, descend = make_learner(args, *runners.spaces, device)
    torch.set_num_threads(num_cores() if agent.sees_frames else 1)  # a second thread slows small networks down
    run.open(runners, agent=agent, optimizer=optimizer)
    runners.publish(run.num_updates, get_weights(agent))
    while run.goes_on():
        if args.anneal_lr:
            optimizer.learning_rate.fill_(args.learning_rate * max(0.0, 1 - run.step / args.total_timesteps))

        # Collect. A2C: one gradient per runner; runners wait for the next weights. A3C: the first gradient to arrive
        _reports, gradients = runners.collect(max(1, args.num_runners) if args.sync_gradients else 1, 1)

        # Learn. The mean over all rows, as if one runner had collected them all
        losses = descend(torch.from_numpy(sum(gradients)).to(device))
        run.num_updates += 1
        runners.publish(run.num_updates, get_weights(agent))

        # Log
        if run.is_due():
            metrics = named(METRICS, losses) | runners.metrics()
            run.log(metrics | {"charts/learning_rate": float(optimizer.learning_rate)})
    return run.close()


def load_policy(checkpoint: dict, envs: "Envs"):
    """The deterministic policy of a checkpoint: observation (N, O) -> the most probable action (N,), or (N, A)."""
    agent = ActorCritic(envs.observation_space, envs.action_space)
    agent.eval().load_state_dict(checkpoint["agent"])

    @torch.no_grad()
    def policy(obs: np.ndarray) -> np.ndarray:
        output = agent(torch.from_numpy(obs if agent.sees_frames else obs.astype(np.float32)))[0].numpy()
        return agent.to_env(output.argmax(1) if agent.is_discrete else output)

    return policy


# ---- Plumbing: what the algorithm is built on, nearly the same text in every script -------------------------------


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


class Folders(tuple):
    """Where Python's library and packages lie. Sent to another process, it becomes that process's own."""

    def __reduce__(self):
        return find_libraries, ()


def find_libraries() -> Folders:
    """Folders of Python and of installed packages, which are libraries, but for one that this file lies in."""
    here = os.path.abspath(__file__)
    packages = [x for x in sys.path if any(Path(x).glob("*.dist-info")) and not here.startswith(x)]
    return Folders([os.path.dirname(os.__file__), *packages])


LIBRARIES = find_libraries()


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


def check_density(agent: nn.Module) -> None:
    """Fail unless `log_prob` is the density of the actions that are drawn: the actor's output (B, A) plus `noise`.

    Of noise that is Gumbel's or normal, times a scale; any other is not checked.
    """
    device = next(agent.parameters()).device
    ones = SimpleNamespace(gumbel=lambda size: np.ones(size), standard_normal=lambda size, dtype: np.ones(size, dtype))

    def drawn(output: np.ndarray) -> Tensor:
        scale, output = torch.from_numpy(agent.noise(ones, len(output))), torch.from_numpy(output)
        if agent.is_discrete:
            return (output / scale).log_softmax(1)[:, 0]
        return normal_log_prob(torch.zeros_like(output), output, scale.log())

    def learnt(output: Tensor) -> Tensor:
        output = output.to(device)
        return agent.log_prob(output, torch.zeros_like(output[:, 0] if agent.is_discrete else output)).cpu()

    with contextlib.suppress(AttributeError, TypeError):  # noise that draws otherwise
        if agent.noise(np.random.default_rng(1), 1).shape[-1] == agent.outputs:  # else one of these may be a scale
            check_policy(drawn, learnt, agent, agent.outputs)


def fail(message: str) -> NoReturn:
    """Report invalid input in one line and end with exit code 2."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


def say(text: str) -> None:
    """Print a text above the progress bar, if the terminal is still there."""
    with contextlib.suppress(OSError):
        tqdm.write(text, file=sys.stderr)


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


def check_layers(module: nn.Module) -> None:
    """Refuse buffers, and layers that may compute differently on acting batches and on learning batches."""
    kinds = nn.modules.batchnorm._BatchNorm | nn.modules.dropout._DropoutNd
    found = [f"layer `{name}`, {layer}" for name, layer in module.named_modules() if isinstance(layer, kinds)]
    found += [f"buffer `{name}`" for name, _ in module.named_buffers()]
    if found:
        fail(f"{found[0]}: it may compute otherwise in the policy that acts; LayerNorm and parameters work")


@torch.no_grad()
def check_rows(policy, space: gym.Space) -> None:
    """Fail unless a policy for frames gives each observation alone what it gives it among others."""
    frames = np.random.default_rng(0).integers(0, 256, (4, *space.shape), dtype=np.uint8)
    together, alone = policy(frames), np.concatenate([policy(one) for one in np.split(frames, len(frames))])
    if not np.allclose(together, alone, rtol=0, atol=0.01 * np.abs(together).max()):
        fail("the policy that acts differs from the one that learns: `forward` is random, or looks at a whole batch")


def sees_frames(space: gym.Space) -> bool:
    """Whether observations are stacks of frames of 84 x 84 bytes, as EnvPool's Atari games give them."""
    return isinstance(space, gym.spaces.Box) and space.dtype == np.uint8 and space.shape[1:] == (84, 84)


def check_chosen(action: np.ndarray, space: gym.Space) -> None:
    """ValueError for an action that a Discrete space does not have; EnvPool would read memory that is not its own."""
    is_discrete = isinstance(space, gym.spaces.Discrete)
    if is_discrete and (action.min() < space.start or action.max() >= space.start + space.n):
        wrong = action.min() if action.min() < space.start else action.max()
        raise ValueError(f"action {wrong} for a space {space}: does the network have one output per action?")


def warn_of_pixels(space: gym.Space, obs_dim: int) -> None:
    if space.dtype == np.uint8 and obs_dim > 1000 and not sees_frames(space):
        print("note: these pixels go into an MLP; only EnvPool's frames go into convolutions", file=sys.stderr)


def check_actions(args: Args, space: gym.Space) -> None:
    if not isinstance(space, gym.spaces.Discrete) and (space.dtype is None or space.dtype.kind != "f"):
        fail(f"{args.env_id} has actions {space}; this script takes Discrete or float actions")


def open_envs(args: Args, seeds: list[int]) -> Envs:
    """The environments of a runner, by the backend that is faster for so many."""
    in_process = runs_in_process(replace(args, async_envs=True), len(seeds))
    backend = choose_backend(args.env_id, args.env_backend, in_process or args.async_envs)
    envs = Envs(replace(args, env_backend=backend), seeds)
    check_actions(args, envs.action_space)
    if vars(args).get("norm_obs") and sees_frames(envs.observation_space):
        fail("--norm-obs is for vectors; frames are divided by 255 as they are")
    return envs


def is_plain(x) -> bool:
    """Whether x is None, a number, string or array, or a container of only these."""
    if isinstance(x, list | tuple | deque | set | dict):
        return all(map(is_plain, [*x, *x.values()] if isinstance(x, dict) else x))
    return isinstance(x, bool | int | float | str | np.generic | np.ndarray | None)


def is_state(x) -> bool:
    """Whether something is plain, or a tensor but no weight, or a container of nothing else."""
    if isinstance(x, list | tuple | deque | dict):
        return all(map(is_state, x.values() if isinstance(x, dict) else x))
    return is_plain(x) or (isinstance(x, Tensor) and not isinstance(x, nn.Parameter))


def numbers_in_dict(name: str, values, in_containers: bool = False) -> dict[str, tuple]:
    """What is plain, or a tensor but no weight, in a dictionary of names: name -> (dictionary, key).

    Containers of tensors are left out, unless `in_containers`: optimizers have lists of their own.
    """
    internal = vars(nn.Module())
    items = [(key, x) for key, x in values.items() if key[:2] != "__" and key not in internal]
    kept = [key for key, x in items if (is_state if in_containers or isinstance(x, Tensor) else is_plain)(x)]
    return {f"{name}.{key}".lstrip("."): (values, key) for key in kept}


def is_users(x) -> bool:
    """Whether a class, function, object or module is of this file, or of another one of yours: not of a package."""
    module = x if isinstance(x, ModuleType) else sys.modules.get(getattr(x, "__module__", None))
    file, own = getattr(module, "__file__", None) or "-packages", getattr(module, "__name__", None) == __name__
    return own or not ("-packages" in file or file.startswith(os.path.dirname(os.__file__)))


def named_globals(parts: list) -> dict[str, tuple]:
    """Global numbers and containers in the code of these classes and functions, and of what they call, by name.

    Among them are numbers of your own modules, and those that are attributes of your classes and objects, or of
    namespaces, which may lie in each other and in containers.
    """
    found, seen = {}, set()

    def look(name: str, values: dict, key: str, names: set[str]) -> None:
        """Note a number, or a container of numbers; look into what belongs to it, or will be called."""
        if (id(values), key) in seen:
            return
        seen.add((id(values), key))
        x = values[key]
        if is_users(x) and (isinstance(x, type) or hasattr(x, "__code__")):
            parts.extend([] if any(x is part for part in parts) else [x])
        elif isinstance(x, ModuleType):
            for part in sorted(vars(x).keys() & names) if is_users(x) else ():
                look(f"{name}.{part}", vars(x), part, names)
        elif numbers_in_dict("", {key: x}, in_containers=True):
            found[name] = values, key
        else:
            look_inside(name, x)

    def look_inside(name: str, x) -> None:
        if isinstance(x, dict | list | tuple):
            for key, part in x.items() if isinstance(x, dict) else enumerate(x):
                look_inside(f"{name}[{key!r}]", part)
        elif isinstance(x, SimpleNamespace) or (is_users(x) and hasattr(x, "__dict__")):
            parts.extend([] if isinstance(x, SimpleNamespace) or type(x) in parts else [type(x)])
            for key in list(vars(x)):
                look(f"{name}.{key}", vars(x), key, set())

    for part in parts:  # grows
        kinds = [x for x in getattr(part, "__mro__", ()) if is_users(x)]
        for kind in kinds:
            found |= numbers_in_dict(kind.__name__, vars(kind))
        methods = [x for kind in kinds for x in vars(kind).values()]
        functions = [part, *(getattr(x, "__func__", getattr(x, "fget", x)) for x in methods)]
        functions += [vars(x)["__wrapped__"] for x in functions if "__wrapped__" in getattr(x, "__dict__", {})]
        functions = [x for x in functions if hasattr(x, "__code__") and is_users(x)]
        for function in functions:
            codes = [function.__code__]
            for code in codes:  # grows by the code of nested functions
                codes += [x for x in code.co_consts if hasattr(x, "co_names")]
            names = {name for code in codes for name in code.co_names}
            source = function.__globals__
            for name in sorted(source.keys() & names):
                look(name if source is globals() else f"{source['__name__']}.{name}", source, name, names)
    return found


def globals_beside(entry) -> dict[str, tuple]:
    """Global numbers of the user's module that holds an environment's entry point, by name."""
    source = entry.partition(":")[0] if isinstance(entry, str) else getattr(entry, "__module__", None)
    module = sys.modules.get(source)
    if source == __name__ or not is_users(module):  # a library's may change
        return {}
    values = vars(module)
    keys = [key for key, x in values.items() if isinstance(x, bool | int | float) and key[:1] != "_"]
    return {f"{source}.{key}": (values, key) for key in keys}


def text_of(x) -> str:
    """A text that is another one whenever a number is; of many numbers it has a checksum."""
    x = x.detach().double().cpu().numpy() if hasattr(x, "detach") else x
    if isinstance(x, dict):
        return "{" + ", ".join(f"{key!r}: {text_of(part)}" for key, part in x.items()) + "}"
    if isinstance(x, list | tuple | deque):
        return "[" + ", ".join(map(text_of, x)) + "]"
    if not isinstance(x, np.ndarray):
        return repr(x)
    return repr(x.tolist()) if x.size < 10 else f"{x.size} numbers with checksum {zlib.crc32(np.ascontiguousarray(x))}"


def get_weights(module: nn.Module) -> np.ndarray:
    """All weights as one vector (P,), which is what goes to runners; SystemExit(2) if another number has changed.

    Those are the numbers that are attributes of the module, of its layers, of their classes, or of objects in them.
    """
    if "first_numbers" not in vars(module):
        found, parts = [], [*module.named_modules()]
        for name, part in parts:  # grows
            own = [x for x in type(part).__mro__ if not x.__module__.startswith(("torch.", "builtins"))]
            values = ChainMap(vars(part), *map(vars, own))  # an object's own attribute wins, even one that comes later
            names = [(key, where) for key, (_, where) in numbers_in_dict(name, values, in_containers=True).items()]
            found += [(key, part, where, getattr(part, where)) for key, where in names]
            objects = [(key, x) for key, x in vars(part).items() if is_users(x) or isinstance(x, SimpleNamespace)]
            objects = [(key, x) for key, x in objects if hasattr(x, "__dict__") and not isinstance(x, ModuleType)]
            objects = [(key, x) for key, x in objects if all(x is not y for _, y in parts)]
            parts += [(f"{name}.{key}".lstrip("."), x) for key, x in objects]
        # Not those that are empty at the start: caches, as is a tensor where there was None
        found = [where for where in found if not isinstance(where[-1], list | deque | dict | set) or where[-1]]
        vars(module)["first_numbers"] = [(*where, text_of(where[-1])) for where in found]
    for name, part, key, first, text in module.first_numbers:
        x = getattr(part, key, None)
        is_same = x is first and isinstance(x, bool | int | float | str | None)  # others may change in place
        is_cache = first is None and isinstance(x, Tensor)
        if not is_same and not is_cache and (now := text_of(x)) != text:
            hint = "make it a parameter, with `requires_grad=False` if it shall not learn; if nothing reads it, "
            hint += "leave it out of `__init__`"
            fail(f"`{name}` of the network was {text} at the start and is {now}, and runners get only weights: {hint}")
    return torch.cat([weight.detach().reshape(-1) for weight in module.parameters()]).cpu().numpy()


@torch.no_grad()
def set_weights(module: nn.Module, vector: np.ndarray) -> None:
    weights = list(module.parameters())
    parts = torch.tensor(vector, device=weights[0].device).split([weight.numel() for weight in weights])
    torch._foreach_copy_(weights, [part.view(weight.shape) for part, weight in zip(parts, weights, strict=True)])


class Clock:
    """Records where time goes: each lap adds the seconds since the previous one to a name, and returns them.

    What comes before the end of the first lap, such as the start of Ray, is not counted.
    """

    def __init__(self):
        self.seconds, self.last = defaultdict(float), None

    def lap(self, name: str) -> float:
        now = time.perf_counter()
        spent, self.last = now - (self.last or now), now
        self.seconds[name] += spent
        return spent

    def move(self, source: str, target: str, seconds: float) -> None:
        self.seconds[source] -= seconds
        self.seconds[target] += seconds


def take(counts: dict) -> dict:
    """Return the contents of a dictionary and empty it."""
    return {name: counts.pop(name) for name in list(counts)}


def time_of_resets(spent: np.ndarray, is_reset: np.ndarray) -> float:
    """Seconds per step (T,), resets (T, V) -> total extra time of steps with a reset over the mean of the others."""
    has_reset = is_reset.any(1)
    if not has_reset.any() or has_reset.all():
        return 0.0
    return float(np.clip(spent[has_reset] - spent[~has_reset].mean(), 0, None).sum())


class Runners:
    """The learner's interface to its runners, wherever they are."""

    SHARES = ("env_step", "env_reset", "inference", "runners_waiting", "learner_waiting", "learning", "weights")

    def __init__(self, args: Args, run: "Run"):
        self.args, self.run = args, run
        self.infos, self.stop = defaultdict(list), fail  # `Run.open` puts a gentler way to stop here
        self.seeds = run.env_seeds(max(1, args.num_runners) * args.envs_per_runner)
        self.clock, self.seconds, self.staleness, self.queue = Clock(), defaultdict(float), [], []
        self.alive, self.restarts, self.late = set(), 0, 0

    def note(self, report: dict) -> None:
        """Count a fragment that is learnt from."""
        self.run.step += report["steps"]
        self.staleness.append(self.run.num_updates - report["version"])
        self.note_anyway(report)

    def note_anyway(self, report: dict) -> None:
        """Count what is true of late fragments, too: episodes that ended, where time went."""
        self.run.episodes += report["episodes"]
        for name, seconds in report["seconds"].items():
            self.seconds[name] += seconds
        for name, values in report["infos"].items():
            self.infos[name] += values

    def metrics(self) -> dict[str, float]:
        """Metrics since the last log line. The shares of time, of the runners and of this process, sum to 100 %."""
        for name, seconds in take(self.clock.seconds).items():
            self.seconds[name] += seconds
        total, seconds = sum(self.seconds.values()), take(self.seconds)
        shares = {f"time/{name}": 100 * seconds.get(name, 0.0) / total for name in self.SHARES}
        counts = {"alive": len(self.alive), "restarts": self.restarts, "late": self.late}
        counts["queue"] = float(np.mean(self.queue))
        staleness = {"staleness": float(np.mean(self.staleness)), "staleness_max": max(self.staleness)}
        self.queue, self.staleness = [], []
        updates = {"charts/updates": self.run.num_updates}
        return updates | {f"runners/{name}": x for name, x in (counts | staleness).items()} | shares


class OneRunner(Runners):
    """The only runner, in this process: fragments and updates follow each other."""

    def __init__(self, args: Args, run: "Run"):
        super().__init__(args, run)
        needs_ray = {"num-learners": args.num_learners > 1, "ray-address": args.ray_address is not None}
        needs_ray["rollout"] = getattr(args, "rollout", None) == "first-ready"
        for name in [name for name, is_given in needs_ray.items() if is_given]:
            fail(f"--{name} {getattr(args, name.replace('-', '_'))} needs --num-runners 1 or more")
        if args.gpus_per_runner and not torch.cuda.is_available():
            fail(f"--gpus-per-runner {args.gpus_per_runner:g}: this machine has no GPU")
        self.runner, self.alive = Runner(args, self.seeds), {0}
        self.envs, self.clock = self.runner.envs, self.runner.clock  # one clock, as neither waits for the other
        self.spaces = self.envs.observation_space, self.envs.action_space
        self.backend, self.summary, self.close = self.envs.backend, self.envs.summary, self.envs.close
        stepper = getattr(self.runner, "turns", self.envs)  # what all steps go through
        step = stepper.step

        def stoppable(*arguments):
            run.stop_if_asked()  # within a fragment, which may take minutes
            return step(*arguments)

        stepper.step = stoppable

    def publish(self, *weights) -> None:
        self.weights = weights

    def collect(self, batch_fragments: int, _num_learners: int) -> tuple[tuple, tuple]:
        self.clock.lap("learning")
        self.envs.stop, found = self.stop, []
        for _ in range(batch_fragments):
            self.run.stop_if_asked()
            found.append(self.runner.sample(*self.weights))
        for report, _ in found:
            self.note(report)
        self.queue.append(0)
        return tuple(zip(*found, strict=True))


def places(machine: dict[str, float], kind: str, need: float) -> float:
    """How many processes a machine has CPUs or GPUs for. A part of a GPU is a part of one of them."""
    if need == 0:
        return math.inf
    has = machine.get(kind, 0)
    return int(has) * int(1 / need + 1e-9) if kind == "GPU" and need < 1 else int(has / need + 1e-9)


@contextlib.contextmanager
def ending_early():
    """In this context, a signal ends the program with one line, and not in tracebacks of Ray's."""
    asked = []

    def interrupt(signum: int, _frame) -> NoReturn:
        asked.append(signum)
        raise KeyboardInterrupt  # Ray's calls let no other exception pass

    handlers = {signum: signal.signal(signum, interrupt) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
        if asked:  # and Python has swallowed the exception, as it does in destructors
            raise KeyboardInterrupt
    except (KeyboardInterrupt, SystemExit) as error:
        if not asked and getattr(error, "code", None) != signal.SIGTERM:  # as by Ray's own handler while it starts
            raise
        print("stopped before the run began", file=sys.stderr)
        sys.exit(128 + (asked or [signal.SIGTERM])[0])
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


def start_ray(args: Args):
    """Join the cluster of --ray-address, or start Ray on this machine -> its module; SystemExit(2) where that fails."""
    # No usage report to Ray, no GPUs hidden from processes that reserve none, no traceback per call to a dead runner
    settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    os.environ |= settings | {"RAY_IGNORE_UNHANDLED_ERRORS": "1"} | os.environ
    try:
        ray = importlib.import_module("ray")
    except ImportError:
        fail("--num-runners needs Ray (pip install -r requirements/requirements-ray.txt); --num-runners 0 does without")
    for name, number in (("runner", args.gpus_per_runner), ("learner", args.gpus_per_learner)):
        if number > 1 and number % 1:
            fail(f"--gpus-per-{name} {number:g}: more than one GPU must be a whole number of them")
    others = max(0, args.num_learners - 1)
    needs = {"CPU": args.num_runners * args.cpus_per_runner + others * args.cpus_per_learner}
    needs["GPU"] = args.num_runners * args.gpus_per_runner + others * args.gpus_per_learner
    has = {"CPU": needs["CPU"], "GPU": torch.cuda.device_count()}  # runners may share this machine's cores
    settings = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    try:
        if args.ray_address not in (None, "auto"):  # Ray itself would wait for minutes
            host, _, port = args.ray_address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=5).close()
        if not ray.is_initialized() and (args.ray_address or needs["GPU"] <= has["GPU"]):
            local = {"address": "local", "num_cpus": max(num_cores(), math.ceil(needs["CPU"]))}
            ray.init(**settings, **({"address": args.ray_address} if args.ray_address else local))
    except Exception as error:
        fail(f"can't use Ray, --ray-address {args.ray_address}: {type(error).__name__}: {error}")
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))  # in place of Ray's handler
    has = ray.cluster_resources() if ray.is_initialized() else has
    for name, need in needs.items():
        if need > has.get(name, 0):
            fail(f"the processes of this run need {need:g} {name}s, the cluster has {has.get(name, 0):g}")
        free = ray.available_resources().get(name, 0) if args.ray_address else need
        if need > free:
            print(f"note: this run needs {need:g} {name}s and waits, as {free:g} are free", file=sys.stderr)
    machines = [machine["Resources"] for machine in ray.nodes() if machine["Alive"]]
    for name, number in (("runner", args.num_runners), ("learner", others)):
        cpus, gpus = (getattr(args, f"{kind}_per_{name}") for kind in ("cpus", "gpus"))
        if number > (room := sum(min(places(x, "CPU", cpus), places(x, "GPU", gpus)) for x in machines)):
            kind = {"learner": "further processes"}.get(name, "runners")
            what = f"{number} {kind}, each of {cpus:g} CPUs and {gpus:g} GPUs of one machine"
            fail(f"{what}: the cluster's machines have room for {room:g}")
    if __name__ != "__main__":
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # all processes run this source
    return ray


def versions() -> dict[str, str]:
    """Versions of the packages that runners and learners must agree on."""
    names = ("torch", "tensordict", "numpy", "gymnasium", "envpool", "mujoco", "ray")
    installed = [name for name in names if [*distributions(name=name)]]
    return {"python": sys.version.split()[0]} | {name: version(name).partition("+")[0] for name in installed}


def other_versions(theirs: dict[str, str]) -> str:
    """In what another process differs from this one; nothing where it does not."""
    own, missing = versions(), "not installed"
    pairs = {name: (theirs.get(name, missing), own.get(name, missing)) for name in theirs | own}
    return "; ".join(f"{name} {x}, here it is {here}" for name, (x, here) in pairs.items() if x != here)


class Refused(RuntimeError):
    """A call to `fail` in another process, with its message. A new process would fail too, so the run ends."""


def heard(function, *arguments):
    """Call a function in a Ray process, turning `fail` into `Refused`: else the process dies and its output is lost."""
    with contextlib.redirect_stderr(io.StringIO()) as output:
        try:
            return function(*arguments)
        except SystemExit as end:  # of `fail`, or of an environment
            last = output.getvalue().strip().rpartition("\n")[2]
            raise Refused(last.removeprefix("error: ") if last.startswith("error: ") else repr(end)) from None
        finally:
            print(output.getvalue(), end="", file=sys.__stderr__)  # Ray's log of this process


class RemoteRunner:
    """A runner in a Ray process. If an environment breaks, `sample` raises an exception."""

    def __init__(self, args: Args, seeds: list[int], spec: gym.envs.registration.EnvSpec | None):
        for signum in (signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)  # only the learner stops on these
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # to end at once and be replaced
        torch.set_num_threads(max(1, int(args.cpus_per_runner)))
        os.environ.setdefault("TORCH_WARM_POOL", "0")  # else one that compiles starts a process for each core
        if spec is not None:
            gym.registry[spec.id] = spec  # as the learner's file may have registered or changed it
        random.seed(seeds[0])
        np.random.seed(seeds[0])
        torch.manual_seed(seeds[0])
        self.parts = args, seeds

    def open(self) -> dict:
        """Make the environments -> what the learner must know."""
        self.runner = heard(Runner, *self.parts)
        envs, node = self.runner.envs, importlib.import_module("ray").util.get_node_ip_address()
        envs.stop = self.give_up
        news = {"spaces": (envs.observation_space, envs.action_space), "backend": envs.backend, "summary": envs.summary}
        return news | {"versions": versions(), "place": f"process {os.getpid()} on {node}"}

    def give_up(self, message: str) -> NoReturn:
        raise RuntimeError(message)

    def close(self) -> None:
        self.runner.envs.close()

    def sample(self, *weights) -> tuple[dict, tuple[np.ndarray, ...]]:
        return heard(self.runner.sample, *weights)


def cause_of(error: Exception) -> str:
    """In one line, the exception behind one of Ray's, or how a process ended."""
    cause, details = getattr(error, "cause", None), str(error).partition("exit detail: ")[2]
    name = "" if isinstance(cause, RuntimeError) else f"{type(cause or error).__name__}: "
    return " ".join(f"{name}{cause or details.partition('. ')[0] or error}".split())


class RayRunners(Runners):
    """Runners as actors of Ray, wherever in the cluster there is room.

    In IMPALA and Ape-X, two fragments are requested of each runner: it works on one and can begin the next without
    waiting for the learner, but never runs far ahead. With --rollout first-ready, the next is requested when the
    learner has taken one, and those older than one update are dropped; with batched, and in A2C, the learner waits for
    one from each, with the newest weights. For A3C see `GradientRunners`.

    A runner that dies, or whose environment raises, is replaced by another with new seeds; its pending requests are
    lost. The learner continues with the fragments of the others.
    """

    def __init__(self, args: Args, run: "Run"):
        with ending_early(), contextlib.ExitStack() as at_failure:
            at_failure.callback(run.at_end.close)  # ends what has started; nothing else would
            self.begin(args, run)
            at_failure.pop_all()

    def begin(self, args: Args, run: "Run") -> None:
        """Start Ray and the runners, and wait for those that are needed."""
        super().__init__(args, run)
        choose_backend(args.env_id, args.env_backend, in_process=False)  # catches a mistyped id before Ray starts
        self.own_ray, self.actors = "ray" not in sys.modules or not sys.modules["ray"].is_initialized(), {}
        run.at_end.callback(self.close)
        self.ray = start_ray(args)
        place = {"num_cpus": args.cpus_per_runner, "num_gpus": args.gpus_per_runner, "scheduling_strategy": "SPREAD"}
        self.remote, self.places, self.weights = self.ray.remote(**place)(RemoteRunner), {}, None
        # How many fragments are requested of a runner at once; how many updates late one may be
        asking = {"batched": (1, 0), "first-ready": (1, 1)}
        self.ahead, self.most_stale = asking.get(getattr(args, "rollout", None), (2, math.inf))
        # Reference of a fragment -> index of its runner, reference of its report (None while the runner is starting)
        self.in_flight, self.pending = {}, [0] * args.num_runners  # how many fragments each still owes
        # Whether fragments begin to travel when one looks which are finished; others' go to them by reference
        self.fetches = args.num_learners <= 1 and not getattr(args, "replay_shards", 0)
        self.failures, self.told = [0] * args.num_runners, {}  # consecutive failures; errors reported, and of whom
        # Since when each owes a fragment; when the last one arrived; what a runner that starts is sent, as text
        self.since, self.last_news = [math.inf] * args.num_runners, -math.inf
        of_learners = [globals()[x] for x in ("make_learner", "PrioritizedReplay") if x in globals()]
        spec = gym.registry.get(args.env_id.rpartition(":")[2])
        entry = getattr(spec, "entry_point", None)
        if isinstance(entry, str) and is_users(sys.modules.get(entry.partition(":")[0])):
            entry = spec.entry_point = gym.envs.registration.load_env_creator(entry)
        of_envs = [entry] if is_users(entry) else []
        self.named = named_globals([Runner, *of_envs, *(of_learners if args.num_learners > 1 else [])])
        self.named |= globals_beside(entry)
        self.sent = self.known_to_runners()
        self.deadline = time.monotonic() + args.fragment_timeout
        for index in range(args.num_runners):
            self.start(index)
        wanted = 1 if self.most_stale else args.num_runners
        # At the deadline `ready` would end the run; just before, those that have started go on without the others
        while len(self.alive) < wanted and not (self.alive and time.monotonic() > self.deadline - 1):
            for reference in self.ready():
                self.hear(reference)
        self.queue.clear()  # while they started, the learner did not come for a batch
        if len(self.alive) < wanted:
            late = f"{len(self.alive)} of {wanted} runners have started"
            print(f"note: {late} within {args.fragment_timeout:g} s; they go on without the others", file=sys.stderr)
        warn_of_pixels(self.spaces[0], gym.spaces.flatdim(self.spaces[0]))  # what runners print is not shown

    def start(self, index: int) -> None:
        """Let Ray start a runner; one that replaces a dead one gets new seeds."""
        seeds = self.seeds[index * self.args.envs_per_runner :][: self.args.envs_per_runner]
        if self.restarts:
            seeds = (np.random.SeedSequence([*seeds, self.restarts]).generate_state(len(seeds)) >> 1).tolist()
        self.actors[index] = self.remote.remote(self.args, seeds, gym.registry.get(self.args.env_id))
        self.in_flight[self.actors[index].open.remote()] = index, None

    def admit(self, index: int, news: dict) -> None:
        """Let a runner that has made its environments take part."""
        if differ := other_versions(news["versions"]):
            self.stop(f"runner {index} ({news['place']}) has {differ}")
        self.places[index], self.spaces, self.backend = news["place"], news["spaces"], news["backend"]
        each = news["summary"].replace("this process", "its own process")
        self.summary = each.replace("environments", f"environments of {self.args.num_runners} runners, each")
        self.alive.add(index)
        self.ask(index, self.ahead)

    def ask(self, index: int, count: int) -> None:
        """Request fragments with the newest weights until `count` requests to a runner are pending."""
        self.since[index] = self.since[index] if self.pending[index] else time.monotonic()
        while self.weights and self.pending[index] < count:
            report, fragment = self.actors[index].sample.options(num_returns=2).remote(*self.weights)
            self.in_flight[fragment] = index, report
            self.pending[index] += 1

    def known_to_runners(self) -> dict[str, str]:
        """Settings, and global numbers that the runners' code names, as text: what they know from the start."""
        of_args = {f"args.{name}": text_of(x) for name, x in vars(self.args).items()}
        return of_args | {name: text_of(values.get(key)) for name, (values, key) in self.named.items()}

    def publish(self, version: int, weights: np.ndarray, *others) -> None:
        """Use these weights for requests from now on. A small vector goes with each; a large one is put once."""
        self.clock.lap("learning")
        if (known := self.known_to_runners()) != self.sent:
            name = next(name for name, text in known.items() if text != self.sent.get(name))
            hint = "send it by `publish`, take it in `Runner.sample`; if only the learner needs it, use a new variable"
            self.stop(f"`{name}` changed, but runners keep its first value: {hint}")
        try:
            self.weights = version, weights if weights.nbytes < 100_000 else self.ray.put(weights), *others
        except self.ray.exceptions.RayError as error:  # its memory is full, and so is the disk
            self.stop(f"Ray can't store the weights: {cause_of(error)}")
        for index in self.alive:
            self.ask(index, self.ahead)
        self.clock.lap("weights")

    def ready(self) -> list:
        """Calls of runners that have finished, oldest request first; waits half a second at most."""
        references, now = list(self.in_flight), time.monotonic()
        how = {"fetch_local": self.fetches}
        ready, waiting = self.ray.wait(references, num_returns=len(references), timeout=0, **how)
        self.queue.append(len(ready))  # `collect` keeps the first of these
        owing = {self.in_flight[x][0] for x in waiting if self.in_flight[x][1] is not None}
        owing -= {self.in_flight[x][0] for x in ready}
        for index in owing:
            if now - self.since[index] > self.args.fragment_timeout and self.last_news > self.since[index]:
                self.bury(index, TimeoutError(f"no fragment for {self.args.fragment_timeout:g} s, unlike others"))
                references = list(self.in_flight)
        if not ready and time.monotonic() > self.deadline:
            self.stop(f"no runner has done anything for {self.args.fragment_timeout:g} s; {len(self.alive)} are alive")
        return ready or self.ray.wait(references, num_returns=1, timeout=0.5, **how)[0]

    def hear(self, reference, found: list | None = None, num_ours: int = 0) -> None:
        """Handle a finished call: admit a runner that has started, or store a fragment and its report.

        A fragment takes a free place in `found`. From place `num_ours` on, for other learners, it stays a reference.
        """
        index, report = self.in_flight.pop(reference, (None, None))
        if index is None:
            return  # the runner has been buried meanwhile
        is_start = report is None
        self.pending[index] -= not is_start
        try:
            news = self.ray.get(reference if is_start else report)
            is_late = not is_start and self.run.num_updates - news["version"] > self.most_stale
            if not is_start and not is_late:
                place = index if not self.most_stale and found[index] is None else found.index(None)
                found[place] = news, self.ray.get(reference) if place < num_ours else reference
        except self.ray.exceptions.RayError as error:
            self.bury(index, error)
            return
        self.deadline = time.monotonic() + self.args.fragment_timeout
        if is_start:
            self.admit(index, news)
            return
        self.failures[index], self.since[index] = 0, time.monotonic()
        self.last_news = self.since[index]
        if is_late:
            self.late += 1
            self.note_anyway(news)
        if self.most_stale:
            self.ask(index, self.ahead if len(found) > len(self.alive) else 1)  # a batch may take several from each

    def collect(self, batch_fragments: int, num_learners: int) -> tuple[tuple, tuple]:
        """Reports and fragments: first those of this learner's batch, then references to those of other learners."""
        self.clock.lap("learning")
        self.deadline = time.monotonic() + self.args.fragment_timeout  # an update may have taken longer
        found, polls = [None] * (batch_fragments * num_learners), len(self.queue)
        while None in found:
            self.run.stop_if_asked()
            for reference in self.ready()[: found.count(None)]:
                self.hear(reference, found, batch_fragments)
            asked = sum(report is not None for _, report in self.in_flight.values())
            busy = {index for index, _ in self.in_flight.values()}  # of the others, first those whose own is missing
            idle = sorted(self.alive - busy, key=lambda x: (not self.most_stale and found[x] is not None, x))
            for index in idle[: max(0, found.count(None) - asked)]:
                self.ask(index, 1)  # instead of one that has died
        for report, _ in found:
            self.note(report)
        del self.queue[polls + 1 :]
        self.clock.lap("learner_waiting")
        return tuple(zip(*found, strict=True))

    def bury(self, index: int, error: Exception) -> None:
        """Replace a runner that died or raised; end the run if that happens repeatedly."""
        self.run.stop_if_asked()  # what a signal to the whole group of processes has ended is no fault
        cause, summary = getattr(error, "cause", None), cause_of(error)
        address = str(error).replace(" ip=", "\tip: ").partition("\tip: ")[2]  # of an exception, or of a death
        host = address.replace(",", "\n").partition("\n")[0]
        if cause is not None and not self.alive and not self.restarts:
            if type(cause).__name__ != "Refused":
                say(str(error))  # the traceback
            fail(summary + f"; on {host}" * bool(host and self.args.ray_address))
        # By name, as it comes from another process. A runner that can't start may find its simulator the next time
        if type(cause).__name__ == "Refused" and index in self.alive:
            self.stop(f"runner {index} ({self.places[index]}): {summary}")
        place = self.places.pop(index, f"not yet up, on {host}" if host else "not yet up")
        death = f"runner {index} ({place}) died: {summary}"
        is_mistake = cause is not None and index in self.alive and self.told.get(summary, index) != index
        if is_mistake and self.last_news == -math.inf:  # of your code, and not of a machine
            self.stop(f"{death}; so has another one, and none has brought a fragment")
        if cause is not None and summary not in self.told:  # the traceback, of each exception once
            say(str(error))
            self.told[summary] = index
        self.alive.discard(index)
        self.in_flight = {x: (other, report) for x, (other, report) in self.in_flight.items() if other != index}
        self.ray.kill(self.actors[index])
        self.pending[index] = 0
        self.failures[index] += 1
        if self.failures[index] == 3:
            self.stop(f"{death}; so it did 3 times in a row, without a fragment in between")
        if self.restarts == self.args.runner_restarts * self.args.num_runners:
            number = f"--runner-restarts {self.args.runner_restarts} times --num-runners {self.args.num_runners}"
            self.stop(f"{death}; all {self.restarts} restarts are used up, {number}")
        self.restarts += 1
        say(f"{death}; restart {self.restarts}")
        self.start(index)
        self.deadline = time.monotonic() + self.args.fragment_timeout  # for the new one to start

    def close(self) -> None:
        """Let runners close their environments, if they finish their fragments within five seconds; end all."""
        closing = [self.actors[index].close.remote() for index in self.alive]
        if closing:
            self.ray.wait(closing, num_returns=len(closing), timeout=5)
        self.alive.clear()
        while self.actors:
            self.ray.kill(self.actors.popitem()[1])
        if self.own_ray and "ray" in sys.modules:
            sys.modules["ray"].shutdown()  # even if the cluster turned out to be too small


class GradientRunners(RayRunners):
    """Ray runners that get their next request only after their last gradient has been applied.

    So its weights include its last gradient, except where A2C asks it for a second one in place of a dead runner's.
    """

    def __init__(self, args: Args, run: "Run"):
        for module in [x for x in sys.modules.values() if type(x).__name__ == "ConfigModuleInstance"]:
            # PyTorch's, which `compiled` refers to; other modules can be pickled
            copyreg.pickle(type(module), lambda module: (importlib.import_module, (module.__name__,)))
        super().__init__(args, run)

    def ask(self, index: int, count: int) -> None:
        """In A3C, a runner has one request at most, made when weights are published, not when a gradient arrives."""
        super().ask(index, count if self.args.sync_gradients else count - 1)


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
