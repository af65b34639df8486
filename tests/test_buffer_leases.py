"""What workers do to the replay machine, one transition at a time; random runs are in `test_buffer_replay`."""

from __future__ import annotations

import math

import pytest
from slipstream.buffer import client_registry
from slipstream.buffer.admission import Admission, ReplayConfig, ReplayCounters
from slipstream.buffer.lease_manager import LeaseQueue, LeaseRequest
from slipstream.buffer.ledger import Ledger
from slipstream.buffer.messages import Lease, LeaseReply
from slipstream.buffer.replay import Replay
from slipstream.buffer.trajectory import FINISHED
from slipstream.errors import StateError
from slipstream.tests.replays import LEASE_S, fail, failed, lease_of, play, replay_of, state, step

# --- admission ------------------------------------------------------------------------------------------------------


def test_nothing_is_granted_before_the_engines_serve() -> None:
    assert Replay(Admission(2, 2), ReplayConfig(2, 2, "withhold", LEASE_S)).leases.grant("a", 0.0) is None


def test_admission_counts_what_is_served_not_what_is_committed() -> None:
    replay = replay_of(staleness=0, per_batch=2)
    for lease in (lease_of(replay), lease_of(replay)):
        play(replay, lease)
    assert replay.leases.grant("a", 0.0) is None
    step(replay)
    assert replay.leases.outstanding() == [2]
    assert replay.leases.grant("a", 0.0) is None
    replay.mark_served(1)
    assert lease_of(replay).version == 1


def test_nothing_starts_on_weights_whose_tokens_could_not_be_trained_on() -> None:
    replay = replay_of(staleness=0)
    play(replay, lease_of(replay))
    step(replay)
    assert replay.recover(0) == 2
    assert replay.take(2) is None  # its tokens are of version 0: discarded
    assert replay.table.ledgers.total.discarded == {"stale": 6}
    assert replay.leases.outstanding() == [0]
    assert replay.leases.grant("a", 0.0) is None  # the engines still serve 0
    replay.mark_served(2)
    assert lease_of(replay).group_id == 1


def test_an_environment_that_is_slow_keeps_its_place() -> None:
    replay = replay_of(staleness=1, per_batch=4, shares=(3.0, 1.0))
    leases = [lease_of(replay) for _ in range(8)]
    assert replay.leases.grant("a", 0.0) is None
    assert [lease.env for lease in leases].count(1) == 2
    assert [[lease.task for lease in leases if lease.env == env] for env in (0, 1)] == [[*range(6)], [0, 1]]
    for lease in leases:
        if lease.env == 0:
            play(replay, lease)
    assert replay.take(0) is None  # six groups are ready, none of them of environment 1
    assert replay.leases.grant("a", 0.0) is None
    play(replay, next(lease for lease in leases if lease.env == 1))
    assert sorted(group.env for group in replay.take(0) or []) == [0, 0, 0, 1]


def test_a_buffer_of_other_environments_is_refused() -> None:
    with pytest.raises(StateError, match="of a run with 1 environments, this one has 2"):
        replay_of(shares=(1.0, 1.0), clock=ReplayCounters(cursors=[3], trained=[2]))
    with pytest.raises(StateError, match="of a run with 1 environments, this one has 2"):
        replay_of(shares=(1.0, 1.0), clock=ReplayCounters(cursors=[3, 1], trained=[2]))


# --- leases ---------------------------------------------------------------------------------------------------------


def test_a_lease_request_is_granted_once() -> None:
    replay = replay_of(staleness=3)
    lease = lease_of(replay, lease_request="x")
    assert replay.leases.granted("x") == lease
    assert replay.leases.granted("y") is None
    fail(replay, "0.0.0")
    assert replay.leases.granted("x") == lease
    replay.leases.release("a", "worker_lost")
    assert replay.leases.granted("x") is None
    again = lease_of(replay, "b", lease_request="y")
    assert (replay.leases.granted("x"), replay.leases.granted("y")) == (None, again)


def test_admission_is_asked_once_more_than_it_allows_however_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    replay, asked = replay_of(staleness=0, per_batch=5), list[str]()
    grant = replay.leases.grant

    def counted(worker: str, now: float, request: str = "") -> Lease | None:
        asked.append(worker)
        return grant(worker, now, request)

    monkeypatch.setattr(replay.leases, "grant", counted)
    queue = LeaseQueue(replay.leases)
    for number in range(300):
        queue.add(f"w{number}", LeaseRequest(f"w{number}/x".encode(), 1, 1 + number % 2))
    assert [identity for identity, _, _ in queue.grant(0.0)] == [f"w{i}/x".encode() for i in range(5)]
    assert queue.grant(0.0) == []
    assert asked == [f"w{i}" for i in (0, 1, 2, 3, 4, 5, 5)]


