"""Statistics of a few runs, by hand in NumPy: interquartile means, bootstrap and Student's intervals.

Agarwal et al. (2021), "Deep Reinforcement Learning at the Edge of the Statistical Precipice", recommend the first two
for comparisons that rest on a handful of seeds. Bootstrap intervals are percentile intervals with a fixed seed, so that
the same runs always give the same report; over fewer than ten values they are too narrow. Student's are not, if values
are about normal: speeds and times of fresh processes get those.
"""

from collections.abc import Callable, Sequence

import numpy as np

RESAMPLES = 2000  # bootstrap resamples; the ends of an interval then vary by about 2 % of its width
# 97.5 % points of Student's t distribution for 1, 2, ... degrees of freedom
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def iqm(x: np.ndarray, axis: int = 0) -> np.ndarray:
    """Interquartile mean along an axis: the mean without the lowest and highest quarter, their sizes rounded down.

    With fewer than 4 values nothing is cut off and it is the mean, as in SciPy's `trim_mean` and in rliable.
    """
    x = np.sort(np.moveaxis(np.asarray(x, dtype=float), axis, 0), axis=0)
    cut = len(x) // 4
    return x[cut : len(x) - cut].mean(0)


def pooled_iqm(strata: Sequence[np.ndarray]) -> np.ndarray:
    """Interquartile mean of all rows of all strata, each (runs, ...) -> (...)."""
    return iqm(np.concatenate(strata))


def bootstrap(
    strata: Sequence[np.ndarray], statistic: Callable[[list[np.ndarray]], np.ndarray] = pooled_iqm
) -> tuple[np.ndarray, np.ndarray]:
    """95 % interval of a statistic under the stratified bootstrap: rows are resampled within each stratum.

    A stratum (runs, ...) holds the results of one environment, or of one contestant; `statistic` maps the list of
    strata to a number or an array. Returns the lower and the upper end, each of the shape of the statistic.
    """
    rng = np.random.default_rng(0)
    strata = [np.asarray(x, dtype=float) for x in strata]
    draws = [statistic([x[rng.integers(len(x), size=len(x))] for x in strata]) for _ in range(RESAMPLES)]
    draws, tails = np.stack(draws), (0.025, 0.975)
    if np.isfinite(draws).all():
        low, high = np.quantile(draws, tails, axis=0)
    else:  # there is nothing between a number and infinity
        low, high = (np.quantile(draws, x, 0, method=how) for x, how in zip(tails, ("lower", "higher"), strict=True))
    return low, high


def difference_of_iqms(strata: Sequence[np.ndarray]) -> np.ndarray:
    """Interquartile mean of the second of two contestants minus that of the first."""
    first, second = strata
    return iqm(second) - iqm(first)


def student_factor(freedom: float) -> float:
    """97.5 % point of Student's t distribution for so many degrees of freedom, rounded down; 1 at least."""
    whole = max(1, int(freedom))
    return STUDENT[whole - 1] if whole <= len(STUDENT) else 1.96 + 2.5 / whole  # off by less than 0.02


def student_interval(values: Sequence[float]) -> list[float] | None:
    """Ends of the 95 % interval of the mean of independent, about normal values; None if there are fewer than two."""
    values, freedom = np.asarray(values, dtype=float), len(values) - 1
    if freedom < 1:
        return None
    half = student_factor(freedom) * values.std(ddof=1) / len(values) ** 0.5
    return [float(values.mean() - half), float(values.mean() + half)]


def welch_interval(values: Sequence[float], mean: float, std: float, count: int) -> list[float]:
    """Ends of the 95 % interval by which the mean of values exceeds that of `count` others, by Welch's method.

    Of the others only their mean and their standard deviation are known, without the correction for small samples.
    """
    values, difference = np.asarray(values, dtype=float), float(np.mean(values) - mean)
    own, other = values.var(ddof=1) / len(values), std**2 / (count - 1)  # variances of the two means
    if own + other == 0:
        return [difference, difference]
    freedom = (own + other) ** 2 / (own**2 / (len(values) - 1) + other**2 / (count - 1))
    half = student_factor(freedom) * (own + other) ** 0.5
    return [difference - half, difference + half]


def ratio_of_rounds(numerator: Sequence[float], denominator: Sequence[float]) -> tuple[float, list[float] | None]:
    """Ratio of two contestants' speeds over paired rounds, each (rounds,), and its 95 % interval from two rounds on.

    It is the geometric mean of the ratios within the rounds, whose logarithms are taken as normal: what slows down the
    machine for a whole round cancels, and however many windows a round has, it counts once.
    """
    logs = np.log(np.asarray(numerator, dtype=float)) - np.log(np.asarray(denominator, dtype=float))
    ends = student_interval(logs)
    return float(np.exp(logs.mean())), ends and [float(np.exp(end)) for end in ends]
