"""Decodes and checks requests: strict JSON, errors that name the field, adapter names, pages and local paths."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from coserve.core.errors import ForbiddenPath, InvalidRequest, MalformedJson, NotFound, UnknownField
from coserve.core.hints import UNSUPPORTED, fields_of
from coserve.core.limits import PAGE_LIMIT, PAGE_SIZE
from coserve.core.names import ADAPTER_RULE, is_adapter_ref, split_ref
from coserve.core.schemas.empty_fields import drop_empty
from coserve.core.training.other_names import take_other_names
from coserve.core.validation import MAX_FIELD, explain
from coserve.state.durable import disk_errors

T = TypeVar("T")
_HALF = re.compile(rb"\\u[dD][89abAB]..[^\\]{0,5}\Z")
"""Half of a surrogate pair so near the end that msgspec takes the JSON for truncated."""


def decode_json(content: bytes, type: type[T]) -> T:
    """Decode `content` as `type`: no unknown field, no duplicate field, no NaN, no infinity, no number in a text.

    Raises `MalformedJson`, `UnknownField`, `InvalidRequest`; the last two name the field.
    """
    value = decode_last(content, type)
    _refuse_repeated(content)
    return value


def decode_last(content: bytes, type: type[T]) -> T:
    """Decode like `decode_json`, but the last value of a duplicate field counts."""

    def decode() -> T:
        try:
            return msgspec.json.decode(content, type=type)
        except msgspec.ValidationError:
            value = _untyped(content)
            if not take_other_names(value, fields_of(type)):
                raise
            return msgspec.convert(value, type, str_keys=True)

    return _decoded(content, decode, type)


def decode_dialect(content: bytes, type: type[T]) -> T:
    """Decode like `decode_last`, for clients of other servers: an unknown field with an empty value and a null for an
    optional field are ignored.

    Such clients send back fields that they received, and write `null`, `[]`, `{}` or `""` for what they leave out.
    """
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return msgspec.json.decode(content, type=type)
    value: object = _decoded(content, lambda: msgspec.json.decode(content), type)
    drop_empty(value, type)
    take_other_names(value, fields_of(type))
    try:
        return _decoded(content, lambda: msgspec.convert(value, type, str_keys=True), type)
    except UnknownField as error:
        name = (error.field or "").rpartition(".")[2]
        if name in UNSUPPORTED:
            raise InvalidRequest(f"{name} is not supported: expected it left out", field=error.field) from None
        raise


def _decoded(content: bytes, decode: Callable[[], T], type: type[Any]) -> T:
    """Return the result of `decode`, with msgspec's errors as ours. `content`: the bytes that it decodes."""
    try:
        return decode()
    except msgspec.ValidationError as error:
        value = _untyped(content)
        if value is None and (field := _infinite(content)) is not None:
            raise InvalidRequest("number out of range", field=field[:MAX_FIELD] or None) from None
        take_other_names(value, fields_of(type))
        raise explain(error, value, type) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedJson(f"the body is not JSON: {_why(error, content)}") from None
    except RecursionError:
        raise MalformedJson("the body is nested too deeply") from None


def _refuse_repeated(content: bytes) -> None:
    """Raise `InvalidRequest` for an object with a duplicate field. msgspec cannot detect it, so this parses `content`
    again."""
    try:
        json.loads(content.decode(), object_pairs_hook=_once, parse_int=bool, parse_float=bool)  # values do not matter
    except RecursionError:
        raise MalformedJson("the body is nested too deeply") from None


def _once(pairs: list[tuple[str, object]]) -> None:
    """Check one object for duplicate fields; its values are not needed."""
    if len({name for name, _ in pairs}) == len(pairs):
        return
    seen = set[str]()
    for name, _ in pairs:
        if name in seen:
            raise InvalidRequest(f"field {name[:80]!r} twice in one object", field=name[:MAX_FIELD])
        seen.add(name)


def _untyped(content: bytes) -> object:
    """Return the untyped value of `content`, None if it is not JSON: the typed decoder stopped at its first error."""
    try:
        return msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _infinite(content: bytes) -> str | None:
    """Return the field of a number that no double holds, which msgspec does not name; None if there is none."""
    left: list[tuple[str, object]] = []
    with suppress(ValueError, RecursionError):
        left.append(("", json.loads(content)))
    while left:
        path, value = left.pop()
        if isinstance(value, float) and math.isinf(value):
            return path
        if isinstance(value, dict):
            left += [(f"{path}.{name}" if path else name, entry) for name, entry in value.items()]
        elif isinstance(value, list):
            left += [(f"{path}[{place}]", entry) for place, entry in enumerate(value)]
    return None


def _why(error: msgspec.DecodeError | UnicodeDecodeError, content: bytes) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    text = str(error).removeprefix("JSON is ")
    if text != "Input data was truncated":
        return text
    return "half of a surrogate pair" if _HALF.search(content) else "it ends too early"


def ref_from_path(text: str) -> tuple[str, int | None]:
    """Return name and version from the `{id}` of a path. Raises `NotFound` for a text that cannot be a name."""
    if not is_adapter_ref(text):
        raise NotFound(f"expected {ADAPTER_RULE} (or name@version)", field="id")
    return split_ref(text)


def page(
    query: Mapping[str, str], filters: Collection[str] = (), *, size: int = PAGE_SIZE, most: int | None = PAGE_LIMIT
) -> tuple[str | None, int]:
    """Return `after` and `limit`, `size` if it was left out, of a list request, which may also have `filters`. `most`:
    largest limit; None: any."""
    for name in query:
        if name not in ("after", "limit", *filters):
            raise UnknownField(f"unknown parameter {name[:80]!r}", field=name[:200])
    text = query.get("limit", str(size))
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and 1 <= int(text) <= (most or int(text))):
        wanted = "at least 1" if most is None else f"1 to {most}"
        raise InvalidRequest(f"expected {wanted}, got {text[:80]!r}", field="limit")
    return query.get("after"), int(text)


def local_path(text: str, root: Path | None) -> Path:
    """Return a path under `data_root`, with links resolved. Raises `ForbiddenPath` for any other, whether it exists or
    not."""
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
    except (OSError, RuntimeError, ValueError):  # name too long, loop of links, or folder without permission
        raise InvalidRequest("expected a path that can be read", field="path") from None
    raise ForbiddenPath("expected a path under data_root", field="path")
