"""Images in the learner: log-probs and gradients of FSDP2 over packed rows are those of transformers over single sequences,
whatever is packed, shared or frozen; and what is pushed is what a server loads.

Two ranks run this file as a script, see tests/ranks.py.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from slipstream.agents import render_demonstration
from slipstream.common.images import PlacedImage
from slipstream.configs.backends import Fsdp2
from slipstream.configs.schema import Model, Optimizer
from slipstream.configs.sft import Sft
from slipstream.envs import Message, Observation
from slipstream.errors import CheckpointError, LearnerError
from slipstream.learner.batch import TrainBatch, supervised
from slipstream.learner.checkpoint_folder import CheckpointState
from slipstream.learner.fsdp2.attention import plan_sharing
from slipstream.learner.fsdp2.backend import Fsdp2Backend
from slipstream.learner.packing import MicroBatch, microbatches, scoring_microbatch, to_microbatch
from slipstream.learner.sft import ExampleImages, negative_log_likelihood, run_sft
from slipstream.rollout.engines.server.weights import ModelWeights
from slipstream.rollout.engines.transformers.engine import load_model
from slipstream.tests.ranks import DEADLINE_S, run_on_two_ranks
from slipstream.tests.seeing import asked, picture, plain_logits, plain_model, renderer_of, seeing_policy
from slipstream.weightsync.plan import BroadcastSource
from slipstream.weightsync.snapshot import take_snapshot

TOLERANCE = 1e-4  # nats
LR = 1e-2


class Job(msgspec.Struct):
    model: str
    out: str
    options: tuple[str, ...] = ()


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing_policy(tmp_path_factory.mktemp("models") / "seeing")


def open_backend(policy: Path | str, *options: Any) -> Fsdp2Backend:
    optimizer, config = Optimizer(clip_norm=1e9), Fsdp2(device="cpu", options=options)
    return Fsdp2Backend(
        Model(path=str(policy), dtype="float32"), optimizer, config, temperature=1.0, timeout_s=DEADLINE_S
    )


def examples(policy: Path) -> TrainBatch:
    """Conversations without an image, with one, and with one in a later turn; two of them begin with the same tokens and image, a
    third with the same tokens and another image."""
    renderer, red = renderer_of(policy), picture("red")
    long = "Which color is it, please? " * 3
    talks: list[tuple[list[Message], list[Message]]] = [
        ([Message("user", "Which color?")], [Message("assistant", "red or blue")]),
        ([asked(red, text=long)], [Message("assistant", "red")]),
        ([asked(red, text=long)], [Message("assistant", "green, I think")]),
        ([asked(picture("blue"), text=long)], [Message("assistant", "blue")]),
        (
            [Message("user", "Look.")],
            [Message("assistant", "a"), asked(picture("green", 64, 48), red), Message("assistant", "two")],
        ),
    ]
    shown = [render_demonstration(renderer, Observation(tuple(opening)), messages) for opening, messages in talks]
    batch = supervised([(one.token_ids, one.loss_mask) for one in shown])
    files = {digest: data for one in shown for digest, data in one.image_files.items()}
    return msgspec.structs.replace(batch, images=tuple(one.images for one in shown), image_files=files)


def plain_logprobs(policy: Path, model: Any, one: TrainBatch) -> torch.Tensor:
    """float32[T], 0 where not trained, of a batch of one sequence."""
    assert one.images is not None
    ids, mask = one.token_ids.tolist(), torch.from_numpy(one.loss_mask.copy())
    rows = plain_logits(policy, model, ids, one.images[0], dict(one.image_files))[:-1].log_softmax(-1)
    chosen = rows.gather(1, torch.tensor(ids)[1:, None]).squeeze(1)
    return torch.where(mask, torch.cat([torch.zeros(1), chosen]), 0.0)


@functools.cache
def expected(policy: Path) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Of each of the examples its log-probs, and the gradient of the mean negative log-likelihood by parameter."""
    model, batch = plain_model(policy), examples(policy)
    found = [plain_logprobs(policy, model, one) for one in batch]
    (-sum(one.sum() for one in found) / int(batch.loss_mask.sum())).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return [one.detach() for one in found], gradients


