"""The dashboard's page of one trajectory or one group, read from the buffer's store at each request.

Invariants:
- A request reads the header and the bytes that it shows: the cost of a window does not grow with the trajectory.
- What is not recorded is null; nothing is made up in its place.
- All trajectories are read page by page; the memory that this takes does not grow with the run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..buffer.run_stores import parts, shard_path
from ..buffer.segments import read_arrays, segments_path, starts_of
from ..buffer.trajectory import TOKEN_BYTES, BatchRow
from ..common.annotations import CLIPPED, DROPPED, VALUES, TokenAnnotations
from ..errors import ConfigError, StoreError
from ..monitor.annotations import read_annotations
from .store import ReadConnection, StoreReader
from .texts import CUT, ShownMessage, TokenTexts

WINDOW = 2048  # tokens that a page draws at once
BINS = 2000  # columns of a strip, at most
MEMBERS = 64  # of a group that are shown side by side
ANSWER = 2000  # characters of a member's last turn there
AHEAD = 8  # tokens decoded before a window, so that a character that begins before it is whole
BRANCHES = 256  # of an episode that are read
PAGE = 256  # headers that are in memory at once while all are read
FACTS = (
    "e.account, e.withheld, e.loss_from, e.reason, e.delivered_time,"
    " g.state, g.leased_at, g.trained_at, g.leased_time, g.ready_time, g.taken_time, g.request"
)
OWNERS = "JOIN {part}episodes e ON e.id = t.episode_id JOIN {part}groups g ON g.id = t.group_id"
ROW_IN = f"SELECT t.rowid, 0, t.header, t.length, t.arrays, {FACTS} FROM {{part}}trajectories t {OWNERS}"
FAILED_ROW_IN = f"SELECT t.rowid, 1, t.header, t.length, t.rowid, {FACTS} FROM {{part}}failed t {OWNERS}"
ROW, FAILED_ROW = ROW_IN.format(part=""), FAILED_ROW_IN.format(part="")


class StoredTrajectory(msgspec.Struct, frozen=True):
    """A row of the store with those of its episode and its group."""

    rowid: int
    failed: bool  # its arrays are in its row of `failed`
    header: BatchRow
    position: int | None  # of its arrays, or its row; None once they were dropped
    account: str
    withheld: str | None
    loss_from: int | None
    reason: str
    delivered_time: float | None
    state: str
    leased_at: int
    trained_at: int | None
    leased_time: float | None
    ready_time: float | None
    taken_time: float | None
    request: str  # the lease request; of an evaluation its label
    version: int  # of the learner now

    @property
    def learner_version(self) -> int:
        """The version that staleness is counted from: of the learner as it took the batch, or now."""
        return self.version if self.trained_at is None else self.trained_at - 1

    @property
    def oldest_with_loss(self) -> int | None:
        """The oldest version whose tokens carried loss, -1 where that is still open; None where none did, or will."""
        return None if self.account == "discarded" else self.loss_from if self.account == "trained" else -1


class TrajectoryReader:
    def __init__(self, store: StoreReader, texts: TokenTexts) -> None:
        self._store = store
        self.texts = texts

    def describe(self, id: str, bins: int) -> dict[str, Any]:
        """Everything of a trajectory but its tokens, and a strip of `bins` columns over all of them. Raises StoreError."""
        one = self._read(id)
        h = one.header
        fields = msgspec.to_builtins(h)
        kept = {
            name: getattr(one, name)
            for name in StoredTrajectory.__struct_fields__
            if name not in ("rowid", "failed", "header", "position")
        }
        turns = [dict(zip(turn.__struct_fields__, msgspec.structs.astuple(turn), strict=True)) for turn in h.turns]
        calls = [dict(zip(c.__struct_fields__, msgspec.structs.astuple(c), strict=True)) for c in h.env_calls]
        return {
            **{
                name: fields[name]
                for name in ("id", "group_id", "member", "branch", "task_id", "env", "reward", "started")
            },
            **{name: fields[name] for name in ("turn_rewards", "outcome", "timings", "metrics", "version_spans")},
            **kept,
            "turns": turns,
            "env_calls": calls,
            "images": [{"start": i.start, "end": i.end, "name": i.name} for i in h.images],
            "tokens": len(h),
            "sampled": h.sampled,
            "learner_version": one.learner_version,
            "has_tokens": one.position is not None,
            "tokenizer": self.texts.source is not None,
            "annotated": self._annotations(one) is not None,
            "strip": self._strip(one, bins),
        }

    def window(self, id: str, start: int, end: int) -> dict[str, Any]:
        """Tokens `[start, end)`: ids, texts, log-probs, versions (-1: not sampled), staleness, and loss: 0 for context, 1 for
        tokens with loss, 2 for sampled ones without; and what the learner computed at those with loss, where it was recorded: by
        name in `annotations`, null elsewhere. Raises StoreError, or ConfigError for more than `WINDOW` tokens."""
        one = self._read(id)
        if not 0 <= start < end <= len(one.header) or end - start > WINDOW:
            raise ConfigError(f"window: {start} to {end} of {len(one.header)} tokens; allowed are {WINDOW} at once")
        ahead = max(0, start - AHEAD)
        ids = self._ids(one, ahead, end)
        versions = one.header.versions()[start:end]
        sampled = versions >= 0
        found = self._annotations(one)
        return {
            "start": start,
            "end": end,
            "ids": ids[start - ahead :].tolist(),
            "texts": self.texts.pieces(ids.tolist())[start - ahead :],
            "logprobs": np.round(self._logprobs(one, start, end), 5).astype(np.float64).tolist(),
            "versions": versions.tolist(),
            "staleness": np.where(sampled, one.learner_version - versions, -1).tolist(),
            "loss": _loss(one, versions).tolist(),
            "annotations": None if found is None else _annotated(found, start, end),
        }

    def messages(self, id: str) -> list[ShownMessage]:
        """The conversation. Raises StoreError."""
        return self.conversation(self._read(id))

    def conversation(self, one: StoredTrajectory, cut: int = CUT) -> list[ShownMessage]:
        """Its messages, of at most `cut` characters each. Raises StoreError."""
        ids = self._ids(one, 0, len(one.header)).tolist()
        turns = [(turn.start, turn.end) for turn in one.header.turns]
        return self.texts.messages(ids, turns, one.header.segments, cut, one.header.images)

    def episode(self, id: str) -> list[StoredTrajectory]:
        """The branches of an episode in their order, `BRANCHES` at most; none where it left none. Raises StoreError."""
        with self._store.open() as db:
            of_episode = "WHERE t.episode_id = ? LIMIT ?"
            rows = db.all(f"{ROW} {of_episode}", id, BRANCHES) + db.all(f"{FAILED_ROW} {of_episode}", id, BRANCHES)
            return sorted(self._decode_rows(db, rows), key=lambda one: one.header.branch)

    def all(self, versions: Collection[int] | None = None) -> Iterator[StoredTrajectory]:
        """Every trajectory in the order of delivery, then those of episodes that failed, shard by shard where the buffer has any;
        with `versions` those of the groups whose batch made one of them. Raises StoreError."""
        for table, part in itertools.product((ROW_IN, FAILED_ROW_IN), parts(self._store.path)):
            at = 0
            query = table.format(part=f"{part}.")
            while page := self._page(f"{query} WHERE t.rowid > ? ORDER BY t.rowid LIMIT ?", at):
                at = page[-1].rowid
                yield from (one for one in page if versions is None or one.trained_at in versions)

    def _page(self, query: str, at: int) -> list[StoredTrajectory]:
        with self._store.open() as db:
            return self._decode_rows(db, db.all(query, at, PAGE))

    def arrays(self, one: StoredTrajectory) -> bytes | None:
        """Token ids, log-probs and loss mask as an `EncodedTrajectory` has them; None where they are not there, see `why_none`."""
        size = TOKEN_BYTES * len(one.header)
        data = self._read_arrays(one, 0, size)
        return data if len(data) == size else None

    def group(self, id: int) -> dict[str, Any]:
        """A group and its trajectories, with the last turn of each. Raises StoreError."""
        with self._store.open() as db:
            group = db.one(
                "SELECT state, leased_at, trained_at, leased_time, ready_time, taken_time FROM groups WHERE id = ?", id
            )
            if group is None:
                raise StoreError(
                    f"group {id} is not in the buffer: there was none, or its rows were dropped to free space"
                )
            of_group = "WHERE t.group_id = ? LIMIT ?"
            rows = db.all(f"{ROW} {of_group}", id, MEMBERS) + db.all(f"{FAILED_ROW} {of_group}", id, MEMBERS)
            found = self._decode_rows(db, rows)
            around = db.one(
                "SELECT (SELECT max(id) FROM groups WHERE id < ?), (SELECT min(id) FROM groups WHERE id > ?)", id, id
            )
        found.sort(key=lambda one: (one.header.member, one.header.branch))
        names = ("state", "leased_at", "trained_at", "leased_time", "ready_time", "taken_time")
        members = [self._member(one) for one in found]
        prompt = self._prompt(found[0]) if found else []
        before, after = around or (None, None)
        return {"id": id, **dict(zip(names, group, strict=True)), "members": members, "prompt": prompt,
                "task": found[0].header.task_id if found else "", "previous": before, "next": after}  # fmt: skip

    def _member(self, one: StoredTrajectory) -> dict[str, Any]:
        h = one.header
        texts: list[str] = []
        if one.position is not None and h.turns:
            for turn in h.turns:
                ids = self._ids(one, turn.start, turn.end).tolist()
                texts.append(self.texts.text(ids[:ANSWER])[:ANSWER])
        return {
            "id": h.id, "reward": h.reward, "outcome": h.outcome.label, "detail": h.outcome.detail, "tokens": len(h),
            "sampled": h.sampled, "turns": len(h.turns), "seconds": round(h.timings.get("total", 0.0), 3),
            "account": one.account, "withheld": one.withheld, "texts": texts,
            "versions": sorted({span.version for span in h.version_spans}),
        }  # fmt: skip

    def _prompt(self, one: StoredTrajectory) -> list[ShownMessage]:
        if one.position is None or not one.header.turns:
            return []
        size = one.header.turns[0].start
        given = [segment for segment in one.header.segments if segment.end <= size]
        return self.texts.messages(self._ids(one, 0, size).tolist(), [], given, images=one.header.images)

    def _strip(self, one: StoredTrajectory, bins: int) -> dict[str, Any] | None:
        """By column of tokens: the share of tokens with loss and without, the largest staleness, the newest version, and the mean
        log-prob of the sampled ones; null where none was sampled. Where annotations are recorded, `_strip_of`."""
        total = len(one.header)
        if one.position is None or not 0 < bins <= BINS:
            return None
        edges = np.unique(np.linspace(0, total, min(bins, total) + 1).astype(np.int64))
        starts, widths = edges[:-1], np.diff(edges)
        versions = one.header.versions()
        loss, sampled = _loss(one, versions), versions >= 0
        counts = np.add.reduceat(sampled, starts, dtype=np.int64)
        staleness = np.maximum.reduceat(np.where(sampled, one.learner_version - versions, -1), starts)
        logprobs = np.add.reduceat(self._logprobs(one, 0, total).astype(np.float64), starts)
        shares = {
            name: np.round(np.add.reduceat(loss == code, starts, dtype=np.int64) / widths, 3)
            for name, code in LOSS.items()
        }
        some = counts > 0
        return {
            "edges": edges.tolist(),
            **{name: share.tolist() for name, share in shares.items()},
            "staleness": _values_or_none(some, staleness),
            "version": _values_or_none(some, np.maximum.reduceat(versions, starts)),
            "logprob": _values_or_none(some, np.round(logprobs / np.maximum(counts, 1), 4)),
            **_strip_of(self._annotations(one), starts, total),
        }

    def _annotations(self, one: StoredTrajectory) -> TokenAnnotations | None:
        """Of the step that it was trained in; None where it was in none, or that step did not record it."""
        if one.trained_at is None or one.account != "trained":
            return None
        return read_annotations(self._store.path.parent, one.trained_at, one.header.id)

    def _read(self, id: str) -> StoredTrajectory:
        with self._store.open() as db:
            row = db.one(f"{ROW} WHERE t.id = ?", id) or db.one(f"{FAILED_ROW} WHERE t.id = ?", id)
            if row is None:
                raise StoreError(
                    f"trajectory {id} is not in the buffer: there was none, or its rows were dropped to free space"
                )
            return self._decode_rows(db, [row])[0]

    def _decode_rows(self, db: ReadConnection, rows: Sequence[Sequence[Any]]) -> list[StoredTrajectory]:
        counters = db.counters()
        version = counters.version if counters else 0
        names = StoredTrajectory.__struct_fields__[3:-1]
        found: list[StoredTrajectory] = []
        for rowid, failed, header, length, *others in rows:
            fields = dict(zip(names, others, strict=True))
            decoded = self._store.decode(header, length)
            found.append(StoredTrajectory(rowid, bool(failed), decoded, **fields, version=version))
        return found

    def _ids(self, one: StoredTrajectory, start: int, end: int) -> NDArray[np.int32]:
        return np.frombuffer(self._bytes(one, 4 * start, 4 * (end - start)), dtype=np.int32)

    def _logprobs(self, one: StoredTrajectory, start: int, end: int) -> NDArray[np.float32]:
        data = self._bytes(one, 4 * len(one.header) + 4 * start, 4 * (end - start))
        return np.frombuffer(data, dtype=np.float32)

    def _bytes(self, one: StoredTrajectory, offset: int, size: int) -> bytes:
        """Of its arrays: 4 T of ids, 4 T of log-probs, T of the loss mask."""
        assert offset + size <= TOKEN_BYTES * len(one.header)
        data = self._read_arrays(one, offset, size)
        if len(data) < size:
            raise StoreError(f"the tokens of trajectory {one.header.id} {self.why_none(one)}")
        return data

    def why_none(self, one: StoredTrajectory) -> str:
        """Of tokens that are not there."""
        if one.position is None:
            return "were dropped to free space (`buffer.keep`)"
        path = shard_path(self._store.path, one.header.group_id)
        return f"are missing or damaged in {path if one.failed else segments_path(path)}"

    def _read_arrays(self, one: StoredTrajectory, offset: int, size: int) -> bytes:
        """Fewer bytes, or none, where they were dropped to free space, or lost."""
        if one.failed:
            with self._store.open() as db:
                row = db.one("SELECT substr(arrays, ?, ?) FROM failed WHERE id = ?", offset + 1, size, one.header.id)
            return row[0] if row else b""
        if one.position is None:
            return b""
        arrays = segments_path(shard_path(self._store.path, one.header.group_id))
        return read_arrays(arrays, starts_of(arrays), one.position + offset, size)


LOSS = {"loss": 1, "without": 2}  # the values of `_loss` beside 0, context


def _loss(one: StoredTrajectory, versions: NDArray[np.int32]) -> NDArray[np.int8]:
    """int8[T]: 0 not sampled, 1 sampled, 2 sampled and trained on without loss (`withheld`)."""
    oldest = one.oldest_with_loss
    sampled = versions >= 0
    carried = sampled & (versions >= oldest) if oldest is not None else np.zeros_like(sampled)
    return np.where(sampled, np.where(carried, 1, 2), 0).astype(np.int8)


def _annotated(found: TokenAnnotations, start: int, end: int) -> dict[str, list[Any]]:
    """Of tokens `[start, end)` by name; null where a token had no loss, or stands behind the last one that had."""
    values, flags = _padded(found, end)
    by_name = {name: _numbers(row[start:]) for name, row in zip(VALUES, values, strict=True)}
    bits = {"clipped": CLIPPED, "dropped": DROPPED}
    return {**by_name, **{name: ((flags[start:] & bit) > 0).tolist() for name, bit in bits.items()}}


def _strip_of(found: TokenAnnotations | None, starts: NDArray[np.int64], total: int) -> dict[str, list[Any]]:
    """By column that begins at `starts`: of log-ratios the one that is furthest from 0; the means of entropies and advantages."""
    if found is None:
        return {}
    values, _ = _padded(found, total)
    some = ~np.isnan(values)
    known = np.where(some, values, 0)
    counts = np.add.reduceat(some[0], starts, dtype=np.int64)
    largest, least = np.maximum.reduceat(known[0], starts), np.minimum.reduceat(known[0], starts)
    columns = {"log_ratio": np.where(largest >= -least, largest, least)}
    for name in ("entropy", "advantage"):
        columns[name] = np.add.reduceat(known[VALUES.index(name)], starts) / np.maximum(counts, 1)
    return {name: _values_or_none(counts > 0, np.round(column, 5)) for name, column in columns.items()}


def _padded(found: TokenAnnotations, end: int) -> tuple[NDArray[np.float64], NDArray[np.uint8]]:
    """float64[4, end] and uint8[end]: those behind the last recorded token are NaN, without flags."""
    missing = max(0, end - len(found))
    values = np.pad(found.values[:, :end].astype(np.float64), ((0, 0), (0, missing)), constant_values=np.nan)
    return values, np.pad(found.flags[:end], (0, missing))


def _numbers(values: NDArray[np.float64]) -> list[float | None]:
    return [None if math.isnan(value) else round(value, 5) for value in values.tolist()]


def _values_or_none(some: NDArray[np.bool_], values: NDArray[Any]) -> list[Any]:
    return [value if there else None for value, there in zip(values.tolist(), some.tolist(), strict=True)]
