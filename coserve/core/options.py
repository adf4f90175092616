"""Settings declared once as fields of a frozen dataclass: command-line options, TOML keys and help are derived from
it."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from coserve.core.errors import ConfigError
from coserve.core.hints import option_hint

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def option(default: object, help: str, *, choices: tuple[str, ...] = ()) -> Any:  # noqa: ANN401 - typed as dataclasses.field is
    return field(default=default, metadata={"help": help, "choices": choices})


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
        expected = f"one of {', '.join(kind)}" if issubclass(kind, Enum) else kind.__name__
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
    expected = getattr(hint, "__name__", str(hint))
    if item is not None:
        expected = "a list of texts" if item is str else "a list of numbers"
    raise ConfigError(f"{name}: expected {expected}, got {type(value).__name__}")


def _is_a(value: object, item: object) -> bool:
    return isinstance(value, str if item is str else int | float) and not isinstance(value, bool)
