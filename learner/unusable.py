"""Batches that the learner cannot train on: which error may be the data's, and which group is proven to be at fault.

    a rank's rows ──> why_unusable ──> proven: the group is set aside, and the batch taken again, without a restart
    an error of a step ──> may_be_data ──> faulty_groups proves some: they are set aside; else the step is tried once more

Invariants:
- Memory, a disk, a deadline, another rank or the buffer are never the data: such an error keeps its meaning.
- The check of rows costs a few passes in C over their arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..buffer.trajectory import LOGPROB_LIMIT, Trajectory
from ..common.routed_experts import RouterShape
from ..errors import LearnerError, SlipstreamError, describe
from .batch import Group, flatten
from .distributed import is_peer_failure


class UnusableBatch(LearnerError):
    """The learner cannot step on a batch. Not `final` where it is tried once more, or its groups were set aside."""

    final = False


def why_unusable(row: Trajectory, vocabulary: int, routers: RouterShape | None = None) -> str:
    """Why no model with so many token ids can be trained on `row`, or none whose `routers` replay its experts; empty where nothing
    is wrong."""
    smallest, largest = int(row.token_ids.min()), int(row.token_ids.max())
    if not (smallest >= 0 and largest < vocabulary):
        foreign = largest if smallest >= 0 else smallest
        return f"trajectory {row.id!r}: token id {foreign} is outside the vocabulary, 0 to {vocabulary - 1}"
    logprobs = row.behavior_logprobs
    if not (logprobs.min() > -np.inf and logprobs.max() <= LOGPROB_LIMIT):  # the minimum with a NaN is NaN
        return f"trajectory {row.id!r}: a log-prob is positive or not finite"
    if routers is not None and row.experts is not None and not routers.fits(row.experts):
        return f"trajectory {row.id!r}: its experts are none that the model's routers choose from"
    return ""


def may_be_data(error: Exception) -> bool:
    """Whether `error`, of a step, may be the fault of the batch."""
    if isinstance(error, MemoryError | OSError | torch.OutOfMemoryError) or is_peer_failure(error):
        return False
    if isinstance(error, RuntimeError) and "out of memory" in str(error).lower():
        return False
    if isinstance(error, SlipstreamError):
        return isinstance(error, LearnerError) and error.final and not isinstance(error, UnusableBatch)
    return True


def faulty_groups(groups: Sequence[Group], version: int) -> dict[int, str]:
    """Of a batch whose step failed: the groups by id that no batch can be made of, each by itself, and why."""
    found: dict[int, str] = {}
    for group in groups:
        try:
            flatten([group], version)
        except (LearnerError, ArithmeticError, LookupError, ValueError) as error:
            if group:
                found[group[0].group_id] = describe(error)
    return found
