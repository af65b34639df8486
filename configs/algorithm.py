"""What the step optimizes: the kinds of advantages, losses, corrections and aggregation, each with its own few fields."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from .section import AboveZero, Fraction, NonNegative, Positive, Section


class Grpo(Section, frozen=True, tag_field="kind", tag="grpo"):
    """Group-relative advantages (Shao et al. 2024, arXiv:2402.03300)."""

    normalize: bool = True
    """Divide by the group's standard deviation; false gives Dr. GRPO's unbiased form (Liu et al. 2025, arXiv:2503.20783)."""


class Rloo(Section, frozen=True, tag_field="kind", tag="rloo"):
    """Leave-one-out: the mean of the others is the baseline (Ahmadian et al. 2024, arXiv:2402.14740)."""


class ReinforcePP(Section, frozen=True, tag_field="kind", tag="reinforce_pp"):
    """REINFORCE++: normalized over the batch, no baseline by task (Hu et al. 2025, arXiv:2501.03262)."""


class ReinforcePPBaseline(Section, frozen=True, tag_field="kind", tag="reinforce_pp_baseline"):
    """REINFORCE++ with the group's mean as baseline, normalized over the batch (Hu et al. 2025, arXiv:2501.03262)."""


class Opo(Section, frozen=True, tag_field="kind", tag="opo"):
    """Optimal reward baseline: the group's mean weighted by length (Hao et al. 2025, arXiv:2505.23585)."""


class Remax(Section, frozen=True, tag_field="kind", tag="remax"):
    """ReMax: the first episode of each group is played greedily, its reward is the baseline of the others, and it is never trained
    on itself (Li et al. 2023, arXiv:2310.10505). With `buffer.group_size=2` there is one sample to each, as in the paper."""


class WinRate(Section, frozen=True, tag_field="kind", tag="win_rate"):
    """How often an episode beats the others of its group, less a half: for rewards that can only be ranked, and what `sppo` wants
    (Wu et al. 2024, arXiv:2405.00675)."""


class TurnLevel(Section, frozen=True, tag_field="kind", tag="turn_level"):
    """Every turn by the rewards that follow it, relative to that turn of the group (after Ding et al. 2025, arXiv:2511.14846)."""

    gamma: Fraction = 1.0
    """Discount per turn: 1 credits a turn with all that follows, 0 with its own reward only."""
    normalize: bool = True
    """Divide by the standard deviation among those of the group that reached the turn."""


class Gae(Section, frozen=True, tag_field="kind", tag="gae"):
    """Generalized advantage estimation by token, with a critic (Schulman et al. 2016, arXiv:1506.02438). The critic begins as the
    policy with a head of zeros."""

    gamma: Fraction = 1.0
    """Discount per sampled token."""
    lam: Fraction | Literal["by_length"] = 0.95
    """How far the policy's advantages look ahead: 0 is one token, 1 to the end of the episode. `by_length` is 1 - 1 / (0.05 x
    sampled tokens of the episode), the length-adaptive form of VAPO (Yue et al. 2025, arXiv:2504.05118)."""
    critic_lam: Fraction = 1.0
    """Lambda of the critic's targets; 1 is the return itself."""
    lr: AboveZero = 1e-5
    """Learning rate of the critic."""
    critic_warmup: NonNegative = 0
    """Learner steps at the beginning in which the critic alone learns: the policy takes no step, and no version passes."""
    normalize: bool = True
    """Bring the advantages of a batch to mean 0 and standard deviation 1 over its sampled tokens."""


class Prime(Section, frozen=True, tag_field="kind", tag="prime"):
    """PRIME (Cui et al. 2025, arXiv:2502.01456): the outcome reward, and implicit process rewards by token of a second
    policy, which learns to separate episodes that earned more than 0 from others."""

    beta: AboveZero = 0.05
    """Process reward of a token: beta x log(that policy / reference)."""
    gamma: Fraction = 1.0
    """Discount per sampled token of process rewards."""
    lr: AboveZero = 1e-6
    """Learning rate of the implicit reward model."""
    normalize: bool = True
    """Bring the advantages of a batch to mean 0 and standard deviation 1 over its sampled tokens, as the authors' code does."""


class Clipped(Section, frozen=True):
    clip_low: AboveZero = 0.2
    """The loss clips its ratio at 1 - clip_low."""
    clip_high: AboveZero = 0.2
    """The loss clips its ratio at 1 + clip_high."""


