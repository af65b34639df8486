"""Every policy loss, correction and aggregation against float64 formulas written from the papers, values and gradients; what must
not matter (order, packing, ranks, masked tokens); and one real optimizer step of each by one line of config."""

from __future__ import annotations

import itertools
import math
import threading

import msgspec
import numpy as np
import pytest
import torch
from slipstream.configs import load
from slipstream.configs.algorithm import (
    SELF_CORRECTING,
    Algorithm,
    AutoCorrection,
    Cispo,
    ClipCov,
    DecoupledPpo,
    Dpo,
    DualClipDecoupledPpo,
    DualClipPpo,
    Gspo,
    KlCov,
    Masked,
    NoCorrection,
    Ppo,
    PythonFunction,
    Rejected,
    Sapo,
    Sppo,
    Truncated,
)
from slipstream.configs.backends import Fsdp2
from slipstream.configs.schema import Optimizer
from slipstream.errors import LearnerError
from slipstream.learner.algorithms import LOSSES, loss_of
from slipstream.learner.algorithms.covariance import random_tokens
from slipstream.learner.backend import BackendStepResult
from slipstream.learner.fsdp2.backend import Fsdp2Backend
from slipstream.learner.metrics import PolicyStepResult
from slipstream.learner.packing import MicroBatch
from slipstream.tests.test_learner_fsdp2 import make_model, make_rows

LONGEST = 50
# DPO compares whole episodes, see test_learner_preferences.py.
PUBLISHED = [kind for kind in LOSSES if kind not in (PythonFunction, Dpo)]
# Wide clips where the defaults would clip every random number, a share that selects several of a hundred tokens.
SURROGATES = [
    DecoupledPpo(),
    Ppo(),
    DualClipPpo(clip=(0.3, 0.2, 3.0)),
    DualClipDecoupledPpo(clip=(0.2, 0.1, 1.5)),
    Gspo(clip=(0.1, 0.15)),
    Cispo(clip=(1.0, 0.5)),
    Cispo(clip=(0.4, 0.5)),
    Sapo(),
    Sapo(tau=(0.5, 2.0)),
    ClipCov(held={"share": 1.0}),
    KlCov(held={"share": 0.05}),
    KlCov(held={"share": 0.05, "abs": 0.0, "k2": 0.7, "k3": 0.2}),
]
CORRECTIONS = [
    AutoCorrection(),
    NoCorrection(),
    *[Truncated(level=level, bounds=(0.0, 1.3)) for level in ("token", "sequence", "geometric")],
    Truncated(bounds=(0.8, 1.3)),
    *[Masked(level=level, bounds=(0.7, 1.4)) for level in ("token", "sequence")],
    Masked(level="geometric", bounds=(0.97, 1.04)),
    Rejected(level="token", bounds=(0.3, 3.0)),
    Rejected(level="sequence", bounds=(0.6, 1.5)),
    Rejected(level="geometric", bounds=(0.97, 1.04)),
    Rejected(level="geometric", bounds=(0.97, 1.04), weights=Truncated(bounds=(0.0, 1.2))),
]
PAIRS = [
    (s, c)
    for s in SURROGATES
    for c in CORRECTIONS
    if not (isinstance(s, SELF_CORRECTING) and (isinstance(c, Truncated) or getattr(c, "weights", None)))
]
AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum", "fixed_length")
# Parts know nothing of each other: every pair with one aggregation, in turn, is enough for properties.
TRIPLES = [(*pair, AGGREGATIONS[index % 4]) for index, pair in enumerate(PAIRS)]


def name(section):
    return (
        section
        if isinstance(section, str)
        else "-".join(str(v) for v in msgspec.to_builtins(section).values() if isinstance(v, str))
    )


class Sequence(msgspec.Struct):
    """T tokens: what was sampled, and the log-probs under the three policies."""

    ids: np.ndarray
    loss_mask: np.ndarray
    behavior: np.ndarray
    proximal: np.ndarray
    current: np.ndarray
    advantages: np.ndarray
    entropy: np.ndarray


ARRAYS = ("behavior", "proximal", "current", "advantages", "entropy")


