"""The law of a simulated replica: how fast replicas decode and prefill, from the times of a run's completions.

A completion of k + 1 tokens that had T seconds without pauses, from the first token to the last, k_j of its steps with about j
sequences running at its side, while P tokens of others were prefilled, says

    T  =  sum over j of  k_j c_j  +  p P

with c_j the seconds of a decode step at j running sequences, and p the seconds in which the prefill of a token holds all of them
up. c and p are the least squares over all completions, whose errors grow with the root of their steps: what errs is T, which the
worker has from the arrival of tokens on a host that may be busy; k is exact. (Solving for k takes errors of T for slow steps.) The
steps of a completion are divided among the numbers j in proportion to T_j / c_j, T_j its seconds near j, which c makes again.
Between the numbers j, which reach from the smallest to the largest that occurred, c is a straight line; it does not fall with j.
Times in which the replica was paused count for none; after a pause that voided keys and values, the tokens of those that run are
prefilled again.

On a host that the learner computes on, too, each second of its steps counts for 1 / s of a second in the T_j: s, the contention, is
the number whose law has the least squares.
"""

from __future__ import annotations

import copy
import math
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from .engine import DecodeCurve
from .run_spans import Floats, ReplicaSpans, under_way

LEAST = 200  # completions: fewer are no curve
REACH = (0.01, 0.99)  # quantiles of the time by the number of running sequences, between which the curve has points
APART = 1.6  # most that a point is of the one before
SLOWEST, FASTEST = 10.0, 0.01  # times the mean step: no part of the curve is slower, none faster
UNSAID = 0.1  # of completions without the number of cached tokens; with more of them prefill is a part of the steps
ROUNDS = 8  # of dividing steps among the knots, and finding the seconds of a step at each
# Contentions that are tried first, and then at which distances from the best; replicas that have a host to themselves have 1.
TRIED, NEARER = (1.0, 1.4, 1.8, 2.2, 2.6, 3.0), (0.2, 0.1)


class ReplicaLaw(msgspec.Struct, frozen=True):
    """Seconds; see `EngineProfile`."""

    decode: DecodeCurve
    prefill_s: float
    request_steps: float
    block: int
    running: float
    contention: float  # how many times as long all this takes while the learner computes
    beside: float  # share of the learner's steps in which a sequence was running


class _Load:
    """What went on at one replica. Times are relative to its first request.

    Attributes:
        step: float64[N], mean seconds of a decode step of each completion.
        uncached: float64[N], tokens that were prefilled for each.
        began, first, last: float64[N]; a sequence runs from a step before its first token.
        times, running: float64[M], the beginnings of intervals, and the sequences that ran in each.
        stepping: bool[M], whether the learner computed.
        unpaused: float64[M], their seconds without pauses; see `slowed`.
    """

    def __init__(self, spans: ReplicaSpans, learner_steps: Floats) -> None:
        origin = spans.turns[:, 0].min()
        sent, first, last, tokens, prompt, cached = spans.turns.T
        self.sent, self.first, self.last, self.tokens = sent - origin, first - origin, last - origin, tokens
        steps = (last - first)[tokens > 1] / (tokens[tokens > 1] - 1)
        self.step = np.full(len(tokens), steps.mean() if len(steps) else 0.0)
        self.step[tokens > 1] = steps
        self.began = self.first - self.step
        self.cached, self.uncached = cached, np.nan_to_num(prompt - cached)
        self.context = prompt
        self.pauses = spans.pauses - origin
        computed = np.clip(learner_steps - origin, self.began.min(), self.last.max())
        self._edges = np.unique(np.concatenate([self.began, self.last, self.pauses.ravel(), computed.ravel()]))
        self.times, seconds = self._edges[:-1], np.diff(self._edges)
        self.running = self.number_running(self.times)
        self.stepping = self._during(computed)
        self.unpaused = np.where(self._during(self.pauses), 0.0, seconds)

    def slowed(self, contention: float) -> _Load:
        """The same with the seconds beside the learner's steps divided by `contention`."""
        found = copy.copy(self)
        found.unpaused = np.where(self.stepping, self.unpaused / contention, self.unpaused)
        return found

    def _during(self, spans: Floats) -> NDArray[np.bool_]:
        """bool[M]: which intervals lie in one of `spans`, float64[P, 2]."""
        return under_way(spans[:, 0], spans[:, 1], self.times) > 0

    def number_running(self, at: Floats) -> Floats:
        return under_way(self.began, self.last, at).astype(np.float64)

    def seconds_near(self, knots: Floats, during: NDArray[np.bool_]) -> Floats:
        """float64[N, knots]: the unpaused seconds of each completion from its first token on in the intervals `during`, by how near
        to each knot the number of running ones was."""
        near = nearness(self.running, knots) * np.where(during, self.unpaused, 0.0)[:, None]
        return np.stack([self.between(column, self.first, self.last) for column in near.T], axis=1)

    def between(self, amounts: Floats, since: Floats, until: Floats) -> Floats:
        """float64[N]: of `amounts` in the intervals of `times`, what is from `since` to `until`."""
        upto = np.concatenate([[0.0], np.cumsum(amounts)])
        return np.interp(until, self._edges, upto) - np.interp(since, self._edges, upto)

    def prefilled(self, since: Floats, until: Floats) -> Floats:
        """float64[N]: tokens whose prefill ended in `(since, until]`, each completion's times."""
        order = np.argsort(self.first)
        upto, at = np.concatenate([[0.0], np.cumsum(self.uncached[order])]), self.first[order]
        return upto[np.searchsorted(at, until, "right")] - upto[np.searchsorted(at, since, "right")]

    def prefilled_beside(self, *, recompute: bool) -> Floats:
        """float64[N]: tokens of others that were prefilled while each completion ran; with `recompute` all that ran at the end of a
        pause, too."""
        # Those that were prefilled with it had their first tokens at about the same time.
        total = np.maximum(0.0, self.prefilled(self.first + self.step / 2, self.last))
        for _, end in self.pauses if recompute else ():
            at = (self.first < end) & (end < self.last)
            share = (end - self.first[at]) / (self.last[at] - self.first[at])
            total[at] += (self.context[at] + share * self.tokens[at]).sum()
        return total


