"""Every command, a file a subject. The options of `serve` are generated from `config.Config`; nothing here imports torch."""

from coserve.cli.app import app, main

__all__ = ["app", "main"]
