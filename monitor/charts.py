"""The charts of a run: matplotlib figures, saved as PNG or as SVG whose colors follow the page's light or dark theme.

Invariants:
- No global state: figures are made without pyplot, styles apply only inside `_styled`.
- Every color is one of `COLORS`; in an SVG each becomes the CSS variable of the same name.
- Without data a function returns None; a metric that is 0 in every step is no data.
"""

from __future__ import annotations

import functools
import io
import itertools
import re
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
from numpy.typing import NDArray

from ..common.scores import EvaluationResult
from .metrics import Row
from .series import CYCLE, by_staleness, by_suite, column, elapsed, name_of, smooth, staleness_tokens
from .text import count, duration, share

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
"""The light theme; each name is also a CSS variable of the report."""

_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "slipstream",
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

UNSMOOTHED = ("mismatch_max", "canary", "staleness_max", "staleness_mean", "pause_ms", "transfer_ms")
UNSMOOTHED += ("replicas", "replicas_failed")
"""Metrics whose single values matter: a maximum must stay visible."""

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


def to_svg(figure: Figure) -> str:
    """The `<svg>` element, transparent, text as text, colors as CSS variables."""
    text = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"(font: [^;\"]*?px) [^;\"]*", r"\1 var(--font)", svg)
    for size in ("width", "height"):
        svg = re.sub(rf'(<svg[^>]*?) {size}="[^"]*"', r"\1", svg)
    for name, color in COLORS.items():
        svg = svg.replace(color, f"var(--{name})")
    return svg


def reward(rows: Sequence[Row], evaluations: Sequence[EvaluationResult]) -> Figure:
    """Reward per step with its standard error, a smoothed line, and the evaluations: the first and the last as levels, more of
    them, or those of several suites, as points over their steps."""

    def draw(axes: Axes) -> None:
        steps, values = column(rows, "step"), column(rows, "reward_mean")
        if len(rows):
            error = column(rows, "reward_std") / np.sqrt(np.maximum(column(rows, "episodes"), 1))
            axes.fill_between(steps, values - error, values + error, color=COLORS["blue"], alpha=0.13, linewidth=0)
            marker = "o" if len(rows) <= 80 else ""
            label = "training batch ± standard error"
            axes.plot(steps, values, color=COLORS["blue"], alpha=0.5, linewidth=0.9, marker=marker, ms=2.5, label=label)
            axes.plot(steps, smooth(values), color=COLORS["blue"], linewidth=2.4, label="smoothed")
            _wall_time(axes, steps, elapsed(rows))
        else:
            axes.text(0.5, 0.5, "no step was finished", transform=axes.transAxes, ha="center", color=COLORS["muted"])
            axes.set_xticks([])
        if len(evaluations) > 2:
            _evaluation_points(axes, evaluations)
        else:
            _evaluation_levels(axes, evaluations)
        axes.set_ylabel("mean reward")
        axes.margins(x=0.015)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=4, columnspacing=1.6, handlelength=1.6)

    return _styled((9.2, 4.3), [draw])


def _evaluation_levels(axes: Axes, evaluations: Sequence[EvaluationResult]) -> None:
    styles = (("muted", (0, (4, 3))), ("green", "-"))
    for evaluation, (color, dash) in zip(evaluations, styles, strict=False):
        label = f"{name_of(evaluation)}: {evaluation.reward_mean:.3f} ± {evaluation.reward_stderr:.3f}"
        axes.axhline(evaluation.reward_mean, color=COLORS[color], linestyle=dash, linewidth=1.5, label=label)


def _evaluation_points(axes: Axes, evaluations: Sequence[EvaluationResult]) -> None:
    colors = itertools.cycle(("green", "orange", "ink", "red", "muted"))
    for (suite, results), color in zip(by_suite(evaluations).items(), colors, strict=False):
        steps, means = [one.step for one in results], [one.reward_mean for one in results]
        errors, label = [one.reward_stderr for one in results], f"evaluation {suite}".strip() + " ± standard error"
        axes.errorbar(
            steps, means, errors, color=COLORS[color], marker="s", ms=4, linewidth=1.5, capsize=2, label=label
        )


