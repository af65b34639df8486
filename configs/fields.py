"""The documentation of the config keys: the type and the docstring of every key, found by reflection and never written twice.

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
from msgspec import structs

from . import algorithm, backends, divergence, engines, environments, evaluation, reward, schema, sft
from .schema import Config


class FieldDoc(msgspec.Struct, frozen=True):
    """One key that can be written: its full dotted name, what it takes, what it is now, and what it means. `kinds` are those of
    its section that have it, where others have not."""

    key: str
    type: str
    value: str
    doc: str
    kinds: tuple[str, ...] = ()


@functools.cache
def type_of(annotation: Any) -> reflect.Type:
    """What an annotation of the schema allows. That of a section has all that is below it, and takes milliseconds to find: the
    second config of a process is read in an eighth of the time."""
    return reflect.type_info(annotation)


@functools.cache
def annotations_of(section: type) -> dict[str, Any]:
    """The annotation of each field of a section."""
    return {field.name: field.type for field in structs.fields(section)}


def root(schema: type[Config] = Config) -> reflect.StructType:
    """The type of a whole config."""
    kind = type_of(schema)
    assert isinstance(kind, reflect.StructType)
    return kind


def variants(kind: reflect.Type) -> tuple[reflect.StructType, ...]:
    """The sections that `kind` may be: one, several for a union of sections, none for a plain value."""
    members = kind.types if isinstance(kind, reflect.UnionType) else (kind,)
    return tuple(m for m in members if isinstance(m, reflect.StructType))


def default_tag(field: reflect.Field) -> Any:
    """The `kind` of a section by default, None for a section without kinds."""
    config = getattr(field.default_factory, "__struct_config__", None)
    return None if config is None else config.tag


def type_text(kind: reflect.Type) -> str:
    """What a key takes, in words: `an integer >= 1`, `one of float32, bfloat16`."""
    match kind:
        case reflect.IntType() | reflect.FloatType():
            noun = "an integer" if isinstance(kind, reflect.IntType) else "a number"
            bounds = ((">=", kind.ge), (">", kind.gt), ("<=", kind.le), ("<", kind.lt))
            limits = " and ".join(f"{sign} {limit:.12g}" for sign, limit in bounds if limit is not None)
            return f"{noun} {limits}".strip()
        case reflect.BoolType():
            return "true or false"
        case reflect.StrType():
            return "text"
        case reflect.NoneType():
            return "null"
        case reflect.LiteralType(values=values):
            return "one of " + ", ".join(str(v) for v in values)
        case reflect.VarTupleType(item_type=reflect.LiteralType(values=values)):
            return f"a list of {', '.join(str(v) for v in values)}; for example [{values[0]}]"
        case reflect.VarTupleType(item_type=item):
            return f"a list of {type_text(item)}"
        case reflect.TupleType(item_types=items):
            return f"a list of {len(items)}, each {type_text(items[0])}"
        case reflect.UnionType(types=types) if not variants(kind):
            return " or ".join(type_text(member) for member in types)
        case reflect.DictType(key_type=names, value_type=below) if variants(below):
            keys = ", ".join(map(str, names.values)) if isinstance(names, reflect.LiteralType) else "names"
            return f"a mapping of {keys} to {type_text(below).removeprefix('a ').replace('section', 'sections', 1)}"
        case reflect.DictType(key_type=reflect.LiteralType(values=values), value_type=below):
            return f"a mapping of {', '.join(map(str, values))} to {type_text(below)}"
        case reflect.DictType():
            return "a mapping of names to values"
        case _:
            sections = variants(kind)
            keys = ", ".join(f.name for f in sections[0].fields) if len(sections) == 1 else "kind, and that kind's keys"
            return f"a section with the keys {keys}"


MODULES = (
    schema,
    algorithm,
    backends,
    divergence,
    engines,
    environments,
    evaluation,
    reward,
    sft,
)  # where sections are declared


@functools.cache
def docstrings() -> dict[str, dict[str, str]]:
    """Class name -> field name -> the string under that field."""
    found: dict[str, dict[str, str]] = {}
    nodes = (node for module in MODULES for node in ast.parse(inspect.getsource(module)).body)
    for node in (node for node in nodes if isinstance(node, ast.ClassDef)):
        fields = found.setdefault(node.name, {})
        for pair in zip(node.body, node.body[1:], strict=False):
            match pair:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str() as text)):
                    fields[name] = inspect.cleandoc(text)
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
    (kind,) = variants(type_of(type(section)))
    for field in kind.fields:
        doc, value = _field_doc(kind, field, prefix), getattr(section, field.name)
        if not isinstance(value, msgspec.Struct):
            yield structs.replace(doc, value=_value_text(value))
            continue
        if (tag := value.__struct_config__.tag) is not None:
            yield structs.replace(doc, value=str(tag))
        yield from _describe(value, f"{prefix}{field.name}.")


@functools.cache
def describe_schema() -> tuple[FieldDoc, ...]:
    """Every key of every kind with its default, the default kind first; one that is the same in several kinds is listed once."""
    return tuple(_describe_kinds(root(), "", None, ()))


def _describe_kinds(kind: reflect.Type, prefix: str, default: Any, above: tuple[type, ...]) -> Iterator[FieldDoc]:
    """The keys below `prefix`; `above` are the sections around, which are not entered again."""
    sections = sorted(variants(kind), key=lambda section: section.tag != default)
    docs = {section.cls: {f.name: _field_doc(section, f, prefix) for f in section.fields} for section in sections}
    for section in sections:
        for field in section.fields:
            doc, below = docs[section.cls][field.name], variants(field.type)
            same = [other for other in sections if docs[other.cls].get(field.name) == doc]
            if same[0] is not section:
                continue
            if not below or below[0].tag is not None:
                kinds = () if len(same) == len(sections) else tuple(str(other.tag) for other in same)
                only = f"; of {section.tag_field} {', '.join(kinds)}" if kinds else ""
                yield structs.replace(doc, type=doc.type + only, kinds=kinds)
            inside = (*above, section.cls)
            if isinstance(field.type, reflect.DictType):
                yield from _describe_kinds(field.type.value_type, f"{prefix}{field.name}.NAME.", None, inside)
            elif below and below[0].cls not in above and field.default is not None:  # those are documented elsewhere
                yield from _describe_kinds(field.type, f"{prefix}{field.name}.", default_tag(field), inside)


def _field_doc(section: reflect.StructType, field: reflect.Field, prefix: str) -> FieldDoc:
    """The documentation of a field; of a section with kinds that of its key `kind`."""
    key, below, doc = prefix + field.name, variants(field.type), docs_of(section.cls)[field.name]
    if below and below[0].tag is not None:
        tags = ", ".join(str(section.tag) for section in below)
        return FieldDoc(f"{key}.{below[0].tag_field}", f"one of {tags}", str(default_tag(field)), doc)
    default = field.default_factory() if field.default is msgspec.NODEFAULT and not field.required else field.default
    return FieldDoc(key, type_text(field.type), "(required)" if field.required else _value_text(default), doc)


def _value_text(value: object) -> str:
    return value if isinstance(value, str) and value and "\n" not in value else msgspec.json.encode(value).decode()
