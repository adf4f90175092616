"""Python values as JSON. Values without a JSON form are refused: msgspec would encode bytes and dates as text and NaN
as null."""

from __future__ import annotations

import math
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
    if isinstance(value, dict):
        _check_dict(value, plain)
    elif isinstance(value, list | tuple):
        if not plain.issuperset(map(type, value)):
            _check_list(value, plain)
    elif isinstance(value, msgspec.Struct):
        _check_dict({name: getattr(value, name) for name in value.__struct_fields__}, plain)
    elif isinstance(value, Enum):
        _check(value.value, plain)
    elif type(value) not in plain:
        _check_single(value)


def _check_dict(value: dict[object, object], plain: Types) -> None:
    key: object = None
    try:
        for key, each in value.items():
            if type(key) is not str and type(key) is not int:
                raise InvalidRequest(f"expected str as the key, got {type(key).__name__}")
            if type(each) not in plain:
                _check(each, plain)
    except InvalidRequest as error:
        error.field = f".{key}{error.field or ''}"
        raise


def _check_list(value: list[object] | tuple[object, ...], plain: Types) -> None:
    place = 0
    try:
        for place, each in enumerate(value):  # noqa: B007 - the error has it
            _check(each, plain)
    except InvalidRequest as error:
        error.field = f"[{place}]{error.field or ''}"
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
