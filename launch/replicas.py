"""The replicas of a run: they come, die, come back and leave, and the fleet says so at once.

    add ──> a name, a place ──> process ──> first answer ──> the learner pushes ──> served
    remove ──> draining: no new requests ──> those under way come back with what they have ──> process ends ──> gone

Invariants:
- The fleet is told of the end of a process as soon as it has ended, before anything is started again.
- A replica whose restarts are spent leaves the fleet while others serve or start; the last one takes the run with it.
- A replica that is removed loses nobody's tokens: its requests are cut short with what they have and go on elsewhere.
- A replica is forgotten once, by who watches its process (`_live`), whatever made it end.
- Its API may answer while it computes nothing: one that weights do not reach `LOSSES` times in a row is started again.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from ..errors import ConfigError, RoleDied, within
from ..monitor.live import View
from ..rollout.engine import Engine
from ..weightsync.fleet import Fleet, FleetBoard, Seat
from .keeper import Keeper
from .member import Member
from .probe import Probe
from .processes import Launcher, Spot
from .roster import Listed, Roster

log = logging.getLogger(__name__)

PAUSE_S = 5.0
"""How long a replica that leaves may take to cut its requests short; after that they find their connections closed."""

END_S = 5.0
"""How long its process may take to end in good order."""

LOSSES = 3
"""So many pushes in a row that a replica did not take, and the supervisor starts it again."""

Keep = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
"""Takes work that goes on in the background until the plan is done; its failure ends the run."""


class Replicas:
    """The engines of a run.

    Args:
        keeper: starts and ends processes.
        launcher: finds places for them.
        board: shows the fleet.
        probe: asks an engine whether it is well.
        environment: what a role's process is given at its place.
        make_engine: a client of a replica.
        gpus: GPUs of one replica.
        pushed: a learner brings weights; without one a replica serves version 0 as soon as it answers.
    """

    def __init__(
        self,
        keeper: Keeper,
        launcher: Launcher,
        board: FleetBoard,
        probe: Probe,
        view: View,
        *,
        environment: Callable[[str, Spot], dict[str, str]],
        make_engine: Callable[[Seat], Engine],
        gpus: int,
        pushed: bool,
    ) -> None:
        self._keeper = keeper
        self._launcher = launcher
        self._board = board
        self._probe = probe
        self._view = view
        self._environment = environment
        self._make_engine = make_engine
        self._gpus = gpus
        self._pushed = pushed
        self._roster = Roster()
        self._keep: Keep | None = None
        self._waking: dict[str, asyncio.Task[None]] = {}
        self._losses: dict[str, int] = {}

    @property
    def fleet(self) -> Fleet:
        return self._roster.fleet

    def names(self, count: int) -> list[str]:
        """Names that were never given before."""
        return self._roster.names(count)

    async def begin(self, spots: dict[str, Spot], keep: Keep) -> None:
        """Start the first replicas at their places."""
        self._keep = keep
        for name, spot in spots.items():
            await self._open(name, spot)

    # --- what people ask for --------------------------------------------------------------------------------------

    async def add(self, count: int) -> list[str]:
        """Start `count` more; their names.

        Raises:
            ConfigError: there is no room for them.
        """
        names = self._roster.names(count)
        spots = await self._launcher.place(dict.fromkeys(names, self._gpus))
        try:
            for name in names:
                await self._open(name, spots.pop(name))
        finally:
            for name in spots:  # one before them could not be started: they never come
                await self._launcher.release(name)
        self._view.event(f"{', '.join(names)} added")
        return names

    async def remove(self, name: str) -> None:
        """Let a replica go. Returns at once; its requests are cut short, and it leaves the fleet when its process has ended.

        Raises:
            ConfigError: there is no such replica, or nobody could take its place.
        """
        self._roster.drain(name)
        seat, member = self.fleet.seat(name), self._keeper.members[name]
        assert seat is not None
        member.stopping = True
        self._show()
        self._go_on(self._retire(seat, member))

    def listed(self) -> list[Listed]:
        rows = []
        for seat in self.fleet.seats:
            member = self._keeper.members[seat.name]
            running = member.process if member.exit_status is None else None
            pid = running.pid if running else None
            rows.append(Listed(seat.name, seat.state, seat.version, seat.url, pid, seat.incarnation))
        return rows

    # --- what the learner says ------------------------------------------------------------------------------------

    def served(self, name: str, version: int, incarnation: int) -> None:
        self._losses.pop(name, None)
        self._roster.served(name, version, incarnation)
        self._show()

    def lost(self, name: str, incarnation: int, why: str) -> None:
        """A push did not reach it."""
        seat = self.fleet.seat(name)
        if seat is None or seat.incarnation != incarnation or seat.state == "draining":
            return
        if seat.state == "serving":
            self._view.event(f"{name} was left out of a push: {why}")
        self._roster.lost(name, incarnation)
        self._show()
        self._losses[name] = self._losses.get(name, 0) + 1
        if self._losses[name] == LOSSES:
            member = self._keeper.members[name]
            member.last_words = f"{LOSSES} pushes in a row did not reach it, the last: {why}"
            if member.process is not None:
                self._go_on(member.process.kill())  # and `_live` starts it again

    # --- one replica ----------------------------------------------------------------------------------------------

    async def _open(self, name: str, spot: Spot) -> None:
        member = Member(
            name,
            self._environment(name, spot),
            ("--listen", spot.address),
            asked=functools.partial(self._probe, f"http://{spot.address}"),
            on_start=functools.partial(self._started, name),
            on_end=functools.partial(self._ended, name),
        )
        self._keeper.members[name] = member
        self._roster.join(name, f"http://{spot.address}")
        self._show()
        try:
            await self._keeper.start(member)
        except BaseException:
            await self._forget(name)
            raise
        self._go_on(self._live(member))

    async def _live(self, member: Member) -> None:
        """From its first process to its last."""
        try:
            await self._keeper.watch([member])
        except (RoleDied, ConfigError) as error:
            if not (others := self._roster.others(member.name)):
                raise
            self._view.event(f"{error}; the run goes on with {', '.join(others)}")
        else:
            self._view.event(f"{member.name} removed")
        await self._forget(member.name)

    def _started(self, name: str) -> None:
        self._waking[name] = self._go_on(self._wake(name))

    def _ended(self, name: str) -> None:
        if (waking := self._waking.pop(name, None)) is not None:
            waking.cancel()
        self._losses.pop(name, None)
        self._roster.died(name)
        self._show()

    async def _wake(self, name: str) -> None:
        """See a process that has just started answer. Its deadline is the member's own: `start_s`, then it is killed."""
        seat, member = self.fleet.seat(name), self._keeper.members.get(name)
        if seat is None or member is None:
            return
        await self._probe.until_well(seat.url)
        member.ready.set()
        self._view.status(name, "ready")
        self._roster.answers(name, seat.incarnation)
        if not self._pushed:
            self._roster.served(name, 0, seat.incarnation)
        self._show()

    async def _retire(self, seat: Seat, member: Member) -> None:
        """Cut its requests short, end it."""
        if member.ready.is_set():
            try:
                await self._give_back(seat)
            except Exception as error:  # its requests find their connections closed; no wish may end the run
                log.warning("%s did not give its requests back: %s", seat.name, error)
        await self._keeper.stop(member, END_S)

    async def _give_back(self, seat: Seat) -> None:
        engine = self._make_engine(seat)
        try:
            pause = engine.pause("abort_resume")
            waits_for = f"{seat.name} to cut its requests short"
            await within(PAUSE_S, pause, who="the supervisor", waits_for=waits_for, hint="see its log")
        finally:
            await engine.close()

    async def _forget(self, name: str) -> None:
        """It is of the fleet no more, and its place is free."""
        if self._keeper.members.pop(name, None) is None:
            return
        if (waking := self._waking.pop(name, None)) is not None:
            waking.cancel()
        self._losses.pop(name, None)
        self._roster.gone(name)
        self._show()
        self._view.status(name, "gone")
        await self._launcher.release(name)

    def _go_on(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        assert self._keep is not None, "begin comes first"
        return self._keep(work)

    def _show(self) -> None:
        self._board.show(self.fleet)
