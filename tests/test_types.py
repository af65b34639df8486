"""The product has no type errors. The checker takes more than a minute: it begins before this test, see `type_checker`."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

import psutil


def test_the_product_has_no_type_errors(type_checker: tuple[subprocess.Popen[bytes], Path]) -> None:
    process, said = type_checker
    with contextlib.suppress(psutil.Error):  # it has ended, or this user may not
        for one in (checker := psutil.Process(process.pid), *checker.children(recursive=True)):
            one.nice(os.getpriority(os.PRIO_PROCESS, 0))  # now this process waits for it
    assert process.wait(800) == 0, said.read_text()[-5000:]
