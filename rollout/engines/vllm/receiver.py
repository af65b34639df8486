"""The engine side of a weight push: runs in vLLM's worker processes, as its weight transfer backend `slipstream`.

Invariants, besides those of `WeightStaging`:
- A staged version that is never swapped in is replaced by the next one, and never loaded.
- If loading itself fails, the model stays unusable and its next step ends the engine process: a replica with half a policy must
  not serve.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import torch
from vllm.config import ModelConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from ....errors import WeightSyncError
from ....weightsync.plan import GroupPlan, TransferPlan
from ....weightsync.staging import WeightStaging


@dataclass
class JoinInfo(WeightTransferInitInfo):
    """Body of `/init_weight_transfer_engine`; vLLM makes it of a JSON object."""

    plan: GroupPlan

    def __post_init__(self) -> None:
        self.plan = msgspec.convert(self.plan, GroupPlan)


@dataclass
class ReceiveInfo(WeightTransferUpdateInfo):
    """Body of `/update_weights`."""

    plan: TransferPlan

    def __post_init__(self) -> None:
        self.plan = msgspec.convert(self.plan, TransferPlan)


class VllmReceiver(WeightTransferEngine[JoinInfo, ReceiveInfo]):
    init_info_cls = JoinInfo
    update_info_cls = ReceiveInfo
    supports_draft_weight_update = False

    _announced: int | None = None

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        """Join the plan's group; blocks until the group is complete. Raises WeightSyncError."""
        self._announced = None
        self._staging.join(init_info.plan)

    def start_weight_update(self) -> None:
        """Nothing to prepare: the old weights keep serving."""

    def receive_weights(self, update_info: ReceiveInfo) -> None:
        self._announced = update_info.plan.version
        self._staging.begin(update_info.plan)

    def finish_weight_update(self) -> None:
        """Load the version that was announced last. Raises WeightSyncError where it is not staged whole."""
        version, self._announced = self._announced, None
        if version is None:
            raise WeightSyncError("no version was announced since the last one was loaded; announce one first")
        load(self.model, self.model_config, self._staging.take(version), self.device)

    def shutdown(self) -> None:
        self._announced = None
        self._staging.close()

    @cached_property
    def _staging(self) -> WeightStaging:
        here: Any = self.parallel_config
        rank = here.data_parallel_index * here.world_size + here.rank
        model = self.model_config
        tied = bool(getattr(model.hf_text_config, "tie_word_embeddings", False))
        return WeightStaging.for_checkpoint(rank, self.device, model.model, model.revision, tied=tied)


def load(
    model: torch.nn.Module, model_config: ModelConfig, tensors: list[tuple[str, torch.Tensor]], device: torch.device
) -> None:
    """Replace the model's weights, through vLLM's layerwise reload (sharding, fusing, quantizing as at the first load)."""
    if device.type == "cpu":
        _forget_expert_kernels(model)
    initialize_layerwise_reload(model)
    model.load_weights(tensors)  # type: ignore[operator]
    finalize_layerwise_reload(model, model_config)
    if device.type == "cpu":
        _repack_linear_layers(model)


def _forget_expert_kernels(model: torch.nn.Module) -> None:
    """vLLM 0.32 on CPU packs a layer's experts only while it has no kernel: a reload would leave them unpacked, and the grouped
    GEMM would silently read garbage. Without the old kernel the set-up runs in full."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None  # type: ignore[union-attr]


def _repack_linear_layers(model: torch.nn.Module) -> None:
    """vLLM 0.32 on CPU repacks at a reload only layers that got a tensor. A tied `lm_head` gets none, and would silently serve its
    old packed copy. Repack every layer that still owns a dense weight."""
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and isinstance(weight, torch.Tensor) and weight.numel():
            module.quant_method.process_weights_after_loading(module)  # type: ignore[union-attr]
