"""The dashboard's server over real stores: what it says is what the store has, and the store does not notice."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from slipstream.buffer.trajectory import Trajectory, TrajectoryHeader
from slipstream.dashboard import feed
from slipstream.dashboard import runs as dashboard_runs_module
from slipstream.dashboard.app import DashServer
from slipstream.dashboard.curves import MetricsTable
from slipstream.dashboard.index import IndexedHeader, TrajectoryIndex, TrajectoryQuery
from slipstream.dashboard.runs import RunAccess, RunFolder
from slipstream.dashboard.store import StoreReader
from slipstream.dashboard.texts import TokenTexts
from slipstream.errors import ConfigError, StoreError
from slipstream.launch.cli.main import main
from slipstream.monitor.settings import SETTINGS, SettingChange, append_changes
from slipstream.tests.dashboard_runs import MEMBERS, PLANTED, DashboardRun
from slipstream.tests.dashboards import ACTIVE, IDLE, Asked
from slipstream.tests.runs import WAIT_S, query

GROUPS = 7


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Trajectory]]:
    run = DashboardRun(tmp_path_factory.mktemp("dash") / "run")
    trajectories = run.record(GROUPS)
    run.close()
    return run.folder, trajectories


@pytest.fixture(scope="module")
def folder(made: tuple[Path, list[Trajectory]]) -> Path:
    return made[0]


@pytest.fixture
async def asked(folder: Path) -> AsyncIterator[Asked]:
    async with DashServer(RunFolder(folder, IDLE), "127.0.0.1", 0, "") as server, aiohttp.ClientSession() as client:
        yield Asked(server, client)


# --- what it says -------------------------------------------------------------------------------------------------


async def test_the_present_and_the_curves_are_those_of_the_metrics(asked: Asked, folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (run,) = (await asked("/api/runs"))["runs"]
    assert (run["name"], run["active"], run["error"]) == ("run", False, "")
    assert run["settings"]["max_staleness"] == 2
    now = (await asked("/api/runs/run/now"))["now"]
    assert (now["step"], now["reward"], now["bound"]) == (rows[-1]["step"], rows[-1]["reward_mean"], 2)
    assert now["rewards"] == [row["reward_mean"] for row in rows]
    steady = rows[1:]
    seconds = sum(row["wait_s"] + row["step_s"] + row["push_s"] for row in steady)
    assert now["trained_tokens_per_s"] == pytest.approx(sum(row["tokens_trained"] for row in steady) / seconds)
    curves = await asked("/api/runs/run/curves", names="reward_mean,staleness_tokens/1,mismatch_max,nothing")
    assert curves["steps"] == [row["step"] for row in rows]
    assert curves["columns"]["staleness_tokens/1"] == [row["staleness_tokens"]["1"] for row in rows]
    assert curves["columns"]["mismatch_max"] == [row["mismatch_max"] for row in rows]
    assert None in curves["columns"]["mismatch_max"]
    assert curves["columns"]["nothing"] == [None] * len(rows)
    assert "nothing" not in curves["names"]
    assert curves["seconds"] == sorted(curves["seconds"])
    assert curves["marks"] == []


def test_curves_mark_where_settings_changed(tmp_path: Path) -> None:
    rows = [
        {"step": step, "version": step, "time": 10.0 * step, "wait_s": 4.0, "reward_mean": 0.5} for step in (1, 2, 3)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    append_changes(tmp_path / SETTINGS, [SettingChange(15.0, 2, 1, "buffer.max_staleness", 2, 0)])
    marks = MetricsTable(tmp_path).columns(["reward_mean"])["marks"]
    assert marks == [{"steps": 1.5, "seconds": 9.0, "text": "max_staleness 2 → 0"}]


async def test_a_trajectory_is_what_was_delivered(asked: Asked, made: tuple[Path, list[Trajectory]]) -> None:
    folder, trajectories = made
    one = next(t for t in trajectories if t.group_id == 4 and t.member == 1)
    shown = await asked(f"/api/runs/run/trajectories/{one.id}", bins=50)
    assert (shown["reward"], shown["task_id"], shown["tokens"]) == (one.reward, one.task_id, len(one))
    assert (shown["trained_at"], shown["learner_version"], shown["account"]) == (5, 4, "trained")
    assert [turn["end"] for turn in shown["turns"]] == [turn.end for turn in one.turns]
    assert shown["env_calls"][1]["tool"] == one.env_calls[1].tool
    tokens = await asked(f"/api/runs/run/trajectories/{one.id}/tokens", start=0, end=len(one))
    assert tokens["ids"] == one.token_ids.tolist()
    assert tokens["versions"] == one.versions().tolist()
    assert tokens["logprobs"] == pytest.approx(one.behavior_logprobs.tolist())
    tokenizer = TokenTexts(folder, "")
    assert "".join(tokens["texts"]) == tokenizer.text(one.token_ids.tolist())
    # Cells of a staleness are as many as SQL over the spans finds, and none is where nothing was sampled.
    where = f"JOIN groups g ON g.id = t.group_id WHERE t.id = '{one.id}'"
    sql = f"SELECT t.header, g.trained_at FROM trajectories t {where}"
    ((header, trained_at),) = query(folder, sql)
    wanted: Counter[int] = Counter()
    for start, end, version, *_ in msgspec.msgpack.decode(header[1:])["version_spans"]:
        wanted[trained_at - 1 - version] += end - start
    assert Counter(s for s in tokens["staleness"] if s >= 0) == wanted
    assert wanted[2] > 0
    assert [s < 0 for s in tokens["staleness"]] == (~one.loss_mask).tolist()
    assert [loss == 1 for loss in tokens["loss"]] == one.loss_mask.tolist()
    strip = shown["strip"]
    widths = np.diff(strip["edges"])
    assert (strip["edges"][0], strip["edges"][-1]) == (0, len(one))
    assert float(np.dot(strip["loss"], widths)) == pytest.approx(one.sampled, abs=0.5)
    assert max(s for s in strip["staleness"] if s is not None) == 2
    assert all((value is None) == (share == 0) for value, share in zip(strip["logprob"], strip["loss"], strict=True))


async def test_a_window_in_the_middle_has_whole_characters(asked: Asked, made: tuple[Path, list[Trajectory]]) -> None:
    one = made[1][-1]
    whole = await asked(f"/api/runs/run/trajectories/{one.id}/tokens", start=0, end=len(one))
    at = next(i for i, text in enumerate(whole["texts"]) if text == "✓")
    for start in (at - 2, at - 1, at, at + 1):
        part = await asked(f"/api/runs/run/trajectories/{one.id}/tokens", start=start, end=len(one))
        assert part["texts"] == whole["texts"][start:]
    assert (await asked.refused(f"/api/runs/run/trajectories/{one.id}/tokens", start=5, end=5))[0] == 400
    assert (await asked.refused(f"/api/runs/run/trajectories/{one.id}/tokens", start=0, end=10**9))[0] == 400


async def test_a_conversation_has_roles_and_turns(asked: Asked, made: tuple[Path, list[Trajectory]]) -> None:
    one = made[1][5]
    messages = await asked(f"/api/runs/run/trajectories/{one.id}/messages")
    assert [(m["role"], m["turn"]) for m in messages] == [
        ("user", None),
        ("assistant", 0),
        ("user", None),
        ("assistant", 1),
    ]
    assert messages[0]["text"].startswith(f"What is {one.group_id} + {one.member}?")
    assert messages[1]["text"] == f"calculator({one.group_id})"
    assert PLANTED in messages[2]["text"]
    assert "✓" in messages[3]["text"]


async def test_a_group_has_its_members_beside_each_other(asked: Asked) -> None:
    group = await asked("/api/runs/run/groups/3")
    assert [one["id"] for one in group["members"]] == [f"3.0.{member}.0" for member in range(MEMBERS)]
    assert [one["reward"] for one in group["members"]] == [0.0, 1.0, 0.0, 1.0]
    assert (group["previous"], group["next"], group["state"], group["trained_at"]) == (2, 4, "trained", 4)
    assert group["members"][0]["texts"][0].startswith("calculator(3)")
    assert (await asked("/api/runs/run/groups/0"))["previous"] is None
    assert (await asked.refused("/api/runs/run/groups/999"))[0] == 409


@pytest.mark.parametrize("sort", ["newest", "reward", "tokens", "seconds", "staleness", "trained_at"])
@pytest.mark.parametrize("ascending", [False, True])
async def test_pages_have_every_trajectory_once_and_in_order(asked: Asked, sort: str, ascending: bool) -> None:
    keys = {"newest": "rowid", "trained_at": "trained_at", "staleness": "staleness"}
    found: list[dict[str, Any]] = []
    given: dict[str, object] = {"sort": sort, "ascending": str(ascending).lower(), "limit": 5}
    while True:
        page = await asked("/api/runs/run/trajectories", **given)
        found += page["rows"]
        if not page["next"]:
            break
        given["after"] = page["next"]
    assert {row["turns"] for row in found} == {2}
    assert (await asked("/api/runs/run/now"))["newest"]["turns"] == 2
    assert len(found) == page["total"] == GROUPS * MEMBERS == len({row["id"] for row in found})
    values = [-1 if row[keys.get(sort, sort)] is None else row[keys.get(sort, sort)] for row in found]
    assert values == sorted(values, reverse=not ascending)


async def test_filters_keep_what_sql_keeps(asked: Asked, made: tuple[Path, list[Trajectory]]) -> None:
    folder, trajectories = made
    page = await asked("/api/runs/run/trajectories", trained_at=3)
    assert {row["group"] for row in page["rows"]} == {
        group for (group,) in query(folder, "SELECT id FROM groups WHERE trained_at = 3")
    }
    page = await asked("/api/runs/run/trajectories", outcome="truncated", limit=200)
    assert {row["id"] for row in page["rows"]} == {t.id for t in trajectories if t.outcome.kind == "truncated"}
    page = await asked("/api/runs/run/trajectories", reward_min=1, task="sum-2", limit=200)
    assert {row["id"] for row in page["rows"]} == {t.id for t in trajectories if t.reward >= 1 and "sum-2" in t.task_id}
    page = await asked("/api/runs/run/trajectories", state="ready")
    assert {row["group"] for row in page["rows"]} == {GROUPS - 1}
    page = await asked("/api/runs/run/trajectories", staleness_min=2, limit=200)
    assert page["total"] == sum(2 <= t.group_id < GROUPS - 1 for t in trajectories)
    assert (await asked("/api/runs/run/trajectories", env="none"))["total"] == 0
    for wrong in ({"limit": 0}, {"sort": "nothing"}, {"after": "x"}, {"turns_min": "many"}, {"unknown": 1}):
        assert (await asked.refused("/api/runs/run/trajectories", **wrong))[0] == 400


async def test_changes_are_streamed(asked: Asked, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "LOOK_S", 0.05)
    async with asked.client.get(f"http://127.0.0.1:{asked.server.port}/api/events") as response:
        first = await asyncio.wait_for(response.content.readuntil(b"\n\n"), WAIT_S)
        ((name, number),) = json.loads(first.removeprefix(b"data: ")).items()
        assert name == "run"
        os.utime(folder / "metrics.jsonl")
        second = await asyncio.wait_for(response.content.readuntil(b"\n\n"), WAIT_S)
        assert json.loads(second.removeprefix(b"data: "))["run"] > number


# --- a run under way ----------------------------------------------------------------------------------------------


def test_the_index_follows_a_run_and_what_becomes_of_its_groups(tmp_path: Path) -> None:
    run = DashboardRun(tmp_path / "run")
    index = TrajectoryIndex(StoreReader(run.folder, lambda: True))
    assert index.page(TrajectoryQuery()).total == 0
    run.play()
    page = index.page(TrajectoryQuery())
    assert next((row["id"], row["state"], row["trained_at"]) for row in page.rows) == ("0.0.3.0", "ready", None)
    run.step()
    assert {(row["state"], row["trained_at"]) for row in index.page(TrajectoryQuery()).rows} == {("trained", 1)}
    before = index.page(TrajectoryQuery(limit=2))
    run.play()
    after = index.page(TrajectoryQuery(limit=2, after=before.next))
    assert [row["id"] for row in (*before.rows, *after.rows)] == ["0.0.3.0", "0.0.2.0", "0.0.1.0", "0.0.0.0"]
    assert index.page(TrajectoryQuery()).indexed == 2 * MEMBERS
    run.step()
    run.close()
    # A rollback to a checkpoint gives groups back; those that are settled are not looked at again.
    with sqlite3.connect(run.folder / "buffer.sqlite") as db:
        db.execute("UPDATE groups SET state = 'discarded', trained_at = NULL")
    states = {row["group"]: row["state"] for row in index.page(TrajectoryQuery()).rows}
    assert states == {0: "trained", 1: "discarded"}
    with sqlite3.connect(run.folder / "buffer.sqlite") as db:
        db.execute("DELETE FROM trajectories")
    assert index.page(TrajectoryQuery()).indexed == 0


def test_a_reader_never_holds_the_log_of_a_writer(tmp_path: Path) -> None:
    """Between two requests, and between two queries of one, SQLite can write its WAL back as a whole."""
    run = DashboardRun(tmp_path / "run")
    store = StoreReader(run.folder, lambda: True)
    index = TrajectoryIndex(store)
    for _ in range(3):
        made = run.play()
        assert index.page(TrajectoryQuery()).indexed > 0
        with store.open() as db:
            assert db.one("SELECT count(*) FROM trajectories WHERE id = ?", made[0].id) == (1,)
            with sqlite3.connect(run.folder / "buffer.sqlite", timeout=1.0) as writer:
                busy, _, _ = writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            assert busy == 0
        run.step()
    run.close()


@pytest.mark.parametrize("access", [IDLE, ACTIVE], ids=["finished", "active"])
async def test_the_run_does_not_change_by_being_looked_at(folder: Path, access: RunAccess, tmp_path: Path) -> None:
    def state() -> dict[str, str]:
        files = (path for path in folder.rglob("*") if path.is_file())
        kept = (
            path
            for path in files
            if not (path.name.endswith("-shm") or (path.name.endswith("-wal") and not path.stat().st_size))
        )
        return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in kept}

    def names() -> set[str]:
        return {path.name for path in folder.iterdir()}

    listed = names()
    before = state()
    async with DashServer(RunFolder(folder, access), "127.0.0.1", 0, "") as server, aiohttp.ClientSession() as client:
        asked = Asked(server, client)
        for path in (
            "now",
            "curves",
            "trajectories",
            "trajectories/0.0.0.0",
            "trajectories/0.0.0.0/messages",
            "groups/0",
        ):
            await asked(f"/api/runs/run/{path}")
    assert state() == before
    if access is IDLE:
        assert names() == listed


def test_a_killed_run_is_read_with_what_its_log_has(tmp_path: Path) -> None:
    """A run that ended in good order is opened as immutable; one whose WAL was not written back must not be."""
    run = DashboardRun(tmp_path / "run")
    run.play()
    copied = tmp_path / "killed"
    copied.mkdir()
    for name in ("buffer.sqlite", "buffer.sqlite-wal"):
        (copied / name).write_bytes((run.folder / name).read_bytes())
    run.close()
    assert TrajectoryIndex(StoreReader(copied, lambda: False)).page(TrajectoryQuery()).total == MEMBERS


async def test_the_newest_runs_of_a_folder_are_shown_and_the_others_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard_runs_module, "RUNS_LIMIT", 2)
    for age, name in enumerate(("b", "d", "a", "c")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("extends: quickstart\n")
        os.utime(tmp_path / name / "config.yaml", (1e9 - age, 1e9 - age))
    runs = RunFolder(tmp_path, IDLE)
    assert [run.name for run in runs.runs()] == ["b", "d"]
    assert runs.left_out == 2
    async with DashServer(runs, "127.0.0.1", 0, "") as server, aiohttp.ClientSession() as client:
        listed = await Asked(server, client)("/api/runs")
    assert (len(listed["runs"]), listed["left_out"], listed["folder"]) == (2, 2, str(tmp_path))
    assert runs.run("c").name == "c"
    with pytest.raises(ConfigError, match=r"holds no run '\.\.'"):
        runs.run("..")
    assert RunFolder(tmp_path / "b", IDLE).left_out == 0


async def test_what_is_missing_is_said(tmp_path: Path) -> None:
    run = DashboardRun(tmp_path / "run")
    run.record(3)
    run.close()
    (run.folder / "tokenizer" / "tokenizer.json").unlink()
    with sqlite3.connect(run.folder / "buffer.sqlite") as db:
        db.execute("UPDATE trajectories SET arrays = NULL WHERE group_id = 0")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.yaml").write_bytes((run.folder / "config.yaml").read_bytes())
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.yaml").write_text("nothing: {of: ours}\n")
    async with DashServer(RunFolder(tmp_path, IDLE), "127.0.0.1", 0, "") as server, aiohttp.ClientSession() as client:
        asked = Asked(server, client)
        found = {one["name"]: one for one in (await asked("/api/runs"))["runs"]}
        assert found.keys() == {"run", "empty", "old"}
        assert "nothing" in found["old"]["error"]
        assert found["empty"]["now"] == {}
        assert (await asked("/api/runs/empty/trajectories"))["total"] == 0
        with sqlite3.connect(run.folder / "buffer.sqlite") as db:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            db.execute("PRAGMA user_version = 1")
        now = await asked("/api/runs/run/now")
        assert "has schema 1" in now["problem"]
        assert now["now"]["step"] == 2
        with sqlite3.connect(run.folder / "buffer.sqlite") as db:
            db.execute(f"PRAGMA user_version = {version}")
        assert "no buffer yet" in (await asked.refused("/api/runs/empty/groups/0"))[1]
        dropped = await asked("/api/runs/run/trajectories/0.0.0.0")
        assert (dropped["has_tokens"], dropped["strip"], dropped["tokenizer"]) == (False, None, False)
        assert "buffer.keep" in (await asked.refused("/api/runs/run/trajectories/0.0.0.0/messages"))[1]
        tokens = await asked("/api/runs/run/trajectories/1.0.0.0/tokens", start=0, end=3)
        assert tokens["texts"] == [f"[{id}]" for id in tokens["ids"]]
        assert "dropped" in (await asked.refused("/api/runs/run/trajectories/9.9.9.9"))[1]
        assert (await asked.refused("/api/runs/none/now"))[0] == 400


# --- who may look -------------------------------------------------------------------------------------------------


async def test_only_those_who_know_the_token_and_only_by_reading(folder: Path) -> None:
    jar = aiohttp.CookieJar(unsafe=True)  # of addresses, too, as in browsers
    async with (
        DashServer(RunFolder(folder, IDLE), "127.0.0.1", 0, "secret") as server,
        aiohttp.ClientSession(cookie_jar=jar) as client,
    ):
        base = f"http://127.0.0.1:{server.port}"
        assert server.url == f"{base}/?token=secret"
        for path in ("/", "/api/runs", "/static/app.js", "/?token=wrong", "/api/runs?token=wrong", "/api/events"):
            async with client.get(base + path) as response:
                assert response.status == 403, path
        async with client.get(server.url) as response:  # leads to the page without the token, which is a cookie then
            assert (response.status, str(response.url)) == (200, f"{base}/")
        async with client.get(f"{base}/api/runs") as response:
            assert response.status == 200
            assert "default-src 'self'" in response.headers["Content-Security-Policy"]
        for method in ("POST", "PUT", "DELETE"):
            async with client.request(method, f"{base}/api/runs") as response:
                assert response.status == 405
        for path in (
            "/static/../app.py",
            "/static/%2e%2e/app.py",
            "/api/runs/..%2f..%2fetc/now",
            "/api/runs/run/trajectories/..%2f1",
        ):
            async with client.get(base + path) as response:
                assert response.status in (400, 403, 404), path


async def test_a_page_whose_name_leads_here_reads_nothing(asked: Asked) -> None:
    url = f"http://127.0.0.1:{asked.server.port}/api/runs"
    for host, status in (
        ("evil.example", 403),
        ("evil.example:7860", 403),
        ("localhost:7860", 200),
        ("[::1]:7860", 200),
    ):
        async with asked.client.get(url, headers={"Host": host}) as response:
            assert response.status == status, host


async def test_everything_that_the_page_loads_is_here_and_from_here(asked: Asked) -> None:
    static = Path(__file__).parent.parent / "dashboard" / "static"
    own = [path for path in static.rglob("*") if path.is_file() and "vendor" not in path.parts]
    assert len(own) > 5
    for path in own:
        for name in re.findall(r"""(?:from|href=|src=)\s?['"](/[^'"]*)['"]""", path.read_text()):
            assert (static / name.removeprefix("/static/")).is_file(), f"{path.name}: {name}"
        assert "innerHTML" not in path.read_text()
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", path.read_text()), path.name


def test_the_vendored_files_are_those_that_were_published() -> None:
    vendor = Path(__file__).parent.parent / "dashboard" / "static" / "vendor"
    listed = dict(re.findall(r"^([0-9a-f]{64})  (\S+)$", (vendor / "SHA256SUMS").read_text(), re.MULTILINE))
    found = {
        hashlib.sha256(path.read_bytes()).hexdigest(): path.name
        for path in vendor.iterdir()
        if path.suffix in (".js", ".css")
    }
    assert found == listed
    assert {path.name for path in vendor.iterdir() if path.name.startswith("LICENSE")} == {
        "LICENSE.htm",
        "LICENSE.preact",
        "LICENSE.uplot",
    }


# --- the command --------------------------------------------------------------------------------------------------


@pytest.fixture
def started(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "slipstream.launch.cli", "dash", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert re.search(r"-L (\d+):127\.0\.0\.1:\1 ", process.stdout.readline())
        yield process, line.rpartition(" ")[2].strip()
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_interrupted(started: tuple[subprocess.Popen[str], str], number: int) -> None:
    process, url = started

    async def look() -> None:
        async with aiohttp.ClientSession() as client:
            async with client.get(url + "api/runs") as response:
                assert [run["name"] for run in (await response.json())["runs"]] == ["run"]
            async with client.get(url + "api/events") as stream:  # open while it ends
                await stream.content.readuntil(b"\n\n")
                process.send_signal(number)
                assert await stream.content.read() == b""

    asyncio.run(asyncio.wait_for(look(), WAIT_S))
    assert process.wait(WAIT_S) == 0
    assert process.stderr is not None
    assert process.stderr.read() == ""


def test_what_cannot_be_served_is_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "nice", lambda _: 0)  # it would be of this process, and of all tests that follow
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for words, said in (
            ([str(folder), "--port", str(port)], f"127.0.0.1:{port} is in use; name another"),
            ([str(folder), "--port", "70000"], "allowed are 0 to 65535"),
            ([str(folder), "--host", "192.0.2.1", "--port", "0"], "cannot be used"),
            ([str(tmp_path)], "holds no run: there is no config.yaml"),
            ([str(tmp_path / "nothing")], "is no folder"),
        ):
            assert main(["dash", *words]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert said in line


def test_a_damaged_store_is_said_and_ends_nothing(tmp_path: Path) -> None:
    run = DashboardRun(tmp_path / "run")
    run.record(2)
    run.close()
    with sqlite3.connect(run.folder / "buffer.sqlite") as db:
        db.execute("UPDATE trajectories SET header = X'00FF' WHERE group_id = 1")
    index = TrajectoryIndex(StoreReader(run.folder, lambda: False))
    with pytest.raises(StoreError, match="damaged at rowid"):
        index.page(TrajectoryQuery())
    (run.folder / "buffer.sqlite").write_bytes(b"no database at all" * 100)
    with pytest.raises(StoreError, match="cannot read the buffer"):
        index.page(TrajectoryQuery())


def test_headers_of_the_store_are_what_the_index_decodes() -> None:
    """The index skips what it does not show; what it decodes has the names that headers have."""
    assert set(IndexedHeader.__struct_fields__) < set(TrajectoryHeader.__struct_fields__)
