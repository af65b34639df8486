"""Where one step's time and tokens went, from marks set along the training loop."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from ..buffer.messages import Batch, Stats
from ..weightsync.plan import PushReport
from .algorithms import BY_STALENESS, effective_sample_size
from .backend import StepResult
from .batch import BatchSummary
from .checkpoint import CheckpointState
from .metrics import StepMetrics


class ByStaleness(msgspec.Struct, frozen=True):
    """Names and units are those of `StepMetrics`."""

    ess_by_staleness: dict[str, float]
    kl_by_staleness: dict[str, float]
    clip_fraction_by_staleness: dict[str, float]
    weight_by_staleness: dict[str, float]


class CompanionsDone(msgspec.Struct, frozen=True):
    """The steps of the models beside the policy on one batch; names and units are those of `StepMetrics`."""

    value_loss: float = 0.0
    explained_variance: float = 0.0
    reward_model_loss: float = 0.0
    reward_model_accuracy: float = 0.0


class StepDone(msgspec.Struct, frozen=True):
    """The optimizer steps of one batch, one per minibatch.

    Attributes:
        lr: their learning rate.
        mismatch: largest learner-engine difference in nats, over all ranks.
        compared: how many tokens that is over; fresh ones are those of this rank, and rank 0 has all that there are.
    """

    results: tuple[StepResult, ...]
    lr: float
    mismatch: float
    compared: int

    def mean(self, name: str) -> float:
        """A loss statistic, mean over the batch's trained tokens."""
        return sum(r.means[name] * r.tokens for r in self.results) / sum(r.tokens for r in self.results)

    def by_staleness(self) -> ByStaleness:
        """The loss statistics by staleness, over the batch's trained tokens."""
        names = {name for result in self.results for name in result.means if "/" in name}
        totals = {n: sum(r.means.get(n, 0.0) * r.tokens for r in self.results) for n in names}
        weight = sum(total for name, total in totals.items() if name.startswith("importance/"))
        answer = ByStaleness({}, {}, {}, {})
        for lag in sorted(int(name.removeprefix("tokens/")) for name in names if name.startswith("tokens/")):
            tokens = totals[f"tokens/{lag}"]
            if tokens > 0:
                means = {name: totals[f"{name}/{lag}"] / tokens for name in BY_STALENESS}
                answer.ess_by_staleness[str(lag)] = effective_sample_size(means)
                answer.kl_by_staleness[str(lag)] = means["kl"]
                answer.clip_fraction_by_staleness[str(lag)] = means["clip_fraction"]
                answer.weight_by_staleness[str(lag)] = means["importance"] * tokens / weight
        return answer


def mean_over(results: Sequence[StepResult]) -> dict[str, float]:
    """What several steps reported by the same names, mean over their trained tokens."""
    tokens = sum(result.tokens for result in results)
    return {name: sum(r.means[name] * r.tokens for r in results) / tokens for name in results[0].means}


class StepMeter:
    """Call `took`, `stepped` and `row` in this order, once per step. `stats` is the buffer when the loop begins."""

    def __init__(self, stats: Stats) -> None:
        self._ended = time.perf_counter()
        self._before = stats

    def took(self, batch: Batch) -> None:
        """The batch is here."""
        self._took = time.perf_counter()
        self._at_take = batch.stats
        self._context = sum(len(trajectory) for group in batch.groups for trajectory in group)

    def stepped(self, stats: Stats) -> None:
        """The weights are stepped and committed; `stats` is the buffer now."""
        self._stepped = time.perf_counter()
        self._after = stats

    def row(
        self, state: CheckpointState, batch: BatchSummary, done: StepDone, beside: CompanionsDone, push: PushReport
    ) -> StepMetrics:
        """The step that made `state`, now that its weights are pushed; `beside` are those of the models beside the policy."""
        now = time.perf_counter()
        total_s, step_s, wait_s = now - self._ended, self._stepped - self._took, self._took - self._ended
        before, after = self._before, self._after
        slot_s = after.slot_s - before.slot_s
        results = done.results
        metrics = StepMetrics(
            **msgspec.structs.asdict(batch),
            step=state.step,
            version=state.version,
            time=time.time(),
            tokens_discarded=sum(after.ledger.discarded.values()) - sum(before.ledger.discarded.values()),
            groups_refilled=after.refilled_groups - before.refilled_groups,
            messages_dropped=after.dropped,
            peers_refused=after.refused,
            rollout_tokens_per_s=(after.ledger.generated - before.ledger.generated) / total_s,
            overlap_tokens_per_s=(after.ledger.generated - self._at_take.ledger.generated) / step_s,
            learner_tokens_per_s=self._context / step_s,
            learner_idle=wait_s / total_s,
            rollout_idle=(after.idle_slot_s - before.idle_slot_s) / slot_s if slot_s > 0 else 0.0,
            slots=slot_s / total_s,
            replicas=len(push.pushed),
            replicas_failed=len(push.failed),
            wait_s=wait_s,
            step_s=step_s,
            push_s=now - self._stepped,
            pause_ms=push.pause_ms,
            transfer_ms=push.transfer_ms,
            canary=push.canary,
            mismatch_max=done.mismatch,
            mismatch_tokens=done.compared,
            loss=sum(r.loss for r in results) / len(results),
            ess=effective_sample_size({n: done.mean(n) for n in ("importance", "importance_square")}),
            kl=done.mean("kl"),
            entropy=done.mean("entropy"),
            clip_fraction=done.mean("clip_fraction"),
            dropped_fraction=done.mean("dropped"),
            kl_reference=done.mean("kl_reference") if "kl_reference" in results[0].means else 0.0,
            **msgspec.structs.asdict(done.by_staleness()),
            **msgspec.structs.asdict(beside),
            grad_norm=max(r.grad_norm for r in results),
            lr=done.lr,
        )
        self._ended, self._before = now, after
        return metrics
