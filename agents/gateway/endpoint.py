"""The gateway's endpoint of one episode: the URL and key that its agent is given, and the calls that the agent makes there.

Invariants:
- A call runs in a task of its own: it outlives its client's connection, so that a retry of OpenAI's or Anthropic's
  client gets the same replies and nothing is sampled twice.
- Calls run in the context of the episode: tool calls that they make are attributed to it.
- After `close` no call runs, and none begins.
"""

from __future__ import annotations

import asyncio
import contextvars
import fnmatch
import hashlib
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec

from ...errors import PolicyError
from ..base import Reply
from ..session import Session
from .bodies import context_limit
from .dialect import SHOWN, CompletionRequest
from .mcp import EnvTools
from .request_queue import RequestQueue

log = logging.getLogger(__name__)

T = TypeVar("T")

WARNED = 100  # ignored fields that the log names: types of tools are the agent's text
_warned: set[str] = set()  # those that this process has warned of


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


class EpisodeCalls:
    """The calls of one episode. `trained` is the pattern of the model names whose replies have loss; at most `most_waiting`
    requests wait for their turn."""

    def __init__(self, session: Session, tools: EnvTools | None, trained: str, most_waiting: int) -> None:
        self.session = session
        self.tools = tools
        self.requests = RequestQueue(most_waiting)
        self.limit = context_limit(session.max_tokens)
        self._trained = trained
        self._context = contextvars.copy_context()
        self._running: set[asyncio.Task[Any]] = set()
        self._made: dict[bytes, asyncio.Task[tuple[Reply, ...]]] = {}
        self._closed = False

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
        self.requests.close()
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)
