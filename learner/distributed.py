"""What the ranks of any backend need: a device, the process group, and collectives on plain numbers.

Invariants:
- A process joins the process group once, however many models it holds. The model that joined first leaves it.
- Every group has the same deadline; inside `all_ranks_agree` a missed one is a LearnerError.
- One rank runs the same code as many. Without the launcher's variables it is a group of its own, without a port.
- Collectives use the interface that leads to rank 0, unless the user names another by GLOO_SOCKET_IFNAME,
  NCCL_SOCKET_IFNAME or HCCL_SOCKET_IFNAME.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import get_args

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from ..common import accelerator
from ..common.accelerator import CollectiveBackend
from ..common.network import address_towards, collective_interface
from ..errors import ConfigError, LearnerError

RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def choose_device(name: str) -> torch.device:
    """This rank's device for a value of `learner.backend.device`. Raises ConfigError where there is none."""
    accelerator.require(name, "learner.backend.device")
    if name == "cpu":
        return torch.device("cpu")
    return accelerator.device_of_rank(int(os.environ.get("LOCAL_RANK", "0")))


def is_single_rank() -> bool:
    """Whether no launcher started this process as one of several ranks. It then holds the whole model, whatever the config says."""
    return not any(name in os.environ for name in RENDEZVOUS)


def join(device: torch.device, timeout_s: float) -> bool:
    """Collective. Join the process group that the environment names, or one of a single rank. False where this process joined
    before. Raises ConfigError: the environment names half of one. LearnerError: the other ranks did not join in time."""
    if dist.is_initialized():
        return False
    kind = accelerator.named(device.type)
    kinds = f"cpu:gloo,{device.type}:{kind.collectives}" if kind else "gloo"
    accelerator.select(device)
    timeout = timedelta(seconds=timeout_s)
    missing = [name for name in RENDEZVOUS if name not in os.environ]
    if is_single_rank():
        dist.init_process_group(kinds, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    elif missing:
        given = ", ".join(name for name in RENDEZVOUS if name not in missing)
        raise ConfigError(
            f"environment: {given} without {', '.join(missing)}; set all of {', '.join(RENDEZVOUS)} or none"
        )
    else:
        _choose_interface()
        try:
            rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            dist.init_process_group(
                kinds, store=_meet(rank, world, timeout), rank=rank, world_size=world, timeout=timeout
            )
        except (dist.DistError, OSError) as error:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise LearnerError(
                f"rank {os.environ['RANK']} could not meet the others at {where}: {error}", final=False
            ) from error
    return True


def _choose_interface() -> None:
    """By default gloo listens on the address that the host's name resolves to, often a loopback one; NCCL and HCCL guess."""
    first, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    try:
        chosen = collective_interface(address_towards(first, int(port)))
    except OSError as error:
        raise LearnerError(f"there is no route to rank 0 at {first}:{port}: {error}", final=False) from error
    for name, value in chosen.items():
        os.environ.setdefault(name, value)


def _meet(rank: int, world: int, timeout: timedelta) -> TCPStore:
    """The store of the group, which rank 0 serves at its own address only; torch's own rendezvous would listen on all of them."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank:
        return TCPStore(host, port, world, is_master=False, timeout=timeout)
    listener = socket.create_server((host, port))
    return TCPStore(host, port, world, is_master=True, timeout=timeout, master_listen_fd=listener.detach())


def new_gloo_group(timeout_s: float) -> dist.ProcessGroup:
    """Collective. A group of all ranks for another thread, whose collectives must not interleave with those of the main thread."""
    return as_group(dist.new_group(timeout=timedelta(seconds=timeout_s), backend="gloo"))


def as_group(group: object) -> dist.ProcessGroup:
    """`group`, which torch types as a group or, for ranks outside of it, a number."""
    assert isinstance(group, dist.ProcessGroup)
    return group


@contextlib.contextmanager
def all_ranks_agree(doing: str) -> Iterator[None]:
    """Turn a collective that failed because another rank is late or gone into a LearnerError that names the cause."""
    rank, size = dist.get_rank(), dist.get_world_size()
    try:
        yield
    except RuntimeError as error:
        if not is_peer_failure(error):
            raise
        reason = str(error).strip().splitlines()[0]
        raise LearnerError(
            f"rank {rank} of {size} lost the others while {doing}: {reason}; "
            "look at the log of the rank that ended first",
            final=False,
        ) from error


def device_of_sums(device: torch.device) -> torch.device:
    """Where ranks on `device` add float64 numbers over all of them: there, or on the CPU, where gloo adds them."""
    kind = accelerator.named(device.type)
    return device if kind is None or kind.adds_float64 else torch.device("cpu")


def gather_rows(values: torch.Tensor, device: torch.device, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Collective over `group`. float64[n, C] of each rank, concatenated, on CPU; n may differ and be 0."""
    size, device = dist.get_world_size(group), device_of_sums(device)
    local = torch.tensor([len(values)], device=device)
    lengths = [torch.empty_like(local) for _ in range(size)]
    dist.all_gather(lengths, local, group=group)
    counts = torch.cat(lengths).tolist()
    if not any(counts):
        return torch.empty(0, values.shape[1], dtype=torch.float64)
    # Collectives want equal shapes.
    padded = torch.zeros(max(counts), values.shape[1], dtype=torch.float64, device=device)
    padded[: len(values)] = values
    gathered = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(gathered, padded, group=group)
    return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)]).cpu()


def broadcast_from_first(values: torch.Tensor) -> torch.Tensor:
    """Collective. The `values` of rank 0, of the same shape on all ranks, on CPU."""
    with all_ranks_agree("receiving a broadcast of rank 0"):
        dist.broadcast(values, 0)
    return values


def tensor_of_first(values: torch.Tensor | None, device: torch.device, group: dist.ProcessGroup) -> torch.Tensor | None:
    """Collective over `group`. The tensor of its first rank on all of them, on CPU; None where that one has none."""
    about: list[object] = [None if values is None else (values.shape, values.dtype)]
    dist.broadcast_object_list(about, group_src=0, group=group, device=device)
    if not isinstance(about[0], tuple):
        return None
    shape, dtype = about[0]
    sent = torch.empty(shape, dtype=dtype, device=device) if values is None or group.rank() else values.to(device)
    dist.broadcast(sent, group_src=0, group=group)
    return sent.cpu()


def maximum_of(value: float, device: torch.device) -> float:
    tensor = torch.tensor(value, dtype=torch.float64, device=device_of_sums(device))
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


def is_peer_failure(error: BaseException) -> bool:
    """Whether a collective failed because another rank is late or gone. Such an error may pass on a restart."""
    message = str(error).lower()
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(name in message for name in get_args(CollectiveBackend))
    )
