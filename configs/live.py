"""The table of live config keys: those that `slipstream set` changes while a run goes on.

Invariants:
- `LIVE` is the only list of them; `docs/operation.md` has it as a table, and a test compares the two.
- A changed config passes the checks of every config, with the same errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar

import msgspec

from ..errors import ConfigError
from .loading import changed
from .schema import Config

C = TypeVar("C", bound=Config)
Value = bool | int | float | str  # of a live key


class LiveKey(msgspec.Struct, frozen=True):
    """A config key that `slipstream set` changes, the process that applies the change, and when the change takes effect."""

    key: str
    applied_by: Literal["buffer", "workers", "learner"]
    takes_effect: str

    def value(self, config: Config) -> Value:
        found: object = config
        for part in self.key.split("."):
            found = getattr(found, part)
        assert isinstance(found, Value)
        return found


LIVE = {
    live.key: live
    for live in (
        LiveKey("buffer.max_staleness", "buffer", "raised: with the next lease; lowered: with the next batch"),
        LiveKey("buffer.groups_per_batch", "buffer", "with the next batch"),
        LiveKey("buffer.min_members", "buffer", "at once, also for groups that are being played"),
        LiveKey("buffer.on_deadline", "buffer", "with the next batch"),
        LiveKey("rollout.max_episodes", "workers", "with the next lease; no running episode is ended"),
        LiveKey("learner.optimizer.lr", "learner", "with the next step"),
        LiveKey("learner.checkpoint_every", "learner", "with the next step"),
        LiveKey("weightsync.cohort", "learner", "with the next push"),
    )
}
"""The table of live config keys, in the order in which `slipstream set` shows them."""


class LiveChange(msgspec.Struct, frozen=True):
    """The value of a live key before and after."""

    key: str
    old: Value
    new: Value


def changed_live(config: C, overrides: Sequence[str]) -> tuple[C, tuple[LiveChange, ...]]:
    """`config` with other values of live keys, and which of them differ. Raises ConfigError for any other key, for a value that is
    not allowed, and for values that are impossible together."""
    for override in overrides:
        key = override.partition("=")[0].strip()
        if "=" in override and key not in LIVE:
            changed(
                config, [override]
            )  # a key that does not exist, or a value that is wrong, is the first thing to say
            raise ConfigError(
                f"{key}: cannot be changed while the run goes on; live keys are {', '.join(LIVE)}. Most others change with "
                "`slipstream resume RUN key=value` after the run was stopped"
            )
    after = changed(config, overrides)
    return after, differences(config, after)


def differences(before: Config, after: Config) -> tuple[LiveChange, ...]:
    """The live keys whose values differ."""
    pairs = ((live.key, live.value(before), live.value(after)) for live in LIVE.values())
    return tuple(LiveChange(key, old, new) for key, old, new in pairs if old != new)
