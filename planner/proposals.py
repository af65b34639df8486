"""Values of settings that more than one of `explain`, `tune` and `simulate` proposes. Pure."""

from __future__ import annotations

from ..configs.schema import Buffer
from .profile import RunProfile

REPLICAS, RANKS = "rollout.engine.replicas", "learner.backend.ranks"
SPLITS = 9  # of devices between replicas and learner, where there are more
KEEP_MEMBERS = 0.9  # of a group
FEWEST = 2  # members whose rewards can be compared


def splits_of(profile: RunProfile, devices: int) -> list[dict[str, str]]:
    """Ways to divide all `devices` between replicas and learner, at most `SPLITS`, evenly; none where these are too few."""
    copy, replica = profile.learner.ranks_per_copy, profile.engine.ranks
    every = [((devices - ranks) // replica, ranks) for ranks in range(copy, devices - replica + 1, copy)]
    if len(every) > SPLITS:
        every = [every[round((i + 0.5) * len(every) / SPLITS - 0.5)] for i in range(SPLITS)]
    return [{REPLICAS: str(replicas), RANKS: str(ranks)} for replicas, ranks in every]


def first_members(buffer: Buffer, *, greedy: bool) -> int | None:
    """`buffer.min_members` with which a group does not wait for its last members; None where the config leaves out some by choice,
    or too few would be left. `greedy`: one member is the baseline of the others."""
    first = min(buffer.group_size - 1, round(KEEP_MEMBERS * buffer.group_size))
    chosen = buffer.min_members or greedy or buffer.filter != "none"
    return None if chosen or first < FEWEST else first
