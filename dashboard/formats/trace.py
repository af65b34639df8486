"""The trace of a run: its spans as tracks of nested slices, for viewers of traces.

    spans/ROLE.PID.jsonl ──by process, episode and replica──> tracks ──placed──> lanes whose slices nest

Invariants:
- Every span that is chosen is one slice. A turn has parts (queue, prefill, decode): slices, too, which are marked as parts.
- Slices of a lane nest or are apart: of two that overlap in part, the later one is in another lane.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import msgspec

from ...common.spans import Id, Span
from ...errors import ConfigError
from ...monitor.timeline import read_spans
from ...planner.run_spans import LEARNER
from ..runs import WatchedRun
from ..store import ROWS
from ..timeline import PHASES

NS = 1_000_000_000
TRAINED = (
    "SELECT e.rowid, e.id, g.trained_at FROM {part}.episodes e JOIN {part}.groups g ON g.id = e.group_id"
    " WHERE e.rowid > ? AND e.account = 'trained' ORDER BY e.rowid LIMIT ?"
)


class TrackKey(msgspec.Struct, frozen=True, order=True):
    """What happens on a track: in one process, of one episode, or at one replica while weights are pushed."""

    role: str
    episode: str = ""
    replica: str = ""


class Slice(msgspec.Struct, frozen=True):
    """Nanoseconds since the epoch."""

    begin: int
    end: int
    what: str
    ids: dict[str, Id]
    is_part: bool = False  # of a turn, whose span says when it was


class RunTrace(msgspec.Struct, frozen=True):
    spans: int
    tracks: dict[TrackKey, list[Slice]]
    trained: dict[str, int]  # episode -> the version that was made from it

    @property
    def bounds(self) -> tuple[int, int]:
        """The first beginning and the last end."""
        slices = [one for track in self.tracks.values() for one in track]
        return min(one.begin for one in slices), max(one.end for one in slices)


def read_trace(run: WatchedRun, versions: Collection[int] | None = None) -> RunTrace:
    """All spans of a run; with `versions` those of the time in which the learner made them, and all of the episodes that they were
    made from. Raises ConfigError where there are none, StoreError."""
    trained = _trained(run)
    wanted: set[str] = set()
    window = None
    if versions is not None:
        wanted = {episode for episode, version in trained.items() if version in versions}
        window = _window(run, versions)
    tracks: dict[TrackKey, list[Slice]] = {}
    count = 0
    for role, span in read_spans(run.folder):
        episode = str(span.ids.get("episode", ""))
        if window is not None and episode not in wanted and not (span.t0 <= window[1] and span.t1 >= window[0]):
            continue
        count += 1
        key = TrackKey(role, episode, "" if episode else str(span.ids.get("replica", "")))
        tracks.setdefault(key, []).extend(_slices(span))
    if not count:
        raise ConfigError(
            f"{run.folder} has no spans{'' if versions is None else ' of these steps'}: none were recorded, or they are gone"
        )
    return RunTrace(count, tracks, trained)


def lanes(slices: Iterable[Slice]) -> Iterator[list[Slice]]:
    """The slices of a track in as few lists as nesting needs, each by their beginnings, an outer slice before those in it."""
    placed: list[tuple[list[Slice], list[Slice]]] = []  # of each lane its slices, and those that are open
    for one in sorted(slices, key=lambda one: (one.begin, -one.end)):
        for _, opened in placed:
            while opened and opened[-1].end <= one.begin:
                opened.pop()
        fitting = (lane for lane in placed if not lane[1] or lane[1][-1].end >= one.end)
        if (lane := next(fitting, None)) is None:
            placed.append(lane := ([], []))
        lane[0].append(one)
        lane[1].append(one)
    yield from (found for found, _ in placed)


def _slices(span: Span) -> Sequence[Slice]:
    begin = round(span.t0 * NS)
    end = max(begin, round(span.t1 * NS))
    whole = Slice(begin, end, span.what, span.ids)
    queued_s, first_s = span.ids.get("queued_s"), span.ids.get("first_s")
    if span.what != "turn" or not isinstance(queued_s, float | int) or not isinstance(first_s, float | int):
        return [whole]
    granted = min(end, begin + round(queued_s * NS))
    first = min(end, granted + round(first_s * NS))
    parts = (("queue", begin, granted), ("prefill", granted, first), ("decode", first, end))
    return [whole, *(Slice(t0, t1, what, {}, True) for what, t0, t1 in parts if t1 > t0)]


def _window(run: WatchedRun, versions: Collection[int]) -> tuple[float, float]:
    """From the first phase of the learner that led to one of the versions to the end of the last one."""
    phases = [
        span
        for role, span in read_spans(run.folder)
        if role == LEARNER and span.what in PHASES and span.ids.get("version") in {version - 1 for version in versions}
    ]
    if not phases:
        raise ConfigError(
            f"{run.folder} has no spans of these steps: none were recorded, or newer ones took their place"
        )
    return min(span.t0 for span in phases), max(span.t1 for span in phases)


def _trained(run: WatchedRun) -> dict[str, int]:
    found: dict[str, int] = {}
    if not run.store.exists:
        return found
    with run.store.open() as db:
        for part in db.parts:
            at = 0
            while rows := db.all(TRAINED.format(part=part), at, ROWS):
                at = rows[-1][0]
                found.update((episode, version) for _, episode, version in rows if version is not None)
    return found
