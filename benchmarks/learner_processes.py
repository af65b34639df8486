"""Contenders of `bench learner` from outside: one or more processes that step together, one step at a time.

Invariants:
- A contender's processes do nothing between two steps, so that contenders measured by turns do not disturb each other.
- Every wait has a deadline; a process that ends early is an error with the end of its log. None outlives its contender.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import msgspec

from ..errors import LearnerError, with_deadline
from ..launch.launchers.local import free_ports
from .learner_batch import Job, MemoryUse

ROOT = Path(__file__).resolve().parent.parent
"""The package, and in a checkout the folder that `make install-trl` works in."""

TRL = ROOT / ".venv-trl" / "bin" / "python"

NO_TRL = "not installed: make install-trl"

START_S = 180.0
STEP_S = 300.0
END_S = 30.0

LOG_TAIL = 2000
"""Characters of a log that an error repeats."""


class Stepper:
    """The processes of one contender. Made by `stepping`."""

    def __init__(self, name: str, processes: Sequence[asyncio.subprocess.Process], log: Path) -> None:
        self.name = name
        self._processes = processes
        self._log = log

    async def ready(self) -> None:
        """Return when every process has its model."""
        for line in await self._lines(START_S, "its model and its batch"):
            if line != "ready":
                raise LearnerError(f"{self.name} said {line!r} instead of ready; {self._end_of_log()}")

    async def step(self) -> float:
        """Seconds of one step, those of the slowest process."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(b"\n")
        return max(float(line) for line in await self._lines(STEP_S, "a step"))

    async def end(self) -> list[MemoryUse]:
        """End every process; returns the memory that each of them used."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        return [msgspec.json.decode(line, type=MemoryUse) for line in await self._lines(END_S, "its last word")]

    async def _lines(self, seconds: float, what: str) -> list[str]:
        reading = asyncio.gather(*(self._line(process) for process in self._processes))
        return await with_deadline(
            seconds, reading, who="the benchmark", waits_for=f"{self.name}: {what}", hint=self._end_of_log
        )

    async def _line(self, process: asyncio.subprocess.Process) -> str:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            raise LearnerError(f"{self.name} ended; {self._end_of_log()}")
        return line.decode().strip()

    def _end_of_log(self) -> str:
        return f"the end of its log: {end_of(self._log)}"


@contextlib.asynccontextmanager
async def stepping(name: str, job: Job, folder: Path, *, ranks: int = 1, threads: int = 1) -> AsyncIterator[Stepper]:
    """A contender that is ready to step, in `ranks` processes of `threads` threads each; killed at the end."""
    file, log = folder / f"{name}.json", folder / f"{name}.log"
    file.write_bytes(msgspec.json.encode(job))
    python, module = (str(TRL), "trl_step") if job.contender == "trl" else (sys.executable, "learner_steps")
    program = (python, "-m", f"{__package__}.{module}")
    processes: list[asyncio.subprocess.Process] = []
    try:
        with log.open("wb") as out:
            for environment in _environments(ranks, threads):
                pipe = asyncio.subprocess.PIPE
                started = asyncio.create_subprocess_exec(
                    *program, str(file), stdin=pipe, stdout=pipe, stderr=out, env={**os.environ, **environment}
                )
                processes.append(await started)
        stepper = Stepper(name, processes, log)
        await stepper.ready()
        yield stepper
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await asyncio.gather(*(process.wait() for process in processes))


def _environments(ranks: int, threads: int) -> list[Mapping[str, str]]:
    """What torch is told by environment variables: threads, and with several ranks where they meet."""
    common = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    if ranks == 1:
        return [common]
    meeting = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    return [{**common, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def end_of(log: Path) -> str:
    """What an error repeats of a log."""
    return log.read_text(errors="replace")[-LOG_TAIL:]
