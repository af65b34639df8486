"""The Megatron backend against a plain transformers loop: weights after three steps, in every layout, and resumed in another.

Two ranks are two processes running this file as a script on the loopback; they are started once and do all jobs in turn.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from slipstream.configs import Config, check
from slipstream.configs.backends import Megatron
from slipstream.configs.schema import Learner, Model
from slipstream.errors import ConfigError, LearnerError
from slipstream.launch import preflight
from slipstream.launch.run_inputs import RunInputs
from slipstream.learner.checkpoint_folder import CheckpointState
from slipstream.learner.logprobs import token_logprobs
from slipstream.learner.megatron.backend import MegatronBackend, MegatronModel
from slipstream.learner.megatron.fit import check_family, check_layout
from slipstream.learner.megatron.mapping import hugging, megatron, rule_of
from slipstream.learner.megatron.rows import local_row, padded_length
from slipstream.learner.packing import MicroBatch, scoring_microbatch
from slipstream.learner.sft import negative_log_likelihood
from slipstream.learner.step import PolicyStepper
from slipstream.tests.columns import joined
from slipstream.tests.equality import (
    LOSS,
    OPTIMIZER,
    STEPS,
    TEMPERATURE,
    assert_refused,
    assert_three_steps,
    make_batch,
    make_model,
    make_rows,
    plain_loop,
)
from slipstream.tests.ranks import run_on_two_ranks
from slipstream.weightsync.weight_check import are_adapters, base_weights, merge
from torch import distributed as dist
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

DEADLINE_S = 200

TWO = {
    "tensor": Megatron(ranks=2, parallel={"tensor": 2}),
    "pipeline": Megatron(ranks=2, parallel={"pipeline": 2}),
    "virtual": Megatron(ranks=2, parallel={"pipeline": 2, "virtual": 2}),
    "context": Megatron(ranks=2, parallel={"context": 2}),
    "data": Megatron(ranks=2),
    "experts": Megatron(ranks=2, parallel={"expert": 2}),
    "tensor-experts": Megatron(ranks=2, parallel={"tensor": 2, "expert": 2}),
    "tensor-experts-recomputed": Megatron(ranks=2, parallel={"tensor": 2, "expert": 2}, options=("recompute",)),
    "virtual-recomputed": Megatron(ranks=2, parallel={"pipeline": 2, "virtual": 2}, options=("recompute",)),
}

OFFLOADED = {
    "data-offloaded": Megatron(ranks=2, options=("offload",)),
    "experts-offloaded": Megatron(ranks=2, parallel={"expert": 2}, options=("offload", "recompute")),
}
"""Layouts whose steps are compared, and no more: they pass rows as those without the option."""

BFLOAT16 = (*(TWO if torch.cuda.is_available() else ("tensor",)), "data-offloaded")
"""Those in bfloat16: on CUDA other layers compute it than float32, TransformerEngine's."""

KIND = {"pipeline": "untied", "virtual": "deep", "experts": "moe", "tensor-experts": "moe"}
KIND |= {"tensor-experts-recomputed": "moe", "virtual-recomputed": "deep", "experts-offloaded": "moe"}
"""The model of each layout; `tied` for the others."""


class Job(msgspec.Struct):
    """Steps `first` to `last` from `load` or from the start; `save` after step 2; full weights and [steps, 2] numbers to `out`."""

    layout: str
    model: str
    out: str
    budget: int = 34
    first: int = 0
    last: int = STEPS
    load: str = ""
    save: str = ""
    dtype: str = "float32"


def open_backend(model: str, layout: Megatron | None = None, dtype: str = "float32") -> MegatronBackend:
    config = Model(path=model, dtype=dtype)
    return MegatronBackend(config, OPTIMIZER, layout or Megatron(), temperature=TEMPERATURE, timeout_s=DEADLINE_S)


