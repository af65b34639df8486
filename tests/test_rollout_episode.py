"""How episodes end: what raises is a failure with a reason, never a reward."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import uvloop
from slipstream.agents import Completion, Session, load_agent, load_renderer
from slipstream.agents.base import Agent, Generate, Policy
from slipstream.buffer.encoded import EncodedTrajectory
from slipstream.buffer.messages import Lease
from slipstream.buffer.trajectory import VersionSpan
from slipstream.common.spans import time_of_day
from slipstream.configs import load
from slipstream.configs.reward import Classifier, Judge
from slipstream.configs.schema import Failure, Reason
from slipstream.envs import (
    Environment,
    EnvPart,
    InvalidCall,
    Message,
    Observation,
    SimpleEnv,
    StepResult,
    Task,
    Tool,
    ToolCall,
    ToolSpec,
    call_tool,
    in_thread,
)
from slipstream.errors import ConfigError, DeadlineExceeded, EngineError, ToolError
from slipstream.learner.model import load_tokenizer, vocabulary_size
from slipstream.rollout import env_guard, loop_watchdog
from slipstream.rollout.env_guard import EpisodeLimits
from slipstream.rollout.loop_watchdog import EventLoopWatchdog
from slipstream.rollout.player import EpisodePlayer, EpisodeResult
from slipstream.rollout.reward_model import RewardModel, ScoredConversation
from slipstream.rollout.router import Router
from slipstream.tests import tiny
from slipstream.tests.sessions import Engines

PATIENT = EpisodeLimits(episode_s=60, step_s=60, tool_s=60)


class Ask(SimpleEnv):
    """Two turns; `broken` holds the exception that a method raises, by the method's name."""

    def __init__(self) -> None:
        super().__init__(split="train", seed=0)
        self.broken: dict[str, BaseException] = {}
        self.closed: list[int] = []
        self.truncates = False
        self.reward = 0.5

    def task(self, index: int) -> Task:
        if "task" in self.broken:
            raise self.broken["task"]
        return Task(f"ask-{index}")

    async def reset(self, task: Task) -> Observation:
        self.turns = 0
        if "reset" in self.broken:
            raise self.broken["reset"]
        return Observation((Message("user", "Well?"),))

    async def step(self, message: Message) -> StepResult:
        if "step" in self.broken:
            raise self.broken["step"]
        self.turns += 1
        if self.reward != 0.5:
            return StepResult(reward=self.reward, done=True)
        done = self.turns == 2
        return StepResult(() if done else (Message("user", "And?"),), 0.5, done, truncated=done and self.truncates)

    async def close(self) -> None:
        self.closed.append(1)
        if "close" in self.broken:
            raise self.broken["close"]


async def says(token_ids: Sequence[int], max_tokens: int) -> Completion:
    """Always the same three tokens."""
    return Completion(
        (40, 41, 42)[:max_tokens], (-0.5,) * min(3, max_tokens), (VersionSpan(0, min(3, max_tokens), 7),), "stop"
    )


def player_of(
    policy: Path,
    env: Ask,
    generate: Generate = says,
    *,
    agent: Agent | None = None,
    self_player: Agent | None = None,
    others: Sequence[EnvPart] = (),
    limits: EpisodeLimits = PATIENT,
    max_tokens: int = 256,
    trained_failures: Sequence[Reason] = (),
    model: RewardModel | None = None,
) -> EpisodePlayer:
    renderer = load_renderer("qwen3", load_tokenizer(str(policy)), thinking=False)

    def make_session(generate: Generate) -> Session:
        size = vocabulary_size(str(policy))
        return Session(renderer, generate, vocabulary=size, max_tokens_per_turn=8, max_tokens=max_tokens)

    config = load("quickstart")
    failures = {reason: Failure(then="train") for reason in trained_failures}
    rollout = msgspec.structs.replace(config.rollout, failures=failures)
    return EpisodePlayer(
        msgspec.structs.replace(config, rollout=rollout),
        agent or load_agent("tool_calling"),
        [EnvPart("ask", 1.0, env, env.penalty), *others],
        cast(Router, Engines(generate)),
        make_session,
        (),
        1.0,
        model,
        self_player=self_player,
        limits=limits,
    )


