"""The dashboard's HTTP server: files of the page, JSON of the runs, and a stream that says which runs changed.

    browser ──GET /──────────────────────────> static/            ES modules; the page asks no other host for anything
            ──GET /api/runs/RUN/...──────────> what is asked for, read in a thread, once for all pages that ask together
            ──GET /api/events (SSE)──────────> {"RUN": 1764190000123}   RUN has something new: the page asks again for what it shows

Invariants:
- Nothing is written, and no request changes anything: there is only GET.
- Everything of a run is sent as JSON and shown as text, never as HTML; images of its episodes are sent as image files. The page may
  load and run only what this server sends.
- Who does not listen on loopback asks for a token. On loopback only requests that name it as their host are answered, so that a
  page of another site, whose name leads here, reads nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import hmac
import ipaddress
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from ..buffer.image_files import ImageFiles
from ..common.network import name_to_open
from ..errors import ConfigError, SlipstreamError, with_deadline
from .answers import READS, Question, Read
from .explanation import LiveExplanation
from .feed import ChangeFeed, SharedAnswers
from .runs import RunFolder

STATIC = Path(__file__).parent / "static"
ALIVE_S = 15.0  # after which a stream without news has a comment, so that no proxy takes it for dead
READ_S = 120.0  # longest that a request may read; the index of a million trajectories takes some seconds
SHUTDOWN_S = 1.0  # how long connections may take to close
COOKIE = "slipstream_dash"
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class DashServer:
    """Serves `runs` while the context lasts, on `host` and `port`; 0 is any that is free. `token` is what a browser must know, ""
    for nothing. Raises ConfigError where the address cannot be used."""

    def __init__(self, runs: RunFolder, host: str, port: int, token: str) -> None:
        self._runs = runs
        self._host, self._port, self._token = host, port, token
        self._feed = ChangeFeed(runs)
        self._shared = SharedAnswers(self._feed)
        self._explanations: dict[str, LiveExplanation] = {}
        self._explaining = asyncio.Lock()  # one at a time
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/", self._page)
        app.router.add_get("/api/runs", self._list)
        app.router.add_get("/api/events", self._events)
        app.router.add_get("/api/runs/{run}/explanation", self._explanation)
        for path, read in READS.items():
            app.router.add_get(f"/api/runs/{{run}}/{path}", functools.partial(self._answer, read))
        app.router.add_get(r"/api/runs/{run}/images/{name:[0-9a-f]{64}\.(?:png|jpeg)}", self._image)
        app.router.add_static("/static", STATIC)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_S)

    async def __aenter__(self) -> DashServer:
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port).start()
        except OSError as error:
            await self._runner.cleanup()
            where = f"{self._host}:{self._port}"
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(
                    f"--port: {where} is in use; name another, for example --port {self._port + 1}"
                ) from None
            raise ConfigError(f"--host: {where} cannot be used: {os.strerror(error.errno or 0)}") from None
        self.port = int(self._runner.addresses[0][1])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._feed.close()
        for explanation in self._explanations.values():
            await explanation.close()
        await self._shared.close()
        await self._runner.cleanup()

    @property
    def url(self) -> str:
        """What to open; with the token, which the page then keeps as a cookie."""
        return f"http://{name_to_open(self._host)}:{self.port}/" + (f"?token={self._token}" if self._token else "")

    # --- who may ask ----------------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await (handler(request) if self._may_ask(request) else _refused())
        except web.HTTPException as error:
            error.headers.update(HEADERS)
            raise
        except (ConfigError, msgspec.ValidationError) as error:
            response = _error(error, 400)
        except (SlipstreamError, OSError) as error:
            response = _error(error, 409)
        if not response.prepared:
            response.headers.update(HEADERS)
        return response

    def _may_ask(self, request: web.Request) -> bool:
        if not self._token:
            return _is_loopback(request.host)
        given = request.query.get("token") or request.cookies.get(COOKIE, "")
        return hmac.compare_digest(given.encode(), self._token.encode())

    # --- answers --------------------------------------------------------------------------------------------------

    async def _page(self, request: web.Request) -> web.StreamResponse:
        response = web.FileResponse(STATIC / "index.html")
        if request.query.get("token"):
            response = web.Response(status=303, headers={"Location": "/"})
            response.set_cookie(COOKIE, self._token, httponly=True, samesite="Strict")
        return response

    async def _list(self, request: web.Request) -> web.StreamResponse:
        async def read() -> bytes:
            def list_runs() -> dict[str, object]:
                found = [run.summary() for run in self._runs.runs()]
                return {"runs": found, "folder": str(self._runs.root.absolute()), "left_out": self._runs.left_out}

            return msgspec.json.encode(await _in_time(list_runs, "the list of runs"))

        return _json(await self._shared.get(request.path, "", read))

    async def _answer(self, read: Read, request: web.Request) -> web.StreamResponse:
        run = self._runs.run(request.match_info["run"])
        question = Question(dict(request.match_info), dict(request.query))

        async def answer() -> bytes:
            found = await _in_time(lambda: read(run, question), f"what was asked of {run.name}")
            return msgspec.json.encode(await found if isinstance(found, Awaitable) else found)

        return _json(await self._shared.get(request.path_qs, run.name, answer))

    async def _image(self, request: web.Request) -> web.StreamResponse:
        run, name = self._runs.run(request.match_info["run"]), request.match_info["name"]
        data = await _in_time(lambda: ImageFiles(run.folder).read(name), f"an image of {run.name}")
        return web.Response(body=data, content_type=f"image/{name.rpartition('.')[2]}")

    async def _explanation(self, request: web.Request) -> web.StreamResponse:
        run = self._runs.run(request.match_info["run"])
        unasked = LiveExplanation(run, self._explaining, self._feed.look_now)
        explanation = self._explanations.setdefault(run.name, unasked)
        return _json(msgspec.json.encode(explanation.newest()))

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """The numbers of the changes of all runs, at once and whenever one has changed."""
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        with contextlib.suppress(ConnectionResetError):  # the page was closed
            await response.prepare(request)
            told = 0
            async with self._feed.listening():
                while True:
                    changes = await self._feed.after(told, ALIVE_S)
                    if self._feed.closed:
                        break
                    news = b"data: " + msgspec.json.encode(self._feed.numbers) if changes != told else b": nothing new"
                    await response.write(news + b"\n\n")
                    told = changes
        return response


def needs_token(host: str) -> bool:
    """Whether other machines can reach what listens on `host`."""
    return not _is_loopback(host)


def _is_loopback(host: str) -> bool:
    """Of an address or a name, with a port or without."""
    name = host.rpartition(":")[0] if host.count(":") == 1 or ("]" in host and not host.endswith("]")) else host
    name = name.strip("[]")
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


async def _refused() -> web.StreamResponse:
    return web.Response(status=403, text="open the address that `slipstream dash` printed, with its token\n")


async def _in_time(work: Callable[[], Any], what: str) -> Any:
    """In a thread, so that a long read holds up no other request."""
    reading = asyncio.to_thread(work)
    return await with_deadline(READ_S, reading, who="slipstream dash", waits_for=what, hint="is the disk slow?")


def _json(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")


def _error(error: Exception, status: int) -> web.Response:
    return _json(msgspec.json.encode({"error": str(error)}), status)
