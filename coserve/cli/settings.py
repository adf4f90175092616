"""`coserve config`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from coserve.config import Config, load_config


def show_config(config: Annotated[Path | None, typer.Option(help="TOML file")] = None) -> None:
    """Print every setting with its value from the environment and the file."""
    loaded = load_config({"config": config} if config else {})
    for f in dataclasses.fields(Config):
        shown = "***" if f.name == "api_key" and loaded.api_key else getattr(loaded, f.name)
        print(f"{f.name} = {shown}")
