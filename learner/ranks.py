"""What the ranks of any backend need: a device, the process group, collectives on plain numbers, and a name for the moment when one
of them is gone.

Invariants:
- A process joins once, whatever number of models it holds; who joined first leaves.
- Every group has the same deadline: a rank waits for the others for `timeout_s` in any collective; inside `together` that it
  waited in vain is a LearnerError.
- One rank is the same code as many; where no launcher named a place to meet it meets itself, without a port.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from ..errors import ConfigError, LearnerError
from .backend import PackedRow
from .lost import is_lost

RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def to_device(row: PackedRow, device: torch.device) -> PackedRow:
    """`row` with its tensors on `device`."""
    tensors = {k: v.to(device) for k, v in msgspec.structs.asdict(row).items() if isinstance(v, torch.Tensor)}
    return msgspec.structs.replace(row, **tensors)


def choose_device(name: str) -> torch.device:
    """This rank's device for `auto`, `cpu` or `cuda`. Raises ConfigError where there is none."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ConfigError(
            "learner.backend.device: 'cuda', but torch sees no CUDA device; allowed here are auto and cpu"
        )
    if name == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def alone() -> bool:
    """Whether nobody started this process as one of several ranks, as in a fine-tuning on one rank: then it holds and does
    all itself, whatever the config says of ranks."""
    return not any(name in os.environ for name in RENDEZVOUS)


def join(device: torch.device, timeout_s: float) -> bool:
    """Collective. Join the process group that the environment names, or one of a single rank. False where this process has joined
    before, for another model.

    Raises:
        ConfigError: the environment names half of one.
        LearnerError: the others did not come in time.
    """
    if dist.is_initialized():
        return False
    kinds = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=timeout_s)
    missing = [name for name in RENDEZVOUS if name not in os.environ]
    if alone():
        dist.init_process_group(kinds, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    elif missing:
        given = ", ".join(name for name in RENDEZVOUS if name not in missing)
        raise ConfigError(
            f"environment: {given} without {', '.join(missing)}; set all of {', '.join(RENDEZVOUS)} or none"
        )
    else:
        try:
            dist.init_process_group(kinds, timeout=timeout)
        except dist.DistError as error:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise LearnerError(
                f"rank {os.environ['RANK']} could not meet the others at {where}: {error}", final=False
            ) from error
    return True


def apart(timeout_s: float) -> dist.ProcessGroup:
    """Collective. A group of all ranks for another thread, which must not meet in the middle of somebody else's collective."""
    return as_group(dist.new_group(timeout=timedelta(seconds=timeout_s), backend="gloo"))


def as_group(group: object) -> dist.ProcessGroup:
    """What torch says is one, or a number where this rank is not in it."""
    assert isinstance(group, dist.ProcessGroup)
    return group


@contextlib.contextmanager
def together(doing: str) -> Iterator[None]:
    """Turn a collective that failed because another rank is late or gone into a LearnerError that says so."""
    rank, size = dist.get_rank(), dist.get_world_size()
    try:
        yield
    except RuntimeError as error:
        if not is_lost(error):
            raise
        reason = str(error).strip().splitlines()[0]
        raise LearnerError(
            f"rank {rank} of {size} lost the others while {doing}: {reason}; "
            "look at the log of the rank that ended first",
            final=False,
        ) from error


def check_rows(rows: Sequence[PackedRow]) -> None:
    """Raises LearnerError where a row trains a token that nothing predicts."""
    for row in rows:
        if bool(row.trained[list(row.cu_seqlens[:-1])].any()):
            raise LearnerError("a packed row trains the first token of a sequence, which nothing predicts")


def gather_rows(values: torch.Tensor, device: torch.device, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Collective over `group`. float64[n, C] of each rank, one below the other, on CPU; n may differ and be 0."""
    size = dist.get_world_size(group)
    mine = torch.tensor([len(values)], device=device)
    lengths = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(lengths, mine, group=group)
    counts = torch.cat(lengths).tolist()
    if not any(counts):
        return torch.empty(0, values.shape[1], dtype=torch.float64)
    # Collectives want equal shapes.
    padded = torch.zeros(max(counts), values.shape[1], dtype=torch.float64, device=device)
    padded[: len(values)] = values
    everyone = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(everyone, padded, group=group)
    return torch.cat([part[:count] for part, count in zip(everyone, counts, strict=True)]).cpu()


def of_first(values: torch.Tensor) -> torch.Tensor:
    """Collective. The `values` of rank 0, which has as many numbers as this one, on CPU."""
    with together("hearing what rank 0 was told"):
        dist.broadcast(values, 0)
    return values


def maximum_of(value: float, device: torch.device) -> float:
    """Collective. The largest `value` of any rank."""
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()
