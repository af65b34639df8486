"""Probes of `slipstream tune`: short real runs of a config, for their speed alone.

    config ──probe-N.yaml──> `slipstream train probe-N.yaml` ──metrics──> figures of the steps after the run has filled up

Invariants:
- It is the run that a user would get of that file, without evaluations, trackers and `run.on_alert`, in a process of its own.
- What it starts ends with it: on time, on an error, on an interrupt, and when this process is killed.
- Its weights are thrown away; the rest of its folder is kept.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from ..common.fsio import write_atomic
from ..configs import Config, dump
from ..configs.algorithm import warmup_of
from ..configs.evaluation import Evaluation
from ..errors import ConfigError, SlipstreamError
from ..monitor.alerts import SETTLING
from ..monitor.metrics import METRICS, read_metrics
from ..monitor.series import by_staleness, cycle_s
from ..planner.fit import figures_of_rows
from ..planner.records import RunRecords
from ..planner.tune.search import ProbeResult

WEIGHTS = ("checkpoints", "model", "weights")  # in the folder of a run
END_S = 15.0  # for a run that is interrupted to end its processes, before it is killed with them


class ProbeError(SlipstreamError):
    """A probe has no result: its run failed, or its time was over."""


def probe_config(config: Config, folder: Path, steps: int) -> Config:
    """A run of `config` in `folder` of which `steps` steps count, after those of a critic's warm-up and those in which it fills
    up."""
    replace = msgspec.structs.replace
    before = warmup_of(config.learner.algorithm) + config.buffer.max_staleness + SETTLING
    return replace(
        config,
        run=replace(config.run, dir=str(folder), trackers=(), on_alert=()),
        learner=replace(config.learner, steps=before + steps),
        evaluation=Evaluation(tasks=0),
    )


def run_probe(config: Config, deadline: float) -> ProbeResult:
    """Run what `probe_config` made, until `deadline` at most, by `time.monotonic`. Raises ProbeError, and ConfigError where the run
    is refused."""
    folder, began = Path(config.run.dir), time.monotonic()
    path, log = folder.with_suffix(".yaml"), folder.with_suffix(".log")
    write_atomic(path, dump(config).encode())
    try:
        _train(path, log, deadline - began)
    except subprocess.TimeoutExpired:
        steps = len(read_metrics(folder / METRICS)) if (folder / METRICS).is_file() else 0
        raise ProbeError(f"the time was over after {steps} of {config.learner.steps} steps") from None
    finally:
        discard_weights(folder)
    run = RunRecords(folder)
    figures = figures_of_rows(run.steady)
    if not figures.trained_tokens_per_s:
        raise ProbeError(f"it trained on no token; see {log}")
    took_s = time.monotonic() - began
    start_s = max(0.0, took_s - sum(map(cycle_s, run.rows)))
    return ProbeResult(folder.name, figures, by_staleness(run.steady, "ess"), took_s, start_s)


def _train(path: Path, log: Path, seconds: float) -> None:
    """Raises ConfigError where the run is refused, ProbeError where it fails, and TimeoutExpired."""
    python = sys.executable
    command = (python, "-m", "slipstream.common.process", python, "-m", "slipstream.launch.cli", "train", str(path))
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # an interrupt of the terminal is for this process, which then ends the run
        )
        try:
            code = process.wait(max(0.0, seconds))
        finally:
            end(process)
    if code == ConfigError.exit_code:
        raise ConfigError(last_line(log))
    if code:
        raise ProbeError(last_line(log) or f"`slipstream train` ended with {code}; see {log}")


def end(process: subprocess.Popen[bytes]) -> None:
    """End a run that goes on, and its processes. A second interrupt, or a run that takes too long, has them killed."""
    if process.poll() is not None:
        return
    try:
        process.send_signal(signal.SIGINT)
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # those of its session; the others end with their parents
            process.wait()


def last_line(log: Path) -> str:
    """Where a command that failed says why."""
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip().removeprefix("slipstream: ") for line in reversed(lines) if line.strip()), "")


def discard_weights(folder: Path) -> None:
    for name in WEIGHTS:
        shutil.rmtree(folder / name, ignore_errors=True)
