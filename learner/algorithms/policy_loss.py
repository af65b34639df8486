"""From a surrogate loss per token to the loss of a step.

    tokens ──surrogate──> loss per token ──correction──> weighted, some dropped ──entropy, KL──> ──aggregation──> sum of the row

    sum over trained tokens of scale x ([kept] x weight x surrogate - coefficient x entropy + coefficient x KL), + imitation

- The surrogate is the algorithm's (`surrogates.py`), the weight is the correction's (`correction.py`), KL is `divergence.py`'s.
  What the correction drops keeps its entropy and its divergence: these are of the current policy, whatever sampled the token.
- The entropy bonus (Mnih et al. 2016, arXiv:1602.01783) is that of the current policy at each token, unweighted.
- Aggregation: with N trained tokens in S sequences on all ranks, and T_s in sequence s,

      token_mean      1/N sum_s sum_t l            every token counts the same (DAPO, Yu et al. 2025, arXiv:2503.14476)
      sequence_mean   1/S sum_s 1/T_s sum_t l      every sequence counts the same (GRPO, Shao et al. 2024, arXiv:2402.03300)
      sequence_sum    1/S sum_s sum_t l            a long sequence counts more (REINFORCE; SPPO, whose l has 1/T_s in it)
      fixed_length    1/S sum_s 1/L sum_t l        Dr. GRPO's (Liu et al. 2025, arXiv:2503.20783): no length is favored

  L is `agent.max_tokens`. Backends divide a loss sum by N; the other means scale each token by N / (S T_s), N / S and N / (S L).
  That is exact over micro-batches and ranks: sequences are never cut, and N and S are gathered from all ranks before the step.
- A teacher (`kl.kind=distillation`) adds what a token's log-prob is below its own to the advantage, before the surrogate, so that
  clip and correction apply to the sum; or a divergence over its likeliest tokens to the loss, as KL is (`teacher.py`).
- Imitation: the positive-example language-model loss of VAPO (Yue et al. 2025, arXiv:2504.05118). With P the trained tokens of
  episodes whose reward is above 0, in the whole step, it adds  coefficient x - 1 / |P| sum over t in P of log p_t.  It is a mean
  over its own tokens, whatever the aggregation is, and no correction weights it.
- Tokens of expert traces have a surrogate of their own, no weight and no divergence (`traces.py`).

Invariants:
- Trained tokens are selected first: other positions are in no exponential, and therefore in no gradient.
- A sequence is one of the row's `cu_seqlens`. It is whole in its row, so that sums over it are exact however rows are packed.

Reported sums over trained tokens but those of expert traces, with w = p / b: their number `tokens`, `importance` w,
`importance_square` w^2, `kl` (w - 1) - log w, the k3 estimate of KL(b || p) (Schulman 2020), `entropy`, `clip_fraction`, 1 where
the loss's own clip was active, and `dropped`, 1 where the correction left no loss; where there is a reference policy f,
`kl_reference`, the k3 estimate of KL(p || f); and those of `BY_STALENESS` once more for each staleness, as `kl/2`. See
`effective_sample_size`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch

from ...configs.algorithm import Algorithm, Distillation, KlInLoss, Mean, needs_reference
from ...errors import LearnerError
from ..backend import BatchLoss, Gather, LossOutput, PolicyLoss, TokenOutputs
from ..packing import MicroBatch
from .divergence import LOG_RATIO_LIMIT, coefficient_of, kl_estimate
from .teacher import top_divergence, with_teacher

BY_STALENESS = ("tokens", "importance", "importance_square", "kl", "clip_fraction")
"""Sums that are reported by staleness too; `tokens` counts trained tokens."""


class PairTokens(msgspec.Struct, frozen=True):
    """What K trained tokens know of the pair that their sequence is in (`preferences.py`); float64[K] each."""

    sign: torch.Tensor  # 1 in the better episode, -1 in the worse, 0 in no pair
    margin: torch.Tensor  # of the pair, nats, before the step
    branches: torch.Tensor  # sequences of the pair
    scale: float  # sequences of the step over its pairs


class Tokens(msgspec.Struct, frozen=True):
    """The K trained tokens of a row, in its order. A sequence without one has length 0 and appears nowhere."""

    current: (
        torch.Tensor
    )  # float[K], log-probs under the policy that is stepped, p; only it and `entropy` have a gradient
    proximal: torch.Tensor  # float[K], log-probs under the policy at the start of the batch, q
    behavior: torch.Tensor  # float[K], log-probs under the policies that sampled them, b
    advantages: torch.Tensor  # float[K]
    entropy: torch.Tensor  # float[K], of the current policy, nats
    sequence: torch.Tensor  # int64[K], the sequence in the row, from 0
    staleness: torch.Tensor  # int32[K], learner version minus the one that sampled; -1 in expert traces
    lengths: torch.Tensor  # int64[S], trained tokens of each of the row's S sequences
    selected: torch.Tensor  # bool[K], tokens that the loss treats differently; all false for losses that select none
    positive: torch.Tensor  # bool[K], tokens of episodes whose reward is above 0
    reference: torch.Tensor | None = None  # float[K], log-probs under the reference policy; None where there is none
    carried: Mapping[str, float] = {}  # numbers that the algorithm carries from step to step, by name
    pairs: PairTokens | None = None  # of losses that compare episodes

    @property
    def traced(self) -> torch.Tensor:
        """bool[K]: tokens of expert traces, which no version of the policy sampled."""
        return self.staleness < 0

    def sequence_sum(self, values: torch.Tensor) -> torch.Tensor:
        """float[K]: for each token the sum of `values` over the trained tokens of its sequence."""
        sums = torch.zeros(len(self.lengths), dtype=values.dtype, device=values.device)
        return sums.index_add(0, self.sequence, values)[self.sequence]

    def sequence_mean(self, values: torch.Tensor) -> torch.Tensor:
        """float[K]: for each token the mean of `values` over the trained tokens of its sequence."""
        return self.sequence_sum(values) / self.lengths[self.sequence]


class Surrogate(msgspec.Struct, frozen=True):
    """A loss before correction and aggregation: nats x advantage per token, float[K]; and bool[K], where a clip was active."""

    loss: torch.Tensor
    clipped: torch.Tensor


SurrogateLoss = Callable[[Tokens], Surrogate]

Selection = Callable[[MicroBatch], torch.Tensor]  # bool[K]: which trained tokens a loss treats differently
BatchSelection = Callable[[Sequence[MicroBatch], Gather], Selection]  # collective
BatchPairs = Callable[[Sequence[MicroBatch], Gather], Callable[[MicroBatch], PairTokens]]  # collective
Correction = Callable[[Tokens], tuple[torch.Tensor, torch.Tensor]]  # weight, float[K]; whether it carries loss, bool[K]


def trained_tokens(
    logprobs: torch.Tensor, entropy: torch.Tensor, row: MicroBatch, selection: Selection | None
) -> Tokens:
    trained = row.loss_mask
    sequence, lengths = sequences_of(row)
    return Tokens(
        current=logprobs[trained],
        proximal=row.proximal_logprobs[trained],
        behavior=row.behavior_logprobs[trained],
        advantages=row.advantages[trained],
        entropy=entropy[trained],
        sequence=sequence,
        staleness=row.staleness[trained],
        lengths=lengths,
        selected=torch.zeros_like(sequence, dtype=torch.bool) if selection is None else selection(row),
        positive=row.positive[trained],
        reference=None if row.reference_logprobs is None else row.reference_logprobs[trained],
        carried=row.carried,
    )


def sequences_of(row: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """int64[K], the sequence of each trained token of `row`, and int64[S], the trained tokens of each sequence."""
    starts = torch.tensor(row.cu_seqlens, device=row.loss_mask.device)
    sequence = torch.repeat_interleave(starts.diff())[row.loss_mask]
    return sequence, torch.bincount(sequence, minlength=len(row.cu_seqlens) - 1)


# --- what depends on the whole step


class StepTotals(msgspec.Struct, frozen=True):
    """Of one step on all ranks; `positive`: trained tokens of episodes with a reward above 0, `stalest`: -1 where there are
    none."""

    tokens: float
    sequences: float
    positive: float
    stalest: int


def step_totals(rows: Sequence[MicroBatch], gather: Gather) -> StepTotals:
    """Collective. The totals of the step on `rows`."""
    local = [[0.0, 0.0, 0.0, -1.0]]
    for row in rows:
        _, lengths = sequences_of(row)
        positive = row.loss_mask & row.positive
        local.append(
            [float(lengths.sum()), float((lengths > 0).sum()), float(positive.sum()), float(row.staleness.max())]
        )
    gathered = gather(torch.tensor(local, dtype=torch.float64))
    return StepTotals(*gathered[:, :3].sum(0).tolist(), stalest=int(gathered[:, 3].max()))


def _scale(kind: Mean, longest: int, totals: StepTotals, tokens: Tokens) -> torch.Tensor:
    """What each token's loss is multiplied by, float[K]; `longest` is L in tokens."""
    if kind == "token_mean":
        return torch.ones_like(tokens.proximal)
    factor = totals.tokens / max(1.0, totals.sequences)
    if kind == "sequence_mean":
        return factor / tokens.lengths[tokens.sequence].to(tokens.current.dtype)
    return torch.full_like(tokens.proximal, factor if kind == "sequence_sum" else factor / longest)


