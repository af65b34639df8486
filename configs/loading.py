"""Loading a config: from a YAML file, or a preset's name, and `key.sub=value` overrides to a checked `Config`, and back.

Invariants:
- A config is either right or refused with one line that names the key, the value and what is allowed.
- Nothing is guessed: no unknown key is ignored, no type is coerced (an integer is a number; nothing else passes for another).
- The order of overrides does not matter, except that the last of two for the same key wins.
- `load(dump(config)) == config`.
- A file may begin with `extends: PRESET`, or a file by its path from there: sections are merged key by key, other values replaced.
- A section that changes its kind keeps the settings that mean the same in the new kind (same type, same default). The caller's
  `notice` receives a line that names the others.
- Top-level keys that begin with `x-` hold YAML anchors and are otherwise ignored.
- In paths `~` and `$VAR` stand for what they are in a shell.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec
import yaml
from msgspec import inspect as reflect

from ..common.fsio import is_file
from ..errors import ConfigError
from .checks import check
from .divergence import REFERENCE_KEY
from .engine_checks import SERVERS
from .environments import (
    FILES,
    PLACES,
    DataSection,
    PythonEnv,
    Tasks,
    installed_kinds,
    is_installed,
    replace_installed_kinds,
)
from .fields import annotations_of, default_tag, describe_schema, root, type_of, type_text, variants
from .renamed import replacement_of
from .schema import Config
from .yaml_text import Dumper, parse

HERE = Path(__file__).parent
Notice = Callable[[str], None]  # receives a line about what was read

PATHS = (
    "run.dir", "model.path", "reward.path", REFERENCE_KEY, "sft.out", "sft.messages",
    "sft.preferences", "agent.sandbox.folder",
)  # fmt: skip
"""Keys that hold a path, or a hub name."""

DATA_PATHS = ("path", "evaluation", "reward")
"""Those of environments that read data."""

C = TypeVar("C", bound=Config)
Tree = dict[str, Any]
Sections = tuple[reflect.StructType, ...]


def presets() -> tuple[str, ...]:
    """Names of the presets that ship with the package."""
    return tuple(sorted(path.stem for path in HERE.glob("*.yaml")))


def load(
    path_or_preset: str, overrides: Sequence[str] = (), schema: type[C] = Config, notice: Notice = lambda line: None
) -> C:
    """Read a YAML file or a preset, apply overrides such as `buffer.max_staleness=4`, check everything. `schema` is `SftConfig`
    for a config that also has the section `sft`; `notice` receives a line for each section whose kind changed and lost settings.
    Raises ConfigError in one line, naming the key, the value and what is allowed."""
    return _checked(_read(path_or_preset, root(schema), notice, ()), overrides, schema, notice)


def _checked(data: Tree, overrides: Sequence[str], schema: type[C], notice: Notice) -> C:
    """The config that a raw tree and overrides make."""
    top = root(schema)
    for keys, text in sorted(map(_parse_override, overrides), key=lambda o: (len(o[0]), o[0][-1] != "kind")):
        _apply(data, keys, text, top, notice)
    replace_installed_kinds(data)
    _validate(data, schema, None, "")
    config = msgspec.convert(data, schema, strict=True)
    check(config)
    return config


def changed(config: C, overrides: Sequence[str]) -> C:
    """`config` with overrides applied and checked, as `load` does. Raises ConfigError."""
    data = msgspec.json.decode(msgspec.json.encode(config))
    return _checked(data, overrides, type(config), lambda line: None)


def dump(config: Config) -> str:
    """YAML of every key, which loads back equal."""
    return yaml.dump(msgspec.to_builtins(config), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=110)


def _read(path_or_preset: str, top: reflect.StructType, notice: Notice, below: tuple[Path, ...]) -> Tree:
    """The raw tree of a file and of those that it extends. `below` are the files that led here."""
    path = Path(os.path.expanduser(path_or_preset))
    if below and not path.is_absolute() and path_or_preset not in presets():
        path = below[-1].parent / path
    if not is_file(path):
        if path_or_preset not in presets():
            where = f"{below[-1]}: extends: " if below else ""
            known = ", ".join(presets())
            raise ConfigError(f"{where}{path_or_preset}: no such file, and no such preset; presets: {known}")
        path = HERE / f"{path_or_preset}.yaml"
    if path.resolve() in below:
        raise ConfigError(f"{path}: extends itself, by way of {', '.join(p.name for p in below)}")
    try:
        data = parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected {type_text(top)}, not {data!r}")
    data = {key: value for key, value in data.items() if not key.startswith("x-")}
    if "extends" not in data:
        return data
    parent = data.pop("extends")
    if not isinstance(parent, str):
        raise ConfigError(f"{path}: extends: {parent!r} is not text; name a preset or a file")
    base = _read(parent, top, notice, (*below, path.resolve()))
    _merge(base, data, (top,), None, "", notice)
    return base


def _merge(base: Tree, over: Tree, sections: Sections, default: Any, path: str, notice: Notice) -> None:
    """Write the keys of `over` into `base`, section by section; `default` is the section's kind where `base` has none."""
    tag_field = str(sections[0].tag_field)
    if sections[0].tag is not None and tag_field in over:
        _set_kind(base, sections, default, over[tag_field], path, notice)
    section = next((s for s in sections if s.tag == base.get(tag_field, default)), sections[0])
    types = {field.name: field for field in section.fields}
    for key, value in over.items():
        field, below = types.get(key), base.get(key)
        if field and (inner := variants(field.type)) and isinstance(value, dict) and isinstance(below, dict):
            _merge(below, value, inner, default_tag(field), f"{path}.{key}" if path else key, notice)
        else:
            base[key] = value


