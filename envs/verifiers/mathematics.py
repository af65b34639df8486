"""Mathematical equivalence by math-verify, in a process that is killed when an answer never comes to an end."""

from __future__ import annotations

from typing import Any

from ...errors import ConfigError, EnvError
from .answers import last_boxed, references_of
from .process_pool import ProcessLost, in_process

INNER_S = 2  # of math-verify itself, by SIGALRM: interrupts what runs in Python, and keeps the process
LIMIT_S = 8.0  # then the process is killed: what runs in C, such as 9^9^9, hears no signal
LONGEST = 2000  # characters of an answer that are read, its last ones
KNOWN = 100_000  # references that are remembered as readable

_readable: set[str] = set()


async def math(completion: str, reference: Any) -> float:
    """1 where the completion's answer equals the reference, or one of them, mathematically: LaTeX or plain, as a number,
    expression, equation, interval or set. The answer is what its last `\\boxed` holds, else the last expression of the
    completion. An answer that cannot be read, or on which the computation does not end, earns 0. Raises EnvError: a reference
    that cannot be read."""
    wanted = references_of(reference)
    for one in wanted:
        await _require_readable(one)
    boxed = last_boxed(completion)
    given = completion[-LONGEST:] if boxed is None else f"\\boxed{{{boxed[-LONGEST:]}}}"
    for attempt in (1, 2):
        try:
            return await in_process(grade, given, wanted, seconds=LIMIT_S)
        except TimeoutError:
            return 0.0
        except ProcessLost:  # twice in a row it is the answer that ends it, by exhausting the stack or the memory
            if attempt == 2:
                return 0.0
    raise AssertionError("unreachable: the second attempt returns")


async def _require_readable(reference: str) -> None:
    if reference in _readable:
        return
    try:
        readable = await in_process(can_read, reference, seconds=LIMIT_S)
    except TimeoutError:
        readable = False
    if not readable:
        raise EnvError(f"the reference {reference!r:.100} cannot be read as mathematics")
    if len(_readable) < KNOWN:
        _readable.add(reference)


def require_math() -> None:
    """Raises ConfigError: math-verify is not installed."""
    try:
        import math_verify  # noqa: F401
    except ImportError:
        raise ConfigError(
            "the verifier `math` needs the package math-verify; run `pip install 'math-verify[antlr4-13-2]'`"
        ) from None


def can_read(reference: str) -> bool:
    """In a process: whether math-verify reads the reference."""
    return bool(_parse_reference(reference))


def grade(given: str, wanted: list[str]) -> float:
    """In a process: whether the answer equals one of the references."""
    from math_verify import parse, verify

    try:
        answer = parse(given, parsing_timeout=INNER_S)
        return float(
            any(verify(_parse_reference(one), answer, timeout_seconds=INNER_S) for one in wanted) if answer else False
        )
    except (MemoryError, RecursionError):
        return 0.0


def _parse_reference(reference: str) -> list[Any]:
    from math_verify import parse

    text = reference if "$" in reference or "\\boxed" in reference else f"${reference}$"
    return parse(text, parsing_timeout=INNER_S)
