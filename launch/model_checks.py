"""Checks of the model with what learns, samples and talks in its chat format. None loads a weight."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ..configs import Config
from ..configs.algorithm import PythonFunction, named_references, top_of
from ..configs.backends import REPLAY, Megatron
from ..configs.checks import COMMAND
from ..configs.engines import ENGINE_OPTIONS, SPLIT
from ..configs.schema import parse_memory
from ..errors import ConfigError
from .image_checks import check_images
from .resources import placed_by_ray, ranks_of
from .run_inputs import RunInputs

if TYPE_CHECKING:
    from ..common.routed_experts import RouterShape
    from ..learner.model import ModelShape


def model(inputs: RunInputs) -> str:
    from ..learner.model import check_model, read_shape, vocabulary_size

    config = inputs.config
    path, algorithm = config.model.path, config.learner.algorithm
    check_model(path)
    check_model_fits(config, read_shape(path))
    size = vocabulary_size(path)
    for key, reference in named_references(algorithm).items():
        check_model(reference, key)
        if vocabulary_size(reference) != size:
            raise ConfigError(
                f"{key}: {reference!r} has a vocabulary of {vocabulary_size(reference)}, model.path {path!r} one of {size}; "
                "the two must give log-probs to the same tokens"
            )
    if top_of(algorithm) > size:
        raise ConfigError(
            f"learner.algorithm.kl.estimator: {path!r} has {size} tokens, of which {top_of(algorithm)} cannot be the likeliest; "
            f"allowed are 1 to {size}"
        )
    return f"{path}, vocabulary {size}"


def learner(inputs: RunInputs) -> str:
    from ..learner.algorithms import own
    from ..learner.distributed import choose_device
    from ..learner.fsdp2 import liger
    from ..learner.fsdp2.parallelism import check_experts, check_heads
    from ..learner.megatron import fit
    from ..learner.model import read_config, read_routers

    config = inputs.config
    chosen = config.learner.backend
    check_images(config)
    if isinstance(chosen, Megatron):
        fit.check_installed(chosen)
    for path in {config.model.path, *named_references(config.learner.algorithm).values()}:
        model = read_config(path)
        if isinstance(chosen, Megatron):
            fit.check_family(model)
            fit.check_layout(chosen, model)
        else:
            check_heads(model, chosen.context_parallel)
            check_experts(model, chosen.expert_parallel)
            if "liger" in chosen.options and not placed_by_ray(config):
                liger.check(choose_device(chosen.device), model)
    if REPLAY in chosen.options:
        check_experts_fit(config, read_routers(config.model.path))
    algorithm = config.learner.algorithm
    own.check(
        algorithm, [part.name for part in inputs.train] if isinstance(algorithm.advantage, PythonFunction) else []
    )
    placed = [f", ranks of {kind}: {ranks}" for kind, ranks in config.learner.aux_models.items() if ranks]
    return f"{chosen.__struct_config__.tag}, ranks: {chosen.ranks}{''.join(placed)}"


def agent(inputs: RunInputs) -> str:
    from ..agents import load_agent

    config = inputs.config
    if config.agent.kind != COMMAND:
        load_agent(config.agent.kind)
    elif config.launch.hosts != "many":
        asyncio.run(_check_program(config))
    return config.agent.kind


def chat_format(inputs: RunInputs) -> str:
    inputs.renderer()
    return inputs.config.agent.renderer


async def _check_program(config: Config) -> None:
    """The agent's program can be started in a sandbox of this host, which reaches a gateway and nothing else."""
    from ..agents import Gateway
    from ..agents.command import CommandAgent

    async with Gateway() as gateway:
        await CommandAgent(config.agent, gateway, config.rollout.episode_s).check()


def check_model_fits(config: Config, shape: ModelShape) -> None:
    """Raises ConfigError where the engine would refuse to serve a model of this shape."""
    engine, tokens = config.rollout.engine, config.agent.max_tokens
    ranks, path = ranks_of(engine), config.model.path
    if tokens > shape.positions:
        raise ConfigError(f"agent.max_tokens: {tokens} is more than the {shape.positions} positions of {path}")
    if shape.heads % ranks:
        heads = f"the {shape.heads} attention heads of {path}"
        raise ConfigError(f"{ENGINE_OPTIONS}.{SPLIT}: {ranks} does not divide {heads}")
    size = parse_memory(engine.memory)
    if isinstance(size, int):
        needed = tokens * shape.kv_numbers * (2 if config.model.dtype == "bfloat16" else 4) // ranks
        if size < needed:
            raise ConfigError(
                f"rollout.engine.memory: {engine.memory} does not hold the keys and values of one episode of agent.max_tokens="
                f"{tokens}; allowed are {-(-needed >> 20) or 1}MiB and more"
            )


def check_experts_fit(config: Config, routers: RouterShape) -> None:
    """Raises ConfigError where the longest trajectory with the experts of its tokens does not fit into one message."""
    from ..buffer.trajectory import ARRAYS_LIMIT, token_bytes

    each, tokens = token_bytes(routers.layout), config.agent.max_tokens
    if each * tokens > ARRAYS_LIMIT:
        raise ConfigError(
            f"agent.max_tokens={tokens} with learner.backend.options=[{REPLAY}]: {len(routers.layers)} routers of "
            f"{config.model.path!r} make {each} bytes for each token, and a trajectory has {ARRAYS_LIMIT >> 20} MiB at most; "
            f"allowed are {ARRAYS_LIMIT // each} tokens"
        )
