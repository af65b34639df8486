"""Advantages and losses of one's own: what they are given, what is checked before the start and at each step, and the example,
whose Lagrange multiplier is state that checkpoints hold."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from slipstream.configs import load
from slipstream.configs.algorithm import Algorithm, Grpo, KlInLoss, KlInReward, PythonFunction, Sapo
from slipstream.errors import ConfigError, LearnerError
from slipstream.learner.algorithms import advantage_of, loss_of, own
from slipstream.learner.checkpoint_folder import checkpoints, read_state
from slipstream.learner.packing import scoring_microbatch
from slipstream.tests.columns import episodes_only
from slipstream.tests.test_learner_hostile import Replica
from slipstream.tests.test_learner_losses import make_row, make_sequences, one_rank
from slipstream.tests.test_learner_table import run

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """An importable module of the user's, `mine`."""
    module = types.ModuleType("mine")
    monkeypatch.setitem(sys.modules, "mine", module)
    own._load.cache_clear()
    yield module
    own._load.cache_clear()


def advantage(function) -> Algorithm:
    sys.modules["mine"].function = function
    return Algorithm(advantage=PythonFunction(function="mine:function"))


def loss(function) -> Algorithm:
    sys.modules["mine"].function = function
    return Algorithm(loss=PythonFunction(function="mine:function"))


def centered(batch, carried):
    return batch.rewards - (np.bincount(batch.groups, batch.rewards) / np.bincount(batch.groups))[batch.groups]


def test_an_advantage_of_ones_own_is_what_ours_is_with_the_same_formula(mine):
    batch = episodes_only([[1.0, 2.0], [0.0], [4.0], [1.0]], np.array([0, 0, 1, 1]))
    found = advantage_of(advantage(centered))(batch)
    np.testing.assert_array_equal(found, advantage_of(Algorithm(advantage=Grpo(normalize=False)))(batch))
    by_token = advantage_of(advantage(lambda b, carried: centered(b, carried)[b.episode_of_token]))(batch)
    np.testing.assert_array_equal(by_token, found)
    own.check(advantage(centered))


def test_a_loss_of_ones_own_is_what_ours_is_with_the_same_formula(mine):
    def sapo(tokens):
        tau = torch.where(tokens.advantages > 0, 1.0, 1.05).to(tokens.current.dtype)
        return -4 / tau * torch.sigmoid(tau * ((tokens.current - tokens.proximal).exp() - 1)) * tokens.advantages

    row, current, entropy = make_row(make_sequences(1))
    algorithm = msgspec.structs.replace(loss(sapo), aggregation="sequence_mean")
    slopes = []
    for one in (algorithm, Algorithm(loss=Sapo())):
        probe = current.clone().requires_grad_()
        loss_of(one, 50)([row], one_rank)(probe, entropy, row).loss_sum.backward()
        slopes.append(probe.grad)
    torch.testing.assert_close(*slopes)
    own.check(algorithm)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda b, carried: b.rewards * np.arange(len(b.rewards)), "depend on the order of the episodes"),
        (lambda b, carried: b.rewards / 0.0, "not finite"),
        (lambda b, carried: b.rewards[:2], r"shape \(2,\); it must be \(7,\), one number for each episode"),
        (lambda b, carried: b.rewards + np.random.default_rng().normal(), "something else when it is called again"),
        (lambda b, carried: b.earned, r"AttributeError.*earned.*test_learner_own.py:\d+"),
        (lambda b, carried: carried.update(lagrange="one") or b.rewards, r"carried\['lagrange'\] is 'one'"),
        (lambda b: b.rewards, "TypeError"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_an_advantage_that_is_none_is_refused_before_the_start(mine, function, expected):
    with pytest.raises(
        ConfigError, match=f"^learner.algorithm.advantage.function: mine:function.*{expected}"
    ) as caught:
        own.check(advantage(function))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda t: -t.current.detach() * t.advantages, "no gradient reaches tokens.current"),
        (lambda t: -t.current * 0 + t.entropy, "gradient by tokens.current is 0"),
        (lambda t: -(t.current * math.inf) * t.advantages, "not finite"),
        (lambda t: (-t.current * t.advantages).sum(), r"gave \(\); it must be a tensor of shape \(12,\)"),
        (lambda t: -t.current.cumsum(0), "depends on its place in the row"),
        (lambda t: None, "gave NoneType"),
    ],
)
def test_a_loss_that_is_none_is_refused_before_the_start(mine, function, expected):
    with pytest.raises(ConfigError, match=f"^learner.algorithm.loss.function: mine:function.*{expected}"):
        own.check(loss(function))