def _set_kind(node: Tree, sections: Sections, default: Any, new: Any, path: str, notice: Notice) -> None:
    """Give a section another kind: settings that mean the same there stay, the others go. `notice` names those that went, unless
    the kinds have nothing in common."""
    tag_field = str(sections[0].tag_field)
    old = node.pop(tag_field, default)
    fields = {s.tag: {f.name: (f.type, f.default, f.default_factory) for f in s.fields} for s in sections}
    if new != old:
        before, after = fields.get(old, {}), fields.get(new, {})
        gone = [key for key in node if key not in after or after[key] != before.get(key)]
        related = any(key in after for key in node)
        dropped = ", ".join(f"{key}={node.pop(key)}" for key in gone)
        if dropped and related:
            notice(f"{path}.{tag_field}={new}: dropped {dropped}, which belonged to {tag_field} {old}")
    node[tag_field] = new


def _expanded(path: str, text: str) -> str:
    """A path with `~` and `$VAR` replaced."""
    expanded = os.path.expandvars(os.path.expanduser(text))
    if unset := re.search(r"\$(\w+|\{\w+\})", expanded):
        raise ConfigError(f"{path}: {text!r} names {unset[0]}, which is not set in the environment")
    return expanded


def _parse_override(override: str) -> tuple[tuple[str, ...], str]:
    key, equals, text = override.partition("=")
    keys = tuple(key.strip().split("."))
    if not equals or not all(keys):
        raise ConfigError(f"override {override!r} is not of the form key.sub=value, for example buffer.max_staleness=4")
    return keys, text.strip()


def _apply(data: Tree, keys: tuple[str, ...], text: str, top: reflect.StructType, notice: Notice) -> None:
    """Set one key of the raw tree. Text stays text where the schema wants text, so that `rollout.engine.memory=0.85` and
    `reward.template={answer} {reference}` work."""
    refused: ConfigError | None = None
    value: Any = text
    try:
        value = parse(text)
    except ConfigError as error:
        refused = ConfigError(f"{'.'.join(keys)}={text}: {error}")
    node, kind, tag = data, top, None
    for depth, key in enumerate(keys):
        above, last = ".".join(keys[:depth]), depth == len(keys) - 1
        if sections := variants(kind):
            if last and sections[0].tag is not None and key == sections[0].tag_field:
                return _set_kind(node, sections, tag, value, above, notice)
            if _are_environments(sections) and is_installed(node.get("kind")):  # its factory knows its arguments
                kind, tag = reflect.AnyType(), None
            else:
                field = _field(_variant(sections, node, tag, above), key, above)
                kind, tag = field.type, default_tag(field)
        elif isinstance(kind, reflect.DictType):
            kind = kind.value_type
        elif not isinstance(kind, reflect.AnyType):
            raise ConfigError(f"{above}.{key}: {above} has no keys below it; it is {type_text(kind)}")
        if not last:
            below = node.get(key)
            node[key] = node = below if isinstance(below, dict) else {}
    wants_text = isinstance(kind, reflect.StrType)
    if refused and not wants_text:
        raise refused
    node[keys[-1]] = text if wants_text and not isinstance(value, str) else value


