"""Injects a plan of faults into a run, changes its settings, and checks that it recovers; `audit` then examines the run folder.

    train ── first step ── fault, fault, ... each after steps or seconds ── two more steps ── SIGINT
                 │          └── settings are changed right after a fault, or right before one
                 └── ended by the fault on its supervisor or its disk? resume

Invariants:
- The run is `slipstream train` and `resume`, in their own processes. Its state is polled from files and processes only.
- No process of the run is alive when `run` returns.
- A problem is: the run ends without a fault that explains it, a step does not come, or a process outlives its supervisor.
"""

from __future__ import annotations

import asyncio
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

from ..common.process import set_parent_death_signal
from ..errors import ConfigError, DeadlineExceeded, RoleDied
from ..launch.run_context import ROLE, VARIABLE
from ..launch.supervisor.control import ChangeSettings, SettingsChanged, read_control_address, send_command
from ..launch.supervisor.factory import CLIENT_FACTORY
from ..launch.supervisor.processes import describe
from ..monitor.metrics import EVALUATION
from .changes import PlannedChange
from .plan import CORE, SUPERVISOR, PlannedFault

AUDITED_CLIENT = "slipstream.chaos.audited_client:audited_client"

POLL_S = 0.05
"""Interval of polling."""

ORPHANS_S = 10.0
"""Longest time for the processes of a killed supervisor to end."""

STOP_S = 60.0
"""Longest time for the run to end after SIGINT."""

STEPS_AFTER = 2
"""Learner steps after the last fault."""

GRACE_S = 30.0
"""How long after a fault on its supervisor or disk the end of the run is no problem."""

FULL_DISK_BYTES = {"buffer": 0, "learner": 1 << 20, "critic": 1 << 20}
"""Largest file that a role can write while its disk is full: the buffer writes nothing, the learner and critic no checkpoint."""


class FaultRunResult(msgspec.Struct):
    """What happened.

    Attributes:
        faults: injected faults by kind.
        changes: settings that were changed.
        resumes: how often the run was resumed.
        steps: learner steps, repeated ones included.
        longest_s: longest time without a learner step, counted from the end of the last fault.
        problems: see the invariants of this file.
    """

    faults: dict[str, int] = {}
    changes: int = 0
    resumes: int = 0
    steps: int = 0
    longest_s: float = 0.0
    problems: list[str] = []


