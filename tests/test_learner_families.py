"""Model families at tiny size: each is scored over packed rows, pushed to the transformers server and scored there; those whose
attention cannot be packed are refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from slipstream.configs.backends import Fsdp2, Megatron
from slipstream.configs.schema import Model, Optimizer
from slipstream.errors import ConfigError
from slipstream.learner.fsdp2.backend import Fsdp2Backend
from slipstream.learner.megatron.backend import MegatronBackend
from slipstream.learner.model import check_model
from slipstream.learner.packing import scoring_microbatch
from slipstream.rollout.engines.server.weights import ModelWeights, load_model
from slipstream.weightsync.plan import BroadcastSource
from slipstream.weightsync.snapshot import take_snapshot
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
LATENT = {  # DeepSeek's attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}

MIXTURES: dict[str, dict[str, Any]] = {
    "qwen2_moe": EXPERTS | {"decoder_sparse_step": 1},
    "qwen3_moe": EXPERTS,
    "olmoe": EXPERTS,
    "mixtral": EXPERTS,
    "glm4_moe": EXPERTS,
    "deepseek_v3": EXPERTS | LATENT,
}
"""Families with experts."""

TRAINED: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "llama": {},
    "mistral": {},
    "mixtral": EXPERTS,
    "gemma2": {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 1.0, "sliding_window": 8},
    "gemma3_text": {"query_pre_attn_scalar": 8},
    "gemma4_text": {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8},
    "phi3": {},
    "olmo2": {},
    "olmo3": {},
    "glm4": {},
    "glm4_moe": EXPERTS,
    "deepseek_v3": EXPERTS | LATENT,
    "minimax_m2": EXPERTS,
    "gpt_oss": EXPERTS | {"sliding_window": 8},
}
"""Those of the table in docs/backends.md."""

DEFAULT = ("deepseek_v3", "minimax_m2", "gemma3_text")
"""Of the default tier: buffers, some under another name in memory, and a normalization of its own."""

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "stablelm": ({}, "is a stablelm with layers whose attention or state cannot be replaced"),
    "qwen3_5_text": ({}, "has layers of kind linear_attention"),
    "qwen3_next": (EXPERTS, "has layers of kind linear_attention"),
    "falcon_h1": ({}, "has layers of kind hybrid"),
    "nemotron_h": ({}, "has layers of kind linear_attention"),
}


def write(folder: Path, family: str, sizes: dict[str, Any], seed: int = 0) -> str:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**SIZES | sizes)).float()
    persistent = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in persistent:
                buffer.uniform_(0.3, 0.7)  # so that one that is lost shows
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(60)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *((f, "fsdp2") if f in DEFAULT else pytest.param(f, "fsdp2", marks=pytest.mark.full) for f in TRAINED),
        ("deepseek_v3", "megatron"),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.full)])
async def test_a_family_is_scored_pushed_and_scored_again(tmp_path: Path, family: str, kind: str, dtype: Any) -> None:
    trained = write(tmp_path / "trained", family, TRAINED[family], seed=1)
    check_model(trained)
    model, how = Model(path=trained, dtype=dtype), {"temperature": 1.0, "timeout_s": 60}
    if kind == "megatron":
        backend = MegatronBackend(model, Optimizer(), Megatron(device="cpu"), **how)
    else:
        backend = Fsdp2Backend(model, Optimizer(), Fsdp2(device="cpu"), **how)
    try:
        snapshot = await take_snapshot(1, backend.named_weights(), tmp_path)
        sequences = [torch.randint(3, 64, (n,)).tolist() for n in (9, 17)]
        (ours,) = backend.logprobs([scoring_microbatch(sequences)])
    finally:
        backend.close()
    # A server that was started with other weights.
    served = load_model(write(tmp_path / "served", family, TRAINED[family], seed=2), dtype, "eager")
    weights = ModelWeights(served)
    weights.check(snapshot.plan(BroadcastSource(), bucket_bytes=1 << 20, keep=False, acks="", receiver=""))
    before = scored(served, sequences)
    weights.load(list(zip(snapshot.names, snapshot.tensors, strict=True)))
    theirs = scored(served, sequences)
    tolerance = 1e-4 if dtype == "float32" else 0.5
    assert (before - theirs).abs().max() > 1
    for ours_of, theirs_of in zip(ours.split([9, 17]), theirs.split([9, 17]), strict=True):
        torch.testing.assert_close(ours_of[1:], theirs_of[1:], atol=tolerance, rtol=0)
    # What training does not touch arrives as it was, whatever the others are rounded to.
    plain = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32)
    stored, pushed = dict(plain.named_buffers()), dict(zip(snapshot.names, snapshot.tensors, strict=True))
    biases = [name for name in stored if name.endswith(("e_score_correction_bias", "layer_scalar"))]
    assert len(biases) == sum(name.endswith(("e_score_correction_bias", "layer_scalar")) for name in pushed)
    for name in biases:
        there = pushed[name if name in pushed else name.replace(".mlp.", ".block_sparse_moe.")]
        assert torch.equal(there, stored[name])


def scored(model: torch.nn.Module, sequences: list[list[int]]) -> torch.Tensor:
    """Log-probs of every token but the first of each sequence, 0 there."""
    found = []
    with torch.no_grad():
        for tokens in sequences:
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0, :-1].float().log_softmax(-1)
            found.append(torch.cat([torch.zeros(1), logits.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]]))
    return torch.cat(found)


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_cannot_be_packed_is_refused_by_name(tmp_path: Path, family: str) -> None:
    sizes, expected = REFUSED[family]
    folder = write(tmp_path, family, sizes)
    with pytest.raises(ConfigError) as caught:
        check_model(folder)
    message = str(caught.value)
    assert message.startswith(f"model.path: {folder!r} {expected}")
    assert "allowed are" in message
    assert "\n" not in message
