"""The clients of the buffer: which process stands behind each name. Pure.

A client's ZeroMQ identity is `name/incarnation`: its role in the run, and which process of that role. An incarnation is random, so
no client takes over another's connection by chance. Where the buffer's socket is guarded, `RequestHandler` requires that the name
is that of the role whose key the client proved.

Invariants:
- A report of a worker counts only over its own connection, from the newest process that registered under its name.
- Commits and checkpoints count only from the learner process that recovered last; batches go only to its ranks,
  whose names differ in a number.
- Memory is bounded, however many names there are: the client that was silent longest is forgotten first, and is known again when
  it next sends.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from ..errors import StateError

SUPERVISOR = "supervisor"  # the name of the client that changes settings
KNOWN = 1 << 14  # workers, requests and replies that are remembered, of each; more than any run today has
K = TypeVar("K")
V = TypeVar("V")


class WorkerClient(msgspec.Struct):
    """The newest process of a worker."""

    incarnation: str  # which process
    # Its running totals.
    slot_s: float = 0.0
    idle_slot_s: float = 0.0


class ClientRegistry:
    """The workers by name, and the learner. After a restart of the buffer the first process of a name counts as the newest."""

    def __init__(self) -> None:
        self._workers: dict[str, WorkerClient] = {}
        self._learner: tuple[str, str] | None = None
        self._earlier = (0.0, 0.0)

    def register(self, connection: bytes, worker: str, incarnation: str) -> bool:
        """A worker registers; whether it is another process than before.

        Raises:
            StateError: the connection is not its own.
        """
        if _parse(connection) != (worker, incarnation):
            raise StateError(f"{_describe(connection)} registered as {worker}, process {incarnation}")
        if worker in self._workers and self._workers[worker].incarnation == incarnation:
            return False
        self._forget(worker)
        self._remember(worker, WorkerClient(incarnation))
        return True

    def worker(self, connection: bytes, worker: str) -> WorkerClient:
        """The process that reports for `worker` over `connection`.

        Raises:
            StateError: it is not that worker's, or not the newest.
        """
        name, incarnation = _parse(connection)
        if name != worker:
            raise StateError(f"{_describe(connection)} reported for {worker}")
        client = self._workers.pop(worker, None) or WorkerClient(incarnation)
        self._remember(worker, client)
        if client.incarnation != incarnation:
            raise StateError(f"{worker} is another process now; this one is no longer part of the run")
        return client

    def learner_recovers(self, connection: bytes) -> None:
        """A learner process begins. Raises StateError when it is not this run's learner."""
        self._require_learner(connection)
        self._learner = _parse(connection)

    def learner(self, connection: bytes) -> None:
        """Raises StateError when the sender is not the newest process of the learner."""
        sender = _parse(connection)
        self._learner = self._learner or sender
        self._require_learner(connection)
        if self._learner != sender:
            raise StateError(f"{sender[0]} is another process now; this one is no longer part of the run")

    def rank(self, connection: bytes) -> None:
        """Raises StateError when the sender is not a rank of the learner."""
        name, _ = _parse(connection)
        if self._learner is not None and _role(name) != _role(self._learner[0]):
            raise StateError(f"{_describe(connection)} is no rank of this run's learner")

    def require_supervisor(self, connection: bytes) -> None:
        """Raises StateError when the sender is not the supervisor."""
        if _parse(connection)[0] != SUPERVISOR:
            raise StateError(f"{_describe(connection)} is not the supervisor of this run")

    @staticmethod
    def require_name(connection: bytes, role: str) -> None:
        """Raises StateError when the client that proved the key of `role` calls itself by another name."""
        if _parse(connection)[0] != role:
            raise StateError(f"{role} called itself {_describe(connection)}")

    def slots(self) -> tuple[float, float]:
        """Slot seconds and idle slot seconds of all workers, earlier processes included."""
        slot_s, idle_slot_s = self._earlier
        for client in self._workers.values():
            slot_s, idle_slot_s = slot_s + client.slot_s, idle_slot_s + client.idle_slot_s
        return slot_s, idle_slot_s

    def _require_learner(self, connection: bytes) -> None:
        if self._learner is not None and self._learner[0] != _parse(connection)[0]:
            raise StateError(f"{_describe(connection)} is not the learner of this run, {self._learner[0]} is")

    def _remember(self, worker: str, client: WorkerClient) -> None:
        self._workers[worker] = client
        if len(self._workers) > KNOWN:
            self._forget(next(iter(self._workers)))

    def _forget(self, worker: str) -> None:
        client = self._workers.pop(worker, None)
        if client is not None:
            self._earlier = self._earlier[0] + client.slot_s, self._earlier[1] + client.idle_slot_s


def remember(known: dict[K, V], key: K, value: V) -> K | None:
    """Remember `value`. Where that is one too many, the key that came first is forgotten, and returned."""
    known[key] = value
    if len(known) <= KNOWN:
        return None
    del known[forgotten := next(iter(known))]
    return forgotten


def connection_name(name: str, incarnation: str) -> bytes:
    """The ZeroMQ identity of a client."""
    return f"{name}/{incarnation}".encode()


def _parse(connection: bytes) -> tuple[str, str]:
    """Name and incarnation of the client."""
    name, _, incarnation = connection.decode(errors="replace").rpartition("/")
    return name, incarnation


def _role(name: str) -> str:
    return name.rstrip("0123456789").rstrip("-")


def _describe(connection: bytes) -> str:
    return _parse(connection)[0] or f"connection {connection.hex()}"
