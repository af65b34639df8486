"""The engine side of a weight push: runs inside vLLM's worker processes, as its weight transfer backend `slipstream`.

Invariants:
- The engine steps on while a version arrives: `Staging` receives it in a thread of its own.
- Nothing of the model changes before every tensor of a version has arrived, has the learner's checksum and was found to fit: a
  trainer that dies in the middle, a name or a shape that the model does not have, leaves the old weights serving.
- A version that was staged and never asked for is replaced by the next one, and never loaded.

vLLM calls, over its HTTP routes: `init_transfer_engine` before broadcasts, then per version `start_weight_update`,
`receive_weights`, and while paused `finish_weight_update`. Should loading itself fail, the model is left unusable on purpose and
its next step ends the engine process: a replica with half a policy must not serve, and the supervisor starts another.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
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

from ..errors import WeightSyncError
from .fit import TIED, Shapes, base_weights, check_fit, checkpoint_shapes
from .plan import GroupPlan, TransferPlan
from .staging import Staging


@dataclass
class Join(WeightTransferInitInfo):
    """Body of `/init_weight_transfer_engine`: a GroupPlan as a JSON object."""

    plan: GroupPlan

    def __post_init__(self) -> None:
        self.plan = msgspec.convert(self.plan, GroupPlan)


@dataclass
class Receive(WeightTransferUpdateInfo):
    """Body of `/update_weights`: a TransferPlan as a JSON object."""

    plan: TransferPlan

    def __post_init__(self) -> None:
        self.plan = msgspec.convert(self.plan, TransferPlan)


class Receiver(WeightTransferEngine[Join, Receive]):
    """One worker's end of a push."""

    init_info_cls = Join
    update_info_cls = Receive
    supports_draft_weight_update = False

    _announced: int | None = None

    def init_transfer_engine(self, init_info: Join) -> None:
        """Join the plan's group; blocks until the whole group has met. Raises WeightSyncError."""
        self._announced = None
        self._staging.join(init_info.plan)

    def start_weight_update(self) -> None:
        """Nothing to prepare: the old weights keep serving."""

    def receive_weights(self, update_info: Receive) -> None:
        """Begin to stage one version; the receipt says how it went."""
        self._announced = update_info.plan.version
        self._staging.begin(update_info.plan)

    def finish_weight_update(self) -> None:
        """Load the version that was announced last. Raises WeightSyncError where it is not staged whole."""
        version, self._announced = self._announced, None
        if version is None:
            raise WeightSyncError("no version was announced since the last one was loaded; announce one first")
        load(self.model, self.model_config, self._staging.take(version), self.device)

    def shutdown(self) -> None:
        """Leave the group and forget what was staged."""
        self._announced = None
        self._staging.close()

    @cached_property
    def _staging(self) -> Staging:
        here: Any = self.parallel_config
        rank = here.data_parallel_index * here.world_size + here.rank
        base = partial(base_weights, self.model_config.model, self.model_config.revision)
        return Staging(rank, self.device, self._check, base)

    @cached_property
    def _known(self) -> Shapes | None:
        return checkpoint_shapes(self.model_config.model, self.model_config.revision)

    def _check(self, plan: TransferPlan) -> None:
        tied = getattr(self.model_config.hf_text_config, "tie_word_embeddings", False)
        check_fit(plan, self._known, optional=TIED if tied else frozenset())


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
    """vLLM 0.32 on CPU packs a layer's experts only while it has no kernel yet: a reload would leave them unpacked, and the
    grouped GEMM would read garbage without a word. Without the old kernel the set-up runs in full."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None  # type: ignore[union-attr]


def _repack_linear_layers(model: torch.nn.Module) -> None:
    """vLLM 0.32 on CPU: a reload repacks only layers that were given a tensor. A tied `lm_head` is given none, and would serve
    its old packed copy without a word. Repack every layer that still owns a dense weight."""
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and isinstance(weight, torch.Tensor) and weight.numel():
            module.quant_method.process_weights_after_loading(module)  # type: ignore[union-attr]
