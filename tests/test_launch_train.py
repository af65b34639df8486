"""Whole runs on real parts: every process, socket, server and collective is the one that users get."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from slipstream.buffer.trajectory import TrajectoryHeader
from slipstream.launch import evaluations
from slipstream.launch.checkpoint_evaluation import FOLDER
from slipstream.launch.explain import explain_or_say_why
from slipstream.learner.metrics import StepMetrics
from slipstream.monitor.series import read_evaluations
from slipstream.monitor.timeline import read_series, read_spans
from slipstream.tests import forkgate, forkserver
from slipstream.tests.dashboards import check_dashboard, check_written
from slipstream.tests.reports import evaluations_in, recorded_in
from slipstream.tests.runs import (
    ENDLESS,
    SMALL,
    WAIT_S,
    Background,
    check_accounts,
    ledger,
    leftovers,
    metrics,
    query,
    slipstream,
)

BOUND = 2
"""`buffer.max_staleness` of the quickstart."""


def check_staleness(run_dir: Path, bound: int = BOUND) -> None:
    """No trained token is older than the bound, and what is withheld had to be: counted from the stored spans and,
    independently, from the learner's own metrics."""
    sql = (
        "SELECT g.trained_at, e.loss_from, t.header FROM groups g JOIN episodes e ON e.group_id = g.id"
        " JOIN trajectories t ON t.episode_id = e.id WHERE g.state = 'trained' AND e.account = 'trained'"
    )
    trained: Counter[int] = Counter()
    for made, loss_from, header in query(run_dir, sql):
        for start, end, version, *_ in msgspec.msgpack.decode(header[1:])["version_spans"]:
            age = made - 1 - version
            assert age >= 0
            assert (version >= loss_from) == (age <= bound)
            trained[made] += (end - start) * (age <= bound)
    assert trained
    rows = {row["version"]: row for row in metrics(run_dir)}
    assert all(rows[version]["tokens_trained"] == tokens for version, tokens in trained.items() if version in rows)
    assert len(trained.keys() & rows.keys()) > 0
    assert all(row["staleness_max"] <= bound for row in rows.values())


def check_times(run_dir: Path) -> None:
    """Everything of a trained episode is in the order in which it happened, on one host's clock."""
    sql = (
        "SELECT g.id, leased_time, ready_time, taken_time, delivered_time, c.time, max_staleness, groups_per_batch, t.header"
        " FROM groups g JOIN episodes e ON e.group_id = g.id JOIN trajectories t ON t.episode_id = e.id"
        " JOIN commits c ON c.version = g.trained_at WHERE g.state = 'trained' AND e.account = 'trained'"
    )
    cached = found = 0
    for group, leased, ready, taken, delivered, committed, bound, groups, encoded in query(run_dir, sql):
        header = msgspec.msgpack.decode(encoded[1:], type=TrajectoryHeader)
        turns = [(t.asked, t.asked + t.queued_s + t.first_s + t.decode_s) for t in header.turns]
        calls = [(call.begin, call.end) for call in header.env_calls]
        slack = 0.2  # of a wall clock that is read beside the one that times a call, and of a process that had to wait between
        assert leased <= header.started + slack, group
        ended = header.started + header.timings["total"]
        for begin, end in (*turns, *calls):
            assert header.started - slack <= begin <= end <= ended + slack
        for (_, before), (after, _) in itertools.pairwise(turns):
            assert before <= after + slack
        assert [call.what for call in header.env_calls][:2] == ["task", "reset"]
        assert ended - slack <= delivered <= ready + slack
        assert ready <= taken <= committed
        assert (bound, groups) == (BOUND, 2)
        assert all(turn.replica == "engine-0" and turn.temperature == 1.0 for turn in header.turns)
        assert all(turn.first_s > 0 for turn in header.turns)
        cached += sum(turn.cached or 0 for turn in header.turns)
        found += 1
    assert found
    assert cached > 0  # a second turn continues the first


