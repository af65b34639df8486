"""PRIME: advantages and the process reward model's loss against their formulas, and a model that learns to tell outcomes apart."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from slipstream.configs import load
from slipstream.configs.algorithm import Algorithm, KlInLoss, Prime
from slipstream.configs.backends import Fsdp2
from slipstream.configs.schema import Learner, Model, Optimizer
from slipstream.errors import LearnerError
from slipstream.learner import batch
from slipstream.learner.algorithms import advantage_of
from slipstream.learner.algorithms.episodes import Chain
from slipstream.learner.algorithms.prime import process_loss
from slipstream.learner.beside.held import Held, HeldLearning
from slipstream.learner.checkpoint import CheckpointState, path_of
from slipstream.learner.companions import Companions
from slipstream.learner.credit import Group, credit
from slipstream.learner.fsdp2.backend import Fsdp2Backend
from slipstream.learner.scores import Scores
from slipstream.tests.test_learner_credit import branches

BETA, GAMMA = 0.3, 0.8
PRIME = Prime(beta=BETA, gamma=GAMMA, reward_lr=1e-3)
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
    chains = [
        Chain(np.array([0.0] * (len(ratios) - 1) + [earned]), np.array(ratios), group=10**12 + g)
        for g, group in enumerate(groups)
        for earned, ratios in group
    ]
    found = advantage_of(Algorithm(advantage=PRIME)).estimate(chains)
    expected = [row for group in groups for row in oracle(group)]
    assert [judged.advantages.tolist() for judged in found] == [pytest.approx(row, abs=1e-12) for row in expected]
    assert all(judged.returns is None for judged in found)


def test_who_is_alone_teaches_nothing():
    (judged,) = advantage_of(Algorithm(advantage=PRIME)).estimate([Chain(np.array([0.0, 5.0]), np.array([1.0, 2.0]))])
    assert judged.advantages.tolist() == [0, 0]


def test_credit_follows_an_episode_through_its_branches():
    rng = np.random.default_rng(1)
    told = {t.id: np.where(t.loss_mask, rng.normal(size=len(t)), 0).astype(np.float32) for t in BRANCHES}
    found = credit(GROUPS, advantage_of(Algorithm(advantage=PRIME)), Scores(told=told))
    assert found.returns is None
    for group in GROUPS:
        members = sorted({t.member for t in group})
        mine = [[t for t in group if t.member == member] for member in members]
        ratios = [np.concatenate([told[t.id][t.loss_mask] for t in ts]).astype(float).tolist() for ts in mine]
        expected = oracle([(ts[0].reward, row) for ts, row in zip(mine, ratios, strict=True)])
        for ts, row in zip(mine, expected, strict=True):
            got = np.concatenate([found.advantages[t.id][t.loss_mask] for t in ts])
            assert got.tolist() == pytest.approx(row, abs=1e-6)


# ---------------------------------------------------------------- the model


def row_of(seed: int = 0):
    """A row of five sequences, one of them without a trained token, with a reference."""
    scores = Scores(
        told={t.id: np.zeros(len(t), dtype=np.float32) for t in BRANCHES},
        reference={t.id: np.where(t.loss_mask, -1.5, 0).astype(np.float32) for t in BRANCHES},
    )
    (row,) = batch.rank_rows(
        batch.to_sequences(GROUPS, advantage_of(CONFIG.algorithm), 5, 5, scores=scores), 0, 1, 1000
    )
    return row


def test_the_loss_is_the_cross_entropy_of_outcomes():
    row = row_of()
    logprobs = torch.randn(len(row.token_ids), requires_grad=True)
    output = process_loss(BETA)([row], lambda values: values)(logprobs, logprobs * 0, row)
    output.loss_sum.backward()
    ends, total, right, gradient = row.cu_seqlens, 0.0, 0, np.zeros(len(row.token_ids))
    tokens, sequences = int(row.trained.sum()), len(ends) - 1
    for start, end in itertools.pairwise(ends):
        trained = row.trained[start:end].numpy()
        ratios = (logprobs.detach() - row.reference_logprobs)[start:end].double().numpy()
        score, good = BETA * ratios[trained].sum(), bool(row.earned[start:end].any())
        p = 1 / (1 + math.exp(-score))
        total -= math.log(p if good else 1 - p) * tokens / sequences
        right += int((score > 0) == good) * trained.sum()
        gradient[start:end] = np.where(trained, BETA * (p - good) * tokens / sequences, 0)
    assert 0 < sum(bool(row.earned[s:e].any()) for s, e in itertools.pairwise(ends)) < sequences
    assert float(output.loss_sum.detach()) == pytest.approx(total, rel=1e-5)
    assert logprobs.grad.numpy() == pytest.approx(gradient, abs=1e-6)
    assert int(output.sums["right"]) == right


def test_rows_without_a_reference_are_refused_unless_they_only_fill_up():
    empty, row = batch.scoring_row([[0]]), msgspec.structs.replace(row_of(), reference_logprobs=None)
    loss = process_loss(BETA)([empty, row], lambda values: values)
    zeros = torch.zeros(1, requires_grad=True)
    assert float(loss(zeros, zeros, empty).loss_sum.detach()) == 0
    with pytest.raises(LearnerError, match="relative to a reference policy, whose log-probs these rows lack"):
        loss(torch.zeros(len(row.token_ids)), torch.zeros(len(row.token_ids)), row)


@pytest.fixture
def companions(folders: list[Path]) -> Iterator[Companions]:
    model, held = Model(path=str(folders[0])), Fsdp2(device="cpu")
    made = [Fsdp2Backend(model, CONFIG.optimizer, held, temperature=1.0, timeout_s=60) for _ in range(3)]
    companions = Companions(CONFIG, Held(CONFIG, made[1], made[0]), HeldLearning(CONFIG, made[2]))
    yield companions
    companions.close()
    made[0].close()


async def test_a_model_learns_to_tell_outcomes_apart_and_its_checkpoint_remembers(companions, tmp_path):
    first = await companions.score(GROUPS)
    assert max(np.abs(values).max() for values in first.told.values()) < 1e-5  # it begins as the reference
    done = []
    for _ in range(30):
        scores = await companions.score(GROUPS)
        sequences = batch.to_sequences(GROUPS, advantage_of(CONFIG.algorithm), 5, 5, scores=scores)
        done.append(await companions.learn(sequences)())
    assert done[0].reward_model_loss == pytest.approx(math.log(2), abs=1e-4)
    assert done[-1].reward_model_loss < 0.2
    assert done[-1].reward_model_accuracy == 1.0
    for writing in companions.save(tmp_path, CheckpointState(step=1, version=1)):
        await asyncio.wait_for(writing, 60)
    expected = (await companions.score(GROUPS)).told
    await companions.learn(sequences)()
    await companions.load(path_of(tmp_path, 1))
    again = (await companions.score(GROUPS)).told
    assert all((again[name] == values).all() for name, values in expected.items())


def test_one_line_of_config_and_what_goes_with_it(companions):
    assert load("quickstart", ["learner.algorithm.advantage.kind=prime"]).learner.algorithm.advantage == Prime()
    with pytest.raises(LearnerError, match="of kind prime with a reward model"):
        Companions(CONFIG, companions._reference)
    with pytest.raises(LearnerError, match="go with a reference policy"):
        Companions(Learner(algorithm=Algorithm(kl=KlInLoss())))
