"""Aux models: a reference policy whose divergence counts in the loss or in the reward."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from slipstream.configs import Config, load
from slipstream.configs.algorithm import Algorithm, Grpo, KlInLoss, KlInReward, TurnLevel
from slipstream.configs.backends import Fsdp2
from slipstream.configs.schema import Learner, Model, Optimizer
from slipstream.errors import ConfigError, LearnerError
from slipstream.launch.preflight import model as check_model
from slipstream.launch.run_inputs import RunInputs
from slipstream.launch.supervisor.factory import make_aux_models, make_backend
from slipstream.learner import packing
from slipstream.learner.algorithms import loss_of
from slipstream.learner.algorithms.divergence import kl_estimate
from slipstream.learner.aux_models.aux_models import AuxModels
from slipstream.learner.aux_models.base import LocalModel
from slipstream.learner.batch import Group
from slipstream.learner.fsdp2.backend import Fsdp2Backend, Fsdp2Model
from slipstream.learner.sft import negative_log_likelihood
from slipstream.tests import tiny
from slipstream.tests.columns import Columns, credit, flat, to_train_batch
from slipstream.tests.runs import tiny_policy
from slipstream.tests.test_learner_credit import branches
from slipstream.tests.test_learner_critic import scores_of

GROUPS: list[Group] = [
    (*branches(0, 0, [0.0, 1.0], split=1), *branches(0, 1, [0.0, 0.0]), *branches(0, 2, [1.0])),
    (*branches(1, 0, [0.5]), *branches(1, 1, [0.0, 0.25, 1.0])),
]
BRANCHES = [t for group in GROUPS for t in group]


@pytest.fixture(scope="module")
def reference_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_qwen3(tmp_path_factory.mktemp("reference") / "model", seed=7)


@pytest.fixture(scope="module")
def backends(folders, reference_folder):
    def backend(folder: Path) -> Fsdp2Backend:
        return Fsdp2Backend(Model(path=str(folder)), Optimizer(), Fsdp2(device="cpu"), temperature=1.0, timeout_s=60)

    policy, reference = backend(folders[0]), backend(reference_folder)
    yield policy, reference
    reference.close()
    assert policy.maximum(1.0) == 1.0  # the ranks are still together
    policy.close()


def learner(kl, tokens: int = 16) -> Learner:
    config = Learner(algorithm=Algorithm(kl=kl))
    return msgspec.structs.replace(
        config, backend=msgspec.structs.replace(config.backend, tokens_per_microbatch=tokens)
    )


def scored(config: Learner, policy, reference) -> Columns:
    """What a reference that the ranks hold says of the batch."""
    return asyncio.run(scores_of(AuxModels(config, LocalModel(config, [reference], policy)), GROUPS))


def expected(folder: Path) -> dict[str, np.ndarray]:
    """The reference's log-probs of sampled tokens, by transformers alone."""
    model = tiny.load(folder)
    scored = {}
    for t in BRANCHES:
        of_all = tiny.logprobs(model, t.token_ids.tolist()).numpy()
        chosen = [0.0, *of_all[range(len(t) - 1), t.token_ids[1:]]]
        scored[t.id] = np.where(t.loss_mask, chosen, 0.0)
    return scored


# ---------------------------------------------------------------- estimates


@pytest.mark.parametrize(
    ("kind", "value", "slope"),
    [
        ("k1", lambda p, f: p - f, lambda p, f: np.ones_like(p)),
        ("k2", lambda p, f: (p - f) ** 2 / 2, lambda p, f: p - f),
        ("k3", lambda p, f: np.exp(f - p) - 1 - (f - p), lambda p, f: 1 - np.exp(f - p)),
    ],
)
def test_estimates_and_their_gradients_are_those_of_the_formulas(kind, value, slope):
    rng = np.random.default_rng(0)
    p, f = -rng.exponential(2.0, 200), -rng.exponential(2.0, 200)
    current = torch.tensor(p, requires_grad=True)
    found = kl_estimate(kind, current, torch.tensor(f))
    found.sum().backward()
    assert found.tolist() == pytest.approx(value(p, f).tolist(), abs=1e-12)
    assert current.grad.tolist() == pytest.approx(slope(p, f).tolist(), abs=1e-12)


