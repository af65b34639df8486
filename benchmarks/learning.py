"""`slipstream bench learning`: what staleness and correction do to learning, beside TRL's GRPOTrainer at equal samples.

    warm-up ──one model──> every arm with every seed, one after the other ──> OUT/ARM/seed-N/result.json ──> tables, learning.png

Invariants:
- What is complete in the folder is not repeated; what was broken off is. A folder holds results of one number of steps.
- Every run has the machine to itself; a seed's runs come after each other, so that a benchmark that is broken off compares arms.
- All final rewards come from the same evaluation, `slipstream eval` on held-out tasks, TRL's model included.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

import msgspec

from ..agents import load_renderer
from ..agents.session import to_chat
from ..common.fsio import write_atomic
from ..configs import load
from ..errors import ConfigError
from ..learner.model import load_tokenizer
from ..monitor.metrics import read_metrics
from ..monitor.series import column, elapsed, staleness_tokens
from .commands import Notify, run_command, slipstream, warm_model
from .learner_processes import TRL as TRL_PYTHON
from .learning_arms import (
    EVALUATION,
    GROUP_SIZE,
    GROUPS,
    PRESET,
    TASK,
    TRAINING,
    WARM_UP,
    Arm,
    Point,
    Run,
    TrlJob,
    arms,
    tasks,
)
from .learning_plot import draw
from .result import Result, Row

STALENESS = (0, 1, 2, 4, 8)
SEEDS, STEPS = 3, 60


class Settings(msgspec.Struct, frozen=True):
    """What may not differ between the results in one folder."""

    steps: int
    overrides: tuple[str, ...] = (*TASK, *WARM_UP, *TRAINING, *EVALUATION)


async def learning(out: Path, seeds: int, staleness: Sequence[int], steps: int, notify: Notify) -> tuple[Result, ...]:
    """Run what is missing in `out`, draw `learning.png` there, and compare.

    Raises:
        ConfigError: `out` holds results of other settings.
    """
    _prepare(out, Settings(steps))
    if not TRL_PYTHON.exists():
        notify("TRL is not installed: make install-trl; going on without it")
    chosen = arms(staleness, TRL_PYTHON.exists())
    model = await warm_model(out, PRESET, TASK, WARM_UP, notify)
    runs: list[Run] = []
    for seed in range(seeds):
        for arm in chosen:
            folder = out / arm.name / f"seed-{seed}"
            result = folder / "result.json"
            if not result.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                notify(f"{arm.title}, seed {seed}")
                run = await (_run_trl if arm.trl else _run_ours)(arm, seed, steps, model, folder)
                write_atomic(result, msgspec.json.encode(run))
            runs.append(msgspec.json.decode(result.read_bytes(), type=Run))
            notify(f"{arm.title}, seed {seed}: reward {runs[-1].reward:.3f}, lag {runs[-1].lag:.1f}")
    draw(runs, out / "learning.png")
    notify(f"plot: {out / 'learning.png'}")
    return tables(runs)


def tables(runs: Sequence[Run]) -> tuple[Result, ...]:
    """Final rewards beside TRL's and beside synchronous training, and how fast the samples went by."""
    by_arm: dict[Arm, list[Run]] = {}
    for run in runs:
        by_arm.setdefault(run.arm, []).append(run)
    ours = {arm: several for arm, several in by_arm.items() if not arm.trl}
    trl = next((several for arm, several in by_arm.items() if arm.trl), None)
    samples = runs[0].points[-1].samples
    count = max(len(several) for several in by_arm.values())
    what = f"of held-out tasks after {samples} samples, mean of {count} {'seed' if count == 1 else 'seeds'}"
    answer: list[Result] = []
    if trl is not None:
        rewards = tuple(_reward_row(arm.title, several, trl) for arm, several in ours.items())
        answer.append(Result(f"reward {what}: ours over TRL", "ours", "TRL", rewards))
    compared = tuple(
        _reward_row(f"{arm.title} over {floor.title}", several, ours[floor])
        for arm, several in ours.items()
        if (floor := _floor(arm)) in ours
    )
    if compared:
        answer.append(Result(f"reward {what}: stale over synchronous", "stale", "synchronous", compared))
    if trl is not None:
        rates = tuple(_rate_row(arm.title, several, trl) for arm, several in ours.items())
        answer.append(Result("samples per second of training: ours over TRL", "ours", "TRL", rates))
    return tuple(answer)


def not_below(one: Sequence[float], other: Sequence[float]) -> bool | None:
    """Whether the mean of `one` is at least that of `other`, less the larger of their standard deviations; None for one seed."""
    if min(len(one), len(other)) < 2:
        return None
    return mean(one) >= mean(other) - max(stdev(one), stdev(other))