# --- the loss


def batch_loss(
    config: Algorithm,
    surrogate: SurrogateLoss,
    correct: Correction,
    select: BatchSelection | None,
    pair: BatchPairs | None,
    longest: int,
) -> BatchLoss:
    """The policy loss: from the rows of one step to the loss on each of them. `longest` is L, tokens."""
    kl, entropy, imitation = config.kl, config.terms["entropy"], config.terms["imitation"]

    def credited(row: MicroBatch) -> MicroBatch:
        return with_teacher(kl, row) if isinstance(kl, Distillation) else row

    def of_step(rows: Sequence[MicroBatch], gather: Gather) -> PolicyLoss:
        selection = None if select is None else select([credited(row) for row in rows], gather)
        paired = None if pair is None else pair(rows, gather)
        totals = step_totals(rows, gather)

        def of_row(logprobs: torch.Tensor, entropies: torch.Tensor, row: MicroBatch) -> LossOutput:
            row = credited(row)
            tokens = trained_tokens(logprobs, entropies, row, selection)
            with torch.no_grad():
                weight, kept = correct(tokens)
            if paired is not None:
                tokens = msgspec.structs.replace(tokens, pairs=paired(row))
            outcome = surrogate(tokens)
            loss = torch.where(kept, weight * outcome.loss, torch.zeros_like(outcome.loss))
            if entropy:
                loss = loss - entropy * tokens.entropy
            if isinstance(kl, KlInLoss):
                divergence = kl_estimate(kl.estimator, tokens.current, _reference(tokens))
                loss = loss + coefficient_of(kl, row.carried) * divergence.masked_fill(tokens.traced, 0.0)
            if isinstance(kl, Distillation) and kl.top:
                loss = loss + coefficient_of(kl, row.carried) * top_divergence(kl, row)
            loss_sum = (_scale(config.mean, longest, totals, tokens) * loss).sum()
            if imitation and totals.positive:
                factor = imitation * totals.tokens / totals.positive  # the backend divides by all trained tokens
                loss_sum = loss_sum - factor * tokens.current[tokens.positive].sum()
            clipped = outcome.clipped & kept
            sums = _report(tokens, clipped, kept, totals.stalest)
            if needs_reference(config):
                with torch.no_grad():
                    divergence = kl_estimate("k3", tokens.current, _reference(tokens))
                    sums["kl_reference"] = divergence.masked_fill(tokens.traced, 0.0).sum()
            return LossOutput(loss_sum=loss_sum, sums=sums, tokens=_token_outputs(tokens, weight, clipped, kept))

        return of_row

    return of_step