class DecoupledPpo(Clipped, frozen=True, tag_field="kind", tag="decoupled_ppo"):
    """Decoupled PPO (Hilton et al. 2021, arXiv:2110.00641): clip around the proximal policy, weigh by the behavior policy."""

    clip_high: AboveZero = 0.28


class Ppo(Clipped, frozen=True, tag_field="kind", tag="ppo"):
    """PPO (Schulman et al. 2017, arXiv:1707.06347): clip around the behavior policy."""


class DualClipPpo(Ppo, frozen=True, tag_field="kind", tag="dual_clip_ppo"):
    """PPO whose ratio is at most 3 where the advantage is negative, too (Ye et al. 2020, arXiv:1912.09729)."""


class Gspo(Clipped, frozen=True, tag_field="kind", tag="gspo"):
    """GSPO (Zheng et al. 2025, arXiv:2507.18071): one ratio to the proximal policy for a whole sequence, the geometric mean of its
    tokens'."""

    clip_low: AboveZero = 3e-4
    clip_high: AboveZero = 4e-4


class Cispo(Section, frozen=True, tag_field="kind", tag="cispo"):
    """CISPO (MiniMax 2025, arXiv:2506.13585): the weight of a token is clipped, its gradient never lost."""

    clip_high: AboveZero = 4.0
    """The weight, the ratio to the behavior policy, is at most 1 + clip_high."""


class Sapo(Section, frozen=True, tag_field="kind", tag="sapo"):
    """SAPO (Gao et al. 2025, arXiv:2511.20347): a smooth gate around the proximal policy in place of a clip."""


class Sppo(Section, frozen=True, tag_field="kind", tag="sppo"):
    """SPPO (Wu et al. 2024, arXiv:2405.00675): the log-ratio of a sequence to the proximal policy is drawn to eta x advantage. With
    `win_rate` advantages and several minibatches."""

    eta: AboveZero = 1e3
    """How far: nats of log-ratio for an advantage of 1."""


Share = Annotated[float, Meta(gt=0.0, le=1.0)]


class ClipCov(Clipped, frozen=True, tag_field="kind", tag="clip_cov"):
    """Clip-Cov (Cui et al. 2025, arXiv:2505.22617): some tokens whose log-prob and advantage both rise carry no gradient."""

    share: Share = 2e-4
    """Share of the step's tokens that are so chosen; at least one token."""


class KlCov(Section, frozen=True, tag_field="kind", tag="kl_cov"):
    """KL-Cov (Cui et al. 2025, arXiv:2505.22617): tokens whose log-prob and advantage covary most are held near the
    proximal policy. From a batch's second optimizer step on: set `minibatches` to 2 or more."""

    share: Share = 2e-3
    """Share of the step's tokens that are so chosen; at least one token."""


PolicyLossKind = DecoupledPpo | Ppo | DualClipPpo | Gspo | Cispo | Sapo | Sppo | ClipCov | KlCov

SELF_CORRECTING = (Ppo, DualClipPpo, Cispo)
"""Losses whose ratio is the one to the policy that sampled: they weigh tokens of other policies by themselves."""

REFILLABLE = (Grpo, Rloo, ReinforcePPBaseline, Opo, Remax, WinRate, Prime)
"""Advantages with which a group of equal rewards may be replaced: they are 0 for all its tokens. PRIME's are not; its paper leaves
such groups out nevertheless."""

Level = Literal["token", "sequence", "geometric"]


class AutoCorrection(Section, frozen=True, tag_field="kind", tag="auto"):
    """What the loss needs: `truncated` around the proximal policy, `none` around the behavior policy."""


class NoCorrection(Section, frozen=True, tag_field="kind", tag="none"):
    """Tokens count as if the policy at the start of the batch had sampled them; refused where that biases the gradient."""


class Uncorrected(NoCorrection, frozen=True, tag_field="kind", tag="uncorrected"):
    """As `none`, and accepts the bias of tokens of older policies: for ablations that show its effect."""


class Weighed(Section, frozen=True):
    level: Level = "token"
    """Of what the weight is: of a token, of its whole sequence, or the geometric mean over the sequence."""
    high: AboveZero = 2.0
    """The weight is at most this; with `masked` and `rejected` the largest that counts, above 1."""


