"""The YAML of configs, by the core schema of YAML 1.2, where it is harmless: `1e-6` is a number, `no` and `2020-01-01` are text."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

from ..errors import ConfigError

_CORE_SCHEMA = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:[0-9]+\.[0-9]*(?:[eE][-+]?[0-9]+)?|\.[0-9]+(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.inf)|\.nan",
        "-+.0123456789",
    ),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
)


class Loader(yaml.SafeLoader):
    """The core schema, and no key twice in one mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                raise ConfigError(
                    f"line {line}: the key {getattr(key, 'value', key)!r} is not text; write it in quotes"
                )
            if key.value in seen:
                raise ConfigError(
                    f"line {line}: the key {key.value!r} was set before, in line {seen[key.value]}; keep one"
                )
            seen[key.value] = line
        return super().construct_mapping(node, deep)


class Dumper(yaml.SafeDumper):
    """Quotes exactly the text that `Loader` would not read as text."""


for _side in (Loader, Dumper):
    _side.yaml_implicit_resolvers = {}
    for _name, _pattern, _first in _CORE_SCHEMA:
        _side.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(rf"^(?:{_pattern})$"), list(_first))


def parse(text: str) -> Any:
    """What a YAML text holds. Raises ConfigError naming the line."""
    try:
        return yaml.load(text, Loader=Loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"line {line}: not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"not valid YAML: {' '.join(str(error).split())}") from None
