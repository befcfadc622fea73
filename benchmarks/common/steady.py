"""Steady speed from the lines of a log: burn-in, windows, shares of time, break-even. Pure functions of lists."""

import numpy as np

WINDOW = 2.0  # seconds: shorter windows show fluctuations of the machine rather than the program's speed
FIRST_LINES = 3  # lines after the first update that never count
STALL = 2.0  # a line in the first half that takes this many times the median counts as compiling: burn-in ends there


def first_update(lines: list[dict]) -> int | None:
    """Index of the first line with a loss, None if nothing has been learnt yet."""
    return next((i for i, line in enumerate(lines) if any(key.startswith("losses/") for key in line)), None)


def burn_in(lines: list[dict]) -> int:
    """Index of the line at which steady running begins.

    That is `FIRST_LINES` after the first update, or later: after the last line in the first half of the rest in which a
    step took far longer than usual, as when something compiled late. Without updates, counting is from the log's start.
    """
    start = min((first_update(lines) or 0) + FIRST_LINES, max(len(lines) - 1, 0))
    rest = lines[start:]
    if len(rest) < 2 * FIRST_LINES:
        return start
    steps, seconds = (np.diff([line[key] for line in rest]) for key in ("global_step", "seconds"))
    time_per_step = seconds / np.maximum(steps, 1)
    stalls = np.flatnonzero(time_per_step[: len(time_per_step) // 2] > STALL * np.median(time_per_step))
    return start + (int(stalls[-1]) + 1 if len(stalls) else 0)


def steady_seconds(lines: list[dict]) -> float:
    """Seconds from the end of the burn-in to the last line."""
    return lines[-1]["seconds"] - lines[burn_in(lines)]["seconds"] if lines else 0.0


def cut(lines: list[dict], length: float) -> np.ndarray:
    """Speeds (W,) in steps/s of windows of whole lines, each at least `length` seconds long, from the first line on."""
    speeds, begin = [], lines[0] if lines else None
    for line in lines[1:]:
        seconds = line["seconds"] - begin["seconds"]
        if seconds >= length:
            speeds.append((line["global_step"] - begin["global_step"]) / seconds)
            begin = line
    return np.array(speeds)


def windows(lines: list[dict], length: float = WINDOW) -> np.ndarray:
    """Speed (W,) in steps/s of windows after the burn-in."""
    return cut(lines[burn_in(lines) :], length)


def section_times(lines: list[dict], sections: tuple[str, ...]) -> dict[str, float]:
    """Seconds per step in each section that `ceilings` samples, after the burn-in.

    The time by the log's clock is divided as the samples are: by the sampler's clock a line may get some of its
    neighbour's time, and what a difference of the two left for the last section could be less than nothing.
    """
    begin, rest = lines[burn_in(lines)], lines[burn_in(lines) + 1 :]
    time_per_step = (lines[-1]["seconds"] - begin["seconds"]) / (lines[-1]["global_step"] - begin["global_step"])
    sampled = {section: sum(line[f"profile/{section}"] for line in rest) for section in sections}
    total = sum(sampled.values()) or 1.0  # a run may end before the first sample
    return {section: time_per_step * value / total for section, value in sampled.items()}


def break_even(start: float, speed: float, other_start: float, other_speed: float) -> float | None:
    """Steps after the first update until a program has overtaken one that starts up faster; None if it never does.

    `start` is the wall time in seconds until the first update, `speed` the steady speed after it in steps/s.
    """
    if speed <= other_speed:
        return None
    return max(0.0, (start - other_start) / (1 / other_speed - 1 / speed))
