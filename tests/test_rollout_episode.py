"""How episodes end: what raises is a failure with a reason, never a reward."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
from slipstream.agents import Completion, Session, load_agent, load_renderer
from slipstream.agents.base import Agent, Generate
from slipstream.buffer.trajectory import VersionSpan
from slipstream.envs import Environment, Message, Observation, SimpleEnv, StepResult, Task
from slipstream.errors import DeadlineExceeded, EngineError, ToolError
from slipstream.learner.model import load_tokenizer, vocabulary_size
from slipstream.rollout.episode import EpisodeResult, play
from slipstream.tests.runs import tiny_policy


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("model") / "policy")


class Ask(SimpleEnv):
    """Two turns; what a test wants to go wrong is put into `broken`."""

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


async def episode(
    policy: Path,
    env: Ask,
    generate: Generate = says,
    *,
    agent: Agent | None = None,
    episode_s: float = 60,
    max_tokens: int = 256,
) -> EpisodeResult:
    renderer = load_renderer("qwen3", load_tokenizer(str(policy)), thinking=False)
    session = Session(
        renderer,
        generate,
        vocabulary=vocabulary_size(str(policy)),
        max_tokens_per_turn=8,
        max_tokens=max_tokens,
    )
    agent = agent or load_agent("tool_calling")
    return await play(agent, env, 3, session, attempt=1, member=2, episode_s=episode_s)


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
async def test_what_an_environment_raises_is_its_failure(
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
        (DeadlineExceeded("episode", "a completion", 1.0, "look"), "timeout"),
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
"""What ends a worker, or a task without a word, when nobody catches it; not one of these is an `Exception`."""


@pytest.mark.parametrize("error", NO_EXCEPTIONS, ids=repr)
@pytest.mark.parametrize("where", ["task", "reset", "step"])
async def test_what_is_no_exception_is_the_environments_failure_too(
    where: str, error: BaseException, policy: Path
) -> None:
    env = Ask()
    env.broken[where] = error
    result = await episode(policy, env)
    assert (result.outcome.kind, result.outcome.reason) == ("failed", "environment")
    assert type(error).__name__ in result.outcome.detail
    assert env.closed == [1]


@pytest.mark.parametrize("error", NO_EXCEPTIONS, ids=repr)
async def test_what_is_no_exception_is_the_agents_failure_too(error: BaseException, policy: Path) -> None:
    async def leaves(env: object, policy: object, task: Task) -> float:
        raise error

    env = Ask()
    result = await episode(policy, env, agent=leaves)
    assert (result.outcome.kind, result.outcome.reason) == ("failed", "policy")
    assert result.outcome.detail.startswith(type(error).__name__)
    assert env.closed == [1]


@pytest.mark.parametrize("error", NO_EXCEPTIONS, ids=repr)
async def test_what_is_no_exception_changes_nothing_while_closing(error: BaseException, policy: Path) -> None:
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


async def test_a_step_that_the_agent_cancels_is_nobodys_fault(policy: Path) -> None:
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


async def test_who_cancels_an_episode_sees_a_cancellation_and_the_environment_is_closed(policy: Path) -> None:
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
    result = await episode(policy, env, never, episode_s=0.05)
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
