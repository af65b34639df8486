"""Annotations on a real disk: they come back, their bytes are bounded, and what cannot be written is counted."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from slipstream.common.annotations import TOKEN_BYTES, VALUES, TokenAnnotations
from slipstream.errors import StoreError
from slipstream.monitor import annotations
from slipstream.monitor.annotations import ANNOTATIONS, STEPS_WAITING, AnnotationWriter, read_annotations


def row(id: str, tokens: int = 40) -> TokenAnnotations:
    rng = np.random.default_rng(sum(id.encode()))
    return TokenAnnotations(
        id, rng.normal(size=(len(VALUES), tokens)).astype(np.float16), rng.integers(0, 8, tokens).astype(np.uint8)
    )


def same(found: TokenAnnotations | None, one: TokenAnnotations) -> bool:
    return (
        found is not None
        and found.id == one.id
        and np.array_equal(found.values, one.values)
        and np.array_equal(found.flags, one.flags)
    )


def test_what_was_recorded_is_found_by_version_and_trajectory(tmp_path: Path) -> None:
    steps = {version: [row(f"{version}.0.{member}.0", 10 + member) for member in range(4)] for version in (3, 21)}
    with (
        AnnotationWriter(tmp_path, "learner-0", 1 << 20) as first,
        AnnotationWriter(tmp_path, "learner-1", 1) as second,
    ):
        for version, rows in steps.items():
            first.record(version, rows[:2])
            second.record(version, rows[2:])
    assert first.dropped == second.dropped == 0
    assert all(same(read_annotations(tmp_path, 21, one.id), one) for one in steps[21])
    assert all(same(read_annotations(tmp_path, 3, one.id), one) for one in steps[3][:2])
    assert read_annotations(tmp_path, 3, "21.0.0.0") is None
    assert read_annotations(tmp_path, 1, "21.0.0.0") is None  # not the file of 21
    assert read_annotations(tmp_path / "elsewhere", 3, "3.0.0.0") is None
    assert read_annotations(tmp_path, 3, steps[3][2].id) is None  # one file is kept, however large


def test_the_oldest_steps_go_first_also_those_of_a_process_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(annotations, "STEPS_WAITING", 10)
    size = 40 * TOKEN_BYTES + 100  # of one step, and a little more
    for first in (1, 11):
        with AnnotationWriter(tmp_path, "learner-0", 3 * size) as writer:
            for version in range(first, first + 10):
                writer.record(version, [row(f"{version}.0.0.0")])
    names = sorted((path.name for path in (tmp_path / ANNOTATIONS).iterdir()), key=lambda name: int(name[10:]))
    assert names == ["learner-0.18", "learner-0.19", "learner-0.20"]


def test_a_disk_that_hangs_or_refuses_delays_nothing_and_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writes, entered = threading.Event(), threading.Event()
    write_atomic = annotations.write_atomic

    def slow(path: Path, data: bytes) -> None:
        entered.set()
        assert writes.wait(30)
        write_atomic(path, data)

    monkeypatch.setattr(annotations, "write_atomic", slow)
    with AnnotationWriter(tmp_path, "learner-0", 1 << 20) as writer:
        writer.record(0, [row("0.0.0.0")])
        assert entered.wait(30)  # the thread is at the disk, the queue is empty
        for version in range(1, STEPS_WAITING + 3):
            writer.record(version, [row(f"{version}.0.0.0"), row(f"{version}.0.1.0")])
        assert writer.dropped == 2 * 2
        writes.set()
    assert len(list((tmp_path / ANNOTATIONS).iterdir())) == 1 + STEPS_WAITING
    (tmp_path / "full").write_text("a file where the folder should be")
    with AnnotationWriter(tmp_path / "full", "learner-0", 1 << 20) as refused:
        for version in range(3):
            refused.record(version, [row("1.0.0.0")])
    assert refused.dropped == 3
    assert len(caplog.records) == 1


def test_without_a_folder_and_for_steps_without_rows_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with AnnotationWriter(None, "learner-0", 1) as nowhere, AnnotationWriter(tmp_path, "learner-0", 1) as writer:
        nowhere.record(1, [row("1.0.0.0")])
        writer.record(1, [])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", [b"", b"\x02rest", b"\x01\xff\xff\xff\x7f", b"cut"])
def test_a_damaged_file_is_named(tmp_path: Path, damage: bytes) -> None:
    with AnnotationWriter(tmp_path, "learner-0", 1 << 20) as writer:
        writer.record(3, [row("3.0.0.0")])
    path = tmp_path / ANNOTATIONS / "learner-0.3"
    path.write_bytes(path.read_bytes()[:-10] if damage == b"cut" else damage)
    with pytest.raises(StoreError, match=r"learner-0\.3 is damaged"):
        read_annotations(tmp_path, 3, "3.0.0.0")
