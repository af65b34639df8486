"""The commands `train`, `resume` and `eval`: from a config, through a supervised run, to a report.

Invariants:
- Everything that can be refused is refused before the first process starts and before a file is written.
- What takes seconds to import is imported after the first checks.
- The report is written however a run ends, or a line says why not; writing it neither fails a run nor delays its end by long.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from ..buffer.ledger_report import LedgerReport, ledger_report
from ..buffer.schema import DATABASE
from ..common import accelerator
from ..common import gc as heap
from ..common.fsio import replace_directory, write_atomic
from ..common.scores import EvaluationResult
from ..common.tasks import in_thread
from ..configs import RUN_CONFIG, Config, describe, differences, dump
from ..configs.algorithm import plays_greedily
from ..configs.engine_checks import require_own_servers
from ..configs.environments import absolute_paths, without_placement
from ..configs.evaluation import EvaluationSuite
from ..configs.reward import EnvironmentReward, ModelReward
from ..configs.suites import suites_of
from ..errors import ConfigError, SlipstreamError, with_deadline
from ..errors import describe as describe_error
from ..learner.traces import FILE as TRACES
from ..learner.traces import write_traces
from ..monitor.metrics import METRICS, read_metrics
from ..monitor.output import open_console
from ..monitor.series import evaluation_line, read_evaluations
from ..monitor.settings import SETTINGS, SettingChange, append_changes
from ..monitor.terminal import View, open_view
from . import evaluations
from .launchers.local import LocalLauncher
from .preflight import preflight, writable
from .resources import assign_gpus, collectives_of, gpus_of
from .row_counts import record_counts, recorded_counts
from .run_files import keep_inputs
from .run_lock import is_locked, run_lock
from .traces import grade_traces
from .work_folder import work_folder

if TYPE_CHECKING:
    from ..buffer.trajectory import Trajectory
    from ..monitor.metrics_server import MetricsServer
    from ..planner.explain.findings import Explanation
    from .program.link import ProgramLink
    from .supervisor.supervisor import Supervisor

log = logging.getLogger(__name__)

METRICS_HOST = "SLIPSTREAM_METRICS_HOST"  # variable with the address at which `/metrics` is served
LOOPBACK = "127.0.0.1"
REPORT = "report.html"
SAMPLE_S = 5.0  # of writing the report, after which it samples no more trajectories
REPORT_S = 20.0  # after which the run ends without its report

# Beginnings of keys that define the groups in the buffer: a resumed run cannot change them.
IMMUTABLE = ("seed", "env.", "reward.", "agent.renderer", "buffer.group_size", "buffer.shards", "model.dtype")
QUOTED = 60  # most characters of a value that an error quotes: a template has many lines

C = TypeVar("C", bound=Config)


class RunReport(msgspec.Struct, frozen=True):
    """What a run leaves for its user."""

    path: Path  # of the page
    problem: str  # why it was not written, else empty
    explanation: tuple[str, ...]  # the lines of `slipstream explain`


def train(config: Config, *, recorded: bool = True, program: ProgramLink | None = None) -> RunReport:
    """Start a new run and see it through; `recorded` False is for benchmarks of what spans and series cost; `program` is rank 0 of
    the learner, where that is no process of its own. Raises ConfigError where something is wrong with the config or this machine
    (nothing was started), RoleDied where the run failed, Interrupted where it was stopped and can be resumed."""
    writable("run.dir", config.run.dir)
    run_dir = Path(config.run.dir).resolve()
    config = with_absolute_paths(config)
    refuse_active(run_dir)
    if run_dir.is_dir() and any(run_dir.iterdir()):
        continues = f"continue it with `slipstream resume {shlex.quote(config.run.dir)}`"
        raise ConfigError(f"run.dir: {config.run.dir} is not empty; {continues}, or name a new folder")
    inputs = preflight(config)
    return _supervise(config, run_dir, inputs.counts, grade_traces(inputs), recorded=recorded, program=program)


def refuse_active(run_dir: Path) -> None:
    """Raises ConfigError where a command uses the run folder now."""
    if is_locked(run_dir):
        raise ConfigError(f"run.dir: the run in {run_dir} is active; stop it first, or name a new folder")


def with_absolute_paths(config: C) -> C:
    """`config` with absolute paths of model folders, keys, data and programs, so that the run can be resumed from any directory."""
    replace, model, reward, evaluation = msgspec.structs.replace, config.model, config.reward, config.evaluation
    suites = {
        name: replace(suite, env=absolute_paths(suite.env)) if suite.env else suite
        for name, suite in evaluation.suites.items()
    }
    config = replace(config, env=absolute_paths(config.env), evaluation=replace(evaluation, suites=suites))
    if (engine := config.rollout.engine).external:
        keys = {url: str(Path(file).absolute()) for url, file in engine.external.items()}
        config = replace(config, rollout=replace(config.rollout, engine=replace(engine, replicas=keys)))
    if (sandbox := config.agent.sandbox).folder:
        sandbox = replace(sandbox, folder=str(Path(sandbox.folder).resolve()))
        config = replace(config, agent=replace(config.agent, sandbox=sandbox))
    if "/" in (program := next(iter(config.run.on_alert), "")):
        command = (str(Path(program).absolute()), *config.run.on_alert[1:])
        config = replace(config, run=replace(config.run, on_alert=command))
    if Path(model.path).is_dir():
        config = replace(config, model=replace(model, path=str(Path(model.path).resolve())))
    if isinstance(reward, ModelReward) and Path(reward.path).is_dir():
        config = replace(config, reward=replace(reward, path=str(Path(reward.path).resolve())))
    return config


def resume(config: Config, before: Config, run_dir: Path, *, program: ProgramLink | None = None) -> RunReport:
    """Continue a run, whose config was `before`, from its newest checkpoint or from its start; raises as `train`."""
    refuse_active(run_dir)
    refuse_changes(config, before)
    inputs = preflight(config, recorded_counts(run_dir))
    traces = [] if (run_dir / TRACES).exists() else grade_traces(inputs)
    return _supervise(config, run_dir, inputs.counts, traces, before=before, program=program)


def refuse_changes(config: Config, before: Config) -> None:
    """Raises ConfigError where `config` changes what a run that began with `before` keeps."""
    movable = (msgspec.structs.replace(c, env=without_placement(c.env)) for c in (before, config))
    old, new = ({field.key: field.value for field in describe(c)} for c in movable)
    for key, value in old.items():
        if key.startswith(IMMUTABLE) and new.get(key) != value:
            raise ConfigError(
                f"{key}: a run keeps what it began with ({value:.{QUOTED}}), {new.get(key)!s:.{QUOTED}} is not allowed; "
                "start a new run"
            )
    for name, suite in config.evaluation.suites.items():
        known = before.evaluation.suites.get(name, suite)
        if _unplaced(known) != _unplaced(suite):
            raise ConfigError(
                f"evaluation.suites.{name}: a suite stays what it was, so that its results can be compared; give the other one "
                "another name"
            )
    if plays_greedily(before.learner.algorithm) != plays_greedily(config.learner.algorithm):
        key = "learner.algorithm.advantage.kind"
        raise ConfigError(
            f"{key}: from {old[key]} to {new[key]} is not allowed: only the groups of remax "
            "have a baseline episode, and the buffer has groups already; start a new run"
        )


def _unplaced(suite: EvaluationSuite) -> EvaluationSuite:
    """What its results depend on."""
    suite = msgspec.structs.replace(suite, keep_best=False)
    return msgspec.structs.replace(suite, env=without_placement(suite.env)) if suite.env else suite


def without_reward_model(config: C) -> C:
    """`config` for work that needs no reward model: its server is neither started nor checked."""
    return msgspec.structs.replace(config, reward=EnvironmentReward())


def _supervise(
    config: Config,
    run_dir: Path,
    counts: Mapping[str, int],
    traces: Sequence[Trajectory],
    *,
    recorded: bool = True,
    before: Config | None = None,
    program: ProgramLink | None = None,
) -> RunReport:
    with contextlib.ExitStack() as stack:
        metrics = open_metrics(config, stack)
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        stack.enter_context(run_lock(run_dir))
        if traces:
            write_traces(run_dir / TRACES, traces)
        record_counts(run_dir, counts)
        if before is not None:
            _record_changes(run_dir, before, config)
        write_atomic(run_dir / RUN_CONFIG, dump(config).encode())
        keep_tokenizer(config.model.path, run_dir)
        keep_inputs(config, run_dir)
        try:
            with program.view(config) if program else open_view(config) as view:
                view.past(read_metrics(run_dir / METRICS))
                supervisor = make_supervisor(config, run_dir, view, gpus_of(config), recorded=recorded, program=program)
                work = supervisor.train(metrics)
                asyncio.run(program.supervise(work, supervisor.interrupt) if program else work)
        except BaseException:
            from ..planner.explain.findings import Explanation

            hint = f"`slipstream explain {shlex.quote(config.run.dir)}` says what to change"
            report = write_report(run_dir, Explanation(run=config.run.dir, alerts=(), note=hint))
            if report.problem:  # the caller reports the run's own error
                log.error("the report of the failed run: %s", report.problem)
            raise
        from .explain import explain_or_say_why

        return write_report(run_dir, explain_or_say_why(run_dir, active=False))


def open_metrics(config: Config, stack: contextlib.ExitStack) -> MetricsServer | None:
    """The server of `/metrics`, which listens already, where the config wants one; `stack` ends it. Raises ConfigError."""
    if (port := config.launch.ports.get("metrics")) is None:
        return None
    from ..monitor.metrics_server import MetricsServer

    host = os.environ.get(METRICS_HOST) or LOOPBACK
    return stack.enter_context(MetricsServer(host, port, "launch.ports.metrics"))


def _record_changes(run_dir: Path, before: Config, after: Config) -> None:
    """What a resumed run changes of its live settings, in `settings.jsonl`, before `config.yaml` has it."""
    from ..learner.checkpoint_folder import checkpoints, read_state

    complete = checkpoints(run_dir / "checkpoints")
    state = read_state(complete[-1]) if complete else None
    step, version = (state.step + 1, state.version) if state else (1, 0)
    now, different = time.time(), differences(before, after)
    if different:
        changes = [SettingChange(now, step, version, one.key, one.old, one.new) for one in different]
        append_changes(run_dir / SETTINGS, changes)


def keep_tokenizer(model: str, run_dir: Path) -> None:
    """Copy the tokenizer of `model` into the run, and its config, which has the size of its vocabulary: its tokens can be read
    where the model is not, or no longer the same."""
    from ..dashboard.texts import TOKENIZER
    from ..learner.model import load_tokenizer, read_config

    if not (run_dir / TOKENIZER).exists():
        written = run_dir / f".{TOKENIZER}.part"
        load_tokenizer(model).save_pretrained(str(written))
        read_config(model).save_pretrained(str(written))
        replace_directory(run_dir / TOKENIZER, written)


def write_report(run_dir: Path, explanation: Explanation) -> RunReport:
    """The page of the dashboard as a file of the run, which a command may still hold. It never fails: the run is over, and
    `slipstream dash RUN --export FILE` writes it, too."""
    path = run_dir / REPORT

    async def write() -> None:
        from ..dashboard.export import export_run
        from ..dashboard.runs import ENDED, WatchedRun

        run = WatchedRun(run_dir.name, run_dir, ENDED)
        work = in_thread(lambda: export_run(run, path, explanation, SAMPLE_S), "report")
        await with_deadline(
            REPORT_S, work, who="the report", waits_for="the files of the run", hint="is the disk slow?"
        )

    problem = ""
    try:
        asyncio.run(write())
    except Exception as error:  # whatever it is, the run has ended well
        log.warning("the report was not written", exc_info=True)
        problem = str(error) if isinstance(error, SlipstreamError | OSError) else describe_error(error)
    return RunReport(path, problem, tuple(explanation.lines()))


def read_ledger(run_dir: Path) -> LedgerReport:
    """A run's token ledger. Raises ConfigError where the run has no buffer yet."""
    path = run_dir / DATABASE
    if not path.exists():
        raise ConfigError(f"{run_dir} holds no run that has started: there is no {DATABASE}")
    return ledger_report(path, active=is_locked(run_dir))


