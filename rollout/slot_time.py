"""How long a worker had slots for episodes, and how long they were empty: the same account in a run and in a simulation of it.

Invariants:
- The account is exact where the caller calls `account` before every change of the slots and of the number of episodes played.
- A slot that waits for the room of a whole group is not idle, nor is one above the cap, in which an episode still runs.
- Pure: the caller has the clock.
"""

from __future__ import annotations


class SlotTime:
    """Totals since the time `now`, in seconds of the caller's clock.

    Attributes:
        slot_s: seconds times slots, those above the cap that are still played included.
        idle_slot_s: of these, seconds of slots without an episode.
    """

    def __init__(self, group_size: int, now: float) -> None:
        self.slot_s = 0.0
        self.idle_slot_s = 0.0
        self._group_size = group_size
        self._until = now

    def account(self, now: float, slots: int, playing: int) -> None:
        """From the last call until `now` there were `slots`, and `playing` episodes."""
        seconds, self._until = now - self._until, now
        self.slot_s += max(slots, playing) * seconds
        if slots - playing >= self._group_size:
            self.idle_slot_s += (slots - playing) * seconds
