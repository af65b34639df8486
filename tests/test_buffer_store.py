"""The durable store: what was saved is there, whole, until it is not needed any more.

Damage and full disks are in `test_buffer_damage`, kills at every statement in `test_buffer_crashes`, random runs through a store in
`test_buffer_replay`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from slipstream.buffer import retention
from slipstream.buffer.admission import ReplayCounters
from slipstream.buffer.group_table import Episode, Group
from slipstream.buffer.ledger_report import LedgerReport, ledger_report
from slipstream.buffer.replay import Replay
from slipstream.buffer.store import CommitRow, Store, WriteBatch
from slipstream.buffer.trajectory import Outcome, Trajectory, VersionSpan
from slipstream.errors import StoreError
from slipstream.tests.episodes import trajectory, trajectory_of
from slipstream.tests.stores import entire, new_trajectory, opened, play, segments, sql


def group_of(*episodes: str, group: int = 0) -> Group:
    return Group(group, episodes={e: Episode(e) for e in episodes})


def test_every_trajectory_is_as_it_was_sent(tmp_path: Path) -> None:
    sent: list[Trajectory] = [trajectory_of("0.0.0", {0: 3, 2: 4}), trajectory_of("0.0.1", {1: 200})]
    with opened(tmp_path / "buffer.sqlite") as store:
        store.save(
            WriteBatch.of(
                ReplayCounters(next_group=1),
                entire(group_of("0.0.0", "0.0.1")),
                [new_trajectory(t.episode, t) for t in sent],
            )
        )
        for ours, theirs in zip(sent, store.trajectories(0), strict=True):
            for name in ("token_ids", "loss_mask", "behavior_logprobs"):
                assert np.array_equal(getattr(ours, name), getattr(theirs, name))
            assert ours.version_spans == theirs.version_spans


def test_experts_are_stored_with_their_tokens(tmp_path: Path) -> None:
    """Among trajectories without any; and a store that opens again writes behind them."""
    path = tmp_path / "buffer.sqlite"
    plain, other = trajectory_of("0.0.0", {0: 3}), trajectory_of("0.0.2", {0: 5})
    experts = np.arange(8 * 2 * 2, dtype=np.uint16).reshape(8, 2, 2)
    routed = msgspec.structs.replace(trajectory_of("0.0.1", {0: 3, 1: 4}), experts=experts)
    group = group_of("0.0.0", "0.0.1", "0.0.2")
    for episode, kept in (("0.0.0", {0: 3}), ("0.0.1", {0: 3, 1: 4}), ("0.0.2", {0: 5})):
        one = group.episodes[episode]
        one.account, one.generated, one.kept = "ready", dict(kept), dict(kept)
    with opened(path) as store:
        sent = [new_trajectory(t.episode, t) for t in (plain, routed)]
        store.save(WriteBatch.of(ReplayCounters(next_group=1), entire(group), sent))
    with opened(path) as store:
        store.save(WriteBatch.of(ReplayCounters(next_group=1), [], [new_trajectory("0.0.2", other)]))
        found = {one.id: one for one in store.trajectories(0)}
        assert sql(path, "SELECT bytes FROM trajectories ORDER BY id") == [(9 * 4,), ((9 + 8) * 8,), (9 * 6,)]
    assert found["0.0.0.0"].experts is found["0.0.2.0"].experts is None
    assert np.array_equal(found["0.0.2.0"].token_ids, other.token_ids)
    stored = found["0.0.1.0"].experts
    assert stored is not None
    assert np.array_equal(stored, experts)
    assert ledger_report(path).miscounted == 0
    assert sql(path, retention.END) == [(9 * 4 + 17 * 8 + 9 * 6,)]


# --- what was saved ------------------------------------------------------------------------------------------------


def test_trajectories_come_back_by_member_and_branch(tmp_path: Path) -> None:
    store = Store(tmp_path / "buffer.sqlite")
    sent = [trajectory("0.0.1", 1), trajectory("0.0.1", 0), trajectory("0.0.0", 0, sampled=5)]
    store.save(
        WriteBatch.of(
            ReplayCounters(next_group=1),
            entire(group_of("0.0.0", "0.0.1")),
            [new_trajectory(t.episode, t) for t in sent],
        )
    )
    got = store.trajectories(0)
    assert [t.id for t in got] == ["0.0.0.0", "0.0.1.0", "0.0.1.1"]
    assert got[0].token_ids.tolist() == list(range(6))
    assert [one.id for one in store.episode("0.0.1")] == ["0.0.1.0", "0.0.1.1"]
    assert store.trajectories(1) == store.episode("0.0.2") == []
    with pytest.raises(StoreError, match="UNIQUE"):  # written once
        store.save(WriteBatch.of(ReplayCounters(), [], [new_trajectory("0.0.0", sent[2])]))
    store.save(WriteBatch.of(ReplayCounters(next_group=1), [], [new_trajectory("0.0.0", trajectory("0.0.0", 1))]))
    assert [one.id for one in store.episode("0.0.0")] == ["0.0.0.0", "0.0.0.1"]


def test_a_save_of_many_rows_needs_no_large_statement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older SQLites take 999 values."""
    monkeypatch.setattr("slipstream.buffer.store.VALUES_AT_ONCE", 40)
    group = group_of(*(f"0.0.{m}" for m in range(20)))
    with opened(tmp_path / "buffer.sqlite") as store:
        statements: list[str] = []
        store._db.set_trace_callback(statements.append)
        store.save(
            WriteBatch.of(
                ReplayCounters(next_group=1), entire(group), [new_trajectory(e, trajectory(e)) for e in group.episodes]
            )
        )
        assert [g.episodes for g in store.load()[1]] == [group.episodes]
        assert len(store.trajectories(0)) == 20
    verbs = [s.split(" VALUES")[0] for s in statements if " VALUES" in s]
    assert verbs.count("INSERT INTO episodes") == 10  # two of 14 values each
    assert verbs.count("INSERT INTO trajectories") == 5  # four of 8 values each


