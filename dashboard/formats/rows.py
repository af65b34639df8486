"""The trajectories that `slipstream export` writes as rows for other programs: everything that a run recorded of each, with its
messages as text.

Invariants:
- A row has what the store has; what was not recorded, or was dropped to free space, is null.
- One row is made at a time, and its arrays are read then: the memory that this takes does not grow with the run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...buffer.encoded import split_arrays
from ...buffer.trajectory import EnvCall, Outcome, Turn, VersionSpan
from ...common.images import PlacedImage
from ..episodes import find_evaluation
from ..runs import WatchedRun
from ..trajectory import StoredTrajectory, TrajectoryReader

WHOLE = 1 << 40  # characters of a message: no message is cut


class TrajectoryRow(msgspec.Struct, frozen=True):
    """docs/operation.md describes the fields; T is the number of tokens."""

    id: str
    episode_id: str
    group_id: int
    attempt: int
    member: int
    branch: int
    task_id: str
    env: str
    reward: float
    turn_rewards: Sequence[float]
    outcome: Outcome
    token_ids: NDArray[np.int32] | None  # int32[T]
    loss_mask: NDArray[np.bool_] | None  # bool[T]
    behavior_logprobs: NDArray[np.float32] | None  # float32[T], nats
    version_spans: Sequence[dict[str, Any]]  # of `VersionSpan`
    turns: Sequence[dict[str, Any]]  # of `Turn`
    env_calls: Sequence[dict[str, Any]]  # of `EnvCall`
    messages: Sequence[dict[str, Any]] | None  # of `ShownMessage`
    images: Sequence[dict[str, Any]]  # of `PlacedImage`
    timings: dict[str, float]
    metrics: dict[str, float]
    started: float
    delivered_time: float | None
    account: str
    withheld: str | None
    loss_from: int | None
    reason: str
    group_state: str
    leased_at: int
    leased_time: float | None
    ready_time: float | None
    taken_time: float | None
    trained_at: int | None
    step: int | None
    evaluation: str | None


class Wanted(msgspec.Struct, frozen=True):
    """Which trajectories: all that were delivered to be trained on; of those only the ones whose batch made one of `versions`; or
    those of the `evaluation` of that label, of all evaluations where it is empty."""

    versions: Collection[int] | None = None
    evaluation: str | None = None


def rows(run: WatchedRun, wanted: Wanted, *, arrays: bool = True) -> Iterator[TrajectoryRow]:
    """In the order of delivery; without `arrays` all but their token ids, masks and log-probs. Raises ConfigError where the run has
    no such evaluation, StoreError."""
    steps = {version: step for step, version in run.metrics.versions().items()}
    label = wanted.evaluation
    if label is not None:
        find_evaluation(run, label)
    reader = run.reader_of("training" if label is None else "evaluation")
    for one in reader.all(wanted.versions):
        row = _row(reader, one, steps, arrays)
        if label is None:
            yield row
        elif label in ("", one.request):
            yield msgspec.structs.replace(row, evaluation=one.request)


def _row(reader: TrajectoryReader, one: StoredTrajectory, steps: dict[int, int], arrays: bool) -> TrajectoryRow:
    h = one.header
    data = reader.arrays(one)
    whole = None if data is None else split_arrays(np.frombuffer(data, dtype=np.uint8))
    messages = None
    if whole is not None:
        found = reader.conversation(one, WHOLE)
        names = ("start", "end", "role", "name", "turn", "text", "malformed")
        messages = [{name: getattr(message, name) for name in names} for message in found]
    ids, logprobs, mask = whole if whole is not None and arrays else (None, None, None)
    _, attempt, _, _ = h.id.split(".")
    return TrajectoryRow(
        id=h.id,
        episode_id=h.episode,
        group_id=h.group_id,
        attempt=int(attempt),
        member=h.member,
        branch=h.branch,
        task_id=h.task_id,
        env=h.env,
        reward=h.reward,
        turn_rewards=h.turn_rewards,
        outcome=h.outcome,
        token_ids=ids,
        loss_mask=mask,
        behavior_logprobs=logprobs,
        version_spans=_dicts(h.version_spans),
        turns=_dicts(h.turns),
        env_calls=_dicts(h.env_calls),
        messages=messages,
        images=_dicts(h.images),
        timings=h.timings,
        metrics=h.metrics,
        started=h.started,
        delivered_time=one.delivered_time,
        account=one.account,
        withheld=one.withheld,
        loss_from=one.loss_from,
        reason=one.reason,
        group_state=one.state,
        leased_at=one.leased_at,
        leased_time=one.leased_time,
        ready_time=one.ready_time,
        taken_time=one.taken_time,
        trained_at=one.trained_at,
        step=None if one.trained_at is None else steps.get(one.trained_at),
        evaluation=None,
    )


def _dicts(structs: Sequence[VersionSpan | Turn | EnvCall | PlacedImage]) -> list[dict[str, Any]]:
    """Arrays on the wire are objects here: other programs know fields by their names."""
    return [{name: getattr(one, name) for name in one.__struct_fields__} for one in structs]
