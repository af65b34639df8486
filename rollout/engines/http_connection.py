"""Connections to one HTTP/1.1 server, for requests whose answer is needed whole: probes, loads, every call of a weight push.

    HttpConnections.exchange ──a kept or new──> HttpConnection ──bytes──> AnswerParser ──> HttpAnswer

A supervisor and a learner make thousands of them a second in a large fleet. aiohttp, which streams the completions, takes several
times the CPU for one: it builds objects for the request, the answer, their headers and the body's stream, where one status and one
body are wanted.

Invariants:
- A connection has one request at a time. It is kept for the next one only after a whole answer with status 200 that did not say
  that it is the last; one that stays idle for `keepalive_s` is closed.
- An exchange that was cancelled closes its connection. Nothing is ever sent twice.
- Nothing is sent to a server with TLS that has another certificate than the one given.
- What a server sends is bounded: `HEAD_BYTES` before the body and after it, `BODY_BYTES` of the body.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import socket
import ssl
from collections.abc import Mapping
from typing import NamedTuple, cast
from urllib.parse import urlsplit

HEAD_BYTES, BODY_BYTES = 64 << 10, 256 << 20
END_OF_HEAD, END_OF_LINE = b"\r\n\r\n", b"\r\n"
OK, EMPTY = 200, (204, 304)
LENGTH_DIGITS = 19


class WrongCertificate(Exception):
    """The server has another certificate than the one it must have."""


class BrokenExchange(Exception):
    """The connection ended before the answer did, or what came is no answer."""


class HttpAnswer(NamedTuple):
    status: int
    body: bytes
    last: bool  # of its connection


class AnswerParser:
    """The bytes of one answer, as they arrive. Pure."""

    def __init__(self) -> None:
        self._data = bytearray()  # not read yet: of the head until there is a status, then of the body
        self._status = 0
        self._length: int | None = None  # of the body; None where it is chunked, or ends with the connection
        self._chunks: list[bytes] | None = None  # None where it is not chunked
        self._bytes = 0  # in chunks
        self._last = False

    def feed(self, data: bytes) -> HttpAnswer | None:
        """Take in what has arrived; the answer where that is its end. Raises ValueError where it is none."""
        self._data += data
        if not self._status and not self._read_head():
            return None
        if self._chunks is not None:
            return self._answer(b"".join(self._chunks)) if self._read_chunks(self._chunks) else None
        if len(self._data) > BODY_BYTES:
            raise ValueError(f"a body of more than {BODY_BYTES} bytes")
        if self._length is None or len(self._data) < self._length:
            return None
        return self._answer(bytes(self._data[: self._length]))

    def end(self) -> HttpAnswer | None:
        """The connection has ended: the answer, where that is its end."""
        if self._status and self._length is None and self._chunks is None:
            return self._answer(bytes(self._data))
        return None

    def _answer(self, body: bytes) -> HttpAnswer:
        return HttpAnswer(self._status, body, self._last)

    def _read_head(self) -> bool:
        """Whether the head has arrived."""
        end = self._data.find(END_OF_HEAD)
        if (len(self._data) if end < 0 else end) > HEAD_BYTES:
            raise ValueError(f"a head of more than {HEAD_BYTES} bytes")
        if end < 0:
            return False
        first, *lines = bytes(self._data[:end]).split(END_OF_LINE)
        del self._data[: end + len(END_OF_HEAD)]
        protocol, _, rest = first.partition(b" ")
        code = rest[:3]
        if not (protocol.startswith(b"HTTP/1.") and code.isdigit() and len(code) == 3 and int(code) >= OK):
            raise ValueError(f"no status in {first[:100]!r}")
        self._status = int(code)
        headers = dict[bytes, bytes]()
        for line in lines:
            name, _, value = line.partition(b":")
            headers[name.lower()] = value.strip().lower()
        self._last = protocol == b"HTTP/1.0" or b"close" in headers.get(b"connection", b"")
        self._read_extent(headers)
        return True

    def _read_extent(self, headers: Mapping[bytes, bytes]) -> None:
        """Where the body ends."""
        encoding, length = headers.get(b"transfer-encoding"), headers.get(b"content-length")
        if encoding == b"chunked":
            self._chunks = []
        elif encoding is not None:
            raise ValueError(f"transfer encoding {encoding[:100]!r}")
        elif length is None:
            self._length, self._last = (0, self._last) if self._status in EMPTY else (None, True)
        elif length.isdigit() and len(length) < LENGTH_DIGITS:
            self._length = int(length)
        else:
            raise ValueError(f"a length of {length[:100]!r}")

    def _read_chunks(self, chunks: list[bytes]) -> bool:
        """Whether the last chunk has arrived."""
        data = self._data
        while (end := data.find(END_OF_LINE)) >= 0:
            size, begin = int(bytes(data[:end]).partition(b";")[0], 16), end + len(END_OF_LINE)
            if not 0 <= size <= BODY_BYTES - self._bytes:
                raise ValueError(f"a chunk of {size} bytes after {self._bytes}")
            if size == 0:  # headers that nothing is needed of follow
                last = data.find(END_OF_HEAD, end)
                if (len(data) if last < 0 else last) - end > HEAD_BYTES:
                    raise ValueError(f"headers of more than {HEAD_BYTES} bytes after the body")
                return last >= 0
            after = begin + size + len(END_OF_LINE)
            if len(data) < after:
                return False
            if data[begin + size : after] != END_OF_LINE:
                raise ValueError("a chunk is longer than it says")
            chunks.append(bytes(data[begin : begin + size]))
            self._bytes += size
            del data[:after]
        if len(data) > HEAD_BYTES:
            raise ValueError(f"a chunk's length of more than {HEAD_BYTES} bytes")
        return False


class HttpConnection(asyncio.Protocol):
    """One connection, and the exchange that goes on over it."""

    def __init__(self) -> None:
        self.open = True
        self._transport: asyncio.Transport | None = None
        self._parser: AnswerParser | None = None
        self._answer: asyncio.Future[HttpAnswer] | None = None

    async def exchange(self, request: bytes) -> HttpAnswer:
        """Send `request`, and return the answer to it. Raises ConnectionError: the connection broke, or what came is no answer."""
        assert self._transport is not None
        self._parser, self._answer = AnswerParser(), asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._answer
        finally:
            self._answer = None

    def close(self) -> None:
        self.open = False
        if self._transport is not None:
            self._transport.abort()  # also one whose peer reads no more

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        if (connected := transport.get_extra_info("socket")) is not None:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done() or self._parser is None:
            self.close()  # an answer to no request
            return
        try:
            answer = self._parser.feed(data)
        except ValueError as error:
            self._fail(f"what it sent is no answer: {error}")
            return
        if answer is not None:
            self._answer.set_result(answer)

    def eof_received(self) -> None:
        self.open = False  # the transport closes itself, in a later turn of the loop

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        if self._answer is None or self._answer.done():
            return
        answer = self._parser.end() if self._parser is not None and exc is None else None
        if answer is not None:
            self._answer.set_result(answer)
        else:
            self._fail(str(exc or "") or "it ended before the answer did")

    def _fail(self, why: str) -> None:
        self.close()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError(why))


class HttpConnections:
    """Connections to the server at `url`, `http://host:port/path` or `https://...`; idle ones stay open for `keepalive_s`. Every
    request has `headers`."""

    def __init__(self, url: str, headers: Mapping[str, str], keepalive_s: float) -> None:
        parts = urlsplit(url)
        self._path = parts.path
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in {"Host": parts.netloc, **headers}.items())
        self._tls = _any_certificate() if parts.scheme == "https" else None
        self._address = parts.hostname or "", parts.port or (443 if self._tls else 80)
        self.keepalive_s = keepalive_s
        self._idle: dict[HttpConnection, asyncio.TimerHandle] = {}
        self._closings = 0  # calls of `close`

    async def exchange(self, method: str, path: str, body: bytes, certificate: str) -> HttpAnswer:
        """One request and its answer. With TLS only to a server with `certificate`, its SHA-256 in hex.

        Raises:
            OSError: no connection could be made.
            WrongCertificate: the server has another certificate.
            BrokenExchange: the connection broke, or what came is no answer.
        """
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._headers}Content-Length: {len(body)}\r\n\r\n"
        closings = self._closings
        connection, kept = self._take() or await self._connect(certificate), False
        try:
            answer = await connection.exchange(head.encode() + body)
            kept = answer.status == OK and not answer.last and connection.open and closings == self._closings
            return answer
        except ConnectionError as error:
            raise BrokenExchange(str(error)) from error
        finally:
            if kept:
                timer = asyncio.get_running_loop().call_later(self.keepalive_s, self._drop, connection)
                self._idle[connection] = timer
            else:
                connection.close()

    def close(self) -> None:
        """Close the connections that are idle; those in use close when their exchange ends."""
        self._closings += 1
        for connection in list(self._idle):
            self._drop(connection)

    def _take(self) -> HttpConnection | None:
        """The connection that was used last; None where none is idle."""
        while self._idle:
            connection, timer = self._idle.popitem()
            timer.cancel()
            if connection.open:
                return connection
        return None

    def _drop(self, connection: HttpConnection) -> None:
        if (timer := self._idle.pop(connection, None)) is not None:
            timer.cancel()
        connection.close()

    async def _connect(self, certificate: str) -> HttpConnection:
        loop, (host, port) = asyncio.get_running_loop(), self._address
        transport, connection = await loop.create_connection(HttpConnection, host, port, ssl=self._tls)
        if self._tls is not None:
            found = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
            if hashlib.sha256(found or b"").hexdigest() != certificate.lower():
                connection.close()
                raise WrongCertificate
        return connection


@functools.cache
def _any_certificate() -> ssl.SSLContext:
    """TLS with a server that proves the certificate it sends; which one that must be is compared afterwards."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
