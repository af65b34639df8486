"""The models beside the policy: who they are follows from the algorithm, what they say of a batch from here.

    batch ──every sampled token──> reference policy ──> log-probs, penalties ──> credit, loss
                                   critic ──> values ──> credit ──> returns ──> the critic's own step

Invariants:
- A role is a backend like the policy's: sharded over the same ranks, behind the same contract.
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
from ..configs.algorithm import Gae, Kl, KlInReward
from ..configs.schema import Learner
from ..errors import LearnerError
from . import packing
from .algorithms.kl import estimate
from .backend import Backend, PackedRow
from .batch import supervised, to_row
from .checkpoint import STATE_FILE, CheckpointState, path_of, prune
from .credit import Group
from .critic import Critic, explained_variance, value_loss
from .meter import CriticDone
from .scores import Scored, Scores

CRITIC = "critic"
"""Folder beside the policy's checkpoints for those of the critic, by the same names."""


class Roles:
    """One rank's part of the models beside the policy.

    Args:
        config: the learner's section.
        policy: what the ranks are, and through which they tell each other what they found.
        reference: the policy that `algorithm.kl` holds ours near; None where it is of kind `none`.
        critic: whose values `algorithm.advantage` needs; None where it needs none.
    """

    def __init__(
        self, config: Learner, policy: Backend, reference: Backend | None = None, critic: Critic | None = None
    ) -> None:
        if isinstance(config.algorithm.kl, Kl) != (reference is not None):
            raise LearnerError(
                "learner.algorithm.kl of another kind than none, and it alone, goes with a reference policy"
            )
        if isinstance(config.algorithm.advantage, Gae) != (critic is not None):
            raise LearnerError("learner.algorithm.advantage of kind gae, and it alone, goes with a critic")
        self._algorithm = config.algorithm
        self._budget = config.backend.tokens_per_microbatch
        self._policy = policy
        self._reference = reference
        self._critic = critic

    def score(self, groups: Sequence[Group]) -> Scores:
        """Collective. What they say of the batch's tokens."""
        trajectories = [trajectory for group in groups for trajectory in group]
        reference = penalties = values = None
        if self._reference is not None:
            reference = self._everywhere(trajectories, self._reference.logprobs)
            penalties = self._penalties(trajectories, reference)
        if self._critic is not None:
            values = self._everywhere(trajectories, self._critic.values)
        return Scores(reference=reference, penalties=penalties, values=values)

    def learn(self, parts: Sequence[Sequence[PackedRow]]) -> CriticDone | None:
        """Collective. One step of the critic for each minibatch, given as this rank's rows; None where there is no critic."""
        advantage = self._algorithm.advantage
        if self._critic is None or not isinstance(advantage, Gae):
            return None
        results = [self._critic.step(rows, value_loss, advantage.critic_lr) for rows in parts]
        tokens = sum(result.tokens for result in results)
        means = {name: sum(r.means[name] * r.tokens for r in results) / tokens for name in results[0].means}
        return CriticDone(means["error_square"] / 2, explained_variance(means))

    @property
    def alone(self) -> int:
        """Learner steps at the beginning in which only the critic learns."""
        advantage = self._algorithm.advantage
        return advantage.critic_warmup if isinstance(advantage, Gae) else 0

    def save(self, checkpoints: Path, state: CheckpointState) -> list[Future[None]]:
        """Collective. Begin to write what belongs to the policy's checkpoint of `state` in the folder `checkpoints`."""
        return [] if self._critic is None else [self._critic.save(_beside(path_of(checkpoints, state.step)), state)]

    def saved_with(self, checkpoint: Path) -> bool:
        """Whether what belongs to a checkpoint of the policy is there."""
        return self._critic is None or (_beside(checkpoint) / STATE_FILE).is_file()

    def load(self, checkpoint: Path) -> None:
        """Collective. Resume from what belongs to a checkpoint of the policy."""
        if self._critic is not None:
            self._critic.load(_beside(checkpoint))

    def prune(self, checkpoints: Path, keep: int) -> None:
        """Remove all but the newest `keep`. One rank calls it, between saves."""
        if self._critic is not None:
            prune(checkpoints / CRITIC, keep)

    def close(self) -> None:
        """Free them; to be called before the policy's backend is closed."""
        for role in (self._critic, self._reference):
            if role is not None:
                role.close()

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
    return checkpoint.parent / CRITIC / checkpoint.name
