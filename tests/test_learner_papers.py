"""What algorithms have besides a loss per token, as their papers and authors have it: REINFORCE++'s divergence to go, aggregation,
the published numbers as defaults, epochs, value clipping, the adaptive coefficient of a divergence, and what dropped tokens
keep."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from slipstream.configs import load
from slipstream.configs.algorithm import (
    Algorithm,
    Cispo,
    ClipCov,
    DecoupledPpo,
    DualClipDecoupledPpo,
    DualClipPpo,
    Gae,
    Gspo,
    KlCov,
    KlInLoss,
    KlInReward,
    Masked,
    Ppo,
    Prime,
    ReinforcePP,
    ReinforcePPBaseline,
    Sapo,
    Sppo,
)
from slipstream.configs.backends import Fsdp2
from slipstream.configs.schema import Learner, Model, Optimizer
from slipstream.learner.algorithms import advantage_of, loss_of
from slipstream.learner.algorithms.divergence import KL_COEFFICIENT, next_coefficient
from slipstream.learner.aux_models.critic import value_loss
from slipstream.learner.backend import listening
from slipstream.learner.batch import TrainBatch, make_batch
from slipstream.learner.checkpoint_folder import CheckpointState, read_state
from slipstream.learner.fsdp2.backend import Fsdp2Backend
from slipstream.learner.packing import microbatches, to_microbatch, with_proximal
from slipstream.learner.step import PolicyStepper
from slipstream.tests.columns import sequence
from slipstream.tests.test_learner_losses import make_row, make_sequences, one_rank, oracle
from slipstream.tests.test_learner_step import sequences

LONGEST = 50


# ---------------------------------------------------------------- REINFORCE++


def penalized(seed: int) -> TrainBatch:
    """Groups of 1 to 4 episodes with up to three branches, of which tokens at random were sampled and cost something."""
    rng = np.random.default_rng(seed)
    groups = [g for g, size in enumerate((3, 1, 4, 2)) for _ in range(size)]
    branches = [int(rng.integers(1, 4)) for _ in groups]
    sizes = rng.integers(2, 9, sum(branches))
    sampled = rng.random(int(sizes.sum())) < 0.6
    episode = np.repeat(np.arange(len(groups)), branches)
    by_token = np.repeat(episode, sizes)
    return make_batch(
        np.zeros(len(sampled), dtype=np.int32),
        sampled,
        sizes,
        episode=episode,
        groups=np.array(groups),
        rewards=rng.normal(size=len(groups)),
        lengths=np.bincount(by_token[sampled], minlength=len(groups)),
        greedy=np.zeros(len(groups), dtype=np.bool_),
        penalties=np.where(sampled, rng.normal(size=len(sampled)), 9.0).astype(np.float32),
    )


@pytest.mark.parametrize("config", [ReinforcePP(), ReinforcePPBaseline()], ids=["plain", "baseline"])
@pytest.mark.parametrize("seed", range(5))
def test_reinforce_pp_pays_the_divergence_to_go_and_normalizes_over_tokens(config, seed):
    """A_t = r - sum over i >= t of the penalty of token i, then less the mean and over the deviation of all tokens."""
    batch = penalized(seed)
    episode = np.repeat(batch.episode, batch.sizes).tolist()
    positions = [n for n in range(len(episode)) if batch.sampled[n]]
    company = {e for e, g in enumerate(batch.groups) if list(batch.groups).count(g) > 1}
    plain = {}
    for n in positions:
        earned = batch.rewards[episode[n]]
        if config == ReinforcePPBaseline():
            members = [r for r, g in zip(batch.rewards, batch.groups, strict=True) if g == batch.groups[episode[n]]]
            earned = earned - math.fsum(members) / len(members)
        to_go = math.fsum(float(batch.penalties[i]) for i in positions if i >= n and episode[i] == episode[n])
        plain[n] = earned - to_go
    counted = [v for n, v in plain.items() if config == ReinforcePP() or episode[n] in company]
    mean = math.fsum(counted) / len(counted)
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in counted) / len(counted))
    found = advantage_of(Algorithm(advantage=config))(batch)
    for n, value in plain.items():
        alone = config == ReinforcePPBaseline() and episode[n] not in company
        assert found[n] == pytest.approx(0.0 if alone else (value - mean) / deviation, rel=1e-9, abs=1e-9)
    assert np.isnan(found[~batch.sampled]).all()


# ---------------------------------------------------------------- numbers and aggregation as published


def test_defaults_are_what_the_authors_published():
    assert DecoupledPpo().clip == (0.2, 0.28)  # DAPO
    assert Ppo().clip == (0.2, 0.2)  # Schulman et al. 2017
    assert DualClipPpo().clip == DualClipDecoupledPpo().clip == (0.2, 0.2, 3.0)  # Ye et al. 2020: c = 3
    assert Gspo().clip == (3e-4, 4e-4)  # Zheng et al. 2025
    assert Cispo().clip[0] == 1.0  # MiniMax 2025: no lower bound
    assert Sapo().tau == (1.0, 1.05)  # Gao et al. 2025
    assert Sppo().eta == 1e3  # Wu et al. 2024; the authors' code has beta = 1 / eta
    assert ClipCov().held == {"share": 2e-4, "low": 1.0, "high": 5.0}  # the authors' code
    assert KlCov().held == {
        "share": 2e-3,
        "abs": 1.0,
        "k2": 0.0,
        "k3": 0.0,
    }  # the paper's for 7B; |log r| of the authors' code
    assert load("vapo").learner.algorithm.advantage == Gae(
        lam={"by_length": 0.05, "critic": 1.0}, critic_warmup=5, lr=3e-4
    )


@pytest.mark.parametrize(
    ("loss", "mean"),
    [(Gspo(), "sequence_mean"), (Sapo(), "sequence_mean"), (Sppo(), "sequence_sum"), (DecoupledPpo(), "token_mean")],
)
def test_a_loss_brings_the_aggregation_of_its_paper_unless_told_otherwise(loss, mean):
    assert Algorithm(loss=loss).mean == mean
    told = "fixed_length" if mean != "fixed_length" else "token_mean"
    assert Algorithm(loss=loss, aggregation=told).mean == told
    row, current, entropy = make_row(make_sequences(3, spread=0.0))
    totals = [
        loss_of(Algorithm(loss=loss, aggregation=kind), LONGEST)([row], one_rank)(current, entropy, row).loss_sum.item()
        for kind in ("auto", mean)
    ]
    assert totals[0] == totals[1]


def test_sppo_at_its_defaults_is_the_mean_square_of_its_paper():
    """Equation 4.4 over the sequences of a step, divided by 2 eta."""
    made = [s for s in make_sequences(spread=0.0) if s.loss_mask.any()]
    row, current, entropy = make_row(made)
    row = msgspec.structs.replace(row, behavior_logprobs=row.proximal_logprobs)
    output = loss_of(Algorithm(loss=Sppo()), LONGEST)([row], one_rank)(current, entropy, row)
    squares = [(math.fsum((s.current - s.proximal)[s.loss_mask]) - 1e3 * s.advantages[0]) ** 2 for s in made]
    tokens = int(row.loss_mask.sum())
    assert output.loss_sum.item() / tokens == pytest.approx(math.fsum(squares) / len(made) / 2e3, rel=1e-9)


# ---------------------------------------------------------------- what a correction drops


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_dropped_tokens_keep_their_divergence_and_their_entropy(estimator):
    """The bounds drop about half of the tokens; the terms are those of all of them."""
    made = make_sequences(2)
    row, current, entropy = make_row(made)
    reference = row.proximal_logprobs + 0.3 * torch.randn(len(current), generator=torch.manual_seed(0)).double()
    row = msgspec.structs.replace(row, reference_logprobs=reference)
    algorithm = Algorithm(
        correction=Masked(bounds=(0.9, 1.1)),
        kl=KlInLoss(coefficient=0.5, estimator=estimator),
        terms={"entropy": 0.25},
    )
    current, entropy = current.requires_grad_(), entropy.requires_grad_()
    output = loss_of(algorithm, LONGEST)([row], one_rank)(current, entropy, row)
    output.loss_sum.backward()
    bare = msgspec.structs.replace(algorithm, kl=Algorithm().kl, terms={})
    total, slopes, dropped = oracle(bare, made)
    p, f, h = (t[row.loss_mask].detach().numpy() for t in (current, reference, entropy))
    k2, k3 = (p - f) ** 2 / 2, np.exp(f - p) - 1 - (f - p)
    tokens = len(p)
    expected = total * tokens + 0.5 * (k2 if estimator == "k2" else k3).sum() - 0.25 * h.sum()
    assert tokens / 4 < dropped < tokens
    assert output.loss_sum.item() == pytest.approx(expected, rel=1e-9)
    surrogate = np.concatenate([by_logprob for by_logprob, _ in slopes])[row.loss_mask.numpy()] * tokens
    pull = 0.5 * ((p - f) if estimator == "k2" else 1 - np.exp(f - p))
    np.testing.assert_allclose(current.grad[row.loss_mask].numpy(), surrogate + pull, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(entropy.grad[row.loss_mask].numpy(), -0.25)


# ---------------------------------------------------------------- epochs


@pytest.fixture
def pair(folders: list[Path]) -> Iterator[list[Fsdp2Backend]]:
    made = [
        Fsdp2Backend(
            Model(path=str(folders[0])), Optimizer(lr=1e-3), Fsdp2(device="cpu"), temperature=1.0, timeout_s=60
        )
        for _ in range(2)
    ]
    yield made
    for backend in reversed(made):
        backend.close()


@pytest.mark.parametrize("minibatches", [1, 2])
def test_epochs_take_the_same_steps_again_around_the_same_proximal_policy(pair, minibatches, monkeypatch):
    monkeypatch.setattr("slipstream.learner.step.SHARE", 0.1)  # these are fewer than a thousand tokens
    ours, plain = pair
    config = Learner(optimizer=Optimizer(lr=1e-3), algorithm=Algorithm(minibatches=minibatches, epochs=3))
    batch = sequences(ours)
    stepper = PolicyStepper(config, ours, LONGEST)
    annotated = []
    done = stepper.step(
        batch, stepper.plan(batch), (), CheckpointState(0, 0), lambda loss: annotated.append(loss) or loss
    )
    assert len(done.results) == 3 * minibatches
    assert len(annotated) == minibatches  # single tokens are recorded once
    rows = [[to_microbatch(batch.select(row)) for row in step] for step in stepper.plan(batch)]
    rows = [[with_proximal(r, p) for r, p in zip(part, plain.logprobs(part), strict=True)] for part in rows]
    seen = list[float]()
    for _ in range(3):
        for part in rows:
            loss = loss_of(config.algorithm, LONGEST)(part, plain.gather)
            plain.step(part, listening(loss, lambda tokens, _: seen.extend(tokens.log_ratio.tolist())), 1e-3)
    ratios = np.exp(sorted(seen, reverse=True))
    assert len(ratios) == 3 * batch.loss_mask.sum()
    assert done.ratio_max == pytest.approx(ratios[0], rel=1e-4)
    assert done.ratio_p999 == pytest.approx(ratios[math.ceil(0.1 * len(ratios)) - 1], rel=1e-4)
    expected = dict(plain.named_weights())
    for name, tensor in ours.named_weights():
        assert torch.allclose(tensor, expected[name], atol=1e-6, rtol=0), name
    assert done.results[-1].means["clip_fraction"] > 0  # it has moved beyond the clip by then


# ---------------------------------------------------------------- the critic's clip


@pytest.mark.parametrize("clip", [0.0, 0.1, 0.5])
def test_value_clipping_is_that_of_the_authors_code(clip):
    rng = np.random.default_rng(1)
    mask = rng.random(40) < 0.7
    mask[0] = False
    before, now, returns = rng.normal(size=(3, 40)).astype(np.float32)
    batch = sequence(np.zeros(40, dtype=np.int32), mask, values=before, returns=returns)
    values = torch.from_numpy(now).requires_grad_()
    output = value_loss(values, values * 0, to_microbatch(batch), clip=clip)
    output.loss_sum.backward()
    total, slope = 0.0, np.zeros(40)
    for t in np.flatnonzero(mask):
        v, old, r = float(now[t]), float(before[t]), float(returns[t])
        held = old + min(max(v - old, -clip), clip)
        plain, clipped = (v - r) ** 2, (held - r) ** 2
        total += (max(plain, clipped) if clip else plain) / 2
        slope[t] = v - r if not clip or plain >= clipped else (held - r if held == v else 0.0)
    assert output.loss_sum.item() == pytest.approx(total, rel=1e-5)
    np.testing.assert_allclose(values.grad.numpy(), slope, rtol=1e-4, atol=1e-6)
    assert clip == 0.0 or (slope[mask] == 0).any()


# ---------------------------------------------------------------- an adaptive coefficient


@pytest.mark.parametrize("algorithm", [Algorithm(advantage=Prime()), Algorithm(kl=KlInReward())])
def test_the_divergence_is_reported_wherever_there_is_a_reference(algorithm):
    row, current, entropy = make_row(make_sequences(1))
    row = msgspec.structs.replace(row, reference_logprobs=row.proximal_logprobs - 0.3)
    sums = loss_of(algorithm, LONGEST)([row], one_rank)(current, entropy, row).sums
    log_r = (row.reference_logprobs - current)[row.loss_mask].double()
    assert sums["kl_reference"].item() == pytest.approx((log_r.exp() - 1 - log_r).sum().item(), rel=1e-5)
    assert "kl_reference" not in loss_of(Algorithm(), LONGEST)([row], one_rank)(current, entropy, row).sums


def test_the_coefficient_follows_ziegler():
    kl = KlInReward(coefficient={"start": 0.2, "target": 6.0})
    for divergence, error in ((6.0, 0.0), (6.6, 0.1), (100.0, 0.2), (5.4, -0.1), (0.0, -0.2)):
        assert next_coefficient(kl, 0.2, divergence) == pytest.approx(0.2 * (1 + 0.1 * error))
    assert next_coefficient(KlInReward(coefficient=0.3), 0.3, 100.0) == 0.3


def test_an_adaptive_coefficient_grows_while_the_policy_is_too_far_and_is_what_the_next_step_costs(pair, tmp_path):
    kl = KlInLoss(coefficient={"start": 0.5, "target": 1e-3})
    config = Learner(optimizer=Optimizer(lr=1e-3), algorithm=Algorithm(kl=kl))
    backend = pair[0]
    batch = sequences(backend)
    batch = msgspec.structs.replace(batch, reference_logprobs=batch.behavior_logprobs - 0.5 * batch.loss_mask)
    stepper = PolicyStepper(config, backend, LONGEST)
    assert stepper.carried(batch, None) == {KL_COEFFICIENT: 0.5}  # only the critic stepped
    state, losses = CheckpointState(0, 0), []
    for _ in range(3):
        batch = msgspec.structs.replace(batch, carried=state.algorithm)
        (row,) = microbatches(batch, 0, 1, 1000)
        row = with_proximal(row, backend.logprobs([row])[0])
        current = row.proximal_logprobs.clone()
        with_kl, without = (
            loss_of(a, LONGEST)([row], one_rank)(current, torch.zeros_like(current), row).loss_sum.item()
            for a in (config.algorithm, Algorithm())
        )
        p, f = (x[row.loss_mask].double() for x in (current, row.reference_logprobs))
        losses.append((with_kl - without) / ((f - p).exp() - 1 - (f - p)).sum().item())
        done = stepper.step(batch, stepper.plan(batch), (), state)
        state = CheckpointState(state.step + 1, state.version + 1, stepper.carried(batch, done))
    assert losses == pytest.approx([0.5, 0.5 * 1.02, 0.5 * 1.02**2], rel=1e-4)
    backend.save(tmp_path / "step-3", state).result(60)
    assert read_state(tmp_path / "step-3").algorithm == {KL_COEFFICIENT: pytest.approx(0.5 * 1.02**3)}
    assert backend.load(tmp_path / "step-3") == state


def test_a_fixed_coefficient_is_no_state(pair):
    batch = sequences(pair[0])
    stepper = PolicyStepper(Learner(), pair[0], LONGEST)
    done = stepper.step(batch, stepper.plan(batch), (), CheckpointState(0, 0))
    assert stepper.carried(batch, done) == {}
