"""Drops unknown fields that ask for nothing from decoded JSON: clients of other servers send them, and rows have
them. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from msgspec.inspect import AnyType, Field, ListType, NoneType, StructType, Type, type_info

from coserve.core.validation import members

DEPTH = 8
"""Most levels of a field's value to search for content; deeper values count as not empty."""

IDLE = frozenset({"cache_control", "index", "phase"})
"""Fields that clients send whatever the server, at any level: marks of a prompt cache, a streamed
call's place, and whether an answer is the final one."""


def is_empty(value: object, depth: int = DEPTH) -> bool:
    """Return whether a value is null, `""`, `[]`, `{}`, or an object with only such values."""
    if isinstance(value, dict):
        return depth > 0 and all(is_empty(entry, depth - 1) for entry in value.values())
    return value is None or value == "" or value == []


def drop_empty(value: object, type: type) -> None:
    """Remove unknown fields with empty values, those of `IDLE`, and nulls of fields that have another default, at every
    level, in place.

    `value`: decoded JSON. Lists longer than the type allows are left as they are: decoding refuses them.
    """
    _drop(value, _levels(type))


@dataclass(frozen=True)
class _Levels:
    """The structs nested in a type, as a tree. `fields`: for a struct, or for several of which a value may be any, the
    subtree of each field; `not_null`: fields whose null asks for nothing (`_null_is_idle`); `items`: for a list, the
    subtree of its entries."""

    fields: dict[str, _Levels | None] | None
    not_null: frozenset[str]
    items: _Levels | None
    most: int | None
    """Most entries that the list may have."""


@cache
def _levels(type: type) -> _Levels | None:
    return _levels_of(type_info(type))


def _levels_of(info: Type) -> _Levels | None:
    leaves, not_null = list(members(info)), set[str]()
    structs = [leaf for leaf in leaves if isinstance(leaf, StructType)]
    fields: dict[str, _Levels | None] | None = {} if structs else None
    items, most = None, None
    for leaf in leaves:
        if isinstance(leaf, StructType) and fields is not None:
            for field in leaf.fields:
                if _null_is_idle(field, structs):
                    not_null.add(field.encode_name)
                fields[field.encode_name] = _levels_of(field.type)
        elif isinstance(leaf, ListType) and (inner := _levels_of(leaf.item_type)) is not None:
            items, most = inner, leaf.max_length
    return None if fields is None and items is None else _Levels(fields, frozenset(not_null), items, most)


def _null_is_idle(field: Field, structs: Sequence[StructType]) -> bool:
    """Whether a field's null asks for nothing in a value that may be any of the structs: the field is optional and does
    not accept null, or some of the structs have no such field."""
    takes_null = any(isinstance(each, NoneType | AnyType) for each in members(field.type))
    in_all = all(any(one.encode_name == field.encode_name for one in each.fields) for each in structs)
    return not (takes_null or field.required) or not (in_all or (takes_null and field.required))


def _drop(value: object, levels: _Levels | None) -> None:
    if levels is None:
        return
    if isinstance(value, dict) and levels.fields is not None:
        for name in [name for name in value if name not in levels.fields or name in levels.not_null]:
            if value[name] is None or (name not in levels.fields and (name in IDLE or is_empty(value[name]))):
                del value[name]
        for name, inner in levels.fields.items():
            if inner is not None and name in value:
                _drop(value[name], inner)
    elif isinstance(value, list) and levels.items is not None and (levels.most is None or len(value) <= levels.most):
        for entry in value:
            _drop(entry, levels.items)
