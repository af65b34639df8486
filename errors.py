"""Every error that Slipstream raises on purpose, and the one helper for waiting with a deadline.

Invariants:
- Each message says what happened, to what, and what to do; it fits on one line, because the command line prints it alone.
- `exit_code` is what the command line returns: 2 for bad input (nothing was started), 1 for a run that failed.
- Every wait has a deadline: `with_deadline` names the waiter and what it waits for. One that ends only with its caller is a
  `TrackedWait`. `slipstream waits` shows both.
"""

from __future__ import annotations

import asyncio
import functools
import sysconfig
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from .common.waits import TrackedWait as TrackedWait

T = TypeVar("T")
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_ROOT = Path(__file__).parent
OUR_FOLDERS = (
    "agents", "benchmarks", "buffer", "chaos", "common", "configs", "dashboard", "envs", "launch", "learner", "monitor", "planner",
    "rollout", "rpc", "weightsync",
)  # fmt: skip
"""The folders of the package beside its examples and tests. A user's files may lie beside them."""


class SlipstreamError(Exception):
    """Base of all errors raised on purpose. `final` where starting the process again could not help."""

    exit_code = 1
    final = False

    def __init__(self, *message: object, final: bool | None = None) -> None:
        super().__init__(*message)
        self.final = self.final if final is None else final


class ConfigError(SlipstreamError):
    """Bad input: names the key, the value and what is allowed. Raised before any process starts."""

    exit_code = 2
    final = True


class HubError(SlipstreamError):
    """A hub of models and data sets cannot be reached, or broke off a download. What has arrived is kept for the next attempt."""


class EngineError(SlipstreamError):
    """An inference server refused a request, died, or answered something impossible."""


class NoAnswer(EngineError):
    """An inference server took a request, and the connection broke: the server may or may not have executed it."""


class EnvError(SlipstreamError):
    """An environment raised, or returned something its contract does not allow."""


class ToolError(SlipstreamError):
    """A tool could not be called or failed while running."""


class PolicyError(SlipstreamError):
    """The agent asked its policy for something impossible, for example a prompt longer than the context."""


class AgentTimeout(PolicyError):
    """A program that plays an episode took longer than it may."""


class WireError(SlipstreamError):
    """A frame that is not a valid Slipstream message: wrong version, size, type or shape."""


class StoreError(SlipstreamError):
    """The durable store could not be opened, written or read. Not `final` where that may pass: another process held the file."""

    final = True


class StateError(SlipstreamError):
    """An operation that the state machine does not allow here; always a bug or a foreign client."""


class RequestRefused(StateError):
    """A service refuses a request for `reason`. A handler raises it with the reason alone; the client names who asked for what."""

    def __init__(self, reason: str, what: str = "") -> None:
        super().__init__(f"{what}: {reason}" if what else reason)
        self.reason = reason


class WeightSyncError(SlipstreamError):
    """A weight push failed, or the canary shows that a replica does not hold the pushed weights."""


class EpisodesFail(SlipstreamError):
    """So many of the last episodes failed that going on would train on nothing, or on a biased rest; names the last failure."""

    final = True


class EvaluationError(SlipstreamError):
    """So many episodes of an evaluation failed that there is no reward to report."""

    final = True


class LearnerError(SlipstreamError):
    """The learner cannot step, save or load. Not `final` where that may pass: another rank is gone, or a disk is full."""

    final = True


class CheckpointError(LearnerError):
    """A checkpoint is damaged, or of another model."""


class RoleDied(SlipstreamError):
    """A process of the run ended and its restart budget is spent."""


class DeadlineExceeded(SlipstreamError):
    """A wait passed its deadline. Names who waited, for what, how long, and what to look at."""

    final = True

    def __init__(self, who: str, waited_for: str, seconds: float, hint: str) -> None:
        super().__init__(f"{who} waited {seconds:g} s for {waited_for}; {hint}")


class Interrupted(Exception):  # not an error of the program: a signal asked it to stop
    """SIGINT or SIGTERM ended a command in good order."""


async def with_deadline(
    seconds: float, awaitable: Awaitable[T], *, who: str, waits_for: str, hint: str | Callable[[], str]
) -> T:
    """Await `awaitable` for at most `seconds`, as one of the process's `waits`; a `hint` that is a function is asked when they
    have passed. Raises DeadlineExceeded naming `who`, `waits_for` and the `hint` about what to look at."""
    deadline = asyncio.timeout(seconds)
    try:
        with TrackedWait(who, waits_for, seconds):
            async with deadline:
                return await awaitable
    except TimeoutError:
        if not deadline.expired():
            raise
    finally:
        # They refer to the error, which refers to this frame: it would keep all of its traceback.
        del awaitable, deadline
    # Not within the `except`, for the same reason: the TimeoutError refers to the deadline.
    raise DeadlineExceeded(who, waits_for, seconds, hint if isinstance(hint, str) else hint())


def describe(error: BaseException) -> str:
    """The type of an exception, and its message if it has one; of one that a coroutine in place of a value made, why."""
    forgotten = (
        "; an `await` is missing"
        if isinstance(error, AttributeError | TypeError) and "'coroutine'" in str(error)
        else ""
    )
    return f"{type(error).__name__}: {error}".removesuffix(": ") + forgotten


def describe_user_error(error: BaseException) -> str:
    """`describe`, and the user's line that raised it: `KeyError: 'x' (my_env.py:12 in step)`."""
    line = user_line(error)
    return f"{describe(error)} ({line})" if line else describe(error)


def user_line(error: BaseException) -> str:
    """The innermost line of a traceback that is neither ours nor a library's: `my_env.py:12 in step`; "" where there is none."""
    for frame, number in reversed(list(traceback.walk_tb(error.__traceback__))):
        path, module = frame.f_code.co_filename, frame.f_globals.get("__name__", "")
        package, _, inside = module.partition(".")
        ours = package == __package__ and inside.partition(".")[0] not in ("examples", "tests")
        if not ours and not _is_library(path):
            return f"{Path(path).name}:{number} in {frame.f_code.co_name}"
    return ""


@functools.cache
def is_user_file(path: str) -> bool:
    """Whether a file of code is neither ours nor a library's."""
    inside = Path(path).parts[len(_ROOT.parts) :] if path.startswith(f"{_ROOT}/") else ()
    return not _is_library(path) and not (inside and (inside[0] in OUR_FOLDERS or inside == (Path(__file__).name,)))


def _is_library(path: str) -> bool:
    return path.startswith(("<", _STANDARD_LIBRARY)) or "site-packages" in path or "dist-packages" in path


def first_line(error: BaseException) -> str:
    """Of the message of an error of a library, which may be a page; its type where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def encodable(text: str) -> str:
    """`text` with half surrogate pairs, which have no encoding, as escapes: a user's exception may hold any text."""
    return text.encode("utf-8", "backslashreplace").decode()


def first_cause(group: BaseExceptionGroup) -> BaseException:
    """The first error in a group of groups: the one that made the others end."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
