"""The messages of a weight push: plans, the report, and the acks by which every rank of a replica reports that it holds a version,
or why not.

    staging thread: send_ack ──one-way RPC──> AckCollector, one per learner ──> ExpectedAcks of one attempt

Invariants:
- The learner is rank 0 of every group; the ranks of a replica start at its `rank_offset`.
- Tensors travel in the order of `names`; a broadcast cuts them into buckets of at most `bucket_bytes` by a rule both ends share.
- `checksum` is over the tensors themselves and not over what travelled, so that it proves every transport, `delta` included.
- An ack counts only for its attempt, rank and version. Every attempt has its own receiver name, so that a late ack of one attempt
  cannot settle the next. Where the socket is guarded, an ack counts only from a process of the replica that it names.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import zmq

from ..common.accelerator import CollectiveBackend
from ..common.replica_names import replica_of
from ..errors import StateError, WeightSyncError
from ..rpc.client import RpcNotifier
from ..rpc.security import PeerTable, split_address
from ..rpc.server import RpcRequest, RpcServer

LINGER_MS = 5000  # how long `send_ack` waits for a learner that does not take the message
MAX_BYTES, MAX_ERROR = 1 << 16, 2000  # of one ack, above which its sender is disconnected; characters of an error


class GroupPlan(msgspec.Struct, frozen=True):
    """The rendezvous of one broadcast group; `name` is unique per learner process and membership."""

    name: str
    backend: CollectiveBackend
    host: str
    port: int
    rank_offset: int
    world_size: int
    timeout_s: float


class BroadcastSource(msgspec.Struct, frozen=True, tag=True):
    """The tensors come over the group that the replica joined last."""


class FileSource(msgspec.Struct, frozen=True, tag=True):
    """The tensors lie in the safetensors file `path`: on a disk, or in memory that all processes of a host share."""

    path: str


class DeltaSource(msgspec.Struct, frozen=True, tag=True):
    """The safetensors file `path` holds only the values that differ from version `base`, which the receiver kept."""

    path: str
    base: int


Source = BroadcastSource | FileSource | DeltaSource


class TransferPlan(msgspec.Struct, frozen=True):
    """One version's tensors: Hugging Face names, torch dtype names (`float32`), shapes; one entry per tensor."""

    version: int
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    bucket_bytes: int
    source: Source
    checksum: str  # xxh3 (64 bit, hex) over the bytes of all tensors, in order
    keep: bool  # the receiver keeps a copy in host memory, the base of the next delta
    acks: str  # ZeroMQ address to which every receiving rank sends its `WeightAck`, for the attempt `receiver`
    receiver: str


class WeightAck(msgspec.Struct, frozen=True):
    """Rank `rank` of `receiver` (`TransferPlan.receiver`) holds all of `version`, or failed with `error`."""

    receiver: str
    rank: int
    version: int
    error: str = ""


class PushReport(msgspec.Struct, frozen=True):
    """What one publish did."""

    version: int
    pushed: tuple[str, ...]  # names of the replicas that serve `version` now
    failed: dict[str, str]  # replica name -> why it does not serve the version; `catch_up` retries it
    pause_ms: float = 0.0  # longest time a replica did not generate
    transfer_ms: float = 0.0  # longest transfer to a cohort
    push_ms: float = 0.0  # from the first cohort to the last
    sent_bytes: int = 0  # bytes that left the learner, written files included
    canary: float = 0.0  # largest difference in nats between the learner's and a replica's canary log-probs
    asleep_s: float = 0.0  # how long replicas slept before it, the push that woke them included


def send_ack(address: str, ack: WeightAck) -> None:
    """Send an ack to the learner at `address`, from any thread; blocks for at most `LINGER_MS`. Raises WeightSyncError: the address
    is invalid, or has a key and this process has none."""
    try:
        with RpcNotifier(address, linger_ms=LINGER_MS) as learner:
            learner.notify(msgspec.structs.replace(ack, error=ack.error[:MAX_ERROR]))
    except (zmq.ZMQError, StateError) as error:
        raise WeightSyncError(f"no ack can be sent to {address!r}: {error}") from error


class ExpectedAcks:
    """What one attempt at one replica, called `receiver` in its acks, waits for: an ack of each of the replica's ranks."""

    def __init__(self, receiver: str, version: int, ranks: int) -> None:
        self.receiver = receiver
        self.version = version
        self._missing = set(range(ranks))
        self._all: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def complete(self) -> None:
        """Return when all are in. Raises WeightSyncError with the error of a rank. Has no deadline."""
        await asyncio.shield(self._all)

    def add(self, ack: WeightAck) -> None:
        if ack.version != self.version or ack.rank not in self._missing or self._all.done():
            return
        if ack.error:
            self._all.set_exception(WeightSyncError(f"rank {ack.rank}: {ack.error}"))
            self._all.exception()  # retrieved: an attempt that ended for another reason never asks
            return
        self._missing.discard(ack.rank)
        if not self._missing:
            self._all.set_result(None)

    def __str__(self) -> str:
        ranks = ", ".join(map(str, sorted(self._missing)))
        return f"{self.receiver} to hold version {self.version} (no ack of rank {ranks})"


class AckCollector:
    """The learner's end: an RPC server on a free port of `host`, for the engines of `peers`; None for a plain socket. Make it
    within the running loop that will wait."""

    def __init__(self, host: str, peers: PeerTable | None = None) -> None:
        self._server: RpcServer[WeightAck] = RpcServer(
            f"tcp://{socket.gethostbyname(host)}:*",
            "weight acks",
            WeightAck,
            frame_limit=MAX_BYTES,
            peers=peers,
            rights={WeightAck: ("engine",)},
        )
        endpoint, key = split_address(self._server.address)
        self.address = f"tcp://{host}:{endpoint.rpartition(':')[2]}" + ("" if key is None else f"#{key}")
        """What receivers connect to: `TransferPlan.acks`."""
        self._expected: dict[str, ExpectedAcks] = {}
        # A random start: acks to an earlier learner may still arrive.
        self._attempts = itertools.count(secrets.randbelow(1_000_000))
        self._reader: asyncio.Task[None] | None = None

    @contextmanager
    def expect(self, replica: str, version: int, ranks: int) -> Iterator[ExpectedAcks]:
        """Acks of `ranks` ranks of `replica` count within the block. Enter it before the replica starts to receive."""
        if self._reader is None:
            self._reader = asyncio.create_task(self._server.serve(self._add, "the next ack"), name="weight acks")
        expected = ExpectedAcks(f"{replica}#{next(self._attempts)}", version, ranks)
        self._expected[expected.receiver] = expected
        try:
            yield expected
        finally:
            del self._expected[expected.receiver]

    def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
        self._server.close()

    async def _add(self, request: RpcRequest[WeightAck]) -> None:
        ack = request.message
        if request.sender is not None and replica_of(request.sender) != ack.receiver.partition("#")[0]:
            return
        if (expected := self._expected.get(ack.receiver)) is not None:
            expected.add(ack)
