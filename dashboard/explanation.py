"""What `slipstream explain` says of a run, for the dashboard: computed apart from requests, kept, and computed again after new
steps.

    request ──> the newest that is known, at once        task ──> waits until it is due ──> `RunAccess.explain` ──> kept

Invariants:
- A request never waits for a simulation. There is one at a time in the whole server.
- A run that goes on is explained again only after new steps or alerts, and so seldom that it takes a twentieth of one core at most;
  a run that is over is explained once.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from ..errors import SlipstreamError
from ..monitor.alerts import ALERTS, Alert
from ..monitor.metrics import METRICS
from ..planner.explain.findings import NOTHING, Explanation, Finding, overrides_in
from ..planner.profile import SIMULATED
from .runs import WatchedRun

log = logging.getLogger(__name__)

LEAST_S = 10.0  # between the end of one explanation and the begin of the next
AGAIN = 20.0  # times what the last one took, likewise


class ShownFinding(msgspec.Struct, frozen=True):
    """A finding with the commands that go with it; `command` is empty where no command makes the change."""

    severity: str
    text: str
    change: str
    gain: str
    evidence: tuple[str, ...]
    command: str
    simulate: str


class ShownExplanation(msgspec.Struct, frozen=True):
    working: bool = False  # whether a newer one is being found
    known: bool = False  # whether there is one
    summary: str = ""
    alerts: tuple[Alert, ...] = ()
    findings: tuple[ShownFinding, ...] = ()
    note: str = ""  # why there are no findings, or no gains


def shown_explanation(found: Explanation, *, active: bool) -> ShownExplanation:
    """For the page, which is of a run that goes on where `active`."""
    nothing = NOTHING if found.measured is not None and not found.findings else ""
    return ShownExplanation(
        known=True,
        summary=found.summary,
        alerts=found.alerts,
        findings=tuple(_shown(one, found.run, active=active) for one in found.findings),
        note=found.note or nothing,
    )


def _shown(one: Finding, run: str, *, active: bool) -> ShownFinding:
    keys = overrides_in(one.change)
    known = bool(keys) and all(key.partition("=")[0] in SIMULATED for key in keys)
    simulate = f"slipstream simulate {shlex.quote(run)} {shlex.join(keys)}" if known else ""
    gain = str(one.gain) if one.gain else ""
    evidence = tuple(map(str, one.evidence))
    return ShownFinding(one.severity, one.text, one.change, gain, evidence, one.command(run, active=active), simulate)


class LiveExplanation:
    """Of one run; from the server's event loop. `turn` is that of the whole server, `found` is called after each explanation."""

    def __init__(self, run: WatchedRun, turn: asyncio.Lock, found: Callable[[], None]) -> None:
        self._run, self._turn, self._found = run, turn, found
        self._known = ShownExplanation()
        self._state: object = None  # what the run was like as it was explained last
        self._due = 0.0  # when it may be explained again
        self._task: asyncio.Task[None] | None = None

    def newest(self) -> ShownExplanation:
        """What is known; starts to find a newer one where the run has changed since."""
        if (self._task is None or self._task.done()) and self._state != self._state_of_run():
            self._task = asyncio.create_task(self._find())
        working = self._task is not None and not self._task.done()
        return msgspec.structs.replace(self._known, working=working)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _find(self) -> None:
        await asyncio.sleep(max(0.0, self._due - time.monotonic()))
        async with self._turn:
            state, active, began = self._state_of_run(), self._run.is_active(), time.monotonic()
            try:
                self._known = shown_explanation(await self._run.access.explain(self._run.folder), active=active)
            except (SlipstreamError, OSError) as error:
                log.warning("%s is not explained: %s", self._run.name, error)
                self._known = ShownExplanation(known=True, note=f"not explained: {error}")
            now = time.monotonic()
            self._state, self._due = state, now + max(LEAST_S, AGAIN * (now - began))
        self._run.explained += 1  # the page asks again
        self._found()

    def _state_of_run(self) -> object:
        """What an explanation depends on."""
        return self._run.is_active(), *(_size(self._run.folder / name) for name in (METRICS, ALERTS))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
