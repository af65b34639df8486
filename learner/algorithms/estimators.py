"""The interface of advantage estimators, the functions that they share, and those that give an episode one number.

    TrainBatch ──episode, turn or token rewards──> estimator ──> float64[N], one advantage per token

Invariants:
- An estimator is a pure function: equal episodes give equal advantages, in any order of episodes and of groups.
- An episode counts once, however many branches it has, and whether or not it is masked or has tokens that may be trained; where
  tokens are normalized over the batch, each of its sampled tokens counts once.
  `batch.trainable` decides which tokens carry loss. Comparing only with what was not masked would favor fast episodes.
- A group of one episode gets advantage 0 and no gradient. That is no error: episodes fail, and the run goes on.
- An advantage is NaN at tokens that the estimator does not judge, and a finite float32 at all others.
- Penalties come off the rewards that an estimator sees, at the level at which it sees them: token, turn or episode. Greedy episodes
  are no sample of the policy and pay none.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...configs.algorithm import Grpo, NoAdvantage, Opo, ReinforcePP, ReinforcePPBaseline, Remax, Rloo, WinRate
from ...errors import LearnerError
from ..batch import Shaping, TrainBatch

EPSILON = 1e-4  # standard deviations below this are noise of floating point and are not made large
Advantage = Callable[[TrainBatch], NDArray[np.float64]]  # NaN where it does not judge a token


def assign_advantages(batch: TrainBatch, advantage: Advantage, returns: Advantage | None = None) -> TrainBatch:
    """`batch` with the advantages of its tokens, and the critic's targets `returns` where there is a critic. Raises
    LearnerError where an advantage is not finite, or the estimator cannot work with an episode."""
    if not len(batch):
        return batch
    try:
        with np.errstate(over="raise", invalid="ignore"):  # a variance that overflows would make every advantage 0
            return msgspec.structs.replace(
                batch,
                advantages=advantage(batch),
                returns=None if returns is None else returns(batch).astype(np.float32),
            )
    except FloatingPointError:
        largest = int(np.abs(batch.rewards).argmax())
        raise LearnerError(
            "advantages are not finite: rewards of this batch are too large to be compared, the largest is "
            f"{batch.rewards[largest]:g} of episode {batch.episode_ids[largest]!r}; scale them down"
        ) from None


# --- rewards, by episode, turn and token


def episode_rewards(batch: TrainBatch) -> NDArray[np.float64]:
    """float64[E]: the return of each episode."""
    costs = _turn_costs(batch)
    return batch.rewards - np.bincount(_episode_of_turn(batch), costs, minlength=len(batch.turns))


def turn_rewards(batch: TrainBatch) -> NDArray[np.float64]:
    """float64[K]: the reward of each completion. Raises LearnerError where an episode has not one step for each completion."""
    for name, turns, steps in zip(batch.episode_ids, batch.turns.tolist(), batch.steps.tolist(), strict=True):
        if turns != steps:
            raise LearnerError(
                f"episode {name!r} has {turns} completions and {steps} rewards of its environment; "
                "learner.algorithm.advantage.kind=turn_level needs an agent that steps its environment once for each completion"
            )
    return batch.step_rewards - _turn_costs(batch)


def token_rewards(batch: TrainBatch) -> list[NDArray[np.float64]]:
    """Of each episode float64[L], the reward after each of its L sampled tokens: the rewards of its turns at their ends, where it
    has one step for each turn, and what remains of its return at its own end."""
    judged = batch.turn[batch.sampled & (batch.turn >= 0)]
    ends = np.cumsum(np.bincount(judged, minlength=int(batch.turns.sum())))
    first_turn, first_step = np.cumsum(batch.turns) - batch.turns, np.cumsum(batch.steps) - batch.steps
    costs = _by_episode(batch, _token_costs(batch))
    found = []
    for e, length in enumerate(batch.lengths.tolist()):
        rewards = np.zeros(length)
        if length:
            turn, turns = first_turn[e], batch.turns[e]
            if turns == batch.steps[e]:
                before = ends[turn - 1] if turn else 0
                at = np.maximum(ends[turn : turn + turns] - before - 1, 0)
                np.add.at(rewards, at, batch.step_rewards[first_step[e] : first_step[e] + turns])
            rewards[-1] += batch.rewards[e] - rewards.sum()
        found.append(rewards - costs[e])
    return found


def token_values(batch: TrainBatch) -> list[NDArray[np.float64]]:
    """Of each episode float64[L], the aux model's output at each of its L sampled tokens."""
    if batch.values is None:
        raise LearnerError(
            "learner.algorithm.advantage judges by token and needs an aux model, and this learner has none"
        )
    return _by_episode(batch, batch.values)


