"""Which tokens drive the entropy down: those whose log-prob and advantage rise together.

Cui et al. 2025, "The entropy mechanism of reinforcement learning for reasoning language models", arXiv:2505.22617. Over the N
trained tokens of one optimizer step, on all ranks,

    Cov_t = (log q_t - mean log q) (A_t - mean A)

with the proximal policy q, which is the current one in the first step of a batch: it is known before the step, so that means and
ranks are those of all tokens, however they are packed and split over ranks. `clip_cov` and `kl_cov` select by it.

Invariants:
- Every rank computes the same thresholds from the same gathered numbers; a token is selected by them and its own numbers alone.
- Tokens that tie at a threshold are selected together, so that their order does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from ..backend import Gather, PackedRow
from .tokens import Selection

Covariance = Callable[[PackedRow], torch.Tensor]
"""float64[K]: the covariance of each trained token of a row."""


def covariance(rows: Sequence[PackedRow], gather: Gather) -> tuple[Covariance, torch.Tensor]:
    """Collective. The covariance of a row's tokens, and those of all tokens of the step, float64[N], the same on every rank.

    Args:
        rows: this rank's, with their proximal log-probs.
        gather: see `Backend.gather`.
    """
    mine = [torch.stack([r.proximal_logprobs[r.trained], r.advantages[r.trained]], dim=1).double() for r in rows]
    everyone = gather(torch.cat([torch.zeros(0, 2, dtype=torch.float64), *mine]))
    logprob, advantage = everyone.mean(0).tolist()

    def of_row(row: PackedRow) -> torch.Tensor:
        values = row.proximal_logprobs[row.trained].double() - logprob
        return values * (row.advantages[row.trained].double() - advantage)

    return of_row, (everyone[:, 0] - logprob) * (everyone[:, 1] - advantage)


def count(share: float, tokens: int) -> int:
    """floor(share x N) as in the paper, but at least one, as in its authors' code: else small batches would select none."""
    return max(1, math.floor(share * tokens))


def largest(share: float, rows: Sequence[PackedRow], gather: Gather) -> Selection:
    """Collective. Selects the `share` of tokens with the largest covariances, those above 0 only."""
    of_row, everyone = covariance(rows, gather)
    if not len(everyone):
        return lambda row: of_row(row) > 0
    threshold = everyone.topk(min(len(everyone), count(share, len(everyone)))).values[-1].item()
    return lambda row: (values := of_row(row)).ge(threshold) & (values > 0)


def drawn(share: float, low: float, high: float, rows: Sequence[PackedRow], gather: Gather) -> Selection:
    """Collective. Selects a random `share` of all tokens among those with a covariance in [low, high], or all of them if fewer.

    Each token draws its lot from what it is (`lots`), so that the draw depends neither on ranks nor on packing.
    """
    of_row, everyone = covariance(rows, gather)
    mine = [torch.stack([of_row(row), lots(row)], dim=1) for row in rows]
    covariances, drawn_lots = gather(torch.cat([torch.zeros(0, 2, dtype=torch.float64), *mine])).unbind(1)
    eligible = drawn_lots[(covariances >= low) & (covariances <= high)].sort().values
    wanted = min(len(eligible), count(share, len(everyone)))
    threshold = eligible[wanted - 1].item() if wanted else -math.inf

    def select(row: PackedRow) -> torch.Tensor:
        values = of_row(row)
        return (values >= low) & (values <= high) & (lots(row) <= threshold)

    return select


def lots(row: PackedRow) -> torch.Tensor:
    """float64[K] in [0, 1): a hash of each trained token's id, place in its sequence and behaviour log-prob.

    These come with the data and are exact: a log-prob that is computed again may differ in its last bit. The mixing is that of
    SplitMix64 (Steele, Lea & Flood 2014), in arithmetic that wraps around.
    """
    place = row.token_ids[row.trained] * 1_000_003 + row.position_ids[row.trained]
    x = place * -7046029254386353131 + row.behavior_logprobs[row.trained].float().view(torch.int32).long()
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ _shifted(x, shift)) * factor
    return _shifted(x ^ _shifted(x, 31), 11).double() * 2.0**-53


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """Logical right shift of int64, which torch has not."""
    return (x >> by) & ((1 << (64 - by)) - 1)
