"""Turns msgspec's validation errors into ours: "expected X, got Y", with the field's path, allowed values and likely
names.

Also a check of numbers that several requests share, and JSON decoders that are safe with several threads.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from threading import Lock
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from coserve.core.errors import InvalidRequest, UnknownField
from coserve.core.hints import fields_of, hint, near_miss, value_hint
from coserve.core.limits import LEAST_NORMAL
from coserve.core.names import ADAPTER_RULE, NAME_RULE

T = TypeVar("T")

_lock = Lock()
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
MAX_FIELD = 200
"""Maximum characters of a field's path in an error."""

_TYPE_WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "array": "an array",
    "list": "an array",
    "object": "an object",
    "dict": "an object",
}
"""Words of JSON for msgspec's and Python's names of types."""
_QUOTED = re.compile(r"`([^`]*)`")
_PATH = re.compile(r" - at (`key` in )?`\$\.?([^`]*)`$")
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+|\.\.\.)\]")
_ENTRY = "[...]"
"""Stands in msgspec's paths for an entry of a dict, whatever its key."""


def explain(error: msgspec.ValidationError, value: object, type: type) -> InvalidRequest | UnknownField:
    """Return our error for msgspec's. `value`: the input that was decoded as `type`; None: unknown."""
    text = str(error)
    found = _PATH.search(text)
    of_key, path = (found[1] is not None, found[2]) if found else (False, "")
    raw = text[: found.start()] if found else text
    message = raw.replace("`", "")
    for start, missing in (("Object contains unknown field ", False), ("Object missing required field ", True)):
        if message.startswith(start):
            name = message.removeprefix(start)
            field = f"{path}.{name}" if path else name
            if missing:
                return InvalidRequest(f"expected a field {name!r}, got none", field=field)
            suggestion = hint(name, path, fields_of(type))
            return UnknownField(f"unknown field {name[:80]!r}{suggestion}", field=field[:MAX_FIELD])
    if message.startswith("Invalid enum value"):
        found_value = _at(value, path)
        known = alternatives(type, path, value)
        meant = value_hint(path, found_value) or near_miss(str(found_value)[:80].lower(), known)
        listed = " or ".join(known) if "a number" in known else f"one of {', '.join(known)}"
        message = f"expected {listed}{_got(found_value)}{meant}"
        return InvalidRequest(message, field=path[:MAX_FIELD] or None)
    if message.startswith("Invalid value "):  # of the field that tells structs apart
        tag, known = _at(value, path), alternatives(type, path, value)
        meant = value_hint(path, tag) or near_miss(str(tag)[:80].lower(), known)
        return InvalidRequest(f"expected one of {', '.join(known)}{_got(tag)}{meant}", field=path[:MAX_FIELD])
    if "matching regex" in message:
        other = "base, none or adapter:NAME, with NAME " if "adapter:" in message else ""
        rule = ADAPTER_RULE if "(/" in message else NAME_RULE
        message = f"expected {other}{rule}" + (" (or name@version)" if "@" in message else "")
    else:
        message = _QUOTED.sub(lambda types: " or ".join(map(type_word, types[1].split(" | "))), raw)
    in_dict = of_key or path.endswith(_ENTRY)
    path = path.removesuffix(_ENTRY)
    key = _wrong_key(text, value, type, path) if in_dict else None
    if ", got" not in message and (key is not None or not in_dict):
        message += _got(key if of_key else _at(value, path, key))
    message = message[:1].lower() + message[1:]
    field = path if key is None else f"{path}.{key}"
    return InvalidRequest(f"key: {message}" if of_key else message, field=field[:MAX_FIELD] or None)


def type_word(name: str) -> str:
    """Return what a user reads for a type's name, such as `an integer` for `int`; another name as it is."""
    return _TYPE_WORDS.get(name, name)


def shown(value: object) -> str:
    """Return a value as an error shows it: booleans as in JSON, anything else as in Python."""
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _wrong_key(text: str, value: object, type: type, path: str) -> str | None:
    """Return the key of the dict entry at `path` that msgspec's error is about. Bisect for the shortest prefix of
    entries that raises the same error; its last entry is the wrong one."""
    entries = _at(value, path)
    if not isinstance(entries, dict):
        return None
    items = list(entries.items())

    def fails(last: int) -> bool:
        try:
            msgspec.convert(_replaced(value, _steps(path), dict(items[: last + 1])), type, str_keys=True)
        except msgspec.ValidationError as error:
            return str(error) == text
        return False

    wrong = bisect_left(range(len(items)), True, key=fails)
    return str(items[wrong][0]) if wrong < len(items) else None


def _steps(path: str) -> list[str | int]:
    """Return the path's steps: names of fields and indices of entries."""
    return [int(step[2]) if step[2] else step[1] for step in _STEP.finditer(path)]


