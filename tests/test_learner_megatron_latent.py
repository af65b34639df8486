"""DeepSeek-V3's latent attention and experts in Megatron's models, against transformers and a plain loop, in every layout.

Two ranks are two processes running this file as a script on the loopback; they are started once and do all jobs in turn.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from slipstream.configs.backends import REPLAY, Fsdp2, Megatron
from slipstream.configs.schema import Model
from slipstream.learner.fsdp2.backend import Fsdp2Backend
from slipstream.learner.packing import MicroBatch, scoring_microbatch
from slipstream.tests.equality import (
    OPTIMIZER,
    TEMPERATURE,
    VOCABULARY,
    assert_three_steps,
    make_batch,
    plain_loop,
)
from slipstream.tests.ranks import run_on_two_ranks
from slipstream.tests.test_learner_families import EXPERTS, LATENT, write
from slipstream.tests.test_learner_megatron import YARN, Job, open_backend, run
from transformers import AutoModelForCausalLM

DEADLINE_S = 200
BIAS = "e_score_correction_bias"
SIZES = (
    EXPERTS | LATENT | {"vocab_size": VOCABULARY, "hidden_size": 64, "initializer_range": 0.08, "pad_token_id": None}
)
MODELS: dict[str, dict[str, Any]] = {
    "routed": SIZES | {"rope_parameters": YARN, "v_head_dim": 12},
    "dense": SIZES | {"q_lora_rank": None, "first_k_dense_replace": 2, "tie_word_embeddings": True},
    "deep": SIZES | {"num_hidden_layers": 4, "n_group": 1, "moe_intermediate_size": 8, "n_shared_experts": 2},
}
TWO: dict[str, tuple[str, Megatron]] = {
    "tensor": ("dense", Megatron(ranks=2, parallel={"tensor": 2})),
    "tensor-experts": ("routed", Megatron(ranks=2, parallel={"tensor": 2, "expert": 2})),
    "pipeline": ("routed", Megatron(ranks=2, parallel={"pipeline": 2})),
    "virtual": ("deep", Megatron(ranks=2, parallel={"pipeline": 2, "virtual": 2}, options=("recompute",))),
    "context": ("routed", Megatron(ranks=2, parallel={"context": 2})),
    "data-experts": ("routed", Megatron(ranks=2, parallel={"expert": 2})),
    "lora": ("routed", Megatron(ranks=2, parallel={"tensor": 2, "expert": 2}, lora_rank=4)),
}


def rank_main(jobs: list[Job]) -> None:
    """What each of the two ranks runs."""
    for index, job in enumerate(jobs):
        os.environ["MASTER_PORT"] = os.environ["PORTS"].split(",")[index]
        backend = open_backend(job.model, TWO[job.layout][1])
        run(job, backend)
        backend.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {name: write(root / name, "deepseek_v3", sizes) for name, sizes in MODELS.items()}


@pytest.mark.parametrize("name", ["routed", pytest.param("dense", marks=pytest.mark.full)])
def test_log_probs_are_transformers_and_weights_the_files(models: dict[str, str], name: str) -> None:
    backend = open_backend(models[name])
    source = load_file(Path(models[name]) / "model.safetensors")
    weights = {name: tensor.cpu() for name, tensor in backend.named_weights()}
    sequences = [one.token_ids.tolist() for one in make_batch(0)[0]]
    (found,) = backend.logprobs([scoring_microbatch(sequences)])
    backend.close()
    assert weights.keys() == source.keys()
    assert any(BIAS in key for key in weights) == (name != "dense")
    assert all(torch.equal(weights[key], tensor) for key, tensor in source.items())
    model = AutoModelForCausalLM.from_pretrained(models[name], dtype=torch.float32)
    for part, ids in zip(found.split([len(ids) for ids in sequences]), sequences, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1]
        wanted = (logits / TEMPERATURE).log_softmax(-1)[range(len(ids) - 1), ids[1:]]
        torch.testing.assert_close(part[1:], wanted, atol=5e-6, rtol=0)


@pytest.mark.full
def test_three_steps_equal_a_plain_loop_and_leave_the_balance(models: dict[str, str], tmp_path: Path) -> None:
    backend = open_backend(models["routed"])
    run(Job("one", models["routed"], str(tmp_path / "out")), backend)
    backend.export(tmp_path / "export")
    backend.close()
    found = balanced(tmp_path / "out", models["routed"])
    assert_three_steps(found, plain_loop(models["routed"]))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    assert type(exported).__name__ == "DeepseekV3ForCausalLM"
    assert torch.equal(exported.model.embed_tokens.weight, found["model.embed_tokens.weight"])


def balanced(out: Path, model: str) -> dict[str, torch.Tensor]:
    """What `run` wrote, without the routers' biases, which have to be those of the files."""
    weights, source = load_file(out), load_file(Path(model) / "model.safetensors")
    biases = {name: weights.pop(name) for name in list(weights) if name.endswith(BIAS)}
    assert biases.keys() == {name for name in source if name.endswith(BIAS)}
    assert all(torch.equal(source[name], bias) for name, bias in biases.items())
    return weights


