"""The product has no type errors. A test of its own, so that it takes a minute of one process while another one tests."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_product_has_no_type_errors() -> None:
    checker = Path(sys.executable).with_name("basedpyright")
    done = subprocess.run([checker], cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
