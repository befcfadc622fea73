"""Train as a script does, but by Stable-Baselines3 or SBX.

    python -m benchmarks.throughput.peers sb3|sbx[-defaults] SCRIPT [FLAGS]

SCRIPT is the name of a pair, FLAGS are its flags. Environment, hyperparameters, network sizes and number of threads are
the script's, read from its `Args`; the run folder gets a log in the same format, so that the same analysis applies.
Where a library lacks an option, it is patched in here if a few lines suffice (`equalize_sb3`, `equalize_sbx`). What
still differs is in `DIFFERENCES`, which is stored in a result of `throughput` and named beside its table. With the
suffix `-defaults` a library trains as its users start it: one environment and its own settings, not the script's.
"""

import importlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import numpy as np
import torch
import tyro

from benchmarks.common.pairs import TABLE
from benchmarks.common.programs import (
    AT_DEFAULTS,
    INSTALL,
    LIBRARIES,
    SCRIPTS,
    check_known,
    environment_class,
    fail,
    load_script,
    num_cores,
    pairs,
    peers_of,
)
from benchmarks.common.results import git, gpu_model, package_versions


class IsSetUp(Exception):
    """Raised when a script is about to make its environments."""


STOPPED = []  # their tracebacks hold the script's run, which gives PyTorch its old settings once nothing holds it


def set_up_torch(module: ModuleType, args) -> int:
    """Let a script set up PyTorch (threads, precision of products, denormal numbers), and no more -> threads."""

    def stop(*_):
        raise IsSetUp

    with mock.patch.object(module, environment_class(module).__name__, stop):
        try:
            module.train(args)
        except IsSetUp as stopped:
            STOPPED.append(stopped)
    return torch.get_num_threads()


def schedule(start: float, anneal: bool):
    """The learning rate: linear to zero, as a function of the remaining fraction of the run, or constant."""
    return (lambda remaining: start * remaining) if anneal else start


def ppo(args, is_jax: bool, is_image: bool) -> dict:
    batch_size = args.num_envs * args.num_steps // args.num_minibatches
    if is_jax:
        if args.target_kl is not None:
            fail("SBX's PPO adapts its learning rate to --target-kl instead of stopping early")
        from flax.linen import tanh
    else:
        from torch.nn import Tanh as tanh
    networks = {} if is_image else {"net_arch": {"pi": [64, 64], "vf": [64, 64]}, "activation_fn": tanh}
    settings = {"n_steps": args.num_steps, "batch_size": batch_size, "n_epochs": args.update_epochs}
    settings |= {name: getattr(args, name) for name in ("gae_lambda", "ent_coef", "max_grad_norm", "target_kl")}
    settings |= {"learning_rate": schedule(args.learning_rate, args.anneal_lr), "clip_range": args.clip_coef}
    # The scripts' value loss has a factor 0.5 that the libraries' lacks
    settings |= {"vf_coef": args.vf_coef / 2, "normalize_advantage": args.norm_adv}
    if args.clip_vloss and not is_jax:
        settings["clip_range_vf"] = args.clip_coef
    return settings | {"policy_kwargs": networks | {"optimizer_kwargs": {"eps": 1e-5}}}


def off_policy(args) -> dict:
    names = ("buffer_size", "learning_starts", "batch_size", "tau")
    return {name: getattr(args, name) for name in names}


def dqn(args, _is_jax: bool, _is_image: bool) -> dict:
    if args.double_dqn:
        fail("the libraries have no double DQN")
    # `train_freq` counts steps of all environments at once
    settings = {"learning_rate": args.learning_rate, "train_freq": args.train_frequency}
    settings |= {"gradient_steps": args.num_envs}
    settings |= {"target_update_interval": args.target_network_frequency}
    settings |= {"exploration_fraction": args.exploration_fraction}
    settings |= {"exploration_initial_eps": args.epsilon_start, "exploration_final_eps": args.epsilon_end}
    settings |= {"policy_kwargs": {"net_arch": [120, 84]}}
    return off_policy(args) | settings


