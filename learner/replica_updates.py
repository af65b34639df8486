"""Pushes of the learner's weights to the replicas: each version is pushed by rank 0, and replicas that join or come back are
updated meanwhile, by at most one catch-up at a time, in a task of its own. The other ranks take part in the collectives that gather
the weights.

    awake ──sleep──> asleep, in a run whose replicas do ──publish (the next version), wake or no_push (the same)──> awake
"""

from __future__ import annotations

import asyncio
import collections
import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec
import torch

from ..buffer.client import BufferClient
from ..weightsync.plan import PushReport
from ..weightsync.publisher import Publisher
from .backend import Backend
from .packing import scoring_microbatch

log = logging.getLogger(__name__)

POLL_S = 0.2  # seconds between requests for the buffer's statistics until the first group is leased


class ReplicaUpdates:
    """One rank's. The arguments are those of `TrainingLoop`."""

    def __init__(
        self,
        backend: Backend,
        buffer: BufferClient,
        publisher: Publisher | None,
        joined: asyncio.Event,
        canary_ids: Sequence[int],
        before_wake: Callable[[], None],
    ) -> None:
        self._backend = backend
        self._buffer = buffer
        self._publisher = publisher
        self._joined = joined
        self._canary = tuple(canary_ids)
        self._before_wake = before_wake
        self._slept_at: float | None = None  # since when replicas sleep (`time.monotonic`)
        self._slept_s = 0.0  # how long they slept since the last report
        self._ready = publisher is None
        self._catch_up: asyncio.Task[None] | None = None
        self._retry: asyncio.TimerHandle | None = None

    async def publish(self, version: int) -> PushReport | None:
        """Collective. Gather the weights and push them as `version`, which wakes replicas that sleep; the report on rank 0, None on
        the others."""
        scored = self.score_canary()
        self._before_wake()
        if self._publisher is None:
            collections.deque(self._backend.named_weights(), maxlen=0)
            return None
        push = await self._publisher.publish(version, self._backend.named_weights(), self._canary, scored.tolist())
        await self._end_catch_up()
        self._schedule_retry(self._publisher, push)
        return self._with_asleep_s(push)

    @property
    def sleeps(self) -> bool:
        """Whether replicas sleep while the ranks step; False on ranks other than 0."""
        return self._publisher is not None and self._publisher.sleeps

    async def sleep(self) -> None:
        """On rank 0: have the replicas free their memory, until `publish`, `wake` or `no_push`."""
        assert self._publisher is not None
        self._slept_at = time.monotonic()
        await self._publisher.sleep()
        await self._end_catch_up()

    async def wake(self) -> PushReport | None:
        """Have the replicas that sleep serve the version again that they served; None where none sleeps, and on ranks other than
        0."""
        self._before_wake()
        if self._publisher is None:
            return None
        push = await self._publisher.wake()
        self._note_awake()
        if push is not None:
            self._schedule_retry(self._publisher, push)
        return push

    async def no_push(self, version: int) -> PushReport | None:
        """The report of a step that changed no weight, after which replicas that sleep wake; None on ranks other than 0."""
        push = await self.wake()
        if self._publisher is None:
            return None
        return self._with_asleep_s(push or PushReport(version, self._publisher.serving, {}))

    def score_canary(self) -> torch.Tensor:
        """Collective. The policy's log-probs of the fixed prompt, but for its first token."""
        return self._backend.logprobs([scoring_microbatch([self._canary])], temperature=1.0)[0][1:]

    async def first_rollout(self, on_ready: Callable[[], None], stop: asyncio.Event) -> None:
        """Return when the first group is leased or ready, or at `stop`. What comes before, such as an evaluation, has no deadline
        and counts neither as waiting nor towards `batch_s`. `on_ready` is called once the replicas serve a version."""
        announced = False
        stopped = asyncio.create_task(stop.wait(), name="stop")
        try:
            while not stopped.done():
                if not announced and self._ready:
                    announced = True
                    on_ready()
                stats = await self._buffer.stats()
                if stats.leased_groups or stats.ready_groups:
                    return
                await self.wait_any({stopped}, POLL_S)
        finally:
            stopped.cancel()

    async def wait_any(self, tasks: Collection[asyncio.Task[Any]], seconds: float | None = None) -> None:
        """Return when one of `tasks` is done, after `seconds`, or when a replica joined or a catch-up ended. Each call begins a
        catch-up where a replica needs one, so that the caller repeats it until one of `tasks` is done."""
        if self._catch_up is not None and self._catch_up.done():
            catch_up, self._catch_up = self._catch_up, None
            catch_up.result()
        if self._catch_up is None and self._joined.is_set() and self._publisher is not None:
            self._joined.clear()
            self._catch_up = asyncio.create_task(self._update_joined(self._publisher), name="catch up")
        news = self._catch_up or asyncio.create_task(self._joined.wait(), name="joined")
        try:
            await asyncio.wait({*tasks, news}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if news is not self._catch_up:
                news.cancel()

    async def serve(self, stop: asyncio.Event) -> None:
        """Update replicas that join or come back, until `stop`."""
        stopped = asyncio.create_task(stop.wait(), name="stop")
        if self._publisher is not None:
            self._joined.set()  # a replica may have been left out when training ended
        try:
            while not stopped.done():
                await self.wait_any({stopped})
        finally:
            stopped.cancel()
            await self.close()

    async def close(self) -> None:
        """Stop publishing; a catch-up that is under way is cancelled."""
        if self._retry is not None:
            self._retry.cancel()
        if self._catch_up is not None:
            self._catch_up.cancel()
            await asyncio.wait({self._catch_up})
            self._catch_up = None

    def _with_asleep_s(self, push: PushReport) -> PushReport:
        """`push`, with the time for which replicas slept since the report before."""
        self._note_awake()
        slept_s, self._slept_s = self._slept_s, 0.0
        return msgspec.structs.replace(push, asleep_s=slept_s)

    def _note_awake(self) -> None:
        if self._slept_at is not None:
            self._slept_s += time.monotonic() - self._slept_at
            self._slept_at = None

    async def _end_catch_up(self) -> None:
        """Of one that the publisher has cancelled, unless it had ended before."""
        if self._catch_up is not None:
            catch_up, self._catch_up = self._catch_up, None
            await catch_up

    async def _update_joined(self, publisher: Publisher) -> None:
        self._schedule_retry(publisher, await publisher.catch_up())

    def _schedule_retry(self, publisher: Publisher, push: PushReport | None) -> None:
        """Schedule the next attempt for the replicas that a push did not reach."""
        retry_in = publisher.retry_in()
        if self._retry is not None:
            self._retry.cancel()
        if retry_in is not None:
            self._retry = asyncio.get_running_loop().call_later(retry_in, self._joined.set)
        if push is None:
            return
        for name, why in push.failed.items():
            log.warning("%s did not take version %d: %s", name, push.version, why)
        if push.pushed:
            self._ready = True
