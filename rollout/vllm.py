"""Client of one vLLM server (0.32 or newer), speaking its own HTTP protocol: `Engine` for workers, `Replica` for the learner.

Invariants:
- Request ids are unique; a request whose caller was cancelled, or whose deadline passed, no longer runs on the server by the
  time the caller hears of it.
- A completion is checked before anybody sees it: one finite log-prob per token, spans that cover every token.
- Nothing is tried twice here. A server that refuses, resets or fails is an EngineError at once; the router tries another.
- What kills a server (it runs without a tokenizer, and so checks no ids itself) is refused before it is sent.
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections.abc import Sequence
from typing import Any, TypeVar

import aiohttp
import msgspec

from ..agents.base import Completion, FinishReason
from ..buffer.trajectory import VersionSpan
from ..errors import DeadlineExceeded, EngineError, PolicyError, within
from ..weightsync.plan import GroupPlan, TransferPlan
from .engine import PauseMode, Sampling

T = TypeVar("T")

logger = logging.getLogger(__name__)

UNPUSHED = "default"
"""What vLLM calls the version of weights that it loaded itself."""

IMPOSSIBLE = -9999.0
"""What vLLM writes for a log-prob that is minus infinity or not a number."""

ABORT_S = 5.0
"""Longest wait for the server to confirm an abort; it takes milliseconds."""

KEEPALIVE_S = 3.0
"""Idle connections are dropped before the server (after 5 s) does: a request must not meet a closing socket."""

FINISH: dict[str | None, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Logprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[_Span] | None = None
    finish_reason: str | None = None


class _Generated(msgspec.Struct):
    choices: list[_Choice]
    prompt_logprobs: list[dict[str, _Logprob] | None] | None = None


class _WeightInfo(msgspec.Struct):
    weight_version: str


class VllmEngine:
    """One server at `url`.

    Args:
        name: what errors and reports call it.
        url: `http://host:port`.
        vocab_size: token ids must lie in `[0, vocab_size)`.
        max_model_len: tokens of a prompt and its completion together.
        initial_version: the version that the weights a server loaded itself go by; None refuses their completions, because a
            trajectory must not be labelled by guesswork.
        request_s: longest wait for a completion or a control call.
        push_s: longest wait for one call of a weight push.
    """

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
    ) -> None:
        self.name = name
        self.url = url.rstrip("/")
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.initial_version = initial_version
        self.request_s = request_s
        self.push_s = push_s
        self._opened: aiohttp.ClientSession | None = None

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, salt: str = "") -> Completion:
        """Sample a completion; see `Engine.generate`.

        Raises:
            PolicyError: an id outside the vocabulary, or no room in the context for another token.
        """
        self._check_prompt(token_ids)
        parameters = {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop_token_ids": sampling.stop_token_ids,
            "ignore_eos": True,  # the tokens that stop are those that the caller names, no others
            "seed": sampling.seed,
            "logprobs": 0,
            "detokenize": False,
        }
        choice = (await self._generate(token_ids, parameters, salt)).choices[0]
        return self._completion(choice)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs of `token_ids[1:]`, computed afresh with the weights of this moment; see `Engine.score`."""
        self._check_prompt(token_ids)
        parameters = {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
        scored = (await self._generate(token_ids, parameters, salt=uuid.uuid4().hex, priority=-1)).prompt_logprobs or []
        if len(scored) != len(token_ids):
            raise EngineError(f"{self.name}: scored {len(scored)} of {len(token_ids)} tokens")
        values = []
        for token, entry in zip(token_ids[1:], scored[1:], strict=True):
            if not entry or str(token) not in entry:
                raise EngineError(f"{self.name}: the scores of a prompt lack token {token}")
            values.append(entry[str(token)].logprob)
        return self._finite(values)

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop stepping, drop all cached keys and values; see `Engine.pause`."""
        await self._call("POST", "/pause", {"mode": mode, "clear_cache": "true"})

    async def resume(self) -> None:
        """Step again; does no harm to a server that is not paused."""
        await self._call("POST", "/resume")

    async def join_group(self, plan: GroupPlan) -> None:
        """Join a broadcast group, dropping the one before; see `Engine.join_group`."""
        body = {"init_info": {"plan": msgspec.to_builtins(plan)}}
        await self._call("POST", "/init_weight_transfer_engine", body=body, seconds=self.push_s)

    async def receive_weights(self, plan: TransferPlan) -> None:
        """Stage one version's tensors; see `Engine.receive_weights`."""
        try:
            await self._call("POST", "/start_weight_update", seconds=self.push_s)
        except EngineError as error:
            if "already active" not in str(error):
                raise
            # A learner died between staging and loading. Joining our group dropped what it staged: finishing loads nothing.
            await self._call("POST", "/finish_weight_update", seconds=self.push_s)
            await self._call("POST", "/start_weight_update", seconds=self.push_s)
        body = {"update_info": {"plan": msgspec.to_builtins(plan)}}
        await self._call("POST", "/update_weights", body=body, seconds=self.push_s)

    async def swap_weights(self, version: int) -> None:
        """Load what was staged and serve it as `version`; call while paused."""
        await self._call("POST", "/finish_weight_update", body={"weight_version": str(version)}, seconds=self.push_s)

    async def version(self) -> int | None:
        """The version pushed last; `initial_version` for a server that still has the weights it loaded itself."""
        answer = self._decode(await self._call("GET", "/weight_info"), _WeightInfo)
        return self.initial_version if answer.weight_version == UNPUSHED else self._version(answer.weight_version)

    async def wait_ready(self, deadline_s: float) -> None:
        """Return as soon as the server answers `/health`; DeadlineExceeded when it does not within `deadline_s`."""

        async def until_healthy() -> None:
            while True:
                try:
                    await self._call("GET", "/health", seconds=deadline_s)
                    return
                except EngineError:
                    await asyncio.sleep(0.1)  # nothing tells us when a foreign server starts to listen

        await within(deadline_s, until_healthy(), who=self.name, waits_for="its server to start", hint="see its log")

    async def close(self) -> None:
        """Close the connections. The client may be used again afterwards."""
        session, self._opened = self._opened, None
        if session is not None:
            await session.close()

    def _check_prompt(self, token_ids: Sequence[int]) -> None:
        if not 0 < len(token_ids) < self.max_model_len:
            raise PolicyError(
                f"{self.name}: a prompt of {len(token_ids)} tokens; allowed are 1 to {self.max_model_len - 1}"
                f" (the context is {self.max_model_len}, and a completion needs one)"
            )
        if not (min(token_ids) >= 0 and max(token_ids) < self.vocab_size):
            foreign = next(t for t in token_ids if not 0 <= t < self.vocab_size)
            raise PolicyError(f"{self.name}: token id {foreign} is outside the vocabulary, 0 to {self.vocab_size - 1}")

    async def _generate(
        self, token_ids: Sequence[int], parameters: dict[str, Any], salt: str, priority: int = 0
    ) -> _Generated:
        request_id = uuid.uuid4().hex
        body: dict[str, Any] = {"request_id": request_id, "token_ids": list(token_ids), "sampling_params": parameters}
        body["priority"] = priority  # lower goes first
        if salt:
            body["cache_salt"] = salt
        try:
            text = await self._call("POST", "/inference/v1/generate", body=body, reuse=True)
        except (asyncio.CancelledError, DeadlineExceeded):
            await self._abort(request_id)
            raise
        answer = self._decode(text, _Generated)
        if len(answer.choices) != 1:
            raise EngineError(f"{self.name}: {len(answer.choices)} completions for one request")
        return answer

    async def _abort(self, request_id: str) -> None:
        body = {"request_ids": [f"generate-tokens-{request_id}"]}  # the server's own name for it
        try:
            await self._call("POST", "/abort_requests", body=body, seconds=ABORT_S)
        except (EngineError, DeadlineExceeded) as error:  # the caller already has a better one, or was cancelled
            logger.warning("could not abort a request: %s", error)

    def _completion(self, choice: _Choice) -> Completion:
        tokens = choice.token_ids or []
        content = (choice.logprobs.content if choice.logprobs else None) or []
        logprobs = self._finite([entry.logprob for entry in content])
        if len(logprobs) != len(tokens):
            raise EngineError(f"{self.name}: {len(logprobs)} log-probs for {len(tokens)} tokens")
        spans = tuple(VersionSpan(s.start, s.end, self._version(s.version)) for s in choice.weight_versions or ())
        edges = [0, *(s.end for s in spans)]
        if [s.start for s in spans] != edges[:-1] or edges[-1] != len(tokens):
            raise EngineError(f"{self.name}: version spans {spans} do not cover {len(tokens)} tokens")
        if choice.finish_reason not in FINISH:
            raise EngineError(f"{self.name}: unknown finish reason {choice.finish_reason!r}")
        return Completion(tuple(tokens), tuple(logprobs), spans, FINISH[choice.finish_reason])

    def _version(self, text: str) -> int:
        if text.isdigit():
            return int(text)
        if text == UNPUSHED and self.initial_version is not None:
            return self.initial_version
        raise EngineError(f"{self.name} has no policy version yet (it reports {text!r}); push weights to it first")

    def _finite(self, values: list[float]) -> list[float]:
        for value in values:
            if not math.isfinite(value) or value <= IMPOSSIBLE:
                raise EngineError(f"{self.name}: a log-prob of {value}; its weights are probably not finite")
        return values

    def _decode(self, text: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(text, type=kind)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise EngineError(f"{self.name} at {self.url} answered something impossible: {error}") from error

    async def _call(
        self,
        method: str,
        path: str,
        query: dict[str, str] | None = None,
        *,
        body: dict[str, Any] | None = None,
        seconds: float | None = None,
        reuse: bool = False,
    ) -> bytes:
        """One request. Without `reuse` on a connection of its own: after an error the server closes the one it came on."""
        headers = {"Content-Type": "application/json"} | ({} if reuse else {"Connection": "close"})
        data = msgspec.json.encode(body) if body is not None else None

        async def exchange() -> bytes:
            request = self._session().request(method, self.url + path, params=query, data=data, headers=headers)
            try:
                async with request as response:
                    text = await response.read()
            except (aiohttp.ClientError, OSError) as error:
                raise EngineError(
                    f"{self.name} at {self.url} is not reachable: {error or type(error).__name__}"
                ) from error
            if response.status != 200:
                reason = text.decode(errors="replace").strip()[:500]
                raise EngineError(f"{self.name} at {self.url}{path} answered {response.status}: {reason}")
            return text

        hint = "see the server's log; rollout.request_s and weightsync.push_s set the deadlines"
        return await within(
            seconds or self.request_s, exchange(), who=self.name, waits_for=f"answer to {path}", hint=hint
        )

    def _session(self) -> aiohttp.ClientSession:
        if self._opened is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
            self._opened = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        return self._opened
