"""Real processes that end with the one that started them."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

CHILD = """
import os, time
from slipstream.common.process import set_parent_death_signal
set_parent_death_signal(os.getppid())
print(os.getpid(), flush=True)
time.sleep(600)
"""

WRAPPED = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"

PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"


MODULE = "slipstream.common.process"
WRAPPER = (
    f"import subprocess, sys; subprocess.run([sys.executable, '-m', {MODULE!r}, sys.executable, '-c', {WRAPPED!r}])"
)


@pytest.mark.parametrize("parent", [PARENT, WRAPPER])
def test_it_ends_with_a_parent_that_is_killed(parent: str) -> None:
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        process.kill()
        assert process.stdout.read() == ""  # the child's end closes the pipe
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_it_ends_at_once_if_its_parent_has() -> None:
    code = f"from slipstream.common.process import set_parent_death_signal; set_parent_death_signal({os.getppid()}); print('alive')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
