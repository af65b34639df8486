"""The plot of `bench learning`: reward by samples and by wall time, with correction above and without it below.

Invariants:
- A line is the mean over seeds of the smoothed reward of training batches; its band lies between the lowest and the highest seed.
- TRL, where it is, and synchronous training are in every chart.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..monitor.charts import COLORS, save_png
from ..monitor.series import smooth
from .learning_arms import Arm, Run

STALE = ("#7db3e8", "#2563b8", "#8a5fc4", "#c9610f", "#c2332f")
"""Lines of stale arms, from the lowest bound to the highest."""


def draw(runs: Sequence[Run], path: Path) -> None:
    """Write the plot as PNG."""
    by_arm: dict[Arm, list[Run]] = {}
    for run in runs:
        by_arm.setdefault(run.arm, []).append(run)
    stale = sorted({arm.max_staleness for arm in by_arm if arm.max_staleness > 0})
    colors = {bound: STALE[number % len(STALE)] for number, bound in enumerate(stale)}
    figure = Figure(figsize=(10.5, 7.0), layout="constrained")
    grid = figure.subplots(2, 2, sharey=True)
    for row, corrected in zip(grid, (True, False), strict=True):
        shown = {
            arm: several for arm, several in by_arm.items() if arm.max_staleness <= 0 or arm.corrected == corrected
        }
        for axes, seconds in zip(row, (False, True), strict=True):
            for arm, several in shown.items():
                color = {-1: COLORS["ink"], 0: COLORS["green"]}.get(arm.max_staleness) or colors[arm.max_staleness]
                _line(axes, several, color, arm.title, seconds=seconds)
            axes.set_title("with correction" if corrected else "without correction", loc="left", fontsize=9.5)
            axes.set_xlabel("seconds of training" if seconds else "samples")
            axes.grid(color=COLORS["grid"], linewidth=0.7)
            axes.spines[["top", "right", "left"]].set_visible(False)
        row[0].set_ylabel("mean reward of training batches, smoothed")
        row[0].legend(frameon=False, fontsize=8, loc="best")
    save_png(figure, path)


def _line(axes: Axes, several: Sequence[Run], color: str, label: str, *, seconds: bool) -> None:
    steps = min(len(run.points) for run in several)
    rewards = np.array([smooth(np.array([point.reward for point in run.points[:steps]])) for run in several])
    at = np.array([[point.seconds if seconds else point.samples for point in run.points[:steps]] for run in several])
    axes.plot(at.mean(0), rewards.mean(0), color=color, linewidth=1.6, label=label)
    if len(several) > 1:
        axes.fill_between(at.mean(0), rewards.min(0), rewards.max(0), color=color, alpha=0.12, linewidth=0)
