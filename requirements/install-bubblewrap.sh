#!/bin/sh
# Finds or installs bubblewrap, the sandbox of what policies write. Without root it is unpacked into .venv; where that fails, too, Landlock takes
# its place. usage: sh requirements/install-bubblewrap.sh
set -eu
has() { command -v "$1" >/dev/null 2>&1; }
as_root() { [ "$(id -u)" = 0 ] && has apt-get; }
install() { DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends bubblewrap >/dev/null 2>&1; }
unpack() {
    has apt-get && has dpkg || return 1
    rm -rf .venv/bubblewrap && mkdir -p .venv/bubblewrap
    (cd .venv/bubblewrap && apt-get download -qq bubblewrap >/dev/null 2>&1 && dpkg -x bubblewrap_*.deb . && rm bubblewrap_*.deb)
}

if has bwrap; then
    echo "sandbox: $(bwrap --version) is installed"
elif as_root && { install || { apt-get update -qq >/dev/null 2>&1 && install; }; }; then
    echo "sandbox: installed $(bwrap --version)"
elif unpack; then
    echo "sandbox: unpacked $(.venv/bubblewrap/usr/bin/bwrap --version) into .venv"
else
    echo "sandbox: bubblewrap cannot be installed here; Landlock will be used (Linux 6.2 or newer)"
fi
