"""The engine side of a weight push: runs inside vLLM's worker processes, as its weight transfer backend `slipstream`.

Invariants:
- Nothing of the model changes before every tensor of a version has arrived and was found to fit: a trainer that dies in the
  middle, a name or a shape that the model does not have, leaves the old weights serving.
- Staged tensors wait in host memory: on a GPU there is no room for a second model beside the KV cache.
- Joining a new group drops the old one, and whatever of an unfinished push was staged.

vLLM calls, over its HTTP routes: `init_transfer_engine`, then per version `start_weight_update`, `receive_weights`,
`finish_weight_update`. Should loading itself fail, the model is left unusable on purpose and its next step ends the engine
process: a replica with half a policy must not serve, and the supervisor starts another.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import safe_open
from vllm.config import ModelConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from ..errors import WeightSyncError
from .buckets import buckets_of, unpack
from .group import BroadcastGroup
from .plan import GroupPlan, TransferPlan

logger = logging.getLogger(__name__)

Shapes = dict[str, tuple[int, ...]]
"""Hugging Face name -> shape."""


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
    """One worker's end of the broadcast group."""

    init_info_cls = Join
    update_info_cls = Receive
    supports_draft_weight_update = False

    _group: BroadcastGroup | None = None
    _staged: list[tuple[str, torch.Tensor]] | None = None
    _known: Shapes | None = None

    def init_transfer_engine(self, init_info: Join) -> None:
        """Join the plan's group; blocks until the whole group has met. Raises WeightSyncError."""
        self.shutdown()
        if self._known is None:
            self._known = checkpoint_shapes(self.model_config)
        here = self.parallel_config
        rank = init_info.plan.rank_offset + here.data_parallel_index * here.world_size + here.rank
        self._group = BroadcastGroup(init_info.plan, rank, self.device)

    def start_weight_update(self) -> None:
        """Open a push; whatever an earlier one staged is gone."""
        self._staged = None

    def receive_weights(self, update_info: Receive) -> None:
        """Stage every tensor of one version. Raises WeightSyncError, and leaves the group: its state is unknown then."""
        group, self._group = self._group, None
        if group is None:
            raise WeightSyncError("weights were announced to a replica that is in no broadcast group; join one first")
        try:
            tied = getattr(self.model_config.hf_text_config, "tie_word_embeddings", False)
            check_fit(update_info.plan, self._known, tied=tied)
            self._staged = receive(group, update_info.plan)
        except BaseException:
            group.close()
            raise
        self._group = group

    def finish_weight_update(self) -> None:
        """Load what was staged. Without any, this closes a push that was abandoned, and the weights stay as they are."""
        staged, self._staged = self._staged, None
        if staged is not None:
            load(self.model, self.model_config, staged, self.device)

    def shutdown(self) -> None:
        """Leave the group and forget what was staged."""
        if self._group is not None:
            self._group.close()
        self._group = None
        self._staged = None


def receive(group: BroadcastGroup, plan: TransferPlan) -> list[tuple[str, torch.Tensor]]:
    """All tensors of a plan, in host memory."""
    tensors: list[tuple[str, torch.Tensor]] = []
    for bucket in buckets_of(plan):
        data = torch.empty(bucket.nbytes, dtype=torch.uint8, device=group.device)
        group.broadcast(data)
        tensors.extend(unpack(plan, bucket, data.cpu()))
    return tensors


def check_fit(plan: TransferPlan, known: Shapes | None, *, tied: bool) -> None:
    """Compare what is announced with what the model was first loaded from.

    Raises:
        WeightSyncError: a name is unknown, missing or has another shape. With tied embeddings `lm_head.weight` may be missing.
    """
    if known is None:
        return
    given = dict(zip(plan.names, plan.shapes, strict=True))
    if unknown := sorted(given.keys() - known.keys()):
        raise WeightSyncError(
            f"version {plan.version}: the model has no tensor {unknown[0]!r} ({len(unknown)} unknown names)"
        )
    missing = known.keys() - given.keys() - ({"lm_head.weight"} if tied else set())
    if missing:
        raise WeightSyncError(f"version {plan.version} lacks {min(missing)!r} ({len(missing)} missing names)")
    for name, shape in given.items():
        if shape != known[name]:
            raise WeightSyncError(f"version {plan.version}: {name} is {shape}, the model has {known[name]}")


def checkpoint_shapes(model_config: ModelConfig) -> Shapes | None:
    """Names and shapes in the safetensors that the model was loaded from; None where there are none on this machine."""
    shapes: Shapes = {}
    for file in sorted(_folder(model_config).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    if not shapes:
        logger.warning(
            "no safetensors of %s here: names and shapes of pushed weights are not checked", model_config.model
        )
    return shapes or None


def _folder(model_config: ModelConfig) -> Path:
    """Where the model's files lie; for a hub name its place in the local cache, downloaded by vLLM before."""
    folder = Path(model_config.model)
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(model_config.model, revision=model_config.revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return folder


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
