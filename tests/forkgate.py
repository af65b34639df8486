"""Forked processes where a fork server is no ancestor of who starts them: the roles of a run that Ray starts, on hosts that are
namespaces, too.

A run's supervisor gives Ray the command of a role, which begins with the Python that the supervisor runs in. Inside of `gated` that
is `stand_in.py`, which connects to the *gate* and asks for the process. The gate is forked from the fork server of the tests, and
forks from itself what it is asked for:

    pytest ──> fork server ──forks──> gate <──asks── stand-in, a child of Ray's actor
                                        └──forks──> `slipstream role learner-0`, in the namespaces of the stand-in

Invariants:
- The stand-in and its process end together, with the same exit status; signals to the stand-in reach the process.
- The process is in the stand-in's network and mounts, in a session of its own if the stand-in has one, and writes where that does.
- Whoever looks for the processes of a run finds the process, not the stand-in.
- The gate and all that it forked end with the process of the tests.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib
import marshal
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from slipstream.common.process import PARENT, PR_SET_PDEATHSIG
from slipstream.tests import forkserver
from slipstream.tests.forked import STAND_IN, Request, become
from slipstream.tests.forkimages import GATE_FLAG, image_of

GATE = "SLIPSTREAM_TESTS_GATE"
"""Variable with the address of the gate."""

CUSTOM = "sitecustomize.py"
"""What Python imports from a folder of PYTHONPATH when it starts."""

SUPERVISOR = "from slipstream.tests import forkgate; forkgate.supervise()"
"""A command of the package that is executed itself, while its roles are forked."""

STARTED_S = 60.0
ASKED_S = 10.0
"""Longest time for a stand-in that has connected to say what it asks for: its host may be frozen."""


class Asked(NamedTuple):
    """What a stand-in asks for; it has the id `pid`, and leads a session if it `leads`."""

    command: list[str]
    environment: dict[str, str]
    folder: str
    ignored: tuple[int, ...]
    pid: int
    leads: bool


class Forked:
    """A process that the gate forked, for as long as it lives."""

    def __init__(self, pid: int, stand_in: socket.socket, *, leads: bool) -> None:
        self.pid, self.stand_in, self.leads, self.ended = pid, stand_in, leads, os.pidfd_open(pid)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.kill_group()

    def kill_group(self) -> None:
        if self.leads:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


# --- in the process of the tests --------------------------------------------------------------------------------------


@contextlib.contextmanager
def gated(image: str = "ours") -> Iterator[None]:
    """With a gate of this image, roles of runs that Ray starts are forked, and so are commands that begin with `python()`. With one
    of `sglang` it is SGLang's servers, whoever starts them."""
    if not forkserver.installed():
        yield
        return
    new = {name: value for name, value in _gate(image).items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            del os.environ[name]


def python() -> str:
    """What stands for Python inside of `gated`; Python elsewhere."""
    return os.environ.get(STAND_IN, sys.executable)


def programs() -> list[str]:
    """Folders for the front of a PATH, on which `slipstream` is forked inside of `gated`."""
    return [str(Path(os.environ[STAND_IN]).parent / "bin")] if STAND_IN in os.environ else []


@functools.cache
def _gate(image: str) -> dict[str, str]:
    """The variables of processes inside of `gated`. Opens the gate."""
    executable, named, environment = sys.executable, STAND_IN, dict(os.environ)
    if image == "sglang":
        # Imported here: the gate itself is of SGLang's Python then.
        from slipstream.configs import load
        from slipstream.rollout.engines.sglang import launch as sglang

        executable, named = sglang._python(), sglang.PYTHON
        environment |= sglang.environment(load("quickstart", ["rollout.engine.kind=sglang"]))
    folder = Path(tempfile.mkdtemp(prefix="slipstream-gate-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    stand_in, gate = folder / "python", folder / "gate"
    stand_in.write_text(f"#!{executable} -IS\n{Path(__file__).with_name('stand_in.py').read_text()}")
    stand_in.chmod(0o755)
    supervisor, program = folder / "supervisor", folder / "bin" / "slipstream"
    executed = f'"{sys.executable}" -P -c "{SUPERVISOR}"'  # instead of `python -P -m slipstream.launch.cli`
    supervisor.write_text(f'#!/bin/sh\nshift 3\nexec {executed} "$@"\n')
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{stand_in}" -P -m slipstream.launch.cli "$@"\n')
    for script in (supervisor, program):
        script.chmod(0o755)
    process = subprocess.Popen([executable, GATE_FLAG, str(gate), image], stdin=subprocess.DEVNULL, env=environment)
    atexit.register(process.kill)
    until = time.monotonic() + STARTED_S
    while not gate.exists():
        assert process.poll() is None, "the gate has ended"
        assert time.monotonic() < until, "the gate did not open"
        time.sleep(0.01)  # it has nothing to be awaited by
    return {GATE: str(gate), named: str(stand_in)}


# --- in the gate ------------------------------------------------------------------------------------------------------


def serve_gate(path: str, image: str) -> Request:
    """Fork, as an `image`, for all stand-ins that connect to `path`. Returns in a forked process only, with what was asked for."""
    _end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listener, waiting = socket.socket(socket.AF_UNIX), selectors.DefaultSelector()
    listener.bind(f"{path}.new")
    listener.listen(128)
    os.rename(f"{path}.new", path)
    waiting.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in waiting.select():
            forked: Forked | None = key.data
            if forked is None:
                if (request := _answer(listener, waiting, image)) is not None:
                    return request
            elif key.fileobj is forked.stand_in and forked.stand_in.fileno() != -1:
                forked.kill()
                _forget(forked.stand_in, waiting)
            elif key.fd == forked.ended:
                _bury(forked, waiting)


def _forget(stand_in: socket.socket, waiting: selectors.BaseSelector) -> None:
    waiting.unregister(stand_in)
    stand_in.close()


def _bury(forked: Forked, waiting: selectors.BaseSelector) -> None:
    """Tell the stand-in, if there is one, how its process ended."""
    status = os.waitstatus_to_exitcode(os.waitpid(forked.pid, 0)[1])
    forked.kill_group()
    waiting.unregister(forked.ended)
    os.close(forked.ended)
    if forked.stand_in.fileno() != -1:
        with contextlib.suppress(OSError):
            forked.stand_in.sendall(status.to_bytes(8, "little", signed=True))
        _forget(forked.stand_in, waiting)


def _answer(listener: socket.socket, waiting: selectors.BaseSelector, image: str) -> Request | None:
    """Fork for the next stand-in. Returns what it asks for in the forked process, None in the gate."""
    stand_in, _ = listener.accept()
    asked, fds = _asked(stand_in)
    if asked is None or not _is_forked(asked, image):
        for fd in fds:
            os.close(fd)
        with contextlib.suppress(OSError):
            stand_in.sendall(bytes(8))
        stand_in.close()
        return None
    gate = os.getpid()
    if (pid := os.fork()) == 0:
        for key in [*waiting.get_map().values()]:
            os.close(key.fileobj.detach() if isinstance(key.fileobj, socket.socket) else key.fd)
        waiting.close()
        stand_in.close()
        return _begin(asked, fds, gate)
    for fd in fds:
        os.close(fd)
    forked = Forked(pid, stand_in, leads=asked.leads)
    with contextlib.suppress(OSError):  # one that was killed meanwhile is heard of below
        stand_in.sendall(pid.to_bytes(8, "little"))
    waiting.register(stand_in, selectors.EVENT_READ, forked)
    waiting.register(forked.ended, selectors.EVENT_READ, forked)
    return None


def _asked(stand_in: socket.socket) -> tuple[Asked | None, list[int]]:
    """What a stand-in asks for, None if it has ended, and the descriptors that came with it."""
    fds: list[int] = []
    stand_in.settimeout(ASKED_S)
    try:
        head, fds, *_ = socket.recv_fds(stand_in, 8, 8)
        left, parts = int.from_bytes(head, "little"), []
        while left and (not parts or parts[-1]):
            parts.append(stand_in.recv(left))
            left -= len(parts[-1])
        stand_in.settimeout(None)
        return Asked(*marshal.loads(b"".join(parts))), fds
    except (OSError, EOFError, ValueError, TypeError):
        return None, fds


def _is_forked(asked: Asked, image: str) -> bool:
    """Other folders on PYTHONPATH than the gate's may only customize Python. What elsewhere starts vLLM's engines starts none
    here: Ray does."""
    added, ours = _added(asked.environment), os.environ.get("PYTHONPATH")
    if any(not os.path.isdir(folder) or {*os.listdir(folder)} - {CUSTOM, "__pycache__"} for folder in added):
        return False
    variables = asked.environment | ({"PYTHONPATH": ours} if ours is not None else {})
    if ours is None:
        variables.pop("PYTHONPATH", None)
    wanted = image_of(asked.command, variables)
    return wanted in ("ours", image) or (wanted == "vllm" and "slipstream.launch.cli" in asked.command)


def _added(environment: dict[str, str]) -> list[str]:
    """Folders that are on PYTHONPATH of `environment` alone."""
    ours = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder and folder not in ours]


def _begin(asked: Asked, fds: list[int], gate: int) -> Request:
    """The first moments of a forked process."""
    _end_with_parent()
    if os.getppid() != gate:
        os._exit(1)
    added = _added(asked.environment)
    parent = {PARENT: str(gate)} if PARENT in asked.environment else {}
    request = Request(
        tuple(asked.command), asked.environment | parent, asked.folder, (), asked.leads, asked.ignored, gate, None
    )
    try:
        _enter(asked.pid)
        become(request, fds)
    except OSError:
        os._exit(1)  # the stand-in has ended
    for folder in added:
        exec(Path(folder, CUSTOM).read_text(), {"__name__": "sitecustomize"})
    return request


def _enter(pid: int) -> None:
    """Be in the network and in the mounts of process `pid`."""
    for kind in ("net", "mnt"):
        theirs = f"/proc/{pid}/ns/{kind}"
        if os.stat(theirs).st_ino != os.stat(f"/proc/self/ns/{kind}").st_ino:
            namespace = os.open(theirs, os.O_RDONLY)
            if ctypes.CDLL(None, use_errno=True).setns(namespace, 0):
                raise OSError(ctypes.get_errno(), f"setns({kind}) failed")
            os.close(namespace)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


# --- in what starts roles ---------------------------------------------------------------------------------------------


def start_elsewhere(command: Sequence[str]) -> None:
    """Roles that `command`, which runs here, starts begin with what stands for Python, where its environment names that. The
    supervisor that `slipstream chaos` starts is executed, and its roles are forked: it is stopped there, too."""
    if (stand_in := os.environ.get(STAND_IN)) is not None:
        executables = {"slipstream.launch.supervisor.processes": stand_in}
        if "chaos" in command:
            executables["slipstream.chaos.harness"] = str(Path(stand_in).with_name("supervisor"))
        for name, executable in executables.items():
            vars(importlib.import_module(name))["sys"] = types.SimpleNamespace(executable=executable)


def supervise() -> None:
    """Run the command of the package in `sys.argv`."""
    start_elsewhere(sys.argv)
    runpy.run_module("slipstream.launch.cli", run_name="__main__", alter_sys=True)
