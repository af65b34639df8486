"""From a YAML file, or the name of a preset, and `key.sub=value` overrides to a checked `Config`, and back.

Invariants:
- A config is either right or refused with one line that names the key, the value and what is allowed.
- Nothing is guessed: no unknown key is ignored, no type is coerced (an integer is a number; nothing else passes for another).
- The order of overrides does not matter, except that the last of two for the same key wins.
- `load(dump(config)) == config`.

YAML is read by the core schema of YAML 1.2, where it is harmless: `1e-6` is a number, `no` and `2020-01-01` are text.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml
from msgspec import inspect as reflect

from ..errors import ConfigError
from .checks import check
from .fields import default_tag, root, type_text, variants
from .schema import Config

HERE = Path(__file__).parent

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


class _Loader(yaml.SafeLoader):
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


class _Dumper(yaml.SafeDumper):
    """Quotes exactly the text that `_Loader` would not read as text."""


for _side in (_Loader, _Dumper):
    _side.yaml_implicit_resolvers = {}
    for _name, _pattern, _first in _CORE_SCHEMA:
        _side.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(rf"^(?:{_pattern})$"), list(_first))


def presets() -> tuple[str, ...]:
    """Names of the presets that ship with the package."""
    return tuple(sorted(path.stem for path in HERE.glob("*.yaml")))


def load(path_or_preset: str, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file or a preset, apply overrides such as `buffer.max_staleness=4`, check everything.

    Setting the `kind` of a section to another kind drops that section's other keys from the file.

    Raises:
        ConfigError: one line, naming the key, the value and what is allowed.
    """
    data = _read(path_or_preset)
    for keys, text in sorted(map(_parse_override, overrides), key=lambda o: (len(o[0]), o[0][-1] != "kind")):
        _apply(data, keys, text)
    _refuse_unknown(data, root(), "")
    config = _convert(data)
    check(config)
    return config


