"""Each script learns a small task: the deterministic policy of its checkpoint reaches a return in a fresh environment.

The settings do so for seeds 1 to 5 with room to spare. Of compiled scripts test_pairs.py shows that they compute the
same. That of the pool learns in test_env_pool.py, while its workers are killed; those over Ray learn in this process.
"""

import numpy as np
import pytest
from helpers import has_pool, load

from benchmarks.common.pairs import TABLE


def play(name: str, run, episodes: int) -> float:
    """The mean return of the deterministic policy of a run's checkpoint."""
    script, env_id = load(name), run.checkpoint["args"]["env_id"]
    if has_pool(name):
        envs = script.Pool(script.Args(env_id=env_id, num_workers=1, start_method="fork"), [12345])
    else:
        one = {"num_envs": 1} if hasattr(script.Args, "num_envs") else {}
        envs = script.Envs(script.Args(env_id=env_id, **one), [12345])
    policy, obs, returns, total = script.load_policy(run.checkpoint, envs), envs.reset(), [], 0.0
    while len(returns) < episodes:
        obs, reward, terminated, truncated = envs.step(policy(obs))
        total += reward[0]
        if terminated[0] or truncated[0]:
            returns.append(total)
            total = 0.0
    envs.close()
    return float(np.mean(returns))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, pair in TABLE.items() if pair.task and name != "ppo_env_pool"])
def test_learns(train, name):
    settings, (nothing, goal) = TABLE[name].task, TABLE[name].goal
    run = train(name, **settings)
    first = next(line["charts/episodic_return"] for line in run.lines if "charts/episodes" in line)
    assert first < (nothing + goal) / 2
    assert play(name, run, episodes=20) > goal
