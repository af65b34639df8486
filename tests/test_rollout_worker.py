"""The worker between a real buffer and servers that say how busy they are: slots, leases, accounts."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from slipstream.agents import Session, load_agent, load_renderer
from slipstream.agents.base import Generate
from slipstream.buffer.client import BufferClient
from slipstream.buffer.messages import Stats
from slipstream.buffer.service import BufferService
from slipstream.configs import load
from slipstream.configs.schema import Buffer, Config
from slipstream.envs import Message, Observation, SimpleEnv, StepResult, Task
from slipstream.learner.model import load_tokenizer, vocabulary_size
from slipstream.rollout import worker as module
from slipstream.rollout.engine import Pressure
from slipstream.rollout.evaluation import evaluate
from slipstream.rollout.router import Router
from slipstream.rollout.worker import Player, Worker
from slipstream.tests.runs import tiny_policy
from slipstream.tests.scripted import Call, ScriptedEngine, settle
from slipstream.weightsync.fleet import Fleet, Seat

SOON = 20.0
GROUP = 4
SLOTS = 8
CONFIG = load("quickstart", [f"rollout.engine.max_concurrent={SLOTS}"])
BUFFER = Buffer(max_staleness=99, groups_per_batch=4, group_size=GROUP, lease_s=60.0)


class Once(SimpleEnv):
    """One question, one answer."""

    def task(self, index: int) -> Task:
        return Task(f"once-{index}")

    async def reset(self, task: Task) -> Observation:
        return Observation((Message("user", "Well?"),))

    async def step(self, message: Message) -> StepResult:
        return StepResult((), 1.0, done=True)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("model") / "policy")


@pytest.fixture(autouse=True)
def _fast_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAMPLE_S", 0.01)
    monkeypatch.setattr(module, "PROGRESS_S", 0.01)


class World:
    """One engine, one buffer, one worker that plays until `stop`."""

    def __init__(
        self, policy: Path, router: Router, learner: BufferClient, engine: ScriptedEngine, config: Config
    ) -> None:
        renderer = load_renderer("qwen3", load_tokenizer(str(policy)), thinking=False)

        def make_session(generate: Generate) -> Session:
            size = vocabulary_size(str(policy))
            return Session(renderer, generate, vocabulary=size, max_tokens_per_turn=8, max_tokens=256)

        source = Once(split="train", seed=0)
        self.player = Player(config, load_agent("single_turn"), source, router, make_session, (), 1.0)
        self.learner = learner
        self.engine = engine
        self.stop = asyncio.Event()

    async def stats(self) -> Stats:
        return await self.learner.stats()

    async def until(self, playing: int) -> None:
        """So many requests are at the engine."""
        while len(self.unanswered()) < playing:
            await self.engine.calls.get()

    def unanswered(self) -> list[Call]:
        return [call for call in self.engine.open if not call.answer.done()]

    async def finish(self) -> None:
        """Answer everything that is at the engine, and wait until the buffer has it."""
        before = (await self.stats()).ledger.ready
        calls = list(self.engine.open)
        for call in calls:
            call.say(40, 41, 42)
        while (await self.stats()).ledger.ready < before + 3 * len(calls):
            pass  # each look is a round trip to the service


@contextlib.asynccontextmanager
async def world(
    policy: Path, tmp_path: Path, buffer: Buffer = BUFFER, *, works: bool = True, config: Config = CONFIG
) -> AsyncIterator[World]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    service = BufferService(buffer, tmp_path / "buffer.sqlite", address)
    made: list[ScriptedEngine] = []

    def make_engine(seat: Seat) -> ScriptedEngine:
        made.append(ScriptedEngine(seat))
        return made[-1]

    async with asyncio.timeout(SOON), contextlib.AsyncExitStack() as stack:
        ready = asyncio.Event()
        serving = asyncio.create_task(service.serve(ready.set))
        await ready.wait()
        options = {"max_concurrent": SLOTS, "request_s": SOON, "start_s": SOON}
        router = await stack.enter_async_context(Router(make_engine, **options, partial="recompute"))
        router.update(Fleet(1, (Seat("a", "http://a", 0, "serving", 0),)))
        learner = await stack.enter_async_context(BufferClient(address, "learner"))
        client = await stack.enter_async_context(BufferClient(address, "worker-0"))
        await learner.served(await learner.recover(0))
        w = World(policy, router, learner, made[0], config)
        w.engine.busy = Pressure(1, 0, 0.9)  # neither grow nor shrink by much
        worker = Worker(w.player, client, buffer.group_size, 1)
        playing = asyncio.create_task(worker.run(w.stop) if works else w.stop.wait())
        yield w
        w.stop.set()
        await playing
        stats = await learner.stats()
        assert stats.leased_groups == 0
        assert stats.ledger.closes
        serving.cancel()
        await asyncio.wait({serving})


async def test_slots_grow_while_the_servers_have_room_and_shrink_without_ending_an_episode(
    policy: Path, tmp_path: Path
) -> None:
    async with world(policy, tmp_path) as w:
        w.engine.busy = Pressure(8, 0, 0.1)
        await w.until(12)  # more than it began with; the router lets no more through
        w.engine.busy = Pressure(8, 100, 1.0)
        under_way = list(w.engine.open)
        await w.finish()
        assert not any(call.cancelled for call in under_way)
        for _ in range(12):  # what was leased before the cut comes to an end
            await w.until(1)
            await w.finish()
        peak = 0
        for _ in range(6):
            await w.until(GROUP)
            peak = max(peak, len(w.engine.open))
            await w.finish()
        assert peak == GROUP  # one group always has room
        assert (await w.stats()).ledger.discarded == {}


async def test_only_what_stands_empty_for_want_of_a_lease_is_idle(policy: Path, tmp_path: Path) -> None:
    one_group = Buffer(max_staleness=0, groups_per_batch=1, group_size=GROUP, lease_s=60.0)
    async with world(policy, tmp_path, one_group) as w:
        w.engine.busy = Pressure(4, 0, 0.1)
        await w.until(GROUP)  # admission allows no more, and there is room for another
        before = await w.stats()
        while (after := await w.stats()).slot_s < before.slot_s + 0.5:
            pass
        idle = (after.idle_slot_s - before.idle_slot_s) / (after.slot_s - before.slot_s)
        assert idle == pytest.approx((SLOTS - GROUP) / SLOTS, abs=0.02)
        for call in w.engine.open[:1]:
            call.say(40, 41, 42)


async def test_full_slots_are_not_idle(policy: Path, tmp_path: Path) -> None:
    async with world(policy, tmp_path) as w:
        w.engine.busy = Pressure(0, 1, 0.0)  # paused: the slots stay as they are
        await w.until(SLOTS)
        before = await w.stats()
        w.engine.open[0].say(40, 41, 42)  # seven play, and a group needs room for four
        while (after := await w.stats()).slot_s < before.slot_s + 0.5:
            pass
        assert after.idle_slot_s == before.idle_slot_s
        assert after.ledger.ready == 3


async def test_tokens_of_completions_that_are_cut_off_are_generated_tokens(policy: Path, tmp_path: Path) -> None:
    async with world(policy, tmp_path) as w:
        await w.until(GROUP)
        calls = list(w.engine.open)
        for call in calls:
            call.grow(40, 41)
        w.stop.set()
        while (stats := await w.stats()).leased_groups:
            pass
        assert stats.ledger.generated == 2 * len(calls)
        assert sum(stats.ledger.discarded.values()) == 2 * len(calls)


async def test_tokens_of_an_episode_that_ran_out_of_time_are_generated_tokens(policy: Path, tmp_path: Path) -> None:
    hasty = msgspec.structs.replace(CONFIG, rollout=msgspec.structs.replace(CONFIG.rollout, episode_s=0.5))
    async with world(policy, tmp_path, config=hasty) as w:
        await w.until(GROUP)
        calls = list(w.engine.open)
        for call in calls:
            call.grow(40, 41)
        while (stats := await w.stats()).ledger.discarded.get("failed_timeout", 0) < 2 * len(calls):
            pass
        assert stats.ledger.closes


async def test_an_evaluation_plays_what_the_servers_decode_at_once(policy: Path, tmp_path: Path) -> None:
    async with world(policy, tmp_path, works=False) as w:
        evaluating = asyncio.create_task(evaluate(w.player, "final", 20))
        played = peak = 0
        while played < 20:
            await w.until(min(SLOTS, 20 - played))
            await settle()
            peak = max(peak, len(w.unanswered()))
            for call in w.unanswered():
                call.say(40, 41, version=6)
                played += 1
        result = await evaluating
        assert peak == SLOTS
        assert (result.tasks, result.version, result.reward_mean) == (20, 6, 1.0)