def test_a_turn_gives_each_worker_one_group_before_any_has_two() -> None:
    replay = replay_of(staleness=0, per_batch=4)
    queue = LeaseQueue(replay.leases)
    for name, groups in (("a", 3), ("b", 1), ("c", 2)):
        queue.add(name, LeaseRequest(f"{name}/x".encode(), 1, groups))
    granted = {identity: [lease.group_id for lease in reply.leases] for identity, _, reply in queue.grant(0.0)}
    assert granted == {b"a/x": [0, 3], b"b/x": [1], b"c/x": [2]}
    assert queue.grant(0.0) == []


def test_a_reply_is_given_again_to_its_connection_alone_also_when_its_leases_are_lost() -> None:
    replay = replay_of(staleness=0, per_batch=2)
    queue = LeaseQueue(replay.leases)
    lost, same = (LeaseRequest(identity, 1, 1) for identity in (b"a/x", b"a/y"))
    assert queue.add("a", lost) is None
    ((_, _, reply),) = queue.grant(0.0)
    for _ in range(2):
        assert queue.add("a", lost) == reply
        replay.leases.release("a", "worker_lost")
    assert queue.add("a", same) is None  # of the worker's next process, which counts from the same number
    assert [(identity, number) for identity, number, _ in queue.grant(0.0)] == [(b"a/y", 1)]
    assert queue.add("a", lost) == reply
    assert queue.add("a", LeaseRequest(b"a/y", 2, 1)) is None
    queue.grant(0.0)
    assert queue.add("a", same) is None  # answered, and so is a later one: it comes late, and does not wait
    assert queue.grant(0.0) == []


def test_the_oldest_reply_is_forgotten_and_leases_that_hold_are_given_again_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_registry, "KNOWN", 2)
    queue = LeaseQueue(replay_of(staleness=0, per_batch=5).leases)
    replies = dict[bytes, LeaseReply]()
    for name, number in (("a", 1), ("b", 1), ("a", 2), ("c", 1)):
        request = LeaseRequest(f"{name}/x".encode(), number, 1)
        assert queue.add(name, request) is None
        replies |= {identity: reply for identity, _, reply in queue.grant(0.0)}
    assert list(queue._answered) == [b"a/x", b"c/x"]  # pyright: ignore[reportPrivateUsage]
    assert queue.add("b", LeaseRequest(b"b/x", 1, 1)) == replies[b"b/x"]


def test_a_request_that_was_forgotten_for_others_is_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_registry, "KNOWN", 2)
    queue = LeaseQueue(Replay(Admission(2, 2), ReplayConfig(2, 2, "withhold", LEASE_S)).leases)
    for name in "abc":
        queue.add(name, LeaseRequest(f"{name}/x".encode(), 1, 1, until=1.0))
    assert [identity for identity, _, _ in queue.grant(2.0)] == [b"b/x", b"c/x"]
    assert queue.due == math.inf


def test_a_lost_group_is_leased_before_a_new_one_begins() -> None:
    replay = replay_of(staleness=0, per_batch=3)
    leases = [lease_of(replay, worker) for worker in "abc"]
    replay.leases.release("b", "worker_lost")
    assert [g.id for g in replay.leases.expire(11.0)] == [0, 2]
    replay.recover(0)
    again = [lease_of(replay, now=11.0) for _ in leases]
    assert [(lease.group_id, lease.attempt) for lease in again] == [(0, 1), (1, 1), (2, 1)]
    assert replay.leases.grant("a", 11.0) is None


def test_only_missing_members_are_granted_again() -> None:
    replay = replay_of(group_size=3)
    lease = lease_of(replay)
    assert replay.leases.deliver("0.0.1", FINISHED, {0: 4}, {0: 4})
    replay.leases.progress("a", {"0.0.0": {0: 2}, "0.0.2": {0: 1}}, 0.0)
    replay.leases.release("a", "worker_lost")
    again = lease_of(replay, "b")
    assert (again.group_id, again.attempt, again.members) == (0, 1, (0, 2))
    assert lease.attempt == 0
    assert replay.table.ledgers.total == Ledger(generated=7, ready=4, discarded={"worker_lost": 3})
    assert play(replay, again) == [True, True]
    assert state(replay) == "ready"


