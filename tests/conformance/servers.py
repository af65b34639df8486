"""Real servers of every kind, started by the code that the launcher starts them with, and their clients.

Invariants:
- Servers and clients are those of a run over several hosts: with tokens, and TLS with a certificate that clients pin.
- Nothing outlives a test run: a server dies with the test process, and is killed with all its children.
- A server's output is in its log; the log's end is part of the error when it does not start.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil
from slipstream.common.owned_folders import PRIVATE_VARIABLE
from slipstream.common.process import set_parent_death_signal
from slipstream.configs.schema import Agent, Config, Launch, Model, Partial, Rollout, WeightSync
from slipstream.errors import DeadlineExceeded
from slipstream.learner.model import has_images
from slipstream.rollout.engines import registry as servers
from slipstream.rollout.engines.access import DESCRIPTION, ServerAccess, ServerFiles, make_access, write_private
from slipstream.rollout.engines.certificate import write_certificate
from slipstream.rollout.engines.http_engine import HttpEngine
from slipstream.tests import tiny
from slipstream.tests.conformance.kinds import Kind
from slipstream.tests.conformance.reference import TOLERANCE

START_S = 180.0
"""Longest start of a server; on two cores that others use it takes up to a minute."""

HOST = "127.0.0.1"

MAX_CONCURRENT = 8
"""Sequences that a server decodes at once: few, so that a test can make a queue."""


def configure(
    kind: Kind,
    folder: Path,
    *,
    partial: Partial = "recompute",
    options: dict[str, Any] | None = None,
    colocated: bool = False,
    dtype: Literal["float32", "bfloat16"] = "float32",
    tolerance: float = TOLERANCE,
) -> Config:
    """The configuration of a run whose servers are of `kind`, with `options`, serve the model in `folder`, and sleep while the
    learner steps where they are `colocated`. It asks for a `tolerance` in nats."""
    engine = kind.engine(max_concurrent=MAX_CONCURRENT, memory="64MiB", start_s=START_S)
    if options:
        engine = msgspec.structs.replace(engine, options=options)
    return Config(
        model=Model(path=str(folder), dtype=dtype),
        agent=Agent(max_tokens=tiny.CONTEXT),
        rollout=Rollout(engine=engine, partial=partial),  # type: ignore[arg-type]
        weightsync=WeightSync(canary_tolerance=tolerance),
        launch=Launch(kind="colocated" if colocated else "local"),
    )


def push_s_of(ranks: int) -> float:
    """Longest push, in seconds, and longest wait for requests to decode. On CPU the ranks of a server spin while they wait for each
    other in every layer: where other processes want the cores, too, a step that takes milliseconds takes a second."""
    return 60.0 if ranks == 1 else 240.0


def make_client(
    kind: str,
    name: str,
    url: str,
    ranks: int = 1,
    *,
    partial: Partial = "recompute",
    request_s: float = 60.0,
    access: ServerAccess | None = None,
    sleeps: bool = False,
    images: bool = False,
) -> HttpEngine:
    """A client, called `name`, of the server of kind `kind` at `url`, which takes `images`."""
    if kind == "sglang":
        from slipstream.rollout.engines.sglang.client import SglangEngine as Client
    else:
        from slipstream.rollout.engines.vllm.client import VllmEngine as Client
    return Client(
        name,
        url,
        vocab_size=tiny.VOCABULARY,
        max_model_len=tiny.CONTEXT,
        request_s=request_s,
        push_s=push_s_of(ranks),
        ranks=ranks,
        partial=partial,
        scores_paused=kind in ("transformers", "fake"),
        sleeps=sleeps,
        access=access,
        takes_images=images,
    )


def alive_after(seconds: float, processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those of `processes` that have not ended within `seconds`. One that its parent has not asked for yet has ended: the parent of
    an orphan may be slow."""
    deadline, alive = time.monotonic() + seconds, list[psutil.Process]()
    for process in processes:
        try:
            end = os.pidfd_open(process.pid)
        except ProcessLookupError:
            continue
        try:
            ended = select.poll()
            ended.register(end, select.POLLIN)
            if not ended.poll(max(0.0, 1e3 * (deadline - time.monotonic()))):
                alive.append(process)
        finally:
            os.close(end)
    return alive


