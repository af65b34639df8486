"""The store that the benchmark of the dashboard writes is one that the dashboard reads."""

from pathlib import Path

from slipstream.benchmarks.dashboard import AT_ONCE, LONG, write_store
from slipstream.dashboard.index import TrajectoryIndex, TrajectoryQuery
from slipstream.dashboard.store import StoreReader
from slipstream.dashboard.texts import TokenTexts
from slipstream.dashboard.trajectory import WINDOW, TrajectoryReader


def test_the_dashboard_reads_the_store_of_its_benchmark(tmp_path: Path) -> None:
    write_store(tmp_path, AT_ONCE)
    store = StoreReader(tmp_path, lambda: False)
    page = TrajectoryIndex(store).page(TrajectoryQuery(sort="tokens"))
    assert page.total == AT_ONCE
    assert page.rows[0]["tokens"] == LONG
    reader = TrajectoryReader(store, TokenTexts(tmp_path, ""))
    assert len(reader.window("0.0.0.0", LONG // 2, LONG // 2 + WINDOW)["ids"]) == WINDOW
