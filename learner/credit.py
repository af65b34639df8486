"""Who earned what: from task groups to the advantage of every turn.

    groups ──one entry per member, shaped──> Episodes ──estimator──> advantage per turn ──> by trajectory

Invariants:
- A member's reward counts once, however many branches it has; its turns are those of its branches, one branch after the other.
- A failed episode is here only where the worker was told to train on it. Its reward is the penalty that its environment declared,
  earned after its last turn, and nothing of what it was given before.
- Shaping (`algorithms/overlong.py`) adds to what an episode earned, after its last turn. It is the estimator's to see alone:
  statistics, and the buffer's dynamic sampling, have the environment's own reward. Failures are judged by their penalty only.
- No reward that is not a finite number reaches an estimator, and none that it cannot compute with passes it in silence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..buffer.trajectory import Trajectory
from ..errors import LearnerError
from .algorithms.episodes import Advantage, Episodes
from .algorithms.overlong import Shaping, shaping

Group = tuple[Trajectory, ...]
"""All branches of all members of one task group."""

UNSHAPED = shaping(0, 1)


def credit(groups: Sequence[Group], advantage: Advantage, shape: Shaping = UNSHAPED) -> dict[str, NDArray[np.float64]]:
    """Trajectory id -> float64[K], the advantage of each of its K turns; every branch of `groups` is there.

    Args:
        shape: from the lengths of episodes, in tokens of the longest branch, to what is added to their rewards.

    Raises:
        LearnerError: a group is empty, a reward or an advantage is not finite, or too large to compute with, a failed episode
            carries what it earned before it failed, the branches of one disagree about its reward, or the estimator cannot work
            with an episode.
    """
    if not groups:
        return {}
    members = [_members(number, group) for number, group in enumerate(groups)]
    branches = [branch for group in members for member in group for branch in member]
    advantages = _finite(advantage, _episodes(members, shape))
    if advantages is None:
        largest = max((member[0] for group in members for member in group), key=lambda t: abs(t.reward))
        raise LearnerError(
            f"advantages are not finite: rewards of this batch are too large to be compared, the largest is {largest.reward:g} of "
            f"episode {largest.episode!r}; scale them down"
        )
    ends = np.cumsum([len(branch.turns) for branch in branches])
    return {branch.id: part for branch, part in zip(branches, np.split(advantages, ends[:-1]), strict=True)}


def _finite(advantage: Advantage, episodes: Episodes) -> NDArray[np.float64] | None:
    """What an estimator makes of `episodes`; None where that, as the float32 that it is trained with, is not finite."""
    try:
        with np.errstate(over="raise", invalid="ignore"):  # a variance that overflows would make every advantage 0
            advantages = advantage(episodes)
            return advantages if np.isfinite(advantages.astype(np.float32)).all() else None
    except FloatingPointError:
        return None


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


def _episodes(groups: Sequence[Sequence[Sequence[Trajectory]]], shape: Shaping) -> Episodes:
    """What an estimator sees of the members of `groups`."""
    members = [member for group in groups for member in group]
    turns = [sum(len(branch.turns) for branch in member) for member in members]
    judged = np.array([member[0].outcome.trainable for member in members])
    extra = np.where(judged, shape(np.array([max(map(len, member)) for member in members], dtype=np.int64)), 0.0)
    return Episodes(
        ids=tuple(member[0].episode for member in members),
        groups=np.repeat(np.arange(len(groups)), [len(group) for group in groups]),
        rewards=np.array([member[0].reward for member in members], dtype=np.float64) + extra,
        lengths=np.array([sum(branch.sampled for branch in member) for member in members], dtype=np.int64),
        turns=np.array(turns, dtype=np.int64),
        turn_rewards=tuple(
            _turn_rewards(member[0], count, last) for member, count, last in zip(members, turns, extra, strict=True)
        ),
    )


def _turn_rewards(trajectory: Trajectory, turns: int, extra: float) -> NDArray[np.float64]:
    """What was earned after each step of an episode of so many completions, `extra` after the last."""
    if trajectory.outcome.trainable:
        rewards = np.array(trajectory.turn_rewards, dtype=np.float64)
        rewards[len(rewards) - 1 :] += extra
        return rewards
    rewards = np.zeros(turns, dtype=np.float64)
    rewards[turns - 1 :] = trajectory.reward
    return rewards
