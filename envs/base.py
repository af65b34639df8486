"""The environment contract.

Invariants:
- One instance serves one episode: `reset`, then `step` until `done`, then `close`, whatever happened in between.
- An environment sees messages and rewards, never tokens, versions or sockets.
- An environment that cannot continue raises; a wrong answer is a reward. The two are never mixed.
- Its coroutines share an event loop with hundreds of others: blocking or long computations run through `in_thread`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from ..common.images import check_image
from ..common.unawaited import without_await
from ..errors import EnvError, encodable

T = TypeVar("T")

REWARD_LIMIT = 1e30  # of a step, absolute: sums of rewards, their squares and float32 advantages stay finite
METRIC_LIMIT = 200  # characters of a metric's name
JSON = dict[str, Any]  # a JSON object without a fixed type: a tool's JSON schema, its arguments, a task's payload


class ToolCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tool call of the assistant: the tool's name and its arguments."""

    name: str
    arguments: JSON
    id: str = ""


class TaskFile(msgspec.Struct, frozen=True):
    """A file of a task's folder, by its path in it."""

    path: str
    content: bytes


class Image(msgspec.Struct, frozen=True, omit_defaults=True):
    """An image of a message: a PNG or JPEG file, before character `at` of the message's text."""

    data: bytes
    at: int = 0


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One chat message. `tool_calls` only on `assistant`; `tool_call_id` and `name` only on `tool`; `images` only on `user` and
    `tool`, ordered by where they are in the text. `malformed` is why an assistant message could not be parsed into tool calls; ""
    when it could. `files` is what an agent left in the task's folder, with its answer; None of an agent that has no folder.
    `written` is all that the policy wrote, its thinking and the text of its calls included, without special tokens; "" where that
    is `content`, and of messages that no policy wrote."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    malformed: str = ""
    files: tuple[TaskFile, ...] | None = None
    images: tuple[Image, ...] = ()
    written: str = ""


class ToolSpec(msgspec.Struct, frozen=True):
    """The description of a tool for the policy; `parameters` is a JSON schema."""

    name: str
    description: str
    parameters: JSON


class Task(msgspec.Struct, frozen=True):
    """One task. `payload` is defined by the environment and must be JSON."""

    id: str
    payload: JSON = {}


class Observation(msgspec.Struct, frozen=True):
    """What `reset` returns: the opening messages, the available tools, and the files of the task's folder, for agents that have
    one (`agent.kind: command`)."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    files: tuple[TaskFile, ...] = ()


class StepResult(msgspec.Struct, frozen=True):
    """What follows an assistant message: new messages, and the reward of this step. `done` ends the episode; with `truncated` it
    ends by a limit of the environment, not by an action of the policy. Where several steps give a metric of one name, the last
    value counts."""

    messages: tuple[Message, ...] = ()
    reward: float = 0.0
    done: bool = False
    truncated: bool = False
    metrics: dict[str, float] = {}


class Environment(Protocol):
    """Stateful, one instance per episode."""

    async def reset(self, task: Task) -> Observation:
        """Start the episode."""
        ...

    async def step(self, message: Message) -> StepResult:
        """Process the assistant's message."""
        ...

    async def close(self) -> None:
        """Release the episode's resources; called exactly once, also after a failure."""


class TaskSource(Protocol):
    """A named, endless, deterministic supply of tasks, and a factory of environments for them. `task(i)` must return the same task
    for the same `i` in every process. Training uses indices from 0 upwards; evaluation uses those of a disjoint source, created
    with `split="eval"`.

    A source may declare `penalty`, a finite number: the reward of a failed episode where the config trains on failures
    (`rollout.failures.REASON.then=train`). Without one, or with None, failed episodes of this environment are never trained on.

    A source whose environments own their loop declares `self_played = True`, see `self_played.py`. One that gives a finite number
    of tasks again and again, once in each epoch, has that number as its `len`."""

    name: str

    def task(self, index: int) -> Task:
        """The `index`-th task, `index >= 0`. Called in a thread, one call at a time; episodes of a task may share a call."""
        ...

    def make(self) -> Environment:
        """A fresh environment for one episode."""
        ...

    def demonstration(self, task: Task, rng: random.Random) -> tuple[Observation, tuple[Message, ...]] | None:
        """An opening and the whole conversation after it (assistant and tool messages) to imitate in a supervised warm-up; None
        when this source has no demonstrations."""
        ...


def check_images(messages: Iterable[Message]) -> None:
    """Raises EnvError where an image of `messages` is none, is not in its message's text, or has a role that no image may have."""
    for message in messages:
        before = 0
        for image in message.images:
            if message.role not in ("user", "tool"):
                raise EnvError(f"a message of role {message.role} has an image; allowed are user and tool")
            if not before <= image.at <= len(message.content):
                raise EnvError(
                    f"an image is at character {image.at} of {len(message.content)}; allowed are {before} to the text's end"
                )
            check_image(image.data)
            before = image.at


def as_number(value: object) -> float | None:
    """A number of Python, numpy or torch as a float; None for anything else, text that reads like a number included."""
    if isinstance(value, str | bytes) or not hasattr(type(value), "__float__"):
        return None
    try:
        return float(value)  # pyright: ignore[reportArgumentType]  (it has __float__)
    except (TypeError, ValueError, RuntimeError):  # an array or a tensor of several numbers
        return None


def checked_reward(reward: object) -> float:
    """The reward of a step: a number of Python, numpy or torch that is at most `REWARD_LIMIT`. Raises EnvError."""
    number = as_number(reward)
    if number is None or not abs(number) <= REWARD_LIMIT:
        wrong = f"a reward of {reward!r:.100}; allowed are numbers up to {REWARD_LIMIT:g}"
        raise EnvError(without_await(reward) or wrong)
    return number


def checked_metrics(metrics: object) -> dict[str, float]:
    """The metrics of a step: numbers of Python, numpy or torch by names that have an encoding. Raises EnvError."""
    if why := without_await(metrics):
        raise EnvError(why)
    if not isinstance(metrics, Mapping):
        raise EnvError(f"metrics of {metrics!r:.100}; allowed are numbers by their names")
    found: dict[str, float] = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or encodable(name) != name or len(name) > METRIC_LIMIT:
            raise EnvError(f"a metric with the name {name!r:.100}; allowed is text of {METRIC_LIMIT} characters")
        if (number := as_number(value)) is None:
            raise EnvError(without_await(value) or f"the metric {name!r:.100} is {value!r:.100}; allowed are numbers")
        if not math.isfinite(number):
            raise EnvError(f"the metric {name!r:.100} is {number}; allowed are finite numbers")
        found[name] = number
    return found


def checked(value: object, kind: type[T]) -> T:
    """What an environment returned, as a valid `kind`; lists and dictionaries are taken for tuples and structs. Raises EnvError."""
    try:
        return msgspec.convert(msgspec.to_builtins(value), kind)
    except (TypeError, msgspec.ValidationError) as error:
        if why := without_await(value):
            raise EnvError(why) from None
        raise EnvError(
            f"it returned {value!r:.100}, which is no valid {getattr(kind, '__name__', kind)}: {error}"
        ) from None
