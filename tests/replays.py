"""A replay machine and what is done to it, in a word each, for tests of its transitions."""

from __future__ import annotations

from slipstream.buffer.admission import Admission, Filter, OnDeadline, ReplayConfig, ReplayCounters
from slipstream.buffer.messages import Lease
from slipstream.buffer.replay import Replay
from slipstream.buffer.trajectory import FINISHED, Outcome

LEASE_S = 10.0


def failed(reason: str) -> Outcome:
    return Outcome("failed", reason)


def replay_of(
    staleness: int = 1,
    per_batch: int = 1,
    group_size: int = 2,
    policy: OnDeadline = "withhold",
    *,
    min_members: int | None = None,
    shares: tuple[float, ...] = (1.0,),
    retries: dict[str, int] | None = None,
    clock: ReplayCounters | None = None,
    dynamic_sampling: bool = False,
    filter: Filter = "none",
    greedy: bool = False,
) -> Replay:
    least = min_members or group_size
    rules = ReplayConfig(group_size, least, policy, LEASE_S, retries or {}, dynamic_sampling, filter, greedy)
    replay = Replay(Admission(staleness, per_batch, shares), rules, clock)
    replay.mark_served(replay.version)
    return replay


def lease_of(replay: Replay, worker: str = "a", now: float = 0.0, lease_request: str = "") -> Lease:
    lease = replay.leases.grant(worker, now, lease_request)
    assert lease is not None
    return lease


def play(replay: Replay, lease: Lease, versions: dict[int, int] | None = None) -> list[bool]:
    tokens = versions or {lease.version: 3}
    return [replay.leases.deliver(lease.episode(member), FINISHED, tokens, tokens) for member in lease.members]


def fail(replay: Replay, episode: str, reason: str = "tool", tokens: int = 0) -> bool:
    return replay.leases.deliver(episode, failed(reason), {0: tokens} if tokens else {}, {})


def step(replay: Replay) -> None:
    """One learner step that finds a batch, without serving it."""
    assert replay.take(replay.version) is not None
    replay.commit(replay.version)


def state(replay: Replay, group: int = 0) -> str:
    return replay.table.groups[group].state
