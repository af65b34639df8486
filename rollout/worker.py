"""The worker: plays many episodes at once and delivers what they left.

    buffer ──lease──> slots ──one task per member──> play() ──Deliver──> buffer
                        └── every second: Progress (tokens so far, slots idle), which also renews the leases

Invariants:
- A lease is asked for only when there is room for a whole group, so a group's members start together.
- Every token an engine returned to this worker is reported, whether its episode ends, fails or is cut off.
- `stop` gives all leases back before it returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence

from ..agents.base import Agent, Completion, Generate
from ..agents.session import Session
from ..buffer.client import BufferClient
from ..buffer.messages import Lease
from ..configs.schema import Config
from ..envs.base import TaskSource
from ..errors import EpisodesFail
from .engine import Sampling
from .episode import EpisodeResult, play
from .router import Router

log = logging.getLogger(__name__)

PROGRESS_S = 0.5
"""Between reports: fine enough to see what is generated during one learner step, a small message each."""

GOODBYE_S = 5.0
"""How long a stopping worker tries to give its leases back; after that they expire by themselves."""

FAILURES = 64
"""Failed episodes in a row, or twice the slots where that is more, after which the worker gives up: something is broken."""

MakeSession = Callable[[Generate], Session]
"""A new session around a way to generate."""


class Player:
    """What it takes to play an episode: the agent, the tasks, the engines. Shared by the worker and the evaluation."""

    def __init__(
        self,
        config: Config,
        agent: Agent,
        source: TaskSource,
        router: Router,
        make_session: MakeSession,
        stop_token_ids: Sequence[int],
        temperature: float,
    ) -> None:
        self._agent = agent
        self._source = source
        self._router = router
        self._make_session = make_session
        self._episode_s = config.rollout.episode_s
        self._top_p = config.rollout.sampling.top_p
        self._temperature = temperature
        self._stop_token_ids = tuple(stop_token_ids)

    async def play(
        self,
        task_index: int,
        *,
        attempt: int = 0,
        member: int = 0,
        oldest_version: int = 0,
        count: Callable[[int], None] = lambda tokens: None,
    ) -> EpisodeResult:
        """Play one episode of task `task_index`; `count` is told of every completion's tokens as they come."""
        episode_id = f"{task_index}.{attempt}.{member}"

        async def generate(token_ids: Sequence[int], max_tokens: int) -> Completion:
            sampling = Sampling(
                max_tokens, temperature=self._temperature, top_p=self._top_p, stop_token_ids=self._stop_token_ids
            )
            completion = await self._router.generate(episode_id, token_ids, sampling, oldest_version)
            count(len(completion.token_ids))
            return completion

        try:
            return await play(
                self._agent,
                self._source,
                task_index,
                self._make_session(generate),
                attempt=attempt,
                member=member,
                episode_s=self._episode_s,
            )
        finally:
            self._router.forget(episode_id)


class Stopped(Exception):
    """Ends the worker's task group: somebody asked it to stop."""


class Worker:
    """Plays up to `slots` episodes at once until `stop`."""

    def __init__(self, player: Player, buffer: BufferClient, slots: int, group_size: int) -> None:
        self._player = player
        self._buffer = buffer
        self._slots = slots
        self._room = min(group_size, slots)
        self._free = asyncio.Semaphore(slots)
        self._running: dict[str, int] = {}
        self._failures = 0
        self._slot_s = 0.0
        self._idle_slot_s = 0.0
        self._changed = asyncio.Condition()

    async def run(self, stop: asyncio.Event) -> None:
        """Lease, play, deliver; returns after `stop` is set and the leases are given back."""
        await self._buffer.hello()
        stopped = asyncio.create_task(stop.wait(), name="stop")
        try:
            async with asyncio.TaskGroup() as tasks:
                report = tasks.create_task(self._report(), name="progress")
                work = tasks.create_task(self._lease_forever(tasks), name="leases")
                await asyncio.wait([stopped, report, work], return_when=asyncio.FIRST_COMPLETED)
                if stop.is_set():
                    raise Stopped
        except* Stopped:
            log.info("stopping; %d episodes are given up", len(self._running))
        finally:
            stopped.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                await self._buffer.progress(dict(self._running), self._slot_s, self._idle_slot_s)
                await self._buffer.goodbye()

    async def _lease_forever(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._slots - len(self._running) >= self._room)
            lease = await self._buffer.lease()
            for member in lease.members:
                self._running[f"{lease.group_id}.{lease.attempt}.{member}"] = 0
            for member in lease.members:
                tasks.create_task(self._episode(lease, member), name=f"{lease.group_id}.{lease.attempt}.{member}")

    async def _episode(self, lease: Lease, member: int) -> None:
        episode_id = f"{lease.group_id}.{lease.attempt}.{member}"

        def count(tokens: int) -> None:
            self._running[episode_id] += tokens

        async with self._free:
            result = await self._player.play(
                lease.group_id,
                attempt=lease.attempt,
                member=member,
                oldest_version=lease.oldest_version,
                count=count,
            )
        await self._buffer.deliver(episode_id, self._running[episode_id], result.outcome, result.trajectories)
        async with self._changed:
            del self._running[episode_id]
            self._changed.notify_all()
        self._judge(episode_id, result)

    def _judge(self, episode_id: str, result: EpisodeResult) -> None:
        """Tell of a failure; raise EpisodesFail when there was nothing else for long."""
        if result.trajectories:
            self._failures = 0
            return
        outcome = result.outcome
        why = f"{outcome.reason}: {outcome.detail}" if outcome.reason else "nothing fits into agent.max_tokens"
        log.warning("episode %s failed by %s", episode_id, why)
        self._failures += 1
        if self._failures >= max(FAILURES, 2 * self._slots):
            raise EpisodesFail(f"{self._failures} episodes in a row failed, the last by {why}")

    async def _report(self) -> None:
        last = time.monotonic()
        while True:
            await self._buffer.progress(dict(self._running), self._slot_s, self._idle_slot_s)
            await asyncio.sleep(PROGRESS_S)
            now = time.monotonic()
            self._slot_s += self._slots * (now - last)
            self._idle_slot_s += max(0, self._slots - len(self._running)) * (now - last)
            last = now
