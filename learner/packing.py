"""From a batch to micro-batches: which sequences go together, and their tensors.

    TrainBatch ──minibatches──> TrainBatch ──split over ranks, packed──> MicroBatch

Invariants:
- Rows are packed without padding: one flat axis of N tokens, cut into sequences by `cu_seqlens`.
- Every sequence appears exactly once; the same batch gives the same micro-batches on every rank.
- A micro-batch stays within the token budget, unless it is a single longer sequence.
- Sequences with a common prefix go together where the backend computes it once (`shares_prefixes`). The prefix then counts once.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ..buffer.trajectory import Trajectory
from ..common.images import PlacedImage, moved_images
from .batch import TrainBatch, by_token, make_batch, supervised, trainable
from .distributed import gather_rows, tensor_of_first

ATTENTION_EVEN_LENGTH = 24_576  # tokens at which attention costs as much as the matrices, for a hidden size of 2048
NO_FILES: Mapping[str, bytes] = {}
BUNDLES = 4  # least number of bundles per rank, of several ranks: with fewer, the ranks' work would differ much
Head = tuple[Hashable, int]  # a key for the prefix of a sequence, and its tokens; sequences with equal heads share them
LEAST = 16  # shortest prefix that is worth a copy of its keys and values, in tokens
# A shared prefix is at least one in so many tokens of its sequence: after one, attention computes a whole square, not half of it.
LEAST_SHARE = 4


class MicroBatch(msgspec.Struct, frozen=True):
    """One micro-batch: S sequences, N tokens in all."""

    token_ids: torch.Tensor  # int64[N]
    position_ids: torch.Tensor  # int64[N], restarting at 0 with each sequence
    cu_seqlens: tuple[int, ...]  # S + 1 offsets, from 0 to N
    loss_mask: torch.Tensor  # bool[N], tokens that carry loss; false at the first token of each sequence
    behavior_logprobs: torch.Tensor  # float32[N], of the policy that sampled them, 0 where not trained
    proximal_logprobs: torch.Tensor  # float32[N], at the start of this step, 0 where not trained; NaN where unknown
    advantages: torch.Tensor  # float32[N], 0 where not trained
    # int32[N], learner version minus the version that sampled the token, -1 where not trained, and at tokens of expert traces
    staleness: torch.Tensor
    mixed: torch.Tensor  # bool[N], trained tokens from keys and values of older weights too; no version gives these
    positive: torch.Tensor  # bool[N], trained tokens of episodes whose reward is above 0
    reference_logprobs: torch.Tensor | None = None  # float32[N], 0 where not trained; None: no reference
    # int64[N, k] and float32[N, k]: the tokens that a teacher finds likeliest, and its log-probs of them; None: not needed
    teacher_ids: torch.Tensor | None = None
    teacher_logprobs: torch.Tensor | None = None
    # float32[N, k], of the policy that is stepped, with a gradient; the backend gives them to a loss, where there are `teacher_ids`
    candidate_logprobs: torch.Tensor | None = None
    values: torch.Tensor | None = None  # float32[N], an aux model's outputs before the batch, 0 where not trained
    returns: torch.Tensor | None = None  # float32[N], a critic's targets, 0 where not trained; None where there is none
    # uint8 or int32[N, layers, top_k], see `TrainBatch.experts`; None where no token has a record
    experts: torch.Tensor | None = None
    images: tuple[PlacedImage, ...] = ()  # by positions in the row, in order
    image_files: Mapping[str, bytes] = {}  # theirs, by digest
    carried: Mapping[str, float] = {}  # numbers that the algorithm carries from step to step, by name
    ids: tuple[str, ...] = ()  # S trajectory ids, empty for sequences that are of none
    episodes: tuple[int, ...] = ()  # of each sequence the episode that it is a branch of, the same number on all ranks
    groups: tuple[
        int, ...
    ] = ()  # of each sequence the task group of its episode; empty for sequences of none, as `rewards`
    rewards: tuple[float, ...] = ()  # of each sequence the return of its episode

    def to(self, device: torch.device) -> MicroBatch:
        tensors = {k: v.to(device) for k, v in msgspec.structs.asdict(self).items() if isinstance(v, torch.Tensor)}
        return msgspec.structs.replace(self, **tensors)


def minibatches(batch: TrainBatch, count: int, *, by_episode: bool = False) -> list[TrainBatch]:
    """At most `count` parts of nearly equal work, none empty: one optimizer step each. With `by_episode` all branches of an episode
    are in one."""
    return [batch.select(part) for part in _parts(batch, count, by_episode)]


def plan_steps(
    batch: TrainBatch,
    count: int,
    rank: int,
    world_size: int,
    budget: int,
    *,
    shares_prefixes: bool,
    by_episode: bool = False,
) -> list[list[list[int]]]:
    """Of each of at most `count` optimizer steps the micro-batches of `rank`, as indices of the sequences of `batch`.
    `microbatches` of each of `minibatches` are the same; this needs no token ids and no log-probs."""
    found = []
    for part in _parts(batch, count, by_episode):
        shares = _shares(batch.select(part), world_size, budget, shares_prefixes)
        found.append([[part[i] for i in row] for row in shares[rank]])
    return found


def _parts(batch: TrainBatch, count: int, by_episode: bool) -> list[list[int]]:
    """The sequences of each of `minibatches`, in order."""
    _, unit = np.unique(batch.episode if by_episode else np.arange(len(batch)), return_inverse=True)
    costs = np.bincount(unit, [cost(size) for size in batch.sizes.tolist()])
    return [np.flatnonzero(np.isin(unit, part)).tolist() for part in split(costs.tolist(), count) if part]


def microbatches(
    batch: TrainBatch, rank: int, world_size: int, budget: int, *, shares_prefixes: bool = False
) -> list[MicroBatch]:
    """The micro-batches of `rank`, each of at most `budget` tokens or a single longer sequence; may be empty."""
    return [to_microbatch(batch.select(row)) for row in _shares(batch, world_size, budget, shares_prefixes)[rank]]


def _shares(batch: TrainBatch, world_size: int, budget: int, shares_prefixes: bool) -> list[list[list[int]]]:
    return share(batch.sizes.tolist(), world_size, budget, _heads(batch) if shares_prefixes else None)


def _heads(batch: TrainBatch) -> list[Head]:
    """Of each sequence its prefix before the first token with loss, where sharing it is faster; else a unique key. Without the
    token ids a prefix is known by its hash, and only where it ends at the first sampled token."""
    heads: list[Head] = []
    for i, (start, end) in enumerate(zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True)):
        size = int(batch.loss_mask[start:end].argmax())
        if not sharing_pays(size, end - start):
            heads.append((i, 0))
        elif batch.prompts is None:
            seen = () if batch.images is None else tuple(one.digest for one in batch.images[i] if one.end <= size)
            routed = b"" if batch.experts is None else batch.experts[start : start + size].tobytes()
            heads.append(((batch.token_ids[start : start + size].tobytes(), seen, routed), size))
        else:
            whole = size == int(batch.sampled[start:end].argmax())
            heads.append((int(batch.prompts[i]), size) if whole else (("own", i), 0))
    return heads


def to_microbatch(batch: TrainBatch) -> MicroBatch:
    """All sequences of `batch` as tensors. Proximal log-probs are NaN at tokens with loss until `with_proximal`."""
    starts = np.repeat(batch.offsets[:-1], batch.sizes)
    placed = zip(batch.images or (), batch.offsets.tolist(), strict=False)
    images = tuple(chain.from_iterable(moved_images(some, start) for some, start in placed))
    return MicroBatch(
        token_ids=torch.from_numpy(batch.token_ids.astype(np.int64)),
        position_ids=torch.from_numpy(np.arange(len(starts)) - starts),
        cu_seqlens=tuple(batch.offsets.tolist()),
        loss_mask=_tensor(batch.loss_mask),
        behavior_logprobs=_tensor(batch.behavior_logprobs),
        proximal_logprobs=torch.from_numpy(np.where(batch.loss_mask, np.float32("nan"), np.float32(0))),
        advantages=torch.from_numpy(batch.advantages.astype(np.float32)),
        staleness=_tensor(batch.staleness),
        mixed=_tensor(batch.mixed),
        positive=torch.from_numpy(batch.loss_mask & np.repeat(batch.positive, batch.sizes)),
        reference_logprobs=None if batch.reference_logprobs is None else _tensor(batch.reference_logprobs),
        teacher_ids=None if batch.teacher_ids is None else torch.from_numpy(batch.teacher_ids.astype(np.int64)),
        teacher_logprobs=None if batch.teacher_logprobs is None else _tensor(batch.teacher_logprobs),
        values=None if batch.values is None else _tensor(batch.values),
        returns=None if batch.returns is None else _tensor(batch.returns),
        experts=None if batch.experts is None else _expert_tensor(batch.experts),
        images=images,
        image_files={image.digest: batch.image_files[image.digest] for image in images},
        carried=batch.carried,
        ids=batch.ids,
        episodes=tuple(batch.episode.tolist()),
        groups=tuple(batch.groups[batch.episode].tolist()) if len(batch.groups) else (),
        rewards=tuple(batch.rewards[batch.episode].tolist()) if len(batch.groups) else (),
    )


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _expert_tensor(experts: NDArray[Any]) -> torch.Tensor:
    return _tensor(experts if experts.dtype == np.uint8 else experts.astype(np.int32))


def scoring_microbatch(sequences: Sequence[Sequence[int]]) -> MicroBatch:
    """A micro-batch for `Backend.logprobs` over every token but the first of each sequence."""
    return to_microbatch(supervised([(ids, [True] * len(ids)) for ids in sequences]))


def with_proximal(microbatch: MicroBatch, logprobs: torch.Tensor) -> MicroBatch:
    """`microbatch` with the log-probs of the policy as it was before the batch's first step."""
    return msgspec.structs.replace(microbatch, proximal_logprobs=torch.where(microbatch.loss_mask, logprobs, 0.0))


