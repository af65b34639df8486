"""The config section `learner.algorithm`: the kinds of advantages, losses, corrections and aggregation, each with its own
fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

from msgspec import Meta, field, structs

from .divergence import Distillation, Kl, KlInLoss, KlInReward, NoKl
from .section import AboveZero, Fraction, NonNegative, Positive, Section

K = TypeVar("K", bound=str)


def _complete(section: Section, name: str, defaults: Mapping[K, float]) -> None:
    """Fill in the entries of a mapping that were not given."""
    structs.force_setattr(section, name, {**defaults, **getattr(section, name)})


NonNegativeNumber = Annotated[float, Meta(ge=0.0)]


class Grpo(Section, frozen=True, tag_field="kind", tag="grpo"):
    """Group-relative advantages (Shao et al. 2024, arXiv:2402.03300)."""

    normalize: bool = True
    """Divide by the group's standard deviation; false gives Dr. GRPO's unbiased form (Liu et al. 2025, arXiv:2503.20783)."""


class Rloo(Section, frozen=True, tag_field="kind", tag="rloo"):
    """Leave-one-out: the mean of the others is the baseline (Ahmadian et al. 2024, arXiv:2402.14740)."""


class ReinforcePP(Section, frozen=True, tag_field="kind", tag="reinforce_pp"):
    """REINFORCE++: the reward less the divergence to go of `kl.kind=reward`, normalized over the tokens of the batch, no baseline
    by task (Hu et al. 2025, arXiv:2501.03262). It needs no group: `buffer.group_size=1` is the paper's."""


class ReinforcePPBaseline(Section, frozen=True, tag_field="kind", tag="reinforce_pp_baseline"):
    """REINFORCE++ with the group's mean as baseline (Hu et al. 2025, arXiv:2501.03262)."""


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


LamKey = Literal["policy", "critic", "by_length"]
LAM: dict[LamKey, float] = {"policy": 0.95, "critic": 1.0}


class Gae(Section, frozen=True, tag_field="kind", tag="gae"):
    """Generalized advantage estimation by token, with a critic (Schulman et al. 2016, arXiv:1506.02438). The critic begins as the
    policy with a head of zeros."""

    gamma: Fraction = 1.0
    """Discount per sampled token."""
    lam: dict[LamKey, Fraction] = field(default_factory=LAM.copy)
    """How far advantages look ahead: 0 is one token, 1 to the end of the episode. `policy`: of the policy's advantages;
    `by_length`, in its place: alpha of 1 - 1 / (alpha x sampled tokens of the episode), 0.05 in VAPO (Yue et al. 2025,
    arXiv:2504.05118); `critic`: of the critic's targets, where 1 is the return itself."""
    lr: AboveZero = 1e-5
    """Learning rate of the critic."""
    critic_warmup: NonNegative = 0
    """Learner steps at the beginning in which the critic alone learns: the policy takes no step, and no version passes."""
    value_clip: NonNegativeNumber = 0.0
    """The critic's loss of a token is the larger one of its estimate and of that estimate held within this distance of the one
    before the batch; 0 is plain squared error."""
    normalize: bool = True
    """Bring the advantages of a batch to mean 0 and standard deviation 1 over its sampled tokens."""

    def __post_init__(self) -> None:
        _complete(self, "lam", LAM)


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


class NoAdvantage(Section, frozen=True, tag_field="kind", tag="none"):
    """Rewards make no advantages: what trains is `kl.kind=distillation`, `loss.kind=dpo` or `terms.imitation`."""


class PythonFunction(Section, frozen=True, tag_field="kind", tag="python"):
    """A function of your own; docs/learner.md says what it gets and what it gives."""

    function: str
    """`package.module:name`."""


class Clipped(Section, frozen=True):
    clip: tuple[AboveZero, AboveZero] = (0.2, 0.2)
    """[low, high]: the loss clips its ratio at 1 - low and at 1 + high."""


