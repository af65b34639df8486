"""The gateway's MCP server, which offers the tools of an episode's environment (https://modelcontextprotocol.io, streamable HTTP
with JSON responses).

Invariants:
- A call of a tool is a step of the environment, whose reward counts; an environment takes one step at a time.
- What the environment tells the policy, wrong calls included, is the tool's result. A failure of the environment is an error of the
  protocol; the episode fails by it whatever the agent does then. An image that a tool shows is an error, too, by the policy.
- No state between requests but the environment's: there are no sessions, streams or notifications.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import msgspec

from ... import __version__
from ...envs.base import JSON, Environment, Message, ToolCall, ToolSpec
from ...errors import EnvError, PolicyError, ToolError

VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")  # of the protocol, the newest first
OVER = "the episode is over"

# JSON-RPC's error codes
NOT_JSON, NOT_A_REQUEST, NO_METHOD, WRONG_PARAMETERS, FAILED = -32700, -32600, -32601, -32602, -32603


class _Parameters(msgspec.Struct):
    name: str = ""
    arguments: JSON | None = None
    protocol_version: str = msgspec.field(name="protocolVersion", default="")


class _RpcRequest(msgspec.Struct):
    method: str = ""  # "" in an answer of the client
    id: str | int | None = None  # none in a notification
    params: _Parameters | None = None


class EnvTools:
    """The tools `specs` of `env`, which was reset. `done` once a step has ended the episode."""

    def __init__(self, env: Environment, specs: Sequence[ToolSpec]) -> None:
        self.done = False
        self._refused: PolicyError | None = None
        self._env = env
        self._specs = specs
        self._step = asyncio.Lock()
        self._numbers = itertools.count(1)

    async def answer(self, body: bytes) -> JSON | None:
        """The answer to a JSON-RPC request; None for a notification."""
        try:
            request = msgspec.json.decode(body, type=_RpcRequest)
        except msgspec.ValidationError as error:
            return _error(None, NOT_A_REQUEST, f"this is no JSON-RPC request: {error}")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return _error(None, NOT_JSON, f"this is no JSON: {error}")
        if request.id is None or not request.method:
            return None
        parameters = request.params or _Parameters()
        match request.method:
            case "initialize":
                result = _server(parameters.protocol_version)
            case "ping":
                result = {}
            case "tools/list":
                result = {"tools": [_described(spec) for spec in self._specs]}
            case "tools/call" if not parameters.name:
                return _error(request.id, WRONG_PARAMETERS, "tools/call needs the name of a tool")
            case "tools/call":
                try:
                    result = await self._call(parameters.name, parameters.arguments or {})
                except (ToolError, EnvError, PolicyError) as error:
                    return _error(request.id, FAILED, f"{type(error).__name__}: {error}")
            case _:
                return _error(request.id, NO_METHOD, f"there is no method {request.method!r} here")
        return {"jsonrpc": "2.0", "id": request.id, "result": result}

    def check(self) -> None:
        """Raises PolicyError where a tool has shown an image, which the agent was not given."""
        if self._refused is not None:
            raise self._refused

    async def _call(self, name: str, arguments: JSON) -> JSON:
        if name not in (names := [spec.name for spec in self._specs]):  # no step: it could pass for an answer
            return _result(f"error: there is no tool {name!r}; use {', '.join(names) or 'none'}", is_error=True)
        async with self._step:
            if self.done:
                return _result(OVER, is_error=True)
            call = ToolCall(name, arguments, f"mcp-{next(self._numbers)}")
            step = await self._env.step(Message("assistant", "", (call,)))
            self.done = step.done
        if any(message.images for message in step.messages):
            self._refused = PolicyError(
                f"{name} shows an image, which agents written elsewhere are not given; see agent.kind"
            )
            raise self._refused
        text = "\n".join(message.content for message in step.messages) or (OVER if step.done else "")
        return _result(text, is_error=text.startswith("error:"))  # as `call_tool` begins what a wrong call is told


def _server(version: str) -> JSON:
    return {
        "protocolVersion": version if version in VERSIONS else VERSIONS[0],
        "capabilities": {"tools": {}},
        "serverInfo": {"name": "slipstream", "version": __version__},
    }


def _described(spec: ToolSpec) -> JSON:
    return {"name": spec.name, "description": spec.description, "inputSchema": spec.parameters or {"type": "object"}}


def _result(text: str, *, is_error: bool) -> JSON:
    return {"content": [{"type": "text", "text": text}], "isError": is_error}


def _error(request_id: str | int | None, code: int, message: str) -> JSON:
    return {"jsonrpc": "2.0", "id": request_id, "error": {"code": code, "message": message}}
