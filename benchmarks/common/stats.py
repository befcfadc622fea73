"""Robust statistics of a few runs, by hand in NumPy: interquartile means and bootstrap intervals.

Agarwal et al. (2021), "Deep Reinforcement Learning at the Edge of the Statistical Precipice", recommend these for
comparisons that rest on a handful of seeds. All intervals are percentile intervals with a fixed seed, so that the same
runs always give the same report.
"""

from collections.abc import Callable, Sequence

import numpy as np

RESAMPLES = 2000  # bootstrap resamples; the ends of an interval then vary by about 2 % of its width


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
    strata: Sequence[np.ndarray],
    statistic: Callable[[list[np.ndarray]], np.ndarray] = pooled_iqm,
    level: float = 0.95,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Interval of a statistic under the stratified bootstrap: rows are resampled within each stratum.

    A stratum (runs, ...) holds the results of one environment, or of one contestant; `statistic` maps the list of
    strata to a number or an array. Returns the lower and the upper end, each of the shape of the statistic.
    """
    rng = np.random.default_rng(seed)
    strata = [np.asarray(x, dtype=float) for x in strata]
    draws = [statistic([x[rng.integers(len(x), size=len(x))] for x in strata]) for _ in range(RESAMPLES)]
    tail = (1 - level) / 2
    draws = np.stack(draws)
    if np.isfinite(draws).all():
        low, high = np.quantile(draws, [tail, 1 - tail], axis=0)
    else:  # there is nothing between a number and infinity
        low, high = (np.quantile(draws, x, 0, method=how) for x, how in ((tail, "lower"), (1 - tail, "higher")))
    return low, high


def difference_of_iqms(strata: Sequence[np.ndarray]) -> np.ndarray:
    """Interquartile mean of the second of two contestants minus that of the first."""
    first, second = strata
    return iqm(second) - iqm(first)


def median_of_rounds(rounds: Sequence[np.ndarray]) -> float:
    """Median of all windows of all rounds, each (windows,)."""
    return float(np.median(np.concatenate(rounds)))


def ratio_of_medians(
    numerator: Sequence[np.ndarray], denominator: Sequence[np.ndarray], level: float = 0.95, seed: int = 0
) -> tuple[float, float, float]:
    """Ratio of the medians of two contestants and its bootstrap interval: (ratio, low, high).

    Each contestant is a list of rounds, each the speeds of its windows (windows,). Windows of one process correlate, so
    whole rounds are resampled first, then the windows within them; otherwise the interval would be too narrow.
    """
    rng = np.random.default_rng(seed)

    def redraw(rounds: Sequence[np.ndarray]) -> float:
        chosen = [rounds[i] for i in rng.integers(len(rounds), size=len(rounds))]
        return median_of_rounds([x[rng.integers(len(x), size=len(x))] for x in chosen])

    draws = [redraw(numerator) / redraw(denominator) for _ in range(RESAMPLES)]
    tail = (1 - level) / 2
    low, high = np.quantile(draws, [tail, 1 - tail])
    return median_of_rounds(numerator) / median_of_rounds(denominator), float(low), float(high)
