"""Advantages and losses that are functions of one's own, `kind: python`, and what is checked of them before anything starts.

    advantage(batch: TrainBatch, carried: dict[str, float]) -> one number for each of E episodes, or for each of N tokens
    loss(tokens: Tokens) -> float[K], the loss of each trained token, whose gradient reaches `tokens.current`

`carried` holds numbers from step to step: what the function writes there it finds at the next step, also after a resume, since
checkpoints hold it; a loss reads them in `tokens.carried`. Every rank calls the function with the same batch and must get the same.

Invariants:
- What a function gives is checked at each step: its shape, and that it is finite. The error names the key and the function.
- `check` calls it on made-up batches: the same twice, whatever the order of episodes, and for a loss with a gradient. They have the
  columns that the run's first batch has, and the loss what the advantage wrote in `carried`.
- A row that only pads the number of passes has no token, no reference and no `carried`: the loss is not called for it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...common.targets import load_target
from ...configs.algorithm import Algorithm, KlInReward, PythonFunction, needs_reference
from ...errors import ConfigError, LearnerError, describe_user_error
from ..batch import TrainBatch, concatenate, make_batch
from .divergence import coefficient_of, kl_estimate
from .estimators import at_episodes
from .policy_loss import Surrogate, Tokens

ADVANTAGE, LOSS = "learner.algorithm.advantage.function", "learner.algorithm.loss.function"


@cache
def _load(key: str, target: str) -> Callable[..., Any]:
    return load_target(key, target)


def advantage(config: PythonFunction, batch: TrainBatch) -> NDArray[np.float64]:
    """What the user's function gives, float64[N]; NaN outside of turns where it gives one number for each episode."""
    name, function = f"{ADVANTAGE}: {config.function}", _load(ADVANTAGE, config.function)
    try:
        found = np.asarray(function(batch, batch.carried), dtype=np.float64)
    except Exception as error:  # user code
        raise LearnerError(f"{name}: {describe_user_error(error)}") from error
    for number, value in batch.carried.items():
        if not isinstance(value, float) or not np.isfinite(value):
            raise LearnerError(f"{name}: carried[{number!r}] is {value!r}; it must be a float that is finite")
    episodes, tokens = len(batch.rewards), len(batch.token_ids)
    if found.shape not in ((episodes,), (tokens,)):
        raise LearnerError(
            f"{name} gave an array of shape {found.shape}; it must be ({episodes},), one number for each episode, or "
            f"({tokens},), one for each token"
        )
    judged = found if found.shape == (episodes,) else found[batch.sampled]
    if not np.isfinite(judged.astype(np.float32)).all():
        raise LearnerError(f"{name} gave a number that is not finite in float32")
    if found.shape == (episodes,):
        return at_episodes(batch, found)
    return np.where(batch.sampled, found, np.nan)


def loss(config: PythonFunction, tokens: Tokens) -> Surrogate:
    """What the user's function gives; no token counts as clipped."""
    name, function = f"{LOSS}: {config.function}", _load(LOSS, config.function)
    unclipped = torch.zeros_like(tokens.selected)
    if not len(tokens.current):
        return Surrogate(tokens.current, unclipped)
    try:
        found = function(tokens)
    except Exception as error:  # user code
        raise LearnerError(f"{name}: {describe_user_error(error)}") from error
    if not isinstance(found, torch.Tensor) or found.shape != tokens.current.shape:
        shape = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        raise LearnerError(f"{name} gave {shape}; it must be a tensor of shape {tuple(tokens.current.shape)}")
    return Surrogate(found, unclipped)


# --- before anything starts


def check(algorithm: Algorithm, envs: Sequence[str] = ("environment",)) -> None:
    """Raises ConfigError where a function of one's own cannot be loaded, or does not do on made-up batches what it must. `envs` are
    the names of the run's environments."""
    carried: Mapping[str, float] = {}
    try:
        if isinstance(algorithm.advantage, PythonFunction):
            carried = _check_advantage(algorithm.advantage, partial(_made_up, algorithm, envs))
        if isinstance(algorithm.loss, PythonFunction):
            _check_loss(algorithm.loss, partial(_made_up_tokens, needs_reference(algorithm), carried))
    except LearnerError as error:
        raise ConfigError(f"{error} (in a made-up batch, before the start)") from error


def _check_advantage(config: PythonFunction, made_up: Callable[[NDArray[np.int64]], TrainBatch]) -> Mapping[str, float]:
    """What the function leaves in `carried`."""
    name = f"{ADVANTAGE}: {config.function}"
    rng = np.random.default_rng(0)
    order = rng.permutation(_EPISODES)
    plain, again, other = (made_up(o) for o in (np.arange(_EPISODES), np.arange(_EPISODES), order))
    first, second, shuffled = (advantage(config, batch) for batch in (plain, again, other))
    if not np.array_equal(first, second, equal_nan=True) or plain.carried != again.carried:
        raise ConfigError(f"{name} gives something else when it is called again; each rank must get the same")
    moved = {name: values for name, values in zip(plain.ids, np.split(first, plain.offsets[1:-1]), strict=True)}
    for episode, values in zip(other.ids, np.split(shuffled, other.offsets[1:-1]), strict=True):
        if not np.allclose(values, moved[episode], rtol=1e-6, atol=1e-9, equal_nan=True):
            raise ConfigError(
                f"{name}: the advantages of an episode depend on the order of the episodes in the batch; use batch.groups, "
                "which says which episodes belong together"
            )
    return plain.carried


