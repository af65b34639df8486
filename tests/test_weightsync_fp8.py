"""Weights in fp8: the format is that of DeepSeek-V3's checkpoints, and a push of them has half of the bytes of bfloat16."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from slipstream.configs import load
from slipstream.configs.engine_checks import FP8
from slipstream.errors import ConfigError, WeightSyncError
from slipstream.rollout.engines import registry as servers
from slipstream.rollout.engines.quantized_model import check_blocks, quantization_config, weight_shapes
from slipstream.rollout.engines.vllm import launch as vllm_server
from slipstream.tests import tiny
from slipstream.weightsync import delta, fp8
from slipstream.weightsync.plan import DeltaSource, FileSource
from slipstream.weightsync.snapshot import StoredTensors, WeightSnapshot, take_snapshot
from slipstream.weightsync.transports import write_safetensors
from slipstream.weightsync.weight_check import check_weights
from transformers import DeepseekV3Config, GPT2Config, GptOssConfig, MixtralConfig, PreTrainedConfig, Qwen2MoeConfig
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from transformers.utils.quantization_config import FineGrainedFP8Config

LAYER = "model.layers.0.mlp.up_proj"
SIZES = [(128, 128), (256, 384), (1, 1), (127, 129), (64, 192), (300, 5)]


def matrix(*shape: int, seed: int = 0) -> torch.Tensor:
    """Blocks of different magnitudes, with outliers."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator).exp() / 50
    found.view(-1)[::97] *= 30
    return found


