"""Python values as JSON. Values without a JSON form are refused: msgspec would encode bytes and dates as text and NaN
as null."""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import Enum

import msgspec

from coserve.core.errors import InvalidRequest
from coserve.core.validation import MAX_FIELD

Types = frozenset[type[object]]

_TEXT: Types = frozenset({str})
_PLAIN: Types = frozenset({str, int, bool, type(None)})
"""Types whose values have a JSON form. A `str` may still lack a UTF-8 form, which only `encode` detects."""


def encode(value: object, field: str = "") -> bytes:
    """Encode a value as JSON. Raises `InvalidRequest` for a text without a UTF-8 form; `field` is the path of
    `value`."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        _check_all(value, field, _PLAIN - _TEXT)
        raise InvalidRequest("expected keys in valid UTF-8, got a lone surrogate", field=field or None) from None


def check(value: object, field: str) -> None:
    """Raise `InvalidRequest`, with its path, for the first value inside `value` that has no JSON form."""
    _check_all(value, field, _PLAIN)


def _check_all(value: object, field: str, plain: Types) -> None:
    try:
        _check(value, plain)
    except RecursionError:
        raise InvalidRequest(
            "expected fewer levels of lists and dicts; does one contain itself?", field=field
        ) from None
    except InvalidRequest as error:
        error.field = f"{field}{error.field or ''}".removeprefix(".")[:MAX_FIELD]
        raise


def _check(value: object, plain: Types) -> None:
    """Check a value, skipping values of `plain` types. A corpus has millions of values, so the path of a wrong one is
    built only while its error propagates."""
    items: Iterable[tuple[object, object]]
    if isinstance(value, dict):
        items, step = value.items(), ".{}"
    elif isinstance(value, list | tuple):
        items, step = () if plain.issuperset(map(type, value)) else enumerate(value), "[{}]"
    elif isinstance(value, msgspec.Struct):
        items, step = msgspec.structs.asdict(value).items(), ".{}"
    elif isinstance(value, Enum):
        return _check(value.value, plain)
    else:
        return None if type(value) in plain else _check_single(value)
    key: object = None
    try:
        for key, each in items:
            if type(key) is not str and type(key) is not int:
                raise InvalidRequest(f"expected str as the key, got {type(key).__name__}")
            if type(each) not in plain:
                _check(each, plain)
    except InvalidRequest as error:
        error.field = step.format(key) + (error.field or "")
        raise


def _check_single(value: object) -> None:
    """Check a value that has no items."""
    if type(value) is float:
        if not math.isfinite(value):
            raise InvalidRequest(f"expected a finite number, got {value}")
    elif type(value) is str:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            found = f"the lone surrogate {value[error.start]!r}"
            raise InvalidRequest(f"expected valid UTF-8, got {found}") from None
    else:
        kinds = "str, int, float, bool, None, list or dict"
        raise InvalidRequest(f"expected {kinds}, got {type(value).__name__}")
