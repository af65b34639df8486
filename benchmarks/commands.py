"""Commands of `slipstream` as a benchmark runs them: in processes of their own, each to its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..errors import ConfigError, SlipstreamError, with_deadline
from .learner_processes import end_of

RUN_S = 3600.0
"""Longest command; on two cores a run of 60 steps takes about two minutes."""

END_S = 60.0

Notify = Callable[[str], None]


def make_empty(out: Path) -> None:
    """Make the folder that `--out` names. Raises ConfigError where it holds anything."""
    if out.is_dir() and any(out.iterdir()):
        raise ConfigError(f"--out: {out} is not empty; name a new folder")
    out.mkdir(parents=True, exist_ok=True)


async def slipstream(*words: str, log: Path, environment: Mapping[str, str] | None = None) -> bytes:
    """Run `slipstream WORDS`; as `run_command`."""
    return await run_command((sys.executable, "-m", "slipstream.launch.cli", *words), log, environment)


async def run_command(command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> bytes:
    """Run a command to its end, its output also in `log`; what it wrote on stdout.

    Raises:
        SlipstreamError: it failed; with the end of its log.
    """
    with log.open("ab") as out:
        process = await asyncio.create_subprocess_exec(
            # So that it ends with this process, whatever ends that.
            *(sys.executable, "-m", "slipstream.common.process", *command),
            stdout=asyncio.subprocess.PIPE,
            stderr=out,
            env={**os.environ, **(environment or {})},
        )
        try:
            answer, _ = await with_deadline(
                RUN_S, process.communicate(), who="the benchmark", waits_for=" ".join(command[:4]), hint=f"see {log}"
            )
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
                try:
                    await asyncio.wait_for(process.wait(), END_S)
                except TimeoutError:
                    process.kill()
        out.write(answer)
    if process.returncode:
        raise SlipstreamError(
            f"{' '.join(command[:5])} ended with {process.returncode}; the end of {log}: {end_of(log)}"
        )
    return answer


async def warm_model(out: Path, preset: str, task: Sequence[str], warm_up: Sequence[str], notify: Notify) -> Path:
    """The model of `preset` for `task`, random and then trained on demonstrations as `warm_up` says; made once per folder."""
    random, warm, log = out / "model-random", out / "model", out / "warm-up.log"
    if not warm.exists():
        notify("warming up the model")
        shutil.rmtree(random, ignore_errors=True)
        await slipstream("init-model", str(random), "--config", preset, *task, log=log)
        await slipstream("sft", preset, *task, *warm_up, f"model.path={random}", f"sft.out={warm}", log=log)
    return warm
