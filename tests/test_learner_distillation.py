"""On-policy distillation: the gradient is that of the reverse divergence from the teacher, whatever policy sampled the tokens."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from slipstream.configs.algorithm import (
    Algorithm,
    Cispo,
    ClipCov,
    DecoupledPpo,
    Distillation,
    Gspo,
    KlCov,
    NoAdvantage,
    Ppo,
    Sapo,
    Truncated,
)
from slipstream.errors import LearnerError
from slipstream.learner.algorithms import loss_of
from slipstream.learner.packing import MicroBatch, scoring_microbatch
from slipstream.tests.one_token import OneToken
from slipstream.tests.test_learner_finite import row_of

LONGEST, VOCABULARY = 64, 6
WIDE = Truncated(bounds=(0.0, 1e9))


def one_rank(values: torch.Tensor) -> torch.Tensor:
    return values


def row_with(current, behavior, teacher, advantages) -> MicroBatch:
    """One sequence whose proximal policy is the current one."""
    row = row_of(current.detach(), current.detach(), behavior, advantages)
    return msgspec.structs.replace(row, reference_logprobs=torch.cat([torch.zeros(1), teacher]))


@pytest.mark.parametrize(
    "algorithm",
    [
        Algorithm(loss=DecoupledPpo(), correction=WIDE),
        Algorithm(loss=Sapo(), correction=WIDE, aggregation="token_mean"),
        Algorithm(loss=Gspo(), correction=WIDE, aggregation="token_mean"),
        Algorithm(loss=Ppo(clip=(0.99999, 1e9))),
        Algorithm(loss=Cispo(clip=(1.0, 1e9))),
    ],
    ids=lambda algorithm: algorithm.loss.__struct_config__.tag,
)
@pytest.mark.parametrize("coefficient", [1.0, 0.25])
def test_the_expected_gradient_is_that_of_the_reverse_kl_from_the_teacher(algorithm, coefficient):
    """Every token of a small vocabulary, each as often as an older policy samples it; the oracle differentiates the divergence."""
    torch.manual_seed(0)
    logits = torch.randn(VOCABULARY, dtype=torch.float64).requires_grad_()
    teacher, behavior = torch.randn(2, VOCABULARY, dtype=torch.float64).log_softmax(-1)
    policy = logits.log_softmax(-1)
    (expected,) = torch.autograd.grad(coefficient * (policy.exp() * (policy - teacher)).sum(), logits)

    algorithm = msgspec.structs.replace(algorithm, advantage=NoAdvantage(), kl=Distillation(coefficient=coefficient))
    total = torch.zeros((), dtype=torch.float64)
    for token in range(VOCABULARY):
        current = logits.log_softmax(-1)[token : token + 1]
        row = row_with(current, behavior[token : token + 1], teacher[token : token + 1], torch.zeros(1).double())
        loss = loss_of(algorithm, LONGEST)([row], one_rank)
        output = loss(torch.cat([torch.zeros(1), current]), torch.zeros(2), row)
        total = total + behavior[token].exp() * output.loss_sum
    (found,) = torch.autograd.grad(total, logits)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("loss", [DecoupledPpo(), Gspo(), Sapo(), Ppo(), Cispo(), ClipCov(), KlCov()], ids=str)
def test_the_teachers_part_is_added_to_the_advantage_of_the_reward(loss):
    """So that clips, gates and the choice of tokens see the sum."""
    generator = torch.Generator().manual_seed(1)
    current, behavior, teacher, advantages = torch.randn(4, 12, generator=generator).double() * 0.5 - 1.0
    current = current.requires_grad_()
    taught = Algorithm(loss=loss, kl=Distillation(coefficient=0.5))
    row = row_with(current, behavior, teacher, advantages)
    by_hand = msgspec.structs.replace(
        row, advantages=row.advantages + 0.5 * (row.reference_logprobs - row.proximal_logprobs)
    )
    found = {}
    for name, algorithm, one in (("taught", taught, row), ("by hand", Algorithm(loss=loss), by_hand)):
        probe = torch.cat([torch.zeros(1), current]).detach().requires_grad_()
        output = loss_of(algorithm, LONGEST)([one], one_rank)(probe, torch.zeros_like(probe), one)
        output.loss_sum.backward()
        found[name] = output.loss_sum.detach(), probe.grad, output.tokens.advantage
    for ours, expected in zip(found["taught"], found["by hand"], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("teacher", [-200.0, -1e30, float("-inf")])
def test_a_token_that_the_teacher_forbids_leaves_the_step_finite(teacher):
    current = torch.tensor([-1.0, -2.0, -0.5])
    row = row_with(current, current, torch.tensor([-1.0, teacher, -0.5]), torch.zeros(3))
    probe = torch.cat([torch.zeros(1), current]).requires_grad_()
    loss = loss_of(Algorithm(kl=Distillation()), LONGEST)([row], one_rank)
    output = loss(probe, torch.zeros_like(probe), row)
    output.loss_sum.backward()
    assert output.loss_sum.isfinite()
    torch.testing.assert_close(probe.grad, torch.tensor([0.0, 0.0, 20.0, 0.0]))


def test_rows_without_the_teachers_log_probs_are_refused():
    current = torch.tensor([-1.0])
    row = msgspec.structs.replace(row_of(current, current, current, current), reference_logprobs=None)
    with pytest.raises(LearnerError, match="teacher"):
        loss_of(Algorithm(kl=Distillation()), LONGEST)([row], one_rank)(row.proximal_logprobs, current, row)
    padding = scoring_microbatch([[0]])
    loss = loss_of(Algorithm(kl=Distillation()), LONGEST)([padding], one_rank)
    assert loss(torch.zeros(1), torch.zeros(1), padding).loss_sum == 0


@pytest.mark.full
async def test_a_policy_becomes_its_teacher_without_a_reward_from_tokens_of_an_older_policy(folders: list[Path]):
    """Real models, steps and aux models. All tokens are sampled by the policy of up to five steps before; rewards are of no use."""
    rng = np.random.default_rng(0)
    with OneToken(
        folders[0],
        *("learner.algorithm.advantage.kind=none", "learner.algorithm.kl.kind=distillation", "buffer.group_size=1"),
        f"learner.algorithm.kl.reference={folders[1]}",
    ) as player:
        teacher = player.logprobs(player.aux_models.models[0]._model)

        def divergence() -> float:
            now = player.logprobs(player.policy)
            return float((np.exp(now) * (now - teacher)).sum())

        before = divergence()
        for step in range(30):
            if step % 5 == 0:
                behavior = player.logprobs(player.policy)
            done = await player.step(
                behavior, rng.choice(len(behavior), 256, p=np.exp(behavior)), lambda _: rng.normal()
            )
        after = divergence()
    assert before > 0.02
    assert after < 0.1 * before
    assert done.means["kl_reference"] < 0.1 * before
