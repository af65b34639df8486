"""`slipstream env check` in a process of its own, so that an environment that blocks or ends its process is named.

    this process ──config──> child: the checks of `envs.check`
                 <─ a line per check, and a sign of life a second and a task, through a pipe

Invariants:
- A child without a sign of life for `SILENT_S` is asked where it is, which `faulthandler` says without the interpreter's lock, and
  killed. The checks that are left would block again, and are not begun.
- A fault is said once: after a call of the environment that is broken, the checks that are left are not made.
- No process that the child started is left.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from ..common.process import set_parent_death_signal
from ..configs.environments import EnvironmentKind
from ..envs.check import CHECKS, STEP_S, BrokenCall, ContractViolation, run_check, subject_of
from ..errors import ConfigError, SlipstreamError, encodable
from .supervisor.processes import describe

SILENT_S = STEP_S + 10.0  # beyond the longest step, which the child names itself as long as its event loop turns
START_S = 300.0  # longest start of the child and making of its environment: some libraries take a minute to import
WHERE_S = 2.0  # longest wait for the child's traceback
PIECE = 1 << 16  # bytes read from a pipe at once
ASK = signal.SIGUSR1  # makes the child write its traceback
OURS = tuple(str(Path(__file__).parent.parent / part) for part in ("envs", "launch", "common", "configs"))
CHILD = (
    "import sys, msgspec\n"
    "sys.path[:] = msgspec.json.decode(sys.argv[1])\n"
    "from slipstream.launch.env_check import run_checks\n"
    "run_checks(*sys.argv[2:])\n"
)


class SourceMade(msgspec.Struct, frozen=True, tag=True):
    name: str


class CheckEnded(msgspec.Struct, frozen=True, tag=True):
    name: str
    holds: bool
    found: str  # in one line


class CheckRefused(msgspec.Struct, frozen=True, tag=True):
    """There is no such environment."""

    why: str


class ChecksLeft(msgspec.Struct, frozen=True, tag=True):
    """The other checks would name the same fault again, and are not made."""

    after: str  # the check that named it


class SignOfLife(msgspec.Struct, frozen=True, tag=True):
    """The child works."""


CheckMessage = SourceMade | CheckEnded | CheckRefused | ChecksLeft | SignOfLife


def check_environment(
    key: str, config: EnvironmentKind, seed: int, show: Callable[[str], None], silent_s: float = SILENT_S
) -> bool:
    """Check the environment of the section `key`; `show` gets a line for each check. Whether all of them hold. Raises ConfigError:
    there is no such environment."""
    messages, out = os.pipe()
    traceback, dump = os.pipe()
    given = (msgspec.json.encode(sys.path).decode(), msgspec.json.encode(config).decode(), str(seed))
    command = [sys.executable, "-c", CHILD, *given, str(out), str(dump), str(os.getpid())]
    child = subprocess.Popen(command, pass_fds=(out, dump), start_new_session=True)
    os.close(out)
    os.close(dump)
    left, failed = list(CHECKS), False
    try:
        for message in _messages(messages, silent_s):
            match message:
                case SourceMade(name):
                    show(f"{key}: {name}")
                case CheckEnded(name, holds, found):
                    left.remove(name)
                    failed |= not holds
                    show(_line("ok" if holds else "WRONG", name, found))
                case CheckRefused(why):
                    raise ConfigError(why)
                case ChecksLeft(after):
                    _show_left(left, after, show)
                    left.clear()
                case None:
                    os.kill(child.pid, ASK)
                    line = _user_line(_read_all(traceback, WHERE_S))
                    where = f" at {line}" if line else ""
                    show(
                        _line(
                            "WRONG",
                            left[0],
                            f"it blocks its process for more than {silent_s:g} s{where}; "
                            "run what blocks by `await in_thread(...)`, and what Python cannot interrupt with env.isolate=1",
                        )
                    )
                    break
                case SignOfLife():
                    pass
        else:
            if left:
                show(_line("WRONG", left[0], f"it ended its process: {describe(child.wait())}"))
        _show_left(left[1:], left[0] if left else "", show)
        return not failed and not left
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        os.close(messages)
        os.close(traceback)


def _line(mark: str, name: str, found: str) -> str:
    return f"{mark:6}{name:13}{found}"


def _show_left(names: Iterable[str], after: str, show: Callable[[str], None]) -> None:
    for name in names:
        show(_line("-", name, f"not checked, after {after}"))


def _messages(pipe: int, silent_s: float) -> Iterator[CheckMessage | None]:
    """What the child sends, until it closes the pipe; None when it is silent for `silent_s`, or `START_S` at first."""
    rest, limit = b"", max(START_S, silent_s)
    while True:
        if not select.select([pipe], [], [], limit)[0]:
            yield None
            continue
        if not (piece := os.read(pipe, PIECE)):
            return
        limit = silent_s
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield msgspec.json.decode(line, type=CheckMessage)


def _read_all(pipe: int, seconds: float) -> str:
    """What is written to a pipe until it is closed, or `seconds` have passed, or nothing more comes for a moment."""
    found, until = b"", time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if not select.select([pipe], [], [], min(left, seconds / 4) if found else left)[0]:
            break
        if not (piece := os.read(pipe, PIECE)):
            break
        found += piece
    return found.decode(errors="replace")


def _user_line(traceback: str) -> str:
    """The innermost line of a traceback of `faulthandler` that is neither ours nor a library's; "" where there is none."""
    theirs = (*OURS, sysconfig.get_path("stdlib"), "<")
    for line in traceback.splitlines():
        _, quote, rest = line.strip().partition('File "')
        path, _, place = rest.partition('", line ')
        if quote and not path.startswith(theirs) and "site-packages" not in path:
            return f"{Path(path).name}:{place}"
    return ""


def run_checks(config: str, seed: str, out: str, dump: str, parent: str) -> None:
    """The child."""
    set_parent_death_signal(int(parent))
    for descriptor in (int(out), int(dump)):
        os.set_inheritable(descriptor, False)  # what the environment starts must not keep the pipes open
    faulthandler.register(ASK, file=int(dump), all_threads=True)

    def send(message: CheckMessage) -> None:
        os.write(int(out), msgspec.json.encode(message) + b"\n")

    try:
        section = msgspec.json.decode(config, type=EnvironmentKind)
        subject = subject_of(section, int(seed), alive=lambda: send(SignOfLife()))
    except SlipstreamError as error:
        send(CheckRefused(encodable(str(error))))
        return
    send(SourceMade(subject.source.name))
    faults: dict[str, str] = {}
    for name in CHECKS:
        try:
            found, fault = run_check(name, subject), None
        except (ContractViolation, SlipstreamError) as error:
            found, fault = " ".join(str(error).split()), error
            if same := next((earlier for earlier, line in faults.items() if line in found), ""):
                send(ChecksLeft(same))
                return
            faults[name] = found
        send(CheckEnded(name, fault is None, encodable(found)))
        if isinstance(fault, BrokenCall):
            send(ChecksLeft(name))
            return
