"""What `bench gateway` measures, and that it is as little as it was to be."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from slipstream.benchmarks import gateway

LIMIT_MS = 1.0  # of CPU, by which a call through the gateway may exceed one of the session
SESSION_MS = 0.5  # which takes so much where nothing else runs


async def test_a_call_through_the_gateway_costs_a_millisecond_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the best of a few rounds: on a busy machine the same work takes more CPU time. A machine on which the session alone takes
    longer, too, has as much more time."""
    monkeypatch.setattr(gateway, "EPISODES", 8)
    monkeypatch.setattr(gateway, "ROUNDS", 1)
    best = math.inf
    for _ in range(5):
        bare, sdk = (await gateway.gateway(tmp_path)).rows
        assert (bare.name, sdk.name) == ("by a bare HTTP client", "by OpenAI's client")
        if min(bare.contender, sdk.contender) <= bare.floor:
            continue  # this process did something else meanwhile
        best = min(best, (bare.contender - bare.floor) / max(1.0, bare.floor / SESSION_MS))
        if best <= LIMIT_MS:
            return
    pytest.fail(f"{best:.2f} ms of {LIMIT_MS}")
