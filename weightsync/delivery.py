"""One attempt to bring one snapshot to a few replicas, while they generate.

    transport.carry: staged and proven by checksum        the old weights serve; a replica that cannot stage is paused before
    pause(partial) -> swap_weights -> resume              each replica for itself, as short as it can be

Invariants:
- Whoever was paused is resumed, whatever happened.
- Each replica fails or succeeds alone; one that fails before the swap goes on with its old weights.
- It ends within the seconds it was given, and each part within its share, so that one who is late costs the others no more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence

import msgspec

from ..configs.schema import Partial
from ..errors import SlipstreamError, within
from .replica import Member, names
from .snapshot import Snapshot
from .transport import Transport, failures

CARRY_SHARE = 0.6
"""Of an attempt's seconds: until then every receipt is in, or its replica is late."""

SWAP_SHARE = 0.8
"""Of an attempt's seconds: until then all have swapped; the rest is kept for resuming."""

LEAVER_S = 1.0
"""Longest wait for the resume of a replica that left."""


class Delivery(msgspec.Struct):
    """What an attempt did: replica name -> why it did not get the weights; the longest pause and the transfer in seconds; bytes."""

    failed: dict[str, str] = {}
    pause_s: float = 0.0
    transfer_s: float = 0.0
    sent_bytes: int = 0


async def deliver(
    members: Sequence[Member],
    snapshot: Snapshot,
    transport: Transport,
    mode: Partial,
    seconds: float,
    *,
    again: bool = False,
) -> Delivery:
    """Carry, pause, swap, resume. Errors are in the answer, not raised."""
    result = Delivery()
    paused: dict[str, float] = {}
    swapped: set[str] = set()
    budget = SWAP_SHARE * seconds

    async def push() -> None:
        patience = CARRY_SHARE * seconds / 2
        early = {m.name: pause(m, patience) for m in members if not m.replica.stages}
        result.failed |= await _each(early)
        ready = [m for m in members if m.name not in result.failed]
        if not ready:
            return
        left = CARRY_SHARE * seconds - (time.monotonic() - began)
        carried = await transport.carry(snapshot, ready, left, again=again)
        result.transfer_s, result.sent_bytes = carried.seconds, carried.sent_bytes
        result.failed |= carried.failed
        result.failed |= await _each({m.name: swap(m) for m in ready if m.name not in carried.failed})

    async def pause(member: Member, patience: float) -> None:
        paused[member.name] = time.perf_counter()  # before: a pause that was not answered may have happened
        pausing = member.ask(member.replica.pause(mode))
        await within(patience, pausing, who="publisher", waits_for=f"{member.name} to pause", hint="see its log")

    async def swap(member: Member) -> None:
        if member.name not in paused:
            await pause(member, budget)
        await member.ask(member.replica.swap_weights(snapshot.version))
        await resume(member)
        swapped.add(member.name)

    async def resume(member: Member) -> None:
        # Asked of a leaver too: it may be draining, and its requests would hang.
        patience = min(LEAVER_S, seconds - budget) if member.left else seconds - budget
        hint = "see its log; catch_up resumes it once it answers"
        waits_for = f"{member.name} to resume"
        await within(patience, member.replica.resume(), who="publisher", waits_for=waits_for, hint=hint)
        result.pause_s = max(result.pause_s, time.perf_counter() - paused.pop(member.name))

    began = time.monotonic()
    try:
        await within(budget, push(), who="publisher", waits_for=names(members), hint="see the servers' logs")
    except (SlipstreamError, OSError) as error:
        result.failed |= {m.name: str(error) for m in members if m.name not in swapped | result.failed.keys()}
    finally:
        unresumed = await _each({m.name: resume(m) for m in members if m.name in paused})
        result.failed = unresumed | result.failed
    return result


async def _each(awaitables: Mapping[str, Awaitable[object]]) -> dict[str, str]:
    """Await all; name -> error of those that failed."""
    return failures(list(awaitables), await asyncio.gather(*awaitables.values(), return_exceptions=True))
