"""How many episodes a worker plays at once: an adaptive cap that follows the servers' load, so that users need not set it. And
`SlotTime`, how long the slots of that cap were empty: the same account in a run and in a simulation of it.

    every second:   cap += growth                    while the cap is used up
                    cap -= cap x CUT x congestion    in proportion to queued requests or full KV caches

Additive increase, multiplicative decrease: workers that share servers observe the same congestion, the one with the larger cap
gives up more, and their caps converge (Chiu and Jain 1989). A decrease proportional to the congestion, instead of by half, settles
instead of oscillating (Alizadeh et al. 2010, DCTCP). Episodes are not always generating, so the cap settles above the servers' own
limit by the share of time that tools and environments take.

Invariants:
- The cap is never below one group: the members of a group start at the same time. It is never above a limit that the user set.
- The cap moves only when its last move has taken effect: it grows while it leaves no room for a group, and shrinks while no more
  episodes run than it allows. Running episodes are never ended.
- The account is exact where the caller calls `account` before every change of the slots and of the number of episodes played.
- A slot that waits for the room of a whole group is not idle, nor is one above the cap, in which an episode still runs.
- Pure state machines: no clock, no task. `observe` is called once a second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

GROWTH = 0.03  # per second, as a share of what the servers decode at once: doubles the initial cap in half a minute
CUT = 0.25  # share of the cap that one second of full congestion takes away
# Queued requests, as a share of those that the servers decode at once, that count as full congestion. Growth and cut balance at a
# congestion of GROWTH / CUT, a queue of 6 % of the servers' slots: no server idles between episodes, and requests wait little.
QUEUE_FULL = 0.5
KV_FREE = 0.80  # KV cache usage up to which there is no congestion: sequences in flight still grow
KV_FULL = 0.95  # KV cache usage that counts as full congestion: beyond it a server preempts and recomputes
TURNOVER = 0.1  # share of a used-up cap that may be free: many short episodes end while new leases are on their way
MEMORY = 0.5  # weight of the newest sample: a group that starts sends many requests at once, which is no congestion


class EngineLoad(msgspec.Struct, frozen=True):
    """The load of a replica: sequences decoding, sequences queued, share of its KV cache in use. Since it started, and None where
    its server does not say: the tokens that it has sampled; with speculative decoding those that were drafted, and those of them
    that the model accepted."""

    running: int
    waiting: int
    kv_usage: float
    tokens: int | None = None
    drafted: int | None = None
    accepted: int | None = None

    def gauges(self) -> dict[str, float | None]:
        """By the names that the series of a worker have."""
        drafts = {} if self.drafted is None else {"drafted": self.drafted, "accepted": self.accepted}
        return {"running": self.running, "waiting": self.waiting, "kv": self.kv_usage, "tokens": self.tokens, **drafts}


class Concurrency:
    """The cap of one worker, for servers that each decode `max_concurrent` sequences at once. `workers` processes share the
    servers; each starts with an equal share. `limit` is the most episodes of this worker, None for no limit."""

    def __init__(self, group_size: int, max_concurrent: int, workers: int, limit: int | None = None) -> None:
        self._group_size = group_size
        self._max_concurrent = max_concurrent
        self._share = max_concurrent / workers
        self._replicas = 0
        self._limit = math.inf if limit is None else float(limit)
        self._cap = max(float(group_size), min(self._share, self._limit))
        self._congestion = 0.0

    @property
    def cap(self) -> int:
        """Episodes that may run."""
        return int(self._cap)

    def set_limit(self, limit: int | None) -> None:
        """Another limit. A cap that the old one held down starts again with its share of the servers."""
        held, self._limit = self._cap >= self._limit, math.inf if limit is None else float(limit)
        self._set(max(self._cap, self._share * max(1, self._replicas)) if held else self._cap)

    def set_replicas(self, replicas: int) -> None:
        """`replicas` serve requests now. With none the cap stays: they are expected back."""
        if replicas and replicas != self._replicas:
            self._set(self._cap * replicas / self._replicas if self._replicas else self._share * replicas)
            self._replicas = replicas

    def observe(self, samples: Sequence[EngineLoad], queued: int, running: int, each: float = 1.0) -> None:
        """One second has passed. `samples` are of the replicas that answered, each of which stands for `each` replicas, `queued`
        requests wait in this worker for a free slot of a replica, `running` episodes are in progress."""
        decoding = [s for s in samples if s.running or not s.waiting]  # the others are paused, which is no congestion
        if not decoding:
            return
        self._congestion += MEMORY * (self._congestion_of(decoding, queued / each) - self._congestion)
        if running > self.cap:
            return
        used_up = self.cap - running < max(self._group_size, TURNOVER * self.cap)
        growth = max(1.0, GROWTH * self._share * each * len(decoding)) if used_up else 0.0
        self._set(self._cap + growth - self._cap * CUT * self._congestion)

    def _congestion_of(self, samples: Sequence[EngineLoad], queued: float) -> float:
        """From 0, no congestion, to 1, full; `queued` is the part of these replicas."""
        waiting = queued + sum(s.waiting for s in samples)
        queue = waiting / (QUEUE_FULL * self._max_concurrent * len(samples))
        caches = [min(1.0, max(0.0, (s.kv_usage - KV_FREE) / (KV_FULL - KV_FREE))) for s in samples]
        return max(min(1.0, queue), sum(caches) / len(caches))

    def _set(self, cap: float) -> None:
        self._cap = max(float(self._group_size), min(cap, self._limit))


class SlotTime:
    """Totals since the time `now`, in seconds of the caller's clock.

    Attributes:
        slot_s: seconds times slots, those above the cap that are still played included.
        idle_slot_s: of these, seconds of slots without an episode.
    """

    def __init__(self, group_size: int, now: float) -> None:
        self.slot_s = 0.0
        self.idle_slot_s = 0.0
        self._group_size = group_size
        self._until = now

    def account(self, now: float, slots: int, playing: int) -> None:
        """From the last call until `now` there were `slots`, and `playing` episodes."""
        seconds, self._until = now - self._until, now
        self.slot_s += max(slots, playing) * seconds
        if slots - playing >= self._group_size:
            self.idle_slot_s += (slots - playing) * seconds
