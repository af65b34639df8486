"""The plan of a simulation: a profile under one set of settings. Pure."""

from __future__ import annotations

from statistics import fmean

import msgspec

from ..buffer.admission import Admission, ReplayConfig
from ..monitor.alerts import SETTLING
from .engine import DecodeCurve
from .profile import RunProfile
from .workload import Workload, sample_groups

QUARTER = 4  # with `weightsync.cohort` 0, one of so many replicas changes weights at a time
FOREVER_S = 1e12  # a lease in a simulation: its workers do not die
EVENTS = (
    400_000  # about how many a simulation may have, where its caller leaves the number of steps open: some ten seconds
)
STEPS = 60  # most steps then
COUNTED = 30  # most steps that count of a simulation that is compared with others


class SimulationPlan(msgspec.Struct, frozen=True):
    """One simulation. Times in seconds."""

    admission: Admission
    replay: ReplayConfig
    environments: tuple[Workload, ...]
    decode: DecodeCurve
    prefill_s: float
    block: int  # tokens of a block of the prefix cache
    request_steps: float  # decode steps that a request waits for
    contention: float  # how many times as long replicas take while the learner computes
    worker_contention: float  # the same of workers
    learner_contention: float  # how many times as long steps take beside replicas that work
    replicas: int
    max_concurrent: int
    limits: tuple[int | None, ...]  # of each worker: the most episodes that it plays at once
    recompute: bool  # a swap voids keys and values of running sequences
    cohort: int
    once_s: float  # of a push, before its first cohort
    cohort_s: float
    pause_s: float
    canary_s: float  # of `cohort_s`, after the pause
    push_steps: float  # decode steps that the push of a cohort waits for
    deliver_s: float  # from the end of an episode until its slot is free and its group counts
    # Of a worker for one request for groups: taken as that for one leased episode. The work of its episodes, which is all that its
    # process did, has it too: an excess of one request in a group.
    request_work_s: float
    take_s: float
    step_s: tuple[
        float, ...
    ]  # seconds per token of a batch, context included, alone on its host; each is drawn equally often
    gpus: int  # that replicas and learner need
    drains: bool = False  # replicas finish what they decode before they change weights, which no setting asks for

    @classmethod
    def of(cls, profile: RunProfile, overrides: tuple[str, ...] = ()) -> SimulationPlan:
        """Raises ConfigError for an override that is not allowed."""
        config = profile.config(overrides)
        buffer, engine, ranks = config.buffer, config.rollout.engine, config.learner.backend.ranks
        shares = tuple(workload.share for workload in profile.environments)
        learner, workers = profile.learner, config.rollout.workers
        return cls(
            admission=Admission(buffer.max_staleness, buffer.groups_per_batch, shares),
            replay=ReplayConfig(
                buffer.group_size,
                buffer.min_members or buffer.group_size,
                buffer.on_deadline,
                FOREVER_S,
                {},
                buffer.dynamic_sampling,
                buffer.filter,
                profile.greedy,
            ),
            environments=profile.environments,
            decode=profile.engine.decode,
            prefill_s=profile.engine.prefill_s,
            block=profile.engine.block,
            request_steps=profile.engine.request_steps,
            contention=profile.engine.contention,
            worker_contention=profile.worker_contention,
            learner_contention=learner.contention,
            replicas=engine.count,
            max_concurrent=engine.max_concurrent,
            limits=tuple(config.rollout.episode_limit(i, workers) for i in range(workers)),
            recompute=config.rollout.partial != "keep_kv",
            cohort=config.weightsync.cohort or max(1, engine.count // QUARTER),
            once_s=profile.push.once_s,
            cohort_s=profile.push.cohort_s,
            pause_s=profile.push.pause_s,
            canary_s=profile.push.canary_s,
            push_steps=profile.push.steps,
            deliver_s=profile.deliver_s,
            request_work_s=fmean([workload.lease_work_s for workload in profile.environments], shares),
            take_s=learner.take_s,
            step_s=tuple(seconds * learner.ranks / ranks for seconds in learner.seconds_per_token),
            gpus=engine.count * profile.engine.ranks + ranks,
        )

    @property
    def workers(self) -> int:
        return len(self.limits)

    @property
    def cohorts(self) -> int:
        return -(-self.replicas // self.cohort)

    @property
    def push_s(self) -> float:
        return self.once_s + self.cohorts * self.cohort_s

    def push_slowness(self, in_flight: float) -> float:
        """How many times as long a push takes while each replica has so many requests; those that queue there are in no step."""
        step_s = self.decode.under_way_s(min(in_flight, self.max_concurrent))
        waits_s = self.cohorts * self.push_steps * step_s
        return 1 + waits_s / self.push_s if self.push_s else 1.0

    @property
    def settling(self) -> int:
        """Steps at the beginning that are not counted."""
        return self.admission.max_staleness + SETTLING

    @property
    def default_steps(self) -> int:
        """Steps that a simulation has, those that are not counted included."""
        groups = list(sample_groups(self.environments, 50, self.replay.group_size))
        turns = sum(len(episode.turns) for group in groups for episode in group) / len(groups)
        per_step = self.admission.groups_per_batch * max(1.0, turns) * 4
        return self.settling + max(3, min(STEPS, round(EVENTS / per_step) - self.settling))

    @property
    def compared_steps(self) -> int:
        """Steps that a simulation has which is compared with others."""
        return min(self.default_steps, self.settling + COUNTED)
