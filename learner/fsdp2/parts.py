"""How FSDP2's ranks share batches and rows.

    rank                 0     1     2     3        with learner.backend.context_parallel=2
    part of the batch    0     0     1     1        `data_rank` of `data_size`: ranks of one part hold the same rows,
    part of each row     0     1     0     1        `context`: and share the work on them

Invariants:
- `gather` and `sum` count each row once: they run over ranks of different rows.
- A process that nobody started as a rank holds whole rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from ...errors import ConfigError
from ..backend import PackedRow
from ..ranks import alone, as_group, gather_rows, join
from ..rows import rows_of_first
from .context_parallel import Context


class Parts:
    """Collective. Join the process group that the environment names, or one of a single rank.

    Args:
        device: where this rank computes.
        context: ranks that share the tokens of a row.
        timeout_s: longest that a rank waits for the others in any collective.

    Raises:
        ConfigError: the rendezvous variables are incomplete, or `context` does not divide the ranks.
        LearnerError: the others did not come.
    """

    def __init__(self, device: torch.device, context: int, timeout_s: float) -> None:
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)
        self._joined = join(device, timeout_s)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        context = 1 if alone() else context
        if self.size % context:
            self.leave()
            raise ConfigError(
                f"learner.backend.context_parallel={context} does not divide {self.size} learner ranks evenly; "
                "allowed are divisors of learner.backend.ranks"
            )
        self.data_size, self.data_rank = self.size // context, self.rank // context
        whole = list(range(self.size))
        self._data = self._group([whole[part::context] for part in range(context)])
        rows = [whole[start : start + context] for start in range(0, self.size, context)]
        shared = self._group(rows) if context > 1 else self._data
        self.context = Context(shared, self.rank % context, context)

    def leave(self) -> None:
        """Nothing can be called afterwards, of no model of this process, by whoever joined first."""
        if self._joined:
            dist.destroy_process_group()

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Collective. `values` of the same shape on all ranks, added up over the parts of the batch."""
        dist.all_reduce(values, group=self._data)
        return values

    def first(self, rows: Sequence[PackedRow]) -> Sequence[PackedRow]:
        """Collective. What the first of the ranks that share rows wants scored, on each of them."""
        return rows if self.context.size == 1 else rows_of_first(rows, self._device, self.context.group)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Collective. float64[n, C] of each part of the batch, one below the other, on CPU (n may differ and be 0)."""
        return gather_rows(values, self._device, self._data)

    def _group(self, parts: list[list[int]]) -> dist.ProcessGroup:
        """Collective. The group of this rank's part; all ranks make all of them, in the same order."""
        if len(parts) == 1:
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        groups = [dist.new_group(part, timeout=self._timeout) for part in parts]
        return as_group(next(group for group, part in zip(groups, parts, strict=True) if self.rank in part))
