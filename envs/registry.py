"""From the config's `env` section to a task source. Everything wrong with it is said here, before anything starts."""

from __future__ import annotations

import importlib
from typing import Any

from ..configs.schema import PythonEnv, ReasoningGym
from ..errors import ConfigError
from .base import TaskSource
from .simple import Split


def task_source(config: ReasoningGym | PythonEnv, split: Split, seed: int) -> TaskSource:
    """The tasks of `split`; sources of different splits or seeds share no random seed.

    Raises:
        ConfigError: an unknown family, parameter, module or name, or a factory that refuses its arguments.
    """
    if isinstance(config, ReasoningGym):
        # Imported here: reasoning-gym takes over a second to import, and engines and learners need none of it.
        from .reasoning import ReasoningGymSource

        return ReasoningGymSource(config, split, seed)
    factory = load_target("env.factory", config.factory)
    try:
        source = factory(split=split, seed=seed, **config.arguments)
    except TypeError as error:
        raise ConfigError(f"env.arguments: {config.factory} does not take {config.arguments}: {error}") from error
    except Exception as error:  # whatever the user's own code raises
        raise ConfigError(f"env.factory: {config.factory} raised {type(error).__name__}: {error}") from error
    missing = [name for name in ("name", "task", "make", "demonstration") if not hasattr(source, name)]
    if missing:
        raise ConfigError(
            f"env.factory: {config.factory} returned {type(source).__name__} without {', '.join(missing)}; "
            "return a task source, for example a subclass of slipstream.envs.SimpleEnv"
        )
    return source


def load_target(key: str, target: str) -> Any:
    """The callable that `package.module:Name` names. Raises ConfigError naming `key`."""
    module_name, colon, name = target.partition(":")
    if not (module_name and colon and name):
        raise ConfigError(f"{key}: {target!r} is not of the form package.module:Name")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{key}: cannot import {module_name!r} of {target!r}: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        public = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
        raise ConfigError(f"{key}: {module_name!r} has no callable {name!r}; it has {', '.join(public) or 'none'}")
    return found
