"""Makes the objects that a config describes. It decides nothing: each function maps a config section to the constructor that the
section names."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import random
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from msgspec import structs

from ...configs.algorithm import Gae, needs_critic, needs_reference, reference_paths, top_of
from ...configs.backends import REPLAY, Fsdp2, Megatron
from ...configs.checks import COMMAND
from ...configs.engines import Fake, Sglang, Transformers
from ...configs.reward import Classifier, Judge
from ...configs.schema import Config, Model
from ...configs.sft import SftConfig
from ...errors import ConfigError
from ...weightsync.fleet import FalseReplies, ReplicaInfo, following_fleet
from ..image_checks import IMAGE_ENGINES
from ..peers import following_peers, request_access, trusting
from ..resources import ranks_of
from ..run_context import RunContext

if TYPE_CHECKING:
    from ...agents import Agent, Demonstration
    from ...buffer.client import BufferClient
    from ...envs.simple import Split
    from ...learner.aux_models.aux_models import AuxModels
    from ...learner.backend import Backend, Scorer, ShardedModel
    from ...rollout.engines.access import ServerAccess
    from ...rollout.engines.base import VersionClock
    from ...rollout.engines.http_engine import HttpEngine
    from ...rollout.player import EpisodePlayer
    from ...rollout.reward_model import RewardModel
    from ...rollout.router import Router

log = logging.getLogger(__name__)

CLIENT_FACTORY = "SLIPSTREAM_BUFFER_CLIENT"  # see `make_buffer_client`
BACKEND_FACTORY = "SLIPSTREAM_BACKEND"  # see `make_backend`
CANARY_TOKENS = 32  # whose log-probs verify a push: long enough to reach every kernel, short enough to cost nothing
PROGRAM_SHARE = 0.75  # of an episode's time that its program may take; its environment needs the rest
FIRST_RANK = "learner-0"  # the role that pushes weights


def make_engine(
    context: RunContext, access: ServerAccess, replica: ReplicaInfo, versions: VersionClock | None = None
) -> HttpEngine:
    """A client of `replica`, with the tokens of `access`; `versions` for one that asks for completions."""
    from ...learner.model import has_images, read_routers, vocabulary_size

    config = context.config
    engine = config.rollout.engine
    if isinstance(engine, Sglang):
        from ...rollout.engines.sglang.client import SglangEngine as Client
    else:
        from ...rollout.engines.vllm.client import VllmEngine as Client  # our own server speaks vLLM's protocol
    return Client(
        replica.name,
        replica.url,
        vocab_size=vocabulary_size(config.model.path),
        max_model_len=config.agent.max_tokens,
        initial_version=None if context.pushed else 0,
        request_s=config.rollout.request_s,
        push_s=config.push_s,
        ranks=ranks_of(engine),
        partial=config.rollout.partial,
        scores_paused=isinstance(engine, Transformers | Fake),
        sleeps=config.launch.colocated,
        access=access.of(replica.name, replica.certificate),
        versions=versions,
        routers=read_routers(config.model.path) if REPLAY in config.learner.backend.options else None,
        takes_images=isinstance(engine, IMAGE_ENGINES) and has_images(config.model.path),
    )


def make_buffer_client(context: RunContext, name: str) -> BufferClient:
    """The buffer client of role `name`. The variable CLIENT_FACTORY names another factory, as `module:function`: `slipstream chaos`
    audits the run through its own."""
    if (factory := _named_by(CLIENT_FACTORY)) is not None:
        return factory(context, name)
    from ...buffer.client import BufferClient

    addresses, deadline_s = context.addresses, context.config.reply_s
    return BufferClient(addresses.buffer, name, addresses.buffer_shards, deadline_s=deadline_s)


def _named_by(variable: str) -> Callable[..., Any] | None:
    """The function that an environment variable names as `module:function`; None where it is not set."""
    if not (named := os.environ.get(variable)):
        return None
    module, _, function = named.partition(":")
    return getattr(importlib.import_module(module), function)


@contextlib.asynccontextmanager
async def buffer_client(context: RunContext, name: str) -> AsyncIterator[BufferClient]:
    """`make_buffer_client`, connected to the present processes of the buffer."""
    async with make_buffer_client(context, name) as client:
        trusted = [trusting(connection, role) for role, connection in client.connections.items()]
        async with following_peers(context, *trusted):
            yield client


@contextlib.asynccontextmanager
async def make_router(
    context: RunContext,
    name: str,
    buffer: BufferClient | None,
    report: Callable[[tuple[FalseReplies, ...]], None],
) -> AsyncIterator[Router]:
    """The router of role `name`, which follows the fleet; `report` sends what it knows of false replies to the supervisor. `buffer`
    knows which versions exist: the learner commits each before it pushes it. Without one there is version 0 alone."""
    from ...rollout.engines.base import VersionClock
    from ...rollout.router import Router

    rollout, access = context.config.rollout, await request_access(context, name)
    versions = VersionClock(ask=None if buffer is None else buffer.newest_version)
    router = Router(
        functools.partial(make_engine, context, access, versions=versions),
        max_concurrent=rollout.engine.max_concurrent,
        request_s=rollout.request_s,
        start_s=rollout.engine.start_s,
        partial=rollout.partial,
        report=report,
    )
    async with router, following_fleet(context.addresses.fleet, router.update):
        yield router


@contextlib.asynccontextmanager
async def make_reward(context: RunContext, name: str) -> AsyncIterator[RewardModel | None]:
    """The model that scores the episodes of role `name` in training; None where the environment scores them."""
    from ...rollout.reward_model import RewardModel

    if not isinstance(context.config.reward, Classifier | Judge):
        yield None
        return
    access = await request_access(context, name)
    model = RewardModel(context.config.reward, context.addresses.reward, context.config.score_s, access)
    try:
        async with following_peers(context, lambda peers: model.trust(peers.certificates.get("reward", ""))):
            yield model
    finally:
        await model.close()


@contextlib.asynccontextmanager
async def make_agents(config: Config) -> AsyncIterator[tuple[Agent, Agent]]:
    """The agent of a process, and the one of environments that play themselves. What was written elsewhere finds its policy at a
    gateway, which is open until the end."""
    from ...agents import Gateway, is_foreign, load_agent
    from ...agents.command import CommandAgent
    from ...rollout.gateway_agents import self_played, through_gateway

    async with contextlib.AsyncExitStack() as stack:
        if config.agent.kind == COMMAND:
            gateway = await stack.enter_async_context(Gateway(config.agent.trained))
            agent = CommandAgent(config.agent, gateway, PROGRAM_SHARE * config.rollout.episode_s)
        elif is_foreign(agent := load_agent(config.agent.kind)):
            gateway = await stack.enter_async_context(Gateway(config.agent.trained))
            agent = through_gateway(agent, gateway)
        # Also without such environments: an idle gateway is two sockets. Its model is called `policy`, whatever `agent.trained`
        # names.
        yield cast("Agent", agent), self_played(await stack.enter_async_context(Gateway()))


def make_player(
    config: Config,
    agents: tuple[Agent, Agent],
    router: Router,
    *,
    split: Split,
    temperature: float,
    model: RewardModel | None = None,
) -> EpisodePlayer:
    """A player of episodes of `split`, by `agents` as of `make_agents`. `model` scores them, without one their environment does.
    Takes as long as it takes to render the long prompts of a data set."""
    from ...agents import Session, load_renderer
    from ...envs import parts_of
    from ...learner.model import load_tokenizer, vocabulary_size
    from ...rollout.player import EpisodePlayer
    from ..prompts import leave_out_long_prompts

    settings = config.agent
    tokenizer = load_tokenizer(config.model.path)
    renderer = load_renderer(settings.renderer, tokenizer, thinking=settings.thinking)
    make_session = functools.partial(
        Session,
        renderer,
        vocabulary=vocabulary_size(config.model.path),
        max_tokens_per_turn=settings.max_tokens_per_turn,
        max_tokens=settings.max_tokens,
        decode=lambda token_ids, *, special=True: str(
            tokenizer.decode(list(token_ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        ),
    )
    parts, stops = parts_of(config.env, split, config.seed), renderer.get_stop_token_ids()
    for name, count in leave_out_long_prompts(parts, renderer, settings).items():
        log.info("%s: %d rows are left out, their prompts have agent.max_tokens or more", name, count)
    replay = split == "train" and REPLAY in config.learner.backend.options
    agent, itself = agents
    return EpisodePlayer(
        config, agent, parts, router, make_session, stops, temperature, model, self_player=itself, record_experts=replay
    )


def ranked(config: Config, ranks: int) -> Config:
    """`config` for a model that is sharded over `ranks` processes of its own, as the policy is over the learner's."""
    learner = config.learner
    backend = structs.replace(learner.backend, ranks=ranks)
    return structs.replace(config, learner=structs.replace(learner, backend=backend))


