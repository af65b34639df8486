"""From a name in a config to what it names: the user's own callable, or an optional library."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from ..errors import ConfigError, describe


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


def load_foreign_library(key: str, module: str, name: str) -> ModuleType:
    """A library that does not fit beside ours, in the interpreter that `env.python` names. Raises ConfigError naming `key`, the
    section, and how to make such an interpreter."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{key}.python: {sys.executable} cannot import {module} ({error}); make an environment by `bash "
            f"requirements/install-env.sh {name}`, and set python to .venv-{name}/bin/python"
        ) from None


def load_library(key: str, module: str, extra: str) -> ModuleType:
    """An optional library, imported only by what needs it. Raises ConfigError naming `key` and the extra to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        missing = (
            f"needs the package {package}"
            if getattr(error, "name", "") == package
            else f"cannot import {package} ({error})"
        )
        raise ConfigError(f"{key}: {missing}; run `pip install -e .[{extra}]`") from None
