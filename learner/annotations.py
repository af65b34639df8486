"""Token annotations of the learner: what the loss computed at each token of some groups of each batch.

    TrainBatch ──choose──> trajectories of whole groups        rows of a step ──of──> loss ──finish──> TokenAnnotations

Invariants:
- Whole groups are kept, so that members can be compared: at least one, and more as long as they fit. Their ids decide which come
  first, not lengths or rewards; every rank chooses the same.
- The loss and the step are the same with and without it; values stay on the device until `finish`.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection
from itertools import pairwise

import numpy as np
import torch

from ..common.annotations import CLIPPED, DROPPED, TOKEN_BYTES, TRAINED, VALUES, TokenAnnotations
from .backend import PolicyLoss, TokenOutputs, listening
from .batch import TrainBatch
from .packing import MicroBatch, without_candidates

FLOAT16_LIMIT = float(np.finfo(np.float16).max)


def choose(batch: TrainBatch, limit: int) -> frozenset[str]:
    """Ids of the trajectories of `batch` whose annotations take at most `limit` bytes, group by group; of one group at least,
    unless `limit` is 0."""
    groups: dict[str, dict[str, int]] = {}
    traced = batch.traced[batch.offsets[1:] - 1]  # a sequence ends with its last trained token
    for name, size, is_trace in zip(batch.ids, batch.sizes.tolist(), traced.tolist(), strict=True):
        if is_trace:  # no trajectory, of which a reader would know the tokens
            continue
        groups.setdefault(name.partition(".")[0], {})[name] = TOKEN_BYTES * size
    chosen, left = set[str](), limit
    for group in sorted(groups, key=lambda group: (zlib.crc32(group.encode()), group)):
        size = sum(groups[group].values())
        if size <= left or (limit and not chosen):
            chosen.update(groups[group])
            left -= size
    return frozenset(chosen)


class StepAnnotations:
    """Of the trajectories `chosen`, over the optimizer steps of one batch."""

    def __init__(self, chosen: Collection[str]) -> None:
        self._chosen = frozenset(chosen)
        self._seen: list[tuple[MicroBatch, torch.Tensor, torch.Tensor]] = []

    def of(self, loss: PolicyLoss) -> PolicyLoss:
        """`loss`, which is listened to."""
        return listening(loss, self._record_row) if self._chosen else loss

    def _record_row(self, tokens: TokenOutputs, row: MicroBatch) -> None:
        if not self._chosen.isdisjoint(row.ids):
            self._seen.append((without_candidates(row), *_compact(tokens)))

    def finish(self) -> list[TokenAnnotations]:
        """What this rank saw, trajectory by trajectory."""
        found = list[TokenAnnotations]()
        for row, values, flags in self._seen:
            trained, of_trained, flags_of_trained = (one.cpu().numpy() for one in (row.loss_mask, values, flags))
            all_values = np.full((len(VALUES), len(trained)), np.nan, dtype=np.float16)
            all_flags = np.zeros(len(trained), dtype=np.uint8)
            all_values[:, trained], all_flags[trained] = of_trained, flags_of_trained
            for name, (start, end) in zip(row.ids, pairwise(row.cu_seqlens), strict=True):
                if name in self._chosen:
                    found.append(TokenAnnotations(name, all_values[:, start:end], all_flags[start:end]))
        self._seen.clear()
        return found


@torch.no_grad()
def _compact(tokens: TokenOutputs) -> tuple[torch.Tensor, torch.Tensor]:
    """float16[4, K] and uint8[K]."""
    values = torch.stack([getattr(tokens, name) for name in VALUES]).clamp(-FLOAT16_LIMIT, FLOAT16_LIMIT)
    flags = TRAINED + CLIPPED * tokens.clipped.byte() + DROPPED * tokens.dropped.byte()
    return values.half(), flags
