"""A run as one file: what it says is what the server says, it loads nothing, and it never harms the run that it is of."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import aiohttp
import pytest
from slipstream.dashboard import export, sample
from slipstream.dashboard.app import DashServer
from slipstream.dashboard.export import export_run, record
from slipstream.dashboard.runs import ENDED, RunFolder, WatchedRun
from slipstream.dashboard.sample import thinned
from slipstream.launch.cli.main import main
from slipstream.launch.run import summary, write_report
from slipstream.monitor.alerts import Alert
from slipstream.monitor.annotations import AnnotationWriter
from slipstream.planner.explain.findings import Explanation
from slipstream.tests.dashboard_runs import MEMBERS, PLANTED, DashboardRun
from slipstream.tests.dashboards import IDLE, Asked
from slipstream.tests.reports import DATA, recorded_in
from slipstream.tests.test_dashboard_annotations import annotations_of

GROUPS = 7
FAR = 1e9  # seconds
NOBODY = 65534  # a user without rights
SAID = Explanation(run="runs/x", alerts=(), note=f"nothing {PLANTED}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = DashboardRun(tmp_path_factory.mktemp("export") / "run")
    run.record(GROUPS)
    run.close()
    return run.folder


@pytest.fixture(scope="module")
def file(folder: Path) -> Path:
    path = folder.parent / "file.html"
    export_run(WatchedRun("run", folder, ENDED), path, SAID, FAR)
    return path


async def test_its_answers_are_those_of_the_server(file: Path, folder: Path) -> None:
    found = recorded_in(file)
    answers = found["answers"]
    async with DashServer(RunFolder(folder, IDLE), "127.0.0.1", 0, "") as server, aiohttp.ClientSession() as client:
        asked = Asked(server, client)
        for path in ("now", "staleness", "ratios", "tokens", "environments"):
            assert answers[path] == await asked(f"/api/runs/run/{path}"), path
        assert found["runs"] == (await asked("/api/runs"))["runs"]
        listed = await asked("/api/runs/run/trajectories", limit=200)
        every = {row["id"]: row for row in listed["rows"]}
        rows = found["trajectories"]["rows"]
        assert (len(rows), found["trajectories"]["indexed"]) == ((GROUPS - 1) * MEMBERS, GROUPS * MEMBERS)
        for row in rows:
            assert row == every[row["id"]]
            path = f"trajectories/{row['id']}"
            assert answers[path] == await asked(f"/api/runs/run/{path}", bins=sample.BINS)
            tokens = await asked(f"/api/runs/run/{path}/tokens", start=0, end=row["tokens"])
            assert answers[f"{path}/tokens"] == tokens
            assert answers[f"{path}/messages"] == await asked(f"/api/runs/run/{path}/messages")
        names = ",".join(answers["curves"]["names"])
        assert answers["curves"] == await asked("/api/runs/run/curves", names=names)
        for version in range(1, GROUPS):
            assert answers[f"batches/{version}"] == await asked(f"/api/runs/run/batches/{version}")
        group = await asked("/api/runs/run/groups/3")
        assert answers["groups/3"] == group
    assert answers["groups/5"]["next"] is None  # the last of the sample, not of the run
    assert found["refused"] == {}
    assert answers["explanation"]["note"] == f"nothing {PLANTED}"


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]


def test_it_loads_nothing_and_runs_only_what_is_in_it(file: Path) -> None:
    text = file.read_text()
    tags = Tags(re.sub(DATA, "", text, flags=re.DOTALL))
    assert all(address.startswith("data:") for address in tags.addresses)
    assert "/static/" not in re.sub(DATA, "", text, flags=re.DOTALL)
    (policy,) = (given["content"] for tag, given in tags.found if given.get("http-equiv") == "Content-Security-Policy")
    nonces = {given["nonce"] for tag, given in tags.found if tag in ("script", "style") and "nonce" in given}
    assert policy is not None
    assert "default-src 'none'" in policy
    assert nonces == {found for found in re.findall(r"'nonce-([^']+)'", policy)}
    assert len(nonces) == 1
    # Every module that one imports is there.
    (block,) = re.findall(r'<script type="importmap"[^>]*>(.*?)</script>', text, re.DOTALL)
    modules = json.loads(block)["imports"]
    for address in modules.values():
        code = base64.b64decode(address.partition("base64,")[2]).decode()
        assert set(re.findall(r"""^import .*from '([^']+)';$""", code, re.MULTILINE)) <= modules.keys()
    assert "static/app.js" in modules
    assert "import 'static/app.js'" in text
    assert text.count("<img src=x") == 0


