"""An HTTP server of `/metrics`, and of `/metrics/NAME` for the servers of a run, in threads of its own.

Invariants:
- It listens from its construction on, so that a port that is taken is known before anything starts.
- A scrape takes at most `READ_S`: where what it reads hangs, it gets what was read last. One read goes on at a time.
- At most `SCRAPES` are answered at once; another one is status 503.
- A client that sends nothing, or takes longer than `SCRAPE_S` for its request and the answer, costs no thread for long. Of more
  than `CONNECTIONS` connections the newest are closed.
- What fails in a scrape is status 500 or 503 there and a line in the log, and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, Metric, make_wsgi_app
from prometheus_client.registry import Collector

from ..common.network import name_to_open
from ..errors import ConfigError, DeadlineExceeded, SlipstreamError, describe

log = logging.getLogger(__name__)

READ_S = 5.0  # Prometheus waits 10 s for a scrape by default
SCRAPES = 8  # at once
CONNECTIONS = 32  # each of which has a thread
SILENT_S = 10.0  # longest wait for a client's next byte
SCRAPE_S = 30.0  # longest request and answer, however steadily its bytes come and go
AGAIN_S = 0.5  # scrapes within this time share what was read
POLL_S = 0.1  # between two looks for the end of the server

Read = Callable[[], Sequence[Metric]]
App = Callable[[WSGIEnvironment, StartResponse], Iterable[bytes]]


class MetricsServer:
    """Listens at `host` and `port`, 0 for a free one; `key` is what the user wrote the port in. Use as a context manager. Raises
    ConfigError where it cannot listen there."""

    def __init__(self, host: str, port: int, key: str) -> None:
        try:
            self._server = _Server(host, port)
        except OSError as error:
            choose = "choose another, or 0 for any free one"
            raise ConfigError(
                f"{key}: {port} on {host} cannot be listened on ({error.strerror or error}); {choose}"
            ) from None
        self.port = int(self._server.server_address[1])
        self.address = f"{name_to_open(host)}:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(POLL_S,), name="metrics", daemon=True)

    @property
    def url(self) -> str:
        return f"http://{self.address}/metrics"

    def start(self, read: Read, read_server: Callable[[str], bytes | None] = lambda name: None) -> None:
        """Answer scrapes with what `read` returns, those of `/metrics/NAME` with what `read_server` returns of NAME; None is an
        answer 404. Both are called in threads."""
        registry = CollectorRegistry()
        registry.register(_Collector(_LastRead(read).get))
        self._server.set_app(_limited(_safe(_routed(make_wsgi_app(registry), read_server))))
        self._thread.start()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()


class _LastRead:
    """The newest result of `read`, which may hang."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._reading: Future[Sequence[Metric]] | None = None
        self._began = 0.0
        self._last: Sequence[Metric] | None = None

    def get(self) -> Sequence[Metric]:
        """Raises DeadlineExceeded where nothing was ever read, and as `read`."""
        with self._lock:
            reading = self._reading
            if reading is None or (reading.done() and time.monotonic() - self._began > AGAIN_S):
                reading = self._reading = Future()
                self._began = time.monotonic()
                threading.Thread(target=self._run, args=(reading,), name="metrics read", daemon=True).start()
        try:
            self._last = reading.result(READ_S)
        except TimeoutError:
            if self._last is None:
                raise DeadlineExceeded("a scrape", "the numbers of the run", READ_S, "does its disk hang?") from None
        return self._last

    def _run(self, reading: Future[Sequence[Metric]]) -> None:
        try:
            reading.set_result(self._read())
        except Exception as error:  # raised again by every scrape that waits for it
            reading.set_exception(error)


class _Collector(Collector):
    def __init__(self, get: Callable[[], Iterable[Metric]]) -> None:
        self._get = get

    def collect(self) -> Iterable[Metric]:
        return self._get()

    def describe(self) -> Iterable[Metric]:
        return ()  # asked when it is registered, before there is anything to read


class _Handler(WSGIRequestHandler):
    timeout = SILENT_S

    def log_message(self, format: str, *args: object) -> None:
        log.debug(format, *args)


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._connections = threading.BoundedSemaphore(CONNECTIONS)
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Without the look-up of the host's name that `HTTPServer` makes, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        if not self._connections.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            self._connections.release()
            raise

    def process_request_thread(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: object
    ) -> None:
        assert isinstance(request, socket.socket)
        cut = threading.Timer(SCRAPE_S, _cut, (request,))
        cut.daemon = True
        try:
            cut.start()
            super().process_request_thread(request, client_address)
        finally:
            cut.cancel()
            self._connections.release()

    def handle_error(self, request: object, client_address: object) -> None:
        log.debug("a scrape from %s ended early", client_address, exc_info=True)


def _cut(request: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is closed
        request.shutdown(socket.SHUT_RDWR)


def _limited(app: App) -> App:
    """`app`, of which `SCRAPES` calls go on at once."""
    scrapes = threading.BoundedSemaphore(SCRAPES)

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if not scrapes.acquire(blocking=False):
            start_response("503 Service Unavailable", [("Content-Type", "text/plain; charset=utf-8")])
            return [
                f"{SCRAPES} scrapes go on, as many as may at once; scrape from fewer places or less often\n".encode()
            ]
        try:
            return app(environ, start_response)  # all of the answer: none of these apps makes it bit by bit
        finally:
            scrapes.release()

    return answer


def _routed(app: App, read_server: Callable[[str], bytes | None]) -> App:
    """`app`, and the metrics of servers below it."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        _, below, name = str(environ["PATH_INFO"]).partition("/metrics/")
        if not below or not name:
            return app(environ, start_response)
        text = read_server(name)
        start_response("404 Not Found" if text is None else "200 OK", [("Content-Type", CONTENT_TYPE_PLAIN_0_0_4)])
        return [text or b""]

    return answer


def _safe(app: App) -> App:
    """`app`, whose errors are an answer. The log has an error once, until there is another."""
    logged = ""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        nonlocal logged
        try:
            return app(environ, start_response)
        except Exception as error:
            late = isinstance(error, DeadlineExceeded)
            status, text = "503 Service Unavailable" if late else "500 Internal Server Error", describe(error)
            if text != logged:
                log.warning("a scrape failed: %s", text, exc_info=not isinstance(error, SlipstreamError))
                logged = text
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{text}\n".encode()]

    return answer
