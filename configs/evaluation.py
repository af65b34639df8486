"""The config section `evaluation`: when the policy is evaluated, and on which tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, field, structs

from .environments import EnvironmentKind, Mixture
from .section import NonNegative, Positive, Section

BEST = "best"  # in place of a step: the checkpoint that `keep_best` keeps
Temperature = Annotated[float, Meta(ge=0.0)]


class EvaluationSuite(Section, frozen=True):
    """One set of evaluation tasks, under a name. What it leaves out is as in the run: the tasks of `env` that are held out from
    training, and the other keys of `evaluation` and `agent`."""

    env: EnvironmentKind | Mixture | None = None
    """Another environment, written as the section `env`; its evaluation tasks are played."""
    tasks: Positive | None = None
    """Tasks, in place of `evaluation.tasks`."""
    samples: Positive | None = None
    """Episodes of each task, in place of `evaluation.samples`."""
    temperature: Temperature | None = None
    """Sampling temperature, in place of `evaluation.temperature`; 0 is greedy."""
    max_tokens_per_turn: Positive | None = None
    """Sampled tokens in one completion, in place of `agent.max_tokens_per_turn`."""
    max_tokens: Positive | None = None
    """Context of an episode, in place of `agent.max_tokens`, which it may not exceed: the servers are started for that."""
    keep_best: bool = False
    """Of the checkpoints that were evaluated, the one with this suite's best mean reward is kept beside the newest ones. Of one
    suite only."""


class Evaluation(Section, frozen=True):
    tasks: NonNegative = 128
    """Tasks of an evaluation. There is one before the first step and one after the last; 0 skips them."""
    samples: Positive = 1
    """Episodes of each task. Reports have their mean (avg@k) and pass@k, the chance that one of k solves the task: that its
    reward is 1 or more."""
    temperature: Temperature = 1.0
    """Sampling temperature; 0 is greedy."""
    every: NonNegative = 0
    """Learner steps between further evaluations, a multiple of `learner.checkpoint_every`. Each is of the checkpoint of its step,
    on a server of its own, while training goes on. 0: none."""
    suites: dict[str, EvaluationSuite] = field(default_factory=dict)
    """Several evaluations by name, in place of the one on the run's own environment, for example `{many: {samples: 16}}`."""

    @property
    def keep_best(self) -> str:
        """Name of the suite whose best checkpoint is kept; empty for none."""
        return next((name for name, suite in self.suites.items() if suite.keep_best), "")

    def without_schedule(self, suites: Mapping[str, EvaluationSuite]) -> Evaluation:
        """One evaluation of `suites`: no others follow, and no checkpoint is kept for it."""
        plain = {name: structs.replace(suite, keep_best=False) for name, suite in suites.items()}
        return structs.replace(self, suites=plain, every=0)