def gradients_of(backend: Fsdp2Backend, rows: Sequence[MicroBatch]) -> dict[str, torch.Tensor]:
    padded, tokens = backend._pad_passes(rows)
    backend._backward(padded, negative_log_likelihood, tokens)
    found = {n: p.grad.full_tensor() for n, p in backend._model.named_parameters() if p.grad is not None}  # type: ignore[union-attr]
    backend._zero_gradients()
    return found


def test_rows_are_scored_as_transformers_scores_their_sequences(policy: Path) -> None:
    batch, (logprobs, _) = examples(policy), expected(policy)
    backend = open_backend(policy)
    try:
        packed = to_microbatch(batch)
        shared = plan_sharing(packed)
        assert (
            sum(size > start for start, size in shared.heads) == 1
        )  # of two with the same image, and not of the third
        (together,) = backend.logprobs([packed])
        for ours, theirs in zip(together.split(batch.sizes.tolist()), logprobs, strict=True):
            torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)
        alone = backend.logprobs([to_microbatch(one) for one in batch])
        for ours, theirs in zip(alone, logprobs, strict=True):
            torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)
        wrong = msgspec.structs.replace(packed, image_files=dict.fromkeys(packed.image_files, picture("red", 64, 64)))
        with pytest.raises(LearnerError, match="has 8 x 8 patches, its trajectory says 4 x 4"):
            backend.logprobs([wrong])
        broken = msgspec.structs.replace(packed, image_files=dict.fromkeys(packed.image_files, b"no image"))
        with pytest.raises(LearnerError, match="cannot be read"):
            backend.logprobs([broken])
    finally:
        backend.close()


@pytest.mark.parametrize("options", [(), ("recompute",), ("frozen_vision",)])
def test_gradients_are_those_of_transformers(policy: Path, options: tuple[str, ...]) -> None:
    batch, (_, gradients) = examples(policy), expected(policy)
    backend = open_backend(policy, *options)
    try:
        ours = gradients_of(backend, microbatches(batch, 0, 1, 64, shares_prefixes=True))
        wanted = {n: g for n, g in gradients.items() if "frozen_vision" not in options or ".visual." not in n}
        assert ours.keys() == wanted.keys()
        assert any(".visual." in name for name in gradients)
        for name, gradient in wanted.items():
            torch.testing.assert_close(ours[name], gradient, atol=1e-5, rtol=1e-3)
    finally:
        backend.close()


async def test_what_is_pushed_is_loaded_and_exported(policy: Path, tmp_path: Path) -> None:
    """The whole model, its vision tower included; an exported folder is one that trains on."""
    batch = examples(policy)
    backend = open_backend(policy)
    try:
        backend.step([to_microbatch(batch)], negative_log_likelihood, LR)
        (trained,) = backend.logprobs([to_microbatch(batch)])
        snapshot = await take_snapshot(1, backend.named_weights(), tmp_path)
        backend.export(tmp_path / "model")
    finally:
        backend.close()
    served = load_model(str(policy), "float32")
    weights = ModelWeights(served)
    weights.check(snapshot.plan(BroadcastSource(), bucket_bytes=1 << 20, keep=False, acks="", receiver=""))
    weights.load(list(zip(snapshot.names, snapshot.tensors, strict=True)))
    exported = plain_model(tmp_path / "model")
    theirs = exported.state_dict()
    assert theirs.keys() == served.state_dict().keys()
    for name, tensor in served.state_dict().items():
        assert torch.equal(tensor, theirs[name]), name
    with torch.no_grad():
        for ours, one in zip(trained.split(batch.sizes.tolist()), batch, strict=True):
            torch.testing.assert_close(ours, plain_logprobs(tmp_path / "model", exported, one), atol=TOLERANCE, rtol=0)


