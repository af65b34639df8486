"""Which ranks hold what of a model.

Ranks are counted by tensor first, then context, then data, then pipeline. Ranks of one *data rank* hold one copy of the model among
them and take the same rows. Experts are split over ranks of a stage, whatever else these are split by.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import distributed as dist

from ...configs.backends import Megatron
from ...errors import ConfigError
from ..ranks import RENDEZVOUS


class Groups(msgspec.Struct, frozen=True):
    """The ranks that this one is among, by what they have in parts."""

    tensor: dist.ProcessGroup
    context: dist.ProcessGroup
    stages: dist.ProcessGroup
    experts: dist.ProcessGroup
    data: dist.ProcessGroup
    copy: dist.ProcessGroup
    """Tensor and context ranks together: a stage of one copy of the model."""

    @property
    def last_stage(self) -> bool:
        return self.stages.rank() == self.stages.size() - 1


def groups() -> Groups:
    """Once they are formed."""
    return Groups(
        tensor=_made(parallel_state.get_tensor_model_parallel_group()),
        context=_made(parallel_state.get_context_parallel_group()),
        stages=_made(parallel_state.get_pipeline_model_parallel_group()),
        experts=_made(parallel_state.get_expert_model_parallel_group()),
        data=_made(parallel_state.get_data_parallel_group()),
        copy=_made(parallel_state.get_tensor_and_context_parallel_group()),
    )


def _made(group: Any) -> dist.ProcessGroup:
    assert isinstance(group, dist.ProcessGroup)
    return group


def layout_here(config: Megatron) -> Megatron:
    """`config` where a launcher started ranks; all on this rank where none did, as in a fine-tuning on one rank."""
    if any(name in os.environ for name in RENDEZVOUS):
        return config
    alone = {name: 1 for name in msgspec.structs.asdict(config) if name.endswith("_parallel") or name == "ranks"}
    return msgspec.structs.replace(config, **alone, virtual_stages=1)


def form_groups(layout: Megatron, timeout_s: float) -> None:
    """Collective over all ranks, once joined. Raises ConfigError where there are more or fewer than `layout.ranks`."""
    if dist.get_world_size() != layout.ranks:
        raise ConfigError(f"learner.backend.ranks={layout.ranks}, but {dist.get_world_size()} ranks were started")
    if parallel_state.model_parallel_is_initialized():  # for another model of this process, which is split alike
        return
    virtual = layout.virtual_stages if layout.virtual_stages > 1 else None
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor_parallel,
        pipeline_model_parallel_size=layout.pipeline_parallel,
        virtual_pipeline_model_parallel_size=virtual,
        context_parallel_size=layout.context_parallel,
        expert_model_parallel_size=layout.expert_parallel,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=timeout_s / 60,  # pyright: ignore[reportArgumentType]
    )
    model_parallel_cuda_manual_seed(0)  # nothing is drawn: weights are read, and there is no dropout
