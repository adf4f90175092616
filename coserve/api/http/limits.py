"""Number of connections that the process's file-descriptor limit leaves room for, and time limits at shutdown. Imports
no HTTP library, because the daemon calls it before anything else."""

from __future__ import annotations

import logging
import resource
from typing import Final

from coserve.core.processes import allow_more_files

log = logging.getLogger(__name__)

STREAMS_TIMEOUT: Final = 5.0
"""Seconds that responses may still take after the daemon begins to stop."""
RESERVE: Final = 16
"""Connections beyond the limit that are accepted only for `PROBES`."""
WAITING_CONNECTIONS: Final = 1024
"""Listen backlog: connections that the system queues until they are accepted. A client that finds it full retries after
a second."""
OWN_DESCRIPTORS: Final = 96
"""File descriptors for everything else: the registry, files of adapters and uploads, the engine's socket."""


def connection_limit(wanted: int) -> int:
    """Raise the process's file-descriptor limit to its hard limit; return how many of `wanted` connections fit."""
    files = allow_more_files()
    if files == resource.RLIM_INFINITY:
        return wanted
    fitting = max(8, files - OWN_DESCRIPTORS - RESERVE)
    if fitting < wanted:
        log.warning("max_connections: %d instead of %d: the process may open %d files", fitting, wanted, files)
    return min(wanted, fitting)
