"""The dashboard's timeline: phases of the learner and parts of pushes, gauges of all processes, and the life of the episodes of a
batch.

Invariants:
- Times are absolute, as they were recorded; hosts may have clocks that differ.
- A window has the spans that touch it, the gauges as means over its parts: the answer's size does not grow with the run.
- A committed batch changes only when its commit is rolled back, so that its episodes are read once for all requests that follow.
"""

from __future__ import annotations

import heapq
import threading
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..buffer.schema import BUFFER
from ..buffer.trajectory import BatchRow
from ..common.spans import Span
from ..monitor.prometheus import GROUP_STATES
from ..monitor.timeline import SPANS, FolderFollower
from ..planner.run_spans import LEARNER
from .gauges import GaugeTable
from .store import ReadConnection, StoreReader

PHASES = ("recover", "first_rollout", "take", "sleep", "train", "commit", "publish", "checkpoint")
WINDOW_S = 60.0  # shown at first: the newest of a run
POINTS = 300  # parts of a window that gauges are means over
SPANS_SHOWN = 4000  # of a window; more are thinner than a pixel
EPISODES = 512  # of a batch
BATCHES = 8  # whose episodes are kept, those that were asked for last
COMMIT = "SELECT time, max_staleness, groups_per_batch, groups, rolled_back FROM commits WHERE version = ?"
AROUND = (
    "SELECT (SELECT max(trained_at) FROM groups WHERE trained_at < ?),"
    " (SELECT min(trained_at) FROM groups WHERE trained_at > ?)"
)


