"""`slipstream bench buffer`: throughput of the buffer over that of its bare parts, over Ray's queue, and under one engine's load.

Invariants:
- Everything is durable: `Store`'s pragmas, an acknowledgement after the transaction.
- Contender and floor run alternately on the same cores; a row is the mean of the rounds, its note has their range.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean, median

import msgspec

from .buffer_batch import Memory, buffer_latency, buffer_memory, floor_latency
from .buffer_floors import into_sqlite, through_zeromq, through_zeromq_into_sqlite
from .buffer_traffic import BUFFER, Crew, Round, Rounds, Took, groups_of, through_the_buffer
from .buffer_trajectories import trajectory_bytes
from .result import Result, Row, by_rounds

SIZES = {"1k": 1 << 10, "8k": 1 << 13, "32k": 1 << 15}
"""Tokens per trajectory."""

PRODUCERS = (1, 8)

ROUNDS = 2

WINDOW_S = 2.5
FLOOR_S = 1.5

RAY_ROUNDS = 2
RAY_S = 3.0

LATENCY_S = 60.0
"""Longest; a round ends with its last batch."""

MB = 1e6
MIB = 1 << 20


async def floors(folder: Path) -> tuple[Result, Result, Result]:
    """The service over a bare ZeroMQ pair, over bare SQLite inserts, and over bare SQLite inserts of what comes through bare
    ZeroMQ."""
    rounds = Rounds(folder)
    over_zeromq, over_sqlite, over_both = list[Row](), list[Row](), list[Row]()
    async with Crew(max(PRODUCERS)) as crew:
        for name, tokens in SIZES.items():
            for producers in PRODUCERS:
                through, bare, inserted, both = list[Took](), list[Took](), list[Took](), list[Took]()
                for _ in range(ROUNDS):
                    took = await rounds.count(tokens, WINDOW_S, lambda r, n=producers: through_the_buffer(crew, r, n))
                    rows = max(1, round(took.per_transaction))
                    through.append(took)
                    bare.append(await rounds.count(tokens, FLOOR_S, lambda r, n=producers: through_zeromq(crew, r, n)))
                    inserted.append(await rounds.count(tokens, FLOOR_S, lambda r, n=rows: into_sqlite(crew, r, n)))
                    both.append(
                        await rounds.count(
                            tokens, FLOOR_S, lambda r, p=producers, n=rows: through_zeromq_into_sqlite(crew, r, p, n)
                        )
                    )
                what = f"{name} tokens, {_producers(producers)}"
                over_zeromq.append(_row(what, tokens, through, bare))
                row = _row(what, tokens, through, inserted)
                per = mean(took.per_transaction for took in through)
                note = f"{row.note}; {per:.0f} in a transaction; CPU of each: {_cpu(through)}; {_cpu(inserted)}"
                over_sqlite.append(msgspec.structs.replace(row, note=note))
                row = _row(what, tokens, through, both)
                over_both.append(msgspec.structs.replace(row, note=f"{row.note}; CPU of each: {_cpu(both)}"))
    return (
        Result("the buffer, durable, over a bare ZeroMQ pair", "buffer", "ZeroMQ", tuple(over_zeromq)),
        Result("the buffer, durable, over bare SQLite inserts", "buffer", "SQLite", tuple(over_sqlite)),
        Result(
            "the buffer, durable, over bare SQLite inserts of what the same producers send through bare ZeroMQ",
            "buffer",
            "both",
            tuple(over_both),
        ),
    )


def _row(what: str, tokens: int, contender: list[Took], floor: list[Took]) -> Row:
    """Means over the rounds, and between what the rounds' own ratios lie."""
    carried, bare = [c.rate for c in contender], [f.rate for f in floor]
    nbytes = trajectory_bytes(tokens) / MB
    note = f"{mean(carried) * nbytes:,.0f} over {mean(bare) * nbytes:,.0f} MB/s"
    return by_rounds(what, carried, bare, "trajectories/s", note=note)


