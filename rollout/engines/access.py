"""Who may use an inference server of the rollouts: two access tokens, checked on every path of every kind, and its certificate.

    supervisor: makes the access tokens ──guarded RPC──> engine: its private folder ──> guard in front of every route
                      └───────guarded RPC───> workers: the request token; learner: both ──> `Authorization: Bearer`

Invariants:
- No path answers without an access token, health and metrics included. The servers' own options leave paths open: vLLM's key
  those for pauses, weights, health and metrics, SGLang's those for health and metrics.
- The request token opens `REQUEST_PATHS` only. The control token opens every path: pauses and weight pushes, too.
- Access tokens are in files of mode 0600, never in a command line or in an environment.
- A client that was given a certificate talks to the server that has it, and to no other.
- A server that `slipstream serve` started says at `DESCRIPTION_PATH`, to a client with its control token, what it was started for.
- This file is imported by servers of other libraries: it needs nothing but msgspec.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import ssl
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ...common.owned_folders import PRIVATE_VARIABLE

# Files in a server's private folder.
TOKENS, CERTIFICATE, KEY, OPTIONS, DESCRIPTION = "engine.json", "tls.crt", "tls.key", "options.yaml", "description.json"
DESCRIPTION_PATH = "/slipstream/description"
# What a worker asks a server: completions and scores, their end, its state. vLLM's paths and SGLang's.
REQUEST_PATHS = frozenset(
    (
        *("/inference/v1/generate", "/abort_requests", "/weight_info", "/health", "/metrics"),
        *("/generate", "/abort_request", "/model_info", "/v1/loads"),
        *("/classify", "/v1/chat/completions"),
    )
)
BEARER = b"bearer"
OK, UNAUTHORIZED, FORBIDDEN = 200, 401, 403


class ServerAccess(msgspec.Struct, frozen=True):
    """What a client, or the server itself, is given. Empty where the server is open: in tests and benchmarks on one host."""

    request: str = ""  # the access token for `REQUEST_PATHS`
    control: str = ""  # the access token for all paths
    certificate: str = ""  # SHA-256 of the server's TLS certificate, in hex
    others: dict[
        str, ServerAccess
    ] = {}  # what opens the servers of a run that others started, by the name of the replica

    def __repr__(self) -> str:
        return "ServerAccess(...)"  # logs must not show the access tokens

    @property
    def headers(self) -> dict[str, str]:
        token = self.control or self.request
        return {"Authorization": f"Bearer {token}"} if token else {}

    @property
    def without_control(self) -> ServerAccess:
        """What a worker is given."""
        others = {name: one.without_control for name, one in self.others.items()}
        return msgspec.structs.replace(self, control="", others=others)

    def of(self, name: str, certificate: str) -> ServerAccess:
        """What opens the replica `name`; one that the run started has `certificate`."""
        return self.others.get(name) or msgspec.structs.replace(self, certificate=certificate, others={})

    def allows(self, path: str, authorization: bytes | None) -> int:
        """The status of a request to this server: 200, 401 without a token of this run, 403 with one for other paths."""
        scheme, _, token = (authorization or b"").partition(b" ")
        if scheme.lower() != BEARER or not token or not self.control:
            return UNAUTHORIZED
        if hmac.compare_digest(token, self.control.encode()):
            return OK
        if not hmac.compare_digest(token, self.request.encode()):
            return UNAUTHORIZED
        return OK if path in REQUEST_PATHS else FORBIDDEN


def make_access() -> ServerAccess:
    """New tokens of a run."""
    return ServerAccess(secrets.token_hex(32), secrets.token_hex(32))


class ServerFiles(NamedTuple):
    """The private folder of a server that only this run may use, and whether it serves TLS."""

    folder: str
    tls: bool

    @property
    def certificate(self) -> str:
        return f"{self.folder}/{CERTIFICATE}"

    @property
    def key(self) -> str:
        return f"{self.folder}/{KEY}"

    @property
    def options(self) -> str:
        return f"{self.folder}/{OPTIONS}"

    def write(self, access: ServerAccess) -> None:
        """The tokens, and SGLang's options with them."""
        write_private(Path(self.folder, TOKENS), msgspec.json.encode(access))
        write_private(Path(self.options), f"api-key: {access.request}\nadmin-api-key: {access.control}\n".encode())


def write_private(path: Path, data: bytes) -> None:
    """A file that only this user may read. Raises OSError: it exists."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
        stream.write(data)


def own_access() -> ServerAccess:
    """What this server was given. Raises KeyError, OSError, msgspec.MsgspecError: a guarded server without it does not start."""
    return msgspec.json.decode(Path(os.environ[PRIVATE_VARIABLE], TOKENS).read_bytes(), type=ServerAccess)


def own_description() -> bytes:
    """What this server answers at `DESCRIPTION_PATH`; empty for one that a run started. Raises OSError."""
    folder = os.environ.get(PRIVATE_VARIABLE)
    path = Path(folder, DESCRIPTION) if folder else None
    return path.read_bytes() if path is not None and path.is_file() else b""


def fingerprint(certificate: str) -> str:
    """SHA-256, in hex, of a certificate in PEM. Raises ValueError: it is none."""
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate)).hexdigest()


Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class TokenGuard:
    """ASGI middleware before all others: vLLM loads it by `--middleware`."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._access = own_access()
        self._description = own_description()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        headers = {bytes(name).lower(): bytes(value) for name, value in scope.get("headers", ())}
        status = self._access.allows(scope["path"], headers.get(b"authorization"))
        if status == OK and self._description and (scope["type"], scope["path"]) == ("http", DESCRIPTION_PATH):
            kind = (b"content-type", b"application/json")
            await send({"type": "http.response.start", "status": OK, "headers": [kind]})
            return await send({"type": "http.response.body", "body": self._description})
        if status == OK:
            return await self._app(scope, receive, send)
        if scope["type"] == "websocket":  # closed before it is accepted, the server answers 403
            return await send({"type": "websocket.close", "code": 1008})
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})
