"""Ranks that read their own rows: two ranks over gloo train a batch of a real buffer, each through a proxy that counts bytes.

A rank runs this file as a script, see tests/ranks.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from slipstream.buffer import array_reader
from slipstream.buffer.client import BufferClient
from slipstream.buffer.encoded import EncodedTrajectory
from slipstream.buffer.ledger_report import ledger_report
from slipstream.buffer.segments import read_arrays
from slipstream.buffer.service import BufferService
from slipstream.buffer.trajectory import FINISHED, BatchRow, Trajectory, Turn, VersionSpan
from slipstream.common.annotations import TRAINED
from slipstream.configs.algorithm import Algorithm, Gae, Grpo, PythonFunction
from slipstream.configs.backends import Fsdp2
from slipstream.configs.schema import Buffer, Learner, Model, Optimizer
from slipstream.learner.aux_models.aux_models import AuxModels
from slipstream.learner.aux_models.base import LocalTrainableModel
from slipstream.learner.aux_models.critic import Critic
from slipstream.learner.batch import NO_VERSION, TrainBatch
from slipstream.learner.loop import TrainingLoop
from slipstream.learner.traces import ExpertTraces
from slipstream.monitor.annotations import AnnotationWriter, read_annotations
from slipstream.tests import tiny
from slipstream.tests.ranks import CPU, DEADLINE_S, open_backend, run_on_two_ranks

OPTIMIZER = Optimizer(lr=2e-5)
"""So small that what AdamW makes of the rounding of the smallest gradients stays below the tolerance: see `placed.keys_of`."""

ELSE = 16_000
"""Bytes of headers, statistics and ZeroMQ's own, more than any rank receives of these."""

GROUPS, MEMBERS, PROMPT, BUDGET, LONGEST = 2, 4, 300, 800, 1000


class Job(msgspec.Struct):
    """One step by a rank, whose buffer is at `addresses[rank]`; the ids that it read and the weights go to `out`. With `traces`
    each task has one; with `own` the advantage is `by_logprobs`."""

    model: str
    out: str
    addresses: tuple[str, ...]
    critic: bool = False
    traces: bool = False
    own: bool = False


class Read(msgspec.Struct):
    """What a rank has read of the buffer's files: the ids of rows, and bytes."""

    ids: list[str] = []
    size: int = 0


class RecordingClient(BufferClient):
    """Records which rows are read."""

    read: Read

    async def read_rows(self, rows: Sequence[BatchRow], deadline_s: float | None = None) -> tuple[Trajectory, ...]:
        self.read.ids += [row.id for row in rows]
        return await super().read_rows(rows, deadline_s)


def episode(episode_id: str, prompt: int, answer: int) -> Trajectory:
    """One turn of `answer` tokens after a prompt that its group has in common."""
    group, _, member = map(int, episode_id.split("."))
    tokens, rng = prompt + answer, np.random.default_rng([group, member])
    mask = np.arange(tokens) >= prompt
    ids = np.where(mask, rng.integers(5, tiny.VOCABULARY, tokens), np.arange(tokens) % 100 + 5 + 100 * group)
    return Trajectory(
        id=f"{episode_id}.0",
        group_id=group,
        member=member,
        branch=0,
        task_id=f"task {group}",
        env="env",
        token_ids=ids.astype(np.int32),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, -rng.uniform(1, 3, tokens), 0).astype(np.float32),
        version_spans=(VersionSpan(prompt, tokens, 0),),
        turns=(Turn(prompt, tokens, "stop"),),
        reward=float(member),
        turn_rewards=(float(member),),
        outcome=FINISHED,
    )


def trace(group: int) -> Trajectory:
    """What an expert answered to a group's prompt."""
    one = episode(f"{group}.0.7", PROMPT, 40)
    spans, silent = (VersionSpan(PROMPT, len(one), NO_VERSION),), np.zeros_like(one.behavior_logprobs)
    return msgspec.structs.replace(one, version_spans=spans, behavior_logprobs=silent)


def by_logprobs(batch: TrainBatch, carried: dict[str, float]) -> np.ndarray:
    """The advantage of each episode: its mean log-prob. Every sampled token of `full_buffer` has one below 0."""
    assert (batch.behavior_logprobs[batch.sampled] < 0).all()
    assert batch.token_ids.all()  # none is the id 0
    assert batch.penalties is None
    return np.bincount(batch.episode_of_token, batch.behavior_logprobs) / batch.lengths


