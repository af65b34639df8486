"""What an exported page holds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DATA = r'<script type="application/json" id="recorded">(.*?)</script>'


def recorded_in(path: Path) -> dict[str, Any]:
    """The data of the file."""
    (block,) = re.findall(DATA, path.read_text(), re.DOTALL)
    assert "<" not in block
    return json.loads(block)


def evaluations_in(path: Path) -> list[str]:
    """`step 20`, or with a suite `step 20, math`, of each evaluation that the file shows."""
    shown = recorded_in(path)["answers"]["now"]["evaluations"]
    return [f"{one['label']}, {one['suite']}" if one["suite"] else one["label"] for one in shown]