def test_what_a_run_gives_is_there_before_the_start(mine):
    """Penalties, log-probs of a reference, names of environments, and what one's own advantage wrote for one's own loss."""
    weights = {"sums": 1.0, "digits": 2.0}

    def costs(batch, carried):
        carried["limit"] = 0.5
        assert (batch.penalties[batch.sampled] != 0).all()
        assert not batch.penalties[~batch.sampled].any()
        each = np.bincount(batch.episode_of_token, batch.penalties + batch.reference_logprobs)
        return batch.rewards - each * np.array([weights[name] for name in batch.envs])

    algorithm = msgspec.structs.replace(advantage(costs), kl=KlInReward())
    own.check(algorithm, ["sums", "digits"])
    mine.loss = lambda tokens: -(tokens.current - tokens.reference) * tokens.advantages * tokens.carried["limit"]
    own.check(msgspec.structs.replace(algorithm, loss=PythonFunction(function="mine:loss")), ["sums", "digits"])


def test_what_a_run_does_not_give_is_not_there_before_the_start(mine):
    algorithm = loss(lambda tokens: -(tokens.current - tokens.reference) * tokens.advantages)
    with pytest.raises(ConfigError, match=r"^learner.algorithm.loss.function: mine:function: TypeError"):
        own.check(algorithm)
    own.check(msgspec.structs.replace(algorithm, kl=KlInLoss()))
    with pytest.raises(ConfigError, match=r"^learner.algorithm.advantage.function: mine:function: AttributeError"):
        own.check(advantage(lambda batch, carried: batch.rewards - batch.penalties.sum()))


def test_a_row_that_only_pads_the_number_of_passes_is_no_row_of_ones_own_loss(mine):
    algorithm = loss(lambda tokens: -(tokens.current - tokens.reference) * tokens.carried["limit"])
    padding, current = scoring_microbatch([[0]]), torch.zeros(1, requires_grad=True)
    output = loss_of(algorithm, 50)([padding], one_rank)(current, torch.zeros(1), padding)
    output.loss_sum.backward()
    assert (output.loss_sum.item(), current.grad) == (0.0, torch.zeros(1))


def test_what_goes_wrong_later_is_named(mine):
    batch = episodes_only([[1.0], [0.0]], np.array([0, 0]))
    with pytest.raises(LearnerError, match="mine:function: KeyError: 'cost'"):
        advantage_of(advantage(lambda b, carried: np.array([m["cost"] for m in ({}, {})])))(batch)


def test_names_that_lead_nowhere_are_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r"advantage.function: 'mine' is not of the form package.module:name"):
        load("quickstart", ["learner.algorithm.advantage={kind: python, function: mine}"])
    with pytest.raises(ConfigError, match=r"loss.function: must be set"):
        load("quickstart", ["learner.algorithm.loss.kind=python"])
    with pytest.raises(ConfigError, match="cannot import 'nowhere'"):
        own.check(Algorithm(advantage=PythonFunction(function="nowhere:function")))


async def test_safe_rlhf_lowers_the_cost_where_it_is_too_high_and_its_multiplier_is_in_the_checkpoint(
    folders, address, tmp_path, monkeypatch
):
    """Three steps by the keys of the example: all episodes cost more than is allowed."""
    monkeypatch.syspath_prepend(EXAMPLES)
    own._load.cache_clear()
    keys = [
        *(f"model.path={folders[0]}", "agent.max_tokens=64", "learner.steps=3", "learner.optimizer.lr=1e-3"),
        *("learner.backend.device=cpu", "buffer.max_staleness=1", "buffer.groups_per_batch=2", "buffer.group_size=3"),
        'learner.algorithm.advantage={kind: python, function: "safe_rlhf:advantage"}',
    ]
    config = load("quickstart", keys)
    own.check(config.learner.algorithm)
    replica = Replica(folders[0])
    rows = await run(config, replica, address, tmp_path, metrics={"cost": 0.5})
    assert [row.step for row in rows] == [1, 2, 3]
    multiplier = 1.0
    for _ in range(3):  # log lambda grows by RATE lambda (cost - LIMIT)
        multiplier *= math.exp(0.5 * multiplier * 0.4)
    state = read_state(checkpoints(tmp_path / "checkpoints")[-1])
    assert state.algorithm == {"lagrange_multiplier": pytest.approx(multiplier)}


def test_safe_rlhf_weighs_reward_against_cost_by_its_multiplier(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import safe_rlhf  # type: ignore[import-not-found]

    batch = episodes_only([[1.0], [0.0], [0.0]], np.array([0, 0, 0]))
    batch = msgspec.structs.replace(batch, metrics=({"cost": 1.0}, {"cost": 0.0}, {"cost": 0.0}))
    fond, strict = {"lagrange_multiplier": 0.1}, {"lagrange_multiplier": 10.0}
    assert safe_rlhf.advantage(batch, fond)[0] > 0 > safe_rlhf.advantage(batch, strict)[0]
    assert strict["lagrange_multiplier"] > 10.0  # the mean cost is 1/3
