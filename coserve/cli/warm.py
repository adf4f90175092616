"""The command `coserve warm`: fills the caches of compiled kernels ahead of a daemon, for example while building an
image."""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Iterator

import typer

from coserve.cli.daemon.start_warnings import start_warnings
from coserve.cli.failures import FAILED
from coserve.cli.settings_options import settings_command
from coserve.cli.warm_progress import WarmProgress
from coserve.config import load_config
from coserve.engine.warmup.key import SHAPE_SETTINGS

log = logging.getLogger(__name__)

SETTINGS = (
    *SHAPE_SETTINGS,
    "policy",
    "inference_batch_size",
    "training_sm_share",
    "data_dir",
    "device",
    "cache_dir",
    "load_format",
    "log_level",
    "log_format",
    "config",
)
"""Settings that decide which kernels a daemon needs, or where they are stored."""


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Raise `KeyboardInterrupt` for SIGTERM, which stops the build of an image, so that the compiling processes end
    too."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _warm(given: dict[str, object]) -> None:
    """Compile all kernels that `coserve serve` will need for MODEL with the same settings, and keep them in the cache
    folder. Needs the GPU that will serve. Settings also come from COSERVE_<NAME> and from the TOML file of --config.
    """
    config = load_config(given)
    from coserve.core.logs.setup import set_up_logging
    from coserve.engine.warmup import launch

    set_up_logging("warm", config.logs)
    for warning in start_warnings(config, given):
        log.warning("%s", warning)
    with WarmProgress() as progress, _terminated_as_interrupted():
        launch.compile_ahead(config, progress.show)
    print(progress.summary())
    if not progress.full:
        raise typer.Exit(FAILED)


warm = settings_command(_warm, SETTINGS, argument="model")
