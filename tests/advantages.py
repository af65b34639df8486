"""Advantage estimators in plain Python, one episode at a time, from the formulas of their papers: what the learner's must equal."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from slipstream.configs.algorithm import Grpo, Opo, ReinforcePP, ReinforcePPBaseline, Remax, Rloo, TurnLevel, WinRate

EPSILON = 1e-4
GRPO, DR_GRPO = Grpo(normalize=True), Grpo(normalize=False)
BY_GROUP = [
    GRPO,
    DR_GRPO,
    Rloo(),
    ReinforcePPBaseline(),
    Opo(),
    Remax(),
    WinRate(),
    TurnLevel(gamma=0.5),
    TurnLevel(normalize=False),
]
"""Estimators that compare with the group, which need company in it."""
ALL = [*BY_GROUP, ReinforcePP()]


class Episode(msgspec.Struct):
    """What happened in one episode: the reward after each turn, how many tokens the policy sampled, whether greedily, and the
    sampled tokens of each turn where these are not one."""

    turns: list[float]
    length: int
    greedy: bool = False
    tokens: list[int] | None = None

    @property
    def reward(self) -> float:
        return sum(self.turns)


Groups = list[list[Episode]]


def names(value) -> str:
    """For pytest's names of parameters."""
    return repr(value) if isinstance(value, msgspec.Struct) else str(value)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def deviation(values: Sequence[float]) -> float:
    """The population's, in two passes."""
    return mean([(v - mean(values)) ** 2 for v in values]) ** 0.5


def per_turn(groups: Groups, values: list[list[float]]) -> list[float]:
    return [
        v for group, row in zip(groups, values, strict=True) for e, v in zip(group, row, strict=True) for _ in e.turns
    ]


def grpo(config: Grpo, groups: Groups) -> list[float]:
    """Shao et al. 2024; Liu et al. 2025."""
    values = []
    for group in groups:
        rewards = [e.reward for e in group]
        scale = deviation(rewards) + EPSILON if config.normalize else 1.0
        values.append([(r - mean(rewards)) / scale for r in rewards])
    return per_turn(groups, values)


def rloo(_: Rloo, groups: Groups) -> list[float]:
    """Ahmadian et al. 2024: the others, one by one."""
    values = []
    for group in groups:
        rewards = [e.reward for e in group]
        others = [rewards[:i] + rewards[i + 1 :] for i in range(len(rewards))]
        values.append([r - mean(rest) if rest else 0.0 for r, rest in zip(rewards, others, strict=True)])
    return per_turn(groups, values)


def reinforce_pp(_: ReinforcePP, groups: Groups) -> list[float]:
    """Hu et al. 2025: the tokens of the batch are the baseline and the scale. Each turn has one."""
    return normalized([[(e, e.reward) for e in group] for group in groups])


def reinforce_pp_baseline(_: ReinforcePPBaseline, groups: Groups) -> list[float]:
    """Hu et al. 2025, with baseline: the group centres, the tokens of the batch centre again and scale. An episode without company
    is 0, and in no mean."""
    company = [[(e, e.reward - mean([o.reward for o in g])) for e in g] for g in groups if len(g) > 1]
    found = iter(normalized(company))
    return [next(found) if len(group) > 1 else 0.0 for group in groups for e in group for _ in e.turns]


def normalized(values: list[list[tuple[Episode, float]]]) -> list[float]:
    """By turn; each token counts once in mean and deviation."""
    by_token = [v for row in values for e, v in row for n in e.tokens or [1] * len(e.turns) for _ in range(n)]
    scale = max(deviation(by_token), EPSILON) if by_token else 1.0
    return [(v - mean(by_token)) / scale for row in values for e, v in row for _ in e.turns]


def opo(_: Opo, groups: Groups) -> list[float]:
    """Hao et al. 2025: the baseline is the reward per token, were each token paid what its answer earned."""
    values = []
    for group in groups:
        tokens = [e.reward for e in group for _ in range(e.length)]
        values.append([e.reward - mean(tokens) for e in group])
    return per_turn(groups, values)


def remax(_: Remax, groups: Groups) -> list[float]:
    """Li et al. 2023: r(x, a) - r(x, a_greedy), for each answer of a task that was answered greedily, too."""
    values = []
    for group in groups:
        greedy = next((e.reward for e in group if e.greedy), None)
        values.append([0.0 if greedy is None else e.reward - greedy for e in group])
    return per_turn(groups, values)


def win_rate(_: WinRate, groups: Groups) -> list[float]:
    """Wu et al. 2024: one duel after the other."""
    values = []
    for group in groups:
        duels = [[(e.reward > o.reward) + (e.reward == o.reward) / 2 for o in group if o is not e] for e in group]
        values.append([mean(row) - 0.5 if row else 0.0 for row in duels])
    return per_turn(groups, values)


def turn_level(config: TurnLevel, groups: Groups) -> list[float]:
    """Returns-to-go as powers of gamma, compared with those who reached the turn."""
    values = []
    for group in groups:
        returns = [
            [sum(config.gamma**j * e.turns[k + j] for j in range(len(e.turns) - k)) for k in range(len(e.turns))]
            for e in group
        ]
        for row in returns:
            for k, value in enumerate(row):
                reached = [other[k] for other in returns if len(other) > k]
                scale = deviation(reached) + EPSILON if config.normalize else 1.0
                values.append((value - mean(reached)) / scale)
    return values


ORACLES = {
    Grpo: grpo,
    Rloo: rloo,
    ReinforcePP: reinforce_pp,
    ReinforcePPBaseline: reinforce_pp_baseline,
    Opo: opo,
    Remax: remax,
    WinRate: win_rate,
    TurnLevel: turn_level,
}
