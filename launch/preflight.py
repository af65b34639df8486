"""Named checks before any process starts: `train` runs them, `doctor` shows them.

Invariants:
- A check returns one line that says what it found, or raises ConfigError with one line that says what is wrong.
- What needs no library comes first: a path that leads nowhere is said before torch is imported.
- A fault is said once: checks that need what a failed one looked at are not made.
- No check leaves a process or a file, or loads weights, except for what the environment does in its first reset.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from .. import __version__
from ..common import accelerator
from ..configs import Config, check
from ..configs.engine_checks import nodes_of
from ..configs.engines import as_loaded, is_quantized
from ..configs.reward import ModelReward
from ..configs.schema import parse_memory
from ..errors import ConfigError, HubError
from .environment_checks import environment, prompt
from .file_checks import (
    agent_files,
    alert_program,
    algorithm_files,
    environment_files,
    model_files,
    reward_files,
    server_keys,
)
from .launchers.local import claim_ports
from .model_checks import agent, chat_format, learner, model
from .resources import assign_gpus, collectives_of, gpus_of, needs_rendezvous_port, own_servers, placed_by_ray
from .reward_check import check_reward_model
from .run_inputs import RunInputs
from .samplers import check_samplers
from .traces import check_traces

SUPPORTED = ((3, 11), (3, 12))  # Python versions for which the engines have wheels
NOT_NEEDED = ("benchmarks", "build", "chaos", "runs", "tests")  # folders beside the product's that a run does not need
PACKAGES = ("torch", "transformers", "pyzmq", "msgspec", "uvloop", "aiohttp", "renderers", "reasoning-gym")


class PreflightCheck(msgspec.Struct, frozen=True):
    """A check, and those whose failure would be its own: by their names."""

    run: Callable[[RunInputs], str]
    needs: tuple[str, ...] = ()


class PreflightFinding(msgspec.Struct, frozen=True):
    """What a check said; `left` is one that was not made, after another's failure."""

    name: str
    state: Literal["ok", "wrong", "left"]
    text: str


def preflight(config: Config, began: Mapping[str, int] | None = None, *, pushed: bool = True) -> RunInputs:
    """The inputs of a run that may start; the arguments are those of `RunInputs`. Raises ConfigError for the first check that
    fails."""
    inputs = RunInputs(config, began, pushed=pushed)
    for name in CHECKS:
        _run(name, inputs)
    return inputs


def examine(config: Config) -> Iterator[PreflightFinding]:
    """Make every check whose needs are met."""
    inputs, failed = RunInputs(config), dict[str, str]()  # a check that failed or was left -> the one that failed
    for name in CHECKS:
        if cause := next((failed[need] for need in CHECKS[name].needs if need in failed), ""):
            failed[name] = cause
            yield PreflightFinding(name, "left", f"not checked, after {cause}")
            continue
        try:
            yield PreflightFinding(name, "ok", _run(name, inputs))
        except ConfigError as error:
            failed[name] = name
            yield PreflightFinding(name, "wrong", str(error))


def _run(name: str, inputs: RunInputs) -> str:
    """What one check finds. Raises ConfigError where it fails, also where a package it needs cannot be imported, or a hub cannot be
    reached."""
    try:
        return CHECKS[name].run(inputs)
    except ImportError as error:
        raise ConfigError(f"{name}: {error}; the installation is broken, run `make install` again") from error
    except HubError as error:
        raise ConfigError(str(error)) from error


def installation(inputs: RunInputs) -> str:
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


def combinations(inputs: RunInputs) -> str:
    check(inputs.config)
    return "keys fit together"


def python(inputs: RunInputs) -> str:
    if sys.version_info[:2] not in SUPPORTED:
        allowed = " or ".join(f"{a}.{b}" for a, b in SUPPORTED)
        raise ConfigError(f"python: {platform.python_version()} is not supported; use {allowed}")
    return platform.python_version()


def packages(inputs: RunInputs) -> str:
    found = []
    for name in (*PACKAGES, *(["ray"] if inputs.config.launch.by_ray else [])):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            raise ConfigError(f"packages: {name} is not installed; run `make install`") from None
    return ", ".join(found)


def engine(inputs: RunInputs) -> str:
    from ..rollout.engines import registry as servers

    config = inputs.config
    chosen, others = config.rollout.engine, ""
    if inputs.pushed and is_quantized(chosen):
        from ..rollout.engines.quantized_model import weight_shapes

        weight_shapes(config.model.path)
    if chosen.external:
        from .external_servers import check_servers

        others = check_servers(config)
        if not config.evaluation.every:  # else evaluations of checkpoints start a server here
            return others
    if chosen.external or not inputs.pushed:  # nothing is pushed to the server that is started here
        config = as_loaded(config)
    kind, on_cpu = servers.kind_of(chosen), servers.serves_on_cpu(config)
    servers.command(config, servers.LOOPBACK, 0, seed=config.seed)
    servers.check_options(config)
    if kind == "vllm" and on_cpu and shutil.which("lscpu") is None:
        raise ConfigError("rollout.engine.kind: vllm on CPU needs the program `lscpu` on the PATH (package util-linux)")
    replicas = f"replicas: {chosen.count}" + (f", each over {nodes_of(chosen)} hosts" if nodes_of(chosen) > 1 else "")
    return f"{kind} on {'CPU' if on_cpu else 'GPU'}, {others or replicas}"


