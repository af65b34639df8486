"""One replica in a simulation: continuous batching, a queue, a prefix cache, swaps of weights. Pure.

    submit ──> on the way ──> queue ──a free place──> prefill, which stalls all ──> decode, side by side ──> complete
                                                     swap: the caches are void, running sequences are prefilled anew

Invariants:
- At most `max_concurrent` sequences decode; the others queue in the order of their arrival.
- A request is taken in after some decode steps, each with as many sequences as the replica then has requests.
- A step decodes one token of every running sequence and takes the seconds that the decode curve has for their number.
- Every sampled token has the version that the replica served then. A request's tokens by version sum to its tokens.
- While the learner of the same host computes, the replica is slowed by a factor: steps and arrivals take longer, prefills do not.
- A replica that is paused decodes nothing; what arrives meanwhile queues. One that drains decodes what it has, and then pauses.

All seconds are those of the virtual clock. The decoding of a replica is a `kernel.SharedProcessor`: its jobs are the requests that
decode, its progress counts tokens, `settle` brings the progress up to now, `stall` adds seconds in which no job progresses.

Not modelled: the limit of the KV cache, and that a prefill is spread over several steps.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable

import msgspec

from ..rollout.concurrency import EngineLoad
from .kernel import SharedProcessor, VirtualClock


class DecodeCurve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of one decode step by the number of running sequences: straight lines between `points`, which are ascending; outside
    of them the first and the last line go on. A single point is a constant."""

    points: tuple[tuple[float, float], ...]  # (running sequences, seconds of a step)

    def __post_init__(self) -> None:
        running = [x for x, _ in self.points]
        if not self.points or running != sorted(set(running)) or min(s for _, s in self.points) <= 0:
            raise ValueError("a decode curve needs points with ascending numbers of sequences and seconds above 0")

    def step_s(self, running: float) -> float:
        points = self.points
        if len(points) == 1:
            return points[0][1]
        after = min(max(1, bisect.bisect_left(points, running, key=lambda point: point[0])), len(points) - 1)
        (x0, y0), (x1, y1) = points[after - 1], points[after]
        lowest = min(y for _, y in points)  # below the first point a falling line must not reach 0
        return max(lowest / 2, y0 + (y1 - y0) * (running - x0) / (x1 - x0))

    def under_way_s(self, running: float) -> float:
        """Seconds of the step that is under way: none where no sequence runs."""
        return self.step_s(max(1.0, running)) if running else 0.0

    def scaled(self, factor: float) -> DecodeCurve:
        return DecodeCurve(tuple((running, seconds * factor) for running, seconds in self.points))


class SimulatedRequest:
    """A completion that is under way: `sampled_tokens` tokens after a `context`, `shared` of them in all caches."""

    __slots__ = ("began", "cached", "complete", "context", "counts", "number", "replica", "sampled_tokens")

    def __init__(
        self, context: int, shared: int, sampled_tokens: int, complete: Callable[[SimulatedRequest], None]
    ) -> None:
        self.context = context
        self.sampled_tokens = sampled_tokens
        self.complete = complete
        self.cached = shared  # tokens that need no prefill on its replica; its router knows of more
        self.number = 0  # given by its router
        self.replica: SimulatedReplica | None = None
        self.began = 0.0  # progress of the replica's processor at its first token
        self.counts: dict[int, int] = {}  # once complete: version -> tokens


