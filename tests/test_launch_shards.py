"""A whole run whose buffer has shards: it survives the death of each process, and what reads a run reads all shards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from slipstream.buffer.ledger_report import ledger_report
from slipstream.buffer.run_stores import connect_run
from slipstream.chaos.plan import make_plan
from slipstream.configs import load
from slipstream.launch.supervisor.processes import role_names
from slipstream.tests import forkgate
from slipstream.tests.runs import ENDLESS, SMALL, Background, leftovers, metrics, slipstream

SHARDS = (
    "buffer.shards=2",
    "buffer.groups_per_batch=3",
    "rollout.engine.kind=transformers",
    "rollout.engine.replicas=1",
    "learner.checkpoint_every=1",
)


def query(run_dir: Path, sql: str) -> Sequence[tuple]:
    db = connect_run(run_dir / "buffer.sqlite", "ro")
    try:
        return db.execute(sql).fetchall()
    finally:
        db.close()


def test_shards_are_roles_and_victims() -> None:
    config = load("chaos", ["buffer.shards=2"])
    assert [name for name in role_names(config) if name.startswith("buffer")] == ["buffer", "buffer-1", "buffer-2"]
    assert {"buffer-1", "buffer-2"} < {fault.victim for fault in make_plan(config, 300, 7)}
    assert [name for name in role_names(load("chaos")) if name.startswith("buffer")] == ["buffer"]


@pytest.mark.full
def test_a_run_with_shards_survives_the_death_of_each_of_its_processes(policy: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = (f"model.path={policy}", f"run.dir={run}", *SMALL, *SHARDS, ENDLESS)
    with Background("train", "quickstart", *arguments) as training:
        for step, victim in enumerate(("buffer-1", "buffer", "buffer-2"), start=1):
            training.until_step(step)
            training.kill(victim)
        training.until_step(5)
        training.process.terminate()
        training.output()
    assert leftovers(run) == []
    steps = metrics(run)[-1]["step"] + 2
    with forkgate.gated():  # the launcher of Ray places and guards them likewise
        done = slipstream("resume", str(run), "launch.kind=ray", f"learner.steps={steps}")
    assert done.returncode == 0
    assert metrics(run)[-1]["step"] == steps
    assert json.loads(slipstream("ledger", str(run), "--json").stdout)["closes"]
    assert ledger_report(run / "buffer.sqlite").total.trained > 0
    made = query(run, "SELECT version, groups FROM commits WHERE NOT rolled_back ORDER BY 1")
    assert len(made) == steps
    assert {groups for _, groups in made} == {3}
    held = query(run, "SELECT trained_at, count(*) FROM groups WHERE trained_at IS NOT NULL GROUP BY 1 ORDER BY 1")
    assert held == made
    shown = slipstream("show", str(run), "--step", "3").stdout
    assert "3 groups" in shown
    refused = slipstream("resume", str(run), "buffer.shards=3", check=False)
    assert "buffer.shards: a run keeps what it began with (2), 3 is not allowed" in refused.stdout + refused.stderr


@pytest.mark.full
def test_a_small_chaos_with_shards_leaves_nothing_to_complain_of(policy: Path, tmp_path: Path) -> None:
    few = ("rollout.engine.replicas=1", "rollout.workers=1", "learner.backend.ranks=1", "learner.checkpoint_every=2")
    arguments = (
        "--kills=4",
        "--set-changes=8",
        "--seed=5",
        "--json",
        f"model.path={policy}",
        f"run.dir={tmp_path / 'run'}",
    )
    done = slipstream("chaos", "chaos", *arguments, *few, "buffer.shards=2", check=False)
    report = json.loads(done.stdout)
    assert report["problems"] == []
    assert any(
        row["victim"].startswith("buffer-") for row in report["plan"] if isinstance(row, dict)
    ) or "buffer-" in str(report["plan"])
    assert all(check["examined"] > 0 for check in report["checks"])
