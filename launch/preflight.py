"""Named checks before any process starts: `train` runs them, `doctor` shows them.

Invariants:
- A check returns one line that says what it found, or raises ConfigError with one line that says what is wrong.
- No check leaves a process or a file, or loads weights, except for what the environment does in its first reset.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from .. import __version__
from ..configs import Config, check
from ..configs.algorithm import Kl
from ..configs.backends import Megatron
from ..configs.checks import BUILT_IN_AGENTS, COMMAND
from ..configs.reward import ModelReward
from ..configs.schema import parse_memory
from ..configs.suites import suites_of
from ..errors import ConfigError, EnvError, with_deadline
from .launchers.local import claim_ports
from .resources import assign_gpus, gpus_of, needs_rendezvous_port, ranks_of
from .reward_check import check_reward_model
from .samplers import check_samplers

if TYPE_CHECKING:
    from ..envs import EnvPart, Observation, Split
    from ..learner.model import ModelShape

Check = Callable[[Config], str]
SUPPORTED = ((3, 11), (3, 12))  # Python versions for which the engines have wheels
NOT_NEEDED = ("benchmarks", "build", "chaos", "runs", "tests")  # folders beside the product's that a run does not need
PACKAGES = ("torch", "transformers", "pyzmq", "msgspec", "uvloop", "aiohttp", "renderers", "reasoning-gym")


def preflight(config: Config) -> None:
    """Raises ConfigError for the first check that fails."""
    for name in CHECKS:
        run_check(name, config)


def run_check(name: str, config: Config) -> str:
    """What one check finds. Raises ConfigError where it fails, also where a package it needs cannot be imported."""
    try:
        return CHECKS[name](config)
    except ImportError as error:
        raise ConfigError(f"{name}: {error}; the installation is broken, run `make install` again") from error


def installation(config: Config) -> str:
    """Every module of ours that another module imports is there."""
    root = Path(__file__).parent.parent
    files, wanted = 0, re.compile(r"^ *from (\.+)([\w.]*) import", re.MULTILINE)
    for path in root.glob("[a-z]*/**/*.py"):
        folders = path.parent.relative_to(root).parts
        if folders[0] in NOT_NEEDED:
            continue
        files += 1
        for dots, module in wanted.findall(path.read_text(encoding="utf-8")):
            target = (*folders[: len(folders) + 1 - len(dots)], *filter(None, module.split(".")))
            if not root.joinpath(*target).is_dir() and not root.joinpath(*target).with_suffix(".py").is_file():
                missing = f"{'.'.join(('slipstream', *target))} is missing, which {path.relative_to(root)} imports"
                raise ConfigError(f"installation: {missing}; install Slipstream again")
    return f"slipstream {__version__}, {files} modules in {root}"


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
    for name in (*PACKAGES, *(["ray"] if config.launch.kind != "local" else [])):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            raise ConfigError(f"packages: {name} is not installed; run `make install`") from None
    return ", ".join(found)


def engine(config: Config) -> str:
    from ..rollout.engines import registry as servers

    chosen = config.rollout.engine
    kind, on_cpu = servers.kind_of(chosen), servers.serves_on_cpu(config)
    servers.command(config, servers.LOOPBACK, 0, seed=config.seed)
    if kind == "vllm" and on_cpu and shutil.which("lscpu") is None:
        raise ConfigError("rollout.engine.kind: vllm on CPU needs the program `lscpu` on the PATH (package util-linux)")
    return f"{kind} on {'CPU' if on_cpu else 'GPU'}, replicas: {chosen.replicas}"


def devices(config: Config) -> str:
    import torch

    count, backend = torch.cuda.device_count(), config.learner.backend
    if placed_by_ray(config):
        return f"{count} GPUs and {os.cpu_count()} cores here; Ray places the roles"
    if backend.device == "cuda" and not count:
        raise ConfigError("learner.backend.device: cuda, but torch sees no GPU; allowed here are auto and cpu")
    placement = assign_gpus(gpus_of(config), count)
    shown = ", ".join(f"{role} on GPU {'+'.join(map(str, gpus))}" for role, gpus in placement.gpus.items())
    found = f"{count} GPUs, {os.cpu_count()} cores{': ' + shown if shown else ''}"
    return f"{found}; collectives run on {placement.backend}"


def placed_by_ray(config: Config) -> bool:
    """Whether roles run on an existing Ray cluster, whose hosts may differ from this one."""
    return config.launch.kind != "local" and "RAY_ADDRESS" in os.environ


def memory(config: Config) -> str:
    from ..rollout import reward_server
    from ..rollout.engines import registry as servers

    free, chosen, model = psutil.virtual_memory().available, config.rollout.engine, config.reward
    needed: dict[str, float] = {}  # bytes
    if servers.serves_on_cpu(config):
        size = parse_memory(chosen.memory)
        needed[f"rollout.engine.memory: {chosen.memory} for {chosen.replicas} replicas"] = size * chosen.replicas
    if isinstance(model, ModelReward) and reward_server.serves_on_cpu():
        needed[f"{chosen.memory} for the reward server"] = parse_memory(chosen.memory)
    if sum(needed.values()) > free:
        raise ConfigError(f"{' and '.join(needed)} is more than the {free >> 20} MiB that are free")
    return f"{free >> 20} MiB free"


def model(config: Config) -> str:
    from ..learner.model import check_model, read_shape, vocabulary_size

    path, kl = config.model.path, config.learner.algorithm.kl
    check_model(path)
    check_model_fits(config, read_shape(path))
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
    from ..learner.distributed import choose_device
    from ..learner.fsdp2 import liger
    from ..learner.fsdp2.parallelism import check_heads
    from ..learner.megatron import fit
    from ..learner.model import read_config

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
            if "liger" in chosen.options and not placed_by_ray(config):
                liger.check(choose_device(chosen.device), model)
    placed = [f", ranks of {kind}: {ranks}" for kind, ranks in config.learner.aux_models.items() if ranks]
    return f"{chosen.__struct_config__.tag}, ranks: {chosen.ranks}{''.join(placed)}"


def agent(config: Config) -> str:
    from ..agents import load_agent, load_renderer
    from ..learner.model import load_tokenizer

    if config.agent.kind != COMMAND:
        load_agent(config.agent.kind)
    elif config.launch.hosts != "many":
        asyncio.run(_check_program(config))
    load_renderer(config.agent.renderer, load_tokenizer(config.model.path), thinking=config.agent.thinking)
    return f"{config.agent.kind}, chat format {config.agent.renderer}"


async def _check_program(config: Config) -> None:
    """The agent's program can be started in a sandbox of this host, which reaches a gateway and nothing else."""
    from ..agents import Gateway
    from ..agents.command import CommandAgent

    async with Gateway() as gateway:
        await CommandAgent(config.agent, gateway, config.rollout.episode_s).check()


