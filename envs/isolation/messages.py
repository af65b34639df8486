"""What a task source and its episodes ask of the process that holds them, and the answers.

Invariants:
- A request is answered once, or its process ends. None is repeated: a step has effects.
- Each call has an id of its own in the whole world, by which it can be cancelled.
- What an environment raises arrives as `EnvFailure`, never as an exception of the transport.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ..base import Message, Observation, StepResult, Task
from ..simple import Split
from ..tools import ToolTime


class SourceKey(msgspec.Struct, frozen=True):
    """Which task source: its section of the config (`env`, `env.parts.NAME`), its options as JSON without where it runs, its split
    and its seed."""

    section: str
    options: str
    split: Split
    seed: int


class Describe(msgspec.Struct, frozen=True, tag=True):
    """Make the source, unless it is there."""

    call: str
    source: SourceKey


class MakeTask(msgspec.Struct, frozen=True, tag=True):
    call: str
    source: SourceKey
    index: int


class Demonstrate(msgspec.Struct, frozen=True, tag=True):
    """`seed` is of the randomness that chooses the demonstration."""

    call: str
    source: SourceKey
    task: Task
    seed: int


class ResetEpisode(msgspec.Struct, frozen=True, tag=True):
    """Make an environment, which `episode` names from now on, and reset it. `tool_s` is the longest call of a tool in seconds."""

    call: str
    source: SourceKey
    episode: str
    task: Task
    tool_s: float


class StepEpisode(msgspec.Struct, frozen=True, tag=True):
    call: str
    episode: str
    message: Message


class CloseEpisode(msgspec.Struct, frozen=True, tag=True):
    call: str
    episode: str


class CancelCall(msgspec.Struct, frozen=True, tag=True):
    """Cancel the call of that id; a process that does not answer this is killed."""

    call: str


class Alive(msgspec.Struct, frozen=True, tag=True):
    """A client of another host lives; it has no answer."""


class Description(msgspec.Struct, frozen=True, tag=True):
    """What `TaskSource` has besides its methods."""

    name: str
    penalty: float | None
    self_played: bool = False
    tasks: int | None = None  # its `len`, if it has one


class TaskMade(msgspec.Struct, frozen=True, tag=True):
    task: Task


class Demonstrated(msgspec.Struct, frozen=True, tag=True):
    """Both None where there is no demonstration."""

    opening: Observation | None = None
    messages: tuple[Message, ...] = ()


class EpisodeOpened(msgspec.Struct, frozen=True, tag=True):
    observation: Observation
    tools: tuple[ToolTime, ...] = ()  # that were called meanwhile


class EpisodeStepped(msgspec.Struct, frozen=True, tag=True):
    result: StepResult
    tools: tuple[ToolTime, ...] = ()  # that were called meanwhile


class EpisodeClosed(msgspec.Struct, frozen=True, tag=True):
    pass


class CallCancelled(msgspec.Struct, frozen=True, tag=True):
    """`where` it was, for a call whose process had to be killed, else ""; `tool` is the tool that it was calling, or ""."""

    where: str = ""
    tool: str = ""


class EnvFailure(msgspec.Struct, frozen=True, tag=True):
    """Who is at fault, in the words of the outcomes; `config` for what is wrong with the source's options."""

    reason: Literal["config", "environment", "tool"]
    text: str


CancellableRequest = Describe | MakeTask | Demonstrate | ResetEpisode | StepEpisode | CloseEpisode
EnvRequest = CancellableRequest | CancelCall | Alive
EnvReply = (
    Description | TaskMade | Demonstrated | EpisodeOpened | EpisodeStepped | EpisodeClosed | CallCancelled | EnvFailure
)
