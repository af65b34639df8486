"""How a role reports to the supervisor: heartbeats with its waits, what it did, why it ends. One-way messages of `rpc`.

Invariants:
- A thread of its own sends heartbeats, so that a learner deep in a step is not taken for dead. A stopped process falls silent; one
  whose event loop is followed and blocked sends no sign of life, but where it is blocked.
- Every heartbeat that is due carries the role's whole state, so that it repeats what a lost message reported. What changes in
  between is sent at once. Of replicas only what changed is, within `GATHER_S` and together: a push that reaches a thousand of them
  costs the supervisor few messages.
- Reporting never blocks the role.
"""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ...common.bounded import TEXT_LENGTH, Count, Name, Number, Text, Version
from ...common.waits import LISTED, Wait, current_waits
from ...rpc.client import RpcNotifier
from ...weightsync.fleet import FalseReplies, ReplicaReport

BEAT_S = 2.0  # between heartbeats; `launch.heartbeat_s` of silence means death
GATHER_S = 0.005  # how long a report about a replica may wait for others
CLOSE_S = 5.0  # how long the last messages may take to leave when a role ends
LINGER_MS = 3000  # the supervisor may be busy, and a connection begins with the proof of a key
REPLICAS, OUTCOMES = 1 << 14, 1000  # most replicas that a heartbeat reports, and outcomes that a step has
SIGNAL_BYTES = 8 << 20  # of one signal: reports of all these replicas

FRAMES = 3  # innermost frames that show where a loop is blocked: enough to reach the user's code behind a library's


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """What a role is doing; a later heartbeat replaces an earlier one."""

    role: Name
    waits: Annotated[tuple[Wait, ...], Meta(max_length=LISTED)] = ()  # its oldest, one of each kind
    state: Literal["starting", "ready", "done"] = "starting"  # `done`: its work is finished, it serves until stopped
    stuck_at: Text = ""  # where its event loop has been blocked for a beat or longer, which is no sign of life
    # What the learner's rank 0 knows of them. One that is not in it is as reported before: a change is reported alone.
    replicas: Annotated[tuple[ReplicaReport, ...], Meta(max_length=REPLICAS)] = ()
    false_replies: Annotated[
        tuple[FalseReplies, ...], Meta(max_length=REPLICAS)
    ] = ()  # what the role's router knows of replicas that lied
    checkpoint: Count = 0  # the step of the newest checkpoint that the learner's rank 0 has written


class StepSummary(msgspec.Struct, frozen=True):
    """What a view shows of a learner step: fields of `learner.metrics.StepMetrics`, None where a number is not finite."""

    step: Count
    reward_mean: Number | None
    staleness_mean: Number | None
    staleness_max: Count
    rollout_tokens_per_s: Number | None
    overlap_tokens_per_s: Number | None
    learner_tokens_per_s: Number | None
    rollout_idle: Number | None
    learner_idle: Number | None
    version: Version = 0
    groups: Count = 0
    groups_alike: Count = 0
    outcomes: Annotated[dict[Name, Count], Meta(max_length=OUTCOMES)] = {}


class StepReported(msgspec.Struct, frozen=True, tag=True):
    role: Name
    summary: StepSummary


class RoleMessage(msgspec.Struct, frozen=True, tag=True):
    role: Name
    text: Text


class RoleFailed(msgspec.Struct, frozen=True, tag=True):
    """Why `role` ends; `expected` for errors of `slipstream.errors`, whose exit status shows whether a restart helps."""

    role: Name
    text: Text
    expected: bool


REPORTS = "reports"  # in the outbox: there are reports about replicas
RoleSignal = Heartbeat | StepReported | RoleMessage | RoleFailed
RIGHTS = {StepReported: ("learner",), Heartbeat: None, RoleMessage: None, RoleFailed: None}
"""The kinds of roles that may send each signal; None for every role."""