def without_candidates(microbatch: MicroBatch) -> MicroBatch:
    """`microbatch` without the teacher's likeliest tokens, k numbers for each token and a gradient, which only a loss needs."""
    return msgspec.structs.replace(microbatch, teacher_ids=None, teacher_logprobs=None, candidate_logprobs=None)


def mismatch(microbatches: Sequence[MicroBatch]) -> tuple[float, int]:
    """Largest |learner - engine| log-prob in nats over this rank's tokens of staleness 0, 0 where there are none; their number.
    Tokens of a mixed policy are left out: the engine computed them from other keys and values."""
    gaps = [
        (m.proximal_logprobs - m.behavior_logprobs)[m.loss_mask & (m.staleness == 0) & ~m.mixed].abs()
        for m in microbatches
    ]
    return max((float(gap.max()) for gap in gaps if len(gap)), default=0.0), sum(len(gap) for gap in gaps)


def comparable_tokens(batch: TrainBatch) -> int:
    """The tokens that `mismatch` is over, whichever rank computes their log-probs: in a pipeline only the last stage does."""
    return int((batch.loss_mask & (batch.staleness == 0) & ~batch.mixed).sum())


def fresh_microbatches(
    trajectories: Sequence[Trajectory], version: int, budget: int, image_files: Mapping[str, bytes] = NO_FILES
) -> list[MicroBatch]:
    """Micro-batches that score exactly the tokens that `version` sampled; none where there are no such tokens. `image_files` has
    those of their images, by digest."""
    batch = msgspec.structs.replace(by_token(trajectories, version), image_files=image_files)
    return microbatches(trainable(batch, 0), rank=0, world_size=1, budget=budget)


