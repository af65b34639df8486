"""What a learner is given at its worst: a named error or a step that changes nothing, and never a number that is not finite in a
replica or in a checkpoint.

Model, optimizer, buffer service, sockets and publisher are the real ones; a replica is a model in this process, and workers are a
loop that delivers what the test says. A batch that the buffer would never hand out is handed out by a stand-in.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from slipstream.buffer import replay
from slipstream.buffer.client import BufferClient
from slipstream.buffer.ledger_report import ledger_report
from slipstream.buffer.messages import BatchPlan
from slipstream.buffer.trajectory import FINISHED, BatchRow, Trajectory
from slipstream.configs.algorithm import Algorithm, Grpo, Ppo, PythonFunction, Uncorrected
from slipstream.configs.backends import Fsdp2
from slipstream.configs.schema import Buffer, Learner, Model
from slipstream.errors import (
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    LearnerError,
    SlipstreamError,
    StateError,
    WeightSyncError,
)
from slipstream.learner.algorithms.policy_loss import Tokens
from slipstream.learner.batch_trainer import UnusableBatch, may_be_data
from slipstream.learner.checkpoint_folder import CheckpointState, checkpoints, path_of
from slipstream.learner.fsdp2.backend import Fsdp2Backend
from slipstream.learner.loop import TrainingLoop
from slipstream.learner.metrics import StepMetrics
from slipstream.tests import tiny
from slipstream.tests.episodes import trajectory
from slipstream.tests.fleets import mark_served
from slipstream.tests.replicas import LocalReplica
from slipstream.tests.test_buffer_service import serving
from slipstream.tests.test_learner_loop import Buffer as ReadyBuffer
from slipstream.weightsync import snapshot
from slipstream.weightsync.plan import TransferPlan
from slipstream.weightsync.publisher import Publisher

SOON = 60.0
CANARY = [5, 17, 300, 2, 411, 90]

Make = Callable[[Trajectory], Trajectory]
"""What becomes of a harmless trajectory whose reward is the number of its member."""


class Replica(LocalReplica):
    """Serves the model of a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__("replica")
        self.model = tiny.load(folder)
        self.load = lambda tensors: self.model.load_state_dict(tensors, strict=False)  # the head is the embedding

    def _check(self, plan: TransferPlan) -> None:
        assert set(plan.names) <= set(self.model.state_dict())

    async def score(self, token_ids) -> list[float]:
        with torch.no_grad():
            rows = self.model(torch.tensor([token_ids])).logits[0, :-1].log_softmax(-1)
        return rows.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].tolist()

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


class Breaking(Fsdp2Backend):
    """Its memory is at fault: after each step one number of the embedding is none."""

    def step(self, *arguments, **named):
        result = super().step(*arguments, **named)
        with torch.no_grad():
            next(self._model.parameters()).to_local()[7, 3] = float("nan")
        return result


