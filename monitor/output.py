"""Writing to stdout and stderr when the reader may go away, as in `slipstream train quickstart | head -3`.

Invariants:
- A closed pipe never ends a command: its file descriptor then points at /dev/null, and the log has one line about it.
- What no terminal shows has no width: tables have all of their columns, and no line is folded.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import IO, Any

from rich.console import Console

log = logging.getLogger(__name__)


UNLIMITED = 10_000  # columns of what no terminal shows


class PipeSafeConsole(Console):
    """A rich console that keeps going after its reader has closed the pipe, and folds lines only for a terminal."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if not self.is_terminal:
            self.width = UNLIMITED

    def on_broken_pipe(self) -> None:
        self.quiet = True
        discard_output(self.file)


def open_console(*, stderr: bool = False) -> Console:
    """A console on stdout or stderr that prints numbers without highlighting."""
    return PipeSafeConsole(stderr=stderr, highlight=False)


def print_line(text: str) -> None:
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output(sys.stdout)


def flush_stdout() -> None:
    """Flush what is buffered before the interpreter does, which would complain about a closed pipe."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output(sys.stdout)


def discard_output(stream: IO[str]) -> None:
    """Point the file descriptor of a stream whose reader is gone at /dev/null; what the stream has buffered goes there too."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
    log.warning("the reader of %s has closed it; the command goes on without printing", stream.name)


def print_notice(text: str) -> None:
    """Print one line on stderr: something that the user may not expect, and that is no error."""
    with contextlib.suppress(BrokenPipeError):
        sys.stderr.write(f"slipstream: {text}\n")
