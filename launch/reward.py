"""The reward model as a role: a server that is not ours, seen to answer after each of its starts."""

from __future__ import annotations

import asyncio
import functools

from ..monitor.live import View
from .member import Member
from .probe import Probe
from .processes import Spot
from .replicas import Keep


def reward_member(environment: dict[str, str], spot: Spot, probe: Probe, keep: Keep, view: View) -> Member:
    """The role `reward`, which listens at `spot` and is started with `environment`; `keep` takes what waits for its answers."""
    url = f"http://{spot.address}"
    waking: list[asyncio.Task[None]] = []

    async def wake() -> None:
        """Its deadline is the member's own: `start_s`, then it is killed."""
        await probe.until_well(url)
        member.ready.set()
        view.status(member.name, "ready")

    def started() -> None:
        waking.append(keep(wake()))

    def ended() -> None:
        while waking:
            waking.pop().cancel()

    member = Member("reward", environment, asked=functools.partial(probe, url), on_start=started, on_end=ended)
    return member
