"""Settings declared once as fields of a frozen dataclass: command-line options, TOML keys, help and bounds are derived
from it. Their values are read from the environment and from TOML files."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from coserve.core.errors import ConfigError
from coserve.core.hints import option_hint, value_hint
from coserve.core.validation import type_word

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


Found = dict[str, tuple[object, str]]
"""Values of settings, each with the name of its source."""


def find_settings(settings: type[DataclassInstance], given: Mapping[str, object], environ: Mapping[str, str]) -> Found:
    """Return the settings that the command line (`given`), variables `COSERVE_<NAME>` of the environment, or the TOML
    file of `config` set, in this order of precedence. Raise `ConfigError` for an unknown key or a wrong value."""
    found: Found = {}
    path = given.get("config", environ.get("COSERVE_CONFIG"))
    if path is not None:
        file = setting_path(str(path), "config")
        found |= {name: (value, str(path)) for name, value in read_settings(settings, file).items()}
    for f in dataclasses.fields(settings):
        text = environ.get(variable := f"COSERVE_{f.name.upper()}")
        # Kubernetes injects COSERVE_PORT=tcp://... for a Service called coserve.
        if text is not None and not (f.name == "port" and text.startswith("tcp://")):
            found[f.name] = (parse_setting(settings, f.name, text), variable)
    return found | {name: (value, "command line") for name, value in given.items()}


def parse_setting(settings: type[DataclassInstance], name: str, text: str) -> object:
    """Parse a setting's value from text, as environment variables hold it. Raise `ConfigError`, which never shows a
    secret."""
    return _parse(name, plain_type(get_type_hints(settings)[name]), text)


def _parse(name: str, kind: Any, text: str) -> object:  # noqa: ANN401 - a type
    item = item_type(kind)
    if item is not None:
        return tuple(_parse(name, item, part.strip()) for part in text.split(",")) if text.strip() else ()
    if kind is Path:
        return setting_path(text, name)
    if kind is bool:
        if text.lower() not in ("0", "1", "true", "false"):
            raise ConfigError(f"{name}: expected true or false, got {text!r}")
        return text.lower() in ("1", "true")
    try:
        return kind(text)
    except ValueError as error:
        expected = f"one of {', '.join(kind)}" if issubclass(kind, Enum) else type_word(kind.__name__)
        raise ConfigError(f"{name}: expected {expected}, got {text!r}") from error


def setting_path(text: str, name: str = "path") -> Path:
    """Return the text as a path. Raise `ConfigError` for an empty text, which `Path` would take for the current
    folder."""
    if not text.strip():
        raise ConfigError(f"{name}: expected a path, got {text!r}")
    return Path(text)


def read_settings(settings: type[DataclassInstance], path: Path, flag: str = "config") -> dict[str, object]:
    """Read settings from a TOML file; `flag` is the option that named the file. Raise `ConfigError`."""
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:  # ValueError: not TOML, or not UTF-8
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{flag}: cannot read {path}: {reason}") from error
    hints = get_type_hints(settings)
    names = {f.name for f in dataclasses.fields(settings)}
    found: dict[str, object] = {}
    spelled: dict[str, str] = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if name in spelled:
            raise ConfigError(f"{flag}: expected each setting once, got {spelled[name]!r} and {key!r} in {path}")
        spelled[name] = key
        if name not in names:
            raise ConfigError(f"{flag}: unknown setting {key!r} in {path}{option_hint(key, sorted(names))}")
        if name == flag:
            raise ConfigError(f"{flag}: {path} names another file, which is not read; name that one instead")
        found[name] = parse_setting(settings, name, _setting_text(name, hints[name], value))
    return found


def _setting_text(name: str, hint: object, value: object) -> str:
    """Return a TOML value as the text that an environment variable would hold. Raise `ConfigError` for a wrong type."""
    item = item_type(hint)
    if isinstance(value, list) and item is not None and all(_is_a(part, item) for part in value):
        if any(isinstance(part, str) and not part.strip() for part in value):
            raise ConfigError(f"{name}: expected no empty names")
        return ",".join(str(part) for part in value)
    if isinstance(value, bool) == (hint is bool) and isinstance(value, bool | int | float | str):
        return str(value)
    if isinstance(value, str):
        return value
    expected = type_word(getattr(hint, "__name__", str(hint)))
    if item is not None:
        expected = "a list of texts" if item is str else "a list of numbers"
    raise ConfigError(f"{name}: expected {expected}, got {type_word(type(value).__name__)}")


def _is_a(value: object, item: object) -> bool:
    return isinstance(value, str if item is str else int | float) and not isinstance(value, bool)
