"""Client of one SGLang server (0.5.23), speaking its own HTTP protocol.

Invariants:
- Request ids have one length, because SGLang aborts by prefix. Closing its connection ends a request that waits for a resume, an
  abort ends one that computes.
- One push at a time, through one client: the mode of the pause decides whether a swap drops the cache.
"""

from __future__ import annotations

import base64
import uuid
from collections.abc import Sequence

import msgspec

from ....agents.base import FinishReason
from ....common.bounded import Count, Number
from ....common.images import PromptImage
from ....configs.schema import Partial
from ....errors import EngineError
from ....weightsync.plan import GroupPlan, TransferPlan
from ..base import EngineLoad, FalseReply, OutputSpan, RequestRejected, SamplingParams, ServerError
from ..http_client import REFUSALS
from ..http_engine import Body, CompletionStream, HttpEngine
from .plugin import COMMAND, LOADER

CANARY_PRIORITY = 1  # priority of a score; higher goes first, and completions have 0
SUPPORT = 4000  # largest top-k: beyond 4096, SGLang does not report the distribution that it sampled from
PAUSE: dict[Partial, str] = {"recompute": "retract", "keep_kv": "in_place", "abort_resume": "abort"}


_TokenLogprob = tuple[float | None, int, str | None]


class _Finish(msgspec.Struct):
    type: str
    matched: int | str | list[int] | None = None
    message: str | None = None
    status_code: int | None = None


class _Meta(msgspec.Struct):
    completion_tokens: int = 0
    cached_tokens: int | None = None
    finish_reason: _Finish | None = None
    weight_versions: list[OutputSpan] | None = None
    output_token_logprobs: list[_TokenLogprob] | None = None
    output_token_sampling_logprobs: list[float] | None = None
    input_token_logprobs: list[_TokenLogprob] | None = None


class _Chunk(msgspec.Struct):
    output_ids: list[int] = []
    meta_info: _Meta | None = None
    error: ServerError | None = None


class _Load(msgspec.Struct):
    num_running_reqs: Count
    num_waiting_reqs: Count
    token_usage: Number


class _Loads(msgspec.Struct):
    loads: list[_Load]


class _Answer(CompletionStream):
    _end = _Finish("")

    def add_chunk(self, event: bytes) -> None:
        chunk, engine = self.engine.decode(event, _Chunk), self.engine
        if chunk.error is not None or chunk.meta_info is None:
            reason = chunk.error.message[:500] if chunk.error else "a chunk without meta_info"
            raise _refusal(chunk.error and chunk.error.code)(
                f"{engine.name} at {engine.url} refused a request: {reason}"
            )
        meta = chunk.meta_info
        self.cached = meta.cached_tokens if self.cached is None else self.cached
        new = meta.completion_tokens - len(self.tokens)
        if new > 0:  # the end of a request that was aborted in the queue has none
            self.tokens += chunk.output_ids[-new:]
            if _truncated(self.sampling):
                self.logprobs += (meta.output_token_sampling_logprobs or [])[-new:]
            else:
                self.logprobs += _values((meta.output_token_logprobs or [])[-new:])
        if meta.weight_versions is not None:
            self.spans = meta.weight_versions
        if meta.finish_reason is not None:
            self._end, self.finish = meta.finish_reason, meta.finish_reason.type

    def reason(self) -> FinishReason:
        name, end = self.engine.name, self._end
        if end.status_code is not None:
            raise _refusal(end.status_code)(f"{name} refused a request: {end.status_code} {end.message}")
        if end.type == "stop" and end.matched not in self.sampling.stop_token_ids:
            raise FalseReply(
                f"{name} stopped at {end.matched!r}, which is no stop token of the request; its weights may be broken"
            )
        return super().reason()