def check_timeline(run_dir: Path) -> None:
    """Spans and gauges agree with what the store and the metrics say."""
    spans, lines = list(read_spans(run_dir)), list(read_series(run_dir))
    played = {span.ids["episode"]: span for role, span in spans if role == "worker-0" and span.what == "episode"}
    stored = query(run_dir, "SELECT episode_id, header FROM trajectories")
    assert stored
    for episode, encoded in stored:
        header = msgspec.msgpack.decode(encoded[1:], type=TrajectoryHeader)
        assert played[episode].ids["reward"] == header.reward
        turns = [span for _, span in spans if span.what == "turn" and span.ids["episode"] == episode]
        assert [span.ids["tokens"] for span in turns] == [turn.end - turn.start for turn in header.turns]
        assert [span.ids["prompt"] for span in turns] == [turn.start for turn in header.turns]
        assert sum(span.what == "step" and span.ids["episode"] == episode for _, span in spans) == len(
            header.turn_rewards
        )
    learner = [span for role, span in spans if role == "learner-0"]
    steps = len(metrics(run_dir))
    for what in ("take", "train", "commit", "checkpoint"):
        assert sum(span.what == what for span in learner) == steps
    for row in metrics(run_dir):
        (step,) = (span for span in learner if span.what == "train" and span.ids["version"] == row["version"] - 1)
        assert step.t1 - step.t0 <= row["step_s"] + 0.5
        pauses = [
            span.t1 - span.t0 for span in learner if span.what == "pause" and span.ids["version"] == row["version"]
        ]
        assert max(pauses) == pytest.approx(row["pause_ms"] / 1e3, abs=0.01)
    last = {role: line for role, line in lines}
    assert {"buffer", "worker-0", "learner-0"} <= last.keys()
    assert last["buffer"]["version"] == steps
    assert last["buffer"]["trained_tokens"] == sum(row["tokens_trained"] for row in metrics(run_dir))
    loads = [line["replicas"]["engine-0"] for role, line in lines if role == "worker-0" and line.get("replicas")]
    counts = [load["tokens"] for load in loads]  # since the server started
    assert counts == sorted(counts)
    assert counts[-1] > 0
    assert all(line["dropped"] == 0 and line["rss"] > 1 << 20 and "error" not in line for line in last.values())
    served = [line["servers"]["engine-0"] for role, line in lines if role == "supervisor" and line["servers"]]
    assert max(server["rss"] for server in served) > 64 << 20
    assert served[-1]["cpu_s"] > served[0]["cpu_s"]


def check_explained(run_dir: Path, printed: str) -> None:
    """What to change is said where a run ends, in its report, and by the command, which finds no more devices than there are."""
    said = explain_or_say_why(run_dir, active=False)
    assert all(line in printed for line in said.lines())
    shown = recorded_in(run_dir / "report.html")["answers"]["explanation"]
    assert [one["text"] for one in shown["alerts"]] == [one.text for one in said.alerts]
    assert [one["change"] for one in shown["findings"]] == [one.change for one in said.findings]
    found = json.loads(slipstream("explain", str(run_dir), "--json", "--gpus", "2").stdout)
    assert found["steps"] == [BOUND + 4, 10] or found["alerts"]
    assert "more_" not in "".join(one["rule"] for one in found["findings"] if one["cost"] == "devices")


