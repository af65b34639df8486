"""Runs as `slipstream dash`, `show`, `export` and `trace` read them: while they go on, and without taking part in them."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import msgspec

from ..configs import run_config
from ..dashboard.runs import RunAccess, WatchedRun
from ..errors import ConfigError, SlipstreamError, with_deadline
from ..planner.explain.findings import Explanation
from .run_lock import CONTROL, is_locked

EXPLAIN_S = 600.0  # longest that a run is explained, with a low priority on a busy machine
NICE = 10  # a tenth of what a process of the run gets, where all cores are in use


def is_active(run: Path) -> bool:
    """Whether a command uses the run. The lock is looked at only where its supervisor has not said that it ended: a look could
    hold it in the moment in which another command wants it."""
    return (run / CONTROL).exists() and is_locked(run)


async def status(run: Path) -> Any:
    """Replicas and waits of an active run. Raises ConfigError where it is not active, or of another user."""
    from .supervisor.control import GetStatus, RunStatus, read_control_address, send_command  # takes seconds

    return await send_command(read_control_address(run), GetStatus(), RunStatus, who="slipstream dash")


async def explained(run: Path) -> Explanation:
    """What `slipstream explain` says, in a process of low priority: simulations take seconds. Raises SlipstreamError."""
    # So that it ends with this process, whatever ends that.
    ends_with_us = (sys.executable, "-m", "slipstream.common.process", "nice", "-n", str(NICE))
    command = (*ends_with_us, sys.executable, "-m", "slipstream.launch.cli", "explain", str(run), "--json")
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        answer, said = await with_deadline(
            EXPLAIN_S,
            process.communicate(),
            who="slipstream dash",
            waits_for=f"slipstream explain {run}",
            hint="the machine is busy: it has a low priority",
        )
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        lines = said.decode(errors="replace").strip().splitlines() or [f"it ended with {process.returncode}"]
        raise SlipstreamError(lines[-1])
    try:
        return msgspec.json.decode(answer, type=Explanation)
    except msgspec.MsgspecError as error:
        raise SlipstreamError(f"`slipstream explain {run} --json` answered what cannot be read: {error}") from None


ACCESS = RunAccess(is_active, status, explained)


def open_run(folder: str) -> WatchedRun:
    """Raises ConfigError where the folder holds no run."""
    run_config(folder)
    path = Path(folder)
    return WatchedRun(path.resolve().name, path, ACCESS)


def open_played_run(folder: str) -> WatchedRun:
    """Raises ConfigError where the folder holds no run, or one that has not started to play."""
    run = open_run(folder)
    if not run.store.exists:
        raise ConfigError(
            f"{folder} has no buffer yet: the run has not started to play; {folder}/logs says how far it came"
        )
    return run


def versions_of(run: WatchedRun, key: str, steps: str) -> tuple[int, ...]:
    """The versions that the steps `A-B`, or the one step `A`, have made. Raises ConfigError naming `key` where there is none."""
    known = run.metrics.versions()
    first, _, last = steps.partition("-")
    found = tuple(version for step, version in known.items() if int(first) <= step <= int(last or first))
    if not found:
        raise ConfigError(f"{key} {steps}: {run.folder} has not trained that; {run.metrics.trained_steps()}")
    return found