def run(job: Job, backend: MegatronBackend) -> None:
    if job.load:
        assert backend.load(Path(job.load)) == CheckpointState(step=job.first, version=job.first + 10)
    numbers = []
    saving = None
    for step in range(job.first, job.last):
        rows = make_rows(step, backend.data_rank, backend.data_size, job.budget)
        result = backend.step(rows, LOSS, OPTIMIZER.lr)
        assert result.tokens == sum(s.loss_mask.sum() for s in make_batch(step)[0])
        assert result.means.keys() >= {"entropy", "kl"}
        numbers.append([result.loss, result.grad_norm])
        if job.save and step == 1:  # the third step is taken while it is written
            saving = backend.save(Path(job.save), CheckpointState(step=2, version=12))
    if saving is not None:
        saving.result(DEADLINE_S)
    weights = {name: tensor.cpu() for name, tensor in backend.named_weights()}
    assert list(weights) == [name for name, _ in backend.named_weights()]
    if are_adapters(weights):
        weights = dict(merge(weights, base_weights(job.model)))
    if backend.rank == 0:
        save_file(weights | {"numbers": torch.tensor(numbers)}, job.out)


def poisoned(logprobs, entropy, row):
    """A loss that is NaN where the first data rank has a trained token."""
    output = negative_log_likelihood(logprobs, entropy, row)
    factor = float("nan") if POISON and bool(row.loss_mask.any()) else 1.0
    return msgspec.structs.replace(output, loss_sum=output.loss_sum * factor)


POISON = True


# ---------------------------------------------------------------- two ranks


def rank_main(jobs: list[Job], export: str) -> None:
    """What each of the two ranks runs."""
    for index, job in enumerate(jobs):
        os.environ["MASTER_PORT"] = os.environ["PORTS"].split(",")[index]
        backend = open_backend(job.model, (TWO | OFFLOADED)[job.layout], job.dtype)
        run(job, backend)
        if index < len(TWO):
            assert_that_ranks_agree(job.layout, backend)
            assert_that_a_frozen_model_scores_as_in_transformers(job)
            assert_that_compared_tokens_are_counted_on_all_ranks(job.layout, backend)
        if job.layout == "tensor":
            assert_that_a_split_vocabulary_scores_the_same()
            backend.export(Path(export))
        if index == len(jobs) - 1 and backend.rank == 0:  # rank 1 has left
            with pytest.raises(LearnerError, match="lost the others while stepping"):
                backend.step([scoring_microbatch([[1, 2, 3]])], negative_log_likelihood, 0.0)
        backend.close()


def assert_that_ranks_agree(layout: str, backend: MegatronBackend) -> None:
    """Contracts that only several ranks can break, in each layout."""
    global POISON
    own_rows = layout in ("data", "experts")  # whether each rank has rows of its own
    assert (backend.rank, backend.world_size) == (dist.get_rank(), 2)
    assert (backend.data_rank, backend.data_size) == ((backend.rank, 2) if own_rows else (0, 1))
    assert backend.maximum(2.5 + backend.rank) == 3.5
    own = torch.full((2 * backend.data_rank + 1, 3), 1.0 + backend.data_rank, dtype=torch.float64)
    assert backend.gather(own).tolist() == [[1.0] * 3, *[[2.0] * 3] * (3 if own_rows else 0)]
    # Log-probs of rows that only rank 0 has: as many come back as were given, and they are right.
    rows = [scoring_microbatch([[1, 2, 3]]), scoring_microbatch([[4, 5]])] if backend.rank == 0 else []
    assert [len(values) for values in backend.logprobs(rows)] == ([3, 2] if backend.rank == 0 else [])
    both = [scoring_microbatch([[7, 8, 9, 1], [2, 3]])]
    (own_logprobs,) = backend.logprobs(both)
    gathered = [torch.empty_like(own_logprobs) for _ in range(2)]
    dist.all_gather(gathered, own_logprobs)
    torch.testing.assert_close(gathered[0], gathered[1], atol=1e-6, rtol=0)
    assert (own_logprobs == 0).tolist() == [True, False, False, False, True, False]
    POISON = backend.data_rank == 0
    assert_refused(backend, poisoned, both, "not finite")
    assert_refused(backend, LOSS, [], "no trained token")
    first = [msgspec.structs.replace(row, loss_mask=torch.ones_like(row.loss_mask)) for row in both]
    assert_refused(backend, LOSS, first, "first token")


def assert_that_a_frozen_model_scores_as_in_transformers(job: Job) -> None:
    """Beside the policy, for rows that only rank 0 has."""
    settings = {"temperature": TEMPERATURE, "timeout_s": DEADLINE_S}
    frozen = MegatronModel(Model(path=job.model), TWO[job.layout], **settings)
    assert not hasattr(frozen, "_optimizer")
    ids = [7, 8, 9, 1, 2, 3, 40]
    found = frozen.logprobs([scoring_microbatch([ids])] if dist.get_rank() == 0 else [])
    frozen.close()
    assert len(found) == (dist.get_rank() == 0)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(job.model)(torch.tensor([ids]), use_cache=False).logits[0, :-1]
    wanted = (logits / TEMPERATURE).log_softmax(-1)[range(len(ids) - 1), ids[1:]]
    for one in found:
        torch.testing.assert_close(one[1:], wanted, atol=5e-6, rtol=0)


