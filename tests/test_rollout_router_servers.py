"""The router over two real servers, of which one is killed under load: nothing is lost, within a second, and it comes back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from slipstream.agents import Session
from slipstream.agents.base import Completion
from slipstream.buffer.trajectory import VersionSpan
from slipstream.rollout.engines.base import SamplingParams
from slipstream.rollout.engines.vllm.client import VllmEngine
from slipstream.rollout.router import Router
from slipstream.tests import tiny
from slipstream.tests.conformance import reference
from slipstream.tests.conformance.kinds import KINDS
from slipstream.tests.conformance.replica import PROMPTS
from slipstream.tests.conformance.servers import MAX_CONCURRENT, Server, configure
from slipstream.weightsync.fleet import Fleet, ReplicaInfo

TOKENS = 900
"""So many that a server of the model below decodes for seconds, and this process may be late to kill it."""


async def test_a_server_that_is_killed_under_load_loses_no_token(tmp_path: Path) -> None:
    folder = tiny.tiny_qwen3(tmp_path / "model", wide=True)
    model = tiny.load(folder)
    (kind,) = (kind for kind in KINDS if kind.name == "transformers")
    servers = {name: Server(kind, configure(kind, folder), tmp_path / f"{name}.log") for name in "ab"}
    engines: list[VllmEngine] = []

    def make_engine(replica_info: ReplicaInfo) -> VllmEngine:
        options = {"vocab_size": tiny.VOCABULARY, "max_model_len": tiny.CONTEXT, "initial_version": 0}
        access = servers[replica_info.name].access
        engines.append(VllmEngine(replica_info.name, replica_info.url, access=access, **options))
        return engines[-1]

    def fleet(revision: int, restarts: int) -> Fleet:
        replica_infos = (ReplicaInfo(n, s.url, restarts * (n == "b"), "serving", 0) for n, s in servers.items())
        return Fleet(revision, tuple(replica_infos))

    cut: list[tuple[float, int]] = []
    router = Router(make_engine, max_concurrent=MAX_CONCURRENT, request_s=120.0, start_s=120.0, partial="recompute")

    async def episode(number: int) -> Completion:
        async def generate(token_ids: Sequence[int], max_tokens: int) -> Completion:
            sampling = SamplingParams(max_tokens, temperature=0.0)
            part = await router.generate(f"{number}", token_ids, sampling, 0)
            if part.finish_reason == "abort":
                cut.append((time.monotonic(), len(part.token_ids)))
            return part

        vocabulary = tiny.VOCABULARY
        session = Session(cast(Any, None), generate, vocabulary=vocabulary, max_tokens_per_turn=TOKENS, max_tokens=999)
        return await session.generate(PROMPTS[number])

    async def generating(engine: VllmEngine, share: float) -> float:
        """Its cache is fuller than `share`: it has sampled since."""
        usage = share
        while usage <= share:
            usage = (await engine.get_load()).kv_usage  # a round trip; the server has no event for it
        return usage

    try:
        await asyncio.gather(*(server.wait_ready() for server in servers.values()))
        async with asyncio.timeout(200), router:
            router.update(fleet(1, 0))
            episodes = [asyncio.create_task(episode(i)) for i in range(8)]
            await generating(engines[1], await generating(engines[1], 0.0))
            killed = time.monotonic()
            servers["b"].die()
            for number, completion in enumerate(await asyncio.gather(*episodes)):
                assert completion.version_spans == (VersionSpan(0, TOKENS, 0),)
                rows = reference.rows(model, PROMPTS[number], completion)
                assert reference.greedy(rows, completion.token_ids, servers["a"].tolerance)
                assert reference.error(rows, completion.token_ids, completion.logprobs) <= servers["a"].tolerance
            assert 1 <= len(cut) <= 4
            assert all(when - killed < 20.0 for when, _ in cut)  # at once, and not when a deadline of 120 s has passed
            assert sum(tokens for _, tokens in cut) > 0
            assert router.serving == 1

            servers["b"].start()
            await servers["b"].wait_ready()
            router.update(fleet(2, 1))
            assert router.serving == 2
            again = [asyncio.create_task(episode(i)) for i in range(8)]
            await generating(engines[2], 0.0)
            assert all(c.finish_reason == "length" for c in await asyncio.gather(*again))
    finally:
        for server in servers.values():
            server.close()
