"""Pure functions from the rows of a finished, stopped or active run to the numbers and sentences shown.

Invariants:
- Rows, evaluations, the ledger and single numbers may be missing.
- Advice names one config key, its present value and a new one, or says that nothing needs to change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..common.outcomes import WARN_SHARE, failed_share, failures_text
from ..common.scores import EvaluationResult, EvaluationScore
from ..configs import Config
from ..configs.backends import copy_ranks
from ..errors import StoreError
from .metrics import Row
from .text import reward, share

EVALUATIONS = "evaluations.json"  # in the folder of a run

IDLE = 0.15  # a side that is idle for more than this share of the time is starved; less is the noise of single steps

BACKED_OFF = (
    0.7  # workers that play less than this share of what servers may decode have backed off from full KV caches
)
ALIKE_SHARE = 0.4  # of a batch's groups: with more whose rewards are all equal, most of a step is spent on no signal
SMALL_BATCH = 32  # below this many sequences a server mostly reads weights, so that one more costs almost no time


def read_evaluations(path: Path) -> list[EvaluationResult]:
    """Evaluations in their order; empty where there is no file. Raises StoreError where the file is not valid."""
    if not path.is_file():
        return []
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[EvaluationResult])
    except msgspec.MsgspecError as error:
        raise StoreError(f"{path}: not a list of evaluations: {error}") from None


def evaluation_line(evaluation: EvaluationResult) -> str:
    """An evaluation in one line, with the means of a mixture's environments, and how many episodes failed."""
    e = evaluation
    line = f"{name_of(e)}: reward {e.reward_mean:.3f} ± {e.reward_stderr:.3f} over {e.tasks} fresh tasks"
    if e.environments:
        means = ((name, row.reward_mean) for name, row in e.environments.items())
        line += f" ({', '.join(f'{name} {reward(value)}' for name, value in means)})"
    if e.samples > 1:
        line += f", {e.samples} samples each; {pass_text(e)}"
    if e.versions:
        line += f"; its tokens are of the versions {', '.join(map(str, e.versions))}"
    failed = failures_text(e.outcomes)
    return f"{line}; {failed} and count in no mean" if failed else line


def name_of(evaluation: EvaluationResult) -> str:
    """`step 20`, or with a suite `step 20, math`."""
    return f"{evaluation.label}, {evaluation.suite}" if evaluation.suite else evaluation.label


def by_suite(evaluations: Iterable[EvaluationResult]) -> dict[str, list[EvaluationResult]]:
    """The evaluations of each suite, by step."""
    suites: dict[str, list[EvaluationResult]] = {}
    for one in sorted(evaluations, key=lambda one: one.step):
        suites.setdefault(one.suite, []).append(one)
    return suites


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
    return float(np.nansum(column(rows, name)))


def learner_idle(rows: Sequence[Row]) -> float | None:
    """Share of the time of these steps in which the learner waited for a batch."""
    seconds = sum(total(rows, part) for part in ("wait_s", "step_s", "push_s"))
    return total(rows, "wait_s") / seconds if seconds else mean(column(rows, "learner_idle"))


def rollout_idle(rows: Sequence[Row]) -> float | None:
    """Share of the slots' time in these steps in which no lease was granted."""
    slot_s = total(rows, "slot_s")
    return total(rows, "idle_slot_s") / slot_s if slot_s else mean(column(rows, "rollout_idle"))


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
    first = sum(rows[0].get(part) or 0.0 for part in ("wait_s", "step_s", "push_s"))
    times = column(rows, "time")
    return times - times[0] + first


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


def advise(rows: Sequence[Row], config: Config) -> str:
    """Which side is starved and the one key to change; empty without a step. The first step, which waits for the first episodes, is
    excluded where there are others."""
    steady = rows[1:] or rows
    learner, rollout = learner_idle(steady), rollout_idle(steady)
    if learner is None or rollout is None:
        return ""
    waited = f"The learner waited {share(learner)} of the time for batches; {share(rollout)} of the episode slots were empty."
    ended = outcomes(rows)
    if failed_share(ended) > WARN_SHARE:
        logs = f"{config.run.dir}/logs/worker-*.log"
        waited = f"{failures_text(ended)}: mend that first, the tracebacks are in {logs}. {waited}"
    replicas = mean(column(steady, "replicas"))
    served = config.rollout.engine.replicas if replicas is None else max(1, round(replicas))
    return f"{waited} {_advice(learner > IDLE, rollout > IDLE, mean(column(steady, 'slots')), served, config)}"


def _advice(learner_starved: bool, rollout_starved: bool, slots: float | None, replicas: int, config: Config) -> str:
    """One sentence; `slots` are the episodes that the workers play at once, also in tools, `replicas` those that served on
    average."""
    buffer, engine = config.buffer, config.rollout.engine
    admitted = (buffer.max_staleness + 1) * buffer.groups_per_batch * buffer.group_size
    decoding = replicas * engine.max_concurrent
    needed = -(-admitted // engine.max_concurrent)
    if learner_starved and rollout_starved:
        return (
            "Each side waits for the other: admission is too tight for the spread of episode lengths. "
            f"Raise buffer.max_staleness from {buffer.max_staleness} to {buffer.max_staleness + 1}."
        )
    if learner_starved and slots is not None and slots < BACKED_OFF * decoding:
        return (
            f"Rollouts are the bottleneck: requests queue before the servers decode all {decoding} that they may, because "
            f"their KV caches are full. Raise rollout.engine.memory above {engine.memory}."
        )
    if learner_starved and engine.max_concurrent < SMALL_BATCH and decoding < admitted:
        return (
            f"Rollouts are the bottleneck, and a server that decodes {engine.max_concurrent} sequences at once is not busy. "
            f"Raise rollout.engine.max_concurrent from {engine.max_concurrent} to {2 * engine.max_concurrent}."
        )
    if learner_starved:
        return (
            "Rollouts are the bottleneck: the servers are the limit. "
            f"Raise rollout.engine.replicas from {replicas} to {replicas + 1}."
            f" (While it runs: slipstream replicas {config.run.dir} add.)"
        )
    if rollout_starved and needed < replicas:
        return (
            f"The learner is busy, and the servers decode {decoding} episodes at once where admission allows {admitted}. "
            f"Lower rollout.engine.replicas from {replicas} to {needed}."
        )
    if rollout_starved:
        backend = config.learner.backend
        more = backend.ranks + copy_ranks(backend)
        return f"The learner is the bottleneck. Raise learner.backend.ranks from {backend.ranks} to {more}."
    return "The two sides are balanced; nothing needs to change."
