"""Images on the server `transformers`: exact over pieces of a prompt, shared prefixes and sampled placeholders; and over HTTP."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from slipstream.common import image_processor
from slipstream.common.image_processor import ImageProcessor
from slipstream.common.images import PlacedImage, PromptImage
from slipstream.envs import Message
from slipstream.learner.model import load_tokenizer
from slipstream.rollout.engines.base import SamplingParams
from slipstream.rollout.engines.image_parts import ImagePart
from slipstream.rollout.engines.server.contract import RequestLimits, SampledToken, Sequence
from slipstream.rollout.engines.server.protocol import BadRequest, GenerateRequest, WireSamplingParams
from slipstream.rollout.engines.transformers import model_runner
from slipstream.rollout.engines.transformers.engine import load_model
from slipstream.rollout.engines.transformers.images import SeenImages
from slipstream.rollout.engines.transformers.model_runner import TransformersModelRunner
from slipstream.rollout.engines.transformers.paging import PAGE
from slipstream.tests.seeing import (
    Prompt,
    asked,
    picture,
    plain_logits,
    plain_model,
    seeing_policy,
    with_second_placeholder,
)

TOLERANCE = 1e-4  # nats
SAMPLED = 6


def sequence(prompt: Prompt, id: str) -> Sequence:
    return Sequence(id, prompt.token_ids, SamplingParams(max_tokens=SAMPLED, seed=3), images=prompt.images)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing_policy(tmp_path_factory.mktemp("models") / "seeing")


@functools.cache
def plain(policy: Path) -> Any:
    return plain_model(policy)


def make_runner(policy: Path) -> TransformersModelRunner:
    model = load_model(str(policy), "float32")
    seen = SeenImages(model, ImageProcessor(str(policy)))
    return TransformersModelRunner(model, blocks=64, max_concurrent=8, seed=0, images=seen)


def decode(runner: TransformersModelRunner, *sequences: Sequence) -> dict[str, list[SampledToken]]:
    found: dict[str, list[SampledToken]] = {sequence.id: [] for sequence in sequences}
    for sequence in sequences:
        runner.add(sequence)
    while runner.busy():
        for token in runner.step():
            found[token.id].append(token)
    return found


def assert_exact(policy: Path, prompt: Prompt, sampled: list[SampledToken]) -> None:
    """The log-probs are those that transformers computes of the whole sequence."""
    ids = [*prompt.token_ids, *(token.token for token in sampled)]
    with torch.no_grad():
        logits = plain_logits(policy, plain(policy), ids, prompt.placed, prompt.files)
    rows = logits[len(prompt.token_ids) - 1 : -1].log_softmax(-1)
    expected = [float(row[token.token]) for row, token in zip(rows, sampled, strict=True)]
    assert [token.logprob for token in sampled] == pytest.approx(expected, abs=TOLERANCE)
    assert len(sampled) == SAMPLED


def test_log_probs_are_the_models_own(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of one image, of two and of none, together; computed whole, and in pieces that end within an image."""
    red, blue = picture("red"), picture("blue", 64, 48)
    prompts = {
        "one": Prompt(policy, asked(red)),
        "two": Prompt(policy, asked(red, text="And? " * 8), Message("assistant", "red"), asked(blue)),
        "none": Prompt(policy, Message("user", "Which color is it?")),
    }
    for budget in (1024, 7):
        monkeypatch.setattr(model_runner, "BATCH_TOKENS", budget)
        found = decode(make_runner(policy), *(sequence(prompt, name) for name, prompt in prompts.items()))
        for name, prompt in prompts.items():
            assert_exact(policy, prompt, found[name])


