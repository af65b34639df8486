"""How a role tells its supervisor that it lives, what it does, and why it ended.

Invariants:
- A thread of its own beats, so that a learner deep in a step is not taken for dead; a stopped process falls silent, and one
  whose event loop it follows and which no longer turns gives no sign of life, only says where it is stuck.
- Every beat carries what the role waits for, however much else it has to say.
- Nothing a role says to its supervisor can block the role.
"""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
import time
from pathlib import Path

import msgspec
import zmq

from .. import curve
from ..waits import Wait, oldest

BEAT_S = 2.0
"""Between heartbeats; `launch.heartbeat_s` of silence means death."""


FAREWELL_S = 5.0
"""How long what was said last may take to leave when a role ends."""

FRAMES = 3
"""Innermost frames that say where an event loop is stuck: enough to reach the user's own code behind a library's."""


class Beat(msgspec.Struct, frozen=True, tag=True):
    """`role` lives; `waits` are its oldest, one of each kind."""

    role: str
    waits: tuple[Wait, ...] = ()


class Stuck(msgspec.Struct, frozen=True, tag=True):
    """The event loop of `role` does not turn: no sign of life. It has not left `where` for a beat or longer."""

    role: str
    where: str
    waits: tuple[Wait, ...] = ()


class Ready(msgspec.Struct, frozen=True, tag=True):
    """`role` does its work now."""

    role: str


class Done(msgspec.Struct, frozen=True, tag=True):
    """`role` has nothing left to do and serves until it is stopped."""

    role: str


class Stepped(msgspec.Struct, frozen=True, tag=True):
    """The learner made a step; `row` is its line of metrics.jsonl."""

    role: str
    row: msgspec.Raw


class Said(msgspec.Struct, frozen=True, tag=True):
    """Something a person should read."""

    role: str
    text: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Why `role` ends."""

    role: str
    text: str


class Served(msgspec.Struct, frozen=True, tag=True):
    """The learner has seen `replica`, in this incarnation, serve `version`."""

    role: str
    replica: str
    version: int
    incarnation: int


class Lost(msgspec.Struct, frozen=True, tag=True):
    """A push did not reach `replica`: what it serves is not known. Said each time."""

    role: str
    replica: str
    incarnation: int
    why: str


Signal = Beat | Stuck | Ready | Done | Stepped | Said | Failed | Served | Lost


class Heart:
    """Beats for `role` to the supervisor at `address` from `start` to `stop`."""

    def __init__(self, address: str, role: str) -> None:
        self.role = role
        self._address = address
        self._follows = 0
        self._turned = threading.Event()
        self._outbox: queue.SimpleQueue[Signal | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._beat, name="heart", daemon=True)

    def __enter__(self) -> Heart:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._outbox.put(None)
        self._thread.join(FAREWELL_S)

    def ready(self) -> None:
        self._outbox.put(Ready(self.role))

    def done(self) -> None:
        self._outbox.put(Done(self.role))

    def stepped(self, row: msgspec.Struct) -> None:
        self._outbox.put(Stepped(self.role, msgspec.Raw(msgspec.json.encode(row))))

    def say(self, text: str) -> None:
        self._outbox.put(Said(self.role, text))

    def failed(self, text: str) -> None:
        self._outbox.put(Failed(self.role, text))

    def served(self, replica: str, version: int, incarnation: int) -> None:
        self._outbox.put(Served(self.role, replica, version, incarnation))

    def lost(self, replica: str, incarnation: int, why: str) -> None:
        self._outbox.put(Lost(self.role, replica, incarnation, why))

    async def follow_loop(self) -> None:
        """From now on beat only while this event loop turns: one that a user's code blocks for ever is taken for dead."""
        self._follows = threading.get_ident()
        while True:
            self._turned.set()
            await asyncio.sleep(BEAT_S / 2)

    def _beat(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.setsockopt(zmq.SNDTIMEO, 1000)
        curve.join(socket)
        socket.connect(self._address)
        due = time.monotonic() + BEAT_S
        try:
            while True:
                try:
                    signal = self._outbox.get(timeout=max(0.0, due - time.monotonic()))
                except queue.Empty:
                    signal, due = self._sign(), time.monotonic() + BEAT_S
                if signal is None:
                    return
                try:
                    socket.send(msgspec.json.encode(signal))
                except zmq.Again:  # nobody listens: a supervisor that is gone takes this process with it
                    continue
        finally:
            socket.close()
            context.term()

    def _sign(self) -> Beat | Stuck:
        turned = self._turned.is_set()
        self._turned.clear()
        if self._follows and not turned:
            return Stuck(self.role, _place(self._follows), oldest())
        return Beat(self.role, oldest())


def _place(thread: int) -> str:
    """Where `thread` is now: its innermost frames, the innermost last."""
    frame, places = sys._current_frames().get(thread), list[str]()
    while frame is not None and len(places) < FRAMES:
        places.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " > ".join(reversed(places)) or "a thread that has ended"
