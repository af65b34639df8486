"""Buffer files for tests: opened, looked into, and filled by a short run."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

from slipstream.buffer.admission import Admission, ReplayConfig
from slipstream.buffer.encoded import DeliveredTrajectory, EncodedTrajectory
from slipstream.buffer.group_table import Changed, Group
from slipstream.buffer.replay import Replay
from slipstream.buffer.segments import segments_path
from slipstream.buffer.store import CommitRow, Store, WriteBatch
from slipstream.buffer.trajectory import FINISHED, NOWHERE, Trajectory
from slipstream.errors import StoreError
from slipstream.tests.episodes import trajectory_of


def entire(*groups: Group) -> list[Changed]:
    """To save all their episodes."""
    return [(group, list(group.episodes.values())) for group in groups]


def new_trajectory(episode_id: str, trajectory: Trajectory, store: Store | None = None) -> DeliveredTrajectory:
    """As its delivery brings it; where the arrays will be is reserved in `store`."""
    encoded = EncodedTrajectory.of(trajectory)
    position = NOWHERE if store is None else store.reserve(encoded.arrays.nbytes)
    return DeliveredTrajectory.of(episode_id, trajectory, encoded, position)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Store]:
    store = Store(path)
    try:
        yield store
    finally:
        store.close()


def sql(path: Path, statement: str, *values: object) -> list[tuple[object, ...]]:
    """Into the file for rows."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        return db.execute(statement, values).fetchall()


def segments(path: Path) -> list[Path]:
    """Files of arrays, the oldest first."""
    return sorted(segments_path(path).iterdir())


def in_child(work: Callable[[], object]) -> str:
    """What `work` says when a process of its own does it: its StoreError, or its result."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            said = str(work())
        except StoreError as error:
            said = f"StoreError: {error}"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with open(reading, "rb") as pipe:
        return pipe.read().decode()


def play(path: Path, groups: int, *, tokens: int = 50, checkpointed: bool = True) -> Replay:
    """A run of `groups` steps over groups of two; then one group with a member delivered and one that runs."""
    replay = Replay(Admission(0, 1), ReplayConfig(2, 2, "withhold", 5.0))
    replay.mark_served(0)
    with opened(path) as store:
        for n in range(groups + 1):
            lease = replay.leases.grant("a", 0.0)
            assert lease is not None
            sent = []
            for member in lease.members[: 1 if n == groups else 2]:
                kept = {replay.version: tokens + n}
                assert replay.leases.deliver(lease.episode(member), FINISHED, {replay.version: tokens + n + 1}, kept)
                sent.append(new_trajectory(lease.episode(member), trajectory_of(lease.episode(member), kept)))
            replay.leases.progress("a", {lease.episode(1): {replay.version: tokens + n + 1}}, 0.0)
            store.save(WriteBatch.of(replay.table.counters, replay.table.drain(), sent))
            if n < groups:
                assert replay.take(n) is not None
                replay.commit(n)
                replay.mark_served(n + 1)
                store.save(
                    WriteBatch.of(replay.table.counters, replay.table.drain(), commits=[CommitRow(n + 1, 0.0, 1, 0, 1)])
                )
        if checkpointed:
            replay.mark_checkpointed(replay.version)
        store.save(WriteBatch.of(replay.table.counters, []))
    replay.table.prune()
    return replay