def test_arrays_are_where_they_were_reserved_over_segments_and_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.buffer.segments.SEGMENT_BYTES", 100)
    path, ids = tmp_path / "buffer.sqlite", [f"0.0.{member}" for member in range(6)]
    for number in (0, 1):
        with opened(path) as store:
            for half in (ids[3 * number : 3 * number + 1], ids[3 * number + 1 : 3 * number + 3]):
                new = [new_trajectory(id, trajectory(id), store) for id in half]
                store.save(WriteBatch.of(ReplayCounters(next_group=1), entire(group_of(*half)), new))
                for one in new:
                    (found,) = store.episode(one.episode_id)
                    assert found.row == one.row
    assert len(segments(path)) == 2
    with opened(path) as store:
        first, second = (new_trajectory(id, trajectory(id), store) for id in ("1.0.0", "1.0.1"))
        with pytest.raises(StoreError, match=r"trajectory 1\.0\.1\.0 is stored at 216, and 252 was reserved"):
            store.save(WriteBatch.of(ReplayCounters(next_group=2), entire(group_of("1.0.1", group=1)), [second]))
        assert first.row.position == 216


def test_which_kv_took_part_comes_back(tmp_path: Path) -> None:
    store = Store(tmp_path / "buffer.sqlite")
    spans = (VersionSpan(1, 2, 4), VersionSpan(2, 3, 4, 1), VersionSpan(3, 4, 5, 5))
    sent = msgspec.structs.replace(trajectory("0.0.0"), version_spans=spans)
    store.save(WriteBatch.of(ReplayCounters(next_group=1), entire(group_of("0.0.0")), [new_trajectory("0.0.0", sent)]))
    (got,) = store.trajectories(0)
    assert got.version_spans == spans
    assert [span.mixed for span in got.version_spans] == [False, True, False]


def test_groups_episodes_and_the_clock_come_back(tmp_path: Path) -> None:
    outcome = Outcome("failed", "tool", "fell over: ä \0 \n")
    episode = Episode("4.1.0", "a", "discarded", {0: 3, 7: 2}, {7: 1}, True, True, "late", 6, "failed_tool", outcome)
    episode.delivered_time = 1.8e9 + 3.25
    group = Group(4, 1, 9, "discarded", 1, "lease_request", 6, episodes={"4.0.0": Episode("4.0.0"), "4.1.0": episode})
    group.leased_time, group.ready_time = 1.8e9 + 0.5, 1.8e9 + 3.5  # and never taken
    clock = ReplayCounters(8, 7, 5, 6, 3, [4, 9], [3, 1])
    with opened(tmp_path / "buffer.sqlite") as store:
        assert store.load() == (ReplayCounters(), [])
        store.save(WriteBatch.of(clock, entire(group)))
    with opened(tmp_path / "buffer.sqlite") as store:
        assert store.load() == (clock, [group])


def test_commits_say_what_was_in_force(tmp_path: Path) -> None:
    store = Store(tmp_path / "buffer.sqlite")
    store.save(WriteBatch.of(ReplayCounters(), [], commits=[CommitRow(1, 0.5, 8, 2, 8), CommitRow(2, 1.5, 4, 1, 4)]))
    store.save(WriteBatch.of(ReplayCounters(), [], rolled_back_to=1))
    rows = sql(tmp_path / "buffer.sqlite", "SELECT * FROM commits ORDER BY version")
    assert rows == [(1, 0.5, 8, 2, 8, 0), (2, 1.5, 4, 1, 4, 1)]