def collective_s(config: Config) -> float:
    """Timeout of collectives: a wait for a batch and two pushes may lie between two of them, one to a replica that joins."""
    return config.learner.batch_s + 2 * config.push_s


def make_backend(config: Config, *, temperature: float) -> Backend:
    """The learner's model; log-probs are those of logits / `temperature`. The variable BACKEND_FACTORY names another factory, as
    `module:function`: `slipstream bench async` emulates the learner's computing through its own."""
    if (factory := _named_by(BACKEND_FACTORY)) is not None:
        return factory(config, temperature)
    chosen, model, optimizer = config.learner.backend, config.model, config.learner.optimizer
    timeout_s = collective_s(config)
    if isinstance(chosen, Megatron):
        from ...learner.megatron.fit import check_installed

        check_installed(chosen)
        from ...learner.megatron.backend import MegatronBackend

        return MegatronBackend(model, optimizer, chosen, temperature=temperature, timeout_s=timeout_s)
    from ...learner.fsdp2.backend import Fsdp2Backend

    return Fsdp2Backend(model, optimizer, chosen, temperature=temperature, timeout_s=timeout_s)


def make_aux_models(config: Config, policy: Backend, addresses: Mapping[str, Sequence[str]]) -> AuxModels:
    """The auxiliary models that the algorithm needs; placed ones listen at `addresses`, see `Addresses.aux_models`."""
    from ...learner.aux_models.aux_models import AuxModels
    from ...learner.aux_models.base import LocalModel, LocalTrainableModel
    from ...learner.aux_models.remote import RemoteModel

    learner, algorithm = config.learner, config.learner.algorithm

    def remote(kind: str, top: int = 0) -> RemoteModel:
        return RemoteModel(learner, kind, addresses[kind] if policy.rank == 0 else (), top)

    placed, reference, trained = learner.aux_models, None, None
    if needs_reference(algorithm) and placed["reference"]:
        reference = remote("reference", top_of(algorithm))
    elif needs_reference(algorithm):
        reference = LocalModel(learner, make_references(config, policy), policy, top_of(algorithm))
    if needs_critic(algorithm):
        trained = remote("critic") if placed["critic"] else LocalTrainableModel(learner, make_critic(config))
    return AuxModels(learner, reference, trained)


