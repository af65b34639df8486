"""Random runs of the replay machine, through a real store, against a model that keeps its own accounts (`replay_model`).

SLIPSTREAM_EXAMPLES=10000 plays so many runs instead of the few that are enough to notice a change (with `--timeout 3600`);
`--hypothesis-seed N` makes other ones of them. Each transition by itself is in `test_buffer_leases` and `test_buffer_batches`.

Invariants, checked after every step:
- Groups, episodes and every account of every version are what the model says: in memory, and by SQL over the file.
- A token that was trained is at most `max_staleness` versions older than the version that it was trained at, by the file alone: the
  bound is the one that was in force when its batch was taken.
- Tasks of an environment are issued one after the other, none twice; no member is kept twice.
- From wherever a run is, a batch comes when what is leased is delivered.
"""

from __future__ import annotations

import copy
import os
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from slipstream.buffer.admission import Admission, Filter, LiveRules, OnDeadline, ReplayConfig
from slipstream.buffer.encoded import DeliveredTrajectory
from slipstream.buffer.group_table import Group, GroupState
from slipstream.buffer.ledger import Ledger, VersionLedgers
from slipstream.buffer.ledger_report import ledger_report, ledgers_by_version
from slipstream.buffer.messages import Lease
from slipstream.buffer.replay import UNUSABLE_BATCHES, Replay
from slipstream.buffer.store import CommitRow, Store, WriteBatch
from slipstream.buffer.trajectory import FINISHED, TRUNCATED, Outcome
from slipstream.errors import StateError
from slipstream.tests import replay_model
from slipstream.tests.episodes import trajectory_of
from slipstream.tests.stores import new_trajectory
from slipstream.tests.tiers import examples

EXAMPLES = int(os.environ.get("SLIPSTREAM_EXAMPLES", examples(100)))
LEASE_S = 10.0
WORKERS = ("a", "b")
MEMORY = Path("/dev/shm")  # hundreds of small databases: where there is one, a folder that never waits for a disk
OUTCOMES = [FINISHED, FINISHED, FINISHED, TRUNCATED, *(Outcome("failed", r) for r in ("tool", "engine", "policy"))]

TOO_OLD = """
SELECT count(*) FROM accounts JOIN groups ON id = group_id JOIN commits ON commits.version = trained_at
WHERE account = 'trained' AND accounts.version < trained_at - 1 - max_staleness
"""


def without_deadline(group: Group) -> Group:
    return msgspec.structs.replace(group, deadline=0.0, episodes=dict(sorted(group.episodes.items())))


def counts_of(ledgers: dict[int, Ledger]) -> dict[int, Counter[str]]:
    """Version -> account, `generated` among them -> tokens, none of them 0."""
    reported = {v: msgspec.structs.asdict(ledger) for v, ledger in ledgers.items()}
    for accounts in reported.values():
        accounts |= {f"withheld_{reason}": tokens for reason, tokens in accounts.pop("withheld").items()}
    counts = {v: Counter({**accounts.pop("discarded"), **accounts}) for v, accounts in reported.items()}
    return {v: +accounts for v, accounts in counts.items() if +accounts}


