"""A forgotten `await` is a failure that names the user's own line, at the first episode; it is never a reward."""

from __future__ import annotations

import asyncio
import gc
import inspect
import sys
import warnings
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import openai
import pytest
from slipstream.agents import Endpoint, load_agent
from slipstream.buffer.trajectory import Outcome
from slipstream.common.unawaited import UnawaitedLog, without_await
from slipstream.configs import load
from slipstream.configs.environments import Dataset, PythonEnv
from slipstream.envs import (
    Message,
    Observation,
    StepResult,
    Task,
    Tool,
    ToolCall,
    ToolEnv,
    ToolSpec,
    call_tool,
    task_source,
)
from slipstream.envs.tool_env import as_tool
from slipstream.errors import ConfigError, ToolError
from slipstream.launch.preflight import CHECKS
from slipstream.launch.run_inputs import RunInputs
from slipstream.tests.episodes import Once
from slipstream.tests.runs import tiny_policy
from slipstream.tests.sessions import Script, play_foreign
from transformers import PreTrainedTokenizerBase

End = Callable[..., Awaitable[Outcome]]


@pytest.fixture
def end(tokenizer: PreTrainedTokenizerBase) -> End:
    """Plays one episode; how it ended."""

    async def played(agent: Any, source: Any = None) -> Outcome:
        source = source or Once(split="train", seed=0)
        return (await play_foreign(tokenizer, agent, Script(tokenizer, lambda number: "x"), source)).outcome

    return played


def line_of(function: Callable[..., Any], text: str) -> str:
    """`FILE:LINE in FUNCTION` of the only line of a function that has this text."""
    lines, first = inspect.getsourcelines(function)
    (number,) = (first + i for i, line in enumerate(lines) if text in line)
    return f"test_rollout_unawaited.py:{number} in {function.__name__}"


async def chat_not_awaited(env: Any, policy: Any, task: Task) -> None:
    opening = await env.reset(task)
    reply = policy.chat(opening.messages)
    await env.step(reply)


async def reset_not_awaited(env: Any, policy: Any, task: Task) -> None:
    opening = env.reset(task)
    await env.step(await policy.chat(opening.messages))


async def step_dropped(env: Any, policy: Any, task: Task) -> None:
    opening = await env.reset(task)
    env.step(await policy.chat(opening.messages))


async def step_returned(env: Any, policy: Any, task: Task) -> float:
    opening = await env.reset(task)
    return env.step(await policy.chat(opening.messages))


async def step_used(env: Any, policy: Any, task: Task) -> float:
    opening = await env.reset(task)
    result = env.step(await policy.chat(opening.messages))
    return result.reward


async def sdk_not_awaited(messages: Sequence[Message], endpoint: Endpoint) -> str:
    client = openai.AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key)
    return cast(str, client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "?"}]))


async def own_helper_dropped(env: Any, policy: Any, task: Task) -> None:
    opening = await env.reset(task)
    await env.step(await policy.chat(opening.messages))
    _remember(task)


async def _remember(task: Task) -> None: ...


