"""What the views over time and over all tokens say: sums that agree with the ledger, gauges without inventions."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from slipstream.buffer.ledger_report import ledger_report
from slipstream.buffer.trajectory import UNWANTED, BatchRow, Outcome
from slipstream.common.spans import Span
from slipstream.dashboard import timeline
from slipstream.dashboard.accounts import PART, TokenAccounts
from slipstream.dashboard.app import DashServer
from slipstream.dashboard.environments import environments
from slipstream.dashboard.gauges import GaugeTable
from slipstream.dashboard.index import TrajectoryIndex
from slipstream.dashboard.processes import TAIL, processes
from slipstream.dashboard.runs import RunFolder
from slipstream.dashboard.store import StoreReader
from slipstream.dashboard.timeline import Timeline
from slipstream.monitor.follow import LineFollower
from slipstream.tests.dashboard_runs import BEGAN, MEMBERS, PLANTED, DashboardRun
from slipstream.tests.dashboards import IDLE, Asked
from slipstream.tests.stores import opened, play


def lines(path: Path, rows: Sequence[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in rows)


def accounts_of(path: Path) -> dict[str, int]:
    """The ledger's, by the names of the store's accounts."""
    total = ledger_report(path).total
    found = {"trained": total.trained, "ready": total.ready, "in_flight": total.in_flight, **total.discarded}
    found |= {f"withheld_{reason}": tokens for reason, tokens in total.withheld.items()}
    return {account: tokens for account, tokens in found.items() if tokens}


def test_accounts_are_those_of_the_ledger_also_after_rows_became_sums(tmp_path: Path) -> None:
    path = tmp_path / "buffer.sqlite"
    replay = play(path, 2 * PART + 5)
    accounts = TokenAccounts(StoreReader(tmp_path, lambda: True))
    before = accounts.read()
    assert before["accounts"] == accounts_of(path)
    assert before["generated"] == ledger_report(path).total.generated
    assert set(accounts._settled) == {0, 1}
    by_version = ledger_report(path).by_version
    assert {row["version"]: sum(row["accounts"].values()) for row in before["by_version"]} == {
        version: ledger.generated for version, ledger in by_version.items()
    }
    with opened(path) as store:
        while store.shrink(1, replay.table.counters.settled):
            pass
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT count(*) FROM archive").fetchone()[0] > 0
    after = accounts.read()
    assert after["accounts"] == before["accounts"] == accounts_of(path)
    assert after["by_length"] == before["by_length"]


def test_the_life_of_a_batch(tmp_path: Path) -> None:
    run = DashboardRun(tmp_path / "run")
    made = run.record(4)
    run.close()
    store = StoreReader(run.folder, lambda: False)
    batch = Timeline(run.folder, GaugeTable(run.folder), store).batch(3)
    assert (batch["previous"], batch["next"], batch["commit"]) == (
        2,
        None,
        {"time": BEGAN + 2, "max_staleness": 2, "groups_per_batch": 1},
    )
    assert [one["member"] for one in batch["episodes"]] == list(range(MEMBERS))
    one = batch["episodes"][1]
    origin = next(t for t in made if t.id == one["id"])
    assert (one["started"], one["ended"]) == (origin.started, pytest.approx(origin.started + 1.1))
    decoded = [part for part in one["parts"] if part[2] == "decode"]
    assert [version for *_, version in decoded] == [0, 2]  # the newest of a turn's
    assert decoded[1][:2] == (pytest.approx(origin.started + 0.53), pytest.approx(origin.started + 0.73))
    assert {part[2] for part in one["parts"]} == {"queue", "prefill", "decode", "reset", "tool"}
    assert Timeline(run.folder, GaugeTable(run.folder), store).batch(99)["episodes"] == []


def test_the_episodes_of_a_batch_are_read_once_until_its_commit_is_rolled_back(tmp_path: Path) -> None:
    run = DashboardRun(tmp_path / "run")
    run.record(4)
    run.close()
    store = CountingStore(run.folder, lambda: False)
    timeline = Timeline(run.folder, GaugeTable(run.folder), store)
    first = timeline.batch(3)
    assert timeline.batch(3) == first
    assert store.decoded == MEMBERS
    for version in (1, 2, 3):
        timeline.batch(version)
    assert store.decoded == 3 * MEMBERS
    with sqlite3.connect(store.path) as db:
        db.execute("UPDATE groups SET trained_at = NULL, state = 'ready' WHERE trained_at = 3")
        db.execute("UPDATE commits SET rolled_back = 1 WHERE version = 3")
    db.close()
    assert timeline.batch(3)["episodes"] == []


class CountingStore(StoreReader):
    """It counts the rows that it decodes."""

    decoded = 0

    def decode(self, header: bytes, length: int) -> BatchRow:
        self.decoded += 1
        return super().decode(header, length)


def test_gauges_have_gaps_where_nothing_was_said_and_rates_where_counts_only_grow(tmp_path: Path) -> None:
    folder = tmp_path / "series"
    lines(folder / "worker-0.11.old.jsonl", [{"t": 100.0, "playing": 1, "tokens": 0}])
    lines(
        folder / "worker-0.11.jsonl", [{"t": 101.0, "playing": 3, "tokens": 50, "replicas": {"engine-0": {"kv": 0.5}}}]
    )
    lines(folder / "learner-0.12.jsonl", [{"t": 100.0, "phase": "take"}])
    table = GaugeTable(tmp_path)
    assert table.bounds() == (100.0, 101.0)
    lines(folder / "worker-0.11.jsonl", [{"t": 103.0, "playing": 5, "tokens": 150}])
    lines(
        folder / "worker-0.13.jsonl", [{"t": 104.0, "playing": 7, "tokens": 10}]
    )  # another process: its counts begin anew
    with (folder / "worker-0.13.jsonl").open("a") as file:
        file.write('{"t": 105.0, "play')  # is being written
    found = table.roles()["worker-0"].between(100.0, 105.0, 5)
    assert found == {
        "playing": [1, 3, None, 5, 7],
        "tokens": [None, 50, None, 50, None],
        "replicas.engine-0.kv": [None, 0.5, None, None, None],
    }
    assert table.roles()["worker-0"].pid == "13"
    assert "phase" not in table.roles()["learner-0"].between(100.0, 105.0, 5)
    with (folder / "worker-0.13.jsonl").open("a") as file:
        file.write('ing": 9}\nno line of ours\n')
    assert table.roles()["worker-0"].between(104.9, 105.1, 1)["playing"] == [9]


def test_a_clock_that_was_set_back_leaves_each_gauge_in_its_window(tmp_path: Path) -> None:
    times = [*range(100, 110), *range(90, 104)]
    path = tmp_path / "series" / "worker-0.11.jsonl"
    lines(path, [{"t": float(t), "tokens": 5 * n, "playing": t} for n, t in enumerate(times)])
    found = GaugeTable(tmp_path).roles()["worker-0"]
    assert found.between(95.0, 101.0, 6)["playing"] == [95, 96, 97, 98, 99, 100.5]  # 101 is of the last part, twice
    assert found.between(95.0, 101.0, 1)["tokens"] == [5.0]
    assert found.between(105.0, 108.0, 1)["playing"] == [106.5]
    assert found.between(120.0, 130.0, 1) == {}


def test_gauges_of_a_long_run_are_thinned_and_the_newest_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.dashboard.gauges.VALUES", 120)
    path = tmp_path / "series" / "worker-0.11.jsonl"
    table, most = GaugeTable(tmp_path), 0
    for begin in range(0, 1000, 50):
        lines(path, [{"t": 100.0 + t, "tokens": 5 * t, "playing": t % 2} for t in range(begin, begin + 50)])
        most = max(most, len(table.roles()["worker-0"].times))
    assert 40 <= most <= 60  # of two gauges
    found = table.roles()["worker-0"]
    assert table.bounds() == (100.0, 1099.0)
    assert list(found.times[-20:]) == [1080.0 + t for t in range(20)]
    assert found.between(100.0, 1099.0, 8)["tokens"] == [5.0] * 8  # also of its beginning


def test_a_window_keeps_the_longest_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long run the beginning is not cut off: what is left out is what is thin."""
    monkeypatch.setattr("slipstream.dashboard.timeline.SPANS_SHOWN", 4)
    run = DashboardRun(tmp_path / "run")
    run.close()
    began = 1000.0
    spans = [Span(began + i, began + i + (0.9 if i % 3 == 0 else 0.1), "train", {"step": i}) for i in range(12)]
    lines(run.folder / "spans" / "learner-0.12.jsonl", [msgspec.to_builtins(one) for one in spans])
    store = StoreReader(run.folder, lambda: False)
    window = Timeline(run.folder, GaugeTable(run.folder), store).window(began, began + 12)
    assert [one.t0 - began for one in window["phases"]] == [0, 3, 6, 9]


