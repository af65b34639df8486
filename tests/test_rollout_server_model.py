"""What is special about our own runner: many architectures, a salted prefix cache, a cache that is too small, weights by name."""

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from slipstream.errors import ConfigError, WeightSyncError
from slipstream.rollout.engines.base import SamplingParams
from slipstream.rollout.engines.server.contract import EngineServer, SampledToken, Sequence
from slipstream.rollout.engines.server.launch import Options
from slipstream.rollout.engines.server.sampling import draw
from slipstream.rollout.engines.transformers.engine import serve
from slipstream.rollout.engines.transformers.model_runner import TransformersModelRunner
from slipstream.tests import tiny
from slipstream.weightsync import fp8
from slipstream.weightsync.plan import FileSource, TransferPlan
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3Config,
)

TOLERANCE = 1e-4
CONTEXT = 1500
KV_TOKEN = 2 * 2 * 32 * 4
"""Bytes of KV per token of `tiny_qwen3`: keys and values, layers, numbers per head, bytes."""

SHAPE: dict[str, Any] = {
    "vocab_size": tiny.VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
    "eos_token_id": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
}


def options(folder: Path, **changes: object) -> Options:
    settings: dict[str, object] = {
        "kind": "transformers",
        "model": str(folder),
        "host": "127.0.0.1",
        "port": 0,
        "dtype": "float32",
        "seed": 0,
        "memory": 16 << 20,
        "max_concurrent": 8,
        "max_tokens": CONTEXT,
    }
    return Options(**(settings | changes))  # type: ignore[arg-type]


def runner_of(served: EngineServer) -> TransformersModelRunner:
    assert isinstance(served.runner, TransformersModelRunner)
    return served.runner


def drain(runner: TransformersModelRunner) -> dict[str, list[SampledToken]]:
    """Step until nothing is left: id -> tokens."""
    out: dict[str, list[SampledToken]] = {}
    while runner.busy():
        for sampled in runner.step():
            out.setdefault(sampled.id, []).append(sampled)
    return out


def error(model: torch.nn.Module, sequence: Sequence, sampled: list[SampledToken]) -> float:
    """Largest difference in nats between what was reported and what `model` computes for the same tokens, uncached."""
    ids = [*sequence.token_ids, *(s.token for s in sampled)]
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, len(sequence.token_ids) - 1 : -1].float()
    rows = (logits / sequence.sampling.temperature).log_softmax(-1)
    return max(abs(float(row[s.token]) - s.logprob) for row, s in zip(rows, sampled, strict=True))


def prompts(*lengths: int, seed: int = 0) -> list[tuple[int, ...]]:
    dice = random.Random(seed)
    return [tuple(dice.randrange(4, 500) for _ in range(n)) for n in lengths]


