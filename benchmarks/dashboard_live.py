"""What a buffer notices of three pages that look at it: how long its acknowledgements take, and how large its WAL gets.

    producer, so many a second ──> service ──buffer.sqlite──> slipstream dash <──every view, every second── three readers
        └─ seconds of each delivery             └─ WAL                └─ SIGKILL at the end of each round

Invariants:
- Rounds with the dashboard and without are by turns, with the same traffic. A delivery has its time from the call to the answer.
- The service is not saturated: what waits there is what the dashboard adds, not a queue of our own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
import uvloop

from ..buffer.trajectory import FINISHED
from ..common import gc as heap
from ..configs import dump, load
from ..errors import SlipstreamError, with_deadline
from ..launch.run_lock import CONTROL, run_lock
from .buffer_traffic import Crew, Round, Rounds, learn, sampled, serve, stamped
from .result import Result, Row, by_rounds

READERS, LOOK_S = 3, 1.0
VIEWS = (
    "now",
    "curves",
    "trajectories",
    "trajectories?sort=reward",
    "staleness",
    "timeline",
    "tokens",
    "environments",
    "processes",
)
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

    def quantile(self, share: float) -> float:
        """Milliseconds."""
        return 1e3 * float(np.quantile(self.seconds, share))


async def looked_at(folder: Path) -> Result:
    """Acknowledgements and the WAL with three readers over those without."""
    rounds, found = Rounds(folder), {True: list[Acknowledged](), False: list[Acknowledged]()}
    async with Crew(2) as crew:

        async def measure(this: Round) -> Acknowledged:
            return await _round(crew, this, readers)

        for pair in range(PAIRS):
            for readers in (READERS, 0) if pair % 2 else (0, READERS):
                found[bool(readers)].append(await rounds.run(TOKENS, WINDOW_S, measure))
    rows = [_row(f"acknowledged, {name}", share, found) for name, share in (("median", 0.5), ("99 of 100", 0.99))]
    wal = {looked: max(one.wal for one in several) / (1 << 20) for looked, several in found.items()}
    note = f"{sum(one.answers for one in found[True]):,} answers to {READERS} readers in {PAIRS * WINDOW_S:.0f} s"
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
        async with dashboard_of(run) if readers else contextlib.nullcontext("") as url:
            warm = time.monotonic() + WARM_S  # the start of the dashboard is no part of the round
            this = msgspec.structs.replace(this, counts_from=warm, until=warm + WINDOW_S)
            wal = asyncio.create_task(_watch(this.path.with_name(f"{this.path.name}-wal"), this.until))
            _, _, (took, answers) = await asyncio.gather(
                crew.in_learner(WARM_S + WINDOW_S, learn, this),
                crew.in_buffer(WARM_S + WINDOW_S, serve, this),
                crew.in_producers(2, WARM_S + WINDOW_S, deliver_or_look, this, f"{url}api/runs/{run.name}/", readers),
            )
    assert isinstance(took, list)
    assert isinstance(answers, int)
    return Acknowledged(took, await wal, answers)


@contextlib.asynccontextmanager
async def dashboard_of(run: Path) -> AsyncIterator[str]:
    """The address of a server of its own, which is killed at the end."""
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
        yield line.decode().rpartition(" ")[2].strip()
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
    return sum(await asyncio.gather(*(_look(url, this) for _ in range(readers))))


async def _look(url: str, this: Round) -> int:
    """Ask for every view every second."""
    answers = 0
    async with aiohttp.ClientSession() as client:
        while (began := time.monotonic()) < this.until:
            for view in VIEWS:
                async with client.get(f"{url}{view}") as response:
                    await response.read()
                    if response.status != 200:
                        raise SlipstreamError(f"{view}: {response.status} {await response.text()}")
                    answers += 1
            await asyncio.sleep(max(0.0, began + LOOK_S - time.monotonic()))
    return answers


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
