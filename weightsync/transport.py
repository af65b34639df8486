"""What carries a snapshot to replicas: the contract, and what all kinds share.

Invariants:
- Nothing that a replica serves changes here: a replica that did not get the snapshot goes on with its old weights.
- A replica that fails is named with its reason. With files the others do not notice; in a collective they may fail with it, and
  are then carried to once more, alone.
- `carry` returns when every receipt is in or cannot come any more, and within its seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from ..errors import SlipstreamError, within
from .plan import Source
from .receipts import Expectation, Receipts
from .replica import Member
from .snapshot import Snapshot


class Carried(msgspec.Struct):
    """What a `carry` did: replica name -> why it does not hold the snapshot; bytes sent or written; seconds."""

    failed: dict[str, str] = {}
    sent_bytes: int = 0
    seconds: float = 0.0


class Transport(Protocol):
    """One way to carry."""

    async def carry(self, snapshot: Snapshot, members: Sequence[Member], seconds: float, *, again: bool) -> Carried:
        """Have all `members` stage `snapshot`. `again`: a first try failed; take nothing for granted that it relied on.

        Failures of members are in the answer.

        Raises:
            WeightSyncError: nobody can be reached this way, for example because the disk is full.
        """
        ...

    def forget(self, name: str) -> None:
        """Whatever is known of this replica is void: it left, or its process was started anew."""
        ...

    def close(self) -> None: ...


async def tell(
    receipts: Receipts, snapshot: Snapshot, sources: Mapping[Member, Source], seconds: float, *, keep: bool
) -> dict[str, str]:
    """Have each member stage `snapshot` from a file, each for itself; replica name -> why it does not hold it."""

    async def one(member: Member, source: Source) -> None:
        with receipts.expect(member.name, snapshot.version, member.replica.ranks) as expectation:
            plan = snapshot.plan(
                source, bucket_bytes=0, keep=keep, receipts=receipts.address, receiver=expectation.receiver
            )

            async def staged() -> None:
                await member.ask(member.replica.receive_weights(plan))
                await member.ask(expectation.complete())

            await held(staged(), expectation, seconds)

    return failures(
        [member.name for member in sources],
        await asyncio.gather(*(one(m, s) for m, s in sources.items()), return_exceptions=True),
    )


async def all_of(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    """All results. As soon as one fails, the others are cancelled and that failure is raised: it is the cause of theirs."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [task.result() for task in tasks]


async def held(staged: Awaitable[object], expectation: Expectation, seconds: float) -> None:
    """Await `staged`, which ends when `expectation` is complete. Raises DeadlineExceeded naming the ranks that said nothing."""
    await within(seconds, staged, who="publisher", waits_for=str(expectation), hint="see its log")


def failures(names: Sequence[str], outcomes: Sequence[object]) -> dict[str, str]:
    """Replica name -> error of those whose outcome is one of ours; any other exception is a bug, and raised."""
    failed: dict[str, str] = {}
    for name, outcome in zip(names, outcomes, strict=True):
        if isinstance(outcome, SlipstreamError | OSError):
            failed[name] = str(outcome)
        elif isinstance(outcome, BaseException):
            raise outcome
    return failed
