"""What the learner does to the replay machine, one transition at a time; random runs are in `test_buffer_replay`."""

from __future__ import annotations

import pytest
from slipstream.buffer.admission import OnDeadline, ReplayCounters
from slipstream.buffer.ledger import Ledger
from slipstream.buffer.messages import Lease
from slipstream.buffer.replay import Replay
from slipstream.buffer.trajectory import FINISHED
from slipstream.errors import StateError
from slipstream.tests.replays import failed, lease_of, play, replay_of, state, step

# --- the bound ------------------------------------------------------------------------------------------------------


def stale(policy: OnDeadline) -> tuple[Replay, Lease]:
    """A lease of version 0 that goes on at version 1, with no staleness allowed: a rollback without a batch."""
    replay = replay_of(staleness=0, policy=policy, clock=ReplayCounters(version=1, served=1, recovered_from=None))
    replay.mark_served(0)
    replay.table.counters.version = 0
    lease = lease_of(replay)
    replay.table.counters.version = 1
    return replay, lease


def test_withhold_trains_what_is_fresh_and_withholds_the_rest() -> None:
    replay, lease = stale("withhold")
    play(replay, lease, {0: 3, 1: 2})
    step(replay)
    assert replay.table.ledgers.total == Ledger(generated=10, trained=4, withheld={"stale": 6})
    assert replay.table.ledgers.by_version == {
        0: Ledger(generated=6, withheld={"stale": 6}),
        1: Ledger(generated=4, trained=4),
    }


def test_drop_discards_a_group_with_any_stale_token() -> None:
    replay, lease = stale("drop")
    play(replay, lease, {0: 3, 1: 2})
    assert replay.take(1) is None
    assert replay.table.ledgers.total == Ledger(generated=10, discarded={"stale": 10})


def test_drop_gives_up_groups_that_run_past_the_bound() -> None:
    replay, _ = stale("drop")
    replay.leases.progress("a", {"0.0.0": {0: 3}}, 0.0)
    assert replay.take(1) is None
    assert state(replay) == "discarded"
    assert replay.leases.progress("a", {"0.0.0": {0: 3}}, 0.0) == ["0.0.0"]
    assert not replay.leases.deliver("0.0.0", FINISHED, {0: 4}, {0: 4})
    assert replay.table.ledgers.total == Ledger(generated=4, discarded={"stale": 4})


@pytest.mark.parametrize("policy", ["withhold", "drop"])
def test_a_late_member_makes_no_group_stale(policy: OnDeadline) -> None:
    replay = replay_of(staleness=1, group_size=3, min_members=2, policy=policy)
    replay.table.counters.version = 2
    replay.mark_served(1)
    lease_of(replay)
    for member in (0, 1):
        assert replay.leases.deliver(f"0.0.{member}", FINISHED, {1: 3}, {1: 3})
    assert replay.leases.deliver("0.0.2", FINISHED, {0: 3}, {0: 3})
    step(replay)
    assert replay.table.ledgers.total == Ledger(generated=9, trained=6, withheld={"late": 3})


def test_a_group_that_only_late_members_keep_fresh_is_stale() -> None:
    replay = replay_of(staleness=0, group_size=3, min_members=2)
    lease_of(replay)
    for member in (0, 1):
        assert replay.leases.deliver(f"0.0.{member}", FINISHED, {0: 3}, {0: 3})
    replay.table.counters.version = 1
    assert replay.leases.deliver("0.0.2", FINISHED, {1: 3}, {1: 3})
    assert replay.take(1) is None
    assert replay.table.ledgers.total == Ledger(generated=9, discarded={"stale": 9})


def test_wait_holds_the_batch_back_for_a_group_at_its_last_chance() -> None:
    replay = replay_of(staleness=1, policy="wait")
    slow, quick = lease_of(replay), lease_of(replay)
    play(replay, quick)
    step(replay)
    replay.mark_served(1)
    play(replay, lease_of(replay))
    assert replay.take(1) is None  # group 0, of version 0, would be too old at version 2
    play(replay, slow)
    assert [g.id for g in replay.take(1) or []] == [0]


def test_a_group_that_is_complete_after_the_learner_asked_is_looked_at_too() -> None:
    replay, lease = stale("withhold")
    assert replay.take(1) is None
    play(replay, lease, {0: 3})
    assert replay.take(1) is None
    assert state(replay) == "discarded"


# --- batches --------------------------------------------------------------------------------------------------------


