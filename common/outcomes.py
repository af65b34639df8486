"""Counts of episodes by outcome: `finished`, `truncated`, and `failed_REASON` (`buffer.trajectory.Outcome.label`)."""

from __future__ import annotations

from collections.abc import Mapping

FAILED = "failed_"
WARN_SHARE = 0.1  # share of failed episodes above which the user is told


def failures(outcomes: Mapping[str, int]) -> dict[str, int]:
    """Failed episodes by reason, the most frequent first."""
    failed = [(name.removeprefix(FAILED), number) for name, number in outcomes.items() if name.startswith(FAILED)]
    return {reason: number for reason, number in sorted(failed, key=lambda pair: -pair[1]) if number}


def failed_share(outcomes: Mapping[str, int]) -> float:
    """Share of the episodes that failed, 0 to 1; 0 for no episodes."""
    return sum(failures(outcomes).values()) / max(1, sum(outcomes.values()))


def failures_text(outcomes: Mapping[str, int], of: str = "") -> str:
    """`49 of 64 episodes failed (40 environment, 9 tool)`, with `of` before the second number; "" where none failed."""
    failed = failures(outcomes)
    if not failed:
        return ""
    reasons = ", ".join(f"{number} {reason}" for reason, number in failed.items())
    return f"{sum(failed.values())} of {of}{sum(outcomes.values())} episodes failed ({reasons})"
