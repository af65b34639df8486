"""On-policy distillation: the gradient is that of the reverse divergence from the teacher, whatever policy sampled the tokens; over
the teacher's likeliest tokens it is exact. Each environment of a mixture may have a teacher of its own."""

from __future__ import annotations

import asyncio
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
    Distillation,
    Gspo,
    KlCov,
    NoAdvantage,
    Ppo,
    Sapo,
    Truncated,
)
from slipstream.errors import LearnerError
from slipstream.launch.supervisor.factory import make_aux_models, make_backend, make_reference, reference_models
from slipstream.learner.algorithms import loss_of
from slipstream.learner.algorithms.teacher import top_divergence
from slipstream.learner.aux_models.aux_models import AuxModels
from slipstream.learner.aux_models.remote import RemoteModel
from slipstream.learner.aux_models.service import AuxModelService
from slipstream.learner.packing import MicroBatch, scoring_microbatch
from slipstream.tests import tiny
from slipstream.tests.columns import flat
from slipstream.tests.one_token import OneToken
from slipstream.tests.test_learner_credit import branches
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


# ---------------------------------------------------------------- over the teacher's likeliest tokens


def with_likeliest(row: MicroBatch, ids: torch.Tensor, teacher: torch.Tensor, policy: torch.Tensor) -> MicroBatch:
    """`row` with what a teacher and the policy say of the tokens `ids` int64[K, k], behind one of context."""
    before = torch.zeros(1, ids.shape[1], dtype=teacher.dtype)
    return msgspec.structs.replace(
        row,
        teacher_ids=torch.cat([before.long(), ids]),
        teacher_logprobs=torch.cat([before, teacher]),
        candidate_logprobs=torch.cat([before, policy]),
    )