def _variant(sections: Sections, node: Tree, default: Any, path: str) -> reflect.StructType:
    """The kind of a section in the raw tree; `default` where the tree has no key `kind`."""
    named = [s for s in sections if s.tag is not None]
    if not named:
        return sections[0]
    tag = node.get(str(named[0].tag_field), default)
    for section in named:
        if section.tag == tag:
            return section
    tags = [str(section.tag) for section in named]
    if _are_environments(sections):
        tags += sorted(set(installed_kinds()) - set(tags))
    close = difflib.get_close_matches(str(tag).lower(), tags, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    wrong = "must be set" if tag is None else f"{tag!r} is unknown"
    raise ConfigError(f"{path}.{named[0].tag_field}: {wrong}; {hint}allowed: {', '.join(tags)}")


def _are_environments(sections: Sections) -> bool:
    return any(section.cls is PythonEnv for section in sections)


def _field(section: reflect.StructType, key: str, prefix: str) -> reflect.Field:
    for field in section.fields:
        if field.name == key:
            return field
    allowed = [f.name for f in section.fields]
    if section.tag is not None:
        allowed.insert(0, str(section.tag_field))
    here = prefix + "." if prefix else ""
    where = f"allowed in {prefix}" if prefix else "allowed at the top"
    of_kind = f" with {section.tag_field} {section.tag}" if section.tag is not None else ""
    hint = _hint(key, here, allowed)
    raise ConfigError(f"{here}{key}: no such key; {hint}{where}{of_kind}: {', '.join(allowed)}")


def _hint(key: str, here: str, allowed: Sequence[str]) -> str:
    """What replaced this key, the kinds that have it, a key of the section that is written alike, or one anywhere in the schema."""
    if new := replacement_of(here + key):
        return f"it is now {new}; "
    everywhere = describe_schema()
    if kinds := [kind for doc in everywhere if doc.key == here + key for kind in doc.kinds]:
        either = kinds[0] if len(kinds) == 1 else f"{', '.join(kinds[:-1])} or {kinds[-1]}"
        return f"it belongs to {here}kind={either}, which must be set too; "
    close = [here + name for name in difflib.get_close_matches(key, allowed, n=1)]
    if not close:
        paths = {doc.key.removesuffix(".kind") for doc in everywhere}
        paths |= {path.rpartition(".")[0] for path in paths}
        leaves = difflib.get_close_matches(key, {path.rpartition(".")[2] for path in paths}, n=1, cutoff=0.8)
        close = sorted(path for path in paths if path.rpartition(".")[2] in leaves)[:3]
    return f"did you mean {' or '.join(close)}? " if close else ""


def _validate(value: Any, annotation: Any, default: Any, path: str) -> None:
    """Raises ConfigError for the first key or value at or below `path` that the schema refuses. Fills in the kinds that sections
    have by default, the default entries of mappings, and variables in paths. `default` is the kind of the section at `path`."""
    kind = type_of(annotation)
    if isinstance(value, dict) and (sections := variants(kind)):
        section = _variant(sections, value, default, path)
        if section.tag is not None:
            value[str(section.tag_field)] = section.tag
        _validate_section(value, section, path)
    elif isinstance(value, dict) and isinstance(kind, reflect.DictType):
        names, below = get_args(annotation)
        for name, item in value.items():
            allowed = get_args(names)
            if allowed and name not in allowed:
                hint = _hint(name, f"{path}.", allowed)
                raise ConfigError(f"{path}.{name}: no such key; {hint}allowed in {path}: {', '.join(sorted(allowed))}")
            _validate(item, below, None, f"{path}.{name}")
    else:
        _validate_value(value, annotation, path)


def _validate_section(value: Tree, section: reflect.StructType, path: str) -> None:
    here = f"{path}." if path else ""
    annotations = annotations_of(section.cls)
    for key, item in value.items():
        if key == section.tag_field:
            continue
        field = _field(section, key, path)
        if isinstance(item, dict) and isinstance(field.type, reflect.DictType):
            default = {} if field.required else msgspec.to_builtins(field.default_factory())
            item = value[key] = default | item
        names_path = here + key in PATHS or (issubclass(section.cls, DataSection) and key in DATA_PATHS)
        names_path = names_path or (issubclass(section.cls, Tasks) and key in (*PLACES, *FILES.get(section.cls, ())))
        if isinstance(item, str) and names_path:
            item = value[key] = _expanded(here + key, item)
        if isinstance(item, dict) and here + key == SERVERS:
            item |= {url: _expanded(SERVERS, file) for url, file in item.items() if isinstance(file, str)}
        elif isinstance(item, dict) and names_path:
            paths = {
                name: _expanded(f"{here}{key}.{name}", text) for name, text in item.items() if isinstance(text, str)
            }
            item = value[key] = item | paths
        _validate(item, annotations[key], default_tag(field), here + key)
    for field in section.fields:
        if field.required and field.name not in value:
            raise ConfigError(f"{here}{field.name}: must be set; it has no default")


def _validate_value(value: Any, annotation: Any, path: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{path}: {value} is not a finite number")
    try:
        msgspec.convert(value, annotation, strict=True)
    except msgspec.ValidationError:
        kind = type_of(annotation)
        if isinstance(kind, reflect.StrType):
            raise ConfigError(f"{path}: {value!r} is not text; write it in quotes") from None
        kinds = [section.tag_field for section in variants(kind) if section.tag == value]
        hint = f"; did you mean {path}.{kinds[0]}={value}?" if kinds else ""
        raise ConfigError(f"{path}: {value!r} is not allowed; expected {type_text(kind)}{hint}") from None


RUN_CONFIG = "config.yaml"  # in the folder of a run


def run_config(run: str | Path) -> Path:
    """The config file of a run folder. Raises ConfigError where the folder holds no run."""
    path = Path(run) / RUN_CONFIG
    if not is_file(path):
        raise ConfigError(f"{run} holds no run: there is no {path}")
    return path
