"""A worker in a process of its own, over an engine that answers by itself: `python lone_worker.py ADDRESS NAME POLICY`."""

from __future__ import annotations

import asyncio
import functools
import itertools
import signal
import sys

from slipstream.agents import Session, load_agent, load_renderer
from slipstream.agents.base import Generate
from slipstream.buffer.client import BufferClient
from slipstream.configs import load
from slipstream.envs.registry import EnvPart
from slipstream.learner.model import load_tokenizer, vocabulary_size
from slipstream.rollout.engines.base import EngineLoad
from slipstream.rollout.player import EpisodePlayer
from slipstream.rollout.router import Router
from slipstream.rollout.worker import Worker
from slipstream.tests.episodes import Once
from slipstream.tests.scripted import ScriptedEngine
from slipstream.weightsync.fleet import Fleet, ReplicaInfo

GROUP = 2
SLOTS = 4
ANSWER_S = 0.05


async def answer(engine: ScriptedEngine) -> None:
    """Every request gets three tokens, after a while."""
    while True:
        call = await engine.calls.get()
        version = engine.serves or 0
        call.grow(40, version=version)
        complete = functools.partial(call.complete, 40, 41, 42, version=version)
        asyncio.get_running_loop().call_later(ANSWER_S, lambda c=call, complete=complete: c.answer.done() or complete())


async def follow(client: BufferClient, router: Router, engine: ScriptedEngine) -> None:
    """The engine serves what the learner made last."""
    for revision in itertools.count(1):
        engine.serves = (await client.stats()).version
        router.update(Fleet(revision, (ReplicaInfo("a", "http://a", 0, "serving", engine.serves),)))
        await asyncio.sleep(ANSWER_S / 2)


async def work(address: str, name: str, policy: str) -> None:
    made: list[ScriptedEngine] = []

    def make_engine(replica_info: ReplicaInfo) -> ScriptedEngine:
        made.append(ScriptedEngine(replica_info))
        return made[-1]

    renderer = load_renderer("qwen3", load_tokenizer(policy), thinking=False)

    def make_session(generate: Generate) -> Session:
        return Session(renderer, generate, vocabulary=vocabulary_size(policy), max_tokens_per_turn=8, max_tokens=256)

    config = load("quickstart", [f"rollout.engine.max_concurrent={SLOTS}"])
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with Router(make_engine, max_concurrent=SLOTS, request_s=60.0, start_s=60.0, partial="recompute") as router:
        router.update(Fleet(0, (ReplicaInfo("a", "http://a", 0, "serving", 0),)))
        made[0].busy = EngineLoad(1, 0, 0.9)
        parts = (EnvPart("once", 1.0, Once(split="train", seed=0), None),)
        player = EpisodePlayer(config, load_agent("single_turn"), parts, router, make_session, (), 1.0)
        async with BufferClient(address, name) as client:
            others = asyncio.gather(answer(made[0]), follow(client, router, made[0]))
            await Worker(player, client, GROUP, 1).run(stop)
            others.cancel()


if __name__ == "__main__":
    asyncio.run(work(*sys.argv[1:]))
