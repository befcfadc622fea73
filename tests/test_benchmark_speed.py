"""Steady speed from lines of a log."""

import numpy as np
import pytest

from benchmarks.common import steady
from benchmarks.throughput import ceilings


def log(*speeds: float, updates_from: int = 0, steps: int = 100) -> list[dict]:
    """A log with one line for each speed in steps/s; the lines from `updates_from` on have a loss."""
    seconds = np.cumsum([steps / x for x in speeds])
    lines = [{"global_step": steps * (i + 1), "seconds": float(x)} for i, x in enumerate(seconds)]
    for line in lines[updates_from:]:
        line["losses/td_loss"] = 1.0
    return lines


def test_burn_in_drops_what_comes_before_the_updates_and_the_first_of_them():
    lines = log(*[9000] * 5, *[100] * 30, updates_from=5)
    assert steady.first_update(lines) == 5 and steady.burn_in(lines) == 5 + steady.FIRST_LINES
    assert steady.windows(lines, 2) == pytest.approx([100] * 13)
    assert steady.steady_seconds(lines) == pytest.approx(26)


def test_burn_in_ends_after_a_late_compilation_but_not_after_a_late_hiccup():
    lines = log(100, 100, 100, 100, 5, 100, 100, 100, 100, 100, 100, 100, 20, 100)
    assert steady.burn_in(lines) == 4  # the line with the stall is the start of the first window
    assert steady.windows(lines, 2).min() < 100  # the second one counts


def test_nothing_is_steady_in_a_short_or_empty_log():
    assert steady.windows([]).size == 0 and steady.steady_seconds([]) == 0
    for length in range(1, 5):
        assert steady.windows(log(*[100] * length), 2).size == 0
    assert steady.first_update(log(100, updates_from=1)) is None


def test_a_log_without_updates_counts_from_its_start():
    assert steady.burn_in(log(*[100] * 20, updates_from=99)) == steady.FIRST_LINES


def test_windows_are_of_whole_lines_and_long_enough():
    lines = log(*[100] * 4, 50, 200, 50, 200, 50, 200, 50)
    assert steady.windows(lines, 2) == pytest.approx([50, 80, 80, 80])


def test_break_even():
    assert steady.break_even(start=30, speed=200, other_start=0, other_speed=100) == 6000
    assert steady.break_even(start=1, speed=200, other_start=2, other_speed=100) == 0
    assert steady.break_even(start=30, speed=100, other_start=0, other_speed=100) is None


def test_section_times():
    lines = log(*[100] * 20)
    for line in lines:
        line |= {"profile/env": 0.2, "profile/policy": 0.1, "profile/learn": 0.5, "profile/rest": 0.2}
    times = steady.section_times(lines, ceilings.SECTIONS)
    assert times == pytest.approx({"env": 0.002, "policy": 0.001, "learn": 0.005, "rest": 0.002})


def test_section_times_make_up_the_time_of_the_log():
    """Though by the sampler's clock the time before the first of these lines, 0.7 s, was theirs."""
    lines = log(*[100] * 20)
    for line in lines:
        line |= {"profile/env": 0.2, "profile/policy": 0.3, "profile/learn": 0.5, "profile/rest": 0.0}
    lines[-1]["profile/learn"] += 0.7
    times = steady.section_times(lines, ceilings.SECTIONS)
    assert sum(times.values()) == pytest.approx(0.01) and min(times.values()) == 0


def test_burn_in_ends_after_the_last_of_several_late_compilations():
    """However much longer another one took."""
    slow = {4: 1.0, 8: 25.0}  # steps/s
    seconds = np.cumsum([100 / slow.get(i, 100.0) for i in range(40)])
    lines = [{"global_step": 100 * (i + 1), "seconds": float(x)} for i, x in enumerate(seconds)]
    assert steady.burn_in(lines) == 8
    assert steady.windows(lines, 1.0) == pytest.approx([100] * 31)
