"""The emulated learner of `slipstream bench async`: its steps sleep for the seconds of a law instead of computing. Its process,
loop, batches, commits and pushes are those of every run; the weights that it pushes stay those of the model.

A run takes it by the environment: `launch.supervisor.factory.BACKEND_FACTORY` names `emulated_backend`, VARIABLE the law.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import torch

from ..configs import Config
from ..configs.backends import Fsdp2
from ..errors import ConfigError
from ..learner.backend import Backend, BackendStepResult, PolicyLoss
from ..learner.fsdp2.backend import Fsdp2Backend
from ..learner.packing import MicroBatch

FACTORY = f"{__name__}:emulated_backend"
VARIABLE = "SLIPSTREAM_BENCH_STEP_S"  # seconds of a step per token of its batch, context included
# Of a batch on which nothing was computed: no difference of the policies that sampled and that trains, 1 nat of entropy.
MEANS = {"importance": 1.0, "importance_square": 1.0, "entropy": 1.0, "kl": 0.0, "clip_fraction": 0.0, "dropped": 0.0}


class EmulatedBackend(Fsdp2Backend):
    """One rank. Only the canary is scored by the model."""

    def __init__(self, config: Config, backend: Fsdp2, temperature: float, seconds_per_token: float) -> None:
        settings = config.model, config.learner.optimizer, backend
        super().__init__(*settings, temperature=temperature, timeout_s=config.learner.batch_s + config.push_s)
        self._seconds_per_token = seconds_per_token

    def logprobs(self, rows: Sequence[MicroBatch], temperature: float | None = None) -> list[torch.Tensor]:
        """Those of the engine, at the temperature of training."""
        if temperature is None:
            return [row.behavior_logprobs.clone() for row in rows]
        return super().logprobs(rows, temperature)

    def step(self, rows: Sequence[MicroBatch], loss: PolicyLoss, lr: float) -> BackendStepResult:
        time.sleep(self._seconds_per_token * sum(len(row.token_ids) for row in rows))
        return BackendStepResult(0.0, 0.0, sum(int(row.loss_mask.sum()) for row in rows), MEANS)


def emulated_backend(config: Config, temperature: float) -> Backend:
    """The backend of a learner under the law in VARIABLE. Raises ConfigError where it cannot be emulated."""
    backend = config.learner.backend
    if not isinstance(backend, Fsdp2) or backend.ranks != 1:
        raise ConfigError("learner.backend: an emulated learner has the kind fsdp2 and one rank")
    return EmulatedBackend(config, backend, temperature, float(os.environ[VARIABLE]))