LATENT: dict[str, Any] = SHAPE | {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
"""Keys and values in a latent space: other sizes than the config says."""

ARCHITECTURES = {
    "window": MistralConfig(**SHAPE, sliding_window=48),
    "mixed windows": Qwen3Config(**SHAPE, head_dim=16, use_sliding_window=True, sliding_window=48, max_window_layers=1),
    "soft cap": Gemma2Config(**SHAPE, head_dim=16, sliding_window=48),
    "sinks": GptOssConfig(**SHAPE, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=48),
    "learnt positions": GPT2Config(
        vocab_size=tiny.VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=2048, eos_token_id=3, bos_token_id=1
    ),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_way_of_attending_is_exact(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(ARCHITECTURES[name]).float().save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    runner = runner_of(serve(options(tmp_path)))
    # Around the window's and the page's edges, and longer than one forward pass takes.
    lengths = (1, 31, 32, 33, 47, 48, 49, 300, 1200)
    sequences = [
        Sequence(f"s{n}", ids, SamplingParams(max_tokens=40)) for n, ids in zip(lengths, prompts(*lengths), strict=True)
    ]
    for sequence in sequences:
        runner.add(sequence)
    out = drain(runner)
    assert all(len(out[s.id]) == 40 for s in sequences)
    assert max(error(plain, s, out[s.id]) for s in sequences) < TOLERANCE


@pytest.mark.parametrize(
    "config",
    [
        MambaConfig(**SHAPE),
        DeepseekV3Config(**LATENT),
    ],
    ids=lambda config: config.model_type,
)
def test_a_model_that_the_cache_does_not_know_is_refused_before_it_serves(
    tmp_path: Path, config: PreTrainedConfig
) -> None:
    AutoModelForCausalLM.from_config(config).float().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="kind transformers"):
        serve(options(tmp_path))


def test_a_cache_too_small_for_all_loses_no_token(tmp_path: Path) -> None:
    folder = tiny.tiny_qwen3(tmp_path)
    runner = runner_of(serve(options(folder, memory=512 * KV_TOKEN, max_tokens=400)))
    sequences = [
        Sequence(f"s{i}", ids, SamplingParams(max_tokens=200))
        for i, ids in enumerate(prompts(90, 40, 130, 60, 100, 20))
    ]
    for sequence in sequences:
        runner.add(sequence)
    preempted = False
    out: dict[str, list[SampledToken]] = {s.id: [] for s in sequences}
    while runner.busy():
        before = runner.get_load()
        for sampled in runner.step():
            out[sampled.id].append(sampled)
        preempted |= runner.get_load().waiting > before.waiting
    assert preempted
    assert [len(out[s.id]) for s in sequences] == [200] * 6
    model = tiny.load(folder)
    assert max(error(model, s, out[s.id]) for s in sequences) < TOLERANCE
    assert runner.get_load().kv_usage == 0.0


def test_a_cache_too_small_for_one_is_refused(tmp_path: Path) -> None:
    folder = tiny.tiny_qwen3(tmp_path)
    with pytest.raises(ConfigError, match=r"holds 384 tokens; agent\.max_tokens needs 400"):
        serve(options(folder, memory=400 * KV_TOKEN, max_tokens=400))
    with pytest.raises(ConfigError, match="write a size"):
        serve(options(folder, memory=0.5))


def test_prefixes_are_shared_within_a_salt_only(tmp_path: Path) -> None:
    old, new = (tiny.tiny_qwen3(tmp_path / str(seed), seed) for seed in (0, 1))
    served = serve(options(old))
    runner = runner_of(served)
    (prompt,) = prompts(100)

    def ask(id: str, salt: str, weights: Path) -> float:
        sequence = Sequence(id, prompt, SamplingParams(max_tokens=8), salt)
        runner.add(sequence)
        return error(tiny.load(weights), sequence, drain(runner)[id])

    assert ask("first", "1", old) < TOLERANCE
    served.weights.load(list(tiny.weights(new).items()))
    # The same salt finds keys and values of the old weights: shared, as it must be to be worth anything.
    assert ask("same salt", "1", new) > 0.1
    assert ask("other salt", "2", new) < TOLERANCE
    runner.recompute()
    assert ask("same salt, computed anew", "1", new) < TOLERANCE


def test_running_sequences_go_on_with_old_keys_unless_they_are_recomputed(tmp_path: Path) -> None:
    old, new = (tiny.tiny_qwen3(tmp_path / str(seed), seed) for seed in (0, 1))
    for recompute in (False, True):
        served = serve(options(old))
        runner = runner_of(served)
        sequence = Sequence("s", prompts(70)[0], SamplingParams(max_tokens=20))
        runner.add(sequence)
        sampled = [s for _ in range(10) for s in runner.step()]
        served.weights.load(list(tiny.weights(new).items()))
        if recompute:
            runner.recompute()
        after = drain(runner)["s"]
        grown = Sequence("s", (*sequence.token_ids, *(s.token for s in sampled)), sequence.sampling)
        assert error(tiny.load(old), sequence, sampled) < TOLERANCE
        assert (error(tiny.load(new), grown, after) < TOLERANCE) == recompute


def test_the_lower_priority_goes_first_and_no_more_than_allowed_run(tmp_path: Path) -> None:
    runner = runner_of(serve(options(tiny.tiny_qwen3(tmp_path), max_concurrent=2)))
    ids = prompts(5, 5, 5, 5)
    for name, priority, prompt in zip("abcd", (0, 0, 0, -1), ids, strict=True):
        runner.add(Sequence(name, prompt, SamplingParams(max_tokens=3), priority=priority))
    finished = []
    while runner.busy():
        for sampled in runner.step():
            if sampled.finish:
                finished.append(sampled.id)
        assert runner.get_load().running <= 2
    assert finished == ["d", "a", "b", "c"] or finished == ["a", "d", "b", "c"]


def test_an_aborted_sequence_gives_its_blocks_back(tmp_path: Path) -> None:
    runner = runner_of(serve(options(tiny.tiny_qwen3(tmp_path), max_concurrent=1)))
    for name, prompt in zip("ab", prompts(100, 100), strict=True):
        runner.add(Sequence(name, prompt, SamplingParams(max_tokens=300)))
    runner.step()
    assert (runner.get_load().running, runner.get_load().waiting) == (1, 1)
    for name in "bxa":
        runner.abort(name)
    assert not runner.busy()
    assert runner.get_load().kv_usage == 0.0


# ---- weights


@pytest.mark.parametrize("shape", [{}, {"tied": False}, {"moe": True}], ids=["tied", "untied", "experts"])
def test_loaded_weights_are_those_of_the_checkpoint(tmp_path: Path, shape: dict[str, bool]) -> None:
    old, new = (tiny.tiny_qwen3(tmp_path / str(seed), seed, **shape) for seed in (0, 1))
    served = serve(options(old))
    before = {name: parameter.data_ptr() for name, parameter in served.runner.model.named_parameters()}
    served.weights.load(list(tiny.weights(new).items()))
    loaded, expected = served.runner.model.state_dict(), tiny.load(new).state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.items())
    assert before == {name: parameter.data_ptr() for name, parameter in served.runner.model.named_parameters()}
    ids, logprobs = tiny.canary(tiny.load(new))
    scores = served.runner.score(tuple(ids))
    assert max(abs(a - b) for a, b in zip(scores, logprobs, strict=True)) < TOLERANCE


def held_bytes(runner: TransformersModelRunner) -> tuple[int, int]:
    """Of parameters, and of keys and values."""
    storages = {id(one.data.untyped_storage()): one.data.untyped_storage() for one in runner.model.parameters()}
    weights = {storage.data_ptr(): storage.nbytes() for storage in storages.values()}
    return sum(weights.values()), runner._cache.cache_tensor.untyped_storage().nbytes()


@pytest.mark.parametrize("shape", [{}, {"tied": False}, {"moe": True}], ids=["tied", "untied", "experts"])
def test_while_a_server_sleeps_it_holds_neither_weights_nor_cache_and_then_goes_on_exactly(
    tmp_path: Path, shape: dict[str, bool]
) -> None:
    old, new = (tiny.tiny_qwen3(tmp_path / str(seed), seed, **shape) for seed in (0, 1))
    served = serve(options(old))
    runner = runner_of(served)
    before = held_bytes(runner)
    assert before[0] >= sum(tensor.nbytes for tensor in tiny.weights(new).values())
    assert before[1] > 8 << 20
    sequences = [Sequence(f"s{n}", ids, SamplingParams(max_tokens=20)) for n, ids in enumerate(prompts(5, 40, 70))]
    for sequence in sequences:
        runner.add(sequence)
    sampled: dict[str, list[SampledToken]] = {}
    for one in [s for _ in range(10) for s in runner.step()]:
        sampled.setdefault(one.id, []).append(one)
    runner.free_cache()
    served.weights.free()
    assert held_bytes(runner) == (0, 0)
    runner.add(Sequence("late", prompts(33)[0], SamplingParams(max_tokens=20)))  # queued
    served.weights.allocate()
    served.weights.load(list(tiny.weights(new).items()))
    runner.allocate_cache()
    assert held_bytes(runner) == before
    after, model = drain(runner), tiny.load(new)
    assert len(after["late"]) == 20
    for sequence in sequences:
        ids = (*sequence.token_ids, *(s.token for s in sampled[sequence.id]))
        assert len(after[sequence.id]) == 20 - len(sampled[sequence.id])
        assert error(model, Sequence("s", ids, sequence.sampling), after[sequence.id]) < TOLERANCE


def plan(tensors: dict[str, torch.Tensor]) -> TransferPlan:
    shapes = tuple(tuple(tensor.shape) for tensor in tensors.values())
    dtypes = tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values())
    return TransferPlan(7, tuple(tensors), dtypes, shapes, 1 << 20, FileSource("/nowhere"), "", False, "", "engine-0")


