"""A buffer with shards in this process: its clock and its shards over real sockets and files, each of which can be cut off."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.buffer.client import BufferClient
from slipstream.buffer.messages import Lease
from slipstream.buffer.run_stores import connect_run, shard_paths
from slipstream.buffer.schema import DATABASE, process_names
from slipstream.buffer.trajectory import FINISHED
from slipstream.configs.schema import Buffer
from slipstream.errors import StoreError
from slipstream.tests import tiny
from slipstream.tests.episodes import SAMPLED, trajectory
from slipstream.tests.fleets import buffer_service


async def play(client: BufferClient, lease: Lease) -> None:
    for episode in map(lease.episode, lease.members):
        await client.progress({episode: {lease.version: 1}}, 2.0, 0.5, client.shard_of(episode))
        await client.deliver(episode, {lease.version: SAMPLED}, FINISHED, (trajectory(episode, version=lease.version),))


class RunningBuffer:
    """All processes of a buffer as tasks, an async context manager. `shares` are of its environments."""

    def __init__(self, folder: Path, config: Buffer, shares: tuple[float, ...] = (1.0,)) -> None:
        self.path = folder / DATABASE
        self._config, self._shares = config, shares
        self._folder = folder
        self._names = process_names(config.shards)
        self.addresses = [f"tcp://127.0.0.1:{tiny.free_port()}" for _ in self._names]
        self._serving: dict[int, asyncio.Task[None]] = {}

    async def __aenter__(self) -> RunningBuffer:
        for number in range(len(self._names)):
            await self.start(number)
        return self

    async def __aexit__(self, *_: object) -> None:
        for number in list(self._serving):
            await self.cut(number)

    async def start(self, number: int) -> None:
        """Process 0 is the clock, or the whole buffer."""
        ready = asyncio.Event()
        path = self._folder / f"{self._names[number]}.sqlite"
        service = buffer_service(self._config, path, self.addresses[number], shares=self._shares, shard=number)
        self._serving[number] = asyncio.create_task(service.serve(ready.set))
        await ready.wait()

    async def cut(self, number: int) -> None:
        """As by a kill between two rounds."""
        serving = self._serving.pop(number)
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError, StoreError):
            await serving

    async def restart(self, number: int) -> None:
        await self.cut(number)
        await self.start(number)

    def client(self, name: str, kind: type[BufferClient] = BufferClient, **options: Any) -> BufferClient:
        clock, *shards = self.addresses
        return kind(clock, name, shards, **options)

    def sql(self, query: str) -> list[tuple[Any, ...]]:
        """Of all shards as one."""
        with contextlib.closing(connect_run(self.path, "ro")) as db:
            return db.execute(query).fetchall()

    def by_shard(self, query: str) -> Mapping[str, list[tuple[Any, ...]]]:
        found = {}
        for path in shard_paths(self.path):
            with contextlib.closing(sqlite3.connect(path)) as db:
                found[path.stem] = db.execute(query).fetchall()
        return found
