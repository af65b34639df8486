"""What is true of every run of the quickstart from its start to its report, by the files that it leaves."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from slipstream.buffer.trajectory import TrajectoryHeader
from slipstream.launch.explain import explain_or_say_why
from slipstream.learner.metrics import StepMetrics
from slipstream.monitor.timeline import read_series, read_spans
from slipstream.tests.dashboards import check_dashboard, check_written
from slipstream.tests.reports import evaluations_in, recorded_in
from slipstream.tests.runs import check_accounts, ledger, leftovers, metrics, query, slipstream

TEN_STEPS = ("learner.steps=10", "evaluation.tasks=4")
"""Beside `SMALL`: of a run that `check_run` looks at."""

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
        # A replica that the step's push missed is paused once more, by a later push of the version.
        assert any(pause == pytest.approx(row["pause_ms"] / 1e3, abs=0.01) for pause in pauses)
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


def check_run(run: Path, printed: str) -> None:
    """A run of ten steps with four tasks in its evaluations; `printed` is what the command printed."""
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
    assert "warm start: reward" in printed
    assert "final: reward" in printed
    assert evaluations_in(run / "report.html") == labels
    assert len(recorded_in(run / "report.html")["trajectories"]["rows"]) > 0
    check_explained(run, printed)
