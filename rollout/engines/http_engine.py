"""The engine contract: what Slipstream asks of an inference server of any kind, and a completion as it arrives from one. What a
weight push asks is `weightsync.plan.ReplicaControl`.

Invariants:
- Token ids in, token ids out. Neither side tokenizes.
- A completion is checked where it arrives, before any of its tokens counts: against what is known without the replica, which are
  the request, the vocabulary, and the versions that the learner made (`VersionClock`). One that is false in one point is refused
  as a whole, as a FalseReply. A check costs a few passes in C over lists: no Python code runs for each token.
- The server reports the spans; the client never guesses them.
- Prompts that would kill a server (most servers do not check ids) are refused before they are sent.
- A request has a unique id. One whose caller was cancelled, or whose deadline passed, is aborted before the call ends.
- Completions are streamed: the death of a server costs few tokens. With our plugin each chunk has the versions of all tokens
  so far; without it only the last one does. An interrupted completion keeps the tokens whose versions were reported, no others.
- Only requests with an equal salt share cached prefixes: without it servers share them across weights.
"""

from __future__ import annotations

import math
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
from numpy.typing import NDArray

from ...agents.base import Completion, FinishReason, RequestTiming
from ...buffer.trajectory import LOGPROB_LIMIT, VersionSpan
from ...common.images import PromptImage
from ...common.routed_experts import RoutedExperts, RouterShape
from ...common.spans import time_of_day
from ...configs.schema import Partial
from ...errors import EngineError, PolicyError
from ...weightsync.plan import ReplicaControl
from .access import ServerAccess
from .base import (
    IMPOSSIBLE,
    UNPUSHED,
    EngineFailure,
    EngineLoad,
    FalseReply,
    OutputSpan,
    PartialCompletion,
    SamplingParams,
    VersionClock,
)
from .expert_codec import record
from .http_client import Disconnected, HttpClient

