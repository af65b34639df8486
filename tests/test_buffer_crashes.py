"""The buffer's process is killed at every statement that it sends to SQLite, while it opens the file, saves and shrinks.

Invariants:
- Afterwards the file is as of the last save that was acknowledged, or as of the one in progress: nothing between, nothing else.
- The accounts close, in every such file.
- A process that starts from it, and is sent again what was not acknowledged, ends where one that was never killed ends: nothing is
  lost, nothing done twice.
- So do a shard of a buffer, and the clock of the shards.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from slipstream.buffer import retention
from slipstream.buffer import store as store_module
from slipstream.buffer.admission import Admission, ReplayConfig
from slipstream.buffer.encoded import DeliveredTrajectory
from slipstream.buffer.ledger import Ledger, VersionLedgers
from slipstream.buffer.ledger_report import ledger_report, ledgers_by_version
from slipstream.buffer.replay import Replay
from slipstream.buffer.store import CommitRow, Store, WriteBatch
from slipstream.buffer.task_table import Attempt, PoolSampler, TaskTable
from slipstream.buffer.trajectory import FINISHED, Outcome
from slipstream.tests import forkserver
from slipstream.tests.episodes import trajectory_of
from slipstream.tests.stores import new_trajectory

TABLES = ("counters", "groups", "episodes", "trajectories", "commits", "archive", "tasks")

Dump = dict[str, list[tuple[object, ...]]]


class InOrder(PoolSampler):
    def __init__(self) -> None:
        super().__init__(100, 0)

    def next(self, draw: int) -> int:
        return draw


class Buffer:
    """What the service does with one message after the other: change the state, save it, and only then acknowledge."""

    def __init__(self, path: Path, kind: str = "whole") -> None:
        self.shard, self.shards = PROCESSES[kind]
        self.store = Store(path)
        clock, groups = self.store.load()
        rules = ReplayConfig(3, 2, "withhold", 5.0, {"engine": 1}, dynamic_sampling=True)
        # In this order whatever is known, as the messages below expect; but it is told what is known, as pools are.
        tasks = TaskTable([InOrder(), InOrder()], (), self.store.tasks((0, 1)))
        admission = Admission(2, self.shards, (2.0, 1.0), self.shard, self.shards)
        self.replay = Replay(admission, rules, clock, groups, VersionLedgers(ledgers_by_version(path)), tasks)
        self.replay.mark_served(clock.served)  # as the fleet does

    def save(
        self,
        arrived: list[DeliveredTrajectory] | None = None,
        commits: list[CommitRow] | None = None,
        rolled_back_to: int | None = None,
    ) -> None:
        self.store.save(
            WriteBatch.of(
                self.replay.table.counters,
                self.replay.table.drain(),
                arrived or [],
                commits or [],
                rolled_back_to,
                self.replay.leases.tasks.drain(),
            )
        )
        self.replay.table.prune()

    def lease(self, lease_request: str) -> None:
        assert self.replay.leases.granted(lease_request) or self.replay.leases.grant("a", 0.0, lease_request)
        self.save()

    def report(self, episode: str, version: int, tokens: int) -> None:
        group, rest = episode.split(".", 1)
        self.replay.leases.progress("a", {f"{int(group) * self.shards}.{rest}": {version: tokens}}, 0.0)
        self.save()

    def deliver(self, episode: str, version: int, outcome: Outcome = FINISHED, reward: float | None = None) -> None:
        """Unless told otherwise, each member earns something else. The groups of a shard are numbered in steps."""
        group, rest = episode.split(".", 1)
        episode = f"{int(group) * self.shards}.{rest}"
        kept = {version: 5} if outcome.trainable else {}
        reward = float(episode[-1]) if reward is None else reward
        attempt = Attempt(f"task of {episode}", reward)
        accepted = self.replay.leases.deliver(episode, outcome, {version: 7}, kept, reward, attempt)
        sent = msgspec.structs.replace(trajectory_of(episode, kept), reward=reward) if accepted else None
        self.save([new_trajectory(episode, sent)] if sent else [])

    def take(self) -> None:
        assert self.replay.take(self.replay.version) is not None
        self.save()

    def commit(self, version: int) -> None:
        made = self.replay.version == version
        self.replay.commit(version)
        self.save(commits=[CommitRow(version + 1, 0.0, 1, 0, 1)] if made else [])

    def serve(self, version: int) -> None:
        self.replay.mark_served(version)
        self.save()

    def checkpoint(self, version: int) -> None:
        self.replay.mark_checkpointed(version)
        self.save()

    def recover(self, kept: int) -> None:
        version = self.replay.version
        self.replay.recover(kept, max(version, 3) if self.shard else None)  # a shard is told what the clock answers
        self.save(rolled_back_to=kept)

    def discard(self) -> None:
        self.replay.discard_batch(self.replay.version, [g.id for g in self.replay.table.in_state("batched")], "program")
        self.save()

    def shrink(self) -> None:
        served = -1 if self.replay.served is None else self.replay.served
        self.store.shrink(0, min(self.replay.table.counters.checkpointed, served))


Message = Callable[[Buffer], None]


def played(group: int, version: int) -> list[Message]:
    """A group of which one member is late."""
    members = [lambda b, m=m: b.deliver(f"{group}.0.{m}", version) for m in range(3)]
    return [lambda b: b.lease(f"lease_request {group}"), *members]


MESSAGES: list[Message] = [
    lambda b: b.serve(0),
    *played(0, 0),
    lambda b: b.lease("lease_request 1"),
    lambda b: b.report("1.0.0", 0, 3),
    lambda b: b.deliver("1.0.1", 0, Outcome("failed", "engine")),
    lambda b: b.deliver("1.0.2", 0),
    lambda b: b.take(),
    lambda b: b.commit(0),
    lambda b: b.serve(1),
    lambda b: b.deliver("1.0.0", 0),  # with 1.0.2 enough: 1.0.1 is not tried again
    *played(2, 1),
    lambda b: b.take(),
    lambda b: b.commit(1),
    lambda b: b.checkpoint(1),
    lambda b: b.shrink(),  # arrays of group 0
    lambda b: b.shrink(),  # its rows
    lambda b: b.recover(1),  # rolls version 2 back, to be 3
    lambda b: b.serve(3),
    lambda b: b.take(),
    lambda b: b.commit(3),
    lambda b: b.serve(4),
    lambda b: b.checkpoint(4),
    lambda b: b.shrink(),
    lambda b: b.shrink(),
    lambda b: b.shrink(),
    lambda b: b.lease("lease_request 3"),
    *[lambda b, m=m: b.deliver(f"3.0.{m}", 4, reward=1.0) for m in range(3)],  # two would be enough if they differed
    lambda b: b.lease("lease_request 4"),
    lambda b: b.report("4.0.2", 4, 1),
]


CLOCK: list[Message] = [
    lambda b: b.serve(0),
    *[lambda b: b.take(), lambda b: b.commit(0), lambda b: b.serve(1)],
    *[lambda b: b.take(), lambda b: b.commit(1), lambda b: b.checkpoint(1)],
    lambda b: b.recover(1),  # version 2 is 3 now
    *[lambda b: b.serve(3), lambda b: b.take(), lambda b: b.discard()],
    *[lambda b: b.take(), lambda b: b.commit(3), lambda b: b.serve(4), lambda b: b.checkpoint(4)],
    *[lambda b: b.take(), lambda b: b.recover(4)],
]
"""What the clock of two shards is sent."""

PROCESSES = {"whole": (0, 1), "shard": (1, 2), "clock": (0, 2)}
"""Kinds of processes: the number of each and that of shards."""


def messages(kind: str) -> list[Message]:
    return CLOCK if kind == "clock" else MESSAGES


def dump(path: Path) -> Dump:
    with contextlib.closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        found = {table: sorted(db.execute(f"SELECT * FROM {table}"), key=repr) for table in TABLES}
    # A save that was killed before its rows took a place for its arrays: they are where they are, and whole.
    found["trajectories"] = [(*row, place is None) for *row, place in found["trajectories"]]
    return found


def shrunk(path: Path) -> Dump:
    """What is left when all that may go is gone; how far `shrink` came before a kill is then the same."""
    store = Store(path)
    while store.shrink(0, settled=4):
        pass
    store.close()
    return dump(path)


def run(path: Path, start: int = 0, acknowledge: Callable[[], object] = lambda: None, kind: str = "whole") -> None:
    """Open the file and send the messages from `start` on."""
    buffer = Buffer(path, kind)
    acknowledge()
    for message in messages(kind)[start:]:
        message(buffer)
        acknowledge()
    buffer.store.close()


@contextlib.contextmanager
def traced(on_statement: Callable[[str], None]) -> Iterator[None]:
    """Call `on_statement` before every statement of every connection that a Store opens."""
    connect = store_module.connect

    def connect_traced(path: Path, mode: str) -> sqlite3.Connection:
        db = connect(path, mode)
        db.set_trace_callback(on_statement)
        return db

    store_module.connect = connect_traced
    try:
        yield
    finally:
        store_module.connect = connect


def killed_at(number: int, path: Path, kind: str) -> int:
    """Run in a process that is killed before its statement `number`; how often it acknowledged."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        seen = 0

        def count(_: str) -> None:
            nonlocal seen
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

        with traced(count):
            run(path, acknowledge=lambda: os.write(writing, b"."), kind=kind)
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        acknowledged = len(pipe.read())
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    return acknowledged


