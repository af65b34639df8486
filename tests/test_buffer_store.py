"""The durable store: what was saved is there after any crash, and nothing else is."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from slipstream.buffer.admission import Admission
from slipstream.buffer.ledger import Ledger
from slipstream.buffer.replay import Group, Replay
from slipstream.buffer.store import Clock, CommitRow, Store, ledger_of
from slipstream.buffer.trajectory import FINISHED, Outcome, Trajectory, VersionSpan
from slipstream.errors import StoreError
from slipstream.tests.episodes import trajectory


def clock_of(replay: Replay, checkpointed: int = 0) -> Clock:
    return Clock(replay.version, replay.served, replay.next_group, replay.recovered_from, checkpointed)


def plain(groups: list[Group]) -> dict[int, Group]:
    """Groups without their deadlines, which are in no store, and with sorted episodes."""
    return {g.id: msgspec.structs.replace(g, deadline=0.0, episodes=dict(sorted(g.episodes.items()))) for g in groups}


def test_what_is_loaded_is_what_was_in_memory(tmp_path: Path) -> None:
    for seed in range(8):
        rng = random.Random(seed)
        path = tmp_path / f"{seed}.sqlite"
        replay = Replay(Admission(rng.randint(0, 2), 2), 3, rng.choice(["withhold", "wait", "drop"]), 5.0)
        store, now = Store(path), 0.0
        replay.serve(0)
        arrived: list[tuple[str, Trajectory]] = []
        for _ in range(150):
            now += 0.2
            running = [e.id for g in replay.groups.values() for e in g.episodes.values() if not e.settled]
            match rng.choice(
                ["grant", "progress", "deliver", "deliver", "fail", "release", "expire", "step", "recover"]
            ):
                case "grant":
                    replay.grant(rng.choice("ab"), now, f"wish {now}")
                case "progress" if running:
                    replay.progress(rng.choice("ab"), {rng.choice(running): rng.randint(0, 3)}, now)
                case "deliver" if running:
                    episode = rng.choice(running)
                    if replay.deliver(episode, 3, FINISHED, {replay.served or 0: 3}):
                        arrived.append((episode, trajectory(episode, version=replay.served or 0)))
                case "fail" if running:
                    replay.deliver(rng.choice(running), 3, Outcome("failed", "tool", "fell over"), {})
                case "release" if rng.random() < 0.2:
                    replay.release(rng.choice("ab"), "worker_lost")
                case "expire":
                    replay.expire(now)
                case "step" if replay.take(replay.version):
                    replay.commit(replay.version)
                    replay.serve(replay.version)
                case "recover" if rng.random() < 0.2:
                    replay.recover(0)
            store.save(clock_of(replay), replay.drain(), arrived)
            arrived = []
        replay.forget(0)
        running_ledger = replay.ledger.copy()
        assert ledger_of(path) == running_ledger
        store.close()
        store = Store(path)
        clock, groups = store.load()
        assert clock == clock_of(replay)
        assert plain(groups) == plain(list(replay.groups.values()))
        assert ledger_of(path) == running_ledger
        for group in groups:
            kept = {t.id.rsplit(".", 1)[0] for t in store.trajectories(group.id)}
            assert kept >= {e.id for e in group.in_account("ready") + group.in_account("trained")}
        store.close()


def test_trajectories_come_back_by_member_and_branch(tmp_path: Path) -> None:
    store = Store(tmp_path / "buffer.sqlite")
    sent = [trajectory("0.0.1", 1), trajectory("0.0.1", 0), trajectory("0.0.0", 0, sampled=5)]
    store.save(Clock(), [Group(0, episodes={})], [(t.id.rsplit(".", 1)[0], t) for t in sent])
    got = store.trajectories(0)
    assert [t.id for t in got] == ["0.0.0.0", "0.0.1.0", "0.0.1.1"]
    assert got[0].token_ids.tolist() == list(range(6))
    for t in got:
        t.check()
    assert store.trajectories(1) == []
    with pytest.raises(StoreError, match="UNIQUE"):  # written once
        store.save(Clock(), [], [("0.0.0", sent[2])])


def test_which_kv_took_part_comes_back(tmp_path: Path) -> None:
    store = Store(tmp_path / "buffer.sqlite")
    spans = (VersionSpan(1, 2, 4), VersionSpan(2, 3, 4, 1), VersionSpan(3, 4, 5, 5))
    store.save(
        Clock(),
        [Group(0, episodes={})],
        [("0.0.0", msgspec.structs.replace(trajectory("0.0.0"), version_spans=spans))],
    )
    (got,) = store.trajectories(0)
    got.check()
    assert got.version_spans == spans
    assert got.mixed().tolist() == [False, False, True, False]


def test_a_file_of_an_earlier_format_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "buffer.sqlite"
    Store(path).close()
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 1")
    with pytest.raises(StoreError, match="has schema 1, this program knows 2"):
        Store(path)


def test_a_save_is_whole_or_not_at_all(tmp_path: Path) -> None:
    store = Store(tmp_path / "buffer.sqlite")
    store.save(Clock(), [], commits=[CommitRow(1, 0.0, 1)])
    with pytest.raises(StoreError, match="UNIQUE"):
        store.save(Clock(version=9), [Group(0, episodes={})], commits=[CommitRow(1, 0.0, 1)])
    assert store.load() == (Clock(), [])
    store.save(Clock(version=2), [])
    assert store.load()[0].version == 2


def test_a_group_that_is_checkpointed_but_not_served_is_outstanding_after_a_restart(tmp_path: Path) -> None:
    store = Store(tmp_path / "buffer.sqlite")
    groups = [Group(i, state="trained", trained_at=i + 1, episodes={}) for i in range(3)]
    store.save(Clock(version=3, served=1, next_group=3, checkpointed=3), groups)
    assert [g.id for g in store.load()[1]] == [1, 2]
    store.save(Clock(version=3, served=None, next_group=3, checkpointed=3), [])
    assert [g.id for g in store.load()[1]] == [0, 1, 2]


def test_a_rollback_marks_the_commits_that_no_longer_count(tmp_path: Path) -> None:
    path = tmp_path / "buffer.sqlite"
    store = Store(path)
    store.save(Clock(), [], commits=[CommitRow(1, 0.0, 2), CommitRow(2, 0.0, 2)])
    store.save(Clock(), [], commits=[CommitRow(3, 0.0, 2)], rolled_back_to=1)
    store.save(Clock(), [], commits=[CommitRow(5, 0.0, 2)])
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT version, rolled_back FROM commits ORDER BY version").fetchall() == [
            (1, 0),
            (2, 1),
            (3, 1),
            (5, 0),
        ]


CHILD = """
import sys
from pathlib import Path
from slipstream.buffer.admission import Admission
from slipstream.buffer.replay import Replay
from slipstream.buffer.store import Clock, CommitRow, Store
from slipstream.buffer.trajectory import FINISHED

