"""The dashboard's answers about a run: those of its server and those in an exported page are the same.

    GET /api/runs/RUN/PATH?QUERY  ──>  READS[PATH](run, Question(parts of the path, query))  ──>  JSON

Invariants:
- An answer is read from the files of the run; nothing is written, and no request changes anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ..errors import ConfigError, StoreError
from ..monitor.series import EVALUATIONS, outcomes, read_evaluations
from .curves import corrections
from .environments import environments
from .index import TrajectoryQuery
from .processes import log_tail, logs, processes
from .ratios import ratios
from .runs import WatchedRun
from .trajectory import WINDOW, TrajectoryReader


class Question(msgspec.Struct, frozen=True):
    """`parts` are those of the path by their names, `query` what stands behind its `?`."""

    parts: Mapping[str, str] = {}
    query: Mapping[str, str] = {}


Read = Callable[[WatchedRun, Question], Any]
"""The answer to one question about one run, or an awaitable of it; in a thread. Raises SlipstreamError or OSError."""


def _number(question: Question, name: str, default: int) -> int:
    """Raises ConfigError."""
    text = question.query.get(name, str(default))
    if not text.isdecimal() or len(text) > 9:
        raise ConfigError(f"{name}: {text!r} is not a number")
    return int(text)


def _time(question: Question, name: str) -> float | None:
    """Seconds since the epoch. Raises ConfigError."""
    text = question.query.get(name)
    try:
        found = None if text is None else float(text)
    except ValueError:
        found = math.nan
    if found is not None and not math.isfinite(found):
        raise ConfigError(f"{name}: {text!r} is no time")
    return found


def _trajectories(run: WatchedRun, question: Question) -> Any:
    given = {name: value for name, value in question.query.items() if value}
    query = msgspec.convert(given, TrajectoryQuery, strict=False)
    return run.indexes[query.source].page(query)


def _reader(run: WatchedRun, question: Question) -> TrajectoryReader:
    return run.reader_of(question.query.get("source", "training"))


def _trajectory(run: WatchedRun, question: Question) -> Any:
    return _reader(run, question).describe(question.parts["id"], _number(question, "bins", 600))


def _tokens(run: WatchedRun, question: Question) -> Any:
    start = _number(question, "start", 0)
    return _reader(run, question).window(question.parts["id"], start, _number(question, "end", start + WINDOW))


def _messages(run: WatchedRun, question: Question) -> Any:
    return _reader(run, question).messages(question.parts["id"])


def _group(run: WatchedRun, question: Question) -> Any:
    return _reader(run, question).group(int(question.parts["group"]))


def _curves(run: WatchedRun, question: Question) -> Any:
    return run.metrics.columns([name for name in question.query.get("names", "").split(",") if name])


def _present(run: WatchedRun, _: Question) -> Any:
    """Curves can be read where the store cannot, for example one of an older version of the program."""
    found: dict[str, Any] = {"newest": None, "evaluations": [], "problem": ""}
    try:
        found["newest"] = run.index.newest()
        found["evaluations"] = read_evaluations(run.folder / EVALUATIONS)
    except StoreError as error:
        found["problem"] = str(error)
    return run.summary() | found | {"alerts": run.alerts(), "yaml": run.yaml()}


def _staleness(run: WatchedRun, _: Question) -> Any:
    return corrections(run.metrics.rows(), run.largest_bound())


def _ratios(run: WatchedRun, _: Question) -> Any:
    return ratios(run.folder, run.store)


def _timeline(run: WatchedRun, question: Question) -> Any:
    t0, t1 = (_time(question, name) for name in ("t0", "t1"))
    return run.timeline.window(t0, t1)


def _batch(run: WatchedRun, question: Question) -> Any:
    return run.timeline.batch(int(question.parts["version"]))


def _environments(run: WatchedRun, _: Question) -> Any:
    return environments(run.index, run.store) | {"outcomes": outcomes(run.metrics.rows())}


def _accounts(run: WatchedRun, _: Question) -> Any:
    return run.accounts.read() if run.store.exists else None


def _processes(run: WatchedRun, _: Question) -> Any:
    return {"processes": processes(run.gauges), "logs": logs(run.folder)}


def _log(run: WatchedRun, question: Question) -> Any:
    return log_tail(run.folder, question.parts["name"])


def _status(run: WatchedRun, _: Question) -> Any:
    return run.access.status(run.folder)


READS: dict[str, Read] = {
    "now": _present,
    "curves": _curves,
    "trajectories": _trajectories,
    r"trajectories/{id:\d+\.\d+\.\d+\.\d+}": _trajectory,
    r"trajectories/{id:\d+\.\d+\.\d+\.\d+}/tokens": _tokens,
    r"trajectories/{id:\d+\.\d+\.\d+\.\d+}/messages": _messages,
    r"groups/{group:\d{1,18}}": _group,
    "staleness": _staleness,
    "ratios": _ratios,
    "timeline": _timeline,
    r"batches/{version:\d{1,18}}": _batch,
    "tokens": _accounts,
    "environments": _environments,
    "processes": _processes,
    "status": _status,
    "logs/{name}": _log,
}
"""By the path behind `/api/runs/RUN/`."""
