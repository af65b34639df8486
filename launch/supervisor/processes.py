"""The processes of a run's roles: started, watched, probed, restarted, ended; and what an exit means.

Invariants:
- The roles of a failure domain live and die together: the ranks of the learner, and the processes of a server that spans hosts.
- A role is restarted `launch.restarts` times, unless a restart would fail in the same way.
- A role that was asked to end is not restarted.
- A server that others started is probed, and neither started nor ended. One that fails is missed until it answers again, however
  often: `launch.restarts` is of processes of the run.
- A role whose host is lost is started on another one, and that is none of its restarts if it had worked. An engine or worker waits
  for room as long as another of its kind runs; any other role ends the run after `PLACE_S`, and so does the last of a kind.
- A process that SIGKILL does not end within `KILL_S` is reported; the run does not wait for it longer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...buffer.schema import process_names
from ...common.replica_names import replica_of
from ...common.tasks import Stopped, run_or_stop
from ...common.waits import Wait
from ...configs import Config
from ...configs.reward import ModelReward
from ...errors import ConfigError, DeadlineExceeded, RoleDied, TrackedWait, with_deadline
from ...monitor.terminal import View
from ...rollout.engines.access import ServerAccess
from ...rollout.engines.http_client import HttpClient, is_healthy
from ..launchers.local import KILL_S, PLACE_S, Launcher, Placement, PlacementLost, ProcessHandle
from ..resources import engine_roles, ranks_by_kind
from .external import UNWELL, ExternalServer

log = logging.getLogger(__name__)

PROBE_S = 5.0  # longest wait for a server to answer that it is well: every kind answers at any time, also while paused
RETRY_S = 0.2  # between probes of a server that is starting: a foreign server has no event to wait for
# Kinds of roles that end by themselves; the learner waits for them: a restarted replica needs its weights.
FINISHING = ("evaluator", "rater", "sft")
SPARE = ("engine", "worker")  # kinds of roles without one of which a run goes on
MOVES = 5  # how often in a row a role may lose its place before it has started
FINAL = 3  # exit status of a role whose error a restart would repeat
LOG_TAIL = 256 << 10  # bytes at the end of a log that are searched for an error
ERROR_LINE = re.compile(r"\b[A-Z]\w*(?:Error|Exception): .+")
# Errors that only report another one, of a process that the server started.
SYMPTOM = re.compile(
    r"root cause|EngineDeadError|EngineCore encountered an issue|died unexpectedly|connection (?:closed|reset) by peer",
    re.IGNORECASE,
)
BROKEN_INSTALL = re.compile(r"(?:ModuleNotFound|Import|Syntax|Indentation)Error: ")  # errors that every restart repeats
# Errors that may pass although they came twice: ports, memory and peers become free.
TRANSIENT = re.compile(
    r"OSError|Errno|in use|out of memory|MemoryError|OutOfMemory|[Cc]onnection|[Tt]imed? ?out|Timeout"
)


@dataclass
class RoleProcess:
    name: str
    environment: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    probe: tuple[str, str] | None = None  # URL and path at which a server without heartbeats answers while it is well
    external: ExternalServer | None = None  # a server that others started
    leader: str = (
        ""  # the role whose answers are this one's signs of life, of a server that spans hosts; empty for its own
    )
    on_ready: Callable[[], None] = lambda: None  # its process has answered the first probe
    on_end: Callable[[], None] = lambda: None  # its process has ended
    process: ProcessHandle | None = None
    exit_status: int | None = None
    restarts: int = 0
    deadline: float = float("inf")  # when silence means that the process hangs; infinite while nothing is expected
    last_seen: float = 0.0  # time of the last sign of life; the start counts
    waits: tuple[Wait, ...] = ()  # as the role reported at `waits_at`
    waits_at: float = 0.0
    stuck_at: str = ""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    checkpoint: int = 0  # the step of the newest checkpoint that it reported
    saved: asyncio.Event = field(default_factory=asyncio.Event)  # set with every new checkpoint, and when it is done
    error: str = ""  # why the process ends, as it reported or as the supervisor decided
    expected: bool = False  # the error is not an unforeseen exception
    ending: asyncio.Event = field(default_factory=asyncio.Event)  # set when it is asked to end; it is not restarted
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while a process is started or ended
    log_start: int = 0  # size of the role's log when the process was started
    served: bool | None = None  # whether this process served a version; None where no versions are pushed to it
    previous_error: str = ""  # of the process before this one, if that did no work

    @property
    def kind(self) -> str:
        return self.name.partition("-")[0]

    @property
    def stopping(self) -> bool:
        return self.ending.is_set()

    @property
    def running(self) -> bool:
        return self.process is not None and self.exit_status is None

    def why_no_restart(self, error: str, failed: RoleProcess) -> str:
        """Why another process would end with the same `error`; empty where one may succeed. Call once for each failed process:
        `failed`, which is this role's or, of a server that spans hosts, that of one of its others."""
        previous, self.previous_error = self.previous_error, ""
        if failed.exit_status == FINAL:
            return "a restart would not help"
        worked = self.ready.is_set() if self.served is None else self.served
        if worked or failed.expected or not error or (failed.exit_status or 0) < 0:
            return ""
        if BROKEN_INSTALL.match(error):
            return "a restart would not help"
        self.previous_error = re.sub(r"\d+", "", error)
        if self.previous_error == previous and not TRANSIENT.search(error):
            return "given up: a restart ended with the same error"
        return ""


