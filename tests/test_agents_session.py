import itertools
import json
import random
from unittest import mock

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.agents import Completion, ContextExhausted, Session, load_agent, load_renderer, render_demonstration
from slipstream.agents.base import RequestTiming
from slipstream.buffer.encoded import EncodedTrajectory
from slipstream.buffer.trajectory import FINISHED, Turn, VersionSpan
from slipstream.configs.environments import ReasoningGym
from slipstream.configs.schema import Agent
from slipstream.envs import CALCULATOR, Message, Observation, task_source
from slipstream.errors import EngineError, PolicyError
from slipstream.launch.init_model import init_model
from slipstream.tests.sessions import session_of
from slipstream.tests.tiers import examples
from transformers import AutoTokenizer

TOOLS = (CALCULATOR.spec,)
OPENING = [Message("system", "Answer."), Message("user", "What is 7 + 5?")]
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "7 + 5"}}\n</tool_call>'


@pytest.fixture(scope="module")
def source():
    return task_source(ReasoningGym(), "train", 0)


@pytest.fixture(scope="module")
def tokenizer(source, tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    init_model(directory, sources=[source], agent=Agent(), samples=64)
    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module", params=[False, True], ids=["direct", "thinking"])
def renderer(request, tokenizer):
    return load_renderer("qwen3", tokenizer, thinking=request.param)


class Script:
    """An engine that returns scripted parts: (token ids, version, finish reason)."""

    def __init__(self, *parts):
        self.parts = list(parts)
        self.prompts = []
        self.room = []

    async def __call__(self, token_ids, max_tokens):
        self.prompts.append(list(token_ids))
        self.room.append(max_tokens)
        ids, version, reason = self.parts.pop(0)
        spans = (VersionSpan(0, len(ids), version),) if ids else ()
        return Completion(tuple(ids), tuple(-0.5 for _ in ids), spans, reason)


def reply_of(tokenizer, text, *, stop=True, version=0, reason=None):
    ids = tokenizer.encode(text + ("<|im_end|>" if stop else ""), add_special_tokens=False)
    return ids, version, reason or ("stop" if stop else "length")


def session(renderer, script, *, max_tokens_per_turn=100, max_tokens=2000):
    return Session(renderer, script, vocabulary=2000, max_tokens_per_turn=max_tokens_per_turn, max_tokens=max_tokens)


def trajectories(played, reward=1.0):
    made = played.trajectories(
        group_id=3, attempt=1, member=2, task_id="t", env="e", reward=reward, turn_rewards=(reward,), outcome=FINISHED,
        timings={}, metrics={},
    )  # fmt: skip
    for trajectory in made:
        trajectory.check()
    return made


async def test_a_later_turn_extends_what_was_sampled(renderer, tokenizer):
    # A call that the tokenizer would have cut differently: rendering it again would not give these tokens back.
    odd = [t for c in CALL.replace("<tool_call>", "").replace("</tool_call>", "") for t in tokenizer.encode(c)]
    begin, end, stop = tokenizer.convert_tokens_to_ids(["<tool_call>", "</tool_call>", "<|im_end|>"])
    reply = [begin, *odd, end, stop]
    assert reply != tokenizer.encode(CALL + "<|im_end|>", add_special_tokens=False)
    script = Script((reply, 4, "stop"), reply_of(tokenizer, "<answer>12</answer>", version=5))
    played = session(renderer, script)
    call = await played.chat(OPENING, TOOLS)
    assert call.tool_calls[0].arguments == {"expression": "7 + 5"}
    assert call.malformed == ""
    history = [*OPENING, call, Message("tool", "12", tool_call_id=call.tool_calls[0].id, name="calculator")]
    assert (await played.chat(history, TOOLS)).content == "<answer>12</answer>"
    first, second = script.prompts
    assert second[: len(first) + len(reply)] == first + reply
    assert "<tool_response>\n12\n</tool_response>" in tokenizer.decode(second[len(first) + len(reply) :])
    (made,) = trajectories(played)
    assert made.id == "3.1.2.0"
    assert made.token_ids[: len(second)].tolist() == second
    assert made.loss_mask[len(first) : len(first) + len(reply)].all()
    assert made.sampled == len(reply) + len(made) - len(second)
    assert [s.version for s in made.version_spans] == [4, 5]
    assert [(t.start, t.end) for t in made.turns] == [(len(first), len(first) + len(reply)), (len(second), len(made))]
    assert made.token_ids.dtype == np.int32


async def test_a_turn_of_two_parts_took_as_long_as_both(renderer, tokenizer):
    ids, version, _ = reply_of(tokenizer, "<answer>12</answer>")
    spans = (VersionSpan(0, 1, version),)
    first = RequestTiming(1.8e9, 0.5, 0.25, 1.0, 7, "engine-0", 0.5)
    second = RequestTiming(1.8e9 + 2.0, 0.25, 0.5, 2.0, 9, "engine-1", 0.5)
    parts = [
        Completion((ids[0],), (-0.5,), spans, "abort", first),
        Completion(tuple(ids[1:]), (-0.5,) * (len(ids) - 1), (VersionSpan(0, len(ids) - 1, version),), "stop", second),
    ]

    async def engine(token_ids, max_tokens):
        return parts.pop(0)

    played = session(renderer, engine)
    await played.chat(OPENING, TOOLS)
    (made,) = trajectories(played)
    (turn,) = made.turns
    assert msgspec.structs.astuple(turn)[2:] == ("stop", 1.8e9, 0.75, 0.75, 3.0, 7, "engine-1", 0.5)
    assert EncodedTrajectory.of(made).decode().turns == (turn,)


async def test_user_messages_extend_too(renderer, tokenizer):
    script = Script(reply_of(tokenizer, "<tool_call>\n{oops\n</tool_call>"), reply_of(tokenizer, "<answer>1</answer>"))
    played = session(renderer, script)
    wrong = await played.chat(OPENING, TOOLS)
    assert "could not be read (invalid json)" in wrong.malformed
    await played.chat([*OPENING, wrong, Message("user", "error: try again")], TOOLS)
    assert len(trajectories(played)) == 1


async def test_a_rewritten_history_opens_a_branch_and_masks_nothing(renderer, tokenizer):
    script = Script(*(reply_of(tokenizer, f"reply {i}") for i in range(3)))
    played = session(renderer, script)
    first = await played.chat(OPENING)
    summary = [OPENING[0], Message("user", "Summary so far: nothing."), Message("assistant", "Well"), OPENING[1]]
    await played.chat(summary)
    await played.chat([*OPENING, first, Message("user", "Go on.")])
    zero, one = trajectories(played)
    assert (zero.branch, one.branch) == (0, 1)
    assert (len(zero.turns), len(one.turns)) == (2, 1)
    assert sum(t.sampled for t in (zero, one)) == 3 * len(reply_of(tokenizer, "reply 0")[0])


async def test_changed_tools_open_a_branch(renderer, tokenizer):
    script = Script(reply_of(tokenizer, "a"), reply_of(tokenizer, "b"))
    played = session(renderer, script)
    first = await played.chat(OPENING, TOOLS)
    await played.chat([*OPENING, first, Message("user", "Again.")])
    assert len(trajectories(played)) == 2


async def test_an_aborted_completion_continues_within_its_budget(renderer, tokenizer):
    ids, _, _ = reply_of(tokenizer, "<answer>12</answer>")
    script = Script((ids[:1], 1, "abort"), ([], 0, "abort"), (ids[1:2], 1, "abort"), (ids[2:], 2, "stop"))
    played = session(renderer, script, max_tokens_per_turn=10)
    assert (await played.chat(OPENING)).content == "<answer>12</answer>"
    prompt = script.prompts[0]
    assert script.prompts == [prompt, prompt + ids[:1], prompt + ids[:1], prompt + ids[:2]]
    assert script.room == [10, 9, 9, 8]
    (made,) = trajectories(played)
    n = len(prompt)
    assert made.version_spans == (VersionSpan(n, n + 2, 1), VersionSpan(n + 2, n + len(ids), 2))
    assert made.turns == (Turn(n, n + len(ids), "stop"),)


async def test_aborts_that_use_up_the_budget_end_by_length(renderer, tokenizer):
    script = Script(([5, 5], 0, "abort"), ([5], 0, "abort"))
    played = session(renderer, script, max_tokens_per_turn=3)
    await played.chat(OPENING)
    (made,) = trajectories(played)
    assert made.turns[0].finish_reason == "length"
    assert made.version_spans[0].end - made.version_spans[0].start == 3


@given(st.integers(0, 1 << 32))
@settings(deadline=None, max_examples=examples(200))
async def test_partial_rollouts_over_many_versions_lose_no_token(seed):
    """An engine that cuts off at any place, with weights and kept KV that change at any token, over several turns."""
    rng = random.Random(seed)
    room = rng.randint(1, 40)
    truth = []  # per sampled token: (id, version, kv version)

    async def generate(token_ids, max_tokens):
        prompts.append(tuple(token_ids))
        count = rng.randint(0, max_tokens)
        tokens, spans = [], []
        for position in range(count):
            version = truth[-1][1] if truth else 0
            version += rng.random() < 0.2
            kv_version = rng.choice([None, None, version, max(0, version - 1)])
            truth.append((len(truth) % 1000, version, kv_version))
            tokens.append(truth[-1][0])
            if spans and (spans[-1].version, spans[-1].kv_version) == (version, kv_version):
                spans[-1] = VersionSpan(spans[-1].start, position + 1, version, kv_version)
            else:
                spans.append(VersionSpan(position, position + 1, version, kv_version))
        ends = "length" if count == max_tokens else "stop"
        reason = rng.choice(["abort", "abort", ends]) if count else "abort"
        return Completion(tuple(tokens), tuple(-float(t) for t in tokens), tuple(spans), reason)

    played = Session(None, generate, vocabulary=2000, max_tokens_per_turn=room, max_tokens=2000)
    history, sampled = (1500,), []
    for _ in range(rng.randint(1, 3)):
        prompts, before = [], len(truth)
        with mock.patch("asyncio.sleep", new=mock.AsyncMock()) as sleep:
            completion = await played.generate(history)
        new = truth[before:]
        assert completion.token_ids == tuple(t for t, _, _ in new)
        assert completion.logprobs == tuple(-float(t) for t, _, _ in new)
        assert [(s.version, s.kv_version) for s in completion.version_spans for _ in range(s.start, s.end)] == [
            (v, k) for _, v, k in new
        ]
        assert completion.finish_reason in ("stop", "length")
        asked = [prompt[len(history) :] for prompt in prompts]
        assert all(prompt[: len(history)] == history for prompt in prompts)
        assert all(completion.token_ids[: len(part)] == part for part in asked)
        repeated = sum(a == b for a, b in itertools.pairwise(asked))
        assert sleep.await_count == repeated  # an empty part is followed by a pause
        sampled.append((len(history), len(history) + len(new)))
        history += (*completion.token_ids, 1501)
    (made,) = trajectories(played)
    assert made.token_ids[made.loss_mask].tolist() == [t for t, _, _ in truth]
    assert made.versions()[made.loss_mask].tolist() == [v for _, v, _ in truth]
    mixed = [span.mixed for span in made.version_spans for _ in range(span.start, span.end)]
    assert mixed == [k not in (None, v) for _, v, k in truth]
    assert [(t.start, t.end) for t in made.turns] == sampled
    for one, two in itertools.pairwise(made.version_spans):  # merged as far as both versions are equal
        assert one.end < two.start or (one.version, one.kv_version) != (two.version, two.kv_version)


async def test_an_engine_that_ends_before_the_first_token_is_wrong(renderer):
    with pytest.raises(EngineError, match="returned no token but `stop`"):
        await session(renderer, Script(([], 0, "stop"))).chat(OPENING)


async def test_context_ends_the_episode(renderer, tokenizer):
    prompt = len(renderer.render_ids([{"role": "user", "content": "Hi"}], add_generation_prompt=True))
    with pytest.raises(ContextExhausted):
        await session(renderer, Script(), max_tokens=prompt).chat([Message("user", "Hi")])
    script = Script(reply_of(tokenizer, "1", stop=False))
    played = session(renderer, script, max_tokens=prompt + 1)
    reply = await played.chat([Message("user", "Hi")])
    assert script.room == [1]
    with pytest.raises(ContextExhausted):
        await played.chat([Message("user", "Hi"), reply, Message("user", "More")])
    (made,) = trajectories(played)
    assert len(made) == prompt + 1


async def test_a_reply_that_was_cut_short_is_closed_without_loss(renderer, tokenizer):
    script = Script(reply_of(tokenizer, "1", stop=False), reply_of(tokenizer, "2"))
    played = session(renderer, script)
    reply = await played.chat(OPENING)
    await played.chat([*OPENING, reply, Message("user", "More")])
    (made,) = trajectories(played)
    end = made.turns[0].end
    assert made.token_ids[end] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert not made.loss_mask[end]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("<tool_call>\n{oops\n</tool_call>", "invalid json"),
        ('<tool_call>\n{"name": "calculator"', "unclosed block"),
        ('<tool_call>\n{"arguments": {}}\n</tool_call>', "missing name"),
        ('<tool_call>\n{"name": "calculator", "arguments": [1]}\n</tool_call>', "must be a JSON object"),
        ("<think>\nhm", "thinking was not closed"),
    ],
)
async def test_malformed_messages_name_the_fault(renderer, tokenizer, text, complaint):
    reply = await session(renderer, Script(reply_of(tokenizer, text))).chat(OPENING, TOOLS)
    assert complaint in reply.malformed