def test_k1_and_k3_are_unbiased_and_k3_is_never_negative():
    rng = np.random.default_rng(0)
    p, f = (np.log(x / x.sum()) for x in (rng.random(5), rng.random(5)))
    exact = (np.exp(p) * (p - f)).sum()
    for kind in ("k1", "k3"):
        by_token = kl_estimate(kind, torch.tensor(p), torch.tensor(f)).numpy()
        assert (np.exp(p) * by_token).sum() == pytest.approx(exact, abs=1e-12)
    assert (kl_estimate("k3", torch.tensor(p), torch.tensor(f)) >= 0).all()


def test_a_token_that_the_reference_rules_out_has_a_finite_gradient():
    current = torch.tensor([-1.0, -200.0], requires_grad=True)
    loss = kl_estimate("k3", current, torch.tensor([-300.0, -1.0])).sum()
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(current.grad).all()


# ---------------------------------------------------------------- scoring


async def test_a_run_without_a_reference_scores_nothing():
    batch = flat(GROUPS)
    assert await AuxModels(Learner()).score(batch) is batch


@pytest.mark.parametrize("tokens", [1, 16, 10_000])
def test_every_sampled_token_is_scored_by_the_reference_only(backends, reference_folder, tokens):
    scores = scored(learner(KlInLoss(), tokens), *backends)
    assert scores.penalties is None
    truth = expected(reference_folder)
    assert scores.reference_logprobs is not None
    assert scores.reference_logprobs.keys() == truth.keys()
    for name, values in truth.items():
        assert scores.reference_logprobs[name] == pytest.approx(values, abs=1e-4)


class Rank:
    """One of two ranks; a barrier stands in for the collective, and both score with the same model."""

    data_size = 2

    def __init__(self, rank: int, outputs: dict[int, torch.Tensor], met: threading.Barrier) -> None:
        self.data_rank, self._outputs, self._met = rank, outputs, met

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        self._outputs[self.data_rank] = values
        self._met.wait(60)
        return torch.cat([self._outputs[0], self._outputs[1]])


def test_ranks_score_their_parts_and_gather_the_whole(backends, reference_folder):
    outputs, met, turns = {}, threading.Barrier(2), threading.Lock()

    class Reference:
        def logprobs(self, rows):
            with turns:
                return backends[1].logprobs(rows)

    def scored_by(rank: int):
        return scored(learner(KlInLoss()), Rank(rank, outputs, met), Reference()).reference_logprobs

    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(scored_by, range(2)))
    assert len(outputs[0]) + len(outputs[1]) == sum(map(len, BRANCHES))
    assert min(len(outputs[0]), len(outputs[1])) > 0
    for found in both:
        for name, values in expected(reference_folder).items():
            assert found[name] == pytest.approx(values, abs=1e-4)


# ---------------------------------------------------------------- in the loss


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_in_the_loss_each_trained_token_costs_its_divergence(backends, kind):
    policy = backends[0]
    kl = KlInLoss(coefficient=0.5, estimator=kind)
    scores = scored(learner(kl), *backends)
    sequences = to_train_batch(GROUPS, Algorithm(), 5, 5, {"0.0.2": "late"}, scores=scores)
    rows = packing.microbatches(sequences, 0, 1, 16)
    rows = [packing.with_proximal(row, p) for row, p in zip(rows, policy.logprobs(rows), strict=True)]
    trained = sum(int(row.loss_mask.sum()) for row in rows)
    with_kl, without = (loss_of(Algorithm(kl=k), longest=64)(rows, policy.gather) for k in (kl, Algorithm().kl))
    difference, reported, truth = 0.0, 0.0, 0.0
    for row in rows:
        zeros = torch.zeros(len(row.token_ids))
        one, other = (loss(row.proximal_logprobs, zeros, row) for loss in (with_kl, without))
        difference += float(one.loss_sum - other.loss_sum)
        reported += float(one.sums["kl_reference"])
        p, f = row.proximal_logprobs[row.loss_mask].double(), row.reference_logprobs[row.loss_mask].double()
        truth += {"k1": p - f, "k2": (p - f) ** 2 / 2, "k3": (f - p).exp() - 1 - (f - p)}[kind].sum().item()
    assert difference == pytest.approx(0.5 * truth, rel=1e-4)
    assert reported > 0
    result = policy.step(rows, with_kl, 0.0)
    assert result.means["kl_reference"] == pytest.approx(reported / trained, rel=1e-4)


