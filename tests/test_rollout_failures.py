"""What failing episodes leave in the log, in the view and in the worker's fate."""

from __future__ import annotations

import json
import logging

import pytest
from slipstream.buffer.trajectory import FINISHED, Outcome
from slipstream.common.outcomes import failed_share, failures_text
from slipstream.errors import EnvError, EpisodesFail, describe_user_error, user_line
from slipstream.rollout.failures import END_SHARE, EPISODES, FailureLog, FailureWindow, too_many_failed

TOOL, ENVIRONMENT, ENGINE = (Outcome("failed", reason, "it broke") for reason in ("tool", "environment", "engine"))


def raised(key: str, *, elsewhere: bool = False) -> EnvError:
    try:
        try:
            if elsewhere:
                raise KeyError(key)
            raise KeyError(key)
        except KeyError as error:
            raise EnvError(f"step: {describe_user_error(error)}") from error
    except EnvError as error:
        return error


def failure(error: EnvError) -> Outcome:
    return Outcome("failed", "environment", str(error))


def test_each_distinct_failure_has_one_traceback_however_its_message_varies(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []
    failures = FailureLog(told.append)
    with caplog.at_level(logging.WARNING):
        for number in range(100):
            failures.record(f"{number}.0.0", failure(raised(f"key {number}")), raised(f"key {number}"))
        failures.record("200.0.0", failure(raised("x", elsewhere=True)), raised("x", elsewhere=True))
    traces = [record for record in caplog.records if record.exc_info]
    assert len(traces) == 2
    assert len(caplog.records) == 2 + 6  # at 2, 4, 8, 16, 32 and 64
    assert len(told) == 2
    assert "step: KeyError: 'key 0' (test_rollout_failures.py:" in told[0]
    assert "Traceback" in caplog.text
    assert "raise KeyError(key)" in caplog.text


def test_the_view_is_told_of_the_first_few_kinds_only() -> None:
    told: list[str] = []
    failures = FailureLog(told.append)
    for reason in ("tool", "policy", "timeout", "engine", "environment"):
        failures.record("0.0.0", Outcome("failed", reason, "why"), None)
    assert told == [f"an episode failed by {reason}: why" for reason in ("tool", "policy", "timeout")]


def test_the_users_line_is_named_behind_a_librarys_frames() -> None:
    with pytest.raises(ValueError, match="Expecting") as caught:
        json.loads("{")
    assert user_line(caught.value).startswith("test_rollout_failures.py:")
    assert user_line(caught.value).endswith("in test_the_users_line_is_named_behind_a_librarys_frames")


def play(window: FailureWindow, *outcomes: Outcome) -> None:
    for outcome in outcomes:
        window.add(outcome, useful=outcome.trainable, slots=8)


def test_a_share_of_failures_is_told_once_and_a_larger_one_ends_the_worker() -> None:
    told: list[str] = []
    window = FailureWindow(told.append)
    play(window, *[FINISHED] * (EPISODES - 7), *[ENVIRONMENT] * 4, *[TOOL] * 3)
    assert told == [
        "7 of the last 64 episodes failed (4 environment, 3 tool); this process's log has a traceback of each kind"
    ]
    play(window, ENVIRONMENT, ENVIRONMENT)
    assert len(told) == 1
    three_of_four = [ENVIRONMENT, FINISHED, ENVIRONMENT, ENVIRONMENT] * EPISODES
    with pytest.raises(EpisodesFail, match=r"4\d of the last 64 episodes failed .*, the last by environment: it broke"):
        play(window, *three_of_four)


def test_engines_that_are_away_end_the_worker_only_when_nothing_else_happens() -> None:
    window = FailureWindow()
    for _ in range(EPISODES):
        play(window, ENGINE, ENGINE, ENGINE, ENGINE, FINISHED)
    with pytest.raises(EpisodesFail, match="64 episodes in a row failed, the last by engine: it broke"):
        play(window, *[ENGINE] * EPISODES)


def test_a_warning_is_repeated_after_it_was_better_for_a_while() -> None:
    told: list[str] = []
    window = FailureWindow(told.append)
    for _ in range(3):
        play(window, *[FINISHED] * EPISODES, *[TOOL] * 8)
    assert len(told) == 3


def test_counts_as_text() -> None:
    counts = {"finished": 15, "failed_environment": 40, "failed_tool": 9}
    assert failures_text(counts) == "49 of 64 episodes failed (40 environment, 9 tool)"
    assert failures_text({"finished": 3, "failed_tool": 0}) == ""
    assert failed_share(counts) == 49 / 64
    assert failed_share({}) == 0
    assert too_many_failed(counts)
    assert not too_many_failed({"finished": 15, "failed_engine": 49})
    assert END_SHARE > 0.5
