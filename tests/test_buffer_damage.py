"""Files that cannot be used, disks that are full, rows that are damaged: each is a named error, and what was accepted stays."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from slipstream.buffer import store as store_module
from slipstream.buffer.admission import ReplayCounters
from slipstream.buffer.group_table import Episode, Group
from slipstream.buffer.ledger import Ledger
from slipstream.buffer.ledger_report import ledger_report, ledgers_by_version
from slipstream.buffer.store import Store, WriteBatch
from slipstream.errors import StoreError
from slipstream.tests.episodes import trajectory_of
from slipstream.tests.stores import entire, in_child, new_trajectory, opened, play, segments, sql

NOBODY = 65534


def one_line(error: pytest.ExceptionInfo[StoreError], path: Path) -> None:
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


# --- files that cannot be used -------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 99])
def test_another_schema_is_refused_and_left_alone(tmp_path: Path, version: int) -> None:
    path = tmp_path / "buffer.sqlite"
    Store(path).close()
    sql(path, f"PRAGMA user_version = {version}")
    for opening in (Store, ledger_report):
        with pytest.raises(StoreError, match=f"has schema {version}, this program knows") as error:
            opening(path)
        one_line(error, path)
    assert sql(path, "PRAGMA user_version") == [(version,)]


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database at all\n" * 200)
    for opening in (Store, ledger_report):
        with pytest.raises(StoreError, match="not a database") as error:
            opening(path)
        one_line(error, path)
    assert path.read_text().startswith("not a database")


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "no" / "buffer.sqlite"
    with pytest.raises(StoreError, match="unable to open") as error:
        Store(missing)
    one_line(error, missing)


def test_another_writer_that_holds_the_file_is_an_error_not_a_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.buffer.schema.BUSY_S", 0.05)
    path = tmp_path / "buffer.sqlite"
    store = Store(path)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="locked") as error:
        store.save(WriteBatch.of(ReplayCounters(version=1), []))
    one_line(error, path)
    other.execute("ROLLBACK")
    store.save(WriteBatch.of(ReplayCounters(version=1), []))


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """A folder that other users may look into; those of pytest are closed to them."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("there", [False, True])
def test_a_read_only_folder_is_named(elsewhere: Path, there: bool) -> None:
    path = elsewhere / "run" / "buffer.sqlite"
    path.parent.mkdir()
    if there:
        play(path, 1)
        path.chmod(0o444)
    path.parent.chmod(0o555)

    def work() -> object:
        if os.geteuid() == 0:  # root may write everywhere
            os.setgroups([])
            os.setuid(NOBODY)
        with opened(path) as store:
            return store.save(WriteBatch.of(ReplayCounters(version=1), []))

    said = in_child(work)
    assert said.startswith("StoreError: cannot ")
    assert str(path) in said
    assert any(word in said for word in ("unable to open", "readonly"))


def small_disk_by_pages(monkeypatch: pytest.MonkeyPatch, pages: int) -> None:
    """SQLite finds the disk full at so many pages."""
    connect = store_module.connect

    def connect_small(path: Path, mode: str) -> sqlite3.Connection:
        db = connect(path, mode)
        db.execute(f"PRAGMA max_page_count = {pages}")
        return db

    monkeypatch.setattr(store_module, "connect", connect_small)


def fill(path: Path) -> tuple[int, str]:
    """Save groups until it fails: how many were saved, and what the error said."""
    saved = 0
    with opened(path) as store:
        try:
            while True:
                e = f"{saved}.0.0"
                sent = trajectory_of(e, {0: 5000})
                episode = Episode(e, account="ready", generated={0: 5000}, kept={0: 5000}, settled=True)
                store.save(
                    WriteBatch.of(
                        ReplayCounters(next_group=saved + 1),
                        entire(Group(saved, state="ready", episodes={e: episode})),
                        [new_trajectory(e, sent)],
                    )
                )
                saved += 1
        except StoreError as error:
            still = store.load()[0].next_group
            assert still == saved, "what was accepted cannot be read any more"
            assert store.trajectories(saved - 1)[0].sampled == 5000
            return saved, str(error)