class DualClipped(Section, frozen=True):
    clip: tuple[AboveZero, AboveZero, AboveZero] = (0.2, 0.2, 3.0)
    """[low, high, c]: the loss clips its ratio at 1 - low and at 1 + high, and at c where the advantage is negative."""


class DecoupledPpo(Clipped, frozen=True, tag_field="kind", tag="decoupled_ppo"):
    """Decoupled PPO (Hilton et al. 2021, arXiv:2110.00641): clip around the proximal policy, weigh by the behavior policy."""

    clip: tuple[AboveZero, AboveZero] = (0.2, 0.28)


class Ppo(Clipped, frozen=True, tag_field="kind", tag="ppo"):
    """PPO (Schulman et al. 2017, arXiv:1707.06347): clip around the behavior policy."""


class DualClipPpo(DualClipped, frozen=True, tag_field="kind", tag="dual_clip_ppo"):
    """PPO whose ratio is bounded where the advantage is negative, too (Ye et al. 2020, arXiv:1912.09729)."""


class DualClipDecoupledPpo(DualClipped, frozen=True, tag_field="kind", tag="dual_clip_decoupled_ppo"):
    """The same around the proximal policy."""


class Gspo(Clipped, frozen=True, tag_field="kind", tag="gspo"):
    """GSPO (Zheng et al. 2025, arXiv:2507.18071): one ratio to the proximal policy for a whole sequence, the geometric mean of its
    tokens'."""

    clip: tuple[AboveZero, AboveZero] = (3e-4, 4e-4)


class Cispo(Clipped, frozen=True, tag_field="kind", tag="cispo"):
    """CISPO (MiniMax 2025, arXiv:2506.13585): the weight of a token, its ratio to the behavior policy, is clipped, its gradient
    never lost. A low of 1 is no lower bound, as in the paper."""

    clip: tuple[AboveZero, AboveZero] = (1.0, 4.0)


class Sapo(Section, frozen=True, tag_field="kind", tag="sapo"):
    """SAPO (Gao et al. 2025, arXiv:2511.20347): a smooth gate around the proximal policy in place of a clip."""

    tau: tuple[AboveZero, AboveZero] = (1.0, 1.05)
    """Temperatures of the gate: where the advantage is positive, and elsewhere. The higher, the narrower."""


class Sppo(Section, frozen=True, tag_field="kind", tag="sppo"):
    """SPPO (Wu et al. 2024, arXiv:2405.00675): the log-ratio of a sequence to the proximal policy is drawn to eta x advantage. With
    `win_rate` advantages and several minibatches."""

    eta: AboveZero = 1e3
    """How far: nats of log-ratio for an advantage of 1."""


ClipCovKey = Literal["share", "low", "high"]
CLIP_COV: dict[ClipCovKey, float] = {"share": 2e-4, "low": 1.0, "high": 5.0}


class ClipCov(Clipped, frozen=True, tag_field="kind", tag="clip_cov"):
    """Clip-Cov (Cui et al. 2025, arXiv:2505.22617): some tokens whose log-prob and advantage both rise carry no gradient."""

    held: dict[ClipCovKey, AboveZero] = field(default_factory=CLIP_COV.copy)
    """Which tokens: `share` of the step's tokens, at least one, drawn among those with a covariance from `low` to `high`."""

    def __post_init__(self) -> None:
        _complete(self, "held", CLIP_COV)


KlCovKey = Literal["share", "abs", "k2", "k3"]
KL_COV: dict[KlCovKey, float] = {"share": 2e-3, "abs": 1.0, "k2": 0.0, "k3": 0.0}


class KlCov(Section, frozen=True, tag_field="kind", tag="kl_cov"):
    """KL-Cov (Cui et al. 2025, arXiv:2505.22617): tokens whose log-prob and advantage covary most are held near the
    proximal policy. From a batch's second optimizer step on: set `minibatches` to 2 or more."""

    held: dict[KlCovKey, NonNegativeNumber] = field(default_factory=KL_COV.copy)
    """Which tokens and how: `share` of the step's tokens, at least one; what a nat of their divergence costs, estimated with r =
    current / proximal by |log r| (`abs`, the authors'), (log r)^2 / 2 (`k2`) or r - 1 - log r (`k3`)."""

    def __post_init__(self) -> None:
        _complete(self, "held", KL_COV)


