# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0", "tensordict==0.15.3", "gymnasium[mujoco]==1.4.0", "envpool==1.2.5",
#     "tyro==1.0.17", "numpy==2.4.6", "tqdm==4.70.1", "tensorboard==2.21.0",
# ]
# ///
"""Proximal Policy Optimization (PPO) for discrete actions, compiled.

Schulman et al. (2017), "Proximal Policy Optimization Algorithms", https://arxiv.org/abs/1707.06347, whose equations are
meant below; advantages by Schulman et al. (2016), "High-Dimensional Continuous Control Using Generalized Advantage
Estimation", https://arxiv.org/abs/1506.02438.

    python ppo_torchcompile.py --env-id CartPole-v1 --seed 1

Its eager twin is `ppo.py`; the diff of the two shows all that compiling takes.
Shapes: T = num_steps, N = num_envs, B = T * N, M = rows of a minibatch, O = size of an observation, A = number of
actions, P = number of parameters.

Departures from CleanRL's script of the same name, whose settings these are: a truncated episode bootstraps from the
value of its last observation, and the rows in which environments reset themselves are masked; --target-kl looks at the
mean over an epoch.
"""

import difflib
import importlib.util
import json
import math
import multiprocessing
import os
import platform
import random
import signal
import subprocess
import sys
import time
from collections import deque
from copy import deepcopy
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Literal, NoReturn

import gymnasium as gym
import numpy as np
import torch
import tyro
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
    env_id: str = "CartPole-v1"  # any id of Gymnasium (module:Env-v0 too) or EnvPool with Discrete actions
    env_backend: Literal["auto", "envpool", "gymnasium"] = "auto"  # auto: EnvPool for several environments it knows
    sync_envs: bool = False  # step several environments in this process: best where a step takes microseconds
    total_timesteps: int = 500_000  # environment steps in the whole run, rounded down to whole rollouts
    num_envs: int = 4  # environments side by side

    # PPO
    num_steps: int = 128  # steps of each environment in a rollout
    learning_rate: float = 2.5e-4  # of Adam
    anneal_lr: bool = True  # lower the learning rate linearly to zero
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    num_minibatches: int = 4  # gradient steps in an epoch
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


class ActorCritic(nn.Module):
    """Categorical policy and value: observation (B, O) -> log-probabilities of the actions (B, A), value (B,)."""

    def __init__(self, obs_dim: int, num_actions: int):
        super().__init__()
        self.actor = mlp(obs_dim, num_actions, output_gain=0.01)
        self.critic = mlp(obs_dim, 1, output_gain=1.0)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(obs).log_softmax(1), self.critic(obs).squeeze(1)


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


class SyncEnvs:
    """Environments stepped in turn in this process; for a single one, a step takes 14 us less than in SyncVectorEnv."""

    def __init__(self, env_fns: list):
        self.envs = [env_fn() for env_fn in env_fns]
        self.single_observation_space = self.envs[0].observation_space
        self.single_action_space = self.envs[0].action_space
        self.done = np.zeros(len(env_fns), dtype=bool)

    def reset(self, seed: list[int]):
        rows = [flatten(env.reset(seed=env_seed)[0], 1) for env, env_seed in zip(self.envs, seed, strict=True)]
        return np.concatenate(rows), {}

    def step(self, action: np.ndarray):
        rows, reward = [], np.zeros(len(action))
        terminated, truncated = np.zeros((2, len(action)), dtype=bool)
        for i, env in enumerate(self.envs):
            if self.done[i]:
                obs, _ = env.reset()
            else:
                obs, reward[i], terminated[i], truncated[i], _ = env.step(action[i])
            rows.append(flatten(obs, 1))
        self.done = terminated | truncated
        return np.concatenate(rows), reward, terminated, truncated, {}

    def close(self) -> None:
        for env in self.envs:
            env.close()


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


