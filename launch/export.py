"""`slipstream export --to hf`: the policy after a step of a run, as a Hugging Face folder.

Invariants:
- A checkpoint holds the run's own format and layout of ranks; it is loaded here by one rank, which holds the whole model.
- What is read is a complete checkpoint, also while the run goes on; the run may delete it meanwhile (`learner.checkpoint_keep`),
  which is an error and leaves no folder.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import structs

from ..common import accelerator
from ..configs import Config, load, run_config
from ..configs.backends import FROZEN_VISION, Fsdp2
from ..configs.evaluation import BEST
from ..errors import ConfigError
from ..learner.checkpoint_folder import checkpoints, step_of
from . import evaluations

Step = int | str | None  # a learner step, `BEST`, or the newest checkpoint


def export(run: str | Path, out: Path | None = None, step: Step = None) -> Path:
    """Write the policy after `step` to `out`, by default `RUN/model-step-N`; of the newest checkpoint where no step is given, of
    the best one of the suite with `keep_best` for `best`. Gives the folder. Raises ConfigError where there is no such
    checkpoint or the folder exists, LearnerError where it cannot be read."""
    config = load(str(run_config(run)))
    step, checkpoint = _checkpoint(Path(run), config, step)
    out = out or Path(run) / f"model-step-{step}"
    if out.exists():
        raise ConfigError(f"{out} exists; remove it, or name another folder with --out")
    convert(config, checkpoint, out.resolve())
    return out


@contextlib.contextmanager
def model_at(run: str | Path, step: Step = None, overrides: Sequence[str] = ()) -> Iterator[Path]:
    """The model of a run: after `step`, or after the last one. Of a finished run it is `RUN/model`, otherwise a checkpoint's, in a
    folder that is deleted afterwards: where the run's config with `overrides` is of several hosts, in the run's own, which they
    share. Raises as `export`."""
    finished = Path(run) / "model"
    if step is None and finished.is_dir():
        yield finished
        return
    config = load(str(run_config(run)))
    step, checkpoint = _checkpoint(Path(run), config, step)
    from .preflight import writable

    many = load(str(run_config(run)), overrides).launch.hosts == "many"
    shared = writable("run.dir", str(run)) if many else None
    with tempfile.TemporaryDirectory(prefix="slipstream-model-", dir=shared) as folder:
        out = Path(folder) / f"{Path(run).resolve().name}-step-{step}"
        convert(config, checkpoint, out)
        yield out


def _checkpoint(run: Path, config: Config, step: Step) -> tuple[int, Path]:
    """The checkpoint of `step`, the best or the newest, and its step."""
    found = {step_of(path): path for path in checkpoints(run / "checkpoints")}
    if not found:
        raise ConfigError(f"{run} has no checkpoint yet; the first is written after learner.checkpoint_every steps")
    if step is None:
        step = max(found)
    if step == BEST:
        suite = config.evaluation.keep_best
        if not suite:
            raise ConfigError(
                f"--step best: {run} has no suite with keep_best, to compare by (evaluation.suites.NAME.keep_best)"
            )
        if (result := evaluations.best(run, suite, found)) is None:
            raise ConfigError(f"--step best: no checkpoint of {run} has been evaluated in {suite} yet")
        step = result.step
    if not isinstance(step, int) or step not in found:
        raise ConfigError(
            f"--step: {run} has no checkpoint of step {step}; it has {', '.join(map(str, sorted(found)))}"
        )
    return step, found[step]


def convert(config: Config, checkpoint: Path, out: Path) -> None:
    """Write the policy of a checkpoint of a run with `config` to the new folder `out`. FSDP2 holds it in the host's memory, since
    the GPUs may be full of the run; Megatron where the run does, since its layers differ. Raises LearnerError where it cannot be
    read, above all where the run has removed it meanwhile."""
    from .supervisor.factory import make_backend  # takes seconds

    chosen = structs.replace(config.learner.backend, ranks=1, parallel={})
    if isinstance(chosen, Fsdp2):
        kept = tuple(
            option for option in chosen.options if option == FROZEN_VISION
        )  # by which it has no optimizer state
        chosen = structs.replace(chosen, device="cpu", options=kept)
    learner = structs.replace(config.learner, backend=chosen)
    backend = make_backend(structs.replace(config, learner=learner), temperature=config.rollout.temperature)
    try:
        backend.load(checkpoint)
        backend.export(out)
    finally:
        backend.close()
        accelerator.empty_cache()  # this process may start a server next
