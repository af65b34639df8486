"""The learner's end of a weight push: one snapshot of the policy, rolled over the fleet cohort by cohort.

One push; the cohorts one after the other, the replicas of a cohort side by side, everybody else generates:

    version()            who answers?                               the others are left out
    join_group           broadcast only, and only if the cohort's members changed or its group failed
    receive_weights      stages in the background                   the old weights serve on
    receipts             every rank holds all of it, checksum equal
    pause(partial)
    swap_weights         all staged tensors become the version
    resume
    score                the canary: proven, `on_served`

Invariants:
- A replica changes weights only while it is paused, wholly or not at all.
- A replica that fails or is late is fenced: named, left out, told of (`on_lost`), and back in service only when `catch_up` has
  proven it. It holds back the others for no more than its cohort's share of `push_s`, and the push by no more than `push_s`.
- The snapshot outlives the push: whoever comes or comes back gets it through `catch_up`, without the learner's ranks.
- The fleet may change at any time, in the middle of a push too: a leaver is let go at once, a joiner waits for `catch_up`.
- A replica that takes the weights twice and still computes something else stops the push: the cohorts that have not begun keep
  serving the version before.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

import torch

from ..configs.schema import Partial
from ..errors import within
from .broadcast import Sender
from .canary import Canary, make_canary
from .plan import PushReport
from .receipts import Receipts
from .replica import NOTHING, Member, Replica
from .rolling import Outcome, Push, bring
from .snapshot import Snapshot, take
from .transport import failures
from .transports import Kind, make_transport

logger = logging.getLogger(__name__)

PROBE_S = 5.0
"""Longest wait for a replica to say its version: it does so between two steps."""

QUARTER = 4
"""`cohort=0`: one of so many replicas changes weights at a time."""


class Publisher:
    """Pushes versions to the fleet. Make it within the running loop.

    Args:
        replicas: the fleet at the start; they may be down.
        transport: how the bytes travel, see `transports`.
        folder: where transports `disk` and `delta` write, for example `run_dir/weights`.
        host: address of this process that the replicas can reach.
        backend: of `broadcast`: `gloo`, or `nccl` where learner and replicas have GPUs of their own.
        device: where this process sends from with `nccl`.
        bucket_bytes: broadcast tensors travel in buckets of at most this size.
        push_s: longest push to the whole fleet, second attempts and the canary included.
        canary_tolerance: largest difference of a canary log-prob, in nats.
        dtype: what the engines serve in; tensors are converted before they travel.
        cohort: replicas that change weights at the same time; 0 is a quarter of them, at least one.
        partial: what becomes of requests under way when weights change.
        on_served: called with (replica, version) as soon as a replica is proven.
        on_lost: called with (replica, reason) when one that served is fenced.

    Raises:
        WeightSyncError: the transport's folder cannot be used.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        transport: Kind,
        folder: Path,
        host: str,
        backend: Literal["gloo", "nccl"],
        device: torch.device,
        bucket_bytes: int,
        push_s: float,
        canary_tolerance: float,
        dtype: Literal["float32", "bfloat16"],
        cohort: int = 0,
        partial: Partial = "recompute",
        on_served: Callable[[str, int], None] | None = None,
        on_lost: Callable[[str, str], None] | None = None,
    ) -> None:
        self._receipts = Receipts(host)
        sender = Sender(host, backend, device)
        try:
            self._transport = make_transport(
                transport, sender, self._receipts, bucket_bytes=bucket_bytes, folder=folder
            )
        except BaseException:
            self._receipts.close()
            raise
        self._push_s = push_s
        self._tolerance = canary_tolerance
        self._dtype = dtype
        self._cohort = cohort
        self._partial: Partial = partial
        self._on_served = on_served
        self._on_lost = on_lost
        self._members: dict[str, Member] = {}
        self._snapshot: Snapshot | None = None
        self._canary = Canary((), ())
        self._busy = asyncio.Lock()
        self.update(replicas)

    def update(self, replicas: Sequence[Replica]) -> None:
        """The fleet is now this; call it whenever it changed, from the loop, during a push too.

        A known name with another client object is another replica: what was learnt of the earlier one is void.
        """
        members: dict[str, Member] = {}
        for replica in replicas:
            known = self._members.get(replica.name)
            members[replica.name] = known if known is not None and known.replica is replica else Member(replica)
        for name, member in self._members.items():
            if members.get(name) is not member:
                member.leave()
                self._transport.forget(name)
        self._members = members

    async def wait_ready(self, deadline_s: float) -> bool:
        """True once every replica answers. Raises DeadlineExceeded naming one that does not within `deadline_s`."""
        await asyncio.gather(*(member.replica.wait_ready(deadline_s) for member in self._members.values()))
        return True

    async def publish(
        self,
        version: int,
        named_weights: Iterable[tuple[str, torch.Tensor]],
        canary_ids: Sequence[int],
        canary_logprobs: Sequence[float],
    ) -> PushReport:
        """Take a snapshot of the weights and roll it over the replicas that serve; over all that answer if none does yet.

        `named_weights` is iterated here, in the caller's thread: it may be a collective. With `pushed == ()` in the report
        nobody serves the version yet; the caller decides whether to `catch_up` later or to stop.

        Raises:
            WeightSyncError: a replica took the weights twice and still does not compute what the learner computes.
        """
        canary = make_canary(canary_ids, canary_logprobs)
        async with self._busy:
            self._snapshot = take(version, named_weights, self._dtype)
            self._canary = canary
            members = list(self._members.values())
            size = self._cohort or max(1, len(members) // QUARTER)
            cohorts = [members[i : i + size] for i in range(0, len(members), size)]
            if any(m.proven != NOTHING for m in members):
                cohorts = [[m for m in cohort if m.proven != NOTHING] for cohort in cohorts]
            return await self._roll(self._snapshot, cohorts)

    async def catch_up(self) -> PushReport | None:
        """Bring the snapshot to replicas that answer and do not serve it: they are new, were fenced, or were started anew.

        None when there is no such replica, or nothing to push yet. Raises as `publish`.
        """
        async with self._busy:
            if self._snapshot is None:
                return None
            current = self._snapshot.version
            members = list(self._members.values())
            served, _ = await self._probe(members)
            behind = [m for m in members if m.name in served and {served[m.name], m.proven} != {current}]
            # None of them is in service, so all at once holds back nobody; each alone, so that none holds back another.
            return await self._roll(self._snapshot, [behind], alone=True) if behind else None

    def close(self) -> None:
        """Leave all groups, remove what is in shared memory; the replicas go on serving."""
        self._transport.close()
        self._receipts.close()

    async def _roll(
        self, snapshot: Snapshot, cohorts: Sequence[Sequence[Member]], *, alone: bool = False
    ) -> PushReport:
        began = time.monotonic()
        push = Push(snapshot, self._canary, self._transport, self._partial, self._tolerance)
        served, failed = await self._probe([member for cohort in cohorts for member in cohort])
        for cohort in cohorts:
            for member in cohort:
                if member.name in failed:
                    self._fence(member, failed[member.name])
        alive = [[m for m in cohort if m.name in served] for cohort in cohorts]
        alive = [cohort for cohort in alive if cohort]
        for member in (member for cohort in alive for member in cohort):
            if alone or served[member.name] != member.proven:
                self._transport.forget(member.name)  # started anew, or pushed to by another learner

        total, wrong = Outcome(failed=failed), None
        for index, cohort in enumerate(alive):
            staying = [m for m in cohort if not m.left]
            if not staying:
                continue
            left = self._push_s - (time.monotonic() - began)
            share = left if index == len(alive) - 1 else left / 2  # the first also waits for the file to be written
            outcome = await bring(push, staying, share, self._prove, alone=alone)
            for member in staying:
                if member.name in outcome.failed:
                    self._fence(member, outcome.failed[member.name])
            _add(total, outcome)
            if outcome.wrong is not None:
                wrong = outcome.wrong
                break
        gone = {m.name for cohort in cohorts for m in cohort if m.left}
        failed = {name: why for name, why in total.failed.items() if name not in gone}
        if failed:
            told = "; ".join(f"{name}: {why}" for name, why in failed.items())
            logger.warning("version %d did not reach %s", snapshot.version, told)
        if wrong is not None:
            raise wrong
        return PushReport(
            version=snapshot.version,
            pushed=tuple(m.name for cohort in cohorts for m in cohort if m.name in total.proven and not m.left),
            failed=failed,
            pause_ms=1e3 * total.pause_s,
            transfer_ms=1e3 * total.transfer_s,
            push_ms=1e3 * (time.monotonic() - began),
            sent_bytes=total.sent_bytes,
            canary=max(total.proven.values(), default=0.0),
        )

    async def _probe(self, members: Sequence[Member]) -> tuple[dict[str, int | None], dict[str, str]]:
        """The version that each replica says it serves; and why the others said nothing."""
        seconds = min(PROBE_S, self._push_s / 4)
        hint = "it is down or stuck; catch_up brings it the weights once it answers"
        answers = await asyncio.gather(
            *(
                within(
                    seconds,
                    m.ask(m.replica.version()),
                    who="publisher",
                    waits_for=f"version of {m.name}",
                    hint=hint,
                )
                for m in members
            ),
            return_exceptions=True,
        )
        silent = failures([m.name for m in members], answers)
        served = {m.name: a for m, a in zip(members, answers, strict=True) if not isinstance(a, BaseException)}
        return served, silent

    def _prove(self, member: Member) -> None:
        assert self._snapshot is not None
        if not member.left:
            member.proven = self._snapshot.version
            if self._on_served is not None:
                self._on_served(member.name, member.proven)

    def _fence(self, member: Member, reason: str) -> None:
        served, member.proven = member.proven != NOTHING, NOTHING
        self._transport.forget(member.name)
        if served and not member.left and self._on_lost is not None:
            self._on_lost(member.name, reason)


def _add(total: Outcome, cohort: Outcome) -> None:
    total.proven |= cohort.proven
    total.failed |= cohort.failed
    total.pause_s = max(total.pause_s, cohort.pause_s)
    total.transfer_s = max(total.transfer_s, cohort.transfer_s)
    total.sent_bytes += cohort.sent_bytes
