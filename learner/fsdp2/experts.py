"""FSDP2's expert parallelism: ranks divide the experts of each layer, and rows travel to the ranks that have theirs.

    tokens --router--> one row for each choice --all-to-all--> rows of this rank's experts --their class--> outputs
                                                                                                              |
    weighted sum of each token's outputs <---------------------------all-to-all-------------------------------+

Invariants:
- Routers are not touched: what they choose, whether recorded or their own, is where a row goes. Their weights are applied where the
  token is, so that their gradients stay there.
- Each rank computes its experts by transformers' own class, which sees a model of fewer experts.
- The gradient of an expert is that of the rows of all ranks: those of its group arrive by the way back of the exchange, FSDP adds
  the other groups.
- The experts of every rank compute in every pass, one row of zeros at least: FSDP reduces the gradients that there are, which must
  be the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from ...errors import ConfigError
from .parallelism import KEY, ExpertParallelGroup, exchanged

PARAMETERS = {"gate_up_proj", "down_proj"}
"""What transformers calls the tensors of the experts of a layer; some families have biases, too."""

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(states [N, H], experts int64[N, K], weights [N, K]) -> [N, H]: the weighted sum of the outputs of each row's experts."""


class DividedExperts:
    """The experts of `model`, which has only this rank's part of them from now on, with values still to be written. Raises
    ConfigError where it has none.

    Attributes:
        names: of their parameters.
    """

    def __init__(self, model: PreTrainedModel, group: ExpertParallelGroup) -> None:
        self.group = group
        self._modules: list[torch.nn.Module] = []
        self.names: set[str] = set()
        for prefix, module in model.named_modules():
            if module._parameters.keys() >= PARAMETERS:
                self._modules.append(module)
                self.names |= {f"{prefix}.{name}" for name in module._parameters}
                _divide(module, group)
        if not self._modules:
            raise ConfigError(
                f"{KEY}.expert={group.size}: {type(model).__name__} has no layer with experts; allowed is 1"
            )

    def shard(self, precision: MixedPrecisionPolicy, offload: OffloadPolicy) -> None:
        """Have FSDP shard each layer's part over the ranks that hold it; to be called before it shards the layers."""
        # Routers of some families give weights in float32, which a cast would round.
        kept = MixedPrecisionPolicy(precision.param_dtype, precision.reduce_dtype, cast_forward_inputs=False)
        for module in self._modules:
            fully_shard(module, mesh=self.group.holders, mp_policy=kept, offload_policy=offload)

    def average_gradients(self) -> None:
        """FSDP averages the gradients of other parameters over all ranks, and those of experts over their holders only, each of
        which has the sum over its group."""
        for module in self._modules:
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(self.group.size)

    def whole(self, part: DTensor) -> DTensor:
        """A tensor of all experts, of which FSDP's `part` has this rank's; they share memory."""
        shape = torch.Size((len(part) * self.group.size, *part.shape[1:]))
        return _from_local(part.to_local(), self.group.mesh, shape)

    def part(self, whole: DTensor) -> DTensor:
        """The inverse of `whole`."""
        shape = torch.Size((len(whole) // self.group.size, *whole.shape[1:]))
        return _from_local(whole.to_local(), self.group.holders, shape)


def _from_local(local: torch.Tensor, mesh: Any, shape: torch.Size) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(0)] * mesh.ndim, run_check=False, shape=shape, stride=stride)


def _divide(module: Any, group: ExpertParallelGroup) -> None:
    """Leave this rank's part of the experts, with memory that the kernel has not given yet, and have rows brought to them."""
    module.num_experts //= group.size
    for name, parameter in list(module._parameters.items()):
        own = parameter.new_empty(module.num_experts, *parameter.shape[1:])
        setattr(module, name, torch.nn.Parameter(own, requires_grad=parameter.requires_grad))
    module.forward = _Dispatch(module.forward, group, module.num_experts)


def hide_from_compiler() -> None:
    _Dispatch.__call__ = torch.compiler.disable(_Dispatch.__call__)  # pyright: ignore[reportAttributeAccessIssue]


class _Dispatch:
    """`compute` on all ranks of `group`, each for its `experts`, as if it had all of them. Collective."""

    def __init__(self, compute: Compute, group: ExpertParallelGroup, experts: int) -> None:
        self._compute, self._group, self._experts = compute, group, experts

    def __call__(self, states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """As `compute`, with experts numbered over all ranks."""
        tokens, choices = chosen.shape
        by_expert = chosen.flatten().argsort(stable=True)  # and so by rank
        going = torch.bincount(chosen.flatten(), minlength=self._group.size * self._experts)
        coming = exchanged(going, self._group.group).view(self._group.size, self._experts)
        sent, received = torch.stack([going.view_as(coming).sum(1), coming.sum(1)]).tolist()
        rows = self._group.exchange(states[by_expert // choices], received, sent)
        experts = torch.arange(self._experts, device=rows.device).repeat(self._group.size)
        outputs = self._group.exchange(self._outputs(rows, experts.repeat_interleave(coming.flatten())), sent, received)
        ordered = torch.empty_like(outputs).index_copy(0, by_expert, outputs).view(tokens, choices, -1)
        return (ordered * weights[..., None]).sum(1).to(states.dtype)

    def _outputs(self, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """[N, H] of rows [N, H], each of one expert int64[N]."""
        if not len(rows):
            return self._outputs(torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), experts.new_zeros(1))[:0]
        return self._compute(rows, experts[:, None], rows.new_ones(len(rows), 1))
