"""Who earned what: from task groups to the advantage of every token.

    groups ──one entry per member, shaped──> Episodes ──estimator──> advantage per turn ──> of its tokens, by trajectory
                                             Chains, with a critic ──> advantage per token, and returns

Invariants:
- A member's reward counts once, however many branches it has; its turns are those of its branches, one branch after the other.
- A failed episode is here only where the worker was told to train on it. Its reward is the penalty that its environment declared,
  earned after its last turn, and nothing of what it was given before.
- Shaping (`algorithms/overlong.py`) adds to what an episode earned, after its last turn. It is the estimator's to see alone:
  statistics, and the buffer's dynamic sampling and filter, have what it earned, a reward model's share included. Failures are
  judged by their penalty only.
- Penalties, such as the divergence from a reference policy, come off the rewards that an estimator sees: those of a turn off its
  own, those of all branches off the episode's. They are of what the policy sampled: an episode that was played greedily has none.
- No reward that is not a finite number reaches an estimator, and none that it cannot compute with passes it in silence.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..buffer.trajectory import Trajectory
from ..errors import LearnerError
from .algorithms.episodes import Advantage, Chain, Episodes, TokenAdvantage
from .algorithms.overlong import Shaping, shaping
from .scores import NO_SCORES, Scored, Scores

Group = tuple[Trajectory, ...]
"""All branches of all members of one task group."""

UNSHAPED = shaping(0, 1)

ByTrajectory = dict[str, NDArray[np.float64]]


class Credit(msgspec.Struct, frozen=True):
    """By trajectory id, float64[T] for the tokens of every branch of the batch; NaN where nobody judged.

    Attributes:
        advantages: of each token.
        returns: what the critic should have said at each; None where there is no critic.
    """

    advantages: ByTrajectory
    returns: ByTrajectory | None = None


class Member(msgspec.Struct, frozen=True):
    """One episode: its branches as they were opened, and what it earned, shaped, in all and after each step of its environment."""

    branches: list[Trajectory]
    reward: float
    turn_rewards: NDArray[np.float64]

    @property
    def turns(self) -> list[tuple[Trajectory, slice]]:
        """Each completion: in which branch, and which of its tokens."""
        return [(branch, slice(turn.start, turn.end)) for branch in self.branches for turn in branch.turns]


def credit(
    groups: Sequence[Group],
    advantage: Advantage | TokenAdvantage,
    scores: Scores = NO_SCORES,
    shape: Shaping = UNSHAPED,
    *,
    baselines: Collection[str] = (),
) -> Credit:
    """What each token of `groups` earned, relative to what was to be expected.

    Args:
        scores: penalties, and what an estimator by token is told, where other models gave any.
        shape: from the lengths of episodes, in tokens of the longest branch, to what is added to their rewards.
        baselines: ids of episodes that were played greedily.

    Raises:
        LearnerError: a group is empty, a reward or an advantage is not finite, or too large to compute with, a failed episode
            carries what it earned before it failed, the branches of one disagree about its reward, or the estimator cannot work
            with an episode.
    """
    if not groups:
        return Credit({})
    by_group = [_shaped(_branches(number, group), shape) for number, group in enumerate(groups)]
    members = [member for group in by_group for member in group]
    try:
        with np.errstate(over="raise", invalid="ignore"):  # a variance that overflows would make every advantage 0
            if isinstance(advantage, TokenAdvantage):
                return _by_token(members, advantage, scores)
            return _by_turn(members, advantage(_episodes(by_group, scores.penalties, baselines)))
    except FloatingPointError:
        largest = max(members, key=lambda m: abs(m.reward))
        raise LearnerError(
            f"advantages are not finite: rewards of this batch are too large to be compared, the largest is {largest.reward:g} of "
            f"episode {largest.branches[0].episode!r}; scale them down"
        ) from None


def _finite(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """`values`, which must be finite as the float32 that they are trained with; else FloatingPointError."""
    if not np.isfinite(values.astype(np.float32)).all():
        raise FloatingPointError
    return values


# --- what was earned


def _branches(number: int, group: Group) -> list[list[Trajectory]]:
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


def _shaped(members: Sequence[list[Trajectory]], shape: Shaping) -> list[Member]:
    """What the members of a group earned, by the length of the longest branch of each."""
    extra = shape(np.array([max(map(len, branches)) for branches in members], dtype=np.int64))
    return [_earned(branches, more) for branches, more in zip(members, extra.tolist(), strict=True)]


def _earned(branches: list[Trajectory], extra: float) -> Member:
    first = branches[0]
    if first.outcome.trainable:
        rewards = np.array(first.turn_rewards, dtype=np.float64)
        rewards[len(rewards) - 1 :] += extra
        return Member(branches, first.reward + extra, rewards)
    rewards = np.zeros(sum(len(branch.turns) for branch in branches))
    rewards[len(rewards) - 1 :] = first.reward
    return Member(branches, first.reward, rewards)


# --- by turn


def _episodes(groups: Sequence[Sequence[Member]], penalties: Scored | None, baselines: Collection[str]) -> Episodes:
    """What an estimator by turn sees."""
    members = [member for group in groups for member in group]
    ids = tuple(member.branches[0].episode for member in members)
    costs = [_costs(m, None if name in baselines else penalties) for name, m in zip(ids, members, strict=True)]
    return Episodes(
        ids=ids,
        groups=np.repeat(np.arange(len(groups)), [len(group) for group in groups]),
        rewards=np.array([member.reward - cost.sum() for member, cost in zip(members, costs, strict=True)]),
        lengths=np.array([sum(branch.sampled for branch in member.branches) for member in members], dtype=np.int64),
        turns=np.array([len(member.turns) for member in members], dtype=np.int64),
        # Where steps and completions do not match, estimators by turn refuse the episode, and the others do not look.
        turn_rewards=tuple(
            member.turn_rewards - cost if len(cost) == len(member.turn_rewards) else member.turn_rewards
            for member, cost in zip(members, costs, strict=True)
        ),
        greedy=np.array([name in baselines for name in ids], dtype=np.bool_),
    )


def _costs(member: Member, penalties: Scored | None) -> NDArray[np.float64]:
    """float64[K]: the penalties of the tokens of each completion of an episode."""
    if penalties is None:
        return np.zeros(len(member.turns))
    return np.array([penalties[branch.id][tokens].sum(dtype=np.float64) for branch, tokens in member.turns])


def _by_turn(members: Sequence[Member], advantages: NDArray[np.float64]) -> Credit:
    """float64[N], one for each completion -> for each of their tokens."""
    by_token = {branch.id: np.full(len(branch), np.nan) for member in members for branch in member.branches}
    turns = [turn for member in members for turn in member.turns]
    for (branch, tokens), value in zip(turns, _finite(advantages).tolist(), strict=True):
        by_token[branch.id][tokens] = value
    return Credit(by_token)


# --- by token


def _by_token(members: Sequence[Member], advantage: TokenAdvantage, scores: Scores) -> Credit:
    if scores.told is None:
        raise LearnerError(
            "learner.algorithm.advantage judges by token and needs a model beside the policy, and this learner has none"
        )
    chains = [Chain(_rewards(m, scores.penalties), _sampled(m, scores.told), m.branches[0].group_id) for m in members]
    advantages, returns = ByTrajectory(), ByTrajectory()
    for member, judged in zip(members, advantage.estimate(chains), strict=True):
        ends = np.cumsum([branch.sampled for branch in member.branches])[:-1]
        for into, values in ((advantages, judged.advantages), (returns, judged.returns)):
            if values is None:
                continue
            for branch, part in zip(member.branches, np.split(_finite(values), ends), strict=True):
                into[branch.id] = np.full(len(branch), np.nan)
                into[branch.id][branch.loss_mask] = part
    return Credit(advantages, returns or None)


def _sampled(member: Member, scored: Scored) -> NDArray[np.float64]:
    """float64[L]: what was said of the sampled tokens of an episode, branch by branch."""
    return np.concatenate([scored[branch.id][branch.loss_mask] for branch in member.branches]).astype(np.float64)


def _rewards(member: Member, penalties: Scored | None) -> NDArray[np.float64]:
    """float64[L]: what an episode earned after each of its sampled tokens: the rewards of its turns at their ends, where there is
    one for each, and what is left of its return at its own end."""
    rewards = np.zeros(sum(branch.sampled for branch in member.branches))
    if not len(rewards):
        return rewards
    ends = np.cumsum([branch.loss_mask[tokens].sum() for branch, tokens in member.turns])
    if len(ends) == len(member.turn_rewards):
        np.add.at(rewards, np.maximum(ends - 1, 0), member.turn_rewards)
    rewards[-1] += member.reward - rewards.sum()
    return rewards if penalties is None else rewards - _sampled(member, penalties)