class Bench:
    """A learner of one rank and its replica, in `folder`. `run` makes a process's worth of it."""

    def __init__(self, folder: Path, model: Path, config: Learner) -> None:
        self.folder, self.config = folder, config
        self.replica = Replica(model)
        self.model = model
        self.rows: list[StepMetrics] = []
        self.make_backend: type[Fsdp2Backend] = Fsdp2Backend
        self.stop = asyncio.Event()

    async def run(self, buffer: str | ReadyBuffer) -> CheckpointState:
        """One process of the learner, at a buffer's address or with one that is forged."""
        if isinstance(buffer, str):
            async with BufferClient(buffer, "learner-0") as client:
                return await self._run(client)
        return await self._run(buffer)

    async def _run(self, buffer: BufferClient | ReadyBuffer) -> CheckpointState:
        backend = self.make_backend(
            Model(path=str(self.model)), self.config.optimizer, Fsdp2(device="cpu"), temperature=1.0, timeout_s=60
        )
        publisher = Publisher(
            [self.replica],
            transport="disk",
            folder=self.folder / "weights",
            spool=self.folder,
            host="127.0.0.1",
            backend="gloo",
            device=torch.device("cpu"),
            bucket_bytes=1 << 20,
            push_s=20.0,
            canary_tolerance=1e-4,
            on_served=lambda _, version: mark_served(buffer, version) if isinstance(buffer, BufferClient) else None,
        )
        loop = TrainingLoop(
            self.config,
            backend,
            buffer,  # type: ignore[arg-type]
            publisher,
            asyncio.Event(),
            self.checkpoints,
            CANARY,
            self.rows.append,
            longest=64,
            vocabulary=tiny.VOCABULARY,
        )
        try:
            return await asyncio.wait_for(loop.run(self.stop, lambda: None), SOON)
        finally:
            publisher.close()
            backend.close()

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    async def fails(self, buffer: str | ReadyBuffer, error: type[SlipstreamError], match: str) -> None:
        """The error is one line, and what serves and what is saved is finite. The learner's own errors are final, but for those
        of a batch that the next process tries once more, or is not handed any more."""
        with pytest.raises(error, match=match) as caught:
            await self.run(buffer)
        assert "\n" not in str(caught.value)
        final = isinstance(caught.value, LearnerError | DeadlineExceeded | ConfigError)
        assert caught.value.final == (final and not isinstance(caught.value, UnusableBatch))
        assert all(tensor.isfinite().all() for tensor in self.replica.weights.values())

    def served_is(self, weights: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(tensor, weights[name]) for name, tensor in self.replica.weights.items())


def learner(steps: int = 1, **sections) -> Learner:
    return Learner(steps=steps, checkpoint_every=1, **sections)


@contextlib.asynccontextmanager
async def playing(folder: Path, address: str, make: Make, **config) -> AsyncIterator[BufferClient]:
    """A buffer at `address`, workers that deliver what `make` makes, and a client for looking."""
    rules = Buffer(**{"max_staleness": 1, "groups_per_batch": 1, "group_size": 2} | config)
    async with (
        serving(folder / "buffer.sqlite", address, rules),
        BufferClient(address, "worker-0") as worker,
        BufferClient(address, "watcher") as client,
    ):

        async def play() -> None:
            while True:
                lease = await worker.lease()
                for episode in map(lease.episode, lease.members):
                    sent = make(trajectory(episode, version=lease.version))
                    await worker.deliver(episode, {lease.version: sent.sampled}, FINISHED, (sent,))

        work = asyncio.create_task(play())
        try:
            yield client
            assert not work.done()
        finally:
            work.cancel()
            await asyncio.wait({work})


def earning(reward: Callable[[int], float]) -> Make:
    def make(t: Trajectory) -> Trajectory:
        return msgspec.structs.replace(t, reward=reward(t.member), turn_rewards=(reward(t.member),))

    return make


# ---------------------------------------------------------------- losses and weights


async def test_an_infinite_loss_leaves_the_weights_and_the_version_as_they_were(folders, address, tmp_path) -> None:
    def impossible(t: Trajectory) -> Trajectory:
        """The first member earns so little that its advantage is near the end of float32, and has a token that its engine says it
        never samples."""
        logprobs = t.behavior_logprobs if t.member else np.where(t.loss_mask, np.float32(-3e38), np.float32(0))
        earned = 0.0 if t.member else -1e38
        return msgspec.structs.replace(t, behavior_logprobs=logprobs, reward=earned, turn_rewards=(earned,))

    bench = Bench(tmp_path, folders[0], learner(algorithm=Algorithm(advantage=Grpo(normalize=False), loss=Ppo())))
    before = bench.replica.weights
    async with playing(tmp_path, address, impossible) as client:
        # The batch is the same for the process that comes after, and another one for the third.
        for then in ("it is tried once more", "its groups 0 are set aside", "it is tried once more"):
            await bench.fails(address, UnusableBatch, f"loss inf.*not finite; the weights are unchanged.*; {then}")
            assert bench.replica.served == 0
            assert bench.served_is(before)
            stats = await client.stats()
            assert (stats.version, stats.ledger.trained) == (0, 0)
            assert checkpoints(bench.checkpoints) == []
        assert (stats.unusable_batches, set(stats.ledger.discarded)) == (1, {"unusable"})
        assert stats.ledger.balances


