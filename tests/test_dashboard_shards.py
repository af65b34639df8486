"""The views of a run whose buffer has shards: what is in their files is shown as of one buffer, also while it grows."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
from slipstream.buffer.client import BufferClient
from slipstream.buffer.ledger_report import ledger_report
from slipstream.buffer.messages import Lease
from slipstream.buffer.trajectory import Outcome
from slipstream.common.spans import Span
from slipstream.configs.schema import Buffer
from slipstream.dashboard.environments import environments
from slipstream.dashboard.episodes import select
from slipstream.dashboard.formats.trace import read_trace
from slipstream.dashboard.index import TrajectoryIndex, TrajectoryQuery
from slipstream.dashboard.runs import ENDED, RunAccess, WatchedRun
from slipstream.tests.episodes import SAMPLED, trajectory
from slipstream.tests.fleets import mark_served
from slipstream.tests.shards import RunningBuffer, play

SOON = 60.0
STEPS = 6
BROKEN = Outcome("failed", "tool", "ToolError: it broke")
ACTIVE = RunAccess(lambda _: True, ENDED.status, ENDED.explain)


async def step(buffer: RunningBuffer, learner: BufferClient, worker: BufferClient, version: int) -> None:
    """One version; the second shard is a group ahead of the first."""
    taking = asyncio.create_task(learner.take(version, SOON))
    while not taking.done():
        leasing = asyncio.create_task(worker.leases(4))
        await asyncio.wait([taking, leasing], return_when=asyncio.FIRST_COMPLETED)
        if not leasing.done():
            leasing.cancel()
            break
        for lease in sorted(leasing.result(), key=lambda lease: -(lease.group_id % 2)):
            await play(worker, lease)
    await taking
    await learner.commit(version)
    mark_served(learner, version + 1)


async def fail_one_of_each(worker: BufferClient) -> list[str]:
    """One group of each shard, that of the first last; the episodes in the order of their delivery."""
    failing = dict[int, Lease]()
    while len(failing) < worker.shards:
        failing |= {lease.group_id % worker.shards: lease for lease in await worker.leases(4)}
    episodes = [lease.episode(member) for _, lease in sorted(failing.items(), reverse=True) for member in lease.members]
    version = failing[0].version
    for episode in episodes:
        branch = msgspec.structs.replace(trajectory(episode, version=version), outcome=BROKEN)
        await worker.deliver(episode, {version: SAMPLED}, BROKEN, (), (branch,))
    return episodes


async def test_a_page_shows_all_shards(tmp_path: Path) -> None:
    config = Buffer(max_staleness=1, groups_per_batch=3, group_size=2, shards=2)
    watched = WatchedRun("run", tmp_path, ACTIVE)
    everything = TrajectoryQuery(limit=200)
    async with (
        asyncio.timeout(SOON),
        RunningBuffer(tmp_path, config) as buffer,
        buffer.client("learner-0") as learner,
        buffer.client("worker-0") as worker,
    ):
        mark_served(learner, await learner.recover(0))
        await worker.register()
        for version in range(STEPS):
            await step(buffer, learner, worker, version)
            shown = watched.index.page(everything)
            assert shown.total == buffer.sql("SELECT count(*) FROM trajectories")[0][0]
            trained = {row["group"] for row in shown.rows if row["state"] == "trained"}
            assert len(trained) == 3 * (version + 1)
            assert watched.accounts.read()["accounts"]["trained"] == 2 * SAMPLED * 3 * (version + 1)
        failed = (await fail_one_of_each(worker))[::-1]
        delivered = "FROM trajectories t JOIN episodes e ON e.id = t.episode_id ORDER BY e.delivered_time DESC"
        newest = [id for (id,) in buffer.sql(f"SELECT t.id {delivered}")]
    run = WatchedRun("run", tmp_path, ENDED)
    rows = run.index.page(everything).rows
    assert {row["group"] % 2 for row in rows} == {0, 1}
    assert len({row["rowid"] for row in rows}) == len(rows)
    assert run.accounts.read()["generated"] == ledger_report(tmp_path / "buffer.sqlite").total.generated
    reader = run.reader
    assert sorted(one.header.id for one in reader.all()) == sorted(newest + [f"{id}.0" for id in failed])
    assert len(list(reader.all({2}))) == 2 * 3
    for row in rows:
        assert reader.window(row["id"], 0, SAMPLED + 1)["ids"] == list(range(SAMPLED + 1))
        assert reader.group(row["group"])["members"][0]["id"].startswith(f"{row['group']}.")
    with run.store.open() as db:
        assert db.newest("id", 5) == newest[:5]
    assert run.index.newest()["id"] == newest[0]
    assert TrajectoryIndex(run.store, "failed").newest()["id"] == f"{failed[0]}.0"
    of_failed = TrajectoryIndex(run.store, "failed").page(everything).rows
    assert {row["id"]: row["detail"] for row in of_failed} == {f"{id}.0": BROKEN.detail for id in failed}
    shown = environments(run.index, run.store)
    assert ([row["id"] for row in shown["failures"]], shown["newest"]) == (failed, len(newest))
    assert select(run, None, "failed", 3).ids == tuple(failed[:3])
    batch = run.timeline.batch(3)
    assert (len(batch["episodes"]), batch["commit"]["groups_per_batch"], batch["next"]) == (6, 3, 4)
    (tmp_path / "spans").mkdir()
    span = Span(1.0, 2.0, "episode", {"episode": rows[0]["id"].rpartition(".")[0]})
    (tmp_path / "spans" / "worker-0.1.jsonl").write_bytes(msgspec.json.encode(span) + b"\n")
    assert sorted(read_trace(run).trained.values()) == sorted(v for v in range(1, STEPS + 1) for _ in range(6))
    before = run.changes()
    (tmp_path / "buffer-2.sqlite").touch()
    assert run.changes() != before
