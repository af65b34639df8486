"""While the critic warms up: real batches of a real buffer, a critic that learns from them, and a policy that nothing touches."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from slipstream.buffer.client import BufferClient
from slipstream.buffer.ledger_report import ledger_report
from slipstream.buffer.trajectory import FINISHED
from slipstream.configs import check, load
from slipstream.configs.algorithm import Algorithm, Gae
from slipstream.configs.backends import Fsdp2, Megatron
from slipstream.configs.schema import Buffer, Learner, Model, Optimizer
from slipstream.errors import ConfigError
from slipstream.learner.aux_models.aux_models import AuxModels
from slipstream.learner.aux_models.base import LocalTrainableModel
from slipstream.learner.aux_models.critic import Critic
from slipstream.learner.backend import Backend
from slipstream.learner.fsdp2.backend import Fsdp2Backend
from slipstream.learner.loop import TrainingLoop
from slipstream.learner.metrics import StepMetrics
from slipstream.tests.episodes import trajectory
from slipstream.tests.equality import VOCABULARY, make_model
from slipstream.tests.fleets import mark_served
from slipstream.tests.test_buffer_service import serving
from slipstream.weightsync.publisher import Publisher

WARMUP, STEPS, LR, SAMPLED = 3, 5, 1e-3, 5
TOKENS = 2 * 2 * SAMPLED  # of a batch
BUFFER = Buffer(max_staleness=0, groups_per_batch=2, group_size=2)
CONFIG = Learner(
    steps=STEPS,
    checkpoint_every=2,
    optimizer=Optimizer(lr=LR, weight_decay=0.1, clip_norm=1e9),
    algorithm=Algorithm(advantage=Gae(lr=3e-3, critic_warmup=WARMUP)),
)
Weights = dict[str, torch.Tensor]


class Recorded(msgspec.Struct):
    rows: list[StepMetrics] = []
    weights: dict[int, Weights] = {}  # by the version that was published
    steps: list[tuple[Any, ...]] = []  # arguments of each step of the policy


async def work(client: BufferClient) -> None:
    """Play episodes of arbitrary tokens: gradients of equal ones would cancel."""
    await client.register()
    while True:
        lease = await client.lease()
        for member in lease.members:
            episode, rng = lease.episode(member), np.random.default_rng([lease.group_id, member])
            played = msgspec.structs.replace(
                trajectory(episode, sampled=SAMPLED, version=lease.version),
                token_ids=rng.integers(0, VOCABULARY, SAMPLED + 1).astype(np.int32),
                behavior_logprobs=np.array([0.0] + [-4.5] * SAMPLED, dtype=np.float32),
            )
            await client.deliver(episode, {lease.version: SAMPLED}, FINISHED, (played,))


@contextlib.asynccontextmanager
async def publishing(folder: Path, client: BufferClient, recorded: Recorded):
    """A publisher to a fleet that serves everything at once."""
    publisher = Publisher(
        (),
        transport="disk",
        folder=folder / "weights",
        spool=folder,
        host="127.0.0.1",
        backend="gloo",
        device=torch.device("cpu"),
        bucket_bytes=1 << 20,
        push_s=60.0,
        canary_tolerance=1e-4,
    )
    publish = publisher.publish

    async def record(version, named_weights, *canary):
        weights = [(name, tensor.clone()) for name, tensor in named_weights]
        assert version not in recorded.weights, f"version {version} was published twice"
        recorded.weights[version] = dict(weights)
        report = await publish(version, weights, *canary)
        mark_served(client, version)
        return report

    publisher.publish = record  # type: ignore[method-assign]
    try:
        yield publisher
    finally:
        publisher.close()


async def train(folder: Path, address: str, policy: Backend, critic: Critic, steps: int = STEPS) -> Recorded:
    """`steps` of a real loop over a real buffer, one worker behind it."""
    recorded = Recorded()
    step = policy.step

    def counted(*arguments):
        recorded.steps.append(arguments)
        return step(*arguments)

    policy.step = counted  # type: ignore[method-assign]
    config = msgspec.structs.replace(CONFIG, steps=steps)
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        await enter(serving(folder / "buffer.sqlite", address, BUFFER))
        client, player = await enter(BufferClient(address, "learner-0")), await enter(BufferClient(address, "worker-0"))
        publisher = await enter(publishing(folder, client, recorded))
        working = asyncio.create_task(work(player))
        loop = TrainingLoop(
            config,
            policy,
            client,
            publisher,
            asyncio.Event(),
            folder / "checkpoints",
            (1, 2, 3),
            recorded.rows.append,
            64,
            VOCABULARY,
            AuxModels(config, trained=LocalTrainableModel(config, critic)),
        )
        try:
            async with asyncio.timeout(120):
                state = await loop.run(asyncio.Event(), lambda: None)
        finally:
            working.cancel()
            await asyncio.wait({working})
        assert state.step == steps
        await player.deregister()
    return recorded


def open_policy(kind: str, model: Model) -> Backend:
    if kind == "fsdp2":
        return Fsdp2Backend(model, CONFIG.optimizer, Fsdp2(device="cpu"), temperature=1.0, timeout_s=60)
    from slipstream.learner.megatron.backend import MegatronBackend

    return MegatronBackend(model, CONFIG.optimizer, Megatron(device="cpu"), temperature=1.0, timeout_s=60)


@pytest.mark.parametrize("kind", ["fsdp2", pytest.param("megatron", marks=pytest.mark.full)])
async def test_a_warm_up_leaves_no_trace_in_the_policy(tmp_path: Path, address: str, kind: str) -> None:
    model = Model(path=make_model(tmp_path / "model", tied=False))
    policy, clean = open_policy(kind, model), open_policy(kind, model)
    critic = Critic(model, CONFIG.optimizer, Fsdp2(device="cpu"), temperature=1.0, timeout_s=60)
    try:
        done = await train(tmp_path, address, policy, critic)
        clean.step(*done.steps[0])
        expected = dict(clean.named_weights())
    finally:
        critic.close()
        clean.close()
        policy.close()

    # No pass over the policy, no version, no push.
    assert len(done.steps) == STEPS - WARMUP
    assert sorted(done.weights) == [0, 1, 2]
    assert [(row.step, row.version) for row in done.rows] == [(1, 0), (2, 0), (3, 0), (4, 1), (5, 2)]
    # The first step is that of a policy that no warm-up came before.
    for name, tensor in expected.items():
        assert (tensor - done.weights[0][name]).abs().max() > LR / 10, name
        torch.testing.assert_close(done.weights[1][name], tensor, atol=LR / 1e4, rtol=0)
    # The critic learned, and what a step of the policy would have reported is not there.
    assert all(row.value_loss > 0 for row in done.rows)
    assert done.rows[WARMUP - 1].value_loss < done.rows[0].value_loss
    for row in done.rows[:WARMUP]:
        assert {row.loss, row.ess, row.kl, row.entropy, row.clip_fraction, row.grad_norm, row.mismatch_max} == {None}
        assert (row.lr, row.tokens_trained, row.tokens_withheld, row.staleness_tokens) == (0.0, 0, 0, {})
        assert (row.groups, row.episodes) == (2, 4)
    for row in done.rows[WARMUP:]:
        assert row.loss is not None
        assert (row.lr, row.staleness_max) == (LR, 0)
        assert row.tokens_trained == TOKENS  # none grew stale

    total = ledger_report(tmp_path / "buffer.sqlite").total
    assert total.balances
    assert (total.discarded, total.withheld) == ({"critic_warmup": WARMUP * TOKENS}, {})
    assert total.trained == (STEPS - WARMUP) * TOKENS


async def test_a_warm_up_that_was_interrupted_goes_on(tmp_path: Path, address: str) -> None:
    """From the last checkpoint, whose critic it continues, with other batches, and without another version."""
    model = Model(path=make_model(tmp_path / "model", tied=False))
    policy = Fsdp2Backend(model, CONFIG.optimizer, Fsdp2(device="cpu"), temperature=1.0, timeout_s=60)
    critic = Critic(model, CONFIG.optimizer, Fsdp2(device="cpu"), temperature=1.0, timeout_s=60)
    try:
        first = await train(tmp_path, address, policy, critic, steps=2)
        assert [row.version for row in first.rows] == [0, 0]
        second = await train(tmp_path, address, policy, critic)
    finally:
        critic.close()
        policy.close()
    assert [(row.step, row.version) for row in second.rows] == [(3, 0), (4, 1), (5, 2)]
    assert second.rows[0].value_loss < first.rows[0].value_loss
    assert all(torch.equal(first.weights[0][name], tensor) for name, tensor in second.weights[0].items())
    assert ledger_report(tmp_path / "buffer.sqlite").total.balances


def test_a_warm_up_that_leaves_no_step_for_the_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"critic_warmup=60 leaves none of learner.steps=60 .* allowed are 0 to 59"):
        check(load("vapo", ["learner.algorithm.advantage.critic_warmup=60"]))
