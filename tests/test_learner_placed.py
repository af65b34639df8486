"""Aux models in processes of their own: their outputs, steps and checkpoints equal those of local models."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
import torch
import zmq
import zmq.asyncio
from safetensors.torch import load_file
from slipstream.common.waits import current_waits
from slipstream.configs import load
from slipstream.configs.schema import Learner
from slipstream.errors import LearnerError, StateError, first_cause
from slipstream.launch.supervisor.factory import make_aux_models, make_backend, make_critic
from slipstream.learner.aux_models import remote as m
from slipstream.learner.aux_models.aux_models import TRAINED, AuxModels
from slipstream.learner.aux_models.remote import RemoteModel
from slipstream.learner.aux_models.service import AuxModelService
from slipstream.learner.backend import Backend, ShardedModel
from slipstream.learner.batch import TrainBatch, supervised
from slipstream.learner.checkpoint_folder import CheckpointState, path_of
from slipstream.rpc import security as curve
from slipstream.rpc import wire
from slipstream.rpc.security import PeerTable, make_pair
from slipstream.rpc.wire import RpcMessage, RpcRefusal
from slipstream.tests import placed
from slipstream.tests.columns import flat
from slipstream.tests.placed import GAE, GROUPS, PRIME, config_of
from slipstream.tests.ranks import run_on_two_ranks

LAYOUTS = {
    "gae, 1 learner rank": (GAE, 1, "{reference: 1, critic: 2}"),
    "gae, 2 learner ranks": (GAE, 2, "{reference: 2, critic: 1}"),
    "prime, 2 learner ranks": (PRIME, 2, "{reference: 1, critic: 2}"),
}
"""Algorithm, ranks of the learner, ranks of what is placed."""


class Trained(NamedTuple):
    found: dict[str, torch.Tensor]
    aux: list[float]
    checkpoints: Path


async def trained(job: placed.Job) -> Trained:
    """On one rank of the learner, this process."""
    config = load("quickstart", job.keys)
    policy = make_backend(config, temperature=1.0)
    aux_models = make_aux_models(config, policy, job.placed)
    found, aux = await placed.train(config, policy, aux_models, job.checkpoints)
    aux_models.close()
    policy.close()
    return Trained(found, list(msgspec.structs.astuple(aux)), job.checkpoints)


@pytest.fixture(scope="module")
def results(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    """What came of every layout, and of `GAE` and `PRIME` where nothing is placed."""
    root, results = tmp_path_factory.mktemp("placed"), dict[str, Trained]()
    for name, keys in (("gae", GAE), ("prime", PRIME)):
        results[name] = asyncio.run(trained(placed.Job(placed.keys_of(folders[0], *keys), {}, str(root / name))))
    for ranks in (1, 2):
        with contextlib.ExitStack() as stack:
            jobs = dict[str, placed.Job]()
            for name, (keys, _, aux) in ((n, layout) for n, layout in LAYOUTS.items() if layout[1] == ranks):
                keys = placed.keys_of(folders[0], *keys, f"learner.aux_models={aux}")
                addresses = stack.enter_context(placed.placed(load("quickstart", keys), root / name))
                jobs[name] = placed.Job(keys, addresses, str(root / f"{name}.safetensors"))
            if ranks == 1:
                results |= {name: asyncio.run(trained(job)) for name, job in jobs.items()}
                continue
            run_on_two_ranks(root, placed.__file__, list(jobs.values()))
            for name, job in jobs.items():
                found = load_file(job.out)
                results[name] = Trained(found, found.pop("aux").tolist(), job.checkpoints)
    return results


@pytest.mark.parametrize("layout", LAYOUTS)
def test_placed_models_say_and_learn_what_held_ones_do(layout: str, results: dict[str, Trained]) -> None:
    found, held = results[layout], results[layout.partition(",")[0]]
    assert found.found.keys() == held.found.keys()
    assert {name.split()[0] for name in found.found} >= {"reference", "values"}
    for name, tensor in held.found.items():
        torch.testing.assert_close(found.found[name], tensor, atol=1e-6 if name.endswith("weight") else 1e-5, rtol=0)
    assert found.aux == pytest.approx(held.aux, rel=1e-3)
    assert any(abs(value) > 1e-3 for value in held.aux)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_of_a_placed_model_is_one_of_a_held_model(
    layout: str, results: dict[str, Trained], folders: list[Path]
) -> None:
    """Of the weights after the second step, though the third was asked for before it was whole."""
    kind = layout.partition(",")[0]
    config = config_of(folders[0], *LAYOUTS[layout][0])
    model = make_critic(config)
    weights = []
    for name in (kind, layout):
        assert model.load(path_of(results[name].checkpoints / TRAINED, 2)) == CheckpointState(step=2, version=2)
        weights.append({name: tensor.clone() for name, tensor in model.named_weights()})
    other = make_critic(config)
    begun = dict(other.named_weights())
    other.close()
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, atol=1e-6, rtol=0)
    assert any((tensor - begun[name]).abs().max() > 1e-5 for name, tensor in weights[0].items())
    model.close()


# ---------------------------------------------------------------- one rank and its learner, in this process

SEQUENCES = supervised([(t.token_ids, t.loss_mask) for group in GROUPS for t in group])
RETURNS = msgspec.structs.replace(SEQUENCES, returns=np.ones(len(SEQUENCES.token_ids), dtype=np.float32))


@pytest.fixture
def critic(folders: list[Path]) -> Iterator[Backend]:
    model = make_critic(config_of(folders[0], *GAE))
    yield model
    model.close()


@contextlib.asynccontextmanager
async def serving(
    config: Learner, address: str, model: ShardedModel, trained: Backend | None, peers: PeerTable | None = None
) -> AsyncIterator[tuple[RemoteModel, asyncio.Task[None]]]:
    """A rank that serves, and the learner's end."""
    ready = asyncio.Event()
    serving = AuxModelService(config, "critic-0", address, [model], trained, peers)
    service = asyncio.create_task(serving.serve(ready.set))
    await asyncio.wait_for(ready.wait(), 30)
    placed = RemoteModel(config, "critic", (address if peers is None else f"{address}#",))
    try:
        yield placed, service
    finally:
        placed.close()
        service.cancel()
        assert (await asyncio.wait({service}, timeout=30))[0], "the rank goes on"


