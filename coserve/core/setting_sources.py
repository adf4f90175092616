"""Reads settings that `core.options` declares, from the environment and from TOML files."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from coserve.core.errors import ConfigError
from coserve.core.hints import option_hint
from coserve.core.options import item_type, plain_type
from coserve.core.validation import type_word

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

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
