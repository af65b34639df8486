"""The learner's end of a weight push: one snapshot of the policy, brought to every replica that can take it.

Invariants:
- A replica changes weights only while it is paused, wholly or not at all.
- A replica that fails or is late is left out and named. It holds back neither the others nor the push beyond `push_s`.
- The snapshot outlives the push: a replica that comes back gets it through `catch_up`, without the learner's ranks.
- No push counts before the replica has shown, on a canary prompt, that it computes what the learner computes. The same test
  finds a lost byte, a stale packed copy and a wrong name.

One push, in order; replicas side by side:

    version()           who answers?                          the others are left out
    join_group          only if somebody came, left or failed
    pause(keep)         requests stay; their KV is dropped, and recomputed with the new weights
    broadcast           rank 0 sends in a thread              receive_weights stages
    swap_weights        all staged tensors become the version
    resume
    score               the canary

First all replicas share one group. If that attempt fails, nobody can tell from the errors alone who is to blame (a dead member
fails its neighbours), so then each replica gets a group of its own, and fails or succeeds alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
import torch

from ..errors import DeadlineExceeded, EngineError, StateError, WeightSyncError, within
from .buckets import dtype_of
from .delivery import Delivery, Rendezvous, Replica, Snapshot, deliver, meet
from .group import BroadcastGroup
from .plan import PushReport, TransferPlan

logger = logging.getLogger(__name__)

PROBE_S = 5.0
"""Longest wait for a replica to say its version: it does so between two steps."""

CANARY_SHARE = 0.2
"""Of `push_s`, kept for the canary."""

NOTHING = -1
"""The version that a replica serves as far as we know, before we brought it any."""


class Canary(msgspec.Struct, frozen=True):
    """A fixed prompt of T tokens, and the T - 1 log-probs in nats that the learner computes for it at temperature 1."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class Publisher:
    """Pushes versions to `replicas`.

    Args:
        replicas: all replicas of the run; they may be down.
        host: address of this process that the replicas can reach.
        backend: `gloo`, or `nccl` where learner and replicas have GPUs of their own.
        device: where this process sends from with `nccl`.
        bucket_bytes: tensors travel in buckets of at most this size.
        push_s: longest push, second attempts and the canary included.
        canary_tolerance: largest difference of a canary log-prob, in nats.
        dtype: what the engines serve in; tensors are converted before they travel.
        ranks_per_replica: worker processes of one replica.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        host: str,
        backend: Literal["gloo", "nccl"],
        device: torch.device,
        bucket_bytes: int,
        push_s: float,
        canary_tolerance: float,
        dtype: Literal["float32", "bfloat16"],
        ranks_per_replica: int = 1,
    ) -> None:
        self._replicas = tuple(replicas)
        self._rendezvous = Rendezvous(host, backend, device, ranks_per_replica)
        self._bucket_bytes = bucket_bytes
        self._push_s = push_s
        self._tolerance = canary_tolerance
        self._dtype = dtype
        self._incarnation = uuid.uuid4().hex
        self._meetings = 0
        self._group: BroadcastGroup | None = None
        self._members: tuple[str, ...] = ()
        self._serving = {replica.name: NOTHING for replica in replicas}
        self._snapshot: Snapshot | None = None
        self._canary = Canary((), ())
        self._busy = asyncio.Lock()

    async def wait_ready(self, deadline_s: float) -> bool:
        """True once every replica answers. Raises DeadlineExceeded naming one that does not within `deadline_s`."""
        await asyncio.gather(*(replica.wait_ready(deadline_s) for replica in self._replicas))
        return True

    async def publish(
        self,
        version: int,
        named_weights: Iterable[tuple[str, torch.Tensor]],
        canary_ids: Sequence[int],
        canary_logprobs: Sequence[float],
    ) -> PushReport:
        """Take a snapshot of the weights and push it to every replica that answers.

        `named_weights` is iterated here, in the caller's thread: it may be a collective. With `pushed == ()` in the report
        nobody serves the version yet; the caller decides whether to `catch_up` later or to stop.

        Raises:
            WeightSyncError: a replica took the weights twice and still does not compute what the learner computes.
        """
        if len(canary_logprobs) != len(canary_ids) - 1:
            raise StateError(
                f"{len(canary_logprobs)} canary log-probs for {len(canary_ids)} tokens; one fewer is needed"
            )
        async with self._busy:
            self._snapshot = self._take(version, named_weights)
            self._canary = Canary(tuple(canary_ids), tuple(canary_logprobs))
            return await self._push(self._snapshot, self._replicas)

    async def catch_up(self) -> PushReport | None:
        """Push the snapshot to replicas that answer and do not serve it: they failed before, or were started anew.

        None when there is no such replica, or nothing to push yet. Raises as `publish`.
        """
        async with self._busy:
            if self._snapshot is None:
                return None
            current = self._snapshot.plan.version
            served, _ = await self._probe(self._replicas)
            behind = [
                r for r in self._replicas if r.name in served and {served[r.name], self._serving[r.name]} != {current}
            ]
            return await self._push(self._snapshot, behind) if behind else None

    def close(self) -> None:
        """Leave the broadcast group; the replicas go on serving."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _take(self, version: int, named_weights: Iterable[tuple[str, torch.Tensor]]) -> Snapshot:
        dtype = dtype_of(self._dtype)
        names, tensors = [], []
        for name, tensor in named_weights:
            names.append(name)
            tensors.append(torch.empty(tensor.shape, dtype=dtype).copy_(tensor.detach()))
        shapes = tuple(tuple(t.shape) for t in tensors)
        plan = TransferPlan(version, tuple(names), (self._dtype,) * len(names), shapes, self._bucket_bytes)
        return Snapshot(plan, tuple(tensors))

    async def _push(self, snapshot: Snapshot, replicas: Sequence[Replica]) -> PushReport:
        version, began = snapshot.plan.version, time.monotonic()
        served, failed = await self._probe(replicas)
        alive = [r for r in replicas if r.name in served]
        if any(served[r.name] != self._serving[r.name] for r in alive):
            self.close()  # started anew, or pushed to by another learner: it is not in our group any more
        deliveries = await self._bring(snapshot, alive, (1 - CANARY_SHARE) * self._push_s - (time.monotonic() - began))
        for delivery in deliveries:
            failed |= delivery.failed
        reached = [r for r in alive if r.name not in failed]
        left = max(self._push_s - (time.monotonic() - began), CANARY_SHARE * self._push_s)
        proofs = await asyncio.gather(*(self._prove(r, snapshot, left) for r in reached), return_exceptions=True)

        differences, wrong = [], None
        for replica, proof in zip(reached, proofs, strict=True):
            if isinstance(proof, EngineError | DeadlineExceeded):
                failed[replica.name] = str(proof)
            elif isinstance(proof, BaseException):
                failed[replica.name], wrong = str(proof), proof
            else:
                differences.append(proof)
        for replica in replicas:
            self._serving[replica.name] = NOTHING if replica.name in failed else version
        if failed:
            logger.warning("version %d did not reach %s", version, "; ".join(f"{k}: {v}" for k, v in failed.items()))
        if wrong is not None:
            raise wrong
        return PushReport(
            version=version,
            pushed=tuple(r.name for r in reached if r.name not in failed),
            failed=failed,
            pause_ms=1e3 * max((d.pause_s for d in deliveries), default=0.0),
            transfer_ms=1e3 * max((d.transfer_s for d in deliveries), default=0.0),
            canary=max(differences, default=0.0),
        )

    async def _probe(self, replicas: Sequence[Replica]) -> tuple[dict[str, int | None], dict[str, str]]:
        """The version that each replica says it serves; and why the others said nothing."""
        seconds = min(PROBE_S, self._push_s / 4)
        hint = "it is down or stuck; catch_up brings it the weights once it answers"
        asked = (
            within(seconds, r.version(), who="publisher", waits_for=f"version of {r.name}", hint=hint) for r in replicas
        )
        served: dict[str, int | None] = {}
        silent: dict[str, str] = {}
        for replica, answer in zip(replicas, await asyncio.gather(*asked, return_exceptions=True), strict=True):
            if isinstance(answer, EngineError | DeadlineExceeded):
                silent[replica.name] = str(answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                served[replica.name] = answer
        return served, silent

    async def _bring(self, snapshot: Snapshot, replicas: Sequence[Replica], seconds: float) -> list[Delivery]:
        """All together, and if that fails each alone in the time that is left."""
        if not replicas:
            return []
        began = time.monotonic()
        first = await self._together(snapshot, replicas, seconds / 2 if len(replicas) > 1 else seconds)
        if not first.failed or len(replicas) == 1:
            return [first]
        logger.warning(
            "pushing version %d to all together failed, now one by one: %s", snapshot.plan.version, first.failed
        )
        again = [r for r in replicas if r.name in first.failed]
        first.failed = {}
        left = seconds - (time.monotonic() - began)
        return [first, *await asyncio.gather(*(self._alone(snapshot, r, left) for r in again))]

    async def _together(self, snapshot: Snapshot, replicas: Sequence[Replica], seconds: float) -> Delivery:
        """Through the standing group, which is made anew when its members changed or it failed."""

        async def standing(seconds: float) -> BroadcastGroup:
            names = tuple(r.name for r in replicas)
            if self._group is None or self._members != names:
                self.close()
                self._group, self._members = await self._meet(replicas, seconds), names
            return self._group

        try:
            delivery = await deliver(replicas, snapshot, standing, seconds)
        except BaseException:
            self.close()
            raise
        if delivery.failed:
            self.close()
        return delivery

    async def _alone(self, snapshot: Snapshot, replica: Replica, seconds: float) -> Delivery:
        """Through a group of its own, which leaves the replica in no other: the standing one is closed first."""
        self.close()
        made: list[BroadcastGroup] = []

        async def own(seconds: float) -> BroadcastGroup:
            made.append(await self._meet([replica], seconds))
            return made[0]

        delivery = await deliver([replica], snapshot, own, seconds)
        for group in made:
            group.close()
        return delivery

    async def _meet(self, replicas: Sequence[Replica], seconds: float) -> BroadcastGroup:
        self._meetings += 1
        return await meet(replicas, self._rendezvous, f"{self._incarnation}.{self._meetings}", seconds)

    async def _prove(self, replica: Replica, snapshot: Snapshot, seconds: float) -> float:
        """The replica's largest canary difference; above the tolerance it gets the weights once more.

        Raises:
            WeightSyncError: the second time, too.
            EngineError, DeadlineExceeded: it did not answer.
        """

        async def prove() -> float:
            difference = await self._difference(replica)
            if difference <= self._tolerance:
                return difference
            logger.warning("%s: canary off by %g nats, pushing once more", replica.name, difference)
            delivery = await self._alone(snapshot, replica, seconds)
            if delivery.failed:
                raise EngineError(delivery.failed[replica.name])
            difference = await self._difference(replica)
            if difference <= self._tolerance:
                return difference
            raise WeightSyncError(
                f"{replica.name} does not hold version {snapshot.plan.version}: after two pushes its canary log-probs differ"
                f" from the learner's by {difference:.3g} nats (weightsync.canary_tolerance={self._tolerance:g})"
            )

        return await within(
            seconds, prove(), who="publisher", waits_for=f"canary of {replica.name}", hint="see its log"
        )

    async def _difference(self, replica: Replica) -> float:
        """nats; infinite where either side is not a number."""
        theirs = torch.tensor(await replica.score(self._canary.token_ids), dtype=torch.float64)
        ours = torch.tensor(self._canary.logprobs, dtype=torch.float64)
        return float(torch.nan_to_num((theirs - ours).abs(), nan=float("inf")).max())
