"""Reading the files of a whole buffer as if they were one.

    buffer.sqlite    of a buffer of one process; with shards their clock's: versions and commits
    buffer-1.sqlite  of a shard: its groups, their episodes and trajectories, and its part of each commit

Invariants:
- Only reads; the run may be active. A buffer of one process is read as it is.
- Of several files every table is there as a temporary view of the same name: rows of groups come from the shards, versions from the
  clock. The views of `schema` are made over these, so a query finds the same columns under the same names.
- A row of a shard has its `rowid` there times the number of shards, plus the shard's index: no two rows have the same one. Within a
  shard they rise with time, between shards they do not. What follows new rows, or reads the newest, does so in each of `parts` by
  itself, where `rowid` is a key.
- Each file is read as of one instant. The ledger of each balances by itself, so their sum does.
"""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

from .schema import SCHEMA, connect, require_schema

MAIN = "main"  # SQLite's name of the file that was opened first
# Tables of which each shard has rows of its own, and their columns besides a `rowid`.
UNITED = ("groups", "episodes", "trajectories", "failed", "archive")
VIEWS = re.compile(r"CREATE VIEW IF NOT EXISTS (sampled|accounts|ledger) AS.*?;", re.DOTALL)
COMMITS = (
    "CREATE TEMP VIEW commits AS SELECT version, time, coalesce((SELECT sum(part.groups) FROM ({parts}) AS part"
    " WHERE part.version = made.version), 0) AS groups, max_staleness, groups_per_batch, rolled_back FROM main.commits AS made"
)


def shard_paths(path: Path) -> list[Path]:
    """The files that hold the groups of the buffer at `path`: those of its shards, by number, or `path` itself."""
    numbered = (
        (found.stem.removeprefix(f"{path.stem}-"), found) for found in path.parent.glob(f"{path.stem}-*{path.suffix}")
    )
    return [found for _, found in sorted((int(n), found) for n, found in numbered if n.isdecimal())] or [path]


def shard_path(path: Path, group: int) -> Path:
    """The one that holds a group."""
    paths = shard_paths(path)
    return paths[group % len(paths)]


def parts(path: Path) -> list[str]:
    """What the files with groups are called in a connection of `connect_run`."""
    paths = shard_paths(path)
    return [MAIN] if paths == [path] else [f"shard{number}" for number in range(1, len(paths) + 1)]


def shard_index(part: str) -> int:
    """Of a part, from 0."""
    return 0 if part == MAIN else int(part.removeprefix("shard")) - 1


def read_mode(path: Path, *, active: bool) -> str:
    """How to open the files of the buffer at `path`, as in SQLite's URIs; `active` where a process may write to the run. Those of a
    run that is over are immutable: no lock is taken and no file appears beside them, so that their folder may be read-only. Where a
    killed run left a WAL they are not, because rows would be missing."""
    wals = [file.with_name(file.name + "-wal") for file in {path, *shard_paths(path)}]
    return "ro" if active or any(wal.exists() and wal.stat().st_size for wal in wals) else "ro&immutable=1"


def connect_run(path: Path, mode: str) -> sqlite3.Connection:
    """A connection to all files of the buffer at `path`; `mode` as in SQLite's URIs. Raises StoreError, or sqlite3.Error."""
    db = connect(path, mode)
    try:
        require_schema(db, path)
        if (shards := shard_paths(path)) != [path]:
            _unite(db, dict(zip(parts(path), shards, strict=True)), mode)
    except BaseException:
        db.close()
        raise
    return db


def _unite(db: sqlite3.Connection, shards: dict[str, Path], mode: str) -> None:
    """`shards` by their names in the connection."""
    names = list(shards)
    for name, shard in shards.items():
        db.execute(f"ATTACH ? AS {name}", (f"{shard.absolute().as_uri()}?mode={mode}",))
        require_schema(db, shard, name)
    for table in UNITED:
        rowid = "" if table == "archive" else f"rowid * {len(names)} + {{index}} AS rowid, "
        rows = (f"SELECT {rowid.format(index=at)}* FROM {name}.{table}" for at, name in enumerate(names))
        db.execute(f"CREATE TEMP VIEW {table} AS {' UNION ALL '.join(rows)}")
    db.execute(
        COMMITS.format(parts=" UNION ALL ".join(f"SELECT version, groups FROM {name}.commits" for name in names))
    )
    for view in VIEWS.finditer(SCHEMA):
        db.execute(view[0].replace("CREATE VIEW IF NOT EXISTS", "CREATE TEMP VIEW"))
