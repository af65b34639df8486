"""The loss of tokens of expert traces: mixed-policy GRPO with policy shaping (LUFFY, Yan et al. 2025, arXiv:2504.14945).

The paper's equation, with the trace's advantage A among the answers of its group and the current policy p,

    - f(p / 1) A,        f(x) = x / (x + gamma),  gamma = 0.1

The expert's own probability of a token is not known and taken for 1, and nothing is clipped: p / 1 is far below any clip. The slope
of f, gamma p / (p + gamma)^2 by log p, is largest where p = gamma: tokens that the policy hardly knows are learned first. At other
tokens the surrogate, and its correction, are as they were.

Invariants:
- A token of a trace has staleness -1: no version of the policy sampled it. It is trained, so that it has loss.
- No correction weighs or drops it.
"""

from __future__ import annotations

import math

import torch

from .policy_loss import Correction, Surrogate, SurrogateLoss, Tokens

GAMMA = 0.1  # the authors'


def with_traces(surrogate: SurrogateLoss) -> SurrogateLoss:
    """`surrogate`, with the loss above at tokens of traces."""

    def mixed(tokens: Tokens) -> Surrogate:
        own, traced = surrogate(tokens), tokens.traced
        shaped = torch.sigmoid(tokens.current - math.log(GAMMA))  # p / (p + gamma), of any log p
        return Surrogate(torch.where(traced, -shaped * tokens.advantages, own.loss), own.clipped & ~traced)

    return mixed


def sparing_traces(correct: Correction) -> Correction:
    """`correct`, with weight 1 at tokens of traces, none of which is dropped."""

    def of(tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        weight, kept = correct(tokens)
        return weight.masked_fill(tokens.traced, 1.0), kept | tokens.traced

    return of