class Envs:
    """N environments side by side: flat observations (N, O); actions (N, A), or (N,) where they are discrete.

    Autoreset is one step late, whatever the backend: the observation at an episode's end is its true last one, and the
    next step ignores its action, resets that environment and returns reward 0. This row is no step of the environment.
    """

    def __init__(self, args: Args, seeds: list[int]):
        self.num_envs, self.seeds = args.num_envs, seeds
        in_process = args.sync_envs or args.num_envs == 1
        self.backend = choose_backend(args.env_id, args.env_backend, in_process)
        try:
            if self.backend == "envpool":
                import envpool

                threads = min(args.num_envs, len(os.sched_getaffinity(0)))  # EnvPool's default ignores the affinity
                self.vector = envpool.make_gymnasium(args.env_id, num_envs=len(seeds), seed=seeds, num_threads=threads)
                self.observation_space, self.action_space = self.vector.observation_space, self.vector.action_space
            else:
                env_fns = [partial(make_env, args.env_id)] * args.num_envs
                workers = partial(gym.vector.AsyncVectorEnv, context="forkserver")
                self.vector = (SyncEnvs if in_process else workers)(env_fns)
                self.observation_space = self.vector.single_observation_space
                self.action_space = self.vector.single_action_space
        except (gym.error.Error, ImportError) as error:
            fail(f"can't make environment {args.env_id}: {error}")
        self.obs_dim = flat_size(self.observation_space)
        self.action_shape = (args.num_envs, *self.action_space.shape)

    def reset(self) -> np.ndarray:
        """Start an episode in each environment -> observation (N, O)."""
        obs, _ = self.vector.reset() if self.backend == "envpool" else self.vector.reset(seed=self.seeds)
        return flatten(obs, self.num_envs)

    def step(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Step each environment: action -> observation (N, O), reward (N,), terminated (N,), truncated (N,)."""
        try:
            obs, reward, terminated, truncated, _ = self.vector.step(action.reshape(self.action_shape))
        except (EOFError, ConnectionError):  # the pipe to a worker process has lost its other end
            self.vector.closed = True  # else, at exit, it would wait for the answer of the dead
            time.sleep(0.1)  # until its exit code is there
            dead = [f"{i} (exit code {p.exitcode})" for i, p in enumerate(self.vector.processes) if not p.is_alive()]
            sys.exit(f"error: environment worker {', '.join(dead)} died; the last checkpoint is kept")
        return flatten(obs, self.num_envs), reward, terminated, truncated

    def close(self) -> None:
        self.vector.close()


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


def load_policy(checkpoint: dict, envs: Envs):
    """The deterministic policy of a checkpoint: observation (N, O) -> the most probable action (N,)."""
    agent = ActorCritic(envs.obs_dim, int(envs.action_space.n))
    agent.load_state_dict(checkpoint["agent"])
    policy = numpy_mlp(agent.actor)
    return lambda obs: envs.action_space.start + policy(obs.astype(np.float32)).argmax(1)


def train(args: Args) -> Path:
    """Train from the start, or from a checkpoint, to the end; returns the run's folder. Wrong input: SystemExit(2)."""
    args, checkpoint = load_checkpoint(args)
    device = validate(args)
    batch_size = args.num_envs * args.num_steps
    num_iterations = args.total_timesteps // batch_size
    if batch_size % args.num_minibatches:
        fail(f"num_envs * num_steps = {batch_size} rows can't be divided into {args.num_minibatches} equal minibatches")
    if num_iterations == 0:
        fail(f"--total-timesteps {args.total_timesteps} is less than one rollout, {batch_size} steps")
    first_iteration, global_step = (checkpoint["iteration"], checkpoint["global_step"]) if checkpoint else (0, 0)

    random.seed(args.seed)
    np.random.seed(args.seed % 2**32)
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # networks of this size lose by a second thread
    seeds = np.random.SeedSequence([args.seed, global_step]).generate_state(args.num_envs) >> 1  # EnvPool takes 31 bits
    envs = Envs(args, seeds.tolist())
    if not isinstance(envs.action_space, gym.spaces.Discrete):
        fail(f"{args.env_id} has actions {envs.action_space}; this script is for Discrete, not for Box actions")
    num_actions, first_action = int(envs.action_space.n), int(envs.action_space.start)

    agent = ActorCritic(envs.obs_dim, num_actions).to(device)
    optimizer = Adam(agent, args.learning_rate, eps=1e-5)
    state = {"agent": agent, "optimizer": optimizer}
    if checkpoint:
        for name, part in state.items():
            part.load_state_dict(checkpoint[name])
        set_rng_state(checkpoint["rng"])

    # A single observation is too little work for a GPU, or for PyTorch: the policy collects on the CPU, in NumPy
    collector = agent if device.type == "cpu" else deepcopy(agent).cpu()
    policy = numpy_mlp(collector.actor)

    @torch.no_grad()
    def estimate(obs: Tensor, action: Tensor, reward: Tensor, terminated: Tensor, truncated: Tensor, valid: Tensor):
        """From a rollout, all (T, N, ...) but obs (T + 1, N, O), the rows (B, ...) to learn; and explained variance."""
        log_probs, value = agent(obs.flatten(0, 1))
        value = value.view(-1, args.num_envs)
        log_prob = log_probs[: -args.num_envs].gather(1, action.long().view(-1, 1)).squeeze(1)
        advantage = gae(reward, value, terminated, truncated, valid, args.gamma, args.gae_lambda)
        returns = advantage + value[:-1]
        explained_variance = 1 - (masked_std(advantage, valid) / (masked_std(returns, valid) + 1e-8)).square()
        rows = (obs[:-1], action, value[:-1], advantage, returns, valid)
        return log_prob, *(x.flatten(0, 1) for x in rows), explained_variance

    def update_minibatch(index: Tensor, *batch: Tensor) -> Tensor:
        """One step of Adam on the rows `index` (M,) of the batch -> the first six `METRICS`."""
        old_log_prob, obs, action, old_value, advantage, returns, valid = (x[index] for x in batch)
        log_probs, value = agent(obs)
        log_ratio = log_probs.gather(1, action.long().unsqueeze(1)).squeeze(1) - old_log_prob
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
        entropy = -masked_mean((log_probs.exp() * log_probs).sum(1), valid)
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
    statistics = EpisodeStatistics(args.num_envs)
    obs = np.zeros((args.num_steps + 1, args.num_envs, envs.obs_dim), dtype=np.float32)
    action = np.zeros((args.num_steps, args.num_envs), dtype=np.int64)
    reward = np.zeros((args.num_steps, args.num_envs), dtype=np.float32)
    terminated, truncated, done = np.zeros((3, args.num_steps, args.num_envs), dtype=bool)
    obs[-1] = envs.reset()
    for iteration in range(first_iteration, num_iterations):
        if args.anneal_lr:
            optimizer.learning_rate.fill_(args.learning_rate * (1 - iteration / num_iterations))

        # Collect. Gumbel noise makes the argmax a sample (the Gumbel-max trick). The learner gets values and
        # log-probabilities later, all at once, by the same weights
        if collector is not agent:
            collector.load_state_dict(agent.state_dict())
        noise = -torch.empty(*action.shape, num_actions).exponential_().log().numpy()
        valid = np.empty_like(done)
        valid[0] = ~done[-1]
        obs[0] = obs[-1]
        for t in range(args.num_steps):
            action[t] = (policy(obs[t]) + noise[t]).argmax(1)
            obs[t + 1], reward[t], terminated[t], truncated[t] = envs.step(first_action + action[t])
        done = terminated | truncated
        valid[1:] = ~done[:-1]
        episodes = statistics.update(reward, done, valid)
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
        run.log(global_step, dict(zip(METRICS, values, strict=True)), episodes)
        is_last = run.stopped_by is not None or iteration == num_iterations - 1
        if run.needs_checkpoint(is_last):
            run.save(iteration=iteration + 1, **{name: part.state_dict() for name, part in state.items()})
        if is_last:
            break
    envs.close()
    run.close()
    return run.dir


if __name__ == "__main__":
    train(tyro.cli(Args))