def test_a_prefix_is_shared_by_equal_images_only(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of the two prompts are the same."""
    long = "Which color is it? " * 12
    red, blue = (Prompt(policy, asked(picture(color), text=long)) for color in ("red", "blue"))
    assert red.token_ids == blue.token_ids
    runner = make_runner(policy)
    assert_exact(policy, red, decode(runner, sequence(red, "a"))["a"])
    read: list[int] = []
    load = runner._images.load  # type: ignore[union-attr]
    monkeypatch.setattr(
        runner._images, "load", lambda pieces: read.append(sum(e - s for _, s, e in pieces)) or load(pieces)
    )
    assert_exact(policy, red, decode(runner, sequence(red, "b"))["b"])
    assert read[0] == len(red.token_ids) - PAGE  # a block, the image in it, was there
    read.clear()
    assert_exact(policy, blue, decode(runner, sequence(blue, "c"))["c"])
    assert read[0] == len(blue.token_ids)


def test_a_prefix_that_begins_with_an_image_is_shared_within_a_salt_only(policy: Path) -> None:
    prompt = Prompt(policy, asked(picture("red"), text="Which color is it? " * 12))
    (image,) = prompt.images
    ids, end = prompt.token_ids[image.start :], image.end - image.start
    cache = make_runner(policy)._cache

    def hashed(id: str, salt: str, digest: str) -> list[int]:
        cache.salts[id], cache.images[id] = salt, [PlacedImage(0, end, digest, "png", 4, 4)]
        return cache._salted(id, list(ids))

    first, same, salted, other = (
        hashed(*one) for one in [("a", "", "0"), ("b", "", "0"), ("c", "x", "0"), ("d", "", "1")]
    )
    assert first == same
    assert len({one[0] for one in (first, salted, other)}) == 3
    assert len({one[1] for one in (first, salted, other)}) == 2
    assert first[end:] == salted[end:] == list(ids[end:])


def test_a_sampled_placeholder_is_a_token_like_any_other(policy: Path) -> None:
    pad = load_tokenizer(str(policy)).get_vocab()["<|image_pad|>"]
    prompt = Prompt(policy, asked(picture("red")))
    runner = make_runner(policy)
    runner.add(sequence(prompt, "a"))
    running = runner._running["a"]
    tokens: list[SampledToken] = []
    while not tokens:
        tokens = runner.step()
    state = runner._scheduler.active_requests["a"]
    state.tokens_to_process, state.generated_tokens[-1], running.tokens[-1] = [pad], pad, pad
    (after,) = runner.step()
    with torch.no_grad():
        model = plain_model(policy)
        second = with_second_placeholder(model, pad)
        ids = [*prompt.token_ids, second]
        logits = plain_logits(policy, model, ids, prompt.placed, prompt.files)[-1].log_softmax(-1)
    assert after.logprob == pytest.approx(float(logits[after.token]), abs=TOLERANCE)
    runner.abort("a")
    assert not runner.busy()


def test_an_image_that_does_not_fit_its_tokens_is_refused(policy: Path) -> None:
    prompt = Prompt(policy, asked(picture("red")))
    runner, limits = make_runner(policy), RequestLimits(512, 200, images=True)
    (image,) = prompt.images

    def request(*images: PromptImage) -> GenerateRequest:
        parts = tuple(ImagePart.of(image, "") for image in images)
        return GenerateRequest(prompt.token_ids, WireSamplingParams(), content_parts=parts)

    for wrong, why in [
        (PromptImage(image.start, image.end, picture("red", 64, 64)), "came with 4 tokens, it has 16"),
        (PromptImage(image.start, image.end, image.data[:60]), "cannot be read"),
        (PromptImage(image.start, image.end, picture("red", 1, 300)), "cannot be read: an image has 1 x 300 pixels"),
        (PromptImage(image.start, image.end, b"GIF89a"), "begins with b'GIF89a'; allowed are files of png, jpeg"),
    ]:
        with pytest.raises(BadRequest, match=why):
            runner.add(request(wrong).sequence(limits))
        assert not runner.busy()
    end = len(prompt.token_ids)
    for wrong, why in [
        ((PromptImage(end - 2, end, image.data),), "an image at the tokens"),
        ((image, PromptImage(image.end, image.end + 2, image.data)), "an image at the tokens"),
    ]:
        with pytest.raises(BadRequest, match=why):
            request(*wrong).sequence(limits)
    for part, why in [
        (ImagePart("data:image/png;base64,#", f"{image.start}-{image.end}-"), "an image's url is no base64"),
        (ImagePart(ImagePart.of(image, "").url, f"{image.start}"), "is called '4'; allowed are START-END-SALT"),
    ]:
        with pytest.raises(BadRequest, match=why):
            GenerateRequest(prompt.token_ids, WireSamplingParams(), content_parts=(part,)).sequence(limits)
    with pytest.raises(BadRequest, match="takes none"):
        request(image).sequence(RequestLimits(512, 200))


def test_what_is_kept_of_images_is_bounded_by_bytes(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processor, files = ImageProcessor(str(policy)), [picture(color) for color in ("red", "green", "blue")]
    size = processor.pixels(files[0]).values.nbytes
    monkeypatch.setattr(image_processor, "CACHE_BYTES", 2 * size)
    first, second = (processor.pixels(data) for data in files[:2])
    assert processor.pixels(files[0]) is first  # and is the newest
    processor.pixels(files[2])
    assert processor.pixels(files[0]) is first
    assert processor.pixels(files[1]) is not second
    assert processor._kept_bytes == sum(kept.values.nbytes for kept in processor._kept.values()) == 2 * size
    monkeypatch.setattr(image_processor, "CACHE_BYTES", size - 1)
    assert processor.pixels(files[1]).values.nbytes == size
    assert (processor._kept, processor._kept_bytes) == ({}, 0)


def test_positions_are_those_of_transformers(policy: Path) -> None:
    """After an image of 3 x 4 tokens the next position is the larger of the two further."""
    prompt = Prompt(policy, asked(picture("blue", 64, 48), text="a"))
    (image,) = prompt.placed
    assert isinstance(image, PlacedImage)
    tower = make_runner(policy)._images._tower  # type: ignore[union-attr]
    positions = tower.positions(torch.tensor(prompt.token_ids), prompt.placed)
    assert positions[:, image.start].tolist() == [image.start] * 3
    assert (positions[:, image.end - 1] - image.start).tolist() == [0, 2, 3]
    assert positions[:, image.end].tolist() == [image.start + 4] * 3
