"""One inference server over HTTP: calls and streams with deadlines and named errors.

Invariants:
- No retries. A server that refuses, resets or fails is an EngineError at once; the router tries another.
- A stream of a completion has a connection of its own, of aiohttp. All other calls share connections (`http_connection`): a push
  and a probe cost the learner and the supervisor a call for each replica, and with TLS a handshake costs more than the call.
- Every request carries the token that the client was given. A server with TLS is only talked to where its certificate is known, and
  only if it has that one.
- A server that sends nothing during a completion fails before the caller's own deadline, so that the completion can continue
  elsewhere. Its health route is no evidence: another process answers it than the one that computes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import urlencode

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from ...errors import DeadlineExceeded, EngineError, NoAnswer, with_deadline
from .access import ServerAccess
from .base import FalseReply, RequestRejected
from .http_connection import OK, BrokenExchange, HttpConnections, WrongCertificate

logger = logging.getLogger(__name__)

T = TypeVar("T")

KEEPALIVE_S = 3.0  # of an idle connection; servers keep it longer, lest a request meet a closing socket
PUSH_KEEPALIVE_S = (
    60.0  # of rank 0's, between two pushes: with TLS a new connection costs more than all calls of a push
)
SERVER_KEEPALIVE_S = 600  # the servers' default of 5 s is too near to `KEEPALIVE_S` on a busy machine
ABORT_S = 5.0  # longest wait for a server to confirm an abort; it takes milliseconds
# Longest wait for the first chunk of a stream, as a share of `request_s`: a request may queue, and the remaining time must
# suffice for another replica.
FIRST_SHARE = 0.5
# Longest wait for each chunk after the first, as a share of `request_s`. A decoding sequence sends one about every second; a swap
# and the recomputation of its KV delay it by seconds, for large models by many. Ending a stream too early costs one prefill.
IDLE_SHARE = 0.25
IDLE_LEAST_S = 5.0  # least such wait, in seconds
REFUSALS = (400, 413, 422)  # statuses of a wrong request. Others, such as 404, 429 or 503, are about the server.
LARGEST = 1e18  # value of a metric: more than any counter comes to
EVENT_LIMIT = 64 << 20  # bytes of one line of a stream: far above any chunk, far below what memory holds
HINT = "see the server's log; rollout.episode_s sets the deadlines"


class Disconnected(NoAnswer):
    """The connection broke before the answer was complete."""


class ServerUnresponsive(Disconnected):
    """The server accepted a request and sent nothing for too long."""


class ErrorStatus(EngineError):
    """The server answered with a status that is not 200."""


class HttpClient:
    """The server `name` at `url`, `http://host:port` or `https://host:port`. `request_s`: longest wait for an answer that has no
    deadline of its own. `access`: the token that the server wants, and its certificate. `keepalive_s`: how long an idle connection
    stays open."""

    def __init__(
        self,
        name: str,
        url: str,
        request_s: float,
        access: ServerAccess | None = None,
        *,
        keepalive_s: float = KEEPALIVE_S,
    ) -> None:
        self.name = name
        self.url = url.rstrip("/")
        self._keepalive_s = keepalive_s
        access = access or ServerAccess()
        self._headers = {"Content-Type": "application/json", **access.headers}
        self._connections = HttpConnections(self.url, self._headers, keepalive_s)
        self._certificate = access.certificate
        self.request_s = request_s
        self.first_s = max(IDLE_LEAST_S, FIRST_SHARE * request_s)
        self.idle_s = max(IDLE_LEAST_S, IDLE_SHARE * request_s)
        self._session: aiohttp.ClientSession | None = None
        self._aborts: dict[asyncio.Timeout, tuple[str, object]] = {}
        self._sending: set[asyncio.Future[None]] = set()

    def trust(self, certificate: str) -> None:
        """From now on talk only to a server with this certificate, its SHA-256 in hex; empty: it is not known."""
        if certificate != self._certificate:
            self._certificate = certificate
            self._connections.close()

    def keep_connections(self, seconds: float) -> None:
        """From now on connections of `call` stay open for so long while they are idle."""
        self._connections.keepalive_s = seconds

    async def close(self) -> None:
        """Close the connections. Requests within `aborting` end with Disconnected at once; their aborts are sent from here. The
        client may be used again afterwards."""
        aborts, self._aborts = self._aborts, {}
        for scope in aborts:
            scope.reschedule(0)  # cancels its block in the next turn of the loop
        await asyncio.gather(*self._sending, *(self._abort(path, body) for path, body in aborts.values()))
        self._connections.close()
        session, self._session = self._session, None
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
    ) -> bytes:
        """One request and its whole answer.

        Raises:
            RequestRejected: the server says that the request is wrong.
            EngineError: not reachable, or another answer that is not 200.
            DeadlineExceeded: no answer within `seconds`, by default `request_s`.
        """

        async def exchange() -> bytes:
            target = f"{path}?{urlencode(query)}" if query else path
            data = b"" if body is None else msgspec.json.encode(body)
            self._require_certificate()
            try:
                answer = await self._connections.exchange(method, target, data, self._certificate)
            except WrongCertificate as error:
                raise self._wrong_certificate() from error
            except BrokenExchange as error:
                raise self._broken(error) from error
            except OSError as error:
                raise self._unreachable(error) from error
            self._require_success(answer.status, answer.body, path)
            return answer.body

        return await self._within(seconds, exchange(), path)

    async def stream(self, path: str, body: object, on_event: Callable[[bytes], None]) -> None:
        """POST, and pass the data of each server-sent event to `on_event` until `[DONE]`. Raises as `call` and as `on_event`,
        Disconnected: the stream ended early, or nothing came for too long (`ServerUnresponsive`); FalseReply: an endless line."""

        async def exchange() -> None:
            done, rest, silence_s = False, b"", self.first_s
            clock = asyncio.get_running_loop().time
            try:
                async with (
                    asyncio.timeout(silence_s) as silence,
                    self._streamed(path, body) as response,
                ):
                    async for data in response.content.iter_any():
                        *lines, rest = (rest + data).split(b"\n")
                        if len(rest) > EVENT_LIMIT:
                            raise FalseReply(f"{self.name} at {self.url} sent a line of {len(rest)} bytes and more")
                        for line in lines:
                            event = line[5:].strip() if line.startswith(b"data:") else b""
                            done = done or event == b"[DONE]"
                            if event and not done:
                                silence_s = self.idle_s
                                silence.reschedule(clock() + silence_s)
                                on_event(event)
            except TimeoutError as error:
                raise ServerUnresponsive(
                    f"{self.name} at {self.url} has sent nothing of {path} for {silence_s:g} s; {HINT}"
                ) from error
            if not done:
                raise Disconnected(f"{self.name} at {self.url} ended the stream of {path} early")

        await self._within(None, exchange(), path)

    @asynccontextmanager
    async def aborting(self, path: str, body: object) -> AsyncIterator[None]:
        """A request that ends in this block by cancellation, deadline or silence is aborted: `body` is sent to `path`."""
        scope = asyncio.timeout(None)  # expired by `close`
        try:
            async with scope:
                self._aborts[scope] = path, body
                try:
                    yield
                finally:
                    self._aborts.pop(scope, None)
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise Disconnected(f"the client of {self.name} at {self.url} was closed") from error
        except (asyncio.CancelledError, DeadlineExceeded, ServerUnresponsive):
            sending = asyncio.ensure_future(self._abort(path, body))
            self._sending.add(sending)
            sending.add_done_callback(self._sending.discard)
            await asyncio.shield(sending)  # a second cancellation of the caller does not stop it
            raise

    async def _abort(self, path: str, body: object) -> None:
        try:
            await self.call("POST", path, body=body, seconds=ABORT_S)
        except (EngineError, DeadlineExceeded) as error:  # the caller has a better error, or was cancelled
            logger.warning("could not abort a request: %s", error)

    def decode(self, data: bytes, kind: type[T]) -> T:
        """JSON to a struct. Raises FalseReply."""
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise FalseReply(f"{self.name} at {self.url} answered something impossible: {error}") from error

    async def metrics(
        self, names: Sequence[str], labels: Mapping[str, str] | None = None, *, optional: Sequence[str] = ()
    ) -> dict[str, float]:
        """Values of these Prometheus samples, summed over all with `labels`; of `optional` ones where the server has them. Raises
        EngineError where another one is missing, FalseReply where one is no number."""
        values, asked = dict[str, float](), (*names, *optional)
        text = (await self.call("GET", "/metrics")).decode(errors="replace")
        # Parsing all histograms of a server is slow.
        wanted = [line for line in text.splitlines() if line.startswith(asked)]
        try:
            samples = [s for family in text_string_to_metric_families("\n".join(wanted) + "\n") for s in family.samples]
        except (ValueError, KeyError, IndexError) as error:  # what its parser raises
            raise FalseReply(f"{self.name} at {self.url}/metrics: no metrics: {error!r:.200}") from error
        for sample in samples:
            if sample.name in asked and (labels or {}).items() <= sample.labels.items():
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
        for name, value in values.items():
            if not abs(value) < LARGEST:
                raise FalseReply(f"{self.name} at {self.url}/metrics: {name} is {value}")
        for name in names:
            if name not in values:
                raise EngineError(f"{self.name} at {self.url}/metrics has no metric {name}")
        return values

    async def wait_for_answer(self, path: str, deadline_s: float) -> None:
        """Return as soon as a GET of `path` succeeds; DeadlineExceeded when it does not within `deadline_s`."""

        async def until_healthy() -> None:
            while True:
                try:
                    await self.call("GET", path, seconds=deadline_s)
                    return
                except EngineError:
                    await asyncio.sleep(0.1)  # there is no event for a foreign server that starts to listen

        await with_deadline(
            deadline_s, until_healthy(), who=self.name, waits_for="its server to start", hint="see its log"
        )

    @asynccontextmanager
    async def _streamed(self, path: str, body: object) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=self._keepalive_s)
            self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        self._require_certificate()
        pinned = aiohttp.Fingerprint(bytes.fromhex(self._certificate)) if self._certificate else True
        data = msgspec.json.encode(body)
        try:
            async with self._session.post(self.url + path, data=data, headers=self._headers, ssl=pinned) as response:
                if response.status != OK:
                    self._require_success(response.status, await response.read(), path)
                yield response
        except aiohttp.ServerFingerprintMismatch as error:
            raise self._wrong_certificate() from error
        except aiohttp.ClientConnectorError as error:
            raise self._unreachable(error) from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._broken(error) from error

    def _require_success(self, status: int, body: bytes, path: str) -> None:
        """Raises RequestRejected, ErrorStatus."""
        if status != OK:
            reason = body.decode(errors="replace").strip()[:500]
            kind = RequestRejected if status in REFUSALS else ErrorStatus
            raise kind(f"{self.name} at {self.url}{path} answered {status}: {reason}")

    def _require_certificate(self) -> None:
        """Raises EngineError."""
        if self.url.startswith("https:") and not self._certificate:
            raise EngineError(f"{self.name} at {self.url} has not said yet which certificate it has")

    def _wrong_certificate(self) -> EngineError:
        return EngineError(f"{self.name} at {self.url} has another certificate than this run's server")

    def _unreachable(self, error: Exception) -> EngineError:
        return EngineError(f"{self.name} at {self.url} is not reachable: {error}")

    def _broken(self, error: Exception) -> Disconnected:
        reason = str(error) or type(error).__name__
        return Disconnected(f"{self.name} at {self.url} broke the connection: {reason}")

    async def _within(self, seconds: float | None, exchange: Any, path: str) -> Any:
        return await with_deadline(
            seconds or self.request_s, exchange, who=self.name, waits_for=f"answer to {path}", hint=HINT
        )


async def is_healthy(client: HttpClient, path: str) -> bool | None:
    """True if a GET succeeds, False if the server answers with an error, None without an answer within the client's `request_s`.
    After a success the next call uses the same connection, after a failure another one."""
    try:
        await client.call("GET", path)
        return True
    except (ErrorStatus, RequestRejected):
        well = False
    except (EngineError, DeadlineExceeded):
        well = None
    await client.close()
    return well
