"""Every test is in a tier, every kind of engine in both, and the commands run them."""

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from slipstream.tests import tiers
from slipstream.tests.conformance.kinds import KINDS

ROOT = Path(__file__).parents[1]


class Collected(NamedTuple):
    tier: str
    id: str
    name: str

    @property
    def function(self) -> str:
        return self.id.partition("[")[0]

    @property
    def kind(self) -> str:
        return self.name.rpartition("]@")[2] if "]@" in self.name else ""


@pytest.fixture(scope="module")
def collected(pytestconfig: pytest.Config) -> list[Collected]:
    """Every test of the repository: as this session has collected them, or, where it has not all of them, another one."""
    lines = pytestconfig.stash.get(tiers.ALL, None)
    if lines is None:
        flags = ["--collect-only", "-qq", "-p", "no:cacheprovider", "-p", "slipstream.tests.tiers"]
        command = [sys.executable, "-m", "pytest", *flags]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
        assert done.returncode == 0, done.stdout[-2000:]
        lines = [line for line in done.stdout.splitlines() if line.startswith(("full\t", "default\t"))]
    found = [line.split("\t") for line in lines]
    assert len(found) > 2900
    return [Collected(*words) for words in found]


def test_every_test_file_is_collected(collected: list[Collected]) -> None:
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    assert files == {test.id.partition("::")[0] for test in collected}


def test_every_cell_of_the_conformance_matrix_is_in_a_tier(collected: list[Collected]) -> None:
    cells = {(test.function, test.kind) for test in collected if test.kind}
    assert len(cells) >= 30 * len(KINDS)
    assert cells == {(function, kind.name) for function, _ in cells for kind in KINDS}


def test_every_kind_of_engine_and_every_conformance_test_is_in_the_default_tier(collected: list[Collected]) -> None:
    cells = [test for test in collected if test.kind]
    default = [test for test in cells if test.tier == "default"]
    assert {test.function for test in cells} == {test.function for test in default}
    assert all(sum(test.kind == kind.name for test in default) >= 10 for kind in KINDS)


def test_every_rule_finds_tests(collected: list[Collected]) -> None:
    idle = [rule for rule in (*tiers.FULL, *tiers.KEPT) if not any(re.match(rule, test.name) for test in collected)]
    assert idle == [], "tests/tiers.py: rules that match no test any more"


def test_the_commands_leave_out_no_other_test() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert re.findall(r"\$\(PYTEST\)(.*)", makefile) == [' -m "not full"', ""]
    assert "test-full" in (ROOT / ".ci" / "run").read_text()
    options = (ROOT / "pyproject.toml").read_text()
    assert not re.search(r'addopts = ".*(-m|-k|--ignore|--deselect)\b', options)
