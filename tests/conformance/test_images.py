"""Prompts with images: what a server computes of token ids and files is what transformers does, whatever was pushed before."""

from __future__ import annotations

import asyncio
import functools
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from slipstream.agents import Completion
from slipstream.common.images import PromptImage, moved_images
from slipstream.envs import Image, Message
from slipstream.learner.model import load_tokenizer
from slipstream.rollout.engines.base import RequestRejected, SamplingParams
from slipstream.tests.conformance import reference
from slipstream.tests.conformance.kinds import Kind
from slipstream.tests.conformance.replica import GREEDY, ROUNDS, Replica, Weights
from slipstream.tests.conformance.servers import Server
from slipstream.tests.seeing import (
    Prompt,
    asked,
    picture,
    plain_logits,
    plain_model,
    seeing_policy,
    with_second_placeholder,
)

LONG = SamplingParams(max_tokens=200, temperature=0.0)
SPREAD = 0.1
"""Of random weights: wide enough that another image, or a tower that was not pushed, shows in the log-probs."""
APART = 0.1
"""nats by which another image changes a log-prob at least, of some token; the policies' largest changes are 0.7 and 0.8."""


def make_policy(folder: Path, seed: int) -> Path:
    """A model that sees images, of other random weights for each seed."""
    shutil.copytree(seeing_policy(folder.with_name(f"{folder.name}-source")), folder)
    model = plain_model(folder)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, SPREAD)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    root = tmp_path_factory.mktemp("seeing")
    folders = tuple(make_policy(root / f"m{seed}", seed) for seed in range(2))
    return Weights(folders, tuple(plain_model(folder) for folder in folders))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def seeing_server(kind: Kind, policies: Weights, start: Callable[..., Server]) -> Iterator[Server]:
    kind.needs("images")
    server = start(kind, policies.folders[0], partial="keep_kv")
    yield server
    server.close()


