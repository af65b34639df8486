"""One episode from task to trajectories: the agent plays, this module watches and says how it ended.

Invariants:
- A failure is never a reward: what raises becomes `failed(reason)`, and the reason names whose fault it was.
- The environment is closed exactly once, also after a failure or a cancellation.
- No exception of the user's code ends more than its episode, also none that Python does not count among the Exceptions: only who
  cancels the task of `play` itself sees a cancellation.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import msgspec

from ..agents.base import Agent, ContextExhausted
from ..agents.session import Session
from ..buffer.trajectory import FINISHED, TRUNCATED, Outcome, Trajectory
from ..envs.base import Environment, Message, Observation, StepResult, Task, TaskSource
from ..errors import DeadlineExceeded, EngineError, EnvError, PolicyError, ToolError, within

log = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_S = 30.0
"""How long an environment may take to release what it holds; its episode keeps its slot meanwhile."""


class EpisodeResult(msgspec.Struct, frozen=True):
    """How an episode ended and what it left; no trajectories when it failed.

    `reward` is the sum of the environment's rewards; meaningless when the outcome is a failure.
    """

    outcome: Outcome
    reward: float
    trajectories: tuple[Trajectory, ...]


class Escaped(Exception):
    """What user code raised that is no Exception, for example SystemExit or a CancelledError of its own; names it."""


class Watched:
    """The environment of one episode: keeps its account, and turns what it raises or returns against its contract into
    EnvError, so that it can end an episode and never a worker."""

    def __init__(self, source: TaskSource) -> None:
        self._source = source
        self._inner: Environment | None = None
        self.task_id = ""
        self.rewards: list[float] = []
        self.metrics: dict[str, float] = {}
        self.seconds = 0.0
        self.done = False
        self.truncated = False

    def open(self, index: int) -> Task:
        """Make the environment and the task."""
        with self._blamed(f"task {index}"):
            self._inner = self._source.make()
            task = self._source.task(index)
            self.task_id = task.id
        return task

    async def reset(self, task: Task) -> Observation:
        with self._blamed(f"reset of task {task.id!r}"):
            return await self._opened.reset(task)

    async def step(self, message: Message) -> StepResult:
        with self._blamed("step"):
            result = await self._opened.step(message)
            reward = float(result.reward)
            if not math.isfinite(reward):
                raise EnvError(f"a reward of {reward}")
            self.rewards.append(reward)
            self.metrics |= {name: float(value) for name, value in result.metrics.items()}
            self.done, self.truncated = result.done, result.truncated
        return result

    async def close(self) -> None:
        """Whatever the episode was worth, it has been earned: a failure to clean up is told and changes nothing."""
        try:
            if self._inner is not None:
                await within(
                    CLOSE_S,
                    _apart(self._inner.close),
                    who=f"task {self.task_id}",
                    waits_for="its environment to close",
                    hint="what the environment holds may leak",
                )
        except Exception:
            log.exception("%s: close raised on task %s", self._source.name, self.task_id)

    @property
    def _opened(self) -> Environment:
        assert self._inner is not None
        return self._inner

    @contextlib.contextmanager
    def _blamed(self, doing: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        except ToolError:
            raise
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and _cancelled():
                raise
            raise EnvError(f"{self._source.name}: {doing}: {_line(error)}") from error
        finally:
            self.seconds += time.perf_counter() - started


async def play(
    agent: Agent,
    source: TaskSource,
    index: int,
    session: Session,
    *,
    group_id: int,
    attempt: int,
    member: int,
    episode_s: float,
) -> EpisodeResult:
    """Play task `index` for at most `episode_s` seconds; `group_id`, `attempt` and `member` name the episode."""
    env = Watched(source)
    started = time.perf_counter()
    try:
        outcome = await _outcome(agent, env, session, index, episode_s)
    finally:
        await env.close()
    total = time.perf_counter() - started
    reward = sum(env.rewards)
    if not outcome.trainable:
        return EpisodeResult(outcome, reward, ())
    trajectories = session.trajectories(
        group_id=group_id,
        attempt=attempt,
        member=member,
        task_id=env.task_id,
        env=source.name,
        reward=reward,
        turn_rewards=env.rewards,
        outcome=outcome,
        timings={"total": total, "environment": env.seconds},
        metrics=env.metrics,
    )
    return EpisodeResult(outcome, reward, trajectories)


async def _outcome(agent: Agent, env: Watched, session: Session, index: int, episode_s: float) -> Outcome:
    deadline = asyncio.timeout(episode_s)
    try:
        async with deadline:
            await _apart(lambda: agent(env, session, env.open(index)))
    except ContextExhausted:
        return TRUNCATED
    except TimeoutError as error:
        if deadline.expired():
            return Outcome("failed", "timeout", f"the episode took longer than {episode_s:g} s")
        return Outcome("failed", "environment", f"TimeoutError: {error}")
    except DeadlineExceeded as error:
        return Outcome("failed", "timeout", str(error))
    except ToolError as error:
        return Outcome("failed", "tool", str(error))
    except EnvError as error:
        return Outcome("failed", "environment", str(error))
    except EngineError as error:
        return Outcome("failed", "engine", str(error))
    except PolicyError as error:
        return Outcome("failed", "policy", str(error))
    except Exception as error:  # an agent is the user's code: its faults end an episode, not a worker
        log.exception("the agent raised on task %s", env.task_id)
        return Outcome("failed", "policy", str(error) if isinstance(error, Escaped) else _line(error))
    return FINISHED if env.done and not env.truncated else TRUNCATED


async def _apart(work: Callable[[], Awaitable[T]]) -> T:
    """Await user code in a task of its own: it may cancel that one, and nothing it raises passes for a cancellation of ours.

    Raises:
        Escaped: it raised something that is no Exception.
    """

    async def contained() -> T:
        try:
            return await work()
        except (Exception, asyncio.CancelledError):
            raise
        except BaseException as error:  # with some of these asyncio would end the event loop
            raise Escaped(_line(error)) from error

    task = asyncio.create_task(contained())
    try:
        return await task
    except asyncio.CancelledError as error:
        if not task.done() or _cancelled():
            raise
        raise Escaped(_line(error)) from error


def _cancelled() -> bool:
    """Whether somebody cancelled the task that runs now. A CancelledError in one that nobody did is the user's code's own."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _line(error: BaseException) -> str:
    """An exception's name, and what it says if it says something."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")
