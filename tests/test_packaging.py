"""The package installs: its package list equals the folders, and a wheel of it trains from an unrelated directory."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from slipstream.tests import forkserver
from slipstream.tests.runs import SMALL, WAIT_S
from slipstream.tests.whole_run import TEN_STEPS, check_run

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NOT_INSTALLED = {"tests", "docs", "requirements", "examples"}
DATA = {".yaml", ".typed", ".css", ".html", ".js"}


def tracked() -> list[Path]:
    """Files of the repository, as git knows them."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [Path(line) for line in listed.stdout.splitlines() if (ROOT / line).exists()]


def installed_files() -> list[Path]:
    """Tracked files that belong to the package."""
    return [p for p in tracked() if p.parts[0] not in NOT_INSTALLED and not p.parts[0].startswith(".")]


def test_the_package_list_equals_the_folders():
    folders = {p.parent for p in installed_files() if p.suffix == ".py" and "shim" not in p.parts}
    expected = {".".join(("slipstream", *folder.parts)) for folder in folders}
    listed = PROJECT["tool"]["setuptools"]["packages"]
    assert listed == sorted(expected)
    assert all((ROOT / folder / "__init__.py").exists() for folder in folders)


LISTS = sorted(path for path in (ROOT / "requirements").glob("env-*.txt") if path.stem != "env-host")


@pytest.mark.parametrize("wanted", LISTS, ids=lambda path: path.stem)
def test_an_environment_of_a_library_is_pinned_and_tested(wanted: Path) -> None:
    lines = [*wanted.read_text().splitlines(), *wanted.with_name("env-host.txt").read_text().splitlines()]
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    lines = wanted.with_suffix(".lock").read_text().splitlines()
    pinned = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    for requirement in requirements:
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)])
    (libraries,) = re.findall(r"^LIBRARIES = .*,(.*)\)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert wanted.stem.removeprefix("env-") in libraries.split()


def test_the_type_checker_sees_every_folder():
    rooms = {p.parts[0] for p in installed_files() if p.suffix == ".py"} - {"__init__.py"}
    assert rooms <= set(PROJECT["tool"]["basedpyright"]["include"])


def test_the_package_data_covers_every_file_that_is_not_a_module():
    data = PROJECT["tool"]["setuptools"]["package-data"]
    covered = set()
    for path in installed_files():
        for package, patterns in data.items():
            folder = Path(*package.split(".")[1:])
            if path.is_relative_to(folder) and any(fnmatch(str(path.relative_to(folder)), p) for p in patterns):
                covered.add(path)
    wanted = {p for p in installed_files() if p.suffix in DATA or "shim" in p.parts}
    assert wanted <= covered


def test_the_project_has_a_license_a_history_a_guide_types_and_authors():
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert PROJECT["project"]["license"] == "Apache-2.0"
    assert PROJECT["project"]["authors"]
    assert {"CHANGELOG.md", "CONTRIBUTING.md", "py.typed"} <= {path.name for path in ROOT.iterdir()}
    assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"]["slipstream"]


def test_no_message_names_a_distribution_that_is_not_registered():
    name = PROJECT["project"]["name"]
    for path in installed_files():
        if path.suffix in {".py", ".yaml", ".md"}:
            assert not re.search(rf"{name}\b", (ROOT / path).read_text()), path


def test_pre_commit_runs_what_lint_runs():
    import yaml

    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    makefile = (ROOT / "Makefile").read_text()
    found = [re.search(rf"^{rule}:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE) for rule in ("style", "lint")]
    assert [hook["entry"] for hook in hooks] == [
        line.strip() for rule in found if rule for line in rule[1].splitlines()
    ]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the tracked files: the build leaves nothing in the checkout."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for path in tracked():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, source / path)
    build = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "-q", "-w", str(out)]
    done = subprocess.run(build, cwd=source, capture_output=True, text=True, env=clean_environment())
    assert done.returncode == 0, done.stderr[-3000:]
    (built,) = out.glob("*.whl")
    return built


def clean_environment() -> dict[str, str]:
    """This process's environment without what would make a checkout importable."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("PYTHONPATH", "SLIPSTREAM_", "VIRTUAL_ENV"))}


def test_the_wheel_holds_every_file_of_the_package(wheel: Path):
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {f"slipstream/{p}" for p in installed_files() if p.suffix in {".py", *DATA}}
    assert wanted <= names
    assert not any(name.startswith(("slipstream/tests/", "slipstream/docs/")) for name in names)
    assert any(name.endswith("LICENSE") for name in names)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_an_installed_wheel_trains_from_an_unrelated_directory(wheel: Path, tmp_path: Path):
    """As users start it, from start to report: no process is forked. The fresh environment sees the dependencies of this one, as a
    plain path: its editable install is not loaded."""
    environment, elsewhere = tmp_path / "venv", tmp_path / "elsewhere"
    elsewhere.mkdir()
    venv.create(environment, symlinks=True, with_pip=False)
    (site,) = (environment / "lib").glob("python*/site-packages")
    dependencies = [p for p in sys.path if p.endswith("site-packages")]
    (site / "dependencies.pth").write_text("\n".join(dependencies) + "\n")
    python = str(environment / "bin" / "python")

    def run(*command: str) -> str:
        with forkserver.disabled():
            done = subprocess.run(
                command, cwd=elsewhere, capture_output=True, text=True, timeout=WAIT_S, env=clean_environment()
            )
        assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    alone = ("--no-deps", "--ignore-installed", "--prefix", str(environment))
    run(python, "-m", "pip", "install", "-q", *alone, str(wheel))
    where = run(python, "-c", "import slipstream; print(slipstream.__file__)")
    assert Path(where.strip()).is_relative_to(environment)
    slipstream = str(environment / "bin" / "slipstream")
    run(slipstream, "init-model", "model", "--config", "quickstart")
    folder = elsewhere / "run"
    check_run(
        folder, run(slipstream, "train", "quickstart", *SMALL, *TEN_STEPS, f"run.dir={folder}", "model.path=model")
    )