async def episode(policy: Path, env: Ask, generate: Generate = says, **options: Any) -> EpisodeResult:
    """Task 7 of `env`, member 2 of attempt 1 of group 3; `options` as of `player_of`."""
    return await player_of(policy, env, generate, **options).play(LEASE, 2)


LEASE = Lease(3, 1, (2,), 0, 0, 0, 7)


async def test_each_environment_is_played_by_its_agent(policy: Path) -> None:
    played: list[tuple[str, str]] = []

    def agent(name: str) -> Agent:
        async def play(env: Environment, policy: Policy, task: Task) -> None:
            played.append((name, task.id))

        return play

    itself = EnvPart("itself", 1.0, Ask(), None, self_played=True)
    player = player_of(policy, Ask(), agent=agent("agent"), self_player=agent("itself"), others=[itself])
    for env in (0, 1):
        await player.play(msgspec.structs.replace(LEASE, env=env, task=env), 2)
    assert played == [("agent", "ask-0"), ("itself", "ask-1")]


async def test_a_finished_episode_is_one_checked_trajectory(policy: Path) -> None:
    env = Ask()
    result = await episode(policy, env)
    assert result.outcome.kind == "finished"
    assert result.reward == 1.0
    (trajectory,) = result.trajectories
    trajectory.check()
    assert trajectory.id == "3.1.2.0"
    assert trajectory.turn_rewards == (0.5, 0.5)
    assert trajectory.token_ids[trajectory.loss_mask].tolist() == [40, 41, 42, 40, 41, 42]
    assert {span.version for span in trajectory.version_spans} == {7}
    assert env.closed == [1]


@pytest.mark.parametrize(
    ("where", "error", "reason"),
    [
        ("task", KeyError("row 3"), "environment"),
        ("reset", RuntimeError("no sandbox"), "environment"),
        ("step", ValueError("bad state"), "environment"),
        ("step", TimeoutError("the environment's own"), "environment"),
        ("step", ToolError("the tool crashed"), "tool"),
    ],
)
async def test_an_exception_of_an_environment_is_its_failure(
    where: str, error: Exception, reason: str, policy: Path
) -> None:
    env = Ask()
    env.broken[where] = error
    result = await episode(policy, env)
    assert (result.outcome.kind, result.outcome.reason) == ("failed", reason)
    assert str(error) in result.outcome.detail
    assert result.trajectories == ()
    assert env.closed == [1]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (EngineError("gone"), "engine"),
        (DeadlineExceeded("episode", "a completion", 1.0, "look"), "engine"),
    ],
)
async def test_what_an_engine_raises_is_not_the_policys_fault(error: Exception, reason: str, policy: Path) -> None:
    async def broken(token_ids: Sequence[int], max_tokens: int) -> Completion:
        raise error

    result = await episode(policy, Ask(), broken)
    assert (result.outcome.kind, result.outcome.reason) == ("failed", reason)


async def test_an_agent_that_raises_ends_its_episode_and_nothing_else(policy: Path) -> None:
    async def careless(env: object, policy: object, task: Task) -> float:
        return {}["missing"]

    result = await episode(policy, Ask(), agent=careless)
    assert (result.outcome.kind, result.outcome.reason) == ("failed", "policy")
    assert "KeyError" in result.outcome.detail


NO_EXCEPTIONS = [asyncio.CancelledError(), SystemExit(3), KeyboardInterrupt(), GeneratorExit()]
"""Uncaught, each of these ends a worker, or ends a task silently; none is an `Exception`."""


@pytest.mark.parametrize("error", NO_EXCEPTIONS, ids=repr)
@pytest.mark.parametrize("where", ["task", "reset", "step"])
async def test_a_base_exception_of_the_environment_is_its_failure(
    where: str, error: BaseException, policy: Path
) -> None:
    env = Ask()
    env.broken[where] = error
    result = await episode(policy, env)
    assert (result.outcome.kind, result.outcome.reason) == ("failed", "environment")
    assert type(error).__name__ in result.outcome.detail
    assert env.closed == [1]