@pytest.fixture
async def seeing(
    kind: Kind, seeing_server: Server, policies: Weights, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[Replica]:
    """The pushes of a test treat requests under way as its parameter says, by default as `recompute`."""
    await seeing_server.wait_ready()
    replica = Replica(kind, seeing_server, policies, tmp_path, getattr(request, "param", "recompute"))
    yield replica
    await replica.close()


def prompts_of(folder: Path) -> list[Prompt]:
    """With an image, twice; with another one at the same tokens; with two that a tool returns, after one of a user; and without."""
    red, green, blue = picture("red"), picture("green", 64, 48), picture("blue")
    long = "Which color is it? " * 12
    shown = Message("tool", "Here it is.", images=(Image(red), Image(green, at=5)))
    return [
        Prompt(folder, asked(red, text=long)),
        Prompt(folder, asked(red, text=long)),
        Prompt(folder, asked(blue, text=long)),
        Prompt(folder, asked(blue), Message("assistant", "Let me see."), shown),
        Prompt(folder, Message("user", "Which color?")),
    ]


@functools.cache
def oracle(folder: Path) -> tuple[Any, int, int]:
    """The model, its placeholder for images, and the token that stands for one that is no image."""
    model, placeholder = plain_model(folder), load_tokenizer(str(folder)).get_vocab()["<|image_pad|>"]
    return model, placeholder, with_second_placeholder(model, placeholder)


def rows(folder: Path, prompt: Prompt, completion: Completion, *, before: Sequence[int] = ()) -> torch.Tensor:
    """float32[n, vocabulary]: as `reference.rows`, of a prompt with images that comes after the tokens `before`."""
    model, placeholder, second = oracle(folder)
    placed = moved_images(prompt.placed, len(before))
    seen = {at for image in placed for at in range(image.start, image.end)}
    ids = [*before, *prompt.token_ids, *completion.token_ids]
    told = [second if token == placeholder and at not in seen else token for at, token in enumerate(ids)]
    with torch.no_grad():
        logits = plain_logits(folder, model, told, placed, prompt.files)
    return logits[-len(completion.token_ids) - 1 : -1].log_softmax(-1)


def assert_exact(seeing: Replica, expected: torch.Tensor, completion: Completion, part: slice = slice(None)) -> None:
    token_ids, logprobs = completion.token_ids[part], completion.logprobs[part]
    assert reference.error(expected[part], token_ids, logprobs) <= seeing.tolerance
    assert reference.greedy(expected[part], token_ids, seeing.tolerance)


@pytest.mark.parametrize("seeing", ["recompute", "keep_kv"], indirect=True)
async def test_images_are_seen_by_the_weights_that_were_pushed_last(seeing: Replica) -> None:
    """Their features and prefixes are kept for the next request, and used by none of another version."""
    prompts = prompts_of(seeing.weights.folders[0])
    assert prompts[0].token_ids == prompts[2].token_ids
    for which in (0, 1, 0):
        await seeing.push(which)
        for _ in range(2):
            found = await asyncio.gather(*(seeing.generate(one.token_ids, GREEDY, one.images) for one in prompts))
            for prompt, completion in zip(prompts, found, strict=True):
                assert_exact(seeing, rows(seeing.weights.folders[which], prompt, completion), completion)
        other = rows(seeing.weights.folders[which], prompts[2], found[0])
        assert reference.error(other, found[0].token_ids, found[0].logprobs) > APART


async def test_a_push_under_requests_with_images_is_exact(seeing: Replica) -> None:
    """Also for those whose images the prefix cache had, so that no pass has read them before the push."""
    prompts = prompts_of(seeing.weights.folders[0])

    async def repeated(one: Prompt, pushed: asyncio.Event) -> Completion:
        """The completion of `one` that a push falls into; those that end before are asked for again."""
        while True:
            completion = await seeing.generate(one.token_ids, LONG, one.images)
            if len(completion.version_spans) > 1 or pushed.is_set():
                return completion

    for _ in range(ROUNDS):
        old, pushed = await seeing.push(1), asyncio.Event()
        await asyncio.gather(*(seeing.generate(one.token_ids, GREEDY, one.images) for one in prompts))
        asked_for = [asyncio.create_task(repeated(one, pushed)) for one in prompts]
        await seeing.begun(asked_for)
        new = await seeing.push(0)
        pushed.set()
        found = await asyncio.gather(*asked_for)
        if any(len(completion.version_spans) > 1 for completion in found):
            break
    assert any(len(completion.version_spans) > 1 for completion in found)
    for prompt, completion in zip(prompts, found, strict=True):
        for span in completion.version_spans:
            folder = seeing.weights.folders[{old: 1, new: 0}[span.version]]
            assert_exact(seeing, rows(folder, prompt, completion), completion, slice(span.start, span.end))


async def test_what_images_are_is_said_by_the_request_and_not_by_ids(seeing: Replica) -> None:
    """Before the image stand as many placeholders as it has, which a policy might have sampled."""
    await seeing.push(0)
    folder = seeing.weights.folders[0]
    prompt = Prompt(folder, asked(picture("red")))
    (image,) = prompt.images
    vocabulary, size = load_tokenizer(str(folder)).get_vocab(), image.end - image.start
    pad = vocabulary["<|image_pad|>"]
    extra = [vocabulary["<|vision_start|>"], *[pad] * size, vocabulary["<|vision_end|>"]]
    ids = [*extra, *prompt.token_ids]
    moved = PromptImage(image.start + len(extra), image.end + len(extra), image.data)
    completion = await seeing.generate(ids, GREEDY, (moved,))
    assert_exact(seeing, rows(folder, prompt, completion, before=extra), completion)


async def test_what_no_prompt_may_have_is_refused_and_the_server_goes_on(seeing: Replica) -> None:
    await seeing.push(0)
    prompt = Prompt(seeing.weights.folders[0], asked(picture("red")))
    (image,) = prompt.images

    def put(start: int, end: int, data: bytes = image.data) -> Sequence[PromptImage]:
        return (PromptImage(start, end, data),)

    end = len(prompt.token_ids)
    for images, why in [
        (put(image.start, image.end, picture("red", 64, 64)), "came with 4 tokens, it has 16"),
        (put(image.start, image.end, image.data[:60]), "[Ii]mage"),
        (put(end - 2, end), "an image at the tokens"),
        ((image, *put(image.end, image.end + 4)), "an image at the tokens"),
    ]:
        with pytest.raises(RequestRejected, match=why):
            await seeing.engine.generate(prompt.token_ids, GREEDY, version=seeing.version, images=images)
    completion = await seeing.generate(prompt.token_ids, GREEDY, prompt.images)
    assert_exact(seeing, rows(seeing.weights.folders[0], prompt, completion), completion)
