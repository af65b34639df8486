"""The sample of a run in an exported page of the dashboard: some trajectories and batches, and the answers about them.

    versions, evenly over the run ──> of each some groups, those first with annotations and whose rewards differ ──> their members

Invariants:
- All that is sampled has at most `SAMPLE_BYTES` of JSON. Versions take turns, so that none is missing where that is too little.
- A member is listed only with everything that its view asks for.
- After the deadline nothing is added; what was read until then is a smaller sample.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from ..monitor.annotations import read_annotations
from .index import TrajectoryQuery
from .runs import WatchedRun
from .texts import ShownMessage
from .trajectory import WINDOW

SAMPLE_BYTES = 4 << 20
VERSIONS = 8  # whose batches are sampled
GROUPS = 3  # of each
CANDIDATES = 16  # groups of which these are chosen
MEMBERS = 16  # of a group
BINS = 400  # columns of the strip over a trajectory
TOKENS = 2 * WINDOW  # of a trajectory, from its beginning
TEXT = 64_000  # characters of a conversation

BATCHES = "SELECT DISTINCT trained_at FROM groups WHERE trained_at IS NOT NULL ORDER BY 1"
GROUPS_OF = (
    "SELECT g.id, min(t.id) FROM groups g JOIN episodes e ON e.group_id = g.id JOIN trajectories t ON t.episode_id = e.id"
    " WHERE g.trained_at = ? GROUP BY g.id ORDER BY min(t.reward) = max(t.reward), g.id LIMIT ?"
)


class RunSample:
    """Of `run`, taken until `until` on the monotonic clock. `answers` are JSON by the path that the page asks."""

    def __init__(self, run: WatchedRun, until: float) -> None:
        self._run, self._until = run, until
        self._left = SAMPLE_BYTES
        self.answers: dict[str, msgspec.Raw] = {}
        self.rows: list[dict[str, Any]] = []  # of the list of trajectories
        self._batches: dict[int, dict[str, Any]] = {}
        self._groups: dict[int, dict[str, Any]] = {}

    def take(self) -> None:
        """Once. Raises StoreError."""
        for version, groups in self._choose_batches() if self._run.store.exists else ():
            if version is not None and version not in self._batches:
                batch = self._run.timeline.batch(version)
                if self._take_room(batch):
                    self._batches[version] = batch
            for group in groups:
                self._add_group(group)
        for path, found in (("batches", self._batches), ("groups", self._groups)):
            neighbors = sorted(found)
            for before, one, after in zip([None, *neighbors], neighbors, [*neighbors[1:], None], strict=False):
                answer = found[one] | {"previous": before, "next": after}
                self.answers[f"{path}/{one}"] = msgspec.Raw(msgspec.json.encode(answer))

    def _choose_batches(self) -> Iterator[tuple[int | None, list[int]]]:
        """(version, groups of its batch), the versions by turns; without a batch the newest groups."""
        with self._run.store.open() as db:
            versions = [version for (version,) in db.all(BATCHES)]
            chosen = [versions[at] for at in _evenly(len(versions), VERSIONS)]
            found = {version: db.all(GROUPS_OF, version, CANDIDATES) for version in chosen}
            newest = [] if versions else list(dict.fromkeys(db.newest("group_id", GROUPS * MEMBERS)))
        yield from ((None, [id]) for id in newest)
        groups = {version: self._annotated_first(version, rows) for version, rows in found.items()}
        for turn in range(GROUPS):
            yield from ((version, of[turn : turn + 1]) for version, of in groups.items())

    def _annotated_first(self, version: int, groups: list[tuple[Any, ...]]) -> list[int]:
        """Of `groups` (id, a trajectory) those first of whose tokens the learner recorded what it computed."""
        known = {id: read_annotations(self._run.folder, version, one) is not None for id, one in groups}
        return sorted(known, key=lambda id: not known[id])

    def _add_group(self, id: int) -> None:
        group = self._run.reader.group(id)
        if not self._take_room(group):
            return
        self._groups[id] = group
        rows = self._run.index.page(TrajectoryQuery(group=id, limit=MEMBERS)).rows
        for row in rows:
            path = f"trajectories/{row['id']}"
            answers: dict[str, Any] = {path: self._run.reader.describe(row["id"], BINS)}
            if answers[path]["has_tokens"]:
                answers[f"{path}/tokens"] = self._tokens(row["id"], answers[path]["tokens"])
                answers[f"{path}/messages"] = _shortened(self._run.reader.messages(row["id"]))
            encoded = {path: msgspec.Raw(msgspec.json.encode(answer)) for path, answer in answers.items()}
            if not self._take_room(*encoded.values()):
                return
            self.answers |= encoded
            self.rows.append(row)

    def _tokens(self, id: str, total: int) -> dict[str, Any]:
        """The first `TOKENS`, in one window."""
        whole: dict[str, Any] = {}
        for start in range(0, min(total, TOKENS), WINDOW):
            whole = _joined(whole, self._run.reader.window(id, start, min(total, start + WINDOW)))
        return whole | {"start": 0}

    def _take_room(self, *answers: Any) -> bool:
        """Whether there is room and time for these; the room is then taken."""
        size = sum(len(msgspec.json.encode(answer)) for answer in answers)
        if size > self._left or time.monotonic() > self._until:
            return False
        self._left -= size
        return True


def _joined(first: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    """Two windows that follow one another; lists are continued."""
    found = dict(then)
    for name, value in then.items():
        if isinstance(value, list):
            found[name] = first.get(name, []) + value
        elif isinstance(value, dict):
            found[name] = _joined(first.get(name, {}), value)
    return found


def _evenly(number: int, most: int) -> list[int]:
    """At most `most` of the positions 0 to `number` - 1, the first and the last among them."""
    return np.unique(np.linspace(0, number - 1, min(number, most)).astype(int)).tolist() if number else []


def _shortened(messages: list[ShownMessage]) -> list[ShownMessage]:
    """At most about `TEXT` characters of a conversation."""
    ends = list(itertools.accumulate(len(message.text) for message in messages))
    kept = [message for message, end in zip(messages, ends, strict=True) if end <= TEXT]
    rest = messages[len(kept) : len(kept) + 1]
    return kept + [msgspec.structs.replace(one, text=one.text[: TEXT // 8], cut=True) for one in rest]


def thinned(columns: dict[str, Any], most: int) -> dict[str, Any]:
    """The answer of `MetricsTable.columns` with at most `most` of its steps, evenly chosen."""
    chosen = _evenly(len(columns["steps"]), most)
    short = {name: [columns[name][at] for at in chosen] for name in ("steps", "versions", "seconds")}
    return (
        columns
        | short
        | {"columns": {name: [values[at] for at in chosen] for name, values in columns["columns"].items()}}
    )