def test_a_silent_worker_that_comes_back_is_counted_but_not_kept() -> None:
    replay = replay_of()
    lease_of(replay, "a", now=0.0)
    assert [g.id for g in replay.leases.expire(LEASE_S + 1)] == [0]
    again = lease_of(replay, "b", now=11.0)
    assert replay.leases.progress("a", {"0.0.0": {0: 5}}, 12.0) == ["0.0.0"]
    assert replay.table.groups[0].deadline == 11.0 + LEASE_S  # another's lease is not renewed
    assert not replay.leases.deliver("0.0.0", FINISHED, {0: 6}, {0: 6})
    assert replay.table.ledgers.total == Ledger(generated=6, discarded={"worker_lost": 6})
    assert play(replay, again) == [True, True]
    assert replay.table.ledgers.gap() == ""


def test_reports_of_a_process_that_is_gone_change_nothing() -> None:
    replay = replay_of()
    lease_of(replay, "a")
    replay.leases.progress("a", {"0.0.0": {0: 5}}, 0.0)
    replay.leases.release("a", "worker_stopped")
    assert replay.leases.progress("a", {"0.0.0": {0: 9}}, 0.0) == ["0.0.0"]
    assert not replay.leases.deliver("0.0.0", FINISHED, {0: 9}, {0: 9})
    assert replay.table.ledgers.total == Ledger(generated=5, discarded={"worker_stopped": 5})


def test_a_silent_worker_whose_process_turns_out_to_be_gone_is_waited_for_no_more() -> None:
    replay = replay_of()
    lease_of(replay, "a", now=0.0)
    replay.leases.expire(LEASE_S + 1)
    again = lease_of(replay, "b", now=11.0)
    replay.leases.release("a", "worker_lost")
    assert [e.id for e in replay.table.groups[0].episodes.values() if e.settled] == ["0.0.0", "0.0.1"]
    assert state(replay) == "leased"
    assert replay.leases.progress("a", {"0.0.0": {0: 5}}, 12.0) == ["0.0.0"]
    assert replay.table.ledgers.total == Ledger()
    assert play(replay, again) == [True, True]


def test_progress_renews_a_lease_and_totals_never_fall() -> None:
    replay = replay_of()
    lease_of(replay, "a", now=0.0)
    assert replay.leases.progress("a", {"0.0.0": {0: 5}}, 9.0) == []
    replay.leases.progress("a", {"0.0.0": {0: 3}}, 9.0)
    replay.leases.progress("b", {"0.0.1": {0: 1}}, 19.0)  # not its lease
    assert replay.leases.expire(19.0) == []
    assert replay.table.ledgers.total == Ledger(generated=6, in_flight=6)
    for generated, kept, match in (
        ({0: 3}, {0: 3}, "5 tokens of version 0 were reported, 3 delivered"),
        ({0: 7}, {0: 8}, "7 tokens of version 0 were generated, 8 are in its trajectories"),
        ({0: 7, 1: 1}, {0: 7}, "has tokens of version 1, the buffer is at version 0"),
        ({0: 7}, {0: 7, 1: 1}, "0 tokens of version 1 were generated, 1 are in its trajectories"),
    ):
        with pytest.raises(StateError, match=match):
            replay.leases.deliver("0.0.0", FINISHED, generated, kept)
    with pytest.raises(StateError, match="has tokens of version 1, the buffer is at version 0"):
        replay.leases.progress("a", {"0.0.0": {0: 9, 1: 1}}, 0.0)
    assert replay.table.ledgers.total == Ledger(generated=6, in_flight=6)
    assert replay.leases.deliver("0.0.0", FINISHED, {0: 7}, {0: 7})
    assert replay.table.ledgers.total == Ledger(generated=8, in_flight=1, ready=7)
    assert [g.id for g in replay.leases.expire(19.1)] == [0]
    assert replay.leases.expire(math.inf) == []


@pytest.mark.parametrize(
    "episode", ["9.0.0", "0.1.0", "0.0.9", "", ".", "x", "-1.0.0", "\u0663.0.0", "9" * 5000 + ".0.0", "0.0.0.0", "\x00"]
)
def test_an_episode_that_was_never_leased_is_refused(episode: str) -> None:
    replay = replay_of()
    lease_of(replay)
    before = replay.table.ledgers.total.copy()
    with pytest.raises(StateError, match="was never leased"):
        replay.leases.deliver(episode, FINISHED, {0: 1}, {0: 1})
    with pytest.raises(StateError, match="was never leased"):
        replay.leases.progress("a", {episode: {0: 1}}, 0.0)
    assert replay.table.ledgers.total == before