def shrink_one_at_a_time(change: Callable[[object, str, object], None]) -> None:
    """One group at a time, so that a transaction of `shrink` leaves others as they are."""
    for what in ("ARRAYS", "ROWS"):
        few = tuple(s.replace(f"LIMIT {retention.GROUPS_AT_ONCE}", "LIMIT 1") for s in getattr(retention, what))
        change(retention, what, few)


def serve() -> None:
    """Answer each line of standard input, the arguments of `killed_at`, with what that returns."""
    shrink_one_at_a_time(setattr)
    for line in sys.stdin:
        number, path, kind = line.rstrip("\n").split("\t")
        print(killed_at(int(number), Path(path), kind), flush=True)  # noqa: T201


KilledAt = Callable[[int, Path, str], int]


@pytest.fixture(scope="module")
def killed() -> Iterator[KilledAt]:
    """`killed_at` in a process that has imported the buffer and little else: to fork the process of the tests, which has imported
    all, takes longer than what is killed."""
    command = [sys.executable, "-P", "-c", "from slipstream.tests.test_buffer_crashes import serve; serve()"]
    with (
        forkserver.disabled(),
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as forking,
    ):
        assert forking.stdin is not None
        assert forking.stdout is not None
        asked, answered = forking.stdin, forking.stdout

        def ask(number: int, path: Path, kind: str) -> int:
            asked.write(f"{number}\t{path}\t{kind}\n")
            asked.flush()
            return int(answered.readline())

        yield ask


