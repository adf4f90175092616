"""Commands whose options are settings of `config.Config`."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer

from coserve.config import Config, setting_path

POSITIONAL = "positional"


def settings_command(
    run: Callable[[dict[str, object]], None], names: Collection[str] | None = None, *, argument: str | None = None
) -> Callable[..., None]:
    """A command with one option for each setting of `names` (None: all); `run` gets the settings that were given.

    `argument`: the one setting that may be given without its option's name, too.
    """
    hints = get_type_hints(Config)

    def command(**given: object) -> None:
        positional = given.pop(POSITIONAL, None)
        if argument is not None and positional is not None:
            if given[argument] not in (None, positional):
                raise typer.BadParameter(f"expected one {argument}, got {positional!r} and {given[argument]!r}")
            given[argument] = positional
        settings = {name: value for name, value in given.items() if value is not None}
        for name, value in settings.items():
            if isinstance(value, list):
                settings[name] = tuple(value)
        run({name: value for name, value in settings.items() if value != ()})

    parameters = []
    if argument is not None:
        default = typer.Argument(None, metavar=argument.upper(), show_default=False)
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(POSITIONAL, keyword, default=default, annotation=str | None))
    for f in dataclasses.fields(Config):
        if not (names is None or f.name in names or f.name == argument):
            continue
        default = _option(f.name, hints[f.name])
        annotation: Any = (list[str] if hints[f.name] == tuple[str, ...] else hints[f.name]) | None
        parameters.append(
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__doc__ = run.__doc__
    return command


def _option(name: str, kind: Any) -> Any:  # noqa: ANN401 - a type or a union of types; what typer makes of it
    flag = f"--{name.replace('_', '-')}"
    declared = f"{flag}/--no-{flag[2:]}" if kind is bool else flag
    parser = partial(setting_path, name=name) if Path in (kind, *get_args(kind)) else None
    return typer.Option(None, declared, show_default=False, parser=parser)