def assert_that_compared_tokens_are_counted_on_all_ranks(layout: str, backend: MegatronBackend) -> None:
    """Those of the batch, though of a pipeline only the last stage sees what the policy says of them."""
    config, (sequences, _) = Learner(backend=TWO[layout]), make_batch(0)
    sequences[0] = msgspec.structs.replace(sequences[0], staleness=sequences[0].staleness + sequences[0].loss_mask)
    stepper, train_batch = PolicyStepper(config, backend, 64), joined(sequences)
    done = stepper.step(train_batch, stepper.plan(train_batch), (), CheckpointState(step=0, version=0))
    assert done.compared == sum(int(s.loss_mask.sum()) for s in sequences[1:])
    assert done.mismatch > 0.1
    assert done.ratio_p999 is not None  # as for the count
    assert done.ratio_max == done.ratio_p999 > 0  # of fewer than 1,000 tokens


def assert_that_a_split_vocabulary_scores_the_same() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(5, 12, generator=generator)
    logits[2, 4] = -torch.inf
    targets, weights = torch.tensor([0, 11, 5, 6, 3]), torch.randn(2, 5, generator=generator)
    half = slice(6 * dist.get_rank(), 6 * dist.get_rank() + 6)
    whole, part = logits.clone().requires_grad_(), logits[:, half].clone().requires_grad_()
    expected = torch.stack(token_logprobs(whole, targets, 0.7))
    scored = torch.stack(token_logprobs(part, targets, 0.7, dist.group.WORLD))
    torch.testing.assert_close(scored, expected)
    (weights * expected).sum().backward()
    (weights * scored).sum().backward()
    torch.testing.assert_close(part.grad, whole.grad[:, half])
    several = torch.stack([targets, targets.flip(0)], 1)
    found, expected = token_logprobs(part, several, 0.7, dist.group.WORLD)[0], token_logprobs(whole, several, 0.7)[0]
    torch.testing.assert_close(found, expected)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {
        "tied": make_model(root / "tied", tied=True),
        "untied": make_model(root / "untied", tied=False),
        "deep": make_model(root / "deep", tied=True, layers=4),
        "moe": make_model(root / "moe", tied=False, moe=True),
    }


@pytest.fixture(scope="module")
def expected(models) -> dict[str, dict[str, torch.Tensor]]:
    return {kind: plain_loop(path) for kind, path in models.items()}


@pytest.fixture(scope="module")
def results(models, tmp_path_factory) -> Path:
    """Runs jobs on one rank here and on two ranks there; weights lie in the folder by name."""
    root = tmp_path_factory.mktemp("results")

    def of(layout: str) -> str:
        return models[KIND.get(layout, "tied")]

    for job in (
        Job("one", models["tied"], str(root / "one"), save=str(root / "from-one")),
        Job("one", models["moe"], str(root / "one-moe"), budget=8192),
    ):
        backend = open_backend(job.model)
        run(job, backend)
        backend.close()
    two = [
        *(Job(layout, of(layout), str(root / layout), save=str(root / f"from-{layout}")) for layout in TWO),
        *(Job(layout, of(layout), str(root / layout), save=str(root / f"from-{layout}")) for layout in OFFLOADED),
        Job("data", models["tied"], str(root / "data-packed"), budget=8192),
        *(
            Job(layout, of(layout), str(root / f"{source}-{layout}"), first=2, load=str(root / f"from-{source}"))
            for source, layout in RESUMED
            if layout != "one"
        ),
        *(Job(layout, of(layout), str(root / f"bfloat16-{layout}"), dtype="bfloat16") for layout in BFLOAT16),
    ]
    run_on_two_ranks(root, __file__, two, str(root / "export"))
    for source, layout in RESUMED:
        if layout == "one":
            backend = open_backend(of(source))
            run(
                Job("one", of(source), str(root / f"{source}-one"), first=2, load=str(root / f"from-{source}")), backend
            )
            backend.close()
    return root


