"""The audit of a run under faults: SQL over the buffer's file and the audit logs of workers and learners.

Invariants:
- No code is shared with the buffer: tables are read by their names, headers as plain msgpack.
- A check is a set of queries for violations (`audit_checks`); every row found is a problem in words.
- Groups that the buffer has archived are compared with the sums in its archive.
"""

from __future__ import annotations

import bisect
import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from ..configs import load, run_config
from ..errors import StoreError
from .audit_checks import CHECKS, TABLES
from .audit_log import (
    BatchTaken,
    CancelReceived,
    CommitFinished,
    Counts,
    DeliveryAcknowledged,
    EpisodeDelivered,
    LearnerRecovered,
    LeaseGranted,
    TokensSampled,
    read,
)

DATABASE = "buffer.sqlite"
"""The file of the buffer, or of the version clock of its shards, by its name: no code is shared with the buffer."""

SHARD_TABLES = ("groups", "episodes", "trajectories", "archive", "ledger")
"""Tables and views of which each of the buffer's shards (`buffer.shards`) has rows of its own."""

SHOWN_PROBLEMS = 5
"""Violations of one check that its `problems` list."""


class AuditCheck(msgspec.Struct, frozen=True):
    """One guarantee: `wrong` of `examined` things violate it; `problems` are the first of those."""

    name: str
    examined: int
    wrong: int
    problems: tuple[str, ...]


def audit(run_dir: Path) -> tuple[AuditCheck, ...]:
    """Check every guarantee against the files of the run.

    Raises:
        StoreError: the store has another schema, or an audit log or a trajectory cannot be read.
    """
    try:
        db = sqlite3.connect(":memory:", uri=True)
        try:
            buffer = load(str(run_config(run_dir))).buffer
            buffer_shards = [run_dir / f"buffer-{number}.sqlite" for number in range(1, buffer.shards + 1)]
            if buffer.shards == 1:
                _attach(db, run_dir / DATABASE, "store")
            else:
                _copy_shards(db, run_dir / DATABASE, buffer_shards)
            db.executescript(TABLES)
            folders = [path.with_suffix(".arrays") for path in buffer_shards]
            _read_store(db, [run_dir / "buffer.arrays"] if buffer.shards == 1 else folders)
            _read_workers(db, run_dir)
            _read_learner(db, run_dir)
            rules = buffer.group_size, buffer.max_staleness, buffer.groups_per_batch, buffer.shards
            db.execute("INSERT INTO rules VALUES (?, ?, ?, ?)", rules)
            _read_settings(db, run_dir / "settings.jsonl")
            return tuple(_check(db, *check) for check in CHECKS)
        finally:
            db.close()
    except sqlite3.Error as error:
        raise StoreError(f"{run_dir / DATABASE} cannot be audited: {error}") from None


def _check(db: sqlite3.Connection, name: str, examined: str, queries: tuple[str, ...]) -> AuditCheck:
    found = [problem for query in queries for (problem,) in db.execute(query)]
    return AuditCheck(name, db.execute(examined).fetchone()[0], len(found), tuple(found[:SHOWN_PROBLEMS]))


def _attach(db: sqlite3.Connection, path: Path, name: str) -> None:
    db.execute(f"ATTACH ? AS {name}", (f"{path.absolute().as_uri()}?mode=ro",))


def _copy_shards(db: sqlite3.Connection, clock: Path, shards: Sequence[Path]) -> None:
    """Make `store` in memory: the rows of all the buffer's shards, and the commits of their clock with the groups of all."""
    db.execute("ATTACH ':memory:' AS store")
    for number, path in enumerate(shards):
        _attach(db, path, "shard")
        for table in SHARD_TABLES:
            verb = f"INSERT INTO store.{table}" if number else f"CREATE TABLE store.{table} AS"
            db.execute(f"{verb} SELECT * FROM shard.{table}")
        parts = {"counters": f"{number} AS id, value", "commits": "version, groups"}
        for table, columns in parts.items():
            name = "parts" if table == "commits" else table
            verb = f"INSERT INTO store.{name}" if number else f"CREATE TABLE store.{name} AS"
            db.execute(f"{verb} SELECT {columns} FROM shard.{table}")
        db.commit()
        db.execute("DETACH shard")
    _attach(db, clock, "shard")
    db.execute(
        "CREATE TABLE store.commits AS SELECT version, time, coalesce((SELECT sum(groups) FROM store.parts p"
        " WHERE p.version = c.version), 0) AS groups, max_staleness, groups_per_batch, rolled_back FROM shard.commits c"
    )
    db.commit()
    db.execute("DETACH shard")


def _read_store(db: sqlite3.Connection, arrays: Sequence[Path]) -> None:
    """Fill `spans` and `masks`. A header is one format byte and msgpack. `arrays` are the folders of the shards, in their order."""
    rows = db.execute("SELECT id, episode_id, header, length, arrays, group_id FROM store.trajectories").fetchall()
    folders = [
        sorted((int(path.name, 16), path) for path in folder.iterdir()) if folder.exists() else [] for folder in arrays
    ]
    for trajectory, episode, header, length, position, group in rows:
        segments = folders[group % len(folders)]
        try:
            spans = msgspec.msgpack.decode(header[1:])["version_spans"]
        except (msgspec.MsgspecError, KeyError, TypeError) as error:
            raise StoreError(f"the header of trajectory {trajectory} cannot be read: {error}") from None
        counts: Counts = {}
        for start, end, version, *_ in spans:
            counts[version] = counts.get(version, 0) + end - start
        db.executemany(
            "INSERT INTO spans VALUES (?, ?, ?, ?)", [(trajectory, episode, *item) for item in counts.items()]
        )
        sampled = None if position is None else _mask(segments, position, length).count(1)
        db.execute("INSERT INTO masks VALUES (?, ?, ?)", (trajectory, episode, sampled))


