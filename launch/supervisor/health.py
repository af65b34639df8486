"""The supervisor's health monitor: it receives the roles' heartbeats, and ends every role that falls silent.

Invariants:
- A role that is silent for `launch.heartbeat_s` is killed once, and the reason names its last reported wait. `ProcessManager`
  restarts it, and probes the servers that send no heartbeats. Those that others started are only missed.
- Time in which this process stood still, because it was stopped or its event loop was held up, counts as the silence of no role:
  what the roles sent meanwhile is handled first.
- A message that is no signal of a role of this run, or not of the role that sent it, changes nothing. Only the learner speaks of
  steps, checkpoints and replicas.
- However many messages arrive, the event loop turns now and then.
- A wait is reported once: when it is older than `OLD_S` and than half its deadline. Its kind is reported again only after no wait
  of that kind was that old.
- What is wrong now beside the steps of the run is set in `AlertMonitor`: no step comes, a replica lies.
- A run without steps is reported once, until the next step. No step is due before the first two and after the last one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence

import msgspec

from ...common.waits import Wait, current_waits
from ...monitor.terminal import View
from ...monitor.text import printable
from ...rpc.server import RpcRequest, RpcServer
from .access import REQUESTING
from .alert_monitor import AlertMonitor
from .heartbeat import Heartbeat, RoleFailed, RoleMessage, RoleSignal, StepReported, StepSummary
from .processes import PROBE_S, ProcessManager, RoleProcess
from .replicas import ReplicaManager

log = logging.getLogger(__name__)

GATHER_S = 0.01  # how long a signal may wait for others: the event loop turns for all of them at once
OLD_S = 60.0  # younger waits are not reported
STALL_S = 60.0  # shortest time without a step that is reported
STALL_FACTOR = 5.0  # a run without a step for this many times the slowest of the last `STEPS` steps has stalled
STEPS = 16
GROWTH = 2.0  # a step counts for at most this many times the slowest before it, so that one hang does not hide the next
NAMED_WAITS = 3  # waits that are named when a run has stalled


class RoleWait(msgspec.Struct, frozen=True):
    """A wait of `role`, with its age as of now; the role reported it `heard_s` seconds ago."""

    role: str
    wait: Wait
    heard_s: float

    def __str__(self) -> str:
        return f"{self.role}: {self.wait}"


class WaitWatchdog:
    """Takes steps and waits, returns what to report. Pure; times are of one clock, in seconds."""

    def __init__(self) -> None:
        self.stalled = ""  # since when there is no step and what is waited for, where one is overdue
        self._reported: set[tuple[str, str]] = set()
        self._steps: deque[float] = deque(maxlen=STEPS)
        self._last_step: float | None = None

    def stepped(self, now: float) -> None:
        if self._last_step is not None:
            seconds = now - self._last_step
            self._steps.append(min(seconds, GROWTH * max(self._steps, default=seconds)))
        self._last_step, self.stalled = now, ""

    def pause(self) -> None:
        """No step is due until there is one."""
        self._last_step, self.stalled = None, ""

    def check(self, waits: Sequence[RoleWait], now: float) -> list[str]:
        """The lines to report about the waits of all roles."""
        old = {(row.role, row.wait.kind): row for row in waits if _is_old(row.wait)}
        lines = [f"{row} already" for key, row in old.items() if key not in self._reported]
        self._reported = set(old)
        if self._last_step is None or not self._steps or self.stalled:
            return lines
        slowest, age = max(self._steps), now - self._last_step
        if age > max(STALL_S, STALL_FACTOR * slowest):
            oldest = "; ".join(map(str, by_age(waits)[:NAMED_WAITS])) or "no process reports a wait"
            self.stalled = f"no step for {age:.0f} s, the slowest before took {slowest:.0f} s; {oldest}"
            lines.append(self.stalled)
        return lines


class HealthMonitor:
    """Watches the roles of `processes`, the engines of `replicas` among them; `silence_s` is how long a role may be silent. A run
    without steps is an alert of `alerts`, where there are any, instead of an event."""

    def __init__(
        self,
        processes: ProcessManager,
        replicas: ReplicaManager,
        silence_s: float,
        view: View,
        alerts: AlertMonitor | None = None,
    ) -> None:
        self._roles = processes.roles
        self._replicas = replicas
        self._silence_s = silence_s
        self._view = view
        self._alerts = alerts
        self._watchdog = WaitWatchdog()
        self.last_step: StepSummary | None = None  # that the learner reported
        self.foreign = 0  # signals that were dropped

    async def listen(self, server: RpcServer[RoleSignal]) -> None:
        async for request in server.arriving(GATHER_S):
            self._receive(request)

    def _receive(self, request: RpcRequest[RoleSignal]) -> None:
        now, signal = time.monotonic(), request.message
        role = self._roles.get(signal.role)
        if role is None or request.sender not in (None, signal.role):
            self.foreign += 1
            if self.foreign & (self.foreign - 1) == 0:
                sender = request.sender or "a process without a key"
                log.warning("dropped signal %d of %r, which is no role, or not %s", self.foreign, signal.role, sender)
            return
        if not (isinstance(signal, Heartbeat) and signal.stuck_at):
            role.last_seen = now
            if role.deadline != float("inf"):
                role.deadline = now + self._silence_s
        match signal:
            case Heartbeat():
                self._take(role, signal, now)
            case StepReported(summary=summary) if role.kind == "learner":
                self._watchdog.stepped(now)
                self.last_step = summary
                self._view.step(msgspec.structs.asdict(summary))
            case RoleMessage(text=text):
                self._view.event(f"{role.name}: {printable(text)}")
            case RoleFailed(text=text, expected=expected):
                role.error, role.expected = printable(text), expected
            case _:
                log.warning("dropped a step that %s reports, which is no learner", role.name)

    def _take(self, role: RoleProcess, beat: Heartbeat, now: float) -> None:
        role.waits, role.waits_at, role.stuck_at = beat.waits, now, beat.stuck_at
        if beat.state != "starting" and not role.ready.is_set():
            role.ready.set()
            self._view.status(role.name, "ready")
        if role.kind in REQUESTING:
            self._replicas.suspect(role.name, beat.false_replies)
        if role.kind == "learner":
            self._take_learner(role, beat)

    def _take_learner(self, role: RoleProcess, beat: Heartbeat) -> None:
        if beat.state == "done" and not role.done.is_set():
            role.done.set()
            role.saved.set()
            self._watchdog.pause()
            self._view.status(role.name, "done")
        if beat.checkpoint != role.checkpoint:
            role.checkpoint = beat.checkpoint
            role.saved.set()
        if beat.replicas:
            self._replicas.update(*beat.replicas)

    async def watch(self) -> None:
        """Kill the roles that are silent, and report remarkable waits, until cancelled."""
        period = min(PROBE_S, self._silence_s / 4)
        while True:
            due = time.monotonic() + period
            await asyncio.sleep(period)
            now = time.monotonic()
            late = now - due
            for role in self._roles.values():
                role.deadline += late if role.last_seen < due else 0.0
            silent = [role for role in self._roles.values() if role.process and now > role.deadline]
            for role in silent:
                role.error = role.error or _silence(role, now)
                if role.external is None:
                    self._view.event(f"{role.name} is killed: {role.error}")
                role.deadline = float("inf")
            await asyncio.gather(*(role.process.kill() for role in silent if role.process))
            if late > period:  # what the roles wait for was heard before that
                continue
            for line in self._watchdog.check(self.waits(), time.monotonic()):
                if self._alerts is None or line != self._watchdog.stalled:
                    self._view.event(line)
            if self._alerts is not None:
                self._alerts.stalled, self._alerts.lying = self._watchdog.stalled, self._replicas.distrusted

    def waits(self) -> list[RoleWait]:
        """What every role and this process wait for now, oldest first; for a role without waits the supervisor's wait for its next
        sign of life."""
        now = time.monotonic()
        own = [RoleWait("supervisor", wait, 0.0) for wait in current_waits()]
        return by_age([*own, *(row for role in self._roles.values() for row in _waits_of(role, now))])


def _silence(role: RoleProcess, now: float) -> str:
    seconds = f"{now - role.last_seen:.0f} s"
    if role.probe:
        return f"it did not answer for {seconds}{'' if role.ready.is_set() else ' since its start'}"
    stuck = f", its event loop stuck at {role.stuck_at}" if role.stuck_at else ""
    known = [row.wait for row in _waits_of(role, now)] if role.waits else []
    waited = str(max(known, key=lambda wait: wait.age_s)) if known else "it waited for nothing"
    return f"silent for {seconds}{stuck}; {waited}"


def _waits_of(role: RoleProcess, now: float) -> Iterator[RoleWait]:
    """The waits of a running role, aged since it reported them."""
    if not role.running or role.leader:
        return
    silent = now - role.last_seen
    if not role.waits or role.probe:
        limit = None if role.deadline == float("inf") else role.deadline - role.last_seen
        sign = "answer" if role.probe else "sign of life"
        which = "next" if role.ready.is_set() else "first"
        yield RoleWait(role.name, Wait("the supervisor", f"its {which} {sign}", silent, limit), silent)
    for wait in role.waits:
        yield RoleWait(role.name, msgspec.structs.replace(wait, age_s=wait.age_s + now - role.waits_at), silent)


def by_age(waits: Sequence[RoleWait]) -> list[RoleWait]:
    return sorted(waits, key=lambda row: -row.wait.age_s)


def _is_old(wait: Wait) -> bool:
    return wait.deadline_s is not None and wait.age_s > max(OLD_S, wait.deadline_s / 2)
