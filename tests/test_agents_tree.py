"""Calls of a session in any order: at the same time, repeated, rewritten, several replies at once, cut by a stop text, untrained.

Every token that the engine returned has a log-prob of its own here, by which it is found in the branches."""

from __future__ import annotations

import asyncio
import contextvars
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from renderers import Renderer
from slipstream.agents import Completion, ContextExhausted, Reply, SampleRequest, Session
from slipstream.buffer.trajectory import VersionSpan
from slipstream.envs import CALCULATOR, Message, ToolCall
from slipstream.errors import EngineError, PolicyError
from slipstream.tests.sessions import delivered, session_of
from transformers import PreTrainedTokenizerBase

TOOLS = (CALCULATOR.spec,)
OPENING = [Message("system", "Answer."), Message("user", "What is 7 + 5?")]
TEXTS = (
    "12",
    " 12\n",
    "I think.\nObservation: 12 Observation: 13",
    "Observation:",
    "a b c d e f g h",
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "7 + 5", "a": 1}}\n</tool_call>',
    "Hm.\n<tool_call>\n{oops\n</tool_call>",
)
STOPS = ((), (), (), ("Observation:",), ("d", "tion:"), ("never said",))
CALL = contextvars.ContextVar[int]("the call that samples")


@dataclass
class Sampling:
    """One completion as the engine saw it."""

    call: int
    prompt: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: bool = False