def environment(config: Config) -> str:
    from ..envs import parts_of, require_penalties

    parts = parts_of(config.env, "train", config.seed)
    require_penalties(parts, config.rollout.failures)
    _check_first_tasks(parts)
    whole = sum(part.share for part in parts)
    shown = [f"{p.name} {p.share / whole:.0%}" if len(parts) > 1 else p.name for p in parts]
    found = [", ".join(shown), *_rows(parts, "to train on")]
    for name, suite in suites_of(config).items():
        own = name and config.evaluation.suites[name].env is not None
        played = parts_of(suite.env, "eval", config.seed, f"evaluation.suites.{name}.env" if own else "env")
        found += _rows(played, f"to evaluate on{f' in {name}' if name else ''}")
        _check_first_tasks(played)
    return "; ".join(found)


def _check_first_tasks(parts: Sequence[EnvPart]) -> None:
    from ..envs import Task

    for part in parts:
        try:
            task: object = part.source.task(0)
        except Exception as error:  # whatever the user's own code raises
            raise ConfigError(f"env: {part.name} raised {type(error).__name__} for task 0: {error}") from error
        if not isinstance(task, Task) or not isinstance(task.id, str):
            wanted = "return Task(id, payload), the id a text"
            raise ConfigError(f"env: {part.name} returned {task!r:.100} for task 0; {wanted}")


def _rows(parts: Sequence[EnvPart], what: str) -> list[str]:
    """Read all rows of data sets; how many there are. Raises ConfigError naming the first that is broken."""
    from ..envs.adapters.nemo_gym import NemoGymEnv
    from ..envs.dataset.source import DatasetSource

    sources = {part.name: part.source for part in parts if isinstance(part.source, DatasetSource | NemoGymEnv)}
    for source in sources.values():
        source.check()
    return [f"{name}: {len(source)} rows {what}" for name, source in sources.items()]