def evaluate(config: Config, label: str) -> list[EvaluationResult]:
    """Serve `model.path` and play the held-out tasks of every suite; the results in their order."""
    require_own_servers(config, "eval")
    if not suites_of(config):
        raise ConfigError("evaluation.tasks: 0 leaves nothing to do; allowed here are 1 and more")
    config = without_reward_model(with_absolute_paths(config))
    # There are no checkpoints, and no second server.
    config = msgspec.structs.replace(config, evaluation=config.evaluation.without_schedule(config.evaluation.suites))
    preflight(config, pushed=False)
    with work_folder(config, "eval", writable("run.dir", config.run.dir)) as folder:
        with open_view(config, open_console(stderr=True)) as view:
            asyncio.run(make_supervisor(config, folder, view, gpus_of(config)).evaluate(label))
        return read_evaluations(folder / evaluations.FILE)


def summary(report: RunReport) -> str:
    """The text printed when a run is done: its evaluations, what to change in it, and where its report is."""
    lines = list(map(evaluation_line, read_evaluations(report.path.parent / evaluations.FILE)))
    where = f"not written: {report.problem}" if report.problem else str(report.path)
    return "\n".join([*lines, *report.explanation, f"report: {where}"])


def make_supervisor(
    config: Config,
    run_dir: Path,
    view: View,
    gpus: Mapping[str, int],
    *,
    recorded: bool = True,
    evaluated: Path | None = None,
    program: ProgramLink | None = None,
    named_by: str = "run.dir",
) -> Supervisor:
    """A supervisor with the launcher that `launch.kind` names; `gpus` is the number that each role needs. Episodes of evaluations
    are kept in the folder of the run `evaluated`, by default in `run_dir`. `named_by` is the key or option by which a user says
    where `run_dir` is."""
    from .program.link import ProgramLauncher
    from .supervisor.supervisor import Supervisor  # takes seconds

    logs, available = run_dir / "logs", accelerator.count()
    collectives = collectives_of(config)
    if not config.launch.by_ray:
        placement = assign_gpus(gpus, available, collectives, colocated=config.launch.colocated)
        local = logs, config.launch.ports["first"], placement, available
        launcher = ProgramLauncher(*local, program) if program else LocalLauncher(*local)
    else:
        from .launchers.ray import RayLauncher

        placement = assign_gpus(gpus, sum(gpus.values()), collectives)  # Ray assigns every role its own GPUs
        kind, many = accelerator.named(config.learner.backend.device), config.launch.hosts == "many"
        resource = kind.resource if kind else "GPU"
        launcher = RayLauncher(
            logs, config.launch.ports["first"], many_hosts=many, resource=resource, named_by=named_by
        )
    heap.freeze_startup_objects()
    options = {"gpus": gpus, "backend": placement.backend, "recorded": recorded}
    return Supervisor(config, run_dir, launcher, view, **options, evaluated_dir=str(evaluated or ""))
