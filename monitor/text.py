"""Numbers as text: `12.3k`, `4 min 05 s`, `12 %`, and a curve in one line; and text of others that a terminal may print."""

from __future__ import annotations

import re
from collections.abc import Sequence

MISSING = "–"
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
"""What moves the cursor, changes colors, turns the direction of what follows, or is not seen; line ends and tabs are none of it."""


def count(number: float | None) -> str:
    """Three digits and a unit: 950, 1.25k, 31.4M."""
    if number is None:
        return MISSING
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= 0.9995 * size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def share(number: float | None) -> str:
    """0.123 as `12 %`; above zero and below a half percent as `<1 %`."""
    if number is None:
        return MISSING
    return "<1 %" if 0 < number < 0.005 else f"{100 * number:.0f} %"


def reward(number: float | None) -> str:
    return MISSING if number is None else f"{number:.3f}"


def duration(seconds: float) -> str:
    """`42 s`, `4 min 05 s`, `3 h 12 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def sparkline(values: Sequence[float], width: int) -> str:
    """The last `width` values as blocks of eight heights, scaled to their own range."""
    shown = values[-width:]
    low, high = min(shown, default=0.0), max(shown, default=0.0)
    scale = 7 / (high - low) if high > low else 0.0
    return "".join("▁▂▃▄▅▆▇█"[round((value - low) * scale)] for value in shown)


def printable(text: str) -> str:
    """`text` with control characters and invisible ones as escapes: `\\x1b[2J` instead of an empty screen."""
    return _UNSAFE.sub(lambda match: ascii(match[0])[1:-1], text)