def _by_episode(batch: TrainBatch, values: NDArray[np.floating]) -> list[NDArray[np.float64]]:
    """[N] -> of each episode float64[L]. Sequences are in the order of their episodes."""
    return np.split(values[batch.sampled].astype(np.float64), np.cumsum(batch.lengths)[:-1])


def _episode_of_turn(batch: TrainBatch) -> NDArray[np.int64]:
    return np.repeat(np.arange(len(batch.turns)), batch.turns)


def _token_costs(batch: TrainBatch) -> NDArray[np.float64]:
    """float64[N]: penalties, 0 in greedy episodes."""
    if batch.penalties is None:
        return np.zeros(len(batch.token_ids))
    return np.where(batch.greedy[batch.episode_of_token], 0.0, batch.penalties.astype(np.float64))


def _turn_costs(batch: TrainBatch) -> NDArray[np.float64]:
    """float64[K]."""
    inside = batch.turn >= 0
    costs = np.bincount(batch.turn[inside], _token_costs(batch)[inside], minlength=int(batch.turns.sum()))
    return costs.astype(np.float64)


# --- advantages, at tokens


def at_episodes(batch: TrainBatch, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """float64[E] -> float64[N]: every turn has the value of its episode."""
    return at_turns(batch, np.repeat(values, batch.turns))


def at_turns(batch: TrainBatch, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """float64[K] -> float64[N]: every token has the value of its turn. Raises FloatingPointError where one is not finite."""
    return np.append(_finite(values), np.nan)[batch.turn]  # -1, outside of all turns, is the last


def at_sampled(batch: TrainBatch, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """One value per sampled token, episode by episode -> float64[N]. Raises FloatingPointError where one is not finite."""
    spread = np.full(len(batch.token_ids), np.nan)
    spread[batch.sampled] = _finite(values)
    return spread


def _finite(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """`values`, which must be finite as the float32 that they are trained with."""
    if not np.isfinite(values.astype(np.float32)).all():
        raise FloatingPointError
    return values


# --- statistics


def mean_within(
    groups: NDArray[np.int64], values: NDArray[np.float64], weights: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    """float64[M]: for each entry the mean of `values` over the entries of its group, weighted by `weights`; 0 where they are all
    0."""
    weights = np.ones(len(values)) if weights is None else weights
    totals, sums = np.bincount(groups, weights), np.bincount(groups, weights * values)
    return np.divide(sums, totals, out=np.zeros_like(sums), where=totals > 0)[groups]


def relative_within(groups: NDArray[np.int64], values: NDArray[np.float64], *, normalize: bool) -> NDArray[np.float64]:
    """float64[M]: `values` less their group's mean and, with `normalize`, over their group's population standard deviation."""
    centered = values - mean_within(groups, values)
    if not normalize:
        return centered
    return centered / (np.sqrt(mean_within(groups, np.square(centered))) + EPSILON)


def whitened(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """float64[M]: mean 0 and population standard deviation 1, less where they hardly differ."""
    centered = values - values.mean()
    return centered / max(float(centered.std()), EPSILON)


def discounted_sums(values: NDArray[np.float64], discount: float) -> NDArray[np.float64]:
    """float64[L]: at each entry the sum of this and all later ones, each `discount` times less than the one before."""
    total, sums = 0.0, np.empty_like(values)
    for t in range(len(values) - 1, -1, -1):
        total = values[t] + discount * total
        sums[t] = total
    return sums


# --- estimators that give an episode one number: r is the reward of the G episodes of one group, i is one of them


def grpo(config: Grpo, batch: TrainBatch) -> NDArray[np.float64]:
    """Group-relative: the other answers to the same task are the baseline. The standard deviation is the population's.

    A_i = (r_i - mean(r)) / (std(r) + eps)        GRPO, Shao et al. 2024, arXiv:2402.03300
    A_i =  r_i - mean(r)                          Dr. GRPO, Liu et al. 2025, arXiv:2503.20783
    """
    return at_episodes(batch, relative_within(batch.groups, episode_rewards(batch), normalize=config.normalize))


def rloo(_: Rloo, batch: TrainBatch) -> NDArray[np.float64]:
    """RLOO: every episode is compared with the mean of the others, itself left out. Ahmadian et al. 2024, arXiv:2402.14740, after
    Kool et al. 2019.

        A_i = r_i - 1 / (G - 1) * sum over j != i of r_j  =  G / (G - 1) * (r_i - mean(r))
    """
    rewards, size = episode_rewards(batch), np.bincount(batch.groups)[batch.groups]
    centered = rewards - mean_within(batch.groups, rewards)
    return at_episodes(batch, centered * size / np.maximum(size - 1, 1))


def reinforce_pp(_: ReinforcePP, batch: TrainBatch) -> NDArray[np.float64]:
    """REINFORCE++ (Hu et al. 2025, arXiv:2501.03262): no baseline by task, no group. With the divergence KL(i) of token i from the
    reference policy, which `kl.kind=reward` takes off,

        A_t = r - coefficient x sum over i >= t of KL(i)        then (A_t - mean(A)) / std(A)

    with mean and population standard deviation over all sampled tokens of the batch.
    """
    return at_sampled(batch, _whitened_to_go(batch, batch.rewards))


def reinforce_pp_baseline(_: ReinforcePPBaseline, batch: TrainBatch) -> NDArray[np.float64]:
    """REINFORCE++ with baseline (ibid.): the same with r less the mean of the group's. An episode that is alone in its group has
    nothing to be compared with: it gets 0 and is in no mean."""
    rewards = relative_within(batch.groups, batch.rewards, normalize=False)
    return at_sampled(batch, _whitened_to_go(batch, rewards, np.bincount(batch.groups)[batch.groups] > 1))


def _whitened_to_go(
    batch: TrainBatch, rewards: NDArray[np.float64], compared: NDArray[np.bool_] | None = None
) -> NDArray[np.float64]:
    """Of each sampled token `rewards` float64[E] of its episode less its own and all later penalties, whitened over those of the
    episodes `compared` bool[E]; 0 in others."""
    episode, costs = batch.episode_of_token[batch.sampled], _token_costs(batch)[batch.sampled]
    upto = np.cumsum(costs)
    totals = np.bincount(episode, costs, minlength=len(rewards))
    before = upto - costs - (np.cumsum(totals) - totals)[episode]  # of its episode's earlier tokens
    values = rewards[episode] - (totals[episode] - before)
    counts = np.ones(len(values), dtype=np.bool_) if compared is None else compared[episode]
    values[~counts] = 0.0
    if counts.any():
        values[counts] = whitened(values[counts])
    return values


def opo(_: Opo, batch: TrainBatch) -> NDArray[np.float64]:
    """OPO (Hao et al. 2025, arXiv:2505.23585): the baseline with the least variance, where a long answer counts more.

        A_i = r_i - sum(l * r) / sum(l),    l the lengths of the group's episodes in sampled tokens, withheld ones included

    The paper assumes gradients of tokens that are alike and orthogonal, and trains strictly on-policy: `buffer.max_staleness=0`
    with one minibatch. With older tokens the baseline is valid, and not optimal.
    """
    rewards = episode_rewards(batch)
    return at_episodes(batch, rewards - mean_within(batch.groups, rewards, batch.lengths.astype(np.float64)))


def remax(_: Remax, batch: TrainBatch) -> NDArray[np.float64]:
    """ReMax (Li et al. 2023, arXiv:2310.10505): A_i = r_i - r_g, with g the greedy episode of the group, at temperature 0. It
    carries no loss: it is no sample of the policy. The paper has one sampled episode for each greedy one, here
    `buffer.group_size=2`."""
    rewards, greedy = episode_rewards(batch), batch.greedy.astype(np.float64)
    compared = np.bincount(batch.groups, greedy)[batch.groups] > 0
    baseline = mean_within(batch.groups, rewards, greedy)
    return at_episodes(batch, np.where(compared, rewards - baseline, 0.0))


def win_rate(_: WinRate, batch: TrainBatch) -> NDArray[np.float64]:
    """How often an episode is better than another answer (SPPO, Wu et al. 2024, arXiv:2405.00675, with rewards as preferences).

    A_i = 1 / (G - 1) * sum over j != i of ([r_i > r_j] + [r_i = r_j] / 2)  -  1 / 2
    """
    rewards = episode_rewards(batch)
    rates = np.zeros(len(rewards))
    for group in range(int(batch.groups.max()) + 1):
        members = batch.groups == group
        own = rewards[members]
        if len(own) > 1:
            # Minus one where it loses, zero where it draws, itself included: twice the win rate less one.
            rates[members] = np.sign(own[:, None] - own[None, :]).sum(1) / (2 * (len(own) - 1))
    return at_episodes(batch, rates)


def no_advantage(_: NoAdvantage, batch: TrainBatch) -> NDArray[np.float64]:
    """0 for every token: rewards do not count."""
    return at_episodes(batch, np.zeros(len(batch.rewards)))


# --- shaping


def overlong(zone: int, longest: int) -> Shaping | None:
    """Soft overlong punishment (DAPO, Yu et al. 2025, arXiv:2503.14476, equation 13): -1 to 0, for coming close to the limit.

        0                                 where   tokens <= longest - zone
        (longest - zone - tokens) / zone  where   longest - zone < tokens <= longest
        -1                                beyond

    `agent.max_tokens`, here `longest`, limits the whole context, where the paper's limit is that of an answer. An episode is as
    long as the context of its longest branch. None where `zone` is 0: nothing is punished.
    """
    return (lambda tokens: np.clip((longest - zone - tokens) / zone, -1.0, 0.0)) if zone else None
