#!/bin/sh
# Makes .venv-sglang for a machine without a GPU: SGLang's server, whose pins conflict with vLLM's, and this package in editable
# mode, because our weight receiver runs inside that server.
# usage: sh requirements/install-sglang.sh [PYTHON]
set -eu
python=${1:-python3}
torch="torch==2.13.0+cpu"

"$python" - <<'END'
import sys
if sys.version_info[:2] not in ((3, 11), (3, 12)):
    sys.exit(f"install-sglang: Python {sys.version.split()[0]} is not supported; run `make install-sglang PYTHON=python3.11` or 3.12")
END

"$python" -m venv .venv-sglang
pip() { .venv-sglang/bin/python -m pip --disable-pip-version-check -q "$@"; }

echo "installing torch (CPU) for SGLang"
# PyPI has no CPU build of torch; where the configured index has none either, PyTorch's own public index does.
pip install --no-deps "$torch" 2>/dev/null ||
    pip install --no-deps --index-url https://download.pytorch.org/whl/cpu "$torch"
echo "installing the packages pinned for SGLang"
pip install --no-deps -r requirements/sglang-cpu.lock
pip install --no-deps --no-build-isolation -e .