def test_servers_are_as_the_processes_that_live_see_them(tmp_path: Path) -> None:
    folder = tmp_path / "series"
    for role, t, version in (("worker-0", 100.0, 3), ("worker-1", 200.0, 9), ("worker-2", 190.0, 9)):
        lines(folder / f"{role}.11.jsonl", [{"t": t, "replicas": {"engine-0": {"version": version, "sent": 2}}}])
    seen = {one["role"]: one["replicas"] for one in processes(GaugeTable(tmp_path))}
    assert {role for role, replicas in seen.items() if replicas} == {"worker-1", "worker-2"}


def test_a_follower_reads_each_line_once_and_a_new_file_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "file"
    follower = LineFollower(path)
    assert list(follower.lines()) == []
    path.write_bytes(b"a\nb\nc")
    assert list(follower.lines()) == [b"a", b"b"]
    assert list(follower.lines()) == []
    with path.open("ab") as file:
        file.write(b"d\n")
    assert list(follower.lines()) == [b"cd"]
    path.rename(tmp_path / "old")
    path.write_bytes(b"e\n")
    assert list(follower.lines()) == [b"e"]
    path.write_bytes(b"\n")
    assert list(follower.lines()) == [b""]


def test_failed_episodes_say_why_and_calls_how_long(tmp_path: Path) -> None:
    run = DashboardRun(tmp_path / "run")
    run.play()
    run.step()
    lease = run.replay.leases.grant("worker-0", 0.0)
    assert lease is not None
    failed = Outcome("failed", "tool", f"no connection {PLANTED}")
    run.replay.leases.deliver(lease.episode(2), failed, {1: 7}, {})
    run.replay.leases.deliver(lease.episode(3), Outcome("failed", UNWANTED), {1: 9}, {})  # its group was complete
    run._save([])
    run.close()
    store = StoreReader(run.folder, lambda: False)
    found = environments(TrajectoryIndex(store), store)
    (env,) = found["environments"]
    assert (env["env"], env["episodes"], env["reward"]) == ("calculator", MEMBERS, 0.5)
    assert env["outcomes"] == {"finished": 3, "truncated": 1}
    (failure,) = found["failures"]
    assert (failure["id"], failure["reason"], failure["tokens"]) == (lease.episode(2), "tool", 7)
    assert failure["detail"] == failed.detail
    tool = next(row for row in found["calls"] if row["what"] == "tool")
    assert (tool["calls"], tool["errors"], tool["p50"]) == (MEMBERS, 0, pytest.approx(0.2))


