"""What pools of environments cost in theory: seconds for N environment steps, on average one per environment.

A step takes t seconds and, with probability p, T seconds more; the pool itself adds no overhead.
"""

import numpy as np


def lock_step(t: float, tail: float, chance: float, num_envs: int) -> float:
    """All wait for the slowest: t + T (1 - (1 - p)^N)."""
    return t + tail * (1 - (1 - chance) ** num_envs)


def one_after_the_other(t: float, tail: float, chance: float, num_envs: int) -> float:
    """In one process: N (t + p T)."""
    return num_envs * (t + chance * tail)


def first_ready(t: float, tail: float, chance: float) -> float:
    """No one waits: t + p T."""
    return t + chance * tail


def rollouts(t: float, tail: float, chance: float, num_envs: int, length: int) -> float:
    """Environments wait for each other only after every L steps: t + T E[max of N binomial (L, p) counts] / L."""
    # P(K = k) by the ratio of neighbours; the largest of N counts exceeds k with probability 1 - P(K <= k)^N
    k = np.arange(1, length + 1)
    ratios = (length - k + 1) / k * (chance / (1 - chance))
    probability = (1 - chance) ** length * np.concatenate([[1.0], np.cumprod(ratios)])
    largest = (1 - np.minimum(np.cumsum(probability), 1) ** num_envs).sum()
    return t + tail * float(largest) / length


def hybrid_lock_step(t: float, tail: float, chance: float, num_workers: int, envs_per_worker: int) -> float:
    """W workers step V environments each in turn and wait for each other: V times a step in rollouts of length V."""
    return envs_per_worker * rollouts(t, tail, chance, num_workers, envs_per_worker)


def hybrid_first_ready(t: float, tail: float, chance: float, envs_per_worker: int) -> float:
    """Workers that step V environments in turn and wait for no one: V (t + p T)."""
    return envs_per_worker * first_ready(t, tail, chance)


def one_slow_step(t: float, tail: float, length: int) -> float:
    """The mean step time of a rollout of L steps, one of which takes T: (T + (L - 1) t) / L."""
    return (tail + (length - 1) * t) / length
