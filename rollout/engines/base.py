"""What the engine contract (`http_engine.HttpEngine`) passes around: sampling parameters, loads, partial completions, failures, the
versions that exist, and what servers report. Our own server shares it with the clients."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from ...agents.base import Completion
from ...errors import EngineError
from ..concurrency import EngineLoad as EngineLoad

STREAM_INTERVAL = 16  # tokens per chunk of a stream; the first token has its own chunk
UNPUSHED = "default"  # the version that vLLM and SGLang report for weights that they loaded themselves
IMPOSSIBLE = -9999.0  # what servers report for a log-prob that is minus infinity or not a number


class SamplingParams(msgspec.Struct, frozen=True):
    """Sampling of one completion. `stop_token_ids` end it and are part of it."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    experts_from: int | None = None  # first position whose experts are wanted, where servers record them; None for none


EMPTY = Completion((), (), (), "abort")  # a completion that ended before its first token


class PartialCompletion(msgspec.Struct):
    """A completion in progress, for a caller that may stop waiting for it. The engine sets `certain`, and `ended` when the server
    has sent all of it: what is late from then on, such as which versions exist, is not the server's fault."""

    certain: Callable[[], Completion] | None = None
    ended: bool = False

    @property
    def partial(self) -> Completion:
        """What has arrived with its versions (`finish_reason` `abort`), possibly nothing."""
        try:
            return self.certain() if self.certain else EMPTY
        except EngineError:  # what has arrived is invalid
            return EMPTY


class OutputSpan(msgspec.Struct):
    """Tokens `[start, end)` of a completion were sampled by `version`, as servers report it."""

    version: str
    start: int
    end: int


class ServerError(msgspec.Struct):
    """An error in a stream, as servers report it."""

    message: str = ""
    code: int | str | None = None


class VersionClock:
    """The newest policy version that exists, as far as this process knows. `ask` returns the newest of the learner now; it is asked
    only when a reply names a newer one, once for all replies that wait. Without it no newer version will ever exist."""

    def __init__(self, newest: int = 0, ask: Callable[[], Awaitable[int]] | None = None) -> None:
        self.newest = newest
        self._ask = ask
        self._asking = asyncio.Lock()

    async def exists(self, version: int) -> bool:
        """Whether the learner has made `version`. Raises what `ask` raises."""
        if version > self.newest and self._ask is not None:
            async with self._asking:
                if version > self.newest:
                    self.newest = max(self.newest, await self._ask())
        return version <= self.newest


class RequestRejected(EngineError):
    """The server refuses this request, as every other server would. The server itself is healthy."""


class FalseReply(EngineError):
    """The server answered what no honest server can: see `check_completion` of `http_engine`. Nothing of the reply is used."""


class EngineFailure(EngineError):
    """The server failed during a completion. `partial` holds the tokens that had arrived (`finish_reason` `abort`), possibly none;
    continuing from prompt + partial on another replica equals an uninterrupted completion."""

    def __init__(self, message: str, partial: Completion) -> None:
        super().__init__(message)
        self.partial = partial