class Dpo(Section, frozen=True, tag_field="kind", tag="dpo"):
    """DPO (Rafailov et al. 2023, arXiv:2305.18290) on the best and the worst of each group, as online DPO has it (Guo et al. 2024,
    arXiv:2402.04792): with `advantage.kind=none` and `buffer.filter=best_worst`."""

    eta: AboveZero = 10.0
    """1 / beta of the paper: nats of margin that make the better one e times as likely to be preferred."""


PolicyLossKind = (
    DecoupledPpo
    | Ppo
    | DualClipPpo
    | DualClipDecoupledPpo
    | Gspo
    | Cispo
    | Sapo
    | Sppo
    | ClipCov
    | KlCov
    | Dpo
    | PythonFunction
)

SELF_CORRECTING = (Ppo, DualClipPpo, Cispo)
"""Losses whose ratio is the one to the policy that sampled: they weigh tokens of other policies by themselves."""

REFILLABLE = (Grpo, Rloo, ReinforcePPBaseline, Opo, Remax, WinRate, Prime, PythonFunction)
"""Advantages with which a group of equal rewards may be replaced: they are 0 for all its tokens. PRIME's are not; its paper leaves
such groups out nevertheless. Of one's own function the user knows."""

GROUPLESS = (ReinforcePP, Gae, NoAdvantage, PythonFunction)
"""Advantages that need not compare the members of a group, which may then be one."""

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
    bounds: tuple[NonNegativeNumber, AboveZero] = (0.0, 2.0)
    """[low, high] of the weight: it is held between them, or with `masked` and `rejected` counts only there, where low is below 1
    and high above."""


class Truncated(Weighed, frozen=True, tag_field="kind", tag="truncated"):
    """Weighed by proximal / behavior up to a cap; at level `token` that is TIS (Yao et al. 2025)."""


class Masked(Weighed, frozen=True, tag_field="kind", tag="masked"):
    """Weighed by proximal / behavior; tokens whose weight is out of bounds carry no loss (IcePop, arXiv:2510.18855)."""

    bounds: tuple[NonNegativeNumber, AboveZero] = (0.5, 5.0)


class Rejected(Weighed, frozen=True, tag_field="kind", tag="rejected"):
    """Weighed by proximal / behavior; sequences with a weight out of bounds carry no loss (Liu et al. 2025)."""

    level: Level = "geometric"
    bounds: tuple[NonNegativeNumber, AboveZero] = (0.5, 2.0)
    weights: Truncated | None = None
    """What sequences that are not rejected are weighed by, where it is not what they are judged by: `{kind: truncated}` with
    the default level is geometric rejection with token weights."""


Mean = Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_length"]

PAPERS_MEAN: dict[type[Section], Mean] = {
    Gspo: "sequence_mean",
    Sapo: "sequence_mean",
    Sppo: "sequence_sum",
    Dpo: "sequence_sum",
}
"""The aggregation of losses whose papers have another than the mean over tokens."""

TermKey = Literal["entropy", "imitation"]
TERMS: dict[TermKey, float] = {"entropy": 0.0, "imitation": 0.0}