async def test_nonsense_and_strangers_change_nothing(
    critic: Backend,
    folders: list[Path],
    address: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config, own, worker = config_of(folders[0], *GAE).learner, curve.write_pair(tmp_path), make_pair()
    monkeypatch.setenv(curve.VARIABLE, str(tmp_path))  # the learner and the service are this process
    peers = PeerTable({"learner-0": own.public, "worker-0": worker.public})
    context = zmq.asyncio.Context()
    async with serving(config, address, critic, critic, peers) as (model, _):
        model.clients[0].trust(own.public)
        stranger, member, other = (context.socket(zmq.DEALER) for _ in range(3))
        curve.configure_client(member, own.public, None)
        curve.configure_client(other, own.public, worker)
        other.connect(address)
        await asyncio.wait_for(other.send_multipart(wire.encode(RpcMessage(1, m.LoadAuxModel("/nowhere")))), 30)
        kind = list[RpcMessage[m.Reply | RpcRefusal]]
        (refusal,) = wire.decode(kind, await asyncio.wait_for(other.recv_multipart(), 30))
        assert refusal.message == RpcRefusal("worker-0 has no right to LoadAuxModel")
        for socket in (stranger, member):
            socket.connect(address)
        good = wire.encode(RpcMessage(1, m.ComputeOutputs(m.pack(SEQUENCES))))
        await asyncio.wait_for(stranger.send_multipart(good), 30)
        for bad in ([b"nonsense"], [*good, b"more"], wire.encode(RpcMessage(1, m.AuxModelDone()))):
            await asyncio.wait_for(member.send_multipart(bad), 30)
        outputs = await model.score(RETURNS)()
        assert len(outputs) == len(SEQUENCES.token_ids)
        await asyncio.wait_for(member.send_multipart(good), 30)
        replies = [wire.decode(kind, await asyncio.wait_for(member.recv_multipart(), 30))[0].message for _ in range(3)]
        assert [type(reply) for reply in replies] == [RpcRefusal, RpcRefusal, m.RankOutputs]  # those with a number
        assert await stranger.poll(300) == 0
        await model.learn([RETURNS])()
        assert (await model.score(RETURNS)()).any()
        (wait,) = [wait for wait in current_waits() if wait.who == "critic-0"]
        assert (wait.waits_for, wait.deadline_s) == ("the learner's next request", None)
    context.destroy(linger=0)
    assert caplog.text.count("that is no request") == 2  # logged at 1 and 2, not at 3


async def test_what_a_rank_cannot_do_ends_it_by_its_name(critic: Backend, folders: list[Path], address: str) -> None:
    config = config_of(folders[0], *GAE).learner
    for trained, sequences, error, why in (
        (critic, SEQUENCES, LearnerError, "these rows lack returns"),
        (None, RETURNS, StateError, "critic-0 is never trained, and was asked to TrainAuxModel"),
    ):
        async with serving(config, address, critic, trained) as (model, service):
            model.learn([sequences])
            await asyncio.wait({service}, timeout=30)
            with pytest.raises(error, match=why):
                raise first_cause(service.exception() or AssertionError("it goes on"))


async def test_a_checkpoint_that_cannot_be_written_ends_the_rank_and_may_be_tried_again(
    critic: Backend, folders: list[Path], address: str, tmp_path: Path
) -> None:
    config = config_of(folders[0], *GAE).learner
    (tmp_path / "file").touch()
    async with serving(config, address, critic, critic) as (model, service):
        model.save(tmp_path / "file" / "step-1", CheckpointState(step=1, version=1))
        await asyncio.wait({service}, timeout=30)
        with pytest.raises(LearnerError, match="step-1 could not be written") as error:
            raise first_cause(service.exception() or AssertionError("it goes on"))
        assert not error.value.final


async def test_a_model_that_does_not_answer_is_named(address: str, folders: list[Path]) -> None:
    model = RemoteModel(config_of(folders[0], *GAE, "learner.batch_s=0.3").learner, "critic", (address,))
    message = r"the learner waited 0.3 s for the critic's answer to ComputeOutputs; critic-0 did not answer; see logs/critic-\*.log"
    with pytest.raises(LearnerError, match=message) as error:
        await model.score(SEQUENCES)()
    assert not error.value.final  # all may meet again
    model.close()


async def test_all_that_are_placed_are_asked_before_anybody_is_waited_for(folders: list[Path]) -> None:
    """Steps are asked for at once, too: the policy takes its own meanwhile."""
    context = zmq.asyncio.Context()
    ends = {kind: context.socket(zmq.ROUTER) for kind in ("reference", "critic")}
    ports = {kind: end.bind_to_random_port("tcp://127.0.0.1") for kind, end in ends.items()}
    config = config_of(folders[0], *PRIME).learner
    aux_models = AuxModels(
        config, *(RemoteModel(config, kind, (f"tcp://127.0.0.1:{port}",)) for kind, port in ports.items())
    )

    async def received(kind: str) -> m.Request:
        _, *frames = await asyncio.wait_for(ends[kind].recv_multipart(), 30)
        return wire.decode(RpcMessage[m.Request], frames).message

    scoring = asyncio.create_task(aux_models.score(flat(GROUPS)))
    for kind in ends:
        assert isinstance(await received(kind), m.ComputeOutputs)
    aux_models.learn(RETURNS)
    learn = await received("critic")
    assert isinstance(learn, m.TrainAuxModel)
    assert len(learn.parts) == config.algorithm.minibatches
    assert not scoring.done()
    scoring.cancel()
    aux_models.close()
    context.destroy(linger=0)


def test_what_is_packed_comes_out_as_it_was() -> None:
    rng = np.random.default_rng(0)
    columns = {"reference_logprobs": rng.random(len(RETURNS.token_ids), dtype=np.float32)}
    whole = msgspec.structs.replace(RETURNS, positive=np.arange(len(RETURNS)) % 2 == 0, **columns)
    for sequences in (SEQUENCES, RETURNS, whole):
        (found,) = wire.decode(m.TrainAuxModel, wire.encode(m.TrainAuxModel((m.pack(sequences),)))).parts
        for name in TrainBatch.__struct_fields__:
            assert np.array_equal(getattr(m.unpack(found), name), getattr(sequences, name)), name
