"""Groups in memory, and the books that follow every change of their episodes.

Invariants:
- An episode is changed within `_moving` only: its tokens leave their accounts before and are put where they belong after.
- A group changes its state in `_put` only, which keeps groups by state and counts them by environment: what is asked at every
  message takes no walk over all groups.
- Every changed group, and of it every changed episode, is in `drain()` until the caller has stored it.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import get_args

from ..errors import StateError
from .group import Changed, Episode, Group, GroupState
from .ledger import Books, Counts


class Shelf:
    """`groups` by id, and `books` that hold their tokens and those of groups that are no longer here."""

    def __init__(self, groups: Iterable[Group], books: Books | None) -> None:
        self.groups: dict[int, Group] = {}
        self.books = books or Books()
        self._by_state: dict[GroupState, dict[int, Group]] = {state: {} for state in get_args(GroupState)}
        self._numbers: Counter[tuple[GroupState, int]] = Counter()
        self._made: dict[int, dict[int, Group]] = {}
        self._wishes: dict[str, Group] = {}
        self._changed: dict[int, set[str]] = {}
        for group in groups:
            self._enter(group)

    def drain(self) -> Sequence[Changed]:
        """What changed since the last call, to be stored, by group."""
        changed = [
            (group, [group.episodes[episode_id] for episode_id in sorted(self._changed[group.id])])
            for group in (self.groups[i] for i in sorted(self._changed))
        ]
        self._changed.clear()
        return changed

    def of(self, *states: GroupState) -> list[Group]:
        """The groups in these states, the oldest first."""
        found = {i: group for state in states for i, group in self._by_state[state].items()}
        return [found[i] for i in sorted(found)]

    def number(self, state: GroupState, env: int) -> int:
        """How many groups of an environment are in `state`."""
        return self._numbers[state, env]

    def made(self, above: int = -1, up_to: float = math.inf) -> list[Group]:
        """The groups that were trained on to make the versions above `above` and up to `up_to`."""
        return [g for version, groups in self._made.items() if above < version <= up_to for g in groups.values()]

    def group_of(self, episode_id: str) -> Group | None:
        """The group that an id names; None when it is not here."""
        return self.groups.get(_group_id(episode_id))

    def _enter(self, group: Group) -> None:
        self.groups[group.id] = group
        self._index(group)

    def _leave(self, group: Group) -> None:
        del self.groups[group.id]
        self._unindex(group)

    def _put(self, group: Group, state: GroupState, trained_at: int | None = None) -> None:
        """Change the state of a group; `trained_at` is the version that was made from it."""
        self._unindex(group)
        group.state, group.trained_at = state, trained_at
        self._index(group)
        self._mark(group)

    def _index(self, group: Group) -> None:
        self._by_state[group.state][group.id] = group
        self._numbers[group.state, group.env] += 1
        if group.trained_at is not None:
            self._made.setdefault(group.trained_at, {})[group.id] = group
        if group.state == "leased":
            self._wishes[group.wish] = group

    def _unindex(self, group: Group) -> None:
        del self._by_state[group.state][group.id]
        self._numbers[group.state, group.env] -= 1
        if group.trained_at is not None:
            del self._made[group.trained_at][group.id]
            if not self._made[group.trained_at]:
                del self._made[group.trained_at]
        if group.state == "leased":
            self._wishes.pop(group.wish, None)

    def _mark(self, group: Group, *episodes: Episode) -> None:
        """To be stored: the group's own row, and those of `episodes`."""
        self._changed.setdefault(group.id, set()).update(e.id for e in episodes)

    def _find(self, episode_id: str, next_group: int) -> tuple[Group, Episode] | None:
        """The group and episode of an id; None when the group is over and forgotten. `next_group` was never leased yet."""
        group_id = _group_id(episode_id)
        group = self.groups.get(group_id)
        if group is not None and episode_id in group.episodes:
            return group, group.episodes[episode_id]
        if group is None and 0 <= group_id < next_group:
            return None
        raise StateError(f"episode {episode_id!r} was never leased")

    @contextlib.contextmanager
    def _moving(self, group: Group, episode: Episode) -> Iterator[None]:
        """Change an episode in this block; the books follow."""
        for account, counts in episode.placed():
            self.books.add(account, counts, -1)
        yield
        for account, counts in episode.placed():
            self.books.add(account, counts)
        self._mark(group, episode)

    def _count(self, group: Group, episode: Episode, generated: Counts) -> None:
        self.books.generated({v: n - episode.generated.get(v, 0) for v, n in generated.items()})
        with self._moving(group, episode):
            episode.generated = dict(generated)

    def _discard(self, group: Group, episode: Episode, reason: str) -> None:
        with self._moving(group, episode):
            episode.account, episode.reason, episode.reward = "discarded", reason, None

    def _discard_group(self, group: Group, reason: str) -> None:
        for episode in (*group.in_account("in_flight"), *group.in_account("ready")):
            self._discard(group, episode, reason)
        self._put(group, "discarded")


def _group_id(episode_id: str) -> int:
    """-1 where it cannot be the id of an episode."""
    number = episode_id.partition(".")[0]
    return int(number) if number.isdecimal() and len(number) < 20 else -1
