"""Processes of this package's own commands, forked from one that has imported torch, transformers and the package already.

An interpreter that imports them takes 3 to 15 s of CPU time, and most tests of roles, servers and ranks start several. `install`
replaces what `subprocess` starts a process by: a command that `image_of` knows is forked from a *fork server*, any other is
executed. The product has no part in it. Inside of `disabled` everything is executed.

    pytest ──starts──> fork server, imports once ──forks──> `slipstream train`, a child of pytest
                                      its own fork server <──forks──┘
                                                └──forks──> `slipstream role learner-0`, a child of `slipstream train`

Where several processes test (`pytest -n`), they are forked, too, and each has its own fork server from the start.

Invariants:
- A forked process is a real child of the process that asked for it (the fork server forks twice, and the requester adopts the
  orphan): exit status, signals, `PR_SET_PDEATHSIG` and process groups are as after an exec.
- It has its own environment, working directory, standard streams and command line, /proc shows them, too.
- A fork server is single-threaded and computes nothing: it forks before any OpenMP, gloo or BLAS thread exists.
- A fork server ends when the process that asks it ends.
- `multiprocessing` in a forked process works as in an executed one; random generators are seeded anew.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import multiprocessing.util
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from slipstream.tests import forkready
from slipstream.tests.forked import INHERITED, Request, become, finish, take_on
from slipstream.tests.forkimages import GATE_FLAG, image_of, starts_others

PADDING = "FORKSERVER_PADDING"
"""Makes room for the environment of forked processes where /proc/PID/environ reads it."""

OWN = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    PADDING: "x" * 100_000,
}
"""Environment of a fork server beside the requester's: threads are counted when libraries are loaded, and a
process that has asked CUDA itself whether there is a device cannot fork one that uses it."""

FROM_VLLM = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
"""What vLLM reads when it is imported."""

PR_SET_CHILD_SUBREAPER = 36

STARTED_S = 120.0
"""Longest wait for a fork server: the first import after an install reads all files from disk."""


class ForkServer:
    """The requester's end of one fork server. `starting` is the command of a server that may still import its image; empty where it
    is ready."""

    def __init__(self, image: str, connection: socket.socket, starting: Sequence[str] = ()) -> None:
        self.image = image
        self._connection = connection
        self._starting = starting
        self._lock = threading.Lock()

    def wait_started(self) -> None:
        """Return as soon as it has imported its image."""
        with self._lock:
            if self._starting:
                self._connection.settimeout(STARTED_S)
                said = self._connection.recv(1)
                assert said == b"+", f"the fork server of {self.image!r} did not start; run {self._starting} to see why"
                self._connection.settimeout(None)
                self._starting = ()

    def fork(self, request: Request, descriptors: Sequence[int]) -> int:
        """The id of the new process, a child of this one. Raises OSError where the fork server has ended."""
        with self._lock:
            _prctl(PR_SET_CHILD_SUBREAPER, 1)
            try:
                payload = pickle.dumps(request)
                socket.send_fds(self._connection, [len(payload).to_bytes(8, "little")], list(descriptors))
                self._connection.sendall(payload)
                answer = self._connection.recv(8)
            finally:
                _prctl(PR_SET_CHILD_SUBREAPER, 0)
        if len(answer) < 8:
            raise OSError("the fork server has ended")
        return int.from_bytes(answer, "little")


_servers: dict[str, ForkServer] = {}
_root = True
_disabled = 0
_execute: Callable[..., int] = subprocess._fork_exec  # type: ignore[attr-defined]
_spawn: Callable[..., int] = multiprocessing.util.spawnv_passfds
_replace: Callable[..., Any] = os.execvpe


def install() -> None:
    """Fork known commands from now on, in this process, a process of the tests."""
    global _root
    _root = True
    subprocess._fork_exec = _fork_or_execute  # type: ignore[attr-defined]
    multiprocessing.util.spawnv_passfds = _fork_or_spawn


def installed() -> bool:
    """Whether this process forks known commands now."""
    return subprocess._fork_exec is _fork_or_execute and not _disabled  # type: ignore[attr-defined]


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Execute everything, as users do; so do the processes that are started inside."""
    global _disabled
    _disabled += 1
    try:
        yield
    finally:
        _disabled -= 1


def _server(command: Sequence[str], environment: dict[str, str]) -> ForkServer | None:
    """The fork server for this command. It is started where it is asked for first, and only by processes of the tests."""
    if not command or _disabled or (image := image_of(command, environment)) is None:
        return None
    if not _root:
        return next((server for server in _servers.values() if image in ("ours", server.image)), None)
    if image not in _servers:
        _servers[image] = _start(image, command[0], environment)
    try:
        _servers[image].wait_started()
    except BaseException:
        del _servers[image]  # the next command tries another
        raise
    return _servers[image]


def begin(command: Sequence[str], environment: dict[str, str]) -> None:
    """Start the fork server of a command that comes later: what it imports until then, that command does not wait for."""
    image = image_of(command, environment)
    if image is not None and image not in _servers and installed():
        _servers[image] = _start(image, command[0], environment)


