"""How a role tells its supervisor that it lives, what it does, and why it ended.

Invariants:
- A thread of its own beats, so that a learner deep in a step is not taken for dead; a stopped process falls silent.
- Nothing a role says to its supervisor can block the role.
"""

from __future__ import annotations

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


class Stepped(msgspec.Struct, frozen=True, tag=True):
    """The learner made a step; `row` is its line of metrics.jsonl."""

    role: str
    row: msgspec.Raw


class Said(msgspec.Struct, frozen=True, tag=True):
    """Something a person should read; `fatal` when it is why the role ends."""

    role: str
    text: str
    fatal: bool = False


Signal = Beat | Ready | Stepped | Said


class Heart:
    """Beats for `role` to the supervisor at `address` from `start` to `stop`."""

    def __init__(self, address: str, role: str) -> None:
        self.role = role
        self._address = address
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

    def stepped(self, row: msgspec.Struct) -> None:
        self._outbox.put(Stepped(self.role, msgspec.Raw(msgspec.json.encode(row))))

    def say(self, text: str, *, fatal: bool = False) -> None:
        self._outbox.put(Said(self.role, text, fatal))

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
