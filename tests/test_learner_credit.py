"""From trajectories to tokens: which turn has which advantage, what is refused, and a step of a real model with each estimator."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch
from slipstream.buffer.trajectory import FINISHED, Outcome, Trajectory, Turn, VersionSpan
from slipstream.configs import load
from slipstream.configs.algorithm import Algorithm, Grpo, Opo, Remax, TurnLevel
from slipstream.configs.backends import Fsdp2
from slipstream.configs.schema import Model, Optimizer
from slipstream.errors import ConfigError, LearnerError
from slipstream.learner import packing
from slipstream.learner.algorithms import loss_of
from slipstream.learner.fsdp2.backend import Fsdp2Backend
from slipstream.tests.advantages import ALL, DR_GRPO, GRPO, ORACLES, Episode, names
from slipstream.tests.columns import Columns, credit, to_train_batch

KINDS = ["grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "opo", "remax", "win_rate", "turn_level"]


def branches(
    group: int, member: int, turn_rewards: Sequence[float], *, split: int = 0, outcome: Outcome = FINISHED
) -> list[Trajectory]:
    """An episode of version 5 with turns of 1, 2, 3, ... tokens after one of context each; after `split` turns it goes on in a
    second branch."""
    reward = sum(turn_rewards)
    parts = [range(split), range(split, len(turn_rewards))] if split else [range(len(turn_rewards))]
    made = []
    for number, part in enumerate(parts):
        turns, at = [], 0
        for k in part:
            turns.append(Turn(at + 1, at + 2 + k, "stop"))
            at += 2 + k
        mask = np.zeros(at, dtype=np.bool_)
        for turn in turns:
            mask[turn.start : turn.end] = True
        trajectory = Trajectory(
            id=f"{group}.0.{member}.{number}",
            group_id=group,
            member=member,
            branch=number,
            task_id="t",
            env="e",
            token_ids=np.arange(3 + 7 * member, 3 + 7 * member + at, dtype=np.int32),
            loss_mask=mask,
            behavior_logprobs=np.where(mask, -5.0, 0).astype(np.float32),
            version_spans=tuple(VersionSpan(turn.start, turn.end, 5) for turn in turns),
            turns=tuple(turns),
            reward=reward,
            turn_rewards=tuple(turn_rewards),
            outcome=outcome,
        )
        trajectory.check()
        made.append(trajectory)
    return made


def to_sequences(config, groups, withheld=None):
    return to_train_batch(groups, Algorithm(advantage=config), 5, 5, withheld or {})


def test_tokens_carry_the_advantage_of_their_turn_in_whichever_branch():
    group = (*branches(0, 0, [0.0, 2.0, 1.0], split=1), *branches(0, 1, [0.0, 0.0, 0.0]))
    other, one, two = to_sequences(TurnLevel(gamma=0.5, normalize=False), [group[::-1]])
    # Returns-to-go of the first: 0 + 0.5 * 2.5, 2 + 0.5 * 1, 1; the other's are 0, and half of each is the baseline.
    assert one.advantages.tolist() == [0, 0.625]
    assert two.advantages.tolist() == [0, 1.25, 1.25, 0, 0.5, 0.5, 0.5]
    assert other.advantages.tolist() == [0, -0.625, 0, -1.25, -1.25, 0, -0.5, -0.5, -0.5]


def test_lengths_and_rewards_of_an_episode_are_summed_over_its_branches():
    group = (*branches(0, 0, [0.0, 2.0], split=1), *branches(0, 1, [0.0]))  # 3 sampled tokens for reward 2, 1 for 0
    one, two, other = to_sequences(Opo(), [group])
    assert {*one.advantages[one.loss_mask], *two.advantages[two.loss_mask]} == {0.5}
    assert other.advantages[other.loss_mask].tolist() == [-1.5]


@pytest.mark.parametrize("config", ALL, ids=names)
def test_withheld_episodes_are_compared_with_and_carry_no_loss(config):
    groups = [
        tuple(t for m, r in enumerate([1.0, 0.0, 4.0]) for t in branches(0, m, [0.5, r])),
        tuple(t for m, r in enumerate([0.0, 2.0]) for t in branches(1, m, [r])),
    ]
    withheld = {"0.0.2": "late", "1.0.0": "filtered"}
    whole, wanted = to_sequences(config, groups), to_sequences(config, groups, withheld)
    names = ["0.0.0", "0.0.1", "0.0.2", "1.0.0", "1.0.1"]
    kept = [s for s, name in zip(whole, names, strict=True) if name not in withheld]
    assert [s.advantages.tolist() for s in wanted] == [s.advantages.tolist() for s in kept]


def test_what_was_played_greedily_is_the_baseline_of_remax_and_is_not_trained():
    group = (*branches(0, 0, [1.0]), *branches(0, 1, [0.5, 2.0], split=1), *branches(0, 2, [0.0]))
    one, two, last = to_sequences(Remax(), [group], {"0.0.0": "baseline"})
    assert {*one.advantages[one.loss_mask], *two.advantages[two.loss_mask]} == {1.5}
    assert last.advantages[last.loss_mask].tolist() == [-1.0]
    (chosen,) = to_sequences(Remax(), [group], {"0.0.0": "baseline", "0.0.1": "filtered"})
    assert chosen.advantages.tolist() == last.advantages.tolist()


def test_a_penalty_by_token_comes_off_what_was_sampled_and_not_off_the_baseline():
    group = (*branches(0, 0, [1.0]), *branches(0, 1, [2.0]))
    scores = Columns(penalties={t.id: np.where(t.loss_mask, np.float32(0.25), np.float32(0)) for t in group})
    (sampled,) = to_train_batch([group], Algorithm(advantage=Remax()), 5, 5, {"0.0.0": "baseline"}, scores=scores)
    assert sampled.advantages[sampled.loss_mask].tolist() == [0.75]


@pytest.mark.parametrize("config", ALL, ids=names)
def test_every_token_of_a_batch_carries_what_the_formula_gives_its_turn(config):
    rng = np.random.default_rng(0)
    rewards = [[[float(r) for r in rng.normal(size=rng.integers(1, 4))] for _ in range(size)] for size in (4, 2, 3)]
    groups = [
        tuple(t for m, r in enumerate(row) for t in branches(g, m, r, split=int(m == 1 and len(r) > 1)))
        for g, row in enumerate(rewards)
    ]
    turns = [[list(range(1, len(r) + 1)) for r in row] for row in rewards]
    plain = [
        [Episode(r, sum(n), m == 0, n) for m, (r, n) in enumerate(zip(*both, strict=True))]
        for both in zip(rewards, turns, strict=True)
    ]
    expected = iter(ORACLES[type(config)](config, plain))
    baselines = {"0.0.0", "1.0.0", "2.0.0"}
    found = credit(groups, Algorithm(advantage=config), withheld=dict.fromkeys(baselines, "baseline")).advantages
    withheld = dict.fromkeys(baselines, "baseline") if isinstance(config, Remax) else {}
    wanted = [t for g in groups for t in g if t.episode not in withheld]
    rows = {t.id: s for t, s in zip(wanted, to_sequences(config, groups, withheld), strict=True)}
    for group in groups:
        for trajectory in group:
            assert np.array_equal(np.isnan(found[trajectory.id]), ~trajectory.loss_mask)
            for turn in trajectory.turns:
                values = found[trajectory.id][turn.start : turn.end]
                assert values == pytest.approx(next(expected), abs=1e-9)
                if trajectory.id in rows:
                    ours = rows[trajectory.id].advantages[turn.start : turn.end]
                    assert np.array_equal(ours, values)
    assert next(expected, None) is None


def test_a_failure_is_judged_by_its_penalty_after_its_last_turn():
    penalised = [
        msgspec.structs.replace(t, reward=-1.0, turn_rewards=(), outcome=Outcome("failed", "tool"))
        for t in branches(0, 0, [0.0, 0.0])
    ]
    failed, other = to_sequences(TurnLevel(gamma=0.5, normalize=False), [(*penalised, *branches(0, 1, [0.0, 0.0]))])
    assert failed.advantages.tolist() == [0, -0.25, 0, -0.5, -0.5]
    assert other.advantages.tolist() == [0, 0.25, 0, 0.5, 0.5]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("config", ALL, ids=names)
def test_an_empty_group_is_named(config):
    with pytest.raises(LearnerError, match="group number 1 of the batch is empty"):
        to_sequences(config, [tuple(branches(0, 0, [1.0])), ()])


@pytest.mark.parametrize("config", ALL, ids=names)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_no_finite_number_is_named(config, bad):
    good, (ill,) = branches(0, 0, [1.0]), branches(0, 1, [1.0])
    for ill_one in (msgspec.structs.replace(ill, reward=bad), msgspec.structs.replace(ill, turn_rewards=(bad,))):
        with pytest.raises(LearnerError, match=r"'0\.0\.1\.0'.*not finite"):
            to_sequences(config, [(*good, ill_one)])


def test_rewards_beyond_all_bounds_are_refused():
    group = (*branches(0, 0, [1.7e308]), *branches(0, 1, [1.7e308]))
    with pytest.raises(LearnerError, match="advantages are not finite"):
        to_sequences(DR_GRPO, [group])


def test_turn_level_needs_a_reward_for_every_turn_and_the_others_do_not():
    (one,), other = branches(0, 0, [1.0, 1.0]), branches(0, 1, [0.0])
    group = (msgspec.structs.replace(one, turn_rewards=(2.0,)), *other)
    with pytest.raises(LearnerError, match=r"'0\.0\.0' has 2 completions and 1 rewards.*turn_level"):
        to_sequences(TurnLevel(), [group])
    assert len(to_sequences(GRPO, [group])) == 2


def test_sampled_tokens_outside_all_turns_are_refused():
    (one,) = branches(0, 0, [1.0, 1.0])
    group = (msgspec.structs.replace(one, turns=one.turns[:1], turn_rewards=(2.0,)), *branches(0, 1, [0.0]))
    with pytest.raises(LearnerError, match=r"'0\.0\.0\.0'.*none of its turns"):
        to_sequences(GRPO, [group])


# ---------------------------------------------------------------- one line of config


def test_a_batch_without_groups_has_no_sequences():
    assert len(to_sequences(GRPO, [])) == 0


@pytest.fixture(scope="module")
def backend(folders):
    backend = Fsdp2Backend(Model(path=str(folders[0])), Optimizer(), Fsdp2(device="cpu"), temperature=1.0, timeout_s=60)
    yield backend
    backend.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_real_model_is_stepped_with_each_kind_by_one_line_of_config(backend, kind):
    algorithm = load("quickstart", [f"learner.algorithm.advantage.kind={kind}"]).learner.algorithm
    groups = [
        (*branches(0, 0, [0.0, 1.0], split=1), *branches(0, 1, [0.0, 0.0]), *branches(0, 2, [1.0])),
        (*branches(1, 0, [0.5]), *branches(1, 1, [0.0, 0.25, 1.0])),
    ]
    withheld = {"0.0.2": "baseline" if kind == "remax" else "late"}
    sequences = to_train_batch(groups, algorithm, 5, 5, withheld)
    assert len(sequences) == 5
    rows = packing.microbatches(sequences, 0, 1, 16)
    assert len(rows) > 1
    before = dict(backend.named_weights())
    proximal = backend.logprobs(rows)
    rows = [packing.with_proximal(row, p) for row, p in zip(rows, proximal, strict=True)]
    result = backend.step(rows, loss_of(algorithm, longest=64)(rows, backend.gather), 1e-3)
    assert result.tokens == int(sequences.loss_mask.sum()) == 13
    assert np.isfinite(result.loss)
    assert result.grad_norm > 0
    after = dict(backend.named_weights())
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_presets_keep_their_estimator_and_the_two_forms_of_grpo_are_one_kind():
    assert load("quickstart").learner.algorithm.advantage == Grpo()
    assert load("quickstart", ["learner.algorithm.advantage.normalize=false"]).learner.algorithm.advantage == DR_GRPO


@pytest.mark.parametrize(
    ("overrides", "key", "hint"),
    [
        (
            ["kind=dr_grpo"],
            "advantage.kind",
            "grpo, rloo, reinforce_pp, reinforce_pp_baseline, opo, remax, win_rate, turn_level",
        ),
        (["kind=turn_level", "gamma=1.5"], "advantage.gamma", "<= 1"),
        (["kind=turn_level", "gamma=-0.1"], "advantage.gamma", ">= 0"),
        (["kind=turn_level", "normalize=2"], "advantage.normalize", "true or false"),
        (["kind=rloo", "normalize=true"], "advantage.normalize", "learner.algorithm.advantage"),
        (["kind=grpo", "gamma=0.9"], "advantage.gamma", "normalize"),
    ],
)
def test_what_an_estimator_does_not_know_is_refused_in_one_line(overrides, key, hint):
    with pytest.raises(ConfigError) as caught:
        load("quickstart", [f"learner.algorithm.advantage.{override}" for override in overrides])
    message = str(caught.value)
    assert f"learner.algorithm.{key}" in message
    assert hint in message
    assert "\n" not in message