def _start(image: str, python: str, environment: dict[str, str]) -> ForkServer:
    """A fork server of a process of the tests, which has begun to import its image."""
    ours, theirs = socket.socketpair()
    environment = {
        **(environment if image == "sglang" else os.environ),
        **OWN,
        **(FROM_VLLM if image == "vllm" else {}),
    }
    command = [python, "-P", __file__, str(theirs.fileno()), image, " " * 4096]
    # One that needs more than `ours` is forked from that, and imports the rest.
    with contextlib.nullcontext() if image == "vllm" else disabled():
        subprocess.Popen(
            command,
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    theirs.close()
    return ForkServer(image, ours, command[:5])


def _ignored() -> tuple[int, ...]:
    return tuple(number for number in INHERITED if signal.getsignal(number) == signal.SIG_IGN)


def _fork_or_execute(*given: Any) -> int:
    """In place of `subprocess._fork_exec`; its arguments."""
    command, _, _, kept, folder, environment = given[:6]
    read, write, errors, errpipe, new_session, preexec = given[6], given[9], given[11], given[13], given[15], given[21]
    words = tuple(os.fsdecode(word) for word in command)
    variables = dict(os.environ)
    if environment is not None:
        variables = dict(os.fsdecode(pair).split("=", 1) for pair in environment)
    plain = given[16] == -1 and given[17:20] == (None, None, None) and given[20] == -1
    if plain and (server := _server(words, variables)) is not None:
        passed = tuple(fd for fd in map(int, kept) if fd != errpipe)
        streams = [fd if fd != -1 else index for index, fd in enumerate((read, write, errors))]
        place = os.fsdecode(folder) if folder is not None else os.getcwd()
        with contextlib.suppress(pickle.PicklingError, AttributeError, OSError):
            request = Request(words, variables, place, passed, bool(new_session), _ignored(), os.getpid(), preexec)
            return server.fork(request, [*streams, *passed])
    return _execute(*given)


def _fork_or_spawn(path: Any, command: Sequence[Any], passed: Sequence[int]) -> int:
    """In place of `multiprocessing.util.spawnv_passfds`."""
    words = tuple(os.fsdecode(word) for word in command)
    if (server := _server(words, dict(os.environ))) is not None:
        fds = tuple(sorted(map(int, passed)))
        request = Request(words, dict(os.environ), os.getcwd(), fds, False, _ignored(), os.getpid(), None)
        return server.fork(request, [0, 1, 2, *fds])
    return _spawn(path, command, passed)


def _run_or_replace(file: str, command: Sequence[str], environment: dict[str, str] | None = None) -> None:
    """In place of `os.execvpe` and `os.execvp`: a known command begins in this process, whose own work ends here."""
    environment = dict(os.environ) if environment is None else environment
    if _server(command, environment) is None:
        _replace(file, command, environment)
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    take_on(command, environment)
    finish(command)


def serve(connection: socket.socket) -> Request:
    """Fork as the requester asks until it ends. Returns in a forked process only, with what was asked for."""
    while True:
        head, fds, *_ = socket.recv_fds(connection, 8, 64)
        if len(head) < 8:
            os._exit(0)
        left, parts = int.from_bytes(head, "little"), []
        while left:
            parts.append(connection.recv(left))
            left -= len(parts[-1])
        between = os.fork()
        if between == 0:
            if os.fork():
                os._exit(0)  # the requester adopts the other one
            return _begin(connection, pickle.loads(b"".join(parts)), fds)
        os.waitpid(between, 0)
        for fd in fds:
            os.close(fd)


def _begin(connection: socket.socket, request: Request, fds: Sequence[int]) -> Request:
    """The first moments of a forked process: what happens between fork and exec elsewhere."""
    while os.getppid() != request.parent:
        if not Path(f"/proc/{request.parent}").exists():
            os._exit(1)  # it was killed while it waited
        time.sleep(0.0002)
    connection.sendall(os.getpid().to_bytes(8, "little"))
    connection.close()
    become(request, fds)
    return request


def _own_server(image: str, passed: Sequence[int]) -> socket.socket | None:
    """A fork server for this process, forked from it as long as it is new; returns there the connection to serve, here None."""
    global _root
    _root = False
    _servers.clear()
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2, *passed):
            os.dup2(nothing, fd)
        os.close(nothing)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return theirs
    theirs.close()
    _servers[image] = ForkServer(image, ours)
    subprocess._fork_exec = _fork_or_execute  # type: ignore[attr-defined]
    multiprocessing.util.spawnv_passfds = _fork_or_spawn
    os.execvpe = _run_or_replace
    os.execvp = _run_or_replace
    return None


def main(descriptor: int, image: str) -> None:
    """Be the fork server of `image`; in forked processes, be those."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection: socket.socket | None = socket.socket(fileno=descriptor)
    forkready.load(image)
    assert threading.active_count() == len(os.listdir("/proc/self/task")) == 1, "a fork server has one thread"
    connection.sendall(b"+")
    request = None
    while connection is not None:
        request = serve(connection)
        if request.command[1] == GATE_FLAG:
            request = importlib.import_module("slipstream.tests.forkgate").serve_gate(*request.command[2:])
        connection = _own_server(image, request.passed) if starts_others(request.command) else None
    assert request is not None
    finish(request.command)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


if __name__ == "__main__":
    from slipstream.tests import forkserver  # the one module of this name that all of them know

    forkserver.main(int(sys.argv[1]), sys.argv[2])
