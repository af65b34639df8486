"""The part of vLLM's HTTP protocol that our server speaks, as structs; `VllmEngine` reads the answers, of either server.

Invariants:
- An unknown parameter is refused: ignored, it would silently change what is sampled.
- A request is checked before the engine thread gets it: an id outside the vocabulary must not end the process.
"""

from __future__ import annotations

import math
import uuid
from typing import Annotated

import msgspec
from msgspec import Meta, field

from ..base import IMPOSSIBLE, OutputSpan, SamplingParams, ServerError
from ..image_parts import BadImage, ImagePart, check_places
from .contract import RequestLimits, Sequence

ABORT_PREFIX = "generate-tokens-"  # with the id, vLLM's internal name of a request, which `/abort_requests` takes
WEIGHTS, CACHE = "weights", "kv_cache"  # what a server frees while it sleeps: the tags of `/wake_up`
AWAKE = "awake"  # the status in the reply of `/wake_up` once the server steps again


class BadRequest(Exception):
    """An invalid or unsupported request; the message says why."""


class WireSamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's names. `logprobs` and `prompt_logprobs` may only be 0: the chosen token's. Tokens are never decoded to text.
    `stream_interval`: tokens per chunk of a stream; the first token has its own chunk."""

    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0.0)] = 1.0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = -1
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: Annotated[int, Meta(ge=0, le=0)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=0)] | None = None
    detokenize: bool = False
    stream_interval: Annotated[int, Meta(ge=1)] | None = None
    routed_experts_prompt_start: Annotated[int, Meta(ge=0)] = 0
    n: Annotated[int, Meta(ge=1, le=1)] = 1


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`include_usage`: the last chunk has no choice but the usage."""

    include_usage: bool = False


class GenerateRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `/inference/v1/generate`."""

    token_ids: tuple[int, ...]
    sampling_params: WireSamplingParams
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int = 0
    content_parts: tuple[ImagePart, ...] = ()  # the images of the prompt, in order

    def sequence(self, limits: RequestLimits) -> Sequence:
        """The sequence for the runner. Raises BadRequest."""
        params, room = self.sampling_params, limits.max_tokens - len(self.token_ids)
        if not self.token_ids or room < 1:
            raise BadRequest(f"a prompt of {len(self.token_ids)} tokens; allowed are 1 to {limits.max_tokens - 1}")
        for token in (min(self.token_ids), max(self.token_ids)):
            if not 0 <= token < limits.vocab_size:
                raise BadRequest(f"token id {token} is outside the vocabulary, 0 to {limits.vocab_size - 1}")
        if params.routed_experts_prompt_start > len(self.token_ids):
            raise BadRequest(
                f"routed_experts_prompt_start={params.routed_experts_prompt_start}: the prompt has {len(self.token_ids)} tokens"
            )
        if self.content_parts and not limits.images:
            raise BadRequest("the prompt has images, and this server takes none")
        try:
            images = tuple(part.image() for part in self.content_parts)
            check_places(((image.start, image.end) for image in images), len(self.token_ids))
        except BadImage as error:
            raise BadRequest(str(error)) from None
        sampling = SamplingParams(
            max_tokens=min(params.max_tokens or room, room),
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k or -1,
            stop_token_ids=(params.stop_token_ids or ()) + (() if params.ignore_eos else limits.eos),
            seed=params.seed,
            experts_from=params.routed_experts_prompt_start,
        )
        return Sequence(self.request_id, self.token_ids, sampling, self.cache_salt or "", self.priority, images)


class Logprob(msgspec.Struct, frozen=True):
    logprob: float
    token_id: int = -1


def logprob(token: int, value: float) -> Logprob:
    """As vLLM reports it: JSON has neither infinity nor NaN."""
    return Logprob(value if math.isfinite(value) else IMPOSSIBLE, token)


class Logprobs(msgspec.Struct, frozen=True):
    content: tuple[Logprob, ...] | None = None


class WireChoice(msgspec.Struct, frozen=True):
    """The tokens since the last chunk, the spans of all tokens so far, and in the last chunk the finish reason. vLLM sends
    `routed_experts` of all tokens in the last chunk, our server those since the last chunk in each."""

    token_ids: tuple[int, ...] | None = None
    logprobs: Logprobs | None = None
    weight_versions: tuple[OutputSpan, ...] | None = None
    finish_reason: str | None = None
    index: int = 0
    # Of the tokens that were read for these and the prompt's, see `expert_codec`; of a server that records them.
    routed_experts: str | None = None


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class TokenUsage(msgspec.Struct, frozen=True):
    """`prompt_tokens_details` is missing where the server does not count them, as ours does not."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None


class Generated(msgspec.Struct, frozen=True, omit_defaults=True):
    """An answer of `/inference/v1/generate`, or one chunk of it."""

    choices: tuple[WireChoice, ...] = ()
    request_id: str = ""
    prompt_logprobs: tuple[dict[str, Logprob] | None, ...] | None = None
    error: ServerError | None = None
    usage: TokenUsage | None = None
