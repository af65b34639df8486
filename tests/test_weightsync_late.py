"""Orders that outlive their callers: a server goes on with a pause or a swap when its client hangs up, and answers later or never.

No token may be sampled between the load of a version and the change of its label; so a replica between the two stays paused.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from slipstream.errors import DeadlineExceeded, EngineError, NoAnswer, WeightSyncError
from slipstream.tests.replicas import LocalReplica, Outliving
from slipstream.tests.test_weightsync_publisher import Fleet, Forgetful, holds
from slipstream.weightsync import publisher as publishing


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(tmp_path / "weights")
    yield fleet
    fleet.publisher.close()


@pytest.fixture
async def late() -> AsyncIterator[Outliving]:
    """A replica that serves version 1, samples, and keeps its next swap waiting for `go_on`."""
    late = Outliving("late")
    async with asyncio.TaskGroup() as tasks:
        sampling = tasks.create_task(late.sampling())
        late.go_on.set()
        yield late
        late.go_on.set()
        sampling.cancel()
    assert all(weights == label for weights, label in late.sampled), f"(weights, label) of tokens: {late.sampled}"


async def serve_1(fleet: Fleet, late: Outliving, *others: LocalReplica, push_s: float = 4.0) -> None:
    fleet.publish_to(late, *others, transport="disk", cohort=2, push_s=push_s)
    assert "late" in (await fleet.push(1)).pushed
    await asyncio.sleep(0.01)
    assert late.sampled >= {(1, 1)}
    late.go_on.clear()
    late.loading.clear()
    late.call_log.clear()


def whats(replica: LocalReplica) -> list[str]:
    return [what.split()[0] for _, what in replica.call_log]


async def test_a_swap_that_ends_after_its_deadline_leaves_the_replica_paused_until_catch_up(
    fleet: Fleet, late: Outliving
) -> None:
    other = LocalReplica("other")
    await serve_1(fleet, late, other)
    report = await fleet.push(2)
    assert report.pushed == ("other",)
    assert "publisher waited" in report.failed["late"]
    assert sorted(fleet.reported[-2:]) == [("late", report.failed["late"]), ("other", 2)]
    assert late.paused
    assert whats(late) == ["receive", "pause", "load"]  # one swap, and nothing on top of it

    caught_up = await fleet.publisher.catch_up()  # it still has not settled
    assert caught_up is not None
    assert "to finish its last command" in caught_up.failed["late"]
    assert late.paused
    assert whats(late) == ["receive", "pause", "load"]

    late.go_on.set()
    await asyncio.sleep(fleet.publisher.retry_in() or 0)
    caught_up = await fleet.publisher.catch_up()
    assert caught_up is not None
    assert caught_up.pushed == ("late",)
    assert holds(late, 2)
    await asyncio.sleep(0.01)
    assert late.sampled <= {(None, None), (1, 1), (2, 2)}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "RETRY_S", 0.05)


async def test_a_swap_that_is_slow_but_in_time_is_waited_for_and_not_repeated(fleet: Fleet, late: Outliving) -> None:
    await serve_1(fleet, late, push_s=8.0)

    async def end_late() -> None:
        await late.loading.wait()
        await asyncio.sleep(2.6)  # the first attempt has 0.8 * 3.2 s, the second until 4.86 s to see it settle
        late.go_on.set()

    ending = asyncio.create_task(end_late())
    report = await fleet.push(2)
    await ending
    assert report.pushed == ("late",)
    assert whats(late) == ["receive", "pause", "load", "label", "resume", "score"]
    assert report.pause_ms > 2500
    assert holds(late, 2)


async def test_a_swap_that_fails_after_its_deadline_is_pushed_anew(fleet: Fleet, late: Outliving) -> None:
    await serve_1(fleet, late)
    late.refuses = True
    assert "late" in (await fleet.push(2)).failed
    assert late.paused
    late.go_on.set()
    await asyncio.sleep(0.01)
    late.refuses = False
    assert (await fleet.publisher.catch_up()).pushed == ("late",)  # type: ignore[union-attr]
    assert holds(late, 2)


@pytest.mark.parametrize("error", [NoAnswer("reset"), DeadlineExceeded("late", "an answer", 1, "see its log")])
async def test_a_swap_whose_client_lost_the_connection_may_still_happen(
    fleet: Fleet, late: Outliving, error: Exception
) -> None:
    await serve_1(fleet, late)
    swap = late.swap_weights

    async def lose(version: int) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(swap(version), 0.1)
        raise error

    late.swap_weights = lose
    assert "late" in (await fleet.push(2)).failed
    assert late.paused
    assert "resume" not in whats(late)
    late.go_on.set()
    late.swap_weights = swap
    assert (await fleet.publisher.catch_up()).pushed == ("late",)  # type: ignore[union-attr]
    assert holds(late, 2)


async def test_who_leaves_in_the_middle_of_its_swap_is_not_resumed(fleet: Fleet, late: Outliving) -> None:
    await serve_1(fleet, late, push_s=600.0)
    pushing = asyncio.create_task(fleet.push(2))
    await asyncio.wait_for(late.loading.wait(), 60)
    fleet.publisher.update([])
    report = await asyncio.wait_for(pushing, 60)
    assert (report.pushed, report.failed) == ((), {})
    assert late.paused
    late.go_on.set()
    await asyncio.sleep(0.02)
    assert late.served == 2  # the order was not called back
    assert "resume" not in whats(late)


async def test_a_push_that_breaks_off_a_catch_up_in_its_swap_leaves_the_joiner_paused(
    fleet: Fleet, late: Outliving
) -> None:
    serving = LocalReplica("serving")
    publisher = fleet.publish_to(serving, transport="disk", push_s=20.0)
    await fleet.push(1)
    late.go_on.clear()
    publisher.update([serving, late])
    catching = asyncio.create_task(publisher.catch_up())
    await asyncio.wait_for(late.loading.wait(), 60)
    report = await fleet.push(2)
    assert (report.pushed, report.failed) == (("serving",), {})
    caught_up = await catching
    assert caught_up is not None
    assert caught_up.failed == {"late": "the push of the next version came first"}
    assert late.paused
    late.go_on.set()
    await asyncio.sleep(publisher.retry_in() or 0)
    assert (await publisher.catch_up()).pushed == ("late",)  # type: ignore[union-attr]
    assert holds(late, 2)


async def test_a_pause_that_is_answered_late_is_not_overtaken_by_a_resume(fleet: Fleet) -> None:
    class Slow(LocalReplica):
        go_on = asyncio.Event()

        async def pause(self, mode: str) -> None:
            async def handler() -> None:
                await self.go_on.wait()
                await LocalReplica.pause(self, mode)

            await asyncio.shield(asyncio.ensure_future(handler()))

    slow = Slow("slow")
    publisher = fleet.publish_to(slow, transport="disk", push_s=4.0)
    assert "slow" in (await fleet.push(1)).failed
    assert whats(slow).count("resume") == 0
    slow.go_on.set()
    assert (await publisher.catch_up()).pushed == ("slow",)  # type: ignore[union-attr]
    assert whats(slow).index("pause") < whats(slow).index("resume")
    assert holds(slow, 1)


# The canary before the resume, where the server can.


async def test_who_scores_while_paused_is_proven_before_it_resumes(fleet: Fleet) -> None:
    replica = Forgetful("a", 1)
    replica.scores_paused = True
    fleet.publish_to(replica, transport="disk", partial="keep_kv")
    assert (await fleet.push(1)).pushed == ("a",)
    assert [what for _, what in replica.call_log] == [
        *["receive FileSource", "pause keep_kv", "swap 1", "score"],
        *["receive FileSource", "pause recompute", "swap 1", "score", "resume"],
    ]
    assert holds(replica, 1)


async def test_who_scores_while_paused_and_stays_wrong_never_resumes(fleet: Fleet) -> None:
    replica = Forgetful("a", 2)
    replica.scores_paused = True
    fleet.publish_to(replica, transport="disk")
    with pytest.raises(WeightSyncError, match="a does not hold version 1: after two pushes"):
        await fleet.push(1)
    assert replica.paused
    assert "resume" not in whats(replica)
    assert (await fleet.push(2)).pushed == ("a",)
    assert holds(replica, 2)


async def test_a_second_push_that_is_refused_does_not_let_wrong_weights_resume(fleet: Fleet) -> None:
    class Refuses(Forgetful):
        async def swap_weights(self, version: int) -> None:
            if self.times == 0:
                raise EngineError("a answered 500")
            await super().swap_weights(version)

    replica = Refuses("a", 1)
    replica.scores_paused = True
    fleet.publish_to(replica, transport="disk")
    assert (await fleet.push(1)).failed == {"a": "a answered 500"}
    assert replica.paused
    assert "resume" not in whats(replica)


async def test_keys_and_values_of_wrong_weights_do_not_outlive_the_second_push(fleet: Fleet) -> None:
    replica = Forgetful("a", 1)  # resumes before its canary
    fleet.publish_to(replica, transport="disk", partial="keep_kv")
    assert (await fleet.push(1)).pushed == ("a",)
    assert [what for _, what in replica.call_log if "pause" in what] == ["pause keep_kv", "pause recompute"]


async def test_who_should_score_while_paused_and_does_not_stays_paused_until_catch_up(fleet: Fleet) -> None:
    class Mute(LocalReplica):
        scores_paused = True
        mute = True

        def __init__(self, name: str) -> None:
            super().__init__(name)
            self.scores_paused = True

        async def score(self, token_ids: list[int]) -> list[float]:  # type: ignore[override]
            if self.mute:
                raise EngineError("a answered 500")
            return await super().score(token_ids)

    replica = Mute("a")
    publisher = fleet.publish_to(replica, transport="disk")
    assert (await fleet.push(1)).failed == {"a": "a answered 500"}
    assert replica.paused
    replica.mute = False
    assert (await publisher.catch_up()).pushed == ("a",)  # type: ignore[union-attr]
    assert holds(replica, 1)