SHARES = 3
"""Of the statements, so that the default tier may take one."""


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder that never waits for a disk, where there is one: hundreds of databases are written. A kill needs no disk."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    ("kind", "share"),
    [
        *(("whole", share) for share in range(SHARES)),
        ("clock", 0),
        *(("shard", share) for share in range(SHARES)),
    ],
)
def test_a_kill_at_any_statement_leaves_the_last_save_or_the_one_in_progress(
    memory: Path, monkeypatch: pytest.MonkeyPatch, killed: KilledAt, kind: str, share: int
) -> None:
    """Each case takes every third statement."""
    shrink_one_at_a_time(monkeypatch.setattr)
    statements: list[str] = []
    states: list[Dump] = []  # after each acknowledgement
    path = memory / "unharmed.sqlite"
    with traced(statements.append):
        run(path, acknowledge=lambda: states.append(dump(path)), kind=kind)
    assert ledger_report(path).balances
    played = Ledger(
        generated=85,
        in_flight=1,
        trained=20,
        withheld={"late": 10},
        discarded={"failed_engine": 7, "stale": 14, "unused": 12, "equal_rewards": 21},
    )
    assert ledger_report(path).total == (Ledger() if kind == "clock" else played)
    of_groups = () if kind == "clock" else ("archive", "DELETE", "SET arrays = NULL", "incremental_vacuum")
    for what in (*of_groups, "rolled_back = 1", "CREATE", "COMMIT"):
        assert any(what in statement for statement in statements), what
    end = shrunk(path)
    seen = set()
    for number in range(1 + share, len(statements) + 1, SHARES):
        path = memory / f"{number}.sqlite"
        acknowledged = killed(number, path, kind)
        Store(path).close()  # completes the tables when it was killed between them
        found = dump(path)
        stored = acknowledged - (states[acknowledged - 1] == found) if acknowledged else 0
        assert found == states[stored], f"killed before {statements[number - 1]!r} after {acknowledged} answers"
        seen.add((acknowledged, stored))
        assert ledger_report(path).balances
        run(path, start=max(0, acknowledged - 1), kind=kind)  # what was not acknowledged is sent again
        assert shrunk(path) == end
        path.unlink()
    assert {acknowledged for acknowledged, _ in seen} == set(range(len(states)))


