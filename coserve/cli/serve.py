"""`coserve serve`: one option per setting of `config.Config`."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer

from coserve.cli.statuslines import StatusLines
from coserve.config import Config, load_config, misspelt_variables, setting_path

log = logging.getLogger(__name__)


def _with_config_options(run: Callable[[dict[str, object]], None]) -> Callable[..., None]:
    """A command with one option per setting; `run` gets the settings that were given."""
    hints = get_type_hints(Config)

    def command(**given: object) -> None:
        settings = {name: value for name, value in given.items() if value is not None}
        for name, value in settings.items():
            if isinstance(value, list):
                settings[name] = tuple(value)
        run({name: value for name, value in settings.items() if value != ()})

    parameters = []
    for f in dataclasses.fields(Config):
        kind = list[str] if hints[f.name] == tuple[str, ...] else hints[f.name]
        flag = f"--{f.name.replace('_', '-')}"
        declared = f"{flag}/--no-{flag[2:]}" if kind is bool else flag
        parser = partial(setting_path, name=f.name) if Path in (kind, *get_args(kind)) else None
        option = typer.Option(None, declared, show_default=False, parser=parser)
        annotation: Any = kind | None
        parameters.append(
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=annotation)
        )
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__doc__ = run.__doc__
    return command


def _serve(given: dict[str, object]) -> None:
    """Start the daemon. Settings also come from COSERVE_<NAME> and from the TOML file of --config."""
    config = load_config(given)
    from coserve.daemon.serve import serve
    from coserve.logs.setup import LogSettings, set_up_logging

    set_up_logging("api", LogSettings.of(config))
    for warning in misspelt_variables():
        log.warning("%s", warning)
    asyncio.run(serve(config, report=StatusLines(config.host).show))


serve = _with_config_options(_serve)
