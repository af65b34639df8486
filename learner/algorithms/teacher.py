"""On-policy distillation, by a teacher's log-probs of the policy's own tokens (Lu et al. 2025, "On-policy distillation", Thinking
Machines Lab; the single-step part of MiniLLM, Gu et al. 2023, arXiv:2306.08543; GKD, Agarwal et al. 2023, arXiv:2306.13649).

With the teacher f, the policy q at the start of the batch, the current policy p, and c the coefficient, at each token

    sampled     A <- A + c (log f - log q)                          the sampled token alone, in its advantage
    reverse     loss <- loss + c KL(p || f)                         over the k tokens that f finds likeliest, and the remainder
    forward     loss <- loss + c KL(f || p)                         the same, the other way round

`sampled` has the gradient of `reverse` over the whole vocabulary in expectation over the sampled token. `reverse` and `forward`
have theirs exactly, whichever token was sampled: without that noise, and without a weight for tokens of older policies.

With T the k likeliest tokens, and the remainder r, whose probability is 1 - the sum over T under either policy,

    KL(p || f) = sum over v in T of p_v log(p_v / f_v)  +  p_r log(p_r / f_r)

That is the divergence of two distributions over k + 1 outcomes: never negative, and at most the divergence over the vocabulary, by
the data processing inequality (Cover and Thomas 2006, section 2.8), which it equals where k is its size. Without the remainder it
would be lowest where the policy puts all its probability on other tokens (`reverse`), or only the proportions among T would count.

Invariants:
- The teacher's log-probs have no gradient; the policy's have, through the remainder, too.
- Log-probs that are -inf make no step infinite.
"""

from __future__ import annotations

import math

import msgspec
import torch

from ...configs.divergence import Distillation
from ...errors import LearnerError
from ..packing import MicroBatch
from .divergence import LOG_RATIO_LIMIT, coefficient_of

LEAST_REMAINDER = 1e-6  # probability of the remainder; below it is what float32 rounds
LEAST_LOGPROB = -100.0  # of a token: e^-100 is 0 beside any probability, and has a finite logarithm


def with_teacher(kl: Distillation, row: MicroBatch) -> MicroBatch:
    """`row` with the teacher's part in its advantages: coefficient (log f - log q), at most `LOG_RATIO_LIMIT` nats either way; as
    it is where the teacher's likeliest tokens are compared.

    Its policy gradient is minus the gradient of the divergence KL(q || f) at each token, given those before it. The log-probs are
    those of q, and not of the policy b that sampled, for the correction weighs tokens as if q had sampled them: with log b the
    gradient would have that of KL(q || b) added, which drives the policy away from older ones. Raises LearnerError where trained
    tokens have no log-probs of the teacher.
    """
    if kl.top:
        return row
    if row.reference_logprobs is None:
        if row.loss_mask.any():
            raise LearnerError("distillation needs a teacher, whose log-probs these rows lack")
        return row  # it only pads the number of passes
    gap = (row.reference_logprobs - row.proximal_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    taught = row.advantages + coefficient_of(kl, row.carried) * gap
    return msgspec.structs.replace(row, advantages=torch.where(row.loss_mask, taught, row.advantages))


def top_divergence(kl: Distillation, row: MicroBatch) -> torch.Tensor:
    """float[K], nats: at each trained token of `row` the divergence over the teacher's likeliest tokens and the remainder, see
    above. Raises LearnerError where trained tokens have no log-probs of these tokens, the policy's or the teacher's."""
    trained = row.loss_mask
    if row.teacher_logprobs is None or row.candidate_logprobs is None:
        if trained.any():
            raise LearnerError(
                "distillation needs the log-probs of a teacher's likeliest tokens, which these rows lack"
            )
        return row.advantages[trained]  # none: it only pads the number of passes
    policy, teacher = (with_remainder(one[trained]) for one in (row.candidate_logprobs, row.teacher_logprobs))
    of, to = (teacher, policy) if kl.forward else (policy, teacher)
    return (of.exp() * (of - to)).sum(-1)


def with_remainder(logprobs: torch.Tensor) -> torch.Tensor:
    """float[K, k + 1]: log-probs float[K, k] of different tokens, and behind them that of all others together."""
    known = logprobs.clamp(min=LEAST_LOGPROB)
    total = known.logsumexp(-1, keepdim=True).clamp(max=math.log1p(-LEAST_REMAINDER))
    return torch.cat([known, torch.log(-torch.expm1(total))], -1)