def devices(inputs: RunInputs) -> str:
    config = inputs.config
    count, device = accelerator.count(), config.learner.backend.device
    if placed_by_ray(config):
        return f"{count} GPUs and {os.cpu_count()} cores here; Ray places the roles"
    accelerator.require(device, "learner.backend.device")
    placement = assign_gpus(gpus_of(config), count, collectives_of(config), colocated=config.launch.colocated)
    kind = accelerator.current()
    names = accelerator.device_names(kind, count, os.environ) if kind else []
    shown = ", ".join(f"{role} on GPU {'+'.join(names[i] for i in gpus)}" for role, gpus in placement.gpus.items())
    found = f"{count} GPUs, {os.cpu_count()} cores{': ' + shown if shown else ''}"
    return f"{found}; collectives run on {placement.backend}"


def memory(inputs: RunInputs) -> str:
    from ..rollout import reward_server
    from ..rollout.engines import registry as servers

    config = inputs.config
    free, chosen, model = psutil.virtual_memory().available, config.rollout.engine, config.reward
    needed: dict[str, float] = {}  # bytes
    if (count := own_servers(config)) and servers.serves_on_cpu(config):
        needed[f"rollout.engine.memory: {chosen.memory} for {count} replicas"] = parse_memory(chosen.memory) * count
    if isinstance(model, ModelReward) and reward_server.serves_on_cpu():
        needed[f"{chosen.memory} for the reward server"] = parse_memory(chosen.memory)
    if sum(needed.values()) > free:
        raise ConfigError(f"{' and '.join(needed)} is more than the {free >> 20} MiB that are free")
    return f"{free >> 20} MiB free"


def trackers(inputs: RunInputs) -> str:
    from ..monitor.trackers import check_trackers

    check_trackers(inputs.config.run.trackers)
    return ", ".join(inputs.config.run.trackers) or "none"


def ports(inputs: RunInputs) -> str:
    config = inputs.config
    if not (first := config.launch.ports["first"]):
        return "free ones are picked"
    if placed_by_ray(config):
        return "checked on the hosts where Ray places the roles"
    from .supervisor.processes import role_names

    meeting = own_servers(config) if nodes_of(config.rollout.engine) > 1 else 0
    claimed = claim_ports(first, len(role_names(config)) + len(needs_rendezvous_port(config)) + meeting)
    return f"{claimed[0]} to {claimed[-1]} are free"


def folder(inputs: RunInputs) -> str:
    path = inputs.config.run.dir
    existing = writable("run.dir", path)
    return f"{path}, {shutil.disk_usage(existing).free >> 30} GiB free"


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


CHECKS = {
    "installation": PreflightCheck(installation),
    "config": PreflightCheck(combinations),
    "python": PreflightCheck(python),
    "packages": PreflightCheck(packages),
    "run folder": PreflightCheck(folder),
    "ports": PreflightCheck(ports),
    "alert program": PreflightCheck(alert_program),
    "server keys": PreflightCheck(server_keys),
    "model files": PreflightCheck(model_files),
    "reward files": PreflightCheck(reward_files),
    "algorithm files": PreflightCheck(algorithm_files),
    "agent files": PreflightCheck(agent_files),
    "environment files": PreflightCheck(environment_files),
    "environment": PreflightCheck(environment, ("installation", "packages", "environment files")),
    "agent": PreflightCheck(agent, ("installation", "packages", "agent files")),
    "model": PreflightCheck(model, ("installation", "packages", "model files")),
    "learner": PreflightCheck(learner, ("model", "algorithm files")),
    "chat format": PreflightCheck(chat_format, ("model",)),
    "prompt": PreflightCheck(prompt, ("environment", "agent", "chat format")),
    "traces": PreflightCheck(check_traces, ("environment", "prompt")),
    "sampler": PreflightCheck(check_samplers, ("environment", "prompt")),
    "engine": PreflightCheck(engine, ("model", "server keys")),
    "reward": PreflightCheck(check_reward_model, ("reward files", "environment", "model")),
    "devices": PreflightCheck(devices),
    "memory": PreflightCheck(memory, ("engine",)),
    "trackers": PreflightCheck(trackers),
}
"""In the order in which they are made."""
