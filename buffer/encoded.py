"""The bytes of a trajectory: as its worker encoded it, as the buffer holds and stores it, and as a row of a batch's plan.

    worker ──EncodedTrajectory──> buffer ──DeliveredTrajectory──> store: header in a row, arrays at a position beside the file
                                     └──EncodedRow: header, position──> learner ranks, which read the arrays there

Invariants:
- A header and its arrays are encoded once, by the worker, and never change.
- Decoding copies nothing: arrays are views of the bytes.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from ..common.routed_experts import ExpertLayout, layout_of
from ..errors import WireError
from ..rpc.wire import FORMAT
from .trajectory import NOWHERE, TOKEN_BYTES, BatchRow, Trajectory, TrajectoryHeader, token_bytes


class EncodedRow(msgspec.Struct, frozen=True):
    """A `BatchRow` on the wire: the header as its worker encoded it, and what the arrays add to it."""

    header: bytes
    length: int
    prompt: int
    position: int = NOWHERE
    checksum: int = 0

    def decode(self) -> BatchRow:
        """Raises WireError."""
        return BatchRow(
            *_decode_header(self.header),
            length=self.length,
            prompt=self.prompt,
            position=self.position,
            checksum=self.checksum,
        )


class EncodedTrajectory(msgspec.Struct, frozen=True):
    """A trajectory as its worker encoded it: these bytes are delivered and stored."""

    header: bytes  # the format byte of `rpc.wire`, and msgpack of a `TrajectoryHeader`
    arrays: NDArray[np.uint8]  # uint8[9 T] and more where there are experts: token ids, log-probs, loss mask, experts

    @classmethod
    def of(cls, trajectory: Trajectory) -> EncodedTrajectory:
        experts = trajectory.experts
        layout = None if experts is None else layout_of(experts)
        header = msgspec.structs.replace(TrajectoryHeader(*header_of(trajectory)), expert_layout=layout)
        arrays = [trajectory.token_ids, trajectory.behavior_logprobs, trajectory.loss_mask]
        arrays += [] if experts is None else [experts]
        joined = b"".join(np.ascontiguousarray(one).data for one in arrays)
        return cls(FORMAT + msgspec.msgpack.encode(header), np.frombuffer(joined, dtype=np.uint8))

    def decode(self) -> Trajectory:
        """Arrays are views of the bytes. Raises WireError; `Trajectory.check` is left to the caller."""
        header = _decode_header(self.header)
        each = token_bytes(header[-1])
        if len(self.arrays) % each:
            raise WireError(f"{len(self.arrays)} bytes of arrays are not {each} for each token")
        return trajectory_of(header, self.arrays)

    @property
    def row(self) -> EncodedRow:
        """Without its arrays."""
        return self.row_of(self.decode(), NOWHERE)

    def row_of(self, decoded: Trajectory, position: int) -> EncodedRow:
        """As `row`, of a trajectory that is `decoded` already and whose arrays are at `position`."""
        size = int(decoded.loss_mask.argmax())
        # 56 bits: numpy and msgpack take it as int64
        prompt = hashlib.blake2b(self.arrays[: 4 * size].data, digest_size=7)
        for image in decoded.images:
            prompt.update(image.digest.encode() if image.end <= size else b"")
        if decoded.experts is not None:  # the learner computes tokens with other experts as other tokens
            prompt.update(xxhash.xxh3_128_digest(np.ascontiguousarray(decoded.experts[:size]).data))
        number, checksum = int.from_bytes(prompt.digest(), "big"), checksum_of(self.arrays.data)
        return EncodedRow(self.header, len(decoded), number, position, checksum)


class DeliveredTrajectory(NamedTuple):
    """A trajectory as the buffer holds it: its frames, and what its rows in the file and in a batch say. `row` is made when it
    comes, while its bytes are in the processor's cache. The hundreds of objects that were decoded to check it are freed."""

    id: str
    episode_id: str
    group_id: int
    reward: float
    encoded: EncodedTrajectory
    row: EncodedRow

    @classmethod
    def of(
        cls, episode_id: str, decoded: Trajectory, encoded: EncodedTrajectory, position: int = NOWHERE
    ) -> DeliveredTrajectory:
        row = encoded.row_of(decoded, position)
        return cls(decoded.id, episode_id, decoded.group_id, decoded.reward, encoded, row)


def header_of(one: TrajectoryHeader) -> tuple[Any, ...]:
    """The values of its `TrajectoryHeader`."""
    return msgspec.structs.astuple(one)[: len(TrajectoryHeader.__struct_fields__)]


def trajectory_of(header: tuple[Any, ...], arrays: NDArray[np.uint8]) -> Trajectory:
    """Of the values of a `TrajectoryHeader` and all arrays of T tokens."""
    layout: ExpertLayout | None = header[-1]
    own = TOKEN_BYTES * (len(arrays) // token_bytes(layout))
    ids, logprobs, mask = split_arrays(arrays[:own])
    experts = None if layout is None else layout.view(arrays[own:])
    return Trajectory(*header, token_ids=ids, behavior_logprobs=logprobs, loss_mask=mask, experts=experts)


def with_arrays(row: BatchRow, arrays: NDArray[np.uint8]) -> Trajectory:
    """The trajectory that the buffer holds `arrays` of. Raises WireError where they are of another length."""
    if len(arrays) != row.nbytes:
        raise WireError(f"trajectory {row.id!r}: {len(arrays)} bytes of arrays came for {row.length} tokens")
    return trajectory_of(header_of(row), arrays)


def split_arrays(arrays: NDArray[np.uint8]) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.bool_]]:
    """Token ids, log-probs and loss mask: int32[T], float32[T], bool[T], which are views of uint8[9 T]."""
    tokens = len(arrays) // TOKEN_BYTES
    return (
        arrays[: 4 * tokens].view(np.int32),
        arrays[4 * tokens : 8 * tokens].view(np.float32),
        arrays[8 * tokens :].view(np.bool_),
    )


def checksum_of(arrays: bytes | memoryview) -> int:
    """64 bits of XXH3."""
    return xxhash.xxh3_64_intdigest(arrays)


_header_decoder = msgspec.msgpack.Decoder(TrajectoryHeader)


def _decode_header(header: bytes) -> tuple[Any, ...]:
    """The values of a `TrajectoryHeader`. Raises WireError."""
    if header[:1] != FORMAT:
        raise WireError(f"unknown format {header[:1].hex()!r} of a trajectory; this side knows {FORMAT.hex()}")
    try:
        return msgspec.structs.astuple(_header_decoder.decode(memoryview(header)[1:]))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a trajectory: {error}") from None
