"""Whole runs among replicas that lie, and with a store that holds what cannot be trained on."""

from __future__ import annotations

import json
import signal
import sqlite3
import struct
from pathlib import Path

import pytest
from slipstream.learner.model import vocabulary_size
from slipstream.rollout.engines.fake.faults import VARIABLE
from slipstream.tests.runs import (
    ENDLESS,
    SMALL,
    Background,
    check_accounts,
    ledger,
    leftovers,
    metrics,
    query,
    slipstream,
    stored_trajectory,
)

pytestmark = pytest.mark.full
FOREIGN = 70_000
READY = (
    "SELECT t.group_id, t.arrays, t.length FROM trajectories t JOIN episodes e ON e.id = t.episode_id"
    " JOIN groups g ON g.id = t.group_id WHERE account = 'ready' AND g.state = 'ready' ORDER BY t.group_id LIMIT 2"
)
"""Episodes that wait to be trained on, of groups that are complete: the next batches are of these."""


def check_ids(run: Path, policy: Path) -> None:
    """All tokens of trained episodes are the model's."""
    rows = query(
        run,
        "SELECT header, arrays, t.length FROM trajectories t JOIN episodes e ON e.id = episode_id WHERE account = 'trained'",
    )
    assert rows
    for header, position, tokens in rows:
        found = stored_trajectory(run, header, position, tokens)
        assert 0 <= found.token_ids.min() <= found.token_ids.max() < vocabulary_size(str(policy))


def test_a_replica_that_lies_is_started_again_and_then_leaves_and_the_run_trains_on(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ("token", "version", "positive", "infinite", "falling", "longer", "garbage", "logprobs")
    faults = [{"at": "generate", "do": "lie", "nth": n, "about": a, "replica": 1} for n, a in enumerate(first, start=3)]
    faults += [{"at": "generate", "do": "lie", "nth": 11, "times": 99_999, "about": "token", "replica": 1}]
    monkeypatch.setenv(VARIABLE, json.dumps(faults))
    run = tmp_path / "run"
    arguments = ("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *SMALL, ENDLESS)
    engine = ("rollout.engine.kind=fake", "rollout.engine.replicas=2", "launch.restarts=1", "rollout.workers=2")
    with Background(*arguments, *engine) as going:
        going.until_step(1)
        going.until(lambda: "engine-1" not in listed(run), "engine-1 to leave")
        going.until(lambda: "false_replies" in rules(run), "its alert")
        going.until_step(max(row["step"] for row in metrics(run)) + 3)
        assert listed(run)["engine-0"]["false_replies"] == 0
        going.process.send_signal(signal.SIGINT)
        output = going.output()
        assert going.process.returncode == 130, output
    assert "! engine-1 ended with SIGKILL: it goes on giving false replies" in output
    assert "restart 1 of 1" in output
    assert "given up after 1 restarts" in output
    assert "the run goes on with engine-0" in output
    assert query(run, "SELECT DISTINCT reason FROM episodes WHERE reason LIKE 'failed%'") == []
    assert leftovers(run) == []
    check_accounts(run)
    check_ids(run, policy)


def listed(run: Path) -> dict[str, dict]:
    return {row["name"]: row for row in json.loads(slipstream("replicas", str(run), "list", "--json").stdout)}


def rules(run: Path) -> set[str]:
    """Of the alerts that fired."""
    path = run / "alerts.jsonl"
    return {json.loads(line)["rule"] for line in path.read_text().splitlines()} if path.exists() else set()


def poison(run: Path) -> set[int]:
    """Give episodes that wait to be trained on a token that the model does not know; their groups."""
    groups: set[int] = set()
    with sqlite3.connect(run / "buffer.sqlite") as db:
        waiting = db.execute(READY).fetchall()
    starts = {int(path.name, 16): path for path in (run / "buffer.arrays").iterdir()}
    for group, position, tokens in waiting:
        start = max(start for start in starts if start <= position)
        with starts[start].open("r+b") as file:
            file.seek(position - start + 4 * (tokens - 1))
            file.write(struct.pack("<i", FOREIGN))
        groups.add(group)
    return groups


def test_a_store_with_tokens_of_no_vocabulary_is_resumed(policy: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *SMALL, ENDLESS)
    engine = ("rollout.engine.kind=transformers", "buffer.max_staleness=12")  # what waits is not too old
    with Background(*arguments, *engine) as going:
        going.until_step(3)
        going.roles()["learner-0"].suspend()  # it takes no more, so that what is ready stays
        going.until(lambda: query(run, READY) != [], "episodes that wait to be trained on")
        going.process.kill()  # as a power failure would
        going.process.wait()
    assert leftovers(run) == []
    poisoned, reached = poison(run), metrics(run)[-1]["step"]
    assert poisoned
    with Background("resume", str(run), f"run.dir={run}", f"learner.steps={reached + 6}") as again:
        output = again.output()
        assert again.process.returncode == 0, output
    assert "restart" not in output
    aside = query(run, "SELECT DISTINCT group_id FROM episodes WHERE reason = 'unusable'")
    assert {group for (group,) in aside} == poisoned
    assert ledger(run)["discarded"]["unusable"] > 0
    assert metrics(run)[-1]["batches_unusable"] in (1, 2)
    assert "unusable_batches" in rules(run)
    assert f"token id {FOREIGN} is outside the vocabulary" in (run / "logs" / "buffer.log").read_text()
    check_accounts(run)
    check_ids(run, policy)
