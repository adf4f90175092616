"""Facts about a body's type: the fields of each level, and the values that an enum allows at a path."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from msgspec.inspect import (
    DictType,
    EnumType,
    FloatType,
    IntType,
    ListType,
    LiteralType,
    StructType,
    Type,
    UnionType,
    type_info,
)

DEPTH = 8
"""Most levels of a field's value to search for content; deeper values count as not empty."""

_STEP = re.compile(r"([^.\[\]]+)|\[(?:\d+|\.\.\.)\]")


def is_empty(value: object, depth: int = DEPTH) -> bool:
    """Whether a value is null, `""`, `[]`, `{}`, or an object with only such values."""
    if isinstance(value, dict):
        return depth > 0 and all(is_empty(entry, depth - 1) for entry in value.values())
    return value is None or value == "" or value == []


def drop_empty(value: object, type: type) -> None:
    """Remove unknown fields with empty values, at every level, in place.

    `value`: a decoded JSON body. Lists longer than the type allows are left as they are: decoding refuses them.
    """
    _drop(value, _levels(type))


def alternatives(type: type, place: str) -> list[str]:
    """The values that an enum or a literal of `type` allows at `place`, a path such as `messages[0].role`."""
    found = [_info(type)]
    for step in _STEP.finditer(place):
        found = [inner for info in found for inner in _inside(info, step[1])]
    values: list[str] = []
    for info in found:
        for leaf in _members(info):
            if isinstance(leaf, LiteralType):
                values += [str(value) for value in leaf.values]
            elif isinstance(leaf, EnumType):
                values += [str(member.value) for member in leaf.cls]
            elif isinstance(leaf, IntType | FloatType):
                values.append("a number")
    return values


def _inside(info: Type, name: str | None) -> Iterator[Type]:
    """The types of the field `name`, or of the entries (None)."""
    for leaf in _members(info):
        if isinstance(leaf, StructType) and name is not None:
            yield from (field.type for field in leaf.fields if field.encode_name == name)
        elif isinstance(leaf, ListType) and name is None:
            yield leaf.item_type
        elif isinstance(leaf, DictType):
            yield leaf.value_type


def _members(info: Type) -> tuple[Type, ...]:
    return info.types if isinstance(info, UnionType) else (info,)


@cache
def _info(type: type) -> Type:
    return type_info(type)


@dataclass(frozen=True)
class _Levels:
    """The structs within a type. `fields`: those of a struct here; `items`: the entries of a list of structs here."""

    fields: dict[str, _Levels | None] | None
    items: _Levels | None
    most: int | None
    """Most entries of that list."""


@cache
def _levels(type: type) -> _Levels | None:
    return _levels_of(_info(type))


def _levels_of(info: Type) -> _Levels | None:
    fields: dict[str, _Levels | None] | None = None
    items, most = None, None
    for leaf in _members(info):
        if isinstance(leaf, StructType):
            fields = {field.encode_name: _levels_of(field.type) for field in leaf.fields}
        elif isinstance(leaf, ListType) and (inner := _levels_of(leaf.item_type)) is not None:
            items, most = inner, leaf.max_length
    return None if fields is None and items is None else _Levels(fields, items, most)


def _drop(value: object, levels: _Levels | None) -> None:
    if levels is None:
        return
    if isinstance(value, dict) and levels.fields is not None:
        for name in [name for name in value if name not in levels.fields and is_empty(value[name])]:
            del value[name]
        for name, inner in levels.fields.items():
            if inner is not None and name in value:
                _drop(value[name], inner)
    elif isinstance(value, list) and levels.items is not None and (levels.most is None or len(value) <= levels.most):
        for entry in value:
            _drop(entry, levels.items)
