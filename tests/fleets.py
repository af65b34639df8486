"""The part of the supervisor in tests of a buffer: it says which version the fleet serves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from slipstream.buffer.client import BufferClient
from slipstream.buffer.service import BufferService
from slipstream.rpc.pubsub import StatePublisher
from slipstream.weightsync.fleet import Fleet, ReplicaInfo, following_fleet

_marks: dict[str, Callable[[int | None], None]] = {}
"""By the address of a buffer: what marks a version as served there."""

_served: dict[str, int | None] = {}
"""By a buffer's file: the version that the fleet serves."""


def fleet_of(revision: int, *versions: int | None) -> Fleet:
    """engine-0, engine-1, ... that serve these versions, or are starting."""
    return Fleet(
        revision,
        tuple(
            ReplicaInfo(f"engine-{i}", f"http://engine-{i}", 0, "starting" if v is None else "serving", v, answers=True)
            for i, v in enumerate(versions)
        ),
    )


def buffer_service(config: Any, path: Any, address: str, **options: Any) -> BufferService:
    """A service of this process, for `mark_served`. One that opens the same file again gets the last version, as every late
    subscriber does."""
    service = BufferService(config, path, address, **options)

    def mark(version: int | None) -> None:
        _served[str(path)] = version
        service.mark_served(version)

    _marks[address] = mark
    service.mark_served(_served.get(str(path)))
    return service


def mark_served(client: BufferClient | str, version: int | None) -> None:
    """The fleet serves `version` as far as the processes of the buffer of `client`, or the one at this address, know."""
    for address in [client] if isinstance(client, str) else client._addresses.values():
        _marks[address](version)


def fleet_address(buffer: str) -> str:
    """Where the fleet is published for a buffer in another process."""
    return f"ipc://@slipstream-fleet-{buffer.rpartition(':')[2]}"


@contextlib.asynccontextmanager
async def publishing_fleet(buffer: str) -> AsyncIterator[StatePublisher[Fleet]]:
    """Publishes what `mark_served` says to the buffer at this address, in another process."""
    publisher = StatePublisher(fleet_address(buffer), Fleet())
    _marks[buffer] = lambda version: publisher.publish(fleet_of(publisher.state.revision + 1, version))
    serving = asyncio.create_task(publisher.serve())
    try:
        yield publisher
    finally:
        serving.cancel()
        await publisher.close()


async def serve_following(service: BufferService, address: str, on_ready: Callable[[], None]) -> None:
    """Serve, and follow the fleet that `publishing_fleet` publishes for this address."""
    async with following_fleet(fleet_address(address), lambda fleet: service.mark_served(fleet.version)):
        await service.serve(on_ready)