RESUMED = [
    ("tensor", "tensor"),
    ("tensor", "one"),
    ("one", "tensor"),
    ("data", "one"),
    ("tensor", "data"),
    ("virtual", "one"),
    ("experts", "experts"),
    ("experts", "one"),
    ("data-offloaded", "tensor"),
    ("tensor", "data-offloaded"),
    ("experts-offloaded", "tensor-experts"),
    ("experts", "experts-offloaded"),
]
"""Layouts that save a checkpoint after two steps, and that do the third."""


@pytest.mark.parametrize("layout", [*TWO, *OFFLOADED, "one", "one-moe", "data-packed"])
def test_three_steps_equal_a_plain_loop(results, expected, layout):
    reference = expected["moe" if layout == "one-moe" else KIND.get(layout, "tied")]
    assert_three_steps(load_file(results / layout), reference)


@pytest.mark.parametrize(("source", "layout"), RESUMED)
def test_a_checkpoint_resumes_in_the_same_layout_and_in_another(results, expected, source, layout):
    reference = expected[KIND.get(source, "tied")]
    assert_three_steps(load_file(results / f"{source}-{layout}"), reference, first=2)
    assert not list(results.glob(".*"))


@pytest.mark.parametrize("layout", BFLOAT16)
def test_bfloat16_differs_by_its_noise(results, expected, layout):
    weights, reference = load_file(results / f"bfloat16-{layout}"), expected[KIND.get(layout, "tied")]
    torch.testing.assert_close(weights["numbers"][0], reference["numbers"][0], atol=0.0, rtol=0.1)
    for name in reference.keys() - {"numbers"}:
        assert weights[name].dtype == torch.bfloat16
        # What three steps of AdamW can move at most, one way here and the other way there, and the rounding of the result.
        room = 2 * STEPS * OPTIMIZER.lr * 1.1 + 2**-8 * reference[name].abs()
        assert bool(((weights[name].float() - reference[name]).abs() <= room).all()), name


def test_an_export_loads_in_transformers(results, expected):
    model = AutoModelForCausalLM.from_pretrained(results / "export", dtype=torch.float32)
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    for name, parameter in model.named_parameters():
        assert parameter.shape == expected["tied"][name].shape


# ---------------------------------------------------------------- one rank


def test_a_llama_with_scaled_positions_scores_as_in_transformers(tmp_path):
    path = make_model(tmp_path / "llama", tied=False)
    rope = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 2.0,
        "original_max_position_embeddings": 16,
    }
    shape = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads, rope_parameters=rope, initializer_range=0.08)).eval()
    model.save_pretrained(path)
    backend = open_backend(path)
    sequences = [s.token_ids.tolist() for s in make_batch(0)[0]]
    row = scoring_microbatch(sequences)
    (logprobs,), (plain,) = backend.logprobs([row]), backend.logprobs([row], temperature=1.0)
    backend.close()
    for start, end, ids in zip(row.cu_seqlens, row.cu_seqlens[1:], sequences, strict=False):
        with torch.no_grad():
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1]
        for found, temperature in ((logprobs, TEMPERATURE), (plain, 1.0)):
            wanted = (logits / temperature).log_softmax(-1)[range(len(ids) - 1), ids[1:]]
            torch.testing.assert_close(found[start + 1 : end], wanted, atol=5e-6, rtol=0)


def test_named_weights_are_the_files_and_the_callers_own(models):
    backend = open_backend(models["moe"])
    source = load_file(Path(models["moe"]) / "model.safetensors")
    weights = dict(backend.named_weights())
    assert weights.keys() == source.keys()
    assert all(torch.equal(weights[name].cpu(), source[name]) for name in source)
    for tensor in weights.values():
        tensor.zero_()
    assert all(torch.equal(tensor.cpu(), source[name]) for name, tensor in backend.named_weights())
    backend.close()


def test_no_row_is_no_pass(models, monkeypatch):
    backend = open_backend(models["moe"], Megatron())
    monkeypatch.setattr(backend, "_passes", lambda *_, **__: pytest.fail("a pass was made"))
    assert backend.logprobs([]) == []
    backend.close()


