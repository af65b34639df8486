"""Sandboxes by gVisor (`runsc`): a kernel of its own, which is a program without rights on the host, answers the system calls
of what runs in it. It starts and computes slower than the other kinds, and is taken only where it is chosen.

Invariants:
- gVisor itself has no rights on the host: as root a uid of its own for every sandbox, and always a user namespace.
- It sees no file of the host but programs and libraries, read-only; all files that can be written are in its memory.
- The process that runs commands is number 2 in the sandbox. Commands have another user, and the filter of system calls that the
  other kinds have holds for them in there, too.
- CPU time and memory are gVisor's own on the host, found by the watchdog; a share of them is for gVisor. Processes and files are
  counted in the sandbox, where the policy cannot reach what counts them.
"""

from __future__ import annotations

import json
import marshal
import os
import shutil
import tempfile
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

from ...common.owned_folders import OwnedFolder
from ...errors import ConfigError, ToolError
from . import seccomp
from .base import MIB, Ended, GatewayAddress, Limits, Mount
from .bubblewrap import FOLDER, GATEWAY, GUEST, HOME, PACKAGES, PORT, RELAY, unused_uid
from .process import LaunchSpec
from .programs import FILE_COST, FLAGS, Program, is_public, rlimits, text, variables

STATE = "slipstream-gvisor-"  # prefix of the folder of what sandboxes are started from
UID = 1000  # of commands and cells in the sandbox
FIRST = 1  # number of the process that waits for the one that runs commands
OWN_MEMORY = 128 * MIB  # what gVisor itself may take beside its programs
OWN_THREADS = 64  # and its threads
THREADS = 8  # of the host, at most, for a thread in the sandbox
OPTIONS = ("--rootless", "--network=none", "--ignore-cgroups", "--overlay2=none")
ENDS: dict[int, Ended] = {100: "killed", 101: "processes", 102: "disk"}  # exit statuses of inside/guest.py
FILTERS: dict[Program, bytes] = {
    "commands": seccomp.build((*seccomp.COMMON, *seccomp.protecting(FIRST), *seccomp.protecting(GUEST))),
    "cells": seccomp.build(seccomp.COMMON),
}
SHOWN = ("/usr", "/etc/ld.so.cache", "/etc/alternatives")  # of the host; also what is not under /usr of the next ones
WRITABLE = (HOME, "/tmp")  # gVisor would make its own /tmp, without a limit
PROGRAMS = ("/bin", "/sbin", "/lib", "/lib64")


