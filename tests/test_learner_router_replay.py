"""Router replay: the learner computes what the engine computed, whatever its own routers would choose, and learns from it.

Two ranks run this file as a script, see tests/ranks.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from slipstream.buffer.trajectory import Turn, VersionSpan
from slipstream.configs.backends import Fsdp2, Megatron
from slipstream.configs.schema import Model
from slipstream.errors import ConfigError
from slipstream.launch.supervisor.factory import make_critic
from slipstream.learner.backend import Backend
from slipstream.learner.batch import by_token, supervised, trainable, with_rows
from slipstream.learner.batch_trainer import why_unusable
from slipstream.learner.fsdp2.attention import plan_sharing
from slipstream.learner.fsdp2.backend import Fsdp2Backend
from slipstream.learner.model import read_routers
from slipstream.learner.packing import MicroBatch, microbatches, plan_steps, to_microbatch
from slipstream.learner.sft import negative_log_likelihood
from slipstream.tests.episodes import row_of as as_batch_row
from slipstream.tests.episodes import trajectory
from slipstream.tests.equality import OPTIMIZER, TEMPERATURE, VOCABULARY, make_model
from slipstream.tests.placed import PRIME, config_of
from slipstream.tests.ranks import DEADLINE_S, open_backend, run_on_two_ranks
from slipstream.tests.routing import chosen, other_experts, told
from slipstream.tests.test_learner_families import MIXTURES
from slipstream.tests.test_learner_families import write as write_family
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

REPLAY = Fsdp2(device="cpu", options=("router_replay",))
LENGTHS = (33, 7, 20, 12)
SEQUENCES = [torch.randint(0, VOCABULARY, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS]
RECORDED = [other_experts(n, 2, 2, 4, seed=n) for n in LENGTHS]

DEFAULT = ("qwen3_moe", "deepseek_v3")  # of the default tier: weights by a softmax, and by a sigmoid with a bias


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model") / "moe", tied=False, moe=True)


def row_of(sequences: Sequence[Sequence[int]], recorded: Sequence[torch.Tensor] | None) -> MicroBatch:
    """A row that trains every token but the first of each sequence; `recorded` [n, layers, top_k] each."""
    row = to_microbatch(supervised([(ids, [True] * len(ids)) for ids in sequences]))
    return row if recorded is None else msgspec.structs.replace(row, experts=torch.cat(list(recorded)))


def plain(folder: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def scored(model: PreTrainedModel, ids: Sequence[int], temperature: float = TEMPERATURE) -> torch.Tensor:
    """float32[n]: log-probs of all tokens but the first, 0 there."""
    tokens = torch.tensor([list(ids)])
    logits = model(tokens, use_cache=False).logits[0, :-1].float() / temperature
    return torch.cat([torch.zeros(1), logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]])


def expected(folder: str, sequences: Sequence[Sequence[int]], recorded: Sequence[torch.Tensor]) -> torch.Tensor:
    """What transformers computes, told the experts."""
    model, found = plain(folder), []
    for ids, experts in zip(sequences, recorded, strict=True):
        with told(model, experts), torch.no_grad():
            found.append(scored(model, ids))
    return torch.cat(found)


def test_without_replay_other_experts_are_another_model_and_with_it_they_are_the_same(folder: str) -> None:
    """An engine whose choices differ and whose weights agree: nothing is left of the mismatch."""
    engines = expected(folder, SEQUENCES, RECORDED)
    for config, largest in ((Fsdp2(device="cpu"), None), (REPLAY, 1e-5)):
        backend = open_backend(folder, config=config)
        (found,) = backend.logprobs([row_of(SEQUENCES, RECORDED)])
        backend.close()
        gap = (found - engines).abs().max()
        assert gap > 0.3 if largest is None else gap < largest


def test_a_perturbed_router_leaves_a_smaller_mismatch(folder: str) -> None:
    """The engine's router has other weights, too: replay takes away what the choice makes, not what the weights make."""
    engine = plain(folder)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in engine.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.add_(0.1 * torch.randn_like(parameter))
        sampled = torch.cat([scored(engine, ids) for ids in SEQUENCES])
    recorded = [chosen(engine, ids) for ids in SEQUENCES]
    gaps = []
    for config in (Fsdp2(device="cpu"), REPLAY):
        backend = open_backend(folder, config=config)
        (found,) = backend.logprobs([row_of(SEQUENCES, recorded)])
        backend.close()
        gaps.append(float((found - sampled).abs().mean()))
    assert gaps[1] < 0.7 * gaps[0]


