"""What the schema says of itself: the type and the docstring of every key, found by reflection and never written twice.

Invariants:
- A key is documented where it is declared: the string under a field in `MODULES` is its documentation.
- A section with kinds is a tagged struct, or a union of them; its key `kind` is documented like any other.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect as reflect

from . import algorithm, backends, reward, schema
from .schema import Config


class FieldDoc(msgspec.Struct, frozen=True):
    """One key that can be written: its full dotted name, what it takes, what it is now, and what it means."""

    key: str
    type: str
    value: str
    doc: str


def root() -> reflect.StructType:
    """The type of a whole config."""
    kind = reflect.type_info(Config)
    assert isinstance(kind, reflect.StructType)
    return kind


def variants(kind: reflect.Type) -> tuple[reflect.StructType, ...]:
    """The sections that `kind` may be: one, several for a union of sections, none for a plain value."""
    members = kind.types if isinstance(kind, reflect.UnionType) else (kind,)
    return tuple(m for m in members if isinstance(m, reflect.StructType))


def default_tag(field: reflect.Field) -> Any:
    """The `kind` that a section has when nothing is said, None for a section without kinds."""
    config = getattr(field.default_factory, "__struct_config__", None)
    return None if config is None else config.tag


def type_text(kind: reflect.Type) -> str:
    """What a key takes, in words: `an integer >= 1`, `one of float32, bfloat16`."""
    match kind:
        case reflect.IntType() | reflect.FloatType():
            noun = "an integer" if isinstance(kind, reflect.IntType) else "a number"
            bounds = ((">=", kind.ge), (">", kind.gt), ("<=", kind.le), ("<", kind.lt))
            limits = " and ".join(f"{sign} {limit:g}" for sign, limit in bounds if limit is not None)
            return f"{noun} {limits}".strip()
        case reflect.BoolType():
            return "true or false"
        case reflect.StrType():
            return "text"
        case reflect.LiteralType(values=values):
            return "one of " + ", ".join(str(v) for v in values)
        case reflect.VarTupleType(item_type=reflect.LiteralType(values=values)):
            return f"a list of {', '.join(str(v) for v in values)}; for example [{values[0]}]"
        case reflect.DictType(key_type=names, value_type=below) if variants(below):
            keys = ", ".join(map(str, names.values)) if isinstance(names, reflect.LiteralType) else "names"
            return f"a mapping of {keys} to {type_text(below).removeprefix('a ').replace('section', 'sections', 1)}"
        case reflect.DictType(key_type=reflect.LiteralType(values=values), value_type=below):
            return f"a mapping of {', '.join(map(str, values))} to {type_text(below)}"
        case reflect.DictType():
            return "a mapping of names to values"
        case reflect.VarTupleType(item_type=reflect.StructType(fields=fields)):
            return f"a list of sections with the keys {', '.join(f.name for f in fields)}"
        case _:
            sections = variants(kind)
            keys = ", ".join(f.name for f in sections[0].fields) if len(sections) == 1 else "kind, and that kind's keys"
            return f"a section with the keys {keys}"


MODULES = (schema, algorithm, backends, reward)
"""Where sections are declared."""


@functools.cache
def docstrings() -> dict[str, dict[str, str]]:
    """Class name -> field name -> the string under that field."""
    found: dict[str, dict[str, str]] = {}
    for node in (node for module in MODULES for node in ast.parse(inspect.getsource(module)).body):
        if not isinstance(node, ast.ClassDef):
            continue
        fields = found.setdefault(node.name, {})
        for here, after in zip(node.body, node.body[1:], strict=False):
            match here, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str() as text)):
                    fields[name] = inspect.cleandoc(text)
                case _:
                    continue
    return found


def docs_of(section: type) -> dict[str, str]:
    """Field name -> documentation, inherited fields included."""
    found: dict[str, str] = {}
    for base in reversed(section.__mro__):
        found |= docstrings().get(base.__name__, {})
    return found


def describe(config: Config) -> list[FieldDoc]:
    """Every value that `config` holds, in the order of the schema; of a section with kinds, the keys of its present kind."""
    return list(_describe(config, ""))


def _describe(section: msgspec.Struct, prefix: str) -> Iterator[FieldDoc]:
    docs = docs_of(type(section))
    for field in _fields(section):
        key, value = prefix + field.name, getattr(section, field.name)
        if not isinstance(value, msgspec.Struct):
            yield FieldDoc(key, type_text(field.type), _value_text(value), docs[field.name])
            continue
        tag = value.__struct_config__.tag
        if tag is not None:
            allowed = "one of " + ", ".join(str(v.tag) for v in variants(field.type))
            yield FieldDoc(f"{key}.{value.__struct_config__.tag_field}", allowed, str(tag), docs[field.name])
        yield from _describe(value, key + ".")


def _fields(section: msgspec.Struct) -> tuple[reflect.Field, ...]:
    return variants(reflect.type_info(type(section)))[0].fields


def _value_text(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def count_fields() -> int:
    """Keys in the whole schema: every field of every section of every kind, sections and `kind` keys included; a key that
    several kinds share, and a section that may stand in several places, counts once."""
    seen = set[type]()

    def count(kind: reflect.Type) -> int:
        kind = kind.item_type if isinstance(kind, reflect.VarTupleType) else kind
        kind = kind.value_type if isinstance(kind, reflect.DictType) else kind
        sections = [section for section in variants(kind) if section.cls not in seen]
        seen.update(section.cls for section in sections)
        tags = int(any(s.tag is not None for s in sections))
        keys = {field.encode_name: field.type for section in reversed(sections) for field in section.fields}
        return tags + sum(1 + count(field) for field in keys.values())

    return count(root())
