"""Clip-Cov and KL-Cov: tokens that drive the entropy down, those whose log-prob and advantage rise together, are held back.

Cui et al. 2025, "The entropy mechanism of reinforcement learning for reasoning language models", arXiv:2505.22617. Over the N
trained tokens of one optimizer step, on all ranks,

    Cov_t = (log q_t - mean log q) (A_t - mean A)

with the proximal policy q, which is the current one in the first step of a batch: it is known before the step, so that means and
ranks are those of all tokens, however they are packed and split over ranks. With r = p / q,

    clip_cov   I = floor(share x N) tokens, drawn uniformly among those with low <= Cov <= high
               loss = 0 for tokens in I, elsewhere - min(r A, clip(r, 1 - low, 1 + high) A)
    kl_cov     I = the tokens with the floor(share x N) largest Cov, of these those with Cov > 0
               loss = - r A + beta d for tokens in I, elsewhere - r A

The divergence d of a token is |log r|, as in the authors' code, (log r)^2 / 2 or r - 1 - log r (k2 and k3, Schulman 2020). Other
than there, covariances and the draw are fixed before the step, over the tokens of all ranks and micro-batches, and tokens whose
log-prob and advantage do not rise together are never held. In the first optimizer step of a batch p is q: the penalty begins to
hold with the second, so that `minibatches` should be 2 or more.

Invariants:
- Every rank computes the same thresholds from the same gathered numbers; a token is selected by them and its own numbers only.
- Tokens that tie at a threshold are selected together, so that their order does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from ...configs.algorithm import ClipCov, KlCov, KlCovKey
from ..backend import Gather
from ..packing import MicroBatch
from .policy_loss import Selection, Surrogate, Tokens
from .surrogates import clipped_surrogate, saturating_exp

Covariance = Callable[[MicroBatch], torch.Tensor]  # float64[K]: the covariance of each trained token of a row


def covariance(rows: Sequence[MicroBatch], gather: Gather) -> tuple[Covariance, torch.Tensor]:
    """Collective. The covariance of a row's tokens, and those of all tokens of the step, float64[N], the same on every rank."""
    local = [torch.stack([r.proximal_logprobs[r.loss_mask], r.advantages[r.loss_mask]], dim=1).double() for r in rows]
    gathered = gather(torch.cat([torch.zeros(0, 2, dtype=torch.float64), *local]))
    logprob, advantage = gathered.mean(0).tolist()

    def of_row(row: MicroBatch) -> torch.Tensor:
        values = row.proximal_logprobs[row.loss_mask].double() - logprob
        return values * (row.advantages[row.loss_mask].double() - advantage)

    return of_row, (gathered[:, 0] - logprob) * (gathered[:, 1] - advantage)


def count(share: float, tokens: int) -> int:
    """floor(share x N), but at least one, as in the authors' code: else small batches would select none."""
    return max(1, math.floor(share * tokens))


def random_tokens(share: float, low: float, high: float, rows: Sequence[MicroBatch], gather: Gather) -> Selection:
    """Collective. Selects a random `share` of all tokens among those with a covariance in [low, high], or all of them if fewer."""
    of_row, gathered = covariance(rows, gather)
    local = [torch.stack([of_row(row), token_hashes(row)], dim=1) for row in rows]
    covariances, hashes = gather(torch.cat([torch.zeros(0, 2, dtype=torch.float64), *local])).unbind(1)
    eligible = hashes[(covariances >= low) & (covariances <= high)].sort().values
    wanted = min(len(eligible), count(share, len(gathered)))
    threshold = eligible[wanted - 1].item() if wanted else -math.inf

    def select(row: MicroBatch) -> torch.Tensor:
        values = of_row(row)
        return (values >= low) & (values <= high) & (token_hashes(row) <= threshold)

    return select


def token_hashes(row: MicroBatch) -> torch.Tensor:
    """float64[K] in [0, 1): a hash of each trained token's id, position and behavior log-prob, mixed as in SplitMix64 (Steele, Lea
    & Flood 2014), in arithmetic that wraps around."""
    key = row.token_ids[row.loss_mask] * 1_000_003 + row.position_ids[row.loss_mask]
    x = key * -7046029254386353131 + row.behavior_logprobs[row.loss_mask].float().view(torch.int32).long()
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ _shifted(x, shift)) * factor
    return _shifted(x ^ _shifted(x, 31), 11).double() * 2.0**-53


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """Logical right shift of int64, which torch has not."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def clip_cov_selection(config: ClipCov, rows: Sequence[MicroBatch], gather: Gather) -> Selection:
    """Collective. The tokens that carry no gradient in the step on `rows`."""
    return random_tokens(config.held["share"], config.held["low"], config.held["high"], rows, gather)


def clip_cov(config: ClipCov, tokens: Tokens) -> Surrogate:
    """Clip-Cov's loss per token; the selected count as clipped."""
    log_ratio = tokens.current - tokens.proximal
    plain = clipped_surrogate(log_ratio.masked_fill(tokens.selected, 0.0), tokens.advantages, config.clip)
    # A NaN log-prob must not be dropped silently.
    nothing = torch.zeros_like(plain.loss).masked_fill(log_ratio.isnan(), math.nan)
    return Surrogate(torch.where(tokens.selected, nothing, plain.loss), plain.clipped | tokens.selected)


def kl_cov_selection(config: KlCov, rows: Sequence[MicroBatch], gather: Gather) -> Selection:
    """Collective. The tokens that are held in the step on `rows`."""
    of_row, gathered = covariance(rows, gather)
    if not len(gathered):
        return lambda row: of_row(row) > 0
    threshold = gathered.topk(min(len(gathered), count(config.held["share"], len(gathered)))).values[-1].item()
    return lambda row: (values := of_row(row)).ge(threshold) & (values > 0)


def kl_cov(config: KlCov, tokens: Tokens) -> Surrogate:
    """KL-Cov's loss per token; `clipped` marks where the divergence was added."""
    log_ratio, held = tokens.current - tokens.proximal, config.held
    ratio = saturating_exp(log_ratio)
    estimates: dict[KlCovKey, torch.Tensor] = {
        "abs": log_ratio.abs(),
        "k2": log_ratio.square() / 2,
        "k3": ratio - 1.0 - log_ratio,
    }
    penalty = sum((held[name] * d for name, d in estimates.items() if held[name]), start=torch.zeros_like(ratio))
    plain = -ratio * tokens.advantages
    return Surrogate(loss=torch.where(tokens.selected, plain + penalty, plain), clipped=tokens.selected)
