"""The replicas of a run: they join, die, are restarted and leave, and the fleet state changes at once.

    add ──> a name, a placement ──> process ──> first answer ──> the learner pushes ──> served
    attach ──> a name, a URL ──> first answer ──> requests of earlier runs are aborted ──> the learner pushes ──> served
    remove ──> draining: no new requests ──> requests in flight end with the tokens they have ──> process ends ──> gone

Invariants:
- The end of a process is in the fleet before anything is started again.
- Removing a replica loses no tokens: its requests are aborted, and continue elsewhere from the tokens that they have.
- A replica that goes on giving false replies is ended and started again like one that died. Reports about that process change
  nothing any more.
- A server that spans hosts is one replica: `engine-0`, which answers, and `engine-0.1` and so on, one for each other host. They are
  one failure domain, and the head's answers are the signs of life of all.
- A server may answer and compute nothing: one that `MAX_MISSED_PUSHES` pushes in a row do not reach is restarted.
- A server that others started (`external.py`) is neither started nor ended: where another is restarted, it is missed, and where
  another is ended, it is let go.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...common.replica_names import processes_of, replica_of
from ...configs.engine_checks import SERVERS, nodes_of
from ...errors import ConfigError, DeadlineExceeded, EngineError, with_deadline
from ...monitor.terminal import View
from ...rollout.engines.http_engine import HttpEngine
from ...weightsync.fleet import FalseReplies, Fleet, ReplicaInfo, ReplicaReport
from ..launchers.local import Launcher, Placement
from .external import ExternalServer
from .fleet import FleetState, FleetSuspicion, ReplicaListing
from .pool import RolePool, Spawn
from .processes import ProcessManager, RoleProcess

log = logging.getLogger(__name__)

PAUSE_S = 5.0  # how long a leaving replica may take to abort its requests; after that they fail with its connections
END_S = 5.0  # how long a process may take to end in good order
MAX_MISSED_PUSHES = 3  # pushes in a row that did not reach a replica, after which it is restarted


@dataclass(eq=False)
class ReplicaManager(RolePool):
    processes: ProcessManager
    launcher: Launcher
    publish: Callable[[Fleet], None]  # sends a fleet to its subscribers
    view: View
    environment: Callable[[str, Placement], dict[str, str]]  # of a role with a placement
    make_engine: Callable[[ReplicaInfo], HttpEngine]  # a client of a replica
    probe_path: str  # where an engine answers while it is well
    gpus: int  # of one process of a replica
    pushed: bool  # a learner pushes weights; without one a replica serves version 0 as soon as it answers
    scheme: str = "http"  # or `https`

    def __post_init__(self) -> None:
        self._state = FleetState(self.publish)
        self.suspicion = FleetSuspicion()
        self._placements = dict[str, Placement]()  # of each process
        self._liars: dict[str, tuple[int, str]] = {}  # the last process of a replica that was ended for lying, and why

    @property
    def fleet(self) -> Fleet:
        return self._state.fleet

    def names(self, count: int) -> list[str]:
        """Names that were never used before."""
        return self._state.names(count)

    def others(self, name: str) -> list[str]:
        return self._state.others(name)

    def processes_of(self, name: str) -> list[str]:
        return processes_of(name, nodes_of(self.processes.config.rollout.engine))

    async def begin(self, placements: Mapping[str, Placement], spawn: Spawn) -> None:
        """Start the first replicas, whose processes have `placements`."""
        self.spawn = spawn
        for name in placements:
            if replica_of(name) == name:
                await self.start(name, {part: placements[part] for part in self.processes_of(name)})

    async def attach(self, servers: Mapping[str, ExternalServer]) -> None:
        """Servers that others started join the run, by these names, the first of it."""
        self.names(len(servers))
        for name, server in servers.items():
            role = RoleProcess(name, external=server, on_ready=functools.partial(self._take, name))
            await self._begin(server.url, role)

    # --- commands -------------------------------------------------------------------------------------------------

    async def add(self, count: int) -> list[str]:
        if self.processes.config.rollout.engine.external:
            raise ConfigError(
                f"the servers of this run were started by others, and {SERVERS} names them; start another where one is missed, or "
                "name more when the run is resumed"
            )
        return await super().add(count)

    async def remove(self, name: str) -> None:
        """Drain and end a replica. Returns at once; it leaves the fleet when its process has ended. Raises ConfigError where there
        is no such replica, or no other could take its requests."""
        self._state.drain(name)
        info, roles = self._state.replica(name), [self.processes.roles[part] for part in self.processes_of(name)]
        assert info is not None
        for role in roles:
            role.ending.set()
        self.spawn(self._retire(info, roles))

    def certified(self, name: str, certificate: str) -> None:
        """The process of a replica that is starting has this certificate."""
        self._state.certified(name, certificate)

    def listed(self) -> list[ReplicaListing]:
        rows = []
        for info in self.fleet.replicas:
            role = self.processes.roles[info.name]
            external = role.external is not None
            pid = role.process.pid if role.process and role.running and not external else None
            false, why = self.suspicion.counts.get(info.name, 0), self._liars.get(info.name, (0, ""))[1]
            state = "asleep" if info.asleep and info.state == "serving" else info.state
            number = info.incarnation
            rows.append(ReplicaListing(info.name, state, info.version, info.url, pid, number, false, why, external))
        return rows

    @property
    def distrusted(self) -> str:
        """The replicas that were ended for lying and do not serve again, and why; empty where there is none."""
        lines = []
        for name, (incarnation, why) in self._liars.items():
            info = self._state.replica(name)
            if info is None or info.incarnation <= incarnation or info.state != "serving":
                lines.append(f"{name}: {why}" if info else f"{name} has left the fleet: {why}")
        return "; ".join(lines)

    def update(self, *reports: ReplicaReport) -> None:
        """Take in what the learner knows of replicas; it may be repeated."""
        with self._state.batched():
            for report in reports:
                self._update(report)

    def _update(self, report: ReplicaReport) -> None:
        info = self._state.replica(report.name)
        if info is None or info.incarnation != report.incarnation or self._is_liar(info):
            return
        if report.version is not None:
            self._state.served(report.name, report.version, report.incarnation, asleep=report.asleep)
            self.processes.roles[report.name].served = True
        elif info.state != "draining":
            if info.state == "serving":
                self.view.event(f"{report.name} was left out of a push: {report.why}")
            self._state.lost(report.name, report.incarnation)
            role = self.processes.roles[report.name]
            failing = report.missed_pushes >= MAX_MISSED_PUSHES and role.external is None
            if failing and role.process is not None and not role.error:
                role.error = f"{report.missed_pushes} pushes in a row did not reach it, the last: {report.why}"
                self.spawn(role.process.kill())  # `watch` restarts it

    def suspect(self, role: str, reports: Sequence[FalseReplies]) -> None:
        """Take in what the router of `role` knows of false replies; it may be repeated. A replica that goes on lying is ended."""
        if reports:
            self.suspicion.keep({name for name, one in self.processes.roles.items() if one.exit_status is None})
        self.suspicion.take(role, reports)
        for name in {report.name for report in reports}:
            info = self._state.replica(name)
            if info is None or self._is_liar(info) or not (why := self.suspicion.proof(name, info.incarnation)):
                continue
            self._liars[name] = info.incarnation, why
            self._state.lost(name, info.incarnation)  # it gets no more requests
            replica = self.processes.roles[name]
            if replica.process is not None and not replica.stopping:
                replica.error = why
                if replica.external is not None:
                    replica.external.bar()
                self.spawn(replica.process.kill())  # `watch` restarts it

    def _is_liar(self, info: ReplicaInfo) -> bool:
        """Whether this process of a replica is being ended for lying."""
        return info.name in self._liars and self._liars[info.name][0] == info.incarnation

    # --- one replica ----------------------------------------------------------------------------------------------

    async def start(self, name: str, placements: Mapping[str, Placement]) -> None:
        self._placements |= placements
        head = RoleProcess(name, on_ready=functools.partial(self._ready, name))
        followers = (RoleProcess(part, leader=name) for part in placements if part != name)
        await self._begin(self._url(name), head, *followers)

    async def _begin(self, url: str, head: RoleProcess, *followers: RoleProcess) -> None:
        """A replica at `url` is part of the run from now on."""
        name = head.name
        head.probe, head.on_end = (url, self.probe_path), functools.partial(self._state.died, name)
        head.served = False if self.pushed else None
        self.processes.roles |= {role.name: role for role in (head, *followers)}
        self._state.join(name, url)
        try:
            if head.external is None:
                await self._arrange(name)
            await self.processes.start(head, *followers)
        except BaseException:
            await self.forget(name)
            raise
        self.spawn(self.watch(head))

    def _url(self, name: str) -> str:
        return f"{self.scheme}://{self._placements[name].address}"

    async def _arrange(self, name: str) -> None:
        """Give the processes of a replica their places, and those of several hosts a port where they meet."""
        parts, rendezvous = self.processes_of(name), ()
        if len(parts) > 1:
            port = await self.launcher.reserve_port(name)
            rendezvous = ("--rendezvous", f"{self._placements[name].host}:{port}")
        for part in parts:
            role, placement = self.processes.roles[part], self._placements[part]
            role.environment = self.environment(part, placement)
            role.arguments = ("--listen", placement.address, *rendezvous)

    async def moved(self, part: str, placement: Placement) -> None:
        """The next process of a replica, or of one of its hosts, starts at another place."""
        name, role = replica_of(part), self.processes.roles[part]
        self._placements[part] = placement
        if part != name:  # the others meet where they did
            role.environment = self.environment(part, placement)
            role.arguments = ("--listen", placement.address, *role.arguments[2:])
            return
        role.probe = self._url(name), self.probe_path
        await self._arrange(name)
        self._state.moved(name, self._url(name))

    def _ready(self, name: str) -> None:
        for part in self.processes_of(name):
            role = self.processes.roles.get(part)
            if role is not None and role.leader:
                role.ready.set()  # so that the loss of its host is no failure to start
                self.view.status(part, "ready")
        if (info := self._state.replica(name)) is not None:
            self._state.answers(name, info.incarnation)
            if not self.pushed:
                self._state.served(name, 0, info.incarnation)

    def _take(self, name: str) -> None:
        if (info := self._state.replica(name)) is not None:
            self.spawn(self._clear(info, self.processes.roles[name]))

    async def _clear(self, info: ReplicaInfo, role: RoleProcess) -> None:
        """Have a server that others started drop what an earlier run left in it: requests, and keys and values of other weights
        with the same versions. Then it is one of the fleet."""
        why = ""
        try:
            await self._abort_requests(info, resume=True)
        except (EngineError, DeadlineExceeded) as error:
            why = f"it did not drop what an earlier run left: {error}"
        now = self._state.replica(info.name)
        if now is None or now.incarnation != info.incarnation:  # it was missed meanwhile
            return
        if why and role.process is not None:
            role.error = why
            await role.process.kill()
        elif not why:
            self._ready(info.name)

    async def _retire(self, info: ReplicaInfo, roles: Sequence[RoleProcess]) -> None:
        if roles[0].ready.is_set():
            try:
                await self._abort_requests(info)
            except Exception as error:  # its requests fail with their connections; no command may end the run
                log.warning("%s did not abort its requests: %s", info.name, error)
        await asyncio.gather(*(self.processes.stop(role, END_S) for role in roles))

    async def _abort_requests(self, info: ReplicaInfo, *, resume: bool = False) -> None:
        engine = self.make_engine(info)
        try:
            pause, waits_for = engine.pause("abort_resume"), f"{info.name} to abort its requests"
            await with_deadline(PAUSE_S, pause, who="the supervisor", waits_for=waits_for, hint="see its log")
            if resume:
                going, waits_for = engine.resume(), f"{info.name} to go on"
                await with_deadline(PAUSE_S, going, who="the supervisor", waits_for=waits_for, hint="see its log")
        finally:
            await engine.close()

    async def left(self, name: str) -> None:
        for part in self.processes_of(name):
            self._placements.pop(part, None)
        self._state.gone(name)
