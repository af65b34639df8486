"""The benchmark floor of every transfer of weights: how fast this machine copies memory."""

from __future__ import annotations

import time

import torch

BLOCK = 256 << 20
"""Bytes copied at once: far beyond every cache."""

TRIES = 5


def copy_bandwidth() -> float:
    """Bytes per second of one thread copying host memory; the best of a few tries."""
    source = torch.ones(BLOCK, dtype=torch.uint8)
    target = torch.zeros_like(source)
    best = float("inf")
    for _ in range(TRIES):
        began = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - began)
    return BLOCK / best
