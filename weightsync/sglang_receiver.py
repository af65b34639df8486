"""The engine side of a weight push: runs inside SGLang's scheduler processes, one per rank.

The learner's client speaks to it through SGLang's own `/update_weights_from_tensor`; `load_format` says what is meant:

    COMMAND   the body is a Command: join a group, or begin to stage a version. Answered at once, while requests run.
    LOADER    load the staged version. SGLang does so as for any update: paused, between the begin and the end of an update, with
              the new version noted for every running request, and the cache dropped where asked.

Invariants:
- Nothing of the model changes before all ranks hold every tensor of a version, proven and found to fit: a trainer that dies in the
  middle, a name or a shape that the model does not have, leaves the old weights serving.
- The scheduler never waits for the learner: meeting a group and receiving have threads of their own.
- Should loading itself fail, the exception ends the server on purpose: a replica with half a policy must not serve, and the
  supervisor starts another.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ..errors import WeightSyncError
from .fit import TIED, Shapes, base_weights, check_fit, checkpoint_shapes
from .plan import Broadcast, GroupPlan, TransferPlan
from .staging import Staging

HEAD = "lm_head.weight"

MEET_S = 2.0
"""Longest wait for the thread that joins a group, once weights are announced: the learner has met the group by then."""

Tensors = list[tuple[str, torch.Tensor]]
"""Hugging Face name and tensor."""


class Command(msgspec.Struct, frozen=True):
    """What a receiver is told; exactly one is given. As JSON, it is the only entry of `serialized_named_tensors`."""

    join: GroupPlan | None = None
    begin: TransferPlan | None = None


class Receiver:
    """One rank's end of the pushes.

    Args:
        updater: SGLang's own object that updates the weights of this rank's model.
    """

    def __init__(self, updater: Any) -> None:
        self._config = updater.model_config
        self.tied = bool(getattr(self._config.hf_text_config, "tie_word_embeddings", False))
        device = f"cuda:{updater.gpu_id}" if updater.device == "cuda" else updater.device
        base = partial(base_weights, self._config.model_path, self._config.revision)
        self._staging = Staging(updater.tp_rank, torch.device(device), self._check, base)
        self._meeting: _Meeting | None = None

    def tell(self, command: Command) -> None:
        """Start what is asked for. Raises WeightSyncError where that cannot be."""
        if command.join is not None:
            self._meeting = _Meeting(self._staging, command.join)
            self._meeting.start()
        if command.begin is not None:
            if self._meeting is not None and isinstance(command.begin.source, Broadcast):
                self._meeting.join(MEET_S)
                if self._meeting.is_alive():
                    raise WeightSyncError(
                        f"weights were announced, but the broadcast group has not met {MEET_S:g} s later"
                    )
                if self._meeting.error:
                    raise WeightSyncError(self._meeting.error)
            self._staging.begin(command.begin)

    def take(self, version: int) -> Tensors:
        """The staged tensors of `version`. Raises WeightSyncError when it is not staged whole."""
        return self._staging.take(version)

    @cached_property
    def _known(self) -> Shapes | None:
        return checkpoint_shapes(self._config.model_path, self._config.revision)

    def _check(self, plan: TransferPlan) -> None:
        check_fit(plan, self._known, optional=TIED if self.tied else frozenset())


class _Meeting(threading.Thread):
    """Joins a group. `error` is final once the thread has ended."""

    def __init__(self, staging: Staging, plan: GroupPlan) -> None:
        super().__init__(name=f"join-{plan.name}", daemon=True)
        self.error = ""
        self._staging, self._plan = staging, plan

    def run(self) -> None:
        try:
            self._staging.join(self._plan)
        except WeightSyncError as error:
            self.error = str(error)


_receiver: Receiver | None = None
"""This process's own: SGLang calls functions, not objects."""

_ready: Tensors = []
"""What `load` is about to load."""


def take(original: Callable[[Any, Any], Any], manager: Any, request: Any) -> Any:
    """One of our requests, in place of the `original` method of SGLang's update manager; returns SGLang's answer to it."""
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqOutput  # pyright: ignore[reportMissingImports]

    from .sglang_plugin import COMMAND

    global _receiver
    if _receiver is None:
        _receiver = Receiver(manager.tp_worker.model_runner.weight_updater)
    try:
        if request.load_format == COMMAND:
            (command,) = request.serialized_named_tensors
            _receiver.tell(msgspec.json.decode(command, type=Command))
            return UpdateWeightsFromTensorReqOutput(success=True, message="")
        return _swap(original, manager, request, _receiver)
    except (WeightSyncError, ValueError) as error:
        return UpdateWeightsFromTensorReqOutput(success=False, message=str(error))


def load(model: Any, named_tensors: Tensors) -> None:
    """SGLang's custom weight loader: load what all ranks have ready, sharded and fused as at the first load."""
    staged = list(_ready)
    _ready.clear()
    model.load_weights(staged + _untied_head(model, staged))


def _untied_head(model: Any, tensors: Tensors) -> Tensors:
    """SGLang 0.5.23 ignores in most of its mixtures of experts that embeddings are tied: their `lm_head` is a parameter of its own,
    which nothing loads, and they compute garbage without a word. Give it the embeddings."""
    given = dict(tensors)
    if not (_receiver and _receiver.tied) or HEAD in given or HEAD not in dict(model.named_parameters()):
        return []
    return [(HEAD, tensor) for name, tensor in given.items() if name.endswith("embed_tokens.weight")]


def _swap(original: Callable[[Any, Any], Any], manager: Any, request: Any, receiver: Receiver) -> Any:
    """Load the staged version on every rank, or on none. Raises WeightSyncError when some rank does not hold it."""
    from sglang.srt.managers.io_struct import (  # pyright: ignore[reportMissingImports]
        BeginWeightUpdateReqInput,
        EndWeightUpdateReqInput,
    )

    tensors: Tensors = []
    failed = ""
    try:
        tensors = receiver.take(int(request.weight_version))
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
