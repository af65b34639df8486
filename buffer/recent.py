"""Delivered trajectories that are still in memory, so that the next batch need not be read back from the file.

Invariants:
- At most `LIMIT` bytes of arrays are held. When that is reached no more are added: batches take the oldest groups first.
- What is held is what was stored: the frames that came.
"""

from __future__ import annotations

from collections.abc import Callable

from .trajectory import Trajectory

LIMIT = 64 << 20
"""Bytes: 900 episodes of 8k tokens. Long ones are read back; for them that costs little."""


class Recent:
    """Trajectories by episode."""

    def __init__(self) -> None:
        self._episodes: dict[str, tuple[Trajectory, ...]] = {}
        self._bytes = 0

    def add(self, episode_id: str, trajectories: tuple[Trajectory, ...]) -> None:
        """Hold the branches of a delivered episode, if there is room."""
        size = _size(trajectories)
        if self._bytes + size <= LIMIT:
            self._episodes[episode_id] = tuple(sorted(trajectories, key=lambda t: t.branch))
            self._bytes += size

    def get(self, episode_id: str) -> tuple[Trajectory, ...] | None:
        """The branches of an episode; None when it is not held."""
        return self._episodes.get(episode_id)

    def keep(self, wanted: Callable[[str], bool]) -> None:
        """Forget the episodes that are not wanted any more."""
        for episode_id in [e for e in self._episodes if not wanted(e)]:
            self._bytes -= _size(self._episodes.pop(episode_id))


def _size(trajectories: tuple[Trajectory, ...]) -> int:
    return sum(t.token_ids.nbytes + t.loss_mask.nbytes + t.behavior_logprobs.nbytes for t in trajectories)
