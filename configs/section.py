"""What every section of the configuration is made of."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]
AboveZero = Annotated[float, Meta(gt=0.0)]


class Section(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every section."""