def test_rows_without_a_reference_cannot_be_held_near_it(backends):
    rows = packing.microbatches(to_train_batch(GROUPS, Algorithm(), 5, 5), 0, 1, 16)
    loss = loss_of(Algorithm(kl=KlInLoss()), longest=64)(rows, backends[0].gather)
    with pytest.raises(LearnerError, match="reference policy, whose log-probs these rows lack"):
        backends[0].step(rows, loss, 0.0)


# ---------------------------------------------------------------- in the reward


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_in_the_reward_an_episode_pays_for_all_its_sampled_tokens(backends, reference_folder, kind):
    scores = scored(learner(KlInReward(coefficient=0.25, estimator=kind)), *backends)
    truth = expected(reference_folder)
    paid: dict[str, float] = {}
    for t in BRANCHES:
        d = t.behavior_logprobs[t.loss_mask] - truth[t.id][t.loss_mask]
        costs = 0.25 * {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) - 1 + d}[kind]
        assert scores.penalties[t.id][t.loss_mask] == pytest.approx(costs, rel=1e-3, abs=1e-3)
        assert not scores.penalties[t.id][~t.loss_mask].any()
        paid[t.episode] = paid.get(t.episode, 0.0) + scores.penalties[t.id].sum(dtype=np.float64)
    found = credit(GROUPS, Algorithm(advantage=Grpo(normalize=False)), scores).advantages
    for group in GROUPS:
        left = {t.episode: t.reward - paid[t.episode] for t in group}
        for t in group:
            assert found[t.id][t.loss_mask] == pytest.approx(left[t.episode] - np.mean(list(left.values())))


def test_in_the_reward_a_turn_pays_for_its_own_tokens():
    group = (*branches(0, 0, [1.0, 2.0]), *branches(0, 1, [0.0, 0.0]))
    penalties = {t.id: np.where(t.loss_mask, np.float32(0), 0).astype(np.float32) for t in group}
    first = group[0].turns[0]
    penalties[group[0].id][first.start : first.end] = 0.5
    by_turn_only = Algorithm(advantage=TurnLevel(gamma=0.0, normalize=False))
    found = credit([group], by_turn_only, Columns(penalties=penalties)).advantages
    by_turn = [[found[t.id][turn.start] for turn in t.turns] for t in group]
    assert by_turn == [[0.25, 1.0], [-0.25, -1.0]]


# ---------------------------------------------------------------- config


def test_kinds_are_one_line_of_config():
    kl = load("quickstart", ["learner.algorithm.kl.kind=reward"]).learner.algorithm.kl
    assert kl == KlInReward(estimator="k1")
    assert load("quickstart", ["learner.algorithm.kl.kind=loss"]).learner.algorithm.kl == KlInLoss(estimator="k3")
    with pytest.raises(ConfigError, match=r"learner\.algorithm\.kl\.coefficient"):
        load("quickstart", ["learner.algorithm.kl.kind=loss", "learner.algorithm.kl.coefficient=-1"])
    with pytest.raises(ConfigError, match=r"estimator=k1 with .* allowed there are k2 and k3"):
        load("quickstart", ["learner.algorithm.kl.kind=loss", "learner.algorithm.kl.estimator=k1"])
    with pytest.raises(LearnerError, match="go with a reference policy"):
        AuxModels(learner(KlInLoss()))


@pytest.mark.parametrize("kl", [KlInLoss(), KlInReward()])
def test_a_row_that_fills_up_has_no_reference_and_needs_none(backends, kl):
    """Ranks with fewer rows than the others step such rows, and must report the same names."""
    scores = scored(learner(kl), *backends)
    sequences = to_train_batch(GROUPS, Algorithm(), 5, 5, scores=scores)
    (row,) = packing.microbatches(sequences, 0, 1, 1000)
    row, empty = packing.with_proximal(row, backends[0].logprobs([row])[0]), packing.scoring_microbatch([[0]])
    loss = loss_of(Algorithm(kl=kl), longest=64)([row, empty], backends[0].gather)
    outputs = [
        loss(torch.zeros(len(r.token_ids), requires_grad=True), torch.zeros(len(r.token_ids)), r) for r in (row, empty)
    ]
    assert outputs[0].sums.keys() == outputs[1].sums.keys()
    assert "kl_reference" in outputs[0].sums
    assert not any(float(value.detach()) for value in (outputs[1].loss_sum, *outputs[1].sums.values()))
    assert backends[0].step([row, empty], loss, 0.0).means["kl_reference"] > 0


