"""The models beside the policy: who they are follows from the algorithm, what they say of a batch from here.

    batch ──every sampled token──> reference policy ──> log-probs, penalties ──> credit, loss
                                   critic ──> values ──> credit ──> returns ──> the critic's own step
                                   process reward model ──> log-ratios ──> credit; outcomes ──> its own step

Invariants:
- Each is held like the policy: by the same ranks, behind the same contract. One that is never trained has no optimizer, and the
  reference of a policy that trains adapters may be that policy without them.
- Each rank scores its part of the batch and is told the whole, so that credit comes out the same everywhere.
- All sampled tokens are scored, whether or not they carry loss: what an episode earned does not depend on what is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ..buffer.trajectory import Trajectory
from ..configs.algorithm import Algorithm, Gae, Kl, KlInReward, Prime
from ..configs.schema import Learner
from ..errors import LearnerError
from . import packing
from .algorithms.kl import estimate
from .algorithms.prime import process_loss
from .backend import Backend, PackedRow, Scorer
from .batch import supervised, to_row
from .checkpoint import STATE_FILE, CheckpointState, path_of, prune
from .credit import Group
from .critic import Critic, explained_variance, value_loss
from .meter import CompanionsDone, mean_over
from .scores import Scored, Scores

TRAINED = "beside"
"""Folder among the policy's checkpoints for those of the companion that is trained, by the same names."""


class Companions:
    """One rank's part of the models beside the policy.

    Args:
        config: the learner's section.
        policy: what the ranks are, and through which they tell each other what they found.
        reference: the policy that `algorithm.kl`, or what process rewards are, is relative to; None where nothing is.
        trained: what `algorithm.advantage` goes with: a `Critic` for `gae`, for `prime` a policy that becomes a process reward
            model; None for the others.
    """

    def __init__(
        self, config: Learner, policy: Backend, reference: Scorer | None = None, trained: Backend | None = None
    ) -> None:
        advantage = config.algorithm.advantage
        if needs_reference(config.algorithm) != (reference is not None):
            raise LearnerError(
                "learner.algorithm.kl and advantage.kind=prime, and they alone, go with a reference policy"
            )
        if isinstance(advantage, Gae | Prime) != (trained is not None) or isinstance(advantage, Gae) != isinstance(
            trained, Critic
        ):
            raise LearnerError(
                "learner.algorithm.advantage of kind gae goes with a critic, of kind prime with a reward model"
            )
        self._algorithm = config.algorithm
        self._budget = config.backend.tokens_per_microbatch
        self._policy = policy
        self._reference = reference
        self._trained = trained

    def score(self, groups: Sequence[Group]) -> Scores:
        """Collective. What they say of the batch's tokens."""
        trajectories = [trajectory for group in groups for trajectory in group]
        reference = penalties = told = None
        if self._reference is not None:
            reference = self._everywhere(trajectories, self._reference.logprobs)
            penalties = self._penalties(trajectories, reference)
        if self._trained is not None:
            told = self._everywhere(trajectories, self._trained.logprobs)
            if reference is not None and isinstance(self._algorithm.advantage, Prime):
                told = {name: logprobs - reference[name] for name, logprobs in told.items()}
        return Scores(reference=reference, penalties=penalties, told=told)

    def learn(self, parts: Sequence[Sequence[PackedRow]]) -> CompanionsDone:
        """Collective. One step of what is trained beside the policy for each minibatch, given as this rank's rows."""
        advantage, model = self._algorithm.advantage, self._trained
        if model is None:
            return CompanionsDone()
        if isinstance(advantage, Gae):
            means = mean_over([model.step(rows, value_loss, advantage.critic_lr) for rows in parts])
            return CompanionsDone(value_loss=means["error_square"] / 2, explained_variance=explained_variance(means))
        assert isinstance(advantage, Prime)
        loss, gather = process_loss(advantage.beta), self._policy.gather
        means = mean_over([model.step(rows, loss(rows, gather), advantage.reward_lr) for rows in parts])
        return CompanionsDone(reward_model_loss=means["cross_entropy"], reward_model_accuracy=means["right"])

    @property
    def warmup(self) -> int:
        """Learner steps at the beginning in which only the critic learns."""
        advantage = self._algorithm.advantage
        return advantage.critic_warmup if isinstance(advantage, Gae) else 0

    def save(self, checkpoints: Path, state: CheckpointState) -> list[Future[None]]:
        """Collective. Begin to write what belongs to the policy's checkpoint of `state` in the folder `checkpoints`."""
        return [] if self._trained is None else [self._trained.save(_beside(path_of(checkpoints, state.step)), state)]

    def saved_with(self, checkpoint: Path) -> bool:
        """Whether what belongs to a checkpoint of the policy is there."""
        return self._trained is None or (_beside(checkpoint) / STATE_FILE).is_file()

    def load(self, checkpoint: Path) -> None:
        """Collective. Resume from what belongs to a checkpoint of the policy."""
        if self._trained is not None:
            self._trained.load(_beside(checkpoint))

    def prune(self, checkpoints: Path, keep: int) -> None:
        """Remove all but the newest `keep`. One rank calls it, between saves."""
        if self._trained is not None:
            prune(checkpoints / TRAINED, keep)

    def close(self) -> None:
        """Free them; to be called before the policy's backend is closed."""
        for companion in (self._trained, self._reference):
            if companion is not None:
                companion.close()

    def _penalties(self, trajectories: Sequence[Trajectory], reference: Scored) -> Scored | None:
        """What the divergence from the reference policy takes off rewards; None where it does not."""
        kl = self._algorithm.kl
        if not isinstance(kl, KlInReward):
            return None
        penalties: dict[str, NDArray[np.float32]] = {}
        for t in trajectories:
            sampled = torch.from_numpy(t.behavior_logprobs.copy()), torch.from_numpy(reference[t.id])
            costs = kl.coefficient * estimate(kl.estimator, *sampled).numpy()
            penalties[t.id] = np.where(t.loss_mask, costs, np.float32(0))
        return penalties

    def _everywhere(
        self, trajectories: Sequence[Trajectory], scorer: Callable[[Sequence[PackedRow]], list[torch.Tensor]]
    ) -> Scored:
        """Collective. What `scorer`, which scores this rank's rows, says of the sampled tokens of all `trajectories`."""
        policy = self._policy
        shares = packing.share([len(t) for t in trajectories], policy.data_size, self._budget)
        rows = [[trajectories[i] for i in row] for row in shares[policy.data_rank]]
        scored = scorer([to_row([supervised(t.token_ids, t.loss_mask) for t in row]) for row in rows])
        mine = torch.cat([torch.empty(0), *scored]).double()
        everyone = policy.gather(mine[:, None])[:, 0].numpy().astype(np.float32)
        order = [trajectories[i] for share in shares for i in chain.from_iterable(share)]
        ends = np.cumsum([len(t) for t in order])
        return {t.id: part for t, part in zip(order, np.split(everyone, ends[:-1]), strict=True)}


def _beside(checkpoint: Path) -> Path:
    return checkpoint.parent / TRAINED / checkpoint.name


def needs_reference(algorithm: Algorithm) -> bool:
    """Whether something is relative to a reference policy."""
    return isinstance(algorithm.kl, Kl) or isinstance(algorithm.advantage, Prime)
