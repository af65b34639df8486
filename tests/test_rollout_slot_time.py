"""The account of slots."""

from __future__ import annotations

from slipstream.rollout.slot_time import SlotTime


def test_slots_count_as_long_as_they_were_so() -> None:
    time = SlotTime(4, 100.0)
    time.account(101.0, 8, 0)  # room for two groups
    assert (time.slot_s, time.idle_slot_s) == (8.0, 8.0)
    time.account(103.0, 8, 4)  # room for one
    assert (time.slot_s, time.idle_slot_s) == (24.0, 16.0)
    time.account(104.0, 8, 5)  # three free slots are no room for a group
    time.account(104.5, 8, 8)
    assert (time.slot_s, time.idle_slot_s) == (36.0, 16.0)
    time.account(106.5, 4, 8)  # the cap fell: what plays above it has slots, too
    assert (time.slot_s, time.idle_slot_s) == (52.0, 16.0)
