"""The largest importance ratios of a batch, gathered from ranks that saw different tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from slipstream.learner.backend import LossOutput, TokenOutputs
from slipstream.learner.packing import scoring_microbatch
from slipstream.learner.step import LargestRatios

ROW = scoring_microbatch([[1, 2]])


class Ranks:
    """What the collectives of a backend do, for ranks that are asked one after the other: all have given `given`."""

    def __init__(self, given: Sequence[torch.Tensor], others: float = -math.inf) -> None:
        self.given, self.others = given, others

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        assert values.dtype == torch.float64
        return torch.cat([one.double()[:, None] for one in self.given])

    def maximum(self, value: float) -> float:
        return max(value, self.others)


def listened(ratios: LargestRatios, rows: Sequence[torch.Tensor]) -> None:
    for row in rows:
        none = torch.zeros_like(row)
        tokens = TokenOutputs(row, none, none, none, none.bool(), none.bool())
        output = LossOutput(row.sum(), {}, tokens)
        assert ratios.of(lambda *_, output=output: output)(row, row, ROW) is output


@pytest.mark.parametrize("tokens", [3, 999, 1001, 5000])
def test_ranks_together_find_what_one_sort_finds(tokens: int) -> None:
    log_ratios = torch.randn(tokens, generator=torch.Generator().manual_seed(tokens))
    shares = log_ratios.split([tokens // 3, tokens - tokens // 3])
    kept = list[torch.Tensor]()
    for share in shares:
        ratios = LargestRatios(tokens)
        listened(ratios, [*share.split(700), torch.zeros(0)])
        ratios.finish(Ranks([share[:0]]))  # type: ignore[arg-type]
        kept.append(ratios._largest)  # type: ignore[arg-type]
    assert all(len(one) <= math.ceil(tokens / 1000) for one in kept)
    found = LargestRatios(tokens).finish(Ranks(kept))  # type: ignore[arg-type]
    expected = log_ratios.exp().sort(descending=True).values
    assert found == pytest.approx((expected[math.ceil(tokens / 1000) - 1].item(), expected[0].item()))


def test_a_rank_that_computes_no_loss_reports_what_the_others_found() -> None:
    nothing = torch.zeros(0)
    assert LargestRatios(10).finish(Ranks([nothing], others=0.5)) == pytest.approx((math.exp(0.5),) * 2)  # type: ignore[arg-type]
    assert LargestRatios(10).finish(Ranks([nothing])) == (None, None)  # type: ignore[arg-type]


def test_a_ratio_beyond_the_largest_float_is_finite() -> None:
    ratios = LargestRatios(1)
    huge = torch.tensor([1e4])
    listened(ratios, [huge])
    p999, largest = ratios.finish(Ranks([huge]))  # type: ignore[arg-type]
    assert p999 == largest == math.exp(700)
