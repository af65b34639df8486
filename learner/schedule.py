"""Learning rates as pure functions of the step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

FLOOR = 0.1
"""Share of the peak at which the cosine ends."""


def warm_up(peak: float, step: int, warmup_steps: int) -> float:
    """Rate of optimizer step `step` (from 0): linear over `warmup_steps`, then `peak`."""
    return peak * min(1.0, (step + 1) / max(1, warmup_steps))


def warm_up_cosine(peak: float, step: int, warmup_steps: int, steps: int) -> float:
    """As `warm_up`, then half a cosine down to a tenth of `peak` at the last of `steps` (Loshchilov & Hutter 2017)."""
    if step < warmup_steps:
        return warm_up(peak, step, warmup_steps)
    progress = min(1.0, (step - warmup_steps + 1) / max(1, steps - warmup_steps))
    return peak * (FLOOR + (1.0 - FLOOR) * 0.5 * (1.0 + math.cos(math.pi * progress)))