async def test_logs_are_shown_from_their_end_and_only_those_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = DashboardRun(tmp_path / "run")
    run.close()
    (run.folder / "logs").mkdir()
    (run.folder / "logs" / "buffer.log").write_text(
        "\x1b[31mold\x1b[0m\n" + "x" * 99 + "\n" * TAIL + "last <b>line</b>\n"
    )
    lines(
        run.folder / "series" / "buffer.7.jsonl",
        [{"t": 100.0 + i, "cpu_s": i / 2, "rss": 1, "ready": 3} for i in range(5)],
    )
    busy = {"utilization": 0.5, "memory": 3}
    held = {"gpus": {"1": busy}, "servers": {"engine-0": {"cpu_s": 1, "gpus": {"0": busy}}, "engine-1": {"cpu_s": 1}}}
    lines(run.folder / "series" / "supervisor.8.jsonl", [{"t": 100.0 + i, **held} for i in range(5)])
    async with DashServer(RunFolder(run.folder, IDLE), "127.0.0.1", 0, "") as server, aiohttp.ClientSession() as client:
        asked = Asked(server, client)
        assert (await asked("/api/runs/run/now"))["alerts"] == []
        said = {
            "rule": "idle",
            "severity": "warning",
            "text": f"slots {PLANTED}",
            "advice": "lower it",
            "step": 3,
            "time": 5.0,
        }
        other = {**said, "rule": "failures", "time": 4.0}
        lines(run.folder / "alerts.jsonl", [said, other, {**said, "active": False, "time": 9.0}])
        alerts = (await asked("/api/runs/run/now"))["alerts"]
        assert [(alert["rule"], alert["active"]) for alert in alerts] == [("failures", True), ("idle", False)]
        found = await asked("/api/runs/run/processes")
        assert [one["name"] for one in found["logs"]] == ["buffer.log"]
        process, supervisor = found["processes"]
        assert supervisor["gpus"] == [
            {"role": "supervisor", "gpu": "1", **busy},
            {"role": "engine-0", "gpu": "0", **busy},
        ]
        assert process["gpus"] == []
        assert (process["role"], process["pid"], process["cores"], process["gauges"]) == (
            "buffer",
            "7",
            0.5,
            {"ready": 3},
        )
        tail = await asked("/api/runs/run/logs/buffer.log")
        assert tail["text"].endswith("last <b>line</b>\n")
        assert "old" not in tail["text"]
        for name in ("..%2fconfig.yaml", "config.yaml", "nothing.log"):
            status = (await asked.refused(f"/api/runs/run/logs/{name}"))[0]
            assert status == 400
        assert "not active" in (await asked.refused("/api/runs/run/status"))[1]
        assert await asked("/api/runs/run/timeline", t0=0, t1=1)
        monkeypatch.setattr(timeline, "WINDOW_S", 0.5)
        newest = await asked("/api/runs/run/timeline")
        assert newest["bounds"][0] < newest["t0"] == newest["bounds"][1] - 0.5
        columns = (await asked("/api/runs/run/timeline", t0=99, t1=106))["series"]["supervisor"]
        assert {"gpus.1.utilization", "servers.engine-0.gpus.0.memory"} <= columns.keys()
        for wrong in ("x", "nan", "inf"):
            assert (await asked.refused("/api/runs/run/timeline", t0=wrong))[0] == 400
