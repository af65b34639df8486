"""One row of `metrics.jsonl`: the results and costs of one learner step. Field names are stable; scripts rely on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec
import numpy as np

from ..buffer.ledger import Withheld
from ..buffer.messages import BatchPlan, Stats
from ..buffer.trajectory import BatchRow, TrajectoryHeader
from ..weightsync.plan import PushReport
from .algorithms.divergence import KL_COEFFICIENT
from .algorithms.policy_loss import BY_STALENESS, effective_sample_size
from .backend import BackendStepResult
from .batch import ALL_TRAINED, Group, TrainBatch
from .checkpoint_folder import CheckpointState


class BatchSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `StepMetrics` about the batch."""

    reward_mean: float  # mean return of the batch's episodes
    reward_std: float  # standard deviation of the returns over episodes
    staleness_mean: float  # learner version minus sampling version, mean over trained tokens
    staleness_max: int  # largest staleness of a trained token
    staleness_tokens: dict[str, int]  # trained tokens by staleness (`{"0": 120, "1": 30}`)
    tokens_trained: int  # tokens that carried loss in this step
    tokens_withheld: int  # sampled tokens that were too old, or of episodes without loss (see the ledger)
    mixed_tokens: int  # trained tokens sampled by new weights from keys and values of older ones (`keep_kv`)
    trace_tokens: int = 0  # tokens of expert traces that carried loss; no other number of tokens has them
    groups: int = 0  # task groups in the batch
    # Groups of several episodes that all have the same reward: without signal where an advantage compares the members of a group.
    groups_alike: int = 0
    episodes: int  # episodes in the batch
    truncated: float = 0.0  # share of the episodes that a token or turn limit ended
    episode_tokens_mean: float  # sampled tokens per episode
    turns_mean: float  # completions per episode
    # What environments reported (`StepResult.metrics`): means by name, over their episodes.
    environment: dict[str, float]


class StepMetrics(BatchSummary, frozen=True, kw_only=True):
    """Measured between the end of the previous step and the end of this one, unless stated otherwise. Those marked * are over the
    newest steps of at least `RATE_S` together: workers report twice a second, which in one short step would be noise."""

    step: int  # optimizer batches contained in the weights, from 1
    version: int  # the policy version that this step made
    time: float  # seconds since the epoch, at the end of the step
    tokens_discarded: int  # tokens discarded for any reason since the previous step
    groups_refilled: int = 0  # groups discarded because all rewards were equal (`buffer.dynamic_sampling`)
    # batches that could not be trained on and lost groups for it, since the run began; with shards once for each that lost some
    batches_unusable: int = 0
    # Episodes that ended since the previous step, by outcome (`{"finished": 60, "truncated": 1, "failed_tool": 3}`).
    outcomes: dict[str, int] = {}
    messages_dropped: int  # malformed messages to the buffer, since its process started
    peers_refused: int  # attempts to connect to the buffer by peers without a role, since its process started
    rollout_tokens_per_s: float  # * tokens generated per second
    overlap_tokens_per_s: float  # * tokens generated per second while the learner was stepping
    learner_tokens_per_s: float  # tokens (context included) that it computed, per second of stepping
    learner_idle: float  # share of the time in which the learner waited for a batch, 0 to 1
    rollout_idle: float  # * share of the episode slots that were empty: no group granted, or a lease under way, 0 to 1
    slots: float  # * episodes that all workers would play in sum at once, mean; follows how busy the servers are
    # What was reported in this step alone, for sums over many of them:
    tokens_generated: int = 0  # tokens generated since the previous step
    slot_s: float = 0.0  # seconds of episode slots, all workers together
    idle_slot_s: float = 0.0  # seconds of slots that were empty
    replicas: int  # inference servers that took the push and serve its version
    replicas_failed: int  # replicas that did not take the push
    wait_s: float  # seconds waited for the batch
    # seconds from batch to commit: a program's code, servers that fall asleep, rows, aux models, advantages, forward, backward,
    # optimizer
    step_s: float
    push_s: float  # seconds of the whole weight push
    # Of a colocated run: seconds from when the replicas were asked to sleep until the last one served again.
    asleep_s: float = 0.0
    pause_ms: float  # longest pause of a replica in the push
    transfer_ms: float  # time of the transfer
    canary: float  # largest canary difference after the push, nats
    # Largest difference in nats between the learner's proximal and the engine's log-prob of a token of staleness 0, in the batch
    # and where it has fewer than 1,024 of these in a few trajectories delivered since it was taken; None when there were none.
    # Tokens of a mixed policy do not count.
    mismatch_max: float | None
    mismatch_tokens: int  # how many tokens `mismatch_max` is over, all ranks together
    loss: float | None  # the policy loss; None, as the next six and `grad_norm`, while only the critic learns
    ess: float | None  # effective sample size of the importance weights over tokens, as a share, 0 to 1
    kl: float | None  # mean over trained tokens of the k3 estimate of KL(behavior || current), nats (Schulman 2020)
    entropy: float | None  # mean entropy of the policy at trained tokens, nats
    clip_fraction: float | None  # share of trained tokens where the loss's own clip was active
    ratio_p999: float | None = None  # importance ratio current / behavior that one trained token in a thousand reaches
    ratio_max: float | None = None  # largest importance ratio current / behavior of a trained token
    # With `router_replay` the share of the engine's choices of experts, by token, layer and expert, that the learner's routers
    # would not have made; None where none were replayed.
    router_disagreement: float | None = None
    dropped_fraction: float = 0.0  # share of trained tokens whose loss the correction dropped
    kl_reference: float = 0.0  # k3 estimate of KL(current || reference), mean over trained tokens, nats
    kl_coefficient: float = 0.0  # what a nat of it costs from the next step on; 0 where that is not adaptive
    value_loss: float = 0.0  # half the mean squared error of the critic before its step; 0 where there is no critic
    explained_variance: float = 0.0  # 1 - mean squared error / variance of the returns; 0: no critic
    reward_model_loss: float = 0.0  # cross-entropy of outcomes before its step, nats; 0: no reward model
    reward_model_accuracy: float = 0.0  # share of trained tokens in sequences that it classified correctly
    ess_by_staleness: dict[str, float] = {}  # `ess` by staleness (`{"0": 0.99, "1": 0.9}`)
    kl_by_staleness: dict[str, float] = {}  # `kl` by staleness
    clip_fraction_by_staleness: dict[str, float] = {}  # `clip_fraction` by staleness
    weight_by_staleness: dict[str, float] = {}  # share of all importance weight on tokens of this staleness; sums to 1
    grad_norm: float | None  # norm of the gradient before clipping
    lr: float  # learning rate used; 0 while only the critic learns


