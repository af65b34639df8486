"""One attempt to bring one snapshot to a few replicas, while they generate.

    transport.carry: staged and proven by checksum        the old weights serve; a replica that cannot stage is paused before
    pause(partial) -> swap_weights -> resume              each replica for itself, as short as it can be
    pause(partial) -> swap_weights -> score -> resume     where the server computes the canary while it is paused

Invariants:
- Whoever was paused is resumed, whatever happened, but for one in doubt: its swap was sent and has not settled, or it scores while
  paused and has not shown the right canary. It stays paused; a later attempt waits until it has settled, and brings it back.
- Each replica fails or succeeds alone; one that fails before the swap goes on with its old weights.
- It ends within the seconds it was given, and each part within its share, so that one who is late costs the others no more. When it
  is cancelled it takes `HURRY_S` at most to resume who was paused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence

import msgspec

from ..configs.schema import Partial
from ..errors import SlipstreamError, within
from .canary import Canary, difference
from .replica import Member, names
from .snapshot import Snapshot
from .transport import Transport, failures

CARRY_SHARE = 0.6
"""Of an attempt's seconds: until then every receipt is in, or its replica is late."""

SWAP_SHARE = 0.8
"""Of an attempt's seconds: until then all have swapped; the rest is kept for resuming."""

HURRY_S = 1.0
"""Longest wait for the resume of a replica that left, or of any when the attempt is cancelled."""


class Push(msgspec.Struct, frozen=True):
    """What is brought, and how."""

    snapshot: Snapshot
    canary: Canary
    transport: Transport
    mode: Partial
    tolerance: float


class Delivery(msgspec.Struct):
    """What an attempt did.

    Attributes:
        failed: replica name -> why it did not get the weights.
        canary: replica name -> difference in nats of those that scored while paused; above the tolerance it stays paused.
        pause_s: the longest time that a replica was paused.
        transfer_s: the time the bytes took.
        sent_bytes: bytes that left the learner.
    """

    failed: dict[str, str] = {}
    canary: dict[str, float] = {}
    pause_s: float = 0.0
    transfer_s: float = 0.0
    sent_bytes: int = 0


async def deliver(
    push: Push, members: Sequence[Member], seconds: float, *, again: bool = False, mode: Partial | None = None
) -> Delivery:
    """Carry, pause, swap, resume. Errors are in the answer, not raised.

    `again`: a first attempt failed; take nothing for granted. `mode`: pause so, and not as the push says.
    """
    result = Delivery()
    version = push.snapshot.version
    done: set[str] = set()
    paused: set[str] = set()
    budget, hurry = SWAP_SHARE * seconds, False

    async def attempt() -> None:
        result.failed |= await _each({m.name: begin(m) for m in members if not (m.settled and m.replica.stages)})
        ready = [m for m in members if m.name not in done | result.failed.keys()]
        if not ready:
            return
        left = CARRY_SHARE * seconds - (time.monotonic() - began)
        carried = await push.transport.carry(push.snapshot, ready, left, again=again)
        result.transfer_s, result.sent_bytes = carried.seconds, carried.sent_bytes
        result.failed |= carried.failed
        result.failed |= await _each({m.name: swap(m) for m in ready if m.name not in carried.failed})

    async def begin(member: Member) -> None:
        if not member.settled:
            waits_for, hint = (
                f"{member.name} to finish what it was told before",
                "see its log; it stays paused until then",
            )
            await within(CARRY_SHARE * seconds, member.settle(), who="publisher", waits_for=waits_for, hint=hint)
            if member.doubt and member.holds == version:  # only late
                await finish(member)
                return
        if not member.replica.stages:
            await pause(member, CARRY_SHARE * seconds / 2)

    async def pause(member: Member, patience: float) -> None:
        paused.add(member.name)
        pausing = member.pause(mode or push.mode)
        await within(patience, pausing, who="publisher", waits_for=f"{member.name} to pause", hint="see its log")

    async def swap(member: Member) -> None:
        if (
            member.name not in paused
        ):  # by this attempt: one that an earlier one left paused is told how, and that it has settled
            await pause(member, budget)
        await member.swap(version)
        await finish(member)

    async def finish(member: Member) -> None:
        """It has the weights: it goes on, proven before where that is possible."""
        if member.replica.scores_paused:
            result.canary[member.name] = await difference(member, push.canary)
        if result.canary.get(member.name, 0.0) <= push.tolerance:
            member.doubt = False
            await resume(member)
        done.add(member.name)

    async def resume(member: Member) -> None:
        since = member.paused_at
        patience = min(HURRY_S, seconds - budget) if hurry or member.left else seconds - budget
        hint = "see its log; catch_up resumes it once it answers"
        waits_for = f"{member.name} to resume"
        await within(patience, member.resume(), who="publisher", waits_for=waits_for, hint=hint)
        if since is not None:
            result.pause_s = max(result.pause_s, time.perf_counter() - since)

    began = time.monotonic()
    try:
        await within(budget, attempt(), who="publisher", waits_for=names(members), hint="see the servers' logs")
    except (SlipstreamError, OSError) as error:
        result.failed |= {m.name: str(error) for m in members if m.name not in done | result.failed.keys()}
    except asyncio.CancelledError:
        hurry = True
        raise
    finally:
        unresumed = await _each({m.name: resume(m) for m in members if m.paused_at is not None and not m.doubt})
        result.failed = unresumed | result.failed
    return result


async def _each(awaitables: Mapping[str, Awaitable[object]]) -> dict[str, str]:
    """Await all; name -> error of those that failed."""
    return failures(list(awaitables), await asyncio.gather(*awaitables.values(), return_exceptions=True))
