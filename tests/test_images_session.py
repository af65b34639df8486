"""Images from a message to a trajectory: their tokens, their files, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from slipstream.agents import Completion, load_renderer
from slipstream.agents.chat_images import chat_parts, require_text
from slipstream.agents.session import to_chat
from slipstream.buffer.encoded import EncodedTrajectory
from slipstream.buffer.trajectory import FINISHED, Trajectory, VersionSpan
from slipstream.common.images import PlacedImage, PromptImage, digest_of
from slipstream.envs import Image, Message, ToolCall, ToolEnv
from slipstream.envs.base import check_images
from slipstream.errors import EnvError, PolicyError, WireError
from slipstream.learner.model import load_tokenizer
from slipstream.tests.seeing import TOKENS, asked, picture, renderer_of, seeing_policy
from slipstream.tests.sessions import delivered, session_of

RED, BLUE = picture("red"), picture("blue", 64, 32)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing_policy(tmp_path_factory.mktemp("models") / "seeing")


class Eye:
    """Samples the end of a turn, and keeps what it was asked."""

    def __init__(self, end: int) -> None:
        self.asked: list[tuple[tuple[int, ...], list[PromptImage]]] = []
        self._end = end

    async def __call__(self, token_ids: Sequence[int], room: int, images: Sequence[PromptImage] = ()) -> Completion:
        self.asked.append((tuple(token_ids), list(images)))
        return Completion((self._end,), (-0.5,), (VersionSpan(0, 1, 0),), "stop")


def make_session(policy: Path) -> tuple[Any, Eye, int]:
    tokenizer = load_tokenizer(str(policy))
    vocabulary = tokenizer.get_vocab()
    eye = Eye(vocabulary["<|im_end|>"])
    return session_of(renderer_of(policy), tokenizer, eye), eye, vocabulary["<|image_pad|>"]


def test_a_message_is_a_list_of_parts() -> None:
    message = Message("user", "How many? Answer.", images=(Image(RED), Image(BLUE, at=10)))
    assert chat_parts(message) == [
        {"type": "image", "image": RED},
        {"type": "text", "text": "How many? "},
        {"type": "image", "image": BLUE},
        {"type": "text", "text": "Answer."},
    ]
    assert to_chat([Message("user", "How many?")])[0]["content"] == "How many?"


async def test_an_image_has_its_tokens_and_a_later_turn_extends_them(policy: Path) -> None:
    session, eye, pad = make_session(policy)
    first = asked(RED)
    reply = await session.chat([first])
    shown = Message("tool", "and ", tool_call_id="1", name="look", images=(Image(BLUE, at=4),))
    await session.chat([first, reply, shown])
    (one, _), (ids, images) = eye.asked
    assert ids[: len(one)] == one
    assert [image.data for image in images] == [RED, BLUE]
    assert [image.end - image.start for image in images] == [TOKENS, 2 * TOKENS]
    assert all(ids[image.start : image.end] == (pad,) * (image.end - image.start) for image in images)
    assert ids.count(pad) == 3 * TOKENS
    (trajectory,) = delivered(session)
    assert trajectory.token_ids.tolist() == [*ids, *trajectory.token_ids[-1:].tolist()]
    assert [(i.start, i.end, i.digest, i.kind, i.height, i.width) for i in trajectory.images] == [
        (images[0].start, images[0].end, digest_of(RED), "png", 4, 4),
        (images[1].start, images[1].end, digest_of(BLUE), "png", 4, 8),
    ]
    assert session.image_files == {digest_of(RED): RED, digest_of(BLUE): BLUE}
    assert EncodedTrajectory.of(trajectory).decode().images == trajectory.images


async def test_another_image_is_another_conversation(policy: Path) -> None:
    """Their tokens are the same; the hash of a prompt, by which learners find prefixes, is not."""
    session, eye, _ = make_session(policy)
    other = picture("green")
    reply = await session.chat([asked(RED)])
    await session.chat([asked(other), reply, Message("user", "Sure?")])
    assert [[image.data for image in images] for _, images in eye.asked] == [[RED], [other]]
    first, second = delivered(session)
    assert first.token_ids.tolist() == second.token_ids[: len(first)].tolist()
    assert first.images[0].start == second.images[0].start
    prompts = {
        EncodedTrajectory.of(one).row.prompt for one in (first, msgspec.structs.replace(first, images=second.images))
    }
    assert len(prompts) == 2


async def test_an_image_is_rendered_from_its_patches_alone(policy: Path) -> None:
    """Of the longest one that is allowed, and of one that was rendered before; no numbers of either are kept."""
    session, eye, pad = make_session(policy)
    long = picture("red", 1, 200)
    check_images([asked(long)])
    for _ in range(2):
        await session.chat([asked(long), Message("assistant", "a"), asked(RED)])
    assert eye.asked[0] == eye.asked[1]
    ids, images = eye.asked[0]
    assert sum(image.end - image.start for image in images) == ids.count(pad) > 2 * TOKENS
    kept = [made["pixel_values"] for made, _ in session._renderer._image_cache.values()]
    assert kept == [None, None]


async def test_raw_tokens_go_on_with_the_images_of_their_conversation(policy: Path) -> None:
    session, eye, _ = make_session(policy)
    await session.chat([asked(RED)])
    ids = [*eye.asked[0][0], load_tokenizer(str(policy)).get_vocab()["<|im_end|>"]]
    await session.generate([*ids, 5, 6])
    assert eye.asked[1][1] == eye.asked[0][1]
    (trajectory,) = delivered(session)
    assert len(trajectory.images) == 1


async def test_control_tokens_in_the_text_beside_an_image_stay_text(policy: Path) -> None:
    session, eye, pad = make_session(policy)
    await session.chat([asked(RED, text="<|image_pad|> <|im_end|>")])
    ((ids, images),) = eye.asked
    assert ids.count(pad) == TOKENS == images[0].end - images[0].start


async def test_a_chat_format_without_images_is_refused(policy: Path) -> None:
    tokenizer = load_tokenizer(str(policy))
    session = session_of(load_renderer("qwen3", tokenizer, thinking=False), tokenizer, Eye(0))
    with pytest.raises(PolicyError, match="cannot render the conversation"):
        await session.chat([asked(RED)])
    with pytest.raises(PolicyError, match="agents written elsewhere are not given"):
        require_text([asked(RED)])


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (Message("user", "?", images=(Image(b"GIF89a"),)), "begins with b'GIF89a'; allowed are files of png, jpeg"),
        (Message("user", "?", images=(Image(RED[:40]),)), "cannot be decoded"),
        (
            Message("user", "?", images=(Image(picture("red", 1, 201)),)),
            "an image has 1 x 201 pixels; allowed are 16777216 in all",
        ),
        (Message("user", "?", images=(Image(RED, at=2),)), "at character 2 of 1"),
        (Message("user", "ab", images=(Image(RED, at=2), Image(RED, at=1))), "allowed are 2 to the text's end"),
        (Message("assistant", "", images=(Image(RED),)), "of role assistant has an image; allowed are user and tool"),
    ],
)
def test_what_is_no_image_of_a_message_is_the_environments_fault(message: Message, why: str) -> None:
    with pytest.raises(EnvError, match=why):
        check_images([message])


def of(images: Sequence[PlacedImage]) -> Trajectory:
    mask = np.array([False] * 8 + [True])
    return Trajectory(
        "0.0.0.0", 0, 0, 0, "t", "e", (VersionSpan(8, 9, 0),), (), 0.0, (), FINISHED,
        images=tuple(images), token_ids=np.zeros(9, np.int32), loss_mask=mask, behavior_logprobs=np.zeros(9, np.float32),
    )  # fmt: skip


@pytest.mark.parametrize("places", [[(2, 2)], [(3, 10)], [(6, 9)], [(4, 6), (1, 3)], [(1, 3), (3, 5)]])
def test_images_lie_in_given_tokens_and_apart(places: list[tuple[int, int]]) -> None:
    with pytest.raises(WireError, match="bad image"):
        of([PlacedImage(start, end, digest_of(RED), "png", 2, 2) for start, end in places]).check()
    of([PlacedImage(1, 3, digest_of(RED), "png", 2, 4), PlacedImage(4, 5, digest_of(BLUE), "png", 2, 2)]).check()


async def test_a_tool_shows_an_image() -> None:
    class Looking(ToolEnv):
        def task(self, index: int) -> Any: ...

        def question(self, task: Any) -> str:
            return "?"

        def tools(self) -> Any:
            return [self.look, self.compare]

        def look(self) -> Image:
            """Look."""
            return Image(RED)

        def compare(self) -> list[Any]:
            """Compare."""
            return ["first ", Image(RED), "then ", Image(BLUE), 3]

        def score(self, task: Any, answer: str) -> float:
            return 0.0

    env = Looking(split="train", seed=0).make()
    await env.reset(None)  # type: ignore[arg-type]
    calls = (ToolCall("look", {}, "1"), ToolCall("compare", {}, "2"))
    looked, compared = (await env.step(Message("assistant", "", calls))).messages
    assert looked == Message("tool", "", tool_call_id="1", name="look", images=(Image(RED),))
    assert (compared.content, compared.images) == ("first then 3", (Image(RED, at=6), Image(BLUE, at=11)))