def make_sequences(seed=0, count=12, drift=0.3, spread=1.0):
    """Random sequences, one of them without a trained token; a few tokens are far off the policies that are compared."""
    rng = np.random.default_rng(seed)
    sequences = []
    for index in range(count):
        n = int(rng.integers(3, 25))
        trained = rng.random(n) < 0.6
        trained[0], trained[-1] = False, True
        behavior = -rng.exponential(1.5, n)
        proximal = behavior + drift * rng.normal(size=n) / math.sqrt(n)
        proximal = proximal + np.where(rng.random(n) < 0.1, 3 * drift, 0) * rng.normal(size=n)
        current = proximal + drift * rng.normal(size=n)
        current = current + np.where(rng.random(n) < 0.1, 5 * drift, 0)
        advantages = rng.normal() + spread * rng.normal(size=n)
        if index == 3:
            trained[:] = False
        sequences.append(
            Sequence(rng.integers(0, 90, n), trained, behavior, proximal, current, advantages, rng.random(n))
        )
    return sequences


def make_row(sequences):
    """The row of these sequences, and the current log-probs and entropies in it."""
    lengths = [len(s.ids) for s in sequences]
    joined = {key: torch.from_numpy(np.concatenate([getattr(s, key) for s in sequences])) for key in ARRAYS}
    trained = torch.from_numpy(np.concatenate([s.loss_mask for s in sequences]))
    row = MicroBatch(
        token_ids=torch.from_numpy(np.concatenate([s.ids for s in sequences])),
        position_ids=torch.cat([torch.arange(n) for n in lengths]),
        cu_seqlens=(0, *np.cumsum(lengths).tolist()),
        loss_mask=trained,
        behavior_logprobs=joined["behavior"],
        proximal_logprobs=joined["proximal"],
        advantages=joined["advantages"],
        staleness=torch.where(trained, torch.cat([torch.arange(n) % 3 for n in lengths]), -1).int(),
        mixed=torch.zeros_like(trained),
        positive=trained & torch.cat([torch.full((n,), i % 2 == 0) for i, n in enumerate(lengths)]),
    )
    return row, joined["current"], joined["entropy"]


def one_rank(values):
    """`Backend.gather` of a single rank."""
    return values


def cut(sequences, *lengths):
    """Rows of so many sequences, and one of the rest."""
    ends = [0, *np.cumsum(lengths).tolist(), len(sequences)]
    return [sequences[start:end] for start, end in itertools.pairwise(ends)]


def run(algorithm, packing, gather=one_rank, tokens=None):
    """Loss of a step, gradients by log-prob and by entropy of each row, reported sums; as a backend does it."""
    rows = [make_row(sequences) for sequences in packing]
    tokens = tokens or sum(int(row.loss_mask.sum()) for row, _, _ in rows)
    loss = loss_of(algorithm, LONGEST)([row for row, _, _ in rows], gather)
    total, gradients, sums = 0.0, [], {}
    for row, current, entropy in rows:
        current, entropy = current.clone().requires_grad_(), entropy.clone().requires_grad_()
        output = loss(current, entropy, row)
        (output.loss_sum / tokens).backward()
        zeros = torch.zeros_like(current)
        gradients.append([(zeros if x.grad is None else x.grad).numpy() for x in (current, entropy)])
        total += output.loss_sum.item() / tokens
        for key, value in output.sums.items():
            assert not value.requires_grad
            sums[key] = sums.get(key, 0.0) + value.item()
    return total, gradients, sums


# ---------------------------------------------------------------- the oracle: float64, one token of one sequence at a time


def oracle_token(config, s, t, ratio_s, chosen):
    """(loss, its derivative by the current log-prob) of one token, before any correction."""
    p, q, b, a = s.current[t], s.proximal[t], s.behavior[t], s.advantages[t]
    if isinstance(config, Cispo):
        w = max(1 - config.clip[0], min(math.exp(p - b), 1 + config.clip[1]))
        return -w * a * p, -w * a
    if isinstance(config, Sapo):
        r, tau = math.exp(p - q), config.tau[0] if a > 0 else config.tau[1]
        gate = 1 / (1 + math.exp(-tau * (r - 1)))
        return -a * gate * 4 / tau, -a * 4 * gate * (1 - gate) * r
    if isinstance(config, KlCov):
        r = math.exp(p - q)
        by_abs, k2, k3 = (chosen * config.held[key] for key in ("abs", "k2", "k3"))
        penalty = by_abs * abs(p - q) + k2 * (p - q) ** 2 / 2 + k3 * (r - 1 - (p - q))
        return -r * a + penalty, -r * a + by_abs * math.copysign(1, p - q) + k2 * (p - q) + k3 * (r - 1)
    if isinstance(config, ClipCov) and chosen:
        return 0.0, 0.0
    r = ratio_s if isinstance(config, Gspo) else math.exp(p - (b if isinstance(config, Ppo | DualClipPpo) else q))
    low, high = 1 - config.clip[0], 1 + config.clip[1]
    objective = min(r * a, min(max(r, low), high) * a)
    flat = (a > 0 and r > high) or (a < 0 and r < low)
    if isinstance(config, DualClipPpo | DualClipDecoupledPpo) and a < 0 and config.clip[2] * a > objective:
        objective, flat = config.clip[2] * a, True
    return -objective, 0.0 if flat else -r * a


