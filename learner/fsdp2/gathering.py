"""From the parts that ranks hold of a parameter to the whole of it, on rank 0 alone."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def to_first(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Collective. On rank 0 a copy of the whole parameter in `dtype`, in which it travels; elsewhere an empty tensor. `parameter`
    is cut along its first dimension as by `torch.chunk`."""
    if not isinstance(parameter, DTensor):
        return parameter.detach().to(dtype, copy=True)
    local, ranks = parameter.to_local().detach(), dist.get_world_size()
    if ranks == 1:
        return local.to(dtype, copy=True)
    each = -(-len(parameter) // ranks)
    sent = local.to(dtype)
    if len(sent) < each:  # a gather wants equal parts
        sent = torch.cat([sent, sent.new_zeros(each - len(sent), *sent.shape[1:])])
    if dist.get_rank() > 0:
        dist.gather(sent.contiguous())
        return torch.empty(0, dtype=dtype)
    whole = torch.empty(ranks * each, *sent.shape[1:], dtype=dtype, device=sent.device)
    dist.gather(sent.contiguous(), list(whole.split(each)))
    return whole[: len(parameter)]
