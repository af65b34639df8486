"""What an advantage estimator sees of a batch, and what it gives back.

    by turn:   Episodes of the whole batch  ->  float64[N], one number for each of their N turns
    by token:  a Chain for each episode     ->  a number for each of its sampled tokens, and what a critic should have said

Invariants:
- An estimator is a pure function: equal episodes give equal advantages, in any order of episodes and of groups.
- An episode counts once, however many branches it has, and whether or not it is withheld or has tokens that may be trained: who
  carries loss is the batch's to say (`learner/batch.py`), who is compared with whom is said here. Leaving out the late would
  compare with the fast alone.
- Who has nobody to be compared with gets advantage 0 and teaches nothing. That is no error: episodes fail, and the run goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

EPSILON = 1e-4
"""Standard deviations below this are noise of floating point, not a difference between answers, and are not made large."""


class Episodes(msgspec.Struct, frozen=True):
    """E >= 1 episodes of one batch, with N turns in all.

    Attributes:
        ids: E names, for messages.
        groups: int64[E], the number of each one's task group, counted from 0 without gaps.
        rewards: float64[E], what each earned in all; of a failure that is trained on, its penalty.
        lengths: int64[E], tokens that the policy sampled, in all branches.
        turns: int64[E], completions that the policy sampled; their sum is N.
        turn_rewards: E arrays float64[K]: what the environment gave after each of its K steps.
        greedy: bool[E], whether it was played greedily, as a baseline; none was but for `remax`.
    """

    ids: tuple[str, ...]
    groups: NDArray[np.int64]
    rewards: NDArray[np.float64]
    lengths: NDArray[np.int64]
    turns: NDArray[np.int64]
    turn_rewards: tuple[NDArray[np.float64], ...]
    greedy: NDArray[np.bool_]

    def at_turns(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """float64[E] -> float64[N]: every turn gets what its episode has."""
        return np.repeat(values, self.turns)


Advantage = Callable[[Episodes], NDArray[np.float64]]
"""Episodes of a batch to the advantages of their turns, float64[N], in the order of episodes and, within each, of turns."""


class Chain(msgspec.Struct, frozen=True):
    """The L sampled tokens of one episode, branch by branch.

    Attributes:
        rewards: float64[L], what was earned after each, penalties taken off.
        told: float64[L], what the model that the estimator goes with says of each: a critic its value, a process reward model its
            log(policy / reference).
        group: the number of the episode's task group.
    """

    rewards: NDArray[np.float64]
    told: NDArray[np.float64]
    group: int = 0


class Judged(msgspec.Struct, frozen=True):
    """Of one episode: `advantages` float64[L]; `returns` float64[L], what a critic learns to say, if there is one."""

    advantages: NDArray[np.float64]
    returns: NDArray[np.float64] | None = None


class TokenAdvantage(msgspec.Struct, frozen=True):
    """An estimator that judges each token by itself, from the chains of all episodes of a batch."""

    estimate: Callable[[Sequence[Chain]], list[Judged]]


def mean_within(
    groups: NDArray[np.int64], values: NDArray[np.float64], weights: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    """float64[M]: at each place the mean of `values`, float64[M], over the places of the same group, weighted by `weights`,
    float64[M], if given; 0 where they are all 0. `groups` int64[M] counts from 0."""
    weights = np.ones(len(values)) if weights is None else weights
    totals, sums = np.bincount(groups, weights), np.bincount(groups, weights * values)
    return np.divide(sums, totals, out=np.zeros_like(sums), where=totals > 0)[groups]


def relative_within(groups: NDArray[np.int64], values: NDArray[np.float64], *, normalize: bool) -> NDArray[np.float64]:
    """float64[M]: `values` less their group's mean and, with `normalize`, over their group's population standard deviation."""
    centred = values - mean_within(groups, values)
    if not normalize:
        return centred
    return centred / (np.sqrt(mean_within(groups, np.square(centred))) + EPSILON)


def whitened(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """float64[M]: mean 0 and population standard deviation 1, less where they hardly differ."""
    centred = values - values.mean()
    return centred / max(float(centred.std()), EPSILON)