# --- what came of an episode ----------------------------------------------------------------------------------------


def test_failures_are_members_without_a_reward() -> None:
    replay = replay_of(group_size=3)
    lease_of(replay)
    assert not fail(replay, "0.0.0", tokens=4)
    assert not replay.leases.deliver("0.0.1", FINISHED, {}, {})
    assert replay.leases.deliver("0.0.2", FINISHED, {0: 2}, {0: 2}) is False  # alone: there is no baseline
    assert state(replay) == "discarded"
    assert replay.table.ledgers.total == Ledger(generated=6, discarded={"failed_tool": 4, "too_few_members": 2})
    assert lease_of(replay).group_id == 1


def test_a_group_of_one_is_trained_on_alone() -> None:
    """Some advantages compare with no group."""
    replay = replay_of(group_size=1)
    lease = lease_of(replay)
    assert lease.members == (0,)
    assert replay.leases.deliver(lease.episode(0), FINISHED, {0: 2}, {0: 2}, 1.0)
    assert state(replay) == "ready"
    again = lease_of(replay)
    assert not fail(replay, again.episode(0), tokens=4)
    assert state(replay, 1) == "discarded"
    assert replay.table.ledgers.total == Ledger(generated=6, ready=2, discarded={"failed_tool": 4})


def test_a_failure_is_tried_again_as_often_as_its_reason_allows() -> None:
    replay = replay_of(retries={"engine": 2})
    for attempt in range(3):
        lease = lease_of(replay)
        assert (lease.group_id, lease.attempt) == (0, attempt)
        assert lease.members == ((0, 1) if attempt == 0 else (0,))
        if attempt == 0:
            assert replay.leases.deliver("0.0.1", FINISHED, {0: 3}, {0: 3})
        fail(replay, lease.episode(0), "engine", tokens=1)
    assert state(replay) == "discarded"
    assert replay.table.ledgers.total == Ledger(generated=6, discarded={"failed_engine": 3, "too_few_members": 3})


def test_each_reason_has_retries_of_its_own() -> None:
    replay = replay_of(retries={"engine": 1, "tool": 1})
    lease_of(replay)
    fail(replay, "0.0.0", "engine")
    assert replay.leases.deliver("0.0.1", FINISHED, {0: 3}, {0: 3})
    assert lease_of(replay).members == (0,)
    fail(replay, "0.1.0", "tool")
    lease_of(replay)
    fail(replay, "0.2.0", "policy")
    assert state(replay) == "discarded"


def test_a_lost_lease_is_no_failure_of_its_members() -> None:
    replay = replay_of(retries={"engine": 1})
    for worker in "abc":
        lease_of(replay, worker)
        replay.leases.release(worker, "worker_lost")
    assert lease_of(replay).attempt == 3
    fail(replay, "0.3.0", "engine")
    assert replay.leases.deliver("0.3.1", FINISHED, {0: 3}, {0: 3})
    assert lease_of(replay).members == (0,)


def test_a_failed_episode_with_trajectories_trains_with_its_penalty() -> None:
    replay = replay_of(retries={"policy": 1})
    lease_of(replay)
    assert not replay.leases.deliver("0.0.0", failed("policy"), {0: 4}, {0: 4})  # a retry is left
    assert replay.leases.deliver("0.0.1", FINISHED, {0: 3}, {0: 3})
    lease_of(replay)
    assert replay.leases.deliver("0.1.0", failed("policy"), {0: 5}, {0: 5})
    step(replay)
    assert replay.table.ledgers.total == Ledger(generated=12, trained=8, discarded={"failed_policy": 4})


def test_tokens_that_no_trajectory_holds_are_unused() -> None:
    replay = replay_of()
    lease_of(replay)
    assert replay.leases.deliver("0.0.0", FINISHED, {0: 9}, {0: 4})
    assert replay.table.ledgers.total == Ledger(generated=9, ready=4, discarded={"unused": 5})
    assert replay.leases.deliver("0.0.1", FINISHED, {0: 3}, {0: 3})
    step(replay)
    assert replay.table.ledgers.total == Ledger(generated=12, trained=7, discarded={"unused": 5})
    assert replay.recover(0) == 2
    assert replay.table.ledgers.total == Ledger(generated=12, ready=7, discarded={"unused": 5})


