"""The dashboard's index: all trajectories of a run as columns in memory, which lists are filtered and sorted by.

    trajectories, or failed  ──followed by rowid──> columns        groups  ──those that may still change──> states

Invariants:
- The store has no index for this and its writer does no work for it: a row is read once, when it is new.
- A group is read again until it can no longer change, so that the version that was trained on it is always right.
- A page names the last row shown, not a number of rows to skip: it is the same while rows are added.
"""

from __future__ import annotations

import threading
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..buffer.trajectory import Outcome, VersionSpan
from ..common.outcomes import FAILED
from ..errors import ConfigError, StoreError
from .columns import GrowingColumns, Names
from .store import ROWS, ReadConnection, StoreReader

TYPES = {
    "rowid": np.int64,
    "group": np.int64,
    "attempt": np.int32,
    "member": np.int32,
    "branch": np.int32,
    "env": np.int32,
    "task": np.int32,
    "outcome": np.int32,
    "tokens": np.int32,
    "sampled": np.int32,
    "turns": np.int32,
    "oldest": np.int32,
    "newest": np.int32,
    "reward": np.float64,
    "seconds": np.float32,
    "started": np.float64,
}
"""Of each trajectory; `env`, `task` and `outcome` by the numbers of their names, `oldest` and `newest` are policy versions, -1
where nothing was sampled."""

STATES = ("", "open", "leased", "ready", "batched", "trained", "discarded")
"""Of groups; the first is that of a group whose row was dropped to free space."""

SETTLED = (STATES.index(""), STATES.index("discarded"))
TRAINED = STATES.index("trained")
ABSENT_LIMIT = 1 << 20  # groups that may be missing between two rows: more is damage, and no reason to allocate memory
Source = Literal["training", "failed", "evaluation", "evaluation_failed"]
"""Which trajectories: of episodes to be trained on, or of evaluations; and those that failed."""
TABLES: dict[Source, str] = {
    "training": "trajectories",
    "failed": "failed",
    "evaluation": "trajectories",
    "evaluation_failed": "failed",
}
LABELS = "SELECT id, request FROM groups WHERE id IN (SELECT value FROM json_each(?))"  # of evaluations
DETAILS = "SELECT rowid, header FROM {part}.{table} WHERE rowid IN (SELECT value FROM json_each(?))"
DETAIL = 300  # characters of why an episode failed in a list
NEW_ROWS = "SELECT rowid, header, length FROM {part}.{table} WHERE rowid > ? ORDER BY rowid LIMIT ?"
GROUP_ROWS = "SELECT id, state, trained_at FROM groups WHERE id >= ? ORDER BY id LIMIT ?"
Sort = Literal["newest", "reward", "tokens", "sampled", "turns", "seconds", "staleness", "trained_at"]
PAGE_LIMIT = 200


class IndexedOutcome(msgspec.Struct, frozen=True, gc=False):
    """An `Outcome` without its detail and without its checks, which took as long as all the rest."""

    kind: str
    reason: str = ""

    @property
    def label(self) -> str:
        return FAILED + self.reason if self.kind == "failed" else self.kind


class IndexedHeader(msgspec.Struct, frozen=True, gc=False):
    """The parts of a `TrajectoryHeader` that are in the index; the others are skipped, not decoded."""

    id: str
    group_id: int
    member: int
    branch: int
    task_id: str
    env: str
    version_spans: list[VersionSpan]
    turns: list[msgspec.Raw]  # only their number is shown; what a `Raw` points at may be gone
    reward: float
    outcome: IndexedOutcome
    timings: dict[str, float] = {}
    started: float = 0.0


class FailedHeader(msgspec.Struct, frozen=True, gc=False):
    """Of a header why its episode failed."""

    outcome: Outcome


class TrajectoryQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a list shows, in which order, from where on; without a value a filter keeps everything."""

    source: Source = "training"
    sort: Sort = "newest"
    ascending: bool = False
    after: str = ""  # `TrajectoryPage.next` of the page before
    limit: int = 50
    reward_min: float | None = None
    reward_max: float | None = None
    turns_min: int | None = None
    tokens_min: int | None = None
    staleness_min: int | None = None
    trained_at: int | None = None  # the version that was made from it
    group: int | None = None
    env: str = ""
    outcome: str = ""
    state: str = ""  # of its group
    task: str = ""  # a part of its name


class TrajectoryPage(msgspec.Struct, frozen=True):
    total: int  # trajectories that the filters keep
    indexed: int  # of so many
    rows: list[dict[str, Any]]
    next: str  # "" at the end
    outcomes: list[str]  # that there are in the run, for the filters
    envs: list[str]


class TrajectoryIndex:
    """Of one source of a run; from any thread."""

    def __init__(self, store: StoreReader, source: Source = "training") -> None:
        self._store = store
        self._table, self._evaluated = TABLES[source], source.startswith("evaluation")
        self._lock = threading.Lock()
        self._decode = msgspec.msgpack.Decoder(IndexedHeader).decode
        self._decode_detail = msgspec.msgpack.Decoder(FailedHeader).decode
        self._clear()

    def _clear(self) -> None:
        self._last: dict[str, int] = {}  # by the file that the rows are in
        self._rows = GrowingColumns(TYPES)
        self._envs, self._tasks, self._outcomes = Names(), Names(), Names()
        self._states = GrowingColumns({"state": np.int8, "trained_at": np.int64})  # by the group's id
        self._first_unsettled = 0

    def __len__(self) -> int:
        return self._rows.size

    def page(self, query: TrajectoryQuery) -> TrajectoryPage:
        """Raises StoreError, or ConfigError where the query asks for something impossible."""
        if not 0 < query.limit <= PAGE_LIMIT:
            raise ConfigError(f"limit: {query.limit}; allowed are 1 to {PAGE_LIMIT}")
        with self._lock:
            self._follow()
            found = np.flatnonzero(self._kept(query))
            # The rows are in the order in which they were found, so that the newest need not be sorted.
            keys = found if query.sort == "newest" else self._keys(query.sort)[found]
            shown, following = _page_of(found, -keys if query.ascending else keys, query.after, query.limit)
            rows = self._explained([self._row(at) for at in shown])
            names = (sorted(self._outcomes.texts), sorted(self._envs.texts))
            return TrajectoryPage(len(found), len(self), rows, following, *names)

    def newest(self) -> dict[str, Any] | None:
        """The trajectory that was delivered last, without reading the others; None before the first. Raises StoreError."""
        if not self._store.exists:
            return None
        with self._store.open() as db:
            headers = db.newest("header", 1, self._table)
        if not headers:
            return None
        try:
            h = self._decode(memoryview(headers[0])[1:])
        except (msgspec.MsgspecError, TypeError) as error:
            raise StoreError(f"{self._store.path} is damaged at its last trajectory: {error}") from None
        sampled = sum(span.end - span.start for span in h.version_spans)
        numbers = {
            "reward": h.reward,
            "turns": len(h.turns),
            "sampled": sampled,
            "seconds": h.timings.get("total", 0.0),
        }
        return {"id": h.id, "env": h.env, "task": h.task_id, "outcome": h.outcome.label, **numbers}

    def environments(self) -> list[dict[str, Any]]:
        """Of each environment its trajectories: number, mean reward, tokens, turns and seconds, and outcomes."""
        with self._lock:
            self._follow()
            rows, first = self._rows, self._rows["branch"] == 0
            found = []
            for number, name in enumerate(self._envs.texts):
                mine = first & (rows["env"] == number)
                outcomes = np.bincount(rows["outcome"][mine], minlength=len(self._outcomes.texts)).tolist()
                means = {
                    key: float(rows[key][mine].mean()) for key in ("reward", "tokens", "sampled", "turns", "seconds")
                }
                counts = {label: n for label, n in zip(self._outcomes.texts, outcomes, strict=True) if n}
                found.append({"env": name, "episodes": int(mine.sum()), **means, "outcomes": counts})
            return sorted(found, key=lambda row: -row["episodes"])

    # --- following the store --------------------------------------------------------------------------------------

    def _follow(self) -> None:
        if not self._store.exists:
            return
        with self._store.open() as db:
            for part in db.parts:
                newest = db.one(f"SELECT coalesce(max(rowid), 0) FROM {part}.{self._table}")
                if newest is not None and newest[0] < self._last.get(part, 0):
                    self._clear()  # another run, or everything was dropped
            for part in db.parts:
                while rows := db.all(NEW_ROWS.format(part=part, table=self._table), self._last.get(part, 0), ROWS):
                    self._add(db, part, rows)
            self._follow_groups(db)

    def _add(self, db: ReadConnection, part: str, rows: list[tuple[int, bytes, int]]) -> None:
        try:
            found = [self._values(db.global_rowid(part, rowid), header, length) for rowid, header, length in rows]
            self._rows.extend(found)
        except (msgspec.MsgspecError, ValueError, TypeError, OverflowError) as error:
            raise StoreError(f"{self._store.path} is damaged at rowid {rows[0][0]} to {rows[-1][0]}: {error}") from None
        self._last[part] = rows[-1][0]

    def _values(self, rowid: int, header: bytes, length: int) -> tuple[float, ...]:
        """In the order of `TYPES`."""
        h = self._decode(memoryview(header)[1:])
        sampled, oldest, newest = 0, -1, -1
        for span in h.version_spans:
            version = span.version
            sampled += span.end - span.start
            if version > newest:
                newest = version
            if version < oldest or oldest < 0:
                oldest = version
        return (
            rowid,
            h.group_id,
            int(h.id.split(".")[1]),
            h.member,
            h.branch,
            self._envs[h.env],
            self._tasks[h.task_id],
            self._outcomes[h.outcome.label],
            length,
            sampled,
            len(h.turns),
            oldest,
            newest,
            h.reward,
            h.timings.get("total", 0.0),
            h.started,
        )

    def _follow_groups(self, db: ReadConnection) -> None:
        counters = db.counters()
        settled = counters.settled if counters else -1
        at = self._first_unsettled
        states = self._states
        while rows := db.all(GROUP_ROWS, at, ROWS):
            if rows[-1][0] - states.size > ABSENT_LIMIT:
                raise StoreError(f"{self._store.path} is damaged: group {rows[-1][0]} follows group {states.size - 1}")
            missing = rows[-1][0] + 1 - states.size
            states.extend([(0, -1)] * max(0, missing))
            ids = [id for id, _, _ in rows]
            states["state"][at : ids[-1] + 1] = 0  # of those in between the rows were dropped
            states["state"][ids] = [STATES.index(state) for _, state, _ in rows]
            states["trained_at"][ids] = [-1 if version is None else version for _, _, version in rows]
            at = ids[-1] + 1
        state, trained_at = states["state"], states["trained_at"]
        final = np.isin(state, SETTLED) | ((state == TRAINED) & (trained_at <= settled))
        open_ones = np.flatnonzero(~final[self._first_unsettled :])
        self._first_unsettled += int(open_ones[0]) if len(open_ones) else len(final) - self._first_unsettled
        self._first_unsettled = min(self._first_unsettled, db.newest_group() + 1)

    # --- a page ---------------------------------------------------------------------------------------------------

    def _of_groups(self, name: str) -> NDArray[Any]:
        """A column of the groups for each trajectory; its first value or -1 where the group is gone."""
        groups, values = self._rows["group"], self._states[name]
        if not len(values):
            return np.zeros(len(groups), values.dtype) - (name == "trained_at")
        known = groups < len(values)
        return np.where(known, values[np.minimum(groups, len(values) - 1)], -1 if name == "trained_at" else 0)

    def _keys(self, sort: Sort) -> NDArray[Any]:
        match sort:
            case "trained_at":
                return self._of_groups("trained_at")
            case "staleness":
                return self._staleness()
            case _:
                return self._rows[sort]

    def _staleness(self) -> NDArray[Any]:
        """int64[rows]: of the oldest sampled token where it was trained on, else -1."""
        oldest, trained_at = self._rows["oldest"], self._of_groups("trained_at")
        return np.where((trained_at >= 0) & (oldest >= 0), trained_at - 1 - oldest, -1)

    def _kept(self, q: TrajectoryQuery) -> NDArray[np.bool_]:
        rows = self._rows
        kept = np.ones(rows.size, dtype=np.bool_)
        for name, least in (("turns", q.turns_min), ("tokens", q.tokens_min), ("reward", q.reward_min)):
            if least is not None:
                kept &= rows[name] >= least
        if q.reward_max is not None:
            kept &= rows["reward"] <= q.reward_max
        if q.staleness_min is not None:
            kept &= self._staleness() >= q.staleness_min
        if q.trained_at is not None:
            kept &= self._of_groups("trained_at") == q.trained_at
        if q.group is not None:
            kept &= rows["group"] == q.group
        if q.state:
            kept &= self._of_groups("state") == (STATES.index(q.state) if q.state in STATES else -1)
        for name, names, text in (("env", self._envs, q.env), ("outcome", self._outcomes, q.outcome)):
            if text:
                kept &= rows[name] == (names.texts.index(text) if text in names.texts else -1)
        if q.task and rows.size:
            kept &= self._tasks.containing(q.task)[rows["task"]]
        return kept

    def _explained(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Rows with why each failed: the error and the user's line, "" where it did not; and the evaluation that it is of."""
        failed = [row["rowid"] for row in rows if row["outcome"].startswith(FAILED)]
        groups = [row["group"] for row in rows] if self._evaluated else []
        details, labels = dict[int, str](), dict[int, str]()
        if failed or groups:
            with self._store.open() as db:
                for part, own in db.by_part(failed).items():
                    query = DETAILS.format(part=part, table=self._table)
                    for rowid, header in db.all(query, msgspec.json.encode(own).decode()):
                        outcome = self._decode_detail(memoryview(header)[1:]).outcome
                        details[db.global_rowid(part, rowid)] = outcome.detail
                labels = dict(db.all(LABELS, msgspec.json.encode(groups).decode()))
        return [
            {**row, "detail": details.get(row["rowid"], "")[:DETAIL], "evaluation": labels.get(row["group"], "")}
            for row in rows
        ]

    def _row(self, at: int) -> dict[str, Any]:
        row = self._rows.row(at)
        group = int(row["group"])
        known = group < self._states.size
        trained_at = int(self._states["trained_at"][group]) if known else -1
        return {
            **row,
            "id": f"{group}.{row['attempt']}.{row['member']}.{row['branch']}",
            "env": self._envs.texts[int(row["env"])],
            "task": self._tasks.texts[int(row["task"])],
            "outcome": self._outcomes.texts[int(row["outcome"])],
            "seconds": round(row["seconds"], 3),
            "state": STATES[self._states["state"][group]] if known else "",
            "trained_at": trained_at if trained_at >= 0 else None,
            "staleness": int(trained_at - 1 - row["oldest"]) if trained_at >= 0 and row["oldest"] >= 0 else None,
        }


def _page_of(found: NDArray[Any], keys: NDArray[Any], after: str, limit: int) -> tuple[list[int], str]:
    """Positions of the `limit` rows with the largest keys after the cursor, of equal ones the newest first; and the next cursor."""
    if after:
        key, position = _cursor(after)
        later = (keys < key) | ((keys == key) & (found < position))
        found, keys = found[later], keys[later]
    more = len(found) > limit
    if more:
        least = np.partition(keys, len(keys) - limit)[len(keys) - limit]
        above = np.flatnonzero(keys > least)
        equal = np.flatnonzero(keys == least)
        chosen = np.concatenate([above, equal[len(equal) - (limit - len(above)) :]])
        found, keys = found[chosen], keys[chosen]
    order = np.lexsort((-found, -keys))
    found, keys = found[order], keys[order]
    return found.tolist(), f"{float(keys[-1])!r},{int(found[-1])}" if more else ""


def _cursor(text: str) -> tuple[float, int]:
    """Raises ConfigError."""
    key, _, position = text.partition(",")
    try:
        return float(key), int(position)
    except ValueError:
        raise ConfigError(f"after: {text!r} is not the end of a page") from None
