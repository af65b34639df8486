"""Context parallelism by heads (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv:2309.14509): ranks share the tokens of each row.

    all that looks at one token   tokens [r n/C, (r + 1) n/C) of the row      on context rank r of C
    attention                     all n tokens, heads [r h/C, (r + 1) h/C)    one exchange before it, one after

Invariants:
- A row is filled up to a multiple of C by a sequence of its own that nobody trains on: parts have equal shapes.
- Every rank of a row comes to know the log-probs of all its tokens and makes the same loss of them. Each sends back the gradient of
  its own tokens only, so the gradients of the ranks *add up* to that of the row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from ...errors import ConfigError


def check_heads(config: PreTrainedConfig, ranks: int) -> None:
    """Raises ConfigError where the heads of a model cannot be split among `ranks` that share a row."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % ranks or kv_heads % ranks:
        raise ConfigError(
            f"learner.backend.context_parallel={ranks}: the model has {heads} heads and {kv_heads} key-value heads; "
            "allowed are divisors of both"
        )


class Context:
    """This rank's part of every row: part `rank` of `size`; the ranks of `group` hold the others."""

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self.group, self.rank, self.size = group, rank, size

    def fill(self, token_ids: torch.Tensor, position_ids: torch.Tensor, cu_seqlens: tuple[int, ...]):
        """int64[N], int64[N] and offsets, of a row whose N is a multiple of the ranks."""
        missing = -len(token_ids) % self.size
        if not missing:
            return token_ids, position_ids, cu_seqlens
        filler = torch.arange(missing, device=token_ids.device)
        return (
            torch.cat([token_ids, torch.zeros_like(filler)]),
            torch.cat([position_ids, filler]),
            (*cu_seqlens, len(token_ids) + missing),
        )

    def part(self, tokens: int) -> slice:
        """This rank's of a row of `tokens`."""
        each = tokens // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def to_heads(self, x: torch.Tensor) -> torch.Tensor:
        """[1, heads, n / C, D], this rank's tokens -> [1, heads / C, n, D], this rank's heads. Can be differentiated."""
        _, heads, tokens, dim = x.shape
        by_rank = x.reshape(self.size, heads // self.size, tokens, dim)
        return _Exchange.apply(by_rank, self.group).transpose(0, 1).reshape(1, heads // self.size, -1, dim)

    def to_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """[1, n, heads / C, D], this rank's heads -> [1, n / C, heads, D], this rank's tokens. Can be differentiated."""
        _, tokens, heads, dim = x.shape
        by_rank = x.reshape(self.size, tokens // self.size, heads, dim)
        return _Exchange.apply(by_rank, self.group).transpose(0, 1).reshape(1, tokens // self.size, -1, dim)

    def complete(self, x: torch.Tensor) -> torch.Tensor:
        """The same on all ranks of a row: `x` of each, 0 where the number is another rank's. Its gradient is this rank's."""
        return x if self.size == 1 else _Complete.apply(x, self.group)  # pyright: ignore[reportReturnType]


class _Exchange(torch.autograd.Function):
    """Part i of this rank for part `rank` of rank i; its own inverse, and so its own transpose."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _exchanged(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _exchanged(grads[0], ctx.group), None


def _exchanged(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    x = x.contiguous()
    answer = torch.empty_like(x)
    dist.all_to_all_single(answer, x, group=group)
    return answer


class _Complete(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None  # every rank makes the same loss: a sum over them would count it `size` times
