"""PRIME: advantages and the process reward model's loss against their formulas, and a model that learns to tell outcomes apart."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
import torch
from slipstream.configs import load
from slipstream.configs.algorithm import Algorithm, KlInLoss, Prime
from slipstream.configs.backends import Fsdp2
from slipstream.configs.schema import Learner, Model, Optimizer
from slipstream.errors import LearnerError
from slipstream.learner import packing
from slipstream.learner.algorithms import advantage_of, returns_of
from slipstream.learner.algorithms.estimators import assign_advantages
from slipstream.learner.algorithms.token_estimators import process_loss
from slipstream.learner.aux_models.aux_models import AuxModels
from slipstream.learner.aux_models.base import LocalModel, LocalTrainableModel
from slipstream.learner.batch import Group, trainable
from slipstream.learner.checkpoint_folder import CheckpointState, path_of
from slipstream.learner.fsdp2.backend import Fsdp2Backend
from slipstream.tests.columns import Columns, credit, episodes_only, flat, to_train_batch
from slipstream.tests.test_learner_credit import branches
from slipstream.tests.test_learner_critic import scores_of

BETA, GAMMA = 0.3, 0.8
PRIME = Prime(beta=BETA, gamma=GAMMA, lr=1e-3, normalize=False)
CONFIG = Learner(algorithm=Algorithm(advantage=PRIME), optimizer=Optimizer(lr=1e-3))
GROUPS: list[Group] = [
    (*branches(0, 0, [0.0, 1.0], split=1), *branches(0, 1, [0.0, 0.0]), *branches(0, 2, [1.0])),
    (*branches(1, 3, [0.0]), *branches(1, 4, [0.0, 0.0, 1.0])),
]
BRANCHES = [t for group in GROUPS for t in group]


def oracle(group: list[tuple[float, list[float]]]) -> list[list[float]]:
    """Of the members of one group, each with what it earned and its tokens' log-ratios: the paper's sums, term by term."""
    process = [[BETA * u for u in ratios] for _, ratios in group]
    answer = []
    for i, (earned, _) in enumerate(group):
        others = [j for j in range(len(group)) if j != i]
        base = sum(sum(process[j]) / len(process[j]) for j in others) / len(others)
        outcome = earned - sum(group[j][0] for j in others) / len(others)
        answer.append(
            [
                sum(GAMMA ** (s - t) * (process[i][s] - base) for s in range(t, len(process[i]))) + outcome
                for t in range(len(process[i]))
            ]
        )
    return answer


def test_advantages_are_those_of_the_formula():
    rng = np.random.default_rng(0)
    groups = [[(float(rng.random()), rng.normal(size=rng.integers(1, 9)).tolist()) for _ in range(n)] for n in (4, 2)]
    members = [(g, earned, ratios) for g, group in enumerate(groups) for earned, ratios in group]
    found = estimate(
        [[0.0] * (len(r) - 1) + [earned] for _, earned, r in members],
        *zip(*[(g, r) for g, _, r in members], strict=True),
    )
    expected = [row for group in groups for row in oracle(group)]
    assert [each.tolist() for each in found] == [pytest.approx(row, abs=1e-12) for row in expected]
    assert returns_of(Algorithm(advantage=PRIME)) is None


def estimate(rewards, groups, ratios, config=PRIME) -> list[np.ndarray]:
    """Of episodes with these rewards and log-ratios of their tokens: advantages."""
    batch = episodes_only(rewards, np.array(groups))
    # float64, so that rounding hides nothing.
    batch = msgspec.structs.replace(batch, values=np.concatenate(ratios))
    return np.split(advantage_of(Algorithm(advantage=config))(batch), batch.offsets[1:-1])


@pytest.mark.parametrize("normalize", [False, True])
def test_a_singleton_group_has_no_gradient(normalize):
    rewards, groups, ratios = [[0.0, 5.0], [0.0], [1.0]], [0, 1, 1], [[1.0, 2.0], [0.5], [0.1]]
    alone, *others = estimate(rewards, groups, ratios, msgspec.structs.replace(PRIME, normalize=normalize))
    assert alone.tolist() == [0, 0]
    assert all(each.all() for each in others)


def test_advantages_are_whitened_over_all_tokens_as_in_the_authors_code():
    """Their `masked_whiten`: the mean of all response tokens becomes 0, their deviation 1, whatever their episode."""
    rng = np.random.default_rng(3)
    groups = [0, 0, 0, 1, 1]
    ratios = [rng.normal(size=rng.integers(2, 9)) for _ in groups]
    rewards = [[0.0] * (len(each) - 1) + [float(i % 2)] for i, each in enumerate(ratios)]
    plain = np.concatenate(estimate(rewards, groups, ratios))
    whitened = np.concatenate(estimate(rewards, groups, ratios, msgspec.structs.replace(PRIME, normalize=True)))
    mean = sum(plain) / len(plain)
    deviation = math.sqrt(sum((one - mean) ** 2 for one in plain) / len(plain))
    assert whitened.tolist() == pytest.approx([(one - mean) / deviation for one in plain], abs=1e-12)
    assert Prime().normalize


def test_credit_follows_an_episode_through_its_branches():
    rng = np.random.default_rng(1)
    values = {t.id: np.where(t.loss_mask, rng.normal(size=len(t)), 0).astype(np.float32) for t in BRANCHES}
    found = credit(GROUPS, Algorithm(advantage=PRIME), Columns(values=values))
    assert found.returns is None
    for group in GROUPS:
        members = sorted({t.member for t in group})
        members_of = [[t for t in group if t.member == member] for member in members]
        ratios = [np.concatenate([values[t.id][t.loss_mask] for t in ts]).astype(float).tolist() for ts in members_of]
        expected = oracle([(ts[0].reward, row) for ts, row in zip(members_of, ratios, strict=True)])
        for ts, row in zip(members_of, expected, strict=True):
            got = np.concatenate([found.advantages[t.id][t.loss_mask] for t in ts])
            assert got.tolist() == pytest.approx(row, abs=1e-6)


# ---------------------------------------------------------------- the model


def rows_of(budget: int = 1000) -> list[packing.MicroBatch]:
    """Seven sequences of five episodes with a reference, in rows of at most `budget` tokens."""
    scores = Columns(
        values={t.id: np.zeros(len(t), dtype=np.float32) for t in BRANCHES},
        reference_logprobs={t.id: np.where(t.loss_mask, -1.5, 0).astype(np.float32) for t in BRANCHES},
    )
    return packing.microbatches(to_train_batch(GROUPS, CONFIG.algorithm, 5, 5, scores=scores), 0, 1, budget)


@pytest.mark.parametrize("budget", [1000, 1])
def test_the_loss_is_the_cross_entropy_of_the_outcomes_of_whole_episodes(budget):
    """Also where each branch is in a row of its own."""
    rows = rows_of(budget)
    assert len(rows) == (1 if budget > 1 else len(BRANCHES))
    generator = torch.Generator().manual_seed(0)
    logprobs = [torch.randn(len(row.token_ids), generator=generator, requires_grad=True) for row in rows]
    loss = process_loss(BETA, [one.detach() for one in logprobs])(rows, lambda values: values)
    outputs = [loss(one, one * 0, row) for one, row in zip(logprobs, rows, strict=True)]
    sum(output.loss_sum for output in outputs).backward()

    # In float64, with the whole sum of an episode in one place.
    scores, good, tokens = dict[str, torch.Tensor](), dict[str, bool](), dict[str, int]()
    exact = [one.detach().double().requires_grad_() for one in logprobs]
    for values, row in zip(exact, rows, strict=True):
        for name, (start, end) in zip(row.ids, itertools.pairwise(row.cu_seqlens), strict=True):
            mask, episode = row.loss_mask[start:end], name.rpartition(".")[0]
            own = BETA * (values - row.reference_logprobs)[start:end][mask].sum()
            scores[episode] = scores.get(episode, torch.zeros(())) + own
            good[episode] = bool(row.positive[start:end].any())
            tokens[episode] = tokens.get(episode, 0) + int(mask.sum())
    assert len(scores) == 5 < len(BRANCHES)
    assert set(good.values()) == {True, False}
    entropies = [-torch.nn.functional.logsigmoid(s if good[e] else -s) for e, s in scores.items()]
    expected = sum(entropies) * (sum(tokens.values()) / len(scores))
    expected.backward()
    reported = sum(float(output.sums["cross_entropy"]) for output in outputs)
    assert reported == pytest.approx(float(expected.detach()), rel=1e-5)
    for found, wanted in zip(logprobs, exact, strict=True):
        np.testing.assert_allclose(found.grad.numpy(), wanted.grad.numpy(), atol=1e-6)
    right = sum(tokens[e] for e, s in scores.items() if (float(s.detach()) > 0) == good[e])
    assert sum(int(output.sums["right"]) for output in outputs) == right


def test_the_model_learns_from_whole_episodes_though_the_policy_does_not():
    """Tokens past the bound, and whole branches of them, are part of an answer whose outcome is known."""
    old = msgspec.structs.replace(
        BRANCHES[0], version_spans=tuple(msgspec.structs.replace(span, version=0) for span in BRANCHES[0].version_spans)
    )
    groups = [(old, *GROUPS[0][1:]), GROUPS[1]]
    scores = Columns(
        values={t.id: np.zeros(len(t), dtype=np.float32) for t in BRANCHES},
        reference_logprobs={t.id: np.zeros(len(t), dtype=np.float32) for t in BRANCHES},
    )
    withheld = {BRANCHES[-1].episode: "late"}
    batch = flat(groups, 5, withheld, scores)
    credited = assign_advantages(batch, advantage_of(CONFIG.algorithm))
    trained = trainable(credited, 1)
    aux_models = AuxModels(CONFIG, *(Mock(spec=LocalTrainableModel) for _ in range(2)))
    learned = aux_models.training_batch(credited, trained)
    assert old.id not in trained.ids
    assert set(learned.ids) == {t.id for t in BRANCHES} - {BRANCHES[-1].id}  # what carries no loss teaches nothing
    sampled = {t.id: t.sampled for group in groups for t in group}
    assert [int(one.loss_mask.sum()) for one in learned] == [sampled[name] for name in learned.ids]
    for part in packing.minibatches(learned, 3, by_episode=True):
        for name in part.ids:
            branches_of = {one for one in learned.ids if one.rpartition(".")[0] == name.rpartition(".")[0]}
            assert branches_of <= set(part.ids)


def test_rows_without_a_reference_are_refused_unless_they_only_fill_up():
    empty, row = packing.scoring_microbatch([[0]]), msgspec.structs.replace(*rows_of(), reference_logprobs=None)
    loss = process_loss(BETA)([empty, row], lambda values: values)
    zeros = torch.zeros(1, requires_grad=True)
    assert float(loss(zeros, zeros, empty).loss_sum.detach()) == 0
    with pytest.raises(LearnerError, match="relative to a reference policy, whose log-probs these rows lack"):
        loss(torch.zeros(len(row.token_ids)), torch.zeros(len(row.token_ids)), row)


@pytest.fixture
def aux_models(folders: list[Path]) -> Iterator[AuxModels]:
    model, held = Model(path=str(folders[0])), Fsdp2(device="cpu")
    made = [Fsdp2Backend(model, CONFIG.optimizer, held, temperature=1.0, timeout_s=60) for _ in range(3)]
    aux_models = AuxModels(CONFIG, LocalModel(CONFIG, [made[1]], made[0]), LocalTrainableModel(CONFIG, made[2]))
    yield aux_models
    aux_models.close()
    made[0].close()


async def test_a_model_learns_to_classify_outcomes_and_its_checkpoint_keeps_it(aux_models, tmp_path):
    first = await scores_of(aux_models, GROUPS)
    assert max(np.abs(values).max() for values in first.values.values()) < 1e-5  # it begins as the reference
    done = []
    for _ in range(30):
        scores = await scores_of(aux_models, GROUPS)
        sequences = to_train_batch(GROUPS, CONFIG.algorithm, 5, 5, scores=scores)
        done.append(await aux_models.learn(sequences)())
    assert done[0].reward_model_loss == pytest.approx(math.log(2), abs=1e-4)
    assert done[-1].reward_model_loss < 0.2
    assert done[-1].reward_model_accuracy == 1.0
    for writing in aux_models.save(tmp_path, CheckpointState(step=1, version=1)):
        await asyncio.wait_for(writing, 60)
    expected = (await scores_of(aux_models, GROUPS)).values
    await aux_models.learn(sequences)()
    await aux_models.load(path_of(tmp_path, 1))
    again = (await scores_of(aux_models, GROUPS)).values
    assert all((again[name] == values).all() for name, values in expected.items())


def test_one_line_of_config_and_what_goes_with_it(aux_models):
    assert load("quickstart", ["learner.algorithm.advantage.kind=prime"]).learner.algorithm.advantage == Prime()
    with pytest.raises(LearnerError, match="of kind prime with a reward model"):
        AuxModels(CONFIG, aux_models._reference)
    with pytest.raises(LearnerError, match="go with a reference policy"):
        AuxModels(Learner(algorithm=Algorithm(kl=KlInLoss())))