def without_bounds(tokens: Tokens) -> torch.Tensor:
    """A loss of one's own that is no number for the extreme log-probs that the losses here bound."""
    return -tokens.advantages * torch.exp(tokens.current - tokens.behavior)


async def test_a_step_that_fails_twice_costs_the_groups_that_were_in_both_and_the_run_goes_on(
    folders, address, tmp_path
) -> None:
    def impossible(t: Trajectory) -> Trajectory:
        infinite = np.where(t.loss_mask, np.float32(-3e38), np.float32(0))
        return msgspec.structs.replace(t, behavior_logprobs=infinite) if (t.group_id, t.member) == (1, 0) else t

    loss = PythonFunction(f"{__name__}:without_bounds")
    bench = Bench(tmp_path, folders[0], learner(2, algorithm=Algorithm(loss=loss, correction=Uncorrected())))
    async with playing(tmp_path, address, impossible) as client:
        await bench.fails(address, UnusableBatch, "the batch of version 1 cannot be trained on.*tried once more")
        await bench.fails(address, UnusableBatch, "the batch of version 1 cannot be trained on.*groups 1 are set aside")
        state = await bench.run(address)
        stats = await client.stats()
    assert (state.step, state.version) == (2, 2)
    assert bench.replica.served == 2
    assert bench.rows[-1].batches_unusable == stats.unusable_batches == 1
    assert stats.ledger.discarded["unusable"] > 0
    assert stats.ledger.balances
    assert ledger_report(tmp_path / "buffer.sqlite").balances


async def test_groups_with_tokens_that_the_model_does_not_know_are_set_aside_at_once_and_alone(
    folders, address, tmp_path, caplog
) -> None:
    """What a buffer holds that took it from a worker of an earlier version."""
    foreign = {(0, 1): tiny.VOCABULARY, (2, 0): 70_000}

    def poisoned(t: Trajectory) -> Trajectory:
        ids = t.token_ids.copy()
        ids[-1] = foreign.get((t.group_id, t.member), ids[-1])
        return msgspec.structs.replace(t, token_ids=ids)

    bench = Bench(tmp_path, folders[0], learner(2))
    async with playing(tmp_path, address, poisoned, groups_per_batch=2) as client:
        state = await bench.run(address)  # in one process
        stats = await client.stats()
    assert (state.step, bench.replica.served) == (2, 2)
    with sqlite3.connect(tmp_path / "buffer.sqlite") as db:
        trained = db.execute("SELECT id, trained_at FROM groups WHERE state = 'trained' ORDER BY id").fetchall()
        discarded = db.execute("SELECT DISTINCT group_id FROM episodes WHERE reason = 'unusable'").fetchall()
    assert discarded == [(0,), (2,)]
    assert trained == [(1, 1), (3, 1), (4, 2), (5, 2)]
    assert stats.unusable_batches == 2
    assert bench.rows[-1].batches_unusable == 2
    assert stats.ledger.balances
    assert "token id 512 is outside the vocabulary, 0 to 511" in caplog.text


