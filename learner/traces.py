"""Expert traces: answers that no version of the policy sampled, which join the groups of their tasks (LUFFY, Yan et al. 2025,
arXiv:2504.14945).

    run.dir/traces.msgpack ──> ExpertTraces ──join──> a batch whose groups have their tasks' traces as further members

Invariants:
- A trace is no episode: it is in no account of the ledger, and no statistic of episodes and of sampled tokens counts it.
- All ranks read the same file, and join the same traces to the same batch.
- `algorithms/traces.py` is the loss of their tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from ..buffer.encoded import EncodedTrajectory
from ..buffer.messages import BatchPlan
from ..buffer.trajectory import BatchRow, Trajectory
from ..common.fsio import write_atomic

FILE = "traces.msgpack"  # in the folder of a run
T = TypeVar("T", Trajectory, BatchRow)


class ExpertTraces:
    """The traces of a run, by the tasks that they answer."""

    def __init__(self, traces: Iterable[Trajectory] = ()) -> None:
        self._traces: dict[tuple[str, str], list[tuple[Trajectory, BatchRow]]] = {}  # each with its row
        for trace in traces:
            row = EncodedTrajectory.of(trace).row.decode()
            self._traces.setdefault((trace.env, trace.task_id), []).append((trace, row))

    def join(self, taken: BatchPlan[BatchRow]) -> tuple[BatchPlan[BatchRow], dict[str, Trajectory]]:
        """The batch, with the traces of each group's task as its last members, and these traces by their ids in the batch."""
        rows: dict[str, Trajectory] = {}
        groups: list[tuple[BatchRow, ...]] = []
        for group in taken.groups:
            known = (
                self._traces.get((group[0].env, group[0].task_id), ()) if group else ()
            )  # an empty one is refused later
            first = max((row.member for row in group), default=0) + 1
            members = list(group)
            for number, (trace, row) in enumerate(known, start=first):
                joined = _member(trace, group[0].group_id, number)
                rows[joined.id] = joined
                members.append(_member(row, group[0].group_id, number))
            groups.append(tuple(members))
        return msgspec.structs.replace(taken, groups=tuple(groups)), rows


def _member(one: T, group: int, member: int) -> T:
    """A trace, or its row, as member `member` of `group`."""
    return msgspec.structs.replace(one, id=f"{group}.trace.{member}.0", group_id=group, member=member)


def write_traces(path: Path, traces: Iterable[Trajectory]) -> None:
    encoded = map(EncodedTrajectory.of, traces)
    write_atomic(path, msgspec.msgpack.encode([(one.header, one.arrays.tobytes()) for one in encoded]), durable=True)


def read_traces(path: Path) -> ExpertTraces:
    """Those of `write_traces`; none where there is no file."""
    if not path.exists():
        return ExpertTraces()
    encoded = msgspec.msgpack.decode(path.read_bytes(), type=list[tuple[bytes, bytes]])
    return ExpertTraces(
        EncodedTrajectory(header, np.frombuffer(arrays, dtype=np.uint8)).decode() for header, arrays in encoded
    )
