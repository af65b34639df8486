"""Servers of other libraries, started by the interpreter that has them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from slipstream.tests.tiny import free_port

ROOT = Path(__file__).parent.parent
SOON = 60.0
REQUIRED = "SLIPSTREAM_TESTS_REQUIRE"
"""Variable with the names of what `make test-full` has installed: a test that needs it fails where it is absent."""


def python_of(library: str) -> Path:
    """The interpreter that has a library: the one that a variable names, else that of `requirements/install-env.sh`."""
    named = os.environ.get(f"SLIPSTREAM_{library.upper()}_PYTHON")
    return Path(named) if named else ROOT / f".venv-{library}" / "bin" / "python"


def is_required(name: str) -> bool:
    """Whether a test that needs it may not be skipped."""
    return name in os.environ.get(REQUIRED, "").split()


def needs(library: str) -> pytest.MarkDecorator:
    """Skips a test where there is no such interpreter, unless it is required."""
    python = python_of(library)
    reason = f"there is no {python}; make it by `bash requirements/install-env.sh {library}`"
    return pytest.mark.skipif(not (python.exists() or is_required(library)), reason=reason)


@contextlib.contextmanager
def served(python: Path | str, script: str, *arguments: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The URL and the process of `python tests/SCRIPT PORT ARGUMENTS...`, once it listens; it ends with this one."""
    port = free_port()
    parent = (sys.executable, "-m", "slipstream.common.process")
    process = subprocess.Popen([*parent, str(python), str(ROOT / "tests" / script), str(port), *arguments])
    try:
        asyncio.run(_listening(port, process))
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait(SOON)


async def _listening(port: int, process: subprocess.Popen[bytes]) -> None:
    async with asyncio.timeout(SOON):
        while True:
            assert process.poll() is None, "the server has ended"
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.1)
            else:
                return writer.close()
