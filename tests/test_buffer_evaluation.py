"""Episodes of evaluations in a file of their own: what reads the buffer reads it, and no evaluation waits for it."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import msgspec
import pytest
from slipstream.buffer import evaluation_episodes as module
from slipstream.buffer.evaluation_episodes import EvaluationEpisodes
from slipstream.buffer.ledger_report import ledger_report
from slipstream.buffer.messages import Lease
from slipstream.buffer.schema import EVALUATION_DATABASE as DATABASE
from slipstream.buffer.store import Store, WriteBatch
from slipstream.buffer.trajectory import FINISHED, Outcome, Trajectory
from slipstream.common.scores import EvaluationResult
from slipstream.dashboard.app import DashServer
from slipstream.dashboard.runs import RunFolder
from slipstream.errors import StoreError
from slipstream.launch.cli.main import main
from slipstream.launch.evaluations import append, begin
from slipstream.rollout.evaluation import evaluate
from slipstream.rollout.player import EpisodeResult
from slipstream.tests.dashboard_runs import DashboardRun
from slipstream.tests.dashboards import IDLE, Asked
from slipstream.tests.episodes import SAMPLED, trajectory
from slipstream.tests.runs import tiny_policy
from slipstream.tests.stores import opened, sql
from slipstream.tests.test_rollout_episode import Ask, player_of

BROKEN = Outcome("failed", "tool", "ToolError: it broke (shop.py:12 price)")
MEMBERS = 2
LIMIT = 1 << 30


def played(episodes: EvaluationEpisodes, label: str, tasks: int, *, sampled: int = SAMPLED) -> list[str]:
    """The ids of an evaluation in which the last member of each group fails."""
    first, ids = episodes.reserve(label, tasks), []
    for task in range(tasks):
        lease = Lease(first + task, 0, tuple(range(MEMBERS)), 0, 0, 0, task)
        for member in lease.members:
            one = trajectory(lease.episode(member), sampled=sampled)
            fails = member == MEMBERS - 1
            if fails:
                one = msgspec.structs.replace(one, outcome=BROKEN)
            branches: tuple[Sequence[Trajectory], ...] = ((), (one,)) if fails else ((one,), ())
            episodes.record(label, lease, member, one.outcome, *branches)
            ids.append(one.id)
    return ids


def test_evaluations_are_read_as_the_buffer_is(tmp_path: Path) -> None:
    ids = list[str]()
    for labels in (("warm start",), ("step 10, easy", "step 10, hard")):  # an evaluator each
        with EvaluationEpisodes(tmp_path, LIMIT) as episodes:
            for label in labels:
                ids += played(episodes, label, 3)
        assert episodes.dropped == 0
    path = tmp_path / DATABASE
    assert len(set(ids)) == len(ids) == 3 * 3 * MEMBERS
    kept = [row[0] for row in sql(path, "SELECT id FROM trajectories UNION ALL SELECT id FROM failed")]
    assert sorted(map(str, kept)) == sorted(ids)
    labels = sql(path, "SELECT request, count(*), min(id), max(id) FROM groups GROUP BY request ORDER BY min(id)")
    assert labels == [("warm start", 3, 0, 2), ("step 10, easy", 3, 3, 5), ("step 10, hard", 3, 6, 8)]
    total = ledger_report(path).total
    assert total.balances
    half = 3 * 3 * SAMPLED
    assert (total.generated, total.discarded) == (2 * half, {"evaluation": half, "failed_tool": half})
    with opened(path) as store:
        assert store.load()[1] == []  # nothing that could be leased, taken or rolled back
        (one,) = store.trajectories(4)
        assert one.id == "4.0.0.0"


def test_the_oldest_evaluations_go_when_the_file_is_too_large(tmp_path: Path) -> None:
    for number in range(6):
        with EvaluationEpisodes(tmp_path, 1 << 20) as episodes:
            played(episodes, f"step {number}", 4, sampled=20_000)  # 1.4 MB
    path = tmp_path / DATABASE
    held = {
        row[0]
        for row in sql(
            path, "SELECT request FROM groups g JOIN trajectories t ON t.group_id = g.id WHERE t.arrays NOT NULL"
        )
    }
    assert held <= {"step 5"}
    assert path.stat().st_size < 1 << 20
    assert ledger_report(path).total.generated == 6 * 4 * MEMBERS * 20_000


def test_a_disk_that_hangs_or_refuses_delays_no_evaluation_and_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "EPISODES_WAITING", 4)
    goes_on, entered, save = threading.Event(), threading.Event(), Store.save

    def hang(store: Store, batch: WriteBatch) -> None:
        entered.set()
        assert goes_on.wait(30)
        save(store, batch)

    monkeypatch.setattr(Store, "save", hang)
    with EvaluationEpisodes(tmp_path, LIMIT) as episodes:
        played(episodes, "step 1", 1)
        assert entered.wait(30)
        played(episodes, "step 2", 10)
        assert episodes.dropped >= 20 - 4 - 1
        goes_on.set()
    written = sql(tmp_path / DATABASE, "SELECT count(*) FROM episodes")
    assert written == [(22 - episodes.dropped,)]

    for refusal in (StoreError("no space left on the device"), ValueError("an unforeseen one")):

        def refuse(store: Store, batch: WriteBatch, why: Exception = refusal) -> None:
            raise why

        monkeypatch.setattr(Store, "save", refuse)
        with EvaluationEpisodes(tmp_path, LIMIT) as episodes:
            played(episodes, "step 3", 1)
        assert episodes.dropped == MEMBERS
    goes_on.clear()
    monkeypatch.setattr(Store, "save", hang)
    monkeypatch.setattr(module, "END_S", 0.1)
    with EvaluationEpisodes(tmp_path, LIMIT) as episodes:
        played(episodes, "step 4", 1)
    assert "may not be in" in caplog.text
    goes_on.set()
    episodes._thread.join(30)  # pyright: ignore[reportPrivateUsage] - the file is this test's
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / DATABASE).write_bytes(b"no database" * 100)
    with EvaluationEpisodes(tmp_path / "other", LIMIT) as unreadable, EvaluationEpisodes(None, LIMIT) as nowhere:
        for none in (unreadable, nowhere):
            assert len(played(none, "step 4", 2)) == 2 * MEMBERS
    assert "the episodes of this evaluation are not kept" in caplog.text


async def test_every_episode_of_an_evaluation_is_handed_over_by_the_number_of_its_group(tmp_path: Path) -> None:
    kept: list[tuple[int, int, EpisodeResult]] = []
    env = Ask()
    player = player_of(tiny_policy(tmp_path / "policy"), env)
    with EvaluationEpisodes(tmp_path, LIMIT) as episodes:

        def keep(lease: Lease, member: int, one: EpisodeResult) -> None:
            kept.append((lease.group_id, member, one))
            episodes.record("final", lease, member, one.outcome, one.trajectories, one.failed_branches)

        episodes.reserve("warm start", 7)
        result = await evaluate(player, "final", 3, 2, first=episodes.reserve("final", 3), keep=keep)
    assert sorted((group, member) for group, member, _ in kept) == [(g, m) for g in (7, 8, 9) for m in (0, 1)]
    assert result.outcomes == {"finished": 6}
    rewards = sql(tmp_path / DATABASE, "SELECT id, reward FROM trajectories ORDER BY id")
    assert rewards == [(f"{g}.0.{m}.0", 1.0) for g in (7, 8, 9) for m in (0, 1)]
    outcomes = sql(tmp_path / DATABASE, "SELECT DISTINCT outcome FROM episodes")
    assert outcomes == [(msgspec.json.encode(FINISHED).decode(),)]


async def test_the_dashboard_shows_them_with_the_evaluation_that_they_are_of(tmp_path: Path) -> None:
    run = DashboardRun(tmp_path / "run")
    run.record(2)
    run.close()
    with EvaluationEpisodes(run.folder, LIMIT) as episodes:
        ids = played(episodes, "warm start", 2) + played(episodes, "final", 2)
    async with DashServer(RunFolder(run.folder, IDLE), "127.0.0.1", 0, "") as server, aiohttp.ClientSession() as client:
        asked, base = Asked(server, client), "/api/runs/run"
        page = await asked(f"{base}/trajectories", source="evaluation")
        rows = {row["id"]: row["evaluation"] for row in page["rows"]}
        assert rows == {id: "warm start" if int(id[0]) < 2 else "final" for id in ids if id.endswith("0.0")}
        failed = (await asked(f"{base}/trajectories", source="evaluation_failed"))["rows"]
        assert [(row["id"], row["detail"]) for row in failed] == [(f"{g}.0.1.0", BROKEN.detail) for g in (3, 2, 1, 0)]
        for id in ids:
            one = await asked(f"{base}/trajectories/{id}", source="evaluation")
            assert (one["request"], one["env"]) == ("warm start" if int(id[0]) < 2 else "final", "env")
            window = await asked(f"{base}/trajectories/{id}/tokens", source="evaluation", start=0, end=SAMPLED + 1)
            assert window["ids"] == list(range(SAMPLED + 1))
            assert window["loss"] == [0] + [2] * SAMPLED
        members = (await asked(f"{base}/groups/3", source="evaluation"))["members"]
        assert [one["id"] for one in members] == ["3.0.0.0", "3.0.1.0"]
        trained = await asked(f"{base}/trajectories/0.0.0.0")  # the run's own
        assert trained["env"] == "calculator"


async def test_a_run_without_evaluations_has_an_empty_list(tmp_path: Path) -> None:
    run = DashboardRun(tmp_path / "run")
    run.record(1)
    run.close()
    async with DashServer(RunFolder(run.folder, IDLE), "127.0.0.1", 0, "") as server, aiohttp.ClientSession() as client:
        asked = Asked(server, client)
        assert (await asked("/api/runs/run/trajectories", source="evaluation"))["total"] == 0
        status, _ = await asked.refused("/api/runs/run/trajectories/0.0.0.0", source="evaluation")
        assert status == 409
    assert not (run.folder / DATABASE).exists()


def test_they_are_shown_and_exported_by_the_label_of_their_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = DashboardRun(tmp_path / "run")
    run.record(2)
    run.close()
    folder = str(run.folder)
    for arguments in (["show", folder], ["export", folder, "--to", "jsonl"]):
        assert main([*arguments, "--evaluation", "final"]) == 2
        message = f"--evaluation final: {folder} has no such episodes; it has those of no evaluation"
        assert capsys.readouterr().err == f"slipstream: {message}\n"
    with EvaluationEpisodes(run.folder, LIMIT) as episodes:
        ids = played(episodes, "warm start", 2) + played(episodes, "step 10, hard", 2)

    def shown(*options: str) -> list[str]:
        assert main(["show", folder, "--count", "9", *options]) == 0
        title, *lines = capsys.readouterr().out.splitlines()
        return [title, *(line.removeprefix("== episode ") for line in lines if line.startswith("== episode "))]

    newest = "step 10, hard: 2 episodes of 2 groups, reward 0.000, 0 to 0; 2 more failed (--failed)"
    assert shown("--evaluation") == [newest, "3.0.0", "2.0.0"]
    assert shown("--evaluation", "warm start", "--best")[1:] == ["1.0.0", "0.0.0"]
    assert shown("--evaluation", "warm start", "--failed") == [
        "2 episodes of warm start failed", "1.0.1", "0.0.1"
    ]  # fmt: skip
    assert main(["show", folder, "--evaluation", "--episode", "1.0.0"]) == 0
    text = capsys.readouterr().out
    assert "of the evaluation 'warm start'" in text
    assert "staleness" not in text
    assert main(["show", folder, "--evaluation", "--step", "1"]) == 2
    assert main(["show", folder, "--evaluation", "step 10"]) == 2
    assert "it has those of 'warm start', 'step 10, hard'\n" in capsys.readouterr().err

    assert main(["export", folder, "--to", "jsonl", "--evaluation"]) == 0
    rows = [json.loads(line) for line in (run.folder / "evaluation-trajectories.jsonl").read_text().splitlines()]
    assert {row["id"]: row["evaluation"] for row in rows} == {
        id: "warm start" if int(id[0]) < 2 else "step 10, hard" for id in ids
    }
    assert {row["step"] for row in rows} == {None}
    one = str(tmp_path / "one.jsonl")
    assert main(["export", folder, "--to", "jsonl", "--evaluation", "warm start", "-o", one]) == 0
    assert {json.loads(line)["id"] for line in Path(one).read_text().splitlines()} == set(ids[:4])
    capsys.readouterr()
    for options, other in (((), "--to hf"), (("--to", "jsonl", "--step", "1"), "--step")):
        assert main(["export", folder, "--evaluation", *options]) == 2
        assert capsys.readouterr().err.startswith(f"slipstream: --evaluation, {other}: ")


def test_episodes_keep_the_label_of_their_results(tmp_path: Path) -> None:
    def labels() -> list[str]:
        return [row[0] for row in sql(tmp_path / DATABASE, "SELECT request FROM groups ORDER BY id")]

    for label in ("final", "final, hard"):
        suite = label.partition(", ")[2]
        score = {"tasks": 1, "reward_mean": 0.5, "reward_stderr": 0.0, "outcomes": {}}
        append(tmp_path, EvaluationResult(**score, label="final", version=20, seconds=1.0, step=20, suite=suite))
        with EvaluationEpisodes(tmp_path, LIMIT) as episodes:
            played(episodes, label, 1)
    begin(tmp_path, 20)
    assert labels() == ["final", "final, hard"]
    begin(tmp_path, 30)  # it goes on
    assert labels() == ["step 20", "step 20, hard"]
    with EvaluationEpisodes(tmp_path, LIMIT) as episodes:
        played(episodes, "final", 1)  # and is killed
    with EvaluationEpisodes(tmp_path, LIMIT) as episodes:
        played(episodes, "final", 1)
    assert labels() == ["step 20", "step 20, hard", "final (interrupted)", "final"]
