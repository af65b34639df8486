"""Replicas for tests of the weight push, in milliseconds instead of a server's half minute: the real receiving code (`Staging`), a
real model (an embedding and a linear layer) that computes the canary from the weights it was really given, and nothing else.

`LocalReplica` lives in this process. `remote` puts one in a process of its own, which can be killed or frozen.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from slipstream.common.tasks import in_thread
from slipstream.errors import EngineError, WeightSyncError
from slipstream.weightsync.plan import GroupPlan, TransferPlan
from slipstream.weightsync.staging import WeightStaging

CANARY = [(7 * i * i + 3) % 32 for i in range(12)]
CPU = torch.device("cpu")


def make_model(seed: int) -> torch.nn.Sequential:
    """A policy of 1088 parameters over 32 tokens."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Embedding(32, 16), torch.nn.Linear(16, 32))


def logprobs(model: torch.nn.Module, token_ids: Sequence[int]) -> list[float]:
    """Log-prob in nats of each token but the first, given the one before."""
    with torch.no_grad():
        rows = model(torch.tensor(token_ids[:-1])).log_softmax(-1)
    return [float(row[token]) for row, token in zip(rows, token_ids[1:], strict=True)]


class LocalReplica:
    """A replica whose ranks are `WeightStaging` objects of this process. `call_log` collects (name, what happened)."""

    def __init__(self, name: str, call_log: list[tuple[str, str]] | None = None, *, ranks: int = 1) -> None:
        self.name = name
        self.ranks = ranks
        self.scores_paused = False
        self.sleeps = False
        self.model = make_model(0)
        self.call_log = [] if call_log is None else call_log
        self.paused = False
        self.served: int | None = None
        self.load: Callable[[dict[str, torch.Tensor]], object] = self.model.load_state_dict
        own = weakref.proxy(self)  # its groups are closed with the last reference to this
        self.stagings = [WeightStaging(rank, CPU, lambda plan: own._check(plan)) for rank in range(ranks)]

    def _check(self, plan: TransferPlan) -> None:
        if set(plan.names) != set(self.model.state_dict()):
            raise WeightSyncError(f"the model has no {plan.names[0]}")

    def _note(self, what: str) -> None:
        self.call_log.append((self.name, what))

    async def pause(self, mode: str) -> None:
        self.paused = True
        self._note(f"pause {mode}")

    async def resume(self) -> None:
        self.paused = False
        self._note("resume")

    async def sleep(self) -> None:
        """Drops its weights, as a server does."""
        self.paused = True
        self._note("sleep")
        for parameter in self.model.parameters():
            parameter.data.fill_(float("nan"))

    async def wake(self) -> None:
        self._note("wake")

    async def join_group(self, plan: GroupPlan) -> None:
        self._note("join")
        try:
            await asyncio.gather(*(in_thread(partial(s.join, plan), f"join of {self.name}") for s in self.stagings))
        except WeightSyncError as error:
            raise EngineError(str(error)) from error

    async def receive_weights(self, plan: TransferPlan) -> None:
        self._note(f"receive {type(plan.source).__name__}")
        for staging in self.stagings:
            staging.begin(plan)

    async def swap_weights(self, version: int) -> None:
        if not self.paused:
            raise EngineError(f"{self.name} was not paused")
        try:
            takes = (in_thread(partial(s.take, version), f"take of {self.name}") for s in self.stagings)
            *_, tensors = await asyncio.gather(*takes)
        except WeightSyncError as error:
            raise EngineError(str(error)) from error
        self.load(dict(tensors))
        self.served = version
        self._note(f"swap {version}")

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        self._note("score")
        return logprobs(self.model, token_ids)

    async def version(self) -> int | None:
        return self.served

    def close(self) -> None:
        for staging in self.stagings:
            staging.close()


class Sleeper(LocalReplica):
    """It was started to sleep: `sleep` drops its weights. It refuses what `refuses` names."""

    def __init__(self, name: str, call_log: list[tuple[str, str]] | None = None) -> None:
        super().__init__(name, call_log)
        self.sleeps = True
        self.refuses: set[str] = set()

    def _note(self, what: str) -> None:
        if what.split()[0] in self.refuses:
            raise EngineError(f"{self.name} refuses to {what}")
        super()._note(what)

    @property
    def has_weights(self) -> bool:
        return all(bool(parameter.isfinite().all()) for parameter in self.model.parameters())