def whole(path: Path, saved: int) -> None:
    with opened(path) as store:
        clock, groups = store.load()
        assert clock.next_group == len(groups) == saved
        assert [t.sampled for g in groups for t in store.trajectories(g.id)] == [5000] * saved
        store.save(WriteBatch.of(ReplayCounters(next_group=saved), []))  # there is room again
    accounts = ledger_report(path)
    assert accounts.balances
    assert accounts.total == Ledger(generated=5000 * saved, ready=5000 * saved)
    assert sql(path, "PRAGMA integrity_check") == [("ok",)]


def test_a_full_database_is_named_and_what_was_accepted_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "buffer.sqlite"
    with monkeypatch.context() as patched:
        small_disk_by_pages(patched, 60)
        saved, said = fill(path)
    assert said == f"cannot write the buffer {path}: database or disk is full"
    assert 10 < saved < 1000
    whole(path, saved)


@pytest.mark.parametrize("limit", [400_000, 1_000_000, 6_000_000])
def test_a_disk_that_takes_no_more_is_named_and_what_was_accepted_stays(tmp_path: Path, limit: int) -> None:
    """No file may become larger: the log cannot, or the log can and that of arrays cannot."""
    path = tmp_path / "buffer.sqlite"

    def work() -> object:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        return msgspec.json.encode(fill(path)).decode()

    saved, said = msgspec.json.decode(in_child(work), type=tuple[int, str])
    assert said.startswith(f"cannot write the buffer {path}: ")
    assert any(word in said for word in ("disk I/O error", "full", "File too large"))
    assert saved > 1
    whole(path, saved)


# --- damage --------------------------------------------------------------------------------------------------------


def damage(path: Path, statement: str, *values: object) -> None:
    play(path, 2, checkpointed=False)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        assert db.execute(statement, values).rowcount == 1


def read_all(path: Path) -> None:
    """What the service reads when it starts, and for a batch."""
    with opened(path) as store:
        _, groups = store.load()
        ledgers_by_version(path)
        for group in groups:
            store.trajectories(group.id)


@pytest.mark.parametrize(
    ("what", "statement", "values"),
    [
        ("trajectory 1.0.1.0", "UPDATE trajectories SET header = ? WHERE id = '1.0.1.0'", (b"\x02junk",)),
        ("trajectory 1.0.1.0", "UPDATE trajectories SET header = ? WHERE id = '1.0.1.0'", (b"",)),
        ("trajectory 1.0.1.0", "UPDATE trajectories SET header = 'text' WHERE id = '1.0.1.0'", ()),
        ("trajectory 1.0.1.0", "UPDATE trajectories SET header = substr(header, 1, 40) WHERE id = '1.0.1.0'", ()),
        (
            "trajectory 1.0.1.0",
            "UPDATE trajectories SET header = (SELECT header FROM trajectories WHERE id = '0.0.0.0') WHERE id = '1.0.1.0'",
            (),
        ),
        (
            "trajectory 1.0.1.0",
            "UPDATE trajectories SET header = (SELECT header FROM trajectories WHERE id = '1.0.0.0') WHERE id = '1.0.1.0'",
            (),
        ),
        ("trajectory 0.0.0.0", "UPDATE trajectories SET arrays = 'here' WHERE id = '0.0.0.0'", ()),
        ("trajectory 0.0.0.0", "UPDATE trajectories SET arrays = 1 << 61 WHERE id = '0.0.0.0'", ()),
        ("trajectory 0.0.0.0", "UPDATE trajectories SET arrays = ~(1 << 63) WHERE id = '0.0.0.0'", ()),
        ("trajectory 0.0.0.0", "UPDATE trajectories SET arrays = NULL WHERE id = '0.0.0.0'", ()),
        ("trajectory 0.0.0.0", "UPDATE trajectories SET length = 'x' WHERE id = '0.0.0.0'", ()),
        ("trajectory 0.0.0.0", "UPDATE trajectories SET arrays = -8 WHERE id = '0.0.0.0'", ()),
        ("trajectory 0.0.0.0", "UPDATE trajectories SET arrays = arrays + 4 WHERE id = '0.0.0.0'", ()),
        ("trajectory 0.0.0.0", "UPDATE trajectories SET length = length + 1 WHERE id = '0.0.0.0'", ()),
        ("trajectory 0.0.0.0", "UPDATE trajectories SET length = ? WHERE id = '0.0.0.0'", (1 << 40,)),
        ("episode 1.0.1", "UPDATE episodes SET generated = '{' WHERE id = '1.0.1'", ()),
        ("episode 1.0.1", "UPDATE episodes SET generated = '{\"0\": \"many\"}' WHERE id = '1.0.1'", ()),
        ("episode 1.0.1", "UPDATE episodes SET kept = '[1, 2]' WHERE id = '1.0.1'", ()),
        ("episode 1.0.1", "UPDATE episodes SET kept = ? WHERE id = '1.0.1'", (b"\xff\xfe",)),
        ("episode 1.0.1", "UPDATE episodes SET kept = 12 WHERE id = '1.0.1'", ()),
        ("episode 1.0.1", "UPDATE episodes SET outcome = '{\"kind\": \"won\"}' WHERE id = '1.0.1'", ()),
        ("episode 1.0.1", "UPDATE episodes SET account = 'lost' WHERE id = '1.0.1'", ()),
        ("episode 1.0.1", "UPDATE episodes SET loss_from = 'x' WHERE id = '1.0.1'", ()),
        ("group 1", "UPDATE groups SET state = 'gone' WHERE id = 1", ()),
        ("group 1", "UPDATE groups SET attempt = 1.5 WHERE id = 1", ()),
        ("the counters", "UPDATE counters SET value = '{'", ()),
        ("the counters", 'UPDATE counters SET value = \'{"version": "three"}\'', ()),
        ("the counters", 'UPDATE counters SET value = \'{"version": 2, "next_group": 2}\'', ()),
        ("the counters", "DELETE FROM counters", ()),
    ],
)
def test_a_damaged_row_is_named(tmp_path: Path, what: str, statement: str, values: tuple[object, ...]) -> None:
    path = tmp_path / "buffer.sqlite"
    damage(path, statement, *values)
    with pytest.raises(StoreError, match=f"damaged at {what}: ") as error:
        read_all(path)
    one_line(error, path)


