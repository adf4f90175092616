"""Prints the daemon's status on standard output: progress of its start, its address, and when it is ready."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from coserve.core.health import EngineStatus, Warming, warming_line

REPEAT = 10.0
"""Seconds between two lines during a start."""


class StatusLines:
    """Prints a line for each change of status, and one every `REPEAT` seconds during a start."""

    def __init__(
        self,
        host: str,
        say: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        tls: bool = False,
    ) -> None:
        """`say` prints one line; `clock` returns seconds; `tls`: the daemon speaks HTTPS."""
        self._tls = tls
        self._host, self._say, self._clock = host, say or _print, clock
        self._status: EngineStatus = "starting"
        self._repeat_at: float | None = None

    def show(self, port: int, status: EngineStatus, warming: Warming | None) -> None:
        """Print the daemon's status if it is due."""
        before, self._status = self._status, status
        if status == "starting":
            if before != "starting":
                self._repeat_at = None
                self._say("starting again; requests get 503 until then")
            if warming is not None and (self._repeat_at is None or self._clock() >= self._repeat_at):
                self._repeat_at = self._clock() + REPEAT
                self._say(f"starting: {warming_line(warming)}")
        elif before == "starting":
            self._say(f"coserve listens on {address(self._host, port, tls=self._tls)}")
            self._say("ready")


def address(host: str, port: int, *, tls: bool) -> str:
    """Return a daemon's URL."""
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def _print(line: str) -> None:
    with contextlib.suppress(OSError):  # the reader of standard output may be gone; serving continues
        print(line, flush=True)
