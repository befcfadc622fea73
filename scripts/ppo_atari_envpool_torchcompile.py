# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0", "tensordict==0.15.3", "gymnasium[mujoco]==1.4.0", "envpool==1.2.5",
#     "tyro==1.0.17", "numpy==2.4.6", "tqdm==4.70.1", "tensorboard==2.21.0",
# ]
# ///
"""Proximal Policy Optimization (PPO) for Atari games on EnvPool, compiled.

Schulman et al. (2017), "Proximal Policy Optimization Algorithms", https://arxiv.org/abs/1707.06347, whose equations are
meant below; advantages by Schulman et al. (2016), "High-Dimensional Continuous Control Using Generalized Advantage
Estimation", https://arxiv.org/abs/1506.02438; network by Mnih et al. (2015), "Human-level control through deep
reinforcement learning", https://doi.org/10.1038/nature14236.

    python ppo_atari_envpool_torchcompile.py --env-id Breakout-v5 --seed 1

Its eager twin is `ppo_atari_envpool.py`; the diff of the two shows all that compiling takes.
Shapes: T = num_steps, N = num_envs, n = environments of a pool, B = T * N, M = rows of a minibatch, F = frames,
A = number of actions, P = number of parameters.

Departures from CleanRL's script of the same name, whose settings these are: a truncated game bootstraps from the value
of its last observation, and the rows in which games reset themselves are masked; a return is the score of a whole game,
be it terminated or truncated; --target-kl looks at the mean over an epoch.
"""

import ctypes
import difflib
import importlib.util
import json
import math
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
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Literal, NoReturn

import envpool
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
    env_id: str = "Breakout-v5"  # any Atari game of EnvPool
    total_timesteps: int = 10_000_000  # environment steps in the whole run, rounded down to whole rollouts
    num_envs: int = 8  # environments side by side
    async_envs: bool = True  # one half of an even number of games plays on while the policy acts for the other half
    episodic_life: bool = True  # to learn, a lost life ends an episode; scores are of whole games
    reward_clip: bool = True  # to learn, rewards are cut down to their sign; scores are not
    frame_skip: int = 4  # frames that an action lasts
    repeat_action_probability: float = 0.0  # of a sticky action: the one before is taken instead
    full_action_space: bool = False  # all 18 actions, not just those of use in the game

    # PPO
    num_steps: int = 128  # steps of each environment in a rollout
    learning_rate: float = 2.5e-4  # of Adam
    anneal_lr: bool = True  # lower the learning rate linearly to zero
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    num_minibatches: int = 4  # gradient steps in an epoch
    update_epochs: int = 4  # passes over each rollout
    norm_adv: bool = True  # normalize the advantages within each minibatch
    clip_coef: float = 0.1  # epsilon of the clipped objective
    clip_vloss: bool = True  # clip the value function's change in the same way
    ent_coef: float = 0.01  # weight of the entropy bonus, c2 in the paper
    vf_coef: float = 0.5  # weight of the value loss, c1 in the paper
    max_grad_norm: float = 0.5  # the gradient is scaled down to this norm
    target_kl: float | None = None  # no more epochs on a rollout once the policy moved further than this
    matmul_precision: Literal["highest", "high", "medium"] = "highest"  # of float32: lower is faster and coarser
    bf16: bool = False  # compute the network in bfloat16; its weights and the loss stay in float32

    # compile: two switches, to see what each of the two steps gives
    compile: bool = True  # fuse the operations of a minibatch's update, from gather to Adam, into a few kernels
    cudagraphs: bool = True  # on CUDA, replay a step of the policy, and an epoch, each as one graph in one launch


METRICS = (
    "losses/policy_loss", "losses/value_loss", "losses/entropy", "losses/old_approx_kl", "losses/approx_kl",
    "losses/clipfrac", "losses/explained_variance", "charts/learning_rate",
)  # fmt: skip