async def train(job: Job, rank: int) -> Read:
    """Returns what this rank has read."""
    backend = open_backend(job.model)
    own = PythonFunction(function="slipstream.tests.test_learner_rows:by_logprobs")
    advantage = own if job.own else Gae(lr=2e-5) if job.critic else Grpo()
    algorithm = Algorithm(advantage=advantage, minibatches=2)
    on_cpu = Fsdp2(device="cpu", tokens_per_microbatch=BUDGET)
    # Only rank 0 knows the learning rate in force, after a change of settings.
    config = Learner(
        steps=1,
        batch_s=DEADLINE_S,
        algorithm=algorithm,
        backend=on_cpu,
        optimizer=Optimizer(lr=OPTIMIZER.lr * (1 + rank)),
    )
    aux_models = None
    if job.critic:
        critic = Critic(Model(path=job.model, dtype="float32"), OPTIMIZER, CPU, temperature=1.0, timeout_s=DEADLINE_S)
        aux_models = AuxModels(config, trained=LocalTrainableModel(config, critic))
    checkpoints, never = Path(f"{job.out}.checkpoints"), asyncio.Event()
    writer = AnnotationWriter(Path(f"{job.out}.run"), f"learner-{rank}", 1 << 30)
    client = RecordingClient(job.addresses[rank], f"learner-{rank}", deadline_s=DEADLINE_S)
    client.read = read = Read()

    def counting(*place: Any) -> bytes:
        arrays = read_arrays(*place)
        read.size += len(arrays)
        return arrays

    async with client:
        loop = TrainingLoop(
            config,
            backend,
            client,
            None,
            never,
            checkpoints,
            [5, 6, 7],
            lambda _: None,
            LONGEST,
            tiny.VOCABULARY,
            aux_models,
            annotate=writer.record,
            annotations_bytes=1 << 30,
            traces=ExpertTraces([trace(group) for group in range(GROUPS)] if job.traces else []),
        )
        with writer, mock.patch.object(array_reader, "read_arrays", counting):
            state = await loop.run(never, lambda: None)
    assert state.step == 1
    assert backend.leads_rows
    assert not writer.dropped
    weights = {name: tensor.clone() for name, tensor in backend.named_weights()}
    if rank == 0:
        save_file(weights, job.out)
    if aux_models is not None:
        aux_models.close()
    backend.close()
    return read


@contextlib.asynccontextmanager
async def full_buffer(path: Path, *poisoned: str) -> AsyncIterator[tuple[str, dict[str, Trajectory]]]:
    """The address of a buffer that holds one batch, and its trajectories by id. Each of `poisoned` has a token that the model does
    not know, and is one more group."""
    address = f"tcp://127.0.0.1:{tiny.free_port()}"
    config = Buffer(max_staleness=4, groups_per_batch=GROUPS, group_size=MEMBERS)
    service, ready = BufferService(config, path, address), asyncio.Event()
    serving = asyncio.create_task(service.serve(ready.set))
    await ready.wait()
    delivered: dict[str, Trajectory] = {}
    async with BufferClient(address, "learner-0") as learner, BufferClient(address, "worker") as worker:
        await worker.register()
        service.mark_served(await learner.recover(0))
        for lease in await worker.leases(GROUPS + len(poisoned)):
            for member in lease.members:
                one = episode(lease.episode(member), PROMPT, 30 + 70 * member + 11 * lease.group_id)
                if one.id in poisoned:
                    one.token_ids[-1] = tiny.VOCABULARY
                delivered[one.id] = one
                await worker.deliver(lease.episode(member), {0: one.sampled}, FINISHED, (one,))
    assert len(delivered) == (GROUPS + len(poisoned)) * MEMBERS
    try:
        yield address, delivered
    finally:
        service.stop()
        await serving


@contextlib.asynccontextmanager
async def counting_proxy(address: str) -> AsyncIterator[tuple[str, list[int]]]:
    """Another address of the TCP server at `address`, and the sizes of what it has sent there."""
    sizes: list[int] = []

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: list[int]) -> None:
        while data := await reader.read(1 << 16):
            seen.append(len(data))
            writer.write(data)
            await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = address.removeprefix("tcp://").split(":")
        there, to_there = await asyncio.open_connection(host, int(port))
        await asyncio.gather(forward(reader, to_there, []), forward(there, writer, sizes), return_exceptions=True)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}", sizes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.tiny_qwen3(tmp_path_factory.mktemp("model") / "model"))


def read_by(job: Job, rank: int) -> Read:
    return msgspec.json.decode(Path(f"{job.out}.{rank}.json").read_bytes(), type=Read)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["grpo", "critic", "traces"])
