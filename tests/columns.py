"""Batches as tests write them: credit by trajectory id, and sequences one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from slipstream.buffer.ledger import Withheld
from slipstream.configs.algorithm import Algorithm
from slipstream.learner.algorithms import advantage_of, returns_of
from slipstream.learner.algorithms.estimators import assign_advantages
from slipstream.learner.batch import (
    ALL_TRAINED,
    Group,
    Shaping,
    TrainBatch,
    concatenate,
    flatten,
    make_batch,
    trainable,
)

ById = dict[str, NDArray[Any]]


class Columns(msgspec.Struct):
    """Columns of aux models, each by trajectory id, one number for each token."""

    reference_logprobs: ById | None = None
    penalties: ById | None = None
    values: ById | None = None


class Credit(msgspec.Struct):
    """By trajectory id, one number for each token; NaN where the estimator does not judge."""

    advantages: ById
    returns: ById | None


def by_id(batch: TrainBatch, column: NDArray[Any] | None) -> ById | None:
    """`column`, by token, as one array for each trajectory."""
    return None if column is None else dict(zip(batch.ids, np.split(column, batch.offsets[1:-1]), strict=True))


def flat(
    groups: Sequence[Group],
    version: int = 5,
    withheld: Mapping[str, Withheld] = ALL_TRAINED,
    columns: Columns | None = None,
    shape: Shaping | None = None,
) -> TrainBatch:
    """`groups` without advantages, with the columns of aux models."""
    batch = flatten(groups, version, withheld=withheld, shape=shape)
    given = {k: v for k, v in msgspec.structs.asdict(columns or Columns()).items() if v is not None}
    return msgspec.structs.replace(
        batch, **{name: concatenate([by[i] for i in batch.ids], np.float32) for name, by in given.items()}
    )


def credit(
    groups: Sequence[Group],
    algorithm: Algorithm,
    columns: Columns | None = None,
    shape: Shaping | None = None,
    withheld: Mapping[str, Withheld] = ALL_TRAINED,
) -> Credit:
    """Advantages and returns of every token of `groups`."""
    batch = flat(groups, 5, withheld, columns, shape)
    found = assign_advantages(batch, advantage_of(algorithm), returns_of(algorithm))
    advantages = by_id(found, found.advantages)
    assert advantages is not None
    return Credit(advantages, by_id(found, found.returns))


def to_train_batch(
    groups: Sequence[Group],
    algorithm: Algorithm,
    version: int,
    oldest_version: int,
    withheld: Mapping[str, Withheld] = ALL_TRAINED,
    *,
    scores: Columns | None = None,
    shape: Shaping | None = None,
) -> TrainBatch:
    """The sequences of `groups` that carry loss, with their advantages."""
    batch = flat(groups, version, withheld, scores, shape)
    return trainable(assign_advantages(batch, advantage_of(algorithm), returns_of(algorithm)), version - oldest_version)


def sequence(token_ids: NDArray[np.int32], loss_mask: NDArray[np.bool_], **columns: Any) -> TrainBatch:
    """One sequence."""
    return make_batch(token_ids, loss_mask, np.array([len(token_ids)]), **columns)


def joined(sequences: Sequence[TrainBatch]) -> TrainBatch:
    """The columns by token, and which sequences are positive, of sequences side by side."""
    names = ("behavior_logprobs", "staleness", "mixed", "advantages")
    token_ids = concatenate([s.token_ids for s in sequences], np.int32)
    loss_mask = concatenate([s.loss_mask for s in sequences], np.bool_)
    more = {name: np.concatenate([getattr(s, name) for s in sequences]) for name in (*names, "positive") if sequences}
    return make_batch(token_ids, loss_mask, np.array([len(s.token_ids) for s in sequences], dtype=np.int64), **more)


def episodes_only(turn_rewards: Sequence[Sequence[float]], groups: NDArray[np.int64], **columns: Any) -> TrainBatch:
    """A batch of episodes with these rewards of their turns, of one sampled token each."""
    turns = np.array([len(rewards) for rewards in turn_rewards])
    tokens, count = int(turns.sum()), len(turns)
    given = {
        "turn": np.arange(tokens, dtype=np.int32),
        "episode_ids": tuple(map(str, range(count))),
        "groups": groups,
        "rewards": np.array([sum(rewards) for rewards in turn_rewards]),
        "lengths": turns,
        "turns": turns,
        "steps": turns,
        "step_rewards": concatenate(turn_rewards, np.float64),
        "greedy": np.zeros(count, dtype=np.bool_),
    }
    return make_batch(np.zeros(tokens, dtype=np.int32), np.ones(tokens, dtype=np.bool_), turns, **{**given, **columns})
