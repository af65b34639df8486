"""The programs that run inside a sandbox, and the Python that runs them."""

from __future__ import annotations

import functools
import os
import resource
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Protocol

from .base import GatewayAddress, Limits, Mount
from .process import LaunchSpec

Program = Literal["commands", "cells"]
"""`commands` runs commands and keeps files, `cells` runs cells of Python and keeps their variables."""

INSIDE = Path(__file__).parent / "inside"
NEEDS = {"commands": ("framing", "execute"), "cells": ("framing",), "once": ("framing", "execute")}
FILES = 256  # open files of a process
FILE_COST = 1024  # bytes of the kernel's memory that an empty file takes; they count as its disk
OURS = 2  # processes beside the policy's that the kernel counts with them

FLAGS: dict[Program, tuple[str, ...]] = {"commands": ("-I", "-S"), "cells": ("-s", "-S")}
"""Neither reads site-packages, which takes longer than all the rest of the start. Cells import what they wrote into their
folder."""


class Confinement(Protocol):
    """A kind of sandbox. `shows_links`: whether it can show a folder below home under another name."""

    name: str
    shows_links: bool

    def launch(
        self,
        program: Program,
        limits: Limits,
        packages: str = "",
        mounts: tuple[Mount, ...] = (),
        gateway: GatewayAddress | None = None,
        links: Mapping[str, str] = {},
    ) -> LaunchSpec:
        """How to start one. Raises ConfigError: it cannot be on this host; ToolError."""
        ...

    def place(self, folder: str) -> str:
        """Where a sandbox shows a folder of the host by a mount."""
        ...


@functools.cache
def text(*names: str) -> str:
    """The text of files in `inside/`, one after another; what a file needs stands before it."""
    files = [file for name in names for file in (*NEEDS.get(name, ()), name)]
    return "\n".join((INSIDE / f"{file}.py").read_text(encoding="utf-8") for file in files)


def python_candidates() -> tuple[str, ...]:
    """The Pythons of this host that a sandbox may have, best first: the one that this environment is made of, the system's."""
    own = os.path.join(os.path.realpath(sys.base_prefix), "bin", f"python3.{sys.version_info[1]}")
    return tuple(dict.fromkeys(os.path.realpath(p) for p in (own, "/usr/bin/python3") if os.path.exists(p)))


def is_public(path: str) -> bool:
    """Whether every user may run it."""
    folders = all(p.stat().st_mode & stat.S_IXOTH for p in Path(path).parents)
    return folders and bool(Path(path).stat().st_mode & stat.S_IXOTH)


def variables(home: str, path: str, packages: str) -> dict[str, str]:
    """The environment of everything in a sandbox."""
    found = {
        "PATH": path,
        "HOME": home,
        "TMPDIR": home,
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return found | ({"PYTHONPATH": packages} if packages else {})


def rlimits(limits: Limits, processes: int | None = None) -> tuple[tuple[int, int], ...]:
    """Limits of each process, as numbers for `setrlimit`; `processes` is of all that have its uid. RLIMIT_DATA and not RLIMIT_AS:
    programs that reserve address space and do not use it, such as Node's, run."""
    return (
        (resource.RLIMIT_DATA, limits.memory),
        *(() if processes is None else ((resource.RLIMIT_NPROC, processes),)),
        (resource.RLIMIT_FSIZE, limits.disk),
        (resource.RLIMIT_NOFILE, FILES),
        (resource.RLIMIT_CORE, 0),
    )
