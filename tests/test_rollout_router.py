"""The router over scripted engines: deaths, drains, joins, pauses, cancellations."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import pytest
from slipstream.agents import Session
from slipstream.agents.base import Completion
from slipstream.buffer.trajectory import VersionSpan
from slipstream.errors import DeadlineExceeded, EngineError, PolicyError
from slipstream.rollout import router as module
from slipstream.rollout.engines.base import EngineLoad, FalseReply, RequestRejected, SamplingParams
from slipstream.rollout.router import Router
from slipstream.rollout.routing import AHEAD
from slipstream.tests.scripted import Call, ScriptedEngine, completion_of, settle
from slipstream.weightsync.fleet import FalseReplies, Fleet, ReplicaInfo

SOON = 60.0
"""Longer than anything here takes; a test that waits for it has found a hang."""

SAMPLING = SamplingParams(max_tokens=8)


class World:
    """A router, the engines that it created, and the fleet that it follows."""

    def __init__(self, **options: Any) -> None:
        self.made: list[ScriptedEngine] = []
        defaults: dict[str, Any] = {"max_concurrent": 4, "request_s": SOON, "start_s": SOON, "partial": "recompute"}
        self.router = Router(self._make, **(defaults | options))
        self.replica_infos: dict[str, ReplicaInfo] = {}
        self.revision = 0
        self.tasks = asyncio.TaskGroup()

    def _make(self, replica_info: ReplicaInfo) -> ScriptedEngine:
        self.made.append(ScriptedEngine(replica_info))
        return self.made[-1]

    def __getitem__(self, name: str) -> ScriptedEngine:
        return next(e for e in reversed(self.made) if e.name == name)

    def fleet(self, **replica_infos: ReplicaInfo | None) -> None:
        """Change some replicas; None removes one."""
        self.replica_infos = {n: s for n, s in (self.replica_infos | replica_infos).items() if s is not None}
        self.revision += 1
        self.router.update(Fleet(self.revision, tuple(self.replica_infos.values())))

    def serve(self, *names: str, version: int = 0, incarnation: int = 0) -> None:
        self.fleet(**{n: ReplicaInfo(n, f"http://{n}", incarnation, "serving", version) for n in names})

    def drain(self, name: str) -> None:
        replica_info = self.replica_infos[name]
        self.fleet(
            **{name: ReplicaInfo(name, replica_info.url, replica_info.incarnation, "draining", replica_info.version)}
        )

    def fence(self, name: str) -> None:
        """A push left it out."""
        self.fleet(
            **{
                name: ReplicaInfo(
                    name, self.replica_infos[name].url, self.replica_infos[name].incarnation, "starting", None, True
                )
            }
        )

    def request(self, episode: str, *token_ids: int, oldest: int = 0) -> asyncio.Task[Completion]:
        return self.tasks.create_task(self.router.generate(episode, token_ids or (1, 2), SAMPLING, oldest))

    async def call(self, name: str) -> Call:
        """The next request that `name` gets."""
        return await self[name].calls.get()

    async def anywhere(self) -> tuple[ScriptedEngine, Call]:
        """The next request that any engine gets."""
        await settle()
        engine = next(e for e in self.made if not e.calls.empty())
        return engine, engine.calls.get_nowait()


@contextlib.asynccontextmanager
async def world(**options: Any) -> AsyncIterator[World]:
    made = World(**options)
    async with asyncio.timeout(SOON), made.router, made.tasks:
        yield made
    assert all(engine.closed.is_set() for engine in made.made)
    assert not any(engine.open for engine in made.made)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROBE_S", 0.01)
    monkeypatch.setattr(module, "GRACE_S", 0.05)


# --- who goes where ---------------------------------------------------------------------------------------------------


async def test_a_request_waits_for_a_replica_and_is_woken_by_the_fleet() -> None:
    async with world() as w:
        waiting = w.request("e")
        await settle()
        assert w.router.waiting == 1
        w.fleet(a=ReplicaInfo("a", "http://a"))  # starts: nothing is sent there, not even a client is made
        await settle()
        assert w.made == []
        w.serve("a", version=3)
        call = await w.call("a")
        assert (call.token_ids, call.version, call.sampling) == ((1, 2), 3, SAMPLING)
        call.complete(5, version=3)
        assert (await waiting).token_ids == (5,)


async def test_turns_stay_on_their_replica_until_the_weights_change() -> None:
    async with world() as w:
        w.serve("a", "b", "c")
        history = tuple(range(50))
        turn = w.request("e", *history)
        home, call = await w.anywhere()
        call.complete(60)
        await turn
        for token in range(61, 65):
            history = (*history, token - 1)
            turn = w.request("e", *history)
            (await w.call(home.name)).complete(token)
            await turn
        other = w.request("other", *range(20))  # a load on that replica that is less than the cache is worth
        w.serve("a", "b", "c", version=1)
        busy, call = await w.anywhere()
        second = w.request("e", *history)
        elsewhere, moved = await w.anywhere()
        assert elsewhere is not busy  # the cache is void: least loaded
        assert moved.version == 1
        call.complete(1)
        moved.complete(1, version=1)
        await asyncio.gather(other, second)


async def test_a_replica_gets_a_bounded_number_and_the_others_in_order() -> None:
    async with world(max_concurrent=2) as w:
        w.serve("a")
        asked = [w.request(f"{i}", i) for i in range(2 + AHEAD + 5)]
        await settle()
        assert len(w["a"].open) == 2 + AHEAD
        assert w.router.waiting == 5
        served = []
        for i in range(len(asked)):
            call = await w.call("a")
            served.append(call.token_ids[0])
            call.complete(7)
            await asked[i]
            assert len(w["a"].open) <= 2 + AHEAD
        assert served == list(range(len(asked)))
        assert w.router.waiting == 0


async def test_only_a_replica_that_has_proven_the_version_is_used() -> None:
    async with world() as w:
        w.serve("a", "b", version=1)
        new = w.request("new", oldest=2)
        await settle()
        assert w.router.waiting == 1
        old = w.request("old", oldest=1)  # does not wait behind one that no replica can serve yet
        engine, call = await w.anywhere()
        call.complete(4, version=2)  # swapped, but its canary has not been seen
        await old
        assert w.router.waiting == 1
        proven = "b" if engine.name == "a" else "a"
        w.serve(proven, version=2)
        (await w.call(proven)).complete(4, version=2)
        await new


# --- joins, drains, restarts ------------------------------------------------------------------------------------------


async def test_a_replica_that_joins_gets_the_waiting_requests() -> None:
    async with world(max_concurrent=1) as w:
        w.serve("a")
        asked = [w.request(f"{i}", i) for i in range(1 + AHEAD + 2)]
        await settle()
        assert w.router.waiting == 2
        w.serve("b")
        await settle()
        assert [c.token_ids for c in w["b"].open] == [(1 + AHEAD,), (2 + AHEAD,)]
        assert w.router.serving == 2
        for engine in w.made:
            for call in list(engine.open):
                call.complete(1)
        await asyncio.gather(*asked)


async def test_a_replica_that_drains_ends_its_requests_and_gets_no_new_ones() -> None:
    async with world() as w:
        w.serve("a")
        first = w.request("e")
        call = await w.call("a")
        w.drain("a")
        second = w.request("e")
        await settle()
        assert w["a"].open == [call]
        w.serve("b")
        (await w.call("b")).complete(2)
        await second
        call.complete(3)
        assert (await first).token_ids == (3,)
        w.fleet(a=None)
        await w["a"].closed.wait()


async def test_requests_that_a_drain_aborts_continue_elsewhere_without_a_probe() -> None:
    async with world() as w:
        w.serve("a")
        first = w.request("e")
        call = await w.call("a")
        w.serve("b")
        w.drain("a")
        call.complete(3, reason="abort")
        assert (await first) == completion_of(3, reason="abort")
        rest = w.request("e", 1, 2, 3)
        (await w.call("b")).complete(4)
        await rest
        assert w["a"].probes == 0


async def test_a_replica_that_is_another_process_now_gets_another_client() -> None:
    async with world() as w:
        w.serve("a")
        old = w["a"]
        hanging = w.request("e")
        call = await w.call("a")
        started = time.monotonic()
        w.serve("a", incarnation=1)  # the host had vanished: nothing ever broke the connection
        again = await w.call("a")
        assert time.monotonic() - started < SOON / 2
        assert w["a"] is not old
        await old.closed.wait()
        assert call.cancelled
        again.complete(9)
        assert (await hanging).token_ids == (9,)


async def test_the_tokens_of_a_process_that_ends_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_S", SOON)
    async with world() as w:
        w.serve("a", "b")
        asked = w.request("e")
        engine, _ = await w.anywhere()
        w.fleet(**{engine.name: None})
        await settle()
        engine.die(lambda call: completion_of(7, 8, reason="abort"))
        assert (await asked).token_ids == (7, 8)


async def test_what_runs_on_a_replica_that_is_fenced_goes_on_elsewhere_with_what_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "GRACE_S", 1.0)
    async with world() as w:
        w.serve("a")
        long, short = w.request("long"), w.request("short")
        call, ends = await w.call("a"), await w.call("a")
        w.serve("b")
        call.grow(7, 8)
        old = w["a"]
        w.fence("a")  # and perhaps it stays paused for ever
        await settle()
        ends.complete(5)  # in time
        assert (await short).token_ids == (5,)
        assert (await long) == completion_of(7, 8, reason="abort")
        await old.closed.wait()
        assert call.cancelled
        rest = w.request("long", 1, 2, 7, 8)
        (await w.call("b")).complete(9)
        await rest
        assert old.probes == 0


async def test_a_replica_that_failed_and_was_fenced_serves_again_when_it_has_proven_itself() -> None:
    async with world() as w:
        w.serve("a")
        asked = w.request("e")
        await w.call("a")
        w["a"].die()  # and no probe will find it well
        await settle()
        w.fence("a")
        assert w.router.serving == 0
        w.serve("a", version=1)
        assert w.router.serving == 1
        (await w.call("a")).complete(1, version=1)
        await asked


async def test_the_tokens_of_a_host_that_vanished_are_kept() -> None:
    async with world() as w:
        w.serve("a")
        asked = w.request("e")
        (await w.call("a")).grow(7, 8, 9)
        w.fleet(a=None)
        assert (await asked) == completion_of(7, 8, 9, reason="abort")


# --- deaths -----------------------------------------------------------------------------------------------------------


async def test_a_death_under_load_costs_no_token_and_no_second() -> None:
    """Twelve episodes of thirty tokens each, token n of episode e being 100 e + n; one of two replicas dies at any token."""

    def rest(call: Call, count: int) -> list[int]:
        """The next `count` tokens after a prompt."""
        episode, done = call.token_ids[0], len(call.token_ids) - 1
        return [100 * episode + n for n in range(done, min(30, done + count))]

    async with world(max_concurrent=12) as w:
        w.serve("a", "b")

        async def episode(number: int) -> list[int]:
            async def generate(token_ids: Sequence[int], max_tokens: int) -> Completion:
                return await w.router.generate(f"{number}", token_ids, SamplingParams(max_tokens), 0)

            session = Session(cast(Any, None), generate, vocabulary=9999, max_tokens_per_turn=30, max_tokens=99)
            completion = await session.generate([number])
            assert completion.finish_reason == "stop"
            assert completion.version_spans == (VersionSpan(0, 30, 0),)
            return list(completion.token_ids)

        played = [w.tasks.create_task(episode(i)) for i in range(12)]
        await settle()
        assert len(w["a"].open) == len(w["b"].open) == 6
        died = w["b"]
        lengths = iter([0, 0, 3, 17, 29, 1])
        started = time.monotonic()
        died.die(lambda call: completion_of(*rest(call, next(lengths)), reason="abort"))
        await settle()
        assert len(w["a"].open) == 12  # all of them, at once
        for call in list(w["a"].open):
            call.complete(*rest(call, 30))
        assert [await p for p in played] == [[100 * i + n for n in range(30)] for i in range(12)]
        assert time.monotonic() - started < SOON / 2
        probing = [task for task in asyncio.all_tasks() if task.get_name() == "probe of b"]
        assert len(probing) == died.probes == 1  # however many requests failed


async def test_without_another_replica_requests_wait_for_this_one() -> None:
    async with world() as w:
        w.serve("a")
        asked = [w.request(f"{i}") for i in range(3)]
        await settle()
        w["a"].die()
        await settle()
        assert w["a"].open == []
        assert w.router.waiting == 3
        assert w.router.serving == 0
        w["a"].up.set()
        while len(w["a"].open) < 3:
            await w.call("a")
        for call in list(w["a"].open):
            call.complete(1)
        await asyncio.gather(*asked)


@pytest.mark.parametrize("serves", [None, 4])
async def test_a_process_that_lost_its_weights_is_not_used_until_the_fleet_names_its_version(
    serves: int | None,
) -> None:
    async with world() as w:
        w.serve("a", version=5)
        asked = w.request("e")
        await w.call("a")
        w["a"].serves = serves
        w["a"].die()
        w["a"].up.set()  # a new process behind the old address
        while w["a"].probes < 3:
            w["a"].probed.clear()
            await w["a"].probed.wait()
        assert w.router.waiting == 1
        w.serve("a", version=6, incarnation=1)
        (await w.call("a")).complete(1, version=6)
        await asked


def without_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The router's pauses end at once; returns how long they would have been, in seconds of `PROBE_S` = 1."""
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def no_sleep(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(module.asyncio, "sleep", no_sleep)
    monkeypatch.setattr(module, "PROBE_S", 1.0)
    return pauses


async def test_a_replica_that_answers_and_fails_every_request_is_tried_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world() as w:
        w.serve("a")
        asked = w.request("e")
        pauses = without_pauses(monkeypatch)
        for _ in range(7):
            (await w.call("a")).fail(EngineError("500"))
        (await w.call("a")).complete(1)
        await asked
        monkeypatch.undo()
    assert [p for p in pauses if p] == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


async def test_a_replica_that_fails_some_requests_is_probed_with_backoff_although_others_succeed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world() as w:
        w.serve("a")
        sick = w.request("sick", 66)
        pauses = without_pauses(monkeypatch)
        for number in range(5):
            well = w.request(f"well {number}", number)
            calls = {call.token_ids: call for call in (await w.call("a"), await w.call("a"))}
            calls[(number,)].complete(1)
            await well
            calls[(66,)].fail(EngineError("500"))
        (await w.call("a")).complete(1)
        await sick
        monkeypatch.undo()
    assert [p for p in pauses if p] == [1.0, 2.0, 4.0, 8.0]


async def test_after_a_while_without_a_failure_the_next_one_is_probed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def reported(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(seconds)

    monkeypatch.setattr(module, "BACKOFF_S", 0.05)
    async with world() as w:
        w.serve("a")
        monkeypatch.setattr(module.asyncio, "sleep", reported)
        for _ in range(3):
            asked = w.request("e")
            (await w.call("a")).fail(EngineError("500"))
            (await w.call("a")).complete(1)
            await asked
            await sleep(0.06)
        monkeypatch.undo()
    assert pauses == []
    assert w["a"].probes == 3


async def test_a_replica_that_hangs_is_not_used_although_it_reports_health() -> None:
    async with world(request_s=0.1) as w:
        w.serve("a", "b")
        for engine in w.made:
            engine.computes.clear()  # before it is asked: the deadline is short
        stuck = asyncio.create_task(w.router.generate("stuck", [1, 2], SAMPLING, 0))
        hung, _ = await w.anywhere()
        other = w["b" if hung.name == "a" else "a"]
        other.computes.set()
        with pytest.raises(DeadlineExceeded):
            await stuck
        w.router._request_s = SOON  # pyright: ignore[reportPrivateUsage]  # the others are answered
        assert w.router.serving == 1
        await hung.probed.wait()
        await settle()
        for number in range(20):  # the hung one has nothing to do, and yet gets nothing
            asked = w.request(f"{number}")
            (await w.call(other.name)).complete(1)
            await asked
        assert w.router.serving == 1
        hung.computes.set()
        await settle()
        assert w.router.serving == 2


async def test_what_had_arrived_at_the_deadline_goes_on_elsewhere() -> None:
    async with world(request_s=1.0) as w:
        w.serve("a", "b")
        slow = w.request("e")
        hung, call = await w.anywhere()
        hung.computes.clear()
        call.grow(7, 8)
        assert (await slow) == completion_of(7, 8, reason="abort")
        assert call.cancelled
        w.router._request_s = SOON  # pyright: ignore[reportPrivateUsage]  # this one is answered
        rest = w.request("e", 1, 2, 7, 8)
        (await w.call("b" if hung.name == "a" else "a")).complete(9)
        await rest


async def test_what_had_arrived_at_an_engines_own_deadline_is_kept_and_what_came_with_nonsense_is_not() -> None:
    async with world() as w:
        w.serve("a")
        late = w.request("late")
        call = await w.call("a")
        call.grow(7, 8)
        call.fail(DeadlineExceeded("a", "an answer", 1.0, "see its log"))
        assert (await late) == completion_of(7, 8, reason="abort")
        wrong = w.request("wrong")
        call = await w.call("a")
        call.grow(7, 8)
        call.fail(EngineError("a log-prob of nan"))
        (await w.call("a")).complete(3)
        assert (await wrong).token_ids == (3,)


async def test_the_deadline_names_the_episode_and_how_the_replicas_are() -> None:
    async with world(request_s=0.05) as w:
        w.serve("a", version=1)
        with pytest.raises(DeadlineExceeded) as caught:
            await w.router.generate("3.0.1", [1], SAMPLING, 2)
        text = str(caught.value)
        assert "episode 3.0.1 waited 0.05 s for a completion at version 2 or later" in text
        assert "a serving at version 1 with 0 requests" in text
        assert w.router.waiting == 0


async def test_a_request_that_no_engine_accepts_is_the_callers_error() -> None:
    async with world() as w:
        w.serve("a")
        asked = asyncio.create_task(w.router.generate("e", [1], SAMPLING, 0))
        (await w.call("a")).fail(PolicyError("too long"))
        with pytest.raises(PolicyError):
            await asked
        assert w["a"].probes == 0
        assert w.router.serving == 1


async def test_a_request_that_a_server_rejects_is_sent_to_no_other_server() -> None:
    async with world() as w:
        w.serve("a", "b")
        asked = asyncio.create_task(w.router.generate("e", [1], SAMPLING, 0))
        engine, call = await w.anywhere()
        call.fail(RequestRejected("a answered 400: top_p must be in (0, 1]"))
        with pytest.raises(RequestRejected, match="top_p must be"):
            await asked
        assert w.router.serving == 2
        assert engine.probes == 0
        assert all(e.open == [] for e in w.made)


# --- false replies ---------------------------------------------------------------------------------------------------


def lie(call: Call) -> None:
    call.grow(7, 8)  # nothing of it may be kept
    call.fail(FalseReply("a log-prob of 0.5"))


async def test_a_request_that_is_answered_falsely_goes_to_another_replica_without_those_tokens() -> None:
    reports: list[tuple[FalseReplies, ...]] = []
    async with world(max_concurrent=1, report=reports.append) as w:
        w.serve("a", "b")
        asked = w.request("e")
        liar, call = await w.anywhere()
        other = w["b" if liar.name == "a" else "a"]
        blocking = [w.request(f"{n}", *range(50)) for n in range(1 + AHEAD)]  # the other one has no slot
        while len(other.open) < 1 + AHEAD:
            await settle()
            w.request("more", *range(50))
        lie(call)
        while not liar.probes:
            await settle()
        await settle()
        assert w.router.serving == 2  # the probe has passed, and yet the request waits for the other
        assert asked not in {task for task in asyncio.all_tasks() if task.done()}
        assert all(open.token_ids != (1, 2) for open in liar.open)
        while not any(open.token_ids == (1, 2) for open in other.open):
            for open in (*list(liar.open), *list(other.open)):
                open.complete(5)
            await settle()
        for open in (*list(liar.open), *list(other.open)):
            if not open.answer.done():
                open.complete(9 if open.token_ids == (1, 2) else 5)
        assert (await asked) == completion_of(9)
        await asyncio.gather(*blocking)
        while liar.open or other.open or w.router.waiting:
            for open in (*list(liar.open), *list(other.open)):
                if not open.answer.done():
                    open.complete(5)
            await settle()
    first = reports[0]
    assert [(one.name, one.incarnation, one.count, one.level) for one in first] == [(liar.name, 0, 1, 1.0)]
    assert first[0].why == "a log-prob of 0.5"


async def test_the_only_replica_gets_a_request_again_that_it_answered_falsely() -> None:
    async with world() as w:
        w.serve("a")
        asked = w.request("e")
        lie(await w.call("a"))
        (await w.call("a")).complete(9)
        assert (await asked) == completion_of(9)


async def test_a_replica_that_goes_on_lying_gets_nothing_until_it_is_another_process() -> None:
    reports: list[tuple[FalseReplies, ...]] = []
    async with world(report=reports.append) as w:
        w.serve("a")
        asked = [w.request(f"{n}") for n in range(6)]
        calls = [await w.call("a") for _ in range(6)]
        for call in calls[:5]:
            lie(call)
        calls[5].complete(3)  # a true one does not clear it
        await asked[5]
        await settle()
        probes = w["a"].probes
        late = w.request("late")
        await settle()
        assert w["a"].open == []
        assert w["a"].probes == probes <= 1
        assert w.router.serving == 0
        assert w.router.gauges() == {}
        assert (reports[-1][0].count, reports[-1][0].level) == (5, 5.0)
        w.serve("a", incarnation=1)
        for _ in range(6):
            (await w.call("a")).complete(4)
        assert {(await task).token_ids for task in (*asked[:5], late)} == {(4,)}
    assert len(reports) == 5


async def test_a_false_reply_to_a_probe_counts_too() -> None:
    reports: list[tuple[FalseReplies, ...]] = []
    async with world(report=reports.append) as w:
        w.serve("a")
        w["a"].lies = True
        asked = w.request("e")
        (await w.call("a")).fail(EngineError("500"))  # its tokens are never false: probes alone prove it
        while not reports or reports[-1][0].level < 5:
            await w["a"].probed.wait()
            w["a"].probed.clear()
            await settle()
        probes = w["a"].probes
        await settle()
        assert w["a"].probes == probes
        assert "positive log-prob" in reports[-1][0].why
        w.serve("a", incarnation=1)
        (await w.call("a")).complete(4)
        assert (await asked).token_ids == (4,)


async def test_a_replica_that_fails_for_days_is_probed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world() as w:
        w.serve("a")
        w.router._connections["a"].probes = 5000  # pyright: ignore[reportPrivateUsage]
        w.router._connections["a"].healthy_since = float("inf")  # pyright: ignore[reportPrivateUsage]
        pauses = without_pauses(monkeypatch)
        asked = w.request("e")
        (await w.call("a")).fail(EngineError("500"))
        (await w.call("a")).complete(1)
        assert (await asked).token_ids == (1,)
        monkeypatch.undo()
    assert [p for p in pauses if p] == [8.0]


async def test_false_replies_count_for_a_process_also_where_a_push_left_it_out_meanwhile() -> None:
    reports: list[tuple[FalseReplies, ...]] = []
    async with world(report=reports.append) as w:
        w.serve("a")
        asked = [w.request(f"{n}") for n in range(4)]
        for call in [await w.call("a") for _ in range(4)]:
            lie(call)
        await settle()
        w.fence("a")
        w.serve("a", version=1)
        first, *_ = [await w.call("a") for _ in range(4)]
        lie(first)
        await settle()
        assert [(one.incarnation, one.count, one.level) for one in reports[-1]] == [(0, 5, 5.0)]
        w.fence("a")
        w.serve("a", version=2)
        assert w.router.serving == 0  # still the process that lied
        w.serve("a", version=3, incarnation=1)
        for _ in range(4):
            (await w.call("a")).complete(4, version=3)
        assert {(await task).token_ids for task in asked} == {(4,)}


async def test_a_rare_lie_is_forgotten() -> None:
    reports: list[tuple[FalseReplies, ...]] = []
    async with world(report=reports.append) as w:
        w.serve("a")
        for _ in range(7):
            asked = w.request("e")
            lie(await w.call("a"))
            for _ in range(60):
                (await w.call("a")).complete(4)
                await asked
                asked = w.request("e")
            (await w.call("a")).complete(4)
            await asked
    assert max(report[0].level for report in reports) == 1.0
    assert (reports[-1][0].count, reports[-1][0].level) == (7, 0.0)


# --- pauses -----------------------------------------------------------------------------------------------------------


async def test_requests_that_a_pause_aborts_go_elsewhere_or_wait_for_it() -> None:
    async with world(partial="abort_resume") as w:
        w.serve("a", "b")
        asked = w.request("e", *range(40))
        paused, call = await w.anywhere()
        call.complete(40, 41, reason="abort")
        assert (await asked).finish_reason == "abort"
        assert paused.probes == 0  # an abort of a push is no failure
        other = w["b" if paused.name == "a" else "a"]
        rest = w.request("e", *range(42))
        (await w.call(other.name)).complete(50)
        await rest
        w.fleet(**{other.name: None})
        late = w.request("e", *range(42))
        (await w.call(paused.name)).complete(51, version=1)  # queued in the paused server
        await late


async def test_the_router_retries_an_abort_without_a_token() -> None:
    for partial in ("abort_resume", "recompute"):
        async with world(partial=partial) as w:
            w.serve("a")
            asked = w.request("e")
            for _ in range(4):
                (await w.call("a")).complete(reason="abort")
            (await w.call("a")).complete(3)
            assert (await asked).token_ids == (3,)
            assert w["a"].probes == 4  # each time it had to prove itself: no hot loop


# --- cancellations ----------------------------------------------------------------------------------------------------


async def test_a_caller_that_is_cancelled_leaves_nothing_behind() -> None:
    async with world(max_concurrent=1) as w:
        w.serve("a")
        flying = [w.request(f"{i}") for i in range(1 + AHEAD)]
        waits, next_one = w.request("waits"), w.request("next")
        await settle()
        waits.cancel()
        await asyncio.wait({waits})
        assert w.router.waiting == 1
        call = await w.call("a")
        flying[0].cancel()
        await asyncio.wait({flying[0]})
        assert call.cancelled
        await settle()
        assert w.router.waiting == 0  # its slot went to the next
        for left in list(w["a"].open):
            left.complete(1)
        await asyncio.gather(*flying[1:], next_one)


async def test_the_tokens_of_a_cancelled_caller_are_reported() -> None:
    async with world(max_concurrent=1) as w:
        w.serve("a")
        lost: list[Completion] = []
        options: dict[str, Any] = {"on_cancelled": lost.append}
        flies = asyncio.create_task(w.router.generate("flies", [1], SAMPLING, 0, **options))
        (await w.call("a")).grow(7, 8)
        filling = [w.request(f"{i}") for i in range(AHEAD)]
        await settle()
        waits = asyncio.create_task(w.router.generate("waits", [1], SAMPLING, 0, **options))
        await settle()
        waits.cancel()
        flies.cancel()
        await asyncio.wait({waits, flies})
        assert sorted(completion.token_ids for completion in lost) == [(), (7, 8)]
        for call in list(w["a"].open):
            call.complete(1)
        await asyncio.gather(*filling)


async def test_an_assignment_of_a_cancelled_request_goes_to_the_next() -> None:
    async with world(max_concurrent=1) as w:
        asked = [w.request(f"{i}", i) for i in range(1 + AHEAD)]
        last = w.request("last", 99)
        await settle()
        w.serve("a")
        asked[0].cancel()  # assigned at this moment
        await settle()
        assert [c.token_ids for c in w["a"].open] == [(1,), (2,), (3,), (4,), (99,)]
        for call in list(w["a"].open):
            call.complete(1)
        await asyncio.gather(*asked[1:], last)


# --- load -------------------------------------------------------------------------------------------------------------


async def test_loads_are_of_the_replicas_that_answer_and_the_others_are_probed() -> None:
    async with world() as w:
        w.serve("a", "b", "c")
        w.fleet(d=ReplicaInfo("d", "http://d"))
        w["a"].busy = EngineLoad(3, 1, 0.5)
        w["b"].busy = EngineError("not reachable")
        w["b"].up.clear()
        w["c"].busy = DeadlineExceeded("c", "metrics", 5.0, "busy")
        assert await w.router.engine_loads() == [EngineLoad(3, 1, 0.5)]
        assert w.router.serving == 2
        await w["b"].probed.wait()
        assert await w.router.engine_loads() == [EngineLoad(3, 1, 0.5)]
        w["b"].busy = EngineLoad(0, 0, 0.0)
        w["b"].up.set()
        await settle()
        assert len(await w.router.engine_loads()) == 2
        assert w["c"].probes == 0


async def test_gauges_are_of_the_replicas_that_have_reported_and_several_routers_share_them() -> None:
    async with world() as w:
        w.serve("a", "b", "c", version=3)
        assert w.router.gauges() == {}
        w["a"].busy, w["b"].busy = EngineLoad(3, 1, 0.5, 70), EngineLoad(2, 0, 0.25, 40)
        w["c"].busy = DeadlineExceeded("c", "metrics", 5.0, "busy")
        await w.router.engine_loads()
        said = {"running": 3, "waiting": 1, "kv": 0.5, "tokens": 70, "version": 3, "sent": 0, "false": 0}
        assert w.router.gauges()["a"] == said
        assert set(w.router.gauges()) == {"a", "b"}
        assert set(w.router.gauges(0, 2)) == {"a"}  # of a and c
        assert set(w.router.gauges(1, 2)) == {"b"}


async def test_of_many_replicas_each_round_asks_as_many_and_all_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAMPLED", 4)
    async with world() as w:
        names = [f"engine-{i}" for i in range(10)]
        w.serve(*names)
        for number, name in enumerate(names):
            w[name].busy = EngineLoad(number, 0, 0.0)
        assert w.router.per_sample == 2.5
        rounds = [[load.running for load in await w.router.engine_loads()] for _ in range(5)]
        assert [len(set(one)) for one in rounds] == [4] * 5
        assert {running for one in rounds[:3] for running in one} == set(range(10))
        assert set(w.router.gauges()) == set(names)
        w.fleet(**{name: None for name in names[4:]})
        assert w.router.per_sample == 1.0
        assert sorted(load.running for load in await w.router.engine_loads()) == [0, 1, 2, 3]
