"""Expert traces in the learner: they join their groups, their loss is the paper's, statistics of sampled tokens leave them out, and
a task that GRPO alone never solves is learned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from slipstream.buffer.ledger import Ledger
from slipstream.buffer.messages import BatchPlan, Stats
from slipstream.buffer.trajectory import BatchRow, Trajectory, Turn, VersionSpan
from slipstream.configs.algorithm import (
    Algorithm,
    Cispo,
    DecoupledPpo,
    Gspo,
    KlInLoss,
    Masked,
    Opo,
    Ppo,
    Rejected,
    Rloo,
    Sapo,
    Truncated,
)
from slipstream.learner.algorithms import advantage_of, loss_of
from slipstream.learner.algorithms.estimators import assign_advantages
from slipstream.learner.annotations import choose
from slipstream.learner.backend import BackendStepResult
from slipstream.learner.batch import NO_VERSION, TrainBatch, flatten, trainable, with_rows
from slipstream.learner.checkpoint_folder import CheckpointState
from slipstream.learner.metrics import PolicyStepResult, summarize
from slipstream.learner.packing import mismatch
from slipstream.learner.step import LargestRatios, PolicyStepper
from slipstream.learner.traces import ExpertTraces, read_traces, write_traces
from slipstream.tests.episodes import row_of, trajectory
from slipstream.tests.one_token import LONGEST, PROMPT, OneToken
from slipstream.tests.test_learner_losses import make_row, make_sequences, one_rank

GAMMA = 0.1
STATS = Stats(version=0, ledger=Ledger(), leased_groups=0, ready_groups=0, slot_s=0.0, idle_slot_s=0.0)


def trace_of(task: str, tokens: Sequence[int], reward: float, prompt: Sequence[int] = (0,)) -> Trajectory:
    """An expert's answer of `tokens`, as a run keeps it."""
    start, end = len(prompt), len(prompt) + len(tokens)
    return msgspec.structs.replace(
        trajectory("0.0.0"),
        task_id=task,
        token_ids=np.array([*prompt, *tokens], dtype=np.int32),
        loss_mask=np.arange(end) >= start,
        behavior_logprobs=np.zeros(end, dtype=np.float32),
        version_spans=(VersionSpan(start, end, NO_VERSION),),
        turns=(Turn(start, end, "stop"),),
        reward=reward,
        turn_rewards=(reward,),
    )


def plan_of(groups: Sequence[Sequence[Trajectory]], version: int = 0) -> BatchPlan[BatchRow]:
    rows = tuple(tuple(map(row_of, group)) for group in groups)
    return BatchPlan(version=version, oldest_version=0, groups=rows, withheld={}, stats=STATS)


# ---------------------------------------------------------------- a trace is a member of its group


def test_a_trace_joins_the_groups_of_its_task_and_no_other() -> None:
    groups = [[trajectory(f"{group}.0.{member}") for member in range(2)] for group in range(3)]
    groups[2] = [msgspec.structs.replace(one, task_id="task 0") for one in groups[2]]  # the same task once more
    traces = ExpertTraces(
        [trace_of("task 0", [5, 6], 9.0), trace_of("task 0", [7], 3.0), trace_of("elsewhere", [8], 1.0)]
    )
    taken = plan_of(groups)
    joined, rows = traces.join(taken)
    assert [len(group) for group in joined.groups] == [4, 2, 4]
    assert [len(group) for group in taken.groups] == [2, 2, 2]
    assert len(rows) == 4
    for group in joined.groups:
        assert [row.member for row in group] == list(range(len(group)))
        assert {row.group_id for row in group} == {group[0].group_id}
    batch = flatten(joined.groups, 3)
    assert batch.rewards.tolist() == [0.0, 1.0, 9.0, 3.0, 0.0, 1.0, 0.0, 1.0, 9.0, 3.0]
    assert batch.groups.tolist() == [0] * 4 + [1] * 2 + [2] * 4
    assert batch.traced.sum() == 2 * (2 + 1)
    assert set(batch.staleness[batch.traced].tolist()) == {-1}
    filled = with_rows(batch, rows.values())
    assert filled.token_ids[filled.traced].tolist() == [5, 6, 7] * 2
    assert not filled.behavior_logprobs[filled.traced].any()


