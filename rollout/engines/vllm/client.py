"""Client of one server that speaks vLLM's HTTP protocol (vLLM 0.32 or newer, or Slipstream's own server).

One weight push at a time: the swap of a push loads the version of the weights that the server received last.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import msgspec

from ....common.images import PromptImage
from ....configs.schema import Partial
from ....errors import EngineError
from ....weightsync.plan import GroupPlan, TransferPlan
from ..base import STREAM_INTERVAL, EngineLoad, RequestRejected, SamplingParams
from ..expert_codec import decode
from ..http_client import REFUSALS, Disconnected
from ..http_engine import Body, CompletionStream, HttpEngine
from ..image_parts import image_parts
from ..server.protocol import ABORT_PREFIX, AWAKE, CACHE, WEIGHTS, Generated

# Metrics of a server with speculative decoding.
SPECULATION = ("vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total")
PAUSE: dict[Partial, dict[str, str]] = {
    "recompute": {"mode": "keep", "clear_cache": "true"},
    "keep_kv": {"mode": "keep", "clear_cache": "false"},
    "abort_resume": {"mode": "abort", "clear_cache": "true"},
}


STREAM: Body = {"stream": True, "stream_options": {"include_usage": True}}  # the usage names the cached tokens


class _Answer(CompletionStream):
    def add_chunk(self, event: bytes) -> None:
        chunk, engine = self.engine.decode(event, Generated), self.engine
        if chunk.error is not None:
            kind = RequestRejected if chunk.error.code in REFUSALS else Disconnected
            raise kind(f"{engine.name} at {engine.url} failed: {chunk.error.message[:500]}")
        for choice in chunk.choices:
            self.tokens += choice.token_ids or ()
            self.logprobs += [entry.logprob for entry in (choice.logprobs and choice.logprobs.content) or ()]
            self.spans = self.spans if choice.weight_versions is None else choice.weight_versions
            self.finish = choice.finish_reason or self.finish
            if choice.routed_experts is not None and engine.routers is not None:
                self.experts.append(decode(engine.name, choice.routed_experts, engine.routers))
        if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
            self.cached = chunk.usage.prompt_tokens_details.cached_tokens


class _Woken(msgspec.Struct):
    status: str = ""


class VllmEngine(HttpEngine):
    generate_path = "/inference/v1/generate"
    version_path = "/weight_info"
    stream_type = _Answer

    _received: int | None = None

    def completion_request(
        self, token_ids: Sequence[int], sampling: SamplingParams, salt: str, images: Sequence[PromptImage] = ()
    ) -> Body:
        parameters = {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop_token_ids": sampling.stop_token_ids,
            "ignore_eos": True,  # only `stop_token_ids` end it
            "seed": sampling.seed,
            "logprobs": 0,
            "detokenize": False,
            "stream_interval": STREAM_INTERVAL,
        }
        if self.routers is not None:
            start = sampling.experts_from
            parameters["routed_experts_prompt_start"] = len(token_ids) if start is None else start
        body = _request(token_ids, parameters, salt, priority=0) | STREAM
        return body | image_parts(images, salt) if images else body

    def score_request(self, token_ids: Sequence[int], salt: str) -> Body:
        parameters = {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
        return _request(token_ids, parameters, salt, priority=-1)

    def scores(self, answer: bytes, token_ids: Sequence[int]) -> list[float]:
        scored = self.decode(answer, Generated).prompt_logprobs or []
        if len(scored) != len(token_ids):
            raise EngineError(f"{self.name}: scored {len(scored)} of {len(token_ids)} tokens")
        values = []
        for token, entry in zip(token_ids[1:], scored[1:], strict=True):
            if not entry or str(token) not in entry:
                raise EngineError(f"{self.name}: the scores of a prompt lack token {token}")
            values.append(entry[str(token)].logprob)
        return values

    def abort_request(self, body: Body) -> tuple[str, Body]:
        return "/abort_requests", {"request_ids": [ABORT_PREFIX + body["request_id"]]}

    async def get_load(self) -> EngineLoad:
        running, waiting, usage = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"
        tokens = "vllm:generation_tokens_total"
        values = await self.metrics((running, waiting, usage, tokens), optional=SPECULATION)
        drafted, accepted = (int(values[name]) if name in values else None for name in SPECULATION)
        return EngineLoad(
            int(values[running]), int(values[waiting]), values[usage], int(values[tokens]), drafted, accepted
        )

    async def swap_seconds(self) -> float:
        """Seconds of loading weights since the server started, by its own metrics: the lower bound of a swap."""
        name = "vllm:rl_weight_update_operation_duration_seconds_sum"
        return (await self.metrics((name,), {"operation": "finish"}))[name]

    async def pause(self, mode: Partial) -> None:
        await self.call("POST", "/pause", PAUSE[mode])

    async def resume(self) -> None:
        if not self.sleeps:
            await self.call("POST", "/resume")
            return
        # The last part that wakes lets a server step; so does a part that does not sleep.
        answer = await self.call("POST", "/wake_up", {"tags": CACHE}, seconds=self.push_s)
        if self.decode(answer, _Woken).status != AWAKE:
            raise EngineError(f"{self.name} still sleeps: its weights were not allocated, or not pushed")

    async def sleep(self) -> None:
        mode = "abort" if self.partial == "abort_resume" else "keep"
        await self.call("POST", "/sleep", {"level": "2", "mode": mode}, seconds=self.push_s)

    async def wake(self) -> None:
        await self.call("POST", "/wake_up", {"tags": WEIGHTS}, seconds=self.push_s)

    async def join_group(self, plan: GroupPlan) -> None:
        body = {"init_info": {"plan": plan}}
        await self.call("POST", "/init_weight_transfer_engine", body=body, seconds=self.push_s)

    async def receive_weights(self, plan: TransferPlan) -> None:
        self._received = None
        try:
            await self.call("POST", "/start_weight_update", seconds=self.push_s)
        except EngineError as error:
            # An earlier push was never swapped in. Finishing it would load it; the next plan replaces what it staged.
            if "already active" not in str(error):
                raise
        body = {"update_info": {"plan": plan}}
        await self.call("POST", "/update_weights", body=body, seconds=self.push_s)
        self._received = plan.version

    async def swap_weights(self, version: int) -> None:
        if self._received != version:  # the server would label any staged tensors with this version
            raise EngineError(f"{self.name} cannot swap in version {version}: it received {self._received}")
        await self.call("POST", "/finish_weight_update", body={"weight_version": str(version)}, seconds=self.push_s)


def _request(token_ids: Sequence[int], parameters: Body, salt: str, *, priority: int) -> Body:
    """The body of `/inference/v1/generate`; lower `priority` goes first."""
    return {
        "request_id": uuid.uuid4().hex,
        "token_ids": list(token_ids),
        "sampling_params": parameters,
        "priority": priority,
        "cache_salt": salt,
    }
