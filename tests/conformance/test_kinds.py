"""The table of offers is the one that the manual prints."""

from pathlib import Path

from slipstream.tests.conformance.kinds import table

MANUAL = Path(__file__).parents[2] / "docs" / "rollout.md"


def test_the_manual_prints_what_the_suite_tests() -> None:
    assert table() in MANUAL.read_text(), "docs/rollout.md: replace its table by what `kinds.table()` returns"