class AuxModelsResult(msgspec.Struct, frozen=True):
    """The steps of the trained aux model on one batch; names and units are those of `StepMetrics`."""

    value_loss: float = 0.0
    explained_variance: float = 0.0
    reward_model_loss: float = 0.0
    reward_model_accuracy: float = 0.0


class PolicyStepResult(msgspec.Struct, frozen=True):
    """The optimizer steps of one batch, one per minibatch and epoch, at learning rate `lr`."""

    results: tuple[BackendStepResult, ...]
    lr: float
    mismatch: float  # largest learner-engine difference in nats, over all ranks; 0 where nothing was compared
    compared: int  # the number of compared tokens; only rank 0 has fresh ones
    ratio_p999: float | None = None  # as in `StepMetrics`
    ratio_max: float | None = None

    @property
    def disagreement(self) -> float | None:
        """The mean over the steps in which choices of experts were replayed; None where there is none."""
        found = [result.disagreement for result in self.results if result.disagreement is not None]
        return sum(found) / len(found) if found else None

    @property
    def means(self) -> dict[str, float]:
        """The loss's statistics, means over the batch's trained tokens that the policy sampled; 0 where there are none."""
        means = mean_over(self.results)
        share = means.get("tokens", 1.0)  # of the trained tokens: the others are of expert traces
        return {name: mean / share if share else 0.0 for name, mean in means.items()}

    def by_staleness(self) -> dict[str, dict[str, float]]:
        """The fields `*_by_staleness` of `StepMetrics`, over the batch's trained tokens."""
        means = self.means
        fields = {f"{name}_by_staleness": dict[str, float]() for name in ("ess", "kl", "clip_fraction", "weight")}
        importance = sum(mean for name, mean in means.items() if name.startswith("importance/"))
        for staleness in sorted(int(name.removeprefix("tokens/")) for name in means if name.startswith("tokens/")):
            if share := means[f"tokens/{staleness}"]:
                statistics = {name: means[f"{name}/{staleness}"] / share for name in BY_STALENESS}
                statistics["ess"] = effective_sample_size(statistics)
                statistics["weight"] = statistics["importance"] * share / importance  # share of all importance weights
                for field, values in fields.items():
                    values[str(staleness)] = statistics[field.removesuffix("_by_staleness")]
        return fields


