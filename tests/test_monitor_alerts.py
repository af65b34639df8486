"""Alerts: each fires within ten steps of what is planted into the rows of a run that learns, ends with it, and none flaps."""

from __future__ import annotations

import io
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from slipstream.configs import load
from slipstream.errors import StoreError
from slipstream.launch.supervisor.alert_monitor import AlertMonitor
from slipstream.monitor.alerts import (
    DISK,
    DISK_S,
    NO_STEP,
    Alert,
    AlertBook,
    DiskForecast,
    alert_rules,
    read_alerts,
    unseen_in_rows,
)
from slipstream.monitor.metrics import MetricsTail, MetricsWriter
from slipstream.monitor.terminal import LineView, TerminalView, open_view

CONFIG = load("quickstart", ["run.dir=runs/x"])
WITHIN = 10  # steps of what is planted
PLANTED_AT = 40
Row = dict[str, Any]


def learning(steps: int, seed: int = 0) -> Iterator[Row]:
    """Rows of the shape of the quickstart's: 8 groups of 8, most of a group's episodes alike; the reward rises from .45 to .97, the
    entropy falls from .36 to .02, few tokens are compared with the engine's, and a step is timed on a machine with other work."""
    rng = random.Random(seed)
    for step in range(1, steps + 1):
        solved = 0.45 + 0.52 / (1 + math.exp(-(step - 20) / 5))
        rewards: list[float] = []
        for _ in range(8):
            alike = rng.random() < solved  # a task that is solved is solved by all of its group
            rewards += [float(alike if rng.random() < 0.8 else rng.random() < solved) for _ in range(8)]
        mean = sum(rewards) / 64
        compared = 0 if rng.random() < 0.6 else rng.randrange(1, 400)
        slow = rng.uniform(0.8, 1.6)
        yield {
            "step": step,
            "time": 1.8e9 + 1.05 * step,
            "reward_mean": mean,
            "reward_std": math.sqrt(max(0.0, mean - mean * mean)),
            "groups": 8,
            "episodes": 64,
            "entropy": max(0.015, 0.36 * math.exp(-step / 14) * rng.uniform(0.7, 1.4)),
            "ess": rng.uniform(0.93, 1.0),
            "mismatch_max": 3e-4 * rng.random() if compared else None,
            "mismatch_tokens": compared,
            "wait_s": 20.0 if step == 1 else 0.1 * rng.random(),
            "step_s": 0.7 * slow,
            "push_s": 0.2 * slow,
            "slot_s": 60.0,
            "idle_slot_s": 12.0 * rng.random(),
            "outcomes": {"finished": 62, "truncated": 2, "failed_tool": int(rng.random() < 0.2)},
            "truncated": 2 / 64,
            "tokens_trained": 64 * 45,
            "tokens_generated": 64 * 46,
            "replicas": 1,
            "replicas_failed": 0,
            "batches_unusable": 0,
        }


