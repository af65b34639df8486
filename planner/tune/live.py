"""When `slipstream tune RUN --live` moves the staleness bound of a run that goes on. Pure.

    rows of 10 steps ──> the learner waits > 10 %, the tokens are fresh (ess > 0.9)                     ──> bound + 1
                    └──> it waits < 3 %, tokens are as old as they may be, simulated loss < 3 %          ──> bound - 1

Invariants:
- The bound stays between `low` and `high`, and moves by one.
- Steps of another bound decide nothing: after a move, the user's own included, the run fills up first.
- A move back after a move doubles the steps that the next decision wants, so that a run between two bounds does not swing.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ...monitor.alerts import SETTLING
from ...monitor.metrics import Row
from ...monitor.series import by_staleness, column, mean, of_policy
from ...monitor.text import share
from ..figures import RunFigures
from ..fit import figures_of_rows
from .choice import FRESH, EssCurve

EVERY = 10  # steps that a decision is made of
PATIENT = 8  # most times as many, after moves to and fro
WAITS, BUSY = 0.10, 0.03  # of its time that the learner waits
AT_BOUND = 0.3  # versions below the bound: a mean staleness above has nearly all tokens as old as they may be
LOSS = 0.03  # of the trained tokens per second that a lower bound may cost


class BoundMove(msgspec.Struct, frozen=True):
    """A new value of `buffer.max_staleness`, and why."""

    bound: int
    why: str


class BoundRule:
    """`loss` is the share of the trained tokens per second that the run would lose at a bound, by simulation; None where that is
    not known. It is asked only where the bound would be lowered."""

    def __init__(self, bound: int, low: int, high: int, loss: Callable[[int], float | None]) -> None:
        self.bound, self._low, self._high, self._loss = bound, low, high, loss
        self._rows: list[Row] = []
        self._skip = 0  # rows until the run has filled up
        self._patience = 1
        self._last = 0  # direction of the last move

    def moved(self, bound: int) -> None:
        """The run has another bound from here on."""
        if bound != self.bound:
            self._skip = max(bound, self.bound) + SETTLING
            self.bound = bound
            self._rows.clear()

    def observe(self, row: Row) -> BoundMove | None:
        """A step has ended; those of a critic's warm-up decide nothing. The move that should be made now; `moved` says that it
        was."""
        if not of_policy([row]):
            return None
        if self._skip:
            self._skip -= 1
            return None
        self._rows.append(row)
        if len(self._rows) < self._patience * EVERY:
            return None
        move = self._decide()
        self._rows.clear()
        if move is not None:
            direction = move.bound - self.bound
            self._patience = min(PATIENT, 2 * self._patience) if direction == -self._last else 1
            self._last = direction
        return move

    def _ess(self, figures: RunFigures) -> float | None:
        """The lowest at any staleness; where steps have none by staleness, that of all tokens; None where nobody measured any."""
        if measured := by_staleness(self._rows, "ess"):
            return EssCurve(measured).rating(figures, figures.trained_tokens_per_s, 1, 0).ess
        return mean(column(self._rows, "ess"))

    def _decide(self) -> BoundMove | None:
        figures = figures_of_rows(self._rows)
        wait, age = figures.learner_wait, figures.staleness
        if wait > WAITS and self.bound < self._high:
            ess = self._ess(figures)
            if ess is not None and ess > FRESH:
                return BoundMove(self.bound + 1, f"the learner waits {share(wait)} of the time, ess {ess:.3f}")
        if wait < BUSY and age > self.bound - AT_BOUND and self.bound > self._low:
            loss = self._loss(self.bound - 1)
            if loss is not None and loss < LOSS:
                why = f"the learner waits {share(wait)} of the time, staleness {age:.2f}; simulated loss {100 * loss:.1f} %"
                return BoundMove(self.bound - 1, why)
        return None