class SglangEngine(HttpEngine):
    """One server at `url`; see `HttpEngine` for the arguments. A seed has no effect on CPU."""

    generate_path = "/generate"
    version_path = "/model_info"
    stream_type = _Answer

    _flush = True

    def completion_request(
        self, token_ids: Sequence[int], sampling: SamplingParams, salt: str, images: Sequence[PromptImage] = ()
    ) -> Body:
        """Without `images`, which preflight refuses."""
        top_k = sampling.top_k if sampling.top_k > 0 else -1
        if _truncated(sampling):
            top_k = min(sampling.top_k if sampling.top_k > 0 else SUPPORT, self.vocab_size, SUPPORT)
        parameters = {
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": top_k,
            "stop_token_ids": sampling.stop_token_ids,
            "ignore_eos": not sampling.stop_token_ids,  # in SGLang it also disables these
            "sampling_seed": sampling.seed,
        }
        return _request(token_ids, parameters, salt) | {"stream": True, "return_sampling_mask": _truncated(sampling)}

    def score_request(self, token_ids: Sequence[int], salt: str) -> Body:
        body = _request(token_ids, {"max_new_tokens": 0, "temperature": 1.0}, salt)
        return body | {"logprob_start_len": 0, "priority": CANARY_PRIORITY}

    def scores(self, answer: bytes, token_ids: Sequence[int]) -> list[float]:
        meta = self.decode(answer, _Chunk).meta_info
        scored = (meta and meta.input_token_logprobs) or []
        if [token for _, token, _ in scored] != list(token_ids):
            raise EngineError(f"{self.name}: scored {len(scored)} tokens, and not the {len(token_ids)} it was given")
        return _values(scored[1:])

    def abort_request(self, body: Body) -> tuple[str, Body]:
        return "/abort_request", {"rid": body["rid"]}

    async def get_load(self) -> EngineLoad:
        """Requests that arrived while the server was paused are not counted yet."""
        loads = self.decode(await self.call("GET", "/v1/loads", {"include": "core"}), _Loads).loads
        if not loads:
            raise EngineError(f"{self.name} at {self.url} does not report its load")
        return EngineLoad(
            sum(load.num_running_reqs for load in loads),
            sum(load.num_waiting_reqs for load in loads),
            max(load.token_usage for load in loads),
        )

    async def pause(self, mode: Partial) -> None:
        self._flush = mode != "keep_kv"
        await self.call("POST", "/pause_generation", body={"mode": PAUSE[mode]})

    async def resume(self) -> None:
        if self.sleeps:
            await self.call("POST", "/resume_memory_occupation", body={"tags": ["kv_cache", "cuda_graph"]})
        await self.call("POST", "/continue_generation", body={})

    async def sleep(self) -> None:
        """SGLang frees memory only while nothing runs: the pause puts requests back into the queue."""
        await self.pause(self.partial)
        await self.call("POST", "/release_memory_occupation", body={}, seconds=self.push_s)

    async def wake(self) -> None:
        await self.call("POST", "/resume_memory_occupation", body={"tags": ["weights"]}, seconds=self.push_s)

    async def join_group(self, plan: GroupPlan) -> None:
        """Begin to join a broadcast group, dropping the one before. The server joins in a thread and goes on generating; the next
        `receive_weights` reports a failure."""
        await self._send_command({"join": plan})

    async def receive_weights(self, plan: TransferPlan) -> None:
        await self._send_command({"begin": plan})

    async def swap_weights(self, version: int) -> None:
        await self._update({"load_format": LOADER, "weight_version": str(version), "flush_cache": self._flush}, ())

    async def _send_command(self, command: dict[str, GroupPlan | TransferPlan]) -> None:
        await self._update({"load_format": COMMAND, "flush_cache": False}, (msgspec.json.encode(command),))

    async def _update(self, body: Body, payload: Sequence[bytes]) -> None:
        body["serialized_named_tensors"] = [base64.b64encode(data).decode() for data in payload]
        await self.call("POST", "/update_weights_from_tensor", body=body, seconds=self.push_s)


def _request(token_ids: Sequence[int], parameters: Body, salt: str) -> Body:
    return {
        "rid": uuid.uuid4().hex,
        "input_ids": list(token_ids),
        "sampling_params": parameters,
        "return_logprob": True,
        "extra_key": salt,
    }


def _truncated(sampling: SamplingParams) -> bool:
    return sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0)


def _values(logprobs: Sequence[_TokenLogprob]) -> list[float]:
    return [float("nan") if value is None else value for value, _, _ in logprobs]


def _refusal(status: int | str | None) -> type[EngineError]:
    """The error of a status: about the request, or about the server."""
    return RequestRejected if status in REFUSALS else EngineError
