"""From the rows of steps to the numbers that are shown."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from slipstream.errors import StoreError
from slipstream.monitor.series import by_staleness, elapsed, read_evaluations, smooth


def test_a_smoothed_curve_starts_and_ends_where_the_run_did() -> None:
    values = np.arange(200.0)
    assert np.allclose(smooth(values), values)
    assert smooth(np.array([1.0, np.nan, 3.0]))[1] == 2.0
    assert len(smooth(np.zeros(0))) == 0


def test_time_between_two_processes_counts() -> None:
    rows = [{"time": 10.0, "wait_s": 1.0, "step_s": 2.0, "push_s": None}, {"time": 14.0}, {"time": 114.0}]
    assert elapsed(rows).tolist() == [3.0, 7.0, 107.0]


def test_what_age_does_is_a_mean_over_the_tokens_of_each_age() -> None:
    rows = [
        {
            "staleness_tokens": {"0": 10, "2": 30},
            "kl_by_staleness": {"0": 0.0, "2": 0.5},
            "weight_by_staleness": {"2": 0.5},
        },
        {
            "staleness_tokens": {"0": 10, "2": 10},
            "kl_by_staleness": {"0": 1.0, "2": 0.1},
            "weight_by_staleness": {"2": 1.0},
        },
        {"staleness_tokens": {"0": 10}, "kl_by_staleness": {"0": None}},
        {},
    ]
    assert by_staleness(rows, "kl") == {0: 0.5, 2: pytest.approx(0.4)}
    assert by_staleness(rows, "weight") == {2: pytest.approx((0.5 * 40 + 1.0 * 20) / 40)}


def test_evaluations_that_are_not_valid_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "evaluations.json").write_text('[{"label": "x"}]')
    with pytest.raises(StoreError, match=r"evaluations\.json"):
        read_evaluations(tmp_path / "evaluations.json")
