"""The replay state machine: random runs against an independent account of what was sent, and each transition by itself."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from slipstream.buffer.admission import Admission
from slipstream.buffer.ledger import Ledger
from slipstream.buffer.messages import Lease
from slipstream.buffer.replay import Group, OnDeadline, Replay
from slipstream.buffer.store import Clock, Store, ledger_of
from slipstream.buffer.trajectory import FINISHED, Outcome
from slipstream.errors import StateError

LEASE_S = 10.0
WORKERS = ("a", "b")
MEMORY = Path("/dev/shm")  # hundreds of small databases: where there is one, a folder that never waits for a disk


def failed(reason: str) -> Outcome:
    return Outcome("failed", reason)


def without_deadline(group: Group) -> Group:
    group = copy.deepcopy(group)
    group.deadline = 0.0
    group.episodes = dict(sorted(group.episodes.items()))
    return group


class Runs(RuleBasedStateMachine):
    """Workers, engines, a learner and crashes, with accounts of their own; every change goes through a real store."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))

    @initialize(
        staleness=st.integers(0, 4),
        policy=st.sampled_from(["withhold", "wait", "drop"]),
        groups_per_batch=st.integers(1, 2),
        group_size=st.integers(2, 3),
    )
    def begin(self, staleness: int, policy: OnDeadline, groups_per_batch: int, group_size: int) -> None:
        self.settings = (Admission(staleness, groups_per_batch), group_size, policy, LEASE_S)
        self.staleness, self.policy, self.group_size, self.per_batch = staleness, policy, group_size, groups_per_batch
        self.replay = Replay(*self.settings)
        self.path = self.folder / "buffer.sqlite"
        self.store = Store(self.path)
        self.now = 0.0
        self.wishes = 0
        self.next_group = 0
        self.tokens: dict[str, Counter[int]] = {}  # episode -> version -> sampled
        self.reported: Counter[str] = Counter()
        self.running: dict[str, str] = {}  # episode -> the worker that plays it, lease or no lease
        self.held: dict[int, tuple[str, int, float]] = {}  # group -> worker, attempt, end of its lease
        self.leased_at: dict[int, int] = {}
        self.done: dict[int, set[int]] = {}  # group -> members that need no other attempt
        self.ended: dict[str, Outcome] = {}
        self.kept: dict[str, Counter[int]] = {}
        self.trained: dict[str, tuple[int, int]] = {}  # episode -> version it made, tokens that carried loss
        self.batch: list[int] | None = None
        self.alive = [0]
        self.checkpointed = 0
        self.recovered_from: int | None = None
        self.highest = 0
        self.before_recovery = 0
        self.database: dict[int, Group] = {}

    def teardown(self) -> None:
        if hasattr(self, "replay"):
            self.a_batch_always_comes()
            self.store.close()
        shutil.rmtree(self.folder)

    # --- helpers --------------------------------------------------------------------------------------------------

    def store_changes(self) -> None:
        r = self.replay
        changed = r.drain()
        clock = Clock(r.version, r.served, r.next_group, r.recovered_from, self.checkpointed)
        self.store.save(clock, changed)
        for group in changed:
            self.database[group.id] = copy.deepcopy(group)
            if group.state != "leased":
                self.held.pop(group.id, None)

    def outstanding(self) -> int:
        served = -1 if self.replay.served is None else self.replay.served
        made = {int(e.split(".")[0]): version for e, (version, _) in self.trained.items()}
        return sum(g.state != "discarded" and not made.get(g.id, served + 1) <= served for g in self.database.values())

    def lost(self, groups: list[int]) -> None:
        for group in groups:
            del self.held[group]

    def holds(self, episode: str) -> bool:
        group, attempt, _ = map(int, episode.split("."))
        return group in self.held and self.held[group][1] == attempt

    def sample_into(self, episode: str, count: int, lag: int) -> None:
        self.tokens[episode][max(0, (self.replay.served or 0) - lag)] += count

    def deliver(self, episode: str, outcome: Outcome) -> None:
        held, tokens = self.holds(episode), self.tokens[episode]
        kept = self.replay.deliver(episode, tokens.total(), outcome, dict(tokens) if outcome.trainable else {})
        self.reported[episode] = tokens.total()
        self.ended[episode] = outcome
        del self.running[episode]
        group, _, member = map(int, episode.split("."))
        if held:
            self.done[group].add(member)
        self.store_changes()
        over = self.database[group].state == "discarded"
        assert kept == (held and outcome.trainable and tokens.total() > 0 and not over)
        if kept:
            self.kept[episode] = tokens

    def grant(self, worker: str) -> Lease | None:
        replay, before = self.replay, self.outstanding()
        self.wishes += 1
        lease = replay.grant(worker, self.now, f"wish {self.wishes}")
        open_groups = sorted(g.id for g in self.database.values() if g.state == "open")
        if lease is None:
            served = replay.served
            assert (
                served is None
                or served < replay.version - self.staleness
                or (not open_groups and before >= (self.staleness + 1) * self.per_batch)
            )
            return None
        assert lease.version == replay.served
        assert lease.version >= replay.version - self.staleness
        assert lease.oldest_version == max(0, lease.version - self.staleness)
        if open_groups:
            assert lease.group_id == open_groups[0]
        else:
            assert lease.group_id == self.next_group
            assert before < (self.staleness + 1) * self.per_batch
            self.next_group += 1
            self.done[lease.group_id] = set()
        assert set(lease.members) == set(range(self.group_size)) - self.done[lease.group_id]
        assert lease.members
        assert replay.granted(f"wish {self.wishes}") == lease
        self.held[lease.group_id] = worker, lease.attempt, self.now + LEASE_S
        self.leased_at[lease.group_id] = lease.version
        for member in lease.members:
            episode = f"{lease.group_id}.{lease.attempt}.{member}"
            assert episode not in self.tokens
            self.tokens[episode], self.running[episode] = Counter(), worker
        self.store_changes()
        return lease

    # --- workers --------------------------------------------------------------------------------------------------

    @rule(worker=st.sampled_from(WORKERS))
    def wants_lease(self, worker: str) -> None:
        self.grant(worker)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 5), lag=st.integers(0, 4))
    def samples(self, data: st.DataObject, count: int, lag: int) -> None:
        self.sample_into(data.draw(st.sampled_from(sorted(self.running))), count, min(lag, self.staleness))

    @precondition(lambda self: self.running)
    @rule(worker=st.sampled_from(WORKERS))
    def reports(self, worker: str) -> None:
        mine = [episode for episode, player in self.running.items() if player == worker]
        self.replay.progress(worker, {e: self.tokens[e].total() for e in mine}, self.now)
        for episode in mine:
            self.reported[episode] = self.tokens[episode].total()
            group = int(episode.split(".")[0])
            if self.holds(episode) and self.held[group][0] == worker:
                self.held[group] = *self.held[group][:2], self.now + LEASE_S
        self.store_changes()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), outcome=st.sampled_from([FINISHED, FINISHED, FINISHED, failed("tool"), failed("engine")]))
    def delivers(self, data: st.DataObject, outcome: Outcome) -> None:
        episode = data.draw(st.sampled_from(sorted(self.running)))
        self.deliver(episode, outcome)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finishes_a_group(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(sorted(self.running))).split(".")[0]
        for episode in [e for e in self.running if e.split(".")[0] == group]:
            self.sample_into(episode, 2, 0)
            self.deliver(episode, FINISHED)

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def delivers_twice(self, data: st.DataObject) -> None:
        episode, before = data.draw(st.sampled_from(sorted(self.ended))), self.replay.ledger.copy()
        tokens = self.tokens[episode]
        assert not self.replay.deliver(episode, tokens.total(), FINISHED, dict(tokens))
        self.replay.progress(WORKERS[0], {episode: tokens.total() + 5}, self.now)
        assert self.replay.ledger == before

    @rule(worker=st.sampled_from(WORKERS), reason=st.sampled_from(["worker_lost", "worker_stopped"]))
    def dies(self, worker: str, reason: str) -> None:
        self.replay.release(worker, reason)
        self.lost([g for g, (player, _, _) in self.held.items() if player == worker])
        self.running = {e: player for e, player in self.running.items() if player != worker}
        self.store_changes()

    @rule(seconds=st.sampled_from([1.0, 5.0, 10.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        late = sorted(g for g, (_, _, end) in self.held.items() if end < self.now)
        assert sorted(g.id for g in self.replay.expire(self.now)) == late
        self.lost(late)
        self.store_changes()

    # --- learner --------------------------------------------------------------------------------------------------

    @rule()
    def takes(self) -> None:
        version, oldest = self.replay.version, self.replay.version - self.staleness
        batch = self.replay.take(version)
        repeated = self.replay.take(version)
        self.store_changes()
        states = Counter(g.state for g in self.database.values())
        under_way = [g.id for g in self.database.values() if g.state in ("open", "leased")]
        late = [g for g in under_way if self.leased_at[g] <= oldest]
        if batch is None:
            assert repeated is None
            assert states["ready"] < self.per_batch or (self.policy == "wait" and late)
            return
        assert repeated is not None
        ids = [g.id for g in batch]
        assert [g.id for g in repeated] == ids == sorted(ids)
        assert self.batch in (None, ids)
        assert len(ids) == self.per_batch
        if self.batch is None:
            assert all(g.id > ids[-1] for g in self.database.values() if g.state == "ready")
            assert self.policy != "wait" or not late
        self.batch = ids
        for group in batch:
            kept = [self.kept[e.id] for e in group.in_account("ready")]
            assert len(kept) >= 2
            assert any(v >= oldest for tokens in kept for v in tokens)
            assert self.policy != "drop" or all(v >= oldest for tokens in kept for v in tokens)
            delivered = {int(e.split(".")[2]) for e in self.ended if int(e.split(".")[0]) == group.id}
            assert delivered == set(range(self.group_size))

    @precondition(lambda self: self.batch is not None)
    @rule()
    def commits(self) -> None:
        version = self.replay.version
        assert self.batch is not None
        members = [e for e in self.kept if int(e.split(".")[0]) in self.batch and e not in self.discarded()]
        self.replay.commit(version)
        for episode in members:
            assert episode not in self.trained, "trained twice"
            fresh = sum(n for v, n in self.kept[episode].items() if v >= version - self.staleness)
            self.trained[episode] = version + 1, fresh
        self.store_changes()
        if self.staleness == 0:
            others = [g for g in self.database.values() if g.state in ("open", "leased", "ready")]
            assert all(g.id < self.before_recovery for g in others), "in flight while the weights change"
        self.batch = self.recovered_from = None
        self.alive.append(version + 1)
        assert self.replay.version == version + 1
        before = self.replay.ledger.copy()
        self.replay.commit(version)  # a client that got no answer
        assert (self.replay.version, self.replay.ledger) == (version + 1, before)

    @rule(stragglers=st.integers(0, 2))
    def steps(self, stragglers: int) -> None:
        """Everybody plays, a few groups go on playing, the learner takes a step if it can."""
        for worker in WORKERS:
            self.grant(worker)
        for episode in self.running:
            self.sample_into(episode, 1, 0)
        late = {int(e.split(".")[0]) for e in list(self.running)[:stragglers]}
        for episode in list(self.running):
            if int(episode.split(".")[0]) not in late:
                self.deliver(episode, FINISHED)
        self.takes()
        if self.batch is not None:
            self.commits()
            self.serves(behind=0)

    @rule(behind=st.integers(0, 1))
    def serves(self, behind: int) -> None:
        version = max(self.replay.version - behind, self.replay.served or 0)
        self.replay.serve(version)
        self.store_changes()

    @rule(data=st.data())
    def checkpoints(self, data: st.DataObject) -> None:
        self.checkpointed = data.draw(st.sampled_from([v for v in self.alive if v >= self.checkpointed]))
        self.store_changes()
        self.replay.forget(self.checkpointed)
        served = -1 if self.replay.served is None else self.replay.served
        for group in self.database.values():
            if group.id not in self.replay.groups:
                settled = min(served, self.checkpointed)
                assert group.state == "discarded" or (group.trained_at or 0) <= settled

    @rule(data=st.data())
    def recovers(self, data: st.DataObject) -> None:
        kept = data.draw(st.sampled_from([v for v in self.alive if v >= self.checkpointed]))
        before = self.replay.version
        version = self.replay.recover(kept)
        assert self.replay.recover(kept) == version  # a client that got no answer
        assert version == (before if kept in (before, self.recovered_from) else before + 1)
        if kept != before:
            self.recovered_from = kept
        self.trained = {e: at for e, at in self.trained.items() if at[0] <= kept}
        self.alive = sorted({*(v for v in self.alive if v <= kept), version})
        self.batch = None
        self.before_recovery = self.next_group
        self.store_changes()
        assert all(g.state != "batched" for g in self.database.values())

    # --- the buffer -----------------------------------------------------------------------------------------------

    @rule()
    def restarts(self) -> None:
        self.replay.forget(self.checkpointed)
        before = self.replay
        self.store.close()
        self.store = Store(self.path)
        clock, groups = self.store.load()
        assert {g.id: without_deadline(g) for g in groups} == {
            g.id: without_deadline(g) for g in before.groups.values()
        }
        assert clock == Clock(
            before.version, before.served, before.next_group, before.recovered_from, self.checkpointed
        )
        self.replay = Replay(*self.settings)
        for group in groups:
            group.deadline = self.now + LEASE_S
        self.replay.restore(groups, ledger_of(self.path))
        self.replay.version, self.replay.served = clock.version, clock.served
        self.replay.next_group, self.replay.recovered_from = clock.next_group, clock.recovered_from
        self.held = {g: (worker, attempt, self.now + LEASE_S) for g, (worker, attempt, _) in self.held.items()}

    @rule()
    def a_batch_always_comes(self) -> None:
        """From wherever the run is, playing everything that is leased and granted a few times fills a batch."""
        for _ in range(4):
            self.replay.serve(self.replay.version)
            self.takes()
            if self.batch is not None:
                return
            while self.grant(WORKERS[0]) is not None:
                pass
            for episode in list(self.running):
                self.sample_into(episode, 1, 0)
                self.deliver(episode, FINISHED)
        raise AssertionError("no batch although everything that was leased was delivered")

    def discarded(self) -> set[str]:
        return {e.id for g in self.database.values() for e in g.episodes.values() if e.account == "discarded"}

    @invariant()
    def the_accounts_agree(self) -> None:
        if not hasattr(self, "replay"):
            return
        ledger = self.replay.ledger
        assert ledger.closes
        assert ledger.generated == self.reported.total()
        assert ledger.trained == sum(fresh for _, fresh in self.trained.values())
        assert ledger.withheld == sum(self.kept[e].total() - fresh for e, (_, fresh) in self.trained.items())
        discarded = self.discarded()
        waiting = [e for e in self.kept if e not in self.trained and e not in discarded]
        assert ledger.ready == sum(self.kept[e].total() for e in waiting)
        assert sum(ledger.discarded.values()) == sum(self.reported[e] for e in discarded)
        assert not discarded & set(self.trained)
        assert ledger_of(self.path) == ledger
        for group in self.replay.groups.values():
            assert without_deadline(group) == without_deadline(self.database[group.id]), "a change was not drained"
        assert self.replay.version >= self.highest
        self.highest = self.replay.version


TestRuns = Runs.TestCase
TestRuns.settings = settings(
    max_examples=50, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)


# --- each transition by itself --------------------------------------------------------------------------------------


def replay_of(staleness: int = 1, per_batch: int = 1, group_size: int = 2, policy: OnDeadline = "withhold") -> Replay:
    replay = Replay(Admission(staleness, per_batch), group_size, policy, LEASE_S)
    replay.serve(0)
    return replay


def lease_of(replay: Replay, worker: str = "a", now: float = 0.0, wish: str = "") -> Lease:
    lease = replay.grant(worker, now, wish)
    assert lease is not None
    return lease


def play(replay: Replay, lease: Lease, versions: dict[int, int] | None = None) -> list[bool]:
    tokens = versions or {lease.version: 3}
    ids = [f"{lease.group_id}.{lease.attempt}.{member}" for member in lease.members]
    return [replay.deliver(e, sum(tokens.values()), FINISHED, tokens) for e in ids]


def step(replay: Replay) -> None:
    """One learner step that finds a batch, without serving it."""
    assert replay.take(replay.version) is not None
    replay.commit(replay.version)


def test_nothing_is_granted_before_the_engines_serve() -> None:
    assert Replay(Admission(2, 2), 2, "withhold", LEASE_S).grant("a", 0.0) is None


def test_admission_counts_what_is_served_not_what_is_committed() -> None:
    replay = replay_of(staleness=0, per_batch=2)
    for lease in (lease_of(replay), lease_of(replay)):
        play(replay, lease)
    assert replay.grant("a", 0.0) is None
    step(replay)
    assert replay.grant("a", 0.0) is None
    replay.serve(1)
    assert lease_of(replay).version == 1


def test_nothing_starts_on_weights_whose_tokens_could_not_be_trained_on() -> None:
    replay = replay_of(staleness=0)
    play(replay, lease_of(replay))
    step(replay)
    assert replay.recover(0) == 2
    assert replay.take(2) is None  # its tokens are of version 0: discarded
    assert replay.ledger.discarded == {"stale": 6}
    assert replay.outstanding() == 0
    assert replay.grant("a", 0.0) is None  # the engines still serve 0
    replay.serve(2)
    assert lease_of(replay).group_id == 1


def test_a_lost_group_is_open_only_for_engines_that_are_fresh_enough() -> None:
    replay = replay_of(staleness=0, per_batch=1)
    lease_of(replay, now=0.0)
    assert [g.id for g in replay.expire(11.0)] == [0]
    replay.recover(0)
    assert lease_of(replay, now=11.0).attempt == 1


def test_a_wish_is_granted_once() -> None:
    replay = replay_of(staleness=3)
    lease = lease_of(replay, wish="x")
    assert replay.granted("x") == lease
    assert replay.granted("y") is None
    replay.deliver("0.0.0", 0, failed("tool"), {})
    assert replay.granted("x") == lease
    replay.release("a", "worker_lost")
    assert replay.granted("x") is None


def test_only_missing_members_are_granted_again() -> None:
    replay = replay_of(group_size=3)
    lease = lease_of(replay)
    assert replay.deliver("0.0.1", 4, FINISHED, {0: 4})
    replay.progress("a", {"0.0.0": 2, "0.0.2": 1}, 0.0)
    replay.release("a", "worker_lost")
    again = lease_of(replay, "b")
    assert (again.group_id, again.attempt, again.members) == (0, 1, (0, 2))
    assert lease.attempt == 0
    assert replay.ledger == Ledger(generated=7, ready=4, discarded={"worker_lost": 3})
    assert play(replay, again) == [True, True]
    assert replay.groups[0].state == "ready"


def test_a_silent_worker_that_comes_back_is_counted_but_not_kept() -> None:
    replay = replay_of()
    lease_of(replay, "a", now=0.0)
    assert [g.id for g in replay.expire(LEASE_S + 1)] == [0]
    again = lease_of(replay, "b", now=11.0)
    replay.progress("a", {"0.0.0": 5}, 12.0)
    assert replay.groups[0].deadline == 11.0 + LEASE_S  # another's lease is not renewed
    assert not replay.deliver("0.0.0", 6, FINISHED, {0: 6})
    assert replay.ledger == Ledger(generated=6, discarded={"worker_lost": 6})
    assert play(replay, again) == [True, True]
    assert replay.ledger.closes


def test_reports_of_a_process_that_is_gone_change_nothing() -> None:
    replay = replay_of()
    lease_of(replay, "a")
    replay.progress("a", {"0.0.0": 5}, 0.0)
    replay.release("a", "worker_stopped")
    replay.progress("a", {"0.0.0": 9}, 0.0)
    assert not replay.deliver("0.0.0", 9, FINISHED, {0: 9})
    assert replay.ledger == Ledger(generated=5, discarded={"worker_stopped": 5})


def test_progress_renews_a_lease_and_totals_never_fall() -> None:
    replay = replay_of()
    lease_of(replay, "a", now=0.0)
    replay.progress("a", {"0.0.0": 5}, 9.0)
    replay.progress("a", {"0.0.0": 3}, 9.0)
    assert replay.expire(15.0) == []
    assert replay.ledger == Ledger(generated=5, in_flight=5)
    with pytest.raises(StateError, match="5 tokens were reported, 3 delivered"):
        replay.deliver("0.0.0", 3, FINISHED, {0: 3})
    with pytest.raises(StateError, match="7 tokens were generated, 6 are in its trajectories"):
        replay.deliver("0.0.0", 7, FINISHED, {0: 6})
    with pytest.raises(StateError, match="has tokens of version 1, the buffer is at version 0"):
        replay.deliver("0.0.0", 7, FINISHED, {0: 6, 1: 1})
    assert replay.ledger == Ledger(generated=5, in_flight=5)
    assert replay.deliver("0.0.0", 7, FINISHED, {0: 7})
    assert replay.ledger == Ledger(generated=7, ready=7)


def test_failures_are_members_without_a_reward() -> None:
    replay = replay_of(group_size=3)
    lease_of(replay)
    assert not replay.deliver("0.0.0", 4, failed("tool"), {})
    assert not replay.deliver("0.0.1", 0, FINISHED, {})
    assert replay.deliver("0.0.2", 2, FINISHED, {0: 2}) is False  # alone: there is no baseline
    assert replay.groups[0].state == "discarded"
    assert replay.ledger == Ledger(generated=6, discarded={"failed_tool": 4, "too_few_members": 2})
    assert lease_of(replay).group_id == 1


@pytest.mark.parametrize(
    "episode", ["9.0.0", "0.1.0", "0.0.9", "", ".", "x", "-1.0.0", "\u0663.0.0", "9" * 5000 + ".0.0", "0.0.0.0", "\x00"]
)
def test_an_episode_that_was_never_leased_is_refused(episode: str) -> None:
    replay = replay_of()
    lease_of(replay)
    before = replay.ledger.copy()
    with pytest.raises(StateError, match="was never leased"):
        replay.deliver(episode, 1, FINISHED, {0: 1})
    with pytest.raises(StateError, match="was never leased"):
        replay.progress("a", {episode: 1}, 0.0)
    assert replay.ledger == before


def test_withhold_trains_what_is_fresh_and_withholds_the_rest() -> None:
    replay = replay_of(staleness=0)
    lease = lease_of(replay)
    replay.recover(0)
    replay.version = 1
    play(replay, lease, {0: 3, 1: 2})
    step(replay)
    assert replay.ledger == Ledger(generated=10, trained=4, withheld=6)


def test_drop_discards_a_group_with_any_stale_token() -> None:
    replay = replay_of(staleness=0, policy="drop")
    lease = lease_of(replay)
    replay.version = 1
    play(replay, lease, {0: 3, 1: 2})
    assert replay.take(1) is None
    assert replay.ledger == Ledger(generated=10, discarded={"stale": 10})


def test_drop_gives_up_groups_that_run_past_the_bound() -> None:
    replay = replay_of(staleness=0, policy="drop")
    lease_of(replay)
    replay.progress("a", {"0.0.0": 3}, 0.0)
    replay.version = 1
    assert replay.take(1) is None
    assert replay.groups[0].state == "discarded"
    assert not replay.deliver("0.0.0", 4, FINISHED, {0: 4})
    assert replay.ledger == Ledger(generated=4, discarded={"stale": 4})


def test_wait_holds_the_batch_back_for_a_group_at_its_last_chance() -> None:
    replay = replay_of(staleness=1, policy="wait")
    slow, quick = lease_of(replay), lease_of(replay)
    play(replay, quick)
    step(replay)
    replay.serve(1)
    play(replay, lease_of(replay))
    assert replay.take(1) is None  # group 0, of version 0, would be too old at version 2
    play(replay, slow)
    assert [g.id for g in replay.take(1) or []] == [0]


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


def test_a_commit_needs_its_batch_and_may_be_repeated() -> None:
    replay = replay_of()
    with pytest.raises(StateError, match="without a batch"):
        replay.commit(0)
    play(replay, lease_of(replay))
    step(replay)
    replay.commit(0)
    assert replay.version == 1
    with pytest.raises(StateError, match="without a batch"):
        replay.commit(1)


def test_a_ledger_that_does_not_close_stops_the_commit_before_it_changes_anything() -> None:
    replay = replay_of()
    play(replay, lease_of(replay))
    replay.take(0)
    replay.ledger.generated += 1
    with pytest.raises(StateError, match="the ledger does not close: 7 generated, 6 accounted for"):
        replay.commit(0)
    assert replay.version == 0
    assert replay.groups[0].state == "batched"


def test_recovery_rolls_back_to_ready_under_a_new_version() -> None:
    replay = replay_of(staleness=4)
    for _ in range(3):
        play(replay, lease_of(replay))
        step(replay)
    assert replay.recover(1) == 4
    assert [g.state for g in replay.groups.values()] == ["trained", "ready", "ready"]
    assert replay.ledger == Ledger(generated=18, trained=6, ready=12)
    assert replay.recover(1) == 4
    assert replay.recover(4) == 4
    with pytest.raises(StateError, match="without a batch"):
        replay.commit(2)  # by the process that died
    with pytest.raises(StateError, match="version 5, the buffer is at version 4: another run's"):
        replay.recover(5)
    step(replay)
    assert replay.recover(1) == 6


def test_recovery_while_a_batch_is_out_gives_the_batch_back() -> None:
    replay = replay_of()
    play(replay, lease_of(replay))
    assert replay.take(0) is not None
    assert replay.recover(0) == 0
    assert replay.groups[0].state == "ready"
    step(replay)
    assert replay.ledger == Ledger(generated=6, trained=6)


def test_forgotten_groups_stay_counted_and_late_reports_about_them_are_ignored() -> None:
    replay = replay_of()
    play(replay, lease_of(replay))
    step(replay)
    replay.forget(1)
    assert 0 in replay.groups  # not drained
    replay.drain()
    replay.forget(1)
    assert 0 in replay.groups  # not served: it is outstanding still
    replay.serve(1)
    replay.forget(0)
    assert 0 in replay.groups  # no checkpoint contains it
    replay.forget(1)
    assert replay.groups == {}
    replay.progress("a", {"0.0.0": 99}, 0.0)
    assert not replay.deliver("0.0.0", 3, FINISHED, {0: 3})
    assert replay.ledger == Ledger(generated=6, trained=6)


def test_a_version_that_was_not_made_cannot_be_served() -> None:
    with pytest.raises(StateError, match="version 1 cannot be served"):
        replay_of().serve(1)
