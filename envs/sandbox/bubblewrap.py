"""Sandboxes by bubblewrap: namespaces of their own for processes, network, files, IPC and host name, without a daemon or an image.

Invariants:
- While really root: a uid of its own for every sandbox, and never a user namespace: there the sandbox's root would be the host's,
  which may write /proc/sys/kernel/core_pattern and is exempt from limits of processes. As an ordinary user: a user namespace.
- The process that runs commands is number 2 in its namespace (bubblewrap itself is 1), and cannot be signalled by them.
- All files that can be written are in memory, with one limit: the folder /box, and as much in /dev/shm.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from ...errors import ConfigError
from . import seccomp
from .base import GatewayAddress, Limits, Mount
from .process import LaunchSpec
from .programs import FILE_COST, FLAGS, OURS, Program, rlimits, text, variables

HOME = "/box"
WRITABLE = (HOME, "/dev/shm")
PACKAGES = "/opt/packages"
PROGRAM = "/opt/sandbox.py"
RELAY = "/opt/relay.py"
GATEWAY = "/opt/gateway"  # the gateway's Unix socket
PORT = 8377  # where the relay listens, in the sandbox's own network
FOLDER = "/opt/folder"  # of the host, at the caller's choice
PREFIX = "/opt/python"  # of a Python that is not under /usr
OWN = Path(sys.prefix) / "bubblewrap" / "usr" / "bin" / "bwrap"  # where requirements/install.sh unpacks it
GUEST = 2  # number of the process that answers the host
FILTERS: dict[Program, bytes] = {
    "commands": seccomp.build((*seccomp.COMMON, *seccomp.protecting(GUEST))),
    "cells": seccomp.build(seccomp.COMMON),
}
NAMESPACES = ("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try")


def find_bwrap() -> str:
    """The program: the system's, else the one that `make install` put beside Python. Raises ConfigError."""
    found = shutil.which("bwrap") or (str(OWN) if OWN.is_file() else None)
    if found is None:
        raise ConfigError("the program `bwrap` is missing; install the package bubblewrap, or run `make install`")
    return found


