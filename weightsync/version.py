"""Policy versions: how old a token is, how old it may be, and which number comes next.

Invariants:
- A version names one set of weights for ever. After a recovery the next new version lies above every one ever used, even
  above versions whose weights were lost.
- Version 0 is the policy that the run starts from.
"""

from __future__ import annotations

from ..errors import StateError


def staleness(current: int, sampled: int) -> int:
    """Versions between the policy that sampled a token and the learner's current one: `current - sampled`, never negative.

    Raises:
        StateError: the token claims to come from a version that does not exist yet.
    """
    if sampled > current:
        raise StateError(f"version {sampled} sampled a token, yet the newest version is {current}")
    return current - sampled


def oldest_trainable(current: int, max_staleness: int) -> int:
    """The oldest version whose tokens the learner, at version `current`, may train on; never below 0."""
    return max(0, current - max_staleness)


class VersionClock:
    """Hands out versions, each exactly once.

    Attributes:
        current: the version of the weights that the learner holds.
        newest: the greatest version ever used; `current` lies below it after a recovery from an older checkpoint.
    """

    def __init__(self, current: int = 0, newest: int = 0) -> None:
        """Start, or recover: `current` is the checkpoint's version, `newest` the greatest that anybody remembers."""
        if current < 0:
            raise StateError(f"policy version {current} is negative")
        self.current = current
        self.newest = max(current, newest)

    def advance(self) -> int:
        """The version of the weights that an optimizer step has just made."""
        self.newest += 1
        self.current = self.newest
        return self.current

    def observe(self, version: int) -> None:
        """Somebody (a replica, the buffer) used `version`: it will not be handed out."""
        self.newest = max(self.newest, version)
