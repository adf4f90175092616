"""The commands `coserve ps` and `coserve stop`."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import Annotated

import typer

from coserve.cli.common import AsJson, print_list
from coserve.cli.job_table import age
from coserve.core.errors import StartupError
from coserve.state.running import RunningDaemon, running, wait_for_end


def list_daemons(as_json: AsJson = False) -> None:
    """List the daemons of this user on this machine."""
    found, now = running(), time.time()
    rows = [(str(each.pid), each.url, each.model, each.data_dir, age(now - each.started_at)) for each in found]
    print_list(found, as_json, ("PID", "URL", "MODEL", "DATA", "AGE"), rows)


def stop(
    pid: Annotated[
        int | None, typer.Argument(help="process id of a daemon (coserve ps); default: the only one")
    ] = None,
    now: Annotated[bool, typer.Option("--now", help="let no request finish, as a second SIGTERM does")] = False,
) -> None:
    """Stop a daemon and wait for its end: requests in flight finish (--drain-seconds), jobs are checkpointed."""
    daemon = _chosen(pid)
    for _ in range(2 if now else 1):
        with suppress(ProcessLookupError):
            os.kill(daemon.pid, signal.SIGTERM)
    wait_for_end(daemon)
    print(f"stopped {daemon.pid}")


def _chosen(pid: int | None) -> RunningDaemon:
    """Return the daemon with this process id, or the only one. Raises `StartupError` if there is none."""
    found = running()
    if not found:
        raise StartupError("no daemon of this user runs on this machine")
    if pid is None and len(found) > 1:
        raise StartupError(f"expected a process id, as {len(found)} daemons run; coserve ps lists them")
    for daemon in found:
        if pid in (None, daemon.pid):
            return daemon
    raise StartupError(f"expected the process id of a daemon that coserve ps lists, got {pid}")
