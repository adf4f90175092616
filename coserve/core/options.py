"""Settings declared once as fields of a frozen dataclass: command-line options, TOML keys, help and bounds are derived
from it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args, get_origin

from coserve.core.errors import ConfigError
from coserve.core.hints import value_hint

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True)
class Bounds:
    """The numbers that a setting may have: from `least` to `most`. `open`: whether each of the two is excluded."""

    least: float
    most: float = math.inf
    open: tuple[bool, bool] = (False, False)

    def __contains__(self, value: float) -> bool:
        below, above = self.open
        return (self.least < value if below else self.least <= value) and (
            value < self.most if above else value <= self.most
        )

    def __str__(self) -> str:
        least, most = f"{self.least:g}", f"{self.most:.9g}"
        if self.most == math.inf:
            return f"at least {least}"
        if not any(self.open):
            return f"{least} to {most}"
        below, above = self.open
        return f"{'above' if below else 'at least'} {least} and {'below' if above else 'at most'} {most}"


def option(default: object, help: str, *, choices: tuple[str, ...] = (), bounds: Bounds | None = None) -> Any:  # noqa: ANN401 - typed as dataclasses.field is
    return field(default=default, metadata={"help": help, "choices": choices, "bounds": bounds})


def check_options(settings: DataclassInstance) -> None:
    """Raise `ConfigError` for a value that is not among an option's choices or outside of its bounds. Without bounds a
    whole number must be at least 1, and a `float` finite and at least 0."""
    for f in dataclasses.fields(settings):
        value, choices, bounds = getattr(settings, f.name), f.metadata["choices"], f.metadata["bounds"]
        for given in value if isinstance(value, tuple) else (value,):
            if choices and given not in choices:
                meant = value_hint(f.name, given)
                raise ConfigError(f"{f.name}: expected one of {', '.join(choices)}, got {given!r}{meant}")
        if isinstance(value, float) and not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{f.name}: expected a finite number of at least 0, got {value}")
        if bounds is None and type(value) is int:
            bounds = Bounds(1)
        if bounds is not None and value not in bounds:
            raise ConfigError(f"{f.name}: expected {bounds}, got {value}")


def grouped(settings: type[DataclassInstance], titles: Mapping[str, str]) -> dict[str, list[str]]:
    """Return section titles with their settings' names. `titles` is keyed by the name of a section's first setting."""
    found: dict[str, list[str]] = {}
    title = ""
    for f in dataclasses.fields(settings):
        title = titles.get(f.name, title)
        found.setdefault(title, []).append(f.name)
    return found


def item_type(hint: object) -> object:
    """Return the item type of a tuple type; None for any other type."""
    return get_args(hint)[0] if get_origin(hint) is tuple else None


def plain_type(hint: object) -> Any:  # noqa: ANN401 - a type
    """Return the type without None."""
    kinds = (hint,) if get_origin(hint) is tuple else get_args(hint) or (hint,)
    return next(kind for kind in kinds if kind is not type(None))
