"""`evaluations.json` in a run folder: one entry per suite and evaluated step, and what follows from it: which evaluations are due,
which checkpoints have to stay for them, and which one is best.

Invariants:
- The evaluation of the last step is called `final`. Where a run goes on beyond it, it is called by its step from then on.
- A suite is evaluated once per step; each result is in the file as soon as it is there.
- Which checkpoints stay follows from the files and the config alone: the learner and the supervisor, which both ask, agree.
- Each file has one writer at a time: the supervisor, or the evaluator that it waits for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

import msgspec
from msgspec import structs

from ..buffer.evaluation_episodes import rename_evaluations
from ..common.fsio import read_json, write_atomic
from ..common.scores import EvaluationResult
from ..configs import Config
from ..configs.suites import suites_of
from ..monitor.series import EVALUATIONS as FILE
from ..monitor.series import read_evaluations

GIVEN_UP = "evaluations-given-up.json"  # beside it: steps whose evaluation failed for good in this start of the run
WARM_START, FINAL = "warm start", "final"


def begin(run_dir: Path, steps: int) -> None:
    """The run starts, or goes on, and ends after `steps` steps, which may be more than it had before. What was given up is tried
    again."""
    (run_dir / GIVEN_UP).unlink(missing_ok=True)
    before = read_evaluations(run_dir / FILE)
    after = [
        structs.replace(one, label=label_of(one.step)) if one.label == FINAL and one.step < steps else one
        for one in before
    ]
    if after != before:
        changed = {(old.label, new.label) for old, new in zip(before, after, strict=True) if old != new}
        suites = {one.suite for one in before}
        rename_evaluations(
            run_dir, {called(old, suite): called(new, suite) for old, new in changed for suite in suites}
        )
        _write(run_dir / FILE, after)


def called(label: str, suite: str) -> str:
    """What the episodes of a suite's evaluation are called."""
    return f"{label}, {suite}" if suite else label


def append(run_dir: Path, record: EvaluationResult) -> None:
    """Add the result of a suite and step that has none yet."""
    path = run_dir / FILE
    _write(path, [*read_evaluations(path), record])


def missing(run_dir: Path, config: Config, step: int) -> dict[str, Config]:
    """The suites without a result of `step`, as `suites_of`."""
    found = {one.suite for one in read_evaluations(run_dir / FILE) if one.step == step}
    return {name: suite for name, suite in suites_of(config).items() if name not in found}


def begins(run_dir: Path, step: int) -> bool:
    """Whether a run that starts or goes on after `step` steps is evaluated first: nothing after another step was."""
    return all(one.step == step for one in read_evaluations(run_dir / FILE))


def due(run_dir: Path, config: Config, steps: Iterable[int]) -> list[int]:
    """Those of the `steps` after which `evaluation.every` wants an evaluation that is neither complete nor given up. The one after
    the last step is made when training has ended."""
    every, last, given_up = config.evaluation.every, config.learner.steps, _given_up(run_dir)
    wanted = [step for step in steps if every and step % every == 0 and step != last and step not in given_up]
    return [step for step in wanted if missing(run_dir, config, step)]


def give_up(run_dir: Path, step: int) -> None:
    """The evaluation of `step` is not due any more, so that its checkpoint need not stay."""
    write_atomic(run_dir / GIVEN_UP, msgspec.json.encode(sorted({*_given_up(run_dir), step})))


def _given_up(run_dir: Path) -> list[int]:
    """Raises StoreError: the file is damaged."""
    return read_json(run_dir / GIVEN_UP, list[int], [], "a list of steps", "remove it, and resume the run")


def best(run_dir: Path, suite: str, steps: Collection[int]) -> EvaluationResult | None:
    """The result of `suite` with the highest mean reward among those after `steps`, the last one of equals."""
    results = [one for one in read_evaluations(run_dir / FILE) if one.suite == suite and one.step in steps]
    return max(results, key=lambda one: (one.reward_mean, one.step), default=None)


def retained(run_dir: Path, config: Config, steps: Collection[int]) -> set[int]:
    """The checkpoints, by their `steps`, that stay however old they are: those that are to be evaluated, and the best one."""
    stay, suite = set(due(run_dir, config, steps)), config.evaluation.keep_best
    if suite and (found := best(run_dir, suite, steps)):
        stay.add(found.step)
    return stay


def label_of(step: int) -> str:
    """What an evaluation before the last step is called."""
    return f"step {step}" if step else WARM_START


def _write(path: Path, records: Iterable[EvaluationResult]) -> None:
    write_atomic(path, msgspec.json.format(msgspec.json.encode(list(records))))
