"""Which kind of sandbox this host has.

Invariants:
- A kind counts only after a program in it was refused a file of the host. Nothing ever runs unconfined.
- `auto` takes bubblewrap, else Landlock, else it is refused. The variable SLIPSTREAM_SANDBOX names another;
  gVisor is taken only where it is named.
"""

from __future__ import annotations

import functools
import marshal
import os
import socket
import subprocess
import tempfile
from collections.abc import Callable

from ...errors import ConfigError
from .base import Limits
from .bubblewrap import Bubblewrap
from .gvisor import Gvisor
from .landlock import Landlock
from .process import LaunchSpec
from .programs import Confinement, python_candidates
from .watchdog import kill_session

KINDS: dict[str, Callable[[str], Confinement]] = {"bubblewrap": Bubblewrap, "landlock": Landlock, "gvisor": Gvisor}
AUTO = ("bubblewrap", "landlock")
VARIABLE = "SLIPSTREAM_SANDBOX"
PROBE_S = 60.0  # longest start of a sandbox


def require_sandbox(kind: str | None = None) -> Confinement:
    """The kind of sandbox to use, tried once in this process. `kind` is `auto`, `bubblewrap`, `landlock` or `gvisor`; None is what
    the variable SLIPSTREAM_SANDBOX names, else `auto`. Raises ConfigError: it cannot confine anything here, and why."""
    return _choose(kind or os.environ.get(VARIABLE) or "auto")


@functools.cache
def _choose(kind: str) -> Confinement:
    if kind != "auto" and kind not in KINDS:
        raise ConfigError(f"sandbox: {kind!r} ({VARIABLE}) is no kind of sandbox; allowed are auto, {', '.join(KINDS)}")
    refusals: list[str] = []
    for name in AUTO if kind == "auto" else (kind,):
        try:
            return _try(name)
        except ConfigError as refusal:
            refusals.append(f"{name}: {refusal}")
    raise ConfigError(f"sandbox: what the policy writes cannot be confined here ({'; '.join(refusals)})")


def _try(name: str) -> Confinement:
    """The kind with the first Python that runs in it."""
    refusals: list[str] = []
    for python in python_candidates():
        try:
            confinement = KINDS[name](python)
            _probe(confinement)
            return confinement
        except ConfigError as refusal:
            refusals.append(str(refusal))
    raise ConfigError(", ".join(dict.fromkeys(refusals)) or "there is no Python for it")


def _probe(confinement: Confinement) -> None:
    """Start one, and have a program in it read a file of the host. Raises ConfigError."""
    with tempfile.NamedTemporaryFile(prefix="slipstream-probe-") as secret:
        os.chmod(secret.name, 0o644)
        limits = Limits()
        launch = confinement.launch("commands", limits)
        argv = [
            "/bin/sh",
            "-c",
            f"read -r line < {secret.name} || true; test -r {secret.name} && cat {secret.name} && echo SEEN; echo RAN",
        ]
        request = marshal.dumps(("run", argv, b"", {}, limits.wall_s, limits.cpu_s, launch.rlimits, limits.output), 2)
        said, printed = _exchange(launch, len(request).to_bytes(4, "big") + request)
    if b"RAN" not in printed:
        raise ConfigError(f"it does not start: {said}")
    if b"SEEN" in printed:
        raise ConfigError("a program in it can read the host's files")


def _exchange(launch: LaunchSpec, request: bytes) -> tuple[str, bytes]:
    """Send a request to a new sandbox: the last line of its messages, and its answers, up to the one that has RAN in it."""
    ours, theirs = socket.socketpair()
    answers = b""
    try:
        process = subprocess.Popen(
            launch.argv,
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=subprocess.PIPE,
            pass_fds=launch.pass_fds,
            env=launch.environ,
            start_new_session=True,
            cwd="/",
        )
    except OSError as error:
        return str(error), b""
    finally:
        theirs.close()
        for fd in launch.pass_fds:
            os.close(fd)
    try:
        ours.settimeout(PROBE_S)
        ours.sendall(request)
        while b"RAN" not in answers and (piece := ours.recv(1 << 16)):
            answers += piece
    except OSError as error:  # TimeoutError is one
        answers += str(error).encode()
    finally:
        ours.close()
        process.kill()
        if launch.owns_session:
            kill_session(process.pid)  # before it is reaped
        said = process.communicate()[1].decode(errors="replace").strip().splitlines()
        if launch.clean is not None:
            launch.clean()
    return said[-1] if said else f"it ended with {process.returncode}", answers
