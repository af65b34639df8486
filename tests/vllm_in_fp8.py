"""A vLLM in this process whose linear layers are in fp8 computes with weights that are loaded again and again.

    python -m slipstream.tests.vllm_in_fp8 FOLDER WEIGHTS...    prints the canary's log-probs after each file of weights, as JSON

For a CPU, where vLLM has no kernel for blocks in fp8 but for AMX: `Dequantized` stands in its place, and the rest is vLLM's own:
layers, loaders, the layerwise reload.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from slipstream.rollout.engines.quantized_model import quantization_config
from slipstream.rollout.engines.vllm.receiver import load
from slipstream.weightsync import fp8
from vllm import LLM, SamplingParams
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.platforms import PlatformEnum

IDS = [(31 * i * i + 7 * i) % 512 for i in range(48)]  # `tiny.canary`


class Dequantized(Fp8BlockScaledMMLinearKernel):
    """Multiplies with what the weights are in fp8, and leaves activations as they are."""

    apply_input_quant = False

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    def apply_block_scaled_mm(
        self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor
    ) -> torch.Tensor:
        return A @ fp8.dequantize(B, Bs, A.dtype).t()


def main(folder: str, *files: str) -> None:
    linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] = [Dequantized]
    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        load_format="dummy",
        hf_overrides={"quantization_config": quantization_config(folder, 1)},
        enforce_eager=True,
        max_model_len=256,
        kv_cache_memory_bytes=64 << 20,
        logprobs_mode="processed_logprobs",
        block_size=32,
    )
    found, config = [], llm.llm_engine.model_config
    for file in files:
        tensors = list(load_file(file).items())
        if Path(file).stem.endswith("reversed"):
            tensors.reverse()
        llm.apply_model(lambda model, tensors=tensors: load(model, config, tensors, next(model.parameters()).device))
        llm.reset_prefix_cache()
        (answer,) = llm.generate(
            [{"prompt_token_ids": IDS}], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False
        )
        entries: Any = answer.prompt_logprobs
        found.append([entry[token].logprob for token, entry in zip(IDS[1:], entries[1:], strict=True)])
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