def test_a_save_is_whole_or_not_at_all(tmp_path: Path) -> None:
    store = Store(tmp_path / "buffer.sqlite")
    store.save(WriteBatch.of(ReplayCounters(), [], commits=[CommitRow(1, 0.0, 1, 0, 1)]))
    with pytest.raises(StoreError, match="UNIQUE"):
        store.save(
            WriteBatch.of(
                ReplayCounters(version=9, next_group=1), entire(group_of("0.0.0")), commits=[CommitRow(1, 0.0, 1, 0, 1)]
            )
        )
    assert store.load() == (ReplayCounters(), [])
    huge = Group(0, episodes={"0.0.0": Episode("0.0.0", generated={0: 1 << 62, 1: 1 << 62})})
    with pytest.raises(StoreError, match="too large"):
        store.save(WriteBatch.of(ReplayCounters(version=9, next_group=1), entire(huge)))
    assert store.load() == (ReplayCounters(), [])
    store.save(WriteBatch.of(ReplayCounters(version=2), []))
    assert store.load()[0].version == 2


def test_a_group_that_is_checkpointed_but_not_served_is_outstanding_after_a_restart(tmp_path: Path) -> None:
    store = Store(tmp_path / "buffer.sqlite")
    groups = [Group(i, state="trained", trained_at=i + 1, episodes={}) for i in range(3)]
    store.save(WriteBatch.of(ReplayCounters(version=3, served=1, next_group=3, checkpointed=3), entire(*groups)))
    assert [g.id for g in store.load()[1]] == [1, 2]
    store.save(WriteBatch.of(ReplayCounters(version=3, served=None, next_group=3, checkpointed=3), []))
    assert [g.id for g in store.load()[1]] == [0, 1, 2]


def test_a_settled_group_comes_back_while_somebody_may_report_about_it(tmp_path: Path) -> None:
    store = Store(tmp_path / "buffer.sqlite")
    groups = [Group(i, state="discarded", episodes={f"{i}.0.0": Episode(f"{i}.0.0", settled=i == 0)}) for i in range(2)]
    store.save(WriteBatch.of(ReplayCounters(next_group=2), entire(*groups)))
    assert [g.id for g in store.load()[1]] == [1]


def test_a_rollback_marks_the_commits_that_no_longer_count(tmp_path: Path) -> None:
    path = tmp_path / "buffer.sqlite"
    store = Store(path)
    store.save(WriteBatch.of(ReplayCounters(), [], commits=[CommitRow(1, 0.0, 2, 0, 1), CommitRow(2, 0.0, 2, 0, 1)]))
    store.save(WriteBatch.of(ReplayCounters(), [], commits=[CommitRow(3, 0.0, 2, 0, 1)], rolled_back_to=1))
    store.save(WriteBatch.of(ReplayCounters(), [], commits=[CommitRow(5, 0.0, 2, 0, 1)]))
    rows = sql(path, "SELECT version, rolled_back FROM commits ORDER BY version")
    assert rows == [(1, 0), (2, 1), (3, 1), (5, 0)]


# --- a bounded file ------------------------------------------------------------------------------------------------


def shrunk(path: Path, limit: int, over: int) -> int:
    """Shrink until there is nothing to do; how often it was asked."""
    with opened(path) as store:
        asked = 1
        while store.shrink(limit, over):
            asked += 1
    return asked


def size(path: Path) -> int:
    """Bytes of all files."""
    return sum(file.stat().st_size for file in (path, *segments(path)))


def lengths(accounts: LedgerReport) -> tuple[float, float]:
    return round(accounts.generated_length, 9), round(accounts.trained_length or 0.0, 9)


def test_a_file_below_its_limit_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "buffer.sqlite"
    replay = play(path, 3)
    assert shrunk(path, 1 << 30, replay.version) == 1
    assert sql(path, "SELECT count(*) FROM trajectories WHERE arrays IS NOT NULL") == [(7,)]


