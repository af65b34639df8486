"""Episodes that `slipstream show` reads for a person in a terminal: of one step or one evaluation the newest, the worst, the best
or the failed ones.

Invariants:
- Without a step it is the newest that was trained, before the first one whatever was delivered; failed episodes are then looked for
  among the newest of the run, because a step that goes well has none.
- An episode that left no trajectory is shown, too: how it ended, and what its failure said.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from ..buffer.trajectory import Outcome
from ..errors import ConfigError, StoreError
from ..monitor.text import reward
from .environments import HAS_FAILED, LOOKED_AT
from .index import Source
from .runs import WatchedRun
from .store import ReadConnection
from .trajectory import StoredTrajectory

Order = Literal["newest", "worst", "best", "failed"]
BY = {"worst": "min(t.reward), e.rowid DESC", "best": "max(t.reward) DESC, e.rowid DESC", "newest": "e.rowid DESC"}
EPISODES = " FROM groups g JOIN episodes e ON e.group_id = g.id"
TRAJECTORIES = f"{EPISODES} JOIN trajectories t ON t.episode_id = e.id"
OF_VERSION, OF_EVALUATION = " WHERE g.trained_at = ?", " WHERE g.request = ?"
EVALUATIONS = "SELECT request FROM groups GROUP BY request ORDER BY max(id)"
FAILED = (
    "SELECT e.id, e.delivered_time FROM {part}.episodes e WHERE e.rowid > (SELECT max(rowid) FROM {part}.episodes) - ?"
    f" AND {HAS_FAILED} ORDER BY e.rowid DESC LIMIT ?"
)
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
        raise ConfigError(f"--step {step}: {run.folder} has not trained that step; {run.metrics.trained_steps()}")
    with run.store.open() as db:
        if order == "failed":
            of_step = ("the run", "", None) if step is None else (f"step {step}", OF_VERSION, versions[step])
            return _failed(db, *of_step, count)
        version = versions[step] if step is not None else _newest_trained(db)
        if version is None:
            (delivered,) = db.one("SELECT count(*) FROM trajectories") or (0,)
            title = f"no step was trained yet; {delivered} trajectories were delivered" + (
                ", the newest:" if delivered else ""
            )
            return EpisodeSelection(title, _distinct(db.newest("episode_id", count)))
        shown = next((s for s, v in versions.items() if v == version), None)
        name = f"version {version}" if shown is None else f"step {shown}"
        if (found := _select_episodes(db, name, OF_VERSION, version, order, count)) is None:
            raise StoreError(f"{name} of {run.folder}: its episodes were dropped to free space (`buffer.keep`)")
        return found


def select_evaluated(run: WatchedRun, evaluation: str, order: Order, count: int) -> EpisodeSelection:
    """At most `count` episodes of an evaluation, by its label, or of the newest one where that is empty. Raises ConfigError where
    the run has no episodes of it, StoreError."""
    label = find_evaluation(run, evaluation)
    with run.evaluated.open() as db:
        if order == "failed":
            return _failed(db, label, OF_EVALUATION, label, count)
        found = _select_episodes(db, label, OF_EVALUATION, label, order, count)
    return found or EpisodeSelection(f"{label}: all of its episodes failed (--failed)", ())


def find_evaluation(run: WatchedRun, evaluation: str) -> str:
    """The label itself, or that of the newest evaluation where it is empty. Raises ConfigError where the run has no episodes of it,
    StoreError."""
    labels = list[str]()
    if run.evaluated.exists:
        with run.evaluated.open() as db:
            labels = [label for (label,) in db.all(EVALUATIONS)]
    if not labels or (evaluation and evaluation not in labels):
        key = f"--evaluation {evaluation}".rstrip()
        has = f"it has those of {', '.join(map(repr, labels))}" if labels else "it has those of no evaluation"
        raise ConfigError(f"{key}: {run.folder} has no such episodes; {has}")
    return evaluation or labels[-1]


def read_episode(run: WatchedRun, id: str, source: Source = "training") -> StoredEpisode:
    """`221.0.1`; of a trajectory's id, `221.0.1.0`, its episode. Raises ConfigError where there is none, StoreError."""
    wanted = id.rpartition(".")[0] if id.count(".") == 3 else id
    store = run.store_of(source)
    with store.open() as db:
        row = db.one(EPISODE, wanted)
    if row is None:
        raise ConfigError(
            f"episode {id} is not in {store.path}: there was none, or its rows were dropped to free space"
        )
    fields: dict[str, Any] = dict(zip(StoredEpisode.__struct_fields__, row, strict=False))
    fields["outcome"] = None if fields["outcome"] is None else msgspec.json.decode(fields["outcome"], type=Outcome)
    return StoredEpisode(**fields, branches=run.reader_of(source).episode(wanted))


def _select_episodes(
    db: ReadConnection, name: str, where: str, value: object, order: Order, count: int
) -> EpisodeSelection | None:
    """Of those that did not fail; None where there are none."""
    played = TRAJECTORIES + where
    # The branches of an episode have its reward, each.
    rewards = f"SELECT g.id AS of, avg(t.reward) AS reward{played} GROUP BY e.id"
    query = f"SELECT count(*), count(DISTINCT of), avg(reward), min(reward), max(reward) FROM ({rewards})"
    episodes, groups, mean, least, most = db.one(query, value) or (0, 0, None, None, None)
    if not episodes:
        return None
    (failed,) = db.one(f"SELECT count(*){EPISODES}{where} AND {HAS_FAILED}", value) or (0,)
    title = f"{name}: {episodes} episodes of {groups} group{'s' * (groups != 1)}, reward {reward(mean)}, {least:g} to {most:g}"
    title += f"; {failed} more failed (--failed)" if failed else ""
    query = f"SELECT e.id{played} GROUP BY e.id ORDER BY {BY[order]} LIMIT ?"
    return EpisodeSelection(title, _ids(db, query, value, count))


def _failed(db: ReadConnection, name: str, where: str, value: object, count: int) -> EpisodeSelection:
    if where:
        found = f"{EPISODES}{where} AND {HAS_FAILED}"
        (failed,) = db.one(f"SELECT count(*){found}", value) or (0,)
        ids = _ids(db, f"SELECT e.id{found} ORDER BY e.rowid DESC LIMIT ?", value, count)
    else:
        every = [id for id, _ in db.newest_first(FAILED, LOOKED_AT, LOOKED_AT // len(db.parts))]
        failed, ids = len(every), tuple(every[:count])
    return EpisodeSelection(f"{failed} episodes of {name} failed" if failed else f"no episode of {name} failed", ids)


def _newest_trained(db: ReadConnection) -> int | None:
    return (db.one("SELECT max(trained_at) FROM groups") or (None,))[0]


def _ids(db: ReadConnection, query: str, *values: object) -> tuple[str, ...]:
    return _distinct(id for (id,) in db.all(query, *values))


def _distinct(ids: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(ids))
