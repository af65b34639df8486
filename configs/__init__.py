"""The typed schema of a run, how it is read, and the presets (`*.yaml` in this folder)."""

from .checks import check
from .fields import FieldDoc, count_fields, describe
from .loading import dump, load, presets
from .schema import Config

__all__ = [
    "Config",
    "FieldDoc",
    "check",
    "count_fields",
    "describe",
    "dump",
    "load",
    "presets",
]