@pytest.mark.parametrize(
    ("agent", "call", "line"),
    [
        (chat_not_awaited, "`chat(...)` was called without `await`", "policy.chat("),
        (
            reset_not_awaited,
            "'coroutine' object has no attribute 'messages'; an `await` is missing",
            "opening.messages",
        ),
        (step_dropped, "`step(...)` was called without `await`", "env.step("),
        (step_returned, "`step(...)` was called without `await`", "env.step("),
        (step_used, "'coroutine' object has no attribute 'reward'; an `await` is missing", "result.reward"),
        (sdk_not_awaited, "`create(...)` was called without `await`", "completions.create("),
        (own_helper_dropped, "`_remember(...)` was called without `await`", "_remember(task)"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_an_agent_without_its_await_fails_by_policy(agent: Any, call: str, line: str, end: End) -> None:
    outcome = await end(agent)
    assert (outcome.kind, outcome.reason) == ("failed", "policy")
    assert call in outcome.detail
    assert f"({line_of(agent, line)})" in outcome.detail


@pytest.mark.parametrize(
    ("agent", "call"),
    [
        (chat_not_awaited, "policy.chat("),
        (reset_not_awaited, "env.reset("),
        (step_dropped, "env.step("),
        (step_returned, "env.step("),
        (step_used, "env.step("),
    ],
)
def test_what_an_agents_source_shows_is_refused_before_the_start(agent: Any, call: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_agent(f"{__name__}:{agent.__name__}")
    line = f"`{call}...)` is called without `await` ({line_of(agent, call)})"
    assert str(refused.value) == f"agent.kind: {__name__}:{agent.__name__}: {line}"


async def keeps(env: Any, policy: Any, task: Task) -> None:
    async def ask() -> Any:
        return policy.chat(opening.messages)

    def said() -> Any:
        return policy.chat(opening.messages)

    opening = await env.reset(task)
    first, second = policy.chat(opening.messages), policy.chat(opening.messages)
    third = policy.chat(opening.messages)
    replies = await asyncio.gather(first, second, third, said())
    step = env.step(replies[0])
    result = await step
    later = asyncio.create_task(env.step(result))
    await later
    await (await ask())


def test_what_may_be_awaited_later_is_not_refused() -> None:
    for agent in (keeps, own_helper_dropped, plays):
        assert load_agent(f"{__name__}:{agent.__name__}") is agent


async def test_calls_that_are_left_behind_or_cancelled_are_no_forgotten_await(end: End) -> None:
    async def parallel(env: Any, policy: Any, task: Task) -> None:
        opening = await env.reset(task)
        await asyncio.gather(policy.chat(opening.messages), policy.chat(opening.messages))
        never = asyncio.create_task(policy.chat(opening.messages))
        never.cancel()
        asyncio.create_task(policy.chat(opening.messages))  # noqa: RUF006  (left behind on purpose)
        await env.step(await policy.chat(opening.messages))

    assert (await end(parallel)).kind == "finished"


async def plays(env: Any, policy: Any, task: Task) -> None:
    opening = await env.reset(task)
    await env.step(await policy.chat(opening.messages))


class Judged(Once):
    """What is not awaited is named by `forgets`."""

    forgets = ""

    async def judge(self) -> float:
        return 1.0

    async def reset(self, task: Task) -> Observation:
        if self.forgets == "reset":
            return Observation((cast(Message, self.judge()),))
        return await super().reset(task)

    async def step(self, message: Message) -> StepResult:
        if self.forgets == "dropped":
            self.judge()
        if self.forgets == "tool":
            answer = call_tool({}, ToolCall("t", {}))
            return StepResult((cast(Any, answer),))
        reward = self.judge() if self.forgets == "reward" else 1.0
        return StepResult(reward=cast(float, reward), done=True)


@pytest.mark.parametrize(
    ("forgets", "function", "line"),
    [
        ("reset", "judge", "Observation((cast(Message, self.judge()"),
        ("dropped", "judge", "            self.judge()"),
        ("reward", "judge", "reward = self.judge()"),
        ("tool", "call_tool", "answer = call_tool("),
    ],
)
async def test_an_environment_without_its_await_fails_by_environment(
    forgets: str, function: str, line: str, end: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Judged, "forgets", forgets)
    where = line_of(Judged.reset if forgets == "reset" else Judged.step, line)
    outcome = await end(plays, Judged(split="train", seed=0))
    assert (outcome.kind, outcome.reason) == ("failed", "environment")
    assert f"`{function}(...)` was called without `await` ({where})" in outcome.detail


class WithTools(ToolEnv):
    """The first reply calls nothing, so that it is scored."""

    async def price(self) -> float:
        return 1.0

    def task(self, index: int) -> Task:
        return Task(str(index))

    def question(self, task: Task) -> str:
        return "?"

    def score(self, task: Task, answer: str) -> float:
        return self.price()  # pyright: ignore[reportReturnType]  (the point of the test)


async def test_a_score_and_a_tool_without_their_await_are_named(end: End) -> None:
    outcome = await end(plays, WithTools(split="train", seed=0))
    assert (outcome.kind, outcome.reason) == ("failed", "environment")
    assert "`price(...)` was called without `await`" in outcome.detail

    def run(arguments: dict[str, Any]) -> str:
        return cast(str, _remember(Task("x")))

    def looks_up() -> dict[str, Any]:
        return {"found": _remember(Task("x"))}

    for tool in (Tool(ToolSpec("t", "", {}), run), as_tool(looks_up)):
        with pytest.raises(
            ToolError, match=r"`_remember\(\.\.\.\)` was called without `await` \(test_rollout_unawaited\.py:"
        ):
            await call_tool({"t": tool}, ToolCall("t", {}))


async def test_environments_in_a_process_of_their_own_are_named_too(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, end: End
) -> None:
    (tmp_path / "forgets.py").write_text(
        "from slipstream.envs import Message, Observation, SimpleEnv, StepResult, Task\n\n"
        "class Env(SimpleEnv):\n"
        "    async def judge(self):\n        return 1.0\n"
        "    def task(self, index):\n        return Task(str(index))\n"
        "    async def reset(self, task):\n        return Observation((Message('user', '?'),))\n"
        "    async def step(self, message):\n"
        "        if self.arguments['drops']:\n            self.judge()\n            return StepResult(done=True)\n"
        "        return StepResult(reward=self.judge(), done=True)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for drops, line in ((True, 12), (False, 14)):
        config = PythonEnv(factory="forgets:Env", arguments={"drops": drops}, isolate=1)
        outcome = await end(plays, await asyncio.to_thread(task_source, config, "train", 0))
        assert (outcome.kind, outcome.reason) == ("failed", "environment")
        assert f"`judge(...)` was called without `await` (forgets.py:{line} in step)" in outcome.detail


async def test_a_reward_function_without_its_await_is_named(tmp_path: Any, end: End) -> None:
    (tmp_path / "my.py").write_text(
        "async def ask(completion):\n    return 1.0\n\ndef score(completion, row):\n    return ask(completion)\n"
    )
    (tmp_path / "rows.jsonl").write_text('{"prompt": "?"}\n')
    config = Dataset(path=str(tmp_path / "rows.jsonl"), reward=f"{tmp_path}/my.py:score", evaluation=0.0)
    outcome = await end(plays, task_source(config, "train", 0))
    assert (outcome.kind, outcome.reason) == ("failed", "environment")
    assert "the reward my.py:score: `ask(...)` was called without `await`" in outcome.detail


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("async def task(self, index): return Task('x')", r"`task\(\.\.\.\)` was called without `await`.*`def task`"),
        (
            "async def reset(self, task): self.log(); return Observation((Message('user', '?'),))",
            r"the reset of task 0: `log\(\.\.\.\)` was called without `await` \(forgetful\.py:\d+ in reset\)",
        ),
        (
            "async def reset(self, task): return Observation((self.log(),))",
            r"the reset of task 0: `log\(\.\.\.\)` was called without `await` \(forgetful\.py:\d+ in reset\)",
        ),
        (
            "async def reset(self, task): raise KeyError('row')",
            r"Env raised KeyError .*'row' \(forgetful\.py:\d+ in reset\)",
        ),
    ],
)
def test_what_a_first_reset_forgets_is_refused_before_the_start(
    body: str, says: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "forgetful.py").write_text(
        "from slipstream.envs import Message, Observation, SimpleEnv, StepResult, Task\n\n"
        "class Env(SimpleEnv):\n"
        "    async def log(self): pass\n"
        "    def task(self, index): return Task(str(index))\n"
        "    async def reset(self, task): return Observation((Message('user', '?'),))\n"
        "    async def step(self, message): return StepResult(done=True)\n"
        f"    {body}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "forgetful", raising=False)
    policy = tiny_policy(tmp_path / "policy")
    config = load("quickstart", [f"model.path={policy}", "env={kind: python, factory: 'forgetful:Env'}"])
    inputs = RunInputs(config)
    with pytest.raises(ConfigError, match=says):
        all(CHECKS[name].run(inputs) for name in ("environment", "prompt"))


async def test_what_the_collector_finds_is_not_told_to_whoever_runs_then() -> None:
    class Cycle:
        pass

    def leave_one() -> None:
        cycle: Any = Cycle()
        cycle.itself, cycle.coroutine = cycle, _remember(Task("x"))

    with UnawaitedLog() as log, warnings.catch_warnings(record=True):
        leave_one()
        gc.collect()
    assert log.lines == []


def test_other_warnings_are_shown_as_they_were() -> None:
    with pytest.warns(UserWarning, match="something else"), UnawaitedLog() as log:
        warnings.warn("something else", stacklevel=1)
    assert log.lines == []
    assert without_await([1, {"a": (2,)}]) == ""