def sac(args, is_jax: bool, _is_image: bool) -> dict:
    # Without a delay there is one actor update per critic update, as in the script on average
    settings = {"learning_rate": args.policy_lr, "train_freq": 1, "gradient_steps": args.gradient_steps or -1}
    settings |= {"ent_coef": "auto" if args.autotune else args.alpha, "policy_kwargs": {"net_arch": [256, 256]}}
    if is_jax and args.target_network_frequency != 1:
        fail("SBX's SAC moves its targets at each update: leave --target-network-frequency at 1")
    targets = {"target_update_interval": args.target_network_frequency}
    return off_policy(args) | settings | ({"qf_learning_rate": args.q_lr} if is_jax else targets)


def td3(args, _is_jax: bool, _is_image: bool) -> dict:
    from stable_baselines3.common.noise import NormalActionNoise

    settings = {"learning_rate": args.learning_rate, "train_freq": 1, "gradient_steps": args.gradient_steps or -1}
    settings |= {"policy_delay": args.policy_frequency, "target_policy_noise": args.policy_noise}
    settings |= {"target_noise_clip": args.noise_clip, "policy_kwargs": {"net_arch": [256, 256]}}
    noise = {"action_noise": lambda size: NormalActionNoise(np.zeros(size), np.full(size, args.exploration_noise))}
    return off_policy(args) | settings | noise


# By peer and algorithm: what differs from the script
DIFFERENCES = {
    "sb3": {
        "ppo": "the clipped loss of the value lacks the maximum with the one that is not clipped",
        "sac": "a step of the actor with each step of the critics, where the script takes two after every second one",
    },
    "sbx": {
        "ppo": "no clipping of the value loss, and an optimizer for each network, with a gradient norm of its own",
        "sac": "a step of the actor with each step of the critics, where the script takes two after every second one; "
        "the temperature learns at the actor's rate",
    },
    "rllib": {
        "impala_ray": "Gymnasium's environments, where the script takes EnvPool's if a runner has more than eight; "
        "PyTorch's Adam with its own epsilon, a learning rate that stays, always one update a batch",
        "ppo_ray": "Gymnasium's environments, where the script takes EnvPool's of MuJoCo if a runner has several; "
        "PyTorch's Adam with its own epsilon, a learning rate that stays, no normalization of observations or rewards; "
        "of actions in a Box the network gives the standard deviation, too",
        "apex_dqn_ray": "Gymnasium's environments, where the script takes EnvPool's if a runner has more than eight; "
        "one share of random actions, which falls with time, in all environments; Huber's loss; sampling and learning "
        "in turn, where the script does both at once",
    },
    "cleanrl": dict.fromkeys(
        ("ppo", "sac", "td3", "dqn"),
        "its own scripts with their defaults, which have the values of ours; PyTorch's default precision of products; "
        "denormal numbers; Gymnasium 0.29, MuJoCo 2.3. The first update is timed at the line after it",
    ),
    "leanrl": dict.fromkeys(
        ("ppo", "sac", "td3", "dqn"),
        "its own scripts with --compile, on CUDA with --cudagraphs, and else their defaults, which have the values of "
        "ours; PyTorch's default precision of products; denormal numbers; Gymnasium 0.29, MuJoCo 2.3, tensordict 0.8; "
        "float64 rewards in PPO. The first update is timed at its first report, which for PPO comes after ten rollouts",
    ),
}


# By algorithm: what differs in the libraries, and always has, but is not told by results from before it was noticed
SAC = (
    "the logarithm of the policy's standard deviation is clipped to [-20, 2], where ours goes through a tanh into "
    "[-5, 2]; the temperature's loss is linear in the logarithm of the temperature"
)
ENVS = (
    "of several environments Gymnasium's, in one process, where ours by default takes EnvPool's if it has them, but "
    "for up to eight of CartPole, MountainCar or Pendulum"
)
NOTICED = {
    "sb3": {
        "sac": SAC,
        "ppo_atari_envpool": "",
        "ppo": ENVS,
        "dqn": "changed to compute what ours does: the squared error instead of Huber's loss, and no clipping of the "
        "gradient, which makes it faster",
    },
    "sbx": {
        "sac": SAC,
        "ppo_atari_envpool": "",
        "ppo": ENVS,
        "dqn": "changed to compute what ours does: the squared error, and hidden layers of 120 and 84 units",
    },
    "rllib": {
        "ppo_ray": "the value's loss is its squared error, at most 10, where ours is half of it, clipped otherwise"
    },
}


