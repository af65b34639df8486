"""Fixtures of the suite: a server with its client, the models it may serve, and pushes between them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import torch
from slipstream.agents.base import Completion
from slipstream.buffer.trajectory import VersionSpan
from slipstream.common import accelerator
from slipstream.common.accelerator import CollectiveBackend
from slipstream.common.images import PromptImage
from slipstream.configs.schema import Partial, TransportKind
from slipstream.rollout.concurrency import EngineLoad
from slipstream.rollout.engines.base import SamplingParams
from slipstream.rollout.engines.http_engine import HttpEngine
from slipstream.tests import tiny
from slipstream.tests.conformance import reference
from slipstream.tests.conformance.kinds import Kind
from slipstream.tests.conformance.servers import Server, push_s_of
from slipstream.weightsync.plan import PushReport
from slipstream.weightsync.publisher import Publisher
from transformers import PreTrainedModel

GREEDY = SamplingParams(max_tokens=24, temperature=0.0)

PROMPTS = [[(7 * i + 3 * j) % 440 + 4 for j in range(20 + i)] for i in range(8)]

VERSIONS = itertools.count(1)
"""Policy versions only rise, whichever server they go to."""


class Weights(msgspec.Struct, frozen=True):
    """Two policies of one architecture: the folders of their weights, and the models that transformers makes of them."""

    folders: tuple[Path, Path]
    models: tuple[PreTrainedModel, PreTrainedModel]


def make_weights(root: Path, *, tied: bool = True, moe: bool = False) -> Weights:
    """Two policies of random weights below `root`."""
    folders = tuple(tiny.tiny_qwen3(root / f"m{seed}", seed, tied=tied, moe=moe) for seed in range(2))
    return Weights(folders, tuple(tiny.load(folder) for folder in folders))  # type: ignore[arg-type]


def make_publisher(
    *engines: HttpEngine,
    folder: Path,
    partial: Partial = "recompute",
    transport: TransportKind = "broadcast",
    bucket_bytes: int = 64 << 10,
    push_s: float = 60.0,
    backend: CollectiveBackend = "gloo",
    tolerance: float = reference.TOLERANCE,
    quantized: bool = False,
) -> Publisher:
    """A publisher to `engines` as the learner makes one; weights are several buckets, files go below `folder`."""
    return Publisher(
        engines,
        transport=transport,
        folder=folder,
        spool=folder,
        host="127.0.0.1",
        backend=backend,
        device=torch.device("cpu") if backend == "gloo" else accelerator.device_of_rank(0),
        bucket_bytes=bucket_bytes,
        push_s=push_s,
        canary_tolerance=tolerance,
        partial=partial,
        quantized=quantized,
    )


class Replica:
    """A server that answers, and one client of it."""

    def __init__(
        self,
        kind: Kind,
        server: Server,
        weights: Weights,
        files: Path,
        partial: Partial = "recompute",
        *,
        sleeps: bool = False,
    ) -> None:
        self.kind, self.server, self.weights, self.partial = kind, server, weights, partial
        self.engine = server.client("replica", partial=partial, sleeps=sleeps)
        self.files = files
        self.tolerance = server.tolerance
        self.version: int | None = None
        self._publisher: Publisher | None = None

    async def push(self, which: int, transport: TransportKind = "broadcast") -> int:
        """Push policy `which` (0 or 1), as the learner does; returns its new version."""
        report = await self.publish(tiny.weights(self.weights.folders[which]).items(), which, transport)
        if "waited 5 s for version" in report.failed.get("replica", ""):
            # Two busy ranks on two cores may answer the probe late: the replica is caught up with, as a learner does.
            assert self._publisher is not None
            await asyncio.sleep(self._publisher.retry_in() or 0)
            report = await self._publisher.catch_up() or report
            self.version = await self.engine.version()
        assert report.failed == {}
        assert report.pushed == ("replica",)
        assert report.canary <= self.tolerance
        return report.version

    async def publish(
        self, named_weights: Iterable[tuple[str, torch.Tensor]], which: int, transport: TransportKind = "broadcast"
    ) -> PushReport:
        """Push any tensors as policy `which`."""
        if self._publisher is None:
            self._publisher = make_publisher(
                self.engine,
                folder=self.files,
                partial=self.partial,
                transport=transport,
                push_s=push_s_of(self.server.ranks),
                tolerance=self.tolerance,
            )
        canary = tiny.canary(self.weights.models[which])
        report = await self._publisher.publish(next(VERSIONS), named_weights, *canary)
        self.version = await self.engine.version()
        return report

    async def sleep(self) -> None:
        """Have it free its memory, as the learner does before a step; a push is to come before and after."""
        assert self._publisher is not None
        await self._publisher.sleep()

    async def wake(self) -> None:
        """Push once more what was pushed last, as the learner does after a step that changed no weight."""
        assert self._publisher is not None
        report = await self._publisher.wake()
        assert report is not None
        assert (report.version, report.pushed) == (self.version, ("replica",))

    async def generate(
        self, prompt: Sequence[int], sampling: SamplingParams = GREEDY, images: Sequence[PromptImage] = ()
    ) -> Completion:
        """A completion by the version pushed last; one that a pause cut short is continued."""
        whole = Completion((), (), (), "abort")
        while whole.finish_reason == "abort":
            left = msgspec.structs.replace(sampling, max_tokens=sampling.max_tokens - len(whole.token_ids))
            ids = [*prompt, *whole.token_ids]
            part = await self.engine.generate(ids, left, version=self.version, images=images)
            whole = join(whole, part)
        return whole

    async def generate_all(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams = GREEDY
    ) -> list[Completion]:
        """A completion for each prompt, all at once."""
        return await asyncio.gather(*(self.generate(prompt, sampling) for prompt in prompts))

    async def serves(self, which: int) -> bool:
        """Whether it samples what policy `which` would, and names its version."""
        completion = await self.generate(PROMPTS[0])
        rows = reference.rows(self.weights.models[which], PROMPTS[0], completion)
        spans = (VersionSpan(0, GREEDY.max_tokens, self.version or 0),)
        return completion.version_spans == spans and reference.greedy(rows, completion.token_ids, self.tolerance)

    async def running(self, count: int, within_s: float = 60.0, *, queue: bool = False) -> EngineLoad:
        """Return when exactly `count` requests decode, and others wait where there is to be a `queue`, which only polling shows."""
        async with asyncio.timeout(within_s):
            while (load := await self.engine.get_load()).running != count or (queue and not load.waiting):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        return load

    async def begun(self, requests: Sequence[asyncio.Task[Completion]]) -> None:
        """Return when all `requests`, and no others, decode, or when one of them has ended, which is all that a late look sees."""
        decoding = asyncio.create_task(self.running(len(requests)))
        await asyncio.wait({decoding, *requests}, return_when=asyncio.FIRST_COMPLETED)
        if not decoding.done():
            decoding.cancel()
        await asyncio.wait({decoding})
        if not decoding.cancelled():
            decoding.result()

    async def close(self) -> None:
        """Leave every group and close the connections; it may be used again, and then pushes by another transport, too."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()
        await self.engine.close()


