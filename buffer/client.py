"""How workers and learners speak to the buffer.

Invariants:
- Every request has a deadline, but `lease`, which ends with its caller. Until then it is sent again whenever the buffer is
  silent, which is safe: all requests may be repeated. A buffer that is restarted in between is not noticed.
- A deadline counts the time in which this process could have heard the answer: one that was stopped for long goes on.
- Replies are matched by number; any number of requests may be under way at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import Sequence
from types import TracebackType
from typing import TypeVar

import msgspec
import zmq.asyncio

from ..curve import Keys
from ..errors import DeadlineExceeded, StateError, Waiting, WireError
from . import messages as m
from . import wire
from .ledger import Counts
from .line import Line
from .messages import Batch, Lease, Stats
from .peers import connection_name
from .trajectory import DETAIL_LIMIT, Outcome, Trajectory

RESEND_S = 5.0
"""Silence after which a request is sent again. A lease or a batch may take longer; asking twice costs one small frame."""

R = TypeVar("R")


class BufferClient:
    """A connection to the buffer at `address`, used as an async context manager. `name` is unique per role, not per process.

    `keys` are those of the run, if not this process's own.
    """

    def __init__(self, address: str, name: str, *, deadline_s: float = 60.0, keys: Keys | None = None) -> None:
        self.name = name
        self.incarnation = uuid.uuid4().hex
        self._address = address
        self._deadline_s = deadline_s
        self._keys = keys
        self._numbers = itertools.count(1)
        self._leasing = asyncio.Lock()

    async def __aenter__(self) -> BufferClient:
        self._context = zmq.asyncio.Context()
        self._line: Line[m.Reply] = Line(
            self._context,
            self._address,
            f"{self.name} to the buffer",
            m.ReplyEnvelope,
            identity=connection_name(self.name, self.incarnation),
            patient=False,  # while the buffer is away repetitions do not queue up
            keys=self._keys,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._line.close()
        self._context.term()

    # --- workers --------------------------------------------------------------------------------------------------

    async def hello(self) -> None:
        await self._ask(m.Hello(self.name, self.incarnation), m.Done)

    async def lease(self) -> Lease:
        """The next group to play, see `leases`."""
        return (await self.leases(1))[0]

    async def leases(self, groups: int) -> tuple[Lease, ...]:
        """The next groups to play: at least one, at most `groups`. How long admission takes is the learner's affair, so the
        caller's cancellation is the only deadline. The buffer keeps one such wish per client: calls queue here, and a cancelled
        one is replaced."""
        async with self._leasing:
            with Waiting(self.name, "a lease from the buffer"):
                wish = m.WantLease(self.name, min(groups, m.GROUPS_AT_ONCE))
                granted = await self._send(wish, m.Granted, float("inf"))
                return granted.lease, *granted.more

    async def progress(self, generated: dict[str, Counts], slot_s: float, idle_slot_s: float) -> tuple[str, ...]:
        """Report running totals; returns the episodes among them that nobody waits for any more."""
        return (await self._ask(m.Progress(self.name, generated, slot_s, idle_slot_s), m.Unwanted)).episodes

    async def deliver(
        self, episode_id: str, generated: Counts, outcome: Outcome, trajectories: Sequence[Trajectory]
    ) -> None:
        """Returns once the episode is durable.

        Raises:
            WireError: a trajectory is longer than the buffer takes.
        """
        outcome = msgspec.structs.replace(outcome, detail=outcome.detail[:DETAIL_LIMIT])
        await self._ask(m.Deliver(self.name, episode_id, generated, outcome, tuple(trajectories)), m.Done)

    async def goodbye(self) -> None:
        await self._ask(m.Goodbye(self.name), m.Done)

    # --- learner --------------------------------------------------------------------------------------------------

    async def recover(self, version: int) -> int:
        """Start from weights that contain the commits up to `version`; the version to publish them under."""
        return (await self._ask(m.Recover(version), m.Recovered)).version

    async def take(self, version: int, deadline_s: float) -> Batch:
        """The batch for `version`.

        Raises:
            DeadlineExceeded: there was none within `deadline_s`.
        """
        return await self._ask(m.Take(version), Batch, deadline_s)

    async def fresh(self, version: int, limit: int) -> tuple[Trajectory, ...]:
        """At most `limit` delivered trajectories, outside of batches, that hold tokens of `version`."""
        return (await self._ask(m.WantFresh(version, limit), m.Fresh)).trajectories

    async def commit(self, version: int) -> None:
        await self._ask(m.Commit(version), m.Done)

    async def served(self, version: int) -> None:
        await self._ask(m.Served(version), m.Done)

    async def checkpointed(self, version: int) -> None:
        await self._ask(m.Checkpointed(version), m.Done)

    async def stats(self) -> Stats:
        return (await self._ask(m.WantStats(), m.StatsReply)).stats

    # --- transport ------------------------------------------------------------------------------------------------

    async def _ask(self, request: m.Request, expected: type[R], deadline_s: float | None = None) -> R:
        seconds = self._deadline_s if deadline_s is None else deadline_s
        with Waiting(self.name, _answer_to(request), seconds):
            return await self._send(request, expected, seconds)

    async def _send(self, request: m.Request, expected: type[R], seconds: float) -> R:
        number = next(self._numbers)
        frames = wire.encode(m.Envelope(number, request))
        if max(map(len, frames)) > wire.FRAME_LIMIT:
            raise WireError(
                f"a frame of {type(request).__name__} is above {wire.FRAME_LIMIT} bytes; shorten the episode"
            )
        future = self._line.expect(number)
        left = seconds
        try:
            while not future.done() and left > 0:
                turn = min(left, RESEND_S)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(turn):
                        await self._line.put(frames)
                        await asyncio.wait([future])
                left -= turn  # however late the clock woke us: a process that was stopped has heard nothing meanwhile
        finally:
            future.cancel()
        if future.cancelled():
            hint = f"is the buffer at {self._address} alive, and are workers delivering?"
            raise DeadlineExceeded(self.name, _answer_to(request), seconds, hint)
        reply = future.result()
        if isinstance(reply, m.Refused):
            raise StateError(f"the buffer refused {type(request).__name__} of {self.name}: {reply.error}")
        if not isinstance(reply, expected):
            raise StateError(f"the buffer answered {type(request).__name__} with {type(reply).__name__}")
        return reply


def _answer_to(request: m.Request) -> str:
    return f"the buffer's answer to {type(request).__name__}"
