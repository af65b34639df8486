"""The dashboard's importance ratios, by how much the policy had moved since it sampled a token: histograms of log(p / b) by
staleness, and its largest value at tokens of staleness 0 by replica, which is what a replica and the learner differ by.

    annotations/ of the newest steps ──log-ratios──┐
    headers in buffer.sqlite ──versions, replicas──┴──> RatioSummary

Invariants:
- Only tokens with loss count: no other has a ratio.
- Of a trajectory that the run trains on again after a return to a checkpoint, the step that counts is the one that its group has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..buffer.trajectory import BatchRow
from ..common.annotations import VALUES, TokenAnnotations
from ..monitor.annotations import annotated_versions, read_step_annotations
from .store import ROWS, StoreReader

NEWEST = 8  # steps that are looked at: the policy moves on
OUTER = (0.01, 0.03, 0.1, 0.3, 1.0)
EDGES = (*(-edge for edge in reversed(OUTER)), *OUTER)  # nats, between the bins; the first and the last bin are open
FAR = 0.999  # quantile
Ratios = NDArray[np.float32]


class ReplicaMismatch(msgspec.Struct, frozen=True):
    """`largest` is of the differences in nats, of so many `tokens` of staleness 0."""

    tokens: int
    largest: float


class RatioSummary(msgspec.Struct, frozen=True):
    """`counts` has the tokens in each bin by staleness, `far` the 99.9 % quantile of the absolute log-ratio by staleness."""

    steps: int
    edges: tuple[float, ...]
    counts: dict[int, list[int]]
    far: dict[int, float]
    replicas: dict[str, ReplicaMismatch]


def ratios(folder: Path, store: StoreReader) -> RatioSummary:
    """Of the run in `folder`. Raises StoreError where a file is damaged."""
    by_age, by_replica = defaultdict[int, list[Ratios]](list), defaultdict[str, list[Ratios]](list)
    versions = annotated_versions(folder)[-NEWEST:] if store.exists else []
    for version in versions:
        for header, found in _trained(folder, store, version):
            ages = np.full(len(found), -1)
            for span in header.version_spans:
                ages[span.start : span.end] = version - 1 - span.version
            values = found.values[VALUES.index("log_ratio")].astype(np.float32)
            known = np.isfinite(values)
            for age in np.unique(ages[known]).tolist():
                by_age[age].append(values[known & (ages == age)])
            fresh = known & (ages == 0)
            for turn in header.turns:
                if turn.replica and len(of_turn := values[turn.start : turn.end][fresh[turn.start : turn.end]]):
                    by_replica[turn.replica].append(of_turn)
    every = {age: np.concatenate(parts) for age, parts in sorted(by_age.items())}
    fresh = {name: np.concatenate(parts) for name, parts in sorted(by_replica.items())}
    return RatioSummary(
        len(versions),
        EDGES,
        {
            age: np.bincount(np.digitize(values, EDGES), minlength=len(EDGES) + 1).tolist()
            for age, values in every.items()
        },
        {age: float(np.quantile(np.abs(values), FAR)) for age, values in every.items()},
        {name: ReplicaMismatch(len(values), float(np.abs(values).max())) for name, values in fresh.items()},
    )


def _trained(folder: Path, store: StoreReader, version: int) -> Iterator[tuple[BatchRow, TokenAnnotations]]:
    """The trajectories whose tokens the step that made `version` trained on, with what it computed."""
    every = {found.id: found for found in read_step_annotations(folder, version)}
    query = (
        "SELECT t.id, t.header, t.length FROM trajectories t JOIN groups g ON g.id = t.group_id WHERE g.trained_at = ?"
    )
    for first in range(0, len(every), ROWS):
        ids = list(every)[first : first + ROWS]
        with store.open() as db:
            rows = db.all(f"{query} AND t.id IN ({', '.join('?' * len(ids))})", version, *ids)
        for id, header, length in rows:
            yield store.decode(header, length), every[id]
