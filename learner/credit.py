"""Who earned what: from task groups to the advantage of every turn.

    groups ──one entry per member──> Episodes ──estimator──> advantage per turn ──> by trajectory

Invariants:
- A member's reward counts once, however many branches it has; its turns are those of its branches, one branch after the other.
- A failed episode is here only where the worker was told to train on it. Its reward is the penalty that its environment declared,
  earned after its last turn, and nothing of what it was given before.
- No reward that is not a finite number reaches an estimator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..buffer.trajectory import Trajectory
from ..errors import LearnerError
from .algorithms.episodes import Advantage, Episodes

Group = tuple[Trajectory, ...]
"""All branches of all members of one task group."""


def credit(groups: Sequence[Group], advantage: Advantage) -> dict[str, NDArray[np.float64]]:
    """Trajectory id -> float64[K], the advantage of each of its K turns; every branch of `groups` is there.

    Raises:
        LearnerError: a group is empty, a reward or an advantage is not finite, a failed episode carries what it earned before it
            failed, the branches of one disagree about its reward, or the estimator cannot work with an episode.
    """
    if not groups:
        return {}
    members = [_members(number, group) for number, group in enumerate(groups)]
    branches = [branch for group in members for member in group for branch in member]
    advantages = advantage(_episodes(members))
    if not np.isfinite(advantages).all():
        raise LearnerError(
            "advantages are not finite: rewards of this batch are too large to be compared; scale them down"
        )
    ends = np.cumsum([len(branch.turns) for branch in branches])
    return {branch.id: part for branch, part in zip(branches, np.split(advantages, ends[:-1]), strict=True)}


def _members(number: int, group: Group) -> list[list[Trajectory]]:
    """The members of a group, each as its branches in the order in which they were opened."""
    if not group:
        raise LearnerError(f"group number {number} of the batch is empty: there is nothing to compare and to train on")
    members: dict[int, list[Trajectory]] = {}
    for trajectory in group:
        if not all(map(math.isfinite, (trajectory.reward, *trajectory.turn_rewards))):
            raise LearnerError(
                f"trajectory {trajectory.id!r}: its reward {trajectory.reward}, or one of its turns', is not finite"
            )
        if not trajectory.outcome.trainable and trajectory.turn_rewards:
            raise LearnerError(
                f"trajectory {trajectory.id!r} failed and carries rewards; a failure is trained with its penalty or not at all"
            )
        member = members.setdefault(trajectory.member, [])
        if member and member[0].reward != trajectory.reward:
            raise LearnerError(
                f"trajectory {trajectory.id!r}: its reward differs from that of the episode's other branches"
            )
        member.append(trajectory)
    return [sorted(member, key=lambda t: t.branch) for member in members.values()]


def _episodes(groups: Sequence[Sequence[Sequence[Trajectory]]]) -> Episodes:
    """What an estimator sees of the members of `groups`."""
    members = [member for group in groups for member in group]
    turns = [sum(len(branch.turns) for branch in member) for member in members]
    return Episodes(
        ids=tuple(member[0].episode for member in members),
        groups=np.repeat(np.arange(len(groups)), [len(group) for group in groups]),
        rewards=np.array([member[0].reward for member in members], dtype=np.float64),
        lengths=np.array([sum(branch.sampled for branch in member) for member in members], dtype=np.int64),
        turns=np.array(turns, dtype=np.int64),
        turn_rewards=tuple(_turn_rewards(member[0], count) for member, count in zip(members, turns, strict=True)),
    )


def _turn_rewards(trajectory: Trajectory, turns: int) -> NDArray[np.float64]:
    """What was earned after each step of an episode of so many completions."""
    if trajectory.outcome.trainable:
        return np.array(trajectory.turn_rewards, dtype=np.float64)
    rewards = np.zeros(turns, dtype=np.float64)
    rewards[turns - 1 :] = trajectory.reward
    return rewards
