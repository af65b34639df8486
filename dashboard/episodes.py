"""Which episodes of a run a person reads in a terminal: of one step the newest, the worst or the best, or those that failed.

Invariants:
- Without a step it is the newest that was trained, before the first one whatever was delivered; failed episodes are then looked for
  among the newest of the run, because a step that goes well has none.
- An episode that left no trajectory is shown, too: how it ended, and what its failure said.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from ..buffer.trajectory import UNWANTED, Outcome
from ..errors import ConfigError, StoreError
from ..monitor.text import reward
from .environments import LOOKED_AT
from .runs import WatchedRun
from .store import ReadConnection
from .trajectory import StoredTrajectory

Order = Literal["newest", "worst", "best", "failed"]
BY = {"worst": "min(t.reward), e.rowid DESC", "best": "max(t.reward) DESC, e.rowid DESC", "newest": "e.rowid DESC"}
PLAYED = " FROM groups g JOIN episodes e ON e.group_id = g.id JOIN trajectories t ON t.episode_id = e.id WHERE g.trained_at = ?"
NEWEST = "SELECT episode_id FROM trajectories ORDER BY rowid DESC LIMIT ?"
HAS_FAILED = f"""e.outcome LIKE '{{"kind":"failed"%' AND json_extract(e.outcome, '$.reason') <> '{UNWANTED}'"""
FAILED_OF_STEP = f" FROM groups g JOIN episodes e ON e.group_id = g.id WHERE g.trained_at = ? AND {HAS_FAILED}"
FAILED = f" FROM episodes e WHERE e.rowid > (SELECT max(rowid) FROM episodes) - {LOOKED_AT} AND {HAS_FAILED}"
EPISODE = (
    "SELECT e.id, e.group_id, e.account, e.reason, e.outcome, e.worker, e.length, e.delivered_time, g.trained_at"
    " FROM episodes e LEFT JOIN groups g ON g.id = e.group_id WHERE e.id = ?"
)


class StoredEpisode(msgspec.Struct, frozen=True):
    """A row of the store with the branches that the episode left."""

    id: str
    group_id: int
    account: str
    reason: str  # why its tokens were discarded
    outcome: Outcome | None  # None while it is played, and where its worker was lost
    worker: str
    tokens: int  # generated
    delivered_time: float | None
    trained_at: int | None
    branches: Sequence[StoredTrajectory]


class EpisodeSelection(msgspec.Struct, frozen=True):
    title: str  # one line: of what they are, and how many there are
    ids: tuple[str, ...]


def select(run: WatchedRun, step: int | None, order: Order, count: int) -> EpisodeSelection:
    """At most `count` episodes in this order. Raises ConfigError where the run has no such step, StoreError."""
    versions = run.metrics.versions()
    if step is not None and step not in versions:
        trained = f"it has trained steps {min(versions)} to {max(versions)}" if versions else "it has trained none yet"
        raise ConfigError(f"--step {step}: {run.folder} has not trained that step; {trained}")
    with run.store.open() as db:
        if order == "failed":
            return _failed(db, step, versions[step] if step is not None else None, count)
        version = versions[step] if step is not None else _newest_trained(db)
        if version is None:
            (delivered,) = db.one("SELECT count(*) FROM trajectories") or (0,)
            title = f"no step was trained yet; {delivered} trajectories were delivered" + (
                ", the newest:" if delivered else ""
            )
            return EpisodeSelection(title, _ids(db, NEWEST, count))
        shown = next((s for s, v in versions.items() if v == version), None)
        name = f"version {version}" if shown is None else f"step {shown}"
        episodes, groups, mean, least, most = db.one(
            f"SELECT count(DISTINCT e.id), count(DISTINCT g.id), avg(t.reward), min(t.reward), max(t.reward){PLAYED}",
            version,
        ) or (0, 0, None, None, None)
        if not episodes:
            raise StoreError(f"{name} of {run.folder}: its episodes were dropped to free space (`buffer.keep`)")
        (failed,) = db.one(f"SELECT count(*){FAILED_OF_STEP}", version) or (0,)
        title = f"{name}: {episodes} episodes of {groups} group{'s' * (groups != 1)}, reward {reward(mean)}, {least:g} to {most:g}"
        title += f"; {failed} more failed (--failed)" if failed else ""
        query = f"SELECT e.id{PLAYED} GROUP BY e.id ORDER BY {BY[order]} LIMIT ?"
        return EpisodeSelection(title, _ids(db, query, version, count))


def read_episode(run: WatchedRun, id: str) -> StoredEpisode:
    """`221.0.1`; of a trajectory's id, `221.0.1.0`, its episode. Raises ConfigError where there is none, StoreError."""
    wanted = id.rpartition(".")[0] if id.count(".") == 3 else id
    with run.store.open() as db:
        row = db.one(EPISODE, wanted)
    if row is None:
        raise ConfigError(
            f"episode {id} is not in the buffer of {run.folder}: there was none, or its rows were dropped to free space"
        )
    fields: dict[str, Any] = dict(zip(StoredEpisode.__struct_fields__, row, strict=False))
    fields["outcome"] = None if fields["outcome"] is None else msgspec.json.decode(fields["outcome"], type=Outcome)
    return StoredEpisode(**fields, branches=run.reader.episode(wanted))


def _failed(db: ReadConnection, step: int | None, version: int | None, count: int) -> EpisodeSelection:
    where, values = (FAILED, ()) if version is None else (FAILED_OF_STEP, (version,))
    (failed,) = db.one(f"SELECT count(*){where}", *values) or (0,)
    of = "the run" if step is None else f"step {step}"
    title = f"{failed} episodes of {of} failed" if failed else f"no episode of {of} failed"
    return EpisodeSelection(title, _ids(db, f"SELECT e.id{where} ORDER BY e.rowid DESC LIMIT ?", *values, count))


def _newest_trained(db: ReadConnection) -> int | None:
    return (db.one("SELECT max(trained_at) FROM groups") or (None,))[0]


def _ids(db: ReadConnection, query: str, *values: object) -> tuple[str, ...]:
    return tuple(dict.fromkeys(id for (id,) in db.all(query, *values)))