def test_a_reference_that_cannot_be_one_is_named(tmp_path):
    policy, other = tiny_policy(tmp_path / "policy"), tmp_path / "other"

    def refusal(reference: Path) -> str:
        keys = [f"model.path={policy}", "learner.algorithm.kl.kind=loss", f"learner.algorithm.kl.reference={reference}"]
        with pytest.raises(ConfigError) as error:
            check_model(RunInputs(load("quickstart", keys)))
        return str(error.value)

    assert refusal(tmp_path).startswith("learner.algorithm.kl.reference: folder")
    shutil.copytree(policy, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] + 8}))
    assert "must give log-probs to the same tokens" in refusal(other)


def test_no_more_tokens_can_be_the_likeliest_than_there_are(policy):
    kl = f"learner.algorithm.kl={{kind: distillation, reference: {policy}, estimator: {{reverse: 100000}}}}"
    with pytest.raises(
        ConfigError, match=r"learner.algorithm.kl.estimator: .* of which 100000 cannot be .* allowed are 1 to"
    ):
        check_model(RunInputs(load("quickstart", [f"model.path={policy}", kl])))


# ---------------------------------------------------------------- how a reference is held


def aux_models_of(folder: Path, *keys: str) -> tuple[Config, Fsdp2Backend]:
    """A config with a reference, and its policy."""
    config = load("quickstart", [f"model.path={folder}", "learner.algorithm.kl.kind=loss", *keys])
    backend = make_backend(config, temperature=1.0)
    assert isinstance(backend, Fsdp2Backend)
    return config, backend


def optimizers() -> int:
    gc.collect()
    return sum(issubclass(type(one), torch.optim.Optimizer) for one in gc.get_objects())


def test_a_reference_has_no_optimizer_and_stays_as_it_was(folders):
    before = optimizers()
    config, policy = aux_models_of(folders[0])
    aux_models = make_aux_models(config, policy, {})
    assert optimizers() == before + 1
    first = asyncio.run(scores_of(aux_models, GROUPS)).reference_logprobs
    rows = packing.microbatches(to_train_batch(GROUPS, Algorithm(), 5, 5), 0, 1, 16)
    policy.step(rows, negative_log_likelihood, 1e-2)
    again = asyncio.run(scores_of(aux_models, GROUPS)).reference_logprobs
    assert all((again[name] == values).all() for name, values in first.items())
    truth = expected(folders[0])
    assert all(first[name] == pytest.approx(values, abs=1e-4) for name, values in truth.items())
    aux_models.close()
    policy.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_under_adapters_the_reference_is_the_policy_without_them(folders, dtype):
    """Whatever they have learned, bit for bit what a frozen copy of the model says; and they go on learning."""
    keys = ("learner.backend.lora_rank=4", f"model.dtype={dtype}", "weightsync.canary_tolerance=1")
    config, policy = aux_models_of(folders[0], *keys)
    aux_models = make_aux_models(config, policy, {})
    copy = Fsdp2Model(config.model, Fsdp2(device="cpu"), temperature=1.0, timeout_s=60)
    rows = packing.microbatches(to_train_batch(GROUPS, Algorithm(), 5, 5), 0, 1, 16)
    for _ in range(2):
        outputs, learned = aux_models._reference._models[0].logprobs(rows), policy.logprobs(rows)
        assert all(torch.equal(one, other) for one, other in zip(outputs, copy.logprobs(rows), strict=True))
        before = dict(policy.named_weights())
        assert policy.step(rows, negative_log_likelihood, 1e-2).grad_norm > 0
        assert any(not torch.equal(before[name], tensor) for name, tensor in policy.named_weights())
    assert any((one - other).abs().max() > 1e-2 for one, other in zip(outputs, learned, strict=True))
    aux_models.close()
    assert policy.maximum(1.0) == 1.0
    copy.close()
    policy.close()


def test_another_reference_of_adapters_is_a_model_of_its_own(folders, reference_folder):
    keys = ("learner.backend.lora_rank=4", f"learner.algorithm.kl.reference={reference_folder}")
    config, policy = aux_models_of(folders[0], *keys)
    aux_models = make_aux_models(config, policy, {})
    outputs = asyncio.run(scores_of(aux_models, GROUPS)).reference_logprobs
    assert all(outputs[name] == pytest.approx(values, abs=1e-4) for name, values in expected(reference_folder).items())
    aux_models.close()
    policy.close()
