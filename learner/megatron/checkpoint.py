"""Checkpoints in Megatron's own distributed format (`learner/checkpoint.py`).

Invariants:
- It has the float32 master weights with their moments, by name and not by rank, and the count of AdamW's steps: any layout reads
  what any other wrote. Rates and decays are the config's.
- A checkpoint of another model, with more or fewer weights or of other shapes, is refused before anything is changed.
- What is written is what was there when `save` was called, whatever is trained meanwhile.
- Files are written by a thread of this process. Megatron's writer would fork and leave a helper process behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.distributed import DistributedDataParallel
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from ...errors import CheckpointError
from ..checkpoint import READING, Saver, unreadable
from ..checkpoint_folder import CheckpointState, read_state
from ..lora import other_rank
from .family import MegatronPolicy
from .mapping import ADAPTERS
from .offload import is_on_host

FORMAT = CheckpointingConfig("torch_dist", 1)  # Megatron's, and its version


def save(
    saver: Saver, directory: Path, parts: Sequence[MegatronPolicy], optimizer: Any, state: CheckpointState
) -> Future[None]:
    """Collective. Begin to write `directory`, replacing one of the same name: see `Saver.begin`."""
    moments = _moments(parts, optimizer, loading=False)  # gathered copies: the next step changes the originals
    held = [one["param_state"] for one in moments if one["param_state"] is not None]
    content: Any = {"step": _step(moments)} | ({"moments": held} if held else {})
    sharded, common = save_preprocess(content)
    assert isinstance(sharded, dict)
    named, _, _ = torch_dist._replace_state_dict_keys_with_sharded_keys(sharded, True)
    tensors = torch_dist.mcore_to_pyt_state_dict(named, False)
    planner = torch_dist.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)

    def write(folder: Path) -> None:
        dcp_save(tensors, storage_writer=FileSystemWriter(folder), planner=planner, process_group=saver.group)
        if dist.get_rank() == 0:
            torch.save(common, folder / COMMON_STATE_FNAME)
            save_config(FORMAT, str(folder))

    return saver.begin(directory, state, write)


def load(
    directory: Path, wrapped: Sequence[DistributedDataParallel], optimizer: Any, lora_rank: int, *, of: str
) -> CheckpointState:
    """Collective. Read `directory` into `optimizer` and the `wrapped` parts of its model: that `of` a folder, with adapters of
    `lora_rank`. Errors are those of `fsdp2.checkpoint.load`."""
    try:
        state = read_state(directory)
        if why := other_rank(_adapter_rank(directory), lora_rank):
            raise CheckpointError(f"checkpoint {directory} is of another model than {of!r}: {why}")
        moments = _moments([part.module for part in wrapped], optimizer, loading=True)
        content: Any = {"moments": [one["param_state"] for one in moments]}
        content = dist_checkpointing.load(content, str(directory), strict=StrictHandling.RAISE_ALL)
    except (*READING, KeyError, CheckpointingException) as error:
        _separate_steps(optimizer)
        raise unreadable(directory, error) from error
    for one, own, loaded in zip(optimizer.chained_optimizers, moments, content["moments"], strict=True):
        for group in own["optimizer"]["param_groups"]:
            group["step"] = content["step"]
        one.load_state_dict({**own, "param_state": loaded})
        one._copy_main_params_to_model_params()
    for part in wrapped:
        part.start_param_sync(force_sync=True)  # the shards of other data ranks
    _separate_steps(optimizer)
    return state


def _adapter_rank(directory: Path) -> int:
    """Of the adapters in a checkpoint; 0 where it has all weights."""
    entries = FileSystemReader(directory).read_metadata().state_dict_metadata.items()
    ranks = (e.size[-2] for name, e in entries if f"{ADAPTERS}.down." in name and isinstance(e, TensorStorageMetadata))
    return next(ranks, 0)


def begin_states(optimizer: Any) -> None:
    """Zero moments for every parameter, as before the first step: a missing moment can be neither saved nor loaded."""
    for one in optimizer.chained_optimizers:
        one.init_state_fn(one.optimizer, one.config)
        if isinstance(one.optimizer, torch.optim.AdamW):
            for state in one.optimizer.state.values():
                state["step"] = torch.tensor(0.0)


def _separate_steps(optimizer: Any) -> None:
    """Megatron's loading, also one that fails, leaves one tensor for all, to which torch's AdamW would add once per parameter."""
    for one in optimizer.chained_optimizers:
        for state in one.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()


def _moments(parts: Sequence[Any], optimizer: Any, *, loading: bool) -> list[dict[str, Any]]:
    """What each of the optimizers saves: one for what all ranks have alike, another for experts where they are split. Of a state in
    the host's memory data ranks send their parts from there to the first of them, which alone has it then: a device that has no
    room for the state has none for gathering it."""
    how = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": all(map(is_on_host, optimizer.chained_optimizers)),
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    weights = {f"model{index}": part.sharded_state_dict(metadata=how) for index, part in enumerate(parts)}
    found = optimizer.sharded_state_dict(weights, is_loading=loading, metadata=how)
    return [found] if "param_state" in found else [found[index] for index in sorted(found)]


def _step(moments: Sequence[dict[str, Any]]) -> int:
    return int(max(group.get("step") or 0 for one in moments for group in one["optimizer"]["param_groups"]))