def test_a_batch_is_the_same_until_it_is_committed() -> None:
    replay = replay_of(staleness=2)
    leases = [lease_of(replay) for _ in range(3)]
    play(replay, leases[2])
    assert [g.id for g in replay.take(0) or []] == [2]
    play(replay, leases[0])
    assert [g.id for g in replay.take(0) or []] == [2]
    replay.commit(0)
    assert [g.id for g in replay.take(1) or []] == [0]
    with pytest.raises(StateError, match="version 0, the buffer is at version 1"):
        replay.take(0)


def test_fresh_tokens_are_those_of_the_asked_version_outside_of_batches() -> None:
    replay = replay_of(staleness=2)
    first, second, third = (lease_of(replay) for _ in range(3))
    play(replay, first)
    play(replay, second)
    replay.leases.deliver(third.episode(0), FINISHED, {0: 1}, {0: 1})
    assert [e.id for e in replay.fresh(0)] == ["2.0.0", "1.0.0", "1.0.1", "0.0.0", "0.0.1"]
    assert replay.take(0) is not None
    assert [e.id for e in replay.fresh(0)] == ["2.0.0", "1.0.0", "1.0.1"]
    assert replay.fresh(1) == []


def test_a_commit_needs_its_batch_and_may_be_repeated() -> None:
    replay = replay_of()
    with pytest.raises(StateError, match="without a batch"):
        replay.commit(0)
    play(replay, lease_of(replay))
    step(replay)
    replay.table.drain()
    replay.commit(0)
    assert replay.version == 1
    assert replay.table.drain() == []
    with pytest.raises(StateError, match="without a batch"):
        replay.commit(1)


def test_a_ledger_that_does_not_close_stops_the_commit_before_it_changes_anything() -> None:
    for broken, match in ((0, "of version 0, 7 tokens were generated, 6"), (None, "of all versions, 7 tokens")):
        replay = replay_of()
        play(replay, lease_of(replay))
        replay.take(0)
        (replay.table.ledgers.total if broken is None else replay.table.ledgers.by_version[broken]).generated += 1
        for _ in range(2):  # it is not forgotten by being told
            with pytest.raises(StateError, match=f"the ledger does not balance: {match}"):
                replay.commit(0)
        assert replay.version == 0
        assert state(replay) == "batched"


# --- batches that make no version ------------------------------------------------------------------------------------


def test_a_discarded_batch_leaves_the_version_and_frees_its_groups_at_once() -> None:
    replay = replay_of(staleness=0)
    play(replay, lease_of(replay))
    assert [g.id for g in replay.take(0) or []] == [0]
    assert replay.leases.outstanding() == [1]
    assert replay.leases.grant("a", 0.0) is None
    replay.discard_batch(0, [0], "critic_warmup")
    assert (replay.version, state(replay)) == (0, "discarded")
    assert replay.leases.outstanding() == [0]
    assert replay.table.ledgers.total == Ledger(generated=6, discarded={"critic_warmup": 6})
    assert replay.table.ledgers.gap() == ""
    play(replay, lease_of(replay))
    assert [g.id for g in replay.take(0) or []] == [1]
    replay.commit(0)
    assert replay.version == 1
    assert replay.table.counters.trained == [1]


def test_a_discard_may_be_repeated_at_any_time_and_names_its_batch() -> None:
    replay = replay_of(staleness=0)
    with pytest.raises(StateError, match=r"groups 0 are not the batch of version 0; .* its batch is empty"):
        replay.discard_batch(0, [0], "critic_warmup")
    play(replay, lease_of(replay))
    replay.take(0)
    for version, groups in ((1, [0]), (0, [0, 1])):
        with pytest.raises(StateError, match="are not the batch of version"):
            replay.discard_batch(version, groups, "critic_warmup")
    assert state(replay) == "batched"
    replay.discard_batch(0, [0], "critic_warmup")
    play(replay, lease_of(replay))
    assert [g.id for g in replay.take(0) or []] == [1]
    replay.table.drain()
    replay.discard_batch(0, [0], "critic_warmup")  # a repetition does not meet the next batch
    assert state(replay, 1) == "batched"
    replay.commit(0)
    replay.table.drain()
    replay.discard_batch(0, [0], "critic_warmup")
    replay.table.prune()
    replay.discard_batch(0, [0], "critic_warmup")  # settled and no longer in memory
    assert replay.table.drain() == []
    with pytest.raises(StateError, match="groups 1 are not the batch of version 0"):
        replay.discard_batch(0, [1], "critic_warmup")  # a version was made from it


def test_no_recovery_returns_a_discarded_batch() -> None:
    replay = replay_of(staleness=2)
    play(replay, lease_of(replay))
    replay.take(0)
    replay.discard_batch(0, [0], "critic_warmup")
    play(replay, lease_of(replay))
    step(replay)
    assert replay.recover(0) == 2
    assert [g.state for g in replay.table.groups.values()] == ["discarded", "ready"]
    assert replay.table.ledgers.total == Ledger(generated=12, ready=6, discarded={"critic_warmup": 6})


