"""The dashboard's page of environments: what their calls and tools took in the newest episodes, and which episodes failed and
why."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from ..buffer.trajectory import UNWANTED, EnvCall, Outcome
from .index import TrajectoryIndex
from .store import StoreReader

NEWEST = 500  # trajectories whose calls are counted
LOOKED_AT = 20_000  # newest episodes among which failed ones are looked for
FAILURES = 50  # shown
HAS_FAILED = f"""e.outcome LIKE '{{"kind":"failed"%' AND json_extract(e.outcome, '$.reason') <> '{UNWANTED}'"""
FAILED = (
    "SELECT e.id, e.group_id, e.outcome, e.worker, e.length, e.delivered_time FROM {part}.episodes e"
    " WHERE e.rowid > (SELECT max(rowid) FROM {part}.episodes) - ?"
    f" AND {HAS_FAILED} ORDER BY e.rowid DESC LIMIT ?"
)


class CalledHeader(msgspec.Struct, frozen=True):
    """The parts of a `TrajectoryHeader` about its calls."""

    env: str
    env_calls: tuple[EnvCall, ...] = ()
    timings: dict[str, float] = {}


def environments(index: TrajectoryIndex, store: StoreReader) -> dict[str, Any]:
    """Raises StoreError."""
    if not store.exists:
        return {"environments": [], "calls": [], "failures": [], "newest": 0}
    with store.open() as db:
        headers = db.newest("header", NEWEST)
        failed = db.newest_first(FAILED, FAILURES, LOOKED_AT // len(db.parts))
    decode = msgspec.msgpack.Decoder(CalledHeader).decode
    took: dict[tuple[str, str, str], list[float]] = {}
    errors: dict[tuple[str, str, str], int] = {}
    total_s: dict[str, float] = {}
    for header in headers:
        h = decode(memoryview(header)[1:])
        if h.env_calls:
            total_s[h.env] = total_s.get(h.env, 0.0) + h.timings.get("total", 0.0)
        for call in h.env_calls:
            key = h.env, call.what, call.tool
            took.setdefault(key, []).append(call.end - call.begin)
            errors[key] = errors.get(key, 0) + bool(call.error)
    calls = [_row(key, seconds, errors[key], total_s[key[0]]) for key, seconds in took.items()]
    return {
        "environments": index.environments(),
        "calls": sorted(calls, key=lambda row: -row["share"]),
        "failures": [_failure(*row) for row in failed],
        "newest": len(headers),
    }


def _row(key: tuple[str, str, str], seconds: list[float], errors: int, total_s: float) -> dict[str, Any]:
    env, what, tool = key
    half, most = np.quantile(seconds, (0.5, 0.95)).tolist()
    share = sum(seconds) / total_s if total_s else 0.0  # of the time of its episodes; a step includes its tools
    return {
        "env": env,
        "what": what,
        "tool": tool,
        "calls": len(seconds),
        "errors": errors,
        "p50": half,
        "p95": most,
        "share": share,
    }


def _failure(id: str, group: int, outcome: str, worker: str, length: int, delivered: float | None) -> dict[str, Any]:
    found = msgspec.json.decode(outcome, type=Outcome)
    return {
        "id": id,
        "group": group,
        "reason": found.reason,
        "detail": found.detail,
        "worker": worker,
        "tokens": length,
        "time": delivered,
    }