def _cpu(rounds: list[Took]) -> str:
    """Of each trajectory, by the processes that spend it."""
    spent = {who: mean(1e3 * one.cores[who] / one.rate for one in rounds) for who in rounds[0].cores}
    return ", ".join(f"{who} {ms:.2f} ms" for who, ms in spent.items())


def _producers(count: int) -> str:
    return f"{count} producer{'s' if count > 1 else ''}"


async def latency(folder: Path) -> Result:
    """From the last delivery that a batch needs to the batch in the learner's hands."""
    rounds, rows = Rounds(folder), list[Row]()
    async with Crew(0) as crew:
        for name, tokens in SIZES.items():
            waited, bare = list[float](), list[float]()
            for _ in range(ROUNDS):
                waited += await rounds.run(tokens, LATENCY_S, lambda r: buffer_latency(crew, r))
                bare += await rounds.run(tokens, LATENCY_S, lambda r: floor_latency(crew, r))
            batch = groups_of(tokens) * BUFFER.group_size
            note = f"{batch * trajectory_bytes(tokens) / MB:,.0f} MB; worst {1e3 * max(waited):,.0f} over {1e3 * max(bare):,.0f} ms"
            what = f"{name} tokens, batch of {batch}"
            rows.append(Row(what, 1e3 * median(waited), 1e3 * median(bare), "ms", note))
    title = "last delivery to batch: the buffer over bare sockets and one bare insert"
    return Result(title, "buffer", "bare", tuple(rows))


async def beside_ray(folder: Path) -> Result:
    """The service compared with Ray's object store and queue, which are not durable."""
    from .buffer_ray import WAYS, ray_crew

    rounds, rows = Rounds(folder), list[Row]()
    async with Crew(max(PRODUCERS)) as crew, ray_crew(max(PRODUCERS)) as ray:
        for name, tokens in SIZES.items():
            for producers in PRODUCERS:
                through, queued = list[Took](), {way: list[Took]() for way in WAYS}
                for _ in range(RAY_ROUNDS):
                    through.append(
                        await rounds.count(tokens, RAY_S, lambda r, n=producers: through_the_buffer(crew, r, n))
                    )
                    for way, took in queued.items():
                        took.append(
                            await rounds.count(tokens, RAY_S, lambda r, n=producers, w=way: ray.through_ray(r, n, w))
                        )
                best = max(queued, key=lambda way: mean(took.rate for took in queued[way]))
                row = _row(f"{name} tokens, {_producers(producers)}", tokens, through, queued[best])
                rows.append(msgspec.structs.replace(row, note=f"{row.note}; {best}"))
    return Result(
        "the buffer, durable, compared with Ray's object store and queue, in memory", "buffer", "Ray", tuple(rows)
    )


# --- memory ---------------------------------------------------------------------------------------------------------

SHORT = 8
"""Tokens of trajectories that are sent for their number."""

MANY = 1_000_000
MEMORY_S = 360.0
"""On two cores, time for more than `MANY` trajectories."""

FEW = 10_000
KEEP_MIB = 64


async def memory(folder: Path, seconds: float = MEMORY_S) -> Result:
    """Bytes resident after `MANY` trajectories, or as many as `seconds` allow, over those after the first few."""

    async def measure(this: Round) -> list[Memory]:
        return await buffer_memory(crew, msgspec.structs.replace(this, keep=f"{KEEP_MIB}MiB"), 2)

    async with Crew(2) as crew:
        samples = await Rounds(folder).run(SHORT, seconds, measure)
    few, many = (next((s for s in samples if s.trajectories >= count), samples[-1]) for count in (FEW, MANY))
    what = f"{many.trajectories:,} trajectories of {SHORT} tokens over {few.trajectories:,}"
    file = max(sample.file for sample in samples)
    return Result(
        "the buffer's process and file, retention on",
        "many",
        "few",
        (
            Row(f"{what}: resident", many.resident / MIB, few.resident / MIB, "MiB"),
            Row(f"{what}: file", file / MIB, few.file / MIB, "MiB", f"the largest seen; kept below {KEEP_MIB} MiB"),
        ),
    )