def _floor(arm: Arm) -> Arm | None:
    """Stale arms are compared with synchronous training."""
    return Arm(0) if arm.max_staleness > 0 else None


def _reward_row(name: str, several: Sequence[Run], floor: Sequence[Run]) -> Row:
    mine, theirs = [run.reward for run in several], [run.reward for run in floor]
    verdict = {None: "one seed", True: "not below within spread", False: "below"}[not_below(mine, theirs)]
    note = f"{_spread(mine)} and {_spread(theirs)}: {verdict}; lag {mean(run.lag for run in several):.1f}"
    return Row(name, mean(mine), mean(theirs), "reward", note)


def _rate_row(name: str, several: Sequence[Run], floor: Sequence[Run]) -> Row:
    mine, theirs = ([run.points[-1].samples / run.points[-1].seconds for run in runs] for runs in (several, floor))
    return Row(name, mean(mine), mean(theirs), "samples/s", f"{_spread(mine, 1)} and {_spread(theirs, 1)}")


def _spread(values: Sequence[float], digits: int = 3) -> str:
    return f"± {stdev(values):.{digits}f}" if len(values) > 1 else "±?"


def _prepare(out: Path, settings: Settings) -> None:
    """Make the folder, or see that it holds results of the same settings."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / "settings.json"
    if not file.exists():
        file.write_bytes(msgspec.json.encode(settings))
    try:
        found = msgspec.json.decode(file.read_bytes(), type=Settings)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--out: {file} is not what this benchmark writes: {error}") from None
    if found != settings:
        raise ConfigError(
            f"--out: {out} holds results of other settings (--steps {found.steps}, or another version); name another folder"
        )


async def _run_ours(arm: Arm, seed: int, steps: int, model: Path, folder: Path) -> Run:
    """`slipstream train`."""
    run = folder / "run"
    overrides = (f"model.path={model}", f"run.dir={run}", f"seed={seed}", f"learner.steps={steps}")
    await slipstream("train", PRESET, *TASK, *TRAINING, *arm.overrides, *overrides, log=folder / "run.log")
    reward, stderr = await _evaluated(run / "model", seed, folder)
    rows = read_metrics(run / "metrics.jsonl")
    ages = staleness_tokens(rows)
    points = zip(elapsed(rows).tolist(), column(rows, "reward_mean").tolist(), strict=True)
    return Run(
        arm=arm,
        seed=seed,
        reward=reward,
        stderr=stderr,
        lag=sum(age * tokens for age, tokens in ages.items()) / sum(ages.values()),
        points=tuple(Point((n + 1) * GROUPS * GROUP_SIZE, seconds, value) for n, (seconds, value) in enumerate(points)),
    )


async def _run_trl(arm: Arm, seed: int, steps: int, model: Path, folder: Path) -> Run:
    """GRPOTrainer in its own environment."""
    overrides = (*TASK, *TRAINING, f"seed={seed}")
    out = folder / "run"
    out.mkdir()
    job = TrlJob(str(model), overrides, steps, seed, _first_prompt(model, overrides), str(out))
    (folder / "job.json").write_bytes(msgspec.json.encode(job))
    # Ours keep every core busy with engine and learner; TRL's one process may, too.
    threads = {"OMP_NUM_THREADS": str(os.cpu_count() or 1)}
    await run_command(
        (str(TRL_PYTHON), "-m", f"{__package__}.trl_grpo", str(folder / "job.json")), folder / "run.log", threads
    )
    reward, stderr = await _evaluated(out / "model", seed, folder)
    return Run(
        arm=arm,
        seed=seed,
        reward=reward,
        stderr=stderr,
        lag=0.0,
        points=msgspec.json.decode((out / "points.json").read_bytes(), type=tuple[Point, ...]),
    )


async def _evaluated(model: Path, seed: int, folder: Path) -> tuple[float, float]:
    """Mean reward of held-out tasks, by `slipstream eval`, and its standard error."""
    overrides = (*TASK, *TRAINING, *EVALUATION, f"seed={seed}", f"model.path={model}")
    final = msgspec.json.decode(await slipstream("eval", PRESET, *overrides, "--json", log=folder / "eval.log"))
    return final["reward_mean"], final["reward_stderr"]


def _first_prompt(model: Path, overrides: Sequence[str]) -> list[int]:
    """The token ids that our worker would send for the first task."""
    config = load(PRESET, overrides)
    renderer = load_renderer(config.agent.renderer, load_tokenizer(str(model)), thinking=config.agent.thinking)
    return list(renderer.render_ids(to_chat(tasks(config).opening(0).messages), add_generation_prompt=True))
