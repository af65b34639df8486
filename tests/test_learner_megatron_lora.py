"""Adapters in Megatron's models against peft's own wrapper in a plain loop, in every layout, and against FSDP2's adapters.

Two ranks are two processes running this file as a script on the loopback; they are started once and do all jobs in turn.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from slipstream.configs.backends import Fsdp2, Megatron
from slipstream.configs.schema import Model
from slipstream.errors import LearnerError
from slipstream.learner.backend import Backend
from slipstream.learner.checkpoint_folder import CheckpointState
from slipstream.learner.fsdp2.backend import Fsdp2Backend
from slipstream.learner.megatron.backend import MegatronModel
from slipstream.learner.packing import scoring_microbatch
from slipstream.tests.equality import (
    LOSS,
    OPTIMIZER,
    STEPS,
    TEMPERATURE,
    assert_three_steps,
    make_model,
    make_rows,
    plain_loop,
)
from slipstream.tests.ranks import run_on_two_ranks
from slipstream.tests.test_learner_families import TRAINED, write
from slipstream.tests.test_learner_megatron import Job, open_backend, run
from slipstream.weightsync.weight_check import check_adapters, checkpoint_shapes
from transformers import AutoModelForCausalLM

DEADLINE_S = 200
RANK = 4

ONE = Megatron(lora_rank=RANK)
TWO = {
    "tensor": {"tensor": 2},
    "virtual": {"pipeline": 2, "virtual": 2},
    "context": {"context": 2},
    "data": {},
    "experts": {"tensor": 2, "expert": 2},
    "offloaded": {},
}
KIND = {"virtual": "deep", "experts": "moe"}
OPTIONS = {"virtual": ("recompute",), "experts": ("recompute",), "offloaded": ("offload",)}


def two(layout: str) -> Megatron:
    return Megatron(ranks=2, parallel=TWO[layout], options=OPTIONS.get(layout, ()), lora_rank=RANK)


def rank_main(jobs: list[Job], export: str) -> None:
    """What each of the two ranks runs."""
    for index, job in enumerate(jobs):
        os.environ["MASTER_PORT"] = os.environ["PORTS"].split(",")[index]
        backend = open_backend(job.model, two(job.layout), job.dtype)
        run(job, backend)
        if index == 0:
            backend.export(Path(export))
        backend.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return make_model(tmp_path_factory.mktemp("models") / "tied", tied=True)


@pytest.fixture(scope="module")
def expected(model) -> dict[str, torch.Tensor]:
    return plain_loop(model, lora_rank=RANK)


def test_three_steps_equal_a_plain_loop_and_fsdp2s(model, expected, tmp_path):
    ours = open_backend(model, ONE)
    theirs = fsdp2(model)
    begun, wanted = pushed(ours), pushed(theirs)
    assert begun.keys() == wanted.keys()
    assert all(torch.equal(begun[name], factor) for name, factor in wanted.items())
    run(Job("one", model, str(tmp_path / "out")), ours)
    for step in range(STEPS):
        theirs.step(make_rows(step, 0, 1, 34), LOSS, OPTIMIZER.lr)
    learned, wanted = pushed(ours), pushed(theirs)
    theirs.close()
    ours.close()
    assert_three_steps(load_file(tmp_path / "out"), expected)
    for name, factor in wanted.items():
        assert not torch.equal(begun[name], factor)
        torch.testing.assert_close(learned[name], factor, atol=8e-6, rtol=0)  # B has its scale of 8


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_routers_and_routed_experts_have_none_and_servers_know_every_other(tmp_path, family):
    model = write(tmp_path / family, family, TRAINED[family])
    found = []
    for opened in (lambda: open_backend(model, ONE), lambda: fsdp2(model)):
        backend = opened()
        found.append({name: tuple(factor.shape) for name, factor in backend.named_weights()})
        backend.close()
    known = checkpoint_shapes(model)
    assert known is not None
    check_adapters(found[0], known)
    assert found[0] == found[1]
    assert {name.split(".")[4] for name in found[0] if ".mlp." in name} <= {
        "gate_proj",
        "up_proj",
        "down_proj",
        "shared_experts",
    }


def fsdp2(model: str) -> Fsdp2Backend:
    config = Fsdp2(lora_rank=RANK)
    return Fsdp2Backend(Model(path=model), OPTIMIZER, config, temperature=TEMPERATURE, timeout_s=DEADLINE_S)


def pushed(backend: Backend) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in backend.named_weights()}


@pytest.mark.full
def test_the_reference_is_the_policy_without_its_adapters(model):
    """Whatever they have learned, bit for bit what a frozen copy of the model says; and they go on learning."""
    policy = open_backend(model, ONE)
    reference = policy.without_adapters()
    assert reference is not None
    frozen = MegatronModel(Model(path=model), Megatron(), temperature=TEMPERATURE, timeout_s=DEADLINE_S)
    rows = [scoring_microbatch([[7, 8, 9, 1, 2], [3, 40]])]
    (truth,) = frozen.logprobs(rows)
    for _ in range(2):
        assert policy.step(make_rows(0, 0, 1, 34), LOSS, 1e-2).grad_norm > 0
        assert torch.equal(reference.logprobs(rows)[0], truth)
        assert not torch.equal(policy.logprobs(rows)[0], truth)
    frozen.close()
    policy.close()


@pytest.mark.full
@pytest.mark.parametrize(
    ("saved", "loaded", "why"),
    [
        (0, RANK, r"holds all weights, and adapters of rank 4 .*lora_rank=0"),
        (RANK, 0, r"holds adapters of rank 4, and all weights .*lora_rank=4"),
        (8, RANK, r"holds adapters of rank 8, and adapters of rank 4 .*lora_rank=8"),
    ],
)
def test_checkpoints_of_adapters_and_of_all_weights_are_distinguished(model, tmp_path, saved, loaded, why):
    backend = open_backend(model, msgspec.structs.replace(ONE, lora_rank=saved))
    backend.save(tmp_path / "saved", CheckpointState(step=1, version=1)).result(DEADLINE_S)
    backend.close()
    backend = open_backend(model, msgspec.structs.replace(ONE, lora_rank=loaded))
    with pytest.raises(LearnerError, match=why):
        backend.load(tmp_path / "saved")
    backend.close()


# ---------------------------------------------------------------- two ranks


@pytest.fixture(scope="module")
def models(model, tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {
        "tied": model,
        "deep": make_model(root / "deep", tied=True, layers=4),
        "moe": make_model(root / "moe", tied=False, moe=True),
    }


@pytest.fixture(scope="module")
def results(models, tmp_path_factory) -> Path:
    """Runs every job; weights lie in the folder by name."""
    root = tmp_path_factory.mktemp("results")

    def of(layout: str) -> str:
        return models[KIND.get(layout, "tied")]

    def alone(kind: str, name: str, **options: object) -> None:
        backend = open_backend(models[kind], ONE)
        run(Job("one", models[kind], str(root / name), **options), backend)
        backend.close()

    alone("tied", "one", save=str(root / "from-one"))
    jobs = [
        *(Job(layout, of(layout), str(root / layout), save=str(root / f"from-{layout}")) for layout in TWO),
        Job("tensor", of("tensor"), str(root / "one-tensor"), first=2, load=str(root / "from-one")),
        Job("tensor", of("tensor"), str(root / "bfloat16"), dtype="bfloat16"),
    ]
    run_on_two_ranks(root, __file__, jobs, str(root / "export"))
    for layout in ("tensor", "virtual", "experts", "offloaded"):
        alone(KIND.get(layout, "tied"), f"{layout}-one", first=2, load=str(root / f"from-{layout}"))
    return root


@pytest.fixture(scope="module")
def truths(models, expected) -> dict[str, dict[str, torch.Tensor]]:
    return {"tied": expected} | {kind: plain_loop(models[kind], lora_rank=RANK) for kind in ("deep", "moe")}


@pytest.mark.full
@pytest.mark.parametrize("layout", TWO)
def test_three_steps_on_two_ranks_equal_a_plain_loop(results, truths, layout):
    assert_three_steps(load_file(results / layout), truths[KIND.get(layout, "tied")])


@pytest.mark.full
@pytest.mark.parametrize("name", ["one-tensor", "tensor-one", "virtual-one", "experts-one", "offloaded-one"])
def test_a_checkpoint_resumes_in_another_layout(results, truths, name):
    assert_three_steps(load_file(results / name), truths[KIND.get(name.split("-")[0], "tied")], first=2)


@pytest.mark.full
def test_an_export_is_the_merged_model(results, truths):
    model = AutoModelForCausalLM.from_pretrained(results / "export", dtype=torch.float32)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), truths["tied"][name], atol=1e-6, rtol=0)


@pytest.mark.full
def test_bfloat16_differs_by_its_noise(results, truths):
    weights = load_file(results / "bfloat16")
    torch.testing.assert_close(weights["numbers"][0], truths["tied"]["numbers"][0], atol=0.0, rtol=0.1)
    assert {weights[name].dtype for name in truths["tied"].keys() - {"numbers"}} == {torch.bfloat16}


if __name__ == "__main__":
    rank_main(msgspec.json.decode(sys.argv[1], type=list[Job]), sys.argv[2])
