"""Episodes of agents that were written elsewhere: what their clients meet is how the episode ends, whatever they make of it."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import httpx
import openai
import pytest
from PIL import Image as Pillow
from slipstream.agents import Completion, Endpoint, ForeignAgent
from slipstream.agents.base import Agent, Generate
from slipstream.configs.schema import ReasoningGym
from slipstream.envs import (
    CALCULATOR,
    Image,
    Message,
    Observation,
    StepResult,
    Task,
    call_tool,
    task_source,
)
from slipstream.errors import EngineError, ToolError
from slipstream.rollout.player import EpisodeResult
from slipstream.tests.episodes import Once
from slipstream.tests.sessions import LEASE, Script, play_foreign
from transformers import PreTrainedTokenizerBase

Play = Callable[..., Awaitable[EpisodeResult]]


@pytest.fixture
def play(tokenizer: PreTrainedTokenizerBase) -> Play:
    """Plays one episode; options as of `play_foreign`."""

    async def played(
        agent: ForeignAgent | Agent, *texts: str, generate: Generate | None = None, **options: Any
    ) -> EpisodeResult:
        source = options.pop("source", None) or Once(split="train", seed=0)
        said = generate or Script(tokenizer, texts.__getitem__)
        return await play_foreign(tokenizer, agent, said, source, **options)

    return played


async def ask(endpoint: Endpoint, messages: Sequence[Message], **options: Any) -> str:
    async with openai.AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key) as client:
        history: Any = [{"role": message.role, "content": message.content} for message in messages]
        made = await client.chat.completions.create(**{"model": "policy", "messages": history, **options})
        return made.choices[0].message.content or ""


async def simple(messages: Sequence[Message], endpoint: Endpoint) -> str:
    return await ask(endpoint, messages)


async def test_its_answer_is_what_the_environment_rewards(play: Play) -> None:
    source = task_source(ReasoningGym(), "train", 0)
    index = source.task(LEASE.task).payload["index"]
    right = cast(Any, source).entry(index)["answer"]
    for answer, reward in ((right, 1.0), ("no idea", 0.0)):
        result = await play(simple, f"<answer>{answer}</answer>", source=source)
        assert (result.outcome.kind, result.reward) == ("finished", reward)
        assert [len(t.turns) for t in result.trajectories] == [1]


async def test_what_a_stop_text_cuts_off_is_generated_and_not_delivered(play: Play) -> None:
    """The buffer accounts for the difference as `unused`."""

    async def stops(messages: Sequence[Message], endpoint: Endpoint) -> str:
        await ask(endpoint, messages, model="another")
        return await ask(endpoint, messages, stop="Observation:", temperature=0.5)

    generated: list[int] = []
    result = await play(stops, "a title", "Well. Observation: forged", generated=generated)
    (trajectory,) = result.trajectories
    assert 0 < trajectory.sampled < generated[1]
    assert trajectory.metrics["ignored_temperature"] == 1.0


async def test_a_failure_that_the_agent_swallows_is_the_episodes(play: Play) -> None:
    async def carefree(messages: Sequence[Message], endpoint: Endpoint) -> str:
        with contextlib.suppress(openai.OpenAIError):
            await ask(endpoint, messages)
        return "a guess"

    async def lost(token_ids: Sequence[int], max_tokens: int) -> Completion:
        raise EngineError("no replica answers")

    result = await play(carefree, generate=lost)
    assert (result.outcome.kind, result.outcome.reason) == ("failed", "engine")
    assert (result.outcome.detail, result.trajectories) == ("no replica answers", ())


def picture(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Pillow.new("1", (width, height)).save(file, "PNG")
    return file.getvalue()


class Shows(Once):
    """Opens with a picture."""

    def __init__(self, width: int, height: int) -> None:
        super().__init__(split="train", seed=0)
        self.data = picture(width, height)

    async def reset(self, task: Task) -> Observation:
        return Observation((Message("user", "What is it?", images=(Image(self.data),)),))


@pytest.mark.parametrize(
    ("width", "height", "reason", "detail"),
    [
        (1, 300, "environment", "an image has 1 x 300 pixels; allowed are"),
        (9000, 9000, "environment", "an image has 9000 x 9000 pixels; allowed are 16777216 in all"),
        (1, 200, "policy", "agents written elsewhere are not given"),
    ],
)
async def test_an_image_is_refused_to_who_is_at_fault(
    play: Play, width: int, height: int, reason: str, detail: str
) -> None:
    result = await play(simple, "a line", source=Shows(width, height))
    assert (result.outcome.kind, result.outcome.reason) == ("failed", reason)
    assert detail in result.outcome.detail


class Tools(Once):
    """A calculator; `breaks` on the second call, and `ends` the episode on it, or `shows` a picture."""

    breaks = ends = shows = False

    async def reset(self, task: Task) -> Observation:
        self.steps = 0
        return Observation((Message("user", "6 * 7?"),), (CALCULATOR.spec,))

    async def step(self, message: Message) -> StepResult:
        self.steps += 1
        if not message.tool_calls:
            return StepResult((), float(message.content == "42"), done=True)
        if self.steps == 2 and self.breaks:
            raise ToolError("the calculator broke")
        if self.steps == 2 and self.shows:
            shown = Message("tool", "", tool_call_id="2", name="calculator", images=(Image(picture(8, 8)),))
            return StepResult((shown,), 0.25)
        reply, _ = await call_tool({"calculator": CALCULATOR}, message.tool_calls[0])
        return StepResult((reply,), 0.25, done=self.steps == 2 and self.ends)


async def over_mcp(messages: Sequence[Message], endpoint: Endpoint) -> str:
    """Calls the environment's tool twice as an MCP client does; gives the first result as the answer."""
    await ask(endpoint, messages)
    texts = list[str]()
    async with httpx.AsyncClient() as client:
        for _ in range(2):
            parameters = {"name": "calculator", "arguments": {"expression": "6*7"}}
            body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": parameters}
            answer = (await client.post(endpoint.mcp, json=body)).json()
            texts.append(answer["result"]["content"][0]["text"] if "result" in answer else "")
    return texts[0]


