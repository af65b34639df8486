"""How `slipstream tune` spends its minutes: successive halving of the points that simulation puts in front. Pure.

    8 points, 6 steps each ──the better half──> 4 points, 12 steps ──the better two──> 24 steps: A, B, and A again
    up to 4 points, 6 steps each ─────────────the better two──────────────> 12 steps: A, B, and A again

(Jamieson and Talwalkar 2016.) Of fewer minutes fewer points, then fewer rungs: a probe's start takes as long as many of its steps.

Invariants:
- A schedule takes no longer than its budget, by what is expected of its probes.
- No rung has more points than the one before it, or fewer steps; none but the last leaves two.
- The two points of the last rung are compared around the same moment where there is time: A is measured before and after B, so
  that a machine that becomes slower at a constant rate favors neither. A single rung is between two probes of the own settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

STEPS = (6, 12, 24)  # that are counted, by rung
WIDEST = 8  # points of the first rung
NARROW = 4  # points of a first rung after which two are left
LEAST = 2  # points that a search should verify, beside its config's own


class ExpectedProbe(msgspec.Struct, frozen=True):
    """What a real probe of a point would take."""

    start_s: float  # all that is not a step: processes begin and end
    settling: int  # steps that are not counted
    cycle_s: float

    def seconds(self, steps: int) -> float:
        """Of a probe in which `steps` count."""
        return self.start_s + (self.settling + steps) * self.cycle_s


class Rung(msgspec.Struct, frozen=True):
    """`points` are the most that it may have."""

    points: int
    steps: int
    again: bool = (
        False  # there is time for one more: of the first of two points, or of the own settings after a single rung
    )


def schedule(probes: Sequence[ExpectedProbe], own: ExpectedProbe, budget_s: float) -> tuple[Rung, ...]:
    """The rungs for points whose probes these are, the most promising first; `own` is the probe of the config's own settings, which
    compete from the second rung on. Empty where there is no time for one."""
    for rungs in _shapes(min(WIDEST, len(probes))):
        if expected_s(rungs, probes, own) <= budget_s:
            again = (*rungs[:-1], msgspec.structs.replace(rungs[-1], again=True))
            return again if expected_s(again, probes, own) <= budget_s else rungs
    return ()


def expected_s(rungs: Sequence[Rung], probes: Sequence[ExpectedProbe], own: ExpectedProbe) -> float:
    """Which points stay is not known before: those that take longest."""
    total, field = 0.0, list(probes[: rungs[0].points]) if rungs else []
    for rung in rungs:
        each = sorted((probe.seconds(rung.steps) for probe in field), reverse=True)
        again_s = own.seconds(rung.steps) if len(rungs) == 1 else each[0]
        total += sum(each[: rung.points]) + again_s * rung.again
        field = [*probes[: rungs[0].points], own]
    return total


def _shapes(most: int) -> Iterator[tuple[Rung, ...]]:
    """The preferred first: with all rungs, without the last one, the first alone; within these the most points."""
    every = [_shape(points) for points in range(most, 0, -1)]
    enough = [shape for shape in every if shape[0].points >= min(LEAST, most)]
    yield from enough
    yield from (shape[:-1] for shape in enough if len(shape) > 2)
    yield from (shape[:1] for shape in every)


def _shape(points: int) -> tuple[Rung, ...]:
    widths = (points, 2) if points <= NARROW else (points, -(-points // 2), 2)
    return tuple(Rung(width, steps) for width, steps in zip(widths, STEPS, strict=False))
