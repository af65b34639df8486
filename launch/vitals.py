"""Signs of life: what the roles say of themselves, and how the engines answer.

Invariants:
- A role that is silent for `launch.heartbeat_s` is killed, once; who is started again is the supervisor's business.
- A frame that is no heartbeat of this run's changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence

import aiohttp
import msgspec
import zmq.asyncio

from ..monitor.live import View
from .heart import Beat, Done, Failed, Ready, Said, Signal, Stepped
from .member import Member

log = logging.getLogger(__name__)

PROBE_S = 5.0
"""Longest wait for one answer to /health."""


class Vitals:
    """Watches `members`; `engines` are the base URLs of `engine-0`, `engine-1`, ...; `silence_s` is how long is too long."""

    def __init__(self, members: Mapping[str, Member], engines: Sequence[str], silence_s: float, view: View) -> None:
        self._members = members
        self._engines = engines
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
                case Beat():
                    pass

    async def pulse(self) -> None:
        """Kill what is silent; the supervisor starts it again."""
        timeout = aiohttp.ClientTimeout(total=PROBE_S)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            while True:
                await asyncio.sleep(min(PROBE_S, self._silence_s / 4))
                await asyncio.gather(*(self._probe(http, i) for i in range(len(self._engines))))
                for member in self._members.values():
                    if member.process and time.monotonic() > member.deadline:
                        self._view.event(f"{member.name} is silent and is killed")
                        member.deadline = float("inf")
                        await member.process.kill()

    async def _probe(self, http: aiohttp.ClientSession, index: int) -> None:
        """Ask an engine how it is: an answer is a heartbeat, a refusal of a server that was well is its death."""
        member = self._members[f"engine-{index}"]
        if member.process is None or member.deadline == float("inf"):
            return
        try:
            async with http.get(f"{self._engines[index]}/health") as answer:
                healthy = answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return
        if healthy:
            if not member.ready.is_set():
                self._view.status(member.name, "ready")
            member.ready.set()
            member.deadline = time.monotonic() + self._silence_s
        elif member.ready.is_set():
            member.deadline = time.monotonic()