def test_a_title_is_text(folder: Path) -> None:
    recorded = record(WatchedRun("run", folder, ENDED), SAID, time.monotonic())
    assert "<title>&lt;b&gt; · Slipstream</title>" in export.page("<b>", recorded)


def test_its_size_is_bounded_and_its_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = record(WatchedRun("run", folder, ENDED), SAID, time.monotonic() - 1)
    assert (late.trajectories["rows"], late.trajectories["indexed"]) == ([], GROUPS * MEMBERS)
    assert {"now", "curves", "tokens", "timeline", "explanation"} <= late.answers.keys()
    monkeypatch.setattr(sample, "SAMPLE_BYTES", 60_000)
    small = record(WatchedRun("run", folder, ENDED), SAID, time.monotonic() + FAR)
    rows = small.trajectories["rows"]
    assert 0 < len(rows) < (GROUPS - 1) * MEMBERS
    assert sum(map(len, small.answers.values())) - sum(map(len, late.answers.values())) < 70_000
    assert {f"trajectories/{row['id']}/tokens" for row in rows} <= small.answers.keys()
    monkeypatch.setattr(export, "STEPS", 3)
    short = record(WatchedRun("run", folder, ENDED), SAID, time.monotonic())
    curves = json.loads(bytes(short.answers["curves"]))
    assert curves["steps"] == [1, 3, 6]
    assert all(len(values) == 3 for values in curves["columns"].values())


def test_thinned_columns_keep_the_first_step_and_the_last() -> None:
    steps = list(range(1, 101))
    every = {"steps": steps, "versions": steps, "seconds": steps, "names": ["a"], "columns": {"a": steps}}
    short = thinned(every, 10)
    assert len(short["steps"]) == 10
    assert (short["steps"][0], short["columns"]["a"][-1]) == (1, 100)
    assert thinned(every, 1000) == every


def test_windows_of_tokens_are_joined_and_annotated_groups_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = DashboardRun(tmp_path / "run")
    made = run.record(3)
    run.close()
    with sqlite3.connect(run.folder / "buffer.sqlite") as db:
        db.execute("UPDATE groups SET trained_at = 1 WHERE id = 1")  # both in one batch
    with AnnotationWriter(run.folder, "learner-0", 1 << 20) as writer:
        writer.record(1, [annotations_of(one) for one in made if one.group_id == 1])
    monkeypatch.setattr(sample, "GROUPS", 1)
    whole = record(WatchedRun("run", run.folder, ENDED), SAID, time.monotonic() + FAR)
    assert {row["group"] for row in whole.trajectories["rows"]} == {1}
    monkeypatch.setattr(sample, "WINDOW", 50)
    parts = record(WatchedRun("run", run.folder, ENDED), SAID, time.monotonic() + FAR)
    path = "trajectories/1.0.1.0/tokens"
    assert json.loads(bytes(parts.answers[path])) == json.loads(bytes(whole.answers[path]))
    tokens = json.loads(bytes(whole.answers[path]))
    assert len(tokens["annotations"]["entropy"]) == len(tokens["ids"]) > 150