VERSION_DIGITS = 10  # of a version: it is an int32 in the learner
FINISH: dict[str | None, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
Body = dict[str, Any]  # a request in the JSON of its server


class _WeightVersion(msgspec.Struct):
    weight_version: str


class HttpEngine(HttpClient, ReplicaControl):
    """A client of one replica; subclasses speak the protocol of one kind of server. Every method raises EngineError, or
    DeadlineExceeded when the server does not answer. `close` ends completions in flight with EngineFailure and aborts them.

    Args:
        vocab_size: token ids must lie in `[0, vocab_size)`.
        max_model_len: tokens of a prompt and its completion together.
        initial_version: the version of the weights that a server loaded itself; None refuses their completions, because versions
            in a trajectory must not be guessed.
        request_s, push_s: longest wait for a completion or a control call, and for one call of a weight push.
        partial: what weight pushes do with requests under way; with `keep_kv` spans name the version of the KV used.
        ranks, scores_paused: see `ReplicaControl`.
        sleeps: see there. A server that sends nothing of a completion may sleep then, and fails only after all of `request_s`.
        access: see `HttpClient`; the token for control where weights are pushed.
        versions: which versions exist; None for a client that asks for no completions, and for one that takes any version.
        routers: those of the model, of a server that records which experts they choose; None for one that does not.
        takes_images: whether the server takes the images of a prompt with its token ids; our own and vLLM's do, for a model that
            sees some.
    """

    generate_path: ClassVar[str]
    version_path: ClassVar[str]
    stream_type: ClassVar[type[CompletionStream]]

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
        sleeps: bool = False,
        access: ServerAccess | None = None,
        versions: VersionClock | None = None,
        routers: RouterShape | None = None,
        takes_images: bool = False,
    ) -> None:
        super().__init__(name, url, request_s, access)
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.initial_version = initial_version
        self.push_s = push_s
        self.ranks = ranks
        self.partial: Partial = partial
        self.scores_paused = scores_paused
        self.sleeps = sleeps
        if sleeps:
            self.first_s = self.idle_s = request_s
        self.versions = versions
        self.routers = routers
        self.takes_images = takes_images

    @abstractmethod
    def completion_request(
        self, token_ids: Sequence[int], sampling: SamplingParams, salt: str, images: Sequence[PromptImage] = ()
    ) -> Body:
        """The body of a streamed completion; of `images` only where the client `takes_images`."""

    @abstractmethod
    def score_request(self, token_ids: Sequence[int], salt: str) -> Body:
        """The body of a request for the log-probs of a prompt. It goes before completions."""

    @abstractmethod
    def scores(self, answer: bytes, token_ids: Sequence[int]) -> list[float]:
        """The log-probs of `token_ids[1:]` in the server's answer; NaN for those it did not compute."""

    @abstractmethod
    def abort_request(self, body: Body) -> tuple[str, Body]:
        """Path and body of the request that aborts `body`."""

    @abstractmethod
    async def get_load(self) -> EngineLoad: ...

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        version: int | None = None,
        growing: PartialCompletion | None = None,
        images: Sequence[PromptImage] = (),
    ) -> Completion:
        """Sample a completion; one that `pause("abort_resume")` or a drain cut short ends with `abort`.

        `version` is the version that the caller expects: only requests with an equal one share cached prefixes, so that none uses
        keys and values of other weights; without it no prefix is shared. When the caller is cancelled, the request ends on the
        server; the tokens that arrived before that, or before a deadline, are in `growing`.

        Raises:
            PolicyError: an id outside the vocabulary, no room in the context for another token, or `images` for a server that takes
                none.
            RequestRejected: the server refuses the request.
            EngineFailure: the server failed, or stopped sending, in the middle.
            FalseReply: the completion is impossible.
        """
        self._check_prompt(token_ids)
        limited = min(sampling.max_tokens, self.max_model_len - len(token_ids))
        sampling = msgspec.structs.replace(sampling, max_tokens=limited)
        if images and not self.takes_images:
            raise PolicyError(f"{self.name} takes no images; see rollout.engine.kind")
        salt = uuid.uuid4().hex if version is None else str(version)
        body = self.completion_request(token_ids, sampling, salt, images)
        answer = self.stream_type(self, sampling, len(token_ids))
        if growing is not None:
            growing.certain = lambda: answer.certain(version)
        try:
            async with self.aborting(*self.abort_request(body)):
                await self.stream(self.generate_path, body, answer.receive)
            if answer.finish is None:
                raise Disconnected(f"{self.name} at {self.url} ended a completion without a reason")
        except Disconnected as error:
            await self._require_version(answer.newest())
            raise EngineFailure(str(error), answer.certain(version)) from error
        if growing is not None:
            growing.ended = True
        await self._require_version(answer.newest())
        return answer.whole(version)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        self._check_prompt(token_ids)
        body = self.score_request(token_ids, uuid.uuid4().hex)
        async with self.aborting(*self.abort_request(body)):
            answer = await self.call("POST", self.generate_path, body=body)
        scores = self.scores(answer, token_ids)
        check_logprobs(self.name, scores)
        return scores

    async def version(self) -> int | None:
        """The version pushed last; `initial_version` for a server that still has the weights it loaded itself."""
        version = self.decode(await self.call("GET", self.version_path), _WeightVersion).weight_version
        return self.initial_version if version == UNPUSHED else self.policy_version(version)

    async def wait_ready(self, deadline_s: float) -> None:
        """Return as soon as the server answers; DeadlineExceeded when it does not within `deadline_s`."""
        await self.wait_for_answer("/health", deadline_s)

    def policy_version(self, text: str) -> int:
        """The policy version that a server reports as `text`. Raises EngineError where it has none, FalseReply where `text` is
        none."""
        if text.isascii() and text.isdecimal() and len(text) <= VERSION_DIGITS:
            return int(text)
        if text == UNPUSHED and self.initial_version is not None:
            return self.initial_version
        if text == UNPUSHED:
            raise EngineError(f"{self.name} has no policy version yet (it reports {text!r}); push weights to it first")
        raise FalseReply(f"{self.name} reports version {text[:100]!r}, which is none")

    async def _require_version(self, version: int) -> None:
        """Raises FalseReply where the learner has not made `version`."""
        if self.versions is not None and not await self.versions.exists(version):
            newest = self.versions.newest
            raise FalseReply(f"{self.name}: it sampled with version {version}, the newest that exists is {newest}")

    def _check_prompt(self, token_ids: Sequence[int]) -> None:
        """Raises PolicyError for a prompt that is empty or too long, or an id outside the vocabulary."""
        if not 0 < len(token_ids) < self.max_model_len:
            raise PolicyError(
                f"{self.name}: a prompt of {len(token_ids)} tokens; allowed are 1 to {self.max_model_len - 1}"
                f" (the context is {self.max_model_len}, and a completion needs one)"
            )
        if not (min(token_ids) >= 0 and max(token_ids) < self.vocab_size):
            foreign = next(t for t in token_ids if not 0 <= t < self.vocab_size)
            raise PolicyError(f"{self.name}: token id {foreign} is outside the vocabulary, 0 to {self.vocab_size - 1}")


