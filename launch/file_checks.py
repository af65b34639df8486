"""Paths and modules that a config names and that are not there. These checks come first: they import no library, and look for files
only; whatever is in the files is for the checks after them.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from ..configs.algorithm import PythonFunction, named_references
from ..configs.checks import COMMAND, PYTHON_NAME, SAMPLERS
from ..configs.environments import (
    DataSection,
    Dataset,
    EnvironmentKind,
    Harbor,
    Inspect,
    NemoGym,
    PythonEnv,
    parts_by_key,
)
from ..configs.reward import ModelReward
from ..configs.sft import SftConfig
from ..errors import ConfigError
from .run_inputs import RunInputs


def model_files(inputs: RunInputs) -> str:
    """The policy, and the models that the KL term refers to, are folders or names on the hub."""
    from ..learner.hub import require_model

    config = inputs.config
    require_model(config.model.path, "model.path")
    for key, path in named_references(config.learner.algorithm).items():
        require_model(path, key)
    return config.model.path


def server_keys(inputs: RunInputs) -> str:
    """The files of keys of servers that others started."""
    from ..configs.engine_checks import SERVERS
    from ..rollout.engines.server_keys import read_all_keys

    files = inputs.config.rollout.engine.external
    read_all_keys(SERVERS, files)
    return ", ".join(files.values()) or "none: this run starts its servers"


def algorithm_files(inputs: RunInputs) -> str:
    """The modules of the user's own advantage and loss."""
    from ..common.targets import require_module

    algorithm = inputs.config.learner.algorithm
    own = {"advantage": algorithm.advantage, "loss": algorithm.loss}
    for name, section in own.items():
        if isinstance(section, PythonFunction):
            require_module(f"learner.algorithm.{name}.function", section.function)
    return ", ".join(str(section.__struct_config__.tag) for section in own.values())


def reward_files(inputs: RunInputs) -> str:
    """The model that scores is a folder or a name on the hub."""
    from ..learner.hub import require_model

    reward = inputs.config.reward
    if not isinstance(reward, ModelReward):
        return "no reward model"
    require_model(reward.path, "reward.path")
    return reward.path


def agent_files(inputs: RunInputs) -> str:
    """The module of the user's agent, or the folder of its program."""
    from ..common.targets import require_module

    config, agent = inputs.config, inputs.config.agent
    if PYTHON_NAME.fullmatch(agent.kind):
        require_module("agent.kind", agent.kind)
    if agent.kind == COMMAND and config.launch.hosts != "many":
        _require_folder("agent.sandbox.folder", agent.sandbox.folder)
    return agent.kind


def alert_program(inputs: RunInputs) -> str:
    """The program that is started for alerts."""
    command = inputs.config.run.on_alert
    if not command:
        return "none"
    if (found := shutil.which(command[0])) is None:
        why = "is no program that may be executed; run chmod +x"
        if not Path(command[0]).is_file():
            why = f"is no program: relative paths begin in {Path.cwd()}, names are looked for in the folders of PATH"
        raise ConfigError(f"run.on_alert: {command[0]!r} {why}")
    return found


def environment_files(inputs: RunInputs) -> str:
    """The files, folders and modules of every environment, those of evaluations too."""
    from ..envs.dataset.rows import require_rows

    config = inputs.config
    sections = parts_by_key(config.env)
    for name, suite in config.evaluation.suites.items():
        if suite.env is not None:
            sections |= parts_by_key(suite.env, f"evaluation.suites.{name}.env")
    for key, section in sections.items():
        _check_section(key, section)
    if isinstance(config, SftConfig):
        files = {"sft.messages": config.sft.messages, "sft.preferences": config.sft.preferences}
        if all(files.values()):
            raise ConfigError("sft.messages and sft.preferences: a model learns from one of them; leave out the other")
        for key, path in files.items():
            if path:
                require_rows(key, path)
    return ", ".join(sections)


def _check_section(key: str, env: EnvironmentKind) -> None:
    from ..common.targets import require_module
    from ..envs.dataset.rewards import IN_FILE, IN_MODULE
    from ..envs.dataset.rows import require_rows
    from ..envs.loading import require_file
    from ..envs.verifiers import REWARDS

    for name in ("python", "keys"):
        if path := getattr(env, name):
            require_file(f"{key}.{name}", path)
    if env.sampler not in SAMPLERS:
        require_module(f"{key}.sampler", env.sampler)
    if isinstance(env, DataSection):
        require_rows(f"{key}.path", env.path)
        if isinstance(env.evaluation, str):
            require_rows(f"{key}.evaluation", env.evaluation)
        if isinstance(env, Dataset) and env.traces:
            require_rows(f"{key}.traces", env.traces)
        if found := IN_FILE.fullmatch(env.reward):
            require_file(f"{key}.reward", found["file"])
        elif env.reward not in REWARDS and IN_MODULE.fullmatch(env.reward):
            require_module(f"{key}.reward", env.reward)
    if env.address or env.python:  # what follows is found there
        return
    match env:
        case PythonEnv():
            require_module(f"{key}.factory", env.factory)
        case NemoGym():
            require_rows(f"{key}.path", env.path)
        case Harbor():
            _require_folder(f"{key}.path", env.path)
            _require_folder(f"{key}.packages", env.packages)
        case Inspect():
            file = env.task.rpartition("@")[0]
            if file.endswith(".py"):
                require_file(f"{key}.task", file)
        case _:
            pass


def _require_folder(key: str, path: str) -> None:
    if path and not Path(path).is_dir():
        raise ConfigError(f"{key}: there is no folder {path}; relative paths begin in {Path.cwd()}")