async def test_a_message_has_all_that_the_policy_wrote(renderer, tokenizer):
    thought = "<think>\nSeven and five.\n</think>\n\nI add. " + CALL
    for text, content in ((thought, "I add."), ("<answer>12</answer>", "<answer>12</answer>")):
        played = session_of(renderer, tokenizer, Script(reply_of(tokenizer, text)))
        reply = await played.chat(OPENING, TOOLS)
        assert reply.content.strip() == content
        assert (reply.written or reply.content) == text


async def test_raw_tokens(renderer, tokenizer):
    script = Script(([7, 8], 1, "stop"), ([9], 1, "stop"), ([3], 2, "length"))
    played = session(renderer, script)
    with pytest.raises(PolicyError, match="max_tokens=0: allowed are 1 and more"):
        await played.generate([1, 2], 0)
    assert (await played.generate([1, 2])).token_ids == (7, 8)
    continued = await played.generate([1, 2, 7, 8])
    assert continued.version_spans == (VersionSpan(0, 1, 1),)
    await played.generate([1, 2, 4])
    one, two = trajectories(played)
    assert one.token_ids.tolist() == [1, 2, 7, 8, 9]
    assert one.version_spans == (VersionSpan(2, 5, 1),)
    assert two.token_ids.tolist() == [1, 2, 4, 3]
    for bad in ([], [-1], [2000]):
        with pytest.raises(PolicyError):
            await played.generate(bad)


