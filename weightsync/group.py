"""A broadcast group between a learner and its replicas, beside whatever process groups either of them already has.

Invariants:
- Nothing global is touched: no `torch.distributed.init_process_group`, no default group, no environment left behind.
- Constructing returns only once the whole group has met; every collective has the plan's deadline and ends in WeightSyncError.
- A member that goes away closes its sockets, which fails the others at once; so does closing the rendezvous while they still
  meet. Nobody need wait for a deadline then.
- The rendezvous listens on the plan's host alone.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from ..errors import WeightSyncError
from .plan import GroupPlan

CONNECT = timedelta(seconds=5)
"""For a connection to a store that has just answered. Whoever gave up meanwhile is not knocked for longer."""


class Rendezvous:
    """Where one group meets: a store on a free port of `host`, which rank 0 keeps for as long as the group lives."""

    def __init__(self, host: str, seconds: float) -> None:
        listener = socket.create_server((host, 0))
        self.host = host
        self.port: int = listener.getsockname()[1]
        self._store: Store | None = TCPStore(
            host,
            self.port,
            is_master=True,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def close(self) -> None:
        """Fail at once whoever still waits to meet here."""
        self._store = None


class BroadcastGroup:
    """One rank of a group in which rank 0 sends."""

    def __init__(self, plan: GroupPlan, rank: int, device: torch.device, rendezvous: Rendezvous | None = None) -> None:
        """Meet the others. Rank 0 passes the `rendezvous` that the plan's port belongs to.

        Raises:
            WeightSyncError: the group did not meet within `plan.timeout_s`.
        """
        self.plan = plan
        self.rank = rank
        self.device = torch.device("cpu") if plan.backend == "gloo" else device
        self._rendezvous = rendezvous
        timeout = timedelta(seconds=plan.timeout_s)
        try:
            # A rendezvous that is closed already was given up; TCPStore would knock there until its deadline.
            socket.create_connection((plan.host, plan.port), timeout=plan.timeout_s).close()
            # The store must outlive the group: the group only borrows it.
            knocks = min(timeout, CONNECT)
            self._store: Store | None = TCPStore(plan.host, plan.port, timeout=knocks, wait_for_workers=False)
            self._store.set_timeout(timeout)
            store = PrefixStore(plan.name, self._store)
            make = _gloo if plan.backend == "gloo" else _nccl
            self._group = make(store, plan, rank, timeout)
        except (RuntimeError, ValueError, OSError) as error:  # torch's DistError is a RuntimeError
            raise WeightSyncError(
                f"rank {rank} of {plan.world_size}: group {plan.name} did not meet within {plan.timeout_s:g} s at"
                f" {plan.host}:{plan.port}: {_first_line(error)}"
            ) from error
        self.broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device))  # NCCL meets at its first collective only

    def broadcast(self, data: torch.Tensor) -> None:
        """Send `data` (rank 0) or receive into it (the others); it lies on `device`.

        Raises:
            WeightSyncError: a member went away, or the deadline passed. The group is of no use afterwards.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        group = self._group
        if group is None:
            raise WeightSyncError(f"rank {self.rank}: group {self.plan.name} is closed")
        try:
            group.broadcast([data], options).wait()
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()  # not the device: an engine computes on it
        except RuntimeError as error:
            raise WeightSyncError(
                f"rank {self.rank}: broadcast in group {self.plan.name} failed: {_first_line(error)}"
            ) from error

    def close(self) -> None:
        """Leave: sockets close as soon as no collective runs in another thread, and that fails the other members at once.

        Explicit, because a traceback that names the group would keep it open.
        """
        self._group = None
        self._store = None
        if self._rendezvous is not None:
            self._rendezvous.close()


def _gloo(store: Store, plan: GroupPlan, rank: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._timeout = timeout
    # Left alone, gloo listens on whatever address the host name resolves to.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_address_towards(plan.host, plan.port))]
    return dist.ProcessGroupGloo(store, rank, plan.world_size, options)


def _nccl(store: Store, plan: GroupPlan, rank: int, timeout: timedelta) -> Any:
    group = getattr(dist, "ProcessGroupNCCL", None)
    if group is None:
        raise WeightSyncError("backend nccl: this build of torch has no NCCL; allowed here is gloo")
    options = group.Options()
    options._timeout = timeout
    # By default a late collective ends the whole process; here it must end in an exception of `wait`.
    with _environment("TORCH_NCCL_BLOCKING_WAIT", "1"):
        return group(store, rank, plan.world_size, options)


def _address_towards(host: str, port: int) -> str:
    """This machine's own address on the route to `host`. Connecting a datagram socket sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return probe.getsockname()[0]


@contextmanager
def _environment(key: str, value: str) -> Iterator[None]:
    before = os.environ.get(key)
    os.environ[key] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[key]
        else:
            os.environ[key] = before


def _first_line(error: Exception) -> str:
    """torch appends a stack, gloo advice."""
    return str(error).partition("\n")[0].partition(". This is typically")[0]
