"""The models beside the policy: who they are follows from the algorithm, what they say of a batch from here.

    batch ──every sampled token──> reference policy ──> log-probs, penalties ──> credit, loss

Invariants:
- A role is a backend like the policy's: sharded over the same ranks, behind the same contract.
- Each rank scores its part of the batch and is told the whole, so that credit comes out the same everywhere.
- All sampled tokens are scored, whether or not they carry loss: what an episode earned does not depend on what is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import torch

from ..buffer.trajectory import Trajectory
from ..configs.algorithm import KlInReward, NoKl
from ..configs.schema import Learner
from . import packing
from .algorithms.kl import estimate
from .backend import Backend, PackedRow
from .batch import supervised, to_row
from .credit import Group
from .scores import Scored, Scores


class Roles:
    """One rank's part of the models beside the policy.

    Args:
        config: the learner's section.
        policy: what the ranks are, and through which they tell each other what they found.
        reference: the policy that `algorithm.kl` holds ours near; None where it is of kind `none`.
    """

    def __init__(self, config: Learner, policy: Backend, reference: Backend | None = None) -> None:
        self._kl = config.algorithm.kl
        self._budget = config.backend.tokens_per_microbatch
        self._policy = policy
        self._reference = reference

    def score(self, groups: Sequence[Group]) -> Scores:
        """Collective. What they say of the batch's tokens."""
        if isinstance(self._kl, NoKl) or self._reference is None:
            return Scores()
        trajectories = [trajectory for group in groups for trajectory in group]
        reference = self._everywhere(trajectories, self._reference.logprobs)
        if not isinstance(self._kl, KlInReward):
            return Scores(reference=reference)
        kind, coefficient = self._kl.estimator, self._kl.coefficient
        penalties: dict[str, np.ndarray] = {}
        for t in trajectories:
            sampled = torch.from_numpy(t.behavior_logprobs.copy()), torch.from_numpy(reference[t.id])
            penalties[t.id] = coefficient * np.where(t.loss_mask, estimate(kind, *sampled).numpy(), np.float32(0))
        return Scores(reference=reference, penalties=penalties)

    def close(self) -> None:
        """Free them; to be called before the policy's backend is closed."""
        if self._reference is not None:
            self._reference.close()

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
