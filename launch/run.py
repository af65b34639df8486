"""What the commands do: train, resume, evaluate. Each is a straight line through the rooms.

Invariants:
- Everything that can be refused is refused before the first process starts and before a file is written.
- However a run ends, its report is written.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path

import msgspec
from rich.console import Console

from .. import heap
from ..buffer.accounts import Accounts, accounts_of
from ..configs import Config, dump
from ..configs.algorithm import plays_greedily
from ..configs.reward import EnvironmentReward, ModelReward
from ..configs.section import Section
from ..errors import ConfigError, Interrupted, SlipstreamError
from ..monitor.live import View, open_view
from ..monitor.report import Report, write_report
from ..monitor.summary import read_evaluations
from .folder import alone
from .preflight import preflight, writable
from .processes import LocalLauncher
from .resources import gpus_of, place
from .supervisor import Supervisor

log = logging.getLogger(__name__)

FIXED = ("seed", "env", "reward", "agent.renderer", "buffer.group_size", "model.dtype")
"""What the groups in a buffer mean; a run that resumes cannot change it."""

FREE = ("reward.memory", "reward.request_s")
"""What stands below those keys and changes no reward."""

QUOTED = 60
"""Characters of a value that an error quotes: a template has many lines."""


def train(config: Config) -> Report:
    """Start a new run and see it through.

    Raises:
        ConfigError: something is wrong with the config or this machine; nothing was started.
        RoleDied: the run failed.
        Interrupted: the run was stopped and can be resumed.
    """
    writable("run.dir", config.run.dir)
    run_dir = Path(config.run.dir).resolve()
    config = anchored(config)
    if run_dir.is_dir() and any(run_dir.iterdir()):
        raise ConfigError(
            f"run.dir: {config.run.dir} is not empty; continue it with `slipstream resume {config.run.dir}`, "
            "or name a new folder"
        )
    preflight(config)
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    return _supervise(config, run_dir)


def anchored(config: Config) -> Config:
    """With absolute paths of model folders, so that the run can be resumed from anywhere."""
    replace, model, reward = msgspec.structs.replace, config.model, config.reward
    if Path(model.path).is_dir():
        config = replace(config, model=replace(model, path=str(Path(model.path).resolve())))
    if isinstance(reward, ModelReward) and Path(reward.path).is_dir():
        config = replace(config, reward=replace(reward, path=str(Path(reward.path).resolve())))
    return config


def resume(config: Config, before: Config, run_dir: Path) -> Report:
    """Continue a run, configured as `before` until now, from its newest checkpoint or from its start; raises as `train`."""
    for fixed in FIXED:
        for key, old, new in _changes(fixed, attrgetter(fixed)(before), attrgetter(fixed)(config)):
            raise ConfigError(
                f"{key}: a run keeps what it began with ({old!r:.{QUOTED}}), {new!r:.{QUOTED}} is not allowed; start a new run"
            )
    if plays_greedily(before.learner.algorithm) != plays_greedily(config.learner.algorithm):
        kinds = [_kind(c.learner.algorithm.advantage) for c in (before, config)]
        raise ConfigError(
            f"learner.algorithm.advantage.kind: from {kinds[0]} to {kinds[1]} is not allowed: groups of remax, and no others, have "
            "an episode that is their baseline, and there are groups already; start a new run"
        )
    preflight(config)
    (run_dir / "logs").mkdir(exist_ok=True)
    return _supervise(config, run_dir)


def _changes(key: str, old: object, new: object) -> Iterator[tuple[str, object, object]]:
    """The keys at and below `key` that are not what they were, but for those in `FREE`: each with its old and its new value."""
    if isinstance(old, Section) and isinstance(new, Section):
        if type(old) is not type(new):
            yield f"{key}.kind", _kind(old), _kind(new)
            return
        for name in old.__struct_fields__:
            yield from _changes(f"{key}.{name}", getattr(old, name), getattr(new, name))
    elif old != new and key not in FREE:
        yield key, old, new


def _kind(section: Section) -> str:
    return str(section.__struct_config__.tag)


def unscored(config: Config) -> Config:
    """For what asks no reward model: its server is neither started nor looked for."""
    return msgspec.structs.replace(config, reward=EnvironmentReward())


def _supervise(config: Config, run_dir: Path) -> Report:
    with alone(run_dir):
        (run_dir / "config.yaml").write_text(dump(config))
        try:
            with open_view(config) as view:
                asyncio.run(make_supervisor(config, run_dir, view, gpus_of(config)).train())
        except BaseException:
            try:
                write_report(run_dir, _ledger(run_dir))
            except (SlipstreamError, OSError) as error:  # the run's own error is told by whoever called
                log.error("the report of the failed run could not be written: %s", error)
            raise
        return write_report(run_dir, _ledger(run_dir))


def evaluate(config: Config, label: str) -> msgspec.Raw:
    """Serve `model.path`, play `evaluation.tasks` fresh tasks; the evaluation as JSON."""
    if config.evaluation.tasks == 0:
        raise ConfigError("evaluation.tasks: 0 leaves nothing to do; allowed here are 1 and more")
    config = unscored(config)
    preflight(config)
    run_dir = Path(tempfile.mkdtemp(prefix="slipstream-eval-"))  # stays when this fails: the error names a log in it
    (run_dir / "logs").mkdir()
    try:
        with open_view(config, Console(stderr=True, highlight=False)) as view:
            asyncio.run(make_supervisor(config, run_dir, view, gpus_of(config)).evaluate(label))
    except Interrupted:
        shutil.rmtree(run_dir)
        raise
    results = msgspec.json.decode((run_dir / "evaluations.json").read_bytes(), type=list[msgspec.Raw])
    shutil.rmtree(run_dir)
    return msgspec.Raw(bytes(results[-1]))


def outcome(report: Report) -> str:
    """What a person wants to read when a run is done."""
    evaluations = read_evaluations(report.html.parent / "evaluations.json")
    lines = [
        f"{e.label}: reward {e.reward_mean:.3f} ± {e.reward_stderr:.3f} over {e.tasks} fresh tasks" for e in evaluations
    ]
    return "\n".join([*lines, f"report: {report.html}", f"curve:  {report.png}"])


def accounts(run_dir: Path) -> Accounts | None:
    """A run's token accounts; None where it never had a buffer."""
    path = run_dir / "buffer.sqlite"
    return accounts_of(path) if path.exists() else None


def require_accounts(run_dir: Path) -> Accounts:
    """As `accounts`. Raises ConfigError where there are none."""
    found = accounts(run_dir)
    if found is None:
        raise ConfigError(f"{run_dir} holds no run that has begun: there is no buffer.sqlite")
    return found


def _ledger(run_dir: Path) -> dict[str, object] | None:
    """What a report says about tokens."""
    found = accounts(run_dir)
    return None if found is None else found.told()


def make_supervisor(config: Config, run_dir: Path, view: View, gpus: Mapping[str, int]) -> Supervisor:
    """A supervisor over the launcher that `launch.kind` names; `gpus` is how many each role wants."""
    import torch

    logs, available = run_dir / "logs", torch.cuda.device_count()
    if config.launch.kind == "local":
        placement = place(gpus, available)
        launcher = LocalLauncher(logs, config.launch.port, placement, available)
    else:
        from .ray_launcher import RayLauncher

        placement = place(gpus, sum(gpus.values()))  # Ray gives every role GPUs of its own, and tells it which
        launcher = RayLauncher(logs, config.launch.port, many_hosts=config.launch.hosts == "many")
    heap.freeze()
    return Supervisor(config, run_dir, launcher, view, gpus=gpus, backend=placement.backend)
