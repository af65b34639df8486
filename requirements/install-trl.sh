#!/bin/sh
# Makes .venv-trl for a machine without a GPU: TRL, which two benchmarks compare with, and this package in editable mode, because
# both train on the same tasks and rewards. Nothing but those benchmarks needs it.
# usage: sh requirements/install-trl.sh [PYTHON]
set -eu
python=${1:-python3}
torch="torch==2.13.0+cpu"

"$python" - <<'END'
import sys
if sys.version_info[:2] not in ((3, 11), (3, 12)):
    sys.exit(f"install-trl: Python {sys.version.split()[0]} is not supported; run `make install-trl PYTHON=python3.11` or 3.12")
END

"$python" -m venv .venv-trl
pip() { .venv-trl/bin/python -m pip --disable-pip-version-check -q "$@"; }

echo "installing torch (CPU) for TRL"
# PyPI has no CPU build of torch; where the configured index has none either, PyTorch's own public index does.
pip install --no-deps "$torch" 2>/dev/null ||
    pip install --no-deps --index-url https://download.pytorch.org/whl/cpu "$torch"
echo "installing the packages pinned for TRL"
pip install --no-deps -r requirements/trl.lock
pip install --no-deps --no-build-isolation -e .
