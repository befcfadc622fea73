"""Train by RLlib's IMPALA as `impala_ray` does by the same flags: the peer `rllib` of ./run.sh throughput.

    RLLIB_PYTHON benchmarks/throughput/peer_rllib.py [FLAGS]

It runs in a virtual environment of its own (requirements/requirements-rllib.txt), so it imports nothing of this
repository. Networks, fragments, batches and settings are the script's; RLlib steps its environments in the runners'
processes, as the script does. The run folder gets a log of the same form.
"""

import argparse
import json
import signal
import time
from pathlib import Path

import ray
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

SETTINGS = {
    "env_id": "CartPole-v1", "seed": 1, "total_timesteps": 1_000_000, "run_dir": "runs/rllib", "num_runners": 2,
    "envs_per_runner": 16, "fragment_steps": 32, "batch_fragments": 1, "learning_rate": 1e-3, "gamma": 0.99,
    "ent_coef": 0.01, "vf_coef": 0.5, "max_grad_norm": 0.5,
}  # fmt: skip


def settings() -> argparse.Namespace:
    """The script's flags, of which those are ignored that RLlib has no like of."""
    parser = argparse.ArgumentParser()
    for name, default in SETTINGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    return parser.parse_known_args()[0]


def algorithm(args: argparse.Namespace):
    rows = args.fragment_steps * args.envs_per_runner * args.batch_fragments
    config = IMPALAConfig().environment(args.env_id).debugging(seed=args.seed, log_level="ERROR")
    config.env_runners(
        num_env_runners=args.num_runners,
        num_envs_per_env_runner=args.envs_per_runner,
        rollout_fragment_length=args.fragment_steps,
    )
    config.learners(num_learners=0)  # in the driver, as the script's
    config.training(
        train_batch_size_per_learner=rows,
        lr=args.learning_rate,
        gamma=args.gamma,
        entropy_coeff=args.ent_coef,
        vf_loss_coeff=args.vf_coef,
        grad_clip=args.max_grad_norm,
    )
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
    config = {"script": "impala_ray.py", "peer": "rllib", "args": vars(args), "versions": {"ray": ray.__version__}}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
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
            line["losses/updates"] = 1
            file.write(json.dumps(line) + "\n")
            written = step, seconds
    ray.shutdown()


if __name__ == "__main__":
    main()
