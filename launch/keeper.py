"""One role's life: started, watched, started again, ended.

Invariants:
- The members of a gang live and die together.
- A role is started again `launch.restarts` times, unless what went wrong would go wrong again.
- A role that was told to end is not started again.
- A process that SIGKILL does not end is named, and waited for no longer than `KILL_S`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ..configs import Config
from ..errors import ConfigError, RoleDied, within
from ..monitor.live import View
from .member import FINAL, Member, describe, last_error
from .processes import KILL_S, Launcher

FINISHING = ("evaluator", "sft")
"""Kinds of roles that have an end of their own; the others serve until they are stopped, the learner in case a replica that
comes back needs its weights."""


class Keeper:
    """Starts and ends the roles of a run, all `members`. `hurry` cuts short the time that a role may take to end."""

    def __init__(self, config: Config, run_dir: Path, launcher: Launcher, view: View) -> None:
        self.members: dict[str, Member] = {}
        self.hurry = asyncio.Event()
        self._config = config
        self._dir = run_dir
        self._launcher = launcher
        self._view = view

    def all(self, kind: str) -> list[Member]:
        return [m for m in self.members.values() if m.kind == kind]

    async def start(self, member: Member) -> None:
        """Start a process of `member`, unless it was told to end."""
        async with member.changing:
            if member.stopping:
                return
            member.ready.clear()
            member.last_words, member.exit_status = "", None
            command = [sys.executable, "-P", "-m", "slipstream.launch.cli", "role", member.name, *member.arguments]
            grace = self._config.rollout.engine.start_s if member.asked else self._config.launch.heartbeat_s
            member.process = await self._launcher.start(member.name, command, member.environment)
            member.heard = time.monotonic()  # from here: finding it another place may have taken its time
            member.deadline = member.heard + grace
            member.waits, member.stuck = (), ""
            self._view.status(member.name, f"started, pid {member.process.pid}")
            member.on_start()

    async def watch(self, gang: Sequence[Member]) -> None:
        """Return when all of `gang` ended well; start all of it again when one did not.

        Raises:
            ConfigError: one found its config to be wrong.
            RoleDied: one ended more often than `launch.restarts` allows.
        DeadlineExceeded: one does not end although it was killed.
        """
        while True:
            failed = await self._failure(gang)
            if failed is None:
                return
            why = f"{failed.name} ended with {describe(failed.exit_status)}"
            said = failed.last_words
            if not said and (failed.exit_status or 0) > 0:
                said = last_error(self._dir / "logs" / f"{failed.name}.log")
            if said:
                why += f": {said}"
            if failed.exit_status == ConfigError.exit_code:
                raise ConfigError(failed.last_words or why)
            failed.restarts += 1
            final = failed.exit_status == FINAL
            if final or failed.restarts > self._config.launch.restarts:
                budget = "" if final else f"; given up after {self._config.launch.restarts} restarts"
                raise RoleDied(f"{why}{budget}. See {self._dir / 'logs' / failed.name}.log")
            self._view.event(f"{why}; restart {failed.restarts} of {self._config.launch.restarts}")
            await asyncio.gather(*(self.start(m) for m in gang))

    async def stop(self, member: Member, seconds: float) -> None:
        """Ask a role to end; after `seconds` end it."""
        member.stopping = True
        async with member.changing:
            if member.process is None or member.exit_status is not None:
                return
            member.deadline = float("inf")
            await member.process.terminate()
            ways = [asyncio.create_task(member.process.wait()), asyncio.create_task(self.hurry.wait())]
            await asyncio.wait(ways, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()
            await member.process.kill()

    async def _failure(self, gang: Sequence[Member]) -> Member | None:
        """Wait until all of `gang` ended well, or one did not and the others were killed; that one."""
        ends = [asyncio.create_task(self._ended(m)) for m in gang]
        try:
            for end in asyncio.as_completed(ends):
                if (failed := await end) is not None:
                    await asyncio.gather(*(m.process.kill() for m in gang if m.process))
                    await within(
                        2 * KILL_S,  # the launcher has waited half of it
                        asyncio.gather(*ends),
                        who="the supervisor",
                        waits_for=f"{' and '.join(m.name for m in gang)} to end after SIGKILL",
                        hint="a process is stuck in the kernel, or its host is lost",
                    )
                    return failed
            return None
        finally:
            for end in ends:
                end.cancel()

    async def _ended(self, member: Member) -> Member | None:
        """Wait for the end of a process; the member if that was a failure. A server that ends by itself has failed, even
        with exit status 0: vLLM's says 0 when its engine core was killed."""
        assert member.process is not None
        member.exit_status = await member.process.wait()
        member.deadline = float("inf")
        member.on_end()
        self._view.status(member.name, describe(member.exit_status))
        well = member.stopping or (member.exit_status == 0 and member.kind in FINISHING)
        return None if well else member