@dataclass(eq=False)
class ProcessManager:
    """The roles of a run by name. Setting `kill_now` cuts short the time that roles have to end. `moved` is told each new placement
    of a role before it is started there. `access` says how to reach a server; `revoke` is told that a role has left the run."""

    config: Config
    run_dir: Path
    launcher: Launcher
    view: View
    roles: dict[str, RoleProcess] = field(default_factory=dict)
    kill_now: asyncio.Event = field(default_factory=asyncio.Event)
    moved: Callable[[str, Placement], Awaitable[None]] | None = None
    access: Callable[[str], ServerAccess] = lambda name: ServerAccess()
    revoke: Callable[[str], None] = lambda name: None

    def of_kind(self, *kinds: str) -> list[RoleProcess]:
        return [role for role in self.roles.values() if role.kind in kinds]

    async def start(self, *roles: RoleProcess) -> None:
        """Start a process of each of `roles`, a failure domain, but of those that were asked to end. Where the host of one is lost,
        it gets another place first. Raises PlacementLost where there is none."""
        for left in reversed(range(MOVES + 1)):
            outcomes = await asyncio.gather(*map(self._start, roles), return_exceptions=True)
            failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
            if other := next((one for one in failures if not isinstance(one, PlacementLost)), None):
                raise other
            if not failures:
                return
            if not left:
                raise PlacementLost(f"{failures[0]}, after it was moved {MOVES} times in a row")
            await asyncio.gather(*(role.process.kill() for role in roles if role.process))
            for role in roles:  # no task waits for the end of what was killed: from now on it counts as not running
                role.process, role.deadline = None, float("inf")
            lost = [(role, one) for role, one in zip(roles, outcomes, strict=True) if isinstance(one, PlacementLost)]
            moves = await asyncio.gather(*(self._move(role, error) for role, error in lost), return_exceptions=True)
            if error := next((one for one in moves if isinstance(one, BaseException)), None):
                if isinstance(error, Stopped):
                    return
                raise error

    async def _start(self, role: RoleProcess) -> None:
        async with role.changing:
            role.process = None
            if role.stopping:
                return
            role.ready.clear()
            role.error, role.expected, role.exit_status = "", False, None
            role.served = None if role.served is None else False
            role.log_start = log_size(self._log(role))
            start_s = self.config.rollout.engine.start_s if role.probe else self.config.launch.heartbeat_s
            if role.external is not None:
                role.process = role.external.attach()
            else:
                command = [sys.executable, "-P", "-m", "slipstream.launch.cli", "role", role.name, *role.arguments]
                role.process = await self.launcher.start(role.name, command, role.environment)
            role.last_seen = time.monotonic()  # only now: its host may have taken long to answer
            role.deadline = float("inf") if role.leader else role.last_seen + start_s
            role.waits, role.stuck_at = (), ""
            started = f"started, pid {role.process.pid}"
            self.view.status(role.name, f"at {role.external.url}" if role.external else started)

    async def _move(self, role: RoleProcess, error: PlacementLost) -> None:
        """Another place for `role`. Raises Stopped where it is asked to end meanwhile, PlacementLost where there is no room."""
        self.view.status(role.name, "waits for a place")
        self.view.event(f"{error}; it gets another place as soon as there is room")
        while True:
            try:
                with TrackedWait("the supervisor", f"a place for {role.name}", PLACE_S):
                    placement = await run_or_stop(self.launcher.move(role.name), role.ending)
                if self.moved is not None:
                    await self.moved(role.name, placement)
                return
            except PlacementLost as none:
                if not self._is_spared(role):
                    raise
                log.warning("%s; the run goes on without it", none)

    def _is_spared(self, role: RoleProcess) -> bool:
        """Whether the run goes on without `role` for now."""
        others = [one for one in self.of_kind(role.kind) if replica_of(one.name) != replica_of(role.name)]
        return role.kind in SPARE and any(one.running for one in others)

    async def watch(self, domain: Sequence[RoleProcess]) -> None:
        """Return when all roles of a failure domain ended well; when one fails, restart all of them. Raises ConfigError where one
        found its config to be wrong, RoleDied where a restart would not help or `launch.restarts` are spent, PlacementLost where
        the host of one is lost and there is no other, DeadlineExceeded where one survives SIGKILL."""
        restarts = self.config.launch.restarts
        while (failed := await self._failure(domain)) is not None:
            if (server := failed.external) is not None:
                if failed.ready.is_set():
                    self.view.event(f"{failed.name} at {server.url} is missed until it is back: {failed.error}")
                await self.start(*domain)
                continue
            cause, error = self._cause(failed, domain)
            said = "" if not error else f": {error}" if cause is failed else f": {cause.name}: {error}"
            why = f"{failed.name} ended with {describe(failed.exit_status)}{said}"
            if failed.exit_status == ConfigError.exit_code:
                raise ConfigError(failed.error or why)
            # The others of a server that spans hosts may see the end of a lost one before Ray does.
            gone = next((role for role in (failed, *domain) if role.process and role.process.lost), None)
            if gone is not None and gone.ready.is_set() and (gone is failed or gone.leader or failed.leader):
                self.view.event(f"{gone.name} is lost with its host{said if gone is failed else ''}")
            else:
                counted = self._count(failed, error, why, cause)
                self.view.event(f"{why}; restart {counted} of {restarts}")
            await self.start(*domain)

    def _cause(self, failed: RoleProcess, domain: Sequence[RoleProcess]) -> tuple[RoleProcess, str]:
        """The role of `domain` that says why `failed` ended, and its error: of a server that spans hosts the process that ends
        first may have seen only that another one does."""
        if failed.error or (failed.exit_status or 0) < 0:
            return failed, failed.error
        others = [role for role in domain if role is not failed and (role.leader or failed.leader)]
        found = [(role, last_error(self._log(role), role.log_start)) for role in (failed, *others)]
        return next(((role, error) for role, error in found if error and not SYMPTOM.search(error)), found[0])

    def _count(self, failed: RoleProcess, error: str, why: str, cause: RoleProcess) -> int:
        """Count a restart, of a server that spans hosts as one of its first process; how many there were. Raises RoleDied where it
        would not help, or one too many was counted."""
        counted = self.roles.get(failed.leader, failed)
        counted.restarts += 1
        verdict = counted.why_no_restart(error, failed)
        if not verdict and counted.restarts > self.config.launch.restarts:
            verdict = f"given up after {self.config.launch.restarts} restarts"
        if verdict:
            raise RoleDied(f"{why}; {verdict}. See {self._log(cause)}")
        return counted.restarts

    async def stop(self, role: RoleProcess, seconds: float) -> None:
        """Ask a role to end; kill it after `seconds`."""
        role.ending.set()
        async with role.changing:
            if role.process is None or role.exit_status is not None:
                return
            role.deadline = float("inf")
            await role.process.terminate()
            with contextlib.suppress(Stopped, DeadlineExceeded):
                end, waits_for = run_or_stop(role.process.wait(), self.kill_now), f"{role.name} to end"
                await with_deadline(seconds, end, who="the supervisor", waits_for=waits_for, hint="it is killed")
            await role.process.kill()

    def _log(self, role: RoleProcess) -> Path:
        return self.run_dir / "logs" / f"{role.name}.log"

    async def _failure(self, domain: Sequence[RoleProcess]) -> RoleProcess | None:
        """Wait until all of `domain` ended well, or one failed and the others were killed; the one that failed."""
        ends = [asyncio.create_task(self._wait_for_end(role)) for role in domain]
        try:
            for end in asyncio.as_completed(ends):
                if (failed := await end) is not None:
                    await asyncio.gather(*(role.process.kill() for role in domain if role.process))
                    waits_for = f"{' and '.join(role.name for role in domain)} to end after SIGKILL"
                    hint = "a process is stuck in the kernel, or its host is lost"
                    seconds, ended = 2 * KILL_S, asyncio.gather(*ends)  # the launcher has waited half of it
                    await with_deadline(seconds, ended, who="the supervisor", waits_for=waits_for, hint=hint)
                    return failed
            return None
        finally:
            for end in ends:
                end.cancel()

    async def _wait_for_end(self, role: RoleProcess) -> RoleProcess | None:
        """Wait for the end of a process; the role if that is a failure. A server that ends by itself has failed, even with exit
        status 0: vLLM exits with 0 when its engine core was killed."""
        if role.process is None:  # it was asked to end before it was started
            return None
        probing = asyncio.create_task(self._probe(role), name=f"probe {role.name}") if role.probe else None
        try:
            role.exit_status = await role.process.wait()
        finally:
            if probing is not None:
                probing.cancel()
        role.deadline = float("inf")
        role.on_end()
        self.view.status(role.name, "missed" if role.external else describe(role.exit_status))
        ended_well = role.stopping or (role.exit_status == 0 and role.kind in FINISHING)
        return None if ended_well else role

    async def _probe(self, role: RoleProcess) -> None:
        """Ask a server how it is for as long as its process lives: its first good answer makes it ready, every answer is a sign of
        life, and a bad one ends the process. Its deadline is the role's."""
        assert role.probe is not None
        period, (url, path) = min(PROBE_S, self.config.launch.heartbeat_s / 4), role.probe
        client = HttpClient(role.name, url, PROBE_S, self.access(role.name), keepalive_s=2 * period)
        try:
            await self._ask(role, client, path, period)
        finally:
            await client.close()

    async def _ask(self, role: RoleProcess, client: HttpClient, path: str, period: float) -> None:
        while True:
            client.trust(self.access(role.name).certificate)  # known once the server has started
            well = await is_healthy(client, path)
            if well and role.external is not None:
                well = await role.external.is_ours(client)
            if role.deadline == float("inf"):  # it is being ended
                return
            if well:
                role.last_seen = time.monotonic()
                role.deadline = role.last_seen + self.config.launch.heartbeat_s
                if not role.ready.is_set():
                    role.ready.set()
                    self.view.status(role.name, "ready")
                    role.on_ready()
            elif well is False and role.ready.is_set():
                # `HealthMonitor` kills it.
                role.deadline, role.error = time.monotonic(), role.external.why if role.external else UNWELL
                return
            await asyncio.sleep(period if role.ready.is_set() or role.external else RETRY_S)


