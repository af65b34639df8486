"""Ratio, entropy and advantage of single tokens on the dashboard: those that the learner recorded, and no other."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from slipstream.buffer.trajectory import Trajectory
from slipstream.common.annotations import CLIPPED, TRAINED, VALUES, TokenAnnotations
from slipstream.dashboard.app import DashServer
from slipstream.dashboard.ratios import ReplicaMismatch, ratios
from slipstream.dashboard.runs import RunFolder
from slipstream.dashboard.store import StoreReader
from slipstream.monitor.annotations import AnnotationWriter
from slipstream.tests.dashboard_runs import DashboardRun
from slipstream.tests.dashboards import IDLE, Asked

BEHIND = 3  # tokens behind the last one with loss, which the learner does not compute


def annotations_of(one: Trajectory) -> TokenAnnotations:
    """Of the first tokens of `one`, where it was sampled: log-ratio -0.5, 0, 0.5, -0.5, ..."""
    mask = one.loss_mask[:-BEHIND]
    values = np.full((len(VALUES), len(mask)), np.nan, dtype=np.float16)
    values[:, mask] = np.stack(
        [(np.arange(mask.sum()) % 3 - 1) / 2, *(np.full(mask.sum(), x) for x in (0.25, 1.5, 0.75))]
    )
    return TokenAnnotations(one.id, values, np.where(mask, TRAINED | CLIPPED, 0).astype(np.uint8))


async def test_tokens_have_what_was_recorded_and_nothing_where_there_was_no_loss(tmp_path: Path) -> None:
    run = DashboardRun(tmp_path / "run")
    made = run.record(3)
    run.close()
    noted = [one for one in made if one.group_id == 0 and one.member < 2]  # trained into version 1
    with AnnotationWriter(run.folder, "learner-0", 1 << 20) as writer:
        writer.record(1, [annotations_of(one) for one in noted])
        writer.record(2, [annotations_of(one) for one in made if one.group_id == 0])  # as before a rollback
    async with DashServer(RunFolder(run.folder, IDLE), "127.0.0.1", 0, "") as server, aiohttp.ClientSession() as client:
        asked = Asked(server, client)
        for one in made:
            path = f"/api/runs/run/trajectories/{one.id}"
            shown, window = await asked(path, bins=50), await asked(f"{path}/tokens", start=0, end=len(one))
            assert shown["annotated"] == (one in noted)
            if one not in noted:
                assert window["annotations"] is None
                assert "log_ratio" not in shown["strip"]
                continue
            expected, found = annotations_of(one), window["annotations"]
            for name, values in zip(VALUES, expected.values.tolist(), strict=True):
                padded = [*values, *[float("nan")] * BEHIND]
                assert found[name] == pytest.approx([None if x != x else x for x in padded], abs=1e-3)
            assert found["clipped"] == [bool(flag) for flag in expected.flags.tolist()] + [False] * BEHIND
            assert not any(found["dropped"])
            part = await asked(f"{path}/tokens", start=5, end=len(one) - 1)
            assert part["annotations"]["log_ratio"] == found["log_ratio"][5:-1]
            edges, strip = shown["strip"]["edges"], shown["strip"]
            for column, (start, end) in enumerate(itertools.pairwise(edges)):
                ratios = [x for x in found["log_ratio"][start:end] if x is not None]
                assert strip["log_ratio"][column] == (max(ratios, key=lambda x: (abs(x), x)) if ratios else None)
                assert strip["entropy"][column] == (0.25 if ratios else None)
                assert strip["advantage"][column] == (1.5 if ratios else None)


def test_ratios_are_counted_by_staleness_and_by_replica(tmp_path: Path) -> None:
    run = DashboardRun(tmp_path / "run")
    store = StoreReader(run.folder, lambda: True)
    assert ratios(run.folder, store).steps == 0
    made = run.record(6)
    run.close()
    with AnnotationWriter(run.folder, "learner-0", 1 << 20) as writer:
        for version in (4, 5):
            writer.record(version, [annotations_of(one) for one in made if one.group_id == version - 1])
        writer.record(3, [annotations_of(one) for one in made if one.group_id == 0])  # as before a rollback
    found = ratios(run.folder, store)
    assert (found.steps, len(found.edges)) == (3, 10)
    wanted: dict[int, Counter[float]] = defaultdict(Counter)
    fresh = 0
    for one in made:
        if one.group_id in (3, 4):
            for span in one.version_spans:
                values = annotations_of(one).values[0, span.start : span.end].tolist()
                wanted[one.group_id - span.version].update(value for value in values if value == value)
                fresh += sum(value == value for value in values) * (span.version == one.group_id)
    assert set(found.counts) == set(wanted) == {0, 1, 2}
    for age, counts in found.counts.items():
        assert sum(counts) == wanted[age].total()
        assert (counts[1], counts[5], counts[9]) == (wanted[age][-0.5], wanted[age][0.0], wanted[age][0.5])
    assert found.far == {0: 0.5, 1: 0.5, 2: 0.5}
    assert found.replicas == {"engine-0": ReplicaMismatch(fresh, 0.5)}


async def test_a_damaged_file_of_annotations_is_named(tmp_path: Path) -> None:
    run = DashboardRun(tmp_path / "run")
    run.record(2)
    run.close()
    (run.folder / "annotations").mkdir()
    (run.folder / "annotations" / "learner-0.1").write_bytes(b"nonsense")
    async with DashServer(RunFolder(run.folder, IDLE), "127.0.0.1", 0, "") as server, aiohttp.ClientSession() as client:
        status, error = await Asked(server, client).refused("/api/runs/run/trajectories/0.0.0.0")
    assert (status, "learner-0.1 is damaged" in error) == (409, True)
