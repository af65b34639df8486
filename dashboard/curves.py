"""The dashboard's curves: the metrics of a run's steps as columns, read as the file grows, and their newest means.

Invariants:
- A learner that resumes repeats steps: of two rows for one step the later one counts.
- A metric that the row of a step lacks, or has as JSON's null, is null at that step of its column, never 0.
"""

from __future__ import annotations

import logging
import statistics
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..common.outcomes import WARN_SHARE, failed_share, failures_text
from ..configs import Config
from ..errors import StoreError
from ..monitor.follow import LineFollower
from ..monitor.metrics import EVALUATION, METRICS, Row, scalars
from ..monitor.series import (
    alike_share,
    alike_text,
    by_staleness,
    cycle_s,
    elapsed,
    of_policy,
    outcomes,
    staleness_tokens,
    total,
)
from ..monitor.settings import SETTINGS, marks, read_changes

log = logging.getLogger(__name__)

RECENT = 20  # steps that the present is a mean over
SPARK = 60  # steps of the small curve


RowNumbers = tuple[Row, dict[str, float]]
"""The row of a step, and its numbers by flat name."""


class MetricsTable:
    """The metrics of the steps of the run in `folder`; from any thread."""

    def __init__(self, folder: Path) -> None:
        self._follower = LineFollower(folder / METRICS)
        self._settings = folder / SETTINGS
        self._lock = threading.Lock()
        self._steps: dict[int, RowNumbers] = {}
        self._stale = False  # whether there are newer lines than `_found` has
        self._found: Sequence[RowNumbers] = []  # the same in their order; another list after new lines
        self._names: set[str] = set()  # of metrics that are not 0 in every step
        self._evaluations: list[Row] = []
        self._present: tuple[object, Config | None, dict[str, Any]] = (None, None, {})  # what it was found from

    def rows(self) -> list[Row]:
        """Of all steps, in their order. Raises OSError."""
        return [row for row, _ in self._follow()]

    def versions(self) -> dict[int, int]:
        """Of each step, in their order, the version that it made; steps of a critic's warm-up make none. Raises OSError."""
        return {row["step"]: row["version"] for row in of_policy(self.rows()) if "version" in row}

    def trained_steps(self) -> str:
        """Which steps the policy has trained, for an error. Raises OSError."""
        trained, rows = self.versions(), self.rows()
        text = f"it has trained steps {min(trained)} to {max(trained)}" if trained else "it has trained none yet"
        if warmup := [row["step"] for row in rows[: len(rows) - len(of_policy(rows))]]:
            text += f"; steps {warmup[0]} to {warmup[-1]} were the critic's warm-up, in which the policy is not trained"
        return text

    def present(self, config: Config | None) -> dict[str, Any]:
        """`present` of all rows, found anew only after new ones: every page asks for it after each change of the run's files.
        Raises OSError."""
        found = self._follow()
        if self._present[0] is not found or self._present[1] is not config:
            self._present = found, config, present([row for row, _ in found], config)
        return self._present[2]

    def columns(self, names: Sequence[str]) -> dict[str, Any]:
        """These metrics by step, with the seconds since the start of the first step; the names of all; the evaluations; and
        where settings changed."""
        found = self._follow()
        first = found[0][0] if found else {}
        began = first.get("time", 0.0) - cycle_s(first)
        return {
            "steps": [row["step"] for row, _ in found],
            "versions": [row.get("version") for row, _ in found],
            "seconds": [round(row["time"] - began, 3) if "time" in row else None for row, _ in found],
            "names": sorted(self._names),
            "columns": {name: [flat.get(name) for _, flat in found] for name in names},
            "evaluations": self._evaluations,
            "marks": self._marks([row for row, _ in found], began),
        }

    def _marks(self, rows: Sequence[Row], began: float) -> list[dict[str, Any]]:
        """Where settings changed: between two steps, and in seconds."""
        try:
            changed = marks(read_changes(self._settings), rows)
        except StoreError as error:
            log.warning("%s", error)
            return []
        return [{"steps": mark.step - 0.5, "seconds": mark.time - began, "text": mark.text} for mark in changed]

    def _follow(self) -> Sequence[RowNumbers]:
        with self._lock:
            for line in self._follower.lines():
                self._stale = True
                try:
                    row = msgspec.json.decode(line, type=dict[str, Any])
                    if EVALUATION in row:
                        self._evaluations.append(row)
                    else:
                        flat = scalars(row)
                        self._steps[int(row["step"])] = row, flat
                        self._names |= {name for name, value in flat.items() if value}
                except (msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
                    log.warning("%s: a line is no row of metrics and is left out: %r", self._follower.path, error)
            if self._stale:
                self._found, self._stale = [self._steps[step] for step in sorted(self._steps)], False
            return self._found


def present(rows: Sequence[Row], config: Config | None) -> dict[str, Any]:
    """What a person wants to know at first: the last step, and means over the newest `RECENT`; empty without a step. The first
    step, which waits for the first episodes, is left out where there are others."""
    if not rows:
        return {}
    last, steady = rows[-1], (rows[1:] or rows)[-RECENT:]
    cycles = [cycle_s(row) for row in steady]
    seconds, slot_s = sum(cycles), total(steady, "slot_s")
    steps, ended = config.learner.steps if config else None, outcomes(rows)
    return {
        "step": last["step"],
        "steps": steps,
        "version": last.get("version"),
        "time": last.get("time"),
        "reward": last.get("reward_mean"),
        "rewards": [row.get("reward_mean") for row in rows[-SPARK:]],
        "first_reward": rows[0].get("reward_mean"),
        "trained_tokens_per_s": total(steady, "tokens_trained") / seconds if seconds else None,
        "generated_tokens_per_s": last.get("rollout_tokens_per_s"),
        "staleness": last.get("staleness_mean"),
        "staleness_max": last.get("staleness_max"),
        "bound": config.buffer.max_staleness if config else None,
        "learner_idle": total(steady, "wait_s") / seconds if seconds else None,
        "rollout_idle": total(steady, "idle_slot_s") / slot_s if slot_s else None,
        "cycle_s": statistics.median(cycles),
        "left_s": max(0, steps - last["step"]) * statistics.median(cycles) if steps else None,
        "over": len(steady),
        "alike": alike_share(steady),
        "alike_all": alike_text(rows),
        "ess": last.get("ess"),
        "mismatch_max": last.get("mismatch_max"),
        "entropy": last.get("entropy"),
        "seconds": float(elapsed(rows)[-1]),
        "failures": failures_text(ended) if failed_share(ended) > WARN_SHARE else "",
    }


def corrections(rows: Sequence[Row], bound: int | None) -> dict[str, Any]:
    """Tokens trained at each staleness in the whole run, and how the correction weighed them there; `bound` is the largest that was
    in force."""
    names = ("ess", "kl", "clip_fraction", "weight")
    return {
        "bound": bound,
        "tokens": staleness_tokens(rows),
        "metrics": {name: by_staleness(rows, name) for name in names},
        "steps": len(rows),
    }
