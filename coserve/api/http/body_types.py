"""Refuses fields for features that are not implemented."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import get_type_hints

import msgspec

from coserve.core.errors import InvalidRequest
from coserve.core.schemas.empty_fields import is_empty
from coserve.core.validation import shown


@dataclass(frozen=True, eq=False)
class Unsupported:
    """Annotation of a field for a feature that is not implemented. `accepts`: values besides empty ones that ask for
    nothing, such as the defaults of OpenAI and vLLM."""

    accepts: tuple[object, ...] = ()
    even_empty: bool = False
    """Whether an empty object asks for the feature, too."""


def refuse_unsupported(body: msgspec.Struct, *, within: str = "") -> None:
    """Raise `InvalidRequest` for a field with the annotation `Unsupported` that asks for something. `within`: prefix of
    the field's path in the error."""
    for name, mark in _unsupported(type(body)).items():
        value = getattr(body, name)
        refuse_unless_neutral(name, True if mark.even_empty and value == {} else value, mark.accepts, within=within)


@cache
def _unsupported(type: type) -> dict[str, Unsupported]:
    hints = get_type_hints(type, include_extras=True)
    marks = ((name, mark) for name, hint in hints.items() for mark in getattr(hint, "__metadata__", ()))
    return {name: mark for name, mark in marks if isinstance(mark, Unsupported)}


def refuse_unless_neutral(name: str, value: object, defaults: tuple[object, ...], *, within: str = "") -> None:
    """Raise `InvalidRequest` for an unsupported field, unless its value is empty or one of `defaults`. `within`: prefix
    of the field's path in the error."""
    if not is_empty(value) and value not in defaults:
        left = "expected it left out" + "".join(f" or {shown(choice)}" for choice in defaults[:1])
        raise InvalidRequest(f"{name} is not supported: {left}", field=within + name)