def _reference(tokens: Tokens) -> torch.Tensor:
    if tokens.reference is not None:
        return tokens.reference
    if len(tokens.current):
        raise LearnerError("the loss holds the policy near a reference policy, whose log-probs these rows lack")
    return tokens.current.detach()  # of a row that only pads the number of passes


@torch.no_grad()
def _report(tokens: Tokens, clipped: torch.Tensor, kept: torch.Tensor, stalest: int) -> dict[str, torch.Tensor]:
    log_w = (tokens.current - tokens.behavior).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    w = log_w.exp()
    values = {
        "importance": w,
        "importance_square": w.square(),
        "kl": torch.expm1(log_w) - log_w,
        "entropy": tokens.entropy,
        "clip_fraction": clipped,
        "dropped": ~kept,
        "tokens": torch.ones_like(kept),
    }
    sums = {name: value.masked_fill(tokens.traced, 0).sum() for name, value in values.items()}
    for staleness in range(stalest + 1):  # the same names on every row and rank
        at = tokens.staleness == staleness
        sums |= {f"{name}/{staleness}": values[name][at].sum() for name in BY_STALENESS}
    return sums


@torch.no_grad()
def _token_outputs(tokens: Tokens, weight: torch.Tensor, clipped: torch.Tensor, kept: torch.Tensor) -> TokenOutputs:
    return TokenOutputs(
        log_ratio=(tokens.current - tokens.behavior).masked_fill(tokens.traced, -torch.inf),
        entropy=tokens.entropy.detach(),
        advantage=tokens.advantages,
        weight=weight,
        clipped=clipped,
        dropped=~kept,
    )


def effective_sample_size(means: dict[str, float]) -> float:
    """(sum w)^2 / (n sum w^2) from the reported means, in (0, 1]: 1 on-policy, near 0 where few tokens hold all weight."""
    square = means["importance_square"]
    return means["importance"] ** 2 / square if square > 0 else 0.0
