"""Makes commands whose options are the settings of a dataclass (`coserve.core.options`)."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

import typer

from coserve.config import Config
from coserve.core.options import item_type, parse_setting, plain_type, setting_path

POSITIONAL = "positional"
_SHORT = {"tp": ("-tp",)}
"""Short options of settings: vLLM's."""


def settings_command(
    run: Callable[..., None],
    names: Collection[str] | None = None,
    *,
    argument: str | None = None,
    settings: type[Any] = Config,
) -> Callable[..., None]:
    """Return a command with one option per setting of `names` (None: all) and per keyword-only parameter of `run`.

    `run` is called with the settings that were given and its own parameters. `argument`: the one setting that may also
    be given without its option's name.
    """
    hints = get_type_hints(settings)
    own = [p for p in inspect.signature(run, eval_str=True).parameters.values() if p.kind is p.KEYWORD_ONLY]

    def command(**given: object) -> None:
        others = {p.name: given.pop(p.name) for p in own}
        positional = given.pop(POSITIONAL, None)
        if argument is not None and positional is not None:
            if given[argument] not in (None, positional):
                raise typer.BadParameter(f"expected one {argument}, got {positional!r} and {given[argument]!r}")
            given[argument] = positional
        found = {name: _value(settings, name, hints[name], value) for name, value in given.items() if value is not None}
        run({name: value for name, value in found.items() if value != ()}, **others)

    parameters = []
    if argument is not None:
        default = typer.Argument(None, metavar=argument.upper(), show_default=False)
        parameters.append(_parameter(POSITIONAL, default, str | None))
    for f in dataclasses.fields(settings):
        if names is None or f.name in names or f.name == argument:
            hint = hints[f.name]
            parameters.append(_parameter(f.name, _option(f.name, hint), _annotation(hint)))
    command.__signature__ = inspect.Signature([*parameters, *own])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in [*parameters, *own]}
    command.__doc__ = run.__doc__
    return command


def _parameter(name: str, default: Any, annotation: Any) -> inspect.Parameter:  # noqa: ANN401 - as in `inspect`
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _annotation(hint: Any) -> Any:  # noqa: ANN401 - a type or a union of types
    item = item_type(plain_type(hint))
    return (list[str] if item is str else hint if item is None else str) | None


def _value(settings: type[Any], name: str, hint: object, value: object) -> object:
    """Convert the value that typer read to the setting's type."""
    if isinstance(value, list):
        return tuple(item for text in value for item in cast(tuple[str, ...], parse_setting(settings, name, text)))
    return parse_setting(settings, name, str(value)) if item_type(plain_type(hint)) is not None else value


def _option(name: str, kind: Any) -> Any:  # noqa: ANN401 - a type or a union of types; what typer makes of it
    flag = f"--{name.replace('_', '-')}"
    declared = f"{flag}/--no-{flag[2:]}" if kind is bool else flag
    parser = partial(setting_path, name=name) if Path in (kind, *get_args(kind)) else None
    return typer.Option(None, declared, *_SHORT.get(name, ()), show_default=False, parser=parser)
