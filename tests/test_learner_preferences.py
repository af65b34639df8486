"""DPO: pairs of a step, their loss and gradient against the paper's equation, and a preference that was planted."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from slipstream.configs import load
from slipstream.configs.algorithm import Algorithm, Dpo, NoAdvantage
from slipstream.configs.sft import Sft
from slipstream.errors import LearnerError
from slipstream.launch.supervisor.factory import make_backend
from slipstream.learner.algorithms import loss_of
from slipstream.learner.batch import make_batch
from slipstream.learner.packing import MicroBatch, scoring_microbatch, to_microbatch
from slipstream.learner.sft import run_preferences
from slipstream.tests.one_token import OneToken
from slipstream.tests.test_learner_losses import on_ranks

LONGEST = 64
ALGORITHM = Algorithm(advantage=NoAdvantage(), loss=Dpo(eta=4.0))


class Branch(msgspec.Struct):
    """A sequence of an episode: how many tokens, of which the first is context."""

    episode: int
    tokens: int


REWARDS = [1.0, -0.5, 0.25, 2.0, 2.0, 0.0, 3.0]
GROUPS = [0, 0, 0, 1, 1, 2, 2]
"""A group of three, whose second-best has no loss; one of equals, which is no pair; one of two."""
BRANCHES = [
    Branch(0, 5),
    Branch(0, 3),
    Branch(1, 4),
    Branch(2, 6),
    Branch(3, 3),
    Branch(4, 4),
    Branch(5, 7),
    Branch(6, 2),
]
PAIRS = [(0, 1), (6, 5)]


def made_row(branches: list[Branch]) -> tuple[MicroBatch, list[torch.Tensor]]:
    """A row of these sequences, in float64, and the current log-probs of each."""
    sizes = np.array([branch.tokens for branch in branches])
    mask = np.concatenate([np.arange(size) > 0 for size in sizes])
    batch = make_batch(
        np.zeros(len(mask), dtype=np.int32),
        mask,
        sizes,
        episode=np.array([branch.episode for branch in branches]),
        groups=np.array(GROUPS),
        rewards=np.array(REWARDS),
    )
    draws = [torch.Generator().manual_seed(10 * branch.episode + branch.tokens) for branch in branches]
    columns = [torch.randn(2, b.tokens, generator=g, dtype=torch.float64) for b, g in zip(branches, draws, strict=True)]
    proximal, reference = torch.cat(columns, 1) * torch.from_numpy(mask) - 1.0
    row = msgspec.structs.replace(to_microbatch(batch), proximal_logprobs=proximal, reference_logprobs=reference)
    return row, list(proximal.split(sizes.tolist()))


def step(rows: list[MicroBatch], gather, tokens: int) -> tuple[float, list[torch.Tensor], list[float]]:
    """Loss of a step on `tokens` in all, gradients by log-prob of each row, and the sums `kl_reference`."""
    loss, total, gradients, divergences = loss_of(ALGORITHM, LONGEST)(rows, gather), 0.0, [], []
    for row in rows:
        current = row.proximal_logprobs.clone().requires_grad_()
        output = loss(current, torch.zeros_like(current), row)
        (output.loss_sum / tokens).backward()
        total += output.loss_sum.item() / tokens
        gradients.append(current.grad)
        divergences.append(output.sums["kl_reference"].item())
    return total, gradients, divergences


def oracle(branches: list[Branch]) -> tuple[float, dict[int, torch.Tensor]]:
    """Equation 7 of Rafailov et al. 2023 over whole episodes, by autograd: the loss, and the slopes of each sequence."""
    leaves = {}
    for number, branch in enumerate(branches):
        row, (current,) = made_row([branch])
        leaves[number] = current.clone().requires_grad_(), row.reference_logprobs
    losses = []
    for better, worse in PAIRS:
        ratio = {}
        for episode in (better, worse):
            of = [leaves[n] for n, branch in enumerate(branches) if branch.episode == episode]
            ratio[episode] = sum((policy - reference)[1:].sum() for policy, reference in of)
        losses.append(-torch.sigmoid(0.25 * (ratio[better] - ratio[worse])).log())
    loss = torch.stack(losses).mean()
    loss.backward()
    zero = torch.zeros
    return loss.item(), {n: leaf.grad if leaf.grad is not None else zero(len(leaf)) for n, (leaf, _) in leaves.items()}


@pytest.mark.parametrize(
    "packing", [[[0, 1, 2, 3, 4, 5, 6, 7]], [[7, 3], [0, 4], [6], [2, 1, 5]]], ids=["one row", "pairs apart"]
)
def test_loss_and_gradient_are_those_of_the_paper_however_rows_are_packed(packing):
    expected, slopes = oracle(BRANCHES)
    rows = [made_row([BRANCHES[n] for n in row])[0] for row in packing]
    tokens = sum(int(row.loss_mask.sum()) for row in rows)
    loss, gradients, divergences = step(rows, lambda values: values, tokens)
    assert loss == pytest.approx(expected, rel=1e-12)
    for row, gradient in zip(packing, gradients, strict=True):
        by_hand = torch.cat([slopes[n] for n in row])
        torch.testing.assert_close(gradient, by_hand.double(), rtol=1e-10, atol=1e-14)
    assert all(divergence > 0 for divergence in divergences)


def test_the_two_of_a_pair_may_be_on_different_ranks():
    expected, slopes = oracle(BRANCHES)
    packing = [[0, 3, 5, 6], [1, 2, 4, 7]]
    rows = [made_row([BRANCHES[n] for n in row])[0] for row in packing]
    tokens = sum(int(row.loss_mask.sum()) for row in rows)
    found = on_ranks(lambda index, gather: step([rows[index]], gather, tokens))
    assert sum(loss for loss, _, _ in found) == pytest.approx(expected, rel=1e-12)
    for row, (_, gradients, _) in zip(packing, found, strict=True):
        torch.testing.assert_close(gradients[0], torch.cat([slopes[n] for n in row]).double(), rtol=1e-10, atol=1e-14)


def test_a_step_of_equals_has_no_gradient_and_an_extreme_margin_is_finite():
    row, _ = made_row([BRANCHES[4], BRANCHES[5]])
    loss, (gradient,), _ = step([row], lambda values: values, 5)
    assert loss == 0
    assert not gradient.any()
    row, _ = made_row([BRANCHES[6], BRANCHES[7]])
    far = msgspec.structs.replace(row, reference_logprobs=torch.where(row.loss_mask, row.reference_logprobs - 1e4, 0.0))
    for reference in (far.reference_logprobs, -far.reference_logprobs):
        loss, (gradient,), _ = step(
            [msgspec.structs.replace(row, reference_logprobs=reference)], lambda values: values, 7
        )
        assert np.isfinite(loss)
        assert gradient.isfinite().all()


def test_rows_without_groups_or_reference_are_refused_and_padding_is_not():
    row, _ = made_row([BRANCHES[6], BRANCHES[7]])
    for bare in (msgspec.structs.replace(row, groups=()), msgspec.structs.replace(row, reference_logprobs=None)):
        with pytest.raises(LearnerError, match="groups and a reference policy"):
            loss_of(ALGORITHM, LONGEST)([bare], lambda values: values)
    padding = scoring_microbatch([[0]])
    assert (
        loss_of(ALGORITHM, LONGEST)([padding], lambda values: values)(torch.zeros(1), torch.zeros(1), padding).loss_sum
        == 0
    )


async def test_a_planted_preference_is_recovered_online(folders: list[Path]):
    """Answers of even number are preferred. The policy plays, and learns from the best and the worst of two."""
    rng = np.random.default_rng(0)
    keys = ("advantage.kind=none", "loss.kind=dpo", "loss.eta=10")
    with OneToken(
        folders[0], *(f"learner.algorithm.{key}" for key in keys), "buffer.group_size=2", "buffer.filter=best_worst"
    ) as player:
        before = np.exp(player.logprobs(player.policy))[::2].sum()
        losses = []
        for _ in range(24):  # after half as many the answers that it samples decide whether it is above 0.9
            behavior = player.logprobs(player.policy)
            answers = rng.choice(len(behavior), 128, p=np.exp(behavior))
            done = await player.step(behavior, answers, lambda token: float(token % 2 == 0))
            losses.append(done.results[0].loss)
        after = np.exp(player.logprobs(player.policy))[::2].sum()
    assert losses[0] == pytest.approx(np.log(2), abs=1e-5)  # the policy is its reference
    assert 0.3 < before < 0.7
    assert after > 0.9


# ---------------------------------------------------------------- from a data set


def test_a_policy_learns_preferences_that_others_gave_against_itself_before_the_first_step(folders: list[Path]):
    """Answers of even number are chosen, others rejected, after different prompts. No episode is played."""
    config = load("quickstart", [f"model.path={folders[0]}", "learner.backend.device=cpu"])
    rng = np.random.default_rng(0)
    pairs = [
        tuple(([prompt, 2 * half + odd], [False, True]) for odd in (0, 1))
        for prompt, half in rng.integers(0, [512, 8], (200, 2)).tolist()
    ]
    policy = make_backend(config, temperature=1.0)
    wanted = Sft(loss=Dpo(eta=10.0), held_out=0.2, epochs=2, tokens_per_step=32, lr=3e-3)
    result = run_preferences(policy, pairs, wanted, tokens_per_microbatch=16, seed=0, report=lambda _: None)
    policy.close()
    first, *_, last = result.held_out
    assert (first.epoch, first.tokens) == (0, 40)
    assert first.loss == pytest.approx(np.log(2), abs=1e-5)  # the policy is its reference
    assert last.loss < 0.8 * first.loss
    assert last.right is not None
    assert last.right > 0.9