class Gvisor:
    """Starts sandboxes with the Python at `python`, which users without rights must be able to run."""

    name = "gvisor"
    shows_links = True

    def __init__(self, python: str) -> None:
        self._runsc = find_runsc()
        setpriv = shutil.which("setpriv")
        if setpriv is None:
            raise ConfigError("the program `setpriv` is missing; install the package util-linux")
        self._setpriv = setpriv
        self._root = os.geteuid() == 0
        if self._root and not is_public(python):
            raise ConfigError(f"{python} is in a folder that only root can read")
        self._python = python
        self._prefix = "" if python.startswith("/usr/") else str(Path(python).parents[1])
        self._folder: OwnedFolder | None = None
        self._lock = threading.Lock()  # launches come from several threads

    def place(self, folder: str) -> str:
        return FOLDER

    def launch(
        self,
        program: Program,
        limits: Limits,
        packages: str = "",
        mounts: tuple[Mount, ...] = (),
        gateway: GatewayAddress | None = None,
        links: Mapping[str, str] = {},
    ) -> LaunchSpec:
        with self._lock:
            if self._folder is None:
                self._folder = OwnedFolder(Path(tempfile.gettempdir()), STATE)
                self._folder.path.chmod(0o711)
        bundle = Path(tempfile.mkdtemp(dir=self._folder.path, prefix=""))
        shown = [Mount(path, path) for path in SHOWN if os.path.exists(path)]
        shown += [Mount(path, path) for path in PROGRAMS if os.path.isdir(path) and not os.path.islink(path)]
        shown += [Mount(self._prefix, self._prefix)] if self._prefix else []
        shown += [Mount(packages, PACKAGES)] if packages else []
        shown += mounts
        path = f"{self._prefix}/bin:/usr/local/bin:/usr/bin:/bin" if self._prefix else "/usr/local/bin:/usr/bin:/bin"
        environ = variables(HOME, path, PACKAGES if packages else "")
        folders = [f"{HOME}/{folder}" for folder in links.values() if folder]
        most = limits.processes + 1, limits.disk // FILE_COST
        options = marshal.dumps((UID, FILTERS[program], program == "cells", environ, folders, most), 2).hex()
        argv = (self._python, *FLAGS[program], "-c", text("guest", program), options)
        uid = unused_uid() if self._root else 0
        try:
            _write_root(bundle / "rootfs", shown, {path: f"{HOME}/{folder}" for path, folder in links.items()})
            if gateway is not None:
                os.link(gateway.socket, bundle / "rootfs" / GATEWAY[1:])  # its folder is its owner's alone
            (bundle / "config.json").write_text(json.dumps(_config(argv, limits, shown)))
            (bundle / "state").mkdir()
            if uid:
                for made in (bundle, bundle / "config.json", bundle / "state"):
                    os.chown(made, uid, uid)
        except OSError as error:
            shutil.rmtree(bundle, ignore_errors=True)
            raise ToolError(f"the sandbox did not start: {error}") from error
        relay = (self._python, *FLAGS["commands"], RELAY, str(PORT), GATEWAY) if gateway else ()
        command = [self._setpriv, "--pdeathsig", "KILL"]
        if uid:
            command += ["--reuid", str(uid), "--regid", str(uid), "--clear-groups"]
        command += [self._runsc, *OPTIONS, *(("--host-uds=open",) if gateway else ())]
        command += [f"--root={bundle}/state", "run", f"--bundle={bundle}", bundle.name]
        return LaunchSpec(
            tuple(command),
            HOME,
            {"PATH": "/usr/bin:/bin"},
            rlimits(limits),
            clean=lambda: shutil.rmtree(bundle, ignore_errors=True),
            relay=relay,
            gateway=f"127.0.0.1:{PORT}" if relay else "",
            own_memory=OWN_MEMORY,
            own_threads=OWN_THREADS + (THREADS - 1) * limits.processes,
            ends=ENDS,
        )


def find_runsc() -> str:
    """The program. Raises ConfigError: it is missing."""
    found = shutil.which("runsc")
    if found is None:
        raise ConfigError("the program `runsc` is missing; docs/environments.md says how to install gVisor")
    return found


def _write_root(root: Path, shown: Iterable[Mount], links: Mapping[str, str]) -> None:
    """The sandbox's own files, a place for every file of the host that it shows, and links. Raises OSError."""
    for folder in (*WRITABLE, "/proc", "/sys", "/dev", "/etc", "/opt"):
        (root / folder[1:]).mkdir(parents=True)
    (root / "etc" / "passwd").write_text(f"sandbox:x:{UID}:{UID}::{HOME}:/bin/sh\n")
    (root / RELAY[1:]).write_text(text("relay"))
    for mount in shown:
        place = root / mount.target[1:]
        place.parent.mkdir(parents=True, exist_ok=True)
        if os.path.isdir(mount.source):
            place.mkdir(exist_ok=True)
        else:
            place.touch()
    for made in (root, *root.rglob("*")):
        made.chmod(0o755 if made.is_dir() else 0o644)
    known = {path: os.readlink(path) for path in PROGRAMS if os.path.islink(path)}
    for path, target in {**known, **links}.items():
        place = root / path[1:]
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(target)


def _config(argv: tuple[str, ...], limits: Limits, shown: Iterable[Mount]) -> dict[str, object]:
    """A container as the Open Container Initiative's runtime specification describes it."""
    rights = [
        "CAP_SETUID",
        "CAP_SETGID",
        "CAP_DAC_READ_SEARCH",
    ]  # of the first process, and of none that the policy starts
    disk = ["mode=1777", f"size={limits.disk}"]
    mounts: list[dict[str, object]] = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/sys", "type": "tmpfs", "source": "tmpfs", "options": ["mode=0700", "ro"]},
        *({"destination": folder, "type": "tmpfs", "source": "tmpfs", "options": disk} for folder in WRITABLE),
    ]
    for mount in shown:
        options = ["rbind", "rw" if mount.writable else "ro"]
        mounts.append({"destination": mount.target, "type": "bind", "source": mount.source, "options": options})
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": argv,
            "env": [],
            "cwd": "/",
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), rights),
            "noNewPrivileges": True,
        },
        "root": {"path": "rootfs", "readonly": True},
        "hostname": "sandbox",
        "mounts": mounts,
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]},
    }
