"""Signs of life: what the roles say of themselves, and how the engines answer.

Invariants:
- A role that is silent for `launch.heartbeat_s` is killed, once; who is started again is the supervisor's business.
- A frame that is no heartbeat of this run's changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec
import zmq.asyncio

from ..monitor.live import View
from .heart import Beat, Done, Failed, Lost, Ready, Said, Served, Signal, Stepped
from .keeper import Keeper
from .probe import PROBE_S, Probe
from .replicas import Replicas

log = logging.getLogger(__name__)


class Vitals:
    """Watches what `keeper` started, the engines of `replicas` by `probe`; `silence_s` is how long is too long."""

    def __init__(self, keeper: Keeper, replicas: Replicas, probe: Probe, silence_s: float, view: View) -> None:
        self._members = keeper.members
        self._replicas = replicas
        self._probe = probe
        self._silence_s = silence_s
        self._view = view

    async def listen(self, socket: zmq.asyncio.Socket) -> None:
        """Take what the roles say."""
        while True:
            try:
                said = msgspec.json.decode(await socket.recv(), type=Signal)
                member = self._members[said.role]
            except (msgspec.MsgspecError, KeyError) as error:
                log.warning("dropped a heartbeat that is none of ours: %s", error)
                continue
            if member.deadline != float("inf"):
                member.deadline = time.monotonic() + self._silence_s
            match said:
                case Ready():
                    member.ready.set()
                    self._view.status(member.name, "ready")
                case Done():
                    member.done.set()
                    self._view.status(member.name, "done")
                case Stepped(row=row):
                    self._view.step(msgspec.json.decode(row))
                case Said(text=text):
                    self._view.event(f"{member.name}: {text}")
                case Failed(text=text):
                    member.last_words = text
                case Served(replica=replica, version=version, incarnation=incarnation):
                    self._replicas.served(replica, version, incarnation)
                case Lost(replica=replica, incarnation=incarnation, why=why):
                    self._replicas.lost(replica, incarnation, why)
                case Beat():
                    pass

    async def pulse(self) -> None:
        """Kill what is silent; the supervisor starts it again."""
        while True:
            await asyncio.sleep(min(PROBE_S, self._silence_s / 4))
            await asyncio.gather(*(self._ask(s.name, s.url) for s in self._replicas.fleet.seats))
            for member in list(self._members.values()):
                if member.process and time.monotonic() > member.deadline:
                    self._view.event(f"{member.name} is silent and is killed")
                    member.deadline = float("inf")
                    await member.process.kill()

    async def _ask(self, name: str, url: str) -> None:
        """Ask an engine that has answered before how it is: an answer is a heartbeat, a refusal is its death."""
        member = self._members.get(name)  # it may have left since the question was planned
        process = member.process if member else None
        if member is None or process is None or not member.ready.is_set() or member.deadline == float("inf"):
            return
        well = await self._probe(url)
        if well is None or member.process is not process or member.deadline == float("inf"):
            return
        member.deadline = time.monotonic() + (self._silence_s if well else 0.0)
