"""Advantages by token and the critic that they need: formulas, a critic that learns, and what a checkpoint holds of it."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from slipstream.configs import load
from slipstream.configs.algorithm import Algorithm, Gae
from slipstream.configs.backends import Fsdp2
from slipstream.configs.schema import Learner, Model, Optimizer
from slipstream.errors import CheckpointError, LearnerError
from slipstream.learner import packing
from slipstream.learner.algorithms import advantage_of, returns_of
from slipstream.learner.aux_models.aux_models import TRAINED, AuxModels
from slipstream.learner.aux_models.base import LocalTrainableModel
from slipstream.learner.aux_models.critic import Critic, explained_variance, value_loss
from slipstream.learner.batch import Group, TrainBatch
from slipstream.learner.checkpoint_folder import CheckpointState, path_of
from slipstream.learner.fsdp2.backend import Fsdp2Backend
from slipstream.learner.packing import MicroBatch
from slipstream.tests.columns import Columns, by_id, credit, episodes_only, flat, to_train_batch
from slipstream.tests.test_learner_credit import branches

PLAIN = Gae(gamma=0.9, lam={"policy": 0.8, "critic": 0.7}, normalize=False)
GROUPS: list[Group] = [
    (*branches(0, 0, [0.0, 1.0], split=1), *branches(0, 1, [0.0, 0.0]), *branches(0, 2, [1.0])),
    (*branches(1, 0, [0.5]), *branches(1, 1, [0.0, 0.25, 1.0])),
]
BRANCHES = [t for group in GROUPS for t in group]


class Episode(NamedTuple):
    rewards: np.ndarray
    values: np.ndarray


class Judged(NamedTuple):
    advantages: np.ndarray
    returns: np.ndarray


def estimate(config: Gae, episodes: list[Episode]) -> list[Judged]:
    batch = episodes_only([e.rewards for e in episodes], np.arange(len(episodes)))
    # float64, so that rounding hides nothing.
    batch = msgspec.structs.replace(batch, values=np.concatenate([e.values for e in episodes]))
    algorithm = Algorithm(advantage=config)
    found = (estimator(batch) for estimator in (advantage_of(algorithm), returns_of(algorithm)))
    return [Judged(*both) for both in zip(*(np.split(one, batch.offsets[1:-1]) for one in found), strict=True)]


def oracle(rewards, values, gamma: float, lam: float) -> list[float]:
    """Equation 16 as it stands: for each t the weighted sum over all later temporal differences."""
    after = [*values[1:], 0.0]
    deltas = [r + gamma * w - v for r, w, v in zip(rewards, after, values, strict=True)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]


def chains(seed: int = 0) -> list[Episode]:
    rng = np.random.default_rng(seed)
    return [Episode(rng.normal(size=n), rng.normal(size=n)) for n in (1, 7, 30)]


def test_advantages_and_returns_are_those_of_the_formulas():
    for chain, judged in zip(chains(), estimate(PLAIN, chains()), strict=True):
        rewards, values = chain.rewards.tolist(), chain.values.tolist()
        assert judged.advantages.tolist() == pytest.approx(oracle(rewards, values, 0.9, 0.8), abs=1e-12)
        returns = np.array(oracle(rewards, values, 0.9, 0.7)) + chain.values
        assert judged.returns == pytest.approx(returns, abs=1e-12)


def test_with_lambda_one_the_critic_learns_the_return_and_with_zero_the_next_value():
    (chain,) = chains()[1:2]
    to_the_end = estimate(Gae(gamma=1.0, lam={"critic": 1.0}), [chain])[0].returns
    assert to_the_end == pytest.approx(np.cumsum(chain.rewards[::-1])[::-1])
    one_step = estimate(Gae(gamma=1.0, lam={"critic": 0.0}), [chain])[0].returns
    assert one_step == pytest.approx(chain.rewards + np.append(chain.values[1:], 0))


def test_lambda_grows_with_length():
    for chain, judged in zip(
        chains(), estimate(msgspec.structs.replace(PLAIN, lam={"by_length": 0.05}), chains()), strict=True
    ):
        lam = max(0.0, 1 - 1 / (0.05 * len(chain.rewards)))
        assert judged.advantages.tolist() == pytest.approx(oracle(chain.rewards, chain.values, 0.9, lam), abs=1e-12)
    assert lam == pytest.approx(1 / 3)  # of the longest


def test_normalised_advantages_have_mean_zero_and_deviation_one_and_keep_their_order():
    plain = np.concatenate([j.advantages for j in estimate(PLAIN, chains())])
    normal = np.concatenate([j.advantages for j in estimate(msgspec.structs.replace(PLAIN, normalize=True), chains())])
    assert (normal.mean(), normal.std()) == (pytest.approx(0, abs=1e-12), pytest.approx(1))
    assert (np.argsort(normal) == np.argsort(plain)).all()


# ---------------------------------------------------------------- credit


def values_of(number) -> dict[str, np.ndarray]:
    return {t.id: np.where(t.loss_mask, number(t), 0).astype(np.float32) for t in BRANCHES}


def test_an_episode_is_one_chain_through_all_its_branches_and_turns():
    scores = Columns(values=values_of(lambda t: 0.1 * np.arange(len(t))))
    found = credit(GROUPS, Algorithm(advantage=PLAIN), scores)
    for group in GROUPS:
        for member in {t.member for t in group}:
            own_branches = [t for t in group if t.member == member]
            values = np.concatenate([scores.values[t.id][t.loss_mask] for t in own_branches]).astype(float)
            rewards = []
            turns = [turn for t in own_branches for turn in t.turns]
            for turn_reward, turn in zip(own_branches[0].turn_rewards, turns, strict=True):
                rewards += [0.0] * (turn.end - turn.start - 1) + [turn_reward]
            advantages = np.concatenate([found.advantages[t.id][t.loss_mask] for t in own_branches])
            assert advantages.tolist() == pytest.approx(oracle(rewards, values.tolist(), 0.9, 0.8), abs=1e-6)
            returns = np.concatenate([found.returns[t.id][t.loss_mask] for t in own_branches])
            assert returns == pytest.approx(np.array(oracle(rewards, values.tolist(), 0.9, 0.7)) + values, abs=1e-6)
    for t in BRANCHES:
        assert np.array_equal(np.isnan(found.advantages[t.id]), ~t.loss_mask)


def test_rewards_that_fit_no_turn_are_earned_at_the_end_and_penalties_where_they_are():
    (made,) = branches(0, 0, [0.0, 3.0])
    made = msgspec.structs.replace(made, turn_rewards=(3.0,))  # one step of the environment, two completions
    config = Gae(gamma=1.0, lam={"policy": 1.0}, normalize=False)
    zeros = {made.id: np.zeros(len(made), dtype=np.float32)}
    penalties = {made.id: np.where(np.arange(len(made)) == made.turns[0].start, 1, 0).astype(np.float32)}
    found = credit([(made,)], Algorithm(advantage=config), Columns(values=zeros, penalties=penalties))
    assert found.advantages[made.id][made.loss_mask].tolist() == [2.0, 3.0, 3.0]


def test_without_a_critic_there_is_no_credit_by_token():
    with pytest.raises(LearnerError, match="needs an aux model, and this learner has none"):
        credit(GROUPS, Algorithm(advantage=Gae()))


# ---------------------------------------------------------------- the critic


CONFIG = Learner(algorithm=Algorithm(advantage=Gae(lr=3e-3, normalize=False)), optimizer=Optimizer(lr=1e-3))


@pytest.fixture
def pair(folders: list[Path]) -> Iterator[tuple[Fsdp2Backend, Critic]]:
    model, held = Model(path=str(folders[0])), Fsdp2(device="cpu")
    policy = Fsdp2Backend(model, CONFIG.optimizer, held, temperature=1.0, timeout_s=60)
    critic = Critic(model, CONFIG.optimizer, held, temperature=1.0, timeout_s=60)
    yield policy, critic
    critic.close()
    policy.close()


def sequences(scores: Columns, groups: list[Group] = GROUPS) -> TrainBatch:
    return to_train_batch(groups, CONFIG.algorithm, 5, 5, scores=scores)


async def scores_of(aux_models: AuxModels, groups: list[Group] = GROUPS) -> Columns:
    """The columns of the aux models."""
    found = await aux_models.score(flat(groups))
    names = ("reference_logprobs", "penalties", "values")
    return Columns(**{name: by_id(found, getattr(found, name)) for name in names})


def rows(scores: Columns) -> list[MicroBatch]:
    return packing.microbatches(sequences(scores), 0, 1, 16)


async def test_a_critic_expects_nothing_at_first_and_learns_what_is_earned(pair):
    groups = GROUPS[:1]  # in which equal tokens have equal returns
    aux_models = AuxModels(CONFIG, trained=LocalTrainableModel(CONFIG, pair[1]))
    first = await scores_of(aux_models, groups)
    assert first.reference_logprobs is None
    assert not any(values.any() for values in first.values.values())
    errors, explained = [], []
    for _ in range(40):
        done = await aux_models.learn(sequences(await scores_of(aux_models, groups), groups))()
        errors.append(done.value_loss)
        explained.append(done.explained_variance)
    targets = credit(groups, CONFIG.algorithm, first).returns
    mean_square = np.mean(np.concatenate([targets[t.id][t.loss_mask] for t in groups[0]]) ** 2)
    assert errors[0] == pytest.approx(mean_square / 2, rel=1e-5)
    assert errors[-1] < errors[0] / 20
    assert explained[0] < 0 < 0.9 < explained[-1] <= 1


def test_the_loss_is_half_the_squared_error_and_its_gradient_the_error():
    (row,) = packing.microbatches(
        to_train_batch(GROUPS, CONFIG.algorithm, 5, 5, scores=Columns(values=values_of(lambda t: 0.5))),
        0,
        1,
        1000,
    )
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(len(row.token_ids), generator=generator, dtype=torch.float64, requires_grad=True)
    output = value_loss(values, values * 0, row)
    output.loss_sum.backward()
    error = np.where(row.loss_mask, values.detach() - row.returns, 0)
    assert float(output.loss_sum.detach()) == pytest.approx((error**2).sum() / 2)
    assert values.grad.numpy() == pytest.approx(error)
    returns = row.returns[row.loss_mask].double()
    means = {name: float(value) / len(returns) for name, value in output.sums.items()}
    assert explained_variance(means) == pytest.approx(
        1 - (error**2).sum() / len(returns) / float(returns.var(correction=0))
    )


def test_a_step_of_the_critic_warns_of_nothing(pair):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair[1].step(rows(Columns(values=values_of(lambda t: 0.5))), value_loss, 1e-3)


def test_a_row_that_fills_up_teaches_the_critic_nothing(pair):
    critic, full = pair[1], rows(Columns(values=values_of(lambda t: 0.5)))
    assert critic.step([*full, packing.scoring_microbatch([[0]])], value_loss, 0.0).means["error_square"] > 0
    bare = [msgspec.structs.replace(row, returns=None) for row in full]
    with pytest.raises(LearnerError, match="these rows lack returns"):
        critic.step(bare, value_loss, 0.0)


async def test_a_checkpoint_holds_the_critic_too(pair, tmp_path):
    policy, critic = pair
    aux_models = AuxModels(CONFIG, trained=LocalTrainableModel(CONFIG, critic))

    async def values() -> dict[str, np.ndarray]:
        values = (await scores_of(aux_models)).values
        assert values is not None
        return dict(values)

    async def learn() -> None:
        await aux_models.learn(sequences(await scores_of(aux_models)))()

    async def save(state: CheckpointState) -> None:
        for writing in aux_models.save(tmp_path, state):
            await asyncio.wait_for(writing, 60)

    for _ in range(3):
        await learn()
    expected = await values()
    state = CheckpointState(step=2, version=7)
    there = path_of(tmp_path, 2)
    assert not aux_models.saved_with(there)
    await save(state)
    assert aux_models.saved_with(there)
    await learn()
    assert any((values != expected[name]).any() for name, values in (await values()).items())
    await aux_models.load(there)
    assert all((values == expected[name]).all() for name, values in (await values()).items())
    for step in (4, 6):
        await save(CheckpointState(step=step, version=7))
    aux_models.prune(tmp_path, 2)
    assert sorted(path.name for path in (tmp_path / TRAINED).iterdir()) == ["step-00000004", "step-00000006"]
    policy.save(tmp_path / TRAINED / "step-00000008", state).result(60)
    with pytest.raises(CheckpointError, match="another model"):
        await aux_models.load(path_of(tmp_path, 8))


def test_one_line_of_config_asks_for_a_critic_and_vapo_is_a_preset():
    algorithm = load("quickstart", ["learner.algorithm.advantage.kind=gae"]).learner.algorithm
    assert algorithm.advantage == Gae()
    vapo = load("vapo").learner.algorithm
    assert isinstance(vapo.advantage, Gae)
    assert vapo.advantage.lam == {"policy": 0.95, "critic": 1.0, "by_length": 0.05}
    assert 0 < vapo.advantage.critic_warmup < load("vapo").learner.steps
    assert vapo.loss.clip == (0.2, 0.28)  # type: ignore[union-attr]
    assert vapo.minibatches > 1
    assert vapo.terms["imitation"] == 0.1
