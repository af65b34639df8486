"""The buffer process: a ZeroMQ ROUTER around the replay state machine and the durable store.

    workers ──Hello, WantLease, Progress, Deliver──> ┌─────────┐ <──Take, Commit, Served, Recover── learner ranks
            <──────────────Granted, Done──────────── │ service │ ──────────Batch, Done────────────>
                                                     └────┬────┘
                                          Replay (pure) ──┴── Store (SQLite)

Invariants:
- Everything a round of messages changed is stored, in one `save`, before any of them is answered.
- A request that may not be carried out is answered `Refused`; a message that is no request is dropped and counted.
- While a round is stored, the one before is answered and the messages of the next change the state already. So rounds are answered
  in their order, and a failed write ends the service: what was acknowledged is in the store, what was not will be sent again.
- Memory is bounded by the limits below, the groups that admission lets be outstanding, and one batch, whoever sends what. One
  thing libzmq does not limit: a message of ever more frames that never ends. Only a peer with the run's keys can send it.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import zmq
import zmq.asyncio

from ..configs.schema import Buffer, parse_size
from ..curve import Guard, Keys
from ..errors import StateError, StoreError, Waiting, WireError
from . import messages as m
from . import wire
from .accounts import ledgers_of
from .admission import Admission
from .door import Door
from .ledger import Books
from .line import LINGER_MS
from .replay import Replay
from .requests import Answer, Requests
from .rows import Change
from .rules import Clock, Rules
from .store import Store

log = logging.getLogger(__name__)

ROUND, ROUND_BYTES = 512, 16 << 20
"""Messages taken in one round, one transaction, and after how many bytes no more are taken. More only delays the first answer."""

BACKLOG = 64
"""Messages of one connection that wait to be read; after that its sender waits."""

STORE_S = 120.0
"""Longest wait for the disk to take one round, which it does in milliseconds. Nobody can break off a write that hangs."""

HANDOVER_S = 1e-3
"""How long the thread that stores waits for the interpreter while the other takes in messages, which it does after every statement.
Python's own 5 ms are as long as a write."""


