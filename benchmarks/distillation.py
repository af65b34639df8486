"""`slipstream bench distillation`: samples until the quickstart's policy earns what its teacher earns, by distillation and by GRPO.

    warm-up ──one model──> GRPO with another seed ──teacher──> each seed: distillation, then GRPO ──> OUT/ARM/seed-N/result.json

Invariants:
- Both arms begin with the model that the teacher began with, see the same tasks in the same order, play as many episodes per step,
  and take AdamW steps with the same rate, loss and correction at the same bound of staleness. The distilled policy gets no reward.
- The teacher's reward is that of `slipstream eval` on fresh tasks; an arm reaches it where the mean reward of `WINDOW` batches is
  not below it by more than twice its standard error. Both play at temperature 1.
- What is complete in the folder is not repeated. A folder holds results of one number of steps.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import msgspec

from ..configs import load
from ..errors import ConfigError
from ..monitor.metrics import read_metrics
from ..monitor.series import column, elapsed
from .commands import Notify, slipstream, warm_model
from .learning_arms import Point
from .result import Result, Row

PRESET = "quickstart"
SEEDS, STEPS = 3, 60
TEACHER_SEED = 1000
WINDOW = 5  # batches of 64 episodes: a standard error of at most 0.03

EVALUATION = ("evaluation.tasks=1024",)


class Teacher(msgspec.Struct, frozen=True):
    """What the teacher earns on fresh tasks, the standard error, and the learner steps that it took."""

    reward: float
    stderr: float
    steps: int


def overrides(teacher: Path | None) -> tuple[str, ...]:
    """What an arm adds to the quickstart: nothing for GRPO."""
    if teacher is None:
        return ()
    return (
        f"learner.algorithm.kl={{kind: distillation, reference: {teacher}}}",
        "learner.algorithm.advantage={kind: none}",
    )


async def distillation(out: Path, seeds: int, steps: int, notify: Notify) -> tuple[Result, ...]:
    """Run what is missing in `out`, and compare. Raises ConfigError: `out` holds results of another number of steps."""
    _make(out)
    model = await warm_model(out, PRESET, (), (), notify)
    teacher = await _teacher(out / "teacher", model, steps, notify)
    notify(f"the teacher earns {teacher.reward:.3f} ± {teacher.stderr:.3f}")
    arms: dict[str, list[tuple[Point, ...]]] = {"distillation": [], "grpo": []}
    for seed in range(seeds):
        for arm, runs in arms.items():
            folder = out / arm / f"seed-{seed}"
            if not (folder / "result.json").exists():
                notify(f"{arm}, seed {seed}")
                keys = overrides(out / "teacher" / "run" / "model" if arm == "distillation" else None)
                _keep(folder / "result.json", await _trained(folder, model, seed, steps, keys))
            runs.append(msgspec.json.decode((folder / "result.json").read_bytes(), type=tuple[Point, ...]))
    return tables(teacher, arms["distillation"], arms["grpo"])


def reached(points: Sequence[Point], teacher: Teacher) -> int | None:
    """Samples until the mean reward of `WINDOW` batches is the teacher's; None where it never is."""
    for last in range(WINDOW, len(points) + 1):
        if mean(point.reward for point in points[last - WINDOW : last]) >= teacher.reward - 2 * teacher.stderr:
            return points[last - 1].samples
    return None


def tables(
    teacher: Teacher, distilled: Sequence[Sequence[Point]], grpo: Sequence[Sequence[Point]]
) -> tuple[Result, ...]:
    """A row for each seed; an arm that never got there counts with all its samples, which the note says."""
    rows: list[Row] = []
    for seed, runs in enumerate(zip(distilled, grpo, strict=True)):
        found = [reached(points, teacher) for points in runs]
        counts = [points[-1].samples if n is None else n for n, points in zip(found, runs, strict=True)]
        names = ("distillation", "GRPO")
        late = [f"{name} did not get there" for name, n in zip(names, found, strict=True) if n is None]
        last = [mean(point.reward for point in points[-WINDOW:]) for points in runs]
        note = f"rewards at the end {last[0]:.3f} and {last[1]:.3f}"
        rows.append(Row(f"seed {seed}", counts[0], counts[1], "samples", "; ".join([note, *late])))
    title = f"samples until the teacher's reward of {teacher.reward:.3f} ± {teacher.stderr:.3f}: distillation over GRPO"
    return (Result(title, "distillation", "GRPO", tuple(rows)),)


async def _teacher(folder: Path, model: Path, steps: int, notify: Notify) -> Teacher:
    """Train it, or see what a complete folder says."""
    result = folder / "result.json"
    if not result.exists():
        notify("the teacher: GRPO with a seed of its own")
        await _trained(folder, model, TEACHER_SEED, steps, ())
        keys = (f"model.path={folder / 'run' / 'model'}", f"seed={TEACHER_SEED}", *EVALUATION)
        found = msgspec.json.decode(await slipstream("eval", PRESET, *keys, "--json", log=folder / "eval.log"))
        _keep(result, Teacher(found["reward_mean"], found["reward_stderr"], steps))
    teacher = msgspec.json.decode(result.read_bytes(), type=Teacher)
    if teacher.steps != steps:
        raise ConfigError(f"--out: {folder.parent} holds results of --steps {teacher.steps}; name another folder")
    return teacher


async def _trained(folder: Path, model: Path, seed: int, steps: int, keys: Sequence[str]) -> tuple[Point, ...]:
    """`slipstream train` in a folder that is made anew."""
    shutil.rmtree(folder, ignore_errors=True)
    _make(folder)
    run = folder / "run"
    fixed = (f"model.path={model}", f"run.dir={run}", f"seed={seed}", f"learner.steps={steps}", "evaluation.tasks=0")
    await slipstream("train", PRESET, *fixed, *keys, log=folder / "run.log")
    rows, buffer = read_metrics(run / "metrics.jsonl"), load(PRESET).buffer
    episodes = buffer.groups_per_batch * buffer.group_size
    points = zip(elapsed(rows).tolist(), column(rows, "reward_mean").tolist(), strict=True)
    return tuple(Point((n + 1) * episodes, seconds, value) for n, (seconds, value) in enumerate(points))


def _make(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)


def _keep(file: Path, result: Teacher | tuple[Point, ...]) -> None:
    """Write it complete or not at all."""
    written = file.with_suffix(".part")
    written.write_bytes(msgspec.json.encode(result))
    written.replace(file)
