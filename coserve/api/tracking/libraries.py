"""Libraries of the trackers, found without importing them."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

from coserve.core.errors import ConfigError

LIBRARIES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}
"""Module that each tracker writes with. The package's extras have the trackers' names."""


def check_trackers(names: Iterable[str]) -> None:
    """Raise `ConfigError`, with the command that installs a missing library."""
    for name in names:
        if find_spec(LIBRARIES[name]) is None:
            raise ConfigError(
                f"tracker: {name!r} needs {LIBRARIES[name]}, which is not installed: pip install 'coserve[{name}]'"
            )
