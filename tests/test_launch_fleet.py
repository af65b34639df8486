"""The fleet: a state machine tried by properties; waiting for its changes; what several routers know of a replica that lies."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from slipstream.errors import ConfigError, EngineError
from slipstream.launch.cli.replicas import _wait_for_fleet
from slipstream.launch.run_lock import CONTROL, run_lock
from slipstream.launch.supervisor.control import (
    ControlAddress,
    GetStatus,
    RunStatus,
    read_control_address,
    send_command,
)
from slipstream.launch.supervisor.fleet import FleetState, FleetSuspicion
from slipstream.rpc.pubsub import StatePublisher, StateSubscriber
from slipstream.rpc.security import write_pair
from slipstream.weightsync.fleet import FalseReplies, Fleet, ReplicaInfo

WAIT_S = 60.0


def fleet_state_of(*versions: int | None) -> FleetState:
    """engine-0, engine-1, ...: serving these versions, or starting."""
    fleet_state = FleetState()
    for name, version in zip(fleet_state.names(len(versions)), versions, strict=True):
        fleet_state.join(name, f"http://127.0.0.1/{name}")
        if version is not None:
            fleet_state.served(name, version, 0)
    return fleet_state


def test_one_replica_from_its_first_process_to_its_last() -> None:
    fleet_state = fleet_state_of(7)
    (name,) = fleet_state.names(1)
    fleet_state.join(name, "http://127.0.0.1:1")
    assert fleet_state.fleet.replica(name) == ReplicaInfo("engine-1", "http://127.0.0.1:1")
    fleet_state.answers(name, 0)
    assert fleet_state.fleet.replica(name) == ReplicaInfo("engine-1", "http://127.0.0.1:1", answers=True)
    fleet_state.served(name, 8, 0)
    assert fleet_state.fleet.replica(name) == ReplicaInfo(
        "engine-1", "http://127.0.0.1:1", 0, "serving", 8, answers=True
    )
    fleet_state.served(name, 8, 0, asleep=True)
    assert fleet_state.fleet.replica(name) == ReplicaInfo(
        "engine-1", "http://127.0.0.1:1", 0, "serving", 8, answers=True, asleep=True
    )
    assert fleet_state.fleet.version == 7  # it serves: its requests wait
    fleet_state.died(name)
    assert fleet_state.fleet.replica(name) == ReplicaInfo("engine-1", "http://127.0.0.1:1", 1)
    fleet_state.served(name, 9, 1)
    fleet_state.lost(name, 1)
    assert fleet_state.fleet.replica(name) == ReplicaInfo(
        "engine-1", "http://127.0.0.1:1", 1, "starting", None, answers=True
    )
    fleet_state.served(name, 9, 1)
    fleet_state.drain(name)
    assert fleet_state.fleet.replica(name) == ReplicaInfo(
        "engine-1", "http://127.0.0.1:1", 1, "draining", 9, answers=True
    )
    fleet_state.gone(name)
    assert [replica_info.name for replica_info in fleet_state.fleet.replicas] == ["engine-0"]
    assert fleet_state.names(1) == ["engine-2"]


def test_the_fleet_serves_its_oldest_version_and_none_without_a_serving_replica() -> None:
    """A rolling push: the version rises with the last replica; a fenced, restarted or leaving one does not hold it back."""
    fleet_state = fleet_state_of(3, 3, 3, None)
    versions = [fleet_state.fleet.version]
    for step in (
        lambda: fleet_state.served("engine-0", 4, 0),
        lambda: fleet_state.lost("engine-1", 0),
        lambda: fleet_state.served("engine-2", 4, 0),
        lambda: fleet_state.served("engine-1", 4, 0),
        lambda: fleet_state.served("engine-0", 5, 0),
        lambda: fleet_state.drain("engine-1"),
        lambda: fleet_state.died("engine-2"),
        lambda: fleet_state.lost("engine-0", 0),
        lambda: fleet_state.served("engine-2", 5, 1),
    ):
        step()
        versions.append(fleet_state.fleet.version)
    assert versions == [3, 3, 3, 4, 4, 4, 4, 5, None, 5]


def test_what_is_said_of_an_earlier_process_is_void() -> None:
    fleet_state = fleet_state_of(3)
    fleet_state.died("engine-0")
    before = fleet_state.fleet
    fleet_state.served("engine-0", 4, 0)
    fleet_state.answers("engine-0", 0)
    fleet_state.lost("engine-0", 0)
    fleet_state.served("engine-9", 4, 0)
    assert fleet_state.fleet is before


def test_one_that_drains_never_serves_again() -> None:
    fleet_state = fleet_state_of(3, 3)
    fleet_state.drain("engine-0")
    fleet_state.served("engine-0", 4, 0)
    fleet_state.died("engine-0")
    replica_info = fleet_state.fleet.replica("engine-0")
    assert replica_info is not None
    assert replica_info.state == "draining"
    with pytest.raises(ConfigError, match="engine-0 is leaving already"):
        fleet_state.drain("engine-0")


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
    fleet_state = fleet_state_of(*versions)
    before = fleet_state.fleet
    with pytest.raises(ConfigError, match=why):
        fleet_state.drain(name)
    assert fleet_state.fleet is before


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
    fleet_state = fleet_state_of(0, 0, None)
    for method, *arguments in steps:
        before = fleet_state.fleet
        serving = {replica_info.name for replica_info in before.replicas if replica_info.state == "serving"}
        try:
            getattr(fleet_state, method)(*arguments)
        except ConfigError:
            assert method == "drain"
            assert fleet_state.fleet is before
        after = fleet_state.fleet
        assert (after == before) == (after.revision == before.revision)
        assert after.revision in (before.revision, before.revision + 1)
        for replica_info in after.replicas:
            was = before.replica(replica_info.name)
            assert was is not None
            assert replica_info.incarnation == was.incarnation + (
                method == "died" and replica_info.name == arguments[0]
            )
            assert replica_info.state != "serving" or replica_info.version is not None
            assert was.state != "draining" or replica_info.state == "draining"
        if method == "drain" and serving:  # who asks a replica to leave never takes the last one
            assert any(replica_info.state == "serving" for replica_info in after.replicas)


def test_a_run_that_was_killed_leaves_a_contact_that_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        read_control_address(tmp_path)
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(ConfigError, match="is not running; if it has not finished, `slipstream resume"):
        read_control_address(tmp_path)
    pid = os.getpid()  # numbers are used again: that a process has this one says nothing
    (tmp_path / CONTROL).write_text(f'{{"pid": {pid}, "address": "tcp://127.0.0.1:1", "fleet": "", "folder": ""}}')
    with pytest.raises(ConfigError, match=f"its supervisor, process {pid}, was killed"):
        read_control_address(tmp_path)
    with run_lock(tmp_path):  # of the command that continues it
        with pytest.raises(ConfigError, match="is only starting or just ending"):
            read_control_address(tmp_path)
        (tmp_path / CONTROL).write_text("{")
    with pytest.raises(ConfigError, match=r"control\.json is not of this version"):
        read_control_address(tmp_path)


async def test_a_command_that_waits_ends_with_the_run(tmp_path: Path) -> None:
    write_pair(tmp_path)
    supervisor = await asyncio.create_subprocess_exec("sleep", "60")
    with zmq.Context() as context, context.socket(zmq.ROUTER) as silent:
        port = silent.bind_to_random_port("tcp://127.0.0.1")
        where = ControlAddress(supervisor.pid, f"tcp://127.0.0.1:{port}", "", str(tmp_path))
        waiting = asyncio.create_task(send_command(where, GetStatus(), RunStatus))
        assert await asyncio.to_thread(silent.poll, int(1000 * WAIT_S))  # it has the command
        supervisor.kill()
        with pytest.raises(ConfigError, match=f"supervisor, process {supervisor.pid}, ended before it replied"):
            await asyncio.wait_for(waiting, WAIT_S)
    await supervisor.wait()
    with pytest.raises(ConfigError, match="ended before it replied"):  # it had ended before
        await asyncio.wait_for(send_command(where, GetStatus(), RunStatus), WAIT_S)


def test_batched_changes_are_one_snapshot() -> None:
    published = list[Fleet]()
    fleet_state = FleetState(published.append)
    for name in fleet_state.names(3):
        fleet_state.join(name, f"http://127.0.0.1/{name}")
    before = fleet_state.fleet
    with fleet_state.batched():
        for name in ("engine-0", "engine-2"):
            fleet_state.served(name, 5, 0)
        assert (fleet_state.fleet, fleet_state.replica("engine-2").version) == (before, 5)
    assert [replica.version for replica in fleet_state.fleet.replicas] == [5, None, 5]
    assert published[3:] == [fleet_state.fleet]
    assert fleet_state.fleet.revision == before.revision + 1
    with fleet_state.batched():
        fleet_state.served("engine-0", 5, 0)
    assert len(published) == 4  # nothing has changed


def replica_states(count: int) -> st.SearchStrategy[tuple[ReplicaInfo, ...]]:
    """What may have become of replicas whose processes go on."""
    made = {
        "state": st.sampled_from(["starting", "serving", "draining"]),
        "version": st.none() | st.integers(0, 2),
        "answers": st.booleans(),
        "asleep": st.booleans(),
    }
    names = (st.just(f"engine-{i}") for i in range(count))
    infos = (st.builds(ReplicaInfo, name=name, url=st.just("http://a"), **made) for name in names)
    return st.tuples(*infos)


@given(st.integers(0, 6).flatmap(lambda n: st.tuples(replica_states(n), replica_states(n))))
def test_a_fleet_is_an_earlier_one_and_what_has_changed_since(
    states: tuple[tuple[ReplicaInfo, ...], tuple[ReplicaInfo, ...]],
) -> None:
    whole, fleet = Fleet(3, states[0]), Fleet(8, states[1])
    found = fleet.changes_since(whole)
    assert found is not None
    assert whole.with_changes(8, found) == fleet


def test_of_other_processes_a_fleet_is_sent_whole() -> None:
    one, two = ReplicaInfo("engine-0", "http://a"), ReplicaInfo("engine-1", "http://b")
    whole = Fleet(1, (one, two))
    others = (
        ReplicaInfo("engine-0", "http://a", incarnation=1),
        ReplicaInfo("engine-0", "http://c"),
        ReplicaInfo("engine-0", "http://a", certificate="ab"),
        ReplicaInfo("engine-2", "http://a"),
    )
    for replicas in ((), (one,), (two, one), (one, two, others[-1]), *((other, two) for other in others)):
        assert Fleet(2, replicas).changes_since(whole) is None


@pytest.mark.parametrize("how", ["killed", "finished"])
async def test_waiting_for_a_replica_ends_with_the_run(how: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("")
    supervisor = await asyncio.create_subprocess_exec("sleep", "60")
    board = StatePublisher("tcp://127.0.0.1:*", Fleet())
    serving = asyncio.create_task(board.serve())
    board.publish(Fleet(1, (ReplicaInfo("engine-0", "http://a"),)))
    write_pair(tmp_path)
    where = ControlAddress(supervisor.pid, "", board.address, str(tmp_path))
    waiting = asyncio.create_task(
        _wait_for_fleet(where, tmp_path, lambda fleet: fleet.revision > 9, "engine-1 to serve")
    )
    async with StateSubscriber(board.address, Fleet()) as feed:
        await feed.until(lambda fleet: fleet.revision == 1)
    await asyncio.wait([waiting], timeout=0.5)  # long enough to hear of the fleet, which is not what it waits for
    assert not waiting.done()
    if how == "killed":
        supervisor.kill()
    else:
        board.publish(Fleet(2, ()))
    with pytest.raises(EngineError, match=r"the run ended while .* waited for engine-1 to serve"):
        await asyncio.wait_for(waiting, WAIT_S)
    if how == "finished":
        supervisor.kill()
    await supervisor.wait()
    serving.cancel()
    await asyncio.wait([serving])
    await board.close()


def report(name: str, count: int, level: float, incarnation: int = 0) -> FalseReplies:
    return FalseReplies(name, incarnation, count, level, f"lie {count} of {name}")


def test_what_several_routers_see_adds_up() -> None:
    shared = FleetSuspicion()
    for router in range(4):
        shared.take(f"worker-{router}", [report("engine-0", 3, 1.0), report("engine-1", 1, 0.5)])
    assert shared.proof("engine-0", 0) == ""
    shared.take("evaluator", [report("engine-0", 9, 1.25)])
    assert shared.proof("engine-0", 0).startswith("it goes on giving false replies, 21 so far; one of the last: lie 9")
    assert shared.proof("engine-0", 1) == shared.proof("engine-1", 0) == shared.proof("engine-2", 0) == ""
    assert shared.counts == {"engine-0": 21, "engine-1": 4}


def test_a_report_replaces_the_one_before_and_a_router_that_starts_again_adds_to_the_count() -> None:
    shared = FleetSuspicion()
    for _ in range(3):  # heartbeats repeat it
        shared.take("worker-0", [report("engine-0", 4, 4.0)])
    assert shared.counts == {"engine-0": 4}
    assert shared.proof("engine-0", 0) == ""
    shared.take("worker-0", [report("engine-0", 4, 0.0)])
    shared.take("worker-1", [report("engine-0", 4, 4.0)])
    assert shared.proof("engine-0", 0) == ""
    shared.take("worker-0", [])
    shared.take("worker-0", [report("engine-0", 1, 1.0)])
    assert shared.counts == {"engine-0": 9}
    assert shared.proof("engine-0", 0)


def test_what_a_router_saw_that_has_ended_is_no_proof_any_more_and_stays_counted() -> None:
    """It would never say that the level has fallen."""
    shared = FleetSuspicion()
    shared.take("worker-0", [report("engine-0", 4, 4.0)])
    shared.take("worker-1", [report("engine-0", 2, 2.0)])
    assert shared.proof("engine-0", 0)
    shared.keep({"worker-1", "worker-2"})
    assert shared.proof("engine-0", 0) == ""
    assert shared.counts == {"engine-0": 6}
    shared.take("worker-0", [report("engine-0", 5, 5.0)])  # another process of it
    assert shared.proof("engine-0", 0)
    assert shared.counts == {"engine-0": 11}
