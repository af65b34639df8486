"""The metrics of adapters whose policy acts in turns."""

from __future__ import annotations


def turn_metrics(turns: int, invalid: int) -> dict[str, float]:
    """Messages of the policy so far, and those and their calls that could not be played."""
    return {"turns": float(turns), "invalid": float(invalid)}