def test_master_weights_are_read_unrounded(models):
    backend = open_backend(models["tied"], dtype="bfloat16")
    source = load_file(Path(models["tied"]) / "model.safetensors")
    assert all(torch.equal(tensor.cpu(), source[name].bfloat16()) for name, tensor in backend.named_weights())
    master = backend._parts[0].embedding.word_embeddings.weight.main_param
    assert torch.equal(master.cpu(), source["model.embed_tokens.weight"].flatten())
    backend.close()


def test_a_checkpoint_of_another_model_or_none_is_refused(models, tmp_path):
    backend = open_backend(models["tied"])
    backend.save(tmp_path / "saved", CheckpointState(step=0, version=0)).result(DEADLINE_S)
    backend.close()
    for other in ("untied", "deep"):
        another = open_backend(models[other])
        before = dict(another.named_weights())
        with pytest.raises(LearnerError, match="saved cannot be loaded"):
            another.load(tmp_path / "saved")
        assert all(torch.equal(before[name], tensor) for name, tensor in another.named_weights())
        another.close()
    again = open_backend(models["tied"])
    with pytest.raises(LearnerError, match="nothing cannot be loaded"):
        again.load(tmp_path / "nothing")
    assert again.load(tmp_path / "saved") == CheckpointState(step=0, version=0)
    (tmp_path / "saved" / ".metadata").unlink()
    with pytest.raises(LearnerError, match="saved cannot be loaded"):
        again.load(tmp_path / "saved")
    again.close()


# ---------------------------------------------------------------- without a backend


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_every_kind_of_weight_is_split_and_merged_again(parts):
    groups, width, generator = 4, 8, torch.Generator().manual_seed(0)
    shapes = {"q": (128, 16), "k": (32, 16), "v": (32, 16), "gate_proj": (24, 16), "up_proj": (24, 16)}
    for name in (
        "decoder.layers.3.self_attention.linear_qkv.weight",
        "decoder.layers.0.mlp.linear_fc1.weight",
        "decoder.layers.0.mlp.experts.local_experts.5.linear_fc2.weight",
        "decoder.final_layernorm.weight",
        "embedding.word_embeddings.weight",
        "decoder.layers.2.mlp.shared_experts.linear_fc1.weight",
        "decoder.layers.1.self_attention.linear_kv_up_proj.weight",
        "decoder.layers.1.self_attention.linear_kv_down_proj.weight",
        "decoder.layers.0.self_attention.linear_qkv_lora.up.1",
        "decoder.layers.0.self_attention.linear_proj_lora.down.0",
    ):
        rule = rule_of(name)
        keys = [
            source.split(".")[-2].removesuffix("_proj") if "attn" in source else source.split(".")[-2]
            for source in rule.sources
        ]
        tensors = [torch.randn(shapes.get(key, (16, 32)), generator=generator) for key in keys]
        shards = [megatron(rule, tensors, groups, parts, index) for index in range(parts)]
        if rule.split is not None:
            assert sum(shard.numel() for shard in shards) == sum(tensor.numel() for tensor in tensors)
        for found, tensor in zip(hugging(rule, shards, groups, width), tensors, strict=True):
            assert torch.equal(found, tensor)