def deepseek_dequantized(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """`weight_dequant` of DeepSeek-V3's inference/kernel.py, number by number."""
    return torch.stack(
        [
            torch.stack([values[i, j].float() * scales[i // 128, j // 128] for j in range(values.shape[1])])
            for i in range(values.shape[0])
        ]
    )


@pytest.mark.parametrize("shape", [(130, 5), (3, 257)])
def test_scales_are_applied_as_deepseek_applies_them(shape: tuple[int, int]) -> None:
    values, scales = fp8.quantize(matrix(*shape))
    assert torch.equal(fp8.dequantize(values, scales, torch.float32), deepseek_dequantized(values, scales))


@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_a_weight_is_off_by_no_more_than_its_float_can_say(shape: tuple[int, int]) -> None:
    weight = matrix(*shape)
    values, scales = fp8.quantize(weight)
    assert (values.dtype, values.shape, scales.dtype) == (torch.float8_e4m3fn, weight.shape, torch.float32)
    assert tuple(scales.shape) == fp8.scale_shape(shape)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            assert scales[i, j] == weight[part].abs().max() / 448
            assert values[part].float().abs().max() == 448
    error = (fp8.dequantize(values, scales, torch.float32) - weight).abs()
    per_weight = scales.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
    assert (error <= torch.maximum(weight.abs() / 16, per_weight / 1024) * (1 + 1e-6)).all()


def test_transformers_reads_what_is_quantized_and_quantizes_alike() -> None:
    weight = matrix(256, 384)
    values, scales = fp8.quantize(weight)
    read = Fp8Dequantize(None)._dequantize_one(values, scales, torch.float32)
    assert torch.equal(read, fp8.dequantize(values, scales, torch.float32))

    class Quantizer:
        quantization_config = FineGrainedFP8Config()

    theirs = Fp8Quantize(Quantizer())._quantize_one("up_proj.weight", weight)
    assert torch.allclose(theirs["up_proj.weight_scale_inv"], scales, rtol=1e-6)
    # They multiply by 448 / max and we divide by max / 448: now and then a weight between two floats goes to the other one.
    same = theirs["up_proj.weight"].view(torch.uint8) == values.view(torch.uint8)
    assert same.float().mean() > 0.999


def test_equal_weights_give_equal_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = matrix(700, 200).bfloat16()
    values, scales = fp8.quantize(weight)
    monkeypatch.setattr(fp8, "STRIP", 256)
    for same in (weight, weight.float(), weight.t().contiguous().t()):
        again = fp8.quantize(same)
        assert torch.equal(again[0].view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(again[1], scales)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gpu_gives_the_same_bytes(dtype: torch.dtype) -> None:
    weight = matrix(5000, 300).to(dtype)
    for here, there in zip(fp8.quantize(weight), fp8.quantize(weight.cuda()), strict=True):
        assert torch.equal(here.view(torch.uint8), there.cpu().view(torch.uint8))


def test_a_block_of_zeros_is_zeros() -> None:
    weight = torch.zeros(256, 128)
    weight[200, 7] = 1e-30
    values, scales = fp8.quantize(weight)
    assert not values.float().any()
    assert (scales > 0).all()


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
async def test_numbers_that_are_not_finite_are_not_pushed(number: float, tmp_path: Path) -> None:
    weight = matrix(200, 200)
    weight[150, 3] = number
    with pytest.raises(WeightSyncError, match=f"{LAYER}.weight(_scale_inv)? holds numbers that are not finite"):
        await take_snapshot(1, fp8.quantized([(f"{LAYER}.weight", weight)]), tmp_path)


async def test_a_disk_that_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A push that could not be stored ends at its deadline, whatever the thread that writes does."""
    goes_on = threading.Event()
    monkeypatch.setattr(StoredTensors, "add", lambda tensors, tensor: goes_on.wait())
    monkeypatch.setattr("slipstream.weightsync.snapshot.WRITE_S", 0.1)
    with pytest.raises(WeightSyncError, match=r"a part of version 1 to be written to .*is the disk stuck"):
        await take_snapshot(1, [(f"{LAYER}.weight", matrix(20, 20))], tmp_path)
    goes_on.set()


async def snapshot_of(folder: Path, weights: dict[str, torch.Tensor], version: int) -> WeightSnapshot:
    return await take_snapshot(version, fp8.quantized(weights.items()), folder)


async def test_a_push_has_half_of_the_bytes_of_bfloat16_and_says_what_it_is(tmp_path: Path) -> None:
    weights = {name: tensor.bfloat16() for name, tensor in tiny.weights(tiny.tiny_qwen3(tmp_path / "m")).items()}
    snapshot = await snapshot_of(tmp_path, weights, 1)
    linear = {name: tensor for name, tensor in weights.items() if "_proj." in name}
    scales = [tensor for name, tensor in zip(snapshot.names, snapshot.tensors, strict=True) if "_scale_inv" in name]
    assert len(scales) == len(linear) == 14
    halved = sum(tensor.nbytes for tensor in linear.values()) / 2
    assert snapshot.nbytes == sum(t.nbytes for t in weights.values()) - halved + sum(t.nbytes for t in scales)
    plan = snapshot.plan(FileSource(""), bucket_bytes=0, keep=False, acks="", receiver="")
    check_weights(plan, {name: tuple(tensor.shape) for name, tensor in weights.items()}, optional=frozenset())
    write_safetensors(tmp_path / "f", snapshot.names, snapshot.tensors, {})
    read = dict(fp8.dequantized(load_file(tmp_path / "f").items(), torch.float32))
    assert read.keys() == weights.keys()
    for name, tensor in weights.items():
        largest = tensor.float().abs().max() / (16 if name in linear else torch.inf)
        assert (read[name].float() - tensor.float()).abs().max() <= largest


async def test_a_delta_holds_the_bytes_that_changed(tmp_path: Path) -> None:
    before = {f"{LAYER}.weight": matrix(256, 256), "model.norm.weight": matrix(256)}
    after = {name: tensor.clone() for name, tensor in before.items()}
    after[f"{LAYER}.weight"][130, 5:9] *= -1
    old, new = [await snapshot_of(tmp_path, weights, i) for i, weights in enumerate((before, after))]
    parts = delta.differences(new.names, list(old.tensors), list(new.tensors))
    assert {name: tensor.numel() for name, tensor in parts.items()} == {
        f"{LAYER}.weight:indices": 4,
        f"{LAYER}.weight:values": 4,
    }
    save_file(parts, tmp_path / "delta")
    plan = new.plan(DeltaSource("", 0), bucket_bytes=0, keep=True, acks="", receiver="")
    base = dict(zip(old.names, old.tensors, strict=True))
    for (_, found), wanted in zip(delta.apply(tmp_path / "delta", plan, base), new.tensors, strict=True):
        assert torch.equal(found.reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8))


SHAPES = {f"{LAYER}.weight": (256, 300), f"{LAYER}.weight_scale_inv": (2, 3), "model.norm.weight": (256,)}
DTYPES = {f"{LAYER}.weight": "float8_e4m3fn", f"{LAYER}.weight_scale_inv": "float32", "model.norm.weight": "bfloat16"}


def test_a_weight_and_its_scales_come_together_or_not_at_all() -> None:
    assert fp8.check_scales(SHAPES, DTYPES) == {name: SHAPES[name] for name in SHAPES if "scale" not in name}
    name, scale = f"{LAYER}.weight", f"{LAYER}.weight_scale_inv"
    without = {one: shape for one, shape in SHAPES.items() if one != scale}
    for shapes, dtypes, says in (
        (without, DTYPES, f"{name} of shape .* needs {scale}, float32 .*there is nothing"),
        (SHAPES | {scale: (3, 2)}, DTYPES, r"needs .*_inv, float32 \(2, 3\); there is float32 \(3, 2\)"),
        (SHAPES, DTYPES | {scale: "bfloat16"}, r"there is bfloat16 \(2, 3\)"),
        (SHAPES, DTYPES | {name: "bfloat16"}, "is of no weight in fp8"),
    ):
        with pytest.raises(WeightSyncError, match=says):
            fp8.check_scales(shapes, dtypes)


# ---- what a server is told


def folder_of(config: PreTrainedConfig, folder: Path) -> str:
    config.save_pretrained(folder)
    return str(folder)


SIZE: dict[str, Any] = {"vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 128, "num_experts_per_tok": 2}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 128,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
FAMILIES = {
    "qwen2_moe": (
        Qwen2MoeConfig(**SIZE, **EXPERTS, intermediate_size=384, shared_expert_intermediate_size=128, num_experts=4),
        {"mlp.gate", "mlp.shared_expert_gate"},
    ),
    "deepseek_v3": (
        DeepseekV3Config(
            **SIZE, **EXPERTS, **LATENT, intermediate_size=384, n_routed_experts=8, first_k_dense_replace=1
        ),
        {"mlp.gate"},
    ),
    "mixtral": (
        MixtralConfig(**SIZE, intermediate_size=128, num_local_experts=4, num_key_value_heads=1, head_dim=128),
        {"block_sparse_moe.gate"},
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_routers_embeddings_and_heads_are_never_quantized(family: str, tmp_path: Path) -> None:
    config, routers = FAMILIES[family]
    told = quantization_config(folder_of(config, tmp_path), 1)
    assert (told["quant_method"], told["weight_block_size"]) == ("fp8", [128, 128])
    layers = {name.partition(".layers.")[2].partition(".")[2] for name in told["modules_to_not_convert"]}
    assert layers - {""} == routers
    assert {"lm_head", "model.embed_tokens"} <= set(told["modules_to_not_convert"])
    quantized = [name for name, shape in weight_shapes(str(tmp_path)).items() if fp8.is_quantized(name, shape)]
    assert sum(".experts." in name for name in quantized) == 24  # matrices of all experts


def test_layers_that_a_kernel_would_split_within_a_block_are_refused(tmp_path: Path) -> None:
    shapes = {f"{LAYER}.weight": (768, 256), "model.layers.0.mlp.down_proj.weight": (256, 768)}
    for ranks in (1, 2, 3, 6):
        check_blocks("m", shapes, ranks, heads=4)
    for ranks, heads in ((2, 4), (4, 4), (8, 4), (64, 4), (1, 8), (4, 8)):  # more GPUs than heads: some have the same
        check_blocks("m", {"l.k_proj.weight": (512, 256)}, ranks, heads)
    for changed, ranks, says in (
        (shapes, 4, rf"{LAYER}.weight of 'm' has 768 outputs, .* multiples of 512"),
        ({"l.down_proj.weight": (256, 768)}, 4, "has 768 inputs, .* multiples of 512"),
        ({"l.k_proj.weight": (64, 256)}, 1, "has 64 outputs, .* multiples of 128"),
        ({"l.v_proj.weight": (512, 256)}, 8, "has 512 outputs, .* multiples of 1024"),  # heads of 64
        ({"l.q_proj.weight": (128, 64)}, 1, "has 64 inputs"),
    ):
        with pytest.raises(ConfigError, match=says):
            check_blocks("m", changed, ranks, heads=8)
    gpt2 = folder_of(GPT2Config(n_layer=1, n_embd=64, n_head=2), tmp_path / "gpt2")
    with pytest.raises(
        ConfigError, match=r"no linear layer of '.*gpt2' has a name that is quantized; these are down_proj"
    ):
        weight_shapes(gpt2)
    gpt_oss = GptOssConfig(**SIZE, intermediate_size=128, num_local_experts=4, num_key_value_heads=1, head_dim=128)
    with pytest.raises(ConfigError, match=r"holds its experts in one tensor, model\.layers\.0\.mlp\.experts"):
        quantization_config(folder_of(gpt_oss, tmp_path), 1)


def test_a_vllm_server_starts_without_weights_as_one_of_a_checkpoint_in_fp8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.tiny_qwen3(tmp_path / "m", wide=True)
    words = [
        "rollout.engine.kind=vllm",
        "model.dtype=bfloat16",
        "weightsync.canary_tolerance=0.5",
        f"model.path={folder}",
    ]

    def command(*more: str) -> list[str]:
        return servers.command(load("quickstart", [*words, *more]), servers.LOOPBACK, 1, seed=0)

    monkeypatch.setattr(vllm_server, "serves_on_cpu", lambda: True)
    with pytest.raises(ConfigError, match=f"{FP8}: vLLM computes in fp8 on GPUs only"):
        command(FP8)
    monkeypatch.setattr(vllm_server, "serves_on_cpu", lambda: False)
    line, plain = command(FP8), command()
    assert [word.partition("=")[0] for word in line if word not in plain] == ["--load-format", "--hf-overrides"]
    assert '"modules_to_not_convert": ["model.embed_tokens"' in next(word for word in line if "hf-overrides" in word)
    for option in ("load_format: auto", "hf_overrides: {}"):
        with pytest.raises(ConfigError, match=rf"options\.\w+: {FP8} sets this argument"):
            command(f"rollout.engine.options={{quantization: fp8, {option}}}")
    drafted = "rollout.engine.options={{quantization: fp8, speculative_config: {{{}, num_speculative_tokens: 2}}}}"
    assert len(command(drafted.format("method: ngram"))) == len(line) + 1
    with pytest.raises(ConfigError, match=rf"options\.speculative_config with {FP8}: .* allowed is the method ngram"):
        command(drafted.format("model: some/ngram-draft"))


NOISE = 0.15
"""nats by which bfloat16 of two implementations may differ, in a tiny model of random weights."""


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/conformance/test_quantized.py asks servers on a GPU")
def test_vllm_computes_with_the_pushed_weights_in_fp8_however_often_they_are_loaded(tmp_path: Path) -> None:
    """On a CPU, in a process of its own, which lacks vLLM's kernel only, see `vllm_in_fp8`."""
    expected, files = [], []
    for seed in range(2):
        folder = tiny.tiny_qwen3(tmp_path / f"m{seed}", seed, wide=True)
        weights = {name: tensor.bfloat16() for name, tensor in tiny.weights(folder).items()}
        for order in ("", "-reversed"):
            files.append(tmp_path / f"weights-{seed}{order}.safetensors")
            save_file(dict(fp8.quantized(weights.items())), files[-1])
        rounded = tiny.load(tiny.rounded_to_fp8(folder, tmp_path / f"rounded-{seed}", torch.bfloat16))
        expected.append(torch.tensor(tiny.canary(rounded)[1]))
    command = [
        sys.executable,
        "-m",
        "slipstream.tests.vllm_in_fp8",
        str(tmp_path / "m0"),
        *map(str, (*files, files[0])),
    ]
    environment = {**os.environ, **vllm_server.common_environment(str(tmp_path / "m0"), 1)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    found = torch.tensor(json.loads(done.stdout.strip().rpartition("\n")[2]))
    for row, which in zip(found, (0, 0, 1, 1, 0), strict=True):
        assert float((row - expected[which]).abs().max()) < NOISE
        assert float((row - expected[1 - which]).abs().max()) > 5 * NOISE
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[2], found[3])
    assert torch.equal(found[0], found[4])


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (["rollout.engine.kind=sglang"], "=fp8 with rollout.engine.kind=sglang: .* allowed are vllm and transformers"),
        (["rollout.engine.kind=vllm"], "=fp8 with model.dtype=float32: .* allowed is bfloat16"),
        (["learner.backend.lora_rank=4"], "=fp8 with learner.backend.lora_rank=4: .* leave one of the two out"),
        (["weightsync.canary_tolerance=0.01"], "weightsync.canary_tolerance=0.01 with .*=fp8 .* 0.1 and more"),
        (["rollout.engine.options.quantization=int4"], "options.quantization: 'int4' is not allowed; .* one of fp8"),
        (
            ["rollout.engine.options.block_size=4"],
            "options.block_size: no such key; allowed in .*options: quantization",
        ),
        (
            ["rollout.engine.kind=vllm", "rollout.engine.options.quantization=int4"],
            "options.quantization: 'int4' is not how .* allowed is fp8",
        ),
    ],
)
def test_what_fp8_does_not_go_with_is_refused_by_one_line(keys: list[str], says: str) -> None:
    usual = ["rollout.engine.kind=transformers", FP8, "weightsync.canary_tolerance=0.5"]
    load("quickstart", usual)
    with pytest.raises(ConfigError, match=says) as refused:
        load("quickstart", [*usual, *keys])
    assert "\n" not in str(refused.value)
