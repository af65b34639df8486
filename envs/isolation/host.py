"""The process that holds environments: makes task sources and plays their episodes, for one caller over ZeroMQ. Started by
`boot.py` in any interpreter.

Invariants:
- Many episodes share one event loop. A call that blocks it delays the others of this process only; one that never returns is the
  caller's to notice, who kills the process.
- Whatever an environment raises or returns is an answer; nothing of it ends the process, but its own end.
- A call that was cancelled, or whose episode was closed, before its environment was made leaves none behind.
- What is sent has been checked: a result that breaks the contract is a failure of the environment.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sized
from typing import Any

import msgspec

from ...common.tasks import being_cancelled
from ...common.unawaited import UnawaitedLog, without_await
from ...configs.environments import EnvironmentKind
from ...errors import ConfigError, EnvError, ToolError, describe, describe_user_error
from ...rpc.security import PeerTable, make_pair
from ...rpc.server import RpcRequest, RpcServer
from ..base import Environment, Message, Observation, StepResult, Task, TaskSource, as_number, checked, checked_metrics
from ..registry import task_source
from ..tools import ToolCallTracker, in_thread
from .messages import (
    Alive,
    CallCancelled,
    CancelCall,
    CancellableRequest,
    CloseEpisode,
    Demonstrate,
    Demonstrated,
    Describe,
    Description,
    EnvFailure,
    EnvReply,
    EnvRequest,
    EpisodeClosed,
    EpisodeOpened,
    EpisodeStepped,
    MakeTask,
    ResetEpisode,
    SourceKey,
    StepEpisode,
    TaskMade,
)

CANCEL_S = 0.5  # how long a cancelled call may take to end before it is abandoned; its caller waits longer


class _Source:
    """A task source. Its lock is held while it makes a task, one at a time."""

    def __init__(self, source: TaskSource) -> None:
        self.source = source
        self.lock = asyncio.Lock()


class _Episode:
    """An environment, None until its source is made, and the tool that it calls."""

    def __init__(self, tool_s: float) -> None:
        self.env: Environment | None = None
        self.tools = ToolCallTracker(tool_s)


class _Call:
    """A request that is being answered: what runs for it in the environment, once something does, and whether it was cancelled."""

    def __init__(self) -> None:
        self.work: tuple[asyncio.Task[Any], ToolCallTracker] | None = None
        self.cancelled = False


class EnvHost:
    """All task sources and episodes of this process."""

    def __init__(self) -> None:
        self._sources: dict[SourceKey, asyncio.Task[_Source]] = {}
        self._episodes: dict[str, _Episode] = {}
        self._calls: dict[str, _Call] = {}

    async def handle(self, request: EnvRequest) -> EnvReply:
        """The answer to a request. Raises what the environment raises."""
        match request:
            case CancelCall(call=call):
                return await self._cancel(call)
            case Alive():
                raise EnvError("a sign of life has no answer")
            case _:
                self._calls[request.call] = _Call()
                try:
                    return await self._answer(request)
                finally:
                    del self._calls[request.call]

    async def _answer(self, request: CancellableRequest) -> EnvReply:
        match request:
            case Describe(source=key):
                source = (await self._source(key)).source
                return Description(
                    source.name,
                    getattr(source, "penalty", None),
                    bool(getattr(source, "self_played", False)),
                    len(source) if isinstance(source, Sized) else None,
                )
            case MakeTask(source=key, index=index):
                return TaskMade(await self._task(request.call, await self._source(key), index))
            case Demonstrate(source=key, task=task, seed=seed):
                source = (await self._source(key)).source
                shown = await in_thread(source.demonstration, task, random.Random(seed))
                return Demonstrated() if shown is None else Demonstrated(shown[0], tuple(shown[1]))
            case ResetEpisode(task=task):
                episode, env = await self._open_episode(request)
                seen = await self._call(request.call, env.reset(task), episode.tools)
                return EpisodeOpened(checked(seen, Observation), episode.tools.take_ended())
            case StepEpisode(episode=name, message=message):
                episode = self._episodes.get(name)
                if episode is None or episode.env is None:
                    raise EnvError("its process holds no such episode")
                result = await self._call(request.call, episode.env.step(message), episode.tools)
                return EpisodeStepped(valid_result(result), episode.tools.take_ended())
            case CloseEpisode(episode=name):
                closed = self._episodes.pop(name, None)
                if closed is not None and closed.env is not None:
                    await self._call(request.call, closed.env.close(), closed.tools)
                return EpisodeClosed()

    async def _open_episode(self, request: ResetEpisode) -> tuple[_Episode, Environment]:
        """A new episode, and its environment. Raises EnvError: while its source was made it was cancelled or closed."""
        name, episode = request.episode, _Episode(request.tool_s)
        self._episodes[name] = episode
        try:
            source = (await self._source(request.source)).source
            if self._calls[request.call].cancelled or self._episodes.get(name) is not episode:
                raise EnvError("its episode was over before its environment was made")
            episode.env = env = source.make()
            return episode, env
        except BaseException:
            if self._episodes.get(name) is episode:
                del self._episodes[name]
            raise

    async def _source(self, key: SourceKey) -> _Source:
        """Made at the first request for it; one that cannot be made is tried again. Raises ConfigError."""
        if key not in self._sources:
            self._sources[key] = asyncio.create_task(in_thread(_make_source, key), name=f"source {key.section}")
        making = self._sources[key]
        try:
            return await asyncio.shield(making)
        except BaseException:
            if making.done() and self._sources.get(key) is making:
                del self._sources[key]
            raise

    async def _task(self, call: str, source: _Source, index: int) -> Task:
        async with source.lock:
            task: object = await self._call(call, in_thread(source.source.task, index), ToolCallTracker())
        if why := without_await(task):
            raise EnvError(f"{why}; `task` is a plain function, `def task`")
        if not isinstance(task, Task):
            raise EnvError(f"it returned {task!r:.100}; return Task(id, payload)")
        return checked(task, Task)

    async def _call(self, call: str, work: Coroutine[Any, Any, Any], tools: ToolCallTracker) -> Any:
        """Await a call of an environment, in a task that can be cancelled. Raises EnvError: it was, before it began."""
        if self._calls[call].cancelled:
            _forget(work)
            raise EnvError("it was cancelled before it began")
        unawaited = UnawaitedLog()
        with tools, unawaited:
            task = asyncio.create_task(_contained(work), name=f"call {call}")
        task.add_done_callback(lambda _: _forget(work))  # a task that is cancelled before its first step awaits nothing
        tools.tool = ""
        self._calls[call].work = task, tools
        result = await task
        if unawaited.lines:
            raise EnvError(unawaited.lines[0])
        return result

    async def _cancel(self, call: str) -> CallCancelled:
        if (found := self._calls.get(call)) is None:
            return CallCancelled()
        found.cancelled = True
        if found.work is None:
            return CallCancelled()
        task, tools = found.work
        tool = tools.tool
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_S)
        return CallCancelled(tool=tool)

    async def answer(self, server: RpcServer[EnvRequest], request: RpcRequest[EnvRequest]) -> None:
        """Handle a request and reply, whatever happens."""
        try:
            reply: EnvReply = await self.handle(request.message)
        except ConfigError as error:
            reply = EnvFailure("config", str(error))
        except ToolError as error:
            reply = EnvFailure("tool", str(error))
        except EnvError as error:
            reply = EnvFailure("environment", str(error))
        except BaseException as error:  # also SystemExit, which would end the event loop
            if isinstance(error, asyncio.CancelledError) and being_cancelled():
                raise
            reply = EnvFailure("environment", describe_user_error(error))
        try:
            server.reply(request.identity, request.number, reply)
        except Exception as error:  # a payload that is not JSON, text that has no encoding
            text = f"what it returned cannot be sent: {describe(error)!a}"
            server.reply(request.identity, request.number, EnvFailure("environment", text))


async def _contained(work: Coroutine[Any, Any, Any]) -> Any:
    """What `work` returns. What would end the event loop if it left its task, such as SystemExit, becomes an EnvError."""
    try:
        return await work
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:
        raise EnvError(describe_user_error(error)) from error


def _forget(work: object) -> None:
    """End a coroutine that may not have begun. Python does not warn of it then."""
    if asyncio.iscoroutine(work):
        work.close()


def _make_source(key: SourceKey) -> _Source:
    options: EnvironmentKind = msgspec.json.decode(key.options, type=EnvironmentKind)
    return _Source(task_source(options, key.split, key.seed, key.section))


def valid_result(result: object) -> StepResult:
    """A step's result in plain types. Raises EnvError."""
    if not isinstance(result, StepResult):
        wanted = f"it returned {result!r:.100}; return StepResult(messages, reward, done)"
        raise EnvError(without_await(result) or wanted)
    if (reward := as_number(result.reward)) is None:
        raise EnvError(without_await(result.reward) or f"a reward of {result.reward!r:.100}; allowed are numbers")
    messages = checked(result.messages, tuple[Message, ...])
    metrics = checked_metrics(result.metrics)
    return StepResult(messages, reward, bool(result.done), bool(result.truncated), metrics)


def run(peer: str, ready: Callable[[str], None]) -> None:
    """Serve the process with the public key `peer` until this one is killed. `ready` is told the address."""
    asyncio.run(_serve(peer, ready))


async def _serve(peer: str, ready: Callable[[str], None]) -> None:
    peers = PeerTable({"worker": peer})
    server: RpcServer[EnvRequest] = RpcServer(
        "tcp://127.0.0.1:*", "environments", EnvRequest, peers=peers, pair=make_pair()
    )
    host, answering = EnvHost(), set[asyncio.Task[None]]()
    ready(server.address)
    while True:
        for request in server.requests():
            task = asyncio.create_task(host.answer(server, request))
            answering.add(task)
            task.add_done_callback(answering.discard)
        await server.poll()
