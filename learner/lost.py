"""Whether an error means that another rank is late or gone: torch has no one type for it."""

from __future__ import annotations

import torch.distributed as dist


def is_lost(error: BaseException) -> bool:
    """Whether a collective failed for want of the others. Such an error passes; what a rank read or computed is not to blame."""
    told = str(error).lower()
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and ("gloo" in told or "nccl" in told))
