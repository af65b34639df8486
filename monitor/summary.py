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
from ..configs.backends import copy_ranks
from ..errors import StoreError
from .metrics import Row
from .text import share

IDLE = 0.15
"""A side that is idle for more than this share of the time is called starved; below, one step's noise explains it."""


CROWDED = 0.7
"""Workers that play fewer episodes than this share of what the servers may decode were pushed back by full caches."""

SMALL_BATCH = 32
"""Sequences decoded at once below which a server mostly reads weights, and more of them cost nearly nothing."""


class Score(msgspec.Struct, frozen=True):
    """What one environment's part of an evaluation came to; no reward where all of its episodes failed."""

    tasks: int
    reward_mean: float | None
    reward_stderr: float | None
    outcomes: dict[str, int]


class Evaluation(msgspec.Struct, frozen=True):
    """Fresh tasks played once with one policy version; `outcomes` counts episodes by how they ended. Of a mixture also by
    environment."""

    label: str
    version: int
    tasks: int
    reward_mean: float
    reward_stderr: float
    outcomes: dict[str, int]
    seconds: float
    environments: dict[str, Score] = {}


class Ledger(msgspec.Struct, frozen=True):
    """Every generated token, by where it is. `closes`, where the keeper of the ledger says it, is checked against the sum."""

    generated: int
    in_flight: int
    ready: int
    trained: int
    withheld: dict[str, int]
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
    replicas = mean(column(steady, "replicas"))
    served = config.rollout.engine.replicas if replicas is None else max(1, round(replicas))
    advice = _advice(learner > IDLE, rollout > IDLE, mean(column(steady, "slots")), served, config)
    return Balance(learner, rollout, f"{waited} {advice}")


def _advice(learner_starved: bool, rollout_starved: bool, slots: float | None, replicas: int, config: Config) -> str:
    """`slots` is how many episodes the workers would play at once: what the servers take, tools and environments included.
    `replicas` served on average: they come and go."""
    buffer, engine = config.buffer, config.rollout.engine
    admitted = (buffer.max_staleness + 1) * buffer.groups_per_batch * buffer.group_size
    decoding = replicas * engine.max_concurrent
    needed = -(-admitted // engine.max_concurrent)
    if learner_starved and rollout_starved:
        return (
            "Each side waits for the other: admission is too tight for the spread of episode lengths. "
            f"Raise buffer.max_staleness from {buffer.max_staleness} to {buffer.max_staleness + 1}."
        )
    if learner_starved and slots is not None and slots < CROWDED * decoding:
        return (
            f"Rollouts are the bottleneck: requests queue before the servers decode all {decoding} that they may, for want of "
            f"room for their keys and values. Raise rollout.engine.memory above {engine.memory}."
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