def _at(value: Any, path: str, key: str | None = None) -> object:  # noqa: ANN401 - any JSON
    """Return the value at msgspec's path, or its entry `key`; None if not found."""
    try:
        for step in [*_steps(path), *([] if key is None else [key])]:
            value = value[step]
    except (KeyError, IndexError, TypeError, ValueError):
        return None
    return value


def _replaced(value: Any, steps: list[str | int], new: object) -> object:  # noqa: ANN401 - any JSON
    """Return a copy of `value` with `new` at the path `steps`."""
    if not steps:
        return new
    copy = value.copy()
    copy[steps[0]] = _replaced(value[steps[0]], steps[1:], new)
    return copy


def _got(value: object) -> str:
    """Return `, got VALUE`; empty if the value was not found."""
    if value is None:
        return ""
    if isinstance(value, dict | list):
        return f", got {len(value)} entries"
    text = shown(value)
    return f", got {text}" if len(text) <= 80 else f", got {len(str(value))} characters"


def alternatives(type: type, path: str, value: object) -> list[str]:
    """Return the values that an enum, a literal or a tag of `type` allows at `path`, such as `messages[0].role`, of an
    input `value`."""
    found = [msgspec.inspect.type_info(type)]
    for step in _STEP.finditer(path):
        found = [inner for info in found for inner in _inside(info, step[1], value)]
        value = _at(value, step[0])
    values: list[str] = []
    for info in found:
        for leaf in members(info):
            if isinstance(leaf, inspect.LiteralType):
                values += [str(value) for value in leaf.values]
            elif isinstance(leaf, inspect.EnumType):
                values += [str(member.value) for member in leaf.cls]
            elif isinstance(leaf, inspect.IntType | inspect.FloatType):
                values.append("a number")
    return values


def _inside(info: inspect.Type, name: str | None, value: object) -> Iterator[inspect.Type]:
    """Yield the types of the field `name` of `value`, or of the entries if it is None."""
    for leaf in members(info):
        if isinstance(leaf, inspect.StructType) and name is not None:
            if leaf.tag_field == name:
                yield inspect.LiteralType((leaf.tag,))
            elif not isinstance(value, dict) or value.get(leaf.tag_field, leaf.tag) == leaf.tag:
                yield from (field.type for field in leaf.fields if field.encode_name == name)
        elif isinstance(leaf, inspect.ListType | inspect.VarTupleType) and name is None:
            yield leaf.item_type
        elif isinstance(leaf, inspect.DictType):
            yield leaf.value_type


def members(info: inspect.Type) -> tuple[inspect.Type, ...]:
    """Return the types of a union, or the one type."""
    return info.types if isinstance(info, inspect.UnionType) else (info,)


def above_vocabulary(ids: Collection[int], vocab: int) -> str | None:
    """Return what is wrong with the first id that is not below `vocab`, and where in a list; None if all are."""
    if max(ids, default=0) < vocab:
        return None
    place, id = next((place, id) for place, id in enumerate(ids) if id >= vocab)
    at = f" at position {place}" if isinstance(ids, Sequence) else ""
    return f"expected token ids below {vocab} (0 to {vocab - 1}), got {id}{at}"


def check_one_given(given: Mapping[str, object], field: str) -> None:
    """Raise `InvalidRequest` for `field` unless exactly one of these values, by name, is not None."""
    found = [name for name, value in given.items() if value is not None]
    if len(found) != 1:
        *others, last = given
        got = "both" if len(given) == len(found) == 2 else " and ".join(found) or "none"
        raise InvalidRequest(f"expected one of {', '.join(others)} and {last}, got {got}", field=field)


def check_normal(value: float, *, field: str) -> None:
    """Raise `InvalidRequest` for a nonzero value that in fp32 is 0 or not a normal number."""
    if 0 < abs(value) < LEAST_NORMAL:
        expected = f"expected at least {LEAST_NORMAL:.3g}, the least normal fp32 number"
        raise InvalidRequest(f"{expected}, got {value}", field=field)


def decoder_of(type: type[T]) -> msgspec.json.Decoder[T]:
    """Return the type's only decoder, for code that several threads run. After the call `msgspec.convert` and decoders
    of other formats may use the type on any thread, too.

    msgspec prepares a Struct type and the types of its fields at first use. A second thread that uses one of them
    meanwhile reads unfinished data, and the process crashes (msgspec 0.22, SIGSEGV). So types that threads decode are
    prepared here, one after another.
    """
    with _lock:
        if (found := _decoders.get(type)) is None:
            found = _decoders[type] = msgspec.json.Decoder(type)
    return found


def decode_json(content: bytes | str, type: type[T]) -> T:
    """Decode with the type's only decoder. Raises `msgspec.DecodeError`, for text that is no UTF-8, too."""
    try:
        return decoder_of(type).decode(content)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(str(error)) from error
