"""The config section `learner.algorithm.kl` and its kinds: whether, and where, the divergence from a reference policy counts, or
from a teacher."""

from __future__ import annotations

from typing import Literal

from .section import AboveZero, Positive, Section

Estimator = Literal["k1", "k2", "k3"]

REFERENCE_KEY = "learner.algorithm.kl.reference"


class NoKl(Section, frozen=True, tag_field="kind", tag="none"):
    """No KL penalty."""


class Kl(Section, frozen=True):
    """The divergence from a reference policy, KL(policy || reference), estimated token by token (Schulman 2020)."""

    coefficient: AboveZero | dict[Literal["start", "target"], AboveZero] = 1e-3
    """What a nat of divergence costs, in units of reward. `{start: 0.2, target: 6}` begins with 0.2 and changes it after each step
    so that an episode diverges by 6 nats (Ziegler et al. 2019, arXiv:1909.08593)."""
    reference: str | dict[str, str] = ""
    """A Hugging Face folder or a name on a hub, as in `model.path`; empty is the policy as it was before the first step. In a
    mixture it may be one for each environment: `{sums: FOLDER, games: FOLDER}`, with the names of `env.parts`."""

    @property
    def references(self) -> dict[str, str]:
        """The models by the names of the environments whose episodes they score; the name is empty where it is one for all."""
        return self.reference if isinstance(self.reference, dict) else {"": self.reference}

    @property
    def named_references(self) -> dict[str, str]:
        """The models that are named, by the keys that name them."""
        return {
            f"{REFERENCE_KEY}.{name}" if name else REFERENCE_KEY: path for name, path in self.references.items() if path
        }


class KlPenalty(Kl, frozen=True):
    estimator: Estimator = "k3"
    """With r = reference / policy: `k1` is -log r, `k2` half of its square, `k3` r - 1 - log r."""


class KlInLoss(KlPenalty, frozen=True, tag_field="kind", tag="loss"):
    """Added to the loss of each token, as GRPO has it; the policy is the one being stepped."""


class KlInReward(KlPenalty, frozen=True, tag_field="kind", tag="reward"):
    """Taken off the reward of each token, as PPO on human preferences has it; the policy is the one that sampled."""

    estimator: Estimator = "k1"


class Distillation(Kl, frozen=True, tag_field="kind", tag="distillation"):
    """On-policy distillation (Lu et al. 2025, "On-policy distillation"; Gu et al. 2023, arXiv:2306.08543; Agarwal et al. 2023,
    arXiv:2306.13649): the reference is a teacher, or one for each environment of a mixture."""

    coefficient: AboveZero = 1.0
    """What a nat is worth, in units of advantage, or of loss."""
    estimator: Literal["sampled"] | dict[Literal["reverse", "forward"], Positive] = "sampled"
    """What is compared at each token. `sampled`: the token alone; what its log-prob is below the teacher's is added to its
    advantage. `{reverse: 32}`: the teacher's 32 likeliest tokens and the remainder; their KL(policy || teacher) is added to the
    loss. `{forward: 32}`: the same with KL(teacher || policy)."""

    @property
    def top(self) -> int:
        """How many of the teacher's likeliest tokens are compared; 0 where the sampled token alone is."""
        return 0 if isinstance(self.estimator, str) else max(self.estimator.values(), default=0)

    @property
    def forward(self) -> bool:
        """Whether it is KL(teacher || policy) over the likeliest tokens."""
        return "forward" in self.estimator