def oracle_chosen(config, sequences):
    """For Clip-Cov with share 1 and KL-Cov: positions (sequence, token) of the tokens they treat differently."""
    positions = [(i, t) for i, s in enumerate(sequences) for t in np.flatnonzero(s.loss_mask)]
    logq = np.array([sequences[i].proximal[t] for i, t in positions])
    a = np.array([sequences[i].advantages[t] for i, t in positions])
    cov = dict(zip(positions, (logq - logq.mean()) * (a - a.mean()), strict=True))
    if isinstance(config, ClipCov):
        return {position for position, c in cov.items() if 1 <= c <= 5}
    if isinstance(config, KlCov):
        ranked = sorted(positions, key=lambda position: -cov[position])
        return {
            position
            for position in ranked[: max(1, math.floor(config.held["share"] * len(positions)))]
            if cov[position] > 0
        }
    return set()


def oracle_correction(config, algorithm, s):
    """(weight, kept) of each trained token of one sequence."""
    positions = np.flatnonzero(s.loss_mask)
    own = isinstance(algorithm.loss, SELF_CORRECTING)
    if isinstance(config, AutoCorrection):
        config = NoCorrection() if own else Truncated(level="token", bounds=(0.0, 2.0))
    if isinstance(config, NoCorrection):
        return {t: (1.0, True) for t in positions}
    token = {t: math.exp(s.proximal[t] - s.behavior[t]) for t in positions}
    product = math.prod(token.values())
    levels = {
        "token": token,
        "sequence": dict.fromkeys(positions, product),
        "geometric": dict.fromkeys(positions, product ** (1 / max(1, len(positions)))),
    }
    w, (low, high) = levels[config.level], config.bounds
    if isinstance(config, Truncated):
        return {t: (max(low, min(w[t], high)), True) for t in positions}
    inside = {t: low <= w[t] <= high for t in positions}
    if isinstance(config, Rejected):
        inside = dict.fromkeys(positions, all(inside.values()))
        if config.weights is not None:
            w = {t: min(levels[config.weights.level][t], config.weights.bounds[1]) for t in positions}
    return {t: (1.0 if own else w[t], inside[t]) for t in positions}


def oracle(algorithm, sequences):
    """Loss of the step, gradients by current log-prob and by entropy of each sequence, number of tokens without loss."""
    trained = [s for s in sequences if s.loss_mask.any()]
    n = sum(int(s.loss_mask.sum()) for s in trained)
    chosen = oracle_chosen(algorithm.loss, sequences)
    total, gradients, dropped, entropy = 0.0, [], 0, algorithm.terms["entropy"]
    for i, s in enumerate(sequences):
        by_logprob, by_entropy = np.zeros(len(s.ids)), np.zeros(len(s.ids))
        positions = np.flatnonzero(s.loss_mask)
        ratio_s = math.exp(np.mean(s.current[positions] - s.proximal[positions])) if len(positions) else 1.0
        divisor = {
            "token_mean": n,
            "sequence_mean": len(trained) * len(positions),
            "sequence_sum": len(trained),
            "fixed_length": len(trained) * LONGEST,
        }[algorithm.mean]
        for t, (weight, kept) in oracle_correction(algorithm.correction, algorithm, s).items():
            dropped += not kept
            total -= entropy * s.entropy[t] / divisor  # what the correction drops keeps it
            by_entropy[t] = -entropy / divisor
            if kept:
                loss, slope = oracle_token(algorithm.loss, s, t, ratio_s, (i, t) in chosen)
                total, by_logprob[t] = total + weight * loss / divisor, weight * slope / divisor
        gradients.append([by_logprob, by_entropy])
    return total, gradients, dropped


