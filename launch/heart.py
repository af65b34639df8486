"""How a role tells its supervisor that it lives, what it does, and why it ended.

Invariants:
- A thread of its own beats, so that a learner deep in a step is not taken for dead; a stopped process falls silent, and so
  does one whose event loop it follows and which no longer turns.
- Nothing a role says to its supervisor can block the role.
"""

from __future__ import annotations

import asyncio
import queue
import threading

import msgspec
import zmq

BEAT_S = 2.0
"""Between heartbeats; `launch.heartbeat_s` of silence means death."""


class Beat(msgspec.Struct, frozen=True, tag=True):
    """`role` lives."""

    role: str


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


Signal = Beat | Ready | Done | Stepped | Said | Failed | Served | Lost


class Heart:
    """Beats for `role` to the supervisor at `address` from `start` to `stop`."""

    def __init__(self, address: str, role: str) -> None:
        self.role = role
        self._address = address
        self._follows = False
        self._turned = threading.Event()
        self._outbox: queue.SimpleQueue[Signal | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._beat, name="heart", daemon=True)

    def __enter__(self) -> Heart:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._outbox.put(None)
        self._thread.join()

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
        while True:
            self._turned.set()
            self._follows = True
            await asyncio.sleep(BEAT_S / 2)

    def _beat(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.setsockopt(zmq.SNDTIMEO, 1000)
        socket.connect(self._address)
        try:
            while True:
                try:
                    signal = self._outbox.get(timeout=BEAT_S)
                except queue.Empty:
                    if self._follows and not self._turned.is_set():
                        continue
                    self._turned.clear()
                    signal = Beat(self.role)
                if signal is None:
                    return
                try:
                    socket.send(msgspec.json.encode(signal))
                except zmq.Again:  # nobody listens: a supervisor that is gone takes this process with it
                    continue
        finally:
            socket.close()
            context.term()
