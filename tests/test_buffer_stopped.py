"""A worker that is kept from its buffer by SIGSTOP for longer than its lease: it costs its own leases and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from slipstream.buffer.client import BufferClient
from slipstream.buffer.ledger_report import ledger_report
from slipstream.configs.schema import Buffer
from slipstream.tests import lone_worker
from slipstream.tests.fleets import buffer_service, mark_served
from slipstream.tests.runs import tiny_policy

STOPPED_S = float(os.environ.get("SLIPSTREAM_STOPPED_S", "6"))
"""How long the worker is kept; `SLIPSTREAM_STOPPED_S=600` is the real thing."""

LEASE_S = min(30.0, STOPPED_S / 1.5)
SOON = 60.0


@contextlib.asynccontextmanager
async def worker(address: str, name: str, policy: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(sys.executable, lone_worker.__file__, address, name, str(policy))
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def episodes(path: Path, worker: str, where: str) -> list[tuple[str, str, str]]:
    """(id, account, reason) of a worker's episodes."""
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as db:
        return db.execute(
            f"SELECT id, account, reason FROM episodes WHERE worker = ? AND {where}", (worker,)
        ).fetchall()


async def train(learner: BufferClient, steps: int, version: int) -> int:
    """So many steps from `version` on; the version after them."""
    for _ in range(steps):
        await learner.take(version, SOON)
        await learner.commit(version)
        version += 1
        mark_served(learner, version)
    return version


async def test_a_stopped_worker_costs_its_own_leases_alone(tmp_path: Path, address: str) -> None:
    path, policy = tmp_path / "buffer.sqlite", tiny_policy(tmp_path / "policy")
    config = Buffer(max_staleness=20, groups_per_batch=2, group_size=lone_worker.GROUP)
    service = buffer_service(config, path, address, lease_s=LEASE_S)
    serving = asyncio.create_task(service.serve())
    async with (
        asyncio.timeout(STOPPED_S + 4 * SOON),
        BufferClient(address, "learner") as learner,
        worker(address, "worker-0", policy) as stopped,
        worker(address, "worker-1", policy) as other,
    ):
        version = await learner.recover(0)
        mark_served(learner, version)
        version = await train(learner, 5, version)
        playing = False
        while not playing:
            stopped.send_signal(signal.SIGCONT)
            version = await train(learner, 1, version)
            stopped.send_signal(signal.SIGSTOP)
            await learner.stats()  # what it sent before may end every episode of its leases: then once more
            playing = bool(episodes(path, "worker-0", "account = 'in_flight'"))
        began, before = asyncio.get_running_loop().time(), version
        # The other plays on, and what was leased to this one, too.
        while (
            asyncio.get_running_loop().time() < began + STOPPED_S
            or episodes(path, "worker-0", "account = 'in_flight'")
            or version <= before + 5
        ):
            version = await train(learner, 1, version)
        assert stopped.returncode is None
        lost = episodes(path, "worker-0", "reason = 'worker_lost'")
        assert 0 < len(lost) <= lone_worker.SLOTS + lone_worker.GROUP  # what it played, and a lease that it waited for
        count = len(episodes(path, "worker-0", "1"))
        stopped.send_signal(signal.SIGCONT)
        while len(episodes(path, "worker-0", "account = 'trained'")) <= count + 4:
            version = await train(learner, 1, version)  # it goes on with new leases
        assert stopped.returncode is other.returncode is None  # the same processes
        after = episodes(path, "worker-0", "reason = 'worker_lost'")
        assert {row[0] for row in lost} == {row[0] for row in after}  # no lease but those
        assert not episodes(path, "worker-0", "reason = 'worker_lost' AND id IN (SELECT episode_id FROM trajectories)")
        with sqlite3.connect(path) as db:
            groups = "SELECT group_id FROM episodes WHERE reason = 'worker_lost'"
            again = f"SELECT count(*) FROM groups WHERE state <> 'trained' AND id IN ({groups})"
            assert db.execute(again).fetchone() == (0,)  # others trained what it lost
        assert not episodes(path, "worker-1", "reason = 'worker_lost'")
        assert (await learner.stats()).ledger.balances
    service.stop()
    await serving
    assert ledger_report(path).balances