Plant = Callable[[Row], Mapping[str, Any]]  # a healthy row -> what is otherwise
PLANTED: dict[str, Plant] = {
    "reward_collapse": lambda row: {"reward_mean": 0.4 * row["reward_mean"]},
    "entropy_collapse": lambda row: {"reward_mean": 0.75 * row["reward_mean"], "entropy": 0.01},
    "ratio_explosion": lambda row: {"ess": 0.3},
    "mismatch": lambda row: {"mismatch_max": 0.5},
    "mismatch_growth": lambda row: {"mismatch_max": 0.002 * 1.12 ** (row["step"] - PLANTED_AT)},
    "learner_idle": lambda row: {"wait_s": 3.0},
    "rollout_idle": lambda row: {"idle_slot_s": 50.0},
    "failures": lambda row: {"outcomes": {"finished": 50, "failed_environment": 14}},
    "truncation": lambda row: {"truncated": 0.4},
    "length_bias": lambda row: {"tokens_trained": 64 * 10},
    "unusable_batches": lambda row: {"batches_unusable": 1 + (row["step"] - PLANTED_AT) // 5},
    "replicas_behind": lambda row: {"replicas_failed": 1},
}


def observed(rows: Iterator[Row], config=CONFIG) -> tuple[AlertBook, list[Alert]]:
    book, changed = AlertBook(config), list[Alert]()
    for row in rows:
        changed += book.observe(row)
    return book, changed


def planted(rule: str, steps: int = 110, until: int = 60) -> Iterator[Row]:
    for row in learning(steps):
        yield row | (PLANTED[rule](row) if PLANTED_AT < row["step"] <= until else {})


def test_every_rule_has_its_fault() -> None:
    assert {rule.name for rule in alert_rules(CONFIG)} == set(PLANTED)


@pytest.mark.parametrize("rule", PLANTED)
def test_an_alert_fires_soon_and_ends_when_it_is_over(rule: str) -> None:
    _, changed = observed(planted(rule))
    mine = [alert for alert in changed if alert.rule == rule]
    assert [alert.active for alert in mine] == [True, False]
    assert PLANTED_AT < mine[0].step <= PLANTED_AT + WITHIN
    assert 60 < mine[1].step <= 100
    together = {"reward_collapse", "entropy_collapse"} if rule in ("reward_collapse", "entropy_collapse") else {rule}
    assert {alert.rule for alert in changed if alert.severity == "critical"} <= together


@pytest.mark.parametrize("seed", range(20))
def test_a_run_that_learns_is_silent(seed: int) -> None:
    book, changed = observed(learning(80, seed))
    assert changed == []
    assert book.active == {}


@pytest.mark.parametrize("rule", PLANTED)
def test_what_is_there_in_every_other_step_does_not_flap(rule: str) -> None:
    """Where it fires at all, as a mean over several steps may, it stays."""
    rows = (row | (PLANTED[rule](row) if row["step"] % 2 and row["step"] > PLANTED_AT else {}) for row in learning(120))
    _, changed = observed(rows)
    assert len([alert for alert in changed if alert.rule == rule]) <= 1


def test_a_policy_that_is_sure_because_it_is_right_has_not_collapsed() -> None:
    """The entropy of a task that is solved falls to nothing."""
    _, changed = observed(
        row | {"entropy": row["entropy"] * 0.1 if row["step"] > 30 else row["entropy"]} for row in learning(80)
    )
    assert changed == []


@pytest.mark.parametrize(("reward", "collapses"), [(0.81, False), (0.79, True)])
def test_a_reward_has_collapsed_a_fifth_below_its_best(reward: float, collapses: bool) -> None:
    """Without any error of its mean."""
    _, changed = observed(
        row | {"reward_std": 0.0, "reward_mean": 1.0 if row["step"] <= PLANTED_AT else reward} for row in learning(60)
    )
    assert ("reward_collapse" in {alert.rule for alert in changed}) == collapses


def test_a_mismatch_is_remembered_over_steps_in_which_nothing_is_compared() -> None:
    rows = list(learning(60))
    for row in rows[40:]:
        row["mismatch_max"] = 0.5 if row["step"] % 4 == 0 else None
    _, changed = observed(iter(rows))
    assert [(alert.rule, alert.active) for alert in changed if alert.severity == "critical"] == [("mismatch", True)]
    assert "0.5 nats" in changed[0].text
    assert "allowed are 0.02" in changed[0].text


@pytest.mark.parametrize("missing", next(learning(1)))
def test_rows_without_a_number_fire_nothing(missing: str) -> None:
    """Of older releases; and JSON has null for what is not finite."""
    for value in (None, ...):
        rows = [
            {k: v for k, v in row.items() if k != missing} | ({} if value is ... else {missing: None})
            for row in learning(60)
        ]
        if missing in ("step", "time"):
            continue
        _, changed = observed(iter(rows))
        assert changed == []


def test_a_filter_that_trains_on_a_part_is_no_bias() -> None:
    rows = [row | {"tokens_trained": 64 * 12} for row in learning(80)]
    assert [alert.rule for alert in observed(iter(rows))[1]] == ["length_bias"]
    assert observed(iter(rows), load("quickstart", ["buffer.filter=best"]))[1] == []


def test_a_disk_that_fills_is_seen_before_it_is_full_and_a_checkpoint_is_not() -> None:
    forecast, gib = DiskForecast(), 1 << 30
    # 100 GiB free; 10 MiB/s are written: full in 2.8 h, then in less than one.
    texts = [forecast.observe(float(t), 100 * gib - 10 * t * (1 << 20)) for t in range(0, 10_000, 10)]
    first = next(i for i, text in enumerate(texts) if text)
    left = 100 * gib - 100 * first * (1 << 20)
    assert left / (10 << 20) == pytest.approx(DISK_S, rel=0.02)
    assert "is full in" in texts[first]
    assert all(texts[first:])
    once = DiskForecast()
    sizes = [100 * gib - (2 * gib if t > 500 else 0) for t in range(0, 2000, 10)]
    assert not any(once.observe(10.0 * i, size) for i, size in enumerate(sizes))


# --- while the run goes on ----------------------------------------------------------------------------------------


def view_of(terminal: bool) -> tuple[Any, Console]:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=180, color_system=None)
    return open_view(CONFIG, console), console


