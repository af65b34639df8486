"""Sandboxes by Landlock and seccomp, where namespaces are forbidden, as in most containers.

Invariants:
- Files: only those that it may read and its own folder. Network: no socket at all, or with a gateway TCP connections to its port
  alone (a port of that number on another host, too). Processes: signals stay inside.
- While root: a uid of its own for every sandbox. As an ordinary user the sandbox has the caller's uid: system calls that
  change modes, owners or times of files by their path are refused then, since Landlock does not see them.
- Its processes stay in its session, by which they are found, counted and killed.
- Weaker than bubblewrap: it can see which files the host has (not what is in them), /proc and /dev/shm are missing, the
  limits of disk and, without root, of processes hold only from look to look.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import marshal
import math
import os
import platform
import resource
import stat
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

from ...common.owned_folders import OwnedFolder, remove_tree
from ...errors import ConfigError
from . import seccomp
from .base import GatewayAddress, Limits, Mount
from .bubblewrap import unused_uid
from .process import LaunchSpec
from .programs import FILE_COST, FLAGS, OURS, Program, is_public, rlimits, text, variables

PREFIX = "slipstream-sandbox-"
OLDEST = 3  # Landlock's version in Linux 6.2, the first that sees files being truncated
PORTS = 4  # its version in Linux 6.7, the first that sees TCP connections
SCOPES = 6  # its version in Linux 6.12, the first that confines signals
READABLE = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/alternatives",
    "/dev/urandom",
    "/dev/random",
)
WRITABLE = ("/dev/null", "/dev/zero", "/dev/full")
DEEPEST = 256  # folders within one another; a program that needs more hides what is in them
BURST = 1024  # processes beyond those of now that a user may have, where the sandbox shares his uid


def version() -> int:
    """Landlock's version in this kernel. Raises ConfigError: none, or too old."""
    found = ctypes.CDLL(None, use_errno=True).syscall(444, None, 0, 1) if sys.platform == "linux" else -1
    if found < OLDEST:
        have = "the kernel has no Landlock" if found < 0 else f"the kernel's Landlock has version {found}"
        raise ConfigError(f"{have}; version {OLDEST} is needed (Linux 6.2, on {platform.release()})")
    return found


class Landlock:
    """Starts sandboxes with the Python at `python`, which users without rights must be able to run."""

    name = "landlock"
    shows_links = False

    def __init__(self, python: str) -> None:
        self._version = version()
        self._root = os.geteuid() == 0
        if self._root and not is_public(python):
            raise ConfigError(f"{python} is in a folder that only root can read")
        self._python = python
        common = (*seccomp.COMMON, *(() if self._root else seccomp.FOREIGN_FILES))
        inner = (*seccomp.SAME_SESSION, *(seccomp.SIGNALS if self._version < SCOPES else ()))
        self._filters = {
            with_gateway: (seccomp.build((*common, *network)), seccomp.build(inner))
            for with_gateway, network in ((False, seccomp.NO_NAMESPACES), (True, seccomp.ONE_PORT))
        }
        self._folder: OwnedFolder | None = None
        self._lock = threading.Lock()  # launches come from several threads

    def place(self, folder: str) -> str:
        return folder

    def launch(
        self,
        program: Program,
        limits: Limits,
        packages: str = "",
        mounts: tuple[Mount, ...] = (),
        gateway: GatewayAddress | None = None,
        links: Mapping[str, str] = {},
    ) -> LaunchSpec:
        if gateway is not None and self._version < PORTS:
            raise ConfigError(
                f"sandbox: a program that reaches the gateway alone needs bubblewrap, or Landlock of version {PORTS} (Linux 6.7); "
                f"this kernel's has version {self._version}"
            )
        if moved := [m.target for m in mounts if m.target != m.source]:
            raise ConfigError(f"sandbox: Landlock cannot show a file under another name, as {moved[0]}; use bubblewrap")
        with self._lock:
            if self._folder is None:
                self._folder = OwnedFolder(Path(tempfile.gettempdir()), PREFIX)
                self._folder.path.chmod(0o711)
        home, uid = tempfile.mkdtemp(dir=self._folder.path, prefix=""), unused_uid() if self._root else 0
        if uid:
            os.chown(home, uid, uid)
        prefix = str(Path(self._python).parents[1])
        readable = [*READABLE, prefix, *filter(None, [packages]), *(m.source for m in mounts if not m.writable)]
        writable = [home, *WRITABLE, *(m.source for m in mounts if m.writable)]
        port, filters = gateway.port if gateway else 0, self._filters[gateway is not None]
        confinement = os.getpid(), self._version, uid, home, readable, writable, port, *filters, program == "cells"
        path = f"{prefix}/bin:/usr/local/bin:/usr/bin:/bin"
        environ = variables(home, path, packages) | {"CONFINEMENT": marshal.dumps(confinement, 2).hex()}
        processes = limits.processes + OURS if self._root else _processes_of_user() + BURST
        return LaunchSpec(
            (self._python, *FLAGS[program], "-c", text("confine", program)),
            home,
            environ,
            rlimits(limits, processes),
            owns_session=True,
            files=lambda _: _size(home),
            clean=lambda: remove_tree(Path(home)),
            gateway=f"127.0.0.1:{port}" if port else "",
        )


def _processes_of_user() -> int:
    """Threads of this user's processes, as RLIMIT_NPROC counts them."""
    found = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid == os.getuid():
                found += os.stat(f"/proc/{name}/task").st_nlink - 2
    most = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    return found if most == resource.RLIM_INFINITY else min(found, most - BURST)


def _size(folder: str) -> float:
    """Bytes on disk of what is in a folder, and of the files' own records; infinite where folders are nested deeper than `DEEPEST`,
    or so deep that no path reaches what is in them."""
    total, waiting = 0, [folder]
    while waiting:
        path = waiting.pop()
        try:
            found = os.lstat(path)
            total += FILE_COST + 512 * found.st_blocks
            inner = os.listdir(path) if stat.S_ISDIR(found.st_mode) else []
        except OSError as error:  # else it was removed meanwhile, or closed
            if error.errno == errno.ENAMETOOLONG:
                return math.inf
            continue
        if inner and path.count("/") - folder.count("/") == DEEPEST:
            return math.inf
        waiting += [f"{path}/{name}" for name in inner]
    return total
