"""`slipstream bench dashboard`: what a buffer notices of three pages that look at it: how long its acknowledgements take, and how
large its WAL gets.

    producer, so many a second ──> service ──buffer.sqlite──> slipstream dash <──what a page asks for── three readers
        └─ seconds of each delivery             └─ WAL                └─ SIGKILL at the end

Invariants:
- Blocks of seconds with the pages open and without alternate (ABBA) within one run under the same traffic, so that a machine that
  becomes slower does so for both. A delivery has its time from the call to the answer, and belongs to the block that it begins in.
- The service is not saturated: what waits there is what the dashboard adds, not a queue of our own.
- A reader is a page: it opens with the block, listens for changes until the block ends, and after each asks for the list of runs
  and what its view shows. Every view is looked at, in as many blocks as any other.
- The dashboard's server runs all the time; in a block without pages it answers no request.
- A reader draws nothing: browsers are on other machines. What the server costs is measured whole, `slipstream explain` included.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import time
from collections.abc import AsyncIterator, Sequence
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
from .buffer_traffic import Crew, Round, Rounds, learn, serve
from .buffer_trajectories import sampled, stamped
from .result import Result, Row

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
BLOCKS, BLOCK_S = 24, 10.0  # four minutes, half of them with the readers
RESAMPLES = 1000
WARM_S = 3.0  # of the run, which do not count
WAL_LOOK_S = 0.02
START_S = 60.0


def _block(this: Round, at: float) -> int:
    """Number of the block that contains the time `at`; negative before the first."""
    return int((at - this.counts_from) // BLOCK_S)


def _looking(block: int) -> bool:
    """Whether pages are open in it."""
    return block % 4 in (1, 2)


async def looked_at(folder: Path) -> Result:
    """Acknowledgements and the WAL with three pages open over those without."""
    async with Crew(2) as crew:
        took, answers, wal, cpu_s = await Rounds(folder).run(TOKENS, BLOCKS * BLOCK_S, lambda this: _run(crew, this))
    rows = [_row(f"acknowledged, {name}", share, took) for name, share in (("median", 0.5), ("99 of 100", 0.99))]
    watched_s = BLOCKS * BLOCK_S / 2
    note = f"{answers:,} answers to {READERS} pages in {watched_s:.0f} s, for {60 * cpu_s / watched_s:.1f} s of CPU a minute"
    rows.append(Row("the WAL, at most", wal[True], wal[False], "MiB", note))
    return Result(f"a buffer that the dashboard reads, {RATE:.0f} trajectories/s", "looked at", "alone", tuple(rows))


def _row(name: str, share: float, took: list[list[float]]) -> Row:
    """The quantile over all blocks of a kind. The note has where nine of ten ratios lie when the blocks are drawn again."""
    kinds = [[np.array(took[n]) for n in range(BLOCKS) if _looking(n) is looking] for looking in (True, False)]

    def quantile(blocks: Sequence[np.ndarray]) -> float:
        return 1e3 * float(np.quantile(np.concatenate(blocks), share))

    def draw(blocks: Sequence[np.ndarray]) -> float:
        return quantile([blocks[i] for i in rng.integers(len(blocks), size=len(blocks))])

    rng = np.random.default_rng(0)
    low, high = np.quantile([draw(kinds[0]) / draw(kinds[1]) for _ in range(RESAMPLES)], (0.05, 0.95))
    note = f"{low:.2f} to {high:.2f} in nine of ten draws of the {BLOCKS} blocks"
    return Row(name, quantile(kinds[0]), quantile(kinds[1]), "ms", note)


async def _run(crew: Crew, this: Round) -> tuple[list[list[float]], int, dict[bool, float], float]:
    """Seconds of the deliveries by block; answers to the pages; the largest WAL in MiB, with pages open and without; and the
    dashboard's seconds of CPU."""
    run = this.path.parent
    (run / "config.yaml").write_text(dump(load("quickstart")))
    with run_lock(run):
        (run / CONTROL).write_text("{}")  # as of a run that goes on
        async with dashboard_of(run) as dashboard:
            warm = time.monotonic() + WARM_S  # the start of the dashboard is no part of the run
            this = msgspec.structs.replace(this, counts_from=warm, until=warm + BLOCKS * BLOCK_S)
            wal = asyncio.create_task(_watch(this.path.with_name(f"{this.path.name}-wal"), this))
            seconds = this.until - time.monotonic()
            _, _, (took, answers), cpu_s = await asyncio.gather(
                crew.in_learner(seconds, learn, this),
                crew.in_buffer(seconds, serve, this),
                crew.in_producers(2, seconds, deliver_or_look, this, dashboard.url),
                _cpu_s(dashboard.pid, this),
            )
    assert isinstance(took, list)
    assert isinstance(answers, int)
    return took, answers, await wal, cpu_s


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


async def _watch(path: Path, this: Round) -> dict[bool, float]:
    """The largest size in MiB, with pages open and without."""
    largest = {True: 0.0, False: 0.0}
    while (now := time.monotonic()) < this.until:
        with contextlib.suppress(FileNotFoundError):
            looking = _looking(_block(this, now))
            largest[looking] = max(largest[looking], os.stat(path).st_size / (1 << 20))
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


def deliver_or_look(this: Round, url: str, number: int) -> list[list[float]] | int:
    """The first process delivers. The other reads the pages and computes only where nothing else does: in a real run the readers
    have machines of their own."""
    heap.freeze_startup_objects()
    if number == 0:
        return uvloop.run(_deliver(this, number))
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    return uvloop.run(_look_all(this, url))


async def _look_all(this: Round, url: str) -> int:
    """How many answers there were."""
    answers = 0
    for number, block in enumerate(filter(_looking, range(BLOCKS))):
        begins = this.counts_from + block * BLOCK_S
        await asyncio.sleep(max(0.0, begins - time.monotonic()))
        shown = [PAGES[reader::READERS][number % (len(PAGES) // READERS)] for reader in range(READERS)]
        answers += sum(await asyncio.gather(*(_look(url, this, page, begins + BLOCK_S) for page in shown)))
    return answers


async def _look(url: str, this: Round, page: tuple[str, ...], until: float) -> int:
    """Look at a view until then."""
    answers = 0
    run = f"{url}api/runs/{this.path.parent.name}"
    async with aiohttp.ClientSession() as client, client.get(f"{url}api/events") as events:
        while (left := until - time.monotonic()) > 0:
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


async def _deliver(this: Round, number: int) -> list[list[float]]:
    """Deliver `RATE` trajectories a second until the run is over; the seconds that each took, by block."""
    seconds: list[list[float]] = [[] for _ in range(BLOCKS)]
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
                            if 0 <= (block := _block(this, began)) < BLOCKS:
                                seconds[block].append(time.monotonic() - began)
    return seconds
