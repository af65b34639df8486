"""Everything that can be known to be wrong before a process starts, as named checks: `train` runs them, `doctor` shows them.

Invariants:
- A check either returns one line of what it found or raises ConfigError with one line of what is wrong.
- No check starts a process, loads weights or leaves a file; the environment's own first reset may do what it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from ..configs import Config, check
from ..configs.algorithm import Kl
from ..configs.backends import Megatron
from ..configs.checks import BUILT_IN_AGENTS
from ..configs.reward import ModelReward
from ..configs.schema import parse_memory
from ..errors import ConfigError, within
from .processes import claim_ports
from .resources import BESIDE, local_placement, met_apart, ranks_by_kind, ranks_of

if TYPE_CHECKING:
    from ..envs import Observation, Part
    from ..learner.model import ModelShape

Check = Callable[[Config], str]

SUPPORTED = ((3, 11), (3, 12))
"""Python versions that the engines have wheels for."""

PACKAGES = ("torch", "transformers", "pyzmq", "msgspec", "uvloop", "aiohttp", "renderers", "reasoning-gym")


def preflight(config: Config) -> None:
    """Raises ConfigError for the first check that fails."""
    for one in CHECKS.values():
        one(config)


def combinations(config: Config) -> str:
    check(config)
    return "keys fit together"


def python(config: Config) -> str:
    if sys.version_info[:2] not in SUPPORTED:
        allowed = " or ".join(f"{a}.{b}" for a, b in SUPPORTED)
        raise ConfigError(f"python: {platform.python_version()} is not supported; use {allowed}")
    return platform.python_version()


def packages(config: Config) -> str:
    found = []
    for name in (*PACKAGES, *(["ray"] if config.launch.kind == "ray" else [])):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            raise ConfigError(f"packages: {name} is not installed; run `make install`") from None
    return ", ".join(found)


def engine(config: Config) -> str:
    from ..rollout import servers

    chosen = config.rollout.engine
    kind, on_cpu = servers.kind_of(chosen), servers.serves_on_cpu(config)
    servers.command(config, servers.LOOPBACK, 0, seed=config.seed)
    if kind == "vllm" and on_cpu and shutil.which("lscpu") is None:
        raise ConfigError("rollout.engine.kind: vllm on CPU needs the program `lscpu` on the PATH (package util-linux)")
    return f"{kind} on {'CPU' if on_cpu else 'GPU'}, {chosen.replicas} replicas"


def reward(config: Config) -> str:
    from .reward_fit import check_reward

    return check_reward(config)


def devices(config: Config) -> str:
    import torch

    count, backend = torch.cuda.device_count(), config.learner.backend
    if placed_by_ray(config):
        return f"{count} GPUs and {os.cpu_count()} cores here; Ray places the roles"
    if backend.device == "cuda" and not count:
        raise ConfigError("learner.backend.device: cuda, but torch sees no GPU; allowed here are auto and cpu")
    placement = local_placement(config)
    shown = ", ".join(f"{role} on GPU {'+'.join(map(str, gpus))}" for role, gpus in placement.gpus.items())
    return (
        f"{count} GPUs, {os.cpu_count()} cores{': ' + shown if shown else ''}; collectives run on {placement.backend}"
    )


def placed_by_ray(config: Config) -> bool:
    """Whether processes go to a cluster that is there already: what this host has says little about theirs."""
    return config.launch.kind == "ray" and "RAY_ADDRESS" in os.environ


def memory(config: Config) -> str:
    from ..rollout import reward_server, servers

    free, chosen, model = psutil.virtual_memory().available, config.rollout.engine, config.reward
    wanted: dict[str, float] = {}  # bytes; a share is refused elsewhere
    if servers.serves_on_cpu(config):
        size = parse_memory(chosen.memory)
        wanted[f"rollout.engine.memory: {chosen.memory} for {chosen.replicas} replicas"] = size * chosen.replicas
    if isinstance(model, ModelReward) and reward_server.serves_on_cpu():
        wanted[f"reward.memory: {model.memory}"] = parse_memory(model.memory, "reward.memory")
    if sum(wanted.values()) > free:
        raise ConfigError(f"{' and '.join(wanted)} is more than the {free >> 20} MiB that are free")
    return f"{free >> 20} MiB free"


def model(config: Config) -> str:
    from ..learner.model import check_model, read_shape, vocabulary_size

    path, kl = config.model.path, config.learner.algorithm.kl
    check_model(path)
    fits(config, read_shape(path))
    size = vocabulary_size(path)
    if isinstance(kl, Kl) and kl.reference:
        key = "learner.algorithm.kl.reference"
        check_model(kl.reference, key)
        if vocabulary_size(kl.reference) != size:
            raise ConfigError(
                f"{key}: {kl.reference!r} has a vocabulary of {vocabulary_size(kl.reference)}, model.path {path!r} one of {size}; "
                "the two must give log-probs to the same tokens"
            )
    return f"{path}, vocabulary {size}"


def learner(config: Config) -> str:
    from ..learner.fsdp2 import liger
    from ..learner.fsdp2.context_parallel import check_heads
    from ..learner.megatron import fit
    from ..learner.model import read_config
    from ..learner.ranks import choose_device

    chosen, kl = config.learner.backend, config.learner.algorithm.kl
    if isinstance(chosen, Megatron):
        fit.check_installed(chosen)
    for path in {config.model.path, kl.reference if isinstance(kl, Kl) and kl.reference else config.model.path}:
        model = read_config(path)
        if isinstance(chosen, Megatron):
            fit.check_family(model)
            fit.check_layout(chosen, model)
        else:
            check_heads(model, chosen.context_parallel)
            if chosen.liger and not placed_by_ray(config):
                liger.check(choose_device(chosen.device), model)
    placed = [
        f", {kind} on {ranks} of its own" for kind, ranks in ranks_by_kind(config).items() if kind in BESIDE and ranks
    ]
    return f"{chosen.__struct_config__.tag}, {chosen.ranks} ranks{''.join(placed)}"


def agent(config: Config) -> str:
    from ..agents import load_agent, load_renderer
    from ..learner.model import load_tokenizer

    load_agent(config.agent.kind)
    load_renderer(config.agent.renderer, load_tokenizer(config.model.path), thinking=config.agent.thinking)
    return f"{config.agent.kind}, chat format {config.agent.renderer}"


def environment(config: Config) -> str:
    from ..envs import parts_of, require_penalties

    parts = parts_of(config.env, "train", config.seed)
    require_penalties(parts, config.rollout.failures)
    for part in parts:
        try:
            part.source.task(0)
        except Exception as error:  # whatever the user's own code raises
            raise ConfigError(f"env: {part.name} raised {type(error).__name__} for task 0: {error}") from error
    whole = sum(part.share for part in parts)
    return ", ".join(f"{p.name} {p.share / whole:.0%}" if len(parts) > 1 else p.name for p in parts)


def prompt(config: Config) -> str:
    """The first prompt of every environment leaves room for an answer."""
    from ..agents import load_renderer
    from ..agents.format import to_chat, to_tools
    from ..envs import parts_of
    from ..learner.model import load_tokenizer

    if config.agent.kind not in BUILT_IN_AGENTS:
        return f"known to {config.agent.kind} alone"
    if config.launch.hosts == "many":
        return "not looked at: the environments live on other hosts"
    try:
        parts = parts_of(config.env, "train", config.seed)
    except ConfigError:
        return "not known; see environment"
    renderer = load_renderer(config.agent.renderer, load_tokenizer(config.model.path), thinking=config.agent.thinking)
    room, longest = config.agent.max_tokens, 0
    for part in parts:
        opening = asyncio.run(_opening(part, config.rollout.step_s))
        tools = to_tools(opening.tools) if config.agent.kind == "tool_calling" else None
        tokens = len(renderer.render_ids(to_chat(opening.messages), tools=tools or None, add_generation_prompt=True))
        if tokens >= room:
            raise ConfigError(
                f"agent.max_tokens: {room} leaves no room for an answer: the prompt of task 0 of {part.name} has {tokens} tokens; "
                f"allowed are {tokens + 1} and more"
            )
        longest = max(longest, tokens)
    return f"{longest} of {room} tokens"


async def _opening(part: Part, step_s: float) -> Observation:
    """What the first episode of an environment begins with."""
    env, hint = part.source.make(), "look at the environment, or raise rollout.step_s"
    try:
        work = env.reset(part.source.task(0))
        return await within(step_s, work, who=part.name, waits_for="the reset of task 0", hint=hint)
    except Exception as error:  # whatever the user's own code raises
        raise ConfigError(f"env: {part.name} raised {type(error).__name__} in the reset of task 0: {error}") from error
    finally:
        with contextlib.suppress(Exception):  # told by every episode that ends so
            await within(step_s, env.close(), who=part.name, waits_for="its environment to close", hint=hint)


def trackers(config: Config) -> str:
    from ..monitor.trackers import check_trackers

    check_trackers(config.monitor.trackers)
    return ", ".join(config.monitor.trackers) or "none"


def ports(config: Config) -> str:
    if not config.launch.port:
        return "free ones are picked"
    if placed_by_ray(config):
        return "looked at where Ray places the roles"
    from .member import role_names

    claimed = claim_ports(config.launch.port, len(role_names(config)) + len(met_apart(config)))
    return f"{claimed[0]} to {claimed[-1]} are free"


def folder(config: Config) -> str:
    place = writable("run.dir", config.run.dir)
    return f"{config.run.dir}, {shutil.disk_usage(place).free >> 30} GiB free"


def writable(key: str, path: str) -> Path:
    """The nearest existing parent of a folder that is to be made. Raises ConfigError naming `key`."""
    try:
        place = Path(path).resolve()
        while not place.exists():
            place = place.parent
        if not place.is_dir():
            raise NotADirectoryError(f"{place} is a file")
        with tempfile.TemporaryFile(dir=place):
            return place
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be made or written: {error}") from None


def fits(config: Config, shape: ModelShape) -> None:
    """Raises ConfigError where the engine would refuse to serve a model of this shape as configured."""
    engine, tokens = config.rollout.engine, config.agent.max_tokens
    if tokens > shape.positions:
        raise ConfigError(
            f"agent.max_tokens: {tokens} is more than the {shape.positions} positions of {config.model.path}"
        )
    ranks = ranks_of(engine)
    if shape.heads % ranks:
        raise ConfigError(
            f"rollout.engine.tensor_parallel: {ranks} does not divide the {shape.heads} attention heads of "
            f"{config.model.path}"
        )
    size = parse_memory(engine.memory)
    if isinstance(size, int):
        needed = tokens * shape.kv_numbers * (2 if config.model.dtype == "bfloat16" else 4) // ranks
        if size < needed:
            raise ConfigError(
                f"rollout.engine.memory: {engine.memory} does not hold the keys and values of one episode of agent.max_tokens="
                f"{tokens}; allowed are {-(-needed >> 20) or 1}MiB and more"
            )


CHECKS: dict[str, Check] = {
    "config": combinations,
    "python": python,
    "packages": packages,
    "run folder": folder,
    "ports": ports,
    "environment": environment,
    "model": model,
    "learner": learner,
    "agent": agent,
    "prompt": prompt,
    "engine": engine,
    "reward": reward,
    "devices": devices,
    "memory": memory,
    "trackers": trackers,
}
