"""What a push asks of an inference server, and what the publisher knows about each.

Invariants:
- Whatever is asked of a member that leaves ends at once: a leaver holds back nobody.
- An order (pause, swap, resume) that was sent is never called back: a server goes on with it when its client hangs up. Whoever
  waits for it may give up; the order stays known until it has settled, and the next one is sent only then.
- A member is in doubt from the moment its swap is sent until it is known what it computes. One in doubt stays paused: a token
  sampled between the load and the version's change would carry the wrong version.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from ..configs.schema import Partial
from ..errors import EngineError, NoAnswer
from .plan import GroupPlan, TransferPlan

T = TypeVar("T")

END_S = 10.0
"""For threads of collectives that nobody waits for any more, when the process ends."""

NOTHING = -1
"""The version of a replica of which nothing is proven."""


class Replica(Protocol):
    """Every `Engine` is one. Methods raise EngineError or DeadlineExceeded; what each promises is said there."""

    name: str
    ranks: int
    stages: bool
    scores_paused: bool

    async def pause(self, mode: Partial) -> None: ...
    async def resume(self) -> None: ...
    async def join_group(self, plan: GroupPlan) -> None: ...
    async def receive_weights(self, plan: TransferPlan) -> None: ...
    async def swap_weights(self, version: int) -> None: ...
    async def score(self, token_ids: Sequence[int]) -> list[float]: ...
    async def version(self) -> int | None: ...


class Member:
    """A replica of the fleet.

    Attributes:
        proven: the version that its canary showed, NOTHING when fenced or new.
        paused_at: when it was told to pause (`time.perf_counter`), None once it has resumed.
        doubt: its swap was sent, and nobody knows yet what it computes.
        holds: the version that it last said it had swapped in.
        misses: how often in a row `catch_up` did not reach it; until `due` (`time.monotonic`) it is not tried again.
    """

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.name = replica.name
        self.proven = NOTHING
        self.paused_at: float | None = None
        self.doubt = False
        self.holds = NOTHING
        self.misses = 0
        self.due = 0.0
        self._left = asyncio.Event()
        self._order: asyncio.Future[None] | None = None

    @property
    def left(self) -> bool:
        """Whether it is no longer of the fleet."""
        return self._left.is_set()

    def leave(self) -> None:
        """End whatever is being asked of it."""
        self._left.set()

    async def ask(self, answer: Awaitable[T]) -> T:
        """Await `answer`. Raises EngineError as soon as the member leaves. When the caller gives up, so does the request."""
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

    @property
    def settled(self) -> bool:
        """Whether every order that was sent has been answered, or cannot be any more."""
        return self._order is None or self._order.done()

    async def settle(self) -> None:
        """Return once it is `settled`, however the order ended. Has no deadline itself."""
        if self._order is not None:
            await asyncio.wait({self._order})

    async def pause(self, mode: Partial) -> None:
        """Have it pause. Raises as `ask`."""
        self._stays()
        if self.paused_at is None:
            self.paused_at = time.perf_counter()  # before: a pause that was not answered may have happened
        await self.ask(self._send(self.replica.pause(mode)))

    async def swap(self, version: int) -> None:
        """Have it swap in what it staged; from here on it is in doubt, unless it refuses. Raises as `ask`."""
        self._stays()
        before, self.doubt, self.holds = self.doubt, True, NOTHING

        def settle(order: asyncio.Future[None]) -> None:
            error = asyncio.CancelledError() if order.cancelled() else order.exception()
            if error is None:
                self.holds = version
            elif isinstance(error, EngineError) and not isinstance(error, NoAnswer):
                # The server says that it did not. After a broken connection or a deadline it may have, or may yet.
                self.doubt = before

        await self.ask(self._send(self.replica.swap_weights(version), settle))

    async def resume(self) -> None:
        """Have it go on, once it has settled; a leaver, too: it may be draining. Has no deadline itself."""
        assert not self.doubt, f"{self.name} must not resume with weights that nobody knows"
        await self.settle()
        await self._send(self.replica.resume())
        self.paused_at = None

    def abandon(self) -> None:
        """Nobody will ask for the order any more that has not settled."""
        if self._order is not None:
            self._order.cancel()

    def _stays(self) -> None:
        """Raises EngineError for a leaver."""
        if self.left:
            raise EngineError(f"{self.name} left the fleet")

    def _send(
        self, order: Coroutine[Any, Any, None], on_settled: Callable[[asyncio.Future[None]], None] | None = None
    ) -> asyncio.Future[None]:
        """What to await for the answer; cancelling it does not cancel the order."""
        assert self.settled, f"{self.name} was sent an order before it settled the one before"
        self._order = asyncio.ensure_future(order)
        if on_settled is not None:
            self._order.add_done_callback(on_settled)
        return asyncio.shield(self._order)


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

    thread = threading.Thread(target=run, name=name, daemon=True)
    _threads.add(thread)
    thread.start()
    return future


_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _let_end() -> None:
    """An interpreter that goes while a thread is in the middle of torch's C++ is aborted: those that were abandoned end first."""
    until = time.monotonic() + END_S
    for thread in list(_threads):
        thread.join(max(0.0, until - time.monotonic()))