def _of_policy(done: PolicyStepResult | None) -> dict[str, Any]:
    """The fields of `StepMetrics` about the policy's step."""
    if done is None:
        missing = (
            "mismatch_max",
            "loss",
            "ess",
            "kl",
            "entropy",
            "clip_fraction",
            "ratio_p999",
            "ratio_max",
            "grad_norm",
        )
        return {**dict.fromkeys(missing), "mismatch_tokens": 0, "lr": 0.0}
    results, means = done.results, done.means
    return {
        "mismatch_max": done.mismatch if done.compared else None,
        "mismatch_tokens": done.compared,
        "loss": sum(r.loss for r in results) / len(results),
        "ess": effective_sample_size(means),
        "kl": means["kl"],
        "entropy": means["entropy"],
        "clip_fraction": means["clip_fraction"],
        "ratio_p999": done.ratio_p999,
        "ratio_max": done.ratio_max,
        "dropped_fraction": means["dropped"],
        "kl_reference": means.get("kl_reference", 0.0),
        "router_disagreement": done.disagreement,
        **done.by_staleness(),
        "grad_norm": max(r.grad_norm for r in results),
        "lr": done.lr,
    }


def mean_over(results: Sequence[BackendStepResult]) -> dict[str, float]:
    """Means of the sums that several steps reported, over their trained tokens; a sum that a step lacks is 0 there."""
    tokens = sum(result.tokens for result in results)
    names = dict.fromkeys(chain.from_iterable(result.means for result in results))
    return {name: sum(r.means.get(name, 0.0) * r.tokens for r in results) / tokens for name in names}


def summarize(
    groups: Sequence[Group], trained: TrainBatch, withheld: Mapping[str, Withheld] = ALL_TRAINED
) -> BatchSummary:
    everything = sum(trajectory.sampled for group in groups for trajectory in group)
    # With the greedy episode: the others are compared with it.
    alike = sum(map(_alike, groups, _traces(trained, groups)))
    groups = [tuple(t for t in group if withheld.get(t.episode) != "baseline") for group in groups]
    branches = [trajectory for group in groups for trajectory in group]
    members = {trajectory.episode: trajectory for trajectory in branches}
    rewards = np.array([t.reward for t in members.values() if t.outcome.trainable], dtype=np.float64)
    values, counts = np.unique(trained.staleness[trained.trained_samples], return_counts=True)
    staleness = dict(zip(values.tolist(), counts.tolist(), strict=True))
    tokens, episodes = sum(staleness.values()), max(1, len(members))
    sampled = sum(branch.sampled for branch in branches)
    turns = sum(map(_sampled_turns, branches))
    return BatchSummary(
        reward_mean=float(rewards.mean()) if len(rewards) else 0.0,
        reward_std=float(rewards.std()) if len(rewards) else 0.0,
        staleness_mean=sum(age * count for age, count in staleness.items()) / max(1, tokens),
        staleness_max=max(staleness, default=0),
        staleness_tokens={str(age): count for age, count in staleness.items()},
        tokens_trained=tokens,
        tokens_withheld=everything - tokens,
        mixed_tokens=int(trained.mixed.sum()),
        trace_tokens=int(trained.traced.sum()),
        groups=len(groups),
        groups_alike=alike,
        episodes=len(members),
        truncated=sum(t.outcome.kind == "truncated" for t in members.values()) / episodes,
        episode_tokens_mean=sampled / episodes,
        turns_mean=turns / episodes,
        environment=_environment(groups),
    )


def _traces(trained: TrainBatch, groups: Sequence[Group]) -> list[list[float]]:
    """What the expert traces earned that joined each of `groups`."""
    found: list[list[float]] = [[] for _ in groups]
    for episode in np.unique(trained.episode_of_token[trained.traced]).tolist():
        found[int(trained.groups[episode])].append(float(trained.rewards[episode]))
    return found


def _alike(group: Group, traces: Sequence[float]) -> bool:
    return len({*traces, *(t.reward for t in group)}) <= 1 < len(traces) + len({t.episode for t in group})


def without_loss(summary: BatchSummary) -> BatchSummary:
    """Of a batch that the policy was not trained on: its tokens count as discarded."""
    none = {
        "staleness_mean": 0.0,
        "staleness_max": 0,
        "staleness_tokens": {},
        "tokens_trained": 0,
        "tokens_withheld": 0,
    }
    return msgspec.structs.replace(summary, mixed_tokens=0, **none)


def _sampled_turns(branch: TrajectoryHeader) -> int:
    """Turns of which this branch has sampled tokens; those of earlier branches are context."""
    sampled = branch.versions() >= 0
    return sum(bool(sampled[turn.start : turn.end].any()) for turn in branch.turns)


