"""Whole runs that withhold whole episodes: ReMax by one line of config, and the preset `pf-ppo`; the ledger names them."""

from __future__ import annotations

from pathlib import Path

import pytest
from slipstream.configs import load
from slipstream.configs.algorithm import Gae
from slipstream.tests.reports import recorded_in
from slipstream.tests.runs import SMALL, check_accounts, ledger, leftovers, metrics, query, slipstream

FAKE = ("rollout.engine.kind=fake", "rollout.engine.max_concurrent=16")

WHO = """
SELECT group_id, id, withheld, loss_from, (SELECT reward FROM trajectories WHERE episode_id = episodes.id)
FROM episodes WHERE account = 'trained'
"""


def test_what_the_preset_is() -> None:
    config = load("pf-ppo")
    assert config.buffer.filter == "best_worst"
    assert config.buffer.group_size > 2
    assert isinstance(config.learner.algorithm.advantage, Gae)
    assert load("quickstart").buffer.filter == "none"


@pytest.mark.parametrize(
    ("preset", "line", "reason"),
    [
        ("quickstart", "learner.algorithm.advantage.kind=remax", "baseline"),
        ("pf-ppo", "learner.algorithm.advantage.critic_warmup=0", "filtered"),
    ],
)
def test_a_run_closes_its_ledger_and_names_what_carried_no_loss(
    policy: Path, tmp_path: Path, preset: str, line: str, reason: str
) -> None:
    run = tmp_path / "run"
    few = ("learner.steps=3", "buffer.group_size=3", "buffer.groups_per_batch=2")
    slipstream("train", preset, f"model.path={policy}", f"run.dir={run}", *SMALL, *FAKE, *few, line)
    assert [row["step"] for row in metrics(run)] == [1, 2, 3]
    check_accounts(run)
    assert ledger(run)["withheld"][reason] > 0
    assert recorded_in(run / "report.html")["answers"]["tokens"]["accounts"][f"withheld_{reason}"] > 0
    # Of each group of three, one was withheld: the greedy one, or the one in the middle.
    groups: dict[int, list[tuple]] = {}
    for group, *row in query(run, WHO):
        groups.setdefault(group, []).append(tuple(row))
    assert len(groups) == 6
    for rows in groups.values():
        ((name, _, loss_from, reward),) = [row for row in rows if row[1] == reason]
        assert loss_from is None
        rewards = sorted(r for *_, r in rows)
        assert name.endswith(".0") if reason == "baseline" else reward == rewards[1]
    assert leftovers(run) == []