# ---------------------------------------------------------------- equal to the formulas


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(("surrogate", "correction"), PAIRS, ids=name)
def test_values_and_gradients_equal_the_papers_formulas(surrogate, correction, aggregation):
    """In one row, in one and another, and in several of which one is a single sequence."""
    dropped_any = clipped_any = 0
    for seed, entropy, lengths in ((0, 0.0, ()), (1, 0.01, (5,)), (2, 0.5, (1, 4))):
        algorithm = Algorithm(
            loss=surrogate, correction=correction, aggregation=aggregation, terms={"entropy": entropy}
        )
        sequences = make_sequences(seed)
        total, gradients, sums = run(algorithm, cut(sequences, *lengths))
        expected, slopes, dropped = oracle(algorithm, sequences)
        assert total == pytest.approx(expected, rel=1e-9, abs=1e-12)
        found = [np.concatenate(kind) for kind in zip(*gradients, strict=True)]
        theirs = [np.concatenate(kind) for kind in zip(*slopes, strict=True)]
        for actual, wanted in zip(found, theirs, strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=1e-9, atol=1e-12)
        assert sums["dropped"] == dropped
        kept = sum(int(s.loss_mask.sum()) for s in sequences) - dropped
        assert sums["clip_fraction"] < kept
        dropped_any, clipped_any = dropped_any + dropped, clipped_any + sums["clip_fraction"]
    # Both sides of every bound were visited.
    assert (dropped_any > 0) == isinstance(correction, Masked | Rejected)
    assert (clipped_any > 0) == (not isinstance(surrogate, Sapo))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("surrogate", [s for s in SURROGATES if not isinstance(s, Cispo)], ids=name)
def test_gradients_are_those_of_finite_differences(surrogate, aggregation):
    """CISPO's weight carries no gradient: its closed form has to do. With one advantage per sequence GSPO has no stopped one."""
    algorithm = Algorithm(loss=surrogate, correction=NoCorrection(), aggregation=aggregation, terms={"entropy": 0.1})
    sequences = make_sequences(5, count=5, spread=0.0)
    _, gradients, _ = run(algorithm, [sequences])
    row, current, entropy = make_row(sequences)
    loss, tokens = loss_of(algorithm, LONGEST)([row], one_rank), int(row.loss_mask.sum())
    with torch.no_grad():
        for position in range(len(current)):
            step = 1e-6 * (torch.arange(len(current)) == position)
            up, down = (loss(current + h * step, entropy, row).loss_sum.item() / tokens for h in (1, -1))
            assert gradients[0][0][position] == pytest.approx((up - down) / 2e-6, abs=1e-7)


def test_kl_cov_holds_no_token_whose_covariance_is_negative():
    algorithm, sequences = Algorithm(loss=KlCov(held={"share": 1.0}), correction=NoCorrection()), make_sequences()
    total, _, sums = run(algorithm, [sequences])
    assert total == pytest.approx(oracle(algorithm, sequences)[0], rel=1e-9)
    assert 0 < sums["clip_fraction"] < sum(int(s.loss_mask.sum()) for s in sequences)


def test_gspo_gives_each_token_its_own_advantage():
    """GSPO-token: s sg, so that with unequal advantages the slope of token t is s A_t, and not the sequence's mean."""
    sequences = make_sequences(5, count=1, drift=0.01)
    (s,) = sequences
    algorithm = Algorithm(loss=Gspo(clip=(0.5, 0.5)), correction=NoCorrection())
    _, ((gradient, _),), _ = run(algorithm, [sequences])
    ratio = math.exp(np.mean((s.current - s.proximal)[s.loss_mask]))
    np.testing.assert_allclose(gradient, np.where(s.loss_mask, -ratio * s.advantages, 0) / s.loss_mask.sum(), rtol=1e-9)


def squares(sequences, eta):
    """SPPO as its paper has it, a sequence at a time: its log-ratio, and how far that is from where it is random_tokens to."""
    for s in sequences:
        ratio = math.fsum((s.current - s.proximal)[s.loss_mask])
        yield s, ratio, ratio - eta * s.advantages[0]


@pytest.mark.parametrize("eta", [0.5, 1000.0])
def test_sppo_draws_the_log_ratio_of_a_sequence_to_eta_times_its_advantage(eta):
    sequences = [s for s in make_sequences(spread=0.0) if s.loss_mask.any()]
    algorithm = Algorithm(loss=Sppo(eta=eta), correction=NoCorrection(), aggregation="token_mean")
    total, gradients, sums = run(algorithm, [[s] for s in sequences])
    n = sum(int(s.loss_mask.sum()) for s in sequences)
    assert total == pytest.approx(sum(gap**2 for *_, gap in squares(sequences, eta)) / (2 * eta * n), rel=1e-9)
    for (s, _, gap), (gradient, _) in zip(squares(sequences, eta), gradients, strict=True):
        np.testing.assert_allclose(gradient, np.where(s.loss_mask, gap / eta, 0) / n, rtol=1e-9)
    assert sums["clip_fraction"] == 0


