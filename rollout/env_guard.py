"""Isolates user code: a guard around the environment of an episode, and a task of its own for every piece of user code.

Invariants:
- The environment is closed exactly once, also after a failure or a cancellation.
- No exception of user code ends more than its episode, also none outside `Exception`. A CancelledError leaves the episode only
  when its own task was cancelled.
- User code that ignores its cancellation is abandoned after `CANCEL_S`.
- Tasks of a source are made one at a time. Episodes of one task that begin together, as the members of a group do, share one call,
  and none sees what another does to its payload. (Where each waits for its turn, each turn is a round of a busy event loop.)
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Literal, TypeVar

import msgspec

from ..buffer.trajectory import CALLS_LIMIT, NAME_LIMIT, EnvCall
from ..common.spans import Stopwatch
from ..common.tasks import being_cancelled
from ..common.unawaited import UnawaitedLog, without_await
from ..envs import EnvPart
from ..envs.base import (
    Environment,
    Message,
    Observation,
    StepResult,
    Task,
    check_images,
    checked,
    checked_metrics,
    checked_reward,
)
from ..envs.isolation.source import IsolatedEnv
from ..envs.tools import ToolCallTracker, in_thread
from ..errors import (
    DeadlineExceeded,
    EnvError,
    PolicyError,
    ToolError,
    describe_user_error,
    encodable,
    with_deadline,
)
from .loop_watchdog import calls_user_code

log = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_S = 30.0  # how long an environment may take to release its resources; its episode keeps its slot meanwhile
LOOK = "look at the environment, or raise rollout.episode_s, which limits a step, too"
CANCEL_S = 5.0  # how long user code may take to end once it is cancelled


class EpisodeLimits(msgspec.Struct, frozen=True):
    """Seconds that an episode, a call of its environment and a call of a tool may take."""

    episode_s: float
    step_s: float
    tool_s: float


class EscapedException(Exception):
    """User code raised something outside `Exception`, for example SystemExit or its own CancelledError; the message names it."""


class TaskMemo:
    """The newest task of a source, which is made, or being made, for the first episode that asked for it."""

    def __init__(self) -> None:
        self._next = asyncio.Lock()
        self._newest: tuple[int, asyncio.Future[Task]] | None = None

    async def task(self, index: int, make: Callable[[], Awaitable[Task]]) -> Task:
        """A copy of task `index` where that is the newest, else what `make` makes, one call at a time. A call that fails, or whose
        payload cannot be copied, which JSON can, is no other episode's. Raises what `make` raises."""
        while self._newest is not None and self._newest[0] == index:
            made = self._newest[1]
            await asyncio.wait({made})
            if not made.cancelled():
                return copy.deepcopy(made.result())
        made = asyncio.get_running_loop().create_future()
        mine = self._newest = index, made
        try:
            async with self._next:
                task = await make()
            with contextlib.suppress(Exception):  # of a copy
                made.set_result(copy.deepcopy(task))
            return task
        finally:
            if not made.done():
                self._newest = None if self._newest is mine else self._newest
                made.cancel()


