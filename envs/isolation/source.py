"""Task sources and episodes that run in other processes, as a worker sees them: like any others.

Invariants:
- What an environment raises in its process is raised here as EnvError or ToolError; a process that ends is an EnvError.
- A call that is cancelled here, above all by its deadline, is cancelled there; a process that does not answer to that is killed,
  and `where` says what it was doing.
- The rows of data sets are read here, where their tasks are counted and measured; their episodes run in the processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import uuid
from typing import TypeVar

from ...configs.environments import DataSection, EnvironmentKind
from ...errors import ConfigError, DeadlineExceeded, EnvError, SlipstreamError, ToolError
from ..base import Message, Observation, StepResult, Task, TaskSource
from ..dataset.source import DatasetSource
from ..simple import Split
from ..tools import current_tools
from .link import Hosts, awaited, hosts_of, options_of, result_of
from .messages import (
    CallCancelled,
    CancelCall,
    CloseEpisode,
    Demonstrate,
    Demonstrated,
    Describe,
    Description,
    EnvFailure,
    EnvReply,
    EpisodeClosed,
    EpisodeOpened,
    EpisodeStepped,
    MakeTask,
    ResetEpisode,
    SourceKey,
    StepEpisode,
    TaskMade,
)

R = TypeVar("R")

SOURCE_S = 300.0  # longest start of a process and making of a source in it: some libraries take a minute to import
TASK_S = 600.0  # longest making of a task; in an episode the deadline of a step comes first


def isolated_source(config: EnvironmentKind, split: Split, seed: int, key: str) -> TaskSource:
    """The tasks of an environment that runs in other processes. Raises ConfigError: as `task_source`, or no process answers."""
    hosts, source = hosts_of(config, key), SourceKey(key, options_of(config), split, seed)
    if isinstance(config, DataSection):
        dataset = IsolatedDataset(config, split, seed, key)
        dataset.place(hosts, source)
        return dataset
    described = describe_source(hosts, source, key)
    if described.tasks is None:
        return IsolatedSource(hosts, source, described)
    return FiniteIsolatedSource(hosts, source, described)


class IsolatedSource:
    """A task source in another process."""

    def __init__(self, hosts: Hosts, source: SourceKey, described: Description) -> None:
        self._hosts, self._source, self._described = hosts, source, described
        self.name, self.penalty, self.self_played = described.name, described.penalty, described.self_played

    def task(self, index: int) -> Task:
        return self._ask(MakeTask(_new_id(), self._source, index), TaskMade).task

    def make(self) -> IsolatedEnv:
        return IsolatedEnv(self._hosts, self._source)

    def demonstration(self, task: Task, rng: random.Random) -> tuple[Observation, tuple[Message, ...]] | None:
        shown = self._ask(Demonstrate(_new_id(), self._source, task, rng.getrandbits(63)), Demonstrated)
        return None if shown.opening is None else (shown.opening, shown.messages)

    def _ask(self, request: MakeTask | Demonstrate, reply_type: type[R]) -> R:
        try:
            return _expect(result_of(self._hosts.handle(request), TASK_S, "a task"), reply_type)
        except BaseException as error:  # a thread that is interrupted, too: the call may never end
            if isinstance(error, DeadlineExceeded) or not isinstance(error, SlipstreamError):
                result_of(self._hosts.handle(CancelCall(request.call)), SOURCE_S, "the cancellation of a task")
            raise


class FiniteIsolatedSource(IsolatedSource):
    """One that gives the same tasks in each epoch."""

    def __len__(self) -> int:
        assert self._described.tasks is not None
        return self._described.tasks


class IsolatedDataset(DatasetSource):
    """Rows that are read here, and answered and scored in other processes."""

    def place(self, hosts: Hosts, source: SourceKey) -> None:
        """Say where. Raises ConfigError."""
        self._hosts, self._source = hosts, source
        describe_source(hosts, source, self.key)

    def make(self) -> IsolatedEnv:  # pyright: ignore[reportIncompatibleMethodOverride]  (of a source, which is no episode here)
        return IsolatedEnv(self._hosts, self._source)


def describe_source(hosts: Hosts, source: SourceKey, key: str) -> Description:
    """Make the source there. Raises ConfigError."""
    try:
        return _expect(result_of(hosts.handle(Describe(_new_id(), source)), SOURCE_S, "a task source"), Description)
    except ConfigError:
        raise
    except SlipstreamError as error:
        raise ConfigError(f"{key}: {error}") from None


class IsolatedEnv:
    """An episode in another process. `where` is what that process was doing when a call of this episode made it be killed."""

    def __init__(self, hosts: Hosts, source: SourceKey) -> None:
        self.where = ""
        self._hosts, self._source = hosts, source
        self._episode = _new_id()

    async def reset(self, task: Task) -> Observation:
        tool_s = current_tools().tool_s
        request = ResetEpisode(_new_id(), self._source, self._episode, task, tool_s)
        opened = await self._ask(request, EpisodeOpened)
        current_tools().ended += opened.tools
        return opened.observation

    async def step(self, message: Message) -> StepResult:
        stepped = await self._ask(StepEpisode(_new_id(), self._episode, message), EpisodeStepped)
        current_tools().ended += stepped.tools
        return stepped.result

    async def close(self) -> None:
        await self._ask(CloseEpisode(_new_id(), self._episode), EpisodeClosed)

    async def _ask(self, request: ResetEpisode | StepEpisode | CloseEpisode, reply_type: type[R]) -> R:
        try:
            return _expect(await awaited(self._hosts.handle(request)), reply_type)
        except asyncio.CancelledError:
            with contextlib.suppress(SlipstreamError):  # its process has ended already
                cancelled = await awaited(self._hosts.handle(CancelCall(request.call)))
                if isinstance(cancelled, CallCancelled):
                    self.where = cancelled.where
                    current_tools().tool = cancelled.tool
            raise


def _new_id() -> str:
    return uuid.uuid4().hex


def _expect(reply: EnvReply, reply_type: type[R]) -> R:
    """Raises the error that an EnvFailure stands for."""
    if isinstance(reply, EnvFailure):
        raise {"config": ConfigError, "environment": EnvError, "tool": ToolError}[reply.reason](reply.text)
    if not isinstance(reply, reply_type):
        raise EnvError(f"its process answered with {type(reply).__name__}")
    return reply
