"""`slipstream dash RUN|FOLDER [--port N] [--host H]`: the dashboard of active and finished runs, a page in a browser; with
`--export FILE` the page of one run as a file."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from ...common.fsio import is_folder
from ...common.users import user_name
from ...errors import ConfigError
from ...monitor.output import print_line
from .options import CommandTable

if TYPE_CHECKING:
    from ...dashboard.runs import RunFolder

PORT, HOST = 7860, "127.0.0.1"
PORTS = range(1 << 16)
EXPORT_S = 30.0  # after which nothing more is sampled for a file


def register(commands: CommandTable) -> None:
    parser = commands.add("dash", dash, "show runs in a browser: curves, trajectories token by token, timelines")
    parser.add_argument(
        "folder", metavar="RUN|FOLDER", help="the folder of a run, or a folder with the folders of some"
    )
    parser.add_argument("--port", type=int, metavar="N", help=f"default: {PORT}; 0 takes any that is free")
    text = f"the address to listen on; default: {HOST}. With another than loopback the page asks for a token"
    parser.add_argument("--host", metavar="H", help=text)
    text = "write the page of a run with a sample of its trajectories to FILE, which opens without a server, and end"
    parser.add_argument("--export", metavar="FILE", help=text)


def dash(options: argparse.Namespace) -> int:
    from ...dashboard.runs import RunFolder
    from ..watched import ACCESS, NICE

    port = PORT if options.port is None else options.port
    if port not in PORTS:
        raise ConfigError(f"--port {port}: allowed are 0 to {PORTS.stop - 1}")
    root = Path(options.folder).resolve()
    if not is_folder(root):
        raise ConfigError(f"{options.folder} is no folder")
    try:
        runs = RunFolder(root, ACCESS)
    except OSError as error:  # for example without permission
        raise ConfigError(f"{options.folder} cannot be read: {error.strerror or error}") from error
    if options.export is None:
        os.nice(NICE)
        asyncio.run(_serve(runs, options.host or HOST, port))
        return 0
    for option in ("port", "host"):
        if getattr(options, option) is not None:
            raise ConfigError(f"--{option}: a file is not served; leave it or --export out")
    return _export(runs, Path(options.export))


def _export(runs: RunFolder, path: Path) -> int:
    from ...dashboard.export import export_run
    from ..explain import explain_or_say_why

    if (number := len(runs.runs()) + runs.left_out) > 1:
        raise ConfigError(f"--export: {runs.root} holds {number} runs; name one of them")
    if is_folder(path) or not is_folder(path.parent):
        raise ConfigError(
            f"--export {path}: {'is a folder' if is_folder(path) else f'there is no folder {path.parent}'}"
        )
    (run,) = runs.runs()
    try:
        written = export_run(run, path, explain_or_say_why(run.folder, active=run.is_active()), EXPORT_S)
    except OSError as error:
        raise ConfigError(f"--export {path}: cannot be written: {error}") from None
    listed = written.trajectories
    print_line(
        f"{path}: {path.stat().st_size / 1e6:.1f} MB, with {listed['total']} of {listed['indexed']} trajectories"
    )
    for why in dict.fromkeys(written.refused.values()):
        print_line(f"not in it: {', '.join(name for name, said in written.refused.items() if said == why)}: {why}")
    return 0


async def _serve(runs: RunFolder, host: str, port: int) -> None:
    """Until SIGINT or SIGTERM."""
    from ...dashboard.app import DashServer, needs_token
    from ...dashboard.runs import RUNS_LIMIT

    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    token = secrets.token_urlsafe(18) if needs_token(host) else ""
    async with DashServer(runs, host, port, token) as server:
        print_line(f"dashboard of {runs.root}: {server.url}")
        if runs.left_out:
            print_line(f"its {RUNS_LIMIT} newest runs are shown, {runs.left_out} older ones are left out")
        if not token:
            tunnel = f"ssh -N -L {server.port}:127.0.0.1:{server.port} {user_name()}@{socket.gethostname()}"
            print_line(f"from another machine: {tunnel}, then the same address there")
        print_line("Ctrl-C ends it; the runs do not notice")
        await stopped.wait()