def test_sppo_begins_as_the_plain_policy_gradient_and_rests_where_it_was_drawn_to():
    start = [msgspec.structs.replace(s, proximal=s.behavior, current=s.behavior) for s in make_sequences(spread=0.0)]
    algorithm = Algorithm(loss=Sppo(eta=2.0), aggregation="token_mean")
    n = sum(int(s.loss_mask.sum()) for s in start)
    for s, (gradient, _) in zip(start, run(algorithm, [[s] for s in start])[1], strict=True):
        np.testing.assert_allclose(gradient, np.where(s.loss_mask, -s.advantages, 0) / n, rtol=1e-9)
    end = [
        msgspec.structs.replace(
            s, current=s.behavior + np.where(s.loss_mask, 2 * s.advantages / max(1, s.loss_mask.sum()), 0)
        )
        for s in start
    ]
    for gradient, _ in run(algorithm, [[s] for s in end])[1]:
        np.testing.assert_allclose(gradient, 0, atol=1e-12)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_imitation_makes_the_tokens_of_good_episodes_likelier_by_their_own_mean(aggregation):
    """Over two ranks, one of which has nothing to imitate; the policy loss is as without it."""
    packing = [[s] for s in make_sequences()]  # each row by itself is the first, and good
    packing.append([make_sequences(1, count=1)[0], make_sequences(2, count=1)[0]])  # the second is not
    plain, imitating = (Algorithm(aggregation=aggregation, terms={"imitation": c}) for c in (0.0, 0.25))
    n = sum(int(s.loss_mask.sum()) for row in packing for s in row)
    good = [s for row in packing for s in row[:1]]
    tokens = sum(int(s.loss_mask.sum()) for s in good)
    before, without, _ = run(plain, packing)
    after, found, _ = run(imitating, packing)
    likelihood = sum(s.current[s.loss_mask].sum() for s in good) / tokens
    assert after - before == pytest.approx(-0.25 * likelihood, rel=1e-9)
    for row, (gradient, _), (other, _) in zip(packing, found, without, strict=True):
        expected = [np.where(s.loss_mask & (i == 0), -0.25 / tokens, 0) for i, s in enumerate(row)]
        np.testing.assert_allclose(gradient - other, np.concatenate(expected), atol=1e-12)
    assert n > tokens


def test_with_nothing_good_there_is_nothing_to_imitate():
    sequences = make_sequences()
    row, current, entropy = make_row(sequences)
    row = msgspec.structs.replace(row, positive=torch.zeros_like(row.positive))
    losses = [
        loss_of(Algorithm(terms={"imitation": c}), LONGEST)([row], one_rank)(current, entropy, row) for c in (0.0, 1.0)
    ]
    assert losses[0].loss_sum == losses[1].loss_sum


# ---------------------------------------------------------------- properties


@pytest.mark.parametrize("correction", CORRECTIONS, ids=name)
@pytest.mark.parametrize("surrogate", [s for s in SURROGATES if not isinstance(s, ClipCov)], ids=name)
def test_on_policy_it_is_the_plain_policy_gradient(surrogate, correction):
    """Ratio 1 everywhere: the slope is - A / N, whatever corrects."""
    sequences = [msgspec.structs.replace(s, proximal=s.behavior, current=s.behavior) for s in make_sequences()]
    algorithm = Algorithm(loss=surrogate, correction=correction, aggregation="token_mean")
    _, gradients, sums = run(algorithm, cut(sequences, 5))
    n = sum(int(s.loss_mask.sum()) for s in sequences)
    expected = np.concatenate([np.where(s.loss_mask, -s.advantages, 0) / n for s in sequences])
    np.testing.assert_allclose(np.concatenate([g[0] for g in gradients]), expected, rtol=1e-9)
    assert sums["dropped"] == 0


def test_clip_cov_on_policy_is_the_plain_policy_gradient_but_for_what_it_chose():
    sequences = [msgspec.structs.replace(s, proximal=s.behavior, current=s.behavior) for s in make_sequences()]
    surrogate = ClipCov(held={"share": 1.0})
    chosen = oracle_chosen(surrogate, sequences)
    _, gradients, sums = run(Algorithm(loss=surrogate), [[s] for s in sequences])
    n = sum(int(s.loss_mask.sum()) for s in sequences)
    for i, (s, (gradient, _)) in enumerate(zip(sequences, gradients, strict=True)):
        carries = [s.loss_mask[t] and (i, t) not in chosen for t in range(len(s.ids))]
        np.testing.assert_allclose(gradient, np.where(carries, -s.advantages, 0) / n, rtol=1e-9)
    assert sums["clip_fraction"] == len(chosen) > 0


