"""The worker between a real buffer and scripted engines: slots, leases, the token ledger."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from slipstream.agents import Session, load_agent, load_renderer
from slipstream.agents.base import Agent, Generate, Policy
from slipstream.buffer import client as client_module
from slipstream.buffer.client import BufferClient
from slipstream.buffer.ledger_report import ledgers_by_version
from slipstream.buffer.messages import Stats
from slipstream.buffer.schema import process_names
from slipstream.configs import load
from slipstream.configs.environments import Dataset
from slipstream.configs.schema import Buffer, Config, Failure, Reason
from slipstream.envs import Environment, EnvPart, Message, StepResult, Task, task_source
from slipstream.errors import PolicyError, ToolError, first_cause
from slipstream.learner.model import load_tokenizer, vocabulary_size
from slipstream.rollout import failures
from slipstream.rollout import worker as module
from slipstream.rollout.engines.base import EngineLoad
from slipstream.rollout.evaluation import evaluate, fewer_tasks
from slipstream.rollout.player import EpisodePlayer
from slipstream.rollout.router import Router
from slipstream.rollout.routing import AHEAD
from slipstream.rollout.worker import Worker
from slipstream.tests import tiny
from slipstream.tests.episodes import Once
from slipstream.tests.fleets import buffer_service, mark_served
from slipstream.tests.runs import query
from slipstream.tests.scripted import Call, ScriptedEngine, settle
from slipstream.weightsync.fleet import Fleet, ReplicaInfo

SOON = 60.0
GROUP = 4
SLOTS = 8
CONFIG = load("quickstart", [f"rollout.engine.max_concurrent={SLOTS}"])
BUFFER = Buffer(max_staleness=99, groups_per_batch=4, group_size=GROUP)


ONCE = EnvPart("once", 1.0, Once(split="train", seed=0), None)
ANSWERS = load_agent("single_turn")


@pytest.fixture(autouse=True)
def _fast_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAMPLE_S", 0.01)
    monkeypatch.setattr(module, "PROGRESS_S", 0.01)


class World:
    """One engine, one buffer, one worker that plays until `stop`."""

    playing: asyncio.Task[Any]
    worker: Worker

    def __init__(
        self,
        policy: Path,
        router: Router,
        learner: BufferClient,
        engine: ScriptedEngine,
        config: Config,
        agent: Agent,
        parts: Sequence[EnvPart],
    ) -> None:
        renderer = load_renderer("qwen3", load_tokenizer(str(policy)), thinking=False)

        def make_session(generate: Generate) -> Session:
            size = vocabulary_size(str(policy))
            return Session(renderer, generate, vocabulary=size, max_tokens_per_turn=8, max_tokens=256)

        self.player = EpisodePlayer(config, agent, parts, router, make_session, (), 1.0)
        self.learner = learner
        self.engine = engine
        self.stop = asyncio.Event()
        self.version = 0

    async def stats(self) -> Stats:
        return await self.learner.stats()

    async def steady(self) -> Stats:
        """The stats once two more reports have come: one of what was before may have been on its way."""
        stats = await self.stats()
        for _ in range(2):
            before = stats.slot_s
            while (stats := await self.stats()).slot_s == before:
                pass
        return stats

    async def serve(self, version: int) -> None:
        """The engine has `version` now."""
        self.version = self.engine.serves = version
        self.player.router.update(Fleet(1 + version, (ReplicaInfo("a", "http://a", 0, "serving", version),)))
        mark_served(self.learner, version)

    async def until(self, playing: int) -> None:
        """So many requests are at the engine; more, and those of another group in part, where the worker has room for two."""
        while len(self.unanswered()) < playing:
            await self.engine.calls.get()

    async def until_all(self) -> None:
        """Every episode that plays is at the engine, or as many as the router lets through, and at least one plays."""
        while not self.unanswered() or len(self.unanswered()) < min(SLOTS + AHEAD, self.worker.gauges()["playing"]):
            await self.stats()

    def unanswered(self) -> list[Call]:
        return [call for call in self.engine.open if not call.answer.done()]

    async def finish(self) -> None:
        """Answer everything that is at the engine, and wait until the buffer has it."""
        before = (await self.stats()).ledger.ready
        calls = list(self.engine.open)
        for call in calls:
            call.complete(40, 41, 42)
        while (await self.stats()).ledger.ready < before + 3 * len(calls):
            pass  # each look is a round trip to the service


@contextlib.asynccontextmanager
async def world(
    policy: Path,
    tmp_path: Path,
    buffer: Buffer = BUFFER,
    *,
    works: bool = True,
    config: Config = CONFIG,
    agent: Agent = ANSWERS,
    parts: Sequence[EnvPart] = (ONCE,),
    retries: Mapping[str, int] | None = None,
    greedy: bool = False,
    served: bool = True,
) -> AsyncIterator[World]:
    """With `served` the fleet serves a version before the worker begins; without it no group is granted."""
    names = process_names(buffer.shards)
    addresses = [f"tcp://127.0.0.1:{tiny.free_port()}" for _ in names]
    rules = {"shares": tuple(part.share for part in parts), "retries": retries, "greedy": greedy}
    services = [
        buffer_service(buffer, tmp_path / f"{name}.sqlite", addresses[shard], **rules, shard=shard)
        for shard, name in enumerate(names)
    ]
    made: list[ScriptedEngine] = []

    def make_engine(replica_info: ReplicaInfo) -> ScriptedEngine:
        made.append(ScriptedEngine(replica_info))
        return made[-1]

    async with asyncio.timeout(SOON), contextlib.AsyncExitStack() as stack:
        serving = []
        for service in services:
            ready = asyncio.Event()
            serving.append(asyncio.create_task(service.serve(ready.set)))
            await ready.wait()
        options = {"max_concurrent": SLOTS, "request_s": SOON, "start_s": SOON}
        router = await stack.enter_async_context(Router(make_engine, **options, partial="recompute"))
        router.update(Fleet(1, (ReplicaInfo("a", "http://a", 0, "serving", 0),)))
        learner = await stack.enter_async_context(BufferClient(addresses[0], "learner", addresses[1:]))
        client = await stack.enter_async_context(BufferClient(addresses[0], "worker-0", addresses[1:]))
        version = await learner.recover(0)
        if served:
            mark_served(learner, version)
        w = World(policy, router, learner, made[0], config, agent, parts)
        w.engine.busy = EngineLoad(1, 0, 0.9)  # neither grow nor shrink by much
        w.worker = Worker(w.player, client, buffer.group_size, 1)
        w.playing = playing = asyncio.create_task(w.worker.run(w.stop) if works else w.stop.wait())
        yield w
        w.stop.set()
        await playing
        stats = await learner.stats()
        assert stats.leased_groups == 0
        assert stats.ledger.balances
        for task in reversed(serving):  # each gives back what it has changed in this process
            task.cancel()
            await asyncio.wait({task})


async def test_slots_grow_while_the_servers_have_room_and_shrink_without_ending_an_episode(
    policy: Path, tmp_path: Path
) -> None:
    async with world(policy, tmp_path) as w:
        w.engine.busy = EngineLoad(8, 0, 0.1)
        await w.until(SLOTS + AHEAD)  # more than it began with; the router lets no more through
        w.engine.busy = EngineLoad(8, 100, 1.0)
        under_way = list(w.engine.open)
        await w.finish()
        assert not any(call.cancelled for call in under_way)
        await w.until_all()
        while max(w.worker.gauges()["slots"], len(w.engine.open)) > GROUP:  # what was leased before the cut ends
            await w.finish()
            await w.until_all()
        for _ in range(6):
            await w.until_all()
            assert len(w.engine.open) == GROUP  # one group always has room
            await w.finish()
        assert (await w.stats()).ledger.discarded == {}


async def test_a_group_that_was_asked_for_before_the_limit_fell_is_played(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "LEASE_S", SOON)
    two = Buffer(max_staleness=0, groups_per_batch=2, group_size=GROUP, shards=2)
    async with world(policy, tmp_path, two, served=False) as w:
        _, first, second = w.learner._addresses.values()
        while len(w.worker._buffer._asked) < two.shards:
            await w.stats()
        w.worker.set_limit(GROUP)
        mark_served(first, 0)
        await w.until(GROUP)
        assert w.worker.gauges()["slots"] == GROUP  # there is room for no other
        mark_served(second, 0)
        await w.until(2 * GROUP)


async def test_only_what_stands_empty_for_want_of_a_lease_is_idle(policy: Path, tmp_path: Path) -> None:
    one_group = Buffer(max_staleness=0, groups_per_batch=1, group_size=GROUP)
    async with world(policy, tmp_path, one_group) as w:
        w.engine.busy = EngineLoad(4, 0, 0.1)
        await w.until(GROUP)  # admission allows no more, and there is room for another
        before = await w.steady()
        while (after := await w.stats()).slot_s < before.slot_s + 0.5:
            pass
        idle = (after.idle_slot_s - before.idle_slot_s) / (after.slot_s - before.slot_s)
        assert idle == pytest.approx((SLOTS - GROUP) / SLOTS, abs=0.02)
        for call in w.engine.open[:1]:
            call.complete(40, 41, 42)


async def test_full_slots_are_not_idle(policy: Path, tmp_path: Path) -> None:
    async with world(policy, tmp_path) as w:
        w.engine.busy = EngineLoad(0, 1, 0.0)  # paused: the slots stay as they are
        await w.until(SLOTS)
        before = await w.steady()
        w.engine.open[0].complete(40, 41, 42)  # seven play, and a group needs room for four
        while (after := await w.stats()).slot_s < before.slot_s + 0.5 or not after.ledger.ready:
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
        calls: list[Call] = []
        while (stats := await w.stats()).ledger.discarded.get("failed_timeout", 0) < 2 * GROUP:
            for call in w.unanswered():
                if call not in calls:
                    call.grow(40, 41)
                    calls.append(call)
        assert stats.ledger.balances
        assert set(stats.ledger.discarded) == {"failed_timeout"}


async def test_tokens_are_reported_under_the_version_that_sampled_them(policy: Path, tmp_path: Path) -> None:
    one_group = Buffer(max_staleness=1, groups_per_batch=1, group_size=GROUP)
    async with world(policy, tmp_path, one_group) as w:
        w.worker.set_limit(GROUP)  # two groups may be outstanding, and one is played after the other
        await w.until(GROUP)
        assert await train(w, 0) == {0: 3 * GROUP}
        await w.serve(1)
        await w.until(GROUP)
        (*others, last) = w.unanswered()
        last.grow(40, 41)
        for call in others:
            call.complete(40, 41, 42, version=1)
        while (await w.stats()).ledger.ready < 3 * len(others):
            pass
        w.stop.set()
        while (await w.stats()).leased_groups:
            pass
        books = {
            version: book for version, book in ledgers_by_version(tmp_path / "buffer.sqlite").items() if book.generated
        }
        assert books[0].trained == 3 * GROUP
        assert (books[1].generated, books[1].ready) == (3 * len(others), 3 * len(others))
        assert books[0].discarded["worker_stopped"] == 2  # the tokens of the last one, which reported version 0


async def train(w: World, version: int) -> dict[int, int]:
    """Answer one group, train on it; sampled tokens by version."""
    for call in w.unanswered():
        call.complete(40, 41, 42, version=version)
    batch = await w.learner.take(version, SOON)
    await w.learner.commit(version)
    counts: dict[int, int] = {}
    for span in (s for group in batch.groups for t in group for s in t.version_spans):
        counts[span.version] = counts.get(span.version, 0) + span.end - span.start
    return counts


async def test_an_episode_of_a_complete_group_is_cancelled(policy: Path, tmp_path: Path) -> None:
    two_of_four = Buffer(max_staleness=0, groups_per_batch=1, group_size=GROUP, min_members=2)
    async with world(policy, tmp_path, two_of_four) as w:
        await w.until(GROUP)
        fast, slow = w.unanswered()[:2], w.unanswered()[2:]
        for call in slow:
            call.grow(40)
        for call in fast:
            call.complete(40, 41, 42)
        batch = await w.learner.take(0, SOON)
        assert len(batch.groups[0]) == 2
        while not all(call.cancelled for call in slow):
            await w.stats()
        await w.learner.commit(0)
        await w.serve(1)
        await w.until(GROUP)  # the slots of the stragglers are free again
        stats = await w.stats()
        assert stats.ledger.discarded == {"straggler": 2}
        assert (stats.ledger.generated, stats.ledger.trained) == (8, 6)
        assert stats.ledger.balances


async def gives_up_once(env: Environment, policy: Policy, task: Task) -> float:
    """Cancels its first call, and goes on with another."""
    observation = await env.reset(task)
    first = asyncio.create_task(policy.chat(observation.messages))
    await PATIENCE.wait()
    first.cancel()
    await asyncio.wait({first})
    return (await env.step(await policy.chat(observation.messages))).reward


async def leaves_calls_behind(env: Environment, policy: Policy, task: Task) -> float:
    """Ends while it has a call in flight, and tries another after its end."""
    observation = await env.reset(task)

    async def goes_on() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await policy.chat(observation.messages)
        try:
            await policy.chat(observation.messages)
        except PolicyError as error:
            AFTER_THE_END.append(str(error))

    LEFT_BEHIND.append(asyncio.create_task(goes_on()))
    reply = await policy.chat([*observation.messages, Message("user", "Really?")])
    return (await env.step(reply)).reward


PATIENCE = asyncio.Event()
LEFT_BEHIND: list[asyncio.Task[None]] = []
AFTER_THE_END: list[str] = []


async def test_tokens_of_a_call_that_the_agent_gave_up_are_unused(policy: Path, tmp_path: Path) -> None:
    PATIENCE.clear()
    async with world(policy, tmp_path, ONE_GROUP, agent=gives_up_once) as w:
        await w.until(GROUP)
        given_up = w.unanswered()
        for call in given_up:
            call.grow(40, 41)
        PATIENCE.set()
        while not all(call.cancelled for call in given_up):
            await settle()
        while len(answered := w.unanswered()) < len(given_up):
            await w.engine.calls.get()
        for call in answered:
            call.complete(40, 41, 42)
        while (stats := await w.stats()).ledger.ready < 3 * len(given_up):
            pass
        assert stats.ledger.discarded == {"unused": 2 * len(given_up)}
        assert stats.ledger.balances


async def test_calls_that_an_agent_left_behind_end_with_its_episode(policy: Path, tmp_path: Path) -> None:
    LEFT_BEHIND.clear()
    AFTER_THE_END.clear()
    one_group = Buffer(max_staleness=0, groups_per_batch=1, group_size=2)
    async with world(policy, tmp_path, one_group, agent=leaves_calls_behind) as w:
        await w.until(4)
        longest = max(len(call.token_ids) for call in w.unanswered())
        waited_for = [call for call in w.unanswered() if len(call.token_ids) == longest]
        left = [call for call in w.unanswered() if len(call.token_ids) < longest]
        for call in left:
            call.grow(40, 41)
        for call in waited_for:
            call.complete(40, 41, 42)
        while (stats := await w.stats()).ledger.ready < 6:
            pass
        assert all(call.cancelled for call in left)
        assert stats.ledger.discarded == {"unused": 4}
        await asyncio.wait(LEFT_BEHIND)
        assert len(AFTER_THE_END) == 2
        assert all("is over" in line for line in AFTER_THE_END)
        assert not w.engine.open


class Talkative(Once):
    """Reports metrics of 40 kB."""

    async def step(self, message: Message) -> StepResult:
        return StepResult((), 1.0, done=True, metrics={f"{number:0200d}": 1.0 for number in range(200)})


async def test_an_episode_that_is_too_large_to_be_delivered_has_failed_and_the_worker_goes_on(
    policy: Path, tmp_path: Path
) -> None:
    part = EnvPart("talkative", 1.0, Talkative(split="train", seed=0), None)
    async with world(policy, tmp_path, ONE_GROUP, parts=(part,)) as w:
        for connection in w.worker._buffer.connections.values():
            connection._frame_limit = 20_000
        await w.until(GROUP)
        for call in w.unanswered():
            call.complete(40, 41, 42)
        while (stats := await w.stats()).ledger.discarded.get("failed_policy", 0) < 3 * GROUP:
            assert not w.playing.done()
        assert stats.ledger.balances
        await w.until(GROUP)  # it plays the next group


class Fragile(Once):
    """Fails in its first `fails` steps, then works."""

    fails = 0
    penalty = -1.0

    async def step(self, message: Message) -> StepResult:
        if type(self).fails:
            type(self).fails -= 1
            raise ToolError("the sandbox is gone")
        return await super().step(message)


def policies(failures: dict[Reason, Failure]) -> Config:
    rollout = msgspec.structs.replace(CONFIG.rollout, failures=failures)
    return msgspec.structs.replace(CONFIG, rollout=rollout)


FRAGILE = EnvPart("fragile", 1.0, Fragile(split="train", seed=0), -1.0)
ONE_GROUP = Buffer(max_staleness=0, groups_per_batch=1, group_size=GROUP)


async def answer_all(w: World) -> None:
    """Answer every request, until cancelled."""
    while True:
        for call in w.unanswered():
            call.complete(40, 41, 42)
        await w.engine.calls.get()


async def test_the_greedy_member_of_a_group_is_played_at_temperature_0_and_the_others_are_not(
    policy: Path, tmp_path: Path
) -> None:
    buffer = msgspec.structs.replace(BUFFER, max_staleness=0, groups_per_batch=1)
    async with world(policy, tmp_path, buffer, greedy=True) as w:
        await w.until(GROUP)
        for call in w.unanswered():
            call.complete(*([40] if call.sampling.temperature == 0 else [40, 41]))
        temperatures = sorted(call.sampling.temperature for call in w.engine.open)
        assert temperatures == [0.0] + [1.0] * (GROUP - 1)
        batch = await w.learner.take(0, SOON)
        assert batch.withheld == {"0.0.0": "baseline"}
        assert [t.sampled for t in batch.groups[0]] == [1, 2, 2, 2]
        evaluating = asyncio.create_task(evaluate(w.player, "after", 1))
        await w.until(1)
        (call,) = w.unanswered()
        assert call.sampling.temperature == 1.0  # an evaluation samples at the player's temperature
        call.complete(40)
        await evaluating


@pytest.mark.parametrize("then", ["drop", "train"])
async def test_a_member_that_failed_is_played_again_while_its_budget_lasts(
    then: Literal["drop", "train"], policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fragile, "fails", GROUP + 1)  # every first attempt, and one second one
    config = policies({"tool": Failure(retries=1, then=then)})
    async with world(policy, tmp_path, ONE_GROUP, config=config, parts=[FRAGILE], retries={"tool": 1}) as w:
        answering = asyncio.create_task(answer_all(w))
        batch = await w.learner.take(0, SOON)
        answering.cancel()
        (group,) = batch.groups
        ends = sorted((t.outcome.kind, t.reward, len(t.turn_rewards)) for t in group)
        finished = [("finished", 1.0, 1)] * (GROUP - 1)
        assert ends == (finished if then == "drop" else [("failed", -1.0, 0), *finished][:1] + finished)
        assert {t.id.split(".")[1] for t in group} == {"1"}
        stats = await w.stats()
        assert stats.ledger.discarded == {"failed_tool": 3 * (GROUP + (then == "drop"))}
        assert stats.outcomes == {"failed_tool": GROUP + 1, "finished": GROUP - 1}
        await w.learner.commit(0)


async def test_failures_in_a_row_end_the_worker_also_where_they_are_trained_on(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fragile, "fails", 1 << 30)
    monkeypatch.setattr(failures, "EPISODES", 8)
    config = policies({"tool": Failure(then="train")})
    many = msgspec.structs.replace(BUFFER, groups_per_batch=64)
    with pytest.raises(ExceptionGroup) as caught:
        async with world(policy, tmp_path, many, config=config, parts=[FRAGILE]) as w:
            await answer_all_until(w, w.playing)
    assert "episodes in a row failed, the last by tool: the sandbox is gone" in str(first_cause(caught.value))


async def answer_all_until(w: World, end: asyncio.Task[Any]) -> None:
    answering = asyncio.create_task(answer_all(w))
    await asyncio.wait({end})
    answering.cancel()


async def test_a_slow_environment_is_neither_starved_nor_made_stale_by_a_fast_one(policy: Path, tmp_path: Path) -> None:
    """One in four groups is of an environment whose episodes take as long as several learner steps."""

    class Slow(Once):
        async def step(self, message: Message) -> StepResult:
            await asyncio.sleep(0.25)
            return await super().step(message)

    parts = [
        EnvPart("fast", 3.0, Once(split="train", seed=0), None),
        EnvPart("slow", 1.0, Slow(split="train", seed=0), None),
    ]
    buffer = Buffer(max_staleness=2, groups_per_batch=4, group_size=2)
    async with world(policy, tmp_path, buffer, parts=parts) as w:
        answering = asyncio.create_task(answer_versions(w))
        trained: list[str] = []
        for version in range(8):
            batch = await w.learner.take(version, SOON)
            trained += [group[0].env for group in batch.groups]
            assert all(len({t.env for t in group}) == 1 for group in batch.groups)
            await w.learner.commit(version)
            await w.serve(version + 1)
        answering.cancel()
        assert collections.Counter(trained) == {"fast": 24, "slow": 8}
        assert trained[:4].count("slow") == 1  # in every batch, not only in the end
        stats = await w.stats()
        assert (stats.ledger.withheld, stats.ledger.discarded) == ({}, {})
        rows = query(tmp_path, "SELECT env, count(*) FROM groups WHERE state = 'trained' GROUP BY env")
        assert rows == [(0, 24), (1, 8)]


async def answer_versions(w: World) -> None:
    """As `answer_all`, by the version served now."""
    while True:
        for call in w.unanswered():
            call.complete(40, 41, 42, version=w.version)
        await w.engine.calls.get()


async def test_an_evaluation_plays_a_mixture_by_shares_and_scores_each_part(policy: Path, tmp_path: Path) -> None:
    class Hopeless(Once):
        async def step(self, message: Message) -> StepResult:
            raise ToolError("never works")

    parts = [
        EnvPart("easy", 2.0, Once(split="eval", seed=0), None),
        EnvPart("hard", 1.0, Hopeless(split="eval", seed=0), None),
    ]
    async with world(policy, tmp_path, works=False, parts=parts) as w:
        answering = asyncio.create_task(answer_all(w))
        result = await evaluate(w.player, "final", 10)
        answering.cancel()
    assert (result.tasks, result.reward_mean) == (7, 1.0)
    assert result.outcomes == {"finished": 7, "failed_tool": 3}
    easy, hard = result.environments["easy"], result.environments["hard"]
    assert (easy.tasks, easy.reward_mean, easy.reward_stderr, easy.outcomes) == (7, 1.0, 0.0, {"finished": 7})
    assert (hard.tasks, hard.reward_mean, hard.reward_stderr, hard.outcomes) == (0, None, None, {"failed_tool": 3})


async def test_an_evaluation_plays_no_task_twice_where_a_part_has_fewer_than_its_share(
    policy: Path, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text(
        "".join(f'{{"prompt": "Say {n}.", "answer": "{n}"}}\n' for n in range(38))
    )  # of which 0.05 are held out
    rows = task_source(Dataset(path=str(tmp_path / "rows.jsonl"), reward="exact"), "eval", 0)
    parts = [EnvPart("rows", 1.0, rows, None), EnvPart("endless", 1.0, Once(split="eval", seed=0), None)]
    kept: list[tuple[int, int, int, int]] = []
    async with world(policy, tmp_path, works=False, parts=parts) as w:
        answering = asyncio.create_task(answer_all(w))
        result = await evaluate(
            w.player,
            "final",
            8,
            2,
            first=5,
            keep=lambda lease, member, one: kept.append((lease.group_id, lease.env, lease.task, member)),
        )
        answering.cancel()
    tasks = [(5, 0, 0), (6, 0, 1), (7, 1, 0), (8, 1, 1), (9, 1, 2), (10, 1, 3)]
    assert sorted(kept) == [(*task, member) for task in tasks for member in range(2)]
    assert (result.tasks, result.outcomes, result.pass_at["2"].tasks) == (6, {"finished": 12}, 6)
    assert {name: part.tasks for name, part in result.environments.items()} == {"rows": 2, "endless": 4}
    assert fewer_tasks(parts, 8) == "rows: 2 held-out tasks, not 4"
    assert fewer_tasks(parts, 4) == ""


async def test_an_evaluation_plays_what_the_servers_decode_at_once(policy: Path, tmp_path: Path) -> None:
    async with world(policy, tmp_path, works=False) as w:
        evaluating = asyncio.create_task(evaluate(w.player, "final", 20))
        played = peak = 0
        while played < 20:
            await w.until(min(SLOTS, 20 - played))
            await settle()
            peak = max(peak, len(w.unanswered()))
            for call in w.unanswered():
                call.complete(40, 41, version=6)
                played += 1
        result = await evaluating
        assert peak == SLOTS
        assert (result.tasks, result.version, result.reward_mean) == (20, 6, 1.0)
