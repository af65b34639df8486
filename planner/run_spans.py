"""The spans of a run's completions and learner, as numbers for the planner. A run may have lost its spans, or a part.

Invariants:
- Times are seconds since the epoch, on the clocks of those who recorded them: the workers' and the learner's.
- The turns of a replica are all that it had in their time, also those of episodes that failed or were cancelled.
"""

from __future__ import annotations

import bisect
import collections
import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..buffer.group_table import group_number
from ..common.spans import Span
from ..monitor.timeline import read_series, read_spans

TURNS = 50_000  # the newest of each worker: more say nothing new about a replica
LEARNER = "learner-0"  # the rank that pushes
Floats = NDArray[np.float64]


class Gap(enum.IntEnum):
    """Where an episode has no completion under way: before the first one, between two, after the last."""

    BEFORE, BETWEEN, AFTER = range(3)


class RecordedTurn(NamedTuple):
    """One completion; of one that was interrupted, one part."""

    sent: float  # to its replica
    first: float  # its first token arrived
    last: float
    tokens: int  # sampled
    prompt: int
    cached: float  # tokens of the prompt; NaN where the server does not say


class ReplicaSpans(msgspec.Struct, frozen=True):
    """What one replica did: float64[N, fields of `RecordedTurn`], and when it was paused, float64[P, 2]."""

    turns: Floats
    pauses: Floats


class WorkerSpans(msgspec.Struct, frozen=True):
    """What one worker did for the newest `episodes`: float64[N, 2], from when to when an episode was between its completions,
    before the first or after the last; int64[N], the `Gap` that each of these is; and float64[M, 2], times and the seconds of CPU
    that its process had used until then."""

    episodes: frozenset[str]
    gaps: Floats
    kinds: NDArray[np.int64]
    cpu: Floats


class CohortSpan(NamedTuple):
    """The push to one cohort. Seconds."""

    lasted: float  # from the transfer to the canary
    canary: float  # of these, after the last pause


class RunSpans(msgspec.Struct, frozen=True):
    workers: tuple[WorkerSpans, ...]
    replicas: tuple[ReplicaSpans, ...]
    pushes: tuple[tuple[CohortSpan, ...], ...]  # of each push its cohorts
    published: Floats  # float64[K, 2], from when to when each push lasted
    takes: dict[int, tuple[float, float]]  # version of the learner -> when it asked for a batch, and when it had it
    steps: Floats  # float64[K, 2], when the learner computed


def under_way(began: Floats, ended: Floats, at: Floats) -> NDArray[np.intp]:
    """Of things that began and ended at these times, in any order, how many were under way at each of `at`, of any shape."""
    return np.searchsorted(np.sort(began), at, "right") - np.searchsorted(np.sort(ended), at, "right")


def read_run_spans(folder: Path, leased: Mapping[int, float] | None = None) -> RunSpans:
    """Those of the run in `folder`, which goes on or has ended. An episode of a group that is in `leased`, by when, began then: it
    waited for the loop of its worker."""
    turns: dict[str, collections.deque[tuple[str, RecordedTurn]]] = {}
    played: dict[str, collections.deque[Span]] = {}
    learner: list[Span] = []
    for role, span in read_spans(folder):
        if span.what in ("turn", "episode"):
            played.setdefault(role, collections.deque(maxlen=TURNS)).append(span)
        if span.what == "turn":
            turns.setdefault(role, collections.deque(maxlen=TURNS)).append(_turn(span))
        elif role == LEARNER:
            learner.append(span)
    learner.sort(key=lambda span: (span.t0, -span.t1))  # a phase before its parts
    takes = {int(span.ids["version"] or 0): (span.t0, span.t1) for span in learner if span.what == "take"}
    workers = _workers(played, read_series(folder), leased or {})
    replicas = _replicas(list(turns.values()), learner)
    return RunSpans(workers, replicas, _pushes(learner), _times(learner, "publish"), takes, _times(learner, "train"))


def _times(learner: Sequence[Span], what: str) -> Floats:
    """float64[K, 2]"""
    return np.array([(span.t0, span.t1) for span in learner if span.what == what], dtype=np.float64).reshape(-1, 2)


def _turn(span: Span) -> tuple[str, RecordedTurn]:
    ids = span.ids
    number = {key: float(ids[key] or 0) for key in ("queued_s", "first_s", "tokens", "prompt")}
    sent, cached = span.t0 + number["queued_s"], ids["cached"]
    return str(ids["replica"]), RecordedTurn(
        sent,
        sent + number["first_s"],
        span.t1,
        round(number["tokens"]),
        round(number["prompt"]),
        math.nan if cached is None else float(cached),
    )