async def test_alerts_are_shown_and_written_once_and_known_after_a_restart(tmp_path: Path) -> None:
    view, console = view_of(terminal=False)
    assert isinstance(view, LineView)
    monitor, rows = AlertMonitor(tmp_path, CONFIG, view), list(planted("ratio_explosion"))
    await monitor.finish()  # there is no row yet
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        for row in rows[:50]:
            writer.append(row)
        await monitor.finish()
        again = AlertMonitor(tmp_path, CONFIG, view_of(terminal=False)[0])
        await again.finish()
        assert [alert.rule for alert in read_alerts(tmp_path / "alerts.jsonl")] == ["ratio_explosion"]
        for row in rows[50:]:
            writer.append(row)
        await again.finish()
    lines = [json.loads(line) for line in (tmp_path / "alerts.jsonl").read_text().splitlines()]
    assert [(line["rule"], line["severity"], line["active"]) for line in lines] == [
        ("ratio_explosion", "critical", True),
        ("ratio_explosion", "critical", False),
    ]
    shown = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert shown.count("! critical: the importance weights explode") == 1
    assert "(since step 43)" in shown


async def test_a_run_without_steps_is_an_alert_that_a_new_supervisor_ends(tmp_path: Path) -> None:
    view, console = view_of(terminal=True)
    assert isinstance(view, TerminalView)
    monitor = AlertMonitor(tmp_path, CONFIG, view)
    with view:
        await monitor._check()
        monitor.stalled = "no step for 90 s"
        await monitor._check()
        await monitor._check()
    assert "critical: no step for 90 s: `slipstream waits runs/x` says who waits for whom" in console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    written = read_alerts(tmp_path / "alerts.jsonl")
    assert [(alert.rule, alert.active) for alert in written] == [(NO_STEP, True)]
    assert unseen_in_rows(written) == written
    await AlertMonitor(tmp_path, CONFIG, view_of(terminal=False)[0])._check()
    assert unseen_in_rows(read_alerts(tmp_path / "alerts.jsonl")) == []


def test_what_no_row_shows_is_set_and_over() -> None:
    book = AlertBook(CONFIG)
    assert book.set(DISK, "", 1.0) == []
    (fired,) = book.set(DISK, "full in 50 min", 2.0)
    assert book.set(DISK, "full in 40 min", 3.0) == []
    assert (book.active[DISK].text, book.active[DISK].time) == ("full in 40 min", 2.0)
    (over,) = book.set(DISK, "", 4.0)
    assert (fired.active, over.active, over.time) == (True, False, 4.0)


async def test_a_file_that_is_damaged_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").write_text("no row\n")
    monitor = AlertMonitor(tmp_path, CONFIG, view_of(terminal=False)[0])
    for _ in range(3):
        await monitor._check()
    assert caplog.text.count("alerts may be missing") == 1
    assert "not a row of metrics" in caplog.text
    (tmp_path / "alerts.jsonl").write_text('{"rule": 3}\n')
    with pytest.raises(StoreError, match=r"alerts\.jsonl, line 1: not an alert"):
        read_alerts(tmp_path / "alerts.jsonl")


def test_a_file_that_grows_is_read_line_by_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.read() == []
    path.write_bytes(b'{"step":1,"time":1.0}\n{"step":2,')
    assert [row["step"] for row in tail.read()] == [1]
    with path.open("ab") as file:
        file.write(b'"time":2.0}\n{"evaluation":"","step":2}\n{"step":3}\n')
    assert [row["step"] for row in tail.read()] == [2, 3]
    assert tail.read() == []
    with path.open("ab") as file:
        file.write(b"{}\n")
    with pytest.raises(StoreError, match="line 5"):
        tail.read()
