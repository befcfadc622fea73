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


def test_the_bootstrap_interval_of_a_median_holds_95_percent():
    """Of nine values, two of them low, the median is low in 3 % of resamples; of seven, one of them low, in 1 %."""
    for values, ends in (([1, 1, 5, 5, 5, 5, 5, 9, 9], (1, 9)), ([1, 5, 5, 5, 5, 5, 9], (5, 5))):
        assert stats.bootstrap([np.array(values)], lambda strata: np.median(strata[0])) == ends


def test_ratio_of_rounds_pairs_them():
    """A round in which the whole machine is slow changes nothing; one round alone has no interval."""
    assert stats.ratio_of_rounds([600, 300, 60], [100, 50, 10]) == (pytest.approx(6), pytest.approx([6, 6]))
    assert stats.ratio_of_rounds([600], [100]) == (pytest.approx(6), None)
    ratio, (low, high) = stats.ratio_of_rounds([100, 400], [100, 100])
    assert ratio == pytest.approx(2) and low * high == pytest.approx(4)
    assert np.log(high / ratio) == pytest.approx(12.706 * np.log(4) / 2)  # of two logarithms, half their distance


def test_students_interval():
    assert stats.student_interval([1, 2, 3, 4, 5]) == pytest.approx([1.037, 4.963], abs=0.001)
    assert stats.student_interval([1.0]) is None
    for size, factor in {3: 4.303, 11: 2.228, 12: 2.201, 21: 2.086, 31: 2.042, 1001: 1.962}.items():  # from a table
        values = np.arange(size)
        _, high = stats.student_interval(values)
        half = (high - values.mean()) * size**0.5 / values.std(ddof=1)
        assert half == pytest.approx(factor, abs=0.02)


def test_a_difference_of_iqms_is_not_one_of_means():
    strata = [np.array([1.0, 2, 3, 1000]), np.ones(4)]
    assert stats.difference_of_iqms(strata) == -1.5


@pytest.mark.parametrize(
    ("seeds", "statistic", "share"), [(3, np.mean, 0.75), (5, stats.iqm, 0.90), (20, stats.iqm, 0.93)]
)
def test_intervals_over_few_seeds_are_too_narrow(seeds, statistic, share):
    """RESULTS.md names the share of five normally distributed results whose interval, called 95 %, holds the truth.

    Three are too few for `report.interval`.
    """
    results = np.random.default_rng(4).normal(size=(seeds, 2000))
    low, high = stats.bootstrap([results], lambda strata: statistic(strata[0], axis=0))
    assert ((low < 0) & (high > 0)).mean() == pytest.approx(share, abs=0.04)


@pytest.mark.parametrize(("deficit", "share"), [(0, 0.02), (1, 0.17), (2, 0.5)])
def test_a_verdict_misses_small_deficits(deficit, share):
    """RESULTS.md names these shares of verdicts that say "below", of five normal results beside three of CleanRL's."""
    rng, trials = np.random.default_rng(7), 2000
    ours, theirs = rng.normal(-deficit, 1, (trials, 5)), rng.normal(size=(trials, 3))
    highs = [stats.welch_interval(x, y.mean(), y.std(), 3)[1] for x, y in zip(ours, theirs, strict=True)]
    assert (np.array(highs) < 0).mean() == pytest.approx(share, abs=0.03)


def test_welchs_interval():
    ours, theirs = [1.0, 2.0, 4.0, 4.0, 9.0], np.array([3.0, 5.0, 10.0])
    low, high = stats.welch_interval(ours, theirs.mean(), theirs.std(), 3)
    a, b = np.var(ours, ddof=1) / 5, theirs.var(ddof=1) / 3
    freedom = (a + b) ** 2 / (a**2 / 4 + b**2 / 2)
    assert 3 < freedom < 4 and (low + high) / 2 == pytest.approx(-2)
    assert (high - low) / 2 == pytest.approx(3.182 * (a + b) ** 0.5)  # for 3 degrees of freedom, from a table
    assert stats.welch_interval([5.0] * 5, 5.0, 0.0, 3) == [0, 0]


@pytest.mark.parametrize("rounds", [2, 3, 5])
def test_intervals_over_few_rounds_are_wide_enough(rounds):
    """Of a ratio, if rounds of twenty windows differ by as much as windows within them do."""
    rng, trials = np.random.default_rng(5), 2000
    speeds = rng.normal(rng.normal(100, 5, (trials, 2, rounds, 1)), 5, (trials, 2, rounds, 20))
    intervals = [stats.ratio_of_rounds(*medians)[1] for medians in np.median(speeds, axis=-1)]
    assert np.mean([low < 1 < high for low, high in intervals]) == pytest.approx(0.95, abs=0.015)


@pytest.mark.parametrize("blocks", [4, 10])
def test_intervals_over_blocks_of_calls_are_wide_enough(blocks):
    """`inference` and `rollout`: two neighbouring blocks are slow together, and have outliers of their own."""
    rng, trials = np.random.default_rng(8), 2000
    shared = rng.exponential(0.2, (trials, blocks))  # up to twice the time, as beside another job
    own = rng.normal(0, 0.02, (2, trials, blocks)) + np.where(rng.random((2, trials, blocks)) < 0.1, 0.1, 0)
    intervals = [stats.ratio_of_rounds(*times)[1] for times in np.exp(shared + own).swapaxes(0, 1)]
    assert np.mean([low < 1 < high for low, high in intervals]) == pytest.approx(0.96, abs=0.02)


@pytest.mark.slow
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
