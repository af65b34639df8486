"""The process of one server: `python -m slipstream.rollout.server --kind ...`.

Invariants:
- The last line of its log says why it ended, unless somebody asked it to.
- A server whose engine thread has failed ends at once: a replica with half a policy must not serve.
- SIGTERM ends it at once: requests under way are the clients' to go on with elsewhere.

A kind is a module with `serve(options: Options) -> Served`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
from collections.abc import Sequence
from importlib import import_module

import uvloop
from aiohttp import web

from ... import heap
from ...errors import SlipstreamError
from ...weightsync.fit import base_weights
from ...weightsync.staging import Staging
from .app import Server
from .engine_thread import EngineThread
from .options import Options, parse
from .served import Served

log = logging.getLogger("slipstream.rollout.server")

KINDS = {"transformers": ".transformers_kind", "fake": ".fake"}
"""Kind -> module that has `serve`."""


def main(arguments: Sequence[str]) -> int:
    """Serve until told to end; returns the exit status."""
    options = parse(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        served: Served = import_module(KINDS[options.kind], __package__).serve(options)
        uvloop.run(_serve(served, options))
    except SlipstreamError as error:
        log.error("%s: %s", type(error).__name__, error)
        return error.exit_code
    return 0


async def _serve(served: Served, options: Options) -> None:
    parameter = next(served.stepper.model.parameters())
    base = functools.partial(base_weights, options.model)
    staging = Staging(0, parameter.device, served.weights.check, base)
    engine = EngineThread(served.stepper, _fail)
    app = Server(engine, served.limits, staging, served.weights).app(*served.middlewares)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    heap.freeze()
    await web.TCPSite(runner, options.host, options.port, backlog=1024).start()
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await ended.wait()
    logging.shutdown()
    os._exit(0)  # threads may be blocked in a collective whose other end is gone; there is nothing to clean up


def _fail(error: BaseException) -> None:
    log.error("the engine thread failed", exc_info=error)
    log.error("this server ends: its engine thread failed with %s: %s", type(error).__name__, error)
    logging.shutdown()
    os._exit(1)
