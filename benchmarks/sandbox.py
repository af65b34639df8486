"""`slipstream bench sandbox`: what a sandbox costs: the time until a snippet of Python has run in it, over the same snippet in a
bare process.

    one          a sandbox is started, runs the snippet and is closed
    64 at once   as many of these, all asked for at the same moment
    64 ready     as above, of sandboxes that were started ahead; each is used once
    a cell       a snippet in a session that runs already
    a command    /bin/true in a sandbox that is open, over a bare /bin/true

Invariants:
- Contender and floor take turns within a round, on the same event loop; closing is timed where the row says so, never waited
  for elsewhere.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from ..envs.sandbox import Limits, LocalPool, PythonSession
from ..envs.sandbox.programs import python_candidates
from ..errors import ConfigError, ToolError
from .result import Result, Row, by_rounds

KINDS = ("bubblewrap", "landlock")
SNIPPET = "print(sum(range(1000)))"
AT_ONCE = 64
ROUNDS = 5
CELLS = 200  # cells and commands of a round: they take about a millisecond
LIMITS = Limits(wall_s=60, cpu_s=60)


async def sandbox(folder: Path) -> tuple[Result, ...]:
    """One table for each kind of sandbox that this host has."""
    results = []
    for kind in KINDS:
        try:
            results.append(await _measure(kind))
        except ConfigError as refusal:
            results.append(Result(f"{kind}: {refusal}", "sandboxed", "bare", ()))
    return tuple(results)


async def _measure(kind: str) -> Result:
    pool = LocalPool(LIMITS, kind=kind)
    ready = LocalPool(LIMITS, kind=kind, spare=AT_ONCE)
    times: dict[str, tuple[list[float], list[float]]] = {
        name: ([], []) for name in ("one", f"{AT_ONCE} at once", f"{AT_ONCE} ready", "a cell", "a command")
    }
    session, box = await pool.open_python(), await pool.open()
    try:
        for _ in range(ROUNDS):
            one, many = await _seconds(_bare_python), await _seconds(_together(_bare_python))
            await ready.fill("cells")
            _note(times["one"], await _seconds(lambda: _run_in_new_sandbox(pool)), one)
            _note(times[f"{AT_ONCE} at once"], await _seconds(_together(lambda: _run_in_new_sandbox(pool))), many)
            _note(times[f"{AT_ONCE} ready"], await _ready(ready), many)
            _note(times["a cell"], await _seconds(lambda: _cells(session)) / CELLS, one)
            _note(times["a command"], await _seconds(lambda: _repeat(lambda: box.run(("/bin/true",)))) / CELLS,
                  await _seconds(lambda: _repeat(lambda: _run_bare("/bin/true"))) / CELLS)  # fmt: skip
    finally:
        await asyncio.gather(session.close(), box.close(), pool.close(), ready.close())
    rows: tuple[Row, ...] = tuple(by_rounds(name, *pair, "ms") for name, pair in times.items())
    return Result(f"{kind}, {AT_ONCE} at once are timed together", "sandboxed", "bare process", rows)


def _note(pair: tuple[list[float], list[float]], contender_s: float, floor_s: float) -> None:
    pair[0].append(1e3 * contender_s)
    pair[1].append(1e3 * floor_s)


async def _seconds(work: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


def _together(work: Callable[[], Awaitable[object]]) -> Callable[[], Awaitable[object]]:
    return lambda: asyncio.gather(*(work() for _ in range(AT_ONCE)))


async def _run_bare(*argv: str) -> None:
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    await process.communicate()


async def _bare_python() -> None:
    await _run_bare(python_candidates()[0], "-I", "-S", "-c", SNIPPET)


async def _run_in_new_sandbox(pool: LocalPool) -> None:
    session = await pool.open_python()
    await _snippet(session)
    await session.close()


async def _ready(pool: LocalPool) -> float:
    """Seconds of a snippet in each of the sandboxes that wait, without what starts their successors."""
    pool.spare, spare = 0, pool.spare
    sessions: list[PythonSession] = []

    async def use() -> None:
        session = await pool.open_python()
        sessions.append(session)
        await _snippet(session)

    seconds = await _seconds(_together(use))
    pool.spare = spare
    await asyncio.gather(*(session.close() for session in sessions))
    return seconds


async def _cells(session: PythonSession) -> None:
    await _repeat(lambda: _snippet(session))


async def _repeat(work: Callable[[], Awaitable[object]]) -> None:
    for _ in range(CELLS):
        await work()


async def _snippet(session: PythonSession) -> None:
    ran = await session.run(SNIPPET)
    if not ran.ok or ran.stdout != "499500\n":
        raise ToolError(f"the snippet did not run: {ran}")
