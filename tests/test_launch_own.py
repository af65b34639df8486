"""A whole run whose advantage and loss are functions of one's own, and one that is not started because one of them is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from slipstream.learner.checkpoint_folder import checkpoints, read_state
from slipstream.tests.runs import SMALL, check_accounts, leftovers, metrics, slipstream

MINE = "slipstream.tests.test_launch_own"
FAKE = ("rollout.engine.kind=fake", "rollout.engine.max_concurrent=16", "learner.steps=3")


def counting(batch, carried):
    """The reward of each episode, and how many steps there were."""
    carried["steps"] = carried.get("steps", 0.0) + 1.0
    return batch.rewards + 1.0


def policy_gradient(tokens):
    return -tokens.current * tokens.advantages


def blind(tokens):
    return tokens.entropy


@pytest.mark.full
def test_a_run_trains_by_functions_of_ones_own_and_goes_on_with_what_they_carry(policy: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    own = [
        f"learner.algorithm.{name}={{kind: python, function: '{MINE}:{function}'}}"
        for name, function in (("advantage", "counting"), ("loss", "policy_gradient"))
    ]
    slipstream("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *SMALL, *FAKE, *own)
    slipstream("resume", str(run), "learner.steps=5")
    rows = [row for row in metrics(run) if "step" in row and "evaluation" not in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert all(row["grad_norm"] > 0 for row in rows)
    assert read_state(checkpoints(run / "checkpoints")[-1]).algorithm == {"steps": 5.0}
    check_accounts(run)
    assert leftovers(run) == []


@pytest.mark.parametrize("command", ["train", pytest.param("doctor", marks=pytest.mark.full)])
def test_a_loss_without_a_gradient_is_refused_in_one_line_before_anything_starts(
    policy: Path, tmp_path: Path, command: str
) -> None:
    run = tmp_path / "run"
    line = f"learner.algorithm.loss={{kind: python, function: '{MINE}:blind'}}"
    done = slipstream(command, "quickstart", f"model.path={policy}", f"run.dir={run}", *SMALL, *FAKE, line, check=False)
    assert done.returncode == 2
    found = done.stderr if command == "train" else done.stdout
    assert f"learner.algorithm.loss.function: {MINE}:blind: no gradient reaches tokens.current" in found
    assert not run.exists()
