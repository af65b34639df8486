"""Losses and log-probs against independent float64 formulas, values and gradients."""

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.configs.algorithm import Algorithm, DecoupledPpo, Truncated
from slipstream.learner import logprobs
from slipstream.learner.algorithms import loss_of
from slipstream.learner.algorithms.policy_loss import effective_sample_size
from slipstream.learner.logprobs import token_logprobs
from slipstream.learner.packing import MicroBatch

CONFIG, CAP = DecoupledPpo(clip=(0.2, 0.3)), 2.0
LOSS = loss_of(Algorithm(loss=CONFIG, correction=Truncated(bounds=(0.0, CAP))), longest=64)([], lambda values: values)


def make_row(n=40, seed=0, drift=0.5, trained=None):
    """A row of random numbers and the current log-probs; `drift` is how far the three policies are apart."""
    rng = np.random.default_rng(seed)
    behavior = -rng.exponential(1.0, n)
    proximal = behavior + drift * rng.normal(size=n)
    current = proximal + drift * rng.normal(size=n)
    trained = rng.random(n) < 0.6 if trained is None else trained
    row = MicroBatch(
        token_ids=torch.zeros(n, dtype=torch.int64),
        position_ids=torch.arange(n),
        cu_seqlens=(0, n),
        loss_mask=torch.from_numpy(trained),
        behavior_logprobs=torch.from_numpy(behavior),
        proximal_logprobs=torch.from_numpy(proximal),
        advantages=torch.from_numpy(rng.normal(size=n)),
        staleness=torch.zeros(n, dtype=torch.int32),
        mixed=torch.zeros(n, dtype=torch.bool),
        positive=torch.zeros(n, dtype=torch.bool),
    )
    return row, torch.from_numpy(current)


def oracle(current, row):
    """Token by token, in plain Python floats: (loss, gradient, sums)."""
    gradient = np.zeros(len(current))
    total, sums = 0.0, dict.fromkeys(["importance", "importance_square", "kl", "clip_fraction"], 0.0)
    for i, p in enumerate(current):
        if not row.loss_mask[i]:
            continue
        q, b, a = float(row.proximal_logprobs[i]), float(row.behavior_logprobs[i]), float(row.advantages[i])
        weight = min(np.exp(q - b), CAP)
        r = np.exp(p - q)
        clipped = min(max(r, 1 - CONFIG.clip[0]), 1 + CONFIG.clip[1])
        total -= weight * min(r * a, clipped * a)
        active = (a >= 0 and r <= 1 + CONFIG.clip[1]) or (a < 0 and r >= 1 - CONFIG.clip[0])
        gradient[i] = -weight * r * a if active else 0.0
        w = np.exp(p - b)
        sums["importance"] += w
        sums["importance_square"] += w * w
        sums["kl"] += w - 1 - np.log(w)
        sums["clip_fraction"] += not active
    return total, gradient, sums


@pytest.mark.parametrize("seed", range(5))
def test_decoupled_ppo_equals_the_formula(seed):
    row, current = make_row(seed=seed)
    current.requires_grad_()
    entropy = torch.rand(len(current), dtype=torch.float64)
    output = LOSS(current, entropy, row)
    output.loss_sum.backward()
    total, gradient, sums = oracle(current.detach().numpy(), row)
    assert output.loss_sum.item() == pytest.approx(total, rel=1e-12)
    np.testing.assert_allclose(current.grad, gradient, rtol=1e-12)
    for name, value in sums.items():
        assert output.sums[name].item() == pytest.approx(value, rel=1e-12)
    assert output.sums["entropy"].item() == pytest.approx(entropy[row.loss_mask].sum().item())
    assert not any(value.requires_grad for value in output.sums.values())
    assert 0 < sums["clip_fraction"] < row.loss_mask.sum()


def test_the_gradient_is_that_of_finite_differences():
    row, current = make_row(seed=7, drift=0.1)
    zeros = torch.zeros_like(current)
    current.requires_grad_()
    LOSS(current, zeros, row).loss_sum.backward()
    for i in range(len(current)):
        step = torch.zeros_like(current)
        step[i] = 1e-6
        high, low = (LOSS((current + sign * step).detach(), zeros, row).loss_sum for sign in (1, -1))
        assert current.grad[i].item() == pytest.approx(((high - low) / 2e-6).item(), abs=1e-7)


def test_on_policy_it_is_the_plain_policy_gradient():
    row, _ = make_row(drift=0.0)
    current = row.behavior_logprobs.clone().requires_grad_()
    output = LOSS(current, torch.zeros_like(current), row)
    output.loss_sum.backward()
    torch.testing.assert_close(current.grad, -row.advantages * row.loss_mask)
    tokens = int(row.loss_mask.sum())
    means = {name: value.item() / tokens for name, value in output.sums.items()}
    assert effective_sample_size(means) == pytest.approx(1.0)
    assert (means["kl"], means["clip_fraction"]) == (0.0, 0.0)


