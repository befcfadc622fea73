"""Each script learns a small task: the deterministic policy of its checkpoint reaches a return in a fresh environment.

The settings do so for seeds 1 to 5 with room to spare. Of compiled scripts test_pairs.py shows that they compute the
same. That of the pool learns in test_env_pool.py, while its workers are killed.
"""

import numpy as np
import pytest
from helpers import EAGER, has_pool, load
from small import FAST

PENDULUM = FAST | {"env_id": "Pendulum-v1", "learning_starts": 300, "buffer_size": 10000, "batch_size": 64}
TASKS = {  # settings, the return of doing nothing or of chance, the return to reach
    "ppo_continuous_action": (
        {"env_id": "InvertedPendulum-v5", "total_timesteps": 20480, "num_steps": 512, "num_minibatches": 8,
         "update_epochs": 10, "learning_rate": 1e-3}, 30, 500,
    ),
    "ppo": (
        {"env_id": "CartPole-v1", "total_timesteps": 20480, "num_envs": 4, "num_steps": 128, "update_epochs": 4,
         "learning_rate": 1e-3}, 30, 200,
    ),
    "ppo_env_pool": (
        {"env_id": "CartPole-v1", "total_timesteps": 20480, "num_workers": 4, "ready_batch": 2, "num_steps": 128,
         "update_epochs": 4, "learning_rate": 1e-3}, 30, 200,
    ),
    "dqn": (
        {"env_id": "CartPole-v1", "total_timesteps": 20000, "learning_starts": 1000, "buffer_size": 10000,
         "batch_size": 128, "train_frequency": 2, "target_network_frequency": 200, "learning_rate": 5e-4,
         "exploration_fraction": 0.2, "gamma": 0.98}, 30, 195,
    ),
    "sac_continuous_action": (
        {**PENDULUM, "total_timesteps": 4000, "policy_lr": 3e-3, "q_lr": 3e-3}, -1200, -250,
    ),
    "td3_continuous_action": (
        {**PENDULUM, "total_timesteps": 3500, "learning_rate": 2e-3, "exploration_noise": 0.3}, -1200, -250,
    ),
}  # fmt: skip


def play(name: str, run, episodes: int) -> float:
    """The mean return of the deterministic policy of a run's checkpoint."""
    script, env_id = load(name), run.checkpoint["args"]["env_id"]
    if has_pool(name):
        envs = script.Pool(script.Args(env_id=env_id, num_workers=1, start_method="fork"), [12345])
    else:
        envs = script.Envs(script.Args(env_id=env_id, num_envs=1), [12345])
    policy, obs, returns, total = script.load_policy(run.checkpoint, envs), envs.reset(), [], 0.0
    while len(returns) < episodes:
        obs, reward, terminated, truncated = envs.step(policy(obs))
        total += reward[0]
        if terminated[0] or truncated[0]:
            returns.append(total)
            total = 0.0
    envs.close()
    return float(np.mean(returns))


@pytest.mark.parametrize("name", [name for name in EAGER if name != "ppo_env_pool"])
def test_learns(train, name):
    settings, nothing, goal = TASKS[name]
    run = train(name, **settings)
    first = next(line["charts/episodic_return"] for line in run.lines if "charts/episodes" in line)
    assert first < (nothing + goal) / 2
    assert play(name, run, episodes=20) > goal
