"""What the clients of all inference servers share: the checks of the engine contract, and a completion as it arrives.

Invariants:
- A completion is checked before anybody sees it: one finite log-prob per token, spans that cover every token.
- What kills a server (most check no ids themselves) is refused before it is sent.
- A completion whose caller left, or whose deadline passed, no longer runs on the server by the time the caller hears of it.
- One that breaks off keeps the tokens whose versions are certain, no others.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec

from ..agents.base import Completion, FinishReason
from ..buffer.trajectory import VersionSpan
from ..configs.schema import Partial
from ..errors import EngineError, PolicyError
from .engine import Broken, Growing
from .http import Disconnected, Server

STREAM_INTERVAL = 16
"""Tokens per chunk of a stream; the first comes alone."""

UNPUSHED = "default"
"""What vLLM and SGLang call the version of weights that they loaded themselves."""

IMPOSSIBLE = -9999.0
"""What servers write for a log-prob that is minus infinity or not a number."""


class Span(msgspec.Struct):
    """Tokens `[start, end)` of a completion were sampled by `version`, as servers write it."""

    version: str
    start: int
    end: int


class HttpEngine(Server):
    """One server; the base of the engine clients.

    Args:
        name: what errors and reports call it.
        url: `http://host:port`.
        vocab_size: token ids must lie in `[0, vocab_size)`.
        max_model_len: tokens of a prompt and its completion together.
        initial_version: the version that the weights a server loaded itself go by; None refuses their completions, because a
            trajectory must not be labelled by guesswork.
        request_s: longest wait for a completion or a control call.
        push_s: longest wait for one call of a weight push.
        ranks: processes that hold a part of the replica's weights.
        partial: what weight pushes do with requests under way; with `keep_kv` spans say which KV took part.
        scores_paused: whether the server computes scores while it is paused: ours does, vLLM and SGLang do not.
    """

    stages = True

    def __init__(
        self,
        name: str,
        url: str,
        *,
        vocab_size: int,
        max_model_len: int,
        initial_version: int | None = None,
        request_s: float = 120.0,
        push_s: float = 120.0,
        ranks: int = 1,
        partial: Partial = "recompute",
        scores_paused: bool = False,
    ) -> None:
        super().__init__(name, url, request_s)
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.initial_version = initial_version
        self.push_s = push_s
        self.ranks = ranks
        self.partial: Partial = partial
        self.scores_paused = scores_paused

    def check_prompt(self, token_ids: Sequence[int]) -> None:
        """Raises PolicyError for a prompt that is empty or too long, or an id outside the vocabulary."""
        if not 0 < len(token_ids) < self.max_model_len:
            raise PolicyError(
                f"{self.name}: a prompt of {len(token_ids)} tokens; allowed are 1 to {self.max_model_len - 1}"
                f" (the context is {self.max_model_len}, and a completion needs one)"
            )
        if not (min(token_ids) >= 0 and max(token_ids) < self.vocab_size):
            foreign = next(t for t in token_ids if not 0 <= t < self.vocab_size)
            raise PolicyError(f"{self.name}: token id {foreign} is outside the vocabulary, 0 to {self.vocab_size - 1}")

    def room(self, token_ids: Sequence[int], max_tokens: int) -> int:
        """How many of `max_tokens` fit into the context behind a prompt."""
        return min(max_tokens, self.max_model_len - len(token_ids))

    def finite(self, values: Sequence[float]) -> list[float]:
        """`values`, log-probs. Raises EngineError where one is not finite."""
        for value in values:
            if not math.isfinite(value) or value <= IMPOSSIBLE:
                raise EngineError(f"{self.name}: a log-prob of {value}; its weights are probably not finite")
        return list(values)

    def policy_version(self, text: str) -> int:
        """The policy version that a server writes as `text`.

        Raises:
            EngineError: it has none, and there is no `initial_version`.
        """
        if text.isdigit():
            return int(text)
        if text == UNPUSHED and self.initial_version is not None:
            return self.initial_version
        raise EngineError(f"{self.name} has no policy version yet (it reports {text!r}); push weights to it first")

    async def complete(
        self,
        path: str,
        body: object,
        abort: tuple[str, object],
        answer: Answer,
        version: int | None,
        growing: Growing | None,
    ) -> Completion:
        """Stream a completion into `answer`. `abort`: the path and the body that end it on the server.

        Raises:
            Refused: the server does not take such a request.
            Broken: the server went away, or fell silent, in the middle.
        """
        if growing is not None:
            growing.certain = lambda: answer.certain(version)
        try:
            async with self.aborting(*abort):
                await self.stream(path, body, answer.take)
            if not answer.ended:
                raise Disconnected(f"{self.name} at {self.url} ended a completion without a reason")
        except Disconnected as error:
            raise Broken(str(error), answer.certain(version)) from error
        return answer.whole(version)

    def completion(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        spans: Sequence[VersionSpan],
        finish: FinishReason,
        version: int | None,
    ) -> Completion:
        """A whole completion of a request that was sent as `version`. Raises EngineError where it cannot be one."""
        if len(logprobs) != len(token_ids):
            raise EngineError(f"{self.name}: {len(logprobs)} log-probs for {len(token_ids)} tokens")
        edges = [0, *(s.end for s in spans)]
        if [s.start for s in spans] != edges[:-1] or edges[-1] != len(token_ids):
            raise EngineError(f"{self.name}: version spans {tuple(spans)} do not cover {len(token_ids)} tokens")
        filled = tuple(s for s in spans if s.start < s.end)
        return Completion(tuple(token_ids), tuple(self.finite(logprobs)), self._with_kv(filled, version), finish)

    def certain(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        spans: Sequence[VersionSpan],
        version: int | None,
    ) -> Completion:
        """What is left of a completion that broke off: the tokens up to where versions were reported."""
        end = min(len(token_ids), len(logprobs), spans[-1].end if spans else 0)
        kept = [msgspec.structs.replace(s, end=min(s.end, end)) for s in spans if s.start < end]
        return self.completion(token_ids[:end], logprobs[:end], kept, "abort", version)

    def _with_kv(self, spans: tuple[VersionSpan, ...], version: int | None) -> tuple[VersionSpan, ...]:
        """Name the oldest version whose keys and values took part. A prefix cached for `version` may be that old too."""
        if self.partial != "keep_kv" or not spans:
            return spans
        oldest = min(s.version for s in spans) if version is None else min(version, *(s.version for s in spans))
        return tuple(s if s.version == oldest else msgspec.structs.replace(s, kv_version=oldest) for s in spans)


class Answer(ABC):
    """A completion as it arrives. A server's client says how its chunks are read.

    Attributes:
        ended: the server has said why it ended.
        tokens, logprobs, spans: all so far; the spans reach as far as the server has said.
    """

    ended = False

    def __init__(self, engine: HttpEngine) -> None:
        self.engine = engine
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[Span] | None = None

    @abstractmethod
    def take(self, event: bytes) -> None:
        """Add a chunk. Raises EngineError where the server failed, refuses the request, or says something impossible."""

    @abstractmethod
    def reason(self) -> FinishReason:
        """Why it ended. Raises EngineError for a reason that the request did not give the server."""

    def whole(self, version: int | None) -> Completion:
        """The completion, checked."""
        reason = self.reason()
        if self.tokens and not self.spans:
            raise EngineError(
                f"{self.engine.name} reports no weight_versions of what it sampled; vLLM 0.32 or newer is needed,"
                " or SGLang 0.5.23"
            )
        return self.engine.completion(self.tokens, self.logprobs, self._versions(), reason, version)

    def certain(self, version: int | None) -> Completion:
        """The tokens whose versions were reported."""
        return self.engine.certain(self.tokens, self.logprobs, self._versions(), version)

    def _versions(self) -> list[VersionSpan]:
        spans = self.spans or ()
        return [VersionSpan(s.start, s.end, self.engine.policy_version(s.version)) for s in spans]