class CompletionStream(ABC):
    """A completion as it arrives: all tokens, log-probs and spans so far, which end where the server has reported versions, and the
    finish reason once there is one. Subclasses decode the chunks of one kind of server."""

    finish: str | None = None

    def __init__(self, engine: HttpEngine, sampling: SamplingParams, prompt: int) -> None:
        self.engine = engine
        self.sampling = sampling
        self.experts: list[NDArray[Any]] = []  # of positions from `experts_from` of the request on
        self._prompt = prompt
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.spans: Sequence[OutputSpan] | None = None
        self.cached: int | None = None  # tokens of the prompt that the server had in its prefix cache, where it says so
        self._sent_time, self._sent = time_of_day(), time.perf_counter()
        self._first: float | None = None
        self._last = self._sent

    def receive(self, event: bytes) -> None:
        """Add a chunk, and note when it came. Raises as `add_chunk`."""
        before = len(self.tokens)
        self.add_chunk(event)
        check_count(self.engine.name, len(self.tokens), self.sampling)
        if len(self.tokens) > before:
            self._last = time.perf_counter()
            self._first = self._last if self._first is None else self._first

    @abstractmethod
    def add_chunk(self, event: bytes) -> None:
        """Add a chunk. Raises EngineError where the server failed, refuses the request, or the chunk is invalid."""

    def reason(self) -> FinishReason:
        """The finish reason. Raises FalseReply for one that the request does not allow."""
        if self.finish not in FINISH:
            raise FalseReply(f"{self.engine.name}: unknown finish reason {self.finish!r}")
        return FINISH[self.finish]

    def whole(self, version: int | None) -> Completion:
        """The checked completion of a request that was sent with `version`. Raises FalseReply where it is impossible."""
        reason, name, count = self.reason(), self.engine.name, len(self.tokens)
        if count and not self.spans:
            raise FalseReply(
                f"{name} reports no weight_versions of what it sampled; vLLM 0.32 or newer is needed, or SGLang 0.5.23"
            )
        if len(self.logprobs) != count:
            raise FalseReply(f"{name}: {len(self.logprobs)} log-probs for {count} tokens")
        spans = self._versions()
        if spans and spans[-1].end != count:
            raise FalseReply(f"{name}: version spans {str(spans)[:500]} do not cover {count} tokens")
        return self._completion(spans, count, reason, version)

    def certain(self, version: int | None) -> Completion:
        """The part of an interrupted completion whose versions were reported, and are known to exist. Raises FalseReply."""
        spans, clock = self._versions(), self.engine.versions
        if clock is not None:
            spans = [span for span in spans if span.version <= clock.newest]
        end = min(len(self.tokens), len(self.logprobs), spans[-1].end if spans else 0)
        return self._completion(spans, end, "abort", version)

    def newest(self) -> int:
        """The newest version that was reported, 0 where none was. Raises FalseReply."""
        return max((span.version for span in self._versions()), default=0)

    def _versions(self) -> list[VersionSpan]:
        spans = self.spans or ()
        return [VersionSpan(s.start, s.end, self.engine.policy_version(s.version)) for s in spans]

    def _completion(
        self, spans: Sequence[VersionSpan], end: int, finish: FinishReason, version: int | None
    ) -> Completion:
        """The first `end` tokens. With kept KV each span names the oldest version whose keys and values were used; a cached prefix
        for `version` counts, too."""
        name = self.engine.name
        starts, ends = [s.start for s in spans], [s.end for s in spans]
        if starts != [0, *ends][: len(spans)] or ends != sorted(ends):
            raise FalseReply(f"{name}: version spans {str(spans)[:500]} do not cover {end} tokens")
        spans = [msgspec.structs.replace(s, end=min(s.end, end)) for s in spans if s.start < min(s.end, end)]
        if self.engine.partial == "keep_kv" and spans:
            oldest = min(s.version for s in spans) if version is None else min(version, *(s.version for s in spans))
            spans = [s if s.version == oldest else msgspec.structs.replace(s, kv_version=oldest) for s in spans]
        tokens, logprobs = tuple(self.tokens[:end]), tuple(self.logprobs[:end])
        done = Completion(tokens, logprobs, tuple(spans), finish, self._timing(), self._recorded(end, finish))
        return check_completion(name, done, self.sampling, self.engine.vocab_size, version)

    def _recorded(self, end: int, finish: FinishReason) -> RoutedExperts | None:
        """Of the prompt and its first `end` sampled tokens; None where they are not wanted."""
        start = self.sampling.experts_from
        if start is None or self.engine.routers is None:
            return None
        return record(self.engine.name, self.experts, start, self._prompt + end, whole=finish != "abort")

    def _timing(self) -> RequestTiming | None:
        """None before the first token. The replica's name is that of its engine client; the router adds its own queue."""
        if self._first is None:
            return None
        return RequestTiming(
            asked=self._sent_time,
            queued_s=0.0,
            first_s=self._first - self._sent,
            decode_s=self._last - self._first,
            cached=self.cached,
            replica=self.engine.name,
            temperature=self.sampling.temperature,
        )


