"""Every algorithm of the tables in docs/learner.md is reached by the keys that it names and trains three steps: the product's own
factories, loop, model, optimizer, buffer service, sockets and publisher; workers are a loop that delivers episodes."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import pytest
import torch
from slipstream.buffer.client import BufferClient
from slipstream.buffer.trajectory import FINISHED, Trajectory
from slipstream.configs import Config, load
from slipstream.configs.algorithm import Algorithm, PolicyLossKind, plays_greedily
from slipstream.launch.supervisor.factory import make_aux_models, make_backend
from slipstream.learner.algorithms.policy_loss import Tokens
from slipstream.learner.loop import TrainingLoop
from slipstream.learner.metrics import StepMetrics
from slipstream.learner.model import vocabulary_size
from slipstream.tests.episodes import trajectory
from slipstream.tests.fleets import mark_served
from slipstream.tests.test_buffer_service import serving
from slipstream.tests.test_learner_hostile import CANARY, SOON, Replica
from slipstream.weightsync.publisher import Publisher

DOCS = Path(__file__).parent.parent / "docs" / "learner.md"
SECTIONS = {
    "advantage": "From rewards to advantages",
    "loss": "Policy losses",
    "correction": "Corrections",
    "aggregation": "Aggregation",
    "kl": "Near a reference policy",
}
TEACHER = ("learner.algorithm.kl.kind=distillation", "learner.algorithm.kl.reference=TEACHER")  # the other tiny policy
WITH = {
    "loss.kind=sppo": ("learner.algorithm.advantage.kind=win_rate", "learner.algorithm.minibatches=2"),
    "loss.kind=kl_cov": ("learner.algorithm.minibatches=2",),
    "loss.kind=dpo": ("learner.algorithm.advantage.kind=none", "buffer.filter=best_worst"),
    "correction.kind=none": ("buffer.max_staleness=0",),
    "advantage.kind=reinforce_pp": ("buffer.group_size=1", "learner.algorithm.kl.kind=reward"),
    "advantage.kind=gae": ("learner.algorithm.advantage.value_clip=0.2", "learner.algorithm.epochs=2"),
    "advantage.kind=none": TEACHER,
    "advantage.kind=python": ("learner.algorithm.advantage.function=slipstream.tests.test_learner_own:centered",),
    "loss.kind=python": ("learner.algorithm.loss.function=slipstream.tests.test_learner_table:policy_gradient",),
    "kl.kind=loss": ("learner.algorithm.kl.coefficient={start: 0.2, target: 0.01}",),
    "kl.kind=reward": ("learner.algorithm.kl.coefficient={start: 0.2, target: 0.01}",),
    "kl.kind=distillation": TEACHER,
}
"""What a line needs beside it, and what it is well tried with."""
BY_DEFAULT = ("sppo", "reinforce_pp", "gae", "loss", "distillation", "dpo")
"""Those of the default tier: each a way of its own through the loop."""


def policy_gradient(tokens: Tokens) -> torch.Tensor:
    return -tokens.current * tokens.advantages


def kinds(section: str) -> list[str]:
    """The names in the first column of the first table of a section whose first column is `kind`."""
    text = DOCS.read_text().partition(f"## {SECTIONS[section]}\n")[2].partition("\n## ")[0]
    table = text.partition("| kind |")[2].partition("\n\n")[0].splitlines()[2:]
    found = [re.match(r"\| `(\w+)`", row) for row in table]
    return list(dict.fromkeys(name[1] for name in found if name))


def lines() -> list[str]:
    return [
        f"{section}={kind}" if section == "aggregation" else f"{section}.kind={kind}"
        for section in SECTIONS
        for kind in kinds(section)
    ]


def tags(union) -> set[str]:
    return {str(section.__struct_config__.tag) for section in get_args(union)}


def test_the_tables_have_every_kind_and_no_other():
    fields = {field.name: field.type for field in msgspec.structs.fields(Algorithm)}
    for section in ("advantage", "correction", "kl"):
        others = {"uncorrected"} if section == "correction" else set()  # named in the text
        assert set(kinds(section)) | others == tags(fields[section]), section
    assert set(kinds("loss")) == tags(PolicyLossKind)
    assert {*kinds("aggregation"), "auto"} == set(get_args(fields["aggregation"]))


def tiers() -> list:
    return [
        pytest.param(line, marks=() if line.rpartition("=")[2] in BY_DEFAULT else (pytest.mark.full,))
        for line in lines()
    ]


@pytest.mark.parametrize("line", tiers())
async def test_an_algorithm_trains_three_steps_by_the_keys_of_its_row(folders, address, tmp_path, line):
    keys = [
        *(f"model.path={folders[0]}", "agent.max_tokens=64", "learner.steps=3", "learner.optimizer.lr=1e-3"),
        *("learner.backend.device=cpu", "buffer.max_staleness=1", "buffer.groups_per_batch=2", "buffer.group_size=3"),
        *(key.replace("TEACHER", str(folders[1])) for key in WITH.get(line, ())),
        f"learner.algorithm.{line}",
    ]
    config = load("quickstart", keys)
    replica = Replica(folders[0])
    before = replica.weights
    rows = await run(config, replica, address, tmp_path)
    assert [row.step for row in rows] == [1, 2, 3]
    assert replica.served == 3
    assert any(not torch.equal(tensor, before[name]) for name, tensor in replica.weights.items())
    assert all(tensor.isfinite().all() for tensor in replica.weights.values())
    assert all(row.grad_norm > 0 for row in rows)
    if line in ("kl.kind=loss", "kl.kind=reward"):
        assert len({row.kl_coefficient for row in rows}) == 3


async def run(
    config: Config, replica: Replica, address: str, folder: Path, metrics: dict[str, float] | None = None
) -> list[StepMetrics]:
    """A learner of one rank, its buffer, and a worker that plays at random; its environment reports `metrics`."""
    rows: list[StepMetrics] = []
    greedy = plays_greedily(config.learner.algorithm)
    async with (
        serving(folder / "buffer.sqlite", address, config.buffer, greedy=greedy),
        BufferClient(address, "worker-0") as worker,
        BufferClient(address, "learner-0") as buffer,
    ):
        backend = make_backend(config, temperature=1.0)
        aux_models = make_aux_models(config, backend, {})
        publisher = Publisher(
            [replica],
            transport="disk",
            folder=folder / "weights",
            spool=folder,
            host="127.0.0.1",
            backend="gloo",
            device=torch.device("cpu"),
            bucket_bytes=1 << 20,
            push_s=20.0,
            canary_tolerance=1e-4,
            on_served=lambda _, version: mark_served(buffer, version),
        )
        loop = TrainingLoop(
            *(config.learner, backend, buffer, publisher, asyncio.Event(), folder / "checkpoints", CANARY),
            rows.append,
            config.agent.max_tokens,
            vocabulary_size(config.model.path),
            aux_models,
        )
        playing = asyncio.create_task(play(worker, metrics or {}))
        try:
            await asyncio.wait_for(loop.run(asyncio.Event(), lambda: None), SOON)
        finally:
            playing.cancel()
            await asyncio.wait({playing})
            publisher.close()
            aux_models.close()
            backend.close()
    return rows


async def play(worker: BufferClient, metrics: dict[str, float]) -> None:
    rng = np.random.default_rng(0)
    while True:
        lease = await worker.lease()
        for episode in map(lease.episode, lease.members):
            sent = msgspec.structs.replace(random_episode(rng, episode, lease.version), metrics=metrics)
            await worker.deliver(episode, {lease.version: sent.sampled}, FINISHED, (sent,))


def random_episode(rng: np.random.Generator, episode: str, version: int) -> Trajectory:
    plain = trajectory(episode, sampled=int(rng.integers(3, 12)), version=version)
    reward = float(rng.integers(-1, 2)) + 0.01 * plain.member
    logprobs = np.where(plain.loss_mask, -6.0 + 0.2 * rng.normal(size=len(plain.loss_mask)), 0.0)
    return msgspec.structs.replace(
        plain,
        token_ids=rng.integers(3, 500, len(plain.token_ids)).astype(np.int32),
        behavior_logprobs=logprobs.astype(np.float32),
        reward=reward,
        turn_rewards=(reward,),
    )
