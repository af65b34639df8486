"""`slipstream bench distillation`: samples until the quickstart's policy earns what its teacher earns, by distillation and by GRPO.

    warm-up ──one model──> GRPO with another seed ──teacher──> every arm with every seed ──> OUT/ARM/seed-N/result.json ──> table

Invariants:
- All arms begin with the model that the teacher began with and take AdamW steps with the same rate, loss and correction at the same
  bound of staleness. The distilled policy gets no reward. A teacher's judgement needs no group, so that the distilled policy plays
  each task once; GRPO is compared with as many episodes per batch, and with the quickstart's.
- AdamW's step is as long whatever the gradient's size: with one step per batch a gradient of less noise is worth nothing where the
  direction is clear already, and distillation and GRPO need the same number of batches. Distillation, and GRPO with as many
  episodes, therefore take `MINIBATCHES` steps per batch, and distillation compares the teacher's `TOP` likeliest tokens at each
  token, whose gradient has no noise of sampling, so that a step of few episodes is enough.
- The teacher's reward is that of `slipstream eval` on held-out tasks; an arm has reached it where the mean of its next `WINDOW`
  episodes is not below it by more than twice the standard error of the difference. Both play at temperature 1. What counts are the
  episodes up to the first batch of these: the others only measure it, as many in every arm.
- What is complete in the folder is not repeated. A folder holds results of one number of steps.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import msgspec

from ..common.fsio import write_atomic
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
WINDOW = 320  # episodes: a standard error of at most 0.03
LEAST_STEPS = 7  # so that every arm plays as many
MINIBATCHES, TOP = 4, 16

EVALUATION = ("evaluation.tasks=1024",)


class Teacher(msgspec.Struct, frozen=True):
    """What the teacher earns on held-out tasks, the standard error, and the learner steps that it took."""

    reward: float
    stderr: float
    steps: int


class Contender(msgspec.Struct, frozen=True):
    """One arm: `groups` of `size` episodes in a batch, which takes so many `minibatches`, and `lengthened` times the batches of
    `--steps`."""

    name: str
    groups: int
    size: int
    lengthened: int = 1
    minibatches: int = 1

    def overrides(self, teacher: Path) -> tuple[str, ...]:
        """What the arm changes of the quickstart."""
        batch = (
            *(f"buffer.groups_per_batch={self.groups}", f"buffer.group_size={self.size}"),
            f"learner.algorithm.minibatches={self.minibatches}",
        )
        if self.size > 1:
            return batch
        taught = f"learner.algorithm.kl={{kind: distillation, reference: {teacher}, estimator: {{reverse: {TOP}}}}}"
        return (*batch, taught, "learner.algorithm.advantage={kind: none}")


TAUGHT = Contender("distillation", 16, 1, lengthened=3, minibatches=MINIBATCHES)
FLOORS = (Contender("grpo-16", 4, 4, lengthened=3, minibatches=MINIBATCHES), Contender("grpo-64", 8, 8))
Runs = dict[str, list[tuple[Point, ...]]]  # by the name of the arm, of each seed


async def distillation(out: Path, seeds: int, steps: int, notify: Notify) -> tuple[Result, ...]:
    """Run what is missing in `out`, and compare. Raises ConfigError: `out` holds results of another number of steps."""
    _make(out)
    model = await warm_model(out, PRESET, (), (), notify)
    teacher = await _teacher(out / "teacher", model, steps, notify)
    notify(f"the teacher earns {teacher.reward:.3f} ± {teacher.stderr:.3f}")
    runs: Runs = {arm.name: [] for arm in (TAUGHT, *FLOORS)}
    for seed in range(seeds):
        for arm in (TAUGHT, *FLOORS):
            folder = out / arm.name / f"seed-{seed}"
            if not (folder / "result.json").exists():
                notify(f"{arm.name}, seed {seed}")
                keys = arm.overrides(out / "teacher" / "run" / "model")
                points = await _trained(folder, model, seed, arm.lengthened * steps, keys)
                write_atomic(folder / "result.json", msgspec.json.encode(points))
            runs[arm.name].append(msgspec.json.decode((folder / "result.json").read_bytes(), type=tuple[Point, ...]))
    return tables(teacher, runs)


def reached(points: Sequence[Point], teacher: Teacher) -> int | None:
    """Episodes until the mean reward of the `WINDOW` that begin there is the teacher's; None where it never is. Rewards are from 0
    to 1, so that with a mean m their variance is at most m (1 - m) (Bhatia and Davis 2000)."""
    batches = WINDOW // points[0].samples
    for first in range(len(points) - batches + 1):
        earned = _newest(points[: first + batches])
        stderr = math.hypot(teacher.stderr, math.sqrt(max(0.0, earned * (1 - earned)) / WINDOW))
        if earned >= teacher.reward - 2 * stderr:
            return points[first].samples
    return None


def tables(teacher: Teacher, runs: Runs) -> tuple[Result, ...]:
    """A row for each seed and kind of GRPO; an arm that never got there counts with all its episodes, which the note says."""
    rows: list[Row] = []
    for floor in FLOORS:
        for seed, (taught, plain) in enumerate(zip(runs[TAUGHT.name], runs[floor.name], strict=True)):
            pair = {TAUGHT.name: taught, floor.name: plain}
            found = {name: reached(points, teacher) for name, points in pair.items()}
            late = [f"{name} did not get there" for name, n in found.items() if n is None]
            counts = [pair[name][-1].samples if n is None else n for name, n in found.items()]
            note = f"rewards at the end {_newest(taught):.3f} and {_newest(plain):.3f}"
            rows.append(
                Row(f"over {floor.name}, seed {seed}", counts[0], counts[1], "episodes", "; ".join([note, *late]))
            )
    title = f"episodes until the teacher's reward of {teacher.reward:.3f} ± {teacher.stderr:.3f}"
    return (Result(title, "distillation", "GRPO", tuple(rows)),)


def _newest(points: Sequence[Point]) -> float:
    return mean(point.reward for point in points[-(WINDOW // points[0].samples) :])


async def _teacher(folder: Path, model: Path, steps: int, notify: Notify) -> Teacher:
    """Train it, or see what a complete folder says."""
    result = folder / "result.json"
    if not result.exists():
        notify("the teacher: GRPO with a seed of its own")
        await _trained(folder, model, TEACHER_SEED, steps, ())
        keys = (f"model.path={folder / 'run' / 'model'}", f"seed={TEACHER_SEED}", *EVALUATION)
        found = msgspec.json.decode(await slipstream("eval", PRESET, *keys, "--json", log=folder / "eval.log"))
        teacher = Teacher(found["reward_mean"], found["reward_stderr"], steps)
        write_atomic(result, msgspec.json.encode(teacher))
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
    rows, buffer = read_metrics(run / "metrics.jsonl"), load(PRESET, keys).buffer
    episodes = buffer.groups_per_batch * buffer.group_size
    points = zip(elapsed(rows).tolist(), column(rows, "reward_mean").tolist(), strict=True)
    return tuple(Point((n + 1) * episodes, seconds, value) for n, (seconds, value) in enumerate(points))


def _make(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
