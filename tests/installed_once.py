"""Programs that tests install once, into the user's cache."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest
from slipstream.tests.servers import is_required

INSTALL_S = 200.0


def cache_folder(name: str) -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "slipstream" / name


def install_once(folder: Path, command: Sequence[str], requirement: str, failure: str) -> None:
    """Where there is no `folder`, make it what `command` makes of an empty one, in which it runs. Where that fails, `give_up` says
    `failure` and why."""
    if folder.exists():
        return
    made = folder.with_name(f"{folder.name}.{os.getpid()}")
    made.mkdir(parents=True)
    try:
        subprocess.run(command, cwd=made, capture_output=True, text=True, timeout=INSTALL_S, check=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        shutil.rmtree(made)
        give_up(requirement, f"{failure}: {error}; {str(error.stderr or '').strip()[-200:]!r}")
    made.rename(folder)


def give_up(requirement: str, why: str) -> NoReturn:
    """Skip the test, or fail it where its `requirement` is one (SLIPSTREAM_TESTS_REQUIRE)."""
    (pytest.fail if is_required(requirement) else pytest.skip)(why)
