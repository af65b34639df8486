"""The bytes beside the store's file, alone; with rows they are in `test_buffer_store`, `_damage` and `_crashes`."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
from slipstream.buffer.segments import BUFFERS_AT_ONCE, SegmentLog
from slipstream.tests.stores import in_child


def records(count: int, size: int) -> list[bytes]:
    return [os.urandom(2 * size) for _ in range(count)]


def test_what_was_appended_is_read_back_also_after_a_restart(tmp_path: Path) -> None:
    first, second = records(BUFFERS_AT_ONCE, 7), records(3, 1000)  # the first in two writes
    arrays = SegmentLog(tmp_path / "a", 0)
    places = arrays.append(first)
    assert places == [14 * n for n in range(BUFFERS_AT_ONCE)]
    arrays.close()
    arrays = SegmentLog(tmp_path / "a", 14 * BUFFERS_AT_ONCE)
    places += arrays.append(second)
    assert len(list((tmp_path / "a").iterdir())) == 1
    assert arrays.size == 14 * BUFFERS_AT_ONCE + 6000
    for place, record in zip(places, [*first, *second], strict=True):
        assert arrays.read(place, len(record)) == record
    assert arrays.read(places[-1], 3000) == second[-1]  # there is no more
    arrays.close()


def test_segments_that_nobody_names_go_and_no_place_is_taken_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.buffer.segments.SEGMENT_BYTES", 100)
    arrays = SegmentLog(tmp_path / "a", 0)
    places = [arrays.append(records(1, 30))[0] for _ in range(6)]
    assert places == [0, 60, 120, 180, 240, 300]
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [f"{start:016x}" for start in (0, 120, 240)]
    arrays.delete_unnamed(lambda start, end: (start, end) == (0, 120))
    assert [len(arrays.read(place, 60)) for place in places] == [60, 60, 0, 0, 0, 0]
    assert arrays.append(records(1, 30)) == [360]
    arrays.delete_unnamed(lambda start, end: False)
    assert arrays.size == 0
    assert arrays.append(records(1, 30)) == [420]
    arrays.close()
    for named in (420, 480, 1000):  # what rows name, or more than is there: nothing is written over
        arrays = SegmentLog(tmp_path / "a", named)
        assert arrays.append(records(1, 30))[0] >= max(480, named)
        assert len(arrays.read(420, 60)) == 60
        arrays.close()


def test_what_a_full_disk_took_half_of_is_written_again_at_the_same_place(tmp_path: Path) -> None:
    def work() -> object:
        arrays = SegmentLog(tmp_path / "a", 0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        arrays.append(records(1, 30))
        with pytest.raises(OSError, match="File too large"):
            arrays.append(records(4, 30))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        sent = records(1, 30)
        assert arrays.append(sent) == [60]
        assert arrays.read(60, 60) == sent[0]
        return "done"

    assert in_child(work) == "done"
