"""`slipstream dash RUN|FOLDER [--port N] [--host H]`: runs as a page in a browser, while they go on and after."""

from __future__ import annotations

import argparse
import asyncio
import getpass
import secrets
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import ConfigError
from ...monitor.output import print_line
from .options import CommandTable

if TYPE_CHECKING:
    from ...dashboard.runs import RunFolder

PORT = 7860
PORTS = range(1 << 16)


def register(commands: CommandTable) -> None:
    parser = commands.add("dash", dash, "show runs in a browser: curves, trajectories token by token, timelines")
    parser.add_argument(
        "folder", metavar="RUN|FOLDER", help="the folder of a run, or a folder with the folders of some"
    )
    parser.add_argument(
        "--port", type=int, default=PORT, metavar="N", help=f"default: {PORT}; 0 takes any that is free"
    )
    text = "the address to listen on; default: 127.0.0.1. With another than loopback the page asks for a token"
    parser.add_argument("--host", default="127.0.0.1", metavar="H", help=text)


def dash(options: argparse.Namespace) -> int:
    from ...dashboard.runs import RunFolder
    from ..watched import ACCESS

    if options.port not in PORTS:
        raise ConfigError(f"--port {options.port}: allowed are 0 to {PORTS.stop - 1}")
    root = Path(options.folder).resolve()
    if not root.is_dir():
        raise ConfigError(f"{options.folder} is no folder")
    asyncio.run(_serve(RunFolder(root, ACCESS), options.host, options.port))
    return 0


async def _serve(runs: RunFolder, host: str, port: int) -> None:
    """Until SIGINT or SIGTERM."""
    from ...dashboard.app import DashServer, needs_token

    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    token = secrets.token_urlsafe(18) if needs_token(host) else ""
    async with DashServer(runs, host, port, token) as server:
        print_line(f"dashboard of {runs.root}: {server.url}")
        if not token:
            tunnel = f"ssh -N -L {server.port}:127.0.0.1:{server.port} {getpass.getuser()}@{socket.gethostname()}"
            print_line(f"from another machine: {tunnel}, then the same address there")
        print_line("Ctrl-C ends it; the runs do not notice")
        await stopped.wait()
