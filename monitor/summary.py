"""What a finished, stopped or running run amounts to: pure functions from its rows to the numbers and sentences shown.

Invariants:
- Works on whatever there is: no rows, no evaluations, no ledger, numbers that are null.
- Advice names one flag, its present value and another, or says that nothing needs to change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..configs import Config
from ..errors import StoreError
from .metrics import Row
from .text import share

IDLE = 0.15
"""A side that is idle for more than this share of the time is called starved; below, one step's noise explains it."""


class Evaluation(msgspec.Struct, frozen=True):
    """Fresh tasks played once with one policy version; `outcomes` counts episodes by how they ended."""

    label: str
    version: int
    tasks: int
    reward_mean: float
    reward_stderr: float
    outcomes: dict[str, int]
    seconds: float


class Ledger(msgspec.Struct, frozen=True):
    """Every generated token, by where it is. `closes`, where the keeper of the ledger says it, is checked against the sum."""

    generated: int
    in_flight: int
    ready: int
    trained: int
    withheld: int
    discarded: dict[str, int]
    closes: bool = True


class Balance(msgspec.Struct, frozen=True):
    """Who waited for whom, as shares of the time after the first step, and what to do about it."""

    learner_idle: float
    rollout_idle: float
    sentence: str


def read_evaluations(path: Path) -> list[Evaluation]:
    """Evaluations in the order in which they were made; empty where there is no file. StoreError where it is not valid."""
    if not path.is_file():
        return []
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Evaluation])
    except msgspec.MsgspecError as error:
        raise StoreError(f"{path}: not a list of evaluations: {error}") from None


def column(rows: Sequence[Row], name: str) -> NDArray[np.float64]:
    """float64[rows]: one metric over the steps, NaN where it is missing or null."""
    values: Iterable[Any] = (row.get(name) for row in rows)
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def mean(values: NDArray[np.float64]) -> float | None:
    """Mean of what is finite, None when nothing is."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else None


def elapsed(rows: Sequence[Row]) -> NDArray[np.float64]:
    """float64[rows]: seconds from the start of the first step to the end of each; time between two processes is included."""
    if not rows:
        return np.zeros(0)
    first = sum(rows[0].get(part) or 0.0 for part in ("wait_s", "step_s", "push_s"))
    times = column(rows, "time")
    return times - times[0] + first


def staleness_tokens(rows: Sequence[Row]) -> dict[int, int]:
    """Trained tokens of the whole run by staleness, in versions, in order."""
    total: dict[int, int] = {}
    for row in rows:
        for staleness, tokens in (row.get("staleness_tokens") or {}).items():
            total[int(staleness)] = total.get(int(staleness), 0) + tokens
    return dict(sorted(total.items()))


def smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Moving average over about a tenth of the run, at least 3 steps; ignores NaN.

    The window stays centred and narrows towards both ends, so that the curve starts and ends where the run did.
    """
    half, last = max(1, len(values) // 20), len(values) - 1
    means = (mean(values[i - reach : i + reach + 1]) for i in range(last + 1) for reach in (min(half, i, last - i),))
    return np.array([np.nan if value is None else value for value in means], dtype=np.float64)


def balance(rows: Sequence[Row], config: Config) -> Balance | None:
    """Which side is starved and the one flag to change; None before there is a step.

    The first step always waits for the first episodes, and is left out when there are others.
    """
    steady = rows[1:] or rows
    learner, rollout = mean(column(steady, "learner_idle")), mean(column(steady, "rollout_idle"))
    if learner is None or rollout is None:
        return None
    waited = f"The learner waited {share(learner)} of the time for batches; {share(rollout)} of the episode slots stood empty."
    return Balance(learner, rollout, f"{waited} {_advice(learner > IDLE, rollout > IDLE, config)}")


def _advice(learner_starved: bool, rollout_starved: bool, config: Config) -> str:
    buffer, fleet = config.buffer, config.rollout
    slots = fleet.workers * fleet.episodes_per_worker
    admitted = (buffer.max_staleness + 1) * buffer.groups_per_batch * buffer.group_size
    decoding = fleet.engine.replicas * fleet.engine.max_concurrent
    if learner_starved and rollout_starved:
        return (
            "Each side waits for the other: admission is too tight for the spread of episode lengths. "
            f"Raise buffer.max_staleness from {buffer.max_staleness} to {buffer.max_staleness + 1}."
        )
    if learner_starved and slots < min(admitted, decoding):
        wanted = -(-min(admitted, decoding) // fleet.workers)
        return (
            "Rollouts are the bottleneck and the engines could decode more episodes at once. "
            f"Raise rollout.episodes_per_worker from {fleet.episodes_per_worker} to {wanted}."
        )
    if learner_starved:
        replicas = fleet.engine.replicas
        return f"Rollouts are the bottleneck. Raise rollout.engine.replicas from {replicas} to {replicas + 1}."
    if rollout_starved and slots > admitted:
        return (
            f"The learner is busy, and {slots} slots are more than the {admitted} episodes that admission allows. "
            f"Lower rollout.episodes_per_worker from {fleet.episodes_per_worker} to {max(1, admitted // fleet.workers)}."
        )
    if rollout_starved:
        ranks = config.learner.backend.ranks
        return f"The learner is the bottleneck. Raise learner.backend.ranks from {ranks} to {ranks + 1}."
    return "The two sides are balanced; nothing needs to change."
