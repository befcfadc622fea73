"""The statistics against values known from elsewhere."""

import numpy as np
import pytest

from benchmarks.common import stats
from benchmarks.learning import report, time_to_score


def test_iqm_cuts_a_quarter_off_each_side():
    assert stats.iqm([1, 2, 3, 1000]) == 2.5
    assert stats.iqm([1, 2, 30]) == 11  # too few to cut: the mean
    assert stats.iqm(np.arange(8)) == 3.5
    assert stats.iqm([5.0, -100, 4, 3, 100]) == 4  # scipy.stats.trim_mean(x, 0.25)
    matrix = np.array([[1, 2, 3, 1000], [1, 1, 1, 1]])
    assert stats.iqm(matrix, axis=1).tolist() == [2.5, 1]


def test_bootstrap_of_a_mean_has_the_width_of_the_normal_interval():
    x = np.random.default_rng(1).normal(10, 2, size=400)
    low, high = stats.bootstrap([x], lambda strata: strata[0].mean())
    assert high - low == pytest.approx(2 * 1.96 * x.std() / 20, rel=0.1)
    assert low < x.mean() < high


def test_bootstrap_draws_within_the_strata():
    """Strata without spread within give an interval without width, however far apart they are."""
    low, high = stats.bootstrap([np.zeros(4), np.full(4, 100.0)])
    assert low == high == 50
    low, high = stats.bootstrap([np.concatenate([np.zeros(4), np.full(4, 100.0)])])
    assert low < 50 < high


def test_bootstrap_is_repeatable_and_keeps_shapes():
    x = np.random.default_rng(2).normal(size=(5, 7))
    low, high = stats.bootstrap([x])
    assert low.shape == high.shape == (7,)
    assert np.array_equal(low, stats.bootstrap([x])[0])
    assert (low <= stats.iqm(x)).all() and (stats.iqm(x) <= high).all()


def test_difference_of_iqms():
    low, high = stats.bootstrap([np.array([1.0, 2, 3, 4]), np.array([11.0, 12, 13, 14])], stats.difference_of_iqms)
    assert low <= 10 <= high and low > 7


def test_ratio_of_medians():
    fast, slow = [np.full(5, 600.0), np.full(4, 600.0)], [np.full(5, 100.0), np.full(3, 100.0)]
    assert stats.ratio_of_medians(fast, slow) == (6, 6, 6)
    rng = np.random.default_rng(3)
    noisy = [rng.normal(600, 60, size=20) for _ in range(5)]
    ratio, low, high = stats.ratio_of_medians(noisy, slow)
    assert low < ratio < high and 5.5 < low and high < 6.5


def test_ratio_of_medians_counts_rounds_not_windows():
    """Rounds that differ from each other make the interval wide, however many windows each has."""
    rounds = [np.full(1000, 500.0), np.full(1000, 700.0), np.full(1000, 600.0)]
    _, low, high = stats.ratio_of_medians(rounds, [np.full(10, 100.0)])
    assert low == 5 and high == 7


def test_the_median_is_that_of_all_windows():
    """Not of the medians of rounds, which may have one window or many."""
    rounds = [np.full(9, 100.0), np.full(1, 300.0), np.full(1, 500.0)]
    assert stats.median_of_rounds(rounds) == 100
    assert stats.ratio_of_medians(rounds, [np.full(3, 50.0)])[0] == 2


def test_the_interval_of_a_ratio_holds_95_percent():
    """Of nine windows, two of them low, the median is low in 3 % of resamples; of seven, one of them low, in 1 %."""
    base = [np.full(4, 1.0)]
    for windows, ends in (([1, 1, 5, 5, 5, 5, 5, 9, 9], (1, 9)), ([1, 5, 5, 5, 5, 5, 9], (5, 5))):
        assert stats.ratio_of_medians([np.array(windows, dtype=float)], base)[1:] == ends


def test_a_difference_of_iqms_is_not_one_of_means():
    strata = [np.array([1.0, 2, 3, 1000]), np.ones(4)]
    assert stats.difference_of_iqms(strata) == -1.5


@pytest.mark.parametrize(
    ("seeds", "statistic", "share"),
    [(2, np.mean, 0.50), (3, np.mean, 0.75), (5, np.mean, 0.83), (5, stats.iqm, 0.90), (20, stats.iqm, 0.93)],
)
def test_intervals_over_few_seeds_are_too_narrow(seeds, statistic, share):
    """RESULTS.md names these shares of normally distributed results in which what is called 95 % holds the truth."""
    results = np.random.default_rng(4).normal(size=(seeds, 2000))
    low, high = stats.bootstrap([results], lambda strata: statistic(strata[0], axis=0))
    assert ((low < 0) & (high > 0)).mean() == pytest.approx(share, abs=0.04)


@pytest.mark.parametrize(("deficit", "share"), [(1, 0.25), (2, 0.66)])
def test_a_verdict_misses_small_deficits(deficit, share):
    """RESULTS.md names these shares of verdicts that say "below", of five normal results beside three of CleanRL's."""
    rng, trials = np.random.default_rng(7), 2000
    ours, theirs = rng.normal(-deficit, 1, (5, trials)), rng.normal(size=(3, trials))
    _, high = stats.bootstrap([ours], lambda strata: stats.iqm(strata[0], axis=0))
    assert (high < theirs.mean(0) - theirs.std(0)).mean() == pytest.approx(share, abs=0.05)


@pytest.mark.parametrize(("rounds", "share"), [(2, 0.76), (3, 0.85), (5, 0.92)])
def test_intervals_over_few_rounds_are_too_narrow(monkeypatch, rounds, share):
    """Likewise of a ratio, if rounds of twenty windows differ by as much as windows within them do."""
    monkeypatch.setattr(stats, "RESAMPLES", 200)
    rng, trials = np.random.default_rng(5), 400

    def speeds() -> list[np.ndarray]:
        return [rng.normal(rng.normal(100, 5), 5, size=20) for _ in range(rounds)]

    intervals = [stats.ratio_of_medians(speeds(), speeds())[1:] for _ in range(trials)]
    assert np.mean([low < 1 < high for low, high in intervals]) == pytest.approx(share, abs=0.05)


@pytest.mark.parametrize(
    ("seeds", "shares", "held"), [(5, (1.0, 1.0), 0.87), (5, (0.8, 1.0), 0.70), (10, (1.0, 1.0), 0.88)]
)
def test_intervals_of_times_to_a_score_are_too_narrow(monkeypatch, seeds, shares, held):
    """The texts of `time-to-score` and `speedrun` name these: runs reach a score after 100 s or, by a share, never."""
    monkeypatch.setattr(stats, "RESAMPLES", 300)
    rng, found = np.random.default_rng(6), []

    def contestant(share: float) -> np.ndarray:
        reached = rng.random(seeds) < share
        return np.stack([np.where(reached, rng.normal(100, 20, seeds), 200.0), reached], axis=1)

    first, second = (200 / share - 100 for share in shares)  # what somebody waits who starts anew
    for _ in range(400):
        low, high = report.interval([contestant(share) for share in shares], time_to_score.times_as_fast)
        found.append(low <= second / first <= high)
    assert np.mean(found) == pytest.approx(held, abs=0.04)