class BufferService:
    """Opens `path`, restores what it holds, and serves it at `address` until `stop` is called.

    Args:
        shares: of the run's environments, see `Admission`.
        retries: reason of a failure -> how often a member that failed so is granted again.
        greedy: one member of each group is played greedily, see `Rules`.
        keys: of the run, if not this process's own.

    Raises:
        StoreError: the file cannot be opened, read or written.
        StateError: it is of a run with other environments.
    """

    def __init__(
        self,
        config: Buffer,
        path: Path,
        address: str,
        *,
        shares: tuple[float, ...] = (1.0,),
        retries: Mapping[str, int] | None = None,
        greedy: bool = False,
        keys: Keys | None = None,
    ) -> None:
        self._lease_s = config.lease_s
        self._keep = parse_size("buffer.keep", config.keep)
        self._address = address
        self._store = Store(path)
        clock, groups = self._store.load()
        for group in groups:
            group.deadline = time.monotonic() + config.lease_s
        admission = Admission(config.max_staleness, config.groups_per_batch, shares)
        self._replay = Replay(admission, _rules(config, retries, greedy), clock, groups, Books(ledgers_of(path)))
        self._keys = keys
        self._guard: Guard | None = None
        self._requests = Requests(self._replay, self._store, self._turned_away)
        self._replies: list[Answer] = []
        self._stored_clock: Clock | None = None
        self._messages = self._bytes = 0
        self._saver = ThreadPoolExecutor(1, "store")
        self._crowded = self._hangs = False
        self._dropped = 0
        self._stopping = False

    def stop(self) -> None:
        """End `serve` after the round in progress."""
        self._stopping = True

    async def serve(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Serve until `stop`. `on_ready` is called once the address is bound."""
        interval = sys.getswitchinterval()
        sys.setswitchinterval(HANDOVER_S)
        context = zmq.asyncio.Context()
        self._guard = Guard(context, self._keys)
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.MAXMSGSIZE, wire.FRAME_LIMIT)
        socket.setsockopt(zmq.RCVHWM, BACKLOG)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a client that reconnects before its old connection is noticed dead
        self._guard.protect(socket)
        try:
            try:
                socket.bind(self._address)
            except zmq.ZMQError as error:
                raise StoreError(f"the buffer cannot listen at {self._address}: {error}", final=False) from None
            on_ready()
            door, stored = Door.of(socket), list[Answer]()
            while stored or not self._stopping:
                stored = await self._round(door, stored)
        finally:
            sys.setswitchinterval(interval)
            self._saver.shutdown(wait=not self._hangs)  # a save that was under way ends
            self._guard.close()
            socket.close()
            context.term()
            if not self._hangs:
                self._store.close()

    async def _round(self, door: Door, stored: list[Answer]) -> list[Answer]:
        """Store what has changed; meanwhile give the answers `stored` and take in the next round. Returns the answers that may be
        given now."""
        for group in self._replay.expire(time.monotonic()):
            log.warning("group %d: its worker was silent for %g s and loses it", group.id, self._lease_s)
        replies, self._replies = [*self._replies, *self._requests.due()], []
        self._messages = self._bytes = 0
        work = self._changes()
        if work is None:
            _send(door, stored + replies)
            if self._roomy:
                await door.ready.poll(max(1, int(min(1.0, self._lease_s / 4) * 1000)))
                self._take_in(door)
            return []
        saving = self._saver.submit(work)
        saved = asyncio.wrap_future(saving)
        _send(door, stored)
        late = time.monotonic() + STORE_S
        with Waiting("the buffer", "its disk", STORE_S):
            while not saving.done():
                coming = [asyncio.ensure_future(door.ready.poll())] if self._roomy else []
                left = late - time.monotonic()
                await asyncio.wait([saved, *coming], timeout=left, return_when=asyncio.FIRST_COMPLETED)
                for poll in coming:
                    poll.cancel()
                self._take_in(door, saving.done)
                if time.monotonic() >= late and not saving.done():
                    self._hangs = True
                    raise StoreError(
                        f"the disk of {self._store.path} has not taken a round in {STORE_S:g} s", final=False
                    )
        more = await saved
        self._crowded = self._crowded or more
        return replies

    def _changes(self) -> Callable[[], bool] | None:
        """How to store what has changed since the last call, and to make room in the file; None where there is nothing to do. It
        returns whether there is more room to make."""
        groups, clock, brought = self._replay.drain(), self._replay.clock(), self._requests.drain()
        self._crowded = self._crowded or brought.checkpointed
        changed = groups or brought.commits or brought.rolled_back_to is not None or clock != self._stored_clock
        if not changed and not self._crowded:
            return None
        arrived = [(episode_id, t) for episode_id, branches in brought.episodes.items() for t in branches]
        change = Change.of(clock, groups, arrived, brought.commits, brought.rolled_back_to) if changed else None
        self._stored_clock = clock
        self._replay.forget()
        store, crowded, keep = self._store, self._crowded, self._keep
        self._crowded = False

        def work() -> bool:
            if change is not None:
                store.save(change)
            return crowded and store.shrink(keep, clock.over)

        return work

    def _take_in(self, door: Door, enough: Callable[[], bool] = lambda: False) -> None:
        """Carry out what came, until there is no more, or it is enough for a round."""
        while self._roomy and not enough() and (message := door.read()) is not None:
            identity, *frames = message
            self._messages += 1
            self._bytes += sum(map(len, frames))
            try:
                envelope = wire.decode(m.Envelope, frames)
            except WireError as error:
                self._dropped += 1
                if self._dropped & (self._dropped - 1) == 0:  # at 1, 2, 4, ...: a flood fills no log
                    log.warning("dropped message %d that is no request: %s", self._dropped, error)
                continue
            try:
                reply = self._requests.handle(identity, envelope)
            except (StateError, WireError) as error:
                reply = m.Refused(str(error))
            if reply is not None:
                self._replies.append((identity, envelope.number, reply))

    def _turned_away(self) -> tuple[int, int]:
        return self._dropped, self._guard.refused if self._guard else 0

    @property
    def _roomy(self) -> bool:
        return not self._stopping and self._messages < ROUND and self._bytes <= ROUND_BYTES


def _rules(config: Buffer, retries: Mapping[str, int] | None, greedy: bool) -> Rules:
    min_members = config.min_members or config.group_size
    return Rules(
        config.group_size,
        min_members,
        config.on_deadline,
        config.lease_s,
        dict(retries or {}),
        config.dynamic_sampling,
        config.filter,
        greedy,
    )


def _send(door: Door, answers: list[Answer]) -> None:
    """A ROUTER never waits: whoever does not read loses the answer, and asks again."""
    for identity, number, reply in answers:
        door.plain.send_multipart([identity, *wire.encode(m.ReplyEnvelope(number, reply))], copy=False)