def make_references(config: Config, policy: Backend) -> list[Scorer]:
    """The reference policies, in the order of `reference_paths`, in a rank that holds the `policy`. Of a policy that trains
    adapters and starts from the reference, that is the policy without them."""
    bare = policy.without_adapters()
    return [
        bare if bare and model == config.model else make_reference(config, model) for model in reference_models(config)
    ]


def reference_models(config: Config) -> list[Model]:
    """The policy before the first step, or the models that `learner.algorithm.kl` names, in the order of `reference_paths`."""
    paths = reference_paths(config.learner.algorithm)
    return [structs.replace(config.model, path=path or config.model.path) for path in paths]


def make_reference(config: Config, model: Model) -> ShardedModel:
    """One of `reference_models`, sharded according to `learner.backend`."""
    chosen = structs.replace(config.learner.backend, lora_rank=0)
    temperature, timeout_s = config.rollout.temperature, collective_s(config)
    if isinstance(chosen, Megatron):
        from ...learner.megatron.backend import MegatronModel

        return MegatronModel(model, chosen, temperature=temperature, timeout_s=timeout_s)
    from ...learner.fsdp2.backend import Fsdp2Model

    return Fsdp2Model(model, chosen, temperature=temperature, timeout_s=timeout_s)


def make_critic(config: Config) -> Backend:
    """The auxiliary model that is trained: for `gae` a critic, for `prime` a policy that becomes a process reward model. The
    routers of such a model choose by themselves: what engines recorded are the policy's choices."""
    learner = config.learner
    if not isinstance(learner.algorithm.advantage, Gae):
        options: Any = tuple(option for option in learner.backend.options if option != REPLAY)
        learner = structs.replace(learner, backend=structs.replace(learner.backend, options=options))
        return make_backend(structs.replace(config, learner=learner), temperature=config.rollout.temperature)
    from ...learner.aux_models.critic import Critic

    held = Fsdp2(device=learner.backend.device)
    return Critic(config.model, learner.optimizer, held, temperature=1.0, timeout_s=collective_s(config))


def make_preference_model(config: Config) -> Backend:
    """The model of `model.path` with a head of zeros, which learns from preferences. FSDP2 holds it, as it holds a critic."""
    from ...learner.aux_models.preference_model import PreferenceModel

    held = Fsdp2(device=config.learner.backend.device)
    return PreferenceModel(
        config.model, config.learner.optimizer, held, temperature=1.0, timeout_s=collective_s(config)
    )


def make_demonstrations(config: SftConfig) -> Iterator[Demonstration]:
    """`sft.demonstrations` conversations from the training tasks; of a mixture, by share among the environments that have any.
    Raises ConfigError where none has a demonstration, or one has too few."""
    from ...buffer.admission import Admission
    from ...envs import parts_of

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


def make_canary(config: Config) -> Sequence[int]:
    """A fixed prompt of at most `CANARY_TOKENS` arbitrary ids."""
    from ...learner.model import vocabulary_size

    vocabulary, rng = vocabulary_size(config.model.path), random.Random(0)
    return [rng.randrange(vocabulary) for _ in range(min(CANARY_TOKENS, config.agent.max_tokens - 1))]
