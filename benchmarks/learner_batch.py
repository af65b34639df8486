"""The batch that every contender of `bench learner` steps on, and what a contender is told.

Invariants:
- All contenders get the same tokens, prompts, rewards and model; only how they compute a step differs.
- Lengths are the same in every run: the i-th of n sequences has `longest` x ((i + 1/2) / n) ** (1 / fill - 1) tokens, so that a
  batch padded to its longest is filled to `fill`, whatever n.
- Nothing heavier than numpy is imported: TRL's process, in an environment of its own, reads this too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from ..buffer.trajectory import FINISHED, Trajectory, Turn, VersionSpan

PROMPT = 16
"""Tokens of every prompt. Short and equal, so that padding is what answers cause, and prompts cost all contenders the same."""

BEHAVIOR_LOGPROB = -5.0
"""About what random weights over a few hundred tokens give: importance weights near 1."""

LR = 1e-6
"""So small that steps on one batch, over and over, stay the step that they are."""


class Shape(msgspec.Struct, frozen=True):
    """`groups` of `group_size` sequences, the longest of `longest` tokens; padded, a batch is filled to `fill`."""

    groups: int = 8
    group_size: int = 8
    longest: int = 512
    fill: float = 0.3


class Sampled(msgspec.Struct, frozen=True):
    """One episode: the first `prompt` of `token_ids` are its prompt, the others its answer."""

    group: int
    token_ids: list[int]
    reward: float
    prompt: int = PROMPT


class Job(msgspec.Struct, frozen=True):
    """What a contender's process needs to know.

    Attributes:
        contender: a key of `learner_steps.CONTENDERS`, or `trl`.
        model: folder of the policy.
        batch: in the order of its groups.
        budget: tokens of one forward pass, padding included.
        dtype: what is computed in.
    """

    contender: str
    model: str
    batch: tuple[Sampled, ...]
    budget: int
    dtype: Literal["float32", "bfloat16"] = "float32"


class MemoryUse(msgspec.Struct, frozen=True):
    """Bytes that one process holds: before its first step, with the model and the batch there, and at most. Resident ones, with an
    accelerator those of its memory."""

    before: int
    peak: int


def make_batch(shape: Shape, vocabulary: int, seed: int = 0) -> tuple[Sampled, ...]:
    """Random tokens, members of a group with the same prompt, rewards 0 and 1 by turns."""
    generator = np.random.default_rng(seed)
    count = shape.groups * shape.group_size
    quantiles = (generator.permutation(count) + 0.5) / count
    lengths = np.maximum(PROMPT + 1, np.rint(shape.longest * quantiles ** (1 / shape.fill - 1))).astype(int)
    lengths[lengths.argmax()] = shape.longest
    prompts = generator.integers(0, vocabulary, (shape.groups, PROMPT))
    return tuple(
        Sampled(
            group=index // shape.group_size,
            token_ids=[
                *prompts[index // shape.group_size].tolist(),
                *generator.integers(0, vocabulary, length - PROMPT).tolist(),
            ],
            reward=float(index % 2),
        )
        for index, length in enumerate(lengths.tolist())
    )


def make_long_prompt(vocabulary: int, prompt: int, answers: int, tokens: int) -> tuple[Sampled, ...]:
    """One group: a random prompt of so many tokens, and so many random answers, each of so many."""
    generator = np.random.default_rng(0)
    shown = generator.integers(0, vocabulary, prompt).tolist()
    said = generator.integers(0, vocabulary, (answers, tokens)).tolist()
    return tuple(Sampled(0, [*shown, *answer], float(index % 2), prompt) for index, answer in enumerate(said))


def tokens_of(batch: Sequence[Sampled]) -> int:
    """Useful tokens: those of the sequences, no padding."""
    return sum(len(one.token_ids) for one in batch)


def fill_of(batch: Sequence[Sampled]) -> float:
    """Share of useful tokens in the batch padded to its longest sequence."""
    return tokens_of(batch) / (len(batch) * max(len(one.token_ids) for one in batch))


def to_groups(batch: Sequence[Sampled]) -> list[tuple[Trajectory, ...]]:
    """As the buffer hands them to the learner: sampled by version 0."""
    groups: dict[int, list[Trajectory]] = {}
    for one in batch:
        members = groups.setdefault(one.group, [])
        members.append(_trajectory(one, len(members)))
    return [tuple(members) for members in groups.values()]


def _trajectory(one: Sampled, member: int) -> Trajectory:
    length = len(one.token_ids)
    mask = np.arange(length) >= one.prompt
    return Trajectory(
        id=f"{one.group}.0.{member}.0",
        group_id=one.group,
        member=member,
        branch=0,
        task_id=f"task-{one.group}",
        env="bench",
        token_ids=np.array(one.token_ids, dtype=np.int32),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, np.float32(BEHAVIOR_LOGPROB), np.float32(0)),
        version_spans=(VersionSpan(one.prompt, length, 0),),
        turns=(Turn(one.prompt, length, "stop"),),
        reward=one.reward,
        turn_rewards=(one.reward,),
        outcome=FINISHED,
    )
