"""`slipstream show`: the right episodes, all of their text, and nothing of it that a terminal obeys."""

from __future__ import annotations

import io
import json
import re
import sqlite3
import subprocess
import sys
import unicodedata
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from rich.cells import cell_len
from slipstream.buffer.encoded import DeliveredTrajectory, EncodedTrajectory
from slipstream.buffer.trajectory import FINISHED, Outcome, Trajectory, sampled_of
from slipstream.launch.cli.main import main
from slipstream.monitor.metrics import METRICS, read_metrics
from slipstream.tests import dashboard_runs, forkserver
from slipstream.tests.dashboard_runs import MEMBERS, DashboardRun
from slipstream.tests.runs import WAIT_S
from slipstream.tests.test_dashboard_failed import DETAIL, fail

GROUPS = 4
HOSTILE = "\x1b[2J\x1b]0;owned\x07[bold red]red[/] [/nope] :smile: \x9b31m\r\b\u202egnp.exe\u2066\x7f \\x1b 漢字 😀 ✓ ¤"
BYTE = "¤"
STYLE = re.compile(r"\x1b\[[0-9;]*m")  # what rich itself writes


class HostileRun(DashboardRun):
    """Where its texts have `BYTE` its tokens have one that is no UTF-8."""

    def ids(self, text: str) -> list[int]:
        wrong = self.tokenizer.token_to_id("ÿ")
        first, *others = map(super().ids, text.split(BYTE))
        return [*first, *(id for other in others for id in (wrong, *other))]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Trajectory]]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dashboard_runs, "PLANTED", HOSTILE)
        run = HostileRun(tmp_path_factory.mktemp("show") / "run")
        trajectories = run.record(GROUPS)
        run.close()
    return run.folder, trajectories


def shown(capsys: pytest.CaptureFixture[str], folder: Path, *options: str) -> str:
    assert main(["show", str(folder), *options]) == 0
    return capsys.readouterr().out


def episodes_of(text: str) -> list[str]:
    return re.findall(r"^== episode (\S+)$", text, re.MULTILINE)


