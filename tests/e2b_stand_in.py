"""What stands in for E2B in the tests: the provider's API and edge in this process, and for each machine a container of bubblewrap
with a server in it that answers as envd does what the SDK asks (`python e2b_stand_in.py PORT TOKEN`). The SDK is the real one.

It was written from what the SDK sends and reads (e2b 2.63.0), as E2B's own servers cannot be had here:

    API   POST /v2/sandboxes  DELETE /sandboxes/ID          with X-API-KEY
    edge  any path, with E2b-Sandbox-Id: to the envd of that machine; 502 where there is none
    envd  POST /process.Process/Start (Connect's streams of JSON)  POST /files?path= (multipart)  with X-Access-Token; GET /health
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, web

KEY = "e2b_0123456789abcdef"
LATEST = "0.5.6"  # envd's version, by which the SDK chooses how it speaks
FORM = "application/connect+json"
START_S = 60.0
CHUNK = 1 << 15
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class E2BService:
    """The API and the edge, in a thread of their own. `machines` are the containers that run, by their ids; `asked` is what the
    creations of machines asked for. `envd` answers in the place of every machine's server, where it is set."""

    _port: int
    _http: ClientSession

    def __init__(self, container: Callable[..., tuple[str, ...]]) -> None:
        self._container = container
        self.machines: dict[str, tuple[subprocess.Popen[bytes], int, str]] = {}
        self.asked: list[dict[str, Any]] = []
        self.envd: Answer | None = None
        self.creates, self.may_create = threading.Event(), threading.Event()
        self.may_create.set()
        ready = threading.Event()
        threading.Thread(target=self._serve, args=(ready,), name="stand-in for E2B", daemon=True).start()
        assert ready.wait(START_S)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def _serve(self, ready: threading.Event) -> None:
        async def serve() -> None:
            app = web.Application(client_max_size=1 << 30)
            app.add_routes(
                [
                    web.post("/v2/sandboxes", self._create),
                    web.delete("/sandboxes/{id}", self._delete),
                    web.route("*", "/{path:.*}", self._forward),
                ]
            )
            runner = web.AppRunner(app)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self._port = runner.addresses[0][1]
            self._http = ClientSession(auto_decompress=False, timeout=ClientTimeout(total=None))
            ready.set()
            await asyncio.Event().wait()

        asyncio.run(serve())

    async def _create(self, request: web.Request) -> web.Response:
        if request.headers.get("X-API-KEY") != KEY:
            return web.json_response({"code": 401, "message": "Invalid API key"}, status=401)
        self.asked.append(await request.json())
        self.creates.set()
        await asyncio.to_thread(self.may_create.wait, START_S)
        sandbox, token = uuid.uuid4().hex, uuid.uuid4().hex
        server = (sys.executable, __file__, "0", token)
        process = subprocess.Popen(self._container(*server), stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: ASYNC220
        assert process.stdout is not None
        port = int(await asyncio.to_thread(process.stdout.readline))
        self.machines[sandbox] = process, port, token
        made = {"templateID": "base", "sandboxID": sandbox, "clientID": "c", "envdVersion": LATEST}
        return web.json_response({**made, "envdAccessToken": token}, status=201)

    async def _delete(self, request: web.Request) -> web.Response:
        if request.headers.get("X-API-KEY") != KEY or request.match_info["id"] not in self.machines:
            return web.json_response({"code": 404, "message": "no such sandbox"}, status=404)
        await asyncio.to_thread(self.end, request.match_info["id"])
        return web.Response(status=204)

    def end(self, sandbox: str) -> None:
        """End a machine."""
        self.machines.pop(sandbox)[0].communicate()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        sandbox = request.headers.get("E2b-Sandbox-Id", "")
        gone = web.json_response(
            {"sandboxId": sandbox, "message": "The sandbox was not found", "code": 502}, status=502
        )
        if self.envd is not None:
            return await self.envd(request)
        if sandbox not in self.machines:
            return gone
        url = f"http://127.0.0.1:{self.machines[sandbox][1]}{request.rel_url}"
        headers = {name: value for name, value in request.headers.items() if name not in ("Host", "Transfer-Encoding")}
        try:
            body = await request.read()
            async with self._http.request(request.method, url, headers=headers, data=body) as answer:
                response = web.StreamResponse(
                    status=answer.status, headers={"Content-Type": answer.headers.get("Content-Type", "text/plain")}
                )
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                await response.write_eof()
                return response
        except ClientError:
            if request.transport is not None:
                request.transport.abort()
            return gone


# --- envd -------------------------------------------------------------------------------------------------------------


def envelope(message: dict[str, Any], flags: int = 0) -> bytes:
    body = json.dumps(message).encode()
    return bytes([flags]) + len(body).to_bytes(4, "big") + body


async def start(request: web.Request) -> web.StreamResponse:
    """Run a command, and stream what it does."""
    body = await request.read()
    assert request.headers["Content-Type"] == FORM
    assert len(body) == 5 + int.from_bytes(body[1:5], "big")
    asked = json.loads(body[5:])["process"]
    process = await asyncio.create_subprocess_exec(
        asked["cmd"],
        *asked.get("args", ()),
        env=os.environ | asked.get("envs", {}),
        cwd=asked.get("cwd") or "/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    response = web.StreamResponse(headers={"Content-Type": FORM})
    await response.prepare(request)

    async def tell(**event: Any) -> None:
        await response.write(envelope({"event": event}))

    async def copy(name: str, stream: asyncio.StreamReader) -> None:
        while piece := await stream.read(CHUNK):
            await tell(data={name: base64.b64encode(piece).decode()})

    try:
        async with asyncio.timeout(int(request.headers.get("Connect-Timeout-Ms", 60_000)) / 1000):
            await tell(start={"pid": process.pid})
            assert process.stdout is not None
            assert process.stderr is not None
            await asyncio.gather(copy("stdout", process.stdout), copy("stderr", process.stderr))
            code = await process.wait()
        status = f"signal: {-code}" if code < 0 else f"exit status {code}"
        # As Go has it, -1 is the status of what a signal has ended.
        await tell(end={"exitCode": max(code, -1), "exited": code >= 0, "status": status})
        await response.write(envelope({}, flags=2))
    except TimeoutError:
        error = {"code": "deadline_exceeded", "message": "context deadline exceeded"}
        await response.write(envelope({"error": error}, flags=2))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    await response.write_eof()
    return response


async def upload(request: web.Request) -> web.Response:
    path = Path(request.query["path"])
    path.parent.mkdir(parents=True, exist_ok=True)
    async for part in await request.multipart():
        path.write_bytes(await part.read())  # pyright: ignore[reportAttributeAccessIssue]  # noqa: ASYNC240
    return web.json_response([{"name": path.name, "path": str(path), "type": "file"}])


async def health(request: web.Request) -> web.Response:
    return web.Response(status=204)


def main() -> None:
    @web.middleware
    async def keyed(request: web.Request, handler: Answer) -> web.StreamResponse:
        if request.path != "/health" and request.headers.get("X-Access-Token") != sys.argv[2]:
            return web.json_response({"code": "unauthenticated", "message": "wrong token"}, status=401)
        return await handler(request)

    async def serve() -> None:
        app = web.Application(middlewares=[keyed], client_max_size=1 << 30)
        app.add_routes(
            [web.post("/process.Process/Start", start), web.post("/files", upload), web.get("/health", health)]
        )
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", int(sys.argv[1])).start()
        print(runner.addresses[0][1], flush=True)  # noqa: T201
        await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
