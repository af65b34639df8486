"""Connections for whole answers: the parser is tried with every cut, the connections with real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from slipstream.errors import DeadlineExceeded, EngineError
from slipstream.rollout.engines import http_connection
from slipstream.rollout.engines.base import RequestRejected
from slipstream.rollout.engines.http_client import Disconnected, ErrorStatus, HttpClient
from slipstream.rollout.engines.http_connection import AnswerParser, HttpAnswer, HttpConnection

SOON = 60.0
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
PLAIN = HEAD + b"Content-Length: 5\r\n\r\nhello"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\n"

WHOLE = {
    "length": (PLAIN, HttpAnswer(200, b"hello", False)),
    "nothing": (b"HTTP/1.1 200 OK\r\nCONTENT-LENGTH:0\r\n\r\n", HttpAnswer(200, b"", False)),
    "chunks": (CHUNKED + b"\r\n", HttpAnswer(200, b"hello", False)),
    "trailers": (CHUNKED + b"a: b\r\nc: d\r\n\r\n", HttpAnswer(200, b"hello", False)),
    "last": (HEAD + b"Connection: Close\r\nContent-Length: 1\r\n\r\n!", HttpAnswer(200, b"!", True)),
    "old": (b"HTTP/1.0 503 no\r\nContent-Length: 0\r\n\r\n", HttpAnswer(503, b"", True)),
    "empty": (b"HTTP/1.1 204\r\n\r\n", HttpAnswer(204, b"", False)),
}

HALF = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"

IMPOSSIBLE = {
    "another protocol": (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "no status in"),
    "no status": (b"HTTP/1.1 OK\r\n\r\n", "no status in"),
    "a status before another": (b"HTTP/1.1 101 Switching\r\n\r\n", "no status in"),
    "a length that is none": (HEAD + b"Content-Length: -5\r\n\r\n", "a length of b'-5'"),
    "a length of many digits": (HEAD + b"Content-Length: " + b"9" * 50_000 + b"\r\n\r\n", "a length of b'9999"),
    "another encoding": (HEAD + b"Transfer-Encoding: gzip\r\n\r\n", "transfer encoding b'gzip'"),
    "a chunk that is none": (HALF + b"x\r\n", "invalid literal"),
    "a chunk below nothing": (HALF + b"-1\r\n", "a chunk of -1 bytes"),
    "a chunk beyond memory": (HALF + b"ffffffffff\r\n", "a chunk of 1099511627775 bytes"),
    "a longer chunk": (HALF + b"2\r\nhello\r\n", "longer than it says"),
    "an endless head": (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20_000, "a head of more than"),
    "an endless length": (HALF + b"0" * 100_000, "length of more than"),
    "endless trailers": (CHUNKED + b"a: b\r\n" * 20_000, "headers of more than"),
}


@pytest.mark.parametrize(("data", "answer"), WHOLE.values(), ids=WHOLE)
def test_an_answer_is_the_same_however_it_is_cut(data: bytes, answer: HttpAnswer) -> None:
    assert AnswerParser().feed(data) == answer
    for cut in range(1, len(data)):
        parser = AnswerParser()
        assert parser.feed(data[:cut]) is None
        assert parser.feed(data[cut:]) == answer
    parser = AnswerParser()
    *early, last = [parser.feed(data[i : i + 1]) for i in range(len(data))]
    assert (set(early), last) == ({None}, answer)


def test_an_answer_may_end_with_its_connection() -> None:
    parser = AnswerParser()
    assert (parser.end(), parser.feed(HEAD + b"\r\nhel"), parser.feed(b"lo")) == (None, None, None)
    assert parser.end() == HttpAnswer(200, b"hello", True)
    for cut_off in (PLAIN[:-1], CHUNKED, HEAD):
        parser = AnswerParser()
        assert (parser.feed(cut_off), parser.end()) == (None, None)


@pytest.mark.parametrize(("data", "why"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
@pytest.mark.parametrize("size", [1 << 20, 1000])
def test_what_is_no_answer_is_refused(data: bytes, why: str, size: int) -> None:
    def feed() -> None:
        parser = AnswerParser()
        for i in range(0, len(data), size):
            parser.feed(data[i : i + size])

    with pytest.raises(ValueError, match=why):
        feed()


def test_a_body_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "BODY_BYTES", 4)
    for data in (PLAIN, CHUNKED, HEAD + b"\r\nhello"):
        with pytest.raises(ValueError, match=r"body|chunk"):
            AnswerParser().feed(data)


# --- connections --------------------------------------------------------------------------------------------------

Respond = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


class Server:
    """Gives each request, head and body, to `respond`."""

    def __init__(self, respond: Respond) -> None:
        self.respond = respond
        self.connections = 0
        self.open = 0
        self.closed = asyncio.Event()  # a connection has ended

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                await self.respond(head + await reader.readexactly(length), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1
            self.closed.set()
            writer.close()


@contextlib.asynccontextmanager
async def serving(respond: Respond, keepalive_s: float = SOON) -> AsyncIterator[tuple[Server, HttpClient]]:
    one = Server(respond)
    server = await asyncio.start_server(one.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = HttpClient("it", f"http://127.0.0.1:{port}/base/", SOON, keepalive_s=keepalive_s)
    try:
        async with asyncio.timeout(SOON):
            yield one, client
    finally:
        await client.close()
        server.close()


async def greet(request: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(PLAIN)


async def test_calls_share_a_connection_and_calls_at_the_same_time_do_not() -> None:
    asked = list[bytes]()

    async def remember(request: bytes, writer: asyncio.StreamWriter) -> None:
        asked.append(request)
        writer.write(PLAIN)

    async with serving(remember) as (server, client):
        assert await client.call("GET", "/health") == b"hello"
        assert await client.call("POST", "/pause", {"mode": "keep it"}, body={"a": [1]}) == b"hello"
        assert server.connections == 1
        assert asked[0].startswith(b"GET /base/health HTTP/1.1\r\nHost: 127.0.0.1:")
        assert asked[1].startswith(b"POST /base/pause?mode=keep+it HTTP/1.1\r\n")
        assert asked[1].endswith(b'Content-Type: application/json\r\nContent-Length: 9\r\n\r\n{"a":[1]}')
        await asyncio.gather(*(client.call("GET", "/health") for _ in range(3)))
        assert server.connections == 3
        await client.close()
        while server.open:
            await server.closed.wait()
            server.closed.clear()
        assert await client.call("GET", "/health") == b"hello"  # it may be used again


async def test_a_connection_that_is_in_use_when_all_are_closed_is_not_kept() -> None:
    asked, answered = asyncio.Event(), asyncio.Event()

    async def wait(request: bytes, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await answered.wait()
        writer.write(PLAIN)

    async with serving(wait) as (server, client):
        calling = asyncio.create_task(client.call("GET", "/health"))
        await asked.wait()
        await client.close()
        answered.set()
        assert await calling == b"hello"
        await server.closed.wait()
        assert await client.call("GET", "/health") == b"hello"  # after it one is kept again
        assert await client.call("GET", "/health") == b"hello"
        assert server.connections == 2


def test_a_connection_that_the_server_ends_is_not_open() -> None:
    connection = HttpConnection()
    connection.eof_received()  # the transport calls `connection_lost` later
    assert not connection.open


async def test_an_idle_connection_is_closed() -> None:
    async with serving(greet, keepalive_s=0.05) as (server, client):
        await client.call("GET", "/health")
        await server.closed.wait()
        await client.call("GET", "/health")
        assert server.connections == 2


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 503 busy\r\nContent-Length: 2\r\n\r\nno", ErrorStatus),
        (b"HTTP/1.1 400 bad\r\nContent-Length: 2\r\n\r\nno", RequestRejected),
        (b"HTTP/1.1 302 there\r\nLocation: http://127.0.0.1:1\r\nContent-Length: 0\r\n\r\n", ErrorStatus),
        (HEAD + b"Connection: close\r\nContent-Length: 0\r\n\r\n", None),
        (b"nonsense\r\n\r\n", Disconnected),
    ],
    ids=["fails", "refuses", "redirects", "says that it is the last", "sends nonsense"],
)
async def test_after_some_answers_there_is_a_new_connection(answer: bytes, error: type[Exception] | None) -> None:
    async def respond(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(PLAIN if b"/health" in request else answer)

    async with serving(respond) as (server, client):
        await client.call("GET", "/health")
        with pytest.raises(error, match="it at http") if error else contextlib.nullcontext():
            await client.call("POST", "/other")
        assert await client.call("GET", "/health") == b"hello"
        assert server.connections == 2


async def test_a_connection_that_the_server_closed_is_not_used() -> None:
    async def once(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(PLAIN)
        await writer.drain()
        writer.close()

    async with serving(once) as (server, client):
        for number in range(1, 4):
            assert await client.call("GET", "/health") == b"hello"
            assert server.connections == number
            await server.closed.wait()
            server.closed.clear()
            await asyncio.sleep(0.05)  # its end arrives


async def test_an_answer_that_is_cut_off_is_an_error_and_nothing_is_sent_twice() -> None:
    asked = list[bytes]()

    async def cut(request: bytes, writer: asyncio.StreamWriter) -> None:
        asked.append(request)
        writer.write(PLAIN[:-2])
        await writer.drain()
        writer.close()

    async with serving(cut) as (_, client):
        with pytest.raises(Disconnected, match="it ended before the answer did"):
            await client.call("POST", "/swap")
        assert len(asked) == 1


async def test_a_call_that_is_late_or_cancelled_closes_its_connection() -> None:
    async def never(request: bytes, writer: asyncio.StreamWriter) -> None:
        if b"/health" in request:
            writer.write(PLAIN)

    async with serving(never) as (server, client):
        await client.call("GET", "/health")
        with pytest.raises(DeadlineExceeded, match="answer to /never"):
            await client.call("GET", "/never", seconds=0.05)
        await server.closed.wait()
        server.closed.clear()
        calling = asyncio.create_task(client.call("GET", "/never"))
        while server.connections < 2:  # noqa: ASYNC110 - the server sets no event for a client that has come
            await asyncio.sleep(0.01)
        calling.cancel()
        await server.closed.wait()
        assert server.open == 0
        assert await client.call("GET", "/health") == b"hello"


async def test_a_server_that_is_not_there() -> None:
    async with serving(greet) as (_, client):
        url = client.url
    client = HttpClient("it", url, SOON)
    with pytest.raises(EngineError, match=r"it at http://127.0.0.1:.* is not reachable: ") as caught:
        await client.call("GET", "/health")
    assert not isinstance(caught.value, Disconnected)