async def test_a_run_of_which_too_many_batches_cannot_be_trained_on_ends_with_its_name(
    folders, address, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(replay, "UNUSABLE_BATCHES", 3)

    def poisoned(t: Trajectory) -> Trajectory:
        return msgspec.structs.replace(t, token_ids=np.full_like(t.token_ids, tiny.VOCABULARY))

    bench = Bench(tmp_path, folders[0], learner(2))
    async with playing(tmp_path, address, poisoned) as client:
        for _ in range(2):  # neither does `resume` help
            with pytest.raises(
                UnusableBatch, match=r"token id 512 .*3 batches of this run could not be trained on"
            ) as e:
                await bench.run(address)
            assert e.value.final
        stats = await client.stats()
    assert stats.unusable_batches == 3
    assert stats.ledger.balances


@pytest.mark.parametrize(
    ("error", "may_be"),
    [
        (IndexError("index out of range in self"), True),
        (ValueError("no number"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), True),
        (LearnerError("loss nan"), True),
        (MemoryError(), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: out of memory"), False),
        (RuntimeError("[gloo] Connection closed by peer"), False),
        (LearnerError("rank 1 is gone", final=False), False),
        (OSError(28, "No space left on device"), False),
        (DeadlineExceeded("the learner", "the buffer", 1.0, ""), False),
        (StateError("refused"), False),
        (UnusableBatch("too many", final=True), False),
    ],
    ids=str,
)
def test_which_errors_may_be_the_data(error: Exception, may_be: bool) -> None:
    assert may_be_data(error) is may_be


async def test_weights_that_are_not_finite_are_neither_pushed_nor_saved(folders, address, tmp_path) -> None:
    bench = Bench(tmp_path, folders[0], learner())
    before = bench.replica.weights
    bench.make_backend = Breaking
    async with playing(tmp_path, address, lambda t: t) as client:
        await bench.fails(address, WeightSyncError, "canary are not finite, so its weights are not pushed")
        assert (await client.stats()).ledger.trained > 0
        assert bench.replica.served == 0
        assert bench.served_is(before)
        assert checkpoints(bench.checkpoints) == []
        # The next process takes the commit back, and where its memory is good the run goes on.
        bench.make_backend = Fsdp2Backend
        state = await bench.run(address)
        assert state.step == 1
        assert bench.replica.served == state.version == 3  # what was recovered is 2
        assert not bench.served_is(before)


async def test_a_model_that_computes_no_numbers_ends_the_run_before_anything_is_pushed(
    folders, address, tmp_path
) -> None:
    bench = Bench(tmp_path, folders[0], learner())
    bench.model = tmp_path / "model"
    shutil.copytree(folders[0], bench.model)
    weights = load_file(bench.model / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, bench.model / "model.safetensors", metadata={"format": "pt"})
    async with playing(tmp_path, address, lambda t: t):
        await bench.fails(address, ConfigError, "^model.path: the model there gives log-probs that are not finite")
    assert bench.replica.served is None


@pytest.mark.parametrize(("value", "dtype"), [("nan", "float32"), ("inf", "float32"), ("3.4e38", "bfloat16")])
async def test_a_snapshot_has_no_number_that_is_not_finite(tmp_path: Path, value: str, dtype: str) -> None:
    good, ill = torch.randn(3, 4), torch.randn(3, 4)
    await snapshot.take_snapshot(1, [("good", good), ("empty", torch.empty(0))], tmp_path)
    ill[1, 2] = float(value)
    ill = ill.to(snapshot.dtype_of(dtype))
    with pytest.raises(WeightSyncError, match=f"version 1 is not pushed: ill holds .* not finite in {dtype}"):
        await snapshot.take_snapshot(1, [("good", good), ("ill", ill)], tmp_path)


async def test_a_batch_without_any_advantage_is_a_step_that_changes_nothing(folders, address, tmp_path) -> None:
    bench = Bench(tmp_path, folders[0], learner(steps=2))
    before = bench.replica.weights
    async with playing(tmp_path, address, earning(lambda member: 1.0)):
        state = await bench.run(address)
    assert (state.step, bench.replica.served) == (2, 2)
    assert bench.served_is(before)
    assert [(row.loss, row.grad_norm, row.reward_std) for row in bench.rows] == [(0.0, 0.0, 0.0)] * 2
    assert all(np.isfinite(v) for row in bench.rows for v in msgspec.to_builtins(row).values() if isinstance(v, float))


# ---------------------------------------------------------------- rewards


async def test_rewards_too_large_to_compute_with_are_named(folders, address, tmp_path) -> None:
    bench = Bench(tmp_path, folders[0], learner())
    async with playing(tmp_path, address, earning(lambda member: 1e300 * member)):
        await bench.fails(address, LearnerError, r"the largest is 1e\+300 of episode '0\.0\.1'; scale them down")
    assert bench.replica.served == 0


async def test_advantages_beyond_float32_are_named(folders, address, tmp_path) -> None:
    bench = Bench(tmp_path, folders[0], learner(algorithm=Algorithm(advantage=Grpo(normalize=False))))
    async with playing(tmp_path, address, earning(lambda member: 1e60 * member)):
        await bench.fails(address, LearnerError, r"the largest is 1e\+60 of episode '0\.0\.1'")
    assert bench.replica.served == 0


async def test_tasks_that_no_member_fails_end_at_the_deadline_with_their_number(folders, address, tmp_path) -> None:
    config = msgspec.structs.replace(learner(), batch_s=4.0)
    bench = Bench(tmp_path, folders[0], config)
    async with playing(tmp_path, address, earning(lambda member: 1.0), dynamic_sampling=True) as client:
        match = (
            r"batch of version 0; .* [1-9]\d* groups of this run were discarded because all their rewards were equal"
        )
        await bench.fails(address, DeadlineExceeded, match)
        stats = await client.stats()
        assert stats.refilled_groups > 0
        assert stats.ledger.balances
        assert stats.ledger.discarded == {
            "equal_rewards": stats.ledger.generated - stats.ledger.in_flight - stats.ledger.ready
        }


# ---------------------------------------------------------------- batches that the buffer never hands out


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"oldest_version": 1}, "batch of step 1 holds no token that may be trained"),
        ({"withheld": {"0.0.0": "late", "0.0.1": "late"}}, "batch of step 1 holds no token that may be trained"),
        ({"groups": ()}, "batch of step 1 holds no token that may be trained"),
        ({"groups": ((),)}, "group number 0 of the batch is empty"),
    ],
)
async def test_a_batch_with_nothing_to_train_on_is_named(folders, tmp_path, change, match) -> None:
    class Forging(ReadyBuffer):
        async def take_plan(self, version: int, deadline_s: float) -> BatchPlan[BatchRow]:
            return msgspec.structs.replace(await super().take_plan(version, deadline_s), **change)

    bench = Bench(tmp_path, folders[0], learner())
    await bench.fails(Forging(), LearnerError, match)
    assert bench.replica.served == 0
    assert checkpoints(bench.checkpoints) == []


