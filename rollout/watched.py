"""The environment of an episode, watched: what goes wrong in the user's code is turned into an error that names whose fault it was.

Invariants:
- The environment is closed exactly once, also after a failure or a cancellation.
- No exception of the user's code ends more than its episode, also none that Python does not count among the Exceptions: only who
  cancels the task of `play` itself sees a cancellation.
- User code that does not heed its cancellation is left behind, not waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import msgspec

from ..buffer.trajectory import NAME_LIMIT
from ..envs import Part
from ..envs.base import JSON, Environment, Message, Observation, StepResult, Task
from ..envs.calls import Calls, in_thread
from ..envs.tools import cancelled, line
from ..errors import DeadlineExceeded, EnvError, ToolError, within
from .blocking import calls_user_code

log = logging.getLogger(__name__)

T = TypeVar("T")

REWARD_LIMIT = 1e30
"""Of one step, either way: sums of rewards, their squares and float32 advantages stay finite. What is larger means nothing."""

CLOSE_S = 30.0
"""How long an environment may take to release what it holds; its episode keeps its slot meanwhile."""

HEED_S = 5.0
"""How long user code may take to end once it is cancelled."""


class Limits(msgspec.Struct, frozen=True):
    """Seconds that an episode, a call of its environment and a call of a tool may take."""

    episode_s: float
    step_s: float
    tool_s: float


class Escaped(Exception):
    """What user code raised that is no Exception, for example SystemExit or a CancelledError of its own; names it."""


class Watched:
    """The environment of one episode: keeps its account, and turns what it raises or returns against its contract, and what takes
    too long, into EnvError or ToolError, so that it can end an episode and never a worker."""

    def __init__(self, part: Part, limits: Limits, one_at_a_time: asyncio.Lock) -> None:
        self._part = part
        self._limits = limits
        self._one_at_a_time = one_at_a_time
        self._inner: Environment | None = None
        self._over = False
        self.calls = Calls(limits.tool_s)
        self.task_id = ""
        self.payload: JSON = {}
        self.opening: tuple[Message, ...] = ()
        self.said: list[Message] = []
        self.rewards: list[float] = []
        self.metrics: dict[str, float] = {}
        self.seconds = 0.0
        self.done = False
        self.truncated = False

    @calls_user_code
    async def open(self, index: int) -> Task:
        """Make the environment and the task."""
        async with self._one_at_a_time:
            with self._blamed(f"task {index}"):
                self._inner = self._part.source.make()
                task = await self._in_time(in_thread(self._part.source.task, index), f"task {index}")
                if not isinstance(task.id, str) or len(task.id) > NAME_LIMIT:
                    raise EnvError(f"its id must be text of at most {NAME_LIMIT} characters, not {task.id!r:.100}")
                self.task_id = task.id
                self.payload = task.payload
        return task

    @calls_user_code
    async def reset(self, task: Task) -> Observation:
        with self._blamed(f"reset of task {task.id!r}"):
            observation = await self._in_time(self._opened.reset(task), "the reset")
            self.opening = tuple(observation.messages)
        return observation

    @calls_user_code
    async def step(self, message: Message) -> StepResult:
        with self._blamed("step"):
            result = await self._in_time(self._opened.step(message), "a step")
            reward = float(result.reward)
            if not abs(reward) <= REWARD_LIMIT:
                raise EnvError(f"a reward of {reward}; allowed are numbers up to {REWARD_LIMIT:g}")
            self.rewards.append(reward)
            self.said += (message, *result.messages)
            self.metrics |= {name: float(value) for name, value in result.metrics.items()}
            self.done, self.truncated = result.done, result.truncated
        return result

    async def close(self) -> None:
        """Whatever the episode was worth, it has been earned: a failure to clean up is told and changes nothing."""
        self._over = True
        try:
            if self._inner is not None:
                await within(
                    CLOSE_S,
                    apart(self._inner.close),
                    who=f"task {self.task_id}",
                    waits_for="its environment to close",
                    hint="what the environment holds may leak",
                )
        except Exception:
            log.exception("%s: close raised on task %s", self._part.name, self.task_id)

    @property
    def _opened(self) -> Environment:
        if self._inner is None or self._over:
            raise EnvError("its episode is over")
        return self._inner

    @calls_user_code
    async def _in_time(self, work: Awaitable[T], what: str) -> T:
        """Await a call of the environment; a tool that it waits for meanwhile is to blame for what takes too long."""
        self.calls.tool = ""
        hint = "look at the environment, or raise rollout.step_s"
        try:
            return await within(self._limits.step_s, work, who="an episode", waits_for=what, hint=hint)
        except DeadlineExceeded as error:
            if self.calls.tool:
                raise ToolError(f"{error}; it was calling the tool {self.calls.tool!r}") from error
            raise

    @contextlib.contextmanager
    def _blamed(self, doing: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        except ToolError:
            raise
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and cancelled():
                raise
            raise EnvError(f"{self._part.name}: {doing}: {line(error)}") from error
        finally:
            self.seconds += time.perf_counter() - started


async def apart(work: Callable[[], Awaitable[T]]) -> T:
    """Await user code in a task of its own: it may cancel that one, and nothing it raises passes for a cancellation of ours. When
    we are cancelled it is, too; if it goes on nevertheless it is left behind.

    Raises:
        Escaped: it raised something that is no Exception.
    """

    @calls_user_code
    async def contained() -> T:
        try:
            return await work()
        except (Exception, asyncio.CancelledError):
            raise
        except BaseException as error:  # with some of these asyncio would end the event loop
            raise Escaped(line(error)) from error

    task = asyncio.create_task(contained())
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        task.add_done_callback(_look)
        _, deaf = await asyncio.wait({task}, timeout=HEED_S)
        if deaf:
            log.error("user code goes on although it was cancelled, and is left behind: %s", task)
        raise
    try:
        return task.result()
    except asyncio.CancelledError as error:
        raise Escaped(line(error)) from error


def _look(task: asyncio.Task[T]) -> None:
    """Take note of an error that nobody waits for any more."""
    if not task.cancelled():
        task.exception()
