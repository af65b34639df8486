"""From `package.module:Name` in a config to the user's own callable."""

from __future__ import annotations

import importlib
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
