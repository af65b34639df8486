"""FSDP2's checkpoints, in torch's distributed format (`learner/checkpoint.py`): the weights that are trained and their AdamW state
as they were when `save` was called, by parameter name, so that any number of ranks can read them, however these divide experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import STATE_DICT_TYPE, TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor

from ...configs.backends import FROZEN_VISION
from ...errors import CheckpointError
from .. import lora
from ..checkpoint import READING, Saver, unreadable
from ..checkpoint_folder import CheckpointState, read_state
from .experts import DividedExperts

TRAINED_ONLY = StateDictOptions(ignore_frozen_params=True, strict=False)

VISION = ".visual."  # in the name of a parameter of a vision tower

MOMENT = ("optimizer.state.", ".exp_avg")  # around the name of a trained parameter, the key of its first moment

Shapes = Mapping[str, tuple[int, ...]]


def save(
    saver: Saver,
    directory: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    state: CheckpointState,
    experts: DividedExperts | None,
) -> Future[None]:
    """Collective. Begin to write `directory`, replacing one of the same name: see `Saver.begin`."""
    # Copies, CPU tensors too: the next step changes the originals while the thread writes.
    stager = DefaultStager(StagingOptions(False, False, False, False))
    content = stager.stage(_content(model, optimizer, experts))
    stager.close()
    assert isinstance(content, dict)

    def write(folder: Path) -> None:
        dcp_save(content, checkpoint_id=folder, process_group=saver.group)

    return saver.begin(directory, state, write)


def load(
    directory: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    experts: DividedExperts | None,
    *,
    of: str,
) -> CheckpointState:
    """Collective. Read `directory` into `model`, which is that `of` a folder, and `optimizer`, sharded as they are now. Raises
    CheckpointError where the folder is incomplete, or of another model, LearnerError where it could not be read this time."""
    try:
        state = read_state(directory)
        content = _content(model, optimizer, experts)
        entries = FileSystemReader(directory).read_metadata().state_dict_metadata.items()
        # Moments have the names of trained weights; the state dict of a tied model has its head twice.
        saved = {
            name.removeprefix(MOMENT[0]).removesuffix(MOMENT[1]): tuple(entry.size)
            for name, entry in entries
            if name.startswith(MOMENT[0]) and name.endswith(MOMENT[1]) and isinstance(entry, TensorStorageMetadata)
        }
        trained = {name: tuple(moments["exp_avg"].shape) for name, moments in content["optimizer"]["state"].items()}
        if difference := _difference(saved, trained):
            raise CheckpointError(f"checkpoint {directory} is of another model than {of!r}: {difference}")
        dcp_load(content, checkpoint_id=directory)
    except READING as error:
        raise unreadable(directory, error) from error
    if experts is not None:
        content = _with_experts(content, experts, experts.part)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=content["model"],
        optim_state_dict=content["optimizer"],
        options=TRAINED_ONLY,
    )
    return state


def _content(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, experts: DividedExperts | None
) -> STATE_DICT_TYPE:
    """What a checkpoint holds: `model`, trained weights by name, and `optimizer`, AdamW's state and groups by those names. They
    share memory with those of `model` and `optimizer`."""
    if not optimizer.state:
        _begin_states(optimizer)  # torch would take a step with gradients of 0, which counts
    weights, moments = get_state_dict(model, optimizer, options=TRAINED_ONLY)
    content: STATE_DICT_TYPE = {"model": weights, "optimizer": moments}
    return content if experts is None else _with_experts(content, experts, experts.whole)


def _with_experts(
    content: STATE_DICT_TYPE, experts: DividedExperts, form: Callable[[DTensor], DTensor]
) -> STATE_DICT_TYPE:
    """`content` with the `form` of weights and moments of experts in their place."""

    def formed(name: str, value: Any) -> Any:
        return form(value) if name in experts.names and isinstance(value, DTensor) else value

    moments = content["optimizer"]
    state = {name: {key: formed(name, value) for key, value in one.items()} for name, one in moments["state"].items()}
    weights = {name: formed(name, value) for name, value in content["model"].items()}
    return {"model": weights, "optimizer": {**moments, "state": state}}


def _begin_states(optimizer: torch.optim.Optimizer) -> None:
    """AdamW's state before its first step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            device = parameter.device if group["fused"] else None
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=device),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }


def _difference(saved: Shapes, ours: Shapes) -> str | None:
    """A message about why weights of shapes `saved` do not fit `ours`; None where they do."""
    if why := lora.other_rank(lora.rank_of(saved), lora.rank_of(ours)):
        return why
    different = sorted(name for name in saved.keys() | ours.keys() if saved.get(name) != ours.get(name))
    if not different:
        return None
    if all(VISION in name for name in different):  # trained on one side only
        if not any(VISION in name for name in saved):
            return f"its vision tower was not trained; set learner.backend.options=[{FROZEN_VISION}] to resume it"
        if not any(VISION in name for name in ours):
            return f"its vision tower was trained; leave {FROZEN_VISION} out of learner.backend.options to resume it"
    name = different[0]
    return f"there {name} is {_shown(saved.get(name))}, here {_shown(ours.get(name))}"


def _shown(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else f"of shape {list(shape)}"
