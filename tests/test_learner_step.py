"""The steps of one batch: what the forward pass of the step gives is what a scoring pass before it would have given."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from slipstream.configs.algorithm import Algorithm, ClipCov, Masked
from slipstream.configs.backends import Fsdp2
from slipstream.configs.schema import Learner, Model, Optimizer
from slipstream.errors import LearnerError
from slipstream.learner.algorithms import loss_of
from slipstream.learner.batch import TrainBatch
from slipstream.learner.checkpoint_folder import CheckpointState
from slipstream.learner.fsdp2.backend import Fsdp2Backend
from slipstream.learner.packing import microbatches, mismatch, with_proximal
from slipstream.learner.step import PolicyStepper
from slipstream.tests.columns import joined, sequence

STATE = CheckpointState(step=3, version=3)
OPTIMIZER = Optimizer(lr=1e-3)


@pytest.fixture
def pair(folders: list[Path]) -> Iterator[list]:
    backends = [
        Fsdp2Backend(Model(path=str(folders[0])), OPTIMIZER, Fsdp2(device="cpu"), temperature=1.0, timeout_s=60)
        for _ in range(2)
    ]
    yield backends
    for backend in reversed(backends):
        backend.close()


def sequences(backend) -> TrainBatch:
    """Sampled by policies near the one of `backend`; some tokens by itself."""
    rng = np.random.default_rng(0)
    made = []
    for length in (5, 12, 30, 9):
        trained = rng.random(length) < 0.7
        trained[0], trained[-1] = False, True
        made.append(
            sequence(
                token_ids=rng.integers(3, 500, length).astype(np.int32),
                loss_mask=trained,
                behavior_logprobs=np.zeros(length, dtype=np.float32),
                staleness=np.where(trained, rng.integers(0, 2, length), -1).astype(np.int32),
                mixed=np.zeros(length, dtype=np.bool_),
                advantages=np.where(trained, rng.normal(), 0).astype(np.float32),
            )
        )
    (row,) = microbatches(joined(made), 0, 1, 1000)
    (scored,) = backend.logprobs([row])
    by_length = dict(zip(np.diff(row.cu_seqlens).tolist(), np.split(scored.numpy(), row.cu_seqlens[1:-1]), strict=True))
    noise = [np.where(s.loss_mask & (s.staleness > 0), rng.normal(size=len(s.loss_mask)) / 2, 0) for s in made]
    scored = [
        msgspec.structs.replace(s, behavior_logprobs=(by_length[len(s.loss_mask)] + n).astype(np.float32))
        for s, n in zip(made, noise, strict=True)
    ]
    return joined(scored)


def stepper(config: Learner, backend) -> PolicyStepper:
    return PolicyStepper(config, backend, 64)


@pytest.mark.parametrize(
    "algorithm",
    [Algorithm(), Algorithm(correction=Masked(), aggregation="sequence_mean"), Algorithm(loss=ClipCov())],
    ids=["decoupled", "masked", "chooses"],
)
def test_one_pass_steps_like_two(pair, algorithm):
    one, two = pair
    config = Learner(optimizer=OPTIMIZER, algorithm=algorithm)
    config = msgspec.structs.replace(config, backend=msgspec.structs.replace(config.backend, tokens_per_microbatch=20))
    batch = sequences(one)
    policy_stepper = stepper(config, one)
    done = policy_stepper.step(batch, policy_stepper.plan(batch), (), STATE)
    rows = microbatches(batch, 0, 1, 20)
    rows = [with_proximal(row, p) for row, p in zip(rows, two.logprobs(rows), strict=True)]
    result = two.step(rows, loss_of(algorithm, 64)(rows, two.gather), OPTIMIZER.lr)
    (found,) = done.results
    assert found.loss == pytest.approx(result.loss, abs=1e-7)
    assert found.means == pytest.approx(result.means, abs=1e-6)
    assert found.means["importance"] != pytest.approx(1.0, abs=1e-3)  # there were other policies at work
    assert (done.mismatch, done.compared) == (pytest.approx(mismatch(rows)[0], abs=1e-6), mismatch(rows)[1])
    assert done.compared > 0
    expected = dict(two.named_weights())
    for name, tensor in one.named_weights():
        assert torch.allclose(tensor, expected[name], atol=1e-7, rtol=0), name


def test_passes_are_counted(pair, monkeypatch):
    """One forward pass where nothing more is needed."""
    backend = pair[0]
    asked: list[int] = []
    logprobs = backend.logprobs
    monkeypatch.setattr(backend, "logprobs", lambda rows: asked.append(len(rows)) or logprobs(rows))
    for algorithm, expected in (
        (Algorithm(), [0]),
        (Algorithm(minibatches=2), [0, 1, 1]),
        (Algorithm(loss=ClipCov()), [0, 1]),
    ):
        asked.clear()
        policy_stepper, train_batch = stepper(Learner(algorithm=algorithm), backend), sequences(pair[1])
        policy_stepper.step(train_batch, policy_stepper.plan(train_batch), (), STATE)
        assert asked == expected


def test_a_batch_without_tokens_is_named(pair):
    with pytest.raises(LearnerError, match="batch of step 4 holds no token that may be trained"):
        stepper(Learner(), pair[0]).step([], [], (), STATE)
