"""What only a GPU shows: FlashAttention over packed rows, and every way to hold a model, against a plain loop on the CPU.

Two ranks run this file as a script; they share a GPU, see tests/ranks.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from slipstream.configs.backends import Fsdp2
from slipstream.learner.fsdp2 import attention
from slipstream.learner.fsdp2.attention import plan_sharing as tree
from slipstream.learner.packing import to_microbatch
from slipstream.tests.columns import joined
from slipstream.tests.equality import LOSS, assert_bfloat16_noise, assert_three_steps, make_model, make_rows, plain_loop
from slipstream.tests.ranks import Job, jobs_of, open_backend, run_in_turn, run_on_one_rank, run_on_two_ranks
from slipstream.tests.test_learner_prefixes import make_groups, make_nested

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

NOISE = 0.02
"""Of bfloat16's 8 bits, in the norm of what attention gives."""


def held(**how: object) -> Fsdp2:
    return msgspec.structs.replace(Fsdp2(device="cuda"), **how)


def largest_difference(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Norm of the difference as a share of the norm."""
    return float((found.detach().double().cpu() - exact.detach()).norm() / exact.detach().norm())


@pytest.mark.parametrize("window", [None, 10])
@pytest.mark.parametrize("sequences", [make_groups(0), make_nested()], ids=["separate", "nested"])
def test_flash_attention_and_its_gradient_are_those_of_whole_sequences(sequences, window: int | None) -> None:
    """Also where sequences continue what they share."""
    row = to_microbatch(joined(sequences))
    made = tree(row)
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, len(made.kept), 64) for heads in (4, 2, 2)]
    states = [torch.randn(shape, generator=generator).bfloat16().double().requires_grad_() for shape in shapes]
    asked = torch.randn(1, len(row.token_ids), 4, 64, generator=generator).bfloat16()

    def attend(states, packed):
        output, _ = attention.packed_attention(torch.nn.Identity(), *states, None, sliding_window=window, packed=packed)
        return output

    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    expected = attend([x[:, :, made.where] for x in states], attention.PackedMask(row.cu_seqlens, cpu))
    gradients = torch.autograd.grad((expected * asked.double()).sum(), states)
    there = [x.detach().to(gpu, torch.bfloat16).requires_grad_() for x in states]
    packed = attention.PackedMask(made.cu_seqlens, gpu, heads=made.heads)
    found = attend(there, packed)[:, made.where]
    assert "cuts" in vars(packed)  # which FlashAttention alone asks for
    assert largest_difference(found, expected) < NOISE
    for actual, exact in zip(torch.autograd.grad((found * asked.to(gpu)).sum(), there), gradients, strict=True):
        assert largest_difference(actual, exact) < NOISE


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return make_model(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> str:
    return make_model(tmp_path_factory.mktemp("model"), tied=False, moe=True)


@pytest.fixture(scope="module")
def expected(model, mixture) -> dict[str, dict[str, torch.Tensor]]:
    return {
        "whole": plain_loop(model),
        "lora": plain_loop(model, lora_rank=4),
        "bf16": plain_loop(model, dtype=torch.bfloat16),
        "experts": plain_loop(mixture),
        "bf16 experts": plain_loop(mixture, dtype=torch.bfloat16),
    }


@pytest.mark.parametrize(
    ("what", "config"),
    [
        ("whole", held()),
        ("whole", held(options=("recompute",))),
        ("whole", held(options=("offload",))),
        ("whole", held(options=("offload", "recompute"))),
        ("whole", held(options=("compile",))),
        ("lora", held(lora_rank=4)),
        ("lora", held(lora_rank=4, options=("offload",))),
    ],
    ids=["whole", "recomputed", "offloaded", "both", "compiled", "lora", "lora offloaded"],
)
def test_three_steps_in_float32_equal_a_plain_loop(model, expected, tmp_path: Path, what: str, config: Fsdp2) -> None:
    run_on_one_rank([Job(model, 34, str(tmp_path / "out"), config)])
    assert_three_steps(load_file(tmp_path / "out"), expected[what])


@pytest.mark.parametrize(
    "config",
    [held(), held(options=("recompute",)), held(options=("offload",)), held(options=("compile",))],
    ids=["plain", "recomputed", "offloaded", "compiled"],
)
def test_bfloat16_is_as_near_to_float32_as_a_plain_bfloat16_loop(
    model, expected, tmp_path: Path, config: Fsdp2
) -> None:
    from torch._dynamo.utils import counters  # takes seconds

    counters.clear()
    run_on_one_rank([Job(model, 34, str(tmp_path / "out"), config, dtype="bfloat16")])
    assert_bfloat16_noise(load_file(tmp_path / "out"), expected["whole"], expected["bf16"], model)
    if "compile" in config.options:
        assert counters["stats"]["unique_graphs"] > 0
        assert not counters["graph_break"]  # attention is within a layer's graph


@pytest.fixture(scope="module")
def two(model, mixture, tmp_path_factory) -> Path:
    """What two ranks made of every job; Liger is last, because it stays in a process."""
    root = tmp_path_factory.mktemp("two")
    jobs = [
        Job(model, 34, str(root / "whole"), held(), save=str(root / "saved")),
        Job(model, 34, str(root / "shared"), held(parallel={"context": 2})),
        Job(model, 34, str(root / "offloaded"), held(options=("offload",))),
        Job(model, 34, str(root / "resumed"), held(parallel={"context": 2}), first=2, load=str(root / "saved")),
        Job(model, 34, str(root / "bf16"), held(), dtype="bfloat16"),
        Job(model, 34, str(root / "bf16 shared"), held(parallel={"context": 2}), dtype="bfloat16"),
        Job(mixture, 34, str(root / "experts"), held(parallel={"expert": 2})),
        Job(mixture, 34, str(root / "experts recomputed"), held(parallel={"expert": 2}, options=("recompute",))),
        Job(mixture, 34, str(root / "bf16 experts"), held(parallel={"expert": 2}), dtype="bfloat16"),
        Job(model, 34, str(root / "liger"), held(options=("liger",))),
        Job(model, 34, str(root / "bf16 liger"), held(options=("liger",)), dtype="bfloat16"),
    ]
    run_on_two_ranks(root, __file__, jobs)
    return root


@pytest.mark.parametrize("name", ["whole", "shared", "offloaded", "resumed", "liger"])
def test_two_ranks_over_nccl_equal_a_plain_loop(two, expected, name: str) -> None:
    assert_three_steps(load_file(two / name), expected["whole"], first=2 if name == "resumed" else 0)


@pytest.mark.parametrize("name", ["experts", "experts recomputed"])
def test_two_ranks_that_divide_experts_over_nccl_equal_a_plain_loop(two, expected, name: str) -> None:
    assert_three_steps(load_file(two / name), expected["experts"])


def test_two_ranks_that_divide_experts_over_nccl_in_bfloat16(two, expected, mixture) -> None:
    found = load_file(two / "bf16 experts")
    assert_bfloat16_noise(found, expected["experts"], expected["bf16 experts"], mixture)


@pytest.mark.parametrize("name", ["bf16", "bf16 shared", "bf16 liger"])
def test_two_ranks_over_nccl_in_bfloat16(two, expected, model, name: str) -> None:
    assert_bfloat16_noise(load_file(two / name), expected["whole"], expected["bf16"], model)


def test_what_is_offloaded_leaves_the_gpu(model) -> None:
    def held_after_a_step(config: Fsdp2) -> int:
        """Bytes on the GPU between two steps."""
        before = torch.cuda.memory_allocated()
        backend = open_backend(model, config=config)
        backend.step(make_rows(0, 0, 1, 8192), LOSS, 1e-4)
        size = torch.cuda.memory_allocated() - before
        backend.close()
        return size

    assert held_after_a_step(held(options=("offload",))) < 0.2 * held_after_a_step(held())


if __name__ == "__main__":
    run_in_turn(jobs_of(sys.argv[1])).close()
