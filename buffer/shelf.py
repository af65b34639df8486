"""Groups in memory, and the books that follow every change of their episodes.

Invariants:
- An episode is changed within `_moving` only: its tokens leave their accounts before and are put where they belong after.
- Every changed group is in `drain()` until the caller has stored it.
- `groups` is in the order of the groups' ids.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from ..errors import StateError
from .group import Episode, Group
from .ledger import Books, Counts


class Shelf:
    """`groups` by id, and `books` that hold their tokens and those of groups that are no longer here."""

    def __init__(self, groups: Iterable[Group], books: Books | None) -> None:
        self.groups: dict[int, Group] = {g.id: g for g in groups}
        self.books = books or Books()
        self._changed: set[int] = set()

    def drain(self) -> list[Group]:
        """The groups changed since the last call, to be stored."""
        changed = [self.groups[i] for i in sorted(self._changed)]
        self._changed.clear()
        return changed

    def _find(self, episode_id: str, next_group: int) -> tuple[Group, Episode] | None:
        """The group and episode of an id; None when the group is over and forgotten. `next_group` was never leased yet."""
        number = episode_id.split(".", 1)[0]
        group_id = int(number) if number.isdecimal() and len(number) < 20 else -1
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
        self._changed.add(group.id)

    def _count(self, group: Group, episode: Episode, generated: Counts) -> None:
        self.books.generated({v: n - episode.generated.get(v, 0) for v, n in generated.items()})
        with self._moving(group, episode):
            episode.generated = dict(generated)

    def _discard(self, group: Group, episode: Episode, reason: str) -> None:
        with self._moving(group, episode):
            episode.account, episode.reason = "discarded", reason

    def _discard_group(self, group: Group, reason: str) -> None:
        for episode in (*group.in_account("in_flight"), *group.in_account("ready")):
            self._discard(group, episode, reason)
        group.state = "discarded"
        self._changed.add(group.id)
