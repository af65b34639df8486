"""Logging of a role process: one line per record, named after the role, to stderr.

Invariants:
- Ours is logged from SLIPSTREAM_LOG (default INFO) upwards, everybody else's from WARNING upwards.
- The stream is looked up at each record, so that the live view can catch it and draw around it.
"""

from __future__ import annotations

import logging
import os
import sys

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


def setup_logging(role: str) -> None:
    """Configure this process: replaces the handlers of the root logger. Call once, first thing in a process.

    Raises:
        ConfigError: SLIPSTREAM_LOG is not a level.
    """
    level = os.environ.get("SLIPSTREAM_LOG", "INFO").upper()
    if level not in LEVELS:
        raise ConfigError(f"SLIPSTREAM_LOG: {level!r} is not a level; allowed: {', '.join(LEVELS)}")
    handler = _CurrentStderr()
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)-7s [{role}] %(name)s: %(message)s", "%H:%M:%S"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("slipstream").setLevel(level)
    logging.captureWarnings(True)