@pytest.mark.parametrize(("surrogate", "correction", "aggregation"), TRIPLES, ids=name)
def test_untrained_tokens_have_no_influence(surrogate, correction, aggregation):
    algorithm = Algorithm(loss=surrogate, correction=correction, aggregation=aggregation, terms={"entropy": 0.1})
    outcomes = []
    for number in (0.0, 7.0, float("nan"), float("inf")):
        sequences = make_sequences(4)
        for s in sequences:
            for key in ARRAYS:
                getattr(s, key)[~s.loss_mask] = number
        total, gradients, sums = run(algorithm, [sequences[:5], sequences[5:]])
        assert math.isfinite(total)
        outcomes.append((total, [g.tolist() for row in gradients for g in row], sums))
        untrained = ~np.concatenate([s.loss_mask for s in sequences[:5]])
        assert not gradients[0][0][untrained].any()
    assert all(outcome == outcomes[0] for outcome in outcomes)


@pytest.mark.parametrize(("surrogate", "correction", "aggregation"), TRIPLES, ids=name)
def test_neither_order_nor_packing_nor_ranks_change_anything(surrogate, correction, aggregation):
    if isinstance(surrogate, ClipCov):
        surrogate = ClipCov(held={"share": 0.03})  # a real draw
    algorithm = Algorithm(loss=surrogate, correction=correction, aggregation=aggregation, terms={"entropy": 0.1})
    sequences = make_sequences(6)
    whole, reference, sums = run(algorithm, [[s] for s in sequences])
    order = np.random.default_rng(0).permutation(len(sequences)).tolist()
    shuffled = [sequences[i] for i in order]
    for packing in ([shuffled], [shuffled[:3], shuffled[3:4], shuffled[4:]]):
        total, gradients, reported = run(algorithm, packing)
        assert total == pytest.approx(whole, rel=1e-9)
        assert reported == pytest.approx(sums, rel=1e-9)
        for kind in (0, 1):
            actual = np.concatenate([g[kind] for g in gradients])
            np.testing.assert_allclose(
                actual, np.concatenate([reference[i][kind] for i in order]), rtol=1e-9, atol=1e-15
            )
    tokens = sum(int(s.loss_mask.sum()) for s in sequences)
    parts = on_two_ranks(algorithm, [[shuffled[:2], shuffled[2:3]], [shuffled[3:]]], tokens)
    assert sum(part[0] for part in parts) == pytest.approx(whole, rel=1e-9)
    actual = np.concatenate([g[0] for part in parts for g in part[1]])
    np.testing.assert_allclose(actual, np.concatenate([reference[i][0] for i in order]), rtol=1e-9, atol=1e-15)


def on_two_ranks(algorithm, packings, tokens):
    """`run` on two ranks, each with its part."""
    return on_ranks(lambda index, gather: run(algorithm, packings[index], gather, tokens))


def on_ranks(of_rank):
    """`of_rank(index, gather)` in two threads that gather from each other."""
    barrier, shared, results = threading.Barrier(2, timeout=60), [None, None], [None, None]

    def rank(index):
        def gather(values):
            shared[index] = values
            barrier.wait()
            gathered = torch.cat(shared)
            barrier.wait()
            return gathered

        results[index] = of_rank(index, gather)

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize(("surrogate", "correction", "aggregation"), TRIPLES, ids=name)
def test_a_row_without_trained_tokens_gives_zero_and_the_same_names(surrogate, correction, aggregation):
    algorithm = Algorithm(loss=surrogate, correction=correction, aggregation=aggregation, terms={"entropy": 0.1})
    sequences = make_sequences()
    (row, current, entropy), (empty, *values) = make_row(sequences), make_row(sequences[3:4])
    loss = loss_of(algorithm, LONGEST)([row, empty], one_rank)
    by_logprob, by_entropy = (value.clone().requires_grad_() for value in values)
    output = loss(by_logprob, by_entropy, empty)
    output.loss_sum.backward()
    assert output.loss_sum.item() == 0.0
    assert not any(value.grad is not None and value.grad.any() for value in (by_logprob, by_entropy))
    assert {key: value.item() for key, value in output.sums.items()} == dict.fromkeys(
        loss(current, entropy, row).sums, 0.0
    )


@pytest.mark.parametrize(("surrogate", "correction"), PAIRS, ids=name)
def test_what_is_not_a_number_is_never_dropped_silently(surrogate, correction):
    """The step sees it in the loss or in the gradient, and refuses it."""
    for key in ("current", "proximal" if not isinstance(surrogate, SELF_CORRECTING) else "behavior", "advantages"):
        sequences = make_sequences(count=1)
        getattr(sequences[0], key)[-1] = float("nan")
        sequences[0].behavior[:-1] = sequences[0].proximal[:-1]
        wide = correction
        if isinstance(correction, Masked | Rejected):
            wide = msgspec.structs.replace(correction, bounds=(1e-3, 1e3))
        total, ((gradient, _),), _ = run(Algorithm(loss=surrogate, correction=wide), [sequences])
        assert math.isnan(total) or math.isnan(gradient[-1])


