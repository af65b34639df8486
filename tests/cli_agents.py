"""Claude Code and Codex as npm has them, for tests that run them as agents. They are installed once, into the user's cache."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest
from slipstream.tests.servers import is_required

CLAUDE_CODE, CODEX = "2.1.197", "0.169.0"
VARIABLE = "SLIPSTREAM_CLI_AGENTS"  # a folder in which npm has installed both
INSTALL_S = 200.0


def installed() -> Path:
    """A folder with both in its `node_modules`. Where there is none and npm cannot make it, the test is skipped; where `cli_agents`
    is required, it fails."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = cache / "slipstream" / f"cli-agents-{CLAUDE_CODE}-{CODEX}"
    if not folder.exists():
        if not (shutil.which("node") and shutil.which("npm")):
            _give_up(f"there is no node and npm to install Claude Code and Codex with, and {VARIABLE} names no folder")
        made = folder.with_name(f"{folder.name}.{os.getpid()}")
        packages = (f"@anthropic-ai/claude-code@{CLAUDE_CODE}", f"@openai/codex@{CODEX}")
        command = ("npm", "install", "--prefix", str(made), "--no-audit", "--no-fund", "--loglevel=error", *packages)
        made.mkdir(parents=True)
        try:
            subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=True)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            shutil.rmtree(made)
            _give_up(f"npm cannot install Claude Code and Codex: {error}; {str(error.stderr or '').strip()[-200:]!r}")
        made.rename(folder)
    return folder


def _give_up(why: str) -> NoReturn:
    (pytest.fail if is_required("cli_agents") else pytest.skip)(why)
