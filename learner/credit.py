"""Who earned what: from task groups to the advantage of every token.

    groups ──one entry per member──> Episodes ──estimator──> advantage per turn ──> of its tokens, by trajectory
                                     Chains, with a critic ──> advantage per token, and returns

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

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..buffer.trajectory import Trajectory
from ..errors import LearnerError
from .algorithms.episodes import Advantage, Chain, Episodes, TokenAdvantage
from .scores import NO_SCORES, Scored, Scores

Group = tuple[Trajectory, ...]
"""All branches of all members of one task group."""


class Credit(msgspec.Struct, frozen=True):
    """By trajectory id, float64[T] for the tokens of every branch of the batch; NaN where nobody judged.

    Attributes:
        advantages: of each token.
        returns: what the critic should have said at each; None where there is no critic.
    """

    advantages: dict[str, NDArray[np.float64]]
    returns: dict[str, NDArray[np.float64]] | None = None


def credit(groups: Sequence[Group], advantage: Advantage | TokenAdvantage, scores: Scores = NO_SCORES) -> Credit:
    """What each token of `groups` earned, relative to what was to be expected. `scores` holds penalties and values, if any.

    Raises:
        LearnerError: a group is empty, a reward or an advantage is not finite, a failed episode carries what it earned before it
            failed, the branches of one disagree about its reward, or the estimator cannot work with an episode.
    """
    if not groups:
        return Credit({})
    members = [_members(number, group) for number, group in enumerate(groups)]
    if isinstance(advantage, TokenAdvantage):
        found = _judge(members, advantage, scores)
    else:
        branches = [branch for group in members for member in group for branch in member]
        ends = np.cumsum([len(branch.turns) for branch in branches])
        by_turn = np.split(advantage(_episodes(members, scores.penalties)), ends[:-1])
        found = Credit({b.id: _by_token(b, part) for b, part in zip(branches, by_turn, strict=True)})
    if any(np.isinf(values).any() for part in (found.advantages, found.returns or {}) for values in part.values()):
        raise LearnerError(
            "advantages are not finite: rewards of this batch are too large to be compared; scale them down"
        )
    return found


def _judge(groups: Sequence[Sequence[Sequence[Trajectory]]], advantage: TokenAdvantage, scores: Scores) -> Credit:
    """Credit by token: of each episode all sampled tokens, branch by branch."""
    if scores.values is None:
        raise LearnerError("learner.algorithm.advantage.kind=gae needs a critic, and this learner has none")
    members = [member for group in groups for member in group]
    chains = [
        Chain(
            _token_rewards(member, scores.penalties),
            np.concatenate([scores.values[b.id][b.loss_mask] for b in member]).astype(np.float64),
        )
        for member in members
    ]
    advantages, returns = dict[str, NDArray[np.float64]](), dict[str, NDArray[np.float64]]()
    for member, judged in zip(members, advantage.estimate(chains), strict=True):
        ends = np.cumsum([branch.sampled for branch in member])[:-1]
        for into, values in ((advantages, judged.advantages), (returns, judged.returns)):
            for branch, part in zip(member, np.split(values, ends), strict=True):
                into[branch.id] = np.full(len(branch), np.nan)
                into[branch.id][branch.loss_mask] = part
    return Credit(advantages, returns)


def _token_rewards(member: Sequence[Trajectory], penalties: Scored | None) -> NDArray[np.float64]:
    """float64[L]: what an episode earned after each of its sampled tokens: the rewards of its turns at their ends, where there is
    one for each, and what is left of its return at its own end."""
    lengths = [branch.loss_mask[t.start : t.end].sum() for branch in member for t in branch.turns]
    earned = _turn_rewards(member[0], len(lengths))
    rewards = np.zeros(sum(branch.sampled for branch in member))
    if not len(rewards):
        return rewards
    if len(earned) == len(lengths):
        np.add.at(rewards, np.maximum(np.cumsum(lengths) - 1, 0), earned)
    rewards[-1] += member[0].reward - rewards.sum()
    if penalties is not None:
        rewards -= np.concatenate([penalties[branch.id][branch.loss_mask] for branch in member])
    return rewards


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
