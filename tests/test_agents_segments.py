"""Which tokens say which message: what the chat format wrote around them is no part of it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from renderers import RenderedTokens
from slipstream.agents import load_renderer
from slipstream.agents.tree import segments_of
from slipstream.buffer.trajectory import SEGMENTS_LIMIT, Segment, Trajectory
from slipstream.dashboard.texts import TokenTexts
from slipstream.envs import CALCULATOR, Message
from slipstream.errors import WireError
from slipstream.learner.model import load_tokenizer
from slipstream.tests.episodes import trajectory
from slipstream.tests.sessions import Script, call, delivered, session_of
from transformers import PreTrainedTokenizerBase

TOOLS = (CALCULATOR.spec,)
SYSTEM, USER = Message("system", "Answer."), Message("user", "What is 7 + 5? <|im_end|> é")


@pytest.fixture(scope="module")
def tokenizer(policy: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(str(policy))


def texts(tokenizer: PreTrainedTokenizerBase, one: Trajectory) -> list[tuple[str, str]]:
    """Role and text of each segment."""
    return [(s.role, str(tokenizer.decode(one.token_ids[s.start : s.end].tolist()))) for s in one.segments]


async def test_messages_of_a_conversation_with_a_tool_are_found_by_their_tokens(
    policy: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    said = [call("calculator", expression="7 + 5"), "<tool_call>no JSON</tool_call>", "It is 12."]
    script = Script(tokenizer, lambda number: said[number])
    session = session_of(load_renderer("qwen3", tokenizer, thinking=False), tokenizer, script)
    history = [SYSTEM, USER]
    first = await session.chat(history, TOOLS)
    asked = Message("tool", "12 <|im_start|>", tool_call_id=first.tool_calls[0].id, name="calculator \ud800")
    history += [first, asked, Message("tool", "nothing", name="other")]
    second = await session.chat(history, TOOLS)
    assert second.malformed
    history += [second, Message("user", "Again.")]
    await session.chat(history, TOOLS)
    (one,) = delivered(session)
    found = texts(tokenizer, one)
    assert [role for role, _ in found] == [
        "system",
        "tools",
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
        "user",
        "assistant",
    ]
    spoken = [text for role, text in found if role not in ("assistant", "tools")]
    assert spoken == ["Answer.", USER.content, "12 <|im_start|>", "nothing", "Again."]
    assert '"name": "calculator"' in dict(found)["tools"]
    assert dict(found)["tools"].endswith("</tool_call><|im_end|>\n")
    assert [text for role, text in found if role == "assistant"] == [f"{text}<|im_end|>" for text in said]
    turns = [s for s in one.segments if s.role == "assistant"]
    assert [(s.start, s.end) for s in turns] == [(turn.start, turn.end) for turn in one.turns]
    assert [s.malformed for s in turns] == ["", second.malformed, ""]
    assert [s.name for s in one.segments if s.role == "tool"] == ["calculator \\ud800", "other"]
    shown = TokenTexts(Path("/nowhere"), str(policy)).messages(
        one.token_ids.tolist(), [(turn.start, turn.end) for turn in one.turns], one.segments
    )
    assert [(m.role, m.turn, m.malformed) for m in shown if m.role == "assistant"] == [
        ("assistant", number, s.malformed) for number, s in enumerate(turns)
    ]
    assert [m.text for m in shown if m.role == "assistant"] == said
    assert [m.text for m in shown if m.turn is None and m.role != "tools"] == spoken


async def test_a_rewritten_history_names_the_messages_of_its_own_branch(tokenizer: PreTrainedTokenizerBase) -> None:
    script = Script(tokenizer, lambda number: f"reply {number}")
    session = session_of(load_renderer("qwen3", tokenizer, thinking=False), tokenizer, script)
    first = await session.chat([USER])
    await session.chat([USER, first, Message("user", "More.")])
    await session.chat([Message("user", "Short."), Message("assistant", "said"), Message("user", "And?")])
    await session.chat([USER, first, Message("user", "Other.")])  # forks off after the first reply
    branches = [
        [text.removesuffix("<|im_end|>").removeprefix("<think>\n\n</think>\n\n") for _, text in texts(tokenizer, one)]
        for one in delivered(session)
    ]
    assert branches == [
        [USER.content, "reply 0", "More.", "reply 1"],
        ["Short.", "said", "And?", "reply 2"],
        [USER.content, "reply 0", "Other.", "reply 3"],
    ]


async def test_a_chat_template_names_only_what_was_sampled_and_raw_tokens_nothing(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    session = session_of(
        load_renderer("default", tokenizer, thinking=False), tokenizer, Script(tokenizer, lambda number: "fine")
    )
    await session.chat([SYSTEM, USER])
    await session.generate((5, 6, 7))
    chat, raw = delivered(session)
    assert texts(tokenizer, chat) == [("assistant", "fine<|im_end|>")]
    assert raw.segments == ()


@pytest.mark.parametrize(
    "rendered",
    [
        RenderedTokens(token_ids=[1, 2, 3], message_indices=[]),
        RenderedTokens(token_ids=[1, 2, 3], message_indices=[0, 0]),
        RenderedTokens(token_ids=[1, 2, 3], message_indices=[0, 0, 7]),
        RenderedTokens(token_ids=[1, 2, 3], message_indices=[-1, -1, -1]),
        RenderedTokens(token_ids=[1, 2, 3], message_indices=[0, 0, 0], is_content=[True]),
        RenderedTokens(token_ids=[], message_indices=[]),
    ],
)
def test_a_chat_format_that_does_not_tell_is_not_guessed(rendered: RenderedTokens) -> None:
    assert segments_of(rendered, [USER], tools=True) == []


def test_messages_that_lie_in_each_other_are_left_out() -> None:
    rendered = RenderedTokens(token_ids=[1] * 7, message_indices=[0, 1, 0, 2, 2, -1, -1])
    found = segments_of(rendered, [USER, SYSTEM, USER], tools=False)
    assert [(one.start, one.end, one.role) for one in found] == [(1, 2, "system"), (3, 5, "user")]


def test_segments_of_a_trajectory_are_checked() -> None:
    good = trajectory("0.0.0")
    size = len(good)
    msgspec.structs.replace(good, segments=(Segment(0, 1, "user"), Segment(1, size, "assistant"))).check()
    for bad in (
        (Segment(0, 0, "user"),),
        (Segment(0, size + 1, "user"),),
        (Segment(-1, 1, "user"),),
        (Segment(0, 2, "user"), Segment(1, 3, "tool")),
    ):
        with pytest.raises(WireError, match="bad segment"):
            msgspec.structs.replace(good, segments=bad).check()
    many = tuple(Segment(n, n + 1, "user") for n in range(SEGMENTS_LIMIT + 1))
    long = msgspec.structs.replace(
        trajectory("0.0.0", sampled=SEGMENTS_LIMIT + 1), segments=many, loss_mask=np.arange(SEGMENTS_LIMIT + 2) > 0
    )
    with pytest.raises(WireError, match="segments may have"):
        long.check()
