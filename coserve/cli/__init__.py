"""The commands, one file per subject. The options of `serve` are generated from `config.Config`. Nothing here imports
torch."""

from coserve.cli.app import app, main

__all__ = ["app", "main"]