@pytest.mark.parametrize("error", NO_EXCEPTIONS, ids=repr)
async def test_a_base_exception_of_the_agent_is_its_failure(error: BaseException, policy: Path) -> None:
    async def leaves(env: object, policy: object, task: Task) -> float:
        raise error

    env = Ask()
    result = await episode(policy, env, agent=leaves)
    assert (result.outcome.kind, result.outcome.reason) == ("failed", "policy")
    assert result.outcome.detail.startswith(type(error).__name__)
    assert env.closed == [1]


@pytest.mark.parametrize("error", NO_EXCEPTIONS, ids=repr)
async def test_a_base_exception_while_closing_changes_nothing(error: BaseException, policy: Path) -> None:
    env = Ask()
    env.broken["close"] = error
    result = await episode(policy, env)
    assert (result.outcome.kind, result.reward) == ("finished", 1.0)


async def test_an_agent_that_cancels_its_own_task_cancels_nothing_of_ours(policy: Path) -> None:
    async def gives_up(env: object, policy: object, task: Task) -> float:
        task_of_mine = asyncio.current_task()
        assert task_of_mine is not None
        task_of_mine.cancel()
        await asyncio.sleep(0)
        raise AssertionError

    result = await episode(policy, Ask(), agent=gives_up)
    assert (result.outcome.kind, result.outcome.reason) == ("failed", "policy")
    ours = asyncio.current_task()
    assert ours is not None
    assert ours.cancelling() == 0