def check_completion(
    name: str, done: Completion, sampling: SamplingParams, vocab_size: int, oldest: int | None
) -> Completion:
    """`done`, a completion or the part of one that arrived from replica `name`; `oldest` is a version that the replica had proven
    before it got the request. Raises FalseReply."""
    tokens, spans = done.token_ids, done.version_spans
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        foreign = next(token for token in tokens if not 0 <= token < vocab_size)
        raise FalseReply(f"{name}: it sampled token id {foreign}, outside the vocabulary, 0 to {vocab_size - 1}")
    check_count(name, len(tokens), sampling)
    check_logprobs(name, done.logprobs)
    versions = [span.version for span in spans]
    if versions != sorted(versions):
        raise FalseReply(f"{name}: the versions of a reply fall: {versions[:10]}")
    if versions and oldest is not None and versions[0] < oldest:
        raise FalseReply(f"{name}: it sampled with version {versions[0]}, and had taken version {oldest} before")
    if done.finish_reason != "abort" and not tokens:
        raise FalseReply(f"{name}: a completion ended by {done.finish_reason!r} without a token")
    if done.finish_reason == "stop" and tokens[-1] not in sampling.stop_token_ids:
        raise FalseReply(f"{name}: it stopped at token id {tokens[-1]}, which is no stop token of the request")
    return done


def check_count(name: str, tokens: int, sampling: SamplingParams) -> None:
    """Raises FalseReply where a reply has more tokens than its request allows."""
    if tokens > sampling.max_tokens:
        raise FalseReply(f"{name}: it sent {tokens} tokens of the {sampling.max_tokens} that were asked for")


def check_logprobs(name: str, logprobs: Sequence[float]) -> None:
    """Raises FalseReply where one is no log-prob in nats: not finite, or positive."""
    if not logprobs:
        return
    # A sum with an infinity or a NaN is not finite; without one, minimum and maximum are reliable.
    if not (math.isfinite(sum(logprobs)) and min(logprobs) > IMPOSSIBLE and max(logprobs) <= LOGPROB_LIMIT):
        wrong = next((v for v in logprobs if not IMPOSSIBLE < v <= LOGPROB_LIMIT), sum(logprobs))
        why = "a probability is at most 1" if wrong > LOGPROB_LIMIT else "its weights are probably not finite"
        raise FalseReply(f"{name}: a log-prob of {wrong}; {why}")
