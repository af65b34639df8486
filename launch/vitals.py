"""Signs of life: what the roles say of themselves, how the servers that are not ours answer, and what everybody waits for.

Invariants:
- A role that is silent for `launch.heartbeat_s` is killed, once, and it is said what it waited for when it was last heard; who is
  started again is the supervisor's business.
- A frame that is no heartbeat of this run's changes nothing.
- What is worth a line is said once (`Watchdog`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator

import msgspec
import zmq.asyncio

from ..monitor.live import View
from ..waits import Wait, oldest
from .heart import Beat, Done, Failed, Lost, Ready, Said, Served, Signal, Stepped, Stuck
from .keeper import Keeper
from .member import Member
from .probe import PROBE_S
from .replicas import Replicas
from .watchdog import RoleWait, Watchdog, by_age

log = logging.getLogger(__name__)


class Vitals:
    """Watches what `keeper` started, engines of `replicas` among them; `silence_s` is how long is too long."""

    def __init__(self, keeper: Keeper, replicas: Replicas, silence_s: float, view: View) -> None:
        self._members = keeper.members
        self._replicas = replicas
        self._silence_s = silence_s
        self._view = view
        self._watchdog = Watchdog()

    async def listen(self, socket: zmq.asyncio.Socket) -> None:
        """Take what the roles say."""
        while True:
            try:
                said = msgspec.json.decode(await socket.recv(), type=Signal)
                member = self._members[said.role]
            except (msgspec.MsgspecError, KeyError) as error:
                log.warning("dropped a heartbeat that is none of ours: %s", error)
                continue
            now = time.monotonic()
            if not isinstance(said, Stuck):
                self._alive(member, now)
            match said:
                case Beat(waits=waits):
                    member.waits, member.told, member.stuck = waits, now, ""
                case Stuck(where=where, waits=waits):
                    member.waits, member.told, member.stuck = waits, now, where
                case Ready():
                    member.ready.set()
                    self._view.status(member.name, "ready")
                case Done():
                    member.done.set()
                    self._watchdog.rest()
                    self._view.status(member.name, "done")
                case Stepped(row=row):
                    self._watchdog.stepped(now)
                    self._view.step(msgspec.json.decode(row))
                case Said(text=text):
                    self._view.event(f"{member.name}: {text}")
                case Failed(text=text):
                    member.last_words = text
                case Served(replica=replica, version=version, incarnation=incarnation):
                    self._replicas.served(replica, version, incarnation)
                case Lost(replica=replica, incarnation=incarnation, why=why):
                    self._replicas.lost(replica, incarnation, why)

    async def pulse(self) -> None:
        """Kill what is silent; the supervisor starts it again. Say what is remarkable."""
        while True:
            await asyncio.sleep(min(PROBE_S, self._silence_s / 4))
            await asyncio.gather(*(self._ask(member) for member in list(self._members.values())))
            for member in list(self._members.values()):
                if member.process and time.monotonic() > member.deadline:
                    member.last_words = member.last_words or self._silent(member, time.monotonic())
                    self._view.event(f"{member.name} is killed: {member.last_words}")
                    member.deadline = float("inf")
                    await member.process.kill()
            for line in self._watchdog.look(self.waits(), time.monotonic()):
                self._view.event(line)

    def waits(self) -> list[RoleWait]:
        """What every role of the run waits for now, this process included, the oldest first. Of a role that says nothing for
        itself the supervisor waits for a sign of life."""
        now = time.monotonic()
        own = [RoleWait("supervisor", wait, 0.0) for wait in oldest()]
        return by_age([*own, *(row for m in self._members.values() for row in _waits_of(m, now))])

    def _silent(self, member: Member, now: float) -> str:
        """Why it is killed."""
        if member.asked:
            return (
                f"it did not answer for {now - member.heard:.0f} s{'' if member.ready.is_set() else ' since its start'}"
            )
        what = f"silent for {now - member.heard:.0f} s"
        if member.stuck:
            what += f", its event loop stuck at {member.stuck}"
        known = [row.wait for row in _waits_of(member, now) if member.waits]
        return f"{what}; {max(known, key=lambda w: w.age_s)}" if known else f"{what}; it waited for nothing"

    def _alive(self, member: Member, now: float) -> None:
        member.heard = now
        if member.deadline != float("inf"):
            member.deadline = now + self._silence_s

    async def _ask(self, member: Member) -> None:
        """Ask a server that has answered before how it is: an answer is a heartbeat, a refusal is its death."""
        process = member.process
        if not member.asked or process is None or not member.ready.is_set() or member.deadline == float("inf"):
            return
        well = await member.asked()
        if well is None or member.process is not process or member.deadline == float("inf"):
            return
        if well:
            self._alive(member, time.monotonic())
        else:
            member.deadline, member.last_words = time.monotonic(), "it answers that it is not well"


def _waits_of(member: Member, now: float) -> Iterator[RoleWait]:
    """The waits of a role that runs, aged since it told of them."""
    if member.process is None or member.exit_status is not None:
        return
    heard = now - member.heard
    if not member.waits or member.asked:
        limit = None if member.deadline == float("inf") else member.deadline - member.heard
        sign = "answer" if member.asked else "sign of life"
        which = "next" if member.ready.is_set() else "first"
        yield RoleWait(member.name, Wait("the supervisor", f"its {which} {sign}", heard, limit), heard)
    for wait in member.waits:
        age = wait.age_s + now - member.told
        yield RoleWait(member.name, msgspec.structs.replace(wait, age_s=age), heard)
