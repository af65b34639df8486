"""The training loop and replicas that come, fail and come back, with a real publisher and the small replicas of tests/replicas.py.

The model and the buffer are stand-ins that are always ready: what is tested is who waits for whom.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from slipstream.buffer.ledger import Ledger
from slipstream.buffer.messages import BatchPlan, Stats
from slipstream.buffer.trajectory import BatchRow, Trajectory
from slipstream.configs.schema import Learner, Optimizer
from slipstream.errors import DeadlineExceeded, EngineError, LearnerError
from slipstream.learner import batch_trainer
from slipstream.learner.backend import BackendStepResult, PolicyLoss
from slipstream.learner.batch import TrainBatch, flatten
from slipstream.learner.checkpoint_folder import CheckpointState
from slipstream.learner.loop import TrainingLoop
from slipstream.learner.metrics import AuxModelsResult, StepMetrics
from slipstream.learner.packing import MicroBatch
from slipstream.tests import tiny
from slipstream.tests.episodes import row_of, trajectory
from slipstream.tests.replicas import CANARY, LocalReplica, Sleeper, logprobs, make_model
from slipstream.weightsync import publisher as publishing
from slipstream.weightsync.plan import TransferPlan
from slipstream.weightsync.publisher import Publisher

STEPS = 6
STATS = Stats(version=0, ledger=Ledger(), leased_groups=0, ready_groups=1, slot_s=0.0, idle_slot_s=0.0)


MEANS = ("importance", "importance_square", "kl", "entropy", "clip_fraction", "dropped")


class Model:
    """A backend whose steps make the policy of the next seed."""

    rank, world_size = 0, 1
    data_rank, data_size = 0, 1
    shares_prefixes = False
    routers = None

    def __init__(self) -> None:
        self.seed = 0
        self.saves: list[tuple[Path, CheckpointState, Future[None]]] = []
        self.writes_at_once = True

    def logprobs(self, rows: Sequence[MicroBatch], temperature: float | None = None) -> list[torch.Tensor]:
        if temperature is None:
            return [torch.zeros(len(row.token_ids)) for row in rows]
        return [torch.tensor([0.0, *logprobs(make_model(self.seed), row.token_ids.tolist())]) for row in rows]

    def maximum(self, value: float) -> float:
        return float(value)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def step(self, rows: Sequence[MicroBatch], loss: PolicyLoss, lr: float) -> BackendStepResult:
        self.seed += 1
        return BackendStepResult(0.0, 0.0, 1, dict.fromkeys(MEANS, 1.0))

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from make_model(self.seed).state_dict().items()

    def save(self, directory: Path, state: CheckpointState) -> Future[None]:
        self.saves.append((directory, state, Future()))
        if self.writes_at_once:
            self.write(len(self.saves) - 1)
        return self.saves[-1][2]

    def write(self, number: int) -> None:
        """Finish the save of that number."""
        directory, state, written = self.saves[number]
        directory.mkdir(parents=True)
        (directory / "state.json").write_text(f'{{"step":{state.step},"version":{state.version}}}')
        written.set_result(None)

    def load(self, directory: Path) -> CheckpointState:
        raise NotImplementedError

    def export(self, directory: Path) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class Buffer:
    """Has a batch whenever one is asked for, `batch_in` seconds later."""

    batch_in = 0.0
    taken = 0

    def __init__(self) -> None:
        self.final: list[int] = []

    async def recover(self, version: int) -> int:
        return version

    async def take_plan(self, version: int, deadline_s: float) -> BatchPlan[BatchRow]:
        await asyncio.sleep(self.batch_in)
        self.taken = version
        return BatchPlan(version, 0, (tuple(map(row_of, self.group(version))),), {}, await self.stats())

    async def read_rows(self, rows: Sequence[BatchRow]) -> tuple[Trajectory, ...]:
        held = {one.id: one for one in self.group(self.taken)}
        return tuple(held[row.id] for row in rows)

    def group(self, version: int) -> list[Trajectory]:
        return [trajectory(f"0.0.{member}", version=version) for member in range(2)]

    async def fresh(self, version: int, limit: int) -> tuple[Trajectory, ...]:
        return ()

    async def commit(self, version: int) -> None: ...

    async def step_failed(self, version: int, reason: str) -> tuple[int, ...]:
        return ()

    async def checkpointed(self, version: int) -> None:
        self.final.append(version)

    async def discard_batch(self, version: int, groups: Sequence[int], reason: str) -> None: ...

    async def stats(self) -> Stats:
        return STATS


class Wedged(LocalReplica):
    """Answers, takes every announcement, and never says that it holds anything."""

    async def receive_weights(self, plan: TransferPlan) -> None:
        self._note("receive")


class Bench:
    def __init__(
        self, folder: Path, *replicas: LocalReplica, push_s: float = 60.0, every: int = 100, batch_s: float = 60.0
    ) -> None:
        self.joined, self.stop, self.ready = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.rows: list[StepMetrics] = []
        self.buffer = Buffer()
        self.publisher = Publisher(
            replicas,
            transport="disk",
            folder=folder / "weights",
            spool=folder,
            host="127.0.0.1",
            backend="gloo",
            device=torch.device("cpu"),
            bucket_bytes=1 << 20,
            push_s=push_s,
            canary_tolerance=1e-5,
        )
        self.model = Model()
        config = Learner(steps=STEPS, checkpoint_every=every, checkpoint_keep=1, batch_s=batch_s)
        self.loop = TrainingLoop(
            config,
            self.model,
            self.buffer,  # type: ignore[arg-type]
            self.publisher,
            self.joined,
            folder / "checkpoints",
            CANARY,
            self.rows.append,
            longest=64,
            vocabulary=tiny.VOCABULARY,
        )

    def fleet_from_version_1(self, *replicas: LocalReplica) -> None:
        """These are the fleet once version 1 is published."""
        publish = self.publisher.publish

        async def then_join(version: int, *arguments):
            report = await publish(version, *arguments)
            if version == 1:
                self.publisher.update(replicas)
                self.joined.set()
            return report

        self.publisher.publish = then_join

    async def run(self) -> CheckpointState:
        return await self.loop.run(self.stop, self.ready.set)


@pytest.fixture
async def benches() -> AsyncIterator[list[Bench]]:
    benches: list[Bench] = []
    yield benches
    for bench in benches:
        bench.publisher.close()


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - of many kinds, and none has an event
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(("enough", "asked"), [(1, 0), (1024, STEPS)])
async def test_newest_trajectories_are_scored_only_where_a_batch_has_few_tokens_to_compare(
    benches: list[Bench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enough: int, asked: int
) -> None:
    monkeypatch.setattr(batch_trainer, "ENOUGH", enough)
    bench = Bench(tmp_path, LocalReplica("serving"))
    benches.append(bench)
    versions: list[int] = []

    async def fresh(version: int, limit: int) -> tuple[Trajectory, ...]:
        versions.append(version)
        return ()

    bench.buffer.fresh = fresh
    await bench.run()
    assert versions == list(range(asked))
    assert all(row.mismatch_tokens > 0 for row in bench.rows)


async def test_a_joiner_that_never_answers_does_not_delay_a_step(
    benches: list[Bench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "GRACE_SHARE", 0.005)  # 0.3 s, once
    monkeypatch.setattr(publishing, "RETRY_S", 60.0)  # it is not due again before the end
    serving, wedged = LocalReplica("serving"), Wedged("wedged")
    bench = Bench(tmp_path, serving)
    benches.append(bench)
    bench.buffer.batch_in = 0.02
    publish = bench.publisher.publish

    async def then_join(version: int, *arguments):
        if version == 2:
            await until(lambda: wedged.call_log)  # the attempt to reach it, which this version cancels
        report = await publish(version, *arguments)
        if version == 1:
            bench.publisher.update([serving, wedged])
        bench.joined.set()  # as a fleet does whose members change all the time
        return report

    bench.publisher.publish = then_join
    began = time.monotonic()
    state = await bench.run()
    assert time.monotonic() - began < 20.0  # an attempt to reach it takes 23 s by itself
    assert state.step == STEPS
    assert serving.served == STEPS
    assert [what for _, what in wedged.call_log] == ["receive"]  # once, and then not before it is due again


@pytest.mark.parametrize("failures", [0, 1, 2])
async def test_a_joiner_gets_its_weights_though_batches_are_always_ready(
    benches: list[Bench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    monkeypatch.setattr(publishing, "RETRY_S", 0.0)
    attempts = itertools.count()

    class Slow(LocalReplica):
        async def receive_weights(self, plan: TransferPlan) -> None:
            if next(attempts) < failures:
                raise EngineError("joiner answered 500")
            await asyncio.sleep(0.3)
            await super().receive_weights(plan)

    serving, joiner = LocalReplica("serving"), Slow("joiner")
    bench = Bench(tmp_path, serving)
    benches.append(bench)
    bench.buffer.batch_in = 0.02
    bench.fleet_from_version_1(serving, joiner)
    await bench.run()
    assert joiner.served == STEPS


@pytest.mark.parametrize("stuck", [False, True])
async def test_a_joiner_that_needs_longer_than_the_grace_gets_one_push_to_itself(
    benches: list[Bench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stuck: bool
) -> None:
    """Batches are always ready. One that takes its weights within `push_s` serves; one that never does is reported."""
    monkeypatch.setattr(publishing, "RETRY_S", 0.0)
    monkeypatch.setattr(publishing, "GRACE_SHARE", 0.001)  # of 20 s
    asked = 0

    class Slow(LocalReplica):
        async def receive_weights(self, plan: TransferPlan) -> None:
            nonlocal asked
            asked += 1
            await asyncio.sleep(1000 if stuck else 0.5)
            await super().receive_weights(plan)

    serving, joiner = LocalReplica("serving"), Slow("joiner")
    bench = Bench(tmp_path, serving, push_s=5.0 if stuck else 20.0)
    benches.append(bench)
    bench.fleet_from_version_1(serving, joiner)
    take_plan = bench.buffer.take_plan

    async def after_an_attempt(version: int, deadline_s: float) -> BatchPlan[BatchRow]:
        # An attempt asks the joiner before the next version cancels it.
        await until(lambda: asked >= min(version, publishing.CANCELLED_MOST + 1))
        return await take_plan(version, deadline_s)

    bench.buffer.take_plan = after_an_attempt  # type: ignore[method-assign]
    lost = list[str]()
    bench.publisher._on_lost = lambda name, reason: lost.append(f"{name}: {reason}")
    await bench.run()
    assert asked > publishing.CANCELLED_MOST
    assert serving.served == STEPS
    assert (joiner.served is None, len(lost)) == ((True, 1) if stuck else (False, 0)), lost


@pytest.mark.parametrize("after_training", [False, True])
async def test_a_replica_that_was_silent_is_tried_again_without_being_announced(
    benches: list[Bench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after_training: bool
) -> None:
    class Shy(LocalReplica):
        silent, asked = True, 0

        async def version(self) -> int | None:
            self.asked += 1
            if self.silent:
                raise EngineError(f"{self.name} says nothing")
            return await super().version()

    monkeypatch.setattr(publishing, "RETRY_S", 0.05)
    serving, shy = LocalReplica("serving"), Shy("shy")
    bench = Bench(tmp_path, serving, shy)
    benches.append(bench)
    bench.buffer.batch_in = 0.02 if after_training else 1.0
    running = asyncio.create_task(bench.run())
    if after_training:
        await running
        running = asyncio.create_task(bench.loop.serve(bench.stop))
    asked = shy.asked
    await until(lambda: shy.asked >= asked + 2)
    shy.silent = False
    await until(lambda: shy.served is not None)
    bench.stop.set()
    await asyncio.wait_for(running, 60)
    assert shy.served is not None
    assert shy.asked > asked + 2  # twice for nothing, and once more


async def test_replicas_sleep_while_the_model_steps_and_wake_before_the_next_batch(
    benches: list[Bench], tmp_path: Path
) -> None:
    """Also where the step makes no version: the critic warms up, or the batch is to be taken again."""
    replicas = [Sleeper(name) for name in "ab"]
    bench = Bench(tmp_path, *replicas)
    benches.append(bench)
    trainer, step, asleep, awake = bench.loop._trainer, bench.model.step, list[str](), list[int]()

    def note(what: str) -> None:
        assert all(replica.paused and not replica.has_weights for replica in replicas)
        asleep.append(what)

    def sleeping_step(*arguments: Any) -> BackendStepResult:
        note("step")
        return step(*arguments)

    async def warm_up(taken: BatchPlan[BatchRow], state: CheckpointState) -> tuple[TrainBatch, AuxModelsResult]:
        note("warm up")
        return flatten(taken.groups, state.version, withheld={}, shape=trainer._shape), AuxModelsResult()

    async def set_aside(taken: BatchPlan[BatchRow], state: CheckpointState) -> None:
        note("set aside")
        trainer.step = trained  # type: ignore[method-assign]

    async def take_plan(version: int, deadline_s: float) -> BatchPlan[BatchRow]:
        assert all(not replica.paused and replica.served == version for replica in replicas)
        assert all(replica.has_weights for replica in replicas)
        awake.append(version)
        return await taking(version, deadline_s)

    bench.model.step, trained, taking = sleeping_step, trainer.step, bench.buffer.take_plan  # type: ignore[method-assign]
    trainer.first_step, trainer.step_critic = 2, warm_up  # type: ignore[method-assign,assignment]
    trainer.step, bench.buffer.take_plan = set_aside, take_plan  # type: ignore[method-assign,assignment]
    await bench.run()
    assert asleep == ["warm up", "warm up", "set aside", "step", "step", "step", "step"]
    assert awake == [0, 0, 0, 0, 1, 2, 3]
    assert [row.version for row in bench.rows] == [0, 0, 1, 2, 3, 4]
    assert all(row.asleep_s > 0 for row in bench.rows)
    assert all(row.asleep_s < row.step_s + row.push_s + 0.01 for row in bench.rows if row.step != 3)
    assert all((row.replicas, row.replicas_failed) == (2, 0) for row in bench.rows)
    assert all(not replica.paused and replica.served == 4 for replica in replicas)


async def test_leaving_ends_a_catch_up(benches: list[Bench], tmp_path: Path) -> None:
    serving, wedged = LocalReplica("serving"), Wedged("wedged")
    bench = Bench(tmp_path, serving)
    benches.append(bench)
    await bench.run()
    bench.publisher.update([serving, wedged])
    running = asyncio.create_task(bench.loop.serve(bench.stop))
    await until(lambda: wedged.call_log)
    bench.stop.set()
    await asyncio.wait_for(running, 20)  # the attempt goes on for 23 s
    assert not any(task.get_name() == "catch up" for task in asyncio.all_tasks())


async def test_training_goes_on_while_a_checkpoint_is_written_and_the_buffer_hears_when_it_is_whole(
    benches: list[Bench], tmp_path: Path
) -> None:
    replica = LocalReplica("serving")
    bench = Bench(tmp_path, replica, every=2)
    benches.append(bench)
    model, buffer = bench.model, bench.buffer
    model.writes_at_once = False
    running = asyncio.create_task(bench.run())
    await until(lambda: replica.served == 4)  # steps 3 and 4, with the checkpoint of step 2 on its way
    assert [state.step for _, state, _ in model.saves] == [2]
    assert buffer.final == []
    model.write(0)
    await until(lambda: len(model.saves) == 2)  # that of step 4 waited for it
    assert buffer.final == [2]
    model.write(1)
    await until(lambda: buffer.final == [2, 4] and replica.served == STEPS)
    await until(lambda: len(model.saves) == 3)
    assert not running.done()
    model.write(2)
    assert (await asyncio.wait_for(running, 60)).step == STEPS
    assert buffer.final == [2, 4, STEPS]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [f"step-{STEPS:08d}"]


async def test_a_change_of_settings_acts_with_the_next_step(benches: list[Bench], tmp_path: Path) -> None:
    bench = Bench(tmp_path, LocalReplica("serving"))
    benches.append(bench)
    first = Learner(checkpoint_every=100)
    later = Learner(checkpoint_every=2, optimizer=Optimizer(lr=0.5))
    bench.loop._settings = lambda: later if len(bench.rows) >= 3 else first  # pyright: ignore[reportPrivateUsage]
    await asyncio.wait_for(bench.run(), 60)
    assert [row.lr for row in bench.rows] == [first.optimizer.lr] * 3 + [0.5] * 3
    assert [state.step for _, state, _ in bench.model.saves] == [4, 6]


async def test_a_checkpoint_that_cannot_be_written_ends_training(benches: list[Bench], tmp_path: Path) -> None:
    bench = Bench(tmp_path, LocalReplica("serving"), every=2)
    benches.append(bench)
    bench.model.writes_at_once = False
    running = asyncio.create_task(bench.run())
    await until(lambda: bench.model.saves)
    bench.model.saves[0][2].set_exception(LearnerError("the disk is full"))
    with pytest.raises(LearnerError, match="the disk is full"):
        await asyncio.wait_for(running, 60)
    assert bench.buffer.final == []


async def test_a_checkpoint_that_is_never_whole_has_a_deadline(benches: list[Bench], tmp_path: Path) -> None:
    bench = Bench(tmp_path, LocalReplica("serving"), every=2, batch_s=0.3)
    benches.append(bench)
    bench.model.writes_at_once = False
    with pytest.raises(DeadlineExceeded, match=r"the learner waited 0.3 s for its checkpoint to be written; the disk"):
        await asyncio.wait_for(bench.run(), 60)
    assert not any(task.get_name() == "checkpoint" for task in asyncio.all_tasks())
