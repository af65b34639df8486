"""Mathematical equivalence by math-verify, in a process that is killed when an answer never comes to an end."""

from __future__ import annotations

from typing import Any

from ...errors import ConfigError, EnvError
from .answers import last_boxed, references_of
from .process_pool import ProcessLost, in_process

EQUIVALENCE = f"{__package__}.equivalence"  # imported in the processes only: sympy takes seconds and much memory
LIMIT_S = 8.0  # beyond equivalence.INNER_S; then the process is killed: what runs in C, such as 9^9^9, hears no signal
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
            return await in_process(f"{EQUIVALENCE}:grade", given, wanted, seconds=LIMIT_S)
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
        readable = await in_process(f"{EQUIVALENCE}:can_read", reference, seconds=LIMIT_S)
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