def test_a_kill_at_any_moment_leaves_the_last_save_or_the_one_in_progress(tmp_path: Path) -> None:
    """Not between statements but wherever it hits, while the file grows from one start to the next."""
    path, reported = tmp_path / "buffer.sqlite", 0
    for saves in (1, 37, 150):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            forever(path, writing)
        os.close(writing)
        with open(reading) as pipe:
            for _ in range(saves):
                reported = int(pipe.readline())
            os.kill(pid, signal.SIGKILL)
            reported = max([reported, *map(int, (line for line in pipe if line.endswith("\n")))])
        _, status = os.waitpid(pid, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
        store = Store(path)
        clock, _ = store.load()
        store.close()
        assert clock.version in (reported, reported + 1)  # saved, killed before it could say so
        assert clock.next_group == clock.version
        assert ledger_report(path).total == Ledger(generated=10 * clock.version, trained=10 * clock.version)
        assert [version for version, *_ in dump(path)["commits"]] == sorted(range(1, clock.version + 1), key=repr)


def forever(path: Path, pipe: int) -> None:
    """One step after the other, a save each; then its version is written to the descriptor `say`."""
    store = Store(path)
    clock, groups = store.load()
    replay = Replay(
        Admission(0, 1), ReplayConfig(2, 2, "withhold", 5.0), clock, groups, VersionLedgers(ledgers_by_version(path))
    )
    replay.mark_served(replay.version)
    while True:
        lease = replay.leases.grant("a", 0.0)
        assert lease is not None
        sent = []
        for e in map(lease.episode, lease.members):
            replay.leases.deliver(e, FINISHED, {replay.version: 5}, {replay.version: 5})
            sent.append(new_trajectory(e, trajectory_of(e, {replay.version: 5})))
        replay.take(replay.version)
        replay.commit(replay.version)
        replay.mark_served(replay.version)
        replay.mark_checkpointed(replay.version)
        store.save(
            WriteBatch.of(replay.table.counters, replay.table.drain(), sent, [CommitRow(replay.version, 0.0, 1, 0, 1)])
        )
        replay.table.prune()
        os.write(pipe, b"%d\n" % replay.version)