async def test_impossible_requests_and_answers_are_named(renderer, tokenizer):
    with pytest.raises(PolicyError, match="needs a message to answer"):
        await session(renderer, Script()).chat([])
    with pytest.raises(PolicyError, match="needs a message to answer"):
        await session(renderer, Script()).chat([*OPENING, Message("assistant", "x")])
    with pytest.raises(EngineError, match="returned 3 tokens where 2 were requested"):
        await session(renderer, Script(([1, 2, 3], 0, "stop")), max_tokens_per_turn=2).chat(OPENING)


async def test_a_demonstration_is_what_a_session_records(renderer, source):
    """Token for token: warm-up and rollouts see the same sequences and the same mask."""
    rng = random.Random(0)
    lengths = set()
    for index in range(40):
        task = source.task(index)
        opening, messages = source.demonstration(task, rng)
        rendered = render_demonstration(renderer, opening, messages)
        ids, mask = np.array(rendered.token_ids), np.array(rendered.loss_mask)
        starts = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int)])) == 1)
        ends = np.flatnonzero(np.diff(np.concatenate([mask.astype(int), [0]])) == -1) + 1
        script = Script(*((ids[a:b].tolist(), 0, "stop") for a, b in zip(starts, ends, strict=True)))
        played = session(renderer, script)
        env = source.make()
        await load_agent("tool_calling")(env, played, task)
        (made,) = trajectories(played)
        assert made.token_ids.tolist() == ids.tolist()
        assert made.loss_mask.tolist() == mask.tolist()
        assert not script.parts
        lengths.add(len(starts))
    assert lengths == {1, 2}


