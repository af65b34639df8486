"""How fast replicas decode and prefill, from the times of the completions that they had.

A completion of k + 1 tokens that had T_j seconds, from the first token to the last, with about j sequences running at its side,
while P_j tokens of others were prefilled, says

    k  =  sum over j of  u_j (T_j - p P_j)

with u_j the decode steps per second at j running sequences, and p the seconds in which the prefill of a token holds all of them up.
u and p are the least squares over all completions, whose errors grow with the root of their steps. Between the numbers j, which
reach from the smallest to the largest that occurred, u is a straight line; it does not rise with j. Times in which the replica was
paused count for none; after a pause that voided keys and values, the tokens of those that run are prefilled again.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from .engine import DecodeCurve
from .run_spans import Floats, ReplicaSpans

LEAST = 200  # completions: fewer are no curve
REACH = (0.01, 0.99)  # quantiles of the time by the number of running sequences, between which the curve has points
APART = 1.6  # most that a point is of the one before
SLOWEST = 0.1  # of the mean rate: no part of the curve is slower
UNSAID = 0.1  # of completions without the number of cached tokens; with more of them prefill is a part of the steps
# Of the seconds of a prefilled token: the errors have several minima, so that the range of the smallest is looked for among so many
# numbers, that many decades down from the time that there is, and then halved so often.
TRIED, DECADES, HALVINGS = 40, 6, 10


class ReplicaLaw(msgspec.Struct, frozen=True):
    """Seconds; see `EngineProfile`."""

    decode: DecodeCurve
    prefill_s: float
    request_s: float
    arrival_s: float
    block: int
    running: float


class _Load:
    """What went on at one replica. Times are relative to its first request.

    Attributes:
        step: float64[N], mean seconds of a decode step of each completion.
        uncached: float64[N], tokens that were prefilled for each.
        began, first, last: float64[N]; a sequence runs from a step before its first token.
        times, running, unpaused: float64[M], the beginnings of intervals, the sequences that ran in each, and its seconds without
            pauses.
    """

    def __init__(self, spans: ReplicaSpans) -> None:
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
        self._edges = np.unique(np.concatenate([self.began, self.last, self.pauses.ravel()]))
        self.times, seconds = self._edges[:-1], np.diff(self._edges)
        self.running = self.number_running(self.times)
        paused = np.zeros(len(seconds), dtype=bool)
        for t0, t1 in self.pauses:
            paused[np.searchsorted(self.times, t0) : np.searchsorted(self.times, t1)] = True
        self.unpaused = np.where(paused, 0.0, seconds)

    def number_running(self, at: Floats) -> Floats:
        ended = np.searchsorted(np.sort(self.last), at, "right")
        return (np.searchsorted(np.sort(self.began), at, "right") - ended).astype(np.float64)

    def seconds_near(self, knots: Floats) -> Floats:
        """float64[N, knots]: the unpaused seconds of each completion from its first token on, by how near to each knot the number
        of running ones was."""
        near = nearness(self.running, knots) * self.unpaused[:, None]
        return np.stack([self.between(column, self.first, self.last) for column in near.T], axis=1)

    def between(self, amounts: Floats, since: Floats, until: Floats) -> Floats:
        """float64[N]: of `amounts` in the intervals of `times`, what is from `since` to `until`."""
        upto = np.concatenate([[0.0], np.cumsum(amounts)])
        return np.interp(until, self._edges, upto) - np.interp(since, self._edges, upto)

    def prefilled(self, since: Floats, until: Floats, weights: Floats | None = None) -> Floats:
        """float64[N]: tokens whose prefill ended in `(since, until]`, each completion's times its weight."""
        order = np.argsort(self.first)
        amounts = self.uncached if weights is None else self.uncached * weights
        upto, at = np.concatenate([[0.0], np.cumsum(amounts[order])]), self.first[order]
        return upto[np.searchsorted(at, until, "right")] - upto[np.searchsorted(at, since, "right")]

    def prefilled_near(self, knots: Floats, *, recompute: bool) -> Floats:
        """float64[N, knots]: tokens of others that were prefilled while each completion ran, by how near to each knot the number of
        running ones was; with `recompute` all that ran at the end of a pause, too."""
        near = nearness(self.number_running(self.first), knots)
        since = (
            self.first + self.step / 2
        )  # those that were prefilled with it had their first tokens at about the same time
        total = np.stack([self.prefilled(since, self.last, column) for column in near.T], axis=1)
        for _, end in self.pauses if recompute else ():
            at = (self.first < end) & (end < self.last)
            share = (end - self.first[at]) / (self.last[at] - self.first[at])
            tokens = (self.context[at] + share * self.tokens[at]).sum()
            total[at] += tokens * nearness(np.array([at.sum()], dtype=np.float64), knots)
        return total


def nearness(running: Floats, knots: Floats) -> Floats:
    """float64[M, knots]: how near each number is to each knot; a row sums to 1, and has at most two that are not 0."""
    return np.stack([np.interp(running, knots, one) for one in np.eye(len(knots))], axis=1)


