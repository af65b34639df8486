"""What a contender of `bench learner` holds in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ..common import accelerator

FIELDS = {"now": "VmRSS", "at most": "VmHWM"}
"""As the kernel calls them."""


def memory_used(when: Literal["now", "at most"]) -> int:
    """Bytes that this process has on the accelerator, where there is one, else those that are resident."""
    if accelerator.current():
        return accelerator.allocated_memory(peak=when == "at most")
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{FIELDS[when]}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {FIELDS[when]}")