class Slow(Ask):
    """Never answers the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = asyncio.Event()

    async def step(self, message: Message) -> StepResult:
        if not self.waits.is_set():
            self.waits.set()
            await asyncio.Event().wait()
        return await super().step(message)


class Careless(Ask):
    """Returns what is no observation or no message where `wrong` says so."""

    def __init__(self, wrong: str) -> None:
        super().__init__()
        self.wrong = wrong

    async def reset(self, task: Task) -> Observation:
        await super().reset(task)
        return (
            cast(Observation, "Well?") if self.wrong == "reset" else Observation([{"role": "user", "content": "Well?"}])
        )  # type: ignore[arg-type]

    async def step(self, message: Message) -> StepResult:
        result = await super().step(message)
        return msgspec.structs.replace(result, messages=("And?",)) if self.wrong == "step" else result


async def test_what_is_no_message_is_the_environments_failure(policy: Path) -> None:
    for wrong, what in (("reset", "no valid Observation"), ("step", "Expected `object`, got `str`")):
        outcome = (await episode(policy, Careless(wrong))).outcome
        assert (outcome.kind, outcome.reason) == ("failed", "environment")
        assert what in outcome.detail
    assert (await episode(policy, Careless("nothing"))).outcome.kind == "finished"  # a list of dictionaries will do


async def test_a_step_that_the_agent_cancels_is_no_failure(policy: Path) -> None:
    async def impatient(env: Environment, policy: object, task: Task) -> None:
        await env.reset(task)
        step = asyncio.create_task(env.step(Message("assistant", "Hm.")))
        await asyncio.wait([step], timeout=0.01)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        await env.step(Message("assistant", "Now."))
        await env.step(Message("assistant", "And now."))

    result = await episode(policy, Slow(), agent=cast(Agent, impatient))
    assert result.outcome.kind == "finished"


async def test_cancelling_an_episode_raises_cancelled_error_and_closes_the_environment(policy: Path) -> None:
    env = Slow()
    playing = asyncio.create_task(episode(policy, env))
    await env.waits.wait()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert env.closed == [1]


async def test_an_episode_past_its_deadline_is_a_timeout(policy: Path) -> None:
    async def never(token_ids: Sequence[int], max_tokens: int) -> Completion:
        await asyncio.Event().wait()
        raise AssertionError

    env = Ask()
    result = await episode(policy, env, never, limits=EpisodeLimits(0.05, 60, 60))
    assert (result.outcome.kind, result.outcome.reason) == ("failed", "timeout")
    assert env.closed == [1]


async def test_limits_truncate_and_keep_the_reward_so_far(policy: Path) -> None:
    env = Ask()
    env.truncates = True
    result = await episode(policy, env)
    assert (result.outcome.kind, result.reward) == ("truncated", 1.0)
    short = await episode(policy, Ask(), max_tokens=24)
    assert (short.outcome.kind, short.reward) == ("truncated", 0.5)
    assert len(short.trajectories) == 1


class Uses(Ask):
    """Calls a tool in its first step, verifies in its second."""

    def __init__(self, tool: Callable[..., object], verifier: Callable[[], float] = lambda: 1.0) -> None:
        super().__init__()
        self.tools = {"tool": Tool(ToolSpec("tool", "", {}), cast(Any, tool))}
        self.verifier = verifier

    async def step(self, message: Message) -> StepResult:
        self.turns += 1
        if self.turns == 1:
            reply, _ = await call_tool(self.tools, ToolCall("tool", {}))
            return StepResult((Message("user", reply.content),), 0.25)
        return StepResult(reward=await in_thread(self.verifier), done=True)


async def hangs(*_: object) -> str:
    await asyncio.Event().wait()
    raise AssertionError


def crashes(*_: object) -> str:
    raise KeyError("no such row")


def leaves(*_: object) -> str:
    raise SystemExit(3)


def spins(*_: object) -> str:
    while True:
        time.sleep(0.001)


def misused(*_: object) -> str:
    raise InvalidCall("say please")


IMPATIENT = EpisodeLimits(episode_s=30, step_s=30, tool_s=0.1)


@pytest.mark.parametrize(
    ("tool", "limits", "says_what"),
    [
        (hangs, IMPATIENT, "waited 0.1 s for the tool 'tool'"),
        (spins, IMPATIENT, "waited 0.1 s for the tool 'tool'"),
        # A task and a reset come before the step, and have as long: what they do takes milliseconds.
        (hangs, EpisodeLimits(30, 1, 30), "waited 1 s for a step.*calling the tool 'tool'"),
        (spins, EpisodeLimits(30, 1, 30), "waited 1 s for a step.*calling the tool 'tool'"),
        (crashes, PATIENT, "the tool 'tool' failed: KeyError: 'no such row'"),
        (leaves, PATIENT, "the tool 'tool' failed: SystemExit: 3"),
        (lambda _: 3, PATIENT, "the tool 'tool' returned int, not text"),
    ],
)
async def test_a_tool_that_fails_or_hangs_is_the_tools_failure(
    tool: Callable[..., object], limits: EpisodeLimits, says_what: str, policy: Path
) -> None:
    result = await episode(policy, Uses(tool), limits=limits)
    assert (result.outcome.kind, result.outcome.reason) == ("failed", "tool")
    assert re.search(says_what, result.outcome.detail)
    assert result.trajectories == ()


async def test_a_wrong_tool_call_is_returned_to_the_policy(policy: Path) -> None:
    result = await episode(policy, Uses(misused))
    assert (result.outcome.kind, result.reward) == ("finished", 1.25)


async def test_a_tool_that_answered_is_not_to_blame_for_what_hangs_later(policy: Path) -> None:
    result = await episode(policy, Uses(lambda _: "fine", cast(Any, spins)), limits=EpisodeLimits(30, 1, 30))
    assert (result.outcome.kind, result.outcome.reason) == ("failed", "environment")
    assert "waited 1 s for a step" in result.outcome.detail


@pytest.mark.parametrize("where", ["task", "reset", "step"])
async def test_an_environment_that_hangs_is_the_environments_failure(where: str, policy: Path) -> None:
    class Hangs(Ask):
        def task(self, index: int) -> Task:
            return super().task(index) if where != "task" else cast(Any, spins())

        async def reset(self, task: Task) -> Observation:
            return await super().reset(task) if where != "reset" else cast(Any, await hangs())

        async def step(self, message: Message) -> StepResult:
            return await super().step(message) if where != "step" else cast(Any, await hangs())

    env = Hangs()
    result = await episode(policy, env, limits=EpisodeLimits(30, 0.1, 30))
    assert (result.outcome.kind, result.outcome.reason) == ("failed", "environment")
    assert "waited 0.1 s for " in result.outcome.detail
    assert "rollout.episode_s" in result.outcome.detail
    assert env.closed == [1]


def sleeps() -> float:
    time.sleep(60)
    raise AssertionError


def computes() -> float:
    while True:
        pass


def computes_stubbornly() -> float:
    while True:
        try:
            computes()
        except Exception:
            pass


@pytest.mark.parametrize("blocks", [sleeps, computes, computes_stubbornly])
@pytest.mark.parametrize("whose", ["environment", "policy"])
async def test_user_code_that_blocks_the_event_loop_is_interrupted(
    blocks: Callable[[], float], whose: str, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_watchdog, "BLOCK_S", 0.3)

    class Blocks(Ask):
        async def step(self, message: Message) -> StepResult:
            return StepResult(reward=blocks())

    async def agent(env: object, policy: object, task: Task) -> float:
        return blocks()

    began = time.monotonic()
    async with EventLoopWatchdog():
        result = await episode(policy, Blocks(), agent=agent if whose == "policy" else None)
        assert (result.outcome.kind, result.outcome.reason) == ("failed", whose)
        assert "held up the event loop, which has not turned for 0.3 s" in result.outcome.detail
        assert "in_thread" in result.outcome.detail
        assert (await episode(policy, Ask())).outcome.kind == "finished"
    assert time.monotonic() - began < 50  # not the minute that it would sleep


def test_it_is_interrupted_on_uvloop_too(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_watchdog, "BLOCK_S", 0.3)

    class Blocks(Ask):
        async def step(self, message: Message) -> StepResult:
            return StepResult(reward=sleeps())

    async def play_twice() -> list[str]:
        async with EventLoopWatchdog():
            return [(await episode(policy, env)).outcome.kind for env in (Blocks(), Ask())]

    assert uvloop.run(play_twice()) == ["failed", "finished"]


async def test_code_of_the_product_or_of_a_test_is_never_interrupted(
    policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_watchdog, "BLOCK_S", 0.1)
    async with EventLoopWatchdog():
        time.sleep(0.4)  # noqa: ASYNC251 - of a test, which no episode called

        async def slow(token_ids: Sequence[int], max_tokens: int) -> Completion:
            time.sleep(0.4)  # noqa: ASYNC251 - below our session
            return await says(token_ids, max_tokens)

        assert (await episode(policy, Ask(), slow)).outcome.kind == "finished"


async def test_an_agent_that_ignores_its_cancellation_is_abandoned(
    policy: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(env_guard, "CANCEL_S", 0.05)
    released, ended = asyncio.Event(), asyncio.Event()
    seen: list[str] = []

    async def deaf(env: Environment, policy: object, task: Task) -> float:
        while not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                seen.append("cancelled")
        try:
            await env.step(Message("assistant", "Still here."))
        except Exception as error:
            seen.append(str(error))
        ended.set()
        return 0.0

    env = Ask()
    result = await episode(policy, env, agent=deaf, limits=EpisodeLimits(1, 30, 30))  # from before its task is made
    assert (result.outcome.kind, result.outcome.reason) == ("failed", "timeout")
    assert env.closed == [1]
    assert "is abandoned" in caplog.text
    released.set()
    await asyncio.wait_for(ended.wait(), 60)
    assert seen == ["cancelled", "ask: step: EnvError: its episode is over"]


async def test_a_failure_is_trained_with_its_penalty_and_nothing_that_was_earned(policy: Path) -> None:
    env = Uses(lambda _: "fine", cast(Any, crashes))
    env.penalty = -2.0
    untrained = await episode(policy, env, trained_failures=["tool"])
    assert untrained.trajectories == ()
    (branch,) = untrained.failed_branches
    branch.check()
    assert (branch.id, branch.task_id, branch.sampled) == ("3.1.2.0", "ask-7", 6)
    assert (branch.reward, branch.turn_rewards, branch.metrics) == (0.0, (), {})
    assert branch.outcome == untrained.outcome
    assert re.search(r"\(test_rollout_episode\.py:\d+ ", branch.outcome.detail)
    result = await episode(policy, env, trained_failures=["environment"])
    assert result.failed_branches == ()
    assert (result.outcome.kind, result.outcome.reason, result.reward) == ("failed", "environment", -2.0)
    (trajectory,) = result.trajectories
    trajectory.check()
    assert trajectory.outcome == result.outcome
    assert (trajectory.reward, trajectory.turn_rewards, trajectory.metrics) == (-2.0, (), {})
    assert trajectory.sampled == 6
    env.penalty = None
    with pytest.raises(ConfigError, match="declares none"):
        await episode(policy, env, trained_failures=["environment"])


async def test_what_is_no_task_is_the_environments_failure(policy: Path) -> None:
    class Tuple(Ask):
        def task(self, index: int) -> Task:
            return cast(Task, ("one", {}))

    result = await episode(policy, Tuple())
    assert (result.outcome.kind, result.outcome.reason) == ("failed", "environment")
    assert "it returned ('one', {}); return Task(id, payload)" in result.outcome.detail


@pytest.mark.parametrize("name", [3, "x" * 2000, None])
async def test_a_task_without_a_proper_id_is_the_environments_failure(name: object, policy: Path) -> None:
    class Nameless(Ask):
        def task(self, index: int) -> Task:
            return Task(cast(str, name))

    result = await episode(policy, Nameless())
    assert (result.outcome.kind, result.outcome.reason) == ("failed", "environment")
    assert "its id must be text" in result.outcome.detail


async def test_tasks_are_made_in_a_thread_and_one_at_a_time(policy: Path) -> None:
    made: list[tuple[str, bool]] = []
    making = threading.Lock()

    class Slow(Ask):
        def task(self, index: int) -> Task:
            alone = making.acquire(blocking=False)
            time.sleep(0.02)
            made.append((threading.current_thread().name, alone))
            making.release()
            return super().task(index)

    player = player_of(policy, Slow())
    results = await asyncio.gather(*(player.play(LEASE, 2) for _ in range(4)))
    assert [r.outcome.kind for r in results] == ["finished"] * 4
    assert all(alone and "Slow.task" in thread for thread, alone in made)


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
async def test_a_reward_that_is_no_number_is_a_failure(reward: float, policy: Path) -> None:
    env = Ask()
    env.reward = reward
    result = await episode(policy, env)
    assert (result.outcome.kind, result.outcome.reason) == ("failed", "environment")


async def test_a_failure_to_close_changes_nothing(policy: Path, caplog: pytest.LogCaptureFixture) -> None:
    env = Ask()
    env.broken["close"] = OSError("already gone")
    result = await episode(policy, env)
    assert (result.outcome.kind, result.reward) == ("finished", 1.0)
    assert "already gone" in caplog.text


class Market(Ask):
    """Calls a tool in each step: one that answers, then one that is called wrongly."""

    async def step(self, message: Message) -> StepResult:
        def price(arguments: dict[str, Any]) -> str:
            time.sleep(0.05)
            if self.turns:
                raise InvalidCall("there is no such fruit")
            return "3"

        spec = ToolSpec("price", "", {"type": "object"})
        await call_tool({"price": Tool(spec, price)}, ToolCall("price", {}, id="1"))
        return await super().step(message)


async def test_what_the_environment_did_and_when_is_in_the_trajectory(policy: Path) -> None:
    before = time_of_day()
    (trajectory,) = (await episode(policy, Market())).trajectories
    after, calls = time_of_day(), trajectory.env_calls
    assert [(call.what, call.tool, call.error) for call in calls] == [
        ("task", "", ""),
        ("reset", "", ""),
        ("tool", "price", ""),
        ("step", "", ""),
        ("tool", "price", "invalid"),
        ("step", "", ""),
    ]
    times = [trajectory.started, *(time for call in calls if call.what != "tool" for time in (call.begin, call.end))]
    assert [before, *times, after] == sorted([before, *times, after])
    for tool, step in ((calls[2], calls[3]), (calls[4], calls[5])):
        assert step.begin <= tool.begin < tool.begin + 0.05 <= tool.end <= step.end + 0.01
    assert EncodedTrajectory.of(trajectory).decode().env_calls == calls


async def test_a_call_that_fails_says_whose_failure_it_was(policy: Path) -> None:
    env = Ask()
    env.penalty, env.broken["step"] = -1.0, ToolError("the shop is closed")
    (trajectory,) = (await episode(policy, env, trained_failures=("tool",))).trajectories
    assert [(call.what, call.error) for call in trajectory.env_calls] == [("task", ""), ("reset", ""), ("step", "tool")]


class Scores(RewardModel):
    """Adds `score` to half of the environment's rewards, and keeps the conversations."""

    def __init__(self, score: float) -> None:
        self.score = score
        self.shown: list[ScoredConversation] = []

    async def rewards(self, own: Sequence[float], played: ScoredConversation) -> tuple[tuple[float, ...], float]:
        self.shown.append(played)
        return (*(0.5 * reward for reward in own[:-1]), 0.5 * own[-1] + self.score), self.score