# ---------------------------------------------------------------- checkpoints


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a head of its own, which the others have not."""
    return tiny.tiny_qwen3(tmp_path_factory.mktemp("other") / "model", tied=False)


async def test_a_checkpoint_of_another_model_ends_the_run_before_anything_is_pushed(
    folders, other, address, tmp_path
) -> None:
    async with playing(tmp_path, address, lambda t: t):
        await Bench(tmp_path, folders[0], learner()).run(address)
        bench = Bench(tmp_path, other, learner(steps=2))
        await bench.fails(address, CheckpointError, "step-00000001 is of another model.*lm_head")
        assert bench.replica.served is None


@pytest.mark.parametrize("damage", ["truncated", "no metadata", "state"])
async def test_a_damaged_checkpoint_ends_the_run_before_anything_is_pushed(folders, address, tmp_path, damage) -> None:
    async with playing(tmp_path, address, lambda t: t):
        await Bench(tmp_path, folders[0], learner()).run(address)
        folder = path_of(tmp_path / "checkpoints", 1)
        match damage:
            case "truncated":
                (data,) = folder.glob("*.distcp")
                data.write_bytes(data.read_bytes()[:1000])
            case "no metadata":
                (folder / ".metadata").write_bytes(b"")
            case "state":
                (folder / "state.json").write_text('{"step": 1')
        bench = Bench(tmp_path, folders[0], learner(steps=2))
        await bench.fails(address, CheckpointError, "step-00000001 cannot be loaded")
        assert bench.replica.served is None


async def test_a_checkpoint_without_its_state_is_not_one(folders, address, tmp_path) -> None:
    """What is left to begin from is the model itself, and the buffer refuses: its groups are in a checkpoint."""
    async with playing(tmp_path, address, lambda t: t):
        await Bench(tmp_path, folders[0], learner()).run(address)
        shutil.rmtree(path_of(tmp_path / "checkpoints", 1))
        bench = Bench(tmp_path, folders[0], learner(steps=2))
        await bench.fails(address, SlipstreamError, "weights of version 0 cannot be resumed from")
        assert bench.replica.served is None
