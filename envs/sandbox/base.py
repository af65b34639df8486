"""The contract of sandboxes: where the commands and programs that the policy writes run.

Invariants:
- What the sandbox answers is the policy's word: a program in it may print, write and end as it likes. Only what the caller
  knows and the sandbox does not can score it.
- What a program does to itself or to its sandbox (it fails, hangs, exceeds a limit) is an `ExecResult`. What the sandbox
  could not do, and a sandbox that was ended from outside, is a ToolError.
- A sandbox has no network but the one server that its pool names, sees no file of the host but its programs and libraries, and
  leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import msgspec

MIB = 1 << 20
GIB = 1 << 30

Ended = Literal["exited", "wall", "cpu", "memory", "disk", "processes", "output", "killed"]
"""Why a program ended: by itself, by the limit of that name, or with its sandbox, which it killed."""

Reason = Ended | Literal["closed", "lost"]
"""Why a sandbox ended: as above, by `close`, or from outside."""


class Limits(msgspec.Struct, frozen=True):
    """Limits of a sandbox. Time and output are those of one run, or of one cell; the others are of all its processes together."""

    wall_s: float = 10.0
    cpu_s: float = 10.0
    memory: int = GIB  # bytes resident; a single process gets no more, all together are killed beyond it
    disk: int = 64 * MIB  # bytes of files
    processes: int = 32
    output: int = 64 << 10  # bytes of stdout and of stderr, each


class ExecResult(msgspec.Struct, frozen=True):
    """What a program left: its output, decoded leniently and cut at `Limits.output`, its exit status (negative: the signal
    that ended it; None where it has none) and why it ended."""

    stdout: str
    stderr: str
    exit_code: int | None
    ended: Ended = "exited"

    @property
    def ok(self) -> bool:
        """It ended by itself, with exit status 0."""
        return self.ended == "exited" and self.exit_code == 0


class Mount(msgspec.Struct, frozen=True):
    """A file or folder of the host, seen in the sandbox as `target`; read-only unless `writable`."""

    source: str
    target: str
    writable: bool = False


class GatewayAddress(msgspec.Struct, frozen=True):
    """A server of the host that programs in a sandbox may reach, and nothing else: on its Unix socket and on a port of loopback."""

    socket: str
    port: int


class Sandbox(Protocol):
    """One sandbox, for one use: an episode, or one program to score. Files stay until it is closed."""

    @property
    def home(self) -> str:
        """Its only writable folder; commands start in it and relative paths are in it."""
        ...

    @property
    def python(self) -> str:
        """The path of Python in it."""
        ...

    async def run(
        self,
        argv: Sequence[str],
        stdin: bytes = b"",
        *,
        wall_s: float | None = None,
        environ: Mapping[str, str] = {},
        cwd: str = "",
    ) -> ExecResult:
        """Run a program to its end; `wall_s` instead of the limit, in the folder `cwd` below home, which is made. Processes that it
        leaves in the background end with it. Raises ToolError."""
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Make or replace a file, and the folders above it. Raises OSError: the sandbox has no room, or what is there prevents it;
        ToolError."""
        ...

    async def read(self, path: str) -> bytes:
        """The content of a file. Raises OSError: there is none, or it cannot be read or is larger than `Limits.disk`; ToolError."""
        ...

    async def read_folder(self, path: str) -> dict[str, bytes]:
        """The regular files in a folder and below it, by their paths in it; none where there is no such folder. Left out are links,
        files that their owner has closed, and names that are not UTF-8. Raises OSError: all together are larger than `Limits.disk`;
        ToolError."""
        ...

    async def close(self) -> None:
        """End everything in it. May be called twice."""
        ...


class SandboxPool(Protocol):
    """Where sandboxes come from: on this host, or elsewhere."""

    limits: Limits

    async def open(self) -> Sandbox:
        """A sandbox that was never used. Raises ToolError."""
        ...

    async def close(self) -> None:
        """End all that is pre-started; sandboxes that were opened stay."""
        ...
