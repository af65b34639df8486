"""The config's choices as objects: the one place that knows every room.

Invariants:
- Nothing here decides anything; it maps a config section to the constructor it names.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import structs

from ..configs.algorithm import Gae, Kl, needs_critic, needs_reference
from ..configs.backends import Fsdp2, Megatron
from ..configs.reward import Classifier, Judge
from ..configs.schema import Config, Fake, Model, Sglang, Transformers, parse_size
from ..errors import ConfigError
from ..weightsync.fleet import Fleet, FleetFeed, Seat
from .job import Job
from .resources import ranks_of

if TYPE_CHECKING:
    import torch

    from ..envs import Message, Observation
    from ..envs.simple import Split
    from ..learner.backend import Backend, Scorer
    from ..learner.beside.model import Ranked
    from ..learner.companions import Companions
    from ..rollout.engine import Engine
    from ..rollout.reward import RewardModel
    from ..rollout.router import Router
    from ..rollout.worker import Player
    from ..weightsync.publisher import Publisher
    from .heart import Heart
    from .targets import Targets

    Shown = tuple[str, Observation, Sequence[Message]]
    """Where a conversation is from, what the assistant was shown first, and all that was said from its first message on."""


def make_engine(job: Job, seat: Seat) -> Engine:
    """A client of the replica in `seat`."""
    from ..learner.model import vocabulary_size

    config = job.config
    engine = config.rollout.engine
    if isinstance(engine, Sglang):
        from ..rollout.sglang import SglangEngine as Client
    else:
        from ..rollout.vllm import VllmEngine as Client  # our own server speaks vLLM's protocol, too
    return Client(
        seat.name,
        seat.url,
        vocab_size=vocabulary_size(config.model.path),
        max_model_len=config.agent.max_tokens,
        initial_version=None if job.pushed else 0,
        request_s=config.rollout.request_s,
        push_s=config.weightsync.push_s,
        ranks=ranks_of(engine),
        partial=config.rollout.partial,
        scores_paused=isinstance(engine, Transformers | Fake),
    )


@contextlib.asynccontextmanager
async def following(job: Job, update: Callable[[Fleet], None]) -> AsyncIterator[None]:
    """Calls `update` with every fleet, as long as the context lasts."""

    async def follow() -> None:
        async for fleet in feed:
            update(fleet)

    async with FleetFeed(job.cluster.fleet) as feed, asyncio.TaskGroup() as tasks:
        task = tasks.create_task(follow(), name="fleet")
        try:
            yield
        finally:
            task.cancel()


@contextlib.asynccontextmanager
async def make_router(job: Job) -> AsyncIterator[Router]:
    """A router that follows the fleet."""
    from ..rollout.router import Router

    rollout = job.config.rollout
    router = Router(
        functools.partial(make_engine, job),
        max_concurrent=rollout.engine.max_concurrent,
        request_s=rollout.request_s,
        start_s=rollout.engine.start_s,
        partial=rollout.partial,
    )
    async with router, following(job, router.update):
        yield router


@contextlib.asynccontextmanager
async def make_reward(job: Job) -> AsyncIterator[RewardModel | None]:
    """What scores episodes in training; None where the environment does."""
    from ..rollout.reward import ServedReward

    if not isinstance(job.config.reward, Classifier | Judge):
        yield None
        return
    model = ServedReward(job.config.reward, job.cluster.reward)
    try:
        yield model
    finally:
        await model.close()


def make_player(
    config: Config, router: Router, *, split: Split, temperature: float, model: RewardModel | None = None
) -> Player:
    """What plays episodes of `split`; `model` scores them, without one their environment does."""
    from ..agents import Session, load_agent, load_renderer
    from ..agents.base import Generate
    from ..envs import parts_of
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

    parts = parts_of(config.env, split, config.seed)
    stop_token_ids = renderer.get_stop_token_ids()
    return Player(config, load_agent(agent.kind), parts, router, make_session, stop_token_ids, temperature, model)


def ranked(config: Config, ranks: int) -> Config:
    """`config` for a model that is held by `ranks` processes of its own, as the policy is by the learner's."""
    learner = config.learner
    backend = structs.replace(learner.backend, ranks=ranks)
    return structs.replace(config, learner=structs.replace(learner, backend=backend))


def collective_s(config: Config) -> float:
    """How long a rank waits for the others: between two collectives may lie the wait for a batch and a push."""
    return config.learner.batch_s + config.weightsync.push_s


def make_backend(config: Config, *, temperature: float) -> Backend:
    """The learner's model; log-probs are those of logits / `temperature`."""
    chosen, model, optimizer = config.learner.backend, config.model, config.learner.optimizer
    timeout_s = collective_s(config)
    if isinstance(chosen, Megatron):
        from ..learner.megatron.fit import check_installed

        check_installed(chosen)
        from ..learner.megatron.backend import MegatronBackend

        return MegatronBackend(model, optimizer, chosen, temperature=temperature, timeout_s=timeout_s)
    from ..learner.fsdp2.backend import Fsdp2Backend

    return Fsdp2Backend(model, optimizer, chosen, temperature=temperature, timeout_s=timeout_s)


