"""Client of one server that speaks vLLM's HTTP protocol (vLLM 0.32 or newer, or our own server).

Invariants:
- Request ids are unique; a request whose caller was cancelled, or whose deadline passed, no longer runs on the server by the
  time the caller hears of it.
- Completions are streamed, so that a server that dies takes few tokens with it. Each chunk says the versions of all tokens so
  far where our plugin is loaded; without it only the last one does, and a broken completion keeps nothing.
- One push at a time: what is swapped in is what was received last.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from ..agents.base import Completion, FinishReason
from ..configs.schema import Partial
from ..errors import EngineError
from ..weightsync.plan import GroupPlan, TransferPlan
from .client import STREAM_INTERVAL, UNPUSHED, Answer, HttpEngine, Span
from .engine import Growing, Pressure, Refused, Sampling
from .http import REFUSALS, Disconnected

FINISH: dict[str | None, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}

PAUSE: dict[Partial, dict[str, str]] = {
    "recompute": {"mode": "keep", "clear_cache": "true"},
    "keep_kv": {"mode": "keep", "clear_cache": "false"},
    "abort_resume": {"mode": "abort", "clear_cache": "true"},
}


class _Logprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[Span] | None = None
    finish_reason: str | None = None


class _Error(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: _Error | None = None


class _Scored(msgspec.Struct):
    prompt_logprobs: list[dict[str, _Logprob] | None] | None = None


class _WeightInfo(msgspec.Struct):
    weight_version: str


class VllmEngine(HttpEngine):
    """One server at `url`; see `HttpEngine` for the arguments."""

    _received: int | None = None

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        version: int | None = None,
        growing: Growing | None = None,
    ) -> Completion:
        """Sample a completion; see `Engine.generate`.

        Raises:
            PolicyError: an id outside the vocabulary, or no room in the context for another token.
            Refused: the server does not take such a request.
            Broken: the server went away, or fell silent, in the middle.
        """
        self.check_prompt(token_ids)
        parameters = {
            "max_tokens": self.room(token_ids, sampling.max_tokens),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop_token_ids": sampling.stop_token_ids,
            "ignore_eos": True,  # the tokens that stop are those that the caller names, no others
            "seed": sampling.seed,
            "logprobs": 0,
            "detokenize": False,
            "stream_interval": STREAM_INTERVAL,
        }
        body = self._request_body(token_ids, parameters, uuid.uuid4().hex if version is None else str(version))
        abort = ("/abort_requests", _abort_body(body))
        path = "/inference/v1/generate"
        return await self.complete(path, body | {"stream": True}, abort, _Answer(self), version, growing)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs of `token_ids[1:]`, computed afresh with the weights of this moment; see `Engine.score`."""
        self.check_prompt(token_ids)
        parameters = {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
        body = self._request_body(token_ids, parameters, uuid.uuid4().hex, priority=-1)
        async with self.aborting("/abort_requests", _abort_body(body)):
            text = await self.call("POST", "/inference/v1/generate", body=body)
        scored = self.decode(text, _Scored).prompt_logprobs or []
        if len(scored) != len(token_ids):
            raise EngineError(f"{self.name}: scored {len(scored)} of {len(token_ids)} tokens")
        values = []
        for token, entry in zip(token_ids[1:], scored[1:], strict=True):
            if not entry or str(token) not in entry:
                raise EngineError(f"{self.name}: the scores of a prompt lack token {token}")
            values.append(entry[str(token)].logprob)
        return self.finite(values)

    async def pressure(self) -> Pressure:
        """How busy the server is; see `Engine.pressure`."""
        running, waiting, usage = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"
        values = await self.metrics((running, waiting, usage))
        return Pressure(int(values[running]), int(values[waiting]), values[usage])

    async def swap_seconds(self) -> float:
        """Seconds that the server has spent on loading weights since it started, measured by itself: a swap's own floor."""
        name = "vllm:rl_weight_update_operation_duration_seconds_sum"
        return (await self.metrics((name,), {"operation": "finish"}))[name]

    async def pause(self, mode: Partial) -> None:
        """Stop stepping; see `Engine.pause`."""
        await self.call("POST", "/pause", PAUSE[mode])

    async def resume(self) -> None:
        """Step again; does no harm to a server that is not paused."""
        await self.call("POST", "/resume")

    async def join_group(self, plan: GroupPlan) -> None:
        """Join a broadcast group, dropping the one before; see `Engine.join_group`."""
        body = {"init_info": {"plan": msgspec.to_builtins(plan)}}
        await self.call("POST", "/init_weight_transfer_engine", body=body, seconds=self.push_s)

    async def receive_weights(self, plan: TransferPlan) -> None:
        """Begin to stage one version's tensors; see `Engine.receive_weights`."""
        self._received = None
        try:
            await self.call("POST", "/start_weight_update", seconds=self.push_s)
        except EngineError as error:
            # A push that was never swapped in. Finishing it would load it; the plan that follows replaces what it staged.
            if "already active" not in str(error):
                raise
        body = {"update_info": {"plan": msgspec.to_builtins(plan)}}
        await self.call("POST", "/update_weights", body=body, seconds=self.push_s)
        self._received = plan.version

    async def swap_weights(self, version: int) -> None:
        """Load what was staged and serve it as `version`; call while paused."""
        if self._received != version:  # the server itself would call the tensors of any version by this one
            raise EngineError(f"{self.name} was told to swap in version {version}, but received {self._received}")
        await self.call("POST", "/finish_weight_update", body={"weight_version": str(version)}, seconds=self.push_s)

    async def version(self) -> int | None:
        """The version pushed last; `initial_version` for a server that still has the weights it loaded itself."""
        answer = self.decode(await self.call("GET", "/weight_info"), _WeightInfo)
        if answer.weight_version == UNPUSHED:
            return self.initial_version
        return self.policy_version(answer.weight_version)

    async def wait_ready(self, deadline_s: float) -> None:
        """Return as soon as the server answers `/health`; DeadlineExceeded when it does not within `deadline_s`."""
        await self.answers("/health", deadline_s)

    def _request_body(
        self, token_ids: Sequence[int], parameters: dict[str, Any], salt: str, priority: int = 0
    ) -> dict[str, Any]:
        return {
            "request_id": uuid.uuid4().hex,
            "token_ids": list(token_ids),
            "sampling_params": parameters,
            "priority": priority,  # lower goes first
            "cache_salt": salt,
        }


def _abort_body(body: dict[str, Any]) -> dict[str, list[str]]:
    return {"request_ids": [f"generate-tokens-{body['request_id']}"]}  # the server's own name for it


class _Answer(Answer):
    _finish: str | None = None

    def take(self, event: bytes) -> None:
        """Add a chunk. Raises Disconnected where the server says that it failed, Refused where it will not take the request."""
        chunk, engine = self.engine.decode(event, _Chunk), self.engine
        if chunk.error is not None:
            kind = Refused if chunk.error.code in REFUSALS else Disconnected
            raise kind(f"{engine.name} at {engine.url} failed: {chunk.error.message[:500]}")
        for choice in chunk.choices:
            self.tokens += choice.token_ids or ()
            self.logprobs += [entry.logprob for entry in (choice.logprobs and choice.logprobs.content) or ()]
            if choice.weight_versions is not None:
                self.spans = choice.weight_versions
            if choice.finish_reason is not None:
                self._finish, self.ended = choice.finish_reason, True

    def reason(self) -> FinishReason:
        if self._finish not in FINISH:
            raise EngineError(f"{self.engine.name}: unknown finish reason {self._finish!r}")
        return FINISH[self._finish]
