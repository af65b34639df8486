"""Environments on another host: the client of `slipstream env serve`.

Invariants:
- The link is encrypted and both ends have proved their keys, unless it does not leave this host.
- A server that is gone is noticed by the deadlines of the calls; the episodes in it fail as its own. Nothing is sent twice.
- The server drops the episodes of a client that it has not heard of for `CLIENT_S`.
"""

from __future__ import annotations

import asyncio
import math
import uuid
import weakref
from pathlib import Path
from typing import Any

import msgspec
import zmq.asyncio

from ...errors import ConfigError, DeadlineExceeded, EnvError, SlipstreamError
from ...rpc.client import RpcClient
from ...rpc.security import KeyPair
from .messages import Alive, CallCancelled, CancelCall, Describe, EnvFailure, EnvReply, EnvRequest
from .pool import REPLIES

ALIVE_S = 10.0  # between signs of life
CLIENT_S = 60.0  # without one before a client's episodes are closed
CANCEL_S = 4.0  # longest answer to a cancellation: the server waits for its process, and kills it
DESCRIBE_S = 240.0  # longest making of a source there; some libraries take a minute to import


class EnvKeys(msgspec.Struct, frozen=True):
    """What the file of `slipstream env serve` holds: the key pair of the server, and the one of its clients."""

    server: str
    server_secret: str
    client: str
    client_secret: str

    def __repr__(self) -> str:
        return "EnvKeys(...)"  # logs must not show them

    @property
    def server_pair(self) -> KeyPair:
        return KeyPair(self.server, self.server_secret)

    @property
    def client_pair(self) -> KeyPair:
        return KeyPair(self.client, self.client_secret)


class RemoteHosts:
    """The server at `address`. Create it in a running event loop."""

    def __init__(self, name: str, address: str, keys: EnvKeys | None, context: zmq.asyncio.Context) -> None:
        self._address = address
        self._client = RpcClient(
            f"{address}#{keys.server}" if keys else address,
            name,
            "the environment server",
            EnvReply,
            identity=uuid.uuid4().bytes,  # the same after a connection that broke, so that the episodes are found again
            pair=keys.client_pair if keys else None,
            context=context,
        )
        living = asyncio.create_task(_live(self._client), name=f"signs of life to {address}")
        loop = asyncio.get_running_loop()
        weakref.finalize(self, loop.call_soon_threadsafe, _close, self._client, living).atexit = False

    async def handle(self, request: EnvRequest) -> EnvReply:
        """The server's answer. The caller has the deadline but of cancellations. Raises EnvError."""
        reply_type: Any = REPLIES[type(request)] | EnvFailure
        seconds = (
            CANCEL_S if isinstance(request, CancelCall) else DESCRIBE_S if isinstance(request, Describe) else math.inf
        )
        hint = f"is `slipstream env serve` running at {self._address}, with the same keys?"
        try:
            return await self._client.request(request, reply_type, seconds, hint=hint)
        except DeadlineExceeded as error:
            if isinstance(request, CancelCall):
                return CallCancelled()
            raise EnvError(str(error)) from None
        except SlipstreamError as error:
            raise EnvError(str(error)) from None


async def _live(client: RpcClient) -> None:
    while True:
        client.notify(Alive())
        await asyncio.sleep(ALIVE_S)


def _close(client: RpcClient, living: asyncio.Task[None]) -> None:
    living.cancel()
    client.close()


def read_keys(key: str, path: str) -> EnvKeys | None:
    """The keys in a file that `slipstream env serve` has made; None without a file. Raises ConfigError naming `key`."""
    if not path:
        return None
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=EnvKeys)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"{key}: {path} holds no keys ({error}); copy the file that `slipstream env serve` made"
        ) from None
