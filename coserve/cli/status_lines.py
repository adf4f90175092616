"""The daemon's status as lines of text on standard output: where it listens, how far its warm-up is, when it is ready."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from coserve.health import Status, Warming, warming_line

REPEAT = 10.0
"""Seconds between two lines of a warm-up."""


class StatusLines:
    """Prints a line for each change of status, and one every `REPEAT` seconds of a warm-up, also of one that the engine waits for while it starts."""

    def __init__(
        self, host: str, say: Callable[[str], None] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`say` prints one line; `clock` returns seconds."""
        self._host, self._say, self._clock = host, say or _print, clock
        self._status: Status = "starting"
        self._repeat_at: float | None = None

    def show(self, port: int, status: Status, warming: Warming | None) -> None:
        """The daemon's status now."""
        before, self._status = self._status, status
        if status == "starting":
            if before != "starting":
                self._repeat_at = None
                self._say("starting again; requests get 503 until then")
            if warming is not None:
                self._show_progress("starting: ", warming)
            return
        if before == "starting":
            host = f"[{self._host}]" if ":" in self._host else self._host
            self._say(f"coserve listens on http://{host}:{port}")
            self._repeat_at = None
        if warming is not None and warming.total:
            self._show_progress("", warming)
        elif status == "ready" != before:
            self._say("ready")

    def _show_progress(self, what: str, warming: Warming) -> None:
        if self._repeat_at is None or self._clock() >= self._repeat_at:
            self._repeat_at = self._clock() + REPEAT
            self._say(what + warming_line(warming))


def _print(line: str) -> None:
    with contextlib.suppress(OSError):  # the reader of standard output may be gone; serving continues
        print(line, flush=True)
