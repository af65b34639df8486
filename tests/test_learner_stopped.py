"""A learner that is asked to stop while its buffer has ended for good: its last checkpoint is whole, and the next start goes on
from it."""

from __future__ import annotations

import asyncio
import logging

import pytest
from slipstream.buffer.client import BufferClient
from slipstream.buffer.ledger_report import ledger_report
from slipstream.buffer.trajectory import FINISHED
from slipstream.configs.schema import Buffer, Learner
from slipstream.errors import DeadlineExceeded
from slipstream.learner import checkpointing
from slipstream.learner.checkpoint_folder import checkpoints, path_of
from slipstream.learner.fsdp2.backend import Fsdp2Backend
from slipstream.tests.episodes import trajectory
from slipstream.tests.test_buffer_service import serving
from slipstream.tests.test_learner_hostile import Bench

SOON = 20.0
RULES = Buffer(max_staleness=1, groups_per_batch=1, group_size=2)


async def play(worker: BufferClient, groups: int) -> None:
    for _ in range(groups):
        lease = await worker.lease()
        for episode in map(lease.episode, lease.members):
            sent = trajectory(episode, version=lease.version)
            await worker.deliver(episode, {lease.version: sent.sampled}, FINISHED, (sent,))


async def test_a_learner_whose_buffer_has_ended_writes_its_checkpoint_and_ends_soon(
    folders, address, tmp_path, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(checkpointing, "STOPPED_S", 0.2)
    path = tmp_path / "buffer.sqlite"
    first, second = (Bench(tmp_path, folders[0], Learner(steps=3, checkpoint_every=100)) for _ in range(2))
    async with serving(path, address, RULES), BufferClient(address, "worker-0") as worker:
        going = asyncio.create_task(first.run(address))
        await play(worker, 2)
        async with asyncio.timeout(SOON):
            while len(first.rows) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    with caplog.at_level(logging.WARNING):
        first.stop.set()
        async with asyncio.timeout(SOON):
            state = await going
    assert (state.step, state.version) == (2, 2)
    assert checkpoints(first.checkpoints) == [path_of(first.checkpoints, 2)]
    late = "the learner waited 0.2 s for the buffer to know of its checkpoint after a stop; see the buffer's log. The checkpoint"
    assert late in caplog.text
    async with serving(path, address, RULES), BufferClient(address, "worker-0") as worker:
        resumed, _ = await asyncio.gather(second.run(address), play(worker, 1))
        stats = await worker.stats()
    assert (resumed.step, resumed.version, stats.version) == (3, 3, 3)
    assert [row.step for row in second.rows] == [3]
    report = ledger_report(path)
    assert report.balances
    assert stats.ledger.trained == sum(
        trajectory(f"{group}.0.{member}").sampled for group in range(3) for member in (0, 1)
    )


async def test_a_learner_in_a_commit_whose_buffer_has_ended_ends_soon(folders, address, tmp_path, monkeypatch) -> None:
    """It cannot know whether the step was committed: the next start makes the steps since the last checkpoint again."""
    monkeypatch.setattr("slipstream.learner.loop.COMMIT_S", 0.2)
    path, here = tmp_path / "buffer.sqlite", asyncio.get_running_loop()
    first, second = (Bench(tmp_path, folders[0], Learner(steps=3, checkpoint_every=100)) for _ in range(2))
    async with serving(path, address, RULES) as buffer, BufferClient(address, "worker-0") as worker:

        class LastStep(Fsdp2Backend):
            """The buffer ends at the end of its second step."""

            steps = 0

            def step(self, *arguments, **options):
                done = super().step(*arguments, **options)
                self.steps += 1
                if self.steps == 2:
                    here.call_soon_threadsafe(buffer.cancel)
                return done

        first.make_backend = LastStep
        going = asyncio.create_task(first.run(address))
        await play(worker, 2)
        await asyncio.wait({buffer}, timeout=SOON)
    assert not going.done()
    first.stop.set()
    with pytest.raises(
        DeadlineExceeded, match=r"^the learner waited 0\.2 s for the buffer to commit a step after a stop; "
    ):
        async with asyncio.timeout(SOON):
            await going
    assert len(first.rows) == 1
    assert checkpoints(first.checkpoints) == []
    async with serving(path, address, RULES), BufferClient(address, "worker-0") as worker:
        resumed, _ = await asyncio.gather(second.run(address), play(worker, 3))
    assert [row.step for row in second.rows] == [1, 2, 3]
    assert resumed.step == 3
    assert ledger_report(path).balances
