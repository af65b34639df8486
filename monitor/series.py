"""Pure functions from the rows of a finished, stopped or active run to the numbers and sentences shown.

Invariants:
- Rows, evaluations, the ledger and single numbers may be missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..common.fsio import read_json
from ..common.outcomes import failures_text
from ..common.scores import EvaluationResult, EvaluationScore
from .metrics import Row
from .text import reward

CYCLE = ("wait_s", "step_s", "push_s")  # the metrics that a learner step's time is made of
EVALUATIONS = "evaluations.json"  # in the folder of a run

ALIKE_SHARE = 0.4  # of a batch's groups: with more whose rewards are all equal, most of a step is spent on no signal


def read_evaluations(path: Path) -> list[EvaluationResult]:
    """Evaluations in their order; empty where there is no file. Raises StoreError where the file is not valid."""
    return read_json(path, list[EvaluationResult], [], "a list of evaluations")


def evaluation_line(evaluation: EvaluationResult) -> str:
    """An evaluation in one line, with the means of a mixture's environments, and how many episodes failed."""
    e = evaluation
    line = f"{name_of(e)}: reward {reward_text(e)} over {e.tasks} held-out task{'s' * (e.tasks != 1)}"
    if e.environments:
        means = ((name, row.reward_mean) for name, row in e.environments.items())
        line += f" ({', '.join(f'{name} {reward(value)}' for name, value in means)})"
    if e.samples > 1:
        line += f", {e.samples} samples each; {pass_text(e)}"
    if e.versions:
        line += f"; its tokens are of the versions {', '.join(map(str, e.versions))}"
    failed = failures_text(e.outcomes)
    return f"{line}; {failed} and count in no mean" if failed else line


def of_policy(rows: Iterable[Row]) -> list[Row]:
    """Without those of the critic's warm-up, in which the policy takes no step."""
    return [row for row in rows if row.get("grad_norm", 0.0) is not None]


def name_of(evaluation: EvaluationResult) -> str:
    """`step 20`, or with a suite `step 20, math`."""
    return f"{evaluation.label}, {evaluation.suite}" if evaluation.suite else evaluation.label


def reward_text(evaluation: EvaluationResult) -> str:
    """`0.500 ± 0.044`, or `1.000` of one task, which says nothing of others."""
    error = f" ± {evaluation.reward_stderr:.3f}" if evaluation.tasks > 1 else ""
    return f"{evaluation.reward_mean:.3f}{error}"


def pass_text(evaluation: EvaluationScore) -> str:
    """`pass@1 0.500 ± 0.044, pass@4 0.781 ± 0.037`."""
    found = evaluation.pass_at.items()
    return ", ".join(f"pass@{k} {one.mean:.3f} ± {one.stderr:.3f}" for k, one in found)


def column(rows: Sequence[Row], name: str) -> NDArray[np.float64]:
    """float64[rows]: one metric over the steps, NaN where it is missing or null."""
    values: Iterable[Any] = (row.get(name) for row in rows)
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def mean(values: NDArray[np.float64]) -> float | None:
    """Mean of the finite values, None where there are none."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else None


def total(rows: Sequence[Row], name: str) -> float:
    """Sum of a metric over the steps; missing values count as 0."""
    return sum(row.get(name) or 0.0 for row in rows)


def cycle_s(row: Row) -> float:
    """Seconds from the end of the step before to the end of this one, its push included."""
    return sum(row.get(part) or 0.0 for part in CYCLE)


def alike_share(rows: Sequence[Row]) -> float:
    """Share of the groups whose episodes all had the same reward."""
    groups = total(rows, "groups")
    return total(rows, "groups_alike") / groups if groups else 0.0


def alike_text(rows: Sequence[Row]) -> str:
    """`244 of 480 groups had equal rewards`; empty where none had."""
    alike = total(rows, "groups_alike")
    return f"{alike:.0f} of {total(rows, 'groups'):.0f} groups had equal rewards" if alike else ""


def by_staleness(rows: Sequence[Row], name: str) -> dict[int, float]:
    """Staleness, ascending -> mean over the trained tokens of that staleness in the whole run. `name` is the metric without
    `_by_staleness`; of `weight`, a share of each step's sum, it is the weight of a token, 1 for the average token."""
    sums: dict[int, float] = {}
    counts: dict[int, int] = {}
    for row in rows:
        tokens = row.get("staleness_tokens") or {}
        for staleness, value in (row.get(f"{name}_by_staleness") or {}).items():
            number = tokens.get(staleness, 0)
            if value is not None and number:
                scale = sum(tokens.values()) if name == "weight" else number
                sums[int(staleness)] = sums.get(int(staleness), 0.0) + scale * value
                counts[int(staleness)] = counts.get(int(staleness), 0) + number
    return {staleness: value / counts[staleness] for staleness, value in sorted(sums.items())}


def elapsed(rows: Sequence[Row]) -> NDArray[np.float64]:
    """float64[rows]: seconds from the start of the first step to the end of each; includes the time between two processes."""
    if not rows:
        return np.zeros(0)
    times = column(rows, "time")
    return times - times[0] + cycle_s(rows[0])


def staleness_tokens(rows: Sequence[Row]) -> dict[int, int]:
    """Staleness in versions, ascending -> tokens trained in the whole run."""
    total: dict[int, int] = {}
    for row in rows:
        for staleness, tokens in (row.get("staleness_tokens") or {}).items():
            total[int(staleness)] = total.get(int(staleness), 0) + tokens
    return dict(sorted(total.items()))


def outcomes(rows: Sequence[Row]) -> dict[str, int]:
    """Episodes that ended in the whole run, by outcome."""
    total: dict[str, int] = {}
    for row in rows:
        for name, number in (row.get("outcomes") or {}).items():
            total[name] = total.get(name, 0) + number
    return total


def smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Moving average over about a tenth of the run, at least 3 steps; ignores NaN. The centered window narrows towards both ends,
    so that the curve starts and ends where the values do."""
    half, last = max(1, len(values) // 20), len(values) - 1
    means = (mean(values[i - reach : i + reach + 1]) for i in range(last + 1) for reach in (min(half, i, last - i),))
    return np.array([np.nan if value is None else value for value in means], dtype=np.float64)
