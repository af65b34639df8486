"""An engine whose answers a test scripts, for faults that no real server has on demand. It proves nothing about servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from slipstream.agents.base import Completion, FinishReason
from slipstream.buffer.trajectory import VersionSpan
from slipstream.common.images import PromptImage
from slipstream.configs.schema import Partial
from slipstream.rollout.engines.base import (
    EMPTY,
    EngineFailure,
    EngineLoad,
    FalseReply,
    PartialCompletion,
    SamplingParams,
)
from slipstream.weightsync.fleet import ReplicaInfo
from slipstream.weightsync.plan import GroupPlan, TransferPlan


async def settle() -> None:
    """Let every task run until it waits for an event that the test has not caused yet."""
    for _ in range(20):
        await asyncio.sleep(0)


class Call:
    """A request at an engine, to be answered by the test."""

    def __init__(self, token_ids: Sequence[int], sampling: SamplingParams, version: int | None) -> None:
        self.token_ids = tuple(token_ids)
        self.sampling = sampling
        self.version = version
        self.cancelled = False
        self.grown = EMPTY
        self.answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()

    def complete(self, *tokens: int, version: int = 0, reason: FinishReason = "stop") -> None:
        self.answer.set_result(completion_of(*tokens, version=version, reason=reason))

    def grow(self, *tokens: int, version: int = 0) -> None:
        """These tokens of the answer have arrived."""
        self.grown = completion_of(*tokens, version=version, reason="abort")

    def fail(self, error: Exception) -> None:
        self.answer.set_exception(error)


def completion_of(*tokens: int, version: int = 0, reason: FinishReason = "stop") -> Completion:
    spans = (VersionSpan(0, len(tokens), version),) if tokens else ()
    return Completion(tokens, (-0.5,) * len(tokens), spans, reason)


class ScriptedEngine:
    """One incarnation of one replica."""

    ranks = 1
    scores_paused = False
    sleeps = False

    def __init__(self, replica_info: ReplicaInfo) -> None:
        self.name = replica_info.name
        self.replica_info = replica_info
        self.calls: asyncio.Queue[Call] = asyncio.Queue()
        self.open: list[Call] = []
        self.up = asyncio.Event()
        self.up.set()
        self.computes = asyncio.Event()
        self.computes.set()
        self.lies = False  # whether it scores falsely
        self.serves: int | None = replica_info.version
        self.probes = 0
        self.probed = asyncio.Event()
        self.closed = asyncio.Event()
        self.busy: EngineLoad | Exception = EngineLoad(0, 0, 0.0)

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        version: int | None = None,
        growing: PartialCompletion | None = None,
        images: Sequence[PromptImage] = (),
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

    def die(self, partial: Callable[[Call], Completion] = lambda call: completion_of(reason="abort")) -> None:
        """Break every connection, and answer no probe."""
        self.up.clear()
        for call in self.open:
            call.fail(EngineFailure(f"{self.name} is gone", partial(call)))

    async def get_load(self) -> EngineLoad:
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
        for call in self.open:
            if not call.answer.done():
                call.cancelled = True
                call.fail(EngineFailure(f"the client of {self.name} was closed", call.grown))
        self.closed.set()

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        await self.computes.wait()
        if self.lies:
            raise FalseReply(f"{self.name} has a positive log-prob")
        return [-0.5] * (len(token_ids) - 1)

    async def pause(self, mode: Partial) -> None:
        raise NotImplementedError

    async def resume(self) -> None:
        raise NotImplementedError

    async def sleep(self) -> None:
        raise NotImplementedError

    async def wake(self) -> None:
        raise NotImplementedError

    async def join_group(self, plan: GroupPlan) -> None:
        raise NotImplementedError

    async def receive_weights(self, plan: TransferPlan) -> None:
        raise NotImplementedError

    async def swap_weights(self, version: int) -> None:
        raise NotImplementedError
