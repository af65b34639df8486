"""Adapters that travel alone: what a receiver makes of them, and which it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from slipstream.errors import WeightSyncError
from slipstream.weightsync.plan import FileSource, TransferPlan
from slipstream.weightsync.weight_check import add, base_weights, check_weights, checkpoint_shapes, merge

SHAPES = {"q.lora_A.weight": (2, 6), "q.lora_B.weight": (4, 2)}


@pytest.fixture
def folder(tmp_path) -> Path:
    generator = torch.Generator().manual_seed(0)
    base = {"q.weight": (4, 6), "q.bias": (4,), "norm.weight": (6,)}
    save_file(
        {name: torch.randn(shape, generator=generator) for name, shape in base.items()}, tmp_path / "m.safetensors"
    )
    return tmp_path


def plan_of(shapes: dict[str, tuple[int, ...]]) -> TransferPlan:
    dtypes = ("float32",) * len(shapes)
    return TransferPlan(7, tuple(shapes), dtypes, tuple(shapes.values()), 64, FileSource(""), "", False, "", "a")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_receiver_has_the_whole_model_with_products_added(folder, dtype):
    adapters = {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}
    base = dict(base_weights(str(folder)))
    whole = dict(merge(adapters, base_weights(str(folder))))
    assert whole.keys() == base.keys()
    assert {tensor.dtype for tensor in whole.values()} == {dtype}
    product = adapters["q.lora_B.weight"].double() @ adapters["q.lora_A.weight"].double()
    exact = base["q.weight"].double() + product  # rounded once, after the sum
    tolerance = {"atol": 1e-6, "rtol": 1e-6} if dtype is torch.float32 else {"atol": 1e-6, "rtol": 2**-8}
    torch.testing.assert_close(whole["q.weight"].double(), exact, **tolerance)
    assert torch.equal(whole["q.bias"], base["q.bias"].to(dtype))
    zeros = torch.zeros_like(adapters["q.lora_B.weight"])
    assert torch.equal(add(base["q.weight"], adapters["q.lora_A.weight"], zeros), base["q.weight"])


def test_a_receiver_keeps_buffers_unrounded():
    names = ("model.layers.1.mlp.gate.e_score_correction_bias", "model.layers.1.layer_scalar")
    base = {name: torch.rand(8) for name in names} | {"q.weight": torch.rand(4, 6)}
    adapters = {name: torch.rand(shape).bfloat16() for name, shape in SHAPES.items()}
    whole = dict(merge(adapters, base.items()))
    assert all(torch.equal(whole[name], base[name]) for name in names)
    assert whole["q.weight"].dtype is torch.bfloat16


def test_adapters_that_fit_are_taken(folder):
    check_weights(plan_of(SHAPES), checkpoint_shapes(str(folder)), optional=frozenset())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            {"k.lora_A.weight": (2, 6), "k.lora_B.weight": (4, 2)},
            r"'k.lora_A.weight' is among adapters, but the model has no",
        ),
        ({"norm.weight": (6,)}, r"'norm.weight' is among adapters"),
        ({"q.lora_B.weight": None}, r"'q.lora_A.weight' lacks its other factor"),
        ({"q.lora_A.weight": None}, r"'q.lora_B.weight' lacks its other factor"),
        ({"q.lora_A.weight": (2, 5)}, r"adapters of q are \(4, 2\) by \(2, 5\), the model has \(4, 6\)"),
        ({"q.lora_A.weight": (3, 6)}, r"adapters of q are \(4, 2\) by \(3, 6\)"),
        ({"q.lora_B.weight": (4,)}, r"adapters of q are \(4,\) by \(2, 6\)"),
        ({"norm.lora_A.weight": (2, 6), "norm.lora_B.weight": (6, 2)}, r"adapters of norm are .* the model has \(6,\)"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(folder, change, why):
    shapes = {name: shape for name, shape in (SHAPES | change).items() if shape is not None}
    with pytest.raises(WeightSyncError, match=why):
        check_weights(plan_of(shapes), checkpoint_shapes(str(folder)), optional=frozenset())


def test_without_files_there_is_nothing_to_add_to(tmp_path):
    with pytest.raises(WeightSyncError, match=r"no safetensors of .* to add adapters to"):
        list(base_weights(str(tmp_path)))