def _check_loss(config: PythonFunction, made_up: Callable[[torch.Tensor], Tokens]) -> None:
    name = f"{LOSS}: {config.function}"
    tokens = made_up(torch.arange(_TOKENS))
    plain = loss(config, tokens).loss
    if not plain.isfinite().all():
        raise ConfigError(f"{name} gives a loss that is not finite")
    if not plain.requires_grad:
        raise ConfigError(f"{name}: no gradient reaches tokens.current; do not detach it")
    (slope,) = torch.autograd.grad(plain.sum(), tokens.current, allow_unused=True)
    if slope is None or not slope.any() or not slope.isfinite().all():
        raise ConfigError(
            f"{name}: the gradient by tokens.current is {'not finite' if slope is not None and slope.any() else '0'}"
        )
    order = torch.randperm(_TOKENS, generator=torch.Generator().manual_seed(0))
    if not torch.allclose(loss(config, made_up(order)).loss, plain[order], rtol=1e-4, atol=1e-6):
        raise ConfigError(
            f"{name}: the loss of a token depends on its place in the row; use tokens.sequence and tokens.lengths"
        )


_EPISODES, _TOKENS = 7, 12


class _Metrics(dict[str, float]):
    """Reports a number for whichever metric is asked for."""

    def __missing__(self, name: str) -> float:
        return random.Random(f"{name} of {self['episode']}").random()


def _made_up(algorithm: Algorithm, envs: Sequence[str], order: NDArray[np.int64]) -> TrainBatch:
    """Three groups of seven episodes of one or two branches, in this order, as `algorithm` has them scored."""
    rng = np.random.default_rng(1)
    groups, rewards = np.array([0, 0, 0, 1, 1, 1, 2]), rng.normal(size=_EPISODES)
    sizes, branches = rng.integers(3, 9, (_EPISODES, 2)), np.array([1, 2, 1, 1, 2, 1, 1])
    logprobs, chosen = (
        -rng.exponential(size=(_EPISODES, 2, 9)),
        [(e, b) for e in order.tolist() for b in range(branches[e])],
    )
    lengths = np.array([sizes[e, b] for e, b in chosen])
    sampled = np.concatenate([np.arange(n) > 1 for n in lengths])
    turn = np.where(sampled, np.repeat(np.arange(len(chosen)), lengths), -1).astype(np.int32)
    behavior = np.concatenate([logprobs[e, b, : sizes[e, b]] for e, b in chosen])
    behavior, scored = (np.where(sampled, column, 0).astype(np.float32) for column in (behavior, 0.9 * behavior))
    penalties, kl = None, algorithm.kl
    if isinstance(kl, KlInReward):
        divergence = kl_estimate(kl.estimator, torch.from_numpy(behavior), torch.from_numpy(scored)).numpy()
        penalties = (coefficient_of(kl, {}) * divergence).astype(np.float32)
    return make_batch(
        np.zeros(len(sampled), dtype=np.int32),
        sampled,
        lengths,
        turn=turn,
        behavior_logprobs=behavior,
        reference_logprobs=scored if needs_reference(algorithm) else None,
        penalties=penalties,
        episode=np.repeat(np.arange(_EPISODES), branches[order]),
        ids=tuple(f"{e}.{b}" for e, b in chosen),
        episode_ids=tuple(map(str, order.tolist())),
        groups=np.unique(groups[order], return_inverse=True)[1],
        rewards=rewards[order],
        lengths=np.array([(sizes[e, : branches[e]] - 2).sum() for e in order.tolist()]),
        turns=branches[order],
        steps=branches[order],
        step_rewards=concatenate([np.full(branches[e], rewards[e] / branches[e]) for e in order.tolist()], np.float64),
        greedy=np.zeros(_EPISODES, dtype=np.bool_),
        masked=np.zeros(_EPISODES, dtype=np.bool_),
        positive=np.array([rewards[e] > 0 for e, _ in chosen]),
        envs=tuple(envs[int(groups[e]) % len(envs)] for e in order.tolist()),
        metrics=tuple(_Metrics(episode=float(e)) for e in order.tolist()),
        carried={},
    )


def _made_up_tokens(referred: bool, carried: Mapping[str, float], order: torch.Tensor) -> Tokens:
    """Twelve tokens of three sequences, in this order; `referred`: there is a reference policy."""
    generator = torch.Generator().manual_seed(2)
    behavior, proximal, current, advantages = torch.randn(4, _TOKENS, generator=generator) * 0.1 - 1.0
    sequence = torch.arange(_TOKENS) % 3
    return Tokens(
        current=current[order].requires_grad_(),
        proximal=proximal[order],
        behavior=behavior[order],
        advantages=(advantages + 1.0)[order] * 10,
        entropy=torch.ones(_TOKENS),
        sequence=sequence[order],
        staleness=torch.zeros(_TOKENS, dtype=torch.int32),
        lengths=torch.bincount(sequence, minlength=3),
        selected=torch.zeros(_TOKENS, dtype=torch.bool),
        positive=(advantages + 1.0)[order] > 0,
        reference=proximal[order] if referred else None,
        carried=carried,
    )
