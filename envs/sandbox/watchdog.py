"""Looks at the processes of all sandboxes in one pass over /proc, and kills those that are beyond a limit of all their
processes together: memory, CPU time, processes, files. The kernel counts these per process, or not at all without a cgroup of
one's own.

Invariants:
- A thread of its own: a blocked event loop delays no kill. It runs while there is a sandbox.
- A look never costs more than a twentieth of the time: after a slow one, on a host with many processes, it waits longer.
- Processes are signalled by a descriptor (pidfd), after their session was read through it: never one that took over a number.
  The session's own number stays taken while its first process is not reaped.
- /proc is read in threads, never on an event loop.
- A sandbox that cannot be judged is killed, and others are judged as before.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping

import msgspec

from .base import Limits, Reason

logger = logging.getLogger(__name__)

LOOK_S = 0.1  # between looks: a process can fault in a few hundred MiB meanwhile
SHARE = 20  # a look costs at most one part in so many of the time
PASSES = 1000  # over a session that forks while it is killed, a millisecond apart
SLACK_S = 0.25  # CPU time of a sandbox's own start, and of ticks that are rounded
OWN = 8  # processes of ours in a sandbox, at most
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


class Seen(msgspec.Struct, frozen=True):
    """A process as /proc shows it."""

    pid: int
    parent: int
    session: int
    started: int  # in ticks since the host's start: no other process has the same number and start
    own_s: float  # CPU time of its own
    cpu_s: float  # and that of the children that it has waited for
    threads: int
    resident: int  # bytes, shared ones included


class Watched:
    """One sandbox: why it was killed, and what it may still use. `kill` may come from any thread; of a sandbox that is found by
    its session it ends the first process, and the watchdog the others."""

    def __init__(self, pid: int, limits: Limits, owns_session: bool, files: Callable[[int], float] | None) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.limits = limits
        self.reason: Reason | None = None
        self.files = files
        self.owns_session = owns_session
        self._used_s = 0.0  # CPU time at the last look
        self._seen_s: dict[tuple[int, int], float] = {}  # by process, its own CPU time when it was seen last
        self._most_s = float("inf")
        self._lock = threading.Lock()
        self._gone = False

    def allow(self, cpu_s: float) -> None:
        """So much CPU time from now on, counted from the last look: what waits for a request uses none."""
        self._most_s = self._used_s + SLACK_S + cpu_s

    def kill(self, reason: Reason) -> None:
        with self._lock:
            if self._gone:
                return
            self.reason = self.reason or reason
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def forget(self) -> None:
        with self._lock:
            if not self._gone:
                self._gone = True
                os.close(self.pidfd)

    def judge(self, processes: list[Seen]) -> Reason | None:
        """The limit that its processes exceed, if any."""
        self._used_s = max(self._used_s, sum(p.cpu_s for p in processes), self._used_by_all(processes))
        if self._used_s > self._most_s:
            return "cpu"
        if sum(p.threads for p in processes) > self.limits.processes + OWN:
            return "processes"
        if sum(p.resident for p in processes) > self.limits.memory and _proportional(processes) > self.limits.memory:
            return "memory"
        if self.files is not None and processes and self.files(processes[-1].pid) > self.limits.disk:
            return "disk"
        return None

    def _used_by_all(self, processes: list[Seen]) -> float:
        """CPU time of all processes that any look saw: of one that nobody waits for, no other has it."""
        self._seen_s |= {(p.pid, p.started): p.own_s for p in processes if p.own_s}
        return sum(self._seen_s.values())


class Watchdog:
    """The sandboxes of this process."""

    def __init__(self) -> None:
        self._watched: dict[int, Watched] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._failed_looks = 0

    def watch(self, pid: int, limits: Limits, owns_session: bool, files: Callable[[int], float] | None) -> Watched:
        watched = Watched(pid, limits, owns_session, files)
        with self._changed:
            self._watched[pid] = watched
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="sandbox watchdog", daemon=True)
                self._thread.start()
            self._changed.notify()
        return watched

    def forget(self, watched: Watched) -> None:
        with self._changed:
            if self._watched.get(watched.pid) is watched:
                del self._watched[watched.pid]
        watched.forget()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._watched:
                    self._changed.wait()
                now = list(self._watched.values())
            began = time.perf_counter()
            try:
                self._check_all(now)
            except OSError as error:  # such as no free descriptor; the next look may have one
                self._failed_looks += 1
                if self._failed_looks & (self._failed_looks - 1) == 0:
                    logger.warning("look %d at the sandboxes failed: %s", self._failed_looks, error)
            time.sleep(max(LOOK_S, SHARE * (time.perf_counter() - began)))  # /proc has no event for what is looked for

    def _check_all(self, sandboxes: list[Watched]) -> None:
        processes = see_processes()
        children, sessions = defaultdict[int, list[Seen]](list), defaultdict[int, list[Seen]](list)
        for process in processes.values():
            children[process.parent].append(process)
            sessions[process.session].append(process)
        for watched in sandboxes:
            if watched.reason is None and watched.pid in processes:
                own = sessions[watched.pid] if watched.owns_session else _tree(processes[watched.pid], children)
                if reason := _judged(watched, own):
                    watched.kill(reason)
            if watched.reason is not None and watched.owns_session:
                for process in sessions[watched.pid]:
                    _kill_member(process.pid, watched.pid)


def _judged(watched: Watched, processes: list[Seen]) -> Reason | None:
    try:
        return watched.judge(processes)
    except Exception:
        logger.exception("sandbox %d cannot be judged and is ended", watched.pid)
        return "lost"


def see_processes() -> dict[int, Seen]:
    """Every process of the host that still runs."""
    found: dict[int, Seen] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (seen := _read_process(int(name))):
            found[seen.pid] = seen
    return found


def _read_process(pid: int) -> Seen | None:
    """None where it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            # after the name, which may hold anything: state ppid pgrp session ... utime stime cutime cstime ... threads ... rss
            fields = file.read(1024).rpartition(b")")[2].split()
    except OSError:
        return None
    if fields[0] in (b"Z", b"X"):
        return None
    own, children = (sum(map(int, part)) / TICKS for part in (fields[11:13], fields[13:15]))
    return Seen(
        pid=pid,
        parent=int(fields[1]),
        session=int(fields[3]),
        started=int(fields[19]),
        own_s=own,
        cpu_s=own + children,
        threads=int(fields[17]),
        resident=PAGE * int(fields[21]),
    )


