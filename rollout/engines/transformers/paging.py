"""Scheduling and KV cache layout: transformers' continuous batching, one forward pass at a time.

Three things differ from transformers' own paged cache and scheduler: the cache shares prefixes only within a salt, waiting
sequences are ordered by priority, and batches are laid out for `attention.paged_attention`.

Invariants:
- A sequence that lost its keys and values keeps its position in the queue: before later ones of equal priority.
- A batch holds queries in the order of its layouts: sequences that decode by length class, then prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState
from transformers.generation.continuous_batching.scheduler import FIFOScheduler

from ....common.images import PlacedImage
from .attention import Layout

PAGE = 32  # tokens per KV block. Shared prefixes are whole blocks; chat turns are short.


class SaltedCache(PagedAttentionCache):
    """A paged KV cache of `blocks` blocks of `PAGE` tokens, whose prefixes are shared within a salt only. Blocks are found by a
    chain of hashes over token ids. For hashing, the ids of an image's tokens are replaced by a number that is unique to the image,
    and then the first of a sequence by one that is unique to the pair of salt and what is there, an image's number too: chains of
    different salts or images are never equal."""

    def __init__(self, config: PreTrainedConfig, blocks: int, device: torch.device, dtype: torch.dtype) -> None:
        options = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=blocks,
            max_batch_tokens=1,  # sizes transformers' own batch tensors, which are not used here
            max_blocks_per_request=0,
            use_async_batching=False,
            use_cuda_graph=False,
            max_memory_percent=1.0,
        )
        super().__init__(config, options, device, DistributedHelper(None, None), dtype, True)
        self.salts: dict[str, str] = {}  # by sequence, which must be here before it is scheduled
        self.images: dict[str, Sequence[PlacedImage]] = {}  # by sequence, of those that have some
        self._heads: dict[tuple[str, int], int] = {}
        self._seen: dict[str, int] = {}

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        return super().search_prefix_match(request_id, self._salted(request_id, prompt_ids))

    def mark_complete_blocks(self, state: RequestState, complete_blocks: dict[str, int]) -> None:
        if complete_blocks:
            tokens = self._salted(state.request_id, state.initial_tokens + state.generated_tokens)
            for kind, count in complete_blocks.items():
                self.cache_allocators[kind].mark_complete_blocks(state.request_id, tokens, count)

    def reset(self) -> None:
        """Drop all keys and values, cached prefixes included."""
        super().reset()
        self._heads.clear()
        self._seen.clear()

    def free(self) -> None:
        """Drop all keys and values, and free their memory until `allocate`. Layers keep their views of it."""
        self.reset()
        self.cache_tensor.untyped_storage().resize_(0)

    def allocate(self) -> None:
        self.cache_tensor.untyped_storage().resize_(self.cache_tensor.nbytes)
        self.cache_tensor.zero_()  # what is masked must be finite

    def usage(self) -> float:
        """Share of the cache that sequences hold; cached prefixes do not count, because they are evicted on demand."""
        kept = sum(len(a.ledger.cached_blocks) * a.bytes_per_block for a in self.cache_allocators.values())
        free = self.compute_free_capacity(relative=False) + kept
        return 1.0 - free / (self.num_sectors * self.bytes_per_sector)

    def _salted(self, request_id: str, tokens: list[int]) -> list[int]:
        # Block hashes take 32 bit signed ids: real ones are not negative, these are.
        salted = list(tokens)
        for image in self.images.get(request_id, ()):
            number = self._seen.setdefault(image.digest, self._unused())
            salted[image.start : image.end] = [number] * (image.end - image.start)
        salted[0] = self._heads.setdefault((self.salts[request_id], salted[0]), self._unused())
        return salted

    def _unused(self) -> int:
        return -1 - len(self._heads) - len(self._seen)


class PriorityScheduler(FIFOScheduler):
    """Decoding sequences first, then the waiting ones by (priority, arrival), as in `ranks`."""

    def __init__(self, cache: PagedAttentionCache, max_concurrent: int) -> None:
        super().__init__(cache, safety_margin=0.0, max_requests_per_batch=max_concurrent)
        self.ranks: dict[str, tuple[int, int]] = {}

    def _get_waiting_candidates(self) -> list[RequestState]:
        return sorted(self.waiting_requests.values(), key=lambda state: self.ranks[state.request_id])


def lay_out(
    cache: PagedAttentionCache, scheduled: list[FutureRequestState], device: torch.device
) -> tuple[tuple[FutureRequestState, ...], dict[str, Any]]:
    """What the scheduler chose as one forward pass: the sequences in the order of their queries, and the arguments of the model's
    `forward`. Those that get a token are the rows of the logits, in order. Counts the tokens as cached."""
    decodes = sorted((r for r in scheduled if r.query_length == 1), key=lambda r: r.state.position_offset)
    classes = [tuple(group) for _, group in groupby(decodes, key=_length_class)]
    prompts = tuple(r for r in scheduled if r.query_length > 1)
    requests = (*(r for group in classes for r in group), *prompts)
    layouts = {kind: _layout(cache, kind, classes, prompts, device) for kind in cache.cache_allocators}
    tokens, positions, last = [], [], []
    for request in requests:
        state = request.state
        tokens += state.tokens_to_process
        positions += range(state.position_offset, state.position_offset + request.query_length)
        state.position_offset += request.query_length
        if request.has_new_token:
            last.append(len(tokens) - 1)
    inputs = {
        "input_ids": torch.tensor([tokens], device=device),
        "position_ids": torch.tensor([positions], device=device),
        "logits_to_keep": torch.tensor(last, dtype=torch.int64, device=device),
        "layouts": layouts,
        "cache": cache,
        "use_cache": False,
    }
    return requests, inputs


def _layout(
    cache: PagedAttentionCache,
    kind: str,
    classes: list[tuple[FutureRequestState, ...]],
    prompts: tuple[FutureRequestState, ...],
    device: torch.device,
) -> Layout:
    """Where the keys of a batch lie for one kind of layers; called before the batch's tokens are counted as cached."""
    allocator = cache.cache_allocators[kind]
    read: list[int] = []
    write: list[int] = []
    groups = []
    for group in classes:
        rows = [allocator.get_read_indices(r.state.request_id, r.state.position_offset, 1) for r in group]
        width = max(map(len, rows))
        for request, row in zip(group, rows, strict=True):
            read += row
            read += [allocator.read_trash_index] * (width - len(row))
            write += allocator.get_write_indices(request.state.request_id, request.state.position_offset, 1)
        lengths = torch.tensor([len(row) for row in rows], device=device)
        mask = torch.arange(width, device=device) < lengths[:, None]
        groups.append(mask[:, None, None])
    cached = bool(classes) or any(r.state.position_offset for r in prompts)
    sizes = []
    for request in prompts:
        where = request.state.request_id, request.state.position_offset, request.query_length
        if cached:
            read += allocator.get_read_indices(*where)
        write += allocator.get_write_indices(*where)
        sizes.append(
            (request.query_length, allocator.get_seqlen_k(request.state.position_offset, request.query_length))
        )
    return Layout(
        torch.tensor(read, dtype=torch.int64, device=device),
        torch.tensor(write, dtype=torch.int64, device=device),
        tuple(groups),
        tuple(sizes),
    )


def _length_class(request: FutureRequestState) -> int:
    """Sequences of one class differ by less than a factor of two: at most half of what is read for them is padding."""
    return (request.state.position_offset // PAGE).bit_length()