@pytest.mark.parametrize("gap", [-1e3, 1e3, float("-inf"), float("inf")])
@pytest.mark.parametrize(
    "correction", [c for c in CORRECTIONS if isinstance(c, Masked | Rejected | Truncated)], ids=name
)
def test_a_freak_weight_leaves_loss_and_metrics_finite(correction, gap):
    """Behaviour log-probs that say impossible things: truncated to the cap, or dropped and counted."""
    sequences = make_sequences(7)
    sequences[0].behavior[-1] = sequences[0].proximal[-1] - gap
    total, gradients, sums = run(Algorithm(correction=correction), [sequences])
    assert math.isfinite(total)
    assert all(np.isfinite(g).all() for row in gradients for g in row)
    assert all(math.isfinite(value) for value in sums.values())
    if isinstance(correction, Masked | Rejected):
        assert gradients[0][0][len(sequences[0].ids) - 1] == 0.0
        assert sums["dropped"] > 0


@pytest.mark.parametrize("gap", [80.0, 1000.0])
@pytest.mark.parametrize(
    ("surrogate", "sign"),
    [(kind(), 1.0) for kind in (DecoupledPpo, Ppo, DualClipPpo, DualClipDecoupledPpo, Gspo, Sapo, ClipCov)]
    + [(DualClipPpo(), -1.0), (DualClipDecoupledPpo(), -1.0), (Sapo(), -1.0)],
    ids=str,
)
def test_a_token_that_moved_too_far_is_let_go(surrogate, sign, gap):
    """Where the clip takes the gradient away it is 0, however far the ratio is beyond."""
    sequences = make_sequences(count=1)
    base = "behavior" if isinstance(surrogate, SELF_CORRECTING) else "proximal"
    sequences[0].advantages[:] = sign
    sequences[0].current[-1] = getattr(sequences[0], base)[-1] + gap
    total, ((gradient, _),), sums = run(Algorithm(loss=surrogate), [sequences])
    assert math.isfinite(total)
    assert np.isfinite(gradient).all()
    assert gradient[-1] == 0.0
    assert all(math.isfinite(value) for value in sums.values())


@pytest.mark.parametrize("share", [0.01, 0.05])
def test_clip_cov_draws_its_share_evenly_among_the_eligible(share):
    """Over many batches every third of the eligible, by covariance, is random_tokens from as often."""
    thirds, total = np.zeros(3), 0
    for seed in range(60):
        row, _, _ = make_row(make_sequences(seed, count=20))
        q, a = row.proximal_logprobs[row.loss_mask].numpy(), row.advantages[row.loss_mask].numpy()
        cov = (q - q.mean()) * (a - a.mean())
        eligible = np.flatnonzero((cov >= 1.0) & (cov <= 5.0))
        chosen = np.flatnonzero(random_tokens(share, 1.0, 5.0, [row], one_rank)(row).numpy())
        assert len(chosen) == min(len(eligible), max(1, math.floor(share * len(q))))
        assert set(chosen) <= set(eligible)
        ranked = eligible[np.argsort(cov[eligible])]
        thirds += [np.isin(part, chosen).sum() for part in np.array_split(ranked, 3)]
        total += len(chosen)
    assert np.abs(thirds / total - 1 / 3).max() < 4 * math.sqrt(2 / 9 / total)


def test_statistics_by_staleness_are_those_of_the_tokens_of_that_staleness():
    row, current, entropy = make_row(make_sequences(2))
    algorithm = Algorithm()
    output = loss_of(algorithm, LONGEST)([row], one_rank)(current, entropy, row)
    tokens = int(row.loss_mask.sum())
    means = {key: value.item() / tokens for key, value in output.sums.items()}
    done = PolicyStepResult((BackendStepResult(0.0, 0.0, tokens, means),), lr=0.0, mismatch=0.0, compared=0)
    tables = done.by_staleness()
    w = np.exp((current - row.behavior_logprobs).numpy())
    r = np.exp((current - row.proximal_logprobs).numpy())
    a = row.advantages.numpy()
    flat = ((a > 0) & (r > 1 + algorithm.loss.clip[1])) | ((a < 0) & (r < 1 - algorithm.loss.clip[0]))
    for lag in range(3):
        at = row.loss_mask.numpy() & (row.staleness.numpy() == lag)
        assert tables["ess_by_staleness"][str(lag)] == pytest.approx(w[at].sum() ** 2 / (at.sum() * (w[at] ** 2).sum()))
        assert tables["kl_by_staleness"][str(lag)] == pytest.approx((w[at] - 1 - np.log(w[at])).mean())
        assert tables["clip_fraction_by_staleness"][str(lag)] == pytest.approx(flat[at].mean())
        assert tables["weight_by_staleness"][str(lag)] == pytest.approx(w[at].sum() / w[row.loss_mask.numpy()].sum())
    assert all(list(table) == ["0", "1", "2"] for table in tables.values())


