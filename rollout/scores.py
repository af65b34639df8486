"""Scores of an evaluation: mean reward (avg@k) and pass@k over tasks, with standard errors.

Invariants:
- Episodes that failed count in no score. A task of which fewer than k episodes did not fail counts in no pass@k.
- The samples of a task are not independent: errors are over tasks, not over episodes.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence

from ..common.scores import SOLVED, EvaluationScore, PassAtK
from .player import EpisodeResult


def score(played: Sequence[Sequence[EpisodeResult]]) -> EvaluationScore:
    """The scores of tasks, given the episodes of each."""
    rewards = [[one.reward for one in task if one.outcome.trainable] for task in played]
    means = [statistics.fmean(task) for task in rewards if task]
    outcomes = dict(Counter(one.outcome.label for one in itertools.chain.from_iterable(played)))
    samples = max(map(len, played), default=1)
    if not means:
        return EvaluationScore(tasks=0, reward_mean=None, reward_stderr=None, outcomes=outcomes, samples=samples)
    return EvaluationScore(
        tasks=len(means),
        reward_mean=statistics.fmean(means),
        reward_stderr=_stderr(means),
        outcomes=outcomes,
        samples=samples,
        pass_at=pass_at(rewards, samples),
    )


def pass_at(rewards: Sequence[Sequence[float]], samples: int) -> dict[str, PassAtK]:
    """pass@k for k = 1, 2, 4, ... and `samples`, from the rewards of each task's episodes."""
    ks = sorted({samples, *(1 << i for i in range(samples.bit_length()) if 1 << i <= samples)})
    found: dict[str, PassAtK] = {}
    for k in ks:
        chances = [unbiased_pass_at(k, len(task), sum(r >= SOLVED for r in task)) for task in rewards if len(task) >= k]
        if chances:
            found[str(k)] = PassAtK(statistics.fmean(chances), _stderr(chances), len(chances))
    return found


def unbiased_pass_at(k: int, samples: int, solved: int) -> float:
    """The chance that k of `samples` episodes, drawn without replacement, hold one of those that `solved` the task: the unbiased
    estimator of Chen et al. 2021, arXiv:2107.03374, equation 1."""
    return 1.0 - math.prod(1.0 - k / i for i in range(samples - solved + 1, samples + 1))


def _stderr(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