def space_to_depth(frames: Tensor) -> Tensor:
    """Make one pixel of 16 channels from each block of 4 x 4 pixels: (B, F, 84, 84) -> (B, 21, 21, 16 * F)."""
    lines = frames.view(torch.int32).view(len(frames), -1, 21, 4, 21)  # four bytes at a time
    return lines.permute(0, 2, 4, 1, 3).contiguous().view(torch.uint8).flatten(3)


def push_frame(stack: Tensor, frame: Tensor, is_first: Tensor) -> Tensor:
    """The stack (B, 21, 21, 64) of the four frames after a new one (B, 21, 21, 16); a game's first frame fills it."""
    stack, frame = stack.view(torch.int64), frame.view(torch.int64)  # eight bytes at a time
    pushed, filled = torch.cat([stack[..., 2:], frame], 3), torch.cat([frame] * 4, 3)
    return torch.where(is_first.view(-1, 1, 1, 1), filled, pushed).view(torch.uint8)


class ActorCritic(nn.Module):
    """Policy and value: four frames (B, 21, 21, 64) of bytes -> log-probabilities of actions (B, A), value (B,).

    The Nature CNN. Its first layer, 8 x 8 pixels with stride 4, is one of 2 x 2 with stride 1 on frames whose pixels
    are moved into channels; shuffled like this, orthogonal weights are orthogonal. All of an update takes half the time
    so, as 64 channels of bytes lie side by side in memory; 4 would have to be gathered from four frames.
    """

    def __init__(self, num_actions: int, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.dtype = dtype
        self.conv1, self.conv2, self.conv3 = nn.Conv2d(64, 32, 2), nn.Conv2d(32, 64, 4, stride=2), nn.Conv2d(64, 64, 3)
        self.hidden = nn.Linear(7 * 7 * 64, 512)
        self.actor, self.critic = nn.Linear(512, num_actions), nn.Linear(512, 1)
        gains = {self.actor: 0.01, self.critic: 1.0}
        for layer in self.children():
            nn.init.orthogonal_(layer.weight, gains.get(layer, math.sqrt(2)))
            nn.init.zeros_(layer.bias)
        self.to(memory_format=torch.channels_last)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(obs.device.type, self.dtype, enabled=self.dtype != torch.float32):
            x = obs.permute(0, 3, 1, 2).to(self.dtype)  # bytes are exact in bfloat16, too
            # Pixels from 0 to 1: it takes less to divide the weights
            x = nn.functional.conv2d(x, self.conv1.weight / 255, self.conv1.bias).relu()
            x = self.conv3(self.conv2(x).relu()).relu()
            x = self.hidden(x.permute(0, 2, 3, 1).flatten(1)).relu()
            logits, value = self.actor(x), self.critic(x)
        return logits.float().log_softmax(1), value.float().squeeze(1)


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


class Envs:
    """N Atari games in pools of n, one or two, which step independently of each other.

    Autoreset is one step late: the observation at an episode's end is its true last one, and the next step ignores its
    action, resets that game and returns reward 0. This row is no step of the environment. If only a life was lost, the
    "reset" presses some buttons, and the game goes on.
    """

    def __init__(self, args: Args, seeds: list[int]):
        games = [env_id for env_id, (module, *_) in envpool.registration.registry.specs.items() if "atari" in module]
        if args.env_id not in games:
            near = difflib.get_close_matches(args.env_id, games)
            fail(f"no Atari game {args.env_id} in EnvPool" + bool(near) * f"; close to it: {', '.join(near)}")
        if args.repeat_action_probability > 1:
            fail(f"--repeat-action-probability must be at most 1, not {args.repeat_action_probability}")
        self.num_envs, self.num_pools = len(seeds), 2 if args.async_envs and len(seeds) % 2 == 0 else 1
        names = ("episodic_life", "reward_clip", "frame_skip", "repeat_action_probability", "full_action_space")
        settings = {name: getattr(args, name) for name in names}
        size = settings["num_envs"] = len(seeds) // self.num_pools
        settings["num_threads"] = min(size, len(os.sched_getaffinity(0)))  # EnvPool's default ignores the affinity
        parts = [seeds[i * size : (i + 1) * size] for i in range(self.num_pools)]
        threads = set(os.listdir("/proc/self/task"))
        self.pools = [envpool.make_gymnasium(args.env_id, seed=part, **settings) for part in parts]
        for thread in set(os.listdir("/proc/self/task")) - threads:  # the policy goes first, as all games wait for it
            os.setpriority(os.PRIO_PROCESS, int(thread), os.getpriority(os.PRIO_PROCESS, 0) + 10)
        self.action_space = self.pools[0].action_space

    def reset(self) -> np.ndarray:
        """Start a game in each environment -> first frames (N, 85, 84), as `recv` has them."""
        for pool in self.pools:
            pool.async_reset()
        return np.concatenate([self.recv(pool)[0] for pool in range(self.num_pools)])

    def step(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Step all games, as one who plays and does not learn: action -> frame, points, game over, truncated (N, ...).

        A game over is not truncated, too; a lost life is not even mentioned.
        """
        for pool, part in enumerate(np.split(action, self.num_pools)):
            self.send(pool, part)
        rows = zip(*(self.recv(pool) for pool in range(self.num_pools)), strict=True)
        frame, _, _, truncated, points, game_over = (np.concatenate(parts) for parts in rows)
        return frame, points, game_over & ~truncated, truncated

    def send(self, pool: int, action: np.ndarray) -> None:
        """Let the games of a pool take their actions (n,), and do not wait."""
        self.pools[pool].send(action)

    def recv(self, pool: int) -> tuple[np.ndarray, ...]:
        """Wait for a pool: newest frame (n, 85, 84), then reward, terminated, truncated, points, game over, all (n,).

        The line below a frame is 1 for the first of a game, else 0: one piece is one copy to the device. Points are
        rewards before all clipping; a game that is over may have been truncated.
        """
        obs, reward, terminated, truncated, info = self.pools[pool].recv()
        frame = np.empty((len(obs), 85, 84), dtype=np.uint8)
        frame[:, :84], frame[:, 84] = obs[:, -1], (info["elapsed_step"] == 0)[:, None]
        return frame, reward, terminated, truncated, info["reward"], truncated | (info["terminated"] == 1)

    def close(self) -> None:
        for pool in self.pools:
            pool.close()


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
    """The deterministic policy of a checkpoint: newest frames (N, 85, 84) -> the most probable action (N,).

    It remembers the frames before them.
    """
    agent = ActorCritic(int(envs.action_space.n))
    agent.load_state_dict(checkpoint["agent"])
    stack = torch.zeros(envs.num_envs, 21, 21, 64, dtype=torch.uint8)

    @torch.no_grad()
    def policy(newest: np.ndarray) -> np.ndarray:
        newest = torch.from_numpy(newest)
        stack.copy_(push_frame(stack, space_to_depth(newest[:, :84]), newest[:, 84, 0] == 1))
        return agent(stack)[0].argmax(1).numpy()

    return policy


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
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.set_float32_matmul_precision(args.matmul_precision)
    # Adam's moments of dead ReLUs decay to numbers so small that a CPU stumbles on them. Set before the first work that
    # is shared, since threads take it over from the one that starts them
    torch.set_flush_denormal(True)
    # Memory that is free stays with the process: to fetch the pages of arrays of 30 MB from the kernel anew, at each
    # minibatch and by two threads, took up to half the time of an update
    mallopt, trim_threshold, mmap_max = ctypes.CDLL(None).mallopt, -1, -4  # names and numbers of malloc.h
    mallopt(trim_threshold, -1)
    mallopt(mmap_max, 0)
    torch.backends.cudnn.allow_tf32 = args.matmul_precision != "highest"  # of convolutions
    torch.backends.cudnn.benchmark = True  # the shapes never change: let it find the fastest kernels for them
    seeds = np.random.SeedSequence([args.seed, global_step]).generate_state(args.num_envs) >> 1  # EnvPool takes 31 bits
    envs = Envs(args, seeds.tolist())
    num_actions = int(envs.action_space.n)

    agent = ActorCritic(num_actions, torch.bfloat16 if args.bf16 else torch.float32).to(device)
    optimizer = Adam(agent, args.learning_rate, eps=1e-5)
    state = {"agent": agent, "optimizer": optimizer}
    if checkpoint:
        for name, part in state.items():
            part.load_state_dict(checkpoint[name])
        set_rng_state(checkpoint["rng"])

    # The policy acts by weights that are rounded once a rollout, not at each step
    actor = deepcopy(agent).to(agent.dtype)

    # What a rollout brings stays on the device. Rows are numbered (t + 1) * N + environment: the first N hold the
    # stacks of frames before the rollout, the last N those after it, of which the value is of use
    num_rows = (args.num_steps + 2) * args.num_envs
    rows = torch.arange(args.num_envs, num_rows, device=device).view(args.num_steps + 1, envs.num_pools, -1)
    learnt = slice(args.num_envs, args.num_envs + batch_size)
    obs = torch.zeros(num_rows, 21, 21, 8, dtype=torch.int64, device=device)  # eight bytes at a time
    action = torch.zeros(num_rows, dtype=torch.int64, device=device)
    log_prob, value = torch.zeros(2, num_rows, device=device)
    noise = torch.zeros(num_rows, num_actions, device=device)

    @torch.no_grad()
    def act(newest: Tensor, row: Tensor) -> Tensor:
        """From what `Envs.recv` has of a pool's frames -> sampled actions (n,); keeps all that is to be learnt from.

        The smallest of exponential variables with the probabilities as rates is a sample (as in the Gumbel-max trick).
        """
        frame, is_first = space_to_depth(newest[:, :84]), newest[:, 84, 0] == 1
        stack = push_frame(obs.index_select(0, row - args.num_envs), frame, is_first)
        log_probs, values = actor(stack)
        sample = (log_probs - noise[row].log()).argmax(1)
        obs[row] = stack.view(torch.int64)
        value[row], action[row] = values, sample
        log_prob[row] = log_probs.gather(1, sample.unsqueeze(1)).squeeze(1)
        return sample

    @torch.no_grad()
    def estimate(reward: Tensor, terminated: Tensor, truncated: Tensor, valid: Tensor) -> tuple[Tensor, ...]:
        """From a rollout, all (T, N), what is to be learnt (B,): advantage, return, valid; and explained variance."""
        values = value[args.num_envs :].view(-1, args.num_envs)
        advantage = gae(reward, values, terminated, truncated, valid, args.gamma, args.gae_lambda)
        returns = advantage + values[:-1]
        explained_variance = 1 - (masked_std(advantage, valid) / (masked_std(returns, valid) + 1e-8)).square()
        return advantage.flatten(), returns.flatten(), valid.flatten(), explained_variance

    def update_minibatch(index: Tensor, *estimates: Tensor) -> Tensor:
        """One step of Adam on the rows `index` (M,) of the batch -> the first six `METRICS`."""
        batch = (*estimates, action[learnt], log_prob[learnt], value[learnt])
        advantage, returns, valid, chosen, old_log_prob, old_value = (x[index] for x in batch)
        log_probs, new_value = agent(obs[learnt].index_select(0, index).view(torch.uint8))
        log_ratio = log_probs.gather(1, chosen.unsqueeze(1)).squeeze(1) - old_log_prob
        ratio = log_ratio.exp()
        if args.norm_adv:
            advantage = (advantage - masked_mean(advantage, valid)) / (masked_std(advantage, valid) + 1e-8)
        # The clipped surrogate objective, equation (7)
        clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
        policy_loss = -masked_mean(torch.min(ratio * advantage, clipped_ratio * advantage), valid)
        squared_error = (new_value - returns).square()
        if args.clip_vloss:
            clipped_value = old_value + (new_value - old_value).clamp(-args.clip_coef, args.clip_coef)
            squared_error = torch.max(squared_error, (clipped_value - returns).square())
        value_loss = 0.5 * masked_mean(squared_error, valid)
        entropy = -masked_mean((log_probs.exp() * log_probs).sum(1), valid)
        loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy  # equation (9), to be minimized
        optimizer.step(torch.autograd.grad(loss, optimizer.weights), args.max_grad_norm)
        old_approx_kl, approx_kl = masked_mean(-log_ratio, valid), masked_mean(ratio - 1 - log_ratio, valid)
        clipfrac = masked_mean(((ratio - 1).abs() > args.clip_coef).float(), valid)
        return torch.stack([policy_loss, value_loss, entropy, old_approx_kl, approx_kl, clipfrac]).detach()

    def update_epoch(permutation: Tensor, *estimates: Tensor) -> Tensor:
        """One pass over the batch in minibatches, the rows of `permutation` (B / M, M) -> the mean of their losses."""
        return torch.stack([update_minibatch(index, *estimates) for index in permutation]).mean(0)

    # compile: the names stay, so the loop below does not change. The gradient is traced too, and with it Adam. A call
    # checks no more than tensors, as nothing else changes
    if args.compile:
        torch._dynamo.config.trace_autograd_ops = True
        torch.compiler.reset()  # what an earlier call in this process compiled may be of other settings
        options = {"cpp_wrapper": device.type == "cpu", "guard_filter_fn": torch.compiler.keep_tensor_guards_unsafe}
        functions = (act, update_minibatch)  # each with options of its own, since an entry is taken out of them
        act, update_minibatch = (torch.compile(f, fullgraph=True, options=options.copy()) for f in functions)
    # compile: each becomes one graph: its first two calls only run, its third records, all later ones replay
    if args.cudagraphs and device.type == "cuda":
        act, estimate, update_epoch = (CudaGraphModule(f, warmup=3) for f in (act, estimate, update_epoch))
    elif args.cudagraphs:
        print("CUDA graphs are off: the networks learn on the CPU", file=sys.stderr)

    run = Run(args, checkpoint)
    statistics = EpisodeStatistics(args.num_envs)
    reward, points = np.zeros((2, args.num_steps, *rows.shape[1:]), dtype=np.float32)
    terminated, truncated, game_over = np.zeros((3, args.num_steps, *rows.shape[1:]), dtype=bool)
    done = np.zeros((args.num_steps, args.num_envs), dtype=bool)
    newest = list(torch.from_numpy(envs.reset()).to(device).chunk(envs.num_pools))
    for iteration in range(first_iteration, num_iterations):
        if args.anneal_lr:
            optimizer.learning_rate.fill_(args.learning_rate * (1 - iteration / num_iterations))

        # Collect. While the policy acts for a pool, the other one plays. Each game takes `num_steps` steps by the same
        # policy and the same noise as if all kept step; the frames after the last step wait for the next rollout
        actor.load_state_dict(agent.state_dict())
        torch.set_num_threads(1)  # a second one would take a core from the games
        noise.exponential_()
        obs[: args.num_envs] = obs[batch_size : batch_size + args.num_envs]
        for t, pool in product(range(args.num_steps + 1), range(envs.num_pools)):
            if t > 0:
                at = t - 1, pool
                frame, reward[at], terminated[at], truncated[at], points[at], game_over[at] = envs.recv(pool)
                newest[pool] = torch.from_numpy(frame).to(device)
            chosen = act(newest[pool], rows[t, pool])
            if t < args.num_steps:
                envs.send(pool, chosen.cpu().numpy())
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        valid = np.empty_like(done)
        valid[0] = ~done[-1]
        done = (terminated | truncated).reshape(done.shape)
        valid[1:] = ~done[:-1]
        episodes = statistics.update(points.reshape(done.shape), game_over.reshape(done.shape), valid)
        global_step += int(valid.sum())

        # Estimate advantages
        rollout = (x.reshape(done.shape) for x in (reward, terminated, truncated, valid))
        *estimates, explained_variance = estimate(*(torch.from_numpy(x).to(device, torch.float32) for x in rollout))

        # Learn
        for _ in range(args.update_epochs):
            permutation = torch.randperm(batch_size, device=device).view(args.num_minibatches, -1)
            losses = update_epoch(permutation, *estimates)
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