def nearness(running: Floats, knots: Floats) -> Floats:
    """float64[M, knots]: how near each number is to each knot; a row sums to 1, and has at most two that are not 0."""
    return np.stack([np.interp(running, knots, one) for one in np.eye(len(knots))], axis=1)


def replica_law(
    replicas: tuple[ReplicaSpans, ...], max_concurrent: int, steps: Floats, *, recompute: bool
) -> ReplicaLaw | None:
    """The law of replicas that are alike; None where too little is recorded. `steps`: float64[K, 2], when the learner computed.
    `recompute`: pauses void keys and values."""
    if sum(len(spans.turns) for spans in replicas) < LEAST:
        return None
    loads = [_Load(spans, steps) for spans in replicas]
    says_cached = np.mean(np.concatenate([np.isnan(load.cached) for load in loads])) < UNSAID
    running = np.concatenate([load.running for load in loads])
    seconds = np.concatenate([load.unpaused for load in loads]) * (running > 0)
    if not seconds.any():
        return None  # completions of one token have no decode step
    knots = _knots(running, seconds)
    prefilled = np.concatenate([load.prefilled_beside(recompute=recompute) for load in loads])
    best = _best_fit(_Completions.of(loads, knots, prefilled if says_cached else np.zeros_like(prefilled)))
    curve = DecodeCurve(tuple((float(n), float(s)) for n, s in zip(knots, best.step_s, strict=True)))
    cached = np.nan_to_num(np.concatenate([load.cached for load in loads])).astype(np.int64)
    alone = [load.slowed(best.contention) for load in loads]
    stepping = np.concatenate([load.unpaused * load.stepping for load in loads])
    beside = stepping * (running > 0)
    return ReplicaLaw(
        curve,
        best.prefill_s,
        _request_steps(alone, curve, best.prefill_s, max_concurrent),
        max(1, int(np.gcd.reduce(cached))),
        float((running * seconds).sum() / seconds.sum()),
        best.contention,
        float(beside.sum() / (stepping.sum() or 1.0)),
    )


def _knots(running: Floats, seconds: Floats) -> Floats:
    """Numbers of running sequences, ascending."""
    order = np.argsort(running)
    share = np.cumsum(seconds[order]) / seconds.sum()
    low, high = (max(1.0, float(running[order][min(np.searchsorted(share, q), len(share) - 1)])) for q in REACH)
    return np.unique(np.geomspace(low, high, 1 + math.ceil(math.log(high / low) / math.log(APART))))


class _Fit(NamedTuple):
    contention: float
    step_s: Floats  # float64[knots], c
    prefill_s: float  # p
    error: float  # sum of the squares, of seconds as they were