class Engine:
    """Says one of `texts` in parts, and remembers it. `rng` decides the text, the parts, the versions and who comes first."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, rng: random.Random, texts: Sequence[str] = TEXTS) -> None:
        self.samplings: dict[object, Sampling] = {}
        self.generated = 0
        self.parts = 0.3
        self._rng = rng
        self._texts = [tokenizer.encode(text + "<|im_end|>", add_special_tokens=False) for text in texts]
        self._left: dict[object, list[int]] = {}

    async def __call__(self, token_ids: Sequence[int], max_tokens: int) -> Completion:
        task = asyncio.current_task()  # one completion each
        assert task is not None
        if task not in self.samplings:
            self.samplings[task] = Sampling(CALL.get(), tuple(token_ids))
            self._left[task] = list(self._rng.choice(self._texts))
        sampling, left = self.samplings[task], self._left[task]
        assert tuple(token_ids) == (*sampling.prompt, *sampling.token_ids)
        for _ in range(self._rng.randrange(3)):
            await asyncio.sleep(0)
        aborted = len(left) > 1 and self._rng.random() < self.parts
        count = min(max_tokens, self._rng.randint(1, len(left) - 1) if aborted else len(left))
        new, version = left[:count], self.generated // 50
        logprobs = [-(self.generated + i + 1) / 1024 for i in range(count)]  # exact in float32
        self.generated += count
        del left[:count]
        sampling.token_ids += new
        sampling.logprobs += logprobs
        sampling.ended = not aborted
        reason = "abort" if aborted else "length" if left else "stop"
        return Completion(tuple(new), tuple(logprobs), (VersionSpan(0, count, version),), reason)


class Client:
    """Makes random calls, and sends back what it was shown in its own spelling."""

    def __init__(self, session: Session, rng: random.Random) -> None:
        self.session, self.rng = session, rng
        self.requests: list[SampleRequest] = []
        self.cancelled: set[int] = set()
        self.replies: dict[int, tuple[Reply, ...]] = {}
        self.histories: list[list[Message]] = [OPENING]  # each ends with a message to answer

    async def call(self, number: int) -> None:
        CALL.set(number)
        history = self.rng.choice(self.histories)
        if self.rng.random() < 0.15:  # rewritten
            history = [history[0], Message("user", f"In short: {number}"), *history[2:]]
        tools = TOOLS if self.rng.random() < 0.9 else ()
        try:
            replies = await self.session.sample(history, tools, self.requests[number])
        except ContextExhausted:
            return
        self.replies[number] = replies
        for reply in replies:
            self.histories.append([*history, self.spelled(reply), *self.following(reply)])

    def spelled(self, reply: Reply) -> Message:
        calls = [
            ToolCall(c.name, dict(reversed(c.arguments.items())), f"toolu_{i}")
            for i, c in enumerate(reply.message.tool_calls)
        ]
        return Message("assistant", f"\n{reply.content} " if self.rng.random() < 0.5 else reply.content, tuple(calls))

    def following(self, reply: Reply) -> list[Message]:
        if reply.message.tool_calls:
            return [Message("tool", "12", tool_call_id="toolu_0", name="calculator")]
        return [Message("user", self.rng.choice(["Go on.", "Again."]))]

    async def play(self, rounds: int) -> None:
        for _ in range(rounds):
            first = len(self.requests)
            for _ in range(self.rng.randint(1, 4)):
                limit = self.rng.choice([None, None, 3, 20])
                n, trained = self.rng.choice([1, 1, 1, 2, 3]), self.rng.random() < 0.8
                self.requests.append(SampleRequest(limit, self.rng.choice(STOPS), n, trained))
            tasks = [asyncio.create_task(self.call(number)) for number in range(first, len(self.requests))]
            if self.rng.random() < 0.1:
                await asyncio.sleep(0)
                self.cancelled.add(len(self.requests) - 1)
                tasks[-1].cancel()
            await asyncio.wait(tasks)
            assert not [task.exception() for task in tasks if not task.cancelled() and task.exception()]


def kept_of(sampling: Sampling, request: SampleRequest, decode: object) -> int:
    """How many tokens of a completion have loss, counted one by one."""
    assert callable(decode)
    if not request.trained:
        return 0
    for tokens in range(1, len(sampling.token_ids) + 1):
        if any(stop in decode(sampling.token_ids[:tokens]) for stop in request.stop):
            return tokens
    return len(sampling.token_ids)


@given(st.integers(0, 1 << 32))
@settings(deadline=None)
def test_every_sampled_token_is_trained_once(tokenizer: PreTrainedTokenizerBase, renderer: Renderer, seed: int) -> None:
    rng = random.Random(seed)
    engine = Engine(tokenizer, rng)
    session = session_of(renderer, tokenizer, engine)
    client = Client(session, rng)
    asyncio.run(client.play(rng.randint(1, 6)))
    trajectories = delivered(session)
    # Where the log-prob of each token with loss is: (trajectory, position). No two tokens share one.
    places = {
        float(t.behavior_logprobs[position]): (t, int(position))
        for t in trajectories
        for position in np.flatnonzero(t.loss_mask)
    }
    assert len(places) == sum(t.sampled for t in trajectories)
    expected = 0
    for sampling in engine.samplings.values():
        request = client.requests[sampling.call]
        whole = sampling.ended or sampling.call not in client.cancelled  # a cancelled one is kept as far as it came
        kept = kept_of(sampling, request if whole else msgspec.structs.replace(request, stop=()), tokenizer.decode)
        expected += kept
        for i in range(kept):
            trajectory, position = places[sampling.logprobs[i]]
            begin = (*sampling.prompt, *sampling.token_ids[: i + 1])
            assert position == len(begin) - 1
            assert tuple(trajectory.token_ids[: len(begin)].tolist()) == begin
    assert len(places) == expected
    # The account: what is not delivered is what was cut off or has no loss by request.
    assert engine.generated == sum(len(s.token_ids) for s in engine.samplings.values())
    for number, replies in client.replies.items():
        lengths = sorted(len(reply.completion.token_ids) for reply in replies)
        request = msgspec.structs.replace(client.requests[number], trained=True)
        mine = [s for s in engine.samplings.values() if s.call == number]
        assert lengths == sorted(kept_of(s, request, tokenizer.decode) for s in mine)


async def test_a_stop_text_cuts_within_the_reply_and_the_rest_has_no_loss(
    tokenizer: PreTrainedTokenizerBase, renderer: Renderer
) -> None:
    CALL.set(0)
    engine = Engine(tokenizer, random.Random(0), ["I think.\nObservation: 12 Observation: 13"])
    session = session_of(renderer, tokenizer, engine)
    (reply,) = await session.sample(OPENING, (), SampleRequest(stop=("13", "Observation:")))
    (sampling,) = engine.samplings.values()
    assert (reply.content, reply.stop, reply.completion.finish_reason) == ("I think.\n", "Observation:", "stop")
    text = tokenizer.decode(reply.completion.token_ids)
    assert "Observation:" in text
    assert "Observation:" not in tokenizer.decode(reply.completion.token_ids[:-1])
    (trajectory,) = delivered(session)
    assert trajectory.token_ids.tolist() == [*sampling.prompt, *reply.completion.token_ids]
    assert trajectory.sampled == len(reply.completion.token_ids) < engine.generated


@pytest.mark.parametrize(
    "arguments",
    ['{"a": "\\ud800"}', '{"a": ' + "9" * 5000 + "}", '{"a": ' + "[" * 1500 + "]" * 1500 + "}"],
    ids=["half a surrogate pair", "a number of 5,000 digits", "1,500 lists"],
)
async def test_a_reply_that_cannot_be_read_is_malformed_and_trained_on(
    tokenizer: PreTrainedTokenizerBase, renderer: Renderer, arguments: str
) -> None:
    CALL.set(0)
    text = f'<tool_call>\n{{"name": "calculator", "arguments": {arguments}}}\n</tool_call>'
    engine = Engine(tokenizer, random.Random(0), [text])
    session = session_of(renderer, tokenizer, engine, max_tokens=20_000, max_tokens_per_turn=10_000)
    reply = await session.chat(OPENING, TOOLS)
    assert reply.malformed
    assert not reply.tool_calls
    assert session.failure is None
    (trajectory,) = delivered(session)
    assert trajectory.sampled == engine.generated


async def test_what_a_client_sends_back_continues_its_branch(
    tokenizer: PreTrainedTokenizerBase, renderer: Renderer
) -> None:
    """Ids, blanks and the order of arguments may change on the way, and a call that could not be read comes back as text."""
    CALL.set(0)
    for text, back in (
        (TEXTS[5], Message("assistant", "", (ToolCall("calculator", {"a": 1, "expression": "7 + 5"}, "x"),))),
        (TEXTS[1], Message("assistant", "12")),
        (TEXTS[6], Message("assistant", "Hm.")),
        ("<tool_call>\n{oops\n</tool_call>", Message("assistant", "{oops")),
    ):
        engine = Engine(tokenizer, random.Random(0), [text])
        session = session_of(renderer, tokenizer, engine)
        await asyncio.create_task(session.chat(OPENING, TOOLS))
        await asyncio.create_task(session.chat([*OPENING, back, Message("user", "And?")], TOOLS))
        (trajectory,) = delivered(session)
        assert len(trajectory.turns) == 2, text


async def test_calls_at_the_same_time_fork_and_share_their_context(
    tokenizer: PreTrainedTokenizerBase, renderer: Renderer
) -> None:
    """What went wrong when a session was one growing list: the second call found the first one's question in its own prompt."""
    CALL.set(0)
    engine = Engine(tokenizer, random.Random(1), ["yes"])
    session = session_of(renderer, tokenizer, engine)
    first = await session.chat(OPENING)
    questions = [[*OPENING, first, Message("user", f"{name}?")] for name in "ABA"]
    await asyncio.gather(*(session.chat(history) for history in questions))
    trajectories = delivered(session)
    assert [len(t.turns) for t in trajectories] == [2, 1, 1]
    texts = [tokenizer.decode(t.token_ids) for t in trajectories]
    assert sorted((text.count("A?"), text.count("B?")) for text in texts) == [(0, 1), (1, 0), (1, 0)]