@given(st.floats(-1e4, 1e4), st.integers(0, 39))
@settings(deadline=None)
def test_untrained_tokens_have_no_influence(value, position):
    trained = np.ones(40, dtype=bool)
    trained[position] = False
    row, current = make_row(trained=trained)
    outputs = []
    for number in (0.0, value, float("nan")):
        for array in (current, row.behavior_logprobs, row.proximal_logprobs, row.advantages):
            array[position] = number
        probe = current.clone().requires_grad_()
        output = LOSS(probe, current, row)
        output.loss_sum.backward()
        outputs.append((output.loss_sum.item(), probe.grad.tolist(), {k: v.item() for k, v in output.sums.items()}))
    assert outputs[0] == outputs[1] == outputs[2]
    assert outputs[0][1][position] == 0.0


@given(st.permutations(range(40)))
@settings(deadline=None)
def test_the_order_of_tokens_changes_nothing(order):
    row, current = make_row()
    arrays = ("loss_mask", "behavior_logprobs", "proximal_logprobs", "advantages")
    shuffled = msgspec.structs.replace(row, **{name: getattr(row, name)[order] for name in arrays})
    here, there = current.clone().requires_grad_(), current[order].requires_grad_()
    LOSS(here, current, row).loss_sum.backward()
    output = LOSS(there, current[order], shuffled)
    output.loss_sum.backward()
    assert output.loss_sum.item() == pytest.approx(LOSS(here, current, row).loss_sum.item(), rel=1e-12)
    assert torch.equal(there.grad, here.grad[order])


def test_a_row_without_trained_tokens_gives_zero_and_the_same_names():
    row, current = make_row(trained=np.zeros(40, dtype=bool))
    current.requires_grad_()
    output = LOSS(current, current.detach(), row)
    output.loss_sum.backward()
    assert output.loss_sum.item() == 0.0
    assert not current.grad.any()
    full = LOSS(make_row()[1], current.detach(), make_row()[0])
    assert output.sums.keys() == full.sums.keys()


def test_a_freak_token_leaves_the_metrics_finite():
    row, current = make_row(trained=np.ones(40, dtype=bool))
    row.behavior_logprobs[3] = -500.0
    output = LOSS(current, current, row)
    assert torch.isfinite(output.loss_sum)
    assert all(torch.isfinite(value) for value in output.sums.values())
    assert effective_sample_size({k: v.item() / 40 for k, v in output.sums.items()}) < 0.05


@pytest.mark.parametrize("chunk", [1, 70, 1 << 20])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_token_logprobs_and_entropy_equal_log_softmax(monkeypatch, chunk, temperature):
    monkeypatch.setattr(logprobs, "CPU_CHUNK", chunk)
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(9, 33, generator=generator)).requires_grad_()
    targets = torch.randint(0, 33, (9,), generator=generator)
    weights = torch.randn(2, 9, generator=generator)
    chosen, entropy = token_logprobs(logits, targets, temperature)
    (chosen @ weights[0] + entropy @ weights[1]).backward()

    exact = logits.detach().double().requires_grad_()
    logp = (exact / temperature).log_softmax(-1)
    expected, uncertainty = logp[range(9), targets], -(logp.exp() * logp).sum(-1)
    (expected @ weights[0].double() + uncertainty @ weights[1].double()).backward()
    torch.testing.assert_close(chosen.double(), expected, atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(entropy.double(), uncertainty, atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(logits.grad.double(), exact.grad, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("chunk", [70, 1 << 20])
def test_log_probs_of_several_tokens_at_a_position_equal_log_softmax(monkeypatch, chunk):
    """The same token may be asked for twice."""
    monkeypatch.setattr(logprobs, "CPU_CHUNK", chunk)
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(9, 33, generator=generator)).requires_grad_()
    targets = torch.randint(0, 33, (9, 4), generator=generator)
    targets[:, 3] = targets[:, 0]
    weights, of_entropy = torch.randn(9, 4, generator=generator), torch.randn(9, generator=generator)
    chosen, entropy = token_logprobs(logits, targets, 0.6)
    ((chosen * weights).sum() + entropy @ of_entropy).backward()

    exact = logits.detach().double().requires_grad_()
    logp = (exact / 0.6).log_softmax(-1)
    expected = logp.gather(-1, targets)
    ((expected * weights).sum() - (logp.exp() * logp).sum(-1) @ of_entropy.double()).backward()
    torch.testing.assert_close(chosen.double(), expected, atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(logits.grad.double(), exact.grad, atol=4e-6, rtol=1e-5)


def test_forbidden_tokens_leave_the_entropy_finite():
    logits = torch.tensor([[0.0, 0.0, float("-inf")]], requires_grad=True)
    chosen, entropy = token_logprobs(logits, torch.tensor([0]), 1.0)
    (chosen + entropy).sum().backward()
    assert entropy.item() == pytest.approx(np.log(2))
    assert torch.isfinite(logits.grad).all()
    impossible, _ = token_logprobs(logits, torch.tensor([2]), 1.0)
    assert impossible.item() == float("-inf")  # and no large number, which would pass for a log-prob
