"""What a weight push says before the bytes flow: who meets where, which tensors come in which order, and how.

Invariants:
- The learner is rank 0 of every group; the ranks of a replica start at its `rank_offset`.
- Tensors travel in the order of `names`; a broadcast cuts them into buckets of at most `bucket_bytes` by a rule both ends share.
- `checksum` is over the tensors themselves and not over what travelled, so that it proves every transport, `delta` included.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class GroupPlan(msgspec.Struct, frozen=True):
    """A rendezvous for one broadcast group; `name` is unique per learner incarnation and membership."""

    name: str
    backend: Literal["gloo", "nccl"]
    host: str
    port: int
    rank_offset: int
    world_size: int
    timeout_s: float


class Broadcast(msgspec.Struct, frozen=True, tag=True):
    """The tensors come over the group that the replica joined last."""


class File(msgspec.Struct, frozen=True, tag=True):
    """The tensors lie in the safetensors file `path`: on a disk, or in memory that all processes of a host share."""

    path: str


class Delta(msgspec.Struct, frozen=True, tag=True):
    """The safetensors file `path` holds only the values that differ from version `base`, which the receiver kept."""

    path: str
    base: int


Source = Broadcast | File | Delta


class TransferPlan(msgspec.Struct, frozen=True):
    """One version's tensors: Hugging Face names, torch dtype names (`float32`), shapes; one entry per tensor.

    Attributes:
        source: where the bytes are.
        checksum: xxh3 (64 bit, hex) over the bytes of all tensors, in order.
        keep: the receiver keeps a copy in host memory, the base of the next `Delta`.
        receipts: ZeroMQ address (PULL) that every receiving rank tells its `Receipt`.
        replica: how the receiver calls itself there.
    """

    version: int
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    bucket_bytes: int
    source: Source
    checksum: str
    keep: bool
    receipts: str
    replica: str


class Receipt(msgspec.Struct, frozen=True):
    """Rank `rank` of `replica` holds all of `version` after `seconds`, or failed with `error`."""

    replica: str
    rank: int
    version: int
    seconds: float
    error: str = ""


class PushReport(msgspec.Struct, frozen=True):
    """What one publish did.

    Attributes:
        version: the version pushed.
        pushed: names of the replicas that serve it now.
        failed: replica name -> why it was left out; it catches up when it answers again.
        pause_ms: longest time a replica did not generate.
        transfer_ms: time the bytes took, inside or outside the pause; the longest of any cohort.
        push_ms: from the first cohort to the last.
        sent_bytes: bytes that left the learner, written files included.
        canary: largest difference in nats between the learner's and a replica's canary log-probs.
    """

    version: int
    pushed: tuple[str, ...]
    failed: dict[str, str]
    pause_ms: float
    transfer_ms: float
    push_ms: float
    sent_bytes: int
    canary: float
