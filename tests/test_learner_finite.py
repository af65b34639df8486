"""No log-prob that is merely extreme makes a step infinite: every loss with every correction, values and gradients, in float32 as
the learner computes them; and a random sweep whose steps do not depend on packing, micro-batches or ranks.

One freak token is ordinary: an engine's rounding, a truncated distribution, or a policy that moved far. In groups of equal rewards
its advantage is 0.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from slipstream.configs.algorithm import SELF_CORRECTING, Algorithm, KlInLoss, Masked, Rejected, Truncated
from slipstream.learner.algorithms import loss_of
from slipstream.learner.packing import MicroBatch
from slipstream.tests.test_learner_losses import AGGREGATIONS, CORRECTIONS, PUBLISHED, make_sequences, on_two_ranks, run

LONGEST = 64
RATIOS = (-200.0, -100.0, -89.0, -20.5, -1.0, 0.0, 1.0, 20.5, 89.0, 100.0, 200.0)
"""Nats: beyond every clip, beyond e^20, and on both sides of what float32's exponential can hold (e^88.7)."""


def weighs(correction) -> bool:
    """Whether the configuration refuses it with losses that correct themselves."""
    return isinstance(correction, Truncated) or getattr(correction, "weights", None) is not None


# Every loss at its defaults with every correction that the configuration allows with it.
PAIRS = [
    pytest.param(kind(), correction, id=f"{kind.__name__}-{correction}")
    for kind, correction in itertools.product(PUBLISHED, CORRECTIONS)
    if not (issubclass(kind, SELF_CORRECTING) and weighs(correction))
]


def after_context(values):
    """float32[N x K] with a 0 in front of each of N sequences."""
    return torch.nn.functional.pad(torch.atleast_2d(values), (1, 0)).flatten()


def row_of(current, proximal, behavior, advantages) -> MicroBatch:
    """Sequences of one token of context and these tokens, float32[N, K] each, or float32[K] of one sequence."""
    count, length = torch.atleast_2d(current).shape
    trained = after_context(torch.ones(count, length)).bool()
    return MicroBatch(
        token_ids=torch.arange(len(trained)),
        position_ids=torch.arange(length + 1).repeat(count),
        cu_seqlens=tuple(range(0, len(trained) + 1, length + 1)),
        loss_mask=trained,
        behavior_logprobs=after_context(behavior),
        proximal_logprobs=after_context(proximal),
        advantages=after_context(advantages),
        staleness=torch.where(trained, 0, -1).int(),
        mixed=torch.zeros_like(trained),
        positive=trained,
        reference_logprobs=after_context(proximal),
    )


def step(algorithm, row, current):
    """Loss, gradient by log-prob, and reported sums of one row."""
    probe = after_context(current).requires_grad_()
    output = loss_of(algorithm, LONGEST)([row], lambda values: values)(probe, torch.zeros_like(probe), row)
    output.loss_sum.backward()
    return output.loss_sum.item(), probe.grad.numpy(), {key: value.item() for key, value in output.sums.items()}


@pytest.mark.parametrize(("loss", "correction"), PAIRS)
def test_one_freak_log_prob_leaves_loss_and_gradient_finite(loss, correction):
    """Of three tokens the second is off, under one policy or another: in each of four sequences of a row under others."""
    algorithm = Algorithm(loss=loss, correction=correction, kl=KlInLoss())
    usual = torch.tensor([-1.0, -2.0, -0.5])
    for ratio, advantage in itertools.product(RATIOS, (-1.0, 0.0, 1.0)):
        off = torch.tensor([0.0, ratio, 0.0])
        freak = usual + off
        current = torch.stack([usual, usual, freak, freak])
        proximal = torch.stack([usual, freak, usual, freak])
        behavior = torch.stack([usual - off, usual, usual, usual])
        row = row_of(current, proximal, behavior, torch.full((4, 3), advantage))
        total, gradient, sums = step(algorithm, row, current)
        case = f"log-ratio {ratio}, A {advantage}"
        assert math.isfinite(total), case
        assert np.isfinite(gradient).all(), f"{case}: {gradient}"
        assert all(map(math.isfinite, sums.values())), f"{case}: {sums}"