def join(first: Completion, second: Completion) -> Completion:
    """`second` continued `first`; neighbouring spans of one policy become one."""
    shift = len(first.token_ids)
    spans = list(first.version_spans)
    for span in second.version_spans:
        start = spans[-1].end if spans else 0
        assert span.start + shift == start
        if spans and (spans[-1].version, spans[-1].kv_version) == (span.version, span.kv_version):
            start = spans.pop().start
        spans.append(VersionSpan(start, span.end + shift, span.version, span.kv_version))
    return Completion(
        first.token_ids + second.token_ids, first.logprobs + second.logprobs, tuple(spans), second.finish_reason
    )


ROUNDS = 5
"""How often a push under requests is repeated until it falls in the midst of one: they may all end in the moment before."""


class Traffic:
    """Greedy requests without end: when one has finished, its prompt is sent again, until the block is left.

        async with Traffic(replica) as traffic:
            await replica.push(1)
        for prompt, completion in traffic.finished: ...

    When the block begins every prompt has a request under way that has sampled tokens.
    """

    def __init__(self, replica: Replica, *, prompts: Sequence[list[int]] = PROMPTS[:4], max_tokens: int = 300) -> None:
        self.finished: list[tuple[list[int], Completion]] = []
        self._replica, self._prompts = replica, prompts
        self._sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        self._stopping = False
        self._loops: list[asyncio.Task[None]] = []

    def crossing(self) -> list[tuple[list[int], Completion]]:
        """Completions during which the weights changed."""
        return [(prompt, completion) for prompt, completion in self.finished if len(completion.version_spans) > 1]

    def most_spans(self) -> int:
        """The most versions that sampled one completion."""
        return max((len(completion.version_spans) for _, completion in self.finished), default=0)

    async def __aenter__(self) -> Traffic:
        self._loops = [asyncio.create_task(self._repeat(prompt)) for prompt in self._prompts]
        await self._replica.running(len(self._prompts), within_s=push_s_of(self._replica.server.ranks))
        # One that was sent after all the others has come back: the others have sampled, too.
        await self._replica.generate(PROMPTS[7], SamplingParams(max_tokens=40, temperature=0.0))
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        self._stopping = True
        if kind is not None:
            for loop in self._loops:
                loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=kind is not None)

    async def _repeat(self, prompt: list[int]) -> None:
        while not self._stopping:
            self.finished.append((prompt, await self._replica.generate(prompt, self._sampling)))