async def test_each_of_two_ranks_reads_its_own_rows_only_and_the_step_is_that_of_one(
    model: str, tmp_path: Path, kind: str
) -> None:
    critic, traces = kind == "critic", kind == "traces"
    async with full_buffer(tmp_path / "one.sqlite") as (address, rows):
        one = Job(model, str(tmp_path / "one"), (address,), critic, traces)
        assert sorted((await train(one, 0)).ids) == sorted(rows)
    async with contextlib.AsyncExitStack() as stack:
        address, rows = await stack.enter_async_context(full_buffer(tmp_path / "two.sqlite"))
        proxies = [await stack.enter_async_context(counting_proxy(address)) for _ in range(2)]
        two = Job(model, str(tmp_path / "two"), tuple(where for where, _ in proxies), critic, traces)
        await asyncio.to_thread(run_on_two_ranks, tmp_path, __file__, [two])
    size = {name: EncodedTrajectory.of(row).arrays.nbytes for name, row in rows.items()}
    own = [read_by(two, rank) for rank in range(2)]
    assert {*own[0].ids, *own[1].ids} == {*rows}
    for read, (_, sizes) in zip(own, proxies, strict=True):
        assert len(read.ids) == len({*read.ids})  # each at most once
        assert read.size == sum(size[name] for name in read.ids)  # and nothing else
        assert sum(sizes) < ELSE < 0.6 * sum(size.values())  # no arrays come from the buffer's process
    if not critic:  # which scores other rows than the step trains
        assert not {*own[0].ids} & {*own[1].ids}
        assert all(read.size < 0.75 * sum(size.values()) for read in own)
    for name in rows:  # each rank has recorded what it saw of its own
        one_rank, two_ranks = (read_annotations(Path(f"{job.out}.run"), 1, name) for job in (one, two))
        assert one_rank is not None
        assert two_ranks is not None
        assert one_rank.flags.tolist() == two_ranks.flags.tolist() == [TRAINED * bool(m) for m in rows[name].loss_mask]
        np.testing.assert_allclose(two_ranks.values, one_rank.values, rtol=0.01, atol=0.01)
    weights, expected_weights = load_file(two.out), load_file(one.out)
    for name, tensor in expected_weights.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=2e-6, msg=name)


@pytest.mark.timeout(300)
async def test_an_advantage_of_ones_own_gets_all_rows_on_each_of_two_ranks_and_the_step_is_that_of_one(
    model: str, tmp_path: Path
) -> None:
    async with full_buffer(tmp_path / "one.sqlite") as (address, rows):
        one = Job(model, str(tmp_path / "one"), (address,), own=True)
        assert sorted((await train(one, 0)).ids) == sorted(rows)
    async with full_buffer(tmp_path / "two.sqlite") as (address, rows):
        two = Job(model, str(tmp_path / "two"), (address, address), own=True)
        await asyncio.to_thread(run_on_two_ranks, tmp_path, __file__, [two])
    for rank in range(2):
        assert sorted(read_by(two, rank).ids) == sorted(rows)  # each once
    weights, expected_weights = load_file(two.out), load_file(one.out)
    for name, tensor in expected_weights.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=2e-6, msg=name)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("critic", [False, True], ids=["grpo", "critic"])
async def test_two_ranks_set_aside_what_one_of_them_found_and_take_another_batch_together(
    model: str, tmp_path: Path, critic: bool
) -> None:
    """Of two poisoned groups, which different ranks find."""
    poisoned, weights = ("0.0.3.0", "1.0.0.0"), []
    for ranks in (1, 2):
        path = tmp_path / f"{ranks}.sqlite"
        async with full_buffer(path, *poisoned) as (address, _):
            job = Job(model, str(tmp_path / f"{ranks}"), (address,) * ranks, critic)
            if ranks == 1:
                await train(job, 0)
            else:
                await asyncio.to_thread(run_on_two_ranks, tmp_path, __file__, [job])
            weights.append(load_file(job.out))
        with sqlite3.connect(path) as db:
            states = db.execute("SELECT state FROM groups ORDER BY id").fetchall()
        assert states == [("discarded",), ("discarded",), ("trained",), ("trained",)]
        assert ledger_report(path).balances
        assert set(ledger_report(path).total.discarded) == {"unusable"}
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=0, atol=2e-6, msg=name)


async def test_headers_have_lengths_and_prompts_and_say_where_the_arrays_are(tmp_path: Path) -> None:
    async with full_buffer(tmp_path / "b.sqlite") as (address, rows), BufferClient(address, "learner-0") as client:
        plan = await client.take_plan(0, 30.0)
        headers = [row for group in plan.groups for row in group]
        assert {row.id: len(row) for row in headers} == {name: len(row) for name, row in rows.items()}
        prompts = [{row.prompt for row in group} for group in plan.groups]
        assert [len(one) for one in prompts] == [1, 1]  # one for all members of a group
        assert prompts[0] != prompts[1]
        last = headers[-1]
        (row,) = await client.read_rows([last])
        assert np.array_equal(row.token_ids, rows[last.id].token_ids)


if __name__ == "__main__":
    os.environ["MASTER_PORT"] = os.environ["PORTS"]
    (only,) = msgspec.json.decode(sys.argv[1], type=list[Job])
    own_rank = os.environ["RANK"]
    Path(f"{only.out}.{own_rank}.json").write_bytes(msgspec.json.encode(asyncio.run(train(only, int(own_rank)))))
