"""The changes of settings that `slipstream chaos --set-changes N` makes, drawn from a seed before the run starts. Pure.

Invariants:
- The same config, numbers and seed give the same changes.
- Each is allowed after those before it, so a run that refuses one is wrong.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec

from ..configs import LIVE, Config, changed_live
from ..errors import ConfigError

BOUND = "buffer.max_staleness"
BOUNDS = 0.4  # share of the changes that move the bound, which is what the audit is about
MOST_STALENESS = 4


class PlannedChange(msgspec.Struct, frozen=True):
    """One change.

    Attributes:
        number: from 1.
        override: `key=value`.
        after_fault: the number of the fault after which it is made, 0 for before the first.
        recovers: it is made at once, while the run recovers from that fault; else when the next fault is due.
    """

    number: int
    override: str
    after_fault: int
    recovers: bool

    def __str__(self) -> str:
        return f"{self.number:4}  set {self.override}"


def make_changes(config: Config, count: int, faults: int, seed: int) -> tuple[PlannedChange, ...]:
    """`count` changes spread over `faults` faults."""
    rng = random.Random(f"{seed}/{count}/{faults}")
    places = sorted((rng.randint(0, faults), rng.random() < 0.5) for _ in range(count))
    drawn = _overrides(config, rng)
    return tuple(PlannedChange(number, next(drawn), *place) for number, place in enumerate(places, start=1))


def _overrides(config: Config, rng: random.Random) -> Iterator[str]:
    """Without end: random values of live keys, each other than the one before."""
    start = config
    while True:
        key = BOUND if rng.random() < BOUNDS else rng.choice(list(LIVE))
        override = f"{key}={_value(start, key, rng)}"
        try:
            config, changes = changed_live(config, [override])
        except ConfigError:
            continue  # impossible beside the others
        if changes:
            yield override


def _value(start: Config, key: str, rng: random.Random) -> int | float | str:
    buffer, workers = start.buffer, start.rollout.workers
    match key:
        case "buffer.max_staleness":
            return rng.randint(0, MOST_STALENESS)
        case "buffer.groups_per_batch":
            return rng.randint(1, 2 * buffer.groups_per_batch)
        case "buffer.min_members":
            return rng.choice([0, *range(2, buffer.group_size + 1)])
        case "buffer.on_deadline":
            return rng.choice(["withhold", "wait", "drop"])
        case "rollout.max_episodes":
            return rng.choice([0, 1, 2, 4]) * workers * buffer.group_size
        case "learner.optimizer.lr":
            return start.learner.optimizer.lr * rng.choice([0.5, 1.0, 2.0])
        case "learner.checkpoint_every":
            return rng.randint(1, 2 * start.learner.checkpoint_every)
        case "weightsync.cohort":
            return rng.randint(0, start.rollout.engine.count)
        case _:
            raise AssertionError(f"{key} is live, and chaos knows no values of it")