@pytest.mark.parametrize("kind", ["reverse", "forward"])
@pytest.mark.parametrize("top", [1, 3, VOCABULARY])
def test_over_the_likeliest_tokens_loss_and_gradient_are_those_of_the_divergence(kind, top):
    """With what is left as one more outcome; all of the divergence where every token is among them, and never more than that."""
    torch.manual_seed(0)
    logits = torch.randn(3, VOCABULARY, dtype=torch.float64).requires_grad_()
    teacher, behavior = torch.randn(2, 3, VOCABULARY, dtype=torch.float64).log_softmax(-1)
    likeliest = teacher.topk(top)

    def outcomes(probabilities: torch.Tensor) -> torch.Tensor:
        chosen = probabilities.gather(-1, likeliest.indices)
        rest = 1 - chosen.sum(-1, keepdim=True)
        return torch.cat([chosen, rest], -1)[:, :VOCABULARY]

    def divergence(p: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
        return (f * (f / p).log()).sum() if kind == "forward" else (p * (p / f).log()).sum()

    wanted = 0.25 * divergence(outcomes(logits.softmax(-1)), outcomes(teacher.exp()))
    (expected,) = torch.autograd.grad(wanted, logits)
    algorithm = Algorithm(advantage=NoAdvantage(), kl=Distillation(coefficient=0.25, estimator={kind: top}))
    policy, sampled = logits.log_softmax(-1), torch.arange(3)
    current = policy[sampled, sampled]
    row = row_with(current, behavior[sampled, sampled], teacher[sampled, sampled], torch.zeros(3).double())
    row = with_likeliest(row, likeliest.indices, likeliest.values, policy.gather(-1, likeliest.indices))
    output = loss_of(algorithm, LONGEST)([row], one_rank)(torch.cat([torch.zeros(1), current]), torch.zeros(4), row)
    (found,) = torch.autograd.grad(output.loss_sum, logits)
    torch.testing.assert_close(output.loss_sum, wanted, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-12)
    whole = 0.25 * divergence(logits.softmax(-1), teacher.exp())
    assert 0 < wanted <= whole + 1e-12
    assert (whole - wanted < 1e-12) == (top == VOCABULARY)


@pytest.mark.parametrize("kind", ["reverse", "forward"])
def test_likeliest_tokens_that_a_policy_forbids_leave_the_step_finite(kind):
    nothing = float("-inf")
    teacher = torch.tensor([[0.0, nothing], [-0.7, -0.7], [-0.1, -3.0]])
    policy = torch.tensor([[nothing, 0.0], [nothing, nothing], [-200.0, -1e-8]]).requires_grad_()
    row = row_with(torch.zeros(3), torch.zeros(3), torch.zeros(3), torch.zeros(3))
    row = with_likeliest(row, torch.tensor([[0, 1]] * 3), teacher, policy)
    found = top_divergence(Distillation(estimator={kind: 2}), row)
    found.sum().backward()
    assert found.isfinite().all()
    assert (found > 0.5).all()
    assert policy.grad.isfinite().all()


def test_rows_without_the_likeliest_tokens_are_refused():
    current = torch.tensor([-1.0])
    row, algorithm = row_of(current, current, current, current), Algorithm(kl=Distillation(estimator={"reverse": 2}))
    with pytest.raises(LearnerError, match="likeliest tokens, which these rows lack"):
        loss_of(algorithm, LONGEST)([row], one_rank)(row.proximal_logprobs, row.proximal_logprobs, row)
    padding = scoring_microbatch([[0]])
    assert loss_of(algorithm, LONGEST)([padding], one_rank)(torch.zeros(1), torch.zeros(1), padding).loss_sum == 0


@pytest.mark.parametrize("minibatches", [1, 4])
@pytest.mark.parametrize("kind", ["reverse", "forward"])
async def test_a_policy_becomes_its_teacher_by_the_likeliest_tokens(folders: list[Path], kind, minibatches):
    """Real models, steps and aux models. A few tokens in each step are enough, sampled by the policy before the first."""
    rng = np.random.default_rng(0)
    with OneToken(
        folders[0],
        *("learner.algorithm.advantage.kind=none", "buffer.group_size=1"),
        f"learner.algorithm.kl={{kind: distillation, reference: {folders[1]}, estimator: {{{kind}: 512}}}}",
        f"learner.algorithm.minibatches={minibatches}",
    ) as player:
        teacher = player.logprobs(player.aux_models.models[0]._models[0])
        before, behavior = player.divergence(teacher), player.logprobs(player.policy)
        for _ in range(20 // minibatches):
            await player.step(behavior, rng.choice(len(behavior), 4, p=np.exp(behavior)), lambda _: 0.0)
        after = player.divergence(teacher)
    assert before > 0.02
    assert after < 0.1 * before


# ---------------------------------------------------------------- a teacher for each environment

TAUGHT = ("sums", "games", "riddles")  # the last two by the same


async def test_each_environment_is_scored_by_its_own_teacher_held_or_placed(
    folders: list[Path], address: str, tmp_path: Path
):
    """Log-probs of the sampled and of the likeliest tokens, as transformers computes them."""
    other = tiny.tiny_qwen3(tmp_path / "third", 7)
    teachers = dict(zip(TAUGHT, (folders[1], other, other), strict=True))
    parts = ", ".join(f"{name}: {{kind: reasoning_gym}}" for name in TAUGHT)
    named = ", ".join(f"{name}: {folder}" for name, folder in teachers.items())
    config = load(
        "quickstart",
        [
            *(f"model.path={folders[0]}", "learner.algorithm.advantage.kind=none", "buffer.group_size=1"),
            f"env={{kind: mixture, parts: {{{parts}}}}}",
            f"learner.algorithm.kl={{kind: distillation, reference: {{{named}}}, estimator: {{reverse: 5}}}}",
            "learner.backend.tokens_per_microbatch=16",
        ],
    )
    trajectories = [
        msgspec.structs.replace(branch, env=TAUGHT[member % 3])
        for member in range(5)
        for branch in branches(0, member, [0.0, 0.0], split=member % 2)
    ]
    batch = flat([trajectories])
    policy = make_backend(config, temperature=1.0)
    held = make_aux_models(config, policy, {})
    assert sorted(held.scored_rows(batch)) == list(range(len(batch)))
    found = await held.score(batch)
    models = {name: tiny.load(folder) for name, folder in teachers.items()}
    assert found.teacher_ids.shape == found.teacher_logprobs.shape == (len(batch.token_ids), 5)
    for number, trajectory in enumerate(trajectories):
        of_all = tiny.logprobs(models[trajectory.env], trajectory.token_ids.tolist())
        start = batch.offsets[number]
        for at in np.flatnonzero(trajectory.loss_mask):
            expected, likeliest = of_all[at - 1], of_all[at - 1].topk(5)
            sampled = expected[trajectory.token_ids[at]].item()
            assert found.reference_logprobs[start + at] == pytest.approx(sampled, abs=1e-4)
            assert found.teacher_ids[start + at].tolist() == likeliest.indices.tolist()
            assert found.teacher_logprobs[start + at] == pytest.approx(likeliest.values.numpy(), abs=1e-4)

    elsewhere = msgspec.structs.replace(batch, envs=("sums", "chess", *batch.envs[2:]))
    with pytest.raises(
        LearnerError, match=r"episodes of chess have no reference policy; .* has one for sums, games, riddles"
    ):
        await held.score(elsewhere)
    ready, placed = asyncio.Event(), [make_reference(config, model) for model in reference_models(config)]
    assert len(placed) == 2
    service = asyncio.create_task(AuxModelService(config.learner, "reference-0", address, placed).serve(ready.set))
    await asyncio.wait_for(ready.wait(), 30)
    asked = AuxModels(config.learner, RemoteModel(config.learner, "reference", (address,), top=5))
    again = await asked.score(batch)
    for name in ("reference_logprobs", "teacher_ids", "teacher_logprobs"):
        assert np.array_equal(getattr(again, name), getattr(found, name)), name
    asked.close()
    service.cancel()
    await asyncio.wait({service})
    for model in (*placed[::-1], held, policy):
        model.close()


@pytest.mark.full
async def test_a_policy_becomes_its_teacher_without_a_reward_from_tokens_of_an_older_policy(folders: list[Path]):
    """Real models, steps and aux models. All tokens are sampled by the policy of up to five steps before; rewards are of no use."""
    rng = np.random.default_rng(0)
    with OneToken(
        folders[0],
        *("learner.algorithm.advantage.kind=none", "learner.algorithm.kl.kind=distillation", "buffer.group_size=1"),
        f"learner.algorithm.kl.reference={folders[1]}",
    ) as player:
        teacher = player.logprobs(player.aux_models.models[0]._models[0])
        before = player.divergence(teacher)
        for step in range(30):
            if step % 5 == 0:
                behavior = player.logprobs(player.policy)
            done = await player.step(
                behavior, rng.choice(len(behavior), 256, p=np.exp(behavior)), lambda _: rng.normal()
            )
        after = player.divergence(teacher)
    assert before > 0.02
    assert after < 0.1 * before
    assert done.means["kl_reference"] < 0.1 * before
