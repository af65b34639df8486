"""The presets `dapo` and `prime` as whole runs: groups are refilled, the ledger closes, and tasks of which none teaches end the run
by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from slipstream.configs import load
from slipstream.configs.algorithm import Prime
from slipstream.tests.runs import SMALL, check_accounts, ledger, leftovers, metrics, query, slipstream

FAKE = ("rollout.engine.kind=fake", "rollout.engine.max_concurrent=16", "agent.kind=single_turn")
COINS = (
    "import random\n"
    "from slipstream.envs import Message, Observation, SimpleEnv, StepResult, Task\n\n\n"
    "class Env(SimpleEnv):\n"
    '    """Every policy solves even tasks; odd ones are solved by chance."""\n\n'
    "    def __init__(self, *, split, seed, hopeless=False):\n"
    "        super().__init__(split=split, seed=seed)\n        self.hopeless = hopeless\n\n"
    "    def task(self, index):\n        return Task(str(index), {'easy': index % 2 == 0 or self.hopeless})\n\n"
    "    async def reset(self, task):\n        self.easy = task.payload['easy']\n"
    "        return Observation((Message('user', '1'),))\n\n"
    "    async def step(self, message):\n"
    "        reward = 1.0 if self.easy else float(random.Random(message.content).random() < 0.5)\n"
    "        return StepResult((), reward, done=True)\n"
)


@pytest.fixture
def coins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """An environment of the user's own, beside the run."""
    (tmp_path / "coins.py").write_text(COINS)
    monkeypatch.chdir(tmp_path)
    return ("env.kind=python", "env.factory=coins:Env")


def test_what_the_preset_is() -> None:
    config = load("dapo")
    algorithm = config.learner.algorithm
    assert algorithm.loss.clip == (0.2, 0.28)  # type: ignore[union-attr]
    assert config.buffer.dynamic_sampling
    assert algorithm.mean == "token_mean"
    assert 0 < algorithm.overlong < config.agent.max_tokens
    assert algorithm.minibatches > 1  # else no ratio ever reaches a clip
    assert load("quickstart").buffer.dynamic_sampling is False


def test_prime_is_a_preset() -> None:
    config = load("prime")
    assert isinstance(config.learner.algorithm.advantage, Prime)
    assert config.buffer.dynamic_sampling
    # With four of each, only tasks that all or none of them solve are outside of the paper's 0.2 to 0.8.
    assert config.buffer.group_size == 4
    assert config.learner.algorithm.minibatches > 1


@pytest.mark.parametrize("preset", ["dapo", "prime"])
def test_groups_of_equal_rewards_are_refilled_and_the_ledger_closes(
    preset: str, policy: Path, tmp_path: Path, coins: tuple[str, ...]
) -> None:
    run = tmp_path / "run"
    slipstream("train", preset, f"model.path={policy}", f"run.dir={run}", *SMALL, *FAKE, *coins, "learner.steps=4")
    assert [row["step"] for row in metrics(run)] == [1, 2, 3, 4]
    check_accounts(run)
    refilled = query(
        run, "SELECT count(DISTINCT group_id) FROM episodes WHERE account = 'discarded' AND reason = 'equal_rewards'"
    )[0][0]
    assert refilled > 0
    assert 0 < sum(row["groups_refilled"] for row in metrics(run)) <= refilled
    assert ledger(run)["discarded"]["equal_rewards"] > 0
    # What was trained on is of hard tasks only, and of groups whose rewards differ.
    trained = (
        "SELECT task, count(DISTINCT reward) FROM groups JOIN trajectories ON group_id = groups.id"
        " WHERE state = 'trained' GROUP BY groups.id"
    )
    assert all(task % 2 == 1 and rewards > 1 for task, rewards in query(run, trained))
    assert leftovers(run) == []


def test_tasks_of_which_none_teaches_end_the_run_by_name(policy: Path, tmp_path: Path, coins: tuple[str, ...]) -> None:
    run = tmp_path / "run"
    hopeless = ("env.arguments.hopeless=true", "learner.batch_s=6", "rollout.episode_s=6")
    done = slipstream(
        "train", "dapo", f"model.path={policy}", f"run.dir={run}", *SMALL, *FAKE, *coins, *hopeless, check=False
    )
    assert done.returncode == 1
    assert "waited 6 s for the batch of version 0" in done.stderr
    assert (
        "groups of this run were discarded because all their rewards were equal (buffer.dynamic_sampling)"
        in done.stderr
    )
    assert done.stderr.count("\n") == 1
    check_accounts(run)
    assert leftovers(run) == []