class _Completions(NamedTuple):
    """N completions with decode steps."""

    near: Floats  # float64[N, knots], seconds near each knot while the learner did not compute
    stepping: Floats  # float64[N, knots], the same while it did
    steps: Floats  # float64[N]
    prefilled: Floats  # float64[N], tokens of others

    @classmethod
    def of(cls, loads: list[_Load], knots: Floats, prefilled: Floats) -> _Completions:
        near, stepping = (
            np.concatenate([load.seconds_near(knots, load.stepping == beside) for load in loads])
            for beside in (False, True)
        )
        steps = np.concatenate([load.tokens - 1 for load in loads])
        known = (steps > 0) & (near.sum(axis=1) + stepping.sum(axis=1) > 0)
        return cls(near[known], stepping[known], steps[known], prefilled[known])


def _best_fit(completions: _Completions) -> _Fit:
    if not completions.stepping.any():
        return _fit(completions, 1.0)
    best = min((_fit(completions, tried) for tried in TRIED), key=lambda fit: fit.error)
    for distance in NEARER:
        beside = [best.contention - distance, best.contention + distance]
        best = min([best, *(_fit(completions, tried) for tried in beside if tried >= 1)], key=lambda fit: fit.error)
    return best


def _fit(completions: _Completions, contention: float) -> _Fit:
    """The least squares for one contention; neither c nor p is negative."""
    idle, stepping, steps, prefilled = completions
    near, lasted = idle + stepping / contention, (idle + stepping).sum(axis=1)
    took = near.sum(axis=1)
    mean_s = took.sum() / steps.sum()
    weight = 1 / np.sqrt(steps)
    step_s, prefill_s = np.full(near.shape[1], mean_s), 0.0
    for _ in range(ROUNDS):
        at = _divided(steps, near / step_s)
        found = _solve(np.concatenate([at, prefilled[:, None]], axis=1) if prefilled.any() else at, took, weight)
        if prefilled.any() and found[-1] < 0:
            found = _solve(at, took, weight)
        step_s = _not_falling(np.clip(found[: len(step_s)], FASTEST * mean_s, SLOWEST * mean_s), at.sum(axis=0))
        if prefilled.any():  # beside the curve as it is now
            held = prefilled * weight
            prefill_s = max(0.0, float(((took - at @ step_s) * weight * held).sum() / (held**2).sum()))
    missed = (_divided(steps, near / step_s) @ step_s + prefill_s * prefilled) * (lasted / took) - lasted
    return _Fit(contention, step_s, prefill_s, float(((missed * weight) ** 2).sum()))


def _divided(steps: Floats, shares: Floats) -> Floats:
    """float64[N, knots]: the steps of each completion, in proportion to its row of `shares`."""
    return shares * (steps / shares.sum(axis=1))[:, None]


def _solve(columns: Floats, wanted: Floats, weight: Floats) -> Floats:
    """The weighted least squares, by the normal equations: there are many rows and few columns."""
    weighted = columns * weight[:, None]
    found = np.linalg.lstsq(weighted.T @ weighted, weighted.T @ (wanted * weight), rcond=None)[0]
    return np.asarray(found, dtype=np.float64)


def _not_falling(values: Floats, weights: Floats) -> Floats:
    """The nearest values that do not fall: pools of neighbours that do, with their weighted mean."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, members
    for value, weight in zip(values.tolist(), np.maximum(weights, 1e-9).tolist(), strict=True):
        pools.append((value, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, v, m), (b, w, n) = pools[-2], pools[-1]
            pools[-2:] = [((a * v + b * w) / (v + w), v + w, m + n)]
    return np.array([mean for mean, _, members in pools for _ in range(members)])


def _request_steps(loads: list[_Load], curve: DecodeCurve, prefill_s: float, max_concurrent: int) -> float:
    """Decode steps, of as many sequences as the replica had requests, from a request to the step that makes its first token: mean
    seconds over mean seconds of such a step, of the requests that found a place. (Not the slope of the one by the other: requests
    come in bursts, and the last of a burst, which sees the most, waits for the shortest time.)"""
    waited, steps = list[Floats](), list[Floats]()
    for load in loads:
        requests = np.searchsorted(np.sort(load.sent), load.sent, "right") - np.searchsorted(
            np.sort(load.last), load.sent
        )
        had_place = requests <= max_concurrent
        prefilled = load.prefilled(load.first - load.step / 2, load.first + load.step / 2)
        own = np.array([curve.under_way_s(n) for n in load.number_running(load.first).tolist()])
        found = load.between(load.unpaused, load.sent, load.first) - prefill_s * prefilled - own
        waited.append(found[had_place])
        steps.append(np.array([curve.under_way_s(n) for n in requests[had_place].tolist()]))
    total_s = float(np.concatenate(steps).sum())
    return max(0.0, float(np.concatenate(waited).sum()) / total_s) if total_s else 0.0
