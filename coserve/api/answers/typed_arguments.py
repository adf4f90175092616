"""Converts arguments that a model wrote as plain text to the types in the tool's JSON schema."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import NoneType
from typing import Any

import msgspec

Schemas = Mapping[str, dict[str, Any]]
"""JSON schemas of the tools' parameters, by the tools' names."""
_PYTHON = {"True": True, "False": False, "None": None}
"""Python literals, which some chat templates write instead of JSON."""
_NAMES = {NoneType: "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
"""JSON Schema's names of the types of decoded JSON."""


def schemas_of(tools: Iterable[Mapping[str, Any]]) -> Schemas:
    """Return the schemas of those `tools` of a request that have a name."""
    found: dict[str, dict[str, Any]] = {}
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            found[function["name"]] = parameters if isinstance(parameters, dict) else {}
    return found


def typed(text: str, schema: Mapping[str, Any], name: str) -> object:
    """Return the value of argument `name`: the text itself where `schema` says string or the text is no JSON,
    otherwise its JSON."""
    properties = schema.get("properties")
    types = _types(properties.get(name)) if isinstance(properties, dict) else set()
    if types == {"string"}:
        return text
    try:
        value = _PYTHON[text.strip()] if text.strip() in _PYTHON else msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return text
    return text if "string" in types and _type(value) not in types else value


def _types(schema: object) -> set[str]:
    """Return the names of the JSON types that a schema allows; empty if it does not say."""
    if not isinstance(schema, dict):
        return set()
    said = schema.get("type")
    found = {said} if isinstance(said, str) else {one for one in said or [] if isinstance(one, str)}
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            found |= {one for inner in schema[key] for one in _types(inner)}
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if not found and isinstance(values, list):
        found = {_type(value) for value in values}
    return found | {"integer"} if "number" in found else found


def _type(value: object) -> str:
    return _NAMES.get(type(value), "object")
