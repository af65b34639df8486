"""The base class of every section of the config, and the bounded types of its keys."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]
AboveZero = Annotated[float, Meta(gt=0.0)]


class Section(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every section."""