@pytest.mark.parametrize("context", [1, 2, 4])
def test_every_trained_token_is_scored_once_and_from_the_token_before_it(context):
    row: MicroBatch = make_rows(0, 0, 1, 8192)[0]
    length = padded_length(row, 24, context) + 24 * 60  # as long as another row of the step, with fillers
    parts = [local_row(row, length, context, rank) for rank in range(context)]
    assert {part.token_ids.shape for part in parts} == {(1, length // context)}
    assert {part.cu_seqlens[-1] for part in parts} == {length}
    assert all(cut % (2 * context if context > 1 else 1) == 0 for part in parts for cut in part.cu_seqlens)
    scored = torch.cat([part.positions for part in parts])
    assert scored.sort().values.tolist() == row.loss_mask.nonzero().squeeze(1).tolist()
    for part in parts:
        assert torch.equal(part.targets, row.token_ids[part.positions])
        assert torch.equal(part.token_ids[0, part.sources], row.token_ids[part.positions - 1])
        assert torch.equal(part.position_ids[0, part.sources], row.position_ids[part.positions - 1])


YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (Qwen2Config(), "family qwen2; allowed are qwen3, qwen3_moe, llama, deepseek_v3"),
        (DeepseekV3Config(rope_interleave=False), "rope_interleave=false"),
        (DeepseekV3Config(rope_parameters=YARN | {"mscale_all_dim": 0.5}), "mscale=1.0 with mscale_all_dim=0.5"),
        (DeepseekV3Config(num_experts_per_tok=6), "num_experts_per_tok=6 from topk_group=4"),
        (LlamaConfig(attention_bias=True), "attention_bias"),
        (Qwen3Config(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "rope_type=dynamic"),
        (Qwen3MoeConfig(mlp_only_layers=[0]), "mlp_only_layers"),
    ],
)
def test_models_that_are_not_mapped_are_refused(config, match):
    with pytest.raises(ConfigError, match=match):
        check_family(config)


LATENT = DeepseekV3Config(num_hidden_layers=4, first_k_dense_replace=2, n_routed_experts=8, n_group=2, topk_group=2)
DENSE = Qwen3Config(num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=4)
MIXTURE = Qwen3MoeConfig(num_attention_heads=4, num_key_value_heads=2, num_experts=6)


@pytest.mark.parametrize(
    ("layout", "model", "match"),
    [
        (Megatron(parallel={"tensor": 4}), DENSE, "parallel.tensor: 4 does not divide the model's 2 key-value heads"),
        (Megatron(parallel={"pipeline": 3}), DENSE, "3 does not divide the model's 4 layers"),
        (Megatron(parallel={"pipeline": 2, "virtual": 4}), DENSE, "8 does not divide the model's 4 layers"),
        (Megatron(parallel={"expert": 2}), DENSE, "the model has no experts"),
        (Megatron(parallel={"expert": 4}), MIXTURE, "4 does not divide the model's 6 experts"),
        (Megatron(parallel={"tensor": 2}), MIXTURE, "a mixture of experts needs parallel.expert"),
        (
            Megatron(parallel={"pipeline": 2, "expert": 2}),
            LATENT,
            "has layers 0 to 1, and the model's first 2 have no experts",
        ),
    ],
)
def test_a_model_that_cannot_be_split_so_is_refused(layout, model, match):
    with pytest.raises(ConfigError, match=match):
        check_layout(layout, model)


def test_the_package_that_is_missing_or_of_another_version_is_named_before_a_start(models, monkeypatch, tmp_path):
    config = Config(model=Model(path=models["tied"]), learner=Learner(backend=Megatron()))
    assert preflight.learner(RunInputs(config)) == "megatron, ranks: 1"
    other = tmp_path / "megatron_core-0.17.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Name: megatron-core\nVersion: 0.17.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"written for megatron-core 0\.16\.1, and 0\.17\.0 is installed"):
        preflight.learner(RunInputs(config))
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ConfigError, match=r"needs the package megatron-core; run `make install`"):
        preflight.learner(RunInputs(config))


def test_recomputing_keeps_less_and_changes_nothing(models):
    found = {}
    for options in ((), ("recompute",)):
        backend = open_backend(models["moe"], Megatron(options=options))
        sizes, kept = [], []

        def loss(*row, sizes=sizes, kept=kept):
            kept.append(sum(sizes))  # of the forward pass: what comes back in the backward pass is freed layer by layer
            return LOSS(*row)

        with torch.autograd.graph.saved_tensors_hooks(lambda t, sizes=sizes: sizes.append(t.nbytes) or t, lambda t: t):
            result = backend.step(make_rows(0, 0, 1, 8192), loss, 1e-4)
        found[options] = result, {name: one.clone() for name, one in backend.named_weights()}, kept[0]
        backend.close()
    (whole, weights, much), (again, same, little) = found.values()
    assert (again.loss, again.grad_norm) == (whole.loss, whole.grad_norm)
    assert all(torch.equal(same[name], one) for name, one in weights.items())
    assert little < 0.3 * much


@pytest.mark.parametrize(
    ("layout", "match"),
    [
        (Megatron(ranks=3, parallel={"tensor": 2}), "allowed are multiples of 2"),
        (Megatron(ranks=4, parallel={"expert": 3}), "parallel.expert=3: a stage of the pipeline has 4 ranks"),
        (Megatron(parallel={"virtual": 2}), "there are no stages"),
    ],
)
def test_sizes_that_do_not_fit_the_ranks_are_refused(layout, match):
    with pytest.raises(ConfigError, match=match):
        check(Config(learner=Learner(backend=layout)))


if __name__ == "__main__":
    rank_main(msgspec.json.decode(sys.argv[1], type=list[Job]), sys.argv[2])
