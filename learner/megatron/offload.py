"""Megatron's AdamW in the host's memory (`learner.backend.options=[offload]`): the accelerator holds weights and gradients, the
host holds float32 master weights and moments, and computes the step.

Megatron's own `HybridDeviceOptimizer` does not fit: it needs CUDA, it cannot load a checkpoint of float32 weights, and it makes
moments only by a step with random gradients.

Invariants:
- The step is that of torch's fused AdamW. Norm and clipping of the gradient are computed before it, on the accelerator.
- Each of the model's weights on the accelerator is its master weight on the host, rounded once.
- The host has the gradients of two pieces at most: while it steps one, the next one's are on their way.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.adamw import adamw

PIECE = 1 << 22  # parameters that are copied and stepped together: 16 MiB of gradients


class _Piece(NamedTuple):
    """At most `PIECE` neighbors of one shard: the model's weights and their gradient on the accelerator, the others float32 on the
    host."""

    group: Mapping[str, Any]
    model_weights: torch.Tensor
    gradient: torch.Tensor
    master_weights: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


class _Staging(NamedTuple):
    """Host memory that the accelerator copies to and from by itself, for the gradient and the weights of one piece."""

    gradient: torch.Tensor
    model_weights: torch.Tensor


class HostAdamW:
    """What Megatron's `DistributedOptimizer` asks of an optimizer that keeps the master weights itself, which it calls
    precision-aware: gradients are in `decoupled_grad` of each shard of a weight, and the state of a shard is `master_param` beside
    `exp_avg` and `exp_avg_sq`. Master weights are still to be written, and the moments are zero."""

    def __init__(self, param_groups: list[dict[str, Any]]) -> None:
        """`param_groups` are torch's, of the shards of this rank, flat and on one device."""
        self.param_groups = param_groups
        for group in param_groups:
            group["step"] = 0
        shards = self._shards()
        self.state = {
            shard: {
                "exp_avg": torch.zeros(len(shard)),
                "exp_avg_sq": torch.zeros(len(shard)),
                "master_param": torch.empty(len(shard)),
            }
            for shard in shards
        }
        size, pin = min(PIECE, max(map(len, shards), default=0)), any(shard.is_cuda for shard in shards)
        dtype = shards[0].dtype if shards else torch.float32
        self._staging = [
            _Staging(torch.empty(size, pin_memory=pin), torch.empty(size, dtype=dtype, pin_memory=pin))
            for _ in range(2)
        ]

    @torch.no_grad()
    def step(self) -> None:
        """Copies back to the accelerator are ordered before what the caller puts on its current stream later."""
        for group in self.param_groups:
            group["step"] += 1
        ahead = deque[tuple[_Piece, _Staging, Any]]()  # and the event after its copy, on an accelerator
        for piece, staging in zip(self._pieces(), itertools.cycle(self._staging), strict=False):
            staging.gradient[: len(piece.model_weights)].copy_(piece.gradient, non_blocking=True)
            ahead.append(
                (piece, staging, torch.cuda.current_stream().record_event() if piece.model_weights.is_cuda else None)
            )
            if len(ahead) == len(self._staging):
                _step_piece(*ahead.popleft())
        while ahead:
            _step_piece(*ahead.popleft())

    def get_unscaled_state(self, shard: torch.Tensor, name: str) -> torch.Tensor:
        return self.state[shard][name]

    @torch.no_grad()
    def set_scaled_state(self, shard: torch.Tensor, name: str, value: torch.Tensor) -> None:
        self.state[shard][name].copy_(value)
        if name == "master_param":
            shard.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """Steps and rates as torch's optimizers give them. `DistributedOptimizer` has tensors by the two methods above."""
        count = itertools.count()
        groups = [{**group, "params": [next(count) for _ in group["params"]]} for group in self.param_groups]
        steps = {index: {"step": torch.tensor(float(group["step"]))} for group in groups for index in group["params"]}
        return {"state": steps, "param_groups": groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Only the count of steps: rates are the config's."""
        for group, loaded in zip(self.param_groups, state["param_groups"], strict=True):
            group["step"] = int(loaded["step"])

    def _shards(self) -> list[torch.Tensor]:
        return [shard for group in self.param_groups for shard in group["params"]]

    def _pieces(self) -> Iterator[_Piece]:
        for group in self.param_groups:
            for shard in group["params"]:
                held = self.state[shard]
                whole = (shard, shard.decoupled_grad, held["master_param"], held["exp_avg"], held["exp_avg_sq"])
                for parts in zip(*(tensor.split(PIECE) for tensor in whole), strict=True):
                    yield _Piece(group, *parts)


def _step_piece(piece: _Piece, staging: _Staging, arrived: torch.cuda.Event | None) -> None:
    """Step `piece`, whose gradient is in `staging` once `arrived`, and begin to copy its weights to the accelerator. Weights of an
    earlier piece have left this staging: their copy was put on the stream before that of this gradient."""
    if arrived is not None:
        arrived.synchronize()
    group, size = piece.group, len(piece.model_weights)
    adamw(
        [piece.master_weights],
        [staging.gradient[:size]],
        [piece.exp_avg],
        [piece.exp_avg_sq],
        [],
        [torch.tensor(float(group["step"] - 1))],  # which it counts up
        fused=True,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
    staging.model_weights[:size].copy_(piece.master_weights)
    piece.model_weights.copy_(staging.model_weights[:size], non_blocking=True)


def move_to_host(optimizers: Sequence[Any]) -> None:
    """Give each of Megatron's `optimizers`, which were made without master weights and have taken no step, a `HostAdamW`."""
    for one in optimizers:
        one.optimizer = HostAdamW(one.optimizer.param_groups)


def is_on_host(one: Any) -> bool:
    """Whether the state of this one of Megatron's optimizers is in the host's memory."""
    return isinstance(one.optimizer, HostAdamW)


def master_of(one: Any, parameter: Any) -> torch.Tensor | None:
    """This rank's master weights of `parameter` in this one of Megatron's optimizers, flat; None where the parameter has them
    itself."""
    if is_on_host(one):
        group, order = one.model_param_group_index_map[parameter]
        return one.optimizer.state[one.optimizer.param_groups[group]["params"][order]]["master_param"]
    return None if parameter.dtype is torch.float32 else parameter.main_param
