"""One cohort of a rolling push: brought together, then each alone where that failed, then proven by the canary.

Whether the canary is computed before the replica resumes is the server's nature. Ours computes it while paused: no request ever
sees unproven weights. vLLM and SGLang compute nothing while paused: from the resume to the canary's answer, requests under way
sample from weights that are proven by checksum only. Should the canary then be off, their tokens stand as the version's.

Invariants:
- A second push after a canary that was off pauses with `recompute` whatever the mode: no keys and values of wrong weights stay.
- Whoever is in `Outcome.proven` computes what the learner computes; everybody else asked for is in `Outcome.failed` with a reason.
- The whole takes no longer than the seconds it was given.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from ..errors import EngineError, WeightSyncError, within
from .canary import difference
from .delivery import Delivery, Push, deliver
from .replica import Member
from .transport import failures

logger = logging.getLogger(__name__)

CANARY_SHARE = 0.2
"""Of a cohort's seconds, at least; kept for the canary."""


class Outcome(msgspec.Struct):
    """What became of a cohort.

    Attributes:
        proven: replica name -> canary difference in nats.
        failed: replica name -> why it does not serve the snapshot.
        wrong: the first replica that took the weights twice and still computes something else, as an error.
    """

    proven: dict[str, float] = {}
    failed: dict[str, str] = {}
    wrong: WeightSyncError | None = None
    pause_s: float = 0.0
    transfer_s: float = 0.0
    sent_bytes: int = 0

    def add(self, delivery: Delivery) -> None:
        """Count an attempt."""
        self.pause_s = max(self.pause_s, delivery.pause_s)
        self.transfer_s = max(self.transfer_s, delivery.transfer_s)
        self.sent_bytes += delivery.sent_bytes


class WrongWeights(WeightSyncError):
    """A replica took the weights twice and still computes something else."""


async def bring(
    push: Push, members: Sequence[Member], seconds: float, on_proven: Callable[[Member], None], *, alone: bool = False
) -> Outcome:
    """Bring the snapshot to one cohort within `seconds`. `alone`: not in one go, but each by itself."""
    began, outcome = time.monotonic(), Outcome()
    patience = (1 - CANARY_SHARE) * seconds
    shown: dict[str, float] = {}
    again = list(members)
    if not alone:
        # Who is still busy with what an earlier push told it is waited for alone.
        together = [m for m in members if m.settled]
        first = await deliver(push, together, patience / 2)
        outcome.add(first)
        shown |= first.canary
        again = [m for m in members if (m not in together or m.name in first.failed) and not m.left]
        if first.failed:
            logger.warning("version %d, first try: %s", push.snapshot.version, first.failed)
    left = patience - (time.monotonic() - began)
    deliveries = [deliver(push, [m], left, again=not alone) for m in again]
    for delivery in await _all(deliveries):
        outcome.add(delivery)
        outcome.failed |= delivery.failed
        shown |= delivery.canary

    async def prove(member: Member) -> None:
        left = seconds - (time.monotonic() - began)
        outcome.proven[member.name] = await _proof(push, member, shown.get(member.name), left, outcome)
        on_proven(member)

    reached = [m for m in members if m.name not in outcome.failed and not m.left]
    proofs = await asyncio.gather(*(prove(m) for m in reached), return_exceptions=True)
    outcome.failed |= failures([m.name for m in reached], proofs)
    outcome.wrong = next((p for p in proofs if isinstance(p, WrongWeights)), None)
    return outcome


async def _all(deliveries: Sequence[Coroutine[Any, Any, Delivery]]) -> list[Delivery]:
    """All results. Cancelled or not, it returns when all have ended: they resume whom they have paused."""
    results = await asyncio.gather(*deliveries, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if isinstance(result, Delivery)]


async def _proof(push: Push, member: Member, shown: float | None, seconds: float, outcome: Outcome) -> float:
    """The replica's canary difference; above the tolerance it gets the weights once more. `shown`: what it was while paused.

    Raises:
        WrongWeights: the second time, too.
        EngineError, DeadlineExceeded: it did not answer.
    """

    async def prove() -> float:
        off = await difference(member, push.canary) if shown is None else shown
        if off <= push.tolerance:
            return off
        logger.warning("%s: canary off by %g nats, pushing once more", member.name, off)
        delivery = await deliver(push, [member], seconds / 2, again=True, mode="recompute")
        outcome.add(delivery)
        if delivery.failed:
            raise EngineError(delivery.failed[member.name])
        again = delivery.canary.get(member.name)
        off = await difference(member, push.canary) if again is None else again
        if off <= push.tolerance:
            return off
        raise WrongWeights(
            f"{member.name} does not hold version {push.snapshot.version}: after two pushes its canary log-probs differ"
            f" from the learner's by {off:.3g} nats (weightsync.canary_tolerance={push.tolerance:g})"
        )

    return await within(seconds, prove(), who="publisher", waits_for=f"canary of {member.name}", hint="see its log")