def test_a_demonstration_must_be_the_assistants(renderer):
    for messages in ((), (Message("user", "x"),), (Message("assistant", "x"), Message("user", "y"))):
        with pytest.raises(PolicyError, match="begin and end with the assistant"):
            render_demonstration(renderer, Observation(tuple(OPENING)), messages)


def test_the_chat_template_equals_the_renderer(tokenizer, source):
    """Servers that render with the template of the folder show the policy the same tokens."""
    direct = load_renderer("qwen3", tokenizer, thinking=False)
    rng = random.Random(0)
    for index in range(10):
        opening, messages = source.demonstration(source.task(index), rng)
        rendered = render_demonstration(direct, opening, messages)
        chat = [json.loads(json.dumps(_openai(m))) for m in (*opening.messages, *messages)]
        tools = [{"type": "function", "function": _fields(t)} for t in opening.tools]
        text = tokenizer.apply_chat_template(chat, tools=tools, tokenize=False, enable_thinking=False)
        assert text == tokenizer.decode(rendered.token_ids) + "\n"


def _fields(tool):
    return {"name": tool.name, "description": tool.description, "parameters": tool.parameters}


def _openai(message):
    calls = [{"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in message.tool_calls]
    return {"role": message.role, "content": message.content} | ({"tool_calls": calls} if calls else {})
