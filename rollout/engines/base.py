"""What the engine contract (`http_engine.HttpEngine`) passes around: sampling parameters, loads, partial completions, failures."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ...agents.base import Completion
from ...errors import EngineError
from ..concurrency import EngineLoad as EngineLoad


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
    """A completion in progress, for a caller that may stop waiting for it. The engine sets `certain`."""

    certain: Callable[[], Completion] | None = None

    @property
    def partial(self) -> Completion:
        """What has arrived with its versions (`finish_reason` `abort`), possibly nothing."""
        try:
            return self.certain() if self.certain else EMPTY
        except EngineError:  # what has arrived is invalid
            return EMPTY


class RequestRejected(EngineError):
    """The server refuses this request, as every other server would. The server itself is healthy."""


class FalseReply(EngineError):
    """The server answered what no honest server can: see `reply_check`. Nothing of the reply is used."""


class EngineFailure(EngineError):
    """The server failed during a completion. `partial` holds the tokens that had arrived (`finish_reason` `abort`), possibly none;
    continuing from prompt + partial on another replica equals an uninterrupted completion."""

    def __init__(self, message: str, partial: Completion) -> None:
        super().__init__(message)
        self.partial = partial