@pytest.mark.full
def test_recorded_experts_are_replayed_as_by_fsdp2(models: dict[str, str]) -> None:
    """`deep` has layers without a router before its routers."""
    ids, options = list(range(3, 40)), (REPLAY,)
    chosen = torch.stack([torch.randperm(4, generator=torch.Generator().manual_seed(i))[:2] for i in range(37 * 3)])
    row: MicroBatch = msgspec.structs.replace(scoring_microbatch([ids]), experts=chosen.view(37, 3, 2).to(torch.uint8))
    ours = open_backend(models["deep"], Megatron(options=options))
    (free,), (found,) = ours.logprobs([scoring_microbatch([ids])]), ours.logprobs([row])
    ours.close()
    held = Fsdp2(options=options)
    theirs = Fsdp2Backend(Model(path=models["deep"]), OPTIMIZER, held, temperature=TEMPERATURE, timeout_s=DEADLINE_S)
    (wanted,) = theirs.logprobs([row])
    theirs.close()
    torch.testing.assert_close(found, wanted, atol=5e-6, rtol=0)
    assert (found - free).abs().max() > 1e-3


# ---------------------------------------------------------------- two ranks


@pytest.fixture(scope="module")
def results(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("results")
    jobs = [
        Job(name, models[kind], str(root / name), save=str(root / f"from-{name}")) for name, (kind, _) in TWO.items()
    ]
    run_on_two_ranks(root, __file__, jobs)
    for name in ("tensor-experts", "virtual"):
        model = models[TWO[name][0]]
        backend = open_backend(model)
        run(Job("one", model, str(root / f"{name} on one"), first=2, load=str(root / f"from-{name}")), backend)
        backend.close()
    return root


@pytest.fixture(scope="module")
def expected(models: dict[str, str]) -> dict[str, dict[str, torch.Tensor]]:
    return {name: plain_loop(path) for name, path in models.items()}


@pytest.mark.full
@pytest.mark.parametrize("name", TWO)
def test_three_steps_on_two_ranks_equal_a_plain_loop(
    results: Path, models: dict[str, str], expected: dict[str, dict[str, torch.Tensor]], name: str
) -> None:
    kind, layout = TWO[name]
    wanted = plain_loop(models[kind], lora_rank=layout.lora_rank) if layout.lora_rank else expected[kind]
    assert_three_steps(balanced(results / name, models[kind]), wanted)


@pytest.mark.full
@pytest.mark.parametrize("name", ["tensor-experts", "virtual"])
def test_a_checkpoint_resumes_on_one_rank(
    results: Path, models: dict[str, str], expected: dict[str, dict[str, torch.Tensor]], name: str
) -> None:
    kind = TWO[name][0]
    assert_three_steps(balanced(results / f"{name} on one", models[kind]), expected[kind], first=2)


if __name__ == "__main__":
    rank_main(msgspec.json.decode(sys.argv[1], type=list[Job]))
