"""The engine side of a weight push: runs in SGLang's scheduler processes, one per rank.

The learner's client calls SGLang's own `/update_weights_from_tensor`; `load_format` selects the action:

    COMMAND   the body is a ReceiverCommand: join a group, or begin to stage a version. Answered at once, while requests run.
    LOADER    load the staged version, as SGLang loads any update: paused, with the new version recorded for every running
              request, and the cache dropped on request.

Invariants, besides those of `WeightStaging`:
- The model does not change before all ranks hold every tensor of a version, verified.
- The scheduler never waits for the learner: joining a group and receiving have their own threads.
- If loading itself fails, the exception ends the server: a replica with half a policy must not serve.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ....errors import WeightSyncError
from ....weightsync.plan import BroadcastSource, GroupPlan, TransferPlan
from ....weightsync.staging import Tensors, WeightStaging

HEAD = "lm_head.weight"

JOIN_S = 2.0  # longest wait for a group once weights are announced: the learner has joined it by then


class ReceiverCommand(msgspec.Struct, frozen=True):
    """Exactly one field is set. As JSON, it is the only entry of `serialized_named_tensors`."""

    join: GroupPlan | None = None
    begin: TransferPlan | None = None


class SglangReceiver:
    """One rank's receiver; `updater` is SGLang's own object that updates the weights of this rank's model."""

    def __init__(self, updater: Any) -> None:
        config = updater.model_config
        self.tied = bool(getattr(config.hf_text_config, "tie_word_embeddings", False))
        device = torch.device("cpu") if updater.device == "cpu" else torch.device(updater.device, updater.gpu_id)
        self.staging = WeightStaging.for_checkpoint(
            updater.tp_rank, device, config.model_path, config.revision, tied=self.tied
        )
        self._joining: tuple[threading.Thread, list[str]] | None = None  # and why it failed

    def execute(self, command: ReceiverCommand) -> None:
        """Start what `command` asks for. Raises WeightSyncError where it cannot be started."""
        if command.join is not None:
            errors: list[str] = []
            thread = threading.Thread(target=self._join, args=(command.join, errors), daemon=True)
            thread.start()
            self._joining = thread, errors
        if command.begin is not None:
            if self._joining is not None and isinstance(command.begin.source, BroadcastSource):
                thread, errors = self._joining
                thread.join(JOIN_S)
                if thread.is_alive():
                    raise WeightSyncError(
                        f"weights were announced, but the broadcast group has not met {JOIN_S:g} s later"
                    )
                if errors:
                    raise WeightSyncError(errors[0])
            self.staging.begin(command.begin)

    def _join(self, plan: GroupPlan, errors: list[str]) -> None:
        try:
            self.staging.join(plan)
        except WeightSyncError as error:
            errors.append(str(error))


_receiver: SglangReceiver | None = None  # the receiver of this process: SGLang calls functions, not objects
_ready: Tensors = []  # what `load` is about to load


def handle(manager: Any, request: Any, original: Callable[[Any, Any], Any] | None) -> Any:
    """Execute the command in `request`, or, with the `original` method of SGLang's update manager, load the staged version. Returns
    SGLang's answer to the request."""
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqOutput  # pyright: ignore[reportMissingImports]

    global _receiver
    if _receiver is None:
        _receiver = SglangReceiver(manager.tp_worker.model_runner.weight_updater)
    try:
        if original is not None:
            return _swap(original, manager, request, _receiver)
        (command,) = request.serialized_named_tensors
        _receiver.execute(msgspec.json.decode(command, type=ReceiverCommand))
        return UpdateWeightsFromTensorReqOutput(success=True, message="")
    except (WeightSyncError, ValueError) as error:
        return UpdateWeightsFromTensorReqOutput(success=False, message=str(error))


def load(model: Any, named_tensors: Tensors) -> None:
    """SGLang's custom weight loader: load the version that all ranks hold, sharded and fused as at the first load."""
    staged = list(_ready)
    _ready.clear()
    model.load_weights(staged + _untied_head(model, staged))


def _untied_head(model: Any, tensors: Tensors) -> Tensors:
    """The embeddings as `lm_head`, where SGLang 0.5.23 ignores that they are tied: in most mixtures of experts `lm_head` is a
    separate parameter, which is not loaded, and the model computes garbage."""
    given = dict(tensors)
    if not (_receiver and _receiver.tied) or HEAD in given or HEAD not in dict(model.named_parameters()):
        return []
    return [(HEAD, tensor) for name, tensor in given.items() if name.endswith("embed_tokens.weight")]


def _swap(original: Callable[[Any, Any], Any], manager: Any, request: Any, receiver: SglangReceiver) -> Any:
    """Load the staged version on every rank, or on none. Raises WeightSyncError when a rank does not hold it."""
    from sglang.srt.managers.io_struct import (  # pyright: ignore[reportMissingImports]
        BeginWeightUpdateReqInput,
        EndWeightUpdateReqInput,
    )

    tensors, failed = [], ""
    try:
        tensors = receiver.staging.take(int(request.weight_version))
    except WeightSyncError as error:
        failed = str(error)
    ranks = dist.get_world_size(manager.tp_cpu_group)
    ready = torch.tensor([0 if failed else 1])
    dist.all_reduce(ready, group=manager.tp_cpu_group)
    if int(ready) < ranks:
        raise WeightSyncError(failed or f"version {request.weight_version} is staged on {int(ready)} of {ranks} ranks")
    manager.begin_weight_update(BeginWeightUpdateReqInput(selector=request.selector))
    _ready[:] = tensors
    request.serialized_named_tensors = [pickle.dumps([])] * ranks
    answer = original(manager, request)
    manager.end_weight_update(EndWeightUpdateReqInput())
    return answer
