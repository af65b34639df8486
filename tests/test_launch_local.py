"""Processes of the local launcher, and their groups: real ones."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import psutil
import pytest
from slipstream.launch.launchers.local import LocalLauncher

LEAVES = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1], "w").write(str(child.pid))
sys.exit(3)
"""


async def test_what_a_process_leaves_of_its_group_ends_with_it_and_its_number_is_signalled_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = LocalLauncher(tmp_path, 0)
    process = await launcher.start("worker-0", [sys.executable, "-c", LEAVES, str(tmp_path / "child")], {})
    assert await process.wait() == 3
    child = int((tmp_path / "child").read_text())
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(child).wait(60)
    signalled: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda pid, number: signalled.append(pid))
    assert await process.wait() == 3
    await process.kill()
    await launcher.release("worker-0")
    await launcher.close()
    assert signalled == []  # meanwhile it may be the number of another group
