"""What a weight push says before the bytes flow: who meets where, and which tensors come in which order.

Invariants:
- The learner is rank 0 of every group; the ranks of replica i start at its `rank_offset`.
- Tensors travel in the order of `names`, cut into buckets of at most `bucket_bytes` by a rule both ends share.
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


class TransferPlan(msgspec.Struct, frozen=True):
    """One version's tensors: Hugging Face names, torch dtype names (`float32`), shapes; one entry per tensor."""

    version: int
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    bucket_bytes: int


class PushReport(msgspec.Struct, frozen=True):
    """What one publish did.

    Attributes:
        version: the version pushed.
        pushed: names of the replicas that serve it now.
        failed: replica name -> why it was left out; it catches up when it answers again.
        pause_ms: longest time a replica did not generate.
        transfer_ms: time the bytes took, inside or outside the pause.
        canary: largest difference in nats between the learner's and a replica's canary log-probs.
    """

    version: int
    pushed: tuple[str, ...]
    failed: dict[str, str]
    pause_ms: float
    transfer_ms: float
    canary: float
