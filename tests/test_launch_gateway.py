"""Whole runs of agents that were written elsewhere: one with an SDK, whose worker is killed in the middle of its episodes, and a
program."""

from __future__ import annotations

from pathlib import Path

import pytest
from slipstream.launch.supervisor.factory import BACKEND_FACTORY
from slipstream.tests.killing_backend import KILLS
from slipstream.tests.runs import SMALL, check_accounts, leftovers, metrics, slipstream, tiny_policy

EXAMPLES = Path(__file__).parent.parent / "examples"
FAKE = ("rollout.engine.kind=fake", "rollout.engine.max_concurrent=16")


@pytest.mark.full
def test_an_agent_with_an_sdk_trains_and_its_ledger_balances(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, run = tiny_policy(tmp_path / "policy"), tmp_path / "run"
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.setenv(BACKEND_FACTORY, "slipstream.tests.killing_backend:make")
    monkeypatch.setenv(KILLS, "2:worker-0")
    options = (f"model.path={policy}", f"run.dir={run}", *SMALL, *FAKE, "learner.steps=5", "evaluation.tasks=4")
    output = slipstream("train", "quickstart", *options, "agent.kind=openai_agent:solve").stdout
    rows = metrics(run)
    assert [row["step"] for row in rows] == list(range(1, 6))
    assert max(row["mismatch_max"] or 0 for row in rows) < 1e-4
    check_accounts(run)
    assert "; restart 1 of 3" in output
    assert leftovers(run) == []


@pytest.mark.full
def test_an_agent_that_is_a_program_trains_on_a_real_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, run = tiny_policy(tmp_path / "policy"), tmp_path / "run"
    monkeypatch.chdir(EXAMPLES.parent)
    options = (f"model.path={policy}", f"run.dir={run}", *SMALL, "learner.steps=3", "evaluation.tasks=4")
    output = slipstream("train", "examples/command_agent/train.yaml", *options).stdout
    rows = metrics(run)
    assert [row["step"] for row in rows] == [1, 2, 3], output
    assert max(row["mismatch_max"] or 0 for row in rows) < 1e-4
    check_accounts(run)
    assert leftovers(run) == []