async def test_a_reward_model_sees_the_whole_episode_and_its_score_is_in_the_trajectory(policy: Path) -> None:
    model = Scores(3.0)
    result = await episode(policy, Ask(), model=model)
    (trajectory,) = result.trajectories
    (shown,) = model.shown
    assert list(shown.token_ids) == trajectory.token_ids.tolist()
    assert [message.content for message in shown.opening] == ["Well?"]
    assert [message.role for message in shown.transcript] == ["assistant", "user", "assistant"]
    assert trajectory.turn_rewards == (0.25, 3.25)
    assert result.reward == trajectory.reward == 3.5
    assert trajectory.metrics["reward_model"] == 3.0
    assert trajectory.metrics["reward_environment"] == 1.0
    assert trajectory.timings["total"] >= trajectory.timings["reward"] >= 0


@pytest.mark.parametrize("score", [float("nan"), float("inf"), 2e30])
async def test_a_score_that_means_nothing_is_a_failure_and_no_reward(policy: Path, score: float) -> None:
    result = await episode(policy, Ask(), model=Scores(score))
    assert (result.outcome.kind, result.outcome.reason, result.trajectories) == ("failed", "reward", ())
    assert "1e+30" in result.outcome.detail


async def test_a_reward_server_that_is_not_there_fails_the_episode_after_its_deadline(policy: Path) -> None:
    model = RewardModel(Classifier(path="c"), f"http://127.0.0.1:{tiny.free_port()}", 0.3)
    env = Ask()
    env.penalty = -2.0
    result = await episode(policy, env, model=model)
    assert (result.outcome.reason, result.trajectories) == ("reward", ())
    assert "rollout.episode_s" in result.outcome.detail
    result = await episode(policy, env, model=model, trained_failures=["reward"])
    assert [t.reward for t in result.trajectories] == [-2.0]
    assert result.trajectories[0].turn_rewards == ()
    await model.close()


async def test_an_episode_that_failed_is_not_scored(policy: Path) -> None:
    model, env = Scores(1.0), Ask()
    env.broken["step"] = ValueError("broken")
    result = await episode(policy, env, model=model)
    assert (result.outcome.reason, model.shown) == ("environment", [])


async def test_what_cannot_be_shown_to_a_judge_fails_only_its_episode(policy: Path) -> None:
    class Mute(Ask):
        async def step(self, message: Message) -> StepResult:
            return StepResult((Message("user", cast(str, 5)),), 1.0, done=True)

    class Secretive(Ask):
        def task(self, index: int) -> Task:
            return Task("secret", {"reference": object()})

    judge = RewardModel(Judge(path="j", template="{conversation}"), f"http://127.0.0.1:{tiny.free_port()}", 600.0)
    for env, reason, detail in ((Mute(), "environment", "got `int`"), (Secretive(), "reward", "TypeError")):
        result = await episode(policy, env, model=judge)
        assert (result.outcome.kind, result.outcome.reason) == ("failed", reason)
        assert detail in result.outcome.detail
    await judge.close()
