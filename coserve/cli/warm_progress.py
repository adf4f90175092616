"""Shows the progress of `coserve warm` on standard error: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from coserve.core.health import Warming, warming_line

COMPILES = "compiling kernels"
REPEAT = 5.0
"""Seconds between two lines if standard error is not a terminal."""


class WarmProgress:
    """Progress display. `show` is called, on any thread, with the number of finished warm-up parts and their total."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console or Console(stderr=True), clock
        self._lock = threading.Lock()
        self._began = clock()
        self._first: tuple[float, int] | None = None
        """Time of the first report, and the parts that were already done then."""
        self._printed: float | None = None
        self.done = self.total = 0
        self._bar = Progress(
            TextColumn(COMPILES),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, left="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def show(self, done: int, total: int) -> None:
        with self._lock:
            self.done, self.total = done, total
            now = self._clock()
            if self._first is None:
                self._first = now, done
            left = self._left(now)
            if self._console.is_terminal:
                text = "" if left is None else f"about {left:.0f} s left"
                self._bar.update(self._task, completed=done, total=total, left=text)
            elif self._printed is None or now - self._printed >= REPEAT:
                self._printed = now
                line = warming_line(Warming(done=done, total=total, seconds_left=left, what=COMPILES))
                self._console.print(line, highlight=False, soft_wrap=True)

    def _left(self, now: float) -> float | None:
        """Return the estimated seconds left at the pace so far; None before anything was compiled."""
        assert self._first is not None
        since, before = self._first
        if self.done == before:
            return None
        return (now - since) / (self.done - before) * (self.total - self.done)

    @property
    def full(self) -> bool:
        return self.done == self.total

    def summary(self) -> str:
        """Return the result in one line."""
        return f"warm: {self.done} of {self.total} in {self._clock() - self._began:.0f} s"
