"""What an episode's agent is given, and the calls that it has made.

Invariants:
- A call runs in a task of its own: it outlives its client's connection, so that a retry gets the same replies and nothing is
  sampled twice.
- Calls run in the context of the episode: tool calls that they make are attributed to it.
- After `close` no call runs, and none begins.
- At most `CALLS` requests of an episode are under way, with at most `BODIES` bytes. A request is under way until it is answered and
  its call has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import fnmatch
import hashlib
import logging
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import msgspec

from ...errors import PolicyError
from ..base import Reply
from ..session import Session
from .dialect import CompletionRequest
from .mcp import EnvTools

log = logging.getLogger(__name__)

T = TypeVar("T")

CALLS = 256  # requests of one episode that are under way; what their calls sample is bounded by the session
BODIES = 1 << 27  # bytes of their bodies
SHOWN = 80  # characters of an ignored field in the log
WARNED = 100  # ignored fields that the log names: types of tools are the agent's text
_warned: set[str] = set()  # those that this process has warned of


class CallFailure(msgspec.Struct, frozen=True):
    """Why a call has no replies, as a client is told: an HTTP status, one line, and OpenAI's code for it, or ""."""

    status: int
    message: str
    code: str = ""


class RefusedRequest(Exception):
    """A request that begins no call."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.failure = CallFailure(status, message, code)


class Endpoint(msgspec.Struct, frozen=True):
    """Where the agent of one episode finds its policy. Every URL works for this episode only, as long as it runs."""

    url: str  # base URL for OpenAI's and for Anthropic's clients
    key: str  # API key
    mcp: str  # URL of an MCP server (streamable HTTP) with the tools of the environment

    @property
    def environ(self) -> dict[str, str]:
        """The environment variables that clients and command-line agents read."""
        openai = f"{self.url}/v1"
        return {
            "OPENAI_BASE_URL": openai,
            "OPENAI_API_BASE": openai,
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.key,
            "ANTHROPIC_AUTH_TOKEN": self.key,
            "SLIPSTREAM_MCP_URL": self.mcp,
        }


class RequestRoom:
    """What a request takes of its episode's room: the bytes of its body that came, and its call once it has one."""

    def __init__(self, calls: EpisodeCalls) -> None:
        self.bytes = 0
        self.call: asyncio.Task[Any] | None = None
        self._calls = calls

    def hold(self, size: int) -> None:
        """So many bytes have come. Raises RefusedRequest."""
        self._calls.hold(size)
        self.bytes += size


class EpisodeCalls:
    """The calls of one episode. `trained` is the pattern of the model names whose replies have loss."""

    def __init__(self, session: Session, tools: EnvTools | None, trained: str) -> None:
        self.session = session
        self.tools = tools
        self._trained = trained
        self._context = contextvars.copy_context()
        self._running: set[asyncio.Task[Any]] = set()
        self._made: dict[bytes, asyncio.Task[tuple[Reply, ...]]] = {}
        self._requests = self._bytes = 0  # under way
        self._closed = False

    @contextlib.contextmanager
    def request(self) -> Iterator[RequestRoom]:
        """Around a request and its answer. Raises RefusedRequest: too many are under way."""
        if self._requests >= CALLS:
            raise RefusedRequest(
                429, f"the episode has {CALLS} calls under way, as many as it may", "rate_limit_exceeded"
            )
        self._requests += 1
        room = RequestRoom(self)
        try:
            yield room
        finally:
            if room.call is None or room.call.done():
                self._end(room)
            else:
                room.call.add_done_callback(lambda _: self._end(room))

    def hold(self, size: int) -> None:
        """Count bytes of a body. Raises RefusedRequest: those under way have too many."""
        if self._bytes + size > BODIES:
            why = f"the calls that the episode has under way would have more than {BODIES} bytes"
            raise RefusedRequest(429, why, "rate_limit_exceeded")
        self._bytes += size

    def _end(self, room: RequestRoom) -> None:
        self._requests -= 1
        self._bytes -= room.bytes

    def run(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Raises PolicyError where the episode is over."""
        if self._closed:
            work.close()
            raise PolicyError("the episode is over")
        task = asyncio.get_running_loop().create_task(work, context=self._context.copy())
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def complete(self, request: CompletionRequest, body: bytes, *, retried: bool) -> asyncio.Task[tuple[Reply, ...]]:
        """The replies to `request`, whose bytes are `body`; of the call that it repeats where it is `retried`."""
        digest = hashlib.blake2b(body, digest_size=16).digest()
        if retried and digest in self._made:
            return self._made[digest]
        for name in request.ignored:
            self._count_ignored(name)
        trained = fnmatch.fnmatchcase(request.model, self._trained)
        sample = msgspec.structs.replace(request.sample, trained=trained)
        task = self._made[digest] = self.run(self.session.sample(request.messages, request.tools, sample))
        return task

    def _count_ignored(self, name: str) -> None:
        metric = "ignored_tools" if name.startswith("tools.") else f"ignored_{name}"
        self.session.metrics[metric] = self.session.metrics.get(metric, 0.0) + 1
        shown = name[:SHOWN]
        if shown not in _warned and len(_warned) < WARNED:
            _warned.add(shown)
            log.warning("the agent sets %r, which is not followed: the run decides how its policy samples", shown)

    async def close(self) -> None:
        """Cancel what runs, and return when it has ended."""
        self._closed = True
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)
