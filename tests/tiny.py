"""The smallest real things that tests share: model folders of random weights, and a vLLM server that serves one."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file
from slipstream.agents import Completion
from slipstream.configs.engines import Vllm
from slipstream.configs.schema import Agent, Config, Model, Rollout
from slipstream.launch.launchers.local import free_ports
from slipstream.rollout.engines import registry as servers
from slipstream.rollout.engines.vllm import launch as vllm_server
from slipstream.tests.cache import cached
from slipstream.weightsync import fp8
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 512
CONTEXT = 1024


def tiny_qwen3(folder: Path, seed: int = 0, *, tied: bool = True, moe: bool = False, wide: bool = False) -> Path:
    """Write a Qwen3 of 0.2 M random parameters (float32, no tokenizer) to `folder`, and return the folder. A `wide` one has 1.3 M:
    all sizes of its linear layers are multiples of 128, as kernels for fp8 want them.

    Weights are spread widely enough that its distributions are far from uniform: a wrong tensor shows in the log-probs.
    """
    named = f"tiny_qwen3 {seed} {tied} {moe}{' wide' if wide else ''}"
    return cached(folder, named, lambda folder: _make_qwen3(folder, seed, tied, moe, wide))


def _make_qwen3(folder: Path, seed: int, tied: bool, moe: bool, wide: bool) -> None:
    torch.manual_seed(seed)
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,  # the smallest that vLLM serves on CPU
        "max_position_embeddings": 2 * CONTEXT,
        "tie_word_embeddings": tied,
        "eos_token_id": 3,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "initializer_range": 0.1,
        "dtype": "float32",
    }
    if wide:
        common |= {"hidden_size": 256, "intermediate_size": 384, "head_dim": 128, "initializer_range": 0.05}
    if moe:
        inside = 128 if wide else 64
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": inside, "norm_topk_prob": True}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **experts))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**common))
    model.float().save_pretrained(folder)


def load(folder: Path) -> PreTrainedModel:
    """The model in `folder`, float32, for inference."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logprobs(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """float32[T - 1, vocabulary]: log-probs of what follows each of the first T - 1 tokens."""
    with torch.no_grad():
        return model(torch.tensor([token_ids]), use_cache=False).logits[0, :-1].float().log_softmax(-1)


def one_gpu(host: str) -> dict[str, str]:
    """Environment of a process that shares its GPU with others of its NCCL group. NCCL refuses two processes of one host that do;
    so each says it is a host of its own, and they meet over sockets."""
    return {"NCCL_HOSTID": host, "NCCL_SOCKET_IFNAME": "lo"}


def free_port() -> int:
    """A port for a server, as runs choose theirs: no outgoing connection takes it before the server has it, and no other server is
    given it."""
    return free_ports(1)[0]


@contextlib.contextmanager
def server(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A server process with `environment` beside this one's, killed at the end; it may not answer yet."""
    with log.open("ab") as out, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        variables = {**os.environ, **environment, "TMPDIR": temporary}
        process = subprocess.Popen(command, env=variables, stdout=out, stderr=out)
        try:
            yield process
        finally:
            process.kill()
            process.wait(30)


@contextlib.contextmanager
def vllm(
    folder: Path, port: int, log: Path, *, max_concurrent: int = 64, ranks: int = 1
) -> Iterator[subprocess.Popen[bytes]]:
    """A real vLLM server of `folder` over `ranks` processes, killed with its children at the end; it may not answer yet."""
    config = Config(
        model=Model(path=str(folder)),
        agent=Agent(max_tokens=CONTEXT),
        rollout=Rollout(
            engine=Vllm(max_concurrent=max_concurrent, memory="64MiB", options={"tensor_parallel_size": ranks})
        ),
    )
    command = vllm_server.command(config, servers.LOOPBACK, port)
    with server(command, vllm_server.environment(config), log) as process:
        yield process


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Hugging Face name -> tensor, as stored: tied tensors once, experts one by one."""
    return load_file(folder / "model.safetensors")


def rounded_to_fp8(folder: Path, copy: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A copy of a model folder, at `copy`, with the numbers that its weights are in fp8, and else in `dtype`."""
    shutil.copytree(folder, copy)
    served = {name: tensor.to(dtype) for name, tensor in weights(folder).items()}
    rounded = fp8.dequantized(fp8.quantized(served.items()), torch.float32)
    save_file({name: tensor.float() for name, tensor in rounded}, copy / "model.safetensors", {"format": "pt"})
    return copy


def canary(model: PreTrainedModel) -> tuple[list[int], list[float]]:
    """A fixed prompt, and the log-probs that `model` computes for all its tokens but the first."""
    vocabulary = model.get_input_embeddings().num_embeddings
    ids = [(31 * i * i + 7 * i) % vocabulary for i in range(48)]
    rows = logprobs(model, ids)
    return ids, [float(row[token]) for row, token in zip(rows, ids[1:], strict=True)]


def untimed(completion: Completion) -> Completion:
    """Without what its request took."""
    return msgspec.structs.replace(completion, timing=None)
