"""The learner's end of a weight push: one snapshot of the policy, rolled over the fleet cohort by cohort.

One push; the cohorts one after the other, the replicas of a cohort side by side, everybody else generates:

    version()            who answers?                               the others are left out
    join_group           broadcast only, and only if the cohort's members changed or its group failed
    receive_weights      stages in the background                   the old weights serve on
    receipts             every rank holds all of it, checksum equal
    pause(partial)
    swap_weights         all staged tensors become the version
    resume               whoever scores while paused is proven before, and only then resumes
    score                the canary: proven, `on_served`

Invariants:
- A replica changes weights only while it is paused, wholly or not at all.
- A replica that fails or is late is fenced: named, left out, told of (`on_lost`), and back in service only when `catch_up` has
  proven it. It holds back the others for no more than its cohort's share of `push_s`, and the push by no more than `push_s`.
- The snapshot outlives the push: whoever comes or comes back gets it through `catch_up`, without the learner's ranks.
- The fleet may change at any time, in the middle of a push too: a leaver is let go at once, a joiner waits for `catch_up`.
- `catch_up` never holds back `publish` by more than `GRACE_SHARE`, and that only while it makes its first attempt: one that has not
  ended by then is broken off, and the replicas that it did not reach are tried again later, each time after twice as long.
- A replica that does not say whether its swap ended stays paused and fenced; `catch_up` brings it back once it does.
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

from ..configs.schema import Partial, TransportKind
from ..errors import within
from .broadcast import Sender
from .canary import Canary, make_canary
from .delivery import Push
from .plan import PushReport
from .receipts import Receipts
from .replica import NOTHING, Member, Replica
from .rolling import Outcome, bring
from .snapshot import Snapshot, take
from .transport import failures
from .transports import make_transport

logger = logging.getLogger(__name__)

PROBE_S = 5.0
"""Longest wait for a replica to say its version: it does so between two steps."""

QUARTER = 4
"""`cohort=0`: one of so many replicas changes weights at a time."""

GRACE_SHARE = 0.1
"""Of `push_s`: so long `publish` waits for replicas that are being brought the version before for the first time. Without it none
would ever get there while batches are always ready."""

RETRY_S = 5.0
"""Until `catch_up` tries a replica again that it did not reach; doubled each time."""

RETRY_MOST_S = 320.0
"""At most so long."""


Probed = tuple[dict[str, int | None], dict[str, str]]
"""Replica name -> the version that it says it serves; replica name -> why it says nothing."""


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
        on_lost: called with (replica, reason) whenever one is fenced, and when it was before: who counts sees that it is stuck.

    Raises:
        WeightSyncError: the transport's folder cannot be used.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        transport: TransportKind,
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
        self._catching: asyncio.Task[PushReport | None] | None = None
        self._first_try = False
        self._gone: list[Member] = []
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
                self._gone = [m for m in (*self._gone, member) if not m.settled]
        self._members = members

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
        snapshot = await take(version, named_weights, self._dtype)
        await self._break_off()
        async with self._busy:
            self._snapshot, self._canary = snapshot, canary
            members = list(self._members.values())
            size = self._cohort or max(1, len(members) // QUARTER)
            cohorts = [members[i : i + size] for i in range(0, len(members), size)]
            if any(m.proven != NOTHING for m in members):
                cohorts = [[m for m in cohort if m.proven != NOTHING] for cohort in cohorts]
            return await self._roll(snapshot, cohorts, await self._probe([m for cohort in cohorts for m in cohort]))

    async def catch_up(self) -> PushReport | None:
        """Bring the snapshot to replicas that do not serve it: they are new, were fenced, or were started anew.

        One that this does not reach is `failed` in the report, and left out until it is due again, see `retry_in`. A `publish`
        that comes meanwhile breaks it off. None when there is no such replica, or nothing to push yet. Raises as `publish`.
        """
        async with self._busy:
            if self._snapshot is None:
                return None
            snapshot, now = self._snapshot, time.monotonic()
            members = [m for m in self._members.values() if m.due <= now]
            self._first_try = any(m.proven == NOTHING and m.misses == 0 for m in members)
            wanting = [m for m in members if m.proven != snapshot.version]
            self._catching = asyncio.create_task(self._catch_up(snapshot, members), name="catch up")
            try:
                await asyncio.wait({self._catching})
                return _broken_off(snapshot, wanting) if self._catching.cancelled() else self._catching.result()
            finally:
                self._catching.cancel()
                await asyncio.wait({self._catching})
                self._catching = None
                for member in members:
                    if member.proven == NOTHING:
                        member.due = time.monotonic() + min(RETRY_S * 2**member.misses, RETRY_MOST_S)
                        member.misses += 1

    def retry_in(self) -> float | None:
        """Seconds until a replica is due that serves nothing, 0 for one that is; None when there is no such replica."""
        due = [m.due for m in self._members.values() if m.proven == NOTHING]
        return max(0.0, min(due) - time.monotonic()) if due else None

    async def _catch_up(self, snapshot: Snapshot, members: Sequence[Member]) -> PushReport | None:
        probed = served, _ = await self._probe(members)
        # A silent one that serves is the next push's business.
        behind = [m for m in members if {served.get(m.name, m.proven), m.proven} != {snapshot.version}]
        # None of them is in service, so all at once holds back nobody; each alone, so that none holds back another.
        return await self._roll(snapshot, [behind], probed, alone=True) if behind else None

    async def _break_off(self) -> None:
        """End a `catch_up` that is under way; one that tries a replica for the first time has a moment to end by itself."""
        if self._catching is not None:
            await asyncio.wait({self._catching}, timeout=GRACE_SHARE * self._push_s if self._first_try else 0)
        if self._catching is not None:
            self._catching.cancel()

    def close(self) -> None:
        """Leave all groups, remove what is in shared memory; the replicas go on serving."""
        if self._catching is not None:
            self._catching.cancel()
        for member in (*self._gone, *self._members.values()):
            member.abandon()
        self._transport.close()
        self._receipts.close()

    async def _roll(
        self, snapshot: Snapshot, cohorts: Sequence[Sequence[Member]], probed: Probed, *, alone: bool = False
    ) -> PushReport:
        began = time.monotonic()
        push = Push(snapshot, self._canary, self._transport, self._partial, self._tolerance)
        served, failed = probed
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

    async def _probe(self, members: Sequence[Member]) -> Probed:
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
            member.misses, member.due = 0, 0.0
            if self._on_served is not None:
                self._on_served(member.name, member.proven)

    def _fence(self, member: Member, reason: str) -> None:
        member.proven = NOTHING
        self._transport.forget(member.name)
        if not member.left and self._on_lost is not None:
            self._on_lost(member.name, reason)


def _broken_off(snapshot: Snapshot, members: Sequence[Member]) -> PushReport:
    """What a `catch_up` did that a push of the next version broke off."""
    staying = [m for m in members if not m.left]
    return PushReport(
        version=snapshot.version,
        pushed=tuple(m.name for m in staying if m.proven == snapshot.version),
        failed={m.name: "the push of the next version came first" for m in staying if m.proven == NOTHING},
        pause_ms=0.0,
        transfer_ms=0.0,
        push_ms=0.0,
        sent_bytes=0,
        canary=0.0,
    )


def _add(total: Outcome, cohort: Outcome) -> None:
    total.proven |= cohort.proven
    total.failed |= cohort.failed
    total.pause_s = max(total.pause_s, cohort.pause_s)
    total.transfer_s = max(total.transfer_s, cohort.transfer_s)
    total.sent_bytes += cohort.sent_bytes
