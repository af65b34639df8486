"""The workload of a simulation: episodes with their turns, lengths, times in tools, and rewards; as a run recorded them, or by a
law.

Invariants:
- Numbers only: no text, no token id and no name of a task is in a workload.
- The members of a group are drawn together, because episodes of one task are alike, and a batch waits for the longest of a group.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]


class TurnShape(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One completion: the new tokens before it, the tokens that it samples, and what lies between its end and the next one, or the
    end of the episode: `environment_s` in which the worker waits for the environment and its tools, and `work_s` in which it
    computes. Episodes that one worker plays share its event loop: with n that compute, this takes n times as long."""

    prompt: Count
    sampled: Annotated[int, Meta(ge=1)]
    environment_s: Seconds
    work_s: Seconds = 0.0


class EpisodeShape(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`tokens` are those that the learner computes, context included, over all branches; `shared` those of its first prompt that
    other episodes have, too, and that are cached wherever it begins. From its lease until its worker begins it `lease_s` pass and
    the worker computes for `lease_work_s`, from there to its first turn `start_s` and `start_work_s`."""

    reward: float
    tokens: Count
    turns: Annotated[tuple[TurnShape, ...], Meta(min_length=1)]
    shared: Count = 0
    start_s: Seconds = 0.0
    start_work_s: Seconds = 0.0
    lease_s: Seconds = 0.0
    lease_work_s: Seconds = 0.0

    @property
    def sampled(self) -> int:
        return sum(turn.sampled for turn in self.turns)

    @property
    def environment_s(self) -> float:
        """Seconds in which it is no request, where its worker plays no other."""
        before = self.lease_s + self.lease_work_s + self.start_s + self.start_work_s
        return before + sum(turn.environment_s + turn.work_s for turn in self.turns)


class Observed(msgspec.Struct, frozen=True, tag="observed", tag_field="kind", forbid_unknown_fields=True):
    """Groups as a run played them; a group of another size is drawn from the members of one of them."""

    groups: Annotated[tuple[Annotated[tuple[EpisodeShape, ...], Meta(min_length=1)], ...], Meta(min_length=1)]
    share: Annotated[float, Meta(gt=0)] = 1.0
    """The environment's part of every batch."""

    def group(self, rng: random.Random, members: int) -> list[EpisodeShape]:
        """The shapes of a group."""
        found = rng.choice(self.groups)
        return [found[i] if i < len(found) else rng.choice(found) for i in range(members)]

    @property
    def longest(self) -> int:
        """Tokens of the longest episode."""
        return max(episode.tokens for group in self.groups for episode in group)

    @property
    def lease_work_s(self) -> float:
        """Mean of its episodes."""
        return fmean(episode.lease_work_s for group in self.groups for episode in group)


class Lognormal(msgspec.Struct, frozen=True, tag="lognormal", tag_field="kind", forbid_unknown_fields=True):
    """Sampled tokens of an episode are lognormal and cut at `most`; they are spread evenly over its `turns`. `mean` is that of the
    law before it is cut, `sigma` the deviation of the logarithm. With `sigma` 0 all have `mean` tokens. All rewards are alike."""

    mean: Annotated[float, Meta(gt=0)]
    sigma: Annotated[float, Meta(ge=0)]
    most: Annotated[int, Meta(gt=0)]
    prompt: Count = 0
    """New tokens before each turn: the task, then what tools answer."""
    turns: Annotated[int, Meta(ge=1)] = 1
    environment_s: Seconds = 0.0
    """After each turn."""
    share: Annotated[float, Meta(gt=0)] = 1.0

    def group(self, rng: random.Random, members: int) -> list[EpisodeShape]:
        """Members of one prompt, which the first of them brings into the cache."""
        return [self._episode(rng, self.prompt if member else 0) for member in range(members)]

    def _episode(self, rng: random.Random, shared: int) -> EpisodeShape:
        mu = math.log(self.mean) - self.sigma**2 / 2
        total = min(self.most, max(self.turns, round(rng.lognormvariate(mu, self.sigma))))
        each, rest = divmod(total, self.turns)
        turns = tuple(TurnShape(self.prompt, each + (i < rest), self.environment_s) for i in range(self.turns))
        return EpisodeShape(0.0, total + self.turns * self.prompt, turns, shared)

    lease_work_s: ClassVar[float] = 0.0  # nothing is known of the workers

    @property
    def longest(self) -> int:
        return self.most + self.turns * self.prompt


Workload = Observed | Lognormal


def sample_groups(
    workloads: Sequence[Workload], groups: int, members: int, seed: int = 0
) -> Iterator[list[EpisodeShape]]:
    """So many groups, of each environment by its share."""
    rng = random.Random(seed)
    shares = [workload.share for workload in workloads]
    for workload in rng.choices(workloads, shares, k=groups):
        yield workload.group(rng, members)
