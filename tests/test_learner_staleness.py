"""Runs at bounds 0, 1, 2, 4 and 8 never train a token that is older than the bound: whole runs, checked from the store.

Three witnesses, none of them a metric. The spans of the stored trajectories say which version sampled each token, and plain SQL
says when it was trained and what carried loss. The log-probs that the engine reported fit the version that each span names and no
other. And the run's weights are those of a plain loop (tests/plain.py) that masks by the spans itself: nothing else carried loss.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file
from slipstream.tests import plain
from slipstream.tests.crossing import LONG_TURNS
from slipstream.tests.runs import query


class Run(msgspec.Struct, frozen=True):
    """`tokens` counts the sampled tokens of committed batches as the spans of their trajectories say: by the account that they
    belong to, the version that sampled them, and their age in versions when they were trained on."""

    bound: int
    rule: str
    min_members: int
    folder: Path
    policy: Path
    batches: list[plain.Batch]
    tokens: Counter[tuple[str, int, int]]

    def ages(self, account: str) -> set[int]:
        return {age for found, _, age in self.tokens if found == account}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plain.small_policy(tmp_path_factory.mktemp("model") / "policy")


@pytest.fixture(
    scope="module",
    params=[(0, "withhold", 0), (1, "drop", 0), (2, "withhold", 3), (4, "wait", 0), (8, "withhold", 0)],
    ids=["0-withhold", "1-drop", "2-withhold-3-of-4", "4-wait", "8-withhold"],
)
def run(request: pytest.FixtureRequest, policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose long episodes go on until the first turn is too old, unless the learner waits for them."""
    bound, rule, min_members = request.param
    folder = tmp_path_factory.mktemp("staleness") / "run"
    plain.run_system(
        folder,
        policy,
        f"buffer.max_staleness={bound}",
        f"buffer.on_deadline={rule}",
        f"buffer.min_members={min_members}",
        steps=_steps(bound),
        versions=-(-(bound + 1) // (LONG_TURNS - 1)),
        patience_s=0.1 if bound == 0 else 0.3 if rule == "wait" else 5.0,
    )
    batches = plain.batches(folder)
    tokens = Counter[tuple[str, int, int]]()
    for batch in batches:
        for sample in batch.samples:
            for span in sample.trajectory.version_spans:
                age = batch.version - span.version
                carried = age <= bound and sample.withheld is None
                account = "trained" if carried else f"withheld_{sample.withheld or 'stale'}"
                tokens[account, span.version, age] += span.end - span.start
    return Run(bound, rule, min_members, folder, policy, batches, tokens)


def test_no_token_older_than_the_bound_carried_loss(run: Run) -> None:
    assert [batch.version for batch in run.batches] == list(range(_steps(run.bound)))
    for batch in run.batches:
        for sample in batch.samples:
            assert (sample.withheld is None) == (sample.loss_from is not None)
            assert sample.withheld or 0 <= batch.version - sample.loss_from <= run.bound
    # What the store counts, account by account and version by version, is what the spans say.
    counted = Counter[tuple[str, int]]()
    for (account, version, _), tokens in run.tokens.items():
        counted[account, version] += tokens
    sql = "SELECT account, version, sum(tokens) FROM ledger WHERE account = 'trained' OR account LIKE 'withheld%' GROUP BY 1, 2"
    assert {(account, version): tokens for account, version, tokens in query(run.folder, sql)} == counted


def test_tokens_up_to_the_bound_were_trained_and_older_ones_came_up(run: Run) -> None:
    """Otherwise the test above would say nothing."""
    assert min(run.ages("trained")) >= 0
    assert max(run.ages("trained")) >= (run.bound + 1) // 2
    too_old = any(age > run.bound for age in run.ages("withheld_stale"))
    assert too_old == (run.rule == "withhold" and run.bound > 0)
    dropped = query(
        run.folder, "SELECT count(*) FROM groups JOIN episodes ON group_id = groups.id WHERE reason = 'stale'"
    )
    assert (dropped[0][0] > 0) == (run.rule == "drop")
    late = query(run.folder, "SELECT count(*) FROM episodes WHERE withheld = 'late' OR reason = 'straggler'")
    assert (late[0][0] > 0) == (run.min_members > 0)


def test_spans_name_the_versions_that_sampled_and_weights_are_those_of_a_plain_loop(run: Run) -> None:
    loop = plain.train(run.policy, run.batches, run.bound)
    weights = load_file(run.folder / "model" / "model.safetensors")
    assert plain.apart(weights, loop.weights[-1]) <= plain.EQUAL
    worst, before, tokens = plain.logprob_errors(run.policy, run.batches, loop.weights)
    assert tokens == run.tokens.total()
    assert worst < plain.SAME_POLICY
    assert before > 10 * plain.SAME_POLICY
    if max(run.ages("trained") | run.ages("withheld_stale")) > run.bound:
        lax = plain.train(run.policy, run.batches, bound=1000)
        assert plain.apart(weights, lax.weights[-1]) > 10 * plain.EQUAL


def _steps(bound: int) -> int:
    """Enough for several long episodes to end: every fifth of the groups that are asked for before the first step has one."""
    return bound + 8
