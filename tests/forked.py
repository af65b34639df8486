"""A process that was forked for a test, from its first moment to its end: it becomes what an exec would have made of it."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import importlib
import os
import random
import runpy
import signal
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from slipstream.tests.forkimages import split_command, without_nice

INHERITED = (signal.SIGHUP, signal.SIGQUIT)
"""Signals that a process ignores from its start if its parent does, as `nohup` has it."""

STAND_IN = "SLIPSTREAM_TESTS_STAND_IN"
"""Variable with the path of what stands for Python in commands that Ray starts, see `forkgate.py`."""

_path = list(sys.path)


class Request(NamedTuple):
    """A process to fork. Its standard streams travel beside it, and then the descriptors that it is to have as `passed`."""

    command: tuple[str, ...]
    environment: dict[str, str]
    folder: str
    passed: tuple[int, ...]
    new_session: bool
    ignored: tuple[int, ...]
    parent: int
    preexec: Callable[[], object] | None


def become(request: Request, fds: Sequence[int]) -> None:
    """Be the process that was asked for, up to its first instruction."""
    targets = (0, 1, 2, *request.passed)
    moved = _above(fds, max(targets))
    for target, fd in zip(targets, moved, strict=True):
        os.dup2(fd, target)
    for fd in moved:
        os.close(fd)
    os.chdir(request.folder)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as Python begins: it ignores SIGPIPE and SIGXFSZ
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in INHERITED:
        signal.signal(number, signal.SIG_IGN if number in request.ignored else signal.SIG_DFL)
    if request.new_session:
        os.setsid()
    take_on(request.command, request.environment)
    if request.preexec is not None:
        request.preexec()


def _above(fds: Sequence[int], last: int) -> list[int]:
    """The same files at descriptors above `last`, the highest that the process is given by number; the old ones are closed."""
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, last + 1) for fd in fds]
    for fd in fds:
        os.close(fd)
    return moved


def take_on(command: Sequence[str], environment: dict[str, str]) -> None:
    """Have this command line and environment, for libraries and for /proc, too."""
    os.environ.clear()
    os.environ.update(environment)
    starts = [int(word) for word in Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:49]]
    blocks = ("\0".join(command), "\0".join(f"{key}={value}" for key, value in environment.items()))
    for text, start, end in zip(blocks, starts[::2], starts[1::2], strict=True):
        data = os.fsencode(text)[: end - start - 2]
        ctypes.memmove(start, data.ljust(end - start, b"\0"), end - start)
    tempfile.tempdir = None  # found again from this environment
    random.seed()
    sys.modules["numpy"].random.seed()
    torch = sys.modules["torch"]
    threads = environment.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))
    torch.set_num_threads(int(threads))
    if "torch._dynamo.config" in sys.modules:
        sys.modules["torch._dynamo.config"].disable = environment.get("TORCH_COMPILE_DISABLE") == "1"
    if STAND_IN in environment and "slipstream.launch.supervisor.processes" in sys.modules:
        importlib.import_module("slipstream.tests.forkgate").start_elsewhere(command)


def _run(command: Sequence[str]) -> None:
    """Do what Python does with this command line, up to the end of its main module."""
    command, slower = without_nice(command)
    os.nice(slower)
    kind, what, rest = split_command(command)
    sys.stdout.reconfigure(line_buffering=os.isatty(1), write_through="-u" in command)  # type: ignore[union-attr]
    sys.path[:] = _path if "-P" in command else [str(Path(what).parent) if not kind else os.getcwd(), *_path]
    sys.argv = [kind or what, *rest]
    sys.orig_argv = list(command)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if kind == "-m":
        runpy._run_module_as_main(what)  # type: ignore[attr-defined]
        return
    if not kind:
        main.__file__ = what
    exec(compile(what if kind else Path(what).read_bytes(), what if not kind else "<string>", "exec"), main.__dict__)


def finish(command: Sequence[str]) -> NoReturn:
    """Run it to the end of the process. The interpreter is not taken down: to free what was imported takes half a second."""
    status: object = 0
    try:
        _run(command)
    except SystemExit as end:
        status = end.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    if status is not None and not isinstance(status, int):
        print(status, file=sys.stderr)  # noqa: T201
        status = 1
    with contextlib.suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit((status or 0) & 0xFF)
