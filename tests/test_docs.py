"""What the manual says of the program is what the program says of itself."""

from pathlib import Path

from slipstream.configs.fields import root, variants
from slipstream.tests.conformance.kinds import KINDS, table

ROLLOUT = (Path(__file__).parent.parent / "docs" / "rollout.md").read_text()


def test_the_manual_prints_the_table_that_the_conformance_suite_skips_by() -> None:
    assert table().strip() in ROLLOUT


def test_every_kind_of_engine_is_in_the_suite_and_in_the_manual() -> None:
    rollout = next(f.type for f in root().fields if f.name == "rollout")
    engine = next(f.type for f in variants(rollout)[0].fields if f.name == "engine")
    kinds = {str(section.tag) for section in variants(engine)}
    assert kinds == {kind.name for kind in KINDS}
    assert all(f"| `{kind}` |" in ROLLOUT for kind in kinds)