def kill_session(session: int) -> None:
    """Kill every process of a session, also those that are forked meanwhile."""
    for _ in range(PASSES):
        members = [p.pid for p in see_processes().values() if p.session == session]
        if not members:
            return
        for pid in members:
            _kill_member(pid, session)
        time.sleep(0.001)


def _kill_member(pid: int, session: int) -> None:
    """Kill a process that was seen in `session`, unless another has its number by now."""
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            if (seen := _read_process(pid)) and seen.session == session:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        finally:
            os.close(pidfd)


def _tree(root: Seen, children: Mapping[int, list[Seen]]) -> list[Seen]:
    found, waiting = [root], [root]
    while waiting:
        below = children.get(waiting.pop().pid, [])
        found += below
        waiting += below
    return found


def _proportional(processes: list[Seen]) -> int:
    """Bytes of memory, each shared page divided among those who share it: what forked processes have in common counts once."""
    total = 0
    for process in processes:
        try:
            with open(f"/proc/{process.pid}/smaps_rollup", "rb") as file:
                total += next((int(line.split()[1]) << 10 for line in file if line.startswith(b"Pss:")), 0)
        except (FileNotFoundError, ProcessLookupError):
            continue
        except OSError:  # not for us to read: as /proc/PID/stat has it
            total += process.resident
    return total


WATCHDOG = Watchdog()