def test_a_checkpoint_says_whether_its_vision_tower_was_trained(policy: Path, tmp_path: Path) -> None:
    options: dict[str, tuple[str, ...]] = {"trained": (), "frozen": ("frozen_vision",)}
    for name, chosen in options.items():
        backend = open_backend(policy, *chosen)
        backend.save(tmp_path / name, CheckpointState(step=1, version=1)).result(DEADLINE_S)
        backend.close()
    for name, other, why in (
        ("frozen", "trained", r"was not trained; set learner.backend.options=\[frozen_vision\] to resume it"),
        ("trained", "frozen", "was trained; leave frozen_vision out of learner.backend.options to resume it"),
    ):
        backend = open_backend(policy, *options[other])
        with pytest.raises(CheckpointError, match=f"{name} is of another model than '.*': its vision tower {why}"):
            backend.load(tmp_path / name)
        backend.load(tmp_path / other)
        backend.close()


@pytest.mark.full
def test_it_is_fine_tuned_on_images(policy: Path) -> None:
    """Two pictures that differ in color only have different answers, which only who sees them can tell."""
    renderer, files = renderer_of(policy), dict[str, bytes]()
    sequences, placed = [], list[tuple[PlacedImage, ...]]()
    for color in ("red", "blue"):
        opening = Observation((asked(picture(color)),))
        shown = render_demonstration(renderer, opening, [Message("assistant", color)])
        sequences.append((shown.token_ids, shown.loss_mask))
        placed.append(shown.images)
        files |= shown.image_files
    backend = open_backend(policy)
    try:
        how = {"tokens_per_microbatch": 256, "seed": 0, "report": lambda news: None}
        config = Sft(epochs=60, held_out=0.0, tokens_per_step=256, lr=5e-3)
        result = run_sft(backend, sequences, config, **how, images=ExampleImages(tuple(placed), files))  # type: ignore[arg-type]
    finally:
        backend.close()
    assert result.loss < 0.1


# ---------------------------------------------------------------- two ranks


def rank_main(jobs: list[Job]) -> None:
    """Rank 1 has the sequence without an image only; its passes compute the vision tower all the same."""
    for index, job in enumerate(jobs):
        os.environ["MASTER_PORT"] = os.environ["PORTS"].split(",")[index]
        backend = open_backend(job.model, *job.options)
        batch = examples(Path(job.model))
        own = [0] if backend.rank else [1, 2, 3, 4]
        rows = [to_microbatch(batch.select([i])) for i in own]
        scored = backend.logprobs(rows)
        found = gradients_of(backend, rows)
        if backend.rank == 0:
            torch.save({"gradients": found, "logprobs": scored}, job.out)
        assert len(backend.logprobs([] if backend.rank else [scoring_microbatch([[1, 2, 3]])])) == 1 - backend.rank
        backend.close()


@pytest.mark.full
def test_two_ranks_of_which_one_has_no_image(policy: Path, tmp_path: Path) -> None:
    jobs = [Job(str(policy), str(tmp_path / "trained")), Job(str(policy), str(tmp_path / "frozen"), ("frozen_vision",))]
    run_on_two_ranks(tmp_path, __file__, jobs)
    logprobs, gradients = expected(policy)
    for job in jobs:
        found = torch.load(job.out)
        for ours, theirs in zip(found["logprobs"], logprobs[1:], strict=True):
            torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)
        wanted = {n: g for n, g in gradients.items() if not job.options or ".visual." not in n}
        assert found["gradients"].keys() == wanted.keys()
        for name, gradient in wanted.items():
            torch.testing.assert_close(found["gradients"][name], gradient, atol=1e-5, rtol=1e-3)


if __name__ == "__main__":
    rank_main([msgspec.convert(job, Job) for job in json.loads(sys.argv[1])])
