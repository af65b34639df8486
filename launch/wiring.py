"""The config's choices as objects: the one place that knows every room.

Invariants:
- Nothing here decides anything; it maps a config section to the constructor it names.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from ..configs.schema import Config, parse_size
from ..errors import ConfigError
from .job import Job

if TYPE_CHECKING:
    import torch

    from ..envs.simple import Split
    from ..learner.fsdp2 import Fsdp2Backend
    from ..rollout.engine import Engine
    from ..rollout.router import Router
    from ..rollout.worker import Player
    from ..weightsync.publisher import Publisher


def make_engines(job: Job) -> list[Engine]:
    """A client per replica."""
    from ..learner.model import vocabulary_size
    from ..rollout.vllm import VllmEngine

    config = job.config
    vocabulary = vocabulary_size(config.model.path)
    return [
        VllmEngine(
            f"engine-{i}",
            url,
            vocab_size=vocabulary,
            max_model_len=config.agent.max_tokens,
            initial_version=None if job.pushed else 0,
            request_s=config.rollout.request_s,
            push_s=config.weightsync.push_s,
        )
        for i, url in enumerate(job.cluster.engines)
    ]


def make_router(job: Job) -> Router:
    from ..rollout.router import Router

    rollout = job.config.rollout
    return Router(make_engines(job), start_s=rollout.engine.start_s, request_s=rollout.request_s)


def make_player(config: Config, router: Router, *, split: Split, temperature: float) -> Player:
    """What plays episodes of `split`."""
    from ..agents import Session, load_agent, load_renderer
    from ..agents.base import Generate
    from ..envs import task_source
    from ..learner.model import load_tokenizer, vocabulary_size
    from ..rollout.worker import Player

    agent = config.agent
    renderer = load_renderer(agent.renderer, load_tokenizer(config.model.path), thinking=agent.thinking)
    vocabulary = vocabulary_size(config.model.path)

    def make_session(generate: Generate) -> Session:
        return Session(
            renderer,
            generate,
            vocabulary=vocabulary,
            max_tokens_per_turn=agent.max_tokens_per_turn,
            max_tokens=agent.max_tokens,
        )

    source = task_source(config.env, split, config.seed)
    stop_token_ids = renderer.get_stop_token_ids()
    return Player(config, load_agent(agent.kind), source, router, make_session, stop_token_ids, temperature)


def make_backend(config: Config, *, temperature: float) -> Fsdp2Backend:
    """The learner's model; log-probs are those of logits / `temperature`."""
    from ..learner.fsdp2 import Fsdp2Backend

    return Fsdp2Backend(
        config.model,
        config.learner.optimizer,
        device=config.learner.backend.device,
        temperature=temperature,
        timeout_s=config.learner.batch_s + config.weightsync.push_s,
    )


def make_demonstrations(config: Config) -> list[tuple[Sequence[int], Sequence[bool]]]:
    """(token ids, loss mask) of `sft.demonstrations` conversations, from the training tasks.

    Raises:
        ConfigError: the environment has none to show.
    """
    from ..agents import load_renderer, render_demonstration
    from ..envs import task_source
    from ..learner.model import load_tokenizer

    renderer = load_renderer(config.agent.renderer, load_tokenizer(config.model.path), thinking=config.agent.thinking)
    source = task_source(config.env, "train", config.seed)
    rng = random.Random(config.seed)
    sequences: list[tuple[Sequence[int], Sequence[bool]]] = []
    for index in range(config.sft.demonstrations):
        demonstration = source.demonstration(source.task(index), rng)
        if demonstration is None:
            raise ConfigError(f"env: {source.name} has no demonstration of task {index}; there is nothing to imitate")
        rendered = render_demonstration(renderer, *demonstration)
        sequences.append((rendered.token_ids, rendered.loss_mask))
    return sequences


def make_canary(config: Config, length: int) -> Sequence[int]:
    """A fixed prompt of at most `length` arbitrary ids."""
    from ..learner.model import vocabulary_size

    vocabulary = vocabulary_size(config.model.path)
    pick = random.Random(0)
    return [pick.randrange(vocabulary) for _ in range(min(length, config.agent.max_tokens - 1))]


@contextlib.asynccontextmanager
async def make_publisher(job: Job, device: torch.device) -> AsyncIterator[Publisher]:
    """A publisher to all replicas; closes its clients."""
    from ..weightsync.publisher import Publisher

    config = job.config
    engines = make_engines(job)
    publisher = Publisher(
        engines,
        host=job.cluster.learner_host,
        backend=job.transport,
        device=device,
        bucket_bytes=parse_size("weightsync.bucket", config.weightsync.bucket),
        push_s=config.weightsync.push_s,
        canary_tolerance=config.weightsync.canary_tolerance,
        dtype=config.model.dtype,
        ranks_per_replica=config.rollout.engine.tensor_parallel,
    )
    try:
        yield publisher
    finally:
        publisher.close()
        for engine in engines:
            await engine.close()