@pytest.mark.parametrize("start", [contextlib.nullcontext, forkserver.disabled], ids=["forked", "as users start it"])
def test_a_run_from_start_to_report(
    policy: Path, tmp_path: Path, start: Callable[[], contextlib.AbstractContextManager[None]]
) -> None:
    run = tmp_path / "run"
    arguments = ("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *SMALL)
    with start():
        done = slipstream(*arguments, "learner.steps=10", "evaluation.tasks=4")
    assert leftovers(run) == []
    rows = metrics(run)
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert set(rows[0]) == set(StepMetrics.__struct_fields__)
    assert all(math.isfinite(v) for row in rows for v in row.values() if isinstance(v, float))
    check_accounts(run)
    check_staleness(run)
    check_times(run)
    check_timeline(run)
    check_dashboard(run)
    check_written(run)
    # Same version, same weights: what the engine reported is what the learner computes, in fp32.
    assert sum(row["mismatch_tokens"] for row in rows) > 0
    assert all((row["mismatch_max"] is None) == (row["mismatch_tokens"] == 0) for row in rows)
    assert max(row["mismatch_max"] or 0 for row in rows) < 1e-3
    assert all(0 <= row["groups_alike"] <= row["groups"] for row in rows)
    assert all(0 <= row["idle_slot_s"] <= row["slot_s"] for row in rows)
    # Those that were generated before the first step began are of no step.
    assert 0 < sum(row["tokens_generated"] for row in rows) <= ledger(run)["generated"]
    assert max(row["canary"] for row in rows) < 1e-3
    assert all(row["pause_ms"] > 0 and row["transfer_ms"] > 0 for row in rows)
    # Rollout and training overlap: tokens came while the learner stepped, and some trained tokens are of older versions.
    assert sum(row["overlap_tokens_per_s"] for row in rows) > 0
    assert max(row["staleness_max"] for row in rows) > 0
    labels = [e["label"] for e in json.loads((run / "evaluations.json").read_text())]
    assert labels == ["warm start", "final"]
    assert "warm start: reward" in done.stdout
    assert "final: reward" in done.stdout
    assert evaluations_in(run / "report.html") == labels
    assert len(recorded_in(run / "report.html")["trajectories"]["rows"]) > 0
    check_explained(run, done.stdout)
    answer = slipstream("eval", str(run), "evaluation.tasks=4", "--json")
    assert json.loads(answer.stdout)["tasks"] == 4


def test_a_run_under_nohup_goes_on_without_its_terminal_and_the_reader_of_its_output(
    policy: Path, tmp_path: Path
) -> None:
    """As in `nohup slipstream train quickstart 2>&1 | head -3`, in a terminal that is then closed."""
    run = tmp_path / "run"
    small = (*SMALL, "rollout.engine.kind=transformers", "learner.steps=2")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what `nohup` does; a child process inherits it
    try:
        going = Background("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *small)
    finally:
        signal.signal(signal.SIGHUP, before)
    with going:
        assert going.process.stdout is not None
        lines = [going.process.stdout.readline() for _ in range(3)]
        assert "checks the config, then trains" in lines[0]
        going.process.stdout.close()
        going.process.send_signal(signal.SIGHUP)
        assert going.process.wait(WAIT_S) == 0
    assert [row["step"] for row in metrics(run)] == [1, 2]
    assert (run / "report.html").is_file()
    text = (run / "logs" / "supervisor.log").read_text()
    assert text.count("has closed it; the command goes on without printing") == 1
    assert "step 2/2  reward" in text
    assert "Traceback" not in text


def test_kills_of_worker_engine_buffer_and_learner(policy: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *SMALL, "learner.steps=20")
    with Background(*arguments) as going:
        for step, victim in ((2, "worker-0"), (4, "engine-0"), (6, "buffer"), (9, "learner-0")):
            going.until_step(step)
            going.kill(victim)
        going.until_step(10)
        going.kill_engine_core("engine-0")
        output = going.output()
        assert going.process.returncode == 0, output
    for victim in ("worker-0", "engine-0", "buffer", "learner-0"):
        assert f"{victim} ended with SIGKILL" in output
    assert output.count("! engine-0 ended with") == 2
    assert leftovers(run) == []
    assert {row["step"] for row in metrics(run)} == set(range(1, 21))
    check_accounts(run)
    check_staleness(run)
    versions = [version for (version,) in query(run, "SELECT version FROM commits ORDER BY time")]
    assert versions == sorted(set(versions))


def test_interrupted_then_resumed(policy: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with Background("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *SMALL, ENDLESS) as going:
        going.until_step(3)
        began = time.monotonic()
        going.process.send_signal(signal.SIGINT)
        output = going.output()
        assert going.process.returncode == 130, output
        assert time.monotonic() - began < 90  # where nothing else computes it takes a few
    assert f"slipstream resume {run}" in output
    assert leftovers(run) == []
    reached = max(row["step"] for row in metrics(run))
    assert (run / "checkpoints" / f"step-{reached:08d}").is_dir()
    check_accounts(run)
    slipstream("resume", str(run), f"learner.steps={reached + 3}")
    assert [row["step"] for row in metrics(run)] == list(range(1, reached + 4))
    check_accounts(run)
    check_staleness(run)
    assert leftovers(run) == []


def test_killed_as_a_whole_then_resumed(policy: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with Background("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *SMALL, ENDLESS) as going:
        going.until_step(3)
        going.process.kill()  # the supervisor alone: the kernel must end the rest
        going.process.wait()
    assert leftovers(run) == []
    reached = max(row["step"] for row in metrics(run))
    with Background("resume", str(run), f"run.dir={run}", f"learner.steps={reached + 3}") as again:
        again.until(lambda: "buffer" in again.roles(), "its first roles")
        refused = slipstream("resume", str(run), check=False)
        assert refused.returncode == 2, refused.stderr
        assert "is active; stop it first" in refused.stderr
        output = again.output()
        assert again.process.returncode == 0, output
    assert max(row["step"] for row in metrics(run)) == reached + 3
    check_accounts(run)
    check_staleness(run)
    assert leftovers(run) == []


def test_two_of_each_synchronous_and_a_replica_dies(policy: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    layout = ("rollout.engine.replicas=2", "learner.backend.ranks=2", "rollout.workers=2", "buffer.max_staleness=0")
    arguments = ("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *SMALL, "learner.steps=8", *layout)
    with Background(*arguments) as going:
        going.until_step(2)
        going.kill("engine-1")
        output = going.output()
        assert going.process.returncode == 0, output
    assert "engine-1 ended with SIGKILL" in output
    rows = metrics(run)
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert sum(row["mismatch_tokens"] for row in rows) > 0
    assert max(row["mismatch_max"] or 0 for row in rows) < 1e-3
    check_accounts(run)
    check_staleness(run, 0)
    assert leftovers(run) == []


@pytest.mark.parametrize("kind", ["transformers", "sglang"])
def test_a_run_on_every_kind_of_server(kind: str, policy: Path, tmp_path: Path) -> None:
    """The other tests run vLLM. A server that is not installed is an error, as in the conformance suite."""
    run = tmp_path / "run"
    engine = f"rollout.engine.kind={kind}"
    slipstream("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *SMALL, engine, "learner.steps=3")
    rows = metrics(run)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert sum(row["mismatch_tokens"] for row in rows) > 0
    assert max(row["mismatch_max"] or 0 for row in rows) < 1e-3
    assert max(row["canary"] for row in rows) < 1e-3
    check_accounts(run)
    check_staleness(run)
    assert leftovers(run) == []


def test_the_same_run_under_ray(policy: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    small = (*SMALL, "launch.kind=ray", "learner.steps=3")
    with forkgate.gated("vllm"):
        slipstream("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *small)
    assert [row["step"] for row in metrics(run)] == [1, 2, 3]
    check_accounts(run)
    check_staleness(run)
    assert leftovers(run) == []


@pytest.mark.full
def test_checkpoints_are_evaluated_under_ray(policy: Path, tmp_path: Path) -> None:
    """By a role in an actor, which starts a server and an evaluator of its own."""
    run = tmp_path / "run"
    small = (*SMALL, "launch.kind=ray_cluster", "rollout.engine.kind=transformers", "learner.backend.device=cpu")
    often = ("learner.steps=4", "evaluation.every=2", "evaluation.tasks=4")
    with forkgate.gated():
        slipstream("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *small, *often)
    assert [row["step"] for row in metrics(run)] == [1, 2, 3, 4]
    found = read_evaluations(run / evaluations.FILE)
    assert [(one.label, one.step) for one in found] == [("warm start", 0), ("step 2", 2), ("final", 4)]
    version_of = {row["step"]: row["version"] for row in metrics(run)}
    assert all(one.version == version_of[one.step] for one in found if one.step)
    assert all(sum(one.outcomes.values()) == 4 for one in found)
    assert not (run / FOLDER).exists()
    assert leftovers(run) == []
    check_accounts(run)
    check_staleness(run)


def test_an_environment_that_always_fails_ends_the_run_by_name(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "always_fails.py").write_text(
        "from slipstream.envs import Message, Observation, SimpleEnv, Task\n\n\n"
        "class Env(SimpleEnv):\n"
        "    def task(self, index):\n        return Task(str(index))\n\n"
        "    async def reset(self, task):\n        return Observation((Message('user', '1'),))\n\n"
        "    async def step(self, message):\n        raise OSError('no sandbox')\n"
    )
    monkeypatch.chdir(tmp_path)
    env = ("env.kind=python", "env.factory=always_fails:Env", "agent.kind=single_turn")
    run = tmp_path / "run"
    done = slipstream("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *SMALL, *env, check=False)
    assert done.returncode == 1
    assert "episodes in a row failed, the last by environment" in done.stderr
    assert "no sandbox" in done.stderr
    assert done.stderr.count("\n") == 1
    assert leftovers(run) == []


def test_a_role_that_cannot_live_ends_the_run_by_name(policy: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    # The learner waits for the buffer until it is killed, after two thirds of `heartbeat_s`.
    settings = ("launch.restarts=0", "launch.heartbeat_s=15", "rollout.engine.kind=transformers")
    with Background("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *SMALL, *settings) as going:
        going.kill("buffer")
        output = going.output()
        assert going.process.returncode == 1
    assert "RoleDied: buffer ended with SIGKILL" in output
    assert leftovers(run) == []