async def test_an_untrained_reply_is_context_only_where_it_is_continued(
    tokenizer: PreTrainedTokenizerBase, renderer: Renderer
) -> None:
    CALL.set(0)
    engine = Engine(tokenizer, random.Random(1), ["a title"])
    session, side = session_of(renderer, tokenizer, engine), SampleRequest(trained=False)
    (title,) = await asyncio.create_task(session.sample(OPENING, (), side))
    assert session.branches == []
    assert session.untrained == 1
    await asyncio.create_task(session.chat([*OPENING, title.message, Message("user", "And?")]))
    (trajectory,) = delivered(session)
    assert trajectory.sampled == len(title.completion.token_ids)
    assert [turn.start for turn in trajectory.turns] == [len(trajectory) - trajectory.sampled]


async def test_a_lost_engine_is_remembered(tokenizer: PreTrainedTokenizerBase, renderer: Renderer) -> None:
    async def lost(token_ids: Sequence[int], max_tokens: int) -> Completion:
        raise EngineError("no replica")

    session = Session(renderer, lost, vocabulary=2000, max_tokens_per_turn=8, max_tokens=500)
    with pytest.raises(EngineError):
        await session.sample(OPENING, (), SampleRequest(n=3))
    assert str(session.failure) == "no replica"


async def test_a_long_prompt_does_not_block_the_loop(
    tokenizer: PreTrainedTokenizerBase, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is rendered in a thread, and gives the same tokens."""
    CALL.set(0)
    engine = Engine(tokenizer, random.Random(0), ["yes"])
    session = session_of(renderer, tokenizer, engine, max_tokens=1 << 20)
    words = json.dumps(list(range(10_000)))
    turned = 0

    async def turn() -> None:
        nonlocal turned
        while True:
            await asyncio.sleep(0)
            turned += 1

    turning = asyncio.create_task(turn())
    await session.chat([Message("user", words)])
    turning.cancel()
    (trajectory,) = delivered(session)
    plain = renderer.render_ids([{"role": "user", "content": words}], add_generation_prompt=True)
    assert trajectory.token_ids[: len(plain)].tolist() == plain
    assert turned > 10  # three turns of the engine itself


async def test_what_cannot_be_asked(tokenizer: PreTrainedTokenizerBase, renderer: Renderer) -> None:
    CALL.set(0)
    engine = Engine(tokenizer, random.Random(0), ["yes"])
    session = Session(renderer, engine, vocabulary=2000, max_tokens_per_turn=8, max_tokens=500)
    with pytest.raises(PolicyError, match="without `decode`"):
        await session.sample(OPENING, (), SampleRequest(stop=("x",)))
    with pytest.raises(ContextExhausted):
        await session.chat([Message("user", "long " * 500)])
    await asyncio.create_task(session.chat(OPENING))
    assert len(session.exhausted) == 1
