"""What a buffer notices of three pages that look at it: how long its acknowledgements take, and how large its WAL gets.

    producer, so many a second ──> service ──buffer.sqlite──> slipstream dash <──what a page asks for── three readers
        └─ seconds of each delivery             └─ WAL                └─ SIGKILL at the end of each round

Invariants:
- Rounds with the dashboard and without are by turns, with the same traffic. A delivery has its time from the call to the answer.
- The service is not saturated: what waits there is what the dashboard adds, not a queue of our own.
- A reader is a page: it listens for changes, and after each asks for the list of runs and what its view shows. In each round every
  view is looked at, by one reader.
- A reader draws nothing: browsers are on other machines. What the server costs is measured whole, `slipstream explain` included.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
import psutil
import uvloop

from .. import dashboard
from ..buffer.trajectory import FINISHED
from ..common import gc as heap
from ..configs import dump, load
from ..errors import SlipstreamError, with_deadline
from ..launch.run_lock import CONTROL, run_lock
from .buffer_traffic import Crew, Round, Rounds, learn, sampled, serve, stamped
from .result import Result, Row, by_rounds

READERS = 3
VIEWS = Path(dashboard.__file__).parent / "static" / "views"
CHARTS = (VIEWS / "curves.js").read_text().partition("const METRICS")[0]
CURVES = dict.fromkeys(re.findall(r"\['(\w+)', '", CHARTS))  # the metrics of the page's charts
BY_STALENESS = [
    f"{name}/0" for name in re.findall(r"'(\w+_by_staleness|staleness_tokens)'", (VIEWS / "staleness.js").read_text())
]
PAGES = (
    ("now", "curves?names=reward_mean", "explanation"),
    (f"curves?names={','.join(CURVES)}",),
    ("trajectories",),
    ("trajectories?sort=reward",),
    ("staleness", f"curves?names={','.join(BY_STALENESS)}", "ratios"),
    ("timeline", "batches/1"),
    ("tokens",),
    ("environments",),
    ("processes",),
)
"""What each view of the page asks for after a change."""

TOKENS, RATE = 1 << 12, 60.0  # of each trajectory; trajectories a second
PAIRS, WINDOW_S = 4, 30.0  # two minutes with the readers, and as many without
WARM_S = 3.0  # of a round, which do not count
WAL_LOOK_S = 0.02
START_S = 60.0


class Acknowledged(msgspec.Struct, frozen=True):
    """Of one round."""

    seconds: list[float]  # of each delivery
    wal: int  # bytes, at most
    answers: int  # that the readers got
    cpu_s: float  # of the dashboard's process, and of those that it started and that ended

    def quantile(self, share: float) -> float:
        """Milliseconds."""
        return 1e3 * float(np.quantile(self.seconds, share))


async def looked_at(folder: Path) -> Result:
    """Acknowledgements and the WAL with three pages open over those without."""
    rounds, found = Rounds(folder), {True: list[Acknowledged](), False: list[Acknowledged]()}
    async with Crew(2) as crew:

        async def measure(this: Round) -> Acknowledged:
            return await _round(crew, this, readers)

        for pair in range(PAIRS):
            for readers in (READERS, 0) if pair % 2 else (0, READERS):
                found[bool(readers)].append(await rounds.run(TOKENS, WINDOW_S, measure))
    rows = [_row(f"acknowledged, {name}", share, found) for name, share in (("median", 0.5), ("99 of 100", 0.99))]
    wal = {looked: max(one.wal for one in several) / (1 << 20) for looked, several in found.items()}
    answers, cpu_s = (sum(getattr(one, name) for one in found[True]) for name in ("answers", "cpu_s"))
    watched_s = PAIRS * WINDOW_S
    note = f"{answers:,} answers to {READERS} pages in {watched_s:.0f} s, for {60 * cpu_s / watched_s:.1f} s of CPU a minute"
    rows.append(Row("the WAL, at most", wal[True], wal[False], "MiB", note))
    return Result(f"a buffer that the dashboard reads, {RATE:.0f} trajectories/s", "looked at", "alone", tuple(rows))


def _row(name: str, share: float, found: dict[bool, list[Acknowledged]]) -> Row:
    looked, alone = ([one.quantile(share) for one in found[readers]] for readers in (True, False))
    return by_rounds(name, looked, alone, "ms")


async def _round(crew: Crew, this: Round, readers: int) -> Acknowledged:
    run = this.path.parent
    (run / "config.yaml").write_text(dump(load("quickstart")))
    with run_lock(run):
        (run / CONTROL).write_text("{}")  # as of a run that goes on
        async with dashboard_of(run) if readers else contextlib.nullcontext(Dashboard("", os.getpid())) as dashboard:
            warm = time.monotonic() + WARM_S  # the start of the dashboard is no part of the round
            this = msgspec.structs.replace(this, counts_from=warm, until=warm + WINDOW_S)
            wal = asyncio.create_task(_watch(this.path.with_name(f"{this.path.name}-wal"), this.until))
            _, _, (took, answers), cpu_s = await asyncio.gather(
                crew.in_learner(WARM_S + WINDOW_S, learn, this),
                crew.in_buffer(WARM_S + WINDOW_S, serve, this),
                crew.in_producers(2, WARM_S + WINDOW_S, deliver_or_look, this, dashboard.url, readers),
                _cpu_s(dashboard.pid, this),
            )
    assert isinstance(took, list)
    assert isinstance(answers, int)
    return Acknowledged(took, await wal, answers, cpu_s)


class Dashboard(msgspec.Struct, frozen=True):
    """A server of its own."""

    url: str
    pid: int


@contextlib.asynccontextmanager
async def dashboard_of(run: Path) -> AsyncIterator[Dashboard]:
    """It is killed at the end."""
    command = (sys.executable, "-m", "slipstream.launch.cli", "dash", str(run), "--port", "0")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "slipstream.common.process", *command, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        reading = process.stdout.readline()
        line = await with_deadline(START_S, reading, who="the benchmark", waits_for="slipstream dash", hint="see above")
        if not line:
            raise SlipstreamError("slipstream dash ended at once")
        yield Dashboard(line.decode().rpartition(" ")[2].strip(), process.pid)
    finally:
        process.kill()
        await process.wait()


async def _watch(path: Path, until: float) -> int:
    """The largest size."""
    largest = 0
    while time.monotonic() < until:
        with contextlib.suppress(FileNotFoundError):
            largest = max(largest, os.stat(path).st_size)
        await asyncio.sleep(WAL_LOOK_S)
    return largest


async def _cpu_s(pid: int, this: Round) -> float:
    """Of the process, and of those that it starts, in the part of the round that is measured."""
    process, seconds = psutil.Process(pid), list[float]()
    for at in (this.counts_from, this.until):
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        spent = 0.0
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                spent += sum(one.cpu_times()[:4])  # its own, and that of children that have ended
        seconds.append(spent)
    return seconds[1] - seconds[0]


def deliver_or_look(this: Round, url: str, readers: int, number: int) -> list[float] | int:
    """The first process delivers. The other reads the pages and computes only where nothing else does: in a real run the readers
    have machines of their own."""
    heap.freeze_startup_objects()
    if number == 0:
        return uvloop.run(_deliver(this, number))
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    return uvloop.run(_look_all(this, url, readers))


async def _look_all(this: Round, url: str, readers: int) -> int:
    """How many answers there were."""
    await asyncio.sleep(max(0.0, this.counts_from - time.monotonic()))
    return sum(await asyncio.gather(*(_look(url, this, reader, readers) for reader in range(readers))))


async def _look(url: str, this: Round, reader: int, readers: int) -> int:
    """Look at one view after the other, each for as long."""
    mine, answers = PAGES[reader::readers], 0
    shown_s = (this.until - this.counts_from) / len(mine)
    run = f"{url}api/runs/{this.path.parent.name}"
    async with aiohttp.ClientSession() as client, client.get(f"{url}api/events") as events:
        for number, page in enumerate(mine, 1):
            while (left := this.counts_from + number * shown_s - time.monotonic()) > 0:
                for path in (f"{url}api/runs", *(f"{run}/{name}" for name in page)):
                    async with client.get(path) as response:
                        await response.read()
                        if response.status != 200:
                            raise SlipstreamError(f"{path}: {response.status} {await response.text()}")
                        answers += 1
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await _change(events)
    return answers


async def _change(events: aiohttp.ClientResponse) -> None:
    """The next one. Raises SlipstreamError where the stream ends."""
    while not (line := await events.content.readline()).startswith(b"data:"):
        if not line:
            raise SlipstreamError("slipstream dash ended its stream of changes")


async def _deliver(this: Round, number: int) -> list[float]:
    """Deliver `RATE` trajectories a second until the round is over; the seconds that each took, once it is warm."""
    seconds: list[float] = []
    due = time.monotonic()
    async with this.client(f"worker-{number}") as client:
        await client.register()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(this.until - time.monotonic()):
                while True:
                    for lease in await client.leases(1):
                        for member in lease.members:
                            due = max(due + 1 / RATE, time.monotonic())
                            await asyncio.sleep(due - time.monotonic())
                            one, generated = stamped(this.tokens, lease, member), {lease.version: sampled(this.tokens)}
                            began = time.monotonic()
                            await client.deliver(one.episode, generated, FINISHED, (one,))
                            if began >= this.counts_from:
                                seconds.append(time.monotonic() - began)
    return seconds