@pytest.mark.parametrize(
    "harm",
    [
        lambda file: file.unlink(),
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(file.read_bytes()[:-1]),
        lambda file: file.write_bytes(b"\xff" * file.stat().st_size),
    ],
)
def test_damaged_arrays_are_named_and_their_place_is_not_used_again(
    tmp_path: Path, harm: Callable[[Path], object]
) -> None:
    path = tmp_path / "buffer.sqlite"
    play(path, 2, checkpointed=False)
    (file,) = segments(path)
    whole = file.read_bytes()
    harm(file)
    with pytest.raises(StoreError, match=r"damaged at trajectory \d\.0\.\d\.0: ") as error:
        read_all(path)
    one_line(error, path)
    sent = trajectory_of("2.0.1", {2: 5})
    with opened(path) as store:
        store.save(WriteBatch.of(store.load()[0], [], [new_trajectory("2.0.1", sent)]))
    with file.open("r+b" if file.exists() else "wb") as again:  # as from a copy of the file
        again.write(whole)
    read_all(path)
    with opened(path) as store:
        assert store.trajectories(2)[1].sampled == 5


@pytest.mark.parametrize("column", ["generated", "kept"])
def test_a_damaged_row_that_nobody_loads_any_more_is_named_too(tmp_path: Path, column: str) -> None:
    path = tmp_path / "buffer.sqlite"
    play(path, 2)
    sql(path, f"UPDATE episodes SET {column} = '{{' WHERE id = '1.0.1'")
    for reading in (ledgers_by_version, ledger_report):
        with pytest.raises(StoreError, match=r"damaged at episode 1\.0\.1: ") as error:
            reading(path)
        one_line(error, path)


def test_a_damaged_page_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "buffer.sqlite"
    play(path, 30)
    data = bytearray(path.read_bytes())
    data[4096:] = bytes(len(data) - 4096)
    path.write_bytes(data)
    with pytest.raises(StoreError, match=r"malformed|not a database|disk I/O") as error:
        read_all(path)
    one_line(error, path)