def replica_law(replicas: tuple[ReplicaSpans, ...], max_concurrent: int, *, recompute: bool) -> ReplicaLaw | None:
    """The law of replicas that are alike; None where too little is recorded. `recompute`: pauses void keys and values."""
    if sum(len(spans.turns) for spans in replicas) < LEAST:
        return None
    loads = [_Load(spans) for spans in replicas]
    says_cached = np.mean(np.concatenate([np.isnan(load.cached) for load in loads])) < UNSAID
    running = np.concatenate([load.running for load in loads])
    seconds = np.concatenate([load.unpaused for load in loads]) * (running > 0)
    if not seconds.any():
        return None  # completions of one token have no decode step
    knots = _knots(running, seconds)
    near = np.concatenate([load.seconds_near(knots) for load in loads])
    steps = np.concatenate([load.tokens - 1 for load in loads])
    prefilled = np.concatenate([load.prefilled_near(knots, recompute=recompute) for load in loads])
    rates, prefill_s = _least_squares(near, prefilled if says_cached else np.zeros_like(near), steps)
    rates = _not_rising(np.maximum(rates, SLOWEST * steps.sum() / near.sum()), near.sum(axis=0))
    curve = DecodeCurve(tuple((float(n), float(1 / rate)) for n, rate in zip(knots, rates, strict=True)))
    cached = np.nan_to_num(np.concatenate([load.cached for load in loads])).astype(np.int64)
    return ReplicaLaw(
        curve,
        prefill_s,
        *_arrivals(loads, curve, prefill_s, max_concurrent),
        max(1, int(np.gcd.reduce(cached))),
        float((running * seconds).sum() / seconds.sum()),
    )


def _knots(running: Floats, seconds: Floats) -> Floats:
    """Numbers of running sequences, ascending."""
    order = np.argsort(running)
    share = np.cumsum(seconds[order]) / seconds.sum()
    low, high = (max(1.0, float(running[order][min(np.searchsorted(share, q), len(share) - 1)])) for q in REACH)
    return np.unique(np.geomspace(low, high, 1 + math.ceil(math.log(high / low) / math.log(APART))))


def _least_squares(near: Floats, prefilled: Floats, steps: Floats) -> tuple[Floats, float]:
    """u and p. For each p the best u is that of a linear problem."""
    weight = 1 / np.sqrt(np.maximum(steps, 1.0))

    def solve(p: float) -> tuple[float, Floats]:
        columns = (near - p * prefilled) * weight[:, None]
        rates = np.asarray(np.linalg.lstsq(columns, steps * weight, rcond=None)[0], dtype=np.float64)
        return float(((columns @ rates - steps * weight) ** 2).sum()), rates

    if not prefilled.any():
        return solve(0.0)[1], 0.0
    most = float(near.sum() / prefilled.sum())
    tried = [0.0, *np.geomspace(most / 10**DECADES, most, TRIED).tolist()]
    best = int(np.argmin([solve(p)[0] for p in tried]))
    low, high = tried[max(0, best - 1)], tried[min(TRIED, best + 1)]
    for _ in range(HALVINGS):
        quarter = (high - low) / 4
        errors = [solve(low + i * quarter)[0] for i in (1, 2, 3)]
        middle = low + quarter * (1 + errors.index(min(errors)))
        low, high = middle - quarter, middle + quarter
    return solve((low + high) / 2)[1], (low + high) / 2


def _not_rising(rates: Floats, weights: Floats) -> Floats:
    """The nearest rates that do not rise: pools of neighbours that do, with their weighted mean."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, members
    for rate, weight in zip(rates.tolist(), np.maximum(weights, 1e-9).tolist(), strict=True):
        pools.append((rate, weight, 1))
        while len(pools) > 1 and pools[-2][0] < pools[-1][0]:
            (a, v, m), (b, w, n) = pools[-2], pools[-1]
            pools[-2:] = [((a * v + b * w) / (v + w), v + w, m + n)]
    return np.array([mean for mean, _, members in pools for _ in range(members)])


def _arrivals(loads: list[_Load], curve: DecodeCurve, prefill_s: float, max_concurrent: int) -> tuple[float, float]:
    """Seconds from a request to the step that makes its first token, and more of them for each that was sent before and has none
    yet: a straight line through the requests that found a place. Neither is negative."""
    beyond, before = list[Floats](), list[Floats]()
    for load in loads:
        earlier = np.searchsorted(np.sort(load.sent), load.sent)
        had_place = earlier - np.searchsorted(np.sort(load.last), load.sent) < max_concurrent
        prefilled = load.prefilled(load.first - load.step / 2, load.first + load.step / 2)
        steps = np.array([curve.step_s(max(1.0, n)) for n in load.number_running(load.first).tolist()])
        found = load.between(load.unpaused, load.sent, load.first) - prefill_s * prefilled - steps
        beyond.append(found[had_place])
        before.append((earlier - np.searchsorted(np.sort(load.first), load.sent))[had_place].astype(np.float64))
    waited, others = np.concatenate(beyond), np.concatenate(before)
    if not len(waited):
        return 0.0, 0.0
    slope = float(np.polyfit(others, waited, 1)[0]) if others.std() > 0 else 0.0
    arrival_s = min(max(0.0, slope), max(0.0, float(waited.mean())) / max(1.0, float(others.mean())))
    return max(0.0, float(waited.mean()) - arrival_s * float(others.mean())), arrival_s