class Timeline:
    """Of the run in `folder`; from any thread."""

    def __init__(self, folder: Path, gauges: GaugeTable, store: StoreReader) -> None:
        self._gauges = gauges
        self._store = store
        self._files = FolderFollower(folder / SPANS, LEARNER)
        self._spans: list[Span] = []  # of the learner's rank 0, by their ends
        # By version: the row of the commit that they were read under, and the episodes.
        self._batches: dict[int, tuple[tuple[Any, ...] | None, list[dict[str, Any]]]] = {}
        self._lock = threading.Lock()

    def window(self, t0: float | None, t1: float | None, points: int = POINTS) -> dict[str, Any]:
        """From `t0` to `t1`, by default the newest `WINDOW_S`; gauges are means over `points` parts. Raises OSError."""
        known = [bounds for bounds in (self._gauges.bounds(), self._follow()) if bounds]
        if not known:
            return {"bounds": None, "phases": [], "pushes": [], "series": {}}
        first, last = min(bound[0] for bound in known), max(bound[1] for bound in known)
        t1 = last if t1 is None else t1
        t0 = max(first, t1 - WINDOW_S) if t0 is None else t0
        with self._lock:
            begin = bisect_left(self._spans, t0, key=_end)
            touching = [span for span in self._spans[begin:] if span.t0 <= t1]
        if len(touching) > SPANS_SHOWN:
            longest = heapq.nlargest(
                SPANS_SHOWN, range(len(touching)), key=lambda i: _end(touching[i]) - touching[i].t0
            )
            touching = [touching[i] for i in sorted(longest)]
        series = {
            role: found for role, gauges in self._gauges.roles().items() if (found := gauges.between(t0, t1, points))
        }
        if shards := [found for role, found in series.items() if role.startswith(f"{BUFFER}-")]:
            groups = {state: _sum([shard.get(state, []) for shard in shards]) for state in GROUP_STATES}
            series[BUFFER] = series.get(BUFFER, {}) | groups  # the clock of the shards has none
        return {
            "bounds": [first, last],
            "t0": t0,
            "t1": t1,
            "points": points,
            "phases": [span for span in touching if span.what in PHASES],
            "pushes": [span for span in touching if span.what not in PHASES],
            "series": series,
        }

    def batch(self, version: int) -> dict[str, Any]:
        """The episodes of the batch that `version` was made from: what each did and when. Raises StoreError."""
        with self._store.open() as db:
            # The commit before the episodes: what is committed meanwhile makes the next request read again.
            commit = db.one(COMMIT, version)
            around = db.one(AROUND, version, version) or (None, None)
            with self._lock:
                known = self._batches.pop(version, None)
            if known is None or known[0] != commit:
                known = commit, self._episodes(db, version)
        if commit is not None:
            with self._lock:
                self._batches[version] = known
                while len(self._batches) > BATCHES:
                    del self._batches[next(iter(self._batches))]
        names = ("time", "max_staleness", "groups_per_batch")
        return {
            "version": version,
            "previous": around[0],
            "next": around[1],
            "commit": dict(zip(names, commit[: len(names)], strict=True)) if commit else None,
            "episodes": known[1],
        }

    def _episodes(self, db: ReadConnection, version: int) -> list[dict[str, Any]]:
        query = (
            "SELECT t.header, t.length, g.id, g.leased_time, g.ready_time, g.taken_time, e.delivered_time, e.withheld"
            " FROM groups g JOIN episodes e ON e.group_id = g.id JOIN trajectories t ON t.episode_id = e.id"
            " WHERE g.trained_at = ? ORDER BY g.id, t.rowid LIMIT ?"
        )
        episodes: dict[str, dict[str, Any]] = {}
        for header, length, group, leased, ready, taken, delivered, withheld in db.all(query, version, EPISODES):
            h = self._store.decode(header, length)
            one = episodes.setdefault(
                h.episode,
                {
                    "id": h.id, "group": group, "member": h.member, "reward": h.reward, "outcome": h.outcome.label,
                    "withheld": withheld, "started": h.started, "ended": h.started + h.timings.get("total", 0.0),
                    "leased": leased, "delivered": delivered, "ready": ready, "taken": taken, "parts": [],
                },
            )  # fmt: skip
            one["parts"] += _parts(h)
        return list(episodes.values())

    def _follow(self) -> tuple[float, float] | None:
        """Take in what was added; the first begin and the last end, None before the first span."""
        with self._lock:
            added = list[Span]()
            try:
                for _, _, line in self._files.lines():
                    try:
                        added.append(msgspec.json.decode(line, type=Span))
                    except msgspec.MsgspecError:
                        continue  # a line that a killed process left
            finally:  # a file that cannot be read leaves what was read before
                added.sort(key=_end)
                late = bool(added and self._spans) and added[0].t1 < self._spans[-1].t1
                self._spans += added
                if late:  # of a process that ended: seldom, and all spans of a long run are many
                    self._spans.sort(key=_end)
            return (self._spans[0].t0, self._spans[-1].t1) if self._spans else None


def _end(span: Span) -> float:
    return span.t1


def _sum(columns: Sequence[list[float | None]]) -> list[float | None]:
    """Of columns over the same times; None where one has no value."""
    longest = max(map(len, columns))
    whole = [column for column in columns if len(column) == longest]
    return [None if None in values else sum(v for v in values if v is not None) for values in zip(*whole, strict=True)]


def _parts(h: BatchRow) -> list[tuple[float, float, str, int | None]]:
    """(begin, end, what, version) of a branch: requests in the router's queue, until their first token, decoding; and calls of its
    environment. Turns that another branch sampled are left out."""
    found: list[tuple[float, float, str, int | None]] = []
    for turn in h.turns:
        versions = [span.version for span in h.version_spans if turn.start <= span.start < turn.end]
        if not turn.asked or not versions:
            continue
        queued = turn.asked + turn.queued_s
        first = queued + turn.first_s
        found += [(turn.asked, queued, "queue", None), (queued, first, "prefill", None)]
        found.append((first, first + turn.decode_s, "decode", versions[-1]))
    found += [(call.begin, call.end, "failed" if call.error else call.what, None) for call in h.env_calls]
    return [part for part in found if part[1] > part[0]]