def differences(script: str, names: list[str], stored: dict[str, str] | None = None) -> dict[str, str]:
    """What differs from a script, by peer, for the peers among `names`; `stored` is what a result tells of it."""
    keys = (script, TABLE[script].peers if script in TABLE else None)

    def entry(table: dict, name: str) -> str:
        own = table.get(name, {})
        return next((own[key] for key in keys if key in own), "")

    found = {}
    for name in dict.fromkeys([*names, *(stored or {})]):
        told, noticed = (stored or {}).get(name) or entry(DIFFERENCES, name), entry(NOTICED, name)
        found[name] = "; ".join(x for x in (told, noticed if noticed not in told else "") if x)
    return {name: text for name, text in found.items() if text}


def equalize_sb3(algorithm: str) -> None:
    """Give SB3's DQN the squared error of the script instead of Huber's loss, and no clipping, which takes time."""
    if algorithm == "dqn":
        torch.nn.utils.clip_grad_norm_ = lambda *_: None
        from stable_baselines3.dqn import dqn as library
        from torch.nn.functional import mse_loss

        library.F = SimpleNamespace(smooth_l1_loss=mse_loss)


def equalize_sbx(algorithm: str) -> None:
    """Give SBX's DQN the script's squared error and its two hidden layers of different sizes."""
    if algorithm == "dqn":
        import flax.linen as nn
        import optax
        from sbx.dqn import dqn as library
        from sbx.dqn import policies

        class QNetwork(nn.Module):
            n_actions: int
            n_units: int = 0  # ignored: the sizes are the script's
            activation_fn: Callable = nn.relu

            @nn.compact
            def __call__(self, x):
                x = self.activation_fn(nn.Dense(120)(x))
                return nn.Dense(self.n_actions)(self.activation_fn(nn.Dense(84)(x)))

        policies.QNetwork = QNetwork
        loss = {"huber_loss": lambda value, target: (value - target) ** 2}
        library.optax = SimpleNamespace(**loss, incremental_update=optax.incremental_update)


def set_learning_rates(model, args) -> None:
    """Give the critics and the temperature of SB3's SAC their own, constant learning rate."""
    optimizers = [model.critic.optimizer, *([model.ent_coef_optimizer] if model.ent_coef_optimizer else [])]
    for group in [group for optimizer in optimizers for group in optimizer.param_groups]:
        group["lr"] = args.q_lr
    model._update_learning_rate = lambda _optimizers: None


SETTINGS = {"ppo": ppo, "dqn": dqn, "sac": sac, "td3": td3}


def make_envs(module: ModuleType, args, normalize: bool):
    """The vector environment: EnvPool's where the script uses it for images, otherwise Gymnasium's in this process."""
    import gymnasium as gym
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    if args.env_id not in gym.registry and ":" not in args.env_id:
        from benchmarks.throughput.peer_envpool import EnvPoolVecEnv

        seeds = np.random.SeedSequence(args.seed).generate_state(args.num_envs) >> 1
        if hasattr(args, "async_envs"):  # the libraries wait for all games at once
            return EnvPoolVecEnv(module.Envs(replace(args, async_envs=False), seeds.tolist()).pools[0])
        return EnvPoolVecEnv(module.Envs(args, seeds.tolist()).vector)
    more = json.loads(args.env_kwargs) | {"disable_env_checker": True}
    envs = DummyVecEnv([lambda: Monitor(gym.make(args.env_id, **more))] * args.num_envs)
    return VecNormalize(envs, gamma=args.gamma) if normalize else envs


def make_log(folder: Path, every: int):
    """A callback that writes `metrics.jsonl` after updates, at most a line per `every` steps; SIGINT ends the run."""
    from stable_baselines3.common.callbacks import BaseCallback

    class Log(BaseCallback):
        def _on_training_start(self) -> None:
            self.stopped, self.episodes, self.written = False, [], (0, 0.0)
            self.file, self.start = (folder / "metrics.jsonl").open("w", buffering=1), time.perf_counter()
            signal.signal(signal.SIGINT, self.stop)

        def stop(self, *_) -> None:
            self.stopped = True

        def _on_step(self) -> bool:
            self.episodes += [info["episode"] for info in self.locals["infos"] if "episode" in info]
            return not self.stopped

        def _on_rollout_start(self) -> None:
            if self.num_timesteps - self.written[0] >= every:
                self.write()

        def _on_training_end(self) -> None:
            # A run that was stopped has, since its last line, only collected: a window without learning
            if self.num_timesteps > self.written[0] and not self.stopped:
                self.write()

        def write(self) -> None:
            step, seconds = self.num_timesteps, time.perf_counter() - self.start
            speed = (step - self.written[0]) / (seconds - self.written[1])
            line = {"global_step": step, "seconds": round(seconds, 3), "charts/SPS": speed}
            if self.model._n_updates:
                line["losses/updates"] = self.model._n_updates
            if self.episodes:
                line["charts/episodic_return"] = float(np.mean([episode["r"] for episode in self.episodes]))
                line["charts/episodic_length"] = float(np.mean([episode["l"] for episode in self.episodes]))
                line["charts/episodes"] = len(self.episodes)
            self.file.write(json.dumps(line) + "\n")
            self.episodes, self.written = [], (step, seconds)

    return Log()


