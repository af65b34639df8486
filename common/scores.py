"""What an evaluation found, as it is stored in `evaluations.json` and shown."""

from __future__ import annotations

import msgspec


class PassAtK(msgspec.Struct, frozen=True):
    """The chance that at least one of k samples solves a task: its mean over `tasks` tasks, and the standard error."""

    mean: float
    stderr: float
    tasks: int


class EvaluationScore(msgspec.Struct, frozen=True, kw_only=True):
    """The scores of a set of tasks; None where all episodes failed."""

    tasks: int  # tasks with an episode that did not fail
    reward_mean: float | None  # mean over these tasks
    reward_stderr: float | None  # its standard error
    outcomes: dict[str, int]  # episodes by outcome, `failed_*` included
    samples: int = 1  # episodes of each task
    pass_at: dict[str, PassAtK] = {}  # by k: `{"1": ..., "4": ...}`


class EvaluationResult(EvaluationScore, frozen=True, kw_only=True):
    """One entry of `evaluations.json`."""

    label: str  # when in the run it was made: `warm start`, `step 20`, `final`
    version: int  # of the policy
    step: int = 0  # learner steps in its weights
    reward_mean: float
    reward_stderr: float
    seconds: float
    environments: dict[str, EvaluationScore] = {}  # of a mixture, by environment
