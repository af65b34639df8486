"""A server as an operator starts it: `slipstream serve` in a process of its own, which can be killed and started again."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from slipstream.common.process import set_parent_death_signal
from slipstream.rollout.engines.http_client import HttpClient, is_healthy
from slipstream.rollout.engines.server_keys import ServerKeys, read_server_keys
from slipstream.tests import tiny

KEY = "rollout.engine.replicas"
START_S = 180.0
ENGINE = ("rollout.engine.kind=transformers", "rollout.engine.memory=32MiB")
"""The server that starts fastest."""


def named(*servers: str) -> str:
    """The setting of a run that uses `servers`, each as `ServedEngine.named` says it."""
    return f"{KEY}={{{', '.join(servers)}}}"


class ServedEngine:
    """`slipstream serve quickstart` of the model in `model`, with more `overrides`."""

    def __init__(self, folder: Path, model: Path, *overrides: str) -> None:
        self.url = f"https://127.0.0.1:{tiny.free_port()}"
        self.file = folder / "keys.json"
        self.config = (f"model.path={model}", *ENGINE, *overrides)
        """Of the server, and of a run that uses it."""
        self._log = folder / "server.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def keys(self) -> ServerKeys:
        return read_server_keys(KEY, str(self.file))

    @property
    def named(self) -> str:
        """What a run's config names."""
        return f"{self.url}: {self.file}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def client(self, *, control: bool = True) -> HttpClient:
        access = self.keys.access
        return HttpClient("the server", self.url, START_S, access if control else access.without_control)

    def start(self) -> None:
        """Start it, and return when it answers."""
        where = ("--address", self.url, "--keys", str(self.file))
        command = [sys.executable, "-m", "slipstream.launch.cli", "serve", "quickstart", *self.config, *where]
        with self._log.open("ab") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=out, preexec_fn=set_parent_death_signal)
        try:
            asyncio.run(self._answers())
        except BaseException as error:
            self.kill()
            raise AssertionError(f"it did not start: {self._log.read_text()[-3000:]}") from error

    async def _answers(self) -> None:
        async with asyncio.timeout(START_S):
            while not self.file.exists():
                assert self.alive
                await asyncio.sleep(0.05)  # a file offers nothing to await
            client = self.client()
            try:
                while not await is_healthy(client, "/health"):
                    assert self.alive
                    await asyncio.sleep(0.05)
            finally:
                await client.close()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)