def microbatches_of_first(
    microbatches: Sequence[MicroBatch], device: torch.device, group: dist.ProcessGroup
) -> Sequence[MicroBatch]:
    """Collective over `group`. The micro-batches of its first rank on all of them: tokens, cuts, loss mask and experts only."""
    if group.size() == 1:
        return microbatches
    columns = [
        torch.stack([torch.full_like(m.token_ids, index), m.token_ids, m.position_ids, m.loss_mask.long()], 1)
        for index, m in enumerate(microbatches if group.rank() == 0 else ())
    ]
    table = gather_rows(torch.cat([torch.empty(0, 4, dtype=torch.float64), *columns]), device, group).long()
    found = []
    for index in range(int(table[:, 0].max()) + 1 if len(table) else 0):
        _, token_ids, position_ids, loss_mask = table[table[:, 0] == index].numpy().T
        sizes = np.diff(np.append(np.flatnonzero(position_ids == 0), len(position_ids)))
        found.append(to_microbatch(make_batch(token_ids.astype(np.int32), loss_mask.astype(np.bool_), sizes)))
    experts = [m.experts for m in microbatches] if group.rank() == 0 else [None] * len(found)
    return [
        msgspec.structs.replace(one, experts=tensor_of_first(mine, device, group))
        for one, mine in zip(found, experts, strict=True)
    ]


