"""The learner's end of a weight push: one snapshot of the policy, rolled over the fleet cohort by cohort (`replica.py`).

Invariants:
- A replica changes weights only while it is paused, wholly or not at all. It serves a version only when its canary is verified;
  every other replica of a push is in `failed` with a reason.
- A replica that fails or is late is fenced: named, left out, reported (`on_lost`), and back in service only when `catch_up` has
  verified it. It delays the others by at most its cohort's share of `push_s`.
- The snapshot outlives the push: a replica that joins or returns gets it through `catch_up`, without the learner's other ranks.
- The fleet may change during a push: a replica that leaves is dropped at once, a new one waits for `catch_up`.
- `catch_up` delays `publish` by at most `GRACE_SHARE`. Then it is cancelled, and the replicas that it did not reach are retried
  later, each time after twice as long: a replica that cannot be reached costs less and less. An attempt that a version cancelled
  is no failure: `on_lost` does not hear of it.
- Once versions have cancelled `CANCELLED_MOST` attempts in a row, `publish` waits until the next attempt ends. So every replica has
  the whole of `push_s` sooner or later, however fast versions follow each other: a slow one serves, a stuck one is reported.
- A replica that does not confirm its swap stays paused and fenced; `catch_up` resumes it once it does.
- Replicas that sleep have no weights: the next push wakes all of them at once, and `wake` pushes the snapshot again.
- A replica that takes the weights twice and still computes something else stops the push: the cohorts that have not begun keep
  serving the version before.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
import torch

from ..common.accelerator import CollectiveBackend
from ..common.spans import RecordSpan, no_record
from ..configs.schema import Partial, TransportKind
from ..errors import WeightSyncError
from ..rpc.security import PeerTable
from . import fp8
from .broadcast import BroadcastTransport
from .plan import AckCollector, PushReport, ReplicaControl
from .replica import (
    NOTHING,
    PushAttempt,
    PushResult,
    PushSettings,
    PushTarget,
    Transport,
    await_reply,
    check_canary,
    each,
    failures,
)
from .snapshot import Canary, WeightSnapshot, take_snapshot
from .transports import file_transport

logger = logging.getLogger(__name__)

SLEEP_SHARE = 0.25  # of `push_s`: longest wait for a replica that serves to free its memory
PROBE_S = 5.0  # longest wait for a replica to report its version: it answers between two steps
CANARY_SHARE = 0.2  # of a cohort's seconds: the least that is kept for the canary
QUARTER = 4  # `cohort=0`: one of so many replicas changes weights at a time
GRACE_SHARE = (
    0.1  # of `push_s`: how long `publish` waits for a `catch_up`; with batches always ready a joiner has no other time
)
CANCELLED_MOST = 3  # attempts to reach one replica that versions may cancel in a row
RETRY_S = 5.0  # until `catch_up` retries a replica that it did not reach; doubled each time
RETRY_MOST_S = 320.0  # longest such time
Probed = tuple[dict[str, int | None], dict[str, str]]  # name -> reported version; name -> why none


class Publisher:
    """Pushes versions to the fleet. Make it within the running loop. Raises WeightSyncError: a folder cannot be used."""

    def __init__(
        self,
        replicas: Sequence[ReplicaControl],  # the fleet at the start; they may be down
        *,
        transport: TransportKind,
        folder: Path,  # where transports `disk` and `delta` write
        spool: Path,  # where the newest version is stored, in a file without a name
        host: str,  # address of this process that the replicas can reach
        backend: CollectiveBackend,  # but for `gloo` learner and replicas have GPUs of their own; it sends from `device`
        device: torch.device,
        bucket_bytes: int,
        push_s: float,  # longest push to the whole fleet, second attempts and the canary included
        canary_tolerance: float,  # largest difference of a canary log-prob, in nats
        cohort: int = 0,  # replicas that change weights at the same time; 0 is a quarter of them, at least one
        partial: Partial = "recompute",
        quantized: bool = False,  # linear layers are pushed in fp8, see `fp8.py`
        on_served: Callable[[str, int], None] | None = None,  # (replica, version), as soon as it is verified
        on_lost: Callable[[str, str], None] | None = None,  # (replica, reason), at every failure
        on_asleep: Callable[[str], None] | None = None,  # (replica), as soon as it has freed its memory
        record: RecordSpan = no_record,  # receives what each replica went through
        peers: PeerTable | None = None,  # whose acks count; None for a plain socket
    ) -> None:
        self._record, self._spool = record, spool
        self._acks = AckCollector(host, peers)
        try:
            self._transport: Transport = (
                BroadcastTransport(self._acks, host, backend, device, bucket_bytes)
                if transport == "broadcast"
                else file_transport(transport, folder, self._acks)
            )
        except BaseException:
            self._acks.close()
            raise
        self._push_s = push_s
        self._tolerance = canary_tolerance
        self.cohort = cohort  # may change between two pushes
        self._partial: Partial = partial
        self._quantized = quantized
        self._on_served = on_served
        self._on_lost, self._on_asleep = on_lost, on_asleep
        self._targets: dict[str, PushTarget] = {}
        self._snapshot: WeightSnapshot | None = None
        self._lock = asyncio.Lock()
        self._catching: asyncio.Task[PushReport | None] | None = None
        self._grace_s = 0.0  # how long `publish` waits for it
        self._departed: list[PushTarget] = []
        self.update(replicas)

    def update(self, replicas: Sequence[ReplicaControl]) -> None:
        """Set the fleet; call it on every change, in the loop, also during a push. Another client object is another replica."""
        targets: dict[str, PushTarget] = {}
        for replica in replicas:
            known = self._targets.get(replica.name)
            targets[replica.name] = known if known is not None and known.replica is replica else PushTarget(replica)
        for name, target in self._targets.items():
            if targets.get(name) is not target:
                target.leave()
                self._transport.forget(name)
                self._departed = [t for t in (*self._departed, target) if not t.settled]
        self._targets = targets

    async def publish(
        self,
        version: int,
        named_weights: Iterable[tuple[str, torch.Tensor]],
        canary_ids: Sequence[int],
        canary_logprobs: Sequence[float],
    ) -> PushReport:
        """Take a snapshot of the weights, in the caller's thread, and roll it over the replicas that serve; over all that answer
        if none does yet. Raises WeightSyncError: a replica took the weights twice and still does not compute what the learner
        computes."""
        canary = Canary(tuple(canary_ids), tuple(canary_logprobs))
        weights = fp8.quantized(named_weights) if self._quantized else named_weights
        snapshot = await take_snapshot(version, weights, self._spool, canary)
        await self._cancel_catch_up()
        async with self._lock:
            self._snapshot = snapshot
            targets = list(self._targets.values())
            size = self.cohort or max(1, len(targets) // QUARTER)
            if any(t.asleep for t in targets):
                size = len(targets)
            cohorts = [targets[i : i + size] for i in range(0, len(targets), size)]
            if any(t.verified != NOTHING for t in targets):
                cohorts = [[t for t in cohort if t.verified != NOTHING] for cohort in cohorts]
            return await self._roll(snapshot, cohorts, await self._probe([t for cohort in cohorts for t in cohort]))

    async def sleep(self) -> None:
        """Have the replicas free the memory of their weights and caches, until the next `publish` or `wake`. One that serves and
        does not confirm it is fenced."""
        await self._cancel_catch_up()
        async with self._lock:
            awake = [t for t in self._targets.values() if t.replica.sleeps and not t.asleep and t.settled]
            limits = {t: PROBE_S if t.verified == NOTHING else SLEEP_SHARE * self._push_s for t in awake}
            failed = await each({t.name: await_reply(limits[t], t.sleep(), f"{t.name} to sleep") for t in awake})
            for target in awake:
                if target.name not in failed and not target.left and self._on_asleep is not None:
                    self._on_asleep(target.name)
                elif target.name in failed and target.verified != NOTHING:
                    self._fence(target, failed[target.name])

    async def wake(self) -> PushReport | None:
        """Push the snapshot once more, to the replicas that sleep: no version was made since. None where none sleeps. Raises as
        `publish`."""
        async with self._lock:
            asleep = [t for t in self._targets.values() if t.asleep and t.verified != NOTHING]
            if self._snapshot is None or not asleep:
                return None
            return await self._roll(self._snapshot, [asleep], await self._probe(asleep))

    async def catch_up(self) -> PushReport | None:
        """Push the snapshot to replicas that do not serve it: new, fenced or restarted ones. None when there is no such replica, or
        no snapshot yet. One that this does not reach is left out until its retry is due, see `retry_in`. Raises as `publish`."""
        async with self._lock:
            if self._snapshot is None:
                return None
            snapshot, now = self._snapshot, time.monotonic()
            targets = [t for t in self._targets.values() if t.retry_at <= now]
            behind = [t for t in targets if t.verified != snapshot.version]
            owed = any(t.cancelled >= CANCELLED_MOST for t in behind)
            self._grace_s = self._push_s + PROBE_S if owed else GRACE_SHARE * self._push_s
            self._catching = asyncio.create_task(self._catch_up(snapshot, targets), name="catch up")
            try:
                await asyncio.wait({self._catching})
                return _cancelled_report(snapshot, behind) if self._catching.cancelled() else self._catching.result()
            finally:
                self._catching.cancel()
                await asyncio.wait({self._catching})
                cancelled, self._catching = self._catching.cancelled(), None
                for target in targets:
                    target.cancelled = target.cancelled + 1 if cancelled and target.verified == NOTHING else 0
                    if target.verified == NOTHING:
                        target.retry_at = time.monotonic() + min(
                            RETRY_S * 2 ** min(target.missed_pushes, 16), RETRY_MOST_S
                        )
                        target.missed_pushes += 1

    @property
    def sleeps(self) -> bool:
        """Whether replicas sleep while the learner steps."""
        return any(target.replica.sleeps for target in self._targets.values())

    @property
    def serving(self) -> tuple[str, ...]:
        """Names of the replicas whose weights are verified."""
        return tuple(name for name, target in self._targets.items() if target.verified != NOTHING)

    def retry_in(self) -> float | None:
        """Seconds until the next retry of a replica that serves nothing, 0 if due; None when there is no such replica."""
        due = [t.retry_at for t in self._targets.values() if t.verified == NOTHING]
        return max(0.0, min(due) - time.monotonic()) if due else None

    async def _catch_up(self, snapshot: WeightSnapshot, targets: Sequence[PushTarget]) -> PushReport | None:
        probed = served, _ = await self._probe(targets)
        # One that serves and does not say its version is not behind: the next push finds out.
        behind = [t for t in targets if {served.get(t.name, t.verified), t.verified} != {snapshot.version}]
        # None of them is in service, so all are updated at once, and separately, so that none delays another.
        return await self._roll(snapshot, [behind], probed, separately=True) if behind else None

    async def _cancel_catch_up(self) -> None:
        """Cancel a running `catch_up`, unless it ends within its grace."""
        if self._catching is not None:
            await asyncio.wait({self._catching}, timeout=self._grace_s)
        if self._catching is not None:
            self._catching.cancel()

    def close(self) -> None:
        """Leave all groups, remove the files in shared memory; the replicas go on serving."""
        if self._catching is not None:
            self._catching.cancel()
        for target in (*self._departed, *self._targets.values()):
            target.abandon()
        self._transport.close()
        self._acks.close()
        self._snapshot = None

    async def _roll(
        self,
        snapshot: WeightSnapshot,
        cohorts: Sequence[Sequence[PushTarget]],
        probed: Probed,
        *,
        separately: bool = False,
    ) -> PushReport:
        """Update one cohort after the other."""
        began = time.monotonic()
        push = PushSettings(snapshot, self._transport, self._partial, self._tolerance, self._record)
        served, silent = probed
        targets = [t for cohort in cohorts for t in cohort]
        for target in targets:
            if target.name in silent:
                self._fence(target, silent[target.name])
            elif separately or served[target.name] != target.verified:
                self._transport.forget(target.name)  # restarted, or pushed to by another learner
        alive = [[t for t in cohort if t.name in served] for cohort in cohorts]
        alive = [cohort for cohort in alive if cohort]

        total = PushResult(failed=silent)
        for index, cohort in enumerate(alive):
            staying = [t for t in cohort if not t.left]
            if not staying:
                continue
            left = self._push_s - (time.monotonic() - began)
            share = left if index == len(alive) - 1 else left / 2  # the first also waits for the file to be written
            result = await self._update_cohort(push, staying, share, separately=separately)
            for target in staying:
                if target.name in result.failed:
                    self._fence(target, result.failed[target.name])
            total.add(result)
            if result.wrong:
                break
        departed = {t.name for t in targets if t.left}
        failed = {name: why for name, why in total.failed.items() if name not in departed}
        if failed:
            reasons = "; ".join(f"{name}: {why}" for name, why in failed.items())
            logger.warning("version %d did not reach %s", snapshot.version, reasons)
        if total.wrong:
            raise WeightSyncError(total.wrong)
        pushed = tuple(t.name for t in targets if t.verified == snapshot.version and not t.left)
        return PushReport(
            version=snapshot.version,
            pushed=pushed,
            failed=failed,
            pause_ms=1e3 * total.pause_s,
            transfer_ms=1e3 * total.transfer_s,
            push_ms=1e3 * (time.monotonic() - began),
            sent_bytes=total.sent_bytes,
            canary=max((total.canary[name] for name in pushed), default=0.0),
        )

    async def _update_cohort(
        self, push: PushSettings, targets: Sequence[PushTarget], seconds: float, *, separately: bool
    ) -> PushResult:
        """All in one transfer, unless `separately`, then those that failed one by one, then the canary of each, within
        `seconds`."""
        began, result = time.monotonic(), PushResult()
        push_s = (1 - CANARY_SHARE) * seconds
        again = list(targets)
        if not separately:
            # One that is still busy with a command of an earlier push is waited for separately.
            settled = [t for t in targets if t.settled]
            first = await PushAttempt(push, settled, push_s / 2).run()
            again = [t for t in targets if (t not in settled or t.name in first.failed) and not t.left]
            if first.failed:
                logger.warning("version %d, first try: %s", push.snapshot.version, first.failed)
            result.add(msgspec.structs.replace(first, failed={}))
        left = push_s - (time.monotonic() - began)
        attempts = (PushAttempt(push, [t], left, retry=not separately).run() for t in again)
        # Cancelled or not, gather returns when all have ended: they resume the replicas that they paused.
        for attempt in await asyncio.gather(*attempts, return_exceptions=True):
            if isinstance(attempt, BaseException):
                raise attempt
            result.add(attempt)
        left = seconds - (time.monotonic() - began)
        reached = [t for t in targets if t.name not in result.failed and not t.left]
        verifying = {
            t.name: await_reply(left, self._verify(push, t, left, result), f"canary of {t.name}") for t in reached
        }
        result.failed |= await each(verifying)
        return result

    async def _probe(self, targets: Sequence[PushTarget]) -> Probed:
        """The version that each replica reports; and why the others did not answer."""
        seconds = min(PROBE_S, self._push_s / 4)
        hint = "it is down or stuck; catch_up pushes to it once it answers"
        versions = (await_reply(seconds, t.request(t.replica.version()), f"version of {t.name}", hint) for t in targets)
        answers = await asyncio.gather(*versions, return_exceptions=True)
        silent = failures([t.name for t in targets], answers)
        served = {t.name: a for t, a in zip(targets, answers, strict=True) if not isinstance(a, BaseException)}
        return served, silent

    async def _verify(self, push: PushSettings, target: PushTarget, seconds: float, result: PushResult) -> None:
        """Have it serve once its canary is right. Raises as `check_canary`."""
        await check_canary(push, target, seconds, result)
        if not target.left:
            target.verified = push.snapshot.version
            target.missed_pushes, target.retry_at = 0, 0.0
            if self._on_served is not None:
                self._on_served(target.name, target.verified)

    def _fence(self, target: PushTarget, reason: str) -> None:
        target.verified = NOTHING
        self._transport.forget(target.name)
        if not target.left and self._on_lost is not None:
            self._on_lost(target.name, reason)


def _cancelled_report(snapshot: WeightSnapshot, targets: Sequence[PushTarget]) -> PushReport:
    """What a `catch_up` did that a push of the next version cancelled."""
    staying = [t for t in targets if not t.left]
    pushed = tuple(t.name for t in staying if t.verified == snapshot.version)
    failed = {t.name: "the push of the next version came first" for t in staying if t.verified == NOTHING}
    return PushReport(snapshot.version, pushed, failed)
