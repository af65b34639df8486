"""Replaces SGLang's compiled kernels on a machine without a GPU, where SGLang imports their names and calls none of them.

Invariants:
- Any name can be imported; every call raises. There is no silent fallback.
- No operator is registered: SGLang finds the kernels for CPU absent, too, and uses torch's own everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

__version__ = "0.0.0"


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is not there on CPU; please report which model needs it")

    missing.__name__ = name
    return missing
