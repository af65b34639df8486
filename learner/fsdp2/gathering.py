"""Gathering FSDP2's parameters: which rows of one a rank holds, and the whole of it, from the rows of all ranks, on rank 0 alone.

    rank                    0     1     2     3        of a parameter of 8 rows
    rows                    01    23    45    67       sharded over all ranks, as `torch.chunk` cuts it
    rows with `parts` = 2   01    45    23    67       divided first: ranks r hold of part r % parts what FSDP cuts of it

A parameter that is divided first is the tensor of its part: FSDP knows of no other.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def rows_here(parameter: torch.Tensor, parts: int) -> slice:
    """The rows of the whole parameter that this rank holds; `parameter` is that of its part."""
    if not isinstance(parameter, DTensor):
        return slice(None)
    copy, part = divmod(dist.get_rank(), parts)
    first = part * len(parameter) + copy * _rows_each(parameter, parts)
    return slice(first, first + len(parameter.to_local()))


def to_first(parameter: torch.Tensor, dtype: torch.dtype, parts: int) -> torch.Tensor:
    """Collective. On rank 0 a copy of the whole parameter in `dtype`, in which it travels; elsewhere an empty tensor. `parameter`
    is that of this rank's part."""
    if not isinstance(parameter, DTensor):
        return parameter.detach().to(dtype, copy=True)
    local, ranks = parameter.to_local().detach(), dist.get_world_size()
    if ranks == 1:
        return local.to(dtype, copy=True)
    each = _rows_each(parameter, parts)
    sent = local.to(dtype)
    if len(sent) < each:  # a gather wants equal parts
        sent = torch.cat([sent, sent.new_zeros(each - len(sent), *sent.shape[1:])])
    if dist.get_rank() > 0:
        dist.gather(sent.contiguous())
        return torch.empty(0, dtype=dtype)
    whole = torch.empty(ranks * each, *sent.shape[1:], dtype=dtype, device=sent.device)
    in_order, copies = whole.split(each), ranks // parts
    dist.gather(sent.contiguous(), [in_order[rank % parts * copies + rank // parts] for rank in range(ranks)])
    return whole.unflatten(0, (parts, copies * each))[:, : len(parameter)].flatten(0, 1)


def _rows_each(parameter: DTensor, parts: int) -> int:
    """Rows of a part that each of its ranks has, the last ones fewer."""
    return -(-len(parameter) * parts // dist.get_world_size())
