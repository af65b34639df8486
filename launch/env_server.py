"""`slipstream env serve`: a process that serves a config's environments until it is stopped."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import zmq

from ..configs import Config
from ..configs.checks import ADDRESS, LOOPBACK
from ..configs.environments import absolute_paths, parts_by_key
from ..envs.isolation.link import options_of
from ..envs.isolation.messages import Describe, EnvFailure, SourceKey
from ..envs.isolation.serve import EnvServer, load_or_make_keys
from ..errors import ConfigError


def serve_environments(config: Config, address: str, key_file: str, tell: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM. Raises ConfigError: the address, the keys or an environment cannot be used."""
    if not ADDRESS.fullmatch(address):
        raise ConfigError(f"--address: {address!r} is not of the form tcp://HOST:PORT")
    if not key_file and not LOOPBACK.match(address):
        raise ConfigError(
            f"--keys: must name a file, {address} can be reached from other hosts; it is made where it is missing"
        )
    sections = parts_by_key(absolute_paths(config.env))
    addressed = {key: section for key, section in sections.items() if section.address}
    found = load_or_make_keys(Path(key_file)) if key_file else None

    async def run() -> None:
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        try:
            server = EnvServer(addressed or sections, address, found)
        except zmq.ZMQError as error:
            raise ConfigError(f"--address: {address} cannot be bound: {error}") from None
        serving = asyncio.create_task(server.serve())
        try:
            for key, pool in server.pools.items():
                source = SourceKey(key, options_of(sections[key]), "train", config.seed)
                described = await pool.handle(Describe(f"first {key}", source))
                if isinstance(described, EnvFailure):
                    raise ConfigError(described.text)
            tell(f"{', '.join(server.pools)} at {server.address}{f', keys in {key_file}' if key_file else ''}")
            await serving
        finally:
            serving.cancel()
            await asyncio.wait({serving}, timeout=1.0)

    try:
        asyncio.run(run())
    except asyncio.CancelledError:
        tell("stopped")
