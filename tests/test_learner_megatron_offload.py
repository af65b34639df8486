"""Megatron's optimizer in the host's memory: its step is torch's AdamW, and its checkpoints are those without the option, bit for
bit.

`test_learner_megatron.py` and `test_learner_megatron_lora.py` have it among the layouts of two ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from slipstream.configs.backends import Megatron
from slipstream.learner.checkpoint_folder import CheckpointState
from slipstream.learner.megatron import offload
from slipstream.learner.megatron.backend import MegatronBackend
from slipstream.learner.megatron.offload import HostAdamW
from slipstream.tests.equality import LOSS, OPTIMIZER, make_model, make_rows
from slipstream.tests.test_learner_megatron import DEADLINE_S, open_backend

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
NOISE = 1e-3 if torch.cuda.is_available() else 0.0
"""Of a loss or a norm that is computed twice from the same weights: on a GPU sums have no order."""

STEP_NOISE = 0.05 if torch.cuda.is_available() else 1e-3
"""Share of a step by which two may differ that begin with the same weights, moments and count. A count of 3 in place of 4 makes a
step 0.1 larger."""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_step_is_that_of_torchs_adamw_in_float32(monkeypatch, dtype, device):
    """Bit for bit, piece by piece, with groups of their own rates, one of them empty; each weight is its master's rounding."""
    monkeypatch.setattr(offload, "PIECE", 64)
    generator = torch.Generator().manual_seed(0)
    masters = [torch.randn(size, generator=generator) for size in (300, 64, 1)]
    shards: list[Any] = [torch.zeros_like(master, dtype=dtype, device=device) for master in masters]
    rates = {"lr": 0.0, "betas": OPTIMIZER.betas, "eps": 1e-8}
    members, decays = (slice(2), slice(0), slice(2, 3)), (0.1, 0.1, 0.0)
    groups = [{**rates, "params": shards[some], "weight_decay": of} for some, of in zip(members, decays, strict=True)]
    ours = HostAdamW(groups)
    plain = torch.optim.AdamW(
        [{**rates, "params": masters[some], "weight_decay": of} for some, of in zip(members, decays, strict=True)],
        fused=True,
    )
    for shard, master in zip(shards, masters, strict=True):
        ours.set_scaled_state(shard, "master_param", master)
    for lr in (1e-2, 3e-3, 1e-2):
        for group in (*ours.param_groups, *plain.param_groups):
            group["lr"] = lr
        for shard, master in zip(shards, masters, strict=True):
            master.grad = torch.randn(len(master), generator=generator)
            shard.decoupled_grad = master.grad.to(device)
        ours.step()
        plain.step()
    for shard, master in zip(shards, masters, strict=True):
        held = ours.state[shard]
        assert {tensor.device.type for tensor in held.values()} == {"cpu"}
        assert torch.equal(held["master_param"], master)
        assert torch.equal(shard.cpu(), master.to(dtype))
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(held[name], plain.state[master][name])


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return make_model(tmp_path_factory.mktemp("model"), tied=True)


def optimizer_of(backend: MegatronBackend) -> list[torch.Tensor]:
    """Copies of master weights and moments of every trained parameter, in one order, and the count of steps."""
    (one,) = backend._optimizer.chained_optimizers
    held = [one._get_main_param_and_optimizer_states(p) for p in one.model_param_group_index_map]
    tensors = [states[name].detach().cpu().clone() for states in held for name in ("param", "exp_avg", "exp_avg_sq")]
    return [
        *tensors,
        torch.tensor(float(one.state_dict()["optimizer"]["param_groups"][0].get("step", 0))),
    ]  # none before the first


def step(backend: MegatronBackend, number: int) -> tuple[float, float]:
    result = backend.step(make_rows(number, 0, 1, 8192), LOSS, OPTIMIZER.lr)
    return result.loss, result.grad_norm


def distance(one: list[torch.Tensor], other: list[torch.Tensor], before: list[torch.Tensor]) -> float:
    """How far two optimizers are from each other after a step, as a share of the step that they took from `before`: of the master
    weights, which the bias corrections scale. Their counts of steps must be equal."""
    assert torch.equal(one[-1], other[-1])

    def moved(since: list[torch.Tensor]) -> float:
        masters = zip(one[:-1:3], since[:-1:3], strict=True)
        return sum(float((now - then).abs().sum()) for now, then in masters)

    return moved(other) / moved(before)


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


@pytest.mark.parametrize(
    ("dtype", "lora_rank"),
    [("bfloat16", 0), pytest.param("float32", 0, marks=pytest.mark.full), ("bfloat16", 4)],
    ids=["bfloat16", "float32", "lora"],
)
def test_a_checkpoint_resumes_with_it_and_without_it_bit_for_bit(model, tmp_path: Path, dtype: str, lora_rank: int):
    """Two steps with it, one without it, and back; losses and norms on the way are those without it."""
    plain = open_backend(model, Megatron(lora_rank=lora_rank), dtype)
    hosted = open_backend(model, Megatron(options=("offload",), lora_rank=lora_rank), dtype)
    assert same(optimizer_of(hosted), optimizer_of(plain))  # master weights as they were read, unrounded
    for number in range(2):
        numbers = step(hosted, number), step(plain, number)
        torch.testing.assert_close(
            *numbers, atol=0, rtol=NOISE if number == 0 else 1e-5 if dtype == "float32" else 1e-2
        )
    for one, other in zip(optimizer_of(hosted), optimizer_of(plain), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6 if dtype == "float32" else 4 * OPTIMIZER.lr, rtol=0.1)
    for number, writer, reader in ((2, hosted, plain), (3, plain, hosted)):
        state = CheckpointState(step=number, version=number)
        writer.save(tmp_path / f"from-{number}", state).result(DEADLINE_S)
        assert reader.load(tmp_path / f"from-{number}") == state
        assert same(optimizer_of(reader), optimizer_of(writer))
        pushed = dict(writer.named_weights())
        assert all(torch.equal(pushed[name], tensor) for name, tensor in reader.named_weights())
        before = optimizer_of(reader)
        torch.testing.assert_close(step(reader, number), step(writer, number), atol=0, rtol=NOISE)
        assert distance(optimizer_of(reader), optimizer_of(writer), before) < STEP_NOISE
    hosted.close()
    plain.close()


@ON_GPU
def test_what_is_offloaded_leaves_the_gpu(model):
    def held_after_a_step(options: tuple[str, ...]) -> tuple[int, int]:
        """Bytes on the GPU between two steps, and the model's parameters."""
        before = torch.cuda.memory_allocated()
        backend = open_backend(model, Megatron(options=options), "bfloat16")
        step(backend, 0)
        size, count = torch.cuda.memory_allocated() - before, sum(p.numel() for p in backend._parts[0].parameters())
        backend.close()
        return size, count

    (whole, count), (offloaded, _) = held_after_a_step(()), held_after_a_step(("offload",))
    assert whole - offloaded > 0.9 * 12 * count
