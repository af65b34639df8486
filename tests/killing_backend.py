"""A backend of the learner that kills roles of its run in the midst of a step, which is when the replicas of a colocated run sleep.

`SLIPSTREAM_BACKEND=slipstream.tests.killing_backend:make` has a run use it, and `KILLS` says who is killed in which of the steps
that are begun, from 1, those of earlier processes of the learner included: `2:engine-0,4:learner-0`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import psutil
from slipstream.configs import Config
from slipstream.learner.backend import BackendStepResult, PolicyLoss
from slipstream.learner.fsdp2.backend import Fsdp2Backend
from slipstream.learner.packing import MicroBatch

KILLS = "SLIPSTREAM_TEST_KILLS"
BEGUN = "begun_steps"  # a file in the run's folder, with a line for each


def make(config: Config, temperature: float) -> Fsdp2Backend:
    return KillingBackend(
        Path(config.run.dir) / BEGUN,
        config.model,
        config.learner.optimizer,
        config.learner.backend,
        temperature=temperature,
        timeout_s=60.0,
    )


class KillingBackend(Fsdp2Backend):
    def __init__(self, begun: Path, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)  # type: ignore[arg-type]
        self._begun = begun
        self._victims = dict(one.split(":") for one in os.environ[KILLS].split(","))

    def step(self, rows: Sequence[MicroBatch], loss: PolicyLoss, lr: float) -> BackendStepResult:
        with self._begun.open("a") as file:
            file.write("step\n")
        if victim := self._victims.get(str(len(self._begun.read_text().splitlines()))):
            self._kill(victim)
        return super().step(rows, loss, lr)

    def _kill(self, victim: str) -> None:
        """Return when it is dead; this process may be it."""
        supervisor = psutil.Process().parent()
        assert supervisor is not None
        for child in supervisor.children():
            if child.status() != psutil.STATUS_ZOMBIE and child.environ().get("SLIPSTREAM_ROLE") == victim:
                child.send_signal(signal.SIGKILL)
