"""The command `coserve config`: prints every setting with its value, as a TOML file that `serve --config` reads."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer

from coserve import __version__
from coserve.cli.daemon.start_warnings import start_warnings
from coserve.config import Config, load_config, sections, setting_sources

SECRETS = ("api_key",)
WIDTH = 100


def show_config(config: Annotated[Path | None, typer.Option(help="TOML file")] = None) -> None:
    """Print every setting with its value and where that comes from, as a TOML file for --config."""
    given: dict[str, object] = {} if config is None else {"config": config}
    loaded = load_config(given)
    for warning in start_warnings(loaded, given):
        print(f"# {warning}")
    for line in toml_lines(loaded, setting_sources(given)):
        print(line)


def toml_lines(config: Config, sources: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of a TOML file that loads as `config`; unset settings and secrets are comments."""
    yield f"# Settings of coserve {__version__}."
    helps = {f.name: f.metadata["help"] for f in dataclasses.fields(Config)}
    choices = {f.name: f.metadata["choices"] for f in dataclasses.fields(Config)}
    for title, names in sections().items():
        yield ""
        yield f"# ---- {title}"
        for name in names:
            yield ""
            text = helps[name] + (f" [{'|'.join(choices[name])}]" if choices[name] else "")
            yield from textwrap.wrap(
                " ".join(text.split()), WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
            )
            yield _assignment(name, getattr(config, name), sources[name])


def _assignment(name: str, value: object, source: str) -> str:
    origin = " ".join(source.split())
    if value is None:
        return f"# {name} is not set"
    if name in SECRETS:
        return f'# {name} = "***"  # {origin}; not shown'
    if name == "config":
        return f"# {name} = {_toml(value)}  # {origin}"
    return f"{name} = {_toml(value)}  # {origin}"


def _toml(value: object) -> str:
    """Return a value as TOML. JSON strings, numbers, booleans and lists of strings are valid TOML, except for the
    character DEL."""
    shown = list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value
    return json.dumps(shown, ensure_ascii=False).replace("\x7f", "\\u007f")
