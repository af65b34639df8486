"""Transport `broadcast` of weight pushes: a collective with a whole cohort, by NCCL, on other accelerators HCCL or XCCL, or gloo.

    join_group (only if the cohort's members changed or its group failed) ──> receive_weights on all ──> send ──> acks

Invariants:
- A group is the process group of the learner's rank 0 and the replicas of one cohort, its members. No replica is in two: making a
  group closes those that share a member with it.
- A group that was part of any failure is closed, which ends the waits of its members, and is made anew next time.
- Rank 0 sends no weights before every member has answered its announcement of the group (`join_group`, a `GroupPlan`).
- A group is independent of the learner's and the engines' own process groups: nothing global is touched.
- Construction returns once the whole group has met; every collective has its `GroupPlan`'s deadline and ends in WeightSyncError.
- A member that leaves closes its sockets, which fails the others at once; so does closing the rendezvous before all have met, also
  those that wait for another's connection: they have none yet whose end would show.
- No traceback keeps a group open that was closed, nor the version that it was to send.

Imported by vLLM's and SGLang's processes: only packages that both have may be imported here.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import selectors
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _DistributedBackendOptions
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from ..common import accelerator
from ..common.accelerator import CollectiveBackend
from ..common.network import address_towards
from ..common.tasks import in_thread, start_thread
from ..errors import SlipstreamError, WeightSyncError
from .plan import AckCollector, BroadcastSource, GroupPlan
from .replica import PushResult, PushTarget, await_reply, failures, names
from .snapshot import WeightSnapshot, pack

GRACE_S = 1.0  # after a first failure: longest wait for the other members to report an error or to finish
CONNECT_S = 1.0  # until a connection to a store that has just answered is made anew, see `_connected`


class BroadcastTransport:
    """Sends through one group per cohort, which lasts as long as the cohort's members do."""

    def __init__(
        self,
        acks: AckCollector,
        host: str,
        backend: CollectiveBackend,
        device: torch.device,
        bucket_bytes: int,
    ) -> None:
        self._acks = acks
        self._host = host
        self._backend: CollectiveBackend = backend
        self._device = device
        self._bucket_bytes = bucket_bytes
        self._incarnation = uuid.uuid4().hex
        self._numbers = itertools.count(1)
        self._groups: dict[tuple[str, ...], BroadcastGroup] = {}

    async def transfer(
        self, snapshot: WeightSnapshot, targets: Sequence[PushTarget], seconds: float, *, retry: bool
    ) -> PushResult:
        """See `Transport`. With `retry` through a new group."""
        deadline = time.monotonic() + seconds
        members = tuple(target.name for target in targets)
        if retry:
            self._drop(members)
        result = PushResult(failed=dict.fromkeys(members, "the push was cancelled"))
        try:
            group = self._groups.get(members) or await self._make_group(targets, seconds)
            began = time.perf_counter()
            result.failed = await self._send(snapshot, targets, group, deadline - time.monotonic())
            result.transfer_s = time.perf_counter() - began
            result.sent_bytes = snapshot.nbytes
        except (SlipstreamError, OSError) as error:
            result.failed = dict.fromkeys(members, str(error))
        finally:
            if result.failed:
                self._drop(members)
        return result

    def forget(self, name: str) -> None:
        self._drop([name])

    def close(self) -> None:
        for members in list(self._groups):
            self._groups.pop(members).close()

    def _drop(self, replicas: Sequence[str]) -> None:
        for members in [m for m in self._groups if set(m) & set(replicas)]:
            self._groups.pop(members).close()

    async def _make_group(self, targets: Sequence[PushTarget], seconds: float) -> BroadcastGroup:
        """A new group of all ranks of `targets`. Raises WeightSyncError, EngineError, DeadlineExceeded: a member did not join."""
        members = tuple(target.name for target in targets)
        self._drop(members)
        rendezvous = Rendezvous(self._host, seconds)
        *offsets, world_size = itertools.accumulate((target.replica.ranks for target in targets), initial=1)
        plan = GroupPlan(
            name=f"{self._incarnation}.{next(self._numbers)}",
            backend=self._backend,
            host=self._host,
            port=rendezvous.port,
            rank_offset=0,
            world_size=world_size,
            timeout_s=seconds,
        )
        own = in_thread(lambda: BroadcastGroup(plan, 0, self._device, rendezvous), f"join-{plan.name}")
        joining = [
            target.request(target.replica.join_group(msgspec.structs.replace(plan, rank_offset=offset)))
            for target, offset in zip(targets, offsets, strict=True)
        ]
        hint = "one of them is down, stuck, or cannot reach the learner's host; see their logs"
        try:
            *_, group = await await_reply(
                seconds, _gather_or_cancel([*joining, own]), f"{names(targets)} to join a group", hint
            )
        except BaseException:
            rendezvous.close()
            if own.done() and not own.cancelled() and own.exception() is None:
                own.result().close()
            raise
        finally:
            del own  # whose error refers to this frame
        self._groups[members] = group
        return group

    async def _send(
        self, snapshot: WeightSnapshot, targets: Sequence[PushTarget], group: BroadcastGroup, seconds: float
    ) -> dict[str, str]:
        deadline = time.monotonic() + seconds
        with contextlib.ExitStack() as stack:
            expected = [
                stack.enter_context(self._acks.expect(t.name, snapshot.version, t.replica.ranks)) for t in targets
            ]
            address = self._acks.address
            plan = snapshot.plan(
                BroadcastSource(), bucket_bytes=self._bucket_bytes, keep=False, acks=address, receiver=""
            )
            announcing = [
                target.request(target.replica.receive_weights(msgspec.structs.replace(plan, receiver=acks.receiver)))
                for target, acks in zip(targets, expected, strict=True)
            ]
            waits_for = f"{names(targets)} to take the announcement of version {snapshot.version}"
            await await_reply(seconds, _gather_or_cancel(announcing), waits_for, "see their logs")

            sending = in_thread(lambda: self._broadcast(group, snapshot), f"send-{snapshot.version}")
            left = deadline - time.monotonic()
            receiving = [
                asyncio.create_task(
                    await_reply(
                        left,
                        target.request(acks.complete()),
                        f"{target.name} to hold version {acks.version}",
                        acks.missing,
                    )
                )
                for target, acks in zip(targets, expected, strict=True)
            ]
            try:
                await asyncio.wait({sending, *receiving}, return_when=asyncio.FIRST_EXCEPTION)
                if any(task.done() and task.exception() for task in (sending, *receiving)):
                    group.close()
                    await asyncio.wait(receiving, timeout=min(GRACE_S, seconds / 10))
            finally:
                sending.cancel()
                for task in receiving:
                    task.cancel()
            outcomes = await asyncio.gather(*receiving, return_exceptions=True)
        cut_off = f"the broadcast of version {snapshot.version} ended early"
        if sending.done() and not sending.cancelled() and (error := sending.exception()):
            cut_off = str(error)
        return failures(
            [target.name for target in targets],
            [SlipstreamError(cut_off) if isinstance(o, asyncio.CancelledError) else o for o in outcomes],
        )

    def _broadcast(self, group: BroadcastGroup, snapshot: WeightSnapshot) -> None:
        """Blocks until the last bucket is on its way."""
        for data in pack(snapshot.tensors, self._bucket_bytes):
            group.broadcast(data.to(group.device))