class Outliving(LocalReplica):
    """Its server goes on with what it was told when the client hangs up, as real ones do. A swap loads, waits for `go_on`, and only
    then changes the version; with `refuses` it fails there. While it is not paused, `sampling` notes what each token is drawn from
    and how it is labelled, in `sampled`."""

    def __init__(self, name: str, call_log: list[tuple[str, str]] | None = None) -> None:
        super().__init__(name, call_log)
        self.go_on = asyncio.Event()
        self.loading = asyncio.Event()
        self.refuses = False
        self.sampled: set[tuple[int | None, int | None]] = set()
        self._weights: int | None = None

    async def swap_weights(self, version: int) -> None:
        await asyncio.shield(asyncio.ensure_future(self._swap(version)))

    async def _swap(self, version: int) -> None:
        (tensors,) = [await asyncio.to_thread(staging.take, version) for staging in self.stagings]
        before = dict(self.model.state_dict())
        self.load(dict(tensors))
        old, self._weights = self._weights, version
        self._note(f"load {version}")
        self.loading.set()
        await self.go_on.wait()
        if self.refuses:
            self.model.load_state_dict(before)
            self._weights = old
            raise EngineError(f"{self.name} answered 500")
        self.served = version
        self._note(f"label {version}")

    async def sampling(self) -> None:
        while True:
            if not self.paused:
                self.sampled.add((self._weights, self.served))
            await asyncio.sleep(0.001)


class RemoteReplica:
    """The client of a LocalReplica in another process: one connection and two pickles per call."""

    def __init__(self, name: str, path: Path, process: subprocess.Popen[bytes]) -> None:
        self.name = name
        self.ranks = 1
        self.scores_paused = False
        self.sleeps = False
        self.process = process
        self._path = path

    async def call(self, method: str, *arguments: object) -> Any:
        try:
            reader, writer = await asyncio.open_unix_connection(str(self._path))
        except OSError as error:
            raise EngineError(f"{self.name} is not reachable") from error
        try:
            writer.write(pickle.dumps((method, arguments)))
            writer.write_eof()
            answer = await reader.read()
        except OSError as error:
            raise EngineError(f"{self.name} is not reachable any more") from error
        finally:
            writer.close()
        if not answer:
            raise EngineError(f"{self.name} is not reachable any more")
        result = pickle.loads(answer)
        if isinstance(result, Exception):
            raise result
        return result

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    async def pause(self, mode: str) -> None:
        await self.call("pause", mode)

    async def resume(self) -> None:
        await self.call("resume")

    async def sleep(self) -> None:
        await self.call("sleep")

    async def wake(self) -> None:
        await self.call("wake")

    async def join_group(self, plan: GroupPlan) -> None:
        await self.call("join_group", plan)

    async def receive_weights(self, plan: TransferPlan) -> None:
        await self.call("receive_weights", plan)

    async def swap_weights(self, version: int) -> None:
        await self.call("swap_weights", version)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return await self.call("score", token_ids)

    async def version(self) -> int | None:
        return await self.call("version")

    async def wait_ready(self, deadline_s: float) -> None:
        deadline = time.monotonic() + deadline_s
        while not self._path.exists():
            assert self.process.poll() is None
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)  # a socket file has no event


@contextlib.asynccontextmanager
async def remote(name: str, path: Path) -> AsyncIterator[RemoteReplica]:
    """A replica in a process of its own, killed at the end."""
    code = f"from slipstream.tests.replicas import serve; serve({name!r}, {str(path)!r})"
    process = subprocess.Popen([sys.executable, "-c", code])  # noqa: ASYNC220
    try:
        yield RemoteReplica(name, path, process)
    finally:
        process.kill()
        process.wait(10)


def serve(name: str, path: str) -> None:
    """The other process: answers calls until it is killed."""
    replica = LocalReplica(name)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        method, arguments = pickle.loads(await reader.read())
        try:
            result: object = await getattr(replica, method)(*arguments)
        except Exception as error:
            result = error
        writer.write(pickle.dumps(result))
        with contextlib.suppress(OSError):
            await writer.drain()
        writer.close()

    async def run() -> None:
        server = await asyncio.start_unix_server(answer, path)
        await server.serve_forever()

    asyncio.run(run())
