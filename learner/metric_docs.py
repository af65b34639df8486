"""What each number of a step means, in the words that stand beside the fields of `StepMetrics`.

Invariants:
- A metric is documented where it is declared: by the comment behind its field, else by the one above it.
"""

from __future__ import annotations

import functools
import inspect
import re

from .metrics import RATE_S, BatchSummary, StepMetrics

FIELD = re.compile(r"    (\w+): [^#]+?(?:  # (.+))?$")
AVERAGED = f", over the newest steps of {RATE_S:g} s together at least"  # the fields that are marked *


@functools.cache
def metric_docs() -> dict[str, str]:
    """Field name -> what it is, in the order of the row."""
    found: dict[str, str] = {}
    for struct in (BatchSummary, StepMetrics):
        above: list[str] = []
        for line in inspect.getsource(struct).splitlines():
            if line.startswith("    # "):
                above.append(line[6:])
                continue
            if field := FIELD.match(line):
                heading = above and above[-1].endswith(":")  # of several fields
                found[field[1]] = _plain(field[2] or ("" if heading else " ".join(above)))
            above = []
    return found


def _plain(comment: str) -> str:
    return comment.removeprefix("* ") + AVERAGED if comment.startswith("* ") else comment
