"""The tools `python` and `shell`: what the policy writes runs in a sandbox of its episode, which is opened at the first call.

Invariants:
- A program that fails, hangs or ends its sandbox is told to the policy, and the episode goes on, with a new sandbox where the
  old one ended.
- A sandbox that cannot be opened, or is ended from outside, is a ToolError.
- What the policy reads is bounded: the middle of a long output is left out.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from ..errors import ConfigError
from .base import JSON, ToolSpec
from .sandbox import (
    ExecResult,
    Limits,
    LocalPool,
    PythonSession,
    SandboxPool,
    ShellSession,
    local_pool,
    require_sandbox,
)
from .sandbox.base import Ended
from .tools import InvalidCall, Tool

LONGEST = 4000  # characters of a tool's answer: about a thousand tokens

ENDINGS: dict[Ended, str] = {
    "wall": "it took longer than {limits.wall_s:g} s",
    "cpu": "it used more than {limits.cpu_s:g} s of CPU time",
    "memory": "it used more than {memory} MiB of memory",
    "disk": "its files are larger than {disk} MiB",
    "processes": "it started more than {limits.processes} processes",
    "output": "it printed more than {limits.output} bytes",
    "killed": "it ended the interpreter",
}
"""What the policy is told about a program that did not end by itself."""


class InterpreterSession(Protocol):
    """What runs the programs of one episode."""

    async def run(self, program: str, /) -> ExecResult: ...
    async def close(self) -> None: ...


class InterpreterTool:
    """A tool of one episode. Put `tool` among the environment's tools, and call `close` in the environment's `close`.

    Args:
        pool: where sandboxes come from; that of the event loop by default.
        longest: characters of an answer.

    Raises:
        ConfigError: nothing can be confined on this host, or the pool has no such sessions.
    """

    name: str
    argument: str
    description: str

    def __init__(self, pool: SandboxPool | None = None, *, longest: int = LONGEST) -> None:
        if pool is None:
            require_sandbox()
        self._pool = pool
        self._longest = longest
        self._session: InterpreterSession | None = None
        # Calls of one turn may come at once: one sandbox for all, one program after another.
        self._lock = asyncio.Lock()
        parameters: JSON = {
            "type": "object",
            "properties": {self.argument: {"type": "string"}},
            "required": [self.argument],
        }
        self.tool = Tool(ToolSpec(self.name, self.description, parameters), self._run)

    async def close(self) -> None:
        """End the sandbox, if one was opened."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _open(self) -> InterpreterSession:
        raise NotImplementedError

    async def _run(self, arguments: JSON) -> str:
        program = arguments.get(self.argument)
        if not isinstance(program, str) or len(arguments) != 1:
            raise InvalidCall(f'the tool {self.name} takes {{"{self.argument}": "..."}}')
        async with self._lock:
            if self._session is None:
                self._session = await self._open()
            try:
                ran = await self._session.run(program)
            except asyncio.CancelledError:  # a caller that is cancelled ends the sandbox, too
                await self.close()
                raise
            text = told(ran, (self._pool or local_pool()).limits)
            if ran.exit_code is None:  # the sandbox is gone
                await self.close()
                text += "; files and variables are lost"
        return shortened(text, self._longest)


class PythonTool(InterpreterTool):
    """`python`: cells of one Python session. Variables stay from call to call."""

    name = "python"
    argument = "code"
    description = "Run Python. Variables are kept between calls; prints and the last value are returned."

    def __init__(self, pool: SandboxPool | None = None, *, longest: int = LONGEST) -> None:
        super().__init__(pool, longest=longest)
        if pool is not None and not isinstance(pool, LocalPool):
            raise ConfigError(
                f"PythonTool: sessions of Python are on this host, not of a {type(pool).__name__}; take ShellTool"
            )
        self._local = pool

    async def _open(self) -> PythonSession:
        return await (self._local or local_pool()).open_python()


class ShellTool(InterpreterTool):
    """`shell`: bash commands. Files, folder and exported variables stay from call to call."""

    name = "shell"
    argument = "command"
    description = "Run a bash command. Files, the working folder and exported variables are kept between calls."

    async def _open(self) -> ShellSession:
        return ShellSession(await (self._pool or local_pool()).open())


def told(ran: ExecResult, limits: Limits) -> str:
    """What the policy reads of a result."""
    parts = [ran.stdout.rstrip("\n"), ran.stderr.rstrip("\n")]
    if ran.ended != "exited":
        parts.append(f"[stopped: {ending(ran, limits)}]")
    elif ran.exit_code and not ran.stderr:
        parts.append(f"[exit status {ran.exit_code}]")
    return "\n".join(filter(None, parts)) or "[no output]"


def ending(ran: ExecResult, limits: Limits) -> str:
    """Why a program was stopped."""
    return ENDINGS[ran.ended].format(limits=limits, memory=limits.memory >> 20, disk=limits.disk >> 20)


def shortened(text: str, longest: int) -> str:
    """A text without its middle, where it is longer."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters are left out]\n{text[-half:]}"
