"""Targets, which a config names as `package.module:Name`: the user's own callables."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from ..errors import ConfigError, describe


def require_module(key: str, target: str) -> None:
    """Raises ConfigError naming `key` where the module of `package.module:Name` is nowhere. It is not imported, and the packages
    above it only where they hold no such file."""
    name = target.partition(":")[0]
    top, *below = name.split(".")
    if name in sys.modules:
        return
    try:
        spec = importlib.util.find_spec(top)
        for end in range(2, len(below) + 2):
            spec = spec and PathFinder.find_spec(".".join([top, *below][:end]), spec.submodule_search_locations or [])
        if spec or importlib.util.find_spec(name):  # which asks the packages above it
            return
    except ModuleNotFoundError:
        pass
    except (Exception, SystemExit):  # the packages are user code; who loads the module reports it
        return
    raise ConfigError(
        f"{key}: cannot import {name!r} of {target!r}: there is no such module in {Path.cwd()}, nor installed"
    )


def load_target(key: str, target: str) -> Any:
    """The callable that `package.module:Name` names. Raises ConfigError naming `key`."""
    module_name, colon, name = target.partition(":")
    if not (module_name and colon and name):
        raise ConfigError(f"{key}: {target!r} is not of the form package.module:Name")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the module is user code
        raise ConfigError(f"{key}: cannot import {module_name!r} of {target!r}: {describe(error)}") from error
    found = getattr(module, name, None)
    if not callable(found):
        public = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
        raise ConfigError(f"{key}: {module_name!r} has no callable {name!r}; it has {', '.join(public) or 'none'}")
    return found
