"""Who speaks to the buffer: the processes behind its connections, by their names. Pure.

A client calls its connection `name/incarnation`: what it is in the run, and which process of that name. An incarnation is random,
so that nobody says it by chance, and nobody takes another's connection. Names are no proof of anything: who may connect at all is
decided by `slipstream.curve`.

Invariants:
- What is said for a worker counts over its own connection alone, from the newest process that introduced itself under its name.
- Commits, served versions and checkpoints count from the process that recovered last alone; batches go to its ranks alone, which
  are called alike but for a number.
- What is remembered is bounded, however many names there are: who was silent longest is forgotten first, and known again when it
  speaks.
"""

from __future__ import annotations

import msgspec

from ..errors import StateError
from .messages import Granted

KNOWN = 1 << 14
"""Workers that are remembered; thousands are beyond any run today."""


class Peer(msgspec.Struct):
    """The newest process of a worker.

    Attributes:
        incarnation: which.
        slot_s, idle_slot_s: its running totals.
        wish, granted: the number of its last request for a lease that was answered, and the answer.
    """

    incarnation: str
    slot_s: float = 0.0
    idle_slot_s: float = 0.0
    wish: int = -1
    granted: Granted | None = None


class Peers:
    """The workers by name, and the learner. A buffer that is started again takes who speaks first for the newest."""

    def __init__(self) -> None:
        self._workers: dict[str, Peer] = {}
        self._learner: tuple[str, str] | None = None
        self._earlier = (0.0, 0.0)

    def hello(self, connection: bytes, worker: str, incarnation: str) -> bool:
        """A worker introduces itself; whether it is another process than before.

        Raises:
            StateError: it speaks for somebody else.
        """
        if _named(connection) != (worker, incarnation):
            raise StateError(f"{_told(connection)} introduced itself as {worker}, process {incarnation}")
        if worker in self._workers and self._workers[worker].incarnation == incarnation:
            return False
        self._forget(worker)
        self._remember(worker, Peer(incarnation))
        return True

    def worker(self, connection: bytes, worker: str) -> Peer:
        """The process that speaks for `worker` over `connection`.

        Raises:
            StateError: it is not that worker's, or not the newest.
        """
        name, incarnation = _named(connection)
        if name != worker:
            raise StateError(f"{_told(connection)} spoke for {worker}")
        peer = self._workers.pop(worker, None) or Peer(incarnation)
        self._remember(worker, peer)
        if peer.incarnation != incarnation:
            raise StateError(f"{worker} is another process now; this one is no longer part of the run")
        return peer

    def recovers(self, connection: bytes) -> None:
        """A learner begins. Raises StateError when it is not the one of this run."""
        name, incarnation = _named(connection)
        if self._learner is not None and self._learner[0] != name:
            raise StateError(f"{_told(connection)} is not the learner of this run, {self._learner[0]} is")
        self._learner = name, incarnation

    def learner(self, connection: bytes) -> None:
        """Raises StateError when it is not the newest process of the learner that speaks."""
        speaks = _named(connection)
        self._learner = self._learner or speaks
        if self._learner[0] != speaks[0]:
            raise StateError(f"{_told(connection)} is not the learner of this run, {self._learner[0]} is")
        if self._learner != speaks:
            raise StateError(f"{speaks[0]} is another process now; this one is no longer part of the run")

    def rank(self, connection: bytes) -> None:
        """Raises StateError when it is no rank of the learner that speaks."""
        name, _ = _named(connection)
        if self._learner is not None and _role(name) != _role(self._learner[0]):
            raise StateError(f"{_told(connection)} is no rank of this run's learner")

    def slots(self) -> tuple[float, float]:
        """Slot seconds and idle slot seconds of all workers, those of processes that are gone included."""
        slot_s, idle_slot_s = self._earlier
        for peer in self._workers.values():
            slot_s, idle_slot_s = slot_s + peer.slot_s, idle_slot_s + peer.idle_slot_s
        return slot_s, idle_slot_s

    def _remember(self, worker: str, peer: Peer) -> None:
        self._workers[worker] = peer
        if len(self._workers) > KNOWN:
            self._forget(next(iter(self._workers)))

    def _forget(self, worker: str) -> None:
        peer = self._workers.pop(worker, None)
        if peer is not None:
            self._earlier = self._earlier[0] + peer.slot_s, self._earlier[1] + peer.idle_slot_s


def connection_name(name: str, incarnation: str) -> bytes:
    """What a client calls its connection."""
    return f"{name}/{incarnation}".encode()


def _named(connection: bytes) -> tuple[str, str]:
    """Name and incarnation of who is at the other end."""
    name, _, incarnation = connection.decode(errors="replace").rpartition("/")
    return name, incarnation


def _role(name: str) -> str:
    return name.rstrip("0123456789").rstrip("-")


def _told(connection: bytes) -> str:
    name, _ = _named(connection)
    return name or f"connection {connection.hex()}"