async def _gather_or_cancel(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    """All results. As soon as one fails, the others are cancelled and that failure is raised: it is the cause of theirs."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _cancel(tasks)
        del tasks  # whose error refers to this frame


async def _cancel(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel them, and return when all have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Rendezvous:
    """The store of one group on a free port of `host`, which rank 0 keeps for as long as the group lives."""

    def __init__(self, host: str, seconds: float) -> None:
        """Raises OSError: no process may listen there. WeightSyncError: the store does not start."""
        listener = socket.create_server((host, 0))
        self.host = host
        self.port: int = listener.getsockname()[1]
        try:
            self._store: Store | None = TCPStore(
                host,
                self.port,
                is_master=True,
                timeout=timedelta(seconds=max(CONNECT_S, seconds)),
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        except (RuntimeError, ValueError) as error:
            raise WeightSyncError(f"no group can meet at {host}:{self.port}: {_first_line(error)}") from error

    def close(self) -> None:
        """Fail the members that still wait to meet here."""
        self._store = None


class BroadcastGroup:
    """One rank of a group in which rank 0 sends."""

    def __init__(self, plan: GroupPlan, rank: int, device: torch.device, rendezvous: Rendezvous | None = None) -> None:
        """Meet the others. Rank 0 passes the `rendezvous` that owns the plan's port. Raises WeightSyncError: the group did not meet
        within `plan.timeout_s`."""
        self.plan = plan
        self.rank = rank
        self.device = torch.device("cpu") if plan.backend == "gloo" else device
        self._rendezvous = rendezvous
        timeout = timedelta(seconds=plan.timeout_s)
        try:
            with socket.create_connection((plan.host, plan.port), timeout=plan.timeout_s) as lookout:
                # The store must outlive the group: the group does not own it.
                self._store: Store | None = _connected(plan, lookout)
                self._store.set_timeout(timeout)
                store = PrefixStore(plan.name, self._store)
                if plan.backend == "gloo":
                    self._group = _while_open(lookout, lambda: _gloo(store, plan, rank, timeout), plan)
                else:
                    self._group = _on_devices(store, plan, rank, timeout)
        except (RuntimeError, ValueError, OSError) as error:  # torch's DistError is a RuntimeError
            raise WeightSyncError(
                f"rank {rank} of {plan.world_size}: group {plan.name} did not meet within {plan.timeout_s:g} s at"
                f" {plan.host}:{plan.port}: {_first_line(error)}"
            ) from error
        # All but gloo meet at their first collective only.
        try:
            self.broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device))
        except WeightSyncError:
            self.close()
            raise

    def broadcast(self, data: torch.Tensor) -> None:
        """Send `data` (rank 0) or receive into it (the others); it lies on `device`. Raises WeightSyncError: a member left, or the
        deadline passed. The group cannot be used afterwards."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        group = self._group
        if group is None:
            raise WeightSyncError(f"rank {self.rank}: group {self.plan.name} is closed")
        try:
            group.broadcast([data], options).wait()
            accelerator.synchronize_stream(self.device)  # not the device: an engine computes on it
        except RuntimeError as error:
            raise WeightSyncError(
                f"rank {self.rank}: broadcast in group {self.plan.name} failed: {_first_line(error)}"
            ) from error
        finally:
            del group  # to which a traceback would refer

    def close(self) -> None:
        """Leave: sockets close as soon as no collective runs in another thread, which fails the other members at once. Explicit,
        because a traceback that refers to the group would keep it open."""
        self._group = None
        self._store = None
        if self._rendezvous is not None:
            self._rendezvous.close()


def _connected(plan: GroupPlan, lookout: socket.socket) -> Store:
    """A client of the plan's store. torch (2.13) loses one of a hundred connections that are made at the same time, and notices
    it at its own deadline: another is made as long as rank 0 keeps the rendezvous, the other end of `lookout`, open. Raises
    RuntimeError: it does not, or no connection was made within `plan.timeout_s`."""
    until = time.monotonic() + plan.timeout_s
    while True:
        seconds = timedelta(seconds=min(max(0.1, until - time.monotonic()), CONNECT_S))
        try:
            return TCPStore(plan.host, plan.port, timeout=seconds, wait_for_workers=False)
        except RuntimeError:
            if time.monotonic() >= until or _readable(lookout, seconds=0.0):
                raise


def _while_open(lookout: socket.socket, meet: Callable[[], Any], plan: GroupPlan) -> Any:
    """What `meet` returns or raises, in a thread of its own. Raises RuntimeError as soon as rank 0 closes the rendezvous, the other
    end of `lookout`: gloo waits for the connection of a member that has left until the deadline, and so does the thread."""
    ended, ending = socket.socketpair()
    outcome: list[Any] = []

    def run() -> None:
        with ending:
            try:
                outcome.extend((meet(), None))
            except Exception as error:
                # The frame of its traceback refers to it, also when no caller waits any more.
                outcome.extend((None, error.with_traceback(None)))

    start_thread(run, f"meet-{plan.name}")
    with ended:
        ready = _readable(ended, lookout, seconds=plan.timeout_s)
    if not outcome:
        raise RuntimeError("rank 0 has given the group up" if ready else "other members did not connect")
    group, error = outcome
    outcome.clear()
    try:
        if error is not None:
            raise error
        return group
    finally:
        del group, error


def _readable(*sockets: socket.socket, seconds: float) -> bool:
    """Whether one of them has ended, or has something to read, within `seconds`."""
    with selectors.DefaultSelector() as waiting:
        for one in sockets:
            waiting.register(one, selectors.EVENT_READ)
        return bool(waiting.select(seconds))


def _gloo(store: Store, plan: GroupPlan, rank: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._timeout = timeout
    # By default gloo listens on the address that the host name resolves to.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address_towards(plan.host, plan.port))]
    return dist.ProcessGroupGloo(store, rank, plan.world_size, options)


def _on_devices(store: Store, plan: GroupPlan, rank: int, timeout: timedelta) -> Any:
    """A group of torch's own, as for NCCL and XCCL, or of a plugin of torch, as for HCCL. Raises WeightSyncError: there is none."""
    name = plan.backend.upper()
    own, plugin = getattr(dist, f"ProcessGroup{name}", None), dist.Backend._plugins.get(name)
    # By default a late collective ends the whole process; here it must end in an exception of `wait`.
    with _environment(f"TORCH_{name}_BLOCKING_WAIT", "1"):
        if own is not None:
            options = own.Options()
            options._timeout = timeout
            return own(store, rank, plan.world_size, options)
        if plugin is not None and plugin.extended_api:
            described = _DistributedBackendOptions()
            described.store, described.timeout, described.group_id = store, timeout, plan.name
            described.group_rank, described.group_size = rank, plan.world_size
            described.global_ranks_in_group = []
            return plugin.creator_fn(described, None)
        if plugin is not None:
            return plugin.creator_fn(store, rank, plan.world_size, timeout)
    raise WeightSyncError(f"backend {plan.backend}: this build of torch has no {name}; allowed here is gloo")


@contextlib.contextmanager
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
