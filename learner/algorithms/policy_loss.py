"""A policy loss is put together from four choices of the config, each of which knows nothing of the others:

    tokens ──surrogate──> loss per token ──correction──> weighed, some dropped ──entropy, KL──> ──aggregation──> sum of the row

    sum over trained tokens of scale x [kept] x (weight x surrogate - coefficient x entropy + coefficient x KL), + imitation

The entropy bonus (Mnih et al. 2016, arXiv:1602.01783) is that of the current policy where it was asked for a token, unweighed, and
so is the divergence from the reference policy (`kl.py`).

Reported sums over trained tokens, with w = p / b: `importance` w, `importance_square` w^2, `kl` (w - 1) - log w, the k3 estimate
of KL(b || p) (Schulman 2020), `entropy`, `clip_fraction`, 1 where the loss's own clip was at work, and `dropped`, 1 where the
correction left no loss; where there is a reference policy f, `kl_reference`, the k3 estimate of KL(p || f); and those of
`BY_STALENESS` once more for each staleness, as `kl/2`. See `effective_sample_size`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...configs.algorithm import KlInLoss, KlInReward, NoKl
from ...errors import LearnerError
from ..backend import Gather, LossOutput, PackedRow, PolicyLoss
from .aggregation import Scale
from .correction import Correction
from .imitation import Imitation
from .kl import estimate
from .tokens import LOG_RATIO_LIMIT, Selection, SurrogateLoss, Tokens, trained_tokens

BY_STALENESS = ("tokens", "importance", "importance_square", "kl", "clip_fraction")
"""Sums that are reported by staleness too; `tokens` counts trained tokens."""


def compose(
    surrogate: SurrogateLoss,
    selection: Selection | None,
    correct: Correction,
    entropy_coefficient: float,
    kl: NoKl | KlInLoss | KlInReward,
    imitation: Imitation | None,
    scale: Scale | None,
    stalest: int,
) -> PolicyLoss:
    """The loss of a step on each of its rows; `selection`, `imitation`, `scale` and the largest staleness are this step's."""

    def policy_loss(logprobs: torch.Tensor, entropy: torch.Tensor, row: PackedRow) -> LossOutput:
        tokens = trained_tokens(logprobs, entropy, row, selection)
        with torch.no_grad():
            weight, kept = correct(tokens)
        outcome = surrogate(tokens)
        loss = weight * outcome.loss
        if entropy_coefficient:
            loss = loss - entropy_coefficient * tokens.entropy
        if isinstance(kl, KlInLoss):
            loss = loss + kl.coefficient * estimate(kl.estimator, tokens.current, _reference(tokens))
        if scale is not None:
            loss = scale(tokens) * loss
        loss_sum = torch.where(kept, loss, torch.zeros_like(loss)).sum()
        if imitation is not None:
            loss_sum = loss_sum + imitation(tokens)
        sums = _report(tokens, outcome.clipped & kept, kept, stalest)
        if not isinstance(kl, NoKl):
            with torch.no_grad():
                sums["kl_reference"] = estimate("k3", tokens.current, _reference(tokens)).sum()
        return LossOutput(loss_sum=loss_sum, sums=sums)

    return policy_loss


def _reference(tokens: Tokens) -> torch.Tensor:
    if tokens.reference is not None:
        return tokens.reference
    if len(tokens.current):
        raise LearnerError("the loss holds the policy near a reference policy, whose log-probs these rows lack")
    return tokens.current.detach()  # of a row that only fills up


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
    }
    sums = {name: value.sum() for name, value in values.items()}
    values["tokens"] = torch.ones_like(kept)
    for lag in range(stalest + 1):  # the same names on every row and rank
        at = tokens.lags == lag
        sums |= {f"{name}/{lag}": values[name][at].sum() for name in BY_STALENESS}
    return sums


def stalest_of(rows: Sequence[PackedRow], gather: Gather) -> int:
    """Collective. The largest staleness of any trained token of the step on `rows`; -1 where there are none."""
    mine = [[float(row.lags.max())] for row in rows]
    return int(gather(torch.tensor([[-1.0], *mine], dtype=torch.float64)).max())


def effective_sample_size(means: dict[str, float]) -> float:
    """(sum w)^2 / (n sum w^2) from the reported means, in (0, 1]: 1 on-policy, near 0 where few tokens weigh everything."""
    square = means["importance_square"]
    return means["importance"] ** 2 / square if square > 0 else 0.0
