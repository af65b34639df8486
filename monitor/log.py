"""Logging: one line per record, named after the role. A role process logs to stderr, which its launcher sends to a file; the
supervisor, whose stderr is a person's terminal, also to a file of its own.

Invariants:
- Ours is logged from SLIPSTREAM_LOG (default INFO) upwards, everybody else's from WARNING upwards.
- The stream is looked up at each record, so that the live view can catch it and draw around it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from ..errors import ConfigError

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


class _CurrentStderr(logging.Handler):
    """Writes to whatever `sys.stderr` is now."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except (OSError, ValueError):  # the stream is gone or the record is malformed; logging's own way to say so
            self.handleError(record)


class _File(logging.FileHandler):
    """Writes to a file. One that cannot be written, on a full disk for example, changes nothing: there is still the terminal."""

    def handleError(self, record: logging.LogRecord) -> None:
        return


def setup_logging(role: str) -> None:
    """Configure this process: replaces the handlers of the root logger. Call once, first thing in a process.

    Raises:
        ConfigError: SLIPSTREAM_LOG is not a level.
    """
    level = os.environ.get("SLIPSTREAM_LOG", "INFO").upper()
    if level not in LEVELS:
        raise ConfigError(f"SLIPSTREAM_LOG: {level!r} is not a level; allowed: {', '.join(LEVELS)}")
    handler = _CurrentStderr()
    handler.setFormatter(_formatter(role))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("slipstream").setLevel(level)
    logging.captureWarnings(True)


@contextlib.contextmanager
def logged_to(path: Path, role: str) -> Iterator[None]:
    """While it lasts, what is ours is appended to the file `path`, from INFO upwards; warnings still reach stderr."""
    ours = logging.getLogger("slipstream")
    handlers: list[logging.Handler] = []
    if not ours.hasHandlers():  # then Python's last resort has written them, which ends with the first handler
        handlers.append(_CurrentStderr(logging.WARNING))
    path.parent.mkdir(parents=True, exist_ok=True)
    handlers.append(_File(path))
    handlers[-1].setLevel(logging.INFO)
    handlers[-1].setFormatter(_formatter(role))
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


def _formatter(role: str) -> logging.Formatter:
    return logging.Formatter(f"%(asctime)s %(levelname)-7s [{role}] %(name)s: %(message)s", "%H:%M:%S")
