"""What a buffer must say about a run, worked out anew at every question from what happened; for tests of the state machine.

Invariants:
- Nothing of the package's state machine, books or SQL is used: an episode knows its tokens, accounts are sums over episodes.
- A method is told what happened outside of the buffer, and answers what the buffer must have said.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from fractions import Fraction


@dataclass
class Rules:
    staleness: int
    per_batch: int
    group_size: int
    min_members: int
    policy: str
    shares: tuple[int, ...]
    retries: dict[str, int]
    dynamic: bool
    filter: str = "none"
    greedy: bool = False


@dataclass
class Played:
    """An episode: `tokens` were sampled by version, of these the buffer was told `told`."""

    group: int
    attempt: int
    member: int
    worker: str
    tokens: Counter[int] = field(default_factory=Counter)
    reported: Counter[int] = field(default_factory=Counter)
    kept: Counter[int] = field(default_factory=Counter)
    where: str = "in_flight"  # or "ready", or why it was discarded
    settled: bool = False
    final: bool = False
    withheld: str | None = None
    reward: float = 0.0
    truncated: bool = False


@dataclass
class Team:
    """A group. `lease` is (worker, end) while its members may be played."""

    env: int
    task: int
    leased_at: int = 0
    attempt: int = 0
    lease: tuple[str, float] | None = None
    complete: bool = False
    batched: bool = False
    made: int | None = None
    over: bool = False
    bound: int = 0  # that its batch was taken under
    failed_at: int | None = None  # the start of the learner at which a step on its batch failed first

    @property
    def state(self) -> str:
        if self.over:
            return "discarded"
        if self.made is not None:
            return "trained"
        if self.complete:
            return "batched" if self.batched else "ready"
        return "leased" if self.lease else "open"


class Model:
    """The expected buffer."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.version = 0
        self.served: int | None = None
        self.checkpointed = 0
        self.recovered_from: int | None = None
        self.refilled = 0
        self.starts = 0  # of the learner
        self.unusable = 0
        self.taken_under = (0, 0)
        self.teams: dict[int, Team] = {}
        self.episodes: dict[str, Played] = {}

    # --- questions ------------------------------------------------------------------------------------------------

    def of(self, group: int) -> list[Played]:
        return [e for e in self.episodes.values() if e.group == group]

    def inside(self, *states: str) -> list[int]:
        return sorted(i for i, team in self.teams.items() if team.state in states)

    @property
    def oldest(self) -> int:
        return max(0, self.version - self.rules.staleness)

    def share_out(self, given: list[int], groups: int) -> list[int]:
        """`groups` more, each to the environment below its share whose next one is due first."""
        counts, parts = list(given), [Fraction(share, sum(self.rules.shares)) for share in self.rules.shares]
        for _ in range(groups):
            below = [
                (Fraction(n + 1) / p, env)
                for env, (p, n) in enumerate(zip(parts, counts, strict=True))
                if p * (sum(counts) + 1) > n
            ]
            counts[min(below)[1]] += 1
        return [n - before for n, before in zip(counts, given, strict=True)]

    def per_env(self, groups: list[int]) -> list[int]:
        return [sum(self.teams[g].env == env for g in groups) for env in range(len(self.rules.shares))]

    def outstanding(self) -> list[int]:
        served = -1 if self.served is None else self.served
        trained = [g for g in self.inside("trained") if (self.teams[g].made or 0) > served]
        return self.per_env(self.inside("open", "leased", "ready", "batched") + trained)

    def free(self) -> list[Fraction]:
        """Which part of its budget each environment has left."""
        served = -1 if self.served is None else self.served
        settled = self.per_env([g for g in self.inside("trained") if (self.teams[g].made or 0) <= served])
        budgets = self.share_out(settled, (self.rules.staleness + 1) * self.rules.per_batch)
        return [Fraction(b - n, b) if b else Fraction(0) for b, n in zip(budgets, self.outstanding(), strict=True)]

    def ledger(self) -> dict[int, Counter[str]]:
        """Version -> account, `generated` among them -> tokens, none of them 0."""
        books: dict[int, Counter[str]] = defaultdict(Counter)
        for e in self.episodes.values():
            team = self.teams[e.group]
            for version, tokens in e.reported.items():
                books[version]["generated"] += tokens
                kept = e.kept[version] if e.where == "ready" else 0
                books[version]["unused" if e.where == "ready" else e.where] += tokens - kept
                if team.made is None:
                    books[version]["ready"] += kept
                else:
                    young = version >= team.made - 1 - team.bound
                    books[version][
                        f"withheld_{e.withheld}" if e.withheld else "trained" if young else "withheld_stale"
                    ] += kept
        return {version: +counts for version, counts in books.items() if +counts}

    # --- workers --------------------------------------------------------------------------------------------------

    def next_lease(self) -> tuple[int, int] | None:
        """Group and environment of the next lease; None when there must be none."""
        if self.served is None or self.served < self.oldest:
            return None
        waiting = self.inside("open")
        if waiting:
            return waiting[0], self.teams[waiting[0]].env
        free = self.free()
        return None if max(free) <= 0 else (len(self.teams), free.index(max(free)))

    def leased(self, group: int, env: int, worker: str, end: float) -> list[str]:
        """A worker was granted a group; returns the episodes that it plays."""
        assert self.served is not None
        tasks = sum(team.env == env for team in self.teams.values())
        team = self.teams.setdefault(group, Team(env, tasks))
        team.leased_at, team.lease = self.served, (worker, end)
        final = {e.member for e in self.of(group) if e.final}
        new = [Played(group, team.attempt, m, worker) for m in range(self.rules.group_size) if m not in final]
        ids = [f"{group}.{team.attempt}.{e.member}" for e in new]
        self.episodes.update(zip(ids, new, strict=True))
        return ids

    def reported(self, worker: str, episodes: list[str], end: float) -> list[str]:
        """A worker told of all that it sampled; returns the episodes to cancel."""
        for name in episodes:
            e, team = self.episodes[name], self.teams[self.episodes[name].group]
            if not e.settled:
                e.reported = Counter(e.tokens)
            if e.where == "in_flight" and e.worker == worker:
                team.lease = worker, end
        return [name for name in episodes if self.episodes[name].settled or self.episodes[name].where != "in_flight"]

    def delivered(self, name: str, kept: Counter[int], failure: str, reward: float, *, truncated: bool = False) -> bool:
        """An episode ended, with a failure or "", or cut off; returns whether its trajectories are kept."""
        e = self.episodes[name]
        if e.settled:
            return False
        team, e.reported, e.settled = self.teams[e.group], Counter(e.tokens), True
        if e.where != "in_flight":
            return False
        earlier = sum(o.where == f"failed_{failure}" for o in self.of(e.group) if o.member == e.member and o.settled)
        again = bool(failure) and team.state == "leased" and earlier < self.rules.retries.get(failure, 0)
        e.final = not again
        if kept.total() and not again:
            e.where, e.kept, e.reward, e.truncated = "ready", kept, reward, truncated
            e.withheld = "baseline" if self.greedy(e) else "late" if team.complete else None
        else:
            e.where = f"failed_{failure or 'nothing_sampled'}"
        if not team.complete:
            self._look_at(e.group)
        return e.where == "ready"

    def _look_at(self, group: int) -> None:
        team, episodes = self.teams[group], self.of(group)
        rewards = [e.reward for e in episodes if e.where == "ready"]
        teaches = not self.rules.dynamic or any(reward != rewards[0] for reward in rewards)
        greedy = [e for e in episodes if self.greedy(e) and e.final]
        if any(e.where != "ready" for e in greedy):
            self._drop(group, "no_baseline")
        elif sum(e.final for e in episodes) == self.rules.group_size:
            team.complete = len(rewards) >= 2 and teaches
            if not team.complete:
                self._drop(group, "too_few_members" if len(rewards) < 2 else "equal_rewards")
                self.refilled += len(rewards) >= 2
        elif len(rewards) >= self.rules.min_members and teaches and (greedy or not self.rules.greedy):
            team.complete = True
        elif not any(e.where == "in_flight" for e in episodes):
            team.lease, team.attempt = None, team.attempt + 1

        if team.complete:
            self._filter(group)

    def greedy(self, e: Played) -> bool:
        return self.rules.greedy and e.member == 0

    def _filter(self, group: int) -> None:
        """Only some of those that are there are trained on."""
        sampled = sorted(
            (e for e in self.of(group) if e.where == "ready" and not self.greedy(e)), key=lambda e: e.member
        )
        best = max(sampled, key=lambda e: e.reward)
        others = [e for e in sampled if e is not best]
        match self.rules.filter:
            case "none":
                chosen = sampled
            case "untruncated":
                chosen = [e for e in sampled if not e.truncated]
            case "best_random" if others:
                others.sort(key=lambda e: -e.reward)
                chosen = [best, others[random.Random(group).randrange(len(others))]]
            case "best_worst" if others:
                chosen = [best, min(others[::-1], key=lambda e: e.reward)]
            case _:
                chosen = [best]
        for e in sampled:
            e.withheld = None if e in chosen else "filtered"

    def _drop(self, group: int, reason: str) -> None:
        self.teams[group].over = True
        for e in self.of(group):
            if e.where in ("in_flight", "ready"):
                e.where = reason

    def _lose(self, group: int, reason: str) -> None:
        for e in self.of(group):
            if e.where == "in_flight":
                e.where = reason
        team = self.teams[group]
        if team.state == "leased":
            team.attempt += 1
        team.lease = None

    def left(self, worker: str, reason: str) -> None:
        """A worker's process is gone."""
        for group in self.teams:
            if any(e.where == "in_flight" and e.worker == worker for e in self.of(group)):
                self._lose(group, reason)
        for e in self.episodes.values():
            e.settled = e.settled or e.worker == worker

    def expired(self, now: float) -> list[int]:
        """Time passed; returns the groups whose leases ended."""
        lost = [
            g
            for g in self.inside("leased", "ready")
            if any(e.where == "in_flight" for e in self.of(g)) and (self.teams[g].lease or ("", 0.0))[1] < now
        ]
        for group in lost:
            self._lose(group, "worker_lost")
        return lost

    # --- learner --------------------------------------------------------------------------------------------------

    def taken(self) -> list[int] | None:
        """The learner asked for a batch; returns its groups."""
        if batch := self.inside("batched"):
            return batch
        for group in self.inside("ready"):
            kept = [e.kept for e in self.of(group) if e.where == "ready" and not e.withheld]
            ages = Counter(v >= self.oldest for tokens in kept for v in tokens.elements())
            if not ages[True] or (self.rules.policy == "drop" and ages[False]):
                self._drop(group, "stale")
        under_way = self.inside("open", "leased")
        if self.rules.policy == "drop":
            for group in under_way:
                if self.teams[group].leased_at < self.oldest:
                    self._drop(group, "stale")
        waits = [g for g in under_way if self.teams[g].leased_at <= self.version - self.rules.staleness]
        if self.rules.policy == "wait" and waits:
            return None
        quotas = self.share_out(self.per_env(self.inside("trained")), self.rules.per_batch)
        chosen = []
        for env, quota in enumerate(quotas):
            mine = [g for g in self.inside("ready") if self.teams[g].env == env]
            if len(mine) < quota:
                return None
            chosen += mine[:quota]
        for group in chosen:
            self.teams[group].batched = True
            self.teams[group].bound = self.rules.staleness
            self.taken_under = self.rules.staleness, self.rules.per_batch
            for e in self.of(group):
                if e.where == "in_flight":
                    e.where = "straggler"
        return sorted(chosen)

    def changed(self, staleness: int, per_batch: int, min_members: int, policy: str) -> int:
        """The user changes the rules; returns the version at which the next batch is taken."""
        self.rules = replace(
            self.rules, staleness=staleness, per_batch=per_batch, min_members=min_members, policy=policy
        )
        for group in self.inside("leased"):
            self._look_at(group)
        return self.version + bool(self.inside("batched"))

    def committed(self) -> None:
        self.version += 1
        for group in self.inside("batched"):
            self.teams[group].made = self.version
            self.teams[group].failed_at = None
        self.recovered_from = None

    def step_failed(self) -> list[int]:
        """A rank failed to step on the batch; returns the groups that are set aside."""
        batch = self.inside("batched")
        again = [g for g in batch if (failed := self.teams[g].failed_at) is not None and failed < self.starts]
        if again:
            return self.set_aside(again)
        for group in batch:
            if self.teams[group].failed_at is None:
                self.teams[group].failed_at = self.starts
        return []

    def set_aside(self, groups: list[int]) -> list[int]:
        """Groups of the batch, or that are ready, cannot be trained on."""
        if batch := self.inside("batched"):
            self.unusable += 1
        for group in batch:
            self.teams[group].batched = False
        for group in groups:
            self._drop(group, "unusable")
        return sorted(groups)

    def recovered(self, kept: int) -> int:
        """A learner starts from the weights of version `kept`; returns the version that they are published under."""
        self.starts += 1
        for team in self.teams.values():
            team.batched = False
            if team.made is not None and team.made > kept:
                team.made = None
        if kept not in (self.version, self.recovered_from):
            self.version, self.recovered_from = self.version + 1, kept
        return self.version
