"""The canary: a fixed prompt whose log-probs show that a replica computes what the learner computes.

Checksums prove that the bytes arrived; the canary proves that they were loaded: it finds a stale packed copy, a wrong name, a layer
that the loader skipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import torch

from ..errors import StateError, WeightSyncError
from .replica import Member


class Canary(msgspec.Struct, frozen=True):
    """A fixed prompt of T tokens, and the T - 1 log-probs in nats that the learner computes for it at temperature 1."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def make_canary(token_ids: Sequence[int], logprobs: Sequence[float]) -> Canary:
    """Raises StateError when the two do not belong together, WeightSyncError when the learner's weights compute nothing."""
    if len(logprobs) != len(token_ids) - 1:
        raise StateError(f"{len(logprobs)} canary log-probs for {len(token_ids)} tokens; one fewer is needed")
    if not all(map(math.isfinite, logprobs)):
        raise WeightSyncError(
            "the learner's own log-probs of the canary are not finite, so its weights are not pushed; lower "
            "learner.optimizer.lr and resume from the checkpoint before"
        )
    return Canary(tuple(token_ids), tuple(logprobs))


async def difference(member: Member, canary: Canary) -> float:
    """Largest difference in nats between the replica's log-probs and the learner's; infinite where either is not a number.

    Raises:
        EngineError, DeadlineExceeded: it did not answer.
    """
    theirs = torch.tensor(await member.ask(member.replica.score(canary.token_ids)), dtype=torch.float64)
    ours = torch.tensor(canary.logprobs, dtype=torch.float64)
    if theirs.shape != ours.shape:
        return float("inf")
    return float(torch.nan_to_num((theirs - ours).abs(), nan=float("inf")).max())
