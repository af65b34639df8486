"""What inference servers use, as the system says: real processes that start others."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from slipstream.configs import load
from slipstream.launch.launchers.local import LocalLauncher
from slipstream.launch.supervisor.processes import ProcessManager, RoleProcess
from slipstream.launch.supervisor.server_usage import ServerUsage
from slipstream.monitor.terminal import LineView
from slipstream.tests.nvml import StandInNvml, expected, install

MIB = 1 << 20
CHILD = """
import socket, sys, time
held = bytearray(80 << 20)
while time.process_time() < 0.5:
    held[::4096] = bytes(len(held) // 4096)
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
connection.recv(1)
"""
SERVER = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}, sys.argv[1]])"


async def test_a_server_is_counted_with_the_processes_that_it_starts_while_it_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connected = asyncio.Event()
    listener = await asyncio.start_server(lambda *_: connected.set(), "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    launcher, config = LocalLauncher(tmp_path, 0), load("quickstart")
    processes = ProcessManager(config, tmp_path, launcher, LineView(config, Console()))
    usage = ServerUsage(processes, {"engine"})
    install(monkeypatch, StandInNvml(3))
    processes.roles = {name: RoleProcess(name) for name in ("engine-0", "engine-1", "buffer")}
    try:
        for name in ("engine-0", "buffer"):
            role, command = processes.roles[name], [sys.executable, "-c", SERVER, str(port)]
            role.process = await launcher.start(name, command, {"CUDA_VISIBLE_DEVICES": "1"})
            async with asyncio.timeout(60):
                await connected.wait()
            connected.clear()
        servers = usage.gauges()["servers"]
        assert servers.keys() == {"engine-0"}  # one has no process, one is no server
        assert servers["engine-0"]["cpu_s"] > 0.4  # the system counts in hundredths of a second
        assert servers["engine-0"]["rss"] > 80 * MIB
        assert servers["engine-0"]["gpus"] == {"1": expected(1)}
        assert (
            "gpus" not in ServerUsage(processes).gauges()["servers"]["engine-0"]
        )  # one on CPUs sees GPUs, and has none
        many = msgspec.structs.replace(config.launch, kind="ray_cluster")
        processes.config = msgspec.structs.replace(config, launch=many)
        assert usage.gauges() == {"servers": {}}  # its number may be of another process there
        processes.config = config
    finally:
        await launcher.close()
        listener.close()
    processes.roles[
        "engine-0"
    ].exit_status = -9  # as the supervisor sets it; what the server started may take a moment to end
    assert usage.gauges() == {"servers": {}}
