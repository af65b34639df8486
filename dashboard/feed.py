"""What all pages of one dashboard share: one reader of the files of its runs, and the answers to equal questions.

    RunFolder ──a look every LOOK_S, while a page listens──> numbers of changes ──> every page
    page, page, page ──the same question──> one read ──> the same bytes

Invariants:
- The files are looked at as often for a hundred pages as for one, and not at all while none listens.
- The more an answer costs, the less often pages are told of changes, so that they hardly slow a run on the same cores.
- An answer is shared only until the next look finds a change of its run: a page that was told of a change never gets what was read
  before it. And it is shared for `SHARED_S` at most: what changes without a file that is looked at is as fresh as that. While no
  page listens, only those share an answer that wait for it at once.
- Numbers grow, from one server to the next, too: they are times.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable

from ..errors import with_deadline
from .runs import RunFolder

LOOKING_S = 120.0  # longest that a look may take
LOOK_S = 2.0  # at least, between two looks at the files of the runs, which offer nothing to await
SLOWER, SHARE = 5.0, 0.005  # so many times as long at most, so that looks and answers take this share of one core
SHARED_S = 0.5  # pages that are told of a change together ask within this time


def pause_s(spent_s: float) -> float:
    """How long no file is looked at, if this process has computed for so many seconds since the last look."""
    return LOOK_S * min(SLOWER, max(1.0, spent_s / (SHARE * LOOK_S)))


class ChangeFeed:
    """Changes of `runs`; from one event loop."""

    def __init__(self, runs: RunFolder) -> None:
        self._runs = runs
        self._states: dict[str, object] = {}  # of each run, at the last look
        self.numbers: dict[str, int] = {}
        """Of each run the time of the look that found its newest change, in milliseconds since the epoch."""
        self.changes = 0
        """How many looks found any."""
        self.closed = False
        self._news = asyncio.Event()
        self._wanted = asyncio.Event()  # a look, without the rest of the pause
        self._listeners = 0
        self._looking: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """No listener waits any more."""
        self.closed = True
        self._wake_waiting()
        await self._stop()

    @property
    def looks(self) -> bool:
        """Whether changes are looked for now."""
        return self._looking is not None

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """The files are looked at while any such context lasts, at once when the first begins."""
        self._listeners += 1
        try:
            if self._looking is None:
                self._looking = asyncio.create_task(self._look_again())
            yield
        finally:
            self._listeners -= 1
            if not self._listeners:
                await self._stop()

    def look_now(self) -> None:
        """What was found for the pages does not wait until the next look is due."""
        self._wanted.set()

    async def after(self, told: int, quiet_s: float) -> int:
        """`changes` as soon as it is more than `told`; `told` where it is not for `quiet_s`. Raises what a look raises."""
        if self.changes == told:
            await _set_within(self._news, quiet_s)
        if self._looking is not None and self._looking.done():
            self._looking.result()
        return self.changes

    async def _look_again(self) -> None:
        spent = time.process_time()
        try:
            while True:
                looking = asyncio.to_thread(lambda: {run.name: run.changes() for run in self._runs.runs()})
                files = f"the files of {self._runs.root}"
                found = await with_deadline(
                    LOOKING_S, looking, who="slipstream dash", waits_for=files, hint="is their disk slow?"
                )
                changed = [name for name, state in found.items() if self._states.get(name) != state]
                if changed:
                    self._states = found
                    self.numbers |= dict.fromkeys(changed, time.time_ns() // 1_000_000)
                    self.changes += 1
                    self._wake_waiting()
                before, spent = spent, time.process_time()
                await _set_within(self._wanted, pause_s(spent - before))
                self._wanted.clear()
        finally:
            self._wake_waiting()

    async def _stop(self) -> None:
        looking, self._looking = self._looking, None
        if looking is not None:
            looking.cancel()
            await asyncio.wait([looking])

    def _wake_waiting(self) -> None:
        """All who wait."""
        news, self._news = self._news, asyncio.Event()
        news.set()


async def _set_within(event: asyncio.Event, seconds: float) -> None:
    """Until `event` is set, for so many seconds at most."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


class SharedAnswers:
    """Answers of which each is read once for all pages that ask for it together. `feed` says whether its run has changed since."""

    def __init__(self, feed: ChangeFeed) -> None:
        self._feed = feed
        # The number of the run's change that it is newer than, when it began, and the read.
        self._reads: dict[Hashable, tuple[int, float, asyncio.Task[bytes]]] = {}

    async def get(self, question: Hashable, run: str, read: Callable[[], Awaitable[bytes]]) -> bytes:
        """What `read` gives, or what it gave to another who asked the same about `run`, or with "" about all runs. Raises what it
        raises."""
        number = self._feed.numbers.get(run, 0) if run else self._feed.changes
        now = time.monotonic()
        for old in [one for one, (_, began, task) in self._reads.items() if task.done() and now - began >= SHARED_S]:
            del self._reads[old]
        known = self._reads.get(question)
        if known is None or known[0] != number or (known[2].done() and not self._feed.looks):
            known = self._reads[question] = number, now, asyncio.ensure_future(read())
        return await asyncio.shield(known[2])

    async def close(self) -> None:
        """Give up what is still read."""
        tasks = [task for _, _, task in self._reads.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