# --- recovery -------------------------------------------------------------------------------------------------------


def test_recovery_rolls_back_to_ready_under_a_new_version() -> None:
    replay = replay_of(staleness=4)
    for _ in range(3):
        play(replay, lease_of(replay))
        step(replay)
    assert replay.table.counters.trained == [3]
    assert replay.recover(1) == 4
    assert replay.table.counters.trained == [1]
    assert [g.state for g in replay.table.groups.values()] == ["trained", "ready", "ready"]
    assert replay.table.ledgers.total == Ledger(generated=18, trained=6, ready=12)
    assert replay.recover(1) == 4
    assert replay.recover(4) == 4
    with pytest.raises(StateError, match="without a batch"):
        replay.commit(2)  # by the process that died
    with pytest.raises(StateError, match="version 5, the buffer is at version 4: another run's"):
        replay.recover(5)
    step(replay)
    assert replay.recover(1) == 6


def test_the_bound_holds_for_groups_that_a_rollback_returned() -> None:
    replay = replay_of(staleness=2)
    for version in range(3):
        play(replay, lease_of(replay), {version: 3})
        step(replay)
    assert replay.recover(0) == 4
    step(replay)
    assert [state(replay, group) for group in range(3)] == ["discarded", "discarded", "trained"]
    assert replay.table.ledgers.total == Ledger(generated=18, trained=6, discarded={"stale": 12})


def test_recovery_while_a_batch_is_out_gives_the_batch_back() -> None:
    replay = replay_of()
    play(replay, lease_of(replay))
    assert replay.take(0) is not None
    assert replay.recover(0) == 0
    assert state(replay) == "ready"
    step(replay)
    assert replay.table.ledgers.total == Ledger(generated=6, trained=6)


def test_late_members_stay_late_through_a_rollback() -> None:
    replay = replay_of(staleness=4, group_size=3, min_members=2)
    play(replay, lease_of(replay))
    step(replay)
    assert replay.table.ledgers.total == Ledger(generated=9, trained=6, withheld={"late": 3})
    replay.recover(0)
    step(replay)
    assert replay.table.ledgers.total == Ledger(generated=9, trained=6, withheld={"late": 3})


def test_what_a_checkpoint_holds_is_not_rolled_back() -> None:
    replay = replay_of(staleness=4)
    for _ in range(2):
        play(replay, lease_of(replay))
        step(replay)
    with pytest.raises(StateError, match="a checkpoint of version 3; the buffer is at version 2"):
        replay.mark_checkpointed(3)
    replay.mark_checkpointed(1)
    replay.mark_checkpointed(0)
    with pytest.raises(
        StateError, match="weights of version 0 cannot be resumed from: commits up to 1 are in a checkpoint"
    ):
        replay.recover(0)
    assert replay.recover(1) == 3


def test_forgotten_groups_stay_counted_and_late_reports_about_them_are_ignored() -> None:
    replay = replay_of()
    play(replay, lease_of(replay))
    step(replay)
    replay.mark_checkpointed(1)
    replay.table.prune()
    assert 0 in replay.table.groups  # not drained
    replay.table.drain()
    replay.table.prune()
    assert 0 in replay.table.groups  # not served: it is outstanding still
    replay.mark_served(1)
    replay.table.counters.checkpointed = 0
    replay.table.prune()
    assert 0 in replay.table.groups  # no checkpoint contains it
    replay.mark_checkpointed(1)
    replay.table.prune()
    assert replay.table.groups == {}
    assert replay.leases.progress("a", {"0.0.0": {0: 99}}, 0.0) == ["0.0.0"]
    assert not replay.leases.deliver("0.0.0", FINISHED, {0: 3}, {0: 3})
    assert replay.table.ledgers.total == Ledger(generated=6, trained=6)


def test_a_group_is_remembered_while_somebody_may_report_about_it() -> None:
    replay = replay_of(group_size=3, min_members=2)
    lease = lease_of(replay)
    for member in (0, 1):
        assert replay.leases.deliver(lease.episode(member), FINISHED, {0: 3}, {0: 3})
    step(replay)
    replay.mark_checkpointed(1)
    replay.mark_served(1)
    replay.table.drain()
    replay.table.prune()
    assert list(replay.table.groups) == [0]
    replay.leases.deliver(lease.episode(2), failed("unwanted"), {0: 2}, {})
    replay.table.drain()
    replay.table.prune()
    assert replay.table.groups == {}


def test_a_version_that_was_not_made_cannot_be_served() -> None:
    with pytest.raises(StateError, match="version 1 cannot be served"):
        replay_of().mark_served(1)
