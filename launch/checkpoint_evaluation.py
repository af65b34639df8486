"""The evaluation of one checkpoint while its run goes on, on a server of its own.

    RUN/checkpoints/step-N ──export──> RUN/evaluation/model ──> server ──> RUN/evaluation/evaluations.json ──> RUN/evaluations.json
                                                                   └──> RUN/evaluation.sqlite

Invariants:
- Its weights never change, so every token of every episode is of the version that the checkpoint names.
- Rollouts, the learner and their servers have no part in it.
- A result is kept as soon as it is there: what a killed evaluation found is taken over by the next, which plays the other suites.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import structs

from ..configs import Config
from ..configs.evaluation import EvaluationSuite
from ..errors import CheckpointError, LearnerError, RoleDied
from ..learner.checkpoint_folder import STATE_FILE, path_of, read_state
from ..monitor.series import evaluation_line, read_evaluations
from ..monitor.terminal import View
from . import evaluations
from .export import convert
from .run import make_supervisor, without_reward_model

FOLDER = "evaluation"  # in the run folder: the one evaluation that is under way


def evaluate_checkpoint(config: Config, run_dir: Path, label: str, step: int, tell: Callable[[str], None]) -> None:
    """Play the suites that have no result of `step` yet, with the policy of the checkpoint of that step, and add their results to
    the run's; `tell` shows each. The engine runs on the GPUs that this process sees. Raises as `Supervisor`, LearnerError where the
    checkpoint cannot be read."""
    folder, version = run_dir / FOLDER, _version(path_of(run_dir / "checkpoints", step))
    if folder.exists():
        _take_over(run_dir, step, version, tell)
        shutil.rmtree(folder)
    suites = evaluations.missing(run_dir, config, step)
    if not suites:
        return
    (folder / "logs").mkdir(parents=True)
    model = folder / "model"
    try:
        convert(config, path_of(run_dir / "checkpoints", step), model)
        served = _one_server_config(config, str(model), suites)
        asyncio.run(make_supervisor(served, folder, View(), {}, evaluated=run_dir).evaluate(label, step))
    except RoleDied as error:
        raise RoleDied(error, final=True) from error  # its processes were restarted as often as the config allows
    finally:
        shutil.rmtree(model, ignore_errors=True)
        _take_over(run_dir, step, version, tell)
    shutil.rmtree(folder)  # where it failed, its logs stay


def _version(checkpoint: Path) -> int:
    """The version of the policy in a checkpoint. Raises CheckpointError where it is gone or damaged, and LearnerError where a disk
    failed, which may pass."""
    try:
        return read_state(checkpoint).version
    except FileNotFoundError:
        raise CheckpointError(
            f"checkpoint {checkpoint} cannot be evaluated: it is gone; evaluate another step"
        ) from None
    except OSError as error:
        why = f"its {STATE_FILE} cannot be read: {error}; look at the disk"
        raise LearnerError(f"checkpoint {checkpoint} cannot be evaluated: {why}", final=False) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        why = f"its {STATE_FILE} is damaged: {error}; evaluate another step"
        raise CheckpointError(f"checkpoint {checkpoint} cannot be evaluated: {why}") from error


def _one_server_config(config: Config, model: str, suites: dict[str, Config]) -> Config:
    """`config` for one server of `model` on this host that plays `suites`."""
    replace, evaluation = structs.replace, config.evaluation
    named = {name: evaluation.suites.get(name, EvaluationSuite()) for name in suites if name}
    return replace(
        without_reward_model(config),
        model=replace(config.model, path=model),
        rollout=replace(config.rollout, engine=replace(config.rollout.engine, replicas=1)),
        evaluation=evaluation.without_schedule(named),
        launch=replace(config.launch, kind="local", ports={"first": 0}),
    )


def _take_over(run_dir: Path, step: int, version: int, tell: Callable[[str], None]) -> None:
    """Add the results in the folder, where they are of `step`."""
    known = {(one.step, one.suite) for one in read_evaluations(run_dir / evaluations.FILE)}
    for one in read_evaluations(run_dir / FOLDER / evaluations.FILE):
        if one.step == step and (step, one.suite) not in known:
            record = structs.replace(one, version=version)
            evaluations.append(run_dir, record)
            tell(evaluation_line(record))
