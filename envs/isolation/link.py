"""The thread that talks to the processes of all isolated environments of this process.

Invariants:
- It lives as long as its process: the kernel kills the hosts when the thread that started them ends.
- An episode awaits it from whichever event loop it runs on; tasks and sources are made from threads without one.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import threading
import weakref
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

import msgspec
import uvloop
import zmq.asyncio

from ...configs.environments import EnvironmentKind, PythonEnv, without_placement
from ...errors import ConfigError, DeadlineExceeded
from .messages import EnvReply, EnvRequest
from .pool import HostPool, kill_all
from .remote import RemoteHosts, read_keys

T = TypeVar("T")

LOOK_S = 0.5  # between looks of a blocked thread at whether it was interrupted


class Hosts(Protocol):
    """What answers the requests of `messages.py`; used in the thread of this module only."""

    async def handle(self, request: EnvRequest) -> EnvReply: ...


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = uvloop.new_event_loop()
    threading.Thread(target=loop.run_forever, name="isolated environments", daemon=True).start()
    return loop


@functools.cache
def _context() -> zmq.asyncio.Context:
    return zmq.asyncio.Context()


def awaited(work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
    """`work`, which runs in the thread, for a caller on an event loop; cancelling it cancels the work."""
    return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, _loop()))


def result_of(work: Coroutine[Any, Any, T], seconds: float, waits_for: str) -> T:
    """The result of `work`, for a caller in a thread. Raises DeadlineExceeded; and whatever interrupts the caller, after it has
    cancelled the work."""
    future = asyncio.run_coroutine_threadsafe(work, _loop())
    left = seconds
    try:
        while left > 0:
            try:
                return future.result(min(left, LOOK_S))
            except concurrent.futures.TimeoutError:
                if future.done():
                    raise
                left -= LOOK_S
        raise DeadlineExceeded("an environment", waits_for, seconds, "look at the environment, or at its server")
    finally:
        future.cancel()


_shared: weakref.WeakValueDictionary[bytes, Any] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def hosts_of(config: EnvironmentKind, key: str) -> Hosts:
    """The hosts of an environment: the same for all its sources that live, so for both splits. Raises ConfigError naming a key
    below `key`."""
    kind = config.factory.partition(":")[2] if isinstance(config, PythonEnv) else str(config.__struct_config__.tag)
    name = key.removeprefix("env.parts.") if key != "env" else kind
    identity = key.encode() + msgspec.json.encode(config)
    keys = read_keys(f"{key}.keys", config.keys)

    async def make() -> Hosts:
        if config.address:
            return RemoteHosts(name, config.address, keys, _context())
        pool = HostPool(name, max(1, config.isolate), config.python, _context())
        weakref.finalize(pool, kill_all, pool.slots)
        return pool

    with _lock:
        if (hosts := _shared.get(identity)) is None:
            hosts = _shared[identity] = result_of(make(), 10.0, "its thread")
        return hosts


def options_of(config: EnvironmentKind) -> str:
    """The options of an environment without where it runs and how its tasks are chosen, as they are sent."""
    try:
        own = msgspec.structs.replace(without_placement(config), share=1.0, sampler="sequential")
        return msgspec.json.encode(own).decode()
    except (TypeError, msgspec.MsgspecError) as error:
        raise ConfigError(f"env: its options are no JSON: {error}") from None
