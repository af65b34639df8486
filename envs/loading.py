"""Loading what the config of an environment names: a file, or a library that does not fit beside ours."""

from __future__ import annotations

import difflib
import importlib
import sys
from pathlib import Path
from types import ModuleType

from ..errors import ConfigError


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
