"""The worker: plays many episodes at once and delivers their trajectories.

    buffer ──lease──> one task per member ──> EpisodePlayer.play ──deliver──> buffer
                        ├── twice a second, to each shard: progress (tokens so far, idle slots), which also renews the leases
                        └── every second: load of the servers, which moves the number of slots (`concurrency.py`)

Invariants:
- The worker requests a lease only while it has room for a whole group, so the members of a group start at the same time. A group
  that it asked for before `Concurrency.cap` fell still comes, and is played.
- A smaller number of slots ends no running episode; fewer new ones start.
- Every token that an engine returned to this worker is reported with its version, also when its episode fails or is cancelled.
- An episode that is too large to be delivered has failed, and is delivered without its branches.
- An episode whose lease is lost or whose group is complete is cancelled as soon as the buffer reports it.
- `run` returns all leases before it returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from ..agents.base import Completion
from ..buffer.client import BufferClient
from ..buffer.ledger import Counts
from ..buffer.messages import Lease
from ..buffer.trajectory import UNWANTED, Outcome
from ..common.spans import RecordSpan, no_record
from ..common.tasks import Stopped, run_or_stop
from ..errors import WireError
from .concurrency import Concurrency, SlotTime
from .failures import FailureLog, FailureWindow
from .loop_watchdog import EventLoopWatchdog
from .player import EpisodePlayer, EpisodeResult

log = logging.getLogger(__name__)

PROGRESS_S = 0.5  # between progress reports: fine enough to see what is generated during one learner step
SAMPLE_S = 1.0  # between samples of the servers' load; the second that `Concurrency` counts in
GOODBYE_S = 5.0  # how long a stopping worker tries to return its leases; after that they expire
CANCELLED = EpisodeResult(Outcome("failed", UNWANTED, "its lease was lost, or its group is complete"), 0.0, ())


class Worker:
    """Plays as many episodes at once as the servers can take, and at most `limit`, until `stop`. The router of `player` must be
    entered; the caller keeps its fleet up to date. `workers` processes share the servers (`rollout.workers`); `tell` shows the user
    a line, `record` keeps what the episodes did and when."""

    def __init__(
        self,
        player: EpisodePlayer,
        buffer: BufferClient,
        group_size: int,
        workers: int,
        tell: Callable[[str], None] = lambda text: None,
        record: RecordSpan = no_record,
        limit: int | None = None,
    ) -> None:
        self._record = record
        self._tokens = self._ended = 0
        self._player = player
        self._buffer = buffer
        self._group_size = group_size
        self._concurrency = Concurrency(group_size, player.router.max_concurrent, workers, limit)
        self._running: dict[str, Counts] = {}
        self._cancel_scopes: dict[str, asyncio.Timeout] = {}
        self._failures, self._window = FailureLog(tell), FailureWindow(tell)
        self._slot_time = SlotTime(group_size, time.monotonic())
        self._changed = asyncio.Condition()

    def set_limit(self, limit: int | None) -> None:
        """Most episodes to play at once from now on, None for no limit. No running episode is ended, and a group that is asked for
        already may still come."""
        self._account()
        self._concurrency.set_limit(limit)

    async def run(self, stop: asyncio.Event) -> None:
        """Lease, play, deliver; returns after `stop` is set and the leases are returned."""
        await self._buffer.register()
        try:
            async with EventLoopWatchdog():
                await run_or_stop(self._work(), stop)
        except Stopped:
            log.info("stopping; %d episodes are cancelled", len(self._running))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                await asyncio.gather(*map(self._leave, range(self._buffer.shards)))

    async def _work(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for shard in range(self._buffer.shards):  # one that does not answer keeps no report from the others
                tasks.create_task(self._report_progress(shard), name=f"progress {shard}")
            tasks.create_task(self._sample_load(), name="load")
            while True:
                async with self._changed:
                    await self._changed.wait_for(lambda: self._free_groups or self._buffer.answered)
                leases = await self._buffer.leases(self._free_groups)
                self._account()
                for lease in leases:
                    for member in lease.members:
                        self._running[lease.episode(member)] = {}
                    for member in lease.members:
                        tasks.create_task(self._episode(lease, member), name=lease.episode(member))

    def gauges(self) -> dict[str, int]:
        """Episodes that may be played and that are, requests that wait for a replica, and since the start the tokens received and
        the episodes delivered. From any thread."""
        return {
            "slots": self._concurrency.cap,
            "playing": len(self._running),
            "queued": self._player.router.waiting,
            "tokens": self._tokens,
            "delivered": self._ended,
        }

    @property
    def _free_groups(self) -> int:
        """Whole groups that may start."""
        return max(0, self._concurrency.cap - len(self._running)) // self._group_size

    def _account(self) -> None:
        """Before the cap or what is played changes."""
        self._slot_time.account(time.monotonic(), self._concurrency.cap, len(self._running))

    async def _episode(self, lease: Lease, member: int) -> None:
        episode_id = lease.episode(member)
        generated = self._running[episode_id]

        def count(completion: Completion) -> None:
            self._tokens += len(completion.token_ids)
            for span in completion.version_spans:
                generated[span.version] = generated.get(span.version, 0) + span.end - span.start

        scope = asyncio.timeout(None)  # the buffer's cancellation expires it
        try:
            async with scope:
                self._cancel_scopes[episode_id] = scope
                try:
                    result = await self._player.play(lease, member, on_tokens=count, record=self._record)
                finally:
                    self._cancel_scopes.pop(episode_id, None)
        except TimeoutError:
            if not scope.expired():
                raise
            result = CANCELLED
        branches = result.trajectories, result.failed_branches
        try:
            await self._buffer.deliver(episode_id, generated, result.outcome, *branches, result.image_files)
        except WireError as error:
            result = EpisodeResult(Outcome("failed", "policy", f"it cannot be delivered: {error}"), 0.0, (), error)
            await self._buffer.deliver(episode_id, generated, result.outcome, (), (), {})
        self._ended += 1
        async with self._changed:
            self._account()
            del self._running[episode_id]
            self._changed.notify_all()
        if result is not CANCELLED:
            outcome, slots = result.outcome, self._concurrency.cap
            if not outcome.trainable:
                self._failures.record(episode_id, outcome, result.error)
            self._window.add(outcome, useful=bool(result.trajectories) and outcome.trainable, slots=slots)

    async def _sample_load(self) -> None:
        router, concurrency = self._player.router, self._concurrency
        while True:
            samples = await router.engine_loads()
            self._account()
            concurrency.set_replicas(router.serving)
            concurrency.observe(samples, router.waiting, len(self._running), router.per_sample)
            async with self._changed:
                self._changed.notify_all()
            await asyncio.sleep(SAMPLE_S)

    async def _report_progress(self, shard: int) -> None:
        """Report the tokens of a shard's episodes, and to the first shard the slots."""
        while True:
            for episode_id in await self._progress(shard):
                if scope := self._cancel_scopes.pop(episode_id, None):
                    scope.reschedule(0)  # cancels the episode's task in the next turn of the loop
            await asyncio.sleep(PROGRESS_S)

    async def _progress(self, shard: int) -> tuple[str, ...]:
        buffer = self._buffer
        running = {id: counts for id, counts in self._running.items() if buffer.shard_of(id) == shard}
        self._account()
        total = self._slot_time
        slots = (total.slot_s, total.idle_slot_s) if shard == 0 else (0.0, 0.0)
        return await buffer.progress(running, *slots, shard)

    async def _leave(self, shard: int) -> None:
        await self._progress(shard)
        await self._buffer.deregister(shard)
