"""The largest importance ratios of a batch, exactly, over all ranks.

    loss of a row ──of──> this rank's largest ──finish──> `ratio_p999`, `ratio_max`

Invariants:
- The loss and the step are the same with and without it; ratios stay on the device until `finish`.
- Each rank keeps one token in a thousand of the whole batch, so that the kept ones of all ranks together contain the largest.
"""

from __future__ import annotations

import math

import torch

from .backend import Backend, PolicyLoss, TokenOutputs, listening
from .packing import MicroBatch

SHARE = 0.001


class LargestRatios:
    """Of a batch of `tokens` trained tokens that the policy sampled, all ranks together, in the optimizer steps whose losses `of`
    listens to."""

    def __init__(self, tokens: int) -> None:
        self._count = max(1, math.ceil(SHARE * tokens))
        self._largest: torch.Tensor | None = None  # log-ratios, float[at most `_count`]

    def of(self, loss: PolicyLoss) -> PolicyLoss:
        """`loss`, which is listened to."""
        return listening(loss, self._record_row)

    def finish(self, backend: Backend) -> tuple[float | None, float | None]:
        """Collective. The ratio p / b that one trained token in a thousand reaches, and the largest one. None: no rank saw one."""
        mine = torch.zeros(0) if self._largest is None else self._largest
        found = (
            backend.gather(mine.double().cpu()[:, None]).flatten().sort(descending=True).values[: self._count].tolist()
        )
        # A rank that computes no loss, such as the first of a pipeline, has gathered nothing.
        p999, maximum = (backend.maximum(value) for value in ((found[-1], found[0]) if found else (-math.inf,) * 2))
        return (None, None) if maximum == -math.inf else (_exp(p999), _exp(maximum))

    @torch.no_grad()
    def _record_row(self, tokens: TokenOutputs, row: MicroBatch) -> None:
        values = tokens.log_ratio if self._largest is None else torch.cat([self._largest, tokens.log_ratio])
        self._largest = values.topk(min(self._count, len(values))).values


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))  # e^709 is the largest float
