"""The kind `transformers`: loads a model, sizes its KV cache, and says what requests must fit.

Invariants:
- A model that this server cannot serve is refused before it listens: a first prompt proves that its cache is exact.
"""

from __future__ import annotations

import os

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from ...errors import ConfigError, EngineError
from ..engine import Sampling
from .attention import PAGED
from .options import Options
from .paging import PAGE, block_bytes
from .protocol import Limits
from .served import Served
from .stepper import Sampled, Sequence
from .transformers_stepper import TransformersStepper
from .weights import ModelWeights

PROOF = 2 * PAGE + 1
"""Tokens of the prompt that is computed before a server listens: more than one block."""

TOLERANCE = {"float32": 1e-2, "bfloat16": 0.5}
"""Nats by which two ways of computing may differ; a way of attending that is not understood costs several."""

ACTIVATIONS = 0.1
"""Of the GPU memory a server may take, what forward passes need beside weights and KV cache."""


def serve(options: Options) -> Served:
    """Load the model and everything around it. Raises ConfigError where it cannot be served as asked."""
    model = load_model(options.model, options.dtype)
    config = model.config.get_text_config()
    blocks = _kv_bytes(options.memory, model.device) // block_bytes(config, model.dtype)
    if blocks * PAGE < options.max_tokens:
        raise ConfigError(
            f"rollout.engine.memory holds {blocks * PAGE} tokens; agent.max_tokens needs {options.max_tokens}: raise it"
        )
    limits = Limits(config.vocab_size, options.max_tokens, _eos(model))
    try:
        stepper = TransformersStepper(model, blocks=blocks, max_concurrent=options.max_concurrent, seed=options.seed)
        prove(stepper, limits, TOLERANCE[options.dtype])
    except (EngineError, ValueError, TypeError, RuntimeError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"model.path: {options.model!r} cannot be served by kind transformers: {first}") from error
    return Served(stepper, ModelWeights(model), limits)


def prove(stepper: TransformersStepper, limits: Limits, tolerance: float) -> None:
    """Decode a few tokens over the paged cache, and compare with the model alone. Raises EngineError where they differ: the model
    attends in a way that the cache does not know."""
    prompt = tuple(i % limits.vocab_size for i in range(max(1, min(PROOF, limits.max_tokens - 2))))
    stepper.add(Sequence("proof", prompt, Sampling(max_tokens=2)))
    tokens: list[Sampled] = []
    while stepper.busy():
        tokens += stepper.step()
    stepper.recompute()
    alone = stepper.score(prompt + tuple(t.token for t in tokens))[len(prompt) - 1 :]
    error = max(abs(t.logprob - expected) for t, expected in zip(tokens, alone, strict=True))
    if not error <= tolerance:
        raise EngineError(f"its log-probs over a paged cache are {error:.3g} nats from what it computes without one")


def load_model(path: str, dtype: str) -> PreTrainedModel:
    """The model of a folder or hub name on the GPU, where there is one. Raises ConfigError where there is no such model."""
    transformers_logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    # cuDNN's attention makes a plan for every new shape, a tenth of a second each, and here nearly every call has one.
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), attn_implementation=PAGED
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"model.path: {path!r} is no causal language model for kind transformers: {first}") from error
    return model.to(device).eval()  # type: ignore[arg-type]


def _kv_bytes(memory: int | float, device: torch.device) -> int:
    if isinstance(memory, int):
        return memory
    if device.type != "cuda":
        raise ConfigError(f"rollout.engine.memory: {memory} is not allowed here; write a size such as 128MiB")
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(memory * total * (1.0 - ACTIVATIONS)) - (total - free))


def _eos(model: PreTrainedModel) -> tuple[int, ...]:
    eos = model.generation_config.eos_token_id if model.generation_config else model.config.eos_token_id
    return () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
