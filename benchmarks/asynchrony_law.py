"""The laws that `slipstream bench async` emulates, at a scale at which two cores wait and do not compute.

    published: 64 H20 that generate, 64 that train, 512 groups of 16 answers a step      here: 2 servers, 16 groups of 16 a step
    a token, a second there  ──>  1 / TOKENS tokens, 1 / TIME seconds here; each server has as many sequences as there

The law of ANSWERS is that with which the simulator reproduces what verl published (7B, fully asynchronous training): lognormal
answers with a mean of 5,000 tokens, sigma 0.9, cut at 28,672; a decode step of n sequences takes 5.6 ms + 0.06 ms x n; a step of
the separate learner takes 113 s.

Invariants:
- One law holds for every bound: engine, learner and lengths are the same, and so are the tasks.
- What is not in the law is real: the way of requests and trajectories, the buffer's disk, commits, pushes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import mean

import msgspec

from ..planner.engine import DecodeCurve
from ..planner.profile import EngineProfile, LearnerProfile, PushProfile, RunProfile
from ..planner.workload import Lognormal
from ..rollout.engines.fake.law import BLOCK, EngineLaw

TOKENS, TIME = 100, 20
GROUPS, MEMBERS, REPLICAS, PLACES = 16, 16, 2, 256

DRAWN = 500  # groups whose mean length stands for that of the law

STEP_S = 113.16 / TIME  # of the separate learner
TOOL_S = 10 / TIME  # of a tool
PREFILL_S = 3e-5 * TOKENS / TIME  # of a token, by 7B on an H100 at half of its peak
COLOCATED_STEP_S = (53.92 + 113.81) / TIME  # of a learner on all devices, with the log-probs that it computes first


class EmulatedLaw(msgspec.Struct, frozen=True):
    """All that is emulated. Seconds and tokens are those of this machine."""

    episodes: Lognormal
    engine: EngineLaw
    step_s: float  # of a learner step on a batch of mean length
    replicas: int = REPLICAS
    groups: int = GROUPS
    members: int = MEMBERS
    places: int = PLACES  # sequences that a server decodes at once
    alike: float = 0.0  # share of the groups whose members all earn the same

    @property
    def seconds_per_token(self) -> float:
        """Of a learner step, context included."""
        rng = random.Random(0)
        drawn = [episode.tokens for _ in range(DRAWN) for episode in self.episodes.group(rng, self.members)]
        return self.step_s / (self.groups * self.members * mean(drawn))

    def settings(self, bound: int) -> dict[str, bool | int | str]:
        """Of a run of this law. Replicas that finish what they decode before they change weights do so together."""
        return {
            "buffer.max_staleness": bound,
            "buffer.groups_per_batch": self.groups,
            "buffer.group_size": self.members,
            "rollout.engine.replicas": self.replicas,
            "rollout.engine.max_concurrent": self.places,
            "weightsync.cohort": self.replicas if self.engine.drains else 0,
        }

    def profile(self, bound: int, measured: HandOvers) -> RunProfile:
        """What the simulator needs: the law, and what is not in it."""
        law = self.engine
        curve = DecodeCurve(((0.0, law.step_s), (float(self.places), law.step_s + self.places * law.sequence_s)))
        return RunProfile(
            settings=self.settings(bound),
            environments=(self.episodes,),
            engine=EngineProfile(curve, law.prefill_s, request_steps=measured.request_steps, block=BLOCK),
            learner=LearnerProfile((self.seconds_per_token,), take_s=measured.take_s),
            push=PushProfile(
                measured.cohort_s, measured.pause_s, measured.once_s, measured.canary_s, measured.push_steps
            ),
            deliver_s=measured.deliver_s,
        )

    def draining(self) -> EmulatedLaw:
        """With servers that finish what they decode before they change weights."""
        return msgspec.structs.replace(self, engine=msgspec.structs.replace(self.engine, drains=True))


class HandOvers(msgspec.Struct, frozen=True):
    """What no law says: the system's own times, in seconds and in decode steps, as a run showed them; see `RunProfile`."""

    once_s: float
    cohort_s: float
    pause_s: float
    canary_s: float
    push_steps: float
    request_steps: float
    take_s: float  # with what a step takes beyond its law
    deliver_s: float  # with what an episode takes before its first request

    @classmethod
    def mean(cls, several: Sequence[HandOvers]) -> HandOvers:
        return cls(*(mean(values) for values in zip(*map(msgspec.structs.astuple, several), strict=True)))


ANSWERS = EmulatedLaw(
    Lognormal(mean=5000 / TOKENS, sigma=0.9, most=28672 // TOKENS, prompt=300 // TOKENS),
    EngineLaw(step_s=5.6e-3 * TOKENS / TIME, sequence_s=6e-5 * TOKENS / TIME),
    STEP_S,
)
"""Single answers: mathematics, without tools."""

COLOCATED = msgspec.structs.replace(ANSWERS, step_s=COLOCATED_STEP_S, replicas=2 * REPLICAS)
"""The same on as many devices when learner and servers take turns on all of them: what the published systems compare with."""

TOOLS = msgspec.structs.replace(
    ANSWERS,
    episodes=msgspec.structs.replace(ANSWERS.episodes, turns=4, environment_s=TOOL_S),
    engine=msgspec.structs.replace(ANSWERS.engine, prefill_s=PREFILL_S),
)
"""The same tokens in four turns, each with a tool that sleeps. Prompts are prefilled, and so is what a push finds under way:
the law of the answers has no time for that."""
