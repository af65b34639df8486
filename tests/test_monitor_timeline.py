"""Spans and gauges on a real disk: they come back, their bytes are bounded, and what cannot be written is counted."""

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from slipstream.common import spans
from slipstream.common.spans import SET_S, Span, time_of_day, timed
from slipstream.monitor import follow, timeline
from slipstream.monitor.follow import LineFollower
from slipstream.monitor.timeline import (
    SERIES,
    SPANS,
    FolderFollower,
    TimelineWriter,
    _BoundedFile,
    read_series,
    read_spans,
)


def span(number: int, text: str = "") -> Span:
    return Span(
        1.8e9 + number, 1.8e9 + number + 0.5, "turn", {"episode": f"{number}.0.0", "tokens": number, "text": text}
    )


def test_what_was_recorded_comes_back_in_order(tmp_path: Path) -> None:
    sent = [span(number) for number in range(100)]
    with TimelineWriter(tmp_path, "worker-3", lambda: {"playing": 7, "replicas": {"engine-0": {"kv": 0.5}}}) as writer:
        for one in sent:
            writer.record(one)
    assert list(read_spans(tmp_path)) == [("worker-3", one) for one in sent]
    (role, line) = list(read_series(tmp_path))[-1]
    assert role == "worker-3"
    assert (line["playing"], line["replicas"], line["dropped"]) == (7, {"engine-0": {"kv": 0.5}}, 0)
    assert abs(line["t"] - time.time()) < 60
    assert line["rss"] > 1 << 20
    assert line["cpu_s"] > 0


def test_without_a_folder_nothing_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with TimelineWriter(None, "worker-0") as writer:
        writer.record(span(0))
    assert list(tmp_path.iterdir()) == []
    assert writer.dropped == 0


def test_there_is_a_line_each_second(tmp_path: Path) -> None:
    written = threading.Event()
    calls: list[float] = []

    def gauges() -> dict[str, int]:
        calls.append(time.time())
        if len(calls) == 3:
            written.set()
        return {"n": len(calls)}

    with TimelineWriter(tmp_path, "buffer", gauges):
        assert written.wait(30)
    lines = [line for _, line in read_series(tmp_path)]
    assert [line["n"] for line in lines] == list(range(1, len(lines) + 1))
    first, second, third = (line["t"] for line in lines[:3])
    assert int(first + 0.01) < int(second + 0.01) < int(third + 0.01)  # each in a second of its own
    assert min(second - first, third - second) < 1.9  # one of them may be late


def test_a_block_is_recorded_however_it_ends() -> None:
    recorded: list[Span] = []
    with pytest.raises(KeyError), timed(recorded.append, "swap", replica="engine-0", version=3):
        raise KeyError("no")
    (one,) = recorded
    assert (one.what, one.ids) == ("swap", {"replica": "engine-0", "version": 3})
    assert one.t0 <= one.t1