# --- k of n ---------------------------------------------------------------------------------------------------------


def test_a_group_is_complete_with_some_of_its_members_and_late_ones_carry_no_loss() -> None:
    replay = replay_of(group_size=4, min_members=2)
    lease_of(replay)
    replay.leases.progress("a", {"0.0.3": {0: 7}}, 0.0)
    for member in (0, 1):
        assert replay.leases.deliver(f"0.0.{member}", FINISHED, {0: 3}, {0: 3})
    assert state(replay) == "ready"
    assert replay.leases.deliver("0.0.2", FINISHED, {0: 5}, {0: 5})
    assert [e.id for e in replay.table.groups[0].episodes.values() if e.withheld] == ["0.0.2"]
    step(replay)
    assert replay.table.ledgers.total == Ledger(
        generated=18, trained=6, withheld={"late": 5}, discarded={"straggler": 7}
    )
    assert replay.leases.progress("a", {"0.0.3": {0: 9}}, 1.0) == ["0.0.3"]
    assert not replay.leases.deliver("0.0.3", failed("unwanted"), {0: 10}, {})
    assert replay.table.ledgers.total == Ledger(
        generated=21, trained=6, withheld={"late": 5}, discarded={"straggler": 10}
    )


def test_a_late_failure_is_not_tried_again() -> None:
    replay = replay_of(group_size=3, min_members=2, retries={"tool": 5})
    lease_of(replay)
    for member in (0, 1):
        assert replay.leases.deliver(f"0.0.{member}", FINISHED, {0: 3}, {0: 3})
    fail(replay, "0.0.2", tokens=1)
    assert state(replay) == "ready"
    assert replay.table.ledgers.total == Ledger(generated=7, ready=6, discarded={"failed_tool": 1})


def test_late_members_keep_their_lease_and_lose_it_as_others_do() -> None:
    replay = replay_of(group_size=3, min_members=2)
    lease_of(replay)
    for member in (0, 1):
        assert replay.leases.deliver(f"0.0.{member}", FINISHED, {0: 3}, {0: 3})
    assert replay.leases.progress("a", {"0.0.2": {0: 1}}, 5.0) == []
    assert replay.leases.expire(14.0) == []
    assert [g.id for g in replay.leases.expire(16.0)] == [0]
    assert state(replay) == "ready"
    assert replay.table.ledgers.total == Ledger(generated=7, ready=6, discarded={"worker_lost": 1})


def test_with_fewer_members_left_than_wanted_a_group_is_complete_with_all_of_them() -> None:
    replay = replay_of(group_size=4, min_members=3)
    lease_of(replay)
    for member in (0, 1):
        fail(replay, f"0.0.{member}")
    assert replay.leases.deliver("0.0.2", FINISHED, {0: 3}, {0: 3})
    assert state(replay) == "leased"
    assert replay.leases.deliver("0.0.3", FINISHED, {0: 3}, {0: 3})
    assert state(replay) == "ready"


def test_groups_say_when_they_were_leased_complete_and_taken() -> None:
    replay = replay_of(staleness=2)
    group = None
    for now, act in (
        (10.0, lambda: lease_of(replay, now=1.0)),
        (11.5, lambda: replay.leases.deliver("0.0.0", FINISHED, {0: 3}, {0: 3})),
        (12.5, lambda: replay.leases.deliver("0.0.1", FINISHED, {0: 3}, {0: 3})),
        (14.0, lambda: replay.take(0)),
        (15.0, lambda: replay.commit(0)),
        (16.0, lambda: replay.recover(0)),  # ready again: it became complete before
        (17.0, lambda: replay.take(2)),
    ):
        replay.table.time = now
        act()
        group = replay.table.groups[0]
        times = group.leased_time, group.ready_time, group.taken_time
        assert times == (10.0, 12.5 if now >= 12.5 else None, None if now < 14.0 else 14.0 if now < 17.0 else 17.0)
    assert group is not None
    assert [episode.delivered_time for episode in group.episodes.values()] == [11.5, 12.5]


def test_a_group_that_is_leased_again_says_when() -> None:
    replay = replay_of(staleness=1)
    for now in (3.0, 5.0):
        replay.table.time = now
        lease_of(replay)
        assert replay.table.groups[0].leased_time == now
        replay.leases.release("a", "worker_lost")
