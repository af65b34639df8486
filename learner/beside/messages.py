"""What the learner asks of each rank of a placed model, and what that answers, in the buffer's wire format.

Invariants:
- Requests of one learner are carried out in the order in which they were sent; only that a checkpoint is whole is said later.
- A rank that cannot do what it is asked to says nothing: it ends, and its error is its last word.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..batch import TrainSequence, joined, supervised
from ..checkpoint import CheckpointState
from ..meter import CompanionsDone


class Sequences(msgspec.Struct, frozen=True):
    """Sequences one behind the other, N tokens in all.

    Attributes:
        lengths: of each sequence.
        token_ids, trained, reference_logprobs, returns: those of `TrainSequence`, of [N].
        earned: whether its episode's reward is above 0, of each sequence.
    """

    lengths: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    trained: NDArray[np.bool_]
    earned: NDArray[np.bool_]
    reference_logprobs: NDArray[np.float32] | None = None
    returns: NDArray[np.float32] | None = None


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all requests and answers."""


class Score(Message, frozen=True):
    """What do you say of your part? Answered by `Part`."""

    sequences: Sequences


class Learn(Message, frozen=True):
    """Take one step on each of `parts`. Answered by `Learnt`."""

    parts: tuple[Sequences, ...]


class Save(Message, frozen=True):
    """Write a checkpoint into `directory`. Answered by `Done` when it is whole."""

    directory: str
    state: CheckpointState


class Load(Message, frozen=True):
    """Resume from `directory`. Answered by `Done`."""

    directory: str


class Part(Message, frozen=True):
    """What `score_part` gave for data rank `rank`. Several ranks may share one, and say the same."""

    rank: int
    said: NDArray[np.float32]


class Learnt(Message, frozen=True):
    """How the steps went; the same from every rank."""

    done: CompanionsDone


class Done(Message, frozen=True):
    """It is done."""


Request = Score | Learn | Save | Load
Reply = Part | Learnt | Done


class Asked(msgspec.Struct, frozen=True):
    """A request; its answer has the same number."""

    number: int
    request: Request


class Answered(msgspec.Struct, frozen=True):
    """The answer to the request of that number."""

    number: int
    message: Reply


def pack(sequences: Sequence[TrainSequence]) -> Sequences:
    """`sequences`, as far as models beside the policy care."""
    return Sequences(
        lengths=np.array([len(s.token_ids) for s in sequences], dtype=np.int32),
        token_ids=np.concatenate([s.token_ids for s in sequences]),
        trained=np.concatenate([s.trained for s in sequences]),
        earned=np.array([s.earned for s in sequences], dtype=np.bool_),
        reference_logprobs=joined([s.reference_logprobs for s in sequences]),
        returns=joined([s.returns for s in sequences]),
    )


def unpack(packed: Sequences) -> list[TrainSequence]:
    """What was packed; what nobody beside the policy cares for is as in `supervised`."""
    cuts, count = np.cumsum(packed.lengths)[:-1], len(packed.lengths)
    token_ids, trained = np.split(packed.token_ids, cuts), np.split(packed.trained, cuts)
    reference, returns = (
        [None] * count if array is None else np.split(array, cuts)
        for array in (packed.reference_logprobs, packed.returns)
    )
    return [
        msgspec.structs.replace(
            supervised(token_ids[i], trained[i]),
            earned=bool(packed.earned[i]),
            reference_logprobs=reference[i],
            returns=returns[i],
        )
        for i in range(count)
    ]
