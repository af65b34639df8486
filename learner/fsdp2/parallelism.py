"""How FSDP2's ranks share batches, rows and experts.

    rank                 0     1     2     3        with learner.backend.parallel={context: 2, expert: 2}
    part of the batch    0     0     1     1        `data_rank` of `data_size`: ranks of one part hold the same rows,
    part of each row     0     1     0     1        `context`: and share the work on them
    part of the experts  0     1     0     1        `experts`: of each layer; FSDP shards a part over the ranks that have it

Ranks share the tokens of a row by heads (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv:2309.14509):

    work on single tokens    tokens [r n/C, (r + 1) n/C) of the row      on context rank r of C
    attention                all n tokens, heads [r h/C, (r + 1) h/C)    one exchange before it, one after

A row is padded to a multiple of C by a sequence without loss. Every rank of a row has the log-probs of all its tokens and computes
the same loss. Each sends back the gradient of its own tokens only, so the gradients of the ranks *add up* to that of the row.

Ranks that share experts are neighbors, whatever rows they have: tokens travel between them twice per layer (`experts.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedConfig

from ...errors import ConfigError
from ..distributed import as_group, is_single_rank, join

KEY = "learner.backend.parallel"
MIXTURES = (
    *("qwen2_moe", "qwen3_moe", "olmoe", "mixtral"),
    *("glm4_moe", "deepseek_v3", "minimax_m2", "gpt_oss"),
)
"""Families whose experts can be divided: they are rows of a few tensors, and called with the states, experts and weights of each
token."""


class DataParallelGroups:
    """Collective. Join the process group that the environment names, or one of a single rank; `context` ranks share the tokens
    of a row, `expert` ranks the experts of a layer. Raises as `join`, and ConfigError where one does not divide the ranks."""

    def __init__(self, device: torch.device, context: int, expert: int, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._joined = join(device, timeout_s)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        context, expert = (1, 1) if is_single_rank() else (context, expert)
        for axis, ranks in (("context", context), ("expert", expert)):
            if self.size % ranks:
                self.leave()
                raise ConfigError(
                    f"{KEY}.{axis}={ranks} does not divide {self.size} learner ranks evenly; "
                    "allowed are divisors of learner.backend.ranks"
                )
        self.data_size, self.data_rank = self.size // context, self.rank // context
        whole = list(range(self.size))
        self.data = self._group([whole[part::context] for part in range(context)])
        rows = [whole[start : start + context] for start in range(0, self.size, context)]
        self.context = ContextParallelGroup(self._group(rows), self.rank % context, context) if context > 1 else None
        self.experts = None
        if expert > 1:
            neighbors = self._group([whole[start : start + expert] for start in range(0, self.size, expert)])
            holders = self._group([whole[part::expert] for part in range(expert)])
            self.experts = ExpertParallelGroup(neighbors, holders, device)

    def leave(self) -> None:
        """Leave the process group, if this model joined it first. No model of this process may be used afterwards."""
        if self._joined:
            dist.destroy_process_group()

    def _group(self, parts: list[list[int]]) -> dist.ProcessGroup:
        """Collective. The group of this rank's part; all ranks make all of them, in the same order."""
        if len(parts) == 1:
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        groups = [dist.new_group(part, timeout=self._timeout) for part in parts]
        return as_group(next(group for group, part in zip(groups, parts, strict=True) if self.rank in part))


def check_heads(config: PreTrainedConfig, ranks: int) -> None:
    """Raises ConfigError where the heads of a model cannot be split among `ranks` that share a row."""
    config = config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % ranks or kv_heads % ranks:
        raise ConfigError(
            f"{KEY}.context={ranks}: the model has {heads} heads and {kv_heads} key-value heads; "
            "allowed are divisors of both"
        )


def check_experts(config: PreTrainedConfig, ranks: int) -> None:
    """Raises ConfigError where the experts of a model cannot be divided among `ranks`."""
    if ranks == 1:
        return
    if config.model_type not in MIXTURES:
        raise ConfigError(
            f"{KEY}.expert={ranks}: {config.name_or_path!r} is a model of family {config.model_type}; allowed are mixtures of "
            f"experts of {', '.join(MIXTURES)}, and {KEY}.expert=1 for any model"
        )
    experts = getattr(config, "num_local_experts", None) or config.num_experts
    if experts % ranks:
        raise ConfigError(f"{KEY}.expert={ranks} does not divide the model's {experts} experts; allowed are divisors")


class ContextParallelGroup:
    """This rank's part of every row: part `rank` of `size`; the other ranks of `group` have the other parts."""

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

    def fill_with_zeros(self, rows: torch.Tensor) -> torch.Tensor:
        """[N, ...] with rows of zeros behind, for the tokens that `fill` adds."""
        missing = -len(rows) % self.size
        return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows

    def part(self, tokens: int) -> slice:
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
        """The sum of `x` over the ranks of a row, each 0 where another rank has the value. Its gradient is this rank's."""
        return _Complete.apply(x, self.group)  # pyright: ignore[reportReturnType]


class ExpertParallelGroup:
    """This rank's part of the experts of every layer: part `rank` of `size`.

    Attributes:
        group: ranks with all the parts, one each.
        holders: ranks with this part, as FSDP's mesh.
        mesh: all ranks, [size, holders]: rows that are cut along the first dimension and then along the second are in order.
    """

    def __init__(self, group: dist.ProcessGroup, holders: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.holders = DeviceMesh.from_group(holders, device.type)
        ranks = torch.arange(dist.get_world_size()).view(-1, self.size).T.contiguous()
        names = ("experts", "holders")
        self.mesh = DeviceMesh.from_group([group, holders], device.type, ranks, mesh_dim_names=names)

    def exchange(self, x: torch.Tensor, received: Sequence[int], sent: Sequence[int]) -> torch.Tensor:
        """Of x [sum(sent), ...] the first sent[0] rows go to rank 0, the next sent[1] to rank 1; [sum(received), ...] come, from
        rank 0 first. Can be differentiated."""
        return _Exchange.apply(x, self.group, received, sent)  # pyright: ignore[reportReturnType]


class _Exchange(torch.autograd.Function):
    """Part i of this rank for part `rank` of rank i: equal parts, or `sent` and `received` rows. Its transpose is the way back."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        group: dist.ProcessGroup,
        received: Sequence[int] | None = None,
        sent: Sequence[int] | None = None,
    ) -> torch.Tensor:
        ctx.group, ctx.received, ctx.sent = group, received, sent
        return exchanged(x, group, received, sent)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return exchanged(grads[0], ctx.group, ctx.sent, ctx.received), None, None, None


def exchanged(
    x: torch.Tensor,
    group: dist.ProcessGroup,
    received: Sequence[int] | None = None,
    sent: Sequence[int] | None = None,
) -> torch.Tensor:
    """Collective. As `ExpertParallelGroup.exchange`, in equal parts where there are no numbers of rows."""
    x = x.contiguous()
    found = torch.empty_like(x) if received is None else x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(found, x, received, sent, group=group)
    return found


class _Complete(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None  # every rank makes the same loss: a sum over them would count it `size` times