@pytest.mark.parametrize("step_s", [-0.03, 0.03])
def test_what_is_within_something_is_within_it_in_the_record_though_the_clock_is_set(
    step_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host's clock is set by milliseconds now and then, by more when it begins or was suspended."""
    found, ahead, shown = list[Span](), [0.0], time.time
    monkeypatch.setattr(spans.time, "time", lambda: shown() + ahead[0])
    with timed(found.append, "episode"):
        ahead[0] = step_s
        with timed(found.append, "step"):
            time.sleep(0.01)
    inner, outer = found
    assert outer.t0 <= inner.t0 < inner.t1 <= outer.t1
    ahead[0] = 100 * SET_S
    assert abs(time_of_day() - shown() - ahead[0]) < SET_S
    ahead[0] = 0.0
    assert abs(time_of_day() - shown()) < SET_S


def test_what_is_within_something_is_within_it_also_where_the_process_stands_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another process has the core between any two looks at the clock."""
    found, looks = list[Span](), iter((0.0, 0.010, 0.011, 0.011, 0.012, 0.0125, 0.013))
    monkeypatch.setattr(spans, "time", SimpleNamespace(time=time.time, perf_counter=lambda: next(looks)))
    with timed(found.append, "episode"), timed(found.append, "step"):
        pass
    inner, outer = found
    assert outer.t0 <= inner.t0 <= inner.t1 <= outer.t1


def test_a_full_queue_drops_and_counts_and_blocks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "QUEUE", 10)
    writer = TimelineWriter(tmp_path, "worker-0")  # its thread has not begun
    for number in range(25):
        writer.record(span(number))
    with writer:
        pass
    assert [one.ids["tokens"] for _, one in read_spans(tmp_path)] == list(range(10))
    assert [line["dropped"] for _, line in read_series(tmp_path)][-1] == 15


def test_the_oldest_lines_go_when_the_bytes_are_used_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "SPANS_BYTES", 8000)
    for begin in range(0, 300, 5):
        file = TimelineWriter(tmp_path, "worker-0")
        with file:
            for number in range(begin, begin + 5):
                file.record(span(number, "x" * 100))
    found = [one.ids["tokens"] for _, one in read_spans(tmp_path)]
    assert found == list(range(found[0], 300))
    assert 10 <= len(found) < 60
    assert sum(path.stat().st_size for path in (tmp_path / SPANS).iterdir()) <= 8000


def test_a_line_torn_by_a_kill_is_left_out(tmp_path: Path) -> None:
    with TimelineWriter(tmp_path, "worker-0") as writer:
        writer.record(span(1))
    for folder in (SPANS, SERIES):
        (path,) = (tmp_path / folder).iterdir()
        path.write_bytes(path.read_bytes() + b'{"t0":1.8')
    assert [one for _, one in read_spans(tmp_path)] == [span(1)]
    assert all("rss" in line for _, line in read_series(tmp_path))


def test_a_disk_that_refuses_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / SPANS).write_text("a file where the folder should be")
    with TimelineWriter(tmp_path, "worker-0") as writer:
        for number in range(3):
            writer.record(span(number))
    assert writer.dropped == 3
    assert "not recorded" in caplog.text
    assert list(read_series(tmp_path))


def test_a_gauge_that_raises_is_said_in_its_line(tmp_path: Path) -> None:
    def gauges() -> dict[str, int]:
        raise RuntimeError("dictionary changed size during iteration")

    with TimelineWriter(tmp_path, f"learner-{os.getpid()}", gauges):
        pass
    (_, line) = list(read_series(tmp_path))[-1]
    assert "changed size" in line["error"]
    assert line["rss"] > 0


def test_a_run_that_recorded_nothing_has_nothing(tmp_path: Path) -> None:
    assert list(read_spans(tmp_path)) == list(read_series(tmp_path)) == []


def test_a_follower_misses_nothing_where_a_file_is_full(tmp_path: Path) -> None:
    follower, log, seen = FolderFollower(tmp_path), _BoundedFile(tmp_path / "worker-0.7.jsonl", 400), list[bytes]()
    for number in range(200):
        log.append([b'{"n": %d}' % number])
        if number % 9 == 0:  # a file takes some twenty lines
            seen += [line for _, _, line in follower.lines()]
    log.close()
    seen += [line for _, _, line in follower.lines()]
    assert seen == [b'{"n": %d}' % number for number in range(200)]
    newest = [line for _, _, line in FolderFollower(tmp_path).lines()]
    assert newest == seen[-len(newest) :]
    assert 20 < len(newest) < 60


def test_processes_of_a_role_are_read_in_the_order_in_which_they_wrote(tmp_path: Path) -> None:
    for at, pid in enumerate((9998, 10012, 77)):  # numbers of processes begin again
        path = tmp_path / f"worker-0.{pid}.jsonl"
        path.write_text("{}\n")
        os.utime(path, (1e9 + at, 1e9 + at))
    assert [pid for _, pid, _ in FolderFollower(tmp_path).lines()] == ["9998", "10012", "77"]


@pytest.mark.parametrize("key", ["t", "t0"])
def test_processes_of_a_copied_run_are_read_in_the_order_in_which_they_began(tmp_path: Path, key: str) -> None:
    """A copy does not keep the times of the files."""
    for at, (pid, ending) in enumerate(
        (("9998", ".jsonl"), ("10012", ".old.jsonl"), ("10012", ".jsonl"), ("77", ".jsonl"))
    ):
        path = tmp_path / f"worker-0.{pid}{ending}"
        path.write_text("".join(f'{{"{key}": {100.0 * at + n}}}\n' for n in range(3)))
        os.utime(path, (1e9 - at, 1e9 - at))
    found = list(FolderFollower(tmp_path).lines())
    assert list(dict.fromkeys(pid for _, pid, _ in found)) == ["9998", "10012", "77"]
    assert len(found) == 12
    assert [line for *_, line in found] == sorted(
        (line for *_, line in found), key=lambda line: float(line[:-1].split()[1])
    )


def test_a_line_that_is_too_long_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "READ_AT_ONCE", 8)
    path = tmp_path / "lines"
    follower = LineFollower(path)
    path.write_bytes(b"a\n" + b"b" * 50)
    assert list(follower.lines()) == [b"a"]
    with path.open("ab") as file:
        file.write(b"b\nc\nd\n")
    assert list(follower.lines()) == [b"c", b"d"]
    with path.open("ab") as file:
        file.write(b"e")
    assert list(follower.lines()) == []
    with path.open("ab") as file:
        file.write(b"\n")
    assert list(follower.lines()) == [b"e"]
