"""The scores of an evaluation, as they are stored in `evaluations.json` and shown."""

from __future__ import annotations

import msgspec

SOLVED = 1.0 - 1e-6  # reward from which an episode has solved its task: 1, but for rounding


class PassAtK(msgspec.Struct, frozen=True):
    """The chance that at least one of k samples solves a task: its mean over `tasks` tasks, and the standard error."""

    mean: float
    stderr: float
    tasks: int


class TaskRating(msgspec.Struct, frozen=True):
    """How often a policy solved a row of a data set: a line of a file of ratings."""

    task: int  # the row's number in its file, from 0 on
    attempts: int  # episodes that did not fail
    solves: int  # of these, with a reward of 1 or more
    reward_mean: float | None  # over the attempts
    failures: int  # episodes that failed


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

    label: str  # of which weights of the run it is: `warm start`, `step 20`, `final`
    version: int  # of the policy
    versions: tuple[int, ...] = ()  # all that sampled a token, where these are several; `version` is the newest
    suite: str = ""  # the suite's name; empty for the run's own environment without named suites
    step: int = 0  # learner steps in its weights
    reward_mean: float
    reward_stderr: float
    seconds: float
    environments: dict[str, EvaluationScore] = {}  # of a mixture, by environment
