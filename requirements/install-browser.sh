#!/bin/sh
# Installs what the dashboard's tests in a real browser need: Playwright into .venv, and Chromium, where there is none and this is root
# on Debian. usage: sh requirements/install-browser.sh
set -eu
has() { command -v "$1" >/dev/null 2>&1; }
has_chromium() { has chromium || has chromium-browser || has google-chrome; }
install() { DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null 2>&1; }
fail() { echo "install-browser: $*; \`make test-full WITHOUT=browser\` leaves out its tests" >&2; exit 2; }

.venv/bin/python -m pip --disable-pip-version-check -q install --no-deps -r requirements/browser.lock ||
    fail "pip could not install Playwright; the reason is above"
if ! has_chromium && [ "$(id -u)" = 0 ] && has apt-get; then
    echo "installing Chromium"
    install || { apt-get update -qq >/dev/null && install; } || fail "apt-get cannot install chromium"
fi
has_chromium || fail "there is no Chromium; Debian: apt install chromium"
