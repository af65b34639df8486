"""Charts of comparisons: matplotlib figures, saved as PNG. What a run did is drawn by the dashboard.

Invariants:
- No global state: figures are made without pyplot, styles apply only inside `_styled`.
- Every color is one of `COLORS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import msgspec
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from .text import count

COLORS = {
    "ink": "#1c2128",
    "muted": "#6b7480",
    "grid": "#e3e6ea",
    "surface": "#fefefe",
    "blue": "#2563b8",
    "orange": "#c9610f",
    "green": "#1f8a4c",
    "red": "#c2332f",
}
"""Those of the dashboard's light theme."""

_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": COLORS["ink"],
    "axes.edgecolor": COLORS["grid"],
    "axes.facecolor": "none",
    "axes.labelcolor": COLORS["muted"],
    "axes.labelsize": 8.5,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.titlecolor": COLORS["ink"],
    "axes.grid": True,
    "axes.axisbelow": True,
    **{f"axes.spines.{side}": False for side in ("top", "right", "left")},
    "grid.color": COLORS["grid"],
    "grid.linewidth": 0.7,
    **dict.fromkeys(("xtick.color", "ytick.color"), COLORS["grid"]),
    **dict.fromkeys(("xtick.labelcolor", "ytick.labelcolor"), COLORS["muted"]),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize"), 8),
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
}

_ABOVE: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (-0.02, 1.0), "columnspacing": 1.4}
"""Where the legend of a small chart is."""

Draw = Callable[[Axes], None]


class SettingPoint(msgspec.Struct, frozen=True):
    """A setting in `settings`: shares are 0 to 1; `measured` where it is of a run, not of a simulation."""

    label: str
    tokens_per_s: float
    staleness: float
    learner_wait: float
    rollout_idle: float
    measured: bool = False


class TuningPoint(msgspec.Struct, frozen=True):
    """A setting in `tuning`: (mean staleness, trained tokens per second) by simulation and, where there was a run, by that."""

    label: str
    simulated: tuple[float, float]
    measured: tuple[float, float] | None
    chosen: bool


def save_png(figure: Figure, path: Path) -> None:
    with matplotlib.rc_context(_STYLE):
        figure.savefig(path, format="png", dpi=160, facecolor=COLORS["surface"])


def settings(points: Sequence[SettingPoint]) -> Figure:
    """What settings would do: trained tokens per second against staleness, and which side would wait."""

    def frontier(axes: Axes) -> None:
        for point in points:
            ink, marker = COLORS["orange" if point.measured else "blue"], "D" if point.measured else "o"
            axes.plot(point.staleness, point.tokens_per_s, marker, ms=5.5, color=ink)
            where = {"xytext": (6, 3), "textcoords": "offset points", "fontsize": 7.5, "color": COLORS["muted"]}
            axes.annotate(point.label, (point.staleness, point.tokens_per_s), **where)
        axes.set_ylim(0, 1.18 * max(point.tokens_per_s for point in points))
        axes.set_xlim(-0.1, 1.35 * max(0.5, *(point.staleness for point in points)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda number, _: count(number)))
        axes.set_xlabel("mean staleness of trained tokens, versions")
        axes.set_ylabel("trained tokens/s")

    def waits(axes: Axes) -> None:
        rows = np.arange(len(points))
        for shift, name, label, color in (
            (-0.19, "learner_wait", "learner waits for a batch", "orange"),
            (0.19, "rollout_idle", "rollout slots are empty", "blue"),
        ):
            axes.barh(rows + shift, [getattr(p, name) for p in points], 0.34, color=COLORS[color], label=label)
        axes.set_yticks(rows, [point.label for point in points])
        axes.invert_yaxis()
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
        axes.grid(visible=False, axis="y")
        axes.legend(**_ABOVE, ncols=2, handlelength=1.2)

    return _styled((9.2, max(3.0, 1.2 + 0.42 * len(points))), [frontier, waits], 2)


def tuning(points: Sequence[TuningPoint]) -> Figure:
    """What a search found: trained tokens per second against staleness. A line joins what was simulated and what was measured."""

    def draw(axes: Axes) -> None:
        axes.plot(
            *zip(*(p.simulated for p in points), strict=True),
            "o",
            ms=3,
            color=COLORS["muted"],
            alpha=0.6,
            label="simulated",
        )
        labels = {True: "chosen", False: "measured"}
        for point in points:
            if point.measured is None:
                continue
            ink = COLORS["green" if point.chosen else "orange"]
            axes.plot(*zip(point.simulated, point.measured, strict=True), color=ink, linewidth=0.8, alpha=0.6)
            axes.plot(
                *point.measured, "D", ms=8 if point.chosen else 5.5, color=ink, label=labels.pop(point.chosen, None)
            )
            where = {"xytext": (7, 4), "textcoords": "offset points", "fontsize": 7.5, "color": COLORS["ink"]}
            axes.annotate(point.label, point.measured, **where)
        every = [pair for p in points for pair in (p.simulated, p.measured) if pair is not None]
        axes.set_ylim(0, 1.18 * max(rate for _, rate in every))
        axes.set_xlim(-0.1, 1.3 * max(0.5, *(age for age, _ in every)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda number, _: count(number)))
        axes.set_xlabel("mean staleness of trained tokens, versions")
        axes.set_ylabel("trained tokens/s")
        axes.legend(**_ABOVE, ncols=3, handlelength=1.2)

    return _styled((9.2, 4.6), [draw])


def _styled(size: tuple[float, float], draws: Sequence[Draw], wide: int = 1) -> Figure:
    """A figure of `size` inches with one axes per drawing, `wide` axes in a row."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(hspace=0.06, wspace=0.03))
        for position, draw in enumerate(draws, start=1):
            axes = figure.add_subplot(-(-len(draws) // wide), wide, position)
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            draw(axes)
        return figure
