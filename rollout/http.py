"""One inference server over HTTP: calls and streams with deadlines and named errors.

Invariants:
- Nothing is tried twice here. A server that refuses, resets or fails is an EngineError at once; the router tries another.
- A server that falls silent in the middle of a completion is given up before the caller's own deadline: what has arrived must be
  able to go on elsewhere. Its health says nothing: that is answered by another process than the one that computes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from ..errors import DeadlineExceeded, EngineError, NoAnswer, within
from .engine import Refused

logger = logging.getLogger(__name__)

T = TypeVar("T")

KEEPALIVE_S = 3.0
"""How long an idle connection is kept for the next request. A server must keep it longer, also on a busy machine: a request must
not meet a closing socket."""

SERVER_KEEPALIVE_S = 600
"""How long servers that we start keep an idle connection; their own 5 s are too near to ours when processes stall for seconds."""

ABORT_S = 5.0
"""Longest wait for a server to confirm an abort; it takes milliseconds."""

FIRST_SHARE = 0.5
"""Longest wait for the first chunk of a stream, as a share of `request_s`: a request may queue, and there must be time to be
served by another replica when it queues for nothing."""

IDLE_SHARE = 0.25
"""Longest wait for each chunk after the first, as a share of `request_s`. A sequence that decodes sends one every second or so; it
stands still while weights are swapped, and while it waits to have its KV computed anew: seconds, for large models many. One that is
given up too early loses no token, only its prefill."""

IDLE_LEAST_S = 5.0
"""Least such wait, in seconds: under a shorter `request_s` that is the only limit."""

REFUSALS = (400, 413, 422)
"""Statuses by which a server says that the request itself is wrong. Others, such as 404, 429 or 503, are about the server."""

HINT = "see the server's log; rollout.request_s and weightsync.push_s set the deadlines"


class Disconnected(NoAnswer):
    """The server took a request and the connection broke before its answer was whole."""


class Silent(Disconnected):
    """The server took a request and sent nothing for so long that nobody waits any more."""


class Server:
    """The server `name` at `url`, `http://host:port`. `request_s`: longest wait for an answer that has no deadline of its own."""

    def __init__(self, name: str, url: str, request_s: float) -> None:
        self.name = name
        self.url = url.rstrip("/")
        self.request_s = request_s
        self.first_s = max(IDLE_LEAST_S, FIRST_SHARE * request_s)
        self.idle_s = max(IDLE_LEAST_S, IDLE_SHARE * request_s)
        self._opened: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close the connections. The client may be used again afterwards."""
        session, self._opened = self._opened, None
        if session is not None:
            await session.close()

    async def call(
        self,
        method: str,
        path: str,
        query: dict[str, str] | None = None,
        *,
        body: object = None,
        seconds: float | None = None,
        reuse: bool = False,
    ) -> bytes:
        """One request and its whole answer. Without `reuse` on a connection of its own: after an error a server closes the one
        it came on.

        Raises:
            Refused: the server says that the request is wrong.
            EngineError: not reachable, or another answer that is not 200.
            DeadlineExceeded: no answer within `seconds`, by default `request_s`.
        """

        async def exchange() -> bytes:
            async with self._request(method, path, query, body, reuse) as response:
                return await response.read()

        return await self._within(seconds, exchange(), path)

    async def stream(
        self, path: str, body: object, take: Callable[[bytes], None], *, seconds: float | None = None
    ) -> None:
        """POST, and hand the data of each server-sent event to `take` until `[DONE]`.

        Raises:
            Disconnected: the server took the request, and the stream ended early, or fell silent (`Silent`).
            Refused: the server says that the request is wrong.
            EngineError: not reachable, or another answer that is not 200; and whatever `take` raises.
            DeadlineExceeded: the stream did not end within `seconds`, by default `request_s`.
        """

        async def exchange() -> None:
            done, rest, patience = False, b"", self.first_s
            clock = asyncio.get_running_loop().time
            try:
                async with (
                    asyncio.timeout(patience) as silence,
                    self._request("POST", path, None, body, reuse=True) as response,
                ):
                    async for data in response.content.iter_any():
                        *lines, rest = (rest + data).split(b"\n")
                        for line in lines:
                            event = line[5:].strip() if line.startswith(b"data:") else b""
                            done = done or event == b"[DONE]"
                            if event and not done:
                                patience = self.idle_s
                                silence.reschedule(clock() + patience)
                                take(event)
            except TimeoutError as error:
                raise Silent(
                    f"{self.name} at {self.url} has sent nothing of {path} for {patience:g} s; {HINT}"
                ) from error
            if not done:
                raise Disconnected(f"{self.name} at {self.url} ended the stream of {path} early")

        await self._within(seconds, exchange(), path)

    @asynccontextmanager
    async def aborting(self, path: str, body: object) -> AsyncIterator[None]:
        """A request that is cancelled, late or silent in this block no longer runs on the server after it: `body` is sent to
        `path`, which aborts it."""
        try:
            yield
        except (asyncio.CancelledError, DeadlineExceeded, Silent):
            try:
                await self.call("POST", path, body=body, seconds=ABORT_S)
            except (EngineError, DeadlineExceeded) as error:  # the caller already has a better one, or was cancelled
                logger.warning("could not abort a request: %s", error)
            raise

    def decode(self, data: bytes, kind: type[T]) -> T:
        """JSON to a struct. Raises EngineError."""
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise EngineError(f"{self.name} at {self.url} answered something impossible: {error}") from error

    async def metrics(
        self, names: Iterable[str], labels: Mapping[str, str] | None = None, path: str = "/metrics"
    ) -> dict[str, float]:
        """Values of these Prometheus samples, added up over all that carry `labels`. Raises EngineError where there is none."""
        values: dict[str, float | None] = dict.fromkeys(names)
        text = (await self.call("GET", path, reuse=True)).decode()
        # Parsing all of a server's histograms takes longer than everything else here.
        wanted = [line for line in text.splitlines() if line.startswith(tuple(values))]
        for family in text_string_to_metric_families("\n".join(wanted) + "\n"):
            for sample in family.samples:
                if sample.name in values and (labels or {}).items() <= sample.labels.items():
                    values[sample.name] = (values[sample.name] or 0.0) + sample.value
        for name, value in values.items():
            if value is None:
                raise EngineError(f"{self.name} at {self.url}{path} has no metric {name}")
        return {name: value or 0.0 for name, value in values.items()}

    async def answers(self, path: str, deadline_s: float) -> None:
        """Return as soon as a GET of `path` succeeds; DeadlineExceeded when it does not within `deadline_s`."""

        async def until_healthy() -> None:
            while True:
                try:
                    await self.call("GET", path, seconds=deadline_s)
                    return
                except EngineError:
                    await asyncio.sleep(0.1)  # nothing tells us when a foreign server starts to listen

        await within(deadline_s, until_healthy(), who=self.name, waits_for="its server to start", hint="see its log")

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, query: dict[str, str] | None, body: object, reuse: bool
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = {"Content-Type": "application/json"} | ({} if reuse else {"Connection": "close"})
        data = msgspec.json.encode(body) if body is not None else None
        try:
            async with self._session().request(
                method, self.url + path, params=query, data=data, headers=headers
            ) as response:
                if response.status != 200:
                    reason = (await response.read()).decode(errors="replace").strip()[:500]
                    kind = Refused if response.status in REFUSALS else EngineError
                    raise kind(f"{self.name} at {self.url}{path} answered {response.status}: {reason}")
                yield response
        except aiohttp.ClientConnectorError as error:
            raise EngineError(f"{self.name} at {self.url} is not reachable: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise Disconnected(f"{self.name} at {self.url} broke the connection: {reason}") from error

    async def _within(self, seconds: float | None, exchange: Any, path: str) -> Any:
        return await within(
            seconds or self.request_s, exchange, who=self.name, waits_for=f"answer to {path}", hint=HINT
        )

    def _session(self) -> aiohttp.ClientSession:
        if self._opened is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
            self._opened = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        return self._opened
