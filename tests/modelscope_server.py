"""A stand-in for ModelScope's hub on loopback: the paths of its HTTP API by which the client lists and downloads repositories.

Answers have the form of the hub's own: `{"Code": ..., "Data": ..., "Success": ...}`, and 404 with a code for what is not there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

API = "/api/v1/"
NO_REPOSITORY, NO_REVISION = 10010205001, 10010202001
Revisions = dict[str, Path]  # name -> folder


class ModelScopeServer(ThreadingHTTPServer):
    """Serves `repositories`, such as `models/ORG/NAME`; `asked` are the paths and files of all requests. `broken` are files that it
    lists, and does not give."""

    daemon_threads = True

    def __init__(self, repositories: dict[str, Revisions]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = repositories
        self.asked: list[str] = []
        self.broken: set[str] = set()
        self.more: list[dict[str, Any]] = []  # is listed, too

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: ModelScopeServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        found = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(found.query).items()}
        kind, owner, name, *rest = [*found.path.removeprefix(API).split("/"), "", ""]
        verb = "/".join(filter(None, rest))
        file = query.get("FilePath", "")
        self.server.asked.append(f"{verb} {file}".strip())
        repository = self.server.repositories.get(f"{kind}/{owner}/{name}")
        if repository is None:
            return self._answer(404, {"Code": NO_REPOSITORY, "Message": "record not found", "Success": False})
        if verb == "revisions":
            named = [{"Revision": revision} for revision in repository]
            return self._answer(200, _data({"RevisionMap": {"Branches": named, "Tags": []}}))
        folder = repository.get(query.get("Revision", "master"))
        if folder is None:
            return self._answer(404, {"Code": NO_REVISION, "Message": "invalid revision", "Success": False})
        if verb == ("repo/tree" if kind == "datasets" else "repo/files"):
            return self._answer(200, _data({"Files": [*map(_entry, _files(folder)), *self.server.more]}))
        if verb == "repo" and file not in self.server.broken and (folder / file).is_file():
            return self._send(200, (folder / file).read_bytes(), "application/octet-stream")
        self._answer(404, {"Code": NO_REPOSITORY, "Message": f"no {verb} {file}", "Success": False})

    def _answer(self, status: int, body: Any) -> None:
        self._send(status, json.dumps(body).encode(), "application/json")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *_: object) -> None:
        """Quiet."""


def _data(data: Any) -> dict[str, Any]:
    return {"Code": 200, "Data": data, "Message": "success", "Success": True}


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.rglob("*")):
        yield str(path.relative_to(folder)), path


def _entry(file: tuple[str, Path]) -> dict[str, Any]:
    name, path = file
    if path.is_dir():
        return {"Name": path.name, "Path": name, "Type": "tree", "Size": 0}
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    return {"Name": path.name, "Path": name, "Type": "blob", "Size": len(content), "Sha256": digest}


@contextlib.contextmanager
def serving(repositories: dict[str, Revisions]) -> Iterator[ModelScopeServer]:
    with ModelScopeServer(repositories) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(10)
