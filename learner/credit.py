"""Who earned what: from task groups to the advantage of every token.

    groups ──one entry per member──> Episodes ──estimator──> advantage per turn ──> of its tokens, by trajectory

Invariants:
- A member's reward counts once, however many branches it has; its turns are those of its branches, one branch after the other.
- A failed episode is here only where the worker was told to train on it. Its reward is the penalty that its environment declared,
  earned after its last turn, and nothing of what it was given before.
- Penalties, such as the divergence from a reference policy, come off the rewards that an estimator sees: those of a turn off its
  own, those of all branches off the episode's.
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
from .scores import Scored

Group = tuple[Trajectory, ...]
"""All branches of all members of one task group."""


def credit(
    groups: Sequence[Group], advantage: Advantage, penalties: Scored | None = None
) -> dict[str, NDArray[np.float64]]:
    """Trajectory id -> float64[T], the advantage of each of its tokens, NaN outside its turns; every branch of `groups` is there.

    Args:
        penalties: by trajectory id, float32[T], what is taken off the reward of each sampled token.

    Raises:
        LearnerError: a group is empty, a reward or an advantage is not finite, a failed episode carries what it earned before it
            failed, the branches of one disagree about its reward, or the estimator cannot work with an episode.
    """
    if not groups:
        return {}
    members = [_members(number, group) for number, group in enumerate(groups)]
    branches = [branch for group in members for member in group for branch in member]
    advantages = advantage(_episodes(members, penalties))
    if not np.isfinite(advantages).all():
        raise LearnerError(
            "advantages are not finite: rewards of this batch are too large to be compared; scale them down"
        )
    ends = np.cumsum([len(branch.turns) for branch in branches])
    by_turn = np.split(advantages, ends[:-1])
    return {branch.id: _by_token(branch, part) for branch, part in zip(branches, by_turn, strict=True)}


def _by_token(branch: Trajectory, advantages: NDArray[np.float64]) -> NDArray[np.float64]:
    """float64[K] -> float64[T]: every token of a turn has what the turn has."""
    by_token = np.full(len(branch), np.nan)
    for turn, value in zip(branch.turns, advantages.tolist(), strict=True):
        by_token[turn.start : turn.end] = value
    return by_token


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


def _episodes(groups: Sequence[Sequence[Sequence[Trajectory]]], penalties: Scored | None) -> Episodes:
    """What an estimator sees of the members of `groups`."""
    members = [member for group in groups for member in group]
    turns = [sum(len(branch.turns) for branch in member) for member in members]
    rewards = np.array([member[0].reward for member in members], dtype=np.float64)
    turn_rewards = [_turn_rewards(member[0], count) for member, count in zip(members, turns, strict=True)]
    if penalties is not None:
        costs = [_costs(member, penalties) for member in members]
        rewards -= [cost.sum() for cost in costs]
        turn_rewards = [_less(earned, cost) for earned, cost in zip(turn_rewards, costs, strict=True)]
    return Episodes(
        ids=tuple(member[0].episode for member in members),
        groups=np.repeat(np.arange(len(groups)), [len(group) for group in groups]),
        rewards=rewards,
        lengths=np.array([sum(branch.sampled for branch in member) for member in members], dtype=np.int64),
        turns=np.array(turns, dtype=np.int64),
        turn_rewards=tuple(turn_rewards),
    )


def _costs(member: Sequence[Trajectory], penalties: Scored) -> NDArray[np.float64]:
    """float64[K]: the penalties of the tokens of each turn of an episode."""
    return np.array(
        [
            penalties[branch.id][turn.start : turn.end].sum(dtype=np.float64)
            for branch in member
            for turn in branch.turns
        ]
    )


def _less(rewards: NDArray[np.float64], costs: NDArray[np.float64]) -> NDArray[np.float64]:
    """`rewards` less `costs`, turn by turn. Where the two do not match, estimators by turn refuse the episode, and the others do
    not look."""
    return rewards - costs if len(rewards) == len(costs) else rewards


def _turn_rewards(trajectory: Trajectory, turns: int) -> NDArray[np.float64]:
    """What was earned after each step of an episode of so many completions."""
    if trajectory.outcome.trainable:
        return np.array(trajectory.turn_rewards, dtype=np.float64)
    rewards = np.zeros(turns, dtype=np.float64)
    rewards[turns - 1 :] = trajectory.reward
    return rewards
