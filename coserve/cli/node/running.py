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
from coserve.state.running import running, wait_for_end


def list_daemons(as_json: AsJson = False) -> None:
    """List the daemons of this user on this machine."""
    found, now = running(), time.time()
    rows = [(str(each.pid), each.url, each.model, each.data_dir, age(now - each.started_at)) for each in found]
    print_list(found, as_json, ("PID", "URL", "MODEL", "DATA", "AGE"), rows)


def stop(
    pid: Annotated[int | None, typer.Argument(help="which daemon (coserve ps); default: the only one")] = None,
    now: Annotated[bool, typer.Option("--now", help="let no request finish, as a second SIGTERM does")] = False,
) -> None:
    """Stop a daemon and wait for its end: requests in flight finish (--drain-seconds), jobs are checkpointed."""
    found = [daemon for daemon in running() if pid in (None, daemon.pid)]
    if len(found) != 1:
        raise StartupError(f"expected one daemon that runs, found {len(found)}; see coserve ps")
    daemon = found[0]
    for _ in range(2 if now else 1):
        with suppress(ProcessLookupError):
            os.kill(daemon.pid, signal.SIGTERM)
    wait_for_end(daemon)
    print(f"stopped {daemon.pid}")
