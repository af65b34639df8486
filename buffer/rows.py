"""How groups and episodes are rows of the store, and back; what one transaction stores.

Rows are made when a change is drained, before another thread stores them: groups and episodes change meanwhile.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence

import msgspec

from .group import Changed, Episode, Group
from .ledger import Counts
from .rules import Clock
from .trajectory import Outcome, Trajectory

Row = tuple[object, ...]

REWARD = (
    "CASE WHEN account IN ('ready', 'trained')"
    " THEN (SELECT reward FROM trajectories WHERE episode_id = episodes.id LIMIT 1) END AS reward"
)
"""Of an episode: all its branches say the same."""

CHANGED = "ON CONFLICT (id) DO UPDATE SET " + ", ".join(
    f"{column} = excluded.{column}"
    for column in (
        "account",
        "length",
        "generated",
        "kept",
        "settled",
        "final",
        "withheld",
        "loss_from",
        "reason",
        "outcome",
    )
)
"""Of an episode that is there: id, group and worker stay, so the indices do; `REPLACE` would make it anew in all of them."""


class CommitRow(msgspec.Struct, frozen=True):
    """The step that made `version`, at `time` (seconds since the epoch), from `groups` groups."""

    version: int
    time: float
    groups: int


class Change(msgspec.Struct, frozen=True):
    """What one transaction stores. Groups and episodes are rows already: they change while it is stored.

    Attributes:
        clock: JSON.
        trajectories: new ones, each with the id of its episode.
        rolled_back_to: the commits after this version no longer count.
    """

    clock: str
    groups: Sequence[Row]
    episodes: Sequence[Row]
    trajectories: Sequence[tuple[str, Trajectory]]
    commits: Sequence[CommitRow]
    rolled_back_to: int | None

    @classmethod
    def of(
        cls,
        clock: Clock,
        groups: Iterable[Changed],
        trajectories: Sequence[tuple[str, Trajectory]] = (),
        commits: Sequence[CommitRow] = (),
        rolled_back_to: int | None = None,
    ) -> Change:
        """Groups come with their changed episodes."""
        changed = list(groups)
        return cls(
            msgspec.json.encode(clock).decode(),
            [_group_row(g) for g, _ in changed],
            [_episode_row(g.id, e) for g, episodes in changed for e in episodes],
            trajectories,
            commits,
            rolled_back_to,
        )


def read_clock(row: Sequence[str] | None) -> Clock:
    """Of a run that begins, where there is no row."""
    return msgspec.json.decode(row[0], type=Clock) if row else Clock()


def read_group(row: sqlite3.Row) -> Group:
    """Without its episodes. Raises what msgspec does when the row is not what was written; so do the others."""
    return msgspec.convert(dict(row), Group)


def read_episode(row: sqlite3.Row) -> Episode:
    """From all columns, and `REWARD`."""
    flags = {name: bool(row[name]) for name in ("settled", "final")}
    counts = {name: msgspec.json.decode(row[name], type=Counts) for name in ("generated", "kept")}
    outcome = msgspec.json.decode(row["outcome"], type=Outcome) if row["outcome"] else None
    return msgspec.convert({**dict(row), **flags, **counts, "outcome": outcome}, Episode)


def _group_row(g: Group) -> Row:
    return (g.id, g.env, g.task, g.state, g.attempt, g.wish, g.leased_at, g.trained_at)


def _episode_row(group_id: int, e: Episode) -> Row:
    return (
        e.id,
        group_id,
        e.worker,
        e.account,
        sum(e.generated.values()),
        msgspec.json.encode(e.generated).decode(),
        msgspec.json.encode(e.kept).decode(),
        e.settled,
        e.final,
        e.withheld,
        e.loss_from,
        e.reason,
        msgspec.json.encode(e.outcome).decode() if e.outcome else None,
    )
