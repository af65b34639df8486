"""The network of hosts under fault injection: namespaces of one machine whose interfaces are joined by a switch in this process.
Linux, as root.

    host 0: eth0 (TAP) ──frames──┐
    host 1: eth0 (TAP) ──frames──┼── this process: forwards, delays, drops
    host 2: eth0 (TAP) ──frames──┘

`python -m slipstream.chaos.switch N` makes N hosts, writes `SwitchStarted` on a line, then takes a `LinkState` a line, and answers
each with an empty line once it is in force.

Invariants:
- No interface outside of these namespaces is made, changed or used. What the hosts need is gone with this process.
- When its standard input ends, also because the process at the other end was killed, it kills every process of its hosts and exits.
- Frames between two hosts keep their order. Every random loss is drawn from one seed.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import fcntl
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
import psutil

NETWORK = "10.77.0."  # host i has the address after i
MTU = 9000
QUEUE_BYTES = 16 << 20  # that may be on their way from one host; more are dropped, as in the queue of a router
CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
IFF_TAP_NO_PI = 0x0002 | 0x1000
KILL_S = 10.0  # longest time for killed processes to be gone, and for `ip`


class SwitchStarted(msgspec.Struct, frozen=True):
    """`namespaces[i]` is the path of host i's network namespace, while the switch lives."""

    namespaces: tuple[str, ...]


class LinkState(msgspec.Struct, frozen=True):
    """The link between host `host` and the switch. Delay and loss are one way: a round trip meets them twice."""

    host: int
    up: bool = True
    delay_s: float = 0.0
    loss: float = 0.0  # share of the frames
    unreachable: tuple[int, ...] = ()  # hosts between which and this one there is no way


def address_of(host: int) -> str:
    return f"{NETWORK}{host + 1}"


def processes_of(namespace: str) -> Iterator[psutil.Process]:
    """Every process in the network namespace at `namespace`, a path."""
    inode = os.stat(namespace).st_ino
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if os.stat(f"/proc/{process.pid}/ns/net").st_ino == inode and process.status() != psutil.STATUS_ZOMBIE:
                yield process


class Switch:
    """The frames of hosts with the TAP interfaces `taps`."""

    def __init__(self, taps: Sequence[int], seed: int = 0) -> None:
        self._taps = list(taps)
        self._links = [LinkState(host) for host in range(len(taps))]
        self._rng = random.Random(seed)
        self._queues = [
            collections.deque[tuple[float, int, bytes]]() for _ in taps
        ]  # by sender: (due, receiver, frame)
        self._queued = [0] * len(taps)

    def set(self, link: LinkState) -> None:
        self._links[link.host] = link

    def receive(self, sender: int) -> None:
        """Take the frames that wait at a host's interface."""
        while True:
            try:
                frame = os.read(self._taps[sender], MTU + 64)
            except BlockingIOError:
                return
            to = frame[5] - 1 if frame[0] == 0x02 else -1  # see `_make_host`; others are broadcasts
            for receiver in [to] if to >= 0 else range(len(self._taps)):
                if receiver != sender and receiver < len(self._taps):
                    self._forward(sender, receiver, frame)

    def _forward(self, sender: int, receiver: int, frame: bytes) -> None:
        ends = self._links[sender], self._links[receiver]
        if receiver in ends[0].unreachable or sender in ends[1].unreachable:
            return
        if not all(end.up and (not end.loss or self._rng.random() >= end.loss) for end in ends):
            return
        queue, delay = self._queues[sender], sum(end.delay_s for end in ends)
        if not delay and not queue:
            self._send(receiver, frame)
        elif self._queued[sender] + len(frame) <= QUEUE_BYTES:
            due = time.monotonic() + delay
            queue.append((max(due, queue[-1][0]) if queue else due, receiver, frame))
            self._queued[sender] += len(frame)

    def _send(self, receiver: int, frame: bytes) -> None:
        with contextlib.suppress(OSError):  # its queue is full, or it is down
            os.write(self._taps[receiver], frame)

    def flush(self) -> float | None:
        """Send what is due; seconds until the next is, None where nothing waits."""
        now, wait = time.monotonic(), None
        for sender, queue in enumerate(self._queues):
            while queue and queue[0][0] <= now:
                _, receiver, frame = queue.popleft()
                self._queued[sender] -= len(frame)
                self._send(receiver, frame)
            if queue:
                wait = min(queue[0][0] - now, wait if wait is not None else float("inf"))
        return wait


def _make_host(host: int) -> tuple[int, int]:
    """Descriptors of the namespace of a new host and of its TAP interface. This process is in that namespace afterwards."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWNET) failed")
    namespace = os.open("/proc/self/ns/net", os.O_RDONLY)
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH", b"eth0", IFF_TAP_NO_PI))
    for command in (
        "link set lo up",
        f"link set eth0 address 02:00:00:00:00:{host + 1:02x} mtu {MTU} up",
        f"addr add {address_of(host)}/24 dev eth0",
        "route add default dev eth0",  # leads nowhere: by it Ray and others find which address is theirs
    ):
        subprocess.run(["ip", *command.split()], check=True, timeout=KILL_S)
    return namespace, tap


def kill_all(find: Callable[[], list[psutil.Process]]) -> None:
    """Kill every process that `find` returns, until it returns none and all have ended. Raises TimeoutError where one survives."""
    deadline, left = time.monotonic() + KILL_S, list[psutil.Process]()
    while left := [process for process in {*left, *find()} if not has_ended(process)]:
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if time.monotonic() > deadline:
            raise TimeoutError(f"alive {KILL_S:g} s after SIGKILL: {left}")
        _, left = psutil.wait_procs(left, timeout=0.05)


def has_ended(process: psutil.Process) -> bool:
    """Also where its parent, which may wait for this one, has not asked for its status yet."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def main(count: int) -> None:
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)  # of a terminal: it ends with its standard input
    outside = os.open("/proc/self/ns/net", os.O_RDONLY)
    made = [_make_host(host) for host in range(count)]
    ctypes.CDLL(None).setns(outside, CLONE_NEWNET)
    paths = tuple(f"/proc/{os.getpid()}/fd/{namespace}" for namespace, _ in made)
    switch = Switch([tap for _, tap in made])
    os.write(1, msgspec.json.encode(SwitchStarted(paths)) + b"\n")
    poll, hosts = select.poll(), {tap: host for host, (_, tap) in enumerate(made)}
    for descriptor in (0, *hosts):
        poll.register(descriptor, select.POLLIN)
    commands = b""
    try:
        while True:
            wait = switch.flush()
            for descriptor, _ in poll.poll(None if wait is None else max(0.0, 1000 * wait)):
                if descriptor:
                    switch.receive(hosts[descriptor])
                    continue
                read = os.read(0, 1 << 16)
                if not read:
                    return
                *lines, commands = (commands + read).split(b"\n")
                for line in lines:
                    switch.set(msgspec.json.decode(line, type=LinkState))
                    os.write(1, b"\n")
    finally:
        kill_all(lambda: [process for path in paths for process in processes_of(path)])


if __name__ == "__main__":
    main(int(sys.argv[1]))
