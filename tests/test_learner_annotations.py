"""Annotations of tokens: what the loss saw, by trajectory, beside a plain computation of the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from slipstream.common.annotations import CLIPPED, DROPPED, TOKEN_BYTES, TRAINED, VALUES, TokenAnnotations
from slipstream.configs.algorithm import Algorithm, ClipCov, Masked
from slipstream.configs.backends import Fsdp2
from slipstream.configs.schema import Learner, Model, Optimizer
from slipstream.learner.annotations import StepAnnotations, choose
from slipstream.learner.batch import TrainBatch
from slipstream.learner.checkpoint_folder import CheckpointState
from slipstream.learner.fsdp2.backend import Fsdp2Backend
from slipstream.learner.step import PolicyStepper
from slipstream.tests import tiny
from slipstream.tests.columns import joined, sequence

CAP = 2.0  # of the default correction's weights
NAMES = ("7.0.0.0", "7.0.1.0", "3.0.0.0", "3.1.1.0")


@pytest.fixture
def backend(folders: list[Path]) -> Iterator[Fsdp2Backend]:
    made = Fsdp2Backend(Model(path=str(folders[0])), Optimizer(), Fsdp2(device="cpu"), temperature=1.0, timeout_s=60)
    yield made
    made.close()


def batch_of(seed: int = 0) -> TrainBatch:
    """Four sequences of two groups, sampled by other policies; their first tokens and some others carry no loss."""
    rng, made = np.random.default_rng(seed), []
    for length in (5, 12, 30, 9):
        trained = rng.random(length) < 0.7
        trained[0], trained[-1] = False, True
        made.append(
            sequence(
                token_ids=rng.integers(3, tiny.VOCABULARY, length).astype(np.int32),
                loss_mask=trained,
                behavior_logprobs=np.where(trained, -rng.uniform(3, 9, length), 0).astype(np.float32),
                staleness=np.where(trained, 1, -1).astype(np.int32),
                mixed=np.zeros(length, dtype=np.bool_),
                advantages=np.where(trained, rng.normal(), 0),
            )
        )
    return msgspec.structs.replace(joined(made), ids=NAMES)


def expected(folder: Path, batch: TrainBatch, index: int) -> tuple[np.ndarray, np.ndarray]:
    """log p/b and entropy at each token of a sequence, by transformers alone; of the first one nothing."""
    start, end = batch.offsets[index : index + 2].tolist()
    ids = batch.token_ids[start:end].tolist()
    table = tiny.logprobs(tiny.load(folder), ids)
    p = table[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].numpy()
    entropy = -(table.exp() * table).sum(-1).numpy()
    return p - batch.behavior_logprobs[start + 1 : end], entropy


ALGORITHMS = {
    "one pass": Algorithm(),
    "masked": Algorithm(correction=Masked(bounds=(0.5, CAP))),
    "two passes": Algorithm(loss=ClipCov()),
    "minibatches": Algorithm(minibatches=2),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_token_with_loss_has_what_its_loss_saw_and_no_other_has_anything(
    name: str, backend: Fsdp2Backend, folders: list[Path]
) -> None:
    config = Learner(algorithm=ALGORITHMS[name], optimizer=Optimizer(lr=1e-12))  # later minibatches see the same policy
    config = msgspec.structs.replace(config, backend=msgspec.structs.replace(config.backend, tokens_per_microbatch=20))
    stepper, batch = PolicyStepper(config, backend, 64), batch_of()
    seen = StepAnnotations(choose(batch, 1 << 20))
    done = stepper.step(batch, stepper.plan(batch), (), CheckpointState(step=3, version=3), seen.of)
    found = {one.id: one for one in seen.finish()}
    assert found.keys() == set(NAMES)
    assert seen.finish() == []
    ratios = list[float]()
    for index, id in enumerate(NAMES):
        start, end = batch.offsets[index : index + 2].tolist()
        one, mask = found[id], batch.loss_mask[start:end]
        values = dict(zip(VALUES, one.values.astype(np.float64), strict=True))
        assert len(one) == end - start
        assert ((one.flags & TRAINED) > 0).tolist() == mask.tolist()
        assert not (one.flags[~mask]).any()
        for column in values.values():
            assert (~np.isnan(column)).tolist() == mask.tolist()
        ratio, entropy = (column[mask[1:]] for column in expected(folders[0], batch, index))
        assert values["log_ratio"][mask] == pytest.approx(ratio, abs=0.005)
        ratios += np.exp(ratio).tolist()
        assert values["entropy"][mask] == pytest.approx(entropy, abs=0.005)
        assert values["advantage"][mask] == pytest.approx(batch.advantages[start:end][mask], abs=0.002)
        dropped = (one.flags[mask] & DROPPED) > 0
        if name == "masked":
            outside = (ratio < np.log(0.5)) | (ratio > np.log(CAP))
            assert dropped.tolist() == outside.tolist()
            assert outside.any()
            assert not (one.flags[mask][dropped] & CLIPPED).any()
            assert values["weight"][mask][~dropped] == pytest.approx(np.exp(ratio[~dropped]), rel=0.01)
        else:
            assert not dropped.any()
            assert values["weight"][mask] == pytest.approx(np.minimum(np.exp(ratio), CAP), rel=0.01)
    assert done.ratio_max == pytest.approx(max(ratios), rel=1e-3)
    assert done.ratio_p999 == done.ratio_max  # of fewer than 1,000 tokens


def test_listening_changes_no_step(folders: list[Path]) -> None:
    weights, results = [], []
    for listened in (False, True):
        model = Model(path=str(folders[0]))
        backend = Fsdp2Backend(model, Optimizer(), Fsdp2(device="cpu"), temperature=1.0, timeout_s=60)
        stepper, batch = PolicyStepper(Learner(optimizer=Optimizer(lr=1e-3)), backend, 64), batch_of()
        seen = StepAnnotations(choose(batch, 1 << 20) if listened else ())
        result = stepper.step(batch, stepper.plan(batch), (), CheckpointState(step=3, version=3), seen.of)
        assert bool(seen.finish()) == listened
        weights.append({name: tensor.clone() for name, tensor in backend.named_weights()})
        results.append(result)
        backend.close()
    assert results[0] == results[1]
    assert all(torch.equal(weights[1][name], tensor) for name, tensor in weights[0].items())


def test_whole_groups_are_chosen_as_long_as_they_fit() -> None:
    batch = batch_of()
    sizes = {"7": (5 + 12) * TOKEN_BYTES, "3": (30 + 9) * TOKEN_BYTES}
    groups = {group: {name for name in NAMES if name.startswith(f"{group}.")} for group in sizes}
    everything = groups["7"] | groups["3"]
    assert choose(batch, sum(sizes.values())) == everything
    assert choose(batch, 0) == frozenset()
    first = choose(batch, 1)
    assert first in groups.values()  # one at least
    for limit in range(1, sum(sizes.values()), 10):
        assert choose(batch, limit) == first
    assert choose(batch.select([2, 3, 0, 1]), sizes["3"]) == choose(batch, sizes["3"])  # whatever the order


def test_extreme_numbers_stay_finite() -> None:
    """A ratio may be infinite in float16; a hole there would be taken for a token without loss."""
    from slipstream.learner.backend import LossOutput, TokenOutputs
    from slipstream.learner.packing import to_microbatch

    batch = sequence(np.arange(3, dtype=np.int32), np.array([False, True, True]), ids=("1.0.0.0",))
    huge = torch.tensor([1e30, -float("inf")])
    none = torch.zeros(2, dtype=torch.bool)

    def loss(logprobs: torch.Tensor, entropy: torch.Tensor, row: object) -> LossOutput:
        return LossOutput(huge.sum(), {}, TokenOutputs(huge, huge, huge, huge, none, ~none))

    seen = StepAnnotations(("1.0.0.0",))
    seen.of(loss)(huge, huge, to_microbatch(batch))
    (one,) = seen.finish()
    assert np.isfinite(one.values[:, 1:]).all()
    assert np.isnan(one.values[:, 0]).all()
    assert one.flags.tolist() == [0, TRAINED | DROPPED, TRAINED | DROPPED]
    assert isinstance(one, TokenAnnotations)
