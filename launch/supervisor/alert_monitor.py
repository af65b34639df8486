"""The alerts of a run while it goes on: shown in its view, logged, appended to `alerts.jsonl`, and told to `run.on_alert`.

Invariants:
- What fired before a restart of the whole run is known from its rows, and is not written again.
- Nothing here ends a run: a file that cannot be read or written is a line in the log.
- Files are read and written in a thread.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
import time
from pathlib import Path

import msgspec

from ...common.tasks import in_thread
from ...configs import Config
from ...errors import DeadlineExceeded, StoreError, with_deadline
from ...monitor.alerts import (
    ALERTS,
    DISK,
    FALSE_REPLIES,
    NO_STEP,
    Alert,
    AlertBook,
    DiskForecast,
    read_alerts,
    unseen_in_rows,
)
from ...monitor.metrics import METRICS, MetricsTail
from ...monitor.terminal import View
from .alert_command import AlertCommand

log = logging.getLogger(__name__)

PERIOD_S = 2.0  # between two looks
LOOK_S = 30.0  # the longest that one may take


class AlertMonitor:
    """Follows the rows of the run in `run_dir`, and its disk. The supervisor sets `stalled`, which says that no step comes, and
    `lying`, which names replicas that were ended for false replies."""

    def __init__(self, run_dir: Path, config: Config, view: View) -> None:
        self.stalled = self.lying = ""
        self._run_dir = run_dir
        self._view = view
        self._book = AlertBook(config)
        self._command = AlertCommand(config.run.on_alert, run_dir)
        self._tail = MetricsTail(run_dir / METRICS)
        self._disk = DiskForecast()
        self._looking = threading.Lock()  # a look at a disk that hangs is abandoned, and goes on
        self._began = False
        self._warned = ""

    @property
    def active(self) -> frozenset[str]:
        """The rules whose alerts are active. From any thread."""
        return frozenset(self._book.active.copy())

    def configure(self, config: Config) -> None:
        """Another config is in force."""
        self._book.configure(config)

    async def watch(self) -> None:
        """Look every `PERIOD_S`, until cancelled."""
        while True:
            await self._check()
            await asyncio.sleep(PERIOD_S)

    async def finish(self) -> None:
        """Look once more, at the last steps of the run; none is due any more, and no replica."""
        self.stalled = self.lying = ""
        await self._check()

    async def close(self) -> None:
        """End the program of `run.on_alert`, after a moment for its last alerts."""
        await self._command.close()

    async def _check(self) -> None:
        looking, hint = in_thread(self._poll_alerts, "alerts"), f"is the disk of {self._run_dir} gone?"
        try:
            shown, changed = await with_deadline(
                LOOK_S, looking, who="the supervisor", waits_for="the rows of the run", hint=hint
            )
        except DeadlineExceeded as error:
            log.warning("%s", error)
            return
        for alert in shown:
            self._view.alert(alert)
        for alert in changed:
            self._command.submit(alert)

    def _poll_alerts(self) -> tuple[list[Alert], list[Alert]]:
        """What is shown and what is new: what fired since the last look and what is over. At first all that is active is shown."""
        if not self._looking.acquire(blocking=False):
            return [], []
        try:
            changed = [alert for row in self._tail.read() for alert in self._book.observe(row)]
            if not self._began:
                self._began = True
                old = unseen_in_rows(read_alerts(self._run_dir / ALERTS))  # of a supervisor that was killed
                over = [msgspec.structs.replace(alert, active=False) for alert in old]
                self._append(over)
                return list(self._book.active.values()), over
            now = time.time()
            changed += self._book.set(NO_STEP, self.stalled, now)
            changed += self._book.set(FALSE_REPLIES, self.lying, now)
            changed += self._book.set(DISK, self._disk.observe(now, shutil.disk_usage(self._run_dir).free), now)
            self._append(changed)
            return changed, changed
        except (OSError, StoreError) as error:
            self._warn(str(error))
            return [], []
        finally:
            self._looking.release()

    def _append(self, alerts: list[Alert]) -> None:
        if not alerts:
            return
        try:
            with (self._run_dir / ALERTS).open("ab") as file:
                file.write(b"".join(msgspec.json.encode(alert) + b"\n" for alert in alerts))
        except OSError as error:  # the view shows them nevertheless
            self._warn(str(error))

    def _warn(self, why: str) -> None:
        """Once, and again when the reason is another."""
        if why != self._warned:
            self._warned = why
            log.warning("alerts may be missing: %s", why)
