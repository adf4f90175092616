"""Descriptions in JSON schemas, taken from the attribute docstrings of struct fields."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import msgspec


def describe_fields(components: dict[str, Any], types: Iterable[type[msgspec.Struct]]) -> None:
    """Add a `description` to each property in `components` whose field has an attribute docstring. `types` include all
    components."""
    for struct in structs_within(types):
        properties = components.get(struct.__name__, {}).get("properties", {})
        for name, text in field_docs(struct).items():
            if name in properties:
                properties[name].setdefault("description", text)


def field_docs(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Return attribute docstrings by the field's name in JSON; an inherited field has its base class's docstring."""
    encoded = dict(zip(struct.__struct_fields__, struct.__struct_encode_fields__, strict=True))
    found: dict[str, str] = {}
    for owner in reversed(struct.__mro__):
        if issubclass(owner, msgspec.Struct) and owner is not msgspec.Struct:
            texts = _texts(owner.__module__)[owner.__name__]
            found |= {encoded[name]: text for name, text in texts.items() if name in encoded}
    return found


@cache
def _texts(module: str) -> Mapping[str, Mapping[str, str]]:
    """Return attribute docstrings by class and field. The whole module is parsed once, since `inspect.getsource` parses
    it for each class."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {each.name: dict(_texts_below(each)) for each in tree.body if isinstance(each, ast.ClassDef)}


def _texts_below(defined: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, below in zip(defined.body, defined.body[1:], strict=False):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, " ".join(text.split())


def structs_within(types: Iterable[type[msgspec.Struct]]) -> set[type[msgspec.Struct]]:
    """Return these structs, and the structs that their fields hold."""
    found: set[type[msgspec.Struct]] = set()
    left: list[msgspec.inspect.Type] = list(msgspec.inspect.multi_type_info(types))
    while left:
        match left.pop():
            case msgspec.inspect.StructType(cls=struct, fields=fields):
                if struct not in found:
                    found.add(struct)
                    left += [field.type for field in fields]
            case msgspec.inspect.UnionType(types=parts) | msgspec.inspect.TupleType(item_types=parts):
                left += parts
            case msgspec.inspect.ListType(item_type=item) | msgspec.inspect.VarTupleType(item_type=item):
                left.append(item)
            case msgspec.inspect.DictType(key_type=key, value_type=value):
                left += [key, value]
            case msgspec.inspect.Metadata(type=inner):
                left.append(inner)
    return found
