"""How many connections the process's limit of file descriptors leaves room for, and how long streams have at a stop.
Imports no HTTP library: the daemon asks before anything else."""

from __future__ import annotations

import logging
import resource
from typing import Final

from coserve.core.processes import allow_more_files

log = logging.getLogger(__name__)

STREAMS_TIMEOUT: Final = 5.0
"""Seconds that responses may still take once the daemon stops."""
RESERVE: Final = 16
"""Connections beyond the limit that are accepted for /health and /health/ready alone."""
WAITING_CONNECTIONS: Final = 1024
"""Connections that the system keeps until they are accepted: a client whose connection finds no room tries again after
a second."""
OWN_DESCRIPTORS: Final = 96
"""File descriptors for all else: the registry, files of adapters and uploads, the engine's socket."""


def connection_limit(wanted: int) -> int:
    """Raise the process's limit of file descriptors to its hard limit; returns how many of `wanted` connections fit."""
    files = allow_more_files()
    if files == resource.RLIM_INFINITY:
        return wanted
    fitting = max(8, files - OWN_DESCRIPTORS - RESERVE)
    if fitting < wanted:
        log.warning("max_connections: %d instead of %d: the process may open %d files", fitting, wanted, files)
    return min(wanted, fitting)
