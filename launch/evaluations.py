"""`evaluations.json` in a run folder: one entry per evaluation, with the learner's step that it is of.

Invariants:
- The evaluation of the last step is called `final`. Where a run goes on beyond it, it is called by its step from then on.
- A step is evaluated once.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec import structs

from ..common.fsio import write_atomic
from ..common.scores import EvaluationResult
from ..monitor.series import read_evaluations

FILE = "evaluations.json"
WARM_START, FINAL = "warm start", "final"


def begin(run_dir: Path, steps: int) -> None:
    """The run ends after `steps` steps, which may be more than it had before it was resumed."""
    before = read_evaluations(run_dir / FILE)
    after = [
        structs.replace(one, label=label_of(one.step)) if one.label == FINAL and one.step < steps else one
        for one in before
    ]
    if after != before:
        _write(run_dir / FILE, after)


def append(run_dir: Path, evaluation: EvaluationResult, step: int) -> EvaluationResult:
    """Add what `rollout.evaluation` found of `step`."""
    path = run_dir / FILE
    record = structs.replace(evaluation, step=step)
    _write(path, [*read_evaluations(path), record])
    return record


def is_evaluated(run_dir: Path, step: int) -> bool:
    return any(one.step == step for one in read_evaluations(run_dir / FILE))


def label_of(step: int) -> str:
    """What an evaluation before the last step is called."""
    return f"step {step}" if step else WARM_START


def _write(path: Path, records: Iterable[EvaluationResult]) -> None:
    write_atomic(path, msgspec.json.format(msgspec.json.encode(list(records))))
