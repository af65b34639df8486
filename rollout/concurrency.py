"""How many episodes a worker plays at once: follows how busy the servers are, so that nobody has to set it.

    every second:   cap += growth             while the cap is used up
                    cap -= cap x CUT x crowd  in the measure in which requests queue or KV caches fill

Additive growth and a cut in proportion: workers that share servers see the same crowd, and the one with more gives up more, until
their caps are equal (Chiu and Jain 1989). A cut in the measure of the crowd, instead of by half, settles instead of swinging
(Alizadeh et al. 2010, DCTCP). An episode is not always generating, so that the cap ends above the servers' own limit by what tools
and environments take.

Invariants:
- The cap is never below one group: a group's members start together.
- It moves only when its last move has taken effect: it grows while it leaves no room for a group, and is cut while no more is
  played than it allows. Running episodes end by themselves.
- A pure state machine: no clock, no task. `observe` is called once a second.
"""

from __future__ import annotations

from collections.abc import Sequence

from .engine import Pressure

GROWTH = 0.03
"""Growth per second, as a share of what the servers decode at once: half a minute doubles a cap that began there."""

CUT = 0.25
"""Share of the cap that a second of full crowd takes away."""

CROWDED = 0.5
"""Requests that queue, as a share of those that the servers decode at once, that make the crowd full. Where growth and cut are even
(a crowd of GROWTH / CUT) the queue is 6 % of the servers: none of them runs dry between two episodes, and nobody waits long."""

KV_ROOM = 0.80
"""Share of a KV cache above which it begins to count as crowded: sequences under way still grow."""

KV_FULL = 0.95
"""Share at which the crowd is full. Beyond it a server throws sequences out and computes their KV again."""

TURNOVER = 0.1
"""Share of the cap that may stand empty in a cap that is used up: many short episodes end while new leases are on their way."""

MEMORY = 0.5
"""Weight of the newest sample in the crowd: a group that starts is eight requests at once, and no crowd."""


class Concurrency:
    """The cap of one worker.

    Args:
        group_size: episodes per group.
        max_concurrent: sequences that one server decodes at once.
        workers: worker processes that share the servers; each begins with its part of them.
    """

    def __init__(self, group_size: int, max_concurrent: int, workers: int) -> None:
        self._group_size = group_size
        self._max_concurrent = max_concurrent
        self._share = max_concurrent / workers
        self._replicas = 0
        self._cap = max(float(group_size), self._share)
        self._crowd = 0.0

    @property
    def cap(self) -> int:
        """Episodes that may be under way."""
        return int(self._cap)

    def follow(self, replicas: int) -> None:
        """So many replicas take requests now. With none the cap stays: they are expected back."""
        if replicas and replicas != self._replicas:
            self._set(self._cap * replicas / self._replicas if self._replicas else self._share * replicas)
            self._replicas = replicas

    def observe(self, samples: Sequence[Pressure], queued: int, playing: int) -> None:
        """A second has passed. `samples` are of the replicas that answered, `queued` requests wait in this worker because no
        replica has room, `playing` episodes are under way."""
        decoding = [s for s in samples if s.running or not s.waiting]  # the others are paused, which is no crowd
        if not decoding:
            return
        self._crowd += MEMORY * (self._crowd_of(decoding, queued) - self._crowd)
        if playing > self.cap:
            return
        used_up = self.cap - playing < max(self._group_size, TURNOVER * self.cap)
        growth = max(1.0, GROWTH * self._share * len(decoding)) if used_up else 0.0
        self._set(self._cap + growth - self._cap * CUT * self._crowd)

    def _crowd_of(self, samples: Sequence[Pressure], queued: int) -> float:
        """0: there is room. 1: full."""
        waiting = queued + sum(s.waiting for s in samples)
        queue = waiting / (CROWDED * self._max_concurrent * len(samples))
        caches = [min(1.0, max(0.0, (s.kv_usage - KV_ROOM) / (KV_FULL - KV_ROOM))) for s in samples]
        return max(min(1.0, queue), sum(caches) / len(caches))

    def _set(self, cap: float) -> None:
        self._cap = max(float(self._group_size), cap)
