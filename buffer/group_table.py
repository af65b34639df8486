"""Task groups and their episodes in memory, the ledger that follows every change of an episode, and the counters of the replay.

Invariants:
- An episode changes only within `GroupTable.update`, which takes its tokens out of their accounts before and adds them after.
  `Episode.accounts` alone decides which accounts these are.
- A trajectory holds only tokens that were generated: `kept` never exceeds `generated`, version by version.
- A group changes state only in `set_state`, which indexes groups by state and counts them by environment, so that no request walks
  over all groups.
- Every changed group and episode is in `drain()` once, for the caller to store.
- A group leaves memory only when it is stored, no recovery needs it, and no report about it changes anything.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, get_args

import msgspec

from ..errors import StateError
from .admission import ReplayCounters
from .ledger import STALE, WITHHELD, Counts, VersionLedgers, Withheld
from .trajectory import Outcome

GroupState = Literal["open", "leased", "ready", "batched", "trained", "discarded"]
EpisodeAccount = Literal["in_flight", "ready", "trained", "discarded"]
# Discard reason of tokens that were generated for an episode and are in none of its trajectories: of a completion that
# was cut off, or that the agent did not wait for.
UNUSED = "unused"


class Episode(msgspec.Struct):
    """One attempt at one member of a group."""

    id: str  # `group.attempt.member`
    worker: str = ""  # the worker that runs it
    account: EpisodeAccount = "in_flight"  # where its tokens are; `trained` includes tokens withheld from the loss
    generated: Counts = {}  # tokens sampled so far by version, as the worker reports them
    kept: Counts = {}  # sampled tokens in the delivered trajectories, by version
    settled: bool = False  # its end was delivered, or its worker process is gone: later reports about it change nothing
    final: bool = False  # its member needs no other attempt: it was kept, or failed with no retry left
    # Why none of its tokens carries loss; its reward still counts in its group. None where they may carry loss.
    withheld: Withheld | None = None
    loss_from: int | None = None  # once trained, the oldest version whose tokens carried loss; None where none did
    reason: str = ""  # why it was discarded
    outcome: Outcome | None = None  # how it ended
    reward: float | None = None  # its return, while its trajectories are kept
    delivered_time: float | None = None  # when its end was delivered, in `GroupTable.time`
    member: int = -1  # of its id

    def __post_init__(self) -> None:
        self.member = int(self.id.rpartition(".")[2])

    def fresh(self, oldest: int) -> int:
        """Kept tokens of `oldest` and later versions."""
        return sum(n for v, n in self.kept.items() if v >= oldest)

    def accounts(self) -> Iterator[tuple[str, Counts]]:
        """(account or discard reason, tokens by version); every generated token once."""
        match self.account:
            case "in_flight":
                yield "in_flight", self.generated
            case "discarded":
                yield self.reason, self.generated
            case _:
                if self.generated != self.kept:
                    yield (
                        UNUSED,
                        {v: n - self.kept.get(v, 0) for v, n in self.generated.items() if n > self.kept.get(v, 0)},
                    )
                if self.account == "ready":
                    yield "ready", self.kept
                else:
                    yield "trained", {v: n for v, n in self.kept.items() if self._carried_loss(v)}
                    account = WITHHELD + (self.withheld or STALE)
                    yield account, {v: n for v, n in self.kept.items() if not self._carried_loss(v)}

    def _carried_loss(self, version: int) -> bool:
        return self.loss_from is not None and version >= self.loss_from


class Group(msgspec.Struct):
    """The episodes of one task."""

    id: int  # in the order in which groups were first leased
    env: int = 0  # index of the run's environment
    task: int = 0  # index of its task there
    state: GroupState = "open"
    attempt: int = 0  # how often it was leased before
    request: str = ""  # the lease request that the lease answered
    leased_at: int = 0  # policy version that the engines served then
    deadline: float = 0.0  # when the lease ends, in the caller's clock
    trained_at: int | None = None  # the version that was made from it
    # In `GroupTable.time`: its last lease, when it became complete, and when it was last taken into a batch; None before that.
    leased_time: float | None = None
    ready_time: float | None = None
    taken_time: float | None = None
    episodes: dict[str, Episode] = {}

    def in_account(self, account: EpisodeAccount) -> list[Episode]:
        return [e for e in self.episodes.values() if e.account == account]

    @property
    def final_members(self) -> set[int]:
        """Members that need no other attempt."""
        return {e.member for e in self.episodes.values() if e.final}

    @property
    def running(self) -> bool:
        """Whether a worker still runs an episode whose result is wanted."""
        return any(e.account == "in_flight" for e in self.episodes.values())

    def failures(self, member: int, reason: str) -> int:
        """How many attempts at `member` failed for this discard reason."""
        return sum(e.member == member and e.reason == reason and e.settled for e in self.episodes.values())


Changed = tuple[Group, Sequence[Episode]]  # a group, and those of its episodes whose rows are out of date


class GroupTable:
    """All groups that can still change.

    Attributes:
        groups: by id.
        ledgers: hold the tokens of these groups and of those that are no longer in memory.
        counters: the numbers that `Replay` and `LeaseManager` go by and change. Who keeps them copies them.
        newly_ready: ids of the groups that became ready since the owner emptied it.
        time: when the next changes happen, in seconds since the epoch; set by the owner. It is recorded and decides nothing.
    """

    def __init__(
        self,
        groups: Iterable[Group] = (),
        ledgers: VersionLedgers | None = None,
        counters: ReplayCounters | None = None,
    ) -> None:
        self.groups: dict[int, Group] = {}
        self.ledgers = ledgers or VersionLedgers()
        self.counters = counters or ReplayCounters()
        self.newly_ready: set[int] = set()
        self.time = 0.0
        self._by_state: dict[GroupState, dict[int, Group]] = {state: {} for state in get_args(GroupState)}
        self._by_version: dict[int, dict[int, Group]] = {}
        self._by_request: dict[str, Group] = {}
        self._counts: Counter[tuple[GroupState, int]] = Counter()
        self._changed: dict[int, set[str]] = {}
        for group in groups:
            self.add(group)

    # --- queries --------------------------------------------------------------------------------------------------

    def in_state(self, *states: GroupState) -> list[Group]:
        """The groups in these states, the oldest first."""
        found = {i: group for state in states for i, group in self._by_state[state].items()}
        return [found[i] for i in sorted(found)]

    def count(self, state: GroupState, env: int) -> int:
        """How many groups of an environment are in `state`."""
        return self._counts[state, env]

    def sizes(self) -> dict[GroupState, int]:
        """How many groups are in each state, of all environments. From any thread."""
        return {state: len(groups) for state, groups in self._by_state.items()}

    def trained_in(self, above: int = -1, up_to: float = math.inf) -> list[Group]:
        """The groups whose training made the versions above `above` and up to `up_to`."""
        return [g for version, groups in self._by_version.items() if above < version <= up_to for g in groups.values()]

    def leased_for(self, request: str) -> Group | None:
        """The leased group that answered a lease request."""
        return self._by_request.get(request)

    def group_of(self, episode_id: str) -> Group | None:
        """The group that an episode id names; None when it is not in memory."""
        return self.groups.get(group_number(episode_id))

    def find(self, episode_id: str) -> tuple[Group, Episode] | None:
        """The group and episode of an id; None when the group is settled and no longer in memory.

        Raises:
            StateError: it was never leased, or it is of another shard.
        """
        group_id, next_group = group_number(episode_id), self.counters.next_group
        if group_id >= 0 and (group_id - next_group) % self.counters.shards:  # a shard's numbers are `shards` apart
            raise StateError(f"episode {episode_id!r} is of another shard of the buffer")
        group = self.groups.get(group_id)
        if group is not None and episode_id in group.episodes:
            return group, group.episodes[episode_id]
        if group is None and 0 <= group_id < next_group:
            return None
        raise StateError(f"episode {episode_id!r} was never leased")

    # --- changes --------------------------------------------------------------------------------------------------

    def drain(self) -> list[Changed]:
        """What changed since the last call, by group."""
        changed: list[Changed] = [
            (self.groups[i], [self.groups[i].episodes[e] for e in sorted(self._changed[i])])
            for i in sorted(self._changed)
        ]
        self._changed.clear()
        return changed

    def prune(self) -> None:
        """Drop from memory the settled groups that no recovery can need."""
        suspects = self.counters.suspects
        for group_id in [i for i in suspects if i not in self.groups or self.groups[i].state == "discarded"]:
            del suspects[group_id]
        for group in (*self.in_state("discarded"), *self.trained_in(up_to=self.counters.settled)):
            if group.id not in self._changed and all(e.settled for e in group.episodes.values()):
                del self.groups[group.id]
                self._unindex(group)

    def add(self, group: Group) -> None:
        self.groups[group.id] = group
        self._index(group)

    def set_state(self, group: Group, state: GroupState, trained_at: int | None = None) -> None:
        """Change the state of a group; `trained_at` is the version that was made from it."""
        self._unindex(group)
        match group.state, state:
            case _, "leased":
                group.leased_time = self.time
            case "leased", "ready":
                group.ready_time = self.time
            case _, "batched":
                group.taken_time = self.time
            case _:
                pass
        group.state, group.trained_at = state, trained_at
        self._index(group)
        self.mark_changed(group)
        if state == "ready":
            self.newly_ready.add(group.id)

    def mark_changed(self, group: Group, *episodes: Episode) -> None:
        """The rows of the group and of `episodes` are out of date."""
        self._changed.setdefault(group.id, set()).update(e.id for e in episodes)

    @contextlib.contextmanager
    def update(self, group: Group, *episodes: Episode) -> Iterator[None]:
        """Change episodes of a group in this block; the ledger follows."""
        for episode in episodes:
            for account, counts in episode.accounts():
                self.ledgers.add(account, counts, -1)
        yield
        for episode in episodes:
            for account, counts in episode.accounts():
                self.ledgers.add(account, counts)
        self.mark_changed(group, *episodes)

    def set_generated(self, episode: Episode, generated: Counts) -> None:
        """Within `update`: the worker's running totals are now `generated`."""
        self.ledgers.add_generated({v: n - episode.generated.get(v, 0) for v, n in generated.items()})
        episode.generated = dict(generated)

    def discard(self, group: Group, episode: Episode, reason: str) -> None:
        with self.update(group, episode):
            episode.account, episode.reason, episode.reward = "discarded", reason, None

    def discard_group(self, group: Group, reason: str) -> None:
        for episode in (*group.in_account("in_flight"), *group.in_account("ready")):
            self.discard(group, episode, reason)
        self.set_state(group, "discarded")

    def _index(self, group: Group) -> None:
        self._by_state[group.state][group.id] = group
        self._counts[group.state, group.env] += 1
        if group.trained_at is not None:
            self._by_version.setdefault(group.trained_at, {})[group.id] = group
        if group.state == "leased":
            self._by_request[group.request] = group

    def _unindex(self, group: Group) -> None:
        del self._by_state[group.state][group.id]
        self._counts[group.state, group.env] -= 1
        if group.trained_at is not None:
            del self._by_version[group.trained_at][group.id]
            if not self._by_version[group.trained_at]:
                del self._by_version[group.trained_at]
        if group.state == "leased":
            self._by_request.pop(group.request, None)


def group_number(episode_id: str) -> int:
    """The group of an episode or a trajectory by its id; -1 for text that is no id."""
    number = episode_id.partition(".")[0]
    return int(number) if number.isdecimal() and len(number) < 20 else -1
