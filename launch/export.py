"""The policy of a step of a run, as a Hugging Face folder.

Invariants:
- A checkpoint holds the run's own format and layout of ranks; it is loaded here by one rank, which holds the whole model.
- What is read is a complete checkpoint, also while the run goes on; the run may delete it meanwhile (`learner.checkpoint_keep`),
  which is an error and leaves no folder.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from msgspec import structs

from ..configs import Config, load, run_config
from ..errors import ConfigError
from ..learner.checkpoint import checkpoints, read_state


def export(run: str | Path, out: Path | None = None, step: int | None = None) -> Path:
    """Write the policy after `step` to `out`, by default `RUN/model-step-N`; of the newest checkpoint where no step is given. Gives
    the folder. Raises ConfigError where there is no such checkpoint or the folder exists, LearnerError where it cannot be read."""
    config = load(str(run_config(run)))
    step, checkpoint = _checkpoint(Path(run), step)
    out = out or Path(run) / f"model-step-{step}"
    if out.exists():
        raise ConfigError(f"{out} exists; remove it, or name another folder with --out")
    _convert(config, checkpoint, out.resolve())
    return out


@contextlib.contextmanager
def model_at(run: str | Path, step: int | None = None) -> Iterator[Path]:
    """The model of a run: after `step`, or after the last one. Of a finished run it is `RUN/model`, otherwise a checkpoint's, in a
    folder that is deleted afterwards. Raises as `export`."""
    finished = Path(run) / "model"
    if step is None and finished.is_dir():
        yield finished
        return
    config = load(str(run_config(run)))
    step, checkpoint = _checkpoint(Path(run), step)
    with tempfile.TemporaryDirectory(prefix="slipstream-model-") as folder:
        out = Path(folder) / f"{Path(run).resolve().name}-step-{step}"
        _convert(config, checkpoint, out)
        yield out


def _checkpoint(run: Path, step: int | None) -> tuple[int, Path]:
    """The checkpoint of `step`, or the newest, and its step."""
    found = {read_state(path).step: path for path in checkpoints(run / "checkpoints")}
    if not found:
        raise ConfigError(f"{run} has no checkpoint yet; the first is written after learner.checkpoint_every steps")
    if step is None:
        step = max(found)
    if step not in found:
        raise ConfigError(
            f"--step: {run} has no checkpoint of step {step}; it has {', '.join(map(str, sorted(found)))}"
        )
    return step, found[step]


def _convert(config: Config, checkpoint: Path, out: Path) -> None:
    from .supervisor.factory import make_backend  # takes seconds

    learner = structs.replace(config.learner, backend=structs.replace(config.learner.backend, ranks=1, parallel={}))
    backend = make_backend(structs.replace(config, learner=learner), temperature=config.rollout.temperature)
    try:
        backend.load(checkpoint)
        backend.export(out)
    finally:
        backend.close()
