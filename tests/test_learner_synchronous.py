"""`max_staleness: 0` is synchronous: a whole run on real parts makes the weights that a plain loop in one process makes.

The loop (tests/plain.py) generates, scores and steps, and knows nothing of admission or packing; what the run's engine
sampled is its generation, taken from the store.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file
from slipstream.tests import plain
from slipstream.tests.runs import metrics, query

STEPS = 6


class Run(msgspec.Struct, frozen=True):
    folder: Path
    policy: Path
    batches: list[plain.Batch]
    weights: plain.Weights


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("synchronous")
    policy, folder = plain.small_policy(root / "policy"), root / "run"
    options = ("buffer.max_staleness=0", "rollout.workers=2", "learner.checkpoint_every=2")
    plain.run_system(folder, policy, *options, steps=STEPS, versions=1, patience_s=0.1)
    return Run(folder, policy, plain.batches(folder), load_file(folder / "model" / "model.safetensors"))


@pytest.fixture(scope="module")
def loop(run: Run) -> plain.Trained:
    return plain.train(run.policy, run.batches, bound=0)


def test_batches_are_what_a_plain_loop_would_have_generated(run: Run) -> None:
    """Version v plays the tasks from 2 v on, all of them, and every token is its own."""
    assert [batch.version for batch in run.batches] == list(range(STEPS))
    for batch in run.batches:
        assert [group[0].trajectory.task_id for group in batch.groups] == [
            str(task) for task in range(batch.version * plain.GROUPS, (batch.version + 1) * plain.GROUPS)
        ]
        for group in batch.groups:
            assert {s.trajectory.member for s in group} == set(range(plain.MEMBERS))
        for sample in batch.samples:
            assert {span.version for span in sample.trajectory.version_spans} == {batch.version}
            assert not any(span.mixed for span in sample.trajectory.version_spans)
            assert sum(s.end - s.start for s in sample.trajectory.version_spans) == sample.trajectory.sampled > 0
    sampled = sum(s.trajectory.sampled for batch in run.batches for s in batch.samples)
    assert query(run.folder, "SELECT sum(tokens) FROM ledger WHERE account = 'trained'") == [(sampled,)]


def test_weights_equal_those_of_a_plain_loop(run: Run, loop: plain.Trained) -> None:
    assert plain.apart(run.weights, loop.weights[-1]) <= plain.EQUAL
    # The steps were no formality: weights moved by many times the tolerance.
    assert plain.apart(loop.weights[0], loop.weights[-1]) > 100 * plain.EQUAL
    # AdamW and clipping hide the size of a gradient: it is compared by itself.
    rows = metrics(run.folder)
    assert [row["loss"] for row in rows] == pytest.approx(loop.losses, abs=1e-6)
    assert [row["grad_norm"] for row in rows] == pytest.approx(loop.norms, rel=1e-5)


def test_engines_sampled_from_the_weights_that_a_plain_loop_has_then(run: Run, loop: plain.Trained) -> None:
    worst, before, tokens = plain.logprob_errors(run.policy, run.batches, loop.weights)
    assert tokens == sum(s.trajectory.sampled for batch in run.batches for s in batch.samples)
    assert worst < plain.SAME_POLICY
    assert before > 10 * plain.SAME_POLICY


@pytest.mark.parametrize("change", ["one trajectory less", "another rate", "batches swapped", "another reward"])
def test_any_other_loop_makes_other_weights(run: Run, change: str) -> None:
    """What `plain.EQUAL` can tell apart."""
    data, optimizer = list(run.batches), plain.OPTIMIZER
    match change:
        case "one trajectory less":
            first, *rest = data[-1].groups
            data[-1] = plain.Batch(data[-1].version, [first[1:], *rest])
        case "another rate":
            optimizer = msgspec.structs.replace(optimizer, lr=1.02 * optimizer.lr)
        case "batches swapped":
            data[1:3] = [plain.Batch(1, data[2].groups), plain.Batch(2, data[1].groups)]
        case "another reward":
            (first, *members), *rest = data[-1].groups
            better = msgspec.structs.replace(first.trajectory, reward=first.trajectory.reward + 0.1)
            first = msgspec.structs.replace(first, trajectory=better)
            data[-1] = plain.Batch(data[-1].version, [[first, *members], *rest])
    other = plain.train(run.policy, data, bound=0 if change != "batches swapped" else 1, optimizer=optimizer)
    assert plain.apart(run.weights, other.weights[-1]) > 5 * plain.EQUAL