# ---------------------------------------------------------------- one optimizer step, by one line of config


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture
def backend(model):
    config = load("quickstart", [f"model.path={model}"])
    optimizer = Optimizer(lr=1e-3)
    backend = Fsdp2Backend(config.model, optimizer, Fsdp2(device="cpu"), temperature=0.7, timeout_s=60.0)
    yield backend
    backend.close()


def near_rows(backend, budget):
    """Rows of a policy that has moved a little since the start of the batch, and more since its tokens were sampled."""
    rows = make_rows(0, 0, 1, budget)
    moved = []
    for row, current in zip(rows, backend.logprobs(rows), strict=True):
        proximal = current + (row.proximal_logprobs - row.behavior_logprobs)
        behavior = proximal + torch.where(row.loss_mask, 0.2 * (row.behavior_logprobs + 3.0), 0.0)
        moved.append(msgspec.structs.replace(row, proximal_logprobs=proximal, behavior_logprobs=behavior))
    return moved


LINES = [
    *[f"loss.kind={section.__struct_config__.tag}" for section in PUBLISHED],
    *[f"correction.kind={kind}" for kind in ("truncated", "masked", "rejected")],
    *[f"aggregation={kind}" for kind in AGGREGATIONS],
    "terms.entropy=0.01",
]


@pytest.mark.parametrize("line", LINES)
def test_an_optimizer_step_by_one_line_of_config(backend, line):
    config = load("quickstart", [f"learner.algorithm.{line}"])
    batch_loss = loss_of(config.learner.algorithm, config.agent.max_tokens)
    before = dict(backend.named_weights())
    outcomes = []
    for budget in (8192, 34):  # packed in one row; accumulated over several
        rows = near_rows(backend, budget)
        outcomes.append((len(rows), backend.step(rows, batch_loss(rows, backend.gather), 0.0)))
    (one, first), (several, second) = outcomes
    assert one < several
    assert first.loss == pytest.approx(second.loss, abs=1e-6, rel=1e-6)
    assert first.grad_norm == pytest.approx(second.grad_norm, rel=1e-5)
    assert first.means == pytest.approx(second.means, abs=1e-5)
    rows = near_rows(backend, 8192)
    result = backend.step(rows, batch_loss(rows, backend.gather), 1e-3)
    assert result.grad_norm > 0
    after = dict(backend.named_weights())
    assert all(torch.isfinite(weight).all() for weight in after.values())
    assert not all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("line", LINES)
def test_forgotten_proximal_log_probs_are_refused_or_not_needed(backend, line):
    algorithm = load("quickstart", [f"learner.algorithm.{line}"]).learner.algorithm
    rows = [
        msgspec.structs.replace(row, proximal_logprobs=torch.full_like(row.advantages, torch.nan))
        for row in near_rows(backend, 8192)
    ]
    loss = loss_of(algorithm, 64)(rows, backend.gather)
    if isinstance(algorithm.loss, SELF_CORRECTING):
        assert backend.step(rows, loss, 0.0).grad_norm > 0
    else:
        with pytest.raises(LearnerError, match="not finite"):
            backend.step(rows, loss, 1e-3)


def test_the_lines_are_all_different_losses(backend):
    """None of them is ignored: each gives another gradient than the default."""
    norms = {}
    for line in ["minibatches=1", *LINES]:
        algorithm = load("quickstart", [f"learner.algorithm.{line}"]).learner.algorithm
        rows = near_rows(backend, 8192)
        norms[line] = backend.step(rows, loss_of(algorithm, 64)(rows, backend.gather), 0.0).grad_norm
    same = {"minibatches=1", "loss.kind=decoupled_ppo", "correction.kind=truncated", "aggregation=token_mean"}
    assert len({norms[line] for line in same}) == 1
    others = [norms[line] for line in norms if line not in same] + [norms["minibatches=1"]]
    assert all(abs(a - b) > 1e-5 * a for a, b in itertools.combinations(others, 2))
