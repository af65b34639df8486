"""A few of the trajectories of a step for the trackers' tables: chosen on the learner's rank 0, from the rows that it has anyway.

Invariants:
- The learner only hands over references; a tracker's thread decodes them.
- A run has at most `TABLES` tables, and that of its first step, of at most `ROWS` rows.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np

from ...buffer.trajectory import Trajectory
from ...configs import Config
from ...dashboard.texts import TOKENIZER
from ...learner.model import load_tokenizer
from ...monitor.recorder import Recorder
from ...monitor.trackers.base import Decode, SampledTokens, TrajectorySample

TABLES = 100
ROWS = 4
OnTrained = Callable[[int, Collection[Trajectory]], None]


def sampler(config: Config, run_dir: Path, recorder: Recorder | None) -> OnTrained:
    """What hears, after each step, the version that it made and the trajectories that this rank has."""
    every, decode = math.ceil(config.learner.steps / TABLES), decoder(run_dir)

    def sample(version: int, rows: Collection[Trajectory]) -> None:
        if recorder is not None and config.run.trackers and (version % every == 0 or version == 1):
            recorder.sampled(version, [_tokens(version, one) for one in choose(version, rows)], decode)

    return sample


def choose(version: int, rows: Collection[Trajectory]) -> list[Trajectory]:
    """First branches of `ROWS` episodes: the one with the highest reward, the one with the lowest, and others by chance."""
    first = sorted((row for row in rows if row.branch == 0), key=lambda row: (row.reward, row.id))
    if len(first) <= ROWS:
        return first
    return [first[0], *random.Random(version).sample(first[1:-1], ROWS - 2), first[-1]]


def _tokens(version: int, one: Trajectory) -> SampledTokens:
    sampled = np.flatnonzero(one.loss_mask)
    begin = int(sampled[0]) if len(sampled) else len(one)
    ages = version - 1 - one.versions()[sampled]
    row = TrajectorySample(
        step=version,
        id=one.id,
        env=one.env,
        task=one.task_id,
        outcome=one.outcome.label,
        reward=one.reward,
        staleness=float(ages.mean()) if len(ages) else 0.0,
        tokens=len(one),
        prompt="",
        response="",
    )
    return SampledTokens(row, one.token_ids[:begin], one.token_ids[begin:])


def decoder(run_dir: Path) -> Decode:
    """Decodes with the run's own copy of the tokenizer, which is loaded when it is first needed."""
    loaded: list[Decode] = []

    def decode(ids: Sequence[int]) -> str:
        if not loaded:
            tokenizer = load_tokenizer(str(run_dir / TOKENIZER))
            loaded.append(lambda ids: str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)))
        return loaded[0](ids)

    return decode