def _environment(groups: Sequence[Group]) -> dict[str, float]:
    """Means of the environments' metrics over episodes, by their first branch; of several environments also by environment."""
    first = {trajectory.episode: trajectory for group in reversed(groups) for trajectory in reversed(group)}
    episodes = [trajectory for trajectory in first.values() if trajectory.outcome.trainable]
    several = len({trajectory.env for trajectory in episodes}) > 1
    values: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.metrics.items():
            values.setdefault(name, []).append(value)
        if several:
            for name, value in {"reward": episode.reward, **episode.metrics}.items():
                values.setdefault(f"{episode.env}/{name}", []).append(value)
    return {name: sum(found) / len(found) for name, found in sorted(values.items())}


RATE_S = 10.0  # the least that a rate is over: twenty reports of each worker, so that one more or less is 5 %


class _Reported(msgspec.Struct, frozen=True):
    """What workers reported in one step, or in several."""

    seconds: float = 0.0
    step_s: float = 0.0  # of these the learner stepped
    tokens: int = 0
    overlap_tokens: int = 0  # those reported while it stepped
    slot_s: float = 0.0
    idle_slot_s: float = 0.0

    def __add__(self, other: _Reported) -> _Reported:
        return _Reported(*map(sum, zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)))


class StepTimer:
    """Call `asks`, `took`, `stepped` and `row` in this order, once per step. `stats` are the buffer's when the loop begins; `clock`
    is in seconds."""

    def __init__(self, stats: Stats, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._ended = clock()
        self._before = stats
        self._steps: list[_Reported] = []  # the newest, of `RATE_S` together

    def asks(self) -> None:
        """The wait for a batch begins. What came before since the last step is neither waiting nor stepping."""
        self._asked = self._clock()

    def took(self, batch: BatchPlan[BatchRow]) -> None:
        self._took = self._clock()
        self._at_take = batch.stats

    def stepped(self, stats: Stats, tokens: int) -> None:
        """`tokens` were computed, context included."""
        self._stepped = self._clock()
        self._after, self._tokens = stats, tokens

    def row(
        self,
        state: CheckpointState,
        batch: BatchSummary,
        done: PolicyStepResult | None,
        aux_result: AuxModelsResult,
        push: PushReport,
    ) -> StepMetrics:
        now = self._clock()
        total_s, step_s, wait_s = now - self._ended, self._stepped - self._took, self._took - self._asked
        before, after = self._before, self._after
        this, recent = self._reported(total_s, step_s)
        metrics = StepMetrics(
            **msgspec.structs.asdict(batch),
            step=state.step,
            version=state.version,
            time=time.time(),
            tokens_discarded=sum(after.ledger.discarded.values()) - sum(before.ledger.discarded.values()),
            batches_unusable=after.unusable_batches,
            groups_refilled=after.refilled_groups - before.refilled_groups,
            outcomes={
                name: ended
                for name, number in sorted(after.outcomes.items())
                if (ended := number - before.outcomes.get(name, 0))
            },
            messages_dropped=after.dropped,
            peers_refused=after.refused,
            rollout_tokens_per_s=recent.tokens / recent.seconds,
            overlap_tokens_per_s=recent.overlap_tokens / recent.step_s,
            learner_tokens_per_s=self._tokens / step_s,
            learner_idle=wait_s / total_s,
            rollout_idle=recent.idle_slot_s / recent.slot_s if recent.slot_s > 0 else 0.0,
            slots=recent.slot_s / recent.seconds,
            tokens_generated=this.tokens,
            slot_s=this.slot_s,
            idle_slot_s=this.idle_slot_s,
            replicas=len(push.pushed),
            replicas_failed=len(push.failed),
            wait_s=wait_s,
            step_s=step_s,
            push_s=now - self._stepped,
            asleep_s=push.asleep_s,
            pause_ms=push.pause_ms,
            transfer_ms=push.transfer_ms,
            canary=push.canary,
            kl_coefficient=state.algorithm.get(KL_COEFFICIENT, 0.0),
            **_of_policy(done),
            **msgspec.structs.asdict(aux_result),
        )
        self._ended, self._before = now, after
        return metrics

    def _reported(self, seconds: float, step_s: float) -> tuple[_Reported, _Reported]:
        """Of this step, and of the newest steps of `RATE_S`."""
        before, taken, after = self._before, self._at_take, self._after
        this = _Reported(
            seconds,
            step_s,
            after.ledger.generated - before.ledger.generated,
            after.ledger.generated - taken.ledger.generated,
            max(0.0, after.slot_s - before.slot_s),  # totals begin anew with the buffer's process
            max(0.0, after.idle_slot_s - before.idle_slot_s),
        )
        self._steps.append(this)
        while sum(one.seconds for one in self._steps[1:]) >= RATE_S:
            del self._steps[0]
        recent = _Reported()
        for one in self._steps:
            recent = recent + one
        return this, recent
