#!/bin/bash
# Makes an environment of its own for a library that does not fit beside ours: `bash requirements/install-env.sh openenv [PYTHON]`.
# A file env-NAME.txt may name the Python that its library needs, in a line `# python: PROGRAM`.
set -euo pipefail
cd "$(dirname "$0")/.."
name=${1:?which library: $(cd requirements && ls env-*.txt | sed 's/env-\(.*\)\.txt/\1/' | grep -v host | tr '\n' ' ')}
list="requirements/env-$name.txt"
test -f "$list" || { echo "there is no $list" >&2; exit 2; }
needed=$(sed -n 's/^# python: //p' "$list")
python=${2:-${needed:-python3.11}}
"$python" -c '' || { echo "$name needs a Python: bash requirements/install-env.sh $name PATH/TO/${needed:-python3.11}" >&2; exit 2; }
"$python" -m venv ".venv-$name"
".venv-$name/bin/pip" install --quiet -r requirements/env-host.txt -r "$list"
echo "set env.python to $PWD/.venv-$name/bin/python, or run its servers with it"
