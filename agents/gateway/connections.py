"""The connections of a gateway: how many are open, and for how long.

Invariants:
- At most `limit` are open. One more closes the idle one that has been idle longest, of those that have had no request of an episode
  if there are some; where none is idle it is refused by a 503.
- A connection that is idle for `IDLE_S` is closed, whether or not the head of a request has begun.
- An episode keeps at most `IDLE` connections between its requests: the answer to a request that would leave one more closes it.
- An episode has at most `share` connections with a request that is not answered, or whose answer the client has not taken.
- A client that does not take an answer within `ANSWER_S` loses its connection.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections import Counter

from aiohttp import web

from ...common.waits import Overdue, within

log = logging.getLogger(__name__)

MOST = 4096  # connections of one gateway, or half of the files that the process may open where those are fewer
IDLE = 128  # of one episode between its requests; OpenAI's and Anthropic's clients keep up to 100
IDLE_S = 75.0  # of silence: clients give up idle connections after 5 to 15 s
ANSWER_S = 60.0  # to take an answer
REFUSING, REFUSING_S = 128, 1.0  # connections that are refused at the same time, and how long each may take to read it
FULL = (
    b'{"error": {"message": "the gateway has %d connections open, as many as it may", "code": "too_many_connections"}}'
)


def open_limit() -> int:
    """How many connections a gateway of this process may have; the process may open twice as many files from here on, as far as its
    hard limit lets it."""

    def capped(files: int) -> int:
        return 2 * MOST if files == resource.RLIM_INFINITY else min(2 * MOST, files)

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if capped(soft) < capped(hard):
        resource.setrlimit(resource.RLIMIT_NOFILE, (capped(hard), hard))
    return capped(hard) // 2


class Connections:
    """Makes the protocol of every connection that `server` accepts, at most `limit` at a time."""

    def __init__(self, server: web.Server, limit: int) -> None:
        self.limit = limit
        self._server = server
        self._open: set[GatewayConnection] = set()
        self._unasked: dict[GatewayConnection, None] = {}  # those without a request of an episode; oldest first
        self._idle: dict[GatewayConnection, None] = {}  # those with a request behind them; idle for longest first
        self._kept_of: Counter[str] = Counter()  # connections that are idle, or will be once their answer is written
        self._busy_of: Counter[str] = Counter()  # connections with a request, until the client has taken its answer
        self._refusing: set[RefusedConnection] = set()
        self._refused = 0

    def __call__(self) -> asyncio.BaseProtocol:
        """The protocol of a new connection: a factory for asyncio's servers."""
        if len(self._open) >= self.limit:
            if (victim := next(iter(self._unasked or self._idle), None)) is None:
                self._count_refused()
                return RefusedConnection(self.limit, self._refusing)
            victim.force_close()
            self.forget(victim)
        connection = GatewayConnection(self, self._server)
        self._open.add(connection)
        self._unasked[connection] = None
        return connection

    def has(self, connection: GatewayConnection) -> bool:
        """Whether it may be open."""
        return connection in self._open

    @property
    def share(self) -> int:
        """How many of one episode may have a request."""
        return self.limit // 2

    def asked(self, connection: GatewayConnection, episode: str) -> None:
        """A request of the episode with this key has begun."""
        self._leave(connection)
        connection.episode, connection.busy = episode, True
        self._busy_of[episode] += 1

    def is_beyond_share(self, connection: GatewayConnection) -> bool:
        """Whether its episode has too many with a request."""
        return self._busy_of[connection.episode] > self.share

    def keep(self, connection: GatewayConnection) -> bool:
        """Whether it is to stay open after the answer to the request that it has now; it counts as idle from here on."""
        may_stay = connection in self._open and connection.episode and self._kept_of[connection.episode] < IDLE
        if may_stay and not connection.kept:
            connection.kept = True
            self._kept_of[connection.episode] += 1
        return connection.kept

    def answered(self, connection: GatewayConnection) -> None:
        """It has no request now."""
        self._end_request(connection)
        if connection in self._open and connection.kept:
            self._idle[connection] = None

    def forget(self, connection: GatewayConnection) -> None:
        self._leave(connection)
        self._open.discard(connection)

    def _leave(self, connection: GatewayConnection) -> None:
        self._unasked.pop(connection, None)
        self._end_request(connection)
        self._idle.pop(connection, None)
        if connection.kept:
            connection.kept = False
            _count_down(self._kept_of, connection.episode)

    def _end_request(self, connection: GatewayConnection) -> None:
        if connection.busy:
            connection.busy = False
            _count_down(self._busy_of, connection.episode)

    def _count_refused(self) -> None:
        self._refused += 1
        if self._refused & (self._refused - 1) == 0:  # 1, 2, 4, 8, ...: a program that tries all the time fills no log
            log.warning(
                "refused %d connections of agents: %d are open, as many as may be, and none is idle",
                self._refused, self.limit,
            )  # fmt: skip


def _count_down(of: Counter[str], episode: str) -> None:
    """One connection fewer; an episode that has none left is not kept."""
    of[episode] -= 1
    if not of[episode]:
        del of[episode]


class GatewayConnection(web.RequestHandler):
    """One connection. `episode` is the key of its newest request, "" before that; it is `busy` while it has one, and `kept` where
    it stays open after that; `ending` where its client has sent what cannot be read. `gone` ends with the connection."""

    __slots__ = ("_connections", "busy", "ending", "episode", "gone", "kept")

    def __init__(self, connections: Connections, server: web.Server) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(server, loop=loop, access_log=None, keepalive_timeout=IDLE_S)  # type: ignore[arg-type]
        self._connections = connections
        self.episode, self.busy, self.kept, self.ending = "", False, False, False
        self.gone: asyncio.Future[None] = loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if not self._connections.has(self):  # it was closed before it began
            self.force_close()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.forget(self)
        if not self.gone.done():
            self.gone.set_result(None)
        super().connection_lost(exc)

    def force_close(self) -> None:
        """At once: `close` alone would wait until the client has taken what was written."""
        transport = self.transport
        super().force_close()
        if transport is not None:
            transport.abort()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if self.ending or not self._connections.keep(self):
            resp.force_close()
        try:
            return await within(ANSWER_S, super().finish_response(request, resp, start_time))
        except Overdue:
            self.force_close()
            return resp, True
        finally:
            self._connections.answered(self)


class RefusedConnection(asyncio.Protocol):
    """Says that there are `limit` connections, and closes once the client has closed, so that it reads this; of `others` that do so
    there are at most `REFUSING`."""

    def __init__(self, limit: int, others: set[RefusedConnection]) -> None:
        self._limit = limit
        self._others = others

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        if len(self._others) >= REFUSING:
            transport.abort()
            return
        self._others.add(self)
        self._deadline = asyncio.get_running_loop().call_later(REFUSING_S, transport.abort)
        body = FULL % self._limit
        head = f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        transport.write(f"{head}Retry-After: 1\r\nConnection: close\r\n\r\n".encode() + body)
        transport.write_eof()

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self._others:
            self._others.discard(self)
            self._deadline.cancel()