def make_companions(config: Config, policy: Backend, addresses: Mapping[str, Sequence[str]]) -> Companions:
    """The models beside the policy that the algorithm asks for; placed ones are met at `addresses`, see `Cluster.beside`."""
    from ..learner.beside.held import Held, HeldLearning
    from ..learner.beside.placed import Placed
    from ..learner.companions import Companions

    learner, algorithm = config.learner, config.learner.algorithm

    def away(kind: str) -> Placed:
        return Placed(learner, kind, addresses[kind] if policy.rank == 0 else ())

    reference, trained = None, None
    if needs_reference(algorithm) and learner.beside["reference"]:
        reference = away("reference")
    elif needs_reference(algorithm):
        reference = Held(learner, _without_adapters(config, policy) or make_reference(config), policy)
    if needs_critic(algorithm):
        trained = away("critic") if learner.beside["critic"] else HeldLearning(learner, make_critic(config))
    return Companions(learner, reference, trained)


def _without_adapters(config: Config, policy: Backend) -> Scorer | None:
    """The policy as it was before the first step, where it trains adapters and that is the reference."""
    from ..learner.fsdp2.backend import Fsdp2Backend

    if isinstance(policy, Fsdp2Backend) and _reference_model(config) == config.model:
        return policy.without_adapters()
    return None


def _reference_model(config: Config) -> Model:
    kl = config.learner.algorithm.kl
    return structs.replace(config.model, path=(kl.reference if isinstance(kl, Kl) else "") or config.model.path)


def make_reference(config: Config) -> Ranked:
    """The policy as it was before the first step, or the one that `learner.algorithm.kl` names; held as `learner.backend` says, by
    the ranks that this process is among."""
    chosen, model = config.learner.backend, _reference_model(config)
    temperature, timeout_s = config.rollout.sampling.temperature, collective_s(config)
    if isinstance(chosen, Megatron):
        from ..learner.megatron.model import MegatronModel

        return MegatronModel(model, chosen, temperature=temperature, timeout_s=timeout_s)
    from ..learner.fsdp2.model import Fsdp2Model

    held = structs.replace(chosen, lora_rank=0)
    return Fsdp2Model(model, held, temperature=temperature, timeout_s=timeout_s)


def make_critic(config: Config) -> Backend:
    """What learns beside the policy: for `gae` a critic, for `prime` a policy that becomes a process reward model and is held as
    `make_reference` says."""
    if not isinstance(config.learner.algorithm.advantage, Gae):
        return make_backend(config, temperature=config.rollout.sampling.temperature)
    from ..learner.critic import Critic

    held = Fsdp2(device=config.learner.backend.device)
    return Critic(config.model, config.learner.optimizer, held, temperature=1.0, timeout_s=collective_s(config))


def make_demonstrations(config: Config) -> Iterator[Shown]:
    """`sft.demonstrations` conversations from the training tasks; of a mixture by shares among the environments that have any.

    Raises:
        ConfigError: no environment has one to show, or one runs out of them.
    """
    from ..buffer.admission import Admission
    from ..envs import parts_of

    rng = random.Random(config.seed)
    parts = parts_of(config.env, "train", config.seed)
    shown = [p for p in parts if p.source.demonstration(p.source.task(0), random.Random(config.seed)) is not None]
    if not shown:
        names = ", ".join(part.name for part in parts)
        raise ConfigError(f"env: {names} has no demonstration of task 0; there is nothing to imitate")
    counts = Admission(0, config.sft.demonstrations, tuple(part.share for part in shown)).quotas([0] * len(shown))
    for part, count in zip(shown, counts, strict=True):
        for index in range(count):
            demonstration = part.source.demonstration(part.source.task(index), rng)
            if demonstration is None:
                raise ConfigError(f"env: {part.name} has no demonstration of task {index}; there is nothing to imitate")
            yield f"env: task {index} of {part.name}", *demonstration


def make_canary(config: Config, length: int) -> Sequence[int]:
    """A fixed prompt of at most `length` arbitrary ids."""
    from ..learner.model import vocabulary_size

    vocabulary = vocabulary_size(config.model.path)
    pick = random.Random(0)
    return [pick.randrange(vocabulary) for _ in range(min(length, config.agent.max_tokens - 1))]


@contextlib.asynccontextmanager
async def make_publisher(job: Job, device: torch.device, heart: Heart) -> AsyncIterator[tuple[Publisher, Targets]]:
    """A publisher, and what makes it follow the fleet."""
    from ..weightsync.publisher import Publisher
    from .targets import Targets

    config = job.config
    targets = Targets(functools.partial(make_engine, job), heart)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(targets.close)
        publisher = Publisher(
            (),
            transport=config.weightsync.transport,
            folder=job.dir / "weights",
            host=job.cluster.learner_host,
            backend=job.backend,
            device=device,
            bucket_bytes=parse_size("weightsync.bucket", config.weightsync.bucket),
            push_s=config.weightsync.push_s,
            canary_tolerance=config.weightsync.canary_tolerance,
            dtype=config.model.dtype,
            cohort=config.weightsync.cohort,
            partial=config.rollout.partial,
            on_served=targets.served,
            on_lost=targets.lost,
        )
        stack.callback(publisher.close)
        await stack.enter_async_context(following(job, functools.partial(targets.follow, publisher)))
        yield publisher, targets