def test_a_run_without_a_step_a_store_or_tokens_has_its_file(tmp_path: Path) -> None:
    run = DashboardRun(tmp_path / "run")
    run.play()
    run.close()
    found = record(WatchedRun("run", run.folder, ENDED), SAID, time.monotonic() + FAR)
    assert len(found.trajectories["rows"]) == MEMBERS  # of the newest groups, because none was trained on
    with sqlite3.connect(run.folder / "buffer.sqlite") as db:
        db.execute("UPDATE trajectories SET arrays = NULL")
    found = record(WatchedRun("run", run.folder, ENDED), SAID, time.monotonic() + FAR)
    assert len(found.trajectories["rows"]) == MEMBERS
    assert not [path for path in found.answers if path.endswith("/tokens")]
    (run.folder / "buffer.sqlite").write_bytes(b"no database at all" * 100)
    found = record(WatchedRun("run", run.folder, ENDED), SAID, time.monotonic() + FAR)
    assert "cannot read the buffer" in found.refused["tokens"]
    assert {"now", "curves", "explanation"} <= found.answers.keys()
    (run.folder / "buffer.sqlite").unlink()
    assert record(WatchedRun("run", run.folder, ENDED), SAID, time.monotonic() + FAR).trajectories["rows"] == []


# --- the command, and the end of a run ------------------------------------------------------------------------------


def test_the_command_writes_it_or_says_in_a_line_why_not(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.html"
    assert main(["dash", str(folder), "--export", str(out)]) == 0
    assert re.search(rf"MB, with {(GROUPS - 1) * MEMBERS} of {GROUPS * MEMBERS} trajectories", capsys.readouterr().out)
    assert len(recorded_in(out)["trajectories"]["rows"]) == (GROUPS - 1) * MEMBERS
    older = tmp_path / "older"
    shutil.copytree(folder, older)
    with sqlite3.connect(older / "buffer.sqlite") as db:
        db.execute("PRAGMA user_version = 1")
    assert main(["dash", str(older), "--export", str(tmp_path / "older.html")]) == 0
    (line,) = capsys.readouterr().out.splitlines()[1:]
    assert re.match(r"not in it: \w.*trajectories: .* has schema 1, this program knows", line)
    for name in ("a", "b"):
        (tmp_path / "two" / name).mkdir(parents=True)
        (tmp_path / "two" / name / "config.yaml").write_bytes((folder / "config.yaml").read_bytes())
    for words, said in (
        ([str(folder), "--export", str(tmp_path / "no" / "x.html")], "there is no folder"),
        ([str(folder), "--export", str(tmp_path)], "is a folder"),
        ([str(tmp_path / "two"), "--export", str(out)], "holds 2 runs; name one of them"),
        ([str(folder), "--export", str(out), "--port", "1"], "--port: a file is not served"),
    ):
        assert main(["dash", *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line


@pytest.fixture
def locked() -> Iterator[Path]:
    """A folder that this process has no permission for, in one that it has: root gives up its rights meanwhile."""
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as parent:
        Path(parent).chmod(0o755)
        folder = Path(parent).resolve() / "locked"
        folder.mkdir(mode=0)
        if user == 0:
            os.seteuid(NOBODY)
        yield folder
        os.seteuid(user)
        folder.chmod(0o700)


TAKES_FOLDER = (("dash",), ("eval",), ("tune", "--minutes", "10"), ("submit", "slurm"))


@pytest.mark.parametrize("command", TAKES_FOLDER, ids=lambda words: words[0])
def test_a_folder_without_permission_is_said_in_a_line(
    command: tuple[str, ...], locked: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, str(locked / "run")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{locked / 'run'} cannot be read: Permission denied" in line


def test_a_folder_of_runs_without_permission_is_said_in_a_line(
    locked: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dash", str(locked)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot be read: Permission denied" in line


def test_a_run_ends_well_also_where_its_report_cannot_be_written(tmp_path: Path) -> None:
    run = DashboardRun(tmp_path / "run")
    run.record(3)
    run.close()
    alert = Alert("failures", "warning", "98 of 128 episodes failed", "", 3, 5.0)
    report = write_report(run.folder, Explanation(run="x", alerts=(alert,)))
    assert report.problem == ""
    assert f"report: {run.folder / 'report.html'}" in summary(report)
    assert "98 of 128 episodes failed" in summary(report)
    assert recorded_in(report.path)["answers"]["explanation"]["alerts"][0]["text"] == "98 of 128 episodes failed"
    report.path.unlink()
    report.path.mkdir()
    again = write_report(run.folder, SAID)
    assert "report: not written: " in summary(again)
