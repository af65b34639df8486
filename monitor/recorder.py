"""What the learner's rank 0 records of a run: a line of `metrics.jsonl` per step and per evaluation, and the same for the trackers.

Invariants:
- An evaluation is recorded once, with the version that it is of: at the first step after it, or when the learner ends. Its line has
  the key `evaluation`, the name of its suite, which no line of a step has.
- What is in `metrics.jsonl` is not recorded again after a restart.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import msgspec

from ..common.scores import EvaluationResult
from ..configs import Config
from ..configs.algorithm import warmup_of
from .metrics import EVALUATION, METRICS, MetricsWriter, read_lines, scalars
from .series import read_evaluations
from .trackers import open_trackers
from .trackers.base import Decode, SampledTokens, Samples
from .trackers.thread import close_trackers


class Recorder:
    """A context manager. `evaluations` is the file that other processes add results to. Raises ConfigError as `open_trackers`, and
    StoreError where a file cannot be written or is not valid."""

    def __init__(self, folder: Path, config: Config, evaluations: Path) -> None:
        self._evaluations = evaluations
        self._changed = 0, 0
        self._warmup = warmup_of(config.learner.algorithm)
        path = folder / METRICS
        self._recorded = {(row[EVALUATION], row["step"]) for row in read_lines(path) if EVALUATION in row}
        with contextlib.ExitStack() as stack:
            self._writer = stack.enter_context(MetricsWriter(path))
            self._trackers = open_trackers(config.run.trackers, folder, config)
            stack.callback(close_trackers, self._trackers)
            stack.callback(self._evaluated)  # those of the end, before the trackers are closed
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def step(self, metrics: msgspec.Struct) -> None:
        """Record a step, after the evaluations that have ended."""
        self._evaluated()
        row = msgspec.to_builtins(metrics)
        self._writer.append(row)
        for tracker in self._trackers:
            tracker.log(self._tracker_step(row["version"]) or row["step"], scalars(row))

    def sampled(self, version: int, tokens: Sequence[SampledTokens], decode: Decode) -> None:
        """Some of the trajectories that made `version`, for the trackers; `decode` is called in a thread of theirs."""
        samples = Samples(tokens, decode)
        for tracker in self._trackers:
            tracker.sampled(self._tracker_step(version), samples)

    def _tracker_step(self, version: int) -> int:
        """Where trackers have the step that made `version`: after those of a critic's warm-up, which make none and are at their
        numbers. Steps of the policy that a learner repeats after a crash make other versions, and so have other places; those of
        a warm-up have theirs again."""
        return version + self._warmup if version else 0

    def _evaluated(self) -> None:
        if not self._evaluations.exists():
            return
        status = self._evaluations.stat()
        changed = status.st_mtime_ns, status.st_size  # a clock that ticks every few milliseconds may show the same time
        if changed == self._changed:
            return
        self._changed = changed
        for one in read_evaluations(self._evaluations):
            if (one.suite, one.step) not in self._recorded:
                self._recorded.add((one.suite, one.step))
                self._record(one)

    def _record(self, one: EvaluationResult) -> None:
        row = msgspec.to_builtins(one)
        del row["suite"], row["label"]
        self._writer.append({EVALUATION: one.suite, "time": time.time(), **row})
        values = {"reward_mean": one.reward_mean, "reward_stderr": one.reward_stderr, "tasks": float(one.tasks)}
        for k, chance in one.pass_at.items():
            values |= {f"pass_at_{k}": chance.mean, f"pass_at_{k}_stderr": chance.stderr}
        prefix = f"evaluation/{one.suite}/" if one.suite else "evaluation/"
        for tracker in self._trackers:
            tracker.evaluated(self._tracker_step(one.version), {prefix + name: value for name, value in values.items()})
