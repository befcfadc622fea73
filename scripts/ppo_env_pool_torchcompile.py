# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0", "tensordict==0.15.3", "gymnasium[mujoco]==1.4.0", "envpool==1.2.5",
#     "tyro==1.0.17", "numpy==2.4.6", "tqdm==4.70.1", "tensorboard==2.21.0",
# ]
# ///
"""Proximal Policy Optimization (PPO) over slow Python environments, in a pool without lock-step, compiled.

Schulman et al. (2017), "Proximal Policy Optimization Algorithms", https://arxiv.org/abs/1707.06347, whose equations are
meant below; advantages by Schulman et al. (2016), "High-Dimensional Continuous Control Using Generalized Advantage
Estimation", https://arxiv.org/abs/1506.02438.

    python ppo_env_pool_torchcompile.py --env-id CartPole-v1 --num-workers 8 --ready-batch 2 --seed 1

Its eager twin is `ppo_env_pool.py`; the diff of the two shows all that compiling takes.
Shapes: T = num_steps, N = num_workers * envs_per_worker, B = T * N, M = rows of a minibatch, K = environments that are
ready at a time, O = size of an observation, A = number of Discrete actions, or size of an action of a Box, P = number
of parameters.

This is PPO as in `ppo.py` and `ppo_continuous_action.py`: each environment gives T rows to a rollout, and the policy is
the same for all of them. Only the order differs in which the rows come in: `--ready-batch` environments that are ready
get their actions, however long the others take for their step. Noise is drawn for each row beforehand and seeds belong
to environments, so the rows do not depend on the order, except by rounding in the policy's matrix products. There is no
normalization of observations or rewards: statistics over all environments would follow the order.

A worker process that dies is restarted. Its environments' rows of that moment are masked, as those of resets are.
"""

import contextlib
import difflib
import importlib.util
import json
import math
import mmap
import multiprocessing
import os
import pickle
import platform
import random
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from copy import deepcopy
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from importlib.metadata import version
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Literal, NoReturn

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.vector.utils import CloudpickleWrapper
from tensordict.nn import CudaGraphModule
from torch import Tensor, nn
from tqdm import tqdm


@dataclass
class Args:
    # experiment
    exp_name: str = Path(__file__).stem  # second part of the run folder's name
    seed: int = 1  # seeds Python, NumPy, PyTorch and the environments
    device: str = "auto"  # where the networks learn: auto (CUDA if there is one), cpu, cuda, cuda:1, ...
    run_dir: str | None = None  # folder of the run; by default runs/{env_id}__{exp_name}__{seed}__{time}
    resume: str | None = None  # folder of a run to go on with, by its own settings, from its checkpoint
    checkpoint_every: int | None = None  # environment steps between checkpoints; by default a tenth of the run
    tensorboard: bool = True  # write TensorBoard events beside metrics.jsonl
    track: bool = False  # send the TensorBoard events to Weights & Biases too
    wandb_project_name: str = "flatout"  # the project there
    wandb_entity: str | None = None  # the team there

    # environment
    env_id: str = "CartPole-v1"  # any id of Gymnasium (module:Env-v0 too) with Discrete or Box actions
    total_timesteps: int = 500_000  # environment steps in the whole run, rounded down to whole rollouts
    num_workers: int = 8  # worker processes
    envs_per_worker: int = 1  # environments that each worker steps in turn
    ready_batch: int = 2  # act as soon as so many environments are ready; 0 waits for all of them, in lock-step
    start_method: Literal["spawn", "forkserver", "fork"] = "spawn"  # how multiprocessing starts the workers
    step_timeout: float = 60.0  # seconds that an environment may take for a step or a reset; then its worker is killed
    max_restarts: int = 20  # dead workers to restart in the run; at one more it ends

    # PPO
    num_steps: int = 128  # steps of each environment in a rollout
    learning_rate: float = 2.5e-4  # of Adam
    anneal_lr: bool = True  # lower the learning rate linearly to zero
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    num_minibatches: int = 8  # gradient steps in an epoch
    update_epochs: int = 4  # passes over each rollout
    norm_adv: bool = True  # normalize the advantages within each minibatch
    clip_coef: float = 0.2  # epsilon of the clipped objective
    clip_vloss: bool = True  # clip the value function's change in the same way
    ent_coef: float = 0.01  # weight of the entropy bonus, c2 in the paper
    vf_coef: float = 0.5  # weight of the value loss, c1 in the paper
    max_grad_norm: float = 0.5  # the gradient is scaled down to this norm
    target_kl: float | None = None  # no more epochs on a rollout once the policy moved further than this

    # compile: two switches, to see what each of the two steps gives
    compile: bool = True  # fuse the operations of a minibatch's update, from gather to Adam, into a few kernels
    cudagraphs: bool = True  # on CUDA, replay the kernels of an epoch as one graph, in one launch


METRICS = (
    "losses/policy_loss", "losses/value_loss", "losses/entropy", "losses/old_approx_kl", "losses/approx_kl",
    "losses/clipfrac", "losses/explained_variance", "charts/learning_rate",
)  # fmt: skip
STARTING_SECONDS = 120  # that a worker may take to start and to make its environments


