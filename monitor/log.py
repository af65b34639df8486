"""Logging: one line per record, named after the role. A role logs to stderr, which its launcher sends to a file; the supervisor,
whose stderr is the user's terminal, also logs to a file.

Invariants:
- Records of `slipstream` are logged from SLIPSTREAM_LOG (default INFO) upwards, those of other packages from WARNING upwards.
- `sys.stderr` is looked up for every record, so that the live view can catch records and draw around them.
- A traceback is logged once per handler; its repetitions are single lines, and most of them are dropped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import ConfigError

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
DISTINCT_TRACEBACKS = 1000  # distinct tracebacks that a handler remembers; it forgets all of them when there are more


class _Handler(logging.Handler):
    """Logs a traceback once; its repetitions are lines without it, at powers of two, with their number: 2nd, 4th, 8th, ... Two
    tracebacks are equal where the types of the errors and the lines of code are; messages may differ."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._tracebacks: Counter[tuple[object, ...]] = Counter()

    def handle(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if error is None:
            return bool(super().handle(record))
        key = (record.name, record.msg, *_lines_of(error))
        if len(self._tracebacks) >= DISTINCT_TRACEBACKS and key not in self._tracebacks:
            self._tracebacks.clear()
        self._tracebacks[key] += 1
        times = self._tracebacks[key]
        if times & (times - 1):
            return False
        if times > 1:
            message = f"{record.getMessage()} (traceback as above, {times} times so far): {error!r}"
            given = {"msg": message, "args": (), "exc_info": None, "exc_text": None}
            record = logging.makeLogRecord(record.__dict__ | given)
        return bool(super().handle(record))


def _lines_of(error: BaseException | None) -> Iterator[object]:
    """The type and the lines of code of an error and of its causes."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield type(error)
        for frame, line in traceback.walk_tb(error.__traceback__):
            yield frame.f_code.co_filename, line
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


class _CurrentStderr(_Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except (OSError, ValueError):  # the stream is closed or the record is malformed
            self.handleError(record)


class _File(_Handler, logging.FileHandler):
    """Writes to a file. Errors, for example of a full disk, are ignored: stderr has the warnings too."""

    def handleError(self, record: logging.LogRecord) -> None:
        return


def setup_logging(role: str) -> None:
    """Configure this process, first of all: replaces the handlers of the root logger. Raises ConfigError where SLIPSTREAM_LOG is
    not a level."""
    level = os.environ.get("SLIPSTREAM_LOG", "INFO").upper()
    if level not in LEVELS:
        raise ConfigError(f"SLIPSTREAM_LOG: {level!r} is not a level; allowed: {', '.join(LEVELS)}")
    handler = _prepared(_CurrentStderr(), role)
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("slipstream").setLevel(level)
    logging.captureWarnings(True)


@contextlib.contextmanager
def logged_to(path: Path, role: str) -> Iterator[None]:
    """Append records of `slipstream` to the file `path`, from INFO upwards, until the context ends; stderr still gets warnings."""
    ours = logging.getLogger("slipstream")
    handlers: list[logging.Handler] = []
    if not ours.hasHandlers():  # without this one Python's handler of last resort would stop writing warnings
        handlers.append(_CurrentStderr(logging.WARNING))
    path.parent.mkdir(parents=True, exist_ok=True)
    handlers.append(_prepared(_File(path), role))
    handlers[-1].setLevel(logging.INFO)
    level = ours.level
    ours.setLevel(min(level or logging.INFO, logging.INFO))
    for handler in handlers:
        ours.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            ours.removeHandler(handler)
            handler.close()
        ours.setLevel(level)


def _prepared(handler: logging.Handler, role: str) -> logging.Handler:
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)-7s [{role}] %(name)s: %(message)s", "%H:%M:%S"))
    return handler
