"""Client of one SGLang server (0.5.23), speaking its own HTTP protocol.

Invariants:
- Request ids are unique and of one length, because SGLang aborts by prefix. A request whose caller was cancelled, or whose deadline
  passed, ends on the server: its connection is closed, which also ends one that waits for the server to resume, and it is aborted,
  which ends one that computes.
- Completions are streamed, so that a server that dies takes few tokens with it. Each chunk says the versions of all tokens so
  far where our plugin is loaded; without it only the last one does, and a broken completion keeps nothing.
- Every request names what its cached prefix may be shared with. SGLang itself would share prefixes across weights.
- One push at a time, through one client: how it paused decides whether a swap may drop the cache.
"""

from __future__ import annotations

import base64
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from ..agents.base import Completion, FinishReason
from ..configs.schema import Partial
from ..errors import EngineError
from ..weightsync.plan import GroupPlan, TransferPlan
from ..weightsync.sglang_plugin import COMMAND, LOADER
from .client import UNPUSHED, Answer, HttpEngine, Span
from .engine import Growing, Pressure, Refused, Sampling
from .http import REFUSALS

CANARY_PRIORITY = 1
"""Of a score; higher goes first, and completions have 0."""

SUPPORT = 4000
"""Largest number of tokens that one is drawn from where the distribution is truncated: beyond 4096, SGLang does not say by which
distribution it drew."""

FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}

PAUSE: dict[Partial, str] = {"recompute": "retract", "keep_kv": "in_place", "abort_resume": "abort"}


class _Finish(msgspec.Struct):
    type: str
    matched: int | str | list[int] | None = None
    message: str | None = None
    status_code: int | None = None


class _Meta(msgspec.Struct):
    completion_tokens: int = 0
    finish_reason: _Finish | None = None
    weight_versions: list[Span] | None = None
    output_token_logprobs: list[tuple[float | None, int, str | None]] | None = None
    output_token_sampling_logprobs: list[float] | None = None
    input_token_logprobs: list[tuple[float | None, int, str | None]] | None = None


class _Error(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class _Chunk(msgspec.Struct):
    output_ids: list[int] = []
    meta_info: _Meta | None = None
    error: _Error | None = None


class _ModelInfo(msgspec.Struct):
    weight_version: str


class _Load(msgspec.Struct):
    num_running_reqs: int
    num_waiting_reqs: int
    token_usage: float


class _Loads(msgspec.Struct):
    loads: list[_Load]


class SglangEngine(HttpEngine):
    """One server at `url`; see `HttpEngine` for the arguments."""

    _flush = True

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        version: int | None = None,
        growing: Growing | None = None,
    ) -> Completion:
        """Sample a completion; see `Engine.generate`. A seed has no effect on CPU.

        Raises:
            PolicyError: an id outside the vocabulary, or no room in the context for another token.
            Refused: the server does not take such a request.
            Broken: the server went away, or fell silent, in the middle.
        """
        self.check_prompt(token_ids)
        truncated = sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0)
        parameters: dict[str, Any] = {
            "max_new_tokens": self.room(token_ids, sampling.max_tokens),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k if sampling.top_k > 0 else -1,
            "stop_token_ids": sampling.stop_token_ids,
            "ignore_eos": not sampling.stop_token_ids,  # SGLang takes it to mean these too
            "sampling_seed": sampling.seed,
        }
        if truncated:
            parameters["top_k"] = min(sampling.top_k if sampling.top_k > 0 else SUPPORT, self.vocab_size, SUPPORT)
        body = self._request_body(token_ids, parameters, uuid.uuid4().hex if version is None else str(version))
        body |= {"stream": True, "return_sampling_mask": truncated}
        abort = ("/abort_request", {"rid": body["rid"]})
        return await self.complete("/generate", body, abort, _Answer(self, sampling, truncated), version, growing)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs of `token_ids[1:]`, computed afresh with the weights of this moment; see `Engine.score`."""
        self.check_prompt(token_ids)
        body = self._request_body(token_ids, {"max_new_tokens": 0, "temperature": 1.0}, uuid.uuid4().hex)
        body |= {"logprob_start_len": 0, "priority": CANARY_PRIORITY}
        async with self.aborting("/abort_request", {"rid": body["rid"]}):
            text = await self.call("POST", "/generate", body=body)
        meta = self.decode(text, _Chunk).meta_info
        scored = (meta and meta.input_token_logprobs) or []
        if [token for _, token, _ in scored] != list(token_ids):
            raise EngineError(f"{self.name}: scored {len(scored)} tokens, and not the {len(token_ids)} it was given")
        return self.finite([float("nan") if value is None else value for value, _, _ in scored[1:]])

    async def pressure(self) -> Pressure:
        """How busy the server is; see `Engine.pressure`. Requests that came while it was paused are not counted yet."""
        loads = self.decode(await self.call("GET", "/v1/loads", {"include": "core"}, reuse=True), _Loads).loads
        if not loads:
            raise EngineError(f"{self.name} at {self.url} does not say how busy it is")
        return Pressure(
            sum(load.num_running_reqs for load in loads),
            sum(load.num_waiting_reqs for load in loads),
            max(load.token_usage for load in loads),
        )

    async def pause(self, mode: Partial) -> None:
        """Stop stepping; see `Engine.pause`."""
        self._flush = mode != "keep_kv"
        await self.call("POST", "/pause_generation", body={"mode": PAUSE[mode]})

    async def resume(self) -> None:
        """Step again; does no harm to a server that is not paused."""
        await self.call("POST", "/continue_generation", body={})

    async def join_group(self, plan: GroupPlan) -> None:
        """Begin to join a broadcast group, dropping the one before. The server meets the group in a thread and goes on
        generating; one that fails to is told by the next `receive_weights`."""
        await self._tell({"join": plan})

    async def receive_weights(self, plan: TransferPlan) -> None:
        """Begin to stage one version's tensors; see `Engine.receive_weights`."""
        await self._tell({"begin": plan})

    async def swap_weights(self, version: int) -> None:
        """Load what was staged and serve it as `version`; call while paused."""
        await self._update({"load_format": LOADER, "weight_version": str(version), "flush_cache": self._flush}, ())

    async def version(self) -> int | None:
        """The version pushed last; `initial_version` for a server that still has the weights it loaded itself."""
        answer = self.decode(await self.call("GET", "/model_info"), _ModelInfo)
        if answer.weight_version == UNPUSHED:
            return self.initial_version
        return self.policy_version(answer.weight_version)

    async def wait_ready(self, deadline_s: float) -> None:
        """Return as soon as the server answers `/health`; DeadlineExceeded when it does not within `deadline_s`."""
        await self.answers("/health", deadline_s)

    def _request_body(self, token_ids: Sequence[int], parameters: dict[str, Any], share: str) -> dict[str, Any]:
        return {
            "rid": uuid.uuid4().hex,
            "input_ids": list(token_ids),
            "sampling_params": parameters,
            "return_logprob": True,
            "extra_key": share,
        }

    async def _tell(self, command: dict[str, GroupPlan | TransferPlan]) -> None:
        await self._update({"load_format": COMMAND, "flush_cache": False}, (msgspec.json.encode(command),))

    async def _update(self, body: dict[str, Any], payload: Sequence[bytes]) -> None:
        body["serialized_named_tensors"] = [base64.b64encode(data).decode() for data in payload]
        await self.call("POST", "/update_weights_from_tensor", body=body, seconds=self.push_s)


