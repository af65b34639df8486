"""Receipts: how the learner learns, without asking, that every rank of a replica holds a version, or why not.

    receiver's thread: send_receipt ──PUSH──> Receipts (PULL, one per learner) ──> the one future that expects it

Invariants:
- A receipt counts only for who expects it: the same receiver, rank and version. Late, doubled, foreign and broken messages change
  nothing.
- Every attempt has a receiver name of its own, so that a late receipt of one attempt cannot settle the next.
- Sending never keeps a receiver: a learner that is gone costs it at most `LINGER_MS`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import zmq
import zmq.asyncio

from ..curve import Guard, join
from ..errors import WeightSyncError
from ..keepalive import keep_alive
from .plan import Receipt

logger = logging.getLogger(__name__)

LINGER_MS = 5000
"""How long an unsent receipt outlives its sender's call; a learner that does not take it by then is gone or stuck."""

MAX_BYTES = 1 << 16
"""Of one receipt; a foreign peer that sends more is cut off."""

MAX_ERROR = 2000
"""Characters of an error that travel."""


def send_receipt(address: str, receipt: Receipt) -> None:
    """Tell the learner at `address`, from any thread; blocks for at most `LINGER_MS`.

    Raises:
        WeightSyncError: the address is none.
    """
    receipt = msgspec.structs.replace(receipt, error=receipt.error[:MAX_ERROR])
    context = zmq.Context()  # its own: an engine's sockets and this one must not share a fate
    try:
        with context.socket(zmq.PUSH) as push:
            push.setsockopt(zmq.LINGER, LINGER_MS)
            join(push)
            push.connect(address)
            push.send(msgspec.msgpack.encode(receipt), zmq.NOBLOCK)
    except zmq.ZMQError as error:
        raise WeightSyncError(f"no receipt can be sent to {address!r}: {error}") from error
    finally:
        context.term()  # waits for the lingering message


class Expectation:
    """What one attempt to reach one replica waits for: a receipt of each of its ranks.

    Attributes:
        receiver: the name under which the replica must answer (`TransferPlan.replica`).
    """

    def __init__(self, receiver: str, version: int, ranks: int) -> None:
        self.receiver = receiver
        self.version = version
        self._missing = set(range(ranks))
        self._seconds = 0.0
        self._all: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    async def complete(self) -> float:
        """Seconds that the slowest rank took. Raises WeightSyncError with what a rank said went wrong. Has no deadline itself."""
        return await asyncio.shield(self._all)

    def take(self, receipt: Receipt) -> None:
        """Count a receipt, if it is one of those expected."""
        if receipt.version != self.version or receipt.rank not in self._missing or self._all.done():
            return
        if receipt.error:
            self._all.set_exception(WeightSyncError(f"rank {receipt.rank}: {receipt.error}"))
            self._all.exception()  # seen: an attempt that ended for another reason never asks
            return
        self._missing.discard(receipt.rank)
        self._seconds = max(self._seconds, receipt.seconds)
        if not self._missing:
            self._all.set_result(self._seconds)

    def __str__(self) -> str:
        ranks = ", ".join(map(str, sorted(self._missing)))
        return f"{self.receiver} to hold version {self.version} (no receipt of rank {ranks})"


class Receipts:
    """The learner's end: one socket on a free port of `host`. Make it within the running loop that will wait."""

    def __init__(self, host: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
        keep_alive(self._socket)
        self._guard = Guard(self._context)
        self._guard.protect(self._socket)
        port = self._socket.bind_to_random_port(f"tcp://{socket.gethostbyname(host)}")
        self.address = f"tcp://{host}:{port}"
        """What receivers connect to: `TransferPlan.receipts`."""
        self._expected: dict[str, Expectation] = {}
        self._attempts = itertools.count(
            secrets.randbelow(1_000_000)
        )  # an earlier learner's receipts may still be on their way
        self._reader: asyncio.Task[None] | None = None

    @contextmanager
    def expect(self, replica: str, version: int, ranks: int) -> Iterator[Expectation]:
        """Receipts of `ranks` ranks of `replica` count from here to the end of the block. Enter before you tell it to receive."""
        if self._reader is None:
            self._reader = asyncio.create_task(self._read(), name="receipts")
        expectation = Expectation(f"{replica}#{next(self._attempts)}", version, ranks)
        self._expected[expectation.receiver] = expectation
        try:
            yield expectation
        finally:
            del self._expected[expectation.receiver]

    def close(self) -> None:
        """Stop listening."""
        if self._reader is not None:
            self._reader.cancel()
        self._guard.close()
        self._context.destroy(linger=0)

    async def _read(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                receipt = msgspec.msgpack.decode(frames[0], type=Receipt)
            except msgspec.MsgspecError:
                logger.warning("%d bytes at %s are no receipt; ignored", sum(map(len, frames)), self.address)
                continue
            expectation = self._expected.get(receipt.replica)
            if expectation is not None:
                expectation.take(receipt)
