"""Train with RLlib as a Ray script does with the same flags: the peer `rllib` of ./run.sh throughput.

    RLLIB_PYTHON benchmarks/throughput/peer_rllib.py {impala_ray,ppo_ray,apex_dqn_ray} [FLAGS]

It runs in a virtual environment of its own (requirements/requirements-rllib.txt), so it imports nothing from this
repository. Networks, fragments, batches, settings and the learner's single thread are the script's. Like the script,
RLlib steps its environments in the runners' processes, but only Gymnasium's, where the script may use EnvPool's. The
run folder gets a log in the same format.
"""

import argparse
import json
import signal
import sys
import time
from pathlib import Path

import gymnasium
import numpy
import ray
import torch
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

SETTINGS = {
    "env_id": "CartPole-v1", "seed": 1, "total_timesteps": 1_000_000, "run_dir": "runs/rllib", "num_runners": 2,
    "gamma": 0.99,
}  # fmt: skip
OWN_SETTINGS = {
    "impala_ray": {
        "envs_per_runner": 16, "fragment_steps": 32, "batch_fragments": 1, "learning_rate": 1e-3, "ent_coef": 0.001,
        "vf_coef": 0.5, "max_grad_norm": 0.5,
    },
    "ppo_ray": {
        "envs_per_runner": 4, "num_steps": 128, "learning_rate": 2.5e-4, "num_minibatches": 8, "update_epochs": 4,
        "gae_lambda": 0.95, "clip_coef": 0.2, "ent_coef": 0.01, "vf_coef": 0.5, "max_grad_norm": 0.5,
    },
    "apex_dqn_ray": {
        "envs_per_runner": 8, "fragment_steps": 64, "learning_rate": 5e-4, "buffer_size": 100_000, "n_step": 3,
        "target_network_frequency": 100, "batch_size": 256, "learning_starts": 10_000, "samples_per_insert": 8.0,
        "priority_exponent": 0.6, "importance_exponent": 0.4, "max_grad_norm": 40.0,
    },
}  # fmt: skip


# Flags of the scripts that are ignored for RLlib; that, and why it is fair, is stated in the differences of `peers.py`
LEFT_OUT = {
    "--no-tensorboard", "--log-every", "--batch-updates", "--norm-obs", "--norm-rewards", "--env-backend", "--device",
    "--epsilon-start", "--compile", "--no-compile",
}  # fmt: skip


def settings() -> argparse.Namespace:
    """The script's flags. Flags that are not passed on to RLlib are refused, except those in LEFT_OUT."""
    parser = argparse.ArgumentParser()
    parser.add_argument("script", choices=OWN_SETTINGS)
    own = next((OWN_SETTINGS[word] for word in sys.argv if word in OWN_SETTINGS), {})
    for name, default in (SETTINGS | own).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    args, others = parser.parse_known_args()
    if unknown := [word for word in others if word.startswith("--") and word.split("=")[0] not in LEFT_OUT]:
        parser.error(f"RLlib is not told of {', '.join(unknown)}: leave it out, or measure without this peer")
    return args


def impala(args: argparse.Namespace) -> IMPALAConfig:
    rows = args.fragment_steps * args.envs_per_runner * args.batch_fragments
    return IMPALAConfig().training(
        train_batch_size_per_learner=rows, entropy_coeff=args.ent_coef, vf_loss_coeff=args.vf_coef
    )


def ppo(args: argparse.Namespace) -> PPOConfig:
    rows = args.num_steps * args.envs_per_runner * max(1, args.num_runners)
    return PPOConfig().training(
        train_batch_size_per_learner=rows,
        minibatch_size=rows // args.num_minibatches,
        num_epochs=args.update_epochs,
        lambda_=args.gae_lambda,
        clip_param=args.clip_coef,
        use_kl_loss=False,
        entropy_coeff=args.ent_coef,
        vf_loss_coeff=args.vf_coef,
    )


def dqn(args: argparse.Namespace) -> DQNConfig:
    replay = {"type": "PrioritizedEpisodeReplayBuffer", "capacity": args.buffer_size}
    steps_of_an_update = args.batch_size / args.samples_per_insert
    # Samples trained on per sample collected; RLlib counts one runner more than actually sample
    intensity = args.samples_per_insert * max(1, args.num_runners) / (args.num_runners + 1 if args.num_runners else 1)
    return DQNConfig().training(
        train_batch_size_per_learner=args.batch_size,
        training_intensity=intensity,
        num_steps_sampled_before_learning_starts=args.learning_starts,
        target_network_update_freq=round(args.target_network_frequency * steps_of_an_update),
        replay_buffer_config=replay | {"alpha": args.priority_exponent, "beta": args.importance_exponent},
        n_step=args.n_step,
        double_q=True,
        dueling=False,
    )


def algorithm(args: argparse.Namespace):
    """RLlib's algorithm, built from the script's settings."""
    config = {"impala_ray": impala, "ppo_ray": ppo, "apex_dqn_ray": dqn}[args.script](args)
    config.environment(args.env_id).debugging(seed=args.seed, log_level="ERROR")
    config.env_runners(
        num_env_runners=args.num_runners,
        num_envs_per_env_runner=args.envs_per_runner,
        rollout_fragment_length=args.num_steps if args.script == "ppo_ray" else args.fragment_steps,
    )
    config.learners(num_learners=0)  # in the driver, as the script's
    config.training(lr=args.learning_rate, gamma=args.gamma, grad_clip=args.max_grad_norm)
    if args.script == "apex_dqn_ray":
        model = DefaultModelConfig(fcnet_hiddens=[120], head_fcnet_hiddens=[84], fcnet_activation="relu")
    else:
        model = DefaultModelConfig(fcnet_hiddens=[64, 64], fcnet_activation="tanh", vf_share_layers=False)
    config.rl_module(model_config=model)
    config.reporting(min_time_s_per_iteration=1)
    return config.build_algo()


def main() -> None:
    args, stopped = settings(), []
    signal.signal(signal.SIGINT, lambda *_: stopped.append(1))
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    folder = Path(args.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    versions = {"python": sys.version.split()[0]}
    versions |= {module.__name__: module.__version__ for module in (ray, torch, gymnasium, numpy)}
    config = {"script": f"{args.script}.py", "peer": "rllib", "args": vars(args), "versions": versions}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    torch.set_num_threads(1)  # for the learner, which is in this process, as in the script; Ray gives each worker one
    ray.init(address="local", num_cpus=args.num_runners + 2, include_dashboard=False, log_to_driver=False)
    algo, start, written = algorithm(args), time.perf_counter(), (0, 0.0)
    with (folder / "metrics.jsonl").open("w", buffering=1) as file:
        while written[0] < args.total_timesteps and not stopped:
            result = algo.train()
            runners, seconds = result["env_runners"], time.perf_counter() - start
            step = int(runners.get("num_env_steps_sampled_lifetime", 0))
            if step == written[0]:
                continue
            line = {"global_step": step, "seconds": round(seconds, 3)}
            line["charts/SPS"] = (step - written[0]) / (seconds - written[1])
            if (episode_return := runners.get("episode_return_mean")) is not None:
                line["charts/episodic_return"] = float(episode_return)
            if result.get("learners"):  # before the first update there are none
                line["losses/updates"] = 1
            file.write(json.dumps(line) + "\n")
            written = step, seconds
    ray.shutdown()


if __name__ == "__main__":
    main()
