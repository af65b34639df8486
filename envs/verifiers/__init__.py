"""Verifiers: from what the policy wrote and a reference to a reward between 0 and 1.

    REWARDS["math"]("... \\\\boxed{1/2}", "0.5")  ->  1.0 (awaited)

A wrong answer, and one on which a verifier never comes to an end, earn 0. A reference that cannot be read is EnvError, a tool or
sandbox that fails ToolError: never a reward.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from .answers import choice, exact, f1, gsm8k
from .code import code
from .files import score_contents, score_files
from .mathematics import math, require_math
from .process_pool import ProcessLost, in_process

Verifier = Callable[[str, Any], Awaitable[float]]
"""From a completion and a reference, which is any JSON value, to a reward. Raises EnvError, ToolError."""


def _at_once(function: Callable[[str, Any], float]) -> Verifier:
    """Of a function that takes microseconds."""

    async def verify(completion: str, reference: Any) -> float:
        return function(completion, reference)

    return verify


REWARDS: Mapping[str, Verifier] = {
    "math": math,
    "choice": _at_once(choice),
    "exact": _at_once(exact),
    "f1": _at_once(f1),
    "gsm8k": _at_once(gsm8k),
    "code": code,
}

__all__ = [
    "REWARDS",
    "ProcessLost",
    "Verifier",
    "choice",
    "code",
    "exact",
    "f1",
    "gsm8k",
    "in_process",
    "math",
    "require_math",
    "score_contents",
    "score_files",
]