store, replay = Store(Path(sys.argv[1])), Replay(Admission(0, 1), 2, "withhold", 5.0)
clock, groups = store.load()
replay.version, replay.served, replay.next_group = clock.version, clock.version, clock.next_group
while True:
    group = replay.grant("a", 0.0).group_id
    for member in range(2):
        replay.deliver(f"{group}.0.{member}", 5, FINISHED, {replay.version: 5})
    replay.take(replay.version)
    replay.commit(replay.version)
    replay.serve(replay.version)
    clock = Clock(replay.version, replay.served, replay.next_group)
    store.save(clock, replay.drain(), commits=[CommitRow(replay.version, 0.0, 1)])
    replay.forget(replay.version)
    print(replay.version, flush=True)
"""


def test_a_writer_that_is_killed_leaves_its_last_save_whole(tmp_path: Path) -> None:
    path, said = tmp_path / "buffer.sqlite", 0
    for saves in (1, 37, 150):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, text=True, cwd=tmp_path
        )
        assert child.stdout is not None
        with child.stdout:
            for _ in range(saves):
                said = int(child.stdout.readline())
            os.kill(child.pid, signal.SIGKILL)
            said = max([said, *map(int, (line for line in child.stdout if line.endswith("\n")))])
        assert child.wait() == -signal.SIGKILL
        clock, _ = Store(path).load()
        assert clock.version in (said, said + 1)  # saved, killed before it could say so
        assert clock.next_group == clock.version
        assert ledger_of(path) == Ledger(generated=10 * clock.version, trained=10 * clock.version)
        with sqlite3.connect(path) as db:
            assert db.execute("SELECT count(*) FROM commits").fetchone() == (clock.version,)
            assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_the_ledger_can_be_read_while_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "a #1 50%?.sqlite"  # characters that mean something in an address
    store = Store(path)
    assert path.exists()
    replay = Replay(Admission(0, 1), 2, "withhold", 5.0)
    replay.serve(0)
    replay.grant("a", 0.0)
    replay.progress("a", {"0.0.0": 4}, 0.0)
    store.save(clock_of(replay), replay.drain())
    assert ledger_of(path) == Ledger(generated=4, in_flight=4)
    replay.deliver("0.0.0", 6, Outcome("failed", "tool"), {})
    store.save(clock_of(replay), replay.drain())
    assert ledger_of(path) == Ledger(generated=6, discarded={"failed_tool": 6})


def one_line(error: pytest.ExceptionInfo[StoreError], path: Path) -> None:
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database at all\n" * 200)
    for opening in (Store, ledger_of):
        with pytest.raises(StoreError, match="not a database") as error:
            opening(path)
        one_line(error, path)
    assert path.read_text().startswith("not a database")


def test_a_newer_schema_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "buffer.sqlite"
    Store(path).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreError, match="has schema 99, this program knows 2") as error:
        Store(path)
    one_line(error, path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "no" / "buffer.sqlite"
    with pytest.raises(StoreError, match="unable to open") as error:
        Store(missing)
    one_line(error, missing)
    with pytest.raises(StoreError, match="there is no buffer at") as error:
        ledger_of(missing)
    one_line(error, missing)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="unable to open") as error:
        Store(tmp_path / "buffer.sqlite")
    one_line(error, tmp_path)


def test_another_writer_that_holds_the_file_is_an_error_not_a_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.buffer.store.BUSY_S", 0.05)
    path = tmp_path / "buffer.sqlite"
    store = Store(path)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="locked") as error:
        store.save(Clock(version=1), [])
    one_line(error, path)
    other.execute("ROLLBACK")
    store.save(Clock(version=1), [])


def test_a_database_without_the_tables_has_no_ledger(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE other (x)")
    with pytest.raises(StoreError, match="is not a buffer") as error:
        ledger_of(path)
    one_line(error, path)