class Bounded(Weighed, frozen=True):
    """Weights that count only between two bounds."""

    low: AboveZero = 0.5
    """Smallest weight that counts; below 1."""


class Truncated(Weighed, frozen=True, tag_field="kind", tag="truncated"):
    """Weighed by proximal / behavior up to a cap; at level `token` that is TIS (Yao et al. 2025)."""


class Masked(Bounded, frozen=True, tag_field="kind", tag="masked"):
    """Weighed by proximal / behavior; tokens whose weight is out of bounds carry no loss (IcePop, arXiv:2510.18855)."""

    high: AboveZero = 5.0


class Rejected(Bounded, frozen=True, tag_field="kind", tag="rejected"):
    """Weighed by proximal / behavior; sequences with a weight out of bounds carry no loss (Liu et al. 2025)."""

    level: Level = "geometric"


Aggregation = Literal["token_mean", "sequence_mean", "fixed_length"]

Estimator = Literal["k1", "k2", "k3"]


class NoKl(Section, frozen=True, tag_field="kind", tag="none"):
    """No KL penalty."""


class Kl(Section, frozen=True):
    """The divergence from a reference policy, KL(policy || reference), estimated token by token (Schulman 2020)."""

    coefficient: AboveZero = 1e-3
    """What a nat of divergence costs, in units of reward."""
    estimator: Estimator = "k3"
    """With r = reference / policy: `k1` is -log r, `k2` half of its square, `k3` r - 1 - log r."""
    reference: str = ""
    """A Hugging Face folder or hub name; empty is the policy as it was before the first step."""


class KlInLoss(Kl, frozen=True, tag_field="kind", tag="loss"):
    """Added to the loss of each token, as GRPO has it; the policy is the one being stepped."""


class KlInReward(Kl, frozen=True, tag_field="kind", tag="reward"):
    """Taken off the reward of each token, as PPO on human preferences has it; the policy is the one that sampled."""

    estimator: Estimator = "k1"


class Algorithm(Section, frozen=True):
    advantage: Grpo | Rloo | ReinforcePP | ReinforcePPBaseline | Opo | Remax | WinRate | TurnLevel | Gae | Prime = (
        field(default_factory=Grpo)
    )
    """How rewards become advantages."""
    overlong: NonNegative = 0
    """Of the tokens before `agent.max_tokens`, prompt included, so many are punished: rising to -1, added to the reward, not to its
    statistics (DAPO's soft overlong punishment, arXiv:2503.14476); 0 is none."""
    loss: PolicyLossKind = field(default_factory=DecoupledPpo)
    """The policy loss. `ppo`, `dual_clip_ppo` and `cispo` are around the policy that sampled and correct staleness by themselves;
    the others are around the policy at the start of the batch and need a correction."""
    correction: AutoCorrection | NoCorrection | Uncorrected | Truncated | Masked | Rejected = field(
        default_factory=AutoCorrection
    )
    """What makes up for tokens of other policies. `auto` is what the loss needs: `truncated`, or `none` where it has its own."""
    aggregation: Aggregation = "token_mean"
    """The step's loss: mean over tokens, or mean over sequences of their means, or of their sums / `agent.max_tokens`."""
    kl: NoKl | KlInLoss | KlInReward = field(default_factory=NoKl)
    """Whether, and where, the divergence from a reference policy counts."""
    entropy: Annotated[float, Meta(ge=0.0)] = 0.0
    """Coefficient of the entropy bonus, per nat; 0 is none."""
    imitation: Annotated[float, Meta(ge=0.0)] = 0.0
    """Coefficient of minus the mean log-prob of the tokens of episodes that earned more than 0, as VAPO has it; 0 is none."""
    minibatches: Positive = 1
    """Optimizer steps per batch; more than one makes the proximal policy differ from the target."""


def needs_reference(algorithm: Algorithm) -> bool:
    """Whether the learner needs the log-probs of a reference policy."""
    return isinstance(algorithm.kl, Kl) or isinstance(algorithm.advantage, Prime)


def needs_critic(algorithm: Algorithm) -> bool:
    """Whether the learner also trains an auxiliary model: a critic, or PRIME's implicit reward model."""
    return isinstance(algorithm.advantage, Gae | Prime)


def plays_greedily(algorithm: Algorithm) -> bool:
    """Whether one episode of each group is played greedily, for the others to be compared with."""
    return isinstance(algorithm.advantage, Remax)