@pytest.mark.parametrize("kind", ["grpo", "rloo", "opo"])
def test_advantages_are_over_the_rewards_of_episodes_and_traces(kind: str) -> None:
    group = [trajectory(f"0.0.{member}", sampled=2 + member) for member in range(3)]
    joined, _ = ExpertTraces([trace_of("task 0", [5] * 7, 4.0)]).join(plan_of([group]))
    algorithm = {"grpo": Algorithm(), "rloo": Algorithm(advantage=Rloo()), "opo": Algorithm(advantage=Opo())}[kind]
    found = assign_advantages(flatten(joined.groups, 0), advantage_of(algorithm))
    r, lengths = np.array([0.0, 1.0, 2.0, 4.0]), np.array([2, 3, 4, 7])
    expected = {
        "grpo": (r - r.mean()) / (r.std() + 1e-4),
        "rloo": r - (r.sum() - r) / 3,
        "opo": r - (lengths * r).sum() / lengths.sum(),
    }[kind]
    np.testing.assert_allclose(found.advantages[found.sampled], np.repeat(expected, lengths))


def test_no_bound_of_staleness_and_no_rule_withholds_a_trace() -> None:
    group = [trajectory(f"0.0.{member}", version=1) for member in range(2)]
    joined, _ = ExpertTraces([trace_of("task 0", [5, 6], 9.0)]).join(plan_of([group], version=9))
    batch = assign_advantages(flatten(joined.groups, 9), advantage_of(Algorithm()))
    kept = trainable(batch, max_staleness=2)
    assert kept.ids == ("0.trace.2.0",)
    assert kept.traced.sum() == 2
    summary = summarize([tuple(map(row_of, group))], kept)
    assert (summary.tokens_trained, summary.tokens_withheld, summary.trace_tokens) == (0, 6, 2)
    assert summary.staleness_tokens == {}