def _workers(
    played: Mapping[str, Iterable[Span]],
    series: Iterable[tuple[str, Mapping[str, Any]]],
    leased: Mapping[int, float],
) -> tuple[WorkerSpans, ...]:
    """Those that played whole episodes. Of a process that was started again the CPU time of the last one counts."""
    cpu: dict[str, list[tuple[float, float]]] = {}
    for role, gauges in series:
        if role in played and "cpu_s" in gauges:
            mine = cpu.setdefault(role, [])
            if mine and gauges["cpu_s"] < mine[-1][1]:
                mine.clear()
            mine.append((gauges["t"], gauges["cpu_s"]))
    found: list[WorkerSpans] = []
    for role, spans in played.items():
        turns: dict[str, list[tuple[float, float]]] = {}
        ended = ((str(span.ids["episode"]), span) for span in spans if span.what == "episode")
        whole = {id: (min(span.t0, leased.get(group_number(id), span.t0)), span.t1) for id, span in ended}
        for span in spans:
            if span.what == "turn":
                turns.setdefault(str(span.ids["episode"]), []).append((span.t0, span.t1))
        gaps = [gap for episode, (t0, t1) in whole.items() for gap in _gaps(t0, t1, sorted(turns.get(episode, ())))]
        if gaps:
            times, kinds = np.array([gap[:2] for gap in gaps]), np.array([gap[2] for gap in gaps])
            found.append(WorkerSpans(frozenset(whole), times, kinds, np.array(cpu.get(role, ())).reshape(-1, 2)))
    return tuple(found)


def _gaps(t0: float, t1: float, turns: Sequence[tuple[float, float]]) -> list[tuple[float, float, int]]:
    """Of an episode from `t0` to `t1`, where it had no completion under way, and which `Gap` that was."""
    edges = [t0, *(edge for turn in turns for edge in turn), t1]
    kinds = [Gap.BEFORE, *[Gap.BETWEEN] * (len(turns) - 1), Gap.AFTER] if turns else [Gap.BEFORE]
    found = zip(edges[::2], edges[1::2], kinds, strict=True)
    return [(since, until, kind) for since, until, kind in found if until > since]


def _replicas(
    workers: Sequence[Sequence[tuple[str, RecordedTurn]]], learner: Sequence[Span]
) -> tuple[ReplicaSpans, ...]:
    """From the time on of which all workers' turns are there."""
    since = max((min(turn.sent for _, turn in worker) for worker in workers if len(worker) == TURNS), default=0.0)
    found: dict[str, list[RecordedTurn]] = {}
    for name, turn in (one for worker in workers for one in worker):
        if turn.sent >= since and turn.tokens:
            found.setdefault(name, []).append(turn)
    pauses: dict[str, list[tuple[float, float]]] = {name: [] for name in found}
    for span in learner:
        if span.what == "pause" and (name := str(span.ids["replica"])) in pauses:
            pauses[name].append((span.t0, span.t1))
    return tuple(
        ReplicaSpans(np.array(turns, dtype=np.float64), np.array(pauses[name], dtype=np.float64).reshape(-1, 2))
        for name, turns in sorted(found.items())
    )


def _pushes(learner: Sequence[Span]) -> tuple[tuple[CohortSpan, ...], ...]:
    """Those that reached a replica. A cohort lasts from its transfer to the last that its replicas did at that version."""
    found: list[tuple[CohortSpan, ...]] = []
    begins = [span.t0 for span in learner]
    for index, push in ((i, span) for i, span in enumerate(learner) if span.what == "publish"):
        parts = learner[index + 1 : bisect.bisect_right(begins, push.t1)]
        cohorts: list[CohortSpan] = []
        for stage in (span for span in parts if span.what == "stage"):
            names = str(stage.ids["replicas"]).split(", ")
            its = [span for span in parts if span.ids.get("replica") in names and span.t0 >= stage.t0]
            end = max((span.t1 for span in its), default=stage.t1)
            served = max((span.t1 for span in its if span.what == "pause"), default=end)
            cohorts.append(CohortSpan(end - stage.t0, end - served))
        if cohorts:
            found.append(tuple(cohorts))
    return tuple(found)
