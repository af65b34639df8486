"""`slipstream bench recording`: what recording costs: the buffer, a step of the learner, and a whole run, with spans and series and
without, by turns.

Invariants:
- What is compared is all that a `TimelineWriter` does. Times in headers and rows are a part of the formats, and are always written.
- A pair is measured one after the other, every second one in the other order.
- A ratio is the median of the pairs' own ratios: a machine that halts for a moment does not move it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import quantiles

import msgspec

from ..configs import load
from ..learner.model import vocabulary_size
from ..monitor.metrics import METRICS, read_metrics
from ..monitor.series import cycle_s
from .buffer_traffic import Crew, Round, Rounds, Took, through_the_buffer
from .commands import run_command, slipstream
from .learner import GROUPS, by_turns
from .learner_batch import Shape, make_batch, tokens_of
from .models import make_policy
from .result import Result, Row, by_rounds

SIZE = "1M"
PAIRS = 5
STEP_ROUNDS = 100  # one step on a shared machine takes 0.7 to 1.4 times the step before it
TOKENS, WINDOW_S = 1 << 10, 4.0  # of each trajectory in the buffer; of each of its rounds
STEPS, SETTLED = 40, 8  # of a run, and those at its beginning that do not count
PRESET = "quickstart"
RUN = (
    "rollout.engine.kind=fake",
    "rollout.engine.max_concurrent=32",
    "buffer.groups_per_batch=4",
    "buffer.group_size=4",
    "agent.max_tokens_per_turn=12",
    "evaluation.tasks=0",
    "learner.checkpoint_every=1000",
    f"learner.steps={STEPS}",
)


async def buffer_recording(folder: Path) -> Result:
    """Trajectories per second through the buffer's service."""
    rounds, took = Rounds(folder), {True: list[float](), False: list[float]()}
    async with Crew(1) as crew:

        async def measure(this: Round) -> Took:
            return await through_the_buffer(crew, msgspec.structs.replace(this, recorded=recorded), 1)

        for recorded in _by_pairs():
            took[recorded].append((await rounds.count(TOKENS, WINDOW_S, measure)).rate)
    return _result(f"the buffer, {TOKENS} tokens, 1 producer", took[True], took[False], "trajectories/s")


async def step_recording(folder: Path) -> Result:
    """Tokens per second of the learner's step on the quickstart's batch; steps of one process, by turns."""
    model = folder / "model"
    make_policy(model, SIZE)
    batch = make_batch(Shape(groups=GROUPS[SIZE]), vocabulary_size(str(model)))
    seconds, _ = await by_turns(("recorded",), batch, model, folder, 2 * STEP_ROUNDS)
    rates = [tokens_of(batch) / each for each in seconds["recorded"]]  # without the first step's
    return _result(f"the learner's step, {SIZE}", rates[::2], rates[1::2], "tokens/s")


async def run_recording(folder: Path) -> Result:
    """Trained tokens per second of whole runs, with an engine that computes one sequence after the other."""
    model = folder / "model"
    await slipstream("init-model", str(model), "--config", PRESET, log=folder / "model.log")
    rates = {True: list[float](), False: list[float]()}
    for number, recorded in enumerate(_by_pairs()):
        run = folder / f"run-{number}"
        words = (*RUN, f"model.path={model}", f"run.dir={run}")
        command = (sys.executable, "-m", __name__, "on" if recorded else "off", *words)
        await run_command(command, folder / f"run-{number}.log")
        rows = read_metrics(run / METRICS)[SETTLED:]
        seconds = sum(map(cycle_s, rows))
        rates[recorded].append(sum(row["tokens_trained"] for row in rows) / seconds)
    return _result(f"a run of {STEPS} steps", rates[True], rates[False], "trained tokens/s")


def _by_pairs() -> Iterator[bool]:
    for pair in range(PAIRS):
        yield from (True, False) if pair % 2 else (False, True)


def _result(name: str, recorded: list[float], unrecorded: list[float], unit: str) -> Result:
    row: Row = by_rounds(name, recorded, unrecorded, unit, digits=3)
    ratios = [r / u for r, u in zip(recorded, unrecorded, strict=True)]
    low, middle, high = quantiles(ratios, n=4)
    note = f"{row.note}, half of them {low:.3f} to {high:.3f}"
    row = msgspec.structs.replace(row, ratio=middle, note=note)
    return Result("with spans and series over without", "recorded", "without", (row,))


def main() -> None:
    """`slipstream train quickstart OVERRIDES`; with `off` as the first word the processes record no spans and no series."""
    from ..launch import run

    run.train(load(PRESET, sys.argv[2:]), recorded=sys.argv[1] == "on")


if __name__ == "__main__":
    main()
