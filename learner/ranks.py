"""This process among the learner's: where it computes, which part of each batch it takes, and the collectives on plain numbers.

    rank                 0     1     2     3        with learner.backend.context_parallel=2
    part of the batch    0     0     1     1        `data_rank` of `data_size`: ranks of one part hold the same rows,
    part of each row     0     1     0     1        `context`: and share the work on them

Invariants:
- Every group has the same deadline: a rank waits for the others for `timeout_s` in any collective; inside `together` that it
  waited in vain is a LearnerError.
- `gather` and `sum` count each row once: they run over ranks of different rows. `maximum` runs over all.
- One rank is the same code as many; without `RANK` in the environment it meets itself, without a port, and holds whole rows.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from ..errors import ConfigError, LearnerError
from .context_parallel import Context

RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Ranks:
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
        self.device = device
        self._timeout = timedelta(seconds=timeout_s)
        self._joined = _join(self.device, self._timeout)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        context = context if "RANK" in os.environ else 1
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

    def apart(self) -> dist.ProcessGroup:
        """Collective. A group of all ranks for another thread, which must not meet in the middle of somebody else's collective."""
        return _checked(dist.new_group(timeout=self._timeout, backend="gloo"))

    def maximum(self, value: float) -> float:
        """Collective. The largest `value` of any rank."""
        tensor = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.item()

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Collective. `values` of the same shape on all ranks, added up over the parts of the batch."""
        dist.all_reduce(values, group=self._data)
        return values

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Collective. float64[n, C] of each part of the batch, one below the other, on CPU (n may differ and be 0)."""
        mine = torch.tensor([len(values)], device=self.device)
        lengths = [torch.empty_like(mine) for _ in range(self.data_size)]
        dist.all_gather(lengths, mine, group=self._data)
        counts = torch.cat(lengths).tolist()
        # Collectives want equal shapes.
        padded = torch.zeros(max(counts), values.shape[1], dtype=torch.float64, device=self.device)
        padded[: len(values)] = values
        everyone = [torch.empty_like(padded) for _ in range(self.data_size)]
        dist.all_gather(everyone, padded, group=self._data)
        return torch.cat([part[:count] for part, count in zip(everyone, counts, strict=True)]).cpu()

    @contextlib.contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Turn a collective that failed because another rank is late or gone into a LearnerError that says so."""
        try:
            yield
        except RuntimeError as error:
            lost = isinstance(error, dist.DistError) or "gloo" in str(error).lower() or "nccl" in str(error).lower()
            if not lost:
                raise
            reason = str(error).strip().splitlines()[0]
            raise LearnerError(
                f"learner rank {self.rank} of {self.size} lost the others while {doing}: {reason}; "
                "look at the log of the rank that ended first"
            ) from error

    def _group(self, parts: list[list[int]]) -> dist.ProcessGroup:
        """Collective. The group of this rank's part; all ranks make all of them, in the same order."""
        if len(parts) == 1:
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        groups = [dist.new_group(part, timeout=self._timeout) for part in parts]
        return _checked(next(group for group, part in zip(groups, parts, strict=True) if self.rank in part))


def choose_device(name: str) -> torch.device:
    """The device of `learner.backend.device`. Raises ConfigError where there is none such."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ConfigError(
            "learner.backend.device: 'cuda', but torch sees no CUDA device; allowed here are auto and cpu"
        )
    if name == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def _join(device: torch.device, timeout: timedelta) -> bool:
    """Whether this process had not joined yet; with several models it meets the others once."""
    if dist.is_initialized():
        return False
    kinds = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    given = [name for name in RENDEZVOUS if name in os.environ]
    if not given:
        dist.init_process_group(kinds, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    elif len(given) < len(RENDEZVOUS):
        missing = ", ".join(name for name in RENDEZVOUS if name not in given)
        raise ConfigError(
            f"environment: {', '.join(given)} without {missing}; set all of {', '.join(RENDEZVOUS)} or none"
        )
    else:
        try:
            dist.init_process_group(kinds, timeout=timeout)
        except dist.DistError as error:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise LearnerError(
                f"learner rank {os.environ['RANK']} could not meet the others at {where}: {error}"
            ) from error
    return True


def _checked(group: object) -> dist.ProcessGroup:
    assert isinstance(group, dist.ProcessGroup)
    return group