@pytest.mark.parametrize("family", [f if f in DEFAULT else pytest.param(f, marks=pytest.mark.full) for f in MIXTURES])
def test_a_routers_own_choice_replayed_changes_nothing(tmp_path: Path, family: str) -> None:
    model = write_family(tmp_path / "model", family, MIXTURES[family])
    routers = read_routers(model)
    assert routers.layers == ((1,) if family in ("glm4_moe", "deepseek_v3") else (0, 1))
    sequences = [[3 + (7 * i + n) % 60 for i in range(n)] for n in (9, 17)]
    own = [chosen(plain(model), ids) for ids in sequences]
    backend = Fsdp2Backend(Model(path=model), OPTIMIZER, REPLAY, temperature=1.0, timeout_s=60)
    (free,) = backend.logprobs([row_of(sequences, None)])
    (replayed,) = backend.logprobs([row_of(sequences, own)])
    other = [other_experts(len(ids), len(routers.layers), 2, 4) for ids in sequences]
    (changed,) = backend.logprobs([row_of(sequences, other)])
    backend.close()
    torch.testing.assert_close(replayed, free, atol=1e-5, rtol=0)
    assert (changed - free).abs().max() > 0.01


def test_tokens_without_a_record_keep_their_routers_choice(folder: str) -> None:
    (ids, *_), (recorded, *_) = SEQUENCES, RECORDED
    half = recorded.clone()
    half[10:] = 0
    backend = open_backend(folder, config=REPLAY)
    (found,) = backend.logprobs([row_of([ids], [half])])
    (none,) = backend.logprobs([row_of([ids], [torch.zeros_like(half)])])
    backend.close()
    model = plain(folder)
    with torch.no_grad():
        torch.testing.assert_close(none, scored(model, ids), atol=1e-5, rtol=0)
    torch.testing.assert_close(found, expected(folder, [ids], [half]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("options", [(), ("recompute",)])
def test_the_gradient_is_the_one_through_the_recorded_experts(folder: str, options: Any) -> None:
    """That of the routers' own weights included, which decide how much each of the recorded experts counts."""
    config = Fsdp2(device="cpu", options=("router_replay", *options))
    backend = open_backend(folder, config=config)
    tokens = sum(LENGTHS) - len(LENGTHS)
    backend._backward([row_of(SEQUENCES, RECORDED)], negative_log_likelihood, tokens)
    found = {name: whole(p.grad) for name, p in backend._model.named_parameters()}
    backend.close()
    model = plain(folder)
    for ids, experts in zip(SEQUENCES, RECORDED, strict=True):
        with told(model, experts):
            (-scored(model, ids)[1:].sum() / tokens).backward()
    routers = 0
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=2e-6, rtol=1e-4)
        routers += name.endswith("mlp.gate.weight") and bool((found[name].abs().sum(1) > 1e-4).all())
    assert routers == 2


def whole(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def test_the_disagreement_is_the_share_of_choices_that_the_router_would_not_have_made(folder: str) -> None:
    (ids, *_) = SEQUENCES
    recorded = chosen(plain(folder), ids).to(torch.uint8)
    row = row_of([ids], [recorded])
    backend = open_backend(folder, config=REPLAY)
    assert backend.step([row], negative_log_likelihood, 0.0).disagreement == 0.0
    assert backend.step([row_of([ids], None)], negative_log_likelihood, 0.0).disagreement is None
    last = (
        recorded.clone()
    )  # the last layer of five tokens gets one other expert; what comes after them in it is nothing
    for at in range(5):
        last[at, 1, 0] = next(e for e in range(4) if e not in recorded[at, 1].tolist())
    backend.logprobs([row_of([ids], [last])])  # passes without a gradient do not count
    found = backend.step([row_of([ids], [last])], negative_log_likelihood, 0.0).disagreement
    assert found == pytest.approx(5 / (len(ids) * 2 * 2))
    backend.close()


def test_sequences_share_a_prefix_where_its_experts_are_the_same(folder: str) -> None:
    prompt, experts = SEQUENCES[0][:24], RECORDED[0][:24]
    sequences = [[*prompt, *own] for own in ([1, 2, 3], [4, 5], [6, 7, 8])]
    mask = [[False] * 24 + [True] * (len(ids) - 24) for ids in sequences]
    tails = [other_experts(len(ids) - 24, 2, 2, 4, seed=i) for i, ids in enumerate(sequences)]
    heads = [experts, experts, other_experts(24, 2, 2, 4, seed=9)]
    recorded = [torch.cat([head, tail]) for head, tail in zip(heads, tails, strict=True)]
    row = to_microbatch(supervised(list(zip(sequences, mask, strict=True))))
    row = msgspec.structs.replace(row, experts=torch.cat(recorded))
    assert len(plan_sharing(msgspec.structs.replace(row, experts=None)).kept) == len(row.token_ids) - 48
    assert len(plan_sharing(row).kept) == len(row.token_ids) - 24
    backend = open_backend(folder, config=REPLAY)
    (found,) = backend.logprobs([row])
    backend.close()
    wanted = expected(folder, sequences, recorded).where(row.loss_mask, 0.0)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("as_rows", [True, False], ids=["rows", "trajectories"])
def test_a_micro_batch_is_within_its_budget_where_a_prompts_experts_differ(as_rows: bool) -> None:
    """Of six members with one prompt three have experts in common; a head whose experts differ is computed once more."""
    budget, prompt = 60, np.array(SEQUENCES[0][:24], dtype=np.int32)
    mask, ids = np.arange(30) >= 24, [np.concatenate([prompt, np.full(6, i)]).astype(np.int32) for i in range(6)]
    heads = [other_experts(24, 2, 2, 4, seed=seed) for seed in (1, 2, 1, 3, 1, 4)]
    members = [
        msgspec.structs.replace(
            trajectory(f"0.0.{i}"),
            token_ids=ids[i],
            loss_mask=mask,
            behavior_logprobs=np.where(mask, np.float32(-1), np.float32(0)),
            version_spans=(VersionSpan(24, 30, 0),),
            turns=(Turn(24, 30, "stop"),),
            experts=torch.cat([head, other_experts(6, 2, 2, 4, seed=i)]).numpy().astype(np.uint8),
        )
        for i, head in enumerate(heads)
    ]
    if as_rows:
        batch = trainable(by_token([as_batch_row(one) for one in members], 0), 0)
        whole = with_rows(batch, members)
        (plan,) = plan_steps(batch, 1, 0, 1, budget, shares_prefixes=True)
        found = [to_microbatch(whole.select(row)) for row in plan]
    else:
        found = microbatches(trainable(by_token(members, 0), 0), 0, 1, budget, shares_prefixes=True)
    computed = [len(plan_sharing(row).kept) for row in found]
    assert max(computed) <= budget
    assert sum(computed) == 24 + 3 * 6 + 3 * 30


def test_a_process_reward_model_routes_by_itself(folder: str) -> None:
    """Whatever the policy's engine chose: it is another model by then."""
    keys = ("rollout.engine.kind=transformers", "learner.backend.options=[router_replay]")
    config, (ids, *_) = config_of(Path(folder), *PRIME, *keys), SEQUENCES
    judge = make_critic(config)
    (found,) = judge.logprobs([row_of([ids], RECORDED[:1])])
    result = judge.step([row_of([ids], RECORDED[:1])], negative_log_likelihood, 0.0)
    judge.close()
    with torch.no_grad():
        wanted = scored(plain(folder), ids, config.rollout.temperature)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    assert result.disagreement is None


@pytest.mark.parametrize(
    "forged",
    [np.full((4, 2, 2), 4), np.zeros((4, 3, 2)), np.zeros((4, 2, 3))],
    ids=["expert", "layers", "top_k"],
)
def test_a_row_with_experts_that_the_model_does_not_have_is_unusable(folder: str, forged: np.ndarray[Any, Any]) -> None:
    routers = read_routers(folder)
    row = trajectory("3.0.1")
    for experts in (forged.astype(np.uint8), np.zeros((4, 2, 2), np.uint16)):
        one = msgspec.structs.replace(row, experts=experts)
        assert why_unusable(one, VOCABULARY, routers) == (
            "trajectory '3.0.1.0': its experts are none that the model's routers choose from"
        )
        assert why_unusable(one, VOCABULARY) == ""
    assert why_unusable(msgspec.structs.replace(row, experts=np.ones((4, 2, 2), np.uint8)), VOCABULARY, routers) == ""


def test_a_model_without_known_routers_is_refused_by_name(tmp_path: Path) -> None:
    dense = make_model(tmp_path / "dense", tied=True)
    with pytest.raises(
        ConfigError, match=r"options=\[router_replay\]: .* is a model of family qwen3; allowed are .*qwen3_moe"
    ) as why:
        read_routers(dense)
    assert "\n" not in str(why.value)


# --- layouts of two ranks


class Job(msgspec.Struct):
    """Scores and one step of rows with recorded experts; both go to `out`."""

    model: str
    backend: Fsdp2 | Megatron
    out: str


def compute(job: Job) -> Backend:
    if isinstance(job.backend, Megatron):
        from slipstream.learner.megatron.backend import MegatronBackend

        backend: Any = MegatronBackend(
            Model(path=job.model), OPTIMIZER, job.backend, temperature=TEMPERATURE, timeout_s=DEADLINE_S
        )
    else:
        backend = open_backend(job.model, config=job.backend)
    shares = backend.data_size
    mine = [i for i in range(len(SEQUENCES)) if i % shares == backend.data_rank]
    rows = [row_of([SEQUENCES[i]], [RECORDED[i]]) for i in mine]
    scores = backend.logprobs(rows)
    result = backend.step(rows, negative_log_likelihood, OPTIMIZER.lr)
    numbers = torch.tensor([result.loss, result.grad_norm, result.disagreement or -1.0])
    weights = {name: tensor.cpu().clone() for name, tensor in backend.named_weights()}
    if backend.rank == 0:
        found = {f"score {i}": score for i, score in zip(mine, scores, strict=True)}
        save_file(
            found | {"numbers": numbers} | {k: v for k, v in weights.items() if k.endswith("gate.weight")}, job.out
        )
    return backend


TWO: dict[str, Fsdp2 | Megatron] = {
    "fsdp2": msgspec.structs.replace(REPLAY, ranks=2),
    "fsdp2-context": msgspec.structs.replace(REPLAY, ranks=2, parallel={"context": 2}),
    "fsdp2-experts": msgspec.structs.replace(REPLAY, ranks=2, parallel={"expert": 2}),
    "megatron-experts": Megatron(ranks=2, parallel={"expert": 2}, options=("router_replay",)),
    "megatron-tensor-experts": Megatron(ranks=2, parallel={"tensor": 2, "expert": 2}, options=("router_replay",)),
    "megatron-pipeline": Megatron(ranks=2, parallel={"pipeline": 2}, options=("router_replay",)),
    "megatron-recomputed": Megatron(ranks=2, parallel={"pipeline": 2}, options=("router_replay", "recompute")),
    "megatron-context": Megatron(ranks=2, parallel={"context": 2}, options=("router_replay",)),
}


@pytest.fixture(scope="module")
def results(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("results")
    run_on_two_ranks(root, __file__, [Job(folder, backend, str(root / name)) for name, backend in TWO.items()])
    return root


@pytest.mark.full
@pytest.mark.parametrize("name", TWO)
def test_every_layout_replays_the_same(results: Path, folder: str, name: str) -> None:
    found = load_file(results / name)
    wanted = expected(folder, SEQUENCES, RECORDED).split(list(LENGTHS))
    for i in range(len(SEQUENCES)):
        if f"score {i}" in found:
            torch.testing.assert_close(found[f"score {i}"], wanted[i], atol=1e-5, rtol=0)
    backend = open_backend(folder, config=REPLAY)
    result = backend.step([row_of(SEQUENCES, RECORDED)], negative_log_likelihood, OPTIMIZER.lr)
    weights = dict(backend.named_weights())
    backend.close()
    torch.testing.assert_close(
        found["numbers"], torch.tensor([result.loss, result.grad_norm, result.disagreement]), atol=1e-5, rtol=1e-5
    )
    for gate in (name for name in weights if name.endswith("gate.weight")):
        torch.testing.assert_close(found[gate], weights[gate], atol=1e-6, rtol=0)


if __name__ == "__main__":
    for index, one in enumerate(msgspec.json.decode(sys.argv[1], type=list[Job])):
        os.environ["MASTER_PORT"] = os.environ["PORTS"].split(",")[index]
        compute(one).close()
    sys.stdout.flush()
    os._exit(0)
