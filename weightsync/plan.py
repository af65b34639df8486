"""What a weight push calls on a replica, and its messages: plans, the report, and the acks by which every rank of a replica reports
that it holds a version, or why not.

    staging thread: send_ack ──one-way RPC──> AckCollector, one per learner ──> ExpectedAcks of one attempt

Invariants:
- Weights are replaced only while paused, so that a span boundary is exact.
- A server sleeps without a copy of its weights: from `sleep` to the `resume` after the next swap. Each of these calls may be
  repeated, so that a learner that knows nothing of a server's state wakes it.
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
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import msgspec
import zmq

from ..common.accelerator import CollectiveBackend
from ..common.replica_names import replica_of
from ..configs.schema import Partial
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


class ReplicaControl(Protocol):
    """What a push calls on an inference server; every `HttpEngine` is one. Methods raise EngineError, or DeadlineExceeded when the
    server does not answer."""

    name: str
    ranks: int  # processes that each hold a shard of its weights, and join a broadcast group
    # Whether it computes scores while paused (our own server does, vLLM and SGLang do not). Then no request samples from weights
    # before the canary verified them; else requests under way do so right after the resume.
    scores_paused: bool
    sleeps: bool  # whether it was started for `sleep`

    @abstractmethod
    async def pause(self, mode: Partial) -> None:
        """Stop stepping. `recompute`: requests stay, their KV and every cached prefix is dropped and recomputed with the next
        weights. `keep_kv`: requests and KV stay. `abort_resume`: requests end at once with the tokens they have."""

    @abstractmethod
    async def resume(self) -> None:
        """Step again, with memory for keys and values; no effect on a server that is neither paused nor asleep."""

    @abstractmethod
    async def sleep(self) -> None:
        """Pause as `rollout.partial` says, and free the memory of weights, keys and values, of which no copy is kept. No effect on
        a server that sleeps; only of one that `sleeps`."""

    @abstractmethod
    async def wake(self) -> None:
        """Allocate the memory of the weights; `swap_weights` loads them, and `resume` ends the sleep. A server that is not asleep
        may step again: `pause` it after this call. Only of one that `sleeps`."""

    @abstractmethod
    async def join_group(self, plan: GroupPlan) -> None:
        """Join a broadcast group with the learner, leaving any other. Blocks until the group is complete."""

    @abstractmethod
    async def receive_weights(self, plan: TransferPlan) -> None:
        """Begin to stage one version's tensors; the old weights keep serving. Each rank sends an ack to `plan.acks` when it holds
        all of them and they match `plan.checksum`, or why not."""

    @abstractmethod
    async def swap_weights(self, version: int) -> None:
        """Load the staged tensors and serve them as `version`. Call while paused."""

    @abstractmethod
    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs in nats of `token_ids[1:]`, each given the tokens before it, at temperature 1. Used for the canary."""

    @abstractmethod
    async def version(self) -> int | None:
        """The version pushed last; None where no push brought the weights and they have no version."""


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

    def missing(self) -> str:
        """Which ranks have not answered, for the error of a wait whose deadline has passed."""
        if not self._missing:
            return "all ranks have answered, its server has not; see its log"
        return f"no ack of rank {', '.join(map(str, sorted(self._missing)))}; see its log"


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
