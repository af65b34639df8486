"""What arithmetic says about a plan before anything is simulated: by Little's law, N = (S + 1) B groups circulate, so that

    cycle  = max( T_L,  W / C,  (T_R + T_L) / (S + 1) )
    S*     = ceil( T_R / T_L )      where W / C < T_L: the smallest bound at which the learner never waits

with S `buffer.max_staleness`, B `buffer.groups_per_batch`, T_L seconds from the arrival of a batch to the end of its push, T_R the
makespan of one batch on an empty fleet, W tokens of a batch, C tokens per second of a fleet that is full. Pure.

Exact at S = 0 for episodes of one length; within about a tenth at other bounds. It knows no variance between batches, which the
simulation does; it is there to prune and to explain.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import msgspec

from .plan import SimulationPlan
from .workload import EpisodeShape, sample_groups

BATCHES = 8  # drawn batches whose makespans are averaged


class ClosedForm(msgspec.Struct, frozen=True):
    """Seconds, but for `staleness`, the bound S*: None where rollouts are the limit at every bound."""

    cycle_s: float
    learner_s: float  # T_L
    rollout_s: float  # T_R
    full_s: float  # W / C
    staleness: int | None


def estimate(plan: SimulationPlan) -> ClosedForm:
    """Of batches whose members all count: `min_members` and `dynamic_sampling` have no part in it."""
    batch, members = plan.admission.groups_per_batch, plan.replay.group_size
    drawn = [
        [episode for group in sample_groups(plan.environments, batch, members, seed) for episode in group]
        for seed in range(BATCHES)
    ]
    mean_tokens = sum(episode.tokens for one in drawn for episode in one) / BATCHES
    mean_sampled = sum(episode.sampled for one in drawn for episode in one) / BATCHES
    bound = plan.admission.max_staleness
    step = mean_tokens * sum(plan.step_s) / len(plan.step_s)
    # Beside each other, where they work at the same time.
    slowed_step = step * (plan.learner_contention if bound else 1.0)
    learner = plan.take_s + slowed_step + plan.push_s
    rollout = sum(makespan(one, plan) for one in drawn) / BATCHES
    longer = slowed_step * (1 - 1 / plan.contention) if bound else 0.0  # what replicas lose beside a step
    full = longer + mean_sampled * plan.decode.step_s(plan.max_concurrent) / (plan.replicas * plan.max_concurrent)
    # At a bound of 0 the take and the push of a batch are in no overlap, and neither is its makespan.
    cycle = max(learner, full, (rollout + learner) / (bound + 1))
    return ClosedForm(cycle, learner, rollout, full, math.ceil(rollout / learner) if full < learner else None)


def makespan(batch: Sequence[EpisodeShape], plan: SimulationPlan) -> float:
    """Seconds until the last of `batch` has ended, when all begin at once on a fleet that is empty: episodes are dealt to the
    replicas, begin in that order as places become free, and decode side by side. Times in environments are added to the whole,
    as if they came last; prompts are prefilled once for each turn."""
    longest = 0.0
    for first in range(min(plan.replicas, len(batch))):
        mine = batch[first :: plan.replicas]
        stalled = plan.prefill_s * sum(sum(turn.prompt for turn in e.turns) - e.shared for e in mine)
        request_s = plan.request_steps * plan.decode.step_s(min(len(mine), plan.max_concurrent))
        waiting = max(episode.environment_s + len(episode.turns) * request_s for episode in mine)
        longest = max(longest, stalled + waiting + plan.deliver_s + _decode_s([e.sampled for e in mine], plan))
    return longest


def _decode_s(lengths: Sequence[int], plan: SimulationPlan) -> float:
    """Seconds to decode `lengths` on one replica. Progress, in tokens of each running sequence, is the clock: a sequence that
    begins at progress p ends at p + its length; between two ends the number of running ones is constant."""
    ends = [float(length) for length in lengths[: plan.max_concurrent]]
    heapq.heapify(ends)
    at, seconds, following = 0.0, 0.0, plan.max_concurrent
    while ends:
        running, end = len(ends), heapq.heappop(ends)
        seconds += (end - at) * plan.decode.step_s(running)
        at = end
        if following < len(lengths):
            heapq.heappush(ends, at + lengths[following])
            following += 1
    return seconds
