"""`slipstream env serve`: the environments of a config for workers on other hosts.

Invariants:
- Only the sections of the config that it was given are served: a client names a section, and its options must be the same but for
  the folders of files, which may differ between hosts.
- Requests are answered as they end, not in the order in which they came: a slow step holds back no other.
- A client that is silent for `CLIENT_S` is gone; its episodes are closed.
- Links to other hosts are encrypted, and only who holds the keys may connect.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import zmq.asyncio

from ...configs.environments import FILES, DataSection, EnvironmentKind
from ...errors import ConfigError, DeadlineExceeded, EnvError, SlipstreamError, with_deadline
from ...rpc.security import PeerTable, make_pair, split_address
from ...rpc.server import RpcRequest, RpcServer
from .link import options_of
from .messages import (
    Alive,
    CallCancelled,
    CancelCall,
    CloseEpisode,
    Demonstrate,
    Describe,
    EnvFailure,
    EnvReply,
    EnvRequest,
    MakeTask,
    ResetEpisode,
    SourceKey,
    StepEpisode,
)
from .pool import HostPool
from .remote import CLIENT_S, EnvKeys, read_keys

log = logging.getLogger(__name__)

CLOSE_S = 30.0  # longest close of an episode whose worker is gone; as in a run


class _Client:
    """A worker: when it was heard of last, and its episodes with the pool of each."""

    def __init__(self) -> None:
        self.heard = time.monotonic()
        self.episodes: dict[str, HostPool] = {}


class EnvServer:
    """Serves `sections`, environments by their sections of the config, in `isolate` processes each. Bound when it is made, in a
    running event loop. Raises zmq.ZMQError: the address is in use."""

    def __init__(self, sections: Mapping[str, EnvironmentKind], address: str, keys: EnvKeys | None) -> None:
        self._context = zmq.asyncio.Context()
        self._sections = dict(sections)
        self.pools = {
            key: HostPool(key.removeprefix("env.parts."), max(1, config.isolate), config.python, self._context)
            for key, config in sections.items()
        }
        self._clients: dict[bytes, _Client] = {}
        self._calls: dict[str, tuple[HostPool, asyncio.Task[Any]]] = {}  # with the task that answers
        self._server: RpcServer[EnvRequest] = RpcServer(
            address,
            "the environment server",
            EnvRequest,
            peers=PeerTable({"worker": keys.client}) if keys else None,
            pair=keys.server_pair if keys else None,
        )
        self.address = split_address(self._server.address)[0]

    async def serve(self) -> None:
        """Until it is cancelled."""
        answering = set[asyncio.Task[None]]()
        try:
            while True:
                for request in self._server.requests():
                    task = asyncio.create_task(self._answer(request), name=type(request.message).__name__)
                    answering.add(task)
                    task.add_done_callback(answering.discard)
                for client in self._pop_silent_clients():
                    closing = asyncio.create_task(
                        self._close_episodes(client), name="episodes of a worker that is gone"
                    )
                    answering.add(closing)
                    closing.add_done_callback(answering.discard)
                await self._server.poll(CLIENT_S / 4)
        finally:
            for task in answering:
                task.cancel()
            self._server.close()
            for pool in self.pools.values():
                await pool.end()
            self._context.term()

    async def _answer(self, request: RpcRequest[EnvRequest]) -> None:
        client = self._clients.setdefault(request.identity, _Client())
        client.heard = time.monotonic()
        if isinstance(request.message, Alive):
            return
        try:
            reply: EnvReply = await self._handle(client, request.message)
        except ConfigError as error:
            reply = EnvFailure("config", str(error))
        except SlipstreamError as error:
            reply = EnvFailure("environment", str(error))
        self._server.reply(request.identity, request.number, reply)

    async def _handle(self, client: _Client, request: EnvRequest) -> EnvReply:
        match request:
            case Describe(source=key) | MakeTask(source=key) | Demonstrate(source=key) | ResetEpisode(source=key):
                pool = self._pool(key)
                own = msgspec.structs.replace(key, options=options_of(self._sections[key.section]))
                request = msgspec.structs.replace(request, source=own)
                if isinstance(request, ResetEpisode):
                    client.episodes[request.episode] = pool
            case StepEpisode(episode=episode) | CloseEpisode(episode=episode):
                if episode not in client.episodes:
                    raise EnvError("the environment server holds no such episode; it may have been restarted")
                pool = client.episodes[episode]
                if isinstance(request, CloseEpisode):
                    del client.episodes[episode]
            case CancelCall(call=call):
                if call not in self._calls:
                    return CallCancelled()
                pool, answering = self._calls[call]
                answering.cancel()  # its client waits for it no more
                await asyncio.wait({answering})
                return await pool.handle(request)
            case Alive():
                raise EnvError("a sign of life has no answer")
        task = asyncio.current_task()
        assert task is not None
        self._calls[request.call] = pool, task
        try:
            return await pool.handle(request)
        finally:
            self._calls.pop(request.call, None)

    def _pool(self, key: SourceKey) -> HostPool:
        """Raises ConfigError: it is not served here, or with other options."""
        if key.section not in self._sections:
            raise ConfigError(
                f"{key.section}: the server has {', '.join(self._sections)} only; give both the same config"
            )
        ours, theirs = self._sections[key.section], msgspec.json.decode(key.options, type=EnvironmentKind)
        if _comparable(ours) != _comparable(theirs):
            raise ConfigError(f"{key.section}: the server was given other options of it; give both the same config")
        return self.pools[key.section]

    def _pop_silent_clients(self) -> list[_Client]:
        """The clients that are gone; they are forgotten."""
        now = time.monotonic()
        gone = [identity for identity, client in self._clients.items() if now - client.heard > CLIENT_S]
        return [self._clients.pop(identity) for identity in gone]

    async def _close_episodes(self, client: _Client) -> None:
        log.warning("a worker was silent for %g s; its %d episodes are closed", CLIENT_S, len(client.episodes))
        for episode, pool in client.episodes.items():
            call = f"close {episode}"
            hint = "its process is killed"
            try:
                closing = pool.handle(CloseEpisode(call, episode))
                await with_deadline(CLOSE_S, closing, who="the environment server", waits_for="a close", hint=hint)
            except DeadlineExceeded as error:
                log.warning("%s", error)
                await pool.handle(CancelCall(call))
            except SlipstreamError as error:
                log.warning("an episode of a worker that is gone: %s", error)


def _comparable(config: EnvironmentKind) -> str:
    """Its options, files by their names alone."""
    files = {name: getattr(config, name) for name in FILES.get(type(config), ())}
    if isinstance(config, DataSection):
        files |= {"path": config.path, "evaluation": config.evaluation, "reward": config.reward}
    names = {name: Path(path).name for name, path in files.items() if isinstance(path, str)}
    config = msgspec.structs.replace(config, **names)
    return options_of(config)


def load_or_make_keys(path: Path) -> EnvKeys:
    """The keys in a file that only its owner may read; it is made with new ones where it is missing. Raises ConfigError."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        keys = read_keys("--keys", str(path))
        assert keys is not None
        return keys
    except OSError as error:
        raise ConfigError(f"--keys: {path} cannot be written: {error}") from None
    server, client = make_pair(), make_pair()
    keys = EnvKeys(server.public, server.secret, client.public, client.secret)
    with os.fdopen(file, "wb") as stream:
        stream.write(msgspec.json.encode(keys))
    return keys
