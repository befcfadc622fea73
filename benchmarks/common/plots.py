"""Publication-quality figures: one style, and one colour per variant, in all of them. Needs no display."""

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

# Okabe and Ito's colours, which also differ for the colour-blind
COLOURS = {
    "eager": "#0072B2", "lean": "#56B4E9", "compile": "#D55E00", "compile+cudagraphs": "#CC79A7",
    "cudagraphs": "#F0E442", "sb3": "#009E73", "sbx": "#E69F00", "leanrl": "#999999",
    "cleanrl": "#000000",
}  # fmt: skip
LABELS = {"leanrl": "LeanRL", "sb3": "SB3", "sbx": "SBX", "lean": "compile script, uncompiled"}
LABELS |= {"rllib": "RLlib", "cleanrl": "CleanRL"}
MOST_NAMED = 8  # curves of which a legend has all names
STYLE = {
    "font.size": 10, "axes.titlesize": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.alpha": 0.25, "grid.linewidth": 0.6, "axes.axisbelow": True, "lines.linewidth": 1.6, "legend.frameon": False,
    "figure.constrained_layout.use": True, "savefig.dpi": 160,
}  # fmt: skip


def colour(variant: str) -> str:
    return COLOURS.get(variant.partition(" ")[0], "#555555")


def shades(variants: list[str]) -> dict[str, tuple]:
    """Distinct colours for variants that share a name and have different flags; others keep the colour of the name."""
    alike = {}
    for variant in variants:
        name, _, flags = variant.partition(" ")
        alike.setdefault(name, []).extend([variant] * bool(flags))
    several = list(chain(*(own for own in alike.values() if len(own) > 1)))
    return {x: plt.colormaps["viridis"](0.85 * (i / (len(several) - 1))) for i, x in enumerate(several)}


def label(variant: str) -> str:
    name, space, flags = variant.partition(" ")
    return LABELS.get(name, name) + space + flags


@contextmanager
def figure(path: Path, rows: int = 1, columns: int = 1, size: tuple[float, float] = (5.2, 3.4)) -> Iterator[np.ndarray]:
    """Axes (rows, columns) to draw on, each of `size` in inches; the figure is written to `path` at the end."""
    with plt.rc_context(STYLE):
        shape = {"figsize": (size[0] * columns, size[1] * rows), "squeeze": False}
        fig, axes = plt.subplots(rows, columns, **shape)
        try:
            yield axes
            path.parent.mkdir(parents=True, exist_ok=True)
            fig.savefig(path)
        finally:
            plt.close(fig)


@contextmanager
def grid(path: Path, count: int, size: tuple[float, float] = (5.2, 3.4)) -> Iterator[list]:
    """The same for `count` axes in two columns, without those that are left over."""
    with figure(path, rows=-(-count // 2), columns=min(count, 2), size=size) as axes:
        for axis in axes.flat[count:]:
            axis.set_visible(False)
        yield list(axes.flat[:count])


def legend(axis, curves: int) -> None:
    """A legend of so many curves, and of any lines behind them; if they are many, of the first and the last curve."""
    handles, names = axis.get_legend_handles_labels()
    names = [textwrap.fill(name, 60, break_long_words=False, break_on_hyphens=False) for name in names]
    if curves <= MOST_NAMED:
        axis.legend(handles, names)
        return
    ends = [0, *range(curves - 1, len(names))]
    title = f"{curves} curves in the order of the table, from and to"
    axis.legend([handles[i] for i in ends], [names[i] for i in ends], title=title)


def describe_axis(axis, title: str, x: str, y: str) -> None:
    """Title, in lines that fit, with no flag broken; labels with their units, and thousands as 200k."""
    lines = [textwrap.wrap(line, 54, break_long_words=False, break_on_hyphens=False) for line in title.splitlines()]
    axis.set(title="\n".join(chain(*lines)), xlabel=x, ylabel=y)
    if x.endswith("steps"):
        axis.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))