class Algorithm(Section, frozen=True):
    advantage: (
        Grpo
        | Rloo
        | ReinforcePP
        | ReinforcePPBaseline
        | Opo
        | Remax
        | WinRate
        | TurnLevel
        | Gae
        | Prime
        | NoAdvantage
        | PythonFunction
    ) = field(default_factory=Grpo)
    """How rewards become advantages."""
    overlong: NonNegative = 0
    """Of the tokens before `agent.max_tokens`, prompt included, so many are punished: rising to -1, added to the reward, not to its
    statistics (DAPO's soft overlong punishment, arXiv:2503.14476); 0 is none."""
    loss: PolicyLossKind = field(default_factory=DecoupledPpo)
    """The policy loss. `ppo`, `dual_clip_ppo` and `cispo` are around the policy that sampled and correct staleness by themselves;
    dpo compares episodes; the others are around the policy at the start of the batch and need a correction."""
    correction: AutoCorrection | NoCorrection | Uncorrected | Truncated | Masked | Rejected = field(
        default_factory=AutoCorrection
    )
    """What makes up for tokens of other policies. `auto` is what the loss needs: `truncated`, or `none` where it has its own."""
    aggregation: Literal["auto", "token_mean", "sequence_mean", "sequence_sum", "fixed_length"] = "auto"
    """The step's loss: mean over tokens, or mean over sequences of their means, of their sums, or of their sums /
    `agent.max_tokens`. `auto` is what the loss's paper has: sequence_mean with gspo and sapo, sequence_sum with sppo and dpo,
    token_mean with the others."""
    kl: NoKl | KlInLoss | KlInReward | Distillation = field(default_factory=NoKl)
    """Whether, and where, the divergence from a reference policy counts; with `distillation` from a teacher."""
    terms: dict[TermKey, NonNegativeNumber] = field(default_factory=TERMS.copy)
    """Coefficients of what is added to the loss. `entropy`: minus the entropy of the policy, nats. `imitation`: minus the mean
    log-prob of the tokens of episodes that earned more than 0, as VAPO has it."""
    minibatches: Positive = 1
    """Optimizer steps per epoch; more than one makes the proximal policy differ from the current one."""
    epochs: Positive = 1
    """How often each batch is gone through, by the policy and by a critic; PPO's epochs."""

    def __post_init__(self) -> None:
        _complete(self, "terms", TERMS)

    @property
    def mean(self) -> Mean:
        """How the losses of tokens become that of a step."""
        return PAPERS_MEAN.get(type(self.loss), "token_mean") if self.aggregation == "auto" else self.aggregation


def needs_reference(algorithm: Algorithm) -> bool:
    """Whether the learner needs the log-probs of a reference policy."""
    return isinstance(algorithm.kl, Kl) or isinstance(algorithm.advantage, Prime) or isinstance(algorithm.loss, Dpo)


def needs_critic(algorithm: Algorithm) -> bool:
    """Whether the learner also trains an auxiliary model: a critic, or PRIME's implicit reward model."""
    return isinstance(algorithm.advantage, Gae | Prime)


def warmup_of(algorithm: Algorithm) -> int:
    """Learner steps at the beginning in which a critic alone learns, and the policy takes none."""
    return algorithm.advantage.critic_warmup if isinstance(algorithm.advantage, Gae) else 0


def plays_greedily(algorithm: Algorithm) -> bool:
    """Whether one episode of each group is played greedily, for the others to be compared with."""
    return isinstance(algorithm.advantage, Remax)


def references_of(algorithm: Algorithm) -> dict[str, str]:
    """The reference policies by the environments whose episodes they score, see `Kl.references`; without a path the policy as it
    was before the first step."""
    return algorithm.kl.references if isinstance(algorithm.kl, Kl) else {"": ""}


def reference_paths(algorithm: Algorithm) -> list[str]:
    """The reference policies, each once, in the order in which they are numbered; "" as in `references_of`."""
    return list(dict.fromkeys(references_of(algorithm).values()))


def named_references(algorithm: Algorithm) -> dict[str, str]:
    """The reference policies that the config names, by the keys that name them."""
    return algorithm.kl.named_references if isinstance(algorithm.kl, Kl) else {}


def top_of(algorithm: Algorithm) -> int:
    """How many of a teacher's likeliest tokens the loss compares at each token; 0: none beside the sampled one."""
    return algorithm.kl.top if isinstance(algorithm.kl, Distillation) else 0