def _mask(segments: Sequence[tuple[int, Path]], position: int, length: int) -> bytes:
    """The loss mask, one byte per token, of the arrays at `position`; token ids and log-probs, four bytes each, lie before it.
    Empty where the segment is gone. A segment's name is the position at which it begins."""
    at = bisect.bisect_right(segments, position, key=lambda segment: segment[0]) - 1
    if at < 0:
        return b""
    start, path = segments[at]
    with path.open("rb") as file:
        return os.pread(file.fileno(), length, position - start + 8 * length)


def _read_workers(db: sqlite3.Connection, run_dir: Path) -> None:
    """Fill `leased`, `reported`, `delivered`, `delivered_tokens` and `branches`."""
    for records in read(run_dir, "worker-"):
        answered = {record.number for record in records if isinstance(record, CancelReceived)}
        acknowledged = {record.episode for record in records if isinstance(record, DeliveryAcknowledged)}
        for record in records:
            match record:
                case LeaseGranted(group=group, attempt=attempt, members=members, env=env, task=task):
                    rows = [(group, attempt, member, env, task) for member in members]
                    db.executemany("INSERT INTO leased VALUES (?, ?, ?, ?, ?)", rows)
                case TokensSampled(number=number, generated=generated):
                    rows = [(e, v, n, number in answered) for e, counts in generated.items() for v, n in counts.items()]
                    db.executemany("INSERT INTO reported VALUES (?, ?, ?, ?)", rows)
                case EpisodeDelivered(episode=episode, generated=generated, trajectories=trajectories):
                    db.execute("INSERT INTO delivered VALUES (?, ?)", (episode, episode in acknowledged))
                    rows = [(episode, *item) for item in generated.items()]
                    db.executemany("INSERT INTO delivered_tokens VALUES (?, ?, ?)", rows)
                    rows = [(t, episode, *item) for t, counts in trajectories.items() for item in counts.items()]
                    db.executemany("INSERT INTO branches VALUES (?, ?, ?, ?)", rows)
                case _:
                    pass
    for table, columns in (
        ("reported", "episode, version"),
        ("delivered_tokens", "episode, version"),
        ("branches", "id"),
    ):
        db.execute(f"CREATE INDEX {table}_key ON {table} ({columns})")
    db.execute("CREATE INDEX spans_key ON spans (episode, version)")
    db.execute("CREATE INDEX spans_id ON spans (id)")
    db.execute("CREATE INDEX masks_id ON masks (id)")


def _read_learner(db: sqlite3.Connection, run_dir: Path) -> None:
    """Fill `taken`, `commits_made`, `trained_on` and `steps`; a learner that recovers forgets the commits that its weights do not
    hold."""
    commits: dict[int, BatchTaken] = {}
    for records in read(run_dir, "learner-0."):
        batch: BatchTaken | None = None
        for record in records:
            match record:
                case LearnerRecovered(kept=kept):
                    commits = {made: taken for made, taken in commits.items() if made <= kept}
                case BatchTaken(episodes=episodes):
                    batch = record
                    groups = {int(episode.partition(".")[0]) for episode in episodes}
                    db.executemany("INSERT OR IGNORE INTO taken VALUES (?)", [(group,) for group in groups])
                case CommitFinished(version=version) if batch is not None and batch.version == version:
                    commits[version + 1] = batch
                case _:
                    pass
    for made, taken in commits.items():
        db.execute("INSERT INTO commits_made VALUES (?, ?)", (made, taken.oldest))
        rows = [
            (made, episode, version, tokens, version >= taken.oldest and episode not in taken.withheld)
            for episode, counts in taken.episodes.items()
            for version, tokens in counts.items()
        ]
        db.executemany("INSERT INTO trained_on VALUES (?, ?, ?, ?, ?)", rows)
    db.execute("CREATE INDEX trained_on_key ON trained_on (episode)")
    db.executemany("INSERT INTO steps VALUES (?, ?, ?)", _steps(run_dir / "metrics.jsonl"))


def _read_settings(db: sqlite3.Connection, path: Path) -> None:
    """Fill `changes`."""
    for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else ():
        row = msgspec.json.decode(line)
        values = (row["version"], row["key"], row["old"], row["new"])
        db.execute("INSERT INTO changes (version, key, old, new) VALUES (?, ?, ?, ?)", values)


def _steps(path: Path) -> Iterator[tuple[int, int, int]]:
    """(version, tokens trained, largest staleness) of every step in metrics, repeated ones included."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else ()
    for line in lines:
        row = msgspec.json.decode(line)
        if "evaluation" not in row:
            yield row["version"], row["tokens_trained"], row["staleness_max"]