def test_a_push_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    folder = tiny.tiny_qwen3(tmp_path, moe=True)
    weights = serve(options(folder)).weights
    tensors = tiny.weights(folder)
    weights.check(plan(tensors))
    weights.check(plan(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}))  # tied: may come, may lack
    expert = "model.layers.1.mlp.experts.3.up_proj.weight"
    for changed, what in (
        (tensors | {"model.extra": torch.zeros(1)}, r"version 7: the model has no tensor 'model\.extra'"),
        ({n: t for n, t in tensors.items() if n != expert}, f"version 7 lacks '{expert}'"),
        (tensors | {expert: torch.zeros(2, 2)}, f"version 7: {expert} is"),
    ):
        with pytest.raises(WeightSyncError, match=what):
            weights.check(plan(changed))


@pytest.mark.parametrize("moe", [False, True])
def test_weights_in_fp8_are_computed_with_as_what_their_numbers_are(tmp_path: Path, moe: bool) -> None:
    """In any order; of sizes that are no multiples of a block, and with experts that transformers holds as one tensor."""
    served = serve(options(tiny.tiny_qwen3(tmp_path / "served", moe=moe)))
    folder = tiny.tiny_qwen3(tmp_path / "pushed", seed=1, moe=moe)
    pushed = list(fp8.quantized(tiny.weights(folder).items()))
    served.weights.check(plan(dict(pushed)))
    served.weights.load(pushed[::-1])
    expected = tiny.load(tiny.rounded_to_fp8(folder, tmp_path / "rounded"))
    ids = prompts(40)[0]
    rows = tiny.logprobs(expected, list(ids))
    scored = torch.tensor(runner_of(served).score(ids))
    assert float((scored - rows.gather(1, torch.tensor(ids)[1:, None])[:, 0]).abs().max()) < TOLERANCE
    assert float((rows - tiny.logprobs(tiny.load(folder), list(ids))).abs().max()) > 100 * TOLERANCE