def staleness(rows: Sequence[Row], bound: int | None) -> Figure | None:
    """Share of the trained tokens by staleness, and the bound."""
    tokens = staleness_tokens(rows)
    total = sum(tokens.values())
    if not total:
        return None

    def draw(axes: Axes) -> None:
        last = max([*tokens, bound or 0])
        shares = [tokens.get(s, 0) / total for s in range(last + 1)]
        past = [bound is not None and s > bound for s in range(last + 1)]
        colors = [COLORS["red" if over else "blue"] for over in past]
        bars = axes.bar(range(last + 1), shares, width=0.72, color=colors)
        axes.bar_label(bars, [share(part) for part in shares], padding=2, fontsize=8.5, color=COLORS["ink"])
        if bound is not None:
            axes.axvline(bound + 0.5, color=COLORS["red"], linewidth=1.6)
            where = {"xy": (bound + 0.5, 1.0), "xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
            style = {"xytext": (-5, -3), "ha": "right", "va": "top", "color": COLORS["red"], "fontsize": 8.5}
            axes.annotate(f"max_staleness = {bound}", **where, **style)
        axes.set_xlim(-0.6, last + 1.0)
        axes.set_ylim(0, max(shares) * 1.28)
        axes.set_xticks(range(last + 1))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
        axes.grid(visible=False, axis="x")
        axes.set_xlabel("staleness: learner version − sampling version")
        axes.set_ylabel("trained tokens")

    return _styled((4.6, 2.7), [draw])


def lines(rows: Sequence[Row], series: Sequence[tuple[str, str, str]], unit: str) -> Figure | None:
    """Metrics over the steps; `series` are (metric, label, color). `unit` is `%` for shares, else the axis label."""
    series = [line for line in series if _has_data(rows, line[0])]
    if not series:
        return None

    def draw(axes: Axes) -> None:
        for name, label, color in series:
            _line(axes, rows, name, label, color)
        axes.set_ylim(bottom=0)
        if unit == "%":
            axes.set_ylim(0, 1)
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
        else:
            axes.yaxis.set_major_formatter(FuncFormatter(lambda number, _: count(number)))
            axes.set_ylabel(unit)
        axes.set_xlabel("step")
        axes.legend(**_ABOVE, ncols=len(series), handlelength=1.2)

    return _styled((4.6, 2.7), [draw])


def step_time(rows: Sequence[Row]) -> Figure | None:
    """Seconds of every step, stacked: waiting for a batch, stepping, pushing weights."""
    parts = [np.nan_to_num(column(rows, name)) for name in CYCLE]
    if not len(rows) or not sum(part.sum() for part in parts):
        return None

    def draw(axes: Axes) -> None:
        steps, bottom = column(rows, "step"), np.zeros(len(rows))
        edges = np.append(steps, steps[-1] + 1) - 0.5
        labels = (("waiting for a batch", "orange"), ("step", "blue"), ("push", "green"))
        for part, (label, color) in zip(parts, labels, strict=True):
            axes.stairs(bottom + part, edges, baseline=bottom, fill=True, color=COLORS[color], label=label, linewidth=0)
            bottom = bottom + part
        axes.set_ylim(bottom=0)
        if len(rows) < 8:
            axes.set_xticks(steps)
        axes.set_ylabel("seconds")
        axes.set_xlabel("step")
        axes.margins(x=0.01)
        axes.grid(visible=False, axis="x")
        axes.legend(**_ABOVE, ncols=3, handlelength=1.0)

    return _styled((4.6, 2.7), [draw])


def correction(rows: Sequence[Row], titles: dict[str, str]) -> Figure | None:
    """One small chart per metric `*_by_staleness`: its mean at each staleness. None where all tokens have the same staleness, or
    nothing differs by it."""
    found = {name: by_staleness(rows, name) for name in titles}
    present = [name for name, values in found.items() if len(values) > 1 and any(values.values())]
    if not present:
        return None

    def draw(axes: Axes, name: str) -> None:
        values = found[name]
        bars = axes.bar(list(values), list(values.values()), width=0.72, color=COLORS["blue"])
        axes.bar_label(bars, [f"{value:.2g}" for value in values.values()], padding=2, fontsize=8, color=COLORS["ink"])
        axes.set_title(titles[name], pad=6)
        axes.set_ylim(0, max(values.values()) * 1.25)
        axes.set_xticks(list(values))
        axes.set_xlabel("staleness")
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda number, _: count(number)))
        axes.grid(visible=False, axis="x")

    wide = min(4, len(present))
    return _styled((2.4 * wide, 2.2), [functools.partial(draw, name=name) for name in present], wide)


def small_multiples(rows: Sequence[Row], titles: dict[str, str]) -> Figure | None:
    """One small chart per metric that has data; `titles` are metric -> title."""
    present = [name for name in titles if _has_data(rows, name)]
    if not present:
        return None

    def draw(axes: Axes, name: str) -> None:
        _line(axes, rows, name, None, "blue")
        axes.set_title(titles[name], pad=6)
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda number, _: count(number)))

    wide = min(4, len(present))
    size = 2.4 * wide, 1.8 * -(-len(present) // wide)
    return _styled(size, [functools.partial(draw, name=name) for name in present], wide)


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


def _has_data(rows: Sequence[Row], name: str) -> bool:
    return bool(np.nan_to_num(column(rows, name), posinf=0.0, neginf=0.0).any())


def _line(axes: Axes, rows: Sequence[Row], name: str, label: str | None, color: str) -> None:
    """A metric, faint below its smoothed curve; few steps are dots."""
    steps, values, ink = column(rows, "step"), column(rows, name), COLORS[color]
    if len(rows) < 8:
        axes.plot(steps, values, marker="o", ms=3, label=label, color=ink)
        axes.set_xticks(steps)
    elif name in UNSMOOTHED:
        axes.plot(steps, values, label=label, color=ink)
    else:
        axes.plot(steps, values, linewidth=0.8, alpha=0.35, color=ink)
        axes.plot(steps, smooth(values), label=label, color=ink)


def _wall_time(axes: Axes, steps: NDArray[np.float64], seconds: NDArray[np.float64]) -> None:
    """A second axis on top: the wall time at the ticks of the lower axis."""
    wanted = MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]).tick_values(steps[0], steps[-1])
    ticks = [tick for tick in wanted if steps[0] <= tick <= steps[-1]]
    axes.set_xticks(ticks)
    axes.set_xlabel("step")
    top = axes.secondary_xaxis("top")
    top.set_xticks(ticks, [duration(float(np.interp(tick, steps, seconds))) for tick in ticks])
    top.spines["top"].set_visible(False)
    top.tick_params(length=0)
    top.set_xlabel("wall time")