class FaultRunner:
    """One run under a plan.

    Args:
        arguments: of `slipstream train`, `run.dir` among them.
        run_dir: that folder.
        hang_s: longest time without a learner step, restarts included, before the run counts as hanging.
        report: receives a line for every event.
    """

    def __init__(self, arguments: Sequence[str], run_dir: Path, hang_s: float, report: Callable[[str], None]) -> None:
        self._arguments = arguments
        self._dir = run_dir
        self._hang_s = hang_s
        self._report = report
        self._log = run_dir.with_name(run_dir.name + ".chaos.log")
        self._metrics_offset = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._last_step_at = 0.0
        self._last_fault: PlannedFault | None = None
        self._orphans_s = ORPHANS_S
        self._excused_until = 0.0
        self.result = FaultRunResult()

    def run(self, plan: Sequence[PlannedFault], changes: Sequence[PlannedChange] = ()) -> FaultRunResult:
        """Inject the faults of `plan` and make `changes`; the problems are in the result."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._log.unlink(missing_ok=True)
        try:
            self._start("train", *self._arguments)
            self._wait_for_steps(1)
            for fault in plan:
                self._change(changes, fault.number - 1, recovers=True)
                if fault.after_steps:
                    self._wait_for_steps(fault.after_steps)
                else:
                    self._sleep(fault.after_s, self._revive_hosts)
                self._change(changes, fault.number - 1, recovers=False)
                self._inject(fault)
            for recovers in (True, False):
                self._change(changes, len(plan), recovers=recovers)
                self._wait_for_steps(STEPS_AFTER)
            self._stop()
        except (RoleDied, DeadlineExceeded) as problem:
            self.result.problems.append(str(problem))
        finally:
            self._kill_all()
        return self.result

    # --- the run --------------------------------------------------------------------------------------------------

    def _start(self, *command: str) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(*command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self._environment()},
                preexec_fn=functools.partial(set_parent_death_signal, os.getpid()),  # killing chaos ends its run
            )
        self._last_step_at = time.monotonic()

    def _command(self, *arguments: str) -> list[str]:
        """`slipstream` with `arguments`, where the run's supervisor is."""
        return [sys.executable, "-P", "-m", "slipstream.launch.cli", *arguments]

    def _environment(self) -> dict[str, str]:
        return {CLIENT_FACTORY: AUDITED_CLIENT}

    def _supervisor(self) -> subprocess.Popen[bytes]:
        """The active run, resumed where a fault has ended it. Raises RoleDied where no fault explains its end."""
        assert self._process is not None
        status = self._process.poll()
        if status is None:
            return self._process
        if time.monotonic() > self._excused_until:
            raise RoleDied(
                f"the run ended with {describe(status)} after fault {self._last_fault}: {self._last_log_line()}"
            )
        self._report(f"      the run ended with {describe(status)}: {self._last_log_line()}")
        self._wait_for_exit()
        self._start("resume", str(self._dir))
        self.result.resumes += 1
        return self._process

    def _wait_for_steps(self, count: int) -> None:
        """Wait for `count` more learner steps. Raises DeadlineExceeded naming the last fault."""
        while count > 0:
            self._supervisor()
            self._revive_hosts()
            if more := self._new_steps():
                count -= more
                self._last_step_at = time.monotonic()
            waited = time.monotonic() - self._last_step_at
            self.result.longest_s = max(self.result.longest_s, waited)
            if waited > self._hang_s:
                alive = ", ".join(f"{name} ({p.status()})" for name, p in sorted(self._roles().items())) or "no role"
                raise DeadlineExceeded(
                    "slipstream chaos", f"a learner step after {self._last_fault}", self._hang_s, f"alive are {alive}"
                )
            time.sleep(POLL_S)

    def _revive_hosts(self) -> None:
        """Do what a cluster does by itself while a run goes on."""

    def _sleep(self, seconds: float, meanwhile: Callable[[], None] = lambda: None) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            meanwhile()
            time.sleep(min(POLL_S, left))

    def _new_steps(self) -> int:
        """Steps appended to metrics.jsonl, in complete lines, since the last call."""
        try:
            with (self._dir / "metrics.jsonl").open("rb") as file:
                file.seek(self._metrics_offset)
                new = file.read()
        except FileNotFoundError:
            return 0
        complete = new[: new.rfind(b"\n") + 1]
        self._metrics_offset += len(complete)
        steps = sum(EVALUATION not in msgspec.json.decode(line) for line in complete.splitlines())
        self.result.steps += steps
        return steps

    def _stop(self) -> None:
        """Stop the run as Ctrl-C does."""
        process = self._supervisor()
        process.send_signal(signal.SIGINT)
        try:
            status = process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.result.problems.append(f"the run did not stop within {STOP_S:g} s of SIGINT")
            return
        if status != 130:
            self.result.problems.append(f"the run ended with {status} on SIGINT: {self._last_log_line()}")

    def _kill_all(self) -> None:
        """Kill what is alive of the run; a process that outlives its supervisor is a problem."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
        try:
            self._wait_for_exit()
        except RoleDied as problem:
            self.result.problems.append(str(problem))
            for process in self._leftovers():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    def _wait_for_exit(self) -> None:
        """Wait until no process of the run is alive. Raises RoleDied naming those that are."""
        until = time.monotonic() + self._orphans_s
        while left := list(self._leftovers()):
            if time.monotonic() > until:
                names = ", ".join(_describe(process) for process in left)
                raise RoleDied(
                    f"{self._orphans_s:g} s after the end of the supervisor these processes are alive: {names}"
                )
            time.sleep(POLL_S)

    def _last_log_line(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "the log is empty"

    # --- its processes --------------------------------------------------------------------------------------------

    def _leftovers(self) -> Iterator[psutil.Process]:
        """Every process of the run except its supervisor."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                if str(self._dir) in process.environ().get(VARIABLE, ""):
                    yield process

    def _roles(self) -> dict[str, psutil.Process]:
        """Role -> its process, of those alive."""
        found = {}
        assert self._process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self._process.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                    if role := child.environ().get(ROLE):
                        found[role] = child
        return found

    def _victim(self, fault: PlannedFault) -> psutil.Process:
        """The process to hit, as soon as it is alive. Raises DeadlineExceeded."""
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
            self._revive_hosts()
            self._new_steps()
            time.sleep(POLL_S)
        raise DeadlineExceeded("slipstream chaos", f"{fault.victim} to start", self._hang_s, f"see {self._dir}/logs")

    # --- the settings ---------------------------------------------------------------------------------------------

    def _change(self, changes: Sequence[PlannedChange], after_fault: int, *, recovers: bool) -> None:
        """Make the changes that are due now, as `slipstream set` does, each as soon as the run can. Raises DeadlineExceeded."""
        for change in changes:
            if (change.after_fault, change.recovers) == (after_fault, recovers):
                self._report(str(change))
                self._change_one(change)

    def _change_one(self, change: PlannedChange) -> None:
        until, why = time.monotonic() + self._hang_s, ""
        while time.monotonic() < until:
            self._supervisor()
            try:
                self._set(change.override)
            except ConfigError as error:  # the run is only starting, or has just been killed
                why = str(error)
                self._sleep(POLL_S)
            else:
                self.result.changes += 1
                return
        raise DeadlineExceeded("slipstream chaos", f"the run to take {change.override}", self._hang_s, why)

    def _set(self, override: str) -> None:
        """Raises ConfigError where the run does not take it now."""
        command = ChangeSettings((override,))
        asyncio.run(send_command(read_control_address(self._dir), command, SettingsChanged, who="slipstream chaos"))

    # --- the faults -----------------------------------------------------------------------------------------------

    def _inject(self, fault: PlannedFault) -> None:
        """Inject one fault and wait for its end."""
        victim = self._victim(fault)
        self._begin(fault)
        with contextlib.suppress(psutil.NoSuchProcess):
            match fault.kind:
                case "kill":
                    victim.kill()
                    if fault.victim == SUPERVISOR and self._process is not None:
                        self._process.wait()
                case "stop":
                    victim.suspend()
                    try:
                        self._sleep(fault.seconds)
                    finally:
                        victim.resume()
                case "disk":
                    self._fill_disk(fault)
        self._end(fault, excused=fault.kind == "disk" or (fault.kind == "kill" and fault.victim == SUPERVISOR))

    def _begin(self, fault: PlannedFault) -> None:
        self._last_fault = fault
        self._report(str(fault))

    def _end(self, fault: PlannedFault, *, excused: bool) -> None:
        """The fault is over; `excused`: the run may end for it."""
        self._last_step_at = time.monotonic()
        if excused:
            self._excused_until = self._last_step_at + GRACE_S
        self.result.faults[fault.kind] = self.result.faults.get(fault.kind, 0) + 1

    def _fill_disk(self, fault: PlannedFault) -> None:
        """Limit the file size of the role's process, and of its replacements, so that writes fail as on a full disk."""
        until = time.monotonic() + fault.seconds
        limited: psutil.Process | None = None
        while time.monotonic() < until:
            process = self._roles().get(fault.role)
            if process is not None and process != limited:
                _limit_files(process, FULL_DISK_BYTES[fault.role.partition("-")[0]])
                limited = process
            time.sleep(POLL_S)
        if limited is not None:
            _limit_files(limited, resource.RLIM_INFINITY)


def _limit_files(process: psutil.Process, size: int) -> None:
    """Set the largest file size of `process`, in bytes."""
    with contextlib.suppress(ProcessLookupError):
        _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (hard if size == resource.RLIM_INFINITY else size, hard))


def _describe(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return f"{process.environ().get(ROLE, 'a process')} (pid {process.pid})"
    return f"a process with pid {process.pid}"
