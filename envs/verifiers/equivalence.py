"""The part of the verifier `mathematics` that runs in a process of its own. Only such processes import this module, before a call's
limit begins."""

from __future__ import annotations

from typing import Any

from math_verify import parse, verify

INNER_S = 2  # of math-verify itself, by SIGALRM: interrupts what runs in Python, and keeps the process


def can_read(reference: str) -> bool:
    """Whether math-verify reads the reference."""
    return bool(_parse_reference(reference))


def grade(given: str, wanted: list[str]) -> float:
    """1 where the answer equals one of the references."""
    try:
        answer = parse(given, parsing_timeout=INNER_S)
        return float(
            any(verify(_parse_reference(one), answer, timeout_seconds=INNER_S) for one in wanted) if answer else False
        )
    except (MemoryError, RecursionError):
        return 0.0


def _parse_reference(reference: str) -> list[Any]:
    text = reference if "$" in reference or "\\boxed" in reference else f"${reference}$"
    return parse(text, parsing_timeout=INNER_S)
