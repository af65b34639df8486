"""The process of one server: `python -m slipstream.rollout.engines.server OPTIONS`.

Invariants:
- The last line of its log says why it ended, unless it was stopped by a signal.
- A failed engine thread ends it at once, since a replica with half a policy must not serve. So does SIGTERM: clients continue
  running requests on other replicas.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
import ssl
import sys
from collections.abc import Sequence
from importlib import import_module

import msgspec
import uvloop
from aiohttp import web

from ....common import gc as heap
from ....errors import SlipstreamError
from ....weightsync.staging import WeightStaging
from ....weightsync.weight_check import base_weights
from ..access import ServerFiles
from .app import HttpApp, guard
from .contract import EngineServer
from .engine_thread import EngineThread
from .launch import Options

log = logging.getLogger("slipstream.rollout.engines.server")

# Kind -> module with `serve(options: Options) -> EngineServer`.
KINDS = {"transformers": "..transformers.engine", "fake": "..fake.engine"}


def main(arguments: Sequence[str]) -> int:
    """Serve until a signal ends it; returns the exit status."""
    options = msgspec.json.decode(arguments[0], type=Options)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        served: EngineServer = import_module(KINDS[options.kind], __package__).serve(options)
        uvloop.run(_serve(served, options))
    except SlipstreamError as error:
        log.error("%s: %s", type(error).__name__, error)
        return error.exit_code
    return 0


async def _serve(served: EngineServer, options: Options) -> None:
    device = next(served.runner.model.parameters()).device
    staging = WeightStaging(0, device, served.weights.check, functools.partial(base_weights, options.model))
    engine = EngineThread(served.runner, _fail)
    app = HttpApp(engine, served, staging, (guard(),) if options.folder else ()).app()
    files, tls = ServerFiles(options.folder, options.tls), None
    if options.tls:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(files.certificate, files.key)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    heap.freeze_startup_objects()
    await web.TCPSite(runner, options.host, options.port, ssl_context=tls, backlog=1024).start()
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await ended.wait()
    logging.shutdown()
    os._exit(0)  # threads may be blocked in a collective with a dead learner


def _fail(error: BaseException) -> None:
    log.error("the engine thread failed", exc_info=error)
    log.error("this server ends: its engine thread failed with %s: %s", type(error).__name__, error)
    logging.shutdown()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