def test_an_episode_of_the_newest_step_is_shown_as_messages(
    made: tuple[Path, list[Trajectory]], capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(capsys, made[0])
    assert text.startswith(f"step 3: {MEMBERS} episodes of 1 group, reward 0.500, 0 to 1\n")
    (id,) = episodes_of(text)
    one = next(t for t in made[1] if t.episode == id)
    assert one.group_id == 2
    assert re.search(r"^reward \d\.000, (finished|truncated) after 2 turns in 1\.\d0 s$", text, re.MULTILINE)
    assert (
        f"{one.sampled} tokens sampled, {len(one)} with those given; trained in the batch that made version 3" in text
    )
    assert "sampled by version 0 to 2, staleness 0 to 2" in text
    headings = re.findall(r"^(user|assistant)(?:, turn (\d))?", text, re.MULTILINE)
    assert headings == [("user", ""), ("assistant", "1"), ("user", ""), ("assistant", "2")]
    assert f"What is 2 + {one.member}?" in text
    assert f"calculator({one.group_id})" in text


class BranchingRun(DashboardRun):
    """Whose episodes have a second branch, which ends after its first turn."""

    def branches(self, episode: str) -> tuple[Trajectory, Trajectory]:
        whole = self.trajectory(episode)
        (turn, _), (span, *_) = whole.turns, whole.version_spans
        fields = ("token_ids", "loss_mask", "behavior_logprobs")
        cut = {name: getattr(whole, name)[: turn.end] for name in fields}
        spans = {"turns": (turn,), "version_spans": (span,)}
        return whole, msgspec.structs.replace(whole, id=f"{episode}.1", branch=1, **cut, **spans)

    def play(self) -> list[Trajectory]:
        lease = self.replay.leases.grant("worker-0", 0.0)
        assert lease is not None
        made = list[Trajectory]()
        for member in lease.members:
            both = self.branches(lease.episode(member))
            counts = sampled_of(lease.episode(member), both)
            assert self.replay.leases.deliver(lease.episode(member), FINISHED, counts, counts, both[0].reward)
            made += both
        self._save([DeliveredTrajectory.of(one.episode, one, EncodedTrajectory.of(one)) for one in made])
        return made


def test_of_branches_it_says_what_all_sampled_and_how_long_the_longest_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = BranchingRun(tmp_path / "run")
    made = run.record(2)
    run.close()
    text = shown(capsys, tmp_path / "run")
    (id,) = episodes_of(text)
    whole, cut = (one for one in made if one.episode == id)
    assert len(whole) > len(cut)
    sampled = whole.sampled + cut.sampled
    assert f"\n{sampled} tokens sampled in 2 branches, the longest has {len(whole)} with those given; trained" in text


def test_tokens_whose_file_is_lost_are_not_said_to_be_dropped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = DashboardRun(tmp_path / "run")
    run.record(1)
    run.close()
    for path in (arrays := run.folder / "buffer.arrays").iterdir():
        path.unlink()
    text = shown(capsys, run.folder)
    assert f"its tokens are missing or damaged in {arrays}" in text
    assert "dropped" not in text
    with closing(sqlite3.connect(run.folder / "buffer.sqlite")) as db, db:
        db.execute("UPDATE trajectories SET arrays = NULL")
    assert "its tokens were dropped to free space (`buffer.keep`)" in shown(capsys, run.folder)


@pytest.mark.parametrize("options", [(), ("--tokens",)], ids=["messages", "tokens"])
@pytest.mark.parametrize("width", [20, 120])
def test_no_text_of_the_run_moves_the_terminal(
    options: tuple[str, ...],
    width: int,
    made: tuple[Path, list[Trajectory]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(width))
    colored = shown(capsys, made[0], *options)
    assert STYLE.search(colored)
    text = STYLE.sub("", colored)
    assert {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs")} == {"\n"}
    assert max(map(cell_len, text.splitlines())) <= width
    joined = "".join(text.split())
    for kept in (r"\x1b[2J", "[boldred]red[/]", "[/nope]:smile:"):
        assert options or kept in joined


def test_tokens_are_those_of_the_trajectory(
    made: tuple[Path, list[Trajectory]], capsys: pytest.CaptureFixture[str]
) -> None:
    one = made[1][5]
    text = shown(capsys, made[0], "--episode", one.episode, "--tokens")
    found = re.findall(r"^ +(\d+) +(\d+) +(\d+) +(\d+) +(-?[\d.]+)  yes ", text, re.MULTILINE)
    sampled = [at for at, mask in enumerate(one.loss_mask.tolist()) if mask]
    assert [int(at) for at, *_ in found] == sampled
    assert [int(id) for _, id, *_ in found] == one.token_ids[sampled].tolist()
    assert [int(version) for _, _, version, *_ in found] == one.versions()[sampled].tolist()
    assert [int(staleness) for *_, staleness, _ in found] == [1 - v for v in one.versions()[sampled].tolist()]
    assert [float(p) for *_, p in found] == pytest.approx(one.behavior_logprobs[sampled].tolist(), abs=5e-4)
    assert text.count("not sampled") == 2


def test_the_worst_the_best_and_any_one(
    made: tuple[Path, list[Trajectory]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, trajectories = made
    rewards = {t.episode: t.reward for t in trajectories}
    for option, wanted in (("--worst", [0.0, 0.0, 1.0]), ("--best", [1.0, 1.0, 0.0])):
        text = shown(capsys, folder, "--step", "1", option, "--count", "3")
        assert text.startswith("step 1: ")
        ids = episodes_of(text)
        assert {id.partition(".")[0] for id in ids} == {"0"}
        assert [rewards[id] for id in ids] == wanted
    assert len(episodes_of(shown(capsys, folder, "--count", "100"))) == MEMBERS
    assert episodes_of(shown(capsys, folder, "--episode", trajectories[6].id)) == [trajectories[6].episode]


@pytest.mark.parametrize("command", ["show", "trace"])
def test_a_step_of_the_critics_warm_up_is_named(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = DashboardRun(tmp_path / "run")
    run.record(4)
    run.close()
    path = run.folder / METRICS
    rows = [row | {"step": row["step"] + 2} for row in read_metrics(path)]
    warmup = [rows[0] | {"step": step, "version": 0, "grad_norm": None} for step in (1, 2)]
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in [*warmup, *rows]))
    assert main([command, str(run.folder), "--step" if command == "show" else "--steps", "2"]) == 2
    line = "it has trained steps 3 to 5; steps 1 to 2 were the critic's warm-up, in which the policy is not trained\n"
    assert capsys.readouterr().err.endswith(line)
    if command == "show":
        assert shown(capsys, run.folder, "--step", "3").startswith("step 3: ")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--step", "9"), "--step 9: {run} has not trained that step; it has trained steps 1 to 3"),
        (
            ("--episode", "77.0.1"),
            "episode 77.0.1 is not in {run}/buffer.sqlite: there was none, or its rows were dropped to free space",
        ),
        (("--episode", "0.0.1", "--step", "1"), "--episode, --step: an episode is of one step; give one of the two"),
        (("--count", "0"), "--count 0: allowed are 1 to 1000"),
    ],
)
def test_what_is_not_there_is_one_line(
    options: tuple[str, ...], line: str, made: tuple[Path, list[Trajectory]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(made[0]), *options]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"slipstream: {line.format(run=made[0])}\n")


def test_a_run_under_way_and_what_failed_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its writer is not held up: the log is written back as a whole at once after."""
    run = DashboardRun(tmp_path / "run")
    assert shown(capsys, run.folder) == "no step was trained yet; 0 trajectories were delivered\n"
    assert shown(capsys, run.folder, "--failed") == "no episode of the run failed\n"
    lease = run.replay.leases.grant("worker-0", 0.0)
    assert lease is not None
    failure = Outcome("failed", "environment", "KeyError: 'x' in step, my_env.py:12\n[red]\x1b[31m")
    for member in lease.members:
        assert not run.replay.leases.deliver(lease.episode(member), failure, {0: 7}, {})
    run._save([])
    made = run.play()
    text = shown(capsys, run.folder)
    assert text.startswith(f"no step was trained yet; {len(made)} trajectories were delivered, the newest:\n")
    assert episodes_of(text) == [made[-1].episode]
    text = shown(capsys, run.folder, "--failed", "--count", "2")
    assert text.startswith(f"{MEMBERS} episodes of the run failed\n")
    assert len(episodes_of(text)) == 2
    assert "failed: environment\nKeyError: 'x' in step, my_env.py:12\n[red]\\x1b[31m\nit left no tokens\n" in text
    assert "7 tokens generated by worker-0, discarded (failed environment)" in text
    with sqlite3.connect(run.folder / "buffer.sqlite", timeout=1.0) as writer:
        assert writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0
    run.close()


def test_a_failed_episode_has_its_messages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = DashboardRun(tmp_path / "run")
    run.record(2)
    one = fail(run)[-1]
    run.close()
    text = shown(capsys, run.folder, "--failed")
    assert episodes_of(text) == [one.episode]
    assert f"failed: tool\n{DETAIL}\n" in text
    assert f"calculator({one.group_id})" in text
    assert "left no tokens" not in text
    tokens = shown(capsys, run.folder, "--episode", one.episode, "--tokens")
    assert len(re.findall(r"^ +\d+ +\d+ +\d+ +\d+ +-?[\d.]+  no ", tokens, re.MULTILINE)) == one.sampled
    assert main(["export", str(run.folder), "--to", "jsonl"]) == 0
    rows = [json.loads(line) for line in (run.folder / "trajectories.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows[-MEMBERS:]] == [f"{one.group_id}.0.{member}.0" for member in range(MEMBERS)]
    assert rows[-1]["outcome"] == {"kind": "failed", "reason": "tool", "detail": DETAIL}
    assert rows[-1]["token_ids"] == one.token_ids.tolist()
    assert (rows[-1]["account"], rows[-1]["messages"][1]["text"]) == ("discarded", f"calculator({one.group_id})")


def test_a_folder_without_a_buffer_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"slipstream: {tmp_path} holds no run: there is no {tmp_path}/config.yaml\n"
    (tmp_path / "config.yaml").write_text("extends: quickstart\n")
    said = f"{tmp_path} has no buffer yet: the run has not started to play; {tmp_path}/logs says how far it came"
    for words in (["show", str(tmp_path)], ["export", str(tmp_path), "--to", "jsonl"]):
        assert main(words) == 2
        assert capsys.readouterr().err == f"slipstream: {said}\n"
    assert main(["show", str(tmp_path), "--evaluation"]) == 2
    assert "it has those of no evaluation" in capsys.readouterr().err


def test_what_the_encoding_has_not_is_an_escape(
    made: tuple[Path, list[Trajectory]], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["show", str(made[0])]) == 0
    text = out.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    assert "\\u2713" in text
    assert "\\u6f22" in text


def test_a_closed_pipe_is_no_error(made: tuple[Path, list[Trajectory]]) -> None:
    command = [sys.executable, "-m", "slipstream.launch.cli", "show", str(made[0]), "--count", "4", "--tokens"]
    with (
        forkserver.disabled(),
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0) as process,
    ):
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1) == b"s"
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait(WAIT_S) == 0
    assert b"Traceback" not in errors
