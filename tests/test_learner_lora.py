"""Adapters of FSDP2's models: what is exported of them and what engines make of them, and which layers have one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from slipstream.configs.backends import Fsdp2
from slipstream.configs.schema import Model, Optimizer
from slipstream.learner.fsdp2.backend import Fsdp2Backend
from slipstream.learner.packing import scoring_microbatch
from slipstream.learner.sft import negative_log_likelihood
from slipstream.tests.test_learner_families import TRAINED, write
from slipstream.weightsync.weight_check import base_weights, merge

ROWS = [[3 + 5 * i % 60 for i in range(24)], [7 + 11 * i % 50 for i in range(9)]]

Tensors = dict[str, torch.Tensor]


def trained(model: str, dtype: Any, exported: Path) -> tuple[Tensors, Tensors]:
    """What an adapted model pushes, and what it exports, after a step in which B leaves 0."""
    how = {"temperature": 1.0, "timeout_s": 60}
    backend = Fsdp2Backend(Model(path=model, dtype=dtype), Optimizer(), Fsdp2(device="cpu", lora_rank=4), **how)
    try:
        backend.step([scoring_microbatch(ROWS)], negative_log_likelihood, 1e-2)
        pushed = {name: tensor.clone() for name, tensor in backend.named_weights()}
        backend.export(exported)
    finally:
        backend.close()
    return pushed, stored(exported)


def stored(folder: str | Path) -> Tensors:
    found = Tensors()
    for path in Path(folder).glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def test_an_export_is_in_the_serving_dtype(tmp_path: Path) -> None:
    model = write(tmp_path / "model", "qwen3", TRAINED["qwen3"])
    _, exported = trained(model, "bfloat16", tmp_path / "exported")
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}
    begun = stored(model)
    changed = {name for name, tensor in exported.items() if not torch.equal(tensor, begun[name].bfloat16())}
    assert changed == {name for name in begun if name.endswith("_proj.weight")}


@pytest.mark.parametrize("family", ["deepseek_v3", pytest.param("minimax_m2", marks=pytest.mark.full)])
def test_engines_have_the_dtypes_and_buffers_of_the_export(tmp_path: Path, family: str) -> None:
    model = write(tmp_path / "model", family, TRAINED[family])
    pushed, exported = trained(model, "bfloat16", tmp_path / "exported")
    served, begun = dict(merge(pushed, base_weights(model))), stored(model)
    assert {name: tensor.dtype for name, tensor in served.items()} == {n: t.dtype for n, t in exported.items()}
    biases = [name for name in begun if name.endswith("e_score_correction_bias")]
    assert biases
    for name in biases:
        assert torch.equal(served[name], begun[name])
        assert torch.equal(exported[name], begun[name])


def test_gemma_4_is_exported_and_its_routers_have_none(tmp_path: Path) -> None:
    """It has a linear layer outside its decoder layers, and routers that are linear layers."""
    sizes = TRAINED["gemma4_text"] | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
    model = write(tmp_path / "model", "gemma4_text", sizes | {"moe_intermediate_size": 16})
    pushed, exported = trained(model, "float32", tmp_path / "exported")
    assert "model.per_layer_model_projection.lora_A.weight" in pushed
    assert not any("router" in name for name in pushed)
    served, begun = dict(merge(pushed, base_weights(model))), stored(model)
    assert any("router.proj" in name for name in begun)
    assert exported.keys() == begun.keys()
    assert not torch.equal(
        exported["model.per_layer_model_projection.weight"], begun["model.per_layer_model_projection.weight"]
    )
    for name, tensor in exported.items():
        torch.testing.assert_close(tensor, served[name], atol=1e-6, rtol=0)
