"""What the buffer keeps in memory of deliveries, and leases of several groups at once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from slipstream.buffer import client as client_module
from slipstream.buffer import request_handler
from slipstream.buffer.client import BufferClient
from slipstream.buffer.encoded import EncodedRow, EncodedTrajectory
from slipstream.buffer.request_handler import RowCache
from slipstream.buffer.trajectory import FINISHED
from slipstream.configs.schema import Buffer
from slipstream.tests.episodes import SAMPLED, trajectory
from slipstream.tests.fleets import buffer_service, mark_served

SOON = 60.0


def rows(episode: str) -> list[EncodedRow]:
    return [EncodedTrajectory.of(trajectory(episode)).row]


def test_the_cache_holds_an_episode_until_it_is_removed() -> None:
    cache, one = RowCache(), rows("0.0.0")
    cache.add("0.0.0", one)
    cache.add("1.0.0", rows("1.0.0"))
    assert cache.get("0.0.0") is one
    cache.retain(lambda episode: episode == "1.0.0")
    assert not cache.get("0.0.0")
    assert cache.get("1.0.0")


def test_beyond_its_limit_it_takes_no_more_until_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_handler, "CACHE_BYTES", 2 * len(rows("0.0.0")[0].header))
    cache = RowCache()
    for number in range(3):
        cache.add(f"{number}.0.0", rows(f"{number}.0.0"))
    assert [bool(cache.get(f"{n}.0.0")) for n in range(3)] == [True, True, False]
    cache.retain(lambda episode: episode != "0.0.0")
    cache.add("3.0.0", rows("3.0.0"))
    assert cache.get("3.0.0")


async def test_leases_are_shared_by_turns_and_never_more_than_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setattr(client_module, "RESEND_S", 0.1)
    service = buffer_service(Buffer(max_staleness=4, groups_per_batch=1, group_size=2), tmp_path / "b.sqlite", address)
    serving = asyncio.create_task(service.serve())
    async with (
        asyncio.timeout(SOON),
        BufferClient(address, "learner-0") as learner,
        BufferClient(address, "a") as a,
        BufferClient(address, "b") as b,
    ):
        version = await learner.recover(0)
        await a.register()
        await b.register()
        lease_requests = asyncio.create_task(a.leases(4)), asyncio.create_task(b.leases(4))
        for worker in (a, b):  # both lease requests wait: nothing is served yet, and repeated ones change nothing
            await worker.stats()
        await asyncio.sleep(0.3)
        mark_served(learner, version)
        first, second = await asyncio.gather(*lease_requests)
        granted = [lease.group_id for lease in (*first, *second)]
        assert sorted(granted) == [0, 1, 2, 3, 4]  # all that admission allows, each once
        assert {len(first), len(second)} == {2, 3}
        more = asyncio.create_task(a.leases(1))
        for lease in (*first, *second):
            holder = a if lease in first else b
            for member in lease.members:
                counts = {lease.version: SAMPLED}
                episode = lease.episode(member)
                await holder.deliver(episode, counts, FINISHED, (trajectory(episode, version=lease.version),))
        batch = await learner.take(version, SOON)  # from memory, as it came
        assert [t.id for group in batch.groups for t in group] == ["0.0.0.0", "0.0.1.0"]
        assert not more.done()
        await learner.commit(version)
        mark_served(learner, version + 1)
        assert [lease.group_id for lease in await more] == [5]
    service.stop()
    await serving
