"""Pushed linear layers in 8-bit floats (fp8): the format of DeepSeek-V3's checkpoints, which vLLM, SGLang and transformers read.

    NAME.weight            float8_e4m3fn [out, in]
    NAME.weight_scale_inv  float32 [ceil(out / 128), ceil(in / 128)], what each block of 128 by 128 is multiplied by

    learner ── weights ──> quantized ── half of bfloat16's bytes ──> server: kernels for fp8, or dequantized

Invariants:
- A block's scale is max |w| / 448, the largest float8 is 448, and a weight becomes the float8 nearest to w / scale (DeepSeek-V3,
  arXiv:2412.19437, section 3.3.2). No weight is off by more than 1/16 of itself or 1/1024 of its scale.
- Equal weights give equal bytes on every device, so that a delta holds what changed only.
- Weights of linear layers are quantized by the layer's name, and nothing else: no embedding, head, norm, router, bias or
  convolution, and no tensor that holds several experts.

Imported by vLLM's and SGLang's processes: only packages that both have may be imported here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.nn.functional as F

from ..errors import WeightSyncError

DTYPE = torch.float8_e4m3fn
BLOCK = 128
LARGEST = 448.0  # float8_e4m3fn
LEAST = 1e-12  # of a block's max |w|: the scale of a block of zeros is a normal float32, too
STRIP = 32 * BLOCK  # rows that are quantized at once: their float32 copy is small beside the model
WEIGHT, SCALE = ".weight", ".weight_scale_inv"
LAYERS = frozenset(
    {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),  # latent attention
        *("w1", "w2", "w3"),  # experts of Mixtral and MiniMax
    }
)
"""Names of the linear layers that are quantized, in the checkpoints of every family that the learner trains."""

Shape = tuple[int, ...]


def is_quantized(name: str, shape: Shape) -> bool:
    """Whether the tensor `name` of a checkpoint is quantized."""
    return len(shape) == 2 and name.endswith(WEIGHT) and name.removesuffix(WEIGHT).rpartition(".")[2] in LAYERS


def scale_shape(shape: Shape) -> Shape:
    """The shape of the scales of a weight [out, in]."""
    return tuple(-(-size // BLOCK) for size in shape)


@torch.no_grad()
def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float8_e4m3fn [out, in] and float32 scales of a weight [out, in] of any size and float dtype, on its device. A number that
    is not finite gives float8 that are none."""
    values = torch.empty_like(weight, dtype=DTYPE, memory_format=torch.contiguous_format)
    scales = torch.empty(scale_shape(tuple(weight.shape)), dtype=torch.float32, device=weight.device)
    for start in range(0, len(weight), STRIP):
        strip = weight[start : start + STRIP].float()
        blocks = _blocks(strip)
        found = blocks.abs().amax(dim=(1, 3)).clamp(min=LEAST)
        found /= torch.full_like(
            found, LARGEST
        )  # by a number, CUDA multiplies by its reciprocal, which rounds otherwise
        scaled = (blocks / found[:, None, :, None]).clamp(-LARGEST, LARGEST)
        rows, columns = strip.shape
        values[start : start + rows] = scaled.flatten(2).flatten(0, 1)[:rows, :columns].to(DTYPE)
        scales[start // BLOCK : start // BLOCK + len(found)] = found
    return values, scales


@torch.no_grad()
def dequantize(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight [out, in] that `quantize` gave `values` and `scales` for, computed in float32 and rounded once to `dtype`."""
    rows, columns = values.shape
    blocks = _blocks(values.float()) * scales[:, None, :, None]
    return blocks.flatten(2).flatten(0, 1)[:rows, :columns].to(dtype).contiguous()


def _blocks(matrix: torch.Tensor) -> torch.Tensor:
    """[out, in] as [ceil(out / 128), 128, ceil(in / 128), 128], zeros where it has no number."""
    rows, columns = matrix.shape
    padded = F.pad(matrix, (0, -columns % BLOCK, 0, -rows % BLOCK))
    return padded.reshape(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)


def quantized(named_weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights with those of linear layers in fp8, each followed by its scales. Holds no tensor while it asks for the next."""
    for name, tensor in named_weights:
        if is_quantized(name, tuple(tensor.shape)):
            values, scales = quantize(tensor)
            del tensor
            yield name, values
            del values
            yield name.removesuffix(WEIGHT) + SCALE, scales
            del scales
        else:
            yield name, tensor
            del tensor


def dequantized(
    named_weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a push that passed `check_scales`, in any order, those in fp8 as numbers of `dtype`."""
    waiting: dict[str, torch.Tensor] = {}  # layer -> its values, or its scales
    for name, tensor in named_weights:
        if tensor.dtype != DTYPE and not name.endswith(SCALE):
            yield name, tensor
            continue
        layer = name.removesuffix(SCALE).removesuffix(WEIGHT)
        if (other := waiting.pop(layer, None)) is None:
            waiting[layer] = tensor
            continue
        values, scales = (tensor, other) if tensor.dtype == DTYPE else (other, tensor)
        yield layer + WEIGHT, dequantize(values, scales, dtype)


def check_scales(shapes: Mapping[str, Shape], dtypes: Mapping[str, str]) -> dict[str, Shape]:
    """The shapes of a push, by name, without its scales. Raises WeightSyncError: a weight in fp8 and its scales are not both there,
    or do not fit each other."""
    weights = dict(shapes)
    for name, dtype in dtypes.items():
        if dtype == "float8_e4m3fn":
            scale = name.removesuffix(WEIGHT) + SCALE
            found, needed = weights.pop(scale, None), scale_shape(shapes[name])
            if found != needed or dtypes[scale] != "float32":
                there = f"{dtypes[scale]} {found}" if found is not None else "nothing"
                raise WeightSyncError(
                    f"{name} of shape {shapes[name]} needs {scale}, float32 {needed}; there is {there}"
                )
    if alone := sorted(name for name in weights if name.endswith(SCALE)):
        raise WeightSyncError(f"{alone[0]!r} is of no weight in fp8 ({len(alone)} such scales)")
    return weights