def test_what_was_kept_of_a_run_is_what_was_graded(tmp_path: Path) -> None:
    traces = [trace_of("task 0", [5, 6], 0.25), trace_of("task 1", [7], -1.0)]
    write_traces(tmp_path / "traces.msgpack", traces)
    groups = [[trajectory(f"{group}.0.{member}") for member in range(2)] for group in range(2)]
    expected, found = (
        book.join(plan_of(groups)) for book in (ExpertTraces(traces), read_traces(tmp_path / "traces.msgpack"))
    )
    assert found[0] == expected[0]
    assert list(found[1]) == ["0.trace.2.0", "1.trace.2.0"]
    for one, other in zip(found[1].values(), expected[1].values(), strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert (one.reward, one.turn_rewards) == (other.reward, other.turn_rewards)
    assert read_traces(tmp_path / "nothing").join(plan_of(groups)) == (plan_of(groups), {})


# ---------------------------------------------------------------- the loss


LOSSES = [DecoupledPpo(), Ppo(), Gspo(clip=(0.1, 0.15)), Cispo(clip=(1.0, 0.5)), Sapo()]
CORRECTIONS = [
    Truncated(bounds=(0.0, 1.3)),
    Masked(bounds=(0.7, 1.4)),
    Rejected(level="geometric", bounds=(0.97, 1.04)),
]
PAIRS = [
    (loss, one)
    for loss in LOSSES
    for one in CORRECTIONS
    if not (isinstance(loss, Ppo | Cispo) and one == CORRECTIONS[0])
]


def mixed_row(seed: int = 0):
    """Random sequences of which every third is a trace; the row, its current log-probs and entropies, and which sequences are."""
    sequences = make_sequences(seed)
    row, current, entropy = make_row(sequences)
    traces = [index % 3 == 1 for index in range(len(sequences))]
    at = torch.from_numpy(np.repeat(traces, [len(one.ids) for one in sequences]))
    staleness = torch.where(at, -1, row.staleness)
    behavior = row.behavior_logprobs.masked_fill(at, 0.0)
    return msgspec.structs.replace(row, staleness=staleness.int(), behavior_logprobs=behavior), current, entropy, at


def without(row, current, entropy, at):
    """The same row without its traces."""
    keep = ~at
    sizes = np.diff(row.cu_seqlens)
    starts = np.array(row.cu_seqlens[:-1])
    kept = [size for size, start in zip(sizes.tolist(), starts.tolist(), strict=True) if not at[start]]
    tensors = {
        name: value[keep] for name, value in msgspec.structs.asdict(row).items() if isinstance(value, torch.Tensor)
    }
    return (
        msgspec.structs.replace(row, cu_seqlens=(0, *np.cumsum(kept).tolist()), **tensors),
        current[keep],
        entropy[keep],
    )


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "fixed_length"])
@pytest.mark.parametrize(("loss", "correction"), PAIRS, ids=lambda one: type(one).__name__)
def test_the_loss_of_traces_is_the_papers_and_that_of_other_tokens_is_as_it_was(loss, correction, aggregation) -> None:
    algorithm = Algorithm(loss=loss, correction=correction, aggregation=aggregation)
    row, current, entropy, at = mixed_row()
    probe = current.clone().requires_grad_()
    output = loss_of(algorithm, 50)([row], one_rank)(probe, entropy, row)
    output.loss_sum.backward()

    own_row, own_current, own_entropy = without(row, current, entropy, at)
    own_probe = own_current.clone().requires_grad_()
    own = loss_of(algorithm, 50)([own_row], one_rank)(own_probe, own_entropy, own_row)
    own.loss_sum.backward()

    trained, traced = row.loss_mask.numpy(), (row.loss_mask & at).numpy()
    sequence = np.repeat(np.arange(len(row.cu_seqlens) - 1), np.diff(row.cu_seqlens))
    lengths = np.bincount(sequence, trained)
    tokens, sequences = trained.sum(), (lengths > 0).sum()
    scale = {
        "token_mean": np.ones(len(trained)),
        "sequence_mean": tokens / sequences / np.maximum(lengths, 1)[sequence],
        "fixed_length": np.full(len(trained), tokens / sequences / 50),
    }[aggregation]
    p, a = np.exp(current.numpy()), row.advantages.numpy()
    shaped = float((scale * -a * p / (p + GAMMA))[traced].sum())
    slopes = scale * -a * GAMMA * p / (p + GAMMA) ** 2

    # Without traces there are fewer tokens and sequences, by which a step is divided.
    own_trained = own_row.loss_mask.sum().item()
    own_sequences = (np.bincount(sequence[~at.numpy()], trained[~at.numpy()]) > 0).sum()
    ratio = 1.0 if aggregation == "token_mean" else (tokens / sequences) / (own_trained / own_sequences)
    assert output.loss_sum.item() == pytest.approx(own.loss_sum.item() * ratio + shaped, rel=1e-9)
    assert probe.grad is not None
    assert own_probe.grad is not None
    np.testing.assert_allclose(probe.grad.numpy()[traced], slopes[traced], rtol=1e-9)
    np.testing.assert_allclose(probe.grad[~at].numpy(), ratio * own_probe.grad.numpy(), rtol=1e-9)


def test_what_is_reported_is_of_tokens_that_the_policy_sampled() -> None:
    row, current, entropy, at = mixed_row(2)
    own_row, own_current, own_entropy = without(row, current, entropy, at)
    reference = torch.full_like(current, -2.0)
    algorithm = Algorithm(correction=Masked(bounds=(0.7, 1.4)), kl=KlInLoss())
    reports = []
    for one, logprobs, entropies in ((row, current, entropy), (own_row, own_current, own_entropy)):
        one = msgspec.structs.replace(one, reference_logprobs=reference[: len(logprobs)])
        output = loss_of(algorithm, 50)([one], one_rank)(logprobs, entropies, one)
        tokens = int(one.loss_mask.sum())
        means = {name: value.item() / tokens for name, value in output.sums.items()}
        done = PolicyStepResult((BackendStepResult(0.0, 0.0, tokens, means),), lr=0.0, mismatch=0.0, compared=0)
        ratios = LargestRatios(int(own_row.loss_mask.sum()))
        ratios.of(lambda *_, output=output: output)(logprobs, entropies, one)
        reports.append((done.means, done.by_staleness(), mismatch([one]), ratios))
    (means, by_staleness, gap, ratios), (own_means, own_by_staleness, own_gap, own_ratios) = reports
    assert means == pytest.approx(own_means)
    assert {name: pytest.approx(values) for name, values in own_by_staleness.items()} == by_staleness
    assert gap == own_gap
    assert ratios._largest is not None
    assert ratios._largest.tolist() == own_ratios._largest.tolist()


