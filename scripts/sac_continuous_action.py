# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0", "tensordict==0.15.3", "gymnasium[mujoco]==1.4.0", "envpool==1.2.5",
#     "tyro==1.0.17", "numpy==2.4.6", "tqdm==4.70.1", "tensorboard==2.21.0",
# ]
# ///
"""Soft Actor-Critic (SAC) for continuous actions.

Haarnoja et al. (2018), "Soft Actor-Critic Algorithms and Applications", https://arxiv.org/abs/1812.05905, whose
equations are meant below.

    python sac_continuous_action.py --env-id HalfCheetah-v4 --seed 1

Its compiled twin is `sac_continuous_action_torchcompile.py`; the diff of the two shows all that compiling takes.
Shapes: N = num_envs, B = batch_size, O = size of an observation, A = of an action, P = number of parameters.

Departures from CleanRL's script of the same name, whose settings these are: rows in which environments reset themselves
are neither stored nor counted; there is one update for every step that is left, however many environments take them;
the log-probability of a squashed action is exact, without a 1e-6 that keeps its logarithm from infinity.
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
import torch.nn.functional as F
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
    resume: str | None = None  # folder of a run to go on with, by its own settings, from its checkpoint
    checkpoint_every: int | None = None  # environment steps between checkpoints; by default a tenth of the run
    log_every: int = 1_000  # environment steps between two lines of the log
    tensorboard: bool = True  # write TensorBoard events beside metrics.jsonl
    track: bool = False  # send the TensorBoard events to Weights & Biases too
    wandb_project_name: str = "flatout"  # the project there
    wandb_entity: str | None = None  # the team there

    # environment
    env_id: str = "HalfCheetah-v4"  # any id of Gymnasium (module:Env-v0 too) or EnvPool with Box actions
    env_backend: Literal["auto", "envpool", "gymnasium"] = "auto"  # auto: EnvPool for several environments it knows
    sync_envs: bool = False  # step several environments in this process: best where a step takes microseconds
    total_timesteps: int = 1_000_000  # environment steps in the whole run
    num_envs: int = 1  # environments side by side

    # SAC
    buffer_size: int = 1_000_000  # transitions kept for replay
    save_replay: bool = True  # keep them in the checkpoint too, so that a resumed run learns from the same data
    gamma: float = 0.99  # discount factor
    tau: float = 0.005  # target networks: target <- (1 - tau) * target + tau * online
    batch_size: int = 256  # transitions in one update
    learning_starts: int = 5_000  # environment steps before the first update
    policy_lr: float = 3e-4  # learning rate of the actor
    q_lr: float = 1e-3  # learning rate of the critics, and of the temperature
    policy_frequency: int = 2  # critic updates from one update of the actor to the next
    target_network_frequency: int = 1  # updates between two of the target networks
    gradient_steps: int | None = None  # updates after each step of all environments; by default one for each transition
    alpha: float = 0.2  # temperature, the weight of the entropy, if it is not tuned
    autotune: bool = True  # tune the temperature so that the policy's entropy comes to -A
    matmul_precision: Literal["highest", "high", "medium"] = "highest"  # of float32: lower is faster and coarser


METRICS = (
    "losses/qf1_values", "losses/qf2_values", "losses/qf1_loss", "losses/qf2_loss", "losses/qf_loss",
    "losses/actor_loss", "losses/alpha", "losses/alpha_loss",
)  # fmt: skip


class Actor(nn.Module):
    """Gaussian policy, squashed by tanh into the bounds of the action space, which may differ by dimension."""

    def __init__(self, obs_dim: int, action_space: gym.spaces.Box):
        super().__init__()
        low, high = (torch.tensor(x.reshape(-1), dtype=torch.float32) for x in (action_space.low, action_space.high))
        self.register_buffer("center", (high + low) / 2)
        self.register_buffer("scale", (high - low) / 2)
        self.net = nn.Sequential(
            nn.Linear(obs_dim, 256), nn.ReLU(inplace=True),
            nn.Linear(256, 256), nn.ReLU(inplace=True),
            nn.Linear(256, 2 * len(low)),
        )  # fmt: skip

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Observation (B, O) -> mean and log std of the action before it is squashed, both (B, A)."""
        mean, squashed_log_std = self.net(obs).chunk(2, dim=1)
        return mean, -5 + 3.5 * (squashed_log_std.tanh() + 1)  # within -5 and 2

    def sample(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Observation (B, O) -> random action (B, A) and its log-probability (B,)."""
        mean, log_std = self(obs)
        noise = torch.randn_like(mean)
        x = mean + log_std.exp() * noise
        return self.center + self.scale * x.tanh(), squashed_log_prob(x, noise, log_std, self.scale)


def squashed_log_prob(x: Tensor, noise: Tensor, log_std: Tensor, scale: Tensor) -> Tensor:
    """Log-density of scale * tanh(x), x = mean + exp(log_std) * noise: (B, A), but scale (A,) -> (B,). Equation (26).

    log(1 - tanh(x)^2) is written as 2 (log 2 - x - softplus(-2 x)), which is finite and exact for any x.
    """
    normal = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
    squash = 2 * (math.log(2) - x - F.softplus(-2 * x)) + scale.log()
    return (normal - squash).sum(1)


class Critic(nn.Module):
    """Action value: observation (B, O), action (B, A) -> Q (B,)."""

    def __init__(self, obs_dim: int, action_dim: int):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(obs_dim + action_dim, 256), nn.ReLU(inplace=True),
            nn.Linear(256, 256), nn.ReLU(inplace=True),
            nn.Linear(256, 1),
        )  # fmt: skip

    def forward(self, obs: Tensor, action: Tensor) -> Tensor:
        return self.net(torch.cat([obs, action], dim=1)).squeeze(1)


class Temperature(nn.Module):
    """The weight alpha > 0 of the entropy, as the exponential of a parameter."""

    def __init__(self, alpha: float):
        super().__init__()
        self.log_alpha = nn.Parameter(torch.tensor(math.log(alpha)))

    def forward(self) -> Tensor:
        return self.log_alpha.exp()


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


def free_memory(device: torch.device) -> float:
    """Bytes that can be allocated on the device; infinite where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if not Path("/proc/meminfo").exists():
        return math.inf
    kilobytes = dict(line.split()[:2] for line in Path("/proc/meminfo").read_text().splitlines())
    return 1024 * int(kilobytes["MemAvailable:"])


class ReplayBuffer(nn.Module):
    """The last `capacity` transitions, each a row of observation (O), action (A), reward, next observation, terminated.

    One piece takes one copy to write and one gather to sample. The number of rows is a tensor on the device, so
    that a graph which samples reads its present value.
    """

    def __init__(self, capacity: int, obs_dim: int, action_dim: int, device: torch.device):
        super().__init__()
        self.widths, self.position = (obs_dim, action_dim, 1, obs_dim, 1), 0
        need, free = 4 * capacity * sum(self.widths), free_memory(device)
        if need > free:
            fail(f"--buffer-size {capacity} needs {need / 2**30:.2f} GiB; {free / 2**30:.2f} are free on {device}")
        print(f"replay buffer: {need / 2**30:.2f} GiB on {device}", file=sys.stderr)
        self.rows = torch.zeros(capacity, sum(self.widths), device=device)
        self.size = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, rows: Tensor) -> None:
        """Write rows (K, width), K <= capacity, over the oldest ones."""
        for part in rows.split(len(self.rows) - self.position):  # two parts where the end of the buffer is reached
            self.rows[self.position : self.position + len(part)] = part
            self.position = (self.position + len(part)) % len(self.rows)
        self.size.add_(len(rows)).clamp_(max=len(self.rows))

    def sample(self, batch_size: int) -> tuple[Tensor, ...]:
        """Rows drawn with replacement: observation (B, O), action (B, A), reward (B,), next observation, terminated."""
        index = torch.randint(2**40, (batch_size,), device=self.rows.device) % self.size
        obs, action, reward, next_obs, terminated = self.rows[index].split(self.widths, dim=1)
        return obs, action, reward.squeeze(1), next_obs, terminated.squeeze(1)

    def state_dict(self) -> dict:
        return {"rows": self.rows[: int(self.size)].to("cpu", copy=True), "position": self.position}

    def load_state_dict(self, state: dict) -> None:
        self.add(state["rows"])
        self.position = state["position"]


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


