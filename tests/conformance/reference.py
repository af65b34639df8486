"""What transformers computes: the reference for every server."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from slipstream.agents.base import Completion
from slipstream.tests import tiny
from transformers import DynamicCache, PreTrainedModel

TOLERANCE = 1e-4
"""nats, in float32; `Server.tolerance` is that of one server."""


def rows(
    model: PreTrainedModel, prompt: Sequence[int], completion: Completion, temperature: float = 1.0
) -> torch.Tensor:
    """float32[n, vocabulary]: log-probs that each of the n sampled tokens was drawn from, all of it under `model`."""
    logprobs = tiny.logprobs(model, [*prompt, *completion.token_ids])[len(prompt) - 1 :]
    return (logprobs / temperature).log_softmax(-1)


def mixed_rows(
    old: PreTrainedModel, new: PreTrainedModel, prompt: Sequence[int], completion: Completion, boundary: int
) -> torch.Tensor:
    """float32[n - boundary, vocabulary]: log-probs of the tokens from `boundary` on where the old keys and values were kept.

    The old model has computed the keys and values of everything before the last old token; that token is the first input of the
    new one, as its successor was not sampled yet when the weights changed.
    """
    before = torch.tensor([[*prompt, *completion.token_ids[: boundary - 1]]])
    after = torch.tensor([completion.token_ids[boundary - 1 : -1]])
    cache = DynamicCache(config=old.config)
    with torch.no_grad():
        old(before, past_key_values=cache, use_cache=True)
        return new(after, past_key_values=cache, use_cache=True).logits[0].float().log_softmax(-1)


def nucleus(rows: torch.Tensor, mass: float) -> torch.Tensor:
    """float32[n, vocabulary]: `rows` truncated to the likeliest tokens before which less than `mass` lies, renormalized."""
    likeliest, order = rows.sort(descending=True)
    probabilities = likeliest.double().exp()
    likeliest[probabilities.cumsum(-1) - probabilities > mass] = -torch.inf
    return torch.empty_like(rows).scatter_(1, order, likeliest).log_softmax(-1)


def deviations(rows: torch.Tensor, token_ids: Sequence[int], logprobs: Sequence[float]) -> torch.Tensor:
    """float32[n]: differences in nats between the log-probs that a server gave its tokens and those in `rows`."""
    ours = rows.gather(1, torch.tensor(token_ids)[:, None])[:, 0]
    return (ours - torch.tensor(logprobs)).abs()


def error(rows: torch.Tensor, token_ids: Sequence[int], logprobs: Sequence[float]) -> float:
    """The largest of `deviations`."""
    return float(deviations(rows, token_ids, logprobs).max())


def greedy(rows: torch.Tensor, token_ids: Sequence[int], tolerance: float) -> bool:
    """Whether each token is the likeliest; of two that are equal within `tolerance` nats either may be chosen."""
    ours = rows.gather(1, torch.tensor(token_ids)[:, None])[:, 0]
    return bool((ours >= rows.max(-1).values - tolerance).all())
