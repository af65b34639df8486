"""Rows that one rank has and the others of its group want: what is scored together must be the same on all of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from .backend import PackedRow
from .batch import supervised, to_row
from .ranks import gather_rows


def rows_of_first(rows: Sequence[PackedRow], device: torch.device, group: dist.ProcessGroup) -> Sequence[PackedRow]:
    """Collective over `group`. What the first of its ranks wants scored, on all of them: rows with tokens, cuts and what is
    trained, and nothing else."""
    if group.size() == 1:
        return rows
    told = [
        torch.stack([torch.full_like(row.token_ids, index), row.token_ids, row.position_ids, row.trained.long()], 1)
        for index, row in enumerate(rows if group.rank() == 0 else ())
    ]
    table = gather_rows(torch.cat([torch.empty(0, 4, dtype=torch.float64), *told]), device, group).long()
    found = []
    for index in range(int(table[:, 0].max()) + 1 if len(table) else 0):
        _, token_ids, position_ids, trained = table[table[:, 0] == index].numpy().T
        cuts = np.flatnonzero(position_ids == 0)[1:]
        sequences = zip(np.split(token_ids, cuts), np.split(trained, cuts), strict=True)
        found.append(to_row([supervised(ids.astype(np.int32), mask.astype(np.bool_)) for ids, mask in sequences]))
    return found
