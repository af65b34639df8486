"""The figures by which runs are compared, measured or simulated, and the steps over which they are means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec


class StepSample(msgspec.Struct, frozen=True):
    """One learner step. Seconds, tokens; sums are over the step."""

    wait_s: float  # until the learner had the batch
    step_s: float
    push_s: float
    tokens_by_staleness: dict[int, int]  # trained tokens
    withheld: int  # tokens of the batch that carried no loss
    generated: float  # tokens
    slot_s: float  # episode slots of all workers
    idle_slot_s: float  # of these, empty: admission granted no group, or a request for one was under way
    context: int = 0  # tokens that the learner computed

    @property
    def total_s(self) -> float:
        return self.wait_s + self.step_s + self.push_s


class RunFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Means over the time of the steps, so that a long step counts for more than a short one."""

    steps: int
    trained_tokens_per_s: float  # those that carried loss: what a run is for
    generated_tokens_per_s: float
    cycle_s: float  # from step to step
    step_s: float
    push_s: float
    learner_wait: float  # share of the time, 0 to 1
    rollout_idle: float  # share of the slots that admission left empty
    slots: float  # episodes that the workers would play at once
    staleness: float  # versions, mean over trained tokens
    tokens_by_staleness: dict[int, float]  # shares of the trained tokens
    withheld: float  # share of the batches' sampled tokens that carried no loss
    episode_s: float | None = None  # mean seconds of an episode


def figures_of(steps: Sequence[StepSample], episode_s: float | None = None) -> RunFigures:
    """Of at least one step."""
    seconds = sum(step.total_s for step in steps)
    lags: Counter[int] = Counter()
    for step in steps:
        lags.update(step.tokens_by_staleness)
    trained, withheld = lags.total(), sum(step.withheld for step in steps)
    slot_s = sum(step.slot_s for step in steps)
    return RunFigures(
        steps=len(steps),
        trained_tokens_per_s=trained / seconds,
        generated_tokens_per_s=sum(step.generated for step in steps) / seconds,
        cycle_s=seconds / len(steps),
        step_s=sum(step.step_s for step in steps) / len(steps),
        push_s=sum(step.push_s for step in steps) / len(steps),
        learner_wait=sum(step.wait_s for step in steps) / seconds,
        rollout_idle=sum(step.idle_slot_s for step in steps) / slot_s if slot_s else 0.0,
        slots=slot_s / seconds,
        staleness=sum(lag * tokens for lag, tokens in lags.items()) / max(1, trained),
        tokens_by_staleness={lag: tokens / max(1, trained) for lag, tokens in sorted(lags.items())},
        withheld=withheld / max(1, trained + withheld),
        episode_s=episode_s,
    )