# --- which sequences go together: pure functions of lengths


def cost(length: int) -> float:
    """Work of one sequence in tokens: linear in the matrices, quadratic in attention."""
    return length * (1.0 + length / ATTENTION_EVEN_LENGTH)


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Micro-batches of at most `budget` tokens by first-fit decreasing (Johnson 1973), as indices into `lengths`."""
    microbatches: list[list[int]] = []
    free: list[int] = []  # tokens of the budget that each of them has left
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        first_fit = next((m for m, tokens in enumerate(free) if tokens >= lengths[index]), None)
        if first_fit is None:
            microbatches.append([index])
            free.append(budget - lengths[index])
        else:
            microbatches[first_fit].append(index)
            free[first_fit] -= lengths[index]
    return microbatches


def share(
    lengths: Sequence[int], parts: int, budget: int, heads: Sequence[Head] | None = None
) -> list[list[list[int]]]:
    """For each of `parts` ranks its micro-batches of at most `budget` tokens, as indices into `lengths`, of nearly equal cost.
    Equal `heads` are computed once in a micro-batch."""
    heads = heads or [(i, 0) for i in range(len(lengths))]
    bundles = bundle(lengths, heads, budget if parts == 1 else min(budget, sum(lengths) // (BUNDLES * parts)))
    sizes = [sum(lengths[i] for i in one) - heads[one[0]][1] * (len(one) - 1) for one in bundles]
    shares = split([cost(size) for size in sizes], parts)
    return [
        [list(chain.from_iterable(bundles[part[i]] for i in row)) for row in pack([sizes[i] for i in part], budget)]
        for part in map(sorted, shares)
    ]


def bundle(lengths: Sequence[int], heads: Sequence[Head], limit: int) -> list[list[int]]:
    """Indices of sequences with equal heads together, at most `limit` tokens with each head counted once, or a single sequence."""
    bundles: list[list[int]] = []
    open_ones: dict[Head, tuple[list[int], int]] = {}
    for index, (length, head) in enumerate(zip(lengths, heads, strict=True)):
        one, size = open_ones.get(head, ([], 0))
        own = length - head[1] if one else length
        if one and size + own > limit:
            one, size, own = [], 0, length
        if not one:
            bundles.append(one)
        one.append(index)
        open_ones[head] = (one, size + own)
    return bundles


def split(costs: Sequence[float], parts: int) -> list[list[int]]:
    """`parts` lists of indices with nearly equal total cost, at most 4/3 of the best possible maximum: longest first to the least
    loaded (Graham 1969). Lists are empty where there are fewer items than parts."""
    shares: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0.0, part) for part in range(parts)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, part = heapq.heappop(loads)
        shares[part].append(index)
        heapq.heappush(loads, (load + costs[index], part))
    return shares


def sharing_pays(size: int, length: int) -> bool:
    """Whether it is faster for a sequence of `length` tokens to share the first `size` of them."""
    return size >= LEAST and size * LEAST_SHARE >= length