def draw_curve(
    axis, x: np.ndarray, y: np.ndarray, variant: str, name: str, band: tuple | None = None, shade: tuple | None = None
) -> None:
    """A line in the variant's colour, dotted if it has flags, or in a shade; around it the band, if there is one."""
    style = {"color": shade, "linestyle": "-"} if shade else {"color": colour(variant)}
    axis.plot(x, y, **({"linestyle": ":" if " " in variant else "-"} | style), label=name)
    if band is not None:
        axis.fill_between(x, *band, color=style["color"], alpha=0.18, linewidth=0)


def draw_bars(
    axis, names: list[str], values: list[float], errors: list[tuple[float, float]], form: str = ",.0f"
) -> None:
    """Horizontal bars, one per variant, the first on top, with error bars (low, high) and the value beside each."""
    place = np.arange(len(names))
    distance = np.abs(np.array(errors).T - np.array(values))
    axis.barh(place, values, color=[colour(name) for name in names], height=0.65)
    axis.errorbar(values, place, xerr=distance, fmt="none", ecolor="#333333", elinewidth=1, capsize=2.5)
    for i, value in enumerate(values):
        axis.annotate(f"{value:{form}}", (errors[i][1], i), xytext=(5, 0), textcoords="offset points", va="center")
    axis.set_yticks(place, [label(name) for name in names])
    axis.invert_yaxis()
    axis.margins(x=0.15)
    axis.grid(visible=False, axis="y")


def draw_groups(axis, groups: dict[str, dict[str, tuple[float, tuple[float, float]]]], form: str = ",.0f") -> None:
    """For each group the (value, (low, high)) of its variants as horizontal bars, with the values beside them.

    A line to infinity ends a quarter beyond all that is finite.
    """
    all_ends = np.array([end for own in groups.values() for _, ends in own.values() for end in ends])
    beyond = 1.25 * max(all_ends[np.isfinite(all_ends)], default=1.0)
    names = list(dict.fromkeys(name for own in groups.values() for name in own))
    height = 0.8 / max(len(names), 1)
    for i, name in enumerate(names):
        bars = [(place, own[name]) for place, own in enumerate(groups.values()) if name in own]
        places = np.array([place + (i - (len(names) - 1) / 2) * height for place, _ in bars])
        values, intervals = np.array([x for _, (x, _) in bars]), np.array([x for _, (_, x) in bars])
        intervals[np.isinf(intervals)] = beyond
        pale = {"alpha": 0.5} if name.endswith("(cold)") else {}
        axis.barh(places, values, color=colour(name), height=0.9 * height, label=label(name), **pale)
        axis.errorbar(values, places, xerr=np.abs(intervals.T - values), fmt="none", ecolor="#333333", elinewidth=1)
        for place, value, (_, high) in zip(places, values, intervals, strict=True):
            where = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 8}
            axis.annotate(f"{value:{form}}", (high, place), **where)
    axis.set_yticks(range(len(groups)), list(groups))
    axis.invert_yaxis()
    axis.margins(x=0.15)
    axis.grid(visible=False, axis="y")


def draw_heat_map(axis, log2_ratios: np.ndarray, notes: np.ndarray, rows: list[str], columns: list[str]) -> None:
    """Ratios (rows, columns) as colours, orange below 1 and blue above, from 1/4 to 4; grey where they are NaN."""
    colours = matplotlib.colors.LinearSegmentedColormap.from_list("ratio", ["#D55E00", "#F7F7F7", "#0072B2"])
    axis.imshow(log2_ratios, cmap=colours.with_extremes(bad="#DDDDDD"), vmin=-2, vmax=2, aspect="auto")
    for (i, j), note in np.ndenumerate(notes):
        strong = np.abs(np.nan_to_num(log2_ratios[i, j])) > 1.3
        axis.text(j, i, note, ha="center", va="center", fontsize=8, color="white" if strong else "black")
    axis.set_xticks(range(len(columns)), columns)
    axis.set_yticks(range(len(rows)), rows)
    axis.grid(visible=False)
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)
