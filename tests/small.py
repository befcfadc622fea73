"""For each algorithm, settings of a run of about a second that gets well past its first update."""

ON_POLICY = {
    "num_steps": 64, "num_minibatches": 4, "update_epochs": 4, "learning_rate": 3e-3,
    "total_timesteps": 384,
}  # fmt: skip
OFF_POLICY = {"total_timesteps": 400, "learning_starts": 100, "buffer_size": 250, "batch_size": 16, "log_every": 50}
# One worker, forked: it knows what a test has changed in this process, and starts in no time
POOL = {"num_workers": 1, "ready_batch": 0, "start_method": "fork"}
# By these SAC and TD3 learn in little time
FAST = {"gamma": 0.9, "tau": 0.02}

SMALL = {
    "ppo_env_pool": {"env_id": "tiny_envs:Reach-v0", **POOL, **ON_POLICY},
    "ppo_continuous_action": {"env_id": "tiny_envs:Reach-v0", "num_envs": 1, **ON_POLICY},
    "ppo": {"env_id": "tiny_envs:Choose-v0", "num_envs": 1, **ON_POLICY},
    "dqn": {"env_id": "tiny_envs:Choose-v0", "train_frequency": 5, "target_network_frequency": 50, **OFF_POLICY},
    "sac_continuous_action": {"env_id": "tiny_envs:Reach-v0", **OFF_POLICY, **FAST},
    "td3_continuous_action": {"env_id": "tiny_envs:Reach-v0", **OFF_POLICY, **FAST},
}
