"""Prometheus's own checker of rules, as Debian packages it. It is unpacked once, into the user's cache."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from slipstream.tests.installed_once import cache_folder, give_up, install_once

VARIABLE = "SLIPSTREAM_PROMTOOL"  # the program


def promtool() -> Path:
    """The program. Where there is none and apt-get has no package of it, the test is skipped; where `promtool` is required, it
    fails."""
    if found := os.environ.get(VARIABLE) or shutil.which("promtool"):
        return Path(found)
    folder = cache_folder("prometheus")
    if not (folder.exists() or (shutil.which("apt-get") and shutil.which("dpkg"))):
        give_up("promtool", f"there is no promtool and no apt-get to install it with, and {VARIABLE} names none")
    fetch = "apt-get download -qq prometheus || (apt-get update -qq && apt-get download -qq prometheus)"
    command = ("sh", "-c", f"({fetch}) && dpkg -x prometheus_*.deb . && rm prometheus_*.deb")
    install_once(folder, command, "promtool", "apt-get cannot install promtool")
    return folder / "usr" / "bin" / "promtool"
