"""One attempt to bring one version to a few replicas together.

Invariants:
- Whoever was paused is resumed, whatever happened.
- Up to the swap the attempt fails as a whole and leaves every replica's old weights in place; from the swap on, each replica
  fails or succeeds alone.
- It ends within the seconds it was given: four fifths to push, the rest to resume.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec
import torch

from ..errors import DeadlineExceeded, EngineError, SlipstreamError, WeightSyncError, within
from .buckets import pack
from .group import BroadcastGroup, listen
from .plan import GroupPlan, TransferPlan

logger = logging.getLogger(__name__)

PUSH_SHARE = 0.8
"""Of an attempt's seconds; the rest is kept for resuming."""

GRACE_S = 1.0
"""After a first failure: time for the others to fail by themselves, with the better explanation."""


class Replica(Protocol):
    """What a push asks of an inference server; every `Engine` offers it. Methods raise EngineError or DeadlineExceeded."""

    name: str

    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def join_group(self, plan: GroupPlan) -> None: ...
    async def receive_weights(self, plan: TransferPlan) -> None: ...
    async def swap_weights(self, version: int) -> None: ...
    async def score(self, token_ids: Sequence[int]) -> list[float]: ...
    async def version(self) -> int | None: ...
    async def wait_ready(self, deadline_s: float) -> None: ...


class Snapshot(msgspec.Struct, frozen=True):
    """One version's weights in host memory, in the dtype that travels."""

    plan: TransferPlan
    tensors: tuple[torch.Tensor, ...]


class Rendezvous(msgspec.Struct, frozen=True):
    """Where and how groups meet: the learner's `host`, the collective library, the device that sends, ranks per replica."""

    host: str
    backend: Literal["gloo", "nccl"]
    device: torch.device
    ranks: int


class Delivery(msgspec.Struct):
    """What an attempt did: replica name -> why it did not get the weights, and the longest pause and transfer in seconds."""

    failed: dict[str, str] = {}
    pause_s: float = 0.0
    transfer_s: float = 0.0


async def meet(replicas: Sequence[Replica], rendezvous: Rendezvous, name: str, seconds: float) -> BroadcastGroup:
    """A new group with all ranks of `replicas`; its collectives have a deadline of `seconds`.

    Raises:
        WeightSyncError, EngineError, DeadlineExceeded: somebody did not come.
    """
    listener = listen(rendezvous.host)
    plan = GroupPlan(
        name=name,
        backend=rendezvous.backend,
        host=rendezvous.host,
        port=listener.getsockname()[1],
        rank_offset=0,
        world_size=1 + rendezvous.ranks * len(replicas),
        timeout_s=seconds,
    )
    joins = [
        replica.join_group(msgspec.structs.replace(plan, rank_offset=1 + rendezvous.ranks * index))
        for index, replica in enumerate(replicas)
    ]
    *_, group = await _together(*joins, asyncio.to_thread(BroadcastGroup, plan, 0, rendezvous.device, listener))
    return group


async def deliver(
    replicas: Sequence[Replica], snapshot: Snapshot, group: Callable[[float], Awaitable[BroadcastGroup]], seconds: float
) -> Delivery:
    """Pause, broadcast, swap, resume. `group(seconds)` yields the group that joins exactly these replicas.

    Errors are in the answer, not raised.
    """
    result = Delivery()
    paused: dict[str, float] = {}
    swapped: set[str] = set()
    budget = PUSH_SHARE * seconds

    async def push() -> None:
        joined = await group(budget)
        try:
            paused.update((replica.name, time.perf_counter()) for replica in replicas)
            await _together(*(replica.pause() for replica in replicas))
            began = time.perf_counter()
            receiving = (replica.receive_weights(snapshot.plan) for replica in replicas)
            # Replicas first: they know why they left, the sender only sees that they did.
            await _together(*receiving, asyncio.to_thread(_send, joined, snapshot), release=joined.close)
            result.transfer_s = time.perf_counter() - began
        except BaseException:
            joined.close()  # whoever still waits in it is released
            raise
        result.failed |= await _each({replica.name: swap(replica) for replica in replicas})

    async def swap(replica: Replica) -> None:
        await replica.swap_weights(snapshot.plan.version)
        await resume(replica)
        swapped.add(replica.name)

    async def resume(replica: Replica) -> None:
        hint = "see its log; catch_up resumes it once it answers"
        patience = seconds - budget
        await within(patience, replica.resume(), who="publisher", waits_for=f"{replica.name} to resume", hint=hint)
        result.pause_s = max(result.pause_s, time.perf_counter() - paused.pop(replica.name))

    try:
        await within(budget, push(), who="publisher", waits_for=_names(replicas), hint="see the servers' logs")
    except (SlipstreamError, OSError) as error:
        result.failed |= {r.name: str(error) for r in replicas if r.name not in swapped | result.failed.keys()}
    finally:
        unresumed = await _each({replica.name: resume(replica) for replica in replicas if replica.name in paused})
        result.failed = unresumed | result.failed
    return result


def _send(group: BroadcastGroup, snapshot: Snapshot) -> None:
    for data in pack(snapshot.tensors, snapshot.plan.bucket_bytes):
        group.broadcast(data.to(group.device))


async def _together(*awaitables: Awaitable[Any], release: Callable[[], None] | None = None) -> list[Any]:
    """All results, or the first failure in the order of the arguments.

    Once one has failed, `release` is called, the others get a moment to say what they know, and are then cancelled.
    """
    tasks = [asyncio.ensure_future(a) for a in awaitables]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if any(task.done() and task.exception() for task in tasks):
            if release is not None:
                release()
            await asyncio.wait(tasks, timeout=GRACE_S)
    finally:
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    for kind in (Exception, BaseException):  # a cancelled neighbour is not the cause
        for outcome in outcomes:
            if isinstance(outcome, kind):
                raise outcome
    return outcomes


async def _each(awaitables: Mapping[str, Awaitable[Any]]) -> dict[str, str]:
    """Await all; name -> error of those that failed."""
    outcomes = await asyncio.gather(*awaitables.values(), return_exceptions=True)
    errors: dict[str, str] = {}
    for name, outcome in zip(awaitables, outcomes, strict=True):
        if isinstance(outcome, EngineError | DeadlineExceeded | WeightSyncError):
            errors[name] = str(outcome)
        elif isinstance(outcome, BaseException):
            raise outcome
    return errors


def _names(replicas: Iterable[Replica]) -> str:
    return ", ".join(replica.name for replica in replicas)