class Server:
    """One server, which can be killed and started again at the same address."""

    def __init__(self, kind: Kind, config: Config, log: Path) -> None:
        self.kind, self.config = kind, config
        self.port = tiny.free_port()
        self.url = f"https://{HOST}:{self.port}"
        self._log = log
        self._files = ServerFiles(tempfile.mkdtemp(dir=log.parent), tls=True)
        tokens = make_access()
        self._files.write(tokens)
        write_private(Path(self._files.folder, DESCRIPTION), kind.name.encode())
        self.access = msgspec.structs.replace(tokens, certificate=write_certificate(self._files, HOST))
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it, unless it runs; it may not answer yet."""
        if self.alive:
            return
        self._temporary = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        variables = os.environ | servers.environment(self.config) | tiny.one_gpu(f"server-{self.port}")
        variables["TMPDIR"] = self._temporary.name
        variables[PRIVATE_VARIABLE] = self._files.folder
        line = servers.command(self.config, HOST, self.port, seed=self.port, files=self._files)
        with self._log.open("ab") as out:
            self._process = subprocess.Popen(
                line, env=variables, stdout=out, stderr=out, start_new_session=True, preexec_fn=set_parent_death_signal
            )

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def client(
        self, name: str, *, partial: Partial = "recompute", request_s: float = 60.0, sleeps: bool = False
    ) -> HttpEngine:
        """A client of it called `name`, for pushes that treat requests under way as `partial` says."""
        kind, url, ranks, access = self.kind.name, self.url, self.ranks, self.access
        return make_client(
            kind,
            name,
            url,
            ranks,
            partial=partial,
            request_s=request_s,
            access=access,
            sleeps=sleeps,
            images=has_images(self.config.model.path),
        )

    @property
    def ranks(self) -> int:
        """Processes that hold a part of its weights."""
        return getattr(self.config.rollout.engine, "tensor_parallel", 1)

    @property
    def tolerance(self) -> float:
        """Nats by which its log-probs may differ from those of transformers; a run allows it the same."""
        return servers.canary_tolerance(self.config)

    async def wait_ready(self) -> None:
        """Return once it answers; fails with the end of its log when it ends or is late."""
        client = self.client("starting")
        ready, ended = asyncio.create_task(client.wait_ready(START_S)), asyncio.create_task(self.ended())
        try:
            await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
            assert not ended.done(), f"the server ended with status {ended.result()}:\n{self.tail()}"
            await ready
        except DeadlineExceeded as error:
            raise AssertionError(f"{error}:\n{self.tail()}") from error
        finally:
            ready.cancel()
            ended.cancel()
            await asyncio.gather(ready, ended, return_exceptions=True)
            await client.close()

    async def ended(self) -> int:
        """Return its exit status, negative for a signal, as soon as its process has ended."""
        assert self._process is not None
        if (status := self._process.poll()) is not None:
            return status
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        process = os.pidfd_open(self._process.pid)
        loop.add_reader(process, event.set)
        try:
            await event.wait()
        finally:
            loop.remove_reader(process)
            os.close(process)
        return self._process.wait()

    def tail(self) -> str:
        """The end of its log."""
        return self._log.read_text(errors="replace")[-4000:]

    def family(self) -> list[psutil.Process]:
        """The server's process and all below it."""
        assert self._process is not None
        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def compute_process(self) -> psutil.Process:
        """The child that holds the model: the largest."""
        return max(self.family()[1:], key=lambda process: process.memory_info().rss)

    def die(self) -> None:
        """SIGKILL the server's own process, not its children."""
        assert self._process is not None
        self._process.kill()

    def freeze(self) -> None:
        """SIGSTOP every process of it."""
        for process in self.family():
            process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT every process of it."""
        for process in self.family():
            process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill it with all its children, and wait until they are gone."""
        family = self.family()
        for process in family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        if self._process is not None:
            self._process.wait(30)
        alive = alive_after(30, family)
        assert alive == [], f"processes of {self.kind.name} that SIGKILL did not end: {alive}"
        self._temporary.cleanup()
