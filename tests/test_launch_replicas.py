"""Replicas that come and go while a run goes on: the real command beside a real run."""

from __future__ import annotations

import json
import os
import signal
import stat
from pathlib import Path

import psutil
from slipstream.tests import forkgate
from slipstream.tests.runs import (
    ENDLESS,
    SMALL,
    Background,
    check_accounts,
    leftovers,
    metrics,
    query,
    slipstream,
)

ENGINE = ("rollout.engine.kind=transformers",)
"""The server that starts fastest."""


def listed(run: Path, command: str = "replicas") -> dict[str, dict]:
    """Name -> what `list` says of it."""
    return {row["name"]: row for row in json.loads(slipstream(command, str(run), "list", "--json").stdout)}


def refused(run: Path, *arguments: str, command: str = "replicas") -> str:
    """The one line of a command that is refused."""
    done = slipstream(command, str(run), *arguments, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("slipstream: ")
    return done.stderr


def failures(run: Path) -> list[tuple]:
    """Episodes that failed, by reason: no replica that goes may take one with it."""
    return query(run, "SELECT reason, count(*) FROM episodes WHERE reason LIKE 'failed%' GROUP BY reason")


def test_replicas_come_and_go_while_a_run_trains(policy: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *SMALL, *ENGINE)
    with Background(*arguments, ENDLESS) as going:
        going.until_step(2)
        assert stat.S_IMODE((run / "control.json").stat().st_mode) == 0o600
        assert {name: row["state"] for name, row in listed(run).items()} == {"engine-0": "serving"}
        assert "engine-0 is the last serving replica" in refused(run, "remove", "engine-0")
        assert "engine-9 is no replica of this run; there are engine-0" in refused(run, "remove", "engine-9")
        assert "allowed are 1 to 1000" in refused(run, "add", "0")

        done = slipstream("replicas", str(run), "add", "--wait")
        assert done.stdout == "engine-1: starting\nengine-1: serving\n"
        both = listed(run)
        assert {name: row["state"] for name, row in both.items()} == {"engine-0": "serving", "engine-1": "serving"}
        assert both["engine-1"]["version"] >= 2
        assert both["engine-1"]["url"] != both["engine-0"]["url"]
        assert "serving" in slipstream("replicas", str(run), "list").stdout

        done = slipstream("replicas", str(run), "remove", "engine-0", "--wait")
        assert done.stdout == "engine-0: draining\nengine-0: gone\n"
        assert not psutil.pid_exists(both["engine-0"]["pid"])
        assert "engine-0 is no replica of this run" in refused(run, "remove", "engine-0")
        assert "engine-1 is the last serving replica" in refused(run, "remove", "engine-1")
        going.until_step(max(row["step"] for row in metrics(run)) + 2)  # the newcomer serves it alone

        os.kill(both["engine-1"]["pid"], signal.SIGKILL)
        going.until(
            lambda: (row := listed(run)["engine-1"])["state"] == "serving" and row["incarnation"] == 1,
            "engine-1 to be started again",
        )
        assert slipstream("replicas", str(run), "add", "--wait").stdout.startswith("engine-2:")  # no name comes twice

        assert "worker-0 is the last worker" in refused(run, "remove", "worker-0", command="workers")
        assert "allowed are 1 to 1000" in refused(run, "add", "0", command="workers")
        assert slipstream("workers", str(run), "add").stdout == "worker-1: starting\n"
        going.until(lambda: listed(run, "workers")["worker-1"]["state"] == "playing", "worker-1 to play")
        assert slipstream("workers", str(run), "remove", "worker-0").stdout == "worker-0: leaving\n"
        going.until(lambda: list(listed(run, "workers")) == ["worker-1"], "worker-0 to leave")
        assert "worker-1" in slipstream("workers", str(run), "list").stdout
        going.until_step(max(row["step"] for row in metrics(run)) + 2)
        going.process.send_signal(signal.SIGINT)
        output = going.output()
        assert going.process.returncode == 130, output
    assert "! engine-1 added" in output
    assert "! engine-0 removed" in output
    assert "! worker-0 removed" in output
    assert leftovers(run) == []
    assert failures(run) == []
    check_accounts(run)
    assert not (run / "control.json").exists()
    assert "is not running; if it has not finished" in refused(run, "list")


def test_a_replica_whose_restarts_are_spent_leaves_and_the_run_goes_on(policy: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *SMALL, *ENGINE, ENDLESS)
    with Background(*arguments, "rollout.engine.replicas=2", "launch.restarts=0") as going:
        going.until_step(2)
        going.kill("engine-1")
        going.until_event("the run goes on with engine-0")
        going.until_step(max(12, metrics(run)[-1]["step"] + 5))
        going.process.send_signal(signal.SIGINT)
        output = going.output()
        assert going.process.returncode == 130, output
    assert "! RoleDied" not in output
    assert "! engine-1 ended with SIGKILL; given up after 0 restarts." in output
    assert "the run goes on with engine-0" in output
    rows = metrics(run)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert leftovers(run) == []
    assert failures(run) == []
    check_accounts(run)


def test_the_last_replica_takes_the_run_with_it(policy: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *SMALL, *ENGINE)
    with Background(*arguments, "launch.restarts=0") as going:
        going.until_step(1)
        going.kill("engine-0")
        output = going.output()
        assert going.process.returncode == 1, output
    assert "RoleDied: engine-0 ended with SIGKILL; given up after 0 restarts" in output
    assert leftovers(run) == []


def test_replicas_come_and_go_under_ray(policy: Path, tmp_path: Path) -> None:
    """And every role follows a change of settings there."""
    run = tmp_path / "run"
    arguments = ("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *SMALL, *ENGINE, "launch.kind=ray")
    with forkgate.gated(), Background(*arguments, ENDLESS) as going:
        going.until_step(1)
        changes = ("buffer.max_staleness=0", "learner.optimizer.lr=1e-5")
        at = json.loads(slipstream("set", str(run), *changes, "--json").stdout)[0]["version"]
        slipstream("replicas", str(run), "add", "--wait")
        slipstream("replicas", str(run), "remove", "engine-0", "--wait")
        assert list(listed(run)) == ["engine-1"]
        slipstream("replicas", str(run), "add", "--wait")  # into the place that was left
        assert {name: row["state"] for name, row in listed(run).items()} == {
            "engine-1": "serving",
            "engine-2": "serving",
        }
        going.until(lambda: metrics(run)[-1]["version"] > at + 2, "steps under the change")
        lags = (
            "SELECT DISTINCT trained_at - 1 - accounts.version FROM accounts JOIN groups ON id = group_id"
            f" WHERE account = 'trained' AND trained_at > {at}"
        )
        assert query(run, lags) == [(0,)]
        assert metrics(run)[-1]["lr"] == 1e-5
        going.process.send_signal(signal.SIGINT)
        output = going.output()
        assert going.process.returncode == 130, output
    assert leftovers(run) == []
    assert failures(run) == []
    check_accounts(run)