def role_names(config: Config) -> list[str]:
    """The processes of a training run. Each listens on one port at most; ranks of an auxiliary model share one more."""
    models = [f"{kind}-{i}" for kind, ranks in ranks_by_kind(config).items() for i in range(ranks)]
    workers = [f"worker-{i}" for i in range(config.rollout.workers)]
    reward = ["reward"] if isinstance(config.reward, ModelReward) else []
    return [*engine_roles(config), *process_names(config.buffer.shards), *models, *workers, "evaluator", *reward]


def log_size(log_file: Path) -> int:
    """Bytes in a log; 0 where there is none on this host."""
    try:
        return log_file.stat().st_size
    except OSError:
        return 0


def last_error(log_file: Path, start: int = 0) -> str:
    """The last error in a log from byte `start` on, for processes that report none: the last root cause, else the last symptom."""
    try:
        with log_file.open("rb") as file:
            file.seek(max(start, log_size(log_file) - LOG_TAIL))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    errors = [found[0][:300] for line in lines if (found := ERROR_LINE.search(line))]
    causes = [error for error in errors if not SYMPTOM.search(error)]
    return next(reversed(causes or errors), "")


def describe(status: int | None) -> str:
    if status is None:
        return "running"
    if status < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-status).name
    return "exit 0" if status == 0 else f"exit status {status}"