async def test_the_environments_tools_reward_and_end_the_episode(play: Play) -> None:
    source = Tools(split="train", seed=0)
    result = await play(over_mcp, "hm", source=source)
    assert (result.outcome.kind, result.trajectories[0].turn_rewards) == ("finished", (0.25, 0.25, 1.0))
    source.ends = True  # then there is no step for the answer
    result = await play(over_mcp, "hm", source=source)
    assert (result.outcome.kind, result.trajectories[0].turn_rewards) == ("finished", (0.25, 0.25))
    source.ends, source.breaks = False, True
    result = await play(over_mcp, "hm", source=source)
    assert (result.outcome.kind, result.outcome.reason) == ("failed", "tool")
    assert result.outcome.detail == "the calculator broke"
    source.breaks, source.shows = False, True  # the agent answers as if nothing had been
    result = await play(over_mcp, "hm", source=source)
    assert (result.outcome.kind, result.outcome.reason) == ("failed", "policy")
    assert "calculator shows an image, which agents written elsewhere are not given" in result.outcome.detail


async def test_a_context_that_is_full_is_no_failure_of_the_agent(play: Play) -> None:
    async def talks_on(messages: Sequence[Message], endpoint: Endpoint) -> str:
        history = list(messages)
        while True:
            history += [Message("assistant", await ask(endpoint, history)), Message("user", "more " * 20)]

    result = await play(talks_on, *["yes"] * 9, max_tokens=200)
    assert (result.outcome.kind, result.outcome.detail) == ("truncated", "")
    assert len(result.trajectories) == 1


async def test_a_bug_of_the_agent_after_a_full_context_is_its_failure(play: Play) -> None:
    async def careless(messages: Sequence[Message], endpoint: Endpoint) -> str:
        await ask(endpoint, messages)
        try:
            await ask(endpoint, [*messages, Message("user", "more " * 200)])
        except openai.BadRequestError:
            pass
        return {}["no such key"]

    outcome = (await play(careless, "yes", max_tokens=200)).outcome
    assert (outcome.kind, outcome.reason) == ("failed", "policy")
    assert "KeyError" in outcome.detail


async def test_a_failure_whose_text_has_no_encoding_is_told_with_escapes(play: Play) -> None:
    async def careless(messages: Sequence[Message], endpoint: Endpoint) -> str:
        raise KeyError("half a pair: \ud800")

    outcome = (await play(careless)).outcome
    assert "\\ud800" in outcome.detail
    outcome.detail.encode()


async def test_an_episode_without_tokens_says_why(play: Play) -> None:
    async def silent(messages: Sequence[Message], endpoint: Endpoint) -> str:
        return "42"

    async def another(messages: Sequence[Message], endpoint: Endpoint) -> str:
        return await ask(endpoint, messages, model="gpt-x")

    async def gives_up(messages: Sequence[Message], endpoint: Endpoint) -> str:
        with contextlib.suppress(openai.BadRequestError):
            await ask(endpoint, messages)
        return "?"

    assert (await play(silent)).outcome.detail == "the agent sampled no token"
    assert "agent.trained does not match" in (await play(another, "x")).outcome.detail
    assert (await play(gives_up, max_tokens=3)).outcome.detail.endswith("max_tokens is 3")


@pytest.mark.parametrize(
    ("returned", "complaint"), [(None, "returned None; it must return its answer as text"), (3, "returned 3; it must")]
)
async def test_an_answer_is_text(play: Play, returned: object, complaint: str) -> None:
    async def careless(messages: Sequence[Message], endpoint: Endpoint) -> object:
        return returned

    outcome = (await play(cast(ForeignAgent, careless))).outcome
    assert (outcome.kind, outcome.reason) == ("failed", "policy")
    assert complaint in outcome.detail


async def test_what_its_client_raises_is_the_agents_failure(play: Play) -> None:
    async def asks_for_images(messages: Sequence[Message], endpoint: Endpoint) -> str:
        return await ask(endpoint, messages, modalities=["image"])

    outcome = (await play(asks_for_images)).outcome
    assert (outcome.kind, outcome.reason) == ("failed", "policy")
    assert "only text is" in outcome.detail


async def test_a_late_agent_leaves_nothing_in_flight(play: Play, tokenizer: PreTrainedTokenizerBase) -> None:
    script = Script(tokenizer, lambda number: cast(Awaitable[str], asyncio.Event().wait()))
    result = await play(simple, generate=script, episode_s=2.0)  # its client takes a part of it to ask
    assert (result.outcome.kind, result.outcome.reason) == ("failed", "timeout")
    assert script.cancelled == 1


async def test_what_an_agent_of_ours_returns_is_checked(play: Play) -> None:
    """The rewards are those of its steps; a return that says something else would be lost silently."""
    for returned, kind in ((None, "finished"), (1.0, "finished"), (0.5, "failed"), ("good", "failed")):

        async def agent(env: Any, policy: Any, task: Any, returned: Any = returned) -> Any:
            observation = await env.reset(task)
            await env.step(await policy.chat(observation.messages))
            return returned

        outcome = (await play(agent, "x")).outcome
        assert outcome.kind == kind
        if kind == "failed":
            assert (outcome.reason, "rewards by env.step are 1; return None" in outcome.detail) == ("policy", True)
