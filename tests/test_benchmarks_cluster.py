"""`bench cluster`: how a cost grows is computed, and every part measures real processes, here with few roles for a short time."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from slipstream.benchmarks import (
    cluster_buffer,
    cluster_publisher,
    cluster_router,
    cluster_shards,
    cluster_supervisor,
)
from slipstream.benchmarks.cluster_processes import growth, measured
from slipstream.benchmarks.result import Result
from slipstream.errors import SlipstreamError


def burn(seconds: float, ready: Connection) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass
    ready.send(("here",))
    time.sleep(600)


def end(ready: Connection) -> None:
    ready.close()


async def test_the_cpu_of_another_process_is_measured_and_the_process_ends_with_the_context() -> None:
    async with measured(burn, 0.3) as process:
        assert process.addresses == ("here",)
        assert 0.3 <= process.cpu_s() < 100.0  # with its imports
        os.kill(process.pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


async def test_a_process_that_ends_early_is_an_error() -> None:
    with pytest.raises(SlipstreamError, match="end ended before it was ready"):
        async with measured(end):
            pass


def test_growth_is_a_ratio_and_a_line() -> None:
    row = growth("a step", "ms", "replica", [(10, 3.0), (100, 12.0), (1000, 102.0)])
    assert row.ratio == pytest.approx(34.0)
    assert row.note == "2 + 0.1 per replica; 3 at 10, 12 at 100, 102 at 1,000"
    assert growth("a beat", "us", "worker", [(10, 60.0), (100, 58.0)]).note.startswith("59, no growth; ")
    assert growth("an idle second", "ms", "worker", [(2, 0.0), (4, 0.2)]).ratio == math.inf


@pytest.mark.full
@pytest.mark.parametrize(
    ("part", "rows"),
    [
        (cluster_router.router, 3),
        (cluster_supervisor.supervisor, 3),
        (cluster_publisher.publisher, 1),
        (cluster_buffer.buffer, 2),
    ],
    ids=["router", "supervisor", "publisher", "buffer"],
)
async def test_every_part_is_measured(
    part: Callable[..., object], rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name, value in (
        (cluster_supervisor, "QUIET_S", 5.5),  # one probe of each server: two idle servers may take no CPU in between
        (cluster_supervisor, "BEATS_S", 0.5),
        (cluster_buffer, "TRAFFIC_S", 1.0),
        (cluster_buffer, "REPORTS_S", 1.0),
    ):
        monkeypatch.setattr(module, name, value)
    result = await part(tmp_path, (2, 4))
    assert isinstance(result, Result)
    assert len(result.rows) == rows
    assert (result.contender, result.floor) == ("at 4", "at 2")
    # Less than what probes take by chance meanwhile may be left of a few heartbeats.
    assert all(math.isfinite(row.contender) and row.floor for row in result.rows)
    assert result.rows[-1].contender > 0


@pytest.mark.full
async def test_shards_are_measured_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_shards, "TRAFFIC_S", 1.0)
    monkeypatch.setattr(cluster_shards, "WORKERS", 4)
    result = await cluster_shards.shards(tmp_path, (1, 2))
    assert [row.name.partition(",")[0] for row in result.rows] == ["2 shards", "2 shards", "2 shards"]
    assert all(math.isfinite(row.contender) and row.contender > 0 and row.floor > 0 for row in result.rows)
