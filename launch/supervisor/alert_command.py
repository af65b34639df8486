"""The program of `run.on_alert`, started for each line of `alerts.jsonl`.

    alert ──> at most `WAITING` ──> one program at a time, the line on its stdin ──after `LIMIT_S`──> its process group is killed

Invariants:
- The run never waits for it, and its output cannot keep the event loop busy: what it writes to stderr is read `PAUSE_S` apart.
- Alerts come in their order: none is over before the program was told that it fired.
- Nothing of its process group outlives it, and it does not outlive the run.
- A failure is a line in the log, again only where it is another one. It ends nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from ...errors import DeadlineExceeded, describe, with_deadline
from ...monitor.alerts import Alert
from ..launchers.local import kill_group

log = logging.getLogger(__name__)

LIMIT_S = 30.0  # how long the program may take for one alert
LAST_S = 5.0  # how long it may take after the run for all alerts that wait
WAITING = 64  # alerts that wait for it
CHUNK = 1 << 16  # bytes of its stderr that are read at once: a full pipe
PAUSE_S = 0.05  # between two reads
TAIL = 4096  # bytes at the end of its stderr that are kept, for the last line
QUOTED = 200  # characters of that line in the log


class AlertCommand:
    """Starts `command`, a program and its arguments, for alerts of the run in `run_dir`; without a command it does nothing."""

    def __init__(self, command: Sequence[str], run_dir: Path) -> None:
        self._command = tuple(command)
        self._run = str(run_dir)
        self._waiting: deque[Alert] = deque()
        self._working: asyncio.Task[None] | None = None
        self._warned = ""

    def submit(self, alert: Alert) -> None:
        """Start the program for `alert` after those before it. Call it in the event loop; it returns at once."""
        if not self._command:
            return
        if len(self._waiting) >= WAITING:
            self._warn(f"{WAITING} alerts wait for {self._command[0]}; more are only in alerts.jsonl")
            return
        self._waiting.append(alert)
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work(), name="on_alert")

    async def close(self) -> None:
        """Let the program take `LAST_S` for the alerts that wait, then kill it."""
        if self._working is None:
            return
        who, waits_for = "the supervisor", f"{self._command[0]} of run.on_alert"
        try:
            await with_deadline(LAST_S, self._working, who=who, waits_for=waits_for, hint="it is killed")
        except DeadlineExceeded:
            others = f", and {len(self._waiting)} alerts that waited are only in alerts.jsonl" if self._waiting else ""
            self._warn(f"{self._command[0]} was killed {LAST_S:g} s after the end of the run{others}")

    async def _work(self) -> None:
        while self._waiting:
            try:
                problem = await self._execute(self._waiting.popleft())
            except Exception as error:  # no process, no pipe
                problem = f"{self._command[0]} cannot be started: {describe(error)}"
            if problem:
                self._warn(problem)

    async def _execute(self, alert: Alert) -> str:
        """Run the program to its end; what went wrong, empty where nothing did. Raises OSError where it cannot be started."""
        line = msgspec.json.encode({"run": self._run, **msgspec.to_builtins(alert)}) + b"\n"
        # The wrapper has the kernel kill the program when this process is killed.
        command = (sys.executable, "-m", "slipstream.common.process", *self._command)
        with _full_pipe(line) as stdin, _StderrTail() as stderr:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=stdin, stdout=asyncio.subprocess.DEVNULL, stderr=stderr.inlet, start_new_session=True
            )
            stderr.listen()
            who, waits_for = f"{self._command[0]} of run.on_alert", f"its end after the alert {alert.rule}"
            try:
                status = await with_deadline(LIMIT_S, process.wait(), who=who, waits_for=waits_for, hint="it is killed")
            except DeadlineExceeded:
                return f"{self._command[0]} took longer than {LIMIT_S:g} s for an alert and was killed"
            finally:
                await kill_group(process.pid, process.wait(), who="run.on_alert")
            return "" if status == 0 else f"{_status_text(self._command[0], status)}{stderr.last_line()}"

    def _warn(self, why: str) -> None:
        """Once, and again when the reason is another."""
        if why != self._warned:
            self._warned = why
            log.warning("run.on_alert: %s", why)


def _status_text(program: str, status: int) -> str:
    how = f"signal {-status}" if status < 0 else f"exit status {status}"
    return f"{program} ended with {how}"


@contextlib.contextmanager
def _full_pipe(line: bytes) -> Iterator[int]:
    """A descriptor to read `line` from, and then the end; a pipe holds it whether it is read or not."""
    outlet, inlet = os.pipe()
    try:
        try:
            os.set_blocking(inlet, False)
            os.write(inlet, line)
        finally:
            os.close(inlet)
        yield outlet
    finally:
        os.close(outlet)


class _StderrTail:
    """A pipe, of which the last `TAIL` bytes are kept. A context manager."""

    def __init__(self) -> None:
        self._outlet, self.inlet = os.pipe()
        self._tail = b""
        self._pause: asyncio.TimerHandle | None = None

    def __enter__(self) -> _StderrTail:
        os.set_blocking(self._outlet, False)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._close_inlet()
        os.close(self._outlet)

    def listen(self) -> None:
        """The program has its end of the pipe."""
        self._close_inlet()
        asyncio.get_running_loop().add_reader(self._outlet, self._readable)

    def last_line(self) -> str:
        """`: ` and the last line that says something, empty where none does. The program has ended."""
        self._stop()
        self._read()  # all that a pipe holds
        lines = self._tail.decode(errors="replace").split("\n")
        found = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f": {found[:QUOTED]}" if found else ""

    def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._outlet)
        if self._read() != b"":
            self._pause = loop.call_later(PAUSE_S, loop.add_reader, self._outlet, self._readable)

    def _read(self) -> bytes | None:
        """What there is, None where nothing is, empty at the end."""
        try:
            data = os.read(self._outlet, CHUNK)
        except BlockingIOError:
            return None
        self._tail = (self._tail + data)[-TAIL:]
        return data

    def _stop(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
        asyncio.get_running_loop().remove_reader(self._outlet)

    def _close_inlet(self) -> None:
        if self.inlet >= 0:
            os.close(self.inlet)
            self.inlet = -1