class _Answer(Answer):
    _finish: _Finish | None = None

    def __init__(self, engine: HttpEngine, sampling: Sampling, truncated: bool) -> None:
        super().__init__(engine)
        self._stops = sampling.stop_token_ids
        self._truncated = truncated

    def take(self, event: bytes) -> None:
        """Add a chunk. Raises EngineError where the server refuses the request or says something impossible."""
        chunk, engine = self.engine.decode(event, _Chunk), self.engine
        if chunk.error is not None or chunk.meta_info is None:
            reason = chunk.error.message[:500] if chunk.error else "a chunk without meta_info"
            raise _refusal(chunk.error and chunk.error.code)(
                f"{engine.name} at {engine.url} refused a request: {reason}"
            )
        meta = chunk.meta_info
        new = meta.completion_tokens - len(self.tokens)
        if new > 0:  # the end of what was aborted in the queue brings none
            self.tokens += chunk.output_ids[-new:]
            if self._truncated:
                self.logprobs += (meta.output_token_sampling_logprobs or [])[-new:]
            else:
                drawn = (meta.output_token_logprobs or [])[-new:]
                self.logprobs += [float("nan") if value is None else value for value, _, _ in drawn]
        if meta.weight_versions is not None:
            self.spans = meta.weight_versions
        if meta.finish_reason is not None:
            self._finish, self.ended = meta.finish_reason, True

    def reason(self) -> FinishReason:
        name, finish = self.engine.name, self._finish
        if finish is None or finish.type not in FINISH:
            raise EngineError(f"{name}: unknown finish reason {finish!r}")
        if finish.status_code is not None:
            raise _refusal(finish.status_code)(f"{name} refused a request: {finish.status_code} {finish.message}")
        if finish.type == "stop" and finish.matched not in self._stops:
            raise EngineError(
                f"{name} stopped at {finish.matched!r}, which nobody asked for; its weights may be broken"
            )
        return FINISH[finish.type]


def _refusal(status: int | str | None) -> type[EngineError]:
    """What an answer of this status is: about the request itself, or about the server."""
    return Refused if status in REFUSALS else EngineError
