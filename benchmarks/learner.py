"""`slipstream bench learner`: what a step of the learner costs: over the same work done by plain code, over padding, over one rank,
and beside TRL's.

    full      the training loop's step on a batch           bare     forward, backward, AdamW over the same packed rows
    padded    bare, but padded instead of packed            trl      a step of TRL's GRPOTrainer on the same completions
    unshared  full, a group's prompt computed by each member
    compiled  full with `learner.backend.options=[compile]`, on a GPU

Invariants:
- Every contender is in processes of its own with one thread each, unless it says otherwise, and they step by turns; on a GPU, which
  has no room for all of them, one after the other.
- Rates are useful tokens per second: prompts and answers of the batch, padding not counted.
- The first round warms up and counts for nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from ..common import accelerator
from ..configs.schema import Fsdp2
from ..learner.model import vocabulary_size
from .learner_batch import Job, MemoryUse, Sampled, Shape, fill_of, make_batch, make_long_prompt, tokens_of
from .learner_processes import NO_TRL, TRL, Stepper, stepping
from .models import make_policy
from .result import Result, Row, by_rounds

ROUNDS = 6

MIB = 1 << 20

GROUPS = {"1M": 8}
"""Task groups of eight by size of policy: the quickstart's batch for the quickstart's policy, one group for larger ones."""

GPU_SHAPE, GPU_BUDGET = Shape(groups=8, longest=2048), 32_768
"""A batch, and tokens of one forward pass, that keep a GPU busy."""

SMALL_BATCH = Shape(groups=2, longest=2048)
"""One of about 10,000 tokens, for which a GPU waits until the host has launched its kernels."""

CONTENDERS = ("full", "bare", "padded", "two ranks", "two threads", "trl")
"""In the order of a round."""

PLACES = {"two ranks": (2, 1), "two threads": (1, 2)}
"""Processes, and threads of each, of contenders that are not one process of one thread."""

ON_GPU = "not on a GPU, where each rank has a GPU and threads compute nothing"
"""Why there is no such contender."""

LONG_PROMPT, ANSWERS, ANSWER = 512, 8, 64
"""Tokens of the prompt, members of the group and tokens of each answer where what a shared prompt saves is measured."""


class Measured(msgspec.Struct, frozen=True):
    """What the rounds of one policy gave.

    Attributes:
        tokens: useful ones of the batch.
        fill: their share in the batch padded to its longest sequence.
        seconds: contender -> of its step in each round.
        memory: contender -> memory of each of its processes.
        long_prompt: as `seconds`, of a batch of one group with a long prompt.
        small_tokens, small: on a GPU as `tokens` and `seconds`, of a small batch.
    """

    tokens: int
    fill: float
    seconds: dict[str, list[float]]
    memory: dict[str, list[MemoryUse]]
    long_prompt: dict[str, list[float]]
    small_tokens: int = 0
    small: dict[str, list[float]] = {}


async def learner(folder: Path, size: str, shape: Shape | None = None, rounds: int = ROUNDS) -> tuple[Result, ...]:
    """All ratios for a random policy of `size`; without `shape`, for batches as large as suits it. On a GPU in bfloat16."""
    fitting = GPU_SHAPE if accelerator.current() else Shape(groups=GROUPS.get(size, 1))
    return results(await measure(folder, size, shape or fitting, rounds), size)


async def measure(folder: Path, size: str, shape: Shape, rounds: int) -> Measured:
    """Let every contender that there is here step by turns."""
    model = folder / "model"
    make_policy(model, size)
    vocabulary = vocabulary_size(str(model))
    batch, long = make_batch(shape, vocabulary), make_long_prompt(vocabulary, LONG_PROMPT, ANSWERS, ANSWER)
    names = [name for name in CONTENDERS if _is_here(name)]
    seconds, memory_of = await by_turns(names, batch, model, folder, rounds)
    long_prompt, _ = await by_turns(("full", "unshared"), long, model, folder, rounds)
    measured = Measured(tokens_of(batch), fill_of(batch), seconds, memory_of, long_prompt)
    if accelerator.current() is None:
        return measured
    few = make_batch(SMALL_BATCH, vocabulary)
    small, _ = await by_turns(("full", "compiled", "bare"), few, model, folder, rounds)
    return msgspec.structs.replace(measured, small_tokens=tokens_of(few), small=small)


def _is_here(contender: str) -> bool:
    if contender == "trl":
        return TRL.exists()
    return contender not in PLACES or accelerator.current() is None


async def by_turns(
    names: Sequence[str], batch: tuple[Sampled, ...], model: Path, folder: Path, rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[MemoryUse]]]:
    """Seconds of each step, and memory of each process, of contenders that step on `batch`."""
    if accelerator.current() and len(names) > 1:
        alone = [await by_turns((name,), batch, model, folder, rounds) for name in names]
        return {k: v for one, _ in alone for k, v in one.items()}, {k: v for _, one in alone for k, v in one.items()}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    async with contextlib.AsyncExitStack() as stack:
        steppers = dict[str, Stepper]()
        for name in names:
            ranks, threads = PLACES.get(name, (1, 1))
            contender = "full" if name in PLACES else name
            how = (GPU_BUDGET, "bfloat16") if accelerator.current() else (Fsdp2().tokens_per_microbatch, "float32")
            job = Job(contender, str(model), batch, *how)
            place = stepping(name.replace(" ", "-"), job, folder, ranks=ranks, threads=threads)
            steppers[name] = await stack.enter_async_context(place)
        for number in range(rounds + 1):
            for name, stepper in steppers.items():
                took = await stepper.step()
                if number:
                    seconds[name].append(took)
        return seconds, {name: await stepper.end() for name, stepper in steppers.items()}


def results(measured: Measured, size: str) -> tuple[Result, ...]:
    """The ratios, each with the spread over its rounds."""

    def row(name: str, contender: str, floor: str, note: str = "") -> Row:
        rates = [[measured.tokens / s for s in measured.seconds.get(key, ())] for key in (contender, floor)]
        if not all(rates):
            there, floored = (sum(several) / len(several) if several else float("nan") for several in rates)
            return Row(name, there, floored, "tokens/s", NO_TRL if floor == "trl" else ON_GPU)
        return by_rounds(name, rates[0], rates[1], "tokens/s", note=note)

    tokens = ANSWERS * (LONG_PROMPT + ANSWER)  # a prompt counts for each answer, however it is computed
    long = {name: [tokens / s for s in took] for name, took in measured.long_prompt.items()}
    small = {name: [measured.small_tokens / s for s in took] for name, took in measured.small.items()}
    return (
        Result(
            f"{size}: the learner's step over the bare packed one, {measured.tokens} tokens",
            "full",
            "bare",
            (row("full over bare", "full", "bare", "full: credit, packing, loss, metrics, fresh trajectories scored"),),
        ),
        *(
            Result(
                f"{size}: {name} over the bare packed step, {measured.small_tokens} tokens",
                name,
                "bare",
                (by_rounds(f"{name} over bare", small[name], small["bare"], "tokens/s"),),
            )
            for name in small
            if name != "bare"
        ),
        Result(
            f"{size}: packed over padded to the longest, {measured.fill:.0%} full",
            "packed",
            "padded",
            (
                row("bare over bare", "bare", "padded"),
                row("full over bare", "full", "padded"),
            ),
        ),
        Result(
            f"{size}: two ranks over one",
            "two ranks",
            "one rank",
            (
                row("one thread each, over one thread", "two ranks", "full"),
                row("one thread each, over two threads", "two ranks", "two threads"),
            ),
        ),
        Result(
            f"{size}: beside TRL's GRPOTrainer, per useful token",
            "ours",
            "TRL",
            (row("full over TRL's step", "full", "trl"),),
        ),
        Result(f"{size}: peak memory of a process", "full", "floor", memory(measured.memory)),
        Result(
            f"{size}: a prompt of {LONG_PROMPT} tokens with {ANSWERS} answers of {ANSWER}",
            "computed once",
            "for each",
            (by_rounds("full over unshared", long["full"], long["unshared"], "tokens/s"),),
        ),
    )


def memory(uses: Mapping[str, list[MemoryUse]]) -> tuple[Row, ...]:
    """The full step's peak over that of each other contender; the largest process of several."""
    peaks = {name: max(one.peak for one in several) / MIB for name, several in uses.items()}
    before = {name: max(one.before for one in several) / MIB for name, several in uses.items()}
    return tuple(
        Row(
            f"one rank over {name}",
            peaks["full"],
            peaks[name],
            "MiB",
            f"{before['full']:.0f} and {before[name]:.0f} before the first step",
        )
        for name in uses
        if name not in ("full", "two threads")
    )
