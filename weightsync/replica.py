"""What a push asks of an inference server, and what the publisher knows about each.

Invariants:
- Whatever is asked of a member that leaves ends at once: a leaver holds back nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

from ..configs.schema import Partial
from ..errors import EngineError
from .plan import GroupPlan, TransferPlan

T = TypeVar("T")

NOTHING = -1
"""The version of a replica of which nothing is proven."""


class Replica(Protocol):
    """Every `Engine` is one. Methods raise EngineError or DeadlineExceeded; what each promises is said there."""

    name: str
    ranks: int
    stages: bool

    async def pause(self, mode: Partial) -> None: ...
    async def resume(self) -> None: ...
    async def join_group(self, plan: GroupPlan) -> None: ...
    async def receive_weights(self, plan: TransferPlan) -> None: ...
    async def swap_weights(self, version: int) -> None: ...
    async def score(self, token_ids: Sequence[int]) -> list[float]: ...
    async def version(self) -> int | None: ...
    async def wait_ready(self, deadline_s: float) -> None: ...


class Member:
    """A replica of the fleet.

    Attributes:
        proven: the version that its canary showed, NOTHING when fenced or new.
    """

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.name = replica.name
        self.proven = NOTHING
        self._left = asyncio.Event()

    @property
    def left(self) -> bool:
        """Whether it is no longer of the fleet."""
        return self._left.is_set()

    def leave(self) -> None:
        """End whatever is being asked of it."""
        self._left.set()

    async def ask(self, answer: Awaitable[T]) -> T:
        """Await `answer`. Raises EngineError as soon as the member leaves."""
        asking = asyncio.ensure_future(answer)
        leaving = asyncio.ensure_future(self._left.wait())
        try:
            await asyncio.wait({asking, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise EngineError(f"{self.name} left the fleet")
            return asking.result()
        finally:
            asking.cancel()
            leaving.cancel()
            await asyncio.gather(asking, leaving, return_exceptions=True)


def names(members: Sequence[Member]) -> str:
    """For messages: `engine-0, engine-1`."""
    return ", ".join(member.name for member in members)


def in_thread(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Run `work` in a thread of its own. A collective that hangs until its deadline then holds back no other work, as it would
    in the loop's pool; cancelling the future abandons the thread."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(setter: Callable[[Any], None], outcome: Any) -> None:
        if not future.done():
            setter(outcome)

    def run() -> None:
        try:
            outcome: tuple[Callable[[Any], None], Any] = (future.set_result, work())
        except BaseException as error:
            outcome = (future.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
