"""Branches of failed episodes: they can be looked at, and nothing that is trained on or counted is made of them."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from slipstream.buffer.client import BufferClient
from slipstream.buffer.encoded import EncodedTrajectory
from slipstream.buffer.ledger import Ledger
from slipstream.buffer.ledger_report import ledger_report
from slipstream.buffer.messages import BatchPlan, Lease
from slipstream.buffer.store import WriteBatch
from slipstream.buffer.trajectory import FINISHED, Outcome, Trajectory
from slipstream.configs.schema import Buffer
from slipstream.errors import StateError
from slipstream.learner.batch import flatten
from slipstream.learner.metrics import BatchSummary, summarize
from slipstream.tests.episodes import SAMPLED, trajectory
from slipstream.tests.fleets import buffer_service, mark_served
from slipstream.tests.stores import new_trajectory, opened, play, segments, sql

SOON = 60.0
STEPS = 4
CONFIG = Buffer(max_staleness=1, groups_per_batch=2, group_size=3, min_members=2)
BROKEN = Outcome("failed", "tool", "ToolError: it broke (shop.py:12 price)")


class Played(msgspec.Struct):
    """What became of a run: ids that a learner saw, the summary of each batch, and the ledger."""

    seen: set[str]
    summaries: list[BatchSummary]
    ledger: Ledger


@contextlib.asynccontextmanager
async def serving(path: Path, address: str, retries: int) -> AsyncIterator[None]:
    ready = asyncio.Event()
    service = buffer_service(CONFIG, path, address, retries={"tool": retries})
    task = asyncio.create_task(service.serve(ready.set))
    await asyncio.wait_for(ready.wait(), SOON)
    try:
        yield
    finally:
        service.stop()
        await task


def failed(episode: str, version: int, branches: int) -> tuple[Trajectory, ...]:
    """With a reward that would be seen in a mean."""
    made = (trajectory(episode, branch, version=version) for branch in range(branches))
    return tuple(msgspec.structs.replace(one, outcome=BROKEN, reward=1e6, turn_rewards=()) for one in made)


async def run(path: Path, address: str, seed: int, *, sent: bool) -> Played:
    """`STEPS` batches of groups whose members fail by chance; `sent` says whether their branches are delivered. The service is
    restarted after each batch."""
    rng, played, version = random.Random(seed), Played(set(), [], Ledger()), 0
    for step in range(STEPS):
        async with (
            serving(path, address, retries=1),
            BufferClient(address, "learner") as learner,
            BufferClient(address, "worker") as worker,
            asyncio.timeout(SOON),
        ):
            version = await learner.recover(version)
            mark_served(learner, version)
            await worker.register()
            while (await learner.stats()).ready_groups < CONFIG.groups_per_batch:
                await deliver(worker, await worker.lease(), rng, sent)
            batch: BatchPlan[Trajectory] = await learner.take(version, SOON)
            played.seen |= {one.id for group in batch.groups for one in group}
            played.seen |= {one.id for one in await learner.fresh(version, 100)}
            flat = flatten(batch.groups, version, withheld=batch.withheld)
            played.summaries.append(summarize(batch.groups, flat, batch.withheld))
            await learner.commit(version)
            version += 1
            await learner.checkpointed(version)
            if step == STEPS - 1:
                played.ledger = (await learner.stats()).ledger
    return played


async def deliver(worker: BufferClient, lease: Lease, rng: random.Random, sent: bool) -> None:
    for member in lease.members:
        episode = lease.episode(member)
        fails = rng.random() < 0.4
        branches = failed(episode, lease.version, rng.choice([1, 2]))
        generated = {lease.version: SAMPLED * (len(branches) if fails else 1)}
        whole = () if fails else (trajectory(episode, version=lease.version),)
        for _ in range(2):  # as a client whose reply was lost
            await worker.deliver(
                episode, generated, BROKEN if fails else FINISHED, whole, branches if fails and sent else ()
            )


@pytest.mark.parametrize("seed", range(3))
async def test_nothing_that_is_trained_on_or_counted_knows_of_failed_branches(
    tmp_path: Path, address: str, seed: int
) -> None:
    paths = [tmp_path / f"{sent}.sqlite" for sent in (False, True)]
    without, with_them = [await run(path, address, seed, sent=path == paths[1]) for path in paths]
    assert with_them == without
    assert ledger_report(paths[1]).total == with_them.ledger == ledger_report(paths[0]).total
    assert with_them.ledger.balances
    kept = {str(row[0]) for row in sql(paths[1], "SELECT id FROM failed")}
    assert len(kept) > 5
    assert not kept & with_them.seen
    assert sql(paths[1], "SELECT count(*) FROM failed JOIN trajectories USING (episode_id)") == [(0,)]
    owners = sql(paths[1], "SELECT DISTINCT e.account, e.reason FROM failed JOIN episodes e ON e.id = episode_id")
    assert owners == [("discarded", "failed_tool")]
    ended = sql(paths[1], "SELECT count(*) FROM episodes WHERE reason = 'failed_tool'")
    assert ended == sql(paths[1], "SELECT count(DISTINCT episode_id) FROM failed")
    assert sql(paths[0], "SELECT count(*) FROM failed") == [(0,)]
    with opened(paths[1]) as store:  # what a restart restores
        assert {e.account for g in store.load()[1] for e in g.episodes.values()} <= {
            "ready",
            "trained",
            "in_flight",
            "discarded",
        }
        assert not kept & {one.id for g in store.load()[1] for one in store.trajectories(g.id)}
    for id, header, length, arrays in sql(paths[1], "SELECT id, header, length, arrays FROM failed"):
        assert isinstance(header, bytes)
        assert isinstance(arrays, bytes)
        one = EncodedTrajectory(header, np.frombuffer(arrays, dtype=np.uint8)).decode()
        one.check()
        assert (one.id, len(one), one.outcome) == (id, length, BROKEN)


async def test_branches_of_what_did_not_fail_are_refused_and_damaged_ones_are_left_out(
    tmp_path: Path, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "b.sqlite"
    async with (
        serving(path, address, retries=0),
        BufferClient(address, "learner") as learner,
        BufferClient(address, "worker") as worker,
        asyncio.timeout(SOON),
    ):
        mark_served(learner, await learner.recover(0))
        await worker.register()
        lease = await worker.lease()
        first, second, _ = map(lease.episode, lease.members)
        whole = (trajectory(first),)
        for outcome, trajectories in ((FINISHED, whole), (FINISHED, ()), (BROKEN, whole)):
            with pytest.raises(StateError, match="came with failed branches"):
                await worker.deliver(first, {0: SAMPLED}, outcome, trajectories, failed(first, 0, 1))
        await worker.deliver(first, {0: SAMPLED}, FINISHED, whole)
        await worker.deliver(second, {0: SAMPLED}, BROKEN, (), failed(first, 0, 1))  # of another episode
        assert (await learner.stats()).outcomes == {"finished": 1, "failed_tool": 1}
    assert sql(path, "SELECT count(*) FROM failed") == [(0,)]
    assert "the tokens of a failed episode are not kept" in caplog.text


def test_they_go_first_when_the_file_is_too_large(tmp_path: Path) -> None:
    path = tmp_path / "b.sqlite"
    replay = play(path, 3)
    branches = [one for n in range(300) for one in failed(f"{n}.0.1", 0, 1)]
    with opened(path) as store:
        new = [new_trajectory(one.episode, one) for one in branches]
        store.save(WriteBatch.of(replay.table.counters, [], failed=new))
        store.save(WriteBatch.of(replay.table.counters, [], failed=new[:10]))  # again
    held, arrays = sql(path, "SELECT count(*) FROM trajectories WHERE arrays IS NOT NULL"), segments(path)
    with opened(path) as store:
        assert sql(path, "SELECT count(*) FROM failed") == [(300,)]
        assert store.shrink(1, replay.version)
        left = sql(path, "SELECT group_id FROM failed ORDER BY rowid")
        assert left == [(n,) for n in range(256, 300)]  # the oldest are gone
        assert store.shrink(1, replay.version)
        assert sql(path, "SELECT count(*) FROM failed") == [(0,)]
        store.save(WriteBatch.of(replay.table.counters, [], failed=new[:1]))
        ((rowid,),) = sql(path, "SELECT rowid FROM failed")
        assert rowid > 300  # a reader that follows the rows sees that it is new
        assert store.shrink(1, replay.version)
        assert sql(path, "SELECT count(*) FROM trajectories WHERE arrays IS NOT NULL") == held
        assert segments(path) == arrays
        assert store.shrink(1, replay.version)
        assert sql(path, "SELECT count(*) FROM trajectories WHERE arrays IS NOT NULL") < held