# ---- sampling


def test_draws_follow_the_distribution_that_is_reported() -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0])
    dice = random.Random(0)
    n = 20_000
    for sampling in (
        SamplingParams(1),
        SamplingParams(1, temperature=0.5),
        SamplingParams(1, top_k=2),
        SamplingParams(1, top_p=0.7),
        SamplingParams(1, temperature=2.0, top_k=4, top_p=0.8),
    ):
        tokens, logprobs = draw(logits.expand(n, -1), [sampling] * n, [dice.random() for _ in range(n)])
        reported = dict(zip(tokens, logprobs, strict=True))
        assert sum(map(math.exp, reported.values())) == pytest.approx(1.0, abs=1e-6)
        for token, logprob in reported.items():
            share = math.exp(logprob)
            assert tokens.count(token) / n == pytest.approx(share, abs=5 * math.sqrt(share * (1 - share) / n) + 1e-9)


def test_truncation_keeps_the_likely_ones() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()

    def kept(sampling: SamplingParams) -> set[int]:
        uniforms = [i / 500 for i in range(500)]
        return set(draw(logits.expand(500, -1), [sampling] * 500, uniforms)[0])

    assert kept(SamplingParams(1)) == {0, 1, 2, 3}
    assert kept(SamplingParams(1, top_k=3)) == {1, 2, 3}
    assert kept(SamplingParams(1, top_p=0.6)) == {1, 3}
    assert kept(SamplingParams(1, top_p=1e-9)) == {1}
    assert kept(SamplingParams(1, top_k=2, top_p=0.5)) == {1}
    assert kept(SamplingParams(1, temperature=0.0)) == {1}


def test_a_draw_does_not_depend_on_its_neighbours_and_never_leaves_the_vocabulary() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 50)
    samplings = [
        SamplingParams(1),
        SamplingParams(1, temperature=0.0),
        SamplingParams(1, top_k=5),
        SamplingParams(1, top_p=0.5),
    ] * 2
    uniforms = [0.0, 0.3, 1.0 - 2**-53, 0.9, 1.0 - 2**-53, 0.7]
    tokens, logprobs = draw(logits, samplings[:6], uniforms)
    for i in range(6):
        alone = draw(logits[i : i + 1], [samplings[i]], [uniforms[i]])
        assert alone[0] == [tokens[i]]
        assert alone[1] == pytest.approx([logprobs[i]], abs=1e-6)
        assert math.isfinite(logprobs[i])
    tokens, logprobs = draw(torch.full((1, 50), math.nan), [SamplingParams(1)], [0.5])
    assert 0 <= tokens[0] < 50
    assert math.isnan(logprobs[0])
