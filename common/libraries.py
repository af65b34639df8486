"""Optional libraries: what needs one imports it when it is used."""

from __future__ import annotations

import importlib
from types import ModuleType

from ..errors import ConfigError


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
