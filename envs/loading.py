"""From a name in a config to what it names: a file, the user's own callable, or an optional library."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import ConfigError, describe


def require_file(key: str, path: str) -> None:
    """Raises ConfigError naming `key` where there is no such file."""
    file = Path(path)
    if file.is_file():
        return
    known = [one.name for one in file.parent.iterdir()] if file.parent.is_dir() else []
    close = difflib.get_close_matches(file.name, known, n=1)
    hint = "" if file.is_absolute() else f"; relative paths begin in {Path.cwd()}"
    hint = f"; did you mean {file.with_name(close[0])}?" if close else hint
    raise ConfigError(f"{key}: there is no file {path}{hint}")


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