class Runs(RuleBasedStateMachine):
    """Workers, engines, a learner and crashes. `world.episodes[...].tokens` is what was sampled; `playing` are still played."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))

    @initialize(
        staleness=st.integers(0, 4),
        policy=st.sampled_from(["withhold", "wait", "drop"]),
        per_batch=st.integers(1, 3),
        members=st.integers(2, 4).flatmap(lambda n: st.tuples(st.just(n), st.integers(2, n))),
        shares=st.sampled_from([(1,), (1, 1), (3, 1), (1, 2, 4)]),
        retries=st.dictionaries(st.sampled_from(["tool", "engine"]), st.integers(1, 2)),
        dynamic=st.booleans(),
        filter=st.sampled_from(get_args(Filter)),
        greedy=st.booleans(),
    )
    def begin(
        self,
        staleness: int,
        policy: OnDeadline,
        per_batch: int,
        members: tuple[int, int],
        shares: tuple[int, ...],
        retries: dict[str, int],
        dynamic: bool,
        filter: Filter,
        greedy: bool,
    ) -> None:
        rules = ReplayConfig(*members, policy, LEASE_S, retries, dynamic, filter, greedy)
        self.given = Admission(staleness, per_batch, shares), rules
        self.world = replay_model.Model(
            replay_model.Rules(staleness, per_batch, *members, policy, shares, retries, dynamic, filter, greedy),
        )
        self.staleness = staleness
        self.path = self.folder / "buffer.sqlite"
        self.store, self.replay = Store(self.path), Replay(*self.given)
        self.db = sqlite3.connect(self.path, isolation_level=None)
        self.now = 0.0
        self.lease_requests = 0
        self.playing: set[str] = set()
        self.alive = [0]  # versions that weights of the present line of training had
        self.archived: set[int] = set()
        self.stored: dict[int, Group] = {}
        self.arrived: list[DeliveredTrajectory] = []
        self.commits: list[CommitRow] = []
        self.store_changes()

    def teardown(self) -> None:
        if hasattr(self, "replay"):
            self.a_batch_always_comes()
            self.the_buffer_says_what_happened()
            assert ledger_report(self.path).balances
            self.db.close()
            self.store.close()
        shutil.rmtree(self.folder)

    def store_changes(self, rolled_back_to: int | None = None) -> None:
        changed = self.replay.table.drain()
        self.store.save(WriteBatch.of(self.replay.table.counters, changed, self.arrived, self.commits, rolled_back_to))
        self.stored.update((group.id, copy.deepcopy(group)) for group, _ in changed)
        self.arrived, self.commits = [], []

    def some(self, data: st.DataObject, names: set[str]) -> str:
        return data.draw(st.sampled_from(sorted(names)))

    # --- workers --------------------------------------------------------------------------------------------------

    @rule(worker=st.sampled_from(WORKERS))
    def wants_lease(self, worker: str) -> None:
        self.grant(worker)

    def grant(self, worker: str) -> Lease | None:
        self.lease_requests += 1
        lease_request = f"lease_request {self.lease_requests}"
        expected = self.world.next_lease()
        lease = self.replay.leases.grant(worker, self.now, lease_request)
        assert (None if lease is None else (lease.group_id, lease.env)) == expected
        assert self.replay.leases.granted(lease_request) == lease  # a client that got no answer
        if lease is None:
            return None
        self.playing |= set(self.world.leased(lease.group_id, lease.env, worker, self.now + LEASE_S))
        team = self.world.teams[lease.group_id]
        assert (lease.task, lease.attempt, lease.version) == (team.task, team.attempt, self.world.served)
        assert self.world.oldest <= lease.version
        assert lease.oldest_version == max(0, lease.version - self.staleness)
        assert lease.members
        assert {lease.episode(m) for m in lease.members} <= self.playing
        assert lease.greedy == tuple(
            m for m in lease.members if self.world.greedy(self.world.episodes[lease.episode(m)])
        )
        self.store_changes()
        return lease

    @precondition(lambda self: self.playing)
    @rule(data=st.data(), count=st.integers(1, 5), lag=st.integers(0, 4))
    def samples(self, data: st.DataObject, count: int, lag: int) -> None:
        self.sample_into(self.some(data, self.playing), count, lag)

    def sample_into(self, episode: str, count: int, lag: int = 0) -> None:
        """Replicas may be behind what is served, not behind what the lease allows."""
        assert self.world.served is not None
        e = self.world.episodes[episode]
        oldest = max(0, self.world.teams[e.group].leased_at - self.staleness)
        e.tokens[max(oldest, self.world.served - lag)] += count

    @precondition(lambda self: self.playing)
    @rule(worker=st.sampled_from(WORKERS))
    def reports(self, worker: str) -> None:
        mine = sorted(e for e in self.playing if self.world.episodes[e].worker == worker)
        unwanted = self.replay.leases.progress(worker, {e: dict(self.world.episodes[e].tokens) for e in mine}, self.now)
        assert unwanted == self.world.reported(worker, mine, self.now + LEASE_S)
        self.store_changes()

    @precondition(lambda self: self.playing)
    @rule(lag=st.integers(0, 4))
    def plays_on(self, lag: int) -> None:
        """All workers sample and report."""
        for episode in sorted(self.playing):
            self.sample_into(episode, 1, lag)
        for worker in WORKERS:
            self.reports(worker)

    @precondition(lambda self: self.playing)
    @rule(
        data=st.data(),
        outcome=st.sampled_from(OUTCOMES),
        unused=st.integers(0, 2),
        penalty=st.booleans(),
        reward=st.sampled_from([0.0, 1.0]),
    )
    def delivers(self, data: st.DataObject, outcome: Outcome, unused: int, penalty: bool, reward: float) -> None:
        self.deliver(self.some(data, self.playing), outcome, unused, penalty, reward)

    @precondition(lambda self: self.playing)
    @rule(data=st.data(), rewards=st.sampled_from([(0.0,), (1.0,), (0.0, 1.0)]))
    def finishes_a_group(self, data: st.DataObject, rewards: tuple[float, ...]) -> None:
        group = self.some(data, self.playing).split(".")[0]
        for number, episode in enumerate(sorted(e for e in self.playing if e.split(".")[0] == group)):
            self.sample_into(episode, 2)
            self.deliver(episode, FINISHED, reward=rewards[number % len(rewards)])

    @precondition(lambda self: self.playing)
    @rule(data=st.data(), reason=st.sampled_from(["tool", "engine"]))
    def fails_again_and_again(self, data: st.DataObject, reason: str) -> None:
        group = self.some(data, self.playing).split(".")[0]
        for _ in range(3):
            for episode in sorted(e for e in self.playing if e.split(".")[0] == group):
                self.deliver(episode, Outcome("failed", reason))
            self.grant(WORKERS[0])

    def deliver(
        self, episode: str, outcome: Outcome, unused: int = 0, penalty: bool = False, reward: float | None = None
    ) -> None:
        """Unless told otherwise, each member earns something else."""
        e = self.world.episodes[episode]
        reward = 10.0 + e.member if reward is None else reward
        kept = Counter(e.tokens)
        kept.subtract(dict.fromkeys(list(kept)[:1], unused))
        kept = +kept if outcome.trainable or penalty else Counter[int]()
        accepted = self.replay.leases.deliver(episode, outcome, dict(e.tokens), dict(kept), reward)
        if accepted:
            sent = msgspec.structs.replace(trajectory_of(episode, kept), reward=reward)
            self.arrived.append(new_trajectory(episode, sent))
        self.playing.remove(episode)
        truncated = outcome == TRUNCATED
        assert accepted == self.world.delivered(episode, kept, outcome.reason, reward, truncated=truncated)
        self.store_changes()

    @precondition(lambda self: any(e.settled for e in self.world.episodes.values()))
    @rule(data=st.data())
    def delivers_twice(self, data: st.DataObject) -> None:
        episode = self.some(data, {name for name, e in self.world.episodes.items() if e.settled})
        tokens = dict(self.world.episodes[episode].tokens)
        assert not self.replay.leases.deliver(episode, FINISHED, tokens, tokens)
        assert self.replay.leases.progress(WORKERS[0], {episode: {0: 10**6}}, self.now) == [episode]
        assert self.replay.table.drain() == []

    @rule(worker=st.sampled_from(WORKERS), reason=st.sampled_from(["worker_lost", "worker_stopped"]))
    def dies(self, worker: str, reason: str) -> None:
        self.replay.leases.release(worker, reason)
        self.world.left(worker, reason)
        self.playing = {e for e in self.playing if self.world.episodes[e].worker != worker}
        self.store_changes()

    @rule(seconds=st.sampled_from([1.0, 5.0, 10.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        assert sorted(g.id for g in self.replay.leases.expire(self.now)) == self.world.expired(self.now)
        self.store_changes()

    # --- learner --------------------------------------------------------------------------------------------------

    @rule()
    def takes(self) -> None:
        self.take()

    def take(self) -> list[int] | None:
        batch, again = self.replay.take(self.world.version), self.replay.take(self.world.version)
        ids = None if batch is None else [g.id for g in batch]
        assert ids == (None if again is None else [g.id for g in again])
        assert ids == self.world.taken()
        self.store_changes()
        return ids

    @precondition(lambda self: self.world.inside("batched"))
    @rule()
    def commits_batch(self) -> None:
        version, under = self.world.version, self.replay.taken_under
        assert (under.max_staleness, under.groups_per_batch) == self.world.taken_under
        self.replay.commit(version)
        self.world.committed()
        self.commits.append(
            CommitRow(version + 1, self.now, len(self.world.inside("trained")), *self.world.taken_under)
        )
        self.store_changes()
        self.alive.append(version + 1)
        self.replay.commit(version)  # a client that got no answer
        assert self.replay.table.drain() == []

    @precondition(lambda self: self.world.inside("batched"))
    @rule(ranks=st.integers(1, 3))
    def fails_to_step(self, ranks: int) -> None:
        """Several ranks may report the same failure."""
        if self.world.unusable >= UNUSABLE_BATCHES:
            return
        aside = [group.id for group in self.replay.step_failed(self.world.version)]
        assert aside == self.world.step_failed()
        for _ in range(ranks - 1):
            assert self.replay.step_failed(self.world.version) == []
        self.store_changes()

    @precondition(lambda self: self.world.inside("batched"))
    @rule()
    def fails_to_step_until_it_is_set_aside(self) -> None:
        if self.world.unusable >= UNUSABLE_BATCHES:
            return
        batch = self.world.inside("batched")
        self.fails_to_step(1)
        kept = max(v for v in self.alive if v >= self.world.checkpointed)
        if self.world.inside("batched") and kept == self.world.version:
            self.recover(kept)
            if self.take() == batch:  # else an older group has become ready meanwhile, and comes first
                self.fails_to_step(2)
                assert not self.world.inside("batched")

    @precondition(lambda self: self.world.inside("batched"))
    @rule(data=st.data(), others=st.booleans())
    def proves_groups_to_be_unusable(self, data: st.DataObject, others: bool) -> None:
        """One rank after the other, the second when the batch is dissolved already."""
        version, batch = self.world.version, self.world.inside("batched")
        first = data.draw(st.sampled_from(batch))
        later = sorted({*(self.world.inside("ready") if others else batch)} - {first})
        if self.world.unusable >= UNUSABLE_BATCHES:
            with pytest.raises(StateError):
                self.replay.set_aside(version, [first])
            assert self.replay.table.drain() == []
            return
        for groups in ([first], later):
            aside = [group.id for group in self.replay.set_aside(version, groups)]
            assert aside == self.world.set_aside(groups)
            assert self.replay.set_aside(version, groups) == []  # a client that got no answer
            self.store_changes()

    @rule(slow=st.integers(0, 2), times=st.integers(1, 4))
    def steps(self, slow: int, times: int) -> None:
        """All workers play, a few episodes go on and get old, the learner takes a step whenever it can."""
        for _ in range(times):
            for worker in WORKERS:
                self.grant(worker)
            for episode in sorted(self.playing)[slow:]:
                self.sample_into(episode, 1)
                self.deliver(episode, FINISHED)
            if self.take():
                self.commits_batch()
                self.serves(behind=0)

    @rule(behind=st.integers(0, 1))
    def serves(self, behind: int) -> None:
        self.world.served = max(self.world.version - behind, self.world.served or 0)
        self.replay.mark_served(self.world.served)
        self.store_changes()

    @rule(data=st.data())
    def checkpoints(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from([v for v in self.alive if v >= self.world.checkpointed]))
        self.replay.mark_checkpointed(version)
        self.world.checkpointed = version
        self.store_changes()

    @rule(data=st.data())
    def recovers(self, data: st.DataObject) -> None:
        self.recover(data.draw(st.sampled_from([v for v in self.alive if v >= self.world.checkpointed])))

    def recover(self, kept: int) -> None:
        version = self.world.recovered(kept)
        assert self.replay.recover(kept) == version
        assert self.replay.recover(kept) == version  # a client that got no answer
        self.alive = sorted({*(v for v in self.alive if v <= kept), version})
        self.store_changes(rolled_back_to=kept)

    @rule(data=st.data())
    def asks_for_what_cannot_be(self, data: st.DataObject) -> None:
        """It is refused, and nothing changes."""
        replay, version = self.replay, self.world.version
        requests: list[Callable[[], object]] = [
            lambda: replay.take(version + 1),
            lambda: replay.commit(version + 1),
            lambda: replay.set_aside(version + 1, [0]),
            lambda: replay.step_failed(version + 1),
            lambda: replay.mark_served(version + 1),
            lambda: replay.mark_checkpointed(version + 1),
            lambda: replay.recover(version + 1),
            lambda: replay.recover(self.world.checkpointed - 1),
        ]
        if not self.world.inside("batched"):
            requests.append(lambda: replay.commit(version))
        if self.playing:
            episode = self.some(data, self.playing)
            tokens = dict(self.world.episodes[episode].tokens)
            requests += [
                lambda: replay.leases.progress("a", {episode: {version + 1: 1}}, self.now),
                lambda: replay.leases.deliver(episode, FINISHED, {version + 1: 1}, {}),
                lambda: replay.leases.deliver(
                    episode, FINISHED, tokens, {v: n + 1 for v, n in tokens.items()} or {0: 1}
                ),
            ]
            if stored := dict(replay.table.groups[self.world.episodes[episode].group].episodes[episode].generated):
                requests.append(lambda: replay.leases.deliver(episode, FINISHED, dict.fromkeys(stored, 0), {}))
        for request in requests:
            with pytest.raises(StateError):
                request()
        assert replay.table.drain() == []

    @rule(version=st.integers(0, 8))
    def looks_at_fresh_tokens(self, version: int) -> None:
        waiting = self.world.inside("open", "leased", "ready")
        e = self.world.episodes
        there = {n for n in e if e[n].group in waiting and e[n].where == "ready" and e[n].kept[version]}
        expected = {n for n in there if e[n].withheld != "baseline"}
        assert {episode.id for episode in self.replay.fresh(version)} == expected

    # --- the user -------------------------------------------------------------------------------------------------

    @rule(
        staleness=st.integers(0, 4),
        per_batch=st.integers(1, 3),
        policy=st.sampled_from(["withhold", "wait", "drop"]),
        members=st.integers(2, 4),
    )
    def changes_settings(self, staleness: int, per_batch: int, policy: OnDeadline, members: int) -> None:
        members = min(members, self.world.rules.group_size)
        version = self.replay.configure(LiveRules(staleness, per_batch, members, policy))
        assert version == self.world.changed(staleness, per_batch, members, policy)
        admission, rules = self.given
        self.staleness = staleness
        self.given = (
            msgspec.structs.replace(admission, max_staleness=staleness, groups_per_batch=per_batch),
            msgspec.structs.replace(rules, min_members=members, on_deadline=policy),
        )
        self.store_changes()

    # --- the buffer -----------------------------------------------------------------------------------------------

    @rule()
    def forgets(self) -> None:
        self.replay.table.prune()
        for group in set(self.stored) - set(self.replay.table.groups):
            team, served = self.world.teams[group], -1 if self.world.served is None else self.world.served
            assert team.over or (team.made or 10**9) <= min(self.world.checkpointed, served)
            assert all(e.settled for e in self.world.of(group))

    @rule()
    def shrinks(self) -> None:
        """Down to nothing: what may go goes, in memory and in the file."""
        self.replay.table.prune()
        served = -1 if self.world.served is None else self.world.served
        while self.store.shrink(0, min(self.world.checkpointed, served)):
            assert counts_of(ledgers_by_version(self.path)) == self.world.ledger()
        left = {group for (group,) in self.db.execute("SELECT id FROM groups")}
        assert left == set(self.replay.table.groups)
        self.archived = set(self.world.teams) - left
        for group in self.replay.table.groups.values():
            held = Counter(t.episode for t in self.store.trajectories(group.id))
            assert {e.id for e in (*group.in_account("ready"), *group.in_account("trained"))} <= set(held)

    @rule()
    def restarts(self) -> None:
        """After a crash or in good order: memory is gone."""
        before = self.replay
        before.table.prune()
        self.store.close()
        self.store = Store(self.path)
        clock, groups = self.store.load()
        assert list(map(without_deadline, groups)) == list(
            map(without_deadline, before.table.in_state(*get_args(GroupState)))
        )
        # What `prune` has dropped of the suspects is on disk until the next change is stored: groups that are discarded.
        left = {group.id for group in groups if group.state != "discarded"}
        suspects = {group: at for group, at in clock.suspects.items() if group in left}
        assert msgspec.structs.replace(clock, suspects=suspects) == before.table.counters
        for group in groups:
            group.deadline = self.now + LEASE_S
        self.replay = Replay(*self.given, clock, groups, VersionLedgers(ledgers_by_version(self.path)))
        assert self.replay.leases.grant("a", self.now) is None  # the fleet is not known yet
        self.replay.mark_served(self.world.served)
        for team in self.world.teams.values():
            team.lease = (team.lease[0], self.now + LEASE_S) if team.lease else None

    @rule(
        data=st.data(),
        what=st.sampled_from(["lease", "report", "deliver", "leave", "take", "commit", "recover", "fail"]),
    )
    def crashes_before_it_stored(self, data: st.DataObject, what: str) -> None:
        """What was changed in memory and not stored never happened."""
        intact = copy.deepcopy(self.replay)
        match what:
            case "lease":
                self.replay.leases.grant("a", self.now, "lost")
            case "report" if self.playing:
                self.replay.leases.progress("a", {self.some(data, self.playing): {0: 10**6}}, self.now)
            case "deliver" if self.playing:
                episode = self.some(data, self.playing)
                tokens = dict(self.world.episodes[episode].tokens)
                self.replay.leases.deliver(episode, FINISHED, tokens, tokens, 0.0)
            case "leave":
                self.replay.leases.release("a", "worker_lost")
            case "take":
                self.replay.take(self.world.version)
            case "commit" if self.world.inside("batched"):
                self.replay.commit(self.world.version)
            case "fail":
                self.replay.step_failed(self.world.version)
                self.replay.set_aside(self.world.version, self.world.inside("batched")[:1])
            case "recover":
                self.replay.recover(max(v for v in self.alive if v >= self.world.checkpointed))
        self.replay = intact
        self.restarts()

    @rule()
    def a_batch_always_comes(self) -> None:
        """From wherever the run is, playing everything that is leased and granted a few times fills a batch."""
        for _ in range(4):
            self.serves(behind=0)
            if self.take() is not None:
                return
            while self.grant(WORKERS[0]) is not None:
                pass
            for episode in sorted(self.playing):
                self.sample_into(episode, 1)
                self.deliver(episode, FINISHED)
        raise AssertionError("no batch although everything that was leased was delivered")

    @invariant()
    def the_buffer_says_what_happened(self) -> None:
        if not hasattr(self, "replay"):
            return
        world, replay = self.world, self.replay
        expected = world.ledger()
        assert counts_of(replay.table.ledgers.by_version) == expected
        assert replay.table.ledgers.gap() == ""
        assert counts_of(ledgers_by_version(self.path)) == expected
        assert (replay.version, replay.served) == (world.version, world.served)
        assert (replay.table.counters.refilled, replay.table.counters.unusable) == (world.refilled, world.unusable)
        assert replay.leases.outstanding() == world.outstanding()
        for group in replay.table.groups.values():
            assert without_deadline(group) == without_deadline(self.stored[group.id]), "a change was not drained"
        rows = self.db.execute("SELECT id, env, task, state, attempt, trained_at FROM groups ORDER BY id").fetchall()
        assert rows == [
            (i, team.env, team.task, team.state, team.attempt, team.made)
            for i, team in world.teams.items()
            if i not in self.archived
        ]
        query = "SELECT id, CASE account WHEN 'discarded' THEN reason ELSE account END, settled, final, withheld FROM episodes"
        assert sorted(self.db.execute(query)) == sorted(
            (name, self.account(e), e.settled, e.final, e.withheld)
            for name, e in world.episodes.items()
            if e.group not in self.archived
        )
        assert self.db.execute(TOO_OLD).fetchone() == (0,)
        kept = [(e.group, e.member) for e in world.episodes.values() if e.where == "ready"]
        assert len(kept) == len(set(kept)), "a member was kept twice"

    def account(self, e: replay_model.Played) -> str:
        return "trained" if e.where == "ready" and self.world.teams[e.group].made is not None else e.where


TestRuns = Runs.TestCase
TestRuns.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
