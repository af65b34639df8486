"""The fleet: a state machine tried by properties, and its feed over real sockets."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st
from slipstream.errors import ConfigError, EngineError
from slipstream.launch.cli_replicas import _until
from slipstream.launch.control import FILE, Contact, contact
from slipstream.launch.folder import alone
from slipstream.launch.roster import Roster
from slipstream.weightsync.fleet import Fleet, FleetBoard, FleetFeed, Seat

WAIT_S = 10.0


def roster_of(*versions: int | None) -> Roster:
    """engine-0, engine-1, ...: serving these versions, or starting."""
    roster = Roster()
    for name, version in zip(roster.names(len(versions)), versions, strict=True):
        roster.join(name, f"http://127.0.0.1/{name}")
        if version is not None:
            roster.served(name, version, 0)
    return roster


def test_one_replica_from_its_first_process_to_its_last() -> None:
    roster = roster_of(7)
    (name,) = roster.names(1)
    roster.join(name, "http://127.0.0.1:1")
    assert roster.fleet.seat(name) == Seat("engine-1", "http://127.0.0.1:1")
    roster.answers(name, 0)
    assert roster.fleet.seat(name) == Seat("engine-1", "http://127.0.0.1:1", answers=True)
    roster.served(name, 8, 0)
    assert roster.fleet.seat(name) == Seat("engine-1", "http://127.0.0.1:1", 0, "serving", 8, answers=True)
    roster.died(name)
    assert roster.fleet.seat(name) == Seat("engine-1", "http://127.0.0.1:1", 1)
    roster.served(name, 9, 1)
    roster.lost(name, 1)
    assert roster.fleet.seat(name) == Seat("engine-1", "http://127.0.0.1:1", 1, "starting", None, answers=True)
    roster.served(name, 9, 1)
    roster.drain(name)
    assert roster.fleet.seat(name) == Seat("engine-1", "http://127.0.0.1:1", 1, "draining", 9, answers=True)
    roster.gone(name)
    assert [seat.name for seat in roster.fleet.seats] == ["engine-0"]
    assert roster.names(1) == ["engine-2"]


def test_what_is_said_of_an_earlier_process_is_void() -> None:
    roster = roster_of(3)
    roster.died("engine-0")
    before = roster.fleet
    roster.served("engine-0", 4, 0)
    roster.answers("engine-0", 0)
    roster.lost("engine-0", 0)
    roster.served("engine-9", 4, 0)
    assert roster.fleet is before


def test_one_that_drains_never_serves_again() -> None:
    roster = roster_of(3, 3)
    roster.drain("engine-0")
    roster.served("engine-0", 4, 0)
    roster.died("engine-0")
    seat = roster.fleet.seat("engine-0")
    assert seat is not None
    assert seat.state == "draining"
    with pytest.raises(ConfigError, match="engine-0 is leaving already"):
        roster.drain("engine-0")


@pytest.mark.parametrize(
    ("versions", "name", "why"),
    [
        ((3,), "engine-0", "engine-0 is the last serving replica; add another"),
        ((3, None), "engine-0", "engine-0 is the last serving replica; add another"),
        ((None,), "engine-0", "engine-0 is the last replica; add another"),
        ((3, 3), "engine-7", "engine-7 is no replica of this run; there are engine-0, engine-1"),
    ],
)
def test_who_may_not_leave(versions: tuple[int | None, ...], name: str, why: str) -> None:
    roster = roster_of(*versions)
    before = roster.fleet
    with pytest.raises(ConfigError, match=why):
        roster.drain(name)
    assert roster.fleet is before


NAMES = st.sampled_from(["engine-0", "engine-1", "engine-2"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("served"), NAMES, st.integers(0, 3), st.integers(0, 2)),
        st.tuples(st.sampled_from(["answers", "lost"]), NAMES, st.integers(0, 2)),
        st.tuples(st.sampled_from(["died", "drain", "gone"]), NAMES),
    )
)


@given(STEPS)
def test_whatever_happens_snapshots_are_told_apart_and_somebody_stays(steps: list[tuple]) -> None:
    roster = roster_of(0, 0, None)
    for method, *arguments in steps:
        before = roster.fleet
        serving = {seat.name for seat in before.seats if seat.state == "serving"}
        try:
            getattr(roster, method)(*arguments)
        except ConfigError:
            assert method == "drain"
            assert roster.fleet is before
        after = roster.fleet
        assert (after == before) == (after.revision == before.revision)
        assert after.revision in (before.revision, before.revision + 1)
        for seat in after.seats:
            was = before.seat(seat.name)
            assert was is not None
            assert seat.incarnation == was.incarnation + (method == "died" and seat.name == arguments[0])
            assert seat.state != "serving" or seat.version is not None
            assert was.state != "draining" or seat.state == "draining"
        if method == "drain" and serving:  # who asks a replica to leave never takes the last one
            assert any(seat.state == "serving" for seat in after.seats)


@pytest.fixture
async def board() -> AsyncIterator[FleetBoard]:
    board = FleetBoard("127.0.0.1")
    serving = asyncio.create_task(board.serve())
    yield board
    serving.cancel()
    await asyncio.wait({serving})
    await board.close()


async def test_a_follower_gets_the_present_and_every_future(board: FleetBoard) -> None:
    roster = roster_of(1)
    board.show(roster.fleet)
    async with asyncio.timeout(WAIT_S), FleetFeed(board.address) as early:
        assert await early.changed(0) == roster.fleet
        async with FleetFeed(board.address) as late:  # the second subscriber is told at once, too
            assert await late.changed(0) == roster.fleet
            roster.died("engine-0")
            board.show(roster.fleet)
            assert await early.changed(roster.fleet.revision - 1) == roster.fleet
            assert await late.until(lambda f: f.seats[0].incarnation == 1) == roster.fleet
            seen = []
            async for fleet in late:
                seen.append(fleet.revision)
                if fleet.seats[0].version == 5:
                    break
                for version in range(6):
                    roster.served("engine-0", version, 1)
                    board.show(roster.fleet)
            assert seen == sorted(set(seen))
            assert seen[-1] == roster.fleet.revision


async def test_the_end_is_told(tmp_path: Path) -> None:
    board = FleetBoard("127.0.0.1")
    serving = asyncio.create_task(board.serve())
    board.show(roster_of(1).fleet)
    async with asyncio.timeout(WAIT_S), FleetFeed(board.address) as feed:
        await feed.until(lambda f: len(f.seats) == 1)
        serving.cancel()
        await asyncio.wait({serving})
        await board.close()
        farewell = await feed.until(lambda f: not f.seats)
    assert farewell.revision > 0


async def test_garbage_and_old_news_change_nothing() -> None:
    context = zmq.asyncio.Context()
    sender = context.socket(zmq.XPUB)
    port = sender.bind_to_random_port("tcp://127.0.0.1")
    fleet = Fleet(5, (Seat("engine-0", "http://127.0.0.1:1"),))
    try:
        async with asyncio.timeout(WAIT_S), FleetFeed(f"tcp://127.0.0.1:{port}") as feed:
            await sender.recv()
            await sender.send(msgspec.json.encode(fleet))
            await feed.changed(0)
            for bad in (b"", b"\xff", b"[]", b'{"revision": "six"}', msgspec.json.encode(Fleet(4, ()))):
                await sender.send(bad)
                # Only the newest frame is kept, so each must be taken before the next comes: a good one behind it shows that.
                fleet = msgspec.structs.replace(fleet, revision=fleet.revision + 1)
                await asyncio.sleep(0.05)
                assert feed.fleet.seats == fleet.seats
                await sender.send(msgspec.json.encode(fleet))
                assert await feed.changed(fleet.revision - 1) == fleet
    finally:
        sender.close(linger=0)
        context.term()


async def test_a_follower_outlives_a_board_that_went_and_came_back() -> None:
    """A connection that broke is made anew, and the newest fleet comes with it."""
    context = zmq.asyncio.Context()
    first = context.socket(zmq.XPUB)
    port = first.bind_to_random_port("tcp://127.0.0.1")
    async with asyncio.timeout(WAIT_S), FleetFeed(f"tcp://127.0.0.1:{port}") as feed:
        await first.recv()
        await first.send(msgspec.json.encode(Fleet(1, ())))
        await feed.changed(0)
        first.close(linger=0)
        context.term()
        context = zmq.asyncio.Context()
        second = context.socket(zmq.XPUB)
        second.bind(f"tcp://127.0.0.1:{port}")
        await second.recv()
        await second.send(msgspec.json.encode(Fleet(2, ())))
        assert await feed.changed(1) == Fleet(2, ())
        second.close(linger=0)
    context.term()


def test_a_run_that_was_killed_leaves_a_contact_that_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        contact(tmp_path)
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(ConfigError, match="is not running; if it has not finished, `slipstream resume"):
        contact(tmp_path)
    pid = os.getpid()  # numbers are used again: that a process has this one says nothing
    (tmp_path / FILE).write_text(f'{{"pid": {pid}, "address": "tcp://127.0.0.1:1", "fleet": "", "key": ""}}')
    with pytest.raises(ConfigError, match=f"its supervisor, process {pid}, was killed"):
        contact(tmp_path)
    with alone(tmp_path):
        assert contact(tmp_path).pid == pid
        (tmp_path / FILE).unlink()
        with pytest.raises(ConfigError, match="is only starting or just ending"):
            contact(tmp_path)
    (tmp_path / FILE).write_text("{")
    with pytest.raises(ConfigError, match=r"control\.json is not of this version"):
        contact(tmp_path)


@pytest.mark.parametrize("how", ["killed", "finished"])
async def test_waiting_for_a_replica_ends_with_the_run(how: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("")
    supervisor = await asyncio.create_subprocess_exec("sleep", "60")
    board = FleetBoard("127.0.0.1")
    serving = asyncio.create_task(board.serve())
    board.show(Fleet(1, (Seat("engine-0", "http://a"),)))
    where = Contact(supervisor.pid, "", board.address, "")
    waiting = asyncio.create_task(_until(where, tmp_path, lambda fleet: fleet.revision > 9, "engine-1 to serve"))
    async with FleetFeed(board.address) as feed:
        await feed.until(lambda fleet: fleet.revision == 1)
    await asyncio.wait([waiting], timeout=0.5)  # long enough to hear of the fleet, which is not what it waits for
    assert not waiting.done()
    if how == "killed":
        supervisor.kill()
    else:
        board.show(Fleet(2, ()))
    with pytest.raises(EngineError, match=r"the run ended while .* waited for engine-1 to serve"):
        await asyncio.wait_for(waiting, 5)
    if how == "finished":
        supervisor.kill()
    await supervisor.wait()
    serving.cancel()
    await asyncio.wait([serving])
    await board.close()
