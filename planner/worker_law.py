"""The law of a simulated worker: how much of the time between completions it computes, from a run's spans and its CPU time.

A worker is one event loop. Between the completions of an episode, from its lease to the first and after the last one, the episode
waits for its environment, or for the loop, which computes for one episode at a time. While n episodes are between completions each
of them gets the n-th part of the loop, so that the loop did for one of them

    work  =  integral over its time of  dt / (n(t) s(t))

with s, the contention, how many times as long it takes while the learner of the same host computes. Summed over all episodes this
is the time in which any of them was between completions; of it the loop computed the share that its CPU time says. That share of an
episode's time is work, the rest is waiting.

The contention is the workers' own. It is the value for which the work done during the learner's steps equals the work of the gaps
that ended during them, each taken as the mean of its kind (`Gap`). Noise makes it a little more than 1 where there is none.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .run_spans import Floats, Gap, WorkerSpans, under_way

BUSY = 1.5  # seconds in which a loop has work per second of its CPU time, at most: on full cores a process waits for its turn
CONTENTIONS = np.arange(1.0, 4.05, 0.1)  # that are tried


class _Loop:
    """What one worker did.

    Attributes:
        at: float64[M], times; between two of them no gap and no step begins or ends.
        beside: bool[N], whether a gap ended while the learner computed.
    """

    def __init__(self, spans: WorkerSpans, steps: Floats) -> None:
        began, self._ended = spans.gaps.T
        self._began, self._kinds = began, spans.kinds
        inside = np.clip(steps, began.min(), self._ended.max())
        self.beside = under_way(inside[:, 0], inside[:, 1], self._ended) > 0
        self.at = np.unique(np.concatenate([began, self._ended, inside.ravel()]))
        since = self.at[:-1]
        self._between = under_way(began, self._ended, since)
        self._seconds = np.where(self._between > 0, np.diff(self.at), 0.0)
        self._stepping = under_way(inside[:, 0], inside[:, 1], since) > 0

    def alone_s(self, contention: float) -> Floats:
        """float64[M - 1]: seconds between two of the times, as long as the work would take without the learner."""
        return np.where(self._stepping, self._seconds / contention, self._seconds)

    def work_s(self, alone_s: Floats) -> Floats:
        """float64[M]: work done until each time for an episode that is between completions all along."""
        return np.concatenate([[0.0], np.cumsum(alone_s / np.maximum(1, self._between))])

    def missed_s(self, contention: float) -> float:
        """Seconds of work beside the learner that this contention has too many, or, below 0, too few."""
        alone = self.alone_s(contention)
        done = self.work_s(alone)
        work = np.interp(self._ended, self.at, done) - np.interp(self._began, self.at, done)
        ended = 0.0
        for kind in Gap:
            mine = self._kinds == kind
            if mine.any():
                ended += float(work[mine].mean()) * int(self.beside[mine].sum())
        return float(alone[self._stepping].sum()) - ended


class WorkerLoad:
    """What one worker did between completions: its loop computed the `share` of that time."""

    def __init__(self, spans: WorkerSpans, steps: Floats, contention: float) -> None:
        loop = _Loop(spans, steps)
        alone = loop.alone_s(contention)
        self._at, self._work = loop.at, loop.work_s(alone)
        busy, cpu = np.interp(spans.cpu[:, 0], loop.at, np.concatenate([[0.0], np.cumsum(alone)])), spans.cpu[:, 1]
        known = len(cpu) > 1 and busy[-1] > busy[0]
        self.share = min(1.0, BUSY * float((cpu[-1] - cpu[0]) / (busy[-1] - busy[0]))) if known else 0.0

    def split(self, since: float, until: float) -> tuple[float, float]:
        """Seconds that an episode waited for its environment and seconds of work, of its time between completions."""
        seconds, work = max(0.0, until - since), float(np.diff(np.interp([since, until], self._at, self._work))[0])
        return round((1 - self.share) * seconds, 5), round(self.share * max(0.0, work), 6)


def worker_loads(workers: Sequence[WorkerSpans], steps: Floats, contention: float) -> dict[str, WorkerLoad]:
    """Episode -> the load of the worker that played it."""
    found: dict[str, WorkerLoad] = {}
    for spans in workers:
        load = WorkerLoad(spans, steps, contention)
        found |= dict.fromkeys(spans.episodes, load)
    return found


def worker_contention(workers: Sequence[WorkerSpans], steps: Floats) -> float:
    """How many times as long workers compute while the learner does; 1 where nothing says so. `steps`: float64[K, 2]."""
    loops = [_Loop(spans, steps) for spans in workers]
    known = [loop for loop in loops if loop.beside.any() and not loop.beside.all()]
    if not known:
        return 1.0
    missed = [sum(loop.missed_s(contention) for loop in known) for contention in CONTENTIONS.tolist()]
    return round(float(CONTENTIONS[int(np.argmin(np.abs(missed)))]), 2)
