"""Every way to hold the model with FSDP2, on one rank and two, against a plain transformers or peft loop; checkpoints across them.

Two ranks run this file as a script, see tests/ranks.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from slipstream.configs.backends import Fsdp2
from slipstream.errors import ConfigError, LearnerError
from slipstream.learner.checkpoint_folder import CheckpointState
from slipstream.tests.equality import LOSS, assert_bfloat16_noise, assert_three_steps, make_model, make_rows, plain_loop
from slipstream.tests.ranks import (
    DEADLINE_S,
    Job,
    jobs_of,
    open_backend,
    run_in_turn,
    run_on_one_rank,
    run_on_two_ranks,
)
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
)

RECOMPUTE = Fsdp2(device="cpu", options=("recompute",))
SHARED = Fsdp2(device="cpu", parallel={"context": 2})
SHARED_RECOMPUTE = Fsdp2(device="cpu", parallel={"context": 2}, options=("recompute",))
LORA = Fsdp2(device="cpu", lora_rank=4)
DIVIDED = Fsdp2(device="cpu", parallel={"expert": 2})
SHARED_LORA = Fsdp2(device="cpu", parallel={"context": 2}, lora_rank=4, options=("recompute",))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return make_model(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture(scope="module")
def models(model, tmp_path_factory) -> dict[str, str]:
    """Models by the first word of what is expected of them; those of other words are `model`."""
    root = tmp_path_factory.mktemp("models")
    sizes: dict[str, Any] = json.loads((Path(model) / "config.json").read_text())
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    kept += ("num_key_value_heads", "max_position_embeddings", "initializer_range")
    sizes = {name: sizes[name] for name in kept} | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    sizes |= {"sliding_window": 8}
    made: dict[str, PreTrainedModel] = {
        "capped": Gemma2ForCausalLM(Gemma2Config(**sizes, query_pre_attn_scalar=16, attn_logit_softcapping=1.0)),
        "sinks": GptOssForCausalLM(GptOssConfig(**sizes, num_local_experts=4, num_experts_per_tok=2)),
    }
    for name, one in made.items():
        one.float().save_pretrained(root / name)
    return {name: str(root / name) for name in made}


@pytest.fixture(scope="module")
def expected(model, models) -> dict[str, dict[str, torch.Tensor]]:
    return {
        **{name: plain_loop(folder, attention="eager") for name, folder in models.items()},
        "whole": plain_loop(model),
        "sequences": plain_loop(model, sequence_mean=True),
        "lora": plain_loop(model, lora_rank=4),
        "bf16": plain_loop(model, dtype=torch.bfloat16),
    }


@pytest.fixture(scope="module")
def results(model, models, tmp_path_factory) -> Path:
    """Runs every job; weights lie in the folder by name."""
    root = tmp_path_factory.mktemp("results")

    def job(name: str, config: Fsdp2, budget: int = 34, **options) -> Job:
        paths = {key: str(root / value) for key, value in options.items() if key in ("save", "load")}
        return Job(models.get(name.split()[1], model), budget, str(root / name), config, **(options | paths))

    run_on_one_rank(
        [
            job("1 whole recomputed", RECOMPUTE, save="from 1 recomputed"),
            job("1 lora", LORA, save="from 1 lora"),
            job("1 bf16", RECOMPUTE, dtype="bfloat16"),
            job("1 whole together", Fsdp2(device="cpu"), together=True, save="from 1 together"),
            job("1 whole together, from 1", RECOMPUTE, together=True, first=2, load="from 1 together"),
        ]
    )
    two = [
        job("2 whole recomputed", RECOMPUTE),
        job("2 whole together", Fsdp2(device="cpu"), together=True),
        job("2 whole together, recomputed", RECOMPUTE, together=True),
        job("2 lora together", LORA, together=True),
        job("2 bf16 together", RECOMPUTE, dtype="bfloat16", together=True),
        job("2 whole shared", SHARED, save="from 2 shared"),
        job("2 whole shared, one row", SHARED, 8192),
        job("2 whole shared and recomputed", SHARED_RECOMPUTE),
        job("2 sequences shared", SHARED, sequence_mean=True),
        job("2 capped shared", SHARED),
        job("2 sinks", Fsdp2(device="cpu")),
        job("2 sinks shared", SHARED),
        job("2 sinks divided", DIVIDED),
        job("2 lora", LORA),
        job("2 lora shared", SHARED_LORA, save="from 2 shared lora"),
        job("2 bf16", Fsdp2(device="cpu"), dtype="bfloat16"),
        job("2 bf16 shared", SHARED, dtype="bfloat16"),
        job("2 whole shared, from 1 recomputed", SHARED, first=2, load="from 1 recomputed"),
        job("2 lora shared, from 1", SHARED_LORA, first=2, load="from 1 lora"),
    ]
    run_on_two_ranks(root, __file__, two, str(root / "exported lora"))
    run_on_one_rank(
        [
            job("1 whole from 2 shared", Fsdp2(device="cpu"), first=2, load="from 2 shared"),
            job("1 lora from 2 shared", LORA, first=2, load="from 2 shared lora"),
        ]
    )
    return root


@pytest.mark.parametrize(
    "name",
    [
        "1 whole recomputed",
        "1 whole together",
        "1 whole together, from 1",
        "1 whole from 2 shared",
        "1 lora",
        "1 lora from 2 shared",
        "2 whole recomputed",
        "2 whole together",
        "2 whole together, recomputed",
        "2 whole shared",
        "2 whole shared, one row",
        "2 whole shared and recomputed",
        "2 whole shared, from 1 recomputed",
        "2 sequences shared",
        "2 capped shared",
        "2 sinks",
        "2 sinks shared",
        "2 sinks divided",
        "2 lora",
        "2 lora together",
        "2 lora shared",
        "2 lora shared, from 1",
    ],
)
def test_three_steps_equal_a_plain_loop(results, expected, name):
    """`from`: two steps there, a checkpoint written during the third, and the third step again here."""
    # See tests/test_learner_fsdp2.py about sequence means. gpt-oss has one gradient that is hardly more than rounding.
    atol = 1e-5 if "sequences" in name or "sinks" in name else 1e-6
    first = 2 if "from" in name else 0
    assert_three_steps(load_file(results / name), expected[name.split()[1]], first=first, atol=atol)


def test_what_is_trained_moves_and_what_is_frozen_does_not(results, model):
    start = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    weights = load_file(results / "2 lora")
    moved = {name for name in weights.keys() - {"numbers"} if not torch.equal(weights[name], start[name])}
    assert moved == {name for name in start if "_proj." in name}
    assert all((weights[name] - start[name]).abs().max() > 1e-5 for name in moved)


@pytest.mark.parametrize("name", ["1 bf16", "2 bf16", "2 bf16 together", "2 bf16 shared"])
def test_bfloat16_is_as_near_to_float32_as_a_plain_bfloat16_loop(results, expected, model, name):
    assert_bfloat16_noise(load_file(results / name), expected["whole"], expected["bf16"], model)


def test_an_export_of_adapters_is_the_merged_model(results, expected):
    model = AutoModelForCausalLM.from_pretrained(results / "exported lora", dtype=torch.float32)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected["lora"][name], atol=1e-6, rtol=0)


def test_compiled_layers_are_made_once_and_compute_the_same(model, expected, tmp_path, monkeypatch):
    """Dynamo is real; what it makes is run as it is, because a compiler would take a minute."""
    parts, make_compiled = [], torch.compile

    def as_it_is(graph: torch.fx.GraphModule, _: object):
        parts.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda forward, **how: make_compiled(forward, backend=as_it_is, **how))
    run_on_one_rank([Job(model, 34, str(tmp_path / "out"), Fsdp2(device="cpu", options=("compile", "recompute")))])
    weights = load_file(tmp_path / "out")
    for key in weights.keys() - {"numbers"}:
        torch.testing.assert_close(weights[key], expected["whole"][key], atol=1e-6, rtol=0)
    assert 0 < len(parts) < 12  # before and after attention, with gradient and without; six packings were met


def test_recomputing_keeps_less(model):
    def kept(config: Fsdp2) -> int:
        """Bytes that a step keeps of its forward pass."""
        backend, sizes = open_backend(model, config=config), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):
            backend.step(make_rows(0, 0, 1, 8192), LOSS, 1e-4)
        backend.close()
        return sum(sizes)

    assert kept(RECOMPUTE) < 0.5 * kept(Fsdp2(device="cpu"))


@pytest.mark.parametrize(
    ("saved", "loaded", "why"),
    [
        (Fsdp2(device="cpu"), LORA, r"holds all weights, and adapters of rank 4 .*lora_rank=0"),
        (LORA, Fsdp2(device="cpu"), r"holds adapters of rank 4, and all weights .*lora_rank=4"),
        (Fsdp2(device="cpu", lora_rank=8), LORA, r"holds adapters of rank 8, and adapters of rank 4 .*lora_rank=8"),
    ],
)
def test_checkpoints_of_adapters_and_of_all_weights_are_distinguished(model, tmp_path, saved, loaded, why):
    backend = open_backend(model, config=saved)
    backend.save(tmp_path / "saved", CheckpointState(step=1, version=1)).result(DEADLINE_S)
    backend.close()
    backend = open_backend(model, config=loaded)
    with pytest.raises(LearnerError, match=why):
        backend.load(tmp_path / "saved")
    backend.close()


def test_what_cannot_be_is_refused_before_ranks_meet(model):
    with pytest.raises(ConfigError, match=r"parallel\.context=4: the model has 4 heads and 2 key-value heads"):
        open_backend(model, config=Fsdp2(device="cpu", parallel={"context": 4}))
    with pytest.raises(ConfigError, match=r"options=\[offload\] .* runs on the CPU"):
        open_backend(model, config=Fsdp2(device="cpu", options=("offload",)))
    open_backend(model).close()  # nothing of the others is left


if __name__ == "__main__":
    backend = run_in_turn(jobs_of(sys.argv[1]))
    backend.export(Path(sys.argv[2]))
    assert (backend.data_rank, backend.data_size) == (0, 1)
    rows = make_rows(0, 0, 1, 34)
    both = backend.logprobs(rows)
    one = backend.logprobs(
        rows if backend.rank == 0 else []
    )  # as the loop does with what only its first rank asked for
    assert len(one) == (len(rows) if backend.rank == 0 else 0)
    assert all(torch.equal(a, b) for a, b in zip(one, both, strict=False))
    if backend.rank == 0:
        saving = backend.save(Path(sys.argv[2]) / "step-00000003", CheckpointState(step=3, version=13))
        with pytest.raises(LearnerError, match="step-00000003 could not be written"):
            saving.result(DEADLINE_S)  # the other rank is gone
        assert not list(Path(sys.argv[2]).glob("step-*"))
    backend.close()
