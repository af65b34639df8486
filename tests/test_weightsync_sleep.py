"""Replicas that sleep while the learner steps: they have no weights until a push, of the next version or of the same one."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from slipstream.tests.replicas import LocalReplica, Sleeper
from slipstream.tests.test_weightsync_publisher import Fleet, holds
from slipstream.weightsync import publisher as publishing


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(tmp_path / "weights")
    yield fleet
    fleet.publisher.close()


def whats(log: list[tuple[str, str]], name: str) -> list[str]:
    return [what.split()[0] for one, what in log if one == name]


@pytest.mark.parametrize("transport", ["shared", "broadcast"])
async def test_the_next_version_wakes_all_replicas_at_once(fleet: Fleet, transport: str) -> None:
    log: list[tuple[str, str]] = []
    asleep: list[str] = []
    replicas = [Sleeper(name, log) for name in "abcde"]
    publisher = fleet.publish_to(*replicas, transport=transport, cohort=1, on_asleep=asleep.append)
    await fleet.push(1)  # of which nothing is known: they may sleep
    assert whats(log, "a")[-5:] == ["wake", "pause", "swap", "resume", "score"]
    for version in (2, 3):
        log.clear()
        await publisher.sleep()
        assert sorted(asleep) == list("abcde")
        asleep.clear()
        assert all(replica.paused and not replica.has_weights for replica in replicas)
        await publisher.sleep()  # they sleep already
        assert asleep == []
        report = await fleet.push(version)
        assert (report.pushed, report.failed) == (tuple("abcde"), {})
        assert all(holds(replica, version) for replica in replicas)
        assert all(
            [what for what in whats(log, name) if what != "join"]
            == ["sleep", "receive", "wake", "pause", "swap", "resume", "score"]
            for name in "abcde"
        )
        last_wake = max(index for index, (_, what) in enumerate(log) if what == "wake")
        assert last_wake < min(index for index, (_, what) in enumerate(log) if what == "score")  # one cohort
    assert await publisher.wake() is None  # none sleeps


async def test_without_a_new_version_the_same_weights_return_from_the_same_file(fleet: Fleet) -> None:
    log: list[tuple[str, str]] = []
    replicas = [Sleeper(name, log) for name in "ab"]
    publisher = fleet.publish_to(*replicas, transport="shared")
    await fleet.push(1)
    await publisher.sleep()
    report = await publisher.wake()
    assert report is not None
    assert (report.version, report.pushed, report.failed, report.sent_bytes) == (1, ("a", "b"), {}, 0)
    assert all(holds(replica, 1) for replica in replicas)
    assert fleet.reported[-2:] == [("a", 1), ("b", 1)]


async def test_a_learner_that_knows_nothing_wakes_what_sleeps_and_what_does_not(fleet: Fleet) -> None:
    log: list[tuple[str, str]] = []
    asleep, awake = Sleeper("asleep", log), Sleeper("awake", log)
    publisher = fleet.publish_to(asleep, transport="shared")
    await fleet.push(1)
    await publisher.sleep()
    publisher.close()  # it dies
    fleet.publish_to(asleep, awake, transport="shared")
    assert (await fleet.push(2)).pushed == ("asleep", "awake")
    assert holds(asleep, 2)
    assert holds(awake, 2)


@pytest.mark.parametrize("step", ["sleep", "receive", "wake", "swap"])
async def test_one_that_fails_in_a_step_of_the_cycle_is_fenced_and_comes_back(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setattr(publishing, "RETRY_S", 0.0)
    log: list[tuple[str, str]] = []
    replicas = good, bad = Sleeper("good", log), Sleeper("bad", log)
    publisher = fleet.publish_to(*replicas, transport="shared", push_s=5.0)
    await fleet.push(1)
    bad.refuses = {step}
    await publisher.sleep()
    report = await fleet.push(2)
    assert report.pushed == ("good",)
    assert holds(good, 2)
    assert any(name == "bad" and isinstance(what, str) for name, what in fleet.reported)
    assert bad.paused or bad.has_weights
    bad.refuses = set()
    again = await publisher.catch_up()
    assert again is not None
    assert again.pushed == ("bad",)
    assert holds(bad, 2)
    await publisher.sleep()
    assert (await fleet.push(3)).pushed == ("good", "bad")


async def test_a_replica_that_was_not_started_for_it_does_not_sleep(fleet: Fleet) -> None:
    replica = LocalReplica("a")
    publisher = fleet.publish_to(replica, transport="shared")
    await fleet.push(1)
    assert not publisher.sleeps
    await publisher.sleep()
    assert holds(replica, 1)
