"""A run that is tormented by a plan of faults, and seen to recover from each; what is left of it is for `chaos_audit`.

    train ── first step ── fault, fault, ... each after steps or seconds ── two more steps ── SIGINT
                 └── ended by the fault on its supervisor or its disk? resume

Invariants:
- The run is the one that users get: `slipstream train` and `resume`, in processes of their own.
- Whatever happens, nothing of the run lives when `torment` returns.
- An end of the run that no fault explains, a step that does not come, or a process that outlives its supervisor, is a problem.

Nobody tells this process what the run does, on purpose: it looks at files and processes, many times a second.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import psutil

from ..errors import DeadlineExceeded, RoleDied
from ..parent import die_with
from . import journal
from .chaos_plan import CORE, SUPERVISOR, Fault
from .job import ROLE, VARIABLE
from .member import describe

LOOK_S = 0.05
"""Between looks."""

ORPHANS_S = 10.0
"""How long the kernel and the roles may take to end what a killed supervisor has left."""

STOP_S = 60.0
"""How long the run may take to end in good order."""

SEEN_STEPS = 2
"""Learner steps after the last fault."""

EXCUSE_S = 30.0
"""How long after a fault on its supervisor or its disk the run may end without being to blame."""


FULL = {"buffer": 0, "learner": 1 << 20, "critic": 1 << 20}
"""Bytes beyond which no file of a role can grow while its disk is full: the buffer writes nothing, who learns no checkpoint."""


class Told(msgspec.Struct):
    """What happened.

    Attributes:
        struck: faults that were carried out, by kind.
        resumes: how often the run was continued.
        steps: lines of metrics that came, repeated steps included.
        longest_s: longest time without a learner step, and while no fault lasted.
        problems: what should not have happened.
    """

    struck: dict[str, int] = {}
    resumes: int = 0
    steps: int = 0
    longest_s: float = 0.0
    problems: list[str] = []


class Torment:
    """One run under a plan.

    Args:
        arguments: of `slipstream train`, `run.dir` among them.
        run_dir: that folder.
        hang_s: longest time without a learner step, restarts included, before the run counts as hanging.
        say: is told of each thing that happens, a line each.
    """

    def __init__(self, arguments: Sequence[str], run_dir: Path, hang_s: float, say: Callable[[str], None]) -> None:
        self._arguments = arguments
        self._dir = run_dir
        self._hang_s = hang_s
        self._say = say
        self._log = run_dir.with_name(run_dir.name + ".chaos.log")
        self._read = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._calm_since = 0.0
        self._last: Fault | None = None
        self._excused_until = 0.0
        self.told = Told()

    def torment(self, plan: Sequence[Fault]) -> Told:
        """Carry out `plan`; returns what happened, problems included."""
        self._log.unlink(missing_ok=True)
        try:
            self._start("train", *self._arguments)
            self._until_steps(1)
            for fault in plan:
                if fault.after_steps:
                    self._until_steps(fault.after_steps)
                else:
                    self._for_seconds(fault.after_s)
                self._strike(fault)
            self._until_steps(SEEN_STEPS)
            self._stop()
        except (RoleDied, DeadlineExceeded) as problem:
            self.told.problems.append(str(problem))
        finally:
            self._end()
        return self.told

    # --- the run --------------------------------------------------------------------------------------------------

    def _start(self, *command: str) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "slipstream.launch.cli", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, journal.NOTE: "1"},
                preexec_fn=functools.partial(die_with, os.getpid()),  # who kills chaos ends its run
            )
        self._calm_since = time.monotonic()

    def _supervisor(self) -> subprocess.Popen[bytes]:
        """The run, which goes on; where a fault has ended it, it is resumed.

        Raises:
            RoleDied: it ended for no such reason.
        """
        assert self._process is not None
        status = self._process.poll()
        if status is None:
            return self._process
        if time.monotonic() > self._excused_until:
            raise RoleDied(f"the run ended with {describe(status)} after fault {self._last}: {self._last_words()}")
        self._say(f"      the run ended with {describe(status)}: {self._last_words()}")
        self._without_orphans()
        self._start("resume", str(self._dir))
        self.told.resumes += 1
        return self._process

    def _until_steps(self, count: int) -> None:
        """Wait for `count` more learner steps. Raises DeadlineExceeded naming the last fault."""
        while count > 0:
            self._supervisor()
            if more := self._new_steps():
                count -= more
                self._calm_since = time.monotonic()
            calm = time.monotonic() - self._calm_since
            self.told.longest_s = max(self.told.longest_s, calm)
            if calm > self._hang_s:
                living = ", ".join(f"{name} ({p.status()})" for name, p in sorted(self._roles().items())) or "nobody"
                raise DeadlineExceeded(
                    "slipstream chaos", f"a learner step after {self._last}", self._hang_s, f"alive are {living}"
                )
            time.sleep(LOOK_S)

    def _for_seconds(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(LOOK_S, left))

    def _new_steps(self) -> int:
        """Whole lines that metrics.jsonl has got since the last call."""
        try:
            with (self._dir / "metrics.jsonl").open("rb") as file:
                file.seek(self._read)
                new = file.read()
        except FileNotFoundError:
            return 0
        self._read += new.rfind(b"\n") + 1
        steps = new.count(b"\n")
        self.told.steps += steps
        return steps

    def _stop(self) -> None:
        """End the run as Ctrl-C does."""
        process = self._supervisor()
        process.send_signal(signal.SIGINT)
        try:
            status = process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.told.problems.append(f"the run did not stop within {STOP_S:g} s of SIGINT")
            return
        if status != 130:
            self.told.problems.append(f"the run ended with {status} on SIGINT: {self._last_words()}")

    def _end(self) -> None:
        """Leave nothing behind, and tell of what had to be killed."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
        try:
            self._without_orphans()
        except RoleDied as problem:
            self.told.problems.append(str(problem))
            for process in self._leftovers():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    def _without_orphans(self) -> None:
        """Wait until nothing of the run lives. Raises RoleDied naming what does."""
        until = time.monotonic() + ORPHANS_S
        while left := list(self._leftovers()):
            if time.monotonic() > until:
                names = ", ".join(_describe(process) for process in left)
                raise RoleDied(f"{ORPHANS_S:g} s after the end of its supervisor there still lives {names}")
            time.sleep(LOOK_S)

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "nothing was said"

    # --- its processes --------------------------------------------------------------------------------------------

    def _leftovers(self) -> Iterator[psutil.Process]:
        """Every process of the run but its supervisor."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                if str(self._dir) in process.environ().get(VARIABLE, ""):
                    yield process

    def _roles(self) -> dict[str, psutil.Process]:
        """Role -> its living process."""
        found = {}
        assert self._process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self._process.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                    if role := child.environ().get(ROLE):
                        found[role] = child
        return found

    def _victim(self, fault: Fault) -> psutil.Process:
        """The process to hit, as soon as there is one. Raises DeadlineExceeded."""
        until = time.monotonic() + self._hang_s
        while time.monotonic() < until:
            supervisor = psutil.Process(self._supervisor().pid)
            if fault.victim == SUPERVISOR:
                return supervisor
            process = self._roles().get(fault.role)
            if process is not None and fault.victim.endswith(CORE):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process = next((c for c in process.children() if "spawn_main" in " ".join(c.cmdline())), None)
            if process is not None:
                return process
            self._new_steps()
            time.sleep(LOOK_S)
        raise DeadlineExceeded("slipstream chaos", f"{fault.victim} to live", self._hang_s, f"see {self._dir}/logs")

    # --- the faults -----------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        """Carry out one fault, to its end."""
        victim = self._victim(fault)
        self._last = fault
        self._say(str(fault))
        with contextlib.suppress(psutil.NoSuchProcess):
            match fault.kind:
                case "kill":
                    victim.kill()
                    if fault.victim == SUPERVISOR and self._process is not None:
                        self._process.wait()
                case "stop":
                    victim.suspend()
                    try:
                        self._for_seconds(fault.seconds)
                    finally:
                        victim.resume()
                case "disk":
                    self._fill_disk(fault)
        self._calm_since = time.monotonic()
        if fault.kind == "disk" or (fault.kind == "kill" and fault.victim == SUPERVISOR):
            self._excused_until = self._calm_since + EXCUSE_S
        self.told.struck[fault.kind] = self.told.struck.get(fault.kind, 0) + 1

    def _fill_disk(self, fault: Fault) -> None:
        """Let no file of the victim grow, whoever plays its role meanwhile: as on a full disk, a write fails."""
        until = time.monotonic() + fault.seconds
        limited: psutil.Process | None = None
        while time.monotonic() < until:
            process = self._roles().get(fault.role)
            if process is not None and process != limited:
                _limit_files(process, FULL[fault.role.partition("-")[0]])
                limited = process
            time.sleep(LOOK_S)
        if limited is not None:
            _limit_files(limited, resource.RLIM_INFINITY)


def _limit_files(process: psutil.Process, size: int) -> None:
    """Let files of `process` grow to at most `size` bytes."""
    with contextlib.suppress(ProcessLookupError):
        _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (hard if size == resource.RLIM_INFINITY else size, hard))


def _describe(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return f"{process.environ().get(ROLE, 'a process')} (pid {process.pid})"
    return f"a process that was {process.pid}"