@pytest.mark.parametrize("kind", [k for k in PUBLISHED if issubclass(k, SELF_CORRECTING)])
@pytest.mark.parametrize("correction", [Masked(), Rejected(level="token")], ids=["masked", "rejected"])
def test_what_is_dropped_leaves_the_others_as_they_are(kind, correction):
    """The loss and the slopes of the other tokens are those of a row in which the dropped one has advantage 0."""
    usual = torch.tensor([-1.0, -2.0, -0.5])
    behavior = torch.tensor([-1.1, -200.0, -0.6])
    algorithm = Algorithm(loss=kind(), correction=correction)
    total, gradient, sums = step(algorithm, row_of(usual, usual, behavior, -torch.ones(3)), usual)
    alone = row_of(usual, usual, torch.tensor([-1.1, -2.0, -0.6]), torch.tensor([-1.0, 0.0, -1.0]))
    expected, slopes, _ = step(algorithm, alone, usual)
    if isinstance(correction, Rejected):
        expected, slopes = 0.0, np.zeros(4)
    assert total == pytest.approx(expected, rel=1e-6)
    np.testing.assert_allclose(gradient, slopes, rtol=1e-6)
    assert sums["dropped"] == (3 if isinstance(correction, Rejected) else 1)


def freak_sequences(seed: int):
    """Random sequences of which one token in ten is off by up to 200 nats under some policy; advantages are often 0."""
    rng = np.random.default_rng(seed)
    sequences = make_sequences(seed, count=8, spread=float(rng.integers(0, 2)))
    for s in sequences:
        at = rng.random(len(s.ids)) < 0.1
        for column in (s.behavior, s.proximal, s.current):
            column += np.where(at & (rng.random(len(at)) < 0.5), rng.uniform(-200, 200, len(at)), 0.0)
        s.advantages[:] = rng.choice([0.0, 1.0, -1.0]) if rng.random() < 0.3 else s.advantages
    return sequences


def combination(seed: int) -> Algorithm:
    """A random allowed algorithm."""
    rng = np.random.default_rng(seed)
    loss = PUBLISHED[rng.integers(len(PUBLISHED))]()
    allowed = [c for c in CORRECTIONS if not (isinstance(loss, SELF_CORRECTING) and weighs(c))]
    return Algorithm(
        loss=loss,
        correction=allowed[rng.integers(len(allowed))],
        aggregation=AGGREGATIONS[rng.integers(len(AGGREGATIONS))],
        terms={"entropy": float(rng.choice([0.0, 0.1]))},
    )


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.full) for n in range(40, 400, 40))])
def test_a_random_sweep_stays_finite_and_the_same_however_it_is_cut(first):
    """40 of 400 combinations: in one row, in several, and on two ranks."""
    for seed in range(first, first + 40):
        algorithm, sequences = combination(seed), freak_sequences(seed)
        total, gradients, sums = run(algorithm, [[s] for s in sequences])
        case = f"{seed}: {algorithm}"
        assert math.isfinite(total), case
        assert all(np.isfinite(g).all() for row in gradients for g in row), case
        order = np.random.default_rng(seed).permutation(len(sequences)).tolist()
        shuffled = [sequences[i] for i in order]
        expected = [np.concatenate([gradients[i][kind] for i in order]) for kind in (0, 1)]
        for packing in ([shuffled], [shuffled[:3], shuffled[3:4], shuffled[4:]]):
            other, theirs, reported = run(algorithm, packing)
            assert other == pytest.approx(total, rel=1e-9), case
            assert reported == pytest.approx(sums, rel=1e-9), case
            for kind in (0, 1):
                found = np.concatenate([g[kind] for g in theirs])
                np.testing.assert_allclose(found, expected[kind], rtol=1e-9, atol=1e-12, err_msg=case)
        tokens = sum(int(s.loss_mask.sum()) for s in sequences)
        parts = on_two_ranks(algorithm, [[shuffled[:2], shuffled[2:3]], [shuffled[3:]]], tokens)
        assert sum(part[0] for part in parts) == pytest.approx(total, rel=1e-9), case
        found = np.concatenate([g[0] for part in parts for g in part[1]])
        np.testing.assert_allclose(found, expected[0], rtol=1e-9, atol=1e-12, err_msg=case)
