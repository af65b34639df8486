"""`slipstream bench dashboard`: the dashboard on a store of a million trajectories: its index, a page of a list, and a long
trajectory."""

from __future__ import annotations

import itertools
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import psutil

from ..buffer.admission import ReplayCounters
from ..buffer.encoded import EncodedTrajectory
from ..buffer.schema import DATABASE, SCHEMA, SCHEMA_VERSION
from ..buffer.segments import segments_path
from ..buffer.trajectory import FINISHED, Trajectory, Turn, VersionSpan
from ..dashboard.index import TrajectoryIndex, TrajectoryQuery
from ..dashboard.store import StoreReader
from ..dashboard.texts import TokenTexts
from ..dashboard.trajectory import WINDOW, TrajectoryReader
from .result import Result, Row

TRAJECTORIES, MEMBERS = 1_000_000, 16
LONG = 200_000  # tokens of one trajectory, whose windows are read
TURNS = 4  # of each of the others
AT_ONCE = 20_000
TIMES = 5  # each request, of which the median counts


async def dashboard(folder: Path) -> Result:
    """What the page asks for over the plainest query for the same, in one process."""
    write_store(folder, TRAJECTORIES)
    store = StoreReader(folder, lambda: False)
    process = psutil.Process()
    before = process.memory_info().rss
    index = TrajectoryIndex(store)
    began = time.process_time()
    index.page(TrajectoryQuery())
    indexed_s = time.process_time() - began
    memory = (process.memory_info().rss - before) / (1 << 20)
    bare_s = _cpu(lambda: _count_rows(folder, "SELECT rowid, header, length FROM trajectories"))
    rows = [
        Row(
            "the index of all",
            indexed_s,
            bare_s,
            "s of CPU",
            f"{TRAJECTORIES:,} rows, {memory:.0f} MiB; floor: the rows are read",
        )
    ]
    first = index.page(TrajectoryQuery(sort="reward"))
    bare = "SELECT id FROM trajectories"
    requests = (
        ("newest 50", TrajectoryQuery(), "ORDER BY rowid DESC LIMIT 50"),
        (
            "filter and sort",
            TrajectoryQuery(sort="tokens", reward_min=0.5),
            "WHERE reward >= 0.5 ORDER BY length DESC LIMIT 50",
        ),
        ("next page", TrajectoryQuery(sort="reward", after=first.next), "ORDER BY reward DESC LIMIT 50 OFFSET 50"),
    )
    for name, query, sql in requests:
        page_s = _median(lambda query=query: index.page(query))
        sql_s = _median(lambda sql=sql: _count_rows(folder, f"{bare} {sql}"))
        rows.append(Row(name, 1e3 * page_s, 1e3 * sql_s, "ms", "floor: SQLite, which has no index for it"))
    reader, long = TrajectoryReader(store, TokenTexts(folder, "")), "0.0.0.0"
    head_s = _median(lambda: reader.describe(long, 900))
    window_s = _median(lambda: reader.window(long, LONG // 2, LONG // 2 + WINDOW))
    read_s = _median(lambda: next(segments_path(folder / DATABASE).iterdir()).read_bytes())
    rows.append(
        Row("open a long trajectory", 1e3 * head_s, 1e3 * read_s, "ms", f"{LONG:,} tokens; floor: its bytes are read")
    )
    rows.append(Row("a window of it", 1e3 * window_s, 1e3 * read_s, "ms", f"{WINDOW:,} tokens, without their texts"))
    return Result("the dashboard over plain reads", "dashboard", "plain", tuple(rows))


def write_store(folder: Path, trajectories: int) -> None:
    """A store of settled groups, by SQL: the run that would make it takes days. Its first trajectory has `LONG` tokens."""
    rng = np.random.default_rng(0)
    with sqlite3.connect(folder / DATABASE) as db:
        db.executescript(SCHEMA)
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        groups = trajectories // MEMBERS
        counters = ReplayCounters(groups, served=groups, checkpointed=groups)
        db.execute("INSERT INTO counters VALUES (0, ?)", (msgspec.json.encode(counters).decode(),))
        for first in range(0, trajectories, AT_ONCE):
            rewards, tokens = rng.random(AT_ONCE), rng.integers(100, 4000, AT_ONCE)
            ids = [(n // MEMBERS, n % MEMBERS) for n in range(first, first + AT_ONCE)]
            made = [_header(g, m, float(r), int(n)) for (g, m), r, n in zip(ids, rewards, tokens, strict=True)]
            settled = [(g, 0, g, "trained", 0, "", g, g + 1, None, None, None) for g, m in ids if not m]
            db.executemany(f"INSERT INTO groups VALUES ({', '.join('?' * 11)})", settled)
            episodes = [
                (f"{g}.0.{m}", g, "w", "trained", 10, "{}", "{}", 1, 1, None, 0, "", None, None) for g, m in ids
            ]
            db.executemany(f"INSERT INTO episodes VALUES ({', '.join('?' * 14)})", episodes)
            rows = [
                (f"{g}.0.{m}.0", f"{g}.0.{m}", g, r, h, n, None, 0)
                for (g, m), r, n, h in zip(ids, rewards, tokens.tolist(), made, strict=True)
            ]
            db.executemany(f"INSERT INTO trajectories VALUES ({', '.join('?' * 8)})", rows)
        long = EncodedTrajectory.of(_long())
        update = "UPDATE trajectories SET header = ?, length = ?, arrays = 0, bytes = ? WHERE id = '0.0.0.0'"
        db.execute(update, (long.header, LONG, long.arrays.nbytes))
    segments = segments_path(folder / DATABASE)
    segments.mkdir()
    (segments / f"{0:016x}").write_bytes(long.arrays.tobytes())


def _header(group: int, member: int, reward: float, tokens: int) -> bytes:
    ends = np.linspace(50, tokens, TURNS + 1).astype(int).tolist()
    turns = tuple(Turn(a, b, "stop", 1.8e9, 0.01, 0.05, 0.5, a, "engine-0") for a, b in itertools.pairwise(ends))
    spans = tuple(VersionSpan(turn.start, turn.end, max(0, group - turn.start % 3)) for turn in turns)
    return EncodedTrajectory.of(_trajectory(group, member, reward, spans, turns, 1)).header


def _trajectory(
    group: int, member: int, reward: float, spans: tuple[VersionSpan, ...], turns: tuple[Turn, ...], tokens: int
) -> Trajectory:
    mask = np.zeros(tokens, dtype=np.bool_)
    for span in spans:
        mask[span.start : span.end] = True
    return Trajectory(
        id=f"{group}.0.{member}.0",
        group_id=group,
        member=member,
        branch=0,
        task_id=f"task-{group}",
        env="env",
        version_spans=spans,
        turns=turns,
        reward=reward,
        turn_rewards=(reward,),
        outcome=FINISHED,
        timings={"total": 12.5},
        token_ids=np.zeros(tokens, dtype=np.int32),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
    )


def _long() -> Trajectory:
    edges = np.linspace(500, LONG, 101).astype(int).tolist()
    turns = tuple(Turn(a, b - 100, "stop") for a, b in itertools.pairwise(edges))
    return _trajectory(0, 0, 1.0, tuple(VersionSpan(t.start, t.end, 0) for t in turns), turns, LONG)


def _count_rows(folder: Path, sql: str) -> int:
    """The rows of a query, one by one; returns how many."""
    with sqlite3.connect(folder / DATABASE) as db:
        return sum(1 for _ in db.execute(sql))


def _cpu(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _median(work: Callable[[], object]) -> float:
    taken = []
    for _ in range(TIMES):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return sorted(taken)[TIMES // 2]
