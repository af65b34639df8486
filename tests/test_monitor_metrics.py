"""Rows survive what happens to files: crashes in the middle of a line, recoveries that repeat steps, numbers that are none."""

import logging

import pytest
from slipstream.errors import StoreError
from slipstream.monitor.metrics import MetricsWriter, read_metrics, scalars


def test_rows_come_back_as_written(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    rows = [{"step": step, "reward_mean": step / 7, "staleness_tokens": {"0": step, "1": 2}} for step in (1, 2, 3)]
    with MetricsWriter(path) as writer:
        for row in rows:
            writer.append(row)
            assert read_metrics(path)[-1] == row  # flushed at once
    assert read_metrics(path) == rows


def test_a_torn_last_line_is_left_out_and_said(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1}\n{"step":2,"rew')
    with caplog.at_level(logging.WARNING):
        assert read_metrics(path) == [{"step": 1}]
    assert "torn" in caplog.text


def test_a_writer_continues_behind_a_torn_line(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1}\n{"step":2,"rew')
    with caplog.at_level(logging.WARNING), MetricsWriter(path) as writer:
        writer.append({"step": 2, "a": 1})
    assert "torn" in caplog.text
    assert path.read_bytes() == b'{"step":1}\n{"step":2,"a":1}\n'


def test_of_a_repeated_step_the_later_row_counts(tmp_path):
    with MetricsWriter(tmp_path / "m.jsonl") as writer:
        for step, value in ((1, 0), (2, 0), (3, 0), (2, 1)):
            writer.append({"step": step, "value": value})
    assert [(row["step"], row["value"]) for row in read_metrics(tmp_path / "m.jsonl")] == [(1, 0), (2, 1), (3, 0)]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_becomes_null_and_is_said(number, tmp_path, caplog):
    with caplog.at_level(logging.WARNING), MetricsWriter(tmp_path / "m.jsonl") as writer:
        writer.append({"step": 4, "loss": number})
    assert (tmp_path / "m.jsonl").read_bytes() == b'{"step":4,"loss":null}\n'
    assert "step 4" in caplog.text
    assert "loss" in caplog.text


def test_no_file_is_no_rows(tmp_path):
    assert read_metrics(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize("line", [b"not json", b"[1]", b'{"loss":1}', b'{"step":null}', b""])
def test_a_whole_line_that_is_no_row_is_refused_by_number(line, tmp_path):
    (tmp_path / "m.jsonl").write_bytes(b'{"step":1}\n' + line + b"\n")
    with pytest.raises(StoreError, match="line 2"):
        read_metrics(tmp_path / "m.jsonl")


def test_a_place_that_cannot_be_written_is_refused_by_name(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="metrics cannot be written"):
        MetricsWriter(tmp_path / "file" / "m.jsonl")


def test_scalars_are_flat_finite_numbers():
    row = {"step": 2, "loss": None, "kl": float("nan"), "note": "x", "staleness_tokens": {"0": 5}}
    assert scalars(row) == {"step": 2.0, "staleness_tokens/0": 5.0}
