"""A simulated run: the product's own admission, replay, leases, slots and routing on virtual replicas, under a virtual learner.

    workers ──lease, deliver──> Replay ──take──> learner: step, commit ──push, cohort by cohort──> replicas

Invariants:
- The classes that decide are those of a real run, unchanged: `Replay`, `Admission`, `LeaseManager`, `Concurrency`, `RoutingTable`.
  Only time is virtual: of decoding, tools, steps and pushes.
- The same plan and seed give the same figures, to the last digit.
- The ledger balances at every commit; `Replay.commit` raises where it does not.
"""

from __future__ import annotations

import random
import time
from collections import Counter

import msgspec

from ..buffer.group_table import Group
from ..buffer.messages import Lease
from ..buffer.replay import Replay
from ..errors import StateError
from .engine import SimulatedReplica
from .figures import RunFigures, StepSample, figures_of
from .fleet import SimulatedFleet
from .kernel import VirtualClock
from .plan import SimulationPlan
from .worker import PlayedEpisode, SimulatedWorker
from .workload import EpisodeShape

SAMPLE_S = 1.0  # between samples of the replicas' load, which `Concurrency` counts in
PROGRESS_S = 0.5  # between reports of progress
REFILLS = 100  # batches of groups that may be discarded for equal rewards before one is full


class SimulationResult(msgspec.Struct, frozen=True):
    """`events` took `cpu_s` seconds of this processor for `simulated_s` seconds of the run; `samples` are all of its steps."""

    figures: RunFigures
    samples: tuple[StepSample, ...]
    simulated_s: float
    events: int
    cpu_s: float


def simulate(plan: SimulationPlan, steps: int = 0, seed: int = 0) -> SimulationResult:
    """Run `steps` learner steps, or `plan.default_steps`, and return the figures of those after the run has filled up.

    Raises:
        StateError: the run stands still, for example because all groups of a run with `dynamic_sampling` have equal rewards.
    """
    return SimulatedRun(plan, seed).run(steps or plan.default_steps)


