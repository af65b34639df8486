"""An engine that does what a test tells it, for faults that no real server has on demand. It proves nothing about servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from slipstream.agents.base import Completion, FinishReason
from slipstream.buffer.trajectory import VersionSpan
from slipstream.configs.schema import Partial
from slipstream.rollout.engine import NOTHING, Broken, Growing, Pressure, Sampling
from slipstream.weightsync.fleet import Seat
from slipstream.weightsync.plan import GroupPlan, TransferPlan


async def settle() -> None:
    """Let every task run until it waits for something that nobody here has done yet."""
    for _ in range(20):
        await asyncio.sleep(0)


class Call:
    """A request at an engine, to be answered by the test."""

    def __init__(self, token_ids: Sequence[int], sampling: Sampling, version: int | None) -> None:
        self.token_ids = tuple(token_ids)
        self.sampling = sampling
        self.version = version
        self.cancelled = False
        self.grown = NOTHING
        self.answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()

    def say(self, *tokens: int, version: int = 0, reason: FinishReason = "stop") -> None:
        self.answer.set_result(said(*tokens, version=version, reason=reason))

    def grow(self, *tokens: int, version: int = 0) -> None:
        """So much of the answer has arrived."""
        self.grown = said(*tokens, version=version, reason="abort")

    def fail(self, error: Exception) -> None:
        self.answer.set_exception(error)


def said(*tokens: int, version: int = 0, reason: FinishReason = "stop") -> Completion:
    spans = (VersionSpan(0, len(tokens), version),) if tokens else ()
    return Completion(tokens, (-0.5,) * len(tokens), spans, reason)


class ScriptedEngine:
    """One incarnation of one replica."""

    ranks = 1
    stages = True
    scores_paused = False

    def __init__(self, seat: Seat) -> None:
        self.name = seat.name
        self.seat = seat
        self.calls: asyncio.Queue[Call] = asyncio.Queue()
        self.open: list[Call] = []
        self.up = asyncio.Event()
        self.up.set()
        self.computes = asyncio.Event()
        self.computes.set()
        self.serves: int | None = seat.version
        self.probes = 0
        self.probed = asyncio.Event()
        self.closed = asyncio.Event()
        self.busy: Pressure | Exception = Pressure(0, 0, 0.0)

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        version: int | None = None,
        growing: Growing | None = None,
    ) -> Completion:
        call = Call(token_ids, sampling, version)
        if growing is not None:
            growing.certain = lambda: call.grown
        self.open.append(call)
        self.calls.put_nowait(call)
        try:
            return await call.answer
        except asyncio.CancelledError:
            call.cancelled = True
            raise
        finally:
            self.open.remove(call)

    def die(self, partial: Callable[[Call], Completion] = lambda call: said(reason="abort")) -> None:
        """Break every connection, and answer nobody."""
        self.up.clear()
        for call in self.open:
            call.fail(Broken(f"{self.name} is gone", partial(call)))

    async def pressure(self) -> Pressure:
        if isinstance(self.busy, Exception):
            raise self.busy
        return self.busy

    async def wait_ready(self, deadline_s: float) -> None:
        self.probes += 1
        self.probed.set()
        await self.up.wait()

    async def version(self) -> int | None:
        return self.serves

    async def close(self) -> None:
        self.closed.set()

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        await self.computes.wait()
        return [-0.5] * (len(token_ids) - 1)

    async def pause(self, mode: Partial) -> None:
        raise NotImplementedError

    async def resume(self) -> None:
        raise NotImplementedError

    async def join_group(self, plan: GroupPlan) -> None:
        raise NotImplementedError

    async def receive_weights(self, plan: TransferPlan) -> None:
        raise NotImplementedError

    async def swap_weights(self, version: int) -> None:
        raise NotImplementedError
