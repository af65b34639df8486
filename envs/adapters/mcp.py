"""The tools of an MCP server, with tasks and a reward from the user's own data.

Invariants:
- Each episode has a session of its own: a process that it starts (`command`), or a connection over HTTP (`url`). It ends with the
  episode, whatever happened.
- A result that the server marks as an error is told to the policy. An error of the protocol, a lost connection, a call beyond its
  deadline and a server that does not start are failures of the tool.
- The session lives in a task of its own: the library's connections must be closed where they were opened, and an episode is closed
  in another task than it began in.
- A message without a call is the answer; the data set's reward scores it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from ...common.libraries import load_library
from ...configs.environments import Mcp
from ...errors import ConfigError, ToolError, describe
from ..base import JSON, Message, Observation, StepResult, Task, ToolSpec
from ..dataset.source import DatasetSource
from ..simple import Split
from ..tools import InvalidCall, Tool, ToolUse

START_S = 60.0  # until a server has answered for the first time and named its tools
CLOSE_S = 10.0  # until a session has ended; after that its task is cancelled, which kills its process


class McpEnv(DatasetSource):
    """A row of a data set, answered with tools."""

    def __init__(self, config: Mcp, split: Split, seed: int, key: str = "env") -> None:
        """Raises ConfigError as `DatasetSource`, and where mcp is not installed, or the command is no program."""
        if bool(config.command) == bool(config.url):
            raise ConfigError(f"{key}: set either command or url of the MCP server")
        self._library = load_library(f"{key}.kind: mcp", "mcp", "envs")
        if config.command and found(config.command[0]) is None:
            raise ConfigError(f"{key}.command: there is no program {config.command[0]!r} on the PATH")
        super().__init__(config, split, seed, key)
        self._server = config
        self._session: McpSession | None = None

    async def reset(self, task: Task) -> Observation:
        opening = await super().reset(task)
        self._turns, self._session = 0, McpSession(self._server)
        tools = await self._session.open()
        self._use = ToolUse(tools)
        return Observation(opening.messages, tuple(tool.spec for tool in tools.values()))

    async def step(self, message: Message) -> StepResult:
        self._turns += 1
        if not (message.malformed or message.tool_calls):
            result = await super().step(message)
            return StepResult((), result.reward, done=True, metrics=self._use.metrics | result.metrics)
        replies = await self._use.answers(message)
        over = self._turns >= self._server.max_turns
        return StepResult(replies, done=over, truncated=over, metrics=self._use.metrics)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


class McpSession:
    """A connection to an MCP server, from `open` to `close`."""

    def __init__(self, server: Mcp) -> None:
        self._server = server
        self._name = " ".join(server.command) or server.url
        self._over = asyncio.Event()
        self._client: Any = None
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> dict[str, Tool]:
        """Connect, and return the server's tools. Raises ToolError: it does not start, or does not name them."""
        ready: asyncio.Future[dict[str, Tool]] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._live(ready), name=f"MCP session of {self._name}")
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())  # `ready` has its error
        try:
            async with asyncio.timeout(START_S):
                return await ready
        except TimeoutError:
            raise ToolError(f"the MCP server {self._name} named no tools within {START_S:g} s") from None

    async def _live(self, ready: asyncio.Future[dict[str, Tool]]) -> None:
        try:
            async with self._connect() as client:
                self._client = client
                tools = await self._list()
                if not ready.done():
                    ready.set_result(tools)
                await self._over.wait()
        except (Exception, asyncio.CancelledError) as error:
            if ready.done():
                raise
            cause = _innermost(error)
            ready.set_exception(ToolError(f"the MCP server {self._name} cannot be used: {describe(cause)}"))

    def _connect(self) -> Any:
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client

        if self._server.url:
            return Client(self._server.url)
        command, *arguments = self._server.command
        started = StdioServerParameters(command=found(command) or command, args=arguments, env=dict(os.environ))
        return Client(stdio_client(started))

    async def _list(self) -> dict[str, Tool]:
        tools: dict[str, Tool] = {}
        cursor: str | None = None
        while True:
            page = await self._client.list_tools(cursor=cursor)
            for tool in page.tools:
                schema = dict(tool.input_schema or {"type": "object", "properties": {}})
                tools[tool.name] = Tool(ToolSpec(tool.name, tool.description or "", schema), self._caller(tool.name))
            cursor = page.next_cursor
            if not cursor:
                return tools

    def _caller(self, name: str) -> Any:
        async def run(arguments: JSON) -> str:
            result = await self._client.call_tool(name, arguments)
            text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)
            if result.is_error:
                raise InvalidCall(text)
            return text

        return run

    async def close(self) -> None:
        """End the session, and with it the server's process where it has one."""
        self._over.set()
        if self._task is None:
            return
        _, running = await asyncio.wait({self._task}, timeout=CLOSE_S)
        if running:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=CLOSE_S)


def _innermost(error: BaseException) -> BaseException:
    """The first error in groups of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def found(program: str) -> str | None:
    """Where a program is: beside the interpreter that runs this, as if its environment were activated, or on the PATH."""
    return shutil.which(program, path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))