class SimulatedRun:
    """One run. `replay` may be looked at between two steps."""

    def __init__(self, plan: SimulationPlan, seed: int) -> None:
        self.plan = plan
        self.replay = Replay(plan.admission, plan.replay)
        self.samples: list[StepSample] = []
        self._clock = clock = VirtualClock()
        self._rng = random.Random(seed)
        replicas = [
            SimulatedReplica(
                clock,
                f"engine-{i}",
                plan.decode,
                plan.prefill_s,
                plan.max_concurrent,
                recompute=plan.recompute,
                block=plan.block,
                request_steps=plan.request_steps,
            )
            for i in range(plan.replicas)
        ]
        self._fleet = SimulatedFleet(
            clock, replicas, plan.cohort, plan.once_s, plan.cohort_s, plan.pause_s, plan.canary_s, drains=plan.drains
        )
        longest = max(workload.longest for workload in plan.environments)
        self._workers = [
            SimulatedWorker(
                i,
                plan,
                clock,
                self.replay.leases,
                self._fleet.make_router(plan.max_concurrent, longest, random.Random(self._rng.random())),
                self._shapes,
                self._delivered,
                self._lease,
            )
            for i in range(plan.workers)
        ]
        self._turn = 0  # the worker that is asked first for the next lease
        self._contexts: dict[str, int] = {}  # episode -> its tokens, context included
        self._episodes_s = 0.0  # of episodes that were kept
        self._episodes = 0
        self._stuck = ""
        self._refilled = 0  # groups that were discarded for equal rewards, at the end of the last step
        self._asked_at: float | None = None
        self._wait_s = self._step_s = self._stepped_at = 0.0
        self._step_times: list[float] = []  # what is left of the plan's in random order: each is drawn equally often
        self._lags: Counter[int] = Counter()
        self._withheld = self._context = 0
        self._before = (0, 0.0, 0.0)  # generated tokens, slot_s, idle_slot_s at the end of the last step

    def run(self, steps: int) -> SimulationResult:
        """See `simulate`."""
        began = time.process_time()
        self._fleet.publish()
        self._ask()
        # Before a version is served, as in a run, so that the first groups are dealt in turn.
        for worker in self._workers:
            worker.ask()
        self.replay.mark_served(0)
        self._lease()
        self._observe()
        if self._cancels:
            self._report()
        if not self._clock.run(lambda: bool(self._stuck) or len(self.samples) >= steps):
            self._stuck = "nothing is left to happen"
        if self._stuck:
            raise StateError(f"the simulated run stands still after {len(self.samples)} steps: {self._stuck}")
        counted = self.samples[min(self.plan.settling, steps // 2) :]
        figures = figures_of(counted, self._episodes_s / max(1, self._episodes))
        cpu_s = time.process_time() - began
        return SimulationResult(figures, tuple(self.samples), self._clock.now, self._clock.events, cpu_s)

    @property
    def _cancels(self) -> bool:
        """Whether the buffer may cancel episodes that run."""
        config = self.plan.replay
        return config.min_members < config.group_size or config.on_deadline == "drop"

    # --- rollouts -------------------------------------------------------------------------------------------------

    def _shapes(self, lease: Lease) -> list[EpisodeShape]:
        group = self.plan.environments[lease.env].group(self._rng, self.plan.replay.group_size)
        return [group[member] for member in lease.members]

    def _lease(self) -> None:
        """Grant groups that are requested, one to each worker in turn, while admission allows."""
        workers = self._workers
        granted: dict[int, SimulatedWorker] = {}
        passed = 0
        while passed < len(workers):
            worker = workers[self._turn]
            if worker.requested:
                if not worker.grant():
                    break
                granted[self._turn] = worker
                passed = 0
            else:
                passed += 1
            self._turn = (self._turn + 1) % len(workers)
        for worker in granted.values():
            worker.reply()

    def _delivered(self, episode: PlayedEpisode, kept: bool) -> None:
        if kept:
            self._contexts[episode.id] = episode.shape.tokens
            self._episodes_s += episode.ended - episode.began
            self._episodes += 1
        self._take()
        self._lease()

    def _observe(self) -> None:
        loads = self._fleet.loads()
        for worker in self._workers:
            worker.observe(loads)
        self._check_progress()
        self._clock.after(SAMPLE_S, self._observe)

    def _check_progress(self) -> None:
        """Find out whether there will never be another batch: the samples of the load would go on forever."""
        refilled = self.replay.table.counters.refilled - self._refilled
        if refilled > REFILLS * self.plan.admission.groups_per_batch:
            self._stuck = f"{refilled} groups in a row had equal rewards (buffer.dynamic_sampling)"
        elif self._asked_at is not None and all(worker.waits for worker in self._workers):
            self._stuck = "the learner waits for a batch, and no episode runs"

    def _report(self) -> None:
        for worker in self._workers:
            worker.report()
        self._clock.after(PROGRESS_S, self._report)

    # --- the learner ----------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        self._asked_at = self._clock.now
        self._take()

    def _take(self) -> None:
        """Take a batch, where the learner wants one and there may be one: `Replay.take` looks at all ready groups."""
        table, admission = self.replay.table, self.plan.admission
        if self._asked_at is None:
            return
        if sum(table.count("ready", env) for env in range(len(admission.shares))) < admission.groups_per_batch:
            return
        batch = self.replay.take(self.replay.version)
        if batch is None:
            return
        self._wait_s = self._clock.now - self._asked_at + self.plan.take_s
        self._asked_at = None
        self._count(batch)
        if not self._step_times:
            self._step_times = self._rng.sample(self.plan.step_s, len(self.plan.step_s))
        self._step_s = self._context * self._step_times.pop()
        self._clock.after(self.plan.take_s, self._step)

    def _count(self, batch: list[Group]) -> None:
        """The tokens of a batch that carry loss, by staleness; those that do not; and the learner's work: it computes no episode
        without a token that carries loss."""
        version, oldest = self.replay.version, self.plan.admission.oldest_trainable(self.replay.version)
        self._lags.clear()
        self._withheld = self._context = 0
        for group in batch:
            for episode in group.in_account("ready"):
                context = self._contexts.pop(episode.id, 0)
                if not episode.withheld and max(episode.kept, default=-1) >= oldest:
                    self._context += context
                for sampled_at, tokens in episode.kept.items():
                    if episode.withheld or sampled_at < oldest:
                        self._withheld += tokens
                    else:
                        self._lags[version - sampled_at] += tokens

    def _step(self) -> None:
        if self._fleet.works:
            self._step_s *= self.plan.learner_contention
        self._slow(self.plan.contention, self.plan.worker_contention)
        self._clock.after(self._step_s, self._commit)

    def _slow(self, replicas: float = 1.0, workers: float = 1.0) -> None:
        """Replicas and workers take so many times as long from now on."""
        self._fleet.slow(replicas)
        for worker in self._workers:
            worker.slow(workers)

    def _commit(self) -> None:
        self._slow()
        self.replay.commit(self.replay.version)
        self.replay.table.drain()
        self._stepped_at = self._clock.now
        slowness = self.plan.push_slowness(self._fleet.in_flight / self.plan.replicas)
        self._fleet.push(self.replay.version, self._on_served, slowness)

    def _on_served(self) -> None:
        """The last replica serves the version: the step is over, and more groups may start."""
        replay = self.replay
        replay.mark_served(replay.version)
        replay.mark_checkpointed(replay.version)
        replay.table.prune()
        self._refilled = replay.table.counters.refilled
        for worker in self._workers:
            worker.account()
        generated = replay.table.ledgers.total.generated
        slot_s = sum(worker.slot_time.slot_s for worker in self._workers)
        idle_slot_s = sum(worker.slot_time.idle_slot_s for worker in self._workers)
        before, self._before = self._before, (generated, slot_s, idle_slot_s)
        self.samples.append(
            StepSample(
                wait_s=self._wait_s,
                step_s=self._step_s,
                push_s=self._clock.now - self._stepped_at,
                tokens_by_staleness=dict(self._lags),
                withheld=self._withheld,
                generated=generated - before[0],
                slot_s=slot_s - before[1],
                idle_slot_s=idle_slot_s - before[2],
                context=self._context,
            )
        )
        self._ask()
        self._lease()