def dump(config: Config) -> str:
    """YAML of every key, which loads back equal."""
    return yaml.dump(msgspec.to_builtins(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def _read(path_or_preset: str) -> dict[str, Any]:
    path = Path(path_or_preset)
    if not path.is_file():
        if path_or_preset not in presets():
            raise ConfigError(f"{path_or_preset}: no such file, and no such preset; presets: {', '.join(presets())}")
        path = HERE / f"{path_or_preset}.yaml"
    try:
        data = _parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected {type_text(root())}, not {data!r}")
    return data


def _parse(text: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"line {line}: not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"not valid YAML: {' '.join(str(error).split())}") from None


def _parse_override(override: str) -> tuple[tuple[str, ...], str]:
    key, equals, text = override.partition("=")
    keys = tuple(key.strip().split("."))
    if not equals or not all(keys):
        raise ConfigError(f"override {override!r} is not of the form key.sub=value, for example buffer.max_staleness=4")
    return keys, text.strip()


def _apply(data: dict[str, Any], keys: tuple[str, ...], text: str) -> None:
    """Set one key of the raw tree. Text stays text where the schema wants text, so that `rollout.engine.memory=0.85` and
    `reward.template={answer} {reference}` work."""
    refused: ConfigError | None = None
    value: Any = text
    try:
        value = _parse(text)
    except ConfigError as error:
        refused = ConfigError(f"{'.'.join(keys)}={text}: {error}")
    node, kind, tag = data, root(), None
    for depth, key in enumerate(keys):
        path = ".".join(keys[: depth + 1])
        last = depth == len(keys) - 1
        if sections := variants(kind):
            if last and sections[0].tag is not None and key == sections[0].tag_field:
                if value != node.get(key, tag):
                    node.clear()
                node[key] = value
                return
            section = _variant(sections, node, tag, ".".join(keys[:depth]))
            field = _field(section, key, ".".join(keys[:depth]))
            kind, tag = field.type, default_tag(field)
        elif isinstance(kind, reflect.DictType):
            kind = kind.value_type
        elif not isinstance(kind, reflect.AnyType):
            raise ConfigError(f"{path}: {'.'.join(keys[:depth])} has no keys below it; it is {type_text(kind)}")
        if last:
            if refused and not isinstance(kind, reflect.StrType):
                raise refused
            node[key] = text if isinstance(kind, reflect.StrType) and not isinstance(value, str) else value
            return
        below = node.get(key)
        node[key] = node = below if isinstance(below, dict) else {}


def _variant(
    sections: tuple[reflect.StructType, ...], node: dict[str, Any], default: Any, path: str
) -> reflect.StructType:
    """Which of a section's kinds the raw tree means; `default` when it does not say."""
    named = [s for s in sections if s.tag is not None]
    if not named:
        return sections[0]
    tag = node.get(str(named[0].tag_field), default)
    for section in named:
        if section.tag == tag:
            return section
    wrong = "must be set" if tag is None else f"{tag!r} is unknown"
    raise ConfigError(f"{path}.{named[0].tag_field}: {wrong}; allowed: {', '.join(str(s.tag) for s in named)}")


def _field(section: reflect.StructType, key: str, prefix: str) -> reflect.Field:
    for field in section.fields:
        if field.name == key:
            return field
    raise _unknown(section, key, prefix)


def _unknown(section: reflect.StructType, key: str, prefix: str) -> ConfigError:
    allowed = [f.name for f in section.fields]
    if section.tag is not None:
        allowed.insert(0, str(section.tag_field))
    here = prefix + "." if prefix else ""
    where = f"allowed in {prefix}" if prefix else "allowed at the top"
    of_kind = f" with {section.tag_field} {section.tag}" if section.tag is not None else ""
    hint = _hint(key, here, allowed)
    return ConfigError(f"{here}{key}: no such key; {hint}{where}{of_kind}: {', '.join(allowed)}")


def _hint(key: str, here: str, allowed: list[str]) -> str:
    """The kind that has this key, a key of the same section that is written alike, or one anywhere in the schema."""
    everywhere = dict(_keys(root(), ""))
    if kind := everywhere.get(here + key):
        return f"it belongs to {here}kind={kind}, which must be set too; "
    close = [here + name for name in difflib.get_close_matches(key, allowed, n=1)]
    if not close:
        leaves = difflib.get_close_matches(key, {path.rpartition(".")[2] for path in everywhere}, n=1, cutoff=0.8)
        close = [path for path in everywhere if path.rpartition(".")[2] in leaves][:3]
    return f"did you mean {' or '.join(close)}? " if close else ""


def _keys(kind: reflect.Type, prefix: str) -> Iterator[tuple[str, Any]]:
    """Every key of the schema with the kind that it belongs to, None where its section has no kinds."""
    for section in variants(kind):
        for field in section.fields:
            yield prefix + field.name, section.tag
            yield from _keys(field.type, f"{prefix}{field.name}.")


def _refuse_unknown(data: dict[str, Any], section: reflect.StructType, prefix: str) -> None:
    """Refuses keys that the schema does not have and numbers that are not finite; fills in the kinds that were not said."""
    for key, value in data.items():
        path = f"{prefix}.{key}" if prefix else key
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{path}: {value} is not a finite number")
        if section.tag is not None and key == section.tag_field:
            continue
        field = _field(section, key, prefix)
        _refuse_below(value, field.type, default_tag(field), path)


def _refuse_below(value: Any, kind: reflect.Type, default: Any, path: str) -> None:
    """`_refuse_unknown` for what `kind`, if it holds sections, says of `value`; `default` is its kind where nothing is said."""
    match kind, value:
        case reflect.VarTupleType(item_type=below), list():
            for number, item in enumerate(value):
                _refuse_below(item, below, None, f"{path}[{number}]")
        case reflect.DictType(key_type=names, value_type=below), dict():
            for name, item in value.items():
                if isinstance(names, reflect.LiteralType) and name not in names.values:
                    allowed = [str(n) for n in names.values]
                    hint = _hint(name, f"{path}.", allowed)
                    raise ConfigError(f"{path}.{name}: no such key; {hint}allowed in {path}: {', '.join(allowed)}")
                _refuse_below(item, below, None, f"{path}.{name}")
        case _, dict() if sections := variants(kind):
            chosen = _variant(sections, value, default, path)
            _refuse_unknown(value, chosen, path)
            if chosen.tag is not None:
                value[str(chosen.tag_field)] = chosen.tag
        case _:
            pass


def _convert(data: dict[str, Any]) -> Config:
    try:
        return msgspec.convert(data, Config, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error), data)) from None


def _explain(error: str, data: Any) -> str:
    """msgspec names the place; the value there and what the schema allows there are looked up by us."""
    what, _, where = error.partition(" - at `$.")
    path, kind, value = "", root(), data
    for key, index, some in re.findall(r"(\w+)|\[(\d+)\]|(\[\.\.\.\])", where.rstrip("`")):
        if some and isinstance(kind, reflect.DictType):
            below = kind.value_type
            name = next(name for name, item in value.items() if not _fits(item, below))
            path, kind, value = f"{path}.{name}", below, value[name]
        elif isinstance(kind, reflect.VarTupleType):
            if not isinstance(kind.item_type, reflect.StructType):
                break  # of a list of words all words are shown
            path, kind, value = f"{path}[{index}]", kind.item_type, value[int(index)]
        else:
            path = f"{path}.{key}" if path else key
            kind, value = _field(_variant(variants(kind), value, None, path), key, path).type, value[key]
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", what):
        return f"{path}.{missing[1]}: must be set; it has no default"
    if isinstance(kind, reflect.StrType):
        return f"{path}: {value!r} is not text; write it in quotes"
    return f"{path}: {value!r} is not allowed; expected {type_text(kind)}"


def _fits(item: Any, kind: reflect.Type) -> bool:
    """Whether a value is one of the sections, or the integer, that `kind` may be."""
    if isinstance(kind, reflect.IntType):
        return type(item) is int and (kind.ge is None or item >= kind.ge)
    sections = variants(kind)
    tag = item.get(str(sections[0].tag_field)) if isinstance(item, dict) else None
    try:
        return any(msgspec.convert(item, section.cls, strict=True) for section in sections if section.tag == tag)
    except msgspec.ValidationError:
        return False