def test_arrays_go_first_the_oldest_before_others_then_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Part by part: no token leaves the accounts, and a group that is not over loses nothing."""
    path = tmp_path / "buffer.sqlite"
    monkeypatch.setattr("slipstream.buffer.retention.ARRAYS", at_once(2, "ARRAYS"))
    monkeypatch.setattr("slipstream.buffer.retention.ROWS", at_once(2, "ROWS"))
    replay = play(path, 5)
    before = ledger_report(path)
    assert before.balances
    held, rows = [], []
    with opened(path) as store:
        more, loaded = True, store.load()
        while more:
            more = store.shrink(0, replay.version)
            held.append(
                sql(path, "SELECT count(DISTINCT group_id), min(group_id) FROM trajectories WHERE arrays NOTNULL")[0]
            )
            rows.append(sql(path, "SELECT count(*), min(id) FROM groups")[0])
            after = ledger_report(path)
            assert after.balances
            assert (after.total, after.by_version, after.by_length) == (
                before.total,
                before.by_version,
                before.by_length,
            )
            assert lengths(after) == lengths(before)
            assert store.load() == loaded
            assert [t.sampled for t in store.trajectories(5)] == [55]
    assert list(dict.fromkeys(held)) == [(4, 2), (2, 4), (1, 5)]
    assert list(dict.fromkeys(rows)) == [(6, 0), (4, 2), (2, 4), (1, 5)]
    assert held.index((1, 5)) <= rows.index((4, 2))
    for table in ("episodes", "trajectories"):
        assert sql(path, f"SELECT DISTINCT group_id FROM {table}") == [(5,)]


def at_once(groups: int, what: str) -> tuple[str, ...]:
    return tuple(s.replace(f"LIMIT {retention.GROUPS_AT_ONCE}", f"LIMIT {groups}") for s in getattr(retention, what))


def test_arrays_that_no_row_names_are_gone_when_their_segment_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are of a save that was killed between arrays and rows."""
    monkeypatch.setattr("slipstream.buffer.segments.SEGMENT_BYTES", 1)  # one for each save
    path = tmp_path / "buffer.sqlite"
    play(path, 3)
    *_, last = before = segments(path)
    with last.open("ab") as file:
        file.write(b"never named")
    late = [trajectory_of("3.0.1", {3: 5}), trajectory_of("3.0.1", {3: 7})]
    with opened(path) as store:
        store.save(WriteBatch.of(store.load()[0], [], [new_trajectory("3.0.1", late[0])]))
        assert [t.sampled for t in store.trajectories(3)] == [53, 5]
    sql(path, "DELETE FROM trajectories WHERE group_id = 3")
    with opened(path) as store:
        assert segments(path) == before[:-1]
        store.save(WriteBatch.of(store.load()[0], [], [new_trajectory("3.0.1", late[1])]))
        assert [t.sampled for t in store.trajectories(2)] == [52, 52]
        assert [t.sampled for t in store.trajectories(3)] == [7]


def test_only_what_no_recovery_needs_goes(tmp_path: Path) -> None:
    path = tmp_path / "buffer.sqlite"
    play(path, 5, checkpointed=False)
    before = ledger_report(path)
    assert shrunk(path, 0, 2) > 1  # served and in a checkpoint: versions 1 and 2, made of groups 0 and 1
    assert sql(path, "SELECT id FROM groups") == [(2,), (3,), (4,), (5,)]
    assert sql(path, "SELECT count(*) FROM trajectories WHERE arrays IS NULL") == [(0,)]
    assert shrunk(path, 0, -1) == 1
    assert ledger_report(path).by_version == before.by_version


def test_a_straggler_that_may_still_report_keeps_its_group(tmp_path: Path) -> None:
    path = tmp_path / "buffer.sqlite"
    replay = play(path, 3)
    sql(path, "UPDATE episodes SET settled = 0 WHERE id = '1.0.1'")
    shrunk(path, 0, replay.version)
    assert sql(path, "SELECT id FROM groups") == [(1,), (3,)]
    assert sql(path, "SELECT count(*) FROM trajectories WHERE group_id = 1 AND arrays IS NOT NULL") == [(2,)]


def test_the_files_really_become_smaller_and_stay_below_their_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.buffer.segments.SEGMENT_BYTES", 1 << 19)
    path = tmp_path / "buffer.sqlite"
    replay = play(path, 40, tokens=20_000)
    full = size(path)
    assert full > 10 << 20
    limit = full // 4
    assert shrunk(path, limit, replay.version) > 1
    assert size(path) <= 0.9 * limit
    arrays = sql(path, "SELECT min(group_id), count(*) FROM trajectories WHERE arrays IS NULL")[0]
    assert arrays[0] == 0
    assert sql(path, "SELECT count(*) FROM groups") == [(41,)]  # arrays were enough
    shrunk(path, 0, replay.version)
    assert size(path) < 1 << 20
    assert sql(path, "PRAGMA integrity_check") == [("ok",)]
    assert sql(path, "SELECT count(*) FROM trajectories WHERE arrays IS NOT NULL") == [(1,)]


def test_a_shrunk_file_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "buffer.sqlite"
    replay = play(path, 3)
    shrunk(path, 0, replay.version)
    with opened(path) as store:
        clock, groups = store.load()
        again = Replay(replay.admission, replay.config, clock, groups)
        again.mark_served(again.version)
        again.leases.release("a", "worker_lost")
        lease = again.leases.grant("b", 0.0)
        assert lease is not None
        assert (lease.group_id, lease.attempt, lease.members, lease.task) == (3, 1, (1,), 3)
