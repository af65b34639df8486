"""The table of offers is the one that the manual prints, and leaves out no kind."""

from pathlib import Path

from slipstream.configs.fields import root, variants
from slipstream.tests.conformance.kinds import KINDS, table

MANUAL = (Path(__file__).parents[2] / "docs" / "rollout.md").read_text()


def test_the_manual_prints_what_the_suite_tests() -> None:
    assert table() in MANUAL, "docs/rollout.md: replace its table by what `kinds.table()` returns"


def test_every_kind_of_engine_is_in_the_suite_and_in_the_manual() -> None:
    rollout = next(f.type for f in root().fields if f.name == "rollout")
    engine = next(f.type for f in variants(rollout)[0].fields if f.name == "engine")
    kinds = {str(section.tag) for section in variants(engine)}
    assert kinds == {kind.name for kind in KINDS}
    assert all(f"| `{kind}` |" in MANUAL for kind in kinds)
