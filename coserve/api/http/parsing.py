"""Decodes and checks requests: strict JSON, errors that name the field, adapter names, pages and local paths."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from coserve.api.http.body_types import alternatives, drop_empty
from coserve.api.openai.schemas import UNSUPPORTED
from coserve.errors import ForbiddenPath, InvalidRequest, MalformedJson, NotFound, UnknownField
from coserve.hints import fields_of, hint
from coserve.limits import PAGE_LIMIT, PAGE_SIZE
from coserve.names import NAME_RULE, is_adapter_ref, split_ref
from coserve.state.durable import disk_errors

T = TypeVar("T")

_PLACE = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")


def decode_json(content: bytes, type: type[T]) -> T:
    """`content` as `type`: no unknown field, no NaN, no infinity, no number in a text.

    Raises `MalformedJson`, `UnknownField`, `InvalidRequest`; the last two name the field.
    """
    return _decoded(content, lambda: msgspec.json.decode(content, type=type), type)


def decode_dialect(content: bytes, type: type[T]) -> T:
    """As `decode_json`, for clients of other servers: an unknown field with an empty value is ignored.

    Such clients send back fields that they received, and write `null`, `[]`, `{}` or `""` for what they leave out.
    """
    try:
        return decode_json(content, type)
    except UnknownField:
        pass
    value: object = _decoded(content, lambda: msgspec.json.decode(content), type)
    drop_empty(value, type)
    try:
        return _decoded(content, lambda: msgspec.convert(value, type, str_keys=True), type)
    except UnknownField as error:
        name = (error.field or "").rpartition(".")[2]
        if name in UNSUPPORTED:
            raise InvalidRequest(f"{name} is not supported: expected it left out", field=error.field) from None
        raise


def _decoded(content: bytes, decode: Callable[[], T], type: type[Any]) -> T:
    """The result of `decode`; msgspec's errors become ours. `content`: the bytes that it decodes."""
    try:
        return decode()
    except msgspec.ValidationError as error:
        raise _explain(str(error), content, type) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        detail = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error).removeprefix("JSON is ")
        raise MalformedJson(f"the body is no JSON: {detail}") from None
    except RecursionError:
        raise MalformedJson("the body is nested too deeply") from None


def _explain(message: str, content: bytes, type: type) -> InvalidRequest | UnknownField:
    """Our error for msgspec's message: "expected X, got Y", with the path as field and an enum's alternatives."""
    found = _PLACE.search(message)
    place = found[1] if found else ""
    message = (message[: found.start()] if found else message).replace("`", "")
    for start, leaf in (("Object contains unknown field ", UnknownField), ("Object missing required field ", None)):
        if message.startswith(start):
            name = message.removeprefix(start)
            field = f"{place}.{name}" if place else name
            if leaf is not None:
                return UnknownField(
                    f"unknown field {name[:80]!r}{hint(name, place, fields_of(type))}", field=field[:200]
                )
            return InvalidRequest(f"expected a field {name!r}, got none", field=field)
    if message.startswith("Invalid enum value"):
        return InvalidRequest(f"expected one of {', '.join(alternatives(type, place))}", field=place[:200] or None)
    if "matching regex" in message:
        message = f"expected {NAME_RULE}" + (" (or name@version)" if "@" in message else "")
    if ", got" not in message:
        message += _got(place, content)
    return InvalidRequest(message[:1].lower() + message[1:], field=place[:200] or None)


def _got(place: str, content: bytes) -> str:
    """`, got VALUE` for the value at msgspec's path; empty if it cannot be found."""
    try:
        value: Any = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # the typed decoder did not read to the end
        return ""
    for key, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", place):
        if "..." in place:
            return ""
        try:
            value = value[int(index)] if index else value[key]
        except (KeyError, IndexError, TypeError):
            return ""
    if isinstance(value, dict | list):
        return f", got {len(value)} entries"
    shown = repr(value)
    return f", got {shown}" if len(shown) <= 80 else f", got {len(shown)} characters"


def ref_from_path(text: str) -> tuple[str, int | None]:
    """Name and version from the `{id}` of a path. Raises `NotFound` for a text that cannot be a name."""
    if not is_adapter_ref(text):
        raise NotFound(f"expected {NAME_RULE} (or name@version)", field="id")
    return split_ref(text)


def page(query: Mapping[str, str]) -> tuple[str | None, int]:
    """`after` and `limit` of a list."""
    for name in query:
        if name not in ("after", "limit"):
            raise UnknownField(f"unknown parameter {name[:80]!r}", field=name[:200])
    text = query.get("limit", str(PAGE_SIZE))
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and 1 <= int(text) <= PAGE_LIMIT):
        raise InvalidRequest(f"expected 1 to {PAGE_LIMIT}, got {text[:80]!r}", field="limit")
    return query.get("after"), int(text)


def local_path(text: str, root: Path | None) -> Path:
    """A path under `data_root`, with links resolved. Raises `ForbiddenPath` for any other, whether it exists or not."""
    if root is None:
        raise ForbiddenPath("local paths are off: the daemon runs without data_root", field="path")
    if "\0" in text:
        raise InvalidRequest("expected a path without null characters", field="path")
    base = root.resolve()
    try:
        with disk_errors():
            path = (base / text).resolve()
            if path.is_relative_to(base):
                path.stat()
                return path
    except FileNotFoundError:
        raise InvalidRequest("expected a path that exists under data_root", field="path") from None
    except (OSError, RuntimeError, ValueError):  # a name that is too long, a loop of links, a folder that is closed
        raise InvalidRequest("expected a path that can be read", field="path") from None
    raise ForbiddenPath("expected a path under data_root", field="path")
