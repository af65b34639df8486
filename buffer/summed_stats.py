"""The statistics of a buffer with shards: sums over its processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from .ledger import total_of
from .messages import Stats


def sum_of(clock: Stats, shards: Sequence[Stats]) -> Stats:
    """The statistics of a whole buffer."""
    every = (clock, *shards)
    outcomes = Counter[str]()
    for one in every:
        outcomes.update(one.outcomes)
    numbers = (
        "leased_groups",
        "ready_groups",
        "slot_s",
        "idle_slot_s",
        "refilled_groups",
        "dropped",
        "unusable_batches",
        "refused",
    )
    sums = {name: sum(getattr(one, name) for one in every) for name in numbers}
    ledger = total_of(one.ledger for one in every)
    return msgspec.structs.replace(clock, ledger=ledger, outcomes=dict(outcomes), **sums)