def prompt(config: Config) -> str:
    """The first prompt of every environment is shorter than `agent.max_tokens`; longer ones of data sets are counted."""
    from ..agents import load_renderer
    from ..envs import parts_of
    from ..learner.model import load_tokenizer
    from .prompts import leave_out_long_prompts, prompt_tokens

    if config.agent.kind not in BUILT_IN_AGENTS:
        return f"only {config.agent.kind} knows it"
    if config.launch.hosts == "many":
        return "not checked: the environments run on other hosts"
    renderer = load_renderer(config.agent.renderer, load_tokenizer(config.model.path), thinking=config.agent.thinking)
    longest, long = 0, list[str]()
    own = {name: suite for name, suite in suites_of(config).items() if name}
    splits: dict[str, tuple[Config, Split]] = {"": (config, "train"), **{name: (own[name], "eval") for name in own}}
    for name, (played, split) in splits.items():
        room = played.agent.max_tokens
        try:
            parts = parts_of(played.env, split, config.seed)
        except ConfigError:
            return "unknown; see environment"
        left_out = leave_out_long_prompts(parts, renderer, played.agent)
        key = f"evaluation.suites.{name}" if name else "agent"
        for part in parts:
            if part.self_played:  # its library makes its prompts
                continue
            opening = asyncio.run(_opening(part, config.rollout.step_s))
            tokens = prompt_tokens(renderer, config.agent, opening)
            if tokens >= room:
                raise ConfigError(
                    f"{key}.max_tokens: {room} leaves no room for an answer: the prompt of task 0 of {part.name} has {tokens} "
                    f"tokens; allowed are {tokens + 1} and more"
                )
            longest = max(longest, tokens)
            if opening.tools and not getattr(renderer, "supports_tools", True):  # only `default` may not
                raise ConfigError(
                    f"agent.renderer: {config.agent.renderer!r} is the model's chat template, which has no known form of tool "
                    f"calls; {part.name} has the tool {opening.tools[0].name!r}; allowed are formats with tool calls, see "
                    "docs/rollout.md"
                )
        where = f" in {name}" if name else ""
        long += [
            f"; {part}{where}: {n} prompts of {room} tokens or more are left out" for part, n in left_out.items() if n
        ]
    return f"{longest} of {config.agent.max_tokens} tokens{''.join(long)}"


async def _opening(part: EnvPart, step_s: float) -> Observation:
    from ..envs import Observation
    from ..envs.base import checked

    env = part.source.make()
    hint = "check the environment, or raise rollout.episode_s, a fifth of which a step may take"
    try:
        work = env.reset(part.source.task(0))
        opening = await with_deadline(step_s, work, who=part.name, waits_for="the reset of task 0", hint=hint)
        opening = checked(opening, Observation)
    except EnvError as error:
        raise ConfigError(f"env: {part.name}: the reset of task 0: {error}") from error
    except (Exception, SystemExit) as error:  # whatever the user's own code raises
        raise ConfigError(f"env: {part.name} raised {type(error).__name__} in the reset of task 0: {error}") from error
    finally:
        with contextlib.suppress(Exception):  # episodes report it
            await with_deadline(step_s, env.close(), who=part.name, waits_for="its environment to close", hint=hint)
    if not opening.messages or opening.messages[-1].role == "assistant":
        raise ConfigError(f"env: {part.name}: the reset of task 0 returned no message for the policy to answer")
    return opening


def trackers(config: Config) -> str:
    from ..monitor.trackers import check_trackers

    check_trackers(config.run.trackers)
    return ", ".join(config.run.trackers) or "none"


def ports(config: Config) -> str:
    if not config.launch.port:
        return "free ones are picked"
    if placed_by_ray(config):
        return "checked on the hosts where Ray places the roles"
    from .supervisor.processes import role_names

    claimed = claim_ports(config.launch.port, len(role_names(config)) + len(needs_rendezvous_port(config)))
    return f"{claimed[0]} to {claimed[-1]} are free"


def folder(config: Config) -> str:
    existing = writable("run.dir", config.run.dir)
    return f"{config.run.dir}, {shutil.disk_usage(existing).free >> 30} GiB free"


def writable(key: str, path: str) -> Path:
    """The nearest existing parent of a folder that will be created. Raises ConfigError naming `key`."""
    try:
        parent = Path(path).resolve()
        while not parent.exists():
            parent = parent.parent
        if not parent.is_dir():
            raise NotADirectoryError(f"{parent} is a file")
        with tempfile.TemporaryFile(dir=parent):
            return parent
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be created or written: {error}") from None


def check_model_fits(config: Config, shape: ModelShape) -> None:
    """Raises ConfigError where the engine would refuse to serve a model of this shape."""
    engine, tokens = config.rollout.engine, config.agent.max_tokens
    ranks, path = ranks_of(engine), config.model.path
    if tokens > shape.positions:
        raise ConfigError(f"agent.max_tokens: {tokens} is more than the {shape.positions} positions of {path}")
    if shape.heads % ranks:
        heads = f"the {shape.heads} attention heads of {path}"
        raise ConfigError(f"rollout.engine.tensor_parallel: {ranks} does not divide {heads}")
    size = parse_memory(engine.memory)
    if isinstance(size, int):
        needed = tokens * shape.kv_numbers * (2 if config.model.dtype == "bfloat16" else 4) // ranks
        if size < needed:
            raise ConfigError(
                f"rollout.engine.memory: {engine.memory} does not hold the keys and values of one episode of agent.max_tokens="
                f"{tokens}; allowed are {-(-needed >> 20) or 1}MiB and more"
            )


CHECKS: dict[str, Check] = {
    "installation": installation,
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
    "sampler": check_samplers,
    "engine": engine,
    "reward": check_reward_model,
    "devices": devices,
    "memory": memory,
    "trackers": trackers,
}
