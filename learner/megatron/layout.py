"""Megatron's layout, which ranks have which part of a model: counted by tensor first, then context, then data, then pipeline. Ranks
of one *data rank* share one copy of the model and take the same rows. Experts are split over the ranks of a stage, independently of
the other splits."""

from __future__ import annotations

from datetime import timedelta

import msgspec
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from ...configs.backends import Megatron
from ...errors import ConfigError
from ..distributed import as_group, is_single_rank


class ParallelGroups(msgspec.Struct, frozen=True):
    """This rank's process groups: TP, CP, PP, EP, DP."""

    tensor: dist.ProcessGroup
    context: dist.ProcessGroup
    stages: dist.ProcessGroup
    experts: dist.ProcessGroup
    data: dist.ProcessGroup
    copy: dist.ProcessGroup
    """Tensor and context ranks together: a stage of one copy of the model."""


def groups() -> ParallelGroups:
    """This rank's groups; `form_groups` comes first."""
    return ParallelGroups(
        tensor=as_group(parallel_state.get_tensor_model_parallel_group()),
        context=as_group(parallel_state.get_context_parallel_group()),
        stages=as_group(parallel_state.get_pipeline_model_parallel_group()),
        experts=as_group(parallel_state.get_expert_model_parallel_group()),
        data=as_group(parallel_state.get_data_parallel_group()),
        copy=as_group(parallel_state.get_tensor_and_context_parallel_group()),
    )


def layout_here(config: Megatron) -> Megatron:
    """`config` where this process was started as one of several ranks; else the same with one rank in every dimension."""
    if not is_single_rank():
        return config
    return msgspec.structs.replace(config, ranks=1, parallel={})


def form_groups(layout: Megatron, timeout_s: float) -> None:
    """Collective over all ranks, once joined. Raises ConfigError where there are more or fewer than `layout.ranks`."""
    if dist.get_world_size() != layout.ranks:
        raise ConfigError(f"learner.backend.ranks={layout.ranks}, but {dist.get_world_size()} ranks were started")
    if parallel_state.model_parallel_is_initialized():  # by another model of this process, with the same layout
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
    # Megatron gives this group no deadline.
    _set_pg_timeout(timedelta(seconds=timeout_s), as_group(parallel_state.get_expert_data_parallel_group_gloo()))
    model_parallel_cuda_manual_seed(0)  # nothing is drawn: weights are read, and there is no dropout
