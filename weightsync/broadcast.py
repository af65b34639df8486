"""Transport `broadcast`: one collective for a whole cohort, NCCL between GPUs, gloo elsewhere.

    join_group (only if the cohort's members changed or its group failed) ──> receive_weights on all ──> send ──> receipts

Invariants:
- No replica lies in two groups: making a group closes those that share a member with it.
- A group that was part of any failure is closed, which releases whoever waits in it, and is made anew next time.
- Nothing is sent before everybody has taken the announcement.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import uuid
from collections.abc import Sequence
from typing import Literal

import msgspec
import torch

from ..errors import SlipstreamError, within
from .buckets import pack
from .group import BroadcastGroup, Rendezvous
from .plan import Broadcast, GroupPlan, TransferPlan
from .receipts import Expectation, Receipts
from .replica import Member, in_thread, names
from .snapshot import Snapshot
from .transport import Carried, all_of, failures, held

GRACE_S = 1.0
"""At most, after a first failure: time for the others to say what they know, or that they were quicker."""


class Sender(msgspec.Struct, frozen=True):
    """The learner's side of every group: its address, the collective library, and the device that sends with `nccl`."""

    host: str
    backend: Literal["gloo", "nccl"]
    device: torch.device


class BroadcastTransport:
    """Carries through a group per cohort, which lasts as long as the cohort's members do."""

    def __init__(self, sender: Sender, receipts: Receipts, bucket_bytes: int) -> None:
        self._sender = sender
        self._receipts = receipts
        self._bucket_bytes = bucket_bytes
        self._incarnation = uuid.uuid4().hex
        self._meetings = itertools.count(1)
        self._groups: dict[tuple[str, ...], BroadcastGroup] = {}

    async def carry(self, snapshot: Snapshot, members: Sequence[Member], seconds: float, *, again: bool) -> Carried:
        """See `Transport`. With `again` through a new group."""
        deadline = time.monotonic() + seconds
        everybody = tuple(member.name for member in members)
        if again:
            self._drop(everybody)
        carried = Carried(failed=dict.fromkeys(everybody, "the push was cancelled"))
        try:
            group = self._groups.get(everybody) or await self._meet(members, seconds)
            began = time.perf_counter()
            carried.failed = await self._send(snapshot, members, group, deadline - time.monotonic())
            carried.seconds = time.perf_counter() - began
            carried.sent_bytes = snapshot.nbytes
        except (SlipstreamError, OSError) as error:
            carried.failed = dict.fromkeys(everybody, str(error))
        finally:
            if carried.failed:
                self._drop(everybody)
        return carried

    def forget(self, name: str) -> None:
        """Close the group it lies in."""
        self._drop([name])

    def close(self) -> None:
        """Leave all groups; the replicas go on serving."""
        for everybody in list(self._groups):
            self._groups.pop(everybody).close()

    def _drop(self, some: Sequence[str]) -> None:
        for everybody in [e for e in self._groups if set(e) & set(some)]:
            self._groups.pop(everybody).close()

    async def _meet(self, members: Sequence[Member], seconds: float) -> BroadcastGroup:
        """A new group of all ranks of `members`, whose collectives have a deadline of `seconds`.

        Raises:
            WeightSyncError, EngineError, DeadlineExceeded: somebody did not come.
        """
        everybody = tuple(member.name for member in members)
        self._drop(everybody)
        rendezvous = Rendezvous(self._sender.host, seconds)
        *offsets, world_size = itertools.accumulate((member.replica.ranks for member in members), initial=1)
        plan = GroupPlan(
            name=f"{self._incarnation}.{next(self._meetings)}",
            backend=self._sender.backend,
            host=self._sender.host,
            port=rendezvous.port,
            rank_offset=0,
            world_size=world_size,
            timeout_s=seconds,
        )
        ours = in_thread(lambda: BroadcastGroup(plan, 0, self._sender.device, rendezvous), f"meet-{plan.name}")
        joining = [
            member.ask(member.replica.join_group(msgspec.structs.replace(plan, rank_offset=offset)))
            for member, offset in zip(members, offsets, strict=True)
        ]
        hint = "one of them is down, stuck, or cannot reach the learner's host; see their logs"
        waits_for = f"{names(members)} to join a group"
        try:
            *_, group = await within(seconds, all_of([*joining, ours]), who="publisher", waits_for=waits_for, hint=hint)
        except BaseException:
            rendezvous.close()
            raise
        self._groups[everybody] = group
        return group

    async def _send(
        self, snapshot: Snapshot, members: Sequence[Member], group: BroadcastGroup, seconds: float
    ) -> dict[str, str]:
        """Announce and send; replica name -> why it does not hold the snapshot."""
        deadline = time.monotonic() + seconds
        with contextlib.ExitStack() as stack:
            expected = [
                stack.enter_context(self._receipts.expect(m.name, snapshot.version, m.replica.ranks)) for m in members
            ]
            announcing = [
                member.ask(member.replica.receive_weights(self._plan(snapshot, expectation)))
                for member, expectation in zip(members, expected, strict=True)
            ]
            waits_for = f"{names(members)} to take the announcement of version {snapshot.version}"
            await within(seconds, all_of(announcing), who="publisher", waits_for=waits_for, hint="see their logs")

            sending = in_thread(lambda: self._broadcast(group, snapshot), f"send-{snapshot.version}")
            left = deadline - time.monotonic()
            receiving = [
                asyncio.create_task(held(member.ask(expectation.complete()), expectation, left))
                for member, expectation in zip(members, expected, strict=True)
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
            [member.name for member in members],
            [SlipstreamError(cut_off) if isinstance(o, asyncio.CancelledError) else o for o in outcomes],
        )

    def _plan(self, snapshot: Snapshot, expectation: Expectation) -> TransferPlan:
        return snapshot.plan(
            Broadcast(),
            bucket_bytes=self._bucket_bytes,
            keep=False,
            receipts=self._receipts.address,
            receiver=expectation.receiver,
        )

    def _broadcast(self, group: BroadcastGroup, snapshot: Snapshot) -> None:
        """Blocks until the last bucket is on its way."""
        for data in pack(snapshot.tensors, self._bucket_bytes):
            group.broadcast(data.to(group.device))