@torch.no_grad()
def move_towards(target: nn.Module, online: nn.Module, tau: float = 1.0) -> None:
    """Each parameter of `target` becomes (1 - tau) times itself plus tau times that of `online`: for tau = 1 a copy."""
    torch._foreach_lerp_(list(target.parameters()), list(online.parameters()), tau)


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
    """The deterministic policy of a checkpoint: observation (N, O) -> the squashed mean of the action (N, A)."""
    actor = Actor(envs.obs_dim, envs.action_space)
    actor.load_state_dict(checkpoint["actor"])
    mean, center, scale = numpy_mlp(actor.net), actor.center.numpy(), actor.scale.numpy()
    return lambda obs: center + scale * np.tanh(mean(obs.astype(np.float32))[:, : len(center)])


def train(args: Args) -> Path:
    """Train from the start, or from a checkpoint, to the end; returns the run's folder. Wrong input: SystemExit(2)."""
    args, checkpoint = load_checkpoint(args)
    device = validate(args)
    if args.checkpoint_every is not None and args.checkpoint_every < args.log_every:
        fail(f"--checkpoint-every must be at least --log-every, {args.log_every}: they are written at the same steps")
    if args.alpha == 0 and not args.autotune:
        fail("--alpha must be more than 0")
    if args.buffer_size < args.num_envs:
        fail(f"--buffer-size {args.buffer_size} is less than what one step of {args.num_envs} environments brings")
    global_step = checkpoint["global_step"] if checkpoint else 0

    random.seed(args.seed)
    np.random.seed(args.seed % 2**32)
    torch.manual_seed(args.seed)
    torch.set_num_threads(min(4, len(os.sched_getaffinity(0))))  # more than four only wait for each other here
    torch.set_float32_matmul_precision(args.matmul_precision)
    # Adam's moments of dead ReLUs decay to numbers so small that a CPU stumbles on them. Set before the first work that
    # is shared, since threads take it over from the one that starts them
    torch.set_flush_denormal(True)
    seeds = np.random.SeedSequence([args.seed, global_step]).generate_state(args.num_envs) >> 1  # EnvPool takes 31 bits
    envs = Envs(args, seeds.tolist())
    if not isinstance(envs.action_space, gym.spaces.Box) or not envs.action_space.is_bounded():
        fail(f"{args.env_id} has actions {envs.action_space}; this script is for a Box with finite bounds")
    low, high = envs.action_space.low.reshape(-1), envs.action_space.high.reshape(-1)
    action_dim = len(low)

    actor = Actor(envs.obs_dim, envs.action_space).to(device)
    critics = nn.ModuleList([Critic(envs.obs_dim, action_dim), Critic(envs.obs_dim, action_dim)]).to(device)
    temperature = Temperature(1.0 if args.autotune else args.alpha).to(device)

    def q_values(critics, obs: Tensor, action: Tensor) -> Tensor:
        """The value according to each critic: observation (B, O), action (B, A) -> (2, B)."""
        return torch.stack([critic(obs, action) for critic in critics])

    target_critics = deepcopy(critics)
    actor_optimizer, critic_optimizer = Adam(actor, args.policy_lr), Adam(critics, args.q_lr)
    alpha_optimizer = Adam(temperature, args.q_lr)
    buffer = ReplayBuffer(args.buffer_size, envs.obs_dim, action_dim, device)
    state = {"actor": actor, "critics": critics, "target_critics": target_critics, "temperature": temperature}
    state |= {"actor_optimizer": actor_optimizer, "critic_optimizer": critic_optimizer}
    state["alpha_optimizer"] = alpha_optimizer
    if args.save_replay:
        state["buffer"] = buffer
    if checkpoint:
        for name, part in state.items():
            part.load_state_dict(checkpoint[name])
        set_rng_state(checkpoint["rng"])

    @torch.no_grad()
    def act(obs: Tensor) -> Tensor:
        """Observation (N, O) -> an action drawn from the policy (N, A)."""
        return actor.sample(obs)[0]

    def update_critics() -> tuple[Tensor, ...]:
        """One step on the soft Bellman error of both critics, equation (5) -> the batch's observations, 5 metrics."""
        obs, action, reward, next_obs, terminated = buffer.sample(args.batch_size)
        with torch.no_grad():
            next_action, next_log_prob = actor.sample(next_obs)
            next_q = q_values(target_critics, next_obs, next_action).amin(0) - temperature() * next_log_prob
            target_q = reward + args.gamma * (1 - terminated) * next_q
        q = q_values(critics, obs, action)
        critic_losses = (q - target_q).square().mean(1)
        critic_optimizer.step(torch.autograd.grad(critic_losses.sum(), critic_optimizer.weights))
        if args.target_network_frequency == 1:  # after each update, it is part of it
            move_towards(target_critics, critics, args.tau)
        return obs, *q.detach().mean(1), *critic_losses.detach(), critic_losses.detach().mean()

    def update_actor(obs: Tensor) -> tuple[Tensor, ...]:
        """One step up the soft value of the policy's actions, equation (7), and one of the temperature, (18)."""
        action, log_prob = actor.sample(obs)
        actor_loss = (temperature().detach() * log_prob - q_values(critics, obs, action).amin(0)).mean()
        actor_optimizer.step(torch.autograd.grad(actor_loss, actor_optimizer.weights))
        alpha, alpha_loss = temperature(), torch.zeros_like(actor_loss)
        if args.autotune:
            with torch.no_grad():
                entropy_gap = actor.sample(obs)[1] - action_dim
            alpha_loss = -(alpha * entropy_gap).mean()
            alpha_optimizer.step(torch.autograd.grad(alpha_loss, alpha_optimizer.weights))
        return actor_loss.detach(), alpha.detach(), alpha_loss.detach()

    def update() -> None:
        """The critics' step alone: what most updates are."""
        update_critics()

    def update_all() -> Tensor:
        """The critics' step, then as many of the actor as it has missed, on the same observations -> `METRICS`."""
        obs, *critic_metrics = update_critics()
        for _ in range(args.policy_frequency):
            actor_metrics = update_actor(obs)
        return torch.stack([*critic_metrics, *actor_metrics])

    run = Run(args, checkpoint)
    losses, episodes = None, []
    episode_return, episode_length = np.zeros(args.num_envs), np.zeros(args.num_envs, dtype=int)
    obs, done = envs.reset(), np.zeros(args.num_envs, dtype=bool)
    learning_starts = args.learning_starts + (global_step if checkpoint and not args.save_replay else 0)
    num_updates = checkpoint["num_updates"] if checkpoint else 0
    while global_step < args.total_timesteps:
        # Act, at random until learning starts
        if global_step < args.learning_starts:
            action = np.random.uniform(low, high, (args.num_envs, action_dim)).astype(np.float32)
        else:
            action = act(torch.from_numpy(obs.astype(np.float32)).to(device)).cpu().numpy()

        # Step the environment. A truncated episode still has a future: only `terminated` is stored
        next_obs, reward, terminated, truncated = envs.step(action)
        columns = (obs, action, reward[:, None], next_obs, terminated[:, None])
        rows = np.concatenate(columns, axis=1, dtype=np.float32)[~done]  # where an episode had ended, this was a reset
        global_step += len(rows)
        episode_return += reward
        episode_length += ~done
        obs, done = next_obs, terminated | truncated
        for i in done.nonzero()[0]:
            episodes.append((float(episode_return[i]), int(episode_length[i])))
            episode_return[i] = episode_length[i] = 0

        # Learn
        buffer.add(torch.from_numpy(rows).to(device))
        num_gradient_steps = len(rows) if args.gradient_steps is None else args.gradient_steps
        for _ in range(num_gradient_steps if global_step > learning_starts else 0):
            num_updates += 1
            if num_updates % args.policy_frequency == 0:
                losses = update_all()
            else:
                update()
            if args.target_network_frequency > 1 and num_updates % args.target_network_frequency == 0:
                move_towards(target_critics, critics, args.tau)

        # Log
        is_last = run.stopped_by is not None or global_step >= args.total_timesteps
        if (is_last and global_step > run.step) or global_step // args.log_every > run.step // args.log_every:
            metrics = {} if losses is None else dict(zip(METRICS, losses.tolist(), strict=True))
            run.log(global_step, metrics, episodes)
            episodes = []
        if run.needs_checkpoint(is_last):
            run.save(num_updates=num_updates, **{name: part.state_dict() for name, part in state.items()})
        if is_last:
            break
    envs.close()
    run.close()
    return run.dir


if __name__ == "__main__":
    train(tyro.cli(Args))
