"""A policy that answers a prompt of one token with one token: its whole distribution is known, and every part is real."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from slipstream.configs import load
from slipstream.launch.supervisor.factory import make_aux_models, make_backend
from slipstream.learner.algorithms import advantage_of, returns_of
from slipstream.learner.algorithms.estimators import assign_advantages
from slipstream.learner.backend import Scorer
from slipstream.learner.batch import make_batch
from slipstream.learner.checkpoint_folder import CheckpointState
from slipstream.learner.metrics import PolicyStepResult
from slipstream.learner.packing import scoring_microbatch
from slipstream.learner.step import PolicyStepper

PROMPT, LONGEST = 7, 64


class OneToken:
    """The learner of one rank of the policy in `folder`, with its aux models, by the config `keys`."""

    def __init__(self, folder: Path, *keys: str, lr: float = 3e-3, vocabulary: int = 512) -> None:
        fixed = (f"model.path={folder}", f"learner.optimizer.lr={lr}", "learner.backend.device=cpu")
        self.config = load("quickstart", [*fixed, *keys])
        self.policy = make_backend(self.config, temperature=1.0)
        self.aux_models = make_aux_models(self.config, self.policy, {})
        self._stepper = PolicyStepper(self.config.learner, self.policy, LONGEST)
        self._every = scoring_microbatch([[PROMPT, token] for token in range(vocabulary)])
        self._steps = 0

    def __enter__(self) -> OneToken:
        return self

    def __exit__(self, *_: object) -> None:
        self.aux_models.close()
        self.policy.close()

    def logprobs(self, model: Scorer) -> NDArray[np.float64]:
        """float64[V]: log-probs of every answer, which sum to 1."""
        found = model.logprobs([self._every])[0][1::2].double().numpy()
        return found - math.log(np.exp(found).sum())

    def divergence(self, teacher: NDArray[np.float64]) -> float:
        """KL(policy || teacher) in nats, of log-probs of every answer."""
        now = self.logprobs(self.policy)
        return float((np.exp(now) * (now - teacher)).sum())

    async def step(
        self, behavior: NDArray[np.float64], answers: Sequence[int] | NDArray[np.int64], reward: Callable[[int], float]
    ) -> PolicyStepResult:
        """One step on `answers`, which were sampled with log-probs `behavior` float64[V], in groups of `buffer.group_size`."""
        tokens, count = np.asarray(answers, dtype=np.int32), len(answers)
        rewards = np.array([reward(int(token)) for token in tokens])
        ones = np.ones(count, dtype=np.int64)
        batch = make_batch(
            np.stack([np.full(count, PROMPT), tokens], 1).reshape(-1).astype(np.int32),
            np.tile([False, True], count),
            2 * ones,
            behavior_logprobs=np.stack([np.zeros(count), behavior[tokens]], 1).reshape(-1).astype(np.float32),
            turn=np.stack([-ones, np.arange(count)], 1).reshape(-1).astype(np.int32),
            positive=rewards > 0,
            ids=tuple(map(str, range(count))),
            episode_ids=tuple(map(str, range(count))),
            groups=np.arange(count) // self.config.buffer.group_size,
            rewards=rewards,
            lengths=ones,
            turns=ones,
            steps=ones,
            step_rewards=rewards,
            greedy=np.zeros(count, dtype=np.bool_),
            masked=np.zeros(count, dtype=np.bool_),
        )
        algorithm = self.config.learner.algorithm
        scored = await self.aux_models.score(batch)
        batch = assign_advantages(scored, advantage_of(algorithm), returns_of(algorithm))
        state = CheckpointState(step=self._steps, version=self._steps)
        self._steps += 1
        return self._stepper.step(batch, self._stepper.plan(batch), (), state)