class EnvGuard:
    """The environment of one episode as the agent sees it: turns exceptions, contract violations and overruns into EnvError or
    ToolError, and remembers the first of them as `failure`; what the agent hands over wrongly raises PolicyError. Records rewards
    by step, metrics, the seconds spent here, the times of all calls, the `opening` that `reset` returned, the `transcript` of all
    messages since, and as `unawaited` the coroutines that the agent and the environment dropped."""

    def __init__(self, part: EnvPart, limits: EpisodeLimits, tasks: TaskMemo) -> None:
        self._part = part
        self.self_played = part.self_played
        self._limits = limits
        self._tasks = tasks
        self._inner: Environment | None = None
        self._closed = False
        self.calls = ToolCallTracker(limits.tool_s)
        self.unawaited = UnawaitedLog()
        self.task = Task("")
        self.opening: tuple[Message, ...] = ()
        self.transcript: list[Message] = []
        self.rewards: list[float] = []
        self.metrics: dict[str, float] = {}
        self.seconds = 0.0
        self.timed: list[EnvCall] = []
        self.finished = False
        self.failure: EnvError | ToolError | None = None

    @calls_user_code
    async def open(self, index: int) -> Task:
        async def make() -> Task:
            with self._attributed("task", f"task {index}"):
                self._inner = self._part.source.make()
                task = await self._in_time(in_thread(self._part.source.task, index), f"task {index}")
                if why := without_await(task):
                    raise EnvError(f"{why}; `task` is a plain function, `def task`")
                if not isinstance(task, Task):
                    raise EnvError(f"it returned {task!r:.100}; return Task(id, payload)")
                if not isinstance(task.id, str) or len(task.id) > NAME_LIMIT or encodable(task.id) != task.id:
                    raise EnvError(f"its id must be text of at most {NAME_LIMIT} characters, not {task.id!r:.100}")
                return task

        self.task = await self._tasks.task(index, make)
        if self._inner is None:  # it is a copy
            with self._attributed("task", f"task {index}"):
                self._inner = self._part.source.make()
        return self.task

    @calls_user_code
    async def reset(self, task: Task) -> Observation:
        _require_argument("reset", task, Task)
        with self._attributed("reset", f"reset of task {task.id!r}"):
            observation = checked(await self._in_time(self._opened.reset(task), "the reset"), Observation)
            await self._checked_images(observation.messages)
            self.opening = observation.messages
        return observation

    @calls_user_code
    async def step(self, message: Message) -> StepResult:
        _require_argument("step", message, Message)
        with self._attributed("step", "step"):
            # The only step of an environment that plays itself is its whole episode.
            seconds = self._limits.episode_s if self.self_played else self._limits.step_s
            result = await self._in_time(self._opened.step(message), "a step", seconds)
            if not isinstance(result, StepResult):
                wanted = f"it returned {result!r:.100}; return StepResult(messages, reward, done)"
                raise EnvError(without_await(result) or wanted)
            reward = checked_reward(result.reward)
            self.rewards.append(reward)
            messages, metrics = checked(result.messages, tuple[Message, ...]), checked_metrics(result.metrics)
            await self._checked_images(messages)
            result = msgspec.structs.replace(result, messages=messages, reward=reward, metrics=metrics)
            self.transcript += (message, *result.messages)
            self.metrics |= metrics
            self.finished = result.done and not result.truncated
        return result

    def end(self) -> None:
        """Refuse calls from now on: the episode has its outcome."""
        self._closed = True

    async def close(self) -> None:
        """Release the environment. A failure here is logged and changes no reward. A caller that is cancelled returns only when the
        environment is closed, too."""
        self.end()
        closing = asyncio.create_task(self._close(), name=f"end of the environment of task {self.task.id!r:.100}")
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await asyncio.wait({closing})
            raise

    async def _close(self) -> None:
        try:
            if self._inner is not None:
                await with_deadline(
                    CLOSE_S,
                    run_isolated(self._inner.close),
                    who=f"task {self.task.id}",
                    waits_for="its environment to close",
                    hint="what the environment holds may leak",
                )
        except Exception:
            log.exception("%s: close raised on task %s", self._part.name, self.task.id)

    @property
    def _opened(self) -> Environment:
        if self._inner is None or self._closed:
            raise EnvError("its episode is over")
        return self._inner

    @calls_user_code
    async def _in_time(self, work: Awaitable[T], what: str, seconds: float | None = None) -> T:
        """Await a call of the environment, `step_s` at most unless `seconds` says otherwise; an overrun during a tool call is
        attributed to the tool."""
        self.calls.tool = ""
        if not inspect.isawaitable(work):
            raise EnvError(f"it returned {work!r:.100} and no coroutine; write `async def`")

        def hint() -> str:
            inner = self._inner
            stuck = inner.where if isinstance(inner, IsolatedEnv) else ""
            return f"it was in {stuck}, and its process was killed" if stuck else LOOK

        try:
            longest = self._limits.step_s if seconds is None else seconds
            return await with_deadline(longest, work, who="an episode", waits_for=what, hint=hint)
        except DeadlineExceeded as error:
            if self.calls.tool:
                raise ToolError(f"{error}; it was calling the tool {self.calls.tool!r}") from error
            raise

    @staticmethod
    async def _checked_images(messages: Sequence[Message]) -> None:
        """Raises EnvError. Decoding an image takes milliseconds, so it is done in a thread."""
        if any(message.images for message in messages):
            await in_thread(check_images, messages)

    @contextlib.contextmanager
    def _attributed(self, what: Literal["task", "reset", "step"], call: str) -> Iterator[None]:
        """Turn exceptions of the environment, and coroutines that it drops, into EnvError, and record its times."""
        watch, dropped = Stopwatch(), len(self.unawaited.lines)
        failed: Literal["", "tool", "environment", "cancelled"] = ""
        try:
            yield
            if lines := self.unawaited.lines[dropped:]:
                raise EnvError(lines[0])
        except ToolError as error:
            failed = "tool"
            self.failure = self.failure or error
            raise
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and being_cancelled():
                failed = "cancelled"
                raise
            failed = "environment"
            failure = EnvError(f"{self._part.name}: {call}: {describe_user_error(error)}")
            self.failure = self.failure or failure
            raise failure from error
        finally:
            del self.unawaited.lines[dropped:]  # those of a call that failed or was cancelled may be innocent
            end = watch.now()
            self.seconds += end - watch.began
            tools = [EnvCall(t.begin, t.end, "tool", t.tool, t.error) for t in self.calls.take_ended()]
            self.timed += [*tools, EnvCall(watch.began, end, what, "", failed)][: CALLS_LIMIT - len(self.timed)]


def _require_argument(call: str, given: object, kind: type) -> None:
    """Raises PolicyError where the agent gave something else than a `kind`."""
    if not isinstance(given, kind):
        why = without_await(given) or f"env.{call} was given {given!r:.100}; it takes a {kind.__name__}"
        raise PolicyError(why)


async def run_isolated(function: Callable[[], Awaitable[T]]) -> T:
    """Await user code in a task of its own: it may cancel that task, and none of its exceptions is mistaken for a cancellation of
    the caller. When the caller is cancelled the user code is, too; if it ignores that it is abandoned. Raises EscapedException: it
    raised something outside `Exception`."""
    task = asyncio.create_task(_contain(function))
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        # Its exception is retrieved, so that asyncio does not log it.
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        _, running = await asyncio.wait({task}, timeout=CANCEL_S)
        if running:
            log.error("user code ignores its cancellation and is abandoned: %s", task)
        raise
    try:
        return task.result()
    except asyncio.CancelledError as error:
        raise EscapedException(describe_user_error(error)) from error


@calls_user_code
async def _contain(function: Callable[[], Awaitable[T]]) -> T:
    try:
        return await function()
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:  # some of these, such as SystemExit, would end the event loop
        raise EscapedException(describe_user_error(error)) from error
