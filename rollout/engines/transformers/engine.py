"""The kind `transformers`: loads a model, sizes its KV cache, and sets the limits of requests.

Invariants:
- A model that this server cannot serve is refused before it listens: a first prompt verifies that its paged cache is exact.
"""

from __future__ import annotations

import os

import torch
from transformers import PreTrainedModel

from ....common import accelerator
from ....common.image_processor import ImageProcessor
from ....common.images import FAMILIES
from ....common.kv_cache import kv_bytes_per_token
from ....errors import ConfigError, EngineError, first_line
from ..base import SamplingParams
from ..server import weights
from ..server.contract import EngineServer, RequestLimits, SampledToken, Sequence
from ..server.launch import Options
from .attention import PAGED
from .images import SeenImages
from .model_runner import TransformersModelRunner
from .paging import PAGE

CHECK_TOKENS = 2 * PAGE + 1  # tokens of the prompt that is computed before a server listens: more than one block
TOLERANCE = {"float32": 1e-2, "bfloat16": 0.5}  # nats; unsupported attention differs by several
ACTIVATIONS = 0.1  # of the GPU memory that a server may use: the share of forward passes, beside weights and KV cache


def serve(options: Options, make_runner: type[TransformersModelRunner] = TransformersModelRunner) -> EngineServer:
    """Load the model and make the parts of its server. Raises ConfigError where it cannot be served as configured."""
    model = load_model(options.model, options.dtype)
    config = model.config.get_text_config()
    blocks = _kv_bytes(options.memory, model.device) // (PAGE * kv_bytes_per_token(config, model.dtype.itemsize))
    if blocks * PAGE < options.max_tokens:
        raise ConfigError(
            f"rollout.engine.memory holds {blocks * PAGE} tokens; agent.max_tokens needs {options.max_tokens}: raise it"
        )
    images = model.config.model_type in FAMILIES
    limits = RequestLimits(config.vocab_size, options.max_tokens, weights.eos_token_ids(model), images)
    try:
        runner = make_runner(
            model,
            blocks=blocks,
            max_concurrent=options.max_concurrent,
            seed=options.seed,
            record_experts=options.routed_experts,
            images=SeenImages(model, ImageProcessor(options.model)) if images else None,
        )
        check_paging(runner, limits, TOLERANCE[options.dtype])
    except (EngineError, ValueError, TypeError, RuntimeError) as error:
        why = first_line(error)
        raise ConfigError(f"model.path: {options.model!r} cannot be served by kind {options.kind}: {why}") from error
    return EngineServer(runner, weights.ModelWeights(model), limits)


def check_paging(runner: TransformersModelRunner, limits: RequestLimits, tolerance: float) -> None:
    """Decode a few tokens over the paged cache, and compare with the model without a cache. Raises EngineError where they differ:
    the model's attention is not supported."""
    prompt = tuple(i % limits.vocab_size for i in range(max(1, min(CHECK_TOKENS, limits.max_tokens - 2))))
    runner.add(Sequence("check", prompt, SamplingParams(max_tokens=2)))
    tokens: list[SampledToken] = []
    while runner.busy():
        tokens += runner.step()
    runner.recompute()
    expected = runner.score(prompt + tuple(t.token for t in tokens))[len(prompt) - 1 :]
    error = max(abs(t.logprob - value) for t, value in zip(tokens, expected, strict=True))
    if not error <= tolerance:
        raise EngineError(f"its log-probs over a paged cache are {error:.3g} nats from what it computes without one")


def load_model(path: str, dtype: str) -> PreTrainedModel:
    """The model with paged attention, on the accelerator if there is one. Raises ConfigError where there is no such model."""
    device = accelerator.device_of_rank(0)
    if device.type == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    # cuDNN's attention plans every new shape for 0.1 s, and nearly every call has a new shape.
    torch.backends.cuda.enable_cudnn_sdp(False)
    return weights.load_model(path, dtype, PAGED).to(device)  # type: ignore[arg-type]


def _kv_bytes(memory: int | float, device: torch.device) -> int:
    if isinstance(memory, int):
        return memory
    if device.type == "cpu":
        raise ConfigError(f"rollout.engine.memory: {memory} is not allowed here; write a size such as 128MiB")
    free, total = accelerator.free_memory(device)
    return max(0, int(memory * total * (1.0 - ACTIVATIONS)) - (total - free))