class Bubblewrap:
    """Starts sandboxes with the Python at `python` on the host."""

    name = "bubblewrap"
    shows_links = True

    def __init__(self, python: str) -> None:
        self._bwrap = find_bwrap()
        self._setpriv = shutil.which("setpriv")
        self._root = os.geteuid() == 0
        if self._root and self._setpriv is None:
            raise ConfigError("the program `setpriv` is missing; install the package util-linux")
        self._prefix = "" if python.startswith("/usr/") else str(Path(python).parents[1])
        # Its own library, which it would look for where it is on the host, and then find the system's of that name.
        self._shared = bool(self._prefix) and any(Path(self._prefix, "lib").glob("libpython*.so*"))
        self._python = os.path.join(PREFIX, "bin", os.path.basename(python)) if self._prefix else python

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
        uid = unused_uid() if self._root else 1000
        passwd = f"sandbox:x:{uid}:{uid}::{HOME}:/bin/sh\n".encode()
        with contextlib.ExitStack() as opened:  # where one cannot be, the others are closed
            fds = [
                _in_memory(opened, "filter", FILTERS[program]),
                _in_memory(opened, "passwd", passwd),
                _in_memory(opened, "program", text(program).encode()),
            ]
            argv = [
                *NAMESPACES,
                "--die-with-parent",
                "--new-session",
                "--clearenv",
                "--cap-drop",
                "ALL",
                "--hostname",
                "sandbox",
            ]
            if self._root:
                argv += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
            else:
                argv += ["--unshare-user", "--uid", str(uid), "--gid", str(uid)]
            argv += self._files(limits, packages, mounts, fds[1], fds[2])
            for path, folder in links.items():
                target = f"{HOME}/{folder}" if folder else HOME
                argv += [*(("--perms", "1777", "--dir", target) if folder else ()), "--symlink", target, path]
            relay: tuple[str, ...] = ()
            if gateway is not None:
                fds.append(_in_memory(opened, "relay", text("relay").encode()))
                argv += ["--perms", "0644", "--ro-bind-data", str(fds[-1]), RELAY, "--ro-bind", gateway.socket, GATEWAY]
                relay = (self._python, *FLAGS["commands"], RELAY, str(PORT), GATEWAY)
            path = f"{PREFIX}/bin:/usr/local/bin:/usr/bin:/bin" if self._prefix else "/usr/local/bin:/usr/bin:/bin"
            environ = variables(HOME, path, PACKAGES if packages else "")
            if self._shared:
                environ["LD_LIBRARY_PATH"] = f"{PREFIX}/lib"
            for name, value in environ.items():
                argv += ["--setenv", name, value]
            argv += ["--chdir", HOME, "--remount-ro", "/dev", "--remount-ro", "/", "--seccomp", str(fds[0])]
            # Options by a descriptor: `ps` in the sandbox shows no path of the host.
            fds.append(_in_memory(opened, "options", b"".join(option.encode() + b"\0" for option in argv)))
            command = [self._bwrap, "--args", str(fds[-1])]
            if self._root:
                command += [
                    str(self._setpriv),
                    "--reuid",
                    str(uid),
                    "--regid",
                    str(uid),
                    "--clear-groups",
                    "--inh-caps=-all",
                ]
            command += [self._python, *FLAGS[program], PROGRAM]
            opened.pop_all()
            return LaunchSpec(
                tuple(command),
                HOME,
                {},
                rlimits(limits, limits.processes + OURS),
                tuple(fds),
                files=cost_of_files,
                relay=relay,
                gateway=f"127.0.0.1:{PORT}" if relay else "",
            )

    def _files(self, limits: Limits, packages: str, mounts: tuple[Mount, ...], passwd: int, program: int) -> list[str]:
        argv = ["--ro-bind", "/usr", "/usr"]
        for name in ("bin", "sbin", "lib", "lib64"):
            if os.path.islink(f"/{name}"):
                argv += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
            else:
                argv += ["--ro-bind-try", f"/{name}", f"/{name}"]
        for folder in ("/etc", "/opt"):  # bubblewrap makes missing folders for root only
            argv += ["--perms", "0755", "--dir", folder]
        for path in ("/etc/ld.so.cache", "/etc/alternatives"):
            argv += ["--ro-bind-try", path, path]
        argv += ["--perms", "0644", "--ro-bind-data", str(passwd), "/etc/passwd"]
        argv += ["--perms", "0644", "--ro-bind-data", str(program), PROGRAM]
        if self._prefix:
            argv += ["--ro-bind", self._prefix, PREFIX]
        if packages:
            argv += ["--ro-bind", packages, PACKAGES]
        argv += ["--proc", "/proc", "--dev", "/dev"]
        for folder in WRITABLE:
            argv += ["--perms", "1777", "--size", str(limits.disk), "--tmpfs", folder]
        argv += ["--perms", "1777", "--dir", f"{HOME}/.tmp", "--symlink", f"{HOME}/.tmp", "/tmp"]
        for mount in mounts:
            argv += _parents(mount.target)
            argv += ["--bind" if mount.writable else "--ro-bind", mount.source, mount.target]
        return argv


def cost_of_files(pid: int) -> int:
    """Bytes of kernel memory of the files that process `pid` sees in its sandbox's folders: tmpfs limits their content, not
    their number."""
    try:
        found = [os.statvfs(f"/proc/{pid}/root{folder}") for folder in WRITABLE]
    except OSError:  # it has ended, or is the one that answers the host, which alone makes no files
        return 0
    return FILE_COST * sum(folder.f_files - folder.f_ffree for folder in found)


def unused_uid() -> int:
    """A uid, for one sandbox, that nothing else on the host has: at random from the upper half of those that there are."""
    first, _, count = map(int, Path("/proc/self/uid_map").read_text().split("\n")[0].split())
    last = min(first + count, 1 << 31) - 2
    taken = 65_534  # nobody
    uid = taken
    while uid == taken:
        uid = first + secrets.randbelow((last - first) // 2) + (last - first) // 2
    return uid


def _parents(target: str) -> list[str]:
    argv: list[str] = []
    for folder in reversed(Path(target).parents):
        if str(folder) not in ("/", "/usr", "/opt", "/etc", HOME, "/tmp"):
            argv += ["--perms", "0755", "--dir", str(folder)]
    return argv


def _in_memory(opened: contextlib.ExitStack, name: str, data: bytes) -> int:
    fd = os.memfd_create(name, 0)
    opened.callback(os.close, fd)
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