class SimulatedReplica:
    """`recompute`: a swap voids the keys and values of running sequences (`rollout.partial`). The other arguments are those of
    `EngineProfile`."""

    def __init__(
        self,
        clock: VirtualClock,
        name: str,
        curve: DecodeCurve,
        prefill_s: float,
        max_concurrent: int,
        *,
        recompute: bool,
        block: int = 1,
        request_steps: float = 0.0,
    ) -> None:
        self.name = name
        self.version = 0
        self._prefill_s = prefill_s
        self._block = block
        self._request_steps = request_steps
        self._slowness = 1.0
        self._on_the_way: set[SimulatedRequest] = set()
        self._clock = clock
        self._max_concurrent = max_concurrent
        self._recompute = recompute
        self._queue: deque[SimulatedRequest] = deque()
        self._unit_s = unit_s = [curve.step_s(max(1, n)) for n in range(max_concurrent + 1)]
        self._processor: SharedProcessor[SimulatedRequest] = SharedProcessor(clock, unit_s, self._finish)
        self._paused = False
        self._drained: Callable[[], None] | None = None  # called when nothing is decoded any more
        self._swaps: list[tuple[float, int]] = [(0.0, 0)]  # progress at which a version began

    @property
    def in_flight(self) -> int:
        return len(self._processor.jobs) + len(self._queue) + len(self._on_the_way)

    def load(self) -> EngineLoad:
        """As a server has it: while it is paused, what it decoded waits. While it drains, that runs."""
        running = 0 if self._processor.paused else len(self._processor.jobs)
        return EngineLoad(running, len(self._processor.jobs) - running + len(self._queue), 0.0)

    def submit(self, request: SimulatedRequest) -> None:
        request.replica = self
        if not self._request_steps:
            self._arrive(request)
            return
        self._on_the_way.add(request)
        step_s = self._unit_s[min(self.in_flight, self._max_concurrent)]
        self._clock.after(self._slowness * self._request_steps * step_s, self._arrive_unless_cancelled, request)

    def _arrive_unless_cancelled(self, request: SimulatedRequest) -> None:
        if request in self._on_the_way:
            self._on_the_way.remove(request)
            self._arrive(request)

    def _arrive(self, request: SimulatedRequest) -> None:
        if self._paused or len(self._processor.jobs) >= self._max_concurrent:
            self._queue.append(request)
        else:
            self._start(request)

    def cancel(self, request: SimulatedRequest) -> None:
        """End a request early; its `counts` are the tokens that it has got."""
        if request in self._on_the_way:
            self._on_the_way.remove(request)
            return
        if request not in self._processor.jobs:
            self._queue.remove(request)
            return
        self._processor.settle()
        sampled = min(request.sampled_tokens, int(self._processor.progress - request.began))
        self._processor.remove(request)
        request.counts = self._by_version(request, sampled)
        self._note_drained()
        self._fill()

    def slow(self, slowness: float) -> None:
        """Take `slowness` times as long for a step and for a request from now on."""
        self._slowness = slowness
        self._processor.slow(slowness)

    def pause(self) -> None:
        self._paused = True
        self._processor.pause()

    def drain(self, drained: Callable[[], None]) -> None:
        """Begin no request until the next swap; call `drained` when those that are decoded have ended."""
        self._paused, self._drained = True, drained
        self._note_drained()

    def _note_drained(self) -> None:
        if self._drained is not None and not self._processor.jobs:
            drained, self._drained = self._drained, None
            drained()

    def swap(self, version: int) -> None:
        """Serve `version` from here on, and go on."""
        processor = self._processor
        processor.settle()
        self.version = version
        oldest = min((request.began for request in processor.jobs), default=processor.progress)
        needed = bisect.bisect_right(self._swaps, oldest, key=lambda swap: swap[0]) - 1
        self._swaps = [*self._swaps[max(0, needed) :], (processor.progress, version)]
        self._paused = False
        processor.resume()
        if self._recompute and self._prefill_s:
            decoded = sum(processor.progress - r.began for r in processor.jobs)
            processor.stall(self._prefill_s * (sum(r.context for r in processor.jobs) + decoded))
        self._fill()

    def _fill(self) -> None:
        while self._queue and not self._paused and len(self._processor.jobs) < self._max_concurrent:
            self._start(self._queue.popleft())

    def _start(self, request: SimulatedRequest) -> None:
        processor = self._processor
        if self._prefill_s:
            cached = max(0, min(request.cached, request.context - 1))  # the last token is computed in any case
            processor.stall(self._prefill_s * (request.context - cached + cached % self._block))
        processor.settle()
        request.began = processor.progress
        processor.add(request, request.sampled_tokens)

    def _finish(self, request: SimulatedRequest) -> None:
        request.counts = self._by_version(request, request.sampled_tokens)
        self._note_drained()
        self._fill()
        request.complete(request)

    def _by_version(self, request: SimulatedRequest, sampled: int) -> dict[int, int]:
        """The first `sampled` tokens of a request by the version that was served at each."""
        swaps = self._swaps
        if swaps[-1][0] <= request.began:
            return {swaps[-1][1]: sampled} if sampled else {}
        first = max(0, bisect.bisect_right(swaps, request.began, key=lambda swap: swap[0]) - 1)
        counts: dict[int, int] = {}
        done = 0
        for index in range(first, len(swaps)):
            last = index + 1 == len(swaps)
            upto = sampled if last else min(sampled, round(swaps[index + 1][0] - request.began))
            if upto > done:
                counts[swaps[index][1]] = counts.get(swaps[index][1], 0) + upto - done
                done = upto
        return counts