class HeartbeatSender:
    """Reports for `role` to the supervisor at `address` while the context lasts."""

    def __init__(self, address: str, role: str) -> None:
        self.role = role
        self._address = address
        self._loop_thread = 0
        self._last = Heartbeat(role)
        self._known: dict[str, ReplicaReport] = {}
        self._changed: dict[str, ReplicaReport] = {}  # reports that are not sent yet
        self._changing = threading.Lock()
        self._turned = threading.Event()
        self._outbox: queue.SimpleQueue[RoleSignal | Literal["reports"] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> HeartbeatSender:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._outbox.put(None)
        self._thread.join(CLOSE_S)

    def ready(self) -> None:
        self._report(state="ready")

    def done(self) -> None:
        self._report(state="done")

    def stepped(self, metrics: msgspec.Struct) -> None:
        summary = msgspec.json.decode(msgspec.json.encode(metrics), type=StepSummary)  # in JSON NaN is null
        self._outbox.put(StepReported(self.role, summary))

    def send_message(self, text: str) -> None:
        self._outbox.put(RoleMessage(self.role, text[:TEXT_LENGTH]))

    def failed(self, text: str, *, expected: bool) -> None:
        self._outbox.put(RoleFailed(self.role, text[:TEXT_LENGTH], expected))

    def report_replica(self, changed: ReplicaReport, known: dict[str, ReplicaReport]) -> None:
        """`changed` is new; with it these are `known`, now and in later calls."""
        self._known = known
        with self._changing:
            first = not self._changed
            self._changed[changed.name] = changed
        if first:
            self._outbox.put(REPORTS)

    def report_false_replies(self, replies: tuple[FalseReplies, ...]) -> None:
        self._report(false_replies=replies)

    def saved(self, step: int) -> None:
        self._report(checkpoint=step)

    def _report(self, **changed: Any) -> None:
        """Report a change now, and again with every heartbeat."""
        self._last = msgspec.structs.replace(self._last, **changed)
        self._outbox.put(msgspec.structs.replace(self._last, waits=current_waits()))

    async def follow_loop(self) -> None:
        """Send heartbeats only while this event loop turns: one that a user's code blocks for ever counts as dead."""
        self._loop_thread = threading.get_ident()
        while True:
            self._turned.set()
            await asyncio.sleep(BEAT_S / 2)

    def _run(self) -> None:
        beat_at, reports_at = time.monotonic() + BEAT_S, float("inf")
        with RpcNotifier(self._address, linger_ms=LINGER_MS) as supervisor:
            while True:
                try:
                    signal = self._outbox.get(timeout=max(0.0, min(beat_at, reports_at) - time.monotonic()))
                except queue.Empty:
                    if reports_at < beat_at:
                        signal, reports_at = self._reports(), float("inf")
                    else:
                        signal, beat_at = self._beat(), time.monotonic() + BEAT_S
                # What is sent is dropped where the queue is full: the supervisor is gone, and this process ends, too.
                if signal is None:
                    if reports_at < float("inf"):
                        supervisor.notify(self._reports())
                    return
                if isinstance(signal, str):
                    reports_at = time.monotonic() + GATHER_S
                else:
                    supervisor.notify(signal)

    def _reports(self) -> Heartbeat:
        """What is new of replicas."""
        with self._changing:
            changed, self._changed = self._changed, {}
        return msgspec.structs.replace(self._last, waits=current_waits(), replicas=tuple(changed.values()))

    def _beat(self) -> Heartbeat:
        turned = self._turned.is_set()
        self._turned.clear()
        stuck_at = _innermost_frames(self._loop_thread) if self._loop_thread and not turned else ""
        known = tuple(self._known.copy().values())  # copying is atomic
        return msgspec.structs.replace(self._last, waits=current_waits(), stuck_at=stuck_at, replicas=known)


def _innermost_frames(thread: int) -> str:
    """Where `thread` is now, the innermost frame last."""
    frame, found = sys._current_frames().get(thread), list[str]()
    while frame is not None and len(found) < FRAMES:
        found.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " > ".join(reversed(found))[:TEXT_LENGTH] or "a thread that has ended"