def mlp(inputs: int, outputs: int, output_gain: float) -> nn.Sequential:
    """Two hidden layers of 64 tanh units, orthogonal weights: (B, inputs) -> (B, outputs)."""
    net = nn.Sequential(
        nn.Linear(inputs, 64), nn.Tanh(),
        nn.Linear(64, 64), nn.Tanh(),
        nn.Linear(64, outputs),
    )  # fmt: skip
    for layer, gain in zip(net[::2], (math.sqrt(2), math.sqrt(2), output_gain), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return net


def normal_log_prob(action: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Log-density of actions (..., A) under a normal distribution with diagonal covariance -> (...)."""
    z = (action - mean) * torch.exp(-log_std)
    return (-0.5 * z.square() - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)


class ActorCritic(nn.Module):
    """Policy and value: observation (B, O), action -> the action's log-probability (B,), entropy (B,), value (B,).

    A Categorical policy, whose network gives a logit for each action, or a Gaussian one, whose network gives its mean.
    """

    def __init__(self, obs_dim: int, action_space: gym.Space):
        super().__init__()
        self.is_discrete = isinstance(action_space, gym.spaces.Discrete)
        outputs = int(action_space.n) if self.is_discrete else math.prod(action_space.shape)
        self.actor = mlp(obs_dim, outputs, output_gain=0.01)
        self.critic = mlp(obs_dim, 1, output_gain=1.0)
        if not self.is_discrete:
            self.log_std = nn.Parameter(torch.zeros(outputs))

    def forward(self, obs: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        output, value = self.actor(obs), self.critic(obs).squeeze(1)
        if self.is_discrete:
            log_probs = output.log_softmax(1)
            log_prob = log_probs.gather(1, action.long().unsqueeze(1)).squeeze(1)
            return log_prob, -(log_probs.exp() * log_probs).sum(1), value
        entropy = (self.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()
        return normal_log_prob(action, output, self.log_std), entropy.expand_as(value), value

    def noise(self, *shape: int) -> np.ndarray:
        """(*shape, A), to add to the actor's output: the sum is a sample; of logits and Gumbel noise, its argmax is."""
        if self.is_discrete:
            return -torch.empty(*shape, self.actor[-1].out_features).exponential_().log().numpy()
        return (torch.randn(*shape, len(self.log_std)) * self.log_std.detach().exp()).numpy()


def numpy_mlp(net: nn.Sequential):
    """The function of an MLP on NumPy arrays (B, inputs) -> (B, outputs): 5 us for one row, where PyTorch takes 35.

    It reads the memory of the module's parameters, which must be on the CPU, and follows when these change in place.
    """
    activation = {nn.Tanh: np.tanh, nn.ReLU: partial(np.maximum, np.float32(0))}[type(net[1])]
    *hidden, (last_weight, last_bias) = [(x.weight.detach().numpy().T, x.bias.detach().numpy()) for x in net[::2]]

    def forward(x: np.ndarray) -> np.ndarray:
        for weight, bias in hidden:
            x = activation(x.dot(weight) + bias)  # of arrays this small, `@` takes half a microsecond more
        return x.dot(last_weight) + last_bias

    return forward


def discounted_sum(x: Tensor, decay: Tensor) -> Tensor:
    """y[t] = x[t] + decay[t] * y[t + 1] along the first dimension, in log2(T) rounds of the whole (T, N).

    A loop over 2048 steps takes 60 ms, this 0.3 ms: after each round, y[t] sums twice as many terms.
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
    """Generalized advantage estimation, equations (11) and (12) of PPO: all (T, N), but value (T + 1, N) -> (T, N).

    value[t + 1] after a truncation is that of the episode's true last observation, so it bootstraps like any other;
    only a termination has no future. Rows that are not valid (resets) get zero, and nothing flows across them.
    """
    delta = (reward + gamma * (1 - terminated) * value[1:] - value[:-1]) * valid
    return discounted_sum(delta, gamma * gae_lambda * (1 - torch.maximum(terminated, truncated)) * valid)


def masked_mean(x: Tensor, valid: Tensor) -> Tensor:
    """Mean of the entries of x where valid = 1, with static shapes and without waiting for the device."""
    return (x * valid).sum() / valid.sum().clamp(min=1)


def masked_std(x: Tensor, valid: Tensor) -> Tensor:
    """Standard deviation (unbiased) of the entries of x where valid = 1."""
    squares = ((x - masked_mean(x, valid)) * valid).square().sum()
    return (squares / (valid.sum() - 1).clamp(min=1)).sqrt()


class EpisodeStatistics:
    """Return and length of each episode that ends, from rows (T, N); a reset row has reward 0 and is no step."""

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
    """Adam (Kingma & Ba 2015, algorithm 1), with clipping: PyTorch's fused kernel without the bookkeeping around it.

    For small networks, the bookkeeping of torch.optim takes longer than the kernel. torch.compile can trace neither, so
    compiled code has the formula written out, on all weights as one vector (P,): it becomes a single loop. The learning
    rate is a tensor, so that compiled code and CUDA graphs read its present value.
    """

    def __init__(self, module: nn.Module, learning_rate: float, eps: float = 1e-8, betas: tuple = (0.9, 0.999)):
        super().__init__()
        self.weights, self.eps, self.betas = list(module.parameters()), eps, betas
        self.sizes = [w.numel() for w in self.weights]
        zeros = torch.zeros(sum(self.sizes), device=self.weights[0].device)
        self.register_buffer("learning_rate", torch.full_like(zeros[0], learning_rate))
        # The kernel counts steps, the formula multiplies powers: a run goes on in the way that it began
        self.register_buffer("steps", torch.zeros_like(zeros[0]))
        self.register_buffer("beta1_power", torch.ones_like(zeros[0]))
        self.register_buffer("beta2_power", torch.ones_like(zeros[0]))
        self.register_buffer("exp_avg", zeros.clone())
        self.register_buffer("exp_avg_sq", zeros.clone())
        # The kernel takes lists: views of the two vectors, which a checkpoint fills in place. On CUDA it refuses those
        # that do not lie in memory as their weight does
        parts = zip(self.weights, self.exp_avg.split(self.sizes), self.exp_avg_sq.split(self.sizes), strict=True)
        views = [(m.as_strided(w.shape, w.stride()), v.as_strided(w.shape, w.stride())) for w, m, v in parts]
        self.exp_avgs, self.exp_avg_sqs = zip(*views, strict=True)

    @torch.no_grad()
    def step(self, gradients: tuple[Tensor, ...], max_norm: float = math.inf) -> None:
        """Change the weights in place, down their gradients, which are scaled down to `max_norm` if they exceed it.

        The kernel scales the gradients in place: they are used up, and no two may share memory.
        """
        excess = None
        if max_norm < math.inf:
            norm = torch.cat([g.reshape(-1) for g in gradients]).norm()
            excess = ((norm + 1e-6) / max_norm).clamp(min=1).float()  # the kernel takes no other type
        self.steps.add_(1)
        if torch.compiler.is_compiling():
            self.step_written_out(gradients, excess)
            return
        # The kernel goes through memory in order, so a gradient must lie there as its weight does
        pairs = zip(gradients, self.weights, strict=True)
        gradients = [g if g.stride() == w.stride() else torch.empty_like(w).copy_(g) for g, w in pairs]
        beta1, beta2 = self.betas
        torch._fused_adam_(
            self.weights, gradients, self.exp_avgs, self.exp_avg_sqs, [], [self.steps] * len(gradients),
            lr=self.learning_rate, beta1=beta1, beta2=beta2, eps=self.eps, grad_scale=excess,
            weight_decay=0, amsgrad=False, maximize=False,
        )  # fmt: skip

    def step_written_out(self, gradients: tuple[Tensor, ...], excess: Tensor | None) -> None:
        """The same for torch.compile; gradients are divided by `excess`, if it is given."""
        gradient = torch.cat([g.reshape(-1) for g in gradients])
        if excess is not None:
            gradient = gradient / excess
        beta1, beta2 = self.betas
        self.beta1_power.mul_(beta1)  # products, since a fused loop computes a power again for every few weights
        self.beta2_power.mul_(beta2)
        self.exp_avg.lerp_(gradient, 1 - beta1)
        self.exp_avg_sq.lerp_(gradient.square(), 1 - beta2)
        scale = (self.exp_avg_sq / (1 - self.beta2_power)).sqrt() + self.eps
        change = (self.exp_avg / scale) * (self.learning_rate / (1 - self.beta1_power))
        parts = zip(change.split(self.sizes), self.weights, strict=True)
        torch._foreach_sub_(self.weights, [part.view_as(weight) for part, weight in parts])


def fail(message: str) -> NoReturn:
    """End with one line and exit code 2: the input is wrong."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def flatten(obs, rows: int) -> np.ndarray:
    """Observations of `rows` environments, an array or a dictionary of arrays (joined in key order) -> (N, O)."""
    if isinstance(obs, dict):
        return np.concatenate([flatten(obs[key], rows) for key in sorted(obs)], axis=1)
    return obs.reshape(rows, -1)


def flat_size(space: gym.Space) -> int:
    """How many numbers `flatten` makes of one observation."""
    if isinstance(space, gym.spaces.Dict):
        return sum(flat_size(part) for part in space.values())
    if not isinstance(space, gym.spaces.Box):
        fail(f"observations must be a Box or a Dict of Boxes, not {space}")
    return math.prod(space.shape)


def make_env(env_id: str) -> gym.Env:
    """One Gymnasium environment. In a worker process it leaves Ctrl-C to the parent, which stops in good order."""
    if multiprocessing.parent_process() is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return gym.make(env_id, disable_env_checker=True)


def choose_backend(env_id: str, backend: str, in_process: bool) -> str:
    """The library that makes the environments; if none knows the id, the end, with the ids that come near."""
    libraries = ["gymnasium", "envpool"] if backend == "auto" else [backend]
    known = []
    for library in libraries if in_process else reversed(libraries):
        if library == "envpool":
            import envpool  # takes half a second

        ids = list(gym.registry) if library == "gymnasium" else envpool.list_all_envs()
        if env_id in ids or (library == "gymnasium" and ":" in env_id):
            return library
        known += ids
    near = difflib.get_close_matches(env_id, dict.fromkeys(known))
    fail(f"no environment {env_id} in {' or '.join(libraries)}" + bool(near) * f"; close to it: {', '.join(near)}")


def row_type(observation_space: gym.Space, action_space: gym.Space) -> np.dtype:
    """The memory that the pool and a worker share for one environment: its flat observation (O,), its action, ..."""
    action = ("action", action_space.dtype, action_space.shape)
    flags = [("terminated", np.bool_), ("truncated", np.bool_)]
    observation = ("obs", np.float32, (flat_size(observation_space),))
    return np.dtype([observation, action, ("reward", np.float32), *flags], align=True)


def end_with_parent() -> None:
    """In a thread of a worker: end it soon after its parent, even if a step of an environment never returns."""
    multiprocessing.parent_process().join()
    time.sleep(2)  # in which the worker, unless it is held up, sees the end of its pipe and closes its environments
    os._exit(1)


def serve(env_fns: list, connection: Connection, first: int, seeds: list[int]) -> None:
    """Make environments and step all of them, in turn, at each byte from the pool, until the pipe ends.

    They are those from `first` on in the shared memory. The pool is told `s`, with their spaces, to which it answers
    with that memory; then `d` whenever a row of each is done.
    """
    pipe = connection.fileno()  # a byte there by plain writes and reads takes 3 us, by the Connection's own 11
    envs = [env_fn() for env_fn in env_fns]
    os.write(pipe, b"s")
    connection.send([(env.observation_space, env.action_space) for env in envs])
    memory = mmap.mmap(reduction.recv_handle(connection), 0)
    rows = np.frombuffer(memory, row_type(envs[0].observation_space, envs[0].action_space))
    obs, action, reward, terminated, truncated = (rows[name][first:] for name in rows.dtype.names)
    for i, env in enumerate(envs):
        obs[i], reward[i], terminated[i], truncated[i] = flatten(env.reset(seed=seeds[i])[0], 1), 0, False, False
    os.write(pipe, b"d")
    while os.read(pipe, 1):
        for i, env in enumerate(envs):
            if terminated[i] or truncated[i]:
                row = env.reset()[0], 0, False, False
            else:
                row = env.step(action[i].copy())[:4]  # a copy, as the environment may keep it
            obs[i], (reward[i], terminated[i], truncated[i]) = flatten(row[0], 1), row[1:]
        os.write(pipe, b"d")
    for env in envs:
        env.close()


def work(env_fns: list, connection: Connection, other_end: Connection, *job) -> None:
    """A worker process: serves the pool, and tells it `x`, the exception in short and its traceback, if that fails."""
    other_end.close()  # a forked process has it too, and would never see the end of its pipe
    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        serve(env_fns, connection, *job)
    except BaseException as error:
        summary = " ".join(f"{type(error).__name__}: {error}".split())
        with contextlib.suppress(OSError):  # there may be no one left to tell
            os.write(connection.fileno(), b"x")
            connection.send((summary, traceback.format_exc()))


class SentByValue:
    """A function that goes to another process with its code, so that this file is not imported there."""

    def __init__(self, function):
        self.pickled = CloudpickleWrapper(function).__getstate__()

    def __reduce__(self):
        return pickle.loads, (self.pickled,)

    def __call__(self, *arguments):  # in a forked process
        return pickle.loads(self.pickled)(*arguments)


@contextlib.contextmanager
def light_start():
    """Processes that start herein ignore Ctrl-C, have one BLAS thread, and do not import the main module.

    Else multiprocessing makes each spawned process import it, and PyTorch with it: 1.6 s and 230 MB in place of 0.2 s
    and 40 MB.
    """
    main, threads = sys.modules["__main__"], os.environ.get("OMP_NUM_THREADS")
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.modules["__main__"], os.environ["OMP_NUM_THREADS"] = ModuleType("__main__"), "1"
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        del os.environ["OMP_NUM_THREADS"]
        os.environ.update({"OMP_NUM_THREADS": threads} if threads is not None else {})
        signal.signal(signal.SIGINT, handler)


@dataclass(eq=False)
class Worker:
    """What the pool knows of a worker process."""

    index: int
    process: multiprocessing.process.BaseProcess
    connection: Connection
    deadline: float  # on the clock of time.monotonic(), of what it is at; infinite while it waits for the pool


class Pool:
    """N environments in worker processes that step at their own pace: flat observations (N, O).

    `send` gives actions to some of them, `recv` returns those that are ready first. Rows lie in memory that both sides
    share; a byte through a pipe says that they are there, and whoever waits for it sleeps. Autoreset is one step late:
    the observation at an episode's end is its true last one, and the next step ignores its action, resets that
    environment and returns reward 0. The memory has no name, so that nothing is left of it however the program ends.

    A worker is dead when its pipe ends; it is killed if a step takes too long. Another one takes its place, with new
    seeds, whose environments come back as from a reset, marked as lost: what became of their last action is not known.
    """

    def __init__(self, args: Args, seeds: list[int]):
        choose_backend(args.env_id, "gymnasium", in_process=False)
        self.args, self.seeds, self.num_envs, self.spaces = args, seeds, len(seeds), None
        self.lost = np.zeros(self.num_envs, dtype=bool)
        self.context = multiprocessing.get_context(args.start_method)
        if args.start_method == "forkserver":
            self.context.set_forkserver_preload(["gymnasium"])  # is imported once, not by each worker
        try:
            self.work = SentByValue(partial(work, [partial(make_env, args.env_id)] * args.envs_per_worker))
        except Exception as error:  # whatever the parts of an environment bring up
            fail(f"environment {args.env_id} can't be sent to a worker process: {' '.join(str(error).split())}")
        self.poller, self.worker_at = select.poll(), {}  # which worker is at the other end of a pipe
        self.num_busy, self.ready, self.next_check, self.is_up, self.restarts = 0, [], 0.0, False, 0
        self.workers = [self.start(index) for index in range(args.num_workers)]
        while self.num_busy:
            self.listen()
        self.ready, self.is_up = [], True

    def envs_of(self, index: int) -> slice:
        return slice(index * self.args.envs_per_worker, (index + 1) * self.args.envs_per_worker)

    def start(self, index: int) -> Worker:
        """Start a worker; after the death of one, with seeds that none has had."""
        first, own = self.envs_of(index).start, self.seeds[self.envs_of(index)]
        seeds = [int(np.random.SeedSequence([x, self.restarts]).generate_state(1)[0]) if self.is_up else x for x in own]
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=self.work, args=(theirs, ours, first, seeds), daemon=True)
        with light_start():
            process.start()
        theirs.close()
        self.poller.register(ours, select.POLLIN)
        self.num_busy += 1
        self.worker_at[ours.fileno()] = worker = Worker(index, process, ours, time.monotonic() + STARTING_SECONDS)
        return worker

    def admit(self, worker: Worker, spaces: list[tuple[gym.Space, gym.Space]]) -> None:
        """Give the shared memory to a worker that has made its environments; the first one's spaces define it."""
        if self.spaces is None:
            self.spaces = self.observation_space, self.action_space = spaces[0]
            if not isinstance(self.action_space, gym.spaces.Discrete | gym.spaces.Box):
                fail(f"{self.args.env_id} has actions {self.action_space}; this script is for Discrete or Box actions")
            self.obs_dim, row = flat_size(self.observation_space), row_type(*self.spaces)
            self.memory = open(os.memfd_create("environments"), "r+b")
            self.memory.truncate(self.num_envs * row.itemsize)
            rows = np.frombuffer(mmap.mmap(self.memory.fileno(), 0), row)
            self.obs, self.action, self.reward, self.terminated, self.truncated = (rows[name] for name in row.names)
        for other in spaces:
            if other != self.spaces:
                first, second = (" ".join(f"{pair[0]}, {pair[1]}".split()) for pair in (self.spaces, other))
                fail(f"environments differ in their spaces: {first} and, in worker {worker.index}, {second}")
        with contextlib.suppress(OSError):  # should it have died meanwhile, the end of its pipe is heard next
            reduction.send_handle(worker.connection, self.memory.fileno(), worker.process.pid)
        worker.deadline = time.monotonic() + self.args.step_timeout * self.args.envs_per_worker

    def listen(self) -> None:
        """Wait until workers say something, half a second at most, and look now and then for those that never will."""
        for pipe, _ in self.poller.poll(500):
            self.hear(self.worker_at[pipe])
        now = time.monotonic()
        if now < self.next_check:
            return
        self.next_check = now + 0.5
        for worker in [x for x in self.workers if x.deadline < math.inf]:
            if now > worker.deadline:
                worker.process.kill()
                self.bury(worker, f"no answer in time, --step-timeout {self.args.step_timeout:g}")
            elif not worker.process.is_alive() and not worker.connection.poll():
                self.bury(worker)  # and a process of its own holds the pipe open

    def hear(self, worker: Worker) -> None:
        """Take a message of a worker, or the end of its pipe."""
        if worker.deadline == math.inf:
            # It died while it had nothing to do: the next `send` will find that out
            self.poller.unregister(worker.connection)
            return
        try:
            kind = os.read(worker.connection.fileno(), 1)
            message = worker.connection.recv() if kind in (b"s", b"x") else None
        except (OSError, EOFError):
            kind = b""
        if kind == b"d":
            worker.deadline = math.inf
            self.num_busy -= 1
            self.ready.append(worker.index)
        elif kind == b"s":
            self.admit(worker, message)
        else:
            self.bury(worker, *(message if kind == b"x" else ()))

    def bury(self, worker: Worker, summary: str | None = None, details: str = "") -> None:
        """Start another worker in place of a dead one; the end, if that happened too often, or to one of the first."""
        self.num_busy -= worker.deadline < math.inf
        del self.worker_at[worker.connection.fileno()]
        with contextlib.suppress(KeyError):
            self.poller.unregister(worker.connection)
        worker.connection.close()
        worker.process.join(1)
        worker.process.kill()
        worker.process.join()
        if summary is None:
            code = worker.process.exitcode
            summary = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        if not self.is_up:
            fail(f"can't make environment {self.args.env_id}: {summary}")
        death = f"environment worker {worker.index} died: {summary}"
        if details:
            tqdm.write(details, file=sys.stderr)
        if self.restarts == self.args.max_restarts:
            sys.exit(f"error: {death}; --max-restarts {self.restarts} are used up, the last checkpoint is kept")
        self.restarts += 1
        tqdm.write(f"{death}; restart {self.restarts} of {self.args.max_restarts}", file=sys.stderr)
        self.lost[self.envs_of(worker.index)] = True
        self.workers[worker.index] = self.start(worker.index)

    def reset(self) -> np.ndarray:
        """The first observation of each environment (N, O), as they are after the start."""
        return self.obs.copy()

    def send(self, action: np.ndarray, ids: np.ndarray) -> None:
        """Let environments `ids` (K,), as `recv` returned them, take actions (K, A), or (K,) if these are discrete."""
        self.action[ids] = action.reshape(len(ids), *self.action_space.shape)
        self.lost[ids] = False
        deadline = time.monotonic() + self.args.step_timeout * self.args.envs_per_worker
        for index in (ids[:: self.args.envs_per_worker] // self.args.envs_per_worker).tolist():
            worker = self.workers[index]
            worker.deadline = deadline
            self.num_busy += 1
            try:
                os.write(worker.connection.fileno(), b"s")
            except OSError:  # the pipe has no other end
                self.bury(worker)

    def recv(self, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Wait for `count` environments, or for all that are at work -> the rows of all that are ready by then:

        observation (K, O), reward (K,), terminated (K,), truncated (K,), lost (K,) and whose, ascending indices (K,).
        """
        per_worker = self.args.envs_per_worker
        while len(self.ready) * per_worker < count and self.num_busy:
            self.listen()
        workers, self.ready = np.sort(np.array(self.ready, dtype=int)), []
        ids = (workers[:, None] * per_worker + np.arange(per_worker)).ravel()
        return self.obs[ids], self.reward[ids], self.terminated[ids], self.truncated[ids], self.lost[ids], ids

    def step(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Step all in lock-step, as `Envs` of the other scripts: actions (N, ...) -> (N, O), (N,), (N,), (N,)."""
        self.send(action, np.arange(self.num_envs))
        return self.recv(self.num_envs)[:4]

    def close(self) -> None:
        """End the workers: each sees the end of its pipe and closes its environments; after five seconds, kill it."""
        for worker in self.workers:
            worker.connection.close()
        deadline = time.monotonic() + 5
        for worker in self.workers:
            worker.process.join(max(0, deadline - time.monotonic()))
            worker.process.kill()


def validate(args: Args) -> torch.device:
    """Refuse settings that can't work, before any work is done; returns the device to learn on."""
    for name, value in asdict(args).items():
        may_be_zero = name in ("seed", "learning_starts", "ready_batch", "max_restarts")
        flag, least = f"--{name.replace('_', '-')}", 0 if may_be_zero else 1
        if type(value) is int and value < least:
            fail(f"{flag} must be at least {least}, not {value}")
        if type(value) is float and not 0 <= value < math.inf:
            fail(f"{flag} must be a finite number, 0 or more, not {value}")
        if name in ("gamma", "gae_lambda", "tau") and value > 1:
            fail(f"{flag} must be at most 1, not {value}")
    if args.track and importlib.util.find_spec("wandb") is None:
        fail("--track needs Weights & Biases: pip install wandb")
    try:
        device = torch.device(args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        fail(f"--device must be auto, cpu, cuda or cuda:N, not {args.device}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        fail(f"--device {args.device}: PyTorch finds {torch.cuda.device_count()} CUDA devices here")
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)  # CUDA graphs are recorded on the current device
    return device


def load_checkpoint(args: Args) -> tuple[Args, dict | None]:
    """The settings and the checkpoint of the run to resume; without --resume the settings as they are, and None."""
    if args.resume is None:
        return args, None
    try:
        checkpoint = torch.load(Path(args.resume, "checkpoint.pt"), map_location="cpu", weights_only=True)
        script, saved = checkpoint["script"], checkpoint["args"]
        saved = Args(**saved) if script == Path(__file__).name else None
    except FileNotFoundError:
        fail(f"--resume {args.resume}: there is no checkpoint.pt in this folder")
    except Exception as error:  # whatever unpickling a broken file brings up
        fail(f"--resume {args.resume}: checkpoint.pt can't be read ({type(error).__name__})")
    if saved is None:
        fail(f"--resume {args.resume}: this is a run of {script}")
    for field in fields(Args):
        given = getattr(args, field.name)
        if field.name not in ("resume", "device") and given not in (field.default, getattr(saved, field.name)):
            fail(f"--{field.name.replace('_', '-')}: a resumed run keeps its settings; leave this flag out")
    device = saved.device if args.device == "auto" else args.device
    return replace(saved, resume=args.resume, device=device), checkpoint


def set_rng_state(state: dict) -> None:
    random.setstate(state["python"])
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def git_commit() -> str | None:
    """The commit of the repository that this file is in, marked if the files have changed since; None without one."""
    try:
        git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
        return subprocess.run(git, capture_output=True, text=True).stdout.strip() or None
    except FileNotFoundError:  # no git here
        return None


class Run:
    """A run's folder with config.json, metrics.jsonl, TensorBoard events and checkpoint.pt; and its progress bar.

    At the first SIGINT or SIGTERM `stopped_by` is set: the loop is to save and to end. The second one kills.
    """

    def __init__(self, args: Args, checkpoint: dict | None):
        self.args, self.returns, self.stopped_by = args, deque(maxlen=100), None
        self.step = self.saved_step = checkpoint["global_step"] if checkpoint else 0
        self.seconds = checkpoint["seconds"] if checkpoint else 0.0
        name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"
        self.dir = Path(args.resume or args.run_dir or "runs/" + name.replace("/", "_").replace(":", "_"))
        self.handlers = {signum: signal.signal(signum, self.on_signal) for signum in (signal.SIGINT, signal.SIGTERM)}
        try:
            self.dir.mkdir(parents=True, exist_ok=True)
            if checkpoint is None and any(self.dir.iterdir()):
                fail(f"the run folder {self.dir} is not empty; --resume goes on with a run")
            self.open_files(is_new=checkpoint is None)
        except OSError as error:
            fail(f"can't write to the run folder {self.dir}: {error.strerror}")
        self.bar = tqdm(total=args.total_timesteps, initial=self.step, unit=" steps", unit_scale=True, disable=None)
        self.start_time = time.perf_counter() - self.seconds

    def open_files(self, is_new: bool) -> None:
        """Write the configuration or, to resume, cut the log back to the checkpoint; then open the log to append."""
        log = self.dir / "metrics.jsonl"
        if is_new:
            packages = ("torch", "tensordict", "gymnasium", "envpool", "numpy")
            on_cuda = self.args.device != "cpu" and torch.cuda.is_available()
            config = {
                "script": Path(__file__).name,
                "args": asdict(self.args),
                "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
                "device": torch.cuda.get_device_name() if on_cuda else "cpu",
                "cores": len(os.sched_getaffinity(0)),
                "commit": git_commit(),
            }
            (self.dir / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        else:
            lines = [line for line in log.read_text().splitlines(keepends=True) if line.endswith("}\n")]
            log.with_suffix(".tmp").write_text("".join(x for x in lines if json.loads(x)["global_step"] <= self.step))
            log.with_suffix(".tmp").replace(log)
        self.file, self.writer = log.open("a", buffering=1), None
        if self.args.track:
            import wandb

            names = {"project": self.args.wandb_project_name, "entity": self.args.wandb_entity, "name": self.dir.name}
            wandb.init(**names, id=self.dir.name, resume="allow", config=asdict(self.args), sync_tensorboard=True)
        if self.args.tensorboard or self.args.track:
            from torch.utils.tensorboard import SummaryWriter  # takes a second

            self.writer = SummaryWriter(self.dir, purge_step=None if is_new else self.step + 1)

    def on_signal(self, signum: int, _frame) -> None:
        self.stopped_by = signum
        signal.signal(signum, signal.SIG_DFL)

    def log(self, step: int, metrics: dict[str, float], episodes: list[tuple[float, int]]) -> None:
        """Write a line; `episodes` are the (return, length) of those that ended since the last one."""
        seconds = time.perf_counter() - self.start_time
        for name, value in metrics.items():
            if not math.isfinite(value):
                sys.exit(f"error: {name} is {value} at step {step}; the last checkpoint is from step {self.saved_step}")
        metrics["charts/SPS"] = (step - self.step) / (seconds - self.seconds)
        if episodes:
            self.returns.extend(episode_return for episode_return, _ in episodes)
            metrics["charts/episodic_return"], metrics["charts/episodic_length"] = np.mean(episodes, axis=0).tolist()
            metrics["charts/episodes"] = len(episodes)
        self.file.write(json.dumps({"global_step": step, "seconds": round(seconds, 3), **metrics}) + "\n")
        for name, value in metrics.items() if self.writer else ():
            self.writer.add_scalar(name, value, step)
        self.bar.set_postfix({"return": f"{np.mean(self.returns or [math.nan]):.1f}"}, refresh=False)
        self.bar.update(step - self.step)
        self.step, self.seconds = step, seconds

    def needs_checkpoint(self, is_last: bool) -> bool:
        every = self.args.checkpoint_every or self.args.total_timesteps // 10
        return is_last or self.step - self.saved_step >= every

    def save(self, **state) -> None:
        """Write the checkpoint beside the old one, then put it in its place: at any moment there is a whole one."""
        name, keys, *rest = np.random.get_state()
        rng = {"python": random.getstate(), "numpy": [name, keys.tolist(), *rest], "torch": torch.get_rng_state()}
        rng["cuda"] = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        state |= {"script": Path(__file__).name, "args": asdict(self.args), "rng": rng}
        torch.save({**state, "global_step": self.step, "seconds": self.seconds}, self.dir / "checkpoint.tmp")
        (self.dir / "checkpoint.tmp").replace(self.dir / "checkpoint.pt")
        self.saved_step = self.step

    def close(self) -> None:
        """End the logs with a summary; after a signal, end the program too."""
        self.bar.close()
        self.file.close()
        if self.writer:
            self.writer.close()
        print(
            f"{self.step:,} steps in {self.seconds:.1f} s, mean return of the last {len(self.returns)} episodes "
            f"{np.mean(self.returns or [math.nan]):.1f}\nlog, checkpoint, configuration: {self.dir}"
        )
        for signum, handler in self.handlers.items():
            signal.signal(signum, handler)
        if self.stopped_by is not None:
            print(f"stopped by a signal; to go on: --resume {self.dir}", file=sys.stderr)
            sys.exit(128 + self.stopped_by)


def load_policy(checkpoint: dict, pool: Pool):
    """The deterministic policy of a checkpoint: observation (N, O) -> the most probable action (N,), or (N, A)."""
    agent, space = ActorCritic(pool.obs_dim, pool.action_space), pool.action_space
    agent.load_state_dict(checkpoint["agent"])
    policy = numpy_mlp(agent.actor)
    if agent.is_discrete:
        return lambda obs: space.start + policy(obs.astype(np.float32)).argmax(1)
    return lambda obs: policy(obs.astype(np.float32)).clip(space.low.reshape(-1), space.high.reshape(-1))


def train(args: Args) -> Path:
    """Train from the start, or from a checkpoint, to the end; returns the run's folder. Wrong input: SystemExit(2)."""
    args, checkpoint = load_checkpoint(args)
    device = validate(args)
    num_envs = args.num_workers * args.envs_per_worker
    batch_size = num_envs * args.num_steps
    num_iterations = args.total_timesteps // batch_size
    if batch_size % args.num_minibatches:
        fail(f"num_envs * num_steps = {batch_size} rows can't be divided into {args.num_minibatches} equal minibatches")
    if num_iterations == 0:
        fail(f"--total-timesteps {args.total_timesteps} is less than one rollout, {batch_size} steps")
    if args.ready_batch > num_envs:
        fail(f"--ready-batch {args.ready_batch} is more than there are environments, {num_envs}")
    if args.step_timeout == 0:
        fail("--step-timeout must be more than 0")
    first_iteration, global_step = (checkpoint["iteration"], checkpoint["global_step"]) if checkpoint else (0, 0)

    random.seed(args.seed)
    np.random.seed(args.seed % 2**32)
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # networks of this size lose by a second thread
    seeds = np.random.SeedSequence([args.seed, global_step]).generate_state(num_envs) >> 1
    pool = Pool(args, seeds.tolist())
    space = pool.action_space

    agent = ActorCritic(pool.obs_dim, space).to(device)
    optimizer = Adam(agent, args.learning_rate, eps=1e-5)
    state = {"agent": agent, "optimizer": optimizer}
    if checkpoint:
        for name, part in state.items():
            part.load_state_dict(checkpoint[name])
        set_rng_state(checkpoint["rng"])

    # A few observations are too little work for a GPU, or for PyTorch: the policy collects on the CPU, in NumPy
    collector = agent if device.type == "cpu" else deepcopy(agent).cpu()
    policy = numpy_mlp(collector.actor)
    low, high = (None, None) if agent.is_discrete else (space.low.reshape(-1), space.high.reshape(-1))

    @torch.no_grad()
    def estimate(obs: Tensor, action: Tensor, reward: Tensor, terminated: Tensor, truncated: Tensor, valid: Tensor):
        """From a rollout, all (T, N, ...) but obs (T + 1, N, O), the rows (B, ...) to learn; and explained variance."""
        log_prob, _, value = agent(obs[:-1].flatten(0, 1), action.flatten(0, 1))
        value = torch.cat([value, agent.critic(obs[-1]).squeeze(1)]).view(-1, num_envs)
        advantage = gae(reward, value, terminated, truncated, valid, args.gamma, args.gae_lambda)
        returns = advantage + value[:-1]
        explained_variance = 1 - (masked_std(advantage, valid) / (masked_std(returns, valid) + 1e-8)).square()
        rows = (obs[:-1], action, value[:-1], advantage, returns, valid)
        return log_prob, *(x.flatten(0, 1) for x in rows), explained_variance

    def update_minibatch(index: Tensor, *batch: Tensor) -> Tensor:
        """One step of Adam on the rows `index` (M,) of the batch -> the first six `METRICS`."""
        old_log_prob, obs, action, old_value, advantage, returns, valid = (x[index] for x in batch)
        log_prob, entropy, value = agent(obs, action)
        log_ratio = log_prob - old_log_prob
        ratio = log_ratio.exp()
        if args.norm_adv:
            advantage = (advantage - masked_mean(advantage, valid)) / (masked_std(advantage, valid) + 1e-8)
        # The clipped surrogate objective, equation (7)
        clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
        policy_loss = -masked_mean(torch.min(ratio * advantage, clipped_ratio * advantage), valid)
        squared_error = (value - returns).square()
        if args.clip_vloss:
            clipped_value = old_value + (value - old_value).clamp(-args.clip_coef, args.clip_coef)
            squared_error = torch.max(squared_error, (clipped_value - returns).square())
        value_loss = 0.5 * masked_mean(squared_error, valid)
        entropy = masked_mean(entropy, valid)
        loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy  # equation (9), to be minimized
        optimizer.step(torch.autograd.grad(loss, optimizer.weights), args.max_grad_norm)
        old_approx_kl, approx_kl = masked_mean(-log_ratio, valid), masked_mean(ratio - 1 - log_ratio, valid)
        clipfrac = masked_mean(((ratio - 1).abs() > args.clip_coef).float(), valid)
        return torch.stack([policy_loss, value_loss, entropy, old_approx_kl, approx_kl, clipfrac]).detach()

    def update_epoch(permutation: Tensor, *batch: Tensor) -> Tensor:
        """One pass over the batch in minibatches, the rows of `permutation` (B / M, M) -> the mean of their losses."""
        return torch.stack([update_minibatch(index, *batch) for index in permutation]).mean(0)

    # compile: the names stay, so the loop below does not change. The gradient is traced too: a graph that breaks at it
    # takes 3.5 times as long. On a CPU, kernels launched from C++ instead of Python save another tenth, and to check
    # no more than tensors at each call, as nothing else changes, a twentieth
    if args.compile:
        torch._dynamo.config.trace_autograd_ops = True
        torch.compiler.reset()  # what an earlier call in this process compiled may be of other settings
        options = {"cpp_wrapper": device.type == "cpu", "guard_filter_fn": torch.compiler.keep_tensor_guards_unsafe}
        update_minibatch = torch.compile(update_minibatch, fullgraph=True, options=options)
    # compile: an epoch becomes one graph: its first two calls only run, its third records, all later ones replay
    if args.cudagraphs and device.type == "cuda":
        update_epoch = CudaGraphModule(update_epoch, warmup=3)
    elif args.cudagraphs:
        print("CUDA graphs are off: the networks learn on the CPU", file=sys.stderr)

    run = Run(args, checkpoint)
    statistics = EpisodeStatistics(num_envs)
    obs = np.zeros((args.num_steps + 1, num_envs, pool.obs_dim), dtype=np.float32)
    action_shape, action_type = ((), np.int64) if agent.is_discrete else (low.shape, np.float32)
    action = np.zeros((args.num_steps, num_envs, *action_shape), dtype=action_type)
    reward = np.zeros((args.num_steps, num_envs), dtype=np.float32)
    terminated, truncated, lost, done = np.zeros((4, args.num_steps, num_envs), dtype=bool)
    obs[-1] = pool.reset()
    for iteration in range(first_iteration, num_iterations):
        if args.anneal_lr:
            optimizer.learning_rate.fill_(args.learning_rate * (1 - iteration / num_iterations))

        # Collect. Each environment has its own t. The learner gets values and log-probabilities later, all at once, by
        # the same weights
        if collector is not agent:
            collector.load_state_dict(agent.state_dict())
        noise = collector.noise(args.num_steps, num_envs)
        valid = np.empty_like(done)
        valid[0] = ~done[-1]
        obs[0] = obs[-1]
        ready, count = np.arange(num_envs), np.zeros(num_envs, dtype=int)
        while count.min() < args.num_steps:
            t = count[ready]
            sample = policy(obs[t, ready]) + noise[t, ready]
            action[t, ready] = sample.argmax(1) if agent.is_discrete else sample
            pool.send(space.start + action[t, ready] if agent.is_discrete else sample.clip(low, high), ready)
            *rows, ready = pool.recv(args.ready_batch or num_envs)
            t = count[ready]
            obs[t + 1, ready], reward[t, ready], terminated[t, ready], truncated[t, ready], lost[t, ready] = rows
            count[ready] += 1
            ready = ready[count[ready] < args.num_steps]
        done = terminated | truncated
        valid[1:] = ~done[:-1]
        valid &= ~lost  # like a reset, the loss of an environment ends its episode before this row, without a flag
        ended = statistics.update(reward, done | lost, valid)
        episodes = [x for x, was_lost in zip(ended, lost[done | lost], strict=True) if not was_lost]
        global_step += int(valid.sum())

        # Estimate advantages
        rollout = (obs, action, reward, terminated, truncated, valid)
        *batch, explained_variance = estimate(*(torch.from_numpy(x).to(device, torch.float32) for x in rollout))

        # Learn
        for _ in range(args.update_epochs):
            permutation = torch.randperm(batch_size, device=device).view(args.num_minibatches, -1)
            losses = update_epoch(permutation, *batch)
            if args.target_kl is not None and losses[METRICS.index("losses/approx_kl")] > args.target_kl:
                break

        # Log
        values = torch.stack([*losses, explained_variance, optimizer.learning_rate]).tolist()
        metrics = dict(zip(METRICS, values, strict=True)) | {"pool/worker_restarts": pool.restarts}
        run.log(global_step, metrics, episodes)
        is_last = run.stopped_by is not None or iteration == num_iterations - 1
        if run.needs_checkpoint(is_last):
            run.save(iteration=iteration + 1, **{name: part.state_dict() for name, part in state.items()})
        if is_last:
            break
    pool.close()
    run.close()
    return run.dir


if __name__ == "__main__":
    train(tyro.cli(Args))