def test_a_step_on_traces_alone_reports_nothing_of_what_was_sampled() -> None:
    row, current, entropy, _ = mixed_row()
    row = msgspec.structs.replace(row, staleness=torch.full_like(row.staleness, -1))
    output = loss_of(Algorithm(), 50)([row], one_rank)(current, entropy, row)
    tokens = int(row.loss_mask.sum())
    means = {name: value.item() / tokens for name, value in output.sums.items()}
    done = PolicyStepResult((BackendStepResult(1.0, 1.0, tokens, means),), lr=0.0, mismatch=0.0, compared=0)
    assert set(done.means.values()) == {0.0}
    assert math.isfinite(output.loss_sum.item())


def test_traces_are_no_trajectories_that_could_be_annotated_and_teach_groups_that_are_alike() -> None:
    groups = [
        [msgspec.structs.replace(trajectory(f"{g}.0.{m}"), reward=0.0, turn_rewards=(0.0,)) for m in range(2)]
        for g in range(3)
    ]
    traces = ExpertTraces([trace_of("task 0", [5, 6], 1.0), trace_of("task 1", [7], 0.0)])
    joined, _ = traces.join(plan_of(groups))
    batch = trainable(assign_advantages(flatten(joined.groups, 0), advantage_of(Algorithm())), 0)
    assert len(batch.ids) == 8
    assert choose(batch, 1 << 30) == {one.id for group in groups for one in group}
    summary = summarize([tuple(map(row_of, group)) for group in groups], batch)
    assert (summary.groups, summary.groups_alike, summary.episodes) == (3, 2, 6)
    assert (summary.tokens_trained, summary.trace_tokens, summary.reward_mean) == (18, 3, 0.0)


# ---------------------------------------------------------------- what is never found is learned


SIZE, GROUPS, STEPS = 7, 2, 70


def answers_of(
    one: OneToken, rng: np.random.Generator, target: int
) -> tuple[list[list[Trajectory]], NDArray[np.float64]]:
    """Groups of episodes of one token that the policy samples now, and its log-probs."""
    logprobs = one.logprobs(one.policy)
    sampled = rng.choice(len(logprobs), (GROUPS, SIZE), p=np.exp(logprobs))
    groups = [
        [
            msgspec.structs.replace(
                trajectory(f"{group}.0.{member}", sampled=1),
                task_id="the task",
                token_ids=np.array([PROMPT, token], dtype=np.int32),
                behavior_logprobs=np.array([0.0, logprobs[token]], dtype=np.float32),
                reward=float(token == target),
                turn_rewards=(float(token == target),),
            )
            for member, token in enumerate(tokens)
        ]
        for group, tokens in enumerate(sampled.tolist())
    ]
    return groups, logprobs


def batch_of(algorithm: Algorithm, groups: list[list[Trajectory]], traces: ExpertTraces) -> TrainBatch:
    joined, rows = traces.join(plan_of(groups))
    scored = assign_advantages(flatten(joined.groups, 0), advantage_of(algorithm))
    every = [one for group in groups for one in group]
    return with_rows(trainable(scored, 0), [*every, *rows.values()])


@pytest.mark.parametrize("with_traces", [False, True], ids=["alone", "traces"])
def test_a_task_that_the_policy_never_solves_is_learned_from_traces(folders: list[Path], with_traces: bool) -> None:
    """The right answer is one that the policy does not give in as many episodes."""
    with OneToken(folders[0]) as one:
        algorithm = one.config.learner.algorithm
        stepper = PolicyStepper(one.config.learner, one.policy, LONGEST)
        first = one.logprobs(one.policy)
        target = int(np.argmin(first))
        traces = ExpertTraces([trace_of("the task", [target], 1.0, (PROMPT,))] if with_traces else [])
        rng, earned = np.random.default_rng(0), []
        for step in range(STEPS):
            groups, _ = answers_of(one, rng, target)
            earned.append(np.mean([episode.reward for group in groups for episode in group]))
            batch = batch_of(algorithm, groups, traces)
            assert batch.traced.sum() == with_traces * GROUPS
            stepper.step(batch, stepper.plan(batch), (), CheckpointState(step=step, version=step))
        last = one.logprobs(one.policy)[target]
    assert earned[0] == 0.0
    if with_traces:
        assert last > math.log(0.5)
        assert np.mean(earned[-5:]) > 0.4
    else:
        assert sum(earned) == 0.0
        assert last == pytest.approx(first[target], abs=0.05)  # no reward, no gradient: only weight decay