def write_config(folder: Path, peer: str, script: str, args) -> None:
    config = {"script": f"{script}.py", "peer": peer, "args": asdict(args), "versions": package_versions()}
    config |= {"device": gpu_model() or "cpu", "cores": num_cores()}
    config |= {"threads": torch.get_num_threads(), "matmul_precision": torch.get_float32_matmul_precision()}
    config["commit"] = git("describe", "--always", "--dirty", "--abbrev=40") or None
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def train(peer: str, script: str, flags: list[str]) -> Path:
    """Train with a peer as the script would with these flags; returns the run's folder."""
    from stable_baselines3.common.logger import Logger

    module = load_script(SCRIPTS / f"{script}.py")
    args = tyro.cli(module.Args, args=flags)
    at_defaults = peer.endswith(AT_DEFAULTS)
    if at_defaults:
        args = replace(args, num_envs=1)
    elif set_up_torch(module, args) == 1:
        os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false " + os.environ.get("XLA_FLAGS", "")
    folder = Path(args.run_dir or f"runs/{args.env_id}__{script}-{peer}__{args.seed}__{int(time.time())}")
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, peer, script, args)

    envs = make_envs(module, args, normalize=script == "ppo_continuous_action" and not at_defaults)
    model = make_model(peer, TABLE[script].peers, args, envs)
    model.set_logger(Logger(None, []))  # otherwise each run leaves an empty folder in /tmp
    # For PPO a line per rollout, written when the next one starts; otherwise as often as the script writes one
    model.learn(args.total_timesteps, callback=make_log(folder, getattr(args, "log_every", 1)))
    envs.close()
    return folder


def make_model(peer: str, algorithm: str, args, envs):
    """A peer's model, as close to the script's as possible, or with the library's defaults."""
    library = importlib.import_module(LIBRARIES[peer.removesuffix(AT_DEFAULTS)])
    if peer.endswith(AT_DEFAULTS):
        policy = "CnnPolicy" if len(envs.observation_space.shape) == 3 else "MlpPolicy"
        return getattr(library, algorithm.upper())(policy, envs, seed=args.seed)
    {"sb3": equalize_sb3, "sbx": equalize_sbx}[peer](algorithm)
    is_image = len(envs.observation_space.shape) == 3
    settings = SETTINGS[algorithm](args, peer == "sbx", is_image)
    if "action_noise" in settings:
        settings["action_noise"] = settings["action_noise"](math.prod(envs.action_space.shape))
    device = {"device": args.device} if peer == "sb3" else {}
    model = getattr(library, algorithm.upper())(
        "CnnPolicy" if is_image else "MlpPolicy", envs, gamma=args.gamma, seed=args.seed, **settings, **device
    )
    if peer == "sb3" and algorithm == "sac":
        set_learning_rates(model, args)
    return model


def main(arguments: list[str]) -> None:
    if len(arguments) < 2:
        fail("name a peer and a script")
    peer, script, *flags = arguments
    # RLlib, CleanRL and LeanRL have programs of their own
    check_known("peer", [peer], [name + kind for kind in ("", AT_DEFAULTS) for name in LIBRARIES])
    check_known("script", [script], [name for name in pairs() if "sb3" in peers_of(name)])
    if importlib.util.find_spec(LIBRARIES[peer.removesuffix(AT_DEFAULTS)]) is None:
        fail(f"{peer} is not installed: {INSTALL.format('-benchmark')}")
    print(train(peer, script, flags))


if __name__ == "__main__":
    main(sys.argv[1:])
