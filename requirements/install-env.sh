#!/bin/bash
# Makes an environment of its own for a library that does not fit beside ours: `bash requirements/install-env.sh openenv [PYTHON]`.
# env-NAME.txt says what is wanted, and in a line `# python: PROGRAM` which Python it needs, where that is not 3.11. env-NAME.lock
# pins every package; without that file it is written anew. What cannot be completed is removed.
set -euo pipefail
cd "$(dirname "$0")/.."
name=${1:?which library: $(cd requirements && ls env-*.txt | sed 's/env-\(.*\)\.txt/\1/' | grep -v host | tr '\n' ' ')}
list="requirements/env-$name.txt" lock="requirements/env-$name.lock" folder=".venv-$name"
tries=3 limit=600 # of an installation, which a slow network may break off; seconds of one
fail() { echo "install-env: $name: $*" >&2; exit 2; }
test -f "$list" || fail "there is no $list"

# The program of this name that runs: on the PATH, or one of pyenv's, whose shims run only the versions that are switched on.
runs() {
    local found
    for found in "$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"${1#python}".*/bin/"$1"; do
        if "$found" -c '' 2>/dev/null; then echo "$found"; return; fi
    done
    return 1
}
needed=$(sed -n 's/^# python: //p' "$list")
needed=${2:-${needed:-python3.11}}
python=$(runs "$needed") || fail "it needs $needed, which is not installed here (uv python install ${needed##*python} does it);" \
    "then run bash requirements/install-env.sh $name [PATH/TO/PYTHON]"

trap 'rm -rf "$folder"' EXIT
"$python" -m venv --clear "$folder"
pip() { timeout "$limit" "$folder/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
if test -f "$lock"; then wanted=(--no-deps -r "$lock"); else wanted=(-r requirements/env-host.txt -r "$list"); fi
for try in $(seq $tries); do
    if pip install --no-compile "${wanted[@]}"; then break; fi # Python compiles what is imported
    if [ "$try" = $tries ]; then fail "pip could not install its packages in $tries tries; the reasons are above"; fi
    echo "install-env: $name: try $try of $tries failed" >&2
done
pip check || fail "its packages do not fit together; remove $lock to have it written anew"
if ! test -f "$lock"; then "$folder/bin/python" -m pip freeze >"$lock"; fi
trap - EXIT
echo "set env.python to $PWD/$folder/bin/python, or run its servers with it"
