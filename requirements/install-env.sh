#!/bin/bash
# Makes an environment of its own for a library that does not fit beside ours: `bash requirements/install-env.sh openenv [PYTHON]`.
set -euo pipefail
cd "$(dirname "$0")/.."
name=${1:?which library: $(cd requirements && ls env-*.txt | sed 's/env-\(.*\)\.txt/\1/' | grep -v host | tr '\n' ' ')}
python=${2:-python3.11}
test -f "requirements/env-$name.txt" || { echo "there is no requirements/env-$name.txt" >&2; exit 2; }
"$python" -m venv ".venv-$name"
".venv-$name/bin/pip" install --quiet -r requirements/env-host.txt -r "requirements/env-$name.txt"
echo "set env.python to $PWD/.venv-$name/bin/python, or run its servers with it"
