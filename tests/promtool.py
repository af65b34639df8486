"""Prometheus's own checker of rules, as Debian packages it. It is unpacked once, into the user's cache."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest
from slipstream.tests.servers import is_required

VARIABLE = "SLIPSTREAM_PROMTOOL"  # the program
INSTALL_S = 200.0


def promtool() -> Path:
    """The program. Where there is none and apt-get has no package of it, the test is skipped; where `promtool` is required, it
    fails."""
    if found := os.environ.get(VARIABLE) or shutil.which("promtool"):
        return Path(found)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = cache / "slipstream" / "prometheus"
    if not folder.exists():
        if not (shutil.which("apt-get") and shutil.which("dpkg")):
            _give_up(f"there is no promtool and no apt-get to install it with, and {VARIABLE} names none")
        made = folder.with_name(f"{folder.name}.{os.getpid()}")
        made.mkdir(parents=True)
        fetch = "apt-get download -qq prometheus || (apt-get update -qq && apt-get download -qq prometheus)"
        command = ("sh", "-c", f"({fetch}) && dpkg -x prometheus_*.deb . && rm prometheus_*.deb")
        try:
            subprocess.run(command, cwd=made, capture_output=True, text=True, timeout=INSTALL_S, check=True)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            shutil.rmtree(made)
            _give_up(f"apt-get cannot install promtool: {error}; {str(error.stderr or '').strip()[-200:]!r}")
        made.rename(folder)
    return folder / "usr" / "bin" / "promtool"


def _give_up(why: str) -> NoReturn:
    (pytest.fail if is_required("promtool") else pytest.skip)(why)
