"""The bodies of requests to the gateway: how large one may be, and the wait until all of it has arrived.

Invariants:
- A body is parsed in the worker's event loop, for a parser holds the interpreter's lock in any thread. So it is refused before that
  where it has more bytes, or more of what makes a parser slow, than a conversation that fits the context has.
"""

from __future__ import annotations

from typing import cast

import msgspec
from aiohttp import web

from ...common.waits import Overdue, within
from .connections import GatewayConnection

LARGEST_BODY = 1 << 26  # bytes, whatever the context
SMALL_BODY = 1 << 24  # bytes that any request may have: images come as text
TOKEN_BYTES = 32  # of a body for each token of the context: English has 5, JSON's escapes of other scripts up to 15
SMALL_ITEMS = 1 << 15  # items that any request may have: some 50 ms of parsing
TOKEN_ITEMS = 2  # for each token of the context: a message has at most 6 and at least 4 tokens
TOOL_ITEMS = 1 << 18  # of a call of a tool, whose arguments need not fit a context
FULL_CONTEXT = "context_length_exceeded"  # OpenAI's code
BODY_S = 60.0  # how long the body of a request may take to arrive


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


class BodyLimit(msgspec.Struct, frozen=True):
    """What a body may have: bytes, and items: the opening brackets and commas of JSON, those in its strings included. One that has
    more is refused with `status` and `code`, and with `why`."""

    size: int
    items: int
    status: int = 413
    code: str = ""
    why: str = "as many as it may"

    def refusal(self, what: str) -> RefusedRequest:
        return RefusedRequest(self.status, f"the request has more than {what}, {self.why}", self.code)


def context_limit(max_tokens: int) -> BodyLimit:
    """Of a request whose conversation must fit `max_tokens` tokens: one that does not says so as a full context does."""
    size = min(LARGEST_BODY, max(SMALL_BODY, TOKEN_BYTES * max_tokens))
    items = max(SMALL_ITEMS, TOKEN_ITEMS * max_tokens)
    return BodyLimit(size, items, 400, FULL_CONTEXT, f"too many for a max_tokens of {max_tokens}")


def tool_limit() -> BodyLimit:
    """Of a request for a tool."""
    return BodyLimit(LARGEST_BODY, TOOL_ITEMS)


def expected_size(http: web.Request, limit: BodyLimit) -> int:
    """The bytes that the body has at most. Raises RefusedRequest: they are too many."""
    if http.content_length is None or "Content-Encoding" in http.headers:
        return limit.size
    if http.content_length > limit.size:
        raise limit.refusal(f"{limit.size} bytes")
    return http.content_length


async def read_body(http: web.Request, limit: BodyLimit) -> bytes:
    """Raises RefusedRequest: it is too large or too slow, or is not encoded as it says."""
    body = bytearray()

    async def read() -> None:
        async for piece in http.content.iter_any():
            if len(body) + len(piece) > limit.size:
                raise limit.refusal(f"{limit.size} bytes")
            body.extend(piece)

    try:
        await within(BODY_S, read())
    except Overdue:
        raise RefusedRequest(408, f"the request did not arrive within {BODY_S:g} s") from None
    except web.RequestPayloadError as error:
        http.content.feed_eof()  # aiohttp reads no more of it
        cast(GatewayConnection, http.protocol).ending = True
        why = " ".join(str(error).split()).removeprefix("400, message: ")
        raise RefusedRequest(400, f"the request's body cannot be read: {why}") from None
    if sum(body.count(mark) for mark in (b"{", b"[", b",")) > limit.items:
        raise limit.refusal(f"{limit.items} opening brackets and commas")
    return bytes(body)
